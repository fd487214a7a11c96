"""Which collectives does a transformer layer cost, and how many bytes?

Counted in the program, not measured: the difference between a GPT of L+1 and one of L layers, over 4
ranks. `tensor`: `plans.tensor_parallel`, packed q/k/v. `sequence`: the same weights plus a batch split
by sequence (the batch of 2 is smaller than the axis), from seeds alone. `heads`: weights whole, batch
split by sequence, so that attention needs all-to-all between sequence and heads.

    python bench/communication.py

Targets: tensor exactly 2 + 2 all-reduces a layer; sequence the bytes of reduce-scatter + all-gather pairs,
which are those of the all-reduces they replace.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from common import report

import laminar
from laminar.api import load_recipe
from laminar.ir.program import BUCKETED_GRADIENTS

RANKS, WIDTH, TOKENS, BATCH = 4, 512, 4096, 2
WEIGHTS = {
    r"blocks\.\d+\.attention\.qkv\.(weight|bias)": {"tp": laminar.S(0, blocks=3)},
    r"blocks\.\d+\.attention\.out\.weight": {"tp": laminar.S(1)},
    r"blocks\.\d+\.mlp\.up\.(weight|bias)": {"tp": laminar.S(0)},
    r"blocks\.\d+\.mlp\.down\.weight": {"tp": laminar.S(1)},
}
SEQUENCE = {"batch.*": {"tp": laminar.S(1)}}


def traffic(layers: int, way: str) -> tuple[Counter[str], Counter[str]]:
    """Collectives and bytes of a model, by phase and kind, gradient buckets left out."""
    load_recipe(f"{Path(__file__).parent.parent}/examples/gpt.py:deep")
    gpt = sys.modules["laminar_recipe_gpt"]
    config = gpt.Config(layers=layers, d=WIDTH, heads=8, vocab=1024, tokens=TOKENS, batch=BATCH)
    recipe = gpt.recipe(config, lr=1e-3, steps=1)
    with torch.device("meta"):
        model = recipe.model()
    graph = laminar.capture(model, recipe.loss, next(iter(recipe.data())))
    mesh = laminar.Mesh({"tp": RANKS})
    if way == "tensor":
        plan = laminar.plans.tensor_parallel(graph, mesh)
    else:
        seeds = {**WEIGHTS, **SEQUENCE} if way == "sequence" else {**SEQUENCE, "blocks.*": {"tp": laminar.B}}
        plan = laminar.plans.seeded(graph, mesh, seeds)
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for i in laminar.lower(graph, plan).collectives:
        if i.cause is not None and i.cause.what not in (BUCKETED_GRADIENTS, "grad"):
            count[f"{i.phase} {i.kind}"] += 1
            size[f"{i.phase} {i.kind}"] += i.bytes
    return count, size


def main() -> None:
    """Print what one more layer adds."""
    activation = BATCH * TOKENS * WIDTH * 4
    for way in ("tensor", "sequence", "heads"):
        one, two = traffic(2, way), traffic(3, way)
        count = {k: two[0][k] - one[0][k] for k in two[0] if two[0][k] != one[0][k]}
        size = {k: two[1][k] - one[1][k] for k in two[1] if two[1][k] != one[1][k]}
        report(
            "communication",
            {
                "way": way,
                "ranks": RANKS,
                "per_layer": count,
                "bytes_per_layer": size,
                "bytes_total": sum(size.values()),
                "four_all_reduces": int(4 * 2 * (RANKS - 1) / RANKS * activation),
            },
        )


if __name__ == "__main__":
    main()

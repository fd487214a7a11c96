"""How long from a model to a program? Capture, complete a data x tensor-parallel plan, lower.

A 24-layer GPT (400M parameters, on the meta device), mesh dp=2, tp=4.

    python bench/compile.py [--repeats 3]

Target: at most 10 s on 2 cores.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch
from common import report

from laminar.api import capture, load_recipe
from laminar.ir.mesh import Mesh
from laminar.lower.lower import lower
from laminar.placement.presets import tensor_parallel


def main() -> None:
    """Time the three arrows, each run in this one process; the first includes loading torch's tracer."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--repeats", type=int, default=3)
    given = args.parse_args()
    recipe = load_recipe(f"{Path(__file__).parent.parent}/examples/gpt.py:deep")
    batch = next(iter(recipe.data()))
    rows = []
    for _ in range(given.repeats):
        with torch.device("meta"):
            model = recipe.model()
        marks = [time.perf_counter()]
        graph = capture(model, recipe.loss, batch)
        marks.append(time.perf_counter())
        plan = tensor_parallel(graph, Mesh({"dp": 2, "tp": 4}))
        marks.append(time.perf_counter())
        program = lower(graph, plan)
        marks.append(time.perf_counter())
        rows.append([b - a for a, b in itertools.pairwise(marks)])
    first = rows[0]
    report(
        "compile",
        {
            "capture_s": round(first[0], 2),
            "complete_s": round(first[1], 2),
            "lower_s": round(first[2], 2),
            "total_s": round(sum(first), 2),
            "all_totals_s": [round(sum(r), 2) for r in rows],
            "target_s": 10.0,
            "nodes": len(graph.nodes),
            "solver": plan.account["solver"],
            "collectives": program.counts(),
        },
    )


if __name__ == "__main__":
    main()

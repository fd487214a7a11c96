"""Models and machines for which people know what a good plan looks like, and the plans that the search finds there.

`python -m tests.support.golden_plans` searches all of them anew and writes `tests/golden/<case>.json`: the choice,
where every weight lies, the simulated step, and beside it the step of the plan that people would write by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laminar
from laminar import Graph, Mesh
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.ir.sbp import show
from laminar.placement.micro_batch import micro

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import dlrm
import gpt
import moe

GOLDEN = Path(__file__).parents[1] / "golden"
META = torch.device("meta")
Made = tuple[nn.Module, Callable[[Any, Any], Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """A model on a machine, and what people would do there."""

    make: Callable[[], Made]
    cluster: str
    expected: Callable[[Graph], Plan | Staged]
    """The plan that people would write."""
    weights: dict[str, str]
    """Where they would have some of the weights, by name; what a search finds may differ if it is faster."""
    options: dict[str, Any] = field(default_factory=dict)
    stages: int = 1

    def graph(self) -> Graph:
        """Of the whole batch."""
        return laminar.capture(*self.make())

    def found(self, graph: Graph) -> Plan | Staged:
        """The search's plan, with time to finish."""
        return laminar.plan(graph, self.cluster, budget_s=600, **self.options)

    def expected_s(self, graph: Graph) -> float:
        """Simulated seconds of the plan that people would write."""
        plan, cluster = self.expected(graph), laminar.Cluster.preset(self.cluster)
        if isinstance(plan, Staged):
            return predict_staged(micro(graph, plan.micro_batches), plan, cluster).seconds
        return predict(graph, plan, cluster).seconds


def ids(batch: int, tokens: int) -> dict[str, Tensor]:
    """Sequences and what follows them."""
    some = torch.zeros(batch, tokens, dtype=torch.long, device=META)
    return {"ids": some, "target": some}


def gpt_of(layers: int, d: int, heads: int, tokens: int, batch: int) -> Made:
    """In bfloat16, without weights."""
    config = gpt.Config(layers=layers, d=d, heads=heads, vocab=50304, tokens=tokens, batch=batch)
    with META:
        return gpt.GPT(config).bfloat16(), gpt.loss, ids(batch, tokens)


def moe_of(experts: int, hidden: int) -> Made:
    """Two blocks with a wide mixture each."""
    with META:
        model = moe.MoE(layers=2, d=1024, heads=16, hidden=hidden, experts=experts, vocab=32000, tokens=512)
    return model.bfloat16(), moe.loss, ids(16, 512)


def dlrm_of(rows: int, tables: int, d: int, batch: int) -> Made:
    """Nearly all of it in tables."""
    zeros = partial(torch.zeros, device=META)
    with META:
        model = dlrm.DLRM(numbers=13, tables=[rows] * tables, bag_rows=rows, d=d)
    some = {"ids": zeros(batch, tables, dtype=torch.long), "bag": zeros(batch, 4, dtype=torch.long)}
    return model, dlrm.loss, {"numbers": zeros(batch, 13), "click": zeros(batch), **some}


def mlp_of(*widths: int) -> Made:
    """Layers that are much wider than the batch is long."""
    with META:
        model = dlrm.mlp(*widths).bfloat16()
    x = torch.zeros(64, widths[0], dtype=torch.bfloat16, device=META)
    return model, lambda m, b: m(b["x"]).float().square().mean(), {"x": x}


def data(graph: Graph) -> Plan:
    return laminar.plans.data_parallel(graph, Mesh({"dp": 8}))


def tensor(graph: Graph) -> Plan:
    return laminar.plans.tensor_parallel(graph, Mesh({"tp": 8}))


CASES = {
    "big_layers": Case(
        partial(gpt_of, 2, 8192, 64, 2048, 2),
        "8xh100",
        tensor,
        {
            "blocks.0.attention.qkv.weight": "S(0, blocks=3)",
            "blocks.0.attention.out.weight": "S(1)",
            "blocks.0.mlp.up.weight": "S(0)",
            "blocks.0.mlp.down.weight": "S(1)",
        },
    ),
    "small_layers": Case(
        partial(gpt_of, 2, 512, 8, 1024, 64),
        "8xh100",
        data,
        {"blocks.0.attention.qkv.weight": "B", "blocks.0.mlp.up.weight": "B", "blocks.0.mlp.down.weight": "B"},
    ),
    "little_memory": Case(
        partial(gpt_of, 2, 4096, 32, 2048, 32),
        "8xh100",
        lambda g: laminar.plans.zero(g, Mesh({"dp": 8}), stage=3),
        {"blocks.0.attention.qkv.weight": "S(0)", "blocks.0.mlp.down.weight": "S(0)"},
        {"memory_bytes": 9e9},
    ),
    "tables": Case(
        partial(dlrm_of, 2_000_000, 8, 64, 8192),
        "8xh100",
        data,
        {"tables.0.weight": "S(1)", "tables.7.weight": "S(1)", "bag.weight": "S(1)"},
    ),
    "experts": Case(
        partial(moe_of, 8, 4096),
        "8xh100",
        data,
        {"blocks.0.experts.up": "S(0)", "blocks.0.experts.down": "S(0)", "blocks.0.qkv.weight": "B"},
    ),
    "wide_inside": Case(partial(mlp_of, 8192, 32768, 8192), "8xh100", tensor, {"0.weight": "S(0)", "2.weight": "S(1)"}),
    "slow_network": Case(
        partial(gpt_of, 8, 2048, 16, 1024, 32),
        "4x1xh100@nvlink+eth50",
        lambda g: laminar.plans.pipeline(micro(g, 8), stages=4, microbatches=8),
        {},
        stages=4,
    ),
}


def summary(plan: Plan | Staged, expected_s: float) -> dict[str, Any]:
    """What is kept of a plan that was found."""
    choice = plan.account["choice"]
    inner = plan.stages[0].plan if isinstance(plan, Staged) else plan
    weights = [s.plan.inputs for s in plan.stages] if isinstance(plan, Staged) else [plan.inputs]
    lie = {n: show(nd) for held in weights for n, nd in held.items() if not n.startswith(("batch", "rng", "scale"))}
    return {
        "plan": choice["plan"],
        "mesh": dict(zip(inner.mesh.names, inner.mesh.sizes, strict=True)),
        **{k: choice[k] for k in ("stages", "microbatches", "virtual", "recompute", "zero")},
        "step_ms": round((plan.step_s or 0.0) * 1e3, 6),
        "by_hand_ms": round(expected_s * 1e3, 6),
        "weights": lie,
    }


def main() -> None:
    """Write all of them."""
    GOLDEN.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CASES:
        graph = CASES[name].graph()
        made = summary(CASES[name].found(graph), CASES[name].expected_s(graph))
        (GOLDEN / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")
        print(f"{name}: {made['plan']}, {made['step_ms']:.3f} ms; by hand {made['by_hand_ms']:.3f} ms")


if __name__ == "__main__":
    main()

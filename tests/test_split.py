"""Graphs cut into stages: any cut of any model computes what the whole graph computes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from laminar.capture.torch_ops import caller, unplain
from laminar.errors import PlanError
from laminar.ir.codec import Ref
from laminar.ir.graph import Graph, map_refs
from laminar.lower.split import Split, light_ops, split
from laminar.runtime.verify import SMALL, error_of
from tests.zoo import NAMES, Specimen, specimen


def run_stages(cut: Split, one: Specimen) -> dict[str, Tensor]:
    """Forward parts in the order of stages, then backward parts in the other: what a pipeline does with one batch."""
    memory: list[dict[Ref, Tensor]] = [
        {Ref(i.name): one.inputs[i.name] for i in g.inputs if i.kind != "given"}
        | {Ref(c.name): one.constants[c.name] for c in g.constants}
        for g in cut.graphs
    ]

    def deliver(phase: str) -> None:
        for e in cut.edges:
            if e.phase == phase and e.ref in memory[e.src]:
                memory[e.dst][Ref(e.name)] = memory[e.src][e.ref]

    def part(stage: int, forward: bool) -> None:
        here = memory[stage]
        for node in cut.graphs[stage].nodes:
            if (node.phase == "forward") == forward and Ref(node.name) not in here:
                if not forward or all(r in here for r in node.ins):
                    out = caller(node.op)(*[unplain(map_refs(a, here.__getitem__)) for a in node.args])
                    out = tuple(out) if isinstance(out, (tuple, list)) else (out,)
                    here.update({Ref(node.name, i): v for i, v in enumerate(out)})

    with torch.no_grad():
        for stage in range(len(cut.graphs)):
            part(stage, forward=True)
            deliver("forward")
        for stage in reversed(range(len(cut.graphs))):
            part(stage, forward=False)
            deliver("backward")
    out: dict[str, Tensor] = {}
    for g, here in zip(cut.graphs, memory, strict=True):
        for o in g.outputs:
            if o.kind != "sent":
                key = f"{o.kind}:{o.name}"
                out[key] = out[key] + here[o.ref] if key in out else here[o.ref]
    return out


def chain(graph: Graph, stages: int, rng: random.Random) -> dict[str, int]:
    """Forward ops in order, cut at random places."""
    ops = [n.name for n in graph.nodes if n.phase == "forward"]
    cuts = sorted(rng.sample(range(1, len(ops)), stages - 1))
    return {name: sum(i >= c for c in cuts) for i, name in enumerate(ops)}


@pytest.mark.parametrize("name", NAMES)
def test_any_cut_of_a_model_gives_its_numbers(name: str) -> None:
    """Losses, gradients and buffers, in float64, whatever stands at the cuts; every op runs in exactly one stage."""
    one = specimen(name, "f64")
    rng = random.Random(name)
    largest = max(float(v.abs().max()) for k, v in one.want.items() if k.startswith("grad:") and v.numel())
    for stages in (2, 3, 4):
        for _ in range(3):
            cut = split(one.graph, chain(one.graph, stages, rng), stages)
            got = run_stages(cut, one)
            assert got.keys() == one.want.keys()
            for key, want in one.want.items():
                error = error_of(got[key], want, SMALL * largest if key.startswith("grad:") else 0.0)
                assert error <= 1e-9, f"{key} of {name} is off by {error:.1e}"
            assert all(e.src < e.dst if e.phase == "forward" else e.src > e.dst for e in cut.edges)
            light = light_ops(one.graph)
            once = [n.name for g in cut.graphs for n in g.nodes if n.name not in light]
            assert len(once) == len(set(once))

"""Graphs cut into stages: any cut of any model computes what the whole graph computes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar.capture.ops.torch_ops import caller, unplain
from laminar.errors import PlanError
from laminar.ir.graph import Graph, Node, map_refs
from laminar.ir.serial.codec import Ref
from laminar.lower.stages.split_stages import StageSplit, light_ops, split_graph
from laminar.runtime.check.rounding import TermSizes
from laminar.runtime.check.verify import judged, relative_error
from tests.support.zoo import FEW, Specimen, captured, specimen, wide


def run_stages(cut: StageSplit, one: Specimen) -> dict[str, Tensor]:
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
            due = (node.phase == "forward") == forward and Ref(node.name) not in here
            if due and (not forward or all(r in here for r in node.ins)):
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


@pytest.mark.parametrize("name", FEW)
def test_any_cut_of_a_model_gives_its_numbers(name: str) -> None:
    """Losses, gradients and buffers, in float64, whatever stands at the cuts; every op runs in exactly one stage."""
    one = specimen(name, "f64")
    rng = random.Random(name)
    sized = TermSizes(one.graph, one.inputs, one.constants)
    for stages in (2, 3, 4):
        for _ in range(3):
            cut = split_graph(one.graph, chain(one.graph, stages, rng), stages)
            got = run_stages(cut, one)
            assert got.keys() == one.want.keys()
            for key, want in one.want.items():
                error = judged(key, got[key], want, 1e-9, sized)
                assert error <= 1e-9, f"{key} of {name} is off by {error:.1e}"
            assert all(e.src < e.dst if e.phase == "forward" else e.src > e.dst for e in cut.edges)
            light = light_ops(one.graph)
            once = [n.name for g in cut.graphs for n in g.nodes if n.name not in light]
            assert len(once) == len(set(once))


class Towers(nn.Module):
    """Two towers that meet, and a table that is read at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.left, self.right = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2))
        self.top = nn.Linear(12, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        both = torch.cat([self.left(x), self.right(x)], -1)
        return self.top(both) @ self.table.weight.t()


def towers() -> Specimen:
    """Captured, in float64."""
    torch.manual_seed(0)
    ids = torch.randint(12, (5, 3))
    made = laminar.Recipe(Towers, lambda m, b: m(b["ids"]).logsumexp(-1).square().mean(), lambda: [{"ids": ids}])
    return wide(captured(made, "towers"))


def staged(graph: Graph, stage: Callable[[Node], int]) -> dict[str, int]:
    """A stage for every forward op."""
    return {n.name: stage(n) for n in graph.nodes if n.phase == "forward"}


def test_branches_may_be_stages_side_by_side() -> None:
    """Stages form a DAG: neither tower waits for the other, and their gradients meet where their input was made."""
    one = towers()

    def stage(node: Node) -> int:
        return {"table": 0, "left": 1, "right": 2}.get(node.module.split(".")[0], 3)

    cut = split_graph(one.graph, staged(one.graph, stage), 4)
    pairs = {(e.src, e.dst, e.phase) for e in cut.edges}
    assert {p for p in pairs if p[2] == "forward"} == {
        (0, 1, "forward"),
        (0, 2, "forward"),
        (1, 3, "forward"),
        (2, 3, "forward"),
    }
    assert {(1, 0, "backward"), (2, 0, "backward")} <= pairs
    got = run_stages(cut, one)
    assert all(relative_error(got[k], w, 1e-12) <= 1e-9 for k, w in one.want.items())


def test_a_tied_weight_has_its_gradient_summed_once_per_step() -> None:
    """Each stage that reads it gives the sum of its own terms; no gradient of a weight passes between stages."""
    one = towers()
    cut = split_graph(one.graph, staged(one.graph, lambda n: int(n.module.split(".")[0] not in ("table", "left"))), 2)
    assert cut.tied == {"table.weight": (0, 1)}
    grads = [[o.name for o in g.outputs if o.kind == "grad"] for g in cut.graphs]
    assert "table.weight" in grads[0] and "table.weight" in grads[1]
    assert all(one.graph.specs[e.ref].shape != (12, 6) for e in cut.edges)
    got = run_stages(cut, one)
    assert all(relative_error(got[k], w, 1e-12) <= 1e-9 for k, w in one.want.items())


def test_stages_that_wait_for_each_other_are_refused_by_name() -> None:
    """The first tower before the second and behind it at once."""
    one = towers()

    def stage(node: Node) -> int:
        return int(node.module in ("left.0", "left.2", "top"))

    with pytest.raises(PlanError, match=r"stages \d and \d wait for each other: %\w+ reads %\w+"):
        split_graph(one.graph, staged(one.graph, stage), 2)
    with pytest.raises(PlanError, match="belongs to no stage"):
        split_graph(one.graph, {}, 2)
    with pytest.raises(PlanError, match="is in stage 7"):
        split_graph(one.graph, staged(one.graph, lambda n: 7), 2)

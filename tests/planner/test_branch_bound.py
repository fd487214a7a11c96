"""Branches on devices of their own: no plan of the kind is simulated faster than its bound, whatever it is.

Sensible plans, random ones, and those in which a descent ends that tries every option of every op.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar.errors import LaminarError
from laminar.forecast.pipeline_step import predict_staged
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.placement.random_plan import random_plan
from laminar.planner.search.best_first.branches import Branches, BranchWay
from laminar.planner.space.cell import Cell
from laminar.staging.stage_plans import arranged
from tests.support.branched_models import branches, towers
from tests.support.marks import slow
from tests.support.tried_plans import Tried


def simulated_s(found: Branches, way: BranchWay, plans: Sequence[Any]) -> float:
    """Seconds of a way with these plans, of the whole graph, on its sets."""
    graph = found.model.whole(way.micro_batches)
    staged = arranged(graph, found.stage_of(way), way.homes, plans, way.micro_batches)
    return predict_staged(graph, staged, found.request.cluster).seconds


@pytest.mark.parametrize(
    ("cluster", "width", "rows"),
    [("4xcpu", 1024, 32), ("4xh100@pcie", 4096, 8192), slow("2x2xa100@eth25", 2048, 512)],
)
@pytest.mark.parametrize("stem", [False, True])
def test_nothing_of_the_kind_is_simulated_faster_than_its_bound(
    cluster: str, width: int, rows: int, stem: bool
) -> None:
    """Every way with all its sensible placements, and with random ones: each set draws its own."""
    found = branches(towers(width, (2, 1, 1), rows, stem), cluster)
    rng = random.Random(0)
    tried = 0
    for way, rough_s in list(found.at.items())[:4]:
        bound_s = found.bound_s(way, exchanges=True)
        assert bound_s >= rough_s
        options = [found.options(size, way.micro_batches) for size in way.sizes]
        for k in range(max(map(len, options))):
            one = found.simulated(way, [o[k % len(o)] for o in options])
            assert one is not None and 0 < bound_s <= one.final.seconds, (way, one)
            assert isinstance(one.final.plan, Staged)
        graph = found.model.whole(way.micro_batches)
        for _ in range(3):
            plans = [random_plan(graph, Mesh({"dp": size}), rng.randrange(10**6)) for size in way.sizes]
            try:
                assert bound_s <= simulated_s(found, way, plans)
                tried += 1
            except LaminarError:  # a random plan need not be one that stages can pass to each other
                continue
    assert tried


class Pair(nn.Module):
    """One product each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.empty(width, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, 0] @ self.a).square().mean() + (x[:, 1] @ self.b).square().mean()


def pair(width: int, rows: int) -> Graph:
    """The graph of a training step."""
    with torch.device("meta"):
        return laminar.capture(Pair(width), lambda model, x: model(x), torch.zeros(1, 2, width).expand(rows, -1, -1))


@pytest.mark.parametrize("cluster", ["4xh100@pcie", "4xcpu"])
def test_no_plan_with_branches_apart_that_a_descent_ends_in_is_faster_than_the_bound(cluster: str) -> None:
    """One op after the other takes whatever makes the step shorter, on both sets at once."""
    found = branches(pair(4096, 8192), cluster)
    (way,) = (w for w in found.at if w.sizes == (2, 2))
    tried = Tried(found.model.graph, cluster, Cell(1, 1, 1, 2, 1))

    def seconds(plan: Plan) -> float:
        try:
            return simulated_s(found, way, [plan, plan])
        except LaminarError:
            return float("inf")

    best = tried.best(1, seconds, most=3)
    bound_s = found.bound_s(way, exchanges=True)
    assert found.at[way] <= bound_s <= best < float("inf"), (bound_s, best)


def test_a_bound_that_counts_too_much_is_caught() -> None:
    """The same check with ops that are not divided by the devices of a set."""
    found = branches(towers(4096, (3, 3), 8192), "4xh100@pcie")
    way = next(w for w in found.at if w.sizes == (2, 2))
    floor = next(iter(found.floors.values()))
    floor.least = {name: replace(one, calls_s=one.calls_s + one.work_s) for name, one in floor.least.items()}
    one = found.simulated(way, [found.options(size, 1)[0] for size in way.sizes])
    assert one is not None and floor.seconds(way.sizes, way.homes) > one.final.seconds

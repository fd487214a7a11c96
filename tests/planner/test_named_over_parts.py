"""Where parts of a cluster differ, no pipeline with a name over all of them is faster than what a search finds.

The oracle is the simulation in full of what `laminar.plans.pipeline` makes, on a budget of nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import laminar
from laminar.errors import LaminarError
from laminar.forecast.pipeline_step import predict_staged
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.staged import Staged
from laminar.planner.bounds.mixed_bound import SidesBounds
from laminar.planner.estimate.mixed_pipelines import Sides, pipeline_on
from laminar.planner.report.explain import OVERRUN_S
from laminar.planner.search import mixed_cluster
from laminar.planner.search.mixed_cluster import MixedSearch, best_mixed
from laminar.planner.search.named_over_parts import named_over_parts, typed
from laminar.planner.space.request import Request
from laminar.staging.stage_plans import pipeline
from tests.attack.models import graph_of
from tests.attack.plans import part_of, piped
from tests.support.marks import slow
from tests.support.traced_models import traced


def wide() -> Graph:
    """Enough work that a second device is worth its hops."""
    return traced(5, batch=16, d=1024, tokens=256)


def model_of(name: str) -> Graph:
    """Of the attack's, or the wide one."""
    return wide() if name == "wide" else graph_of(name)


def searched_s(graph: Graph, spec: str) -> float:
    """What a search without a budget finds."""
    search = MixedSearch(graph, Request(Cluster.preset(spec), budget_s=0.0))
    search.run()
    return search.best_s


def simulated_s(graph: Graph, spec: str) -> Iterator[float]:
    """Pipelines of the default cut, as somebody else's list has them, and cut for the cluster; those that fit."""
    cluster = Cluster.preset(spec)
    search = MixedSearch(graph, Request(cluster))
    rooms = [room for room, part in zip(search.rooms, cluster.parts, strict=True) for _ in range(part.devices)]
    for make in piped(graph, cluster.devices):
        with suppress(LaminarError):
            even = make()
            part, first = part_of(graph, even.micro_batches), even.places[0].mesh
            speedy = pipeline_on(part, cluster, len(even.places), even.micro_batches, 1, first)
            for staged in (even, speedy):
                ran = predict_staged(part, staged, cluster)
                if all(peak <= rooms[p.ranks[0]] for peak, p in zip(ran.peaks, staged.places, strict=True)):
                    yield ran.seconds


CASES = [
    ("wide", "1xa100-40g+1xa100-80g"),
    ("gpt.py:tiny", "2xh100+2xa100"),
    slow("wide", "2xh100+2xa100"),
    slow("wide", "2xa100@pcie+2xh100@pcie"),
    slow("bert.py:tiny", "4xa100+4xh100"),
    slow("unet.py:tiny", "2xh100+2xa100"),
]


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_no_pipeline_with_a_name_is_faster_than_what_is_found_in_no_time(name: str, spec: str) -> None:
    graph = model_of(name)
    found, others = searched_s(graph, spec), list(simulated_s(graph, spec))
    assert others
    assert found <= min(others)


def test_pipelines_with_a_name_are_what_makes_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a search that has no time takes one part alone, which is slower."""
    graph, spec = wide(), "1xa100-40g+1xa100-80g"
    monkeypatch.setattr(MixedSearch, "try_named", lambda self: None)
    assert searched_s(graph, spec) > min(simulated_s(graph, spec))


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_the_bound_of_an_even_cut_holds(name: str, spec: str) -> None:
    """And says more than the bound of its cell, where there is work to be done."""
    graph, cluster = model_of(name), Cluster.preset(spec)
    search = MixedSearch(graph, Request(cluster))
    says_more = 0
    for one in named_over_parts(search.request, search.cells):
        deep = search.shop.model.whole(one.cell.micro_batches)
        bound_s = search.bounds.even_s(one.cell, deep)
        staged = pipeline(deep, one.cell.stages, one.cell.micro_batches, inner=one.cell.sides[0].mesh)
        assert predict_staged(deep, staged, cluster).seconds >= bound_s
        says_more += bound_s > search.at[one.cell]
    assert says_more or name != "wide"


def test_a_pipeline_below_the_bound_of_an_even_cut_takes_the_certificate_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one below the bound of its cell does; with the check on, the search ends with an error."""
    graph, request = wide(), Request(Cluster.preset("1xa100-40g+1xa100-80g"), budget_s=0.0)
    for method in ("confirm", "alone"):  # or what a wrong bound is about is ruled out by it
        monkeypatch.setattr(MixedSearch, method, lambda *args: None)

    def proof() -> dict[str, Any]:
        return dict(best_mixed(graph, request).account["certificate"])

    assert "withdrawn" not in proof() and proof()["bound_s"] > 0
    true_s = SidesBounds.even_s
    monkeypatch.setattr(SidesBounds, "even_s", lambda self, cell, graph: 100 * true_s(self, cell, graph))
    assert "is simulated at" in proof()["withdrawn"][0] and proof()["bound_s"] == 0.0
    monkeypatch.setenv("LAMINAR_CHECK_BOUNDS", "1")
    with pytest.raises(LaminarError, match="a bound is wrong"):
        proof()


@pytest.mark.parametrize("spec", ["2xa100-40g", "1xa100-40g+1xa100-80g"])
def test_time_on_top_of_the_budget_is_told(spec: str) -> None:
    """For plans with a name, on devices of one kind and of several."""
    plan = laminar.plan(wide(), Cluster.preset(spec), budget_s=0.0)
    assert plan.account["budget_s"] == 0.0 and plan.account["search_s"] > OVERRUN_S
    assert "s over its budget: plans with a name are always priced" in plan.explain()


def test_names_follow_what_is_asked_for() -> None:
    """Pinned stages, no tensor parallelism, and none where placements or ZeRO are pinned."""
    graph, cluster = graph_of("gpt.py:tiny"), Cluster.preset("2xh100+2xa100")

    def cells(**asked: object) -> list[Sides]:
        request = Request(cluster, **asked)  # type: ignore[arg-type]
        return [one.cell for one in named_over_parts(request, MixedSearch(graph, request).cells)]

    assert {c.stages for c in cells()} == {2, 4}
    assert {c.stages for c in cells(pin={"stages": 2})} == {2}
    assert {s.tp for c in cells(only=("data", "pipeline")) for s in c.sides} == {1}
    assert not cells(pin={"zero": 1})
    assert all(c.recompute for c in cells(pin={"recompute": 1}))


def test_a_pipeline_that_cannot_be_written_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is refused for."""

    def refused(*args: object) -> Staged:
        raise LaminarError("no rule for this op on this mesh")

    monkeypatch.setattr(mixed_cluster, "typed", refused)
    assert 0 < searched_s(wide(), "1xa100-40g+1xa100-80g") < float("inf")


def test_blocks_are_made_again_where_nothing_else_fits() -> None:
    """A pipeline with a name that has no room is tried with recompute."""
    graph, cluster = wide(), Cluster.preset("1xa100-40g+1xa100-80g")
    pin = {"stages": 2, "microbatches": 2}
    free = MixedSearch(graph, Request(cluster, budget_s=0.0, pin=pin))
    free.try_named()
    assert free.finals and not any(f.cell.recompute for f in free.finals)
    least = min(max(predict_staged(deep, staged, cluster).peaks) for deep, staged in _named(free))
    tight = MixedSearch(graph, Request(cluster, budget_s=0.0, memory_bytes=0.95 * least, pin=pin))
    tight.try_named()
    assert tight.finals and all(f.cell.recompute for f in tight.finals)


def _named(search: MixedSearch) -> Iterator[tuple[Graph, Staged]]:
    for one in named_over_parts(search.request, search.cells):
        deep = search.shop.model.whole(one.cell.micro_batches)
        for by_speed in (False, True):
            yield deep, typed(deep, search.cluster, one.cell, by_speed, None)

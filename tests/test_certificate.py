"""The sentence "no plan of this space is simulated faster", held against plans that somebody could write.

Whatever a search returns as its bound, no plan of its space may be simulated faster: not the presets, not pipelines cut
by hand, on odd machines as little as on ordinary ones. And what contradicts a bound takes the certificate away.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.errors import LaminarError
from laminar.events import Event, subscribe, unsubscribe
from laminar.forecast import predict, predict_staged
from laminar.ir.cluster import Cluster, Figure
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.planner.bound import Bounds
from laminar.planner.cells import Cell
from laminar.planner.find import find
from laminar.planner.request import Request
from laminar.planner.score import Model
from laminar.search.micro import micro
from laminar.staging import pipeline, work_s
from tests.marks import slow
from tests.test_search import traced
from tests.zoo import specimen

PROFILE = Path(__file__).parents[1] / "bench" / "results" / "profile_2.json"


@cache
def graph_of(name: str) -> Graph:
    """A model of the zoo, or a GPT of so many layers, whose work is large beside what a step costs anyway."""
    return traced(int(name), batch=16, d=256, tokens=64) if name.isdigit() else specimen(name).graph


def slow_link(spec: str, bytes_per_s: float) -> Cluster:
    """A machine whose ranks are far from each other."""
    cluster = Cluster.preset(spec)
    level = replace(cluster.levels[-1], bytes_per_s=Figure(bytes_per_s, "assumed"))
    return replace(cluster, levels=(*cluster.levels[:-1], level))


def presets_of(graph: Graph, devices: int) -> dict[str, Any]:
    """Plans that a user could type, for all devices, without stages; what can't be made is left out."""
    found: dict[str, Any] = {}

    def add(name: str, make: Any) -> None:
        try:
            found[name] = make()
        except LaminarError:
            return

    mesh, plans = Mesh({"dp": devices}), laminar.plans
    add("data", lambda: plans.data_parallel(graph, mesh))
    for stage in (1, 2, 3):
        add(f"zero{stage}", lambda stage=stage: plans.zero(graph, mesh, stage=stage))
    add("zero3 once", lambda: plans.zero(graph, mesh, stage=3, gather_once=True))
    add("tensor", lambda: plans.tensor_parallel(graph, Mesh({"tp": devices})))
    return found


def staged_s(graph: Graph, cluster: Cluster, stages: int, microbatches: int, **options: Any) -> float:
    """Of a pipeline with the default cut, simulated; infinite if it can't be made."""
    try:
        part = micro(graph, microbatches)
        inner = Mesh({"dp": cluster.devices // stages})
        plan = pipeline(part, stages, microbatches, inner=inner, couple="microbatch", **options)
        return predict_staged(part, plan, cluster).seconds
    except LaminarError:
        return math.inf


def skewed(graph: Graph, cluster: Cluster, stages: int, microbatches: int) -> list[float]:
    """Schedules of the default cut, and cuts that make the first stages heavier, which fill and empty a pipe sooner."""
    work = work_s(micro(graph, microbatches))
    found = [staged_s(graph, cluster, stages, microbatches, schedule=how) for how in (None, "gpipe", "zero-bubble")]
    found.append(staged_s(graph, cluster, stages, microbatches, window=2, stash=2.0))
    for lean in (0.9, 0.75, 0.6):  # of an op's seconds, what they are said to be at the place before
        told = [{name: s * lean ** (stages - 1 - p) for name, s in work.items()} for p in range(stages)]
        found.append(staged_s(graph, cluster, stages, microbatches, speeds=told))
    return found


@pytest.mark.parametrize("name", ["unet.py:tiny", "7", "5", slow("resnet.py:tiny"), slow("t5.py:tiny")])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 4), (4, 4)])
def test_no_pipeline_is_simulated_faster_than_the_bound_of_its_cell(name: str, stages: int, microbatches: int) -> None:
    """Wherever it is cut: a bound that takes equal stages for granted is 5 % above the GPT's."""
    graph, cluster = graph_of(name), Cluster.preset(f"{stages}xcpu")
    bounds = Bounds(Model(graph, Request(cluster)))
    cell = Cell(stages, microbatches, 1, 1, 1)
    least = max(bounds.rough(cell), bounds.quick(cell).seconds, bounds.of(cell).seconds)
    assert 0 < least <= min(skewed(graph, cluster, stages, microbatches))


@pytest.mark.parametrize(
    ("name", "bytes_per_s", "pin"),
    [("unet.py:tiny", 1e7, {}), ("7", 1e7, {}), ("7", 1e9, {"stages": 2, "microbatches": 2})],
)
def test_no_pipeline_that_one_could_type_is_faster_than_what_a_search_proves(
    name: str, bytes_per_s: float, pin: dict[str, int]
) -> None:
    """End to end: what comes back as `bound_s`, on two ranks that are far apart."""
    graph, cluster = graph_of(name), slow_link("2xcpu", bytes_per_s)
    found = laminar.plan(graph, cluster, pin=pin, budget_s=10)
    assert found.bound_s is not None and found.step_s is not None
    for microbatches in (2, 4, 8):
        if microbatches == pin.get("microbatches", microbatches):
            assert found.bound_s <= min(skewed(graph, cluster, 2, microbatches)), microbatches


@pytest.mark.parametrize("name", ["gpt.py:tiny", "mlp.py:tiny", slow("resnet.py:tiny"), slow("moe.py:tiny")])
def test_no_preset_is_faster_than_what_is_proved_on_a_measured_machine(name: str) -> None:
    """Prices from a profile: the bound reads the same ones as the simulator."""
    graph, cluster = graph_of(name), Cluster.load(PROFILE)
    found = laminar.plan(graph, cluster, budget_s=10)
    assert found.bound_s is not None and found.step_s is not None
    for kind, plan in presets_of(graph, cluster.devices).items():
        seconds = predict(graph, plan, cluster).seconds
        assert found.bound_s <= seconds, kind
        assert found.step_s <= seconds * 1.0001, kind


# --- bounds that are wrong


def test_a_plan_below_its_bound_takes_the_certificate_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an event, and a sentence that says so; nothing is clipped to what was found."""
    true = Bounds.rough
    monkeypatch.setattr(Bounds, "rough", lambda self, cell: 1.001 * true(self, cell) + (cell.tp == 1) * 1.0)
    said: list[Event] = []
    subscribe(said.append)
    try:
        found = find(graph_of("5"), Request(Cluster.preset("2xcpu")))
    finally:
        unsubscribe(said.append)
    assert found.certificate.contradictions and found.certificate.bound_s == 0.0
    assert "withdrawn" in str(found.certificate) and found.certificate.to_json()["withdrawn"]
    assert any(event.kind == "certificate_withdrawn" for event in said)
    monkeypatch.setenv("LAMINAR_CHECK_BOUNDS", "1")
    with pytest.raises(LaminarError, match="a bound is wrong"):
        find(graph_of("5"), Request(Cluster.preset("2xcpu")))


def test_what_holds_is_not_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the check on, a search goes through to its end."""
    monkeypatch.setenv("LAMINAR_CHECK_BOUNDS", "1")
    found = find(graph_of("5"), Request(Cluster.preset("4xcpu")))
    assert not found.certificate.contradictions
    assert 0 < found.certificate.bound_s <= found.certificate.step_s
    assert found.certificate.gap == pytest.approx(1 - found.certificate.bound_s / found.certificate.step_s)

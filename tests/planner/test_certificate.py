"""The sentence "no plan of this space is simulated faster", held against plans that somebody could write.

Whatever a search returns as its bound, no plan of its space may be simulated faster: not the presets, not pipelines cut
by hand, on odd machines as little as on ordinary ones. And what contradicts a bound takes the certificate away.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

import laminar
from laminar.errors import LaminarError
from laminar.events import Event, subscribe, unsubscribe
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.placement.micro_batch import micro
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.search.best_first.search import find
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request
from laminar.staging.balance import work_s
from laminar.staging.stage_plans import pipeline
from tests.attack.models import PROFILE, graph_of, slow_link
from tests.attack.plans import typed
from tests.support.marks import slow


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


@pytest.mark.parametrize(
    "name",
    ["gpt.py:tiny", "mlp.py:tiny", *map(slow, ("moe.py:tiny", "resnet.py:small", "moe.py:small", "gpt.py:small"))],
)
def test_no_preset_is_faster_than_what_is_proved_on_a_measured_machine(name: str) -> None:
    """Prices from a profile: the bound reads the same ones as the simulator."""
    graph, cluster = graph_of(name), Cluster.load(PROFILE)
    found = laminar.plan(graph, cluster, budget_s=10)
    assert found.bound_s is not None and found.step_s is not None
    for plan in (make() for make in typed(graph, cluster.devices)):
        seconds = predict(graph, plan, cluster).seconds
        assert found.bound_s <= seconds, plan
        assert found.step_s <= seconds, plan


WIDE = 16384
"""So wide that what passes between stages is little beside their work."""


class End(nn.Module):
    """Of two towers."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """A number."""
        return (a * b).mean()


class Towers(nn.Module):
    """Two that don't need each other, and a little behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)))
        self.b = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)))
        self.end = End()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of both."""
        return self.end(self.a(x), self.b(x))


def test_stages_that_wait_for_nobody_are_not_below_what_is_proved_of_parts_that_differ() -> None:
    """Towers on devices of their own fill no pipe: a bound that takes a chain for granted is above them."""
    with torch.device("meta"):
        graph = laminar.capture(Towers(), lambda model, x: model(x), torch.empty(8192, WIDE))
    cluster, pin = Cluster.preset("1xh100+2xh200@@ib400"), {"stages": 3, "microbatches": 2}
    found = laminar.plan(graph, cluster, pin=pin, budget_s=5)
    part = micro(graph, 2)
    apart = pipeline(part, {"a.*": 0, "b.*": 1, "end": 2}, 2)
    seconds = predict_staged(part, apart, cluster).seconds
    assert found.bound_s is not None and 0.5 * seconds < found.bound_s <= seconds


# --- what a search says about itself


def test_a_space_says_what_is_in_it_and_why() -> None:
    """As a value, that survives a file."""
    graph = graph_of("mlp.py:tiny")
    found = laminar.plan(graph, "2x2xcpu", budget_s=0.2, only="data,zero,tensor,pipeline")
    space, plans = found.space, laminar.plans
    assert space.contains(plans.data_parallel(graph, Mesh({"dp": 4})), graph)
    assert space.contains(plans.tensor_parallel(graph, Mesh({"tp": 4})), graph)
    assert space.contains(plans.zero(graph, Mesh({"dp": 4})), graph)
    assert space.contains(plans.pipeline(micro(graph, 4), 2, 4, inner=Mesh({"dp": 2}), schedule="zero-bubble"), graph)
    for other, why in [
        (plans.data_parallel(graph_of("even"), Mesh({"dp": 4})), "another graph"),
        (plans.data_parallel(graph, Mesh({"dp": 2})), "2 devices of 4"),
        (plans.data_parallel(graph, Mesh({"dp": 4}), recompute="layers.*"), "recompute is not allowed"),
        (plans.data_parallel(graph, Mesh({"a": 1, "dp": 2, "b": 2, "c": 1})), ""),
        (plans.pipeline(micro(graph, 2), 4, 2), "2 micro-batches"),
    ]:
        member = space.contains(other, graph)
        assert bool(member) == (not why) and why in str(member), str(member)
    for text in ("cells", "placements", "cuts", "outside", space.hash[:8]):
        assert text in str(space)
    again = Plan.from_json(json.loads(json.dumps(found.to_json()))) if isinstance(found, Plan) else found
    assert again.space.hash == space.hash == found.certificate.space
    assert str(again.certificate) == found.account["certificate"]["sentence"]
    assert again.certificate.bound_s == found.bound_s
    with pytest.raises(LaminarError, match="does not come from a search"):
        _ = plans.data_parallel(graph, Mesh({"dp": 4})).space


def test_a_space_that_is_pinned_has_only_what_is_pinned() -> None:
    """A number, and a tensor."""
    graph = graph_of("mlp.py:tiny")
    name = next(i.name for i in graph.of_kind("param") if len(i.spec.shape) == 2)
    found = laminar.plan(graph, "4xcpu", budget_s=1, pin={name: "tp:S(0)"})
    assert found.space.contains(found, graph)
    whole = laminar.plans.data_parallel(graph, Mesh({"dp": 4}))
    assert "pinned" in str(found.space.contains(whole, graph))
    narrow = laminar.plan(graph, "4xcpu", budget_s=1, pin={"tp": 2})
    assert "no cell" in str(narrow.space.contains(whole, graph))


@pytest.mark.parametrize(("name", "spec"), [("mlp.py:tiny", "2x4xcpu"), ("back", "4xh100")])
def test_a_hasty_search_proves_no_more_than_a_patient_one_finds(name: str, spec: str) -> None:
    """A bound that is taken from what was found, be it a millionth below, is no bound."""
    hasty, patient = (laminar.plan(graph_of(name), spec, budget_s=s) for s in (0.0, 5.0))
    assert hasty.step_s is not None and patient.step_s is not None and hasty.bound_s is not None
    assert patient.step_s < 0.97 * hasty.step_s, "else this says nothing"
    assert hasty.bound_s <= patient.step_s and patient.space.contains(hasty) and hasty.space.contains(patient)


# --- nobody would have written a faster one


@pytest.mark.parametrize("budget_s", [0.0, 0.2])
@pytest.mark.parametrize("spec", ["4x2xh100@nvlink+eth50", "8xh100@pcie", "4xcpu"])
def test_with_no_time_at_all_no_named_plan_is_faster(spec: str, budget_s: float) -> None:
    """Tensor parallel across nodes, in two dimensions, ZeRO that gathers once."""
    graph, cluster = graph_of("wide"), Cluster.preset(spec)
    found = laminar.plan(graph, cluster, budget_s=budget_s)
    for plan in (make() for make in typed(graph, cluster.devices)):
        assert found.step_s is not None and found.step_s <= predict(graph, plan, cluster).seconds, plan.name


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("even", "2x4xcpu"),
        *(slow("5", spec) for spec in ("2x4xcpu", "2x2xa100", "8xh100@pcie")),
        slow("7b", "2x8xa100-40g"),
    ],
)
def test_a_wider_request_finds_nothing_slower_than_a_narrower_one(name: str, spec: str) -> None:
    """Whatever is left out or pinned."""
    graph = graph_of(name)
    wide = laminar.plan(graph, spec, budget_s=10).step_s
    assert wide is not None
    for less in ({"only": "data,zero,recompute"}, {"only": "data,tensor"}, {"pin": {"stages": 1}}, {"only": "data"}):
        try:
            narrow = laminar.plan(graph, spec, budget_s=10, **less).step_s  # type: ignore[arg-type]
        except LaminarError as error:
            assert name == "7b" and "no plan fits" in str(error)  # without ZeRO
            continue
        assert narrow is not None and wide <= narrow, less


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


@pytest.mark.parametrize("name", ["mlp.py:tiny", slow("7")])
def test_a_wider_request_takes_nothing_slower_than_a_narrower_one_has_found(name: str) -> None:
    """By construction: with no time at all, and where the simplest of nearly equal plans would be a little slower."""
    graph, cluster = graph_of(name), Cluster.preset("2x2xcpu")
    narrow = [
        laminar.plan(graph, cluster, budget_s=2, **request)
        for request in ({"pin": {"tp": 2}}, {"only": "data,tensor"}, {"pin": {"stages": 2}}, {"only": "data,zero"})
    ]
    wide = laminar.plan(graph, cluster, budget_s=0.0)
    assert wide.step_s is not None and wide.step_s <= min(one.step_s or math.inf for one in narrow)
    assert wide.bound_s <= wide.step_s and wide.account["choice"]["spent"]
    again = laminar.plan(graph, cluster, budget_s=0.0, pin={"tp": 2})
    assert again.step_s <= narrow[0].step_s, "a narrower one takes what it may take"
    assert again.space.contains(again, graph)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_measured_prices_that_are_least_for_middle_sizes_are_not_taken_for_those_of_large_ones(
    microbatches: int,
) -> None:
    """Some millions of elements are updated from a cache, for less each than more of them: columns, then rows."""
    cluster = Cluster.load(PROFILE)
    bounds = Bounds(Model(graph_of("front"), Request(cluster)))
    part = micro(graph_of("front"), microbatches)
    places = {"ws.0": laminar.S(1), "ws.1": laminar.S(0), "ws.2": laminar.B, "ws.3": laminar.B, "batch": laminar.B}
    inner = laminar.plans.seeded(part, Mesh({"dp": 2}), {name: {"dp": sbp} for name, sbp in places.items()})
    plan = pipeline(part, 1, microbatches, inner=inner)
    least = bounds.of(Cell(1, microbatches, 1, 2, 1)).seconds
    assert 0 < least <= predict_staged(part, plan, cluster).seconds


def test_a_pipeline_that_one_could_type_is_tried_beside_the_search_s_own_of_the_same_kind() -> None:
    """Where memory is short: cut otherwise it is a little faster, and the search's own is taken for its simplicity."""
    graph, cluster, room = graph_of("lstm.py:tiny"), Cluster.preset("2x4xcpu"), 203_635
    found = laminar.plan(graph, cluster, memory_bytes=room, budget_s=2)
    part = micro(graph, 2)
    ran = predict_staged(part, pipeline(part, 2, 2, inner=Mesh({"dp": 4})), cluster)
    assert max(ran.peaks) <= room and found.step_s is not None and found.step_s <= ran.seconds

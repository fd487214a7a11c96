"""The search: what it finds is right, fits, and is as near to the best as it says.

Three oracles: the simulator itself (no plan may be simulated faster than the bound), a captured model of another depth
or batch (folding and cutting must give exactly that graph), and one device (a found plan computes the same numbers).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import laminar
from laminar.api import micro_batches
from laminar.cost.sim.tasks import Drag
from laminar.errors import PlanError
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.mesh import Mesh
from laminar.ir.plans.staged import Staged
from laminar.placement import presets
from laminar.placement.fold import fold
from laminar.placement.micro_batch import micro
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.score_cell import CellScorer
from laminar.planner.search.best_first.search import find, promised
from laminar.planner.space.cell import Cell, cells
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Style
from laminar.staging.stage_plans import pipeline
from tests.support.marks import slow
from tests.support.traced_models import letters, traced, undercut
from tests.support.zoo import FEW, recipe, specimen

# --- layers


def test_a_deep_model_with_layers_taken_out_is_the_shallow_model() -> None:
    """Op by op, reference by reference: nothing is approximated by folding."""
    deep = fold(traced(6))
    assert deep.layers == 6
    for keep in (2, 3, 4):
        assert letters(deep.small(keep)) == letters(traced(keep))


def test_a_plan_of_two_layers_unfolds_to_what_the_deep_model_would_have_got() -> None:
    """Presets look at one block at a time, so their deep plan and the unfolded shallow one are the same plan."""
    graph, mesh = traced(6), laminar.Mesh({"dp": 2, "tp": 2})
    folded = fold(graph)
    for preset in (presets.data_parallel, presets.tensor_parallel, presets.zero):
        shallow = folded.unfold(preset(folded.small(3), mesh), 3)
        assert shallow.hash == preset(graph, mesh).hash
        shallow.fits(graph)


@pytest.mark.parametrize("name", FEW)
def test_folding_a_model_of_the_zoo_leaves_a_graph_that_is_one(name: str) -> None:
    """Few layers or none: a fold either is the graph itself or a smaller one that obeys the grammar."""
    graph = specimen(name).graph
    folded = fold(graph)
    small = folded.small(2)
    assert len(small.nodes) <= len(graph.nodes)
    assert {n.name for n in small.nodes} <= {n.name for n in graph.nodes}
    if folded.layers:
        names = {n.name for n in small.nodes}
        assert all(r.name in names or r.name not in graph.by_name for n in small.nodes for r in n.ins)


# --- micro-batches


EXACT = ("gpt.py:tiny", "llama.py:tiny", "bert.py:tiny", "t5.py:tiny", "lstm.py:tiny", "unet.py:tiny", "hf.py:gpt2")
"""Models in which no number counts samples: others divide by it."""


@pytest.mark.parametrize("name", FEW)
def test_the_graph_of_a_micro_batch_is_the_one_that_would_be_traced(name: str) -> None:
    """A plan made before there is a model to trace must fit what is traced later: the same ops on the same shapes."""
    made = recipe(name)
    batch = next(iter(made.data()))
    whole = specimen(name).graph
    part = laminar.capture(made.model(), made.loss, micro_batches(batch, 2)[0])
    cut = micro(whole, 2)
    assert [(n.name, n.op, n.outs, n.ins) for n in cut.nodes] == [(n.name, n.op, n.outs, n.ins) for n in part.nodes]
    assert cut.inputs == part.inputs and cut.outputs == part.outputs
    if name in EXACT:
        assert cut.hash == part.hash


def test_samples_that_need_each_other_have_no_micro_batch() -> None:
    """Every sample reads every other one: the op that does so is named."""

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = model(batch)
        return (x @ x.T).softmax(-1).square().mean()

    graph = laminar.capture(torch.nn.Linear(4, 4), loss, torch.zeros(8, 4))
    with pytest.raises(PlanError, match="needs samples of other micro-batches"):
        micro(graph, 2)


# --- the bound

CLUSTERS = ("2xcpu", "8xh100", "2x2xa100", "16xh100")


@pytest.mark.parametrize("spec", ["2xcpu", "8xh100"])
@pytest.mark.parametrize("name", ["mlp.py:tiny", "gpt.py:tiny"])
def test_no_plan_is_simulated_faster_than_the_bound(name: str, spec: str) -> None:
    """Presets, free placements, ZeRO and random plans, with overlap, contention and all."""
    assert undercut(specimen(name).graph, spec, 1) == []


@pytest.mark.parametrize("spec", ["4xcpu", slow("8xh100")])
def test_bounds_hold_where_the_batch_does_not_divide(spec: str) -> None:
    """Six samples on four or eight ranks: what can't be split evenly on one mesh may be on another."""
    assert undercut(traced(3, batch=6), spec, 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("spec", CLUSTERS)
@pytest.mark.parametrize("name", FEW)
def test_no_plan_of_the_zoo_is_simulated_faster_than_the_bound(name: str, spec: str) -> None:
    """The same for every model, with more random plans."""
    assert undercut(specimen(name).graph, spec, 4) == []


@pytest.mark.parametrize("spec", ["2xcpu", "4xh100"])
def test_no_plan_with_stages_is_simulated_faster_than_the_bound(spec: str) -> None:
    """Micro-batches, virtual stages and ZeRO inside of stages, against all three bounds and that of memory."""
    graph, request = traced(4, batch=16, d=64), Request(Cluster.preset(spec))
    model = Model(graph, request)
    bounds, data, seen = Bounds(model), Style(("data",)), 0
    for count, virtual in ((2, 1), (8, 1), (8, 2)):
        cell = Cell(2, count, virtual, request.cluster.devices // 2, 1)
        part, placer = model.whole(count), model.placer(cell.mesh)
        least = {"rough": bounds.rough(cell), "quick": bounds.quick(cell).seconds, "full": bounds.of(cell).seconds}
        for zero in (0, 3):
            inner = placer.pieces(part, placer.plan(part, data), data, zero)
            ran = predict_staged(part, pipeline(part, 2, count, virtual, inner), request.cluster)
            assert all(ran.seconds >= seconds for seconds in least.values()), (cell, zero, ran.seconds, least)
            assert max(ran.peaks) >= bounds.least_bytes(cell)
            seen += 1
    assert seen == 6


def test_costs_without_overlap_are_no_bound() -> None:
    """If every exchange counted in full, the "bound" would lie above a plan that hides them."""
    graph = traced(6, batch=64, d=1024, tokens=512)
    request = Request(Cluster.preset("8xh100@pcie"))
    model, cell = Model(graph, request), Cell(1, 1, 1, 8, 1)
    seconds = min(predict(graph, presets.zero(graph, cell.mesh, stage), request.cluster).seconds for stage in (1, 3))
    assert Bounds(model).of(cell).seconds <= seconds
    model.machine(cell.mesh).drag = Drag(1, 1)  # as if nothing went on beside an exchange
    assert Bounds(model).of(cell).seconds > seconds


# --- what is found


@pytest.mark.parametrize("name", ["mlp.py:tiny", "gpt.py:tiny", "dlrm.py:tiny", slow("moe.py:tiny")])
@pytest.mark.parametrize("spec", ["2xcpu", "4xcpu"])
def test_what_is_found_computes_what_one_device_computes(name: str, spec: str) -> None:
    """A plan nobody wrote is only worth something if it is right."""
    made = recipe(name)
    graph = specimen(name).graph
    plan = laminar.plan(graph, spec, budget_s=2)
    assert plan.bound_s is not None and plan.step_s is not None and plan.bound_s <= plan.step_s
    torch.manual_seed(0)
    assert laminar.verify(made.model(), made.loss, [next(iter(made.data()))], plan).ok


@pytest.mark.parametrize("spec", ["2xcpu", "8xh100"])
def test_what_is_found_is_never_predicted_slower_than_a_plan_with_a_name(spec: str) -> None:
    """Searching must not cost anybody anything: data parallel, ZeRO and tensor parallel are always looked at."""
    graph = traced(4, batch=16, d=64)
    cluster = Cluster.preset(spec)
    found = find(graph, Request(cluster, budget_s=3))
    best = min(
        predict(graph, plan, cluster).seconds
        for mesh in [laminar.Mesh({"dp": cluster.devices})]
        for plan in [presets.data_parallel(graph, mesh), *(presets.zero(graph, mesh, s) for s in (1, 2, 3))]
    )
    assert found.certificate.step_s <= best * 1.005  # equal plans: the simpler one
    assert found.certificate.bound_s <= found.certificate.step_s


def test_stages_that_were_asked_for_are_found_and_right() -> None:
    """A pinned pipeline: micro-batches, stages, and the numbers of one device."""
    made = recipe("gpt.py:tiny")
    graph = specimen("gpt.py:tiny").graph
    plan = laminar.plan(graph, "2xcpu", pin={"stages": 2, "microbatches": 4}, budget_s=3)
    assert isinstance(plan, Staged) and len(plan.places) == 2 and plan.micro_batches == 4
    part = micro(graph, 4)
    assert predict_staged(part, plan, Cluster.preset("2xcpu")).seconds == pytest.approx(plan.step_s)
    torch.manual_seed(0)
    assert laminar.verify(made.model(), made.loss, [next(iter(made.data()))], plan).ok


def test_memory_decides_when_it_binds() -> None:
    """With room for everything weights may lie whole; with less, in shards; with nothing, the limit is named."""
    graph = traced(3, batch=8, d=512, tokens=32)
    cluster = Cluster.preset("4xh100")

    def found(memory_bytes: float | None, **pin: int) -> Any:
        return find(graph, Request(cluster, memory_bytes, 3, pin=pin, only=("data", "zero"))).finals[0]

    whole, pieces = found(None, zero=0), found(None, zero=3)
    assert pieces.peak_bytes < whole.peak_bytes
    limit = (whole.peak_bytes + pieces.peak_bytes) / 2
    tight = found(limit)
    assert tight.peak_bytes <= limit and tight.score.zero > 0
    with pytest.raises(PlanError, match="no plan fits") as error:
        found(1e4)
    assert "memory_bytes=" in str(error.value)


def test_pins_and_dimensions_narrow_the_space() -> None:
    """What is pinned holds, and what is not allowed is not there."""
    graph = traced(4, batch=16)
    devices = Cluster.preset("8xh100")
    assert {c.tp for c in cells(Request(devices, pin={"tp": 4}), 16, 4, True)} == {4}
    assert {c.stages for c in cells(Request(devices, only=("data", "tensor")), 16, 4, True)} == {1}
    assert {c.tp for c in cells(Request(devices, only=("data",)), 16, 4, True)} == {1}
    found = find(graph, Request(devices, pin={"tp": 2, "stages": 1}, budget_s=3))
    assert found.finals[0].score.cell.tp == 2
    with pytest.raises(PlanError, match="no cell is left"):
        cells(Request(devices, pin={"tp": 3}), 16, 4, True)
    with pytest.raises(PlanError, match="can be pinned"):
        Request(devices, pin={"pp": 2})
    with pytest.raises(PlanError, match="no dimension"):
        Request(devices, only=("sample",))


def test_the_same_request_gives_the_same_plan() -> None:
    """With time to finish, nothing depends on the clock."""
    graph = traced(3, batch=8)
    hashes = {find(graph, Request(Cluster.preset("2xcpu"), budget_s=60)).plan.hash for _ in range(2)}
    assert len(hashes) == 1


@pytest.mark.parametrize("act", [torch.nn.ReLU, torch.nn.GELU])
def test_gradients_are_not_lost_where_layers_of_backward_begin_elsewhere(act: type[torch.nn.Module]) -> None:
    """In a plain stack of layers the gradient of a weight may be in the backward of its neighbour."""
    with torch.device("meta"):
        stack = [m for _ in range(12) for m in (torch.nn.Linear(64, 64), act())]
        model, batch = torch.nn.Sequential(*stack[:-1]), {"x": torch.zeros(32, 64)}
    graph = laminar.capture(model, lambda m, b: m(b["x"]).square().mean(), batch)
    layers = fold(graph)
    assert layers.layers > 3
    small = layers.small(3)
    plan = layers.unfold(presets.data_parallel(small, laminar.Mesh({"dp": 2})), 3)
    assert {k for k in plan.outputs if k.startswith("grad:")} == {
        f"grad:{o.name}" for o in graph.outputs if o.kind == "grad"
    }


def test_where_the_batch_at_once_has_no_room_a_pipeline_is_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that fits in no other way hundreds of cells would be guessed at before anything was simulated."""
    graph, cluster = traced(6, batch=16, d=256, tokens=64), Cluster.preset("4xh100")
    room = 0.5 * predict(graph, presets.zero(graph, Mesh({"dp": 4}), 3), cluster).memory.peak_bytes
    guessed: list[Cell] = []
    guess = CellScorer.guess
    monkeypatch.setattr(CellScorer, "guess", lambda self, cell: guessed.append(cell) or guess(self, cell))

    def first(text: str) -> None:
        raise InterruptedError(text)

    request = Request(cluster, memory_bytes=room)
    with pytest.raises(InterruptedError, match=" stages, "):
        find(graph, request, first)
    assert 0 < len(guessed) < 0.3 * len(promised(graph, request)[1])

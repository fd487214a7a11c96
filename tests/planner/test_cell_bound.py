"""The bound against the simulator: no plan of a small graph may be simulated faster, whatever it is.

Graphs are so small that all plans can be tried, or so small that a descent from random plans, one op at a time, every
option tried, ends in plans that nobody would write and that are hard to beat. Tensors are large (they are never made),
so that overlap, contention and the choice between them matter. The same check must catch a bound that forbids overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laminar
from laminar.cost.sim.tasks import Drag
from laminar.errors import LaminarError
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import B, NdSbp, Partial, Split
from laminar.ir.tensor import TensorSpec
from laminar.placement import minsum, presets
from laminar.placement.micro_batch import micro
from laminar.placement.minsum import Factor, MinSum, floor
from laminar.planner.bounds import piece_bound as leasts
from laminar.planner.bounds.boxing_bound import GRADIENTS, PARAMETERS, VALUES, Ways, number, pairs_of
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.bounds.signatures import Piece
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.search.best_first.search import find
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request
from laminar.rules.boxing.boxing import boxing
from laminar.staging.stage_plans import pipeline
from tests.support.marks import slow, some
from tests.support.tried_plans import Tried
from tests.support.zoo import MOST, specimen

FORWARD: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "one": lambda x, a, b: x @ a,
    "sum": lambda x, a, b: x @ a + x @ b,
    "two": lambda x, a, b: (x @ a) @ b,
    "relu": lambda x, a, b: torch.relu(x @ a) @ b,
    "norm": lambda x, a, b: torch.nn.functional.layer_norm(x @ a, x.shape[-1:]) @ b,
    "tied": lambda x, a, b: torch.relu(x @ a) @ a,
}
"""Models of one to eight ops of forward and as many of backward."""


def numbers_of(nds: list[NdSbp]) -> np.ndarray:
    """Placements as numbers by axis."""
    return np.array([[number(p) for p in nd] for nd in nds], dtype=np.intp)


@cache
def traced(name: str, rows: int = 8192, width: int = 4096, squared: bool = True) -> Graph:
    """The graph of a training step of one of them; its loss is the mean of squares, or a mere sum."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.empty(width, width, device="meta"))
            if name not in ("one", "tied"):
                self.b = torch.nn.Parameter(torch.empty(width, width, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = FORWARD[name](x, self.a, getattr(self, "b", self.a))
            return out.square().mean() if squared else out.sum()

    return laminar.capture(Model(), lambda model, x: model(x), torch.zeros(1, width).expand(rows, width))


def mesh_cell(dp: int, tp: int) -> Cell:
    """Neither stages nor micro-batches."""
    return Cell(1, 1, 1, dp, tp)


def least_of(model: Model, cell: Cell) -> dict[str, float]:
    """All bounds of a cell."""
    bounds = Bounds(model)
    return {"rough": bounds.rough(cell), "quick": bounds.quick(cell).seconds, "full": bounds.of(cell).seconds}


# --- all plans, and those hard to beat


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["2xcpu", "2xh100", "2xh100@pcie"])
def test_no_plan_at_all_is_faster_than_the_bound(spec: str) -> None:
    """Brute force over the simulator: every placement of every tensor of a product, its loss and its gradient."""
    tried = Tried(traced("one", squared=False), spec, mesh_cell(2, 1))
    best = min(map(tried.seconds, tried.every()))
    least = least_of(tried.model, tried.cell)
    assert all(0 < s <= best for s in least.values()), (best, least)
    assert least["full"] > 0.8 * best  # else anything would pass


CASES = [("2xh100@pcie", 2, 1), ("2xcpu", 2, 1), ("4xh100@pcie", 2, 2), slow("2x2xa100", 2, 2), slow("4xcpu", 2, 2)]


@pytest.mark.parametrize(("spec", "dp", "tp"), CASES)
@pytest.mark.parametrize("name", ["relu", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sum", "tied"))])
def test_no_plan_that_a_descent_ends_in_is_faster_than_the_bound(name: str, spec: str, dp: int, tp: int) -> None:
    """One op at a time, whatever is faster: such plans use what a bound forgot. A tied weight is fetched once."""
    tried = Tried(traced(name), spec, mesh_cell(dp, tp))
    best, least = tried.best(1), least_of(tried.model, tried.cell)
    assert all(0 < s <= best for s in least.values()), (best, least)


SHAPES = [(8192, 4096), (512, 4096), (65536, 256), (1000, 520)]
PLACES = [*(getattr(c, "values", c) for c in CASES), ("4xh100@pcie", 4, 1), ("2x2xh100@pcie+eth100", 2, 2)]
MANY = [(name, *place, shape) for shape in SHAPES for name in FORWARD for place in PLACES]


@pytest.mark.parametrize(("name", "spec", "dp", "tp", "shape"), some(16, MANY, "descents"))
def test_no_plan_that_many_descents_end_in_is_faster_than_the_bound(
    name: str, spec: str, dp: int, tp: int, shape: tuple[int, int]
) -> None:
    """The same for every model, from more places, with work and exchanges in other proportions."""
    tried = Tried(traced(name, *shape), spec, mesh_cell(dp, tp))
    best, least = tried.best(2, sweeps=3, most=24), least_of(tried.model, tried.cell)
    assert all(0 < s <= best for s in least.values()), (best, least)


def test_a_bound_without_overlap_is_caught() -> None:
    """Planted: if every exchange counted in full, a plan that hides them would lie below. The check must see that."""
    tried = Tried(traced("two"), "2xh100@pcie", mesh_cell(2, 1))
    best = tried.best(0)
    assert least_of(tried.model, tried.cell)["full"] <= best
    wrong = Model(tried.graph, tried.model.request)
    wrong.machine(tried.cell.mesh).drag = Drag(1, 1)  # as if nothing went on beside an exchange
    assert Bounds(wrong).of(tried.cell).seconds > best


def test_a_number_that_is_read_again_and_again_is_not_counted_as_so_many() -> None:
    """The gradient of a mean is one number, expanded: on ranks that run line by line, reading it costs half as much."""
    tried = Tried(traced("relu", 65536, 256), "4xcpu", mesh_cell(2, 2))
    best = tried.seconds(presets.data_parallel(tried.graph, tried.cell.mesh))
    assert all(0 < s <= best for s in least_of(tried.model, tried.cell).values())


# --- rows of layers


@cache
def stacked(rows: int, layers: int = 6, width: int = 2048) -> Graph:
    """The graph of a training step of a deep perceptron, each layer of which adds to a stream."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.empty(width, 4 * width, device="meta"))
            self.down = torch.nn.Parameter(torch.empty(4 * width, width, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(x @ self.up) @ self.down

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    return laminar.capture(Deep(), lambda model, x: model(x), torch.zeros(1, width).expand(rows, width))


@pytest.mark.parametrize(("rows", "spec"), [(512, "4xh100"), (8192, "4xh100"), (512, "4xcpu")])
def test_no_plan_of_a_row_of_layers_is_faster_than_the_bound(rows: int, spec: str) -> None:
    """A layer is given what the one before has left, at a worth that cancels out over the row."""
    tried = Tried(stacked(rows), spec, mesh_cell(1, 4))
    plans = [*tried.starts(1), presets.tensor_parallel(tried.graph, tried.cell.mesh)]
    best, bounds = min(map(tried.seconds, plans)), least_of(tried.model, tried.cell)
    assert all(0 < s <= best for s in bounds.values()), (best, bounds)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [512, 2048, 8192])
@pytest.mark.parametrize("spec", ["4xh100", "4xh100@pcie", "4xcpu"])
def test_no_plan_of_a_row_of_layers_that_a_descent_ends_in_is_faster_than_the_bound(rows: int, spec: str) -> None:
    """The same for plans whose layers may all differ."""
    tried = Tried(stacked(rows), spec, mesh_cell(1, 4))
    best, least = tried.best(1, most=6), least_of(tried.model, tried.cell)
    assert all(0 < s <= best for s in least.values()), (best, least)


def test_layers_that_take_for_granted_what_none_leaves_behind_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: if a layer were always given what is whole, and paid for making it so, a plan by sample would lie below.

    The right worth counts here, too: without it a row of layers is proved to take less.
    """

    def rows(bounds: Bounds) -> float:
        """All layers in a row, none of them apart from the others."""
        return max(bound.seconds for bound in bounds._means(tried.cell, math.inf))

    tried = Tried(stacked(16384), "4xh100", mesh_cell(1, 4))
    best = min(map(tried.seconds, tried.starts(0)))
    right = Bounds(tried.model).of(tried.cell).seconds
    row = rows(Bounds(tried.model))
    monkeypatch.setattr(Piece, "lies", lambda self, own: np.zeros((1, 1), dtype=np.intp))
    wrong = Bounds(Model(tried.graph, tried.model.request)).of(tried.cell).seconds
    monkeypatch.undo()
    monkeypatch.setattr(leasts, "VALUE_WORTHS", ())
    apart = rows(Bounds(Model(tried.graph, tried.model.request)))
    assert apart < row <= right <= best < wrong


# --- memory


def test_plans_that_fit_are_slower_than_the_bound_and_hold_more_than_its_bytes() -> None:
    """With a cap, whatever fits obeys both; a cell that can't fit has no plan that does."""
    tried = Tried(traced("relu"), "4xh100@pcie", mesh_cell(4, 1))
    bounds = Bounds(tried.model)
    ran = [tried.ran(plan) for plan in tried.starts(6)]
    held = sorted(nbytes for _, nbytes in ran)
    assert bounds.least_bytes(tried.cell) <= held[0]
    fits = min(seconds for seconds, nbytes in ran if nbytes <= held[len(held) // 2])
    assert bounds.of(tried.cell).seconds <= fits
    found = find(tried.graph, Request(tried.model.request.cluster, memory_bytes=1.2 * held[0], budget_s=3))
    assert found.certificate.bound_s <= found.certificate.step_s


# --- stages


@pytest.mark.parametrize(
    ("spec", "stages", "parts", "virtual"),
    [
        ("2xcpu", 2, 4, 1),
        ("4xh100@pcie", 1, 2, 1),
        ("4xh100@pcie", 2, 4, 1),
        ("4xh100@pcie", 2, 2, 2),
        ("3xh100@pcie", 3, 3, 1),
    ],
)
def test_no_plan_with_stages_that_a_descent_ends_in_is_faster_than_the_bound(
    spec: str, stages: int, parts: int, virtual: int
) -> None:
    """Micro-batches in up to three stages, each spread over its ranks in any way."""
    cell = Cell(stages, parts, virtual, Cluster.preset(spec).devices // stages, 1)
    whole = traced("relu", 9216 if parts == 3 else 8192)
    tried = Tried(micro(whole, parts), spec, cell)

    def seconds(plan: Plan) -> float:
        try:
            staged = pipeline(tried.graph, stages, parts, virtual, plan)
            return predict_staged(tried.graph, staged, tried.model.request.cluster).seconds
        except LaminarError:
            return float("inf")

    best = tried.best(1, seconds, most=4)
    least = least_of(Model(whole, tried.model.request), cell)
    assert all(0 < s <= best < float("inf") for s in least.values()), (best, least)


# --- the parts of it


@settings(max_examples=60)
@given(st.data())
def test_no_chain_of_exchanges_is_cheaper_than_the_way_that_is_counted(data: st.DataObject) -> None:
    """Boxing of any tensor between any placements, priced step by step, on one and two axes."""
    spec, sizes = data.draw(st.sampled_from([("8xh100", (8,)), ("2x4xh100", (2, 4)), ("4xcpu", (2, 2))]))
    mesh = Mesh(dict(zip(("dp", "tp"), sizes, strict=False)))
    machine = Model(traced("one"), Request(Cluster.preset(spec))).machine(mesh)
    tensor = TensorSpec((data.draw(st.sampled_from([64, 4096])), 64, data.draw(st.sampled_from([16, 1024]))), "f32")
    placement = st.tuples(*(st.sampled_from([B, Partial("sum"), Split(0), Split(1), Split(2)]) for _ in sizes))
    src, dst = data.draw(placement), data.draw(placement)
    ways = Ways(machine, mesh, (1.0,) * len(machine.cluster.levels))
    paid = 0.0
    for step in boxing(tensor, src, dst, sizes):
        if step.moves:
            held = tensor.nbytes
            for axis, (a, b) in enumerate(zip(step.src, step.dst, strict=True)):
                keeps = isinstance(a, Split) and (axis not in step.axes or (step.kind == "all_to_all"))
                held //= sizes[axis] if keeps and (isinstance(b, Split) or axis not in step.axes) else 1
            paid += ways.seconds(step.kind, held, step.axes)
    pairs = pairs_of(numbers_of([src]), numbers_of([dst]))
    for what in (VALUES, PARAMETERS, GRADIENTS):
        assert ways.table(tensor.nbytes, pairs, what)[0, 0] <= paid * (1 + 1e-9) + 1e-12


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_the_floor_of_a_sum_is_its_minimum_or_below(seed: int) -> None:
    """With room for its tables it is the minimum; without, it never lies above."""
    rng = np.random.default_rng(seed)
    problem = MinSum()
    sizes = [int(rng.integers(1, 4)) for _ in range(6)]
    for size in sizes:
        problem.variable(size)
    for _ in range(9):
        scope = tuple(int(v) for v in rng.choice(6, size=int(rng.integers(1, 4)), replace=False))
        problem.add(scope, rng.random([sizes[v] for v in scope]))
    least = min(
        sum(problem.tables[t][tuple(values[v] for v in scope)] for scope, t in problem.factors)
        for values in itertools.product(*map(range, sizes))
    )
    assert problem.floor() == pytest.approx(least)
    assert problem.floor(limit=4) <= least + 1e-12


def classed(seed: int) -> tuple[list[int], list[Factor], float]:
    """A random sum of tables over classes of values, and its minimum by trying everything."""
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, 6)) for _ in range(5)]
    factors: list[Factor] = []
    for _ in range(8):
        scope = tuple(int(v) for v in rng.choice(5, size=int(rng.integers(1, 4)), replace=False))
        counts = [int(rng.integers(1, 4)) for _ in scope]
        classes = tuple(rng.integers(0, n, size=sizes[v]) for v, n in zip(scope, counts, strict=True))
        factors.append((scope, classes, rng.integers(0, 9, size=counts).astype(float)))
    best = min(
        sum(t[tuple(c[values[v]] for v, c in zip(scope, classes, strict=True))] for scope, classes, t in factors)
        for values in itertools.product(*map(range, sizes))
    )
    return sizes, factors, float(best)


@settings(max_examples=100)
@given(st.integers(0, 10**6))
def test_the_floor_of_tables_over_classes_is_their_minimum_or_below(seed: int) -> None:
    """Values that some tables tell apart and others don't; one class may have no value at all."""
    sizes, factors, best = classed(seed)
    assert floor(sizes, factors) == pytest.approx(best)
    assert floor(sizes, factors, limit=4) <= best + 1e-12


def test_a_floor_that_takes_values_for_alike_that_are_not_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: of the values of a variable only the cheapest by itself is looked at, whatever tables tell apart."""
    monkeypatch.setattr(minsum._Floor, "_told_apart", lambda self, v, mine, own: np.array([own.argmin()]))
    found = [(floor(sizes, factors), best) for sizes, factors, best in map(classed, range(40))]
    assert any(bound > best + 1e-9 for bound, best in found)


@pytest.mark.parametrize("name", MOST)
def test_blocks_made_again_are_not_below_what_is_proved_of_them(name: str) -> None:
    """What is recomputed is not written and read: a compiler may need fewer kernels for it, and so less time."""
    graph, cluster = specimen(name).graph, Cluster.preset("1xh100")
    model = Model(graph, Request(cluster))
    if model.blocks is None:
        pytest.skip("nothing repeats that could be recomputed")
    bounds, mesh = Bounds(model), Mesh({"dp": 1})
    for recompute in (False, True):
        cell = Cell(1, 1, 1, 1, 1, recompute)
        least = max(bounds.rough(cell), bounds.quick(cell).seconds, bounds.of(cell).seconds)
        first = model.blocks.replace("*", "0")
        for block in (model.blocks, first) if recompute else ("",):
            for how in ("", "-products"):
                again = (block + how,) if block else ()
                assert least <= predict(graph, presets.data_parallel(graph, mesh, again), cluster).seconds, again

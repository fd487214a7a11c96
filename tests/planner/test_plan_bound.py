"""A bound of one plan holds for that plan, and plans with a name are passed over for no other reason.

The oracle is the simulation in full: of every plan with a name, in every cell, of shallow models and of deep ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

import laminar
from laminar.errors import LaminarError
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.staged import Staged
from laminar.planner.bounds import plan_bound
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.bounds.pipeline_bound import Row
from laminar.planner.bounds.plan_bound import cut_bound_s, plan_bound_s
from laminar.planner.estimate.candidates import Score
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.score_cell import CellScorer
from laminar.planner.search.best_first.named_trials import NamedBounds
from laminar.planner.search.best_first.search import find
from laminar.planner.space.cell import Cell, cells
from laminar.planner.space.named_plans import Named, named
from laminar.planner.space.plan_space import out_of_row
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Style
from laminar.rules.samples import samples_of
from laminar.staging.balance import balanced, work_s
from laminar.staging.stage_plans import arranged, inner_plan, pipeline
from tests.attack.models import graph_of, slow_link
from tests.attack.plans import piped, typed
from tests.support.marks import slow
from tests.support.seeds import dice
from tests.support.traced_models import traced

DEEP = 14


def deep() -> Graph:
    """A GPT of more layers than are looked at one by one."""
    return traced(DEEP, batch=16, d=256, tokens=64)


def request(spec: str) -> Request:
    """For a machine, some of them with a link that makes exchanges matter."""
    name, _, far = spec.partition(" far")
    return Request(slow_link(name, 1e8) if far or spec.endswith("far") else Cluster.preset(name))


def every(model: Model, asked: Request) -> Iterator[Named]:
    """Plans with a name, without blocks recomputed: how many are, a simulation finds out."""
    graph = model.graph
    mine = cells(asked, samples_of(graph), model.cuts, False)
    yield from (one for one in named(asked, mine, model.small(1, model.keeps[-1])) if not one.cell.recompute)


def simulated_s(model: Model, asked: Request, one: Named) -> float:
    """A plan with a name at full depth, as the search writes it."""
    plan = model.unfolded(Score(one.cell, one.style, one.zero, one.typed() if one.typed else None, 0.0, 0.0))
    if one.cell.plain:
        return predict(model.graph, plan, asked.cluster).seconds
    part = model.whole(one.cell.micro_batches)
    staged = pipeline(part, one.cell.stages, one.cell.micro_batches, inner=plan, couple="microbatch")
    assert not (Bounds(model).in_a_row(one.cell) and out_of_row(staged))
    return predict_staged(part, staged, asked.cluster).seconds


CASES = [
    ("deep", "4xh100"),
    ("mlp.py:tiny", "4xcpu"),
    ("gpt.py:tiny", "2x2xa100"),
    slow("deep", "4xcpu far"),
    slow("deep", "2x4xh100"),
    slow("moe.py:tiny", "4xh100"),
    slow("unet.py:tiny", "4xcpu far"),
    slow("llama.py:tiny", "8xh100@pcie"),
    slow("bert.py:tiny", "2x4xcpu"),
    slow("dlrm.py:tiny", "3xcpu"),
]


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_no_plan_with_a_name_is_simulated_faster_than_its_own_bound(name: str, spec: str) -> None:
    """Nor is its bound below that of its cell; and of many plans it says more."""
    graph, asked = deep() if name == "deep" else graph_of(name), request(spec)
    model = Model(graph, asked)
    bounds = Bounds(model)
    trials = NamedBounds(CellScorer(model), bounds, lambda: 0.0)
    more = total = 0
    for one in every(model, asked):
        with suppress(LaminarError):
            plan = trials.plan(one)
            seconds = simulated_s(model, asked, one)
            open_s, bound_s = (plan_bound_s(bounds, plan, one.cell, stored=s) for s in (False, True))
            assert bounds.of(one.cell).seconds <= 1.001 * open_s, one.key  # both are found by halving
            assert bound_s <= seconds * (1 + 1e-9), (one.key, bound_s / seconds)
            total += 1
            more += bound_s > 1.001 * bounds.of(one.cell).seconds
    assert total > 10 and more > total / 4


@pytest.mark.parametrize(("name", "spec"), [("deep", "4xh100"), slow("llama.py:tiny", "2x4xh100")])
def test_pipelines_as_they_are_typed_are_no_faster_than_their_bounds(name: str, spec: str) -> None:
    """Their plans are made of the whole graph, their bounds of the folded one."""
    graph, asked = deep() if name == "deep" else graph_of(name), request(spec)
    model = Model(graph, asked)
    bounds, count = Bounds(model), 0
    for one in (n for n in every(model, asked) if n.staged is not None):
        with suppress(LaminarError):
            part = model.whole(one.cell.micro_batches)
            assert one.staged is not None
            plan = one.staged(part)
            folded = inner_plan(model.small(one.cell.micro_batches, model.keeps[-1]), one.cell.mesh)
            assert model.deepened(folded, part).ops == inner_plan(part, one.cell.mesh).ops
            assert plan_bound_s(bounds, folded, one.cell) <= predict_staged(part, plan, asked.cluster).seconds
            count += 1
    assert count > 3


def some_pipelines(model: Model, asked: Request, seed: str) -> list[Named]:
    """A few of those with a name that have stages."""
    found = [one for one in every(model, asked) if one.cell.stages > 1 and one.zero < 2]
    return dice(seed).sample(found, min(8, len(found)))


def cut_anyhow(model: Model, asked: Request, one: Named, seed: str) -> Iterator[tuple[Staged, float]]:
    """A pipeline whose stages begin anywhere, with blocks recomputed or not, and its seconds; and as it is typed."""
    rng, cell = dice(seed), one.cell
    part, plan = model.whole(cell.micro_batches), model.unfolded(Score(cell, one.style, one.zero, None, 0.0, 0.0))
    for much in (0.0, 0.3, 1.0):
        skewed = {name: s * (1 + much * rng.random() * 9) for name, s in work_s(part).items()}
        lead = [1.0 + much * rng.random() for _ in range(cell.stages)]
        of = balanced(part, cell.stages, [{n: s / a for n, s in skewed.items()} for a in lead])
        again = model.patterns(rng.sample(range(len(model.block_names)), len(model.block_names) // 2))
        own = replace(plan, recompute=again if much and rng.random() < 0.5 else ())
        staged = arranged(part, of, range(cell.stages), [own] * cell.stages, cell.micro_batches)
        staged = replace(staged, schedule="1f1b", window=rng.choice((0, 2)), coupled=True, name="cut anyhow")
        yield staged, predict_staged(part, staged, asked.cluster).seconds


CUT_CASES = [
    ("deep", "4xh100"), ("gpt.py:tiny", "2x2xa100"), slow("deep", "4xcpu far"), slow("deep", "2x4xh100"),
    slow("vit.py:tiny", "4xcpu"), slow("vit.py:tiny", "8xa100"), slow("unet.py:tiny", "4xcpu"),
    slow("llama.py:tiny", "8xh100@pcie"), slow("gpt.py:tiny", "4xcpu far"),
]  # fmt: skip
"""Of others (branches, tiny ones) stages are not known to stand in a row: nothing is said of their cuts."""


@pytest.mark.parametrize(("name", "spec"), CUT_CASES)
def test_no_pipeline_is_simulated_faster_than_the_bound_of_its_cuts(name: str, spec: str) -> None:
    """Even cuts and any others, whatever is recomputed; of even ones it says more than that of the plan."""
    graph, asked = deep() if name == "deep" else graph_of(name), request(spec)
    model = Model(graph, asked)
    bounds = Bounds(model)
    trials, total, more = NamedBounds(CellScorer(model), bounds, lambda: 0.0), 0, 0
    for k, one in enumerate(some_pipelines(model, asked, f"pipelines {name} {spec}")):
        with suppress(LaminarError):
            plan = trials.plan(one)
            for staged, seconds in cut_anyhow(model, asked, one, f"cuts {name} {spec} {k}"):
                found = cut_bound_s(bounds, plan, one.cell, staged.of)
                assert found <= seconds * (1 + 1e-9), (one.key, found / seconds)
                total += found > 0
                more += found > 1.001 * plan_bound_s(bounds, plan, one.cell)
    assert total > 5 and more > total / 3


def test_cuts_that_are_counted_wrongly_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: with 5 % more work some pipeline would be simulated faster."""
    graph, asked = deep(), request("4xcpu")
    model = Model(graph, asked)
    bounds, right = Bounds(model), Row.cut_s
    trials = NamedBounds(CellScorer(model), bounds, lambda: 0.0)
    monkeypatch.setattr(
        Row, "cut_s", lambda self, starts, micro, work, enough=math.inf: right(self, starts, micro, 1.05 * work, enough)
    )
    wrong = 0
    for k, one in enumerate(some_pipelines(model, asked, "mutants")):
        with suppress(LaminarError):
            plan = trials.plan(one)
            for staged, seconds in cut_anyhow(model, asked, one, f"mutants {k}"):
                wrong += cut_bound_s(bounds, plan, one.cell, staged.of) > seconds
    assert wrong


def test_what_a_plan_does_counts_and_how_it_stores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO's gathers are in the bound; and a bound that counts exchanges in full lies above plans that hide them."""
    asked = Request(Cluster.preset("8xh100@pcie"))
    graph = traced(6, batch=64, d=1024, tokens=512)
    model, cell = Model(graph, asked), Cell(1, 1, 1, 8, 1)
    bounds, trials = Bounds(model), NamedBounds(CellScorer(model), Bounds(model), lambda: 0.0)
    whole, pieces = (trials.plan(Named(cell, Style(("data",)), zero)) for zero in (0, 3))
    open_s = plan_bound_s(bounds, whole, cell, stored=False)
    assert open_s == plan_bound_s(bounds, pieces, cell, stored=False)
    assert plan_bound_s(bounds, whole, cell) > 1.001 * open_s
    seconds = simulated_s(model, asked, Named(cell, Style(("data",)), 3))
    monkeypatch.setattr(plan_bound._PlanBounds, "_hidden", lambda self, machine: 1.0)
    assert plan_bound_s(bounds, pieces, cell) > seconds


@pytest.mark.parametrize("spec", ["4xh100", slow("8xh100@pcie"), slow("4xcpu far"), slow("2x4xh100")])
def test_of_a_deep_model_no_plan_that_one_could_type_is_faster(spec: str) -> None:
    """With no time at all, so that nothing but plans with a name is tried; pipelines too."""
    graph, asked = deep(), request(spec)
    found = laminar.plan(graph, asked.cluster, budget_s=0.0)
    assert found.step_s is not None
    for make in (*typed(graph, asked.cluster.devices), *piped(graph, asked.cluster.devices)):
        with suppress(LaminarError):
            plan = make()
            if isinstance(plan, laminar.Plan):
                seconds = predict(graph, plan, asked.cluster).seconds
            else:
                seconds = predict_staged(model_part(graph, plan.micro_batches), plan, asked.cluster).seconds
            assert found.step_s <= seconds, plan.name


def model_part(graph: Graph, parts: int) -> Graph:
    """Of a micro-batch."""
    from tests.attack.plans import part_of

    return part_of(graph, parts)


def test_a_plan_below_a_bound_of_its_own_takes_the_certificate_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one below that of its cell does."""
    from laminar.planner.search.best_first import named_trials

    monkeypatch.setattr(named_trials, "plan_bound_s", lambda *_, **__: 1e-3 * 1e6)
    monkeypatch.setattr(NamedBounds, "ruled_out", lambda self, one, as_typed=False: setattr(self, "bound_s", 1e3))
    request = Request(Cluster.preset("2xh100"), budget_s=0.0)
    found = find(deep(), request)
    assert found.certificate.contradictions and not found.certificate.bound_s
    monkeypatch.setenv("LAMINAR_CHECK_BOUNDS", "1")
    with pytest.raises(LaminarError, match="a bound is wrong"):
        find(deep(), request)


def test_zero_2_is_found_where_only_it_fits() -> None:
    """It is mostly ZeRO 1 to the letter, but where the batch can't be shared its gradients make products share rows."""
    model = nn.Sequential(*(nn.Linear(512, 512, device="meta") for _ in range(3)))
    x = torch.zeros(2, 512, device="meta")
    graph = laminar.capture(model, lambda m, b: (m(b["x"]) - b["y"]).square().mean(), {"x": x, "y": x})
    cluster = Cluster.preset("4xa100")
    typed = laminar.plans.zero(graph, laminar.Mesh({"dp": 4}), 2)
    alone = predict(graph, typed, cluster)
    found = laminar.plan(graph, cluster, budget_s=0, memory_bytes=1.0001 * alone.memory.peak_bytes)
    assert found.step_s is not None and found.step_s <= alone.seconds

"""Nothing that is simulated contradicts a search: some plans in the normal run, a hundred thousand in `make prove`.

How many plans those are is the sum of what each case asks for and gets; the last lines of a run tell it. That the
attack would find something is tested on claims that are wrong by a little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laminar.cost import machine as prices
from laminar.cost.ops.price import OpCost
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.mesh import Mesh
from laminar.placement import presets
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.search.best_first.branches import Branches
from laminar.planner.space.cell import Cell
from laminar.planner.space.plan_space import Member, Space
from laminar.planner.space.request import Request
from laminar.staging.stage_plans import pipeline
from tests.attack import run
from tests.attack.judge import Attacked, Claim
from tests.attack.models import LARGE, MACHINES, MODELS, SMALL, graph_of, plans_of
from tests.attack.plans import part_of
from tests.attack.run import Pair
from tests.support.marks import slow
from tests.support.seeds import first

Told = Callable[[str, object], None]

FEW = [
    ("mlp.py:tiny", "4x2xh100@nvlink+eth50"),
    ("even", "2xcpu far"),
    slow("towers", "2x2xa100"),
    slow("back", "4+2 h100"),
]
"""Tensor parallel across nodes, a slow link, branches apart, and nodes of different sizes."""
PAIRS = [(model, machine) for model in MODELS if model not in LARGE for machine in MACHINES]
WANTED = 100_000


def unharmed(found: Attacked, plans: int, keep: Path) -> None:
    """As many plans as were asked for, most of them of the space, and none that contradicts anything."""
    for k, plan in enumerate(found.offenders):
        plan.save(keep / f"{k}.json")
    assert not found.wrong, (*found.wrong[:3], f"the plans are in {keep}")
    assert found.simulated >= plans
    # Where memory is short most plans don't fit.
    assert found.memory_bytes is not None or found.inside > 0.5 * found.simulated, found.kinds


@pytest.mark.parametrize(("model", "machine"), FEW)
def test_no_plan_contradicts_a_search(model: str, machine: str, tmp_path: Path) -> None:
    """Below its bound, or with a name and faster than what was found with little time."""
    unharmed(Pair(model, machine, 1).run(80), 80, tmp_path)


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.parametrize(("model", "machine"), PAIRS)
def test_nothing_contradicts_a_search_however_much_is_tried(
    model: str, machine: str, tmp_path: Path, record_property: Told
) -> None:
    """Every model on every machine, with fresh seeds, by count and not by time."""
    found = Pair(model, machine, first(1)).run(plans_of(model))
    for name in ("simulated", "inside", "closest"):
        record_property(f"attack {name}", getattr(found, name))
    unharmed(found, plans_of(model), tmp_path)


def test_the_cases_add_up_to_a_hundred_thousand_plans() -> None:
    """Twenty models or more on ten machines or more; each case has its own number, and fails if it gets fewer."""
    assert len({model for model, _ in PAIRS}) >= 20 and len({machine for _, machine in PAIRS}) >= 10
    assert sum(plans_of(model) for model, _ in PAIRS) >= WANTED
    assert set(SMALL) | set(LARGE) <= set(MODELS)


@pytest.mark.parametrize("machine", ["4xcpu", "4xh100", slow("measured")])
def test_prices_that_plans_share_are_those_of_each_by_itself(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learnt once from a profile must not change what is simulated."""
    graph, cluster = graph_of("mlp.py:tiny"), MACHINES[machine]()
    flat = presets.zero(graph, Mesh({"dp": cluster.devices}), 3)
    part = part_of(graph, 4)
    staged = pipeline(part, 2, 4, inner=Mesh({"dp": cluster.devices // 2}))
    shared = [[predict(graph, flat, cluster).seconds, predict_staged(part, staged, cluster).seconds] for _ in range(2)]
    monkeypatch.setattr(prices, "op_cost", OpCost)
    alone = [predict(graph, flat, cluster).seconds, predict_staged(part, staged, cluster).seconds]
    assert shared == [alone, alone]


# --- claims that are wrong


def _times(factor: Callable[[Cell], float]) -> Callable[[pytest.MonkeyPatch], None]:
    """Bounds of cells so many times as high."""

    def wrong(patch: pytest.MonkeyPatch) -> None:
        true = Bounds.of

        def of(self: Bounds, cell: Cell, *args: Any) -> Any:
            found = true(self, cell, *args)
            return replace(found, seconds=factor(cell) * found.seconds)

        patch.setattr(Bounds, "of", of)

    return wrong


def _fill(cell: Cell) -> float:
    """As if all stages were equal: then a pipe takes so much longer to fill and to empty."""
    return 1 + (cell.stages - 1) / cell.micro_batches / cell.virtual


def _claiming(bound: float, step: float) -> Callable[[pytest.MonkeyPatch], None]:
    """A search that says more than it knows: of what it found, a share as its bound, and as the best with a name."""

    def wrong(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(run, "claim_of", lambda p, *_: Claim(bound * p.step_s, step * p.step_s, p.space))

    return wrong


def _bytes(patch: pytest.MonkeyPatch) -> None:
    true = Bounds.least_bytes
    patch.setattr(Bounds, "least_bytes", lambda self, cell: 1.5 * true(self, cell))


def _apart(patch: pytest.MonkeyPatch) -> None:
    true = Branches.bound_s
    patch.setattr(Branches, "bound_s", lambda self, way, **more: 1.1 * true(self, way, **more))


def _shy(patch: pytest.MonkeyPatch) -> None:
    """A space that has hardly anything in it hides what is below its bound."""
    true = Space.contains

    def contains(self: Space, plan: Any, graph: Any = None) -> Member:
        return true(self, plan, graph) if plan.hash[0] in "0123" else Member(False, "who knows")

    patch.setattr(Space, "contains", contains)


WRONG: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "a bound that is 2 % too high": ("wide", "2xcpu", _times(lambda cell: 1.02), "below its cell's bound"),
    "work counted too often": ("front", "3xcpu", _times(lambda c: 1 + 0.05 * c.plain), "below its cell's bound"),
    "filling a pipe of unequal stages": ("7", "2xcpu", _times(_fill), "below its cell's bound"),
    "bytes counted too often": ("wide", "2xcpu", _bytes, "its cell at least"),
    "a bound taken from what was found": ("back", "4xh100", _claiming(1.0, 1.0), "is below the bound"),
    "branches that take a tenth longer": ("towers", "2xcpu", _apart, "below the bound of its way"),
    "a named plan that was not tried": ("wide", "4xcpu", _claiming(0.1, 1.05), "faster than what was found"),
    "a space that says no too often": ("wide", "2xcpu", _shy, "Counter"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_a_claim_that_is_wrong_is_found_out(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The search is left as it is; only what is claimed of its cells, or by it, is off by a little."""
    model, machine, wrong, says = WRONG[what]
    pair = Pair(model, machine, 1)
    pair.shares, pair.free, pair.budget_s = (None,), False, 0.0
    found = pair.searched(pair.request(None))
    wrong(monkeypatch)
    monkeypatch.setattr(pair, "searched", lambda request, **asked: found)
    with pytest.raises(AssertionError, match=says):
        unharmed(pair.run(plans_of(model)), plans_of(model), tmp_path)


@pytest.mark.slow
def test_a_free_batch_that_could_train_more_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer samples a second are said to be possible than the plan itself trains, or any plan of the other batches."""
    pair = Pair("even", "2xcpu", 1)
    pair.shares, pair.free = (None,), True
    true = pair.searched

    def searched(request: Request, **asked: Any) -> Any:
        found = true(request, **asked)
        said = found.account.get("batch") if found is not None else None
        if said is not None:
            said["bound_samples_per_s"] = 0.98 * said["samples_per_s"]
        return found

    monkeypatch.setattr(pair, "searched", searched)
    found = pair.run(plans_of("even"))
    assert any("batch of" in text and "below the bound" in text for text in found.wrong)

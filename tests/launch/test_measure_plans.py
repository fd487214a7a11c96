"""Plans run against each other: the ranks really train, and the measured fastest is what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import laminar
from laminar.api import graph_of
from laminar.cli import main
from laminar.errors import ClusterError, LaminarError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import runs_ddp
from laminar.launch import measure_plans
from laminar.launch.measure_plans import refuse_elsewhere, taken
from laminar.placement import presets
from laminar.placement.micro_batch import micro
from laminar.planner.search.finalists import DDP, Measured, finalists
from laminar.staging.stage_plans import pipeline

RECIPE = "examples/gpt.py:tiny"
MESH = laminar.Mesh({"dp": 2})


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Of the recipe's batch."""
    return graph_of(RECIPE)


@pytest.fixture(scope="module")
def searched(graph: Graph) -> Any:
    """What is predicted fastest on two CPU ranks."""
    return laminar.plan(graph, "2xcpu", budget_s=0.3, pin={"stages": 1, "microbatches": 1})


@pytest.mark.slow
def test_plans_take_turns_on_real_ranks(graph: Graph) -> None:
    """With stages and without, from the same weights: losses agree, or there would be no result."""
    small = micro(graph, 2)
    plans = [
        presets.data_parallel(graph, MESH),
        presets.zero(graph, MESH, 3),
        pipeline(small, 2, 2, 1, presets.data_parallel(small, laminar.Mesh({"dp": 1}))),
    ]
    rows = measure_plans.run_plans(RECIPE, plans, rounds=2)
    assert len(rows) == 3 and rows[0].ratio == 1.0
    for row in rows:
        assert 0 < row.low_s <= row.step_s <= row.high_s and row.rounds == 2 and row.ratio > 0
    with pytest.raises(LaminarError, match="1 and 2 ranks"):
        measure_plans.run_plans(RECIPE, [plans[0], presets.data_parallel(graph, laminar.Mesh({"dp": 1}))])


def raced(monkeypatch: pytest.MonkeyPatch, searched: Any, ratios: list[float | str]) -> tuple[Any, list[Any]]:
    """What is taken if plans are measured to have these ratios, or are out."""
    ran: list[Any] = []

    def measured(recipe: str, plans: Any, **_: Any) -> list[Measured | str]:
        ran.extend(plans)
        every = (ratios + [ratios[-1]] * len(plans))[: len(plans)]
        return [r if isinstance(r, str) else Measured(r, r, r, r, 4) for r in every]

    monkeypatch.setattr(measure_plans, "run_plans", measured)
    return taken(RECIPE, searched), ran


def test_the_measured_fastest_is_taken_and_says_so(searched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another was predicted so; what it then says of itself is about the one that was taken."""
    found, ran = raced(monkeypatch, searched, [1.0, 0.8])
    assert found.hash == ran[1].hash != searched.hash
    assert "taken because it was measured fastest: 1.250 times" in found.explain()
    assert sum(found.account["choice"]["spent"].values()) == pytest.approx(found.step_s, rel=1e-9)
    assert found.account["choice"]["plan"] != found.account["searched"] == searched.account["choice"]["plan"]
    assert [row["taken"] for row in found.account["measured"]["rows"]][:2] == [False, True]


def test_what_is_as_good_as_equal_stays_what_was_predicted(searched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise does not change the plan; and data parallel always takes part."""
    found, ran = raced(monkeypatch, searched, [1.0, 0.995])
    assert found.hash == searched.hash and "as good as it" in found.explain()
    data = presets.data_parallel(searched.origin.graph, MESH)
    assert data.hash in {plan.hash for plan in ran}


def test_torchs_own_data_parallel_takes_part_where_it_does_the_same(
    searched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not, why stands beside what was measured; the plan that is taken for it is marked."""
    found, ran = raced(monkeypatch, searched, [1.0])
    assert not any(map(runs_ddp, ran))
    assert "mean over labels" in next(o["why"] for o in found.account["measured"]["out"] if o["plan"] == DDP)
    monkeypatch.setattr("laminar.train.auto.ddp_fits.why_not", lambda *_: "")
    count = len(finalists(searched))
    found, ran = raced(monkeypatch, searched, [*[1.0] * count, 0.5])
    assert [runs_ddp(p) for p in ran] == [*[False] * count, True] and runs_ddp(found) and found.name == "ddp"


def test_what_is_predicted_alike_takes_part_once(searched: Any) -> None:
    """Two names for one program would cost the place of a plan that is another."""
    before = finalists(searched)
    twin, row = replace(searched, gather_once=True), replace(searched.account.choice, plan="twin")
    account = replace(searched.account, runners_up=(row, *searched.account.runners_up))
    origin = replace(searched.origin, others=(twin, *searched.origin.others))
    found = finalists(replace(searched, account=account, origin=origin))
    assert twin.hash != searched.hash and [f.plan.hash for f in found] == [f.plan.hash for f in before]
    row = replace(row, step_s=row.step_s + 1e-6)
    account = replace(account, runners_up=(row, *account.runners_up[1:]))
    assert finalists(replace(searched, account=account, origin=origin))[1].plan.hash == twin.hash


def test_a_plan_that_fails_is_out_and_the_others_are_compared(searched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one that was predicted fastest: then another is taken, and says why."""
    found, ran = raced(monkeypatch, searched, ["RuntimeError: no room", 1.0])
    assert found.hash == ran[1].hash and len(found.account["measured"]["rows"]) == len(ran) - 1
    assert "predicted fastest is out: RuntimeError: no room" in found.explain()
    found, _ = raced(monkeypatch, searched, [1.0, "RuntimeError: no room"])
    assert found.hash == searched.hash and "out, RuntimeError: no room" in found.explain()


def test_a_cluster_that_is_not_here_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is captured or searched."""
    with pytest.raises(ClusterError, match="can't be measured"):
        refuse_elsewhere(Cluster.preset("8xh100"))
    assert main(["plan", RECIPE, "--cluster", "2x2xcpu", "--measure"]) == 2
    assert "laminar profile -o here.json" in capsys.readouterr().err
    assert main(["plan", RECIPE, "--mesh", "dp=2", "--measure"]) == 2
    assert "--measure is for a search" in capsys.readouterr().err

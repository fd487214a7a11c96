"""`laminar profile`, `simulate` and `diff` as a user types them, on a small recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laminar import cli_cost
from laminar.cli import main
from laminar.cost.ops.price import OpCost
from laminar.cost.ops.table import Table
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.plans.plan import Plan
from laminar.ir.timeline import Timeline
from laminar.profile.sweep import keys_of

ROOT = Path(__file__).parents[2]
GPT = "examples/gpt.py:tiny"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recipes are named from the root of the checkout."""
    monkeypatch.chdir(ROOT)
    yield


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a verb: exit code, stdout, stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(list(argv))
        except SystemExit as end:
            code = int(end.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def planned(path: Path, said: Any, *more: str) -> Path:
    code, _, err = said("plan", GPT, "-o", str(path), *more)
    assert code == 0, err
    return path


def test_a_plan_for_a_cluster_says_seconds_and_bytes(said: Any, tmp_path: Path) -> None:
    """Planning for eight H100 needs none of them, and one axis over all of them is the default."""
    path = tmp_path / "plan.json"
    code, out, _ = said("plan", GPT, "--cluster", "8xh100", "-o", str(path))
    assert code == 0 and "a step on 8xh100" in out and "90 %" in out and "memory of the fullest rank" in out
    plan = Plan.load(path)
    assert plan.mesh.ranks == 8 and plan.step_s and plan.account["recipe"] == GPT


def test_simulate_writes_timeline_trace_and_picture(said: Any, tmp_path: Path) -> None:
    """Three forms of one thing: for `diff`, for a trace viewer, for a reader."""
    plan = planned(tmp_path / "plan.json", said, "--mesh", "dp=2,tp=2", "--preset", "tensor")
    sim, trace, png = (str(tmp_path / n) for n in ("sim.json", "trace.json", "sim.png"))
    code, out, err = said("simulate", str(plan), "--cluster", "2x2xa100", "-o", sim, "--trace", trace, "--png", png)
    assert code == 0, err
    assert "a step on 2x2xa100" in out and "where a step's time goes" in out
    line = Timeline.load(sim)
    assert line.kind == "simulated" and line.step_ns > 0 and line.ranks == 4
    events = json.loads(Path(trace).read_text())["traceEvents"]
    assert len([e for e in events if e.get("ph") == "X"]) >= len(line.spans)
    assert Path(png).read_bytes().startswith(b"\x89PNG")


def test_simulate_answers_in_json(said: Any, tmp_path: Path) -> None:
    """A slower network makes the same plan slower, and a script can see it."""
    plan = planned(tmp_path / "plan.json", said, "--mesh", "dp=4")
    seconds = []
    for cluster in ("4x1xh100@ib400", "4x1xh100@eth10"):
        code, out, _ = said("simulate", str(plan), "--cluster", cluster, "--json")
        data = json.loads(out)
        assert code == 0 and data["step_low_s"] < data["step_s"] < data["step_high_s"]
        seconds.append(data["step_s"])
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cluster", "8xh900"], "h900"),
        (["--cluster", "h100"], "2 ranks"),
        (["--cluster", "nowhere.json"], "nowhere.json"),
        (["--cluster", "2xcpu", "--recipe", "examples/none.py:tiny"], "examples/none.py"),
    ],
)
def test_nonsense_is_refused_by_name(argv: list[str], words: str, said: Any, tmp_path: Path) -> None:
    """An unknown device, too few of them, no file, no recipe: exit code 2 and the word that is wrong."""
    plan = planned(tmp_path / "plan.json", said, "--mesh", "dp=2")
    code, _, err = said("simulate", str(plan), *argv)
    assert code == 2 and words in err and "Traceback" not in err


def test_a_plan_without_a_recipe_asks_for_one(said: Any, tmp_path: Path) -> None:
    """A plan made in Python names no recipe."""
    path = planned(tmp_path / "plan.json", said, "--mesh", "dp=2")
    data = json.loads(path.read_text())
    del data["account"]["recipe"]
    path.write_text(json.dumps(data))
    code, _, err = said("simulate", str(path), "--cluster", "2xcpu")
    assert code == 2 and "--recipe" in err
    assert said("simulate", str(path), "--cluster", "2xcpu", "--recipe", GPT)[0] == 0


def measured(cluster: Cluster) -> set[str]:
    """The ops that a profile holds."""
    return {key for section in Table.of(cluster.profile).sections.values() for key in section.ops}


@pytest.mark.slow
def test_a_profile_is_a_cluster_that_later_runs_extend(said: Any, tmp_path: Path) -> None:
    """Measured here, for real, with little time: ops and exchanges of two ranks, then those of a recipe.

    How much is measured within that time is the machine's affair; the first block of ops always is, and first come
    those that are thought to take longest.
    """
    path = tmp_path / "here.json"
    few = ("--ranks", "2", "--budget", "6", "--no-trials", "--json")
    if Cluster.detect().devices < 2:
        pytest.skip("needs two cores")
    code, out, err = said("profile", "-o", str(path), *few)
    assert code == 0, err
    first = json.loads(out)
    (section,) = first["sections"].values()
    assert section["entries"] > 0 and first["collectives"] > 0
    cluster = Cluster.load(path)
    assert cluster.device.bytes_per_s.source == "measured"
    plan = planned(tmp_path / "plan.json", said, "--mesh", "dp=2", "--cluster", str(path))
    assert sum(Plan.load(plan).account["known"].values()) == pytest.approx(1, abs=1e-3)
    code, out, err = said("profile", "-o", str(path), "--for", GPT, *few)
    assert code == 0, err
    again = json.loads(out)
    assert again["sections"][next(iter(again["sections"]))]["entries"] > section["entries"]
    own = set(keys_of(cli_cost._programs(GPT, [2]), OpCost(Cluster.preset("2xcpu")), 2))
    before, after = (len(own & measured(c)) for c in (cluster, Cluster.load(path)))
    assert before < after, "the recipe's own ops were measured"
    data = json.loads(said("simulate", str(plan), "--json")[1])
    assert data["known"]["measured"] > 0, "and are priced by that"


@pytest.mark.slow
def test_a_recorded_run_is_compared_with_its_prediction(said: Any, tmp_path: Path) -> None:
    """The whole way round: plan, simulate, train on two ranks, diff."""
    plan = planned(tmp_path / "plan.json", said, "--mesh", "dp=2", "--cluster", "2xcpu")
    sim, run = str(tmp_path / "sim.json"), str(tmp_path / "run.json")
    assert said("simulate", str(plan), "-o", sim)[0] == 0
    code, _, err = said(
        "train",
        GPT,
        "--plan",
        str(plan),
        "--steps",
        "8",
        "--timeline",
        run,
        "--run-dir",
        str(tmp_path / "run"),
        "--device",
        "cpu",
    )
    assert code == 0, err
    measured = Timeline.load(run)
    assert measured.kind == "measured" and measured.ranks == 2
    code, out, err = said("diff", sim, run, "--png", str(tmp_path / "both.png"))
    assert code == 0 and "matmul" in out and "all_reduce" in out and (tmp_path / "both.png").exists(), err
    data = json.loads(said("diff", sim, run, "--json")[1])
    assert isinstance(data, dict) and data


def test_diff_refuses_what_is_no_timeline(said: Any, tmp_path: Path) -> None:
    """A plan in place of a timeline is named, not traced back."""
    plan = planned(tmp_path / "plan.json", said, "--mesh", "dp=2")
    code, _, err = said("diff", str(plan), str(tmp_path / "none.json"))
    assert code == 2 and "plan.json" in err and "Traceback" not in err


@pytest.mark.parametrize("verb", ["profile", "simulate", "diff"])
def test_help_teaches(verb: str, said: Any) -> None:
    """Every verb shows how it is used."""
    code, out, _ = said(verb, "--help")
    assert code == 0 and "examples" in out and f"laminar {verb}" in out

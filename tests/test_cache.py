"""What is kept between commands: found again by its content, never taken for something else."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from laminar import api, cache
from laminar.cli import main
from laminar.ir.clusters.cluster import Cluster
from laminar.planner.estimate.candidates import Score
from laminar.planner.search import earlier_plans
from laminar.planner.search.best_first import graph_search

RECIPE = """
import torch
from torch import nn
from laminar import Recipe

def tiny():
    def data():
        while True:
            yield {"x": torch.zeros(4, 8)}
    return Recipe(model=lambda: nn.Linear(8, WIDTH), loss=lambda m, b: m(b["x"]).square().mean(), data=data)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAMINAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _recipe(folder: Path, width: int, name: str = "kept_recipe.py") -> str:
    (folder / name).write_text(RECIPE.replace("WIDTH", str(width)))
    return f"{folder / name}:tiny"


def _count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often something is captured from here on."""
    seen: list[int] = []
    real = api.capture

    def counted(*args: Any) -> Any:
        seen.append(1)
        return real(*args)

    monkeypatch.setattr(api, "capture", counted)
    return seen


def test_a_graph_is_captured_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time it comes from the file, and is the same."""
    seen, recipe = _count(monkeypatch), _recipe(tmp_path, 16)
    first, second = api.graph_of(recipe), api.graph_of(recipe)
    assert seen == [1] and first.hash == second.hash and len(list(home.glob("graphs/*.json"))) == 1


CONFIGURED = """
import json, os, torch
from pathlib import Path
from torch import nn
from laminar import Recipe

def tiny():
    width = json.loads((Path(__file__).parent / "config.json").read_text())["width"]
    bias = os.environ.get("LAMINAR_TEST_BIAS") == "1"
    return Recipe(model=lambda: nn.Linear(8, width, bias=bias), loss=lambda m, b: m(b["x"]).square().mean(),
                  data=lambda: [{"x": torch.zeros(4, 8)}])
"""


def test_a_recipe_that_reads_a_file_or_the_environment_is_what_it_builds(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got the graph of the model that its text had built before."""
    (tmp_path / "configured.py").write_text(CONFIGURED)
    seen, recipe = _count(monkeypatch), f"{tmp_path / 'configured.py'}:tiny"

    def shapes(width: int, bias: str) -> list[tuple[int, ...]]:
        (tmp_path / "config.json").write_text(json.dumps({"width": width}))
        monkeypatch.setenv("LAMINAR_TEST_BIAS", bias)
        return [i.spec.shape for i in api.graph_of(recipe).of_kind("param")]

    assert shapes(16, "0") == [(16, 8)] and shapes(24, "0") == [(24, 8)] and shapes(24, "1") == [(24, 8), (24,)]
    assert shapes(16, "0") == [(16, 8)] and len(seen) == 3  # the first one is still there


def test_changed_code_is_another_graph(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name depends on the content of the user's files, not on what they are called."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python takes files of one second and one size for the same
    seen = _count(monkeypatch)
    first = api.graph_of(_recipe(tmp_path, 16))
    second = api.graph_of(_recipe(tmp_path, 32))
    assert len(seen) == 2 and first.hash != second.hash
    monkeypatch.setattr(cache, "own_code", lambda: "another laminar")
    api.graph_of(_recipe(tmp_path, 32))
    assert len(seen) == 3


@pytest.mark.parametrize("harm", ["{", "{}", ""])
def test_a_file_that_can_not_be_read_is_made_again(home: Path, tmp_path: Path, harm: str) -> None:
    """Cut off, of another form, or empty."""
    recipe = _recipe(tmp_path, 16)
    want = api.graph_of(recipe).hash
    (file,) = home.glob("graphs/*.json")
    file.write_text(harm)
    assert api.graph_of(recipe).hash == want
    assert json.loads(file.read_text())


def test_the_oldest_make_room(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there may be stay; what was used last stays longest."""
    monkeypatch.setattr(cache, "MOST_FILES", 3)
    for n in range(5):
        assert cache.kept("things", {"n": n}, lambda n=n: n, int, int) == n
    assert len(list(home.glob("things/*.json"))) == 3
    made: list[int] = []
    assert cache.kept("things", {"n": 4}, lambda: made.append(1) or 4, int, int) == 4 and not made


def test_nothing_is_kept_where_it_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned off, or on a disk that takes nothing."""
    monkeypatch.setenv("LAMINAR_CACHE", "off")
    assert cache.kept("things", {}, lambda: 1, int, int) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAMINAR_CACHE", str(tmp_path / "file"))
    assert cache.kept("things", {}, lambda: 1, int, int) == 1


def test_a_plan_is_searched_once(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same question has the same answer, from the file; another question is searched."""
    recipe = _recipe(tmp_path, 16)
    asked = ["plan", recipe, "--cluster", "2xcpu", "--json"]
    said = []
    for more in ([], [], ["--pin", "dp=2"]):
        assert main([*asked, *more]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1]
    assert len(list(home.glob("plans/*.json"))) == 2


def test_a_wider_command_takes_nothing_slower_than_an_earlier_narrower_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands are processes of their own: what one has found, the next reads from the folder and simulates first."""
    recipe, simulated = _recipe(tmp_path, 16), []
    real = earlier_plans.usable

    def counted(*args: Any) -> Any:
        for final in real(*args):
            simulated.append(final.plan.hash)
            yield final

    monkeypatch.setattr(graph_search, "usable", counted)
    told = []
    for more in (["--only", "data"], ["--only", "data,zero"], []):
        earlier_plans.forget()  # as a new process would
        assert main(["plan", recipe, "--cluster", "2xcpu", "--json", *more]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert len(simulated) >= 2 and len(list(home.glob("found/*.json"))) == 1
    assert told[0]["step_s"] >= told[1]["step_s"] >= told[2]["step_s"]


def test_what_was_found_comes_back_from_its_file_as_it_was(home: Path, tmp_path: Path) -> None:
    """Score and plan, field by field; a file that was cut off is nothing."""

    def told(score: Score) -> dict[str, Any]:
        return {f.name: getattr(score, f.name) for f in fields(score) if f.name != "plan"}

    recipe = _recipe(tmp_path, 16)
    graph, cluster = api.graph_of(recipe), Cluster.preset("2xcpu")
    earlier_plans.forget()
    with earlier_plans.across_commands(graph, cluster.hash):
        api.plan(graph, cluster, budget_s=0.5)
    key = (graph.hash, cluster.hash, "adamw")
    before = earlier_plans._FOUND[key]
    earlier_plans.forget()
    with earlier_plans.across_commands(graph, cluster.hash):
        after = earlier_plans._FOUND[key]
        assert after and [(told(s), p.hash) for s, p in before] == [(told(s), p.hash) for s, p in after]
    for file in home.glob("found/*.json"):
        file.write_text(file.read_text()[:-9])
    earlier_plans.forget()
    with earlier_plans.across_commands(graph, cluster.hash):
        assert earlier_plans._FOUND[key] == []

"""`laminar plan --rules FILE`: public rewrite rules are proved, searched with, and carried by the plan that uses them.

The file is one as TASO and FlexFlow write them, with rules that are true and new, true and known, wrong, not
supported, and broken. What is computed is held against one device and against plain PyTorch; what is found against a
search without the file.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laminar
from laminar.cli import main
from laminar.cli_plan import _bar
from laminar.errors import PlanError, RuleError
from laminar.ir.graph import Graph
from laminar.ir.plans.staged import load_plan
from laminar.rewrite.apply import Rewrite
from laminar.rewrite.implied import implied
from laminar.rewrite.standalone import stage
from laminar.rewrite.variants import rewritten
from laminar.runtime.check import prove_rule_files
from laminar.runtime.check.prove_rewrites import PROOF_TOLERANCE, Proof
from laminar.runtime.check.prove_rule_files import ProvedRules, proved_rules
from tests.support.rank_pool import Ranks
from tests.support.rule_file_cases import RIGHT, WRONG, add, mul, relu, rule

RECIPE = '''
"""Two projections side by side: what reads them reads both."""
import torch
from torch import nn
from laminar import Recipe

class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(32, 24, bias=False) for _ in range(2))
        self.out = nn.Linear(48, 8)

    def forward(self, x):
        return self.out(torch.cat([self.a(x), self.b(x)], 1).tanh())

def twin():
    def model():
        torch.manual_seed(0)
        return Twin()

    def data():
        draw = torch.Generator().manual_seed(1)
        while True:
            yield torch.randn(512, 32, generator=draw), torch.randn(512, 8, generator=draw)

    return Recipe(model=model, loss=lambda m, b: (m(b[0]) - b[1]).square().mean(), data=data, steps=3,
                  optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-6))
'''
RULES = [
    RIGHT["wider"],
    rule("taken out", [mul(-1, -2), mul(-1, -3), add(0, 1)], [add(-2, -3), mul(-1, 0)], [(2, 0, 1, 0)]),
    RIGHT["longer"],
    WRONG["relu of a sum"],
    rule("conv", [("OP_CONV2D", [-1, -2], {})], [relu(-1)], [(0, 0, 0, 0)]),
    {"_t": "Rule", "name": "half", "srcOp": [{"type": "OP_RELU"}]},
    WRONG["placed"],
]
REASONS = {
    "longer": "in Laminar's table already",
    "relu of a sum": "the two sides differ",
    "conv": "an op that is not known: OP_CONV2D",
    "half": "can't be read: KeyError: 'input'",
    "placed": "about placement, not algebra",
}
CLUSTER = "2xcpu"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts and plans of other runs are no help here."""
    monkeypatch.setenv("LAMINAR_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def rules_file(tmp_path: Path) -> Path:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"_t": "RuleCollection", "rule": RULES}))
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "twins.py"
    path.write_text(RECIPE)
    return f"{path}:twin"


@pytest.fixture
def graph(recipe: str) -> Graph:
    return laminar.api.graph_of(recipe)


def plain(recipe: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of an ordinary loop in float64."""
    made = laminar.api.load_recipe(recipe)
    model = made.model().double()
    optimizer = made.optimizer(model.parameters())  # type: ignore[misc]
    losses = []
    for batch in itertools.islice(made.data(), 3):
        optimizer.zero_grad()
        loss = made.loss(model, tuple(t.double() for t in batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def _train(recipe: str, path: str) -> tuple[list[float], dict[str, Tensor], Any]:
    """The same on real ranks, by a plan file."""
    made = laminar.api.load_recipe(recipe)
    batches = [tuple(t.double() for t in batch) for batch in itertools.islice(made.data(), 3)]
    job = laminar.parallelize(made.model().double(), made.loss, made.optimizer, batch=batches[0], plan=path)
    losses, weights = [job.step(batch).loss for batch in batches], job.state_dict()
    job.close()
    return losses, weights, job.plan.rewrites


def test_rules_of_a_file_make_a_plan_that_needs_the_file_no_more(
    recipe: str, rules_file: Path, two: Ranks, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From the command line to weights: the plan is faster than without, and trains on ranks that have no such file."""
    path = tmp_path / "plan.json"
    assert main(["plan", recipe, "--cluster", CLUSTER, "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    asked = ["plan", recipe, "--cluster", CLUSTER, "--rules", str(rules_file), "-o", str(path)]
    assert main([*asked, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)

    told = data["rules"]
    assert {k: told[k] for k in ("rules", "loaded", "proved", "new")} == {
        "rules": 7,
        "loaded": 4,
        "proved": 3,
        "new": 2,
    }
    assert {one["name"]: one["reason"] for one in told["each"] if one["reason"]} == REASONS
    searched = {text for one in told["each"] for _, text, _ in one["rules"]}
    assert searched == {
        "join(mm(A, B), mm(A, C), 1) => mm(A, join(B, C, 1))",
        "join(bmm(A, B), bmm(A, C), 2) => bmm(A, join(B, C, 2))",
        "add(mul(A, B), mul(A, C)) => mul(A, add(B, C))",
    }
    assert told["used"] == {"wider": 1} and "each" not in load_plan(path).account["rules"]
    assert data["step_s"] < 0.96 * without["step_s"] and "rules" not in without
    assert data["proof"].startswith("proved on random numbers, the model with few layers")

    rules_file.unlink()
    assert main(["verify", recipe, "--plan", str(path)]) == 0
    assert main(["simulate", str(path), "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("equal: ")
    assert json.loads(out[-1])["step_s"] == pytest.approx(data["step_s"], rel=1e-12)
    losses, weights = plain(recipe)
    for said, got, carried in two.run(_train, recipe, str(path)):
        assert any(step.rule == "wider" and step.text for step in carried)
        torch.testing.assert_close(torch.tensor(said), torch.tensor(losses), rtol=1e-9, atol=0)
        for name, weight in weights.items():
            torch.testing.assert_close(got[name], weight, rtol=1e-9, atol=1e-11)


def test_people_are_told_what_became_of_the_file(
    recipe: str, rules_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most rules of public files are about placement: someone who hands one over wants to know what is left."""
    assert main(["plan", recipe, "--cluster", CLUSTER, "--rules", str(rules_file)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:9] == [
        f"{rules_file}: 7 rules, 4 loaded, 3 of them proved on random numbers",
        "  2 are new, and searched with",
        "  1 left out: in Laminar's table already",
        "  1 left out: the two sides differ",
        "  1 left out: an op that is not known",
        "  1 left out: can't be read",
        "  1 left out: about placement, not algebra",
        "  the plan uses wider x1",
        "",
    ]
    assert "  wider, from a file: join(mm(A, B), mm(A, C), 1) => mm(A, join(B, C, 1))" in out


def test_a_search_with_other_rules_has_another_space(graph: Graph, rules_file: Path) -> None:
    """What a certificate vouches for depends on the rules; and no search takes a plan whose rules it was not given."""
    with_rules = laminar.plan(graph, CLUSTER, rules=rules_file)
    without = laminar.plan(graph, CLUSTER)
    assert with_rules.space.hash != without.space.hash
    assert [name for name, _ in with_rules.space.data["rules"]] == ["wider", "wider-batched", "taken out"]
    assert "rewritten by the rules of a file, too: wider, wider-batched, taken out" in str(with_rules.space)
    assert "rules" not in without.space.data and "of a file" not in str(without.space)
    assert with_rules.account["rules"]["used"] and not any(step.text for step in without.rewrites)
    assert (with_rules.step_s or 0) < (without.step_s or 0)
    again = laminar.plan(graph, CLUSTER, rules=proved_rules(rules_file))
    assert again.hash == with_rules.hash


def test_what_if_searches_with_the_same_rules(graph: Graph, rules_file: Path) -> None:
    """The file may be gone by then."""
    plan = laminar.plan(graph, CLUSTER, rules=rules_file)
    rules_file.unlink()
    after = plan.what_if(margin=0.3).after
    assert after.hash == plan.hash and after.space.data["rules"] == plan.space.data["rules"]
    assert not any(step.text for step in plan.what_if(only="data,zero").after.rewrites)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "rules.json is no file of rules"),
        ('{"rule": []}', "rules.json is not a RuleCollection"),
        ('{"_t": "RuleCollection", "rule": [{"name": "x"}]}', "rule number 0 of the file can't be read"),
        (None, "rules.json is no file of rules"),
    ],
)
def test_a_file_that_holds_no_rules_is_refused_by_name(
    text: str | None, complaint: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is captured or searched."""
    path = tmp_path / "rules.json"
    if text is not None:
        path.write_text(text)
    assert main(["plan", recipe, "--cluster", CLUSTER, "--rules", str(path)]) == 2
    err = capsys.readouterr().err
    assert "RuleError" in err and complaint in err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--mesh", "dp=2"], "--rules is for a search"),
        (["--cluster", CLUSTER, "--only", "data,zero"], "this search may not"),
    ],
)
def test_rules_go_with_searches_that_rewrite(
    options: list[str], complaint: str, recipe: str, rules_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is to believe that rules were looked at where they were not."""
    assert main(["plan", recipe, *options, "--rules", str(rules_file)]) == 2
    assert complaint in capsys.readouterr().err


def test_clusters_of_several_kinds_are_refused(graph: Graph, rules_file: Path) -> None:
    """The search for those places the graph as it was captured."""
    from laminar.ir.clusters.cluster import Cluster

    mixed = Cluster.preset("1x4xh100+1x4xa100")
    with pytest.raises(PlanError, match="several kinds of devices"):
        laminar.plan(graph, mixed, rules=rules_file)


def test_rules_are_proved_once_for_the_same_content(rules_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file takes a while; another name for it changes nothing, another rule in it does."""
    told: list[tuple[int, int]] = []
    first = proved_rules(rules_file, lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert all(error <= PROOF_TOLERANCE for error in first.errors.values()) and set(first.errors) == {
        r.name for r in first.new
    }

    def never(*_: Any) -> float:
        raise AssertionError("proved again")

    monkeypatch.setattr(prove_rule_files, "error_on", never)
    other = rules_file.rename(rules_file.with_name("renamed.json"))
    again = proved_rules(other)
    assert again.verdicts == first.verdicts and again.file == str(other)
    other.write_text(json.dumps({"_t": "RuleCollection", "rule": RULES[:1]}))
    with pytest.raises(AssertionError, match="proved again"):
        proved_rules(other)


def test_a_rule_that_is_wrong_on_graphs_is_refused(rules_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tried as the file writes it is tried again as it would be used."""
    monkeypatch.setattr(prove_rule_files, "error_on", lambda one, on: 1e-3 if one.name == "taken out" else 0.0)
    found = {v.name: v for v in proved_rules(rules_file).verdicts}
    assert found["taken out"].left_out.reason == "the two sides differ" and not found["taken out"].proved
    assert found["taken out"].rules == () and found["wider"].rules


def test_a_plan_that_fails_on_its_model_is_searched_without_the_file(
    graph: Graph, rules_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule may hold where it was tried and not where it is used; then Laminar's own are still there."""

    def fails(captured: Graph, plan: Any, errors: Any) -> Proof:
        return Proof(dict(errors), 1.0 if any(step.text for step in plan.rewrites) else 0.0)

    monkeypatch.setattr("laminar.runtime.check.prove_rewrites.proof", fails)
    plan = laminar.plan(graph, CLUSTER, rules=rules_file)
    assert plan.rewrites and not any(step.text for step in plan.rewrites)
    assert plan.account["rules"]["used"] == {} and plan.account["proof"].startswith("proved")


def test_a_plan_whose_carried_rule_was_edited_is_refused(graph: Graph, rules_file: Path, tmp_path: Path) -> None:
    """The text is all that there is: another one makes another graph, or none."""
    plan = laminar.plan(graph, CLUSTER, rules=rules_file)
    data = plan.to_json()
    at = next(k for k, step in enumerate(data["rewrites"]["steps"]) if len(step) > 3)

    def edited(text: Any, *more: Any) -> Any:
        steps = data["rewrites"]["steps"]
        changed = [*steps[:at], [*steps[at][:3], text, *more], *steps[at + 1 :]]
        path = tmp_path / "edited.json"
        path.write_text(json.dumps({**data, "rewrites": {**data["rewrites"], "steps": changed}}))
        return load_plan(path)

    assert edited(data["rewrites"]["steps"][at][3]).hash == plan.hash
    with pytest.raises(RuleError, match="has no =>"):
        rewritten(graph, edited("join(A, B, 1)"))
    with pytest.raises(PlanError, match=r"this graph has 0|make graph"):
        rewritten(graph, edited("join(mm(A, B), mm(A, C), 1) => join(mm(A, C), mm(A, B), 1)"))
    with pytest.raises(PlanError, match="corrupt plan"):
        edited("join(A, B, 1)", "and more")


# --- what is new -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shapes", "known"),
    [
        ("add(mm(A, B), mm(C, B)) => mm(add(A, C), B)", {"A": (6, 3), "B": (3, 5), "C": (6, 3)}, True),
        ("add(mm(A, B), mm(C, B)) => mm(add(C, A), B)", {"A": (6, 3), "B": (3, 5), "C": (6, 3)}, True),
        (
            "mm(mm(mm(A, B), C), D) => mm(A, mm(B, mm(C, D)))",
            {"A": (6, 3), "B": (3, 5), "C": (5, 2), "D": (2, 7)},
            True,
        ),
        ("mm(A, B) => t(mm(t(B), t(A)))", {"A": (6, 3), "B": (3, 5)}, False),
        ("join(mm(A, B), mm(A, C), 1) => mm(A, join(B, C, 1))", {"A": (6, 3), "B": (3, 5), "C": (3, 2)}, False),
        ("add(A, B) => add(B, A)", {"A": (6, 3), "B": (6, 3)}, True),
    ],
)
def test_what_the_table_implies_is_told_from_what_is_new(text: str, shapes: Any, known: bool) -> None:
    """In one step or two, whatever the order of a sum; a search with it would look at the same graphs twice."""
    one = Rewrite.of_file("one", text)
    assert implied(one, stage(one, shapes)) is known


def test_a_file_without_anything_new_says_so(tmp_path: Path) -> None:
    """It is no error: the plan is the one without."""
    path = tmp_path / "known.json"
    path.write_text(json.dumps({"_t": "RuleCollection", "rule": [RIGHT["longer"]]}))
    found = proved_rules(path)
    assert found.new == () and str(found).splitlines()[1] == "  0 are new, and searched with"
    assert isinstance(found, ProvedRules) and found.counts().left_out == {"in Laminar's table already": 1}


def test_the_bar_is_as_long_as_what_is_done() -> None:
    """Of a bar one wants to know how much is left."""
    assert (_bar(0, 4, 4), _bar(2, 4, 4), _bar(4, 4, 4)) == ("[....] 0/4", "[##..] 2/4", "[####] 4/4")

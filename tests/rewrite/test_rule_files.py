"""Rules from a file: those that hold become rewrites, the others are named with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laminar.errors import RuleError
from laminar.rewrite import standalone as laws
from laminar.rewrite.rule_files import Loaded, entries, load
from laminar.runtime.check.prove_rewrites import PROOF_TOLERANCE, prove
from tests.support.rule_file_cases import RIGHT, TEXTS, TRUE_BUT_UNUSED, WRONG, linear, relu, rule

SHAPES: dict[str, Any] = {
    "factor": {"A": (6, 3), "B": (3, 5), "C": (6, 3)},
    "factor-batched": {"A": (2, 6, 3), "B": (2, 3, 5), "C": (2, 6, 3)},
    "longer": {"A": (6, 3), "B": (3, 5), "C": (6, 2), "D": (2, 5)},
    "longer-batched": {"A": (2, 6, 3), "B": (2, 3, 5), "C": (2, 6, 2), "D": (2, 2, 5)},
    "wider": {"A": (6, 3), "B": (3, 5), "C": (3, 2)},
    "wider-batched": {"A": (2, 6, 3), "B": (2, 3, 5), "C": (2, 3, 2)},
    "relu": {"A": (4, 3), "B": (4, 2)},
    "relu-batched": {"A": (2, 4, 3), "B": (2, 4, 2)},
    "distribute": {"A": (4, 3), "B": (4, 3), "C": (4, 3)},
    "batch-batched": {"A": (2, 6, 3), "B": (2, 3, 5), "C": (4, 6, 3), "D": (4, 3, 5)},
    "gram": {"A": (6, 3), "B": (3, 5)},
    "gram-batched": {"A": (2, 6, 3), "B": (2, 3, 5)},
}


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """All the rules above, from one file."""
    return load({"_t": "RuleCollection", "rule": [*RIGHT.values(), *TRUE_BUT_UNUSED.values(), *WRONG.values()]})


def test_rules_that_hold_are_put_into_the_language_of_rewrites(loaded: Loaded) -> None:
    """A weight of the file is stored turned, and an axis counts the batch: both are gone from the text."""
    assert {r.name: r.text for r in loaded.rules} == TEXTS
    assert set(loaded.holds) == {*RIGHT, *TRUE_BUT_UNUSED}


@pytest.mark.parametrize("name", TEXTS)
def test_rules_from_a_file_rewrite_graphs_without_changing_results(loaded: Loaded, name: str) -> None:
    """What was tried with numpy must also be right for the ops of a graph."""
    rule = next(r for r in loaded.rules if r.name == name)
    graph = laws.stage(rule, SHAPES[name])
    sites = rule.find(graph)
    assert sites
    assert prove(graph, rule.apply(graph, sites[0])) <= PROOF_TOLERANCE


def test_everything_else_is_named_with_the_reason(loaded: Loaded) -> None:
    """A rule that fails is not silently gone: who wrote it wants to know which, and why."""
    assert {name: str(fault) for name, fault in loaded.rejected.items()} == {
        "handed out": "several results at once",
        "fused": "both sides are the same here",
        "again": "said before",
        "relu of a sum": "the two sides differ",
        "other order": "the two sides differ",
        "relu too early": "the two sides differ",
        "from nowhere": "the right side reads what the left side does not have",
        "too wide": "no sizes fit both sides",
        "placed": "about placement, not algebra",
    }
    assert str(loaded).splitlines()[:3] == [
        "15 rules of algebra, 10 hold",
        "  12 rewrite rules made of them",
        "  3 left out: the two sides differ",
    ]


def test_a_file_is_read_from_disk(tmp_path: Path) -> None:
    """The format is JSON on disk."""
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"_t": "RuleCollection", "rule": [RIGHT["factor"]]}))
    assert [r.name for r in load(path).rules] == ["factor", "factor-batched"]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"rule": []}, "not a RuleCollection"),
        ({"_t": "RuleCollection", "rule": [{"name": "x"}]}, "rule number 0 of the file can't be read"),
    ],
)
def test_a_file_that_holds_no_rules_is_refused(data: dict[str, Any], complaint: str) -> None:
    """Half a file must not be taken for a file of few rules."""
    with pytest.raises(RuleError, match=complaint):
        entries(data)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    """A typing error in a path is the commonest error of all."""
    with pytest.raises(RuleError, match=r"nowhere\.json is no file of rules"):
        load(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        ({"name": "half", "srcOp": [{"type": "OP_RELU"}]}, "can't be read: KeyError: 'input'"),
        ("a word", "can't be read: TypeError"),
        (rule("conv", [("OP_CONV2D", [-1, -2], {})], [relu(-1)], [(0, 0, 0, 0)]), "an op that is not known: OP_CONV2D"),
        (
            rule("tanh", [linear(-1, -4, 3)], [linear(-1, -4)], [(0, 0, 0, 0)]),
            "an op that is not known: OP_LINEAR with PM_ACTI 3",
        ),
        (
            rule("wide", [("OP_SPLIT", [-1], {"PM_NUM_OUTPUTS": 10**9, "PM_AXIS": 1})], [relu(-1)], [(0, 0, 0, 0)]),
            "too large",
        ),
        (rule("long", [relu(-1), *[relu(k) for k in range(40)]], [relu(-1)], [(40, 0, 0, 0)]), "too large"),
        (rule("none", [relu(-1), ("OP_RELU", [], {})], [relu(-1)], [(1, 0, 0, 0)]), "no sizes fit both sides"),
        (
            rule(
                "three",
                [("OP_CONCAT", [-1, -2, -3], {"PM_AXIS": 2}), relu(0)],
                [relu(-1), relu(-2), relu(-3), ("OP_CONCAT", [0, 1, 2], {"PM_AXIS": 2})],
                [(1, 0, 3, 0)],
            ),
            "can't be said in the language of rewrites",
        ),
        (rule("elsewhere", [relu(-1), relu(-2)], [linear(-1, -2)], [(0, 0, 0, 0)]), "the two sides differ"),
        (rule("ahead", [relu(1), relu(-1)], [relu(-1)], [(0, 0, 0, 0)]), "no sizes fit both sides"),
    ],
)
def test_a_rule_that_makes_no_sense_is_left_out_and_the_others_are_not(one: Any, reason: str) -> None:
    """Files are written by programs that know more ops than we do, and edited by hand."""
    found = load({"_t": "RuleCollection", "rule": [one, RIGHT["factor"]]})
    assert [r.name for r in found.rules] == ["factor", "factor-batched"]
    (said,) = found.rejected.values()
    assert str(said).startswith(reason)


def test_names_that_are_taken_are_told_apart_by_number() -> None:
    """Plans remember rules by name, and two of one file, or one of the file and one of the table, may share it."""
    here = [{**RIGHT["factor"], "name": "merge-products"}, RIGHT["wider"], {**RIGHT["relu"], "name": "wider"}]
    found = load({"_t": "RuleCollection", "rule": here})
    assert {r.name for r in found.rules if "batched" not in r.name} == {
        "merge-products (number 0)",
        "wider",
        "wider (number 2)",
    }
    assert found.origins["wider (number 2)-batched"] == "wider (number 2)"
    assert all(r.carried for r in found.rules)

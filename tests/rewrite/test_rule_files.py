"""Rules from a file: those that hold become rewrites, the others are named with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laminar.errors import RuleError
from laminar.rewrite import standalone as laws
from laminar.rewrite.rule_files import Loaded, entries, load
from laminar.runtime.check.prove_rewrites import TOLERANCE, prove
from tests.support.rule_file_cases import TEXTS

Spec = tuple[str, list[Any], dict[str, int]]


def linear(x: Any, w: Any, acti: int = 0) -> Spec:
    """x times w turned."""
    return "OP_LINEAR", [x, w], {"PM_ACTI": acti}


def concat(a: Any, b: Any, axis: int) -> Spec:
    """Two values side by side."""
    return "OP_CONCAT", [a, b], {"PM_NUM_INPUTS": 2, "PM_AXIS": axis, "PM_NUMDIM": 3}


def add(a: Any, b: Any) -> Spec:
    """A sum."""
    return "OP_EW_ADD", [a, b], {}


def mul(a: Any, b: Any) -> Spec:
    """A product element by element."""
    return "OP_EW_MUL", [a, b], {}


def relu(a: Any) -> Spec:
    """What is positive."""
    return "OP_RELU", [a], {}


def split(a: Any, axis: int) -> Spec:
    """Two pieces."""
    return "OP_SPLIT", [a], {"PM_NUM_OUTPUTS": 2, "PM_AXIS": axis}


def rule(name: str, left: list[Spec], right: list[Spec], outputs: list[tuple[int, int, int, int]]) -> dict[str, Any]:
    """One rule as the file has it; inputs are -1, -2, ..., the i-th op is i, one of its results (i, k)."""

    def op(spec: Spec) -> dict[str, Any]:
        ids = [i if isinstance(i, tuple) else (i, 0) for i in spec[1]]
        return {
            "_t": "Operator",
            "type": spec[0],
            "input": [{"_t": "Tensor", "opId": i, "tsId": t} for i, t in ids],
            "para": [{"_t": "Parameter", "key": k, "value": v} for k, v in spec[2].items()],
        }

    maps = [{"_t": "MapOutput", "srcOpId": a, "srcTsId": b, "dstOpId": c, "dstTsId": d} for a, b, c, d in outputs]
    return {"_t": "Rule", "name": name, "srcOp": [*map(op, left)], "dstOp": [*map(op, right)], "mappedOutput": maps}


ONE = [(2, 0, 2, 0)]
RIGHT = {
    "factor": rule("factor", [linear(-1, -4), linear(-2, -4), add(0, 1)], [add(-1, -2), linear(0, -4)], [(2, 0, 1, 0)]),
    "longer": rule("longer", [linear(-1, -4), linear(-2, -5), add(0, 1)],
                   [concat(-1, -2, 2), concat(-4, -5, 2), linear(0, 1)], ONE),
    "wider": rule("wider", [linear(-1, -4), linear(-1, -5), concat(0, 1, 2)],
                  [concat(-4, -5, 1), linear(-1, 0)], [(2, 0, 1, 0)]),
    "relu": rule("relu", [relu(-1), relu(-2), concat(0, 1, 2)], [concat(-1, -2, 2), relu(0)], [(2, 0, 1, 0)]),
    "distribute": rule("distribute", [add(-2, -3), mul(-1, 0)], [mul(-1, -2), mul(-1, -3), add(0, 1)], [(1, 0, 2, 0)]),
    "batch": rule("batch", [linear(-1, -4), linear(-2, -5), concat(0, 1, 0)],
                  [concat(-1, -2, 0), concat(-4, -5, 0), linear(0, 1)], ONE),
    "gram": rule("gram", [linear(-1, -2), linear(-1, -1), concat(0, 1, 2)],
                 [concat(-2, -1, 1), linear(-1, 0)], [(2, 0, 1, 0)]),
}  # fmt: skip
TRUE_BUT_UNUSED = {
    "handed out": rule("handed out", [linear(-1, -4), linear(-1, -5)],
                       [concat(-4, -5, 1), linear(-1, 0), split(1, 2)], [(0, 0, 2, 0), (1, 0, 2, 1)]),
    "fused": rule("fused", [linear(-1, -4), relu(0)], [linear(-1, -4, 2)], [(1, 0, 0, 0)]),
    "again": rule("again", [linear(-1, -4), linear(-2, -4), add(0, 1)], [add(-1, -2), linear(0, -4)], [(2, 0, 1, 0)]),
}  # fmt: skip
WRONG = {
    "relu of a sum": rule("relu of a sum", [add(-1, -2), relu(0)], [relu(-1), relu(-2), add(0, 1)], [(1, 0, 2, 0)]),
    "other order": rule("other order", [concat(-1, -2, 2), relu(0)], [relu(-1), relu(-2), concat(1, 0, 2)],
                        [(1, 0, 2, 0)]),
    "relu too early": rule("relu too early", [linear(-1, -4, 2), linear(-2, -4, 2), add(0, 1)],
                           [add(-1, -2), linear(0, -4, 2)], [(2, 0, 1, 0)]),
    "from nowhere": rule("from nowhere", [linear(-1, -4)], [concat(-4, -6, 0), linear(-1, 0)], [(0, 0, 1, 0)]),
    "too wide": rule("too wide", [linear(-1, -4), add(0, -1)], [concat(-1, -1, 2), linear(0, -4)], [(1, 0, 1, 0)]),
    "placed": rule("placed", [("OP_PARTITION", [-1], {"PM_PARALLEL_DIM": 1, "PM_PARALLEL_DEGREE": 2})], [relu(-1)],
                   [(0, 0, 0, 0)]),
}  # fmt: skip
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
    assert prove(graph, rule.apply(graph, sites[0])) <= TOLERANCE


def test_everything_else_is_named_with_the_reason(loaded: Loaded) -> None:
    """A rule that fails is not silently gone: who wrote it wants to know which, and why."""
    assert loaded.rejected == {
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


@pytest.mark.parametrize(("data", "complaint"), [
    ({"rule": []}, "not a RuleCollection"),
    ({"_t": "RuleCollection", "rule": [{"name": "x"}]}, "rule number 0 of the file can't be read"),
])  # fmt: skip
def test_a_file_that_holds_no_rules_is_refused(data: dict[str, Any], complaint: str) -> None:
    """Half a file must not be taken for a file of few rules."""
    with pytest.raises(RuleError, match=complaint):
        entries(data)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    """A typing error in a path is the commonest error of all."""
    with pytest.raises(RuleError, match=r"nowhere\.json is no file of rules"):
        load(tmp_path / "nowhere.json")

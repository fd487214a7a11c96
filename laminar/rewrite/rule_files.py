"""Rules from a file in the format of TASO's generator, as FlexFlow publishes them: those that hold, as rewrite rules.

    {"_t": "RuleCollection", "rule": [RULE, ...]}
    RULE = {"name": ..., "srcOp": [OP, ...], "dstOp": [OP, ...], "mappedOutput": [MAP, ...]}
    OP = {"type": "OP_LINEAR", "input": [{"opId": -1, "tsId": 0}, ...], "para": [{"key": "PM_ACTI", "value": 0}, ...]}
    MAP = {"srcOpId": 2, "srcTsId": 0, "dstOpId": 1, "dstTsId": 0}

An `opId` below zero is an input from outside, any other the op of that number on the same side. Ops are read as what
they are called: OP_LINEAR a product of x and w turned, of matrices or of batches of them, with PM_ACTI 2 a relu
after it; OP_CONCAT and OP_SPLIT along PM_AXIS; OP_EW_ADD, OP_EW_MUL, OP_RELU element by element. Rules with
partition, combine, replicate or reduce are about placement, which plans decide, and are left out; so are rules with ops
that are not known here.

Nothing in such a file is believed. Sizes that make both sides fit are worked out from the ops, both sides run on
random numbers in float64, and only a rule whose mapped results agree is kept. What can't be said in the language of
rewrites (several results), says nothing (a relu is no part of a product here), or says again what the same file has
said before, is left out and counted as well. `runtime/check/prove_rule_files.py` then runs what is kept on graphs.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.errors import RuleError
from laminar.rewrite.apply import Rewrite
from laminar.rewrite.language import Pattern, Term, Var, parse_rewrite
from laminar.rewrite.rule_file_sizes import Misfit, Op, Shapes, Size, axis_of
from laminar.rewrite.rules import REWRITE_RULES

ALGEBRA = ("OP_LINEAR", "OP_RELU", "OP_CONCAT", "OP_SPLIT", "OP_EW_ADD", "OP_EW_MUL")
PLACEMENT = ("OP_PARTITION", "OP_COMBINE", "OP_REPLICATE", "OP_REDUCE", "OP_REDUCTION")
_RELU = 2
"""The value of PM_ACTI that means a relu after the product; 0 is none."""
_RANKS = (2, 3)
"""Tensors are tried as matrices and as batches of them; an axis counts in three dims, the first being the batch."""
_TOLERANCE = 1e-12
_MOST_OPS, _MOST_PARTS = 10, 16
"""Ops of a side, and tensors that an op reads or makes: public files have up to 3 and 2."""


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """One rule of the file."""

    name: str
    left: tuple[Op, ...]
    right: tuple[Op, ...]
    outputs: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    """Results that must be equal: (op, which) on the left and on the right."""
    unreadable: str = ""
    """Why nothing but its name could be read."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a rule of a file is left out."""

    reason: str = ""
    """One of the reasons below; empty if there is none."""
    detail: str = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a file holds."""

    rules: tuple[Rewrite, ...]
    holds: tuple[str, ...]
    """Names of the rules that were found true, those included that no rewrite was made of."""
    rejected: Mapping[str, Fault]
    """Why everything else was left out, by name."""
    origins: Mapping[str, str]
    """Of every rewrite rule, the rule of the file that it was made of."""
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
    """For every rewrite rule, shapes of its tensors that fit, for it to be tried on."""

    def __str__(self) -> str:
        why = Counter(fault.reason for fault in self.rejected.values())
        lines = [f"{len(self.holds) + sum(why[r] for r in FALSE)} rules of algebra, {len(self.holds)} hold"]
        lines += [f"  {len(self.rules)} rewrite rules made of them"]
        return "\n".join([*lines, *(f"  {n} left out: {reason}" for reason, n in why.most_common())])


PARALLEL, LACKS, MISFIT, FAILS = (
    "about placement, not algebra",
    "the right side reads what the left side does not have",
    "no sizes fit both sides",
    "the two sides differ",
)
UNREADABLE, UNKNOWN, TOO_LARGE = "can't be read", "an op that is not known", "too large"
NOT_LOADED = (PARALLEL, UNREADABLE, UNKNOWN, TOO_LARGE)
"""Reasons for which a rule is not even tried."""
SEVERAL, SAME_SIDES, AGAIN = "several results at once", "both sides are the same here", "said before"
UNSPEAKABLE = "can't be said in the language of rewrites"
FALSE = (LACKS, MISFIT, FAILS)


def load(source: Path | str | Mapping[str, Any]) -> Loaded:
    """The rules of a file, or of its JSON, that hold; every other one with the reason why it was left out."""
    holds: list[str] = []
    rejected: dict[str, Fault] = {}
    origins: dict[str, str] = {}
    texts: dict[str, str] = {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    said: set[str] = set()
    for entry in entries(source):
        wrong = fault(entry)
        if wrong:
            rejected[entry.name] = wrong
            continue
        holds.append(entry.name)
        made, reason = _translated(entry, said)
        if not made:
            rejected[entry.name] = Fault(reason)
        for name, text, sizes in made:
            origins[name], texts[name], shapes[name] = entry.name, text, sizes
    rules = tuple(Rewrite.of_file(name, text) for name, text in texts.items())
    return Loaded(rules, tuple(holds), rejected, origins, shapes)


def entries(source: Path | str | Mapping[str, Any]) -> list[RuleEntry]:
    """What stands in a file, unjudged; one that is no collection of rules is refused, and so is one of which none can
    be read. Every entry has a name of its own, which none of Laminar's rules has."""
    try:
        data = json.loads(Path(source).read_text()) if isinstance(source, (Path, str)) else source
    except (OSError, ValueError, RecursionError) as error:
        raise RuleError(f"{source} is no file of rules: {error}") from error
    if not isinstance(data, Mapping) or data.get("_t") != "RuleCollection" or not isinstance(data.get("rule"), list):
        what = f"{source} is not a RuleCollection" if isinstance(source, (Path, str)) else "not a RuleCollection"
        raise RuleError(what, next='the JSON must begin with {"_t": "RuleCollection", "rule": [...]}')
    found: list[RuleEntry] = []
    taken = {rule.name for rule in REWRITE_RULES}
    for k, one in enumerate(data["rule"]):
        entry = _entry(one, k)
        if {entry.name, f"{entry.name}-batched"} & taken:
            entry = replace(entry, name=f"{entry.name} (number {k})")
        taken |= {entry.name, f"{entry.name}-batched"}
        found.append(entry)
    if found and all(entry.unreadable for entry in found):
        raise RuleError(f"rule number 0 of the file can't be read: {found[0].unreadable}, nor can any other")
    return found


def _entry(one: Any, number: int) -> RuleEntry:
    name = one.get("name") if isinstance(one, Mapping) else None
    name = name if isinstance(name, str) and name else f"number {number}"
    try:
        sides = [
            tuple(
                Op(
                    str(op["type"]),
                    tuple((int(t["opId"]), int(t["tsId"])) for t in op["input"]),
                    {str(p["key"]): int(p["value"]) for p in op["para"]},
                )
                for op in one[side]
            )
            for side in ("srcOp", "dstOp")
        ]
        outputs = tuple(
            ((int(m["srcOpId"]), int(m["srcTsId"])), (int(m["dstOpId"]), int(m["dstTsId"])))
            for m in one["mappedOutput"]
        )
        return RuleEntry(name, sides[0], sides[1], outputs)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        return RuleEntry(name, (), (), (), unreadable=f"{type(error).__name__}: {error}")


# --- whether a rule holds --------------------------------------------------------------------


def fault(entry: RuleEntry, seed: int = 0) -> Fault:
    """Why a rule can't be used, or nothing if it holds for matrices or for batches of them."""
    if entry.unreadable:
        return Fault(UNREADABLE, entry.unreadable)
    ops = (*entry.left, *entry.right)
    odd = [op.type for op in ops if op.type not in (*ALGEBRA, *PLACEMENT)]
    odd += [f"{op.type} with PM_ACTI {a}" for op in ops if (a := op.para.get("PM_ACTI", 0)) not in (0, _RELU)]
    if odd:
        return Fault(UNKNOWN, odd[0])
    if any(op.type in PLACEMENT for op in ops):
        return Fault(PARALLEL)
    counts = [n for op in ops for n in (len(op.inputs), op.para.get("PM_NUM_OUTPUTS", 1))]
    if max(len(entry.left), len(entry.right)) > _MOST_OPS or max(counts, default=0) > _MOST_PARTS:
        return Fault(TOO_LARGE)
    given = {i for op in entry.left for i in op.inputs if i[0] < 0}
    if any(i[0] < 0 and i not in given for op in entry.right for i in op.inputs):
        return Fault(LACKS)
    if not entry.outputs:
        return Fault(FAILS)
    found = [_differ(entry, rank, seed) for rank in _RANKS]
    return Fault() if "" in found else Fault(FAILS if FAILS in found else MISFIT)


def _differ(entry: RuleEntry, rank: int, seed: int) -> str:
    try:
        shapes, sides = _fitted(entry, rank)
    except Misfit:
        return MISFIT
    rng = np.random.default_rng(seed)
    values = {k: rng.standard_normal(shapes.sizes(shape)) for k, shape in shapes.inputs.items()}
    made = [
        run_side(side, values, {k: shapes.sizes(s) for k, s in specs.items()}, rank)
        for side, specs in zip((entry.left, entry.right), sides, strict=True)
    ]
    return "" if all(_close(made[0][left], made[1][right]) for left, right in entry.outputs) else FAILS


def _close(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    return a.shape == b.shape and bool(np.abs(a - b).max() <= _TOLERANCE * max(1.0, float(np.abs(a).max())))


def run_side(
    ops: Sequence[Op],
    inputs: Mapping[tuple[int, int], NDArray[np.float64]],
    shapes: Mapping[tuple[int, int], tuple[int, ...]],
    rank: int,
) -> dict[tuple[int, int], NDArray[np.float64]]:
    """Every value of one side, by op and number; shapes are needed where a split must know where to cut."""
    values = dict(inputs)
    for k, op in enumerate(ops):
        args = [values[i] for i in op.inputs]
        if op.type == "OP_LINEAR":
            out = [args[0] @ args[1].swapaxes(-1, -2)]
            out = [np.maximum(out[0], 0)] if op.para.get("PM_ACTI") == _RELU else out
        elif op.type == "OP_RELU":
            out = [np.maximum(args[0], 0)]
        elif op.type == "OP_EW_ADD":
            out = [args[0] + args[1]]
        elif op.type == "OP_EW_MUL":
            out = [args[0] * args[1]]
        elif op.type == "OP_CONCAT":
            out = [np.concatenate(args, axis_of(op, rank))]
        else:
            d = axis_of(op, rank)
            widths = [shapes[k, i][d] for i in range(op.para["PM_NUM_OUTPUTS"])]
            out = np.split(args[0], list(itertools.accumulate(widths))[:-1], d)
        values |= {(k, i): v for i, v in enumerate(out)}
    return values


def _fitted(entry: RuleEntry, rank: int) -> tuple[Shapes, list[dict[tuple[int, int], list[Size]]]]:
    """Sizes with which both sides can run and give results of one shape."""
    shapes = Shapes(rank)
    sides = [shapes.side(side) for side in (entry.left, entry.right)]
    for left, right in entry.outputs:
        if left not in sides[0] or right not in sides[1]:
            raise Misfit
        shapes.equal(sides[0][left], sides[1][right])
    return shapes, sides


# --- rewrite rules of what holds -------------------------------------------------------------


Translation = tuple[str, str, dict[str, tuple[int, ...]]]
"""A name, a line of the language of rewrites, and shapes of its tensors that fit."""


def _translated(entry: RuleEntry, said: set[str]) -> tuple[list[Translation], str]:
    """Rules for matrices and for batches of them, as far as they hold there and say something new."""
    ops = (*entry.left, *entry.right)
    if len(entry.outputs) != 1 or any(op.type == "OP_SPLIT" for op in ops):
        return [], SEVERAL
    if any(op.type == "OP_CONCAT" and len(op.inputs) != 2 for op in ops):
        return [], UNSPEAKABLE
    made: list[Translation] = []
    reason = SAME_SIDES
    ((left, right),) = entry.outputs
    for rank in _RANKS:
        if _differ(entry, rank, 1):
            continue
        spoken = _Spoken(entry, rank)
        sides = spoken.text(entry.left, left), spoken.text(entry.right, right)
        text = " => ".join(sides)
        if sides[0] == sides[1] or "(" not in sides[0]:
            continue
        if text in said:
            reason = reason if made else AGAIN
            continue
        inputs = spoken.inputs(entry)
        if not _agree(text, inputs):
            reason = reason if made else UNSPEAKABLE
            continue
        said.add(text)
        name = entry.name if rank == 2 else f"{entry.name}-batched"
        made.append((name, text, {key: value.shape for key, value in inputs.items()}))
    return made, reason


class _Spoken:
    """A rule in the language of rewrites.

    A product here takes its right side as it is, so an input that is only ever a right side in the file stands for what
    it is when turned: one word less for every weight.
    """

    def __init__(self, entry: RuleEntry, rank: int) -> None:
        self.rank = rank
        self.names: dict[tuple[int, int], str] = {}
        self.ways: dict[tuple[int, int], set[bool]] = {}
        for ops, value in ((entry.left, entry.outputs[0][0]), (entry.right, entry.outputs[0][1])):
            self._look(ops, value, False)

    def _look(self, ops: Sequence[Op], value: tuple[int, int], turned: bool) -> None:
        """Note which inputs are read turned, and which as they are."""
        if value[0] < 0:
            self.ways.setdefault(value, set()).add(turned)
            return
        op = ops[value[0]]
        for k, i in enumerate(op.inputs):
            self._look(ops, i, k == 1 if op.type == "OP_LINEAR" else turned)

    def text(self, ops: Sequence[Op], value: tuple[int, int], turned: bool = False) -> str:
        """A value, turned if so asked; inputs are called A, B, ... in the order in which they come."""
        turn = "t" if self.rank == 2 else "bt"
        if value[0] < 0:
            name = self.names.setdefault(value, chr(ord("A") + len(self.names)))
            return f"{turn}({name})" if turned and len(self.ways[value]) > 1 else name
        op = ops[value[0]]
        if op.type == "OP_LINEAR":
            x, w = self.text(ops, op.inputs[0]), self.text(ops, op.inputs[1], True)
            product = f"{'mm' if self.rank == 2 else 'bmm'}({x}, {w})"
            product = f"relu({product})" if op.para.get("PM_ACTI") == _RELU else product
            return f"{turn}({product})" if turned else product
        args = ", ".join(self.text(ops, i, turned) for i in op.inputs)
        if op.type == "OP_CONCAT":
            d = axis_of(op, self.rank)
            swapped = {self.rank - 1: self.rank - 2, self.rank - 2: self.rank - 1}
            return f"join({args}, {swapped.get(d, d) if turned else d})"
        return f"{_WORDS[op.type]}({args})"

    def inputs(self, entry: RuleEntry) -> dict[str, NDArray[np.float64]]:
        """Random numbers for each name."""
        shapes, _ = _fitted(entry, self.rank)
        rng = np.random.default_rng(2)
        out = {}
        for value, name in self.names.items():
            drawn = rng.standard_normal(shapes.sizes(shapes.inputs[value]))
            out[name] = drawn.swapaxes(-1, -2) if self.ways[value] == {True} else drawn
        return out


_WORDS = {"OP_RELU": "relu", "OP_EW_ADD": "add", "OP_EW_MUL": "mul"}
_SPOKEN: dict[str, Callable[..., Any]] = {
    "mm": np.matmul,
    "bmm": np.matmul,
    "add": np.add,
    "mul": np.multiply,
    "relu": lambda a: np.maximum(a, 0),
    "t": lambda a: a.swapaxes(-1, -2),
    "bt": lambda a: a.swapaxes(-1, -2),
    "join": lambda a, b, d: np.concatenate([a, b], d),
}
"""What the words of a translation mean."""


def _agree(text: str, inputs: Mapping[str, NDArray[np.float64]]) -> bool:
    """Whether both sides of a translation are equal: what is used must be what was tried."""

    def value(pattern: Pattern) -> Any:
        if isinstance(pattern, Term):
            return _SPOKEN[pattern.form](*map(value, pattern.args))
        return inputs[pattern.name] if isinstance(pattern, Var) else pattern

    try:
        left, right = map(value, parse_rewrite(text))
    except RuleError:  # the right side reads what on the left belongs to no result
        return False
    return _close(left, right)

"""Graphs for batch sizes that nobody traced: predicted from graphs of other sizes, and checked.

Every new sequence length would be traced anew, a second for a small transformer. But graphs of one
model differ between lengths only in numbers, and nearly all of these are linear in the length (in the
number of samples, too, or in their product). So after a few sizes have been traced, the graph of the
next one is written down: each number is solved for from the sizes known, at least one more of which
than there are unknowns must agree.

A prediction is only taken if the model itself agrees: forward runs once on tensors that hold nothing,
an order of magnitude cheaper than tracing, and every op it calls, with all shapes and arguments, must
be the predicted one. A model that takes another branch for long sequences is seen there, and traced.
What forward does not show is not predicted either: backward passes written in Python, hooks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from laminar.ir.graph import Graph

SPEC = re.compile(r"(\w+)\[([\d,]*)\]")
SIZES_KEPT = 8
"""Sizes that are remembered."""
COUNT = 1 << 24
"""Larger denominators are not counts of anything."""
Sizes = tuple[int, ...]
"""All dims of all leaves of a batch, one after the other."""


@dataclass(frozen=True)
class Sample:
    """One traced size: its graph before simplification, without its hash, and the ops of its forward pass, as JSON."""

    sizes: Sizes
    graph: dict[str, Any]
    ops: list[Any]


@dataclass
class Predictor:
    """The traced sizes of one model, loss and kind of batch."""

    samples: list[Sample] = field(default_factory=list)
    traced: int = 0
    """How many sizes had to be traced."""
    traced_s: float = 0.0

    def add(self, sample: Sample) -> None:
        """Learn from a size that was traced."""
        self.samples = [*self.samples[-SIZES_KEPT + 1 :], sample]

    def predict(self, sizes: Sizes, forward: Callable[[], list[Any] | None]) -> Graph | None:
        """The graph of a batch of these sizes, if it follows; `forward` gives the ops that the model then calls."""
        found = weights_for([s.sizes for s in self.samples], sizes)
        if found is None:
            return None
        known = [self.samples[i] for i in found.rows]
        ops = solved([s.ops for s in known], found)
        graph = solved([s.graph for s in known], found)
        if ops is None or graph is None or forward() != ops:
            return None
        return Graph.from_json(graph, sealed=False)


# --- numbers as functions of sizes ---------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """How numbers at new sizes follow from those at known ones."""

    rows: tuple[int, ...]
    """Which known sizes: first those that determine the unknowns, then those that must agree."""
    unknowns: int
    new: tuple[Fraction, ...]
    """Weights of the first rows that give the number at the new sizes."""
    others: tuple[tuple[Fraction, ...], ...]
    """The same for each row that must agree."""

    seen: dict[tuple[int, ...], int | None] = field(default_factory=dict, compare=False)
    """Answers given: a graph asks for the same few numbers over and over."""

    def __call__(self, values: Sequence[int]) -> int | None:
        """The number at the new sizes, or nothing if the known ones don't agree."""
        key = tuple(values)
        if key not in self.seen:
            self.seen[key] = self._solve(key)
        return self.seen[key]

    def _solve(self, values: tuple[int, ...]) -> int | None:
        first, rest = values[: self.unknowns], values[self.unknowns :]
        for weights, value in zip(self.others, rest, strict=True):
            if sum(w * v for w, v in zip(weights, first, strict=True)) != value:
                return None
        out = sum((w * v for w, v in zip(self.new, first, strict=True)), Fraction(0))
        return int(out) if out.denominator == 1 else None


def weights_for(known: Sequence[Sizes], new: Sizes) -> Fit | None:
    """Weights for numbers that are linear along one direction of sizes, or bilinear in two.

    Sizes of one are left out: a dim of one broadcasts, and ops then differ in more than numbers.
    """
    usable = [i for i, k in enumerate(known) if len(k) == len(new) and k != new and _alike(k, new)]
    steps = {i: tuple(a - b for a, b in zip(known[i], new, strict=True)) for i in usable}
    lines: dict[tuple[Fraction, ...], list[int]] = {}
    for i, step in steps.items():
        lead = next(s for s in step if s)
        lines.setdefault(tuple(Fraction(s, lead) for s in step), []).append(i)
    for direction, rows in sorted(lines.items(), key=lambda item: -len(item[1])):
        at = next(n for n, d in enumerate(direction) if d)
        found = _weights(rows, [(Fraction(1), Fraction(steps[i][at])) for i in rows])
        if found is not None:
            return found
    for a in range(len(new)):
        for b in range(a + 1, len(new)):
            rows = [i for i in usable if _spanned([steps[j] for j in usable], a, b)]
            terms = [
                (Fraction(1), Fraction(steps[i][a]), Fraction(steps[i][b]), Fraction(steps[i][a] * steps[i][b]))
                for i in rows
            ]
            found = _weights(rows, terms)
            if found is not None:
                return found
    return None


def _alike(known: Sizes, new: Sizes) -> bool:
    """Whether dims that differ are larger than one in both."""
    return all(a == b or min(a, b) > 1 for a, b in zip(known, new, strict=True))


def _spanned(steps: list[Sizes], a: int, b: int) -> bool:
    """Whether all dims follow linearly from dims `a` and `b`, which are independent."""
    pairs = [(s[a], s[b]) for s in steps]
    base = next(
        (
            (p, q)
            for p in range(len(pairs))
            for q in range(p + 1, len(pairs))
            if pairs[p][0] * pairs[q][1] != pairs[p][1] * pairs[q][0]
        ),
        None,
    )
    if base is None:
        return False
    p, q = base
    det = pairs[p][0] * pairs[q][1] - pairs[p][1] * pairs[q][0]
    for dim in range(len(steps[0])):
        x = Fraction(steps[p][dim] * pairs[q][1] - pairs[p][1] * steps[q][dim], det)
        y = Fraction(pairs[p][0] * steps[q][dim] - steps[p][dim] * pairs[q][0], det)
        if any(x * s[a] + y * s[b] != s[dim] for s in steps):
            return False
    return True


def _weights(rows: Sequence[int], terms: Sequence[tuple[Fraction, ...]]) -> Fit | None:
    """Choose rows that determine the coefficients of `terms`; at the new sizes all terms but the first are zero."""
    if not rows:
        return None
    unknowns = len(terms[0])
    chosen: list[int] = []
    reduced: list[list[Fraction]] = []
    for i, row in enumerate(terms):
        if len(chosen) < unknowns and (left := _reduce(reduced, list(row))) is not None:
            chosen.append(i)
            reduced.append(left)
    rest = [i for i in range(len(terms)) if i not in chosen]
    if len(chosen) < unknowns or not rest:
        return None
    matrix = [terms[i] for i in chosen]
    at_new = (Fraction(1), *(Fraction(0),) * (unknowns - 1))
    return Fit(
        tuple(rows[i] for i in (*chosen, *rest)),
        unknowns,
        _combination(matrix, at_new),
        tuple(_combination(matrix, terms[i]) for i in rest),
    )


def _reduce(reduced: list[list[Fraction]], row: list[Fraction]) -> list[Fraction] | None:
    """What is left of a row after taking out earlier ones, scaled to lead with one; nothing if it depends on them."""
    for other in reduced:
        lead = next(i for i, v in enumerate(other) if v)
        row = [a - row[lead] * b for a, b in zip(row, other, strict=True)]
    lead_value = next((v for v in row if v), None)
    return None if lead_value is None else [v / lead_value for v in row]


def _combination(matrix: Sequence[Sequence[Fraction]], target: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Weights w with w @ matrix = target, by elimination; `matrix` is square and regular."""
    n = len(matrix)
    rows = [[matrix[j][i] for j in range(n)] + [target[i]] for i in range(n)]
    for i in range(n):
        pivot = next(j for j in range(i, n) if rows[j][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [v / rows[i][i] for v in rows[i]]
        for j in range(n):
            if j != i:
                rows[j] = [a - rows[j][i] * b for a, b in zip(rows[j], rows[i], strict=True)]
    return tuple(rows[i][n] for i in range(n))


# --- values that differ in numbers only ----------------------------------------------------------


class _Unlike(Exception):
    """The values differ in more than numbers that can be solved for."""


def solved(values: Sequence[Any], how: Fit) -> Any:
    """The JSON value at the new sizes; nothing if the known ones differ in more than such numbers."""
    try:
        return _solved(values, how)
    except _Unlike:
        return None


def _solved(values: Sequence[Any], how: Fit) -> Any:
    first = values[0]
    kind = type(first)
    if kind is list:
        if all(v == first for v in values[1:]):
            return first
        if any(type(v) is not list or len(v) != len(first) for v in values[1:]):
            raise _Unlike
        return [_solved(items, how) for items in zip(*values, strict=True)]
    if all(type(v) is kind and v == first for v in values[1:]):
        return first
    if any(type(v) is not kind for v in values[1:]):
        raise _Unlike
    if kind is dict:
        if any(v.keys() != first.keys() for v in values[1:]):
            raise _Unlike
        return {key: _solved([v[key] for v in values], how) for key in first}
    if kind is int:
        return _number(values, how)
    if kind is float:
        return _real(values, how)
    if kind is str:
        return _spec(values, how)
    raise _Unlike


def _number(values: Sequence[int], how: Fit) -> int:
    out = how(values)
    if out is None:
        raise _Unlike
    return out


def _real(values: Sequence[float], how: Fit) -> float:
    """A count kept as a float, or a ratio of counts: 1/n of a mean, n/(n - 1) of an unbiased variance."""
    ratios = [Fraction(v).limit_denominator(COUNT) for v in values]
    if any(r.numerator / r.denominator != v for r, v in zip(ratios, values, strict=True)):
        raise _Unlike
    below = _number([r.denominator for r in ratios], how)
    if below < 1:
        raise _Unlike
    return _number([r.numerator for r in ratios], how) / below


def _spec(values: Sequence[str], how: Fit) -> str:
    """A dtype and shape."""
    found = [SPEC.fullmatch(v) for v in values]
    shapes = [[int(n) for n in m[2].split(",") if n] for m in found if m]
    dtypes = {m[1] for m in found if m}
    if len(shapes) < len(values) or len(dtypes) > 1 or len({len(s) for s in shapes}) > 1:
        raise _Unlike
    dims = [_number(column, how) for column in zip(*shapes, strict=True)]
    return f"{dtypes.pop()}[{','.join(map(str, dims))}]"


def as_json(value: Any) -> Any:
    """The same value as it comes back from JSON, so that comparing means comparing what is kept."""
    return json.loads(json.dumps(value))

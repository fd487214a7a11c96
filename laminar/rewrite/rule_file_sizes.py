"""Sizes that make the ops of a rule fit: what `rule_files.py` runs both sides of a rule with.

A rule says which ops read what, and no sizes. Here every dim of every input is an unknown, ops make unknowns equal (the
inner dims of a product, all but one dim of what is joined), the size of a joined dim is the sum of its parts, and what
remains free gets a number of its own (up to ten of them), so that no two dims are equal by accident.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DIM_SIZES = (2, 3, 5, 7, 4, 6, 9, 8, 11, 10)
"""Sizes of dims in the order in which they turn out to be free."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a side."""

    type: str
    inputs: tuple[tuple[int, int], ...]
    para: Mapping[str, int]


def axis_of(op: Op, rank: int) -> int:
    """The dim an op means, in tensors of a rank: the file counts in three, the first being the batch."""
    d = op.para.get("PM_AXIS", -1) - (3 - rank)
    if not 0 <= d < rank:
        raise Misfit
    return d


class Misfit(Exception):
    """No sizes make an op fit."""


Size = tuple[int, ...]
"""The size of a dim as a sum of unknowns, by number."""


class Shapes:
    """Sizes of dims as unknowns, made equal where ops want them equal."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.inputs: dict[tuple[int, int], list[Size]] = {}
        self.means: dict[int, Size] = {}
        """Unknowns that were found to be others."""
        self._count = itertools.count()
        self._values: dict[int, int] = {}

    def side(self, ops: Sequence[Op]) -> dict[tuple[int, int], list[Size]]:
        """The shape of every value of one side."""
        shapes: dict[tuple[int, int], list[Size]] = {}
        for k, op in enumerate(ops):
            args = [shapes[i] if i in shapes else self._input(i) for i in op.inputs]
            if op.type == "OP_LINEAR":
                self._want(len(args) == 2)
                for d in range(self.rank - 2):
                    self.same(args[0][d], args[1][d])
                self.same(args[0][-1], args[1][-1])
                shapes[k, 0] = [*args[0][:-1], args[1][-2]]
            elif op.type in ("OP_EW_ADD", "OP_EW_MUL"):
                self._want(len(args) == 2)
                self.equal(args[0], args[1])
                shapes[k, 0] = args[0]
            elif op.type == "OP_RELU":
                self._want(len(args) == 1)
                shapes[k, 0] = args[0]
            elif op.type == "OP_CONCAT":
                self._want(len(args) > 0)
                d = axis_of(op, self.rank)
                for other in args[1:]:
                    for e in range(self.rank):
                        if e != d:
                            self.same(args[0][e], other[e])
                shapes[k, 0] = [*args[0][:d], tuple(s for a in args for s in a[d]), *args[0][d + 1 :]]
            else:
                d, count = axis_of(op, self.rank), op.para.get("PM_NUM_OUTPUTS", 0)
                self._want(len(args) == 1 and count > 0)
                parts = [(next(self._count),) for _ in range(count)]
                self.same(args[0][d], tuple(s for p in parts for s in p))
                for i, part in enumerate(parts):
                    shapes[k, i] = [*args[0][:d], part, *args[0][d + 1 :]]
        return {**self.inputs, **shapes}

    def _input(self, name: tuple[int, int]) -> list[Size]:
        if name[0] >= 0:
            raise Misfit
        return self.inputs.setdefault(name, [(next(self._count),) for _ in range(self.rank)])

    def _want(self, true: bool) -> None:
        if not true:
            raise Misfit

    def equal(self, a: list[Size], b: list[Size]) -> None:
        """Two shapes must be one."""
        for x, y in zip(a, b, strict=True):
            self.same(x, y)

    def same(self, a: Size, b: Size) -> None:
        """Two sizes must be one: an unknown takes the other's meaning, two sums of as many parts agree part by part."""
        a, b = self.reduced(a), self.reduced(b)
        if sorted(a) == sorted(b):
            return
        if len(a) == 1 and a[0] not in b:
            self.means[a[0]] = b
        elif len(b) == 1 and b[0] not in a:
            self.means[b[0]] = a
        elif len(a) == len(b):
            for x, y in zip(a, b, strict=True):
                self.same((x,), (y,))
        else:
            raise Misfit

    def reduced(self, size: Size) -> Size:
        """A size in unknowns that are still unknown."""
        while any(s in self.means for s in size):
            size = tuple(t for s in size for t in self.means.get(s, (s,)))
        return size

    def sizes(self, shape: list[Size]) -> tuple[int, ...]:
        """A shape in numbers, another one for each unknown."""
        out = []
        for size in shape:
            for s in self.reduced(size):
                self._values.setdefault(s, DIM_SIZES[len(self._values) % len(DIM_SIZES)])
            out.append(sum(self._values[s] for s in self.reduced(size)))
        return tuple(out)

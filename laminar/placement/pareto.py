"""Choices that no other beats in cost and in everything else they use, of tables over shared variables.

With one sum elimination keeps the best value for each combination of neighbours; with several sums (seconds, seconds of
exposed exchange, bytes of activations, bytes of parameters) it keeps a set: all that none beats in every one of them.
Sets stay small where resources are counted in steps. Rounded *up*, whatever a choice is counted to use it does not
exceed, so that what keeps to a cap by count does keep to it. Rounded *down*, what breaks a cap by count does break it,
so that the cheapest choice within caps by count costs no more than any that keeps to them: a bound. Each table of
each resource is rounded once, which is told as `slack`; nothing else is lost, and without steps the set is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laminar.errors import PlanError
from laminar.placement.minsum import Table
from laminar.placement.minsum_capped import FULL, Capped

COARSEST = 1 << 10
"""Steps from the least to the most that can be used, where rounding begins if none was asked for."""
PRODUCT = 512
"""Sums of two sets may be so many times as many as a set may have, before they are sifted."""
Set = tuple[Table, Table]
"""Sums, a row for each choice, and the number by which each is known."""


@dataclass(frozen=True)
class Point:
    """A choice that none beats in everything."""

    values: tuple[int, ...]
    cost: float
    used: tuple[float, ...]
    """As it is, not rounded."""
    counted: tuple[float, ...]
    """Rounded: what it was compared by."""


@dataclass(frozen=True)
class Front:
    """All such choices, the cheapest first, and how resources were rounded."""

    points: tuple[Point, ...]
    steps: tuple[float, ...]
    """Of each resource; 0: not rounded."""
    slack: tuple[float, ...]
    """How far the sum that choices were compared by may be from what they use."""
    up: bool

    def cheapest(self, caps: Sequence[float]) -> Point | None:
        """Within caps, by rounded use: rounded up, a choice that keeps to them; rounded down, none costs less."""
        return next((p for p in self.points if all(u <= c for u, c in zip(p.counted, caps, strict=True))), None)


def pareto(problem: Capped, steps: Sequence[float] | None = None, up: bool = True, most: int = 2048) -> Front:
    """All choices within the caps that no other beats in cost and each resource, these counted in steps.

    Without steps nothing is rounded as long as no set grows beyond `most`; where one does, steps are doubled.
    """
    now = [0.0] * len(problem.caps) if steps is None else [float(s) for s in steps]
    if len(now) != len(problem.caps) or min(now, default=0.0) < 0:
        raise PlanError(f"steps {now} of {len(problem.caps)} resources", allowed="one each, 0 or more")
    while True:
        try:
            return _Sets(problem, now, up, most).front()
        except _TooMany:
            spread = [sum(float(np.ptp(t)) for _, t in terms) for terms in problem.uses]
            now = [2 * s if s else w / COARSEST for s, w in zip(now, spread, strict=True)]


class _TooMany(Exception):
    """A set grew too large."""


class _Sets:
    """Elimination with, in each entry, the choices that none beats: their sums, and who they are."""

    def __init__(self, problem: Capped, steps: list[float], up: bool, most: int) -> None:
        self.problem, self.steps, self.up, self.most = problem, steps, up, most
        self.made: list[tuple[int, int, tuple[int, ...]]] = []
        """Choices of one variable each, and which choices of others they go with."""
        width, self.base = 1 + len(steps), np.zeros(1 + len(steps))
        """Least entries: taken out of all tables, so that sums only grow."""
        terms = [(t, 0) for t in problem.costs] + [(t, r + 1) for r, row in enumerate(problem.uses) for t in row]
        tables: dict[tuple[int, ...], Table] = {}
        for (scope, table), column in terms:
            order = tuple(sorted(scope))
            sums = tables.setdefault(order, np.zeros((*(problem.sizes[v] for v in order), width)))
            sums[..., column] += table.transpose(np.argsort(scope)) if scope else table
        rough = np.zeros(width)
        for sums in tables.values():
            for column, step in enumerate(steps, start=1):
                if step:
                    exact = sums[..., column] / step
                    sums[..., column] = np.ceil(exact) if up else np.floor(exact)
                    rough[column] += bool((exact != sums[..., column]).any())
            least = np.array([sums[..., c].min() for c in range(width)])
            if np.isfinite(least).all():
                sums -= least
                self.base += least
        self.slack = tuple(float(r * s) for r, s in zip(rough[1:], steps, strict=True))
        grain = np.array([s or 1.0 for s in steps])
        caps = np.array(problem.caps)
        self.room = (caps + FULL * abs(caps)) / grain - self.base[1:] if width > 1 else np.zeros(0)
        self.factors: list[tuple[tuple[int, ...], Table]] = [(s, self._entries(t)) for s, t in tables.items()]

    def _entries(self, sums: Table) -> Table:
        out = np.empty(sums.shape[:-1], dtype=object)
        for at in np.ndindex(out.shape):
            out[at] = (sums[at][None, :], np.array([-1]))
        return out

    def front(self) -> Front:
        """Eliminate all variables; what is left is one set."""
        problem, left = self.problem, set(range(len(self.problem.sizes)))
        while left:
            around = {v: {u for s, _ in self.factors if v in s for u in s} - {v} for v in left}
            v = min(left, key=lambda v: (math.prod(problem.sizes[u] for u in around[v]), v))
            left.discard(v)
            scope = tuple(sorted(around[v]))
            touching = [f for f in self.factors if v in f[0]]
            table = np.empty(tuple(problem.sizes[u] for u in scope), dtype=object)
            for at in np.ndindex(table.shape):
                table[at] = self._eliminated(v, dict(zip(scope, at, strict=True)), touching)
            self.factors = [f for f in self.factors if v not in f[0]] + [(scope, table)]
        last: list[Set] = [table.item() for _, table in self.factors]
        sums, who = self._joined(last)
        grain = np.array([1.0, *(s or 1.0 for s in self.steps)])
        points = []
        for row, ids in zip(sums, who, strict=True):
            values = self._values(ids)
            counted = tuple(float(x) for x in ((row + self.base) * grain)[1:])
            points.append(Point(values, problem.cost_of(values), problem.used_by(values), counted))
        points.sort(key=lambda p: (p.cost, p.counted))
        return Front(tuple(points), tuple(self.steps), self.slack, self.up)

    def _eliminated(self, v: int, at: dict[int, int], touching: list[tuple[tuple[int, ...], Table]]) -> Set:
        """The choices of a variable and of all that went before it, for given values of its neighbours."""
        every, names = [], []
        for value in range(self.problem.sizes[v]):
            there = {**at, v: value}
            sets: list[Set] = [table[tuple(there[u] for u in scope)] for scope, table in touching]
            sums, who = self._joined(sets)
            every.append(sums)
            names += [(v, value, tuple(map(int, ids))) for ids in who]
        sums = np.concatenate(every)
        kept = self._unbeaten(sums)
        begin = len(self.made)
        self.made += [names[k] for k in kept]
        return sums[kept], np.arange(begin, begin + len(kept))

    def _joined(self, sets: list[Set]) -> Set:
        """Sums of one of each; and of which."""
        sums, who = np.zeros((1, len(self.base))), np.zeros((1, 0), dtype=int)
        for more, ids in sets:
            if len(sums) * len(more) > self.most * PRODUCT:
                raise _TooMany
            sums = (sums[:, None] + more[None]).reshape(-1, sums.shape[1])
            who = np.concatenate([np.repeat(who, len(more), 0), np.tile(ids, len(who))[:, None]], 1)
            kept = self._unbeaten(sums)
            sums, who = sums[kept], who[kept]
        return sums, who

    def _unbeaten(self, sums: Table) -> Table:
        """Rows that keep to the caps and that no other row beats."""
        rows = np.flatnonzero(np.isfinite(sums[:, 0]) & (sums[:, 1:] <= self.room).all(1))
        rows = rows[np.lexsort(sums[rows].T[::-1])]
        if sums.shape[1] == 1:
            return rows[:1]
        if sums.shape[1] == 2:
            second = sums[rows, 1]
            kept = (
                rows[np.concatenate([[True], second[1:] < np.minimum.accumulate(second)[:-1]])] if len(rows) else rows
            )
        else:
            kept_rows: list[int] = []
            front = np.empty((len(rows), sums.shape[1] - 1))
            for k in rows:
                if not (front[: len(kept_rows)] <= sums[k, 1:]).all(1).any():
                    front[len(kept_rows)] = sums[k, 1:]
                    kept_rows.append(int(k))
            kept = np.array(kept_rows, dtype=int)
        if len(kept) > self.most:
            raise _TooMany
        return kept

    def _values(self, ids: Table) -> tuple[int, ...]:
        """The value of every variable in a choice."""
        values, todo = [0] * len(self.problem.sizes), [int(i) for i in ids]
        while todo:
            here = todo.pop()
            if here >= 0:
                v, values[v], more = self.made[here]
                todo += more
        return tuple(values)

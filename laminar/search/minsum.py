"""The least sum of tables over shared variables, exactly, by eliminating one variable at a time.

Each table gives a cost for every combination of its variables. Eliminating a variable adds up the
tables that mention it and keeps, for each combination of its neighbours, the best value. On the
op graphs of neural networks the tables stay small, because a cut between two layers crosses few
tensors. Equal tables are stored once and equal eliminations done once, so that the second of two
equal blocks costs a look-up: that is how repeated layers fold, by structure and not by name.

Where a table would grow beyond `limit`, the variable with most values loses the less promising half
of them, and the answer says that it is no longer exact.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

Table = np.ndarray
AXES = 60
"""Variables of one table, of the 64 that an array may have."""


@dataclass
class Solution:
    """The value of every variable, what it costs, and whether nothing can cost less."""

    values: list[int]
    cost: float
    exact: bool


@dataclass
class MinSum:
    """Variables with a number of values each, and tables over some of them."""

    sizes: list[int] = field(default_factory=list)
    factors: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    known: dict[tuple[tuple[int, ...], bytes], int] = field(default_factory=dict)

    def variable(self, size: int) -> int:
        """A new variable; its number."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def intern(self, table: Table) -> int:
        """The number of a table, equal tables sharing one."""
        table = np.array(table, dtype=np.float64, order="C")
        key = (table.shape, table.tobytes())
        if key not in self.known:
            self.known[key] = len(self.tables)
            self.tables.append(table)
        return self.known[key]

    def add(self, scope: tuple[int, ...], table: Table) -> None:
        """Add a cost over the variables of `scope`, in that order."""
        self.factors.append((scope, self.intern(table)))

    def solve(self, limit: int = 1 << 22) -> Solution:
        """Eliminate all variables, then read the values back."""
        n = len(self.sizes)
        scopes: dict[int, tuple[tuple[int, ...], int]] = dict(enumerate(self.factors))
        touching: list[set[int]] = [set() for _ in range(n)]
        for f, (scope, _) in scopes.items():
            for v in scope:
                touching[v].add(f)
        neighbours: list[set[int]] = [set() for _ in range(n)]
        for scope, _ in scopes.values():
            for v in scope:
                neighbours[v].update(u for u in scope if u != v)
        allowed = [np.arange(s) for s in self.sizes]

        def weight(v: int) -> int:
            return math.prod(len(allowed[u]) for u in neighbours[v])

        heap = [(weight(v), v) for v in range(n)]
        heapq.heapify(heap)
        gone = [False] * n
        steps: list[tuple[int, tuple[int, ...], Table, list[Table]]] = []
        memo: dict[object, tuple[int, Table]] = {}
        constant, exact, count = 0.0, True, len(scopes)
        while heap:
            w, v = heapq.heappop(heap)
            if gone[v]:
                continue
            if w != weight(v):
                heapq.heappush(heap, (weight(v), v))
                continue
            while weight(v) * len(allowed[v]) > limit and (wide := [u for u in neighbours[v] if len(allowed[u]) > 1]):
                exact = False
                self._halve(max(wide, key=lambda u: (len(allowed[u]), -u)), allowed, touching, scopes)
            if len(neighbours[v]) > AXES:  # many values that one value is read with, each of which has one choice left
                for u in [u for u in neighbours[v] if len(allowed[u]) == 1]:
                    constant += self._settle(u, touching, scopes)
                    steps.append((u, (), np.zeros((), dtype=int), [allowed[u]]))
                    gone[u] = True
                    for other in neighbours[u]:
                        neighbours[other].discard(u)
            scope = tuple(sorted(neighbours[v]))
            place = {u: i for i, u in enumerate((*scope, v))}
            parts = sorted((scopes[f][1], tuple(place[u] for u in scopes[f][0])) for f in touching[v])
            shape = tuple(len(allowed[u]) for u in (*scope, v))
            key = (tuple(parts), shape)
            if key not in memo:
                memo[key] = self._eliminate(parts, shape)
            table, best = memo[key]
            steps.append((v, scope, best, [allowed[u] for u in (*scope, v)]))
            for f in list(touching[v]):
                for u in scopes[f][0]:
                    touching[u].discard(f)
                del scopes[f]
            gone[v] = True
            for u in scope:
                neighbours[u].discard(v)
                neighbours[u].update(x for x in scope if x != u)
            if scope:
                scopes[count] = (scope, table)
                for u in scope:
                    touching[u].add(count)
                count += 1
                for u in scope:
                    heapq.heappush(heap, (weight(u), u))
            else:
                constant += float(self.tables[table])
        values = [0] * n
        for v, scope, best, then in reversed(steps):
            at = tuple(int(np.searchsorted(kept, values[u])) for u, kept in zip(scope, then, strict=False))
            values[v] = int(then[-1][best[at]])
        return Solution(values, constant, exact)

    def floor(self, limit: int = 1 << 20) -> float:
        """A number that the least sum is not below; the least sum itself where no table grows beyond `limit`.

        Where one would, tables that hardly depend on the variable that goes are taken at their best over it, which
        only lowers the sum, until the rest is small enough.
        """
        factors = {  # variables with one value are no axes of a table
            f: (tuple(u for u in scope if self.sizes[u] > 1), self.tables[table].squeeze())
            for f, (scope, table) in enumerate(self.factors)
        }
        touching: list[set[int]] = [set() for _ in self.sizes]
        for f, (scope, _) in factors.items():
            for v in scope:
                touching[v].add(f)

        def around(v: int) -> set[int]:
            return {u for f in touching[v] for u in factors[f][0]} - {v}

        def weight(v: int) -> int:
            return math.prod(self.sizes[u] for u in around(v))

        heap = [(weight(v), v) for v in range(len(self.sizes))]
        heapq.heapify(heap)
        gone, constant, count = [False] * len(self.sizes), 0.0, len(factors)
        while heap:
            w, v = heapq.heappop(heap)
            if gone[v]:
                continue
            if w != (now := weight(v)):
                heapq.heappush(heap, (now, v))
                continue
            while weight(v) * self.sizes[v] > limit and len(touching[v]) > 1:
                f = min(touching[v], key=lambda f: (_depends(*factors[f], v), f))
                factors[f] = _without(*factors[f], v)
                touching[v].discard(f)
                for u in factors[f][0]:
                    heapq.heappush(heap, (weight(u), u))
            gone[v] = True
            scope = tuple(sorted(around(v)))
            place = {u: i for i, u in enumerate((*scope, v))}
            total = np.zeros([self.sizes[u] for u in (*scope, v)])
            for f in sorted(touching[v]):
                old, table = factors.pop(f)
                axes = [place[u] for u in old]
                shape = [total.shape[a] if a in axes else 1 for a in range(total.ndim)]
                total += table.transpose(np.argsort(axes)).reshape(shape)
                for u in old:
                    if u != v:
                        touching[u].discard(f)
            least = total.min(-1)
            if not scope:
                constant += float(least)
                continue
            factors[count] = (scope, least)
            for u in scope:
                touching[u].add(count)
            count += 1
            for u in scope:
                heapq.heappush(heap, (weight(u), u))
        return constant + sum(float(table.min()) for _, table in factors.values())

    def _eliminate(self, parts: list[tuple[int, tuple[int, ...]]], shape: tuple[int, ...]) -> tuple[int, Table]:
        """Sum tables over the variables of `shape`, and minimise over the last, which goes."""
        total = np.zeros(shape)
        for table, axes in parts:
            order = np.argsort(axes)
            part = self.tables[table].transpose(order)
            total += part.reshape([shape[a] if a in axes else 1 for a in range(len(shape))])
        best = total.argmin(-1)
        return self.intern(np.take_along_axis(total, best[..., None], -1)[..., 0]), best

    def _settle(self, v: int, touching: list[set[int]], scopes: dict[int, tuple[tuple[int, ...], int]]) -> float:
        """Take a variable that has one value left out of its tables; what those cost that have no other."""
        cost = 0.0
        for f in list(touching[v]):
            scope, table = scopes[f]
            rest = self.tables[table].take(0, axis=scope.index(v))
            if rest.ndim:
                scopes[f] = (tuple(u for u in scope if u != v), self.intern(rest))
            else:
                cost += float(rest)
                del scopes[f]
        touching[v].clear()
        return cost

    def _halve(
        self, v: int, allowed: list[Table], touching: list[set[int]], scopes: dict[int, tuple[tuple[int, ...], int]]
    ) -> None:
        """Keep the half of a variable's values that look cheapest from its own tables, and cut those tables."""
        score = np.zeros(len(allowed[v]))
        for f in touching[v]:
            scope, table = scopes[f]
            others = tuple(i for i, u in enumerate(scope) if u != v)
            score += self.tables[table].min(axis=others)
        keep = np.sort(np.argsort(score, kind="stable")[: max(1, len(score) // 2)])
        allowed[v] = allowed[v][keep]
        for f in touching[v]:
            scope, table = scopes[f]
            scopes[f] = (scope, self.intern(self.tables[table].take(keep, axis=scope.index(v))))


def _depends(scope: tuple[int, ...], table: Table, v: int) -> float:
    """By how much a table may differ over a variable."""
    at = scope.index(v)
    return float((table.max(at) - table.min(at)).max())


def _without(scope: tuple[int, ...], table: Table, v: int) -> tuple[tuple[int, ...], Table]:
    """A table at its best over a variable."""
    at = scope.index(v)
    return scope[:at] + scope[at + 1 :], table.min(at)

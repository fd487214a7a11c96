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

    def _eliminate(self, parts: list[tuple[int, tuple[int, ...]]], shape: tuple[int, ...]) -> tuple[int, Table]:
        """Sum tables over the variables of `shape`, and minimise over the last, which goes."""
        total = np.zeros(shape)
        for table, axes in parts:
            order = np.argsort(axes)
            part = self.tables[table].transpose(order)
            total += part.reshape([shape[a] if a in axes else 1 for a in range(len(shape))])
        best = total.argmin(-1)
        return self.intern(np.take_along_axis(total, best[..., None], -1)[..., 0]), best

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

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

FactorTable = np.ndarray
Eliminated = tuple[int, tuple[int, ...], FactorTable, list[FactorTable]]
"""A variable, those it was eliminated with, its best value for each of theirs, and the values left to each."""
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
    tables: list[FactorTable] = field(default_factory=list)
    known: dict[tuple[tuple[int, ...], bytes], int] = field(default_factory=dict)

    def variable(self, size: int) -> int:
        """A new variable; its number."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def intern(self, table: FactorTable) -> int:
        """The number of a table, equal tables sharing one."""
        table = np.asarray(table, dtype=np.float64, order="C")
        key = (table.shape, table.tobytes())
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = len(self.tables)
            self.tables.append(table.copy())
        return found

    def add(self, scope: tuple[int, ...], table: FactorTable) -> None:
        """Add a cost over the variables of `scope`, in that order."""
        self.factors.append((scope, self.intern(table)))

    def solve(self, limit: int = 1 << 22) -> Solution:
        """Eliminate all variables, then read the values back."""
        # Long because all of elimination is one loop over sets that it keeps in step with each other.
        n = len(self.sizes)
        scopes: dict[int, tuple[tuple[int, ...], int]] = dict(enumerate(self.factors))
        touching, neighbours = self._neighbours()
        counts = {s: np.arange(s) for s in set(self.sizes)}
        allowed = [counts[s] for s in self.sizes]

        def weight(v: int) -> int:
            return math.prod([len(allowed[u]) for u in neighbours[v]])

        heap = [(weight(v), v) for v in range(n)]
        heapq.heapify(heap)
        gone = [False] * n
        steps: list[Eliminated] = []
        memo: dict[object, tuple[int, FactorTable]] = {}
        constant, exact, count = 0.0, True, len(scopes)
        while heap:
            w, v = heapq.heappop(heap)
            if gone[v]:
                continue
            if w != (now := weight(v)):
                heapq.heappush(heap, (now, v))
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
            parts = sorted([(scopes[f][1], tuple([place[u] for u in scopes[f][0]])) for f in touching[v]])
            shape = tuple([len(allowed[u]) for u in (*scope, v)])
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
                neighbours[u].update(scope)
                neighbours[u].discard(u)
            if scope:
                scopes[count] = (scope, table)
                for u in scope:
                    touching[u].add(count)
                count += 1
                for u in scope:
                    heapq.heappush(heap, (weight(u), u))
            else:
                constant += float(self.tables[table])
        return Solution(self._read_back(steps), constant, exact)

    def _neighbours(self) -> tuple[list[set[int]], list[set[int]]]:
        """By variable, the factors it stands in and the variables it stands there with."""
        touching: list[set[int]] = [set() for _ in self.sizes]
        neighbours: list[set[int]] = [set() for _ in self.sizes]
        for f, (scope, _) in enumerate(self.factors):
            for v in scope:
                touching[v].add(f)
                if len(scope) > 1:
                    neighbours[v].update([u for u in scope if u != v])
        return touching, neighbours

    def _read_back(self, steps: list[Eliminated]) -> list[int]:
        """The value of each variable, the last one eliminated first."""
        values = [0] * len(self.sizes)
        for v, scope, best, then in reversed(steps):
            # Where no value was lost, a value stands at its own number.
            at = tuple(
                [
                    values[u] if len(kept) == self.sizes[u] else int(np.searchsorted(kept, values[u]))
                    for u, kept in zip(scope, then, strict=False)
                ]
            )
            values[v] = int(then[-1][best[at]])
        return values

    def floor(self, limit: int = 1 << 19) -> float:
        """A number that the least sum is not below; the least sum itself where no table grows beyond `limit`."""
        found = [(scope, tuple(np.arange(self.sizes[v]) for v in scope), self.tables[t]) for scope, t in self.factors]
        return floor(self.sizes, found, limit)

    def _eliminate(self, parts: list[tuple[int, tuple[int, ...]]], shape: tuple[int, ...]) -> tuple[int, FactorTable]:
        """Sum tables over the variables of `shape`, and minimise over the last, which goes."""
        total = np.zeros(shape)
        for table, axes in parts:
            part = self.tables[table]
            if len(axes) > 1:
                part = part.transpose(sorted(range(len(axes)), key=axes.__getitem__))
            total += part.reshape([shape[a] if a in axes else 1 for a in range(len(shape))])
        return self.intern(total.min(-1)), total.argmin(-1)

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
        self,
        v: int,
        allowed: list[FactorTable],
        touching: list[set[int]],
        scopes: dict[int, tuple[tuple[int, ...], int]],
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


Factor = tuple[tuple[int, ...], tuple[FactorTable, ...], FactorTable]
"""Variables, for each the class of every value, and a table over classes."""


def floor(sizes: Sequence[int], factors: Iterable[Factor], limit: int = 1 << 19) -> float:
    """A number that the least sum is not below; the least sum itself where no table grows beyond `limit`.

    A table often tells few values of a variable apart: it is given over classes of values. Of the values of a variable
    that no table tells apart only the cheapest counts, and what is left of it when it has gone is a table over the
    classes of its neighbours. Where that would grow too large, it goes from its tables in groups, each at its best: as
    if it could have a value for each of them, which only lowers the sum.
    """
    return _Floor(sizes, factors, limit).found()


class _Floor:
    def __init__(self, sizes: Sequence[int], factors: Iterable[Factor], limit: int) -> None:
        self.sizes, self.limit, self.constant = sizes, limit, 0.0
        self.own = [np.zeros(n) for n in sizes]
        """What each value costs by itself."""
        self.factors: dict[int, Factor] = {}
        self.touching: list[set[int]] = [set() for _ in sizes]
        self.heap: list[tuple[int, int]] = []
        self.made = 0
        for scope, classes, table in factors:
            self.add(scope, classes, table)

    def add(self, scope: tuple[int, ...], classes: tuple[FactorTable, ...], table: FactorTable) -> None:
        """One more table; what it does not tell apart is none of its axes."""
        if 1 in table.shape:
            real = [k for k, n in enumerate(table.shape) if n > 1]
            scope, classes, table = tuple(scope[k] for k in real), tuple(classes[k] for k in real), table.squeeze()
        if not scope:
            self.constant += float(table)
        elif len(scope) == 1:
            self.own[scope[0]] = self.own[scope[0]] + table[classes[0]]
        else:
            self.factors[self.made] = (scope, classes, table)
            for v in scope:
                self.touching[v].add(self.made)
            self.made += 1

    def weight(self, v: int) -> int:
        """How large a table its going leaves, or a little less than that."""
        around: dict[int, int] = {}
        for f in self.touching[v]:
            scope, _, table = self.factors[f]
            for u, classes in zip(scope, table.shape, strict=True):
                if u != v:
                    around[u] = min(around.get(u, 1) * classes, self.sizes[u])
        return math.prod(around.values())

    def found(self) -> float:
        """Variables go one after the other, those that leave least first."""
        heap = self.heap = [(self.weight(v), v) for v in range(len(self.sizes))]
        heapq.heapify(heap)
        gone = [False] * len(self.sizes)
        while heap:
            w, v = heapq.heappop(heap)
            if gone[v]:
                continue
            if w != (now := self.weight(v)):
                heapq.heappush(heap, (now, v))
                continue
            gone[v] = True
            self.without(v)
        return self.constant

    def without(self, v: int) -> None:
        """Let a variable go."""
        groups = self._groups(v, sorted(self.touching[v]))
        if not groups:
            self.constant += float(self.own[v].min())
        for group in groups:
            self._gone(v, group, self.own[v] / len(groups))

    def _groups(self, v: int, mine: list[int]) -> list[list[int]]:
        """All tables of a variable together, or in groups that are small enough, those that depend on it most first."""
        if not mine or self._size(v, mine) <= self.limit:
            return [mine] if mine else []
        groups: list[list[int]] = []
        for f in sorted(mine, key=lambda f: (-self._depends(f, v), f)):
            for group in groups:
                if self._size(v, [*group, f]) <= self.limit:
                    group.append(f)
                    break
            else:
                groups.append([f])
        return groups

    def _size(self, v: int, mine: Sequence[int]) -> int:
        """Of the table over a variable and all neighbours that these tables have."""
        values = len(self._told_apart(v, mine, self.own[v]))
        return values * math.prod(count for _, count, _ in self._around(v, mine).values())

    def _gone(self, v: int, mine: Sequence[int], own: FactorTable) -> None:
        """Add up tables of a variable, and what its values cost, and take the best value."""
        values, around = self._told_apart(v, mine, own), self._around(v, mine)
        shape = [len(values), *(count for _, count, _ in around.values())]
        total = own[values].reshape(-1, *(1 for _ in around))
        at = {u: k + 1 for k, u in enumerate(around)}
        for f in sorted(mine, key=lambda f: self.factors[f][2].size):  # it grows as late as can be
            scope, classes, table = self._take(f)
            axes = []
            for k, u in enumerate(scope):
                if u == v:
                    table = table.take(classes[k][values], axis=k)
                elif (of := around[u][2].get(f)) is not None:
                    table = table.take(of, axis=k)
                axes.append(0 if u == v else at[u])
            table = table.transpose(np.argsort(axes))
            total = total + table.reshape([shape[a] if a in axes else 1 for a in range(len(shape))])
        self._left(tuple(around), tuple(classes for classes, _, _ in around.values()), total.min(0))

    def _left(self, scope: tuple[int, ...], classes: tuple[FactorTable, ...], table: FactorTable) -> None:
        """What has become of tables."""
        self.add(scope, classes, table)
        for u in scope:
            heapq.heappush(self.heap, (self.weight(u), u))

    def _take(self, f: int) -> Factor:
        """A table, which is no longer there then."""
        factor = self.factors.pop(f)
        for u in factor[0]:
            self.touching[u].discard(f)
        return factor

    def _told_apart(self, v: int, mine: Sequence[int], own: FactorTable) -> FactorTable:
        """Of the values of a variable between which no table can tell, the cheapest."""
        key = _joined([self.factors[f][1][self.factors[f][0].index(v)] for f in mine])
        order = np.lexsort((own, key))
        sorted_ = key[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = sorted_[1:] != sorted_[:-1]
        found: FactorTable = order[first]
        return found

    def _around(self, v: int, mine: Sequence[int]) -> dict[int, tuple[FactorTable, int, dict[int, FactorTable]]]:
        """By neighbour: the class of each of its values, how many, and for tables with other classes, which of theirs.

        Where several tables look at a neighbour, classes are those that one or another tells apart.
        """
        seen: dict[int, list[tuple[int, FactorTable, int]]] = {}
        for f in mine:
            scope, classes, table = self.factors[f]
            for u, of, count in zip(scope, classes, table.shape, strict=True):
                if u != v:
                    seen.setdefault(u, []).append((f, of, count))
        out: dict[int, tuple[FactorTable, int, dict[int, FactorTable]]] = {}
        for u, looks in seen.items():
            if len(looks) == 1:
                out[u] = looks[0][1], looks[0][2], {}
            else:
                _, index, of = np.unique(
                    _joined([classes for _, classes, _ in looks]), return_index=True, return_inverse=True
                )
                out[u] = of, len(index), {f: classes[index] for f, classes, _ in looks}
        return out

    def _depends(self, f: int, v: int) -> float:
        """By how much a table may differ over a variable."""
        scope, _, table = self.factors[f]
        at = scope.index(v)
        return float((table.max(at) - table.min(at)).max())


def _joined(columns: Sequence[FactorTable]) -> FactorTable:
    """Rows as numbers: equal ones where all columns are."""
    key, size = columns[0].astype(np.int64), 1 + int(columns[0].max(initial=0))
    for column in columns[1:]:
        count = 1 + int(column.max(initial=0))
        if size * count > 1 << 60:
            _, key = np.unique(key, return_inverse=True)
            size = len(key)
        key, size = key * count + column, size * count
    return key

"""The least sum of tables over shared variables where something else that adds up, such as bytes, has a cap.

Elimination (`placement/minsum.py`) knows one sum. Here every combination of values also uses *resources*: sums of
tables of their own, each with a cap. Two ways, the cheap one first:

    priced      A resource gets a price, and elimination minimises cost plus price times use. Whatever the prices, the
                result is below what the best choice within the caps costs: a bound. The prices at which it is
                highest are found from the lines that choices already seen draw (a small linear program each time).
                Choices on the way that keep to the caps are candidates; often one of them reaches the bound.
    programmed  Else HiGHS gets the whole as a mixed integer program: one 0/1 variable per value, one share per entry of
                a table, which must agree with the values on each side. It ends with a choice and a bound of its own;
                the better of both bounds counts.

Costs may be infinite where values exclude each other; uses are finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix

from laminar.errors import PlanError
from laminar.placement.minsum import FactorTable, MinSum

CostTerm = tuple[tuple[int, ...], FactorTable]
"""A table over some variables."""
TOLERANCE = 1e-7
"""Costs this close, beside the largest entry of a table, are equal. HiGHS is no more exact than that."""
FULL = 1e-9
"""Share of a cap by which sums of floats may miss it."""
ROUNDS = 40
"""Times that prices of resources are changed at most."""
ENTRIES = 1 << 18
"""Entries of all tables together up to which HiGHS is asked."""
DEAREST = 1e4
"""What all that a resource may vary by is priced at most, in the largest costs of all tables together."""


@dataclass(frozen=True)
class CappedSolution:
    """The best choice that was found within the caps, and what no choice can undercut."""

    values: list[int] | None
    """Nothing where no choice keeps to the caps, or none was found."""
    cost: float
    used: tuple[float, ...]
    bound: float
    """Infinite where it is known that nothing keeps to the caps."""
    exact: bool
    """Whether nothing within the caps can cost less."""
    how: str
    """`priced` or `programmed`: what found it."""
    prices: tuple[float, ...] = ()
    """Of each resource, at which the bound is highest: what a little more of it would save."""


@dataclass
class Capped:
    """Variables with a number of values each, what combinations cost, and what they use of each resource."""

    sizes: list[int] = field(default_factory=list)
    costs: list[CostTerm] = field(default_factory=list)
    uses: list[list[CostTerm]] = field(default_factory=list)
    caps: list[float] = field(default_factory=list)

    def variable(self, size: int) -> int:
        """A new variable; its number."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def resource(self, cap: float) -> int:
        """A new resource; its number."""
        self.caps.append(float(cap))
        self.uses.append([])
        return len(self.caps) - 1

    def add(self, scope: tuple[int, ...], table: FactorTable) -> None:
        """A cost over the variables of `scope`, in that order."""
        self.costs.append((scope, self._checked(scope, table)))

    def use(self, resource: int, scope: tuple[int, ...], table: FactorTable) -> None:
        """What the same kind of combinations uses of a resource."""
        table = self._checked(scope, table)
        if not np.isfinite(table).all():
            raise PlanError(f"a use of resource {resource} over variables {scope} is not finite", allowed="numbers")
        self.uses[resource].append((scope, table))

    def _checked(self, scope: tuple[int, ...], table: FactorTable) -> FactorTable:
        table = np.asarray(table, dtype=np.float64)
        if table.shape != tuple(self.sizes[v] for v in scope) or len(set(scope)) != len(scope):
            raise PlanError(f"a table of shape {table.shape} over variables {scope}", allowed="one axis per variable")
        return table

    def cost_of(self, values: Sequence[int]) -> float:
        """Of a choice."""
        return _sum_at(self.costs, values)

    def used_by(self, values: Sequence[int]) -> tuple[float, ...]:
        """By a choice, of each resource."""
        return tuple(_sum_at(terms, values) for terms in self.uses)

    def keeps(self, used: Sequence[float]) -> bool:
        """Whether that is within the caps."""
        return all(u <= cap + FULL * abs(cap) for u, cap in zip(used, self.caps, strict=True))

    # --- solved

    def solve(self, time_limit_s: float = 10.0, limit: int = 1 << 20) -> CappedSolution:
        """The cheapest choice within the caps: by prices, and where that leaves a gap by a mixed integer program.

        `limit` is the size beyond which elimination makes no table: bounds then are lower, choices not the best.
        """
        found = self._priced(limit)
        entries = sum(t.size for _, t in (*self.costs, *(u for terms in self.uses for u in terms)))
        if found.exact or math.isinf(found.bound) or time_limit_s <= 0 or entries > ENTRIES:
            return found
        return self._programmed(found, time_limit_s)

    def _scale(self) -> float:
        """The largest cost of a table."""
        return max((float(abs(t[np.isfinite(t)]).max(initial=0.0)) for _, t in self.costs), default=0.0) or 1.0

    def _priced(self, limit: int) -> CappedSolution:
        """Prices of resources at which the bound is highest, and the best choice seen on the way."""
        count, scale = len(self.caps), self._scale()
        unit = np.array([sum(float(np.ptp(t)) for _, t in terms) or 1.0 for terms in self.uses])
        prices = best_prices = np.zeros(count)  # of what a resource may vary by, in units of `scale`
        bound, best, best_cost = -math.inf, None, math.inf
        lines: list[list[float]] = []
        for _ in range(ROUNDS):
            floor, seen = self._at(prices * scale / unit, limit)
            cost, used = self.cost_of(seen), self.used_by(seen)
            if floor > bound:
                bound, best_prices = floor, prices
            if self.keeps(used) and cost < best_cost:
                best, best_cost = seen, cost
            if not count or not math.isfinite(cost) or best_cost - bound <= TOLERANCE * scale:
                break
            # The highest point below the lines that choices draw: hope <= cost + price * over, for each of them.
            lines.append([*(-(np.array(used) - self.caps) / unit), 1.0, cost / scale])
            rows = np.array(lines)
            box = [(0.0, DEAREST * len(self.costs))] * count
            asked = linprog([0.0] * count + [-1.0], rows[:, :-1], rows[:, -1], bounds=[*box, (None, None)])
            if asked.status != 0 or asked.x[-1] <= bound / scale + TOLERANCE:
                break
            prices = asked.x[:-1]
        if best is None and (bound == math.inf or self._beyond(limit)):
            return CappedSolution(None, math.inf, (), math.inf, True, "priced")
        bound = min(bound, best_cost)
        exact = best is not None and best_cost - bound <= TOLERANCE * scale
        used = self.used_by(best) if best is not None else ()
        return CappedSolution(
            best, best_cost, used, bound, exact, "priced", tuple(map(float, best_prices * scale / unit))
        )

    def _at(self, prices: FactorTable, limit: int) -> tuple[float, list[int]]:
        """The least of cost plus price times use beyond the caps, or a number below it; and a choice near that."""
        made = MinSum(list(self.sizes))
        for scope, table in self.costs:
            made.add(scope, table)
        for price, terms in zip(prices, self.uses, strict=True):
            for scope, table in terms if price else ():
                made.add(scope, price * table)
        found = made.solve(limit)
        least = found.cost if found.exact else made.floor(limit)
        return least - float(np.dot(prices, self.caps)), found.values

    def _beyond(self, limit: int) -> bool:
        """Whether one resource alone is more than its cap whatever is chosen."""
        for cap, terms in zip(self.caps, self.uses, strict=True):
            made = MinSum(list(self.sizes))
            for scope, table in terms:
                made.add(scope, table)
            if made.floor(limit) > cap + FULL * abs(cap):
                return True
        return False

    def _programmed(self, known: CappedSolution, time_limit_s: float) -> CappedSolution:
        """The same by HiGHS, with what is known of it."""
        # Long because the integer program is written down whole, then solved: rows and columns keep their numbers.
        scale = self._scale() / 100.0
        first = np.cumsum([0, *self.sizes])
        shares: dict[tuple[int, ...], int] = {}
        count = int(first[-1])
        tables = [(t, -1) for t in self.costs] + [(t, r) for r, terms in enumerate(self.uses) for t in terms]
        for (scope, table), _ in tables:
            if len(scope) > 1 and scope not in shares:
                shares[scope] = count
                count += table.size
        weights, top = np.zeros(count), np.ones(count)
        used = np.zeros((len(self.caps), count))
        constant, always = 0.0, np.zeros(len(self.caps))
        for (scope, table), resource in tables:
            if not scope:
                constant += float(table) if resource < 0 else 0.0
                always[resource] += float(table) if resource >= 0 else 0.0
                continue
            begin = int(first[scope[0]]) if len(scope) == 1 else shares[scope]
            here, flat = slice(begin, begin + table.size), table.ravel()
            if resource < 0:
                weights[here] += np.where(np.isfinite(flat), flat, 0.0) / scale
                top[here][~np.isfinite(flat)] = 0.0
            else:
                used[resource, here] += flat
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        one = csr_matrix((np.ones(len(owner)), (owner, np.arange(len(owner)))), shape=(len(self.sizes), count))
        limits = [LinearConstraint(one, 1.0, 1.0)]
        if shares:
            limits.append(LinearConstraint(self._agreeing(shares, first, count), 0.0, 0.0))
        unit = abs(used).max(axis=1, initial=0.0)
        unit[unit == 0.0] = 1.0
        caps, bound = (np.array(self.caps) - always) / unit, known.bound
        begun = time.monotonic()
        for again in range(3):
            left_s = time_limit_s - (time.monotonic() - begun)
            if left_s <= 0:
                break
            found = milp(
                weights,
                integrality=np.arange(count) < first[-1],
                bounds=Bounds(0.0, top),
                constraints=[*limits, LinearConstraint(csr_matrix(used / unit[:, None]), -np.inf, caps)],
                options={"time_limit": left_s, "mip_rel_gap": 0.0},
            )
            if found.status == 2 and not again and known.values is None:
                return CappedSolution(None, math.inf, (), math.inf, True, "programmed")
            if not again and found.mip_dual_bound is not None:
                bound = max(bound, (found.mip_dual_bound - 100.0 * TOLERANCE) * scale + constant)
            if found.x is None:
                break
            values = [int(found.x[first[v] : first[v + 1]].argmax()) for v in range(len(self.sizes))]
            cost, spent = self.cost_of(values), self.used_by(values)
            if self.keeps(spent):
                if cost < known.cost:
                    known = replace(known, values=values, cost=cost, used=spent, how="programmed")
                break
            caps -= 2 * np.maximum(0.0, np.array(spent) - self.caps) / unit  # floats: a little less, once more
        bound = min(bound, known.cost)
        return replace(known, bound=bound, exact=known.cost - bound <= 10 * TOLERANCE * self._scale())

    def _agreeing(self, shares: dict[tuple[int, ...], int], first: FactorTable, count: int) -> csr_matrix:
        """The shares of a table's entries with one value of a variable add up to the share of that value."""
        rows, columns, signs, row = [], [], [], 0
        for scope, begin in shares.items():
            shape = tuple(self.sizes[v] for v in scope)
            places = np.indices(shape).reshape(len(scope), -1)
            for axis, v in enumerate(scope):
                size = places.shape[1]
                rows += [row + places[axis], row + np.arange(shape[axis])]
                columns += [begin + np.arange(size), first[v] + np.arange(shape[axis])]
                signs += [np.ones(size), -np.ones(shape[axis])]
                row += shape[axis]
        together = (np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns)))
        return csr_matrix(together, shape=(row, count))


def _sum_at(terms: Sequence[CostTerm], values: Sequence[int]) -> float:
    return float(sum(float(table[tuple(values[v] for v in scope)]) for scope, table in terms))

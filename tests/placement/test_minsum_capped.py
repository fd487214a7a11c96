"""Least sums under caps, held against every choice there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.errors import PlanError
from laminar.placement.minsum_capped import Capped


@st.composite
def problems(draw: st.DrawFn, resources: tuple[int, int] = (1, 3), most: int = 7) -> Capped:
    """Up to 7 variables of up to 4 values, costs and uses of each value and of pairs, caps that some choices keep."""
    seed = draw(st.integers(0, 2**32 - 1))
    count = draw(st.integers(1, most))
    rng = np.random.default_rng(seed)
    made = Capped()
    for _ in range(count):
        made.variable(int(rng.integers(1, 5)))
    pairs = [p for p in itertools.combinations(range(count), 2) if rng.random() < draw(st.sampled_from([0.2, 0.5]))]
    excluding = draw(st.booleans())

    def tables(high: int, infinite: bool) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        for scope in [(v,) for v in range(count)] + pairs:
            if rng.random() < 0.8:
                table = rng.integers(0, high, [made.sizes[v] for v in scope]).astype(float)
                if infinite and len(scope) == 2:
                    table[rng.random(table.shape) < 0.1] = math.inf
                yield scope, table

    for scope, table in tables(20, excluding):
        made.add(scope, table)
    for _ in range(draw(st.integers(*resources))):
        rows = list(tables(12, False))
        low, high = (sum(float(f(t)) for _, t in rows) for f in (np.min, np.max))
        resource = made.resource(round(low + draw(st.floats(0.0, 0.8)) * (high - low)))
        for scope, table in rows:
            made.use(resource, scope, table)
    return made


def every(problem: Capped) -> list[tuple[float, tuple[float, ...]]]:
    """Cost and uses of all choices within the caps that exclude nothing."""
    out = []
    for values in itertools.product(*map(range, problem.sizes)):
        cost, used = problem.cost_of(values), problem.used_by(values)
        if math.isfinite(cost) and problem.keeps(used):
            out.append((cost, used))
    return out


@given(problems())
@settings(max_examples=60, deadline=None)
def test_the_cheapest_choice_within_the_caps_is_found(problem: Capped) -> None:
    """Prices alone leave a gap where the best choice lies inside; then the program has to close it."""
    found, choices = problem.solve(), every(problem)
    assert found.exact
    if not choices:
        assert found.values is None and found.bound == math.inf
        return
    assert found.values is not None
    assert problem.keeps(problem.used_by(found.values))
    assert found.cost == problem.cost_of(found.values) == min(choices)[0]
    assert found.bound <= found.cost


@given(problems())
@settings(max_examples=60, deadline=None)
def test_bounds_by_prices_are_never_above_the_best_choice(problem: Capped) -> None:
    """A bound that is too high would rule out better plans than what was found, whatever tables may grow to."""
    choices = every(problem)
    best = min(choices)[0] if choices else math.inf
    for limit in (1 << 20, 8):
        found = problem.solve(time_limit_s=0.0, limit=limit)
        assert found.bound <= best + 1e-6
        assert found.cost >= best
        if found.exact and choices:
            assert found.cost == best


def knapsack(count: int, seed: int = 0, fill: float = 0.5) -> Capped:
    """Variables that have nothing to do with each other but a cap: each is fast and large, or slow and small."""
    rng = np.random.default_rng(seed)
    made = Capped()
    sizes = rng.integers(10, 100, count)
    room = made.resource(float(fill * sizes.sum()))
    for k in range(count):
        v = made.variable(3)
        made.add((v,), np.array([0.0, 0.5, 1.0]) * rng.uniform(1e-5, 1e-4))
        made.use(room, (v,), np.array([1.0, 0.6, 0.1]) * sizes[k])
    return made


def test_costs_of_microseconds_are_told_apart() -> None:
    """Solvers have absolute tolerances; prices of a training step are far below one."""
    problem = knapsack(7)
    found = problem.solve()
    assert found.exact and math.isclose(found.cost, min(every(problem))[0], rel_tol=1e-12)


def test_many_variables_under_one_cap_are_solved_with_a_proof() -> None:
    """Hundreds of tensors are the usual size; prices come close, and the rest is proved by the program."""
    problem = knapsack(300)
    found = problem.solve(time_limit_s=20.0)
    assert found.values is not None and problem.keeps(found.used)
    assert found.bound <= found.cost <= 1.001 * found.bound
    assert found.prices[0] > 0, "more room would save time"


def test_more_variables_in_one_table_are_allowed() -> None:
    """Ops read more than two tensors."""
    rng = np.random.default_rng(3)
    made = Capped([2, 3, 2, 2])
    made.add((0, 1, 2), rng.integers(0, 9, (2, 3, 2)).astype(float))
    made.add((3, 1), rng.integers(0, 9, (2, 3)).astype(float))
    made.use(made.resource(9.0), (2, 0, 3), rng.integers(0, 9, (2, 2, 2)).astype(float))
    made.use(0, (1,), np.array([5.0, 1.0, 7.0]))
    assert made.solve().cost == min(every(made))[0]


def test_tables_that_do_not_fit_their_variables_are_refused() -> None:
    """A table over other variables than it says would give a plan that nobody asked for."""
    made = Capped([2, 3])
    with pytest.raises(PlanError, match="one axis per variable"):
        made.add((1, 0), np.zeros((2, 3)))
    with pytest.raises(PlanError, match="not finite"):
        made.use(made.resource(1.0), (0,), np.array([1.0, math.inf]))

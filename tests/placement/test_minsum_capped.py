"""Least sums under caps, and choices that none beats, held against every choice there is."""

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
from laminar.placement.pareto import Front, pareto


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


def unbeaten(points: list[tuple[float, ...]]) -> set[tuple[float, ...]]:
    """Those that none beats."""
    some = set(points)
    return {p for p in some if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in some)}


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


@given(problems(resources=(1, 2), most=6))
@settings(max_examples=80, deadline=None)
def test_the_front_without_rounding_is_that_of_all_choices(problem: Capped) -> None:
    """Elimination with sets must lose nothing that could still be the best for some cap."""
    front = pareto(problem)
    assert front.slack == (0.0,) * len(problem.caps)
    assert {(p.cost, *p.used) for p in front.points} == unbeaten([(c, *u) for c, u in every(problem)])
    assert all(p.used == p.counted for p in front.points)


@given(problems(resources=(1, 3), most=5), st.sampled_from([2.0, 3.5, 7.0]))
@settings(max_examples=80, deadline=None)
def test_rounded_fronts_keep_their_promises(problem: Capped, step: float) -> None:
    """Rounded up, counts are never below what is used; rounded down, the cheapest within caps is a bound."""
    steps = [step] * len(problem.caps)
    choices = every(problem)
    best = min(choices)[0] if choices else math.inf
    for up in (True, False):
        front: Front = pareto(problem, steps, up)
        for point in front.points:
            assert point.cost == problem.cost_of(point.values) and point.used == problem.used_by(point.values)
            for used, counted, slack in zip(point.used, point.counted, front.slack, strict=True):
                assert abs(used - counted) <= slack + 1e-9
                assert counted >= used - 1e-9 if up else counted <= used + 1e-9
        taken = front.cheapest(problem.caps)
        if up and taken is not None:
            assert problem.keeps(taken.used) and taken.cost >= best
        if not up and choices:
            assert taken is not None and taken.cost <= best
        for cost, used in choices:  # nothing is lost by more than the slack
            room = [u + s for u, s in zip(used, front.slack, strict=True)]
            if not up or all(r <= c for r, c in zip(room, problem.caps, strict=True)):
                near = (p for p in front.points if all(a <= b for a, b in zip(p.counted, room, strict=True)))
                assert any(p.cost <= cost for p in near)


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


def test_a_chain_keeps_its_front_small_by_rounding() -> None:
    """Sets that would outgrow their limit are rounded, in steps that are told, and stay within them."""
    rng = np.random.default_rng(1)
    made = Capped()
    room = made.resource(1e12)
    for k in range(60):
        v = made.variable(3)
        made.use(room, (v,), rng.uniform(0, 1e9, 3))
        made.add((v,), rng.uniform(0, 1e-3, 3))
        if k:
            made.add((v - 1, v), rng.uniform(0, 1e-3, (3, 3)))
    front = pareto(made, most=200)
    assert front.steps[0] > 0 and 1 < len(front.points) <= 200
    assert all(p.used[0] <= p.counted[0] <= p.used[0] + front.slack[0] for p in front.points)
    cap = float(np.median([p.counted[0] for p in front.points]))
    made.caps[room] = cap
    best, lower = made.solve(), pareto(made, steps=front.steps, up=False, most=400).cheapest([cap])
    taken = front.cheapest([cap])
    assert taken is not None and lower is not None
    assert lower.cost <= best.cost + 1e-9 and best.bound <= taken.cost


def test_a_choice_is_beaten_by_any_other_not_only_by_the_next_cheaper_one() -> None:
    """The cheapest value uses least; those that get leaner and leaner behind it are still worse in both."""
    made = Capped([10])
    made.add((0,), np.arange(10.0))
    made.use(made.resource(100.0), (0,), np.array([1.0, 19, 18, 17, 16, 15, 14, 13, 12, 11]))
    assert [p.values for p in pareto(made).points] == [(0,)]


def test_more_variables_in_one_table_are_allowed() -> None:
    """Ops read more than two tensors."""
    rng = np.random.default_rng(3)
    made = Capped([2, 3, 2, 2])
    made.add((0, 1, 2), rng.integers(0, 9, (2, 3, 2)).astype(float))
    made.add((3, 1), rng.integers(0, 9, (2, 3)).astype(float))
    made.use(made.resource(9.0), (2, 0, 3), rng.integers(0, 9, (2, 2, 2)).astype(float))
    made.use(0, (1,), np.array([5.0, 1.0, 7.0]))
    assert made.solve().cost == min(every(made))[0]
    assert {(p.cost, *p.used) for p in pareto(made).points} == unbeaten([(c, *u) for c, u in every(made)])


def test_tables_that_do_not_fit_their_variables_are_refused() -> None:
    """A table over other variables than it says would give a plan that nobody asked for."""
    made = Capped([2, 3])
    with pytest.raises(PlanError, match="one axis per variable"):
        made.add((1, 0), np.zeros((2, 3)))
    with pytest.raises(PlanError, match="not finite"):
        made.use(made.resource(1.0), (0,), np.array([1.0, math.inf]))
    with pytest.raises(PlanError, match="one each"):
        pareto(made, steps=[1.0, 2.0])

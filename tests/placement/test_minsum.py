"""The solver under completion finds the least sum, says when it might not have, and answers anyway.

Every plan made from seeds rests on this being a minimum and not merely a good value, so small random
problems are solved by trying everything as well. Ties may be broken either way; the cost may not.
"""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.placement.minsum import MinSum


def random_problem(chance: random.Random, variables: int, tables: int, values: int, banned: float = 0.0) -> MinSum:
    """Variables of a few values each, tables over up to three of them, some entries forbidden."""
    problem = MinSum()
    for _ in range(variables):
        problem.variable(chance.randint(1, values))
    for _ in range(tables):
        scope = tuple(chance.sample(range(variables), chance.randint(1, min(3, variables))))
        shape = [problem.sizes[v] for v in scope]
        table = np.array([chance.choice([0, 1, 2, 5, 9, 0.5]) for _ in range(int(np.prod(shape)))], dtype=float)
        table[[chance.random() < banned for _ in table]] = np.inf
        problem.add(scope, table.reshape(shape))
    return problem


def cost_of(problem: MinSum, values: list[int]) -> float:
    """What an assignment costs, table by table."""
    return float(sum(problem.tables[t][tuple(values[v] for v in scope)] for scope, t in problem.factors))


def least(problem: MinSum) -> float:
    """The least cost, by trying everything."""
    every = itertools.product(*(range(n) for n in problem.sizes))
    given = list(problem.factors)
    return min(float(sum(problem.tables[t][tuple(v[u] for u in scope)] for scope, t in given)) for v in every)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 6), st.integers(0, 9), st.sampled_from([0.0, 0.2]))
def test_nothing_costs_less(seed: int, variables: int, tables: int, banned: float) -> None:
    """Exact, also where some combinations are forbidden or all of them are."""
    problem = random_problem(random.Random(seed), variables, tables, 4, banned)
    best = least(problem)
    solution = problem.solve()
    assert solution.exact
    assert solution.cost == pytest.approx(best)
    assert all(0 <= v < n for v, n in zip(solution.values, problem.sizes, strict=True))
    assert cost_of(problem, solution.values) == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 6), st.integers(1, 12), st.integers(1, 30))
def test_a_cut_table_still_gives_an_assignment(seed: int, variables: int, tables: int, limit: int) -> None:
    """Where tables may not grow, the answer is one that can be used, costs what it says, and is never too good."""
    problem = random_problem(random.Random(seed), variables, tables, 4)
    best = least(problem)
    solution = problem.solve(limit)
    assert all(0 <= v < n for v, n in zip(solution.values, problem.sizes, strict=True))
    assert cost_of(problem, solution.values) == pytest.approx(solution.cost)
    assert solution.cost >= best - 1e-9
    if solution.exact:
        assert solution.cost == pytest.approx(best)


def test_exactness_is_given_up_only_when_a_table_would_not_fit() -> None:
    """A clique of six needs a table of 4^6; with less room the answer says that it may not be the best."""
    chance = random.Random(5)
    problem = MinSum()
    for _ in range(6):
        problem.variable(4)
    for a, b in itertools.combinations(range(6), 2):
        problem.add((a, b), np.array([[chance.random() for _ in range(4)] for _ in range(4)]))
    assert problem.solve(4**6).exact
    assert not problem.solve(4**5).exact


def test_a_chain_is_solved_exactly_however_long() -> None:
    """Tables of a chain never grow, which is why the op graph of a network can be solved at all."""
    chance = random.Random(6)
    problem = MinSum()
    tables = [np.array([[chance.random() for _ in range(5)] for _ in range(5)]) for _ in range(1999)]
    for _ in range(2000):
        problem.variable(5)
    for i, table in enumerate(tables):
        problem.add((i, i + 1), table)
    solution = problem.solve(limit=125)
    reach = np.zeros(5)
    for table in tables:
        reach = (reach[:, None] + table).min(0)
    assert solution.exact
    assert solution.cost == pytest.approx(reach.min())
    assert cost_of(problem, solution.values) == pytest.approx(solution.cost)


def test_equal_tables_are_kept_once() -> None:
    """Repeated layers bring the same tables again and again: the second costs a look-up."""
    problem = MinSum()
    table = np.random.default_rng(0).random((3, 3))
    for _ in range(50):
        problem.add((problem.variable(3), problem.variable(3)), table.copy())
    assert len(problem.tables) == 1
    solution = problem.solve()
    assert solution.cost == pytest.approx(50 * table.min())
    assert len(problem.tables) < 5


def test_a_variable_nobody_mentions_has_a_value() -> None:
    """An input without readers is still stored somehow."""
    problem = MinSum()
    problem.variable(3)
    problem.add((problem.variable(2),), np.array([4.0, 3.0]))
    solution = problem.solve()
    assert solution.values[1] == 1 and solution.values[0] in range(3)
    assert (solution.cost, solution.exact) == (3.0, True)


def test_more_variables_may_meet_than_an_array_has_axes() -> None:
    """A table that every layer reads meets them all; where each of them has one choice left, that is no large table."""
    problem = MinSum()
    many = [problem.variable(1) for _ in range(70)]
    hub = problem.variable(3)
    for a, b in itertools.combinations(many, 2):
        problem.add((a, b), np.array([[1.0]]))
    for k, v in enumerate(many):
        problem.add((hub, v), np.array([[5.0], [k % 2 + 0.5], [9.0]]))
    solution = problem.solve()
    assert solution.exact and solution.values == [*(0 for _ in many), 1]
    assert solution.cost == cost_of(problem, solution.values) == 70 * 69 / 2 + 35 * 0.5 + 35 * 1.5
    assert problem.floor() == solution.cost


def test_an_impossible_problem_costs_infinity() -> None:
    """Nobody can mistake it for a plan."""
    problem = MinSum()
    v = problem.variable(2)
    problem.add((v,), np.array([np.inf, 0.0]))
    problem.add((v,), np.array([0.0, np.inf]))
    assert problem.solve().cost == np.inf


def test_a_large_problem_takes_no_time() -> None:
    """Two thousand variables in a row with a shared one: completion of a deep model must feel instant."""
    problem = MinSum()
    table = np.random.default_rng(1).random((8, 8))
    shared = problem.variable(3)
    last = problem.variable(8)
    wide = np.random.default_rng(2).random((8, 3))
    for _ in range(2000):
        now = problem.variable(8)
        problem.add((last, now), table)
        problem.add((now, shared), wide)
        last = now
    began = time.process_time()
    assert problem.solve().exact
    assert time.process_time() - began < 10

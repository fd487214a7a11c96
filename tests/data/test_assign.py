"""Samples to ranks: every one once, never worse than longest-first, the same answer on every way to it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.length_cases import DISTRIBUTIONS, drawn
from laminar.data import SampleCost, assign, assign_steps
from laminar.data.balance.assign import slowest_over_mean
from laminar.data.balance.longest_first import longest_first, longest_first_steps, whole_costs
from laminar.errors import DataError

LLAMA = SampleCost(per_token=663883653.0, per_square=8417.0)
KINDS = {
    "alike": lambda ranks: np.ones(ranks),
    "two kinds": lambda ranks: np.where(np.arange(ranks) % 2, 2.0, 1.0),
    "all different": lambda ranks: np.linspace(1.0, 2.0, ranks),
}


def by_longest_first(costs: np.ndarray, speeds: np.ndarray) -> float:
    """What plain longest-first gives."""
    ranks = longest_first(whole_costs(costs), speeds)
    return slowest_over_mean(np.bincount(ranks, weights=costs, minlength=len(speeds)), speeds)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("ranks", "batch"), [(8, 256), (32, 512), (64, 512)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_never_worse_than_longest_first(name: str, ranks: int, batch: int, kind: str) -> None:
    """On six distributions, and where nothing but exchanges can help it is better."""
    speeds = KINDS[kind](ranks)
    for costs in LLAMA.of(drawn(name, 5 * batch)).reshape(5, batch):
        found = assign(costs, ranks, speeds)
        assert found.slowest_over_mean <= by_longest_first(costs, speeds) + 1e-9


@pytest.mark.parametrize("name", ["ff-cpp", "codealpaca"])
def test_few_samples_of_about_one_length_are_balanced_by_exchanges(name: str) -> None:
    """Eight samples a rank: longest-first alone is off by percents."""
    costs = LLAMA.of(drawn(name, 512))
    assert by_longest_first(costs, np.ones(64)) > 1.015
    assert assign(costs, 64).slowest_over_mean < 1.005


@given(st.lists(st.floats(0, 1e12), max_size=40), st.integers(1, 9))
def test_every_sample_has_one_rank(costs: list[float], ranks: int) -> None:
    """Whatever the costs."""
    found = assign(costs, ranks)
    assert sorted(s for r in range(ranks) for s in found.of_rank(r)) == list(range(len(costs)))
    assert float(found.work.sum()) == pytest.approx(sum(costs))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 3))
def test_small_cases_are_near_the_best_there_is(costs: list[int], ranks: int) -> None:
    """Against all assignments: within the bound of longest-first, 4/3 - 1/3m."""
    best = min(
        max(sum(c for c, r in zip(costs, ranks_of, strict=True) if r == rank) for rank in range(ranks))
        for ranks_of in product(range(ranks), repeat=len(costs))
    )
    assert float(assign(costs, ranks).work.max()) <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ff-cpp", "github"])
def test_one_step_alone_and_many_at_once_are_the_same(kind: str, name: str) -> None:
    """Or a rank that plans ahead would disagree with one that does not, and samples would be lost."""
    speeds, costs = KINDS[kind](16), LLAMA.of(drawn(name, 20 * 128)).reshape(20, 128)
    assert longest_first_steps(whole_costs(costs), speeds).tolist() == [
        longest_first(c, speeds).tolist() for c in whole_costs(costs)
    ]
    assert assign_steps(costs, 16, speeds).tolist() == [assign(c, 16, speeds).rank_of.tolist() for c in costs]


def test_the_unit_of_costs_does_not_matter() -> None:
    """Seconds or operations."""
    costs = LLAMA.of(drawn("ff-web", 256))
    assert assign(costs, 8).rank_of.tolist() == assign(costs * 2.0**-70, 8).rank_of.tolist()


def test_equal_samples_are_shared_equally() -> None:
    """Ties go to the rank with the lower number."""
    assert assign([1.0] * 8, 4).rank_of.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_counts_of_samples_are_free() -> None:
    """One long sample against many short ones, which equal counts could not balance."""
    found = assign([8.0] + [1.0] * 8, 2)
    assert found.slowest_over_mean == 1.0 and [len(found.of_rank(r)) for r in range(2)] == [1, 8]


@pytest.mark.parametrize("ratio", [2.0, 3.0, 10.0])
def test_a_faster_rank_gets_more(ratio: float) -> None:
    """In proportion."""
    found = assign(np.ones(1100), 2, [1.0, ratio])
    assert found.work[1] / found.work[0] == pytest.approx(ratio, rel=0.03)
    assert found.slowest_over_mean < 1.01


def test_the_longest_goes_to_the_fastest() -> None:
    """Where there is one for each."""
    assert assign([1.0, 10.0, 5.0], 3, [1.0, 5.0, 10.0]).rank_of.tolist() == [0, 2, 1]


def test_ranks_may_stay_empty() -> None:
    """Fewer samples than ranks, or none."""
    found = assign([3.0, 1.0], 4)
    assert [found.of_rank(r) for r in range(4)] == [[0], [1], [], []]
    assert found.ranks == 4 and assign([], 3).slowest_over_mean == 1.0 and assign([], 3).of_rank(2) == []


def test_samples_that_cost_nothing_have_a_rank() -> None:
    """All of them, and beside others."""
    assert assign([0.0, 0.0], 2).slowest_over_mean == 1.0
    found = assign([0.0, 5.0, 0.0], 2)
    assert sorted(found.of_rank(0) + found.of_rank(1)) == [0, 1, 2]


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_costs_that_are_none_are_refused(cost: float) -> None:
    """With their place."""
    with pytest.raises(DataError, match="sample 1 costs"):
        assign([1.0, cost], 2)
    with pytest.raises(DataError, match="costs"):
        assign_steps([[1.0, cost]], 2)


@pytest.mark.parametrize(
    ("ranks", "speeds"), [(0, None), (2, [1.0]), (2, [1.0, 0.0]), (2, [1.0, float("nan")]), (1, [-1.0])]
)
def test_ranks_without_a_speed_are_refused(ranks: int, speeds: list[float] | None) -> None:
    """A speed of zero would need forever."""
    with pytest.raises(DataError):
        assign([1.0], ranks, speeds)


@pytest.mark.parametrize("shape", [(4,), (2, 2, 2)])
def test_steps_are_rows(shape: tuple[int, ...]) -> None:
    """Anything else is refused by its shape."""
    with pytest.raises(DataError, match="shape"):
        assign_steps(np.ones(shape), 2)
    with pytest.raises(DataError, match="shape"):
        assign(np.ones((2, 2)), 2)


def test_a_ranks_samples_are_divided_into_micro_batches() -> None:
    """Of about equal cost; each sample in one."""
    found = assign(LLAMA.of(drawn("ff-web", 256)), 8)
    parts = found.micro_batches(3, 4)
    assert sorted(s for part in parts for s in part) == found.of_rank(3)
    costs = [float(found.costs[part].sum()) for part in parts]
    assert max(costs) / (sum(costs) / 4) < 1.1
    assert assign([1.0], 2).micro_batches(1, 2) == [[], []]

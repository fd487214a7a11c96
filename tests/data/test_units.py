"""Units hold every sample once, keep to their budget, and depend on lengths alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.length_cases import DISTRIBUTIONS, drawn
from laminar.data import SampleCost, bucket_lengths, pack_units, padded_length
from laminar.errors import DataError

LENGTHS = st.lists(st.integers(0, 300), max_size=60)


@given(LENGTHS, st.integers(1, 400))
def test_every_sample_is_in_one_unit_and_units_keep_to_their_tokens(lengths: list[int], tokens: int) -> None:
    """Only a sample that is too long by itself is in a unit that is."""
    units = pack_units(lengths, tokens)
    assert sorted(s for unit in units for s in unit) == list(range(len(lengths)))
    for unit in units:
        assert sum(lengths[s] for s in unit) <= tokens or len(unit) == 1


@given(LENGTHS)
def test_units_keep_to_a_cost_as_well(lengths: list[int]) -> None:
    """Attention's quadratic part counts: one long sample is worth many short ones."""
    cost = SampleCost(per_token=1.0, per_square=0.1)
    for unit in pack_units(lengths, 1000, cost, budget=2000.0):
        assert float(cost.of([lengths[s] for s in unit]).sum()) <= 2000.0 + 1e-6 or len(unit) == 1
        assert sum(lengths[s] for s in unit) <= 1000


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_units_are_well_filled(name: str) -> None:
    """Little is left empty, at a budget that holds any sample."""
    lengths = np.minimum(drawn(name, 512), 4096)
    units = pack_units(lengths, 8192)
    assert len(units) <= -(-int(lengths.sum()) // 8192) * 1.06 + 1


def test_the_same_lengths_give_the_same_units() -> None:
    """Lists or arrays."""
    lengths = drawn("ff-web", 200)
    assert pack_units(lengths, 4096) == pack_units(lengths.tolist(), 4096)


def test_a_sample_that_is_too_long_is_alone_or_an_error() -> None:
    """As asked."""
    assert pack_units([5, 100, 5], 10) == [[0, 2], [1]]
    with pytest.raises(DataError, match="sample 1 has 100 tokens"):
        pack_units([5, 100, 5], 10, too_long="error")
    with pytest.raises(DataError, match="too_long"):
        pack_units([5], 10, too_long="cut")


def test_empty_samples_are_packed_too() -> None:
    """They belong to the batch."""
    assert pack_units([0, 0], 10) == [[0, 1]] and pack_units([], 10) == []


@pytest.mark.parametrize(("tokens", "budget"), [(0, None), (10, 0.0), (10, float("nan"))])
def test_budgets_that_hold_nothing_are_refused(tokens: int, budget: float | None) -> None:
    """Nothing would ever fit."""
    with pytest.raises(DataError, match="units of"):
        pack_units([1], tokens, budget=budget)


@pytest.mark.parametrize("longest", [None, 100, 8192, 8193, 131072])
@pytest.mark.parametrize("tokens", [1, 17, 8192])
def test_there_are_at_most_sixteen_padded_lengths(tokens: int, longest: int | None) -> None:
    """And the last holds whatever there may be."""
    buckets = bucket_lengths(tokens, longest)
    assert len(buckets) <= 16 and buckets == sorted(set(buckets))
    assert buckets[-1] >= max(tokens, longest or 0) and all(b % 16 == 0 for b in buckets)


@given(st.integers(0, 8192))
def test_a_padded_length_is_the_next_of_them(tokens: int) -> None:
    """A function of the unit's own tokens."""
    buckets = bucket_lengths(8192)
    found = padded_length(tokens, buckets)
    assert found >= tokens and all(b < tokens for b in buckets if b < found)


def test_a_unit_beyond_the_last_is_refused() -> None:
    """With what to do."""
    with pytest.raises(DataError, match="longest length"):
        padded_length(100, [16, 64])
    with pytest.raises(DataError, match="up to"):
        bucket_lengths(100, count=17)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_padding_is_little(name: str) -> None:
    """Units that are filled end near the top of the buckets."""
    lengths = np.minimum(drawn(name, 1024), 8192)
    buckets = bucket_lengths(8192)
    sizes = [int(lengths[unit].sum()) for unit in pack_units(lengths, 8192)]
    padded = [padded_length(size, buckets) for size in sizes]
    assert 1 - sum(sizes) / sum(padded) < 0.03

"""What a sample costs, whole or in pieces, and which lengths are refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.data import SampleCost
from laminar.data.cost.sample_cost import checked_lengths
from laminar.errors import DataError

LLAMA = SampleCost(per_token=663883653.0, per_square=8417.0)


def test_a_cost_is_a_polynomial_of_the_length() -> None:
    """Tokens, and pairs of tokens."""
    cost = SampleCost(per_token=3.0, per_square=0.5)
    assert cost.of([0, 1, 2, 10]).tolist() == [0.0, 3.5, 8.0, 80.0]


def test_tokens_alone_are_what_is_counted_unless_said_otherwise() -> None:
    """A number of tokens is the cost that everybody understands."""
    assert SampleCost().of([3, 5]).tolist() == [3.0, 5.0]


@pytest.mark.parametrize("causal", [True, False])
@given(cuts=st.lists(st.integers(0, 500), max_size=6), linear=st.floats(0.1, 10), square=st.floats(0, 1))
def test_pieces_cost_what_the_whole_costs(causal: bool, cuts: list[int], linear: float, square: float) -> None:
    """However a sample is cut, nothing is counted twice and nothing is forgotten."""
    cost = SampleCost(per_token=linear, per_square=square, causal=causal)
    at = [0, *sorted(cuts), 500]
    pieces = sum(cost.of_rows(a, b, 500) for a, b in pairwise(at))
    assert pieces == pytest.approx(float(cost.of([500])[0]), rel=1e-12)


def test_a_sample_may_cost_something_by_being_there() -> None:
    """And so does every piece of one that is cut."""
    cost = SampleCost(per_token=2.0, per_square=0.5, per_sample=10.0)
    assert cost.of([0, 4]).tolist() == [10.0, 26.0]
    assert cost.of_rows(0, 2, 4) + cost.of_rows(2, 4, 4) == 36.0
    assert cost.rows_worth(cost.of_rows(2, 4, 4), 4, 4) == pytest.approx(2.0) and cost.rows_worth(5.0, 4, 4) == 0.0
    assert str(cost).startswith("10 + ")


def test_later_rows_of_a_causal_sample_cost_more() -> None:
    """They look at more keys."""
    assert LLAMA.of_rows(90_000, 100_000, 100_000) > 1.5 * LLAMA.of_rows(0, 10_000, 100_000)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("square", [0.0, 8417.0, 1e9])
@pytest.mark.parametrize(("rows", "stop"), [(1, 1), (1, 4096), (100, 131072), (131072, 131072)])
def test_rows_worth_a_cost_are_found_again(causal: bool, square: float, rows: int, stop: int) -> None:
    """The inverse of what rows cost, to a hundredth of a row even at the end of a long sample."""
    cost = SampleCost(per_token=663883653.0, per_square=square, causal=causal)
    assert cost.rows_worth(cost.of_rows(stop - rows, stop, 131072), stop, 131072) == pytest.approx(rows, abs=1e-2)


@pytest.mark.parametrize(
    ("linear", "square"), [(0.0, 0.0), (-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_costs_that_make_no_sense_are_refused(linear: float, square: float) -> None:
    """Before anybody plans with them."""
    with pytest.raises(DataError, match="per token"):
        SampleCost(per_token=linear, per_square=square)


def test_a_cost_survives_json_and_a_change_of_unit() -> None:
    """Only ratios count, and they stay."""
    cost = SampleCost.from_json(LLAMA.scaled(1e-12).to_json())
    assert cost.of([4096])[0] / cost.of([1])[0] == pytest.approx(LLAMA.of([4096])[0] / LLAMA.of([1])[0])
    assert "n^2" in str(cost)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([3.0, float("nan")], "sample 1 has a length of nan"),
        ([float("inf")], "sample 0 has a length of inf"),
        ([4, -1], "sample 1 has a length of -1"),
        ([1.5], "sample 0 has a length of 1.5"),
        ([[1, 2]], "shape"),
        (["four"], "type"),
        ([None], "type"),
    ],
)
def test_lengths_that_are_none_are_refused_with_their_place(lengths: list[object], says: str) -> None:
    """NaN is what a table with holes gives."""
    with pytest.raises(DataError, match=says):
        checked_lengths(lengths)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.int32, np.uint16, np.int64, np.float32])
def test_lengths_of_any_number_type_are_taken(kind: type) -> None:
    """And zero is a length."""
    assert checked_lengths(np.asarray([0, 7], dtype=kind)).tolist() == [0, 7]


def test_no_lengths_are_no_error() -> None:
    """Whoever needs some says so."""
    assert checked_lengths([]).tolist() == []

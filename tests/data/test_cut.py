"""Samples cut by rows: pieces tile them, the slowest rank is close to the mean, and cuts are few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.length_cases import DISTRIBUTIONS, drawn
from laminar.data import CutBatch, RowPiece, SampleCost, cut_and_assign
from laminar.errors import DataError

LLAMA = SampleCost(per_token=663883653.0, per_square=8417.0)


def tiles(found: CutBatch, lengths: list[int]) -> None:
    """Each row of each sample belongs to one piece, and work is what pieces cost."""
    for sample, length in enumerate(lengths):
        pieces = [p for _, p in found.of_sample(sample)]
        assert [p.start for p in pieces] == [0, *(p.stop for p in pieces[:-1])]
        assert pieces[-1].stop == length and all(p.length == length for p in pieces)
        assert all(p.rows > 0 for p in pieces) or length == 0


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("ranks", "batch"), [(8, 256), (32, 512), (64, 512)])
def test_the_slowest_rank_is_within_half_a_percent(name: str, ranks: int, batch: int) -> None:
    """On six distributions, with the batch as it is."""
    for lengths in drawn(name, 4 * batch).reshape(4, batch):
        found = cut_and_assign(lengths, ranks, LLAMA)
        assert found.slowest_over_mean <= 1.005
        tiles(found, lengths.tolist())
        for rank in range(ranks):
            cost = sum(LLAMA.of_rows(p.start, p.stop, p.length) for p in found.of_rank(rank))
            assert cost == pytest.approx(float(found.work[rank]), rel=1e-9)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_cuts_are_fewer_than_ranks(name: str) -> None:
    """Each of them settles one."""
    found = cut_and_assign(drawn(name, 512), 64, LLAMA)
    assert sum(map(len, found.pieces)) - 512 < 64 and found.cut_samples < 64


@given(st.lists(st.integers(0, 5000), max_size=30), st.integers(1, 12), st.booleans(), st.sampled_from([1, 16]))
def test_rows_are_neither_lost_nor_doubled(lengths: list[int], ranks: int, causal: bool, rows: int) -> None:
    """Whatever the lengths, zeros included."""
    cost = SampleCost(per_token=100.0, per_square=1.0, causal=causal)
    tiles(cut_and_assign(lengths, ranks, cost, rows=rows), lengths)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("causal", [True, False])
def test_a_single_sample_is_shared_by_all(ranks: int, causal: bool) -> None:
    """Under causal attention the first piece has most rows, because its rows see fewest keys."""
    found = cut_and_assign([131072], ranks, SampleCost(per_token=1.0, per_square=1.0, causal=causal))
    assert found.slowest_over_mean < 1.005
    rows = [p.rows for _, p in found.of_sample(0)]
    assert len(rows) == ranks
    assert rows[0] > 1.2 * rows[-1] if causal else max(rows) - min(rows) <= max(rows) // 100 + 1


def test_a_piece_says_which_keys_it_needs() -> None:
    """All before its end, or all there are."""
    assert RowPiece(0, 10, 20, 30).keys == (0, 20) and RowPiece(0, 10, 20, 30).rows == 10
    assert RowPiece(0, 10, 20, 30, causal=False).keys == (0, 30)
    assert RowPiece(0, 0, 30, 30).whole and not RowPiece(0, 0, 20, 30).whole


def test_cuts_are_at_multiples() -> None:
    """Of what a kernel likes."""
    lengths = drawn("github", 512)
    found = cut_and_assign(lengths, 32, LLAMA, rows=128)
    starts = [p.start for rank in found.pieces for p in rank]
    assert any(starts) and all(start % 128 == 0 for start in starts)
    assert found.slowest_over_mean <= 1.005


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_pieces_that_cost_something_by_being_there_are_balanced(name: str) -> None:
    """Half of what a middling sample costs."""
    cost = SampleCost(per_token=663883653.0, per_square=8417.0, per_sample=663883653.0 * 100)
    lengths = drawn(name, 512)
    found = cut_and_assign(lengths, 64, cost)
    tiles(found, lengths.tolist())
    assert found.slowest_over_mean <= 1.01


def test_ranks_of_different_speeds_get_pieces_to_match() -> None:
    """One at half speed."""
    speeds = np.ones(32)
    speeds[5] = 0.5
    found = cut_and_assign(drawn("github", 512), 32, LLAMA, speeds)
    assert found.slowest_over_mean <= 1.005
    assert found.work[5] / found.work[6] == pytest.approx(0.5, rel=0.01)


def test_what_needs_no_cut_has_none() -> None:
    """Whole samples that are balanced as they are."""
    found = cut_and_assign([100] * 64, 8)
    assert found.cut_samples == 0 and found.slowest_over_mean == 1.0


def test_a_looser_goal_cuts_less() -> None:
    """Who pays for exchanges may want that."""
    lengths = drawn("codealpaca", 512)
    assert cut_and_assign(lengths, 64, LLAMA, close=1.05).cut_samples == 0
    assert cut_and_assign(lengths, 64, LLAMA, close=1.05).slowest_over_mean <= 1.05


def test_two_calls_give_the_same() -> None:
    """Ranks plan alone."""
    lengths = drawn("github", 512)
    assert cut_and_assign(lengths, 64, LLAMA).pieces == cut_and_assign(lengths.tolist(), 64, LLAMA).pieces


def test_an_empty_batch_and_empty_samples_are_no_error() -> None:
    """Ranks have nothing then, or pieces without rows."""
    assert cut_and_assign([], 3).pieces == ((), (), ())
    found = cut_and_assign([0, 0], 2)
    assert found.slowest_over_mean == 1.0 and sum(map(len, found.pieces)) == 2


@pytest.mark.parametrize(("rows", "close"), [(0, 1.1), (1, 0.9)])
def test_goals_that_make_no_sense_are_refused(rows: int, close: float) -> None:
    """Below the mean nobody can be."""
    with pytest.raises(DataError, match="times the mean"):
        cut_and_assign([10], 2, rows=rows, close=close)


def test_bad_lengths_are_refused() -> None:
    """As everywhere."""
    with pytest.raises(DataError, match="nan"):
        cut_and_assign([1.0, float("nan")], 2)

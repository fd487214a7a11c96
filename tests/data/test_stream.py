"""Streams: every sample once, memory of a window, resumed by reading no more than a window again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from laminar.data import BalancedLoader, BalancedStream, SampleCost
from laminar.errors import DataError
from tests.support.sample_sets import Counting, Numbered, Seeking, samples_of, together

DATA = Numbered(200)


def stream(rank: int = 0, ranks: int = 2, source: Any = None, **how: Any) -> BalancedStream:
    how = {"window": 64, **how}
    return BalancedStream(source or Counting(DATA), 16, ranks=ranks, rank=rank, tokens=1024, **how)


def numbers(step: Any) -> list[int]:
    return [n for unit in step.units for n in samples_of(unit)]


@pytest.mark.parametrize("ranks", [1, 2, 5, 20])
@pytest.mark.parametrize("source", [Counting, Seeking])
def test_every_sample_comes_once(ranks: int, source: Callable[[Numbered], Any]) -> None:
    """In steps of the batch size, the last one smaller, on more ranks than samples too."""
    steps = together(lambda r: stream(r, ranks, source(DATA)), ranks, numbers)
    assert sorted(n for step in steps for n in step) == list(range(200))
    assert [len(step) for step in steps] == [16] * 12 + [8]


def test_steps_are_the_same_for_any_number_of_ranks() -> None:
    """And shuffled, inside of a window."""
    alone = together(lambda r: stream(r, 1), 1, numbers)
    assert together(lambda r: stream(r, 3), 3, numbers) == alone
    assert sorted(n for step in alone[:4] for n in step) == list(range(64)) and alone[0] != list(range(16))
    assert together(lambda r: stream(r, 1, shuffle=False), 1, numbers)[0] == list(range(16))


def test_the_next_epoch_has_another_order() -> None:
    """By itself, or as asked."""
    one = stream(0, 1)
    first, second = [numbers(s) for s in one], [numbers(s) for s in one]
    assert first != second and sorted(n for s in first for n in s) == sorted(n for s in second for n in s)
    one.set_epoch(0)
    assert [numbers(s) for s in one] == first


def test_no_more_than_a_window_is_read_ahead() -> None:
    """Memory does not grow with the data."""
    source = Counting(DATA)
    for number, _ in enumerate(stream(0, 2, source)):
        assert source.reads <= (number // 4 + 1) * 64


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 12])
@pytest.mark.parametrize("source", [Counting, Seeking])
def test_it_goes_on_where_it_was(taken: int, source: Callable[[Numbered], Any]) -> None:
    """Through JSON; only the window that was begun is read again."""
    whole = [numbers(step) for step in stream(1, 2)]
    one = stream(1, 2, source(DATA))
    steps = iter(one)
    assert [numbers(next(steps)) for _ in range(taken)] == whole[:taken]
    fresh = source(DATA)
    again = stream(1, 2, fresh)
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [numbers(step) for step in again] == whole[taken:]
    if isinstance(fresh, Counting):
        assert fresh.reads == 200 - taken // 4 * 64


def test_a_step_carries_its_own_state() -> None:
    """Which is what counts where workers have read ahead."""
    whole = [numbers(step) for step in stream()]
    states = [step.state for step in DataLoader(stream(), batch_size=None, collate_fn=_same)]
    again = stream()
    again.load_state_dict(states[6])
    assert [numbers(step) for step in again] == whole[7:]


def _same(step: Any) -> Any:
    return step


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_the_steps_in_their_order(workers: int) -> None:
    """Each reads the stream and makes every second, or third, step of it."""
    whole = [numbers(step) for step in stream()]
    one = BalancedLoader(stream(), num_workers=workers, multiprocessing_context="forkserver")
    steps = iter(one)
    assert [numbers(next(steps)) for _ in range(5)] == whole[:5]
    again = BalancedLoader(stream())
    again.load_state_dict(one.state_dict())
    assert [numbers(step) for step in again] == whole[5:]


def test_speeds_move_work_in_the_middle_of_a_stream() -> None:
    """As measured times are reported."""
    true = [1.0, 0.5]
    data = Numbered(1000)

    def gather(row: list[float]) -> list[list[float]]:
        assert one._last is not None
        return [[row[0], float(w) / v, *row[2:]] for w, v in zip(one._last.work, true, strict=True)]

    one = BalancedLoader(BalancedStream(Counting(data), 64, ranks=2, rank=0), gather=gather)
    shares = []
    for step in one:
        shares.append(float(step.share.work[1] / step.share.work.sum()))
        one.report(0.1)
    assert shares[0] > 0.48 and max(shares[2:-1]) < 0.35


def test_workers_can_not_hear_of_speeds() -> None:
    """They plan ahead in processes of their own."""
    one = BalancedLoader(stream(), num_workers=1, multiprocessing_context="forkserver")
    next(iter(one))
    with pytest.raises(DataError, match="num_workers=0"):
        one.report(0.1)


def test_heavy_parts_are_loaded_for_own_samples_only() -> None:
    """The stream itself holds numbers and lengths."""
    loaded: list[int] = []

    def load(sample: tuple[int, int]) -> list[int]:
        loaded.append(sample[0])
        return [sample[0]] * sample[1]

    def source(first: int) -> list[tuple[int, int]]:
        return [(n, int(DATA.lengths[n])) for n in range(first, 200)]

    one = BalancedStream(source, 16, ranks=2, rank=0, length_of=lambda s: s[1], load=load, cost=SampleCost())
    seen = [n for step in one for n in numbers(step)]
    assert sorted(loaded) == sorted(seen) and len(seen) < 130


def test_the_last_smaller_step_may_be_left_out() -> None:
    """As in torch."""
    assert [len(s) for s in together(lambda r: stream(r, 2, drop_last=True), 2, numbers)] == [16] * 12


def test_a_stream_that_ends_with_a_window_ends() -> None:
    """Without an empty step."""
    data = Numbered(128)
    assert len(list(stream(source=Counting(data)))) == 8


@pytest.mark.parametrize("how", [{}, {"drop_last": True}])
def test_a_stream_without_a_batch_is_an_error(how: dict[str, Any]) -> None:
    """Training for no step is nobody's wish."""
    source = Counting(Numbered(3 if how else 0))
    with pytest.raises(DataError, match="no batch"):
        list(stream(source=source, **how))


def test_a_source_that_can_not_begin_in_the_middle_is_refused_when_that_is_asked() -> None:
    """Not before: a plain list streams well."""
    plain = [DATA[n] for n in range(200)]
    one = stream(source=plain)
    steps = iter(one)
    for _ in range(5):
        next(steps)
    again = stream(source=plain)
    again.load_state_dict(one.state_dict())
    with pytest.raises(DataError, match="can't begin at sample 64"):
        next(iter(again))


def test_a_length_that_is_none_is_an_error() -> None:
    """With what is wrong."""
    with pytest.raises(DataError, match="nan"):
        list(stream(length_of=lambda s: float("nan")))  # type: ignore[arg-type, return-value]


def test_windows_are_whole_batches() -> None:
    """And states are of the same windows."""
    with pytest.raises(DataError, match="whole batches"):
        stream(window=50)
    state = stream().state_dict()
    with pytest.raises(DataError, match="windows of 64"):
        stream(window=128).load_state_dict(state)


def test_it_is_an_iterable_data_set() -> None:
    """For torch's own loader."""
    assert isinstance(stream(), IterableDataset)
    with pytest.raises(TypeError):
        len(BalancedLoader(stream()))

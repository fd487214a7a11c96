"""Steps with their data, states about what was taken, times on their way back, and workers that die."""

from __future__ import annotations

import json
import traceback
from typing import Any

import numpy as np
import pytest

from laminar.data import BalancedLoader, BalancedSampler, BalancedStream, OnlineCost
from laminar.errors import DataError
from tests.support.rank_pool import Ranks
from tests.support.sample_sets import Broken, Counting, Deadly, Numbered, samples_of, together

WORKERS = {"num_workers": 2, "multiprocessing_context": "forkserver"}


def loader(data: Numbered, rank: int = 0, ranks: int = 2, **options: Any) -> BalancedLoader:
    return BalancedLoader(data, BalancedSampler(data.lengths, 32, ranks=ranks, rank=rank, tokens=1024), **options)


def numbers(step: Any) -> list[int]:
    return [n for unit in step.units for n in samples_of(unit)]


@pytest.mark.parametrize("options", [{}, WORKERS], ids=["here", "workers"])
def test_every_sample_is_loaded_once(options: dict[str, Any]) -> None:
    """In its step, packed."""
    data = Numbered()
    steps = together(lambda r: loader(data, r, **options), 2, numbers)
    assert sorted(n for step in steps for n in step) == list(range(200)) and len(steps) == 7
    assert len(loader(data)) == 7


def test_units_are_what_the_share_says() -> None:
    """Micro-batch by micro-batch."""
    for step in loader(Numbered()):
        assert [samples_of(unit) for unit in step.units] == step.share.micro_batches
        assert sum(unit.real_tokens for unit in step.units) == step.share.tokens


def test_a_collate_function_of_ones_own_makes_the_units() -> None:
    """Lists, here."""
    assert isinstance(next(iter(loader(Numbered(), collate=list))).units[0], list)


@pytest.mark.parametrize("taken", [0, 1, 3, 6])
def test_its_state_is_about_what_was_taken(taken: int) -> None:
    """Though workers have loaded ahead."""
    data = Numbered()
    whole = [numbers(step) for step in loader(data)]
    one = loader(data, **WORKERS)
    steps = iter(one)
    assert [numbers(next(steps)) for _ in range(taken)] == whole[:taken]
    again = loader(data)
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [numbers(step) for step in again] == whole[taken:]


def test_a_worker_that_dies_is_told_and_no_sample_is_lost() -> None:
    """No hang; what was not taken comes after a new start."""
    data = Deadly()
    one = loader(data, ranks=1, **WORKERS)
    taken = []
    with pytest.raises(DataError, match="a worker that loads samples died or hangs, after step"):
        for step in one:
            taken += numbers(step)
    again = loader(Numbered(), ranks=1)
    again.load_state_dict(one.state_dict())
    assert sorted(taken + [n for step in again for n in numbers(step)]) == list(range(200))


@pytest.mark.parametrize("options", [{}, WORKERS], ids=["here", "workers"])
def test_an_error_of_the_data_arrives_as_itself(options: dict[str, Any]) -> None:
    """It is the user's own."""
    with pytest.raises(OSError, match="disk on fire") as raised:
        list(loader(Broken(), ranks=1, **options))
    traceback.clear_frames(raised.value.__traceback__)  # which keep torch's workers alive


def test_times_move_work() -> None:
    """This rank's own compute, told to all; here all four are played by one."""
    data = Numbered(2000)
    true = np.asarray([1.0, 1.0, 0.5, 1.0])
    sampler = BalancedSampler(data.lengths, 64, ranks=4, rank=1)
    rows: list[list[float]] = []

    def gather(row: list[float]) -> list[list[float]]:
        assert one._last is not None
        rows[:] = [[row[0], float(w / v), *row[2:]] for w, v in zip(one._last.work, true, strict=True)]
        return rows

    one = BalancedLoader(data, sampler, gather=gather)
    moved, shares = [], []
    for step in one:
        shares.append(step.share.work[2] / step.share.work.sum())
        moved.append(one.report(0.1))
    assert shares[0] > 0.24 and max(shares[2:]) < 0.16
    assert moved[:3] == [False, True, False]


def test_costs_are_learnt_from_reports() -> None:
    """From all ranks' times, and used from the fiftieth step on."""
    data = Numbered(4000)
    sampler = BalancedSampler(data.lengths, 32, ranks=1, rank=0, cost=OnlineCost())
    one = BalancedLoader(data, sampler)
    for step in one:
        one.report(1e-3 * len(step.units) + 1e-6 * step.share.tokens + 1e-8 * step.share.squares)
    assert sampler.planner.cost.per_square == pytest.approx(1e-8, rel=0.05)


def test_ranks_that_plan_differently_are_named() -> None:
    """Other lengths or another seed would lose samples."""
    one = loader(Numbered(), gather=lambda row: [row, [row[0] + 1, *row[1:]]])
    next(iter(one))
    with pytest.raises(DataError, match="ranks 1 planned step 0 otherwise"):
        one.report(0.1)


def test_ranks_that_are_missing_are_told() -> None:
    """A sampler for more ranks than there are."""
    one = loader(Numbered())
    next(iter(one))
    with pytest.raises(DataError, match="1 ranks report times of a step that was planned for 2"):
        one.report(0.1)


def test_a_report_needs_a_step() -> None:
    """To be about."""
    with pytest.raises(DataError, match="no step was taken"):
        loader(Numbered()).report(0.1)


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "batch_sampler", "collate_fn", "drop_last"])
def test_what_the_sampler_says_is_not_said_again(option: str) -> None:
    """Two answers to one question."""
    with pytest.raises(DataError, match=option):
        loader(Numbered(), **{option: 1})


def test_a_data_set_needs_a_sampler_and_a_stream_none() -> None:
    """Each its own."""
    data = Numbered()
    stream = BalancedStream(Counting(data), 32)
    with pytest.raises(DataError, match="takes a data set"):
        BalancedLoader(data)
    with pytest.raises(DataError, match="takes a data set"):
        BalancedLoader(stream, BalancedSampler(data.lengths, 32))


def _trained(seconds: list[float]) -> tuple[list[int], list[float]]:
    """Steps of this rank, which says that it took so long; what it has seen, and its last speeds."""
    import torch.distributed as dist

    data = Numbered(1000)
    one = BalancedLoader(data, BalancedSampler(data.lengths, 64))
    seen = []
    for step in one:
        seen += numbers(step)
        one.report(seconds[dist.get_rank()] * float(step.share.work[dist.get_rank()]))
    assert one.sampler is not None
    return seen, one.sampler.planner.speeds.speeds.tolist()


def test_real_ranks_tell_each_other(two: Ranks) -> None:
    """One at a third of the other's speed ends up with a quarter of the work; none of the samples is lost."""
    (seen, speeds), (others, same) = two.run(_trained, [1.0, 3.0])
    assert sorted(seen + others) == list(range(1000)) and speeds == same
    assert speeds[0] / speeds[1] == pytest.approx(3.0, rel=0.01) and len(seen) > 2.5 * len(others)

"""Every sample once an epoch, in the step that the shuffle gave it, whatever the ranks; resumed at any sample."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from bench.length_cases import drawn
from laminar.data import BalancedSampler, OnlineCost, RankSpeeds, SampleCost
from laminar.errors import DataError
from tests.support.rank_pool import Ranks
from tests.support.sample_sets import Numbered, together

LENGTHS = drawn("ff-web", 1000)
LLAMA = SampleCost(per_token=663883653.0, per_square=8417.0)


def sampler(rank: int, ranks: int, batch: int = 64, **how: Any) -> BalancedSampler:
    return BalancedSampler(LENGTHS, batch, ranks=ranks, rank=rank, cost=LLAMA, **how)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 70])
@pytest.mark.parametrize("how", [{}, {"tokens": 4096}, {"tokens": 4096, "fixed_units": True}])
def test_every_sample_comes_once_an_epoch(ranks: int, how: dict[str, Any]) -> None:
    """On one rank, in the last smaller step too, and with more ranks than samples in a batch."""
    steps = together(lambda r: sampler(r, ranks, **how), ranks)
    assert sorted(s for step in steps for s in step) == list(range(1000))
    assert [len(step) for step in steps] == [64] * 15 + [40]


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_a_step_has_the_samples_that_the_shuffle_gave_it(ranks: int) -> None:
    """However many ranks there are, and however fast."""
    alone = [sorted(step) for step in sampler(0, 1)]
    assert together(lambda r: sampler(r, ranks), ranks) == alone
    assert together(lambda r: sampler(r, ranks, speeds=range(1, ranks + 1)), ranks) == alone
    order = sampler(0, 1).order()
    assert alone[2] == sorted(order[128:192].tolist())


def test_fixed_units_are_the_same_whoever_gets_them() -> None:
    """Micro-batches are packed before anybody looks at ranks."""

    def units(ranks: int) -> list[list[list[int]]]:
        all_ranks = [sampler(r, ranks, tokens=4096, fixed_units=True).shares() for r in range(ranks)]
        return [sorted(u for share in step for u in share.micro_batches) for step in zip(*all_ranks, strict=True)]

    assert units(1) == units(3) == units(8)


def test_micro_batches_keep_to_their_tokens() -> None:
    """Those of one sample apart."""
    for share in sampler(1, 4, tokens=2048).shares():
        for part in share.micro_batches:
            assert LENGTHS[part].sum() <= 2048 or len(part) == 1


def test_a_share_says_what_the_step_is() -> None:
    """For all ranks and for this one."""
    shares = [list(sampler(r, 4).shares())[3] for r in range(4)]
    assert {s.batch_tokens for s in shares} == {sum(s.tokens for s in shares)}
    assert all(s.batch_samples == 64 and s.step == 3 and s.epoch == 0 for s in shares)
    for rank, share in enumerate(shares):
        assert share.work.tolist() == shares[0].work.tolist()
        assert share.work[rank] == pytest.approx(float(LLAMA.of(LENGTHS[share.samples]).sum()))
        assert share.squares == int((LENGTHS[share.samples] ** 2).sum())
    assert shares[0].work.max() / shares[0].work.mean() < 1.05


def test_epochs_are_shuffled_anew() -> None:
    """And the next one follows by itself, or is asked for."""
    one = sampler(0, 2)
    first, second = list(one), list(one)
    assert first != second and one.epoch == 2
    one.set_epoch(0)
    assert list(one) == first
    assert list(sampler(0, 2, seed=1)) != first


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    """As torch's samplers have it."""
    assert next(iter(sampler(0, 1, shuffle=False))) == list(range(64))


def test_a_samples_step_in_one_epoch_says_nothing_about_the_next() -> None:
    """Balancing must not become a curriculum."""
    many = BalancedSampler(drawn("github", 200_000), 512, ranks=8, rank=0, cost=LLAMA)
    steps = []
    for epoch in (0, 1):
        many.set_epoch(epoch)
        step = np.empty(200_000)
        step[many.order()] = np.arange(200_000) // 512
        steps.append(step)
    assert abs(np.corrcoef(*steps)[0, 1]) < 0.01
    assert abs(np.corrcoef(steps[0], many.lengths)[0, 1]) < 0.01


@pytest.mark.parametrize("taken", [0, 1, 7, 15])
def test_it_goes_on_where_it_was(taken: int) -> None:
    """Through JSON, with nothing read again; steps ahead were planned differently, and come out the same."""
    one, all_steps = sampler(1, 3), list(sampler(1, 3))
    steps = iter(one)
    assert [next(steps) for _ in range(taken)] == all_steps[:taken]
    again = sampler(1, 3)
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert len(again) == 16 - taken
    assert list(again) == all_steps[taken:]
    assert len(again) == 16 and list(again) != all_steps


def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    """A state saved after the last step."""
    one = sampler(0, 2)
    shares = one.shares()
    for _ in range(16):
        next(shares)
    state = one.state_dict()
    assert (state["epoch"], state["samples"]) == (1, 0)


@pytest.mark.parametrize(("ranks", "batch"), [(2, 64), (5, 64), (3, 100), (3, 7)])
def test_it_may_go_on_with_other_ranks_and_batches(ranks: int, batch: int) -> None:
    """At any sample: what was done is not done again, and nothing is left out."""
    one = sampler(0, 3)
    steps = iter(one)
    for _ in range(5):
        next(steps)
    done = set(one.order()[: 5 * 64].tolist())

    def resumed(rank: int) -> BalancedSampler:
        found = sampler(rank, ranks, batch)
        found.load_state_dict(one.state_dict())
        return found

    rest = [s for step in together(resumed, ranks) for s in step]
    assert len(rest) == len(set(rest)) and set(rest) | done == set(range(1000)) and not set(rest) & done


def test_a_state_of_other_data_is_refused() -> None:
    """Numbers of samples would mean others."""
    state = sampler(0, 1).state_dict()
    with pytest.raises(DataError, match="1000 samples, for one of 999"):
        BalancedSampler(LENGTHS[:-1], 64).load_state_dict(state)


def test_speeds_that_change_move_work_within_the_epoch() -> None:
    """All ranks see the same times, so all move the same."""
    samplers = [sampler(r, 4, speeds=RankSpeeds(4)) for r in range(4)]
    shares, seen, work = [s.shares() for s in samplers], [], []
    for _ in range(16):
        step = [next(s) for s in shares]
        seen += [n for share in step for n in share.samples]
        work.append(step[0].work)
        for one in samplers:
            one.planner.speeds.observe(step[0].work / np.asarray([1.0, 1.0, 0.5, 1.0]), step[0].work)
    assert sorted(seen) == list(range(1000))
    assert work[0][2] / work[0].sum() > 0.24 and all(w[2] / w.sum() < 0.16 for w in work[2:10])


def test_a_cost_that_learns_is_planned_with_when_it_is_renewed() -> None:
    """And its state goes along."""
    one = BalancedSampler(LENGTHS, 64, ranks=2, rank=0, cost=OnlineCost())
    rows = [[1e-3 + 1e-6 * n + 1e-9 * n * n, 1.0, 1.0, float(n), float(n * n)] for n in (100, 3000)]
    for _ in range(20):
        one.planner.learn(rows, renew=False)
    assert one.planner.cost == SampleCost()
    one.planner.learn(rows, renew=True)
    assert one.planner.cost != SampleCost()
    again = BalancedSampler(LENGTHS, 64, ranks=2, rank=0, cost=OnlineCost())
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert again.planner.cost == one.planner.cost


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_a_batch_sampler_of_torchs_loader(workers: int) -> None:
    """In the place of one, with workers too."""
    data = Numbered()
    found = [
        [sample[0] for sample in batch]
        for rank in range(2)
        for batch in DataLoader(
            data,
            batch_sampler=BalancedSampler(data.lengths, 32, ranks=2, rank=rank),
            collate_fn=list,
            num_workers=workers,
            multiprocessing_context="forkserver" if workers else None,
        )
    ]
    assert sorted(s for batch in found for s in batch) == list(range(200)) and len(found) == 14


def test_its_length_is_the_number_of_steps() -> None:
    """With the last, smaller one, or without."""
    assert len(sampler(0, 2)) == 16 and len(list(sampler(0, 2))) == 16
    short = sampler(0, 2, drop_last=True)
    assert len(short) == 15 and len(list(short)) == 15


def test_a_data_set_shorter_than_a_batch_is_one_step() -> None:
    """Or an error, if smaller steps are to be left out."""
    steps = together(lambda r: BalancedSampler([5, 6, 7], 64, ranks=2, rank=r), 2)
    assert steps == [[0, 1, 2]]
    with pytest.raises(DataError, match="3 samples make no batch of 64"):
        BalancedSampler([5, 6, 7], 64, drop_last=True)
    with pytest.raises(DataError, match="0 samples"):
        BalancedSampler([], 64)


def test_an_empty_rank_has_empty_steps() -> None:
    """As many as the others, or they would wait for it."""
    steps = [list(BalancedSampler([5, 6], 1, ranks=3, rank=r)) for r in range(3)]
    assert [len(s) for s in steps] == [2, 2, 2] and steps[2] == [[], []]
    assert all(not share.micro_batches for share in BalancedSampler([5], 1, ranks=2, rank=1).shares())


def test_samples_without_tokens_are_handed_out_too() -> None:
    """None is lost, in any way of packing."""
    for how in ({}, {"tokens": 8}, {"tokens": 8, "fixed_units": True}):
        steps = together(lambda r, how=how: BalancedSampler([0, 3, 0, 5], 2, ranks=2, rank=r, **how), 2)
        assert sorted(s for step in steps for s in step) == [0, 1, 2, 3]


def test_a_sample_longer_than_any_budget_is_alone_or_refused() -> None:
    """At the door, not in the middle of the epoch."""
    lengths = [10, 5000, 10]
    parts = [u for share in BalancedSampler(lengths, 3, tokens=100).shares() for u in share.micro_batches]
    assert [1] in parts
    with pytest.raises(DataError, match="sample 1 has 5000 tokens"):
        BalancedSampler(lengths, 3, tokens=100, too_long="error")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"ranks": 2, "rank": 2}, "rank 2 of 2"),
        ({"speeds": [1.0, 1.0, 1.0], "ranks": 2, "rank": 0}, "3 speeds for 2"),
        ({"fixed_units": True}, "without tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(how: dict[str, Any], says: str) -> None:
    """Where the sampler is made."""
    with pytest.raises(DataError, match=says):
        BalancedSampler([1, 2], 2, **how)
    with pytest.raises(DataError, match="batches of 0"):
        BalancedSampler([1, 2], 0)
    with pytest.raises(TypeError, match="rnak"):
        BalancedSampler([1, 2], 2, rnak=1)


def test_lengths_with_holes_are_refused() -> None:
    """NaN is not a length."""
    with pytest.raises(DataError, match="sample 1 has a length of nan"):
        BalancedSampler([3.0, float("nan")], 2)


def _mine() -> list[list[int]]:
    assert dist.is_initialized()
    return list(BalancedSampler(LENGTHS, 64))


def test_ranks_are_those_of_torch(two: Ranks) -> None:
    """Unless given."""
    assert two.run(_mine) == [list(BalancedSampler(LENGTHS, 64, ranks=2, rank=r)) for r in range(2)]

"""Speeds of ranks: from devices at first, from their own compute time later, within three steps, with the reason."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from bench.length_cases import drawn
from laminar import Cluster
from laminar.data import RankSpeeds, SampleCost, assign
from laminar.errors import DataError
from laminar.events import Event, listening

LLAMA = SampleCost(per_token=663883653.0, per_square=8417.0)


def over_ideal(true: np.ndarray, found: RankSpeeds, lengths: np.ndarray, noise: float = 0.0, seed: int = 0) -> float:
    """A step planned with what is believed and run at true speeds, over the ideal; what was measured is observed."""
    work = assign(LLAMA.of(lengths), len(true), found.speeds).work
    dice = np.random.default_rng(seed)
    found.observe(work / true * np.exp(noise * dice.standard_normal(len(true))), work)
    return float((work / true).max()) / (float(work.sum()) / float(true.sum()))


@pytest.mark.parametrize("slow", [0.5, 0.25, 0.8])
@pytest.mark.parametrize(("noise", "limit"), [(0.0, 1.01), (0.02, 1.05)])
def test_a_rank_that_slows_down_gets_less_within_three_steps(slow: float, noise: float, limit: float) -> None:
    """Two steps to believe it, and the third is balanced again."""
    found, true = RankSpeeds(8), np.ones(8)
    batches = drawn("ff-web", 20 * 512).reshape(20, 512)
    for step, lengths in enumerate(batches[:10]):
        over_ideal(true, found, lengths, noise, step)
    true[3] = slow
    took = [over_ideal(true, found, lengths, noise, 50 + step) for step, lengths in enumerate(batches[10:])]
    assert took[0] > 1.2 and max(took[2:]) < limit


def test_it_gets_its_work_back_when_it_recovers() -> None:
    """As fast."""
    found, true = RankSpeeds([1.0, 1.0, 0.5, 1.0]), np.ones(4)
    took = [over_ideal(true, found, drawn("ff-web", 256, step)) for step in range(4)]
    assert took[0] > 1.1 and max(took[2:]) < 1.01


def test_a_single_pause_moves_nothing() -> None:
    """One long step of one rank is no reason to move work back and forth."""
    found, work = RankSpeeds(4), np.ones(4)
    for _ in range(5):
        found.observe(np.ones(4), work)
    assert not found.observe([1.0, 9.0, 1.0, 1.0], work)
    assert not found.observe(np.ones(4), work)
    assert found.speeds.tolist() == [1.0] * 4


def test_what_all_ranks_have_in_common_says_nothing() -> None:
    """A cost in another unit, or steps that all become longer."""
    found = RankSpeeds(3)
    for scale in (1.0, 10.0, 1e-6):
        assert not found.observe(np.ones(3) * scale, np.ones(3))
    assert found.speeds.tolist() == [1.0] * 3


def test_small_differences_are_averaged() -> None:
    """Noise of three percent a step leaves about one on the speeds."""
    found, true, dice = RankSpeeds(8), np.asarray([1.0] * 7 + [0.93]), np.random.default_rng(0)
    for _ in range(200):
        found.observe(1 / true * np.exp(0.03 * dice.standard_normal(8)), np.ones(8))
    assert np.abs(found.speeds / (true / true.mean()) - 1).max() < 0.02


def test_ranks_that_are_about_equally_fast_have_one_speed() -> None:
    """What planning is quicker with."""
    found = RankSpeeds([1.0, 1.004, 1.008, 2.0, 2.01])
    assert len(set(found.speeds.tolist())) == 2 and found.speeds.mean() == pytest.approx(1.0)


def test_an_event_says_what_moved_and_why() -> None:
    """For whoever reads the log of a run."""
    heard: list[Event] = []
    found, work = RankSpeeds(4), np.ones(4)
    with listening(heard.append):
        for _ in range(2):
            found.observe([1.0, 1.0, 2.0, 1.0], work)
    (event,) = [e for e in heard if e.kind == "balance"]
    assert event.fields["step"] == 2 and "rank 2 takes" in event.fields["why"]
    assert event.fields["moved"]["2"] < 0.7 and event.fields["moved"]["0"] > 1.1
    assert len(event.fields["speeds"]) == 4


def mixed() -> Any:
    """One node of A100 beside one of H100."""
    return Cluster.preset("4xh100+4xa100")


def test_ranks_of_different_kinds_are_told_apart_from_the_first_step() -> None:
    """By what their datasheets say."""
    cluster = mixed()
    found = RankSpeeds.of_cluster(cluster, dtype="bf16")
    rates = [cluster.on((r,)).device.flops_per_s["bf16"].value for r in range(8)]
    assert found.speeds[0] / found.speeds[7] == pytest.approx(rates[0] / rates[7])
    assert found.speeds[0] > 2 * found.speeds[7]
    plan = assign(LLAMA.of(drawn("ff-web", 512)), 8, found.speeds)
    assert plan.slowest_over_mean < 1.01


def test_two_to_one_gives_two_to_one() -> None:
    """Of samples that are alike."""
    plan = assign(np.ones(300), 2, RankSpeeds([2.0, 1.0]).speeds)
    assert [len(plan.of_rank(r)) for r in range(2)] == [200, 100]


def test_fewer_ranks_than_devices_are_the_first_ones() -> None:
    """As ranks stand on devices."""
    assert RankSpeeds.of_cluster(mixed(), 4, "bf16").speeds.tolist() == [1.0] * 4


@pytest.mark.parametrize(("ranks", "dtype", "says"), [(9, "bf16", "9 ranks"), (0, "bf16", "0 ranks"), (8, "f8", "f8")])
def test_clusters_that_do_not_answer_are_refused(ranks: int, dtype: str, says: str) -> None:
    """Too small, or without such units."""
    with pytest.raises(DataError, match=says):
        RankSpeeds.of_cluster(mixed(), ranks, dtype)


def test_ranks_without_work_or_time_are_left_alone() -> None:
    """An empty rank has no speed of its own."""
    found = RankSpeeds(3)
    for _ in range(3):
        found.observe([1.0, 1.0, 0.0], [1.0, 1.0, 0.0])
        found.observe([1.0, 1.0, float("nan")], [1.0, 1.0, 1.0])
    assert found.speeds.tolist() == [1.0] * 3
    assert not found.observe([1.0, 0.0, 0.0], [1.0, 0.0, 0.0])


@pytest.mark.parametrize("speeds", [[], [1.0, 0.0], [1.0, float("nan")], [-1.0]])
def test_speeds_that_are_none_are_refused(speeds: list[float]) -> None:
    """At the door."""
    with pytest.raises(DataError, match="speeds"):
        RankSpeeds(speeds)


def test_times_of_other_ranks_are_refused() -> None:
    """One for each."""
    with pytest.raises(DataError, match="3 ranks"):
        RankSpeeds(3).observe([1.0], [1.0])


def test_its_state_goes_through_json() -> None:
    """Half of a surprise included."""
    found, again = RankSpeeds(4), RankSpeeds(4)
    found.observe([1.0, 1.0, 2.0, 1.0], np.ones(4))
    again.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert again.observe([1.0, 1.0, 2.0, 1.0], np.ones(4)) and again.speeds[2] < 0.7

"""Jobs that take turns: in one process, with jobs that only count, so that what is measured is known."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laminar.planner.search.finalists import MEASURED_ROUNDS, Measured, fastest, summed_up
from laminar.train.auto import interleaved_timing as module
from laminar.train.auto.interleaved_timing import LEAST_TURNS, WARM, turns


class Fake:
    """A job whose steps take as long as it is told; it moves the clock instead of waiting for it."""

    device = torch.device("cpu")
    now = 0.0
    calls: list[str]

    def __init__(self, name: str, seconds: Callable[[int], float], loss: float = 2.0, fails_at: int = -1) -> None:
        self.name, self.seconds, self.loss, self.fails_at, self.steps = name, seconds, loss, fails_at, 0
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}, {"lr": torch.tensor(0.1)}])
        self.peers = SimpleNamespace(barrier=lambda: None)
        self.closed = False

    def step(self, batch: Any) -> Any:
        if self.steps == self.fails_at:
            raise RuntimeError("no more")
        self.steps += 1
        Fake.now += self.seconds(self.steps)
        if not Fake.calls or Fake.calls[-1] != self.name:
            Fake.calls.append(self.name)
        return SimpleNamespace(loss=self.loss)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    Fake.now, Fake.calls = 0.0, []
    monkeypatch.setattr(module.time, "perf_counter", lambda: Fake.now)


def alone(value: Any) -> list[Any]:
    return [value]


def raced(*jobs: Fake, **options: Any) -> list[Any]:
    return turns([lambda job=job: job for job in jobs], [0], alone, **{"limit_s": 60.0, **options})  # type: ignore[misc]


def uneven(a: float, b: float) -> Callable[[int], float]:
    """Steps that take so long and so long, by turns: no plan of such steps is clearly ahead of another."""
    return lambda step: a if step % 4 < 2 else b


def test_order_rotates_and_rounds_are_as_many_as_asked() -> None:
    """Whoever is first in one round is last in the next, so that no one always runs behind the same other."""
    jobs = [Fake(n, uneven(1.0, 2.0)) for n in "abc"]
    rows = raced(*jobs, limit_s=1e9)
    assert [len(row) for row in rows] == [MEASURED_ROUNDS] * 3
    assert "".join(Fake.calls[3:12]) == "abcbcacab"
    assert all(job.closed for job in jobs)


def test_it_ends_early_where_one_is_clearly_ahead() -> None:
    """Its slowest round is faster than the fastest round of all others; three rounds are the least."""
    rows = raced(Fake("a", lambda step: 1.0), Fake("b", lambda step: 0.5))
    assert rows == [[1.0] * LEAST_TURNS, [0.5] * LEAST_TURNS]
    assert fastest(summed_up(rows)) == 1


def test_no_round_is_begun_after_the_limit() -> None:
    """Rounds count; where time is scarce, warming up counts too, and too few rounds are none."""
    late = [Fake(n, uneven(1.0, 2.0)) for n in "ab"]
    assert [len(row) for row in raced(*late, limit_s=0.5)] == [LEAST_TURNS] * 2
    late = [Fake(n, uneven(1.0, 2.0)) for n in "ab"]
    assert raced(*late, limit_s=10.0, gives_up=True) == [module.NO_RIVAL, module.LATE]
    assert (late[0].steps, late[1].steps) == (WARM, 0)
    soon, Fake.now = [Fake(n, uneven(0.1, 0.2)) for n in "ab"], 0.0
    assert [len(row) for row in raced(*soon, limit_s=10.0, gives_up=True)] == [MEASURED_ROUNDS] * 2
    assert Fake.now < 10
    slow, Fake.now = [Fake(n, uneven(0.45, 0.55)) for n in "ab"], 0.0
    assert LEAST_TURNS <= len(raced(*slow, limit_s=10.0, gives_up=True)[0]) < MEASURED_ROUNDS
    assert 8 < Fake.now <= 10


def test_short_steps_fill_a_turn_and_updates_stand_still() -> None:
    """A step alone is too short to be measured; and training on one batch for seconds would change its numbers."""
    job, other = (Fake(n, lambda step: 0.01) for n in "ab")
    raced(job, other)
    assert job.steps == WARM + MEASURED_ROUNDS * round(module.TURN_S / 0.01)
    assert [float(g["lr"]) for g in job.optimizer.param_groups] == [0.0, 0.0]


@pytest.mark.parametrize("fails_at", [0, WARM + 1])
def test_who_fails_is_out_and_the_others_go_on(fails_at: int) -> None:
    """While warming up or in a round; what it was is told."""
    jobs = [Fake("a", uneven(1.0, 2.0)), Fake("b", uneven(1.0, 2.0), fails_at=fails_at), Fake("c", lambda step: 3.0)]
    rows = raced(*jobs)
    assert rows[1] == "RuntimeError: no more" and jobs[1].closed
    assert len(rows[0]) == len(rows[2]) >= LEAST_TURNS
    assert isinstance(summed_up(rows)[2], Measured) and summed_up(rows)[1] == rows[1]


def test_who_can_not_be_made_is_out() -> None:
    """Also the first: then the others are compared with the next one, and one that is left alone is taken."""

    def broken() -> Fake:
        raise ValueError("nothing\nmore")

    makes: list[Callable[[], Fake]] = [broken, lambda: Fake("b", lambda step: 0.5)]
    rows = turns(makes, [0], alone, limit_s=60.0, gives_up=True)
    assert rows[0] == "ValueError: nothing" and rows[1] == [0.5] * LEAST_TURNS
    assert fastest(summed_up(rows)) == 1
    rows = turns(makes[::-1], [0], alone, limit_s=60.0, gives_up=True)
    assert rows == [module.NO_RIVAL, "ValueError: nothing"]


def test_losses_that_part_take_out_the_minority() -> None:
    """Of two opinions the last one's is right, which is plain data parallel; what is not finite is so everywhere."""
    rows = raced(Fake("a", lambda s: 1.0, loss=2.0), Fake("b", lambda s: 1.1, 2.01), Fake("c", lambda s: 1.2, 2.0005))
    assert [isinstance(row, str) for row in rows] == [False, True, False] and "part from the others'" in rows[1]
    rows = raced(Fake("a", lambda s: 1.0, loss=3.0), Fake("b", lambda s: 1.1))
    assert [isinstance(row, str) for row in rows] == [True, False]
    nan = float("nan")
    assert all(isinstance(row, list) for row in raced(Fake("a", lambda s: 1.0, nan), Fake("b", lambda s: 1.1, nan)))
    rows = raced(Fake("a", lambda s: 1.0, nan), Fake("b", lambda s: 1.1), Fake("c", lambda s: 1.1))
    assert isinstance(rows[0], str)


def test_ranks_hear_of_each_others_failures_and_take_the_longest_turn() -> None:
    """What a rank alone has met is told as its own; a turn is over when the last rank is done."""

    def two(value: Any) -> list[Any]:
        wrong, clock, *said = value
        there = ("RuntimeError: there", clock, *said) if said and said[0] == "" and Fake.calls == ["a"] else None
        slower = (wrong, clock, 2 * said[0]) if said and isinstance(said[0], float) else (wrong, clock, *said)
        return [value, there or slower]

    rows = turns([lambda: Fake("a", lambda step: 1.0), lambda: Fake("b", lambda step: 1.0)], [0], two, limit_s=60.0)
    assert rows[1] == "rank 1: RuntimeError: there" and rows[0] == [2.0] * LEAST_TURNS


def test_what_is_as_good_as_equal_stays_what_was_predicted() -> None:
    """Noise does not change the plan; more than a hundredth does."""
    rows = [Measured(r, r, r, r, 4) for r in (1.0, 0.995, 1.2)]
    assert fastest(rows) == 0
    assert fastest([*rows, Measured(0.98, 0.98, 0.98, 0.98, 4)]) == 3
    assert fastest(["out", *rows[1:]]) == 1

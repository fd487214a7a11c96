"""Jobs of different plans that take turns, so that whatever else the machine does hits all of them.

Every rank makes one job for each plan, of the same weights, and trains a few steps, in which losses must agree. Then
there are rounds: in each of them every job runs for a moment, in an order that rotates. A turn lasts from when all
ranks are ready to when the last one is done. After each, ranks tell each other how it went, and decide alike: by what
was told, and by rank 0's clock. All jobs are in memory at once, which is what this costs: finalists are few.

A job that can't be made, raises, or computes something else than the others is out, on all ranks; it takes nobody
with it. Not covered: ranks that wait in an exchange for one that has failed do so until they lose patience.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from laminar.ir.serial.codec import content_hash
from laminar.planner.search.finalists import MEASURED_ROUNDS

LEAST_TURNS = 3
"""How many rounds there are at least."""
TURN_S = 0.5
"""How long a turn lasts at most, unless a single step takes longer."""
WARM = 3
"""Steps before the clock starts, whose losses are compared."""
AGREE = 1e-3
"""How far losses may part, as a share: sums in other orders."""
LATE, NO_RIVAL = "there was no time for it", "there was nothing to compare it with"

GatherValues = Callable[[Any], list[Any]]
"""Everyone's small value, by rank."""


def turns(
    makes: Sequence[Callable[[], Any]],
    batches: Sequence[Any],
    gather: GatherValues,
    *,
    limit_s: float,
    rounds: int = MEASURED_ROUNDS,
    turn_s: float = TURN_S,
    gives_up: bool = False,
    tick: Callable[[int], None] = lambda number: None,
) -> list[list[float] | str]:
    """Seconds of a step by plan and round; or, of a plan that is out, why. Every rank must call this.

    `makes` make the jobs, which are closed in the end. After `limit_s` of rounds no other is begun. Where this
    `gives_up`, the time it takes to make jobs counts as well: those that there is no time for are out, and all are
    if there are too few rounds, or if there is nothing to compare the first one with. `tick` is told when rounds
    begin, and then how many there were.
    """
    race = _Race(list(batches), gather, limit_s)
    try:
        for k, make in enumerate(makes):
            if gives_up and not race.has_time():
                race.out[k] = LATE
            else:
                race.enter(k, make)
        race.leave_who_part()
        race.limit_s += 0.0 if gives_up else race.passed_s
        alone = len(race.jobs) < 2 and 0 not in race.out
        if not gives_up or (not alone and race.jobs and race.expected_s() <= limit_s):
            race.run(rounds, turn_s, tick)
        if gives_up and race.rounds < LEAST_TURNS:
            race.out |= dict.fromkeys(race.jobs, NO_RIVAL if alone else LATE)
        return [race.out[k] if k in race.out else race.rows[k] for k in range(len(makes))]
    finally:
        for job in reversed(race.jobs.values()):
            job.close()


class _Race:
    """The jobs that are left, and what is known of each."""

    def __init__(self, batches: list[Any], gather: GatherValues, limit_s: float) -> None:
        self.batches, self.gather, self.limit_s = batches, gather, limit_s
        self.began = time.perf_counter()
        self.passed_s = 0.0
        """By rank 0's clock, when ranks last spoke."""
        self.jobs: dict[int, Any] = {}
        self.out: dict[int, str] = {}
        self.step_s: dict[int, float] = {}
        """What a step takes, once it is warm."""
        self.losses: dict[int, list[float]] = {}
        self.rows: dict[int, list[float]] = {}
        self.rounds = 0
        self.started_s = 0.0
        """When rounds began."""
        self._runs: dict[str, int] = {}

    def heard(self, wrong: str, *said: Any) -> tuple[str, list[Any]]:
        """What is wrong at any rank, and what each has said."""
        everyone = self.gather((wrong, time.perf_counter() - self.began, *said))
        self.passed_s = everyone[0][1]
        told = "; ".join(f"rank {r}: {each[0]}" for r, each in enumerate(everyone) if each[0])
        alike = all(each[0] == wrong for each in everyone)
        return wrong if alike else told, [each[2:] for each in everyone]

    def has_time(self) -> bool:
        """Whether one more job can be made and run as often as it takes."""
        if not self.step_s:
            return self.passed_s <= self.limit_s
        made_s = self.passed_s / (1 + len(self.step_s))  # the first counts twice: it captures for all
        return self.expected_s(1) + made_s <= self.limit_s

    def expected_s(self, more: int = 0) -> float:
        """When the least number of rounds will be over, with so many jobs more."""
        each = list(self.step_s.values())
        return self.passed_s + LEAST_TURNS * (sum(each) + more * max(each))

    def enter(self, k: int, make: Callable[[], Any]) -> None:
        """Make a job and warm it up, unless it is one that is here already."""
        job, wrong = _tried(make)
        runs, wrong = _tried(lambda: _runs(job)) if not wrong else ("", wrong)
        wrong, said = self.heard(wrong, runs)
        same = said[0][0]
        if not wrong and same in self._runs:
            wrong = f"it comes to the same program as plan {self._runs[same] + 1}"
        if wrong:
            self.out[k] = wrong
            _closed(job)
            return
        trained, wrong = _tried(lambda: _warmed(job, self.batches))
        wrong, said = self.heard(wrong, trained)
        if wrong:
            self.out[k] = wrong
            _closed(job)
            return
        self._runs[same or f"plan {k}"] = k
        self.jobs[k], self.rows[k] = job, []
        self.losses[k] = said[0][0][0]
        self.step_s[k] = max(each[0][1] for each in said)

    def leave_who_part(self) -> None:
        """Take out jobs whose losses are not those of most others; of two opinions, the last job's is right."""
        if not self.losses:
            return
        friends = {k: [j for j in self.losses if _agree(self.losses[j], self.losses[k])] for k in self.losses}
        right = friends[max(friends, key=lambda k: (len(friends[k]), k))]
        for k in list(self.jobs):
            if k not in right:
                self.leave(k, f"its losses part from the others': {self.losses[k]}, not {self.losses[right[0]]}")

    def leave(self, k: int, why: str) -> None:
        """A job is out."""
        self.out[k] = why
        _closed(self.jobs.pop(k))
        del self.rows[k], self.step_s[k]

    def run(self, rounds: int, turn_s: float, tick: Callable[[int], None]) -> None:
        """Rounds, until there are enough, time is up, or one job is ahead of all others in every one of them."""
        left_s = max(0.0, self.limit_s - self.passed_s)
        turn_s = min(turn_s, left_s / (rounds * max(1, len(self.jobs))))
        calls = {k: max(1, round(turn_s / each)) for k, each in self.step_s.items()}
        for job in self.jobs.values():
            _hold_still(job)
        self.started_s = self.passed_s
        tick(0)
        for r in range(rounds):
            order = list(self.jobs)
            for at in range(len(order)):
                self.turn(order[(at + r) % len(order)], calls)
            if not self.jobs:
                return
            self.rounds = r + 1
            tick(r + 1)
            if self.rounds >= LEAST_TURNS and (self.over() or self.decided()):
                return

    def turn(self, k: int, calls: dict[int, int]) -> None:
        """One job's turn."""
        took, wrong = _took(self.jobs[k], self.batches, calls[k])
        wrong, said = self.heard(wrong, took)
        if wrong:
            self.leave(k, wrong)
        else:
            self.rows[k].append(max(each[0] for each in said))

    def over(self) -> bool:
        """Whether there is no time for another round, if it takes as long as one did so far."""
        return self.passed_s + (self.passed_s - self.started_s) / self.rounds > self.limit_s

    def decided(self) -> bool:
        """Whether the slowest round of the fastest job is faster than the fastest round of any other."""
        best = min(self.rows, key=lambda k: statistics.median(self.rows[k]))
        return all(max(self.rows[best]) < min(row) for k, row in self.rows.items() if k != best)


def _tried(do: Callable[[], Any]) -> tuple[Any, str]:
    """What comes of it, or what went wrong, in one line."""
    try:
        return do(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _closed(job: Any) -> None:
    if job is not None:
        job.close()


def _runs(job: Any) -> str:
    """Equal for jobs that do the same; a job with stages, which has several programs, is taken for one of its kind."""
    program = getattr(job, "program", None)
    if program is None:
        return ""  # and so is torch's own data parallel
    state = {name: str(nd) for name, nd in {**job.plan.inputs, **job.plan.state}.items()}
    return content_hash({"program": program.runs_hash, "state": state})


def _warmed(job: Any, batches: list[Any]) -> tuple[list[float], float]:
    """The losses of a few steps, and what the last of them took."""
    losses, start = [], 0.0
    for i in range(WARM):
        start = time.perf_counter()
        losses.append(float(job.step(batches[i % len(batches)]).loss))
    _wait(job)
    return losses, time.perf_counter() - start


def _agree(a: list[float], b: list[float]) -> bool:
    """Whether losses are the same but for rounding; what is not finite is so in both."""
    return all(
        abs(x - y) <= AGREE * max(abs(y), 1e-12) if math.isfinite(x) and math.isfinite(y) else repr(x) == repr(y)
        for x, y in zip(a, b, strict=True)
    )


def _hold_still(job: Any) -> None:
    """Updates from now on change nothing: thousands of them on a batch or two end in numbers that take longer."""
    for group in getattr(job.optimizer, "param_groups", ()):
        if isinstance(group.get("lr"), Tensor):
            group["lr"].zero_()
        elif "lr" in group:
            group["lr"] = 0.0


def _took(job: Any, batches: list[Any], calls: int) -> tuple[float, str]:
    """Seconds of a step on this rank, from when all ranks are ready; or what went wrong."""
    _wait(job)
    job.peers.barrier()
    start = time.perf_counter()

    def steps() -> None:
        for i in range(calls):
            job.step(batches[i % len(batches)])
        _wait(job)

    _, wrong = _tried(steps)
    return (time.perf_counter() - start) / calls, wrong


def _wait(job: Any) -> None:
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)

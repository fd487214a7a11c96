"""Units of the batch from slow processes to fast ones, while a job in exact mode trains; no bit changes by it.

After each step every process tells how long its own work took, which is not how long the step took: that is the same
for all. How fast each is follows from that (`data/balance/rank_speeds.py`), and from that how many units it should
compute. A process that slows down is believed when two steps say so, and has fewer units from the third on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from laminar.data.balance.rank_speeds import RankSpeeds
from laminar.errors import LaminarError
from laminar.ir.exact import Hosting
from laminar.train.job.exact_job import ExactJob
from laminar.train.loop import Callback

WORTH_MOVING = 0.03
"""By how much of itself the slowest process has to get faster for units to move."""


def unit_counts(units: int, speeds: Sequence[float]) -> list[int]:
    """How many units each process computes so that the slowest is done first; each has at least one."""
    counts = [1] * len(speeds)
    for _ in range(units - len(speeds)):
        counts[min(range(len(speeds)), key=lambda p: ((counts[p] + 1) / speeds[p], p))] += 1
    return counts


def slowest_process(counts: Sequence[float], speeds: Sequence[float]) -> float:
    """How long the slowest process takes, in any unit."""
    return max(n / s for n, s in zip(counts, speeds, strict=True))


class Rebalance(Callback):
    """A callback that keeps the units of an exact job where they are computed fastest."""

    def __init__(self, speeds: RankSpeeds | None = None) -> None:
        """`speeds` as they are known beforehand; equal unless given."""
        self.speeds = speeds

    def begin(self, job: Any) -> None:
        """Host units by what is known."""
        if not isinstance(job, ExactJob):
            raise LaminarError("only units of a job in exact mode can change processes",
                               next="parallelize(..., exact=True), or laminar.data.BalancedSampler")  # fmt: skip
        if job.exact.stages > 1:
            raise LaminarError("units of a job with stages are not moved by speed yet", next="job.rehost(Hosting(...))")
        self.speeds = self.speeds or RankSpeeds(job.world)
        self._host(job)

    def after_step(self, job: ExactJob, result: Any) -> None:
        """Learn from a step, and move units if that helps."""
        if job.world == 1:
            return
        assert self.speeds is not None
        own = torch.zeros(job.world, dtype=torch.float64)
        own[job.rank] = job.engine.own_s
        seconds = job.peers.all_reduce(own.to(job.device)).tolist()
        work = [len(job.hosting.hosted(p)) for p in range(job.world)]
        self.speeds.observe(seconds, work)
        self._host(job)

    def _host(self, job: ExactJob) -> None:
        assert self.speeds is not None
        speeds, within = self.speeds.speeds.tolist(), job.exact.ranks // job.exact.units
        if job.exact.units < job.world:  # processes share units
            return
        counts = unit_counts(job.exact.units, speeds)
        now = [len(job.hosting.hosted(p)) / within for p in range(job.world)]
        if slowest_process(counts, speeds) < slowest_process(now, speeds) * (1 - WORTH_MOVING):
            job.rehost(Hosting.of_counts([n * within for n in counts]))

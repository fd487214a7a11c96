"""How fast each rank is, learnt from the time it computes, not from the time a step takes.

A step takes equally long on all ranks, because they wait for each other. What tells them apart is their own compute:
work done per second. Only ratios count, so what all ranks have in common (a cost in another unit, a longer step)
drops out.

Small differences are averaged over the steps since the last jump. A large one has to be seen twice in a row before it
is believed, so that a single pause moves nothing; then the new speed is that of these two steps, and the third step
is balanced again. Ranks that are about equally fast get one speed, their mean: less noise, and less to plan.

All ranks have to be told the same figures in the same order; `BalancedLoader.report` sees to that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from laminar.data.cost.sample_cost import FloatArray
from laminar.errors import DataError
from laminar.events import emit
from laminar.ir.clusters.cluster import Cluster

JUMP = 0.12
"""A speed that is off by more than this (in logarithms) has changed, if the next step says so too (assumed)."""
AVERAGED_STEPS = 32
"""Over how many steps speeds are averaged at most (assumed)."""
ALIKE = 0.012
"""Ranks within this of each other are taken for equally fast (in logarithms, assumed)."""
TOLD = 0.02
"""A rank's share has to change by this much of itself to be worth an event."""


class RankSpeeds:
    """Speeds of ranks: of their devices at first, as measured later."""

    def __init__(self, speeds: int | Sequence[float] | FloatArray) -> None:
        """`speeds` is a number of equal ranks, or what they are believed to do, in any unit."""
        first = np.ones(speeds) if isinstance(speeds, int) else np.asarray(speeds, dtype=np.float64)
        if first.ndim != 1 or not first.size or not (np.isfinite(first) & (first > 0)).all():
            raise DataError(f"speeds {first.tolist()}", allowed="a finite number above 0 for each rank")
        self._log = np.log(first)
        self._seen = np.ones(len(first))
        self._odd = np.zeros(len(first))
        """By rank, how far off the last step was, if it was too far to be believed at once."""
        self.steps = 0
        self._given = self._grouped()

    @staticmethod
    def of_cluster(cluster: Cluster, ranks: int | None = None, dtype: str = "f32") -> RankSpeeds:
        """Speeds by the devices that ranks run on, rank r on device r: their peaks for a dtype."""
        count = cluster.devices if ranks is None else ranks
        if not 1 <= count <= cluster.devices:
            raise DataError(f"{count} ranks on the {cluster.devices} devices of cluster {cluster.name}")
        devices = [cluster.on((r,)).device for r in range(count)]
        missing = next((d for d in devices if dtype not in d.flops_per_s), None)
        if missing is not None:
            raise DataError(f"{missing.name} has no rate for {dtype}", allowed="  ".join(missing.flops_per_s))
        return RankSpeeds([d.flops_per_s[dtype].value for d in devices])

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self._log)

    @property
    def speeds(self) -> FloatArray:
        """By rank, 1 on average."""
        return self._given

    def observe(self, seconds: ArrayLike, work: ArrayLike) -> bool:
        """Each rank computed so long on so much work; whether shares have moved. No time or no work says nothing."""
        took, done = np.asarray(seconds, dtype=np.float64), np.asarray(work, dtype=np.float64)
        if took.shape != self._log.shape or done.shape != self._log.shape:
            raise DataError(f"{took.size} times and {done.size} amounts of work for {self.ranks} ranks")
        self.steps += 1
        told = np.isfinite(took) & (took > 0) & np.isfinite(done) & (done > 0)
        if told.sum() < 2:
            return False
        off = np.zeros(self.ranks)
        off[told] = np.log(done[told] / took[told]) - self._log[told]
        off[told] -= np.median(off[told])
        large = told & (np.abs(off) > JUMP)
        again = large & (self._odd * off > 0)
        small = told & ~large
        self._seen[small] = np.minimum(self._seen[small] + 1, AVERAGED_STEPS)
        self._log[small] += off[small] / self._seen[small]
        self._log[again] += (off[again] + self._odd[again]) / 2
        self._seen[again] = 2
        self._odd[told] = np.where(large & ~again, off, 0.0)[told]
        before, self._given = self._given, self._grouped()
        return self._tell(before, np.flatnonzero(again).tolist())

    def _grouped(self) -> FloatArray:
        """Speeds with an average of 1, the same for ranks that are about equally fast."""
        order = np.argsort(self._log, kind="stable")
        out: FloatArray = np.empty(self.ranks)
        first = 0
        for k in range(1, self.ranks + 1):
            if k == self.ranks or self._log[order[k]] - self._log[order[first]] > ALIKE:
                out[order[first:k]] = math.exp(float(self._log[order[first:k]].mean()))
                first = k
        out /= out.mean()
        return out

    def _tell(self, before: FloatArray, jumped: list[int]) -> bool:
        """An event with who has more or less work from now on, and why."""
        change = self._given / before
        moved = np.flatnonzero(np.abs(change - 1) > TOLD).tolist()
        if not moved:
            return False
        causes = [f"rank {r} takes {before[r] / self._given[r]:.2f}x as long for its work as before" for r in jumped]
        emit(
            "balance",
            step=self.steps,
            moved={str(r): round(float(change[r]), 4) for r in moved},
            speeds=[round(float(s), 4) for s in self._given],
            why="; ".join(causes) or "speeds measured over more steps",
        )
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"log": self._log.tolist(), "seen": self._seen.tolist(), "odd": self._odd.tolist(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._log, self._seen = np.asarray(state["log"], float), np.asarray(state["seen"], float)
        self._odd, self.steps = np.asarray(state["odd"], float), int(state["steps"])
        self._given = self._grouped()

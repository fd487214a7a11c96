"""Which rank gets which sample of a step, so that the slowest rank is done as early as possible.

A step's samples are given: the global batch as the shuffle made it. Nothing is taken from another step, so the batch
stays what it was; ranks only get different numbers of samples. That is exact if losses are summed over tokens and
divided by the tokens of the global batch (`token_loss`). Longest-first makes the assignment and exchanges improve it:
it is never worse than longest-first alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from laminar.data.balance.exchange import exchanged
from laminar.data.balance.longest_first import longest_first, longest_first_steps, whole_costs
from laminar.data.cost.sample_cost import FloatArray, IntArray
from laminar.errors import DataError


@dataclass(frozen=True)
class Assignment:
    """A rank for each sample (or unit) of a step."""

    rank_of: IntArray
    """By sample, in the order in which the step has them."""
    costs: FloatArray
    speeds: FloatArray
    """Of the ranks, in any unit."""

    @property
    def ranks(self) -> int:
        """How many there are; some may have nothing."""
        return len(self.speeds)

    @property
    def work(self) -> FloatArray:
        """The cost that each rank has."""
        found: FloatArray = np.bincount(self.rank_of, weights=self.costs, minlength=self.ranks).astype(np.float64)
        return found

    @property
    def slowest_over_mean(self) -> float:
        """The slowest rank's time over what all would take if work could be divided at will; 1 is perfect."""
        return slowest_over_mean(self.work, self.speeds)

    def of_rank(self, rank: int) -> list[int]:
        """The samples of a rank, by their place in the step."""
        found: list[int] = np.flatnonzero(self.rank_of == rank).tolist()
        return found

    def micro_batches(self, rank: int, count: int) -> list[list[int]]:
        """A rank's samples in `count` micro-batches of about equal cost; where samples are few, the last are empty."""
        mine = self.of_rank(rank)
        parts = assign(self.costs[mine], count)
        return [[mine[i] for i in parts.of_rank(part)] for part in range(count)]


def slowest_over_mean(work: FloatArray, speeds: FloatArray) -> float:
    """The largest of work / speed, over all work divided by all speed."""
    total = float(work.sum())
    return float((work / speeds).max()) * float(speeds.sum()) / total if total else 1.0


def assign(costs: ArrayLike, ranks: int, speeds: Sequence[float] | FloatArray | None = None) -> Assignment:
    """Samples of these costs to ranks of these speeds (all equal unless given)."""
    given, fast = checked_costs(costs), checked_speeds(ranks, speeds)
    whole = whole_costs(given)
    return Assignment(exchanged(whole, longest_first(whole, fast), fast), given, fast)


def assign_steps(costs: ArrayLike, ranks: int, speeds: Sequence[float] | FloatArray | None = None) -> IntArray:
    """The same for many steps of as many samples each, one a row: the rank of each sample."""
    given, fast = np.asarray(costs, dtype=np.float64), checked_speeds(ranks, speeds)
    if given.ndim != 2:
        raise DataError(f"costs of shape {given.shape}", allowed="a row for each step")
    checked_costs(given.reshape(-1))
    whole = whole_costs(given)
    found = longest_first_steps(whole, fast)
    return np.stack([exchanged(c, r, fast) for c, r in zip(whole, found, strict=True)]) if len(found) else found


def checked_costs(costs: ArrayLike) -> FloatArray:
    """A flat list of finite costs that are not negative."""
    given = np.asarray(costs, dtype=np.float64)
    if given.ndim != 1:
        raise DataError(f"costs of shape {given.shape}", allowed="a flat list of numbers")
    wrong = ~(np.isfinite(given) & (given >= 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise DataError(f"sample {at} costs {given[at]}", allowed="finite numbers, 0 or more")
    return given


def checked_speeds(ranks: int, speeds: Sequence[float] | FloatArray | None) -> FloatArray:
    """A speed above zero for each rank."""
    if ranks < 1:
        raise DataError(f"{ranks} ranks", allowed="one or more")
    fast = np.ones(ranks) if speeds is None else np.asarray(speeds, dtype=np.float64)
    if fast.shape != (ranks,) or not (np.isfinite(fast) & (fast > 0)).all():
        raise DataError(f"speeds {fast.tolist()} for {ranks} ranks", allowed="a finite number above 0 for each")
    return fast

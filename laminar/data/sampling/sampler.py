"""Each rank's samples of every step, for data sets whose samples have numbers and known lengths.

The order of an epoch depends on seed and epoch alone, and a step is the next `batch_size` samples of it, so a step
has the same samples however many ranks there are and whatever their speeds. All ranks work out the whole assignment
for themselves and take their part; nobody talks. Steps are planned many at once while speeds stay what they are.

A sampler is at a sample of an epoch, and that is its whole state: seed, epoch and how many samples are done. Going on
from there with another batch size or another number of ranks trains each remaining sample exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from laminar.data.balance.assign import assign, assign_steps
from laminar.data.cost.sample_cost import FloatArray, IntArray, SampleCost, checked_lengths
from laminar.data.sampling.step_share import Planning, StepPlanner, StepShare
from laminar.errors import DataError

AHEAD = 1 << 16
"""Samples that are planned at once at most: more take memory and are no faster (measured)."""


class BalancedSampler(Sampler[list[int]]):
    """A batch sampler for torch's `DataLoader`: each item is the list of this rank's samples in a step."""

    def __init__(
        self,
        lengths: ArrayLike,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **how: Unpack[Planning],
    ) -> None:
        """`batch_size` is that of the global batch, in samples; see `Planning` for the rest."""
        self.lengths = checked_lengths(lengths)
        self.planner = StepPlanner(how)
        self.batch_size, self.shuffle, self.seed, self.drop_last = batch_size, shuffle, seed, drop_last
        if batch_size < 1:
            raise DataError(f"batches of {batch_size} samples", allowed="one or more")
        if not len(self.lengths) or (drop_last and len(self.lengths) < batch_size):
            raise DataError(
                f"{len(self.lengths)} samples make no batch of {batch_size}",
                next="use smaller batches, or drop_last=False, which makes one smaller step of them",
            )
        tokens, longest = self.planner.tokens, int(self.lengths.argmax())
        if self.planner.too_long == "error" and tokens is not None and self.lengths[longest] > tokens:
            raise DataError(
                f"sample {longest} has {self.lengths[longest]} tokens",
                allowed=f"{tokens} in a micro-batch",
                next="allow larger micro-batches, shorten it, or give it one of its own (too_long='alone')",
            )
        self.epoch = self.done = 0
        self._resumed = False

    # -- what torch asks for -------------------------------------------------------------------

    def __len__(self) -> int:
        """Steps of an epoch, or of what is left of it after `load_state_dict`."""
        left = len(self.lengths) - (self.done if self._resumed else 0)
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's samples, step by step."""
        for share in self.shares():
            yield share.samples

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next; it goes up by itself at the end of one."""
        if epoch != self.epoch:
            self.epoch, self.done, self._resumed = epoch, 0, False

    # -- steps ---------------------------------------------------------------------------------

    def shares(self) -> Iterator[StepShare]:
        """This rank's part of every step, from the beginning of the epoch, or from where a state was loaded."""
        if not self._resumed:
            self.done = 0
        self._resumed = False
        order, total, planner = self.order(), len(self.lengths), self.planner
        planned: list[tuple[IntArray, IntArray | None]] = []
        seen: tuple[FloatArray, SampleCost] | None = None
        window = 1
        while self.done < total and not (self.drop_last and total - self.done < self.batch_size):
            now = (planner.speeds.speeds, planner.cost)
            if seen is None or now[1] is not seen[1] or not np.array_equal(now[0], seen[0]):
                planned, window, seen = [], 1, now
            if not planned:
                planned = self._planned(order, window)[::-1]
                window = min(2 * window, max(AHEAD // self.batch_size, 1))
            batch, found = planned.pop()
            step = self.done // self.batch_size
            share = planner.share(self.epoch, step, batch, self.lengths[batch], found)
            self.done += len(batch)
            yield share
        self.epoch, self.done = self.epoch + 1, 0

    def order(self) -> IntArray:
        """The samples of this epoch, in the order of training; the same for all ranks."""
        count = len(self.lengths)
        if not self.shuffle:
            return np.arange(count)
        return np.random.Generator(np.random.Philox(key=[self.seed, self.epoch])).permutation(count)

    def _planned(self, order: IntArray, window: int) -> list[tuple[IntArray, IntArray | None]]:
        """The samples of the next steps and their ranks; units that are packed first get theirs later."""
        size, planner = self.batch_size, self.planner
        steps = min(window, (len(order) - self.done) // size)
        if not steps:
            batches = [order[self.done :]]
        else:
            batches = list(order[self.done : self.done + steps * size].reshape(steps, size))
        if planner.fixed_units:
            return [(batch, None) for batch in batches]
        speeds = planner.speeds.speeds
        if len(batches) == 1:
            return [(batches[0], assign(planner.cost.of(self.lengths[batches[0]]), planner.ranks, speeds).rank_of)]
        costs = planner.cost.of(self.lengths[np.stack(batches)])
        return list(zip(batches, assign_steps(costs, planner.ranks, speeds), strict=True))

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler is, with what it has learnt; plain values."""
        return self.state_at(self.epoch, self.done)

    def state_at(self, epoch: int, done: int) -> dict[str, Any]:
        """The same for another place, such as that of a loader which has asked for more steps than it handed out."""
        total = len(self.lengths)
        if done >= total or (self.drop_last and total - done < self.batch_size):
            epoch, done = epoch + 1, 0
        place = {"epoch": epoch, "samples": done, "seed": self.seed, "shuffle": self.shuffle, "total": total}
        return {**place, "learnt": self.planner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the next iteration begins with the first sample that was not done."""
        total, done = int(state["total"]), int(state["samples"])
        if total != len(self.lengths) or not 0 <= done < total:
            raise DataError(
                f"a state at sample {done} of a data set of {total} samples, for one of {len(self.lengths)}",
                next="resume with the data that the state was saved with",
            )
        self.seed, self.shuffle = int(state["seed"]), bool(state["shuffle"])
        self.epoch, self.done, self._resumed = int(state["epoch"]), done, True
        self.planner.load_state_dict(state["learnt"])

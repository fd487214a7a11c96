"""Balanced steps of data that comes as a stream: nobody knows all lengths, not even how many samples there are.

A window of samples is read, shuffled, cut into global batches, assigned and handed out; then the next window. Memory
is that of a window. Every rank reads the whole stream and keeps its own samples of each step, so all see the same
lengths and nobody has to talk; let samples be cheap to read (a path, an offset) and `load` what is heavy, which is
called for this rank's own samples only.

A state says where the current window begins and how much of it is done. Resuming reads the stream from there: at most
a window again, never the data before it. The source must be able to begin somewhere: a function from the number of
the first sample to an iterator, or an iterable with `state_dict` and `load_state_dict`.

The shuffle reaches no further than a window, so steps of a sample in two epochs are as alike as windows are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Unpack

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from laminar.data.cost.sample_cost import IntArray, checked_lengths
from laminar.data.packing.packed import pack
from laminar.data.sampling.step_share import Collate, LoadedStep, Planning, StepPlanner, StepShare, collated
from laminar.errors import DataError

SampleSource = Callable[[int], Iterable[Any]] | Iterable[Any]
"""From the number of the first sample to an iterator, or an iterable."""


class BalancedStream(IterableDataset[LoadedStep]):
    """This rank's steps of a stream, for `DataLoader(stream, batch_size=None)` or `BalancedLoader(stream)`."""

    def __init__(
        self,
        source: SampleSource,
        batch_size: int,
        *,
        window: int = 0,
        length_of: Callable[[Any], int] = len,
        load: Callable[[Any], Any] | None = None,
        collate: Collate = pack,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **how: Unpack[Planning],
    ) -> None:
        """`window` is how many samples are shuffled together, 16 batches unless given; see `Planning` for the rest."""
        super().__init__()
        self.source, self.batch_size, self.window = source, batch_size, window or 16 * batch_size
        if batch_size < 1 or self.window % batch_size:
            raise DataError(
                f"windows of {window} samples, batches of {batch_size}", allowed="whole batches, one or more"
            )
        self.length_of, self.load, self.collate = length_of, load, collate
        self.planner = StepPlanner(how)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._at = self._place(0, 0, 0, None)
        self._resumed = False

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next; it goes up by itself at the end of one."""
        if epoch != self.epoch:
            self.epoch, self._resumed = epoch, False
            self._at = self._place(0, 0, 0, None)

    def __iter__(self) -> Iterator[LoadedStep]:
        """This rank's part of every step; with workers, those steps that are this worker's."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        begin = self._at if self._resumed else self._place(0, 0, 0, None)
        self._resumed = False
        before, done, number = int(begin["before"]), int(begin["done"]), int(begin["step"])
        samples, first, epoch = self._opened(before, begin["source"]), number, self.epoch
        while True:
            source = self._source_state()
            window = list(islice(samples, self.window))
            if not window or (self.drop_last and len(window) - done < self.batch_size):
                break
            lengths = checked_lengths([self.length_of(sample) for sample in window])
            order = self._order(before, len(window))
            while done < len(window):
                batch = order[done : done + self.batch_size]
                if self.drop_last and len(batch) < self.batch_size:
                    break
                done += len(batch)
                if (number - first) % workers == worker:
                    share = self.planner.share(epoch, number, batch, lengths[batch])
                    over = done == len(window)
                    self._at = (
                        self._place(before + done, 0, number + 1, self._source_state())
                        if over
                        else self._place(before, done, number + 1, source)
                    )
                    yield LoadedStep(share, self._loaded(window, share), self.state_dict())
                number += 1
            before, done = before + len(window), 0
            if len(window) < self.window:
                break
        if not number:
            raise DataError("the stream has no batch", next="look at its source, or use drop_last=False")
        self.epoch, self._at = epoch + 1, self._place(0, 0, 0, None)

    def _loaded(self, window: list[Any], share: StepShare) -> list[Any]:
        load = self.load

        def sample(number: int) -> Any:
            return window[number] if load is None else load(window[number])

        return collated(sample, share.micro_batches, self.collate)

    def _order(self, before: int, count: int) -> IntArray:
        if not self.shuffle:
            return np.arange(count)
        mixed = np.random.SeedSequence([self.seed, self.epoch, before])
        return np.random.Generator(np.random.Philox(mixed)).permutation(count)

    # -- where in the source -------------------------------------------------------------------

    def _opened(self, before: int, state: Any) -> Iterator[Any]:
        """The source from where a window begins."""
        if callable(self.source):
            return iter(self.source(before))
        if state is not None:
            self.source.load_state_dict(state)  # type: ignore[attr-defined]
        elif before:
            raise DataError(
                f"a source that can't begin at sample {before}",
                next="give a function from a sample's number to an iterator, or an iterable with state_dict()",
            )
        return iter(self.source)

    def _source_state(self) -> Any:
        """Where an iterable says it is; of a function the number of samples is enough."""
        if callable(self.source) or not hasattr(self.source, "state_dict"):
            return None
        return self.source.state_dict()

    @staticmethod
    def _place(before: int, done: int, step: int, source: Any) -> dict[str, Any]:
        return {"before": before, "done": done, "step": step, "source": source}

    def state_dict(self) -> dict[str, Any]:
        """Where to go on after the step handed out last; with workers, a step's own `state` says it."""
        place = {"epoch": self.epoch, "seed": self.seed, "shuffle": self.shuffle, "window": self.window}
        return {**self._at, **place, "learnt": self.planner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there at the next iteration."""
        if int(state["window"]) != self.window:
            raise DataError(f"a state of windows of {state['window']} samples", allowed=f"{self.window}, as here")
        self.seed, self.shuffle, self.epoch = int(state["seed"]), bool(state["shuffle"]), int(state["epoch"])
        self._at = {key: state[key] for key in ("before", "done", "step", "source")}
        self._resumed = True
        self.planner.load_state_dict(state["learnt"])

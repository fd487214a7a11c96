"""Steps with their data, loaded by torch's own workers, and the measured times on their way back.

A step is one item of a `DataLoader`: a worker reads all of this rank's samples in it and puts each micro-batch
together. So every rank's loader asks for steps in the same rhythm, and all plan with the same measurements.

`report(seconds)` after a step tells all ranks how long each has computed (not waited); speeds and costs are learnt
from that. It also compares what ranks believe the step was: if they disagree (other lengths, another seed), it says
who.

`state_dict()` is about the last step that was handed out, however many are loaded ahead. A worker that dies is an
error that says so; no sample is lost, because the state is still at the last step that was taken.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from laminar.data.packing.packed import pack
from laminar.data.sampling.sampler import BalancedSampler
from laminar.data.sampling.step_share import Collate, LoadedStep, StepShare, collated
from laminar.data.sampling.stream import BalancedStream
from laminar.errors import DataError

GatherFromRanks = Callable[[list[float]], Sequence[Sequence[float]]]
"""A row of numbers to the rows of all ranks, in their order."""
REFRESH = 50
"""Steps after which a cost that learns is used for planning: every change throws away what was planned ahead."""


class BalancedLoader:
    """Iterates over `LoadedStep`s of a data set (with a sampler) or of a `BalancedStream`."""

    def __init__(
        self,
        data: Dataset[Any] | BalancedStream,
        sampler: BalancedSampler | None = None,
        *,
        collate: Collate = pack,
        gather: GatherFromRanks | None = None,
        **options: Any,
    ) -> None:
        """`options` go to torch's `DataLoader` (num_workers, prefetch_factor, multiprocessing_context, timeout...).

        `gather` says how ranks hear of each other's times; by torch.distributed, unless given.
        """
        refused = {"batch_size", "batch_sampler", "sampler", "shuffle", "drop_last", "collate_fn"} & set(options)
        if refused:
            raise DataError(f"{', '.join(sorted(refused))} for a BalancedLoader", next="the sampler says all of that")
        if isinstance(data, BalancedStream) == (sampler is not None):
            raise DataError("a BalancedLoader takes a data set with a sampler, or a BalancedStream without one")
        self.data, self.sampler = data, sampler
        self._source: BalancedSampler | BalancedStream = data if isinstance(data, BalancedStream) else sampler  # type: ignore[assignment]
        self._workers = int(options.get("num_workers", 0))
        self._gather = gathered_by_torch if gather is None else gather
        self._last: StepShare | None = None
        self._state: dict[str, Any] | None = None
        self._reports = 0
        if sampler is None:
            self._torch: DataLoader[Any] = DataLoader(data, batch_size=None, collate_fn=_as_it_is, **options)
        else:
            if isinstance(data, IterableDataset):
                raise DataError("an iterable data set has no numbers to sample", next="wrap it in a BalancedStream")
            wrapped = _Steps(data, collate)
            self._torch = DataLoader(
                wrapped, batch_size=None, sampler=_Shares(sampler), collate_fn=_as_it_is, **options
            )

    def __len__(self) -> int:
        """Steps of the epoch; a stream does not know."""
        if self.sampler is None:
            raise TypeError("a stream has no length")
        return len(self.sampler)

    def __iter__(self) -> Iterator[LoadedStep]:
        """This rank's part of every step."""
        steps, lost = iter(self._torch), ""
        while True:
            try:
                step: LoadedStep = next(steps)
            except StopIteration:
                return
            except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
                if not self._workers or not _of_a_dead_worker(error):
                    raise
                lost = str(error).splitlines()[0] if str(error) else "its memory is gone"
            if lost:  # raised out here, so that no traceback keeps the other workers alive
                del steps
                after = "before the first step" if self._last is None else f"after step {self._last.step}"
                raise DataError(
                    f"a worker that loads samples died or hangs, {after}",
                    why=lost,
                    next="nothing is lost: make a loader anew and give it this one's state_dict()",
                )
            self._last = step.share
            self._state = step.state
            yield step

    def report(self, seconds: float) -> bool:
        """All ranks: this one computed for so long in the step taken last. Whether shares have moved."""
        if self._last is None:
            raise DataError("no step was taken yet", next="report after each step")
        share = self._last
        if self.sampler is None and self._workers:
            raise DataError("a stream that workers read is planned by them, ahead", next="use num_workers=0")
        told = zlib.crc32(np.asarray([share.epoch, share.step, share.batch_samples, *share.work], float).tobytes())
        parts = (len(share.micro_batches), len(share.samples), share.tokens, share.squares)
        row = [float(told), seconds, *map(float, parts)]
        rows = self._gather(row)
        if len(rows) != len(share.work):
            raise DataError(
                f"{len(rows)} ranks report times of a step that was planned for {len(share.work)}",
                next="make the sampler with the ranks that train, and call report on all of them",
            )
        other = [r for r, found in enumerate(rows) if found[0] != rows[0][0]]
        if other:
            raise DataError(
                f"ranks {', '.join(map(str, other))} planned step {share.step} otherwise than rank 0",
                next="give all ranks the same lengths, batch size, seed, cost and speeds; resume all from one state",
            )
        self._reports += 1
        planner = self._source.planner
        planner.learn([found[1:] for found in rows], self._reports % REFRESH == 0)
        return planner.speeds.observe([found[1] for found in rows], share.work)

    def state_dict(self) -> dict[str, Any]:
        """Where to go on after the step taken last."""
        if self._state is None:
            return self._source.state_dict()
        if self.sampler is None:
            return {**self._state, "learnt": self._source.planner.state_dict()}
        return self.sampler.state_at(self._state["epoch"], self._state["samples"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there at the next iteration."""
        self._last = self._state = None
        self._source.load_state_dict(state)


def _of_a_dead_worker(error: Exception) -> bool:
    """Whether torch has missed a worker, or could not fetch what one had made; what the data raised says `Caught`."""
    if isinstance(error, RuntimeError):
        return str(error).startswith(("DataLoader worker", "DataLoader timed out"))
    return not str(error).startswith("Caught ")


class _Shares:
    """What to load next, with where to go on after it."""

    def __init__(self, sampler: BalancedSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[StepShare, int]]:
        for share in self.sampler.shares():
            yield share, self.sampler.done


class _Steps(Dataset[Any]):
    """A data set of steps: indexed by a share, it loads it."""

    def __init__(self, samples: Any, collate: Collate) -> None:
        self.samples, self.collate = samples, collate

    def __getitem__(self, index: tuple[StepShare, int]) -> LoadedStep:
        share, done = index
        units = collated(self.samples.__getitem__, share.micro_batches, self.collate)
        return LoadedStep(share, units, {"epoch": share.epoch, "samples": done})


def _as_it_is(step: Any) -> Any:
    return step


def gathered_by_torch(row: list[float]) -> Sequence[Sequence[float]]:
    """A row of every rank, by torch.distributed; this one's alone if there are no others."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [row]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor(row, dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [list(map(float, each.tolist())) for each in rows]

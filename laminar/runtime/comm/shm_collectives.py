"""Exchanges of ranks of one machine through an arena: memory in which each writes and the others read.

Gradient buckets lie in the arena, so an all-reduce of one sends nothing: each rank sums one part over
everybody's regions, then takes the other parts' sums from those who made them. Everything else goes through a
ring: a rank copies in what others need, they take it from there, straight to where it belongs. Terms are
added in order of rank. All copying is done by the rank that needs the result, when it needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laminar.capture.torch_private import foreach_copy
from laminar.ir.clusters import limits
from laminar.ir.clusters.limits import aligned_bytes
from laminar.ir.sbp import chunk
from laminar.runtime.comm.boxing_ops import LocalBoxing
from laminar.runtime.comm.p2p_collectives import carve, windows
from laminar.runtime.comm.shm_arena import DONE, HALFWAY, READY, Segment, ShmArena

REDUCE: dict[str, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduce_into(terms: Sequence[Tensor], op: str, out: Tensor) -> Tensor:
    """The sum, maximum or minimum of terms, in their order, in `out`, which none but the first may be."""
    REDUCE[op](terms[0], terms[1], out=out)
    for term in terms[2:]:
        REDUCE[op](out, term, out=out)
    return out


def bucket_bytes(numel: int, ranks: int, dtype: torch.dtype) -> int:
    """How much of a region a reduction in two halves takes: the terms, and the sum of this rank's part."""
    return aligned_bytes(numel * dtype.itemsize) + aligned_bytes(chunk(numel, ranks, 0)[1] * dtype.itemsize)


class _Halves:
    """The two halves of an all-reduce, over a segment of `bucket_bytes`."""

    def __init__(self, segment: Segment, numel: int, dtype: torch.dtype, op: str) -> None:
        self.segment, self.op, at = segment, op, segment.arena.at
        ranks = range(segment.arena.ranks)
        spans = [chunk(numel, len(ranks), r) for r in ranks]
        above = aligned_bytes(numel * dtype.itemsize) // dtype.itemsize
        all_ = [segment.of(r, dtype) for r in ranks]
        self.flat = all_[at][:numel]
        self.terms = [x.narrow(0, *spans[at]) for x in all_]
        self.sums = [x[above : above + n] for x, (_, n) in zip(all_, spans, strict=True)]
        self.spans, self.at = spans, at

    def run(self, out: Tensor) -> None:
        """Sum this rank's part, take the others' sums; `out` may be this rank's own terms."""
        self.segment.wait(READY)
        if self.terms[0].numel():
            reduce_into(self.terms, self.op, self.sums[self.at])
        self.segment.post(HALFWAY)
        self.segment.wait(HALFWAY)
        foreach_copy([out.narrow(0, *span) for span in self.spans], self.sums)


class ShmBucketAllReduce:
    """All-reduce of a bucket that lies in the arena, in place."""

    def __init__(self, segment: Segment, views: list[Tensor], fill: Sequence[int], numel: int, op: str) -> None:
        self.segment, self.views = segment, views
        self.fill = [views[i] for i in fill]
        self.halves = _Halves(segment, numel, views[0].dtype, op)

    def start(self, *x: Tensor) -> None:
        # Nobody reads this rank's terms any more: all have passed the middle of the last time.
        if self.fill:
            foreach_copy(self.fill, list(x))
        self.segment.number += 1
        self.segment.post(READY)

    def finish(self, _: None) -> list[Tensor]:
        self.halves.run(self.halves.flat)
        return self.views


@dataclass
class PendingExchange:
    """An exchange through a ring, under way until somebody completes it."""

    exchange: Any
    segment: Segment
    made: Any
    done: bool = False

    def complete(self) -> Any:
        """The result."""
        if not self.done:
            self.exchange.arrive(self)
            self.segment.post(DONE)
            self.done, self.segment.user = True, None
        return self.made


class _Transient:
    """What exchanges through rings share: a segment of `nbytes` each time."""

    nbytes: int

    def __init__(self, arena: ShmArena, dtype: torch.dtype) -> None:
        self.arena, self.dtype, self.at = arena, dtype, arena.at

    def begin(self, made: Any) -> PendingExchange:
        """A pending with a segment of its own."""
        segment = self.arena.take(self.nbytes)
        segment.user = PendingExchange(self, segment, made)
        return segment.user  # type: ignore[no-any-return]

    def finish(self, pending: PendingExchange) -> Any:
        """The result."""
        return pending.complete()


class ShmAllReduce(_Transient):
    """All-reduce of one tensor."""

    def __init__(self, arena: ShmArena, shape: tuple[int, ...], dtype: torch.dtype, op: str, copy: bool) -> None:
        super().__init__(arena, dtype)
        self.shape, self.numel, self.op, self.copy = shape, torch.Size(shape).numel(), op, copy
        self.halved = self.is_halved(self.numel * dtype.itemsize, arena.ranks)
        self.nbytes = self.need(self.numel, arena.ranks, dtype)

    @staticmethod
    def is_halved(nbytes: int, ranks: int) -> bool:
        """Few ranks, or few bytes: everybody sums everything."""
        return ranks > 2 and nbytes > limits.SMALL_RING_BYTES

    @staticmethod
    def need(numel: int, ranks: int, dtype: torch.dtype) -> int:
        """Bytes of the segment."""
        nbytes = numel * dtype.itemsize
        return bucket_bytes(numel, ranks, dtype) if ShmAllReduce.is_halved(nbytes, ranks) else nbytes

    def start(self, *x: Tensor) -> PendingExchange:
        (given,) = x
        out = torch.empty(self.shape, dtype=self.dtype) if self.copy else given.contiguous()
        pending = self.begin(out)
        pending.segment.of(self.at, self.dtype)[: self.numel].view(self.shape).copy_(given)
        pending.segment.post(READY)
        return pending

    def arrive(self, pending: PendingExchange) -> None:
        out = pending.made.view(-1)
        if self.halved:
            _Halves(pending.segment, self.numel, self.dtype, self.op).run(out)
            return
        pending.segment.wait(READY)
        reduce_into([pending.segment.of(r, self.dtype)[: self.numel] for r in range(self.arena.ranks)], self.op, out)


class ShmAllGather(_Transient):
    """Everybody's pieces of several tensors, copied from their regions to where they belong."""

    def __init__(self, arena: ShmArena, boxes: list[LocalBoxing], dtype: torch.dtype, slot: Tensor | None) -> None:
        super().__init__(arena, dtype)
        self.boxes = boxes
        self.sizes = [[torch.Size(b.sources[r]).numel() for b in boxes] for r in range(arena.ranks)]
        self.nbytes = self.need(boxes, dtype)
        self.fixed = None if slot is None else self._placed(carve(slot, [b.dst for b in boxes], dtype))

    @staticmethod
    def need(boxes: list[LocalBoxing], dtype: torch.dtype) -> int:
        """Bytes of the segment."""
        ranks = range(len(boxes[0].ranks))
        return max(sum(torch.Size(b.sources[r]).numel() for b in boxes) for r in ranks) * dtype.itemsize

    def _placed(self, wholes: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The tensors, and for each rank the views that are its pieces."""
        views = [
            windows(x, *b.give, [s[b.give[0]] // b.give[1] for s in b.sources])
            for x, b in zip(wholes, self.boxes, strict=True)
        ]
        return wholes, [[v[r] for v in views] for r in range(self.arena.ranks)]

    def _pieces(self, segment: Segment, rank: int, like: list[Tensor]) -> list[Tensor]:
        n = self.sizes[rank]
        parts = segment.of(rank, self.dtype)[: sum(n)].split(n)
        return [p.view(v.shape) for p, v in zip(parts, like, strict=True)]

    def start(self, *given: Tensor) -> PendingExchange:
        placed = self.fixed or self._placed([torch.empty(b.dst, dtype=self.dtype) for b in self.boxes])
        pending = self.begin(placed)
        own = placed[1][self.at]
        local = [x.reshape(v.shape) for x, v in zip(given, own, strict=True)]
        foreach_copy(self._pieces(pending.segment, self.at, own), local)
        pending.segment.post(READY)
        foreach_copy(own, local)
        return pending

    def arrive(self, pending: PendingExchange) -> None:
        wholes, views = pending.made
        pending.segment.wait(READY)
        for r in self.arena.others:
            foreach_copy(views[r], self._pieces(pending.segment, r, views[r]))
        pending.made = wholes if len(wholes) > 1 else wholes[0]


class ShmReduceScatter(_Transient):
    """Reduce-scatter of several tensors: everybody's terms of this rank's pieces, read from their regions."""

    def __init__(self, arena: ShmArena, boxes: list[LocalBoxing], dtype: torch.dtype, leaves: bool) -> None:
        """`leaves`: results leave the step, so that they may lie where the last step's lay."""
        super().__init__(arena, dtype)
        self.boxes, self.op = boxes, boxes[0].op
        self.nbytes = self.need(boxes, dtype)
        self.lengths = [
            [chunk(b.src[b.take[0]] // b.take[1], arena.ranks, r)[1] for r in range(arena.ranks)] for b in boxes
        ]
        whole = [torch.Size(b.src).numel() for b in boxes]
        dims = [b.src[b.take[0]] // b.take[1] for b in boxes]
        self.sizes = [
            n // d * each[r] for r in range(arena.ranks) for n, d, each in zip(whole, dims, self.lengths, strict=True)
        ]
        self.outs = [torch.empty(b.dst, dtype=dtype) for b in boxes] if leaves else None

    @staticmethod
    def need(boxes: list[LocalBoxing], dtype: torch.dtype) -> int:
        """Bytes of the segment."""
        return sum(torch.Size(b.src).numel() for b in boxes) * dtype.itemsize

    def start(self, *given: Tensor) -> PendingExchange:
        pending = self.begin(self.outs or [torch.empty(b.dst, dtype=self.dtype) for b in self.boxes])
        views = [windows(x, *b.take, n) for x, b, n in zip(given, self.boxes, self.lengths, strict=True)]
        ordered = [v[r] for r in range(self.arena.ranks) for v in views]
        rows = pending.segment.of(self.at, self.dtype)[: sum(self.sizes)].split(self.sizes)
        foreach_copy([row.view(v.shape) for row, v in zip(rows, ordered, strict=True)], ordered)
        pending.segment.post(READY)
        return pending

    def arrive(self, pending: PendingExchange) -> None:
        pending.segment.wait(READY)
        n, total = len(self.boxes), sum(self.sizes)
        mine = [
            pending.segment.of(r, self.dtype)[:total].split(self.sizes)[self.at * n : (self.at + 1) * n]
            for r in range(self.arena.ranks)
        ]
        for i, out in enumerate(pending.made):
            if out.numel():
                reduce_into([terms[i] for terms in mine], self.op, out.view(-1))
        pending.made = pending.made if n > 1 else pending.made[0]

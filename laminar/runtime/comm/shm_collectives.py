"""Exchanges of ranks of one machine through a yard: memory in which each writes and the others read.

Gradient buckets lie in the yard, so an all-reduce of one sends nothing: each rank sums one part over
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
from laminar.ir import limits
from laminar.ir.limits import aligned_bytes
from laminar.ir.sbp import chunk
from laminar.runtime.comm.boxing_ops import Box
from laminar.runtime.comm.p2p_collectives import carve, windows
from laminar.runtime.comm.shm_arena import DONE, MIDDLE, READY, Area, Yard

REDUCE: dict[str, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduced(terms: Sequence[Tensor], op: str, out: Tensor) -> Tensor:
    """The sum, maximum or minimum of terms, in their order, in `out`, which none but the first may be."""
    REDUCE[op](terms[0], terms[1], out=out)
    for term in terms[2:]:
        REDUCE[op](out, term, out=out)
    return out


def bucket_bytes(numel: int, ranks: int, dtype: torch.dtype) -> int:
    """How much of a region a reduction in two halves takes: the terms, and the sum of this rank's part."""
    return aligned_bytes(numel * dtype.itemsize) + aligned_bytes(chunk(numel, ranks, 0)[1] * dtype.itemsize)


class _Halves:
    """The two halves of an all-reduce, over an area of `bucket_bytes`."""

    def __init__(self, area: Area, numel: int, dtype: torch.dtype, op: str) -> None:
        self.area, self.op, at = area, op, area.yard.at
        ranks = range(area.yard.ranks)
        spans = [chunk(numel, len(ranks), r) for r in ranks]
        above = aligned_bytes(numel * dtype.itemsize) // dtype.itemsize
        all_ = [area.of(r, dtype) for r in ranks]
        self.flat = all_[at][:numel]
        self.terms = [x.narrow(0, *spans[at]) for x in all_]
        self.sums = [x[above : above + n] for x, (_, n) in zip(all_, spans, strict=True)]
        self.spans, self.at = spans, at

    def run(self, out: Tensor) -> None:
        """Sum this rank's part, take the others' sums; `out` may be this rank's own terms."""
        self.area.wait(READY)
        if self.terms[0].numel():
            reduced(self.terms, self.op, self.sums[self.at])
        self.area.post(MIDDLE)
        self.area.wait(MIDDLE)
        foreach_copy([out.narrow(0, *span) for span in self.spans], self.sums)


class BucketReduce:
    """All-reduce of a bucket that lies in the yard, in place."""

    def __init__(self, area: Area, views: list[Tensor], fill: Sequence[int], numel: int, op: str) -> None:
        self.area, self.views = area, views
        self.fill = [views[i] for i in fill]
        self.halves = _Halves(area, numel, views[0].dtype, op)

    def start(self, *x: Tensor) -> None:
        # Nobody reads this rank's terms any more: all have passed the middle of the last time.
        if self.fill:
            foreach_copy(self.fill, list(x))
        self.area.number += 1
        self.area.post(READY)

    def finish(self, _: None) -> list[Tensor]:
        self.halves.run(self.halves.flat)
        return self.views


@dataclass
class Flight:
    """An exchange through a ring, under way until somebody completes it."""

    exchange: Any
    area: Area
    made: Any
    done: bool = False

    def complete(self) -> Any:
        """The result."""
        if not self.done:
            self.exchange.arrive(self)
            self.area.post(DONE)
            self.done, self.area.user = True, None
        return self.made


class _Transient:
    """What exchanges through rings share: an area of `nbytes` each time."""

    nbytes: int

    def __init__(self, yard: Yard, dtype: torch.dtype) -> None:
        self.yard, self.dtype, self.at = yard, dtype, yard.at

    def begin(self, made: Any) -> Flight:
        """A flight with an area of its own."""
        area = self.yard.take(self.nbytes)
        area.user = Flight(self, area, made)
        return area.user  # type: ignore[no-any-return]

    def finish(self, flight: Flight) -> Any:
        """The result."""
        return flight.complete()


class Reduce(_Transient):
    """All-reduce of one tensor."""

    def __init__(self, yard: Yard, shape: tuple[int, ...], dtype: torch.dtype, op: str, copy: bool) -> None:
        super().__init__(yard, dtype)
        self.shape, self.numel, self.op, self.copy = shape, torch.Size(shape).numel(), op, copy
        self.halved = self.is_halved(self.numel * dtype.itemsize, yard.ranks)
        self.nbytes = self.need(self.numel, yard.ranks, dtype)

    @staticmethod
    def is_halved(nbytes: int, ranks: int) -> bool:
        """Few ranks, or few bytes: everybody sums everything."""
        return ranks > 2 and nbytes > limits.SMALL_RING_BYTES

    @staticmethod
    def need(numel: int, ranks: int, dtype: torch.dtype) -> int:
        """Bytes of the area."""
        nbytes = numel * dtype.itemsize
        return bucket_bytes(numel, ranks, dtype) if Reduce.is_halved(nbytes, ranks) else nbytes

    def start(self, *x: Tensor) -> Flight:
        (given,) = x
        out = torch.empty(self.shape, dtype=self.dtype) if self.copy else given.contiguous()
        flight = self.begin(out)
        flight.area.of(self.at, self.dtype)[: self.numel].view(self.shape).copy_(given)
        flight.area.post(READY)
        return flight

    def arrive(self, flight: Flight) -> None:
        out = flight.made.view(-1)
        if self.halved:
            _Halves(flight.area, self.numel, self.dtype, self.op).run(out)
            return
        flight.area.wait(READY)
        reduced([flight.area.of(r, self.dtype)[: self.numel] for r in range(self.yard.ranks)], self.op, out)


class Gather(_Transient):
    """Everybody's pieces of several tensors, copied from their regions to where they belong."""

    def __init__(self, yard: Yard, boxes: list[Box], dtype: torch.dtype, slot: Tensor | None) -> None:
        super().__init__(yard, dtype)
        self.boxes = boxes
        self.sizes = [[torch.Size(b.sources[r]).numel() for b in boxes] for r in range(yard.ranks)]
        self.nbytes = self.need(boxes, dtype)
        self.fixed = None if slot is None else self._placed(carve(slot, [b.dst for b in boxes], dtype))

    @staticmethod
    def need(boxes: list[Box], dtype: torch.dtype) -> int:
        """Bytes of the area."""
        ranks = range(len(boxes[0].ranks))
        return max(sum(torch.Size(b.sources[r]).numel() for b in boxes) for r in ranks) * dtype.itemsize

    def _placed(self, wholes: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The tensors, and for each rank the views that are its pieces."""
        views = [
            windows(x, *b.give, [s[b.give[0]] // b.give[1] for s in b.sources])
            for x, b in zip(wholes, self.boxes, strict=True)
        ]
        return wholes, [[v[r] for v in views] for r in range(self.yard.ranks)]

    def _pieces(self, area: Area, rank: int, like: list[Tensor]) -> list[Tensor]:
        n = self.sizes[rank]
        parts = area.of(rank, self.dtype)[: sum(n)].split(n)
        return [p.view(v.shape) for p, v in zip(parts, like, strict=True)]

    def start(self, *given: Tensor) -> Flight:
        placed = self.fixed or self._placed([torch.empty(b.dst, dtype=self.dtype) for b in self.boxes])
        flight = self.begin(placed)
        own = placed[1][self.at]
        local = [x.reshape(v.shape) for x, v in zip(given, own, strict=True)]
        foreach_copy(self._pieces(flight.area, self.at, own), local)
        flight.area.post(READY)
        foreach_copy(own, local)
        return flight

    def arrive(self, flight: Flight) -> None:
        wholes, views = flight.made
        flight.area.wait(READY)
        for r in self.yard.others:
            foreach_copy(views[r], self._pieces(flight.area, r, views[r]))
        flight.made = wholes if len(wholes) > 1 else wholes[0]


class Scatter(_Transient):
    """Reduce-scatter of several tensors: everybody's terms of this rank's pieces, read from their regions."""

    def __init__(self, yard: Yard, boxes: list[Box], dtype: torch.dtype, leaves: bool) -> None:
        """`leaves`: results leave the step, so that they may lie where the last step's lay."""
        super().__init__(yard, dtype)
        self.boxes, self.op = boxes, boxes[0].op
        self.nbytes = self.need(boxes, dtype)
        self.lengths = [
            [chunk(b.src[b.take[0]] // b.take[1], yard.ranks, r)[1] for r in range(yard.ranks)] for b in boxes
        ]
        whole = [torch.Size(b.src).numel() for b in boxes]
        dims = [b.src[b.take[0]] // b.take[1] for b in boxes]
        self.sizes = [n // d * each[r] for r in range(yard.ranks)
                      for n, d, each in zip(whole, dims, self.lengths, strict=True)]  # fmt: skip
        self.outs = [torch.empty(b.dst, dtype=dtype) for b in boxes] if leaves else None

    @staticmethod
    def need(boxes: list[Box], dtype: torch.dtype) -> int:
        """Bytes of the area."""
        return sum(torch.Size(b.src).numel() for b in boxes) * dtype.itemsize

    def start(self, *given: Tensor) -> Flight:
        flight = self.begin(self.outs or [torch.empty(b.dst, dtype=self.dtype) for b in self.boxes])
        views = [windows(x, *b.take, n) for x, b, n in zip(given, self.boxes, self.lengths, strict=True)]
        ordered = [v[r] for r in range(self.yard.ranks) for v in views]
        rows = flight.area.of(self.at, self.dtype)[: sum(self.sizes)].split(self.sizes)
        foreach_copy([row.view(v.shape) for row, v in zip(rows, ordered, strict=True)], ordered)
        flight.area.post(READY)
        return flight

    def arrive(self, flight: Flight) -> None:
        flight.area.wait(READY)
        n, total = len(self.boxes), sum(self.sizes)
        mine = [flight.area.of(r, self.dtype)[:total].split(self.sizes)[self.at * n : (self.at + 1) * n]
                for r in range(self.yard.ranks)]  # fmt: skip
        for i, out in enumerate(flight.made):
            if out.numel():
                reduced([terms[i] for terms in mine], self.op, out.view(-1))
        flight.made = flight.made if n > 1 else flight.made[0]

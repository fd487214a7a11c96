"""Ranks of one machine exchange tensors through memory they share, instead of through sockets.

A *yard* is the memory of one program and one group of ranks: every rank has a region of its own, writes
there, and reads the others'. Gradient buckets lie in it, so that the products that make gradients write
where others will read. An all-reduce of a bucket: each rank sums one part over everybody's regions, then
takes the other parts' sums from those who made them. Everything else goes through two rings of areas, one
for small tensors: a rank copies in what others need, they take it from there.

Ranks tell each other how far they are with counters in their regions: `ready` (others may read), `middle`
(I have read your terms; my sum is there), `done` (I have read everything). Every rank runs the same
program, so all of them start, finish and recycle areas in the same order, and nobody waits for something
that itself waits for him. Who waits looks a few times, then sleeps until woken (a futex: yielding or
napping instead is slow where others want the processor too). A rank that has died, or a wait beyond the time
limit, is an error.

Only where it is known to work: Linux on x86-64 (others may see stores in another order), all ranks of a group
in one PID namespace of one machine. Otherwise there is no yard, and everybody agrees on that. Regions are
anonymous files (memfd): they need no room in /dev/shm and vanish with the processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from laminar.capture.private import foreach_copy
from laminar.errors import PeerError
from laminar.ir.sbp import chunk
from laminar.runtime.boxes import Box
from laminar.runtime.direct import carve, windows

ALIGN = 64
SMALL_BYTES = 1 << 16
"""Exchanges below this size use the ring of small areas."""
RINGS = {"small": 16, "large": 2}
READY, MIDDLE, DONE = range(3)
SPINS = 100
"""How often to look before sleeping: about as long as falling asleep and being woken takes."""
NAP_S = 0.2
"""How long to sleep before seeing whether the others are still there."""
SYS_FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1
"""Of Linux on x86-64."""
REDUCE: dict[str, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def aligned(nbytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass
class Wants:
    """What a program needs of a yard: buckets by name, and how large the areas of the rings must be."""

    buckets: dict[str, int] = field(default_factory=dict)
    rings: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RINGS, 0))

    def transient(self, nbytes: int) -> None:
        """An exchange that goes through a ring."""
        ring = "small" if nbytes <= SMALL_BYTES else "large"
        self.rings[ring] = max(self.rings[ring], aligned(nbytes))


class Yard:
    """The shared memory of one program and one group. Made by all ranks of the group together; see `Yard.open`."""

    def __init__(self, regions: list[Tensor], at: int, wants: Wants, watch: list[int], timeout_s: float) -> None:
        self.regions, self.at, self.ranks, self.timeout_s = regions, at, len(regions), timeout_s
        self.others = [(at + k) % self.ranks for k in range(1, self.ranks)]
        self._poll = select.poll()
        for fd in watch:
            self._poll.register(fd, select.POLLIN)
        places, _ = layout(wants)
        self.buckets = {name: Area(self, *places[name]) for name in wants.buckets}
        self.rings = {
            ring: [Area(self, *places[f"{ring} {k}"]) for k in range(RINGS[ring])]
            for ring in RINGS
            if wants.rings[ring]
        }
        self._turn = dict.fromkeys(RINGS, 0)
        flags = max(column for column, _, _ in places.values()) + 3
        self._flags = [r[: flags * 4].view(torch.int32).numpy() for r in regions]
        self._places = [r.data_ptr() for r in regions]

    @staticmethod
    def open(group: Any, ranks: Sequence[int], at: int, wants: Wants, timeout_s: float) -> Yard | None:
        """A yard, or None on every rank if one of them can't have it."""
        _, nbytes = layout(wants)
        mine, note = _region(nbytes)
        notes: list[Any] = [None] * len(ranks)
        dist.all_gather_object(notes, note, group)
        regions, watch = _others(notes, mine, at, nbytes) if mine is not None and all(notes) else ([], [])
        fine: list[Any] = [None] * len(ranks)
        dist.all_gather_object(fine, bool(regions), group)
        if note is not None:
            os.close(note["fd"])
        return Yard(regions, at, wants, watch, timeout_s) if all(fine) else None

    def post(self, column: int, value: int) -> None:
        """Tell the others."""
        self._flags[self.at][column] = value
        _futex(self._places[self.at] + 4 * column, FUTEX_WAKE, self.ranks, None)

    def wait(self, column: int, value: int) -> None:
        """Until all others have told."""
        for r in self.others:
            flags = self._flags[r]
            for _ in range(SPINS):
                if flags[column] >= value:
                    break
            else:
                self._sleep(r, column, value)

    def _sleep(self, rank: int, column: int, value: int) -> None:
        since = time.monotonic()
        while (now := int(self._flags[rank][column])) < value:
            _futex(self._places[rank] + 4 * column, FUTEX_WAIT, now, _NAP)
            if self._poll.poll(0) and self._flags[rank][column] < value:
                raise PeerError("a rank of this machine has died while others wait for it", next="read its log")
            if time.monotonic() - since > self.timeout_s:
                raise PeerError(f"waited {self.timeout_s:.0f} s for part {rank} of a group of {self.ranks}",
                                   next="see what that rank is doing")  # fmt: skip

    def take(self, nbytes: int) -> Area:
        """The next area of the ring, once what went on there has come to its end."""
        ring = "small" if nbytes <= SMALL_BYTES else "large"
        areas = self.rings[ring]
        self._turn[ring] = (self._turn[ring] + 1) % len(areas)
        area = areas[self._turn[ring]]
        if area.user is not None:
            area.user.complete()
        self.wait(area.column + DONE, area.number)
        area.number += 1
        return area


_libc: Any = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_: ClassVar = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_NAP = ctypes.byref(_Timespec(0, int(NAP_S * 1e9)))


def _futex(address: int, what: int, value: int, timeout: Any) -> None:
    """Sleep while the counter at an address has a value, or wake those who do."""
    _libc.syscall(SYS_FUTEX, ctypes.c_void_p(address), what, value, timeout, None, 0)


def layout(wants: Wants) -> tuple[dict[str, tuple[int, int, int]], int]:
    """First counter, offset and size of everything, and the size of a region; its last bytes are a token."""
    names = {n: aligned(b) for n, b in wants.buckets.items()}
    names |= {f"{ring} {k}": wants.rings[ring] for ring, n in RINGS.items() for k in range(n) if wants.rings[ring]}
    places, at = {}, aligned(4 * 3 * len(names))
    for k, (name, nbytes) in enumerate(names.items()):
        places[name] = (3 * k, at, nbytes)
        at += nbytes
    return places, at + ALIGN


@dataclass
class Area:
    """A stretch of every rank's region, used by one exchange at a time."""

    yard: Yard
    column: int
    offset: int
    nbytes: int
    number: int = 0
    """How often it has been used."""
    user: Any = None

    def of(self, rank: int, dtype: torch.dtype) -> Tensor:
        """One rank's stretch."""
        return self.yard.regions[rank][self.offset : self.offset + self.nbytes].view(dtype)

    def post(self, what: int) -> None:
        """Tell how far this rank is with the present use."""
        self.yard.post(self.column + what, self.number)

    def wait(self, what: int) -> None:
        """Until the others are as far."""
        self.yard.wait(self.column + what, self.number)


def _region(nbytes: int) -> tuple[Tensor | None, dict[str, Any] | None]:
    """A region of this rank's own, and what others need to find it; nothing where that is not possible."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None, None
    try:
        fd = os.memfd_create("laminar", os.MFD_CLOEXEC)
    except OSError:
        return None, None
    try:
        os.posix_fallocate(fd, 0, nbytes)  # now, as an error: later it would be a signal
        token = secrets.token_bytes(8)
        region = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        region[-8:] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        os.close(fd)
        return None, None
    return region, {"fd": fd, "pid": os.getpid(), "token": token, "machine": machine}


_watched: dict[int, int] = {}
"""Handles of the processes this one shares memory with, for as long as it lives."""


def _others(notes: list[Any], mine: Tensor, at: int, nbytes: int) -> tuple[list[Tensor], list[int]]:
    """Everybody's regions as this rank sees them, and handles that tell when one of them dies."""
    regions, watch = [], []
    try:
        for r, note in enumerate(notes):
            if note["machine"] != notes[at]["machine"]:
                return [], []
            if r == at:
                regions.append(mine)
                continue
            fd = os.open(f"/proc/{note['pid']}/fd/{note['fd']}", os.O_RDWR)
            region = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
            os.close(fd)
            if bytes(region[-8:].tolist()) != note["token"]:
                return [], []
            regions.append(region)
            if note["pid"] not in _watched:
                _watched[note["pid"]] = os.pidfd_open(note["pid"])
            watch.append(_watched[note["pid"]])
    except OSError:
        return [], []
    return regions, watch


# --- exchanges ---------------------------------------------------------------------------------


def reduced(terms: Sequence[Tensor], op: str, out: Tensor) -> Tensor:
    """The sum, maximum or minimum of terms, in their order, in `out`, which none but the first may be."""
    REDUCE[op](terms[0], terms[1], out=out)
    for term in terms[2:]:
        REDUCE[op](out, term, out=out)
    return out


def bucket_bytes(numel: int, ranks: int, dtype: torch.dtype) -> int:
    """How much of a region a reduction in two halves takes: the terms, and the sum of this rank's part."""
    return aligned(numel * dtype.itemsize) + aligned(chunk(numel, ranks, 0)[1] * dtype.itemsize)


class _Halves:
    """The two halves of an all-reduce, over an area of `bucket_bytes`."""

    def __init__(self, area: Area, numel: int, dtype: torch.dtype, op: str) -> None:
        self.area, self.op, at = area, op, area.yard.at
        ranks = range(area.yard.ranks)
        spans = [chunk(numel, len(ranks), r) for r in ranks]
        above = aligned(numel * dtype.itemsize) // dtype.itemsize
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
        return ranks > 2 and nbytes > SMALL_BYTES

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

"""An arena: memory that the ranks of one machine share, and how they tell each other how far they are.

It belongs to one program and one group of ranks: every rank has a region of its own, writes there, and
reads the others'. In a region lie buckets, which stay, and two rings of segments that exchanges use in turn, one
ring for small tensors. `shm_collectives.py` has the exchanges.

Ranks tell each other how far they are with counters in their regions: `ready` (others may read), `middle`
(I have read your terms; my sum is there), `done` (I have read everything). Every rank runs the same
program, so all of them start, finish and recycle segments in the same order, and nobody waits for something
that itself waits for him. Who waits looks a few times, then sleeps until woken (a futex; yielding first and
then napping gave longer steps on a busy machine, in one comparison). A rank that has died, or a wait beyond the time
limit, is an error.

Only where it is known to work: Linux on x86-64 (others may see stores in another order), all ranks of a group
in one PID namespace of one machine. Otherwise there is no arena, and everybody agrees on that. Regions are
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

from laminar.errors import PeerError
from laminar.ir.clusters import limits
from laminar.ir.clusters.limits import ALIGN, RINGS, aligned_bytes

READY, HALFWAY, DONE = range(3)
SPINS = 100
"""How often to look before sleeping. Assumed, not measured."""
NAP_S = 0.2
"""How long to sleep before seeing whether the others are still there."""
SYS_FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1
"""Of Linux on x86-64."""


@dataclass
class ArenaNeeds:
    """What a program needs of an arena: buckets by name, and how large the segments of the rings must be."""

    buckets: dict[str, int] = field(default_factory=dict)
    rings: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RINGS, 0))

    def transient(self, nbytes: int) -> None:
        """An exchange that goes through a ring."""
        ring = "small" if nbytes <= limits.SMALL_RING_BYTES else "large"
        self.rings[ring] = max(self.rings[ring], aligned_bytes(max(nbytes, 1)))


class ShmArena:
    """The shared memory of one program and one group. Made by all ranks of the group together; see `ShmArena.open`."""

    def __init__(self, regions: list[Tensor], at: int, wants: ArenaNeeds, watch: list[int], timeout_s: float) -> None:
        self.regions, self.at, self.ranks, self.timeout_s = regions, at, len(regions), timeout_s
        self.others = [(at + k) % self.ranks for k in range(1, self.ranks)]
        self._poll = select.poll()
        for fd in watch:
            self._poll.register(fd, select.POLLIN)
        places, _ = arena_layout(wants)
        self.buckets = {name: Segment(self, *places[name]) for name in wants.buckets}
        self.rings = {
            ring: [Segment(self, *places[f"{ring} {k}"]) for k in range(RINGS[ring])]
            for ring in RINGS
            if wants.rings[ring]
        }
        self._turn = dict.fromkeys(RINGS, 0)
        flags = max(column for column, _, _ in places.values()) + 3
        self._flags = [r[: flags * 4].view(torch.int32).numpy() for r in regions]
        self._places = [r.data_ptr() for r in regions]

    @staticmethod
    def open(group: Any, ranks: Sequence[int], at: int, wants: ArenaNeeds, timeout_s: float) -> ShmArena | None:
        """An arena, or None on every rank if one of them can't have it."""
        _, nbytes = arena_layout(wants)
        mine, note = _region(nbytes)
        notes: list[Any] = [None] * len(ranks)
        dist.all_gather_object(notes, note, group)
        regions, watch = _others(notes, mine, at, nbytes) if mine is not None and all(notes) else ([], [])
        fine: list[Any] = [None] * len(ranks)
        dist.all_gather_object(fine, bool(regions), group)
        if note is not None:
            os.close(note["fd"])
        return ShmArena(regions, at, wants, watch, timeout_s) if all(fine) else None

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
                raise PeerError(
                    f"waited {self.timeout_s:.0f} s for part {rank} of a group of {self.ranks}",
                    next="see what that rank is doing",
                )

    def take(self, nbytes: int) -> Segment:
        """The next segment of the ring, once what went on there has come to its end."""
        ring = "small" if nbytes <= limits.SMALL_RING_BYTES else "large"
        segments = self.rings[ring]
        self._turn[ring] = (self._turn[ring] + 1) % len(segments)
        segment = segments[self._turn[ring]]
        if segment.user is not None:
            segment.user.complete()
        self.wait(segment.column + DONE, segment.number)
        segment.number += 1
        return segment


_libc: Any = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_: ClassVar = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_NAP = ctypes.byref(_Timespec(0, int(NAP_S * 1e9)))


def _futex(address: int, what: int, value: int, timeout: Any) -> None:
    """Sleep while the counter at an address has a value, or wake those who do."""
    _libc.syscall(SYS_FUTEX, ctypes.c_void_p(address), what, value, timeout, None, 0)


def arena_layout(wants: ArenaNeeds) -> tuple[dict[str, tuple[int, int, int]], int]:
    """First counter, offset and size of everything, and the size of a region; its last bytes are a token."""
    names = {n: aligned_bytes(b) for n, b in wants.buckets.items()}
    names |= {f"{ring} {k}": wants.rings[ring] for ring, n in RINGS.items() for k in range(n) if wants.rings[ring]}
    places, at = {}, aligned_bytes(4 * 3 * len(names))
    for k, (name, nbytes) in enumerate(names.items()):
        places[name] = (3 * k, at, nbytes)
        at += nbytes
    return places, at + ALIGN


@dataclass
class Segment:
    """A stretch of every rank's region, used by one exchange at a time."""

    arena: ShmArena
    column: int
    offset: int
    nbytes: int
    number: int = 0
    """How often it has been used."""
    user: Any = None

    def of(self, rank: int, dtype: torch.dtype) -> Tensor:
        """One rank's stretch."""
        return self.arena.regions[rank][self.offset : self.offset + self.nbytes].view(dtype)

    def post(self, what: int) -> None:
        """Tell how far this rank is with the present use."""
        self.arena.post(self.column + what, self.number)

    def wait(self, what: int) -> None:
        """Until the others are as far."""
        self.arena.wait(self.column + what, self.number)


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

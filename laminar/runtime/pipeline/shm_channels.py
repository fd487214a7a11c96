"""Rings: registers in memory that two ranks of one machine share.

A rank has one region for everything it is sent, made by itself (as in `runtime/comm/shm_arena.py`: an anonymous file
that vanishes with the processes), in which every route and sender has its registers side by side. Who sends opens the
reader's region and copies into it. That a register is full, or free again, goes over the connection between the two
ranks: the wait for anything to happen is one wait, for connections, whatever the data travels through.

Whether a pair of ranks can share is found out once, by trying; those that can't use c10d.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laminar.ir.clusters.limits import ALIGN, aligned_bytes
from laminar.runtime.comm import shm_arena
from laminar.runtime.pipeline.channels import QueueRoute

RingKey = tuple[int, int, int]
"""A wire's number, who sends and who reads."""


def slot_bytes(wire: QueueRoute) -> int:
    """Of one register in a ring."""
    return aligned_bytes(wire.route.max_bytes)


def ring_layout(wires: list[QueueRoute], rank: int) -> tuple[dict[RingKey, tuple[int, int]], int]:
    """Where in a rank's region everything lies that it is sent: offset and size, and the size of it all."""
    at, out = 0, dict[RingKey, tuple[int, int]]()
    for wire in wires:
        nbytes = wire.queue.registers * slot_bytes(wire)
        for src, dst in wire.route.pairs:
            if dst == rank and src != rank:
                out[wire.number, src, dst] = at, nbytes
                at += nbytes
    return out, at + ALIGN  # the last bytes are a token


def share_rings(wires: list[QueueRoute], group: Any, wanted: bool = True) -> tuple[dict[RingKey, Tensor], set[RingKey]]:
    """Rings of this rank, as sender or reader, and the keys of all ranks' rings. All ranks of `group` call this."""
    me, size = dist.get_rank(group), dist.get_world_size(group)
    mine, total = ring_layout(wires, me)
    region, note = shm_arena._region(total) if wanted and mine else (None, None)
    notes: list[Any] = [None] * size
    dist.all_gather_object(notes, (me, note, _here()), group)
    by_rank = {rank: (other, here) for rank, other, here in notes}
    out: dict[RingKey, Tensor] = {}
    for dst in sorted({d for w in wires for s, d in w.route.pairs if s == me and d != me}):
        theirs = _open(by_rank[dst][0], ring_layout(wires, dst)[1]) if wanted and by_rank[dst][1] == _here() else None
        if theirs is not None:
            out |= {k: theirs[a : a + n] for k, (a, n) in ring_layout(wires, dst)[0].items() if k[1] == me}
    opened: list[Any] = [None] * size
    dist.all_gather_object(opened, list(out), group)  # and nobody closes before all have opened
    if note is not None:
        os.close(note["fd"])
    agreed: set[RingKey] = {k for keys in opened for k in keys}
    if region is not None:
        out |= {k: region[a : a + n] for k, (a, n) in mine.items() if k in agreed}
    return out, agreed


def _here() -> tuple[str, int]:
    """What is the same for ranks that can reach each other's memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return "", os.getpid()


def _open(note: dict[str, Any] | None, nbytes: int) -> Tensor | None:
    """Another rank's region; nothing if that is not possible."""
    if note is None:
        return None
    try:
        fd = os.open(f"/proc/{note['pid']}/fd/{note['fd']}", os.O_RDWR)
        region = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        os.close(fd)
    except (OSError, ValueError):
        return None
    return region if bytes(region[-8:].tolist()) == note["token"] else None

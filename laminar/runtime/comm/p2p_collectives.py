"""Gathers and reduce-scatters without detours, for process groups whose own make several: Gloo's.

Gloo's all-gather goes through a buffer of its own, and merging tensors into one collective costs a
copy before and one after; each buffer is fresh memory that the system has to clear. Here a rank sends
its pieces to each other rank from where they lie and receives theirs where they belong. Pieces that
are small, or strided, travel together through one buffer.

Buffers are made once. A gathered tensor lies in a *slot*, memory that another takes over once its
last reader has run: which may share is known from the program, because ranks run it in order.
Terms of a reduce-scatter arrive in one of two scratch buffers; whoever needs one that is still in use
first completes the reduction that uses it, which also bounds how many gradients are held whole.

Not covered: all-reduce (Gloo's own is as fast), all-to-all of activations, NCCL (which needs none of this).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laminar.capture.torch_private import foreach_copy
from laminar.ir.clusters import limits
from laminar.ir.clusters.limits import ALIGN
from laminar.ir.program import Program
from laminar.ir.sbp import chunk
from laminar.runtime.comm.aliases import result_may_alias
from laminar.runtime.comm.boxing_ops import LocalBoxing
from laminar.runtime.comm.process_group import ProcessGroup


def windows(x: Tensor, dim: int, blocks: int, lengths: Sequence[int]) -> list[Tensor]:
    """Views of what each rank holds of dim `dim`, seen as (blocks, rest) where there is more than one block."""
    seen = x if blocks == 1 else x.unflatten(dim, (blocks, x.shape[dim] // blocks))
    at, out = 0, []
    for n in lengths:
        out.append(seen.narrow(dim + (blocks > 1), at, n))
        at += n
    return out


class PackedPieces:
    """Which tensors of an exchange travel on their own, and where the others lie in a buffer."""

    def __init__(self, shapes: Sequence[Sequence[tuple[int, ...]]], plain: Sequence[bool], item_bytes: int) -> None:
        """`shapes[i][r]` is tensor i's piece of rank r; `plain[i]` says that its pieces are contiguous."""
        sizes = [[torch.Size(s).numel() for s in each] for each in shapes]
        self.alone = [i for i, n in enumerate(sizes) if plain[i] and max(n) * item_bytes >= limits.DIRECT_BYTES]
        self.packed = [i for i in range(len(sizes)) if i not in self.alone]
        ranks = range(len(shapes[0]))
        self.rows = [[sizes[i][r] for i in self.packed] for r in ranks]
        """For each rank, how many elements of each packed tensor."""
        self.totals = [sum(row) for row in self.rows]
        self.shapes = shapes

    def split(self, row: Tensor, rank: int) -> list[Tensor]:
        """The packed tensors' pieces of one rank, as views of its row."""
        parts = row.split(self.rows[rank]) if self.packed else ()
        return [p.view(self.shapes[i][rank]) for p, i in zip(parts, self.packed, strict=True)]


class TaggedMessages:
    """Sends and receives among the ranks of a box, with tags by which messages of different exchanges keep apart."""

    def __init__(self, group: ProcessGroup, box: LocalBoxing, tag: int, world: Sequence[int]) -> None:
        """`world`: which rank of the world stands at each rank of the mesh."""
        self.group, self.at, self.tag = group, box.at, tag
        self.peers = [group.peer(world[r]) for r in box.ranks]
        self.others = [(box.at + k) % len(box.ranks) for k in range(1, len(box.ranks))]

    def recv(self, x: Tensor, part: int, number: int, works: list[Any]) -> None:
        """Start to receive from whoever holds a part; nothing where there is nothing to come."""
        if x.numel():
            works.append(self.group.recv(x, self.peers[part], self.tag + number))

    def send(self, x: Tensor, part: int, number: int, works: list[Any]) -> None:
        """Start to send."""
        if x.numel():
            works.append(self.group.send(x, self.peers[part], self.tag + number))


class P2PAllGather:
    """Everybody's pieces, received where they belong."""

    def __init__(self, wire: TaggedMessages, boxes: list[LocalBoxing], dtype: torch.dtype, slot: Tensor | None) -> None:
        self.wire, self.boxes, self.dtype = wire, boxes, dtype
        self.pieces = PackedPieces([b.sources for b in boxes], [_leading(b.dst, b.give) for b in boxes], dtype.itemsize)
        self.packed_rows = list(torch.empty(sum(self.pieces.totals), dtype=dtype).split(self.pieces.totals))
        self.mine = self.pieces.split(self.packed_rows[wire.at], wire.at)
        self.fixed = None if slot is None else self._placed(carve(slot, [b.dst for b in boxes], dtype))

    def _placed(self, wholes: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The tensors, and for each the views that are each rank's piece."""
        return wholes, [
            windows(x, *b.give, [s[b.give[0]] // b.give[1] for s in b.sources])
            for x, b in zip(wholes, self.boxes, strict=True)
        ]

    def start(self, *given: Tensor) -> Any:
        wire, pieces = self.wire, self.pieces
        wholes, views = self.fixed or self._placed([torch.empty(b.dst, dtype=self.dtype) for b in self.boxes])
        local = [x.contiguous() for x in given]
        if pieces.packed:
            foreach_copy(self.mine, [local[i] for i in pieces.packed])
        works: list[Any] = []
        for r in wire.others:
            for i in pieces.alone:
                wire.recv(views[i][r], r, i, works)
            wire.recv(self.packed_rows[r], r, len(local), works)
        for r in wire.others:
            for i in pieces.alone:
                wire.send(local[i], r, i, works)
            wire.send(self.packed_rows[wire.at], r, len(local), works)
        own = [v[wire.at] for v in views]
        foreach_copy(own, [x.view(v.shape) for x, v in zip(local, own, strict=True)])
        return works, wholes, views, local

    def finish(self, handle: Any) -> Any:
        works, wholes, views, _ = handle
        for work in works:
            work.wait()
        if self.pieces.packed:
            into, come = [], []
            for r in self.wire.others:
                for i, piece in zip(self.pieces.packed, self.pieces.split(self.packed_rows[r], r), strict=True):
                    into.append(views[i][r])
                    come.append(piece.view(views[i][r].shape))
            foreach_copy(into, come)
        return wholes if len(wholes) > 1 else wholes[0]


@dataclass
class PendingReduceScatter:
    """A reduce-scatter under way."""

    outs: list[Tensor]
    op: str
    held: list[Tensor]
    """What is being sent."""
    works: list[Any] = field(default_factory=list)
    terms: list[list[Tensor]] = field(default_factory=list)
    """For each tensor, the terms of this rank's piece, in order of rank."""
    done: bool = False

    def complete(self) -> None:
        """Wait, reduce, and let go of everything but the result."""
        if self.done:
            return
        for work in self.works:
            work.wait()
        for out, terms in zip(self.outs, self.terms, strict=True):
            first, *rest = terms
            if not rest:
                out.copy_(first)
            for k, term in enumerate(rest):
                _REDUCE[self.op](first if k == 0 else out, term, out=out)
        self.works, self.terms, self.held, self.done = [], [], [], True


_REDUCE: dict[str, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclass
class Scratch:
    """Two buffers in which terms arrive, shared by all reduce-scatters of a transport, and who uses them."""

    nbytes: int = 0
    buffers: list[Tensor] = field(default_factory=list)
    users: list[PendingReduceScatter | None] = field(default_factory=lambda: [None, None])
    turn: int = 0

    def take(self, pending: PendingReduceScatter) -> Tensor:
        """The buffer whose turn it is, once its user has completed."""
        if not self.buffers or self.buffers[0].numel() < self.nbytes:
            for user in self.users:
                if user is not None:
                    user.complete()
            self.buffers = [torch.empty(self.nbytes, dtype=torch.uint8) for _ in self.users]
        self.turn ^= 1
        user = self.users[self.turn]
        if user is not None:
            user.complete()
        self.users[self.turn] = pending
        return self.buffers[self.turn]


class P2PReduceScatter:
    """Reduce-scatter: this rank's piece of every sum, from terms that others send."""

    def __init__(
        self, wire: TaggedMessages, boxes: list[LocalBoxing], dtype: torch.dtype, scratch: Scratch, leaves: bool
    ) -> None:
        """`leaves`: results leave the step, so that they may lie where the last step's lay."""
        self.wire, self.boxes, self.dtype, self.scratch = wire, boxes, dtype, scratch
        self.ranks = len(boxes[0].ranks)
        self.lengths, shapes = [], []
        for b in boxes:
            d, blocks = b.take
            lengths = [chunk(b.src[d] // blocks, self.ranks, r)[1] for r in range(self.ranks)]
            self.lengths.append(lengths)
            shapes.append([(*b.src[:d], blocks * n, *b.src[d + 1 :]) for n in lengths])
        self.pieces = PackedPieces(shapes, [_leading(b.src, b.take) for b in boxes], dtype.itemsize)
        self.packed_rows = list(torch.empty(sum(self.pieces.totals), dtype=dtype).split(self.pieces.totals))
        self.packed_views = [self.pieces.split(row, r) for r, row in enumerate(self.packed_rows)]
        self.come = [torch.Size(b.dst).numel() for b in boxes]
        here = [self.come[i] for i in self.pieces.alone] + [self.pieces.totals[wire.at]]
        self.row = sum(_padded(n, dtype) for n in here)
        """Elements that arrive from each other rank."""
        scratch.nbytes = max(scratch.nbytes, self.row * dtype.itemsize * len(wire.others))
        self.outs = [torch.empty(b.dst, dtype=dtype) for b in boxes] if leaves else None

    def start(self, *given: Tensor) -> PendingReduceScatter:
        wire, pieces, at = self.wire, self.pieces, self.wire.at
        local = [x.contiguous() for x in given]
        outs = self.outs or [torch.empty(b.dst, dtype=self.dtype) for b in self.boxes]
        pending = PendingReduceScatter(outs, self.boxes[0].op, local)
        room = self.scratch.take(pending).view(self.dtype)
        views = [windows(x, *b.take, n) for x, b, n in zip(local, self.boxes, self.lengths, strict=True)]
        terms: list[list[Any]] = [[None] * self.ranks for _ in local]
        for k, r in enumerate(wire.others):
            start = k * self.row
            for i in pieces.alone:
                terms[i][r] = room[start : start + self.come[i]].view(self.boxes[i].dst)
                wire.recv(terms[i][r], r, i, pending.works)
                start += _padded(self.come[i], self.dtype)
            packed = room[start : start + pieces.totals[at]]
            wire.recv(packed, r, len(local), pending.works)
            for i, piece in zip(pieces.packed, pieces.split(packed, at), strict=True):
                terms[i][r] = piece
        if pieces.packed:
            pairs = [
                (v, views[i][r])
                for r, row in enumerate(self.packed_views)
                for v, i in zip(row, pieces.packed, strict=True)
            ]
            foreach_copy([v.view(x.shape) for v, x in pairs], [x for _, x in pairs])
        for r in wire.others:
            for i in pieces.alone:
                wire.send(views[i][r], r, i, pending.works)
            wire.send(self.packed_rows[r], r, len(local), pending.works)
        for i in pieces.alone:
            terms[i][at] = views[i][at]
        for i, piece in zip(pieces.packed, self.packed_views[at], strict=True):
            terms[i][at] = piece
        pending.terms = terms
        return pending

    def finish(self, handle: PendingReduceScatter) -> Any:
        handle.complete()
        return handle.outs if len(handle.outs) > 1 else handle.outs[0]


def _leading(shape: tuple[int, ...], split: tuple[int, int]) -> bool:
    """Whether pieces of a whole split so are contiguous."""
    return split[1] == 1 and all(n == 1 for n in shape[: split[0]])


def _padded(n: int, dtype: torch.dtype) -> int:
    """Elements, rounded up so that what follows is aligned."""
    step = max(1, ALIGN // dtype.itemsize)
    return -(-n // step) * step


def carve(slot: Tensor, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of these shapes, side by side in a slot."""
    at, out = 0, []
    for shape in shapes:
        n = torch.Size(shape).numel()
        out.append(slot.view(dtype)[at : at + n].view(shape))
        at += _padded(n, dtype)
    return out


def carved_bytes(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
    """How large a slot must be for tensors of these shapes."""
    return sum(_padded(torch.Size(s).numel(), dtype) for s in shapes) * dtype.itemsize


class GatherBuffers:
    """Memory of gathered tensors. It stays with the transport and serves all its programs, one at a time."""

    def __init__(self) -> None:
        self.memory: list[Tensor] = []

    def assign(self, needs: Sequence[tuple[str, int, int, int]]) -> dict[str, Tensor]:
        """A slot for each (name, bytes, first, last), given in order of `first`; lives that overlap share none."""
        busy: list[int] = [-1] * len(self.memory)
        out = {}
        for name, nbytes, first, last in needs:
            free = [k for k, until in enumerate(busy) if until < first and self.memory[k].numel() >= nbytes]
            if not free:
                self.memory.append(torch.empty(nbytes, dtype=torch.uint8))
                busy.append(-1)
                free = [len(busy) - 1]
            best = min(free, key=lambda k: self.memory[k].numel())
            busy[best] = last
            out[name] = self.memory[best]
        return out


def lives(program: Program) -> dict[str, tuple[int, int]]:
    """For each gather whose results stay inside the program: its line, and the last line that reads them.

    Views are readers too, and whoever reads them. What leaves the program or goes into another
    collective is not in the answer.
    """
    gathers = {i.name: k for k, i in enumerate(program.instrs) if i.kind == "all_gather"}
    roots: dict[str, set[str]] = {name: {name} for name in gathers}
    last = dict(gathers)
    escaped: set[str] = set()
    for k, instr in enumerate(program.instrs):
        read = set().union(*(roots.get(r.name, set()) for r in instr.refs)) if instr.refs else set()
        if not read:
            continue
        if instr.kind:
            escaped |= read
        for name in read:
            last[name] = k
        if result_may_alias(instr):
            roots[instr.name] = read
    for out in program.outputs:
        escaped |= roots.get(out.ref.name, set())
    return {name: (k, last[name]) for name, k in gathers.items() if name not in escaped}


def leaving(program: Program) -> set[str]:
    """Names of reduce-scatters whose results nobody inside the program reads."""
    inside = {r.name for i in program.instrs for r in i.refs}
    return {i.name for i in program.instrs if i.kind == "reduce_scatter" and i.name not in inside}

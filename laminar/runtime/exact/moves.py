"""Gathers and all-to-alls among logical ranks: what a process lacks comes in one message from each of the others.

Nothing is computed here, so bits don't depend on who sends. Instances that several processes have come from the process
of the first logical rank that has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES
from laminar.capture.tensor_bytes import as_bytes
from laminar.ir.program import Instr
from laminar.runtime.comm.boxing_ops import LocalBoxing
from laminar.runtime.exact.hosts import HostedRanks
from laminar.runtime.exact.values import varies

Fetch = Callable[[int, int], Tensor]
"""The instance of a line's n-th tensor that a logical rank of this process has."""


@dataclass(frozen=True)
class MovedPiece:
    """A piece of one of a line's tensors: of which logical rank's instance, and for which of its group."""

    which: int
    source: int
    part: int
    """-1: all of it."""


class HostedMove:
    """One gather or all-to-all, with what it needs worked out."""

    def __init__(self, instr: Instr, hosts: HostedRanks) -> None:
        self.instr, self.hosts, self.mesh = instr, hosts, hosts.mesh
        self.boxes: dict[tuple[int, int], LocalBoxing] = {}
        self.wanted = [self._pieces(h) for h in range(hosts.hosts)]
        """For each process the pieces that it needs, and where each comes from."""
        self.remote = any(source != h for h, some in enumerate(self.wanted) for source in some.values())
        me = hosts.process
        self.sent = [
            [p for p, source in some.items() if source == me and h != me] for h, some in enumerate(self.wanted)
        ]
        self.received = [[p for p, s in self.wanted[me].items() if s == h and h != me] for h in range(hosts.hosts)]

    def box(self, which: int, rank: int) -> LocalBoxing:
        """The geometry of a tensor on a logical rank."""
        if (which, rank) not in self.boxes:
            self.boxes[which, rank] = LocalBoxing.of(self.instr, self.mesh, rank, which)
        return self.boxes[which, rank]

    def _owner(self, which: int, rank: int) -> int:
        """The first logical rank that has the same instance as this one."""
        coords, axes = self.mesh.coords(rank), varies(self.instr.ins[which])
        return self.mesh.rank(tuple(c if a in axes else 0 for a, c in enumerate(coords)))

    def _pieces(self, process: int) -> dict[MovedPiece, int]:
        """What a process needs for the instances it is to have, and from which process."""
        found: dict[MovedPiece, int] = {}
        here = set(self.hosts.hosting.hosted(process))
        mine = {(i, self._owner(i, r)) for i in range(len(self.instr.refs)) for r in here}
        for i in range(len(self.instr.refs)):
            for rank in sorted(here):
                box = self.box(i, rank)
                for member in box.ranks:
                    owner = self._owner(i, member)
                    part = -1 if box.kind == "all_gather" else box.at
                    found[MovedPiece(i, owner, part)] = (
                        process if (i, owner) in mine else self.hosts.hosting.processes[owner]
                    )
        return found

    def _cut(self, piece: MovedPiece, fetch: Fetch) -> Tensor:
        x = fetch(piece.which, piece.source)
        return x if piece.part < 0 else self.box(piece.which, piece.source).outgoing(x)[piece.part]

    def _shape(self, piece: MovedPiece) -> tuple[int, ...]:
        box = self.box(piece.which, piece.source)
        if piece.part < 0:
            return box.src
        reader = self.box(piece.which, box.ranks[piece.part])
        return reader.incoming_shapes()[box.at]

    def __call__(self, fetch: Fetch) -> Callable[[int, int], Tensor]:
        """Every process calls this; what comes back makes the instance of a tensor for a logical rank that is here."""
        got: dict[MovedPiece, Tensor] = {}
        if self.remote:
            empty = torch.zeros(0, dtype=torch.uint8, device=self.hosts.device)
            parts = [torch.cat([as_bytes(self._cut(p, fetch)) for p in some] or [empty]) for some in self.sent]
            sizes = [[self._bytes(p) for p in some] for some in self.received]
            for flat, some, each in zip(
                self.hosts.exchange(parts, list(map(sum, sizes))), self.received, sizes, strict=True
            ):
                for piece, data in zip(some, flat.split(each) if each else (), strict=True):
                    whole = data.clone().view(DTYPES[self.instr.ins[piece.which].spec.dtype])
                    got[piece] = whole.view(self._shape(piece))

        def made(which: int, rank: int) -> Tensor:
            box, pieces = self.box(which, rank), []
            for member in box.ranks:
                piece = MovedPiece(which, self._owner(which, member), -1 if box.kind == "all_gather" else box.at)
                pieces.append(got[piece] if piece in got else self._cut(piece, fetch))
            return box.combine(pieces).contiguous()

        return made

    def _bytes(self, piece: MovedPiece) -> int:
        return math.prod(self._shape(piece)) * DTYPES[self.instr.ins[piece.which].spec.dtype].itemsize

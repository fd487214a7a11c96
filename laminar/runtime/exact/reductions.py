"""Reductions of a program's line over logical ranks: which instances are summed, who has the terms, where sums lie.

A line may reduce several tensors, each with several instances (one for each slice of a weight). Those whose terms lie
on the same processes share a buffer, so that there is one exchange for all of them. Each begins there with a cache
line: products are made right in their place, and small ones get other bits where that is not aligned to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES
from laminar.ir.clusters.limits import ALIGN
from laminar.ir.program import Instr
from laminar.runtime.comm.boxing_ops import LocalBoxing
from laminar.runtime.comm.shards import cut_pieces
from laminar.runtime.exact.hosts import HostedRanks
from laminar.runtime.exact.integer_sum import INTEGER_TYPES, PER_EXPONENT, TermRows
from laminar.runtime.exact.moves import Fetch
from laminar.runtime.exact.sums import HostedSum
from laminar.runtime.exact.tree_sum import PartialSums
from laminar.runtime.exact.values import LaneKey, varies


@dataclass(frozen=True)
class Reduced:
    """One instance that is reduced."""

    which: int
    key: LaneKey
    """Its coordinates on the axes that it is not reduced over and differs along."""
    ranks: tuple[int, ...]
    """For each term the first logical rank that has it."""
    shape: tuple[int, ...]
    begin: int = 0
    """Where it lies in its buffer."""


class HostedReduction:
    """One all-reduce or reduce-scatter, with what it needs worked out."""

    def __init__(self, instr: Instr, hosts: HostedRanks, sums: str = "tree") -> None:
        """`sums` are taken up the tree, or in integers where there are such terms."""
        self.instr, self.hosts, self.mesh = instr, hosts, hosts.mesh
        self.axes = instr.box.axes
        patterns: dict[tuple[int, ...] | None, list[Reduced]] = {}
        for i in range(len(instr.refs)):
            for item, owners in self._instances(i):
                patterns.setdefault(owners, []).append(item)
        self.sums: list[tuple[HostedSum, list[Reduced]]] = []
        self.of: dict[tuple[int, LaneKey], tuple[HostedSum, Reduced]] = {}
        dtype, op = DTYPES[instr.ins[0].spec.dtype], instr.box.reduction
        integers = sums == "integers" and op == "sum" and dtype in INTEGER_TYPES
        grain = PER_EXPONENT if integers else ALIGN // dtype.itemsize
        for owners, items in patterns.items():
            begin, placed = 0, []
            for item in items:
                placed.append(Reduced(item.which, item.key, item.ranks, item.shape, begin))
                begin += -(-torch.Size(item.shape).numel() // grain) * grain
            whole = HostedSum(hosts, owners, len(items[0].ranks), begin, dtype, op, integers)
            self.sums.append((whole, placed))
            self.of |= {(item.which, item.key): (whole, item) for item in placed}

    def _instances(self, which: int) -> list[tuple[Reduced, tuple[int, ...] | None]]:
        """A tensor's instances that concern this process, with the process that each term comes from.

        The same on every process, but for those of which all who need them have all terms: they add them up by
        themselves.
        """
        mesh, hosting, me = self.mesh, self.hosts.hosting, self.hosts.process
        placed = self.instr.ins[which]
        kept = tuple(a for a in varies(placed) if a not in self.axes)
        groups: dict[LaneKey, set[int]] = {}
        for rank in range(mesh.ranks):
            groups.setdefault(tuple(mesh.coords(rank)[a] for a in kept), set()).add(hosting.processes[rank])
        out: list[tuple[Reduced, tuple[int, ...] | None]] = []
        for key, needing in groups.items():
            at = [0] * len(mesh.sizes)
            for a, k in zip(kept, key, strict=True):
                at[a] = k
            ranks = mesh.group(self.axes, tuple(at))
            holders = [self._holders(kept, key, rank) for rank in ranks]
            item = Reduced(which, key, ranks, placed.local(mesh, ranks[0]).shape)
            if all(needing <= some for some in holders):
                if me in needing:
                    out.append((item, None))
            else:
                out.append((item, tuple(hosting.processes[r] for r in ranks)))
        return out

    def _holders(self, kept: tuple[int, ...], key: LaneKey, rank: int) -> set[int]:
        """The processes that have a term: those with a logical rank at its coordinates on all axes it differs along."""
        mesh, want = self.mesh, self.mesh.coords(rank)
        axes = (*kept, *self.axes)
        return {
            self.hosts.hosting.processes[r]
            for r in range(mesh.ranks)
            if all(mesh.coords(r)[a] == want[a] for a in axes)
        }

    def partial(self, which: int, key: LaneKey) -> tuple[PartialSums | TermRows, tuple[bool, ...]] | None:
        """Where terms of an instance go as they come, and which of them this process is to give."""
        found = self.of.get((which, key))
        if found is None:
            return None
        whole, item = found
        return whole.partial(item.begin, item.shape), whole.mine

    def add(self, which: int, fetch: Fetch) -> None:
        """All terms of a tensor that are here."""
        for (i, _), (whole, item) in self.of.items():
            if i != which or not whole.partials:
                continue
            sums = whole.partial(item.begin, item.shape)
            for index, (rank, mine) in enumerate(zip(item.ranks, whole.mine, strict=True)):
                if mine:
                    sums.add(index, fetch(which, rank))

    def start(self) -> None:
        """All terms of all tensors are here."""
        for whole, _ in self.sums:
            whole.start()

    def finish(self) -> Callable[[int, int], Tensor]:
        """The instance of each tensor for a logical rank that is here; whole, or this rank's piece."""
        for whole, _ in self.sums:
            whole.finish()

        def made(which: int, rank: int) -> Tensor:
            placed = self.instr.ins[which]
            coords = self.mesh.coords(rank)
            key = tuple(coords[a] for a in varies(placed) if a not in self.axes)
            whole, item = self.of[which, key]
            size = torch.Size(item.shape).numel()
            out = whole.out[item.begin : item.begin + size].view(item.shape)
            if self.instr.kind == "all_reduce":
                return out
            box = LocalBoxing.of(self.instr, self.mesh, rank, which)
            return cut_pieces(out, *box.take, len(box.ranks))[box.at].contiguous()

        return made

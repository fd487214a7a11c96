"""Sums over logical ranks that several processes host: each adds up what it has, then slices of that change hands.

Process j is given everyone's partial sums of the j-th slice, takes them up the tree, and gives the result to all. That
is a ring's bytes where each process hosts one whole subtree. Small sums are gathered whole, which is one message. On
one machine partial sums lie in memory that all share, where nothing has to be sent at all.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from laminar.capture.torch_private import foreach_copy
from laminar.ir.clusters import limits
from laminar.ir.clusters.limits import aligned_bytes
from laminar.ir.exact import TreeNode, cover
from laminar.ir.sbp import chunk
from laminar.runtime.comm.shm_arena import HALFWAY, READY, Segment
from laminar.runtime.exact.hosts import HostedRanks
from laminar.runtime.exact.tree_sum import PartialSums, tree_sum


class HostedSum:
    """One flat buffer of sums; `partial()` takes the terms of this process, `finish` gives the whole sums."""

    def __init__(
        self, hosts: HostedRanks, owners: tuple[int, ...] | None, count: int, numel: int, dtype: torch.dtype, op: str
    ) -> None:
        """Of `count` terms; `owners` says which process has each, nothing that this one has all it needs."""
        self.hosts, self.count, self.numel, self.dtype, self.op = hosts, count, numel, dtype, op
        self.remote = owners is not None and hosts.hosts > 1
        """Whether other processes take part."""
        owners = (hosts.process,) * count if owners is None else owners
        self.covers = [cover(tuple(o == h for o in owners)) for h in range(hosts.hosts)]
        self.most = max(map(len, self.covers))
        self.mine = tuple(o == hosts.process for o in owners)
        self.segment: Segment | None = None
        self.waiting = False

    @property
    def shared_bytes(self) -> int:
        """What it takes of memory that processes share: partial sums, and the results of a slice."""
        size = self.dtype.itemsize
        return self.most * aligned_bytes(self.numel * size) + aligned_bytes(self._spans[0][1] * size)

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        return [chunk(self.numel, self.hosts.hosts, h) for h in range(self.hosts.hosts)]

    def _rows(self, host: int, count: int) -> list[Tensor]:
        """The partial sums of a process in its stretch of shared memory."""
        assert self.segment is not None
        step = aligned_bytes(self.numel * self.dtype.itemsize) // self.dtype.itemsize
        flat = self.segment.of(host, self.dtype)
        return [flat[i * step : i * step + self.numel] for i in range(count)]

    @cached_property
    def partials(self) -> list[Tensor]:
        """The partial sums of this process, made once."""
        here = len(self.covers[self.hosts.process])
        if self.segment is not None:
            return self._rows(self.hosts.process, here)
        return [torch.zeros(self.numel, dtype=self.dtype, device=self.hosts.device) for _ in range(here)]

    @cached_property
    def out(self) -> Tensor:
        """Where the whole sums go."""
        if not self.remote and self.partials:
            return self.partials[0]
        return torch.zeros(self.numel, dtype=self.dtype, device=self.hosts.device)

    def partial(self, begin: int, shape: tuple[int, ...]) -> PartialSums:
        """Sums of one tensor, which lies at `begin` of the buffer."""
        size = torch.Size(shape).numel()
        return PartialSums(self.mine, self.op, [p[begin : begin + size].view(shape) for p in self.partials])

    def start(self) -> None:
        """All terms of this process are there."""
        self.waiting = True
        if self.segment is not None:
            self.segment.number += 1
            self.segment.post(READY)

    def finish(self) -> Tensor:
        """The whole sums: of the tree over all terms."""
        if not self.waiting:
            return self.out
        self.waiting = False
        if not self.remote:
            return self.out
        if self.segment is not None:
            self._in_shared_memory(self.segment)
        elif self.numel * self.dtype.itemsize * self.most <= limits.SMALL_RING_BYTES:
            self._gathered()
        else:
            self._in_slices()
        return self.out

    def _nodes(self, rows: list[list[Tensor]]) -> dict[TreeNode, Tensor]:
        """Everybody's partial sums by the nodes they belong to."""
        return {
            node: t for nodes, some in zip(self.covers, rows, strict=True) for node, t in zip(nodes, some, strict=False)
        }

    def _gathered(self) -> None:
        mine = torch.zeros(self.most * self.numel, dtype=self.dtype, device=self.hosts.device)
        for row, p in zip(mine.split(self.numel), self.partials, strict=False):
            row.copy_(p)
        rows = [list(g.split(self.numel)) for g in self.hosts.gather(mine)]
        tree_sum(self._nodes(rows), self.count, self.op, self.out)

    def _in_slices(self) -> None:
        spans, me = self._spans, self.hosts.process
        empty = torch.zeros(0, dtype=self.dtype, device=self.hosts.device)
        parts = [torch.cat([p[a : a + n] for p in self.partials] or [empty]) for a, n in spans]
        n = spans[me][1]
        received = self.hosts.exchange(parts, [n * len(c) for c in self.covers])
        rows = [list(r.split(n)) if n else [] for r in received]
        longest = spans[0][1]
        mine = torch.zeros(longest, dtype=self.dtype, device=self.hosts.device)
        if n:
            tree_sum(self._nodes(rows), self.count, self.op, mine[:n])
        for (a, length), slice_ in zip(spans, self.hosts.gather(mine), strict=True):
            self.out[a : a + length].copy_(slice_[:length])

    def _in_shared_memory(self, segment: Segment) -> None:
        hosts, me = range(self.hosts.hosts), self.hosts.process
        begin, n = self._spans[me]
        above = self.most * aligned_bytes(self.numel * self.dtype.itemsize) // self.dtype.itemsize
        segment.wait(READY)
        if n:
            rows = [[r[begin : begin + n] for r in self._rows(h, len(self.covers[h]))] for h in hosts]
            mine = segment.of(me, self.dtype)[above : above + n]
            tree_sum(self._nodes(rows), self.count, self.op, mine)
        segment.post(HALFWAY)
        segment.wait(HALFWAY)
        sums = [segment.of(h, self.dtype)[above : above + length] for h, (_, length) in enumerate(self._spans)]
        foreach_copy([self.out[a : a + length] for a, length in self._spans], sums)

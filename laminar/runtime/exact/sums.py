"""Sums over logical ranks that several processes host: each adds up what it has, then slices of that change hands.

Process j is given everyone's partial sums of the j-th slice, takes them up the tree, and gives the result to all. That
is a ring's bytes where each process hosts one whole subtree. Small sums are gathered whole, which is one message. On
one machine partial sums lie in memory that all share, where nothing has to be sent at all.

Sums in integers (`integer_sum.py`) keep a process's terms apart until the exponents of their blocks are known to all.
Then it sends one row of integers, whichever terms it has; in shared memory, where nothing is sent, all terms are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from laminar.runtime.exact.integer_sum import (
    PER_EXPONENT,
    TermRows,
    block_exponents,
    floats_of,
    integer_sum,
    integer_terms,
    not_finite,
    spoilt_blocks,
    spoilt_sums,
)
from laminar.runtime.exact.tree_sum import PartialSums, tree_sum

Join = Callable[[list[list[Tensor]], Tensor], None]
"""Makes one row of everybody's rows."""


class HostedSum:
    """One flat buffer of sums; `partial()` takes the terms of this process, `finish` gives the whole sums."""

    def __init__(
        self,
        hosts: HostedRanks,
        owners: tuple[int, ...] | None,
        count: int,
        numel: int,
        dtype: torch.dtype,
        op: str,
        integers: bool = False,
    ) -> None:
        """Of `count` terms; `owners` says which process has each, nothing that this one has all it needs.

        `integers`: added as such, and not up the tree; `numel` is in whole blocks then.
        """
        self.integers = integers
        self.hosts, self.count, self.numel, self.dtype, self.op = hosts, count, numel, dtype, op
        self.remote = owners is not None and hosts.hosts > 1
        """Whether other processes take part."""
        owners = (hosts.process,) * count if owners is None else owners
        self.covers = [self._kept(tuple(o == h for o in owners)) for h in range(hosts.hosts)]
        """For each process the nodes of the tree whose sums it gives."""
        self.most = max(map(len, self.covers))
        self.mine = tuple(o == hosts.process for o in owners)
        self.segment: Segment | None = None
        self.waiting = False

    def _kept(self, members: tuple[bool, ...]) -> tuple[TreeNode, ...]:
        return tuple((i, i + 1) for i, here in enumerate(members) if here) if self.integers else cover(members)

    @property
    def shared_bytes(self) -> int:
        """What it takes of memory that processes share: partial sums, and the results of a slice."""
        size = self.dtype.itemsize
        return self.most * aligned_bytes(self.numel * size) + aligned_bytes(self._spans[0][1] * size)

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Where the slice of each process begins, and how long it is."""
        grain = PER_EXPONENT if self.integers else 1
        found = [chunk(self.numel // grain, self.hosts.hosts, h) for h in range(self.hosts.hosts)]
        return [(begin * grain, length * grain) for begin, length in found]

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
        """Where the whole sums go: where terms were, if nobody reads those any more once sums are taken from others."""
        if self.partials and (self.segment is not None or not self.remote):
            return self.partials[0]
        return torch.zeros(self.numel, dtype=self.dtype, device=self.hosts.device)

    def partial(self, begin: int, shape: tuple[int, ...]) -> PartialSums | TermRows:
        """Sums of one tensor, which lies at `begin` of the buffer."""
        size = torch.Size(shape).numel()
        rows = [p[begin : begin + size].view(shape) for p in self.partials]
        return TermRows(self.mine, rows) if self.integers else PartialSums(self.mine, self.op, rows)

    def start(self) -> None:
        """All terms of this process are there."""
        self.waiting = True
        if self.segment is not None:
            self.segment.number += 1
            self.segment.post(READY)

    def finish(self) -> Tensor:
        """The whole sums."""
        if not self.waiting:
            return self.out
        self.waiting = False
        if not self.remote:
            if self.integers:
                integer_sum(self.partials, self.out)
            return self.out
        if self.segment is not None:
            self._in_shared_memory(self.segment)
        elif self.numel * self.dtype.itemsize * self.most <= limits.SMALL_RING_BYTES:
            self._gathered()
        elif self.integers:
            self._as_integers()
        else:
            self._through_slices(self.partials, [len(c) for c in self.covers], self._joined, self.out)
        return self.out

    def _joined(self, rows: list[list[Tensor]], out: Tensor) -> None:
        """The sums of everybody's rows."""
        nodes = self._nodes(rows)
        if self.integers:
            integer_sum([nodes[i, i + 1] for i in range(self.count)], out)
        else:
            tree_sum(nodes, self.count, self.op, out)

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
        self._joined(rows, self.out)

    def _through_slices(
        self, rows: Sequence[Tensor], counts: Sequence[int], join: Join, out: Tensor, elements: int = 1
    ) -> None:
        """Everybody's rows, of each slice to whom it belongs, who joins them and gives the result to all.

        `counts` says how many rows each process has; `elements` of the buffer are one of theirs.
        """
        spans, me = [(a // elements, n // elements) for a, n in self._spans], self.hosts.process
        empty = torch.zeros(0, dtype=rows[0].dtype if rows else self.dtype, device=self.hosts.device)
        parts = [torch.cat([r[a : a + n] for r in rows] or [empty]) for a, n in spans]
        n = spans[me][1]
        received = self.hosts.exchange(parts, [n * c for c in counts])
        mine = torch.zeros(spans[0][1], dtype=out.dtype, device=self.hosts.device)
        if n:
            join([list(r.split(n)) for r in received], mine[:n])
        for (a, length), slice_ in zip(spans, self.hosts.gather(mine), strict=True):
            out[a : a + length].copy_(slice_[:length])

    def _as_integers(self) -> None:
        """Exponents first, then one row of integers from each process."""
        each, (begin, n) = [1] * self.hosts.hosts, self._spans[self.hosts.process]
        exponents = torch.zeros(self.numel // PER_EXPONENT, dtype=torch.uint8, device=self.hosts.device)

        def largest(rows: list[list[Tensor]], out: Tensor) -> None:
            torch.amax(torch.stack([r for some in rows for r in some]), 0, out=out)

        def added(rows: list[list[Tensor]], out: Tensor) -> None:
            total = rows[0][0]
            for (row,) in rows[1:]:
                total.add_(row)
            floats_of(total, exponents[begin // PER_EXPONENT : (begin + n) // PER_EXPONENT], self.count, out)

        mine = self.partials or [torch.zeros(self.numel, dtype=self.dtype, device=self.hosts.device)]
        self._through_slices([block_exponents(mine)], each, largest, exponents, PER_EXPONENT)
        self._through_slices([integer_terms(mine, exponents, self.count)], each, added, self.out)
        self._replace_spoilt(not_finite(exponents))

    def _replace_spoilt(self, numbers: Tensor) -> None:
        """Blocks that are not finite: all terms of them go to everybody."""
        if not numbers.numel():
            return
        mine = torch.zeros(self.most, numbers.numel(), PER_EXPONENT, dtype=self.dtype, device=self.hosts.device)
        for into, row in zip(mine, self.partials, strict=False):
            into.copy_(spoilt_blocks(row, numbers))
        rows = [list(g.view_as(mine)) for g in self.hosts.gather(mine.view(-1))]
        nodes = self._nodes(rows)
        self.out.view(-1, PER_EXPONENT)[numbers] = spoilt_sums([nodes[i, i + 1] for i in range(self.count)])

    def _in_shared_memory(self, segment: Segment) -> None:
        hosts, me = range(self.hosts.hosts), self.hosts.process
        begin, n = self._spans[me]
        above = self.most * aligned_bytes(self.numel * self.dtype.itemsize) // self.dtype.itemsize
        segment.wait(READY)
        if n:
            rows = [[r[begin : begin + n] for r in self._rows(h, len(self.covers[h]))] for h in hosts]
            mine = segment.of(me, self.dtype)[above : above + n]
            self._joined(rows, mine)
        segment.post(HALFWAY)
        segment.wait(HALFWAY)
        sums = [segment.of(h, self.dtype)[above : above + length] for h, (_, length) in enumerate(self._spans)]
        foreach_copy([self.out[a : a + length] for a, length in self._spans], sums)

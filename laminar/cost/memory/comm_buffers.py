"""Memory that exchanges take, as `laminar/runtime/comm/transport.py` makes it, worked out from the program alone.

Some is made once and stays: buckets of gradients, slots for gathered tensors, regions that ranks of a machine
share, rows for small pieces. Some lives from an exchange's start to its end. This file knows sizes only; it follows
`runtime/code/eager_step.py` (buckets, who writes into them), `runtime/comm/shm_collectives.py` and
`runtime/comm/shm_arena.py`, `runtime/comm/p2p_collectives.py`, and the exchanges of `runtime/comm/transport.py`.
`tests/cost/test_memory_cost.py` holds it against the real ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from laminar.errors import ClusterError
from laminar.ir.clusters.limits import ALIGN, DIRECT_BYTES, RINGS, SMALL_RING_BYTES, aligned_bytes
from laminar.ir.ops import DRAWS, WRITE_INTO_PLACE, may_share_memory
from laminar.ir.program import Instr, Program
from laminar.ir.sbp import Split, chunk
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import ITEM_BYTES

BUFFER_BACKENDS = ("shared", "gloo", "nccl", "null")


@dataclass(frozen=True)
class Need:
    """What one exchange takes."""

    result: str = "start"
    """When memory for its results is taken: `start`, `finish`, or `place` (they lie where inputs lay)."""
    during: tuple[int, ...] = ()
    """Bytes of buffers from its start to its end."""
    holds: bool = False
    """Whether it keeps its inputs until its end."""


@dataclass
class Buffers:
    """All of it, for one rank of a program."""

    fixed: list[int] = field(default_factory=list)
    """Bytes of what stays, gradients apart."""
    homes: dict[str, int] = field(default_factory=dict)
    """Bytes of what stays and holds gradients, by name."""
    lying: dict[Ref, str] = field(default_factory=dict)
    """Values that lie in a home; the empty name means somewhere in what is fixed."""
    needs: dict[str, Need] = field(default_factory=dict)


def buffers_of(program: Program, rank: int, backend: str, compiled: bool) -> Buffers:
    """What a rank's exchanges need; `compiled` as in `runtime.compiled`, else line by line."""
    if backend not in BUFFER_BACKENDS:
        raise ClusterError(f"no backend {backend!r}", allowed="  ".join(BUFFER_BACKENDS))
    return _Layout(program, rank, backend, compiled).out


class _Layout:
    def __init__(self, program: Program, rank: int, backend: str, compiled: bool) -> None:
        self.program, self.mesh, self.rank = program, program.mesh, rank
        self.backend, self.compiled, self.cpu = backend, compiled, backend != "nccl"
        self.out = Buffers()
        self.makers = {i.name: i for i in program.instrs}
        self.leaving = {o.ref for o in program.outputs}
        self.uses: dict[Ref, int] = {}
        for ref in [r for i in program.instrs for r in i.refs] + [o.ref for o in program.outputs]:
            self.uses[ref] = self.uses.get(ref, 0) + 1
        self.arenas: dict[tuple[int, ...], dict[str, int]] = {}
        self.scratch = 0
        slots = self._slots() if backend in ("shared", "gloo") and not compiled else {}
        inside = {r.name for i in program.instrs for r in i.refs}
        for instr in program.collectives:
            if instr.kind == "all_reduce" and (len(instr.refs) > 1 or Ref(instr.name) in self.leaving):
                self._bucket(instr)
            else:
                stays = instr.kind == "reduce_scatter" and instr.name not in inside
                self.out.needs[instr.name] = self._need(instr, instr.name in slots, stays)
        if self.cpu and not compiled:
            self._local_gradients()
        for instr in program.instrs:
            place = instr.outs[0] if instr.op in DRAWS else None
            if place is not None and any(isinstance(p, Split) for p in place.nd):
                # Tables that say which of the whole tensor's numbers are this rank's.
                self.out.fixed.append(8 * sum(place.local(self.mesh, rank).shape))
        for areas in self.arenas.values():
            counters = len([k for k in areas if k not in RINGS]) + sum(RINGS[k] for k in areas if k in RINGS)
            total = sum(n * RINGS.get(name, 1) for name, n in areas.items())
            self.out.fixed.append(aligned_bytes(12 * counters) + total + ALIGN)
        if self.scratch:
            self.out.fixed += [self.scratch] * 2

    # -- geometry ------------------------------------------------------------------------------

    def _ranks(self, instr: Instr) -> tuple[int, ...]:
        return self.mesh.group(instr.box.axes, self.mesh.coords(self.rank))

    def _before(self, instr: Instr) -> list[int]:
        return [p.local(self.mesh, self.rank).nbytes for p in instr.ins]

    def _after(self, instr: Instr) -> list[int]:
        return [p.local(self.mesh, self.rank).nbytes for p in instr.outs if p]

    def _item(self, instr: Instr) -> int:
        return ITEM_BYTES[instr.ins[0].spec.dtype]

    # -- buckets -------------------------------------------------------------------------------

    def _bucket(self, instr: Instr) -> None:
        """A merged all-reduce, or that of a lone gradient: a buffer that stays, written into where an op can."""
        total, n = sum(self._before(instr)), len(self._ranks(instr))
        self.out.homes[instr.name] = total
        self.out.needs[instr.name] = Need("place", holds=self.backend == "null")
        for k, ref in enumerate(instr.refs):
            self.out.lying[Ref(instr.name, k)] = instr.name
            maker = self.makers.get(ref.name)
            fits = (
                maker is not None and maker.op in WRITE_INTO_PLACE and self.uses[ref] == 1 and ref not in self.out.lying
            )
            if fits and not self.compiled:
                self.out.lying[ref] = instr.name
        if self.backend == "shared" and n > 1:
            # The region also has room for the sum of this rank's part; the terms are the bucket itself.
            item = self._item(instr)
            extra = aligned_bytes(total) - total + aligned_bytes(chunk(total // item, n, 0)[1] * item)
            self.arenas.setdefault(instr.box.axes, {})[instr.name] = extra

    def _local_gradients(self) -> None:
        for out in self.program.outputs:
            maker = self.makers.get(out.ref.name)
            fits = out.kind == "grad" and maker is not None and maker.op in WRITE_INTO_PLACE and self.uses[out.ref] == 1
            if fits and out.ref not in self.out.lying:
                self.out.homes[out.ref.name] = out.placed.local(self.mesh, self.rank).nbytes
                self.out.lying[out.ref] = out.ref.name

    # -- exchanges -----------------------------------------------------------------------------

    def _need(self, instr: Instr, slot: bool, stays: bool) -> Need:
        """`slot`: results lie in a slot. `stays`: they leave the step, so they lie where the last step's lay."""
        before, after, n = sum(self._before(instr)), sum(self._after(instr)), len(self._ranks(instr))
        if slot:
            self.out.lying.update({Ref(instr.name, k): "" for k in range(len(instr.outs))})
        if self.backend == "null":
            return Need("place", holds=True) if instr.kind == "all_reduce" else Need("finish", holds=True)
        if instr.kind == "all_reduce":
            if self.backend == "shared":
                halved = n > 2 and before > SMALL_RING_BYTES
                own = aligned_bytes(chunk(before // self._item(instr), n, 0)[1] * self._item(instr))
                self._ring(instr, aligned_bytes(before) + own if halved else before)
            return Need("place") if self._donated(instr.refs[0]) else Need("start")
        if instr.kind == "all_to_all" or self.backend == "nccl":
            return self._packed(instr, before, after)
        if stays:
            self.out.homes[instr.name] = after
            self.out.lying.update({Ref(instr.name, k): instr.name for k in range(len(instr.outs))})
        if self.backend == "shared":
            most = max(sum(p.local(self.mesh, r).nbytes for p in instr.ins) for r in _ends(self._ranks(instr)))
            self._ring(instr, most if instr.kind == "all_gather" else before)
            return Need("start")
        self._rows(instr)
        return Need("start", holds=True)

    def _packed(self, instr: Instr, before: int, after: int) -> Need:
        """Exchanges through buffers of torch.distributed."""
        ranks = self._ranks(instr)
        ends = _ends(ranks)
        if instr.kind == "all_gather":
            most = max(sum(p.local(self.mesh, r).nbytes for p in instr.ins) for r in ends)
            if len(instr.refs) > 1:
                return Need("finish", (most, most * len(ranks)))
            even = len({p.local(self.mesh, r).shape for p in instr.ins for r in ends}) == 1
            if even and instr.box.gives[0] == (0, 1):
                return Need("start", holds=True)
            return Need("finish", (most * len(ranks),), holds=True)
        if instr.kind == "reduce_scatter":
            out = instr.outs[0]
            even = len(instr.refs) == 1 and out is not None
            even = even and len({out.local(self.mesh, r).shape for r in ends if out is not None}) == 1
            if even and self.backend == "nccl":
                return Need("start", (before,))
            return Need("finish", (before, after * len(ranks)))
        return Need("finish", (before, after))

    def _donated(self, ref: Ref) -> bool:
        """Whether a reduction may work where its input lies."""
        maker = self.makers.get(ref.name)
        return maker is not None and not maker.kind and not may_share_memory(maker.op) and self.uses[ref] == 1

    def _ring(self, instr: Instr, nbytes: int) -> None:
        ring = "small" if nbytes <= SMALL_RING_BYTES else "large"
        areas = self.arenas.setdefault(instr.box.axes, {})
        areas[ring] = max(areas.get(ring, 0), aligned_bytes(max(nbytes, 1)))

    def _rows(self, instr: Instr) -> None:
        """Rows in which small or strided pieces travel, and the scratch in which terms of a sum arrive."""
        ranks, item = self._ranks(instr), self._item(instr)
        at = ranks.index(self.rank)
        gather = instr.kind == "all_gather"
        totals = [0] * len(ranks)
        row = 0
        for src, dst, give, take in zip(instr.ins, instr.outs, instr.box.gives, instr.box.takes, strict=True):
            assert dst is not None
            whole = (dst if gather else src).local(self.mesh, self.rank).shape
            dim, blocks = give if gather else take
            if gather:
                sizes = [math.prod(src.local(self.mesh, r).shape) for r in ranks]
            else:
                rest = math.prod(whole) // max(1, whole[dim])
                sizes = [rest * blocks * chunk(whole[dim] // blocks, len(ranks), r)[1] for r in range(len(ranks))]
            plain = blocks == 1 and all(n == 1 for n in whole[:dim])
            if plain and max(sizes) * item >= DIRECT_BYTES:
                row += aligned_bytes(sizes[at] * item)
            else:
                totals = [t + n for t, n in zip(totals, sizes, strict=True)]
        if sum(totals):
            self.out.fixed.append(sum(totals) * item)
        if not gather:
            self.scratch = max(self.scratch, (row + aligned_bytes(totals[at] * item)) * (len(ranks) - 1))

    # -- slots ---------------------------------------------------------------------------------

    def _slots(self) -> set[str]:
        """Gathers whose results lie in slots; the slots are added to what is fixed."""
        sizes: list[int] = []
        busy: list[int] = []
        lives = _lives(self.program)
        for name, (first, last) in lives.items():
            nbytes = sum(map(aligned_bytes, self._after(self.makers[name])))
            free = [k for k, until in enumerate(busy) if until < first and sizes[k] >= nbytes]
            if not free:
                sizes.append(nbytes)
                busy.append(-1)
                free = [len(busy) - 1]
            best = min(free, key=lambda k: sizes[k])
            busy[best] = last
        self.out.fixed += sizes
        return set(lives)


def _lives(program: Program) -> dict[str, tuple[int, int]]:
    """For each gather whose results stay inside the program: its line, and the last line that reads them or a view."""
    gathers = {i.name: k for k, i in enumerate(program.instrs) if i.kind == "all_gather"}
    roots: dict[str, set[str]] = {name: {name} for name in gathers}
    last, escaped = dict(gathers), set[str]()
    for k, instr in enumerate(program.instrs):
        read = _union(roots.get(r.name, set()) for r in instr.refs)
        if not read:
            continue
        if instr.kind:
            escaped |= read
        last.update(dict.fromkeys(read, k))
        if may_share_memory(instr.op):
            roots[instr.name] = read
    escaped |= _union(roots.get(o.ref.name, set()) for o in program.outputs)
    return {name: (k, last[name]) for name, k in gathers.items() if name not in escaped}


def _union(sets: Iterable[set[str]]) -> set[str]:
    out: set[str] = set()
    for one in sets:
        out |= one
    return out


def _ends(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Of a group, who holds the largest piece and who the smallest: pieces are cut from the front."""
    return (ranks[0], ranks[-1])

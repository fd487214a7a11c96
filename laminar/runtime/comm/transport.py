"""Transports: how a boxing step of one rank talks to the others.

`Groups` uses torch.distributed, Gloo or NCCL, one process group per set of axes. `Null` talks to
nobody and returns tensors of the right shape: for measuring what everything else costs. Both make
*exchanges*, objects with `start(x)` and `finish(handle)`: the generated code starts one where it
stands in the program and finishes it before the first reader.

Built the fastest way measured: ranks of one machine without GPUs share memory (`shm_collectives.py`); elsewhere
on Gloo gathers and reduce-scatters are sends and receives (`p2p_collectives.py`), cheaper than Gloo's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES
from laminar.capture.torch_private import foreach_copy
from laminar.errors import MeshError
from laminar.ir.mesh import Mesh
from laminar.ir.program import Instr, Program
from laminar.ir.serial.codec import Ref
from laminar.runtime.comm import p2p_collectives, shm_collectives
from laminar.runtime.comm.boxing_ops import LocalBoxing
from laminar.runtime.comm.process_group import C10dGroup, ProcessGroup
from laminar.runtime.comm.shm_arena import ArenaNeeds, Segment, ShmArena

FIRST_COLLECTIVE_TAG = 1 << 20
"""Tags below are left to others who send and receive in the same group."""
PASSING = ("sent", "kept")
"""Outputs that the next run of a program must not overwrite: other micro-batches are still to read them."""


class Exchange(Protocol):
    """One collective of one rank. It never sees the program around it."""

    def start(self, *x: Tensor) -> Any:
        """Hand over the local tensors; what comes back is only good for `finish`."""
        ...

    def finish(self, handle: Any) -> Any:
        """The result: one tensor, or a tuple where several were merged."""


class LineRecorder(Protocol):
    """Who stamps the lines of a program while a recording runs (`runtime/trace/tape.py`)."""

    @property
    def active(self) -> bool:
        """Whether a step is being recorded right now."""
        ...

    def run(self, code: Any, *inputs: Any) -> list[Tensor]:
        """Run a program that stamps its lines, and keep the stamps."""
        ...


class Bucket:
    """A buffer in which the members of a merged all-reduce lie side by side."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        segment: Segment | None = None,
    ) -> None:
        """`segment`: where in memory that ranks share it lies, if it does."""
        sizes = [torch.Size(s).numel() for s in shapes]
        self.segment = segment
        if segment is None:
            self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        else:
            self.flat = segment.of(segment.arena.at, dtype)[: sum(sizes)]
        self.views = [v.view(s) for v, s in zip(self.flat.split(sizes), shapes, strict=True)]


class AllReduce:
    """Reduce one tensor, or a bucket of them, in place."""

    def __init__(
        self, group: ProcessGroup, op: str, copy: bool, bucket: Bucket | None = None, fill: Sequence[int] = ()
    ) -> None:
        self.group, self.op, self.copy = group, op, copy
        self.bucket = bucket
        self.fill = list(fill)
        """Members that are not written into the bucket by the op that makes them."""
        self.targets = [bucket.views[i] for i in self.fill] if bucket else []

    def start(self, *x: Tensor) -> Any:
        if self.bucket is not None:
            if self.targets:
                foreach_copy(self.targets, list(x))
            return self.group.all_reduce(self.bucket.flat, self.op)
        t = x[0].clone(memory_format=torch.contiguous_format) if self.copy else x[0].contiguous()
        return self.group.all_reduce(t, self.op), t

    def finish(self, handle: Any) -> Any:
        if self.bucket is not None:
            handle.wait()
            return self.bucket.views
        handle[0].wait()
        return handle[1]


class AllGather:
    """Everybody's piece, padded to the longest where they differ."""

    def __init__(self, group: ProcessGroup, box: LocalBoxing) -> None:
        self.group, self.box = group, box
        self.parts = len(box.ranks)
        d = box.give[0]
        self.long = max(shape[d] for shape in box.sources)
        self.even = all(shape == box.sources[0] for shape in box.sources)
        self.flat = self.even and box.give == (0, 1)

    def start(self, *given: Tensor) -> Any:
        (x,) = given
        if not self.even and x.shape[self.box.give[0]] < self.long:
            d = self.box.give[0]
            room = x.new_zeros((*x.shape[:d], self.long, *x.shape[d + 1 :]))
            room.narrow(d, 0, x.shape[d]).copy_(x)
            x = room
        x = x.contiguous()
        out = x.new_empty((self.parts * x.shape[0], *x.shape[1:]) if x.dim() else (self.parts,))
        return self.group.gather_into(out, x), out, x

    def finish(self, handle: Any) -> Tensor:
        work, out, _ = handle
        work.wait()
        if self.flat:
            return out  # type: ignore[no-any-return]
        pieces = list(out.chunk(self.parts))
        d = self.box.give[0]
        if not self.even:
            pieces = [p.narrow(d, 0, shape[d]) for p, shape in zip(pieces, self.box.sources, strict=True)]
        return self.box.combine(pieces)


class MergedGather:
    """Pieces of several tensors in one all-gather: each rank's lie one behind the other."""

    def __init__(self, group: ProcessGroup, boxes: list[LocalBoxing]) -> None:
        self.group, self.boxes = group, boxes
        parts = len(boxes[0].ranks)
        self.sizes = [[torch.Size(b.sources[r]).numel() for b in boxes] for r in range(parts)]
        self.long = max(map(sum, self.sizes))

    def start(self, *given: Tensor) -> Any:
        flat = torch.cat([x.reshape(-1) for x in given])
        if flat.numel() < self.long:
            flat = torch.cat([flat, flat.new_zeros(self.long - flat.numel())])
        out = flat.new_empty(self.long * len(self.sizes))
        return self.group.gather_into(out, flat), out, flat

    def finish(self, handle: Any) -> list[Tensor]:
        work, out, _ = handle
        work.wait()
        rows = [row[: sum(n)].split(n) for row, n in zip(out.split(self.long), self.sizes, strict=True)]
        return [
            box.combine([row[i].view(shape) for row, shape in zip(rows, box.sources, strict=True)])
            for i, box in enumerate(self.boxes)
        ]


class AllToAll:
    """A piece to everyone and one from everyone; reduce-scatter too, with a reduction at the end."""

    def __init__(self, group: ProcessGroup, boxes: list[LocalBoxing]) -> None:
        self.group, self.boxes = group, boxes
        self.shapes = [box.incoming_shapes() for box in boxes]
        parts = range(len(boxes[0].ranks))
        self.sizes = [[torch.Size(shapes[r]).numel() for shapes in self.shapes] for r in parts]
        self.totals = [sum(n) for n in self.sizes]

    def start(self, *given: Tensor) -> Any:
        pieces = [box.outgoing(x) for box, x in zip(self.boxes, given, strict=True)]
        to_each = [[p[r].reshape(-1) for p in pieces] for r in range(len(self.totals))]
        buffer = torch.cat([p for row in to_each for p in row])
        out = buffer.new_empty(sum(self.totals))
        sent = [sum(p.numel() for p in row) for row in to_each]
        return self.group.all_to_all(out, buffer, self.totals, sent), out, buffer

    def finish(self, handle: Any) -> Any:
        work, out, _ = handle
        work.wait()
        rows = [row.split(n) for row, n in zip(out.split(self.totals), self.sizes, strict=True)]
        made = [
            box.combine([row[i].view(shape) for row, shape in zip(rows, shapes, strict=True)])
            for i, (box, shapes) in enumerate(zip(self.boxes, self.shapes, strict=True))
        ]
        return made if len(made) > 1 else made[0]


class ReduceScatter:
    """NCCL's own reduce-scatter, for pieces of equal size."""

    def __init__(self, group: ProcessGroup, box: LocalBoxing) -> None:
        self.group, self.box = group, box

    def start(self, *given: Tensor) -> Any:
        (x,) = given
        pieces = torch.stack(self.box.outgoing(x))
        out = x.new_empty(self.box.dst)
        return self.group.scatter_into(out, pieces, self.box.op), out, pieces

    def finish(self, handle: Any) -> Tensor:
        handle[0].wait()
        return handle[1]  # type: ignore[no-any-return]


class Groups:
    """Real process groups over a mesh; every rank must make this at the same point."""

    tape: LineRecorder | None = None
    """Where programs leave their stamps while a recording runs."""

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device | str = "cpu",
        share: bool = True,
        timeout_s: float = 600.0,
        ranks: Sequence[int] | None = None,
        group: Any = None,
    ) -> None:
        """`share`: exchange through shared memory where ranks have it; `timeout_s` is how long to wait there.

        `ranks`: which ranks of the world the mesh is made of; all of them in order unless said. Only they make this.
        `group`: the process group of the world; torch's default one unless said.
        """
        if not dist.is_initialized():
            raise MeshError("no process group", next="start under torchrun, or call dist.init_process_group first")
        self._all = dist.group.WORLD if group is None else group
        world = dist.get_world_size(group)
        if ranks is None and mesh.ranks != world:
            raise MeshError(
                f"{mesh} has {mesh.ranks} ranks, the world has {world}",
                next=f"start {mesh.ranks} processes, or use a mesh of {world}",
            )
        numbers = dist.get_process_group_ranks(self._all)
        members = tuple(numbers[r] for r in (range(world) if ranks is None else ranks))
        self._begin(mesh, members, dist.get_rank(), device, share, timeout_s)

    def _begin(
        self, mesh: Mesh, world: tuple[int, ...], at: int, device: torch.device | str, share: bool, timeout_s: float
    ) -> None:
        self.world = world
        self.mesh, self.rank, self.device = mesh, world.index(at), torch.device(device)
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._shares, self.timeout_s = share, timeout_s
        self._arenas: dict[tuple[int, ...], ShmArena] = {}
        self._tag = FIRST_COLLECTIVE_TAG
        self._slots, self._scratch = p2p_collectives.GatherBuffers(), p2p_collectives.Scratch()
        self._given: dict[str, Tensor] = {}
        self._leaving: set[str] = set()

    def prepare(self, program: Program, in_order: bool = False) -> None:
        """Make what a program needs, in the same order on every rank: its process groups, memory for its gathers.

        `in_order` promises that its lines will run one after the other as they stand, so that a gathered
        tensor's memory may be used again behind its last reader.
        """
        for axes in sorted({i.box.axes for i in program.collectives}):
            if axes not in self._groups:
                self._groups[axes] = self._joined(axes)
        self._given, self._leaving = {}, p2p_collectives.leaving(program)
        self._arenas = {}
        if self.device.type != "cpu":
            return
        for axes in sorted({i.box.axes for i in program.collectives}):
            self._open_arena(axes, program)
        if in_order:
            by_name = {i.name: i for i in program.instrs}
            needs = []
            lives = p2p_collectives.lives(program)
            for name, (first, last) in lives.items():
                shapes = [p.local(self.mesh, self.rank).shape for p in by_name[name].outs if p]
                dtype = DTYPES[by_name[name].ins[0].spec.dtype]
                needs.append((name, p2p_collectives.carved_bytes(shapes, dtype), first, last))
            self._given = self._slots.assign(needs)
            self._assigned({name: last for name, (_, last) in lives.items()})

    def close(self) -> None:
        """Leave the process groups that were made here, with their threads; no exchange may be under way."""
        for talk in self._groups.values():
            group = getattr(talk, "group", None)
            if group is not None and group is not self._all:
                dist.destroy_process_group(group)
        self._groups, self._arenas = {}, {}

    def _assigned(self, last: dict[str, int]) -> None:
        """Slots are given out; `last` is the last line that reads what lies in each. For those who check."""

    def ended(self, line: int) -> list[Tensor]:
        """Memory that nobody reads behind a line of the program that was prepared last, for those who check."""
        return []

    def _joined(self, axes: tuple[int, ...]) -> ProcessGroup:
        """The group of this rank along some axes; every rank makes those of all, in the same order."""
        done: set[tuple[int, ...]] = set()
        for rank in range(self.mesh.ranks):
            members = self.mesh.group(axes, self.mesh.coords(rank))
            if members in done:
                continue
            done.add(members)
            if len(members) == dist.get_world_size(self._all):
                group = self._all
            elif len(self.world) == dist.get_world_size():
                group = dist.new_group([self.world[r] for r in members])
            elif self.rank in members:  # those outside of this mesh are not here to take part
                group = dist.new_group([self.world[r] for r in members], use_local_synchronization=True)
            if self.rank in members:
                mine = C10dGroup(group)
        return mine

    def _open_arena(self, axes: tuple[int, ...], program: Program) -> None:
        """Memory shared by the ranks of a group, for all exchanges of a program that `shared` has a way for."""
        group, wants = self._groups[axes], ArenaNeeds()
        members = self.mesh.group(axes, self.mesh.coords(self.rank))
        if not self._shares or "gloo" not in group.backend or len(members) == 1:
            return
        leaving = {o.ref for o in program.outputs if o.kind not in PASSING}
        for instr in program.collectives:
            if instr.box.axes != axes:
                continue
            dtype = DTYPES[instr.ins[0].spec.dtype]
            boxes = [LocalBoxing.of(instr, self.mesh, self.rank, i) for i in range(len(instr.refs))]
            if instr.kind == "all_reduce":
                numel = sum(torch.Size(b.src).numel() for b in boxes)
                if len(boxes) > 1 or Ref(instr.name) in leaving:
                    wants.buckets[instr.name] = shm_collectives.bucket_bytes(numel, len(members), dtype)
                else:
                    wants.transient(shm_collectives.ShmAllReduce.need(numel, len(members), dtype))
            elif instr.kind == "all_gather":
                wants.transient(shm_collectives.ShmAllGather.need(boxes, dtype))
            elif instr.kind == "reduce_scatter":
                wants.transient(shm_collectives.ShmReduceScatter.need(boxes, dtype))
        if wants.buckets or any(wants.rings.values()):
            arena = self._arena(axes, members, wants)
            if arena is not None:
                self._arenas[axes] = arena

    def _arena(self, axes: tuple[int, ...], members: tuple[int, ...], wants: ArenaNeeds) -> ShmArena | None:
        group: Any = self._groups[axes]
        return ShmArena.open(group.group, members, members.index(self.rank), wants, self.timeout_s)

    def bucket(self, instr: Instr, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Bucket:
        """The buffer of a merged all-reduce."""
        arena = self._arenas.get(instr.box.axes)
        return Bucket(shapes, dtype, self.device, arena.buckets.get(instr.name) if arena else None)

    def exchange(self, instr: Instr, rank: int, copy: bool, bucket: Bucket | None, fill: Sequence[int]) -> Exchange:
        """The exchange of one collective."""
        group = self._groups[instr.box.axes]
        arena = self._arenas.get(instr.box.axes)
        found = self._shared(arena, instr, copy, bucket, fill) if arena else None
        if found is not None:
            return found
        if instr.kind == "all_reduce":
            return AllReduce(group, instr.box.reduction, copy, bucket, fill)
        boxes = [LocalBoxing.of(instr, self.mesh, self.rank, i) for i in range(len(instr.refs))]
        box = boxes[0]
        if instr.kind in ("all_gather", "reduce_scatter") and self.device.type == "cpu" and "gloo" in group.backend:
            wire = p2p_collectives.TaggedMessages(group, box, self._tag, self.world)
            self._tag += len(boxes) + 1
            dtype = DTYPES[instr.ins[0].spec.dtype]
            if instr.kind == "all_gather":
                return p2p_collectives.P2PAllGather(wire, boxes, dtype, self._given.get(instr.name))
            return p2p_collectives.P2PReduceScatter(wire, boxes, dtype, self._scratch, instr.name in self._leaving)
        if instr.kind == "all_gather":
            return AllGather(group, box) if len(boxes) == 1 else MergedGather(group, boxes)
        even = len(boxes) == 1 and box.src and box.src[box.take[0]] // box.take[1] % len(box.ranks) == 0
        if instr.kind == "reduce_scatter" and even and box.dst and group.backend == "nccl":
            return ReduceScatter(group, box)
        return AllToAll(group, boxes)

    def _shared(
        self, arena: ShmArena, instr: Instr, copy: bool, bucket: Bucket | None, fill: Sequence[int]
    ) -> Exchange | None:
        """The exchange through shared memory, if there is a way."""
        dtype, op = DTYPES[instr.ins[0].spec.dtype], instr.box.reduction
        boxes = [LocalBoxing.of(instr, self.mesh, self.rank, i) for i in range(len(instr.refs))]
        if instr.kind == "all_gather":
            return shm_collectives.ShmAllGather(arena, boxes, dtype, self._given.get(instr.name))
        if instr.kind == "reduce_scatter":
            return shm_collectives.ShmReduceScatter(arena, boxes, dtype, instr.name in self._leaving)
        if instr.kind == "all_reduce" and bucket is not None and bucket.segment is not None:
            return shm_collectives.ShmBucketAllReduce(bucket.segment, bucket.views, fill, bucket.flat.numel(), op)
        if instr.kind == "all_reduce" and bucket is None:
            return shm_collectives.ShmAllReduce(arena, boxes[0].src, dtype, op, copy)
        return None


class _Nothing:
    """The right shape without a word to anyone."""

    def __init__(self, instr: Instr, mesh: Mesh, rank: int, bucket: Bucket | None, fill: Sequence[int]) -> None:
        self.boxes = [LocalBoxing.of(instr, mesh, rank, i) for i in range(len(instr.refs))]
        self.bucket = bucket
        self.targets = [bucket.views[i] for i in fill] if bucket else []

    def start(self, *x: Tensor) -> Any:
        if self.bucket is not None and self.targets:
            foreach_copy(self.targets, list(x))
        return x

    def finish(self, handle: Any) -> Any:
        if self.bucket is not None:
            return self.bucket.views
        made = [self._shaped(box, x) for box, x in zip(self.boxes, handle, strict=True)]
        return made if len(made) > 1 else made[0]

    @staticmethod
    def _shaped(box: LocalBoxing, x: Tensor) -> Tensor:
        if box.kind == "all_reduce":
            return x
        if box.kind == "all_gather":
            d = box.give[0]
            return torch.cat([x.narrow(d, 0, min(s[d], x.shape[d])) for s in box.sources], d)
        return x.new_zeros(box.dst)


class Null:
    """No communication at all: what a program costs a rank besides."""

    tape: LineRecorder | None = None

    def __init__(self, mesh: Mesh, rank: int = 0, device: torch.device | str = "cpu") -> None:
        self.mesh, self.rank, self.device = mesh, rank, torch.device(device)

    def prepare(self, program: Program, in_order: bool = False) -> None:
        """Nothing to make."""

    def close(self) -> None:
        """Nothing to leave."""

    def ended(self, line: int) -> list[Tensor]:
        """Nothing is kept."""
        return []

    def bucket(self, instr: Instr, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Bucket:
        """The buffer of a merged all-reduce."""
        return Bucket(shapes, dtype, self.device)

    def exchange(self, instr: Instr, rank: int, copy: bool, bucket: Bucket | None, fill: Sequence[int]) -> Exchange:
        """An exchange that is none."""
        return _Nothing(instr, self.mesh, rank, bucket, fill)


def join_process_group(rank: int, world: int, address: str, backend: str = "gloo", timeout_s: float = 120.0) -> None:
    """Join a process group rendezvous on this machine through a file."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, f"file://{address}", timedelta(seconds=timeout_s), world, rank)

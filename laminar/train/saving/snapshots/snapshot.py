"""A rank's part of a checkpoint, copied out of what it trains with: the blocks it writes, and parts it sends to others.

Blocks lie one behind the other in one stretch of memory that is made once and used for every save. Buffers are copied
at once, because the next forward changes them; the rest may be copied beside the next forward and backward, by a
thread, and whoever changes weights or optimizer state waits for it (`JobState.about_to_change`).

A rank holds one copy of the blocks it writes and of the parts it sends, no more, whatever is gathered elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES
from laminar.capture.tensor_bytes import as_bytes
from laminar.checkpoint.format.block_grid import Slices, box_shape, within
from laminar.checkpoint.format.state_record import TensorKey
from laminar.errors import StateError
from laminar.train.saving.snapshots.snapshot_plan import PlannedBlock, SnapshotPlan, padded
from laminar.train.state.shards import StateShard
from laminar.train.world import World


class Snapshot:
    """Memory for a rank's blocks, and what is copied there."""

    def __init__(self, plan: SnapshotPlan, world: World, memory: memoryview) -> None:
        """`memory` has room for `plan.nbytes`."""
        self.plan, self.world, self._memory = plan, world, memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8) if plan.nbytes else torch.empty(0, dtype=torch.uint8)
        self._out: dict[int, Tensor] = {
            peer: torch.empty(size, dtype=torch.uint8)
            for peer in range(world.size)
            if (size := plan.bytes_of(plan.sent.get((world.rank, peer), ())))
        }
        """Messages to other ranks."""

    def block(self, number: int) -> memoryview:
        """The bytes of one of this rank's blocks."""
        begin = self.plan.offsets[number]
        return self._memory[begin : begin + self.plan.mine[number].nbytes]

    def copy(self, shards: Sequence[StateShard], buffers: bool) -> None:
        """Copy what this rank gives: all buffers, or everything else."""
        with torch.no_grad():
            for into, source in self._copies(HeldShards(shards), buffers):
                into.copy_(source)

    def _copies(self, held: HeldShards, buffers: bool) -> Iterator[tuple[Tensor, Tensor]]:
        plan, rank = self.plan, self.world.rank
        for number, share in enumerate(plan.mine):
            key = plan.tensors[share.tensor].key
            if (key.kind == "buffer") is buffers:
                room = self._room(number)
                for part in share.pieces:
                    if part.rank == rank:
                        yield room[within(part.box, share.box)], held.part(key, part.box)
        for peer, message in self._out.items():
            at = 0
            for t, box in plan.sent[rank, peer]:
                tensor = plan.tensors[t]
                size = math.prod(box_shape(box)) * tensor.item_bytes
                if (tensor.key.kind == "buffer") is buffers:
                    yield _typed(message[at : at + size], tensor.dtype, box_shape(box)), held.part(tensor.key, box)
                at += padded(size)

    def _room(self, number: int) -> Tensor:
        share, begin = self.plan.mine[number], self.plan.offsets[number]
        tensor = self.plan.tensors[share.tensor]
        size = share.nbytes
        return _typed(self._bytes[begin : begin + size], tensor.dtype, box_shape(share.box))

    def exchange(self, group: Any) -> None:
        """Send parts of others' blocks, and take those of mine; every rank calls this, after everything was copied."""
        world, plan = self.world, self.plan
        posted, arrived = [], {}
        for peer in range(world.size):
            size = plan.bytes_of(plan.sent.get((peer, world.rank), ()))
            if size:
                arrived[peer] = torch.empty(size, dtype=torch.uint8)
                posted.append(dist.P2POp(dist.irecv, arrived[peer], world.ranks[peer], group))
        for peer, message in self._out.items():
            posted.append(dist.P2POp(dist.isend, message, world.ranks[peer], group))
        for work in dist.batch_isend_irecv(posted) if posted else ():
            work.wait()
        at = dict.fromkeys(arrived, 0)
        for number, share in enumerate(plan.mine):
            for part in share.pieces:
                if part.rank != world.rank:
                    tensor, shape = plan.tensors[share.tensor], box_shape(part.box)
                    begin, size = at[part.rank], math.prod(shape) * tensor.item_bytes
                    at[part.rank] = begin + padded(size)
                    came = arrived[part.rank][begin : begin + size]
                    self._room(number)[within(part.box, share.box)].copy_(_typed(came, tensor.dtype, shape))


class HeldShards:
    """This rank's shards, by tensor, to find parts in."""

    def __init__(self, shards: Sequence[StateShard]) -> None:
        self._of: dict[TensorKey, list[tuple[Slices, Tensor]]] = {}
        for shard in shards:
            box = tuple(slice(*part.indices(n)) for part, n in zip(shard.index, shard.shape, strict=True))
            self._of.setdefault(TensorKey(shard.kind, shard.name, shard.entry), []).append((box, shard.tensor))

    def part(self, key: TensorKey, wanted: Slices) -> Tensor:
        """A view of a part that lies in one of the shards."""
        for box, tensor in self._of.get(key, ()):
            if all(a.start <= w.start and w.stop <= a.stop for a, w in zip(box, wanted, strict=True)):
                return tensor.detach()[within(wanted, box)] if wanted else tensor.detach()
        raise StateError(f"{key} does not lie where it lay when the save was planned")

    def block(self, plan: SnapshotPlan, share: PlannedBlock) -> memoryview:
        """The bytes of a block all of which is here."""
        tensor = plan.tensors[share.tensor]
        parts = [(p.box, self.part(tensor.key, p.box)) for p in share.pieces]
        if len(parts) == 1:
            whole = parts[0][1]
        else:
            whole = torch.empty(box_shape(share.box), dtype=DTYPES[tensor.dtype])
            for box, part in parts:
                whole[within(box, share.box)] = part
        return as_bytes(whole.cpu()).numpy().data


def _typed(flat: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Bytes as elements."""
    return flat.view(DTYPES[dtype]).reshape(shape)

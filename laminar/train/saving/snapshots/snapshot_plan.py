"""Who copies, sends and writes what of a state: worked out once, for as long as tensors lie as they do."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from laminar.capture.ops.torch_ops import DTYPE_NAMES
from laminar.checkpoint.format.block_grid import Slices, block_box, block_count, box_shape
from laminar.checkpoint.format.block_shares import BlockPiece, BlockShare, share_blocks
from laminar.checkpoint.format.hashing import HASH_BYTES
from laminar.checkpoint.format.state_record import StateRecord, TensorRecord, state_record
from laminar.errors import StateError
from laminar.train.saving.snapshots.state_boxes import TensorBoxes, all_boxes, boxes_told
from laminar.train.state.shards import StateShard
from laminar.train.world import World

ALIGN_BYTES = 64


@dataclass(frozen=True)
class PlannedBlock:
    """One block of the state, its writer, and the pieces it is made of."""

    tensor: int
    """Which of the tensors."""
    item_bytes: int
    box: Slices
    share: BlockShare

    @property
    def number(self) -> int:
        """Among the tensor's blocks."""
        return self.share.number

    @property
    def writer(self) -> int:
        """The rank that writes it."""
        return self.share.writer

    @property
    def pieces(self) -> tuple[BlockPiece, ...]:
        """What it is made of, and whose that is."""
        return self.share.pieces

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(box_shape(self.box)) * self.item_bytes


@dataclass(frozen=True)
class SnapshotPlan:
    """Who copies, sends and writes what: the same for every save while tensors lie as they do."""

    tensors: tuple[TensorBoxes, ...]
    shares: tuple[PlannedBlock, ...]
    """All blocks of the state."""
    mine: tuple[PlannedBlock, ...]
    """Those that this rank writes."""
    offsets: tuple[int, ...]
    """Where each of these lies in memory."""
    nbytes: int

    @staticmethod
    def of(tensors: Sequence[TensorBoxes], rank: int) -> SnapshotPlan:
        """For one rank; every rank has the same `tensors`."""
        shares = [
            PlannedBlock(i, t.item_bytes, block_box(t.shape, t.item_bytes, share.number), share)
            for i, (t, those) in enumerate(zip(tensors, share_blocks([t.spread for t in tensors]), strict=True))
            for share in those
        ]
        return SnapshotPlan.with_blocks(tensors, shares, [s for s in shares if s.writer == rank])

    @staticmethod
    def with_blocks(
        tensors: Sequence[TensorBoxes], shares: Sequence[PlannedBlock], mine: Sequence[PlannedBlock]
    ) -> SnapshotPlan:
        """With room for some of the blocks."""
        offsets, at = [], 0
        for share in mine:
            offsets.append(at)
            at += padded(share.nbytes)
        return SnapshotPlan(tuple(tensors), tuple(shares), tuple(mine), tuple(offsets), at)

    @cached_property
    def sent(self) -> dict[tuple[int, int], list[tuple[int, Slices]]]:
        """Tensors and parts of them that ranks send to ranks, in the order in which they stand in one message."""
        found: dict[tuple[int, int], list[tuple[int, Slices]]] = {}
        for block in self.shares:
            for piece in block.pieces:
                if piece.rank != block.writer:
                    found.setdefault((piece.rank, block.writer), []).append((block.tensor, piece.box))
        return found

    @cached_property
    def of_several_ranks(self) -> SnapshotPlan:
        """The same with those of this rank's blocks alone that other ranks have parts of."""
        mine = [s for s in self.mine if any(p.rank != s.writer for p in s.pieces)]
        return SnapshotPlan.with_blocks(self.tensors, self.shares, mine)

    def in_order(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The hashes of all blocks, from those of each rank's blocks one after the other."""
        at, out = [0] * len(hashes), []
        for share in self.shares:
            begin = at[share.writer]
            at[share.writer] = begin + HASH_BYTES
            out.append(hashes[share.writer][begin : begin + HASH_BYTES])
        return out

    def state(self, hashes: Sequence[bytes], scalars: Mapping[str, Any]) -> StateRecord:
        """The state whose blocks have these hashes."""
        records, at = [], 0
        for tensor in self.tensors:
            count = block_count(tensor.shape, tensor.item_bytes)
            records.append(TensorRecord(tensor.key, tensor.dtype, tensor.shape, b"".join(hashes[at : at + count])))
            at += count
        return state_record(records, scalars)

    def bytes_of(self, parts: Sequence[tuple[int, Slices]]) -> int:
        """How long such a message is."""
        return sum(padded(math.prod(box_shape(box)) * self.tensors[t].item_bytes) for t, box in parts)


class SnapshotPlanner:
    """Makes plans of a job's snapshots, and keeps the last one for as long as it holds."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._said: list[str] = []
        self._plan: SnapshotPlan | None = None

    def plan(self, shards: Sequence[StateShard]) -> SnapshotPlan:
        """The plan for what ranks hold now; every rank calls this."""
        mine = boxes_told([(s, _dtype(s)) for s in shards], self.world.rank)
        said = self.world.gather_objects(hashlib.sha256(repr(mine).encode()).hexdigest())
        if self._plan is None or said != self._said:
            everyone = self.world.gather_objects(mine)
            self._plan, self._said = SnapshotPlan.of(all_boxes(everyone), self.world.rank), said
        return self._plan


def padded(size: int) -> int:
    """Bytes with those after them that are left out, so that what follows begins where any element may."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _dtype(shard: StateShard) -> str:
    if shard.tensor.dtype not in DTYPE_NAMES:
        raise StateError(f"{shard.kind} {shard.name} {shard.entry} has dtype {shard.tensor.dtype}: it can't be saved")
    return DTYPE_NAMES[shard.tensor.dtype]

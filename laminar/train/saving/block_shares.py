"""Which rank writes which block of a state, and what others send it for that: the same answer on every rank.

Ranks hold boxes, a checkpoint has blocks. A block that lies inside of a box is written by one of the ranks that hold
the box, whichever has least to write so far, so replicas share the work. One that goes across boxes is written by a
rank that holds much of it, and the others' parts are sent to it. Cuts of plans mostly stand where blocks end, so
hardly anything is sent.

Of a buffer only its first owner counts: a model that runs as it is may have other buffers on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from laminar.checkpoint.format.block_grid import Slices, block_box, block_count, blocks_of_box, box_shape
from laminar.checkpoint.format.state_record import TensorKey
from laminar.ir.tensor import ITEM_BYTES
from laminar.train.state.shards import StateShard


@dataclass(frozen=True)
class BoxOwners:
    """A box of a tensor and the ranks that hold it."""

    box: Slices
    owners: tuple[int, ...]


@dataclass(frozen=True)
class TensorBoxes:
    """A tensor and the boxes that make all of it, each told by one rank."""

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[BoxOwners, ...]

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class BlockPart:
    """A part of a block, and the rank that gives it."""

    rank: int
    box: Slices
    """In the whole tensor."""


@dataclass(frozen=True)
class BlockShare:
    """One block, and who writes it out of which parts."""

    tensor: int
    """Which of the tensors."""
    number: int
    writer: int
    box: Slices
    parts: tuple[BlockPart, ...]

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(box_shape(self.box))


def boxes_of(shards: Iterable[tuple[StateShard, str]], rank: int) -> list[TensorBoxes]:
    """What a rank tells the others of: the boxes that it speaks for. Shards come with the names of their dtypes."""
    found: dict[TensorKey, TensorBoxes] = {}
    for shard, dtype in shards:
        if shard.owners[0] != rank:
            continue
        key = TensorKey(shard.kind, shard.name, shard.entry)
        box = tuple(slice(*part.indices(n)) for part, n in zip(shard.index, shard.shape, strict=True))
        owners = shard.owners if shard.kind != "buffer" else (rank,)
        before = found[key].boxes if key in found else ()
        found[key] = TensorBoxes(key, dtype, shard.shape, (*before, BoxOwners(box, owners)))
    return list(found.values())


def put_together(said: Iterable[Iterable[TensorBoxes]]) -> list[TensorBoxes]:
    """All tensors, by key, from what all ranks tell."""
    found: dict[TensorKey, TensorBoxes] = {}
    for tensors in said:
        for t in tensors:
            before = found[t.key].boxes if t.key in found else ()
            found[t.key] = TensorBoxes(t.key, t.dtype, t.shape, (*before, *t.boxes))
    return [found[key] for key in sorted(found)]


def block_shares(tensors: Sequence[TensorBoxes], ranks: int) -> list[BlockShare]:
    """All blocks in order, with their writers."""
    load = [0] * ranks
    out = []
    for number, tensor in enumerate(tensors):
        parts: list[list[tuple[Slices, tuple[int, ...]]]] = [
            [] for _ in range(block_count(tensor.shape, tensor.item_bytes))
        ]
        for held in tensor.boxes:
            for block, part in blocks_of_box(tensor.shape, tensor.item_bytes, held.box):
                parts[block].append((part, held.owners))
        for block, found in enumerate(parts):
            out.append(_shared(number, tensor, block, found, load))
    return out


def _shared(
    number: int, tensor: TensorBoxes, block: int, found: Sequence[tuple[Slices, tuple[int, ...]]], load: list[int]
) -> BlockShare:
    box = block_box(tensor.shape, tensor.item_bytes, block)
    largest = max(math.prod(box_shape(part)) for part, _ in found)
    able = {r for part, owners in found if math.prod(box_shape(part)) == largest for r in owners}
    writer = min(able, key=lambda r: (load[r], r))
    load[writer] += math.prod(box_shape(box)) * tensor.item_bytes
    parts = tuple(BlockPart(writer if writer in owners else min(owners), part) for part, owners in found)
    return BlockShare(number, block, writer, box, parts)

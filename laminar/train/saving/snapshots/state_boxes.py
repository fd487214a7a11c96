"""What ranks tell each other of a state before it is saved: for every tensor the boxes that make all of it.

From these every rank works out alone who writes which block (`checkpoint/format/block_shares.py`). A box is told by the
first of its owners. Of a buffer only that one counts: a model that runs as it is may have other buffers on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from laminar.checkpoint.format.block_shares import HeldBox, SpreadTensor
from laminar.checkpoint.format.state_record import TensorKey
from laminar.ir.tensor import ITEM_BYTES
from laminar.train.state.shards import StateShard


@dataclass(frozen=True)
class TensorBoxes:
    """A tensor and the boxes that make all of it, each told by one rank."""

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[HeldBox, ...]

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def spread(self) -> SpreadTensor:
        """As those see it who deal blocks out."""
        return SpreadTensor(self.shape, self.item_bytes, self.boxes)


def boxes_told(shards: Iterable[tuple[StateShard, str]], rank: int) -> list[TensorBoxes]:
    """What a rank tells the others of. Shards come with the names of their dtypes."""
    found: dict[TensorKey, TensorBoxes] = {}
    for shard, dtype in shards:
        if shard.owners[0] != rank:
            continue
        key = TensorKey(shard.kind, shard.name, shard.entry)
        box = tuple(slice(*part.indices(n)) for part, n in zip(shard.index, shard.shape, strict=True))
        owners = shard.owners if shard.kind != "buffer" else (rank,)
        before = found[key].boxes if key in found else ()
        found[key] = TensorBoxes(key, dtype, shard.shape, (*before, HeldBox(box, owners)))
    return list(found.values())


def all_boxes(said: Iterable[Iterable[TensorBoxes]]) -> list[TensorBoxes]:
    """All tensors, by key, from what all ranks tell."""
    found: dict[TensorKey, TensorBoxes] = {}
    for tensors in said:
        for t in tensors:
            before = found[t.key].boxes if t.key in found else ()
            found[t.key] = TensorBoxes(t.key, t.dtype, t.shape, (*before, *t.boxes))
    return [found[key] for key in sorted(found)]

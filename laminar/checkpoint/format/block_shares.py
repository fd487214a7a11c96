"""Who writes which block of a state that lies on many ranks, and what has to be sent for it.

Each tensor's boxes, with the ranks that hold them, are known to every rank; so is all that is decided here. A block is
written by a rank that holds most of it, of several the one with the least to write so far: replicas share the work.
What a writer lacks of a block is sent by one who holds it. With shards that end where blocks do, nothing is sent.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.checkpoint.format.block_grid import Slices, block_box, block_count, blocks_of_box, box_shape, within
from laminar.errors import CheckpointError


@dataclass(frozen=True)
class HeldBox:
    """A box of a tensor, and all ranks that hold it. The boxes of a tensor cover it and don't overlap."""

    box: Slices
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SpreadTensor:
    """A tensor that lies on ranks."""

    shape: tuple[int, ...]
    item_bytes: int
    held: tuple[HeldBox, ...]


@dataclass(frozen=True)
class BlockPiece:
    """A part of a block, and the rank it comes from."""

    rank: int
    box: Slices
    """In the whole tensor."""


@dataclass(frozen=True)
class BlockShare:
    """One block's writer, and the pieces the block consists of: of those of other ranks, each is sent to the writer."""

    number: int
    writer: int
    pieces: tuple[BlockPiece, ...]


def share_blocks(tensors: Sequence[SpreadTensor]) -> list[list[BlockShare]]:
    """For each tensor its blocks in order, with their writers. Every rank gets the same answer."""
    load: Counter[int] = Counter()
    return [_shares(tensor, load) for tensor in tensors]


def _shares(tensor: SpreadTensor, load: Counter[int]) -> list[BlockShare]:
    parts: dict[int, list[tuple[HeldBox, Slices]]] = defaultdict(list)
    for held in tensor.held:
        for number, box in blocks_of_box(tensor.shape, tensor.item_bytes, held.box):
            parts[number].append((held, box))
    out = []
    for number in range(block_count(tensor.shape, tensor.item_bytes)):
        own: Counter[int] = Counter()
        for held, box in parts[number]:
            for rank in held.ranks:
                own[rank] += math.prod(box_shape(box))
        size = math.prod(box_shape(block_box(tensor.shape, tensor.item_bytes, number)))
        if sum(math.prod(box_shape(box)) for _, box in parts[number]) != size:
            raise CheckpointError(f"the boxes that ranks hold of a tensor of shape {list(tensor.shape)} don't tile it")
        writer = min(own, key=lambda rank: (-own[rank], load[rank], rank))
        load[writer] += size * tensor.item_bytes
        pieces = [
            BlockPiece(writer if writer in held.ranks else min(held.ranks, key=lambda r: (load[r], r)), box)
            for held, box in parts[number]
        ]
        out.append(BlockShare(number, writer, tuple(pieces)))
    return out


def block_from_pieces(block: Slices, pieces: Iterable[tuple[Slices, NDArray[Any]]]) -> NDArray[Any]:
    """A block's content, contiguous; the pieces' own memory where there is one that is the block."""
    listed = list(pieces)
    if len(listed) == 1 and box_shape(listed[0][0]) == box_shape(block):
        return np.ascontiguousarray(listed[0][1]).reshape(box_shape(block))
    out = np.empty(box_shape(block), listed[0][1].dtype)
    for box, content in listed:
        out[within(box, block)] = content
    return out

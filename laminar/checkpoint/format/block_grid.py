"""The grid that cuts a tensor into blocks: a function of its shape and its items' size alone.

A tensor of at most `BLOCK_BYTES` is one block. A larger one is halved across its longest dim until its blocks are small
enough, so blocks have from half of `BLOCK_BYTES` to all of it, about as many rows as columns, and their edges stand at
multiples of ceil(n / 2^k): where `torch.chunk` over 2, 4, 8 ranks cuts as well, whichever dim a plan splits. Who holds
what is not asked: the same weights have the same blocks in every layout.

Blocks are numbered in row-major order of the grid. A box is a slice per dim of the whole tensor, with its bounds said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

BLOCK_BYTES = 4 << 20
"""The most bytes a block has; part of the format."""
Slices = tuple[slice, ...]
"""A box of a tensor: one slice per dim."""


def block_shape(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """What a block is at most; those at the far edges are smaller."""
    sizes = list(shape)
    while math.prod(sizes) * item_bytes > BLOCK_BYTES:
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[longest] = -(-sizes[longest] // 2)
    return tuple(sizes)


def grid_shape(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """How many blocks there are along each dim; a tensor without elements has none."""
    if 0 in shape:
        return (0,) * len(shape)
    return tuple(-(-n // b) for n, b in zip(shape, block_shape(shape, item_bytes), strict=True))


def block_count(shape: Sequence[int], item_bytes: int) -> int:
    """How many blocks a tensor has; one for a scalar."""
    return math.prod(grid_shape(shape, item_bytes))


def block_box(shape: Sequence[int], item_bytes: int, number: int) -> Slices:
    """Where in the whole tensor a block lies."""
    place = []
    for count in reversed(grid_shape(shape, item_bytes)):
        number, at = divmod(number, count)
        place.append(at)
    blocks = block_shape(shape, item_bytes)
    return tuple(slice(at * b, min(n, (at + 1) * b)) for n, b, at in zip(shape, blocks, reversed(place), strict=True))


def blocks_of_box(shape: Sequence[int], item_bytes: int, box: Slices) -> Iterator[tuple[int, Slices]]:
    """Blocks that a box touches, with the part of the box that lies in each."""
    if math.prod(box_shape(box)) == 0:
        return
    blocks, counts = block_shape(shape, item_bytes), grid_shape(shape, item_bytes)
    touched = [range(s.start // b, -(-s.stop // b)) for s, b in zip(box, blocks, strict=True)]
    for place in product(*touched):
        number = 0
        for at, count in zip(place, counts, strict=True):
            number = number * count + at
        edges = zip(box, place, blocks, strict=True)
        yield number, tuple(slice(max(s.start, at * b), min(s.stop, (at + 1) * b)) for s, at, b in edges)


def box_shape(box: Slices) -> tuple[int, ...]:
    """How long a box is along each dim."""
    return tuple(s.stop - s.start for s in box)


def whole_box(shape: Sequence[int]) -> Slices:
    """All of a tensor."""
    return tuple(slice(0, n) for n in shape)


def overlap_of(one: Slices, other: Slices) -> Slices | None:
    """What two boxes share; nothing if that has no element."""
    shared = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return shared if all(s.start < s.stop for s in shared) else None


def within(box: Slices, outer: Slices) -> Slices:
    """A box, as seen from the first element of one around it."""
    return tuple(slice(s.start - o.start, s.stop - o.start) for s, o in zip(box, outer, strict=True))

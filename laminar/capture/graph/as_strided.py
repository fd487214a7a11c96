"""`as_strided`: memory seen in another way, written as views and picks of values.

A graph knows values and not where they lie. But a tensor whose elements fill a stretch of memory, each once, has an
order in it, and whatever `as_strided` sees inside that stretch is a choice of those elements: the tensor itself (torch
restrides what it has pooled), its dims in another order, or picks by a table (sliding windows, diagonals). What it
sees outside belongs to somebody else, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

StridedDims = tuple[int, ...]


@dataclass(frozen=True)
class StridedPath:
    """How to get there: dims in this order, as one dim; then either sizes and another order, or picks by a table."""

    order: StridedDims
    sizes: StridedDims = ()
    back: StridedDims = ()
    table: NDArray[np.int64] | None = None
    same: bool = False
    """Nothing to do."""


def in_memory(shape: Sequence[int], stride: Sequence[int]) -> StridedDims | None:
    """Dims from the slowest to the fastest, if their elements fill a stretch of memory, each once."""
    order = sorted(range(len(shape)), key=lambda d: (-stride[d] if shape[d] > 1 else -math.inf, d))
    run = 1
    for d in reversed(order):
        if shape[d] > 1 and stride[d] != run:
            return None
        run *= shape[d]
    return tuple(order)


def seen(
    shape: Sequence[int], stride: Sequence[int], offset: int, size: Sequence[int], new: Sequence[int], start: int
) -> StridedPath | None:
    """`as_strided(size, new, start)` of a tensor that lies as given; None if it sees anything else."""
    numel, order = math.prod(shape), in_memory(shape, stride)
    if order is None or not numel or not math.prod(size):
        return None
    alike = tuple(size) == tuple(shape) and all(a == b for n, a, b in zip(shape, stride, new, strict=True) if n > 1)
    if alike and start == offset:
        return StridedPath(order, same=True)
    turned = in_memory(size, new)
    if turned is not None and start == offset and math.prod(size) == numel:
        back = tuple(sorted(range(len(size)), key=lambda d: turned[d]))
        return StridedPath(order, tuple(size[d] for d in turned), back)
    table = np.full((), start - offset, np.int64)
    for n, s in zip(size, new, strict=True):
        table = table[..., None] + np.arange(n, dtype=np.int64) * s
    return StridedPath(order, table=table) if table.min() >= 0 and table.max() < numel else None

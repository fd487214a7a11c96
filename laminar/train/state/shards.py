"""A shard of a run's state: which part of which tensor it is in global coordinates, its numbers, and who has it.

A rank's part of a tensor is one box of it, or several: a packed dim (`S(0, blocks=3)`) gives a rank a piece of every
block. Each box is a shard of its own, so a shard is always one slice per dim of the whole tensor. Whoever writes a
checkpoint or looks for a copy of what a lost rank had needs nothing else; nobody is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

import numpy as np
from torch import Tensor

from laminar.checkpoint.format.block_grid import Slices
from laminar.ir.mesh import Place
from laminar.ir.sbp import NdSbp, Split, local_indices


@dataclass(frozen=True)
class StateShard:
    """One box of one tensor of the state, as this rank holds it."""

    kind: str
    """"parameter", "buffer", "optimizer" or "average"."""
    name: str
    """Of the parameter or buffer in the model."""
    entry: str
    """Which entry of the optimizer's state, such as "exp_avg"; else empty."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    index: Slices
    """Where in the whole tensor this box lies."""
    tensor: Tensor
    """The box itself: a view of what the job trains with, which the next step changes."""
    owners: tuple[int, ...]
    """Ranks of the world that hold this box, at the tensor's home; the first of them speaks for it."""


@lru_cache(maxsize=1 << 12)
def boxes(
    shape: tuple[int, ...], nd: NdSbp, sizes: tuple[int, ...], coords: tuple[int, ...]
) -> tuple[tuple[Slices, Slices], ...]:
    """Boxes that a rank holds of a tensor: where each lies in the whole, and where in the rank's own part."""
    runs = [_runs(index) for index in local_indices(shape, nd, sizes, coords)]
    return tuple((tuple(w for w, _ in box), tuple(m for _, m in box)) for box in product(*runs))


def _runs(index: np.ndarray) -> list[tuple[slice, slice]]:
    """Stretches of consecutive numbers, and where they stand."""
    if not len(index):
        return []
    ends = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    return [(slice(int(index[a]), int(index[b - 1]) + 1), slice(a, b)) for a, b in pairwise(ends)]


def owners_of(nd: NdSbp, place: Place, rank: int) -> tuple[int, ...]:
    """Ranks of a place that hold the same of a tensor as one of them does."""
    here = place.coords(rank)
    split = [a for a, p in enumerate(nd) if isinstance(p, Split) and place.mesh.sizes[a] > 1]
    return tuple(r for r in place.ranks if all(place.coords(r)[a] == here[a] for a in split))


def shards_of(
    kind: str, name: str, entry: str, shape: tuple[int, ...], nd: NdSbp, place: Place, rank: int, tensor: Tensor
) -> Iterator[StateShard]:
    """The shards that a rank at a tensor's home has of it."""
    owners = owners_of(nd, place, rank)
    for index, mine in boxes(shape, nd, place.mesh.sizes, place.coords(rank)):
        yield StateShard(kind, name, entry, shape, index, tensor[mine] if mine else tensor, owners)

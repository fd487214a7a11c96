"""Who holds which indices of a dim, as intervals: the geometry under crossings.

A dim is cut by some axes of a mesh, one after the other, into sets; each set is a union of intervals, and sets of one
side don't overlap. Local tensors keep indices in ascending order, so where an index lies in a local dim is how many of
its set come before it. One sweep over the intervals of two sides tells which sets meet, and where: the work grows
with the number of intervals, never with the size of the dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from laminar.ir.mesh import Place
from laminar.ir.sbp import NdSbp, Partial, Split, chunk
from laminar.ir.tensor import TensorSpec

Intervals = tuple[tuple[int, int], ...]
"""Indices of one dim as (start, stop), ascending, with gaps between them."""
IndexRegion = tuple[Intervals, ...]
"""Intervals of every dim: the indices that are in all of them."""
Key = tuple[int, ...]
"""Coordinates on the axes that cut a dim: they say which of its sets a rank holds."""
Cuts = tuple[tuple[int, int], ...]
"""(parts, blocks) of each axis that cuts a dim, in mesh order."""


@dataclass(frozen=True, slots=True)
class CommonPart:
    """Indices of a dim that a source and a destination rank have in common."""

    index: Intervals
    """Of the whole dim."""
    at_src: Intervals
    """Of the source's local dim."""
    at_dst: Intervals
    """Of the destination's."""
    size: int
    """How many."""

    def rows(self, start: int, stop: int) -> CommonPart:
        """Some of them, counted in order."""
        index, at_src, at_dst = (take(held, start, stop) for held in (self.index, self.at_src, self.at_dst))
        return CommonPart(index, at_src, at_dst, stop - start)


def cuts_of(shape: tuple[int, ...], nd: NdSbp, sizes: tuple[int, ...]) -> tuple[list[list[int]], list[Cuts]]:
    """For each dim the axes that cut it, and how."""
    axes: list[list[int]] = [[] for _ in shape]
    cuts: list[list[tuple[int, int]]] = [[] for _ in shape]
    for a, p in enumerate(nd):
        if isinstance(p, Split):
            axes[p.dim].append(a)
            cuts[p.dim].append((sizes[a], p.blocks))
    return axes, [tuple(c) for c in cuts]


def take(held: Intervals, start: int, stop: int) -> Intervals:
    """Elements `start` to `stop` of those in the intervals, counted in order."""
    out = []
    at = 0
    for a, b in held:
        low, high = max(start, at), min(stop, at + b - a)
        if low < high:
            out.append((a + low - at, a + high - at))
        at += b - a
        if at >= stop:
            break
    return tuple(out)


@lru_cache(maxsize=1 << 12)
def sets(n: int, cuts: Cuts) -> dict[Key, Intervals]:
    """Every set that a dim of `n` is cut into."""
    out: dict[Key, Intervals] = {(): ((0, n),) if n else ()}
    for parts, blocks in cuts:
        finer: dict[Key, Intervals] = {}
        for key, held in out.items():
            block = sum(b - a for a, b in held) // blocks
            for part in range(parts):
                start, length = chunk(block, parts, part)
                stretches = (take(held, k * block + start, k * block + start + length) for k in range(blocks))
                finer[(*key, part)] = _joined(s for stretch in stretches for s in stretch)
        out = finer
    return out


@lru_cache(maxsize=1 << 12)
def meet(n: int, src: Cuts, dst: Cuts) -> dict[Key, dict[Key, CommonPart]]:
    """For each set of the destination, the sets of the source that it meets, and where."""
    left, right = (
        sorted((a, b, b - done, key) for key, held in sets(n, cuts).items() for a, b, done in _counted(held))
        for cuts in (src, dst)
    )
    pieces: dict[Key, dict[Key, list[tuple[int, int, int, int]]]] = {}
    i = j = 0
    while i < len(left) and j < len(right):
        (a, b, shift, key), (c, d, other, want) = left[i], right[j]
        low, high = max(a, c), min(b, d)
        pieces.setdefault(want, {}).setdefault(key, []).append((low, high, shift, other))
        i, j = i + (b == high), j + (d == high)
    return {want: {key: _part(row[key]) for key in sorted(row)} for want, row in pieces.items()}


def _part(found: list[tuple[int, int, int, int]]) -> CommonPart:
    """Stretches of a dim, as (start, stop, shift from the sender's, shift from the receiver's)."""
    if len(found) == 1:  # by far the most
        ((low, high, shift, other),) = found
        return CommonPart(((low, high),), ((low - shift, high - shift),), ((low - other, high - other),), high - low)
    return CommonPart(
        _joined((low, high) for low, high, _, _ in found),
        _joined((low - shift, high - shift) for low, high, shift, _ in found),
        _joined((low - shift, high - shift) for low, high, _, shift in found),
        sum(high - low for low, high, _, _ in found),
    )


def _counted(held: Intervals) -> Iterator[tuple[int, int, int]]:
    """Intervals, each with how many elements there are up to its end."""
    done = 0
    for a, b in held:
        done += b - a
        yield a, b, done


def _joined(pieces: Iterable[tuple[int, int]]) -> Intervals:
    """Ascending intervals with neighbours made one."""
    out: list[tuple[int, int]] = []
    for a, b in pieces:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)


# --- two sides --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 8)
def coords_of(place: Place) -> dict[int, Key]:
    """Where every rank of a place stands."""
    return {rank: place.mesh.coords(position) for position, rank in enumerate(place.ranks)}


class Goal:
    """The destination: groups of ranks that share one wanted shard, of which each number needs to be in one place."""

    def __init__(self, spec: TensorSpec, place: Place, nd: NdSbp) -> None:
        self.spec, self.place, self.nd = spec, place, nd
        self.op = next((p.op for p in nd if isinstance(p, Partial)), "")
        axes, self.cuts = cuts_of(spec.shape, nd, place.mesh.sizes)
        self.groups: dict[Key, list[int]] = {}
        """By their coordinates, those on partial axes zero: the ranks, in mesh order."""
        self.keys: dict[Key, tuple[Key, ...]] = {}
        """Which set of each dim a group wants."""
        for rank, coords in coords_of(place).items():
            group = tuple(0 if isinstance(p, Partial) else c for p, c in zip(nd, coords, strict=True))
            self.groups.setdefault(group, []).append(rank)
            self.keys[group] = tuple(tuple(coords[a] for a in cut) for cut in axes)
        self.slots = math.prod(n for p, n in zip(nd, place.mesh.sizes, strict=True) if isinstance(p, Partial))


Shard = tuple[tuple[Key, ...], Key]
"""Which set of each dim, and which term where the source stays partial."""


class Source:
    """The source as it lies when messages leave."""

    def __init__(self, spec: TensorSpec, place: Place, nd: NdSbp, goal: Goal) -> None:
        self.place = place
        self.axes, cuts = cuts_of(spec.shape, nd, place.mesh.sizes)
        self.meets = [meet(n, mine, yours) for n, mine, yours in zip(spec.shape, cuts, goal.cuts, strict=True)]
        self.partial = [a for a, p in enumerate(nd) if isinstance(p, Partial)]
        self.terms = list(itertools.product(*(range(place.mesh.sizes[a]) for a in self.partial)))
        self.coords = coords_of(place)
        self.held: dict[int, Shard | None] = {}

    def shard(self, rank: int) -> Shard | None:
        """What a rank holds; None if it is elsewhere."""
        if rank not in self.held:
            coords = self.coords.get(rank)
            if coords is None:
                self.held[rank] = None
            else:
                keys = tuple(tuple(coords[a] for a in cut) for cut in self.axes)
                self.held[rank] = keys, tuple(coords[a] for a in self.partial)
        return self.held[rank]

    def common(self, keys: tuple[Key, ...], want: tuple[Key, ...]) -> int:
        """How many elements of a shard a group wants."""
        parts = [sets.get(w, {}).get(k) for sets, k, w in zip(self.meets, keys, want, strict=True)]
        return math.prod(part.size if part else 0 for part in parts)

    def regions(self, want: tuple[Key, ...]) -> Iterator[tuple[tuple[Key, ...], tuple[CommonPart, ...]]]:
        """The shards that a group wants something of, and what."""
        for found in itertools.product(*(sets.get(w, {}).items() for sets, w in zip(self.meets, want, strict=True))):
            yield tuple(k for k, _ in found), tuple(part for _, part in found)

"""The machine, as placements see it: ranks on named axes.

A mesh is plain data: it says how many ranks there are and how they are arranged, never what runs
on them. Ranks are numbered row by row, the last axis fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from laminar.errors import MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One hop between two devices, measured in one direction."""

    latency_s: float
    """Seconds until the first byte arrives, the launch of the transfer included."""
    bytes_per_s: float
    """Steady rate once bytes flow: payload, not bytes on the wire."""

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(f"Link needs latency_s >= 0 and bytes_per_s > 0, got {self}")


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes and their sizes; `Mesh({"dp": 2, "tp": 4})` has 8 ranks."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, axes: Mapping[str, int]) -> None:
        for name, size in axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(f"axis {name!r} has size {size!r}", allowed="a whole number of at least 1")
            if not name.isidentifier():
                raise MeshError(f"{name!r} is not an axis name", allowed="letters, digits and _")
        if not axes:
            raise MeshError("a mesh needs at least one axis", next='for one rank write Mesh({"dp": 1})')
        object.__setattr__(self, "names", tuple(axes))
        object.__setattr__(self, "sizes", tuple(axes.values()))

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return math.prod(self.sizes)

    def coords(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands on each axis."""
        return _coords(self.sizes, rank)

    def rank(self, coords: tuple[int, ...]) -> int:
        """The rank that stands at `coords`."""
        out = 0
        for at, size in zip(coords, self.sizes, strict=True):
            out = out * size + at
        return out

    def axis(self, name: str) -> int:
        """Position of a named axis."""
        if name not in self.names:
            raise MeshError(f"no axis {name!r} in {self}", allowed="  ".join(self.names))
        return self.names.index(name)

    def group(self, axes: tuple[int, ...], coords: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks that differ from the one at `coords` on `axes` only, in mesh order."""
        return _group(self.sizes, axes, coords)

    def groups(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """All such groups; each rank is in one."""
        return _groups(self.sizes, axes)

    def __str__(self) -> str:
        return "Mesh(" + ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) + ")"

    def to_json(self) -> dict[str, int]:
        """Axis names to sizes, in order."""
        return dict(zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True)
class Place:
    """A set of ranks of the world, arranged as a mesh: the i-th of them stands where the mesh has its rank i."""

    ranks: tuple[int, ...]
    mesh: Mesh

    def __post_init__(self) -> None:
        if len(self.ranks) != self.mesh.ranks:
            raise MeshError(f"{len(self.ranks)} ranks can't be arranged as {self.mesh}")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise MeshError(f"{list(self.ranks)} is not a set of ranks", allowed="whole numbers from 0, each once")

    def coords(self, rank: int) -> tuple[int, ...]:
        """Where a rank of the world stands on the mesh; it must be here."""
        return self.mesh.coords(self.ranks.index(rank))

    def __str__(self) -> str:
        return f"{self.mesh} on ranks {', '.join(map(str, self.ranks))}"


@lru_cache(maxsize=1 << 16)
def _coords(sizes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    out = []
    for size in reversed(sizes):
        rank, at = divmod(rank, size)
        out.append(at)
    return tuple(reversed(out))


@lru_cache(maxsize=1 << 16)
def _group(sizes: tuple[int, ...], axes: tuple[int, ...], coords: tuple[int, ...]) -> tuple[int, ...]:
    out, stride = [0], 1
    for a in range(len(sizes) - 1, -1, -1):
        steps = range(sizes[a]) if a in axes else (coords[a],)
        out = [stride * c + r for c in steps for r in out]
        stride *= sizes[a]
    return tuple(out)


@lru_cache(maxsize=1 << 8)
def _groups(sizes: tuple[int, ...], axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    others = [range(n) if a not in axes else (0,) for a, n in enumerate(sizes)]
    return tuple(_group(sizes, axes, coords) for coords in product(*others))

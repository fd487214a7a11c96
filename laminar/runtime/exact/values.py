"""Values of a program of logical ranks, as one process has them: once, for each unit of the batch, or stacked.

A value differs between logical ranks along those axes on which it is not broadcast; there is one *instance* of it for
each of their coordinates, whichever logical ranks have it. What differs by unit is kept apart, or stacked: the rows of
all units that are here one behind the other, which lets an op run once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from laminar.ir.exact import Hosting
from laminar.ir.mesh import Mesh
from laminar.ir.program import Placed
from laminar.ir.sbp import B

UNIT = 0
"""The mesh axis of the units."""
LaneKey = tuple[int, ...]
"""Coordinates on the axes besides the units that a value differs along."""


def varies(placed: Placed) -> tuple[int, ...]:
    """The axes along which logical ranks have other instances of a tensor."""
    return tuple(a for a, p in enumerate(placed.nd) if p != B)


def beside_units(axes: Sequence[int]) -> tuple[int, ...]:
    """Those of these axes that are not the units'."""
    return tuple(a for a in axes if a != UNIT)


@dataclass(frozen=True)
class HostedLane:
    """The logical ranks here with some coordinates besides the unit; of those alike but for that, the first."""

    axes: tuple[int, ...]
    key: LaneKey
    units: tuple[int, ...]
    ranks: tuple[int, ...]
    """For each unit a logical rank that has it."""

    def narrowed(self, axes: tuple[int, ...]) -> LaneKey:
        """The coordinates on some of the axes."""
        return tuple(k for a, k in zip(self.axes, self.key, strict=True) if a in axes)


class HostedLanes:
    """Which instances a process has."""

    def __init__(self, mesh: Mesh, hosting: Hosting, process: int) -> None:
        self.mesh, self.hosting, self.process = mesh, hosting, process
        self.hosted = hosting.hosted(process)
        self.along = cache(self._along)

    def _along(self, axes: tuple[int, ...]) -> tuple[HostedLane, ...]:
        """The lanes of what differs along these axes and by unit."""
        rest = beside_units(axes)
        found: dict[LaneKey, dict[int, int]] = {}
        for rank in self.hosted:
            coords = self.mesh.coords(rank)
            found.setdefault(tuple(coords[a] for a in rest), {}).setdefault(coords[UNIT], rank)
        return tuple(HostedLane(rest, key, tuple(units), tuple(units.values())) for key, units in sorted(found.items()))


def stack_units(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Units' tensors one behind the other, the dims in memory in the order that each of them has."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_contiguous():
        return torch.cat(list(parts), dim)
    strides = parts[0].stride()
    order = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
    back = sorted(range(len(strides)), key=order.__getitem__)
    return torch.cat([p.permute(order) for p in parts], order.index(dim)).permute(back)


@dataclass
class Instances:
    """The instances of a value in one lane."""

    units: tuple[int, ...] = ()
    """Nothing: it does not differ by unit."""
    once: Tensor | None = None
    each: dict[int, Tensor] = field(default_factory=dict)
    stacked: Tensor | None = None
    dim: int = 0

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Instances:
        """The same with every tensor changed in a way that concerns no unit by itself."""
        if self.once is not None:
            return Instances(once=change(self.once))
        if self.stacked is not None and self.each.keys() <= set(self.units):
            return Instances(self.units, stacked=change(self.stacked), dim=self.dim)
        units = dict.fromkeys((*self.units, *self.each))
        return Instances(self.units, each={u: change(self.of(u)) for u in units})

    def of(self, unit: int) -> Tensor:
        """A unit's own."""
        if self.once is not None:
            return self.once
        found = self.each.get(unit)
        if found is None:
            assert self.stacked is not None
            self.each.update(zip(self.units, self.stacked.chunk(len(self.units), self.dim), strict=True))
            found = self.each[unit]
        return found

    def together(self, units: tuple[int, ...], dim: int) -> Tensor:
        """Those of some units, stacked; what does not differ by unit as it is."""
        if self.stacked is not None and self.units == units:
            return self.stacked
        if self.once is not None:
            return self.once
        made = stack_units([self.of(u) for u in units], dim)
        if self.units == units:
            self.stacked, self.dim = made, dim
        return made


LaneValues = dict[LaneKey, Instances]
"""All instances of a value that a process has."""

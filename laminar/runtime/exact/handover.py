"""What a part of one stage gives a part of another: which instances of its values which process needs, and from whom.

A process that has an instance already takes its own; else the process of the first logical rank that has it sends it.
Tensors keep their order in memory on the way, since kernels give other bits for other strides: their strides travel
along. One that has gaps in memory or repeats itself is made dense first, whether or not it has to travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES
from laminar.errors import PlanError
from laminar.ir.mesh import Mesh
from laminar.ir.program import Placed
from laminar.lower.stages.stage_programs import Wire
from laminar.runtime.comm.tensor_messages import bundle_bytes, bundled, fills_memory, unbundled, without_gaps
from laminar.runtime.exact.stage_hosts import StageHosts
from laminar.runtime.exact.values import UNIT, HostedLanes, Instances, LaneKey, LaneValues, beside_units, varies

EVERY_UNIT = -1
"""Stands for the unit of an instance that all units share."""


@dataclass(frozen=True)
class PassedInstance:
    """One instance of a value that passes between stages."""

    name: str
    key: LaneKey
    unit: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Handover:
    """The values that one part gives another, with all that this process has to do with them."""

    def __init__(self, wires: Sequence[Wire], hosts: StageHosts, mesh: Mesh, tag: int) -> None:
        """`wires` are of one part and first read by one part; `tag` tells their messages from those of others."""
        for wire in wires:
            if wire.src.nd != wire.dst.nd:
                raise PlanError(
                    f"{wire.edge.name} is {wire.src.nd} where it is made and {wire.dst.nd} where it is read"
                )
        self.hosts, self.mesh, self.tag = hosts, mesh, tag
        self.placed = {w.edge.name: w.src for w in wires}
        self.src, self.dst = wires[0].edge.src, wires[0].edge.dst
        self.wanted = {q: self._wanted(q) for q in hosts.members[self.dst]}
        """For each process that reads: the instances it needs, and from whom."""

    @property
    def reads(self) -> bool:
        """Whether this process needs some of it."""
        return self.hosts.process in self.wanted

    @cached_property
    def lanes(self) -> HostedLanes:
        """The lanes of this process in the stage that reads."""
        ranks = self.hosts.ranks[self.dst]
        assert ranks is not None
        return HostedLanes(self.mesh, ranks.hosting, ranks.process)

    def _wanted(self, process: int) -> dict[PassedInstance, int]:
        out: dict[PassedInstance, int] = {}
        makers, readers = self.hosts.of[self.src], self.hosts.of[self.dst]
        for name, placed in self.placed.items():
            axes = varies(placed)
            holders: dict[tuple[LaneKey, int], list[int]] = {}
            for rank, maker in enumerate(makers):
                holders.setdefault(self._instance(rank, axes), []).append(maker)
            for rank, reader in enumerate(readers):
                if reader == process:
                    key, unit = at = self._instance(rank, axes)
                    item = PassedInstance(name, key, unit, self._shape(placed, rank), DTYPES[placed.spec.dtype])
                    out[item] = process if process in holders[at] else holders[at][0]
        return out

    def _instance(self, rank: int, axes: tuple[int, ...]) -> tuple[LaneKey, int]:
        coords = self.mesh.coords(rank)
        return tuple(coords[a] for a in beside_units(axes)), coords[UNIT] if UNIT in axes else EVERY_UNIT

    def _shape(self, placed: Placed, rank: int) -> tuple[int, ...]:
        return tuple(placed.local(self.mesh, rank).shape)

    def send(self, made: Mapping[str, LaneValues]) -> None:
        """To every other process what it needs of this one."""
        me = self.hosts.process
        for process, items in self.wanted.items():
            mine = [i for i, source in items.items() if source == me] if process != me else []
            if mine:
                self.hosts.send(process, self.tag, bundled([made[i.name][i.key].of(i.unit) for i in mine]))

    def receive(self, made: Mapping[str, LaneValues]) -> dict[str, LaneValues]:
        """What this process needs, from others and from what it has made itself."""
        items, me = self.wanted[self.hosts.process], self.hosts.process
        got: dict[tuple[str, LaneKey, int], Tensor] = {}
        for source in sorted(set(items.values()) - {me}):
            theirs = [i for i, s in items.items() if s == source]
            kinds = [(i.shape, i.dtype) for i in theirs]
            data = self.hosts.receive(source, self.tag, bundle_bytes(kinds))
            for item, x in zip(theirs, unbundled(data, kinds), strict=True):
                got[item.name, item.key, item.unit] = x
        return {name: self._lanes_of(name, made.get(name, {}), got) for name in self.placed}

    def _lanes_of(self, name: str, made: LaneValues, got: Mapping[tuple[str, LaneKey, int], Tensor]) -> LaneValues:
        axes, out = varies(self.placed[name]), LaneValues()
        for lane in self.lanes.along(axes):
            known, units = made.get(lane.key), lane.units if UNIT in axes else (EVERY_UNIT,)
            if known is not None and known.units == lane.units and fills_memory(known.of(units[0])):
                out[lane.key] = known  # as it is, stacked or not
                continue
            sent = {u: got.get((name, lane.key, u)) for u in units}
            each = {u: without_gaps(made[lane.key].of(u)) if x is None else x for u, x in sent.items()}
            out[lane.key] = Instances(lane.units, each=each) if UNIT in axes else Instances(once=each[EVERY_UNIT])
        return out

"""A cluster of several kinds of device: clusters of one kind each, joined by one more level of links.

    Cluster.preset("8xh100+8xa100")           Cluster.preset("2x8xh100+4x4xa100-40g@@eth100")

Devices are numbered part by part: the first part's come first. Every part is an ordinary cluster; what asks for *the*
device, or for the levels, of a mixed cluster is refused and told to ask a part (`on`, `parts`). Parts may also be of
one kind and different shape, which is what is left of a cluster that has lost devices (`without`).

Not covered: exchanges among ranks of different parts. Values pass between parts, from stage to stage, and that is all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

from laminar.errors import ClusterError
from laminar.ir.clusters.cluster import (
    CLUSTER_VERSION,
    Cluster,
    Device,
    Level,
    Reach,
    check_level,
    level_from,
    level_json,
)


class Mixed(Cluster):
    """Clusters of one kind each, and the links between them."""

    own: tuple[Cluster, ...]
    outer: Level
    """Links between parts; its size is their number."""

    def __init__(self, name: str, parts: Sequence[Cluster], outer: Level) -> None:
        kinds = [part.kind for part in parts]
        if len(parts) < 2:
            raise ClusterError(f"parts: {len(parts)}", allowed="at least 2; a cluster of one kind is a plain Cluster")
        for k, part in enumerate(parts):
            if isinstance(part, Mixed):
                raise ClusterError(f"parts[{k}]: {part.name} is mixed itself", next="list its parts instead")
            if part.kind != kinds[0]:
                raise ClusterError(f"parts[{k}]: {part.kind} beside {kinds[0]}", allowed="parts of one kind of backend")
        check_level(outer, "outer")
        values = {
            "name": name,
            "own": tuple(parts),
            "outer": replace(outer, name="parts", size=len(parts)),
            "backend": "nccl" if kinds[0] == "gpu" else "gloo",
            "profile": {},
            "collective_s": parts[0].collective_s,
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)

    # -- asked of a cluster --------------------------------------------------------------------

    @property
    def parts(self) -> tuple[Cluster, ...]:
        """Clusters of one kind each, in the order of their devices."""
        return self.own

    @property
    def device(self) -> Device:
        """Refused: there are several."""
        kinds = dict.fromkeys(p.device.name for p in self.parts)
        raise ClusterError(
            f"cluster {self.name} has no one device: {', '.join(kinds)}", next="ask one of its parts: cluster.on(ranks)"
        )

    @property
    def levels(self) -> tuple[Level, ...]:
        """Refused: each part has its own."""
        raise ClusterError(f"cluster {self.name} has levels of each part", next="ask one of its parts: cluster.parts")

    @property
    def kind(self) -> str:
        """`cpu` or `gpu`: the same for all parts."""
        return self.own[0].kind

    @cached_property
    def devices(self) -> int:
        """How many there are in all parts."""
        return sum(part.devices for part in self.parts)

    @cached_property
    def unit_devices(self) -> tuple[int, ...]:
        """Refused, as levels are."""
        return tuple(level.size for level in self.levels)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first device of each part."""
        return tuple(accumulate((part.devices for part in self.parts[:-1]), initial=0))

    def part_of(self, rank: int) -> int:
        """In which part a device is."""
        if not 0 <= rank < self.devices:
            raise ClusterError(f"rank {rank} has no device in {self.name}", allowed=f"0 to {self.devices - 1}")
        return max(k for k, first in enumerate(self.firsts) if first <= rank)

    def on(self, ranks: Sequence[int]) -> Cluster:
        """The part on which all these ranks stand; ranks of two parts are refused by name."""
        found = sorted({self.part_of(r) for r in ranks})
        if len(found) != 1:
            names = " and ".join(self.parts[k].name for k in found)
            raise ClusterError(
                f"ranks {_span(ranks)} stand on {names}: a place must lie within one part of {self.name}",
                allowed="  ".join(f"{f} to {f + p.devices - 1}" for f, p in zip(self.firsts, self.parts, strict=True)),
                next="give each part stages of its own: laminar.plan(graph, cluster), or inner=[...] of plans.pipeline",
            )
        return self.parts[found[0]]

    def joining(self, ranks: Sequence[int]) -> Level:
        """The innermost level that has all these ranks: of their part, or between parts."""
        found = {self.part_of(r) for r in ranks}
        if len(found) > 1:
            return self.outer
        (k,) = found
        return self.parts[k].joining([r - self.firsts[k] for r in ranks])

    def span(self, ranks: tuple[int, ...]) -> Reach:
        """As the part has it; groups over several parts are refused."""
        part = self.on(ranks)
        first = self.firsts[self.part_of(ranks[0])]
        return part.span(tuple(r - first for r in ranks))

    def with_profile(self, profile: Mapping[str, Any]) -> Cluster:
        """Refused: each part is measured by itself."""
        raise ClusterError(f"cluster {self.name} is mixed", next="measure each part, and join them: Mixed(...)")

    # -- plain data ----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain data: the parts', and the level that joins them."""
        return {
            "version": CLUSTER_VERSION,
            "name": self.name,
            "parts": [part.to_json() for part in self.parts],
            "outer": level_json(self.outer),
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixed) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        return f"Mixed({self.name!r})"

    def __str__(self) -> str:
        rate = self.outer.bytes_per_s
        lines = [
            f"cluster {self.name}: {self.devices} devices in {len(self.parts)} parts, joined by "
            f"{rate.value / 1e9:.4g} GB/s ({rate.source}: {rate.note})"
        ]
        for first, part in zip(self.firsts, self.parts, strict=True):
            lines += [f"devices {first} to {first + part.devices - 1}", *(f"  {x}" for x in str(part).splitlines())]
        return "\n".join(lines)


def mixed_from(data: Mapping[str, Any]) -> Mixed:
    """The inverse of `to_json`; what is missing or malformed is named."""
    for key in ("name", "parts", "outer"):
        if key not in data:
            raise ClusterError(f"{key}: missing from the description of a mixed cluster")
    if not isinstance(data["parts"], list):
        raise ClusterError("parts: not a list", allowed="a list of clusters")
    parts = []
    for k, one in enumerate(data["parts"]):
        try:
            parts.append(Cluster.from_json(one))
        except ClusterError as error:
            raise ClusterError(f"parts[{k}].{error}") from None
    return Mixed(data["name"], parts, level_from(data["outer"], "outer"))


def _span(ranks: Sequence[int]) -> str:
    low, high = min(ranks), max(ranks)
    return f"{low} to {high}" if high - low + 1 == len(ranks) else ", ".join(map(str, sorted(ranks)))


# -- what is left when devices are lost -------------------------------------------------------------


def without(cluster: Cluster, lost: Iterable[int]) -> Cluster:
    """The cluster without some of its devices, which are numbered anew.

    Nodes that still have equally many devices and stand beside each other stay one part; where nodes differ, what is
    left is a mixed cluster of one kind. Levels between nodes and the whole are left out then: links between nodes
    count as those of the outermost level.
    """
    gone = set(lost)
    for rank in gone:
        if not 0 <= rank < cluster.devices:
            raise ClusterError(f"device {rank} is not in {cluster.name}", allowed=f"0 to {cluster.devices - 1}")
    if not gone:
        return cluster
    found: list[Cluster] = []
    first = 0
    for part in cluster.parts:
        found += _pieces(part, {r - first for r in gone if first <= r < first + part.devices})
        first += part.devices
    if not found:
        raise ClusterError(f"no device of {cluster.name} is left", next="keep at least one")
    if len(found) == 1:
        return found[0]
    outer = cluster.outer if isinstance(cluster, Mixed) else cluster.levels[-1]
    made = Mixed("+".join(part.name for part in found), found, outer)
    return made if _named(made) else Mixed(f"{made.name} of {cluster.name}", found, outer)


def _pieces(part: Cluster, gone: set[int]) -> list[Cluster]:
    """What is left of a cluster of one kind: runs of nodes with equally many devices."""
    if not gone:
        return [part]
    each = part.levels[0].size
    left = [sum(r not in gone for r in range(n * each, (n + 1) * each)) for n in range(part.devices // each)]
    runs = [(size, len(list(run))) for size, run in groupby(n for n in left if n)]
    return [_shaped(part, nodes, size) for size, nodes in runs]


def _shaped(part: Cluster, nodes: int, each: int) -> Cluster:
    """So many nodes of so many devices each."""
    levels = [replace(part.levels[0], size=each, shared=min(part.levels[0].shared, each))]
    if nodes > 1:
        outer = part.levels[-1]
        levels.append(replace(outer, size=nodes, shared=min(outer.shared, each)))
    rest = re.sub(r"^(\d+x){1,2}(?=[a-z])", "", part.name)
    name = f"{nodes}x{each}x{rest}" if nodes > 1 else f"{each}x{rest}"
    return replace(part, name=name, levels=tuple(levels))


def _named(cluster: Cluster) -> bool:
    """Whether a cluster is what its name stands for."""
    try:
        return Cluster.preset(cluster.name).hash == cluster.hash
    except ClusterError:
        return False


def slowest(levels: Sequence[Level]) -> Level:
    """Of several ways to join parts the one with the least bytes a second for a device."""
    return min(levels, key=lambda level: level.bytes_per_s.value / level.shared)


__all__ = ["Mixed", "mixed_from", "slowest", "without"]

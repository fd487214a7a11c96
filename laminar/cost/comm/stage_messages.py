"""Messages between stages: which links they go through, and how long these carry them.

A value that crosses from one place to another is dealt out as messages between pairs of ranks
(`rules/boxing/crossing.py`). The innermost level that has both ranks of a pair joins them: the message leaves through
the sender's link of that level and enters through the receiver's. Ranks that share a network card send through one
link, and the fullest link decides when all of it has arrived.

    seconds = latency + max over links (bytes through it / its rate)

Links carry bytes in both directions at once, and levels are links of their own, as in `laminar.cost.comm.topology`.

Not covered: exchanges inside of stages that use the same links meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from laminar.ir.clusters.cluster import Cluster, Level
from laminar.ir.mesh import Place
from laminar.ir.sbp import NdSbp
from laminar.ir.tensor import ITEM_BYTES, TensorSpec
from laminar.rules.boxing.crossing import crossing

Message = tuple[int, int, int]
"""From which rank to which, and how many bytes."""
MessageLink = tuple[str, int, int, bool]
"""Name of the level, part of the cluster, number in that part, and whether messages leave through it or enter."""


@dataclass(frozen=True, slots=True)
class Hop:
    """All messages of one micro-batch from one place to another."""

    seconds: float
    links: frozenset[MessageLink]
    """Those that bytes go through."""


def messages(src: Place, dst: Place, values: Iterable[tuple[TensorSpec, NdSbp, NdSbp]]) -> list[Message]:
    """Who sends how much to whom, so that values lie on the second place as they should."""
    world: tuple[int, ...] = (*src.ranks, *dst.ranks)
    if len(set(world)) == len(world):
        # Alike for all places of these meshes: asked, and remembered, for the first ranks there are.
        src = Place(tuple(range(len(src.ranks))), src.mesh)
        dst = Place(tuple(range(len(src.ranks), len(world))), dst.mesh)
    else:
        world = tuple(range(max(world) + 1))
    out = []
    for spec, here, there in values:
        item = ITEM_BYTES[spec.dtype]
        out += [(world[t.src], world[t.dst], t.size * item) for t in crossing(spec, src, here, dst, there).transfers]
    return out


def hop(cluster: Cluster, sent: Iterable[Message]) -> Hop:
    """Messages that set out together; none take no time."""
    wait_s, carried_s = 0.0, dict[MessageLink, float]()
    for src, dst, nbytes in sent:
        level = cluster.joining((src, dst))
        wait_s = max(wait_s, level.latency_s.value)
        for link in (_link(cluster, level, src, True), _link(cluster, level, dst, False)):
            carried_s[link] = carried_s.get(link, 0.0) + nbytes / level.bytes_per_s.value
    return Hop(wait_s + max(carried_s.values(), default=0.0), frozenset(carried_s))


def _link(cluster: Cluster, level: Level, rank: int, out: bool) -> MessageLink:
    first = 0
    for k, part in enumerate(cluster.parts):
        if rank < first + part.devices:
            return level.name, k, (rank - first) // level.shared, out
        first += part.devices
    raise AssertionError(f"rank {rank} has no device in {cluster.name}")


def lanes(hops: Mapping[str, Hop]) -> dict[str, tuple[int, ...]]:
    """For hops by name, the lanes they keep others out of: links that the same hops go through are one lane."""
    users: dict[MessageLink, list[str]] = {}
    for name, one in hops.items():
        for link in one.links:
            users.setdefault(link, []).append(name)
    number = {names: k for k, names in enumerate(sorted({tuple(names) for names in users.values()}))}
    return {name: tuple(k for names, k in number.items() if name in names) for name in hops}


def even_hop_s(level: Level, ranks: int, nbytes: float) -> float:
    """A guess, without the placements: so many neighbours send as many bytes each, over one level."""
    return level.latency_s.value + min(ranks, level.shared) * nbytes / level.bytes_per_s.value

"""Which links a group of ranks uses: the geometry under the cost of a collective.

A `Team` is a group on a cluster, level by level: how many units it joins there, how many neighbours in its
chain of ranks are that far apart, and at what rate it gets out of a unit. Groups that work at the same time
and share network cards get their part of the rate; for the axes of a mesh those groups are known and are
counted link by link.

Levels are taken as links of their own: what goes between nodes does not burden the links inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from laminar.ir.clusters.cluster import Cluster
from laminar.ir.mesh import Mesh


@dataclass(frozen=True, slots=True)
class GroupLevel:
    """One level as a group sees it."""

    fan: int
    """How many units of the level inside are joined here; 1 if the group does not cross this level."""
    inside: int
    """Members in that unit of the level inside which has most."""
    peers: int
    """How many others a member finds at this level and no nearer."""
    chain: int
    """Neighbours in the order of ranks that lie this far apart."""
    latency_s: float
    bytes_per_s: float
    """At which the group gets out of one unit of the level inside, over all its links there."""
    one_bytes_per_s: float
    """At which one member does."""


@dataclass(frozen=True, slots=True)
class Team:
    """A group of ranks on a cluster, with those who use its links at the same time."""

    ranks: int
    level: int
    """The outermost level it crosses; -1 for a group of one."""
    hops: tuple[GroupLevel, ...]
    """By level, up to that one."""
    shares: bool
    """Whether it has links to share with groups that work at the same time."""

    @property
    def crossed(self) -> tuple[GroupLevel, ...]:
        """The levels over which anything moves."""
        return tuple(h for h in self.hops if h.fan > 1)


def team(cluster: Cluster, ranks: tuple[int, ...], groups_at_once: int = 1) -> Team:
    """A group, while `groups_at_once` groups like it (itself among them) use the links of the same units evenly."""
    return _team(cluster, ranks, None, groups_at_once)


def teams(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...]) -> list[tuple[Team, tuple[int, ...]]]:
    """Every group that a collective over `axes` of a mesh forms, all working at once, and their ranks."""
    cluster.fits(mesh)
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.ranks):
        place = mesh.coords(rank)
        found.setdefault(tuple(c for a, c in enumerate(place) if a not in axes), []).append(rank)
    groups = list(map(tuple, found.values()))
    users = [Counter[int]() for _ in cluster.levels]
    for ranks in groups:
        level = cluster.span(ranks).level
        for k in range(level + 1):
            users[k].update(_links(cluster, ranks, k))
    return [(_team(cluster, ranks, users, 1), ranks) for ranks in groups]


def mesh_team(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...], rank: int = 0) -> Team:
    """The group of one rank."""
    return next(found for found, ranks in teams(cluster, mesh, axes) if rank in ranks)


def _links(cluster: Cluster, ranks: Sequence[int], level: int) -> set[int]:
    """Links of a level through which a group goes, by number; none if it does not cross that level."""
    unit, inner = _unit(cluster, level), _unit(cluster, level - 1)
    crossed = {u for u, n in Counter(i * inner // unit for i in {r // inner for r in ranks}).items() if n > 1}
    return {r // cluster.levels[level].shared for r in ranks if r // unit in crossed}


def _unit(cluster: Cluster, level: int) -> int:
    """How many devices a unit of a level has; level -1 is a device."""
    return cluster.unit_devices[level] if level >= 0 else 1


def _team(cluster: Cluster, ranks: tuple[int, ...], users: list[Counter[int]] | None, at_once: int) -> Team:
    reach = cluster.span(ranks)
    hops, shares = [], False
    members = (1, *reach.members)
    order = sorted(ranks)
    for k in range(reach.level + 1):
        level, unit, inner = cluster.levels[k], _unit(cluster, k), _unit(cluster, k - 1)
        found: dict[int, set[int]] = {}
        links: dict[int, set[int]] = {}
        for r in ranks:
            found.setdefault(r // unit, set()).add(r // inner)
            links.setdefault(r // inner, set()).add(r // level.shared)
        fan = max(map(len, found.values()))
        rate = level.bytes_per_s.value
        # The unit with the least way out decides.
        ways, ones = [], []
        for used in links.values():
            if users is not None:
                parts = [1 / max(1, users[k][link]) for link in used]
            else:
                # A device is in one of the groups only, so no more of them find place here than this.
                fit = max(1, max(inner, level.shared) // members[k])
                wanted = min(at_once, fit) * len(used) / max(1, inner // level.shared)
                parts = [1 / max(1.0, wanted)] * len(used)
            ways.append(sum(parts))
            ones.append(min(parts))
        shares |= fan > 1 and min(ones) < 1
        chain = sum(a // inner != b // inner and a // unit == b // unit for a, b in pairwise(order))
        peers = members[k + 1] - members[k]
        hops.append(
            GroupLevel(fan, members[k], peers, chain, level.latency_s.value, rate * min(ways), rate * min(ones))
        )
    return Team(len(ranks), reach.level, tuple(hops), shares)

"""What a collective costs: latency and bytes over bandwidth, by algorithm, level by level.

Each algorithm (`laminar.cost.comm.algorithms`) says how long a group waits for hops and how long its bytes take.
Which one runs is decided as the backend decides: the least of those it has.

    nccl    all-reduce by ring, double tree, the switch, or switches inside nodes and trees between them; gather and
            scatter by ring; each but the switch also in a low-latency protocol that halves the waiting and moves a
            quarter of the bytes per second
    gloo    all-reduce by ring; gather, scatter and all-to-all by direct sends
    shared  ranks of one machine copy through memory (`laminar/runtime/comm/shm_collectives.py`): all work is copying,
    done
            partly when the exchange starts and partly when its result is needed

Where a profile has rows for the same backend, kind, group size and level, time is read off them, between two
rows in the logarithm of the size; beyond them, or for another group size, the formula is scaled to
the nearest rows. Every answer says which, by which algorithm, and how sure it is.

`nbytes` is what a rank holds of the whole thing: for all_reduce and all_to_all its tensor (as large before as
after), for all_gather the tensor *after*, for reduce_scatter the tensor *before*, for broadcast and send what is
sent. `collective_bytes` reads it off an instruction. A collective of several tensors counts their sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from laminar.cost.comm.algorithms import Terms, by_switch, direct, ring, send, through_memory, tree
from laminar.cost.comm.topology import Team, mesh_team, team
from laminar.errors import ClusterError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.mesh import Mesh
from laminar.ir.program import Instr

COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
LOW_LATENCY = (0.6, 0.25)
"""Share of the latency and of the rate, in NCCL's low-latency protocol. Assumed; fits 32 KB on 8 A100 within 10 %."""
TREE_SHARE = 0.9
"""Of a link's rate that NCCL's trees reach: its own estimate, by which it chooses."""
SOCKET_COPIES = 4
"""How often a byte is copied between two processes that do not share memory. Assumed."""
SIGMA_FORMULA, SIGMA_MEASURED_LINKS, SIGMA_ROW = 0.3, 0.2, 0.02
"""Standard error of log(seconds): assumed links, measured links, and the least for a measured row. Assumed."""


@dataclass(frozen=True, slots=True)
class CollectivePrice:
    """Seconds of a collective, and what they rest on."""

    seconds: float
    source: str
    """`measured` (a row of this size), `interpolated` (between two rows), `formula`, or `free`."""
    sigma: float
    """Standard error of log(seconds)."""
    algorithm: str
    start_s: float = 0.0
    """Of these seconds, what the rank itself works on at the start (shared memory: copying in)."""
    finish_s: float = 0.0
    """And when the result is needed (shared memory: adding up, copying out)."""

    @property
    def transfer_s(self) -> float:
        """What goes on beside the rank's own work."""
        return max(0.0, self.seconds - self.start_s - self.finish_s)


NO_TIME = CollectivePrice(0.0, "free", 0.0, "none")


# -- the choice --------------------------------------------------------------------------------


def ways(cluster: Cluster, kind: str, nbytes: float, t: Team, resident: bool = False) -> list[Terms]:
    """Every way the backend has, what it costs to begin included."""
    start_s = cluster.collective_s.value
    found: list[Terms]
    if cluster.backend == "shared" and kind != "all_to_all":
        found = [through_memory(kind, nbytes, t, resident)]
    elif cluster.backend == "shared":
        found = [direct(kind, nbytes * SOCKET_COPIES, t)]
    elif kind == "send":
        found = [send(kind, nbytes, t)]
    elif kind == "all_to_all" or (cluster.backend == "gloo" and kind in ("all_gather", "reduce_scatter")):
        found = [direct(kind, nbytes, t)]
    elif cluster.backend == "gloo":
        found = [tree(kind, nbytes, t, chained=False) if kind == "broadcast" else ring(kind, nbytes, t)]
    else:
        found = [ring(kind, nbytes, t)]
        if kind in ("all_reduce", "broadcast"):
            found.append(_reached(tree(kind, nbytes, t)))
        found = [replace(w, latency_s=w.latency_s + start_s) for w in found]
        wait, rate = LOW_LATENCY
        found += [Terms(w.algorithm + ", low latency", w.latency_s * wait, w.bytes_s / rate) for w in found]
        switch = cluster.levels[0].switch_bytes_per_s
        if kind == "all_reduce" and switch is not None and t.hops[0].fan > 2:
            made = by_switch(nbytes, t, switch.value)
            found.append(replace(made if t.level == 0 else _reached(made), latency_s=made.latency_s + start_s))
        return found
    return [replace(w, latency_s=w.latency_s + start_s) for w in found]


def _reached(made: Terms) -> Terms:
    """With the share of the links' rate that trees reach."""
    return replace(made, bytes_s=made.bytes_s / TREE_SHARE)


def formula(cluster: Cluster, kind: str, nbytes: float, t: Team, resident: bool = False) -> Terms:
    """The cheapest way."""
    return min(ways(cluster, kind, nbytes, t, resident), key=lambda w: w.seconds)


# -- what was measured -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    nbytes: int
    seconds: float
    spread: float


_Key = tuple[str, int, bool]
"""Kind, level, whether the tensor lies in shared memory."""


def _rows(cluster: Cluster) -> dict[_Key, dict[int, list[_Row]]]:
    """Rows of the profile for the cluster's backend, by what was done, then by group size; in order of size."""
    out: dict[_Key, dict[int, list[_Row]]] = {}
    names = [level.name for level in cluster.levels]
    for k, row in enumerate(cluster.profile.get("collectives", ())):
        if row["backend"] != cluster.backend or row["ranks"] < 2:
            continue
        if not (row["seconds"] > 0 and row["bytes"] > 0):
            raise ClusterError(f"profile.collectives[{k}]: {row}", allowed="seconds and bytes above 0")
        if row.get("level", names[0]) not in names:
            raise ClusterError(f"profile.collectives[{k}].level: {row['level']!r}", allowed="  ".join(names))
        level = names.index(row["level"]) if "level" in row else 0
        key = (row["kind"], level, bool(row.get("resident", False)))
        out.setdefault(key, {}).setdefault(row["ranks"], []).append(
            _Row(row["bytes"], row["seconds"], row.get("spread", 0.0))
        )
    for sizes in out.values():
        for rows in sizes.values():
            rows.sort(key=lambda r: r.nbytes)
    return out


def _between(rows: Sequence[_Row], nbytes: int) -> tuple[float, str, float] | None:
    """Seconds, source and sigma from rows of one group size; nothing beyond them."""
    for row in rows:
        if row.nbytes == nbytes:
            return row.seconds, "measured", max(row.spread, SIGMA_ROW)
    for low, high in pairwise(rows):
        if low.nbytes < nbytes < high.nbytes:
            gap = math.log(high.nbytes / low.nbytes)
            at = math.log(nbytes / low.nbytes) / gap
            seconds = math.exp((1 - at) * math.log(low.seconds) + at * math.log(high.seconds))
            # A chord over a bend: most wrong in the middle, more so the wider the gap. Assumed.
            bend = 0.1 * at * (1 - at) * gap
            return seconds, "interpolated", math.hypot(max(low.spread, high.spread, SIGMA_ROW), bend)
    return None


def _scales(pairs: Sequence[tuple[Terms, float]]) -> tuple[float, float, float]:
    """Factors for latency and bytes that fit measured seconds best in relative terms, and what error is left."""
    a = [(w.latency_s / s, w.bytes_s / s) for w, s in pairs]
    xx, xy, yy = (sum(x * x for x, _ in a), sum(x * y for x, y in a), sum(y * y for _, y in a))
    x1, y1 = sum(x for x, _ in a), sum(y for _, y in a)
    det = xx * yy - xy * xy
    f, g = ((x1 * yy - y1 * xy) / det, (y1 * xx - x1 * xy) / det) if det > 1e-9 * xx * yy else (-1.0, -1.0)
    if f < 0 or g < 0:
        both = [x + y for x, y in a]
        f = g = sum(both) / sum(b * b for b in both)
    left = math.sqrt(sum((f * x + g * y - 1) ** 2 for x, y in a) / len(a))
    return f, g, left


class CollectiveCost:
    """Seconds of collectives on one cluster. Pure: the same question has the same answer."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._measured = _rows(cluster)
        self._sigma = self._link_sigma()
        self._team = lru_cache(maxsize=4096)(self._make_team)
        self._mesh_team = lru_cache(maxsize=4096)(self._make_mesh_team)
        self._ask = lru_cache(maxsize=1 << 16)(self._answer)
        self._fit = lru_cache(maxsize=256)(self._fitted)

    def _make_team(self, ranks: tuple[int, ...], at_once: int) -> Team:
        return team(self.cluster, ranks, at_once)

    def _make_mesh_team(self, mesh: Mesh, axes: tuple[int, ...], rank: int) -> Team:
        return mesh_team(self.cluster, mesh, axes, rank)

    def _link_sigma(self) -> float:
        figures = [f for level in self.cluster.levels for f in (level.latency_s, level.bytes_per_s)]
        return SIGMA_FORMULA if any(f.source == "assumed" for f in figures) else SIGMA_MEASURED_LINKS

    def __call__(
        self, kind: str, nbytes: int, group: tuple[int, ...], groups_at_once: int = 1, resident: bool = False
    ) -> CollectivePrice:
        """Seconds for a group of ranks, while `groups_at_once` like it share the links of its units."""
        return self._ask(kind, nbytes, self._team(tuple(group), groups_at_once), resident)

    def on(
        self, kind: str, nbytes: int, mesh: Mesh, axes: tuple[int, ...], rank: int = 0, resident: bool = False
    ) -> CollectivePrice:
        """Seconds over axes of a mesh, where all groups do the same at once."""
        return self._ask(kind, nbytes, self._mesh_team(mesh, axes, rank), resident)

    def of(self, instr: Instr, mesh: Mesh, rank: int = 0, resident: bool = False) -> CollectivePrice:
        """Seconds of a collective of a program."""
        return self.on(instr.kind, collective_bytes(instr, mesh, rank), mesh, instr.box.axes, rank, resident)

    def _answer(self, kind: str, nbytes: int, t: Team, resident: bool) -> CollectivePrice:
        if kind not in COLLECTIVE_KINDS:
            raise ClusterError(f"{kind!r} is no collective", allowed="  ".join(COLLECTIVE_KINDS))
        if t.ranks == 1 or nbytes <= 0:
            return NO_TIME
        terms = formula(self.cluster, kind, nbytes, t, resident)
        seconds, source, sigma = self._seconds(kind, nbytes, t, resident, terms)
        part = seconds / terms.seconds if terms.seconds else 0.0
        return CollectivePrice(seconds, source, sigma, terms.algorithm, terms.start_s * part, terms.finish_s * part)

    def _seconds(self, kind: str, nbytes: int, t: Team, resident: bool, terms: Terms) -> tuple[float, str, float]:
        by_size = self._measured.get((kind, t.level, resident)) or {}
        if not by_size:
            return terms.seconds, "formula", self._sigma
        rows = by_size.get(t.ranks)
        if rows is not None:
            found = _between(rows, nbytes)
            if found is not None:
                # Rows are of one group at a time; others that share its links cost what the formula says.
                return found[0] + self._crowding(kind, nbytes, t, resident, terms), found[1], found[2]
        near = min(by_size, key=lambda n: (abs(math.log(n / t.ranks)), n))
        f, g, left = self._fit(kind, t.level, resident, near)
        seconds = f * terms.latency_s + g * terms.bytes_s
        if rows is not None:
            # Beyond the rows: scaled so that it meets the last of them.
            end = rows[0] if nbytes < rows[0].nbytes else rows[-1]
            alone = self._alone(kind, end.nbytes, t.ranks, t.level, resident)
            seconds *= end.seconds / (f * alone.latency_s + g * alone.bytes_s)
            left = end.spread + 0.05 * abs(math.log(nbytes / end.nbytes))
        return seconds, "formula", max(left, SIGMA_ROW) + 0.15 * abs(math.log2(near / t.ranks))

    def _alone(self, kind: str, nbytes: int, ranks: int, level: int, resident: bool) -> Terms:
        """The formula for the group that rows are of: neighbours, with nobody else on their links.

        At an outer level rows are of one device per unit inside, or of whole units if they have more ranks than that.
        """
        step = self.cluster.unit_devices[level - 1] if level else 1
        room = self.cluster.unit_devices[level]
        group = tuple(r * step for r in range(ranks)) if ranks * step <= room else tuple(range(ranks))
        if ranks > room:
            raise ClusterError(
                f"profile.collectives: a row of {ranks} ranks, cluster {self.cluster.name} has no such group",
                next="measure anew with `laminar profile`",
            )
        return formula(self.cluster, kind, nbytes, self._team(group, 1), resident)

    def _crowding(self, kind: str, nbytes: int, t: Team, resident: bool, terms: Terms) -> float:
        if not t.shares:
            return 0.0
        alone = self._alone(kind, nbytes, t.ranks, t.level, resident)
        return max(0.0, terms.bytes_s - alone.bytes_s)

    def _fitted(self, kind: str, level: int, resident: bool, ranks: int) -> tuple[float, float, float]:
        rows = self._measured[kind, level, resident][ranks]
        return _scales([(self._alone(kind, r.nbytes, ranks, level, resident), r.seconds) for r in rows])


def collective_bytes(instr: Instr, mesh: Mesh, rank: int = 0) -> int:
    """What `nbytes` means, read off a collective of a program: the larger of what a rank holds before and after."""
    before = sum(p.local(mesh, rank).nbytes for p in instr.ins)
    after = sum(p.local(mesh, rank).nbytes for p in instr.outs if p)
    return max(before, after)


# -- attention over a split sequence -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SplitAttention:
    """Attention whose keys and values are spread over a group, done in two ways."""

    ring_s: float
    gathered_s: float
    ring_bytes: int
    """Extra memory for keys and values on their way: the next block, while this one is used."""
    gathered_bytes: int
    """Extra memory for everybody's keys and values."""

    @property
    def seconds(self) -> float:
        """Of the cheaper way."""
        return min(self.ring_s, self.gathered_s)

    @property
    def way(self) -> str:
        """`ring` or `gathered`; on a tie the ring, which holds less."""
        return "ring" if self.ring_s <= self.gathered_s else "gathered"


def split_attention(
    cost: CollectiveCost, block_s: float, block_bytes: int, group: tuple[int, ...], groups_at_once: int = 1
) -> SplitAttention:
    """Attention of one rank's queries to keys and values split over a group.

    `block_s`: seconds to attend to one rank's keys and values; `block_bytes`: bytes of these (in backward, of
    their gradients too, which travel with them). In a ring the next block is on its way while one is
    used: n blocks, n-1 sends, each step the longer of both. Gathered, all n blocks wait for one all-gather.
    Masks that leave blocks empty are the caller's business: give the mean of what a block costs.
    """
    n = len(group)
    if n == 1:
        return SplitAttention(block_s, block_s, 0, 0)
    step = cost("send", block_bytes, group, groups_at_once).seconds
    gather = cost("all_gather", n * block_bytes, group, groups_at_once).seconds
    return SplitAttention(
        (n - 1) * max(block_s, step) + block_s, gather + n * block_s, block_bytes, (n - 1) * block_bytes
    )

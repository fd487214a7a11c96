"""Crossing: a tensor goes from one set of ranks to another, and only what is missing where it is needed moves.

Boxing (`boxing.py`) changes how a tensor lies on one mesh, by collectives. Here the two sides may be any ranks,
the same, some in common or none, of any number and arranged in any way, so all that is left are messages between pairs.

What a rank holds is, on each dim, a union of intervals. The ranks of a side that cut a dim cut it into sets that
don't overlap, so one sweep over the dim tells who gives what to whom, and where it lies in both local tensors. A region
of the tensor is a set per dim: what the holders of one source shard have that a destination rank wants. From there:

- A destination rank that already holds a region keeps it.
- Any other is sent by one of the ranks that hold it, so that the busiest of them sends as little as possible. Whole
  regions are dealt out, the largest first; where that leaves one holder with much more than its share, regions are cut.
- A partial source is reduced first, on its own mesh (`before`): scattered where it can be, so that its ranks add up
  each number once and send different pieces. Where the destination is partial in the same way, terms may travel, or
  stay, as they are: whichever way moves the fewest bytes.
- A partial destination needs each number (each term) on one of the ranks that share it. It goes to the one that has it,
  else to the first; what a rank is not given is the identity of the reduction (`fill`).

Everything follows from the arguments, so every rank computes the same crossing alone.

Not covered: terms that are added up while they arrive (more terms than ranks that could hold them are reduced first); a
link that is slower than others; cutting a region on two dims at once to make shares exactly equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from laminar.ir.mesh import Link, Place
from laminar.ir.sbp import B, NdSbp, check_placement, local_shape, show
from laminar.ir.tensor import ITEM_BYTES, TensorSpec
from laminar.rules.boxing.boxing import WIRE, Step
from laminar.rules.boxing.reduced import received, reduced
from laminar.rules.boxing.regions import CommonPart, Goal, IndexRegion, Key, Shard, Source

GRAIN_BYTES = 1 << 17
"""A holder may send this much more than its share before a region is cut: the message that a cut adds costs about as
much as these bytes (assumed, from single messages between two Gloo ranks)."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A region that goes from one rank to another, or stays on one (`src` is `dst`)."""

    src: int
    dst: int
    index: IndexRegion
    """Indices of the whole tensor."""
    at_src: IndexRegion
    """Where they are in the sender's local tensor (after `before`)."""
    at_dst: IndexRegion
    """Where they belong in the receiver's."""
    size: int
    """How many elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the region as a tensor of its own."""
        return tuple(sum(stop - start for start, stop in dim) for dim in self.index)


@dataclass(frozen=True, slots=True)
class Crossing:
    """How a tensor gets from one place to another; ranks are those of the world."""

    spec: TensorSpec
    src: Place
    src_nd: NdSbp
    dst: Place
    dst_nd: NdSbp
    before: tuple[Step, ...]
    """Boxing on the source's mesh that comes first."""
    mid: NdSbp
    """How the tensor lies on the source's mesh after that."""
    transfers: tuple[Transfer, ...]
    """At most one from any rank to any other, in order of destination."""
    kept: tuple[Transfer, ...]
    """What ranks of both places hold already, and copy at most."""
    fill: tuple[int, ...]
    """Destination ranks some of whose elements nobody sends: they hold the identity of `op`."""
    op: str
    """The reduction of a partial destination, else the empty string."""
    bytes: tuple[tuple[int, int], ...]
    """(rank, bytes it receives, those of `before` included) for every rank of either place."""

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks receive together."""
        return sum(n for _, n in self.bytes)

    @property
    def moved_bytes(self) -> int:
        """Bytes of the transfers alone."""
        return sum(t.size for t in self.transfers) * ITEM_BYTES[self.spec.dtype]

    def src_shape(self, rank: int) -> tuple[int, ...]:
        """The local tensor that a source rank sends from, after `before`."""
        return local_shape(self.spec.shape, self.mid, self.src.mesh.sizes, self.src.coords(rank))

    def dst_shape(self, rank: int) -> tuple[int, ...]:
        """The local tensor that a destination rank ends with."""
        return local_shape(self.spec.shape, self.dst_nd, self.dst.mesh.sizes, self.dst.coords(rank))

    def sends(self, rank: int) -> tuple[Transfer, ...]:
        """What a rank sends."""
        return tuple(t for t in self.transfers if t.src == rank)

    def receives(self, rank: int) -> tuple[Transfer, ...]:
        """What a rank receives."""
        return tuple(t for t in self.transfers if t.dst == rank)

    def keeps(self, rank: int) -> tuple[Transfer, ...]:
        """What a rank holds already and goes on holding."""
        return tuple(t for t in self.kept if t.dst == rank)

    def __str__(self) -> str:
        steps = "".join(f"{step.kind} to {show(step.dst)}, " for step in self.before)
        return (
            f"{self.spec} {show(self.src_nd)} on {self.src} to {show(self.dst_nd)} on {self.dst}: {steps}"
            f"{len(self.transfers)} transfers, {len(self.kept)} kept, {self.total_bytes:,} bytes"
        )


@lru_cache(maxsize=1 << 10)
def crossing(
    spec: TensorSpec,
    src: Place,
    src_nd: NdSbp,
    dst: Place,
    dst_nd: NdSbp,
    link: Link = WIRE,
    grain_bytes: int = GRAIN_BYTES,
) -> Crossing:
    """The messages that take a tensor from one placement on some ranks to another on others, for the fewest bytes.

    `link` decides between chains of collectives where a partial source is reduced; `grain_bytes` is what a holder may
    send beyond its share before regions are cut into more messages.
    """
    check_placement(spec, src_nd, src.mesh.sizes, "source of a crossing")
    check_placement(spec, dst_nd, dst.mesh.sizes, "destination of a crossing")
    begin, end = _plain(src_nd, src), _plain(dst_nd, dst)
    goal = Goal(spec, dst, end)
    mid, before = reduced(spec, src, begin, goal, link)
    item = ITEM_BYTES[spec.dtype]
    transfers, kept = _deal(Source(spec, src, mid, goal), goal, grain_bytes // item)
    got = {rank: received(before, spec, src, rank) for rank in src.ranks}
    for t in transfers:
        got[t.dst] = got.get(t.dst, 0) + t.size
    missing = {rank: math.prod(local_shape(spec.shape, end, dst.mesh.sizes, dst.coords(rank))) for rank in dst.ranks}
    for t in (*transfers, *kept):
        missing[t.dst] -= t.size
    return Crossing(
        spec,
        src,
        src_nd,
        dst,
        dst_nd,
        before,
        mid,
        tuple(transfers),
        tuple(kept),
        tuple(rank for rank in dst.ranks if missing[rank]),
        goal.op,
        tuple((rank, got.get(rank, 0) * item) for rank in sorted({*src.ranks, *dst.ranks})),
    )


def _plain(nd: NdSbp, place: Place) -> NdSbp:
    """On an axis of one rank everything is whole."""
    return tuple(B if size == 1 else p for p, size in zip(nd, place.mesh.sizes, strict=True))


# --- who sends --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """A region that a rank lacks."""

    dst: int
    parts: tuple[CommonPart, ...]
    size: int

    def sent(self, src: int) -> Transfer:
        """The whole of it."""
        index = tuple([part.index for part in self.parts])
        at_src = tuple([part.at_src for part in self.parts])
        at_dst = tuple([part.at_dst for part in self.parts])
        return Transfer(src, self.dst, index, at_src, at_dst, self.size)

    def rows(self, dim: int, start: int, stop: int) -> _Job:
        """Some rows of it."""
        part = self.parts[dim]
        some = part.rows(start, stop)
        return _Job(self.dst, (*self.parts[:dim], some, *self.parts[dim + 1 :]), self.size // part.size * some.size)


def _deal(source: Source, goal: Goal, grain: int) -> tuple[list[Transfer], list[Transfer]]:
    """What is sent, and what stays."""
    jobs: dict[Shard, list[_Job]] = {}
    kept: list[Transfer] = []
    for group, ranks in goal.groups.items():
        for keys, parts in source.regions(goal.keys[group]):
            size = math.prod([part.size for part in parts])
            for rank, term, stays in _slots(source, goal, keys, ranks):
                job = _Job(rank, parts, size)
                if stays:
                    kept.append(job.sent(rank))
                else:
                    jobs.setdefault((keys, term), []).append(job)
    holders: dict[Shard | None, list[int]] = {}
    for rank in source.place.ranks:
        holders.setdefault(source.shard(rank), []).append(rank)
    sent = [t for shard, wanted in jobs.items() for t in _share(wanted, holders[shard], grain)]
    order = {rank: i for i, rank in enumerate(goal.place.ranks)}
    return sorted(sent, key=lambda t: (order[t.dst], t.src)), sorted(kept, key=lambda t: order[t.dst])


def _slots(source: Source, goal: Goal, keys: tuple[Key, ...], ranks: list[int]) -> Iterator[tuple[int, Key, bool]]:
    """For each term of a shard the rank of a group that will hold it, and whether that rank has it already."""
    taken: dict[int, Key] = {}
    found: set[Key] = set()
    for rank in ranks:
        shard = source.shard(rank)
        if shard is None or shard[0] != keys:
            continue
        term = shard[1]
        if term not in found:
            taken[rank] = term
            found.add(term)
            yield rank, term, True
        elif goal.op in ("max", "min") and len(source.terms) == 1:
            yield rank, term, True  # an extreme may be there twice, and what is there need not be cleared
    free = [rank for rank in ranks if rank not in taken]
    for i, term in enumerate(source.terms):
        if term not in found:
            rank = ranks[i] if ranks[i] in free else free[0]
            free.remove(rank)
            yield rank, term, False


def _share(jobs: list[_Job], holders: list[int], grain: int) -> list[Transfer]:
    """Who of the holders of a shard sends which region of it."""
    if len(holders) == 1:
        return [job.sent(holders[0]) for job in jobs]
    load = [0] * len(holders)
    whole = []
    for job in sorted(jobs, key=lambda job: -job.size):
        least = load.index(min(load))
        load[least] += job.size
        whole.append(job.sent(holders[least]))
    if max(load) <= -(-sum(load) // len(holders)) + grain:
        return whole
    cut = list(_stretches(jobs, holders, grain))
    busiest = max(sum(t.size for t in cut if t.src == holder) for holder in holders)
    return cut if busiest < max(load) else whole


def _stretches(jobs: list[_Job], holders: list[int], grain: int) -> Iterator[Transfer]:
    """All jobs in a row, cut into as many equal stretches as there are holders, but nothing smaller than a grain."""
    total = sum(job.size for job in jobs)
    bounds = [i * total // len(holders) for i in range(1, len(holders))]
    at = 0
    for job in jobs:
        first = sum(b <= at for b in bounds)
        inside = [b - at for b in bounds if at < b < at + job.size]
        dim, marks = _marks(job, [0 if b < grain else job.size if b > job.size - grain else b for b in inside])
        stops = [*marks, job.parts[dim].size if job.parts else 1]
        for holder, (start, stop) in zip(holders[first:], itertools.pairwise([0, *stops]), strict=False):
            if start < stop:
                yield (job.rows(dim, start, stop) if marks else job).sent(holder)
        at += job.size


def _marks(job: _Job, bounds: list[int]) -> tuple[int, list[int]]:
    """The dim on which a job is best cut, and at which rows: the first that comes nearest to these sizes."""
    tries = []
    for dim, part in enumerate(job.parts):
        row = job.size // part.size
        marks = [(2 * b + row) // (2 * row) for b in bounds]
        tries.append((sum(abs(b - mark * row) for b, mark in zip(bounds, marks, strict=True)), dim, marks))
    return min(tries)[1:] if tries else (0, [])

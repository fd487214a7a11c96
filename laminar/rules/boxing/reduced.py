"""A partial source before it crosses: reduced on its own mesh, in the way that moves the fewest bytes in all.

Terms of p1 ranks that p2 others want as values cost (p1 - 1) tensors to add up and p2 to send, if every number is added
up once and sent by whoever added it up. So an axis that holds terms scatters its sum over a dim, and an axis that
holds copies first cuts them, or each copy would be added up again. Which dim is left to what comes after: sums that
land where the destination wants them, or on ranks that are part of it, have less far to go. Where the destination is
partial as well, terms may stay terms.

Only chains of boxing are tried, on dims that divide, or that one axis alone cuts, and in the splits of the destination.
That is the least possible between ranks that have nothing in common, as long as there are dims to cut. Not
covered: a sum gathered by one rank of several, which would be less where sets have some ranks in common.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from laminar.errors import PlacementError
from laminar.ir.mesh import Link, Place
from laminar.ir.sbp import B, NdSbp, Partial, Sbp, Split, check_placement, chunk, local_shape
from laminar.ir.tensor import TensorSpec
from laminar.rules.boxing.boxing import Step, boxing
from laminar.rules.boxing.regions import Goal, Source, coords_of

REDUCTIONS_TRIED = 6
"""Ways to reduce a partial source that are worked out exactly, of those that look cheapest."""


def reduced(spec: TensorSpec, src: Place, begin: NdSbp, goal: Goal, link: Link) -> tuple[NdSbp, tuple[Step, ...]]:
    """How a source that is partial should lie before messages leave, and the collectives that bring it there.

    All ways are ranked by an estimate of the bytes of both halves; the best few are worked out.
    """
    if not any(isinstance(p, Partial) for p in begin):
        return begin, ()
    ways = []
    for order, mid in enumerate(_ways(spec, src, begin, goal)):
        source = Source(spec, src, mid, goal)
        moved, messages = _outlook(source, goal)
        ways.append((_estimate(spec, src.mesh.sizes, begin, mid) + moved, messages, order, mid, moved))
    best: tuple[tuple[int, int, int, int], NdSbp, tuple[Step, ...]] | None = None
    for _, messages, order, mid, moved in sorted(ways)[:REDUCTIONS_TRIED]:
        steps = boxing(spec, begin, mid, src.mesh.sizes, link)
        total = moved + sum(received(steps, spec, src, rank) for rank in src.ranks)
        key = (total, sum(s.moves for s in steps) + (messages > 0), messages, order)
        if best is None or key < best[0]:
            best = (key, mid, steps)
    assert best is not None
    return best[1], best[2]


def _ways(spec: TensorSpec, src: Place, begin: NdSbp, goal: Goal) -> Iterator[NdSbp]:
    """Placements in which a partial source could leave: each term kept, summed up, or summed up in shards.

    Axes on which the source is whole may be cut as well, or each of their ranks would reduce the same numbers.
    """
    op = next(p.op for p in begin if isinstance(p, Partial))
    wanted = [p for p in dict.fromkeys(goal.nd) if isinstance(p, Split)]
    options: list[list[Sbp]] = []
    for a, (p, size) in enumerate(zip(begin, src.mesh.sizes, strict=True)):
        if isinstance(p, Split) or size == 1:
            options.append([p])
            continue
        cuts = []
        for d, n in enumerate(spec.shape):
            # Axes that cut the dim already keep what they have: this one cuts each of their pieces.
            mine = [(b, q.blocks) for b, q in enumerate(begin) if isinstance(q, Split) and q.dim == d]
            blocks = math.prod(k * (src.mesh.sizes[b] if b > a else 1) for b, k in mine)
            cuts.append((n % (blocks * size) > 0, -n if n % size else 0, Split(d, blocks if n else 1)))
        best = [cut for _, _, cut in sorted(cuts, key=lambda cut: cut[:2])[:2]]
        keep: list[Sbp] = [p] if isinstance(p, Partial) and goal.op == op else []
        options.append([*keep, B, *dict.fromkeys([*wanted, *best])])
    if (src.ranks, src.mesh.sizes) == (goal.place.ranks, goal.place.mesh.sizes):
        yield goal.nd
    for mid in itertools.product(*options):
        terms = math.prod(n for p, n in zip(mid, src.mesh.sizes, strict=True) if isinstance(p, Partial))
        if terms <= goal.slots and _reachable(spec, begin, mid, src.mesh.sizes):
            yield mid


def _reachable(spec: TensorSpec, begin: NdSbp, mid: NdSbp, sizes: tuple[int, ...]) -> bool:
    """Whether a tensor can lie so, and collectives lead there directly: axes join in cutting a dim if it divides."""
    try:
        check_placement(spec, mid, sizes, "a crossing")
    except PlacementError:
        return False
    for d, n in enumerate(spec.shape):
        parts = [
            (size, a != b) for a, b, size in zip(begin, mid, sizes, strict=True) if isinstance(b, Split) and b.dim == d
        ]
        if len(parts) > 1 and any(new for _, new in parts) and n % math.prod(size for size, _ in parts):
            return False
    return True


def _outlook(source: Source, goal: Goal) -> tuple[int, int]:
    """Elements and messages that would still have to move."""
    moved = messages = 0
    for want in goal.keys.values():
        found = [sets.get(w, {}) for sets, w in zip(source.meets, want, strict=True)]
        moved += math.prod(sum(part.size for part in row.values()) for row in found)
        messages += math.prod(len(row) for row in found)
    moved, messages = moved * len(source.terms), messages * len(source.terms)
    for group, ranks in goal.groups.items():
        want = goal.keys[group]
        for shard in {source.shard(rank) for rank in ranks} - {None}:
            assert shard is not None
            size = source.common(shard[0], want)
            moved, messages = moved - size, messages - (size > 0)
    return moved, messages


def _estimate(spec: TensorSpec, sizes: tuple[int, ...], begin: NdSbp, mid: NdSbp) -> int:
    """Elements that ranks receive while a source is reduced: slices first, then scattered sums, then whole ones."""
    cut = tuple(a if isinstance(a, Partial) else b for a, b in zip(begin, mid, strict=True))
    local = math.prod(local_shape(spec.shape, cut, sizes, (0,) * len(sizes)))
    scattered = summed = 1
    for a, b, size in zip(begin, mid, sizes, strict=True):
        if isinstance(a, Partial) and isinstance(b, Split):
            scattered *= size
        elif isinstance(a, Partial) and b == B:
            summed *= size
    piece = -(-local // scattered)
    return math.prod(sizes) * (local - piece + 2 * (piece - piece // summed))


def received(steps: tuple[Step, ...], spec: TensorSpec, place: Place, rank: int) -> int:
    """Elements that a rank receives in a chain of boxing steps."""
    sizes, coords = place.mesh.sizes, coords_of(place)[rank]
    total = 0
    for step in steps:
        old = math.prod(local_shape(spec.shape, step.src, sizes, coords))
        new = math.prod(local_shape(spec.shape, step.dst, sizes, coords))
        group = place.mesh.group(step.axes, coords)
        if step.kind == "all_gather":
            total += new - old
        elif step.kind == "reduce_scatter":
            total += (len(group) - 1) * new
        elif step.kind == "all_reduce":
            mine = chunk(old, len(group), group.index(place.mesh.rank(coords)))[1]
            total += (len(group) - 1) * mine + old - mine
        elif step.kind == "all_to_all":
            goal = Goal(spec, place, tuple(B if isinstance(p, Partial) else p for p in step.dst))
            source = Source(spec, place, tuple(B if isinstance(p, Partial) else p for p in step.src), goal)
            shard = source.shard(rank)
            assert shard is not None
            total += new - source.common(shard[0], goal.keys[coords])
    return total

"""Places, placements and whole tensors for tests of crossings, and the slow and obvious way to look at them.

Nothing here knows of intervals or regions: who holds what is asked of `local_indices`, element by element.
"""

from __future__ import annotations

import itertools
import math
import random
from functools import cache

import numpy as np
from hypothesis import strategies as st

from laminar.errors import PlacementError
from laminar.ir.mesh import Link, Mesh, Place
from laminar.ir.sbp import B, NdSbp, P, Partial, S, Sbp, check_placement, local_indices, local_shape
from laminar.ir.tensor import TensorSpec
from laminar.rules.boxing.boxing import Step, boxing
from laminar.rules.boxing.crossing import Crossing

FREE = Link(latency_s=0.0, bytes_per_s=1.0)
"""A wire on which only bytes count."""
MESHES = ((1,), (2,), (3,), (2, 2), (2, 3), (4, 2))
SHAPES = ((), (4,), (5,), (12,), (0, 3), (1, 7), (6, 4), (8, 3), (2, 3, 4))
IDENTITY = {"sum": 0, "max": -(10**9), "min": 10**9}


def place(sizes: tuple[int, ...], ranks: tuple[int, ...]) -> Place:
    """These ranks on axes of these sizes."""
    return Place(ranks, Mesh({f"x{i}": n for i, n in enumerate(sizes)}))


def pair(src: tuple[int, ...], dst: tuple[int, ...], how: str, chance: random.Random) -> tuple[Place, Place]:
    """Two places: of the same ranks where they can be, with some in common, with none, or any."""
    n, m = math.prod(src), math.prod(dst)
    if how == "same":
        return place(src, tuple(range(n))), place(dst, tuple(range(m)))
    if how == "disjoint":
        return place(src, tuple(range(n))), place(dst, tuple(range(n, n + m)))
    if how == "overlapping":
        return place(src, tuple(range(n))), place(dst, tuple(range(n // 2, n // 2 + m)))
    world = list(range(n + m))
    return place(src, tuple(chance.sample(world, n))), place(dst, tuple(chance.sample(world, m)))


def legal(spec: TensorSpec, nd: NdSbp, sizes: tuple[int, ...]) -> bool:
    """Whether a tensor can lie so."""
    try:
        check_placement(spec, nd, sizes, "test")
    except PlacementError:
        return False
    return True


@cache
def placements(
    spec: TensorSpec, sizes: tuple[int, ...], kinds: tuple[str, ...] = ("sum", "max", "min")
) -> tuple[NdSbp, ...]:
    """Every placement of a tensor on a mesh."""
    blocks = [[k for k in range(1, n + 1) if n % k == 0] or [1] for n in spec.shape]
    one: list[Sbp] = [B, *(P(k) for k in kinds), *(S(d, k) for d, ks in enumerate(blocks) for k in ks)]
    return tuple(nd for nd in itertools.product(one, repeat=len(sizes)) if legal(spec, nd, sizes))


def spread(whole: np.ndarray, nd: NdSbp, on: Place, chance: random.Random) -> dict[int, np.ndarray]:
    """A tensor as ranks hold it; partial ones as terms of random size and sign."""
    kind = next((p.op for p in nd if isinstance(p, Partial)), None)
    spans = [range(n) for p, n in zip(nd, on.mesh.sizes, strict=True) if isinstance(p, Partial)]
    keys = list(itertools.product(*spans))
    draw = np.random.default_rng(chance.randrange(1 << 30))
    terms = {k: draw.integers(-50, 50, whole.shape) for k in keys}
    if kind == "sum":
        terms[keys[0]] = whole - sum((terms[k] for k in keys[1:]), np.zeros_like(whole))
    elif kind is not None:
        owner = draw.integers(0, len(keys), whole.shape)
        for i, k in enumerate(keys):
            away = whole - 1 - abs(terms[k]) if kind == "max" else whole + 1 + abs(terms[k])
            terms[k] = np.where(owner == i, whole, away)
    out = {}
    for rank in on.ranks:
        coords = on.coords(rank)
        key = tuple(c for p, c in zip(nd, coords, strict=True) if isinstance(p, Partial))
        out[rank] = (terms[key] if kind else whole)[indices(whole.shape, nd, on, rank)]
    return out


def indices(shape: tuple[int, ...], nd: NdSbp, on: Place, rank: int) -> tuple[np.ndarray, ...]:
    """Which elements of the whole a rank holds, for use as an index."""
    return np.ix_(*local_indices(shape, nd, on.mesh.sizes, on.coords(rank))) if shape else ()


def holds(shape: tuple[int, ...], nd: NdSbp, on: Place, rank: int) -> np.ndarray:
    """Element by element, whether a rank holds it."""
    out = np.zeros(shape, dtype=bool)
    out[indices(shape, nd, on, rank)] = True
    return out


def groups(nd: NdSbp, on: Place) -> list[list[int]]:
    """Ranks that differ on partial axes only: each number has to be on one of them."""
    out: dict[tuple[int, ...], list[int]] = {}
    for rank in on.ranks:
        key = tuple(0 if isinstance(p, Partial) else c for p, c in zip(nd, on.coords(rank), strict=True))
        out.setdefault(key, []).append(rank)
    return list(out.values())


def lacks(shape: tuple[int, ...], src: Place, src_nd: NdSbp, dst: Place, dst_nd: NdSbp) -> int:
    """The least number of elements that must move from a source that is not partial: what no rank of a group holds."""
    total = 0
    for ranks in groups(dst_nd, dst):
        need = holds(shape, dst_nd, dst, ranks[0])
        for rank in ranks:
            if rank in src.ranks:
                need &= ~holds(shape, src_nd, src, rank)
        total += int(need.sum())
    return total


def received(step: Step, shape: tuple[int, ...], on: Place) -> int:
    """Elements that all ranks receive together in a step of boxing, from the textbook form of each collective."""
    sizes = on.mesh.sizes
    p = math.prod(sizes[a] for a in step.axes)
    old = [math.prod(local_shape(shape, step.src, sizes, on.coords(r))) for r in on.ranks]
    new = [math.prod(local_shape(shape, step.dst, sizes, on.coords(r))) for r in on.ranks]
    if step.kind == "all_reduce":
        return 2 * (p - 1) * sum(old) // p
    if step.kind == "all_gather":
        return sum(new) - sum(old)
    if step.kind == "reduce_scatter":
        return (p - 1) * sum(new)
    if step.kind == "all_to_all":
        both = [holds(shape, bare(step.src), on, r) & holds(shape, bare(step.dst), on, r) for r in on.ranks]
        return sum(new) - sum(int(b.sum()) for b in both)
    return 0


def bare(nd: NdSbp) -> NdSbp:
    """A placement without its partial entries."""
    return tuple(B if isinstance(p, Partial) else p for p in nd)


def ideal(shape: tuple[int, ...], src: Place, src_nd: NdSbp, dst: Place, dst_nd: NdSbp) -> int:
    """The least number of elements that must move from a partial source to a destination that wants values.

    A number of which there are k terms and which m ranks want is put together somewhere from k - 1 terms that arrive,
    and then sent to all who want it, but for the one who put it together if that one wants it.
    """
    terms = math.prod(n for p, n in zip(src_nd, src.mesh.sizes, strict=True) if isinstance(p, Partial))
    wanted, somebody = np.zeros(shape, dtype=int), np.zeros(shape, dtype=bool)
    for ranks in groups(dst_nd, dst):
        want = holds(shape, dst_nd, dst, ranks[0])
        wanted += want
        for rank in ranks:
            if rank in src.ranks:
                somebody |= want & holds(shape, bare(src_nd), src, rank)
    return int((terms - 1 + wanted - somebody).sum())


def summed_up(shape: tuple[int, ...], src: Place, src_nd: NdSbp, dst: Place, dst_nd: NdSbp) -> int:
    """Elements that move if every rank of a partial source first has the value: the plain way, to be no worse than."""
    axes = [n for p, n in zip(src_nd, src.mesh.sizes, strict=True) if isinstance(p, Partial)]
    held = sum(int(holds(shape, bare(src_nd), src, rank).sum()) for rank in src.ranks)
    return 2 * (math.prod(axes) - 1) * held // math.prod(axes) + lacks(shape, src, bare(src_nd), dst, dst_nd)


def scatters(shape: tuple[int, ...], src: Place, src_nd: NdSbp) -> bool:
    """Whether all axes of a source can cut the tensor: one dim divides by all, or each has a dim for itself."""
    split = [p for p in src_nd if isinstance(p, S)]
    free = len(shape) - len({p.dim for p in split})
    blocks = [math.prod(p.blocks for p in split if p.dim == d) for d in range(len(shape))]
    return any(n % (len(src.ranks) * k) == 0 for n, k in zip(shape, blocks, strict=True)) or free >= len(src_nd) - len(
        split
    )


def least_through(shape: tuple[int, ...], src: Place, src_nd: NdSbp, dst: Place, dst_nd: NdSbp) -> int:
    """The fewest elements by way of any placement in which the source is not partial any more, every one tried.

    With blocks only where the destination has the same.
    """
    spec, sizes = TensorSpec(shape, "u8"), src.mesh.sizes
    best = math.inf
    for mid in placements(spec, sizes, ()):
        changed = [(a, b) for a, b in zip(src_nd, mid, strict=True) if a != b]
        if any(isinstance(a, S) or (isinstance(b, S) and b.blocks > 1 and b not in dst_nd) for a, b in changed):
            continue
        chain = boxing(spec, src_nd, mid, sizes, FREE)
        best = min(best, sum(received(s, shape, src) for s in chain) + lacks(shape, src, mid, dst, dst_nd))
    return int(best)


def pick(region: tuple[tuple[tuple[int, int], ...], ...]) -> tuple[np.ndarray, ...]:
    """A region as an index."""
    return np.ix_(*[np.concatenate([np.arange(a, b) for a, b in dim]) for dim in region]) if region else ()


def carried_out(c: Crossing, held: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """What destination ranks hold after the transfers; every element is written once, or filled."""
    out, times = {}, {}
    for rank in c.dst.ranks:
        out[rank] = np.full(c.dst_shape(rank), IDENTITY[c.op or "sum"])
        times[rank] = np.zeros(c.dst_shape(rank), dtype=int)
    for t in (*c.transfers, *c.kept):
        out[t.dst][pick(t.at_dst)] = held[t.src][pick(t.at_src)]
        times[t.dst][pick(t.at_dst)] += 1
    for rank in c.dst.ranks:
        assert times[rank].max(initial=0) <= 1, f"{c}: rank {rank} is given an element twice"
        assert (times[rank].min(initial=1) == 0) == (rank in c.fill), f"{c}: rank {rank} is filled for nothing, or not"
    return out


def assembled(c: Crossing, got: dict[int, np.ndarray]) -> np.ndarray:
    """The whole tensor that destination ranks hold together; ranks of an axis that broadcasts must agree."""
    merge = {"sum": np.add, "max": np.maximum, "min": np.minimum}[c.op or "sum"]
    whole: np.ndarray | None = None
    by_copy: dict[tuple[int, ...], np.ndarray] = {}
    for rank in c.dst.ranks:
        coords = c.dst.coords(rank)
        copy = tuple(k for p, k in zip(c.dst_nd, coords, strict=True) if p == B)
        term = np.full(c.spec.shape, IDENTITY[c.op or "sum"])
        term[indices(c.spec.shape, c.dst_nd, c.dst, rank)] = got[rank]
        by_copy[copy] = merge(by_copy[copy], term) if copy in by_copy else term
    for each in by_copy.values():
        assert whole is None or np.array_equal(whole, each), f"{c}: copies differ"
        whole = each
    assert whole is not None
    return whole


@st.composite
def sides(draw: st.DrawFn) -> tuple[TensorSpec, Place, NdSbp, Place, NdSbp]:
    """Any tensor on any ranks, on its way to any others."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 12]), max_size=3)))
    spec = TensorSpec(shape, draw(st.sampled_from(["f32", "bf16", "f64"])))
    out: list[Place | NdSbp] = []
    for _ in range(2):
        sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 12)))
        ranks = tuple(draw(st.permutations(range(16)))[: math.prod(sizes)])
        kind = P(draw(st.sampled_from(["sum", "max", "min"])))
        nd: NdSbp = ()
        for a in range(len(sizes)):
            splits = [S(d, k) for d, n in enumerate(shape) for k in range(1, n + 1) if n % k == 0] + [
                S(d) for d, n in enumerate(shape) if n == 0
            ]
            tail = (B,) * (len(sizes) - a - 1)
            ways = [p for p in (B, kind, *splits) if legal(spec, (*nd, p, *tail), sizes)]
            nd = (*nd, draw(st.sampled_from(ways)))
        out += [place(sizes, ranks), nd]
    return (spec, *out)  # type: ignore[return-value]

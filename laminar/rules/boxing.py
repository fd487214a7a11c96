"""Boxing: the cheapest chain of collectives that moves a tensor from one placement to another.

Each dim is refined into the factors at which either placement cuts it, plus a free minor slot per
axis size; a state says which axis owns which slot and which axes are partial. A step moves one
axis: all-gather frees its slot, slice takes one, all-to-all changes slot, reduce-scatter takes one
for a partial axis, all-reduce clears partial axes (several at once), zero-pad makes an axis
partial. Dijkstra over these states gives the chain; the bytes it moves per rank are

    all-reduce 2(p-1)/p·L   all-gather (p-1)·L   reduce-scatter, all-to-all (p-1)/p·L   others 0

with L the local bytes before the step. Dims that don't divide, or whose two placements do not
nest, can only be opened from the innermost axis outwards: they go through the whole dim.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache

from laminar.ir.mesh import Link
from laminar.ir.sbp import B, NdSbp, Partial, Split, local_shape
from laminar.ir.tensor import ITEM_BYTES, TensorSpec

WIRE = Link(latency_s=20e-6, bytes_per_s=50e9)
"""Assumed, not measured: a good intra-node fabric. Decides only between chains."""


@dataclass(frozen=True, slots=True)
class Step:
    """One move of one axis (all-reduce: of several), on the local tensor."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, slice or pad."""
    axes: tuple[int, ...]
    src: NdSbp
    dst: NdSbp
    give: tuple[int, int] = (0, 1)
    """(dim, blocks) of the *local* tensor where the axis is opened: all_gather, all_to_all, pad."""
    take: tuple[int, int] = (0, 1)
    """(dim, blocks) of the local tensor where the axis cuts: slice, reduce_scatter, all_to_all."""
    op: str = "sum"

    @property
    def moves(self) -> bool:
        """Whether bytes go over the wire."""
        return self.kind not in ("slice", "pad")


def step_bytes(step: Step, spec: TensorSpec, sizes: tuple[int, ...]) -> int:
    """Bytes the busiest rank receives in a step."""
    if not step.moves:
        return 0
    p = math.prod(sizes[a] for a in step.axes)
    if p == 1:
        return 0
    local = math.prod(local_shape(spec.shape, step.src, sizes, (0,) * len(sizes))) * ITEM_BYTES[spec.dtype]
    if step.kind == "all_gather":
        return (p - 1) * local
    return int((2 if step.kind == "all_reduce" else 1) * local * (p - 1) / p)


def chain_bytes(steps: tuple[Step, ...], spec: TensorSpec, sizes: tuple[int, ...]) -> int:
    """Bytes the busiest rank receives over a chain."""
    return sum(step_bytes(s, spec, sizes) for s in steps)


def chain_s(steps: tuple[Step, ...], spec: TensorSpec, sizes: tuple[int, ...], link: Link = WIRE) -> float:
    """Seconds a chain takes, each move paying the latency once."""
    return sum(link.latency_s + step_bytes(s, spec, sizes) / link.bytes_per_s for s in steps if s.moves)


# A dim's slots: sizes of its factors, major first. A state: for each dim the owner of each slot
# (axis, or -1), then for each axis its partial kind or "".
Slots = tuple[int, ...]
State = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]


def _cuts(size: int, nd: NdSbp, dim: int, sizes: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """The factors of a dim under a placement as (size, owner), major first; None if it does not divide."""
    parts: list[tuple[int, int]] = [(size, -1)]
    for axis, placement in enumerate(nd):
        if not isinstance(placement, Split) or placement.dim != dim or sizes[axis] == 1:
            continue
        left, p = placement.blocks, sizes[axis]
        out: list[tuple[int, int]] = []
        done = False
        for n, owner in parts:
            if owner >= 0 or done:
                out.append((n, owner))
                continue
            if left > 1 and left % n == 0:
                left //= n
                out.append((n, -1))
                continue
            if n % (left * p):
                return None
            out += [(left, -1)] * (left > 1) + [(p, axis)] + [(n // left // p, -1)] * (n > left * p)
            done = True
        if not done:
            return None
        parts = out
    return parts


def _refine(size: int, sides: list[list[tuple[int, int]]], extra: list[int]) -> tuple[Slots, list[tuple[int, ...]]] | None:
    """Common slots of several factorings of one dim, and who owns them in each."""
    ladder = {1, size}
    for side in sides:
        at = 1
        for n, _ in side:
            at *= n
            ladder.add(at)
    steps = sorted(ladder)
    if any(b % a for a, b in zip(steps, steps[1:], strict=False)):
        return None
    slots = [b // a for a, b in zip(steps, steps[1:], strict=False)] or [1]
    for p in sorted(set(extra)):
        if slots[-1] % p == 0 and slots[-1] > p:
            slots[-1:] = [slots[-1] // p, p] if slots[-1] // p not in extra else [p, slots[-1] // p]
    owners = []
    for side in sides:
        row, at, k = [], 1, 0
        bounds = []
        for n, owner in side:
            at *= n
            bounds.append((at, owner, n))
        at = 1
        for slot in slots:
            at *= slot
            while bounds[k][0] < at:
                k += 1
            row.append(bounds[k][1])
            if bounds[k][1] >= 0 and bounds[k][2] != slot:
                return None
        owners.append(tuple(row))
    return tuple(slots), owners


@lru_cache(maxsize=1 << 16)
def boxing(spec: TensorSpec, src: NdSbp, dst: NdSbp, sizes: tuple[int, ...], link: Link = WIRE) -> tuple[Step, ...]:
    """The cheapest chain from `src` to `dst` on a mesh of these axis sizes."""
    src = tuple(B if sizes[a] == 1 else p for a, p in enumerate(src))
    dst = tuple(B if sizes[a] == 1 else p for a, p in enumerate(dst))
    if src == dst:
        return ()
    before: list[Step] = []
    after: list[Step] = []
    slots: list[Slots] = []
    start: list[tuple[int, ...]] = []
    goal: list[tuple[int, ...]] = []
    for d, n in enumerate(spec.shape):
        axes_src = [a for a, p in enumerate(src) if isinstance(p, Split) and p.dim == d]
        axes_dst = [a for a, p in enumerate(dst) if isinstance(p, Split) and p.dim == d]
        if [(a, src[a]) for a in axes_src] == [(a, dst[a]) for a in axes_dst] and axes_src:
            # Both sides cut this dim alike: it is one lump that nobody touches.
            cuts = _cuts(n, src, d, sizes)
            if cuts is None:
                slots.append((1,))
                start.append((-1,))
                goal.append((-1,))
                continue
        left, right = _cuts(n, src, d, sizes), _cuts(n, dst, d, sizes)
        refined = _refine(n, [left, right], [s for s in sizes if s > 1]) if left and right and n else None
        if refined is None:
            now = src
            for a in reversed(axes_src):
                opened = (*now[:a], B, *now[a + 1 :])
                p = now[a]
                assert isinstance(p, Split)
                before.append(Step("all_gather", (a,), now, opened, give=(d, p.blocks)))
                now = src = opened
            after += [Step("slice", (a,), (), (), take=(d, dst[a].blocks)) for a in axes_dst]  # type: ignore[union-attr]
            slots.append((1,))
            start.append((-1,))
            goal.append((-1,))
        else:
            slots.append(refined[0])
            start.append(refined[1][0])
            goal.append(refined[1][1])
    lumps = {
        a for a, p in enumerate(src)
        if isinstance(p, Split) and dst[a] == p and all(o != a for row in start for o in row)
    }  # fmt: skip
    late = {s.axes[0] for s in after}
    begin: State = (tuple(start), tuple(p.op if isinstance(p, Partial) else "" for p in src))
    end: State = (tuple(goal), tuple(p.op if isinstance(p, Partial) else "" for p in dst))
    middle = _search(spec, tuple(slots), begin, end, sizes, link, frozenset(lumps), src)
    last = middle[-1].dst if middle else src
    for step in after:
        a = step.axes[0]
        new = (*last[:a], Split(*step.take), *last[a + 1 :])
        middle.append(Step("slice", (a,), last, new, take=step.take))
        last = new
    assert late <= set(range(len(sizes)))
    return (*before, *middle)


def _placement(state: State, slots: tuple[Slots, ...], lumps: frozenset[int], src: NdSbp, sizes: tuple[int, ...]) -> NdSbp:
    """The placement a state stands for."""
    owners, partial = state
    out: list[Split | Partial | object] = [Partial(k) if k else B for k in partial]
    for a in lumps:
        out[a] = src[a]
    for d, row in enumerate(owners):
        for k, a in enumerate(row):
            if a >= 0:
                blocks = math.prod(s for s, o in zip(slots[d][:k], row[:k], strict=True) if o < 0 or o > a)
                out[a] = Split(d, blocks)
    return tuple(out)  # type: ignore[arg-type]


def _local_blocks(row: tuple[int, ...], slots: Slots, k: int) -> int:
    return math.prod(s for s, o in zip(slots[:k], row[:k], strict=True) if o < 0)


def _moves(state: State, slots: tuple[Slots, ...], sizes: tuple[int, ...], lumps: frozenset[int], end: State):  # type: ignore[no-untyped-def]
    """Every step from a state: (kind, axes, give, take, op, next state)."""
    owners, partial = state
    where = {a: (d, k) for d, row in enumerate(owners) for k, a in enumerate(row) if a >= 0}
    axes = [a for a in range(len(sizes)) if sizes[a] > 1 and a not in lumps]
    free = [(d, k) for d, row in enumerate(owners) for k, o in enumerate(row) if o < 0]
    kinds = {k for k in partial if k}
    sums = [a for a in axes if partial[a]]
    for mask in range(1, 1 << len(sums)):
        some = tuple(a for i, a in enumerate(sums) if mask >> i & 1)
        yield "all_reduce", some, (0, 1), (0, 1), partial[some[0]], (owners, _with(partial, {a: "" for a in some}))
    for a in axes:
        at = where.get(a)
        opened = owners if at is None else _own(owners, *at, -1)
        give = (0, 1) if at is None else (at[0], _local_blocks(owners[at[0]], slots[at[0]], at[1]))
        if at is not None:
            yield "all_gather", (a,), give, (0, 1), "sum", (opened, partial)
        if not partial[a] and end[1][a] and kinds <= {end[1][a]}:
            yield "pad", (a,), give if at else (-1, 1), (0, 1), end[1][a], (opened, _with(partial, {a: end[1][a]}))
        for d, k in free:
            if slots[d][k] != sizes[a]:
                continue
            row = opened[d]
            take = (d, _local_blocks(row, slots[d], k))
            nxt = (_own(opened, d, k, a), _with(partial, {a: ""}))
            if partial[a]:
                yield "reduce_scatter", (a,), (0, 1), take, partial[a], nxt
            elif at is not None:
                yield "all_to_all", (a,), give, take, "sum", nxt
            else:
                yield "slice", (a,), (0, 1), take, "sum", nxt


def _own(owners: tuple[tuple[int, ...], ...], d: int, k: int, a: int) -> tuple[tuple[int, ...], ...]:
    row = owners[d]
    return (*owners[:d], (*row[:k], a, *row[k + 1 :]), *owners[d + 1 :])


def _with(partial: tuple[str, ...], changes: dict[int, str]) -> tuple[str, ...]:
    return tuple(changes.get(a, k) for a, k in enumerate(partial))


def _search(
    spec: TensorSpec, slots: tuple[Slots, ...], begin: State, end: State, sizes: tuple[int, ...], link: Link,
    lumps: frozenset[int], src: NdSbp,
) -> list[Step]:  # fmt: skip
    """Dijkstra from `begin` to `end`; ties go to the chain with fewer steps."""
    heap: list[tuple[float, int, int, State]] = [(0.0, 0, 0, begin)]
    best: dict[State, tuple[float, int]] = {begin: (0.0, 0)}
    came: dict[State, tuple[State, Step]] = {}
    count = 0
    while heap:
        cost, hops, _, state = heapq.heappop(heap)
        if state == end:
            break
        if best[state] < (cost, hops):
            continue
        here = _placement(state, slots, lumps, src, sizes)
        for kind, axes, give, take, op, nxt in _moves(state, slots, sizes, lumps, end):
            step = Step(kind, axes, here, _placement(nxt, slots, lumps, src, sizes), give, take, op)
            price = (link.latency_s + step_bytes(step, spec, sizes) / link.bytes_per_s) if step.moves else 0.0
            key = (cost + price, hops + 1)
            if key < best.get(nxt, (math.inf, 0)):
                best[nxt] = key
                came[nxt] = (state, step)
                count += 1
                heapq.heappush(heap, (*key, count, nxt))
    out: list[Step] = []
    state = end
    while state != begin:
        state, step = came[state]
        out.append(step)
    return out[::-1]

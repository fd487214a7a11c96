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
from laminar.ir.sbp import B, NdSbp, Partial, Sbp, Split, local_shape
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


# A dim's slots: the sizes of its factors, major first. A state has one code per axis: the number of
# the slot it owns (slots are numbered through all dims), or one of these:
WHOLE, TERM, OTHER = -1, -2, -3
"""Broadcast; partial as at the start; partial as at the end, where that is another kind."""
Slots = tuple[int, ...]
State = tuple[int, ...]


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
    after: list[tuple[int, int, int]] = []
    slots: list[tuple[int, int]] = []
    """(dim, size) of every slot."""
    begin, end = _codes(src, dst)
    wanted = {p.dim for p in (*src, *dst) if isinstance(p, Split)}
    lumps: set[int] = set()
    for d, n in enumerate(spec.shape):
        axes_src = [a for a, p in enumerate(src) if isinstance(p, Split) and p.dim == d]
        axes_dst = [a for a, p in enumerate(dst) if isinstance(p, Split) and p.dim == d]
        if d not in wanted:
            continue
        left, right = _cuts(n, src, d, sizes), _cuts(n, dst, d, sizes)
        if left is None and [(a, src[a]) for a in axes_src] == [(a, dst[a]) for a in axes_dst]:
            lumps.update(axes_src)  # both sides cut this dim alike, though unevenly: nobody touches it
            continue
        refined = _refine(n, [left, right], [s for s in sizes if s > 1]) if left and right and n else None
        if refined is None:
            for a in reversed(axes_src):
                opened = (*src[:a], B, *src[a + 1 :])
                p = src[a]
                assert isinstance(p, Split)
                before.append(Step("all_gather", (a,), src, opened, give=(d, p.blocks)))
                src = opened
                begin[a] = WHOLE
            for a in axes_dst:
                p = dst[a]
                assert isinstance(p, Split)
                after.append((a, d, p.blocks))
                end[a] = WHOLE
            continue
        for slot, owner_src, owner_dst in zip(refined[0], *refined[1], strict=True):
            if owner_src >= 0:
                begin[owner_src] = len(slots)
            if owner_dst >= 0:
                end[owner_dst] = len(slots)
            slots.append((d, slot))
    path = _search(spec, src, slots, tuple(begin), tuple(end), sizes, link, lumps)
    kinds = {TERM: next((p.op for p in src if isinstance(p, Partial)), "sum"),
             OTHER: next((p.op for p in dst if isinstance(p, Partial)), "sum")}  # fmt: skip
    chain = list(before)
    now = src
    for old, new in zip(path, path[1:], strict=False):
        nxt = _placement(new, slots, lumps, src, sizes, kinds)
        chain.append(_step(old, new, slots, now, nxt, kinds))
        now = nxt
    for a, d, blocks in after:
        nxt = (*now[:a], Split(d, blocks), *now[a + 1 :])
        chain.append(Step("slice", (a,), now, nxt, take=(d, blocks)))
        now = nxt
    return tuple(chain)


def _codes(src: NdSbp, dst: NdSbp) -> tuple[list[int], list[int]]:
    """Begin and end with slots still to be filled in."""
    kind = next((p.op for p in src if isinstance(p, Partial)), None)
    begin = [TERM if isinstance(p, Partial) else WHOLE for p in src]
    end = [(TERM if p.op == kind else OTHER) if isinstance(p, Partial) else WHOLE for p in dst]
    return begin, end


def _placement(
    state: State, slots: list[tuple[int, int]], lumps: set[int], src: NdSbp, sizes: tuple[int, ...], kinds: dict[int, str]
) -> NdSbp:
    """The placement a state stands for."""
    owner = {s: a for a, s in enumerate(state) if s >= 0}
    out: list[Sbp] = []
    for a, code in enumerate(state):
        if a in lumps:
            out.append(src[a])
        elif code >= 0:
            d = slots[code][0]
            before = [s for s in range(code) if slots[s][0] == d and owner.get(s, len(sizes)) > a]
            out.append(Split(d, math.prod(slots[s][1] for s in before)))
        else:
            out.append(B if code == WHOLE else Partial(kinds[code]))
    return tuple(out)


def _step(old: State, new: State, slots: list[tuple[int, int]], src: NdSbp, dst: NdSbp, kinds: dict[int, str]) -> Step:
    """The move between two neighbouring states, on the local tensor."""
    axes = tuple(a for a, (x, y) in enumerate(zip(old, new, strict=True)) if x != y)
    a = axes[0]
    x, y = old[a], new[a]

    def blocks(state: State, code: int) -> tuple[int, int]:
        d = slots[code][0]
        return d, math.prod(n for s, (e, n) in enumerate(slots[:code]) if e == d and s not in state)

    opened = (*old[:a], WHOLE, *old[a + 1 :])
    give = blocks(old, x) if x >= 0 else (0, 1)
    take = blocks(opened, y) if y >= 0 else (0, 1)
    if x in (TERM, OTHER):
        return Step("all_reduce" if y == WHOLE else "reduce_scatter", axes, src, dst, give, take, kinds[x])
    if y in (TERM, OTHER):
        return Step("pad", axes, src, dst, give if x >= 0 else (-1, 1), take, kinds[y])
    if x >= 0:
        return Step("all_gather" if y == WHOLE else "all_to_all", axes, src, dst, give, take)
    return Step("slice", axes, src, dst, give, take)


def _search(
    spec: TensorSpec, src: NdSbp, slots: list[tuple[int, int]], begin: State, end: State, sizes: tuple[int, ...],
    link: Link, lumps: set[int],
) -> list[State]:  # fmt: skip
    """States from `begin` to `end` at least cost; ties go to fewer steps."""
    axes = [a for a in range(len(sizes)) if sizes[a] > 1 and a not in lumps]
    lump = tuple(p if a in lumps else B for a, p in enumerate(src))
    whole = math.prod(local_shape(spec.shape, lump, sizes, (0,) * len(sizes))) * ITEM_BYTES[spec.dtype]
    fits = {a: [s for s, (_, n) in enumerate(slots) if n == sizes[a]] for a in axes}
    leading = {a: {next(s for s in fits[a] if slots[s][0] == d) for d in {slots[s][0] for s in fits[a]}} for a in axes}
    heap: list[tuple[float, int, State]] = [(0.0, 0, begin)]
    best: dict[State, tuple[float, int]] = {begin: (0.0, 0)}
    came: dict[State, State] = {}
    while heap:
        cost, hops, state = heapq.heappop(heap)
        if state == end:
            break
        if best[state] < (cost, hops):
            continue
        local = whole
        for a in axes:
            if state[a] >= 0:
                local /= sizes[a]  # type: ignore[assignment]
        moves: list[tuple[float, State]] = []
        terms = [a for a in axes if state[a] <= TERM]
        for mask in range(1, 1 << len(terms)):
            some = [a for i, a in enumerate(terms) if mask >> i & 1]
            p = math.prod(sizes[a] for a in some)
            nxt = tuple(WHOLE if a in some else c for a, c in enumerate(state))
            moves.append((link.latency_s + 2 * (p - 1) / p * local / link.bytes_per_s, nxt))
        for a in axes:
            code, p = state[a], sizes[a]
            if code >= 0:
                cheap = link.latency_s + (p - 1) / p * local / link.bytes_per_s
                moves.append((link.latency_s + (p - 1) * local / link.bytes_per_s, _set(state, a, WHOLE)))
                places = fits[a]
            elif code == WHOLE:
                cheap, places = 0.0, list({*leading[a], end[a]} & set(fits[a]))
            else:
                cheap, places = link.latency_s + (p - 1) / p * local / link.bytes_per_s, fits[a]
            moves += [(cheap, _set(state, a, s)) for s in places if s not in state]
            if code >= WHOLE and end[a] <= TERM and all(c > TERM or c == end[a] for c in state):
                moves.append((0.0, _set(state, a, end[a])))
        for price, nxt in moves:
            key = (cost + price, hops + 1)
            if key < best.get(nxt, (math.inf, 0)):
                best[nxt] = key
                came[nxt] = state
                heapq.heappush(heap, (*key, nxt))
    path = [end]
    while path[-1] != begin:
        path.append(came[path[-1]])
    return path[::-1]


def _set(state: State, a: int, code: int) -> State:
    return (*state[:a], code, *state[a + 1 :])

"""Boxing: the cheapest chain of collectives that moves a tensor from one placement to another.

Each dim is refined into slots, the factors at which either placement cuts it; what nobody owns is
cut further, to give every axis somewhere to wait. A state says which axis owns which slots and which
axes are partial. A step moves one axis: all-gather frees its slots, slice takes some, all-to-all
changes them, reduce-scatter takes some for a partial axis, all-reduce clears partial axes (several
at once), zero-pad makes an axis partial. Dijkstra over these states gives the chain; the bytes it
moves per rank are

    all-reduce 2(p-1)/p·L   all-gather (p-1)·L   reduce-scatter, all-to-all (p-1)/p·L   others 0

with L the local bytes before the step. A dim that doesn't divide, or whose two placements do not
nest, has no slots: one axis at a time may own it. Where more than one does, it is opened from the
innermost axis outwards and goes through the whole dim.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import operator
from collections import Counter
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


def chain_s(steps: tuple[Step, ...], spec: TensorSpec, sizes: tuple[int, ...], link: Link = WIRE) -> float:
    """Seconds a chain takes, each move paying the latency once."""
    return sum(link.latency_s + step_bytes(s, spec, sizes) / link.bytes_per_s for s in steps if s.moves)


# A state has one code per axis: the number of the place it owns, or one of these:
HELD_WHOLE, PARTIAL_AS_BEFORE, PARTIAL_AS_AFTER = -1, -2, -3
"""Broadcast; partial as at the start; partial as at the end, where that is another kind."""
BoxingState = tuple[int, ...]
DimPieces = list[tuple[int, int]]
"""The factors of a dim as (size, owner), major first; -1 owns nothing."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What an axis can own of a dim: some of its slots, or the dim for itself."""

    dim: int
    parts: int
    slots: tuple[int, ...]
    mask: int
    """Its slots as bits, to see who is in whose way."""
    gaps: int = 0
    """Slots in its midst that axes before it must own, else no notation says what it is."""
    free: bool = False
    """Whether nobody begins or ends here: as good a place to wait as any other such."""
    alone: tuple[int, int] = (-1, 1)
    """(axis, blocks) where a dim has no slots and this axis cuts it alone."""


@dataclass
class _Board:
    """Slots and places of one question."""

    sizes: tuple[int, ...]
    slots: list[tuple[int, int]]
    """(dim, size), major first within each dim."""
    places: list[_Place]
    lumps: dict[int, Sbp]
    """Axes that cut a dim alike before and after, though unevenly: nobody touches them."""

    def placement(self, state: BoxingState, kinds: dict[int, str]) -> NdSbp:
        """The placement a state stands for."""
        out: list[Sbp] = []
        earlier = 0
        for a, code in enumerate(state):
            if a in self.lumps:
                out.append(self.lumps[a])
            elif code >= 0:
                place = self.places[code]
                out.append(Split(place.dim, self._before(place, earlier)))
                earlier |= place.mask
            else:
                out.append(B if code == HELD_WHOLE else Partial(kinds[code]))
        return tuple(out)

    def local(self, state: BoxingState, a: int, code: int) -> tuple[int, int]:
        """(dim, blocks) of the local tensor at which an axis opens or cuts, the other axes being where they are."""
        place = self.places[code]
        return place.dim, self._before(place, self.taken(state, a))

    def taken(self, state: BoxingState, a: int) -> int:
        """The slots of all axes but one."""
        out = 0
        for other, code in enumerate(state):
            if code >= 0 and other != a:
                out |= self.places[code].mask
        return out

    def says(self, state: BoxingState) -> bool:
        """Whether the notation has a placement for a state."""
        earlier = 0
        for code in state:
            if code >= 0:
                if self.places[code].gaps & ~earlier:
                    return False
                earlier |= self.places[code].mask
        return True

    def _before(self, place: _Place, owned: int) -> int:
        if place.alone[0] >= 0:
            return place.alone[1]
        return math.prod(
            n for s, (d, n) in enumerate(self.slots[: place.slots[0]]) if d == place.dim and not owned >> s & 1
        )


def _cuts(size: int, nd: NdSbp, dim: int, sizes: tuple[int, ...]) -> DimPieces | None:
    """The factors of a dim under a placement; None if they don't divide."""
    pieces: DimPieces = [(size, -1)]
    for axis, placement in enumerate(nd):
        if not isinstance(placement, Split) or placement.dim != dim or sizes[axis] == 1:
            continue
        skip, want = placement.blocks, sizes[axis]
        out: DimPieces = []
        for n, owner in pieces:
            if owner >= 0:
                out.append((n, owner))
                continue
            for wanted in ("skip", "want"):
                left = skip if wanted == "skip" else want
                if left == 1 or n == 1:
                    continue
                part = math.gcd(left, n)
                if part not in (left, n):
                    return None
                out.append((part, axis if wanted == "want" else -1))
                n //= part
                skip, want = (left // part, want) if wanted == "skip" else (skip, left // part)
                if skip > 1:
                    break
            if n > 1:
                out.append((n, -1))
        if want > 1:
            return None
        pieces = out
    return pieces


def _refine(size: int, sides: list[DimPieces]) -> tuple[list[int], list[list[int]]] | None:
    """Common slots of several factorings of one dim, and who owns them in each."""
    bounds = [list(itertools.accumulate((n for n, _ in side), operator.mul)) for side in sides]
    steps = sorted({1, size}.union(*bounds))
    if any(b % a for a, b in itertools.pairwise(steps)):
        return None
    slots = [b // a for a, b in itertools.pairwise(steps)]
    owners = [
        [side[bisect.bisect_left(at, end)][1] for end in steps[1:]] for side, at in zip(sides, bounds, strict=True)
    ]
    return slots, owners


@lru_cache(maxsize=1 << 12)
def _primes(n: int) -> tuple[int, ...]:
    """The prime factors of an axis size, each as often as it divides."""
    for q in range(2, math.isqrt(n) + 1):
        if n % q == 0:
            return (q, *_primes(n // q))
    return (n,) if n > 1 else ()


def _waiting_room(slots: list[int], rows: list[list[int]], need: dict[int, int]) -> tuple[list[int], list[list[int]]]:
    """The slots of a dim with those that nobody owns cut into the primes that axes are made of."""
    sizes: list[int] = []
    owners: list[list[int]] = [[] for _ in rows]
    for k, n in enumerate(slots):
        mine = [row[k] for row in rows]
        cuts = []
        if all(owner < 0 for owner in mine):
            for p in need:
                while need[p] and n % p == 0:
                    cuts.append(p)
                    need[p] -= 1
                    n //= p
        for m in (*cuts, n):
            if m > 1:
                sizes.append(m)
                for row, owner in zip(owners, mine, strict=True):
                    row.append(owner)
    return sizes, owners


@lru_cache(maxsize=1 << 16)
def boxing(spec: TensorSpec, src: NdSbp, dst: NdSbp, sizes: tuple[int, ...], link: Link = WIRE) -> tuple[Step, ...]:
    """The cheapest chain from `src` to `dst` on a mesh of these axis sizes."""
    src = tuple(B if sizes[a] == 1 else p for a, p in enumerate(src))
    dst = tuple(B if sizes[a] == 1 else p for a, p in enumerate(dst))
    if src == dst:
        return ()
    if len(sizes) == 1 and (direct := _direct(src, dst)) is not None:
        return (direct,)
    before: list[Step] = []
    after: list[tuple[int, int, int]] = []
    begin, end = _codes(src, dst)
    board = _Board(sizes, [], [], {})
    need = Counter(q for p in sizes for q in _primes(p))
    for d, n in enumerate(spec.shape):
        axes_src = [a for a, p in enumerate(src) if isinstance(p, Split) and p.dim == d]
        axes_dst = [a for a, p in enumerate(dst) if isinstance(p, Split) and p.dim == d]
        left, right = _cuts(n, src, d, sizes), _cuts(n, dst, d, sizes)
        refined = _refine(n, [left, right]) if left and right and n else None
        if refined is not None:
            _slots(board, d, *_waiting_room(*refined, need), begin, end)
        elif len(axes_src) <= 1 and len(axes_dst) <= 1:
            _alone(board, d, src, axes_src, begin)
            _alone(board, d, dst, axes_dst, end)
        elif [(a, src[a]) for a in axes_src] == [(a, dst[a]) for a in axes_dst]:
            board.lumps.update({a: src[a] for a in axes_src})
        else:
            for a in reversed(axes_src):
                opened = (*src[:a], B, *src[a + 1 :])
                p = src[a]
                assert isinstance(p, Split)
                before.append(Step("all_gather", (a,), src, opened, give=(d, p.blocks)))
                src = opened
            for a in axes_dst:
                p = dst[a]
                assert isinstance(p, Split)
                after.append((a, d, p.blocks))
    path = _search(board, spec, tuple(begin), tuple(end), link)
    kinds = {
        PARTIAL_AS_BEFORE: next((p.op for p in src if isinstance(p, Partial)), "sum"),
        PARTIAL_AS_AFTER: next((p.op for p in dst if isinstance(p, Partial)), "sum"),
    }
    chain = list(before)
    now = src
    for old, new in itertools.pairwise(path):
        nxt = board.placement(new, kinds)
        chain.append(_step(board, old, new, now, nxt, kinds))
        now = nxt
    for a, d, blocks in after:
        nxt = (*now[:a], Split(d, blocks), *now[a + 1 :])
        chain.append(Step("slice", (a,), now, nxt, take=(d, blocks)))
        now = nxt
    return tuple(chain)


def _direct(src: NdSbp, dst: NdSbp) -> Step | None:
    """The one step of one axis, which no detour is cheaper than; nothing where there may be one, or none is needed.

    A detour over another dim waits for one more message; one over the whole moves more, or no less in more steps.
    """
    (x,), (y,) = src, dst
    give = (x.dim, x.blocks) if isinstance(x, Split) else (0, 1)
    take = (y.dim, y.blocks) if isinstance(y, Split) else (0, 1)
    if isinstance(x, Partial):
        if isinstance(y, Partial):  # of other kinds: through pieces
            return None
        return Step("all_reduce" if y == B else "reduce_scatter", (0,), src, dst, give, take, x.op)
    if isinstance(y, Partial):
        return Step("pad", (0,), src, dst, give if x != B else (-1, 1), take, y.op)
    if x == B:
        return Step("slice", (0,), src, dst, give, take)
    if y == B:
        return Step("all_gather", (0,), src, dst, give, take)
    return Step("all_to_all", (0,), src, dst, give, take) if give[0] != take[0] else None


def _codes(src: NdSbp, dst: NdSbp) -> tuple[list[int], list[int]]:
    """Begin and end, with places still to be filled in."""
    kind = next((p.op for p in src if isinstance(p, Partial)), None)
    begin = [PARTIAL_AS_BEFORE if isinstance(p, Partial) else HELD_WHOLE for p in src]
    end = [
        (PARTIAL_AS_BEFORE if p.op == kind else PARTIAL_AS_AFTER) if isinstance(p, Partial) else HELD_WHOLE for p in dst
    ]
    return begin, end


def _slots(board: _Board, dim: int, slots: list[int], rows: list[list[int]], begin: list[int], end: list[int]) -> None:
    """Put a dim's slots on the board: places are where axes begin and end, and every run of the right size."""
    first = len(board.slots)
    board.slots += [(dim, n) for n in slots]
    known: dict[tuple[int, ...], int] = {}

    def place(run: tuple[int, ...], free: bool) -> int:
        if run not in known:
            known[run] = len(board.places)
            mask = sum(1 << first + s for s in run)
            between = sum(1 << first + s for s in range(run[0], run[-1])) & ~mask
            parts = math.prod(slots[s] for s in run)
            board.places.append(_Place(dim, parts, tuple(first + s for s in run), mask, between, free))
        return known[run]

    for row, codes in zip(rows, (begin, end), strict=True):
        for a in {owner for owner in row if owner >= 0}:
            codes[a] = place(tuple(s for s, owner in enumerate(row) if owner == a), False)
    for i in range(len(slots)):
        for j in range(i + 1, len(slots) + 1):
            if math.prod(slots[i:j]) in board.sizes:
                place(tuple(range(i, j)), all(row[s] < 0 for row in rows for s in range(i, j)))


def _alone(board: _Board, dim: int, nd: NdSbp, axes: list[int], codes: list[int]) -> None:
    """Put a dim without slots on the board, for the one axis that cuts it."""
    for a in axes:
        p = nd[a]
        assert isinstance(p, Split)
        place = _Place(dim, board.sizes[a], (), 1 << (256 + dim), alone=(a, p.blocks))
        if place not in board.places:
            board.places.append(place)
        codes[a] = board.places.index(place)


def _step(board: _Board, old: BoxingState, new: BoxingState, src: NdSbp, dst: NdSbp, kinds: dict[int, str]) -> Step:
    """The move between two neighbouring states, on the local tensor."""
    axes = tuple(a for a, (x, y) in enumerate(zip(old, new, strict=True)) if x != y)
    a = axes[0]
    x, y = old[a], new[a]
    give = board.local(old, a, x) if x >= 0 else (0, 1)
    take = board.local(old, a, y) if y >= 0 else (0, 1)
    if x in (PARTIAL_AS_BEFORE, PARTIAL_AS_AFTER):
        return Step("all_reduce" if y == HELD_WHOLE else "reduce_scatter", axes, src, dst, give, take, kinds[x])
    if y in (PARTIAL_AS_BEFORE, PARTIAL_AS_AFTER):
        return Step("pad", axes, src, dst, give if x >= 0 else (-1, 1), take, kinds[y])
    if x >= 0:
        return Step("all_gather" if y == HELD_WHOLE else "all_to_all", axes, src, dst, give, take)
    return Step("slice", axes, src, dst, give, take)


def _search(board: _Board, spec: TensorSpec, begin: BoxingState, end: BoxingState, link: Link) -> list[BoxingState]:
    """States from `begin` to `end` at least cost; ties go to fewer steps."""
    sizes, places = board.sizes, board.places
    axes = [a for a in range(len(sizes)) if sizes[a] > 1 and a not in board.lumps]
    lump = tuple(board.lumps.get(a, B) for a in range(len(sizes)))
    whole = math.prod(local_shape(spec.shape, lump, sizes, (0,) * len(sizes))) * ITEM_BYTES[spec.dtype]
    fits = {a: [i for i, p in enumerate(places) if p.parts == sizes[a] and p.alone[0] in (-1, a)] for a in axes}
    gaps = any(p.gaps for p in places)
    heap: list[tuple[float, int, BoxingState]] = [(0.0, 0, begin)]
    best: dict[BoxingState, tuple[float, int]] = {begin: (0.0, 0)}
    came: dict[BoxingState, BoxingState] = {}
    while heap:
        cost, hops, state = heapq.heappop(heap)
        if state == end:
            break
        if best[state] < (cost, hops):
            continue
        local = whole / math.prod(sizes[a] for a in axes if state[a] >= 0)
        moves: list[tuple[float, BoxingState]] = []
        terms = [a for a in axes if state[a] <= PARTIAL_AS_BEFORE]
        for mask in range(1, 1 << len(terms)):
            some = [a for i, a in enumerate(terms) if mask >> i & 1]
            p = math.prod(sizes[a] for a in some)
            nxt = tuple(HELD_WHOLE if a in some else c for a, c in enumerate(state))
            moves.append((link.latency_s + 2 * (p - 1) / p * local * _dear(min(some)) / link.bytes_per_s, nxt))
        for a in axes:
            code, p = state[a], sizes[a]
            if code >= 0:
                moves.append(
                    (link.latency_s + (p - 1) * local * _dear(a) / link.bytes_per_s, _set(state, a, HELD_WHOLE))
                )
            cheap = 0.0 if code == HELD_WHOLE else link.latency_s + (p - 1) / p * local * _dear(a) / link.bytes_per_s
            taken = board.taken(state, a)
            open_ = [i for i in fits[a] if i != code and not places[i].mask & taken]
            # One free place is as good as another, and better than one where somebody else belongs. The
            # first and the last are both tried, so that a larger axis finds its slots side by side.
            free = [i for i in open_ if places[i].free]
            moves += [(cheap, _set(state, a, i)) for i in open_ if not free or i in (free[0], free[-1], end[a])]
            if (
                code >= HELD_WHOLE
                and end[a] <= PARTIAL_AS_BEFORE
                and all(c > PARTIAL_AS_BEFORE or c == end[a] for c in state)
            ):
                moves.append((0.0, _set(state, a, end[a])))
        for price, nxt in moves:
            key = (cost + price, hops + 1)
            if key < best.get(nxt, (math.inf, 0)) and not (gaps and not board.says(nxt)):
                best[nxt] = key
                came[nxt] = state
                heapq.heappush(heap, (*key, nxt))
    path = [end]
    while path[-1] != begin:
        path.append(came[path[-1]])
    return path[::-1]


def _dear(a: int) -> float:
    """Which of two orders with the same bytes: axes further out have the slower links, so they move less."""
    return 1 + 1e-6 / (1 + a)


def _set(state: BoxingState, a: int, code: int) -> BoxingState:
    return (*state[:a], code, *state[a + 1 :])

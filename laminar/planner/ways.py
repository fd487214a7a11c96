"""At least so many seconds: what it takes to bring a tensor from one placement to another.

Boxing takes a tensor from placement to placement by moving one axis at a time (`rules.boxing`): gathers, exchanges and
reductions have a price, cutting and padding are free. Which chain it takes is its own affair; no chain costs less than
the cheapest way through the same states. So all that matters of a placement on an axis is whether it is whole, a term,
or a piece, and of two pieces whether they are the same one. That leaves four states for each axis (two pieces are
enough: where a tensor waits while another axis moves makes no difference to the price), and the shortest ways between
all of them are found once for each size.

Which axes are in each other's way is not asked, nor do pieces have to divide evenly: both only lower the price.

What travels together is cheaper (`lower.merge`):

    values       Those inside of a step travel alone, but for small all-reduces, which may have company and count by
                 their bytes.
    parameters   Gathers of what is stored are merged; they count as a share of a full bucket. What is gathered on
                 another axis after that travels alone.
    gradients    All reductions are merged, those of a first axis with those of the next. In a program that is cut into
                 parts, whatever comes into one or leaves it travels so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from laminar.cost.prices import Machine
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import NdSbp, Partial, Split
from laminar.lower.merge import BUCKET_BYTES, GATHER_BYTES, REDUCTIONS, SMALL_BYTES

LARGE = 1 << 28
"""Bytes of an exchange whose latency does not count."""
WHOLE, TERM, PIECE, OTHER = range(4)
"""What a placement is on an axis; `OTHER` is a piece, but not the one that was there at first."""
STATES = 4


VALUES, PARAMETERS, GRADIENTS = range(3)
"""What travels."""
Pairs = tuple[np.ndarray, np.ndarray]
"""States before, and states behind."""


class Ways:
    """Least seconds of boxing on one mesh, exchanges of each level of the cluster counting by a share."""

    def __init__(self, machine: Machine, mesh: Mesh, shares: Sequence[float]) -> None:
        """`shares`: by level of the cluster, what a second of an exchange that keeps its links busy counts."""
        self.machine, self.mesh, self.shares = machine, mesh, tuple(shares)
        self.axes = range(len(mesh.sizes))
        self.states = list(itertools.product(range(STATES), repeat=len(self.axes)))
        self._known: dict[tuple[int, int, bool], np.ndarray] = {}
        self._rates: dict[tuple[str, tuple[int, ...]], float] = {}
        self._priced: dict[tuple[str, float, tuple[int, ...], bool], float] = {}

    def table(self, nbytes: int, pairs: Pairs, what: int = VALUES, shared: bool = True) -> np.ndarray:
        """Seconds from each placement to each other.

        If others fetch the same tensor (`shared`), one may find it where another has left it.
        """
        found: np.ndarray = self._ways(nbytes, what, shared)[pairs]
        return found

    def _ways(self, nbytes: int, what: int, shared: bool) -> np.ndarray:
        """The shortest ways between all states of a tensor of so many bytes."""
        key = (nbytes, what, shared)
        found = self._known.get(key)
        if found is None:
            if what == VALUES:
                found = self._closed(self._moves(nbytes, True), shared)
            elif what == GRADIENTS:
                found = self._closed(self._moves(nbytes, False), shared)
            else:
                # The first exchange may have company, those behind it have not.
                together, alone = self._moves(nbytes, False), self._closed(self._moves(nbytes, True), True)
                found = np.minimum((together[:, :, None] + alone[None, :, :]).min(1), alone)
            found = self._known[key] = self._padded(found)
        return found

    def _closed(self, moves: np.ndarray, shared: bool) -> np.ndarray:
        """On one axis without company every change is a single move; else moves follow each other."""
        if len(self.axes) == 1 and not shared:
            return moves
        for k in range(len(moves)):
            moves = np.minimum(moves, moves[:, k, None] + moves[None, k, :])
        return moves

    def _padded(self, ways: np.ndarray) -> np.ndarray:
        """Whoever wants terms may make them of what is whole or in pieces, for nothing: as the last step."""
        ways = ways.reshape((len(self.states), *(STATES,) * len(self.axes))).copy()
        for axis in self.axes:
            at = np.moveaxis(ways, axis + 1, 0)
            at[TERM] = at.min(0)
        return ways.reshape(len(self.states), -1)

    def _moves(self, nbytes: int, alone: bool) -> np.ndarray:
        """Seconds of every single move."""
        sizes, at = self.mesh.sizes, {state: k for k, state in enumerate(self.states)}
        ways = np.full((len(at), len(at)), np.inf)
        np.fill_diagonal(ways, 0.0)
        for state, k in at.items():
            held = nbytes / math.prod(n for n, c in zip(sizes, state, strict=True) if c >= PIECE)
            terms = [a for a in self.axes if state[a] == TERM]
            if len(terms) > 1:
                to = at[tuple(WHOLE if a in terms else c for a, c in enumerate(state))]
                ways[k, to] = self._price("all_reduce", held, tuple(terms), alone)
            for axis in self.axes:
                for new in range(STATES):
                    if new not in (TERM, state[axis]):
                        to = at[(*state[:axis], new, *state[axis + 1 :])]
                        ways[k, to] = min(ways[k, to], self._move(state[axis], new, held, axis, alone))
        return ways

    def _move(self, old: int, new: int, held: float, axis: int, alone: bool) -> float:
        """Seconds for one axis to change, a rank holding so many bytes before."""
        if old == WHOLE:
            return 0.0
        if old == TERM:
            return self._price("all_reduce" if new == WHOLE else "reduce_scatter", held, (axis,), alone)
        if new == WHOLE:
            return self._price("all_gather", held * self.mesh.sizes[axis], (axis,), alone)
        return self._price("all_to_all", held, (axis,), alone)

    # --- prices

    def _price(self, kind: str, held: float, axes: tuple[int, ...], alone: bool) -> float:
        key = (kind, held, axes, alone)
        found = self._priced.get(key)
        if found is None:
            share = self._shares_of(axes)
            found = share * self._least(kind, held, axes, alone) if share else 0.0
            self._priced[key] = found
        return found

    def _least(self, kind: str, held: float, axes: tuple[int, ...], alone: bool) -> float:
        if not alone:
            return self._together(kind, held, axes)
        parts = self._parts(axes)
        small = kind == "all_reduce" and 2 * held * (parts - 1) / parts < SMALL_BYTES
        return self._bare(kind, held, axes) if small else self.seconds(kind, held, axes)

    def _shares_of(self, axes: tuple[int, ...]) -> float:
        if self.machine.cluster.backend == "shared":
            return 1.0  # ranks that copy for themselves do nothing else meanwhile
        group = self.mesh.group(axes, self.mesh.coords(0))
        return self.shares[max(0, self.machine.cluster.span(group).level)]

    def _parts(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.mesh.sizes[a] for a in axes)

    def seconds(self, kind: str, held: float, axes: tuple[int, ...]) -> float:
        """Of one exchange by itself."""
        cost = self.machine.gloo if kind == "all_to_all" else self.machine.collectives
        times = self.machine.times["exchange" if cost.cluster.backend == "shared" else "wire"]
        nbytes = max(1, int(held))
        # Terms that lie where all ranks can read them are not copied there first.
        lying = (False, True) if kind == "all_reduce" else (False,)
        return times * min(cost.on(kind, nbytes, self.mesh, axes, resident=there).seconds for there in lying)

    def _bare(self, kind: str, held: float, axes: tuple[int, ...]) -> float:
        """Of its bytes alone: what as many more add to an exchange that is large already."""
        key = (kind, axes)
        if key not in self._rates:
            self._rates[key] = (self.seconds(kind, 2 * LARGE, axes) - self.seconds(kind, LARGE, axes)) / LARGE
        return self._rates[key] * held

    def _together(self, kind: str, held: float, axes: tuple[int, ...]) -> float:
        """Its share of a bucket.

        Buckets are closed once they are full, so the largest of small tensors holds twice as much. What is larger
        itself may have company that is less than half of that, and leaves it as much.
        """
        if kind not in (*REDUCTIONS, "all_gather"):
            return self._bare(kind, held, axes)
        full = self._full[kind, axes]
        if held < full / 2:
            return self.seconds(kind, full, axes) * held / full
        return max(self._bare(kind, held, axes), self.seconds(kind, held, axes) - self.seconds(kind, full, axes) / 2)

    @cached_property
    def _full(self) -> dict[tuple[str, tuple[int, ...]], float]:
        """Bytes of the largest bucket, by kind and axes.

        Where gradients are reduced over two axes in turn, what goes first travels in the buckets of what follows,
        which are told to be full by what is left for them to do.
        """
        sets = [axes for n in (1, *self.axes[1:]) for axes in itertools.combinations(self.axes, n)]
        sets = list(dict.fromkeys([*sets, tuple(self.axes)]))
        own: dict[tuple[str, tuple[int, ...]], float] = {}
        for axes in sets:
            p = self._parts(axes)
            received = (p - 1) / p if p > 1 else 1.0
            own["all_gather", axes] = 2 * GATHER_BYTES / received
            own["reduce_scatter", axes] = 2 * BUCKET_BYTES / received
            own["all_reduce", axes] = BUCKET_BYTES / received
        out = dict(own)
        for kind in REDUCTIONS:
            for axes in sets:
                left = self._parts(axes) if kind == "reduce_scatter" else 1
                others = [own[k, o] for k in REDUCTIONS for o in sets if not set(o) & set(axes)]
                out[kind, axes] = max([own[kind, axes], *(left * full for full in others)])
        return out


def pairs_of(rows: Sequence[NdSbp], columns: Sequence[NdSbp]) -> Pairs:
    """From each placement of `rows` to each of `columns`."""
    start, end = np.zeros((len(rows), 1), dtype=int), np.zeros((len(rows), len(columns)), dtype=int)
    for axis in range(len(rows[0]) if rows else 0):
        numbers: dict[object, int] = {}
        here = np.array([numbers.setdefault(nd[axis], len(numbers)) for nd in rows])[:, None]
        there = np.array([numbers.setdefault(nd[axis], len(numbers)) for nd in columns], dtype=int)[None, :]
        codes = np.array([code(p) for p in numbers])
        start = start * STATES + codes[here]
        end = end * STATES + np.where((here != there) & (codes[there] == PIECE), OTHER, codes[there])
    return start, end


def code(placement: object) -> int:
    """What a placement is on an axis."""
    return PIECE if isinstance(placement, Split) else TERM if isinstance(placement, Partial) else WHOLE

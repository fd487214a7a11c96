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
    parameters   Gathers of what is stored are merged, on a second axis too; they count as a share of a full bucket.
    gradients    All reductions are merged, those of a first axis with those of the next. In a program that is cut into
                 parts, whatever comes into one or leaves it travels so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from laminar.cost.machine import Machine
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import B, Partial, Sbp, Split
from laminar.lower.boxing.buckets import BUCKET_BYTES, GATHER_BYTES, REDUCTIONS, SMALL_BYTES

NO_LATENCY_BYTES = 1 << 28
PROBED_SIZES = [round(2 ** (k / 4)) for k in range(4 * 10, 4 * 29)]
"""At which a measured price is looked at to find where it is least for each byte or element."""
"""Bytes of an exchange whose latency does not count."""
WHOLE, TERM, PIECE, OTHER = range(4)
"""What a placement is on an axis; `OTHER` is a piece, but not the one that was there at first."""
STATES = 4


VALUES, PARAMETERS, GRADIENTS = range(3)
"""What travels."""
Pairs = tuple[np.ndarray, np.ndarray]
"""States before, and states behind."""
TablePlaces = tuple[np.ndarray, np.ndarray]
"""Of a table: rows, and columns."""
BoxingSeconds = dict[tuple[str, float, tuple[int, ...], bool], float]
"""Seconds by kind, bytes, axes, and whether it travels alone."""


_PRICED: WeakKeyDictionary[Machine, dict[Mesh, BoxingSeconds]] = WeakKeyDictionary()
"""What exchanges cost on meshes, whatever a second of them counts."""


class Ways:
    """Least seconds of boxing on one mesh, exchanges of each level of the cluster counting by a share."""

    def __init__(self, machine: Machine, mesh: Mesh, shares: Sequence[float]) -> None:
        """`shares`: by level of the cluster, what a second of an exchange that keeps its links busy counts."""
        self.machine, self.mesh, self.shares = machine, mesh, tuple(shares)
        self.axes = range(len(mesh.sizes))
        self.states = list(itertools.product(range(STATES), repeat=len(self.axes)))
        self._known: dict[tuple[int, int, bool], np.ndarray] = {}
        self._rates: dict[tuple[str, tuple[int, ...]], float] = {}
        self._priced: BoxingSeconds = _PRICED.setdefault(machine, {}).setdefault(mesh, {})
        self._counts: dict[tuple[int, ...], float] = {}

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
            else:
                found = self._closed(self._moves(nbytes, False), shared)
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
        """Whoever wants terms may make them of what is whole or in shards, for nothing: as the last step."""
        ways = ways.reshape((len(self.states), *(STATES,) * len(self.axes))).copy()
        for axis in self.axes:
            at = np.moveaxis(ways, axis + 1, 0)
            at[TERM] = at.min(0)
        return ways.reshape(len(self.states), -1)

    def _moves(self, nbytes: int, alone: bool) -> np.ndarray:
        """Seconds of every single move."""
        ways = np.full((len(self.states), len(self.states)), np.inf)
        np.fill_diagonal(ways, 0.0)
        whole, priced = self._single
        ways[whole] = 0.0
        for (kind, share, axes), places in priced.items():
            ways[places] = self._price(kind, nbytes / share, axes, alone)
        return ways

    @cached_property
    def _single(self) -> tuple[TablePlaces, dict[tuple[str, float, tuple[int, ...]], TablePlaces]]:
        """Which moves are free, and which are exchanges, of a tensor cut into so many pieces: (from, to)."""
        sizes, at = self.mesh.sizes, {state: k for k, state in enumerate(self.states)}
        free: list[tuple[int, int]] = []
        found: dict[tuple[str, float, tuple[int, ...]], list[tuple[int, int]]] = {}
        for state, k in at.items():
            share = math.prod(n for n, c in zip(sizes, state, strict=True) if c >= PIECE)
            terms = tuple(a for a in self.axes if state[a] == TERM)
            if len(terms) > 1:
                to = at[tuple(WHOLE if a in terms else c for a, c in enumerate(state))]
                found.setdefault(("all_reduce", share, terms), []).append((k, to))
            for axis in self.axes:
                for new in range(STATES):
                    if new in (TERM, state[axis]):
                        continue
                    move = (k, at[(*state[:axis], new, *state[axis + 1 :])])
                    if state[axis] == WHOLE:
                        free.append(move)
                    else:
                        kind, part = self._move(state[axis], new, axis)
                        found.setdefault((kind, share / part, (axis,)), []).append(move)
        return _places(free), {key: _places(moves) for key, moves in found.items()}

    def _move(self, old: int, new: int, axis: int) -> tuple[str, float]:
        """How one axis changes that is not whole, and how much that takes of what a rank holds."""
        if old == TERM:
            return ("all_reduce" if new == WHOLE else "reduce_scatter"), 1
        if new == WHOLE:
            return "all_gather", self.mesh.sizes[axis]
        return "all_to_all", 1

    # --- prices

    def _price(self, kind: str, held: float, axes: tuple[int, ...], alone: bool) -> float:
        share = self._counts.get(axes)
        if share is None:
            share = self._counts[axes] = self._shares_of(axes)
        if not share:
            return 0.0
        key = (kind, held, axes, alone)
        found = self._priced.get(key)
        if found is None:
            found = self._priced[key] = self._least(kind, held, axes, alone)
        return share * found

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
        """Of its bytes alone: what as many more add to an exchange that is large already.

        Where exchanges were measured, those of a few megabytes may take less for each byte than larger ones: they find
        them in a cache.
        """
        key = (kind, axes)
        if key not in self._rates:
            one, two = (self.seconds(kind, n * NO_LATENCY_BYTES, axes) for n in (1, 2))
            rate = (two - one) / NO_LATENCY_BYTES
            if self.machine.cluster.profile:
                rate = min(rate, *(self.seconds(kind, size, axes) / size for size in PROBED_SIZES))
            self._rates[key] = rate
        return self._rates[key] * held

    def _together(self, kind: str, held: float, axes: tuple[int, ...]) -> float:
        """Its share of a bucket.

        Buckets are closed once they are full, so the largest of small tensors holds twice as much. What is larger
        itself may have company that is less than half of that, and leaves it as much.
        """
        if kind not in (*REDUCTIONS, "all_gather") or self.machine.cluster.profile:
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


def _places(moves: list[tuple[int, int]]) -> TablePlaces:
    rows, columns = zip(*moves, strict=True) if moves else ((), ())
    return np.array(rows, dtype=np.intp), np.array(columns, dtype=np.intp)


# --- placements as numbers

ROW, COLUMN = 4, 5
"""Pieces that are like none on the other side of an exchange, on the one side and on the other."""
_NUMBERS: dict[Sbp, int] = {B: 0, Partial("sum"): 1, Partial("max"): 2, Partial("min"): 3}
_PLACEMENTS: list[Sbp] = [B, Partial("sum"), Partial("max"), Partial("min"), Split(0), Split(0)]


def number(placement: Sbp) -> int:
    """A number for what a tensor is on an axis, the same in all tables: 0 is whole, 1 to 3 terms, the rest pieces."""
    found = _NUMBERS.get(placement)
    if found is None:
        found = _NUMBERS[placement] = len(_PLACEMENTS)
        _PLACEMENTS.append(placement)
    return found


def placement(number: int) -> Sbp:
    """What a number stands for."""
    return _PLACEMENTS[number]


def known() -> int:
    """How many numbers there are."""
    return len(_PLACEMENTS)


def codes(numbers: np.ndarray) -> np.ndarray:
    """What placements are on an axis: `WHOLE`, `TERM` or `PIECE`."""
    found: np.ndarray = (numbers > 0).astype(np.intp) + (numbers > 3)
    return found


def pairs_of(rows: np.ndarray, columns: np.ndarray) -> Pairs:
    """From each placement of `rows` to each of `columns`, given as numbers by axis."""
    start, end = np.zeros((len(rows), 1), dtype=np.intp), np.zeros((len(rows), len(columns)), dtype=np.intp)
    for axis in range(rows.shape[1]):
        here, there = rows[:, axis, None], columns[None, :, axis]
        start = start * STATES + codes(here)
        end = end * STATES + codes(there) + ((here != there) & (there > 3))
    return start, end

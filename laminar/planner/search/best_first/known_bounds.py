"""What is known of each cell of a graph: whether anything can fit in it, and the best lower bound so far.

A cell begins with the cheapest bound, and gets a better one when it is asked for. In the end the lowest are raised as
far as they go: they are what the search proves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from enum import IntEnum

from laminar.ir.plans.staged import Staged
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.estimate.candidates import Final
from laminar.planner.space.cell import Cell
from laminar.planner.space.plan_space import out_of_row
from laminar.planner.space.request import Request
from laminar.planner.tuning import PLENTY_OF_MEMORY


class BoundKind(IntEnum):
    """How good a lower bound is, the cheapest first."""

    ROUGH = 0
    QUICK = 1
    FULL = 2


class KnownBounds:
    """The cells of one graph."""

    def __init__(self, model_bounds: Bounds, request: Request) -> None:
        self.model_bounds, self.request = model_bounds, request
        self.at: dict[Cell, float] = {}
        """The best bound that is known of each cell."""
        self.kind: dict[Cell, BoundKind] = {}
        """Which that is."""
        self.unfit: set[Cell] = set()
        """Cells in which nothing can fit."""
        self.lowest_s = 0.0
        """No plan of any cell is faster."""
        self.proved = False
        """Whether the lowest bound is as good as can be: time has ended nothing."""

    def begin(self, cells: Iterable[Cell]) -> None:
        """With the cheapest bound of each."""
        for cell in cells:
            self.at[cell], self.kind[cell] = self.model_bounds.rough(cell), BoundKind.ROUGH

    def room(self, cell: Cell) -> float:
        """Its bound, or infinity where nothing fits."""
        if self.least_bytes(cell) <= self.request.room_bytes:
            return self.at[cell]
        self.unfit.add(cell)
        self.at[cell] = math.inf
        return math.inf

    def raised(self, cell: Cell, kind: BoundKind, best_s: float) -> float:
        """At least so good a bound; one that is not below `best_s` is good enough."""
        if self.kind[cell] < kind:
            quick = kind == BoundKind.QUICK
            better = (self.model_bounds.quick(cell) if quick else self.model_bounds.of(cell, best_s)).seconds
            self.at[cell], self.kind[cell] = max(self.at[cell], better), kind
        return self.at[cell]

    def raise_lowest(self, best_s: float, left: Callable[[], float]) -> None:
        """The lowest bounds of cells that the best plan does not rule out, made as good as they can be."""
        queue = [(bound_s, k, cell) for k, (cell, bound_s) in enumerate(self.at.items())]
        heapq.heapify(queue)
        self.lowest_s = best_s
        while queue:
            bound_s, k, cell = heapq.heappop(queue)
            self.lowest_s = min(bound_s, best_s)
            self.proved = bound_s >= best_s or self.kind[cell] == BoundKind.FULL
            if self.proved or left() < 0:
                break
            better = self.room(cell) if self.kind[cell] == BoundKind.ROUGH else bound_s
            if math.isfinite(better):
                better = self.raised(cell, BoundKind(self.kind[cell] + 1), best_s)
            heapq.heappush(queue, (better, k, cell))

    def least_bytes(self, cell: Cell) -> float:
        """What a rank holds at least; where the batch at once leaves plenty of room, micro-batches do too."""
        whole = self.model_bounds.least_bytes(Cell(1, 1, 1, self.request.cluster.devices, 1))
        return whole if PLENTY_OF_MEMORY * whole < self.request.room_bytes else self.model_bounds.least_bytes(cell)

    def roomy(self, cell: Cell) -> float:
        """What a rank holds at least where that fits many times over, else 0."""
        least = self.least_bytes(cell)
        return least if PLENTY_OF_MEMORY * least < self.request.room_bytes else 0.0

    def about(self, final: Final) -> bool:
        """Whether a plan is one of those that the bound of its cell is about."""
        if final.score.apart:
            return False
        return not (
            isinstance(final.plan, Staged) and self.model_bounds.in_a_row(final.score.cell) and out_of_row(final.plan)
        )

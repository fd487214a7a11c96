"""At least so many seconds: a lower bound on the simulated time of one plan, without lowering or simulating it.

The bound of its cell (`cell_bound.py`), with every op doing what the plan says instead of whatever serves best. A plan
is that of the folded graph, whose layers stand for all: what an op of a layer may do is what its likes do in any layer
that is kept. Where parameters and optimizer state lie may stay open: one bound then holds for a placement with ZeRO of
any stage and without.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from laminar.cost.machine import Machine
from laminar.ir.graph import Graph, Node
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Choice, Plan
from laminar.ir.sbp import NdSbp
from laminar.planner.bounds.boxing_bound import number
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.bounds.pipeline_bound import Order
from laminar.planner.bounds.signatures import Placements, Rows, SignaturePrices
from laminar.planner.space.cell import Cell
from laminar.planner.tuning import DOMINATED_SHARES, VALUE_WORTHS


def plan_bound_s(bounds: Bounds, plan: Plan, cell: Cell, worth_s: float = math.inf, stored: bool = True) -> float:
    """Seconds that a plan of a cell's folded graph takes at least; one that is not below `worth_s` is good enough.

    Unless as `stored` there, its parameters and state may lie anyhow.
    """
    return _PlanBounds(bounds, plan, stored).of(cell, worth_s).seconds


def cut_bound_s(bounds: Bounds, plan: Plan, cell: Cell, of: Mapping[str, int], worth_s: float = math.inf) -> float:
    """Seconds that a pipeline takes at least whose forward ops are in these stages, whatever blocks are recomputed.

    One stage at each place, gradients of weights together with those of inputs. Nothing is said (0) where stages don't
    stand in a row.
    """
    starts = bounds.starts(cell, of)
    return 0.0 if starts is None else _PlanBounds(bounds, plan, stored=False).cut_s(cell, starts, worth_s)


class _PlanBounds(Bounds):
    """Those of one plan, for the cells of its mesh."""

    def __init__(self, bounds: Bounds, plan: Plan, stored: bool) -> None:
        super().__init__(bounds.model, bounds.rows)
        self.cells, self.plan, self.stored = bounds, plan, stored
        self.alone, self._ways, self._norms = bounds.alone, bounds._ways, bounds._norms
        self._prices = copy.copy(bounds._prices)
        # There are few options: all are kept, and what a value between layers is worth makes next to no difference.
        self._prices.needed = {(plan.mesh, looped): len(DOMINATED_SHARES) - 1 for looped in (False, True)}
        self._prices.worths = {(plan.mesh, parts): VALUE_WORTHS[-1] for parts in (False, True)}

    def cut_s(self, cell: Cell, starts: Sequence[int], worth_s: float) -> float:
        """Where all stages but the first begin at these ops; without exchanges if that is not below `worth_s`."""
        micro, row, meeting_s = cell.micro_batches, self._row(cell), self._meeting_s(cell)
        kernels_s = self.alone.kernels_s(cell)
        found_s = meeting_s + row.cut_s(starts, micro, kernels_s + row.later_s[0], worth_s - meeting_s)
        for shares in self._shares(cell):
            if found_s >= worth_s:
                break
            work_s = kernels_s + self._line(cell, shares, micro, 0.0) / micro
            found_s = max(found_s, meeting_s + row.cut_s(starts, micro, work_s, worth_s - meeting_s))
        return found_s

    @cached_property
    def _order(self) -> Order:
        return self.cells._order

    def _placements(self, graph: Graph, mesh: Mesh) -> Placements:
        if mesh != self.plan.mesh or mesh.ranks == 1:
            return super()._placements(graph, mesh)
        return _Given(graph, self.model.machine(mesh), mesh, self._prices, self._chosen(graph))

    def _chosen(self, graph: Graph) -> _Chosen:
        """What ops do, and how parameters lie: of a layer, as in any layer that is kept."""
        at = self.model.fold.at if len(self.model.keeps) > 1 else {}
        place = {n.name: at[n.name][1:] if n.name in at else n.name for n in graph.nodes}
        ops: dict[object, set[Choice]] = {}
        for node in graph.nodes:
            ops.setdefault(place[node.name], set()).add(self.plan.ops[node.name])
        lie: dict[object, set[tuple[NdSbp, NdSbp]]] = {}
        trained = {o.name: (place[o.ref.name], o.ref.index) for o in graph.outputs if o.kind == "grad"}
        for name, where in trained.items():
            stored = self.plan.inputs[name]
            lie.setdefault(where, set()).add((stored, self.plan.state.get(name, stored)))
        return _Chosen(
            {name: ops[where] for name, where in place.items()},
            {name: lie[where] for name, where in trained.items()} if self.stored else {},
        )


class _Chosen(NamedTuple):
    """By op what it or its likes do, and by parameter how it or its likes are stored and owned."""

    ops: Mapping[str, Collection[Choice]]
    lie: Mapping[str, Collection[tuple[NdSbp, NdSbp]]]


class _Given(Placements):
    """Ops that do what a plan says."""

    settled = True

    def __init__(self, graph: Graph, machine: Machine, mesh: Mesh, prices: SignaturePrices, chosen: _Chosen) -> None:
        super().__init__(graph, machine, mesh, prices)
        self.chosen = chosen
        self._given: dict[str, Rows] = {}

    def rows(self, node: Node) -> Rows:
        """What an op or its likes do; everything it can do where one of them does what no rule knows."""
        found = self._given.get(node.name)
        if found is None:
            found = self._given[node.name] = self._some(super().rows(node), self.chosen.ops[node.name])
        return found

    def _some(self, every: Rows, done: Collection[Choice]) -> Rows:
        kept = np.zeros(len(every.seconds), dtype=bool)
        for choice in done:
            mine = (every.placed == _numbers((*choice.ins, *choice.outs))[None]).all((1, 2))
            if not mine.any():
                return every
            kept |= mine
        return every.some(kept)

    def lie(self, param: str) -> tuple[np.ndarray, np.ndarray] | None:
        """How the plan stores it or its likes, and who owns them."""
        found = self.chosen.lie.get(param)
        if found is None:
            return None
        stored, owned = zip(*found, strict=True)
        return _numbers(stored), _numbers(owned)


def _numbers(placed: Sequence[NdSbp]) -> np.ndarray:
    return np.array([[number(p) for p in nd] for nd in placed], dtype=np.intp)

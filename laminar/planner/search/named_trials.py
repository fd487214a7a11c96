"""Which plans with a name have to be simulated: those that no bound shows to be slower than the best, or too large.

A search is never slower than any plan with a name (`planner/estimate/named_plans.py`). So one is passed over only

    where its cell is, or the bound of its placement (`planner/bounds/plan_bound.py`) is not below the best
    where parameters, gradients and state alone have no room as it keeps them
    where it is the very plan that another name stands for, as ZeRO 2 and 1 mostly are

Scores have no say in it: they are estimates.
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.ir.certificate import Contradiction
from laminar.ir.plan import Choice, Plan
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.bounds.plan_bound import plan_bound_s
from laminar.planner.estimate.candidates import Final, described
from laminar.planner.estimate.model import Model, Score
from laminar.planner.estimate.named_plans import Named
from laminar.planner.estimate.score import scored
from laminar.planner.space.cell import Cell
from laminar.planner.space.contradictions import contradicted
from laminar.staging.stage_plans import inner_plan


class NamedTrials:
    """Plans with a name of one model, before they are simulated."""

    def __init__(self, model: Model, bounds: Bounds, best_s: Callable[[], float]) -> None:
        self.model, self.bounds, self.best_s = model, bounds, best_s
        self._known: dict[tuple[Cell, frozenset[tuple[str, Choice]]], float] = {}
        """Bounds, by cell and by what its ops do: ZeRO does not change that."""
        self._asked: set[tuple[Cell, str]] = set()
        """Plans without stages that were asked about, by cell and hash."""
        self.bound_s = 0.0
        """Of the plan that was asked about last."""

    def ruled_out(self, one: Named, as_typed: bool = False) -> bool:
        """Whether it has no room or is no faster than the best; `as_typed`: a pipeline as `laminar.plans` cuts it."""
        plan, room = self.plan(one, as_typed), self.model.request.room_bytes
        if one.cell.plain and self.model.stays_bytes(plan) > room:
            return True
        if one.cell.plain and not one.cell.recompute:
            if (one.cell, plan.hash) in self._asked:
                return True
            self._asked.add((one.cell, plan.hash))
        best_s = self.best_s()
        key = (one.cell, frozenset(plan.ops.items()))
        if key not in self._known:
            self._known[key] = plan_bound_s(self.bounds, plan, one.cell, best_s, stored=False)
        self.bound_s = self._known[key]
        if self.bound_s < best_s:
            self.bound_s = plan_bound_s(self.bounds, plan, one.cell, best_s)
        return self.bound_s >= best_s

    def plan(self, one: Named, as_typed: bool = False) -> Plan:
        """Of the folded graph of a micro-batch; `as_typed`, what each place of a pipeline is given."""
        made, graph = one.cell, self.model.small(one.cell.micro_batches, self.model.keeps[-1])
        if as_typed:
            return inner_plan(graph, made.mesh)
        if one.typed is not None:
            return one.typed()
        plan = self.model.planned(made.micro_batches, made.mesh, one.style)
        return self.model.placer(made.mesh).pieces(graph, plan, one.style, one.zero)

    def contradicted(self, final: Final) -> Contradiction | None:
        """Whether the plan that was asked about last was simulated faster than its bound."""
        return contradicted(described(final.score), final.seconds, self.bound_s)

    def score(self, one: Named) -> Score:
        """What is to be simulated; where blocks are made again, with as many of them as are expected to fit."""
        plan = one.typed() if one.typed else None
        if one.cell.recompute:
            return scored(self.model, one.cell, one.style, one.zero, plan)
        return Score(one.cell, one.style, one.zero, plan, 0.0, 0.0)

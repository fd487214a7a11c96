"""Plans with a name, simulated unless a bound shows that they are slower than the best, or too large.

A search is never slower than any plan with a name (`planner/space/named_plans.py`). So one is passed over only

    where its cell is, or the bound of its placement (`planner/bounds/plan_bound.py`) is not below the best
    where that of its stages as they are cut is not, however many blocks are recomputed
    where parameters, gradients and state alone have no room as it keeps them
    where it is the very plan that another name stands for, as ZeRO 2 and 1 mostly are

Scores have no say in it: they are estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from laminar.errors import LaminarError
from laminar.forecast.pipeline_step import predict_staged
from laminar.ir.plans.certificate import Contradiction
from laminar.ir.plans.plan import Choice, Plan
from laminar.ir.plans.staged import Staged
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.bounds.plan_bound import cut_bound_s, plan_bound_s
from laminar.planner.estimate.candidates import Final, Score, described_candidate
from laminar.planner.estimate.pipeline_recompute import first_cut
from laminar.planner.estimate.score_cell import CellScorer
from laminar.planner.estimate.score_placement import feasible, scored
from laminar.planner.search.best_first.known_bounds import BoundKind
from laminar.planner.search.best_first.trials import Trials
from laminar.planner.space.cell import Cell
from laminar.planner.space.contradictions import contradicted
from laminar.planner.space.named_plans import Named, named
from laminar.staging.balance import balanced
from laminar.staging.stage_plans import inner_plan


class NamedBounds:
    """What is known of plans with a name of one model before they are simulated."""

    def __init__(self, scorer: CellScorer, bounds: Bounds, best_s: Callable[[], float]) -> None:
        self.scorer, self.model, self.bounds, self.best_s = scorer, scorer.model, bounds, best_s
        self._known: dict[tuple[Cell, frozenset[tuple[str, Choice]]], float] = {}
        """Bounds, by cell and by what its ops do: ZeRO does not change that."""
        self._cut_s: dict[tuple[object, ...], float] = {}
        """Bounds of pipelines, by what they depend on: how ZeRO stores does not matter."""
        self._plans: dict[tuple[object, ...], Plan] = {}
        """Of stages: whether blocks are recomputed does not matter."""
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

    def cut_ruled_out(self, one: Named, as_typed: bool = False) -> bool:
        """Whether the stages of a pipeline are cut so that it is no faster than the best: asked first, it is cheap."""
        cell, best_s = one.cell, self.best_s()
        if cell.stages == 1:
            return False
        plan, deep = self.plan(one, as_typed), self.model.whole(cell.micro_batches)
        if as_typed:
            cuts = [balanced(deep, cell.stages)]
        else:
            score = self.score(one)
            cuts = [first_cut(self.model, score, deep, by) for by in self.scorer.cuts(score)]
        for of in cuts:
            starts = self.bounds.starts(cell, of)
            if starts is None:
                return False
            key = (cell, one.style, as_typed, *starts)
            if key not in self._cut_s:
                self._cut_s[key] = cut_bound_s(self.bounds, plan, cell, of, best_s)
            if self._cut_s[key] < best_s:
                return False
        return True

    def plan(self, one: Named, as_typed: bool = False) -> Plan:
        """Of the folded graph of a micro-batch; `as_typed`, what each place of a pipeline is given."""
        if one.cell.plain:
            return self._made(one, as_typed)
        key = (one.cell.micro_batches, one.cell.mesh, one.style, one.zero, as_typed)
        if key not in self._plans:
            self._plans[key] = self._made(one, as_typed)
        return self._plans[key]

    def _made(self, one: Named, as_typed: bool) -> Plan:
        made, graph = one.cell, self.model.small(one.cell.micro_batches, self.model.keeps[-1])
        if as_typed:
            return inner_plan(graph, made.mesh)
        if one.typed is not None:
            return one.typed()
        plan = self.model.planned(made.micro_batches, made.mesh, one.style)
        return self.model.placer(made.mesh).pieces(graph, plan, one.style, one.zero)

    def contradicted(self, final: Final) -> Contradiction | None:
        """Whether the plan that was asked about last was simulated faster than its bound."""
        return contradicted(described_candidate(final.score), final.seconds, self.bound_s)

    def score(self, one: Named) -> Score:
        """What is to be simulated; where blocks are recomputed, with as many of them as are expected to fit."""
        plan = one.typed() if one.typed else None
        if one.cell.recompute:
            return scored(self.model, one.cell, one.style, one.zero, plan)
        return Score(one.cell, one.style, one.zero, plan, 0.0, 0.0)


class NamedTrials:
    """Every plan with a name that may be faster than the best and may fit, simulated, whatever time is left.

    Nobody is to be told a plan that is slower than what they would have written.
    """

    def __init__(self, trials: Trials) -> None:
        self.trials, self.incumbent = trials, trials.incumbent
        self.model, self.request = trials.model, trials.request
        self.bounds = trials.bounds
        incumbent = (
            self.incumbent
        )  # not by way of this object, which keeps the bounds: a circle would outlive the search
        self.named_bounds = NamedBounds(trials.scorer, self.bounds.model_bounds, lambda: incumbent.best_s)

    def run(self, cells: Sequence[Cell]) -> None:
        """All there are among these cells, in the order in which people would try them."""
        folded = self.model.small(1, self.model.keeps[-1])
        for cell, plans in groupby(named(self.request, cells, folded), key=lambda one: one.cell):
            if self.bounds.room(cell) < self.incumbent.best_s:
                for one in plans:
                    with suppress(LaminarError):  # it can't be written
                        self._try(one)

    def _try(self, one: Named) -> None:
        """Simulate one as the search writes it and as `laminar.plans` does, unless it is ruled out."""
        if not self._was_done(one) and not self._needless(one) and self._may_win(one):
            self._hold(self.trials.confirm(replace(self.named_bounds.score(one), rewrites=self.trials.steps)))
        if one.staged is not None and self._may_win(one, as_typed=True):
            self._hold(self._staged(one, one.staged(self.model.whole(one.cell.micro_batches))))

    def _may_win(self, one: Named, as_typed: bool = False) -> bool:
        """The cheapest questions first."""
        if self.bounds.at[one.cell] >= self.incumbent.best_s or self.named_bounds.cut_ruled_out(one, as_typed):
            return False
        best_s = self.incumbent.best_s
        if self.bounds.raised(one.cell, BoundKind.FULL, best_s) >= best_s:
            return False
        return not self.named_bounds.ruled_out(one, as_typed)

    def _hold(self, final: Final | None) -> None:
        """What was simulated, against the bound that was asked for last."""
        if final is not None:
            self.trials.contradictions.append(self.named_bounds.contradicted(final))

    def _was_done(self, one: Named) -> bool:
        """Whether it was simulated as the search writes it."""
        return any((s.cell, s.style, s.zero) == one.key for s in self.trials.done)

    def _needless(self, one: Named) -> bool:
        """Whether blocks would be recomputed of a plan that fits as it is."""
        twin = (replace(one.cell, recompute=False), one.style, one.zero)
        known = {(f.score.cell, f.score.style, f.score.zero) for f in self.incumbent.finals}
        return one.cell.recompute and twin in known

    def _staged(self, one: Named, plan: Staged) -> Final | None:
        """A pipeline as `laminar.plans` cuts it, if it fits."""
        deep, optimizer = self.model.whole(one.cell.micro_batches), self.request.optimizer
        ran = predict_staged(deep, plan, self.request.cluster, optimizer=optimizer)
        style, held = replace(one.style, as_preset=True), float(max(ran.peaks))
        score = Score(one.cell, style, one.zero, None, ran.seconds, held, rewrites=self.trials.steps)
        if not feasible(score, self.request):
            return None
        final = Final(score, replace(plan, name="searched"), ran)
        self.incumbent.take(final)
        return final

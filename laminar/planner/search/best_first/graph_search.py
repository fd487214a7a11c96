"""The search of one graph: cells in the order of what they promise, and placements of each.

A cell waits with the cheapest bound that is known of it, and gets a better one when its turn comes. Cells also get a
guess (`planner/estimate/score_cell.py`) where that is cheap; it orders them, and rules nothing out. When a cell's bound
is below what has been found, its placements are scored, and scores wait to be simulated at full depth (`trials.py`).
When no cell is left that promises to be better, or when time is up, those near the best are simulated too, with those
that have a name (data parallel, ZeRO, tensor parallel). Then the lowest bounds of what is left are raised as far as
they go.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from laminar.errors import LaminarError, PlanError
from laminar.forecast.pipeline_step import StagedPrediction
from laminar.forecast.step import predict
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.rewrites import Steps
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.estimate import pipeline_recompute
from laminar.planner.estimate.candidates import USUAL, Final, Score, described_candidate
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.score_cell import CellScorer
from laminar.planner.estimate.score_placement import feasible, scored
from laminar.planner.estimate.storage_mix import mixes
from laminar.planner.mcmc.improve import improve
from laminar.planner.search.best_first.incumbent import Incumbent, TimeLeft
from laminar.planner.search.best_first.known_bounds import BoundKind, KnownBounds
from laminar.planner.search.best_first.named_trials import NamedTrials
from laminar.planner.search.best_first.trials import Trials, same_plan
from laminar.planner.search.earlier_plans import usable
from laminar.planner.space.cell import Cell, cells
from laminar.planner.space.plan_space import Space
from laminar.planner.space.styles import Style
from laminar.planner.tuning import (
    EVENED_PLANS,
    FIRST_MICRO_BATCHES,
    NEAR_BEST,
    NEAR_FINALISTS,
    PROMISING_CELL,
    UNEVEN_PLACES,
)
from laminar.rewrite.variants import carrying
from laminar.rules.samples import samples_of
from laminar.staging.coupled_samples import refuse_coupled


class GraphSearch:
    """The cells of one graph, searched."""

    def __init__(
        self, graph: Graph, incumbent: Incumbent, captured_search: GraphSearch | None = None, steps: Steps = ()
    ) -> None:
        """`steps` made the graph of the captured one, whose search has the same incumbent."""
        self.incumbent, self.request = incumbent, incumbent.request
        self.captured_graph: Graph = captured_search.captured_graph if captured_search else graph
        """The graph that was rewritten, or this one."""
        self.steps = steps
        self.clock = TimeLeft(incumbent.began, self.request.budget_s)
        self.model = Model(graph, self.request)
        rows = captured_search.bounds.model_bounds.rows if captured_search else None
        self.bounds: KnownBounds = KnownBounds(Bounds(self.model, rows), self.request)
        self.scorer = CellScorer(self.model)
        self.trials = Trials(self.scorer, self.bounds, incumbent, self.clock, self.captured_graph, steps)
        self.named = NamedTrials(self.trials)
        self.looked_at: set[Cell] = set()

    @cached_property
    def coupled(self) -> str | None:
        """Why there are no micro-batches: samples have to do with each other."""
        try:
            refuse_coupled(self.model.small(1, self.model.keeps[-1]))
        except LaminarError as error:
            return error.what
        return None

    @cached_property
    def cells(self) -> list[Cell]:
        """All there are."""
        samples = 1 if self.coupled else samples_of(self.model.graph)
        blocks, cuts = self.model.blocks is not None, self.model.cuts if samples > 1 else 1
        return cells(self.request, samples, cuts, blocks, pipeline_recompute.some(self.model))

    @property
    def outside(self) -> list[str]:
        """What the space leaves out, in words."""
        return ["stages of different meshes", *([f"micro-batches: {self.coupled}"] if self.coupled else [])]

    def space(
        self, graphs: Sequence[Steps], branches: Sequence[dict[str, Any]] = (), outside: Sequence[str] = ()
    ) -> Space:
        """The plans of the graphs that so many rewrites make of the captured one."""
        rewrites = [[step.to_json() for step in steps] for steps in graphs]
        about = {"rewrites": rewrites, "branches": list(branches), "outside": list(outside)}
        rows = self.bounds.model_bounds.rows
        return Space.of(self.model.graph, self.request, self.cells, self.model.blocks, rows, **about)

    def run(self) -> None:
        """Better plans until nothing promises more or time is up, and then the bound."""
        self.bounds.begin(self.cells)
        # What a request for less would look at comes first: a wider one is to find nothing slower.
        for some in ([c for c in self.cells if c.plain and c.tp == 1], self.cells):
            self.explore(some)
            self.trials.settle()
        self.mix()
        self.finalists()
        if self.incumbent.settled:
            self.raise_lowest()

    def raise_lowest(self) -> None:
        """The lowest bounds that the best plan does not rule out, made as good as they can be."""
        self.bounds.raise_lowest(self.incumbent.best_s, self.clock.left)

    # --- first plans

    def begin(self) -> None:
        """What people would try first, if there is room for it without any doubt: data parallel, simulated at once.

        Where a machine has nodes, then also with exchanges in each node and between them: a good plan early leaves
        less to be looked at.
        """
        incumbent = self.incumbent
        known = usable(self.captured_graph, self.request, self.space([self.steps]))
        for final in (f for f in known if f.seconds < incumbent.below_s):
            incumbent.finals.append(final)
            incumbent.earlier_s = min(incumbent.earlier_s, final.seconds)
            incumbent.progress(f"{final.seconds * 1e3:.3f} ms, found before: {described_candidate(final.score)}")
        plain: list[Cell] = []
        with suppress(PlanError):  # pinned to something else
            plain = [c for c in cells(self.request, 1, 1, False) if not c.recompute and self.bounds.roomy(c)]
        if incumbent.below_s < math.inf:
            plain = [c for c in plain if self.bounds.model_bounds.quick(c).seconds < incumbent.below_s]
        for cell in (c for c in plain if c.tp == 1):
            zero = self.scorer.zero_stages(cell)[-1]
            style = Style(("data",), gather_once=True)
            self.trials.confirm(Score(cell, style, zero, None, 0.0, 0.0, rewrites=self.steps))
        node = self.request.cluster.levels[0].size
        for cell in (c for c in plain if c.dp > 1 and 1 < c.tp == node and self.scorer.zero_stages(c)[-1]):
            with suppress(LaminarError):
                zero = self.scorer.zero_stages(cell)[-1]
                style = Style(("data", "data"), gather_once=True)
                self.trials.wait([scored(self.model, cell, style, zero, roomy=self.bounds.roomy(cell))])
                self.trials.settle()
        if not incumbent.settled:
            self.pipe()

    def pipe(self) -> None:
        """Where the batch at once has no room for certain: of pipelines as people write them, the one guessed best."""
        node = self.request.cluster.levels[0].size
        usual = [c for c in self.cells if c.stages > 1 and c.virtual == 1 and c.tp in (1, node)]
        usual = [c for c in usual if c.micro_batches <= FIRST_MICRO_BATCHES * c.stages]
        usual.sort(key=lambda c: c.micro_batches)
        most = {(c.stages, c.dp, c.tp, c.recompute): c for c in usual}
        guesses = {c: self.scorer.guess(c) for c in most.values()}
        best = min(guesses, key=guesses.__getitem__, default=None)
        if best is not None and math.isfinite(guesses[best]):
            self.look(best)
            self.trials.settle()

    def follow(self) -> None:
        """What is the best so far, done to this graph: its tensors are placed anew, in the same cell and style."""
        best = self.incumbent.best
        if best is not None and best.score.rewrites != self.steps:
            like = best.score
            self.trials.confirm(replace(like, plan=None, seconds=0.0, peak_bytes=0.0, rewrites=self.steps))

    # --- cells

    def explore(self, some: Sequence[Cell]) -> None:
        """Cells in the order of what they promise; before a cell is looked at, the cheapest questions come first."""
        queue = [(self.bounds.at[cell], k, cell, 0) for k, cell in enumerate(some) if cell not in self.looked_at]
        heapq.heapify(queue)
        while queue:
            promise_s, k, cell, turn = heapq.heappop(queue)
            # The first plan is simulated as soon as there is one.
            self.trials.settle(promise_s if self.incumbent.finals else math.inf)
            if promise_s > PROMISING_CELL * self.incumbent.best_s or self.out_of_time():
                break
            if self.bounds.at[cell] >= self.incumbent.best_s or cell in self.looked_at:
                continue
            asked = self.questions()
            if turn < len(asked):
                promise_s = max(promise_s, asked[turn](cell))
                if math.isfinite(promise_s):
                    heapq.heappush(queue, (promise_s, k, cell, turn + 1))
            else:
                self.look(cell)

    def questions(self) -> tuple[Callable[[Cell], float], ...]:
        """What is asked about a cell before its placements are scored.

        Guesses come first where cells with micro-batches are in the lead: they have much in common, bounds less. What
        has something to beat from the start begins with bounds: they may be all it takes.
        """
        best_s, best = self.incumbent.best_s, self.incumbent.best
        quick, full = (partial(self.bounds.raised, kind=k, best_s=best_s) for k in (BoundKind.QUICK, BoundKind.FULL))
        bounds = (self.bounds.room, quick, full)
        leads = not best.score.cell.plain if best is not None else not self.incumbent.settled
        return (self.scorer.guess, *bounds) if leads else bounds

    def out_of_time(self) -> bool:
        """Whether all that is left of the budget is needed to simulate the best, and there is one."""
        waiting = bool(self.trials.waiting)
        reserve = self.trials.last_s if waiting else 0.0
        return self.clock.left() < reserve and (self.incumbent.settled or waiting)

    def look(self, cell: Cell) -> None:
        """Score the placements of a cell."""
        self.looked_at.add(cell)
        if cell.recompute and self.fits_without(cell):
            return  # recomputation costs time, and here nothing has to be recomputed
        if cell.plain:
            best_s = min(self.incumbent.best_s, self.trials.best_waiting_s)
            found = self.scorer.plain(cell, best_s, self.bounds.roomy(cell), self.clock.left() > 0)
        else:
            nothing = not (self.incumbent.finals or self.trials.waiting)
            found = self.scorer.staged(cell, self.clock.left() > 0, nothing)
        self.trials.wait(found)

    def fits_without(self, cell: Cell) -> bool:
        """Whether the fastest placement of a cell fits without recomputing anything."""
        twin = replace(cell, recompute=False)
        if twin not in self.looked_at and self.bounds.at.get(twin, math.inf) < self.incumbent.best_s:
            self.look(twin)
        mine = [s for s in self.trials.scores if s.cell == twin]
        return bool(mine) and feasible(min(mine, key=lambda s: s.seconds), self.request)

    # --- last plans

    def mix(self) -> None:
        """Where memory keeps a faster plan out: the best of it that fits, tensor by tensor."""
        at, best_s = self.bounds.at, self.incumbent.best_s
        open_ = [c for c in self.cells if at[c] < best_s and c not in self.bounds.unfit]
        for final in mixes(self.model, open_, self.trials.scores, best_s, self.clock.left):
            score = replace(final.score, rewrites=self.steps)
            assert isinstance(final.plan, Plan)
            plan = carrying(final.plan, self.captured_graph, self.steps)
            self.trials.scores.append(score)
            self.trials.done.append(score)
            self.incumbent.take(replace(final, plan=plan, score=score))

    def finalists(self) -> None:
        """Those near the best, and those of them with a name, at full depth."""
        incumbent, done = self.incumbent, {f.score for f in self.incumbent.finals}
        near = [s for s in self.trials.scores if feasible(s, self.request) and s not in done]
        near = sorted((s for s in near if s.seconds <= NEAR_BEST * incumbent.best_s), key=lambda s: s.seconds)
        usual = [s for s in near if USUAL.issuperset(s.style.words)]
        for score in dict.fromkeys([*near[:NEAR_FINALISTS], *usual[:NEAR_FINALISTS]]):
            if self.clock.left() > self.trials.last_s or not incumbent.settled:
                self.trials.confirm(score)
        self.even_places()
        if not self.steps:
            with self.clock.on_top():
                self.named.run(self.cells)
                self.trials.settle()

    def even_places(self) -> None:
        """The best plans, where places have several stages and differ in what they do, with these evened out."""
        mine = [f for f in self.incumbent.finals if f.score.cell.virtual > 1 and f.score.rewrites == self.steps]
        near = sorted((f for f in mine if f.seconds < NEAR_BEST * self.incumbent.best_s), key=lambda f: f.seconds)
        uneven = [f for f in near if isinstance(f.ran, StagedPrediction) and f.ran.uneven > UNEVEN_PLACES]
        for one in uneven[:EVENED_PLANS]:
            asked = next((s for s in self.trials.done if same_plan(s, one.score)), None)
            if asked is None or self.clock.left() < self.trials.last_s:
                continue
            final = self.trials.simulated(asked, "places")
            if final is not None and final.peak_bytes <= self.request.room_bytes and final.seconds < one.seconds:
                score = replace(final.score, peak_bytes=float(final.peak_bytes), seconds=final.seconds)
                self.incumbent.take(replace(final, score=score), note="places evened out")

    def around(self) -> None:
        """Random moves from the best plan, as many as were asked for, if it has neither stages nor rewrites."""
        best, request = self.incumbent.best, self.request
        if best is None or not request.proposals or not isinstance(best.plan, Plan) or best.score.rewrites:
            return
        cell = best.score.cell
        moved = improve(self.model, cell, best.plan, proposals=request.proposals)
        if moved.seconds < best.seconds:
            ran = predict(self.model.graph, moved.plan, request.cluster, optimizer=request.optimizer)
            style = Style.of(cell.mesh, "free", outer="free")
            score = replace(best.score, style=style, plan=None, seconds=ran.seconds)
            plan = replace(moved.plan, name="searched")
            final = Final(score, plan, ran)
            self.incumbent.finals.append(final)
            self.incumbent.tell(final)

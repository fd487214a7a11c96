"""The search: cells in the order of what they promise, placements of each, and the finalists simulated in full.

A cell waits with the cheapest bound that is known of it, and gets a better one when its turn comes. Cells also get a
guess (`planner/estimate/scorer.py`) where that is cheap; it orders them, and rules nothing out. When a cell's bound is
below what has been found, its placements are scored. Scores wait, too: once no cell promises more than the best of
them, that one is simulated at full depth, and counts only then. When no cell is left that promises to be better, or
when time is up, those near the best are simulated too, with those that have a name (data parallel, ZeRO, tensor
parallel), and of plans that are as good as equal the simplest wins. Then the lowest bounds of what is left are raised
as far as they go: they are the certificate.

A graph that computes the same in another way (`planner/space/rewrites.py`) is searched like the captured one, in the
same cells, with placements and bounds of its own: whatever is the best so far counts for all of them, and the
certificate vouches for those that were searched to the end.

A search may be told what it has to beat (`sought`): what can't be faster is then ruled out as if that had been found.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import groupby

from laminar.cost.calibrate import interval
from laminar.cost.sim.no_gc import uncollected
from laminar.errors import LaminarError, PlanError
from laminar.forecast.pipeline_step import StagedPrediction, predict_staged
from laminar.forecast.step import predict
from laminar.ir.certificate import Certificate, Contradiction
from laminar.ir.graph import Graph
from laminar.ir.plan import Plan
from laminar.ir.rewrites import Steps
from laminar.ir.staged import Staged
from laminar.placement.micro_batch import micro
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.estimate import pipeline_recompute
from laminar.planner.estimate.candidates import USUAL, Final, Found, Nothing, described
from laminar.planner.estimate.model import Model, Score
from laminar.planner.estimate.named_plans import Named, named
from laminar.planner.estimate.score import feasible, no_room, scored
from laminar.planner.estimate.scorer import Looker
from laminar.planner.estimate.storage_mix import mixes
from laminar.planner.mcmc.improve import improve
from laminar.planner.search.branches import Branches
from laminar.planner.search.earlier_plans import remember, usable
from laminar.planner.search.named_trials import NamedTrials
from laminar.planner.space.cell import Cell, cells
from laminar.planner.space.contradictions import checking, contradicted
from laminar.planner.space.plan_space import Space, out_of_row
from laminar.planner.space.request import Request
from laminar.planner.space.rewrites import Variants
from laminar.planner.space.styles import KEPT, TYPED
from laminar.rewrite.variants import carrying
from laminar.rules.samples import samples_of
from laminar.staging.coupled_samples import refuse_coupled

FINALISTS = 1
"""Plans near the best that are simulated at full depth in the end, and as many that have a name."""
NEAR = 1.03
"""How far the score of a finalist may be from the best one's."""
PLENTY = 10
"""How many times what a rank holds at least must fit for memory not to be asked about before the end."""
EQUAL = 1.005
"""Plans within this of the best are as good as it: the simplest of them is taken."""
WORTH = 0.998
"""A score is simulated if it is below this of the best."""
SAME = 0.98
"""Two estimates of memory within this are the same."""
UNEVEN = 1.02
"""How much more than the mean the slowest place does, for places with several stages to be evened out."""
EVENED = 2
"""Plans in which they are."""
EACH_STAGE = 4
"""Micro-batches for each stage of the pipeline that is tried first, at most."""
PROMISING = 1.03
"""How much slower than the best a cell may be guessed to be, to be looked at."""

Progress = Callable[[str], None]


def find(graph: Graph, request: Request, progress: Progress | None = None) -> Found:
    """The fastest plan of the space that fits, and how far it can be from the best there is."""
    found = sought(graph, request, progress)
    if isinstance(found, Nothing):
        raise found.error
    return found


def sought(
    graph: Graph, request: Request, progress: Progress | None = None, below_s: float = math.inf
) -> Found | Nothing:
    """The same, or what is known where there is no plan; slower plans than `below_s` are of no use to anybody."""
    with uncollected():
        captured = _Search(graph, request, progress or (lambda text: None), below_s=below_s)
        captured.begin()
        worth = Variants(graph, request)
        others = [_Search(made, request, captured.progress, captured, steps) for steps, made in worth if steps]
        for other in others[:1]:
            other.follow()  # where that is faster, it rules out most cells of the captured graph
            captured.until_s -= captured.left() / 2
        captured.run()
        if not captured.settled:
            captured.spread()
        if not captured.settled:
            return captured.nothing()
        captured.until_s = request.budget_s
        for other in others:
            if other is others[0] or captured.left() > 0:
                other.follow()
                other.run()
        captured.spread()
        if not captured.finals:
            return captured.nothing(others)
        captured.around()
        captured.raise_bound()
        return captured.result(others, worth.unexplored)


def same_plan(one: Score, other: Score) -> bool:
    """Whether two scores are of one cell, placed in the same way."""
    return (one.cell, one.style, one.zero, one.rewrites) == (other.cell, other.style, other.zero, other.rewrites)


def promised(graph: Graph, request: Request) -> tuple[float, list[Cell]]:
    """Seconds that no plan for a graph as captured takes less than, by the cheapest bound, and all its cells."""
    search = _Search(graph, request, lambda text: None)
    return min(search.bounds.rough(cell) for cell in search.cells), search.cells


class _Search:
    def __init__(
        self,
        graph: Graph,
        request: Request,
        progress: Progress,
        captured: _Search | None = None,
        steps: Steps = (),
        below_s: float = math.inf,
    ) -> None:
        """`steps` made the graph of the captured one, with whose search this one shares its time and what is found."""
        self.began: float = captured.began if captured else time.process_time()
        self.until_s, self.extra_s = request.budget_s, 0.0
        self.below_s: float = captured.below_s if captured else below_s
        self.captured: Graph = captured.captured if captured else graph
        self.steps = steps
        self.request, self.progress = request, progress
        self.model = Model(graph, request)
        self.bounds: Bounds = Bounds(self.model, captured.bounds.rows if captured else None)
        self.looker = Looker(self.model)
        self.outside = ["stages of different meshes"]
        self.coupled_samples = False
        """Whether some op needs all samples of a batch, so that micro-batches are out of the question."""
        self.branches: Branches | None = None
        """Of the captured graph."""
        self.scores: list[Score] = []
        self.waiting: list[tuple[float, int, Score]] = []
        """Scores that would be the best, to be simulated: a heap."""
        self.done: list[Score] = []
        """Those that have been."""
        self.finals: list[Final] = captured.finals if captured else []
        """Of all graphs."""
        self.earlier_s = math.inf
        """What a search before this one has found that this one may take."""
        self.at: dict[Cell, float] = {}
        """The best bound that is known of each cell."""
        self.known: dict[Cell, int] = {}
        """Which that is: 0 rough, 1 quick, 2 full."""
        self.looked_at: set[Cell] = set()
        self.unfit: set[Cell] = set()
        """Cells in which nothing can fit."""
        self.bias: dict[bool, float] = {}
        """The least that a simulation at full depth came to, of its score; with micro-batches and without."""
        self.apart: list[Score] = []
        """Plans with branches on devices of their own."""
        self.confirm_s = 0.0
        """Processor seconds of the last one."""
        self.wrong: list[Contradiction | None] = []
        """Of plans with a name, against bounds of their own."""
        self.bound_s = 0.0
        self.through = False
        """Whether all was done that can be: time has ended nothing."""

    @cached_property
    def cells(self) -> list[Cell]:
        """All there are; without micro-batches where samples have to do with each other."""
        samples = samples_of(self.model.graph)
        try:
            refuse_coupled(self.model.small(1, self.model.keeps[-1]))
        except LaminarError as error:
            samples = 1
            self.coupled_samples = True
            self.outside.append(f"micro-batches: {str(error).splitlines()[0]}")
        blocks, cuts = self.model.blocks is not None, self.model.cuts if samples > 1 else 1
        return cells(self.request, samples, cuts, blocks, pipeline_recompute.some(self.model))

    # --- the loop

    def left(self) -> float:
        """Processor seconds that are left; those of plans with a name come on top of what was asked for."""
        return self.until_s + self.extra_s - (time.process_time() - self.began)

    @property
    def best_s(self) -> float:
        """Of what was simulated at full depth, and fits; or what there was before."""
        return min([self.below_s, *(f.seconds for f in self.finals)])

    @property
    def settled(self) -> bool:
        """Whether the search may end: there is a plan, of this search or from before."""
        return bool(self.finals) or self.below_s < math.inf

    def run(self) -> None:
        """Better plans until nothing promises more or time is up, and then the bound."""
        for cell in self.cells:
            self.at[cell], self.known[cell] = self.bounds.rough(cell), 0
        # What a request for less would look at comes first: a wider one is to find nothing slower.
        for some in ([c for c in self.cells if c.plain and c.tp == 1], self.cells):
            self.explore(some)
            self.settle(math.inf)
        self.mix()
        self.finalists()
        if self.settled:
            self.raise_bound()

    def begin(self) -> None:
        """What people would try first, if there is room for it without any doubt: data parallel, simulated at once.

        Where a machine has nodes, then also with exchanges in each node and between them: a good plan early leaves
        less to be looked at.
        """
        known = usable(self.captured, self.request, self.space([self]))
        for final in (f for f in known if f.seconds < self.below_s):
            self.finals.append(final)
            self.earlier_s = min(self.earlier_s, final.seconds)
            self.progress(f"{final.seconds * 1e3:.3f} ms, found before: {described(final.score)}")
        plain: list[Cell] = []
        with suppress(PlanError):  # pinned to something else
            plain = [c for c in cells(self.request, 1, 1, False) if not c.recompute and self.roomy(c)]
        if self.below_s < math.inf:
            plain = [c for c in plain if self.bounds.quick(c).seconds < self.below_s]
        for cell in (c for c in plain if c.tp == 1):
            zero = self.looker.zeros(cell)[-1]
            self.confirmed(Score(cell, ("data", KEPT), zero, None, 0.0, 0.0, rewrites=self.steps))
        node = self.request.cluster.levels[0].size
        for cell in (c for c in plain if c.dp > 1 and 1 < c.tp == node and self.looker.zeros(c)[-1]):
            with suppress(LaminarError):
                zero = self.looker.zeros(cell)[-1]
                self.wait([scored(self.model, cell, ("data", "data", KEPT), zero, roomy=self.roomy(cell))])
                self.settle(math.inf)
        if not self.settled:
            self.pipe()

    def pipe(self) -> None:
        """Where the batch at once has no room for certain: of pipelines as people write them, the one guessed best."""
        node = self.request.cluster.levels[0].size
        usual = [c for c in self.cells if c.stages > 1 and c.virtual == 1 and c.tp in (1, node)]
        usual = sorted((c for c in usual if c.micro_batches <= EACH_STAGE * c.stages), key=lambda c: c.micro_batches)
        most = {(c.stages, c.dp, c.tp, c.recompute): c for c in usual}
        guesses = {c: self.looker.guess(c) for c in most.values()}
        best = min(guesses, key=guesses.__getitem__, default=None)
        if best is not None and math.isfinite(guesses[best]):
            self.look(best)
            self.settle(math.inf)

    def spread(self) -> None:
        """Branches on devices of their own, where there are any that are worth it.

        Behind everything else: what was found until then does not depend on it.
        """
        if self.branches is not None:
            return
        self.branches = Branches(self.model, self.bounds, self.coupled_samples)
        for final in self.branches.search(lambda: self.best_s, self.left):
            self.apart.append(final.score)
            if feasible(final.score, self.request):
                self.finals.append(final)
                if self.best_s == final.seconds:
                    self.progress(f"{final.seconds * 1e3:.3f} ms: {described(final.score)}")
        self.branches.raise_bound(self.best_s, self.left)

    def follow(self) -> None:
        """What is the best so far, done to this graph: its tensors are placed anew, in the same cell and style."""
        best = min(self.finals, key=lambda f: f.seconds, default=None)
        if best is not None and best.score.rewrites != self.steps:
            like = best.score
            self.confirmed(replace(like, plan=None, seconds=0.0, peak_bytes=0.0, rewrites=self.steps))

    def roomy(self, cell: Cell) -> float:
        """What a rank holds at least where that fits many times over, else 0."""
        least = self.least_bytes(cell)
        return least if PLENTY * least < self.request.room_bytes else 0.0

    def explore(self, some: Sequence[Cell]) -> None:
        """Cells in the order of what they promise; before a cell is looked at, the cheapest questions come first."""
        queue = [(self.at[cell], k, cell, 0) for k, cell in enumerate(some) if cell not in self.looked_at]
        heapq.heapify(queue)
        while queue:
            promise_s, k, cell, turn = heapq.heappop(queue)
            self.settle(promise_s if self.finals else math.inf)  # the first plan is simulated as soon as there is one
            if promise_s > PROMISING * self.best_s or self.out_of_time():
                break
            if self.at[cell] >= self.best_s or cell in self.looked_at:
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
        if not self.finals and self.settled:
            return self.room, self.quick, self.full
        if not self.finals or not min(self.finals, key=lambda f: f.seconds).score.cell.plain:
            return self.looker.guess, self.room, self.quick, self.full
        return self.room, self.quick, self.full

    def room(self, cell: Cell) -> float:
        """Its bound, or infinity where nothing fits."""
        if self.least_bytes(cell) <= self.request.room_bytes:
            return self.at[cell]
        self.unfit.add(cell)
        self.at[cell] = math.inf
        return math.inf

    def quick(self, cell: Cell) -> float:
        """A better bound."""
        return self.bounded(cell, 1)

    def full(self, cell: Cell) -> float:
        """The best bound there is."""
        return self.bounded(cell, 2)

    def bounded(self, cell: Cell, known: int) -> float:
        """At least so good a bound."""
        if self.known[cell] < known:
            better = (self.bounds.quick(cell) if known == 1 else self.bounds.of(cell, self.best_s)).seconds
            self.at[cell], self.known[cell] = max(self.at[cell], better), known
        return self.at[cell]

    def out_of_time(self) -> bool:
        """Whether all that is left of the budget is needed to simulate the best, and there is one."""
        reserve = self.confirm_s if self.waiting else 0.0
        return self.left() < reserve and bool(self.settled or self.waiting)

    def look(self, cell: Cell) -> None:
        """Score the placements of a cell."""
        self.looked_at.add(cell)
        if cell.recompute and self.fits_without(cell):
            return  # what is made again costs time, and here nothing has to be
        if cell.plain:
            best_s = min(self.best_s, self.waiting[0][0] if self.waiting else math.inf)
            found = self.looker.plain(cell, best_s, self.roomy(cell), self.left() > 0)
        else:
            found = self.looker.staged(cell, self.left() > 0, not (self.finals or self.waiting))
        self.wait(found)

    def wait(self, found: Iterable[Score]) -> None:
        """Keep scores; those that would be the best wait to be simulated."""
        done = {(s.cell, s.style, s.zero) for s in self.done}
        for score in (one for one in found if (one.cell, one.style, one.zero) not in done):
            one = replace(score, rewrites=self.steps)
            self.scores.append(one)
            if one.seconds < self.best_s and self.looker.worth(one):
                heapq.heappush(self.waiting, (one.seconds, len(self.scores), one))

    def settle(self, promise_s: float) -> None:
        """Simulate the scores that wait, as far as no cell promises to be better."""
        while self.waiting and self.waiting[0][0] <= promise_s:
            seconds, _, score = heapq.heappop(self.waiting)
            hoped_s = seconds * min(1.0, self.bias.get(score.cell.plain, 1.0))
            if self.told(score):
                continue
            if hoped_s < WORTH * self.best_s and (self.left() > 0 or not self.settled):
                self.confirmed(score)

    def told(self, score: Score) -> bool:
        """Whether a plan of the same cell was simulated that was expected to take no more, of time and memory."""
        return any(
            s.seconds  # what was simulated without having been scored says nothing about scores
            and s.cell == score.cell and s.zero == score.zero and s.seconds <= score.seconds
            and s.peak_bytes <= score.peak_bytes / SAME for s in self.done
        )  # fmt: skip

    def confirmed(self, score: Score) -> None:
        """Simulate a plan at full depth: only what was simulated may win."""
        self.done.append(score)
        begun = time.process_time()
        final = self.simulated(score)
        self.confirm_s = time.process_time() - begun
        known = math.inf if final is None else float(final.peak_bytes)
        score_s = final.seconds if final else score.seconds or math.inf
        now = replace(final.score if final else score, peak_bytes=known, seconds=score_s)
        self.scores = [s for s in self.scores if s is not score] + [now]
        if final is None or not feasible(now, self.request):
            self.wait(self.looker.leaner(now, final))
        if final is None:
            return
        if score.seconds:
            plain = score.cell.plain
            self.bias[plain] = min(self.bias.get(plain, math.inf), final.seconds / score.seconds)
        if feasible(now, self.request):
            self.finals.append(replace(final, score=now))
            if checking() and self.bounded_by_cell(final):
                contradicted(described(now), final.seconds, self.bounds.of(now.cell).seconds)
            if self.best_s == final.seconds:
                self.progress(f"{final.seconds * 1e3:.3f} ms: {described(now)}")

    def contradictions(self) -> list[Contradiction]:
        """Plans of this graph that were simulated faster than what is proved of their cell."""
        found = [*self.wrong]
        for final in self.finals:
            cell = final.score.cell
            if final.score.rewrites == self.steps and cell in self.at and self.bounded_by_cell(final):
                found.append(contradicted(described(final.score), final.seconds, self.at[cell]))
        return [one for one in found if one is not None]

    def bounded_by_cell(self, final: Final) -> bool:
        """Whether a plan is one of those that the bound of its cell is about."""
        if final.score.apart:
            return False
        return not (
            isinstance(final.plan, Staged) and self.bounds.in_a_row(final.score.cell) and out_of_row(final.plan)
        )

    def least_bytes(self, cell: Cell) -> float:
        """What a rank holds at least; where the batch at once leaves plenty of room, micro-batches do too."""
        whole = self.bounds.least_bytes(Cell(1, 1, 1, self.request.cluster.devices, 1))
        return whole if PLENTY * whole < self.request.room_bytes else self.bounds.least_bytes(cell)

    def fits_without(self, cell: Cell) -> bool:
        """Whether the fastest placement of a cell fits without making anything again."""
        twin = replace(cell, recompute=False)
        if twin not in self.looked_at and self.at.get(twin, math.inf) < self.best_s:
            self.look(twin)
        mine = [s for s in self.scores if s.cell == twin]
        return bool(mine) and feasible(min(mine, key=lambda s: s.seconds), self.request)

    # --- the end

    def mix(self) -> None:
        """Where memory keeps a faster plan out: the best of it that fits, tensor by tensor."""
        open_ = [c for c in self.cells if self.at[c] < self.best_s and c not in self.unfit]
        for final in mixes(self.model, open_, self.scores, self.best_s, self.left):
            score = replace(final.score, rewrites=self.steps)
            assert isinstance(final.plan, Plan)
            plan = carrying(final.plan, self.captured, self.steps)
            self.finals.append(replace(final, plan=plan, score=score))
            self.scores.append(score)
            self.done.append(score)
            self.progress(f"{final.seconds * 1e3:.3f} ms: {described(score)}")

    def finalists(self) -> None:
        """Those near the best, and those of them with a name, at full depth."""
        done = {f.score for f in self.finals}
        near = sorted((s for s in self.scores if feasible(s, self.request) and s not in done), key=lambda s: s.seconds)
        near = [s for s in near if s.seconds <= NEAR * self.best_s]
        usual = [s for s in near if set(s.style) <= USUAL]
        for score in dict.fromkeys([*near[:FINALISTS], *usual[:FINALISTS]]):
            if self.left() > self.confirm_s or not self.settled:
                self.confirmed(score)
        self.even_places()
        if not self.steps:
            begun = time.process_time()
            self.try_named()
            self.settle(math.inf)
            self.extra_s = time.process_time() - begun

    def even_places(self) -> None:
        """The best plans, where places have several stages and differ in what they do, with these evened out."""
        mine = [f for f in self.finals if f.score.cell.virtual > 1 and f.score.rewrites == self.steps]
        near = sorted((f for f in mine if f.seconds < NEAR * self.best_s), key=lambda f: f.seconds)
        for one in [f for f in near if isinstance(f.ran, StagedPrediction) and f.ran.uneven > UNEVEN][:EVENED]:
            asked = next((s for s in self.done if same_plan(s, one.score)), None)
            if asked is None or self.left() < self.confirm_s:
                continue
            final = self.simulated(asked, "places")
            if final is not None and final.peak_bytes <= self.request.room_bytes and final.seconds < one.seconds:
                score = replace(final.score, peak_bytes=float(final.peak_bytes), seconds=final.seconds)
                self.finals.append(replace(final, score=score))
                if self.best_s == final.seconds:
                    self.progress(f"{final.seconds * 1e3:.3f} ms: {described(score)}, places evened out")

    def try_named(self) -> None:
        """Simulate every plan with a name that may be faster than the best and may fit, whatever time is left.

        Nobody is to be told a plan that is slower than what they would have written.
        """
        folded = self.model.small(1, self.model.keeps[-1])
        trials = NamedTrials(self.model, self.bounds, lambda: self.best_s)
        for cell, ways in groupby(named(self.request, self.cells, folded), key=lambda one: one.cell):
            if self.room(cell) < self.best_s and self.full(cell) < self.best_s:
                for one in ways:
                    with suppress(LaminarError):  # it can't be written
                        self.try_one(one, trials)

    def try_one(self, one: Named, trials: NamedTrials) -> None:
        """Simulate a plan with a name as the search writes it and as `laminar.plans` does, unless it is ruled out."""
        if not self.was_done(one) and not self.needless(one) and not trials.ruled_out(one):
            before = len(self.finals)
            self.confirmed(replace(trials.score(one), rewrites=self.steps))
            self.wrong += [trials.contradicted(final) for final in self.finals[before:]]
        if one.staged is not None and not trials.ruled_out(one, as_typed=True):
            before = len(self.finals)
            self.try_staged(one, one.staged(self.model.whole(one.cell.micro_batches)))
            self.wrong += [trials.contradicted(final) for final in self.finals[before:]]

    def was_done(self, one: Named) -> bool:
        """Whether it was simulated as the search writes it."""
        return any((s.cell, s.style, s.zero) == one.key for s in self.done)

    def needless(self, one: Named) -> bool:
        """Whether blocks would be made again of a plan that fits as it is."""
        twin = (replace(one.cell, recompute=False), one.style, one.zero)
        return one.cell.recompute and any((f.score.cell, f.score.style, f.score.zero) == twin for f in self.finals)

    def try_staged(self, one: Named, plan: Staged) -> None:
        """Simulate a pipeline as `laminar.plans` cuts it."""
        deep, optimizer = self.model.whole(one.cell.micro_batches), self.request.optimizer
        ran = predict_staged(deep, plan, self.request.cluster, optimizer=optimizer)
        style, held = (*one.style, TYPED), float(max(ran.peaks))
        score = Score(one.cell, style, one.zero, None, ran.seconds, held, rewrites=self.steps)
        if feasible(score, self.request):
            self.finals.append(Final(score, replace(plan, name="searched"), ran))
            if self.best_s == ran.seconds:
                self.progress(f"{ran.seconds * 1e3:.3f} ms: {described(score)}")

    def around(self) -> None:
        """Random moves from the best plan, as many as were asked for, if it has neither stages nor rewrites."""
        best = min(self.finals, key=lambda f: f.seconds)
        if not self.request.proposals or not isinstance(best.plan, Plan) or best.score.rewrites:
            return
        cell = best.score.cell
        moved = improve(self.model, cell, best.plan, proposals=self.request.proposals)
        if moved.seconds < best.seconds:
            ran = predict(self.model.graph, moved.plan, self.request.cluster, optimizer=self.request.optimizer)
            score = replace(best.score, style=("free",) * len(cell.mesh.sizes), plan=None, seconds=ran.seconds)
            plan = replace(moved.plan, name="searched")
            self.finals.append(Final(score, plan, ran))
            self.progress(f"{ran.seconds * 1e3:.3f} ms: {described(score)}")

    def raise_bound(self) -> None:
        """The lowest bounds of cells that the best plan does not rule out, made as good as they can be."""
        queue = [(bound_s, k, cell) for k, (cell, bound_s) in enumerate(self.at.items())]
        heapq.heapify(queue)
        self.bound_s = self.best_s
        while queue:
            bound_s, k, cell = heapq.heappop(queue)
            self.bound_s = min(bound_s, self.best_s)
            self.through = bound_s >= self.best_s or self.known[cell] == 2
            if self.through or self.left() < 0:
                break
            better = self.room(cell) if self.known[cell] == 0 else bound_s
            if math.isfinite(better):
                better = self.bounded(cell, self.known[cell] + 1)
            heapq.heappush(queue, (better, k, cell))

    def simulated(self, score: Score, cut: pipeline_recompute.Cut | None = None) -> Final | None:
        """A score's plan at full depth; nothing if it can't be written after all."""
        request, cell, model = self.request, score.cell, self.model
        try:
            plan = model.unfolded(score)
            if cell.plain:
                plan, found, mix = pipeline_recompute.plain(model, score, plan, self.best_s)
                if score.again:
                    score = replace(score, again=(mix.again,), spared=mix.spared, away=mix.away)
                plan = carrying(plan, self.captured, self.steps)
                return Final(score, plan, found)
            deep = model.whole(cell.micro_batches)
            # Where hops are slow, cuts that are less even and send less may be better.
            ways: list[pipeline_recompute.Cut] = (
                ["stages", "sent"] if self.looker.slow_hops(cell, score.style) else ["stages"]
            )
            ways = [cut] if cut else ways
            tried = [pipeline_recompute.pipelined(model, score, deep, plan, way, self.best_s) for way in ways]
            staged, ran, again = min(tried, key=lambda t: (max(t[1].peaks) > request.room_bytes, t[1].seconds))
            score = replace(score, again=again)
            if self.steps:
                staged = carrying(staged, micro(self.captured, cell.micro_batches), self.steps)
            return Final(score, staged, ran)
        except LaminarError:
            return None

    def nothing(self, others: Sequence[_Search] = ()) -> Nothing:
        """What is known where no plan was found."""
        scores = [score for s in (self, *others) for score in (*s.scores, *s.apart)]
        sure = [self, *(s for s in others if s.through)]
        ways = self.branches.at if self.branches else {}
        return Nothing(
            no_room(self.request, min((s.peak_bytes for s in scores), default=math.inf)),
            min([s.bound_s if self.settled else min(s.at.values()) for s in sure] + list(ways.values())),
            self.space(sure).hash,
            not all(s.peak_bytes > self.request.room_bytes for s in scores),
            self.left() > 0 or not self.settled,
        )

    def space(self, sure: Sequence[_Search], outside: Sequence[str] = ()) -> Space:
        """The plans of these searches' graphs."""
        rewrites = [[step.to_json() for step in s.steps] for s in sure]
        branches = [way.to_json() for way in (self.branches.at if self.branches else {})]
        about = {"rewrites": rewrites, "branches": branches, "outside": list(outside)}
        return Space.of(self.model.graph, self.request, self.cells, self.model.blocks, self.bounds.rows, **about)

    def result(self, others: Sequence[_Search] = (), unexplored: int = 0) -> Found:
        """The choice among plans of all graphs, and what is known about it; so many rewrites were not made at all."""
        finals = sorted(self.finals, key=lambda f: f.seconds)
        # Nothing that has a name may be faster than what is taken, nor what was found before, be it by a little.
        most_s = min([EQUAL * finals[0].seconds, self.earlier_s, *(f.seconds for f in finals if f.usual)])
        best = min((f for f in finals if f.seconds <= most_s), key=lambda f: (f.simple, f.seconds))
        sure = [self, *(s for s in others if s.through or s.steps == best.plan.rewrites)]
        ways = self.branches.at if self.branches else {}
        left = unexplored + 1 + len(others) - len(sure)
        outside = [f"rewrites of the graph that were not searched to the end: {left}"] if left else []
        outside.append("branches on devices of their own" + (", dealt out in other ways" if ways else ""))
        outside += self.outside
        about = self.space(sure, outside)
        wrong = [one for s in (self, *others) for one in s.contradictions()]
        if ways:
            apart = [f for f in finals if f.score.apart]
            lowest_s = min(ways.values())
            wrong += filter(None, (contradicted(described(f.score), f.seconds, lowest_s) for f in apart))
        bound_s = 0.0 if wrong else min(*(s.bound_s for s in sure), *(f.seconds for f in finals), *ways.values())
        seen = self.branches.looked_at if self.branches else set()
        bounds = [(s, cell, at_s) for s in sure for cell, at_s in s.at.items()]
        known = best.ran.figures().known
        certificate = Certificate(
            space=about.hash,
            step_s=best.seconds,
            bound_s=bound_s,
            cells=len(bounds) + len(ways),
            looked_at=sum(len(s.looked_at) for s in sure) + len(seen),
            pruned=sum(at_s >= best.seconds and c not in s.looked_at | s.unfit for s, c, at_s in bounds)
            + sum(at_s >= best.seconds and way not in seen for way, at_s in ways.items()),
            unfit=sum(len(s.unfit) for s in sure),
            unfinished=sum(at_s < best.seconds and c not in s.looked_at for s, c, at_s in bounds)
            + sum(at_s < best.seconds and way not in seen for way, at_s in ways.items()),
            outside=tuple(outside),
            interval=interval(best.seconds, best.ran.sigma),
            known="prices " + (", ".join(f"{v:.0%} {k}" for k, v in known.items() if v >= 0.01) or "from peaks"),
            contradictions=tuple(wrong),
        )
        account = replace(
            best.plan.account,
            step=best.ran.figures(),
            bound_s=bound_s,
            certificate=certificate,
            space=about.data,
            choice=best.row(),
            runners_up=tuple(f.row() for f in finals if f is not best),
            search_s=time.process_time() - self.began,
            budget_s=self.request.budget_s,
        )
        remember(self.captured, self.request, best)
        scores = tuple(sorted((x for s in (self, *others) for x in (*s.scores, *s.apart)), key=lambda x: x.seconds))
        return Found(replace(best.plan, account=account), certificate, tuple(finals), scores, about)


__all__ = ["Final", "Found", "Nothing", "described", "find", "promised", "sought"]

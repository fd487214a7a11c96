"""Scores of one graph on their way to be plans: those that wait, and those that were simulated at full depth.

A score that would be the best waits. Once no cell promises more than the best of them, that one is simulated, and
counts only then.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable
from dataclasses import replace

from laminar.errors import LaminarError
from laminar.ir.graph import Graph
from laminar.ir.plans.certificate import Contradiction
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.rewrites import Steps
from laminar.placement.micro_batch import micro
from laminar.planner.estimate import pipeline_recompute
from laminar.planner.estimate.candidates import Final, Score, described_candidate
from laminar.planner.estimate.score_cell import CellScorer
from laminar.planner.estimate.score_placement import feasible
from laminar.planner.search.best_first.incumbent import Incumbent, TimeLeft
from laminar.planner.search.best_first.known_bounds import KnownBounds
from laminar.planner.space.contradictions import checking, contradicted
from laminar.planner.tuning import SAME_MEMORY, WORTH_SIMULATING
from laminar.rewrite.variants import carrying


class Trials:
    """Scores of one graph, and their simulations."""

    def __init__(
        self,
        scorer: CellScorer,
        bounds: KnownBounds,
        incumbent: Incumbent,
        clock: TimeLeft,
        captured_graph: Graph,
        steps: Steps,
    ) -> None:
        """`steps` made the scorer's graph of the captured one."""
        self.scorer, self.model, self.request = scorer, scorer.model, scorer.request
        self.bounds, self.incumbent, self.clock = bounds, incumbent, clock
        self.captured_graph, self.steps = captured_graph, steps
        self.scores: list[Score] = []
        self.waiting: list[tuple[float, int, Score]] = []
        """Scores that would be the best, to be simulated: a heap."""
        self.done: list[Score] = []
        """Those that have been."""
        self.bias: dict[bool, float] = {}
        """The least that a simulation at full depth came to, of its score; with micro-batches and without."""
        self.last_s = 0.0
        """Processor seconds of the last simulation."""
        self.contradictions: list[Contradiction | None] = []
        """Plans against bounds that were asked for besides."""

    @property
    def best_waiting_s(self) -> float:
        """Of scores that wait."""
        return self.waiting[0][0] if self.waiting else math.inf

    def wait(self, found: Iterable[Score]) -> None:
        """Keep scores; those that would be the best wait to be simulated."""
        done = {(s.cell, s.style, s.zero) for s in self.done}
        for score in (one for one in found if (one.cell, one.style, one.zero) not in done):
            one = replace(score, rewrites=self.steps)
            self.scores.append(one)
            if one.seconds < self.incumbent.best_s and self.scorer.may_fit(one):
                heapq.heappush(self.waiting, (one.seconds, len(self.scores), one))

    def settle(self, promise_s: float = math.inf) -> None:
        """Simulate queued scores, as far as no open cell promises to be better."""
        while self.waiting and self.waiting[0][0] <= promise_s:
            seconds, _, score = heapq.heappop(self.waiting)
            hoped_s = seconds * min(1.0, self.bias.get(score.cell.plain, 1.0))
            if self.outdone(score):
                continue
            if self.clock.left() <= 0 and self.incumbent.settled:
                continue
            if hoped_s < WORTH_SIMULATING * self.incumbent.best_s:
                self.confirm(score)

    def outdone(self, score: Score) -> bool:
        """Whether a plan of the same cell was simulated that was expected to take no more, of time and memory."""
        return any(
            s.seconds  # what was simulated without having been scored says nothing about scores
            and s.cell == score.cell
            and s.zero == score.zero
            and s.seconds <= score.seconds
            and s.peak_bytes <= score.peak_bytes / SAME_MEMORY
            for s in self.done
        )

    def confirm(self, score: Score) -> Final | None:
        """Simulate a plan at full depth: only what was simulated may win. The plan, if it fits."""
        self.done.append(score)
        begun = time.process_time()
        final = self.simulated(score)
        self.last_s = time.process_time() - begun
        held = math.inf if final is None else float(final.peak_bytes)
        seconds = final.seconds if final else score.seconds or math.inf
        now = replace(final.score if final else score, peak_bytes=held, seconds=seconds)
        self.scores = [s for s in self.scores if s is not score] + [now]
        if final is None or not feasible(now, self.request):
            self.wait(self.scorer.leaner(now, final))
        if final is None:
            return None
        if score.seconds:
            plain = score.cell.plain
            self.bias[plain] = min(self.bias.get(plain, math.inf), final.seconds / score.seconds)
        if not feasible(now, self.request):
            return None
        final = replace(final, score=now)
        if checking() and self.bounds.about(final):
            bound_s = self.bounds.model_bounds.of(now.cell).seconds
            self.contradictions.append(contradicted(described_candidate(now), final.seconds, bound_s))
        self.incumbent.take(final)
        return final

    def simulated(self, score: Score, cut: pipeline_recompute.Cut | None = None) -> Final | None:
        """A score's plan at full depth; nothing if it can't be written after all."""
        try:
            plan = self.model.unfolded(score)
            return self._plain(score, plan) if score.cell.plain else self._staged(score, plan, cut)
        except LaminarError:
            return None

    def _plain(self, score: Score, plan: Plan) -> Final:
        plan, ran, mix = pipeline_recompute.plain(self.model, score, plan, self.incumbent.best_s)
        if score.again:
            score = replace(score, again=(mix.again,), spared=mix.spared, away=mix.away)
        plan = carrying(plan, self.captured_graph, self.steps)
        return Final(score, plan, ran)

    def _staged(self, score: Score, plan: Plan, cut: pipeline_recompute.Cut | None) -> Final:
        model, cell, best_s = self.model, score.cell, self.incumbent.best_s
        deep = model.whole(cell.micro_batches)
        cuts = self.scorer.cuts(score) if cut is None else [cut]
        tried = [pipeline_recompute.pipelined(model, score, deep, plan, one, best_s) for one in cuts]
        staged, ran, again = min(tried, key=lambda t: (max(t[1].peaks) > self.request.room_bytes, t[1].seconds))
        score = replace(score, again=again)
        if self.steps:
            staged = carrying(staged, micro(self.captured_graph, cell.micro_batches), self.steps)
        return Final(score, staged, ran)


def same_plan(one: Score, other: Score) -> bool:
    """Whether two scores are of one cell, placed in the same way."""
    return (one.cell, one.style, one.zero, one.rewrites) == (other.cell, other.style, other.zero, other.rewrites)

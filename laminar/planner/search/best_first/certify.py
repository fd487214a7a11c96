"""What the searches of a model's graphs have proved, as a certificate; and the choice among the plans they found.

A certificate vouches for the captured graph and for those rewritten ones that were searched to the end. Plans that were
simulated faster than what is proved of their cell withdraw it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from laminar.cost.calibrate import interval
from laminar.ir.plans.certificate import Certificate, Contradiction
from laminar.planner.estimate.candidates import Final, Found, Nothing, Score, described_candidate
from laminar.planner.estimate.score_placement import no_room
from laminar.planner.search.best_first.branches import Branches, BranchWay
from laminar.planner.search.best_first.graph_search import GraphSearch
from laminar.planner.space.contradictions import contradicted, withdrawn
from laminar.planner.space.plan_space import Space
from laminar.planner.tuning import AS_GOOD


@dataclass(frozen=True)
class GraphSearches:
    """The searches of one model's graphs, when they have ended."""

    captured: GraphSearch
    rewritten: Sequence[GraphSearch] = ()
    branches: Branches | None = None
    """Of the captured graph."""
    apart: Sequence[Score] = ()
    """Plans with branches on devices of their own."""
    unexplored: int = 0
    """Rewrites of the graph that were not made at all."""

    @property
    def all(self) -> tuple[GraphSearch, ...]:
        """Of all graphs."""
        return self.captured, *self.rewritten

    @property
    def scores(self) -> list[Score]:
        """Placements of all graphs that were looked at."""
        first, *others = ([*search.trials.scores] for search in self.all)
        return [*first, *self.apart, *(score for scores in others for score in scores)]

    @property
    def ways(self) -> Mapping[BranchWay, float]:
        """Of branches on devices of their own, with their bounds."""
        return self.branches.at if self.branches else {}

    def space(self, sure: Sequence[GraphSearch], outside: Sequence[str] = ()) -> Space:
        """The plans of these searches' graphs, and of branches."""
        return self.captured.space([s.steps for s in sure], [way.to_json() for way in self.ways], outside)

    # --- where there is a plan

    def found(self) -> tuple[Found, Final]:
        """The choice among plans of all graphs, and what is known about it; and the one that was chosen."""
        incumbent, request = self.captured.incumbent, self.captured.request
        finals = sorted(incumbent.finals, key=lambda f: f.seconds)
        best = simplest(finals, incumbent.earlier_s)
        sure = [self.captured, *(s for s in self.rewritten if s.bounds.proved or s.steps == best.plan.rewrites)]
        outside = self._outside(sure)
        space = self.space(sure, outside)
        proof = self._certificate(best, sure, space, outside)
        account = replace(
            best.plan.account,
            step=best.ran.figures(),
            bound_s=proof.bound_s,
            certificate=proof,
            space=space.data,
            choice=best.row(),
            runners_up=tuple(f.row() for f in finals if f is not best),
            search_s=time.process_time() - incumbent.began,
            budget_s=request.budget_s,
        )
        scores = tuple(sorted(self.scores, key=lambda score: score.seconds))
        return Found(replace(best.plan, account=account), proof, tuple(finals), scores, space), best

    def _outside(self, sure: Sequence[GraphSearch]) -> tuple[str, ...]:
        """What the certificate leaves out, in words."""
        left = self.unexplored + len(self.all) - len(sure)
        rewrites = [f"rewrites of the graph that were not searched to the end: {left}"] if left else []
        branches = "branches on devices of their own" + (", dealt out in other ways" if self.ways else "")
        return (*rewrites, branches, *self.captured.outside)

    def _certificate(
        self, best: Final, sure: Sequence[GraphSearch], space: Space, outside: tuple[str, ...]
    ) -> Certificate:
        finals, ways = self.captured.incumbent.finals, self.ways
        seen = self.branches.looked_at if self.branches else set[BranchWay]()
        wrong = withdrawn(self._contradictions())
        bounds = [(s, cell, at_s) for s in sure for cell, at_s in s.bounds.at.items()]
        lowest_s = min(*(s.bounds.lowest_s for s in sure), *(f.seconds for f in finals), *ways.values())
        known = best.ran.figures().known
        return Certificate(
            space=space.hash,
            step_s=best.seconds,
            bound_s=0.0 if wrong else lowest_s,
            cells=len(bounds) + len(ways),
            looked_at=sum(len(s.looked_at) for s in sure) + len(seen),
            pruned=sum(at_s >= best.seconds and c not in s.looked_at | s.bounds.unfit for s, c, at_s in bounds)
            + sum(at_s >= best.seconds and way not in seen for way, at_s in ways.items()),
            unfit=sum(len(s.bounds.unfit) for s in sure),
            unfinished=sum(at_s < best.seconds and c not in s.looked_at for s, c, at_s in bounds)
            + sum(at_s < best.seconds and way not in seen for way, at_s in ways.items()),
            outside=outside,
            interval=interval(best.seconds, best.ran.sigma),
            known="prices " + (", ".join(f"{v:.0%} {k}" for k, v in known.items() if v >= 0.01) or "from peaks"),
            contradictions=wrong,
        )

    def _contradictions(self) -> Iterator[Contradiction | None]:
        """Plans that were simulated faster than what is proved of them, of their cell, or of branches."""
        for search in self.all:
            yield from search.trials.contradictions
            for final in search.incumbent.finals:
                bound_s = search.bounds.at.get(final.score.cell)
                if bound_s is not None and final.score.rewrites == search.steps and search.bounds.about(final):
                    yield contradicted(described_candidate(final.score), final.seconds, bound_s)
        for final in sorted(self.captured.incumbent.finals, key=lambda f: f.seconds):
            if self.ways and final.score.apart:
                yield contradicted(described_candidate(final.score), final.seconds, min(self.ways.values()))

    # --- where there is none

    def nothing(self) -> Nothing:
        """What is known where no plan was found."""
        first, request = self.captured, self.captured.request
        scores, settled = self.scores, first.incumbent.settled
        sure = [first, *(s for s in self.rewritten if s.bounds.proved)]
        return Nothing(
            no_room(request, min((s.peak_bytes for s in scores), default=math.inf)),
            min(
                *(s.bounds.lowest_s if settled else min(s.bounds.at.values()) for s in sure),
                *self.ways.values(),
                math.inf,
            ),
            self.space(sure).hash,
            not all(s.peak_bytes > request.room_bytes for s in scores),
            first.clock.left() > 0 or not settled,
        )


def simplest(finals: Sequence[Final], earlier_s: float) -> Final:
    """The simplest of those that are as good as the fastest; `finals` are sorted, the fastest first.

    Nothing that has a name may be faster than what is taken, nor what was found before, be it by a little.
    """
    most_s = min([AS_GOOD * finals[0].seconds, earlier_s, *(f.seconds for f in finals if f.usual)])
    return min((f for f in finals if f.seconds <= most_s), key=lambda f: (f.simple, f.seconds))

"""The fastest plan of a space that fits, and a proof of how far it can be from the best there is.

A graph that computes the same in another way (`planner/space/rewrites.py`) is searched like the captured one, in the
same cells, with placements and bounds of its own: whatever is the best so far counts for all of them, and the
certificate vouches for those that were searched to the end. Of plans that are as good as equal the simplest wins.

A search may be told what it has to beat (`sought`): what can't be faster is then ruled out as if that had been found.
"""

from __future__ import annotations

import math

from laminar.cost.sim.no_gc import uncollected
from laminar.ir.graph import Graph
from laminar.planner.estimate.candidates import Found, Nothing, Score
from laminar.planner.estimate.score_placement import feasible
from laminar.planner.search.best_first.branches import Branches
from laminar.planner.search.best_first.certify import GraphSearches
from laminar.planner.search.best_first.graph_search import GraphSearch
from laminar.planner.search.best_first.incumbent import Incumbent, TellPlan
from laminar.planner.search.earlier_plans import remember
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request
from laminar.planner.space.rewrites import SearchedVariants


def find(graph: Graph, request: Request, progress: TellPlan | None = None) -> Found:
    """The fastest plan of the space that fits, and how far it can be from the best there is."""
    found = sought(graph, request, progress)
    if isinstance(found, Nothing):
        raise found.error
    return found


def sought(
    graph: Graph, request: Request, progress: TellPlan | None = None, below_s: float = math.inf
) -> Found | Nothing:
    """The same, or what is known where there is no plan; slower plans than `below_s` are of no use to anybody."""
    with uncollected():
        incumbent = Incumbent(request, progress or (lambda text: None), below_s)
        captured = GraphSearch(graph, incumbent)
        captured.begin()
        variants = SearchedVariants(graph, request)
        rewritten = [GraphSearch(made, incumbent, captured, steps) for steps, made in variants if steps]
        for other in rewritten[:1]:
            other.follow()  # where that is faster, it rules out most cells of the captured graph
            captured.clock.leave_half()
        captured.run()
        branches: Branches | None = None
        apart: list[Score] = []
        if not incumbent.settled:
            branches, apart = _branches(captured)
        if not incumbent.settled:
            return GraphSearches(captured, (), branches, apart).nothing()
        captured.clock.take_all()
        for other in rewritten:
            if other is rewritten[0] or captured.clock.left() > 0:
                other.follow()
                other.run()
        if branches is None:
            branches, apart = _branches(captured)
        searched = GraphSearches(captured, rewritten, branches, apart, variants.unexplored)
        if not incumbent.finals:
            return searched.nothing()
        captured.around()
        captured.raise_lowest()
        found, best = searched.found()
        remember(graph, request, best)
        return found


def promised(graph: Graph, request: Request) -> tuple[float, list[Cell]]:
    """Seconds that no plan for a graph as captured takes less than, by the cheapest bound, and all its cells."""
    search = GraphSearch(graph, Incumbent(request, lambda text: None, math.inf))
    return min(search.bounds.model_bounds.rough(cell) for cell in search.cells), search.cells


def _branches(captured: GraphSearch) -> tuple[Branches, list[Score]]:
    """Branches on devices of their own, where there are any that are worth it, and the plans tried.

    After everything else: what was found until then does not depend on it.
    """
    incumbent, left, apart = captured.incumbent, captured.clock.left, []
    branches = Branches(captured.model, captured.bounds.model_bounds, captured.coupled is not None)
    for final in branches.search(lambda: incumbent.best_s, left):
        apart.append(final.score)
        if feasible(final.score, captured.request):
            incumbent.take(final)
    branches.raise_bound(incumbent.best_s, left)
    return branches, apart

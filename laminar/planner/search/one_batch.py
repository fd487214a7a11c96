"""The search for one size of batch, on a cluster of one kind of device or of several."""

from __future__ import annotations

import math
from collections.abc import Callable

from laminar.errors import PlanError
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.planner.estimate.candidates import Nothing
from laminar.planner.report.write_account import explained
from laminar.planner.search.best_first.search import sought
from laminar.planner.search.infeasible import relaxed
from laminar.planner.space.request import Request


def refused(graph: Graph, request: Request, error: PlanError) -> PlanError:
    """The error of a search that found nothing, with the ways out where they can be tried."""
    return error if len(request.cluster.parts) > 1 else relaxed(graph, request, error)


def tried(
    graph: Graph, request: Request, progress: Callable[[str], None] | None = None, below_s: float = math.inf
) -> Plan | Staged | Nothing:
    """The fastest plan for one batch, or what is known where there is none; `below_s` is what it has to beat."""
    from laminar.planner.search.mixed_cluster import best_mixed
    from laminar.planner.search.replan import arrangement, outside

    other = arrangement(graph, request)
    found: Plan | Staged | Nothing
    try:
        if len(request.cluster.parts) > 1:
            found = best_mixed(graph, request, progress)
        else:
            seen = sought(graph, request, progress, below_s)
            found = seen if isinstance(seen, Nothing) else explained(graph, request, seen)
    except PlanError as error:
        found = Nothing(error, 0.0, "", False, True)
    plan = None if isinstance(found, Nothing) else found
    if other is not None and (other.step_s or math.inf) < ((plan and plan.step_s) or math.inf):
        return outside(other, plan)
    return found

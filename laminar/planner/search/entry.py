"""The door to the search: a request in, the best plan out, with all it takes to explain itself.

`find` searches. Here its result gets an account: what it spends its time on, what binds, why the others lost and how
sure that is, what it is in other systems' words. A request that nothing fulfils is looked at once more, to say which
limit binds and what the cheapest way out is (`infeasible.py`). Where the batch is free, batches are searched one by one
(`batch_size.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.placement.fold import fold
from laminar.planner.estimate.candidates import Nothing
from laminar.planner.search.one_batch import refused, tried
from laminar.planner.space.pins import checked
from laminar.planner.space.request import Request


def best(graph: Graph, request: Request, progress: Callable[[str], None] | None = None) -> Plan | Staged:
    """The fastest plan that a search finds, explained."""
    from laminar.planner.search.batch_size import best_batch

    if request.place:
        checked(graph, fold(graph), request.place)
    if request.batch == "free":
        return best_batch(graph, request, progress)
    found = tried(graph, request, progress)
    if isinstance(found, Nothing):
        raise refused(graph, request, found.error) from None
    return found

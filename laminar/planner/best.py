"""The door to the search: a request in, the best plan out, with all it takes to explain itself.

`find` searches. Here its result gets an account: what it spends its time on, what binds, why the others lost and how
sure that is, what it is in other systems' words. A request that nothing fulfils is looked at once more, to say which
limit binds and what the cheapest way out is (`relax.py`). Where the batch is free, batches are searched one by one
(`batch.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from laminar.errors import LaminarError, PlanError
from laminar.ir.graph import Graph
from laminar.ir.plan import Plan
from laminar.ir.planned import Origin
from laminar.ir.staged import Staged
from laminar.planner.account import accounted
from laminar.planner.explain import assumed, binding, chances, counted, held, spent
from laminar.planner.find import Final, Found, Nothing, described, sought
from laminar.planner.form import form
from laminar.planner.pinned import checked
from laminar.planner.relax import relaxed
from laminar.planner.request import Request
from laminar.search.fold import fold

LOOKED_AT = 40
"""Plans of a search that its account lists."""
EXPLAINED = 4
"""Plans that were simulated in full of which it is told what they spend their time on."""


def best(graph: Graph, request: Request, progress: Callable[[str], None] | None = None) -> Plan | Staged:
    """The fastest plan that a search finds, explained."""
    from laminar.planner.batch import best_batch

    if request.place:
        checked(graph, fold(graph), request.place)
    if request.batch == "free":
        return best_batch(graph, request, progress)
    found = tried(graph, request, progress)
    if isinstance(found, Nothing):
        raise refused(graph, request, found.error) from None
    return found


def refused(graph: Graph, request: Request, error: PlanError) -> PlanError:
    """The error of a search that found nothing, with the ways out where they can be tried."""
    return error if len(request.cluster.parts) > 1 else relaxed(graph, request, error)


def tried(
    graph: Graph, request: Request, progress: Callable[[str], None] | None = None, below_s: float = math.inf
) -> Plan | Staged | Nothing:
    """The fastest plan for one batch, or what is known where there is none; `below_s` is what it has to beat."""
    from laminar.planner.mixed import best_mixed
    from laminar.planner.replan import arranged, outside

    other = arranged(graph, request)
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


def explained(graph: Graph, request: Request, found: Found) -> Plan | Staged:
    """The plan of a search, with an account of it."""
    plan = found.plan
    mine = next((f for f in found.finals if f.plan.hash == plan.hash), None)
    others = [f for f in found.finals if f is not mine]
    rows = [_row(f) for f in others[:EXPLAINED]]
    account: dict[str, Any] = {**plan.account, **counted(graph), "devices": request.cluster.devices}
    if mine is not None:
        choice = _row(mine)
        account["choice"] = {**account["choice"], **choice}
        account["runners_up"] = [*rows, *(f.row() for f in others[EXPLAINED:])]
        account["binding"] = {**binding(choice.get("spent", {})), "memory_bytes": request.room_bytes}
        ran = mine.ran
        if ran is not None:
            account["memory"] = held(ran)
        if ran is not None and rows:
            each = chances([choice["spent"], *(r["spent"] for r in rows if "spent" in r)], ran.sigma)
            account["wins"] = {"share": each[0], "each": each, "assumed": assumed(ran.sigma)}
    kept_out = [s for s in found.scores if s.seconds < found.certificate.step_s and s.peak_bytes > request.room_bytes
                and math.isfinite(s.peak_bytes)]  # fmt: skip
    if kept_out and "binding" in account:
        fastest = min(kept_out, key=lambda s: s.seconds)
        account["binding"]["kept_out"] = {
            "plan": described(fastest), "step_s": fastest.seconds, "peak_bytes": fastest.peak_bytes,
        }  # fmt: skip
    account["looked_at"] = [
        {
            "plan": described(s),
            "step_s": s.seconds,
            "peak_bytes": s.peak_bytes if math.isfinite(s.peak_bytes) else None,
            "fits": not s.peak_bytes > request.room_bytes,  # what is too slow is not asked how much it holds
        }
        for s in found.scores[:LOOKED_AT]
    ]
    account["request"] = asked(request)
    origin = Origin(graph, request.cluster, asked(request), tuple(f.plan for f in others))
    plan = replace(plan, account=account, origin=origin)
    try:
        plan = replace(plan, account={**plan.account, "form": form(plan, graph).to_json()})
    except LaminarError as error:  # a plan need not have a form that others know
        plan = replace(plan, account={**plan.account, "formless": str(error)})
    return plan if isinstance(plan, Staged) else accounted(graph, plan)


def _row(final: Final) -> dict[str, Any]:
    """A plan that was simulated in full, with what it spends its time on."""
    return {**final.row(), **({"spent": spent(final.ran)} if final.ran is not None else {})}


def asked(request: Request) -> dict[str, Any]:
    """A request without its cluster, as plain data: options of `laminar.plan`."""
    return {
        "memory_bytes": request.memory_bytes,
        "margin": request.margin,
        "budget_s": request.budget_s,
        "optimizer": request.optimizer,
        "pin": {**request.pin, **request.place},
        "only": list(request.only),
    }

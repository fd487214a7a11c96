"""The account of a plan that a search has found: what it spends its time on, what binds, why others lost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from laminar.errors import LaminarError
from laminar.ir.graph import Graph
from laminar.ir.plan import Plan
from laminar.ir.planned import Origin
from laminar.ir.staged import Staged
from laminar.planner.estimate.candidates import Final, Found, described
from laminar.planner.report.breakdown import assumed, binding, chances, counted, held, spent
from laminar.planner.report.classify import form
from laminar.planner.report.traffic import accounted
from laminar.planner.space.request import Request, texts

LOOKED_AT = 40
"""Plans of a search that its account lists."""
EXPLAINED = 4
"""Plans that were simulated in full of which it is told what they spend their time on."""


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
        **({"rules": texts(request.rules)} if request.rules else {}),
    }

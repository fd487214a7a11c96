"""The account of a plan that a search has found: what it spends its time on, what binds, why others lost."""

from __future__ import annotations

import math
from dataclasses import replace

from laminar.errors import LaminarError
from laminar.ir.graph import Graph
from laminar.ir.plans.account import ChanceToWin, EstimatedPlan, KeptOutPlan, SearchOptions, SimulatedPlan
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.planned import PlanOrigin
from laminar.ir.plans.staged import Staged
from laminar.planner.estimate.candidates import Final, Found, described_candidate
from laminar.planner.report.classify import form
from laminar.planner.report.program_traffic import with_traffic
from laminar.planner.report.step_breakdown import assumption, binding, chances, counted_times, held, spent
from laminar.planner.space.request import Request

ESTIMATES_KEPT = 40
"""Plans that a search looked at, of which the account tells."""
EXPLAINED = 4
"""Plans that were simulated in full of which it is told what they spend their time on."""


def explained(graph: Graph, request: Request, found: Found) -> Plan | Staged:
    """The plan of a search, with an account of it."""
    plan, size = found.plan, counted_times(graph)
    mine = next((f for f in found.finals if f.plan.hash == plan.hash), None)
    others = [f for f in found.finals if f is not mine]
    rows = [simulated_row(f) for f in others[:EXPLAINED]]
    account = replace(plan.account, samples=size.samples, tokens=size.tokens, devices=request.cluster.devices)
    if mine is not None:
        choice = simulated_row(mine)
        kept_out = _kept_out(found, request)
        account = replace(
            account,
            choice=choice,
            runners_up=(*rows, *(f.row() for f in others[EXPLAINED:])),
            binding=replace(binding(choice.spent, request.room_bytes), kept_out=kept_out),
            memory=held(mine.ran),
        )
        if rows:
            each = chances([choice.spent, *(row.spent for row in rows)], mine.ran.sigma)
            wins = ChanceToWin(share=each[0], each=tuple(each), assumed=assumption(mine.ran.sigma))
            account = replace(account, wins=wins)
    looked_at = (
        EstimatedPlan(
            plan=described_candidate(s),
            step_s=s.seconds,
            peak_bytes=s.peak_bytes if math.isfinite(s.peak_bytes) else None,
            fits=not s.peak_bytes > request.room_bytes,  # what is too slow is not asked how much it holds
        )
        for s in found.scores[:ESTIMATES_KEPT]
    )
    account = replace(account, looked_at=tuple(looked_at), options=asked(request))
    origin = PlanOrigin(graph, request.cluster, asked(request), tuple(f.plan for f in others))
    plan = replace(plan, account=account, origin=origin)
    try:
        account = replace(account, form=form(plan, graph))
    except LaminarError as error:  # a plan need not have a form that others know
        account = replace(account, formless=str(error))
    plan = replace(plan, account=account)
    return plan if isinstance(plan, Staged) else with_traffic(graph, plan)


def _kept_out(found: Found, request: Request) -> KeptOutPlan | None:
    """The fastest of the plans that are faster and do not fit."""
    scores = [
        s
        for s in found.scores
        if s.seconds < found.certificate.step_s and s.peak_bytes > request.room_bytes and math.isfinite(s.peak_bytes)
    ]
    if not scores:
        return None
    fastest = min(scores, key=lambda s: s.seconds)
    return KeptOutPlan(plan=described_candidate(fastest), step_s=fastest.seconds, peak_bytes=fastest.peak_bytes)


def simulated_row(final: Final) -> SimulatedPlan:
    """A plan that was simulated in full, with what it spends its time on."""
    return replace(final.row(), spent=spent(final.ran))


def asked(request: Request) -> SearchOptions:
    """A request without its cluster: options of `laminar.plan`."""
    return SearchOptions(
        memory_bytes=request.memory_bytes,
        margin=request.margin,
        budget_s=request.budget_s,
        optimizer=request.optimizer,
        pin={**request.pin, **request.place},
        only=tuple(request.only),
        rules=tuple((rule.name, rule.text) for rule in request.rules),
    )

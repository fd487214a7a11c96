"""What a plan's program exchanges, for its account: collectives, bytes, what recompute and offload save."""

from __future__ import annotations

from dataclasses import replace

from laminar.cost.ops.eager import as_they_are, shown
from laminar.ir.graph import Graph
from laminar.ir.patterns import pick
from laminar.ir.plan import Plan
from laminar.lower import offload
from laminar.lower.lower import lower
from laminar.lower.planned_recompute import saved
from laminar.rewrite.variants import rewritten


def accounted(graph: Graph, plan: Plan) -> Plan:
    """A plan with the collectives and bytes of its program written into its account."""
    graph = rewritten(graph, plan)
    program = lower(graph, plan)
    account = {**plan.account, **program.account()}
    if parts := as_they_are(graph):
        account["eager"] = [shown(row) for row in parts]
    if plan.recompute:
        account["again"] = saved(lower(graph, replace(plan, recompute=())), program, pick(graph, plan.recompute))
    if plan.offload:
        account["offload"] = offload.account(program)
    return replace(plan, account=account)

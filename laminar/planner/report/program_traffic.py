"""What a plan's program exchanges, for its account: collectives, bytes, what recompute and offload save."""

from __future__ import annotations

from dataclasses import replace

from laminar.cost.ops.eager import as_they_are, shown_part
from laminar.ir.graph import Graph
from laminar.ir.plans.patterns import pick
from laminar.ir.plans.plan import Plan
from laminar.lower.lower import lower
from laminar.lower.memory.offload import offload_saving
from laminar.lower.memory.planned_recompute import recompute_saving
from laminar.rewrite.variants import rewritten


def with_traffic(graph: Graph, plan: Plan) -> Plan:
    """A plan with the collectives and bytes of its program written into its account."""
    graph = rewritten(graph, plan)
    program = lower(graph, plan)
    account = replace(plan.account, traffic=program.traffic())
    if parts := as_they_are(graph):
        account = replace(account, eager=tuple(shown_part(row) for row in parts))
    if plan.recompute:
        without = lower(graph, replace(plan, recompute=()))
        account = replace(account, recompute=recompute_saving(without, program, pick(graph, plan.recompute)))
    if plan.offload:
        account = replace(account, offload=offload_saving(program))
    return replace(plan, account=account)

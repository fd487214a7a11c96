"""What a training step runs besides forward and backward: where gradients go, and how updated pieces come back.

A gradient leaves the program as the piece that whoever updates that piece of the parameter needs. Parameters
that are kept whole but updated in shards (ZeRO 1 and 2) are then gathered by a program of their own.
"""

from __future__ import annotations

from dataclasses import replace

from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Program
from laminar.ir.sbp import NdSbp
from laminar.lower.boxing.reshard import Move, moves
from laminar.lower.lower import lower


def owners(graph: Graph, plan: Plan) -> dict[str, NdSbp]:
    """How each gradient leaves the program, by `grad:name`: as the optimizer's state of that parameter lies."""
    return {f"grad:{o.name}": plan.state.get(o.name, plan.inputs[o.name]) for o in graph.outputs if o.kind == "grad"}


def step_programs(graph: Graph, plan: Plan) -> tuple[Program, Program | None]:
    """The program of one batch, and the one that puts updated parameters together, if any are in shards."""
    plan.fits(graph)
    program = lower(graph, replace(plan, outputs={**plan.outputs, **owners(graph, plan)}))
    items: list[Move] = [
        (i.name, i.spec, plan.state[i.name], plan.inputs[i.name])
        for i in graph.inputs
        if i.kind == "param" and plan.state.get(i.name, plan.inputs[i.name]) != plan.inputs[i.name]
    ]
    return program, moves(plan.mesh, items, "updated parameters") if items else None

"""The plan of exact mode: the batch in units, weights in slices if asked, and whatever outlives a step whole.

What a process stores of weights and state is decided elsewhere and changes no bit; here each logical rank reads its
slice of whole weights, and gradients leave whole.
"""

from __future__ import annotations

from dataclasses import replace

from laminar.errors import PlanError
from laminar.ir.exact import Exact
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import B, Split
from laminar.placement.complete import completed
from laminar.placement.presets import PRODUCTS, context_pins, data_pins, stretches_of, tensor_pins

LASTING = ("param", "buffer")


def logical_plan(graph: Graph, exact: Exact) -> Plan:
    """How logical ranks compute a graph."""
    mesh, pins = exact.mesh, []
    for axis, name in enumerate(mesh.names):
        if name == "slice":
            pins.append(tensor_pins(graph))
        elif name == "context":
            pins.append(context_pins(graph, mesh, axis, stretches_of(graph, exact.context)))
        else:
            pins.append(data_pins(graph, mesh, axis))
    plan = completed(graph, mesh, pins, "logical_ranks")
    if exact.context > 1:
        _refuse_if_unsplit(graph, plan)
    whole = (B,) * len(mesh.sizes)
    inputs = {**plan.inputs, **{i.name: whole for i in graph.inputs if i.kind in LASTING}}
    return replace(plan, inputs=inputs, outputs=dict.fromkeys(plan.outputs, whole), state={})


def _refuse_if_unsplit(graph: Graph, plan: Plan) -> None:
    """Refuse models whose products are not split by token: every part of a sequence would compute the whole of it."""
    axis = plan.mesh.axis("context")
    products = [n.name for n in graph.nodes if n.op in PRODUCTS and n.phase != "backward"]
    split = [name for name in products if any(isinstance(p[axis], Split) for p in plan.ops[name].ins)]
    if 2 * len(split) < len(products):
        raise PlanError(
            f"context={plan.mesh.sizes[axis]} does not split this model: only {len(split)} of its {len(products)} "
            "products can be computed for a part of the tokens",
            next="leave context out, and cut the batch (units) or the weights (slices)",
        )

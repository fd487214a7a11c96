"""The plan of exact mode: the batch in units, weights in slices if asked, and whatever outlives a step whole.

What a process stores of weights and state is decided elsewhere and changes no bit; here each logical rank reads its
slice of whole weights, and gradients leave whole.
"""

from __future__ import annotations

from dataclasses import replace

from laminar.ir.exact import Exact
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import B
from laminar.placement.presets import data_parallel, tensor_parallel

LASTING = ("param", "buffer")


def logical_plan(graph: Graph, exact: Exact) -> Plan:
    """How logical ranks compute a graph."""
    mesh = exact.mesh
    plan = data_parallel(graph, mesh) if exact.slices == 1 else tensor_parallel(graph, mesh, "slice")
    whole = (B,) * len(mesh.sizes)
    inputs = {**plan.inputs, **{i.name: whole for i in graph.inputs if i.kind in LASTING}}
    return replace(plan, inputs=inputs, outputs=dict.fromkeys(plan.outputs, whole), state={})

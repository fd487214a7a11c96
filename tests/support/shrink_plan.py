"""Shrinking: from a plan that fails to a small plan that fails.

A random plan of a thousand ops says nothing. So whatever can be put back to replicated without the
failure going away is put back, in halves, quarters and so on down to single ops (delta debugging,
Zeller and Hildebrandt 2002); what is left is usually one op and the tensor it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Choice, Plan
from laminar.ir.sbp import B, NdSbp, show

Item = tuple[str, str]
"""`("ops" | "inputs" | "outputs", name)`."""


def placed(plan: Plan) -> list[Item]:
    """Everything in a plan that is not replicated."""
    plain: NdSbp = (B,) * len(plan.mesh.sizes)
    found = [("inputs", k) for k, nd in plan.inputs.items() if nd != plain]
    found += [("ops", k) for k, c in plan.ops.items() if any(nd != plain for nd in (*c.ins, *c.outs))]
    return found + [("outputs", k) for k, nd in plan.outputs.items() if nd != plain]


def plainer(plan: Plan, items: list[Item]) -> Plan:
    """The plan with some items replicated."""
    plain: NdSbp = (B,) * len(plan.mesh.sizes)
    sides = {"inputs": dict(plan.inputs), "outputs": dict(plan.outputs)}
    ops = dict(plan.ops)
    for side, name in items:
        if side == "ops":
            ops[name] = Choice((plain,) * len(ops[name].ins), (plain,) * len(ops[name].outs))
        else:
            sides[side][name] = plain
    return replace(plan, ops=ops, **sides)


def shrink(plan: Plan, fails: Callable[[Plan], bool], tries: int = 400) -> Plan:
    """A plan that still fails, in which hardly anything is left to replicate."""
    size = max(1, len(placed(plan)) // 2)
    while tries > 0:
        items, changed = placed(plan), False
        for start in range(0, len(items), size):
            tries -= 1
            other = plainer(plan, items[start : start + size])
            if tries >= 0 and fails(other):
                plan, changed = other, True
        if not changed and size == 1:
            break
        size = max(1, size // 2) if not changed else min(size, max(1, len(placed(plan)) // 2))
    return plan


def describe(graph: Graph, plan: Plan) -> str:
    """What is left of a shrunk plan, as a reader would write it."""
    lines = []
    for side, name in placed(plan):
        if side == "ops":
            node = graph.by_name[name]
            lines.append(f"  {node}    {plan.ops[name]}    # {node.where}")
        else:
            lines.append(f"  {side[:-1]} {name}: {show(getattr(plan, side)[name])}")
    return "\n".join(lines)

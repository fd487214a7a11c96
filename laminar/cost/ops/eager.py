"""Which parts of a graph run as they are, and how much of its work that is.

Their operations were counted at a trial, on values made up for it: what an op does that looks at data depends on data.
So the share is an estimate, and time on a device is priced as for a product of so many operations.
"""

from __future__ import annotations

from typing import Any

from laminar.cost.ops.roofline import flops
from laminar.ir.graph import Graph
from laminar.rules.notation import calls_in

OPS = ("laminar.eager", "laminar.eager_backward")


def as_they_are(graph: Graph) -> list[dict[str, Any]]:
    """For each part: the module it is called in, its name, its share of the work, and the line behind it."""
    calls = calls_in(graph)
    work = {name: flops(call) for name, call in calls.items()}
    total = sum(work.values()) or 1.0
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for node in graph.nodes:
        if node.op in OPS:
            name = str(node.args[2 if node.op == OPS[0] else 3]).rpartition("-")[0]
            row = rows.setdefault(
                (node.module, name),
                {
                    "module": node.module,
                    "part": name,
                    "share": 0.0,
                    "where": node.where,
                    "by": "samples" if node.args[-4] else "whole tensors",
                },
            )
            row["share"] += work[node.name] / total
    return list(rows.values())


def shown_part(row: dict[str, Any]) -> str:
    """One part in a line."""
    part = f"{row['module']} ({row['part']})" if row["module"] else row["part"]
    return f"{part}: {row['share']:.1%} of the work, on {row['by']}  {row['where']}"

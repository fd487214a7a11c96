"""Pipelines with a name over parts of a cluster that differ: a search is never slower than any of them.

Stages of as many ranks each on every part, data or tensor parallel inside, 1 to 8 micro-batches for each stage; cut as
if all devices were alike, and by what ops take on the devices of each place: what `laminar.plans.pipeline` makes
without and with a cluster. Plans that use one part alone are those of that part (`named_plans.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.staged import Staged
from laminar.placement import presets
from laminar.planner.estimate.mixed_pipelines import Sides, pipeline_on
from laminar.planner.space.named_plans import NAMED_MICRO_BATCHES
from laminar.planner.space.request import Request
from laminar.staging.stage_plans import inner_plan, pipeline


@dataclass(frozen=True)
class NamedOverParts:
    """A pipeline with a name, before it is made."""

    cell: Sides
    again: Sides | None
    """With blocks recomputed, where that is allowed."""


def named_over_parts(request: Request, cells: Sequence[Sides]) -> Iterator[NamedOverParts]:
    """All there are among these cells, those with the fewest stages first."""
    if request.place or request.pin.get("zero", 0):
        return
    node, known = request.cluster.parts[0].levels[0].size, set(cells)
    for cell in sorted({replace(c, recompute=False) for c in cells}, key=lambda c: (c.stages, c)):
        side, each = cell.sides[0], cell.micro_batches / cell.stages
        alike = all((other.dp, other.tp) == (side.dp, side.tp) for other in cell.sides)
        if alike and each in NAMED_MICRO_BATCHES and (side.dp == 1 or side.tp in (1, node)):
            again = replace(cell, recompute=True)
            ways = [c for c in (cell, again) if c in known]
            yield NamedOverParts(ways[0], again if len(ways) > 1 else None)


def typed(graph: Graph, cluster: Cluster, cell: Sides, by_speed: bool, again: str | None) -> Staged:
    """As `laminar.plans` makes it of the graph of a micro-batch, with blocks of a pattern made `again`."""
    inner = inner_plan(graph, cell.sides[0].mesh)
    if again is not None:
        inner = presets.recomputing(graph, inner, (again,))
    made = (
        pipeline_on(graph, cluster, cell.stages, cell.micro_batches, 1, inner, couple="microbatch")
        if by_speed
        else pipeline(graph, cell.stages, cell.micro_batches, 1, inner, couple="microbatch")
    )
    return replace(made, name="searched", coupled=False)

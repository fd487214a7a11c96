"""The stages of exact mode: where the model is cut, and the plan of the logical ranks of each stage.

Cuts follow from the graph of the first batch and the number of stages alone, never from processes. Every op keeps the
placements it has in the plan of the whole graph, so a stage's ops make the bits that they would make without stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.ir.exact import Exact
from laminar.ir.graph import Graph
from laminar.ir.plans.staged import Staged
from laminar.placement.logical import LASTING, logical_plan
from laminar.staging.balance import balanced
from laminar.staging.stage_plans import arranged, reassigned


def logical_stages(graph: Graph, exact: Exact, micro_batches: int, first: Staged | None = None) -> Staged:
    """How logical ranks of stages compute a graph; `first` is what another graph of the same model was cut into."""
    of = balanced(graph, exact.stages) if first is None else reassigned(graph, first)
    plans = [logical_plan(graph, exact)] * exact.stages
    return arranged(graph, of, range(exact.stages), plans, micro_batches, terms=True)


def weights_of_stages(graphs: Sequence[Graph]) -> dict[str, list[int]]:
    """The stages that read each weight and buffer: what is kept of where a model was cut."""
    stored: dict[str, list[int]] = {}
    for s, own in enumerate(graphs):
        for item in own.inputs:
            if item.kind in LASTING:
                stored.setdefault(item.name, []).append(s)
    return stored

"""Ways to spread a graph over one mesh: those people know by name, and those that the prices ask for.

    data      the batch split over an axis, weights whole
    inner     the same on both axes, where ZeRO cuts pieces along the inner one only: nodes hold the same
    tensor    weights split, the residual stream whole (Megatron's way)
    free      whatever is cheapest: every tensor of the graph is placed at least cost, exactly on each axis

Each comes without ZeRO, with state in pieces, and with everything in pieces. A free axis may find any of the others.
Where gradients are reduced while backward is still at work, how much of that is hidden can't be known before the whole
is simulated; so free placements are asked for twice, as if all of it were hidden and as if nothing were.
"""

from __future__ import annotations

from collections.abc import Iterator

from laminar.cost.prices import Machine
from laminar.errors import LaminarError
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plan import Plan
from laminar.planner.costs import PricedAxis
from laminar.search import presets
from laminar.search.complete import Pins, completed

ZERO = (0, 1, 3)
"""Stages of ZeRO that differ: gradients leave a step in pieces wherever state is in pieces."""


def styles(mesh: Mesh, tensor: bool, free: bool) -> list[tuple[str, ...]]:
    """Which style each axis may have, the best known first."""
    names = mesh.names
    out = [tuple("tensor" if n == "tp" else "data" for n in names)] if tensor or "tp" not in names else []
    if len(names) == 2:
        out.append(("data", "inner"))
    if free and tensor and mesh.ranks > 1:
        if "tp" in names and "dp" in names:
            out += [("data", "free", "hidden"), ("free", "free", "hidden"), ("free", "free")]
        elif "dp" in names:  # one axis of one size: what it is called makes no difference
            out += [("free",), ("free", "hidden")]
    return out


class Placer:
    """Placements on one mesh; prices are asked once."""

    def __init__(self, machine: Machine, mesh: Mesh) -> None:
        self.mesh = mesh
        self.costs = {
            hidden: [PricedAxis(machine, mesh, a, hidden) for a in range(len(mesh.sizes))] for hidden in (0.0, 0.9)
        }

    def plan(self, graph: Graph, style: tuple[str, ...]) -> Plan:
        """The graph spread in one style."""
        axes = [s for s in style if s != "hidden"]
        pins = []
        for axis, one in enumerate(axes):
            if one in ("data", "inner"):
                pins.append(presets.data_pins(graph, self.mesh, axis))
            else:
                pins.append(presets.tensor_pins(graph) if one == "tensor" else Pins())
        costs = self.costs[0.9 if "hidden" in style else 0.0]
        return completed(graph, self.mesh, pins, "+".join(axes), costs)

    def pieces(self, graph: Graph, plan: Plan, style: tuple[str, ...], zero: int) -> Plan:
        """The plan with a stage of ZeRO."""
        return presets.in_pieces(graph, plan, zero, (1,) if "inner" in style else None)

    def plans(self, graph: Graph, wanted: list[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], Plan]]:
        """All that can be had; a style that a model has no rules for is left out."""
        seen: set[str] = set()
        for style in wanted:
            try:
                found = self.plan(graph, style)
            except LaminarError:
                continue
            if found.hash not in seen:
                seen.add(found.hash)
                yield style, found

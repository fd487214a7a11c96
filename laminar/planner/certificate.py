"""What a search has proved, as data and in one sentence.

The space says which plans were meant: it is plain data with a hash. The bound is below the simulated time of every plan
in it. Cells whose own bound is above the plan that was found are out of the question; those that are left, looked at
or not, set the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from laminar.ir.codec import content_hash
from laminar.ir.graph import Graph
from laminar.planner.cells import Cell
from laminar.planner.request import Request

PLACEMENTS = "every tensor in any placement that the rules allow, on one mesh for each stage"
RECOMPUTE = "where a cell has it: any number of blocks of each stage, the first ones, whole or without their products"
OFFLOAD = "where a cell without stages has it: any number of blocks wait in the host's memory, evenly spread"
SETS = (
    "branches with devices of their own: any placement on one axis, or on one across nodes and one inside; none again"
)
CUTS = "stages are stretches of the program, in its own order, with equal meshes"
GATHERS = "parameters in pieces: once a step, or for forward and for backward"
ALGORITHMS = "of each exchange the cheapest: ring, tree, halving and doubling, direct, by switch, by shared memory"


def space(graph: Graph, request: Request, cells: Sequence[Cell]) -> dict[str, Any]:
    """The plans that a search is about."""
    return {
        "graph": graph.hash,
        "cluster": request.cluster.hash,
        "optimizer": request.optimizer,
        "memory_bytes": request.room_bytes,
        "placements": PLACEMENTS,
        "cuts": CUTS,
        "sets": SETS,
        **({"pinned": dict(request.place)} if request.place else {}),
        **({"recompute": RECOMPUTE} if request.recomputes else {}),
        **({"offload": OFFLOAD} if request.offloads else {}),
        "zero": [0, 1, 2, 3] if request.allows("zero") else [0],
        "gathers": GATHERS,
        "algorithms": ALGORITHMS,
        "cells": [cell.to_json() for cell in cells],
    }


@dataclass(frozen=True)
class Certificate:
    """No plan of the space is simulated to be faster than `bound_s`."""

    space: str
    """Its hash."""
    step_s: float
    bound_s: float
    cells: int
    looked_at: int
    pruned: int
    unfit: int
    unfinished: int
    outside: tuple[str, ...] = ()
    """What the space leaves out, in words."""
    interval: tuple[float, float] = (0.0, 0.0)
    """Of the plan's seconds on the machine, 90 %."""
    known: str = ""
    """What prices rest on."""

    @property
    def gap(self) -> float:
        """How far the plan is from the bound, as a share of its own time."""
        return 1 - self.bound_s / self.step_s if self.step_s else 0.0

    def __str__(self) -> str:
        low, high = (100 * (x / self.step_s - 1) for x in self.interval)
        return (
            f"No plan in space {self.space[:8]} is simulated faster than {self.bound_s * 1e3:.4g} ms; "
            f"this one {self.step_s * 1e3:.4g} ms (gap {100 * self.gap:.1f} %). "
            f"Against the machine: {low:+.0f} to {high:+.0f} % (90 %), {self.known}."
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "space": self.space,
            "step_s": self.step_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "cells": {"all": self.cells, "looked_at": self.looked_at, "pruned": self.pruned, "unfit": self.unfit,
                      "unfinished": self.unfinished},
            "outside": list(self.outside),
            "sentence": str(self),
        }  # fmt: skip


def hashed(data: dict[str, Any]) -> str:
    """The identity of a space."""
    return content_hash(data)

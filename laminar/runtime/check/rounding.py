"""How large the terms are of which a value is the sum: what its rounding errors are measured against.

A bias before a batch norm has a gradient of zero, and one device computes 1e-18 for it, another 3e-18; both are right,
because what was added up is of the size of 1e-3. Nothing in the value itself tells. So the graph is run again with
every number that goes into an op, inputs included, a little larger or smaller at random (Monte Carlo arithmetic, Parker
1997): what a share `d` of each number does to a value, divided by `d`, is the size of what the value is made of. For a
plain sum that is the root of the sum of squares of its terms; where subtractions cancel it is as large as what cancels.

This costs two more runs, so it is only asked about values that are not equal as they stand. A size never exceeds the
largest number of the whole step: a value that jumps (an argmax between equals) has no terms that large, and a check
must not go blind there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from laminar.ir.graph import Graph, Node
from laminar.ir.ops import VIEWS
from laminar.ir.serial.codec import Ref
from laminar.runtime.check.one_device import run_graph

NUDGE = {torch.float64: 2.0**-36, torch.complex128: 2.0**-36}
"""By how much numbers are moved: far above rounding, far below what bends a function."""
COARSE = 2.0**-14
"""In narrower dtypes."""
RUNS = 2


def sizes(
    graph: Graph, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor], of: Collection[Ref]
) -> dict[Ref, float]:
    """For each value, the largest size of any of its elements."""
    plain: dict[Ref, Tensor] = {}
    largest = 0.0

    def see(ref: Ref, value: Any) -> None:
        nonlocal largest
        if _real(value):
            found = value.detach().abs()
            found = found[torch.isfinite(found)]
            largest = max(largest, float(found.max()) if found.numel() else 0.0)
            if ref in of:
                plain[ref] = value

    for item in graph.inputs:
        see(Ref(item.name), inputs[item.name])

    def see_all(node: Node, results: tuple[Any, ...]) -> None:
        for i, value in enumerate(results):
            see(Ref(node.name, i), value)

    run_graph(graph, inputs, constants, see_all)
    out = dict.fromkeys(of, 0.0)
    for seed in range(RUNS):
        chance = torch.Generator().manual_seed(seed)

        def moved(node: Node, results: tuple[Any, ...], chance: torch.Generator = chance) -> tuple[Any, ...]:
            for i, value in enumerate(results):
                ref = Ref(node.name, i)
                if ref in plain:
                    off = (value - plain[ref]).abs()
                    off = off[torch.isfinite(off)]
                    worst = float(off.max()) / _share(value) if off.numel() else 0.0
                    out[ref] = min(max(out[ref], worst), largest)
            return results if node.op in VIEWS else tuple(_nudged(v, chance) for v in results)

        run_graph(graph, {k: _nudged(v, chance) for k, v in inputs.items()}, constants, change=moved)
    return out


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.numel() > 0


def _share(value: Tensor) -> float:
    return NUDGE.get(value.dtype, COARSE)


def _nudged(value: Any, chance: torch.Generator) -> Any:
    """Each number larger or smaller by up to a share of itself."""
    if not _real(value):
        return value
    by = torch.rand(value.shape, generator=chance, dtype=torch.float64) * 2 - 1
    return value * (1 + _share(value) * by).to(value.dtype)


class TermSizes:
    """Those of a graph's outputs, found when somebody first asks."""

    def __init__(self, graph: Graph, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> None:
        self.graph, self.inputs, self.constants = graph, inputs, constants
        self._refs = {f"{o.kind}:{o.name}": o.ref for o in graph.outputs}
        self._found: dict[Ref, float] = {}

    def __getitem__(self, key: str) -> float:
        """Of an output by `kind:name`."""
        if not self._found:
            self._found = sizes(self.graph, self.inputs, self.constants, {*self._refs.values()})
        return self._found[self._refs[key]]

"""Plans with a name that somebody could type for a machine: a search is never slower than any of them.

    data parallel, ZeRO 1 to 3, gathered once or twice
    tensor parallel inside a node, over some nodes and over all, with data parallel around it, with ZeRO, with the
    residual stream whole or in shards of the sequence
    pipelines of equal stages, with data and tensor parallel inside, of 1 to 8 micro-batches for each stage
    each with blocks recomputed where that is what it takes to fit

They come as the search would write them, whose small parameters stay whole and whose open tensors lie where the
machine's prices ask for it, and as `laminar.plans` writes them: neither is always faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.placement import presets
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request
from laminar.planner.space.styles import AxisStyle, Style
from laminar.staging.stage_plans import pipeline

NAMED_MICRO_BATCHES = (1, 2, 4, 8)
"""Micro-batches for each stage that people try."""


@dataclass(frozen=True)
class Named:
    """A plan with a name, before it is made."""

    cell: Cell
    style: Style
    zero: int
    typed: Callable[[], Plan] | None = None
    """What `laminar.plans` makes of the folded graph; without it, what the search does."""

    staged: Callable[[Graph], Staged] | None = None
    """What `laminar.plans` makes of the graph of a micro-batch, where there are stages."""

    @property
    def key(self) -> tuple[Cell, Style, int]:
        """What tells it from others."""
        return self.cell, self.style, self.zero


def named(request: Request, cells: Sequence[Cell], graph: Graph) -> Iterator[Named]:
    """All there are among these cells, those that most people would try first; `graph` is the folded one."""
    typed = (0, 1, 2, 3) if request.allows("zero") else (0,)
    typed = (request.pin["zero"],) if "zero" in request.pin else typed
    # As the search writes them 1 and 2 are one program: a gradient leaves it as the state takes it.
    zeros = tuple(z for z in typed if z != 2 or 1 not in typed)
    node = request.cluster.levels[0].size
    known = [c for c in cells if c.tp == 1 or request.allows("tensor")]
    for cell in sorted((c for c in known if c.plain), key=lambda c: (c.recompute, c.tp > 1, c.dp > 1)):
        inners: tuple[AxisStyle, ...] = ("tensor", "sequence") if cell.tp > 1 else ("data",)
        for style in (Style.of(cell.mesh, inner) for inner in inners):
            yield from (Named(cell, style, z) for z in zeros if not z or cell.ranks > 1)
            if 3 in zeros and cell.ranks > 1 and not cell.recompute:
                yield Named(cell, replace(style, gather_once=True), 3)
        if not cell.recompute and not request.place:
            yield from _typed(cell, typed, graph)
    for cell in (c for c in known if not c.plain and c.virtual == 1 and (c.tp in (1, node) or c.dp == 1)):
        if cell.micro_batches % cell.stages == 0 and cell.micro_batches // cell.stages in NAMED_MICRO_BATCHES:
            style = Style.of(cell.mesh, "tensor")
            for zero in (z for z in zeros if z < 3 and (not z or cell.ranks > 1)):
                yield Named(cell, style, zero, staged=None if zero or request.place or cell.recompute else _cut(cell))


def _cut(cell: Cell) -> Callable[[Graph], Staged]:
    return lambda graph: pipeline(graph, cell.stages, cell.micro_batches, inner=cell.mesh)


def _typed(cell: Cell, zeros: Sequence[int], graph: Graph) -> Iterator[Named]:
    """What `laminar.plans` has for a mesh; ZeRO on two axes cuts other pieces than on one."""
    mesh = cell.mesh
    data = replace(Style.of(mesh, "data"), as_preset=True)
    if cell.tp > 1 and 0 in zeros:
        tensor = replace(Style.of(mesh, "tensor"), as_preset=True)
        yield Named(cell, tensor, 0, cache(lambda: presets.tensor_parallel(graph, mesh)))
    if cell.tp > 1 and cell.dp == 1:
        return
    if 0 in zeros and cell.tp == 1:
        yield Named(cell, data, 0, cache(lambda: presets.data_parallel(graph, mesh)))
    stages = [s for s in zeros if s and mesh.ranks > 1]
    for stage in stages:
        yield Named(cell, data, stage, cache(partial(presets.zero, graph, mesh, stage)))
    if 3 in stages:
        once = replace(data, gather_once=True)
        yield Named(cell, once, 3, cache(lambda: presets.zero(graph, mesh, 3, gather_once=True)))

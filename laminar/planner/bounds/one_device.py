"""What one device alone would do: the kernels a compiler writes for it, what it keeps for backward.

Bounds rest on two things that hold for every plan that has been tried, and are taken for granted:

    An op on part of its work takes no less than its share of the whole, and a call costs something besides.
    A program with exchanges in it fuses no better than the same program on one device.

So whatever ranks do together, kernels take at least what they take on one device, each with its bytes divided by all
ranks; and of what one device keeps of forward for backward, the fullest rank keeps at least its share.
"""

from __future__ import annotations

from laminar.cost.machine import Machine, fused_work, kernel_kind
from laminar.cost.ops.interned import Forms
from laminar.ir.mesh import Mesh
from laminar.ir.plans.patterns import WITHOUT_PRODUCTS, pick
from laminar.ir.program import Program
from laminar.lower.kernels import kernels
from laminar.lower.memory.mincut_recompute import recompute, written_out
from laminar.lower.memory.planned_recompute import boundary_bytes
from laminar.lower.stages.stage_programs import KEPT, stages
from laminar.lower.step import step_programs
from laminar.placement import presets
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.score_placement import extrapolated
from laminar.planner.space.cell import Cell
from laminar.staging.stage_plans import pipeline

KernelShape = tuple[int, tuple[int, int, str] | None]
"""Bytes that it moves; rows, columns and kind of what it reduces."""
Again = tuple[str, ...]
"""Blocks that are recomputed, as patterns."""
ONE_DEVICE = Mesh({"dp": 1})


class Alone:
    """One model on one device, for micro-batches of all sizes."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._lowered: dict[tuple[int, int, bool, Again], tuple[list[Program], float]] = {}
        self._kernels: dict[tuple[int, int, bool, Again], list[KernelShape]] = {}
        self._kept: dict[tuple[int, bool, bool], float] = {}
        self._seconds: dict[tuple[int, bool, Mesh, bool], float] = {}

    def kernels_s(self, cell: Cell) -> float:
        """Seconds of a micro-batch's kernels at least, at full depth.

        What is recomputed need not be written and read, so there may be fewer of them: where blocks may be recomputed,
        whichever way of doing so takes least, of all blocks at once and, where they differ, of each by itself.
        """
        machine = self.model.machine(cell.mesh)
        if not machine.fused:
            return 0.0
        key = (cell.micro_batches, cell.plain, cell.mesh, cell.recompute)
        if key not in self._seconds:

            def taken(again: Again) -> float:
                found = {
                    keep: sum(kernel_s(machine, *one, cell.ranks) for one in self.kernels(cell, keep, again))
                    for keep in self.model.keeps
                }
                return extrapolated(found, self.model.layers)

            none_s = least_s = taken(())
            family = self.model.blocks if cell.recompute else None
            if family:
                least_s = min(none_s, *(taken((family + how,)) for how in ("", WITHOUT_PRODUCTS)))
                if len(self.model.keeps) == 1:
                    each = [[taken((block + how,)) for how in ("", WITHOUT_PRODUCTS)] for block in self._blocks(family)]
                    least_s = min(least_s, none_s - sum(max(0.0, none_s - min(ways)) for ways in each))
            self._seconds[key] = least_s
        return self._seconds[key]

    def _blocks(self, family: str) -> list[str]:
        """The blocks of a model whose layers are not folded."""
        inside = pick(self.model.graph, (family,))
        found = dict.fromkeys(inside.block_of(node.module) for node in self.model.graph.nodes)
        return [block for block in found if block is not None]

    def kernels(self, cell: Cell, keep: int, again: Again = ()) -> list[KernelShape]:
        """Every kernel that a compiler writes, at a depth, with some blocks recomputed."""
        key = (cell.micro_batches, keep, cell.plain, again)
        if key not in self._kernels:
            programs, _ = self._program(cell, keep, again)
            self._kernels[key] = [one for program in programs for one in kernels_of(program)]
        return self._kernels[key]

    def kept_bytes(self, cell: Cell) -> float:
        """Bytes of forward that are kept for backward, for one micro-batch, at full depth.

        Where blocks may wait in the host's memory, only what is made outside of them.
        """
        key = (cell.micro_batches, cell.plain, cell.recompute)
        if key not in self._kept:
            if cell.recompute and cell.plain and self.model.request.offloads:
                found = {keep: self._outside_bytes(cell, keep) for keep in self.model.keeps}
            else:
                found = {keep: self._program(cell, keep, self._every(cell.recompute))[1] for keep in self.model.keeps}
            self._kept[key] = extrapolated(found, self.model.layers)
        return self._kept[key]

    def _outside_bytes(self, cell: Cell, keep: int) -> float:
        """Of what is kept for backward, that which no block has made: with blocks recomputed, or with none."""
        every = self._every(True)
        programs = [self._program(cell, keep, again)[0][0] for again in ((), every)]
        inside = pick(self.model.small(cell.micro_batches, keep), every)
        return float(min(boundary_bytes(p, lambda line: inside.block_of(line.module) is None) for p in programs))

    def _every(self, recompute: bool) -> Again:
        """All blocks, if they may be recomputed and there are any."""
        return (self.model.blocks,) if recompute and self.model.blocks else ()

    def _program(self, cell: Cell, keep: int, again: Again) -> tuple[list[Program], float]:
        """What it runs for a micro-batch, as a compiler has it if there is one, and the bytes kept for backward."""
        key = (cell.micro_batches, keep, cell.plain, again)
        if key in self._lowered:
            return self._lowered[key]
        graph, fused = self.model.small(cell.micro_batches, keep), self.model.machine(ONE_DEVICE).fused
        plan = presets.data_parallel(graph, ONE_DEVICE, again)
        if cell.plain:
            program = step_programs(graph, plan)[0]
            program = recompute(written_out(program)) if fused else program
            found = [program], float(boundary_bytes(program))
        else:
            made = stages(graph, pipeline(graph, 1, cell.micro_batches, 1, plan, couple="microbatch"))
            first = made.parts[0][0].program
            kept = float(sum(o.placed.spec.nbytes for o in first.outputs if o.kind == KEPT))
            programs = [p.program for p in made.by_name.values()]
            found = [written_out(p) for p in programs] if fused else programs, kept
        self._lowered[key] = found
        return found


def kernel_s(machine: Machine, nbytes: int, shape: tuple[int, int, str] | None, ranks: int) -> float:
    """Seconds of a kernel, divided by so many ranks along whichever side is cheaper."""
    nbytes //= ranks
    if shape is None:
        return machine.kernel(nbytes, None).seconds
    rows, columns, kind = shape
    ways = [(max(1, rows // ranks), columns, kind), (rows, max(1, columns // ranks), kind)]
    return min(machine.kernel(nbytes, way).seconds for way in ways)


def kernels_of(program: Program) -> list[KernelShape]:
    """The kernels that a compiler writes for a program."""
    groups, forms = kernels(program), Forms(program)
    work = fused_work(forms, groups, 0)
    fused = [kernel_kind(forms.examples[forms.of[group[0]]]) == "fused" for group in groups]
    return [one for one, is_fused in zip(work, fused, strict=True) if is_fused]

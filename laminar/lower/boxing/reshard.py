"""Programs that compute nothing: tensors taken from one placement to another, all at once.

Around a step, state moves as a whole: gradients that were summed over micro-batches are reduced,
parameters whose pieces have been updated are gathered, weights are assembled for a checkpoint. Each
is boxing, with the same chains and the same merging as inside a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.ir.mesh import Mesh
from laminar.ir.program import Instr, MoveCause, Program, ProgramInput, ProgramOutput, placed
from laminar.ir.sbp import NdSbp
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.lower.boxing.boxing_lines import boxing_line
from laminar.lower.boxing.buckets import BUCKET_BYTES, merged
from laminar.rules.boxing.boxing import boxing

Move = tuple[str, TensorSpec, NdSbp, NdSbp]
"""A tensor's name and shape, how it lies, and how it is wanted."""


def moves(mesh: Mesh, items: Sequence[Move], what: str, bucket_bytes: int = BUCKET_BYTES) -> Program:
    """The program that moves these tensors, in their order; `what` they are is the cause of its lines."""
    instrs: list[Instr] = []
    outputs: list[ProgramOutput] = []
    for name, spec, src, dst in items:
        now = Ref(name)
        for step in boxing(spec, src, dst, mesh.sizes):
            instrs.append(boxing_line(f"move{len(instrs)}", now, spec, step, mesh.sizes, MoveCause(what)))
            now = Ref(instrs[-1].name)
        outputs.append(ProgramOutput(name, "moved", now, placed(spec, dst)))
    inputs = tuple(ProgramInput(name, "moved", placed(spec, src)) for name, spec, src, _ in items)
    return merged(Program(mesh, inputs, (), tuple(instrs), tuple(outputs), "", ""), bucket_bytes)

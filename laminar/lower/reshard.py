"""Programs that compute nothing: tensors taken from one placement to another, all at once.

Around a step, state moves as a whole: gradients that were summed over micro-batches are reduced,
parameters whose pieces have been updated are gathered, weights are assembled for a checkpoint. Each
is boxing, with the same chains and the same merging as inside a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.ir.codec import Ref
from laminar.ir.mesh import Mesh
from laminar.ir.program import Instr, Program, ProgramInput, ProgramOutput, placed
from laminar.ir.sbp import NdSbp, show
from laminar.ir.tensor import TensorSpec
from laminar.lower.buckets import BUCKET_BYTES, merged
from laminar.rules.boxing import boxing, step_bytes

Move = tuple[str, TensorSpec, NdSbp, NdSbp]
"""A tensor's name and shape, how it lies, and how it is wanted."""


def moves(mesh: Mesh, items: Sequence[Move], why: str, bucket_bytes: int = BUCKET_BYTES) -> Program:
    """The program that moves these tensors; its inputs and outputs are in their order."""
    instrs: list[Instr] = []
    outputs: list[ProgramOutput] = []
    for name, spec, src, dst in items:
        now = Ref(name)
        for step in boxing(spec, src, dst, mesh.sizes):
            instrs.append(
                Instr(
                    f"move{len(instrs)}",
                    f"box.{step.kind}",
                    ((now,), step.axes, (step.give,), (step.take,), step.op),
                    (now,),
                    (placed(spec, step.src),),
                    (placed(spec, step.dst),),
                    phase="move",
                    why=f"{show(step.src)} to {show(step.dst)} for {why}",
                    bytes=step_bytes(step, spec, mesh.sizes),
                )
            )
            now = Ref(instrs[-1].name)
        outputs.append(ProgramOutput(name, "moved", now, placed(spec, dst)))
    inputs = tuple(ProgramInput(name, "moved", placed(spec, src)) for name, spec, src, _ in items)
    return merged(Program(mesh, inputs, (), tuple(instrs), tuple(outputs), "", ""), bucket_bytes)

"""One step of boxing as a line of a program: what lowering, resharding and crossings between stages have in common."""

from __future__ import annotations

from laminar.ir.graph import Node
from laminar.ir.program import Boxing, Instr, MoveCause, placed
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.rules.boxing.boxing import Step, step_bytes

_MOVE = Node("move", "laminar.move", (), (), phase="move")


def boxing_line(
    name: str, ref: Ref, spec: TensorSpec, step: Step, sizes: tuple[int, ...], cause: MoveCause, node: Node = _MOVE
) -> Instr:
    """The line in which a step moves one tensor, on axes of these sizes; where and when are those of a node."""
    return Instr(
        name,
        f"box.{step.kind}",
        (ref,),
        (ref,),
        (placed(spec, step.src),),
        (placed(spec, step.dst),),
        node.where,
        node.module,
        node.phase,
        cause,
        step_bytes(step, spec, sizes),
        Boxing(step.axes, (step.give,), (step.take,), step.op),
    )

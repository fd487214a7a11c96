"""Which results lie in memory that somebody else holds: asked before that memory is written again, or reduced in place.

A wrong answer here is a wrong number there, in the generated code alone: the interpreter writes nothing in place. So
torch is asked, not a list of names: an op whose schema says that a result aliases an argument is a view; one that is
made of others (composite) may be anything. What is left are ops that share memory without saying so (`UNSAID`), and
our own kernels and copies that may turn out to be none.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from laminar.capture import torch_private
from laminar.capture.ops.torch_ops import find_op
from laminar.ir.ops import LOCAL_BOXING
from laminar.ir.ops import may_share_memory as by_name
from laminar.ir.program import Instr, Program

UNSAID = ("aten.unsafe_", "aten._unsafe_", "aten.reshape", "aten._reshape")
"""Ops that may give back memory of their input, whatever their schemas say."""


@cache
def shares(op: str) -> bool:
    """Whether an op's result may be memory of what the op reads."""
    if by_name(op) or op.startswith(UNSAID) or not op.startswith("aten."):
        return True
    found: Any = find_op(op)
    return any(r.alias_info is not None for r in torch_private.schema(found).returns) or torch_private.composite(found)


def result_may_alias(instr: Instr) -> bool:
    """Whether what a line makes may lie where what it reads lies. Of exchanges only local steps are asked."""
    return instr.kind in LOCAL_BOXING if instr.kind else instr.hosts or shares(instr.op)


def overwritten_outputs(program: Program, kinds: Collection[str]) -> set[int]:
    """Outputs of some kinds that lie where the program's next run writes: results of collectives, and views of them."""
    roots: set[str] = set()
    for instr in program.instrs:
        if instr.moves or (result_may_alias(instr) and any(r.name in roots for r in instr.refs)):
            roots.add(instr.name)
    return {i for i, o in enumerate(program.outputs) if o.kind in kinds and o.ref.name in roots}

"""How the lines of a program lie on a rank, for tests that look at single ones."""

from __future__ import annotations

from laminar.cost.ops.strides import Layouts, layouts
from laminar.cost.ops.table import local_call
from laminar.ir.mesh import Mesh
from laminar.ir.program import Program
from laminar.rules.notation import Call


def local_layouts(program: Program, mesh: Mesh | None = None, rank: int = 0) -> tuple[dict[str, Call], Layouts]:
    """The local call of every line that computes, and how everything lies."""
    calls = {i.name: local_call(i, mesh or program.mesh, rank) for i in program.instrs}
    return calls, layouts(program, calls)

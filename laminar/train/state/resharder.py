"""Tensors taken from one placement to another between steps: updated parameters gathered, sums reduced, copies made.

On one mesh that is a program which computes nothing; from one mesh to another, messages between pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from laminar.ir.mesh import Place
from laminar.ir.sbp import NdSbp
from laminar.ir.tensor import TensorSpec
from laminar.lower.boxing.reshard import Move, moves
from laminar.rules.boxing.crossing import crossing
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.cross_mesh import exchange
from laminar.runtime.comm.transport import Groups, Null
from laminar.train.world import World


class Resharder:
    """Programs that compute nothing, over the mesh of a transport; each is compiled once."""

    def __init__(self, transport: Groups | Null) -> None:
        self.transport = transport
        self._compiled: dict[Any, EagerStep] = {}

    def __call__(self, items: Sequence[Move], why: str, tensors: list[Tensor]) -> list[Tensor]:
        """Take tensors from one placement to another, all at once; every rank of the mesh must call this."""
        if all(src == dst for _, _, src, dst in items):
            return tensors
        key = (why, *items)
        if key not in self._compiled:
            self._compiled[key] = EagerStep(moves(self.transport.mesh, list(items), why), self.transport)
        return self._compiled[key](*tensors)

    def once(self, items: Sequence[Move], why: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same for what is moved a single time: tensors of their own, and nothing is kept for a next time."""
        apart = [i for i, (_, _, src, dst) in enumerate(items) if src != dst]
        out = [t.clone() for t in tensors]
        if apart:
            step = EagerStep(moves(self.transport.mesh, [items[i] for i in apart], why), self.transport)
            for i, whole in zip(apart, step(*[tensors[i] for i in apart]), strict=True):
                out[i] = whole.clone()
        return out


class CarryBetweenMeshes:
    """From one place of a world to another: what `change_layout` takes everything along with."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __call__(
        self, spec: TensorSpec, src: Place, src_nd: NdSbp, dst: Place, dst_nd: NdSbp, x: Tensor | None
    ) -> Tensor | None:
        """What this rank holds behind it; every rank of both places calls this, with what it held at the first."""
        if self.world.process_group is None:
            return x  # one rank has all of everything
        return exchange(crossing(spec, src, src_nd, dst, dst_nd), x, self.world.process_group, device=self.world.device)

    def notes(self, mine: Any) -> list[Any]:
        """What every rank says, by rank."""
        return self.world.gather_objects(mine)

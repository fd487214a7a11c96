"""Ops and boxing on all axes of a mesh at once: which ways there are, and their seconds.

Completion decides one axis after the other; a search that changes one op at a time needs whole placements and what they
cost. The prices are those of completion (`planner/space/axis_prices.py`), axis by axis: an op takes what its call
takes on one rank once all axes have had their share of it, boxing the sum of what it takes on each axis, on what
earlier axes leave of the tensor. Gradients and parameters travel in buckets with others of their kind, and pay their
share of a full one: paying latency for each would make small tensors dear that in a program cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from laminar.errors import PlacementError
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import NdSbp, Partial, Sbp, Split, check_placement, local_spec
from laminar.ir.tensor import TensorSpec
from laminar.lower.boxing.buckets import BUCKET_BYTES
from laminar.placement.complete import STEP_S
from laminar.planner.space.axis_prices import PricedAxis
from laminar.rules.boxing.boxing import boxing
from laminar.rules.notation import Call, Signature, localise
from laminar.rules.signing import Blocks, Probed, options


class Joint:
    """Ways and seconds on one mesh; answers about boxing are kept."""

    def __init__(self, costs: Sequence[PricedAxis], mesh: Mesh) -> None:
        """`costs` by axis."""
        self.costs, self.mesh = costs, mesh
        self.machine = costs[0].machine
        self._boxes: dict[Any, float] = {}

    def ways(self, call: Call, blocks: Blocks, probed: Probed) -> Iterable[tuple[Signature, ...]]:
        """Every combination of signatures, one for each axis; maxima and minima that are not yet taken are left out."""
        found: list[tuple[Call, tuple[Signature, ...]]] = [(call, ())]
        for parts in self.mesh.sizes:
            found = [
                (localise(local, s, parts), (*before, s))
                for local, before in found
                for s in options(local, parts, blocks, probed)
                if not any(isinstance(p, Partial) and p.op != "sum" for p in (*s.ins, *s.outs))
            ]
        return (signed for _, signed in found)

    def legal(self, spec: TensorSpec, nd: NdSbp) -> bool:
        """Whether a tensor can lie so."""
        try:
            check_placement(spec, nd, self.mesh.sizes, "")
        except PlacementError:
            return False
        return True

    def op_s(self, call: Call, signed: Sequence[Signature]) -> float:
        """An op on one rank, and what its expansion moves."""
        total = 0.0
        for axis, s in enumerate(signed):
            if s.how == "expand":
                here = self.costs[axis]
                total += here.signature_s(call, s) - here.op_s(localise(call, s, self.mesh.sizes[axis]))
            call = localise(call, s, self.mesh.sizes[axis])
        return total + self.costs[-1].op_s(call)

    def boxed_s(self, spec: TensorSpec, src: NdSbp, dst: NdSbp, packed: bool) -> float:
        """From one placement to another, by itself or in a bucket."""
        if src == dst:
            return 0.0
        key = (spec, src, dst, packed)
        total = self._boxes.get(key)
        if total is None:
            total = 0.0
            for axis, (a, b) in enumerate(zip(src, dst, strict=True)):
                if a != b and self.mesh.sizes[axis] > 1:
                    local = local_spec(spec, dst[:axis], self.mesh.sizes[:axis])
                    a, b = _unblocked(a, local), _unblocked(b, local)
                    total += self._packed_s(local, a, b, axis) if packed else self.costs[axis].boxed_s(local, a, b)
            self._boxes[key] = total
        return total

    def _packed_s(self, spec: TensorSpec, a: Sbp, b: Sbp, axis: int) -> float:
        """Its share of a full bucket: latency is paid once for all that is in there."""
        here = self.costs[axis]
        total = 0.0
        for step in boxing(spec, (a,), (b,), (here.parts,)):
            total += STEP_S
            if step.moves:
                held = max(1, spec.nbytes // here.rest // (here.parts if step.kind == "all_to_all" else 1))
                full = max(held, BUCKET_BYTES)
                price = here.machine.gloo if step.kind == "all_to_all" else here.machine.collectives
                total += price.on(step.kind, full, self.mesh, (axis,)).seconds * held / full
        return total


def _unblocked(p: Sbp, spec: TensorSpec) -> Sbp:
    """On what an earlier axis left, blocks may no longer divide: then they make no difference to the price."""
    if isinstance(p, Split) and p.blocks > 1 and spec.shape[p.dim] % p.blocks:
        return Split(p.dim)
    return p

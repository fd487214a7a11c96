"""Seconds of ops and boxing on one axis of a mesh, as the cluster's price list has them.

Completion decides axis by axis. What later axes will do is not known then; they are taken to divide everything evenly,
so that work and bytes count by their share. Where a compiler fuses, an elementwise op alone costs half of what it
moves: what it shares with its neighbours is read and written once.
"""

from __future__ import annotations

import math

import numpy as np

from laminar.cost.machine import ALONE, Machine
from laminar.cost.ops.families import COMPUTES, family_of
from laminar.ir.mesh import Mesh
from laminar.ir.ops import FREE
from laminar.ir.sbp import Sbp
from laminar.ir.tensor import TensorSpec
from laminar.placement.complete import AxisCosts
from laminar.planner.tuning import FUSED_SHARE
from laminar.rules.boxing.boxing import Step
from laminar.rules.notation import Call


class PricedAxis(AxisCosts):
    """The costs of one axis of a mesh on a cluster."""

    def __init__(
        self, machine: Machine, mesh: Mesh, axis: int, hidden: float = 0.0, like: PricedAxis | None = None
    ) -> None:
        """`hidden`: the share of the gradients' reduction that other work hides; the rest is as in `like`."""
        super().__init__(mesh.sizes[axis])
        if like is not None:
            own, self.signature_s = self.table, like.signature_s

            def table(
                spec: TensorSpec, rows: tuple[Sbp, ...], columns: tuple[Sbp, ...], bucketed: bool = False
            ) -> np.ndarray:
                return (own if bucketed else like.table)(spec, rows, columns, bucketed)

            self.table = table  # type: ignore[assignment]
        self.machine, self.mesh, self.axis, self.hidden = machine, mesh, axis, hidden
        self.rest = math.prod(mesh.sizes[axis + 1 :])

    def op_s(self, call: Call) -> float:
        if call.op in FREE:
            return 0.0
        if not self.machine.fused or family_of(call.op) in COMPUTES or call.op in ALONE:
            return self.machine.op(call).seconds / self.rest
        nbytes = sum(s.nbytes for s in call.ins) + sum(o.nbytes for o in call.outs if o)
        return FUSED_SHARE * nbytes / self.machine.ops.rates.bytes_per_s / self.rest

    def chain_s(self, chain: tuple[Step, ...], spec: TensorSpec, bucketed: bool) -> float:
        total = 0.0
        cost = self.machine.collectives
        for step in chain:
            if not step.moves:
                continue
            held = spec.nbytes if step.kind != "all_to_all" else spec.nbytes // self.parts
            kind = self.machine.gloo if step.kind == "all_to_all" else cost
            answer = kind.on(step.kind, max(1, held // self.rest), self.mesh, (self.axis,))
            reduces = bucketed and step.kind in ("all_reduce", "reduce_scatter")
            total += answer.seconds * (1 - self.hidden if reduces else 1.0)
        return total

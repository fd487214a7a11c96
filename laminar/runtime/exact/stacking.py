"""Whether a line gives the same bits for several units at once as for each by itself.

Kernels may add in another order when there are more rows, and treat the last few elements of a tensor in another way.
So a line runs stacked only if three things hold. Its shapes allow it: each unit's rows lie one behind the other in what
it reads and makes. No unit's part ends in the middle of a kernel's vector, unless the op rounds once per element
whatever way it is computed. And on real values, in the first run, it gave the bits that each unit gives by itself, in
memory laid out alike; where values are all alike (gradients that are still zero) random ones take their place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laminar.capture.tensor_bytes import as_bytes
from laminar.ir.mesh import Mesh
from laminar.ir.ops import FREE
from laminar.ir.program import Instr, Placed
from laminar.ir.sbp import B, Split
from laminar.ir.tensor import TensorSpec
from laminar.runtime.exact.values import UNIT

VECTOR = 64
"""Elements that kernels treat at once, at most."""
ROUNDS_ONCE = FREE | frozenset(
    f"aten.{name}"
    for name in """sub.Tensor mul.Tensor div.Tensor mul.Scalar div.Scalar neg abs relu threshold_backward where.self
    maximum minimum eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar gt.Tensor gt.Scalar le.Tensor le.Scalar
    ge.Tensor ge.Scalar logical_and logical_or logical_not bitwise_and.Tensor bitwise_or.Tensor bitwise_not clone
    _to_copy copy cat stack gather index_select embedding masked_fill.Scalar sqrt clamp clamp_min zeros_like ones_like
    full_like constant_pad_nd flip""".split()
)
"""Ops whose result for an element is one operation rounded once, or a copy."""
MOSTLY_ZERO = 0.5
"""A tensor of which so many elements are zero says little about how it was added up."""


def stacked_specs(placed: Sequence[Placed | None], mesh: Mesh, rank: int, units: int) -> list[TensorSpec | None] | None:
    """Shapes of the rows of so many units together; nothing if units don't lie one behind the other in one of them."""
    out: list[TensorSpec | None] = []
    for p in placed:
        if p is None:
            out.append(None)
            continue
        cut, local = p.nd[UNIT], p.local(mesh, rank)
        if isinstance(cut, Split):
            whole = p.spec.shape[cut.dim]
            if cut.blocks > 1 or whole % mesh.sizes[UNIT]:
                return None
            shape = list(local.shape)
            shape[cut.dim] *= units
            local = TensorSpec(tuple(shape), local.dtype)
        elif p.nd[UNIT] != B:
            return None
        out.append(local)
    return out


def ends_with_vectors(instr: Instr, mesh: Mesh, rank: int, threads: int) -> bool:
    """Whether no unit's part ends in the middle of a vector, or that does not matter."""
    if instr.op in ROUNDS_ONCE or (instr.op == "aten.add.Tensor" and len(instr.args) < 3):
        return True
    cut = [p for p in (*instr.ins, *instr.outs) if p is not None and isinstance(p.nd[UNIT], Split)]
    return all(math.prod(p.local(mesh, rank).shape) % (VECTOR * threads) == 0 for p in cut)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same bits."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(as_bytes(a), as_bytes(b)))


def says_little(x: Tensor) -> bool:
    """Whether too many elements of a tensor of floats are alike to tell orders of addition apart."""
    return x.is_floating_point() and x.numel() > 1 and float((x != 0).float().mean()) < MOSTLY_ZERO


def random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Positive numbers in a tensor laid out like another."""
    drawn = torch.rand(x.shape, generator=generator, dtype=torch.float32).add_(0.5)
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return out.copy_(drawn)


def as_results(out: Any) -> tuple[Any, ...]:
    """What a call has given, as a tuple."""
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)

"""Gradients between backward and the update: summed over micro-batches, measured, clipped.

A rank holds pieces of some gradients and copies of others. The norm of the whole gradient counts
each element once: squares of copies are divided by how many ranks have them, then summed over all.
If every rank holds everything, nobody needs to talk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laminar.capture.torch_private import foreach_clamp_max, foreach_clamp_min, foreach_mul, foreach_norm
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import NdSbp, Split
from laminar.train.world import World


class Norm:
    """The norm of a gradient whose parts lie in these placements, on the mesh of all ranks of a world."""

    def __init__(self, placements: Sequence[NdSbp], mesh: Mesh, world: World) -> None:
        self.world = world
        copies = [
            math.prod(n for p, n in zip(nd, mesh.sizes, strict=True) if not isinstance(p, Split)) for nd in placements
        ]
        self.shared = any(c != mesh.ranks for c in copies)
        self.share = (
            torch.tensor([1.0 / c for c in copies], dtype=torch.float64, device=world.device) if self.shared else None
        )

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        """A scalar on the device, the same on every rank."""
        if not grads:
            return torch.zeros(())
        each = foreach_norm(list(grads))
        if self.share is None:
            return total_norm(each)
        norms = torch.stack(each)
        squares = norms.double().square().mul_(self.share).sum()
        self.world.all_reduce(squares)
        return squares.sqrt_().to(norms.dtype)


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """That of several gradients together, from the norm of each."""
    return torch.stack(list(norms)).square().sum().sqrt() if norms else torch.zeros(())


def scale_and_clip(
    grads: list[Tensor], norm: Tensor, inverse: Tensor | float, clip_norm: float | None, clip_value: float | None
) -> Tensor:
    """Multiply gradients by `inverse` and clip them as torch's utilities do; the norm after `inverse`, before clipping.

    One pass over the gradients, or none.
    """
    plain = isinstance(inverse, float) and inverse == 1.0
    norm = norm if plain else norm * inverse
    factor = inverse
    if clip_norm is not None:
        factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0) * inverse
        plain = False
    if (not plain or clip_value is not None) and grads:
        _set_apart(grads)
    if not plain and grads:
        foreach_mul(grads, factor.to(grads[0].dtype) if isinstance(factor, Tensor) else factor)
    if clip_value is not None and grads:
        foreach_clamp_min(grads, -clip_value)
        foreach_clamp_max(grads, clip_value)
    return norm


def _set_apart(grads: list[Tensor]) -> None:
    """Give every gradient memory of its own: those of two biases that are added up may be one tensor."""
    seen: set[int] = set()
    for i, g in enumerate(grads):
        if g.numel() and g.data_ptr() in seen:
            grads[i] = g.clone()
        seen.add(g.data_ptr())

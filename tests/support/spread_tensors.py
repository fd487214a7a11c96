"""Tensors that lie on ranks in some placement, as those who share the writing of them see it."""

from __future__ import annotations

import math

from laminar.checkpoint import HeldBox, SpreadTensor
from laminar.checkpoint.format.block_grid import box_shape
from laminar.ir.mesh import Mesh, Place
from laminar.ir.sbp import NdSbp
from laminar.train.state.shards import boxes, owners_of


def spread(shape: tuple[int, ...], item: int, nd: NdSbp, mesh: Mesh) -> SpreadTensor:
    """Which rank holds what."""
    place = Place(tuple(range(mesh.ranks)), mesh)
    held = {}
    for rank in place.ranks:
        for box, _ in boxes(shape, nd, mesh.sizes, place.coords(rank)):
            if math.prod(box_shape(box)):
                held[str(box)] = HeldBox(box, owners_of(nd, place, rank))
    return SpreadTensor(shape, item, tuple(held.values()))

"""Whole tensors to what ranks hold of them, and back: for inputs, outputs and tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laminar.ir.mesh import Mesh
from laminar.ir.sbp import NdSbp, Partial, Split, chunk, local_indices


def cut_pieces(x: Tensor, dim: int, blocks: int, parts: int) -> list[Tensor]:
    """The pieces of every rank of an axis that splits dim `dim`, seen as (blocks, rest)."""
    n = x.shape[dim] // blocks
    if blocks == 1:
        return [x.narrow(dim, *chunk(n, parts, r)) for r in range(parts)]
    seen = x.unflatten(dim, (blocks, n))
    return [seen.narrow(dim + 1, *chunk(n, parts, r)).flatten(dim, dim + 1) for r in range(parts)]


def glue_pieces(pieces: Sequence[Tensor], dim: int, blocks: int) -> Tensor:
    """The inverse of `cut_pieces`."""
    if blocks == 1:
        return torch.cat(list(pieces), dim)
    seen = [p.unflatten(dim, (blocks, p.shape[dim] // blocks)) for p in pieces]
    return torch.cat(seen, dim + 1).flatten(dim, dim + 1)


def shard(whole: Tensor, nd: NdSbp, mesh: Mesh, rank: int) -> Tensor:
    """What a rank holds of a whole tensor that is split or broadcast."""
    out = whole
    for placement, parts, part in zip(nd, mesh.sizes, mesh.coords(rank), strict=True):
        if isinstance(placement, Split):
            out = cut_pieces(out, placement.dim, placement.blocks, parts)[part]
    return out.contiguous() if any(isinstance(p, Split) for p in nd) else out


def assemble(locals_: Sequence[Tensor], shape: Sequence[int], nd: NdSbp, mesh: Mesh) -> Tensor:
    """The whole tensor that ranks hold together, rank by rank: slow, obvious, and only for looking."""
    first = locals_[0]
    kinds = {p.op for p in nd if isinstance(p, Partial)}
    kind = kinds.pop() if kinds else None
    out: Tensor | None = None
    terms: dict[tuple[int, ...], Tensor] = {}
    for rank, piece in enumerate(locals_):
        coords = mesh.coords(rank)
        if any(c and not isinstance(p, (Split, Partial)) for p, c in zip(nd, coords, strict=True)):
            continue  # a broadcast axis: the first rank speaks for all
        key = tuple(c for p, c in zip(nd, coords, strict=True) if isinstance(p, Partial))
        target = terms.setdefault(key, torch.zeros(tuple(shape), dtype=first.dtype, device=first.device))
        index = [torch.from_numpy(i) for i in local_indices(tuple(shape), nd, mesh.sizes, coords)]
        if not shape:
            target.copy_(piece)
        elif piece.numel():
            target[tuple(np.ix_(*[i.numpy() for i in index]))] = piece.reshape([len(i) for i in index])
    for term in terms.values():
        if out is None:
            out = term
        elif kind == "max":
            out = torch.maximum(out, term)
        elif kind == "min":
            out = torch.minimum(out, term)
        else:
            out = out + term
    assert out is not None
    return out

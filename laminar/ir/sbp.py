"""Placements: how one logical tensor lies on the ranks of a mesh.

On one axis a tensor is split `S(d)`, broadcast `B`, or partial `P(op)` (the true value is the sum,
maximum or minimum over the axis). `S(d, blocks=k)` splits the inner part of a dim that is really
two: dim d is seen as (k, n/k) and the n/k is split, so that every rank holds a piece of each of
the k blocks. That is what packed q/k/v and merged batch-by-sequence dims need.

On several axes a placement is a tuple, one entry per axis, applied in mesh order: each entry acts
on the local tensor the earlier ones left. The order is therefore part of the meaning, and the
reverse order is written with blocks: splitting by `tp` first and `dp` second is
`(S(0, blocks=tp), S(0))`.

A dim that doesn't divide is cut like `torch.chunk`: pieces of ceil(n/p), the last ones shorter or
empty. So every shard is also a valid DTensor shard, and a padded all-gather is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np

from laminar.errors import PlacementError
from laminar.ir.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Split:
    """Each rank holds a piece of dim `dim`; with blocks, a piece of each block."""

    dim: int
    blocks: int = 1
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.dim, self.blocks)))

    def __hash__(self) -> int:
        return self._hash  # planning asks millions of times

    def __reduce__(self) -> tuple[Any, ...]:
        return Split, (self.dim, self.blocks)

    def __str__(self) -> str:
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim}, blocks={self.blocks})"


_WHOLE = hash(())


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Each rank holds the whole."""

    def __hash__(self) -> int:
        return _WHOLE

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank holds a term; `op` over the axis gives the value."""

    op: str = "sum"
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.op not in ("sum", "max", "min"):
            raise PlacementError(f"P({self.op}) is not a placement", allowed="P(sum)  P(max)  P(min)")
        object.__setattr__(self, "_hash", hash((self.op,)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Partial, (self.op,)  # hashes of text differ from process to process

    def __str__(self) -> str:
        return f"P({self.op})"


Sbp = Split | Broadcast | Partial
NdSbp = tuple[Sbp, ...]

S = Split
P = Partial
B = Broadcast()
PSUM = Partial("sum")


def show(nd: Sequence[Sbp]) -> str:
    """`S(0)` on one axis, `[S(0), B]` on several."""
    return str(nd[0]) if len(nd) == 1 else f"[{', '.join(map(str, nd))}]"


@cache
def parse(text: str) -> Sbp:
    """The inverse of `str` on one axis."""
    kind, _, rest = text.strip().partition("(")
    inner = rest.rstrip(")")
    if kind == "B" and not rest:
        return B
    try:
        if kind == "P":
            return Partial(inner or "sum")
        if kind == "S":
            dim, _, blocks = inner.partition(",")
            return Split(int(dim), int(blocks.split("=")[-1]) if blocks else 1)
    except ValueError:
        pass
    raise PlacementError(f"{text!r} is not a placement", allowed="S(d)  S(d, blocks=k)  B  P(sum|max|min)")


def parse_nd(texts: Sequence[str]) -> NdSbp:
    """One placement per axis, from text."""
    return tuple(parse(text) for text in texts)


@lru_cache(maxsize=1 << 16)
def chunk(size: int, parts: int, part: int) -> tuple[int, int]:
    """Start and length of piece `part` of `size` cut in `parts`, as `torch.chunk` cuts."""
    step = -(-size // parts)
    start = min(part * step, size)
    return start, min(step, size - start)


def split_size(size: int, placement: Split, parts: int, part: int) -> int:
    """Local size of a dim of `size` on one rank of an axis."""
    return placement.blocks * chunk(size // placement.blocks, parts, part)[1]


@lru_cache(maxsize=1 << 18)
def local_shape(shape: tuple[int, ...], nd: NdSbp, sizes: tuple[int, ...], coords: tuple[int, ...]) -> tuple[int, ...]:
    """The shape a rank at `coords` holds."""
    out = list(shape)
    for placement, parts, part in zip(nd, sizes, coords, strict=True):
        if isinstance(placement, Split):
            out[placement.dim] = split_size(out[placement.dim], placement, parts, part)
    return tuple(out)


def local_spec(
    spec: TensorSpec, nd: NdSbp, sizes: tuple[int, ...], coords: tuple[int, ...] | None = None
) -> TensorSpec:
    """The spec a rank holds; without coords, that of the first rank, which holds the most."""
    return TensorSpec(local_shape(spec.shape, nd, sizes, coords or (0,) * len(sizes)), spec.dtype)


def local_indices(
    shape: tuple[int, ...], nd: NdSbp, sizes: tuple[int, ...], coords: tuple[int, ...]
) -> list[np.ndarray]:
    """For each dim, which global indices a rank holds, in its local order."""
    index = [np.arange(n) for n in shape]
    for placement, parts, part in zip(nd, sizes, coords, strict=True):
        if isinstance(placement, Split):
            rows = index[placement.dim].reshape(placement.blocks, -1)
            start, length = chunk(rows.shape[1], parts, part)
            index[placement.dim] = rows[:, start : start + length].reshape(-1)
    return index


def check_placement(spec: TensorSpec, nd: NdSbp, sizes: tuple[int, ...], what: str) -> None:
    """Refuse a placement that can't hold for a tensor of this shape."""
    if len(nd) != len(sizes):
        raise PlacementError(f"{what}: {len(nd)} placements for a mesh of {len(sizes)} axes")
    shape = list(spec.shape)
    kinds = {p.op for p in nd if isinstance(p, Partial)}
    if len(kinds) > 1:
        raise PlacementError(
            f"{what}: {spec} {show(nd)} mixes kinds of partial, which do not commute",
            next="reduce one of them first",
        )
    if kinds and "sum" in kinds and spec.dtype == "bool":
        raise PlacementError(f"{what}: {spec} {show(nd)}: a bool has no sum")
    ragged: set[int] = set()
    for placement, parts in zip(nd, sizes, strict=True):
        if not isinstance(placement, Split):
            continue
        d, k = placement.dim, placement.blocks
        if not 0 <= d < len(shape):
            raise PlacementError(
                f"{what}: {spec} has no dim {d} for {placement}",
                allowed=f"dims 0 to {len(shape) - 1}" if shape else "B or P(op) on a scalar",
            )
        if k < 1 or (k > 1 and shape[d] % (k * parts)):
            raise PlacementError(
                f"{what}: {spec} {show(nd)}: a dim of {shape[d]} has no {k} blocks that divide by {parts}",
                next="choose blocks so that blocks x axis size divides the dim",
            )
        if k > 1 and d in ragged:
            raise PlacementError(
                f"{what}: {spec} {show(nd)}: dim {d} is already cut unevenly, so its pieces have no common blocks",
                next="split with blocks on an earlier axis, or choose sizes that divide",
            )
        if shape[d] % parts:
            ragged.add(d)
        shape[d] = split_size(shape[d], placement, parts, 0)


def no_rank_empty(size: int, parts: int) -> bool:
    """Whether every rank gets at least one element."""
    return chunk(size, parts, parts - 1)[1] > 0

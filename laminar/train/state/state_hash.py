"""A digest of a run's state that does not depend on how it lies, made without putting a tensor together.

Each element counts with its bits and its place in the whole tensor, mixed to 64 bits; a tensor's digest is the sum of
these, so every rank sums what it has and the sums are added up. Mixing is one to one for each place: a single other bit
anywhere gives another sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from laminar.train.state.shards import StateShard

CHUNK = 1 << 16
"""Elements mixed at a time, so that what lies between stays in a core's cache."""
BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Numbers by the bytes they take."""
LEFT_OUT = ("params", "fused", "foreach", "capturable", "differentiable")
"""Entries of an optimizer's groups that say how an update is computed, not which."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


PLACES, FIRST, SECOND = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Odd numbers of a well-known mixer of 64 bits (splitmix64)."""


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right of signed words."""
    return x.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mixed(words: Tensor, places: Tensor) -> Tensor:
    """The sum over elements of their bits and places, mixed."""
    x = words + (places + 1) * PLACES
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return (x ^ _shifted(x, 31)).sum()


def shard_sum(shard: StateShard) -> int:
    """What a shard adds to its tensor's digest."""
    x, whole, index = shard.tensor.detach(), shard.shape, shard.index
    if x.is_complex():
        x, whole, index = torch.view_as_real(x.resolve_conj()), (*whole, 2), (*index, slice(0, 2))
    bits = BITS_OF[x.element_size()]
    if not x.dim():
        return int(_mixed(x.reshape(1).view(bits).long(), torch.zeros(1, dtype=torch.int64, device=x.device)))
    inner, stride = torch.zeros(1, dtype=torch.int64, device=x.device), 1
    for n, part in zip(reversed(whole[1:]), reversed(index[1:]), strict=True):
        here = torch.arange(part.start or 0, n if part.stop is None else part.stop, device=x.device) * stride
        inner = (here[:, None] + inner[None, :]).reshape(-1)
        stride *= n
    total, first, rows = 0, index[0].start or 0, max(1, CHUNK // max(inner.numel(), 1))
    for begin in range(0, x.shape[0] if inner.numel() else 0, rows):
        some = x[begin : begin + rows]
        outer = torch.arange(first + begin, first + begin + some.shape[0], device=x.device) * stride
        places = (outer[:, None] + inner[None, :]).reshape(-1)
        total += int(_mixed(some.reshape(-1).view(bits).long(), places))
    return _signed(total % (1 << 64))


def state_sums(shards: Iterable[StateShard], rank: int) -> dict[str, int]:
    """What this rank adds to the digest of each tensor that it speaks for."""
    out: dict[str, int] = {}
    for shard in shards:
        if shard.owners[0] == rank:
            key = f"{shard.kind} {shard.name} {shard.entry} {shard.tensor.dtype} {list(shard.shape)}"
            out[key] = out.get(key, 0) + shard_sum(shard)
    return out


def plain_entries(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Hyper-parameters of an optimizer, as text that says their exact values."""
    return [
        f"group {i} {key} {_exactly(value)}"
        for i, group in enumerate(groups)
        for key, value in sorted(group.items())
        if key not in LEFT_OUT
    ]


def _exactly(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return "[" + " ".join(map(_exactly, value)) + "]"
    return value.hex() if isinstance(value, float) else repr(value)


def digest_of(sums: Iterable[Mapping[str, int]], besides: Iterable[str]) -> str:
    """One digest from what all ranks add, and lines that are the same on every rank."""
    whole: dict[str, int] = {}
    for each in sums:
        for key, value in each.items():
            whole[key] = (whole.get(key, 0) + value) % (1 << 64)
    lines = [f"{key} {value:016x}" for key, value in sorted(whole.items())]
    return hashlib.sha256("\n".join([*lines, *besides]).encode()).hexdigest()

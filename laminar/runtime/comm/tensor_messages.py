"""Tensors as bytes to be sent, in the order in which they lie in memory: their strides travel along.

Kernels give other bits for other strides, so who is sent a tensor must have it as who has made it. Only what fills a
stretch of memory is kept as it lies; a tensor that has gaps or repeats itself is made dense first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laminar.capture.tensor_bytes import as_bytes
from laminar.ir.clusters.limits import aligned_bytes

TensorKind = tuple[tuple[int, ...], torch.dtype]
"""A shape and a dtype: what is known of a tensor before it comes."""


def fills_memory(x: Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def without_gaps(x: Tensor) -> Tensor:
    """The tensor, or a copy that fills a stretch of memory."""
    return x if fills_memory(x) else x.contiguous() if not x.is_contiguous() else x.clone()


def tensor_message_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Of a tensor with its strides; each part begins with a cache line."""
    return aligned_bytes(8 * len(shape)) + aligned_bytes(math.prod(shape) * dtype.itemsize)


def to_message(x: Tensor) -> Tensor:
    """A dense tensor as bytes: its strides, then its elements as they lie in memory."""
    out = torch.zeros(tensor_message_bytes(x.shape, x.dtype), dtype=torch.uint8, device=x.device)
    strides = as_bytes(torch.tensor(x.stride(), dtype=torch.int64, device=x.device))
    out[: strides.numel()] = strides
    begin = aligned_bytes(8 * x.dim())
    out[begin : begin + x.numel() * x.dtype.itemsize] = as_bytes(x.as_strided((x.numel(),), (1,)))
    return out


def from_message(data: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The inverse of `to_message`."""
    begin, count = aligned_bytes(8 * len(shape)), math.prod(shape)
    strides = data[: 8 * len(shape)].view(torch.int64).tolist()
    flat = data[begin : begin + count * dtype.itemsize].view(dtype)
    return flat.as_strided(tuple(shape), strides, flat.storage_offset())


def bundle_bytes(kinds: Sequence[TensorKind]) -> int:
    """Of several tensors in one message."""
    return sum(tensor_message_bytes(*kind) for kind in kinds)


def bundled(tensors: Sequence[Tensor]) -> Tensor:
    """Several tensors in one message; of those that are not dense, copies that are."""
    return torch.cat([to_message(without_gaps(x)) for x in tensors])


def unbundled(data: Tensor, kinds: Sequence[TensorKind]) -> list[Tensor]:
    """The inverse of `bundled`: views of the message."""
    parts = data.split([tensor_message_bytes(*kind) for kind in kinds])
    return [from_message(part, *kind) for part, kind in zip(parts, kinds, strict=True)]

"""Attention over packed samples that stays inside each of them, on CPU and GPU.

Three ways to the same numbers. A block-diagonal mask is plain tensors, so captured graphs can hold it, but it
computes all pairs of the row, and a NaN or an infinity of one sample reaches others through a weight of zero times
it. Sample by sample nothing of another one is read at all. On a GPU, in bf16 and fp16, torch's varlen kernel does
that in one launch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laminar.data.packing.packed import Packed
from laminar.errors import DataError


def document_mask(documents: Tensor, causal: bool = True) -> Tensor:
    """Which pairs (query, key) belong to one sample, True where they do; with `causal` no key after its query.

    Padding attends to padding, so that no row is empty. For `F.scaled_dot_product_attention(..., attn_mask=mask)`;
    `documents` may have batch dims in front.
    """
    same = documents[..., :, None] == documents[..., None, :]
    if not causal:
        return same
    place = torch.arange(documents.shape[-1], device=documents.device)
    return same & (place[:, None] >= place[None, :])


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed | Sequence[int], causal: bool = True, scale: float | None = None
) -> Tensor:
    """Attention of [..., heads, tokens, width] inside of each sample of a unit (or between these bounds).

    Rows of padding come out as zeros. Keys and values may have fewer heads, which groups of query heads share.
    """
    bounds = packed.bounds if isinstance(packed, Packed) else tuple(packed)
    tokens = q.shape[-2]
    if not bounds or bounds[0] != 0 or list(bounds) != sorted(bounds) or bounds[-1] > tokens:
        raise DataError(
            f"samples between {bounds} in a row of {tokens} tokens", allowed="rising from 0, inside the row"
        )
    grouped = q.shape[-3] != k.shape[-3]
    if _varlen_fits(q):
        rows = _varlen(q, k, v, packed.offsets if isinstance(packed, Packed) else None, bounds, causal, scale, grouped)
    else:
        query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (q, k, v))  # fused kernels want four dims, no less
        pieces = [
            F.scaled_dot_product_attention(
                query[:, :, a:b],
                key[:, :, a:b],
                value[:, :, a:b],
                is_causal=causal,
                scale=scale,
                enable_gqa=grouped,
            ).reshape(*q.shape[:-2], b - a, v.shape[-1])
            for a, b in pairwise(bounds)
            if b > a
        ]
        rows = torch.cat(pieces, dim=-2) if pieces else q[..., :0, :]
    return F.pad(rows, (0, 0, 0, tokens - bounds[-1])) if bounds[-1] < tokens else rows


@cache
def _varlen_kernel() -> Any:
    """torch's kernel, where this torch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _varlen_fits(q: Tensor) -> bool:
    """Whether the varlen kernel takes such tensors: halves on a GPU, one row, widths it was built for."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[:-3].numel() == 1
        and q.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and _varlen_kernel() is not None
    )


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    bounds: tuple[int, ...],
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """The rows of all samples by the varlen kernel."""
    kernel, real = _varlen_kernel(), bounds[-1]
    if not real:
        return q[..., :0, :]
    ends = torch.tensor(bounds, dtype=torch.int32, device=q.device) if offsets is None else offsets.to(q.device)
    longest = max(b - a for a, b in pairwise(bounds))
    takes = inspect.signature(kernel).parameters
    how: dict[str, Any] = (
        {"window_size": (-1, 0 if causal else -1)} if "window_size" in takes else {"is_causal": causal}
    )
    if scale is not None:
        how["scale"] = scale
    if grouped and "enable_gqa" in takes:
        how["enable_gqa"] = True
    elif grouped:
        times = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(times, dim=-3), v.repeat_interleave(times, dim=-3)
    by_token = [t.reshape(t.shape[-3:])[:, :real].transpose(0, 1).contiguous() for t in (q, k, v)]
    out: Tensor = kernel(*by_token, ends, ends, longest, longest, **how)
    return out.transpose(0, 1).reshape(*q.shape[:-2], real, v.shape[-1])

"""Attention: of all queries, and of stretches of them.

A rank that holds the rows [offset, offset + n) of a causal attention's queries, and keys and values whole, attends to
what came before its stretch without a mask, and to the stretch itself with a causal one. Each is a call of the kernel
that whole attention uses, so the work that a mask would only throw away is never done. The two are merged by their
logsumexps; backward, which is given what forward merged, is a sum of the two. A rank may hold several stretches, some
early and some late, so that all ranks have about as much to do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laminar.capture import torch_private

_aten = torch.ops.aten


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    return k if q.shape[1] == k.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))


def _fused_on_cpu(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.numel() > 0 and v.numel() > 0


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    s = (q @ k.transpose(-1, -2)) * scale
    bias = _bias(mask, q)
    if bias is not None:
        s = s + bias
    if causal:
        keep = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril_()
        s = s.masked_fill(~keep, float("-inf"))
    return s


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale + mask) v and the logsumexp of each row, which backward needs."""
    k, v = _grouped(q, k), _grouped(q, v)
    if _fused_on_cpu(q, v):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_bias(mask, q), scale=scale
        )
        return out, lse
    if q.device.type == "cuda":
        fused = _fused_on_cuda(q, k, v, mask, causal, scale)
        if fused == torch_private.FLASH:
            out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
            return out, lse
        if fused == torch_private.CUDNN:
            out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
            return out, lse.reshape(q.shape[:3])
        if fused == torch_private.EFFICIENT:
            out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
                q, k, v, _cuda_bias(mask, q, k), True, 0.0, causal, scale=scale
            )
            return out, lse[..., : q.shape[2]]
    s = _scores(q, k, mask, causal, scale)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
    return p @ v, lse


def _fused_on_cuda(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> int:
    """Which fused kernel: what torch would take, if there is no mask; 0 for none. Backward asks the same question."""
    if q.shape[-1] != v.shape[-1] or q.dtype == torch.float64:
        return 0
    if mask is None and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0:
        choice = torch_private.sdp_choice(q, k, v, causal, scale)
        if choice in (torch_private.FLASH, torch_private.CUDNN):
            return choice
    return torch_private.EFFICIENT


def _cuda_bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The fused kernel wants a full bias whose rows start at multiples of 16 bytes."""
    bias = _bias(mask, q)
    if bias is None:
        return None
    rows = -(-k.shape[2] // 16) * 16
    room = q.new_zeros((*bias.shape[:-1], rows))
    room[..., : k.shape[2]] = bias
    return room[..., : k.shape[2]].expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    groups = k.shape[1]
    k2, v2 = _grouped(q, k), _grouped(q, v)
    if _fused_on_cpu(q, v):
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k2, v2, out, lse, 0.0, causal, attn_mask=_bias(mask, q), scale=scale
        )
    elif q.device.type == "cuda" and (fused := _fused_on_cuda(q, k2, v2, mask, causal, scale)):
        dq, dk, dv = _backward_on_cuda(fused, dout, q, k2, v2, mask, out, lse, causal, scale)
    else:
        s = _scores(q, k2, mask, causal, scale)
        p = (s - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
        dv = p.transpose(-1, -2) @ dout
        dp = dout @ v2.transpose(-1, -2)
        ds = p * (dp - (dout * out).sum(-1, keepdim=True)) * scale
        dq, dk = ds @ k2, ds.transpose(-1, -2) @ q
    if q.shape[1] != groups:
        dk = dk.unflatten(1, (groups, -1)).sum(2)
        dv = dv.unflatten(1, (groups, -1)).sum(2)
    return dq, dk, dv


def _backward_on_cuda(
    fused: int,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if fused == torch_private.EFFICIENT:
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        room = lse.new_zeros((*lse.shape[:-1], -(-lse.shape[-1] // 32) * 32))
        room[..., : lse.shape[-1]] = lse
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout,
            q,
            k,
            v,
            _cuda_bias(mask, q, k),
            out,
            room,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        return dq, dk, dv
    sizes = q.shape[2], k.shape[2]
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of a generator that nobody asks without dropout
    if fused == torch_private.FLASH:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, *sizes, 0.0, causal, seed, seed, scale=scale
        )
    else:
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, *sizes, 0.0, causal, scale=scale
        )
    return dq, dk, dv


# --- a stretch of causal attention -------------------------------------------------------------


Where = int | list[tuple[int, int]]
"""Which queries there are: from which row of all, or for several stretches from which row and how many."""


def attention_at(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, where: Where
) -> tuple[Tensor, Tensor]:
    """`attention` of a stretch of the queries, or of several, to all keys."""
    made = []
    for rows, offset in _stretches(q, where):
        x = q[:, :, rows]
        parts = [
            attention(x, k[:, :, a:b], v[:, :, a:b], bias, masked, scale)
            for a, b, bias, masked in _parts(x, k, _rows(mask, rows), causal, offset)
        ]
        made.append(parts[0] if len(parts) == 1 else _merged(*parts))
    return _joined([out for out, _ in made]), _joined([lse for _, lse in made])


def attention_backward_at(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    where: Where,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of these queries, and their terms of the gradients of all keys and values."""
    dqs: list[Tensor] = []
    dk = dv = None
    for rows, offset in _stretches(q, where):
        y, x, o, sums = dout[:, :, rows], q[:, :, rows], out[:, :, rows], lse[:, :, rows]
        parts = [
            (a, b, attention_backward(y, x, k[:, :, a:b], v[:, :, a:b], bias, o, sums, masked, scale))
            for a, b, bias, masked in _parts(x, k, _rows(mask, rows), causal, offset)
        ]
        dqs.append(parts[0][2][0] if len(parts) == 1 else parts[0][2][0] + parts[1][2][0])
        for a, b, (_, key, value) in parts:
            dk = _zeros_like(key, k.shape[2]) if dk is None else dk
            dv = _zeros_like(value, k.shape[2]) if dv is None else dv
            dk[:, :, a:b] += key
            dv[:, :, a:b] += value
    assert dk is not None and dv is not None
    return _joined(dqs), dk, dv


def _stretches(q: Tensor, where: Where) -> list[tuple[slice, int]]:
    """For each stretch its rows of `q`, and where it begins in the whole."""
    if isinstance(where, int):
        return [(slice(None), where)]
    found, first = [], 0
    for start, rows in where:
        found.append((slice(first, first + rows), start))
        first += rows
    return found


def _rows(mask: Tensor | None, rows: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]


def _parts(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, offset: int
) -> list[tuple[int, int, Tensor | None, bool]]:
    """Keys from where to where, with which mask, and whether a row sees those alone that are not behind it.

    With a mask it is one call: a row may see nothing before its stretch, and of such rows a kernel's logsumexp says
    nothing.
    """
    rows, keys = q.shape[2], k.shape[2]
    if not causal:
        return [(0, keys, mask, False)]
    last = min(offset + rows, keys)
    if mask is not None:
        keep = torch.ones(rows, last, dtype=torch.bool, device=q.device).tril_(offset)
        mask = mask.expand(*mask.shape[:-2], rows, keys)[..., :last]
        mask = mask & keep if mask.dtype == torch.bool else mask.masked_fill(~keep, float("-inf"))
        return [(0, last, mask, False)]
    first = min(offset, keys)
    return [part for part in ((0, first, None, False), (first, last, None, True)) if part[0] < part[1]]


def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys from attention to each."""
    lse = torch.logaddexp(a[1], b[1])
    out = (a[0] * (a[1] - lse).exp().unsqueeze(-1)).add_(b[0] * (b[1] - lse).exp().unsqueeze(-1))
    return out.to(a[0].dtype), lse


def _joined(pieces: list[Tensor]) -> Tensor:
    """Rows one behind the other, lying as those of each piece do."""
    if len(pieces) == 1:
        return pieces[0]
    if pieces[0].transpose(1, 2).is_contiguous():
        return torch.cat([x.transpose(1, 2) for x in pieces], 1).transpose(1, 2)
    return torch.cat(pieces, 2)


def _zeros_like(piece: Tensor, keys: int) -> Tensor:
    """Room for the gradients of all keys, lying as those of some do."""
    batch, heads, _, size = piece.shape
    if piece.transpose(1, 2).is_contiguous():
        return piece.new_zeros(batch, keys, heads, size).transpose(1, 2)
    return piece.new_zeros(batch, heads, keys, size)

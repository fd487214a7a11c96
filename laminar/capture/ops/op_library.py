"""Canonical ops as torch knows them: schemas, shapes on fake tensors, and derivatives.

Registered once, when the capture room is first used. The arithmetic is in `kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops import kernels

_LIB = torch.library.Library("laminar", "DEF")
_SCHEMAS = {
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> (Tensor, Tensor)",
    "attention_backward": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, "
    "bool causal, float scale) -> (Tensor, Tensor, Tensor)",
    "batch_norm": "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    "batch_norm_backward": "(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd) "
    "-> (Tensor, Tensor, Tensor)",
    "lstm": "(Tensor x, Tensor h0, Tensor c0, Tensor w_ih, Tensor w_hh, Tensor? bias, bool reverse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "lstm_backward": "(Tensor dy, Tensor dh, Tensor dc, Tensor x, Tensor h0, Tensor c0, Tensor w_ih, Tensor w_hh, "
    "Tensor y, Tensor gates, Tensor cells, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "ctc_loss": "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity) -> (Tensor, Tensor)",
    "ctc_loss_backward": "(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, "
    "Tensor target_lengths, Tensor nll, Tensor alpha, int blank, bool zero_infinity) -> Tensor",
    "grouped_mm": "(Tensor x, Tensor w, Tensor ends) -> Tensor",
    "grouped_outer": "(Tensor x, Tensor y, Tensor ends) -> Tensor",
    "uniform": "(SymInt[] shape, Tensor key, int site, ScalarType dtype) -> Tensor",
    "normal": "(SymInt[] shape, Tensor key, int site, ScalarType dtype) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    _LIB.define(_name + _schema)
    _LIB.impl(_name, getattr(kernels, _name), "CompositeExplicitAutograd")


def _fake(name: str) -> Any:
    return torch.library.register_fake(f"laminar::{name}", lib=_LIB)


@_fake("attention")  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    stats = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=stats)


@_fake("attention_backward")  # type: ignore[untyped-decorator]
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@_fake("batch_norm")  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    stats = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=stats), x.new_empty(x.shape[1], dtype=stats)


@_fake("batch_norm_backward")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    like = mean if weight is None else weight
    return x.new_empty(x.shape), torch.empty_like(like), torch.empty_like(like)


@_fake("lstm")  # type: ignore[untyped-decorator]
def _(x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    steps, batch, hidden = x.shape[0], x.shape[1], h0.shape[-1]
    seq = x.new_empty(steps, batch, hidden)
    return (
        seq,
        h0.new_empty(h0.shape),
        c0.new_empty(c0.shape),
        x.new_empty(steps, batch, 4 * hidden),
        torch.empty_like(seq),
    )


@_fake("lstm_backward")  # type: ignore[untyped-decorator]
def _(
    dy: Tensor, dh: Tensor, dc: Tensor, x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    shapes = [x, h0, c0, w_ih, w_hh]
    return (*[t.new_empty(t.shape) for t in shapes], w_ih.new_empty(w_ih.shape[0]))


@_fake("ctc_loss")  # type: ignore[untyped-decorator]
def _(log_probs: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    steps, samples, _ = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, 2 * targets.shape[1] + 1)


@_fake("ctc_loss_backward")  # type: ignore[untyped-decorator]
def _(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


@_fake("grouped_mm")  # type: ignore[untyped-decorator]
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@_fake("grouped_outer")  # type: ignore[untyped-decorator]
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


@_fake("uniform")  # type: ignore[untyped-decorator]
def _(shape: Any, key: Tensor, site: int, dtype: torch.dtype) -> Tensor:
    return key.new_empty(tuple(shape), dtype=dtype)


@_fake("normal")  # type: ignore[untyped-decorator]
def _(shape: Any, key: Tensor, site: int, dtype: torch.dtype) -> Tensor:
    return key.new_empty(tuple(shape), dtype=dtype)


def _attention_setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)


def _attention_grad(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, mask, out, lse = ctx.saved_tensors
    grads = torch.ops.laminar.attention_backward(dout, q, k, v, mask, out, lse, ctx.causal, ctx.scale)
    return (*grads, None, None, None)


def _batch_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _ = inputs
    ctx.affine = weight is not None, bias is not None
    ctx.save_for_backward(x, weight, *output[1:])


def _batch_norm_grad(ctx: Any, dy: Tensor, dmean: Tensor, drstd: Tensor) -> tuple[Any, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dw, db = torch.ops.laminar.batch_norm_backward(dy, x, weight, mean, rstd)
    return dx, dw if ctx.affine[0] else None, db if ctx.affine[1] else None, None


def _lstm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, h0, c0, w_ih, w_hh, bias, ctx.reverse = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, h0, c0, w_ih, w_hh, output[0], output[3], output[4])


def _lstm_grad(ctx: Any, dy: Tensor, dh: Tensor, dc: Tensor, dgates: Tensor, dcells: Tensor) -> tuple[Any, ...]:
    x, h0, c0, w_ih, w_hh, y, gates, cells = ctx.saved_tensors
    out = torch.ops.laminar.lstm_backward(dy, dh, dc, x, h0, c0, w_ih, w_hh, y, gates, cells, ctx.reverse)
    return (*out[:5], out[5] if ctx.biased else None, None)


def _ctc_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)


def _ctc_grad(ctx: Any, grad: Tensor, dalpha: Tensor) -> tuple[Any, ...]:
    out = torch.ops.laminar.ctc_loss_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return (out, None, None, None, None, None)


torch.library.register_autograd("laminar::ctc_loss", _ctc_grad, setup_context=_ctc_setup, lib=_LIB)


def _grouped_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_grad(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w, ends = ctx.saved_tensors
    dx = torch.ops.laminar.grouped_mm(dy, w.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    return dx, torch.ops.laminar.grouped_outer(x, dy, ends) if ctx.needs_input_grad[1] else None, None


def _grouped_outer_grad(ctx: Any, dw: Tensor) -> tuple[Any, ...]:
    x, y, ends = ctx.saved_tensors
    dx = torch.ops.laminar.grouped_mm(y, dw.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    return dx, torch.ops.laminar.grouped_mm(x, dw, ends) if ctx.needs_input_grad[1] else None, None


torch.library.register_autograd("laminar::grouped_mm", _grouped_mm_grad, setup_context=_grouped_setup, lib=_LIB)
torch.library.register_autograd("laminar::grouped_outer", _grouped_outer_grad, setup_context=_grouped_setup, lib=_LIB)
torch.library.register_autograd("laminar::attention", _attention_grad, setup_context=_attention_setup, lib=_LIB)
torch.library.register_autograd("laminar::batch_norm", _batch_norm_grad, setup_context=_batch_norm_setup, lib=_LIB)
torch.library.register_autograd("laminar::lstm", _lstm_grad, setup_context=_lstm_setup, lib=_LIB)

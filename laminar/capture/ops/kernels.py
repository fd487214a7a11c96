"""Canonical ops and local forms: what they compute, on whichever device the tensors are.

A canonical op exists where ATen would choose by device (attention, batch norm, LSTM) or where the
meaning must not depend on the layout (random draws). A local form is the same op on a rank that
holds one stretch of an indexed dim; its last argument is where that stretch begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laminar.capture import torch_private
from laminar.capture.ops.attention import attention as attention
from laminar.capture.ops.attention import attention_at as attention_at
from laminar.capture.ops.attention import attention_backward as attention_backward
from laminar.capture.ops.attention import attention_backward_at as attention_backward_at
from laminar.capture.ops.eager_parts import eager as eager
from laminar.capture.ops.eager_parts import eager_backward as eager_backward

aten = torch.ops.aten

# --- batch norm ------------------------------------------------------------------------------


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised by this batch: y, mean and 1/std per channel."""
    y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
    return y, mean, rstd


def batch_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    weight = torch.ones_like(mean) if weight is None else weight
    dx, dw, db = aten.native_batch_norm_backward(dy, x, weight, None, None, mean, rstd, True, 1e-5, [True, True, True])
    return dx, dw, db


def batch_norm_apply(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, per channel, with statistics given."""
    return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)


def batch_norm_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and sum of squares per channel, in float64, whose difference gives the variance without loss.

    They are made from mean and variance, each computed stably, so that subtracting the squared mean
    later cancels what was added here and not digits of the data.
    """
    n = x.numel() // max(x.shape[1], 1)
    mean, var = aten.batch_norm_update_stats(x, None, None, 0.0)
    mean, var = mean.double(), var.double()
    return mean * n, (var + mean * mean) * n


def batch_norm_sums(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias: sums over the samples given."""
    _, dw, db = aten.native_batch_norm_backward(
        dy, x, torch.ones_like(mean), None, None, mean, rstd, True, 1e-5, [False, True, True]
    )
    return dw, db


def batch_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, dw: Tensor, db: Tensor, n: int
) -> Tensor:
    """Gradient of x, from gradients of weight and bias over all n samples: a dy + b x + c per channel."""
    a = rstd if weight is None else rstd * weight
    b = -a * rstd * dw / n
    c = -a * db / n - b * mean
    shape = [1, -1] + [1] * (x.dim() - 2)
    return torch.addcmul(torch.addcmul(c.view(shape), x, b.view(shape)), dy, a.view(shape)).to(dy.dtype)


# --- LSTM ------------------------------------------------------------------------------------


def lstm(
    x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One layer, one direction, time first: y, last h, last c, and the gates and cells of every step.

    What does not wait for the step before is done for all steps at once; the rest is written where it stays.
    """
    steps, batch, hidden = x.shape[0], x.shape[1], h0.shape[-1]
    flat = x.flatten(0, 1)
    gates = (flat @ w_ih.t() if bias is None else torch.addmm(bias, flat, w_ih.t())).view(steps, batch, 4 * hidden)
    y, cells = x.new_empty(steps, batch, hidden), x.new_empty(steps, batch, hidden)
    squashed = x.new_empty(batch, hidden)
    h, c = h0, c0
    turned = w_hh.t()
    for t in reversed(range(steps)) if reverse else range(steps):
        z, before = gates[t].addmm_(h, turned), c
        both, i, f, g, o = z[:, : 2 * hidden], *z.chunk(4, 1)
        both.sigmoid_(), g.tanh_(), o.sigmoid_()
        h, c = y[t], cells[t]
        torch.mul(f, before, out=c).addcmul_(i, g)
        torch.mul(o, torch.tanh(c, out=squashed), out=h)
    return y, h.clone(), c.clone(), gates, cells


def lstm_backward(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    y: Tensor,
    gates: Tensor,
    cells: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, h0, c0, w_ih, w_hh and the bias.

    A gate's gradient is that of the cell, or of the output for the last gate, times what is known of all steps before
    the first one runs.
    """
    steps, _, hidden = cells.shape
    before_c, before_h = (
        torch.cat([of[1:], first.unsqueeze(0)]) if reverse else torch.cat([first.unsqueeze(0), of[:-1]])
        for of, first in ((cells, c0), (y, h0))
    )
    i, f, g, o = gates.unflatten(2, (4, hidden)).unbind(2)
    tanh_c = cells.tanh()
    into_c = o * (1 - tanh_c * tanh_c)
    dz = torch.empty_like(gates).unflatten(2, (4, hidden))
    torch.mul(g * i, 1 - i, out=dz[:, :, 0])
    torch.mul(before_c * f, 1 - f, out=dz[:, :, 1])
    torch.mul(i, 1 - g * g, out=dz[:, :, 2])
    torch.mul(tanh_c * o, 1 - o, out=dz[:, :, 3])
    for t in range(steps) if reverse else reversed(range(steps)):
        here = dz[t]
        dh = dh + dy[t]
        dc = torch.addcmul(dc, dh, into_c[t])
        here[:, :3].mul_(dc.unsqueeze(1))
        here[:, 3].mul_(dh)
        dc = dc * f[t]
        dh = here.flatten(1) @ w_hh
    flat = dz.flatten(2).flatten(0, 1)
    dx = (flat @ w_ih).view(x.shape)
    return dx, dh, dc, flat.t() @ x.flatten(0, 1), flat.t() @ before_h.flatten(0, 1), flat.sum(0)


# --- keyed draws -----------------------------------------------------------------------------

_C1, _C2 = -4658895280553007687, -7723592293110705685
"""Multipliers of the splitmix64 finaliser, as signed 64-bit numbers."""


def _mix(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)).mul_(_C1)
    z = z.bitwise_xor_((z >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(_C2)
    return z.bitwise_xor_((z >> 31).bitwise_and_(0x1FFFFFFFF))


def _bits(
    shape: Sequence[int],
    key: Tensor,
    site: int,
    part: Sequence[int] | None,
    index: Sequence[Tensor] | None,
    full: Sequence[int] | None,
) -> Tensor:
    """64 mixed bits for each element, a function of (seed, step, site, place in the whole tensor).

    `part` is given where the tensor's samples are some of a larger batch: how many they are, and how many elements lie
    between one and the next. The key then goes on: its third number is the first of these samples, its fourth how many
    the batch has. An element's place is that in the tensor of the whole batch. `shape` and `index` are one rank's,
    `full` is the shape of the tensor.
    """
    seed, step = key[0], key[1]
    base = _mix(_mix(seed * 0x9E3779B9 + site) + step * 0x632BE59B)
    if index is None:
        count = 1
        for n in shape:
            count *= n
        at = torch.arange(count, device=key.device).view(tuple(shape))
    else:
        at = torch.zeros((), dtype=torch.int64, device=key.device)
        stride = 1
        for d in reversed(range(len(shape))):
            at = at + (index[d].to(key.device) * stride).view(-1, *[1] * (len(shape) - 1 - d))
            stride *= full[d]  # type: ignore[index]
        at = at.expand(tuple(shape))
    if part is not None:
        at = _in_batch(at, key, part, math.prod(shape if index is None else full or shape))
    return _mix(at * 0x2545F491 + base)


def _in_batch(at: Tensor, key: Tensor, part: Sequence[int], count: int) -> Tensor:
    """Places in the tensor of some samples, of so many elements, as places in that of their batch."""
    samples, between = part
    if count > samples * between:  # dims before that of the samples are farther apart in the whole batch
        at = at + (at // (samples * between)) * ((key[3] - samples) * between)
    return at + key[2] * between


def uniform(
    shape: Sequence[int],
    key: Tensor,
    site: int,
    dtype: torch.dtype,
    part: Sequence[int] | None = None,
    index: Sequence[Tensor] | None = None,
    full: Sequence[int] | None = None,
) -> Tensor:
    """Numbers in [0, 1) with 24 bits, so that every floating dtype from float32 up holds them exactly."""
    return ((_bits(shape, key, site, part, index, full) >> 40) & 0xFFFFFF).to(dtype).mul_(2.0**-24)


def normal(
    shape: Sequence[int],
    key: Tensor,
    site: int,
    dtype: torch.dtype,
    part: Sequence[int] | None = None,
    index: Sequence[Tensor] | None = None,
    full: Sequence[int] | None = None,
) -> Tensor:
    """Standard normal numbers (Box-Muller on two keyed uniforms)."""
    bits = _bits(shape, key, site, part, index, full)
    u = ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    w = ((bits >> 16) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    return (torch.sqrt(-2.0 * torch.log1p(-u)) * torch.cos(w * 6.283185307179586)).to(dtype)


# --- products of groups of rows --------------------------------------------------------------


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows of `x` in groups that end at `ends`, each times the matrix of its group; rows behind the last give zero."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch_private.grouped_mm(x, w, offs=ends)
    out = x.new_zeros(x.shape[0], w.shape[2])
    for i, (start, end) in enumerate(_stretches(ends, x.shape[0])):
        if end > start:
            out[start:end] = x[start:end] @ w[i]
    return out


def grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """For each group of rows x^T y: the gradient of its matrix."""
    out = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1])
    for i, (start, end) in enumerate(_stretches(ends, x.shape[0])):
        if end > start:
            out[i] = x[start:end].t() @ y[start:end]
    return out


def _stretches(ends: Tensor, rows: int) -> list[tuple[int, int]]:
    stops = [min(max(int(e), 0), rows) for e in ends.tolist()]
    return list(zip([0, *stops], stops, strict=False))


# --- local forms -----------------------------------------------------------------------------


def grouped_mm_at(x: Tensor, w: Tensor, ends: Tensor, offset: int) -> Tensor:
    """This rank's stretch of the rows."""
    return grouped_mm(x, w, (ends - offset).clamp(0, x.shape[0]).to(ends.dtype))


def grouped_outer_at(x: Tensor, y: Tensor, ends: Tensor, offset: int) -> Tensor:
    """What this rank's stretch of the rows adds to each group's."""
    return grouped_outer(x, y, (ends - offset).clamp(0, x.shape[0]).to(ends.dtype))


def _mine(index: Tensor, rows: int, offset: int) -> tuple[Tensor, Tensor]:
    local = index - offset
    outside = (local < 0) | (local >= rows)
    return local.masked_fill(outside, 0), outside


def embedding_at(weight: Tensor, index: Tensor, padding: int, scale: bool, sparse: bool, offset: int) -> Tensor:
    """Rows of this rank's stretch of the table, zero for the others'."""
    local, outside = _mine(index, weight.shape[0], offset)
    return torch.embedding(weight, local).masked_fill(outside.unsqueeze(-1), 0)


def embedding_backward_at(grad: Tensor, index: Tensor, rows: int, padding: int, scale: bool, offset: int) -> Tensor:
    """Gradient of this rank's stretch of the table."""
    local, outside = _mine(index, rows, offset)
    if padding >= 0:
        outside = outside | (index == padding)
    out = grad.new_zeros(rows, grad.shape[-1])
    return out.index_add_(0, local.reshape(-1), grad.masked_fill(outside.unsqueeze(-1), 0).reshape(-1, grad.shape[-1]))


def gather_at(x: Tensor, dim: int, index: Tensor, sparse: bool, offset: int) -> Tensor:
    """What lies in this rank's stretch of the dim, zero elsewhere."""
    local, outside = _mine(index, x.shape[dim], offset)
    return x.gather(dim, local).masked_fill(outside, 0)


def _classes(
    target: Tensor, weight: Tensor | None, rows: int, ignore: int, offset: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    local, outside = _mine(target, rows, offset)
    w = torch.ones(target.shape, dtype=like.dtype, device=like.device) if weight is None else weight[local]
    return local, w.masked_fill(outside | (target == ignore), 0)


def nll_at(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int, offset: int
) -> tuple[Tensor, Tensor]:
    """Loss and weight of the targets among this rank's classes."""
    d = 0 if x.dim() == 1 else 1
    local, w = _classes(target, weight, x.shape[d], ignore, offset, x)
    loss = -(x.gather(d, local.unsqueeze(d)).squeeze(d) * w)
    return (loss, w.sum() * 0) if reduction == 0 else (loss.sum(), w.sum())


def nll_backward_at(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore: int,
    total: Tensor,
    offset: int,
) -> Tensor:
    """Gradient of this rank's classes."""
    d = 0 if x.dim() == 1 else 1
    local, w = _classes(target, weight, x.shape[d], ignore, offset, x)
    g = -grad * w
    if reduction == 1:
        g = g / total
    return torch.zeros_like(x).scatter_(d, local.unsqueeze(d), g.unsqueeze(d))


# --- the loss of sequences without alignment ---------------------------------------------------


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """The loss of each sample, and log-probabilities of prefixes for backward, at the size the labels' room allows."""
    nll, alpha = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    times, places = (torch.arange(n, device=alpha.device) for n in alpha.shape[1:])
    inside = (times[:, None] < input_lengths[:, None, None]) & (places < 2 * target_lengths[:, None, None] + 1)
    alpha = torch.where(inside, alpha, 0.0)  # torch leaves what it does not read as it found it in memory
    alpha = torch.nn.functional.pad(alpha, (0, 2 * targets.shape[1] + 1 - alpha.shape[2]))
    steps, places = (torch.arange(n, device=alpha.device) for n in alpha.shape[1:])
    filled = (steps < input_lengths[:, None])[:, :, None] & (places <= 2 * target_lengths[:, None])[:, None]
    return nll, torch.where(filled, alpha, 0.0)  # the rest is memory that nobody wrote to


def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    nll: Tensor,
    alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of `log_probs`."""
    longest = int(target_lengths.max()) if target_lengths.numel() else 0
    return aten._ctc_loss_backward.Tensor(  # type: ignore[no-any-return]
        grad,
        log_probs,
        targets,
        input_lengths,
        target_lengths,
        nll,
        alpha[:, :, : 2 * longest + 1].contiguous(),
        blank,
        zero_infinity,
    )

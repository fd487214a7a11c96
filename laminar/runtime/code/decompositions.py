"""Ops as plain arithmetic, for code that a compiler fuses.

In eager PyTorch a canonical op is the fastest kernel there is (`capture.kernels`). A compiler can't look
into such a kernel, so batch norm by kernel would be read and written once more on its own; as
arithmetic it joins its neighbours. Attention stays a kernel: nothing here would beat it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops import (
    kernels,  # registers the canonical ops
)
from laminar.capture.ops import op_library as op_library  # registers the canonical ops
from laminar.capture.ops.torch_ops import find_op


def _stats_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _per_channel(t: Tensor, x: Tensor) -> Tensor:
    return t.view(1, -1, *[1] * (x.dim() - 2))


def _others(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _batch_norm_apply(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, per channel, with statistics given."""
    y = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(torch.rsqrt(var + eps), x)
    y = y if weight is None else y * _per_channel(weight, x)
    y = y if bias is None else y + _per_channel(bias, x)
    return y.to(x.dtype)


def _batch_norm_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and sum of squares per channel, in float64, by way of mean and variance."""
    n = x.numel() // max(x.shape[1], 1)
    var, mean = torch.var_mean(x.to(_stats_dtype(x)), _others(x), correction=0)
    var, mean = var.double(), mean.double()
    return mean * n, (var + mean * mean) * n


def _batch_norm_sums(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias: sums over the samples given."""
    wide = dy.to(mean.dtype)
    unit = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(rstd, x)
    return (wide * unit).sum(_others(x)), wide.sum(_others(x))


def _batch_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, dw: Tensor, db: Tensor, n: int
) -> Tensor:
    """Gradient of x, from gradients of weight and bias over all n samples."""
    unit = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(rstd, x)
    inner = dy.to(mean.dtype) - (unit * _per_channel(dw, x) + _per_channel(db, x)) / n
    return (inner * _per_channel(rstd if weight is None else rstd * weight, x)).to(dy.dtype)


def _batch_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    dw, db = _batch_norm_sums(dy, x, mean, rstd)
    dx = _batch_norm_grad(dy, x, weight, mean, rstd, dw, db, x.numel() // max(x.shape[1], 1))
    like = mean.dtype if weight is None else weight.dtype
    return dx, dw.to(like), db.to(like)


BETA, KAPPA = 2 * math.sqrt(2 / math.pi), 0.044715


def _gate(x: Tensor) -> Tensor:
    """(1 + tanh(u)) / 2 for gelu's u, as the sigmoid of 2u: an exponential where a precise tanh costs several."""
    return torch.sigmoid(BETA * (x + KAPPA * x * x * x))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu; its tanh form so that forward and backward in one kernel share what they have in common."""
    if approximate != "tanh":
        return torch.nn.functional.gelu(x, approximate=approximate)
    wide = x.to(_stats_dtype(x))
    return (wide * _gate(wide)).to(x.dtype)


def gelu_backward(dy: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    """Gradient of gelu."""
    if approximate != "tanh":
        return torch.ops.aten.gelu_backward(dy, x, approximate=approximate)  # type: ignore[no-any-return]
    wide = x.to(_stats_dtype(x))
    gate = _gate(wide)
    slope = gate + wide * gate * (1 - gate) * (BETA * (1 + 3 * KAPPA * wide * wide))
    return (dy.to(wide.dtype) * slope).to(dy.dtype)


def _loaded(shape: Sequence[int], key: Tensor) -> list[Tensor]:
    """Indices along each dim as values the compiler must load.

    Left to itself it multiplies a counter into its own index arithmetic, which is 32 bits wide: draws need 64.
    """
    nothing = key[0] & 0
    return [torch.arange(n, device=key.device) + nothing for n in shape]


def _uniform(
    shape: Sequence[int],
    key: Tensor,
    site: int,
    dtype: torch.dtype,
    part: Sequence[int] | None = None,
    index: Sequence[Tensor] | None = None,
    full: Sequence[int] | None = None,
) -> Tensor:
    """The keyed draw of `kernels.uniform`, to the last bit."""
    index = _loaded(shape, key) if index is None else index
    return kernels.uniform(shape, key, site, dtype, part, index, full or shape)


def _normal(
    shape: Sequence[int],
    key: Tensor,
    site: int,
    dtype: torch.dtype,
    part: Sequence[int] | None = None,
    index: Sequence[Tensor] | None = None,
    full: Sequence[int] | None = None,
) -> Tensor:
    """The keyed draw of `kernels.normal`."""
    index = _loaded(shape, key) if index is None else index
    return kernels.normal(shape, key, site, dtype, part, index, full or shape)


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "laminar.batch_norm_apply": _batch_norm_apply,
    "laminar.batch_norm_moments": _batch_norm_moments,
    "laminar.batch_norm_sums": _batch_norm_sums,
    "laminar.batch_norm_grad": _batch_norm_grad,
    "laminar.batch_norm_backward": _batch_norm_backward,
    "laminar.uniform": _uniform,
    "laminar.normal": _normal,
    "aten.gelu": gelu,
    "aten.gelu_backward": gelu_backward,
}
"""By the op they stand for; ops not here are traced through their kernels."""
DECOMPOSED |= {name: find_op(name) for name in ("laminar.ctc_loss", "laminar.ctc_loss_backward")}
"""Kernels that can't be traced through, because what they make on the way has a size that depends on data."""

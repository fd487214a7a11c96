"""Times of kernels that a compiler writes: chains of elementwise ops, and reductions, through Inductor, on a GPU.

Inside a compiled step most ops that are not products have been merged into kernels that read their inputs once and
write their results once. What such a kernel takes depends on the bytes it moves, hardly on what it computes, so a few
shapes of each kind stand for all:

    fused.pointwise(inputs,bytes)            a chain over so many tensors; bytes read and written in all
    fused.reduction(rows,columns,bytes,$kind)  along rows (layer_norm, softmax, cross_entropy), the gradient of a norm
                                               (layer_norm_backward), across rows (columns)

Every shape is compiled for itself, as in a step, which takes about a second each: most needed first, until time is up.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laminar.cost.table import Entry
from laminar.runtime.measure import FOOTPRINT_BYTES, MOST_SETS, Timer

DTYPE = torch.bfloat16
POINTWISE_BYTES = (1 << 20, 1 << 24, 1 << 27, 1 << 17, 1 << 22, 1 << 26, 1 << 14, 1 << 28)
"""Of each tensor."""
SHAPES = ((4096, 1024), (16384, 768), (512, 1024), (8192, 4096), (1024, 32768), (128, 512))


def _chain(*x: Tensor) -> Tensor:
    out = x[0]
    for other in x[1:]:
        out = out * 0.5 + other
    return F.gelu(out, approximate="tanh")


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    centred = x.float() - x.float().mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    y, g = centred * rstd, dy.float() * weight
    dx = rstd * (g - g.mean(-1, keepdim=True) - y * (g * y).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * y).sum(0), dy.float().sum(0)


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target)


def _columns(x: Tensor) -> Tensor:
    return x.float().sum(0)


def cases(device: torch.device) -> Iterator[tuple[str, Callable[..., Any], Callable[[], tuple[Tensor, ...]], int]]:
    """(key, function, maker of its inputs, bytes of one set), most needed first."""

    def tensor(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, dtype=DTYPE)

    def pointwise() -> Iterator[Any]:
        for nbytes, inputs in itertools.product(POINTWISE_BYTES, (2, 1, 4)):
            n = nbytes // DTYPE.itemsize
            total = (inputs + 1) * nbytes
            make = lambda n=n, inputs=inputs: tuple(tensor(n) for _ in range(inputs))  # noqa: E731
            yield f"fused.pointwise({inputs},{total})", _chain, make, total

    def reductions() -> Iterator[Any]:
        for rows, columns in SHAPES:
            size = rows * columns * DTYPE.itemsize
            x = partial(tensor, rows, columns)
            w = partial(tensor, columns)
            ids = partial(torch.randint, columns, (rows,), device=device)
            for kind, function, make, passes in (
                ("layer_norm", _layer_norm, lambda x=x, w=w: (x(), w(), w()), 2),
                ("layer_norm_backward", _layer_norm_backward, lambda x=x, w=w: (x(), x(), w()), 3),
                ("softmax", _softmax, lambda x=x: (x(),), 2),
                ("columns", _columns, lambda x=x: (x(),), 1),
                ("cross_entropy", _cross_entropy, lambda x=x, ids=ids: (x(), ids()), 1),
            ):
                yield f"fused.reduction({rows},{columns},{passes * size},${kind})", function, make, passes * size

    both = itertools.zip_longest(pointwise(), reductions())
    yield from (case for pair in both for case in pair if case is not None)


def measure(device: torch.device, until: float) -> Iterator[tuple[str, Entry]]:
    """Keys and entries, as they are measured, until a time of `time.monotonic`."""
    timer = Timer(device, 0.05)
    for key, function, make, nbytes in cases(device):
        if time.monotonic() > until:
            return
        sets = max(1, min(MOST_SETS, FOOTPRINT_BYTES // nbytes))
        torch.compiler.reset()  # each shape is compiled for itself
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the compiler says about torch itself
            compiled = torch.compile(function, dynamic=False)
            try:
                yield key, timer([partial(compiled, *make()) for _ in range(sets)])
            except (RuntimeError, torch.OutOfMemoryError):
                continue  # no compiler for this device, or not enough memory

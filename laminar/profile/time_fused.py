"""Times of kernels that a compiler writes: chains of elementwise ops, and reductions, through Inductor, on a GPU.

Inside a compiled step most ops that are not products have been merged into kernels that read their inputs once and
write their results once. What such a kernel takes depends on the bytes it moves, hardly on what it computes, so a few
shapes of each kind stand for all:

    fused.pointwise(inputs,bytes)            a chain over so many tensors; bytes read and written in all
    fused.reduction(rows,columns,bytes,$kind)  along rows (layer_norm, softmax, cross_entropy), the gradient of a norm
                                               (layer_norm_backward), across rows (columns)
    aten.embedding_dense_backward, laminar.uniform   which a compiler writes otherwise than they run alone; under
                                               the keys that programs have for them

Every shape is compiled for itself, as in a step, which takes about a second each: most needed first, until time is up.
One that fails is noted and left out.
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

from laminar.cost.ops.table import Entry
from laminar.profile.time_op import FOOTPRINT_BYTES, MOST_SETS, Timer
from laminar.runtime.code.decompositions import DECOMPOSED

DTYPE = torch.bfloat16
TIMED_POINTWISE = (
    (2, 24),
    (2, 20),
    (1, 27),
    (2, 22),
    (4, 25),
    (2, 17),
    (1, 24),
    (2, 26),
    (4, 21),
    (1, 14),
    (2, 28),
    (1, 19),
)
"""Tensors read, and the bytes of each as a power of two; as many bytes are written."""
TIMED_SHAPES = (
    (4096, 1024),
    (16384, 768),
    (8192, 256),
    (512, 1024),
    (8192, 4096),
    (65536, 512),
    (2048, 2048),
    (128, 512),
)
LOSS_SHAPES = ((8192, 50304), (4096, 8192), (2048, 1000))
"""Rows and classes of a loss."""
TABLES = ((8192, 768, 50304), (1024, 1024, 1024), (8192, 256, 8192), (16384, 1024, 50304), (512, 128, 2048))
"""Rows that are looked up, their length, and how many the table has."""
DRAWN = (1 << 17, 1 << 13, 1 << 15)
"""Rows of 64 numbers."""
Case = tuple[str, Callable[..., Any], Callable[[], tuple[Tensor, ...]], int]


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


def cases(device: torch.device) -> Iterator[Case]:
    """(key, function, maker of its inputs, bytes of one set), most needed first."""
    kinds = (_pointwise(device), _reductions(device), _losses(device), _tables(device), _draws(device))
    for some in itertools.zip_longest(*kinds):
        yield from (case for case in some if case is not None)


def _tensor(*shape: int, device: torch.device, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def _made(*parts: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    return tuple(part() for part in parts)


def _pointwise(device: torch.device) -> Iterator[Case]:
    for inputs, power in TIMED_POINTWISE:
        n, total = (1 << power) // DTYPE.itemsize, (inputs + 1) << power

        def make(n: int = n, inputs: int = inputs) -> tuple[Tensor, ...]:
            return tuple(_tensor(n, device=device) for _ in range(inputs))

        yield f"fused.pointwise({inputs},{total})", _chain, make, total


def _reductions(device: torch.device) -> Iterator[Case]:
    for rows, columns in TIMED_SHAPES:
        size = rows * columns * DTYPE.itemsize
        x, w = partial(_tensor, rows, columns, device=device), partial(_tensor, columns, device=device)
        kinds: tuple[tuple[str, Callable[..., Any], tuple[Callable[[], Tensor], ...], int], ...] = (
            ("layer_norm_backward", _layer_norm_backward, (x, x, w), 3),
            ("layer_norm", _layer_norm, (x, w, w), 2),
            ("columns", _columns, (x,), 1),
            ("softmax", _softmax, (x,), 2),
        )
        for kind, function, parts, passes in kinds:
            key = f"fused.reduction({rows},{columns},{passes * size},${kind})"
            yield key, function, partial(_made, *parts), passes * size


def _losses(device: torch.device) -> Iterator[Case]:
    for rows, classes in LOSS_SHAPES:
        size = rows * classes * DTYPE.itemsize
        x = partial(_tensor, rows, classes, device=device)
        ids = partial(torch.randint, classes, (rows,), device=device)
        key = f"fused.reduction({rows},{classes},{size},$cross_entropy)"
        yield key, _cross_entropy, partial(_made, x, ids), size
        key = f"fused.reduction({rows},{classes},{2 * size},$softmax)"
        yield key, _softmax, partial(_made, x), 2 * size


def _tables(device: torch.device) -> Iterator[Case]:
    for n, length, rows in TABLES:

        def gradient(grad: Tensor, ids: Tensor, rows: int = rows) -> Tensor:
            return torch.ops.aten.embedding_dense_backward(grad, ids, rows, -1, False)  # type: ignore[no-any-return]

        def make(n: int = n, length: int = length, rows: int = rows) -> tuple[Tensor, ...]:
            return _tensor(n, length, device=device, dtype=torch.float32), torch.randint(rows, (n,), device=device)

        key = f"aten.embedding_dense_backward(f32[{n},{length}],i64[{n}],{rows},-1,F)->f32[{rows},{length}]"
        yield key, gradient, make, 4 * length * (n + rows)


def _draws(device: torch.device) -> Iterator[Case]:
    for rows in DRAWN:

        def draw(key: Tensor, rows: int = rows) -> Tensor:
            return DECOMPOSED["laminar.uniform"]((rows, 64), key, 0, torch.float32)  # type: ignore[no-any-return]

        def make() -> tuple[Tensor, ...]:
            return (torch.tensor([3, 5], device=device),)

        yield f"laminar.uniform([{rows},64],i64[2],0,:f32)->f32[{rows},64]", draw, make, 256 * rows


def measure(
    device: torch.device, until: float, skip: frozenset[str] = frozenset(), note: Callable[..., None] | None = None
) -> Iterator[tuple[str, Entry]]:
    """Keys and entries, as they are measured, until a time of `time.monotonic`.

    `note` hears what is tried (`trying=key`) and what fails (`failed={key: why}`).
    """
    timer = Timer(device, 0.05)
    tell = note or (lambda **_: None)
    for key, function, make, nbytes in cases(device):
        if time.monotonic() > until:
            return
        if key in skip:
            continue
        tell(trying=key)
        try:
            entry = _one(timer, function, make, nbytes)
        except Exception as error:  # no compiler for this device, not enough memory, ...
            tell(failed={key: f"{type(error).__name__}: {error}"[:300]})
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a device that does not answer any more ends this process
            continue
        yield key, entry


def _one(timer: Timer, function: Callable[..., Any], make: Callable[[], tuple[Tensor, ...]], nbytes: int) -> Entry:
    sets = max(1, min(MOST_SETS, FOOTPRINT_BYTES // nbytes))
    torch.compiler.reset()  # each shape is compiled for itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the compiler says about torch itself
        compiled = torch.compile(function, dynamic=False)
        return timer([partial(compiled, *make()) for _ in range(sets)])

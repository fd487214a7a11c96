"""Functions of torch whose own code looks at data, written so that it need not.

Some look only to check what they were given (`cov`, `istft`); others make shapes from data that they made themselves
(`combinations`), or have a gradient that does (`index_fill` by a tensor, a value put under a mask). They are written
out here with fixed shapes and without looking. Draws from named distributions are made by key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laminar.capture.canonical.canonical import HANDLERS, Canonical, catches
from laminar.capture.canonical.known_values import value_of

# --- functions that check what they are given -------------------------------------------------


@catches(torch.cov, Tensor.cov)
def _cov(
    mode: Canonical,
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    x = input.view(1, -1) if input.dim() < 2 else input
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    seen = x if weights is None else x * weights
    count: Any = x.shape[1] if weights is None else weights.sum()
    lost: Any = correction
    if aweights is not None and weights is not None and correction:
        lost = correction * (weights * aweights).sum() / count
    norm = torch.as_tensor(count - lost, dtype=x.dtype).real.clamp(min=0)
    centred = x - (seen.sum(1) / count).unsqueeze(1)
    other = centred if weights is None else centred * weights
    return (centred @ other.t().conj() / norm).squeeze()  # type: ignore[no-any-return]


@catches(torch.linalg.matrix_rank)
def _matrix_rank(mode: Canonical, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Where a mode listens, torch's own form with `out=` computes the rank and leaves `out` as it was."""
    rank: Tensor = torch.linalg.matrix_rank(*args, **kwargs)
    return rank if out is None else out.copy_(rank)


@catches(torch.corrcoef, Tensor.corrcoef)
def _corrcoef(mode: Canonical, input: Tensor) -> Tensor:
    c = _cov(mode, input)
    if c.dim() == 0:
        return c / c  # type: ignore[no-any-return]
    deviation = c.diag().real.sqrt()
    c = c / deviation.view(-1, 1) / deviation.view(1, -1)
    return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1)) if c.is_complex() else c.clamp(-1, 1)


@catches(torch.istft, Tensor.istft)
def _istft(
    mode: Canonical,
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """Inverse spectra of overlapping frames, weighed by the window, added up and divided by what the windows add to."""
    hop, size = hop_length or n_fft // 4, win_length or n_fft
    frames = input.shape[-1]
    real = torch.float64 if input.dtype == torch.complex128 else torch.float32
    window = torch.ones(size, dtype=real) if window is None else window
    before = (n_fft - size) // 2
    window = F.pad(window, (before, n_fft - size - before))
    spectra = (input.unsqueeze(0) if input.dim() == 2 else input).transpose(1, 2)
    norm = "ortho" if normalized else "backward"
    if return_complex:
        y = torch.fft.ifft(spectra, n_fft, norm=norm)
    else:
        y = torch.fft.irfft(spectra[..., : n_fft // 2 + 1], n_fft, norm=norm)
    whole = n_fft + hop * (frames - 1)
    y = _added_up(y * window, whole, hop)
    weight = _added_up(
        (window * window.conj() if window.is_complex() else window * window).expand(1, frames, n_fft), whole, hop
    )
    first = n_fft // 2 if center else 0
    last = first + length if length is not None else whole - (n_fft // 2 if center else 0)
    y = y[:, first:last] / weight[:, first:last]
    y = F.pad(y, (0, max(0, last - whole))) if last > whole else y
    return y.squeeze(0) if input.dim() == 2 else y


def _added_up(frames: Tensor, length: int, hop: int) -> Tensor:
    """Frames [batch, frame, time], each `hop` behind the one before, summed where they overlap."""
    places = torch.arange(frames.shape[1]).unsqueeze(1) * hop + torch.arange(frames.shape[2])
    room = frames.new_zeros(frames.shape[0], length)
    return room.index_add(1, places.reshape(-1), frames.reshape(frames.shape[0], -1))


def _quantile(function: Callable[..., Any], skips_nan: bool) -> None:
    @catches(function)
    def run(
        mode: Canonical,
        input: Tensor,
        q: Any,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        out: Tensor | None = None,
    ) -> Tensor:
        """Shares that are data are looked at, to see that they are shares; so ranks are worked out here."""
        named = {"dim": dim, "keepdim": keepdim, "interpolation": interpolation}
        if not isinstance(q, Tensor) or value_of(q) is not None or not input.numel():
            made = function(input, q, **named)
            return made if out is None else out.copy_(made)
        dim = None if dim is None or not input.dim() else dim % input.dim()
        x = (input.reshape(-1) if dim is None else input.movedim(dim, -1)).sort(-1).values
        last, nan = x.shape[-1] - 1, x.isnan()
        if skips_nan:
            at = (q.reshape(-1) * (last - nan.sum(-1, keepdim=True))).clamp(min=0)
        else:  # not-a-number comes last, and is then what is asked for
            at = torch.where(nan.any(-1, keepdim=True), last, q.reshape(-1) * last)
        rounded = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}.get(interpolation)
        at = at if rounded is None else rounded(at)
        made = x.gather(-1, at.long())
        if rounded is None:
            share = at - at.floor() if interpolation == "linear" else torch.full_like(at, 0.5)
            made = torch.lerp(made, x.gather(-1, at.ceil().long()), share)
        made = made.movedim(-1, 0)
        if keepdim:
            made = made.reshape(-1, *[1] * input.dim()) if dim is None else made.unsqueeze(dim + 1)
        made = made if q.dim() else made[0]
        return made if out is None else out.copy_(made)


_quantile(torch.quantile, False)
_quantile(Tensor.quantile, False)
_quantile(torch.nanquantile, True)
_quantile(Tensor.nanquantile, True)


@catches(torch.combinations)
def _combinations(mode: Canonical, input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    if r == 0:
        return input.new_empty(0)
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    rows = list(choose(range(input.shape[0]), r))
    return input[torch.tensor(rows, dtype=torch.int64).reshape(len(rows), r)]


@catches(torch.narrow, Tensor.narrow)
def _narrow(mode: Canonical, input: Tensor, dim: int, start: Any, length: int) -> Tensor:
    """Where a stretch begins may be data: then it is rows looked up, of which there are always as many."""
    if not isinstance(start, Tensor):
        return torch.narrow(input, dim, start, length)
    first = torch.where(start < 0, start + input.shape[dim], start)
    return input.index_select(dim, first.reshape(()) + torch.arange(length))


# --- writing by index ------------------------------------------------------------------------


def _index_fill(function: Callable[..., Any], in_place: bool) -> None:
    @catches(function)
    def fill(mode: Canonical, input: Tensor, dim: Any, index: Tensor, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return function(input, dim, index, value)  # type: ignore[no-any-return]
        rows = torch.zeros(input.shape[dim] if input.dim() else 1, dtype=torch.bool).index_fill(0, index, True)
        shape = [-1 if d == dim % input.dim() else 1 for d in range(input.dim())]
        out = torch.where(rows.view(shape), value.to(input.dtype), input)
        return input.copy_(out) if in_place else out


_index_fill(torch.index_fill, False)
_index_fill(Tensor.index_fill, False)
_index_fill(Tensor.index_fill_, True)


def _index_put(function: Callable[..., Any], in_place: bool) -> None:
    @catches(function)
    def put(mode: Canonical, input: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
        masks = [i for i in indices if i is not None]
        if len(masks) != 1 or masks[0].dtype not in (torch.bool, torch.uint8):
            return function(input, indices, values, accumulate)  # type: ignore[no-any-return]
        mask, before = masks[0].bool(), next(k for k, i in enumerate(indices) if i is not None)
        if values.dim() > (0 if before else input.dim() - mask.dim()):  # as many rows as the mask has true places
            return function(input, indices, values, accumulate)  # type: ignore[no-any-return]
        mask = mask.view([1] * before + list(mask.shape) + [1] * (input.dim() - before - mask.dim()))
        value = values.to(input.dtype)
        out = torch.where(mask, input + value if accumulate else value, input)
        return input.copy_(out) if in_place else out


_index_put(torch.index_put, False)
_index_put(Tensor.index_put, False)
_index_put(Tensor.index_put_, True)


@catches(Tensor.__setitem__)
def _set_item(mode: Canonical, input: Tensor, index: Any, value: Any) -> None:
    """`x[mask] = t` goes the way of `index_put_`; everything else is torch's own."""
    if isinstance(index, Tensor) and index.dtype == torch.bool and isinstance(value, Tensor):
        HANDLERS[Tensor.index_put_](mode, input, (index,), value)
    else:
        input[index] = value


WRITTEN_OUT = frozenset(f for f, handler in HANDLERS.items() if handler.__module__ == __name__)
"""Functions above, without a draw in them: plain PyTorch has its own form of each."""


# --- draws from named distributions -----------------------------------------------------------


@catches(Tensor.cauchy_)
def _cauchy_(mode: Canonical, input: Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any) -> Tensor:
    return input.copy_(median + sigma * torch.tan(torch.pi * (_open(mode, input) - 0.5)))


@catches(Tensor.geometric_)
def _geometric_(mode: Canonical, input: Tensor, p: float, **_: Any) -> Tensor:
    rate = torch.log1p(torch.tensor(-p, dtype=torch.float64))
    return input.copy_((torch.log1p(-_open(mode, input)) / rate).ceil().clamp(min=1))


@catches(Tensor.log_normal_)
def _log_normal_(mode: Canonical, input: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any) -> Tensor:
    return input.copy_(torch.exp(mode.normal(input.shape, torch.float64) * std + mean))


@catches(Tensor.random_)
def _random_(mode: Canonical, input: Tensor, *bounds: int, **named: Any) -> Tensor:
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds or (named.get("from", 0), named.get("to"))
    if high is None:
        high = 2 ** (24 if input.is_floating_point() else min(31, 8 * input.element_size() - 1))
    return input.copy_((mode.uniform(input.shape, torch.float64) * (high - low)).floor() + low)


def _open(mode: Canonical, like: Tensor) -> Tensor:
    """Numbers in (0, 1): neither end, where a logarithm or a tangent is infinite."""
    return mode.uniform(like.shape, torch.float64) + 2.0**-25

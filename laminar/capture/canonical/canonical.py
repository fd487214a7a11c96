"""The mode under which a model runs when its meaning must not depend on device or layout.

It catches functions before ATen chooses a kernel (attention, batch norm, LSTM, bags of embeddings)
and turns every random draw into one keyed by (seed, step, site, element), where the site counts the
draws of a step in order. Capture traces under it; plain eager PyTorch under it draws the same
numbers, which makes it the oracle for models with dropout.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from laminar.capture import torch_private
from laminar.capture.canonical.masked_select import MaskPicked
from laminar.capture.ops import op_library as op_library  # registers the canonical ops
from laminar.capture.torch_private import disable_current_modes
from laminar.errors import CaptureError

laminar_ops: Any = torch.ops.laminar


class Canonical(TorchFunctionMode):
    """Canonical ops and keyed draws for everything run inside."""

    def __init__(self, key: Tensor, neutral: bool = False, exchanged: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        self.key = key
        """Two int64 numbers: seed and step."""
        self.neutral = neutral
        """Whether devices named in the code are taken to be wherever the tensors are."""
        self.exchanged = exchanged or {}
        """Stand-ins for tensors of the model, by `id`: a step may reach them without asking the model."""
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.site = 0
        self.units: dict[int, Tensor] = {}
        """Draws of one number in [0, 1), by their ids (see `certain`)."""
        self.drew = False
        self.hooked = False
        """Whether somebody's function is to be called in backward."""
        self.failed: Any = None
        """The innermost function an exception passed through: what the user called, not what ATen calls it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.hooked = self.hooked or func is Tensor.register_hook
        if self.neutral:
            if func in _MOVES:
                return args[0]
            if getattr(func, "__name__", "") != "__get__":  # a shape may be asked for anywhere
                args, kwargs = self.here(args), {k: self.here(v) for k, v in kwargs.items()}
            elif id(args[0]) in self.exchanged:
                args = (self.exchanged[id(args[0])], *args[1:])
            args, kwargs = _anywhere(func, args, kwargs)
        handler = HANDLERS.get(func)
        try:
            if handler is not None:
                return handler(self, *args, **kwargs)
            if func in IN_FLOAT32 and gpu_autocast.active:
                return _widely(func, args, kwargs)
            body = body_of(func)
            if body is None:
                return func(*args, **kwargs)
            with self:  # what a function of torch written in Python calls must be caught as well
                return body(*args, **kwargs)
        except Exception:
            self.failed = self.failed or func
            raise

    def here(self, value: Any) -> Any:
        """A tensor as the step may use it: one of the model's is its stand-in, one from outside lies on the CPU."""
        if type(value) in (list, tuple):
            return type(value)(map(self.here, value)) if any(map(_holds_tensors, value)) else value
        if not isinstance(value, Tensor) or isinstance(value, (torch_private.FakeTensor, MaskPicked)):
            return value
        if id(value) in self.exchanged:
            return self.exchanged[id(value)]
        if self.exchanged and value.requires_grad and not torch_private.wrapped(value):
            raise CaptureError(
                "a trainable tensor from outside the model is read: it would get no gradient",
                next="make it a parameter of the model",
            )
        if value.device.type == "cpu":
            return value
        if value.is_meta:
            raise CaptureError(
                "a tensor from outside the model lives on meta, so it has no values to keep",
                next="register it as a buffer of the model",
            )
        if id(value) not in self.copies:
            with disable_current_modes():
                self.copies[id(value)] = (value, value.cpu())
        return self.copies[id(value)][1]

    def uniform(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """A keyed draw in [0, 1); 24 bits, so drawn in float32 and widened."""
        self.site += 1
        self.drew = True
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        return laminar_ops.uniform(tuple(shape), self.key, self.site, wide)  # type: ignore[no-any-return]

    def normal(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """A keyed standard normal draw."""
        self.site += 1
        self.drew = True
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        return laminar_ops.normal(tuple(shape), self.key, self.site, wide)  # type: ignore[no-any-return]


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (Tensor, list, tuple))


_COMPOSED = ("torch.nn.functional", "torch.functional", "torch.nn.init", torch_private.LOW_RANK)


@cache
def body_of(func: Any) -> Any:
    """A function of torch's Python code without its question whether a mode wants to run it instead.

    Asked under the mode, `multi_head_attention_forward` hands itself to the mode, and modes are off
    while they answer: dropout inside would escape. The same code with the question answered "no" can
    run with the mode on.
    """
    code = getattr(func, "__code__", None)
    asks = [name for name in code.co_names if name.startswith("has_torch_function")] if code else []
    if code is None or not asks or not isinstance(func, types.FunctionType) or func.__module__ not in _COMPOSED:
        return None  # methods of Tensor ask again on their way to C, and make no draws
    no = dict.fromkeys(asks, lambda *_: False)
    blind = {**func.__globals__, **no}
    if not any(name in func.__globals__ for name in asks):  # torch.overrides.has_torch_function(...)
        overrides = types.SimpleNamespace(**{**vars(torch.overrides), **no})
        blind["torch"] = types.SimpleNamespace(**{**vars(torch), "overrides": overrides})
    body = types.FunctionType(code, blind, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


# --- devices ---------------------------------------------------------------------------------

_MOVES = (Tensor.cuda, Tensor.cpu, Tensor.pin_memory)


def _anywhere(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A call without the devices it names: a graph is about values, and tracing happens on fake CPU tensors."""
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is Tensor.to:
        args = tuple(torch.device("cpu") if isinstance(a, (torch.device, str)) else a for a in args)
        if len(args) > 1 and type(args[1]) is int:  # .to(0) is the first GPU
            args = (args[0], torch.device("cpu"), *args[2:])
    return args, kwargs


# --- autocast --------------------------------------------------------------------------------


class _GpuAutocast:
    """Whether the innermost autocast region was written for a GPU, whose list of float32 ops is longer."""

    def __init__(self) -> None:
        self.regions: list[bool] = []

    @property
    def active(self) -> bool:
        return bool(self.regions) and self.regions[-1]


gpu_autocast = _GpuAutocast()

_WIDE_NAMES = """acos asin cosh erfinv exp expm1 log log10 log1p log2 logsumexp pow __pow__ __rpow__ __rdiv__
    __rtruediv__
    reciprocal rsqrt sinh tan softplus softmax softmin log_softmax cumprod cumsum prod sum norm dist cdist pdist renorm
    layer_norm group_norm rms_norm cosine_similarity interpolate upsample binary_cross_entropy_with_logits
    cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss""".split()
IN_FLOAT32: frozenset[Any] = frozenset(
    getattr(place, name) for name in _WIDE_NAMES for place in (torch, F, Tensor) if hasattr(place, name)
)
"""Functions that autocast on a GPU runs in float32, after AT_FORALL_FP32 in torch's autocast_mode.h."""


def _widely(func: Any, args: Any, kwargs: Any) -> Any:
    def wide(value: Any) -> Any:
        narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if narrow else value

    with torch.amp.autocast_mode.autocast("cpu", enabled=False):
        return func(*map(wide, args), **{key: wide(value) for key, value in kwargs.items()})


HANDLERS: dict[Any, Callable[..., Any]] = {}


def catches(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a handler for torch functions."""

    def put(handler: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update({f: handler for f in functions if f is not None})
        return handler

    return put


@catches(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(mode: Canonical, input: Tensor, value: Tensor) -> None:
    """`t.data = v` gives t other memory; the same values in its own are the same thing to a graph."""
    if input.shape != value.shape or input.dtype != value.dtype:
        raise CaptureError(
            f"a tensor of {tuple(input.shape)} is given data of {tuple(value.shape)}, {value.dtype}",
            next="keep shape and dtype",
        )
    input.detach().copy_(value)


@catches(Tensor.__deepcopy__)
def _deep_copy(mode: Canonical, input: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy is a leaf of its own, and a parameter if the old one was; torch's way looks at memory."""
    if not input.is_leaf:
        raise RuntimeError("only tensors that no operation has made can be copied by copy.deepcopy")
    if id(input) not in memo:
        memo[id(input)] = input.detach().clone().requires_grad_(input.requires_grad)
        memo[id(input)]._is_param = getattr(input, "_is_param", False)
    return memo[id(input)]  # type: ignore[no-any-return]


# --- attention -------------------------------------------------------------------------------


@catches(F.scaled_dot_product_attention)
def _attention(
    mode: Canonical,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    lead: tuple[int, ...] = (
        torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3]) if query.dim() > 3 else ()
    )
    plain = dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad) or query.dim() not in (3, 4)
    if plain:
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            rep = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(rep, -3), value.repeat_interleave(rep, -3)
        scores = query @ key.transpose(-1, -2) * scale
        if is_causal:
            keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~keep, float("-inf"))
        if attn_mask is not None:
            scores = (
                scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
            )
        p = torch.softmax(scores, -1)
        return _dropout(mode, p, dropout_p, True) @ value  # type: ignore[no-any-return]
    shape = (*query.shape[:-1], value.shape[-1])
    if query.dim() == 3:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
    else:
        query, key, value = (
            t if t.shape[0] == lead[0] else t.expand(lead[0], *t.shape[1:]) for t in (query, key, value)
        )
        if key.shape[1] == 1 and query.shape[1] != 1 and not enable_gqa:
            key, value = (t.expand(-1, query.shape[1], -1, -1) for t in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.detach()
        while attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
    return laminar_ops.attention(query, key, value, attn_mask, is_causal, scale)[0].reshape(shape)  # type: ignore[no-any-return]


# --- products of groups of rows --------------------------------------------------------------


@catches(F.grouped_mm, torch_private.grouped_mm)
def _grouped_mm(
    mode: Canonical,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows in groups times a matrix each (experts of a mixture), or the sums over groups that are their gradient."""
    dims = mat_a.dim(), mat_b.dim()
    if dims == (3, 3):
        out = torch.bmm(mat_a, mat_b)
    elif offs is not None and dims == (2, 3):
        out = laminar_ops.grouped_mm(mat_a, mat_b, offs)
    elif offs is not None and dims == (2, 2):
        out = laminar_ops.grouped_outer(mat_a.t(), mat_b, offs)
    else:
        raise CaptureError(
            f"grouped_mm of tensors with {dims[0]} and {dims[1]} dims has no form here",
            allowed="groups of rows times a matrix each, sums over groups, batches of products",
            next="transpose both and multiply the other way round",
        )
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.to(out_dtype)


# --- batch norm ------------------------------------------------------------------------------


@catches(F.batch_norm)
def _batch_norm(
    mode: Canonical,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    channels = [1, -1] + [1] * (input.dim() - 2)
    if training:
        y, mean, rstd = laminar_ops.batch_norm(input, weight, bias, eps)
        if running_mean is not None and running_var is not None:
            n = input.numel() // input.shape[1]
            with torch.no_grad():
                var = (1.0 / (rstd.detach() * rstd.detach()) - eps) * (n / max(n - 1, 1))
                running_mean.copy_(running_mean * (1 - momentum) + mean.detach() * momentum)
                running_var.copy_(running_var * (1 - momentum) + var * momentum)
        return y  # type: ignore[no-any-return]
    assert running_mean is not None and running_var is not None
    scale = torch.rsqrt(running_var + eps)
    shift = -running_mean * scale
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    return (input * scale.view(channels) + shift.view(channels)).to(input.dtype)


# --- recurrent and embedding layers ----------------------------------------------------------


@catches(torch_private.lstm)
def _lstm(
    mode: Canonical,
    x: Tensor,
    hx: Any,
    weights: Any,
    bias: Any,
    layers: Any,
    dropout: Any = 0.0,
    training: Any = False,
    both: Any = False,
    batch_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_packed(bias)
    h0, c0 = hx
    projected = h0.shape[-1] != c0.shape[-1]
    per = (4 if bias else 2) + projected
    y = x.transpose(0, 1) if batch_first else x
    directions = 2 if both else 1
    hs, cs = [], []
    for layer in range(layers):
        outs = []
        for d in range(directions):
            k = layer * directions + d
            w = weights[k * per : (k + 1) * per]
            joined = w[2] + w[3] if bias else None
            if projected:
                out, h, c = _projected_lstm(y, h0[k], c0[k], w[0], w[1], joined, w[-1], d == 1)
            else:
                out, h, c, _, _ = laminar_ops.lstm(y, h0[k], c0[k], w[0], w[1], joined, d == 1)
            outs.append(out)
            hs.append(h)
            cs.append(c)
        y = torch.cat(outs, -1) if directions == 2 else outs[0]
        if dropout and training and layer < layers - 1:
            y = _dropout(mode, y, dropout, True)
    return (y.transpose(0, 1) if batch_first else y), torch.stack(hs), torch.stack(cs)


def _refuse_packed(bias: Any) -> None:
    """The packed form takes batch sizes second and weights third, so that its fourth argument is no flag."""
    if not isinstance(bias, bool):
        raise CaptureError(
            "a packed sequence has a layout that depends on the lengths in the batch, which one graph can't hold",
            next="give the padded tensor to the layer instead, and mask the loss",
        )


def _projected_lstm(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor | None, w_hr: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer whose h is projected, step by step: rare enough to do without an op of its own."""
    outs: list[Tensor] = []
    ahead = F.linear(x, w_ih, bias)
    for t in reversed(range(x.shape[0])) if reverse else range(x.shape[0]):
        i, f, g, o = (ahead[t] + F.linear(h, w_hh)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = F.linear(o.sigmoid() * c.tanh(), w_hr)
        outs.append(h)
    return torch.stack(outs[::-1] if reverse else outs), h, c


def _recurrent(function: Any) -> None:
    """GRU and simple RNNs layer by layer, so that dropout between layers is drawn by key."""

    @catches(function)
    def run(
        mode: Canonical,
        x: Tensor,
        hx: Any,
        weights: Any,
        bias: Any,
        layers: Any,
        dropout: Any = 0.0,
        training: Any = False,
        both: Any = False,
        batch_first: bool = False,
    ) -> tuple[Tensor, Tensor]:
        _refuse_packed(bias)
        each = (4 if bias else 2) * (2 if both else 1)
        states = []
        for layer in range(layers):
            h = hx[layer * (2 if both else 1) : (layer + 1) * (2 if both else 1)]
            w = weights[layer * each : (layer + 1) * each]
            x, last = function(x, h, w, bias, 1, 0.0, training, both, batch_first)
            states.append(last)
            if dropout and training and layer < layers - 1:
                x = _dropout(mode, x, dropout, True)
        return x, torch.cat(states)


for _function in (torch_private.gru, torch_private.rnn_tanh, torch_private.rnn_relu):
    _recurrent(_function)


@catches(F.embedding)
def _embedding(
    mode: Canonical,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None:
        raise CaptureError(
            "embedding with max_norm rewrites its table in forward", next="clip the table after the step"
        )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return torch.embedding(weight, input, padding, scale_grad_by_freq, False)


@catches(F.embedding_bag)
def _embedding_bag(
    canonical: Canonical,
    /,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    rows = _embedding(canonical, input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if mode == "max":
        return _largest(
            rows, input, offsets, include_last_offset, None if padding_idx is None else padding_idx % weight.shape[0]
        )
    keep = torch.ones(input.shape, dtype=rows.dtype)
    if padding_idx is not None:
        keep = (input != padding_idx % weight.shape[0]).to(rows.dtype)
        rows = rows * keep.unsqueeze(-1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if input.dim() == 2:
        total, count = rows.sum(1), keep.sum(1)
    else:
        assert offsets is not None
        starts, bag = _bags(input, offsets, include_last_offset)
        total = rows.new_zeros(starts.shape[0], weight.shape[1]).index_add(0, bag, rows)
        count = rows.new_zeros(starts.shape[0]).index_add(0, bag, keep)
    return total if mode == "sum" else total / count.clamp(min=1).unsqueeze(-1)  # type: ignore[no-any-return]


def _bags(input: Tensor, offsets: Tensor, include_last: bool) -> tuple[Tensor, Tensor]:
    """Where bags start, and which bag each entry is in."""
    starts = offsets[:-1] if include_last else offsets
    return starts, torch.searchsorted(starts, torch.arange(input.shape[0]), right=True) - 1


def _largest(rows: Tensor, input: Tensor, offsets: Tensor | None, include_last: bool, padding: int | None) -> Tensor:
    """The maximum over each bag; an empty one gives zeros."""
    if padding is not None:
        rows = rows.masked_fill((input == padding).unsqueeze(-1), float("-inf"))
    if input.dim() == 2:
        out = rows.max(1).values
    else:
        assert offsets is not None
        starts, bag = _bags(input, offsets, include_last)
        room = rows.new_full((starts.shape[0], rows.shape[-1]), float("-inf"))
        out = room.scatter_reduce(0, bag.unsqueeze(-1).expand(rows.shape), rows, "amax")
    return out.masked_fill(out == float("-inf"), 0.0)


@catches(F.gaussian_nll_loss)
def _gaussian_nll(
    mode: Canonical,
    input: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Without torch's look at the data for a negative variance."""
    var = torch.full_like(input, var) if isinstance(var, float) else var
    var = var.unsqueeze(-1) if var.shape == input.shape[:-1] else var
    held = var + (var.clamp(min=eps) - var).detach()  # the gradient passes as if nothing had been clamped
    loss = 0.5 * (held.log() + (input - target) ** 2 / held)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss  # type: ignore[no-any-return]


# --- random draws ----------------------------------------------------------------------------


@catches(F.dropout, torch.dropout)
def _dropout(mode: Canonical, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    if p == 1:
        return input.mul_(0) if inplace else input * 0
    keep = mode.uniform(input.shape, torch.float32) >= p
    scale = keep.to(input.dtype) * (1.0 / (1.0 - p))
    return input.mul_(scale) if inplace else input * scale


@catches(torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_, torch.rrelu_)
def _in_place(mode: Canonical, *args: Any, **kwargs: Any) -> Tensor:
    raise CaptureError(
        "a dropout function whose name ends in _ is not captured", next="call F.dropout(..., inplace=True)"
    )


@catches(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
def _feature_dropout(
    mode: Canonical, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0:
        return input
    shape = (*input.shape[:2], *[1] * (input.dim() - 2))
    scale = (mode.uniform(shape, torch.float32) >= p).to(input.dtype) * (1.0 / (1.0 - p))
    return input.mul_(scale) if inplace else input * scale


@catches(F.alpha_dropout, torch.alpha_dropout, F.feature_alpha_dropout, torch.feature_alpha_dropout)
def _alpha_dropout(
    mode: Canonical, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    if not training or p == 0:
        return input
    low = -1.7580993408473766
    a = (1 / math.sqrt((1 - p) * (1 + p * low * low))) if p < 1 else 0.0
    keep = (mode.uniform(input.shape, torch.float32) >= p).to(input.dtype)
    out = (input * keep + low * (1 - keep)) * a + (-a * low * p)
    return input.copy_(out) if inplace else out


@catches(F.rrelu, torch.rrelu)
def _rrelu(
    mode: Canonical,
    input: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    slope: Any = (lower + upper) / 2
    if training:
        slope = mode.uniform(input.shape, torch.float32).to(input.dtype) * (upper - lower) + lower
    out = torch.where(input >= 0, input, input * slope)
    return input.copy_(out) if inplace else out


def _shape(size: Any) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


def _made(t: Tensor, dtype: torch.dtype | None, requires_grad: bool = False) -> Tensor:
    t = t.to(dtype or torch.get_default_dtype())
    return t.requires_grad_() if requires_grad else t


def _kind(dtype: torch.dtype | None, like: Tensor | None = None) -> torch.dtype:
    return dtype or (like.dtype if like is not None else torch.get_default_dtype())


@catches(torch.rand)
def _rand(mode: Canonical, *size: Any, dtype: Any = None, requires_grad: bool = False, **_: Any) -> Tensor:
    return _made(
        mode.uniform(_shape(_.get("size", size)) if size or "size" in _ else (), _kind(dtype)), dtype, requires_grad
    )


@catches(torch.randn)
def _randn(mode: Canonical, *size: Any, dtype: Any = None, requires_grad: bool = False, **_: Any) -> Tensor:
    return _made(
        mode.normal(_shape(_.get("size", size)) if size or "size" in _ else (), _kind(dtype)), dtype, requires_grad
    )


@catches(torch.rand_like)
def _rand_like(mode: Canonical, input: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
    return mode.uniform(input.shape, _kind(dtype, input)).to(_kind(dtype, input))


@catches(torch.randn_like)
def _randn_like(mode: Canonical, input: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
    return mode.normal(input.shape, _kind(dtype, input)).to(_kind(dtype, input))


@catches(torch.randint)
def _randint(mode: Canonical, low: int, high: Any = None, size: Any = None, *, dtype: Any = None, **_: Any) -> Tensor:
    if size is None:
        low, high, size = 0, low, high
    return (mode.uniform(tuple(size), torch.float64) * (high - low)).floor().to(dtype or torch.int64) + low  # type: ignore[no-any-return]


@catches(torch.randint_like)
def _randint_like(
    mode: Canonical, input: Tensor, low: int, high: int | None = None, *, dtype: Any = None, **_: Any
) -> Tensor:
    low, high = (0, low) if high is None else (low, high)
    return ((mode.uniform(input.shape, torch.float64) * (high - low)).floor() + low).to(dtype or input.dtype)


@catches(torch.randperm)
def _randperm(mode: Canonical, n: int, **_: Any) -> Tensor:
    return mode.uniform((n,), torch.float64).argsort()


@catches(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(mode: Canonical, input: Tensor, p: Any = None, *, generator: Any = None, out: Any = None) -> Tensor:
    chance = input if p is None else p
    return (mode.uniform(input.shape, torch.float32) < chance).to(input.dtype)


@catches(torch.normal)
def _normal(mode: Canonical, mean: Any, std: Any = 1.0, size: Any = None, **_: Any) -> Tensor:
    shape = size if size is not None else (mean.shape if isinstance(mean, Tensor) else std.shape)
    dtype = (
        mean.dtype if isinstance(mean, Tensor) else std.dtype if isinstance(std, Tensor) else torch.get_default_dtype()
    )
    return mode.normal(shape, dtype).to(dtype) * std + mean  # type: ignore[no-any-return]


@catches(Tensor.bernoulli_)
def _bernoulli_(mode: Canonical, input: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    return input.copy_((mode.uniform(input.shape, torch.float32) < p).to(input.dtype))


@catches(Tensor.uniform_)
def _uniform_(
    mode: Canonical, input: Tensor, a: float = 0.0, b: float = 1.0, *, generator: Any = None, **kw: Any
) -> Tensor:
    a, b = kw.get("from", a), kw.get("to", b)
    return input.copy_(mode.uniform(input.shape, input.dtype) * (b - a) + a)


@catches(Tensor.normal_)
def _normal_(mode: Canonical, input: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    return input.copy_(mode.normal(input.shape, input.dtype) * std + mean)


@catches(Tensor.exponential_)
def _exponential_(mode: Canonical, input: Tensor, lambd: float = 1.0, *, generator: Any = None) -> Tensor:
    return input.copy_(-torch.log1p(-mode.uniform(input.shape, input.dtype)) / lambd)


@catches(torch.multinomial, Tensor.multinomial)
def _multinomial(mode: Canonical, input: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> Tensor:
    if replacement and num_samples > 1:
        raise CaptureError(
            "multinomial with replacement has no keyed form", next="draw one sample, or without replacement"
        )
    noise = -torch.log(-torch.log1p(-mode.uniform(input.shape, torch.float32)).clamp(min=1e-30)).clamp(min=-1e30)
    return (torch.log(input) + noise).topk(num_samples, -1).indices

"""Expansions: fused ops written out in primitives, for the case that a placement splits a reduced dim.

A softmax over a split dim is a maximum, an exponential, a sum and a division; once written so, the
ordinary rules place each piece, the partial maximum and sum are reduced, and nothing else needs to
know. Half-precision inputs are widened first and narrowed last, as the fused kernels do inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from laminar.ir.graph import Node
from laminar.ir.serial.codec import Dtype, Ref
from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import Call
from laminar.rules.ops.families import normal_dims


@dataclass
class Sheet:
    """Where an expansion is written down: nodes on whole tensors."""

    prefix: str
    nodes: list[Node] = field(default_factory=list)
    specs: dict[Ref, TensorSpec] = field(default_factory=dict)

    def emit(self, op: str, args: tuple[Any, ...], *outs: TensorSpec) -> Ref:
        """One more node; its first output."""
        name = f"{self.prefix}.{len(self.nodes)}"
        self.nodes.append(Node(name, op, args, outs))
        for i, spec in enumerate(outs):
            self.specs[Ref(name, i)] = spec
        return Ref(name)

    def point(self, op: str, *args: Any, dtype: str | None = None) -> Ref:
        """A pointwise op, with broadcasting."""
        specs = [self.specs[a] for a in args if isinstance(a, Ref)]
        rank = max(len(s.shape) for s in specs)
        shape = tuple(
            max(s.shape[len(s.shape) - rank + d] for s in specs if len(s.shape) - rank + d >= 0) for d in range(rank)
        )
        return self.emit(f"aten.{op}", args, TensorSpec(shape, dtype or specs[0].dtype))

    def add(self, a: Ref, b: Any) -> Ref:
        """a + b."""
        return self.point("add.Tensor", a, b, 1) if isinstance(b, Ref) else self.point("add.Scalar", a, b, 1)

    def sub(self, a: Ref, b: Ref) -> Ref:
        """a - b."""
        return self.point("sub.Tensor", a, b, 1)

    def mul(self, a: Ref, b: Any) -> Ref:
        """a * b."""
        return self.point("mul.Tensor" if isinstance(b, Ref) else "mul.Scalar", a, b)

    def over(self, a: Ref, b: Any) -> Ref:
        """a / b."""
        return self.point("div.Tensor" if isinstance(b, Ref) else "div.Scalar", a, b)

    def reduce(self, op: str, x: Ref, dims: Sequence[int], keep: bool = True) -> Ref:
        """A reduction over dims."""
        spec = self.specs[x]
        shape = tuple(1 if d in dims else n for d, n in enumerate(spec.shape) if keep or d not in dims)
        tail = (None,) if op == "sum.dim_IntList" else ()
        return self.emit(f"aten.{op}", (x, tuple(dims), keep, *tail), TensorSpec(shape, spec.dtype))

    def sum(self, x: Ref, dims: Sequence[int], keep: bool = True) -> Ref:
        """A sum over dims."""
        return self.reduce("sum.dim_IntList", x, dims, keep)

    def shaped(self, x: Ref, shape: tuple[int, ...]) -> Ref:
        """The same elements in another shape."""
        spec = self.specs[x]
        return x if spec.shape == shape else self.emit("aten.view", (x, shape), TensorSpec(shape, spec.dtype))

    def cast(self, x: Ref, dtype: str) -> Ref:
        """The same values in another dtype."""
        spec = self.specs[x]
        if spec.dtype == dtype:
            return x
        args = (x, Dtype(dtype), None, None, None, False, None)
        return self.emit("aten._to_copy", args, TensorSpec(spec.shape, dtype))

    def wide(self, x: Ref) -> Ref:
        """At least float32."""
        return self.cast(x, "f32") if self.specs[x].dtype in ("f16", "bf16") else x


Expansion = Callable[[Sheet, Call, tuple[Any, ...]], tuple[Ref, ...]]


def _softmax(log: bool) -> Expansion:
    def write(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
        x, d = s.wide(args[0]), args[1] % len(call.out.shape)
        shifted = s.sub(x, s.reduce("amax", x, (d,)))
        e = s.point("exp", shifted)
        total = s.sum(e, (d,))
        out = s.sub(shifted, s.point("log", total)) if log else s.over(e, total)
        return (s.cast(out, call.out.dtype),)

    return write


def _softmax_backward(log: bool) -> Expansion:
    def write(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
        g, y, d = s.wide(args[0]), s.wide(args[1]), args[2] % len(call.out.shape)
        if log:
            out = s.sub(g, s.mul(s.point("exp", y), s.sum(g, (d,))))
        else:
            gy = s.mul(g, y)
            out = s.sub(gy, s.mul(y, s.sum(gy, (d,))))
        return (s.cast(out, call.out.dtype),)

    return write


def _dims_of(call: Call) -> tuple[int, ...]:
    return normal_dims(None if call.op == "aten.mean" else call.arg(1), len(call.ins[0].shape))


def _mean(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
    dims = _dims_of(call)
    x = s.cast(args[0], call.out.dtype) if s.specs[args[0]].dtype != call.out.dtype else args[0]
    n = math.prod(call.ins[0].shape[d] for d in dims)
    out = s.over(s.sum(s.wide(x), dims), n)
    return (s.shaped(s.cast(out, call.out.dtype), call.out.shape),)


def _var(root: bool, mean_too: bool = False) -> Expansion:
    def write(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
        dims = _dims_of(call)
        x = s.wide(args[0])
        n = math.prod(call.ins[0].shape[d] for d in dims)
        correction = 1 if args[2] is None else args[2]
        mean = s.over(s.sum(x, dims), n)
        centred = s.sub(x, mean)
        out = s.over(s.sum(s.mul(centred, centred), dims), float(max(n - correction, 0)))
        if root:
            out = s.point("sqrt", out)
        outs = (out, mean) if mean_too else (out,)
        return tuple(s.shaped(s.cast(o, call.out.dtype), call.out.shape) for o in outs)

    return write


def _logsumexp(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
    dims = _dims_of(call)
    x = s.wide(args[0]) if call.ins[0].is_float else s.cast(args[0], call.out.dtype)
    top = s.reduce("amax", x, dims)
    endless = s.point("isinf", top, dtype="bool")
    top = s.point("masked_fill.Scalar", top, endless, 0.0)
    out = s.add(s.point("log", s.sum(s.point("exp", s.sub(x, top)), dims)), top)
    return (s.shaped(s.cast(out, call.out.dtype), call.out.shape),)


def _norm(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
    dims = normal_dims(call.arg(2), len(call.ins[0].shape))
    x = s.wide(s.cast(args[0], call.out.dtype))
    out = s.point("sqrt", s.sum(s.mul(x, x), dims))
    return (s.shaped(s.cast(out, call.out.dtype), call.out.shape),)


def _truth(kind: str) -> Expansion:
    """any and all: a bool has no partial form, a byte has."""

    def write(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
        dims = normal_dims(call.arg(1), len(call.ins[0].shape))
        bits = s.cast(s.point("ne.Scalar", args[0], 0, dtype="bool"), "u8")
        out = s.point("ne.Scalar", s.reduce(kind, bits, dims), 0, dtype="bool")
        return (s.shaped(s.cast(out, call.out.dtype), call.out.shape),)

    return write


def _loss_mean(reduction_arg: int, counted: int) -> Expansion:
    """The sum, divided by how many elements input `counted` has."""

    def write(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
        total = s.emit(call.op, (*args[:reduction_arg], 2, *args[reduction_arg + 1 :]), call.out)
        return (s.over(total, call.ins[counted].numel),)

    return write


def _nll_mean(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
    """A sum divided by the total weight.

    Without class weights that is a count of labels, so it can be reduced when the step begins and
    nobody waits for it; the loss itself stays partial until the end of the step.
    """
    loss = s.emit(call.op, (*args[:3], 2, *args[4:]), call.out, call.outs[1] or call.out)
    labels = s.specs[args[1]].shape
    if args[2] is not None or not labels:
        return s.over(loss, Ref(loss.name, 1)), Ref(loss.name, 1)
    counted = s.cast(s.point("ne.Scalar", args[1], args[4], dtype="bool"), call.out.dtype)
    total = s.sum(counted, tuple(range(len(labels))), keep=False)
    return s.over(loss, total), total


LAZY = ("aten.nll_loss_forward", "aten.nll_loss2d_forward")
"""Expansions whose partial results are better passed on than reduced at once."""


def _layer_norm(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
    x, weight, bias, eps = s.wide(args[0]), args[2], args[3], args[4]
    rank, inner = len(call.ins[0].shape), len(args[1])
    dims = tuple(range(rank - inner, rank))
    n = math.prod(call.ins[0].shape[rank - inner :])
    mean = s.over(s.sum(x, dims), n)
    centred = s.sub(x, mean)
    rstd = s.point("rsqrt", s.add(s.over(s.sum(s.mul(centred, centred), dims), n), eps))
    y = s.mul(centred, rstd)
    y = s.mul(y, s.wide(weight)) if weight is not None else y
    y = s.add(y, s.wide(bias)) if bias is not None else y
    stats = call.outs[1]
    assert stats is not None
    return s.cast(y, call.out.dtype), s.cast(mean, stats.dtype), s.cast(rstd, stats.dtype)


def _layer_norm_backward(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
    g, x, mean, rstd, weight = s.wide(args[0]), s.wide(args[1]), s.wide(args[3]), s.wide(args[4]), args[5]
    rank, inner = len(call.ins[1].shape), len(args[2])
    dims, rows = tuple(range(rank - inner, rank)), tuple(range(rank - inner))
    n = math.prod(call.ins[1].shape[rank - inner :])
    unit = s.mul(s.sub(x, mean), rstd)
    gw = s.mul(g, s.wide(weight)) if weight is not None else g
    dx = s.sub(gw, s.over(s.sum(gw, dims), n))
    dx = s.mul(s.sub(dx, s.mul(unit, s.over(s.sum(s.mul(gw, unit), dims), n))), rstd)
    dw = s.sum(s.mul(g, unit), rows, keep=False) if rows else s.mul(g, unit)
    db = s.sum(g, rows, keep=False) if rows else g
    return tuple(s.cast(r, o.dtype) if o is not None else r for r, o in zip((dx, dw, db), call.outs, strict=True))


def _batch_norm(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
    """Two sums per channel, reduced together, give mean and variance; the rest is local."""
    x, weight, bias, eps = args
    shape = call.ins[0].shape
    n = math.prod(shape) // shape[1]
    stats = call.outs[1]
    assert stats is not None
    wide = TensorSpec(stats.shape, "f64")
    first = s.emit("laminar.batch_norm_moments", (x,), wide, wide)
    mean = s.over(first, n)
    var = s.sub(s.over(Ref(first.name, 1), n), s.mul(mean, mean))
    rstd = s.point("rsqrt", s.add(var, eps))
    mean, var, rstd = (s.cast(t, stats.dtype) for t in (mean, var, rstd))
    y = s.emit("laminar.batch_norm_apply", (x, weight, bias, mean, var, eps), call.out)
    return y, mean, rstd


def _batch_norm_backward(s: Sheet, call: Call, args: tuple[Any, ...]) -> tuple[Ref, ...]:
    g, x, weight, mean, rstd = args
    shape = call.ins[0].shape
    stats = s.specs[mean]
    dw = s.emit("laminar.batch_norm_sums", (g, x, mean, rstd), stats, stats)
    db = Ref(dw.name, 1)
    n = math.prod(shape) // shape[1]
    dx = s.emit("laminar.batch_norm_grad", (g, x, weight, mean, rstd, dw, db, n), call.out)
    return tuple(s.cast(r, o.dtype) if o else r for r, o in zip((dx, dw, db), call.outs, strict=True))


EXPANSIONS: dict[str, Expansion] = {
    "aten._softmax": _softmax(log=False),
    "aten._log_softmax": _softmax(log=True),
    "aten._softmax_backward_data": _softmax_backward(log=False),
    "aten._log_softmax_backward_data": _softmax_backward(log=True),
    "aten.mean": _mean,
    "aten.mean.dim": _mean,
    "aten.var.correction": _var(root=False),
    "aten.std.correction": _var(root=True),
    "aten.var_mean.correction": _var(root=False, mean_too=True),
    "aten.std_mean.correction": _var(root=True, mean_too=True),
    "aten.logsumexp": _logsumexp,
    **{f"aten.{name}": _norm for name in ("linalg_vector_norm", "norm.Scalar", "norm.ScalarOpt_dim")},
    **{f"aten.any{overload}": _truth("amax") for overload in ("", ".dim", ".dims")},
    **{f"aten.all{overload}": _truth("amin") for overload in ("", ".dim", ".dims")},
    "aten.mse_loss": _loss_mean(2, 0),
    "aten.smooth_l1_loss": _loss_mean(2, 0),
    "aten.huber_loss": _loss_mean(2, 0),
    "aten.soft_margin_loss": _loss_mean(2, 0),
    "aten.binary_cross_entropy": _loss_mean(3, 0),
    "aten.binary_cross_entropy_with_logits": _loss_mean(4, 0),
    "aten.mse_loss_backward": _loss_mean(3, 1),
    "aten.smooth_l1_loss_backward": _loss_mean(3, 1),
    "aten.huber_loss_backward": _loss_mean(3, 1),
    "aten.soft_margin_loss_backward": _loss_mean(3, 1),
    "aten.binary_cross_entropy_backward": _loss_mean(4, 1),
    "aten.nll_loss_forward": _nll_mean,
    "aten.nll_loss2d_forward": _nll_mean,
    "aten.native_layer_norm": _layer_norm,
    "aten.native_layer_norm_backward": _layer_norm_backward,
    "laminar.batch_norm": _batch_norm,
    "laminar.batch_norm_backward": _batch_norm_backward,
}


def expand(
    call: Call, args: tuple[Any, ...], specs: dict[Ref, TensorSpec], prefix: str
) -> tuple[list[Node], tuple[Ref, ...]]:
    """The nodes that compute what `call` does, on whole tensors, and which of them are its outputs."""
    sheet = Sheet(prefix, specs=dict(specs))
    outs = EXPANSIONS[call.op](sheet, call, args)
    return sheet.nodes, outs

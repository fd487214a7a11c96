"""The rules themselves: one line per op where one line says it, a small function where it doesn't.

Names are ATen overloads as they stand in a captured graph (functional, no `.default`). To add one,
see docs/add_a_rule.md; every entry here is checked against arithmetic by tests/test_rules.py.
"""

from __future__ import annotations

from laminar.rules import indexing, layers, moving
from laminar.rules.families import blind_to, leading, pointwise, reduction, reshape
from laminar.rules.notation import Call, Rule, RuleFn

RULES: dict[str, RuleFn] = {}


def add(names: str, rule: RuleFn) -> None:
    """One rule for several ops, named without `aten.`."""
    for name in names.split():
        RULES[name if name.startswith("laminar.") else f"aten.{name}"] = rule


# Pointwise, nothing linear about it.
add(
    """relu gelu silu tanh sigmoid exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal abs sign sgn sin cos
    tan asin acos atan sinh cosh asinh acosh atanh erf erfc erfinv lgamma digamma floor ceil round
    round.decimals trunc frac square hardtanh hardswish hardsigmoid leaky_relu elu celu selu softplus mish
    relu6 log_sigmoid_forward logit threshold hardshrink softshrink i0 nan_to_num isnan isinf isfinite signbit
    logical_not bitwise_not add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar pow.Scalar pow.Tensor_Tensor
    clamp clamp.Tensor clamp_min clamp_max clamp_min.Tensor clamp_max.Tensor remainder.Tensor remainder.Scalar
    remainder.Scalar_Tensor fmod.Tensor fmod.Scalar floor_divide floor_divide.Scalar div.Tensor_mode
    div.Scalar_mode atan2 hypot copysign.Tensor copysign.Scalar logaddexp logaddexp2 heaviside fmax fmin
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar
    ge.Tensor ge.Scalar logical_and logical_or logical_xor bitwise_and.Tensor bitwise_and.Scalar
    bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar bitwise_left_shift.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
    __lshift__.Scalar __rshift__.Scalar isclose where.ScalarOther where.ScalarSelf where.Scalar lerp.Tensor
    addcdiv nextafter xlogy.Tensor special_entr special_erfcx special_xlog1py special_ndtri special_i1
    special_i0e special_i1e special_log_ndtr polygamma _prelu_kernel gcd lcm sinc deg2rad rad2deg isneginf
    isposinf ldexp.Tensor float_power.Tensor_Scalar""",
    pointwise(),
)
# Pointwise and linear: partial sums pass through the inputs named.
add("neg mul.Scalar div.Scalar positive conj real imag", pointwise("0"))
add("clone alias detach lift_fresh_copy contiguous", pointwise("0", through=True))
add("add.Tensor sub.Tensor rsub.Tensor lerp.Scalar", pointwise("01"))
add("mul.Tensor", pointwise("0|1"))
add("div.Tensor", pointwise("0"))
add("where.self", pointwise("12"))
add("addcmul", pointwise("01|02"))
add("copy", pointwise("1"))
add(
    """threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward hardtanh_backward
    leaky_relu_backward elu_backward softplus_backward hardswish_backward hardsigmoid_backward
    log_sigmoid_backward mish_backward hardshrink_backward softshrink_backward logit_backward
    rrelu_with_noise_backward""",
    pointwise("0"),
)
add("_prelu_kernel_backward", pointwise("0"))
add("maximum", moving.extreme("max"))
add("minimum", moving.extreme("min"))
add("masked_fill.Scalar", lambda call: pointwise("0" if call.arg(2) == 0 else "")(call))
add("masked_fill.Tensor", pointwise("02"))
add("_to_copy", moving.cast)

# Products.
add("mm", lambda call: Rule("m k, k n -> m n", linear="0|1"))
add("bmm", lambda call: Rule("b m k, b k n -> b m n", linear="0|1"))
add("mv", lambda call: Rule("m k, k -> m", linear="0|1"))
add("dot vdot", lambda call: Rule("k, k -> []", linear="0|1"))
add("addmm", layers.added("m k, k n -> m n"))
add("baddbmm", layers.added("b m k, b k n -> b m n"))
add("addbmm", layers.added("b m k, b k n -> m n"))
add("addmv", layers.added("m k, k -> m"))
add("addr", layers.added("m, n -> m n"))
add("outer ger", lambda call: Rule("m, n -> m n", linear="0|1"))

# Reductions.
add("sum", reduction(None, None, linear=True))
add("sum.dim_IntList", reduction(linear=True))
add("nansum", reduction())
add("mean", reduction(None, None, None, linear=True, expand=True))
add("mean.dim", reduction(kind=None, linear=True, expand=True))
add("var std", reduction(None, None, None))
add("var.correction std.correction", reduction(keep_arg=3, kind=None, expand=True))
add("var_mean.correction", reduction(keep_arg=3, kind=None, expand=True))
add("amax", moving.also_through("max", reduction(kind="max")))
add("amin", moving.also_through("min", reduction(kind="min")))
add("max", moving.also_through("max", reduction(None, None, "max")))
add("min", moving.also_through("min", reduction(None, None, "min")))
add("logsumexp", reduction(kind=None, expand=True))
add("any.dim any.dims all.dim all.dims argmax argmin prod.dim_int max.dim min.dim median.dim mode nanmedian.dim",
    reduction(kind=None))  # fmt: skip
add("any all prod median", reduction(None, None, None))
add("count_nonzero.dim_IntList", reduction(keep_arg=None))
add("linalg_vector_norm", layers.vector_norm)
add("norm.Scalar norm.ScalarOpt_dim", reduction(2, 3, None))
add("cumsum flip", blind_to(lambda call: _dims(call), linear=True))
add("cumprod logcumsumexp cummax cummin sort argsort sort.stable", blind_to(lambda call: (call.arg(1, -1),)
    if not isinstance(call.arg(1), bool) and call.arg(1) is not None else (call.arg(2, -1),)))  # fmt: skip
add("topk kthvalue", blind_to(lambda call: (call.arg(2, -1),)))
add("_cdist_forward cross", blind_to(lambda call: range(-2, 0)))
add("roll", blind_to(lambda call: call.arg(2) or range(len(call.ins[0].shape)), linear=True, through=True))
add("tril triu", leading(2, linear="0"))
add("linalg_inv_ex linalg_cholesky_ex matrix_exp", leading(2))


def _dims(call: Call) -> tuple[int, ...]:
    dims = call.arg(1)
    return (dims,) if isinstance(dims, int) else tuple(dims)


# Moving elements about.
add("view _unsafe_view reshape unsqueeze squeeze squeeze.dim squeeze.dims flatten.using_ints view_copy", reshape)
add("permute", moving.permute)
add("t", moving.transpose_2d)
add("transpose.int", moving.transpose)
add("expand", moving.expand)
add("repeat", moving.repeat)
add("cat", moving.cat)
add("stack", moving.stack)
add("split.Tensor split_with_sizes chunk", moving.split)
add("unbind.int", moving.unbind)
add("slice.Tensor", moving.slice_)
add("slice_backward", moving.slice_backward)
add("slice_scatter", moving.slice_scatter)
add("select.int", moving.select)
add("select_backward", moving.select_backward)
add("select_scatter", moving.select_scatter)
add("diagonal", moving.diagonal)
add("diagonal_backward diag_embed", moving.batch_of_output)
add("constant_pad_nd", moving.pad)
add("unfold", moving.unfold)
add("pixel_shuffle pixel_unshuffle", leading(3, linear="0"))
add("full zeros ones empty", moving.create)
add("laminar.uniform laminar.normal", moving.create)

# Reading and writing by index.
add("embedding", indexing.embedding)
add("embedding_dense_backward", indexing.embedding_backward)
add("gather", indexing.gather)
add("scatter.src scatter.value", indexing.scatter)
add("scatter_add scatter.value_reduce scatter.reduce", indexing.scatter_add)
add("index_select", indexing.index_select)
add("index_add", indexing.index_add)
add("index_copy index_fill.int_Scalar", indexing.index_copy)
add("index.Tensor", indexing.index)
add("index_put", indexing.index_put)
add("take", lambda call: indexing.take(call))
add("bucketize.Tensor", lambda call: indexing.bucketize(call))
add("searchsorted.Tensor", indexing.searchsorted)
add("isin.Tensor_Tensor", indexing.isin)
add("masked_scatter", lambda call: indexing.whole(call))

# Layers.
add("_softmax _log_softmax _safe_softmax", layers.softmax)
add("_softmax_backward_data _log_softmax_backward_data", layers.softmax_backward)
add("nll_loss_forward nll_loss2d_forward", layers.nll)
add("nll_loss_backward nll_loss2d_backward", layers.nll_backward)
add("native_layer_norm", layers.layer_norm)
add("native_layer_norm_backward", layers.layer_norm_backward)
add("native_group_norm", layers.group_norm)
add("native_group_norm_backward", layers.group_norm_backward)
add("laminar.batch_norm", layers.batch_norm)
add("laminar.batch_norm_backward", layers.batch_norm_backward)
add("laminar.batch_norm_apply", layers.batch_norm_apply)
add("laminar.attention", layers.attention)
add("laminar.attention_backward", layers.attention_backward)
add("laminar.lstm", layers.lstm)
add("laminar.lstm_backward", layers.lstm_backward)
add("convolution", layers.convolution)
add("convolution_backward", layers.convolution_backward)
add("_weight_norm_interface", layers.weight_norm)
add("max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d", layers.spatial())
add("max_pool2d_with_indices_backward adaptive_max_pool2d_backward max_pool3d_with_indices_backward", layers.spatial("0"))
add("avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool2d_backward avg_pool3d_backward "
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_bilinear2d upsample_linear1d upsample_bicubic2d upsample_trilinear3d "
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_bilinear2d_backward "
    "upsample_linear1d_backward upsample_bicubic2d_backward upsample_nearest3d_backward "
    "upsample_trilinear3d_backward reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d "
    "replication_pad3d reflection_pad3d reflection_pad1d_backward reflection_pad2d_backward "
    "replication_pad1d_backward replication_pad2d_backward", layers.spatial("0"))  # fmt: skip
add("grid_sampler_2d", layers.grid_sampler)
add("im2col col2im", layers.spatial("0", only_batch=True))


def rule_for(call: Call) -> Rule | None:
    """The rule of a call, or None if its op has none."""
    fn = RULES.get(call.op)
    return fn(call) if fn else None

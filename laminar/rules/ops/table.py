"""The rules themselves: one line per op where one line says it, a small function where it doesn't.

Names are ATen overloads as they stand in a captured graph (functional, no `.default`). To add one,
see docs/use/add_a_rule.md; every entry here is checked against arithmetic by tests/rules/test_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from laminar.rules.notation import Call, Rule, RuleFn
from laminar.rules.ops import eager, indexing, layers, moving
from laminar.rules.ops.families import blind_to, leading, matrices, pointwise, reduction, reshape

RULES: dict[str, RuleFn] = {}


def add(names: str, rule: RuleFn) -> None:
    """One rule for several ops, named without `aten.`."""
    for name in names.split():
        RULES[name if name.startswith("laminar.") else f"aten.{name}"] = rule


# Pointwise, nothing linear about it.
add(
    """relu gelu silu tanh sigmoid exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal abs sign sgn sin cos
    tan asin acos atan sinh cosh asinh acosh atanh erf erfc erfinv lgamma digamma floor ceil round
    round.decimals trunc frac hardtanh hardswish hardsigmoid leaky_relu elu celu softplus mish
    log_sigmoid_forward logit threshold hardshrink softshrink i0 nan_to_num isnan isinf signbit
    logical_not bitwise_not add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar pow.Scalar pow.Tensor_Tensor
    clamp clamp.Tensor clamp_min clamp_max clamp_min.Tensor clamp_max.Tensor remainder.Tensor remainder.Scalar
    remainder.Scalar_Tensor fmod.Tensor fmod.Scalar floor_divide floor_divide.Scalar div.Tensor_mode
    div.Scalar_mode atan2 hypot copysign.Tensor copysign.Scalar logaddexp logaddexp2 heaviside fmax fmin
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar
    ge.Tensor ge.Scalar logical_and logical_or logical_xor bitwise_and.Tensor bitwise_and.Scalar
    bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar bitwise_left_shift.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
    __lshift__.Scalar __rshift__.Scalar lerp.Tensor addcdiv nextafter xlogy.Tensor xlogy.Scalar_Other
    special_entr special_erfcx special_xlog1py special_ndtri special_i1 special_i0e special_i1e
    special_log_ndtr special_zeta polygamma mvlgamma igamma igammac _prelu_kernel gcd lcm sinc
    isneginf isposinf ldexp.Tensor frexp.Tensor angle polar isin.Tensor_Scalar""",
    pointwise(),
)
# Pointwise and linear: partial sums pass through the inputs named.
add("neg mul.Scalar div.Scalar deg2rad rad2deg", pointwise("0"))
add("clone alias detach", pointwise("0", through=True))
add("add.Tensor sub.Tensor rsub.Tensor lerp.Scalar", pointwise("01"))
add("mul.Tensor", pointwise("0|1"))
add("div.Tensor", lambda call: pointwise("0" if call.at(0) else "")(call))
add("complex", pointwise("01"))
add("where.self", pointwise("12"))
add("addcmul", pointwise("01|02"))
add("copy", pointwise("1"))
add(
    """threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward hardtanh_backward
    leaky_relu_backward elu_backward softplus_backward hardswish_backward hardsigmoid_backward
    log_sigmoid_backward mish_backward hardshrink_backward softshrink_backward logit_backward
    rrelu_with_noise_backward _prelu_kernel_backward native_dropout_backward""",
    pointwise("0"),
)
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
add("_trilinear", layers.trilinear)

# Reductions.
add("sum", reduction(None, None, linear=True))
add("sum.dim_IntList", reduction(linear=True))
add("nansum", reduction())
add("mean", reduction(None, None, None, linear=True, expand=True))
add("mean.dim", reduction(kind=None, linear=True, expand=True))
add(
    "var.correction std.correction var_mean.correction std_mean.correction",
    reduction(keep_arg=3, kind=None, expand=True),
)
add("amax", moving.also_through("max", reduction(kind="max")))
add("amin", moving.also_through("min", reduction(kind="min")))
add("max", moving.also_through("max", reduction(None, None, "max")))
add("min", moving.also_through("min", reduction(None, None, "min")))
add("logsumexp", reduction(kind=None, expand=True))
add("any.dim any.dims all.dim all.dims", reduction(kind=None, expand=True))
add("any all", reduction(None, None, None, expand=True))
add("argmax argmin prod.dim_int max.dim min.dim median.dim mode nanmedian.dim aminmax", reduction(kind=None))
add("kthvalue", reduction(2, 3, None))
add("prod median nanmedian", reduction(None, None, None))
add("count_nonzero count_nonzero.dim_IntList", reduction(keep_arg=None))
add("trace", lambda call: Rule(". . -> []", linear="0"))
add("linalg_vector_norm norm.Scalar norm.ScalarOpt_dim", layers.vector_norm)

# Along a dim that stays whole.


def dims_at(position: int) -> Callable[[Call], tuple[int, ...]]:
    """The dim or dims given as an argument."""
    return lambda call: (d,) if isinstance(d := call.arg(position), int) else tuple(d)


add("cumsum", blind_to(dims_at(1), linear="0"))
add("flip", blind_to(dims_at(1), linear="0", through=True))
add("cumprod logcumsumexp cummax cummin sort", blind_to(dims_at(1)))
add("sort.stable topk", blind_to(dims_at(2)))
add("roll", blind_to(lambda call: call.arg(2) or range(len(call.out.shape)), linear="0", through=True))
add("renorm", layers.renorm)
add("_fft_r2c _fft_c2r _fft_c2c", blind_to(dims_at(1), linear="0"))
add("linalg_cross", blind_to(dims_at(2), linear="0|1"))
add("_cdist_forward", layers.cdist)
add("_cdist_backward", layers.cdist_backward)
add("tril triu", leading(2, linear="0"))
add(
    """linalg_inv_ex linalg_cholesky_ex linalg_matrix_exp _linalg_det _linalg_slogdet _linalg_solve_ex _linalg_svd
    _linalg_eigh linalg_qr linalg_lu_factor_ex linalg_lu_solve linalg_solve_triangular linalg_householder_product
    cholesky_solve""",
    matrices,
)

# Moving elements about.
add("view _unsafe_view unsqueeze squeeze squeeze.dim squeeze.dims view_copy", reshape)
add("permute", moving.permute)
add("t", moving.transpose_2d)
add("transpose.int", moving.transpose)
add("expand", moving.expand_rule)
add("repeat", moving.repeat)
add("cat", moving.cat)
add("stack", moving.stack)
add("split.Tensor split_with_sizes unsafe_split.Tensor", moving.split_rule)
add("unbind.int", moving.unbind)
add("slice.Tensor", moving.slice_)
add("slice_backward", moving.slice_backward)
add("slice_scatter", moving.slice_scatter)
add("select.int", moving.select)
add("select_backward", moving.select_backward)
add("select_scatter", moving.select_scatter)
add("diagonal", moving.diagonal)
add("diagonal_backward", moving.diagonal_back(3))
add("diag_embed", moving.diagonal_back(2))
add("diagonal_scatter", moving.diagonal_scatter)
add("constant_pad_nd", moving.pad)
add("unfold", moving.unfold)
add("unfold_backward", moving.unfold_backward)
add("glu", moving.glu)
add("glu_backward", moving.glu_backward)
add("view_as_real view_as_complex", moving.complex_pairs)
add("pixel_shuffle pixel_unshuffle", leading(3, linear="0"))
add("channel_shuffle", layers.channel_shuffle)
add("full zeros ones", moving.create)
add("laminar.uniform laminar.normal", moving.create)

# Reading and writing by index.
add("embedding", indexing.embedding)
add("embedding_dense_backward", indexing.embedding_backward)
add("gather", indexing.gather)
add("_embedding_bag", indexing.embedding_bag)
add("_embedding_bag_backward", indexing.embedding_bag_backward)
add("_embedding_bag_per_sample_weights_backward", indexing.embedding_bag_weights_backward)
add("scatter.src scatter.value", indexing.scatter)
add("scatter_add scatter.value_reduce scatter.reduce scatter_reduce.two", indexing.scatter_reduce)
add("index_select", indexing.index_select)
add("index_add", indexing.index_add)
add("index_copy index_fill.int_Scalar index_fill.int_Tensor index_reduce", indexing.index_copy)
add("index.Tensor", indexing.index)
add("index_put", indexing.index_put)
add("take", indexing.take_rule)
add("put", indexing.put)
add("bucketize.Tensor", indexing.bucketize)
add("searchsorted.Tensor", indexing.searchsorted)
add("isin.Tensor_Tensor", indexing.isin)
add("masked_scatter", indexing.whole)

# Layers.
add("_softmax _log_softmax _safe_softmax", layers.softmax)
add("_softmax_backward_data _log_softmax_backward_data", layers.softmax_backward)
add("nll_loss_forward nll_loss2d_forward", layers.nll)
add("nll_loss_backward nll_loss2d_backward", layers.nll_backward)
add("mse_loss smooth_l1_loss huber_loss soft_margin_loss", layers.loss(2))
add("binary_cross_entropy", layers.loss(3))
add("binary_cross_entropy_with_logits", layers.loss(4))
add("mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward", layers.loss_backward(3))
add("binary_cross_entropy_backward", layers.loss_backward(4))
add("native_layer_norm", layers.layer_norm)
add("native_layer_norm_backward", layers.layer_norm_backward)
add("native_group_norm", layers.group_norm)
add("native_group_norm_backward", layers.group_norm_backward)
add("laminar.batch_norm", layers.batch_norm_rule)
add("laminar.batch_norm_backward", layers.batch_norm_backward_rule)
add("laminar.batch_norm_apply", layers.batch_norm_apply_rule)
add("laminar.batch_norm_moments", layers.batch_norm_moments_rule)
add("laminar.batch_norm_sums", layers.batch_norm_sums_rule)
add("laminar.batch_norm_grad", layers.batch_norm_grad_rule)
add("laminar.attention", layers.attention_rule)
add("laminar.attention_backward", layers.attention_backward_rule)
add("laminar.ctc_loss", layers.ctc_loss_rule)
add("laminar.ctc_loss_backward", layers.ctc_loss_backward_rule)
add("laminar.grouped_mm", lambda call: Rule("s k, . k n, . -> s n", linear="0|1", local={"s": "laminar.grouped_mm_at"}))
add(
    "laminar.grouped_outer",
    lambda call: Rule("s k, s n, . -> . k n", linear="0|1", local={"s": "laminar.grouped_outer_at"}),
)
add("laminar.lstm", layers.lstm_rule)
add("laminar.lstm_backward", layers.lstm_backward_rule)
add("laminar.eager", eager.eager_rule)
add("laminar.eager_backward", eager.eager_backward_rule)
add("convolution", layers.convolution)
add("convolution_backward", layers.convolution_backward)
add("_weight_norm_interface", layers.weight_norm(2))
add("_weight_norm_interface_backward", layers.weight_norm(4, linear="0"))
add("max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d", layers.spatial())
add(
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward "
    "adaptive_max_pool3d_backward max_unpool2d max_unpool3d",
    layers.spatial("0"),
)
add(
    "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool2d_backward avg_pool3d_backward "
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_bilinear2d upsample_linear1d upsample_bicubic2d upsample_trilinear3d "
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_bilinear2d_backward "
    "upsample_linear1d_backward upsample_bicubic2d_backward upsample_nearest3d_backward "
    "upsample_trilinear3d_backward _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_bilinear2d_aa_backward "
    "_upsample_bicubic2d_aa_backward reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d "
    "replication_pad3d reflection_pad3d reflection_pad1d_backward reflection_pad2d_backward "
    "reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward",
    layers.spatial("0"),
)
add("grid_sampler_2d grid_sampler_3d", layers.grid_sampler)
add("grid_sampler_2d_backward grid_sampler_3d_backward", layers.grid_sampler_backward)
add("im2col col2im", layers.spatial("0", only_batch=True))


def rule_for(call: Call) -> Rule | None:
    """The rule of a call, or None if its op has none."""
    fn = RULES.get(call.op)
    return _ruled(fn, call) if fn else None


@lru_cache(maxsize=1 << 16)
def _ruled(fn: RuleFn, call: Call) -> Rule:
    return fn(call)

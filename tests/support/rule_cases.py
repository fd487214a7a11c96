"""Real calls of ATen ops, for checking rules: recorded from torch's own samples, or written by hand.

`recorded` runs the sample inputs of torch's operator database, forward and backward, and keeps a
handful of different calls of every op the rule table knows. `written` holds what those samples do
not reach, and shapes that divide where that matters; sizes there differ from each other, so that a
rule that confuses two dims can't pass.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import laminar
from laminar.capture.ops import kernels
from laminar.capture.ops.torch_ops import DTYPE_NAMES, find_op, op_name, plain_argument, positional
from laminar.ir.serial.codec import Ref
from laminar.rules.signing import options
from tests.support.rule_check import Case

MOST_ELEMENTS = 40_000


def make_case(op: str, args: tuple[Any, ...]) -> Case:
    """A case from real arguments; tensors are copied, because what follows may write into them."""
    values: list[Tensor] = []

    def number(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            values.append(arg.detach().clone(memory_format=torch.contiguous_format))
            return Ref(f"x{len(values) - 1}")
        return tuple(map(number, arg)) if isinstance(arg, (list, tuple)) else arg

    return Case(op, plain_argument(number(args)), values)


OTHER_NAMES = {"aten.pow_.Scalar": "aten.pow.Tensor_Scalar", "aten.pow_.Tensor": "aten.pow.Tensor_Tensor"}


def functional(name: str) -> str:
    """The name under which a graph holds an op: `aten.add_.Tensor` is `aten.add.Tensor`."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    namespace, base, *overload = name.split(".")
    return ".".join([namespace, base.removesuffix("_"), *overload]) if not base.endswith("__") else name


class Recorder(TorchDispatchMode):
    """Keeps different calls of the ops it is told to watch."""

    def __init__(self, watched: Collection[str], each: int) -> None:
        super().__init__()
        self.watched, self.each = watched, each
        self.kept: dict[str, dict[Any, Case]] = defaultdict(dict)
        self.trivial: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = functional(op_name(func))
        if name in self.watched and len(self.kept[name]) < self.each:
            self.keep(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def keep(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One more case, unless it is like another, too large, or nothing in it can be split."""
        args = positional(find_op(name), args, kwargs)
        tensors = [a for a in tree_leaves(args) if isinstance(a, Tensor)]
        if any(t.numel() > MOST_ELEMENTS or t.layout != torch.strided or t.dtype not in DTYPE_NAMES for t in tensors):
            return
        try:
            case = make_case(name, args)
        except (TypeError, KeyError):
            return  # a complex scalar or a dtype that a graph can't hold
        if case.key in self.kept[name] or not any(o is not None for o in case.whole):
            return
        if not interesting(case):
            self.trivial[name] += 1
            if self.trivial[name] > 2:
                return
        self.kept[name][case.key] = case


def interesting(case: Case) -> bool:
    """Whether anything but replication is possible; a rule that can't even be read is worth a look too."""
    try:
        return any(len(options(case.call, parts)) > 1 for parts in (2, 3))
    except Exception:  # checking will say what is wrong
        return True


def recorded(watched: Collection[str], each: int = 16, samples: int = 30) -> dict[str, list[Case]]:
    """Cases by op from torch's operator database."""
    from torch.testing._internal.common_methods_invocations import op_db

    recorder = Recorder(watched, each)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db:
            if info.name.startswith("jiterator"):  # needs a GPU
                continue
            for dtype in (torch.float64, torch.int64, torch.bool):
                if dtype in info.dtypes:
                    _sample(info, dtype, recorder, samples)
    return {name: list(cases.values()) for name, cases in recorder.kept.items()}


def _sample(info: Any, dtype: torch.dtype, recorder: Recorder, samples: int) -> None:
    grad = dtype.is_floating_point and info.supports_autograd
    # Not `info.sample_inputs`, which inspects the stack for every sample: slow under pytest.
    torch.manual_seed(0)
    for sample in islice(info.sample_inputs_func(info, "cpu", dtype, grad), samples):
        ins = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)]
        ins = [t for t in ins if t.requires_grad]
        try:
            with recorder:
                out = info(sample.input, *sample.args, **sample.kwargs)
            outs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
            tangents = [torch.randn_like(t) for t in outs]
            if ins and outs:
                with recorder:
                    torch.autograd.grad(outs, ins, tangents, allow_unused=True)
        except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError):
            continue  # samples that torch itself refuses here (sparse layouts, missing kernels)


# --- by hand ---------------------------------------------------------------------------------


def case(op: str, *args: Any) -> Case:
    """A case by name and leading arguments; the rest are defaults."""
    if op.startswith("laminar."):
        return make_case(op, args)
    op = f"aten.{op}"
    return make_case(op, positional(find_op(op), args, {}))


def written() -> list[Case]:
    """Everything below."""
    torch.manual_seed(1)
    groups = (_scalars, _products, _moving, _reducing, _indexing, _layers, _images, _narrow, _canonical, _eager)
    return [c for group in groups for c in group()]


def real(*shape: int) -> Tensor:
    """Random numbers of both signs."""
    return torch.randn(shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> Tensor:
    """Random whole numbers from 0."""
    return torch.randint(high, shape)


def _scalars() -> Iterator[Case]:
    x, n = real(4, 6, 5), ints(60, 4, 6, 5)
    for op in ("__lshift__", "__rshift__", "bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "remainder"):
        yield case(f"{op}.Scalar", n, 3)
    for op in ("bitwise_left_shift", "bitwise_right_shift"):
        yield case(f"{op}.Tensor_Scalar", n, 3)
    for op in (
        "fmod.Scalar",
        "clamp_max",
        "clamp_min",
        "add.Scalar",
        "sub.Scalar",
        "mul.Scalar",
        "div.Scalar",
        "ge.Scalar",
    ):
        yield case(op, x, 0.7)
    yield case("div.Scalar_mode", x, 0.3, "floor")
    yield case("remainder.Scalar_Tensor", 7, n + 1)
    yield case("xlogy.Scalar_Other", x, 3.0)
    yield case("isin.Tensor_Scalar", n, 3)
    yield case("add.Tensor", x, 2.0)
    yield case("mul.Tensor", x, 2.0)
    yield case("add.Tensor", x, real(6, 1), -0.5)
    yield case("sub.Tensor", real(4, 1, 5), real(6, 5), 3)
    yield case("mul.Tensor", x, real(5))
    yield case("mul.Tensor", x, real())
    yield case("div.Tensor", x, real(6, 1))
    yield case("where.self", real(6, 5) > 0, x, real(4, 1, 1))
    yield case("addcmul", real(6, 5), x, real(4, 1, 5))
    yield case("lerp.Scalar", x, real(6, 5), 0.3)
    yield case("lerp.Tensor", x, real(6, 5), real(4, 1, 1))
    yield case("masked_fill.Scalar", x, real(6, 1) > 0, 0)
    yield case("masked_fill.Scalar", x, real(6, 1) > 0, -1.5)
    yield case("logit_backward", x, torch.rand(4, 6, 5, dtype=torch.float64), 1e-3)
    yield case("_to_copy", real(4, 6).float(), torch.float64)
    yield case("_to_copy", real(4, 6), torch.float32)
    yield case("_to_copy", ints(9, 4, 6), torch.float64)
    yield case("maximum", x, real(6, 5))
    yield case(
        "rrelu_with_noise_backward", x, real(4, 6, 5), torch.rand(4, 6, 5, dtype=torch.float64), 0.1, 0.3, True, False
    )


def _products() -> Iterator[Case]:
    yield case("mm", real(6, 8), real(8, 12))
    yield case("bmm", real(4, 6, 8), real(4, 8, 3))
    for bias in ((12,), (6, 12), (6, 1), ()):
        yield case("addmm", real(*bias), real(6, 8), real(8, 12))
    yield case("addmm", real(12), real(6, 8), real(8, 12), 0.5, -2.0)
    yield case("addmm", real(12), real(6, 8), real(8, 12), 0, 1)
    yield case("baddbmm", real(6, 1), real(4, 6, 8), real(4, 8, 3), 2, 3)
    yield case("addbmm", real(6, 3), real(4, 6, 8), real(4, 8, 3))
    yield case("addmv", real(6), real(6, 8), real(8))
    yield case("_trilinear", real(4, 6), real(5, 6, 8), real(4, 8), (1, 3), (0,), (1, 2), (2, 3))


def _moving() -> Iterator[Case]:
    yield case("view", real(4, 6, 8), (24, 8))
    yield case("view", real(24, 8), (4, 6, 8))
    yield case("view", real(5, 24), (5, 3, 4, 2))
    yield case("view", real(6, 4, 10), (3, 8, 10))
    yield case("view", real(6, 4, 10), (8, 30))
    yield case("view", real(12, 7), (2, 6, 7))
    yield case("view", real(1, 12, 1, 5), (12, 5, 1))
    yield case("view", real(4, 6), (4, 6))
    yield case("squeeze.dim", real(4, 1, 3), 1)
    yield case("squeeze", real(4, 1, 3))
    yield case("squeeze.dims", real(1, 4, 1, 3), (0, 2))
    yield case("repeat", real(4, 6), (5, 2, 3))
    yield case("expand", real(4, 1, 6), (3, 4, 5, 6))
    yield case("cat", [real(5, 8), real(5, 8), real(5, 8)], 1)
    yield case("cat", [real(4, 6), real(8, 6)], 0)
    yield case("stack", [real(4, 6), real(4, 6)], 1)
    yield case("split.Tensor", real(5, 24), 8, 1)
    yield case("split.Tensor", real(5, 24), 10, 1)
    yield case("split_with_sizes", real(24, 5), (12, 12), 0)
    yield case("split_with_sizes", real(24, 5), (8, 4, 12), 0)
    yield case("unsafe_split.Tensor", real(5, 24), 6, 1)
    yield case("slice.Tensor", real(5, 24), 1, 8, 16, 1)
    yield case("slice.Tensor", real(5, 24), 1, -8, 2**62, 1)
    yield case("slice.Tensor", real(5, 24), 1, 3, 17, 2)
    yield case("slice.Tensor", real(5, 24), 0, 0, 2**62, 1)
    yield case("slice_backward", real(5, 8), (5, 24), 1, 16, 24, 1)
    yield case("slice_backward", real(5, 7), (5, 24), 1, 3, 17, 2)
    yield case("slice_scatter", real(5, 24), real(5, 12), 1, 12, 24, 1)
    yield case("select.int", real(5, 6, 4), 1, -1)
    yield case("select_backward", real(6, 4), (6, 5, 4), 1, 2)
    yield case("select_scatter", real(6, 5, 4), real(6, 4), 1, 2)
    yield case("diagonal", real(4, 5, 6, 3), 1, 1, 3)
    yield case("diagonal_backward", real(4, 6, 2), (4, 5, 6, 3), 1, 1, 3)
    yield case("diag_embed", real(4, 6, 3), 1, 0, 2)
    yield case("diagonal_scatter", real(4, 5, 6, 3), real(4, 6, 2), 1, 1, 3)
    yield case("constant_pad_nd", real(4, 6, 9), (-2, 1), 0)
    yield case("constant_pad_nd", real(4, 6, 9), (-2, -3, 0, 0, 1, 0), 1.5)
    yield case("unfold", real(4, 9, 6), 1, 3, 2)
    yield case("unfold_backward", real(4, 4, 6, 3), (4, 9, 6), 1, 3, 2)
    yield case("glu", real(4, 12, 5), 1)
    yield case("glu_backward", real(4, 6, 5), real(4, 12, 5), 1)
    yield case("pixel_shuffle", real(6, 12, 4, 5), 2)
    yield case("channel_shuffle", real(4, 6, 8, 5), 3)
    yield case("full", (4, 6, 5), 2.5, torch.float64)
    yield case("zeros", (4, 6), torch.float64)


def _reducing() -> Iterator[Case]:
    x = real(4, 6, 9)
    for op in ("var", "std", "var_mean", "std_mean"):
        for correction in (None, 0, 1, 3):
            yield case(f"{op}.correction", x, (0, 2), correction, correction == 0)
        yield case(f"{op}.correction", x, None, None, False)
        yield case(f"{op}.correction", real(2, 3), (0,), 2, False)
    for order in (2, 1, 0, 3, float("inf"), float("-inf")):
        yield case("linalg_vector_norm", x, order, (0, -1), False)
        yield case("linalg_vector_norm", x, order, None, True)
    yield case("norm.Scalar", x, 2)
    yield case("norm.ScalarOpt_dim", x, 2, (1,), True)
    for op in ("sum", "amax", "logsumexp", "mean"):
        name = {"sum": "sum.dim_IntList", "mean": "mean.dim"}.get(op, op)
        yield case(name, x, (0, -1), True)
        yield case(name, x, (1,), False)
    x32 = real(4, 6).float()
    yield case("sum.dim_IntList", x32, (1,), False, torch.float64)
    yield case("mean.dim", x32, (1,), False, torch.float64)
    low = torch.full((4, 6), float("-inf"), dtype=torch.float64)
    yield case("logsumexp", low, (1,), False)
    yield case("_softmax", x, 1, False)
    yield case("_log_softmax", x, -1, False)
    for op in ("max.dim", "min.dim", "median.dim", "mode", "argmax", "argmin", "cummax", "cumprod", "cumsum"):
        yield case(op, x, 1)
    for op in ("median", "nanmedian", "prod"):
        yield case(op, x)
    yield case("kthvalue", x, 2, 1)
    yield case("topk", x, 2, 1)
    yield case("sort", x, 0, True)
    yield case("sort.stable", x, True, 0, True)
    yield case("argmax", x)
    for op in ("any", "all"):
        yield case(op, x > 1)
        yield case(f"{op}.dim", x > -1, 1)
        yield case(f"{op}.dims", x > -1, (0, 2), True)
    yield case("count_nonzero", ints(3, 4, 6, 5))
    yield case("count_nonzero.dim_IntList", ints(3, 4, 6, 5), (0, 2))
    yield case("_cdist_forward", real(3, 4, 6), real(3, 8, 6), 2.0, None)
    yield case(
        "_cdist_backward", real(3, 4, 8), real(3, 4, 6), real(3, 8, 6), 1.0, torch.rand(3, 4, 8, dtype=torch.float64)
    )
    yield case("linalg_cross", real(4, 6, 3), real(4, 6, 3), -1)
    yield case("linalg_cross", real(3, 4, 6), real(3, 4, 1), 0)
    yield case("_weight_norm_interface", real(6, 4, 5), real(6, 1, 1), 0)
    yield case("_weight_norm_interface", real(4, 6), real(1, 6), 1)
    v, g = real(6, 4, 5), real(6, 1, 1)
    norms = v.flatten(1).norm(dim=1).view(6, 1, 1)
    yield case("_weight_norm_interface_backward", real(6, 4, 5), v, g, norms, 0)


def _indexing() -> Iterator[Case]:
    table, at = real(12, 8), ints(12, 4, 6)
    yield case("embedding", table, at, 3)
    for padding, scaled in ((-1, False), (3, False), (-1, True), (3, True)):
        yield case("embedding_dense_backward", real(4, 6, 8), at, 12, padding, scaled)
    for mode in (0, 1, 2):
        yield case("_embedding_bag", table, ints(12, 10), torch.tensor([0, 3, 7]), False, mode)
    yield case("gather", real(4, 9, 6), 1, ints(9, 4, 5, 6))
    yield case("gather", real(4, 9, 6), -1, ints(6, 3, 9, 8))
    yield case("scatter.src", real(4, 9, 6), 1, _distinct(4, 9, 5, 6), real(4, 5, 6))
    yield case("scatter.value", real(4, 9, 6), 1, _distinct(4, 9, 5, 6), 0.5)
    yield case("scatter.value_reduce", real(4, 9, 6), 1, ints(9, 4, 5, 6), 2.0, "multiply")
    yield case("scatter.reduce", real(4, 9, 6), 1, ints(9, 4, 5, 6), real(4, 5, 6), "add")
    yield case("scatter_add", real(4, 9, 6), 1, ints(9, 4, 12, 6), real(4, 12, 6))
    for kind in ("sum", "amax", "amin", "prod", "mean"):
        for with_x in (True, False):
            yield case("scatter_reduce.two", real(4, 3, 6), 1, ints(3, 4, 12, 6), real(4, 12, 6), kind, with_x)
    yield case("index_select", real(4, 9, 6), 1, ints(9, 8))
    yield case("index_add", real(4, 9, 6), 1, ints(9, 8), real(4, 8, 6), 2)
    yield case("index_copy", real(4, 9, 6), 1, torch.randperm(9)[:8], real(4, 8, 6))
    yield case("index_fill.int_Scalar", real(4, 9, 6), 1, ints(9, 3), 0)
    yield case("index_fill.int_Tensor", real(4, 9, 6), 1, ints(9, 3), real())
    yield case("index_reduce", real(4, 9, 6), 1, ints(9, 8), real(4, 8, 6), "amax")
    x = real(6, 9, 4, 8)
    i, j = ints(4, 3, 1), ints(8, 3, 12)
    yield case("index.Tensor", x, [None, None, i, j])
    yield case("index.Tensor", x, [None, ints(9, 12), None, ints(8, 1)])
    yield case("index.Tensor", x, [ints(6, 12)])
    for accumulate in (False, True):
        where = [None, None, _pairs(4, 8, 12)[0], _pairs(4, 8, 12)[1]]
        yield case("index_put", x, where, real(6, 9, 12), accumulate)
        yield case("index_put", x, where, real(9, 1), accumulate)
        yield case("index_put", x, where, real(), accumulate)
        yield case("index_put", x, [torch.randperm(6)[:4]], real(4, 1, 4, 8), accumulate)
        yield case("index_put", x, [None, torch.randperm(9)[:4], None, ints(8, 1)], real(4, 6, 4), accumulate)
        yield case("put", real(5, 6), torch.randperm(30)[:12].view(3, 4), real(3, 4), accumulate)
    yield case("take", real(5, 6), ints(30, 4, 3))
    edges = torch.linspace(-1, 1, 5, dtype=torch.float64)
    yield case("bucketize.Tensor", real(4, 6), edges)
    yield case("searchsorted.Tensor", edges, real(4, 6))
    yield case("searchsorted.Tensor", real(4, 5).sort(-1).values, real(4, 6))
    yield case("isin.Tensor_Tensor", ints(9, 4, 6), ints(9, 3))


def _distinct(a: int, rows: int, b: int, c: int) -> Tensor:
    """An index of b different rows for each of a and c."""
    return torch.rand(a, rows, c).argsort(1)[:, :b]


def _pairs(a: int, b: int, count: int) -> tuple[Tensor, Tensor]:
    """`count` different pairs below (a, b); the same ones at every call."""
    order = torch.randperm(a * b, generator=torch.Generator().manual_seed(2))[:count]
    return order // b, order % b


def _layers() -> Iterator[Case]:
    x, target, weight = real(6, 12), ints(12, 6), torch.rand(12, dtype=torch.float64) + 0.1
    target[2] = 5
    image, spots = real(4, 6, 3, 5), ints(6, 4, 3, 5)
    for reduction in (0, 1, 2):
        for ignore in (-100, 5):
            for w in (None, weight):
                yield case("nll_loss_forward", x, target, w, reduction, ignore)
                total = (w if w is not None else torch.ones_like(weight))[target].masked_fill(target == ignore, 0).sum()
                grad = real(6) if reduction == 0 else real()
                yield case("nll_loss_backward", grad, x, target, w, reduction, ignore, total)
        yield case("nll_loss2d_forward", image, spots, None, reduction, -100)
        grad = real(4, 3, 5) if reduction == 0 else real()
        total = torch.tensor(60.0, dtype=torch.float64)
        yield case("nll_loss2d_backward", grad, image, spots, None, reduction, -100, total)
        a, b, p = real(4, 6, 5), real(4, 6, 5), torch.rand(4, 6, 5, dtype=torch.float64)
        grad = real(4, 6, 5) if reduction == 0 else real()
        for op in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
            yield case(op, a, b, reduction)
            extra = (1.0,) if op in ("smooth_l1_loss", "huber_loss") else ()
            yield case(f"{op}_backward", grad, a, b, reduction, *extra)
        yield case("binary_cross_entropy", p, torch.rand_like(p), torch.rand_like(p), reduction)
        yield case("binary_cross_entropy_backward", grad, p, torch.rand_like(p), torch.rand_like(p), reduction)
        yield case(
            "binary_cross_entropy_with_logits", a, torch.rand_like(p), None, torch.rand(5, dtype=p.dtype), reduction
        )
        yield case("mse_loss", a, real(6, 1), reduction)
        yield case("mse_loss", real(6, 1), a, reduction)
    x = real(4, 6, 8, 10)
    for shape in ((10,), (8, 10)):
        g, b = real(*shape), real(*shape)
        for w, c in ((g, b), (None, None), (g, None)):
            yield case("native_layer_norm", x, shape, w, c, 1e-5)
            _, mean, rstd = torch.native_layer_norm(x, shape, w, c, 1e-5)
            wanted = [True, w is not None, c is not None]
            yield case("native_layer_norm_backward", real(4, 6, 8, 10), x, shape, mean, rstd, w, c, wanted)
    for groups in (4, 12, 2):
        x, w, b = real(6, 12, 3, 5), real(12), real(12)
        yield case("native_group_norm", x, w, b, 6, 12, 15, groups, 1e-5)
        _, mean, rstd = torch.native_group_norm(x, w, b, 6, 12, 15, groups, 1e-5)
        yield case("native_group_norm_backward", real(6, 12, 3, 5), x, mean, rstd, w, 6, 12, 15, groups, [True] * 3)
        yield case("native_group_norm", x, None, None, 6, 12, 15, groups, 1e-5)


def _images() -> Iterator[Case]:
    plain_kinds = ((1, False, True), (1, True, True), (1, False, False))
    grouped_kinds = ((4, False, True), (4, True, True), (8, False, False))
    for groups, transposed, bias in (*plain_kinds, *grouped_kinds):
        x, out = real(6, 8, 5, 7), 16 if groups > 1 else 12
        w = real(8, out // groups, 3, 2) if transposed else real(out, 8 // groups, 3, 2)
        b = real(out) if bias else None
        c = case("convolution", x, w, b, [2, 1], [1, 0], [1, 1], transposed, [0, 0], groups)
        yield c
        grad = real(*c.call.out.shape)
        sizes = [out] if bias else None
        yield case(
            "convolution_backward",
            grad,
            x,
            w,
            sizes,
            [2, 1],
            [1, 0],
            [1, 1],
            transposed,
            [0, 0],
            groups,
            [True, True, bias],
        )
    yield case("convolution", real(6, 8, 9), real(12, 8, 3), real(12), [1], [1], [2], False, [0], 1)
    x = real(4, 6, 8, 10)
    for op in ("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"):
        yield case(op, x, [5, 7], False)
        yield case(f"{op}_backward", real(4, 6, 5, 7), [5, 7], [4, 6, 8, 10], False)
    yield case("_upsample_nearest_exact3d", real(4, 6, 2, 3, 5), [4, 3, 7])
    yield case("_upsample_nearest_exact3d_backward", real(4, 6, 4, 3, 7), [4, 3, 7], [4, 6, 2, 3, 5])
    yield case("max_pool2d_with_indices", x, [2, 3], [2, 2], [1, 1])
    yield case("avg_pool2d", x, [2, 3], [2, 2], [1, 1])
    yield case("_adaptive_avg_pool2d", x, [3, 4])
    grid = torch.rand(4, 3, 5, 2, dtype=torch.float64) * 2 - 1
    yield case("grid_sampler_2d", x, grid, 0, 0, False)
    yield case("grid_sampler_2d_backward", real(4, 6, 3, 5), x, grid, 0, 0, False, [True, True])
    yield case("grid_sampler_2d_backward", real(4, 6, 3, 5), x, grid, 0, 0, False, [False, True])


def _narrow() -> Iterator[Case]:
    """Half precision: expansions widen inside and must come back in the dtype of the fused op."""
    x, y = real(4, 6, 8).bfloat16(), real(4, 6, 8).bfloat16()
    yield case("_softmax", x, 1, False)
    yield case("_log_softmax", x, 1, False)
    yield case("_softmax_backward_data", y, x.softmax(1), 1, torch.bfloat16)
    yield case("_log_softmax_backward_data", y, x.log_softmax(1), 1, torch.bfloat16)
    yield case("mean.dim", x, (1,), False)
    yield case("mean.dim", x, (1,), True, torch.float32)
    yield case("var.correction", x, (1,), 1, False)
    yield case("logsumexp", x, (1,), False)
    yield case("linalg_vector_norm", x, 2, (1,), False)
    yield case("linalg_vector_norm", x, 2, (1,), False, torch.float32)
    yield case("mse_loss", x, y, 1)
    for w, b in ((real(8).bfloat16(), real(8).bfloat16()), (real(8).float(), real(8).float())):
        yield case("native_layer_norm", x, (8,), w, b, 1e-5)
        _, mean, rstd = torch.native_layer_norm(x, (8,), w, b, 1e-5)
        yield case("native_layer_norm_backward", y, x, (8,), mean, rstd, w, b, [True] * 3)
    yield case("laminar.batch_norm", x, real(6).float(), real(6).float(), 1e-5)
    _, mean, rstd = kernels.batch_norm(x, real(6).float(), real(6).float(), 1e-5)
    yield case("laminar.batch_norm_backward", y, x, real(6).float(), mean, rstd)
    yield case("_to_copy", x, torch.float32)


def _canonical() -> Iterator[Case]:
    key = torch.tensor([12345, 7])
    for op in ("uniform", "normal"):
        yield case(f"laminar.{op}", (4, 6, 10), key, 3, torch.float64)
    yield from _attention()
    yield from _ctc()
    for shape in ((6, 4, 3, 5), (6, 8)):
        x, c = real(*shape), shape[1]
        for w, b in ((real(c), real(c)), (None, None)):
            yield case("laminar.batch_norm", x, w, b, 1e-5)
            _, mean, rstd = kernels.batch_norm(x, w, b, 1e-5)
            yield case("laminar.batch_norm_backward", real(*shape), x, w, mean, rstd)
            yield case("laminar.batch_norm_apply", x, w, b, mean, real(c).abs(), 1e-5)
            yield case("laminar.batch_norm_moments", x)
            yield case("laminar.batch_norm_sums", real(*shape), x, mean, rstd)
            yield case("laminar.batch_norm_grad", real(*shape), x, w, mean, rstd, real(c), real(c), 60)
    for ends in ((5, 5, 9, 12), (0, 3, 4, 10)):  # empty groups, and rows behind the last
        x, y, groups = real(12, 6), real(12, 8), torch.tensor(ends, dtype=torch.int32)
        yield case("laminar.grouped_mm", x, real(4, 6, 8), groups)
        yield case("laminar.grouped_outer", x, y, groups)
    for reverse in (False, True):
        for bias in (real(20), None):
            x, h, c, wi, wh = real(3, 6, 4), real(6, 5), real(6, 5), real(20, 4), real(20, 5)
            yield case("laminar.lstm", x, h, c, wi, wh, bias, reverse)
            y, _, _, gates, cells = kernels.lstm(x, h, c, wi, wh, bias, reverse)
            dy, dh, dc = real(3, 6, 5), real(6, 5), real(6, 5)
            yield case("laminar.lstm_backward", dy, dh, dc, x, h, c, wi, wh, y, gates, cells, reverse)


class Signed(nn.Module):
    """Looks at every sample by itself, and works by samples: the op that such a part is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(real(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row @ self.weight if row.sum() > 0 else row.tanh() @ self.weight for row in x])


SIGNED = Signed()
"""Kept: a part runs as long as its module is there."""


def _eager() -> Iterator[Case]:
    part = laminar.eager(SIGNED, batch_dim=0)
    x, key = real(12, 5), torch.tensor([1, 2])
    graph = laminar.capture(part, lambda m, b: m(b).pow(2).sum(), x)
    ahead, back = (next(n for n in graph.nodes if n.op == op) for op in ("laminar.eager", "laminar.eager_backward"))
    given = [x, SIGNED.weight.detach()]
    yield case("laminar.eager", given, key, *ahead.args[2:])
    yield case("laminar.eager_backward", [real(12, 6)], given, key, *back.args[3:])


def _ctc() -> Iterator[Case]:
    scores, labels = real(7, 4, 5).log_softmax(-1), torch.tensor([[1, 2, 3], [2, 2, 0], [4, 0, 0], [1, 4, 1]])
    lengths = torch.tensor([7, 6, 5, 7]), torch.tensor([3, 2, 1, 3])
    yield case("laminar.ctc_loss", scores, labels, *lengths, 0, False)
    nll, alpha = kernels.ctc_loss(scores, labels, *lengths, 0, False)
    yield case("laminar.ctc_loss_backward", real(4), scores, labels, *lengths, nll, alpha, 0, False)


def _attention() -> Iterator[Case]:
    batch, rows, cols, size = 4, 6, 10, 5
    for heads, kv, values in ((4, 4, 5), (12, 4, 5), (12, 1, 5), (4, 2, 3)):
        for causal in (False, True):
            keys = rows if causal else cols
            masks = [None, real(batch, heads, rows, keys), real(rows, keys) > -1, real(batch, 1, 1, keys)]
            for mask in masks:
                q, k, v = real(batch, heads, rows, size), real(batch, kv, keys, size), real(batch, kv, keys, values)
                yield from _both_ways(q, k, v, mask, causal)
    for rows, keys in ((7, 7), (12, 5), (5, 12)):  # stretches that differ, keys that are fewer, or more, than queries
        for values in (5, 3):
            yield from _both_ways(real(2, 4, rows, 5), real(2, 2, keys, 5), real(2, 2, keys, values), None, True)
    unseen = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    unseen[:, :, :, :4] = False  # some rows see nothing before them, some nothing at all
    yield from _both_ways(real(2, 4, 6, 5), real(2, 4, 6, 5), real(2, 4, 6, 3), unseen, True)
    narrow = [real(2, 4, 6, 8).bfloat16() for _ in range(3)]
    yield from _both_ways(*narrow, None, True)


def _both_ways(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Iterator[Case]:
    yield case("laminar.attention", q, k, v, mask, causal, 0.3)
    out, lse = kernels.attention(q, k, v, mask, causal, 0.3)
    yield case("laminar.attention_backward", real(*out.shape).to(q.dtype), q, k, v, mask, out, lse, causal, 0.3)

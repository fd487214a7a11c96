"""Families of ops: which ops cost alike, and the few numbers that decide how much.

Within a family time is a smooth function of a small geometry: a product's (batch, m, n, k), a softmax's rows and
columns, an elementwise op's bytes. `traits_of` gives for a call its family, that geometry in octaves (base-2
logarithms, so that equal ratios are equal distances), a kind (which op, with what would change its code path), and
the work a roofline needs: floating-point operations, and bytes that go to and from memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from laminar.cost.ops.roofline import flops
from laminar.cost.ops.table import parse_key
from laminar.errors import LaminarError
from laminar.ir.ops import FREE
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import ITEM_BYTES
from laminar.rules.notation import Call

_MEMBERS = {
    "matmul": "mm addmm bmm baddbmm mv dot _scaled_mm",
    "convolution": "convolution convolution_backward",
    "dear": """gelu gelu_backward silu silu_backward tanh tanh_backward exp log sigmoid sigmoid_backward pow erf log1p
        expm1 cos sin sqrt rsqrt log_sigmoid_forward log_sigmoid_backward softplus softplus_backward elu elu_backward
        mish hardswish hardswish_backward logit native_dropout logaddexp atan2 mish_backward""",
    "rows": """_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data native_layer_norm
        native_layer_norm_backward native_group_norm native_group_norm_backward cumsum cumprod sort topk logsumexp
        _fused_rms_norm _fused_rms_norm_backward""",
    "channels": "native_batch_norm native_batch_norm_backward batch_norm_update_stats",
    "sums": "sum mean amax amin max min prod var std argmax argmin any all var_mean norm linalg_vector_norm",
    "moving": """clone contiguous cat stack constant_pad_nd slice_backward select_backward slice_scatter select_scatter
        copy view_copy roll flip tril triu repeat diagonal_backward unfold_backward im2col col2im as_strided_copy""",
    "indexing": """embedding embedding_dense_backward gather index_select index index_put index_put_ scatter scatter_add
        index_add masked_select take scatter_reduce""",
    "loss": "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward",
    "pooling": """max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward
        upsample_bilinear2d upsample_bilinear2d_backward""",
}
FAMILY = {f"aten.{op}": family for family, ops in _MEMBERS.items() for op in ops.split()}
FAMILY |= {
    **{f"laminar.{n}": "attention" for n in ("attention", "attention_at", "attention_backward",
                                             "attention_backward_at")},
    **{f"laminar.grouped_{n}": "matmul" for n in ("mm", "mm_at", "outer", "outer_at")},
    "laminar.lstm": "lstm", "laminar.lstm_backward": "lstm",
    "laminar.uniform": "draws", "laminar.normal": "draws",
    "laminar.eager": "matmul", "laminar.eager_backward": "matmul",
    "laminar.embedding_at": "indexing", "laminar.embedding_backward_at": "indexing", "laminar.gather_at": "indexing",
    "laminar.nll_at": "loss", "laminar.nll_backward_at": "loss",
    "laminar.ctc_loss": "loss", "laminar.ctc_loss_backward": "loss",
    **{f"laminar.{n}": "channels" for n in ("batch_norm", "batch_norm_backward", "batch_norm_apply",
                                             "batch_norm_moments", "batch_norm_sums", "batch_norm_grad")},
    "fused.pointwise": "fused.pointwise", "fused.reduction": "fused.reduction",
}  # fmt: skip

OP_FAMILIES = ("matmul", "attention", "convolution", "cheap", "dear", "rows", "channels", "sums", "moving", "indexing",
         "loss", "pooling", "lstm", "draws", "view", "optimizer", "fused.pointwise", "fused.reduction")  # fmt: skip
"""Every family; an op that no line names is "cheap": elementwise, bound by memory."""
COMPUTES = ("matmul", "attention", "convolution", "lstm")
"""Families whose roofline has an arithmetic side."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What decides a call's time."""

    family: str
    op: str
    kind: str
    """The op and what would change its code path: marks, dtypes, flags."""
    group: str
    """A coarser kind: calls of one group are better neighbours than calls of another."""
    dtype: str
    """Of the arithmetic."""
    geometry: tuple[float, ...]
    """In octaves."""
    flops: float
    nbytes: float
    calls: float = 1.0
    """Ops it is made of, for those that are loops over many."""


def family_of(op: str) -> str:
    """The family of an op, whatever its overload."""
    if op in FREE:
        return "view"
    if op.startswith("optimizer."):
        return "optimizer"
    if op.startswith("box."):  # a piece cut out, or zeros put around it: local steps of boxing
        return "moving"
    short = ".".join(op.split(".")[:2])
    return FAMILY.get(op) or FAMILY.get(short, "cheap")


def measured_traits(key: str) -> Traits:
    """The traits of an op that a profile names; a name that is no op's is refused."""
    call, marks = parse_key(key)
    try:
        found = traits_of(call, marks)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        raise LaminarError(
            f"{key!r} is not the key of a measured op: {error}", next="measure the profile again"
        ) from None
    return found


def traits_of(call: Call, marks: Sequence[str] = ()) -> Traits:
    """The traits of a call; `marks` as in `cost.layout`."""
    # Long because it is a table of families: a few lines for each.
    family, op = family_of(call.op), call.op
    if family in ("optimizer", "fused.pointwise", "fused.reduction"):
        return _by_numbers(call, family)
    if call.op in ("laminar.eager", "laminar.eager_backward"):
        return _as_it_is(call)
    told = len(marks) > len(call.ins)
    marks = (tuple(marks) + ("",) * len(call.ins))[: len(call.ins)]
    copies = family == "view" and _copies(call, marks)
    if copies:
        family, op = "moving", "aten.clone"
    first = next((s.dtype for s in (*call.ins, *call.outs) if s and s.is_float), None)
    dtype = first or next((s.dtype for s in (*call.ins, *call.outs) if s), "f32")
    nbytes = _moved(call, marks, family)
    moved = math.log2(max(nbytes, 1.0))
    lying = ",".join("s" if m not in ("", "'") and family == "matmul" else m for m in marks)
    work = (
        flops(call)
        if family in COMPUTES and call.op.split(".")[1] != "dot"
        else float(sum(o.numel for o in call.outs if o))
    )
    kind, group = f"{op}/{lying}" if any(marks) else op, op
    if family == "matmul":
        b, m, n, k = _product(call)
        geometry = _logs(b, m, n, k)
        group = "batched" if b > 1 or call.op in ("aten.bmm", "aten.baddbmm") else "plain"
    elif family == "attention":
        back = call.op.endswith("backward")
        q, key = call.ins[int(back)].shape, call.ins[1 + int(back)].shape
        geometry = _logs(q[0] * q[1], q[2], key[2], q[3])
        causal = bool(call.args[7 if back else 4])
        kind = f"{kind}/{'T' if causal else 'F'}{len(call.ins)}"
        if causal:
            work /= 2
    elif family == "convolution":
        geometry, kind, group = _convolution(call, op)
    elif family in ("rows", "sums"):
        outer, inner, last = _rows(call, family)
        geometry = (*_logs(outer, inner), moved)
        kind = f"{kind}/{'last' if last else 'first'}"
    elif family == "channels":
        x = max(call.ins, key=lambda s: s.numel)
        geometry = (*_logs(x.shape[1] if len(x.shape) > 1 else 1, math.prod(x.shape[2:])), moved)
    elif family == "indexing":
        table = max(s.nbytes for s in (*call.ins, *call.outs) if s)
        geometry = (moved, *(0.5 * n for n in _logs(table, _row_length(call))))
        kind = f"{op}/{'T' if call.op.startswith('aten.index_put') and True in call.args else ''}"
    elif family == "moving":
        geometry = (moved, math.log2(_run(call, marks)))
        kind = f"{op}/{'turned' if any(marks) else ''}"
    elif family == "lstm":
        steps = call.ins[0].shape
        geometry = (*_logs(*steps[:3]), math.log2(max(work, 1.0)))
    elif family == "draws":
        geometry = (moved,)
        kind = f"{op}/{'cut' if call.args and call.args[-1] == 'cut' else ''}"
    elif family == "view":
        geometry = ()
    else:
        geometry = (moved,)
        kind = f"{op}{_flags(call)}/{_pattern(call, marks)}"
    if told:
        kind += "!"
    calls = LSTM_CALLS * call.ins[0].shape[0] if family == "lstm" else 1.0
    return Traits(family, op, kind, group, dtype, geometry, work, nbytes, calls)


def _logs(*sizes: float) -> tuple[float, ...]:
    return tuple(math.log2(max(n, 1)) for n in sizes)


def _as_it_is(call: Call) -> Traits:
    """What runs as it is: a product of as many operations, over the rows of what it makes. Assumed, not measured."""
    work, nbytes = flops(call), float(sum(s.nbytes for s in (*call.ins, *call.outs) if s))
    dtype = next((s.dtype for s in (*call.ins, *call.outs) if s and s.is_float), "f32")
    rows = max(math.prod(call.outs[0].shape[:-1]) if call.outs[0] else 1, 1)
    side = max(math.sqrt(work / 2 / rows), 1.0)
    return Traits("matmul", call.op, call.op, "plain", dtype, _logs(1, rows, side, side), work, nbytes)


def _by_numbers(call: Call, family: str) -> Traits:
    """Calls that name no tensors: (tensors, elements), ([inputs,] bytes), (rows, columns[, bytes])."""
    numbers = [float(a) for a in call.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    if family == "optimizer":
        nbytes = STATE_BYTES.get(call.op, 20) * numbers[1]
        return Traits(family, call.op, call.op, call.op, "f32", _logs(*numbers), 0.0, nbytes, 1 + numbers[0])
    words = [a for a in call.args if isinstance(a, str)]
    kind = "/".join([call.op, *words])
    if family == "fused.pointwise":  # inputs (if told), bytes
        return Traits(family, call.op, kind, call.op, "f32", _logs(numbers[-1]), 0.0, numbers[-1])
    rows, columns, *told = numbers
    nbytes = told[0] if told else 8 * rows * columns
    return Traits(family, call.op, kind, call.op, "f32", _logs(rows, columns), 0.0, nbytes)


LSTM_CALLS = 16
"""Small ops in one step of an LSTM."""
STATE_BYTES = {"optimizer.adamw": 28, "optimizer.adam": 28, "optimizer.sgd": 12, "optimizer.momentum": 20}
"""Bytes read and written for each float32 element of an update."""


def _product(call: Call) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a product."""
    if call.op.startswith("laminar.grouped_"):
        (rows, k), groups = call.ins[0].shape, call.ins[2].shape[0]
        per, n = -(-rows // max(groups, 1)), call.ins[1].shape[-1]  # as if all groups were of one size
        return (groups, per, n, k) if "_mm" in call.op else (groups, k, n, per)
    a, b = call.ins[-2:] if call.op != "aten._scaled_mm" else call.ins[:2]
    if call.op.split(".")[1] in ("mv", "dot"):
        return 1, math.prod(a.shape[:-1]), 1, a.shape[-1]
    batch = a.shape[0] if len(a.shape) == 3 else 1
    return batch, a.shape[-2], b.shape[-1], a.shape[-1]


def _convolution(call: Call, op: str) -> tuple[tuple[float, ...], str, str]:
    """Geometry, kind and group. Libraries take faster paths where channels come in sixteens."""
    back = call.op.endswith("backward")
    y, x, w = (call.ins[0], call.ins[1], call.ins[2]) if back else (call.out, call.ins[0], call.ins[1])
    groups, area = call.arg(9 if back else 8, 1), math.prod(w.shape[2:])
    each = (
        "depthwise"
        if groups > 1 and w.shape[1] == 1
        else "grouped"
        if groups > 1
        else "point"
        if area == 1
        else "dense"
    )
    wanted = call.arg(10, ()) if back else ()
    flags = "".join("T" if t else "F" for t in wanted[:2])
    strided = any(n > 1 for n in (call.arg(4 if back else 3) or ()))
    odd = any(c % 16 for c in (w.shape[0], w.shape[1] * groups))
    pixels = math.prod(y.shape[2:])
    rows, picture, area_ = _logs(x.shape[0] * pixels, pixels, area)
    # How many rows and how large a picture matters less than how many channels: half an octave each.
    geometry = (0.5 * rows, 0.5 * picture, 0.3 * area_, *_logs(w.shape[1] * groups, w.shape[0]))
    return geometry, f"{op}/{each}{flags}{'/strided' * strided}{'/odd' * odd}", f"{op}/{each}"


def _rows(call: Call, family: str) -> tuple[int, int, bool]:
    """(rows, length of a row, whether rows lie along the last dim) of a reduction or a normalisation."""
    x = call.ins[0]
    if family == "rows":
        if "group_norm" in call.op:
            x = call.ins[0]
            group = call.outs[1].shape[-1] if call.outs[1] and not call.op.endswith("backward") else call.arg(8, 1)
            rows = x.shape[0] * max(int(group or 1), 1)
            return rows, x.numel // max(rows, 1), True
        if "layer_norm" in call.op:
            size = next((a for a in call.args if isinstance(a, tuple) and a and isinstance(a[0], int)), x.shape[-1:])
            length = math.prod(size)
            return x.numel // max(length, 1), length, True
        dim = next((a for a in call.args if isinstance(a, int) and not isinstance(a, bool)), -1)
        d = dim % max(len(x.shape), 1)
        length = x.shape[d] if x.shape else 1
        return x.numel // max(length, 1), length, d == len(x.shape) - 1
    out = call.outs[0].numel if call.outs[0] else 1
    dims = next((a for a in call.args if isinstance(a, tuple)), None)
    chosen = {d % max(len(x.shape), 1) for d in dims} if dims else set(range(len(x.shape)))
    last = len(x.shape) - 1 in chosen or not x.shape
    return out, x.numel // max(out, 1), last


def _row_length(call: Call) -> int:
    """Elements that lie together where an op indexes."""
    if "embedding" in call.op:
        return call.outs[0].shape[-1] if call.outs[0] and call.outs[0].shape else 1
    if call.op.startswith(("aten.index_select", "aten.index_add")):
        dim = next((a for a in call.args if isinstance(a, int)), 0)
        return max(1, math.prod(call.ins[0].shape[dim % len(call.ins[0].shape) + 1 :]))
    if call.op.startswith("aten.index"):
        places = next((a for a in call.args if isinstance(a, tuple)), ())
        return max(1, math.prod(call.ins[0].shape[len(places) :]))
    return 1


def _run(call: Call, marks: Sequence[str]) -> int:
    """Elements that lie together on the side where they are scattered, for ops that move them."""
    turned = [(s, m) for s, m in zip(call.ins, marks, strict=True) if m and s.shape]
    if turned:
        spec, mark = turned[0]
        last = len(spec.shape) - 1
        if mark in ("s", "e"):
            return max(1, spec.shape[-1])
        order = [int(c) for c in mark] if mark != "'" else [*range(last - 1), last, last - 1]
        run, d = 1, last
        while d >= 0 and order[d] == d:
            run *= spec.shape[d]
            d -= 1
        return max(1, run)
    if call.op in ("aten.cat", "aten.stack"):
        dim = next((a for a in call.args if isinstance(a, int)), 0)
        shape = call.ins[0].shape
        return max(1, math.prod(shape[dim % max(len(shape) + (call.op == "aten.stack"), 1) :]))
    return max(1, call.outs[0].shape[-1] if call.outs[0] and call.outs[0].shape else 1)


def _flags(call: Call) -> str:
    """What changes an elementwise op's code: an exponent, a way to approximate, a dtype to convert to."""
    if call.op.startswith("aten.pow"):
        return f"({call.arg(1)})"
    words = [a for a in call.args if isinstance(a, str)]
    if call.op == "aten._to_copy" and call.outs[0]:
        return f"({call.ins[0].dtype}>{call.outs[0].dtype})"
    return f"({words[0]})" if words else ""


def _pattern(call: Call, marks: Sequence[str]) -> str:
    """How operands spread over the result: "=" of its shape, "-" one number, "|" along rows or columns."""
    out = call.outs[0].numel if call.outs[0] else 0
    signs = "".join(
        "=" if s.numel == out else "-" if s.numel <= 1 else "|" for s in call.ins if s.numel <= out or not out
    )
    return signs + ("'" if any(m for m, s in zip(marks, call.ins, strict=True) if s.numel == out) else "")


def _copies(call: Call, marks: Sequence[str]) -> bool:
    """Whether a view has to copy: one with another shape, of a tensor that lies so that it has no such view."""
    from laminar.cost.ops.strides import strides_of, viewed

    if call.op.split(".")[1] not in ("view", "_unsafe_view", "reshape") or not marks or not marks[0]:
        return False
    shape = call.ins[0].shape
    return viewed(shape, strides_of(shape, marks[0]), call.out.shape) is None


def _moved(call: Call, marks: Sequence[str], family: str) -> float:
    """Bytes read and written."""
    read = [s.nbytes for s in call.ins]
    made = sum(o.nbytes for o in call.outs if o)
    for i, (spec, mark) in enumerate(zip(call.ins, marks, strict=True)):
        if mark == "e":
            first = next((n for n in spec.shape if n > 1), 1)
            read[i] = spec.nbytes // first
    if family == "indexing" and call.ins:
        # Of the table only the rows that are asked for are read; a gradient of it is cleared and then added to.
        wide = max(range(len(read)), key=lambda i: read[i])
        rest = sum(read) - read[wide]
        if "backward" in call.op or call.op.startswith(("aten.index_put", "aten.scatter", "aten.index_add")):
            return float(sum(read) + made + min(read[0], made))
        return float(rest + 2 * made)
    if call.op == "box.slice":
        return 2.0 * made
    if family == "draws":
        return 8.0 * (call.outs[0].numel if call.outs[0] else 0)
    return float(sum(read) + made)


def refs_of(args: object) -> list[Ref]:
    """Tensors among arguments, in order."""
    if isinstance(args, Ref):
        return [args]
    return [r for a in args for r in refs_of(a)] if isinstance(args, (tuple, list)) else []


def item_bytes(dtype: str) -> int:
    """Size of an element; tf32 is stored as f32, f8 in one byte."""
    return {"tf32": 4, "f8": 1}.get(dtype) or ITEM_BYTES[dtype]

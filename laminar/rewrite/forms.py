"""The vocabulary of rewrite rules: forms, each of which can be read from a graph and written into one.

A form is an op, or several that mean the same: `scale` is a multiplication by a number however it is written, `turn`
any reordering of dims, `each` any op that looks at one element at a time. Reading a value gives the form's arguments
in the order in which rules write them, tensors as `Seen`, everything else as it is; writing takes the same. To add an
op to the language, add a line to `FORMS`; `tests/rewrite/test_language.py` writes what every form reads and compares
the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from laminar.ir.graph import Node, refs_in
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import FLOATS, ITEM_BYTES, TensorSpec
from laminar.rewrite.edit import RESHAPING, TURNS, Lookup, NoFit, TensorShape, Writer, compose, turn_of


@dataclass(frozen=True, slots=True)
class Seen:
    """A value, in the shape in which a rule sees it if that is not its own."""

    ref: Ref
    shape: TensorShape | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """A form found: its arguments, and the nodes it is made of."""

    args: tuple[Any, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """How a word of the language is read and written."""

    ops: tuple[str, ...]
    """What makes it, where it is all that a rule looks for."""
    read: Callable[[Lookup, Ref], list[Reading]]
    write: Callable[..., Ref]
    """Called with the writer and the arguments, tensors as references."""


ONES = (1, 1)
"""The factors with which addmm adds a plain bias to a plain product."""


Pick = Callable[[Lookup, Node], tuple[Any, ...] | None]


def _op(op: str, pick: Pick, write: Callable[..., Ref]) -> Form:
    """A form that is one op; `pick` gives its arguments, or None if this use of the op is not meant."""

    def read(look: Lookup, ref: Ref) -> list[Reading]:
        node = look.maker(ref, op)
        args = pick(look, node) if node is not None else None
        return [Reading(tuple(Seen(a) if isinstance(a, Ref) else a for a in args), (ref.name,))] if args else []

    return Form((op,), read, write)


# --- products --------------------------------------------------------------------------------


def _product(w: Writer, op: str, a: Ref, b: Ref, *before: Ref) -> Ref:
    x, y = w.specs[a], w.specs[b]
    if x.shape[-1] != y.shape[-2] or x.shape[:-2] != y.shape[:-2] or x.dtype != y.dtype:
        raise NoFit
    tail = ONES if before else ()
    return w.emit(op, (*before, a, b, *tail), TensorSpec((*x.shape[:-1], y.shape[-1]), x.dtype))


def _addmm(look: Lookup, node: Node) -> tuple[Any, ...] | None:
    bias = look.specs[node.args[0]].shape
    plain = tuple(node.args[3:]) in (ONES, (), (1,)) and node.outs[0] is not None
    return node.args[:3] if plain and len(bias) == 1 and node.outs[0] and bias[0] == node.outs[0].shape[-1] else None


def _write_addmm(w: Writer, bias: Ref, x: Ref, weight: Ref) -> Ref:
    if w.specs[bias].shape != (w.specs[weight].shape[1],):
        raise NoFit
    return _product(w, "aten.addmm", x, weight, bias)


# --- order, shape and number -----------------------------------------------------------------


def _read_turn(look: Lookup, ref: Ref) -> list[Reading]:
    node = look.maker(ref)
    order = turn_of(node, look.specs) if node is not None else None
    return [Reading((Seen(node.args[0]), order), (ref.name,))] if node is not None and order is not None else []


def _fixed_turn(order: TensorShape) -> Form:
    def read(look: Lookup, ref: Ref) -> list[Reading]:
        return [Reading(r.args[:1], r.nodes) for r in _read_turn(look, ref) if r.args[1] == order]

    return Form(TURNS, read, lambda w, a: w.turn(a, order))


def _read_cat(look: Lookup, ref: Ref) -> list[Reading]:
    """A `cat`, or one along the last dim whose other dims are then seen as rows."""
    node = look.maker(ref, "aten.cat")
    if node is not None:
        d = (node.args[1] if len(node.args) > 1 else 0) % len(look.specs[ref].shape)
        return [Reading((tuple(map(Seen, node.args[0])), d), (ref.name,))]
    seen = look.maker(ref, *RESHAPING)
    joined = look.maker(seen.args[0], "aten.cat") if seen is not None else None
    if joined is None:
        return []
    shape, source = look.specs[ref].shape, look.specs[Ref(joined.name)].shape
    along_last = len(source) > 0 and (joined.args[1] if len(joined.args) > 1 else 0) % len(source) == len(source) - 1
    if not along_last or not shape or shape[-1] != source[-1]:
        return []
    parts = tuple(Seen(p, (*shape[:-1], look.specs[p].shape[-1])) for p in joined.args[0])
    return [Reading((parts, len(shape) - 1), (ref.name, joined.name))]


def _read_join(look: Lookup, ref: Ref) -> list[Reading]:
    """A `cat` of two, each by its own name."""
    return [Reading((*r.args[0], r.args[1]), r.nodes) for r in _read_cat(look, ref) if len(r.args[0]) == 2]


SCALES = ("aten.mul.Scalar", "aten.div.Scalar", "aten.mul.Tensor", "aten.div.Tensor")


def _scale(look: Lookup, ref: Ref) -> list[Reading]:
    node = look.maker(ref, *SCALES)
    if node is None or len(look.notes[ref.name].reads) != 1 or not isinstance(node.args[0], Ref):
        return []
    number = node.args[1]
    if isinstance(number, (bool, Ref)) or not isinstance(number, (int, float)) or not look.specs[ref].is_float:
        return []
    if look.specs[node.args[0]].dtype != look.specs[ref].dtype or (number == 0 and ".div." in node.op):
        return []
    return [Reading((Seen(node.args[0]), 1 / number if ".div." in node.op else float(number)), (ref.name,))]


def _scale_behind(look: Lookup, ref: Ref) -> list[Reading]:
    """A scale, or a view of one: the scaled value is then seen in the shape of the view."""
    view = look.maker(ref, *RESHAPING)
    if view is None:
        return _scale(look, ref)
    shape = look.specs[ref].shape
    return [Reading((Seen(r.args[0].ref, shape), r.args[1]), (ref.name, *r.nodes)) for r in _scale(look, view.args[0])]


def _scale_of_view(look: Lookup, ref: Ref) -> list[Reading]:
    """A scale; what it scales is taken as it was before a view, since a number does not care for shapes.

    Only for what a rule looks for as a whole: what replaces it is brought into the shape of the old result.
    """
    out = []
    for reading in _scale(look, ref):
        source, number = reading.args
        view = look.maker(source.ref, *RESHAPING)
        if view is not None and look.uses(source.ref) == 1:
            out.append(Reading((Seen(view.args[0]), number), (*reading.nodes, view.name)))
        out.append(reading)
    return out


EACH = frozenset(
    f"aten.{name}"
    for name in """relu gelu silu tanh sigmoid exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal abs sign sin
    cos erf floor ceil round trunc hardtanh hardswish hardsigmoid leaky_relu elu softplus neg logical_not bitwise_not
    add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar add.Tensor sub.Tensor mul.Tensor div.Tensor
    pow.Tensor_Scalar _to_copy ge.Scalar gt.Scalar le.Scalar lt.Scalar eq.Scalar ne.Scalar clamp""".split()
)
"""Ops that, given one tensor and numbers, look at one element at a time."""


def _each(look: Lookup, ref: Ref) -> list[Reading]:
    node = look.maker(ref, *EACH)
    if node is None or len(look.notes[ref.name].reads) != 1 or not isinstance(node.args[0], Ref):
        return []
    spec = look.specs[ref]
    if look.specs[node.args[0]].shape != spec.shape:
        return []
    return [Reading((Seen(node.args[0]), (node.op, node.args[1:], spec.dtype)), (ref.name,))]


def _write_each(w: Writer, a: Ref, f: tuple[str, tuple[Any, ...], str]) -> Ref:
    return w.emit(f[0], (a, *f[1]), TensorSpec(w.specs[a].shape, f[2]))


TAKES = ("aten.slice.Tensor", "aten.select.int", "aten.index_select", "aten.gather", "aten.embedding")


def _take(look: Lookup, ref: Ref) -> list[Reading]:
    """Ops that only pick elements of their first tensor."""
    node = look.maker(ref, *TAKES)
    if node is None or not isinstance(node.args[0], Ref):
        return []
    source, rest = node.args[0], node.args[1:]
    if source in tuple(refs_in(rest)):
        return []
    return [Reading((Seen(source), (node.op, rest, look.specs[ref].shape)), (ref.name,))]


def _write_take(w: Writer, a: Ref, m: tuple[str, tuple[Any, ...], TensorShape]) -> Ref:
    return w.emit(m[0], (a, *m[1]), TensorSpec(m[2], w.specs[a].dtype))


def _expanded(w: Writer, a: Ref, shape: TensorShape) -> Ref:
    return w.emit("aten.expand", (a, shape, False), TensorSpec(shape, w.specs[a].dtype))


def _pair(op: str) -> Form:
    """A pointwise op of two tensors that may change places."""

    def read(look: Lookup, ref: Ref) -> list[Reading]:
        node = look.maker(ref, f"aten.{op}")
        if node is None or len(look.notes[ref.name].reads) != 2 or tuple(node.args[2:]) not in ((), (1,)):
            return []
        a, b = Seen(node.args[0]), Seen(node.args[1])
        if look.specs[a.ref].dtype != look.specs[b.ref].dtype:
            return []
        return [Reading((a, b), (ref.name,)), Reading((b, a), (ref.name,))]

    tail = (1,) if op == "add.Tensor" else ()
    return Form((f"aten.{op}",), read, lambda w, a, b: _point(w, op, a, b, tail))


def _point(w: Writer, op: str, a: Ref, b: Ref, tail: tuple[int, ...]) -> Ref:
    x, y = w.specs[a].shape[::-1], w.specs[b].shape[::-1]
    if any(m != n and 1 not in (m, n) for m, n in zip(x, y, strict=False)) or w.specs[a].dtype != w.specs[b].dtype:
        raise NoFit
    return w.point(op, a, b, *tail)


def _widens(old: str, new: str) -> bool:
    return old in FLOATS and new in FLOATS and ITEM_BYTES[new] > ITEM_BYTES[old]


def _cast(only_wider: bool) -> Callable[[Lookup, Ref], list[Reading]]:
    def read(look: Lookup, ref: Ref) -> list[Reading]:
        node = look.maker(ref, "aten._to_copy")
        if node is None:
            return []
        old, new = look.specs[node.args[0]].dtype, look.specs[ref].dtype
        fits = _widens(old, new) if only_wider else old in FLOATS and new in FLOATS
        return [Reading((Seen(node.args[0]), new), (ref.name,))] if fits else []

    return read


def _reduced(w: Writer, a: Ref, how: tuple[TensorShape, bool]) -> Ref:
    rank = len(w.specs[a].shape)
    return w.sum(a, tuple(d % rank for d in how[0]), how[1])


# --- look-ups and convolutions ---------------------------------------------------------------


def _write_embedding(w: Writer, table: Ref, index: Ref, how: tuple[Any, ...]) -> Ref:
    t = w.specs[table]
    return w.emit("aten.embedding", (table, index, *how), TensorSpec((*w.specs[index].shape, t.shape[1]), t.dtype))


def _write_embedding_gradient(w: Writer, grad: Ref, index: Ref, how: tuple[Any, ...]) -> Ref:
    g = w.specs[grad]
    if g.shape[:-1] != w.specs[index].shape:
        raise NoFit
    return w.emit("aten.embedding_dense_backward", (grad, index, *how), TensorSpec((how[0], g.shape[-1]), g.dtype))


def _convolution(biased: bool) -> Callable[[Lookup, Node], tuple[Any, ...] | None]:
    def pick(look: Lookup, node: Node) -> tuple[Any, ...] | None:
        x, weight, bias, *how = node.args
        if how[3] or how[5] != 1 or (bias is not None) != biased:
            return None
        return (x, weight, bias, tuple(how)) if biased else (x, weight, tuple(how))

    return pick


def _write_convolution(w: Writer, x: Ref, weight: Ref, how: tuple[Any, ...], bias: Ref | None = None) -> Ref:
    s, k = w.specs[x], w.specs[weight]
    if s.shape[1] != k.shape[1] or s.dtype != k.dtype:
        raise NoFit

    def at(given: TensorShape, d: int) -> int:
        return given[d] if len(given) > 1 else given[0]

    space = tuple(
        (n + 2 * at(how[1], d) - at(how[2], d) * (k.shape[2 + d] - 1) - 1) // at(how[0], d) + 1
        for d, n in enumerate(s.shape[2:])
    )
    return w.emit("aten.convolution", (x, weight, bias, *how), TensorSpec((s.shape[0], k.shape[0], *space), s.dtype))


def _convolution_gradient(which: int) -> Form:
    """One of the three results of a convolution's backward: of the input, the weight, the bias."""

    def read(look: Lookup, ref: Ref) -> list[Reading]:
        node = look.makers.get(ref.name)
        if node is None or node.op != "aten.convolution_backward" or ref.index != which:
            return []
        grad, x, weight, _, *how, _ = node.args
        if how[3] or how[5] != 1:
            return []
        return [Reading((Seen(grad), Seen(x), Seen(weight), tuple(how)), (ref.name,))]

    def write(w: Writer, grad: Ref, x: Ref, weight: Ref, how: tuple[Any, ...]) -> Ref:
        g, s, k = w.specs[grad], w.specs[x], w.specs[weight]
        if g.shape[1] != k.shape[0] or s.shape[1] != k.shape[1]:
            raise NoFit
        outs = [s, k, TensorSpec((k.shape[0],), k.dtype)]
        mask = tuple(i == which for i in range(3))
        bias = (k.shape[0],) if which == 2 else None
        args = (grad, x, weight, bias, *how, mask)
        made = w.emit("aten.convolution_backward", args, *(o if m else None for o, m in zip(outs, mask, strict=True)))
        return Ref(made.name, which)

    return Form(("aten.convolution_backward",), read, write)


FORMS: dict[str, Form] = {
    "mm": _op("aten.mm", lambda look, n: n.args, lambda w, a, b: _product(w, "aten.mm", a, b)),
    "bmm": _op("aten.bmm", lambda look, n: n.args, lambda w, a, b: _product(w, "aten.bmm", a, b)),
    "addmm": _op("aten.addmm", _addmm, _write_addmm),
    "turn": Form(TURNS, _read_turn, lambda w, a, order: w.turn(a, order)),
    "t": _fixed_turn((1, 0)),
    "bt": _fixed_turn((0, 2, 1)),
    "cat": Form(("aten.cat",), _read_cat, lambda w, parts, d: w.cat(parts, d)),
    "join": Form(("aten.cat",), _read_join, lambda w, a, b, d: w.cat([a, b], d)),
    "relu": _op("aten.relu", lambda look, n: n.args, lambda w, a: w.point("relu", a)),
    "scale": Form(SCALES, _scale_behind, lambda w, a, s: w.mul(a, s)),
    "vscale": Form(SCALES, _scale_of_view, lambda w, a, s: w.mul(a, s)),
    "each": Form(tuple(sorted(EACH)), _each, _write_each),
    "take": Form(TAKES, _take, _write_take),
    "expand": _op("aten.expand", lambda look, n: n.args[:2], _expanded),
    "power": _op(
        "aten.pow.Tensor_Scalar", lambda look, n: n.args[:2], lambda w, a, e: w.point("pow.Tensor_Scalar", a, e)
    ),
    "mul": _pair("mul.Tensor"),
    "add": _pair("add.Tensor"),
    "cast": Form(("aten._to_copy",), _cast(False), lambda w, a, d: w.cast(a, d)),
    "widen": Form(("aten._to_copy",), _cast(True), lambda w, a, d: w.cast(a, d)),
    "rsum": _op(
        "aten.sum.dim_IntList",
        lambda look, n: (
            (n.args[0], (n.args[1], n.args[2]))
            if n.args[1] and len(n.args) > 2 and n.args[3:] in ((), (None,))
            else None
        ),
        _reduced,
    ),
    "rowsum": _op(
        "aten.sum.dim_IntList",
        lambda look, n: n.args[:1] if n.args[1:] == ((0,), False, None) else None,
        lambda w, a: _reduced(w, a, ((0,), False)),
    ),
    "embedding": _op("aten.embedding", lambda look, n: (*n.args[:2], n.args[2:]), _write_embedding),
    "embedding_grad": _op(
        "aten.embedding_dense_backward",
        lambda look, n: None if n.args[4] else (*n.args[:2], n.args[2:]),
        _write_embedding_gradient,
    ),
    "conv": _op("aten.convolution", _convolution(False), _write_convolution),
    "convb": _op(
        "aten.convolution",
        _convolution(True),
        lambda w, x, weight, bias, how: _write_convolution(w, x, weight, how, bias),
    ),
    "conv_dx": _convolution_gradient(0),
    "conv_dw": _convolution_gradient(1),
    "conv_db": _convolution_gradient(2),
}
"""Every word of the language, but `sum` and `part`, which are about members (`match.py`)."""

FUNCTIONS: dict[str, Callable[..., Any]] = {"times": lambda r, s: r * s, "then": compose}
"""Words that work on plain arguments."""

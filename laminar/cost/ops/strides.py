"""How every tensor of a program lies in memory, worked out without running it.

It matters three times: a product whose operand is transposed takes another path through the library, an
elementwise op over a permuted tensor reads with strides, and a view of a tensor that can't be viewed so is a
copy. Strides are followed line by line, by torch's own rules: views compute them, elementwise ops keep the order
of dims of their first large operand, everything else makes contiguous results. What is assumed where torch
decides by device (attention) is what CPU kernels do. Layers repeat, so each form of a line
(`cost.forms`) is followed once for every way in which its operands lie.

A *mark* is a stride pattern in a word, as keys of the table write it: "" contiguous, "'" the last two dims swapped,
"0213" another order of dims without gaps, "s" with gaps, "e" with repetition. A line's marks end with "!" if its
result has a place that is there already: gradients that a product writes into a buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from laminar.cost.ops.interned import Forms, forms_of
from laminar.ir.ops import FREE, HOST_COPIES, WRITE_INTO_PLACE
from laminar.ir.program import Program
from laminar.ir.serial.codec import Ref
from laminar.rules.notation import Call

Strides = tuple[int, ...]

KEEPS_ORDER = frozenset(
    f"aten.{n}"
    for n in """add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar neg
    relu gelu silu tanh sigmoid exp log sqrt rsqrt abs erf reciprocal pow.Tensor_Scalar cos sin threshold_backward
    gelu_backward silu_backward tanh_backward sigmoid_backward where.self masked_fill.Scalar masked_fill.Tensor clone
    _to_copy maximum minimum clamp clamp_min clamp_max ge.Scalar gt.Scalar le.Scalar lt.Scalar eq.Scalar ne.Scalar
    bitwise_not bitwise_and.Tensor logical_not logical_and eq.Tensor ne.Tensor leaky_relu elu hardtanh log1p expm1
    native_dropout_backward log_sigmoid_forward""".split()
)
"""Ops whose result lies like what they read."""


def contiguous(shape: Sequence[int]) -> Strides:
    """Row-major strides, in elements."""
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def is_contiguous(shape: Sequence[int], strides: Strides) -> bool:
    """As torch has it: strides of dims of size one do not count."""
    return all(n == 1 or s == want for n, s, want in zip(shape, strides, contiguous(shape), strict=True)) or 0 in shape


def order_of(shape: Sequence[int], strides: Strides) -> tuple[int, ...]:
    """Dims from the outermost in memory to the innermost."""
    return tuple(sorted(range(len(shape)), key=lambda d: (-strides[d] if shape[d] > 1 else 0, d)))


def mark_of(shape: Sequence[int], strides: Strides) -> str:
    """The stride pattern in a word."""
    if is_contiguous(shape, strides):
        return ""
    if any(s == 0 and n > 1 for n, s in zip(shape, strides, strict=True)):
        return "e"
    real = [d for d in range(len(shape)) if shape[d] > 1]
    order = sorted(real, key=lambda d: -strides[d])
    step = 1
    for d in reversed(order):
        if strides[d] != step:
            return "s"
        step *= shape[d]
    full = _with_ones(len(shape), real, order)
    swapped = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    return "'" if full == swapped else "".join(map(str, full))


def _with_ones(dims: int, real: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """An order of all dims: those of size one stay where they stand."""
    rest = iter(order)
    return tuple(next(rest) if d in real else d for d in range(dims))


def strides_of(shape: Sequence[int], mark: str) -> Strides:
    """Strides that a mark stands for; gaps double the innermost dim, repetition is along the outermost."""
    if mark == "e":
        first = next((d for d, n in enumerate(shape) if n > 1), 0)
        rest = contiguous([1 if d == first else n for d, n in enumerate(shape)])
        return tuple(0 if d == first else s for d, s in enumerate(rest))
    if mark == "s":
        return contiguous([*shape[:-1], 2 * shape[-1]])
    order = list(range(len(shape)))
    if mark == "'":
        order[-2:] = reversed(order[-2:])
    elif mark:
        order = [int(c) for c in mark]
    packed = contiguous([shape[d] for d in order])
    out = [0] * len(shape)
    for d, s in zip(order, packed, strict=True):
        out[d] = s
    return tuple(out)


def viewed(shape: Sequence[int], strides: Strides, new: Sequence[int]) -> Strides | None:
    """Strides of a view with another shape, or None where there is none and a reshape copies."""
    if 0 in shape:
        return contiguous(new)
    chunks: list[tuple[int, int]] = []  # (size, innermost stride) of stretches that lie without a break
    for n, s in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if chunks and chunks[-1][1] == n * s:
            chunks[-1] = (chunks[-1][0] * n, s)
        else:
            chunks.append((n, s))
    out: list[int] = []
    at, left = len(chunks) - 1, 1
    step = 1
    for n in reversed(new):
        if n == 1:
            out.append(step)
            continue
        if left == 1:
            if at < 0:
                return None
            left, step = chunks[at]
            at -= 1
        if left % n:
            return None
        out.append(step)
        step, left = step * n, left // n
    return tuple(reversed(out))


@dataclass(frozen=True)
class Layouts:
    """What was worked out for a program."""

    strides: Mapping[Ref, Strides]
    marks: Mapping[str, tuple[str, ...]]
    """For each line, how its operands lie, and "!" if it is told where to write."""
    copies: frozenset[str]
    """Lines that are views in name and copies in fact."""


class Lying(NamedTuple):
    """How the operands and the results of a line lie. Lines of one form whose operands lie alike share it."""

    call: Call
    marks: tuple[str, ...]
    made: tuple[Strides | None, ...]
    """Strides of what it makes; None where they are the usual ones."""
    copies: bool
    """Whether it is a view in name and a copy in fact."""


def layouts(program: Program, calls: Mapping[str, Call]) -> Layouts:
    """Strides of every value, given the local call of every line."""
    strides: dict[Ref, Strides] = {}
    marks: dict[str, tuple[str, ...]] = {}
    copies: set[str] = set()
    forms = forms_of(program)
    for instr, lying in zip(
        program.instrs, follow_strides(forms, [calls[i.name] for i in forms.examples]), strict=True
    ):
        marks[instr.name] = lying.marks
        if lying.copies:
            copies.add(instr.name)
        strides.update({Ref(instr.name, k): st for k, st in enumerate(lying.made) if st is not None})
    return Layouts(strides, marks, frozenset(copies))


def follow_strides(forms: Forms, calls: Sequence[Call]) -> list[Lying]:
    """How everything lies, line by line, given the local call of every form."""
    strides: list[Strides | None] = [None] * forms.values
    told = written_in_place(forms)
    known: dict[Any, Lying] = {}
    out = []
    for n, (form, reads, first) in enumerate(zip(forms.of, forms.reads, forms.makes, strict=True)):
        given = [strides[v] for v in reads]
        state = (form, n in told, *given)
        lying = known.get(state)
        if lying is None:
            notes, key = calls[form].notes, (tuple(given), n in told)
            lying = notes.get(key)
            if lying is None:
                lying = notes[key] = _lying(calls[form], given, n in told)
            known[state] = lying
        for k, st in enumerate(lying.made):
            if st is not None:
                strides[first + k] = st
        out.append(lying)
    return out


def written_in_place(forms: Forms) -> set[int]:
    """Lines whose result is written straight into a gradient's buffer (as `runtime.module` has it on CPUs)."""
    outputs = forms.program.outputs
    uses = Counter(chain.from_iterable(forms.reads))
    uses.update(forms.number(o.ref) for o in outputs)
    leaving = {forms.number(o.ref) for o in outputs}
    wanted = {forms.number(o.ref) for o in outputs if o.kind == "grad"}
    reduces = [i.kind == "all_reduce" for i in forms.examples]
    writes = [i.op in WRITE_INTO_PLACE for i in forms.examples]
    for form, reads, first in zip(forms.of, forms.reads, forms.makes, strict=True):
        if reduces[form] and (len(reads) > 1 or first in leaving):
            wanted.update(reads)
    lines = enumerate(zip(forms.of, forms.makes, strict=True))
    return {n for n, (form, first) in lines if writes[form] and first in wanted and uses[first] == 1}


def _lying(call: Call, given: Sequence[Strides | None], told: bool) -> Lying:
    """One line, given how what it reads lies."""
    whole = [st or contiguous(s.shape) for st, s in zip(given, call.ins, strict=True)]
    marks = tuple(mark_of(s.shape, st) for s, st in zip(call.ins, whole, strict=True))
    found = _made(call, whole)
    made = found or [contiguous(o.shape) if o else () for o in call.outs]
    unusual = (None if o is None or is_contiguous(o.shape, st) else st for o, st in zip(call.outs, made, strict=True))
    return Lying(call, (*marks, "!") if told else marks, tuple(unusual), found is None)


def _made(call: Call, given: list[Strides]) -> list[Strides] | None:
    """Strides of what a line makes; None for a view that has to copy."""
    usual = [contiguous(o.shape) if o else () for o in call.outs]
    if call.op.startswith("box.") or not call.ins:
        return usual
    if call.op in FREE or call.op.startswith("aten.squeeze"):
        return _view(call, given[0])
    if call.op in HOST_COPIES:  # as they lay, packed if they had gaps
        pairs = zip(call.outs, given, usual, strict=False)
        return [st if o and mark_of(o.shape, st) not in ("s", "e") else plain for o, st, plain in pairs]
    if call.op in KEEPS_ORDER:
        return [_elementwise(call, given), *usual[1:]]
    if call.op == "laminar.attention":
        # With q transposed from (batch, token, head) the result is as well; sums of rows lie head by head.
        out = strides_of(call.out.shape, "0213") if mark_of(call.ins[0].shape, given[0]) else usual[0]
        return [out, *(strides_of(o.shape, "'") if o else () for o in call.outs[1:])]
    if call.op == "laminar.attention_backward":
        turned = [strides_of(o.shape, "0213") if o else () for o in call.outs]
        return turned if call.ins[1].shape[1] == call.ins[2].shape[1] else [turned[0], *usual[1:]]
    return usual


def _elementwise(call: Call, given: list[Strides]) -> Strides:
    """The order of dims of the first operand that has the result's shape, without its gaps."""
    shape = call.out.shape
    for spec, st in zip(call.ins, given, strict=True):
        if spec.shape == shape and mark_of(shape, st) != "e":
            order = order_of(shape, st)
            packed = contiguous([shape[d] for d in order])
            return tuple(packed[order.index(d)] for d in range(len(shape)))
    return contiguous(shape)


def _view(call: Call, st: Strides) -> list[Strides] | None:
    x, op, args = call.ins[0].shape, call.op.split(".")[1], call.args
    out = call.outs[0].shape if call.outs[0] else ()
    dims = len(x)
    if op == "t":
        return [tuple(reversed(st))]
    if op == "permute":
        return [tuple(st[d % dims] for d in args[1])]
    if op == "transpose":
        swapped = list(st)
        a, b = args[1] % dims, args[2] % dims
        swapped[a], swapped[b] = st[b], st[a]
        return [tuple(swapped)]
    if op == "expand":
        lead = len(out) - dims
        pairs = zip(x, st, out[lead:], strict=True)
        return [(*(0,) * lead, *(0 if n == 1 and m > 1 else s for n, s, m in pairs))]
    if op == "slice":
        d = args[1] % dims
        return [tuple(s * (args[4] if i == d and len(args) > 4 and args[4] else 1) for i, s in enumerate(st))]
    if op == "select":
        d = args[1] % dims
        return [st[:d] + st[d + 1 :]]
    if op == "unbind":
        d = (args[1] if len(args) > 1 else 0) % dims
        return [st[:d] + st[d + 1 :]] * len(call.outs)
    if op in ("split", "split_with_sizes"):
        return [st] * len(call.outs)
    if op in ("alias", "detach"):
        return [st]
    found = viewed(x, st, out)  # view, reshape, squeeze, unsqueeze
    return None if found is None else [found]

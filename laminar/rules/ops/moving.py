"""Rules of ops that move, repeat, cut or make elements without computing much with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from laminar.ir.tensor import FLOATS, ITEM_BYTES
from laminar.rules.notation import Call, Rule, RuleFn
from laminar.rules.ops.families import letters, pointwise, text


def moving_rule(words: str, sizes: Mapping[str, int] | None = None) -> Rule:
    """A rule of an op that only moves elements of its one input: sums and extremes pass."""
    return Rule(words, sizes=sizes or {}, linear="0", through="0")


def extreme(kind: str) -> RuleFn:
    """maximum and minimum: partial extremes of both inputs combine."""

    def rule(call: Call) -> Rule:
        return replace(pointwise()(call), reduce={}, through=f"{kind}:01")

    return rule


def also_through(kind: str, inner: RuleFn) -> RuleFn:
    """amax of partial maxima is a partial maximum."""
    return lambda call: replace(inner(call), through=f"{kind}:0")


def cast(call: Call) -> Rule:
    """A dtype change; sums only pass where the new dtype holds every value of the old."""
    old, new = call.ins[0].dtype, call.out.dtype
    widens = old == new or (old in FLOATS and new in FLOATS and ITEM_BYTES[new] > ITEM_BYTES[old])
    return pointwise("0" if widens else "")(call)


def permute(call: Call) -> Rule:
    """Dims in another order."""
    rank = len(call.ins[0].shape)
    names = letters(rank)
    return moving_rule(text(call, [names], [[names[d % rank] for d in call.arg(1)]]))


def transpose_2d(call: Call) -> Rule:
    """`t`: at most two dims."""
    names = letters(len(call.ins[0].shape))
    return moving_rule(text(call, [names], [names[::-1]]))


def transpose(call: Call) -> Rule:
    """Two dims swapped."""
    rank = len(call.ins[0].shape)
    names = letters(rank)
    out = list(names)
    if rank:
        a, b = call.arg(1) % rank, call.arg(2) % rank
        out[a], out[b] = out[b], out[a]
    return moving_rule(text(call, [names], [out]))


def expand_rule(call: Call) -> Rule:
    """Stretched dims may be split though the input has nothing to split there."""
    return pointwise("0", through=True)(call)


def repeat(call: Call) -> Rule:
    """Each dim tiled r times is r blocks of itself."""
    source, target = call.ins[0].shape, call.out.shape
    offset = len(target) - len(source)
    if not call.out.numel:
        return Rule(text(call, [["."] * len(source)], [["."] * len(target)]))
    names = letters(len(source))
    out = ["."] * offset
    sizes = {}
    for name, n, m in zip(names, source, target[offset:], strict=True):
        out.append(name if n == m else f"({m // n} {name})")
        sizes[name] = n
    return moving_rule(text(call, [names], [out]), sizes)


def _blocks(n: int, part: int, name: str) -> str:
    return f"({n // part} {name})" if part and n % part == 0 and n != part else name if n == part else "."


def cat(call: Call) -> Rule:
    """Along its dim equal parts are blocks; parts of other sizes stay whole."""
    live = [s for s in call.ins if s.shape != (0,)]
    rank = len(call.out.shape)
    d = (call.arg(1) or 0) % rank
    names = letters(rank)
    part = live[0].shape[d] if live else 0
    same = all(s.shape[d] == part for s in live) and len(live) == len(call.ins)
    inner = list(names)
    outer = list(names)
    inner[d] = names[d] if same else "."
    outer[d] = _blocks(call.out.shape[d], part, names[d]) if same else "."
    ins = [inner if s.shape != (0,) else ["."] for s in call.ins]
    group = "+".join(map(str, range(len(call.ins)))) if len(call.ins) > 1 else "0"
    return Rule(text(call, ins, [outer]), linear=group, through=group)


def stack(call: Call) -> Rule:
    """The new dim is never split."""
    rank = len(call.out.shape)
    d = (call.arg(1) or 0) % rank
    names = letters(rank - 1)
    group = "+".join(map(str, range(len(call.ins)))) if len(call.ins) > 1 else "0"
    return Rule(text(call, [names] * len(call.ins), [[*names[:d], ".", *names[d:]]]), linear=group, through=group)


def split_rule(call: Call) -> Rule:
    """Equal parts are blocks of the dim."""
    rank = len(call.ins[0].shape)
    d = (call.arg(2) or 0) % rank
    names = letters(rank)
    part = call.out.shape[d]
    same = all(o is not None and o.shape[d] == part for o in call.outs)
    source, out = list(names), list(names)
    source[d] = _blocks(call.ins[0].shape[d], part, names[d]) if same else "."
    out[d] = names[d] if same else "."
    return moving_rule(text(call, [source], [out] * len(call.outs)))


def unbind(call: Call) -> Rule:
    """The dim taken apart is never split."""
    rank = len(call.ins[0].shape)
    d = (call.arg(1) or 0) % rank
    names = letters(rank)
    source = [*names[:d], ".", *names[d + 1 :]]
    return moving_rule(text(call, [source], [[*names[:d], *names[d + 1 :]]] * len(call.outs)))


def _cut(n: int, part: int, start: int, step: int, name: str) -> tuple[str, str]:
    """Factors of a dim before and after a slice: whole, an aligned block of it, or not splittable."""
    if part == n and step == 1:
        return name, name
    if part and step == 1 and n % part == 0 and start % part == 0:
        return f"({n // part} {name})", name
    return ".", "."


def _start(start: int | None, n: int) -> int:
    start = 0 if start is None else start
    return max(start + n, 0) if start < 0 else min(start, n)


def slice_(call: Call) -> Rule:
    """A slice that takes one of several equal blocks splits inside the blocks."""
    rank = len(call.ins[0].shape)
    d = (call.arg(1) or 0) % rank
    n, part = call.ins[0].shape[d], call.out.shape[d]
    names = letters(rank)
    source, out = list(names), list(names)
    source[d], out[d] = _cut(n, part, _start(call.arg(2), n), call.arg(4) or 1, names[d])
    return moving_rule(text(call, [source], [out]))


def slice_backward(call: Call) -> Rule:
    """slice_backward(grad, sizes, dim, start, end, step)."""
    rank = len(call.out.shape)
    d = call.arg(2) % rank
    names = letters(rank)
    source, out = list(names), list(names)
    n, part = call.out.shape[d], call.ins[0].shape[d]
    out[d], source[d] = _cut(n, part, _start(call.arg(3), n), call.arg(5), names[d])
    return moving_rule(text(call, [source], [out]))


def slice_scatter(call: Call) -> Rule:
    """slice_scatter(x, src, dim, start, end, step)."""
    rank = len(call.out.shape)
    d = (call.arg(2) or 0) % rank
    names = letters(rank)
    whole, source = list(names), list(names)
    n, part = call.out.shape[d], call.ins[1].shape[d]
    whole[d], source[d] = _cut(n, part, _start(call.arg(3), n), call.arg(5) or 1, names[d])
    return Rule(text(call, [whole, source], [whole]), linear="01", through="01")


def select(call: Call) -> Rule:
    """The dim indexed is never split."""
    rank = len(call.ins[0].shape)
    d = call.arg(1) % rank
    names = letters(rank)
    source = [*names[:d], ".", *names[d + 1 :]]
    return moving_rule(text(call, [source], [[*names[:d], *names[d + 1 :]]]))


def select_backward(call: Call) -> Rule:
    """select_backward(grad, sizes, dim, index)."""
    rank = len(call.out.shape)
    d = call.arg(2) % rank
    names = letters(rank)
    out = [*names[:d], ".", *names[d + 1 :]]
    return moving_rule(text(call, [[*names[:d], *names[d + 1 :]]], [out]))


def select_scatter(call: Call) -> Rule:
    """select_scatter(x, src, dim, index)."""
    rank = len(call.out.shape)
    d = call.arg(2) % rank
    names = letters(rank)
    whole = [*names[:d], ".", *names[d + 1 :]]
    return Rule(text(call, [whole, [*names[:d], *names[d + 1 :]]], [whole]), linear="01", through="01")


def diagonal(call: Call) -> Rule:
    """The two dims of the matrix stay whole, and so does the diagonal, which comes last."""
    rank = len(call.ins[0].shape)
    a = (call.arg(2) if call.arg(2) is not None else 0) % rank
    b = (call.arg(3) if call.arg(3) is not None else 1) % rank
    names = letters(rank)
    source = ["." if i in (a, b) else n for i, n in enumerate(names)]
    return moving_rule(text(call, [source], [[n for n in source if n != "."] + ["."]]))


def diagonal_back(first: int) -> RuleFn:
    """diagonal_backward and diag_embed: a diagonal, last in the input, becomes the two dims named at `first`."""

    def rule(call: Call) -> Rule:
        rank = len(call.out.shape)
        pair = {call.arg(first) % rank, call.arg(first + 1) % rank}
        out = ["." if i in pair else n for i, n in enumerate(letters(rank))]
        return Rule(text(call, [[n for n in out if n != "."] + ["."]], [out]), linear="0")

    return rule


def diagonal_scatter(call: Call) -> Rule:
    """diagonal_scatter(x, src, offset, dim1, dim2)."""
    rank = len(call.out.shape)
    pair = {call.arg(3) % rank, call.arg(4) % rank}
    out = ["." if i in pair else n for i, n in enumerate(letters(rank))]
    return Rule(text(call, [out, [n for n in out if n != "."] + ["."]], [out]), linear="01", through="01")


def pad(call: Call) -> Rule:
    """Padded dims stay whole; zeros keep sums."""
    rank = len(call.ins[0].shape)
    names = letters(rank)
    padded = {rank - 1 - i // 2 for i, n in enumerate(call.arg(1)) if n}
    side = ["." if i in padded else n for i, n in enumerate(names)]
    value = call.arg(2)
    return Rule(text(call, [side], [side]), linear="0" if not value else "")


def unfold(call: Call) -> Rule:
    """unfold(x, dim, size, step): windows along dim, the new dim last."""
    rank = len(call.ins[0].shape)
    names = letters(rank)
    if rank:
        names[call.arg(1) % rank] = "."
    return moving_rule(text(call, [names], [[*names, "."]]))


def unfold_backward(call: Call) -> Rule:
    """unfold_backward(grad, sizes, dim, size, step)."""
    rank = len(call.out.shape)
    names = letters(rank)
    if rank:
        names[call.arg(2) % rank] = "."
    return Rule(text(call, [[*names, "."]], [names]), linear="0")


def glu(call: Call) -> Rule:
    """glu(x, dim): the dim is two blocks, one gates the other."""
    d = call.arg(1) % len(call.out.shape)
    names = letters(len(call.out.shape))
    return Rule(text(call, [[f"(2 {n})" if i == d else n for i, n in enumerate(names)]], [names]))


def glu_backward(call: Call) -> Rule:
    """glu_backward(grad, x, dim)."""
    d = call.arg(2) % len(call.out.shape)
    names = letters(len(call.out.shape))
    double = [f"(2 {n})" if i == d else n for i, n in enumerate(names)]
    return Rule(text(call, [names, double], [double]), linear="0")


def complex_pairs(call: Call) -> Rule:
    """view_as_real and view_as_complex: the last dim of the real side is (real, imaginary)."""
    names = letters(min(len(call.ins[0].shape), len(call.out.shape)))
    sides = [[*names, "."] if len(s.shape) > len(names) else names for s in (call.ins[0], call.out)]
    return Rule(text(call, sides[:1], sides[1:]), linear="0")


def create(call: Call) -> Rule:
    """Made from nothing (or from the RNG key): any dim may be split."""
    names = letters(len(call.out.shape))
    return Rule(text(call, [["."] * len(s.shape) for s in call.ins], [names]))

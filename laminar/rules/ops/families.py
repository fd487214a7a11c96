"""Shapes of rules that many ops share: pointwise, reductions, reshapes, and ops blind to some dims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import Call, Rule, RuleFn


def letters(count: int, prefix: str = "d") -> list[str]:
    """`count` factor names."""
    return [f"{prefix}{i}" for i in range(count)]


def aligned(spec: TensorSpec, shape: tuple[int, ...], names: Sequence[str]) -> list[str]:
    """Factors of a tensor broadcast against `shape`: right-aligned, a stretched dim is never split."""
    offset = len(shape) - len(spec.shape)
    return [names[offset + i] if n == shape[offset + i] else "." for i, n in enumerate(spec.shape)]


def broadcast(specs: Iterable[TensorSpec]) -> tuple[int, ...]:
    """The shape of several tensors broadcast together."""
    out: list[int] = []
    for spec in specs:
        out = [1] * (len(spec.shape) - len(out)) + out
        for i, n in enumerate(spec.shape, len(out) - len(spec.shape)):
            out[i] = n if n != 1 else out[i]
    return tuple(out)


def pointwise(linear: str = "", through: bool = False) -> RuleFn:
    """Element by element, with broadcasting."""

    def rule(call: Call) -> Rule:
        shape = call.out.shape
        names = letters(len(shape))
        ins = [aligned(s, shape, names) for s in call.ins]
        outs = [aligned(o, shape, names) if o else [] for o in call.outs]
        groups = linear if len(call.ins) > 1 or linear in ("", "0") else "0" if "0" in linear.split("|") else ""
        return Rule(text(call, ins, outs), linear=groups, through="0" if through else "")

    return rule


def text(call: Call, ins: Sequence[Sequence[str]], outs: Sequence[Sequence[str]]) -> str:
    """A rule's text from the factors of each dim; a tensor without dims is `[]`."""
    left, right = (", ".join(" ".join(t) or "[]" for t in side) for side in (ins, outs))
    return f"{left} -> {right}"


def normal_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Dims as non-negative numbers; None or empty means all of them."""
    if dims is None or dims == ():
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(sorted(d % rank for d in dims)) if rank else ()


def reduction(
    dim_arg: int | None = 1,
    keep_arg: int | None = 2,
    kind: str | None = "sum",
    linear: bool = False,
    expand: bool = False,
) -> RuleFn:
    """Over some dims. `kind` is how the reduced factors combine across ranks; None: they can't."""

    def rule(call: Call) -> Rule:
        rank = len(call.ins[0].shape)
        dims = normal_dims(call.arg(dim_arg) if dim_arg is not None else None, rank)
        keep = bool(call.arg(keep_arg, False)) if keep_arg is not None else False
        if len(call.out.shape) == rank and rank and dims:
            keep = True
        names = letters(rank)
        if kind is None and not expand:
            source = ["." if i in dims else n for i, n in enumerate(names)]
        else:
            source = names
        out = [("." if i in dims else n) for i, n in enumerate(names) if keep or i not in dims]
        reduced = [names[i] for i in dims]
        return Rule(
            text(call, [source], [out] * len(call.outs)),
            linear="0" if linear else "",
            reduce=dict.fromkeys(reduced, kind) if kind and not expand else {},
            expand={n: "B" * len(call.outs) for n in reduced} if expand else {},
        )

    return rule


def blind_to(dims: Callable[[Call], Iterable[int]], linear: str = "", through: bool = False) -> RuleFn:
    """Like pointwise on tensors of one rank, but the given dims (negative ones count from the end) stay whole."""

    def rule(call: Call) -> Rule:
        shape = call.out.shape
        rank = len(shape)
        whole = {d % rank for d in dims(call)} if rank else set()
        names = ["." if i in whole else n for i, n in enumerate(letters(rank))]
        sides = [aligned(s, shape, names) if s else [] for s in (*call.ins, *call.outs)]
        n = len(call.ins)
        return Rule(text(call, sides[:n], sides[n:]), linear=linear, through="0" if through else "")

    return rule


def matrices(call: Call) -> Rule:
    """Linear algebra: leading dims are independent problems, the rest of every tensor stays whole."""
    batch = call.ins[0].shape[:-2]
    specs = (*call.ins, *call.outs)
    names = letters(len(batch)) if all(s is None or s.shape[: len(batch)] == batch for s in specs) else []
    sides = [[*names, *["."] * (len(s.shape) - len(names))] if s else [] for s in specs]
    return Rule(text(call, sides[: len(call.ins)], sides[len(call.ins) :]))


def leading(count: int, linear: str = "") -> RuleFn:
    """The last `count` dims of every tensor stay whole (spatial dims); those before split together."""

    def rule(call: Call) -> Rule:
        sides = []
        for spec in (*call.ins, *call.outs):
            shape = spec.shape if spec else ()
            free = max(len(shape) - count, 0)
            sides.append(letters(free) + ["."] * (len(shape) - free))
        n = len(call.ins)
        return Rule(text(call, sides[:n], sides[n:]), linear=linear)

    return rule


def reshape(call: Call) -> Rule:
    """A view: both shapes refined to common factors; where they don't nest, that stretch stays whole."""
    source, target = call.ins[0].shape, call.out.shape
    if not call.out.numel:
        return Rule(text(call, [["."] * len(source)], [["."] * len(target)]), linear="0", through="0")
    left: list[str] = []
    right: list[str] = []
    sizes: dict[str, int] = {}
    i = j = 0
    while i < len(source) or j < len(target):
        if i < len(source) and source[i] == 1:
            left.append(".")
            i += 1
            continue
        if j < len(target) and target[j] == 1:
            right.append(".")
            j += 1
            continue
        a, b, i0, j0 = source[i], target[j], i, j
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * source[i], i + 1
            else:
                b, j = b * target[j], j + 1
        group = _refine(source[i0:i], target[j0:j], f"{i0}", sizes)
        left += group[0]
        right += group[1]
    return Rule(text(call, [left], [right]), sizes=sizes, linear="0", through="0")


def _refine(
    source: tuple[int, ...], target: tuple[int, ...], tag: str, sizes: dict[str, int]
) -> tuple[list[str], list[str]]:
    cuts = []
    for side in (source, target):
        at = 1
        for n in side:
            at *= n
            cuts.append(at)
    ladder = [1, *sorted(set(cuts))]
    steps = list(pairwise(ladder))
    # Cuts that do not nest from some point on: everything after the last good one is a lump.
    good = next((k for k, (a, b) in enumerate(steps) if b % a), len(steps))
    if good < len(steps):
        return ["."] * len(source), ["."] * len(target)
    names = [f"f{tag}_{k}" for k in range(len(steps))]
    sizes.update({n: b // a for n, (a, b) in zip(names, steps, strict=True)})

    def write(side: tuple[int, ...]) -> list[str]:
        out, at, k = [], 1, 0
        for n in side:
            at *= n
            mine = []
            while k < len(steps) and steps[k][1] <= at:
                mine.append(names[k])
                k += 1
            out.append(f"({' '.join(mine)})" if len(mine) > 1 else mine[0] if mine else ".")
        return out

    return write(source), write(target)

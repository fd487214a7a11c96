"""Rules of ops that read or write by index.

Where the indexed dim itself is split, each rank sees only its stretch of it: the *local form* of
the op is told the offset, skips what lies elsewhere, and leaves a partial sum.
"""

from __future__ import annotations

from typing import Any

from laminar.ir.serial.codec import Ref
from laminar.rules.notation import Call, Rule
from laminar.rules.ops.families import aligned, broadcast, letters, text


def whole(call: Call) -> Rule:
    """Nothing splits."""
    sides = [["."] * len(s.shape) if s else [] for s in (*call.ins, *call.outs)]
    return Rule(text(call, sides[: len(call.ins)], sides[len(call.ins) :]))


def embedding(call: Call) -> Rule:
    """embedding(weight, index, ...): a split vocabulary is a masked lookup."""
    at = letters(len(call.ins[1].shape), "i")
    return Rule(text(call, [["v", "e"], at], [[*at, "e"]]), linear="0", local={"v": "laminar.embedding_at"})


def embedding_backward(call: Call) -> Rule:
    """embedding_dense_backward(grad, index, rows, ...)."""
    if call.arg(4):  # scaled by how often a row is used, which no single rank knows
        at = ["."] * len(call.ins[1].shape)
        return Rule(text(call, [[*at, "e"], at], [[".", "e"]]), linear="0")
    at = letters(len(call.ins[1].shape), "i")
    return Rule(text(call, [[*at, "e"], at], [["v", "e"]]), linear="0", local={"v": "laminar.embedding_backward_at"})


BAG_MAX = 2


def embedding_bag(call: Call) -> Rule:
    """(weight, index, offsets, ...) -> out, bag of each index, bag sizes, where the largest was: only columns split."""
    sides = [["."] * len(s.shape) if s else [] for s in call.outs]
    sides[0] = [".", "e"]
    if call.arg(4) == BAG_MAX and call.outs[3] and len(call.outs[3].shape) == 2:
        sides[3] = [".", "e"]
    rest = [["."] * len(s.shape) for s in call.ins[1:]]
    return Rule(text(call, [[".", "e"], *rest], sides), whole={"e": "123"})


def embedding_bag_backward(call: Call) -> Rule:
    """(grad, index, offsets, bags, sizes, largest, ...) -> grad of the table."""
    rest = [[".", "e"] if s.shape == call.ins[0].shape else ["."] * len(s.shape) for s in call.ins[1:]]
    return Rule(text(call, [[".", "e"], *rest], [[".", "e"]]), linear="0")


def embedding_bag_weights_backward(call: Call) -> Rule:
    """(grad, weight, index, offsets, bags, ...) -> grad of the weight of each index: a sum over columns."""
    rest = [["."] * len(s.shape) for s in call.ins[2:]]
    return Rule(text(call, [[".", "e"], [".", "e"], *rest], [["."]]), linear="0|1")


def _same(a: tuple[int, ...], b: tuple[int, ...], d: int, names: list[str]) -> list[str]:
    """Names of dims other than d on which two tensors agree; the rest stay whole."""
    return [n if i != d and a[i] == b[i] else "." for i, n in enumerate(names)]


def gather(call: Call) -> Rule:
    """gather(x, dim, index)."""
    x, index = call.ins[0].shape, call.ins[1].shape
    if not x or not index:
        return whole(call)
    d = call.arg(1) % len(x)
    shared = _same(x, index, d, letters(len(x)))
    at = list(shared)
    at[d] = "j"
    source = list(shared)
    source[d] = "v"
    return Rule(text(call, [source, at], [at]), linear="0", local={"v": "laminar.gather_at"})


def scatter(call: Call) -> Rule:
    """scatter(x, dim, index, src or value): the dim written to stays whole."""
    x, index = call.ins[0].shape, call.ins[1].shape
    if not x or any(len(s.shape) != len(x) for s in call.ins):
        return whole(call)
    d = call.arg(1) % len(x)
    shared = _same(x, index, d, letters(len(x)))
    if len(call.ins) == 3:
        shared = _same(x, call.ins[2].shape, d, shared)
    keeps = "02" if len(call.ins) == 3 else "0" if call.arg(3) == 0 else ""
    return Rule(text(call, [shared] * len(call.ins), [shared]), linear=keeps)


def scatter_reduce(call: Call) -> Rule:
    """scatter_add(x, dim, index, src), scatter_reduce(..., kind, with x): splitting what is written leaves partials."""
    rule = scatter(call)
    kind = "sum" if call.op == "aten.scatter_add" else call.arg(4)
    with_x = call.op == "aten.scatter_add" or (call.op == "aten.scatter_reduce.two" and call.arg(5))
    plain = not call.ins[0].shape or len(call.ins[0].shape) != len(call.ins[1].shape)
    if plain or kind not in PARTIAL_OF or not with_x or call.ins[1].shape != call.ins[2].shape:
        return Rule(rule.text)
    d = call.arg(1) % len(call.ins[0].shape)
    shared = _same(call.ins[0].shape, call.ins[1].shape, d, letters(len(call.ins[0].shape)))
    at = list(shared)
    at[d] = "j"
    words = text(call, [shared, at, at], [shared])
    if kind == "sum":
        return Rule(words, linear="02", additive="0")
    return Rule(words, reduce={"j": PARTIAL_OF[kind]})


PARTIAL_OF = {"sum": "sum", "amax": "max", "amin": "min"}


def index_select(call: Call) -> Rule:
    """index_select(x, dim, index)."""
    x = call.ins[0].shape
    if not x or not call.ins[1].shape:
        return whole(call)
    d = call.arg(1) % len(x)
    names = letters(len(x))
    source, out = list(names), list(names)
    source[d], out[d] = ".", "j"
    return Rule(text(call, [source, ["j"]], [out]), linear="0")


def index_add(call: Call) -> Rule:
    """index_add(x, dim, index, source, alpha)."""
    x = call.ins[0].shape
    if not x or not call.ins[1].shape or not call.ins[2].shape:
        return whole(call)
    d = call.arg(1) % len(x)
    names = letters(len(x))
    target, source = list(names), list(names)
    target[d], source[d] = ".", "j"
    return Rule(text(call, [target, ["j"], source], [target]), linear="02", additive="0")


def index_copy(call: Call) -> Rule:
    """index_copy(x, dim, index, source) and index_fill: the dim written to stays whole."""
    x = call.ins[0].shape
    if not x:
        return whole(call)
    d = call.arg(1) % len(x)
    names = letters(len(x))
    names[d] = "."
    sides = [names if len(s.shape) == len(x) and i != 1 else ["."] * len(s.shape) for i, s in enumerate(call.ins)]
    keeps = "02" if len(call.ins) == 3 else "0" if call.arg(3) == 0 else ""
    return Rule(text(call, sides, [names]), linear="" if call.op == "aten.index_reduce" else keeps)


def _indexed(
    call: Call, indices: tuple[Any, ...]
) -> tuple[list[str], list[list[str]], list[str], tuple[int, ...]] | None:
    """Factors of x, of each index and of x[indices], and the shape of the indices broadcast together."""
    x = call.ins[0].shape
    used = [k for k, i in enumerate(indices) if isinstance(i, Ref)]
    specs = [call.ins[indices[k].index] for k in used]
    if not specs or any(s.dtype == "bool" for s in specs):
        return None
    shape = broadcast(specs)
    at = letters(len(shape), "i")
    names = ["." if k in used else n for k, n in enumerate(letters(len(x)))]
    kept = [n for k, n in enumerate(names) if k not in used]
    front = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    before = [n for k, n in enumerate(names) if k not in used and k < front]
    out = [*before, *at, *kept[len(before) :]]
    return names, [aligned(s, shape, at) for s in specs], out, shape


def index(call: Call) -> Rule:
    """x[i, j, None, k]: dims read by index stay whole, the indices themselves may be split."""
    parts = _indexed(call, call.arg(1))
    if parts is None:
        return whole(call)
    x, at, out, _ = parts
    return Rule(text(call, [x, *at], [out]), linear="0")


def index_put(call: Call) -> Rule:
    """x[indices] = values, or += with accumulate."""
    parts = _indexed(call, call.arg(1))
    if parts is None:
        return whole(call)
    x, at, picked, _ = parts
    values = call.ins[-1]
    accumulate = bool(call.arg(3, False))
    sizes = _sizes(call, x, at, picked)
    shape = tuple(sizes.get(n, 0) for n in picked)
    given = aligned(values, shape, picked) if len(values.shape) <= len(shape) else ["."] * len(values.shape)
    if not accumulate:
        at = [["."] * len(a) for a in at]
        given = [n if n.startswith("d") else "." for n in given]
    last = len(call.ins) - 1
    return Rule(
        text(call, [x, *at, given], [x]),
        linear=f"0+{last}",
        additive="0" if accumulate else "",
    )


def _sizes(call: Call, x: list[str], at: list[list[str]], picked: list[str]) -> dict[str, int]:
    sizes = {}
    for names, spec in zip((x, *at), call.ins, strict=False):
        sizes.update({n: s for n, s in zip(names, spec.shape, strict=True) if n != "."})
    return {n: sizes.get(n, 1) for n in picked}


def take_rule(call: Call) -> Rule:
    """take(x, index): x flat and whole."""
    at = letters(len(call.ins[1].shape), "i")
    return Rule(text(call, [["."] * len(call.ins[0].shape), at], [at]), linear="0")


def put(call: Call) -> Rule:
    """put(x, index, source, accumulate): x flat and whole; what is added may be split."""
    accumulate = bool(call.arg(3))
    at = letters(len(call.ins[1].shape), "i") if accumulate else ["."] * len(call.ins[1].shape)
    if call.ins[1].shape != call.ins[2].shape:
        return whole(call)
    x = ["."] * len(call.ins[0].shape)
    return Rule(text(call, [x, at, at], [x]), linear="02", additive="0" if accumulate else "")


def bucketize(call: Call) -> Rule:
    """bucketize(x, boundaries)."""
    at = letters(len(call.ins[0].shape), "i")
    return Rule(text(call, [at, ["."] * len(call.ins[1].shape)], [at]))


def searchsorted(call: Call) -> Rule:
    """searchsorted(sorted, values): one sorted row shared by all values, or a row each."""
    rows, values = call.ins[0].shape, call.ins[1].shape
    at = letters(len(values), "i")
    source = ["."] if len(rows) == 1 else [*at[:-1], "."]
    sides = [source, at, *[source for _ in call.ins[2:]]]  # the third, if any, is the order of the first
    return Rule(text(call, sides, [at]))


def isin(call: Call) -> Rule:
    """isin(x, set)."""
    at = letters(len(call.ins[0].shape), "i")
    return Rule(text(call, [at, ["."] * len(call.ins[1].shape)], [at]))

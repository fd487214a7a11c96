"""Factor rules: one line per op, from which every legal placement follows, for one mesh axis.

A rule names the factors of each tensor, dims separated by spaces and tensors by commas:

    mm      "m k, k n -> m n"
    view    "b t c -> (b t) c"        a merged dim lists its factors, major first
    chunk   "t (3 a) -> t a, t a, t a" a number is a factor that is never split
    softmax "r . -> r ."              a dot is a dim that is never split
    sum     "a b -> []"               brackets are a tensor without dims

Splitting factor f over an axis splits every dim that holds it: `S(d)` where f is alone or leads,
`S(d, blocks=k)` where k is the product of the factors before it. A tensor without f is `B`. An
output without f has been summed over it, so it is `P(sum)`, or `P(reduce[f])`. What the letters
can't say is in the fields of `Rule`. Sizes are those of the tensors *as they lie on the axis*, that
is after earlier axes have split them: meshes of any rank are compositions of this.

Factors that are alone in every dim may be cut unevenly; merged ones must divide. A factor may also
be split with blocks of its own, for the block counts in circulation in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

from laminar.errors import CaptureError
from laminar.ir.graph import Graph, Node
from laminar.ir.sbp import PSUM, B, NdSbp, Partial, Sbp, Split, no_rank_empty, split_size
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec


@dataclass(frozen=True)
class Call:
    """An op applied to tensors of known shape: all a rule may look at.

    `args` are the node's, with every tensor replaced by `Ref("", i)`, its position in `ins`. Rules
    read shapes from `ins` and `outs`, never from size arguments: those are the whole tensor's.
    """

    op: str
    args: tuple[Any, ...]
    ins: tuple[TensorSpec, ...]
    outs: tuple[TensorSpec | None, ...]
    least: tuple[tuple[int, ...], ...] = ()
    """Where earlier axes cut unevenly: the shapes of the rank that got least, ins then outs."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args, self.ins, self.outs, self.least))

    @cached_property
    def notes(self) -> dict[Any, Any]:
        """What was worked out about it, for who asks again."""
        return {}

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Call, (self.op, self.args, self.ins, self.outs, self.least)  # hashes of text differ between processes

    def at(self, position: int) -> TensorSpec | None:
        """The tensor at an argument position, or None if there is none."""
        arg = self.args[position] if position < len(self.args) else None
        return self.ins[arg.index] if isinstance(arg, Ref) else None

    def arg(self, position: int, default: Any = None) -> Any:
        """A plain argument."""
        return self.args[position] if position < len(self.args) else default

    @property
    def out(self) -> TensorSpec:
        """The first output."""
        assert self.outs[0] is not None
        return self.outs[0]


_CALLS: dict[tuple[Any, ...], Call] = {}
"""Calls that differ in nothing, not even in how a number is written, are one object: layers repeat, and what is known
of a call is looked up again and again."""
_MOST = 1 << 16
_NUMBERED = tuple(Ref("", i) for i in range(64))


def call_of(node: Node, specs: Mapping[Ref, TensorSpec]) -> Call:
    """The call a node makes, whole tensors."""
    args, read = node.args, node.ins
    ins = tuple([specs[r] for r in read])
    if args[: len(read)] == read and len(read) <= len(_NUMBERED):  # tensors first, all else behind
        args = (*_NUMBERED[: len(read)], *args[len(read) :])
    else:
        args = _numbered(args, iter(range(len(read))))
    return one_call(node.op, args, ins, node.outs)


def calls_in(graph: Graph) -> Mapping[str, Call]:
    """The calls of all nodes of a graph, by name."""
    found: Mapping[str, Call] | None = graph.notes.get("calls")
    if found is None:
        if len(_CALLS) >= _MOST:
            _CALLS.clear()  # not below: within a graph, calls that are the same are one object
        specs = graph.specs
        found = graph.notes["calls"] = {n.name: call_of(n, specs) for n in graph.nodes}
    return found


def _numbered(arg: Any, count: Iterator[int]) -> Any:
    if isinstance(arg, Ref):
        return Ref("", next(count))
    return tuple([_numbered(a, count) for a in arg]) if isinstance(arg, tuple) else arg


def one_call(op: str, args: Any, ins: Any, outs: Any, least: tuple[tuple[int, ...], ...] = ()) -> Call:
    """The one call of its kind; 1, 1.0 and True are equal, but not the same."""
    first = len(ins) if args[: len(ins)] == _NUMBERED[: len(ins)] else 0
    key = (op, repr(args[first:]) if first < len(args) else "", ins, outs, least)
    found = _CALLS.get(key)
    if found is None:
        found = _CALLS[key] = Call(op, args, ins, outs, least)
    return found


@dataclass(frozen=True)
class Rule:
    """How an op splits on one axis."""

    text: str
    """`"m k, k n -> m n"`: one group per tensor read, in order, then one per tensor made."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of factors that only stand in merged dims."""
    linear: str = ""
    """Groups of inputs through which partial sums pass, `"0|1"` for a product, `"01"` for a sum."""
    through: str = ""
    """Groups through which P(max) and P(min) pass, for ops that only move elements; `"max:01"` for one of them."""
    reduce: Mapping[str, str] = field(default_factory=dict)
    """Factors reduced by something else than a sum: `{"k": "max"}`."""
    additive: str = ""
    """Inputs added to the result: where a factor they lack is summed, one rank's copy counts, so P(sum)."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Factors an output does not depend on: `{"i": "2"}`, output 2 stays B when i is split."""
    even: str = ""
    """Factors (separated by spaces) that must divide even where they stand alone."""
    expand: Mapping[str, str] = field(default_factory=dict)
    """Factors split by expansion (see `rules.expand`), with the placements of the outputs: "S", "B" or "P"."""
    local: Mapping[str, str] = field(default_factory=dict)
    """Factors split by a local form of the op that knows its offset; outputs without the factor are P(sum)."""
    several: str = ""
    """Of these factors, those whose local form may be given several stretches: they may be split with blocks."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One legal way to run an op on one axis: the placement of each tensor read and made."""

    ins: tuple[Sbp, ...]
    outs: tuple[Sbp, ...]
    how: str = ""
    """Empty, `expand`, or the name of the local form."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.ins, self.outs, self.how)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Signature, (self.ins, self.outs, self.how)  # hashes of text differ from process to process

    def __str__(self) -> str:
        return f"{','.join(map(str, self.ins))}->{','.join(map(str, self.outs))}"


def replicated(call: Call) -> Signature:
    """Every rank does the whole: always legal."""
    return Signature((B,) * len(call.ins), (B,) * len(call.outs))


def _splits(factor: str) -> bool:
    return factor != "." and not factor.isdigit()


def _before(factors: tuple[str, ...], position: int, sizes: Mapping[str, int]) -> int:
    return math.prod(int(f) if f.isdigit() else sizes[f] for f in factors[:position])


Dims = tuple[tuple[str, ...], ...]


@cache
def parse_rule(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """The factors of every dim of every tensor, inputs and outputs."""

    def dims(part: str) -> Dims:
        out: list[tuple[str, ...]] = []
        rest = part.strip().removeprefix("[]")
        while rest:
            if rest[0] == "(":
                inner, _, rest = rest[1:].partition(")")
                out.append(tuple(inner.split()))
            else:
                word, _, rest = rest.partition(" ")
                out.append((word,))
            rest = rest.strip()
        return tuple(out)

    left, _, right = text.partition("->")
    ins = tuple(dims(p) for p in left.split(",")) if left.strip() else ()
    return ins, tuple(dims(p) for p in right.split(","))


def factor_sizes(rule: Rule, call: Call) -> dict[str, int]:
    """The size of every factor; a rule and shapes that contradict each other are refused."""
    ins, outs = parse_rule(rule.text)
    if len(ins) != len(call.ins) or len(outs) != len(call.outs):
        raise _contradiction(rule, call, f"{len(call.ins)} tensors are read and {len(call.outs)} made")
    sizes = dict(rule.sizes)
    for dims, spec in zip((*ins, *outs), (*call.ins, *call.outs), strict=True):
        if spec is None:
            continue
        if len(dims) != len(spec.shape):
            raise _contradiction(rule, call, f"{' '.join('*'.join(d) for d in dims)} is not {spec}")
        for factors, n in zip(dims, spec.shape, strict=True):
            if len(factors) == 1 and _splits(factors[0]) and sizes.setdefault(factors[0], n) != n:
                raise _contradiction(rule, call, f"{factors[0]} is {sizes[factors[0]]} and {n}")
    return sizes


def _contradiction(rule: Rule, call: Call, why: str) -> CaptureError:
    return CaptureError(
        f"{call.op} was captured with shapes that it can't have: its rule is '{rule.text}', and {why}",
        next="torch's shape function for it is wrong (x.norm(dim=-1) over one element, before torch 2.13) or the rule"
        " is: put the op into a function marked with laminar.eager, where it runs as it is",
    )


def signatures(rule: Rule, call: Call, parts: int, circulating: Mapping[int, Iterable[int]] = {}) -> list[Signature]:
    """Every legal signature on an axis of `parts` ranks; the replicated one first.

    `circulating` maps a size to the block counts with which dims of that size are split elsewhere.
    """
    ins, outs = parse_rule(rule.text)
    sizes = factor_sizes(rule, call)
    found = dict.fromkeys([replicated(call)])
    uneven = _uneven(call, (*ins, *outs))
    for letter, size in sizes.items():
        if not no_rank_empty(uneven.get(letter, size), parts) or (letter in rule.expand and _complex(call)):
            continue
        merged = letter in rule.even.split() or any(letter in f and len(f) > 1 for dims in (*ins, *outs) for f in dims)
        for own in sorted({1, *circulating.get(size, ())}):
            if size % own or ((own > 1 or merged) and size % (own * parts)) or not no_rank_empty(size, parts):
                continue
            if own > 1 and letter in rule.local and letter not in rule.several:
                continue
            if (own > 1 or merged) and letter in uneven:
                continue
            split = _split(rule, call, letter, own, sizes)
            if not _partial_bool(split, call):
                found[split] = None
    return [*found, *_partials(rule, call)]


def _complex(call: Call) -> bool:
    """Whether numbers are complex, of which expansions know nothing: a square there is no square of a size."""
    return any(s.is_complex for s in call.ins)


def _uneven(call: Call, dims: tuple[Dims, ...]) -> dict[str, int]:
    """Factors of dims that earlier axes cut unevenly, with the smallest size."""
    out: dict[str, int] = {}
    for tensor, spec, least in zip(dims, (*call.ins, *call.outs), call.least, strict=False):
        for factors, n, few in zip(tensor, spec.shape if spec else (), least, strict=False):
            if few < n:
                out.update({f: min(few, out.get(f, few)) for f in factors})
    return out


def _find(dims: Dims, letter: str, own: int, sizes: Mapping[str, int]) -> Split | None:
    for d, factors in enumerate(dims):
        if letter in factors:
            return Split(d, _before(factors, factors.index(letter), sizes) * own)
    return None


def _split(rule: Rule, call: Call, letter: str, own: int, sizes: Mapping[str, int]) -> Signature:
    ins, outs = parse_rule(rule.text)
    placed: list[Sbp] = [_find(dims, letter, own, sizes) or B for dims in ins]
    made: list[Sbp] = []
    summed = False
    expanded = rule.expand.get(letter)
    for i, dims in enumerate(outs):
        if expanded is not None:
            made.append({"S": _find(dims, letter, own, sizes), "B": B, "P": PSUM}[expanded[i]] or B)
        elif (split := _find(dims, letter, own, sizes)) is not None:
            made.append(split)
        elif str(i) in rule.whole.get(letter, ""):
            made.append(B)
        else:
            summed = True
            made.append(Partial(rule.reduce.get(letter, "sum")))
    if summed:
        for i in map(int, rule.additive):
            if placed[i] == B:
                placed[i] = PSUM
    how = "expand" if expanded is not None else rule.local.get(letter, "")
    return Signature(tuple(placed), tuple(made), how)


def _partial_bool(signature: Signature, call: Call) -> bool:
    """Whether a bool would be partial, for which there is no collective."""
    pairs = zip((*signature.ins, *signature.outs), (*call.ins, *call.outs), strict=True)
    return any(isinstance(p, Partial) and s is not None and s.dtype == "bool" for p, s in pairs)


def _partials(rule: Rule, call: Call) -> list[Signature]:
    found = []
    for groups, kinds in ((rule.linear, ("sum",)), (rule.through, ("max", "min"))):
        for group in filter(None, groups.split("|")):
            ops: tuple[str, ...] = kinds
            if ":" in group:
                kind, _, group = group.partition(":")
                ops = (kind,)
            members = {int(c) for c in group.split("+")} if "+" in group else {int(c) for c in group}
            if any(call.ins[i].dtype == "bool" for i in members) or any(o and o.dtype == "bool" for o in call.outs):
                continue
            if any(s and s.dtype.startswith("c") for s in (*call.ins, *call.outs)):
                ops = tuple(op for op in ops if op == "sum")  # complex numbers have no order
            for op in ops:
                placed = tuple(Partial(op) if i in members else B for i in range(len(call.ins)))
                found.append(Signature(placed, (Partial(op),) * len(call.outs)))
    return found


def circulating_blocks(rule: Rule, call: Call) -> Iterable[tuple[int, int]]:
    """(dim size, block count) pairs that splitting this op's merged dims brings into the graph."""
    sizes = factor_sizes(rule, call)
    for dims, spec in zip((p for side in parse_rule(rule.text) for p in side), (*call.ins, *call.outs), strict=True):
        for factors, n in zip(dims, spec.shape if spec else (), strict=False):
            for i in range(1, len(factors)):
                before = _before(factors, i, sizes)
                if 1 < before < n and _splits(factors[i]):
                    yield n, before


def localise(call: Call, signature: Signature, parts: int) -> Call:
    """The call a rank of the axis makes: what the next axis sees. Sizes are the first rank's."""
    found: Call | None = call.notes.get((signature, parts))
    if found is None:
        found = call.notes[signature, parts] = _localised(call, signature, parts)
    return found


def _localised(call: Call, signature: Signature, parts: int) -> Call:
    def local(spec: TensorSpec | None, placement: Sbp) -> TensorSpec | None:
        if spec is None or not isinstance(placement, Split):
            return spec
        shape = list(spec.shape)
        shape[placement.dim] = split_size(shape[placement.dim], placement, parts, 0)
        return TensorSpec(tuple(shape), spec.dtype)

    ins = tuple(local(s, p) for s, p in zip(call.ins, signature.ins, strict=True))
    outs = tuple(local(s, p) for s, p in zip(call.outs, signature.outs, strict=True))
    args = local_args(call, ins, outs)
    if call.op in STRETCHED:
        args = stretched(call.op, args, (signature.ins[STRETCHED[call.op].reads],))
    placed = (*signature.ins, *signature.outs)
    shapes = call.least or tuple(s.shape if s else () for s in (*call.ins, *call.outs))
    least = tuple(
        tuple(
            split_size(n, p, parts, parts - 1) if isinstance(p, Split) and p.dim == d else n
            for d, n in enumerate(shape)
        )
        for shape, p in zip(shapes, placed, strict=True)
    )
    uneven = any(shape != (s.shape if s else ()) for shape, s in zip(least, (*ins, *outs), strict=True))
    return one_call(call.op, args, ins, outs, least if uneven else ())


class Stretched(NamedTuple):
    """Of an op whose work depends on where its rows lie in the whole."""

    reads: int
    """The input whose dim 2 has the rows."""
    arg: int
    """The argument that is true where it does, and says for a local call how many stretches the rows are."""


STRETCHED = {"laminar.attention": Stretched(0, 4), "laminar.attention_backward": Stretched(1, 7)}


def stretched(op: str, args: tuple[Any, ...], nd: NdSbp) -> tuple[Any, ...]:
    """A local call's arguments, which say how many stretches its rows are, if several: they decide what it costs."""
    at = STRETCHED[op].arg
    most = max((p.blocks for p in nd if isinstance(p, Split) and p.dim == 2), default=1)
    return (*args[:at], max(int(args[at]), most), *args[at + 1 :]) if args[at] and most > 1 else args


def local_args(call: Call, ins: tuple[TensorSpec | None, ...], outs: tuple[TensorSpec | None, ...]) -> tuple[Any, ...]:
    """A call's arguments with sizes and bounds fitted to local shapes."""
    fit = SIZED.get(call.op)
    return fit(call, ins, outs) if fit and (ins != call.ins or outs != call.outs) else call.args


def _put(args: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    out = list(args)
    for key, value in changes.items():
        out[int(key[1:])] = value
    return tuple(out)


def _bounds(full: int, local: int, start: Any, end: Any) -> tuple[Any, Any]:
    """Slice bounds on a dim of which a rank holds `local` of `full`."""
    if full == local:
        return start, end
    lo = 0 if start is None else start + full if start < 0 else start
    hi = full if end is None or end > full else end + full if end < 0 else end
    return lo * local // full, hi * local // full


def _slice(x: int, dim: int) -> Any:
    def fit(call: Call, ins: Any, outs: Any) -> tuple[Any, ...]:
        whole = call.ins[0] if x == 0 else call.outs[0]
        mine = ins[0] if x == 0 else outs[0]
        d = call.args[dim] % len(whole.shape)  # type: ignore[union-attr]
        lo, hi = _bounds(whole.shape[d], mine.shape[d], call.args[dim + 1], call.args[dim + 2])  # type: ignore[union-attr]
        args = _put(call.args, **{f"_{dim + 1}": lo, f"_{dim + 2}": hi})
        return _put(args, _1=outs[0].shape) if call.op == "aten.slice_backward" else args

    return fit


def _size(position: int) -> Any:
    return lambda call, ins, outs: _put(call.args, **{f"_{position}": outs[0].shape})


def _parts(call: Call, ins: Any, outs: Any) -> tuple[Any, ...]:
    d = (call.args[2] or 0) % len(outs[0].shape)
    if call.op.endswith("split.Tensor"):
        return _put(call.args, _1=max(outs[0].shape[d], 1))
    return _put(call.args, _1=tuple(o.shape[d] for o in outs))


def _group_norm(call: Call, ins: Any, outs: Any) -> tuple[Any, ...]:
    n, c = ins[0].shape[:2]
    return _put(call.args, _3=n, _4=c, _6=outs[1].shape[1])


def _group_norm_backward(call: Call, ins: Any, outs: Any) -> tuple[Any, ...]:
    n, c = ins[1].shape[:2]
    return _put(call.args, _5=n, _6=c, _8=ins[2].shape[1])


def _groups(x: Any, weight: Any, y: Any, transposed: bool) -> int:
    """Groups of a convolution from x to y, as a rank sees them."""
    return int((y if transposed else x).shape[1] // max(weight.shape[1], 1))


def _convolution(call: Call, ins: Any, outs: Any) -> tuple[Any, ...]:
    return _put(call.args, _8=_groups(ins[0], ins[1], outs[0], call.args[6]))


def _convolution_backward(call: Call, ins: Any, outs: Any) -> tuple[Any, ...]:
    bias = (ins[0].shape[1],) if call.args[3] else None
    return _put(call.args, _3=bias, _9=_groups(ins[1], ins[2], ins[0], call.args[7]))


SIZED: dict[str, Callable[[Call, Any, Any], tuple[Any, ...]]] = {
    **{
        f"aten.{name}": _size(1)
        for name in (
            "view",
            "_unsafe_view",
            "reshape",
            "view_copy",
            "expand",
            "select_backward",
            "diagonal_backward",
            "unfold_backward",
        )
    },
    **{name: _size(0) for name in ("aten.full", "aten.zeros", "aten.ones", "laminar.uniform", "laminar.normal")},
    **{
        f"aten.{k}_backward": _size(2)
        for k in (
            "upsample_nearest1d",
            "upsample_nearest2d",
            "upsample_nearest3d",
            "upsample_linear1d",
            "upsample_bilinear2d",
            "upsample_bicubic2d",
            "upsample_trilinear3d",
            "_upsample_nearest_exact1d",
            "_upsample_nearest_exact2d",
            "_upsample_nearest_exact3d",
            "_upsample_bilinear2d_aa",
            "_upsample_bicubic2d_aa",
        )
    },
    "aten.slice.Tensor": _slice(0, 1),
    "aten.slice_backward": _slice(1, 2),
    "aten.slice_scatter": _slice(0, 2),
    "aten.split.Tensor": _parts,
    "aten.split_with_sizes": _parts,
    "aten.unsafe_split.Tensor": _parts,
    "aten.embedding_dense_backward": lambda call, ins, outs: _put(call.args, _2=outs[0].shape[0]),
    "aten.native_group_norm": _group_norm,
    "aten.native_group_norm_backward": _group_norm_backward,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
}
"""Ops whose arguments repeat a size, and how to rewrite it."""

RuleFn = Callable[[Call], Rule]

"""Which ops and shapes make up a profile: a list of keys, most needed first.

Shapes are spread evenly over the logarithms of their sizes by a Halton sequence, any beginning of which is spread
evenly too: wherever time runs out, what was measured covers the whole range, and a longer run makes it denser. Every
line below is an op as programs contain it (the operand of a forward product transposed, that of a weight gradient the
other way and written into its buffer, attention on heads that were split off a projection), with the number of
shapes it is worth. Sizes that are large on a GPU are too large on a CPU core, so each has its own range.

On a GPU steps are compiled: what is left of single ops are products, attention, convolutions (which the compiler
runs with channels last) and updates, and they get nearly all of the time. The kernels that a compiler writes are in
`profile/time_fused.py`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from laminar.cost.ops.families import traits_of
from laminar.cost.ops.table import parse_key

PRIMES = (2, 3, 5, 7, 11)


@dataclass(frozen=True)
class Range:
    """How far sizes go on a kind of device."""

    product: tuple[int, int]
    """Sides of products."""
    bytes: tuple[int, int]
    """Of tensors that are only read and written."""
    flops: float
    """No call does more."""
    dtypes: tuple[str, ...]
    """The first in full, the others for products and a few more."""


RANGES = {
    "cpu": Range((12, 4096), (1 << 9, 1 << 24), 2.5e9, ("f32", "bf16")),
    "gpu": Range((64, 16384), (1 << 14, 1 << 28), 2e12, ("bf16", "f32", "f16")),
}
SHARES = {"bf16": 1.0, "f32": 0.6, "f16": 0.2}
"""On a GPU, how much of the list each dtype gets."""
SLOW_FLOPS = 3e11
"""No call on a GPU in f32 does more: it has a tenth of the speed."""
SELDOM = 0.1
"""Of the shapes that an op gets on a CPU, what it gets on a GPU if compiled steps don't call it."""


def halton(dims: int) -> Iterator[tuple[float, ...]]:
    """Points in the unit cube, every beginning of which covers it evenly."""
    for index in itertools.count(1):
        point = []
        for base in PRIMES[:dims]:
            value, step, left = 0.0, 1.0, index
            while left:
                step /= base
                value += step * (left % base)
                left //= base
            point.append(value)
        yield tuple(point)


def size_between(share: float, low: float, high: float) -> int:
    """A size so far between two others on a logarithmic scale; large ones are multiples of 8, as most in models are."""
    n = float(low * (high / low) ** share)
    return max(1, round(n)) if n < 24 else 8 * round(n / 8)


def channels(share: float, high: int) -> int:
    """Mostly powers of two, as in models; one in five anything, down to the three of a picture."""
    if int(share * 40) % 5 == 2:
        return size_between(share, 3, high)
    return 1 << round(math.log2(8 * (high / 8) ** share))


Make = Callable[[tuple[float, ...]], str]


def keys(kind: str, seen: frozenset[str] = frozenset()) -> list[str]:
    """Every key of a profile, most needed first: families take turns in proportion to how many shapes they get."""
    r = RANGES[kind]
    planned: list[tuple[float, str]] = []
    for number, (worth, dims, make) in enumerate(_ops(kind, r)):
        found: dict[str, None] = {}
        # Each op begins elsewhere in the sequence, so that together they see more shapes.
        for point in itertools.islice(halton(dims), 7 * number, 7 * number + 12 * worth):
            key = make(point)
            if key not in found and _allowed(key, r):
                found[key] = None
            if len(found) == worth:
                break
        planned += [((i + 0.5 + number * 1e-4) / worth**0.5, key) for i, key in enumerate(found)]
    ordered = [key for _, key in sorted(planned)]
    return [key for key in dict.fromkeys(ordered) if key not in seen]


def _allowed(key: str, r: Range) -> bool:
    call, marks = parse_key(key)
    t = traits_of(call, marks)
    slow = r is RANGES["gpu"] and t.dtype == "f32" and t.family in ("matmul", "attention", "convolution")
    return t.flops <= (SLOW_FLOPS if slow else r.flops) and t.nbytes <= 6 * r.bytes[1]


def _ops(kind: str, r: Range) -> Iterator[tuple[int, int, Make]]:
    """(how many shapes, of how many dims, the key at a point) for every op."""
    yield from _on_gpu(r) if kind == "gpu" else _on_cpu(r)


def _on_cpu(r: Range) -> Iterator[tuple[int, int, Make]]:
    first, *others = r.dtypes
    yield from _products(first, r, 1.0)
    for dtype in others:
        yield from _products(dtype, r, 0.2)
    for ops in (_attention, _convolutions, _elementwise, _reductions, _channels, _moves, _indexing):
        yield from ops(first, r)
    yield from _others(r)
    yield from _views()


def _on_gpu(r: Range) -> Iterator[tuple[int, int, Make]]:
    for dtype in r.dtypes:
        share = SHARES[dtype]
        yield from _products(dtype, r, share)
        for worth, dims, make in itertools.chain(_attention(dtype, r), _convolutions(dtype, r)):
            yield max(2, round(worth * share)), dims, make
    first = r.dtypes[0]
    for worth, dims, make in itertools.chain(
        _elementwise(first, r), _reductions(first, r), _channels(first, r), _moves(first, r), _indexing(first, r)
    ):
        yield max(1, round(worth * SELDOM)), dims, make
    yield from _others(r)


def _products(t: str, r: Range, share: float) -> Iterator[tuple[int, int, Make]]:
    low, high = r.product

    def of(text: str, low: float = low, high: float = high) -> Make:
        def make(p: tuple[float, ...]) -> str:
            m, n, k = (size_between(x, low, high) for x in p[:3])
            b = size_between(p[3], 2, 512) if len(p) > 3 else 1
            if b > 1:
                m, n, k = (size_between(x, low / 2, high / 8) for x in p[:3])
            return text.format(t=t, m=m, n=n, k=k, b=b)

        return make

    mm = {
        "aten.mm({t}[{m},{k}],{t}[{n},{k}]T)->{t}[{m},{n}]": 26,
        "aten.mm({t}[{m},{k}],{t}[{k},{n}])->{t}[{m},{n}]": 36,
        "aten.mm({t}[{k},{m}]T,{t}[{k},{n}])->{t}[{m},{n}]!": 36,
        "aten.mm({t}[{k},{m}]T,{t}[{k},{n}])->{t}[{m},{n}]": 8,
        "aten.addmm({t}[{n}],{t}[{m},{k}],{t}[{n},{k}]T,1,1)->{t}[{m},{n}]": 36,
    }
    compiled = r is RANGES["gpu"]
    for text, worth in mm.items():
        text = text.rstrip("!") if compiled else text  # compiled code has its own memory for every product
        yield max(3, round(worth * share)), 3, _turned(of(text))
        if share == 1.0:  # small ones cost nothing to measure, and small models are made of them
            yield round(worth / 3), 3, _turned(of(text, low * 0.7, low * 16))
    bmm = {
        "aten.bmm({t}[{b},{m},{k}],{t}[{b},{k},{n}])->{t}[{b},{m},{n}]": 12,
        "aten.bmm({t}[{b},{m},{k}],{t}[{b},{n},{k}]T)->{t}[{b},{m},{n}]": 10,
        "aten.bmm({t}[{b},{k},{m}]T,{t}[{b},{k},{n}])->{t}[{b},{m},{n}]": 10,
        "aten.baddbmm({t}[{b},{m},{n}],{t}[{b},{m},{k}],{t}[{b},{k},{n}],1,1)->{t}[{b},{m},{n}]": 3,
    }
    for text, worth in bmm.items():
        yield max(2, round(worth * share)), 4, _turned(of(text))
        if share == 1.0:
            yield worth, 4, _turned(of(text, low, low * 32))


def _turned(make: Make) -> Make:
    """Operands written `[n,k]T` above are transposed views `[k,n]'`."""

    def swap(found: re.Match[str]) -> str:
        *rest, a, b = found[1].split(",")
        return f"[{','.join([*rest, b, a])}]'"

    return lambda p: re.sub(r"\[([\d,]+)\]T", swap, make(p))


def _attention(t: str, r: Range) -> Iterator[tuple[int, int, Make]]:
    large = r is RANGES["gpu"]
    high, apart = (4096, "") if large else (512, "'")  # on CPUs sums of rows come out head by head

    def make(text: str, mark: str, causal: str) -> Make:
        def one(p: tuple[float, ...]) -> str:
            heads, batch = size_between(p[0], 1, 16), size_between(p[2], 1, 64 if large else 16)
            n, d = size_between(p[1], 64 if large else 10, high), (8, 16, 32, 64, 64, 96, 128)[int(p[3] * 7)]
            if large:
                heads, d = (4, 8, 12, 16, 32)[int(p[0] * 5)], (32, 64, 64, 64, 96, 128)[int(p[3] * 6)]
            x = f"{t}[{batch},{heads},{n},{d}]"
            lse = f"{'f32' if t != 'f64' else t}[{batch},{heads},{n}]"
            return text.format(x=x, m=x + mark, lse=lse, apart=apart, causal=causal)

        return one

    forward = "laminar.attention({m},{m},{m},-,{causal},~)->{x},{lse}"
    backward = "laminar.attention_backward({m},{m},{m},{m},-,{m},{lse}{apart},{causal},~)->{x},{x},{x}"
    kinds = (
        ((16, "{0213}", "T"), (10, "{0213}", "F")) if large else ((9, "{0213}", "T"), (4, "{0213}", "F"), (4, "", "T"))
    )
    for worth, mark, causal in kinds:
        yield worth, 4, make(forward, mark, causal)
        yield worth, 4, make(backward, mark, causal)


def _convolutions(t: str, r: Range) -> Iterator[tuple[int, int, Make]]:
    high, mark, many, sides = 256, "", (2, 64), (2, 4, 6, 8, 12, 14, 16, 28, 32, 56)
    if r is RANGES["gpu"]:
        high, mark, many, sides = 1024, "{0231}", (8, 256), (4, 7, 8, 14, 16, 28, 32, 48, 64, 112)

    def make(area: int, stride: int, depthwise: bool, back: bool, first: bool = False, usual: bool = False) -> Make:
        def one(p: tuple[float, ...]) -> str:
            n, cin, cout = size_between(p[0], *many), 3 if first else channels(p[1], high), channels(p[2], high)
            side = sides[int(p[3] * 10)]
            if usual:  # as in most networks: the more channels, the smaller the picture
                cin = cout = 1 << round(math.log2(8 * (high / 8) ** p[1]))
                side = max(2, round(high * (0.5 + 3.5 * p[3]) / cin))
            if depthwise:
                cout = cin
            rest = f"[{stride},{stride}],[{area // 2},{area // 2}],[1,1],F,[0,0],{cin if depthwise else 1}"
            out = (side + 2 * (area // 2) - area) // stride + 1
            x, w = f"{t}[{n},{cin},{side},{side}]", f"{t}[{cout},{1 if depthwise else cin},{area},{area}]"
            y = f"{t}[{n},{cout},{out},{out}]"
            turned = "" if area == 1 or depthwise else mark  # of one dot or one channel there is nothing to turn
            if back:
                made = f"[F,T,F])->-,{w},-" if first else f"[T,T,F])->{x},{w},-"
                return f"aten.convolution_backward({y}{mark},{x}{mark},{w}{turned},[{cout}],{rest},{made}"
            return f"aten.convolution({x}{mark},{w}{turned},-,{rest})->{y}"

        return one

    for worth, area, stride, depthwise in (
        (36, 3, 1, False),
        (12, 3, 2, False),
        (9, 1, 1, False),
        (4, 1, 2, False),
        (4, 5, 1, False),
        (4, 3, 1, True),
    ):
        yield worth, 4, make(area, stride, depthwise, False)
        yield worth, 4, make(area, stride, depthwise, True)
    for back in (False, True):
        yield 6, 4, make(3, 1, False, back, first=True)
        yield 16, 4, make(3, 1, False, back, usual=True)


CHEAP = {
    "aten.add.Tensor({x},{x},1)->{x}": 7,
    "aten.mul.Tensor({x},{x})->{x}": 6,
    "aten.add.Tensor({x},{v},1)->{x}": 6,
    "aten.mul.Tensor({x},{v})->{x}": 3,
    "aten.mul.Tensor({x},~)->{x}": 3,
    "aten.mul.Scalar({x},~)->{x}": 3,
    "aten.div.Scalar({x},8)->{x}": 4,
    "aten.sub.Tensor({x},{x},1)->{x}": 3,
    "aten.div.Tensor({x},{x})->{x}": 3,
    "aten.relu({x})->{x}": 6,
    "aten.threshold_backward({x},{x},0)->{x}": 6,
    "aten.neg({x})->{x}": 3,
    "aten.mul.Tensor({x},{x}{turned})->{x}": 4,
    "aten.add.Tensor({x}{turned},{x}{turned},1)->{x}": 3,
    "aten.where.self({b},{x},{x})->{x}": 3,
    "aten.masked_fill.Scalar({x},{b},~)->{x}": 3,
    "aten.ge.Scalar({x},~)->{b}": 3,
    "aten._to_copy({b},:{t},-,-,-,F,-)->{x}": 3,
    "aten._to_copy({x},:f64,-,-,-,F,-)->{w}": 2,
    "aten._to_copy({x},:bf16,-,-,-,F,-)->{h}": 2,
    "aten._to_copy({h},:{t},-,-,-,F,-)->{x}": 2,
    "aten.full([{dims}],~,:{t},-,-,-)->{x}": 3,
    "aten.reciprocal({x})->{x}": 2,
    "aten.maximum({x},{x})->{x}": 2,
    "aten.add.Tensor({x},{x}{s},1)->{x}": 3,
    "aten.div.Scalar({x}{{e}},4)->{x}": 3,
}
DEAR = {
    "aten.gelu({x},$none)->{x}": 4,
    "aten.gelu({x},$tanh)->{x}": 5,
    "aten.gelu_backward({x},{x},$none)->{x}": 4,
    "aten.gelu_backward({x},{x},$tanh)->{x}": 5,
    "aten.silu({x})->{x}": 4,
    "aten.silu_backward({x},{x})->{x}": 4,
    "aten.tanh({x})->{x}": 3,
    "aten.tanh_backward({x},{x})->{x}": 3,
    "aten.exp({x})->{x}": 3,
    "aten.log({x})->{x}": 2,
    "aten.sigmoid({x})->{x}": 3,
    "aten.pow.Tensor_Scalar({x},2.0)->{x}": 4,
    "aten.pow.Tensor_Scalar({x},3.0)->{x}": 2,
    "aten.erf({x})->{x}": 2,
    "aten.rsqrt({x})->{x}": 4,
    "aten.sqrt({x})->{x}": 2,
    "aten.cos({x})->{x}": 2,
}


def _tensors(text: str, t: str, low: int, high: int, least: int = 16) -> Make:
    """A key over tensors `x` of two dims that a point sizes, in bytes; `v` is one row of it."""

    def make(p: tuple[float, ...]) -> str:
        size = {"f32": 4, "bf16": 2, "f16": 2}[t]
        columns = size_between(p[1], least, 2048)
        rows = max(1, round(low / size * (high / low) ** p[0] / columns))
        dims = f"{rows},{columns}"
        return text.format(
            x=f"{t}[{dims}]",
            v=f"{t}[{columns}]",
            b=f"bool[{dims}]",
            w=f"f64[{dims}]",
            h=f"bf16[{dims}]",
            t=t,
            dims=dims,
            rows=rows,
            columns=columns,
            turned="'",
            s="{s}",
            one=f"{t}[{rows},1]",
            r=f"{t}[{rows}]",
            ids=f"i64[{rows}]",
            table=f"{t}[{max(8, 40 * columns)},{columns}]",
        )

    return make


def _elementwise(t: str, r: Range) -> Iterator[tuple[int, int, Make]]:
    for text, worth in {**CHEAP, **DEAR}.items():
        if (t, "bf16" in text or "{h}" in text) != ("bf16", True):
            yield worth, 2, _tensors(text, t, *r.bytes)


def _reductions(t: str, r: Range) -> Iterator[tuple[int, int, Make]]:
    texts = {
        "aten.sum.dim_IntList({x},[0],F,-)->{v}": 7,
        "aten.sum.dim_IntList({x},[0],T,-)->{t}[1,{columns}]": 6,
        "aten.sum.dim_IntList({x},[1],T,-)->{one}": 6,
        "aten.mean.dim({x},[-1],T,-)->{one}": 6,
        "aten.sum({x},-)->{t}[]": 4,
        "aten.amax({x},[-1],T)->{one}": 3,
        "aten.sum.dim_IntList({x}{s},[0],T,-)->{t}[1,{columns}]": 3,
        "aten._softmax({x},-1,F)->{x}": 7,
        "aten._softmax_backward_data({x},{x},-1,:{t})->{x}": 7,
        "aten._log_softmax({x},1,F)->{x}": 6,
        "aten._log_softmax_backward_data({x},{x},1,:{t})->{x}": 6,
        "aten.native_layer_norm({x},[{columns}],{v},{v},~)->{x},{one},{one}": 8,
        "aten.native_layer_norm_backward({x},{x},[{columns}],{one},{one},{v},{v},[T,T,T])->{x},{v},{v}": 8,
        "aten.nll_loss_forward({x},{ids},-,1,-100)->{t}[],{t}[]": 4,
        "aten.nll_loss_backward({t}[],{x},{ids},-,1,-100,{t}[])->{x}": 4,
        "aten.cumsum({x},1,-)->{x}": 2,
    }
    for text, worth in texts.items():
        yield worth + 2, 2, _tensors(text, t, r.bytes[0], r.bytes[1] // 2, least=6)


def _pictures(text: str, t: str, high: int) -> Make:
    def make(p: tuple[float, ...]) -> str:
        n, c = size_between(p[0], 4, 64), 8 * max(1, channels(p[1], high) // 8)
        side = 2 * (1, 2, 3, 4, 7, 8, 14, 16)[int(p[2] * 8)]
        half = f"[{n},{c},{side // 2},{side // 2}]"
        return text.format(
            x=f"{t}[{n},{c},{side},{side}]",
            c=f"{t}[{c}]",
            w=f"f64[{c}]",
            h=t + half,
            i="i64" + half,
            count=n * side * side,
            n=n,
            ch=c,
            area=side * side,
            g=f"{t}[{n},{max(1, c // 8)}]",
            groups=max(1, c // 8),
            p=f"{t}[{n},{c},1,1]",
        )

    return make


def _channels(t: str, r: Range) -> Iterator[tuple[int, int, Make]]:
    texts = {
        "laminar.batch_norm({x},{c},{c},~)->{x},{c},{c}": 8,
        "laminar.batch_norm_backward({x},{x},{c},{c},{c})->{x},{c},{c}": 8,
        "laminar.batch_norm_apply({x},{c},{c},{c},{c},~)->{x}": 8,
        "laminar.batch_norm_moments({x})->{w},{w}": 8,
        "laminar.batch_norm_sums({x},{x},{c},{c})->{c},{c}": 8,
        "laminar.batch_norm_grad({x},{x},{c},{c},{c},{c},{c},{count})->{x}": 8,
        "aten.max_pool2d_with_indices({x},[3,3],[2,2],[1,1],[1,1],F)->{h},{i}": 4,
        "aten.max_pool2d_with_indices_backward({h},{x},[3,3],[2,2],[1,1],[1,1],F,{i})->{x}": 4,
        "aten.native_group_norm({x},{c},{c},{n},{ch},{area},{groups},~)->{x},{g},{g}": 4,
        "aten.native_group_norm_backward({x},{x},{g},{g},{c},{n},{ch},{area},{groups},[T,T,T])->{x},{c},{c}": 4,
        "aten.mean.dim({x},[-1,-2],T,-)->{p}": 3,
        "aten.add.Tensor({x},{x},1)->{x}": 3,
        "aten.relu({x})->{x}": 2,
    }
    for text, worth in texts.items():
        yield worth, 3, _pictures(text, t, 1024 if r is RANGES["gpu"] else 256)


def _moves(t: str, r: Range) -> Iterator[tuple[int, int, Make]]:
    texts = {
        "aten.clone({x},-)->{x}": 4,
        "aten.clone({x}{turned},-)->{x}": 3,
        "aten.cat([{x},{x}],0)->{t}[{rows2},{columns}]": 4,
        "aten.cat([{x},{x},{x}],1)->{t}[{rows},{columns3}]": 5,
        "aten.slice_backward({x},[{rows2},{columns}],0,0,{rows},1)->{t}[{rows2},{columns}]": 4,
        "aten.constant_pad_nd({x},[0,1],~)->{t}[{rows},{columns1}]": 3,
    }

    def more(text: str) -> Make:
        def make(p: tuple[float, ...]) -> str:
            columns = size_between(p[1], 16, 1024)
            rows = max(1, round(r.bytes[0] / 4 * (r.bytes[1] / 2 / r.bytes[0]) ** p[0] / columns))
            return text.format(
                x=f"{t}[{rows},{columns}]",
                t=t,
                turned="'",
                rows=rows,
                columns=columns,
                rows2=2 * rows,
                columns3=3 * columns,
                columns1=columns + 1,
            )

        return make

    def heads(p: tuple[float, ...]) -> str:
        b, h, n, d = (
            size_between(p[0], 1, 16),
            size_between(p[1], 2, 16),
            size_between(p[2], 16, 512),
            (16, 32, 64, 128)[int(p[3] * 4)],
        )
        return f"aten.view({t}[{b},{n},{h},{d}]{{0213}},[{b},{n},{h * d}])->{t}[{b},{n},{h * d}]"

    for text, worth in texts.items():
        yield worth, 2, more(text)
    yield 8, 4, heads


def _indexing(t: str, r: Range) -> Iterator[tuple[int, int, Make]]:
    large = 8 if r is RANGES["gpu"] else 1

    def make(text: str) -> Make:
        def one(p: tuple[float, ...]) -> str:
            n, d, rows = (
                size_between(p[0], 8, 4096 * large),
                size_between(p[1], 8, 512 * large),
                size_between(p[2], 16, 32768 * large),
            )
            return text.format(table=f"{t}[{rows},{d}]", ids=f"i64[{n}]", got=f"{t}[{n},{d}]", rows=rows, t=t, n=n, d=d)

        return one

    texts = {
        "aten.embedding({table},{ids},-1,F,F)->{got}": 9,
        "aten.index_select({table},0,{ids})->{got}": 4,
        "aten.embedding_dense_backward({got},{ids},{rows},-1,F)->{table}": 6,
        "aten.embedding_dense_backward({got},{ids},{rows},-1,F)->{table}!": 12,
        "laminar.embedding_at({table},{ids},-1,F,F,$offset,$in,0,0)->{got}": 3,
        "laminar.embedding_backward_at({got},{ids},{rows},-1,F,$offset,$out,0,0)->{table}": 3,
        "aten.gather({got},1,i64[{n},1],F)->{t}[{n},1]": 3,
        "aten.index.Tensor({table},[{ids}])->{got}": 3,
        "aten.index.Tensor({t}[{n},10,10],[-,i64[45],i64[45]])->{t}[{n},45]": 3,
        "aten.index_put({t}[{n},10,10],[-,i64[45],i64[45]],{t}[{n},45],T)->{t}[{n},10,10]": 3,
        "aten.scatter_add({got},1,i64[{n},8],{t}[{n},8])->{got}": 3,
    }
    for text, worth in texts.items():
        if not (large > 1 and "embedding_dense_backward" in text):  # compiled, it is another kernel: `runtime.fused`
            yield worth, 3, make(text)


def _others(r: Range) -> Iterator[tuple[int, int, Make]]:
    high = r.bytes[1] // 8
    most = high * (12 if r is RANGES["gpu"] else 4)

    def draw(name: str, cut: str) -> Make:
        def one(p: tuple[float, ...]) -> str:
            shape = f"{max(1, round(64 * (high / 512) ** p[0] / 64))},64"
            return f"laminar.{name}([{shape}],i64[2],0,:f32{cut})->f32[{shape}]"

        return one

    def lstm(back: bool) -> Make:
        def one(p: tuple[float, ...]) -> str:
            n, b, d, h = (
                size_between(p[0], 6, 48),
                size_between(p[1], 4, 64),
                size_between(p[2], 16, 256),
                size_between(p[3], 16, 256),
            )
            x, s, y = f"f32[{n},{b},{d}]", f"f32[{b},{h}]", f"f32[{n},{b},{h}]"
            w, u, gates = f"f32[{4 * h},{d}]", f"f32[{4 * h},{h}]", f"f32[{n},{b},{4 * h}]"
            if back:
                made = f"{x},{s},{s},{w},{u},f32[{4 * h}]"
                return f"laminar.lstm_backward({y},{s},{s},{x},{s},{s},{w},{u},{y},{gates},{y},F)->{made}"
            return f"laminar.lstm({x},{s},{s},{w},{u},f32[{4 * h}],F)->{y},{s},{s},{gates},{y}"

        return one

    def update(name: str) -> Make:
        def one(p: tuple[float, ...]) -> str:
            tensors, low = size_between(p[1], 2, 160), 1e6 if r is RANGES["gpu"] else 2e3
            return f"optimizer.{name}({tensors},{tensors * max(16, round(low * (most / low) ** p[0] / tensors))})"

        return one

    if r is not RANGES["gpu"]:  # compiled, they are other kernels: `runtime.fused`
        for cut in ("", ",$cut"):
            yield 5, 1, draw("uniform", cut)
        yield 2, 1, draw("normal", "")
    for back in (False, True):
        yield 5, 4, lstm(back)
    for name, worth in (("adamw", 9), ("adam", 3), ("momentum", 5), ("sgd", 5)):
        yield worth, 2, update(name)


TIMED_VIEWS = (
    "aten.view(f32[64,32],[8,8,32])->f32[8,8,32]",
    "aten.view(f32[8,8,32],[64,32])->f32[64,32]",
    "aten.t(f32[64,32])->f32[32,64]",
    "aten.transpose.int(f32[4,16,32],1,2)->f32[4,32,16]",
    "aten.permute(f32[4,8,16],[2,0,1])->f32[16,4,8]",
    "aten.unsqueeze(f32[8,16],1)->f32[8,1,16]",
    "aten.expand(f32[8,1],[8,16],F)->f32[8,16]",
    "aten.slice.Tensor(f32[64,32],0,0,32,1)->f32[32,32]",
    "aten.select.int(f32[64,32],0,3)->f32[32]",
    "aten.split.Tensor(f32[64,96],32,1)->f32[64,32],f32[64,32],f32[64,32]",
    "aten.unbind.int(f32[3,64,32],0)->f32[64,32],f32[64,32],f32[64,32]",
    "aten.squeeze.dim(f32[8,1,16],1)->f32[8,16]",
)


def _views() -> Iterator[tuple[int, int, Make]]:
    for key in TIMED_VIEWS:
        yield 1, 1, lambda p, key=key: key  # type: ignore[misc]

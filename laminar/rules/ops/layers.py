"""Rules of the ops that layers are made of: products with a bias, softmax, losses, norms, attention, convolution."""

from __future__ import annotations

from laminar.rules.notation import Call, Rule, RuleFn, parse_rule
from laminar.rules.ops.families import aligned, broadcast, letters, normal_dims, text


def added(product: str) -> RuleFn:
    """addmm and its kin: a product plus a broadcast first input."""

    def rule(call: Call) -> Rule:
        out = [f[0] for f in parse_rule(product)[1][0]]
        bias = " ".join(aligned(call.ins[0], call.out.shape, out))
        return Rule(f"{bias or '[]'}, {product}", linear="01|02", additive="0")

    return rule


def vector_norm(call: Call) -> Rule:
    """The largest magnitude combines by max, magnitudes by sum, squares by expansion; other orders stay whole."""
    order = 2.0 if call.arg(1) is None else float(call.arg(1))
    rank = len(call.ins[0].shape)
    dims = normal_dims(call.arg(2), rank)
    keep = bool(call.arg(3, False))
    kind = {float("inf"): "max", float("-inf"): "min", 1.0: "sum", 0.0: "sum"}.get(order)
    names = letters(rank)
    source = names if kind or order == 2 else ["." if i in dims else n for i, n in enumerate(names)]
    out = ["." if i in dims else n for i, n in enumerate(names) if keep or i not in dims]
    reduced = [names[i] for i in dims]
    return Rule(
        text(call, [source], [out]),
        reduce=dict.fromkeys(reduced, kind) if kind else {},
        expand=dict.fromkeys(reduced, "B") if order == 2 else {},
    )


def cdist(call: Call) -> Rule:
    """_cdist_forward(x, y, p, mode): distances of every row of x to every row of y."""
    names = [*letters(len(call.out.shape) - 2), "p", "r"]
    shape = call.out.shape
    x = [*aligned_batch(call.ins[0].shape, shape, names), "p", "."]
    y = [*aligned_batch(call.ins[1].shape, shape, names), "r", "."]
    return Rule(text(call, [x, y], [names]))


def cdist_backward(call: Call) -> Rule:
    """_cdist_backward(grad, x, y, p, distances) -> grad of x, a sum over the rows of y."""
    shape = call.ins[0].shape
    names = [*letters(len(shape) - 2), "p", "r"]
    sides = [[*names], [*aligned_batch(call.ins[1].shape, shape, names), "p", "."]]
    sides += [[*aligned_batch(call.ins[2].shape, shape, names), "r", "."], [*names]]
    if call.ins[3].shape != shape or call.out.shape[:-2] != shape[:-2]:
        sides = [["."] * len(s.shape) for s in call.ins]
        return Rule(text(call, sides, [["."] * len(call.out.shape)]), linear="0")
    return Rule(text(call, sides, [[*names[:-1], "."]]), linear="0")


def aligned_batch(shape: tuple[int, ...], full: tuple[int, ...], names: list[str]) -> list[str]:
    """Factors of all dims but the last two of a tensor broadcast against `full`."""
    offset = len(full) - len(shape)
    return [names[offset + i] if n == full[offset + i] else "." for i, n in enumerate(shape[:-2])]


def trilinear(call: Call) -> Rule:
    """_trilinear(a, b, c, expand_a, expand_b, expand_c, summed, unroll): one letter per dim of the joint shape."""
    rank = len(call.ins[0].shape) + len(call.arg(3))
    names = letters(rank)
    sides = [[n for i, n in enumerate(names) if i not in {d % rank for d in call.arg(3 + k)}] for k in range(3)]
    out = [n for i, n in enumerate(names) if i not in {d % rank for d in call.arg(6)}]
    sizes: dict[str, int] = {}
    for side, spec in zip(sides, call.ins, strict=True):
        for n, size in zip(side, spec.shape, strict=True):
            sizes[n] = max(sizes.get(n, 0), size)
    sides = [
        [n if size == sizes[n] else "." for n, size in zip(side, spec.shape, strict=True)]
        for side, spec in zip(sides, call.ins, strict=True)
    ]
    return Rule(text(call, sides, [out]), linear="0|1|2")


def loss(reduction_arg: int) -> RuleFn:
    """A pointwise loss and its reduction; a mean is expanded into a sum and a division."""

    def rule(call: Call) -> Rule:
        shape = broadcast(call.ins)
        reduction = call.arg(reduction_arg)
        names = letters(len(shape)) if reduction != MEAN or call.ins[0].shape == shape else ["."] * len(shape)
        ins = [aligned(s, shape, names) for s in call.ins]
        return Rule(
            text(call, ins, [names if reduction == 0 else []]),
            expand=dict.fromkeys(names, "B") if reduction == MEAN else {},
        )

    return rule


def loss_backward(reduction_arg: int) -> RuleFn:
    """(grad, x, target, ...): a mean divides by a count that no single rank knows, so it is expanded."""

    def rule(call: Call) -> Rule:
        mean = call.arg(reduction_arg) == MEAN
        rank = len(call.out.shape)
        names = letters(rank) if not mean or call.ins[1].shape == call.out.shape else ["."] * rank
        ins = [aligned(s, call.out.shape, names) for s in call.ins]
        return Rule(text(call, ins, [names]), linear="0", expand=dict.fromkeys(names, "S") if mean else {})

    return rule


def softmax(call: Call) -> Rule:
    """Along its dim by expansion: maximum and sum are reduced, the rest is local."""
    rank = len(call.out.shape)
    names = letters(rank)
    if not rank:
        return Rule(text(call, [[]], [[]]))
    d = names[call.arg(1) % rank]
    if call.op == "aten._safe_softmax":
        names = ["." if n == d else n for n in names]
        return Rule(text(call, [names], [names]))
    return Rule(text(call, [names], [names]), expand={d: "S"})


def softmax_backward(call: Call) -> Rule:
    """(grad, output, dim, dtype)."""
    rank = len(call.out.shape)
    names = letters(rank)
    if not rank:
        return Rule(text(call, [[], []], [[]]))
    return Rule(text(call, [names, names], [names]), linear="0", expand={names[call.arg(2) % rank]: "S"})


MEAN, SUM = 1, 2


def nll(call: Call) -> Rule:
    """(log-probabilities, target, weight, reduction, ignore_index) -> loss, total weight.

    A sum over samples is partial; a mean is not, so it is expanded into sum and division. Over
    split classes each rank counts only targets of its own.
    """
    x = call.ins[0].shape
    reduction = call.arg(3)
    if len(x) == 1 and reduction == 0:  # the total weight of one sample is its own, and no sum
        return Rule(text(call, [["."] * len(s.shape) for s in call.ins], [[], []]))
    spatial = letters(len(x) - 2) if len(x) > 2 else []
    batch = ["n"] if len(x) > 1 else []
    ins = [[*batch, "c", *spatial], [*batch, *spatial] if call.ins[1].shape else []]
    if call.at(2) is not None:
        ins.append(["c"])
    loss = [*batch, *spatial] if reduction == 0 and call.outs[0] and call.outs[0].shape else []
    over = {"c": "BB"} | dict.fromkeys((*batch, *spatial), "BB")
    if reduction == MEAN:
        return Rule(text(call, ins, [loss, []]), expand=over)
    if reduction == 0:
        return Rule(
            text(call, ins, [loss, []]), whole=dict.fromkeys((*batch, *spatial), "1"), local={"c": "laminar.nll_at"}
        )
    return Rule(text(call, ins, [loss, []]), local={"c": "laminar.nll_at"})


def nll_backward(call: Call) -> Rule:
    """(grad, x, target, weight, reduction, ignore_index, total weight) -> grad of x."""
    x = call.ins[1].shape
    spatial = letters(len(x) - 2) if len(x) > 2 else []
    batch = ["n"] if len(x) > 1 else []
    full = [*batch, "c", *spatial]
    grad = [*batch, *spatial] if call.ins[0].shape else []
    ins = [grad, full, [*batch, *spatial] if call.ins[2].shape else []]
    if call.at(3) is not None:
        ins.append(["c"])
    ins.append([])
    return Rule(text(call, ins, [full]), linear="0", local={"c": "laminar.nll_backward_at"})


def _normed(call: Call, x: int, shape_arg: int) -> tuple[list[str], list[str]]:
    rank = len(call.ins[x].shape)
    inner = len(call.arg(shape_arg))
    return letters(rank - inner, "r"), letters(inner, "h")


def layer_norm(call: Call) -> Rule:
    """(x, shape, weight, bias, eps) -> y, mean, rstd."""
    rows, hidden = _normed(call, 0, 1)
    ins = [[*rows, *hidden]] + [hidden for k in (2, 3) if call.at(k) is not None]
    stats = [*rows, *["."] * len(hidden)]
    return Rule(text(call, ins, [[*rows, *hidden], stats, stats]), expand=dict.fromkeys(hidden, "SBB"))


def layer_norm_backward(call: Call) -> Rule:
    """(grad, x, shape, mean, rstd, weight, bias, mask) -> dx, dweight, dbias."""
    rows, hidden = _normed(call, 1, 2)
    full, stats = [*rows, *hidden], [*rows, *["."] * len(hidden)]
    ins = [full, full, stats, stats] + [hidden for k in (5, 6) if call.at(k) is not None]
    return Rule(
        text(call, ins, [full, hidden if call.outs[1] else [], hidden if call.outs[2] else []]),
        linear="0",
        expand=dict.fromkeys(hidden, "SSS"),
    )


def group_norm(call: Call) -> Rule:
    """(x, weight, bias, N, C, HxW, groups, eps) -> y, mean, rstd: batch and whole groups."""
    groups = call.arg(6)
    inner = call.ins[0].shape[1] // groups if call.ins[0].shape[1] % groups == 0 else 0
    c = f"(g {inner})" if inner > 1 else "g"
    full = ["n", c, *["."] * (len(call.ins[0].shape) - 2)]
    if not inner or call.outs[1] is None or call.outs[1].shape[1] != call.ins[0].shape[1] // inner:
        c, full = ".", ["n", *["."] * (len(call.ins[0].shape) - 1)]
        return Rule(
            text(call, [full] + [["."] for k in (1, 2) if call.at(k) is not None], [full, ["n", "."], ["n", "."]])
        )
    ins = [full] + [[c] for k in (1, 2) if call.at(k) is not None]
    return Rule(text(call, ins, [full, ["n", "g"], ["n", "g"]]), sizes={"g": call.ins[0].shape[1] // inner})


def group_norm_backward(call: Call) -> Rule:
    """(grad, x, mean, rstd, weight, N, C, HxW, groups, mask) -> dx, dweight, dbias."""
    groups = call.ins[2].shape[1]
    inner = call.ins[1].shape[1] // groups
    c = f"(g {inner})" if inner > 1 else "g"
    full = ["n", c, *["."] * (len(call.ins[1].shape) - 2)]
    ins = [full, full, ["n", "g"], ["n", "g"]] + ([[c]] if call.at(4) is not None else [])
    outs = [full, *[[c] if o else [] for o in call.outs[1:]]]
    return Rule(text(call, ins, outs), sizes={"g": groups}, linear="0")


def batch_norm_rule(call: Call) -> Rule:
    """(x, weight, bias, eps) -> y, mean, rstd, with the statistics of the whole batch."""
    over = ["n", *letters(len(call.ins[0].shape) - 2)]
    full = ["n", "c", *over[1:]]
    ins = [full] + [["c"] for k in (1, 2) if call.at(k) is not None]
    return Rule(text(call, ins, [full, ["c"], ["c"]]), expand=dict.fromkeys(over, "SBB"))


def batch_norm_backward_rule(call: Call) -> Rule:
    """(grad, x, weight, mean, rstd) -> dx, dweight, dbias."""
    over = ["n", *letters(len(call.ins[0].shape) - 2)]
    full = ["n", "c", *over[1:]]
    ins = [full, full] + ([["c"]] if call.at(2) is not None else []) + [["c"], ["c"]]
    return Rule(text(call, ins, [full, ["c"], ["c"]]), linear="0", expand=dict.fromkeys(over, "SBB"))


def batch_norm_apply_rule(call: Call) -> Rule:
    """(x, weight, bias, mean, var, eps): statistics given, so every dim splits."""
    full = ["n", "c", *letters(len(call.ins[0].shape) - 2)]
    return Rule(text(call, [full] + [["c"]] * (len(call.ins) - 1), [full]))


def batch_norm_moments_rule(call: Call) -> Rule:
    """(x) -> sum, sum of squares per channel."""
    full = ["n", "c", *letters(len(call.ins[0].shape) - 2)]
    return Rule(text(call, [full], [["c"], ["c"]]))


def batch_norm_sums_rule(call: Call) -> Rule:
    """(dy, x, mean, rstd) -> dweight, dbias."""
    full = ["n", "c", *letters(len(call.ins[0].shape) - 2)]
    return Rule(text(call, [full, full, ["c"], ["c"]], [["c"], ["c"]]), linear="0")


def batch_norm_grad_rule(call: Call) -> Rule:
    """(dy, x, weight, mean, rstd, dweight, dbias, n): linear in the gradients together, every dim splits."""
    full = ["n", "c", *letters(len(call.ins[0].shape) - 2)]
    last = len(call.ins) - 1
    return Rule(text(call, [full, full] + [["c"]] * (last - 1), [full]), linear=f"0+{last - 1}+{last}")


def _heads(q: tuple[int, ...], k: tuple[int, ...]) -> tuple[str, str, dict[str, int]]:
    """Factors of the head dims; grouped queries: each key head serves a block of query heads."""
    if q[1] == k[1]:
        return "h", "h", {"h": q[1]}
    return "(h r)", "h", {"h": k[1], "r": q[1] // k[1]}


def _mask(call: Call, position: int, heads: str) -> list[list[str]]:
    spec = call.at(position)
    if spec is None:
        return []
    q = call.ins[0].shape
    full = (q[0], q[1], *spec.shape[-2:])
    names = ["b", heads, "t", "."]
    offset = 4 - len(spec.shape)
    out = []
    for i, n in enumerate(spec.shape):
        whole = full[offset + i] if offset + i < 2 else (q[2] if offset + i == 2 else n)
        out.append(names[offset + i] if n == whole and n != 1 else ".")
    return [out]


def attention_rule(call: Call) -> Rule:
    """(q, k, v, mask, causal, scale) -> out, logsumexp. Causal or not, queries split by row; keys stay whole."""
    hq, hk, sizes = _heads(call.ins[0].shape, call.ins[1].shape)
    query, key = ["b", hq, "t", "."], ["b", hk, ".", "."]
    ins = [query, key, key, *_mask(call, 3, hq)]
    local = {"t": "laminar.attention_at"} if call.arg(4) else {}
    return Rule(text(call, ins, [query, query[:3]]), sizes=sizes, local=local, several="t")


def attention_backward_rule(call: Call) -> Rule:
    """(dout, q, k, v, mask, out, lse, causal, scale) -> dq, dk, dv."""
    hq, hk, sizes = _heads(call.ins[1].shape, call.ins[2].shape)
    query, key = ["b", hq, "t", "."], ["b", hk, ".", "."]
    ins = [query, query, key, key, *_mask(call, 4, hq), query, query[:3]]
    local = {"t": "laminar.attention_backward_at"} if call.arg(7) else {}
    # A split of the queries within a group leaves the keys' gradients partial, as does one of rows.
    return Rule(text(call, ins, [query, key, key]), sizes=sizes, linear="0", local=local, several="t")


def lstm_rule(call: Call) -> Rule:
    """(x, h0, c0, w_ih, w_hh, bias, reverse) -> y, h, c, gates, cells: only the batch splits."""
    ins = [[".", "n", "."], ["n", "."], ["n", "."], [".", "."], [".", "."]]
    if call.at(5) is not None:
        ins.append(["."])
    return Rule(text(call, ins, [[".", "n", "."], ["n", "."], ["n", "."], [".", "n", "."], [".", "n", "."]]))


def lstm_backward_rule(call: Call) -> Rule:
    """(dy, dh, dc, x, h0, c0, w_ih, w_hh, y, gates, cells, reverse) -> dx, dh0, dc0, dw_ih, dw_hh, dbias."""
    seq, state = [".", "n", "."], ["n", "."]
    ins = [seq, state, state, seq, state, state, [".", "."], [".", "."], seq, seq, seq]
    return Rule(text(call, ins, [seq, state, state, [".", "."], [".", "."], ["."]]), linear="012")


def ctc_loss_rule(call: Call) -> Rule:
    """(log_probs, targets, input_lengths, target_lengths, ...) -> nll, alpha: only the batch splits."""
    return Rule(text(call, [[".", "n", "."], ["n", "."], ["n"], ["n"]], [["n"], ["n", ".", "."]]))


def ctc_loss_backward_rule(call: Call) -> Rule:
    """(grad, log_probs, targets, input_lengths, target_lengths, nll, alpha, ...) -> dlog_probs."""
    seq = [".", "n", "."]
    return Rule(text(call, [["n"], seq, ["n", "."], ["n"], ["n"], ["n"], ["n", ".", "."]], [seq]), linear="0")


def convolution(call: Call) -> Rule:
    """(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    transposed, groups = bool(call.arg(6)), call.arg(8)
    space = ["."] * (len(call.ins[0].shape) - 2)
    bias = [["o"]] if call.at(2) is not None else []
    if groups == 1:
        weight = ["i", "o", *space] if transposed else ["o", "i", *space]
        return Rule(
            text(call, [["n", "i", *space], weight, *bias], [["n", "o", *space]]),
            linear="02|12" if bias else "0|1",
            additive="2" if bias else "",
        )
    # Whole groups split; how many a rank has is worked out from its shapes.
    i, o = (_grouped(groups, s.shape[1]) for s in (call.ins[0], call.out))
    weight = [i if transposed else o, ".", *space]
    return Rule(
        text(call, [["n", i, *space], weight, *[[o]] * len(bias)], [["n", o, *space]]),
        sizes={"g": groups},
        linear="02|12" if bias else "0|1",
        additive="2" if bias else "",
    )


def _grouped(groups: int, channels: int) -> str:
    return "g" if channels == groups else f"(g {channels // groups})"


def convolution_backward(call: Call) -> Rule:
    """(grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask)."""
    transposed, groups = bool(call.arg(7)), call.arg(9)
    space = ["."] * (len(call.ins[0].shape) - 2)
    if groups == 1:
        weight = ["i", "o", *space] if transposed else ["o", "i", *space]
        i, o = "i", "o"
    else:
        o, i = (_grouped(groups, s.shape[1]) for s in call.ins[:2])
        weight = [i if transposed else o, ".", *space]
    outs = [["n", i, *space] if call.outs[0] else [], weight if call.outs[1] else [], [o] if call.outs[2] else []]
    return Rule(
        text(call, [["n", o, *space], ["n", i, *space], weight], outs),
        sizes={} if groups == 1 else {"g": groups},
        linear="0",
        whole={"i": "2"} if groups == 1 else {},
    )


def weight_norm(dim_arg: int, linear: str = "") -> RuleFn:
    """_weight_norm_interface(v, g, dim) and its backward: only the dim that is not normed splits."""

    def rule(call: Call) -> Rule:
        rank = len(call.ins[0].shape)
        d = call.arg(dim_arg) % rank
        full = call.ins[0].shape
        sides = []
        for spec in (*call.ins, *call.outs):
            shape = spec.shape if spec else ()
            sides.append(["a" if i == d and len(shape) == rank and n == full[d] else "." for i, n in enumerate(shape)])
        return Rule(text(call, sides[: len(call.ins)], sides[len(call.ins) :]), linear=linear)

    return rule


def renorm(call: Call) -> Rule:
    """renorm(x, p, dim, most): each slice along dim has its own norm."""
    rank = len(call.out.shape)
    d = call.arg(2) % rank
    side = ["a" if i == d else "." for i in range(rank)]
    return Rule(text(call, [side], [side]))


SPATIAL_RANK = {"1d": 1, "2d": 2, "3d": 3}


def spatial(linear: str = "", only_batch: bool = False) -> RuleFn:
    """Pooling, padding and resampling: image dims stay whole, batch and channels split."""

    def rule(call: Call) -> Rule:
        count = next((n for key, n in SPATIAL_RANK.items() if key in call.op), 1)
        sides = []
        for spec in (*call.ins, *call.outs):
            shape = spec.shape if spec else ()
            free = len(shape) - count if not only_batch else (1 if len(shape) > 2 else 0)
            names = ["n", "c"][2 - free :] if not only_batch else ["n"][:free]
            sides.append([*names, *["."] * (len(shape) - len(names))])
        n = len(call.ins)
        # Means of whole numbers are rounded, so sums don't pass.
        return Rule(text(call, sides[:n], sides[n:]), linear=linear if call.ins[0].is_float else "")

    return rule


def grid_sampler(call: Call) -> Rule:
    """(x, grid): batch and channels."""
    space = ["."] * (len(call.ins[0].shape) - 2)
    return Rule(text(call, [["n", "c", *space], ["n", *space, "."]], [["n", "c", *space]]), linear="0")


def grid_sampler_backward(call: Call) -> Rule:
    """(grad, x, grid, ..., mask) -> dx, dgrid: a sum over channels."""
    space = ["."] * (len(call.ins[0].shape) - 2)
    full, grid = ["n", "c", *space], ["n", *space, "."]
    outs = [side if o else [] for side, o in zip((full, grid), call.outs, strict=True)]
    return Rule(text(call, [full, full, grid], outs), linear="0")


def channel_shuffle(call: Call) -> Rule:
    """channel_shuffle(x, groups): channels stay whole."""
    side = [n if i != 1 else "." for i, n in enumerate(letters(len(call.out.shape)))]
    return Rule(text(call, [side], [side]), linear="0", through="0")

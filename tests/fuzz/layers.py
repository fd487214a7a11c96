"""Layers: norms, convolutions, pooling, embeddings, attention, recurrence, dropout."""

from __future__ import annotations

import math

from tests.fuzz.program import Statement
from tests.fuzz.scope import PLAIN, Scope, made


def norm(g: Scope) -> Statement | None:
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, s = found
    name = g.fresh("norm")
    choices = [
        f"nn.LayerNorm({s[-1]})",
        f"nn.RMSNorm({s[-1]}, eps=1e-5)",
        f"nn.LayerNorm({s[-1]}, elementwise_affine=False)",
        f"nn.LayerNorm({list(s[1:])})",
    ]
    if s[-1] == 1 or math.prod(s[1:]) == 1:
        return None
    if len(s) in (3, 4) and s[1] > 1:
        choices += [f"nn.GroupNorm({2 if s[1] % 2 == 0 else 1}, {s[1]})"]
        if math.prod(s[2:]) > 1:
            choices += [f"nn.InstanceNorm{len(s) - 2}d({s[1]}, affine=True)"]
    return made(g, s, f"self.{name}({a})", ins=(a,), init=[f"self.{name} = {g.rng.choice(choices)}"])


def batch_norm(g: Scope) -> Statement | None:
    found = g.pick(lambda s: PLAIN(s) and len(s) in (2, 3, 4))
    if found is None:
        return None
    a, s = found
    name, more = g.fresh("norm"), g.rng.choice(["", ", affine=False", ", momentum=0.3", ", track_running_stats=False"])
    layer = f"nn.BatchNorm{max(1, len(s) - 2)}d({s[1]}{more})"
    return made(g, s, f"self.{name}({a})", ins=(a,), init=[f"self.{name} = {layer}"], traits="coupled state")


def convolution(g: Scope) -> Statement | None:
    found = g.pick(lambda s: PLAIN(s) and len(s) in (3, 4) and min(s[2:]) >= 2)
    if found is None:
        return None
    a, s = found
    dims, k, name = len(s) - 2, g.rng.choice([2, 4]), g.fresh("conv")
    groups = 2 if s[1] % 2 == 0 and g.rng.random() < 0.2 else 1
    init = [f"self.{name} = nn.Conv{dims}d({s[1]}, {k}, 3, padding=1, groups={groups})"]
    shape = (-1, k, *s[2:])
    code = f"self.{name}({a})"
    if dims == 2 and g.rng.random() < 0.5:
        which = g.rng.random()
        if which < 0.6:
            init.append(f"self.{name} = self.{name}.to(memory_format=torch.channels_last)")
        if which > 0.3:
            code = f"self.{name}({a}.contiguous(memory_format=torch.channels_last))"
    elif groups == 1 and g.rng.random() < 0.2:
        init = [f"self.{name} = nn.ConvTranspose{dims}d({s[1]}, {k}, 3, padding=1)"]
    return made(g, shape, code, ins=(a,), init=init)


def pool(g: Scope) -> Statement | None:
    found = g.pick(lambda s: PLAIN(s) and len(s) in (3, 4) and min(s[2:]) >= 2)
    if found is None:
        return None
    a, s = found
    d = len(s) - 2
    half = tuple(k // 2 for k in s[2:])
    code, shape = g.rng.choice(
        [
            (f"F.avg_pool{d}d({a}, 2)", (*s[:2], *half)),
            (f"F.max_pool{d}d({a}, 2)", (*s[:2], *half)),
            (f"F.adaptive_avg_pool{d}d({a}, 1)", (*s[:2], *(1 for _ in half))),
            (f"F.adaptive_max_pool{d}d({a}, 1)", (*s[:2], *(1 for _ in half))),
            (f"F.interpolate({a}, scale_factor=2)", (*s[:2], *(2 * k for k in s[2:]))),
            (f"F.adaptive_avg_pool{d}d({a}, 2)", (*s[:2], *(2 for _ in half))),
        ]
    )
    return made(g, shape, code, ins=(a,)) if math.prod(abs(k) for k in shape) < 300 else None


def embedding(g: Scope) -> Statement | None:
    d, name = g.size() + 1, g.fresh("words")
    init = [f"self.{name} = nn.Embedding(7, {d})"]
    code, shape = g.rng.choice(
        [
            (f"self.{name}(ids)", (-1, 4, d)),
            (f"self.{name}(ids).mean(1)", (-1, d)),
            (f"self.{name}(ids[:, 0])", (-1, d)),
            (f"F.embedding(ids, self.{name}.weight)", (-1, 4, d)),
            (f"self.{name}.weight[ids]", (-1, 4, d)),
            (f"F.one_hot(ids, 7).to(x.dtype) @ self.{name}.weight", (-1, 4, d)),
            (f"self.{name}(ids) @ self.{name}.weight.t()", (-1, 4, 7)),
            (f"F.embedding_bag(ids, self.{name}.weight)", (-1, d)),
            (f"self.{name}(ids).masked_fill((ids == 2)[..., None], 0.0)", (-1, 4, d)),
        ]
    )
    if g.rng.random() < 0.2:
        init = [f"self.{name} = nn.Embedding(7, {d}, padding_idx=1)"]
    return made(g, shape, code, ins=(), init=init)


def attention(g: Scope) -> Statement | None:
    found = g.pick(lambda s: PLAIN(s) and len(s) == 3 and s[2] % 2 == 0 and s[1] > 1)
    if found is None:
        return None
    a, (n, t, d) = found
    name = g.fresh("attend")
    if g.rng.random() < 0.4:
        init = [f"self.{name} = nn.MultiheadAttention({d}, 2, batch_first=True)"]
        more = g.rng.choice(
            [
                "",
                ", need_weights=False",
                f", attn_mask=torch.ones({t}, {t}, dtype=torch.bool).triu(1), need_weights=False",
            ]
        )
        return made(g, (n, t, d), f"self.{name}({a}, {a}, {a}{more})[0]", ins=(a,), init=init)
    init = [f"self.{name} = nn.Linear({d}, {3 * d})"]
    heads = f"q, k, v = self.{name}({a}).view(n, {t}, 3, 2, {d // 2}).permute(2, 0, 3, 1, 4).unbind(0)"
    causal = g.rng.random() < 0.5
    core = f"F.scaled_dot_product_attention(q, k, v, is_causal={causal})"
    if g.rng.random() < 0.4:
        mask = f".masked_fill(torch.ones({t}, {t}, dtype=torch.bool).triu(1), float('-inf'))" if causal else ""
        core = f"(((q @ k.transpose(-1, -2)) / {d // 2} ** 0.5){mask}.softmax(-1) @ v)"
    return made(g, (n, t, d), heads, f"{core}.transpose(1, 2).reshape(n, {t}, {d})", ins=(a,), init=init)


def recurrent(g: Scope) -> Statement | None:
    found = g.pick(lambda s: PLAIN(s) and len(s) == 3)
    if found is None:
        return None
    a, (n, t, d) = found
    h, name = g.rng.choice([2, 4]), g.fresh("rnn")
    kind = g.rng.choice(["LSTM", "GRU", "RNN"])
    if g.rng.random() < 0.6:
        both = g.rng.random() < 0.3
        init = [f"self.{name} = nn.{kind}({d}, {h}, batch_first=True, bidirectional={both})"]
        return made(g, (n, t, 2 * h if both else h), f"self.{name}({a})[0]", ins=(a,), init=init)
    init = [f"self.{name} = nn.{kind}Cell({d}, {h})"]
    state = f"s = (x.new_zeros(n, {h}), x.new_zeros(n, {h}))" if kind == "LSTM" else f"s = x.new_zeros(n, {h})"
    loop = (f"for step in {a}.unbind(1):", f"    s = self.{name}(step, s)")
    return made(g, (n, h), state, *loop, "s[0]" if kind == "LSTM" else "s", ins=(a,), init=init)


def dropout(g: Scope) -> Statement | None:
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, s = found
    name = g.fresh("drop")
    code = g.rng.choice(
        [
            f"self.{name}({a})",
            f"F.dropout({a}, 0.3, self.training)",
            f"{a} * (torch.rand_like({a}) < 0.8)",
            f"{a} + 0.1 * torch.randn_like({a})",
            f"F.dropout({a}, 0.0)",
            f"F.alpha_dropout({a}, 0.2, True)",
        ]
    )
    return made(g, s, code, ins=(a,), init=[f"self.{name} = nn.Dropout(0.25)"], traits="draws")

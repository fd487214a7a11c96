# ruff: noqa: E501 - lines of other programs
"""Elementwise ops, products with weights in every layout, and reductions."""

from __future__ import annotations

from tests.fuzz.program import Statement
from tests.fuzz.scope import PLAIN, Scope, made

UNARY = """torch.tanh({a}) torch.sigmoid({a}) F.relu({a}) F.gelu({a}) F.silu({a}) F.softplus({a}) {a}.abs() -{a}
    {a}.sin() {a}.cos() F.leaky_relu({a},0.1) F.elu({a}) F.hardtanh({a}) {a}.clamp(-1,0.7) {a}.clamp(min=-0.5)
    torch.tanh({a}).exp() F.hardswish({a}) F.mish({a}) {a}.square().add(0.1).sqrt() {a}.square().add(1).log()
    {a}.square().add(1).rsqrt() {a}.sign()*{a} {a}/(1+{a}.abs()) {a}.float().to({a}.dtype) torch.erf({a}) {a}.double().to({a}.dtype)
    F.logsigmoid({a}) F.softsign({a}) {a}.pow(3)*0.1 {a}.sub(0.5).mul(2) {a}.detach()*0.5+{a} F.relu6({a}) {a}.clone()
    torch.nan_to_num({a}) {a}.contiguous() torch.where({a}>0,{a},0.1*{a}) {a}*({a}>0) torch.atan({a}) F.celu({a}) F.selu({a})
    F.threshold({a},0.1,0.2) F.tanhshrink({a}) F.hardsigmoid({a}) {a}.sinh().tanh() {a}.expm1().clamp(max=2) {a}.floor()*0.1+{a}
    torch.remainder({a},1.5) {a}.frac() torch.logit(torch.sigmoid({a})) torch.asinh({a}) {a}.reciprocal().clamp(-1,1)""".split()


def unary(g: Scope) -> Statement | None:
    a, shape = g.pick()  # type: ignore[misc]
    return made(g, shape, g.rng.choice(UNARY).format(a=a), ins=(a,))


BINARY = """{a}+{b} {a}-{b} {a}*{b} torch.maximum({a},{b}) torch.minimum({a},{b}) {a}/(1+{b}.square()) torch.lerp({a},{b},0.3)
    torch.where({a}>{b},{a},{b}*0.5) torch.atan2({a},{b}.square()+1) torch.addcmul({a},{b},{b}) torch.hypot({a}+3,{b}+3)
    torch.logaddexp({a},{b}) {a}*{b}.detach() {a}.add({b},alpha=0.5) torch.addcdiv({a},{b},{b}.square()+1)
    {a}.masked_fill({b}>0.5,0.2) torch.stack([{a},{b}]).sum(0) torch.stack([{a},{b}],-1).amax(-1)""".split()


def binary(g: Scope) -> Statement | None:
    a, shape = g.pick()  # type: ignore[misc]
    b, _ = g.pick(lambda s: s == shape)  # type: ignore[misc]
    return made(g, shape, g.rng.choice(BINARY).format(a=a, b=b), ins=(a, b))


def broadcast(g: Scope) -> Statement | None:
    """A parameter that is spread over samples and more."""
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, shape = found
    k = g.rng.randint(1, len(shape) - 1)
    dims = tuple(1 if g.rng.random() < 0.3 else d for d in shape[k:])
    if g.rng.random() < 0.2:
        dims = (1, *shape[1:])
    if g.rng.random() < 0.1:
        dims = ()
    p, init = g.parameter(dims)
    form = g.rng.choice(
        [
            "{a} + {p}",
            "{a} * {p}",
            "{a} - {p}",
            "torch.addcmul({a}, {a}, {p})",
            "{a} * {p}.tanh()",
            "torch.maximum({a}, {p})",
            "{a} * (1 + {p})",
            "torch.lerp({a}, {p}, 0.2)",
            "{p} + {a}",
            "{a} * {p}.expand_as({a})",
            "torch.where({a} > {p}, {a}, {p})",
        ]
    )
    return made(g, shape, form.format(a=a, p=p), ins=(a,), init=init)


def linear(g: Scope) -> Statement | None:
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, shape = found
    k, name = g.size(), g.fresh("layer")
    bias = g.rng.random() < 0.7
    init = [f"self.{name} = nn.Linear({shape[-1]}, {k}, bias={bias})"]
    if g.rng.random() < 0.1:
        init.append(f"self.{name} = nn.utils.parametrizations.weight_norm(self.{name})")
    elif g.rng.random() < 0.1:
        init.append(f"self.{name}.weight.requires_grad_(False)")
    return made(g, (*shape[:-1], k), f"self.{name}({a})", ins=(a,), init=init)


def twice(g: Scope) -> Statement | None:
    """One layer used in two places, or its weight turned: what autoencoders and tied heads do."""
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, shape = found
    d, k, name = shape[-1], g.size(), g.fresh("layer")
    init = [f"self.{name} = nn.Linear({d}, {k}, bias=False)"]
    form = g.rng.choice(
        [
            f"F.linear(torch.tanh(self.{name}({a})), self.{name}.weight.t())",
            f"torch.tanh(self.{name}({a})) @ self.{name}.weight",
            f"self.{name}({a}) @ self.{name}.weight + {a}",
            f"F.linear(F.linear({a}, self.{name}.weight), self.{name}.weight.transpose(0, 1).contiguous())",
        ]
    )
    if g.rng.random() < 0.3:
        other = g.fresh("layer")
        init += [f"self.{other} = nn.Linear({d}, {k}, bias=False)", f"self.{other}.weight = self.{name}.weight"]
        form = f"torch.tanh(self.{other}({a})) @ self.{name}.weight"
    return made(g, shape, form, ins=(a,), init=init)


def einsum(g: Scope) -> Statement | None:
    found = g.pick(lambda s: PLAIN(s) and len(s) == 2)
    if found is None:
        return None
    a, (_, d) = found
    k, h = g.size(), g.rng.choice([2, 3])
    form, dims, out = g.rng.choice(
        [
            ("bd,kd->bk", (k, d), (-1, k)),
            ("bd,dk->bk", (d, k), (-1, k)),
            ("bd,hdk->bhk", (h, d, k), (-1, h, k)),
            ("bd,hkd->bkh", (h, k, d), (-1, k, h)),
            ("bd,d->b", (d,), (-1,)),
            ("bd,dkh->bhk", (d, k, h), (-1, h, k)),
            ("bd,kd->bkd", (k, d), (-1, k, d)),
            ("bd,kh->bdkh", (k, h), (-1, d, k, h)),
            ("bd,hd->bh", (h, d), (-1, h)),
        ]
    )
    p, init = g.parameter(dims)
    return made(g, out, f'torch.einsum("{form}", {a}, {p})', ins=(a,), init=init)


def product(g: Scope) -> Statement | None:
    found = g.pick(lambda s: PLAIN(s) and len(s) == 3)
    if found is None:
        return None
    a, (n, t, d) = found
    k = g.size()
    forms = [
        ("{a} @ {p}", (d, k), (n, t, k)),
        ("{a} @ {p}.t()", (k, d), (n, t, k)),
        ("torch.matmul({a}.transpose(1, 2), {p})", (t, k), (n, d, k)),
        ("torch.matmul({p}, {a})", (k, t), (n, k, d)),
        ("torch.bmm({a}, {p}.expand(n, -1, -1))", (d, k), (n, t, k)),
        ('torch.einsum("btd,dk->bkt", {a}, {p})', (d, k), (n, k, t)),
        ('torch.einsum("btd,tdk->btk", {a}, {p})', (t, d, k), (n, t, k)),
        ("torch.bmm({a}.transpose(0, 1), {p}.transpose(1, 2)).transpose(0, 1)", (t, k, d), (n, t, k)),
        ("torch.tensordot({a}, {p}, dims=([2], [0]))", (d, k), (n, t, k)),
        ("torch.addmm({p}.sum(0), {a}.flatten(0, 1), {p}).view(n, " + f"{t}, {k})", (d, k), (n, t, k)),
        ("F.bilinear({a}.contiguous(), {a}.contiguous(), {p}[:, None, :] * {p}[:, :, None])", (k, d), (n, t, k)),
        ("torch.baddbmm({p}.expand(n, -1, -1), {a}, {a}.transpose(1, 2))", (t, t), (n, t, t)),
    ]
    form, dims, out = g.rng.choice(forms)
    p, init = g.parameter(dims)
    return made(g, out, form.format(a=a, p=p), ins=(a,), init=init)


def lists(g: Scope) -> Statement | None:
    """Parameters in lists and dicts, read by loops, slices and names."""
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, shape = found
    d, name, k = shape[-1], g.fresh("some"), g.rng.randint(2, 3)
    if g.rng.random() < 0.5:
        init = [f"self.{name} = nn.ParameterList([nn.Parameter(torch.randn({d}) * 0.4) for _ in range({k})])"]
        body = g.rng.choice(
            [
                f"sum({a} * p for p in self.{name})",
                f"sum({a} + p for p in self.{name}[:2])",
                f"{a} * self.{name}[-1] + self.{name}[0]",
                f"sum({a} * p.tanh() for p in nn.ParameterList([self.{name}[1]]))",
                f"torch.stack(list(self.{name})).mean(0) * {a}",
                f"torch.cat([{a} * p for p in self.{name}], -1)[..., :{d}]",
            ]
        )
    else:
        init = [f"self.{name} = nn.ParameterDict({{k: nn.Parameter(torch.randn({d}) * 0.4) for k in 'ab'}})"]
        body = g.rng.choice(
            [
                f"{a} * self.{name}['a'] + self.{name}['b']",
                f"sum({a} * p for p in self.{name}.values())",
                f"sum({a} * p for k, p in self.{name}.copy().items() if k != 'b')",
                f"{a} + self.{name}['a']",
            ]
        )
    return made(g, shape, body, ins=(a,), init=init)


def reduction(g: Scope) -> Statement | None:
    found = g.pick(lambda s: PLAIN(s) and len(s) >= 2)
    if found is None:
        return None
    a, s = found
    same = """torch.softmax({a},-1) F.log_softmax({a},-1) {a}-{a}.mean(-1,keepdim=True) F.normalize({a}+2,dim=-1) {a}.cumsum(-1)
        {a}/({a}.norm(dim=-1,keepdim=True)+1) {a}-torch.logsumexp({a},-1,keepdim=True) torch.softmax({a},1) F.softmin({a},-1)
        {a}*{a}.amax(-1,keepdim=True) {a}.cummax(-1)[0] {a}-{a}.amin(1,keepdim=True) F.gumbel_softmax({a}*0,dim=-1)*0+{a}""".split()
    fewer = """{a}.sum(-1) {a}.mean(-1) {a}.amax(-1) {a}.var(-1,correction=0) torch.logsumexp({a},-1) {a}.norm(dim=-1) {a}.prod(-1)
        {a}.square().mean(-1).add(1e-3).sqrt() {a}.max(-1)[0] {a}.median(-1)[0] {a}.std(-1,correction=0) {a}.amin(-1)""".split()
    if g.rng.random() < 0.5 or len(s) < 3:
        form = g.rng.choice(same)
        return made(g, s, form.format(a=a), ins=(a,), traits="draws" if "gumbel" in form else "")
    return made(g, s[:-1], g.rng.choice(fewer).format(a=a), ins=(a,))


def coupled(g: Scope) -> Statement | None:
    """Samples that see each other."""
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, s = found
    forms = [
        f"{a} - {a}.mean(0, keepdim=True)",
        f"torch.softmax({a}, 0)",
        f"{a} / ({a}.norm() + 1)",
        f"{a} * {a}.amax(0)",
        f"{a} - {a}.flatten(1).mean(0).mean()",
        f"{a}.flip(0) * 0.5 + {a}",
        f"{a}.roll(1, 0)",
        f"{a}.cumsum(0) / n",
        f"{a}.sort(0)[0]",
    ]
    if len(s) == 2:
        forms += [f"({a} @ {a}.t()).softmax(-1) @ {a}", f"{a} @ ({a}.t() @ {a}) / n"]
    return made(g, s, g.rng.choice(forms), ins=(a,), traits="coupled")

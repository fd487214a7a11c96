# ruff: noqa: E501 - lines of other programs
"""What fewer people write, and some do: scatters, decompositions, hooks, penalties, loops over modules."""

from __future__ import annotations

import math

from tests.fuzz.program import Shape, Statement
from tests.fuzz.scope import PLAIN, Scope, made

SAME = """{a}.cumprod(-1)  torch.zeros_like({a}).scatter_add(-1,{a}.argsort(-1),{a})  torch.diff({a},dim=-1,prepend={a}[...,:1])
    {a}.index_add(-1,torch.tensor([0]),{a}[...,:1])  torch.take_along_dim({a},{a}.argsort(-1),-1)  torch.fft.fft({a}).real
    torch.bucketize({a}.detach(),torch.tensor([-0.5,0.5],dtype=x.dtype)).to(x.dtype)+{a}  torch.clone({a}).fill_diagonal_(0.5) if {a}.dim()==2 else {a}
    {a}.logcumsumexp(-1)  {a}.tril() if {a}.dim()>2 else {a}.triu(1)  torch.masked_fill({a},{a}.isnan(),0.0)  {a}.view_as({a}).as_strided({a}.shape,{a}.stride())
    {a}.index_copy(-1,torch.tensor([0]),{a}[...,-1:])  F.cosine_similarity({a},{a}+1,dim=-1).unsqueeze(-1)*{a}  {a}.renorm(2,0,1.0)
    torch.rot90({a},2,(-1,0)).flip(0)  {a}.diff(n=1,append={a}[...,-1:])  {a}.clamp(torch.tensor(-0.3,dtype=x.dtype),torch.tensor(0.9,dtype=x.dtype))
    torch.cummin({a},-1).values  {a}.quantile(0.5,dim=-1,keepdim=True)+{a}  torch.heaviside({a}.detach(),torch.tensor(0.5,dtype=x.dtype))+{a}
    {a}.maximum(torch.zeros((),dtype=x.dtype))  torch.addmv({a}[...,0],{a},torch.ones({a}.shape[-1],dtype=x.dtype)).unsqueeze(-1)+{a} if {a}.dim()==2 else {a}
    torch.special.xlog1py({a},{a}.square())  torch.special.erfcx({a}.abs())+{a}  torch.polar({a}.abs()+0.1,{a}).abs()  torch.complex({a},{a}).imag
    torch.view_as_real(torch.complex({a},{a}*0.5)).sum(-1)  {a}.ldexp(torch.tensor(1))  {a}.fmod(1.0)  {a}.float().double().to(x.dtype)
    {a}.half().to(x.dtype)*0+{a}  torch.where({a}.bool(),{a},1.0)  {a}.sgn()+{a}  {a}.xlogy({a}.square()+1)  {a}.nansum(-1,keepdim=True)+{a}
    F.dropout({a},0.5,training=False)  {a}.softmax(-1,dtype=torch.float64).to(x.dtype)  {a}.log1p().nan_to_num() if False else {a}.abs().log1p()
    torch.stack([{a}.select(-1,i) for i in range({a}.shape[-1])],-1)  sum({a}.unbind(-1)).unsqueeze(-1)*{a}  {a}.hypot(torch.ones_like({a}))
    torch.einsum('...d,...e->...d',{a},{a})  torch.tensor_split({a},{a}.shape[-1],-1)[0]+{a}  {a}.argmax(-1,keepdim=True).to(x.dtype)+{a}
    F.one_hot({a}.argmax(-1),{a}.shape[-1]).to(x.dtype)*{a}  ({a}>0).to(x.dtype).cumsum(-1)*{a}
    torch.count_nonzero({a}>0,dim=-1).unsqueeze(-1)*{a}  {a}.aminmax(dim=-1,keepdim=True).max+{a}  torch.std_mean({a},-1,correction=0,keepdim=True)[1]*{a}
    {a}.reshape(n,-1).view({a}.shape)  torch.atleast_3d({a}).sum()*0+{a}  {a}.ravel().unflatten(0,{a}.shape)  {a}.expand(2,*{a}.shape).sum(0)
    {a}.new_tensor(0.5)*{a}  torch.block_diag({a}[0,...,0].flatten()[:1].view(1,1))*0+{a}  {a}.data*0.5+{a}  {a}.T.T if {a}.dim()==2 else {a}""".split(
    "  "
)
SAME = [" ".join(form.split()) for form in SAME if form.strip()]


def rare(g: Scope) -> Statement | None:
    found = g.pick(lambda s: PLAIN(s) and s[-1] >= 2)
    if found is None:
        return None
    a, shape = found
    form = g.rng.choice(SAME)
    over = (
        "coupled" if any(word in form for word in ("rot90", "atleast", "diagonal", "renorm", "block", "triu")) else ""
    )
    return made(g, shape, form.format(a=a), ins=(a,), traits=over)


def algebra(g: Scope) -> Statement | None:
    """Square matrices for each sample."""
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, s = found
    d = math.prod(s[1:])
    k = g.rng.choice([2, 3])
    name = g.fresh("layer")
    start = f"m = torch.tanh(self.{name}({a}.flatten(1))).view(n, {k}, {k})"
    spd = f"m @ m.mT + torch.eye({k}, dtype=x.dtype)"
    code, shape = g.rng.choice(
        [
            (f"torch.linalg.inv({spd})", (-1, k, k)),
            (f"torch.linalg.cholesky({spd})", (-1, k, k)),
            (f"torch.linalg.det({spd}).unsqueeze(-1)", (-1, 1)),
            (f"torch.linalg.solve({spd}, m)", (-1, k, k)),
            (f"torch.linalg.slogdet({spd})[1].unsqueeze(-1)", (-1, 1)),
            ("m.matrix_exp()", (-1, k, k)),
            ("torch.diagonal(m, dim1=-2, dim2=-1)", (-1, k)),
            ("torch.diag_embed(m[:, 0])", (-1, k, k)),
            ("torch.linalg.norm(m, dim=(-2, -1)).unsqueeze(-1)", (-1, 1)),
            ("m.tril(-1) + m.triu(1)", (-1, k, k)),
            ("torch.cdist(m, m + 1)", (-1, k, k)),
            ("torch.kron(m[0], m[0]).mean() * 0 + m", (-1, k, k)),
            ("torch.linalg.eigvalsh(m + m.mT)", (-1, k)),
            (
                "torch.cross(F.pad(m, (0, 1))[..., :3], F.pad(m, (1, 0))[..., :3], dim=-1)"
                if k == 2
                else "torch.cross(m, m.mT, dim=-1)",
                (-1, k, 3),
            ),
            ("torch.linalg.vector_norm(m, 3, dim=-1)", (-1, k)),
            ("torch.trapezoid(m, dim=-1)", (-1, k)),
            ("m.pinverse().detach() + m", (-1, k, k)),
        ]
    )
    return made(
        g,
        shape,
        start,
        code,
        ins=(a,),
        init=[f"self.{name} = nn.Linear({d}, {k * k})"],
        traits="coupled" if "kron" in code else "",
    )


def structured(g: Scope) -> Statement | None:
    """Modules of modules, hooks, reparametrised weights."""
    found = g.pick(lambda s: PLAIN(s) and s[-1] > 1)
    if found is None:
        return None
    a, s = found
    d, name = s[-1], g.fresh("part")
    choices: list[tuple[list[str], tuple[str, ...], Shape, str]] = [
        (
            [f"self.{name} = nn.ModuleList([nn.Linear({d}, {d}) for _ in range(3)])"],
            (f"t = {a}", f"for layer in self.{name}:", "    t = torch.tanh(layer(t)) + t", "t"),
            s,
            "",
        ),
        (
            [f"self.{name} = nn.ModuleDict({{'a': nn.Linear({d}, {d}), 'b': nn.Identity()}})"],
            (f"self.{name}['a']({a}) + self.{name}['b']({a})",),
            s,
            "",
        ),
        (
            [f"self.{name} = nn.Linear({d}, {d})", f"self.{name}.register_forward_hook(lambda m, i, o: o * 2 + i[0])"],
            (f"self.{name}({a})",),
            s,
            "",
        ),
        (
            [
                f"self.{name} = nn.Linear({d}, {d})",
                f"self.{name}.register_forward_pre_hook(lambda m, i: (i[0].sin(),))",
            ],
            (f"self.{name}({a})",),
            s,
            "",
        ),
        ([f"self.{name} = nn.PReLU()"], (f"self.{name}({a})",), s, ""),
        ([f"self.{name} = nn.Sequential(nn.Linear({d}, {2 * d}), nn.GLU())"], (f"self.{name}({a})",), s, ""),
        (
            [f"self.{name} = nn.Bilinear({d}, {d}, 3)"],
            (f"self.{name}({a}.contiguous(), {a}.contiguous())",),
            (*s[:-1], 3),
            "",
        ),
        ([f"self.{name} = nn.utils.parametrizations.orthogonal(nn.Linear({d}, {d}))"], (f"self.{name}({a})",), s, ""),
        (
            [f"self.{name} = nn.utils.parametrizations.spectral_norm(nn.Linear({d}, {d}))"],
            (f"self.{name}({a})",),
            s,
            "state",
        ),
        (
            [f"self.{name} = nn.Linear({d}, {d})", f"self.{name}.weight.register_hook(lambda g: g * 0.5)"],
            (f"self.{name}({a})",),
            s,
            "",
        ),
        (
            [f"self.{name} = nn.Linear({d}, {d})"],
            (f"self.get_submodule('{name}')({a}) + self.get_parameter('{name}.bias')",),
            s,
            "",
        ),
        (
            [f"self.{name} = nn.Linear({d}, {d})"],
            (f"torch.func.functional_call(self.{name}, {{'weight': self.{name}.weight * 0.5}}, ({a},))",),
            s,
            "",
        ),
        (
            [f"self.{name} = nn.Parameter(torch.randn({d}) * 0.3)"],
            ("with torch.no_grad():", f"    k = self.{name}.abs().sum()", f"{a} * self.{name} + k"),
            s,
            "",
        ),
        (
            [f"self.{name} = nn.Linear({d}, {d})"],
            (
                f"t = {a}.detach().requires_grad_()",
                f"(slope,) = torch.autograd.grad(self.{name}(t).tanh().sum(), t, create_graph=True)",
                f"{a} + slope",
            ),
            s,
            "",
        ),
        (
            [f"self.{name} = nn.Linear({d}, {d})"],
            (f"t = self.{name}({a})", "t.register_hook(lambda g: g.clamp(-0.01, 0.01))", "t"),
            s,
            "coupled",
        ),
        ([f"self.{name} = nn.Linear({d}, {d})", f"self.{name}.bias = None"], (f"self.{name}({a})",), s, ""),
        (
            [f"self.{name} = nn.Linear({d}, {d})", f"self.{name}_list = [self.{name}.weight]"],
            (f"{a} @ self.{name}_list[0].mean(0, keepdim=True).t() + self.{name}({a})",),
            s,
            "",
        ),
        ([f"self.{name} = torch.linspace(0, 1, {d})"], (f"{a} * self.{name}.to(x.dtype)",), s, ""),
        ([f"self.{name} = nn.Linear({d}, {d})"], (f"torch.vmap(self.{name})({a})",), s, ""),
        ([f"self.{name} = nn.Linear({d}, {d})"], (f"keep = torch.compiler.disable(self.{name})({a})", "keep"), s, ""),
    ]
    if len(s) == 3 and d % 2 == 0:
        choices += [
            (
                [f"self.{name} = nn.TransformerEncoderLayer({d}, 2, {2 * d}, dropout=0.0, batch_first=True)"],
                (f"self.{name}({a})",),
                s,
                "",
            ),
            (
                [
                    f"self.{name} = nn.TransformerEncoderLayer({d}, 2, {2 * d}, dropout=0.0, batch_first=True, norm_first=True)"
                ],
                (
                    f"self.{name}({a}, src_mask=nn.Transformer.generate_square_subsequent_mask({s[1]}).to(x.dtype), is_causal=True)",
                ),
                s,
                "",
            ),
            (
                [f"self.{name} = nn.TransformerDecoderLayer({d}, 2, {2 * d}, dropout=0.0, batch_first=True)"],
                (f"self.{name}({a}, {a})",),
                s,
                "",
            ),
        ]
    if len(s) == 4:
        choices += [
            ([f"self.{name} = nn.Unfold(2)"], (f"self.{name}({a}).mean(-1)",), (-1, 4 * s[1]), "")
            if min(s[2:]) >= 2
            else ([], (f"{a} * 2",), s, ""),
            ([], (f"F.pixel_unshuffle({a}, 2)",), (-1, 4 * s[1], s[2] // 2, s[3] // 2), "")
            if s[2] % 2 == 0 and s[3] % 2 == 0
            else ([], (f"{a} * 3",), s, ""),
            (
                [],
                (
                    f"F.grid_sample({a}, torch.tanh({a}[:, :1, :, :1].expand(-1, -1, -1, 2)).permute(0, 2, 1, 3) if {a}.shape[2] == 2 else x.new_zeros(n, 2, 1, 2), align_corners=False)",
                ),
                (-1, s[1], 2, 1),
                "",
            ),
            (
                [f"self.{name} = nn.Conv2d({s[1]}, {s[1]}, 1)"],
                (f"self.{name}({a}.to(memory_format=torch.channels_last)).mean((2, 3))",),
                (-1, s[1]),
                "",
            ),
        ]
    init, code, shape, traits = g.rng.choice(choices)
    return made(g, shape, *code, ins=(a,), init=init, traits=traits)


def coupled_rare(g: Scope) -> Statement | None:
    """Sums and matches over the batch."""
    found = g.pick(lambda s: PLAIN(s) and len(s) == 2 and s[1] > 1)
    if found is None:
        return None
    a, (_, d) = found
    code, shape = g.rng.choice(
        [
            (f"torch.corrcoef({a}.t()).mean() + {a}", (-1, d)),
            (f"torch.cdist({a}, {a} + 1).mean(1, keepdim=True) + {a}", (-1, d)),
            (f"{a}.index_select(0, torch.arange(n - 1, -1, -1))", (-1, d)),
            (f"{a}[torch.arange(n) % 2]", (-1, d)),
            (f"F.normalize({a} + 1, dim=0)", (-1, d)),
            (f"torch.zeros({d}, n, dtype=x.dtype).add({a}.t()).t()", (-1, d)),
            (f"{a} - {a}.var(0, correction=0)", (-1, d)),
            (f"{a} + {a}.std()", (-1, d)),
            (f"x.new_zeros(3, {d}).index_add(0, ids[:, 0] % 3, {a})[ids[:, 1] % 3]", (-1, d)),
            (f"torch.cov({a}.t()).sum() * {a}", (-1, d)),
            (f"torch.cat([{a}[1:], {a}[:1]])", (-1, d)),
            (f"{a}.view(2, n // 2, {d}).transpose(0, 1).reshape(n, {d})", (-1, d)),
            (f"torch.outer({a}[:, 0], {a}[:, 1]).mean(1, keepdim=True) + {a}", (-1, d)),
        ]
    )
    return made(g, shape, code, ins=(a,), traits="coupled")

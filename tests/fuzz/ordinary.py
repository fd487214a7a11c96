# ruff: noqa: E501 - lines of other programs
"""What people write around layers: in-place changes, checkpointed regions, buffers, flags, custom gradients, constants."""

from __future__ import annotations

from tests.fuzz.program import Statement, sizes
from tests.fuzz.scope import PLAIN, Scope, made


def in_place(g: Scope) -> Statement | None:
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, s = found
    p, init = g.parameter((s[-1],))
    y = g.fresh("y")
    bodies = [
        (f"{y}.mul_({p})",),
        (f"{y}.add_({p}, alpha=0.5)", f"{y}.tanh_()"),
        (f"{y}[..., 0] = {p}[0]",),
        (f"{y}[..., :1] += {p}[:1]",),
        (f"F.relu({y}, inplace=True)",),
        (f"{y}.masked_fill_({y} > 0.5, 0.1)",),
        (f"{y}[..., -1].zero_()", f"{y} += {p}"),
        (f"{y}[:, 0] *= 0.5",),
        (f"{y}.clamp_(-1, 1)",),
        (f"z = {y}.flatten(1)", "z += 1", f"{y} = z.view({y}.shape) * {p}"),
        (f"{y}.copy_({a} * {p})",),
        (f"{y}.sub_({p}).square_()",),
        (f"{y}[..., 0], rest = {y}[..., 0] * 2, {y}[..., 1:]",),
        (f"{y}.select(-1, 0).add_(1)",),
        (f"{y}.t().mul_({p}[:, None])" if len(s) == 2 else f"{y}.neg_()",),
        (f"{y}.index_fill_(-1, torch.tensor([0]), 0.3)", f"{y} *= {p}"),
        (f"{y}.scatter_(-1, torch.zeros_like({y}[..., :1], dtype=torch.long), 0.7)",),
        (f"{y}[{y} > 1] = 0.5",),
        (f"{y}.fill_(0.2)", f"{y} += {a}"),
        (f"{y}.clamp_(max=1)", f"{y}.exp_()"),
    ]
    start = g.rng.choice([f"{y} = {a}.clone()", f"{y} = {a} * 1.5", f"{y} = {a} + 0"])
    return made(g, s, start, *g.rng.choice(bodies), y, ins=(a,), init=init)


def region(g: Scope) -> Statement | None:
    """A part that backward runs again."""
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, s = found
    name, d = g.fresh("again"), s[-1]
    init = [f"self.{name} = nn.Sequential(nn.Linear({d}, {2 * d}), nn.Tanh(), nn.Linear({2 * d}, {d}))"]
    code = g.rng.choice(
        [
            f"checkpoint(self.{name}, {a}, use_reentrant=False)",
            f"checkpoint(self.{name}, {a}, use_reentrant=True)",
            f"checkpoint(lambda t: self.{name}(t) * t.sigmoid() + t, {a}, use_reentrant=False)",
            f"{a} + checkpoint(lambda t, u: self.{name}(t).mul(u), {a}, {a}.tanh(), use_reentrant=False)",
        ]
    )
    return made(g, s, code, ins=(a,), init=init)


def custom(g: Scope) -> Statement | None:
    a, s = g.pick()  # type: ignore[misc]
    return made(
        g, s, g.rng.choice([f"Halved.apply({a})", f"Straight.apply({a}, 4.0)", f"Halved.apply({a}.tanh())"]), ins=(a,)
    )


def buffer(g: Scope) -> Statement | None:
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, s = found
    name, d = g.fresh("kept"), s[-1]
    register = f'self.register_buffer("{name}", torch.linspace(0.5, 1.5, {d}))'
    mean = f"{a}.detach().flatten(0, -2).mean(0)"
    kinds: list[tuple[tuple[str, ...], str]] = [
        ((f"{a} * self.{name}",), ""),
        ((f"self.{name} += 1", f"{a} * self.{name}.sin()"), "state"),
        ((f"self.{name} = self.{name} * 0.9 + 0.1", f"{a} + self.{name}"), "state"),
        ((f"self.{name}.mul_(0.9).add_({mean}, alpha=0.1)", f"{a} - self.{name}"), "state coupled"),
        ((f"self.{name} = torch.lerp(self.{name}, {mean}, 0.2)", f"{a} * self.{name}"), "state coupled"),
        (("with torch.no_grad():", f"    self.{name}.copy_(self.{name}.roll(1))", f"{a} + self.{name}"), "state"),
        (("if self.training:", f"    self.{name}.add_(0.5)", f"{a} / self.{name}"), "state"),
        ((f"{a} * self.{name}", f"self.{name}.mul_(0.5)"), "state"),
    ]
    code, traits = g.rng.choice(kinds)
    if len(code) > 1 and code[-1].startswith("self."):  # read before it moves
        out = g.fresh("v")
        return Statement(out, s, (f"{out} = {code[0]}", code[1]), (a,), (register,), frozenset(traits.split()))
    if g.rng.random() < 0.3:
        register = register[:-1] + ", persistent=False)"
    return made(g, s, *code, ins=(a,), init=[register], traits=traits)


def flagged(g: Scope) -> Statement | None:
    """What a module's own attributes decide."""
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, s = found
    p, init = g.parameter((s[-1],))
    name = g.fresh("flag")
    out = g.fresh("v")
    value = g.rng.choice(["True", "False", "0", "2", "'a'", "None"])
    tests = [
        f"self.{name}",
        "self.training",
        f"isinstance({p}, nn.Parameter)",
        f"{p}.requires_grad",
        f"{a}.shape[-1] > 3",
        f"self.{name} == 2",
        f"{a}.is_contiguous() or True",
        f"{a}.dtype == torch.float64",
    ]
    code = (f"if {g.rng.choice(tests)}:", f"    {out} = {a} * {p}", "else:", f"    {out} = {a} - {p}.square()")
    return Statement(out, s, code, (a,), (*init, f"self.{name} = {value}"))


def constant(g: Scope) -> Statement | None:
    """Tensors that are made in forward."""
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, s = found
    d = s[-1]
    code = g.rng.choice(
        [
            f"{a} * torch.arange({d}, dtype=x.dtype)",
            f"{a} + torch.tensor({[0.5] * d}, dtype=x.dtype)",
            f"{a} * torch.eye({d}, dtype=x.dtype).sum(0)",
            f"{a} @ torch.ones({d}, {d}, dtype=x.dtype).tril() / {d}",
            f"{a} + torch.linspace(0, 1, {d}, dtype=x.dtype)",
            f"{a} * {a}.new_full(({d},), 0.5)",
            f"torch.where(torch.arange({d}) % 2 == 0, {a}, {a} * 2)",
            f"{a} + torch.zeros_like({a})",
            f"{a} * torch.ones({sizes(s)}, dtype=x.dtype)",
        ]
    )
    return made(g, s, code, ins=(a,))

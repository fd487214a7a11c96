"""Views, and what moves elements: reshapes, permutations, slices, gathers, joins."""

from __future__ import annotations

import math

from tests.fuzz.program import Shape, Statement
from tests.fuzz.scope import PLAIN, Scope, made


def view(g: Scope) -> Statement | None:
    found = g.pick(PLAIN)
    if found is None:
        return None
    a, s = found
    rest = math.prod(s[1:])
    divisors = [k for k in range(2, rest) if rest % k == 0]
    forms: list[tuple[str, Shape]] = [
        (f"{a}.flatten(1)", (-1, rest)),
        (f"{a}.unsqueeze(1)", (-1, 1, *s[1:])),
        (f"{a}.unsqueeze(-1)", (*s, 1)),
        (f"{a}.reshape(n, -1)", (-1, rest)),
    ]
    if divisors:
        k = g.rng.choice(divisors)
        forms += [
            (f"{a}.reshape(n, {k}, {rest // k})", (-1, k, rest // k)),
            (f"{a}.flatten(1).unflatten(1, ({k}, -1)).transpose(1, 2)", (-1, rest // k, k)),
            (f"{a}.reshape(n, {k}, -1).contiguous()", (-1, k, rest // k)),
        ]
    if len(s) >= 3:
        order = [1, *range(2, len(s))]
        g.rng.shuffle(order)
        forms += [
            (f"{a}.permute(0, {', '.join(map(str, order))})", (-1, *(s[i] for i in order))),
            (f"{a}.transpose(1, -1)", (-1, s[-1], *s[2:-1], s[1])),
            (f"{a}.select(1, {s[1] - 1})", (-1, *s[2:])),
            (f"{a}[:, 0]", (-1, *s[2:])),
            (f"{a}.mT", (*s[:-2], s[-1], s[-2])),
            (f"{a}.movedim(-1, 1)", (-1, s[-1], *s[1:-1])),
            (f"{a}.transpose(0, 1)", (s[1], -1, *s[2:])),
            (f"{a}.unbind(1)[0]", (-1, *s[2:])),
        ]
    if s[-1] >= 2:
        half = s[-1] // 2
        forms += [
            (f"{a}[..., ::2]", (*s[:-1], -(-s[-1] // 2))),
            (f"{a}.narrow(-1, 1, {s[-1] - 1})", (*s[:-1], s[-1] - 1)),
            (f"{a}[..., 1:]", (*s[:-1], s[-1] - 1)),
            (f"{a}.split([{half}, {s[-1] - half}], -1)[1]", (*s[:-1], s[-1] - half)),
            (f"{a}.chunk(2, -1)[0]", (*s[:-1], -(-s[-1] // 2))),
            (f"{a}.flip(-1)", s),
            (f"{a}.roll(1, -1)", s),
            (f"{a}[..., [0, {s[-1] - 1}, 0]]", (*s[:-1], 3)),
            (f"{a}.unfold(-1, 2, 1).sum(-1)", (*s[:-1], s[-1] - 1)),
            (f"{a}.index_select(-1, torch.tensor([{s[-1] - 1}, 0]))", (*s[:-1], 2)),
            (f"torch.gather({a}, -1, {a}.argsort(-1))", s),
            (f"{a}.sort(-1)[0]", s),
            (f"{a}.topk(1, -1)[0]", (*s[:-1], 1)),
            (f"{a}.tensor_split(2, -1)[1]", (*s[:-1], half)),
        ]
    if s[-1] == 1:
        forms += [(f"{a}.expand({', '.join(['-1'] * (len(s) - 1))}, 3)", (*s[:-1], 3)), (f"{a}.squeeze(-1)", s[:-1])]
    forms += [
        (f"F.pad({a}, (1, 0))", (*s[:-1], s[-1] + 1)),
        (f"{a}.repeat({', '.join(['1'] * (len(s) - 1))}, 2)", (*s[:-1], 2 * s[-1])),
        (f"{a}.repeat_interleave(2, -1)", (*s[:-1], 2 * s[-1])),
        (f"torch.cat([{a}, {a} * 0.5], -1)", (*s[:-1], 2 * s[-1])),
        (f"torch.stack([{a}, {a}.tanh()], 1)", (-1, 2, *s[1:])),
        (f"{a}.t().contiguous().t()" if len(s) == 2 else f"{a}.clone()", s),
    ]
    code, shape = g.rng.choice(forms)
    return None if math.prod(abs(d) for d in shape) > 300 or len(shape) > 5 else made(g, shape, code, ins=(a,))


def turned(g: Scope) -> Statement | None:
    """Samples come first again."""
    found = g.pick(lambda s: len(s) >= 2 and s[0] != -1 and -1 in s)
    if found is None:
        return None
    a, s = found
    at = s.index(-1)
    return made(g, (-1, *s[:at], *s[at + 1 :]), f"{a}.movedim({at}, 0)", ins=(a,))


def joined(g: Scope) -> Statement | None:
    one = g.pick(PLAIN)
    if one is None:
        return None
    a, s = one
    b, t = g.pick(lambda t: len(t) == len(s) and t[:-1] == s[:-1])  # type: ignore[misc]
    return made(g, (*s[:-1], s[-1] + t[-1]), f"torch.cat([{a}, {b}], -1)", ins=(a, b)) if s[-1] + t[-1] < 20 else None

"""What a statement of a random program can see: tensors by name and shape, parameters, names that are free.

Templates (`arithmetic.py`, `views.py`, `layers.py`, `ordinary.py`) look into a scope, pick some tensors and return a
statement, or nothing where none fits. Values stay of moderate size, because a difference of rounding must not grow
beyond what is told apart from a wrong number: exponentials and divisions are taken of bounded things.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from tests.fuzz.program import Shape, Statement


class Scope:
    """The tensors that a statement can read, and names that nobody has used."""

    def __init__(self, rng: random.Random, features: int) -> None:
        self.rng = rng
        self.values: dict[str, Shape] = {"x": (-1, features)}
        self.params: dict[str, Shape] = {}
        self.tied: list[tuple[str, Shape]] = []
        self._count = 0

    def fresh(self, kind: str) -> str:
        """A name."""
        self._count += 1
        return f"{kind}{self._count}"

    def pick(self, fits: Callable[[Shape], bool] = lambda s: True) -> tuple[str, Shape] | None:
        """A tensor of a fitting shape, later ones more often."""
        found = [(n, s) for n, s in self.values.items() if fits(s)]
        if not found:
            return None
        return found[min(len(found) - 1, int(len(found) * math.sqrt(self.rng.random())))]

    def size(self) -> int:
        """The size of a new dim."""
        return self.rng.choice([1, 2, 3, 4, 4, 6, 8])

    def parameter(self, shape: Shape, scale: float = 0.4) -> tuple[str, list[str]]:
        """A parameter of that shape in one of several layouts, and the line that makes it; now and then an old one."""
        old = [n for n, s in self.params.items() if s == shape]
        if old and self.rng.random() < 0.3:
            return f"self.{self.rng.choice(old)}", []
        name = self.fresh("p")
        self.params[name] = shape
        dims = ", ".join(map(str, shape))
        plain = f"torch.randn({dims or ()}) * {scale}"
        forms = [plain] * 4
        if len(shape) >= 2:
            turned = ", ".join(map(str, (*shape[:-2], shape[-1], shape[-2])))
            wider = ", ".join(map(str, (*shape[:-1], 2 * shape[-1])))
            forms.append(f"(torch.randn({turned}) * {scale}).transpose(-1, -2)")
            forms.append(f"(torch.randn({wider}) * {scale})[..., ::2]")
        if shape:
            forms.append(f"(torch.randn({math.prod(shape)}) * {scale}).reshape({dims})")
        return f"self.{name}", [f"self.{name} = nn.Parameter({self.rng.choice(forms)})"]


Template = Callable[[Scope], Statement | None]
PLAIN: Callable[[Shape], bool] = lambda s: len(s) >= 2 and s[0] == -1  # noqa: E731
"""Samples first, and something in each."""


def made(
    g: Scope, shape: Shape, *code: str, ins: tuple[str, ...], init: list[str] | None = None, traits: str = ""
) -> Statement:
    """A statement whose last line is an expression."""
    out = g.fresh("v")
    lines = (*code[:-1], f"{out} = {code[-1]}")
    return Statement(out, shape, tuple(lines), ins, tuple(init or ()), frozenset(traits.split()))

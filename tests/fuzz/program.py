"""A random model as data: statements, each with what it declares, reads and gives; and the source text they make.

Shapes are tuples of sizes, in which the number of samples stands as -1 (and twice that many rows as -2), so that a
statement can be written for any batch. A program is printed as a script that a stranger can run, and the same text
is what the fuzzer runs. Removing a statement puts an ordinary tensor of its shape in its place, so every part of a
program is a program.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field, replace
from typing import Any

Shape = tuple[int, ...]

HEAD = '''import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Halved(torch.autograd.Function):
    """Its gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 0.5 + x.tanh() * g


class Straight(torch.autograd.Function):
    """Rounded forward, passed through backward."""

    @staticmethod
    def forward(ctx, x, steps):
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx, g):
        return g, None
'''


@dataclass(frozen=True)
class Statement:
    """Lines of `forward` that give one tensor."""

    out: str
    shape: Shape
    code: tuple[str, ...]
    """The last line assigns `out`."""
    ins: tuple[str, ...] = ()
    init: tuple[str, ...] = ()
    """Lines of `__init__`."""
    traits: frozenset[str] = frozenset()
    """"coupled": a batch is not the sum of its parts; "draws": random; "state": a buffer moves with every pass."""


@dataclass(frozen=True)
class Program:
    """A model with its loss, its batch, and how it is to be trained."""

    seed: int
    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    """What the loss is made of."""
    loss: str = "squares"
    dtype: str = "float64"
    samples: int = 8
    features: int = 6
    frozen: tuple[int, ...] = ()
    """Which of the parameters, by their number among all, modulo how many there are."""
    options: dict[str, Any] = field(default_factory=dict)
    """plan, ranks, way, optimizer, micro_batches, precision, steps: see `oracle.py`."""

    @property
    def traits(self) -> set[str]:
        """Those of all statements."""
        return {t for s in self.statements for t in s.traits}

    @property
    def rounded(self) -> str:
        """The narrowest type that its numbers go through on their way."""
        narrows = any(".float()" in line for s in self.statements for line in s.code)
        return "float32" if narrows else self.dtype

    def source(self) -> str:
        """The model, its loss and its batches as Python code."""
        init = [line for s in self.statements for line in s.init] or ["self.nothing = nn.Parameter(torch.ones(()))"]
        lines = [HEAD, "", "class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in init]
        lines += ["        some = list(self.parameters())"]
        lines += [f"        some[{k} % len(some)].requires_grad_(False)" for k in self.frozen]
        lines += ["", "    def forward(self, x, ids):", "        n = x.shape[0]"]
        lines += [f"        {line}" for s in self.statements for line in s.code]
        lines += [f"        return [{', '.join(self.results)}]", "", ""]
        return "\n".join(lines) + LOSSES[self.loss] + BATCH.format(p=self)

    def compiled(self) -> dict[str, Any]:
        """`Model`, `loss` and `batches` from the source; lines of it can be shown in errors."""
        text, name = self.source(), f"<program {self.seed}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        space: dict[str, Any] = {"__name__": "program"}
        exec(compile(text, name, "exec"), space)
        return space

    def without(self, out: str) -> Program:
        """The same with a plain tensor in the place of what a statement gave."""
        kept = []
        for s in self.statements:
            if s.out != out:
                kept.append(s)
            elif any(out in t.ins for t in self.statements) or out in self.results:
                kept.append(stand_in(s))
        return replace(self, statements=tuple(kept))


def sizes(shape: Shape) -> str:
    """A shape as code."""
    inside = ", ".join("n" if d == -1 else f"{-d} * n" if d < 0 else str(d) for d in shape)
    return f"({inside},)" if len(shape) == 1 else f"({inside})"


def stand_in(s: Statement) -> Statement:
    """A tensor of the same shape that is computed from the batch."""
    code = f"{s.out} = x.new_ones({sizes(s.shape)})"
    if s.shape and s.shape[0] == -1:
        code = f"{s.out} = x.sum(1).view({', '.join(['n', *['1'] * (len(s.shape) - 1)])}).expand({sizes(s.shape)})"
    return Statement(s.out, s.shape, (code,))


LOSSES = {
    "squares": """def loss(model, batch):
    out = model(batch["x"], batch["ids"])
    return sum((v.flatten(1) - 0.3).square().mean() for v in out)
""",
    "cross": """def loss(model, batch):
    out = model(batch["x"], batch["ids"])
    return sum(F.cross_entropy(v.flatten(1), batch["target"] % v.flatten(1).shape[1]) for v in out)
""",
    "huber": """def loss(model, batch):
    out = model(batch["x"], batch["ids"])
    return sum(F.smooth_l1_loss(v.flatten(1).mean(1), batch["y"]) for v in out)
""",
    "counted": """def loss(model, batch):
    import laminar

    out = model(batch["x"], batch["ids"])
    keep = (batch["target"] != 1).to(out[0].dtype)
    return laminar.Loss(sum((v.flatten(1).square().mean(1) * keep).sum() for v in out), keep.sum())
""",
}
"""What is left in them is one mean over samples, or a total and its weight: parts of a batch add up to it."""

BATCH = """

def batches(steps):
    g = torch.Generator().manual_seed({p.seed})
    n = {p.samples}
    return [
        {{
            "x": torch.randn(n, {p.features}, generator=g, dtype=torch.float64).to(torch.{p.dtype}),
            "ids": torch.randint(0, 7, (n, 4), generator=g),
            "y": torch.randn(n, generator=g, dtype=torch.float64).to(torch.{p.dtype}),
            "target": torch.randint(0, 5, (n,), generator=g),
        }}
        for _ in range(steps)
    ]
"""

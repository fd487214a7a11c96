"""A step may look at tensors that are the same in every step: constants fold, whatever is asked of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar.capture.capture import capture
from tests.support.capture_check import Fn, draw, same, square

X = draw(4, 6, seed=5)
TABLE = torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0, 0.0])


def _rates(m: Any, x: Tensor) -> Tensor:
    for rate in [r.item() for r in torch.linspace(0.0, 0.3, 4)]:
        x = torch.tanh(m.inner(x)) * (1.0 - rate) if rate < 0.25 else x
    return x


def _truth(m: Any, x: Tensor) -> Tensor:
    mask = torch.ones(6, 6).tril().bool()
    if mask.all() or not mask.any():
        return x
    if bool((mask == torch.tril(torch.ones(6, 6)).bool()).all()):
        return m.inner(x).masked_fill(~mask[3], 0.0)
    return x


def _written(m: Any, x: Tensor) -> Tensor:
    """The values at the time of the question, writes through views included."""
    t = torch.zeros(4)
    t[1] = 3.0
    first = int(t.sum())
    t[2:].add_(1.0)
    return m.inner(x) * first + float(t.sum())


def _in_numbers(m: Any, x: Tensor) -> Tensor:
    sizes = torch.tensor([1, 2, 3]).tolist()
    parts = m.inner(x).split(sizes, dim=1)
    return sum(p.sum(1) for p in parts) + x[:, int(torch.arange(6).argmax())]


def _shapes(m: Any, x: Tensor) -> Tensor:
    keep = torch.arange(6) % 2 == 0
    y = m.inner(x)[:, keep]
    where = torch.nonzero(keep).squeeze(1)
    z = x.clone()
    z[:, ~keep] = 0.0
    return torch.cat([y, m.inner(x)[:, where], z, m.inner(x).masked_select(keep).view(4, -1)], 1)


def _outside(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * (TABLE.max().item() if TABLE.gt(0).any() else 1.0) + m.inner(x)[:, TABLE > 0].sum()


def _repeated(m: Any, x: Tensor) -> Tensor:
    return m.inner(x).repeat_interleave(torch.tensor([1, 0, 2, 1, 1, 1]), dim=1) + torch.unique(TABLE).numel()


def _numpy(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * float(torch.linspace(0, 1, 5).numpy()[2])


def _left(m: Any, x: Tensor) -> Tensor:
    """What is left lying about makes the step run a second time."""
    m.last = m.inner(x) * torch.linspace(0, 1, 5)[2].item()
    return m.last


LOOKS = [_left, _rates, _truth, _written, _in_numbers, _shapes, _outside, _repeated, _numpy]


@pytest.mark.parametrize("look", LOOKS, ids=lambda f: f.__name__.strip("_"))
def test_what_depends_on_no_input_may_be_looked_at(look: Any) -> None:
    """Rates of stochastic depth, masks made of sizes, tables: the same in every step."""

    def make() -> nn.Module:
        return Fn(look, inner=nn.Linear(6, 6))

    same(make, square, X)


def _mixed(m: Any, x: Tensor) -> Tensor:
    t = torch.zeros(4)
    view = t[1:3]
    t[1] = x.sum()
    return m.inner(x) * float(view.sum())


ASKED = {
    "the batch": lambda m, x: m.inner(x) * float(x.sum()),
    "a parameter": lambda m, x: m.inner(x) if m.inner.weight.sum() > 0 else x,
    "a buffer": lambda m, x: m.inner(x) * int(m.count),
    "a draw": lambda m, x: m.inner(x) * torch.rand(()).item(),
    "what was written from the batch": _mixed,
}


@pytest.mark.parametrize("what", ASKED)
def test_what_depends_on_an_input_is_refused(what: str) -> None:
    """A value that another step may have otherwise must not be folded."""
    model = Fn(ASKED[what], inner=nn.Linear(6, 6), count=torch.tensor(3))
    with pytest.raises(laminar.CaptureError, match="depends on data"):
        capture(model, square, X)

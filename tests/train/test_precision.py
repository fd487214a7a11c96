"""The parts of precision by themselves: when the scale of an fp16 loss moves, and that rounding is drawn per tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import laminar
from laminar.train.optimizer.precision import Scaler


def fed(scaler: Scaler, steps: str) -> list[float]:
    """The scale after each step: `+` finite, `-` not."""
    out = []
    for step in steps:
        scaler.update(step == "+")
        out.append(scaler.scale)
    return out


def test_the_scale_doubles_after_steps_in_a_row() -> None:
    """A step that overflows begins the count anew: the scale that overflowed is not tried again at once."""
    assert fed(Scaler(scale=8.0, patience=3), "+++") == [8.0, 8.0, 16.0]
    assert fed(Scaler(scale=8.0, patience=3), "++-++") == [8.0, 8.0, 4.0, 4.0, 4.0]
    assert fed(Scaler(scale=8.0, patience=3), "++-+++") == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0]
    assert fed(Scaler(scale=8.0, patience=2), "++++") == [8.0, 16.0, 16.0, 32.0]


def test_the_scale_is_patient_and_bounded() -> None:
    """2^16 at first, doubled after 2000 good steps; never above what a float32 loss can bear, or below one."""
    first = Scaler()
    assert first.scale == 2.0**16
    assert set(fed(first, "+" * 1999)) == {2.0**16} and fed(first, "+") == [2.0**17]
    assert fed(Scaler(scale=2.0**23, patience=1), "+++") == [2.0**24] * 3
    low = Scaler(scale=4.0)
    assert fed(low, "----") == [2.0, 1.0, 1.0, 1.0] and low.skipped == 4


class Twins(nn.Module):
    """Weights that are equal, and have equal gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a + x * self.b


def test_equal_tensors_are_rounded_by_draws_of_their_own() -> None:
    """With one draw for all, errors of all layers would point the same way."""

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    x = torch.linspace(0.1, 1, 4 * 64).view(4, 64)
    opt = lambda p: torch.optim.SGD(p, lr=0.05)  # noqa: E731
    job = laminar.parallelize(Twins(), loss, opt, batch=x, precision="bf16-stochastic", device="cpu")
    job.step(x)
    a, b = job.state_dict()["a"], job.state_dict()["b"]
    assert not torch.equal(a, b) and set(a.tolist()) == set(b.tolist()), "the same two neighbours, not the same choices"

"""A layer that is skipped with probability 0 is captured, one that is skipped at random is refused by name."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from laminar.capture.canonical.certain_draws import held_back
from laminar.capture.capture import capture
from laminar.errors import CaptureError
from tests.support.capture_check import Fn, same, square

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

ASKED: dict[str, Callable[[float], Any]] = {
    "torch.rand([]) <": lambda p: torch.rand([]) < p,
    "torch.rand(1) <": lambda p: torch.rand(1) < p,
    "torch.rand(1).item() <": lambda p: torch.rand(1).item() < p,
    "uniform_() <": lambda p: torch.empty(()).uniform_() < p,
    "uniform_(0, 1) <": lambda p: torch.empty(1).uniform_(0, 1) < p,
    "p > torch.rand([])": lambda p: p > torch.rand([]),
    "torch.lt": lambda p: torch.lt(torch.rand([]), p),
    "not >=": lambda p: not torch.rand([]) >= p,
    "random.random() <": lambda p: random.random() < p,
    "random.uniform(0, 1) <": lambda p: random.uniform(0, 1) < p,
    "p > random.random()": lambda p: p > random.random(),
    "np.random.random() <": lambda p: np.random.random() < p,
    "np.random.uniform(0, 1) <": lambda p: np.random.uniform(0, 1) < p,
    "np.random.uniform(low, high) <": lambda p: np.random.uniform(low=0, high=1) < p,
    "np.random.rand() <": lambda p: np.random.rand() < p,
}


def net(asked: Callable[[float], Any], p: float) -> Callable[[], nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and asked(self.p):
                continue
            x = layer(x)
        return x

    return lambda: Fn(forward, layers=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), p=p)


@pytest.mark.parametrize("how", ASKED)
def test_what_no_draw_can_change_is_captured(how: str) -> None:
    """BART, OPT, Whisper and their kin compare a draw with a layer drop of 0 in every step."""
    graph = same(net(ASKED[how], 0.0), square, X)
    assert {i.name for i in graph.inputs if i.kind == "param"} == {
        f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")
    }


@pytest.mark.parametrize("how", ASKED)
def test_a_layer_that_is_skipped_at_random_is_refused(how: str) -> None:
    """One graph holds one path: it would be skipped always, or never."""
    model = net(ASKED[how], 0.5)()
    with pytest.raises(CaptureError) as caught:
        capture(model, square, X)
    assert "next" in str(caught.value)
    assert "depends on" in str(caught.value)


@pytest.mark.parametrize(
    "used",
    [
        lambda x: x * random.random(),
        lambda x: x + np.random.rand(),
        lambda x: x * float(random.uniform(0, 1)),
        lambda x: x * torch.rand(1).item(),
        lambda x: x + torch.tensor(random.random()),
        lambda x: x[: int(random.random() * 5) + 1],
        lambda x: x * np.sqrt(np.random.random()),
    ],
)
def test_a_draw_that_is_used_as_a_number_is_refused(used: Callable[[Tensor], Tensor]) -> None:
    """It would be the same number in every step."""
    model = Fn(lambda self, x: used(self.layer(x)), layer=nn.Linear(4, 4))
    with pytest.raises(CaptureError):
        capture(model, square, X)


def test_other_threads_draw_as_ever() -> None:
    """A loader that augments its samples runs beside a capture."""
    found: list[Any] = []
    with held_back():
        thread = threading.Thread(target=lambda: found.extend([random.random() + 1, np.random.rand() + 1]))
        thread.start()
        thread.join()
    assert all(1 <= value < 2 for value in found)
    assert isinstance(random.random() + np.random.uniform(), float)


def test_draws_are_put_back_after_a_failure() -> None:
    """A step that is refused must not leave the process without random numbers."""
    with pytest.raises(ZeroDivisionError), held_back():
        raise ZeroDivisionError
    assert random.random() * np.random.random() >= 0

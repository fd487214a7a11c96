"""Capture beside other threads: what a loader does meanwhile is not the step's doing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar.errors import CaptureError


@contextmanager
def beside(draw: Callable[[], Any]) -> Iterator[list[Any]]:
    """Another thread that draws without a pause; what it drew, in order."""
    stop, begun, drawn = threading.Event(), threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            drawn.append(draw())
            begun.set()
            time.sleep(1e-4)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait()
    try:
        yield drawn
    finally:
        stop.set()
        thread.join()


def squared(model: Any, batch: Any) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(("which", "draw"), [("numpy", np.random.rand), ("Python", random.random)])
def test_draws_of_a_loader_are_not_the_steps(which: str, draw: Callable[[], float]) -> None:
    """A recipe that augments on the loader's thread draws while a batch of a new shape is captured."""
    np.random.seed(3), random.seed(3)
    alone = [draw() for _ in range(100_000)]
    np.random.seed(3), random.seed(3)
    with beside(draw) as drawn:
        for n in (2, 3, 4):
            laminar.capture(nn.Linear(4, 4), squared, torch.randn(n, 4))
    assert drawn == alone[: len(drawn)]  # and nobody has put its generator back


@pytest.mark.parametrize(("which", "draw"), [("numpy", np.random.rand), ("Python", random.random)])
def test_draws_of_the_step_are_refused_beside_a_loader(which: str, draw: Callable[[], float]) -> None:
    """Also while another thread draws from the same generator."""

    def loss(model: Any, batch: Any) -> Tensor:
        return squared(model, batch) * draw()

    with beside(draw), pytest.raises(CaptureError, match=f"draws random numbers from {which}"):
        laminar.capture(nn.Linear(4, 4), loss, torch.randn(2, 4))


def test_a_refused_step_puts_back_what_it_drew() -> None:
    """Whoever then trains without a graph gets the numbers that plain PyTorch would."""

    def loss(model: Any, batch: Any) -> Tensor:
        return squared(model, batch) * (np.random.rand() + random.random())

    np.random.seed(1), random.seed(1)
    want = np.random.rand(), random.random()
    np.random.seed(1), random.seed(1)
    with pytest.raises(CaptureError, match="draws random numbers"):
        laminar.capture(nn.Linear(4, 4), loss, torch.randn(2, 4))
    assert np.random.rand() == want[0]
    random.seed(1)
    with pytest.raises(CaptureError, match="draws random numbers"):
        laminar.capture(nn.Linear(4, 4), lambda m, b: squared(m, b) * random.random(), torch.randn(2, 4))
    assert random.random() == want[1]


def test_modules_that_a_loader_runs_are_not_the_models() -> None:
    """Transforms are modules too; they took part in the count of who runs inside of whom."""
    entered, leave = threading.Event(), threading.Event()

    class Transform(nn.Module):
        def forward(self) -> None:
            entered.set()
            leave.wait()

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            threading.Thread(target=transform).start()
            entered.wait()
            return super().forward(input)

    class Twice(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2

    transform = Transform()

    def loss(model: Any, batch: Any) -> Tensor:
        value = squared(model, batch)
        leave.set()
        return value

    want = laminar.capture(Twice(nn.Linear(4, 4)), squared, torch.randn(2, 4))
    found = laminar.capture(Twice(Layer(4, 4)), loss, torch.randn(2, 4))
    assert [n.module for n in found.nodes] == [n.module for n in want.nodes]

"""The oracle itself: the user's model in plain PyTorch, under a graph's names, leaving nothing behind."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laminar
from laminar.api import inputs_of
from laminar.capture.model.model_tensors import slots_of
from laminar.runtime.check.one_device import run_graph
from laminar.runtime.check.plain_model import run_eager, untouched
from laminar.runtime.pipeline.loader import LOADER
from laminar.train.check.compare_results import off
from tests.support.zoo import FEW, recipe, specimen


@pytest.mark.parametrize("name", FEW)
def test_the_zoo_gives_the_same_eagerly_and_captured(name: str) -> None:
    """Gradients, loss and buffers of every model, by one naming, though no code is shared but the model's own."""
    one, made = specimen(name), recipe(name)
    torch.manual_seed(0)
    model, batch = made.model(), next(iter(made.data()))
    want = run_eager(model, made.loss, batch, key=(0, 0) if one.graph.of_kind("rng") else None)
    got = run_graph(one.graph, {k: v.detach() for k, v in inputs_of(one.graph, model, batch).items()})
    assert set(got) == set(want)
    assert not off(got, want, 2e-6)


class Busy(nn.Module):
    """Dropout in a checkpointed region, batch norm, a counter, a buffer that is reassigned, a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
        self.register_buffer("mean", torch.zeros(6))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return F.dropout(self.down(F.relu(self.norm(self.up(x)))), 0.4, self.training)

        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        x = x + checkpoint(inner, x, use_reentrant=False)
        x = F.dropout(x, 0.2, self.training)
        return x + self.attention(x[None], x[None], x[None])[0][0]


def _square(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_draws_are_those_of_a_captured_step() -> None:
    """Dropout alone, inside of attention, and inside of a region that backward runs again."""
    torch.manual_seed(1)
    model, batch = Busy().double(), torch.randn(5, 6, dtype=torch.float64)
    graph = laminar.capture(model, _square, batch)
    want = run_eager(model, _square, batch, key=(3, 7))
    got = run_graph(graph, inputs_of(graph, model, batch, seed=3, step=7))
    assert len(want) > 10 and not off(got, want, 1e-12)
    assert off(run_graph(graph, inputs_of(graph, model, batch, seed=3, step=8)), want, 1e-3)


def test_nothing_is_left_behind() -> None:
    """Weights, buffers, gradients, attributes and generators are as before, bit for bit."""

    class Drawing(Busy):
        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(len(self.seen) + random.randrange(10) + int(np.random.randint(10)))
            self.last = x
            return super().forward(x)

    torch.manual_seed(1)
    model, batch = Drawing(), torch.randn(5, 6)
    model.up.weight.grad = torch.ones_like(model.up.weight)
    before = {s.name: (s.tensor, s.tensor.detach().clone()) for s in slots_of(model)}
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    for key in (None, (0, 0)):
        run_eager(model, _square, batch, key=key)
    assert torch.equal(drawn[0], torch.get_rng_state()) and drawn[1] == random.getstate()
    assert (drawn[2] == np.random.get_state()[1]).all()  # type: ignore[index]
    assert {s.name: id(s.tensor) for s in slots_of(model)} == {n: id(t) for n, (t, _) in before.items()}
    assert all(torch.equal(t, old) for t, old in before.values())
    assert model.seen == [] and not hasattr(model, "last")
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["up.weight"]


def test_whole_weights_stand_in_for_pieces() -> None:
    """A rank that holds half of a weight runs the model on the whole one, and has its half back afterwards."""
    torch.manual_seed(1)
    model, batch = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), torch.randn(3, 4)
    want = run_eager(model, _square, batch)
    whole = {"0.weight": model[0].weight.detach().clone()}
    half = model[0].weight.data[:3].clone()
    model[0].weight.data = half
    got = run_eager(model, _square, batch, whole=whole)
    assert not off(got, want, 0.0) and model[0].weight.data.data_ptr() == half.data_ptr()
    scaled = run_eager(model, _square, batch, whole=whole, scale=4.0)
    assert torch.allclose(scaled["grad:0.weight"], 4 * want["grad:0.weight"])


def test_parameters_that_no_graph_sees_have_their_gradient() -> None:
    """A weight held where nobody looks for tensors is still the user's own: what a capture may miss is seen here."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.nested = {"deep": [(self.w,)]}

        def forward(self, x: Tensor) -> Tensor:
            return x * self.nested["deep"][0][0]

    want = run_eager(Hidden(), lambda m, x: m(x).sum(), torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(want["grad:w"], torch.tensor([1.0, 2.0, 3.0]))


def test_draws_of_a_loader_are_not_taken_back() -> None:
    """It shuffles beside the first step: put back, its generator would shuffle the next epoch like this one."""
    inside, drawn = threading.Event(), threading.Event()

    def load() -> None:
        inside.wait(10)
        torch.rand(3)
        drawn.set()

    model = nn.Linear(2, 2)
    thread = threading.Thread(target=load, name=LOADER)
    thread.start()
    before = torch.get_rng_state()
    with untouched(model, slots_of(model), {}):
        inside.set()
        drawn.wait(10)
    thread.join()
    assert not torch.equal(before, torch.get_rng_state())
    after = torch.get_rng_state()
    with untouched(model, slots_of(model), {}):
        torch.rand(3)
    assert torch.equal(after, torch.get_rng_state()), "and without a loader all is as it was"

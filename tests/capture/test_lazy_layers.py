"""Lazy layers: initialised by one run on the example batch, and trained from there as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.bn = nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.BatchNorm2d(4)
        self.head = nn.LazyLinear(2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return self.head(self.bn(torch.relu(self.norm(self.conv(x)))).flatten(1))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("early", [True, False])
def test_lazy_models_train_as_in_pytorch(early: bool) -> None:
    """The same weights are drawn, statistics count real steps only, an optimizer made before keeps its parameters."""
    torch.manual_seed(3)
    plain = Net()
    optimizer = sgd(plain.parameters()) if early else None
    losses = []
    for _ in range(3):
        value = loss(plain, X)
        optimizer = optimizer or sgd(plain.parameters())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    torch.manual_seed(3)
    model = Net()
    job = laminar.parallelize(model, loss, sgd(model.parameters()) if early else sgd, batch=X)
    assert [job.step(X).loss for _ in range(3)] == pytest.approx(losses, rel=1e-5)
    for name, want in plain.state_dict().items():
        assert torch.allclose(job.state_dict()[name], want, rtol=1e-4, atol=1e-6), name


def test_lazy_models_are_captured() -> None:
    """`laminar.capture` and the planner see the sizes that the first batch gives."""
    graph = laminar.capture(Net(), loss, X)
    assert graph.input("head.weight").spec.shape == (2, 144)


def test_a_layer_that_stays_lazy_is_refused_by_name() -> None:
    """A branch that the example does not reach has no size."""
    model = nn.ModuleDict({"a": nn.LazyLinear(2), "b": nn.LazyLinear(3)})
    with pytest.raises(laminar.CaptureError, match=r"b\.weight is not initialised even after"):
        laminar.parallelize(model, lambda m, x: m["a"](x).sum(), sgd, batch=torch.randn(4, 5))


def test_lazy_models_on_meta_are_refused_by_name() -> None:
    """Nothing can run there."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))
    with pytest.raises(laminar.CaptureError, match="can't be run to find its shape"):
        laminar.capture(model, loss, torch.randn(2, 3))


def test_an_empty_batch_is_refused_by_name() -> None:
    """As the example, and as any batch later on."""
    model = nn.Linear(3, 2)
    with pytest.raises(laminar.BatchError, match="no samples"):
        laminar.parallelize(model, loss, sgd, batch=torch.randn(0, 3))
    job = laminar.parallelize(model, loss, sgd, batch=torch.randn(4, 3))
    with pytest.raises(laminar.BatchError, match="no samples"):
        job.step(torch.randn(0, 3))

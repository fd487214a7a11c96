"""Experts of a mixture as one product of groups of rows: captured, differentiated and cut as plain PyTorch does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.capture.capture import capture
from laminar.errors import CaptureError
from tests.support.capture_check import Fn, same, square

E, K, D, HIDDEN, TOKENS = 4, 2, 16, 24, 12


def routed(self: Any, x: Tensor) -> Tensor:
    """A mixture of experts as libraries write it: tokens sorted by expert, one product, and back."""
    weight, chosen = torch.topk(torch.softmax(self.router(x), -1), K)
    expert, order = torch.sort(chosen.reshape(-1))
    counts = torch.histc(expert.float(), bins=E, min=0, max=E - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    h = F.grouped_mm(x[order // K], self.up, offs=ends).relu()
    y = F.grouped_mm(h, self.down.transpose(-2, -1), offs=ends) * weight.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // K, y)


def net() -> nn.Module:
    parts = {"up": nn.Parameter(torch.randn(E, D, HIDDEN) / 4), "down": nn.Parameter(torch.randn(E, D, HIDDEN) / 4)}
    return Fn(routed, router=nn.Linear(D, E), **parts)


def tokens() -> Tensor:
    return torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(5))


def test_experts_are_captured_with_their_gradients() -> None:
    """Torch's own op knows one precision only where nothing is computed, so capture has its own."""
    graph = same(net, square, tokens())
    assert [n.op for n in graph.nodes].count("laminar.grouped_mm") == 3  # the rows need no gradient
    assert [n.op for n in graph.nodes].count("laminar.grouped_outer") == 2


@pytest.mark.parametrize("preset", ["data", "zero3", "tensor"])
def test_experts_are_spread_as_on_one_device(preset: str) -> None:
    """Rows may be cut anywhere, in the middle of a group too."""
    model = net()
    graph = laminar.capture(model, square, tokens())
    mesh = laminar.Mesh({"tp" if preset == "tensor" else "dp": 2})
    make: dict[str, Callable[..., Any]] = {
        "data": laminar.plans.data_parallel,
        "zero3": lambda g, m: laminar.plans.zero(g, m, 3),
        "tensor": laminar.plans.tensor_parallel,
    }
    report = laminar.verify(model, square, [tokens()], make[preset](graph, mesh), graph=graph)
    assert report.ok, str(report)


def test_a_form_that_does_not_exist_here_is_refused_by_name() -> None:
    """Columns in groups: nobody's model has them yet."""
    model = Fn(lambda self, x: F.grouped_mm(self.w, x, offs=torch.tensor([3, 6])), w=nn.Parameter(torch.randn(2, 5, 4)))
    with pytest.raises(CaptureError, match="grouped_mm of tensors with 3 and 2 dims"):
        capture(model, square, torch.randn(4, 6))

"""The cost of a sample from captured graphs is the count of what the model multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.data import SampleCost, cost_of_graphs
from laminar.data.cost.graph_cost import graph_flops
from laminar.errors import DataError

WIDTH, HEADS = 64, 2


class Attention(nn.Module):
    """One attention layer and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x))


def graph(model: nn.Module, length: int, samples: int = 1) -> Any:
    batch = torch.randn(samples, length, WIDTH)
    return laminar.capture(model, lambda m, x: m(x).square().mean(), batch)


@pytest.fixture(scope="module")
def graphs() -> dict[int, Any]:
    return {n: graph(Attention(), n) for n in (32, 64, 128)}


def test_the_quadratic_part_is_attentions(graphs: dict[int, Any]) -> None:
    """Two products forward and five backward, over all pairs of tokens."""
    assert cost_of_graphs(graphs).per_square == pytest.approx(14 * WIDTH, rel=0.02)


def test_the_linear_part_is_that_of_the_products(graphs: dict[int, Any]) -> None:
    """Six operations a weight and token, less one product of the first layer, and a few per element."""
    weights = WIDTH * WIDTH * (3 + 1 + 4 + 4)
    assert 0.9 * 6 * weights < cost_of_graphs(graphs).per_token < 1.15 * 6 * weights


def test_the_polynomial_gives_the_work_of_another_length(graphs: dict[int, Any]) -> None:
    """What was not fitted is met."""
    cost = cost_of_graphs(graphs)
    ratio = graph_flops(graph(Attention(), 256)) / graph_flops(graphs[32])
    assert float(cost.of([256])[0] / cost.of([32])[0]) == pytest.approx(ratio, rel=0.02)


def test_samples_of_a_batch_share_its_work(graphs: dict[int, Any]) -> None:
    """A batch of four says the same about one sample."""
    four = cost_of_graphs({n: graph(Attention(), n, 4) for n in (32, 64, 128)}, samples=4)
    one = cost_of_graphs(graphs)
    assert four.per_square == pytest.approx(one.per_square, rel=0.02)
    assert four.per_token == pytest.approx(one.per_token, rel=0.02)


def test_two_lengths_are_enough(graphs: dict[int, Any]) -> None:
    """For two coefficients."""
    found = cost_of_graphs({n: graphs[n] for n in (32, 128)})
    assert found.per_square == pytest.approx(cost_of_graphs(graphs).per_square, rel=0.05)


def test_a_model_without_attention_has_no_quadratic_part() -> None:
    """Nothing is made up."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    cost = cost_of_graphs({n: graph(model, n) for n in (32, 64, 128)})
    assert cost.per_square < 1e-6 * cost.per_token


@pytest.mark.parametrize("lengths", [(), (64,)])
def test_too_few_graphs_are_refused(lengths: tuple[int, ...], graphs: dict[int, Any]) -> None:
    """One point makes no line."""
    with pytest.raises(DataError, match="graphs of lengths"):
        cost_of_graphs({n: graphs[n] for n in lengths})


def test_graphs_that_are_no_polynomial_are_refused(graphs: dict[int, Any]) -> None:
    """Such as those of a model that cuts its input off."""
    with pytest.raises(DataError, match="no polynomial"):
        cost_of_graphs({**graphs, 256: graphs[32], 512: graphs[32]})


def test_the_result_is_a_plain_cost(graphs: dict[int, Any]) -> None:
    """Which samplers take."""
    assert isinstance(cost_of_graphs(graphs, causal=False), SampleCost)
    assert not cost_of_graphs(graphs, causal=False).causal

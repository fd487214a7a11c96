"""Models with branches, and their plans on devices of their own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import laminar
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.search.best_first.branches import Branches
from laminar.planner.space.request import asking


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with activations between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Towers(nn.Module):
    """Towers of different depth, each with an input of its own or all behind one stem, and a small head."""

    def __init__(self, width: int, depths: Sequence[int], stem: bool = False, head: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width) if stem else None
        self.towers = nn.ModuleList(mlp(*[width] * (depth + 1), head) for depth in depths)
        self.head = mlp(head * len(depths), head, 1)

    def forward(self, x: Tensor) -> Tensor:
        given = x.unbind(1) if self.stem is None else [torch.tanh(self.stem(x[:, 0]))] * len(self.towers)
        return self.head(torch.cat([tower(one) for tower, one in zip(self.towers, given, strict=True)], -1))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@cache
def towers(width: int, depths: tuple[int, ...], rows: int, stem: bool = False) -> Graph:
    """The graph of a training step; its tensors are never made."""
    with torch.device("meta"):
        return laminar.capture(
            Towers(width, depths, stem), loss, torch.zeros(1, len(depths), width).expand(rows, -1, -1)
        )


def branches(graph: Graph, cluster: str, **options: Any) -> Branches:
    """The ways of a model on a machine."""
    model = Model(graph, asking(Cluster.preset(cluster), **options))
    return Branches(model, Bounds(model))

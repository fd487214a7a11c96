"""A model, its loss and batches, for jobs whose plans recompute or offload."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, SAMPLES, MICRO = 32, 8, 4


class Block(nn.Module):
    """A norm, two products and dropout beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error."""
    return (model(batch["x"]) - batch["y"]).square().mean()


def batches(sizes: list[int]) -> list[dict[str, Tensor]]:
    """Random samples and targets, the same on every rank."""
    rng = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(n, WIDTH, generator=rng), "y": torch.randn(n, 5, generator=rng)} for n in sizes]

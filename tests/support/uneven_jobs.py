"""Models, batches and plans for tests of micro-batches of different sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.capture.canonical.canonical import Canonical
from laminar.ir.plans.staged import Staged

WORDS, TOKENS, WIDTH, SEED = 23, 5, 12, 7


class Net(nn.Module):
    """Embedding, four layers with dropout on activations, and a head with dropout on its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """Every other layer sees tokens first: its draws are [tokens, batch, width]."""
        h = self.embed(x)
        for layer in self.layers:
            h = (h + F.dropout(F.gelu(layer(h)), 0.2, self.training)).transpose(0, 1)
        return F.linear(h, F.dropout(self.head.weight, 0.1, self.training), self.head.bias)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over samples and tokens."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def counted(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The mean over labels that are there: parts of a batch have different counts, some have none."""
    total = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum", ignore_index=0)
    return laminar.Loss(total, (batch["y"] != 0).sum())


LOSSES = {"mean": loss, "counted": counted}


def model(train: bool = True) -> nn.Module:
    """The same weights every time, in float64."""
    torch.manual_seed(0)
    return Net().double().train(train)


def batch_of(samples: int, seed: int = 0) -> dict[str, Tensor]:
    """Tokens and labels, of which some are to be ignored, and all of the first sample."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(1, WORDS, (samples, TOKENS), generator=g)
    y[: samples > 1] = 0
    return {
        "x": torch.randint(0, WORDS, (samples, TOKENS), generator=g),
        "y": y * (torch.rand(y.shape, generator=g) > 0.3),
    }


def make(params: Any) -> torch.optim.Optimizer:
    """Weights that differ by their gradients."""
    return torch.optim.SGD(params, lr=1.0)


def plain(which: str, batches: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of plain PyTorch on whole batches, with draws by the key."""
    made = model()
    optimizer, said = make(made.parameters()), []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        with Canonical(torch.tensor([SEED, step])):
            value = LOSSES[which](made, batch)
            value = value.total / value.weight if isinstance(value, laminar.Loss) else value
            value.backward()
        optimizer.step()
        said.append(value.item())
    return said, made.state_dict()


def planned(made: nn.Module, samples: int, micro: int, **options: Any) -> Staged:
    """A pipeline, made for micro-batches of so many samples."""
    return laminar.plans.pipeline(laminar.capture(made, loss, batch_of(samples)), microbatches=micro, **options)

"""A small model, its losses, batches and optimizer, for tests of jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar


class Net(nn.Module):
    """Embedding, norm, two layers, a tied head, an odd number of words."""

    def __init__(self, words: int = 37, d: int = 16, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)
        self.head = nn.Linear(d, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.seen += ids.shape[0]
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


def net(seed: int = 0, dtype: torch.dtype = torch.float64, **kwargs: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**kwargs).to(dtype)


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["target"].flatten())


def counted(model: nn.Module, batch: Any) -> laminar.Loss:
    """Sum and count of the positions that count."""
    logits, target = model(batch["ids"]).flatten(0, 1), batch["target"].flatten()
    return laminar.Loss(F.cross_entropy(logits, target, ignore_index=-100, reduction="sum"), (target != -100).sum())


def batches(n: int, samples: int = 8, holes: bool = False, seed: int = 1) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        ids = torch.randint(37, (samples, 5), generator=g)
        target = (ids * 7 + 3) % 37
        if holes:  # very uneven: the first samples have hardly any
            keep = torch.rand(samples, 5, generator=g) < torch.linspace(0.1, 1.0, samples)[:, None]
            target = torch.where(keep, target, -100)
        out.append({"ids": ids, "target": target})
    return out


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(
    model: nn.Module, loss: Any, optimizer: Any, data: list[Any], after: Callable[[], None] | None = None
) -> list[float]:
    """The ordinary loop; `after` stands between backward and the update."""
    losses = []
    for batch in data:
        value = loss(model, batch)
        value = value.total / value.weight if isinstance(value, laminar.Loss) else value
        optimizer.zero_grad()
        value.backward()
        if after is not None:
            after()
        optimizer.step()
        losses.append(value.item())
    return losses


def gap(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference of any weight."""
    assert list(got) == list(want)
    return max(float((got[k].double() - want[k].double()).abs().max()) for k in want)

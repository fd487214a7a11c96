"""DLRM: click prediction from a few numbers and many look-ups in large tables.

Nearly all parameters sit in embedding tables and nearly all arithmetic in two small MLPs, so the
best place for a table is rarely the best place for the rest: tables go by row, by column or whole
to different ranks while the MLPs follow the batch. One table sums a bag of ids per sample. What
the numbers and the look-ups say to each other is the dot product of every pair of their vectors.

In `tiny` one id and two numbers decide; in `small` it is whether hidden preferences agree, ids follow a
power law as they do in real logs, and a click remains a matter of chance.
"""

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

import torch
import torch.nn.functional as F
from data import ClickLog
from torch import Tensor, nn

from laminar import Recipe


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers, each but the last followed by a ReLU."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Numbers (batch, n), one id per table (batch, tables) and a bag (batch, k) to logits (batch,)."""

    def __init__(self, *, numbers: int, tables: list[int], bag_rows: int, d: int, spread: float = 1.0) -> None:
        super().__init__()
        self.bottom = mlp(numbers, 32, d)
        self.tables = nn.ModuleList(nn.Embedding(rows, d) for rows in tables)
        self.bag = nn.EmbeddingBag(bag_rows, d, mode="sum")
        with torch.no_grad():
            for table in (*self.tables, self.bag):
                table.weight.mul_(spread)
        vectors = 1 + len(tables) + 1
        self.top = mlp(d + vectors * (vectors - 1) // 2, 40, 24, 1)

    def forward(self, numbers: Tensor, ids: Tensor, bag: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        looked_up = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *looked_up, self.bag(bag)], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        n = vectors.shape[1]
        row, column = torch.tril_indices(n, n, offset=-1, device=dots.device)
        return self.top(torch.cat([dense, dots[:, row, column]], dim=1)).squeeze(1)


def clicks(batch: int, numbers: int, tables: list[int], bag_rows: int, bag: int) -> Iterator[dict[str, Tensor]]:
    """Samples clicked by a rule that weighs two numbers and one id, without end."""
    rng = torch.Generator().manual_seed(1)
    taste = torch.randn(tables[0], generator=rng)
    while True:
        x = torch.randn(batch, numbers, generator=rng)
        ids = torch.stack([torch.randint(rows, (batch,), generator=rng) for rows in tables], dim=1)
        yield {
            "numbers": x,
            "ids": ids,
            "bag": torch.randint(bag_rows, (batch, bag), generator=rng),
            "click": (x[:, 0] - x[:, 1] + taste[ids[:, 0]] > 0).to(x.dtype),
        }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logit = model(batch["numbers"], batch["ids"], batch["bag"])
    return F.binary_cross_entropy_with_logits(logit, batch["click"])


def tiny() -> Recipe:
    tables = [64, 40, 33]

    def model() -> DLRM:
        torch.manual_seed(0)
        return DLRM(numbers=13, tables=tables, bag_rows=50, d=16)

    def data() -> Iterator[dict[str, Tensor]]:
        return clicks(batch=16, numbers=13, tables=tables, bag_rows=50, bag=3)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(params, lr=0.05)

    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=50)


def small() -> Recipe:
    """320k parameters, all but five thousand in tables."""
    log = ClickLog(numbers=13, tables=[1_000, 2_000, 5_000], bag_rows=2_000, bag=4)

    def model() -> DLRM:
        torch.manual_seed(0)
        return DLRM(numbers=log.numbers, tables=log.tables, bag_rows=log.bag_rows, d=32, spread=0.1)

    def data() -> Iterator[dict[str, Tensor]]:
        return log.batches(batch=512)

    def evaluate() -> Iterable[dict[str, Tensor]]:
        return islice(log.batches(batch=512, seed=2), 20)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(params, lr=0.1)

    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=1000, evaluate=evaluate)

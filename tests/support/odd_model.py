"""A model of no example, made to be hard to cut: a tied head, statistics, a skip over the middle, sums of tokens.

Its head is its embedding, so the first and the last stage share a weight (in `odd`); what the first layer makes is read
by the last ones as well; a table that depends on no sample is read by all layers; backward reads a buffer of which the
next micro-batch finds another value; sizes are odd; the loss has a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import laminar

WORDS, WIDTH, LENGTH, BATCH = 37, 20, 6, 16


class OddBlock(nn.Module):
    """Attention with a bias that all blocks share, then a product after batch norm over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.up = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """The stream after this block."""
        near = torch.softmax(x @ x.transpose(1, 2) / 4 + table, -1)
        x = x + near @ self.mix(x) * self.level
        with torch.no_grad():
            self.level = self.level * 0.5 + torch.tanh(x.abs().mean())  # backward still needs what it was
        return x + torch.tanh(self.up(self.norm(x)))


class OddModel(nn.Module):
    """See the head of this file."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.table = nn.Parameter(torch.randn(LENGTH, LENGTH) / 9)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(4))
        self.drop, self.end = nn.Dropout(0.1), nn.LayerNorm(WIDTH)
        self.head = self.words if tied else nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of words."""
        x = first = self.words(ids)
        table = torch.tanh(self.table)
        for block in self.blocks:
            x = block(x, table)
        return self.drop(self.end(x + first)) @ self.head.weight.t()


def odd_loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Over the words that count, which are not as many in each unit."""
    each = nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["next"].flatten(), reduction="none")
    counts = batch["counts"].flatten()
    return laminar.Loss((each * counts).sum(), counts.sum())


def odd(tied: bool = True) -> laminar.Recipe:
    """As `laminar train` takes it."""

    def data() -> Any:
        dice = torch.Generator().manual_seed(3)
        while True:
            ids = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=dice)
            counts = (torch.rand(BATCH, LENGTH, generator=dice) < 0.7).float()
            yield {"ids": ids[:, :-1], "next": ids[:, 1:], "counts": counts}

    return laminar.Recipe(
        model=lambda: OddModel(tied),
        loss=odd_loss,
        data=data,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        steps=10,
    )


def odd_untied() -> laminar.Recipe:
    """The same with a head of its own."""
    return odd(tied=False)

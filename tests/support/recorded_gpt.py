"""A small GPT with its loss and batches, for tests of recorded timelines."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        y = self.norm1(x)
        q, k, v = (part(y).view(b, t, -1, 16).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, d: int = 64) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(96, d), nn.Sequential(Block(d), Block(d))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 96)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids))))


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["target"].flatten())


def _batches(n: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    ids = [torch.randint(96, (8, 33), generator=g) for _ in range(n)]
    return [{"ids": x[:, :-1].contiguous(), "target": x[:, 1:].contiguous()} for x in ids]

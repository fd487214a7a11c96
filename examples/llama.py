"""Llama: RMS norm, rotary positions, grouped-query attention, a gated MLP, and a tied head.

Three things here ask more of a plan than GPT does. There are half as many key and value heads as
query heads, so a split over more ranks than key heads must not cut a head. The embedding and the
head are one parameter used twice: one gradient, and one placement. The rotary tables are buffers
that no optimizer touches.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laminar import Recipe


class RMSNorm(nn.Module):
    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Rotary(nn.Module):
    """Turns each pair (i, i + half) of a head's channels by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, tokens: int, head_d: int, base: float = 10_000.0) -> None:
        super().__init__()
        speed = base ** -(torch.arange(0, head_d, 2) / head_d)
        angle = torch.outer(torch.arange(tokens), speed).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[-2]
        left, right = x.chunk(2, dim=-1)
        return x * self.cos[:t] + torch.cat((-right, left), dim=-1) * self.sin[:t]


class Attention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, d: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_d = d // heads
        self.q = nn.Linear(d, heads * self.head_d, bias=False)
        self.k = nn.Linear(d, kv_heads * self.head_d, bias=False)
        self.v = nn.Linear(d, kv_heads * self.head_d, bias=False)
        self.out = nn.Linear(heads * self.head_d, d, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_d)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d, hidden, bias=False)
        self.up = nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(d)
        self.attention = Attention(d, heads, kv_heads)
        self.norm2 = RMSNorm(d)
        self.mlp = SwiGLU(d, hidden)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.attention(self.norm1(x), rotary)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, *, layers: int, d: int, heads: int, kv_heads: int, hidden: int, vocab: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.rotary = Rotary(tokens, d // heads)
        self.blocks = nn.ModuleList(Block(d, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.head(self.norm(x))


def counting(batch: int, tokens: int, vocab: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences that count up by a step of their own, modulo the vocabulary, without end."""
    rng = torch.Generator().manual_seed(1)
    while True:
        start = torch.randint(vocab, (batch, 1), generator=rng)
        step = torch.randint(1, 5, (batch, 1), generator=rng)
        ids = (start + step * torch.arange(tokens + 1)) % vocab
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, target = batch
    return F.cross_entropy(model(ids).flatten(0, 1), target.flatten())


def tiny() -> Recipe:
    def model() -> Llama:
        torch.manual_seed(0)
        return Llama(layers=2, d=32, heads=4, kv_heads=2, hidden=84, vocab=64, tokens=12)

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        return counting(batch=8, tokens=12, vocab=64)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01)

    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=50)

"""A transformer whose MLPs are mixtures of experts: each token is sent to the best two of several.

Routing is written densely, after GShard: every sequence gives every expert a fixed number of places
(the capacity), a 0/1 tensor says which token takes which place, and two einsums send tokens out and
bring results back. Shapes never depend on the data, so one graph describes every step; what the
network does with a split over experts is an all-to-all. A token that finds all places taken passes
by on the residual stream alone. A small extra loss keeps the experts evenly used.

`tiny` learns to count, `small` reads the text of the standard library.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from data import VOCAB, windows
from torch import Tensor, nn

from laminar import Recipe


class Experts(nn.Module):
    """Top-2 routing over two-layer experts. Returns the mixture and the balance loss."""

    def __init__(self, d: int, hidden: int, experts: int, spare: float = 1.25) -> None:
        super().__init__()
        self.experts, self.spare = experts, spare
        self.router = nn.Linear(d, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, d, hidden) * d**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, d) * hidden**-0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where each token goes (b t e c, 0 or 1), with what weight (same shape), and the balance loss.

        All first choices are seated before any second choice, each in order of the tokens.
        """
        b, t, _ = x.shape
        capacity = math.ceil(2 * t / self.experts * self.spare)
        gate = self.router(x).softmax(dim=-1)
        weight, choice = gate.topk(2, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)

        chosen = F.one_hot(choice, self.experts).transpose(1, 2)  # b 2 t e
        queue = chosen.reshape(b, 2 * t, self.experts).cumsum(dim=1).view_as(chosen)
        seat = (queue - 1).unsqueeze(-1) == torch.arange(capacity, device=x.device)  # b 2 t e c
        seated = (seat & chosen.bool().unsqueeze(-1)).to(x.dtype)
        dispatch = seated.sum(dim=1)
        combine = torch.einsum("bktec,btk->btec", seated, weight)

        share = chosen[:, 0].to(x.dtype).mean(dim=(0, 1))
        balance = self.experts * (share * gate.mean(dim=(0, 1))).sum()
        return dispatch, combine, balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dispatch, combine, balance = self.route(x)
        sent = torch.einsum("btec,btd->ebcd", dispatch, x)
        hidden = F.gelu(torch.einsum("ebcd,edh->ebch", sent, self.up))
        back = torch.einsum("ebch,ehd->ebcd", hidden, self.down)
        return torch.einsum("ebcd,btec->btd", back, combine), balance


class Block(nn.Module):
    def __init__(self, d: int, heads: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.norm2 = nn.LayerNorm(d)
        self.experts = Experts(d, hidden, experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        mixed, balance = self.experts(self.norm2(x))
        return x + mixed, balance


class MoE(nn.Module):
    """Token ids to logits, and the sum of the balance losses of all blocks."""

    def __init__(self, *, layers: int, d: int, heads: int, hidden: int, experts: int, vocab: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, d))
        self.blocks = nn.ModuleList(Block(d, heads, hidden, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        balance = x.new_zeros(())
        for block in self.blocks:
            x, extra = block(x)
            balance = balance + extra
        return self.head(self.norm(x)), balance


def counting(batch: int, tokens: int, vocab: int) -> Iterator[dict[str, Tensor]]:
    """Sequences that count up by a step of their own, modulo the vocabulary, without end."""
    rng = torch.Generator().manual_seed(1)
    while True:
        start = torch.randint(vocab, (batch, 1), generator=rng)
        step = torch.randint(1, 4, (batch, 1), generator=rng)
        ids = (start + step * torch.arange(tokens + 1)) % vocab
        yield {"ids": ids[:, :-1].contiguous(), "target": ids[:, 1:].contiguous()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, balance = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten()) + 0.01 * balance


def tiny() -> Recipe:
    def model() -> MoE:
        torch.manual_seed(0)
        return MoE(layers=1, d=32, heads=4, hidden=48, experts=4, vocab=42, tokens=16)

    def data() -> Iterator[dict[str, Tensor]]:
        return counting(batch=8, tokens=16, vocab=42)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3)

    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=50)


def small() -> Recipe:
    """1.2M parameters in two layers of eight experts, of which a token uses a quarter."""

    def model() -> MoE:
        torch.manual_seed(0)
        return MoE(layers=2, d=128, heads=4, hidden=256, experts=8, vocab=VOCAB, tokens=64)

    def data() -> Iterator[dict[str, Tensor]]:
        return windows(batch=16, tokens=64)

    def evaluate() -> Iterable[dict[str, Tensor]]:
        return islice(windows(batch=16, tokens=64, held_out=True), 20)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=2e-3, betas=(0.9, 0.95))

    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=400, evaluate=evaluate)

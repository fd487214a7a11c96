"""GPT as GPT-2 has it: pre-norm blocks, one packed projection for q, k and v, learned positions.

The packed projection is the trap for anyone who splits it. Rows of `qkv.weight` lie in three
blocks, so a rank that takes a contiguous quarter of them gets no whole head of anything; the split
that keeps heads together is the inner one, S(0, blocks=3). The head has weights of its own.

Sizes: `tiny` and `narrow` for tests, `demo` and `small` to train on the text of the standard library,
`deep` for planning on machines one does not have. A model of any size can be built on the meta device.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from data import VOCAB, windows
from torch import Tensor, nn

from laminar import Recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    """A model and the batches it is trained on."""

    layers: int
    d: int
    heads: int
    vocab: int
    tokens: int
    """Tokens per sequence; also how many positions are learned."""
    batch: int


class Attention(nn.Module):
    """Causal self-attention over packed q, k and v."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(d, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class MLP(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d)
        self.attention = Attention(d, heads)
        self.norm2 = nn.LayerNorm(d)
        self.mlp = MLP(d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token ids (batch, tokens) to logits (batch, tokens, vocab)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.d
        self.embed = nn.Embedding(config.vocab, d)
        self.position = nn.Embedding(config.tokens, d)
        self.blocks = nn.ModuleList(Block(d, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, config.vocab, bias=False)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def babble(config: Config) -> Iterator[dict[str, Tensor]]:
    """Sequences in which most tokens follow from the one before, without end.

    Nine times in ten the next token is looked up in a fixed random table, otherwise it is drawn
    afresh. A model that has learned the table reaches a low loss, so a curve that does not fall
    means that something is wrong.
    """
    rng = torch.Generator().manual_seed(1)
    table = torch.randint(config.vocab, (config.vocab,), generator=rng)
    shape = (config.batch, config.tokens + 1)
    while True:
        ids = torch.randint(config.vocab, shape, generator=rng)
        follows = torch.rand(shape, generator=rng) < 0.9
        for t in range(1, shape[1]):
            ids[:, t] = torch.where(follows[:, t], table[ids[:, t - 1]], ids[:, t])
        yield {"ids": ids[:, :-1].contiguous(), "target": ids[:, 1:].contiguous()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten())


def recipe(config: Config, lr: float, steps: int, text: bool = False, dtype: torch.dtype = torch.float32) -> Recipe:
    """Train on babble, or on text if so asked."""

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(config).to(dtype)

    def data() -> Iterator[dict[str, Tensor]]:
        return windows(config.batch, config.tokens) if text else babble(config)

    def evaluate() -> Iterable[dict[str, Tensor]]:
        return islice(windows(config.batch, config.tokens, held_out=True), 20)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)

    held_out = evaluate if text else None
    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=steps, evaluate=held_out)


def tiny() -> Recipe:
    """30k parameters: a step takes milliseconds."""
    return recipe(Config(layers=2, d=32, heads=4, vocab=61, tokens=16, batch=8), lr=3e-3, steps=50)


def narrow() -> Recipe:
    """Deep and thin, with a batch of two: little to gain from splitting a layer or the batch."""
    return recipe(Config(layers=8, d=64, heads=4, vocab=96, tokens=32, batch=2), lr=1e-3, steps=50)


def demo() -> Recipe:
    """0.8M parameters on text, in float64: to be trained twice and compared.

    Training magnifies what rounding begins with, and Adam makes steps even of gradients that are nothing
    but rounding (the bias of the keys has no other). In float32 two correct runs part company after a
    hundred steps, by as much as a mistake would cost; in float64 they stay together to ten digits.
    """
    config = Config(layers=4, d=128, heads=4, vocab=VOCAB, tokens=64, batch=16)
    return recipe(config, lr=1e-3, steps=300, text=True, dtype=torch.float64)


def small() -> Recipe:
    """11M parameters on text: what one CPU can still train. Ids of characters use the lower 96 of 256."""
    return recipe(Config(layers=6, d=384, heads=6, vocab=256, tokens=256, batch=16), lr=1e-3, steps=500, text=True)


def deep() -> Recipe:
    """400M parameters, of the shape of GPT-2 medium: for planning, or for GPUs."""
    return recipe(Config(layers=24, d=1024, heads=16, vocab=50257, tokens=1024, batch=16), lr=3e-4, steps=500)

"""The models the training benchmarks run, each with its batches and with how the peers split it.

Four are in every benchmark (`MODELS`):

GPT of 10.9M parameters (`examples/gpt.py:small` with q, k and v apart, because eager DTensor can't
split a packed projection by heads), the residual CNN of `examples/resnet.py`, a wide MLP of 16.8M
(gradients large against compute), and a DLRM of 11.8M (nearly all of it in embedding tables; the bag
is an embedding that is summed, for the same reason as above). Where the batch is split it grows with the
ranks; where every rank has all of it, it is that of two ranks, or the fraction of it that is asked for, and the GPT has
at least one block for each rank (14.4M parameters on eight).

`WIDER` has the rest of the examples besides, at sizes where a step takes tens of milliseconds on a core, a graph
network, and the DLRM updated by plain SGD, which does the same to a table whether its gradient is sparse or dense.
These are for splits by sample only. Every rank has as many masked words as the others, so that a mean of
means is the mean, and nothing is dropped at random, for peers draw other numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laminar.api import load_recipe

EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True)
class Case:
    """A model, its loss and its batches; which of its parts are blocks, and the usual way to split it."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batches: list[dict[str, Tensor]]
    blocks: Callable[[nn.Module], list[nn.Module]]
    """What FSDP2 shards one by one."""
    ways: dict[str, str]
    """For DTensor: the ending of a module's name -> column, row or vocab."""
    optimizer: str = "adamw"
    """What every side updates with: adamw or sgd."""


class Block(nn.Module):
    """A pre-norm transformer block that does not mind being given a share of its heads."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.head_d = d // heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.out = nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.norm1(x)
        q, k, v = (part(y).view(b, t, -1, self.head_d).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Token ids to logits."""

    def __init__(self, layers: int, d: int, heads: int, vocab: int, tokens: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, d), nn.Embedding(tokens, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(ranks: int, split: bool, shrink: int = 1) -> Case:
    """Sequences of 64 tokens, 4 a rank, so that reduction counts."""
    heads = 8 if ranks <= 8 else 16
    batch = 4 * ranks if split else 8 // shrink

    def make(rng: torch.Generator) -> dict[str, Tensor]:
        ids = torch.randint(256, (batch, 65), generator=rng)
        return {"ids": ids[:, :-1].contiguous(), "target": ids[:, 1:].contiguous()}

    return Case(
        lambda: GPT(layers=6 if split else max(6, ranks), d=384, heads=heads, vocab=256, tokens=64),
        lambda m, b: F.cross_entropy(m(b["ids"]).flatten(0, 1), b["target"].flatten()),
        _some(make),
        lambda m: list(m.blocks),
        {**dict.fromkeys(("q", "k", "v", "up"), "column"), "out": "row", "down": "row"},
    )


def long(tokens: int, ranks: int, split: bool, shrink: int = 1) -> Case:
    """A GPT of four layers on one sequence, however many ranks there are."""
    return Case(
        lambda: GPT(layers=4, d=256, heads=8, vocab=256, tokens=tokens),
        _next_loss,
        _next_ids(1, tokens, 256),
        lambda m: list(m.blocks),
        {},
    )


def mlp(ranks: int, split: bool, shrink: int = 1) -> Case:
    """Four wide layers and a head, 32 samples a rank."""
    batch = 32 * ranks if split else 64 // shrink

    def model() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(*layers, nn.Linear(2048, 10))

    def make(rng: torch.Generator) -> dict[str, Tensor]:
        x, y = torch.randn(batch, 2048, generator=rng), torch.randint(10, (batch,), generator=rng)
        return {"x": x, "y": y}

    ways = {"0.0": "column", "1.0": "row", "2.0": "column", "3.0": "row"}
    return Case(
        model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), _some(make), lambda m: [m[i] for i in range(4)], ways
    )


def cnn(ranks: int, split: bool, shrink: int = 1) -> Case:
    """The residual CNN of the examples on pictures of 32 by 32, 16 a rank, batch norm over the whole batch."""
    load_recipe(f"{EXAMPLES}/resnet.py:small")
    example = sys.modules["laminar_recipe_resnet"]
    batch = 16 * ranks if split else 32 // shrink
    source = example.images(batch=batch, size=32, classes=10)
    return Case(
        lambda: example.ResNet(widths=[32, 64, 128, 256], blocks=2, classes=10),
        example.loss,
        [next(source) for _ in range(4)],
        lambda m: list(m.stages),
        {"conv1": "column", "norm1": "column", "conv2": "row"},
    )


class DLRM(nn.Module):
    """Numbers, one id per table and a bag of ids to logits."""

    def __init__(self, tables: int, rows: int, d: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, d))
        self.tables = nn.ModuleList(nn.Embedding(rows, d) for _ in range(tables))
        self.bag = nn.Embedding(rows, d)
        n = tables + 2
        self.register_buffer("pairs", torch.tril_indices(n, n, offset=-1), persistent=False)
        self.top = nn.Sequential(nn.Linear(d + n * (n - 1) // 2, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.last = nn.Linear(128, 1)

    def forward(self, numbers: Tensor, ids: Tensor, bag: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *found, self.bag(bag).sum(1)], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        met = dots[:, self.pairs[0], self.pairs[1]]
        return self.last(self.top(torch.cat([dense, met], dim=1))).squeeze(1)


def dlrm(ranks: int, split: bool, shrink: int = 1) -> Case:
    """Nine tables of 20480 rows; 256 samples a rank."""
    batch, rows = 256 * ranks if split else 512 // shrink, 20480

    def make(rng: torch.Generator) -> dict[str, Tensor]:
        x = torch.randn(batch, 13, generator=rng)
        ids, bag = (torch.randint(rows, (batch, n), generator=rng) for n in (8, 4))
        return {"numbers": x, "ids": ids, "bag": bag, "click": (x[:, 0] > x[:, 1]).float()}

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(b["numbers"], b["ids"], b["bag"]), b["click"])

    ways = {f"tables.{i}": "vocab" for i in range(8)} | {"bag": "vocab"}
    ways |= {"bottom.0": "column", "bottom.2": "row", "top.0": "column", "top.2": "row"}
    return Case(lambda: DLRM(8, rows, 64), loss, _some(make), lambda m: [*m.tables, m.bag, m.bottom, m.top], ways)


def _some(make: Callable[[torch.Generator], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [make(rng) for _ in range(4)]


def _example(name: str) -> Any:
    """A file of the examples as a module."""
    load_recipe(f"{EXAMPLES}/{name}.py:tiny")
    return sys.modules[f"laminar_recipe_{name}"]


def _next_ids(batch: int, tokens: int, vocab: int) -> list[dict[str, Tensor]]:
    """Random ids and what follows each."""

    def make(rng: torch.Generator) -> dict[str, Tensor]:
        ids = torch.randint(vocab, (batch, tokens + 1), generator=rng)
        return {"ids": ids[:, :-1].contiguous(), "target": ids[:, 1:].contiguous()}

    return _some(make)


def _next_loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["target"].flatten())


def llama(ranks: int, split: bool = True, shrink: int = 1) -> Case:
    """Four blocks with half as many key heads as query heads and a tied head; 4 sequences of 64 tokens a rank."""
    example = _example("llama")
    return Case(
        lambda: example.Llama(layers=4, d=256, heads=8, kv_heads=4, hidden=768, vocab=1024, tokens=64),
        _next_loss,
        _next_ids(4 * ranks, 64, 1024),
        lambda m: list(m.blocks),
        {},
    )


def bert(ranks: int, split: bool = True, shrink: int = 1) -> Case:
    """Four post-norm layers without dropout; 4 sentences of 64 words a rank, 16 of them masked."""
    example = _example("bert")
    batch, tokens, vocab = 4 * ranks, 64, 1024

    def make(rng: torch.Generator) -> dict[str, Tensor]:
        words = torch.randint(2, vocab, (batch, tokens), generator=rng)
        asked = torch.rand(batch, tokens, generator=rng).argsort(1) < tokens // 4
        return {
            "ids": words.masked_fill(asked, example.MASK),
            "segments": (torch.arange(tokens) >= tokens // 2).long().repeat(batch, 1),
            "is_word": torch.ones(batch, tokens, dtype=torch.bool),
            "label": words.where(asked, example.IGNORE),
        }

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        logits = model(b["ids"], b["segments"], b["is_word"])
        return F.cross_entropy(logits.flatten(0, 1), b["label"].flatten(), ignore_index=example.IGNORE)

    return Case(
        lambda: example.BERT(layers=4, d=256, heads=8, vocab=vocab, tokens=tokens, dropout=0.0),
        loss,
        _some(make),
        lambda m: list(m.layers),
        {},
    )


def vit(ranks: int, split: bool = True, shrink: int = 1) -> Case:
    """Four blocks; 4 pictures of 32 by 32 a rank, 65 tokens each."""
    example = _example("vit")
    source = example.images(batch=4 * ranks, size=32, classes=10)
    return Case(
        lambda: example.ViT(size=32, patch=4, layers=4, d=256, heads=8, hidden=1024, classes=10),
        lambda m, b: F.cross_entropy(m(b["image"]), b["label"]),
        [dict(zip(("image", "label"), next(source), strict=True)) for _ in range(4)],
        lambda m: list(m.blocks),
        {},
    )


def t5(ranks: int, split: bool = True, shrink: int = 1) -> Case:
    """Three layers that read 48 tokens and three that write 32; 4 pairs a rank."""
    example = _example("t5")
    source = example.continuations(batch=4 * ranks, source=48, target=32, vocab=1024)
    return Case(
        lambda: example.T5(layers=3, d=256, heads=8, hidden=768, vocab=1024),
        example.loss,
        [next(source) for _ in range(4)],
        lambda m: [*m.encoder, *m.decoder],
        {},
    )


def moe(ranks: int, split: bool = True, shrink: int = 1) -> Case:
    """Two blocks of eight experts, of which a token uses two; 4 sequences of 64 tokens a rank.

    The small loss that balances experts is a product of two means over the batch: ours takes those of the whole batch,
    peers those of each rank's part.
    """
    example = _example("moe")
    return Case(
        lambda: example.MoE(layers=2, d=256, heads=8, hidden=512, experts=8, vocab=256, tokens=64),
        example.loss,
        _next_ids(4 * ranks, 64, 256),
        lambda m: list(m.blocks),
        {},
    )


def unet(ranks: int, split: bool = True, shrink: int = 1) -> Case:
    """Pictures of 32 by 32 down to a quarter and up again; 4 a rank."""
    example = _example("unet")
    source = example.bands(batch=4 * ranks, size=32)
    return Case(
        lambda: example.UNet(width=32, classes=3),
        example.loss,
        [next(source) for _ in range(4)],
        lambda m: [c for c in m.children() if isinstance(c, nn.Sequential)],
        {},
    )


def lstm(ranks: int, split: bool = True, shrink: int = 1) -> Case:
    """Two recurrent layers of width 384; 8 sequences of 32 tokens a rank."""
    example = _example("lstm")
    return Case(
        lambda: example.LanguageModel(vocab=256, d=384, hidden=384, layers=2),
        _next_loss,
        _next_ids(8 * ranks, 32, 256),
        lambda m: [m.lstm],
        {},
    )


class GNN(nn.Module):
    """Nodes that hear the mean of their neighbours, layer after layer, and a vote of all nodes of a graph."""

    def __init__(self, layers: int, features: int, d: int, classes: int) -> None:
        super().__init__()
        widths = [features] + [d] * layers
        self.own = nn.ModuleList(nn.Linear(a, d) for a in widths[:-1])
        self.heard = nn.ModuleList(nn.Linear(a, d, bias=False) for a in widths[:-1])
        self.head = nn.Linear(d, classes)

    def forward(self, x: Tensor, mean: Tensor) -> Tensor:
        for own, heard in zip(self.own, self.heard, strict=True):
            x = F.relu(own(x) + heard(mean @ x))
        return self.head(x.mean(1))


def gnn(ranks: int, split: bool = True, shrink: int = 1) -> Case:
    """Four layers of width 512 on graphs of 64 nodes, neighbourhoods as dense matrices; 8 graphs a rank."""
    batch, nodes, features, classes = 8 * ranks, 64, 128, 10

    def make(rng: torch.Generator) -> dict[str, Tensor]:
        near = (torch.rand(batch, nodes, nodes, generator=rng) < 0.1).float() + torch.eye(nodes)
        return {
            "x": torch.randn(batch, nodes, features, generator=rng),
            "mean": near / near.sum(-1, keepdim=True),
            "y": torch.randint(classes, (batch,), generator=rng),
        }

    return Case(
        lambda: GNN(4, features, 512, classes),
        lambda m, b: F.cross_entropy(m(b["x"], b["mean"]), b["y"]),
        _some(make),
        lambda m: [],
        {},
    )


def dlrm_sgd(ranks: int, split: bool = True, shrink: int = 1) -> Case:
    """The DLRM, updated by SGD without momentum."""
    return replace(dlrm(ranks, split, shrink), optimizer="sgd")


MODELS: dict[str, Callable[[int, bool, int], Case]] = {"gpt": gpt, "cnn": cnn, "mlp": mlp, "dlrm": dlrm}
LONG: dict[str, Callable[[int, bool, int], Case]] = {str(n): partial(long, n) for n in (1024, 2048, 4096)}
"""One sequence of so many tokens."""
WIDER: dict[str, Callable[..., Case]] = {
    **MODELS,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "moe": moe,
    "unet": unet,
    "lstm": lstm,
    "gnn": gnn,
    "dlrm_sgd": dlrm_sgd,
}

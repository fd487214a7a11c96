"""The models of published tables: decoder or encoder blocks between an embedding and a head, to be captured on meta.

One block is enough: depth is folded. What tells one family from another is data (`Shape`): gated or plain MLP, grouped
keys, norms with or without bias, attention as one kernel or written out with its softmax, dropout where it was on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
DROPOUT = 0.1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One block with an embedding and a head, and the micro-batch that goes through it."""

    hidden: int
    heads: int
    kv_heads: int
    width: int
    """Of a head."""
    ffn: int
    vocab: int
    tokens: int
    """Of a sequence on one rank of a split sequence."""
    batch: int
    gated: bool
    """A gated MLP and rotary positions; else learned positions."""
    biases: bool
    causal: bool
    fused_attention: bool
    dropout: bool
    wide_loss: bool
    """Logits go to float32 for the loss; else one kernel reads them as they are."""
    dtype: str


def norm(s: Shape) -> nn.LayerNorm:
    """A layer norm, also for RMS norms: one kernel that reads and writes as much."""
    return nn.LayerNorm(s.hidden, bias=s.biases)


class Core(nn.Module):
    """Attention without its projections, a module of its own so that it can be recomputed by itself."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = self.s
        if s.fused_attention:
            return F.scaled_dot_product_attention(q, k, v, is_causal=s.causal, enable_gqa=s.kv_heads != s.heads)
        k, v = (t.repeat_interleave(s.heads // s.kv_heads, dim=1) if s.kv_heads != s.heads else t for t in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        return torch.matmul(dropped(torch.softmax(scores, dim=-1), s), v)


class Attention(nn.Module):
    """Self-attention; one packed projection, or one for queries and one for fewer keys and values."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s, self.width = s, s.width
        bias = s.biases
        self.packed = s.kv_heads == s.heads
        if self.packed:
            self.qkv = nn.Linear(s.hidden, 3 * s.heads * self.width, bias=bias)
        else:
            self.q = nn.Linear(s.hidden, s.heads * self.width, bias=bias)
            self.kv = nn.Linear(s.hidden, 2 * s.kv_heads * self.width, bias=bias)
        self.core = Core(s)
        self.out = nn.Linear(s.heads * self.width, s.hidden, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, (b, t, _) = self.s, x.shape
        size = s.kv_heads * self.width
        parts = self.qkv(x).split(size, dim=-1) if self.packed else (self.q(x), *self.kv(x).split(size, dim=-1))
        q, k, v = (part.view(b, t, -1, self.width).transpose(1, 2) for part in parts)
        if s.gated:
            q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = self.core(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, t, s.heads * self.width))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def dropped(x: Tensor, s: Shape) -> Tensor:
    """Dropout, where the stack trains with it."""
    return F.dropout(x, DROPOUT) if s.dropout else x


class MLP(nn.Module):
    """Gated or plain."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.up = nn.Linear(s.hidden, (2 if s.gated else 1) * s.ffn, bias=s.biases)
        self.down = nn.Linear(s.ffn, s.hidden, bias=s.biases)

    def forward(self, x: Tensor) -> Tensor:
        if self.s.gated:
            gate, up = self.up(x).split(self.s.ffn, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Norm, attention, norm, MLP, each added to what came in."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.norm1, self.norm2 = norm(s), norm(s)
        self.attention, self.mlp = Attention(s), MLP(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + dropped(self.attention(self.norm1(x), cos, sin), self.s)
        return x + dropped(self.mlp(self.norm2(x)), self.s)


class Model(nn.Module):
    """Token ids to logits, with one block."""

    cos: Tensor
    sin: Tensor

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embed = nn.Embedding(s.vocab, s.hidden)
        self.position = None if s.gated else nn.Embedding(s.tokens, s.hidden)
        self.block = Block(s)
        self.norm = norm(s)
        self.head = nn.Linear(s.hidden, s.vocab, bias=False)
        table = torch.ones(s.tokens, s.width)
        self.register_buffer("cos", table, persistent=False)
        self.register_buffer("sin", table.clone(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.position is not None:
            x = dropped(x + self.position(torch.arange(ids.shape[1], device=ids.device)), self.s)
        return self.head(self.norm(self.block(x, self.cos, self.sin)))


def loss(model: Model, batch: dict[str, Tensor]) -> Tensor:
    """Of every token, the mean."""
    logits = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits.float() if model.s.wide_loss else logits, batch["target"].flatten())


def on_meta(s: Shape) -> tuple[Model, dict[str, Tensor]]:
    """The model and a batch, without memory."""
    with torch.device("meta"):
        ids = torch.zeros((s.batch, s.tokens), dtype=torch.long)
        return Model(s).to(DTYPES[s.dtype]), {"ids": ids, "target": ids.clone()}

"""T5: an encoder and a decoder that attend by plain matmul and softmax, with relative positions.

A position here is a distance. Distances fall into buckets, fine near by and coarse far away, and an
embedding turns each bucket into one bias per head that is added to the scores. The table is looked
up with a (query, key) grid of indices that no input decides, shared by all layers of a stack, so
its gradient gathers from every one of them. Scores are not scaled: the initial weights make up for
it. A source has 12 tokens and a target 10, so that a split over 4 or 8 ranks leaves uneven parts.
"""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laminar import Recipe

START = 0
"""The token that a decoder reads before it has written any."""


class Norm(nn.Module):
    """RMS norm without a bias, as T5's layer norm is."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class RelativeBias(nn.Module):
    """One learned number for each head and each bucket of (key position - query position)."""

    def __init__(self, heads: int, *, buckets: int, furthest: int, both_ways: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        self.buckets, self.furthest, self.both_ways = buckets, furthest, both_ways

    def bucket(self, distance: Tensor) -> Tensor:
        """Half of the buckets hold one distance each, the other half grow in size up to `furthest`.

        In both directions, one sign takes the lower buckets and the other the upper ones; otherwise
        whatever lies ahead shares bucket 0.
        """
        buckets = self.buckets
        offset = torch.zeros_like(distance)
        if self.both_ways:
            buckets //= 2
            offset = (distance > 0).long() * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        growth = torch.log(distance.clamp(min=1) / exact) / math.log(self.furthest / exact)
        coarse = exact + (growth * (buckets - exact)).long()
        return offset + torch.where(distance < exact, distance, coarse.clamp(max=buckets - 1))

    def forward(self, tokens: int) -> Tensor:
        at = torch.arange(tokens, device=self.table.weight.device)
        grid = self.bucket(at[None, :] - at[:, None])
        return self.table(grid).permute(2, 0, 1)


class Attention(nn.Module):
    """Queries from `x`, keys and values from `memory`; `bias` is added to the scores."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(d, d, bias=False)
        self.k = nn.Linear(d, d, bias=False)
        self.v = nn.Linear(d, d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        nn.init.normal_(self.q.weight, std=d**-0.5 * (d // heads) ** -0.5)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))
        scores = torch.matmul(q, k.transpose(2, 3))
        if bias is not None:
            scores = scores + bias
        y = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    """Self-attention, attention to the encoder if this is a decoder, and an MLP; all pre-norm."""

    def __init__(self, d: int, heads: int, hidden: int, *, decoder: bool) -> None:
        super().__init__()
        self.norm1 = Norm(d)
        self.attention = Attention(d, heads)
        if decoder:
            self.norm2 = Norm(d)
            self.cross = Attention(d, heads)
        self.norm3 = Norm(d)
        self.up = nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, bias)
        if memory is not None:
            x = x + self.cross(self.norm2(x), memory)
        return x + self.down(F.relu(self.up(self.norm3(x))))


class T5(nn.Module):
    """Source ids (batch, s) and target ids (batch, t) to logits (batch, t, vocab)."""

    def __init__(self, *, layers: int, d: int, heads: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.encoder_bias = RelativeBias(heads, buckets=8, furthest=16, both_ways=True)
        self.encoder = nn.ModuleList(Layer(d, heads, hidden, decoder=False) for _ in range(layers))
        self.encoder_norm = Norm(d)
        self.decoder_bias = RelativeBias(heads, buckets=8, furthest=16, both_ways=False)
        self.decoder = nn.ModuleList(Layer(d, heads, hidden, decoder=True) for _ in range(layers))
        self.decoder_norm = Norm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.embed(source)
        bias = self.encoder_bias(source.shape[1])
        for layer in self.encoder:
            x = layer(x, bias)
        memory = self.encoder_norm(x)

        y = self.embed(target)
        t = target.shape[1]
        future = torch.ones(t, t, dtype=torch.bool, device=target.device).triu(1)
        bias = self.decoder_bias(t).masked_fill(future, float("-inf"))
        for layer in self.decoder:
            y = layer(y, bias, memory)
        return self.head(self.decoder_norm(y))


def continuations(batch: int, source: int, target: int, vocab: int) -> Iterator[dict[str, Tensor]]:
    """The source counts up by a step of its own and the target goes on where it ends, without end."""
    rng = torch.Generator().manual_seed(1)
    words = vocab - 1
    while True:
        start = torch.randint(words, (batch, 1), generator=rng)
        step = torch.randint(1, 4, (batch, 1), generator=rng)
        ids = START + 1 + (start + step * torch.arange(source + target)) % words
        label = ids[:, source:].contiguous()
        yield {
            "source": ids[:, :source].contiguous(),
            "target": F.pad(label[:, :-1], (1, 0), value=START),
            "label": label,
        }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["source"], batch["target"])
    return F.cross_entropy(logits.flatten(0, 1), batch["label"].flatten())


def tiny() -> Recipe:
    def model() -> T5:
        torch.manual_seed(0)
        return T5(layers=2, d=32, heads=4, hidden=80, vocab=50)

    def data() -> Iterator[dict[str, Tensor]]:
        return continuations(batch=8, source=12, target=10, vocab=50)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=3e-3)

    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=50)

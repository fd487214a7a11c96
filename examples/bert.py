"""BERT: a post-norm encoder with dropout, trained to fill in what is masked in padded sentences.

Two things make its numbers hard to keep when it is spread. Dropout draws a random number for every
element, and a rank must draw the one that belongs to its element. The loss is a mean over the
masked words only, and since sentences differ in length, so does the number of those words from rank
to rank: a mean of means is not the mean.

`tiny` has made-up words of several topics and asks for the mean as PyTorch computes it; `small` reads
the text of the standard library and hands back a total and a weight, which stays right however the
batch is cut into ranks and micro-batches.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from data import IGNORE, MASK, MASKED_VOCAB, PAD, masked
from torch import Tensor, nn

from laminar import Loss, Recipe

FIRST_WORD = 2
"""The ids before it are those of padding and of the mask."""


class Attention(nn.Module):
    """Self-attention that sees words and skips padding, with dropout on the weights."""

    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d, d)
        self.key = nn.Linear(d, d)
        self.value = nn.Linear(d, d)
        self.out = nn.Linear(d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, is_word: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            proj(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for proj in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        scores = scores.masked_fill(~is_word[:, None, None, :], float("-inf"))
        y = self.dropout(scores.softmax(dim=-1)) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    """Attention, then an MLP; the norm comes after each sum."""

    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(d, heads, dropout)
        self.norm1 = nn.LayerNorm(d, eps=1e-12)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)
        self.norm2 = nn.LayerNorm(d, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, is_word: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, is_word)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class BERT(nn.Module):
    """Ids, segments and a word mask, all (batch, tokens), to logits (batch, tokens, vocab)."""

    def __init__(self, *, layers: int, d: int, heads: int, vocab: int, tokens: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, d, padding_idx=PAD)
        self.segments = nn.Embedding(2, d)
        self.positions = nn.Embedding(tokens, d)
        self.norm = nn.LayerNorm(d, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(d, heads, dropout) for _ in range(layers))
        self.transform = nn.Linear(d, d)
        self.transform_norm = nn.LayerNorm(d, eps=1e-12)
        self.head = nn.Linear(d, vocab)

    def forward(self, ids: Tensor, segments: Tensor, is_word: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.words(ids) + self.segments(segments) + self.positions(positions)
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, is_word)
        return self.head(self.transform_norm(F.gelu(self.transform(x))))


def sentences(batch: int, tokens: int, topics: int, words: int) -> Iterator[dict[str, Tensor]]:
    """Padded sentences with a quarter of the words masked, without end.

    A sentence keeps to one topic and a topic has `words` words of its own, so the words that are left
    narrow down the masked ones. The first word is never masked and the second always is, so that no
    batch is without a question.
    """
    rng = torch.Generator().manual_seed(1)
    place = torch.arange(tokens)
    while True:
        length = torch.randint(4, tokens + 1, (batch, 1), generator=rng)
        topic = torch.randint(topics, (batch, 1), generator=rng)
        is_word = place < length
        word = (words * torch.rand(batch, tokens, generator=rng) ** 3).long()  # few words are frequent
        text = FIRST_WORD + words * topic + word
        asked = (torch.rand(batch, tokens, generator=rng) < 0.25) & is_word & (place > 0) | (place == 1)
        yield {
            "ids": text.masked_fill(asked, MASK).where(is_word, PAD),
            "segments": (place >= length // 2).long(),
            "is_word": is_word,
            "label": text.where(asked, IGNORE),
        }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"], batch["segments"], batch["is_word"])
    return F.cross_entropy(logits.flatten(0, 1), batch["label"].flatten(), ignore_index=IGNORE)


def counted_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """The same as a total and the number of words it is a total of: a batch in parts adds up to the whole."""
    logits = model(batch["ids"], batch["segments"], batch["is_word"])
    label = batch["label"].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), label, ignore_index=IGNORE, reduction="sum")
    return Loss(total, (label != IGNORE).sum())


def tiny() -> Recipe:
    def model() -> BERT:
        torch.manual_seed(0)
        return BERT(layers=2, d=32, heads=4, vocab=52, tokens=14)

    def data() -> Iterator[dict[str, Tensor]]:
        return sentences(batch=8, tokens=14, topics=5, words=10)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=5e-3, weight_decay=0.01)

    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=50)


def small() -> Recipe:
    """120k parameters: masked characters of the text of the standard library.

    For some hundred steps it guesses by frequency alone (3.1 nats); then it finds out which characters
    are the neighbours, and the loss falls.
    """

    def model() -> BERT:
        torch.manual_seed(0)
        return BERT(layers=2, d=64, heads=8, vocab=MASKED_VOCAB, tokens=32)

    def data() -> Iterator[dict[str, Tensor]]:
        return masked(batch=64, tokens=32)

    def evaluate() -> Iterable[dict[str, Tensor]]:
        return islice(masked(batch=64, tokens=32, held_out=True), 20)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01)

    return Recipe(model=model, loss=counted_loss, data=data, optimizer=optimizer, steps=1000, evaluate=evaluate)

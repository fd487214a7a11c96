"""A recurrent language model: embedding, two LSTM layers, a head.

Here time is a chain and nothing can split it: step t waits for step t-1. What remains is the batch,
the gates, and the layers. The LSTM's weights hold its four gates in one tensor, one below the
other, so a split that keeps each gate's units together is again the inner one.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laminar import Recipe


class LanguageModel(nn.Module):
    """Token ids (batch, tokens) to logits (batch, tokens, vocab)."""

    def __init__(self, *, vocab: int, d: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.lstm = nn.LSTM(d, hidden, num_layers=layers, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(ids))
        return self.head(states)


def sums(batch: int, tokens: int, vocab: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each target is the sum of the two newest tokens, modulo the vocabulary, without end."""
    rng = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(vocab, (batch, tokens), generator=rng)
        yield ids, (ids + F.pad(ids[:, :-1], (1, 0))) % vocab


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, target = batch
    return F.cross_entropy(model(ids).transpose(1, 2), target)


def tiny() -> Recipe:
    def model() -> LanguageModel:
        torch.manual_seed(0)
        return LanguageModel(vocab=11, d=24, hidden=32, layers=2)

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        return sums(batch=8, tokens=12, vocab=11)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(params, lr=3e-3)

    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=50)

"""The smallest network worth spreading: three linear layers that sort points into classes.

Start here to see what a recipe looks like. The module is plain PyTorch and knows nothing of
laminar; `tiny` names its five parts. Widths are chosen so that not every split is even: 48 goes
into 2, 4 and 8 parts, 36 into 2 and 4, and the 7 classes into none of these.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laminar import Recipe


class MLP(nn.Module):
    """Linear layers with a GELU between each two of them."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


def points(batch: int, features: int, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy points around one random centre per class, without end."""
    rng = torch.Generator().manual_seed(1)
    centres = torch.randn(classes, features, generator=rng)
    while True:
        label = torch.randint(classes, (batch,), generator=rng)
        yield centres[label] + torch.randn(batch, features, generator=rng), label


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, label = batch
    return F.cross_entropy(model(x), label)


def tiny() -> Recipe:
    def model() -> MLP:
        torch.manual_seed(0)
        return MLP([20, 48, 36, 7])

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        return points(batch=16, features=20, classes=7)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=50)

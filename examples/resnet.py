"""A residual network for small images: convolutions, batch norm, and shortcuts that add.

Batch norm is what makes this one interesting to spread. Its mean and variance run over the whole
batch, so ranks that hold a part of the batch have to share them to agree with one device, and its
running statistics are buffers that change in the forward pass. The last stage has 20 channels,
which 8 does not divide.

`tiny` tells apart a few fixed pictures under noise; `small` has to see which way stripes run.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from data import gratings
from torch import Tensor, nn

from laminar import Recipe


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where shapes differ."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem that halves the image, one stage of blocks per width, a pooled linear head."""

    def __init__(self, widths: list[int], blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        inner = widths[0]
        for i, outer in enumerate(widths):
            for j in range(blocks):
                stages.append(Block(inner, outer, stride=2 if i > 0 and j == 0 else 1))
                inner = outer
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inner, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.pool(self.stages(self.stem(image))).flatten(1))


def images(batch: int, size: int, classes: int) -> Iterator[dict[str, Tensor]]:
    """One random picture per class, seen through noise, without end."""
    rng = torch.Generator().manual_seed(1)
    pictures = torch.randn(classes, 3, size, size, generator=rng)
    while True:
        label = torch.randint(classes, (batch,), generator=rng)
        noise = torch.randn(batch, 3, size, size, generator=rng)
        yield {"image": pictures[label] + noise, "label": label}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"])


def recipe(widths: list[int], blocks: int, batch: int, size: int, steps: int, striped: bool = False) -> Recipe:
    """Train on fixed pictures, or on gratings if so asked."""

    def model() -> ResNet:
        torch.manual_seed(0)
        return ResNet(widths=widths, blocks=blocks, classes=10)

    def data() -> Iterator[dict[str, Tensor]]:
        return (gratings if striped else images)(batch=batch, size=size, classes=10)

    def evaluate() -> Iterable[dict[str, Tensor]]:
        return islice(gratings(batch=batch, size=size, classes=10, seed=2), 10)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4)

    held_out = evaluate if striped else None
    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=steps, evaluate=held_out)


def tiny() -> Recipe:
    return recipe([8, 16, 20], blocks=1, batch=16, size=16, steps=30)


def small() -> Recipe:
    """2.8M parameters on pictures of 32 by 32."""
    return recipe([32, 64, 128, 256], blocks=2, batch=32, size=32, steps=200, striped=True)

"""ViT: an image cut into patches by a convolution, and a class token that reads them all.

The class token makes the sequence odd: 16 patches and one more are 17 tokens, a prime. Whoever
splits the sequence has to live with parts that differ in size.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laminar import Recipe


class Attention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv(x).reshape(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d)
        self.attention = Attention(d, heads)
        self.norm2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Images (batch, 3, size, size) to logits (batch, classes)."""

    def __init__(self, *, size: int, patch: int, layers: int, d: int, heads: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, d, patch, stride=patch)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, d))
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, d))
        self.blocks = nn.Sequential(*(Block(d, heads, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def images(batch: int, size: int, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One random picture per class, seen through noise, without end."""
    rng = torch.Generator().manual_seed(1)
    pictures = torch.randn(classes, 3, size, size, generator=rng)
    while True:
        label = torch.randint(classes, (batch,), generator=rng)
        yield pictures[label] + torch.randn(batch, 3, size, size, generator=rng), label


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    image, label = batch
    return F.cross_entropy(model(image), label, label_smoothing=0.1)


def tiny() -> Recipe:
    def model() -> ViT:
        torch.manual_seed(0)
        return ViT(size=16, patch=4, layers=2, d=32, heads=4, hidden=72, classes=10)

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        return images(batch=8, size=16, classes=10)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=1e-3)

    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=50)

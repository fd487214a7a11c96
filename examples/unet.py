"""U-Net: down to a coarse picture, up again to a fine one, with a bridge at every size.

The bridges are concatenations of channels, so what an early layer made must still be there when the
last one runs: this is the model that keeps memory busy longest, and the one in which a pipeline has
to carry tensors past several stages. Group norm needs its channels in whole groups. It goes up once
by a transposed convolution and once by repeating pixels, since both are in use.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laminar import Recipe


class Convs(nn.Sequential):
    """Two 3x3 convolutions, each with group norm and SiLU."""

    def __init__(self, inner: int, outer: int, groups: int = 4) -> None:
        layers: list[nn.Module] = []
        for channels in (inner, outer):
            layers += [nn.Conv2d(channels, outer, 3, padding=1), nn.GroupNorm(groups, outer), nn.SiLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Images (batch, 1, size, size) to logits (batch, classes, size, size); 4 divides the size."""

    def __init__(self, *, width: int, classes: int) -> None:
        super().__init__()
        self.enter = Convs(1, width)
        self.down1 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle1 = Convs(2 * width, 2 * width)
        self.down2 = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.bottom = Convs(4 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.middle2 = Convs(4 * width, 2 * width)
        self.up1 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.leave = Convs(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.enter(image)
        middle = self.middle1(self.down1(fine))
        x = self.bottom(self.down2(middle))
        x = self.middle2(torch.cat([self.up2(x), middle], dim=1))
        x = self.up1(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.head(self.leave(torch.cat([x, fine], dim=1)))


def bands(batch: int, size: int) -> Iterator[dict[str, Tensor]]:
    """Noisy pictures of a bright band with a dark edge; each pixel is to be named, without end."""
    rng = torch.Generator().manual_seed(1)
    row = torch.arange(size).view(1, size, 1).expand(batch, size, size)
    while True:
        top = torch.randint(1, size // 2, (batch, 1, 1), generator=rng)
        label = (row >= top).long() + (row >= top + 4).long()
        shade = torch.tensor([0.0, 1.0, -1.0])[label]
        noise = 0.3 * torch.randn(batch, size, size, generator=rng)
        yield {"image": (shade + noise).unsqueeze(1), "label": label}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"])


def tiny() -> Recipe:
    def model() -> UNet:
        torch.manual_seed(0)
        return UNet(width=8, classes=3)

    def data() -> Iterator[dict[str, Tensor]]:
        return bands(batch=8, size=12)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=2e-3)

    return Recipe(model=model, loss=loss, data=data, optimizer=optimizer, steps=30)

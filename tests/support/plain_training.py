"""Training in plain PyTorch, and how far apart two trainings are."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

import laminar
from laminar.capture.canonical.canonical import Canonical
from tests.support.zoo import recipe

STEPS = 20
FLOAT = Tensor.float
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, eps=1e-6),
}
"""AdamW divides by the size of the gradient, so it blows up the rounding noise of one that is zero by nature (of the
bias of keys, which softmax ignores) to full steps unless eps is above that noise."""


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A batch with its floating leaves in another precision."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: cast(v, dtype) for k, v in value.items()}
    return type(value)(cast(v, dtype) for v in value) if isinstance(value, (list, tuple)) else value


def material(name: str, dtype: torch.dtype, steps: int = STEPS) -> tuple[nn.Module, Any, list[Any]]:
    """A model, its loss and its batches."""
    made = recipe(name)
    batches = [cast(b, dtype) for b in itertools.islice(made.data(), steps)]
    return made.model().to(dtype), made.loss, batches


def plain(model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer, batches: list[Any], seed: int) -> list[float]:
    """The ordinary loop."""
    losses = []
    for i, batch in enumerate(batches):
        with Canonical(torch.tensor([seed, i])):
            value = loss(model, batch)
        value = value.total / value.weight if isinstance(value, laminar.Loss) else value
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of any weight, relative to the largest of its tensor, and whose.

    Weights here are of order one. A bias of keys, which starts at zero and has a gradient of noise, is measured by
    a tenth of that instead of by its own size.
    """
    worst = (0.0, "")
    for name, w in want.items():
        if w.is_floating_point() and w.numel():
            scale = max(float(w.abs().max()), 0.1)
            worst = max(worst, (float((got[name] - w).abs().max()) / scale, name))
    return worst

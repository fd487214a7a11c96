"""Lazy layers know their shapes after the model has run once: it runs once, on the example batch.

As in plain PyTorch the first forward draws their weights, from torch's generator as it stands. But it is no step: what
it does to buffers (statistics of norms, counters) is undone, those of lazy layers included, so that the first real step
finds them as the first step in plain PyTorch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from laminar.capture.model.batches import flatten, unflatten
from laminar.errors import CaptureError


def initialise(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any) -> None:
    """Give lazy layers their shapes and weights; a model without any is left alone."""
    if not _lazy(model):
        return
    tensors, tree = flatten(batch)
    known = [t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)]
    if any(t.is_meta for t in (*known, *tensors.values())):
        raise CaptureError(
            f"{_lazy(model)[0]} is not initialised yet, and a model on meta can't be run to find its shape",
            next="make the model with real weights, or give its layers their sizes",
        )
    device = next((t.device for t in known), torch.device("cpu"))
    kept = [(b, b.detach().clone()) for b in model.buffers() if not is_lazy(b)]
    watched = [m for m in model.modules() if isinstance(m, nn.modules.lazy.LazyModuleMixin)]
    for module in watched:
        module.__dict__["initialize_parameters"] = _noting(module, kept)
    try:
        loss(model, unflatten(tree, {k: t.to(device) for k, t in tensors.items()}))
    finally:
        for module in watched:
            module.__dict__.pop("initialize_parameters", None)
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
    if _lazy(model):
        raise CaptureError(
            f"{_lazy(model)[0]} is not initialised even after the model has run once",
            next="make the layer where its size is known, or leave it out",
        )


def _lazy(model: nn.Module) -> list[str]:
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, t in named if is_lazy(t)]


def _noting(module: Any, kept: list[tuple[Tensor, Tensor]]) -> Callable[..., None]:
    """A layer's own initialisation, after which its buffers are as they should be found."""
    own = module.initialize_parameters

    def run(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        kept.extend((b, b.detach().clone()) for b in module.buffers(recurse=False))

    return run

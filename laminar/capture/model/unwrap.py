"""Models that came wrapped for another way to train: the model inside is what is captured.

Data parallel wrappers of torch (and what Accelerate's `prepare` makes with them) and compiled modules hold the user's
model whole, so it is taken out. A model whose weights another library keeps in shards is not whole any more, and is
refused by name.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from laminar.capture.torch_private import compiled_inside, is_distributed_tensor, is_fully_sharded
from laminar.errors import CaptureError

UNWRAP_IT = 'hand over the model as it is before it is wrapped: plan="zero3" keeps it in shards'


def unwrapped(model: Any) -> Any:
    """The user's own model, whichever wrappers are around it."""
    while isinstance(model, nn.Module):
        inside = _inside(model)
        if inside is None:
            break
        model = inside
    if isinstance(model, nn.Module):
        _refuse_sharded(model)
    return model


def _inside(model: nn.Module) -> Any:
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        return model.module
    return compiled_inside(model)


def _refuse_sharded(model: nn.Module) -> None:
    for path, module in model.named_modules():
        name = f"{path} of the model" if path else "the model"
        kind = type(module).__name__
        if is_fully_sharded(module) or kind in ("DeepSpeedEngine", "PipelineEngine"):
            raise CaptureError(f"{name} is wrapped in {kind}, which keeps its weights in shards", next=UNWRAP_IT)
        if path and isinstance(module, (DataParallel, DistributedDataParallel)):
            raise CaptureError(
                f"{name} is wrapped in {kind}, inside of a model that is not", next="put the module itself in its place"
            )
        for key, p in module._parameters.items():
            if p is not None and is_distributed_tensor(p):
                raise CaptureError(f"parameter {path + '.' if path else ''}{key} is a DTensor", next=UNWRAP_IT)

"""Whose mistake it is when a step can't be traced: the user's own errors reach the user as themselves.

Tracing runs the user's code on tensors that hold nothing, so what it raises may be its own doing. Plain PyTorch
decides: the step runs once on the real model and batch, and what that raises is the user's, with its type, its words
and its line, and a note that says where. Only if it runs is tracing to blame. Where it can't be run (a model on meta,
or one of which this process holds a piece), an error that a line of the user's raised itself counts as the user's.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.model.model_tensors import Slot, swapped
from laminar.capture.tracing.origins import blame, is_users
from laminar.capture.tracing.python_random import Draws
from laminar.errors import CaptureError

_FAKE = os.path.join("torch", "_subclasses", "fake_tensor.py")


def whose(
    error: Exception,
    model: nn.Module,
    step: Callable[[], Any],
    slots: list[Slot],
    leaves: dict[str, Tensor],
    set_leaves: Callable[[list[Tensor]], None],
    module: str,
) -> Exception:
    """What to raise for an error that ended tracing."""
    what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if any(s.tensor is not s.own or s.tensor.is_meta for s in slots) or any(t.is_meta for t in leaves.values()):
        frames = traceback.extract_tb(error.__traceback__)
        if is_users(frames[-1].filename):
            return _noted(error, module)
        return CaptureError(
            f"the model could not be traced: {what}",
            at=blame(error),
            module=module,
            next="run the model once in plain PyTorch with this batch; if that works, this op needs a report",
        )
    raised = in_plain_pytorch(model, step, slots, leaves, set_leaves)
    if raised is not None:
        return _noted(raised, module)
    if _in_a_shape_function(error):
        return CaptureError(
            f"an op's shape function refuses what its kernel takes: {what}",
            at=blame(error),
            module=module,
            next="put it into a module or function of its own, marked with laminar.eager: such a part runs as it is",
        )
    return CaptureError(
        f"the model could not be traced: {what}",
        at=blame(error),
        module=module,
        next="it runs in plain PyTorch, so this op needs a report; meanwhile keep this part out of the model",
    )


def _in_a_shape_function(error: Exception) -> bool:
    """Whether it was raised by what says which shapes an op gives (torch's own, or `register_fake`), beneath the op."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    asked = [i for i, f in enumerate(frames) if f.f_code.co_filename.endswith(_FAKE)]
    return bool(asked) and asked[-1] < len(frames) - 1


def in_plain_pytorch(
    model: nn.Module,
    step: Callable[[], Any],
    slots: list[Slot],
    leaves: dict[str, Tensor],
    set_leaves: Callable[[list[Tensor]], None],
) -> Exception | None:
    """What the step raises on real tensors; buffers, attributes and generators stay as they were."""
    device = next((s.tensor.device for s in slots), torch.device("cpu"))
    set_leaves([t.to(device) for t in leaves.values()])
    for slot in slots:
        slot.fake = slot.own if slot.kind == "param" else slot.own.detach().clone()
    cuda = [device] if device.type == "cuda" else []
    try:
        with swapped(model, slots), torch.random.fork_rng(devices=cuda), Draws(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, root, _ = step()
            trained = [s.own for s in slots if s.trainable]
            if torch.is_grad_enabled() and isinstance(root, Tensor) and root.requires_grad and root.dim() == 0:
                torch.autograd.grad(root, trained, allow_unused=True)
    except Exception as error:
        return error
    return None


def _noted(error: Exception, module: str) -> Exception:
    where = blame(error)
    lines = ["raised by the model or its loss, not by Laminar: plain PyTorch raises it as well", f"at      {where}"]
    error.add_note("\n  ".join([*lines[: 2 if where else 1], *([f"module  {module}"] if module else [])]))
    return error

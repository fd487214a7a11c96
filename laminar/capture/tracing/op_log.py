"""What forward calls, op by op: the evidence on which a predicted graph is believed (`batch_sizes.py`).

An entry has the op, the shapes, layouts and dtypes of its tensors, and every other argument; tensors that
hold values while tracing (constants of the user's) are written down by a digest of these values.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from laminar.capture.tensor_bytes import as_bytes
from laminar.capture.torch_private import FakeTensor, disable_current_modes

OURS = "GeneratedBackwardFor_laminar"
"""How torch calls the autograd functions of our own ops."""


def call_as_json(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """One call as JSON."""
    return [str(func), _plain(args), [[k, _plain(v)] for k, v in kwargs.items()] if kwargs else []]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        told = [str(value.dtype), list(value.shape), _layout(value), value.requires_grad]
        return told if isinstance(value, FakeTensor) else [*told, _digest(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value)


def _layout(value: Tensor) -> list[Any]:
    """How a tensor lies in memory, without numbers that grow with the square of a size."""
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda d: -strides[d])
    return [order, [s == 0 for s in strides], value.is_contiguous()]


def _digest(value: Tensor) -> str:
    with disable_current_modes():
        return hashlib.sha256(as_bytes(value.cpu()).numpy().tobytes()).hexdigest() if value.numel() else ""


def hidden_backward(root: Tensor) -> bool:
    """Whether somebody's Python code runs in backward, which forward's ops say nothing about."""
    seen: set[Any] = set()
    todo: list[Any] = [root.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not type(node).__name__.startswith(OURS):
            return True
        todo += [n for n, _ in node.next_functions]
    return False

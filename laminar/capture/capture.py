"""`capture`: an ordinary PyTorch model, its loss and a batch, as one logical graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.convert import convert
from laminar.capture.simplify import simplify
from laminar.capture.slots import slots_of
from laminar.capture.torch_ops import spec_of
from laminar.capture.trace import trace
from laminar.errors import BatchError, CaptureError
from laminar.ir.graph import Graph


@dataclass(frozen=True)
class Loss:
    """A loss as a total and a weight: both are summed over everything, then divided once."""

    total: Tensor
    weight: Tensor


def flatten(batch: Any) -> tuple[dict[str, Tensor], Any]:
    """Leaves of a nested batch by name (`batch.x`, `batch.0.mask`), and its structure with names for leaves."""
    leaves: dict[str, Tensor] = {}

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            leaves[name] = value
            return {"leaf": name}
        if isinstance(value, dict):
            return {"dict": [[k, walk(v, f"{name}.{k}")] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [walk(v, f"{name}.{i}") for i, v in enumerate(value)]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        raise BatchError(f"{name} is a {type(value).__name__}", allowed="tensors in nested dicts, lists and tuples")

    return leaves, walk(batch, "batch")


def unflatten(tree: Any, leaves: dict[str, Any]) -> Any:
    """A batch of the captured structure around new leaves."""
    ((kind, value),) = tree.items()
    if kind == "leaf":
        return leaves[value]
    if kind == "dict":
        return {k: unflatten(v, leaves) for k, v in value}
    if kind in ("list", "tuple"):
        items = [unflatten(v, leaves) for v in value]
        return items if kind == "list" else tuple(items)
    return value


def check_batch(graph: Graph, batch: Any) -> dict[str, Tensor]:
    """The leaves of a batch that must look like the captured one, or an error that says how it differs."""
    leaves, tree = flatten(batch)
    want = {i.name: i.spec for i in graph.of_kind("batch")}
    if json.dumps(tree) != graph.batch_tree:
        extra, missing = sorted(set(leaves) - set(want)), sorted(set(want) - set(leaves))
        raise BatchError(
            "the batch has another structure than the captured one",
            missing=", ".join(missing),
            unexpected=", ".join(extra),
            next="capture again with such a batch",
        )
    for name, spec in want.items():
        if spec_of(leaves[name]) != spec:
            raise BatchError(
                f"{name} is {spec_of(leaves[name])}, captured as {spec}", next="capture again with such a batch"
            )
    return leaves


def capture(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> Graph:
    """Forward, loss and backward of one step as a graph. The model may live on any device, "meta" included."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model is a {type(model).__name__}, not an nn.Module")
    leaves, tree = flatten(batch)
    slots = slots_of(model)
    given: dict[str, Any] = {}

    def set_leaves(fakes: list[Tensor]) -> None:
        given.update(zip(leaves, fakes, strict=True))

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        result = loss(model, unflatten(tree, given))
        if isinstance(result, Loss):
            weight = result.weight if isinstance(result.weight, Tensor) else torch.tensor(float(result.weight))
            return result.total / weight, {"loss_total": result.total, "loss_weight": weight}
        return result, {}

    traced = trace(model, step, slots, leaves, set_leaves)
    return simplify(convert(traced, leaves, json.dumps(tree)))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and tensor attributes of a model under their names in a graph."""
    return {slot.name: slot.tensor for slot in slots_of(model)}

"""`capture`: an ordinary PyTorch model, its loss and a batch, as one logical graph."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.eager.eager_search import runs_as_it_is, traced, with_reasons
from laminar.capture.graph.batch_sizes import Predictor, Sample, as_json
from laminar.capture.graph.convert import convert
from laminar.capture.graph.simplify import simplify
from laminar.capture.model.batches import flatten, refuse_empty, unflatten
from laminar.capture.model.lazy_layers import initialise
from laminar.capture.model.losses import read_loss
from laminar.capture.model.model_tensors import slots_of
from laminar.capture.model.unwrap import unwrapped
from laminar.capture.ops.torch_ops import spec_of
from laminar.capture.tracing.trace import trace
from laminar.errors import BatchError, CaptureError
from laminar.ir.graph import SCALE, Graph


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


def capture(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    batch: Any,
    *,
    whole: Mapping[str, Tensor] | None = None,
    scaled: bool = False,
    backward: bool = True,
    wide: bool = False,
    predictor: Predictor | None = None,
) -> Graph:
    """Forward, loss and backward of one step as a graph. The model may live on any device, "meta" included.

    `whole` gives the tensors to take for some of the model's (those of which this process holds only a
    piece). `scaled` adds an input `scale`: gradients are those of the loss, or of a `Loss`'s total, times
    it. Without `backward` there are no gradients. `wide` gives gradients of half-precision parameters in
    float32, so that they are summed so. `predictor` knows graphs of other sizes of such a batch, and learns
    this one: what follows from them is not traced again.
    """
    model = unwrapped(model)
    leaves, tree = flatten(batch)
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model is a {type(model).__name__}, not an nn.Module")
    refuse_empty(leaves)
    initialise(model, loss, batch)
    given: dict[str, Any] = {}
    slots = slots_of(model)
    for slot in slots:
        stand_in = (whole or {}).get(slot.name)
        if stand_in is not None:
            slot.tensor = stand_in.requires_grad_(slot.tensor.requires_grad)
    if scaled:
        leaves = {**leaves, SCALE: torch.ones((), dtype=torch.float64)}

    def set_leaves(fakes: list[Tensor]) -> None:
        given.update(zip(leaves, fakes, strict=True))

    def step() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        value, total, metrics = read_loss(loss(model, unflatten(tree, given)))
        scales = scaled and isinstance(total, Tensor)
        return value, total * given[SCALE].to(total.dtype) if scales else value, metrics

    def forward() -> list[Any] | None:
        try:
            ops = trace(model, step, slots, leaves, set_leaves, backward, wide, dry=True).ops
        except Exception:  # whatever it is, tracing finds it again and says it well
            return None
        return ops if ops is None else as_json(ops)

    sizes = tuple(n for leaf in leaves.values() for n in leaf.shape)
    graph = predictor.predict(sizes, forward) if predictor is not None else None
    if graph is None:
        began = time.perf_counter()
        found, lines = traced(model, slots, lambda: trace(model, step, slots, leaves, set_leaves, backward, wide))
        graph = with_reasons(convert(found, leaves, json.dumps(tree)), lines)
        if predictor is not None:
            predictor.traced += 1
            predictor.traced_s += time.perf_counter() - began
            _learn(predictor, sizes, graph, found.ops)
    return simplify(graph)


def _learn(predictor: Predictor, sizes: tuple[int, ...], graph: Graph, ops: list[Any] | None) -> None:
    """Keep a traced graph as an example from which those of other sizes may follow."""
    if ops is not None and not runs_as_it_is(graph):
        plain = {k: v for k, v in graph.to_json().items() if k != "hash"}
        predictor.add(Sample(sizes, as_json(plain), as_json(ops)))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and tensor attributes of a model under their names in a graph."""
    return {slot.name: slot.tensor for slot in slots_of(unwrapped(model))}

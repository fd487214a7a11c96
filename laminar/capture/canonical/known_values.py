"""Tensors whose values are known while tracing: those that depend on no input of the step.

A step may look at them (`torch.linspace(0, p, n)[i].item()`, `if mask.all():` for a mask made of nothing but sizes),
because they are the same in every step. Their values are worked out when somebody looks, by running what has been
traced so far of everything that depends on no parameter, buffer, batch or random draw; writes to such tensors run in
their order, and a write of something that is not known makes all that shares the memory unknown.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from laminar.capture.torch_private import (
    FakeTensor,
    disable_current_modes,
    get_proxy_mode,
    get_proxy_slot,
    schema,
    tree_leaves,
    tree_map,
    wrapped,
)

LARGEST = 16 << 20
"""Bytes; what is larger counts as unknown."""
NOT_KNOWN = object()
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put")


class _Known:
    """Values of one tracing pass, by the node that made them."""

    def __init__(self, graph: fx.Graph, root: Any) -> None:
        self.graph, self.root = graph, root
        self.values: dict[fx.Node, Any] = {}
        self.seen = 0

    def advance(self) -> None:
        """Run what has been traced since the last time."""
        fresh = list(self.graph.nodes)[self.seen :]
        self.seen += len(fresh)
        with disable_current_modes(), torch.no_grad():
            for node in fresh:
                value = self._run(node)
                if value is not NOT_KNOWN:
                    self.values[node] = value

    def _run(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            held = getattr(self.root, str(node.target))
            return held.detach().clone() if isinstance(held, Tensor) and not isinstance(held, FakeTensor) else NOT_KNOWN
        if node.op != "call_function":
            return NOT_KNOWN
        if any(n not in self.values for n in node.all_input_nodes) or not _repeatable(node):
            self._forget(node)
            return NOT_KNOWN
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _forget(self, node: fx.Node) -> None:
        """Something unknown may have been written: whatever lies in the same memory is unknown from here on."""
        if not getattr(schema(node.target), "is_mutable", False):
            return
        touched = {_memory(t) for n in node.all_input_nodes for t in tree_leaves(self.values.get(n))}
        for other, value in list(self.values.items()):
            if any(isinstance(t, Tensor) and _memory(t) in touched for t in tree_leaves(value)):
                del self.values[other]


def _memory(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0


def _repeatable(node: fx.Node) -> bool:
    """Whether running it here gives what it will give in every step, at a reasonable size."""
    tags = getattr(node.target, "tags", ())
    made = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
    return torch.Tag.nondeterministic_seeded not in tags and sum(t.nbytes for t in made) <= LARGEST


_passes: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def value_of(tensor: Tensor) -> Tensor | None:
    """The value of a tensor that depends on no input of the step being traced, as a real tensor; else None."""
    if not isinstance(tensor, FakeTensor):
        return None if wrapped(tensor) or tensor.is_meta else tensor
    mode: Any = get_proxy_mode()
    slot: Any = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    if mode is None or slot is None:
        return None
    if mode.tracer not in _passes:
        _passes[mode.tracer] = _Known(mode.tracer.graph, mode.tracer.root)
    known = _passes[mode.tracer]
    known.advance()
    return known.values.get(slot.proxy.node)


@cache
def _looks(func: Any) -> bool:
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def looked_at(func: Any, args: Any, kwargs: Any) -> Any:
    """What an op gives that asks for values or makes a shape of them, if all it reads is known; else `NOT_KNOWN`."""
    if not _looks(func):
        return NOT_KNOWN
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    values = {id(t): value_of(t) for t in given}
    if not given or any(v is None for v in values.values()):
        return NOT_KNOWN
    real_args, real_kwargs = tree_map(lambda t: values.get(id(t), t), (args, kwargs))
    with disable_current_modes(), torch.no_grad():
        return func(*real_args, **real_kwargs)


@cache
def _indexes(func: Any) -> bool:
    return schema(func).name in _INDEXING


def without_masks(func: Any, args: Any) -> Any:
    """Arguments of an indexing op with masks that are known as the places where they are true."""
    if not _indexes(func) or not any(_is_mask(i) for i in args[1]):
        return args
    places: list[Any] = []
    for index in args[1]:
        value = value_of(index) if _is_mask(index) else None
        if value is None:
            places.append(index)
            continue
        with disable_current_modes():
            places += value.nonzero(as_tuple=True)
    return (args[0], places, *args[2:])


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)

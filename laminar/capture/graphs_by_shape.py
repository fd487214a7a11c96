"""Captured graphs side by side: one for each shape of batch, mode, and set of trained parameters.

A graph holds one shape. The last batch of an epoch is smaller, evaluation switches dropout off, and
fine-tuning unfreezes layers as it goes; each of these is another graph, captured when first met.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch import nn

from laminar.capture.batches import flatten
from laminar.capture.capture import capture
from laminar.capture.torch_ops import spec_of
from laminar.ir.graph import Graph

Key = tuple[str, tuple[str, ...], tuple[bool, ...], frozenset[str]]


class Captures:
    """The graphs of one model and loss; call it with a batch."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Any],
        how: Callable[[nn.Module, Callable[[nn.Module, Any], Any], Any], Graph] = capture,
    ) -> None:
        """`how` makes a graph: plain capture unless the caller adds a step to it, such as probing."""
        self.model, self.loss, self.how = model, loss, how
        self._graphs: dict[Key, Graph] = {}

    def key(self, batch: Any) -> Key:
        """What a graph depends on besides the model's code: every module's mode, not only the root's."""
        leaves, tree = flatten(batch)
        return (
            json.dumps(tree),
            tuple(str(spec_of(leaf)) for leaf in leaves.values()),
            tuple(module.training for module in self.model.modules()),
            frozenset(name for name, p in self.model.named_parameters() if p.requires_grad),
        )

    def __call__(self, batch: Any) -> Graph:
        """The graph for such a batch, captured on first use."""
        key = self.key(batch)
        if key not in self._graphs:
            self._graphs[key] = self.how(self.model, self.loss, batch)
        return self._graphs[key]

    def __len__(self) -> int:
        return len(self._graphs)

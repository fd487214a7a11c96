"""From batches to graphs: one model and loss, captured when a batch of a new kind comes.

Graphs depend on the model's code, on the shapes of the batch and on values that the code reads (`captured_graphs.py`);
never on how many ranks there are, on a plan or on what of the model is here. So one of these serves whoever runs
the graphs: an engine (`engine.py`), another one for another mesh after that, or the stages of a pipeline.

Draws of a micro-batch are those of its samples in the whole batch (`rules/samples.py`).
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from laminar.capture.capture import capture
from laminar.capture.graph.batch_sizes import Predictor
from laminar.capture.kept.saved_graphs import kept_graph
from laminar.capture.model.batches import unflatten
from laminar.capture.model.losses import Metrics, identity, with_metrics
from laminar.cost.sim.no_gc import uncollected
from laminar.events import emit
from laminar.ir.graph import Graph
from laminar.ir.sbp import Split
from laminar.rules.samples import draws_of, in_parts, places_of
from laminar.runtime.check.probe_rules import probe
from laminar.train.batch.leaves import Leaves
from laminar.train.engine.captured_graphs import Captures
from laminar.train.engine.guards import Guards
from laminar.train.state.sharded_model import allowed

MANY_SIZES = 12
"""Sizes of batches that had to be traced, none following from the others, before the user is told."""


class Tracer:
    """The graphs of one model and loss."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        micro_batches: int = 1,
        scaled: bool = False,
        unguarded: Sequence[str] = (),
    ) -> None:
        self.model, self.loss, self.micro_batches = model, loss, micro_batches
        self.scaled = scaled or micro_batches > 1
        """Whether gradients are those of the scaled total, to be divided at the end."""
        self.whole: dict[str, Tensor] = {}
        """Stand-ins of the model's tensors at full size, once this process holds only parts of them."""
        self.captures = Captures(Guards(model, loss, unguarded), self.capture)
        self.measured: tuple[Any, ...] = ()
        """Which metrics are computed beside the loss at the moment."""
        self._predictors: dict[Any, list[tuple[Predictor, dict[str, Any]]]] = {}
        self._places: dict[Any, dict[int, Split | None]] = {}

    @contextlib.contextmanager
    def measuring(self, metrics: Metrics, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Inside, a (micro-)batch's graph has these metrics too; each is a function of model and batch."""
        plain, before = self.loss, self.measured
        if metrics:
            self.loss = with_metrics(plain, {n: around(f) for n, f in metrics.items()})
            self.measured = tuple((n, identity(f)) for n, f in metrics.items())
        try:
            yield
        finally:
            self.loss, self.measured = plain, before

    def capture(self, leaves: Leaves, backward: bool = True) -> Graph:
        """The graph of a (micro-)batch at its global shape."""
        graph = self._traced(leaves, backward)
        if self.micro_batches == 1 or not graph.of_kind("rng"):
            return graph
        return in_parts(graph, self._sampled(graph, leaves, backward))

    @uncollected()
    def _traced(self, leaves: Leaves, backward: bool) -> Graph:
        emit("phase", name="capturing")
        batch = unflatten(json.loads(leaves.tree), leaves.tensors)
        # Sizes of a batch aside, graphs are alike: what follows from those of other sizes is not traced again.
        kind = tuple((n, str(t.dtype), t.dim()) for n, t in leaves.tensors.items())
        predictor = self._predictor((kind, leaves.tree, backward, self.measured))
        how = {"scaled": self.scaled and backward, "backward": backward, "wide": True}
        whole = {n: (t.dtype, tuple(t.shape), t.stride()) for n, t in self.whole.items()}

        def traced() -> Graph:
            with allowed(), self.captures.reading():
                found = capture(self.model, self.loss, batch, whole=self.whole, predictor=predictor, **how)
            return probe(found)

        graph = kept_graph(
            self.model, self.loss, leaves.tensors, leaves.tree, {**how, "whole": whole}, traced, predictor
        )
        emit(
            "shape",
            traced=predictor.traced,
            traced_s=predictor.traced_s,
            sizes=[list(t.shape) for t in leaves.tensors.values()],
        )
        if predictor.traced == MANY_SIZES:
            warnings.warn(
                f"{MANY_SIZES} sizes of batches had to be captured one by one ({predictor.traced_s:.0f} s so far): pad "
                "sequences to multiples of 64, or put batches of like lengths together",
                stacklevel=2,
            )
        return graph

    def _predictor(self, kind: Any) -> Predictor:
        """What is known of other sizes of such batches, under the values that traces have read."""
        values, read = self.captures.guards.values, self.captures.guards.read
        known = self._predictors.setdefault(kind, [])
        for predictor, then in known:
            if all(then.get(n) == values.get(n) for n in read):
                return predictor
        known.append((Predictor(), dict(values)))
        return known[-1][0]

    def _sampled(self, graph: Graph, leaves: Leaves, backward: bool) -> dict[int, Split | None]:
        """Where draws have the samples of a batch: the same at any size, so found once."""
        known = self._places.setdefault((backward, self.measured, self.captures.state), {})
        if any(d.args[2] not in known for d in draws_of(graph)):

            def traced(samples: int) -> Graph:
                return graph if samples == leaves.samples else self._traced(leaves.like(samples), backward)

            known.update(places_of(traced, leaves.samples))
        return known

    def graph(self, leaves: Leaves, backward: bool) -> Graph:
        """The graph of such a (micro-)batch under the values there are, captured on first use."""
        return self.captures(leaves, backward, self.measured)

    def look(self, held: Mapping[str, Tensor]) -> None:
        """See what has changed since the last step, given the tensors that the job holds; every step begins here."""
        self.captures.look(held)

"""Graphs kept from one run of a script to the next (`laminar/cache.py`), under the digest of what they depend on.

The second run of a script captures nothing: it looks at its model and loss (`fingerprint.py`) and finds the graph. What
was learned about other sizes of a batch (`batch_sizes.py`) is kept with it. A step that can't be looked into is
captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from laminar import cache
from laminar.capture.graph.batch_sizes import Predictor, Sample
from laminar.capture.kept.fingerprint import fingerprint
from laminar.capture.ops.eager_parts import missing
from laminar.ir.graph import Graph


def kept_graph(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    leaves: Mapping[str, Tensor],
    tree: Any,
    how: Mapping[str, Any],
    make: Callable[[], Graph],
    predictor: Predictor | None = None,
) -> Graph:
    """The graph of a step, as `make` makes it; `how` says what else it depends on."""
    if cache.folder() is None:
        return make()
    batch = [(name, t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for name, t in leaves.items()]
    name = fingerprint(model, loss, batch, tree, dict(how))
    if name is None:
        return make()
    before = list(predictor.samples) if predictor is not None else []

    def out(graph: Graph) -> Any:
        # Not every step that is traced can be learned from.
        new = [s for s in predictor.samples if not any(s is b for b in before)] if predictor is not None else []
        sample = new[-1] if new else None
        learned = None if sample is None else [list(sample.sizes), sample.graph, sample.ops]
        return {"graph": graph.to_json(), "sample": learned}

    def back(data: Any) -> Graph:
        graph = Graph.from_json(data["graph"])
        if missing([(n.op, n.args) for n in graph.nodes]):
            raise LookupError  # it runs parts of the model as they are, and nobody here has told which
        if predictor is not None and data["sample"] is not None:
            sizes, known, ops = data["sample"]
            predictor.add(Sample(tuple(sizes), known, ops))
        return graph

    return cache.kept("graphs", {"step": name}, make, out, back)

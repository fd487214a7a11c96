"""The captured graph against the user's own model in plain PyTorch: what `verify` says beside its word on a plan.

A plan may be right and what was planned wrong: a parameter that tracing did not see has no gradient in the graph, and
no plan for that graph can have one. So the graph runs in the dtypes it was captured in, the model runs as it is
(`runtime/check/plain_model.py`, with the graph's draws where it draws), and loss, gradients and new buffers must agree
as a job's first batch must (`compare_results.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laminar.capture.capture import state_of
from laminar.capture.model.losses import is_metric
from laminar.ir.graph import RNG, Graph
from laminar.runtime.check.one_device import constants_of, run_graph
from laminar.runtime.check.plain_model import run_eager
from laminar.runtime.check.verify import Report
from laminar.train.check.compare_results import RESULT_TOLERANCE, beyond_rounding, distance, narrowest, nudged, off


def against_eager(
    report: Report,
    graph: Graph,
    model: Any,
    loss: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    inputs: Sequence[Mapping[str, Tensor]],
) -> Report:
    """Add to a report how a graph and the model itself compare on batches; `inputs` are the graph's, for each."""
    narrow = narrowest(graph, torch.device("cpu"))
    report.eager_tolerance = RESULT_TOLERANCE[narrow]
    for batch, given in zip(batches, inputs, strict=True):
        key = given[RNG].tolist() if RNG in given else None
        before = {i.name: given[i.name].detach().clone() for i in graph.inputs if i.kind == "buffer"}
        got = run_graph(graph, given, constants_of(graph))
        want = run_eager(model, loss, batch, key=key)
        unread = {s for s in want if s.startswith("buffer:") and s.removeprefix("buffer:") not in before}
        want = {k: v for k, v in want.items() if k not in unread}  # plain attributes that no step reads
        for name, value in got.items():
            if name.startswith("buffer:") and name not in want:
                want[name] = before.get(name.removeprefix("buffer:"), value)  # as it was: it has not changed
        found = off(got, want, RESULT_TOLERANCE[narrow])

        def moved(share: float, seed: int, batch: Any = batch, key: Any = key) -> dict[str, Tensor]:
            return run_eager(model, loss, batch, key=key, whole=nudged(state_of(model), share, seed))

        found = beyond_rounding(found, want, moved, narrow) if found else []
        report.eager_checked += sum(not is_metric(k) for k in want)
        for o in found:
            report.eager_differs.setdefault(o.name, str(o))
        wrong = {o.name for o in found}
        for name, value in want.items():
            size = float(value.detach().abs().max()) if value.numel() and value.is_floating_point() else 0.0
            if name in got and name not in wrong and size and got[name].shape == value.shape:
                report.eager_error = max(
                    report.eager_error, min(distance(got[name], value) / size, RESULT_TOLERANCE[narrow])
                )
    report.ok = report.ok and not report.eager_differs
    return report

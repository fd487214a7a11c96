"""Whether torch's own data parallel computes what the plans of a search compute, and can do what was asked for.

Plans don't change what a model computes: batch norm sees all samples, draws don't depend on the layout, a mean is over
the whole batch. Under DDP each rank runs the model on its own samples, and only gradients are summed. That comes to the
same where samples have nothing to do with each other, nothing is drawn, no buffer is written, and the loss is a mean
over samples, or a total and its weight (`laminar.Loss`). A mean over labels is none of these: labels may be left out
(`ignore_index`), and another number of them on every rank in a later batch.

What a job of DDP refuses later on is told in docs/use/train.md: it can't be known before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from laminar.capture.capture import capture
from laminar.capture.model.batches import unflatten
from laminar.errors import PlanError
from laminar.ir.graph import Graph
from laminar.runtime.check.probe_rules import probe
from laminar.staging.coupled_samples import coupled_ops
from laminar.train.batch.leaves import Leaves
from laminar.train.optimizer.precision import Precision
from laminar.train.options import JobOptions

LABELS = ("aten.nll_loss_forward", "aten.nll_loss2d_forward")
LABEL_MEAN = 1
"""What torch calls a mean over labels."""
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_not(graph: Graph, precision: Precision, model: nn.Module | None = None) -> str:
    """Why DDP would not do the same, or nothing; a `model` is one of which a copy is to run while others must not."""
    if precision.rounding != "nearest":
        return f"it has no precision {precision.name}"
    if graph.of_kind("rng"):
        return "the model draws random numbers, and its ranks would draw others"
    if any(o.kind == "buffer" for o in graph.outputs):
        return "forward writes buffers, and every rank would write its own"
    counts = next((n for n in graph.nodes if n.op in LABELS and n.args[3] == LABEL_MEAN), None)
    if counts is not None:
        return (
            f"the loss is a mean over labels ({counts.where}), and its ranks may have more or fewer of them; "
            "laminar.Loss(total, weight) is the same on any"
        )
    given = {o.name for o in graph.outputs if o.kind == "grad"}
    without = next((i.name for i in graph.of_kind("param") if i.trainable and i.name not in given), "")
    if without:
        return f"{without} gets no gradient"
    mixed = coupled_ops(graph)
    if mixed:
        return f"{mixed[0].op} mixes the samples of a batch ({mixed[0].where})"
    parts = () if model is None else model.named_modules()
    hooked = next((n for n, m in parts if any(getattr(m, each, None) for each in MODULE_HOOKS)), None)
    if hooked is not None:
        return f"hooks of {hooked or 'the model'} would be run, whatever they know"
    return ""


def refuse_others(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, options: JobOptions) -> None:
    """Refuse a plan that runs DDP for a model, a loss or options that are no longer those it was measured with."""
    policy = Precision.of(options.precision)
    leaves = Leaves.of(batch).mapped(policy.leaf).split(options.micro_batches)[0]
    around = policy.around(loss, torch.device("cpu" if options.device is None else options.device))
    graph = probe(capture(model, around, unflatten(json.loads(leaves.tree), leaves.tensors), wide=True))
    why = "it does not look for anomalies" if options.detect_anomaly else why_not(graph, policy)
    if why:
        raise PlanError(
            "this plan was measured fastest with torch's own data parallel, which does not do the same here",
            why=why,
            next='plan="data", or search again',
        )

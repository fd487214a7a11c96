"""Micro-batches of models whose samples are not independent: said once, when the job is made.

Batch norm in training, a balance loss over all tokens, a contrastive loss: each sees one micro-batch at a time where a
batch is run in several. That is what accumulating gradients means in plain PyTorch too, but it is not the training that
the same script does without micro-batches. The graph knows which ops these are (`staging.coupled_ops`).

A hook that clamps gradients sees the whole batch's: the loss of each part is multiplied by its share before backward.
Where the share is not known by then, of a `laminar.Loss` that is divided by its weight in the end, it sees others.
"""

from __future__ import annotations

import warnings

from laminar.ir.graph import Graph
from laminar.staging import coupled_ops


def warn_if_coupled(graph: Graph, parts: int) -> None:
    """Name the first op that mixes samples, and the ways out."""
    weighed_later = any(o.name == "loss_weight" for o in graph.outputs)
    found = [f for f in coupled_ops(graph) if f.linear or weighed_later]
    if not found:
        return
    first = found[0]
    more = f", and {len(found) - 1} more such ops" if len(found) > 1 else ""
    if first.linear:
        told = (
            f"{first.op} mixes the samples of a batch, and sees one micro-batch at a time ({first.where}{more}). The "
            "result is that of accumulated gradients in plain PyTorch, not that of the whole batch. Ways out: "
            "micro_batches=1 with more ranks, over which such ops are exact, or with recompute; or a layer that "
            "looks at each sample by itself (GroupNorm, LayerNorm)"
        )
    else:
        told = (
            f"{first.said}, and sees that of a micro-batch's total, before it is divided by the weight of the whole "
            f"batch ({first.where}{more}). The result is that of totals accumulated in plain PyTorch and divided "
            "afterwards, not that of the whole batch. Ways out: micro_batches=1 with more ranks, or with recompute; "
            "a loss that is a mean over samples; clip_norm= or clip_value= of laminar.parallelize, which "
            "look at the whole gradient"
        )
    warnings.warn(f"micro_batches={parts}: {told}", stacklevel=4)

"""Micro-batches of models whose samples are not independent: said once, when the job is made.

Batch norm in training, a balance loss over all tokens, a contrastive loss: each sees one micro-batch at a time where a
batch is run in several. That is what accumulating gradients means in plain PyTorch too, but it is not the training that
the same script does without micro-batches. Nor is that of a hook that clamps gradients, which sees those of a part. The
graph knows which ops these are (`staging.coupled_ops`).
"""

from __future__ import annotations

import warnings

from laminar.ir.graph import Graph
from laminar.staging import coupled_ops


def warn_if_coupled(graph: Graph, parts: int) -> None:
    """Name the first op that mixes samples, and the ways out."""
    found = coupled_ops(graph)
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
            f"{first.said}, and sees that of one micro-batch's own loss, about {parts} times as large as the whole "
            f"batch's ({first.where}{more}). The result is that of gradients that are accumulated in plain PyTorch and "
            "divided afterwards, not that of the whole batch. Ways out: micro_batches=1 with more ranks, or with "
            "recompute; clip_norm= or clip_value= of laminar.parallelize, which look at the whole gradient"
        )
    warnings.warn(f"micro_batches={parts}: {told}", stacklevel=4)

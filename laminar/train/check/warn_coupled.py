"""Micro-batches of models whose samples are not independent: said once, when the job is made.

Batch norm in training, a balance loss over all tokens, a contrastive loss: each sees one micro-batch at a time where a
batch is run in several. That is what accumulating gradients means in plain PyTorch too, but it is not the training that
the same script does without micro-batches. The graph knows which ops these are (`staging.coupled_ops`).

A hook that clamps gradients sees the whole batch's: the loss of each part is multiplied by its share before backward.
Where the share is not known by then, of a `laminar.Loss` that is divided by its weight in the end, it sees others.

A number that is made from how many samples there are (a loss that is a sum, `x / len(x)`) is a constant of the graph,
and nothing says where it comes from. `losses_of_parts` sees it: the model itself, on two parts and on both together.
So it sees a mean over labels of which each part has another number.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.model.batches import unflatten
from laminar.capture.model.losses import read_loss
from laminar.capture.model.model_tensors import slots_of
from laminar.ir.graph import Graph
from laminar.runtime.check.plain_model import untouched
from laminar.staging.coupled_samples import coupled_ops
from laminar.train.batch.leaves import Leaves, joined
from laminar.train.check.compare_results import RESULT_TOLERANCE
from laminar.train.state.sharded_model import allowed

MOST_APART = 0.05
"""How far, as a share, the losses of parts may be from that of the whole in any precision: losses are means of many."""


def warn_if_coupled(graph: Graph, parts: int) -> bool:
    """Name the first op that mixes samples, and the ways out; whether there is one."""
    weighed_later = any(o.name == "loss_weight" for o in graph.outputs)
    found = [f for f in coupled_ops(graph) if f.linear or weighed_later]
    if not found:
        return False
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
    return True


def losses_of_parts(
    model: nn.Module, loss: Callable[[Any, Any], Any], parts: Sequence[Leaves], whole: Mapping[str, Tensor]
) -> tuple[float, float] | None:
    """The loss of a batch and what the losses of its parts come to, in evaluation mode.

    Nothing, where that tells nothing: a model that draws or has no loss in evaluation mode.
    """
    slots = slots_of(model)
    device = next((s.tensor.device for s in slots), torch.device("cpu"))

    def run(part: Leaves, backward: bool) -> tuple[float, float]:
        before = _generator(device)
        with allowed(), untouched(model, slots, whole), torch.set_grad_enabled(backward):
            model.eval()
            value, total, metrics = read_loss(loss(model, unflatten(json.loads(part.tree), part.tensors)))
            if not torch.equal(before, _generator(device)):
                raise LookupError  # parts draw other numbers
        if "loss_weight" in metrics:
            return float(total.detach()), float(metrics["loss_weight"])
        return float(value.detach()) * part.samples, part.samples

    for backward in (False, True):  # a loss may be made from gradients
        try:
            (total, weight), *each = [run(part, backward) for part in (joined(parts), *parts)]
        except (LookupError, torch.OutOfMemoryError):
            return None
        except Exception:  # whatever it is: it is the training step that has to run, and that does
            continue
        totals, weights = map(sum, zip(*each, strict=True))
        return (total / weight, totals / weights) if weight and weights else None
    return None


def _generator(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def depends_on_the_count(losses: tuple[float, float] | None, parts: Sequence[Leaves], narrow: str) -> str:
    """What to say where the loss of a batch is not what its parts' come to; empty where it is."""
    if losses is None or not abs(losses[0] - losses[1]) > min(10 * RESULT_TOLERANCE[narrow], MOST_APART) * max(
        map(abs, losses)
    ):
        return ""
    return (
        f"the loss of {sum(p.samples for p in parts)} samples is {losses[0]:.6g}, and those of "
        f"{' and '.join(str(p.samples) for p in parts)} of them come to {losses[1]:.6g} (in evaluation mode). A plain "
        "scalar is taken for the mean over the samples of its part, and this one is not (labels that are ignored?), or "
        "something on the way depends on how many samples there are. Ways out: return a mean over samples; "
        "laminar.Loss(total, weight) where counts are uneven; a number that does not come from len(batch)"
    )

"""The user's own model in plain PyTorch: loss, gradients and new buffers of one step, under a graph's names.

The oracle that owes nothing to capture: the modules' own code runs on their own parameters, and autograd differentiates
it. What is not plain is said here. Where a step draws random numbers, and only there, draws are those that a captured
step makes (`Keyed`), or nothing could be compared. Parameters of which this process holds a piece are given whole for
the run. Afterwards the model is as it was: weights, buffers, attributes, and the generators of torch, NumPy and Python.
What user code does outside of the model (a list it appends to, a line it prints) it does once more.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laminar.capture import torch_private
from laminar.capture.canonical.canonical import HANDLERS, Canonical, body_of
from laminar.capture.canonical.rewritten_functions import WRITTEN_OUT
from laminar.capture.eager.eager_search import keyed
from laminar.capture.model.losses import read_loss
from laminar.capture.model.model_tensors import Slot, slots_of, swapped
from laminar.capture.tracing.origins import canonical_again
from laminar.runtime.pipeline.loader import LOADER

HALF_DTYPES = (torch.bfloat16, torch.float16)
RUN_BY_TORCH = frozenset(
    [
        F.batch_norm,
        F.embedding,
        F.embedding_bag,
        F.gaussian_nll_loss,
        Tensor.data.__set__,  # type: ignore[attr-defined]
        F.instance_norm,
        F.ctc_loss,
        torch.ctc_loss,
        torch.masked_select,
        Tensor.masked_select,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__deepcopy__,
        F.grouped_mm,
        torch_private.grouped_mm,
        F.adaptive_avg_pool2d,
        F.adaptive_avg_pool3d,
        torch_private.multilabel_margin_loss,
        torch.batch_norm,
        torch.instance_norm,
        *WRITTEN_OUT,
    ]
)
"""Functions that capture has forms of its own for, without a draw in them: here torch's own run."""
RECURRENT = frozenset([torch_private.lstm, torch_private.gru, torch_private.rnn_tanh, torch_private.rnn_relu])


class Keyed(Canonical):
    """Torch's own functions, but for random draws, which are those of a captured step with the same key."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None and func not in RUN_BY_TORCH and _draws(func, args, kwargs):
            with torch.device(self.key.device):
                return handler(self, *args, **kwargs)
        body = body_of(func)
        if body is None:
            return func(*args, **kwargs)
        with self:
            return body(*args, **kwargs)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, draws are keyed; a checkpointed region that is run again draws what it drew the first time."""

        def again(fn: Callable[..., Any]) -> Callable[..., Any]:
            first = self.site

            def run(*args: Any, **kwargs: Any) -> Any:
                site, self.site = self.site, first
                try:
                    with canonical_again(self):
                        return fn(*args, **kwargs)
                finally:
                    self.site = site

            return run

        with torch_private.checkpoints(again), self:
            yield


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may draw; attention and recurrent layers do if they drop something out."""
    if func is F.scaled_dot_product_attention:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if func in RECURRENT:
        dropout, training = (args[i] if len(args) > i else kwargs.get(k) for i, k in ((5, "dropout"), (6, "train")))
        return bool(dropout and training)
    return True


def run_eager(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    key: Sequence[int] | None = None,
    scale: float | None = None,
    whole: Mapping[str, Tensor] | None = None,
    wide: bool = False,
    backward: bool = True,
) -> dict[str, Tensor]:
    """What one step gives, by `kind:name`, as the outputs of a captured graph are called.

    key       seed and step of random draws; without it torch draws as it always does
    scale     gradients are those of the loss, or of a `Loss`'s total, times this; unless given, of the loss
    whole     tensors to take for some of the model's, by slot name: those of which only a piece is here
    wide      gradients of half-precision parameters in float32
    backward  whether to differentiate
    A parameter that the loss does not depend on has no gradient here. Buffers are given where they have changed.
    """
    slots = slots_of(model)
    device = next((s.tensor.device for s in slots), torch.device("cpu"))
    mode = Keyed(torch.tensor(list(key)[:2], device=device)) if key is not None else None
    out: dict[str, Tensor] = {}
    with untouched(model, slots, whole or {}) as before, torch.set_grad_enabled(backward):
        around = contextlib.ExitStack()
        if mode is not None:
            around.enter_context(keyed(model, mode))
            around.enter_context(mode.running())
        with around:
            value, total, metrics = read_loss(loss(model, batch))
            out["loss:loss"] = value.detach().clone()
            out |= {f"metric:{name}": m.detach().clone() for name, m in metrics.items()}
            if backward:
                trained = [s for s in slots if s.trainable]
                root = value if scale is None else total * torch.tensor(scale, dtype=torch.float64).to(total)
                for slot, grad in zip(trained, _gradients(root, [s.tensor for s in trained]), strict=True):
                    if grad is not None:
                        dense = grad.to_dense() if grad.is_sparse else grad
                        out[f"grad:{slot.name}"] = dense.float() if wide and dense.dtype in HALF_DTYPES else dense
        for slot in slots:
            now = slot.now
            if slot.kind == "buffer" and isinstance(now, Tensor) and not same(now.detach(), before[slot.name]):
                out[f"buffer:{slot.name}"] = now.detach().clone()
    return out


def _gradients(root: Tensor, params: Sequence[Tensor]) -> list[Tensor | None]:
    """By `backward()`, as user code does: regions that are checkpointed in the older way take nothing else."""
    before = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        if root.requires_grad:
            root.backward()
        return [p.grad for p in params]
    finally:
        for p, grad in zip(params, before, strict=True):
            p.grad = grad


@contextlib.contextmanager
def untouched(model: nn.Module, slots: Sequence[Slot], whole: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The model with some tensors whole, to run once; then as it was, with the generators of random numbers.

    Gives copies of its buffers as they were.
    """
    held = [(s, s.tensor.data) for s in slots]
    buffers = {s.name: whole.get(s.name, s.tensor).detach().clone() for s in slots if s.kind == "buffer"}
    with _generators(slots), swapped(model, []):
        try:
            for slot in slots:
                if slot.name in whole:
                    slot.tensor.data = whole[slot.name].detach()
            yield buffers
        finally:
            for slot, data in held:
                slot.tensor.data = data
                if slot.kind == "buffer" and slot.name not in whole and not same(data, buffers[slot.name]):
                    data.copy_(buffers[slot.name])


@contextlib.contextmanager
def _generators(slots: Sequence[Slot]) -> Iterator[None]:
    """Generators of random numbers as they were, unless a loader may draw from them meanwhile.

    What a model draws through us is keyed and moves none of them. A loader's draws must not be taken back: it would
    shuffle the next epoch like this one.
    """
    if any(t.name == LOADER for t in threading.enumerate()):
        yield
        return
    drawn = random.getstate(), np.random.get_state(legacy=True)
    cuda = sorted({s.tensor.device.index or 0 for s in slots if s.tensor.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same values; NaN is the same as NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())

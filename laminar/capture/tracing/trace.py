"""One tracing pass over forward, loss and backward, on tensors that hold nothing.

The model's tensors are swapped for fake CPU tensors while loss *and* gradient run (recomputation in
backward must see them too), then put back. What may not be in a graph is refused on the way; what
torch can write out itself (losses, rare layers) is written out.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.canonical import rewritten_functions as rewritten_functions  # registers functions written out
from laminar.capture.canonical.canonical import Canonical, gpu_autocast
from laminar.capture.canonical.certain_draws import held_back
from laminar.capture.canonical.data_checks import unchecked
from laminar.capture.canonical.layers import layers_that_trace
from laminar.capture.model.model_tensors import Slot, dressed, swapped
from laminar.capture.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    applied,
    get_decompositions,
    make_fx,
    quiet,
    uncompiled,
)
from laminar.capture.tracing.op_log import hidden_backward
from laminar.capture.tracing.origins import Origin, Recorder
from laminar.capture.tracing.python_random import Draws
from laminar.capture.tracing.refuse import (
    Before,
    Left,
    data_dependent,
    left_behind,
    located,
    refuse_carried,
    refuse_drawn,
    refuse_hooks,
    refuse_layouts,
    refuse_loss,
    refuse_scripted,
)
from laminar.capture.tracing.user_errors import whose
from laminar.errors import CaptureError, LaminarError

UNALLOCATED = "its data is not allocated yet"
"""What torch says when code of its own looks into a tensor that holds nothing."""
NARROW = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def device_neutral() -> Iterator[None]:
    """What a script says about devices and checks means the policy, not the place.

    Tracing happens on fake CPU tensors, so `torch.autocast("cuda")` becomes autocast for the CPU, with
    the longer list of float32 ops that GPUs have (see `canonical`). Distributions don't check their
    arguments, for that would need to look at data; compiled parts run as they were written. Other threads,
    a loader's for one, say what they mean.
    """
    here = threading.get_ident()
    cls: Any = torch.amp.autocast_mode.autocast
    init, enter, leave = cls.__init__, cls.__enter__, cls.__exit__

    def neutral(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        elsewhere = device_type not in ("cpu", "meta") and threading.get_ident() == here
        init(self, "cpu" if elsewhere else device_type, *args, **kwargs)
        self._elsewhere = elsewhere and self._enabled
        if elsewhere and not args and kwargs.get("dtype") is None:
            self.fast_dtype = torch.float16

    def entered(self: Any) -> Any:
        if threading.get_ident() == here:
            gpu_autocast.regions.append(getattr(self, "_elsewhere", False))
        return enter(self)

    def left(self: Any, *exc: Any) -> Any:
        if threading.get_ident() == here:
            gpu_autocast.regions.pop()
        return leave(self, *exc)

    checks = torch.distributions.Distribution._validate_args
    cls.__init__, cls.__enter__, cls.__exit__ = neutral, entered, left
    validate: Any = torch.distributions.Distribution.set_default_validate_args
    validate(False)
    try:
        with uncompiled(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using `torch.compile")  # our hooks on modules are meant
            yield
    finally:
        cls.__init__, cls.__enter__, cls.__exit__ = init, enter, leave
        validate(checks)
        gpu_autocast.regions.clear()


@dataclass
class Traced:
    """What one pass gives: the raw graph, its inputs and outputs in order, and every op's origin."""

    graph: Any
    slots: list[Slot]
    outputs: list[tuple[str, str]]
    origins: dict[str, Origin]
    draws: bool
    ops: list[Any] | None = None
    """The ops of forward with their arguments; nothing if they don't tell what backward does."""


def trace(
    model: nn.Module,
    step: Callable[[], tuple[Tensor, Tensor, dict[str, Tensor]]],
    slots: list[Slot],
    leaves: dict[str, Tensor],
    set_leaves: Callable[[list[Tensor]], None],
    backward: bool = True,
    wide: bool = False,
    dry: bool = False,
) -> Traced:
    """Trace `step` (loss, what to differentiate, and metrics, from swapped model and batch) and the gradient.

    `dry` only runs forward and notes its ops.
    """
    # Long because the function that torch traces has to be a closure: what it notes on the way is read after tracing.
    refuse_hooks(slots)
    refuse_layouts(slots, leaves)
    refuse_scripted(model)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(t: Tensor, grad: bool) -> Tensor:
        with fake_mode:
            out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
        return out.requires_grad_(grad)

    for slot in slots:
        slot.fake = dressed(fake(slot.tensor, slot.trainable), slot.own)
    fakes = [fake(t, False) for t in leaves.values()]
    with fake_mode:
        key = torch.zeros(2, dtype=torch.int64)
    recorder = Recorder(model, dry)
    mode: list[Canonical] = []
    outputs: list[tuple[str, str]] = []
    left: list[Left] = []
    unpredictable: list[bool] = []
    draws = Draws()

    def laminar_whole_step(*flat: Tensor) -> list[Tensor]:
        params, batch, rng = flat[: len(slots)], flat[len(slots) : -1], flat[-1]
        for slot, t in zip(slots, params, strict=True):
            slot.fake = t
        set_leaves(list(batch))
        canonical = Canonical(rng, neutral=True, exchanged={id(s.own): s.fake for s in slots})
        mode.append(canonical)
        with swapped(model, slots), applied(canonical.here), recorder.following(canonical), canonical, recorder:
            loss, root, metrics = step()
            refuse_loss(loss, backward)
            before.refuse_changes(slots, recorder)
            recorder.noting = False
            unpredictable.append(backward and (canonical.hooked or hidden_backward(root)))
            if dry:
                return []
            left.extend(left_behind(model, slots))
            trained = [s for s in slots if s.trainable]
            grads: tuple[Tensor | None, ...] = (None,) * len(trained)
            if backward:
                # The gradient of the loss by itself belongs to the line that made the loss.
                recorder.fixed = replace(recorder.behind(root.grad_fn), phase="backward")
                one = torch.ones_like(root)
                recorder.fixed = None
                grads = torch.autograd.grad(root, [s.fake for s in trained], one, allow_unused=True)
            results = [loss.detach(), *[m.detach() for m in metrics.values()]]
            outputs.append(("loss", "loss"))
            outputs.extend(("metric", k) for k in metrics)
            for slot, grad in zip(trained, grads, strict=True):
                if grad is not None:
                    recorder.fixed = Origin(module=slot.name.rpartition(".")[0], phase="backward")
                    results.append(grad.float() if wide and grad.dtype in NARROW else grad)
                    recorder.fixed = None
                    outputs.append(("grad", slot.name))
            for slot in slots:
                if slot.kind == "buffer" and isinstance(slot.now, Tensor):
                    results.append(slot.now.detach())
                    outputs.append(("buffer", slot.name))
        return results

    def traced(run: Callable[..., Any]) -> Any:
        return make_fx(
            run,
            decomposition_table=_decompositions(),
            tracing_mode="real",
            _allow_non_fake_inputs=True,
            _error_on_data_dependent_ops=True,
        )(*[s.fake for s in slots], *fakes, key)

    try:
        grads = torch.set_grad_enabled(backward)
        with fake_mode, quiet(), device_neutral(), layers_that_trace(), unchecked(), grads, draws, held_back():
            before = Before(model, draws)
            gm = laminar_whole_step(*[s.fake for s in slots], *fakes, key) if dry else traced(laminar_whole_step)
            set_leaves(fakes)
            if draws.moved and not dry:
                traced(lambda *_: refuse_drawn(model, step, slots, draws, key))
            if left and not dry:
                traced(lambda *_: refuse_carried(model, step, slots, left, key))
    except LaminarError as error:
        raise located(error, recorder.inside) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise data_dependent(error, mode[-1].failed, recorder.inside) from error
    except Exception as error:
        if UNALLOCATED in str(error):
            raise data_dependent(error, mode[-1].failed, recorder.inside) from error
        with torch.set_grad_enabled(backward):
            found = whose(error, model, step, slots, leaves, set_leaves, recorder.inside)
        raise found from (error if isinstance(found, CaptureError) else None)
    finally:
        for slot in slots:
            slot.fake = None
    return Traced(gm, slots, outputs, recorder.origins, mode[-1].drew, None if any(unpredictable) else recorder.ops)


@cache
def _decompositions() -> Any:
    """Losses and rare layers that torch itself can write out; everything else stays as it is."""
    aten = torch.ops.aten
    return get_decompositions(
        [
            aten.mse_loss,
            aten.mse_loss_backward,
            aten.smooth_l1_loss,
            aten.smooth_l1_loss_backward,
            aten.huber_loss,
            aten.huber_loss_backward,
            aten.binary_cross_entropy,
            aten.binary_cross_entropy_backward,
            aten.binary_cross_entropy_with_logits,
            aten.soft_margin_loss,
            aten.soft_margin_loss_backward,
            aten.glu,
            aten.glu_backward,
            aten.unfold_backward,
            aten.native_dropout,
            aten.native_dropout_backward,
            aten._fused_rms_norm,
            aten._fused_rms_norm_backward,
            aten.multi_margin_loss,
            aten.multilabel_margin_loss_forward,
            aten.softplus_backward,
            aten.norm,
            aten.addcmul,
            aten.lerp,
            aten.std_mean,
            aten.native_batch_norm_backward,
            aten.embedding_renorm,
            aten.std,
            aten.index_add_,
            aten.trace,
            aten.linspace,
            aten.mv,
            aten.dot,
            aten.triu_indices,
            aten.tril_indices,
        ]
    )

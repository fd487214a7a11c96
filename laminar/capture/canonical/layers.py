"""Layers whose code in torch looks at data, or whose kernels can't be traced: the same layers in a form that can.

Functions are caught by the mode (`canonical.catches`). Where a module's own Python code is what looks (the cumulative
average of a batch norm, the search for a causal mask), that code is another one while a step is traced
(`layers_that_trace`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laminar.capture import torch_private
from laminar.capture.canonical.canonical import HANDLERS, Canonical, catches, laminar_ops
from laminar.capture.canonical.known_values import value_of
from laminar.capture.canonical.masked_select import MaskPicked

# --- values as Python or NumPy has them ------------------------------------------------------


def _out_of_torch(function: Any) -> None:
    """Only of what is the same in every step (`known`)."""

    @catches(function)
    def run(mode: Canonical, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        value = value_of(input)
        if value is None:
            raise torch_private.DataDependentOutputException(function)
        with torch_private.disable_current_modes():
            return function(value, *args, **kwargs)


for _function in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
    _out_of_torch(_function)


@catches(torch.masked_select, Tensor.masked_select)
def _masked_select(mode: Canonical, input: Tensor, mask: Tensor) -> Any:
    input, mask = torch.broadcast_tensors(input, mask)
    try:
        return input[mask]
    except torch_private.DynamicOutputShapeException:
        if input.is_floating_point() or input.is_complex():  # labels are whole numbers
            raise
        return MaskPicked(input, mask)


# --- norms -----------------------------------------------------------------------------------


@catches(F.instance_norm)
def _instance_norm(
    mode: Canonical,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Each sample by its own statistics; running ones are averages over samples, and torch's kernel writes through
    repeated copies of them."""
    if not use_input_stats:
        return HANDLERS[F.batch_norm](  # type: ignore[no-any-return]
            mode, input, running_mean, running_var, weight, bias, False, momentum, eps
        )
    space = tuple(range(2, input.dim()))
    if input.shape[2:].numel() == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {input.size()}")
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            var, mean = torch.var_mean(input.detach(), space, correction=1)
            for running, now in ((running_mean, mean), (running_var, var)):
                running.copy_(running * (1 - momentum) + now.to(running.dtype).mean(0) * momentum)
    return torch.instance_norm(input, weight, bias, None, None, True, momentum, eps, False)


@catches(torch.batch_norm)
def _batch_norm(
    mode: Canonical,
    input: Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return HANDLERS[F.batch_norm](  # type: ignore[no-any-return]
        mode, input, running_mean, running_var, weight, bias, training, momentum, eps
    )


@catches(torch.instance_norm)
def _raw_instance_norm(
    mode: Canonical,
    input: Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return HANDLERS[F.instance_norm](  # type: ignore[no-any-return]
        mode, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


def _cumulative(forward: Any) -> Any:
    def run(self: Any, input: Tensor) -> Tensor:
        """A batch norm without momentum averages over all batches: by their number as a tensor, not in Python."""
        counted = self.training and self.track_running_stats and self.num_batches_tracked is not None
        if self.momentum is not None or not counted:
            return forward(self, input)  # type: ignore[no-any-return]
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        share: Any = 1.0 / self.num_batches_tracked.double()
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, True, share, self.eps)

    return run


# --- pooling ---------------------------------------------------------------------------------


def _fractional(dims: int) -> None:
    function = getattr(F, f"fractional_max_pool{dims}d")

    @catches(function)
    def run(mode: Canonical, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Where regions begin is drawn, for each sample and channel."""
        if len(args) < 5 and kwargs.get("_random_samples") is None:
            samples = input.shape[0] if input.dim() == dims + 2 else 1
            drawn = mode.uniform((samples, input.shape[-dims - 1], dims), input.dtype)
            kwargs["_random_samples"] = drawn.to(input.dtype)
        return function(input, *args, **kwargs)


def _adaptive(dims: int) -> None:
    function = getattr(F, f"adaptive_avg_pool{dims}d")

    @catches(function)
    def run(mode: Canonical, input: Tensor, output_size: Any) -> Tensor:
        """Down to one element it is a mean; torch then sets strides as channels-last wants them."""
        sizes = (output_size,) * dims if isinstance(output_size, int) else tuple(output_size)
        if all(n == 1 for n in sizes) and input.dim() > dims:
            return input.mean(tuple(range(-dims, 0)), keepdim=True)
        return function(input, output_size)  # type: ignore[no-any-return]


for _dims in (2, 3):
    _adaptive(_dims)
    _fractional(_dims)


# --- masks -----------------------------------------------------------------------------------


def _causal(detect: Any) -> Any:
    def run(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        """Whether a mask is causal only decides on a faster kernel: one that is not known is taken as a mask."""
        if is_causal is None and mask is not None and value_of(mask) is None:
            return False
        return bool(detect(mask, is_causal, size))

    return run


@contextlib.contextmanager
def layers_that_trace() -> Iterator[None]:
    """While tracing, modules of torch that look at data run code that does not."""
    norm: Any = nn.modules.batchnorm._BatchNorm
    synced: Any = nn.SyncBatchNorm
    forward, together = norm.forward, synced.forward
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch_private.detecting(_causal):
        norm.forward = synced.forward = _cumulative(forward)  # one batch is normalised as a whole, on all ranks
        torch.backends.mha.set_fastpath_enabled(False)  # for inference, by kernels that are not these layers
        try:
            yield
        finally:
            norm.forward, synced.forward = forward, together
            torch.backends.mha.set_fastpath_enabled(fast)


# --- losses ----------------------------------------------------------------------------------


@catches(F.ctc_loss, torch.ctc_loss)
def _ctc_loss(
    mode: Canonical,
    log_probs: Tensor,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Any = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """By samples, with labels in rows: which of torch's kernels runs, and what it keeps, depends on the lengths."""
    single = log_probs.dim() == 2
    lengths = [_lengths(t) for t in (input_lengths, target_lengths)]
    if single:
        log_probs = log_probs.unsqueeze(1)
    if isinstance(targets, MaskPicked):
        rows = targets.in_rows(target_lengths)
        targets = targets.one_after_the_other() if rows is None else rows
    if targets.dim() == 1:
        targets = _rows(targets, lengths[1])
    nll, _ = laminar_ops.ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        nll = torch.where(nll == float("inf"), 0.0, nll)
    if reduction in ("mean", 1):
        return (nll / lengths[1].clamp(min=1).to(nll.dtype)).mean()  # type: ignore[no-any-return]
    if reduction in ("sum", 2):
        return nll.sum()  # type: ignore[no-any-return]
    return nll[0] if single else nll  # type: ignore[no-any-return]


def _lengths(given: Any) -> Tensor:
    lengths = given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int64)
    return lengths.to(torch.int64).reshape(-1)


def _rows(labels: Tensor, lengths: Tensor) -> Tensor:
    """Labels of all samples one after the other, as one row for each, as long as the longest can be."""
    value = value_of(lengths)
    longest = int(value.max()) if value is not None and value.numel() else labels.shape[0]
    at = (lengths.cumsum(0) - lengths).unsqueeze(1) + torch.arange(longest)
    return labels[at.clamp(max=max(labels.shape[0] - 1, 0))]


@catches(torch_private.multilabel_margin_loss)
def _multilabel_margin(mode: Canonical, input: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Labels count up to the first -1; torch's own form of it in primitives counts those behind as label 0."""
    x, labels = (t.reshape(-1, t.shape[-1] if t.dim() else 1) for t in (input, target))
    classes = x.shape[1]
    at = torch.arange(classes)
    counts = at < torch.where(labels == -1, at, classes).amin(1, keepdim=True)
    labels = torch.where(counts, labels, 0)
    wanted = torch.zeros(x.shape, dtype=torch.int64).scatter_add(1, labels, counts.long()) > 0
    gaps = torch.relu(1 - x.gather(1, labels).unsqueeze(2) + x.unsqueeze(1))
    each = (gaps * (counts.unsqueeze(2) & ~wanted.unsqueeze(1))).sum((1, 2)) / classes
    return each.reshape(input.shape[:-1]) if reduction == 0 else each.mean() if reduction == 1 else each.sum()

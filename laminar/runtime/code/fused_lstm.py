"""Recurrent layers on a CPU by torch's own fused kernel, where the program lets it keep what it likes.

`laminar.lstm` hands the gates and cells of every step to backward as tensors, which a plan may place, gather or send to
the host as any other. torch's kernel (oneDNN's, two to three times as fast) keeps a workspace of bytes instead, laid
out as only its own backward knows. So the two are exchanged together, and only where nobody else would see it: every
reader of gates and cells is a backward line that takes both as they were made. All other programs, other dtypes and
other devices run the forms of `capture/ops/kernels.py`.

The workspace is about three times as large as gates and cells, of which `cost/memory/peak.py` knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops import kernels
from laminar.ir.program import Program
from laminar.ir.serial.codec import Ref

LSTM_FORWARD, LSTM_BACKWARD = "laminar.lstm", "laminar.lstm_backward"
GATES, CELLS = 3, 4
"""Which results of a forward line these are; a backward line takes them as its tenth and eleventh argument."""
LSTM = 2
"""What torch calls this kind of layer."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the fused forward leaves to its backward."""

    bytes: Tensor
    bias: Tensor
    h: Tensor
    c: Tensor


def paired(program: Program) -> dict[str, bool]:
    """Lines that may run fused, backward ones with the forward ones they belong to; and whether anything is kept."""
    makers = {i.name: i for i in program.instrs if i.op == LSTM_FORWARD and i.ins[0].spec.dtype == "f32"}
    readers: dict[str, list[str]] = {name: [] for name in makers}
    others: set[str] = {o.ref.name for o in program.outputs if o.ref.index in (GATES, CELLS)}
    for line in program.instrs:
        for ref in line.refs:
            if ref.name in makers and ref.index in (GATES, CELLS):
                both = (Ref(ref.name, GATES), Ref(ref.name, CELLS))
                made = makers[ref.name]
                if line.op == LSTM_BACKWARD and line.args[9:11] == both and line.args[11] == made.args[6]:
                    readers[ref.name].append(line.name)
                else:
                    others.add(ref.name)
    fused = {name: bool(lines) for name, lines in readers.items() if name not in others}
    return fused | {line: True for name in fused for line in readers[name]}


def _can(x: Tensor) -> bool:
    cpu = x.device.type == "cpu" and x.dtype == torch.float32
    return cpu and x.numel() > 0 and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _stacked(*states: Tensor) -> list[Tensor]:
    """States as torch has them: with a dim for layers."""
    return [s.unsqueeze(0).contiguous() for s in states]


def fused_lstm(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    bias: Tensor | None,
    reverse: bool,
    *,
    keeps: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | Workspace, Tensor | None]:
    """As `kernels.lstm`, with a workspace instead of gates, and no cells; unless it `keeps` it, of no use."""
    if not _can(x):
        return kernels.lstm(x, h0, c0, w_ih, w_hh, bias, reverse)
    hidden = h0.shape[-1]
    none = w_hh.new_zeros(4 * hidden)  # torch has two biases
    given = none if bias is None else bias
    seen = [t.detach() for t in (x.contiguous(), w_ih, w_hh, given, none, *_stacked(h0, c0))]
    with torch.set_grad_enabled(keeps):  # or torch keeps nothing, whatever it is told
        y, h, c, kept = torch.ops.aten.mkldnn_rnn_layer(*seen, reverse, [], LSTM, hidden, 1, True, False, False, keeps)
    return y, h[0], c[0], Workspace(kept, given, h, c), None


def fused_lstm_backward(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    y: Tensor,
    kept: Tensor | Workspace,
    cells: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `kernels.lstm_backward`, of what `fused_lstm` has kept."""
    if not isinstance(kept, Workspace):
        assert cells is not None
        return kernels.lstm_backward(dy, dh, dc, x, h0, c0, w_ih, w_hh, y, kept, cells, reverse)
    hidden = h0.shape[-1]
    dx, dw_ih, dw_hh, db, _, dh0, dc0 = torch.ops.aten.mkldnn_rnn_layer_backward(
        x.contiguous(),
        w_ih,
        w_hh,
        kept.bias,
        torch.zeros_like(kept.bias),
        *_stacked(h0, c0),
        y.contiguous(),
        kept.h,
        kept.c,
        dy.contiguous(),
        *_stacked(dh, dc),
        reverse,
        LSTM,
        hidden,
        1,
        True,
        True,
        False,
        [],
        False,
        kept.bytes,
    )
    return dx, dh0[0], dc0[0], dw_ih, dw_hh, db


FUSED: dict[str, Callable[..., Any]] = {LSTM_FORWARD: fused_lstm, LSTM_BACKWARD: fused_lstm_backward}

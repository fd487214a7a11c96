"""What an op costs on one rank, well enough to choose between placements.

A roofline on an assumed device: the larger of arithmetic time and memory time. It is not a
prediction of seconds; no measured table stands behind it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laminar.ir.ops import FREE
from laminar.rules.notation import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineDevice:
    """The two rates a roofline needs."""

    flops_per_s: float
    bytes_per_s: float


ASSUMED = RooflineDevice(flops_per_s=100e12, bytes_per_s=1.5e12)
"""Assumed, not measured: about a third of a current data-centre GPU's peak."""


def flops(call: Call) -> float:
    """Multiply-adds count twice; ops that do not multiply matrices count one per element made."""
    op, ins = call.op.split(".")[1], [s.shape for s in call.ins]
    made = float(sum(o.numel for o in call.outs if o))
    if op in ("mm", "bmm", "_scaled_mm") or (op == "mv" and ins):
        return 2.0 * math.prod(ins[0]) * ins[1][-1] if op != "mv" else 2.0 * math.prod(ins[0])
    if op.startswith("grouped_"):
        return 2.0 * math.prod(ins[0]) * ins[1][-1]
    if op in ("addmm", "baddbmm"):
        return 2.0 * math.prod(ins[1]) * ins[2][-1]
    if op == "convolution":
        return 2.0 * math.prod(call.out.shape) * math.prod(ins[1][1:])
    if op == "convolution_backward":
        return 4.0 * math.prod(ins[0]) * math.prod(ins[2][1:])
    if op == "attention":
        return 4.0 * math.prod(ins[0]) * ins[1][2] * _attended(ins[0], ins[1], call.arg(4))
    if op == "attention_backward":
        return 10.0 * math.prod(ins[1]) * ins[2][2] * _attended(ins[1], ins[2], call.arg(7))
    if op in ("eager", "eager_backward"):  # counted at a trial, on values made up for it; backward runs it again first
        return max((3.0 if op == "eager_backward" else 1.0) * float(call.args[-2]) * _share(call), made)
    if op == "lstm":
        return 2.0 * math.prod(ins[0][:2]) * (math.prod(ins[3]) + math.prod(ins[4]))
    if op == "lstm_backward":
        return 4.0 * math.prod(ins[3][:2]) * (math.prod(ins[6]) + math.prod(ins[7]))
    return made


def _attended(q: tuple[int, ...], k: tuple[int, ...], causal: int) -> float:
    """How many keys a query of a causal attention sees, over those that queries of a whole one see.

    Fewer queries than keys are a stretch of them, or so many (`causal`) evenly apart, and those of the rank that has
    the last and slowest count: a step waits for it. A whole causal attention is counted as if nothing were masked.
    """
    return 1.0 + (1.0 - min(q[2], k[2]) / max(q[2], k[2], 1)) / causal if causal else 1.0


def _share(call: Call) -> float:
    """The share of its samples that a call of what runs as it is has on one rank."""
    split, first = call.args[-4], len(call.args[0]) if call.op.endswith("backward") else 0
    return call.ins[first + split[0]].shape[0] / max(call.args[-1], 1) if split else 1.0


def op_s(call: Call, device: RooflineDevice = ASSUMED) -> float:
    """Seconds of a call on one rank."""
    if call.op in FREE:
        return 0.0
    moved = sum(s.nbytes for s in call.ins) + sum(o.nbytes for o in call.outs if o)
    return max(flops(call) / device.flops_per_s, moved / device.bytes_per_s)

"""Bytes on the fullest rank of a row: weights, gradients, optimizer state, what forward keeps, what is at work."""

from __future__ import annotations

from bench.published.bills import Bills
from bench.published.features import Features
from bench.published.rows import Row

CONTEXT_BYTES = 2e9
"""What the device's context, libraries and communicators keep. Assumed."""
FRAGMENTS = 1.04
"""What an allocator holds over what is asked of it. Assumed."""


def peak_bytes(
    row: Row, mbs: int, vp: int, made: Bills, whole: Bills, does: Features, zero: int, micro_batches: int
) -> int:
    """Of the first stage, or of the last where that holds more; `whole` is the bills without recompute."""
    b, k = made.params, made.kept_bytes
    layers = -(-row.layers // row.pp)
    last = layers * b["block"] + b["head"]
    first = layers * b["block"] + b["embed"] + (0 if row.tied or row.pp > 1 else b["head"])
    block = k["block"] * layers
    logits = mbs * (row.seq // row.cp) * row.vocab / row.tp
    head = k["head"] + logits * (2 if does.fused_loss else 6)
    again = max(0, whole.kept_bytes["block"] - k["block"]) if k["block"] < whole.kept_bytes["block"] else 0
    ahead = _under_way(row.pp, vp, micro_batches)
    holds = [(first, ahead * (block + k["embed"]) + (max(head, again) if row.pp == 1 else again))]
    if row.pp > 1:
        holds.append((last, min(2.0 - 1.0 / vp, float(micro_batches)) * block + max(head, again)))
    fullest = max(_weights(n, b["block"], zero, does, row) + held for n, held in holds)
    return int(FRAGMENTS * fullest + CONTEXT_BYTES)


def _under_way(places: int, vp: int, micro_batches: int) -> float:
    """Micro-batches that the first place keeps, in units of all its layers."""
    if places == 1:
        return 1.0
    if vp == 1:
        return float(min(places, micro_batches))
    return min((2 * (places - 1) + (vp - 1) * places + 1) / vp, float(micro_batches))


def _weights(elements: float, block: float, zero: int, does: Features, row: Row) -> float:
    """Weights, gradients and state of so many elements of the model on one rank."""
    half = row.precision not in ("f32", "tf32")
    grad = 4 if does.wide_grads else 2
    sharers = row.dp * row.cp if not row.hybrid else min(row.gpu.node, row.dp * row.cp)
    if zero == 3:
        state = 2 + 2 + 4 if row.pure else 4 + 4 + 8
        # In a pipeline weights stay together, and gradients are summed whole, until the step ends.
        together = (2 + grad) * elements if row.pp > 1 else 3 * 2 * block
        return state * elements / sharers + together
    if row.pure:
        return (2 + 2 + 4) * elements
    weight, state = (2, 12) if half else (4, 8)
    return elements * (weight + (grad if zero < 2 else grad / sharers) + state / (sharers if zero else 1))

"""Causal attention by blocks of queries: the same bits wherever a sequence is cut into stretches of whole blocks.

`attention_at` calls its kernel on all rows of a stretch, and a kernel's bits depend on how many rows it is given. So
where stretches change from step to step, or from one number of ranks to another, and bits must not, every block of
queries is worked out by itself: it reads the keys before it, then its own, always of the same shapes and lying in
memory in the same way, and merges the two in this order. Its rows of the output and of the gradient of the queries are
then the same in whatever stretch it lies.

A key's gradient is a sum over all blocks of queries that see it. Each block's term is handed to the caller, in single
precision at least, with the number of the block: added up in one fixed order over those numbers (a tree, so that ranks
can begin without each other), the sum does not depend on stretches either.

Covered: any length, causal or not, grouped queries, CPU in float32, bfloat16 and float64. Bits do depend on the block's
size, on the threads and on the machine's kind. Not covered: masks, and kernels that add up in no fixed order, as fused
ones on GPUs do in backward unless torch is told to be deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from laminar.capture.ops.attention import attention_at, attention_backward_at
from laminar.errors import PlacementError

AddTerm = Callable[[int, Tensor, Tensor], None]
"""Takes the number of a block of queries, and its terms of the gradients of all keys and of all values."""


def attention_by_blocks(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, offset: int, block: int
) -> tuple[Tensor, Tensor]:
    """`attention` of the queries from row `offset` of all, to all keys: the output, and the logsumexp of each row."""
    k, v = k.contiguous(), v.contiguous()
    parts = [
        attention_at(q[:, :, a:b].contiguous(), k, v, None, causal, scale, offset + a)
        for a, b in _blocks(q, k, offset, block)
    ]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def attention_backward_by_blocks(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    offset: int,
    block: int,
    add: AddTerm,
) -> Tensor:
    """The gradient of these queries; `add` is given each block's terms of the others, blocks in their order."""
    k, v = k.contiguous(), v.contiguous()
    wide = torch.promote_types(k.dtype, torch.float32)
    grads = []
    for a, b in _blocks(q, k, offset, block):
        rows = [x[:, :, a:b].contiguous() for x in (dout, q, out, lse)]
        dq, dk, dv = attention_backward_at(rows[0], rows[1], k, v, None, rows[2], rows[3], causal, scale, offset + a)
        grads.append(dq)
        add((offset + a) // block, dk.to(wide), dv.to(wide))
    return torch.cat(grads, 2)


def _blocks(q: Tensor, k: Tensor, offset: int, block: int) -> Iterator[tuple[int, int]]:
    """From where to where the blocks of a stretch go; refused unless it consists of whole blocks."""
    rows, keys = q.shape[2], k.shape[2]
    if block < 1 or offset % block or (rows % block and offset + rows != keys):
        raise PlacementError(
            f"rows {offset} to {offset + rows} of {keys} are no whole blocks of {block}", next="cut at multiples of it"
        )
    return ((a, min(a + block, rows)) for a in range(0, rows, block))

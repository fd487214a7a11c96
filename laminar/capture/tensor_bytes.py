"""A tensor's elements as bytes: for digests, checksums, constants and wires.

Torch shows a tensor in another dtype only if its last stride is one. A tensor of one element may have any stride (a
number that was expanded has none) and still counts as contiguous, and conjugates are no bytes until they are made.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Elements in order, as bytes; in the tensor's own memory where they lie in order already."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)

"""The loss of tokens as a total and a weight, which is what makes uneven shares exact.

The mean of means over micro-batches or ranks gives tokens of small ones more weight. A total over tokens, with how
many they are, is added over everything and divided once: then every token of the global batch has the same weight,
wherever it was computed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from laminar.capture.model.losses import Loss
from laminar.data.packing.packed import IGNORED


def token_loss(logits: Tensor, labels: Tensor, ignored: int = IGNORED) -> Loss:
    """Cross-entropy summed over tokens that have a label, and their number; classes are the last dim of `logits`."""
    flat = labels.reshape(-1)
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), flat, ignore_index=ignored, reduction="sum")
    return Loss(total, (flat != ignored).sum().to(torch.float64))

"""Elements that were kept as opaque numbers, as tensors of what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES


def tensor_from(array: Any, dtype: str) -> Tensor:
    """A tensor over an array's own elements, seen as this dtype."""
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return flat.view(DTYPES[dtype]).reshape(array.shape)

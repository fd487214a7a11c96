"""Files with weights, read slice by slice: what a rank does not need of a tensor it does not read.

A source knows names, shapes and dtypes before anything is read, so everything can be checked before a byte reaches a
model. None of them runs code that a file brings along. Errors are ours, with the file's name, whatever library reads.

To add one: write a class with these members, let `open_source.py` find it, and add a writer of such files to
`tests/train/test_formats.py`, which holds all of them against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from laminar.checkpoint.format.block_grid import Slices
from laminar.errors import StateError
from laminar.ir.tensor import TensorSpec


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def where(self) -> str:
        """The file or folder, for errors."""
        ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """What there is."""
        ...

    def read(self, name: str, index: Slices) -> Tensor:
        """One box of a tensor, on the CPU; no memory is shared with anything that lasts."""
        ...


def checked_slice(source: TensorSource, name: str, index: Slices, tensor: Tensor) -> Tensor:
    """What was read of a tensor, held against what the source said of it."""
    spec = source.specs[name]
    want = tuple(len(range(*part.indices(n))) for part, n in zip(index, spec.shape, strict=True))
    if tuple(tensor.shape) != want:
        raise StateError(f"{source.where}: {name} gave {list(tensor.shape)} where {list(want)} was read")
    return tensor


def copy_of(tensor: Tensor) -> Tensor:
    """A tensor in memory of its own, contiguous."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)

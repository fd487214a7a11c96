"""Files with weights, read slice by slice: what a rank does not need of a tensor it does not read.

A source knows names, shapes and dtypes before anything is read, so everything can be checked before a byte reaches a
model. None of them runs code that a file brings along. Errors are ours, with the file's name, whatever library reads.

To add one: write a class with these members, let `open_source` find it, and add a writer of such files to
`tests/train/test_formats.py`, which holds all of them against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from laminar.errors import StateError
from laminar.ir.tensor import TensorSpec
from laminar.train.state.shards import Slices

KNOWN = "a .safetensors file, a folder with model.safetensors.index.json, a file of torch.save, a DCP folder"


class TensorSource(Protocol):
    """Tensors by name."""

    where: str
    """The file or folder, for errors."""
    specs: Mapping[str, TensorSpec]
    """What there is."""

    def read(self, name: str, index: Slices) -> Tensor:
        """One box of a tensor, on the CPU; no memory is shared with anything that lasts."""
        ...


def open_source(path: str | Path) -> TensorSource:
    """A source for what lies at a path, by its kind."""
    from laminar.train.formats.dcp_source import DcpSource
    from laminar.train.formats.safetensors_source import SafetensorsSource
    from laminar.train.formats.torch_save_source import TorchSaveSource

    where = Path(path)
    if not where.exists():
        raise StateError(f"there is nothing at {where}", next=f"name {KNOWN}")
    if where.is_dir():
        if (where / ".metadata").is_file():
            return DcpSource(where)
        files = sorted(where.glob("*.safetensors"))
        if not files:
            raise StateError(f"{where} holds no weights that can be read", allowed=KNOWN)
        return SafetensorsSource.of_folder(where)
    if where.suffix == ".safetensors":
        return SafetensorsSource([where], str(where))
    return TorchSaveSource(where)


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

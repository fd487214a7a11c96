"""A file of `torch.save`: a state dict, or a dict that holds one. Only tensors and plain values are loaded from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import spec_of
from laminar.checkpoint.format.block_grid import Slices
from laminar.errors import CaptureError, StateError
from laminar.ir.tensor import TensorSpec
from laminar.train.formats.tensor_source import checked_slice, copy_of

HOLDERS = ("state_dict", "model_state_dict", "model", "module", "weights")
"""Keys under which training scripts keep a state dict."""


class TorchSaveSource:
    """Tensors of one file, which is mapped into memory where torch can do that."""

    def __init__(self, file: Path) -> None:
        self.where = str(file)
        self.tensors = _state_dict(weights_only(file), self.where)
        self.specs: dict[str, TensorSpec] = {}
        for name, tensor in self.tensors.items():
            try:
                self.specs[name] = spec_of(tensor)
            except CaptureError as error:
                raise StateError(f"{file}: {name}: {error.what}") from None

    def read(self, name: str, index: Slices) -> Tensor:
        """One box of a tensor."""
        return copy_of(checked_slice(self, name, index, self.tensors[name][index]))


def weights_only(file: Any, mapped: bool = True) -> Any:
    """What torch reads from a file without running any code of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that other programs wrote
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged file can fail in any way
        if mapped and "mmap" in str(error):  # files of before 2020 can't be mapped
            return weights_only(file, mapped=False)
        raise StateError(
            f"{file} can't be read as weights: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            next="save a state dict: torch.save(model.state_dict(), file)",
        ) from error


def _state_dict(found: Any, where: str) -> dict[str, Tensor]:
    for _ in range(3):
        if not isinstance(found, Mapping):
            break
        tensors = {str(k): v for k, v in found.items() if isinstance(v, Tensor)}
        if tensors:
            return tensors
        holder = next((k for k in HOLDERS if isinstance(found.get(k), Mapping)), None)
        if holder is None:
            break
        found = found[holder]
    raise StateError(f"{where} holds no state dict", allowed=f"one at the top or under {', '.join(HOLDERS)}")

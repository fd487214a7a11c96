"""The weights of one of our own checkpoints, read slice by slice, each block verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from laminar.checkpoint.format.block_grid import Slices
from laminar.checkpoint.format.state_record import TensorKey
from laminar.checkpoint.history.checkpoint_name import CheckpointName
from laminar.checkpoint.read.state_reader import StateReader
from laminar.checkpoint.store.uri import open_store
from laminar.errors import CheckpointError, StateError
from laminar.ir.tensor import TensorSpec
from laminar.train.formats.tensor_source import checked_slice
from laminar.train.state.opaque import tensor_from


class CheckpointSource:
    """Weights and buffers under the names of the model's state dict, or the weights' moving averages."""

    def __init__(self, name: CheckpointName, average: bool = False) -> None:
        ref = name.all_meant()[0]
        self.where = f"{name.store}#{ref.run}@{ref.step}"
        self._reader = StateReader(open_store(name.store), ref)
        self.names: Mapping[str, str] = _names(self._reader.manifest.about, self.where)
        """By name in the state dict the tensor that is meant: tied weights have several names."""
        self._keys: dict[str, TensorKey] = {}
        self.specs: dict[str, TensorSpec] = {}
        for shown, slot in self.names.items():
            kinds = ("average", "parameter", "buffer") if average else ("parameter", "buffer")
            keys = [
                TensorKey(kind, slot) for kind in kinds if TensorKey(kind, slot) in self._reader.manifest.state.by_key
            ]
            if keys:
                found = self._reader.tensor(keys[0])
                self._keys[shown], self.specs[shown] = keys[0], TensorSpec(found.shape, found.dtype)
        if average and not any(k.kind == "average" for k in self._keys.values()):
            raise StateError(f"{self.where} has no moving average", next="leave out --ema")

    def read(self, name: str, index: Slices) -> Tensor:
        """One box of a tensor."""
        spec = self.specs[name]
        box = tuple(slice(*part.indices(n)) for part, n in zip(index, spec.shape, strict=True))
        try:
            found = self._reader.read(self._keys[name], box)
        except CheckpointError as error:
            raise StateError(f"{self.where}: {error.what}", **error.lines) from error
        return checked_slice(self, name, index, tensor_from(found, spec.dtype))


def _names(about: Mapping[str, Any], where: str) -> dict[str, str]:
    found = about.get("names")
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise StateError(f"{where} does not say what the model's tensors are called")
    return found

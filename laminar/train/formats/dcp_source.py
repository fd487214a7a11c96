"""A folder of torch's distributed checkpoint (DCP), read without trusting it.

Its `.metadata` is a pickle, which may run any code when it is loaded in the usual way. Here only the classes that such
metadata is made of are let in, and what they say (files, offsets, sizes) is checked before it is used. Tensors lie in
chunks, each a small file of `torch.save` inside a larger file; chunks are loaded as weights only.
"""

from __future__ import annotations

import importlib
import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPE_NAMES
from laminar.checkpoint.format.block_grid import Slices
from laminar.errors import StateError
from laminar.ir.tensor import TensorSpec
from laminar.train.formats.tensor_source import checked_slice, copy_of
from laminar.train.formats.torch_save_source import weights_only

METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata BytesStorageMetadata MetadataIndex "
        "StorageMeta _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "Path PosixPath WindowsPath PurePosixPath",
    "collections": "OrderedDict",
}
"""Modules and those of their names that metadata may mention."""
MOST_METADATA_BYTES = 1 << 30


class DcpSource:
    """Tensors of a DCP folder."""

    def __init__(self, folder: Path) -> None:
        self.where, self.folder = str(folder), folder
        metadata = _metadata(folder)
        self.specs: dict[str, TensorSpec] = {}
        self._chunks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Any]]] = {}
        self._last: tuple[Any, Tensor] | None = None
        try:
            for name, about in metadata.state_dict_metadata.items():
                if hasattr(about, "chunks"):
                    self._take(name, about, metadata.storage_data)
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise StateError(f"{folder} has metadata that makes no sense: {error!r}") from error

    def _take(self, name: str, about: Any, storage: Any) -> None:
        shape = tuple(int(n) for n in about.size)
        dtype = DTYPE_NAMES.get(about.properties.dtype)
        if dtype is None:
            raise StateError(f"{self.where}: {name} has dtype {about.properties.dtype}")
        found = []
        for chunk in about.chunks:
            offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
            inside = len(offsets) == len(sizes) == len(shape) and all(
                o >= 0 and n >= 0 and o + n <= whole for o, n, whole in zip(offsets, sizes, shape, strict=True)
            )
            stored = [s for i, s in storage.items() if i.fqn == name and tuple(i.offset or ()) == offsets]
            if not inside or not stored:
                raise StateError(
                    f"{self.where}: {name} has a chunk at {list(offsets)} of {list(sizes)} that is nowhere"
                )
            self._lies(name, stored[0])
            found.append((offsets, sizes, stored[0]))
        self.specs[name] = TensorSpec(shape, dtype)
        self._chunks[name] = found

    def read(self, name: str, index: Slices) -> Tensor:
        """One box of a tensor, from all chunks that it overlaps."""
        spec = self.specs[name]
        wanted = [(p.start or 0, n if p.stop is None else p.stop) for p, n in zip(index, spec.shape, strict=True)]
        dtype = next(d for d, known in DTYPE_NAMES.items() if known == spec.dtype)
        out, filled = torch.empty([b - a for a, b in wanted], dtype=dtype), 0
        for offsets, sizes, stored in self._chunks[name]:
            both = [(max(a, o), min(b, o + n)) for (a, b), o, n in zip(wanted, offsets, sizes, strict=True)]
            if any(a >= b for a, b in both):
                continue
            chunk = self._chunk(name, stored, sizes)
            here = tuple(slice(a - o, b - o) for (a, b), o in zip(both, offsets, strict=True))
            there = tuple(slice(a - w, b - w) for (a, b), (w, _) in zip(both, wanted, strict=True))
            out[there] = chunk[here]
            filled += chunk[here].numel()
        if filled != out.numel():
            raise StateError(f"{self.where}: chunks of {name} give {filled} of {out.numel()} elements of {list(index)}")
        return checked_slice(self, name, index, copy_of(out))

    def _lies(self, name: str, stored: Any) -> tuple[Path, int, int]:
        """The file of a chunk, and from where to how far it lies there."""
        path, offset, length = str(stored.relative_path), int(stored.offset), int(stored.length)
        file = self.folder / path
        if Path(path).name != path or file.is_symlink() or not file.is_file():
            raise StateError(f"{self.where}: {name} is said to lie in {path!r}, which is no file of this folder")
        if offset < 0 or length < 0 or offset + length > file.stat().st_size:
            raise StateError(f"{file} is cut off: {name} is said to lie at {offset} to {offset + length}")
        return file, offset, length

    def _chunk(self, name: str, stored: Any, sizes: tuple[int, ...]) -> Tensor:
        if self._last is not None and self._last[0] is stored:
            return self._last[1]
        file, offset, length = self._lies(name, stored)
        with open(file, "rb") as opened:
            opened.seek(offset)
            tensor = weights_only(io.BytesIO(opened.read(length)), mapped=False)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != sizes:
            raise StateError(f"{file}: what lies at {offset} is not the part of {name} it is said to be")
        self._last = stored, tensor
        return tensor


class _Restricted(pickle.Unpickler):
    """Lets in what metadata is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib" and name in METADATA_NAMES["pathlib"].split():
            return pathlib.PurePosixPath  # it is only looked at
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in METADATA_NAMES.get(module, "").split():
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return getattr(importlib.import_module(module), name)


def _metadata(folder: Path) -> Any:
    file = folder / ".metadata"
    if file.stat().st_size > MOST_METADATA_BYTES:
        raise StateError(f"{file} is larger than metadata can be")
    try:
        with open(file, "rb") as opened:
            found = _Restricted(opened).load()
    except Exception as error:  # a pickle can fail in any way
        raise StateError(f"{file} is no metadata of DCP that can be trusted: {error}") from error
    if type(found).__name__ != "Metadata" or not isinstance(getattr(found, "storage_data", None), dict):
        raise StateError(f"{file} is no metadata of DCP")
    return found

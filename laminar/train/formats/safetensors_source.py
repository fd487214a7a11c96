"""Safetensors: one file, or a folder of several with the index that Hugging Face writes beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from laminar.checkpoint.format.block_grid import Slices
from laminar.errors import StateError
from laminar.ir.tensor import TensorSpec
from laminar.train.formats.tensor_source import checked_slice

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
DTYPES_IN_FILES = {
    "F64": "f64",
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "F8_E4M3": "f8e4m3",
    "F8_E5M2": "f8e5m2",
    "C64": "c64",
    "I64": "i64",
    "I32": "i32",
    "I16": "i16",
    "I8": "i8",
    "U8": "u8",
    "BOOL": "bool",
}
"""The format's names of dtypes, and ours."""


class SafetensorsSource:
    """Tensors of one or more files."""

    def __init__(self, files: Sequence[Path], where: str) -> None:
        self.where = where
        self.specs: dict[str, TensorSpec] = {}
        self._of: dict[str, Any] = {}
        for file in files:
            with said_of(file):
                from safetensors import safe_open

                opened: Any = safe_open(str(file), framework="pt")
                for name in opened.keys():  # noqa: SIM118 # no mapping: it has no iterator
                    if name in self.specs:
                        raise StateError(f"{where}: {name} stands in two files, {file.name} is the second")
                    self.specs[name] = _spec(opened.get_slice(name), f"{file}: {name}")
                    self._of[name] = opened

    @staticmethod
    def of_folder(folder: Path) -> SafetensorsSource:
        """The files that the folder's index names; without one `model.safetensors`, or the only file there is."""
        if (folder / INDEX).is_file():
            return SafetensorsSource(_indexed(folder), str(folder))
        found = sorted(folder.glob("*.safetensors"))
        if (folder / ONE_FILE).is_file():
            found = [folder / ONE_FILE]
        if len(found) != 1:
            raise StateError(
                f"{folder} holds {len(found)} safetensors files and no {INDEX}",
                files="  ".join(f.name for f in found[:5]),
                next="name the file that is meant",
            )
        return SafetensorsSource(found, str(folder))

    def read(self, name: str, index: Slices) -> Tensor:
        """One box of a tensor."""
        with said_of(Path(self.where)):
            opened = self._of[name]
            found: Tensor = opened.get_slice(name)[index] if index else opened.get_tensor(name)
        return checked_slice(self, name, index, found)


def _indexed(folder: Path) -> list[Path]:
    """The files of an index, each of which has to lie in its folder."""
    try:
        weights = json.loads((folder / INDEX).read_text())["weight_map"]
        names = sorted(set(weights.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{folder / INDEX} is no index of weights: {error}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise StateError(f"{folder / INDEX} names {name!r}, which is no file beside it")
    return [folder / name for name in names]


def _spec(part: Any, what: str) -> TensorSpec:
    dtype = str(part.get_dtype())
    if dtype not in DTYPES_IN_FILES:
        raise StateError(f"{what} has dtype {dtype}", allowed="  ".join(DTYPES_IN_FILES))
    return TensorSpec(tuple(int(n) for n in part.get_shape()), DTYPES_IN_FILES[dtype])


@contextmanager
def said_of(file: Path) -> Iterator[None]:
    """Whatever the library says of a file becomes an error of ours that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise StateError(f"{file} can't be read as safetensors: {error}") from error

"""Weights as Hugging Face keeps them: `model.safetensors`, or several files with an index where they are large.

Whole tensors are put together a few at a time and written as they come, so no rank ever holds the whole model for it.
Files appear under their names when they are whole and on disk, the index last; what an earlier export left is removed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from laminar.capture.tensor_bytes import as_bytes
from laminar.errors import StateError
from laminar.ir.tensor import TensorSpec
from laminar.train.formats.checkpoint_source import CheckpointSource
from laminar.train.formats.safetensors_source import DTYPES_IN_FILES, INDEX, ONE_FILE
from laminar.train.formats.tensor_source import TensorSource
from laminar.train.protocol import HasState

FILE_BYTES = 5_000_000_000
"""Of one file, at most, unless a single tensor is larger: what Hugging Face takes."""
AT_ONCE_BYTES = 1 << 28
"""Of whole tensors that are put together at once."""
NAMES_IN_FILES = {ours: theirs for theirs, ours in DTYPES_IN_FILES.items()}


@dataclass(frozen=True)
class WeightFile:
    """One file to write, and what goes into it, in order."""

    name: str
    tensors: tuple[tuple[str, TensorSpec], ...]

    @property
    def header(self) -> bytes:
        """Length and table of contents."""
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, spec in self.tensors:
            size = spec.nbytes
            table[name] = {
                "dtype": NAMES_IN_FILES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [at, at + size],
            }
            at += size
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def planned_files(specs: Sequence[tuple[str, TensorSpec]], file_bytes: int) -> list[WeightFile]:
    """Which tensors go into which file: in the model's order; inside a file wide elements first, so that all align."""
    groups: list[list[tuple[str, TensorSpec]]] = [[]]
    filled = 0
    for name, spec in specs:
        if spec.dtype not in NAMES_IN_FILES:
            raise StateError(f"{name} is {spec}, which safetensors has no name for", allowed="  ".join(NAMES_IN_FILES))
        if groups[-1] and filled + spec.nbytes > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, spec))
        filled += spec.nbytes
    ordered = [tuple(sorted(g, key=lambda t: -(t[1].nbytes // max(math.prod(t[1].shape), 1)))) for g in groups]
    if len(ordered) == 1:
        return [WeightFile(ONE_FILE, ordered[0])]
    stem = ONE_FILE.removesuffix(".safetensors")
    return [WeightFile(f"{stem}-{i:05}-of-{len(ordered):05}.safetensors", g) for i, g in enumerate(ordered, 1)]


def export(job: HasState, directory: str | Path, ema: bool = False, file_bytes: int = FILE_BYTES) -> list[str]:
    """Write the model's weights; every rank calls this, rank 0 writes. The names of the files."""
    if ema and job.state.ema_decay is None:
        raise StateError("this job keeps no moving average", next="parallelize(..., ema=0.999)")
    folder = Path(directory)
    files = planned_files(list(job.state.named_specs().items()), file_bytes)
    failed: str | None = None
    written: list[tuple[Path, Path]] = []
    for file in files:
        part = folder / f".{file.name}.part"
        # A rank that can't write goes on putting tensors together: the others would wait for it.
        for i, tensors in enumerate(_gathered(job, file, ema)):
            if job.peers.rank == 0 and failed is None:
                failed = _said(partial(_append, part, tensors, b"" if i else file.header))
        written.append((part, folder / file.name))
    if job.peers.rank == 0 and failed is None:
        failed = _said(partial(_in_place, folder, files, written))
    if job.peers.rank == 0 and failed is not None:
        for part, _ in written:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    failed = next((f for f in job.peers.gather_objects(failed) if f), None)
    if failed:
        raise StateError(f"{folder} could not be written: {failed}", next="see the disk, then export again")
    return [f.name for f in files]


def export_source(
    source: TensorSource, directory: str | Path, told: Callable[[str], None], file_bytes: int = FILE_BYTES
) -> list[str]:
    """The same of files that can be read, in this process alone; `told` hears of each tensor."""
    folder, first = Path(directory), dict[str, str]()
    for name in source.specs:
        first.setdefault(source.names.get(name, name) if isinstance(source, CheckpointSource) else name, name)
    files = planned_files([(n, source.specs[n]) for n in first.values()], file_bytes)
    written = [(folder / f".{f.name}.part", folder / f.name) for f in files]
    try:
        for file, (part, _) in zip(files, written, strict=True):
            _append(part, [], file.header)
            for name, spec in file.tensors:
                told(name)
                _append(part, [source.read(name, tuple(slice(0, n) for n in spec.shape))], b"")
        _in_place(folder, files, written)
    finally:
        for part, _ in written:
            part.unlink(missing_ok=True)
    return [f.name for f in files]


def _gathered(job: HasState, file: WeightFile, ema: bool) -> Iterator[list[Tensor]]:
    """The tensors of a file, whole, some at a time."""
    some: list[str] = []
    size = 0
    for name, spec in file.tensors:
        if some and size + spec.nbytes > AT_ONCE_BYTES:
            yield job.state.whole_named(job.gather, some, ema)
            some, size = [], 0
        some.append(name)
        size += spec.nbytes
    yield job.state.whole_named(job.gather, some, ema)


def _append(part: Path, tensors: Sequence[Tensor], header: bytes) -> None:
    """Tensors to the end of a file, which begins anew where there is a header."""
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "wb" if header else "ab") as opened:
        opened.write(header)
        for tensor in tensors:
            _write(opened, tensor)


def _write(opened: BinaryIO, tensor: Tensor) -> None:
    whole = tensor.detach().cpu().contiguous()
    if whole.numel():
        opened.write(as_bytes(whole).numpy().data)


def _in_place(folder: Path, files: Sequence[WeightFile], written: Sequence[tuple[Path, Path]]) -> None:
    for part, there in written:
        with open(part, "rb") as opened:
            os.fsync(opened.fileno())
        part.replace(there)
    names = {f.name for f in files}
    if len(files) > 1:
        total = sum(s.nbytes for f in files for _, s in f.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": {n: f.name for f in files for n, _ in f.tensors}}
        (folder / f".{INDEX}.part").write_text(json.dumps(index, indent=2) + "\n")
        (folder / f".{INDEX}.part").replace(folder / INDEX)
        names.add(INDEX)
    for left in (*folder.glob("model-*-of-*.safetensors"), folder / ONE_FILE, folder / INDEX):
        if left.name not in names:
            left.unlink(missing_ok=True)


def _said(act: Callable[[], None]) -> str | None:
    """What went wrong with the disk, if anything did."""
    try:
        act()
    except OSError as error:
        return str(error)
    return None

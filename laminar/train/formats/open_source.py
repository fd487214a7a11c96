"""Which kind of weights lies at a path, and a source for it."""

from __future__ import annotations

from pathlib import Path

from laminar.checkpoint.history.checkpoint_name import CheckpointName
from laminar.errors import StateError
from laminar.train.formats.checkpoint_source import CheckpointSource
from laminar.train.formats.dcp_source import DcpSource
from laminar.train.formats.safetensors_source import SafetensorsSource
from laminar.train.formats.tensor_source import TensorSource
from laminar.train.formats.torch_save_source import TorchSaveSource

READABLE = (
    "a .safetensors file, a folder with model.safetensors.index.json, a file of torch.save, a DCP folder, a checkpoint"
)


def open_source(path: str | Path) -> TensorSource:
    """A source for what lies at a path, by its kind."""
    name = CheckpointName.parse(path)
    if name.run or "://" in name.store or (Path(name.store) / "refs").is_dir():
        return CheckpointSource(name)
    where = Path(path)
    if not where.exists():
        raise StateError(f"there is nothing at {where}", next=f"name {READABLE}")
    if where.is_dir():
        if (where / ".metadata").is_file():
            return DcpSource(where)
        files = sorted(where.glob("*.safetensors"))
        if not files:
            raise StateError(f"{where} holds no weights that can be read", allowed=READABLE)
        return SafetensorsSource.of_folder(where)
    if where.suffix == ".safetensors":
        return SafetensorsSource([where], str(where))
    return TorchSaveSource(where)

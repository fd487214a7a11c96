"""Checkpoints that can be trusted: blocks by their hashes, one root over a run's state, verified before use.

`Save` writes one, `StateReader` reads parts of it, `verify_checkpoint` says what is damaged. Nothing here knows of a
framework: tensors are buffers with a name, a shape and a dtype, so a process that writes needs none. The format is in
`docs/checkpoint_format.md`. Names are resolved when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_WHERE = {
    "BlockPiece": "format.block_shares",
    "BlockShare": "format.block_shares",
    "BlockSource": "process.channel",
    "CheckpointRef": "history.references",
    "CheckpointSize": "read.compare",
    "Collected": "history.gc",
    "Damage": "read.verify",
    "HeldBox": "format.block_shares",
    "Keep": "history.retention",
    "Manifest": "format.manifest",
    "PieceSource": "process.channel",
    "Save": "history.save",
    "SharedSegment": "process.shared_memory",
    "SpreadTensor": "format.block_shares",
    "StateChanges": "read.compare",
    "StateReader": "read.state_reader",
    "StateRecord": "format.state_record",
    "Store": "store.protocol",
    "TensorKey": "format.state_record",
    "TensorRecord": "format.state_record",
    "Verified": "read.verify",
    "WriterProcess": "process.writer_client",
    "block_box": "format.block_grid",
    "block_count": "format.block_grid",
    "block_from_pieces": "format.block_shares",
    "blocks_of_box": "format.block_grid",
    "collect_garbage": "history.gc",
    "damaged_files": "read.verify",
    "diff_checkpoints": "read.compare",
    "drop_checkpoints": "history.retention",
    "last_sequence": "history.references",
    "latest_valid": "read.verify",
    "list_checkpoints": "read.compare",
    "list_refs": "history.references",
    "load_checkpoint": "history.references",
    "load_manifest": "history.references",
    "open_store": "store.uri",
    "share_blocks": "format.block_shares",
    "shun_damaged": "read.verify",
    "state_record": "format.state_record",
    "tensor_record": "format.state_record",
    "verify_checkpoint": "read.verify",
}
__all__ = [
    "BlockPiece",
    "BlockShare",
    "BlockSource",
    "CheckpointRef",
    "CheckpointSize",
    "Collected",
    "Damage",
    "HeldBox",
    "Keep",
    "Manifest",
    "PieceSource",
    "Save",
    "SharedSegment",
    "SpreadTensor",
    "StateChanges",
    "StateReader",
    "StateRecord",
    "Store",
    "TensorKey",
    "TensorRecord",
    "Verified",
    "WriterProcess",
    "block_box",
    "block_count",
    "block_from_pieces",
    "blocks_of_box",
    "collect_garbage",
    "damaged_files",
    "diff_checkpoints",
    "drop_checkpoints",
    "last_sequence",
    "latest_valid",
    "list_checkpoints",
    "list_refs",
    "load_checkpoint",
    "load_manifest",
    "open_store",
    "share_blocks",
    "shun_damaged",
    "state_record",
    "tensor_record",
    "verify_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'laminar.checkpoint' has no attribute {name!r}")
    found = import_module(f"{__name__}.{_WHERE[name]}")
    return getattr(found, name)


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from laminar.checkpoint.format.block_grid import block_box, block_count, blocks_of_box
    from laminar.checkpoint.format.block_shares import (
        BlockPiece,
        BlockShare,
        HeldBox,
        SpreadTensor,
        block_from_pieces,
        share_blocks,
    )
    from laminar.checkpoint.format.manifest import Manifest
    from laminar.checkpoint.format.state_record import StateRecord, TensorKey, TensorRecord, state_record, tensor_record
    from laminar.checkpoint.history.gc import Collected, collect_garbage
    from laminar.checkpoint.history.references import (
        CheckpointRef,
        last_sequence,
        list_refs,
        load_checkpoint,
        load_manifest,
    )
    from laminar.checkpoint.history.retention import Keep, drop_checkpoints
    from laminar.checkpoint.history.save import Save
    from laminar.checkpoint.process.channel import BlockSource, PieceSource
    from laminar.checkpoint.process.shared_memory import SharedSegment
    from laminar.checkpoint.process.writer_client import WriterProcess
    from laminar.checkpoint.read.compare import CheckpointSize, StateChanges, diff_checkpoints, list_checkpoints
    from laminar.checkpoint.read.state_reader import StateReader
    from laminar.checkpoint.read.verify import (
        Damage,
        Verified,
        damaged_files,
        latest_valid,
        shun_damaged,
        verify_checkpoint,
    )
    from laminar.checkpoint.store.protocol import Store
    from laminar.checkpoint.store.uri import open_store

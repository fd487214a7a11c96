"""What a store has, and how two checkpoints differ: by tensor, without reading a block.

Sizes are told in two ways: of the state (plain bytes of tensors), and of what the store keeps for it, alone or shared
with other checkpoints (stored bytes of blocks, bases of deltas included).
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.checkpoint.format.encoding import DELTAS
from laminar.checkpoint.format.manifest import Manifest
from laminar.checkpoint.format.state_record import TensorKey, TensorRecord
from laminar.checkpoint.history.references import CheckpointRef, list_refs, load_checkpoint
from laminar.checkpoint.packs.block_index import BlockIndex
from laminar.checkpoint.store.protocol import Store
from laminar.errors import CheckpointError, StorageError
from laminar.ir.tensor import TensorSpec


@dataclass(frozen=True)
class CheckpointSize:
    """A checkpoint, and what it takes."""

    ref: CheckpointRef
    state_bytes: int = 0
    """Of its tensors."""
    stored_bytes: int = 0
    """Of all blocks that are needed to read it."""
    new_bytes: int = 0
    """Of those among them that no checkpoint listed before it needs."""
    error: CheckpointError | None = None
    """Why nothing more is known of it."""


def list_checkpoints(store: Store, run: str | None = None) -> list[CheckpointSize]:
    """Checkpoints by run, oldest first, with their sizes."""
    index, seen, out = BlockIndex(store), set[bytes](), []
    for ref in list_refs(store, run).refs:
        try:
            manifest = load_checkpoint(store, ref)
        except StorageError:
            raise
        except CheckpointError as error:
            out.append(CheckpointSize(ref, error=error))
            continue
        stored = _stored_sizes(index, manifest)
        new = sum(size for block, size in stored.items() if block not in seen)
        seen |= set(stored)
        state = sum(_plain_bytes(t) for t in manifest.state.tensors)
        out.append(CheckpointSize(ref, state, sum(stored.values()), new))
    return out


def _plain_bytes(tensor: TensorRecord) -> int:
    return TensorSpec(tensor.shape, tensor.dtype).nbytes


def _stored_sizes(index: BlockIndex, manifest: Manifest) -> dict[bytes, int]:
    """Stored bytes of each block that a checkpoint needs."""
    out: dict[bytes, int] = {}
    wanted = [t.block(n) for t in manifest.state.tensors for n in range(t.blocks)]
    while wanted:
        block = wanted.pop()
        place = next((p for _, p in index.places(block)), None)
        if block in out or place is None:
            continue
        out[block] = place.stored_bytes
        if place.encoding in DELTAS:
            wanted.append(place.base)
    return out


@dataclass(frozen=True)
class TensorChange:
    """A tensor that is not the same in two checkpoints."""

    key: TensorKey
    before: str
    """Shape and dtype; empty where there is none."""
    after: str
    changed_blocks: int = 0
    """Of blocks that both have in one place; what is in them is not looked at."""
    blocks: int = 0


@dataclass(frozen=True)
class StateChanges:
    """How two states differ. Equal roots differ in nothing."""

    tensors: tuple[TensorChange, ...]
    scalars: tuple[str, ...]
    """Names at the top of the scalars whose values differ."""

    @property
    def same(self) -> bool:
        """Whether they are the same, bit for bit."""
        return not self.tensors and not self.scalars


def diff_checkpoints(one: Manifest, other: Manifest) -> StateChanges:
    """From one checkpoint to another."""
    before, after = one.state.by_key, other.state.by_key
    changes = []
    for key in sorted({*before, *after}):
        a, b = before.get(key), after.get(key)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            changes.append(TensorChange(key, _said(a), _said(b)))
        elif a.hashes != b.hashes:
            count = sum(a.block(n) != b.block(n) for n in range(a.blocks))
            changes.append(TensorChange(key, _said(a), _said(b), count, a.blocks))
    first, second = one.state.scalars, other.state.scalars
    missing = object()
    names = [n for n in sorted({*first, *second}) if first.get(n, missing) != second.get(n, missing)]
    return StateChanges(tuple(changes), tuple(names))


def _said(tensor: TensorRecord | None) -> str:
    return "" if tensor is None else str(TensorSpec(tensor.shape, tensor.dtype))

"""What is wrong with a checkpoint: every damaged block by its tensor and place; and the last one that is whole.

Verifying reads and hashes everything, block by block, in bounded memory. A block that several tensors share is read
once and reported for each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laminar.checkpoint.format.block_grid import Slices, block_box, box_shape
from laminar.checkpoint.format.hashing import block_hash
from laminar.checkpoint.format.state_record import TensorKey
from laminar.checkpoint.history.references import (
    DAMAGED,
    MANIFESTS,
    CheckpointRef,
    list_refs,
    load_checkpoint,
    load_manifest,
)
from laminar.checkpoint.packs.block_index import PACKS, BlockIndex
from laminar.checkpoint.packs.block_reader import BlockReader
from laminar.checkpoint.packs.pack_format import PACK_MAGIC
from laminar.checkpoint.store.protocol import Store
from laminar.errors import CheckpointError, StorageError


@dataclass(frozen=True)
class Damage:
    """Something of a checkpoint that is not as it was written."""

    what: str
    tensor: TensorKey | None = None
    """None: the checkpoint as a whole can't be read."""
    block: int = 0
    box: Slices = ()
    """Where in the tensor the block lies."""

    def __str__(self) -> str:
        if self.tensor is None:
            return self.what
        place = ", ".join(f"{s.start}:{s.stop}" for s in self.box)
        return f"{self.tensor} block {self.block} [{place}]: {self.what}"


@dataclass(frozen=True)
class Verified:
    """What came of verifying a checkpoint."""

    ref: CheckpointRef
    damage: tuple[Damage, ...]
    blocks: int = 0
    """Different ones that were read."""
    plain_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.damage


def verify_checkpoint(
    store: Store, ref: CheckpointRef, blocks: BlockReader | None = None, deep: bool = True
) -> Verified:
    """Read all of a checkpoint; not `deep`: its manifest alone, and whether packs are there that have its blocks."""
    try:
        manifest = load_checkpoint(store, ref)
    except CheckpointError as error:
        return Verified(ref, (Damage(error.what),))
    reader = BlockReader(store) if blocks is None else blocks
    damage: list[Damage] = []
    seen: dict[tuple[bytes, int], str] = {}
    for tensor in manifest.state.tensors:
        for number in range(tensor.blocks):
            box = block_box(tensor.shape, tensor.item_bytes, number)
            one = tensor.block(number), math.prod(box_shape(box)) * tensor.item_bytes
            if one not in seen:
                seen[one] = _wrong_with(reader, *one, deep)
            if seen[one]:
                damage.append(Damage(seen[one], tensor.key, number, box))
    return Verified(ref, tuple(damage), len(seen), sum(size for _, size in seen))


def _wrong_with(reader: BlockReader, block: bytes, plain_bytes: int, deep: bool) -> str:
    if not deep:
        return "" if block in reader.index else "no pack has it"
    try:
        reader.read(block, plain_bytes)
    except StorageError:
        raise  # the store can't be asked: that says nothing about the checkpoint
    except CheckpointError as error:
        return error.what
    return ""


def damaged_files(store: Store) -> dict[str, str]:
    """Files of a store that are not as they were written, whether a checkpoint needs them or not, and what is wrong.

    This reads every byte: of packs, each block as it is stored, whose hash the pack's index has.
    """
    index, refs = BlockIndex(store), list_refs(store)
    bad = {key: error.what for key, error in (*index.damaged.items(), *refs.damaged.items())}
    for file in store.list(MANIFESTS):
        try:
            load_manifest(store, file.key.partition("/")[2])
        except StorageError:
            raise
        except CheckpointError as error:
            bad[file.key] = error.what
    for pack, places in index.packs().items():
        if store.read(pack, 0, len(PACK_MAGIC)) != PACK_MAGIC:
            bad[pack] = "it does not begin as packs do"
        for place in places:
            if block_hash(store.read(pack, place.offset, place.stored_bytes)) != place.stored_hash:
                bad[pack] = f"the block {place.hash.hex()[:12]} has another hash"
    return dict(sorted(bad.items()))


def shun_damaged(store: Store) -> tuple[str, ...]:
    """Have new saves write again what they find in packs with damage, instead of sharing it; those packs.

    For when something was found damaged. A block that is written again mends the checkpoints that share it.
    """
    packs = tuple(key for key in damaged_files(store) if key.startswith(f"{PACKS}/"))
    for pack in packs:
        store.put(f"{DAMAGED}/{pack.partition('/')[2]}", b"")
    return packs


@dataclass(frozen=True)
class LatestValid:
    """The last checkpoint that is whole, and what is wrong with those after it."""

    ref: CheckpointRef | None
    passed_over: tuple[Verified, ...]
    damaged_refs: dict[str, CheckpointError]


def latest_valid(store: Store, run: str, deep: bool = True) -> LatestValid:
    """A run's last checkpoint that verifies."""
    found, reader = list_refs(store, run), BlockReader(store)
    passed: list[Verified] = []
    for ref in reversed(found.refs):
        verified = verify_checkpoint(store, ref, reader, deep)
        if verified.ok:
            return LatestValid(ref, tuple(passed), found.damaged)
        passed.append(verified)
    return LatestValid(None, tuple(passed), found.damaged)

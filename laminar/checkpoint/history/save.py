"""A save: blocks into packs, then the manifest, then one reference. Wherever it stops, the store has old or new.

    with Save(store) as save:
        tensor = save.tensor(key, "f32", (64, 128), array)          # or `save.blocks.add` block by block
        ref = save.commit(Manifest(run, step, state_record([tensor], scalars)), after=last.sequence)

Several processes may write the blocks of one checkpoint: each with a `Save` of its own, whose `finish` it calls; one of
them is told all hashes and commits, and only then may any of them give its lease back (leave the block).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from laminar.checkpoint.format.block_grid import block_box, block_count
from laminar.checkpoint.format.manifest import Manifest
from laminar.checkpoint.format.state_record import TensorKey, TensorRecord, tensor_record
from laminar.checkpoint.history.leases import LEASE_S, Lease
from laminar.checkpoint.history.references import CONDEMNED, DAMAGED, MANIFESTS, CheckpointRef, pack_of, read_ref
from laminar.checkpoint.packs.block_index import BlockIndex
from laminar.checkpoint.packs.block_writer import BlockWriter, Written
from laminar.checkpoint.store.protocol import MissingKeyError, Store
from laminar.errors import CheckpointError
from laminar.ir.tensor import ITEM_BYTES

LOW_PRECISION = ("bf16", "f16", "f8e4m3", "f8e5m2")
"""What is tried as a delta to the checkpoint before: few of its bits change in a step."""


class Save:
    """One process's part of a save."""

    def __init__(self, store: Store, compress: bool = True, threads: int = 1, lease_s: float = LEASE_S) -> None:
        self.store = store
        self._lease = Lease(store, lease_s)
        try:
            shun = frozenset(pack_of(f.key) for folder in (CONDEMNED, DAMAGED) for f in store.list(folder))
            self.index = BlockIndex(store)
            self.blocks = BlockWriter(store, self._lease.name, self.index, shun, compress, threads)
        except BaseException:
            self._lease.give_back()
            raise

    def tensor(
        self,
        key: TensorKey,
        dtype: str,
        shape: Sequence[int],
        array: NDArray[np.generic],
        parent: TensorRecord | None = None,
    ) -> TensorRecord:
        """Write a whole tensor, which stays as it is until `finish`; `parent` is the same one a checkpoint before."""
        size = ITEM_BYTES[dtype]
        if array.itemsize != size or array.shape != tuple(shape):
            raise CheckpointError(f"{key}: an array of {array.dtype}{list(array.shape)} is no {dtype}{list(shape)}")
        hashes = []
        for number in range(block_count(shape, size)):
            content = np.ascontiguousarray(array[block_box(shape, size, number)]).reshape(-1).view(np.uint8)
            hashes.append(self.blocks.add(content.data, base_block(parent, dtype, shape, number), size))
        return tensor_record(key, dtype, shape, hashes)

    def finish(self) -> Written:
        """Everything that was added is durable, though nothing refers to it yet."""
        return self.blocks.finish()

    def commit(self, manifest: Manifest, after: int = 0) -> CheckpointRef:
        """Make the checkpoint one of its run, the one after number `after`; 0 begins a run."""
        self.finish()
        self.index.refresh()
        manifest = replace(manifest, save=self._lease.name)
        _refuse_without_blocks(self.index, manifest)
        self.store.put(f"{MANIFESTS}/{manifest.hash}", manifest.data)
        ref = CheckpointRef(manifest.run, after + 1, manifest.step, manifest.hash, manifest.state.root)
        self._lease.check()
        if not self.store.put_new(ref.key, ref.data) and self.store.read(ref.key) != ref.data:
            raise _taken(self.store, ref)
        try:
            self._lease.check()
            self.index.refresh()
            _refuse_without_blocks(self.index, manifest)
        except CheckpointError:
            self.store.delete(ref.key)  # stopped in the moment before: what it counts on is or may be gone
            raise
        return ref

    def abort(self) -> None:
        """Give up: nothing refers to what was written, and the next cleaning removes it."""
        try:
            self.blocks.abort()
        finally:
            self._lease.give_back()

    def __enter__(self) -> Save:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()  # harmless behind a commit


def base_block(parent: TensorRecord | None, dtype: str, shape: Sequence[int], number: int) -> bytes | None:
    """The block that this one may be stored as a delta to."""
    if parent is None or dtype not in LOW_PRECISION or (parent.dtype, parent.shape) != (dtype, tuple(shape)):
        return None
    return parent.block(number)


def _refuse_without_blocks(index: BlockIndex, manifest: Manifest) -> None:
    for tensor in manifest.state.tensors:
        for number in range(tensor.blocks):
            if tensor.block(number) not in index:
                raise CheckpointError(
                    f"block {number} of {tensor.key} was not written", next="finish all parts of a save, then commit"
                )


def _taken(store: Store, ref: CheckpointRef) -> CheckpointError:
    try:
        other = f"it has step {read_ref(store, ref.key).step}"
    except (MissingKeyError, CheckpointError):
        other = "it can't be read"
    return CheckpointError(
        f"checkpoint {ref.sequence} of the run {ref.run} is there already ({other}): another process writes this run",
        next="resume the run from its last checkpoint, or begin another one",
    )

"""Where a rank's blocks go: into memory that a process without torch hashes and writes from, or a thread of this one.

The process is worth its start where there is something to write. Small states, stores in this process's own memory, and
systems without anonymous files are written by the thread that saves.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from laminar.checkpoint.format.manifest import Manifest
from laminar.checkpoint.history.references import CheckpointRef
from laminar.checkpoint.history.save import Save
from laminar.checkpoint.packs.block_writer import Written
from laminar.checkpoint.process.channel import BlockSource, PieceSource
from laminar.checkpoint.process.shared_memory import SharedSegment
from laminar.checkpoint.process.writer_client import WriterProcess
from laminar.checkpoint.store.protocol import Store

PROCESS_FROM_BYTES = 32 << 20
"""A process takes a third of a second of one core to start (measured): writing so much does as well."""


@dataclass(frozen=True)
class BlockToWrite:
    """A block that lies in the sink's memory."""

    offset: int
    shape: tuple[int, ...]
    item_bytes: int
    nbytes: int
    base: bytes | None
    """Hash of a block to which it may be stored as a delta."""


class BlockSink(Protocol):
    """What takes a rank's blocks of one save after the other. Calls come from one thread at a time."""

    def room(self, nbytes: int) -> memoryview:
        """Memory for so many bytes: the same at each call for as many, free once `end` has returned."""
        ...

    def write(self, blocks: Sequence[BlockToWrite]) -> tuple[list[bytes], Written]:
        """Begin a save and write these blocks: when this returns they are durable. Their hashes."""
        ...

    def commit(self, manifest: Manifest, after: int) -> CheckpointRef:
        """Make it a checkpoint."""
        ...

    def end(self) -> None:
        """The save is over, committed or not."""
        ...

    def close(self) -> None:
        """No more saves."""
        ...


class ThreadSink:
    """Hashes and writes in the thread that calls."""

    def __init__(self, store: Store, compress: bool) -> None:
        self.store, self.compress = store, compress
        self._memory = memoryview(b"")
        self._save: Save | None = None

    def room(self, nbytes: int) -> memoryview:
        """Memory of this process."""
        if len(self._memory) != nbytes:
            self._memory = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
        return self._memory

    def write(self, blocks: Sequence[BlockToWrite]) -> tuple[list[bytes], Written]:
        """One after the other; a thread of `Save` writes what was hashed."""
        self._save = Save(self.store, self.compress)
        add = self._save.blocks.add
        hashes = [add(self._memory[b.offset : b.offset + b.nbytes], b.base, b.item_bytes) for b in blocks]
        return hashes, self._save.finish()

    def commit(self, manifest: Manifest, after: int) -> CheckpointRef:
        """See `Save.commit`."""
        assert self._save is not None
        return self._save.commit(manifest, after)

    def end(self) -> None:
        """Give the lease back."""
        if self._save is not None:
            self._save.abort()
            self._save = None

    def close(self) -> None:
        """Nothing is left to do."""
        self.end()


class ProcessSink:
    """Hands blocks to a process that hashes and writes them."""

    def __init__(self, store: Store, compress: bool) -> None:
        self._writer = WriterProcess(store.uri, most_bytes=1 << 62, compress=compress)
        self._segment: SharedSegment | None = None

    def room(self, nbytes: int) -> memoryview:
        """Memory that the process sees."""
        if self._segment is None or self._segment.nbytes != nbytes:
            if self._segment is not None:
                self._writer.free(self._segment)
            self._segment = self._writer.segments.segment(nbytes)
        return self._segment.memory

    def write(self, blocks: Sequence[BlockToWrite]) -> tuple[list[bytes], Written]:
        """All at once; the process works them off."""
        assert self._segment is not None
        begun = self._writer.begin()
        sources = [
            BlockSource(
                b.shape,
                b.item_bytes,
                (PieceSource(b.offset, b.shape, tuple((0, n) for n in b.shape), (0,) * len(b.shape)),),
                None if b.base is None else b.base.hex(),
            )
            for b in blocks
        ]
        hashes, written = self._writer.add(self._segment, sources), self._writer.finish()
        begun.result()
        return hashes.result(), written.result()

    def commit(self, manifest: Manifest, after: int) -> CheckpointRef:
        """See `Save.commit`."""
        return self._writer.commit(manifest, after).result()

    def end(self) -> None:
        """Give the lease back."""
        self._writer.end().result()

    def close(self) -> None:
        """End the process."""
        self._writer.close()


def sink_for(store: Store, nbytes: int, compress: bool) -> BlockSink:
    """What suits so many bytes and this store."""
    own = store.uri.startswith("memory://")
    return ThreadSink(store, compress) if own or nbytes < PROCESS_FROM_BYTES else ProcessSink(store, compress)

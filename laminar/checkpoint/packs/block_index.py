"""Which blocks a store has, and in which packs: the indexes of all of them, read at their ends.

A pack that can't be read is left out and remembered (`damaged`): its blocks count as missing, and whoever needs one of
them says so. A block may be in several packs; each of them will do. Indexes are kept as they were read, 114 bytes a
block, and looked into when a block is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from laminar.checkpoint.packs.pack_format import (
    FOOTER,
    PACK_MAGIC,
    RECORD,
    BlockPlace,
    checked_index,
    damaged_pack,
    index_bytes,
    read_record,
)
from laminar.checkpoint.store.protocol import MissingKeyError, Store
from laminar.errors import CheckpointError, StorageError

PACKS = "packs"
READERS = 8
"""Indexes that are read at a time: object stores take long to answer, and answer many."""


class BlockIndex:
    """Where blocks are."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._indexes: dict[str, bytes] = {}
        self._where: dict[bytes, list[tuple[str, int]]] = {}
        self.damaged: dict[str, CheckpointError] = {}
        """By pack, what is wrong with it."""
        self.refresh()

    def refresh(self) -> None:
        """Look for packs that came or went."""
        there = {file.key: file.size for file in self._store.list(PACKS)}
        if set(self._indexes) - set(there):
            self._indexes = {k: v for k, v in self._indexes.items() if k in there}
            self._where = {}
            for pack in self._indexes:
                self._take(pack)
        self.damaged = {k: v for k, v in self.damaged.items() if k in there}
        new = [(k, size) for k, size in there.items() if k not in self._indexes and k not in self.damaged]
        if not new:
            return
        with ThreadPoolExecutor(READERS) as pool:
            for pack, found in pool.map(lambda one: (one[0], self._read(*one)), new):
                if isinstance(found, bytes):
                    self._indexes[pack] = found
                    self._take(pack)
                elif found is not None:
                    self.damaged[pack] = found

    def _read(self, pack: str, size: int) -> bytes | CheckpointError | None:
        """A pack's index, or what is wrong with it; nothing if the pack is gone again."""
        try:
            if size < len(PACK_MAGIC) + FOOTER.size:
                raise damaged_pack(pack, "it has no proper end")
            footer = self._store.read(pack, size - FOOTER.size, FOOTER.size)
            length = index_bytes(footer, size, pack)
            index = self._store.read(pack, size - FOOTER.size - length, length)
            return checked_index(index, footer, size, pack)
        except MissingKeyError:
            return None
        except StorageError:
            raise  # the store can't be asked: that says nothing about the pack
        except CheckpointError as error:
            return error

    def _take(self, pack: str) -> None:
        index = self._indexes[pack]
        for number in range(len(index) // RECORD.size):
            at = number * RECORD.size
            self._where.setdefault(index[at : at + 32], []).append((pack, number))

    def __contains__(self, block: bytes) -> bool:
        return block in self._where

    def places(self, block: bytes) -> Iterator[tuple[str, BlockPlace]]:
        """Where a block is: packs, and places in them; the shortest chain of deltas first."""
        found = [(pack, read_record(self._indexes[pack], n)) for pack, n in self._where.get(block, ())]
        yield from sorted(found, key=lambda one: one[1].depth)

    def packs(self) -> dict[str, list[BlockPlace]]:
        """What each pack holds."""
        return {k: [read_record(v, n) for n in range(len(v) // RECORD.size)] for k, v in self._indexes.items()}

"""Blocks read: found through an index, decoded, and held against the hash that was asked for before anyone sees them.

A damaged copy of a block is passed over if another pack has it as well. A pack that is gone since its index was read
(its blocks were moved together with others) is looked for once more. Reading keeps nothing but the blocks at hand: a
delta needs its base, which may be a delta, at most `MOST_DELTAS` deep.
"""

from __future__ import annotations

from itertools import islice

from laminar.checkpoint.format.encoding import DELTAS, MOST_DELTAS, decode_block
from laminar.checkpoint.format.hashing import Content, block_hash
from laminar.checkpoint.packs.block_index import BlockIndex
from laminar.checkpoint.packs.pack_format import BlockPlace
from laminar.checkpoint.store.protocol import MissingKeyError, Store
from laminar.errors import CheckpointError, StorageError

MOST_COPIES = 2
"""Of a block that are tried: a store full of bad copies, each upon others, must not keep a reader busy for ever."""


class BlockReader:
    """Reads blocks of a store."""

    def __init__(self, store: Store, index: BlockIndex | None = None) -> None:
        self.store = store
        self.index = BlockIndex(store) if index is None else index

    def read(self, block: bytes, plain_bytes: int) -> Content:
        """A block's content, which has this hash and this length."""
        try:
            return self._read(block, plain_bytes, MOST_DELTAS)
        except MissingKeyError:
            self.index.refresh()
            return self._read(block, plain_bytes, MOST_DELTAS)

    def _read(self, block: bytes, plain_bytes: int, deepest: int) -> Content:
        said = "no pack has it"
        gone = None
        for pack, place in islice(self.index.places(block), MOST_COPIES):
            try:
                return self._at(pack, place, plain_bytes, deepest)
            except MissingKeyError as error:
                gone = error
            except StorageError:
                raise  # the store can't be asked: that says nothing about the block
            except (CheckpointError, ValueError) as error:
                said = f"{pack}: {error.what if isinstance(error, CheckpointError) else error}"
        if gone is not None:
            raise gone
        raise CheckpointError(f"the block {block.hex()[:12]} can't be read: {said}", next="use another checkpoint")

    def _at(self, pack: str, place: BlockPlace, plain_bytes: int, deepest: int) -> Content:
        if place.plain_bytes != plain_bytes:
            raise ValueError(f"a block of {place.plain_bytes} bytes, not {plain_bytes}")
        if place.depth > deepest:
            raise ValueError("its chain of deltas does not end")
        stored = self.store.read(pack, place.offset, place.stored_bytes)
        base = self._read(place.base, plain_bytes, place.depth - 1) if place.encoding in DELTAS else None
        if place.encoding and block_hash(stored) != place.stored_hash:
            raise ValueError("what is stored has another hash")
        plain = decode_block(place.encoding, stored, plain_bytes, base)
        if block_hash(plain) != place.hash:
            raise ValueError("its content has another hash")
        return plain

    def has(self, block: bytes) -> bool:
        """Whether a block is there, as the packs' indexes say."""
        return block in self.index

"""Packs most of whose bytes nobody needs any more: what is needed of them is copied into new packs.

A manifest does not say where blocks lie, so moving them changes no checkpoint; a reader that finds a pack gone looks
for its blocks again. Blocks are copied as they are stored, and only if they have the hash they should have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from laminar.checkpoint.format.encoding import DELTAS
from laminar.checkpoint.format.hashing import block_hash
from laminar.checkpoint.packs.block_index import PACKS
from laminar.checkpoint.packs.block_writer import PACK_BYTES
from laminar.checkpoint.packs.pack_format import PACK_MAGIC, BlockPlace, pack_end
from laminar.checkpoint.store.protocol import Store, Upload

SPARSE = 0.5
"""A pack is copied when less than this share of its bytes is needed."""
LEAST_FREED_BYTES = 1 << 20
"""And when that frees at least so much."""
PackPlaces = dict[str, list[BlockPlace]]


def needed_blocks(packs: PackPlaces, live: set[bytes]) -> set[bytes]:
    """Blocks that checkpoints have, and the bases of those that are deltas."""
    bases: dict[bytes, set[bytes]] = {}
    for places in packs.values():
        for place in places:
            if place.encoding in DELTAS:
                bases.setdefault(place.hash, set()).add(place.base)
    out, rest = set(live), list(live)
    while rest:
        for base in bases.get(rest.pop(), ()):
            if base not in out:
                out.add(base)
                rest.append(base)
    return out


def copy_out_of_sparse(
    store: Store, packs: PackPlaces, live: set[bytes], name: str, go_on: Callable[[], None]
) -> set[str]:
    """Packs that may go, because all that is needed of them is in others now: `packs` has the new ones as well.

    `go_on` is called for each of them; it may raise.
    """
    needed, sparse = needed_blocks(packs, live), set()
    for pack, places in packs.items():
        whole = sum(p.stored_bytes for p in places)
        used = sum(p.stored_bytes for p in places if p.hash in needed)
        if 0 < used < SPARSE * whole and whole - used >= LEAST_FREED_BYTES:
            sparse.add(pack)
    there = {p.hash for pack, places in packs.items() if pack not in sparse for p in places if p.hash in needed}
    target = _Copies(store, name)
    try:
        for pack in sorted(sparse):
            go_on()
            for place in packs[pack]:
                if place.hash in needed and place.hash not in there:
                    data = store.read(pack, place.offset, place.stored_bytes)
                    if block_hash(data) == place.stored_hash:  # else it stays where it is
                        target.add(place, data)
                        there.add(place.hash)
        target.end()
    finally:
        target.abort()
    packs |= target.made
    return sparse


class _Copies:
    """New packs, filled one after the other."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self.made: PackPlaces = {}
        self._begin()

    def _begin(self) -> None:
        self._key = f"{PACKS}/{self._name}-{len(self.made)}.pack"
        self._places: list[BlockPlace] = []
        self._offset = len(PACK_MAGIC)
        self._upload: Upload | None = None

    def add(self, place: BlockPlace, data: bytes) -> None:
        if self._upload is None:
            self._upload = self._store.upload(self._key)
            self._upload.write(PACK_MAGIC)
        self._upload.write(data)
        self._places.append(replace(place, offset=self._offset))
        self._offset += len(data)
        if self._offset >= PACK_BYTES:
            self.end()

    def end(self) -> None:
        if self._upload is not None:
            self._upload.write(pack_end(self._places))
            self._upload.commit()
            self.made[self._key] = self._places
            self._begin()

    def abort(self) -> None:
        if self._upload is not None:
            self._upload.abort()

"""A pack: one file with many blocks, so that a save syncs few files however many tensors there are.

    magic  "LAMPACK1"
    blocks as they are stored, one after the other
    index  one record of 114 bytes for each block
    footer length of the index, its BLAKE3, "LAMPEND1"

A record says a block's hash, where its bytes are, how long they are stored and plain, how they are stored, how many
deltas deep, upon which base, and the hash of the stored bytes. Records stand in the order of blocks, without gaps, so
that every byte of the file is covered by a hash. An index only says where to look: what is read has to have the hash
that a manifest asked for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from laminar.checkpoint.format.block_grid import BLOCK_BYTES
from laminar.checkpoint.format.encoding import DELTAS, ENCODINGS, MOST_DELTAS, UNCODED
from laminar.checkpoint.format.hashing import HASH_BYTES, block_hash, hash_as
from laminar.errors import CheckpointError

PACK_MAGIC, PACK_END = b"LAMPACK1", b"LAMPEND1"
RECORD = struct.Struct(">32sQIIBB32s32s")
FOOTER = struct.Struct(">Q32s8s")
MOST_INDEX_BYTES = 64 << 20
NO_BASE = bytes(HASH_BYTES)


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block is stored, and how."""

    hash: bytes
    offset: int
    stored_bytes: int
    plain_bytes: int
    encoding: int
    depth: int
    base: bytes
    """The hash of the block it is a delta to; zeros if it is none."""
    stored_hash: bytes


def pack_end(places: list[BlockPlace]) -> bytes:
    """Index and footer."""
    index = b"".join(
        RECORD.pack(p.hash, p.offset, p.stored_bytes, p.plain_bytes, p.encoding, p.depth, p.base, p.stored_hash)
        for p in places
    )
    return index + FOOTER.pack(len(index), hash_as("index", index), PACK_END)


def read_record(index: bytes, number: int) -> BlockPlace:
    """A block's record in an index."""
    return BlockPlace(*RECORD.unpack_from(index, number * RECORD.size))


def index_bytes(footer: bytes, file_bytes: int, name: str) -> int:
    """How long a pack's index is, as the pack's last bytes say."""
    length, _, end = FOOTER.unpack(footer)
    if end != PACK_END or length % RECORD.size or not 0 < length <= min(MOST_INDEX_BYTES, file_bytes - FOOTER.size):
        raise damaged_pack(name, "it has no proper end")
    return int(length)


def checked_index(index: bytes, footer: bytes, file_bytes: int, name: str) -> bytes:
    """An index, if it has the hash in the footer and covers the file without gaps or overlaps."""
    if hash_as("index", index) != FOOTER.unpack(footer)[1]:
        raise damaged_pack(name, "its index has another hash")
    at = len(PACK_MAGIC)
    for number in range(len(index) // RECORD.size):
        p = read_record(index, number)
        delta = p.encoding in DELTAS
        sound = p.offset == at and p.encoding < len(ENCODINGS) and 0 < p.plain_bytes <= BLOCK_BYTES
        sound &= 0 < p.stored_bytes <= p.plain_bytes and (p.encoding != UNCODED or p.stored_bytes == p.plain_bytes)
        sound &= (0 < p.depth <= MOST_DELTAS) if delta else (p.depth == 0 and p.base == NO_BASE)
        if not sound:
            raise damaged_pack(name, f"record {number} of its index makes no sense")
        at += p.stored_bytes
    if at != file_bytes - FOOTER.size - len(index):
        raise damaged_pack(name, "its index does not cover it")
    return index


def stored_hash(place_hash: bytes, encoding: int, data: bytes | bytearray | memoryview) -> bytes:
    """The hash of what is stored, which for a plain block is its own."""
    return place_hash if encoding == UNCODED else block_hash(data)


def damaged_pack(name: str, what: str) -> CheckpointError:
    """The error that a pack can't be used."""
    return CheckpointError(
        f"{name} is damaged: {what}", next="`laminar.checkpoint.verify_checkpoint` says what it holds"
    )

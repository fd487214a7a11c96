"""How a block's bytes are stored: as they are, compressed, or as what differs from another block.

    plain     the bytes themselves
    zstd      compressed
    delta     XOR with another block (its base), compressed
    delta16   the same of 16-bit numbers: all low bytes, then all high ones, compressed

Training moves low-precision weights so little that most of their bits stay: a block XORed with the same block of the
checkpoint before is mostly zeros, its high bytes nearly all. Whether one of these pays is tried on a few stretches of a
block. Whatever is read comes out at the length and with the hash that were asked for, or not at all: a compressed block
can't grow beyond its block's length, and a chain of deltas is never longer than `MOST_DELTAS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from laminar.checkpoint.format.hashing import Content
from laminar.errors import CheckpointError

UNCODED, ZSTD, DELTA, DELTA16 = range(4)
ENCODINGS = ("plain", "zstd", "delta", "delta16")
DELTAS = (DELTA, DELTA16)
MOST_DELTAS = 8
"""Deltas one behind the other before a block is stored without a base again; part of the format."""
LEVEL = 1
SAMPLED_BYTES = 8 << 10
SAMPLED_STRETCHES = 4
"""Of a block, on which compression is tried."""
PAYS = 0.85
"""Stored bytes over plain ones, at most, for a block to be compressed."""


@dataclass(frozen=True)
class Stored:
    """A block as it is to be written."""

    encoding: int
    data: Content
    depth: int = 0
    """How many deltas have to be undone to read it."""


@cache
def _zstandard() -> ModuleType | None:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard  # type: ignore[no-any-return, unused-ignore]


def encode_block(plain: memoryview, item_bytes: int = 1, base: Content | None = None, base_depth: int = 0) -> Stored:
    """The form in which a block takes little room, if compressing it pays; `base` has its length, or is not used."""
    if _zstandard() is None:
        return Stored(UNCODED, plain)
    if base is not None and len(base) == len(plain) and base_depth < MOST_DELTAS:
        delta = _xor(plain, base)
        if item_bytes == 2:
            delta = delta.reshape(-1, 2).T.reshape(-1)
        if _pays(delta.data):
            packed = _compressed(delta.data)
            if len(packed) <= PAYS * len(plain):
                return Stored(DELTA16 if item_bytes == 2 else DELTA, packed, base_depth + 1)
    if _pays(plain):
        packed = _compressed(plain)
        if len(packed) <= PAYS * len(plain):
            return Stored(ZSTD, packed)
    return Stored(UNCODED, plain)


def decode_block(encoding: int, data: Content, plain_bytes: int, base: Content | None = None) -> Content:
    """The inverse; raises `ValueError` where the data are not what they should be."""
    if encoding == UNCODED:
        plain = data
    else:
        plain = _decompressed(data, plain_bytes)
    if len(plain) != plain_bytes:
        raise ValueError(f"{len(plain)} bytes, not {plain_bytes}")
    if encoding not in DELTAS:
        return plain
    if base is None or len(base) != plain_bytes:
        raise ValueError("its base has another length")
    if encoding == DELTA16:
        if plain_bytes % 2:
            raise ValueError("half a 16-bit number")
        plain = np.frombuffer(plain, np.uint8).reshape(2, -1).T.reshape(-1).data
    return _xor(plain, base).data


def _xor(one: Content, other: Content) -> NDArray[np.uint8]:
    return np.bitwise_xor(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


def _pays(data: memoryview) -> bool:
    """Whether compressing a few stretches would have paid."""
    size = len(data)
    if size <= SAMPLED_STRETCHES * SAMPLED_BYTES:
        sample: Content = data
    else:
        starts = [(size - SAMPLED_BYTES) * i // (SAMPLED_STRETCHES - 1) for i in range(SAMPLED_STRETCHES)]
        sample = b"".join(data[s : s + SAMPLED_BYTES] for s in starts)
    return len(_compressed(sample)) <= PAYS * len(sample)


def _compressed(data: Content) -> bytes:
    zstandard = _zstandard()
    assert zstandard is not None
    return bytes(zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data))


def _decompressed(data: Content, plain_bytes: int) -> bytes:
    zstandard = _zstandard()
    if zstandard is None:
        raise CheckpointError(
            "blocks of this checkpoint are compressed, and the package zstandard is not installed",
            next="pip install zstandard",
        )
    try:
        said = zstandard.frame_content_size(data)
        if said != plain_bytes:  # before anything is allocated for it
            raise ValueError(f"a frame of {said} bytes, not {plain_bytes}")
        limit = max(1 << 23, 2 * plain_bytes)  # of the window, which a frame may ask for
        return bytes(zstandard.ZstdDecompressor(max_window_size=limit).decompress(data, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None

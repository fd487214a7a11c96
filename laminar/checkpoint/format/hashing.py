"""BLAKE3, for every hash of a checkpoint.

A block's address is the plain hash of its content. Everything else (a tensor's entry, scalars, the state, a manifest)
is hashed with a context of its own, so that no block can be passed off as one of them. The package `blake3` is loaded
when a hash is needed: without it nothing can be saved or read, and that is said by name.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, cast

from laminar.errors import CheckpointError

Content = bytes | bytearray | memoryview
HASH_BYTES = 32
CONTEXT = "laminar checkpoint 1 "
"""Before what is hashed; part of the format."""


class _Hash(Protocol):
    def __call__(
        self, data: Content = b"", /, *, derive_key_context: str | None = None, max_threads: int = 1
    ) -> Any: ...


@cache
def _blake3() -> _Hash:
    try:
        from blake3 import blake3
    except ImportError:
        raise CheckpointError(
            "checkpoints are hashed with BLAKE3, and the package blake3 is not installed", next="pip install blake3"
        ) from None
    return cast(_Hash, blake3)


def block_hash(content: Content, threads: int = 1) -> bytes:
    """The address of a block. Other threads of this process run meanwhile."""
    return bytes(_blake3()(content, max_threads=threads).digest())


def hash_as(what: str, content: Content) -> bytes:
    """The hash of something that is no block, such as a "manifest"."""
    return bytes(_blake3()(content, derive_key_context=CONTEXT + what).digest())

"""What a place for checkpoints has to be able to do: keep bytes under keys.

A store sees keys and bytes, never a tensor or a rank. To add one, write a class with these methods, and run the tests
of `tests/checkpoint/test_stores.py` on it. All of them promise:

- A key has all of the bytes that were given for it, or none; who reads never sees a part.
- What a call has returned from is durable.
- Of several that `put_new` one key at a time, one succeeds.

Keys are relative paths of small letters, digits, and `-`, `_`, `.` inside of names, so they mean the same everywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from laminar.checkpoint.format.hashing import Content
from laminar.errors import CheckpointError, StorageError

KEY_PATTERN = re.compile(r"(?:[a-z0-9][a-z0-9_-]*(?:\.[a-z0-9_-]+)*)(?:/[a-z0-9][a-z0-9_-]*(?:\.[a-z0-9_-]+)*)*")
LONGEST_KEY = 255


class MissingKeyError(StorageError):
    """Nothing is kept under a key."""


@dataclass(frozen=True)
class StoredFile:
    """Something that is kept."""

    key: str
    size: int
    modified_s: float
    """Seconds since 1970, by the clock of the store."""


class Upload(Protocol):
    """Bytes on their way to a key, which has them once `commit` has returned."""

    def write(self, data: Content) -> None:
        """Add to the end. The data may change once this has returned."""

    def commit(self) -> None:
        """Make all of it durable and visible."""

    def abort(self) -> None:
        """Leave nothing behind; harmless after `commit`."""


class Store(Protocol):
    """Keeps bytes under keys."""

    uri: str
    """Where this is."""

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """What is kept under a key, or a stretch of it: exactly so many bytes, or an error."""

    def size(self, key: str) -> int:
        """How many bytes a key has."""

    def list(self, prefix: str) -> list[StoredFile]:
        """All keys in the folder `prefix` and the folders in it, sorted."""

    def put(self, key: str, data: bytes) -> None:
        """Keep bytes under a key, in place of what was there."""

    def put_new(self, key: str, data: bytes) -> bool:
        """Keep bytes under a key that has none yet; false if it has."""

    def upload(self, key: str) -> Upload:
        """Bytes too many to be held at once. The key must be nobody else's."""

    def delete(self, key: str) -> None:
        """Have nothing under a key; no error if there is nothing."""

    def clean(self, older_than_s: float) -> int:
        """Remove what writers that died have left and nobody can see, if it is old enough; how many there were."""


def checked_key(key: str) -> str:
    """A key, if it can be one."""
    if len(key) > LONGEST_KEY or not KEY_PATTERN.fullmatch(key):
        raise StorageError(f"{key[:80]!r} is no key of a store")
    return key


def missing_key(key: str, uri: str) -> MissingKeyError:
    """The error that nothing is there."""
    return MissingKeyError(f"{uri} has no {key}")


def short_read(key: str, uri: str, found: int, wanted: int) -> CheckpointError:
    """The error that less is there than there should be."""
    return CheckpointError(f"{uri}: {key} ends early: {found} of {wanted} bytes")

"""Stores by their names: a path, `file:///path`, `memory://name`, `s3://bucket/prefix`, `gs://...`, `az://...`."""

from __future__ import annotations

import os
import re
from functools import cache
from urllib.parse import unquote, urlsplit

from laminar.checkpoint.store.local import LocalStore
from laminar.checkpoint.store.memory import MemoryStore
from laminar.checkpoint.store.protocol import Store
from laminar.errors import StorageError

SCHEMES = ("file", "memory")


def open_store(uri: str | os.PathLike[str]) -> Store:
    """The store of this name; a folder that is not there is made."""
    text = os.fspath(uri)
    if not re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text):
        return LocalStore(text)
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise StorageError(f"{text} names another machine", next="write file:///path, with three slashes")
        return LocalStore(unquote(parts.path))
    if parts.scheme == "memory":
        return _memory(text.partition("://")[2])
    raise StorageError(f"{text[:80]} is of no known kind", allowed="a path, " + ", ".join(f"{s}://" for s in SCHEMES))


@cache
def _memory(name: str) -> MemoryStore:
    """One per name and process."""
    return MemoryStore(name)

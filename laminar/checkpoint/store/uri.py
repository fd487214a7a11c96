"""Stores by their names: a path, `file:///path`, `memory://name`, `s3://bucket/prefix`, `gs://...`, `az://...`."""

from __future__ import annotations

import os
import re
from functools import cache
from urllib.parse import unquote, urlsplit

from laminar.checkpoint.store.local import LocalStore
from laminar.checkpoint.store.memory import MemoryStore
from laminar.checkpoint.store.objects import OBJECT_SCHEMES, ObjectStore
from laminar.checkpoint.store.protocol import Store
from laminar.errors import StorageError


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
    if parts.scheme not in OBJECT_SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in ("file", "memory", *OBJECT_SCHEMES))
        raise StorageError(f"{text[:80]!r} is no place that is known", allowed=f"a path, {known}")
    if not parts.netloc or "@" in parts.netloc or parts.query or parts.fragment:
        raise StorageError(f"{parts.scheme}:// takes a bucket and a prefix, no user, query or fragment")
    return ObjectStore(text.rstrip("/"))


@cache
def _memory(name: str) -> MemoryStore:
    """One per name and process."""
    return MemoryStore(name)

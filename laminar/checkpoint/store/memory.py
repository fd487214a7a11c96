"""A store in this process's memory: for tests, and for state that needs to outlive a job but not the process."""

from __future__ import annotations

import threading
import time

from laminar.checkpoint.format.hashing import Content
from laminar.checkpoint.store.protocol import StoredFile, checked_key, missing_key, short_read


class MemoryStore:
    """Bytes in a dict."""

    def __init__(self, name: str = "") -> None:
        self.uri = f"memory://{name}"
        self._kept: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See `Store`."""
        found = self._kept.get(checked_key(key))
        if found is None:
            raise missing_key(key, self.uri)
        end = len(found[0]) if length is None else start + length
        if start > len(found[0]) or end > len(found[0]):
            raise short_read(key, self.uri, len(found[0]), end)
        return found[0][start:end]

    def size(self, key: str) -> int:
        """See `Store`."""
        return len(self.read(key))

    def list(self, prefix: str) -> list[StoredFile]:
        """See `Store`."""
        with self._lock:
            found = [(k, v) for k, v in self._kept.items() if k.startswith(checked_key(prefix) + "/")]
        return [StoredFile(k, len(data), when) for k, (data, when) in sorted(found)]

    def put(self, key: str, data: bytes) -> None:
        """See `Store`."""
        with self._lock:
            self._kept[checked_key(key)] = bytes(data), time.time()

    def put_new(self, key: str, data: bytes) -> bool:
        """See `Store`."""
        with self._lock:
            if checked_key(key) in self._kept:
                return False
            self._kept[key] = bytes(data), time.time()
            return True

    def upload(self, key: str) -> MemoryUpload:
        """See `Store`."""
        return MemoryUpload(self, checked_key(key))

    def delete(self, key: str) -> None:
        """See `Store`."""
        with self._lock:
            self._kept.pop(checked_key(key), None)

    def clean(self, older_than_s: float) -> int:
        """Nothing is left behind in memory."""
        return 0


class MemoryUpload:
    """Bytes on their way."""

    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store, self._key, self._data = store, key, bytearray()

    def write(self, data: Content) -> None:
        """See `Upload`."""
        self._data += data

    def commit(self) -> None:
        """See `Upload`."""
        self._store.put(self._key, bytes(self._data))

    def abort(self) -> None:
        """See `Upload`."""
        self._data.clear()

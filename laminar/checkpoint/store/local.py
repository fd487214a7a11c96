"""A store in a folder of any mounted file system.

What is written goes to a file of its own in `tmp/`, is synced, and only then gets its name: by a hard link where the
name must be free, by a rename where it may be taken. The folder's own names are synced after that. So a name that can
be seen has all of its bytes, after a loss of power too; what a crash leaves is in `tmp/`, where nobody reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from laminar.checkpoint.format.hashing import Content
from laminar.checkpoint.store.files import FileSystem, RealFiles
from laminar.checkpoint.store.protocol import KEY_PATTERN, StoredFile, checked_key, missing_key, short_read
from laminar.errors import CheckpointError, StorageError

TEMPORARY = "tmp"


class LocalStore:
    """Bytes in files."""

    def __init__(self, path: str | os.PathLike[str], files: FileSystem | None = None) -> None:
        self.uri = os.fspath(path)
        if files is None:
            try:
                Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
                files = RealFiles(os.fspath(path))
            except OSError as error:
                raise self.failed(error, "opened") from error
        self._files = files
        self._known = {""}  # folders that are there

    def failed(self, error: OSError, what: str) -> StorageError:
        """The system's error as ours: what can't be done, and what would help."""
        said = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "make room, or keep fewer checkpoints; what was committed is whole"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            hint = "name a folder that can be written"
        else:
            hint = "see the disk; what was committed is whole"
        return StorageError(f"{self.uri} can't be {what}: {said}", next=hint)

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[int]:
        try:
            file = self._files.open(checked_key(key))
            try:
                yield file
            finally:
                self._files.close(file)
        except FileNotFoundError:
            raise missing_key(key, self.uri) from None
        except OSError as error:
            if error.errno in (errno.EIO, errno.ELOOP, errno.EINVAL):  # these bytes, not the whole store
                raise CheckpointError(f"{self.uri}: {key} can't be read: {error.strerror}") from error
            raise self.failed(error, f"read ({key})") from error

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See `Store`."""
        with self._reading(key) as file:
            wanted = self._files.size(file) - start if length is None else length
            if wanted < 0 or start + wanted > self._files.size(file):
                raise short_read(key, self.uri, self._files.size(file), start + wanted)
            parts, found = [], 0
            while found < wanted:
                part = self._files.read(file, start + found, wanted - found)
                if not part:
                    raise short_read(key, self.uri, start + found, start + wanted)
                parts.append(part)
                found += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self, key: str) -> int:
        """See `Store`."""
        with self._reading(key) as file:
            return self._files.size(file)

    def list(self, prefix: str) -> list[StoredFile]:
        """See `Store`."""
        try:
            return list(self._below(checked_key(prefix)))
        except OSError as error:
            raise self.failed(error, f"listed ({prefix})") from error

    def _below(self, folder: str) -> Iterator[StoredFile]:
        try:
            found = self._files.entries(folder)
        except FileNotFoundError:
            return
        for entry in found:
            path = f"{folder}/{entry.name}"
            if entry.folder:
                yield from self._below(path)
            elif KEY_PATTERN.fullmatch(path):  # whatever else lies around is not ours
                yield StoredFile(path, entry.size, entry.modified_s)

    def put(self, key: str, data: bytes) -> None:
        """See `Store`."""
        upload = self.upload(key)
        try:
            upload.write(data)
            upload.commit()
        except BaseException:
            upload.abort()
            raise

    def put_new(self, key: str, data: bytes) -> bool:
        """See `Store`."""
        upload = LocalUpload(self, checked_key(key), self._files)
        try:
            upload.write(data)
            return upload.commit_new()
        finally:
            upload.abort()

    def upload(self, key: str) -> LocalUpload:
        """See `Store`."""
        return LocalUpload(self, checked_key(key), self._files)

    def delete(self, key: str) -> None:
        """See `Store`."""
        folder = checked_key(key).rpartition("/")[0]
        try:
            self._files.remove(key)
            self._files.sync_folder(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self.failed(error, f"written ({key} is to be removed)") from error

    def clean(self, older_than_s: float) -> int:
        """See `Store`."""
        removed, now = 0, time.time()
        for left in self.list(TEMPORARY):
            if now - left.modified_s >= older_than_s:
                with contextlib.suppress(OSError):
                    self._files.remove(left.key)
                    removed += 1
        return removed

    def need_folder(self, path: str) -> None:
        """Make a folder and those around it, if they are not there; durable before anything is put into it."""
        if path in self._known:
            return
        above = path.rpartition("/")[0]
        self.need_folder(above)
        with contextlib.suppress(FileExistsError):
            self._files.make_folder(path)
        self._files.sync_folder(above)
        self._known.add(path)


class LocalUpload:
    """A file in `tmp/` that gets its name at the end."""

    def __init__(self, store: LocalStore, key: str, files: FileSystem) -> None:
        self._store, self._key, self._files = store, key, files
        self._path = f"{TEMPORARY}/{secrets.token_hex(12)}"
        self._left = True
        try:
            store.need_folder(TEMPORARY)
            self._file: int | None = files.create(self._path)
        except OSError as error:
            raise store.failed(error, "written") from error

    def write(self, data: Content) -> None:
        """See `Upload`."""
        assert self._file is not None
        try:
            self._files.write(self._file, data)
        except OSError as error:
            raise self._store.failed(error, f"written ({self._key})") from error

    def commit(self) -> None:
        """See `Upload`."""
        try:
            self._synced()
            self._files.rename(self._path, self._key)
            self._left = False
            self._files.sync_folder(self._key.rpartition("/")[0])
        except OSError as error:
            raise self._store.failed(error, f"written ({self._key})") from error

    def commit_new(self) -> bool:
        """The same for a key that must be free; false if it is not."""
        try:
            self._synced()
            try:
                self._files.link(self._path, self._key)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                    raise StorageError(
                        f"{self._store.uri} is on a file system without hard links, which a new key needs",
                        next="name a folder on another file system, or an object store",
                    ) from error
                raise
            self._files.sync_folder(self._key.rpartition("/")[0])
            return True
        except OSError as error:
            raise self._store.failed(error, f"written ({self._key})") from error

    def _synced(self) -> None:
        assert self._file is not None
        self._files.sync(self._file)
        file, self._file = self._file, None
        self._files.close(file)
        self._store.need_folder(self._key.rpartition("/")[0])

    def abort(self) -> None:
        """See `Upload`."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                file, self._file = self._file, None
                self._files.close(file)
        with contextlib.suppress(OSError):
            if self._left:
                self._left = False
                self._files.remove(self._path)

"""The few calls that a store on a file system makes, each of which may fail or be the last before a crash.

Paths are relative to the store's folder, and no symlink below it is followed: every folder on the way is opened by
itself and must be one. Files are made with mode 0600 and must be plain files when they are read. Tests put
another file system in place of this one, which fails or crashes at each call in turn, and forgets what was not synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from laminar.checkpoint.format.hashing import Content


class FileEntry(NamedTuple):
    """What lies in a folder."""

    name: str
    folder: bool
    size: int
    modified_s: float


class FileSystem(Protocol):
    """Calls of the system. All of them raise `OSError`."""

    def create(self, path: str) -> int:
        """A new, empty file to be written; an error if anything has its name."""

    def open(self, path: str) -> int:
        """A plain file to be read."""

    def write(self, file: int, data: Content) -> None:
        """All of the data, at the end."""

    def read(self, file: int, start: int, length: int) -> bytes:
        """So many bytes, or what there is of them."""

    def size(self, file: int) -> int:
        """How many bytes a file has."""

    def sync(self, file: int) -> None:
        """Make a file's content durable."""

    def close(self, file: int) -> None:
        """Be done with it."""

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, which must be free."""

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in place of what has it."""

    def remove(self, path: str) -> None:
        """Take a file's name away."""

    def make_folder(self, path: str) -> None:
        """A new folder."""

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable; "" is the store's own."""

    def entries(self, path: str) -> list[FileEntry]:
        """What lies in a folder, sorted; links and pipes too, which can't be opened."""


class RealFiles:
    """The system's own calls, below a folder."""

    def __init__(self, root: str) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._root)

    @contextlib.contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        """A folder, opened step by step."""
        here = os.dup(self._root)
        try:
            for name in path.split("/") if path else ():
                there = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                os.close(here)
                here = there
            yield here
        finally:
            os.close(here)

    def create(self, path: str) -> int:
        """See `FileSystem`."""
        folder, _, name = path.rpartition("/")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._folder(folder) as at:
            return os.open(name, flags, 0o600, dir_fd=at)

    def open(self, path: str) -> int:
        """See `FileSystem`."""
        folder, _, name = path.rpartition("/")
        with self._folder(folder) as at:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "it is no plain file", path)
        return file

    def write(self, file: int, data: Content) -> None:
        """See `FileSystem`."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(file, rest) :]

    def read(self, file: int, start: int, length: int) -> bytes:
        """See `FileSystem`."""
        return os.pread(file, length, start)

    def size(self, file: int) -> int:
        """See `FileSystem`."""
        return os.fstat(file).st_size

    def sync(self, file: int) -> None:
        """See `FileSystem`."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """See `FileSystem`."""
        os.close(file)

    def link(self, source: str, target: str) -> None:
        """See `FileSystem`."""
        (a, _, one), (b, _, other) = source.rpartition("/"), target.rpartition("/")
        with self._folder(a) as at, self._folder(b) as to:
            os.link(one, other, src_dir_fd=at, dst_dir_fd=to, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        """See `FileSystem`."""
        (a, _, one), (b, _, other) = source.rpartition("/"), target.rpartition("/")
        with self._folder(a) as at, self._folder(b) as to:
            os.rename(one, other, src_dir_fd=at, dst_dir_fd=to)

    def remove(self, path: str) -> None:
        """See `FileSystem`."""
        folder, _, name = path.rpartition("/")
        with self._folder(folder) as at:
            os.unlink(name, dir_fd=at)

    def make_folder(self, path: str) -> None:
        """See `FileSystem`."""
        folder, _, name = path.rpartition("/")
        with self._folder(folder) as at:
            os.mkdir(name, 0o700, dir_fd=at)

    def sync_folder(self, path: str) -> None:
        """See `FileSystem`."""
        with self._folder(path) as at:
            os.fsync(at)

    def entries(self, path: str) -> list[FileEntry]:
        """See `FileSystem`."""
        out = []
        with self._folder(path) as at:
            for name in sorted(os.listdir(at)):
                with contextlib.suppress(FileNotFoundError):
                    about = os.stat(name, dir_fd=at, follow_symlinks=False)
                    out.append(FileEntry(name, stat.S_ISDIR(about.st_mode), about.st_size, about.st_mtime))
        return out

"""A file system in memory that fails or crashes at a call of one's choice, and forgets what was not synced.

It keeps what a disk may have after a loss of power apart from what processes see: a file's content becomes durable by a
sync of the file, a name by a sync of its folder. After a crash, of the content that was not synced there may be all,
nothing, a part, or a part with zeros behind it; and of the names, each may be the old one or the new one. `after_crash`
draws one of these.
"""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field

from laminar.checkpoint.store.files import FileEntry


class Crash(BaseException):
    """The machine is gone; no handler of errors runs."""


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


class CrashingFiles:
    """See `FileSystem`. Calls are counted from 1."""

    def __init__(self, folders: set[str] | None = None, names: dict[str, File] | None = None) -> None:
        self.folders, self.durable_folders = set(folders or {""}), set(folders or {""})
        self.names, self.durable_names = dict(names or {}), dict(names or {})
        self.calls = 0
        self.crash_at = 0
        """The call during which the machine stops: it has its effect, or half of it, or none."""
        self.fail_at: dict[int, int] = {}
        """Calls that fail, and the error's number."""
        self.fail_from: tuple[int, int] | None = None
        """From this call on, all that write fail so."""
        self.crashed = False
        self._open: dict[int, File] = {}
        self._handles = 0

    def _call(self, writes: bool = True) -> bool:
        """Count a call; whether it is the last before a crash, whose effect is open."""
        if self.crashed:
            raise Crash
        if writes:
            self.calls += 1
            if self.calls in self.fail_at:
                number = self.fail_at[self.calls]
                raise OSError(number, os.strerror(number))
            if self.fail_from is not None and self.calls >= self.fail_from[0]:
                raise OSError(self.fail_from[1], os.strerror(self.fail_from[1]))
            if self.calls == self.crash_at:
                self.crashed = True
                return True
        return False

    def _file(self, path: str) -> File:
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.names[path]

    def _in_folder(self, path: str) -> None:
        if path.rpartition("/")[0] not in self.folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _handle(self, file: File) -> int:
        self._handles += 1
        self._open[self._handles] = file
        return self._handles

    def create(self, path: str) -> int:
        last = self._call()
        self._in_folder(path)
        if path in self.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self.names[path] = File()
        if last:
            raise Crash
        return self._handle(self.names[path])

    def open(self, path: str) -> int:
        self._call(writes=False)
        return self._handle(self._file(path))

    def write(self, file: int, data: bytes | memoryview) -> None:
        last = self._call()
        content = bytes(data)
        self._open[file].data += content[: len(content) // 2] if last else content
        if last:
            raise Crash

    def read(self, file: int, start: int, length: int) -> bytes:
        self._call(writes=False)
        return bytes(self._open[file].data[start : start + length])

    def size(self, file: int) -> int:
        return len(self._open[file].data)

    def sync(self, file: int) -> None:
        if self._call():
            raise Crash
        self._open[file].durable = bytes(self._open[file].data)

    def close(self, file: int) -> None:
        del self._open[file]

    def link(self, source: str, target: str) -> None:
        last = self._call()
        self._in_folder(target)
        if target in self.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        self.names[target] = self._file(source)
        if last:
            raise Crash

    def rename(self, source: str, target: str) -> None:
        last = self._call()
        self._in_folder(target)
        self.names[target] = self._file(source)
        del self.names[source]
        if last:
            raise Crash

    def remove(self, path: str) -> None:
        last = self._call()
        self._file(path)
        del self.names[path]
        if last:
            raise Crash

    def make_folder(self, path: str) -> None:
        last = self._call()
        self._in_folder(path)
        if path in self.folders:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self.folders.add(path)
        if last:
            raise Crash

    def sync_folder(self, path: str) -> None:
        if self._call():
            raise Crash

        def here(name: str) -> bool:
            return name != "" and name.rpartition("/")[0] == path

        for names, durable in ((self.names, self.durable_names),):
            for name in [n for n in durable if here(n) and n not in names]:
                del durable[name]
            durable.update({n: f for n, f in names.items() if here(n)})
        self.durable_folders |= {n for n in self.folders if here(n)}

    def entries(self, path: str) -> list[FileEntry]:
        self._call(writes=False)
        if path not in self.folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        found = [
            FileEntry(n.rpartition("/")[2], True, 0, 0.0) for n in self.folders if n and n.rpartition("/")[0] == path
        ]
        found += [
            FileEntry(n.rpartition("/")[2], False, len(f.data), 0.0)
            for n, f in self.names.items()
            if n.rpartition("/")[0] == path
        ]
        return sorted(found)

    def after_crash(self, how: str, seed: int = 0) -> CrashingFiles:
        """What may be on disk: "kept" (all that was written), "dropped" (what was synced), or "drawn" (any mixture)."""
        dice = random.Random(seed)
        names = dict(self.names if how == "kept" else self.durable_names)
        folders = set(self.folders if how == "kept" else self.durable_folders)
        if how == "drawn":
            for name in sorted(set(self.names) | set(self.durable_names)):
                source = dice.choice([self.names, self.durable_names])
                names.pop(name, None)
                if name in source:
                    names[name] = source[name]
            folders |= {f for f in self.folders if dice.random() < 0.5}
        while True:  # what is in a folder that is not there is not there either
            there = {n for n in folders if not n or n.rpartition("/")[0] in folders}
            if there == folders:
                break
            folders = there
        names = {n: f for n, f in names.items() if n.rpartition("/")[0] in folders}
        contents = {id(f): File(*[_left_of(f, how, dice)] * 2) for f in names.values()}
        return CrashingFiles(folders, {n: contents[id(f)] for n, f in names.items()})


def _left_of(file: File, how: str, dice: random.Random) -> bytearray:
    """A file's content after a crash."""
    if how == "kept":
        return bytearray(file.data)
    if how == "dropped":
        return bytearray(file.durable)
    rest = file.data[len(file.durable) :]
    kept = rest[: dice.randint(0, len(rest))]
    zeros = bytes(dice.choice([0, len(rest) - len(kept)]))
    return bytearray(file.durable) + kept + zeros

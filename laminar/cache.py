"""Captured graphs and found plans, kept from one command to the next under names made of their content.

A graph follows from the user's code: its name is made of every module that a recipe has loaded from outside of the
installed packages, of the recipe's own name and of the versions of what it stands on. A plan follows from a graph and a
request. Laminar's own code is part of both names, so nothing old is ever taken for something new. What can't be read is
made again; the oldest files make room.

    LAMINAR_CACHE    the folder (default: $XDG_CACHE_HOME/laminar or ~/.cache/laminar); `off` keeps nothing
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

MOST_FILES = 64
"""Files of a kind that are kept."""
BESIDE = ("torch", "transformers", "numpy")
"""Packages on which graphs depend."""
T = TypeVar("T")


def folder() -> Path | None:
    """Where things are kept; nothing if they are not to be."""
    told = os.environ.get("LAMINAR_CACHE", "")
    if told == "off":
        return None
    return Path(told) if told else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laminar"


def kept(
    kind: str, parts: Mapping[str, Any], make: Callable[[], T], out: Callable[[T], Any], back: Callable[[Any], T]
) -> T:
    """What is kept under a name made of `parts`, else what `make` makes; `out` and `back` go to plain data and back."""
    path = _path(kind, parts)
    if path is None:
        return make()
    try:
        return _read(path, back)
    except Exception:  # not there, cut off, or written by hand: whatever it is, it can be made again
        made = make()
    store(kind, parts, out(made))
    return made


def stored(kind: str, parts: Mapping[str, Any], back: Callable[[Any], T], default: T) -> T:
    """What was stored under a name made of `parts`; the default if there is nothing that can be read."""
    path = _path(kind, parts)
    if path is None:
        return default
    try:
        return _read(path, back)
    except Exception:  # as above: nothing that is kept is needed
        return default


def store(kind: str, parts: Mapping[str, Any], data: Any) -> None:
    """Keep plain data under a name made of `parts`, in place of what was there."""
    path = _path(kind, parts)
    if path is not None:
        with contextlib.suppress(OSError):  # a full or read-only disk is no reason to fail
            _write(path, json.dumps(data))


def _path(kind: str, parts: Mapping[str, Any]) -> Path | None:
    home = folder()
    if home is None:
        return None
    text = json.dumps({**parts, "laminar": own_code()}, sort_keys=True, default=str)
    return home / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _read(path: Path, back: Callable[[Any], T]) -> T:
    found = back(json.loads(path.read_text()))
    path.touch()
    return found


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)
    files = sorted(path.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)
    for old in files[: max(0, len(files) - MOST_FILES)]:
        old.unlink(missing_ok=True)


def sources(packages: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Digests of everything that was loaded and is no installed package, and versions of what graphs depend on.

    Of installed `packages` that are named, size and time of every file that was loaded count as well.
    """
    return _sources(packages, len(sys.modules))


@cache
def _sources(packages: frozenset[str], loaded: int) -> dict[str, Any]:
    """The same, asked again only where something more was loaded."""
    own = str(Path(__file__).parent) + os.sep
    mine, theirs = set(), set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or file.startswith(own):
            continue
        if not _lies_installed(file):
            mine.add(file)
        elif name.partition(".")[0] in packages:
            theirs.add(file)
    stamps = hashlib.sha256()
    for file in sorted(theirs):
        with contextlib.suppress(OSError):
            about = os.stat(file)
            stamps.update(f"{file} {about.st_size} {about.st_mtime_ns}".encode())
    versions = {}
    for name in sorted({*BESIDE, *packages}):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    code = sorted(_digest([Path(f)]) for f in mine if os.path.isfile(f))
    return {"code": code, "versions": versions, "installed": stamps.hexdigest()}


@cache
def _lies_installed(file: str) -> bool:
    """Whether it lies where packages do, wherever links lead."""
    if os.path.islink(file):
        return os.path.realpath(file).startswith(_installed())
    return (_real_folder(os.path.dirname(file)) + os.sep).startswith(_installed())


@cache
def _real_folder(path: str) -> str:
    return os.path.realpath(path)


@cache
def _installed() -> tuple[str, ...]:
    """Where packages lie."""
    paths = (*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix)
    return tuple({os.path.realpath(p) + os.sep for p in paths})


@cache
def own_code() -> str:
    """A digest of Laminar itself."""
    return _digest(sorted(Path(__file__).parent.rglob("*.py")))


def _digest(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()

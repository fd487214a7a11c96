"""What happens, as one stream: the only thing that every room may call.

A room says `emit("step", step=3, loss=2.1)` and knows nothing about who listens: a file of JSON
lines, a progress bar, a page. Without a listener an event costs one look at an empty list, so rooms
need not ask first. A listener that fails is dropped with one line on stderr: a full disk or a broken
page can't touch a run.

On disk an event is one line of JSON: `{"time": 1.7e9, "rank": 0, "kind": "step", "step": 3, ...}`.
JSON has no NaN and no infinity; they are written as the strings "nan", "inf" and "-inf", which
`float()` reads back. A line is written by one call, so whoever reads along sees whole lines and, at
most, an unfinished last one, which `Follower` leaves for later.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, and when."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    time: float = 0.0
    """Seconds since 1970, by the clock of the machine it happened on."""
    rank: int = 0
    """Whose event it is; known to the sink that writes it, not to the room that emits it."""

    def line(self) -> str:
        """The event as one line of JSON, without the line's end."""
        whole = {"time": round(self.time, 6), "rank": self.rank, "kind": self.kind, **self.fields}
        return json.dumps(json_value(whole), allow_nan=False)

    @staticmethod
    def read(line: str) -> Event | None:
        """The event a line holds; nothing if it holds none."""
        try:
            data = json.loads(line)
            kind, rank, when = str(data.pop("kind")), int(data.pop("rank")), float(data.pop("time"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return Event(kind, data, when, rank)


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def emit(kind: str, **fields: Any) -> None:
    """Tell whoever listens. `fields` are numbers, strings, and lists and dicts of them."""
    if not _listeners:
        return
    event = Event(kind, fields, time.time())
    for listener in tuple(_listeners):
        try:
            listener(event)
        except Exception as error:
            unsubscribe(listener)
            print(f"laminar: a listener to events failed and is dropped: {error!r}", file=sys.stderr)


def subscribe(listener: Listener) -> Listener:
    """Call `listener` with every event from now on, in the thread that emits it."""
    _listeners.append(listener)
    return listener


def unsubscribe(listener: Listener) -> None:
    """Stop calling it; one that is not subscribed is no error."""
    with contextlib.suppress(ValueError):
        _listeners.remove(listener)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[Listener]:
    """Subscribed for as long as the block runs."""
    subscribe(listener)
    try:
        yield listener
    finally:
        unsubscribe(listener)


def json_value(value: Any) -> Any:
    """A value as JSON can hold it: non-finite floats as strings, scalars of other libraries as numbers."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {str(k): json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(v) for v in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return json_value(value.item())
    return str(value)


class JsonLines:
    """A listener that appends events to a file, for the rank it belongs to."""

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        self.rank = rank
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        line = Event(event.kind, event.fields, event.time, self.rank).line()
        with self._lock:
            if not self._file.closed:
                self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Everything is on disk already; later events are not written."""
        with self._lock:
            self._file.close()


class Follower:
    """Reads a file of events while it is being written: `new()` gives those added since the last call."""

    def __init__(self, path: str | os.PathLike[str], from_end: bool = False) -> None:
        self.path = Path(path)
        self._rest = b""
        self._at = self.path.stat().st_size if from_end and self.path.exists() else 0

    def new(self) -> list[Event]:
        """Whole lines only; a file that is not there yet has none."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [e for line in lines if (e := Event.read(line.decode("utf-8", "replace"))) is not None]


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """Every event of a file."""
    return Follower(path).new()

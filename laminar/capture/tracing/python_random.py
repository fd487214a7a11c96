"""Random numbers that a step takes from Python or NumPy, told from those that other threads take meanwhile.

Both have one global generator for all threads, and a loader that augments its samples draws from them while a step of a
new shape is being traced. NumPy's generator has a lock that may be entered again by the thread that holds it: it is
held here, so others wait until the trace is done, and whatever was drawn until then was drawn by the step. Python's has
none; where it has moved, the step is run once more while every call that this thread makes is looked at.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_HELD = type(threading.RLock())


class Draws:
    """The state of Python's and NumPy's generators before a step; a context manager around its trace."""

    def __init__(self) -> None:
        self._lock: Any = None

    def __enter__(self) -> Draws:
        lock = getattr(np.random.get_bit_generator(), "lock", None)  # type: ignore[attr-defined]
        if isinstance(lock, _HELD):  # any other would keep the step itself waiting for ever
            lock.acquire()
            self._lock = lock
        self._numpy: Any = np.random.get_state(legacy=True)
        self._python = random.getstate()
        return self

    def __exit__(self, *_: object) -> None:
        if self.numpy:
            np.random.set_state(self._numpy)  # a step that is refused has not happened
        if self._lock is not None:
            self._lock.release()

    @property
    def numpy(self) -> bool:
        """Whether the step drew from NumPy."""
        now: Any = np.random.get_state(legacy=True)
        return now[2:] != self._numpy[2:] or not np.array_equal(now[1], self._numpy[1])

    @property
    def moved(self) -> bool:
        """Whether anybody drew from Python's generator."""
        return random.getstate() != self._python

    def python(self, step: Callable[[], Any]) -> bool:
        """Whether the step draws from Python's generator, by running it again; what it drew is put back."""
        seen: list[Any] = []
        with _profiled(lambda call: getattr(call, "__self__", None) is _GENERATOR, seen):
            step()
        if seen:
            random.setstate(self._python)
        return bool(seen)


_GENERATOR = random.random.__self__  # type: ignore[attr-defined]


@contextlib.contextmanager
def _profiled(wanted: Callable[[Any], bool], seen: list[Any]) -> Iterator[None]:
    """Note the calls into C that this thread makes and that are wanted."""

    def look(frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and wanted(called):
            seen.append(called)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)

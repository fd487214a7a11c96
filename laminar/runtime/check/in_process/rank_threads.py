"""Several ranks in one process, one at a time: each has a thread, and only the one whose turn it is runs.

A rank goes on until it waits for something that is not there; then the turn passes to another that can go on. Who that
is depends on a seed and nothing else, so every run is the same run. If nobody can go on, ranks wait for each other,
which is an error that says for what.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from laminar.errors import RankError


class _Stopped(BaseException):
    """Another rank has failed."""


class Turns:
    """Whose turn it is. `run` begins and ends with all of them; `wait` is called by the one that runs."""

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)
        self._at = 0
        self._doors: list[threading.Lock] = []
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {}
        self._left: set[int] = set()
        self._error: BaseException | None = None

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each call gives, one call for each rank; the first error of any of them."""
        out: list[Any] = [None] * len(calls)
        self._error, self._waits, self._left = None, {}, {*range(len(calls))}
        self._doors = [threading.Lock() for _ in calls]
        for door in self._doors:
            door.acquire()

        def one(at: int) -> None:
            self._doors[at].acquire()
            try:
                if self._error is None:
                    out[at] = calls[at]()
            except _Stopped:
                pass
            except BaseException as error:
                self._error = self._error or error
            self._left.discard(at)
            self._pass()

        threads = [threading.Thread(target=one, args=(at,), daemon=True) for at in self._left]
        for thread in threads:
            thread.start()
        self._pass()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return out

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Until something is so; others run meanwhile."""
        if ready():
            return
        me = self._at
        self._waits[me] = ready, what
        self._pass()
        self._doors[me].acquire()
        if self._error is not None:
            raise _Stopped

    def _pass(self) -> None:
        """Give the turn to somebody who can go on; after an error to everybody, one after the other."""
        order = sorted(self._left)
        if not order:
            return
        first = self._dice.randrange(len(order))
        able = (r for r in order[first:] + order[:first] if self._error or r not in self._waits or self._waits[r][0]())
        self._at = next(able, -1)
        if self._at < 0:
            why = "; ".join(f"rank {r}: {self._waits[r][1]}" for r in order)
            self._error = RankError("ranks wait for each other", at=why)
            self._at = order[0]
        self._waits.pop(self._at, None)
        self._doors[self._at].release()

"""Memory that a training process fills and its writer process reads.

A segment has no name (Linux `memfd`): it is gone when both processes are, however they end. The bytes of all segments
that are in use are bounded: who wants more waits until some are given back, which is what keeps a fast trainer from
filling the machine's memory ahead of a slow disk.
"""

from __future__ import annotations

import mmap
import os
import threading
from itertools import count

from laminar.errors import CheckpointError

_NUMBERS = count(1)


class SharedSegment:
    """A stretch of shared memory; `memory` is writable here and read by the writer process."""

    def __init__(self, nbytes: int, budget: SegmentBudget) -> None:
        self.number, self.nbytes, self._budget = next(_NUMBERS), nbytes, budget
        self.fd = os.memfd_create("laminar", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, max(nbytes, 1))
            self._map = mmap.mmap(self.fd, max(nbytes, 1))
        except BaseException:
            os.close(self.fd)
            budget.give_back(nbytes)
            raise
        self.memory = memoryview(self._map)[:nbytes]
        self.known = False
        """Whether the writer process has been told of it."""
        self._freed = False

    def free(self) -> None:
        """Give the memory back. Arrays over it must be gone, or the pages stay until they are."""
        if self._freed:
            return
        self._freed = True
        os.close(self.fd)
        try:
            self.memory.release()
            self._map.close()
        except BufferError:
            pass  # somebody still looks at it; the map goes with the last of them
        self._budget.give_back(self.nbytes)


class SegmentBudget:
    """How many bytes of segments may be in use at a time."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.used_bytes = most_bytes, 0
        self._changed = threading.Condition()

    def segment(self, nbytes: int, timeout_s: float | None = None) -> SharedSegment:
        """A new segment, when there is room for it."""
        if nbytes > self.most_bytes:
            raise CheckpointError(
                f"a segment of {nbytes} bytes will never fit into {self.most_bytes}",
                next="allow more, or save in parts",
            )
        with self._changed:
            if not self._changed.wait_for(lambda: self.used_bytes + nbytes <= self.most_bytes, timeout_s):
                raise CheckpointError(
                    f"no room for a segment of {nbytes} bytes: the writer is behind", next="save less often"
                )
            self.used_bytes += nbytes
        return SharedSegment(nbytes, self)

    def give_back(self, nbytes: int) -> None:
        """Room for others."""
        with self._changed:
            self.used_bytes -= nbytes
            self._changed.notify_all()

"""Allocators, played through: how much memory requests take once they are rounded, kept and split.

`Plain` counts bytes, rounded up to a multiple. `Cuda` does what PyTorch's caching allocator does with its
defaults: blocks are multiples of 512 bytes; small ones (up to 1 MiB) are cut from segments of 2 MiB, middle
ones (under 10 MiB) from segments of 20 MiB, large ones get their own, rounded up to 2 MiB. A freed block is
joined with free neighbours and kept; a request takes the smallest kept block of its pool that is large enough, and
gives the rest back if that is worth it. *Allocated* is what blocks in use take, *reserved* what segments take.

Not covered: several streams, expandable segments, garbage collection before memory runs out, other options.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

BLOCK = 512
SMALL = 1 << 20
"""Requests up to this size are small."""
SMALL_SEGMENT = 2 << 20
MIDDLE = 10 << 20
"""Requests below this size are cut from middle segments."""
MIDDLE_SEGMENT = 20 << 20
LARGE_STEP = 2 << 20


class Heap(Protocol):
    """Where memory comes from. A heap sees sizes, never tensors."""

    allocated: int
    """Bytes of blocks in use."""
    reserved: int
    """Bytes taken from the device."""

    def take(self, nbytes: int) -> int:
        """A number for a block of at least this size."""
        ...

    def give(self, block: int) -> None:
        """The block is free again."""
        ...


class Plain:
    """Blocks rounded up to a multiple, nothing kept."""

    def __init__(self, step: int = 1) -> None:
        self.step, self.allocated, self.reserved = step, 0, 0
        self._sizes: list[int] = []

    def take(self, nbytes: int) -> int:
        """A block of the rounded size."""
        size = -(-nbytes // self.step) * self.step
        self._sizes.append(size)
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        return len(self._sizes) - 1

    def give(self, block: int) -> None:
        """Back to the system."""
        self.allocated -= self._sizes[block]
        self._sizes[block] = 0


class Nowhere:
    """Counts nothing: for who only asks what lives when."""

    allocated = reserved = 0

    def take(self, nbytes: int) -> int:
        """No block."""
        return 0

    def give(self, block: int) -> None:
        """None."""


@dataclass(slots=True)
class _Block:
    size: int
    start: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


class Cuda:
    """The caching allocator."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._blocks: dict[int, _Block] = {}
        self._next = 0
        self._end = 0
        # Free blocks of the small and the large pool, by size, then by place.
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}

    def take(self, nbytes: int) -> int:
        """The smallest kept block that is large enough, or part of a new segment."""
        size = max(BLOCK, -(-nbytes // BLOCK) * BLOCK)
        small = size <= SMALL
        pool = self._free[small]
        at = bisect.bisect_left(pool, (size, -1))
        if at < len(pool):
            block = pool.pop(at)[2]
        else:
            length = (
                SMALL_SEGMENT if small else MIDDLE_SEGMENT if size < MIDDLE else -(-size // LARGE_STEP) * LARGE_STEP
            )
            block = _Block(length, self._end, small)
            self._end += length + LARGE_STEP  # segments are never neighbours
            self.reserved += length
        rest = block.size - size
        if rest >= BLOCK if small else rest > SMALL:
            tail = _Block(rest, block.start + size, small, block, block.after, free=True)
            if block.after is not None:
                block.after.before = tail
            block.after, block.size = tail, size
            self._keep(tail)
        block.free = False
        self.allocated += block.size
        self._blocks[self._next] = block
        self._next += 1
        return self._next - 1

    def give(self, block: int) -> None:
        """Kept, joined with its free neighbours."""
        b = self._blocks.pop(block)
        self.allocated -= b.size
        for other in (b.before, b.after):
            if other is not None and other.free:
                self._forget(other)
                first, second = (other, b) if other is b.before else (b, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                b = first
        self._keep(b)

    def _keep(self, b: _Block) -> None:
        b.free = True
        bisect.insort(self._free[b.small], (b.size, b.start, b))

    def _forget(self, b: _Block) -> None:
        pool = self._free[b.small]
        pool.pop(bisect.bisect_left(pool, (b.size, b.start)))


HEAPS: dict[str | None, Callable[[], Heap]] = {None: Plain, "cpu": lambda: Plain(64), "cuda": Cuda}
"""By name: exact bytes, malloc's alignment, PyTorch on a GPU."""

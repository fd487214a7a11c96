"""Freed memory stays with the process: a training step frees and takes the same tensors again and again.

By default glibc gives large pieces back to the system as soon as they are free. The next step gets them as new pages,
which the system clears and maps one by one: measured on two cores, a quarter to a third of the step of a plan that
gathers 17M parameters (136 ms against 99). PyTorch keeps a cache of its own for GPUs, but not for a CPU.

What stays is at most what a step needs at its peak. Pieces beyond 32 MB are still returned: glibc allows no more.
"""

from __future__ import annotations

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""From malloc.h."""
LARGEST_BYTES = 32 << 20
LARGEST_INT = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Tell the C library to keep what is freed; False where it is another one, or will not be told."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wishes = ((M_MMAP_THRESHOLD, LARGEST_BYTES), (M_TRIM_THRESHOLD, LARGEST_INT), (M_TOP_PAD, LARGEST_BYTES))
    return [mallopt(what, value) for what, value in wishes] == [1, 1, 1]


def give_back_freed_memory() -> None:
    """Return what is free right now to the system: after something large that won't come again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

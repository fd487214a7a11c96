"""No garbage collection for a while: for code that makes many small tuples and no cycles.

The collector counts allocations, and thousands of tuples make it walk through everything the process holds, graphs and
programs included: a third of the time of a short simulation, for nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """The collector stands still inside; as it was, afterwards."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

"""Sizes at which exchanges take another way: the runtime goes by them, and cost predicts memory and time by them."""

from __future__ import annotations

ALIGN = 64
"""Bytes to which pieces of a buffer are aligned: a cache line."""
SMALL_RING_BYTES = 1 << 16
"""Exchanges through shared memory up to this size use the ring of small areas, larger ones are reduced in halves."""
RINGS = {"small": 16, "large": 2}
"""How many areas each ring of shared memory has."""
DIRECT_BYTES = 1 << 17
"""Pieces of at least this size are sent on their own. Estimated from single messages and copies on two ranks; for a
whole step of a GPT, 128 kB, 400 kB and never differed by no more than the noise of a busy machine."""


def aligned_bytes(nbytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-nbytes // ALIGN) * ALIGN

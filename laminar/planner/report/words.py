"""Bytes and differences for people, as all reports have them."""

from __future__ import annotations

from collections.abc import Mapping

SLIGHT = 0.002
"""Differences below this share of a step are not told."""


def sized(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def difference(mine: Mapping[str, float], other: Mapping[str, float], step_s: float) -> str:
    """What another plan spends more and less on, in words, the largest first; nothing if one of them is not known."""
    if not mine or not other:
        return ""
    apart = {k: other.get(k, 0.0) - mine.get(k, 0.0) for k in {*mine, *other}}
    told = sorted((k for k, s in apart.items() if abs(s) > SLIGHT * step_s), key=lambda k: -abs(apart[k]))
    more = [f"{apart[k] * 1e3:.3f} ms more on {k}" for k in told if apart[k] > 0][:3]
    less = [f"{-apart[k] * 1e3:.3f} ms less on {k}" for k in told if apart[k] < 0][:2]
    return ", ".join(more + less)

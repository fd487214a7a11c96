"""Seeds of what is drawn at random: the same in every run of `make test`, fresh ones in `make fuzz` and `make prove`.

Those print theirs, and `SEED=...` gives it back. Collects nothing itself.
"""

from __future__ import annotations

import os
import random

SEED = int(os.environ.get("LAMINAR_SEED") or 0)
"""0 in the normal run."""


def first(seed: int) -> int:
    """The first of a row of seeds: in the normal run as written, otherwise far from there and from each other's."""
    return seed + 1_000_003 * SEED


def dice(text: str) -> random.Random:
    """Chance that has a name: in the normal run the same every time."""
    return random.Random(f"{text} {SEED}" if SEED else text)

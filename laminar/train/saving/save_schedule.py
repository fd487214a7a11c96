"""When to save: every so many steps, or every so many minutes.

All ranks have to save after the same step, and their clocks differ. So where time decides, the first rank says from
time to time, as part of a note that all ranks wait for, after how many steps to look again: half of what is left, by
the time that steps have taken. That is a handful of notes for each save, and a step that becomes slow delays it by
little.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass

from laminar.errors import RecipeError
from laminar.train.world import World

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
FIRST_LOOK = 3
"""Steps before the first guess at how long one takes."""


@dataclass(frozen=True)
class SaveEvery:
    """Steps, or seconds; neither: only at the end."""

    steps: int = 0
    seconds: float = 0.0

    @staticmethod
    def parse(text: str | int) -> SaveEvery:
        """From `100`, `30s`, `10m` or `2h`."""
        found = re.fullmatch(r"(\d+)([smh]?)", str(text).strip())
        if not found:
            raise RecipeError(
                f"checkpoints every {text!r}", allowed="a number of steps, or a time such as 30s, 10m, 2h"
            )
        number, unit = int(found[1]), found[2]
        return SaveEvery(seconds=number * UNITS_S[unit]) if unit else SaveEvery(steps=number)

    def __bool__(self) -> bool:
        return bool(self.steps or self.seconds)


class SaveSchedule:
    """Asked after every step whether to save; says the same on every rank."""

    def __init__(self, every: SaveEvery, peers: World, step: int) -> None:
        self.every, self.peers = every, peers
        self._begun, self._look = time.monotonic(), step + FIRST_LOOK
        self._saved, self._steps = self._begun, step

    def due(self, step: int) -> bool:
        """Whether to save after this step."""
        if self.every.steps:
            return step % self.every.steps == 0
        if not self.every.seconds or step < self._look:
            return False
        wait = int(self.peers.told("next save", lambda: self._wait(step)))
        self._look = step + max(wait, 1)
        if wait:
            return False
        self._saved = time.monotonic()
        return True

    def _wait(self, step: int) -> int:
        """Steps until the next look; 0: it is time to save."""
        now = time.monotonic()
        each = (now - self._begun) / max(step - self._steps, 1)
        left = self.every.seconds - (now - self._saved)
        return 0 if left < each / 2 else max(1, math.floor(left / each / 2))

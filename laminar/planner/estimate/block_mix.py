"""How many blocks are kept, recomputed, recomputed but for their products, or offloaded; and what each choice costs.

Values alone: `activation_mix.py` fills them in from simulated steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, order=True)
class BlockMix:
    """How many blocks, and of what kind."""

    whole: int = 0
    """Recomputed."""
    spared: int = 0
    """Recomputed but for their products."""
    away: int = 0
    """Sent to the host."""

    @property
    def again(self) -> int:
        """Recomputed, one way or the other."""
        return self.whole + self.spared


@dataclass(frozen=True)
class BlockWays:
    """What a block takes and saves, by what becomes of it; and a step in which all are kept."""

    blocks: int
    kept_s: float
    kept_bytes: float
    whole: tuple[float, float] | None
    """Seconds and bytes of a block that is recomputed; none where that is not allowed."""
    spared: tuple[float, float] | None
    sent_bytes: float = 0.0
    """What a block takes to the host; 0 where that is not allowed."""
    last_bytes: float = 0.0
    """What the last one saves of that."""
    every_bytes: float = 0.0
    """What all blocks together save if all of them are sent; 0: not known."""
    behind: int = 1
    """Blocks that the last one must leave ahead of, to save anything."""
    copy_s: float = 0.0
    forward_s: float = 0.0
    """Of a block."""
    each_s: float = 0.0
    """To start a copy there and one back."""
    launch_s: float = 0.0
    """What a step takes longer if anything leaves at all."""

    @cached_property
    def spread(self) -> tuple[tuple[int, float], ...]:
        """For each number of blocks that leave, how far apart they are best, and seconds that copies are not hidden."""
        out = [(1, 0.0)]
        for count in range(1, self.blocks + 1):
            found = [(self._late_s(count, apart), apart) for apart in range(1, self.blocks + 1)]
            late_s, apart = min(found)
            out.append((apart, self.launch_s + count * self.each_s + late_s))
        return tuple(out)

    def _late_s(self, count: int, apart: int) -> float:
        """Seconds that so many copies are waited for, so many blocks apart; infinite where that saves nothing."""
        if count == self.blocks:
            return (count - 2) * self._wait_s(apart) if apart == 1 and self.every_bytes else math.inf
        left = self.blocks - 1 - self.behind - (count - 1) * apart
        return (count - 1) * self._wait_s(apart) + self._wait_s(left) if left > 0 else math.inf

    def _wait_s(self, blocks: int) -> float:
        """Of a copy there in the time of so many blocks, and one back."""
        return max(0.0, self.copy_s - blocks * self.forward_s) + max(0.0, self.copy_s - 2 * blocks * self.forward_s)

    @cached_property
    def front(self) -> tuple[tuple[BlockMix, float, float], ...]:
        """Mixes that no other beats in seconds and bytes, with both; the fastest first."""
        every = np.arange(self.blocks + 1)
        sizes = [every if way else every[:1] for way in (self.whole, self.spared, self.sent_bytes > 0)]
        whole, spared, away = (a.ravel() for a in np.meshgrid(*sizes, indexing="ij"))
        some = whole + spared + away <= self.blocks
        whole, spared, away = whole[some], spared[some], away[some]
        seconds = self.kept_s + np.array([late_s for _, late_s in self.spread])[away]
        saved = (every - 1) * self.sent_bytes + self.last_bytes
        saved[0], saved[-1] = 0.0, self.every_bytes
        held = self.kept_bytes - saved[away]
        for count, way in ((whole, self.whole), (spared, self.spared)):
            if way is not None:
                seconds, held = seconds + count * way[0], held - count * way[1]
        out, least = [], math.inf
        for k in np.lexsort((held, seconds)):
            if held[k] < least and math.isfinite(seconds[k]):
                least = float(held[k])
                out.append((BlockMix(int(whole[k]), int(spared[k]), int(away[k])), float(seconds[k]), least))
        return tuple(out)

    @property
    def least_bytes(self) -> float:
        """What is held with all blocks recomputed, whole."""
        return self.kept_bytes - self.blocks * (self.whole[1] if self.whole else 0.0)

    def within(self, room: float) -> tuple[BlockMix, float, float] | None:
        """The fastest of them that should fit."""
        return next((m for m in self.front if m[2] <= room), None)

    def placed(self, mix: BlockMix) -> tuple[list[int], list[int], list[int]]:
        """Which blocks are recomputed, which without their products, and which leave."""
        apart = self.spread[mix.away][0]
        left = self.blocks - 1 - self.behind - (mix.away - 1) * apart
        # What comes into the first block is made outside of it and stays: the second one saves more, if there is time.
        begin = int(0 < mix.away < self.blocks and left > 1 and not self._wait_s(left - 1))
        away = [begin + k * apart for k in range(mix.away)]
        rest = [k for k in range(self.blocks) if k not in away]
        return rest[: mix.whole], rest[mix.whole : mix.again], away

"""A given assignment made better: the slowest rank gives a sample away, or swaps one for a shorter one.

Longest-first leaves a gap where ranks have few samples each. Here the slowest rank is paired with the ones that
finish earliest, and the move or the swap is made that brings the later of the two forward most. No change makes a
rank as slow as the slowest was, so the result is never worse than what it began with. It ends where the slowest is
close enough to the mean, has a single sample, or no change helps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np

from laminar.data.cost.sample_cost import FloatArray, IntArray

CLOSE_ENOUGH = 1.002
"""Slowest over mean at which nothing is gained by going on."""
PARTNERS = 3
"""How many of the ranks that finish earliest are tried before giving up."""


def exchanged(costs: FloatArray, ranks: IntArray, speeds: FloatArray, close: float = CLOSE_ENOUGH) -> IntArray:
    """Ranks of samples after moves and swaps; `costs` are whole numbers."""
    loads = np.bincount(ranks, weights=costs, minlength=len(speeds))
    slow, total = (1.0 / speeds).tolist(), float(loads.sum())
    goal = close * total / float(speeds.sum())
    finish: list[float] = (loads / speeds).tolist()
    if max(finish) <= goal:
        return ranks
    load: list[float] = loads.tolist()
    order = np.lexsort((costs, ranks))
    pairs = list(zip(costs[order].tolist(), order.tolist(), strict=True))
    starts: list[int] = np.searchsorted(ranks[order], np.arange(len(speeds) + 1)).tolist()
    held = [pairs[a:b] for a, b in pairwise(starts)]  # by rank, the shortest first
    out: list[int] = ranks.tolist()
    for _ in range(2 * len(speeds)):
        worst = max(finish)
        high = finish.index(worst)
        if worst <= goal or len(held[high]) < 2:
            break
        low = finish.index(min(finish))
        change = _best_change(held[high], held[low], load[high], load[low], slow[high], slow[low])
        if change is None:
            for low in sorted(range(len(finish)), key=finish.__getitem__)[1:PARTNERS]:
                change = _best_change(held[high], held[low], load[high], load[low], slow[high], slow[low])
                if change is not None:
                    break
            else:
                break
        gives, back = change
        held[high].remove(gives)
        insort(held[low], gives)
        out[gives[1]] = low
        moved = gives[0]
        if back is not None:
            held[low].remove(back)
            insort(held[high], back)
            out[back[1]] = high
            moved -= back[0]
        load[high] -= moved
        load[low] += moved
        finish[high], finish[low] = load[high] * slow[high], load[low] * slow[low]
    return np.asarray(out, dtype=np.int64)


def _best_change(
    high: list[tuple[float, int]],
    low: list[tuple[float, int]],
    load_high: float,
    load_low: float,
    slow_high: float,
    slow_low: float,
) -> tuple[tuple[float, int], tuple[float, int] | None] | None:
    """What the slower rank gives and what it gets back, if that brings the later of both forward.

    What moves on balance should be the difference that makes both finish together; the nearest to it is looked for.
    """
    gap = load_high * slow_high - load_low * slow_low
    ideal = gap / (slow_high + slow_low)
    limit = min(gap * (1 - 1e-9) / slow_low, load_high)  # what moves has to leave the other below where the slowest was
    best = ideal * (1 - 1e-6)
    found: tuple[tuple[float, int], tuple[float, int] | None] | None = None
    for gives in high:
        wanted = gives[0] - ideal
        at = bisect_left(low, (wanted, -1))
        for back in low[max(at - 1, 0) : at + 1]:  # the two around the best one to get back
            off = abs(back[0] - wanted)
            if off < best and 0 < gives[0] - back[0] < limit:
                best, found = off, (gives, back)
        off = abs(wanted)
        if off < best and 0 < gives[0] < limit:
            best, found = off, (gives, None)
    return found

"""Cuts for places that have several stages: even over the stages of a place, not stage by stage.

Cuts are between ops, so where a stage is about a layer the one with the head of a model is too long, and nothing can be
done about that stage: `staging.balanced` has done what there is. But its place has other stages, which may be shorter.
A cut that moves gives seconds from one stage to the next; cuts a..b that move together give from stage a-1 to stage b,
which may be at any other place, and leave those between as they are. Such moves are made one by one, the best first, as
long as they make a step shorter.

How long it is lies between two numbers, of which the mean is taken:

    places     if every place were busy from when its first stage is reached: the slowest, all its stages together
    turns      if all places were in step: micro-batches pass in rounds, forward through stage v of every place while
               backward goes through its stage V-1-v, so each such turn takes what its slowest place does

Nets as they run lie between the two: over 40 ways to cut 96 stages at 16 places, and 64, simulated steps correlate with
this mean by 0.95 and 0.91, with places alone by 0.88 and 0.77. What is sent is not weighed: a cut that sends far more
than the leanest ones is not moved to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FORWARD = 1 / 3
"""Of what a stage takes, forward. Assumed."""
SENT = 2.5
"""How many times as much as the leanest of its neighbours a cut may send: some of those inside of a layer do not."""
NEARBY = 0.5
"""How far from a cut its neighbours are, in mean stages."""
SAME = 0.01
"""Cuts that are nearer to each other than this, in mean stages, are one: that which sends least."""
REACH = 4
"""By how many possible cuts a cut moves at once."""
WORTH = 1e-4
"""Moves that gain less, as a share of a step, are not made."""
LEAST_SHARE = 0.75
"""No stage gets less than this of the mean one, unless it had: far apart, they are not in step any more."""
IN_STEP = 0.5
"""What turns count of the two."""
MOST_MOVES = 64
"""As many at most."""


def evened(
    total: Sequence[np.ndarray], sent: np.ndarray, allowed: np.ndarray, starts: Sequence[int], places: int, many: int
) -> list[int]:
    """The first op of each stage, from those of stages that are as even as can be; for `many` micro-batches.

    `total` has sums of work by stage, `sent` bytes that pass a cut before each op, `allowed` where one may be.
    """
    where = _choices(total[0], sent, allowed, starts)
    at = np.searchsorted(where, [*starts, len(total[0]) - 1])
    sums = np.array([total[p][where] for p in range(places)])
    sizes = _sizes(sums, at[None])
    best, lightest = _step(sizes, places, many)[0], np.minimum(sizes[0], LEAST_SHARE * sizes.mean())
    for _ in range(MOST_MOVES):
        moved = _moved(at)
        sizes = _sizes(sums, moved)
        seconds = np.where((sizes >= lightest).all(1), _step(sizes, places, many), np.inf)
        k = int(seconds.argmin())
        if seconds[k] >= best * (1 - WORTH):
            break
        at, best = moved[k], seconds[k]
    return [int(where[k]) for k in at[:-1]]


def _choices(total: np.ndarray, sent: np.ndarray, allowed: np.ndarray, starts: Sequence[int]) -> np.ndarray:
    """Where cuts may move to: lean ones, and those that there are; the beginning and the end among them."""
    mean = total[-1] / len(starts)
    some = np.flatnonzero(allowed)
    low = np.searchsorted(total[some], total[some] - NEARBY * mean, side="left")
    high = np.searchsorted(total[some], total[some] + NEARBY * mean, side="right")
    least = np.array([sent[some[a:b]].min() if b > a else 0.0 for a, b in zip(low, high, strict=True)])
    # At the ends of a model less is sent than anywhere else.
    least = np.maximum(least, np.median(sent[list(starts[1:])]) if len(starts) > 1 else 0.0)
    lean = some[sent[some] <= SENT * least]
    kept = {0, len(total) - 1, *starts}
    found: list[int] = []
    for k in sorted({*map(int, lean), *kept}):
        if found and total[k] - total[found[-1]] < SAME * mean and not {k, found[-1]} <= kept:
            if k in kept or (found[-1] not in kept and sent[k] < sent[found[-1]]):
                found[-1] = k
        else:
            found.append(k)
    return np.array(found)


def _sizes(sums: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Seconds of each stage, by row of cuts."""
    stage = np.arange(at.shape[1] - 1) % len(sums)
    out: np.ndarray = sums[stage, at[:, 1:]] - sums[stage, at[:, :-1]]
    return out


def _moved(at: np.ndarray) -> np.ndarray:
    """All cuts that follow from moving some that lie side by side, by the same number of possible ones."""
    stages = len(at) - 1
    first, last, by = np.meshgrid(np.arange(1, stages), np.arange(1, stages), np.arange(-REACH, REACH + 1))
    ok = (first <= last) & (by != 0)
    first, last, by = first[ok], last[ok], by[ok]
    # Only these two can pass a neighbour.
    ok = (at[first] + by > at[first - 1]) & (at[last] + by < at[last + 1])
    first, last, by = first[ok][:, None], last[ok][:, None], by[ok][:, None]
    cuts = np.arange(len(at))[None]
    out: np.ndarray = at[None] + by * ((cuts >= first) & (cuts <= last))
    return out


def _step(sizes: np.ndarray, places: int, many: int) -> np.ndarray:
    """Of a step, by row of stages: the mean of what places say and what turns do."""
    turns = sizes.reshape(len(sizes), -1, places)
    before = np.cumsum(turns[:, 0], axis=1) - turns[:, 0]
    slowest = (before + many * turns.sum(1)).max(1)
    both = FORWARD * turns + (1 - FORWARD) * turns[:, ::-1]
    in_step = before[:, -1] + many * both.max(2).sum(1)
    out: np.ndarray = (1 - IN_STEP) * slowest + IN_STEP * in_step
    return out


__all__ = ["evened"]

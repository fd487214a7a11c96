"""Do the speeds that follow from a guessed schedule end each task where the guess has it end?

A guess is a start and an end of every task. From these follows, for every tick, who runs beside whom, and so every
speed; a task's progress is the sum of its speeds, and must reach its work in the tick guessed, no sooner and no later.
That is asked for all tasks of a kind at once (tasks of one kind enter the same cells and are slowed by the same): over
a grid of all ticks at which anybody starts or ends, progress is one running sum per kind.

Where the answer is no, the end that the speeds do give is a better guess.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from laminar.cost.sim.simulate import Around, Ints
from laminar.cost.sim.tasks import FULL_SPEED

NEVER = np.int64(1 << 60)
"""A tick that does not come."""
QUEUE = 500
"""Up to so many tasks of one kind are corrected one after the other; transfers are, compute is not."""


@dataclass
class GuessedSchedule:
    """A schedule to be judged; the arrays run over the same tasks."""

    kinds: list[Around]
    kind: Ints
    works: Ints
    start: Ints
    end: Ints
    parent: Ints
    """The task whose end is taken to allow the start; -1 if there is none."""

    def other_ends(self, tasks: Ints, now: int, left: dict[int, int]) -> tuple[int, dict[int, tuple[int, int]]]:
        """The first tick at which one of `tasks` ends elsewhere than guessed (or NEVER), and better guesses of such
        tasks: (start, end). `left` tells what those that run after tick `now` have yet to do."""
        # Long because it works on arrays over one grid of ticks, which all its steps share.
        start, end, kinds = self.start, self.end, self.kinds
        meets = np.array([bool(cells) for cells, *_ in kinds])
        tasks = tasks[meets[self.kind[tasks]] & (self.works[tasks] > 0)]
        kind, count = self.kind[tasks], len(tasks)
        # one grid of all ticks at which anybody starts or ends; each task from `begun` to `ended` on it
        ticks = np.concatenate((np.maximum(start[tasks], now), end[tasks]))
        order = np.argsort(ticks, kind="stable")
        ticks = ticks[order]
        new = np.ones(2 * count, bool)
        new[1:] = ticks[1:] != ticks[:-1]
        place = np.empty(2 * count, np.int64)
        place[order] = np.cumsum(new) - 1
        grid = ticks[new]
        groups: dict[int, tuple[Ints, Ints, Ints]] = {}
        cells: dict[int, Ints] = defaultdict(lambda: np.zeros(len(grid), np.int64))
        for k in np.flatnonzero(np.bincount(kind)).tolist():
            group = np.flatnonzero(kind == k)
            begun, ended = place[group], place[group + count]
            groups[k] = group, begun, ended
            change = np.bincount(begun, minlength=len(grid)) - np.bincount(ended, minlength=len(grid))
            running = np.cumsum(change)
            for c in kinds[k][0]:
                cells[c] += running
        wrong = int(NEVER)
        better: dict[int, tuple[int, int]] = {}
        for k, (group, begun, ended) in groups.items():
            _, links, against, pace = kinds[k]
            if not (links or against):
                continue
            speed = np.full(len(grid), FULL_SPEED, np.int64)
            for c in links:
                speed = np.minimum(speed, FULL_SPEED // np.maximum(1, cells[c]))
            if against:
                slowed = sum(cells[c] for c in against) > 0
                speed = np.where(slowed, speed * pace // FULL_SPEED, speed)
            speed = np.maximum(1, speed)
            made = np.zeros(len(grid), np.int64)
            np.cumsum(speed[:-1] * np.diff(grid), out=made[1:])
            ids = tasks[group]
            work = self.works[ids] * FULL_SPEED
            for at in np.flatnonzero(start[ids] <= now).tolist():
                work[at] = left[ids.item(at)]
            goal, done = made[begun] + work, made[ended]
            bad = np.flatnonzero((done < goal) | (done - speed[ended - 1] >= goal))
            if len(bad):
                last = np.searchsorted(made, goal[bad]) - 1
                true = grid[last] - (made[last] - goal[bad]) // speed[last]
                wrong = min(wrong, int(np.minimum(true, grid[ended[bad]]).min()))
                if len(group) <= QUEUE:
                    order = np.argsort(begun, kind="stable")
                    order = order[begun[order] >= begun[bad].min()]
                    is_bad = np.zeros(len(group), bool)
                    is_bad[bad] = True
                    queue = (ids, self.parent[ids], grid[begun], work, grid[ended], is_bad)
                    _queue([a[order].tolist() for a in queue], grid.tolist(), made.tolist(), speed.tolist(), better)
                else:
                    rows = (ids[bad], start[ids[bad]], true)
                    better |= {i: (begin, finish) for i, begin, finish in zip(*(a.tolist() for a in rows), strict=True)}
        return wrong, better


def _queue(
    rows: list[list[int]], marks: list[int], made: list[int], speed: list[int], better: dict[int, tuple[int, int]]
) -> None:
    """Ends of tasks one after the other: where one started when another of them ended, with that one's new end.

    In a backlog a transfer that ends a little later takes from the next what it gained itself, and the third
    is where it was. Corrected each for itself, they would push each other on and on.
    """
    moved: dict[int, int] = {}
    for i, before, t, left, ended, bad in zip(*rows, strict=True):
        if before in moved:
            t = moved[before]
        elif not bad:
            continue
        k = bisect_right(marks, t) - 1
        goal = made[k] + speed[k] * (t - marks[k]) + left
        k = bisect_left(made, goal) - 1
        end = marks[k] - (made[k] - goal) // speed[k]
        better[i] = t, end
        if end != ended:
            moved[i] = end

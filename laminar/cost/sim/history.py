"""A finished run, as an edit needs it: by slots, and searchable by time.

All that is derived is made when first asked for, and once: a search tries many edits of one run. A schedule
is its own snapshot (`cost.simulate`): who ran at a tick, and how much each had left, follow from starts and ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from laminar.cost.sim.simulate import Ints, TaskNet
from laminar.cost.sim.tasks import FULL_SPEED, Load


@dataclass
class Trace:
    """A finished run by slots: what the next edit starts from."""

    load: Load
    net: TaskNet
    slot: Ints
    """Index in the load -> slot."""
    start: Ints
    end: Ints
    because: Ints
    """Per slot; where a slot is empty, -1."""

    @cached_property
    def at(self) -> Ints:
        """Slot -> index in the load; -1 where a slot is empty, and for slot -1."""
        out = np.full(len(self.net.work) + 1, -1)
        out[self.slot] = np.arange(len(self.slot))
        return out

    @cached_property
    def by_end(self) -> tuple[Ints, Ints]:
        """Slots in the order of their ends, and these ends; empty ones come first."""
        order = np.argsort(self.end, kind="stable")
        return order, self.end[order]

    def running(self, at: int) -> Ints:
        """Slots that ran after tick `at`, in order."""
        order, ends = self.by_end
        late = order[ends.searchsorted(at, "right") :]
        return np.sort(late[self.start[late] <= at])

    def within(self, after: int, before: int) -> Ints:
        """Slots that started after the one tick and ended before the other."""
        order, ends = self.by_end
        some = order[ends.searchsorted(after) : ends.searchsorted(before)]
        return some[self.start[some] > after]

    def ended(self, after: int, before: int) -> list[tuple[int, int, int]]:
        """(slot, start, end) of those that ended after the one tick and before the other."""
        order, ends = self.by_end
        some = slice(ends.searchsorted(after, "right"), ends.searchsorted(before))
        return list(zip(order[some].tolist(), self.start[order[some]].tolist(), ends[some].tolist(), strict=True))

    def left(self, net: TaskNet, active: list[int], now: int) -> list[tuple[int, int, int]]:
        """(slot, start, work left) of tasks that ran after tick `now`; `net` tells their work."""
        order, ends = self.by_end
        begun = [self.start.item(i) for i in active]
        beside = order[ends.searchsorted(min(begun, default=now), "right") :]
        beside = beside[self.start[beside] < now]
        rows = zip(*(a.tolist() for a in (beside, self.start[beside], self.end[beside])), strict=True)
        return lefts(net, list(zip(active, begun, strict=True)), now, rows)

    @cached_property
    def computing(self) -> tuple[Ints, Ints]:
        """Starts and ends of tasks that slow transfers down, each in order."""
        links = self.load.links
        is_compute = np.array([any(c >= links and not (c - links) & 1 for c in key[0]) for key in self.net.kinds])
        slots = self.slot[is_compute[self.net.kind[self.slot]]]
        return np.sort(self.start[slots]), np.sort(self.end[slots])

    @cached_property
    def columns(self) -> list[Any]:
        """Names, lanes, work, after and links of the load's tasks."""
        return list(zip(*self.load.tasks, strict=True))

    @cached_property
    def index(self) -> dict[str, int]:
        """Name -> index in the load."""
        return {name: i for i, name in enumerate(self.columns[0])}

    @cached_property
    def after(self) -> tuple[Ints, Ints, Ints]:
        """All `after` in one array, where each task's part begins, and how long it is."""
        counts = np.fromiter(map(len, self.columns[3]), np.int64, len(self.slot))
        flat = np.fromiter(chain.from_iterable(self.columns[3]), np.int64)
        return flat, np.concatenate(([0], np.cumsum(counts))), counts

    @cached_property
    def ahead(self) -> list[int]:
        """Tasks that wait for a later one in the list: rare, and checked one by one."""
        flat, _, counts = self.after
        owner = np.repeat(np.arange(len(self.slot)), counts)
        return sorted(set(owner[flat > owner].tolist()))


def lefts(
    net: TaskNet, active: list[tuple[int, int]], now: int, beside: Iterable[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """(slot, start, work left) of running tasks: all of it, less what their speeds have made of the ticks since.

    `active` are slots and starts; `beside` slot, start and end (-1: not yet) of at least all who ran with them.
    """
    out = [(i, t, (net.work[i] - (now - t)) * FULL_SPEED) for i, t in active]
    slowed = [k for k, (i, _) in enumerate(active) if net.around[i][1] or net.around[i][2]]
    if not slowed:
        return out
    others = [(t, now if e < 0 or e > now else e, net.cells[i]) for i, t, e in beside if net.cells[i] and net.work[i]]
    for k in slowed:
        i, begin = active[k]
        _, links, against, pace = net.around[i]
        counts = dict.fromkeys((*links, *against), 0)
        marks: list[tuple[int, int, int]] = []
        for t, e, cells in others:
            if e > begin:
                for c in cells:
                    if c in counts:
                        if t <= begin:
                            counts[c] += 1
                        else:
                            marks.append((t, 1, c))
                        if e < now:
                            marks.append((e, -1, c))
        left, at = net.work[i] * FULL_SPEED, begin
        for t, by, c in sorted(marks):
            if t > at:
                left -= (t - at) * _speed(counts, links, against, pace)
                at = t
            counts[c] += by
        out[k] = i, begin, left - (now - at) * _speed(counts, links, against, pace)
    return out


def _speed(counts: dict[int, int], links: tuple[int, ...], against: tuple[int, ...], pace: int) -> int:
    speed = min((FULL_SPEED // max(1, counts[c]) for c in links), default=FULL_SPEED)
    return (speed * pace // FULL_SPEED if any(counts[c] for c in against) else speed) or 1

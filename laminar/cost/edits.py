"""What changed between two loads, and the old net patched into the new one.

Loads that a search compares differ in a few tasks out of thousands. The diff is therefore made for
that case: the common beginning and the common end are found by comparing whole stretches of the
lists (fast, because tasks are tuples), and only what lies between is matched by name. A task that
is found again keeps its *slot*, even if its work changed; one that is new, or has moved to another
lane, gets a new slot; slots of tasks that are gone stay empty. All conditions that are not touched
by the edit stay as they were, so that patching costs as much as the edit, not as the load.

Nothing here is simulated; `first` says from which tick on the old run can't be trusted.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from laminar.cost.simulate import Ints, Net, edges, surroundings_of
from laminar.cost.tasks import Load, Task

REST = itemgetter(0, 1, 2, 4)
LONGEST = 1 << 42
"""Ticks (over an hour) up to which sums of speed x ticks surely fit 64 bits; longer steps are run in full."""


@dataclass
class Trace:
    """A finished run by slots: what the next edit starts from."""

    load: Load
    net: Net
    slot: Ints
    """Index in the load -> slot."""
    start: Ints
    end: Ints
    because: Ints
    """Per slot; where a slot is empty, -1."""

    @cached_property
    def at(self) -> Ints:
        """Slot -> index in the load; -1 where a slot is empty."""
        out = np.full(len(self.net.work), -1)
        out[self.slot] = np.arange(len(self.slot))
        return out

    @cached_property
    def columns(self) -> list[Any]:
        """Names, lanes, work, after and links of the load's tasks."""
        return list(map(list, zip(*self.load.tasks, strict=True)))

    @cached_property
    def rest(self) -> list[Any]:
        """The tasks without their `after`, whose indices move with every task put in or taken out."""
        return list(map(REST, self.load.tasks))

    @cached_property
    def index(self) -> dict[str, int]:
        """Name -> index in the load."""
        return {name: i for i, name in enumerate(self.columns[0])}

    @cached_property
    def after(self) -> tuple[Ints, Ints]:
        """All `after` in one array, and where each task's part begins."""
        counts = np.fromiter(map(len, self.columns[3]), np.int64, len(self.slot))
        return np.fromiter(chain.from_iterable(self.columns[3]), np.int64), np.concatenate(([0], np.cumsum(counts)))

    @cached_property
    def ahead(self) -> list[int]:
        """Tasks that wait for a later one in the list: rare, and checked one by one."""
        flat, begin = self.after
        owner = np.repeat(np.arange(len(self.slot)), np.diff(begin))
        return sorted(set(owner[flat > owner].tolist()))


@dataclass
class Edit:
    """The new load's net in the old one's slots."""

    net: Net
    slot: Ints
    unknown: list[int]
    """Slots whose own cost or conditions changed, or that are new: an old time says nothing about them."""
    gone: list[int]
    first: int
    """The first tick at which the edit can make a difference."""


def diff(trace: Trace, load: Load) -> Edit | None:
    """What has to be done to get from the traced load to this one; None where it is not worth it or not legal."""
    old, new = trace.load, load
    if (old.lanes, old.links, old.drag) != (new.lanes, new.links, new.drag) or not old.tasks or not new.tasks:
        return None
    a, b = old.tasks, new.tasks
    head = _common(a, b, 1, min(len(a), len(b)))
    shift = len(b) - len(a)
    limit = min(len(a), len(b)) - head
    if shift:
        tail = _common(trace.rest, list(map(REST, b[len(b) - limit :])), -1, limit)
    else:
        tail = _common(a, b, -1, limit)
    pair = np.arange(len(b))
    pair[len(b) - tail :] -= shift
    middle = range(head, len(b) - tail)
    matched = _match(a, b, head, len(a) - tail, middle)
    if matched is None:
        return None
    pair[head : len(b) - tail] = matched
    altered = {j for j, i in zip(middle, matched, strict=True) if i >= 0 and not _equal(a[i], b[j], pair)}
    altered |= _other_conditions(trace, b, pair, head, tail)
    inserted = [j for j, i in zip(middle, matched, strict=True) if i < 0]
    if any(b[j].name in trace.index and not head <= trace.index[b[j].name] < len(a) - tail for j in inserted):
        return None  # a name given twice
    if not all(_legal(load, b[j]) for j in (*altered, *inserted)):
        return None
    kept = set(matched)
    gone = [i for i in range(head, len(a) - tail) if i not in kept]
    return _patch(trace, load, pair, sorted(altered), inserted, gone, head, tail)


def _common(a: Any, b: Any, way: int, limit: int) -> int:
    """How many elements two lists share at the beginning (`way` 1) or at the end (-1), at most `limit`."""
    same, stretch = 0, 256
    while stretch:
        size = min(stretch, limit - same)
        if size <= 0:
            return limit
        if way > 0:
            equal = a[same : same + size] == b[same : same + size]
        else:
            x, y = len(a) - same, len(b) - same
            equal = a[x - size : x] == b[y - size : y]
        if equal:
            same += size
        else:
            stretch = size // 2
    return same


def _match(a: Any, b: Any, low: int, high: int, middle: range) -> list[int] | None:
    """For each task of the middle of `b` the same one in the middle of `a`, or -1; in rising order."""
    found = {a[i].name: i for i in range(low, high)}
    names = [b[j].name for j in middle]
    if len(set(names)) < len(names):
        return None
    pairs = [found.get(name, -1) for name in names]
    pairs = [i if i >= 0 and a[i].lanes == b[j].lanes else -1 for i, j in zip(pairs, middle, strict=True)]
    present = [i for i in pairs if i >= 0]
    if any(x > y for x, y in pairwise(present)):
        keep = _longest_rise(present)
        pairs = [i if i in keep else -1 for i in pairs]
    return pairs


def _longest_rise(values: list[int]) -> set[int]:
    """Members of a longest rising subsequence: as few tasks as possible count as moved."""
    tops: list[int] = []
    at: list[int] = []
    before: list[int] = []
    for k, value in enumerate(values):
        place = bisect_left(tops, value)
        before.append(at[place - 1] if place else -1)
        if place == len(tops):
            tops.append(value)
            at.append(k)
        else:
            tops[place], at[place] = value, k
    out, k = set(), at[-1] if at else -1
    while k >= 0:
        out.add(values[k])
        k = before[k]
    return out


def _equal(x: Task, y: Task, pair: Ints) -> bool:
    """Whether old `x` and new `y`, of one name and in the same lanes, are the same in the rest."""
    if x.work != y.work or x.links != y.links or len(x.after) != len(y.after):
        return False
    return all(0 <= q < len(pair) and pair[q] == p for p, q in zip(x.after, y.after, strict=True))


def _other_conditions(trace: Trace, b: Any, pair: Ints, head: int, tail: int) -> set[int]:
    """Tasks outside the middle whose `after` no longer means the same tasks."""
    a, n = trace.load.tasks, len(b)
    suspects = {j for j in trace.ahead if j < head}
    out = set()
    if len(a) == n:
        slots = [int(trace.slot[k]) for k in range(head, n - tail) if pair[k] != k]
        followers = {int(trace.at[s]) for slot in slots for s in trace.net.succ[slot]}
        suspects |= {j for j in followers if j < head or j >= n - tail}
    elif tail:
        flat, begin = trace.after
        then, there = flat[begin[len(a) - tail] :], begin[len(a) - tail :]
        rows = [task.after for task in b[n - tail :]]
        counts = np.fromiter(map(len, rows), np.int64, tail)
        now = np.fromiter(chain.from_iterable(rows), np.int64)
        if len(now) and (now.min() < 0 or now.max() >= n):
            return {n - tail + k for k, row in enumerate(rows) if any(not 0 <= q < n for q in row)}
        as_many = counts == np.diff(there)
        out |= set((np.flatnonzero(~as_many) + n - tail).tolist())
        if out:
            now, then = now[np.repeat(as_many, counts)], then[np.repeat(as_many, np.diff(there))]
        owner = np.repeat(np.arange(n - tail, n)[as_many], counts[as_many])
        out |= set(owner[pair[now] != then].tolist())
    return out | {j for j in suspects if not _equal(a[int(pair[j])], b[j], pair)}


def _legal(load: Load, task: Task) -> bool:
    """What `simulate` would not refuse (if it would, it is the one to say so), and no work beyond 64 bits."""
    lanes, n = set(task.lanes), len(load.tasks)
    return (
        len(lanes) == len(task.lanes) > 0
        and all(0 <= lane < len(load.lanes) for lane in lanes)
        and 0 <= task.work < LONGEST
        and all(0 <= p < n for p in task.after)
        and all(0 <= link < load.links for link in task.links)
    )


def _patch(
    trace: Trace, load: Load, pair: Ints, altered: list[int], inserted: list[int], gone: list[int], head: int, tail: int
) -> Edit:
    """The net with the edit applied, and the tick from which it matters."""
    b, n = load.tasks, len(load.tasks)
    old = trace.net
    slots = len(old.work)
    slot = trace.slot[pair]
    slot[inserted] = range(slots, slots + len(inserted))
    gone_slots = trace.slot[gone].tolist()
    net: Net = object.__new__(Net)
    net.work, net.preds, net.succ = old.work.copy(), old.preds.copy(), old.succ.copy()
    around = (old.links, old.cells, old.against, old.pace)
    if inserted or any(b[j].links != old.links[int(slot[j])] for j in altered):
        around = (old.links.copy(), old.cells.copy(), old.against.copy(), old.pace.copy())
    net.links, net.cells, net.against, net.pace = around
    kinds, more = dict(old.kinds), np.zeros(len(inserted), np.int64)
    kind, works = np.concatenate((old.kind, more)), np.concatenate((old.works, more))

    def scan(j: int, step: int, lane: int) -> int:
        """The nearest task in that lane before (-1) or behind `j`; -1 if there is none."""
        j += step
        while 0 <= j < n:
            if lane in b[j].lanes:
                return j
            j += step
        return -1

    for j in inserted:
        task = b[j]
        cells, against, pace = surroundings_of(load, task.lanes, task.links)
        net.work.append(task.work)
        net.links.append(task.links)
        net.cells.append(cells)
        net.against.append(against)
        net.pace.append(pace)
        net.preds.append(())
        net.succ.append([])
    for j in altered:
        s, task = int(slot[j]), b[j]
        net.work[s] = task.work
        if net.links[s] != task.links:
            net.links[s] = task.links
            net.cells[s], net.against[s], net.pace[s] = surroundings_of(load, task.lanes, task.links)
    for s in slot[[*altered, *inserted]].tolist():
        works[s] = net.work[s]
        kind[s] = kinds.setdefault((net.cells[s], net.links[s], net.against[s], net.pace[s]), len(kinds))
    net.kinds, net.kind, net.works = kinds, kind, works

    waiting = {*altered, *inserted}  # whose conditions are written anew
    for j in inserted:
        waiting |= {scan(j, 1, lane) for lane in b[j].lanes}
    back = {i: head + k for k, i in enumerate(pair[head : n - tail].tolist())}
    place, behind = n - tail, {}  # where the tasks stand that followed each one
    for i in range(len(trace.slot) - tail - 1, head - 1, -1):
        behind[i] = place = back.get(i, place)
    for i in gone:
        waiting |= {scan(behind[i] - 1, 1, lane) for lane in trace.load.tasks[i].lanes}
    waiting.discard(-1)

    owned: set[int] = set()

    def followers(s: int) -> list[int]:
        if s not in owned:
            owned.add(s)
            net.succ[s] = list(net.succ[s])
        return net.succ[s]

    first = int(trace.end.max(initial=0)) + 1
    for i, s in zip(gone, gone_slots, strict=True):
        before = old.preds[s]
        lanes_before = before[len(trace.load.tasks[i].after) :]
        first = min(first, min((int(trace.end[p]) for p in lanes_before), default=0))
        if len(lanes_before) < len(trace.load.tasks[i].lanes):
            first = 0
        for p in before:
            followers(p).remove(s)
        net.preds[s] = ()
    rows = sorted(waiting)
    fresh = set(range(slots, slots + len(inserted)))
    conditions_of: list[tuple[int, ...]] = []
    for j in rows:
        s, task = int(slot[j]), b[j]
        prior = [scan(j, -1, lane) for lane in task.lanes]
        conditions = (*slot[list(task.after)].tolist(), *(int(slot[k]) for k in prior if k >= 0))
        for p in net.preds[s]:
            followers(p).remove(s)
        for p in conditions:
            followers(p).append(s)
        first = min(first, _matters(trace, s, old.preds[s] if s < slots else (), conditions, fresh, prior, slot))
        net.preds[s] = conditions
        conditions_of.append(conditions)
    changed = np.zeros(len(net.work), bool)
    changed[slot[rows]] = True
    changed[gone_slots] = True
    stay = ~changed[old.dst]
    src, dst = edges(slot[rows].tolist(), conditions_of)
    net.src, net.dst = np.concatenate((old.src[stay], src)), np.concatenate((old.dst[stay], dst))
    return Edit(net, slot, slot[[*altered, *inserted]].tolist(), gone_slots, first)


def _matters(
    trace: Trace,
    s: int,
    before: tuple[int, ...],
    conditions: tuple[int, ...],
    fresh: set[int],
    prior: list[int],
    slot: Ints,
) -> int:
    """The first tick at which a task with new properties or conditions can behave differently."""
    ends = [int(trace.end[p]) for p in conditions if p not in fresh]
    if s in fresh:  # it holds up its lanes from where the task before it ends
        lanes = [0 if k < 0 else int(trace.end[slot[k]]) for k in prior if k < 0 or int(slot[k]) not in fresh]
        return min(lanes, default=int(trace.end.max()))
    start = int(trace.start[s])
    if before == conditions or len(ends) < len(conditions):
        return start
    return min(start, max(ends, default=0))

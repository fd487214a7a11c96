"""What changed between two loads, and the old net patched into the new one.

Loads that a search compares differ in a few tasks out of thousands. The diff is therefore made for
that case: the common beginning and the common end are found by comparing whole stretches of the
lists (fast, because tasks are tuples), and only what lies between is matched by name. A caller who
made the edit knows what it changed, and can say so (`told`) instead of having it found.

A task that is found again keeps its *slot*, even if its work changed; one that is new, or has moved
to another lane, gets a new slot; slots of tasks that are gone stay empty. A list of the net that the
edit does not touch is the old one itself; in those that it does, only the entries touched are new.
What only the next edit needs is made when it comes.

Nothing here is simulated; `first` says from which tick on the old run can't be trusted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np

from laminar.cost.sim.history import Trace
from laminar.cost.sim.simulate import Around, Ints, TaskNet, edges, surroundings_of
from laminar.cost.sim.tasks import FULL_SPEED, Load, Task

LONGEST = 1 << 42
"""Ticks (over an hour) up to which sums of speed x ticks surely fit 64 bits; longer steps are run in full."""


class Patched(TaskNet):
    """The net of an edited load, made from that of the old one."""

    def __init__(self, old: TaskNet, load: Load, altered: list[tuple[int, Task]], added: list[Task]) -> None:
        """`altered` are slots with another work or other links, `added` the tasks of new slots."""
        more, kept = len(added), len(old.work)
        apart = [(s, task) for s, task in altered if old.around[s][1] != task.links]
        apart += zip(range(kept, kept + more), added, strict=True)
        self.work, self.works = old.work, old.works
        if altered or added:
            self.work = [*old.work, *(task.work for task in added)]
            self.works = np.concatenate((old.works, np.array(self.work[kept:], np.int64)))
        for s, task in altered:
            self.work[s] = self.works[s] = task.work
        self.around, self.cells, self.kinds, self.kind = old.around, old.cells, old.kinds, old.kind
        if apart:
            none: Around = (), (), (), FULL_SPEED
            self.around, self.cells = [*old.around, *[none] * more], [*old.cells, *[()] * more]
            self.kinds, self.kind = dict(old.kinds), np.concatenate((old.kind, np.zeros(more, np.int64)))
        for s, task in apart:
            self.around[s] = around = surroundings_of(load, task.lanes, task.links)
            self.cells[s] = around[0]
            self.kind[s] = self.kinds.setdefault(around, len(self.kinds))
        self.preds = [*old.preds, *[()] * more] if more else old.preds
        self.succ = [*old.succ, *([] for _ in range(more))] if more else old.succ
        self.old, self.own = old, more > 0
        self.rows: list[int] = []
        """Slots whose conditions are other than in the old net."""
        self.fresh: list[tuple[int, ...]] = []
        """Their conditions."""

    def rewire(self, rows: Sequence[int], conditions: Sequence[tuple[int, ...]]) -> None:
        """Give these slots these conditions."""
        if not rows:
            return
        if not self.own:
            self.preds, self.succ = self.preds.copy(), self.succ.copy()
        owned: set[int] = set()
        for s, now in zip(rows, conditions, strict=True):
            for p in chain(self.preds[s], now):
                if p not in owned:
                    owned.add(p)
                    self.succ[p] = self.succ[p].copy()
            for p in self.preds[s]:
                self.succ[p].remove(s)
            for p in now:
                self.succ[p].append(s)
            self.preds[s] = now
        self.rows, self.fresh = list(rows), list(conditions)

    @cached_property
    def pairs(self) -> tuple[Ints, Ints]:
        """As in `Net`, those of the old net being at hand."""
        src, dst = self.old.pairs
        if self.rows:
            changed = np.zeros(len(self.work), bool)
            changed[self.rows] = True
            stay = np.flatnonzero(~changed[dst])
            more_src, more_dst = edges(self.rows, self.fresh)
            src, dst = np.concatenate((src[stay], more_src)), np.concatenate((dst[stay], more_dst))
        del self.old  # or a chain of edits would be held in memory to its beginning
        return src, dst


@dataclass
class Edit:
    """The new load's net in the old one's slots."""

    net: Patched
    slot: Ints
    unknown: list[int]
    """Slots whose own cost or conditions changed, or that are new: an old time says nothing about them."""
    fresh: list[int]
    """Those of them that are new."""
    gone: list[int]
    first: int
    """The first tick at which the edit can make a difference."""


def diff(trace: Trace, load: Load) -> Edit | None:
    """What has to be done to get from the traced load to this one; None where it is not worth it or not legal."""
    if not _comparable(trace.load, load):
        return None
    a, b = trace.load.tasks, load.tasks
    shift, least = len(b) - len(a), min(len(a), len(b))
    head = _common(a, b, 1, least)
    if head == least and not shift:
        return _patch(trace, load, None, [], [], [], [])
    if shift:
        tail, after = _shifted_tail(trace, b, least - head)
    else:
        tail, after = _common(a, b, -1, least - head), ()
    middle = range(head, len(b) - tail)
    if not shift and all(a[k][:2] == b[k][:2] for k in middle):  # the same tasks in the same places
        altered = [k for k in middle if a[k].work != b[k].work or a[k].links != b[k].links]
        return _patch(trace, load, None, altered, [k for k in middle if a[k].after != b[k].after], [], [])
    matched = _match(a, b, head, len(a) - tail, middle)
    if matched is None:
        return None
    pair = np.arange(len(b))
    pair[len(b) - tail :] -= shift
    pair[head : len(b) - tail] = matched
    known = [(j, i) for j, i in zip(middle, matched, strict=True) if i >= 0]
    inserted = [j for j, i in zip(middle, matched, strict=True) if i < 0]
    if any(not head <= trace.index.get(b[j].name, head) < max(len(a) - tail, head + 1) for j in inserted):
        return None  # a name given twice
    altered = [j for j, i in known if a[i].work != b[j].work or a[i].links != b[j].links]
    rewired = {j for j, i in known if not _same(a[i].after, b[j].after, pair)}
    rewired |= _other_conditions(trace, b, pair, head, tail, after)
    kept = set(matched)
    gone = [i for i in range(head, len(a) - tail) if i not in kept]
    return _patch(trace, load, pair, altered, sorted(rewired), inserted, gone)


def told(trace: Trace, load: Load, changed: Collection[int], gone: Collection[int]) -> Edit | None:
    """As `diff`, by someone who knows: `changed` are the indices in the new load of all tasks that are new or other
    than they were, `gone` those in the old load of tasks no longer there. The rest is taken on trust to be the same,
    in the same order. None where this can't be."""
    if not _comparable(trace.load, load):
        return None
    a, b = trace.load.tasks, load.tasks
    if len(a) == len(b) and not gone and all(a[j][:2] == b[j][:2] for j in changed):
        rows = sorted(changed)
        altered = [j for j in rows if a[j].work != b[j].work or a[j].links != b[j].links]
        return _patch(trace, load, None, altered, [j for j in rows if a[j].after != b[j].after], [], [])
    left = set(gone)
    inserted = []
    for j in sorted(changed):
        i = trace.index.get(b[j].name, -1)
        if i >= 0 and i not in left and a[i].lanes != b[j].lanes:
            left.add(i)
        if i < 0 or i in left:
            inserted.append(j)
    if len(b) - len(inserted) != len(a) - len(left):
        return None
    pair, stay = np.full(len(b), -1), np.ones(len(b), bool)
    stay[inserted] = False
    pair[stay] = np.delete(np.arange(len(a)), sorted(left)) if left else np.arange(len(a))
    moved = {trace.index.get(b[j].name, -1) for j in inserted} - {-1}  # to new slots: whoever waits for them, too
    followers = {int(trace.at[s]) for i in moved for s in trace.net.succ[trace.slot.item(i)]} - left
    suspects = {*changed, *np.searchsorted(np.maximum.accumulate(pair), sorted(followers)).tolist()}
    known = [(j, int(pair[j])) for j in sorted(suspects) if pair[j] >= 0]
    if any(a[i].name != b[j].name for j, i in known) or len({b[j].name for j in inserted}) < len(inserted):
        return None
    altered = [j for j, i in known if a[i].work != b[j].work or a[i].links != b[j].links]
    rewired = [j for j, i in known if not _same(a[i].after, b[j].after, pair)]
    return _patch(trace, load, pair, altered, rewired, inserted, sorted(left))


def _comparable(old: Load, new: Load) -> bool:
    """The same machine, and tasks on both sides."""
    same = (old.lanes, old.links, old.drag) == (new.lanes, new.links, new.drag)
    return same and bool(old.tasks) and bool(new.tasks)


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


def _shifted_tail(trace: Trace, b: Any, limit: int) -> tuple[int, Sequence[tuple[int, ...]]]:
    """How many tasks two lists of different length share at the end but for `after`, and these `after` of the new."""
    if not limit:
        return 0, ()
    tail, columns = limit, list(zip(*b[len(b) - limit :], strict=True))
    for k in (2, 0, 1, 4):
        tail = _common(trace.columns[k], columns[k], -1, tail)
    return tail, columns[3][limit - tail :]


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


def _same(then: tuple[int, ...], now: tuple[int, ...], pair: Ints) -> bool:
    """Whether these indices in the old and in the new load mean the same tasks."""
    return len(then) == len(now) and all(0 <= q < len(pair) and pair[q] == p for p, q in zip(then, now, strict=True))


def _other_conditions(
    trace: Trace, b: Any, pair: Ints, head: int, tail: int, after: Sequence[tuple[int, ...]]
) -> set[int]:
    """Tasks outside the middle whose `after` no longer means the same tasks."""
    a, n = trace.load.tasks, len(b)
    suspects = {j for j in trace.ahead if j < head}
    out = set()
    if len(a) == n:
        slots = [int(trace.slot[k]) for k in range(head, n - tail) if pair[k] != k]
        followers = {int(trace.at[s]) for slot in slots for s in trace.net.succ[slot]}
        suspects |= {j for j in followers if j < head or j >= n - tail}
    elif tail:
        flat, begin, lengths = trace.after
        counts, then = np.fromiter(map(len, after), np.int64, tail), flat[begin[len(a) - tail] :]
        now = np.fromiter(chain.from_iterable(after), np.int64)
        if len(now) and (now.min() < 0 or now.max() >= n):
            return {n - tail + k for k, row in enumerate(after) if any(not 0 <= q < n for q in row)}
        owner, alike = np.arange(n - tail, n), counts == lengths[len(a) - tail :]
        if not alike.all():
            out = set(owner[~alike].tolist())
            now, then = now[np.repeat(alike, counts)], then[np.repeat(alike, lengths[len(a) - tail :])]
            owner, counts = owner[alike], counts[alike]
        other = np.flatnonzero(pair[now] != then)
        if len(other):
            out |= set(np.repeat(owner, counts)[other].tolist())
    return out | {j for j in suspects if not _same(a[int(pair[j])].after, b[j].after, pair)}


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


def _scan(tasks: Sequence[Task], j: int, step: int, lane: int) -> int:
    """The nearest task in that lane before (-1) or behind `j`; -1 if there is none."""
    for k in range(j + step, len(tasks) if step > 0 else -1, step):
        if lane in tasks[k][1]:
            return k
    return -1


def _patch(
    trace: Trace,
    load: Load,
    pair: Ints | None,
    altered: list[int],
    rewired: list[int],
    inserted: list[int],
    gone: list[int],
) -> Edit | None:
    """The net with the edit applied, and the tick from which it matters.

    `pair` gives the old index of each task, None where nothing moved. `altered` are tasks with another work or
    other links, `rewired` those with other conditions.
    """
    # Long because the steps of an edit share the old net's and the new load's numbering.
    a, b, old = trace.load.tasks, load.tasks, trace.net
    if not all(0 <= b[j].work < LONGEST for j in altered):
        return None
    if not all(_legal(load, b[j]) for j in {*rewired, *inserted, *(j for j in altered if b[j].links)}):
        return None
    slots = len(old.work)
    slot = trace.slot if pair is None else trace.slot[pair]
    fresh = list(range(slots, slots + len(inserted)))
    if inserted:
        slot[inserted] = fresh
    slot_of = slot.item
    altered_slots = [(slot_of(j), b[j]) for j in altered]
    net = Patched(old, load, altered_slots, [b[j] for j in inserted])

    waiting = {*rewired, *inserted}  # whose conditions are written anew
    for j in inserted:
        waiting |= {_scan(b, j, 1, lane) for lane in b[j].lanes}
    if gone:
        left, reached = set(gone), np.maximum.accumulate(pair)  # type: ignore[arg-type]
        for i in gone:
            for lane in a[i].lanes:
                k = _scan(a, i, 1, lane)
                while k in left:
                    k = _scan(a, k, 1, lane)
                if k >= 0:
                    waiting.add(int(np.searchsorted(reached, k)))
    waiting.discard(-1)

    first = int(trace.end.max(initial=0)) + 1
    end_of = trace.end.item
    for s, _ in altered_slots:
        first = min(first, trace.start.item(s))
    gone_slots = [trace.slot.item(i) for i in gone]
    for i, s in zip(gone, gone_slots, strict=True):
        lanes_before = old.preds[s][len(a[i].after) :]
        first = min(first, min(map(end_of, lanes_before), default=0))
        if len(lanes_before) < len(a[i].lanes):
            first = 0
    rows, new = [slot_of(j) for j in sorted(waiting)], []
    for j, s in zip(sorted(waiting), rows, strict=True):
        task = b[j]
        prior = [slot_of(k) if k >= 0 else -1 for k in (_scan(b, j, -1, lane) for lane in task.lanes)]
        conditions = (*map(slot_of, task.after), *(p for p in prior if p >= 0))
        first = min(first, _matters(trace, s, conditions, prior))
        new.append(conditions)
    net.rewire([*gone_slots, *rows], [*(() for _ in gone), *new])
    unknown = [slot_of(j) for j in sorted({*altered, *rewired, *inserted})]
    return Edit(net, slot, unknown, fresh, gone_slots, first)


def _matters(trace: Trace, s: int, conditions: tuple[int, ...], prior: list[int]) -> int:
    """The first tick at which a task with new conditions can behave differently; `prior` are those of its lanes."""
    known = len(trace.end)  # slots beyond are new
    if s >= known:  # it holds up its lanes from where the task before it ends
        lanes = [0 if p < 0 else trace.end.item(p) for p in prior if p < known]
        return min(lanes, default=int(trace.end.max()))
    start = trace.start.item(s)
    ends = [trace.end.item(p) for p in conditions if p < known]
    if len(ends) < len(conditions) or trace.net.preds[s] == conditions:
        return start
    return min(start, max(ends, default=0))

"""A changed load, simulated again at a fraction of the time, and equal to the last tick.

Three steps, the last two in turns until the end:

1. *Keep*: up to the first tick at which the edit can matter, the old run is the new run. A schedule
   is its own snapshot (`cost.simulate`), so that the run is entered there: who is running follows from
   the old starts and ends, and how much each has left from who ran beside it.
2. *Simulate* past what was edited, event by event.
3. *Guess and verify.* Guess that from here on every task starts when the task it started with in the old
   run has ended, and takes as long as it did. This is right where the rest of the step merely moves,
   and also where lanes move differently (a host far ahead, a backlog of transfers). Then verify the
   whole guess at once: every start must be the end of its last condition, and the speeds that follow
   from the guess must end each task in the tick guessed. Up to the first tick at which one of them
   fails, the guess is the run: whatever happens in a tick is decided by what happened before it. It
   is kept up to there, and step 2 goes on from that tick.

So exactness rests on the verification, never on the guess; a bad guess costs time only. There is nothing
to keep from the old run but its times, and a result can be edited again, in chains of any length.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from laminar.cost.edits import LONGEST, Edit, Trace, diff
from laminar.cost.simulate import Ints, Net, Run, Times, simulate
from laminar.cost.tasks import SCALE, Load

NEVER = np.int64(1 << 60)
TICKS = 12
"""Events simulated before a guess is tried; many more each time a guess gains little."""
FEW, MORE = 250, 700
"""So many tasks are simulated sooner than guessed; and so many, sooner than verified in full."""
ATTEMPTS = 6
"""How often a guess is made again with the durations that its own speeds ask for."""
LITTLE = 200
"""A guess, and each attempt at it, should gain so many tasks: about what it costs to verify one."""
QUEUE = 500
"""Up to so many tasks of one kind are corrected one after the other; transfers are, compute is not."""


def again(before: Times, load: Load) -> Times:
    """The times of `load`, given those of a similar one: equal to `simulate(load)`, reasons included."""
    trace = trace_of(before)
    if before.step > LONGEST or len(trace.net.work) > 2 * len(load.tasks) + 64:
        return simulate(load)  # the second: too many empty slots after a long chain of edits
    edit = diff(trace, load)
    if edit is None:
        return simulate(load)
    found = _Replay(trace, edit, load).run()
    if found is None:
        return simulate(load)
    start, end, because, simulated = found
    slot = edit.slot
    next_trace = Trace(load, edit.net, slot, start, end, because)
    how = {"simulated": simulated, "copied": len(load.tasks) - simulated, "full": False}
    if len(slot) == len(start) and (slot[1:] > slot[:-1]).all():  # slots are indices
        return Times(load, start, end, because, how, next_trace)
    why = because[slot]
    return Times(load, start[slot], end[slot], np.where(why >= 0, next_trace.at[why], -1), how, next_trace)


def trace_of(times: Times) -> Trace:
    """What an edit starts from; made once per result."""
    if isinstance(times.trace, Trace):
        return times.trace
    slots = np.arange(len(times.start))
    trace = Trace(times.load, times.trace, slots, times.start, times.end, times.because)
    object.__setattr__(times, "trace", trace)  # frozen for users; this is a cache
    return trace


class _Replay:
    """One edited run: `start` and `end` by slot, -1 where not known yet."""

    def __init__(self, trace: Trace, edit: Edit, load: Load) -> None:
        self.load, self.edit, self.net, self.trace = load, edit, edit.net, trace
        n = len(edit.net.work)
        more = n - len(trace.start)
        pad = np.full(more, -1, np.int64)
        self.was_start, self.was_end, self.was_because = (
            np.concatenate((a, pad)) if more else a for a in (trace.start, trace.end, trace.because)
        )
        self.unknown = np.zeros(n, bool)
        self.unknown[edit.unknown] = True
        self.unknown[edit.gone] = True
        self.alive = np.zeros(n, bool)
        self.alive[edit.slot] = True
        kept = self.alive & (self.was_start >= 0) & (self.was_start < edit.first) & ~self.unknown
        self.start = np.where(kept, self.was_start, -1)
        self.end = np.where(kept & (self.was_end < edit.first), self.was_end, -1)
        self.late = self.start < 0
        edges = np.flatnonzero(self.late[edit.net.dst])
        self.src, self.dst = edit.net.src[edges], edit.net.dst[edges]
        self.meets = np.array([bool(cells) for cells, *_ in edit.net.kinds])
        """Per kind of surroundings, whether it meets anybody."""
        self.near = 64 * int(trace.end.max(initial=0)) // max(1, len(trace.slot))

    def run(self) -> tuple[Ints, Ints, Ints, int] | None:
        """Starts, ends, reasons, and how many tasks were simulated; None if some can never start."""
        now, ticks, simulated = self.edit.first - 1, TICKS, 0
        while (open_tasks := int((self.end[self.edit.slot] < 0).sum())) > 0:
            run = self.enter(now)
            while True:
                now = run.advance(ticks if open_tasks > FEW else -1)
                if now < 0 or not self.edits_near(run, now):
                    break
            self.note(run)
            reached, gained = (-1, -1) if now < 0 or run.latest > LONGEST else self.guess(run, now)
            if gained < 0:  # the rest event by event, if there is any
                run.advance()
                self.note(run)
            simulated += len(run.begun)
            if gained < 0 or reached >= NEVER:
                break
            if gained < LITTLE:
                ticks *= 4
            now = reached - 1
        if (self.end[self.edit.slot] < 0).any():
            return None
        # who started before the edit did so for the old reason
        because = np.where(self.late, -1, self.was_because)
        binding = self.end[self.src] == self.start[self.dst]
        because[self.dst[binding][::-1]] = self.src[binding][::-1]
        return self.start, self.end, because, simulated

    def edits_near(self, run: Run, now: int) -> bool:
        """Whether an edited task that has not started is about to."""
        waiting = [s for s in self.edit.unknown if run.start[s] < 0 and self.start[s] < 0]
        return any(int(self.was_start[s]) < now + self.near for s in waiting)

    def enter(self, now: int) -> Run:
        """The run as it stands after tick `now`, -1 being before all."""
        need = np.bincount(self.dst[self.end[self.src] < 0], minlength=len(self.start)).tolist()
        run = Run(self.load, self.net, need)
        if now < 0:
            run.enter(0, [s for s in self.edit.slot.tolist() if not need[s]])
        else:
            active = np.flatnonzero((self.start >= 0) & (self.end < 0)).tolist()
            run.enter(now, [], [(i, int(self.start[i]), _left(self.net, self.start, self.end, i, now)) for i in active])
        return run

    def note(self, run: Run) -> None:
        """Write down what a run has found."""
        touched = [*run.begun, *np.flatnonzero((self.start >= 0) & (self.end < 0)).tolist()]
        for i in touched:
            self.start[i], self.end[i] = run.start[i], run.end[i]

    # -- guess and verify

    def guess(self, run: Run, now: int) -> tuple[int, int]:
        """Guess the rest, keep what is right; the first tick that is wrong (or NEVER), and the tasks gained.

        -1 gained: simulating the rest is cheaper.
        """
        waiting = np.flatnonzero(self.alive & (self.start < 0))
        active = np.flatnonzero((self.start >= 0) & (self.end < 0))
        parent, takes = self.was_because.copy(), self.was_end - self.was_start
        start = np.where(self.start >= 0, self.start, NEVER)
        end = np.where(self.end >= 0, self.end, NEVER)
        for i in active.tolist():
            end[i] = run.finish[i] if self.unknown[i] else max(now + 1, int(start[i] + takes[i]))
        best, most, kept = -1, 0, (start, end)
        for attempt in range(ATTEMPTS):
            self.follow(waiting, parent, takes, start, end, now, not attempt)
            known = end[waiting] < NEVER
            running = np.concatenate((active, waiting[known]))
            # every start is the end of the last condition
            last = np.full(len(start), -1, np.int64)
            np.maximum.at(last, self.dst, end[self.src])
            bad = waiting[last[waiting] != start[waiting]]
            wrong = int(np.minimum(last[bad], start[bad]).min(initial=NEVER))
            # and every end what the speeds make of the work
            sound = self.sound_until(run, now, running, start, end) if not attempt else -1
            better: dict[int, tuple[int, int]] = {}
            if sound < 0 and len(waiting) < MORE:
                return now + 1, -1
            if sound < 0:
                sound, better = self.other_ends(run, now, running, start, end, wrong, parent)
            wrong = min(wrong, sound)
            gain = int((start[waiting] < wrong).sum())
            enough = gain - most >= LITTLE
            if wrong > best:
                best, most, kept = wrong, gain, (start.copy(), end.copy())
            if wrong >= NEVER or not better or (not enough and attempt):
                break
            for i, (begin, finish) in better.items():  # try again with what was learned
                takes[i], end[i] = finish - begin, finish
        start, end = kept
        begins, ends = waiting[start[waiting] < best], running[end[running] < best]
        self.start[begins] = start[begins]
        self.end[ends] = end[ends]
        return best, len(begins)

    def follow(self, waiting: Ints, parent: Ints, takes: Ints, start: Ints, end: Ints, now: int, first: bool) -> None:
        """Let each waiting task start when its parent ends: all generations at once, from those that run."""
        follows = waiting[~self.unknown[waiting] & (parent[waiting] >= 0)]
        to = np.arange(len(start))
        to[follows] = parent[follows]
        far = np.zeros(len(start), np.int64)
        if first:  # durations are the old ones: all that hang on one task move as it did
            ups = to[follows]
            ups = ups[self.start[ups] >= 0]
            by = end[ups] - self.was_end[ups]
            if len(follows) < len(waiting) or not len(by) or (by != by[0]).any():
                while ((further := to[to]) != to).any():
                    to = further
                far[follows] = self.was_end[follows] - self.was_end[to[follows]]
            else:
                far[follows] = self.was_end[follows] - self.was_end[ups[0]]
                to[follows] = ups[0]
        else:
            far[follows] = takes[follows]
            while ((further := to[to]) != to).any():
                far += far[to]
                to = further
        start[waiting] = end[waiting] = NEVER
        follows = follows[end[to[follows]] < NEVER]
        # whoever waits starts after this tick, or it would not wait
        start[follows] = np.maximum(now + 1, end[to[follows]] + far[follows] - takes[follows])
        end[follows] = start[follows] + takes[follows]

    def sound_until(self, run: Run, now: int, tasks: Ints, start: Ints, end: Ints) -> int:
        """If all who can slow each other down are as they were in the old run at one moment, the tick of the next
        edit: until then speeds need no check. Else -1."""
        meets = self.meets
        tasks = tasks[meets[self.net.kind[tasks]]]
        by = start[tasks] - self.was_start[tasks]
        if not len(tasks) or (by != by[0]).any() or (end[tasks] - self.was_end[tasks] != by[0]).any():
            return -1
        shift = int(by[0])
        then = now - shift
        active = sorted(tasks[start[tasks] <= now].tolist())
        old = self.trace
        were = np.flatnonzero((old.start <= then) & (old.end > then))
        if were[meets[self.net.kind[were]]].tolist() != active or self.unknown[were].any():
            return -1
        over = (self.was_start > then) & (self.start >= 0) & ~self.unknown  # lies behind us, but then lay ahead
        if meets[self.net.kind[over]].any():
            return -1
        for i in active:
            if _left(old.net, old.start, old.end, i, then) != run.left[i] - run.rate[i] * (now - run.since[i]):
                return -1
        ahead = self.was_start[self.unknown & (self.was_start > then)]
        return int(ahead.min()) + shift if len(ahead) else int(NEVER)

    def other_ends(
        self, run: Run, now: int, tasks: Ints, start: Ints, end: Ints, before: int, parent: Ints
    ) -> tuple[int, dict[int, tuple[int, int]]]:
        """The first tick at which the speeds, as the guess has them, end a task elsewhere than guessed; and a better
        guess for such tasks: slot -> (start, end)."""
        net = self.net
        tasks = tasks[(start[tasks] < before) & (net.works[tasks] > 0)]
        kind = net.kind[tasks]
        groups = {key: tasks[kind == k] for key, k in net.kinds.items()}
        cells: dict[int, tuple[Ints, Ints]] = {}

        def over_time(c: int) -> tuple[Ints, Ints]:
            """How many run in a cell (of links), or whether any does (of ranks), from each mark on."""
            if c not in cells:
                members = np.concatenate([tasks[:0], *(group for key, group in groups.items() if c in key[0])])
                cells[c] = (_count if c < self.load.links else _merge)(start[members], end[members])
            return cells[c]

        wrong = int(NEVER)
        better: dict[int, tuple[int, int]] = {}
        for (_, links, against, pace), group in groups.items():
            if not len(group) or not (links or against):
                continue
            begun, ended = start[group], end[group]
            begin = np.maximum(begun, now)
            work = net.works[group] * SCALE
            for k in np.flatnonzero(begun <= now).tolist():  # those that run already
                i = int(group[k])
                work[k] = run.left[i] - run.rate[i] * (now - run.since[i])
            users, foes = [over_time(c) for c in links], [over_time(c) for c in against]
            marks = np.sort(np.concatenate([[now], *(when for when, _ in (*users, *foes))]))
            marks = marks[np.searchsorted(marks, now, "right") - 1 :]
            speed = np.full(len(marks), SCALE, np.int64)
            for when, count in users:
                speed = np.minimum(speed, SCALE // np.maximum(1, count[np.searchsorted(when, marks, "right") - 1]))
            slowed = np.zeros(len(marks), bool)
            for when, count in foes:
                slowed |= count[np.searchsorted(when, marks, "right") - 1] > 0
            speed = np.maximum(1, np.where(slowed, speed * pace // SCALE, speed))
            made = np.concatenate(([0], np.cumsum(speed[:-1] * np.diff(marks))))
            at = np.searchsorted(marks, begin, "right") - 1
            goal = made[at] + speed[at] * (begin - marks[at]) + work
            at = np.searchsorted(made, goal, "left") - 1
            true = marks[at] - (made[at] - goal) // speed[at]
            bad = true != ended
            if bad.any():
                wrong = min(wrong, int(np.minimum(true, ended)[bad].min()))
                if len(group) <= QUEUE:
                    order = np.argsort(begin, kind="stable")
                    order = order[int(np.flatnonzero(bad[order])[0]) :]
                    rows = [a[order].tolist() for a in (group, parent[group], begin, work, ended, bad)]
                    _queue(rows, marks.tolist(), made.tolist(), speed.tolist(), better)
                else:
                    for k in np.flatnonzero(bad).tolist():
                        better[int(group[k])] = int(begun[k]), int(true[k])
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


def _left(net: Net, start: Ints, end: Ints, i: int, now: int) -> int:
    """Work left of a running task: all of it, less what its speed has made of the ticks since its start."""
    begun = int(start[i])
    left, links, against = net.work[i] * SCALE, net.links[i], net.against[i]
    if not links and not against:
        return left - SCALE * (now - begun)
    beside = (start >= 0) & (start < now) & ((end > begun) | (end < 0))
    watched = {*links, *against}
    marks: list[tuple[int, int, tuple[int, ...]]] = []
    for k in np.flatnonzero(beside).tolist():
        cells = tuple(c for c in net.cells[k] if c in watched)
        if cells and net.work[k]:
            marks.append((max(begun, int(start[k])), 1, cells))
            marks.append((now if end[k] < 0 else min(now, int(end[k])), -1, cells))
    counts = dict.fromkeys(watched, 0)
    at = begun
    for t, by, cells in sorted(marks):
        if t > at:
            left -= (t - at) * _speed(counts, links, against, net.pace[i])
            at = t
        for c in cells:
            counts[c] += by
    return left - (now - at) * _speed(counts, links, against, net.pace[i])


def _speed(counts: dict[int, int], links: tuple[int, ...], against: tuple[int, ...], pace: int) -> int:
    speed = min((SCALE // max(1, counts[c]) for c in links), default=SCALE)
    return (speed * pace // SCALE if any(counts[c] for c in against) else speed) or 1


def _count(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """How many run from each mark on; the first mark is before all."""
    marks = np.concatenate(([-1], start, end))
    change = np.concatenate(([0], np.ones(len(start), np.int64), -np.ones(len(end), np.int64)))
    order = np.argsort(marks, kind="stable")
    marks, total = marks[order], np.cumsum(change[order])
    last = np.append(marks[1:] != marks[:-1], True)
    return marks[last], total[last]


def _merge(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """As `_count`, but only whether anybody runs: stretches without a gap become one."""
    if not len(start):
        return np.array([-1]), np.array([0])
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    gap = start[1:] > end[:-1]
    start, end = start[np.append(True, gap)], end[np.append(gap, True)]
    marks = np.empty(2 * len(start) + 1, np.int64)
    marks[0], marks[1::2], marks[2::2] = -1, start, end
    return marks, np.arange(len(marks)) & 1

"""A changed load, simulated again at a fraction of the time, and equal to the last tick.

Three steps, the last two in turns until the end:

1. *Keep*: up to the first tick at which the edit can matter, the old run is the new run. A schedule
   is its own snapshot (`cost.simulate`), so that the run is entered there: who is running follows from
   the old starts and ends, and how much each has left from who ran beside it.
2. *Simulate* past what was edited, event by event.
3. *Guess and verify*, once what runs has fallen into step, or won't soon. Guess that from here on every
   task starts when the task it started with in the old run has ended, and takes as long as it did. This
   is right where the rest of the step merely moves, and also where lanes move differently (a host far
   ahead, a backlog of transfers). Then verify the whole guess at once: every start must be the end of
   its last condition, and the speeds that follow from the guess must end each task in the tick guessed
   (`cost.verify`). Up to the first tick at which one of them fails, the guess is the run: whatever
   happens in a tick is decided by what happened before it. It is kept up to there, and step 2 goes on
   from that tick.

So exactness rests on the verification, never on the guess; a bad guess costs time only. There is nothing
to keep from the old run but its times, and a result can be edited again, in chains of any length.

Arrays run over the tasks alone that had not ended when the edit begins to matter: a late edit costs little more
than comparing the two loads, and a caller who knows what it changed saves that too.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import cast

import numpy as np

from laminar.cost.sim.diff import LONGEST, Edit, diff, told
from laminar.cost.sim.history import Trace, lefts
from laminar.cost.sim.judge import NEVER, GuessedSchedule
from laminar.cost.sim.no_gc import uncollected
from laminar.cost.sim.simulate import Ints, Run, Times, edges, simulate
from laminar.cost.sim.tasks import Load

TICKS = 12
"""Events simulated before a guess is tried; many more each time a guess gains little."""
PATIENCE = 12
"""So many times half as many more, until lanes have fallen into step."""
FEW, MORE = 100, 150
"""So many tasks are simulated sooner than guessed; and so many, sooner than verified in full."""
ATTEMPTS = 6
"""How often a guess is repeated with the durations that its own speeds ask for."""
LITTLE = 200
"""A guess, and each attempt at it, should gain so many tasks: about what it costs to verify one."""


def again(before: Times, load: Load, changed: Collection[int] | None = None, gone: Collection[int] = ()) -> Times:
    """The times of `load`, given those of a similar one: equal to `simulate(load)`, reasons included.

    What differs is found by comparing the two loads. Who made the edit may say it instead, which saves that: `changed`
    are the indices in `load` of all tasks that are new, stand in another order or are other than before (an `after`
    that no longer means the same tasks counts, one that is merely renumbered does not); `gone` the indices in the old
    load of tasks no longer there, or not in that order. This is taken on trust.
    """
    with uncollected():
        trace = trace_of(before)
        if before.step > LONGEST or len(trace.net.work) > 2 * len(load.tasks) + 64:
            return simulate(load)  # the second: too many empty slots after a long chain of edits
        edit = diff(trace, load) if changed is None else told(trace, load, changed, gone)
        found = None if edit is None else _Replay(trace, edit, load).run()
        if edit is None or found is None:
            return simulate(load)
        start, end, because, simulated = found
        straight = before.slot is None and not edit.fresh and not edit.gone
        how = {"simulated": simulated, "copied": len(load.tasks) - simulated, "full": False}
        return Times(load, edit.net, (start, end, because), None if straight else edit.slot, how)


def trace_of(times: Times) -> Trace:
    """What an edit starts from; made once per result."""
    found = times.__dict__.get("trace")
    if found is None:
        slot = np.arange(len(times.load.tasks)) if times.slot is None else times.slot
        found = times.__dict__["trace"] = Trace(times.load, times.net, slot, *times.by_slot)
    return cast(Trace, found)


class _Need(dict[int, int]):
    """By slot, how many conditions have yet to end: taken from an array when first asked for."""

    def __init__(self, counts: Ints, pos: Ints) -> None:
        self.count, self.pos = counts.item, pos.item

    def __missing__(self, slot: int) -> int:
        return self.count(self.pos(slot))


class _Replay:
    """One edited run, of the tasks alone that have not ended where the edit begins to matter.

    They go by their place in `ids`, a list of slots; `start` and `end` are -1 where not known yet.
    """

    def __init__(self, trace: Trace, edit: Edit, load: Load) -> None:
        self.load, self.edit, self.net, self.trace = load, edit, edit.net, trace
        first, total, fresh = edit.first, len(edit.net.work), edit.fresh
        order, ends = trace.by_end
        ids = order[int(np.searchsorted(ends, first)) :]
        if edit.gone:
            there = np.ones(total, bool)
            there[edit.gone] = False
            ids = ids[there[ids]]
        none = np.full(len(fresh), -1)
        self.was_start, self.was_end, self.why = (
            np.concatenate((a[ids], none)) for a in (trace.start, trace.end, trace.because)
        )
        ids = np.concatenate((ids, np.array(fresh, np.int64)))
        self.ids = ids
        self.pos = pos = np.full(total + 1, -1)  # slot -> place; so that -1 -> -1, one more
        pos[ids] = np.arange(len(ids))
        self.unknown = np.zeros(len(ids), bool)
        self.unknown[pos[edit.unknown]] = True
        self.start = np.where((self.was_start < first) & ~self.unknown, self.was_start, -1)
        self.end = np.full(len(ids), -1)
        self.late = self.start < 0
        src, dst = trace.net.pairs
        keep = np.flatnonzero(pos[src] >= 0)
        src, dst = pos[src[keep]], pos[dst[keep]]
        if edit.net.rows:  # conditions written anew
            rewritten = np.zeros(len(ids) + 1, bool)
            rewritten[pos[edit.net.rows]] = True  # those of gone tasks are the last
            stay = ~rewritten[dst]
            more_src, more_dst = (pos[a] for a in edges(edit.net.rows, edit.net.fresh))
            more = more_src >= 0
            src, dst = np.concatenate((src[stay], more_src[more])), np.concatenate((dst[stay], more_dst[more]))
        self.src, self.dst = src, dst
        self.kind, self.works = edit.net.kind[ids], edit.net.works[ids]
        self.meets = np.array([bool(cells) for cells, *_ in edit.net.kinds])
        """Per kind of surroundings, whether it meets anybody."""
        self.near = 64 * int(ends[-1]) // max(1, len(trace.slot))
        self.edited = [(s, trace.start.item(s) if s < len(trace.start) else -1) for s in edit.unknown]
        """Slots with other properties and their old starts; new ones -1."""
        self.touched = {*edit.unknown, *edit.gone}

    def run(self) -> tuple[Ints, Ints, Ints, int] | None:
        """Starts, ends, reasons by slot, and how many tasks were simulated; None if some can never start."""
        now, ticks, simulated = self.edit.first - 1, TICKS, 0
        while (open_tasks := int((self.end < 0).sum())) > 0:
            run = self.enter(now)
            now = run.advance(ticks if open_tasks > FEW else -1)
            patience = PATIENCE
            while now >= 0 and (self.edits_near(run, now) or (patience and not self.settled(run, now))):
                now = run.advance(TICKS // 2)
                patience -= patience > 0
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
        if (self.end < 0).any():
            return None
        start, end = self.everywhere(self.start, self.trace.start), self.everywhere(self.end, self.trace.end)
        binding = np.flatnonzero(self.end[self.src] == self.start[self.dst])[::-1]
        why = np.full(len(self.ids), -1)
        why[self.dst[binding]] = self.ids[self.src[binding]]
        # who started before the edit did so for the old reason
        return start, end, self.everywhere(np.where(self.late, why, self.why), self.trace.because), simulated

    def everywhere(self, values: Ints, old: Ints) -> Ints:
        """These values by slot, and the old ones of all who ended before."""
        out = np.concatenate((old, np.full(len(self.edit.fresh), -1)))
        out[self.edit.gone] = -1
        out[self.ids] = values
        return out

    def edits_near(self, run: Run, now: int) -> bool:
        """Whether an edited task that has not started is about to."""
        until, pos, start = now + self.near, self.pos.item, self.start.item
        return any(t < until and s not in run.start and start(pos(s)) < 0 for s, t in self.edited)

    def settled(self, run: Run, now: int) -> bool:
        """Whether a guess has a chance: all that compute have moved by the same, as many compute as did then, and
        whoever transfers has moved with them, or is one of a backlog and would not fall into step soon."""
        was, why, new, net = self.trace.start.item, self.trace.because.item, len(self.trace.start), self.net
        compute = set(chain.from_iterable(run.running[self.load.links :: 2]))
        shifts = {run.start[s] - was(s) if s < new else s for s in compute}
        if len(shifts) != 1:
            return False
        shift = shifts.pop()
        for s in set(chain.from_iterable(run.running)) - compute:
            if s < new and run.start[s] - was(s) == shift:
                continue
            if not any(f < new and why(f) == s and net.around[f] == net.around[s] for f in net.succ[s]):
                return False
        starts, ends = self.trace.computing
        then = now - shift
        return bool(starts.searchsorted(then, "right") - ends.searchsorted(then, "right") == len(compute))

    def enter(self, now: int) -> Run:
        """The run as it stands after tick `now`, -1 being before all."""
        need = np.bincount(self.dst[self.end[self.src] < 0], minlength=len(self.ids))
        run = Run(self.load, self.net, _Need(need, self.pos), sparse=True)
        if now < 0:
            run.enter(0, self.ids[need == 0].tolist())
        else:
            places = np.flatnonzero((self.start >= 0) & (self.end < 0))
            active = self.ids[places].tolist()
            if now < self.edit.first:  # as in the old run
                run.enter(now, [], self.trace.left(self.net, active, now))
            else:
                begun = self.start[places].tolist()
                since = min(begun, default=now)
                beside = np.flatnonzero((self.start >= 0) & (self.start < now) & ((self.end > since) | (self.end < 0)))
                rows = zip(*(a[beside].tolist() for a in (self.ids, self.start, self.end)), strict=True)
                ended = self.trace.ended(since, self.edit.first)
                run.enter(now, [], lefts(self.net, list(zip(active, begun, strict=True)), now, chain(ended, rows)))
        return run

    def note(self, run: Run) -> None:
        """Write down what a run has found."""
        for found, array in ((run.start, self.start), (run.end, self.end)):
            slots, ticks = (np.fromiter(a, np.int64, len(found)) for a in (found.keys(), found.values()))
            array[self.pos[slots]] = ticks

    def left_of(self, run: Run, now: int) -> dict[int, int]:
        """Work left of tasks that run now, by their place."""
        active = np.flatnonzero((self.start >= 0) & (self.end < 0)).tolist()
        slots = ((i, self.ids.item(i)) for i in active)
        return {i: run.left[s] - run.rate[s] * (now - run.since[s]) for i, s in slots}

    # -- guess and verify

    def guess(self, run: Run, now: int) -> tuple[int, int]:
        """Guess the rest, keep what is right; the first tick that is wrong (or NEVER), and the tasks gained.

        -1 gained: simulating the rest is cheaper.
        """
        waiting = np.flatnonzero(self.start < 0)
        active = np.flatnonzero((self.start >= 0) & (self.end < 0))
        if len(waiting) < FEW:
            return now + 1, -1
        parent, takes = self.pos[self.why], self.was_end - self.was_start
        start = np.where(self.start >= 0, self.start, NEVER)
        end = np.where(self.end >= 0, self.end, NEVER)
        for i in active.tolist():
            end[i] = run.finish[self.ids[i]] if self.unknown[i] else max(now + 1, int(start[i] + takes[i]))
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
                guessed = GuessedSchedule(list(self.net.kinds), self.kind, self.works, start, end, parent)
                sound, better = guessed.other_ends(running[start[running] < wrong], now, self.left_of(run, now))
            wrong = min(wrong, sound)
            gain = int((start[waiting] < wrong).sum())
            enough = gain - most >= LITTLE
            if wrong > best:
                best, most, kept = wrong, gain, (start.copy(), end.copy())
            if not better or (not enough and attempt) or len(waiting) - gain < FEW // 2:
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
        if first:  # durations are the old ones: all that depend on one task move as it did
            ups = to[follows]
            ups = ups[self.start[ups] >= 0]
            by = end[ups] - self.was_end[ups]
            if len(follows) < len(waiting) or not len(by) or (by != by[0]).any():
                while ((further := to[to]) != to).any():
                    to = further[further]
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
        meets, old = self.meets, self.trace
        tasks = tasks[meets[self.kind[tasks]]]
        by = start[tasks] - self.was_start[tasks]
        if not len(tasks) or (by != by[0]).any() or (end[tasks] - self.was_end[tasks] != by[0]).any():
            return -1
        shift = int(by[0])
        then = now - shift
        active = sorted(self.ids[tasks[start[tasks] <= now]].tolist())
        were = old.running(then)
        if were[meets[self.net.kind[were]]].tolist() != active or not self.touched.isdisjoint(were.tolist()):
            return -1
        # nobody lies behind us who then lay ahead
        over = (self.was_start > then) & (self.start >= 0) & ~self.unknown
        if meets[self.kind[over]].any() or (
            then < self.edit.first and meets[self.net.kind[old.within(then, self.edit.first)]].any()
        ):
            return -1
        for i, _, left in old.left(old.net, active, then):
            if left != run.left[i] - run.rate[i] * (now - run.since[i]):
                return -1
        ahead = [t for s in self.touched if s < len(old.start) and (t := old.start.item(s)) > then]
        return min(ahead) + shift if ahead else int(NEVER)

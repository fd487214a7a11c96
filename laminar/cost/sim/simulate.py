"""When does each task of a load start and end? An event-driven simulation, exact to the tick.

Each lane runs its tasks in order, one at a time, so that standing behind another task in a lane is
one more condition, like those in `after`: the load is a graph of conditions, and a task starts in
the tick in which the last of them ends. What it then costs depends on who else is running:

    speed = SCALE                              alone
          = SCALE // n                         on links, where the fullest has n users
          = that * drag.compute  // SCALE      compute, while a transfer runs on one of its ranks
          = that * drag.transfer // SCALE      a transfer, while compute runs on one of its ranks

A task is over in the first tick at which speed x ticks, summed, reaches work x SCALE. All is in
integers, so no result depends on rounding, on the order of a sum, or on when the clock started.

In one tick everything that ends in it ends first, then whatever that allows starts, tasks of no work
passing at once; only then are speeds set anew. So a speed is a function of who is running, and who
is running follows from the starts and ends alone: **a schedule is its own snapshot**. `cost.delta`
lives from that: any moment of an old run can be entered again without having been stored.

`because` is the task whose end allowed the start (of several, the first in the order `after`, then
lanes); -1 for a task that waited for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.cost.sim.no_gc import uncollected
from laminar.cost.sim.tasks import COMPUTE, FULL_SPEED, HOST, TRANSFER, Load
from laminar.errors import SimulationError
from laminar.ir.timeline import Span, Timeline

Ints = NDArray[np.int64]
Around = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
_BITS = 24  # of a heap key: the task's number; the tick stands above it
_MASK = (1 << _BITS) - 1


class TaskNet:
    """A load laid out for the loop: one list per property, conditions both ways.

    Tasks go by *slots*. In a fresh net the slot is the index in the load; `cost.delta` patches a net
    instead of building one, and then new tasks take slots at the end.

    Who slows whom is kept in *cells*, sets of running tasks: one per link, and per rank one of compute
    and one of transfers. A task enters `cells`, and is slowed while one of `against` has somebody in it.
    """

    work: list[int]
    cells: list[tuple[int, ...]]
    around: list[Around]
    """(cells, links, against, pace); pace is the speed left when `against` is not empty."""
    preds: list[tuple[int, ...]]
    """What must have ended: `after`, then the task before it in each lane."""
    succ: list[list[int]]

    def __init__(self, load: Load) -> None:
        n = len(load.tasks)
        if n >= _MASK:
            raise SimulationError(f"a load of {n} tasks is too large", allowed=f"fewer than {_MASK} tasks")
        columns: Any = zip(*load.tasks, strict=True) if n else ((),) * 5
        names, lanes, work, after, links = columns
        _check(load, names, lanes, work, after, links)
        self.work = list(work)
        keys = list(zip(lanes, links, strict=True))
        surroundings = {key: surroundings_of(load, *key) for key in set(keys)}
        self.around = [surroundings[key] for key in keys]
        self.cells = [around[0] for around in self.around]
        preds: list[tuple[int, ...]] = list(after)
        last = [-1] * len(load.lanes)
        for i, key in enumerate(lanes):
            for lane in key:
                before = last[lane]
                if before >= 0:
                    preds[i] += (before,)
                last[lane] = i
        self.preds = preds
        succ: list[list[int]] = [[] for _ in range(n)]
        for i, conditions in enumerate(preds):
            for p in conditions:
                succ[p].append(i)
        self.succ = succ

    @cached_property
    def pairs(self) -> tuple[Ints, Ints]:
        """The conditions as (from, to); those of one task lie in the order of `preds`."""
        return edges(range(len(self.preds)), self.preds)

    @cached_property
    def kinds(self) -> dict[Around, int]:
        """Numbers for the ways in which tasks are surrounded."""
        return {key: k for k, key in enumerate(dict.fromkeys(self.around))}

    @cached_property
    def kind(self) -> Ints:
        """Per slot the number of its surroundings."""
        return np.fromiter(map(self.kinds.__getitem__, self.around), np.int64, len(self.work))

    @cached_property
    def works(self) -> Ints:
        """Per slot its work."""
        return np.array(self.work, np.int64)


def edges(tasks: Sequence[int], preds: Sequence[tuple[int, ...]]) -> tuple[Ints, Ints]:
    """Conditions of `tasks` as (from, to) arrays."""
    counts = np.fromiter(map(len, preds), np.int64, len(preds))
    src = np.fromiter(chain.from_iterable(preds), np.int64)
    return src, np.repeat(np.fromiter(tasks, np.int64, len(preds)), counts)


def roles_of(load: Load, lanes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """What a task in these lanes is to others, and on which ranks."""
    roles = [load.lanes[lane].role for lane in lanes]
    role = TRANSFER if TRANSFER in roles else COMPUTE if COMPUTE in roles else HOST
    return role, tuple(sorted({load.lanes[lane].rank for lane, r in zip(lanes, roles, strict=True) if r == role}))


def surroundings_of(load: Load, lanes: tuple[int, ...], links: tuple[int, ...]) -> Around:
    """The cells such a task enters, its links, the cells it is slowed by, and the speed that leaves it."""
    role, ranks = roles_of(load, lanes)
    compute, transfer = load.drag.compute, load.drag.transfer
    if role == HOST or (compute, transfer) == (FULL_SPEED, FULL_SPEED):
        return links, links, (), FULL_SPEED
    mine, other, pace = (0, 1, compute) if role == COMPUTE else (1, 0, transfer)
    cells = tuple(load.links + 2 * r + mine for r in ranks)
    against = tuple(load.links + 2 * r + other for r in ranks) if pace != FULL_SPEED else ()
    return links + cells, links, against, pace


def _check(load: Load, names: Any, lanes: Any, work: Any, after: Any, links: Any) -> None:
    """Refuse what can't be meant, by the task's name."""
    n = len(names)
    if len(set(names)) != n:
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise SimulationError(f"two tasks are called {twice!r}", next="give every task of a load its own name")
    known = set(range(len(load.lanes)))
    for key in set(lanes):
        if not key or len(set(key)) < len(key) or not known.issuperset(key):
            name = names[lanes.index(key)]
            allowed = f"one or more different of 0..{len(known) - 1}"
            raise SimulationError(f"task {name!r} names lanes {key}", allowed=allowed)
    if n and min(work) < 0:
        i = work.index(min(work))
        raise SimulationError(f"task {names[i]!r} has work {work[i]}", allowed="ticks >= 0")
    flat = set(chain.from_iterable(after))
    if flat and (min(flat) < 0 or max(flat) >= n):
        i = next(i for i, a in enumerate(after) if any(not 0 <= p < n for p in a))
        raise SimulationError(f"task {names[i]!r} waits for {after[i]}", allowed=f"indices 0..{n - 1}")
    used = set(chain.from_iterable(links))
    if used and (min(used) < 0 or max(used) >= load.links):
        i = next(i for i, a in enumerate(links) if any(not 0 <= p < load.links for p in a))
        raise SimulationError(f"task {names[i]!r} uses links {links[i]}", allowed=f"links 0..{load.links - 1}")


class Run:
    """A simulation that can be entered at any tick and stopped after any tick."""

    def __init__(self, load: Load, net: TaskNet, need: Any, sparse: bool = False) -> None:
        """`need` gives the conditions that each task still waits for; a `sparse` run keeps what it touches only."""
        n = len(net.work)
        self.net, self.need, self.links = net, need, load.links
        self.start: Any = {} if sparse else [-1] * n
        self.end: Any = {} if sparse else [-1] * n
        self.rate: Any = defaultdict(int) if sparse else [0] * n
        self.since: Any = {} if sparse else [0] * n
        self.left: Any = {} if sparse else [0] * n
        self.finish: Any = {} if sparse else [-1] * (n + 1)
        self.heap: list[int] = []
        ranks = 1 + max((lane.rank for lane in load.lanes), default=0)
        self.running: list[list[int]] = [[] for _ in range(load.links + 2 * ranks)]
        """Per cell the tasks that run in it."""
        self.begun: list[int] = []
        """Slots in the order in which they started."""
        self.busy = [False] * len(self.running)
        """Per cell whether speeds were last set with somebody in it."""

    def enter(self, t: int, ready: list[int], active: Sequence[tuple[int, int, int]] = ()) -> None:
        """Stand at tick `t`: `active` tasks as (slot, start, work left in parts of SCALE); `ready` ones start now."""
        net, n = self.net, len(self.net.work)
        for i, started, left in active:
            self.start[i], self.left[i], self.since[i] = started, left, t
            for c in net.cells[i]:
                self.running[c].append(i)
                self.busy[c] = True
        for i, _, left in active:
            self.rate[i] = speed = self.speed(i)
            self.finish[i] = at = t - (-left // speed)
            heappush(self.heap, at << _BITS | i)
        if ready:  # a task of no slot ends here, and allows them to start
            self.succ, self.cells = [*net.succ, ready], [*net.cells, ()]
            for i in ready:
                self.need[i] += 1
            self.finish[n] = t
            heappush(self.heap, t << _BITS | n)
        else:
            self.succ, self.cells = net.succ, net.cells

    def speed(self, i: int) -> int:
        """What a running task makes of each tick, given who else runs."""
        _, links, against, pace = self.net.around[i]
        running, speed = self.running, FULL_SPEED
        for link in links:
            speed = min(speed, FULL_SPEED // len(running[link]))
        for c in against:
            if running[c]:
                return speed * pace // FULL_SPEED or 1
        return speed or 1

    @property
    def latest(self) -> int:
        """The last end in sight, as speeds are now."""
        return max(self.heap, default=0) >> _BITS

    def advance(self, ticks: int = -1) -> int:
        """Go on for so many ticks in which something ends, or to the end (-1); the tick reached, -1 at the end."""
        net, heap, finish, running, busy, links = self.net, self.heap, self.finish, self.running, self.busy, self.links
        need, start, end, rate, since, left = self.need, self.start, self.end, self.rate, self.since, self.left
        succ, cells, work, speed_of, begin = self.succ, self.cells, net.work, self.speed, self.begun.append
        root = len(work)
        while heap:
            key = heappop(heap)
            i, t = key & _MASK, key >> _BITS
            if finish[i] != t:
                continue  # its speed has changed since
            finish[i] = -1
            ended = [i]
            while heap and heap[0] >> _BITS == t:
                i = heappop(heap) & _MASK
                if finish[i] == t:
                    finish[i] = -1
                    ended.append(i)
            changed: list[int] = []
            for i in ended:
                for c in cells[i]:
                    running[c].remove(i)
                    changed.append(c)
            touched: list[int] = []
            for i in ended:  # grows while it is walked: tasks of no work end in the tick they start
                if i != root:
                    end[i] = t
                for j in succ[i]:
                    need[j] -= 1
                    if not need[j]:
                        start[j] = t
                        begin(j)
                        if work[j]:
                            touched.append(j)
                            left[j] = work[j] * FULL_SPEED
                            for c in cells[j]:
                                running[c].append(j)
                                changed.append(c)
                        else:
                            ended.append(j)
            for c in changed:
                if c < links:
                    touched += running[c]
                elif busy[c] != bool(running[c]):
                    busy[c] = not busy[c]
                    touched += running[c - 1 if (c - links) & 1 else c + 1]
            for i in touched:
                speed = speed_of(i) if cells[i] else FULL_SPEED
                old = rate[i]
                if speed != old:
                    if old:
                        left[i] -= old * (t - since[i])
                    since[i], rate[i] = t, speed
                    finish[i] = at = t - (-left[i] // speed)
                    heappush(heap, at << _BITS | i)
            ticks -= 1
            if not ticks:
                return t
        return -1


@dataclass(frozen=True, eq=False)
class Times:
    """When each task of `load` started and ended, in ticks, and what allowed it to start."""

    load: Load
    net: TaskNet = field(repr=False)
    by_slot: tuple[Ints, Ints, Ints] = field(repr=False)
    """Starts, ends and reasons (-1 in empty slots)."""
    slot: Ints | None = field(default=None, repr=False)
    """Per task its slot; None where that is its index."""
    how: dict[str, Any] = field(default_factory=dict)
    """How it was found: tasks `simulated` and `copied`, and whether it was a `full` run."""

    @property
    def step(self) -> int:
        """Ticks until the last task has ended."""
        return int(self.by_slot[1].max(initial=0))

    @cached_property
    def start(self) -> Ints:
        """Per task its first tick."""
        return self.by_slot[0] if self.slot is None else self.by_slot[0][self.slot]

    @cached_property
    def end(self) -> Ints:
        """Per task the tick in which it ended."""
        return self.by_slot[1] if self.slot is None else self.by_slot[1][self.slot]

    @cached_property
    def because(self) -> Ints:
        """Per task the one whose end allowed it to start; -1 for one that waited for nothing."""
        if self.slot is None:
            return self.by_slot[2]
        at = np.full(len(self.net.work) + 1, -1)  # the last: of -1
        at[self.slot] = np.arange(len(self.slot))
        found: Ints = at[self.by_slot[2][self.slot]]
        return found

    def same(self, other: Times) -> bool:
        """Equal to the last tick, reasons included."""
        mine, theirs = (self.start, self.end, self.because), (other.start, other.end, other.because)
        return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def simulate(load: Load) -> Times:
    """Run the whole load from tick 0."""
    with uncollected():
        net = TaskNet(load)
        need = list(map(len, net.preds))
        ready = [i for i, count in enumerate(need) if not count]
        run = Run(load, net, need)
        run.enter(0, ready)
        run.advance()
    start, end = np.array(run.start, np.int64), np.array(run.end, np.int64)
    if len(end) and end.min() < 0:
        raise blocked(load, net, run.end)
    how = {"simulated": len(end), "copied": 0, "full": True}
    return Times(load, net, (start, end, reasons(net, start, end)), None, how)


def reasons(net: TaskNet, start: Ints, end: Ints) -> Ints:
    """Per task the first of its conditions that ended in the tick it started."""
    because = np.full(len(start), -1, np.int64)
    src, dst = net.pairs
    binding = end[src] == start[dst]
    because[dst[binding][::-1]] = src[binding][::-1]  # the last write wins: the first condition
    return because


def blocked(load: Load, net: TaskNet, end: Sequence[int]) -> SimulationError:
    """The error for tasks that wait for each other, naming one ring of them."""
    i = next(i for i, t in enumerate(end) if t < 0)
    seen: dict[int, int] = {}
    while i not in seen:
        seen[i] = len(seen)
        i = next(p for p in net.preds[i] if end[p] < 0)
    ring = [load.tasks[k].name for k in list(seen)[seen[i] :]]
    left = sum(t < 0 for t in end)
    shown = " <- ".join(ring[:8]) + (" <- ..." if len(ring) > 8 else f" <- {ring[0]}")
    return SimulationError(
        f"{left} tasks can never start: they wait for each other",
        ring=shown,
        next="a task waits for its `after` and for the tasks before it in its lanes; break one of these",
    )


def timeline(
    load: Load,
    times: Times,
    labels: Sequence[dict[str, Any]],
    *,
    ranks: int = 0,
    stands_for: dict[int, tuple[int, ...]] | None = None,
    memory: dict[int, tuple[tuple[int, int], ...]] | None = None,
    meta: dict[str, Any] | None = None,
) -> Timeline:
    """The times with their labels: one span per task and rank.

    `labels` runs parallel to the tasks; each gives any of the fields of `Span` that a task does not
    know (kind, op, family, module, phase, cause, bytes, source). Without a `kind` it follows from the
    lanes. A task on lanes of several ranks becomes a span on each.
    """
    kind_of = {HOST: "host", COMPUTE: "compute", TRANSFER: "communication"}
    first: dict[int, int] = {}
    where: list[tuple[int, int]] = []  # task, lane
    for i, task in enumerate(load.tasks):
        first[i] = len(where)
        seen: set[int] = set()
        role, _ = roles_of(load, task.lanes)
        for lane in task.lanes:
            if load.lanes[lane].role == role and load.lanes[lane].rank not in seen:
                seen.add(load.lanes[lane].rank)
                where.append((i, lane))
    spans = []
    start, end, because = times.start.tolist(), times.end.tolist(), times.because.tolist()
    for i, lane in where:
        rank, kind = load.lanes[lane]
        fields = {"kind": kind_of[load.lanes[lane].role], **labels[i]}
        reason = first[because[i]] if because[i] >= 0 else -1
        spans.append(Span(load.tasks[i].name, kind, rank, start[i], end[i], because=reason, **fields))
    written = sorted({lane.rank for lane in load.lanes})
    stands_for = stands_for or {r: (r,) for r in written}
    return Timeline(
        kind="simulated",
        ranks=ranks or sum(map(len, stands_for.values())),
        spans=tuple(spans),
        stands_for=stands_for,
        memory=memory or {},
        meta=meta or {},
    )

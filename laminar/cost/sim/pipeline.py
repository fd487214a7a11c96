"""When does each firing of a net begin and end, and how long are places idle?

A place that is free begins the earliest firing of its order that may run: it is within the window, all it reads has
arrived, and a register is free for all it makes. A place ends its step before it begins its next. The runtime does the
same, so with the times of firings given, this execution is the one to expect. Time is in whole nanoseconds and ties are
broken by number: the same net and the same times give the same ticks on every machine.

What crosses from one place to another takes the time of its transfer. Transfers from one place to another share one
lane and follow each other in the order in which they were made; those of other pairs, and those of the other direction,
disturb them only where both are told to use a lane (a network card, `cost/comm/stage_messages.py`), which a transfer
then has for itself until it has arrived. A register that crosses is known to be free again `grant_ns` after its last
reader has ended.

Places that share a rank take turns, unless one of them only loads or saves: that goes on beside the step.

In one tick all ends come first, then places choose, in the order of their numbers. A step has ended when all of its
firings have. The *steady* step time is the mean distance of such ends, without the first, which finds the pipe empty.
The *bubble* of a place is the share of that time in which it runs nothing.

This says nothing about whether a net finishes under another timing; `lower/stages/deadlock.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any, NamedTuple

from laminar.errors import NetError
from laminar.ir.net import Net
from laminar.ir.timeline import Span, Timeline

FiringWork = Mapping[str, int] | Callable[[str, int, int], int]
"""Nanoseconds of a firing: by actor, or of (actor, firing of the step, step)."""

_PHASES = {"input": "backward", "weight": "backward", "reduce": "backward", "optimize": "optimizer"}


class Ran(NamedTuple):
    """One firing, or one transfer of one register, and when."""

    name: str
    """Of the actor, or of the queue that was moved."""
    k: int
    """Which firing of the step; of a transfer, which register of the step."""
    step: int
    place: int
    """Where it ran; of a transfer, where it went."""
    start: int
    end: int
    because: int
    """Index of what ended and so allowed this to begin; -1: nothing had to."""
    source: int = -1
    """Of a transfer: the place it came from; -1 for firings."""


@dataclass(frozen=True, eq=False)
class Execution:
    """What ran when, over some steps."""

    net: Net
    steps: int
    ran: tuple[Ran, ...]
    in_flight: dict[str, int]
    """Queue -> most registers that were taken at one time."""
    meta: dict[str, str] = field(default_factory=dict)

    @cached_property
    def firings(self) -> tuple[Ran, ...]:
        """Without the transfers."""
        return tuple(r for r in self.ran if r.source < 0)

    @cached_property
    def step_ends(self) -> tuple[int, ...]:
        """When the last firing of each step ended."""
        ends = [0] * self.steps
        for r in self.firings:
            ends[r.step] = max(ends[r.step], r.end)
        return tuple(ends)

    @property
    def step_ns(self) -> float:
        """A step in the steady state; with a single step, that one."""
        if self.steps == 1:
            return float(self.step_ends[0])
        return (self.step_ends[-1] - self.step_ends[0]) / (self.steps - 1)

    @cached_property
    def busy_ns(self) -> tuple[int, ...]:
        """Per place, nanoseconds of work between the end of the first step and the end of the last."""
        first, last = (self.step_ends[0], self.step_ends[-1]) if self.steps > 1 else (0, self.step_ends[0])
        out = [0] * len(self.net.places)
        for r in self.firings:
            out[r.place] += max(0, min(r.end, last) - max(r.start, first))
        return tuple(out)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Per place, the share of the steady time in which it runs nothing."""
        whole = self.step_ns * max(1, self.steps - 1)
        return tuple(1 - busy / whole if whole else 0.0 for busy in self.busy_ns)

    def times(self) -> dict[tuple[str, int, int], tuple[int, int]]:
        """(actor, firing, step) -> (start, end)."""
        return {(r.name, r.k, r.step): (r.start, r.end) for r in self.firings}

    def order(self, place: int, step: int = 0) -> tuple[tuple[str, int], ...]:
        """The firings of a step as a place began them."""
        mine = [r for r in self.firings if r.place == place and r.step == step]
        return tuple((r.name, r.k) for r in sorted(mine, key=lambda r: (r.start, r.end)))

    def timeline(self, steps: range | None = None) -> Timeline:
        """As spans: firings on the lane `compute` of each place's first rank, transfers on a lane where they arrive.

        Loaders and savers stand on the lane `host`. `steps` says which; without it all of them.
        """
        wanted = range(self.steps) if steps is None else steps
        kept = {i: k for k, i in enumerate(i for i, r in enumerate(self.ran) if r.step in wanted)}
        places = self.net.places
        stage = {a.name: a.stage for a in self.net.actors}
        kinds = {a.name: a.kind for a in self.net.actors}
        size = {q.name: q.bytes for q in self.net.queues}
        spans = []
        for i in kept:
            r = self.ran[i]
            name, rank, because = f"{r.name}.{r.k}", places[r.place].ranks[0], kept.get(r.because, -1)
            if r.source >= 0:
                lane, kind, op = f"communication:{r.source}>{r.place}", "communication", "send"
                more: dict[str, Any] = {"cause": f"queue {r.name}", "bytes": size[r.name]}
            else:
                op = kinds[r.name]
                lane = kind = "host" if op in ("load", "save") else "compute"
                more = {"family": op, "phase": _PHASES.get(op, op), "module": f"stage {stage[r.name]}"}
            spans.append(Span(name, lane, rank, r.start, r.end, kind, op, because=because, **more))
        stands_for: dict[int, tuple[int, ...]] = {}
        for place in places:
            others = set(stands_for.get(place.ranks[0], ())) | set(place.ranks)
            stands_for[place.ranks[0]] = tuple(sorted(others))
        ranks = len({rank for place in places for rank in place.ranks})
        meta = {"steps": len(wanted), "window": self.net.window, **self.meta}
        return Timeline("simulated", ranks, tuple(spans), stands_for, {}, meta)

    def one(self, step: int) -> Timeline:
        """One step alone: from the end of the one before to its own.

        Loaders are steps ahead of it; of them there is what they did in that time.
        """
        first, last = (0, *self.step_ends)[step : step + 2]
        found, whole = self.timeline(range(step, step + 1)), self.timeline()
        ahead = [
            replace(s, start=max(s.start, first), end=min(s.end, last), because=-1)
            for s in whole.spans
            if s.op == "load" and s.end > first and s.start < last
        ]
        kept = [i for i, s in enumerate(found.spans) if s.op != "load"]
        where = {i: k for k, i in enumerate(kept)}
        spans = [replace(found.spans[i], because=where.get(found.spans[i].because, -1)) for i in kept]
        return replace(found, spans=(*spans, *ahead))


def execute(
    net: Net,
    work: FiringWork,
    steps: int = 3,
    *,
    transfers: Mapping[str, int] | None = None,
    lanes: Mapping[str, tuple[int, ...]] | None = None,
    grant_ns: int = 0,
) -> Execution:
    """Run so many steps of a net, given the nanoseconds of firings and of transfers (by queue; none: at once).

    `lanes` are those that transfers of a queue use besides that of their two places.
    """
    return _Run(net, work, steps, transfers or {}, lanes or {}, grant_ns).run()


class _Line:
    """A queue while the clock runs."""

    __slots__ = ("claimed", "consumers", "freed", "gives", "name", "per_step", "producer", "registers", "top")

    def __init__(self, name: str, registers: int, gives: int, filled: int, producer: _Doer) -> None:
        self.name, self.registers, self.gives, self.producer = name, registers, gives, producer
        self.claimed = filled
        """Registers taken by the producer since the beginning."""
        self.freed: list[int] = []
        """Registers given back, by each consumer."""
        self.top = filled
        self.per_step = gives * producer.fires
        self.consumers: list[_Doer] = []


class _Doer:
    """An actor while the clock runs."""

    __slots__ = ("arrived", "begun", "fills", "fires", "last", "name", "place", "reads", "spots")

    def __init__(self, name: str, place: int, fires: int, spots: list[int], last: int) -> None:
        self.name, self.place, self.fires, self.spots, self.last = name, place, fires, spots, last
        self.begun = 0
        self.reads: list[tuple[_Line, int, int]] = []
        """Queue, which of its consumers this is, registers it takes."""
        self.arrived: list[int] = []
        """For each queue it reads, registers that have come since the beginning."""
        self.fills: list[_Line] = []

    def ready(self) -> bool:
        """Whether all it reads is there, and there is room for all it makes."""
        if self.begun >= self.last:
            return False
        n = self.begun + 1
        for (_, _, take), arrived in zip(self.reads, self.arrived, strict=True):
            if arrived < n * take:
                return False
        return all(q.claimed + q.gives - min(q.freed) <= q.registers for q in self.fills)


class _Run:
    """The event loop of one execution."""

    def __init__(
        self,
        net: Net,
        work: FiringWork,
        steps: int,
        transfers: Mapping[str, int],
        lanes: Mapping[str, tuple[int, ...]],
        grant_ns: int,
    ) -> None:
        if steps < 1:
            raise NetError(f"{steps} steps can't be run", allowed="1 or more")
        self.net, self.steps, self.transfers, self.lanes, self.grant_ns = net, steps, transfers, lanes, grant_ns
        self.work = work.__getitem__ if isinstance(work, Mapping) else None
        self.drawn = None if isinstance(work, Mapping) else work
        spots: dict[str, list[int]] = {a.name: [0] * a.fires for a in net.actors}
        for order in net.orders:
            for spot, (name, k) in enumerate(order):
                spots[name][k] = spot
        self.doers = {a.name: _Doer(a.name, a.place, a.fires, spots[a.name], a.fires * steps) for a in net.actors}
        self.at = [[d for d in self.doers.values() if d.place == p] for p in range(len(net.places))]
        self.lines = []
        for q in net.queues:
            line = _Line(q.name, q.registers, q.gives, q.filled, self.doers[q.producer])
            self.lines.append(line)
            line.producer.fills.append(line)
            for c in q.consumers:
                reader = self.doers[c]
                reader.reads.append((line, len(line.consumers), q.taken(c)))
                reader.arrived.append(q.filled)
                line.consumers.append(reader)
                line.freed.append(0)
        self.length = [len(order) for order in net.orders]
        self.done = [bytearray(n * steps) for n in self.length]
        self.first = [0] * len(net.places)
        self.free = [True] * len(net.places)
        beside = [all(a.kind in ("load", "save") for a in net.actors if a.place == p) for p in range(len(net.places))]
        ranks = [set(place.ranks) for place in net.places]
        self.rivals = [
            [o for o in range(len(ranks)) if o != p and not (beside[o] or beside[p]) and not mine.isdisjoint(ranks[o])]
            for p, mine in enumerate(ranks)
        ]
        self.taken: dict[tuple[int, int] | int, tuple[int, int]] = {}
        """Lane, of a pair of places or by number -> when it is free again, and the transfer that then ends."""
        self.heap: list[tuple[int, int, str, object]] = []
        self.seq = 0
        self.ran: list[Ran] = []
        self.woken: dict[int, int] = {}
        """Place that may have something to begin -> what has just ended."""

    def run(self) -> Execution:
        """All steps."""
        self.woken = dict.fromkeys(range(len(self.at)), -1)
        self.choose(0)
        heap = self.heap
        while heap:
            now = heap[0][0]
            while heap and heap[0][0] == now:
                _, _, what, event = heappop(heap)
                getattr(self, what)(now, event)
            self.choose(now)
        if any(d.begun < d.last for d in self.doers.values()):
            stuck = next(d for d in self.doers.values() if d.begun < d.last)
            raise NetError(
                f"the net stands still: {stuck.name}.{stuck.begun % stuck.fires} never begins",
                next="ask `lower.check.check_net`, which names what waits for what",
            )
        return Execution(self.net, self.steps, tuple(self.ran), {q.name: q.top for q in self.lines})

    def push(self, when: int, what: str, event: object) -> None:
        """`what` is the method to call then."""
        self.seq += 1
        heappush(self.heap, (when, self.seq, what, event))

    def choose(self, now: int) -> None:
        """Every free place that may have something to begin takes the earliest in its order that is ready."""
        window = self.net.window
        while self.woken:
            place = min(self.woken)
            why = self.woken.pop(place)
            if not self.free[place] or not all(self.free[rival] for rival in self.rivals[place]):
                continue
            length, first = self.length[place], self.first[place]
            if first == len(self.done[place]):
                continue
            reach = (first // length + 1) * length - 1  # a step ends before the next begins at this place
            if window is not None:
                reach = min(reach, first + window)
            best, spot = None, reach + 1
            for d in self.at[place]:
                if d.begun < d.last:
                    step, k = divmod(d.begun, d.fires)
                    here = step * length + d.spots[k]
                    if here < spot and d.ready():
                        best, spot = d, here
            if best is not None:
                self.begin(best, spot, now, why)

    def begin(self, d: _Doer, spot: int, now: int, why: int) -> None:
        """Take registers; the end is known at once."""
        step, k = divmod(d.begun, d.fires)
        took = self.drawn(d.name, k, step) if self.drawn else self.work(d.name) if self.work else 0
        if took < 0:
            raise NetError(f"{d.name}.{k} takes {took} ns", allowed="0 or more")
        d.begun += 1
        self.free[d.place] = False
        for q in d.fills:
            q.claimed += q.gives
            q.top = max(q.top, q.claimed - min(q.freed))
        self.ran.append(Ran(d.name, k, step, d.place, now, now + took, why))
        self.push(now + took, "ended", (d, spot, len(self.ran) - 1))

    def ended(self, now: int, event: tuple[_Doer, int, int]) -> None:
        """Pass on what was made, give back what was read."""
        d, spot, me = event
        self.free[d.place] = True
        self.woken[d.place] = me
        for rival in self.rivals[d.place]:
            self.woken.setdefault(rival, me)
        done = self.done[d.place]
        done[spot] = 1
        first = self.first[d.place]
        while first < len(done) and done[first]:
            first += 1
        self.first[d.place] = first
        for q, which, take in d.reads:
            if self.grant_ns and q.producer.place != d.place:
                self.push(now + self.grant_ns, "granted", (q, which, take, me))
            else:
                self.granted(now, (q, which, take, me))
        for q in d.fills:
            homes = dict.fromkeys(c.place for c in q.consumers)
            took = self.transfers.get(q.name, 0)
            for home in homes:
                if home == d.place or not took:
                    self.arrived(now, (q, home, q.gives, me))
                    continue
                used: tuple[tuple[int, int] | int, ...] = ((d.place, home), *self.lanes.get(q.name, ()))
                for j in range(q.gives):
                    until, last = max(self.taken.get(lane, (0, -1)) for lane in used)
                    start, why = (until, last) if until > now else (now, me)
                    step, k = divmod((d.begun - 1) * q.gives + j, q.per_step)
                    self.ran.append(Ran(q.name, k, step, home, start, start + took, why, d.place))
                    moved = len(self.ran) - 1
                    self.taken.update(dict.fromkeys(used, (start + took, moved)))
                    self.push(start + took, "arrived", (q, home, 1, moved))

    def arrived(self, now: int, event: tuple[_Line, int, int, int]) -> None:
        """Registers have come to a place: all readers there see them."""
        q, home, count, me = event
        for c in q.consumers:
            if c.place == home:
                for i, (line, _, _) in enumerate(c.reads):
                    if line is q:
                        c.arrived[i] += count
        self.woken.setdefault(home, me)

    def granted(self, now: int, event: tuple[_Line, int, int, int]) -> None:
        """A reader has given registers back, and the producer knows."""
        q, which, take, me = event
        q.freed[which] += take
        self.woken.setdefault(q.producer.place, me)

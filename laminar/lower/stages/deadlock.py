"""Does a net finish, whoever goes first, and what memory can it ever need? Decided before anything runs.

**One execution decides for all.** An actor fires in the order of its micro-batches, queues are first in, first out, and
each has one producer and registers of its own. So what the n-th firing of an actor has to wait for is known without
running anything: its inputs are made by certain firings of their producers, its output registers are given back by
certain firings of their readers, and the order and window of its place ask that certain earlier entries are over.
Every one of these conditions says "that firing has ended": once met it stays met, and no firing takes away what another
waits for. A place does one thing at a time, but what has begun ends without waiting for anything, so that only delays.
Hence where two interleavings differ, either can still do what the other has done, and both end with the same firings
done: all of them finish, or none does, and then all get stuck at the same firings. (The net is conflict-free, or
*persistent*. Rates, orders and windows only decide which firings a condition names.)

**Two steps are enough.** Over a step the producer of a queue makes as many registers as each reader takes (rates
balance, `ir/net.py` sees to it), so after a step every queue holds what it held before, and each step is like the
one before it. No condition names a firing of a later step: inputs and free registers come from this step or earlier
ones, and so do the earlier entries of an order. So if a step got stuck, conditions within that step would form a ring,
and the first step has the same ring. The second is played so that the boundary is seen as well.

**Memory.** No rank ever holds more than the registers of all queues that are filled or read where it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from laminar.errors import NetError
from laminar.ir.net import Firing, Net

CHECKED_STEPS = 2
_TRIES = 500_000  # firings that the search for the fewest registers may play; then it takes what is enough


@dataclass(frozen=True, slots=True)
class Wait:
    """What a firing that can't begin is waiting for."""

    firing: Firing
    why: str
    """`empty`: a queue lacks what it reads; `full`: one has no room; `order`: something stands before it."""
    on: Firing
    """The firing that would have to end, or the first of those."""
    queue: str = ""
    held: str = ""
    """Of a full queue: how many registers are taken."""

    def __str__(self) -> str:
        me, other = _name(self.firing), _name(self.on)
        if self.why == "empty":
            return f"{me} reads queue {self.queue}, which {other} has not filled"
        if self.why == "full":
            return f"{me} needs a register of queue {self.queue}: {self.held} taken, and {other} has not read"
        return f"{me} stands behind {other} in the order of their place"


@dataclass(frozen=True)
class NetVerdict:
    """What is known about a net before it runs."""

    net: Net
    finishes: bool
    ring: tuple[Wait, ...]
    """If it does not: firings that wait for each other, each for the next and the last for the first."""
    bytes: tuple[int, ...]
    """Per place: no rank there ever holds more in registers."""
    memory_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether every rank has that much memory."""
        return self.memory_bytes is None or max(self.bytes, default=0) <= self.memory_bytes

    @cached_property
    def needs(self) -> dict[str, int] | None:
        """Queue -> registers it must have for the net to finish, as few more as can be; None: no number helps."""
        return {} if self.finishes else fewest(self.net)

    def __str__(self) -> str:
        if not self.finishes:
            return f"stands still: {self.ring[0]}"
        return f"finishes; at most {max(self.bytes, default=0):,} bytes in registers on a rank"


def check_net(net: Net, memory_bytes: int | None = None) -> NetVerdict:
    """Whether a net finishes every step under every timing, and what its registers need at most."""
    play = _Play(net)
    fired = play.run(play.registers)
    stuck = fired != play.last
    ring = tuple(play.ring(fired, play.registers)) if stuck else ()
    return NetVerdict(net, not stuck, ring, _bytes(net), memory_bytes)


def refuse_deadlock(net: Net, memory_bytes: int | None = None) -> NetVerdict:
    """The verdict, if it is a good one; else an error that names who waits for whom, or what is too large."""
    verdict = check_net(net, memory_bytes)
    if not verdict.finishes:
        raise NetError(
            "this net would stand still: its actors wait for each other",
            ring="; ".join(map(str, verdict.ring)),
            needs=needed(net, verdict.needs),
            next="change the orders, or fill a queue before the first step"
            if verdict.needs is None
            else "give these queues more registers, or use a wider window",
        )
    if not verdict.fits:
        assert memory_bytes is not None
        place = max(range(len(net.places)), key=lambda p: verdict.bytes[p])
        held = [q for q in net.queues if place in net.holders(q)]
        largest = sorted(held, key=lambda q: -q.registers * q.bytes)[:3]
        raise NetError(
            f"place {place} ({net.places[place]}) would hold up to {verdict.bytes[place]:,} bytes in registers",
            allowed=f"{memory_bytes:,} bytes",
            at=", ".join(f"{q.name}: {q.registers} x {q.bytes:,}" for q in largest),
            next="fewer registers, smaller micro-batches, or recompute more",
        )
    return verdict


def _name(firing: Firing) -> str:
    return f"{firing[0]}.{firing[1]}"


def needed(net: Net, needs: Mapping[str, int] | None) -> str:
    """What queues lack, in words."""
    if needs is None:
        return "no number of registers helps"
    has = {q.name: q.registers for q in net.queues}
    return ", ".join(f"queue {name} needs {n} registers, has {has[name]}" for name, n in needs.items())


def _bytes(net: Net) -> tuple[int, ...]:
    """Per place what its fullest rank may hold; a rank that is at several places holds what any of them does."""
    at: dict[int, set[int]] = {}
    for p, place in enumerate(net.places):
        for rank in place.ranks:
            at.setdefault(rank, set()).add(p)
    each = {places: net.bound_bytes(*places) for places in set(map(frozenset, at.values()))}
    return tuple(max(each[frozenset(at[rank])] for rank in place.ranks) for place in net.places)


# -- the execution -----------------------------------------------------------------------------


class _Play:
    """A net laid out for playing. Its whole state is how often each actor has fired."""

    def __init__(self, net: Net) -> None:
        self.net = net
        number = {a.name: i for i, a in enumerate(net.actors)}
        self.registers = [q.registers for q in net.queues]
        self.last = [a.fires * CHECKED_STEPS for a in net.actors]
        self.home = [a.place for a in net.actors]
        self.orders = [[number[name] for name, _ in order] for order in net.orders]
        self.spots: list[list[int]] = [[0] * a.fires for a in net.actors]
        for order in net.orders:
            for spot, (name, k) in enumerate(order):
                self.spots[number[name]][k] = spot
        self.reads: list[list[tuple[int, int, int, int, int]]] = [[] for _ in net.actors]
        """Per actor: queue, its filling, who makes it, how many at once, how many this one takes."""
        self.fills: list[list[tuple[int, int, int, list[tuple[int, int]]]]] = [[] for _ in net.actors]
        """Per actor: queue, its filling, how many this one makes, its readers and what each takes."""
        for j, q in enumerate(net.queues):
            maker = number[q.producer]
            takers = [(number[c], q.taken(c)) for c in q.consumers]
            self.fills[maker].append((j, q.filled, q.gives, takers))
            for c, take in takers:
                self.reads[c].append((j, q.filled, maker, q.gives, take))
        self.wakes = [
            {self.home[m] for _, _, m, _, _ in self.reads[a]} | {self.home[c] for f in self.fills[a] for c, _ in f[3]}
            for a in range(len(net.actors))
        ]
        self.here = [[a for a, home in enumerate(self.home) if home == p] for p in range(len(net.places))]

    def run(self, registers: Sequence[int]) -> list[int]:
        """Fire until nothing can or all steps are done; how often each actor has fired."""
        fired, window = [0] * len(self.last), self.net.window
        over: list[set[int]] = [set() for _ in self.orders]  # entries beyond the first unfinished one
        first = [0] * len(self.orders)
        todo = set(range(len(self.orders)))
        while todo:
            p = todo.pop()
            order, ahead = self.orders[p], over[p]
            if not order:
                continue
            length, at = len(order), first[p]
            end = length * CHECKED_STEPS
            going = True
            while going and at < end:
                going = False
                for a in (order[at % length],) if window == 0 else self.here[p]:
                    n = fired[a]
                    if n == self.last[a]:
                        continue
                    if window != 0:
                        step, k = divmod(n, len(self.spots[a]))
                        spot = step * length + self.spots[a][k]
                        if (window is not None and spot > at + window) or spot // length > at // length:
                            continue
                    else:
                        spot = at
                    if not self.may(a, fired, registers):
                        continue
                    fired[a] = n + 1
                    todo |= self.wakes[a]
                    going = True
                    if spot == at:
                        at += 1
                        while at in ahead:
                            ahead.remove(at)
                            at += 1
                    else:
                        ahead.add(spot)
            first[p] = at
            todo.discard(p)
        return fired

    def may(self, a: int, fired: list[int], registers: Sequence[int]) -> bool:
        """Whether queues allow the next firing of an actor."""
        n = fired[a] + 1
        for _, filled, maker, gives, take in self.reads[a]:
            if filled + fired[maker] * gives < n * take:
                return False
        for q, filled, gives, takers in self.fills[a]:
            read = filled + n * gives - registers[q]
            if read > 0:
                for c, take in takers:
                    if fired[c] * take < read:
                        return False
        return True

    def finishes(self, registers: Sequence[int]) -> bool:
        """Whether all steps are done in the end."""
        return self.run(registers) == self.last

    def ring(self, fired: list[int], registers: Sequence[int]) -> Iterator[Wait]:
        """Of a net that is stuck: next firings of actors that wait for each other."""
        a = next(a for a, n in enumerate(fired) if n < self.last[a])
        seen: dict[int, tuple[int, Wait]] = {}
        while a not in seen:
            on, why, queue = self.unmet(a, fired, registers)
            held = f"{registers[queue]} of {registers[queue]}" if why == "full" else ""
            name = self.net.queues[queue].name if queue >= 0 else ""
            seen[a] = on, Wait(self.firing(a, fired), why, self.firing(on, fired), name, held)
            a = on
        start = a
        while True:
            on, wait = seen[a]
            yield wait
            a = on
            if a == start:
                return

    def firing(self, a: int, fired: list[int]) -> Firing:
        """The next firing of an actor."""
        return self.net.actors[a].name, fired[a] % self.net.actors[a].fires

    def unmet(self, a: int, fired: list[int], registers: Sequence[int]) -> tuple[int, str, int]:
        """A condition that the next firing of an actor waits for: on whom, why, and the queue or -1."""
        n = fired[a] + 1
        for q, filled, maker, gives, take in self.reads[a]:
            if filled + fired[maker] * gives < n * take:
                return maker, "empty", q
        for q, filled, gives, takers in self.fills[a]:
            for c, take in takers:
                if fired[c] * take < filled + n * gives - registers[q]:
                    return c, "full", q

        def entry(b: int) -> int:
            step, k = divmod(fired[b], len(self.spots[b]))
            return step * len(self.orders[self.home[b]]) + self.spots[b][k]

        before = min((b for b in self.here[self.home[a]] if fired[b] < self.last[b]), key=entry)
        return before, "order", -1


# -- how many registers would do ---------------------------------------------------------------


def fewest(net: Net, only: Container[str] | None = None) -> dict[str, int] | None:
    """Queues that must have more registers, and how many: as few more in all as can be, of equal choices the smallest.

    A ring is only broken by more registers in one of its full queues. What a queue needs even if all others had
    plenty, it needs anyway. Beyond that all choices are followed, the cheapest first, up to a number of tries;
    after those the smallest queue of each ring is enlarged until none is left, which is enough, perhaps not least.
    With `only`, the registers of other queues stay as they are.
    """
    # Long because the search's small steps share the net, its queues and what is known of each of them.
    play, queues = _Play(net), net.queues
    registers = play.registers
    free = [only is None or q.name in only for q in queues]
    plenty = [
        q.registers + may * (q.filled + CHECKED_STEPS * q.gives * net.by_name[q.producer].fires)
        for q, may in zip(queues, free, strict=True)
    ]
    if not play.finishes(plenty):
        return None

    def full(now: Sequence[int]) -> list[int]:
        fired = play.run(now)
        if fired == play.last:
            return []
        names = {w.queue for w in play.ring(fired, now) if w.why == "full"}
        return [j for j, q in enumerate(queues) if free[j] and q.name in names]

    def alone(j: int) -> int:
        low, high = registers[j], plenty[j]
        while low < high:
            middle = (low + high) // 2
            trial = [*plenty[:j], middle, *plenty[j + 1 :]]
            low, high = (low, middle) if play.finishes(trial) else (middle + 1, high)
        return low

    def cost(now: Sequence[int]) -> tuple[int, int]:
        more = [n - q for n, q in zip(now, registers, strict=True)]
        return sum(more), sum(n * q.bytes for n, q in zip(more, queues, strict=True))

    known: dict[int, int] = {}

    def raised(now: Sequence[int], ring: Sequence[int]) -> list[int]:
        out = list(now)
        for j in ring:
            if j not in known:
                known[j] = alone(j)
            out[j] = max(out[j], known[j])
        return out

    heap = [(cost(registers), tuple(registers))]
    seen = {tuple(registers)}
    now: tuple[int, ...] = tuple(registers)
    for _ in range(min(2000, 10 + _TRIES // sum(play.last))):
        if not heap:
            break
        _, now = heappop(heap)
        ring = full(now)
        if not ring:
            break
        base = raised(now, ring)
        if tuple(base) != now:
            following = [tuple(base)]
        else:
            following = [(*now[:j], now[j] + 1, *now[j + 1 :]) for j in ring]
        for one in following:
            if one not in seen:
                seen.add(one)
                heappush(heap, (cost(one), one))
    while ring := full(now):
        smallest = min(ring, key=lambda j: queues[j].bytes)
        now = (*now[:smallest], now[smallest] + 1, *now[smallest + 1 :])
    return {q.name: n for q, n, had in zip(queues, now, registers, strict=True) if n > had}

"""Actors and the queues between them: what runs beside what, and how much may be under way.

An actor is a piece of a step that runs at one place (a set of ranks acting as one): the forward part of a stage, its
backward part, the optimizer. Each step it *fires* a fixed number of times, once per micro-batch or once in all. A queue
carries what one actor makes to the actors that read it, in registers: tensors of a known size, of which there are
a fixed number. An actor may fire when every queue it reads holds what it takes and every queue it fills has registers
free for what it gives. A register is taken when its producer begins to fire, and is free again when every consumer has
finished the firing that read it. Queues are first in, first out: firing k of an actor comes after its firing k - 1.

No register belongs to two queues and no queue has two producers, so firing one actor never stops another
from firing: whether all of them finish does not depend on who goes first. That is what `lower/stages/deadlock.py`
builds on.

A place does one thing at a time. Its order says which firing comes where in a step, and the window how far an actor
may run ahead of the first unfinished place in the order: 0 is a fixed schedule, `None` means whoever is ready goes, the
earliest in the order first. Steps follow each other; a place may begin the next before another has ended this one,
as far as queues allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from laminar.errors import NetError
from laminar.ir.mesh import Place

ACTOR_KINDS = ("load", "forward", "backward", "input", "weight", "reduce", "optimize", "save")
"""`backward` is the whole of it; `input` and `weight` are its two parts where they are apart."""


@dataclass(frozen=True, slots=True)
class Actor:
    """One kind of work at one place."""

    name: str
    kind: str
    place: int
    """Which of the net's places."""
    fires: int = 1
    """How often per step."""
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Queue:
    """What one actor makes for others, in a fixed number of registers."""

    name: str
    producer: str
    consumers: tuple[str, ...]
    registers: int
    gives: int = 1
    """Registers filled by one firing of the producer."""
    takes: tuple[int, ...] = ()
    """Registers read by one firing of each consumer; empty: one each."""
    filled: int = 0
    """Registers that are full before the first step."""
    bytes: int = 0
    """Of one register on the fullest rank."""

    def taken(self, consumer: str) -> int:
        """How many registers one firing of a consumer reads."""
        return self.takes[self.consumers.index(consumer)] if self.takes else 1


Firing = tuple[str, int]
"""An actor and which of its firings in a step, from 0."""


@dataclass(frozen=True)
class Net:
    """Actors at places, the queues between them, and the order each place keeps."""

    places: tuple[Place, ...]
    actors: tuple[Actor, ...]
    queues: tuple[Queue, ...]
    orders: tuple[tuple[Firing, ...], ...]
    """For each place, every firing of one step."""
    window: int | None = 0
    """How many places of the order an actor may be ahead of the first unfinished one; `None`: any."""

    def __post_init__(self) -> None:
        check_actors(self)

    @cached_property
    def by_name(self) -> dict[str, Actor]:
        """Actors by name."""
        return {a.name: a for a in self.actors}

    @cached_property
    def reads(self) -> dict[str, tuple[Queue, ...]]:
        """For each actor the queues it reads."""
        return {a.name: tuple(q for q in self.queues if a.name in q.consumers) for a in self.actors}

    @cached_property
    def fills(self) -> dict[str, tuple[Queue, ...]]:
        """For each actor the queues it fills."""
        return {a.name: tuple(q for q in self.queues if q.producer == a.name) for a in self.actors}

    def crosses(self, queue: Queue) -> bool:
        """Whether a queue leads from one place to another."""
        home = self.by_name[queue.producer].place
        return any(self.by_name[c].place != home for c in queue.consumers)

    def holders(self, queue: Queue) -> tuple[int, ...]:
        """Places that need memory for a queue's registers: where they are filled, and where they are read."""
        ends = (queue.producer, *queue.consumers)
        return tuple(dict.fromkeys(self.by_name[name].place for name in ends))

    def bound_bytes(self, *places: int) -> int:
        """No rank of a place ever holds more than this in registers; one that is at several, more than this of all.

        Of queues whose ends are all at the place, an order kept to the letter says how much is held at once.
        """
        total = sum(q.registers * q.bytes for q in self.queues if not set(places).isdisjoint(self.holders(q)))
        for place in places:
            own = [q for q in self.queues if self.holders(q) == (place,) and self._ordered(q)]
            total -= max(0, sum(q.registers * q.bytes for q in own) - self._at_once(place, own))
        return total

    def _ordered(self, queue: Queue) -> bool:
        """Whether its place's order says when each register is taken and when it is free again."""
        return self.window == 0 and queue.gives == 1 and all(t == 1 for t in queue.takes) and not queue.filled

    def _at_once(self, place: int, queues: Sequence[Queue]) -> int:
        """The most bytes that such queues hold, going through the order; every step ends with all of them empty."""
        spots = {firing: at for at, firing in enumerate(self.orders[place])}
        change = [0] * (len(spots) + 1)
        for q in queues:
            for k in range(self.by_name[q.producer].fires):
                change[spots[q.producer, k]] += q.bytes
                change[1 + max(spots[c, k] for c in q.consumers)] -= q.bytes
        return max(accumulate(change), default=0)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(net: Net) -> Iterator[str]:
    window = "any order" if net.window is None else f"window {net.window}"
    yield f"{len(net.actors)} actors at {len(net.places)} places, {len(net.queues)} queues, {window}"
    for at, (place, order) in enumerate(zip(net.places, net.orders, strict=True)):
        yield f"place {at}: {place}, at most {net.bound_bytes(at):,} bytes in registers"
        yield "  " + " ".join(f"{name}.{k}" for name, k in order)
    for q in net.queues:
        yield f"queue {q.name}: {q.producer} -> {', '.join(q.consumers)}, {q.registers} x {q.bytes:,} bytes"


def check_actors(net: Net) -> None:
    """The grammar: names are unique and known, rates balance over a step, orders name every firing once."""

    def fail(what: str, **lines: str) -> None:
        raise NetError(what, **lines)

    actors: dict[str, Actor] = {}
    for a in net.actors:
        if a.name in actors:
            fail(f"two actors are called {a.name}")
        if a.kind not in ACTOR_KINDS:
            fail(f"actor {a.name} is of unknown kind {a.kind!r}", allowed="  ".join(ACTOR_KINDS))
        if not 0 <= a.place < len(net.places):
            fail(f"actor {a.name} is at place {a.place}", allowed=f"0 to {len(net.places) - 1}")
        if a.fires < 1:
            fail(f"actor {a.name} fires {a.fires} times a step", allowed="at least once")
        actors[a.name] = a
    seen: set[str] = set()
    for q in net.queues:
        if q.name in seen:
            fail(f"two queues are called {q.name}")
        seen.add(q.name)
        for name in (q.producer, *q.consumers):
            if name not in actors:
                fail(f"queue {q.name} names {name}, which is no actor")
        if not q.consumers or len(set(q.consumers)) != len(q.consumers) or q.producer in q.consumers:
            fail(f"queue {q.name} needs consumers, each once, other than its producer {q.producer}")
        if q.takes and len(q.takes) != len(q.consumers):
            fail(f"queue {q.name} has {len(q.consumers)} consumers and {len(q.takes)} rates")
        if (
            q.registers < 1
            or q.gives < 1
            or not 0 <= q.filled <= q.registers
            or q.bytes < 0
            or min(q.takes or (1,)) < 1
        ):
            fail(f"queue {q.name} has {q.registers} registers, {q.filled} of them filled, and gives {q.gives}")
        for c in q.consumers:
            made, read = actors[q.producer].fires * q.gives, actors[c].fires * q.taken(c)
            if made != read:
                fail(f"queue {q.name}: {q.producer} makes {made} registers a step, {c} reads {read}")
    if len(net.orders) != len(net.places):
        fail(f"{len(net.orders)} orders for {len(net.places)} places")
    if net.window is not None and net.window < 0:
        fail(f"window {net.window}", allowed="0 or more, or None")
    for at, order in enumerate(net.orders):
        wanted = {(a.name, k) for a in net.actors if a.place == at for k in range(a.fires)}
        if len(order) != len(wanted) or set(order) != wanted:
            odd = sorted(set(order) ^ wanted)
            fail(f"the order of place {at} must name each firing once", at=f"{odd[:4] or 'one is named twice'}")
        fired: dict[str, int] = {}
        for name, k in order:  # queues are first in, first out
            if k != fired.setdefault(name, 0):
                fail(f"the order of place {at} has {name}.{k} before {name}.{fired[name]}", allowed="ascending firings")
            fired[name] += 1

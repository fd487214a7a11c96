"""Registers of queues on one rank: what is full, what is free, and who may fill it.

Registers of a queue are numbered from the beginning of time. All there is to know about them are numbers that only
grow: how many were made, and how many each reader has finished with. `made - read` is what is in use, and may never
exceed what the queue was given. Because the numbers only grow, a message that comes late or out of turn does no harm.

An `Outlet` is where a queue is filled, an `Inlet` where one place reads it. Within a place a value goes from the one to
the other as it is; between places it goes in parts, one for each rank that has something to give (`channels.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from laminar.errors import NetError, RankError
from laminar.ir.net import Net, Queue
from laminar.runtime.pipeline.channels import ChannelReceiver, MessageLayout, QueueRoute, Value


@dataclass
class Inlet:
    """Where one place reads a queue on this rank."""

    queue: Queue
    rank: int
    counts: dict[str, int]
    """How many registers each consumer has finished with."""
    takes: dict[str, int]
    wire: QueueRoute | None = None
    sources: frozenset[int] = frozenset()
    receivers: dict[int, ChannelReceiver] = field(default_factory=dict)
    storages: frozenset[int] = frozenset()
    read: int = 0
    """How many all consumers have finished with."""
    full: dict[int, Value | None] = field(default_factory=dict)
    parts: dict[int, dict[int, tuple[int, MessageLayout | list[Tensor]]]] = field(default_factory=dict)

    def fill(self, n: int, value: Value) -> None:
        """A register is full."""
        self._granted(n)
        self.full[n] = value

    def part(self, n: int, source: int, index: int, what: MessageLayout | list[Tensor]) -> None:
        """One rank's part of a register: the tensors, or what they will be like."""
        self._granted(n)
        parts = self.parts.setdefault(n, {})
        parts[source] = index, what
        if isinstance(what, MessageLayout):
            self.receivers[source].announced(n, what)
        if len(parts) == len(self.sources):
            self.full[n] = None

    def _granted(self, n: int) -> None:
        if not self.read <= n < self.read + self.queue.registers:
            raise RankError(
                f"register {n} of queue {self.queue.name} came with {self.read} read: "
                f"it has {self.queue.registers} registers"
            )

    def has(self, consumer: str) -> bool:
        """Whether a consumer's next registers are full."""
        first = self.counts[consumer]
        return all(n in self.full for n in range(first, first + self.takes[consumer]))

    def take(self, consumer: str) -> list[Value]:
        """A consumer's next registers."""
        first = self.counts[consumer]
        return [self.full[n] or self._unpacked(n) for n in range(first, first + self.takes[consumer])]

    def _unpacked(self, n: int) -> Value:
        assert self.wire is not None
        arrived: dict[int, list[Tensor]] = {}
        parts = self.parts.pop(n)
        index = parts[min(parts)][0]
        for source, (_, what) in sorted(parts.items()):
            arrived[source] = self.receivers[source].get(n, what) if isinstance(what, MessageLayout) else what
        value = self.full[n] = Value(self.wire.route.unpack(arrived, self.rank, index), index)
        return value

    def finish(self, consumer: str) -> bool:
        """A consumer is done with its registers; whether some are free now."""
        self.counts[consumer] += self.takes[consumer]
        low, was = min(self.counts.values()), self.read
        for n in range(was, low):
            del self.full[n]
            for receiver in self.receivers.values():
                receiver.release(n)
        self.read = low
        return low > was


@dataclass
class Outlet:
    """Where a queue is filled on this rank."""

    queue: Queue
    made: int
    inlets: list[Inlet] = field(default_factory=list)
    """Readers on this rank."""
    remote: dict[tuple[int, int], int] = field(default_factory=dict)
    """What readers elsewhere have finished with, by wire and rank."""
    most: int = 0
    """The most registers that were ever in use."""

    @property
    def read(self) -> int:
        """How many everybody has finished with."""
        return min([i.read for i in self.inlets] + list(self.remote.values()), default=self.made)

    def room(self) -> bool:
        """Whether the next firing's registers are free."""
        return self.made - self.read + self.queue.gives <= self.queue.registers

    def begin(self) -> int:
        """Take the registers of a firing; the number of the first."""
        first = self.made
        self.made += self.queue.gives
        used = self.made - (self.read if self.inlets or self.remote else first)
        assert used <= self.queue.registers, f"{used} registers of queue {self.queue.name} in use"
        self.most = max(self.most, used)
        return first


def connect(
    net: Net,
    rank: int,
    wires: Sequence[QueueRoute],
    receivers: Mapping[tuple[int, int], ChannelReceiver],
    initial: Mapping[str, Sequence[Value]],
) -> tuple[dict[tuple[str, int], Inlet], dict[str, Outlet]]:
    """Inlets of a rank by queue and place, and outlets by queue; `receivers` by wire and the rank that sends."""
    inlets, outlets = dict[tuple[str, int], Inlet](), dict[str, Outlet]()
    by_end = {(w.queue.name, w.place): w for w in wires}
    for q in net.queues:
        home = net.by_name[q.producer].place
        for place in sorted({net.by_name[c].place for c in q.consumers}):
            if rank not in net.places[place].ranks:
                continue
            names = [c for c in q.consumers if net.by_name[c].place == place]
            inlet = Inlet(q, rank, dict.fromkeys(names, 0), {c: q.taken(c) for c in names}, by_end.get((q.name, place)))
            if inlet.wire is not None:
                inlet.sources = frozenset(a for a, b in inlet.wire.route.pairs if b == rank)
                inlet.receivers = {a: receivers[inlet.wire.number, a] for a in inlet.sources if a != rank}
                inlet.storages = frozenset().union(*(r.storages for r in inlet.receivers.values()))
            given = initial.get(q.name, ())
            if len(given) != q.filled:
                raise NetError(
                    f"queue {q.name} begins with {q.filled} registers filled, {len(given)} were given",
                    next="give `initial` values on every rank that reads it",
                )
            inlet.full.update(enumerate(given))
            inlets[q.name, place] = inlet
        if rank not in net.places[home].ranks:
            continue
        out = outlets[q.name] = Outlet(q, q.filled, most=q.filled)
        if (q.name, home) in inlets:
            out.inlets.append(inlets[q.name, home])
        for wire in (w for w in wires if w.queue is q):
            for dst in (b for a, b in wire.route.pairs if a == rank):
                if dst == rank:
                    out.inlets.append(inlets[q.name, wire.place])
                else:
                    out.remote[wire.number, dst] = 0
    return inlets, outlets

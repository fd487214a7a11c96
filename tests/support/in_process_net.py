"""Ranks of a net within one process, for tests: lines that deliver as they are told to, rings in ordinary memory.

`Hall(net, run)` makes the actors of all ranks. `play(seed)` drives them in one thread, deterministically: at
every turn one rank, drawn at random, does one thing, and each rank hears a random part of what it was sent, in any
order. `threads()` gives each rank a thread instead.

`Sums` is a `run` whose every output is a number that depends on all that went in, and `expected` computes the same
numbers without any runtime, so that a value in the wrong place shows.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from laminar.ir.net import Net
from laminar.runtime.pipeline.actors import Actors
from laminar.runtime.pipeline.channels import QueueRoute, RingReceiver, RingSender, Route, Value, queue_routes
from laminar.runtime.pipeline.connect import neighbours
from laminar.runtime.pipeline.control_sockets import BYE, GONE, ControlMessage
from laminar.runtime.pipeline.shm_channels import slot_bytes


class HallLines:
    """Lines of one rank of a hall."""

    def __init__(self, hall: Hall, rank: int, peers: Sequence[int]) -> None:
        self.hall, self.rank, self.peers = hall, rank, tuple(sorted(peers))
        self.waiting: list[ControlMessage] = []
        self.closed = False

    def post(self, to: int, kind: int, which: int = 0, a: int = 0, b: int = 0, tail: bytes = b"") -> None:
        """Deliver at once; the reader decides when it hears it."""
        with self.hall.bell:
            self.hall.lines[to].waiting.append(ControlMessage(self.rank, kind, which, a, b, tail))
            self.hall.bell.notify_all()

    def flush(self) -> None:
        """Everything has left already."""

    def receive(self, wait_s: float) -> list[ControlMessage]:
        """Everything that waits; in a hall with dice, some of it, in any order but with goodbyes last."""
        with self.hall.bell:
            if not self.waiting and wait_s:
                self.hall.bell.wait(wait_s)
            out = self.waiting
            dice = self.hall.dice
            if dice is None:
                self.waiting = []
                return out
            late = [m for m in out if m.kind in (BYE, GONE)]
            rest = [m for m in out if m.kind not in (BYE, GONE)]
            dice.shuffle(rest)
            count = dice.randint(0, len(rest))
            heard, self.waiting = (rest + late, []) if count == len(rest) else (rest[:count], rest[count:] + late)
            return heard

    def close(self) -> None:
        """Tell the others."""
        if not self.closed:
            self.closed = True
            for peer in self.peers:
                self.post(peer, GONE)


def ring(wire: QueueRoute, src: int, dst: int) -> tuple[Any, Any]:
    """Both ends of a ring in ordinary memory."""
    memory = torch.zeros(wire.queue.registers * slot_bytes(wire), dtype=torch.uint8)
    return RingSender(memory, wire.queue.registers), RingReceiver(memory, wire.queue.registers)


class Hall:
    """The actors of all ranks of a net."""

    def __init__(
        self,
        net: Net,
        run: Callable[[int], Any],
        edges: dict[tuple[str, int], Route] | None = None,
        initial: Callable[[int], Mapping[str, Sequence[Value]]] | None = None,
        timeout_s: float = 600.0,
        channels: Callable[[QueueRoute, int, int], tuple[Any, Any]] = ring,
    ) -> None:
        """`run(rank)` is what a rank's firings do, `initial(rank)` its first values; `channels` make both ends."""
        self.net, self.dice = net, None
        self.bell = threading.Condition()
        wired = queue_routes(net, edges)
        near = neighbours(net, wired)
        self.ranks = sorted({r for p in net.places for r in p.ranks})
        self.lines = {r: HallLines(self, r, [a + b - r for a, b in near if r in (a, b)]) for r in self.ranks}
        ends = {(w.number, *p): channels(w, *p) for w in wired for p in w.route.pairs if p[0] != p[1]}
        self.actors = {}
        for r in self.ranks:
            senders = {(k, b): s for (k, a, b), (s, _) in ends.items() if a == r}
            takers = {(k, a): t for (k, a, b), (_, t) in ends.items() if b == r}
            self.actors[r] = Actors(
                net,
                run(r),
                self.lines[r],
                wired,
                senders,
                takers,
                initial=initial(r) if initial else None,
                timeout_s=timeout_s,
            )

    def play(self, steps: int, seed: int | None = None, paused: Callable[[int, int], bool] | None = None) -> None:
        """Run steps in one thread; `paused(turn, rank)`: a rank does not get this turn."""
        self.dice = None if seed is None else random.Random(seed)
        dice = random.Random(f"turns {seed}")
        for a in self.actors.values():
            a.begin(steps)
        turn = idle = 0
        while left := [r for r, a in self.actors.items() if a.phase]:
            rank = dice.choice(left)
            turn += 1
            if paused is not None and paused(turn, rank):
                continue
            idle = 0 if self.actors[rank].advance() else idle + 1
            assert idle < 10_000, {r: a._awaited() for r, a in self.actors.items()}

    def threads(self, steps: Mapping[int, int] | int) -> dict[int, Any]:
        """Run steps with a thread each; what each rank's `run` gave or raised."""
        out: dict[int, Any] = {}

        def one(rank: int) -> None:
            try:
                out[rank] = self.actors[rank].run(steps if isinstance(steps, int) else steps[rank])
            except BaseException as error:
                out[rank] = error

        self._each(one)
        return out

    def close(self) -> None:
        """Close all, in threads, for they wait for each other."""
        self.dice = None
        self._each(lambda rank: self.actors[rank].close())

    def _each(self, call: Callable[[int], None]) -> None:
        workers = [threading.Thread(target=call, args=(r,), daemon=True) for r in self.ranks]
        for w in workers:
            w.start()
        for w in workers:
            w.join(200)
        assert not any(w.is_alive() for w in workers), "a rank hangs"


PRIME = (1 << 31) - 1


def mixed(name: str, k: int, step: int, at: int, out: int, inputs: Sequence[int]) -> int:
    """A number that depends on everything."""
    x = sum(map(ord, name)) * 31 + k * 101 + step * 1009 + at * 7 + out * 13
    for i, v in enumerate(inputs):
        x = (x * 131 + (i + 1) * v) % PRIME
    return x


class Sums:
    """What firings of one rank do in tests: numbers from numbers; a log of what every actor made."""

    def __init__(self, net: Net, rank: int) -> None:
        self.net, self.rank = net, rank
        self.log: dict[tuple[str, int, int], list[int]] = {}

    def __call__(self, name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        """One firing."""
        at = self.net.places[self.net.by_name[name].place].ranks.index(self.rank)
        given = [int(v.tensors[0]) for q in self.net.reads[name] for v in inputs[q.name]]
        total = sum(q.gives for q in self.net.fills[name])
        made = [mixed(name, k, step, at, i, given) for i in range(max(total, 1))]
        self.log[name, k, step] = made
        left = iter(made)
        return {q.name: [Value([torch.tensor(next(left))], k) for _ in range(q.gives)] for q in self.net.fills[name]}


def first_values(net: Net, rank: int) -> dict[str, list[Value]]:
    """What registers that are full at the beginning hold: their numbers."""
    return {q.name: [Value([torch.tensor(n)], n) for n in range(q.filled)] for q in net.queues}


def summed(parts: dict[int, list[torch.Tensor]], dst: int, index: int) -> list[torch.Tensor]:
    """Unpack by adding up."""
    return [sum((t[0] for t in parts.values()), torch.tensor(dst))]


def all_to_all(net: Net, queue: Any, place: int) -> Route:
    """Everybody gives to everybody, and adds up."""
    src, dst = net.places[net.by_name[queue.producer].place].ranks, net.places[place].ranks
    return Route(tuple((a, b) for a in src for b in dst), 64, unpack=summed)


def expected(net: Net, steps: int) -> dict[tuple[str, int, int], list[list[int]]]:
    """What every firing makes on each rank of its place, by plain evaluation; edges are `all_to_all`."""
    boxes = {
        (q.name, c): deque([n] * len(net.places[net.by_name[c].place].ranks) for n in range(q.filled))
        for q in net.queues
        for c in q.consumers
    }
    out: dict[tuple[str, int, int], list[list[int]]] = {}
    done = {a.name: 0 for a in net.actors}
    moved = True
    while moved:
        moved = False
        for a in net.actors:
            if done[a.name] == steps * a.fires or any(
                len(boxes[q.name, a.name]) < q.taken(a.name) for q in net.reads[a.name]
            ):
                continue
            moved = True
            step, k = divmod(done[a.name], a.fires)
            done[a.name] += 1
            given = [boxes[q.name, a.name].popleft() for q in net.reads[a.name] for _ in range(q.taken(a.name))]
            total = sum(q.gives for q in net.fills[a.name])
            ranks = net.places[a.place].ranks
            made = [
                [mixed(a.name, k, step, at, i, [g[at] for g in given]) for i in range(max(total, 1))]
                for at in range(len(ranks))
            ]
            out[a.name, k, step] = made
            i = 0
            for q in net.fills[a.name]:
                for _ in range(q.gives):
                    row = [m[i] for m in made]
                    i += 1
                    for c in q.consumers:
                        home = net.by_name[c].place
                        there = net.places[home].ranks
                        boxes[q.name, c].append(row if home == a.place else [sum(row) + r for r in there])
    return out

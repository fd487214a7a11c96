"""Random nets of actors, and machines that run them one move at a time: what the check and the clock are held against.

Nothing here is shared with the package but the types: registers are objects that are passed on, read and given back.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from laminar.ir.mesh import Mesh, Place
from laminar.ir.net import ACTOR_KINDS, Actor, Firing, Net, Queue
from laminar.lower.stages.pipeline_net import Layout, Stage, StageEdge, StageLoader
from laminar.lower.stages.schedules import dag_net


def places(count: int) -> tuple[Place, ...]:
    """Places of one rank each."""
    return tuple(Place((r,), Mesh({"r": 1})) for r in range(count))


@dataclass
class Lot:
    """The registers of a queue: how many are free, and what waits for each reader."""

    queue: Queue
    pool: list[int]
    """Free registers; queues that share a pool share this list."""
    waiting: dict[str, deque[list[int]]] = field(default_factory=dict)


class Machine:
    """A net that is run move by move: a move begins or ends one firing. Registers are held in between."""

    def __init__(
        self, net: Net, steps: int, pools: Mapping[str, str] | None = None, sizes: Mapping[str, int] | None = None
    ) -> None:
        self.net, self.steps = net, steps
        shared = {name: [size] for name, size in (sizes or {}).items()}
        self.lots = {}
        for q in net.queues:
            pool = shared[pools[q.name]] if pools and q.name in pools else [q.registers]
            lot = self.lots[q.name] = Lot(q, pool, {c: deque() for c in q.consumers})
            pool[0] -= q.filled
            self.pass_on(lot, q.filled)
        self.shared = bool(pools)
        self.ins = {
            n: [(self.lots[q.name], self.lots[q.name].waiting[n], q.taken(n)) for q in net.reads[n]] for n in net.reads
        }
        self.outs = {n: [(self.lots[q.name], q.gives) for q in net.fills[n]] for n in net.fills}
        self.step = [0] * len(net.places)
        self.first = [0] * len(net.places)
        self.over: list[set[int]] = [set() for _ in net.places]
        self.running: list[tuple[int, list[tuple[Lot, list[int]]]] | None] = [None] * len(net.places)
        self.most = {q.name: 0 for q in net.queues}
        self.fired = {a.name: 0 for a in net.actors}

    @staticmethod
    def pass_on(lot: Lot, count: int) -> None:
        for _ in range(count):
            register = [len(lot.queue.consumers)]
            for line in lot.waiting.values():
                line.append(register)

    def entries(self, place: int) -> Iterator[int]:
        """Entries of the order that may begin now, the earliest first."""
        order, over, window = self.net.orders[place], self.over[place], self.net.window
        if self.running[place] is not None or self.step[place] == self.steps or not order:
            return
        first = self.first[place]
        last = len(order) - 1 if window is None else min(first + window, len(order) - 1)
        passed = set()
        for at in range(first, last + 1):
            name = order[at][0]
            if at in over or name in passed:
                continue
            passed.add(name)  # a later firing of the same actor does not overtake
            if all(len(line) >= take for _, line, take in self.ins[name]) and self.room(name):
                yield at

    def room(self, name: str) -> bool:
        """Whether registers are free for all that a firing makes, also if some queues draw from one pool."""
        wanted: dict[int, int] = {}
        for lot, gives in self.outs[name]:
            wanted[id(lot.pool)] = wanted.get(id(lot.pool), 0) + gives
            if lot.pool[0] < wanted[id(lot.pool)]:
                return False
        return True

    def begin(self, place: int, at: int) -> None:
        """Take registers to fill, and those that are read."""
        name = self.net.orders[place][at][0]
        for lot, gives in self.outs[name]:
            lot.pool[0] -= gives
            assert lot.pool[0] >= 0
            self.most[lot.queue.name] = max(self.most[lot.queue.name], lot.queue.registers - lot.pool[0])
        held = [(lot, line.popleft()) for lot, line, take in self.ins[name] for _ in range(take)]
        self.running[place] = (at, held)

    def end(self, place: int) -> Firing:
        """Pass on what was filled; what all have read is free."""
        running = self.running[place]
        assert running is not None
        at, held = running
        order, over = self.net.orders[place], self.over[place]
        name, k = order[at]
        self.running[place] = None
        for lot, register in held:
            register[0] -= 1
            if not register[0]:
                lot.pool[0] += 1
        for lot, gives in self.outs[name]:
            self.pass_on(lot, gives)
        self.fired[name] += 1
        over.add(at)
        while self.first[place] in over:
            self.first[place] += 1
        if len(over) == len(order):
            over.clear()
            self.first[place] = 0
            self.step[place] += 1
        return name, k

    @property
    def finished(self) -> bool:
        return all(self.fired[a.name] == a.fires * self.steps for a in self.net.actors)

    def play(self, rng: random.Random) -> bool:
        """Random moves until there is none; whether all steps are done then."""
        everywhere = range(len(self.net.places))
        open_: list[list[int]] = [list(self.entries(p)) for p in everywhere]
        while True:
            moves = [(p, at) for p in everywhere for at in open_[p]]
            if not moves:
                return self.finished
            place, at = moves[int(rng.random() * len(moves))]
            if at < 0:
                self.end(place)
                open_ = [[-1] if self.running[p] else list(self.entries(p)) for p in everywhere]
                continue
            self.begin(place, at)
            open_[place] = [-1]
            if self.shared:  # then a beginning may take what another was about to
                open_ = [[-1] if self.running[p] else list(self.entries(p)) for p in everywhere]

    def clock(self, work: Mapping[tuple[str, int, int], int]) -> dict[tuple[str, int, int], tuple[int, int]]:
        """What is due ends, then places in their order begin the earliest that may; when each firing ran."""
        due: dict[int, int] = {}
        out = {}
        now = 0
        while True:
            moved = True
            while moved:
                moved = False
                for p in [p for p, t in due.items() if t == now]:
                    self.end(p)
                    del due[p]
                    moved = True
                for p in range(len(self.net.places)):
                    at = next(self.entries(p), None)
                    if at is not None:
                        name, k = self.net.orders[p][at]
                        key = (name, k, self.step[p])
                        self.begin(p, at)
                        due[p] = now + work[key]
                        out[key] = (now, due[p])
            if not due:
                return out
            now = min(due.values())


def outcomes(net: Net, steps: int) -> set[tuple[int, ...]]:
    """How often each actor has fired, in every state in which no move is left: all interleavings are followed.

    A state is how many firings each actor has begun and ended.
    """
    names = [a.name for a in net.actors]
    number = {name: i for i, name in enumerate(names)}
    where = [[[at for at, (n, _) in enumerate(order) if n == name] for order in net.orders] for name in names]

    def moves(begun: tuple[int, ...], ended: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        busy = {a.place for i, a in enumerate(net.actors) if begun[i] > ended[i]}
        for i, a in enumerate(net.actors):
            if begun[i] > ended[i]:
                yield begun, (*ended[:i], ended[i] + 1, *ended[i + 1 :])
                continue
            if a.place in busy or begun[i] == a.fires * steps:
                continue
            here = [j for j, b in enumerate(net.actors) if b.place == a.place]
            length = len(net.orders[a.place])

            def spot(j: int, place: int = a.place, length: int = length) -> int:
                step, k = divmod(ended[j], net.actors[j].fires)
                return step * length + where[j][place][k]

            first = min(spot(j) for j in here if ended[j] < net.actors[j].fires * steps)
            if spot(i) // length != first // length or (net.window is not None and spot(i) - first > net.window):
                continue
            good = all(
                q.filled + q.gives * ended[number[q.producer]] - q.taken(a.name) * begun[i] >= q.taken(a.name)
                for q in net.reads[a.name]
            ) and all(
                q.filled + q.gives * (begun[i] + 1) - min(q.taken(c) * ended[number[c]] for c in q.consumers)
                <= q.registers
                for q in net.fills[a.name]
            )
            if good:
                yield (*begun[:i], begun[i] + 1, *begun[i + 1 :]), ended

    start = ((0,) * len(names), (0,) * len(names))
    seen, todo, out = {start}, [start], set()
    while todo:
        state = todo.pop()
        following = list(moves(*state))
        if not following:
            out.add(state[1])
        for one in following:
            if one not in seen:
                seen.add(one)
                todo.append(one)
    return out


# -- random nets -------------------------------------------------------------------------------


def random_net(rng: random.Random, actors: int = 6, fires: tuple[int, ...] = (1, 1, 2, 2, 3, 4)) -> Net:
    """A random graph with feedback through filled registers, rates, credits, orders and a window.

    Most nets get an order that some execution has had, and registers enough for their rates: else few would finish.
    """
    n = rng.randint(2, actors)
    spots = rng.randint(1, min(4, n))
    homes = [rng.randrange(spots) for _ in range(n)]
    made = [Actor(f"a{i}", rng.choice(ACTOR_KINDS), homes[i], rng.choice(fires), i) for i in range(n)]
    queues = []
    for j in range(rng.randint(1, n + 2)):
        source, *targets = rng.sample(range(n), min(n, rng.choice([2, 2, 2, 3])))
        if rng.random() < 0.75:
            source, targets = min(source, *targets), [t for t in (source, *targets) if t != min(source, *targets)]
        whole = math.lcm(*(made[i].fires for i in (source, *targets))) * rng.choice([1, 1, 1, 2])
        gives, takes = whole // made[source].fires, [whole // made[t].fires for t in targets]
        back = any(t < source for t in targets)
        filled = (
            rng.randint(0 if rng.random() < 0.15 else min(whole, max(takes)), whole)
            if back
            else rng.choice([0, 0, 0, 1])
        )
        least = max(gives, *takes, filled)
        registers = max(1, filled, least + rng.choice([-1, 0, 0, 0, 1, 1, 2, 3, whole]))
        consumers = tuple(f"a{t}" for t in targets)
        queues.append(
            Queue(f"q{j}", f"a{source}", consumers, registers, gives, tuple(takes), filled, rng.randint(0, 9))
        )
    net = Net(places(spots), tuple(made), tuple(queues), shuffled(rng, made, spots), None)
    if rng.random() < 0.8:
        slack = rng.choice([0, 1, 100])
        wide = replace(net, queues=tuple(replace(q, registers=q.registers + slack) for q in queues))
        net = replace(net, orders=lived(rng, wide))
    return replace(net, window=rng.choice([0, 0, 0, 1, 2, 4, None]))


def shuffled(rng: random.Random, actors: list[Actor], spots: int) -> tuple[tuple[Firing, ...], ...]:
    """For each place its firings, those of each actor ascending."""
    out = []
    for p in range(spots):
        names = [a.name for a in actors if a.place == p for _ in range(a.fires)]
        rng.shuffle(names)
        count: dict[str, int] = {}
        order = []
        for name in names:
            order.append((name, count.get(name, 0)))
            count[name] = count.get(name, 0) + 1
        out.append(tuple(order))
    return tuple(out)


def lived(rng: random.Random, net: Net) -> tuple[tuple[Firing, ...], ...]:
    """The orders of a random execution of one step; what it did not come to follows at the end."""
    machine = Machine(net, 1)
    done: list[list[Firing]] = [[] for _ in net.places]
    while True:
        moves = [(p, at) for p in range(len(net.places)) for at in machine.entries(p)]
        if not moves:
            break
        place, at = rng.choice(moves)
        machine.begin(place, at)
        done[place].append(machine.end(place))
    return tuple((*did, *(f for f in order if f not in did)) for did, order in zip(done, net.orders, strict=True))


def random_layout(rng: random.Random, stages: int = 6, micro_batches: int = 6) -> Layout:
    """A chain, a chain with virtual stages, or a graph of stages; some frozen, the last perhaps merged."""
    kind = rng.choice(["chain", "virtual", "graph", "packed"])
    if kind == "virtual":
        spots = rng.randint(1, 3)
        count = spots * rng.randint(1, max(1, stages // spots))
    else:
        count = rng.randint(1, stages)
        spots = count if kind != "packed" else rng.randint(1, count)
    edges = [StageEdge(s, s + 1, rng.randint(1, 9)) for s in range(count - 1)]
    if kind in ("graph", "packed"):
        edges = []
        for t in range(1, count):
            for s in rng.sample(range(t), min(t, rng.choice([1, 1, 2]))):
                edges.append(StageEdge(s, t, rng.randint(1, 9), rng.choice([None, None, 0, 3])))
    made = []
    for s in range(count):
        place = s % spots if kind != "packed" or s < spots else rng.randrange(spots)
        last = all(e.source != s for e in edges)
        merged = last and rng.random() < 0.3
        made.append(
            Stage(
                place=place,
                stash_bytes=rng.randint(1, 9),
                kept_bytes=rng.randint(0, 3),
                pending_bytes=rng.randint(0, 3),
                trained=rng.random() < 0.8,
                merged=merged,
            )
        )
    loads: tuple[StageLoader, ...] = ()
    if rng.random() < 0.4:
        beside = rng.random() < 0.5
        loads = (
            StageLoader(
                place=spots if beside else made[0].place, stages=tuple({0, count - 1}), depth=rng.randint(2, 3)
            ),
        )
        spots += beside
    trained = [s for s in range(count) if made[s].trained]
    tied = (StageEdge(trained[0], trained[-1], 5),) if len(trained) > 1 and rng.random() < 0.2 else ()
    return Layout(
        tied=tied,
        stages=tuple(made),
        edges=tuple(edges),
        places=spots,
        micro_batches=rng.randint(1, micro_batches),
        apart=rng.random() < 0.5,
        loads=loads,
        saves=(0,) if rng.random() < 0.2 else (),
        decide=rng.random() < 0.3,
    )


def random_schedule(rng: random.Random, layout: Layout) -> str:
    """One that the layout can have."""
    fit = ["gpipe", "1f1b"]
    used = layout.places - any(load.place not in {s.place for s in layout.stages} for load in layout.loads)
    if used == layout.places and len(layout.stages) % used == 0:
        chained = [(e.source, e.target) for e in layout.edges] == [(s, s + 1) for s in range(len(layout.stages) - 1)]
        if chained and all(stage.place == s % used for s, stage in enumerate(layout.stages)):
            fit.append("interleaved")
    if layout.apart:
        fit.append("zero-bubble")
    return rng.choice(fit)


def random_pipeline(rng: random.Random) -> Net:
    """A small pipeline in which some queues may have registers too few, or too many."""
    layout = random_layout(rng, 4, 3)
    net = dag_net(layout, schedule=random_schedule(rng, layout), stash=rng.choice([1, 1, 2]), window=0)
    if rng.random() < 0.7:
        off = {
            q.name: max(1, q.filled, q.registers + rng.choice([-1, -1, 0, 1]))
            for q in rng.sample(net.queues, min(2, len(net.queues)))
        }
        net = replace(net, queues=tuple(replace(q, registers=off.get(q.name, q.registers)) for q in net.queues))
    return replace(net, window=rng.choice([0, 0, 0, 1, 3, None]))

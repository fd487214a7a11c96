"""Nets for tests of the actors: pipelines, and random ones that finish; and what must hold after any run of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import Any

from laminar.ir.mesh import Mesh, Place
from laminar.ir.net import Actor, Net, Queue
from laminar.runtime.pipeline.channels import Route
from tests.support.in_process_net import Hall, Sums, all_to_all, expected, first_values


def place(*ranks: int) -> Place:
    """Ranks in a row."""
    return Place(ranks, Mesh({"r": len(ranks)}))


def pipeline(
    places: Sequence[Place],
    micro: int,
    *,
    window: int | None = 0,
    registers: int = 2,
    weights: int = 0,
    nbytes: int = 64,
) -> Net:
    """Stages with a forward, a backward and an optimizer each, under 1F1B; weights go back to the forwards."""
    count = len(places)
    actors, queues, orders = [], [], []
    for s in range(count):
        warm = min(micro, count - s)
        actors += [Actor(f"F{s}", "forward", s, micro, s), Actor(f"B{s}", "backward", s, micro, s)]
        actors += [Actor(f"O{s}", "optimize", s, 1, s)]
        queues.append(Queue(f"stash{s}", f"F{s}", (f"B{s}",), max(warm, registers), bytes=nbytes))
        queues.append(Queue(f"grad{s}", f"B{s}", (f"O{s}",), micro, takes=(micro,), bytes=nbytes))
        queues.append(Queue(f"weights{s}", f"O{s}", (f"F{s}",), micro, gives=micro, filled=micro, bytes=nbytes))
        if s + 1 < count:
            queues.append(Queue(f"act{s}", f"F{s}", (f"F{s + 1}",), registers, bytes=nbytes))
            queues.append(Queue(f"back{s + 1}", f"B{s + 1}", (f"B{s}",), registers, bytes=nbytes))
        order = [(f"F{s}", k) for k in range(warm)]
        for k in range(micro):
            order.append((f"B{s}", k))
            if warm + k < micro:
                order.append((f"F{s}", warm + k))
        orders.append((*order, (f"O{s}", 0)))
    return Net(tuple(places), tuple(actors), tuple(queues), tuple(orders), window)


def edges_of(net: Net) -> dict[tuple[str, int], Route]:
    """All to all, on every queue that crosses."""
    homes = {q.name: net.by_name[q.producer].place for q in net.queues}
    return {
        (q.name, net.by_name[c].place): all_to_all(net, q, net.by_name[c].place)
        for q in net.queues
        for c in q.consumers
        if net.by_name[c].place != homes[q.name]
    }


def hall_of(net: Net, **options: Any) -> tuple[Hall, dict[int, Sums]]:
    """All ranks of a net, with numbers."""
    runs = {r: Sums(net, r) for p in net.places for r in p.ranks}
    return Hall(net, runs.__getitem__, edges_of(net), lambda r: first_values(net, r), **options), runs


def check(net: Net, hall: Hall, runs: dict[int, Sums], steps: int) -> None:
    """Every firing of every rank gave what plain evaluation says, and no queue was overfilled."""
    for (name, k, step), rows in expected(net, steps).items():
        for rank, row in zip(net.places[net.by_name[name].place].ranks, rows, strict=True):
            assert runs[rank].log[name, k, step] == row, (name, k, step, rank)
    assert sum(len(r.log) for r in runs.values()) == steps * sum(
        a.fires * len(net.places[a.place].ranks) for a in net.actors
    )
    graph: dict[Any, set[Any]] = {}
    for run in runs.values():
        for before, after in itertools.pairwise(run.log):
            graph.setdefault(after, set()).add(before)
    TopologicalSorter(graph).prepare()  # a circle would be ranks that wait in each other's collectives
    limits = {q.name: q.registers for q in net.queues}
    for a in hall.actors.values():
        assert all(most <= limits[name] for name, most in a.peaks.items())


def random_net(dice: random.Random) -> Net | None:
    """Actors in a random graph with rates, places that may overlap, registers that may be too few; None if so."""
    places = []
    for _ in range(dice.randint(1, 4)):
        places.append(place(*sorted(dice.sample(range(4), dice.choice((1, 1, 2, 3))))))
    actors = [
        Actor(f"a{i}", "forward", dice.randrange(len(places)), dice.choice((1, 2, 2, 4)))
        for i in range(dice.randint(2, 6))
    ]
    queues: list[Queue] = []
    for i, a in enumerate(actors):
        for j, b in enumerate(actors):
            if i == j or dice.random() > (0.6 if i < j else 0.2):
                continue
            # as many made per step as each consumer reads, whatever they fire
            readers = [b, *(c for c in actors[max(i, j) + 1 :] if i < j and dice.random() < 0.3)]
            gives = math.lcm(*(c.fires // math.gcd(c.fires, a.fires) for c in readers)) * dice.choice((1, 1, 2))
            made = a.fires * gives
            takes = tuple(made // c.fires for c in readers)
            filled = 0 if i < j else made
            least = max(gives, filled, *takes)
            names = tuple(c.name for c in readers)
            queues.append(Queue(f"q{i}{j}", a.name, names, least + dice.randint(0, 3), gives, takes, filled, 64))
    orders: list[list[tuple[str, int]]] = [[] for _ in places]
    full = {(q.name, c): q.filled for q in queues for c in q.consumers}
    done = dict.fromkeys((a.name for a in actors), 0)
    by = {a.name: a for a in actors}
    while True:
        able = [
            a.name
            for a in actors
            if done[a.name] < a.fires
            and all(full[q.name, a.name] >= q.taken(a.name) for q in queues if a.name in q.consumers)
            and all(
                max(full[q.name, c] for c in q.consumers) + q.gives <= q.registers
                for q in queues
                if q.producer == a.name
            )
        ]
        if not able:
            break
        name = dice.choice(able)
        orders[by[name].place].append((name, done[name]))
        done[name] += 1
        for q in queues:
            for c, count in zip(q.consumers, q.takes, strict=True):
                full[q.name, c] += q.gives * (q.producer == name) - count * (c == name)
    if any(done[a.name] < a.fires for a in actors) or not queues:
        return None
    window = dice.choice((0, 0, 1, 2, None, None))
    return Net(tuple(places), tuple(actors), tuple(queues), tuple(map(tuple, orders)), window)

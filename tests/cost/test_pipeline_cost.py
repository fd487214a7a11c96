"""Times of pipelines: closed forms, the simulator of unrolled steps, and a machine that is moved by hand."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from laminar.cost.sim.pipeline import Execution, execute
from laminar.cost.sim.simulate import simulate
from laminar.cost.sim.tasks import Lane, Load, Task
from laminar.errors import NetError
from laminar.ir.mesh import Link, Mesh, Place
from laminar.ir.net import Actor, Net
from laminar.ir.timeline import Timeline
from laminar.lower.stages.deadlock import check_net
from laminar.lower.stages.pipeline_net import Stage, chain
from laminar.lower.stages.schedules import dag_net
from tests.support.net_machine import Machine, random_net, random_pipeline

WORK = {"F": 100, "B": 200, "I": 100, "W": 100, "R": 0, "O": 0}


def transfer_ns(net: Net, link: Link) -> dict[str, int]:
    """For queues that cross: nanoseconds until one register has arrived over a link."""
    return {q.name: round(1e9 * (link.latency_s + q.bytes / link.bytes_per_s)) for q in net.queues if net.crosses(q)}


def pipe(stages: int, micro_batches: int, schedule: str, virtual: int = 1, **more: float) -> Net:
    """A chain of equal stages."""
    layout = chain([Stage(place=s % stages) for s in range(stages * virtual)], micro_batches, apart="zero" in schedule)
    return dag_net(layout, schedule=schedule, **more)


def timed(net: Net, steps: int = 4, **more: int) -> Execution:
    """Parts of all stages take the same time."""
    return execute(net, {a.name: WORK[a.name[0]] for a in net.actors}, steps, **more)


@pytest.mark.parametrize("stages, micro_batches", [(1, 3), (2, 4), (4, 8), (4, 3), (8, 16)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages_is_the_closed_form(schedule: str, stages: int, micro_batches: int) -> None:
    """(S-1) of M+S-1 slots are empty at every place, in the steady state, with the registers of the defaults."""
    run = timed(pipe(stages, micro_batches, schedule))
    assert run.step_ns == 300 * (micro_batches + stages - 1)
    assert run.bubbles == pytest.approx([(stages - 1) / (micro_batches + stages - 1)] * stages)


@pytest.mark.parametrize("stages, micro_batches, virtual", [(2, 4, 2), (4, 8, 2), (4, 8, 3), (3, 9, 4), (8, 16, 2)])
def test_virtual_stages_shorten_the_bubble_by_their_number(stages: int, micro_batches: int, virtual: int) -> None:
    """(S-1) of vM+S-1 slots, each of a v-th of the size."""
    run = timed(pipe(stages, micro_batches, "interleaved", virtual))
    assert run.bubbles == pytest.approx([(stages - 1) / (virtual * micro_batches + stages - 1)] * stages)


@pytest.mark.parametrize("stages, micro_batches", [(2, 4), (4, 8), (8, 16), (4, 32)])
def test_weight_parts_in_the_bubbles_make_them_smaller(stages: int, micro_batches: int) -> None:
    """With the stash of 1F1B already; if all stages may stash as much as the first, only (S-1)(F+I-W) is left."""
    same = timed(pipe(stages, micro_batches, "zero-bubble"))
    assert max(same.bubbles) < (stages - 1) / (micro_batches + stages - 1)
    for s in range(stages):
        assert same.in_flight[f"F{s}->W{s}"] <= stages - s
    level = timed(pipe(stages, micro_batches, "zero-bubble-level"))
    assert level.step_ns == 300 * micro_batches + 100 * (stages - 1)
    assert max(level.in_flight[f"F{s}->W{s}"] for s in range(stages)) <= stages


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_larger_stash_and_a_window_cost_nothing_where_times_are_equal(stages: int) -> None:
    """Running ahead changes the order, not the length of a step."""
    base = timed(pipe(stages, 16, "1f1b")).step_ns
    assert timed(pipe(stages, 16, "1f1b", stash=2)).step_ns == base
    assert timed(pipe(stages, 16, "1f1b", stash=2, window=2)).step_ns <= base


def test_one_register_between_stages_makes_them_wait_for_each_other() -> None:
    """Why the default is two: with one, a stage can't make the next while the last is being read."""
    for queues in ({f"F{s}->F{s + 1}": 1 for s in range(3)}, {f"B{s + 1}->B{s}": 1 for s in range(3)}):
        assert timed(pipe(4, 8, "gpipe", registers=queues)).step_ns > timed(pipe(4, 8, "gpipe")).step_ns


def unrolled(
    net: Net,
    run: Execution,
    work: dict[tuple[str, int, int], int],
    moved: dict[str, int],
    shared: dict[str, tuple[int, ...]],
    grant: int,
) -> Load:
    """The same steps as tasks for the general simulator: each firing waits for what it reads and for free registers.

    Lanes of places follow the orders. Only the sequence in which transfers were made is taken from the run.
    """
    steps, number = run.steps, {}
    lanes = [Lane(p, "compute") for p in range(len(net.places))]
    tasks: list[list] = []

    def add(key: tuple, ns: int, *lane: int) -> None:
        number[key] = len(tasks)
        tasks.append([":".join(map(str, key)), lane, ns, []])

    for p, order in enumerate(net.orders):
        for step in range(steps):
            for name, k in order:
                add((name, step * net.by_name[name].fires + k), work[name, k, step], p)
    pairs: dict[tuple[int, int] | int, int] = {}
    for r in (r for r in run.ran if r.source >= 0):
        q = next(q for q in net.queues if q.name == r.name)
        used = ((r.source, r.place), *shared.get(r.name, ()))
        for lane in used:
            if lane not in pairs:
                pairs[lane] = len(lanes)
                lanes.append(Lane(r.place, f"communication:{lane}"))
        key = (r.name, "to", r.place, r.step * net.by_name[q.producer].fires * q.gives + r.k)
        add(key, moved[r.name], *(pairs[lane] for lane in used))
    for q in net.queues:
        home, fires = net.by_name[q.producer].place, net.by_name[q.producer].fires * steps
        for c in q.consumers:
            take, there = q.taken(c), net.by_name[c].place
            if grant and there != home:
                for n in range(net.by_name[c].fires * steps):
                    lanes.append(Lane(there, f"communication:grant{len(lanes)}"))
                    add((q.name, "back", c, n), grant, len(lanes) - 1)
                    tasks[-1][3].append(number[c, n])
            for n in range(net.by_name[c].fires * steps):
                for token in range(n * take - q.filled, (n + 1) * take - q.filled):
                    if token >= 0:
                        via = (q.name, "to", there, token)
                        tasks[number[c, n]][3].append(number.get(via, number[q.producer, token // q.gives]))
            for n in range(fires):
                last = q.filled + (n + 1) * q.gives - q.registers  # so many must have been read
                if last > 0:
                    reader = math.ceil(last / take) - 1
                    back = (q.name, "back", c, reader)
                    tasks[number[q.producer, n]][3].append(number.get(back, number[c, reader]))
        for key, i in list(number.items()):
            if key[0] == q.name and key[1] == "to":
                tasks[i][3].append(number[q.producer, key[3] // q.gives])
    return Load(tuple(lanes), tuple(Task(a, b, c, tuple(dict.fromkeys(d))) for a, b, c, d in tasks))


def random_work(rng: random.Random, net: Net, steps: int) -> dict[tuple[str, int, int], int]:
    """A time for every firing, some of them none."""
    return {
        (a.name, k, s): rng.choice([0, 1, 5, rng.randint(1, 99)])
        for a in net.actors
        for k in range(a.fires)
        for s in range(steps)
    }


@pytest.mark.parametrize("seed", range(150))
def test_orders_kept_to_the_letter_take_the_ticks_of_the_simulator(seed: int) -> None:
    """Random nets, times, transfers, lanes they share, grants: unrolled into tasks, every firing has the same ticks."""
    rng = random.Random(seed)
    while True:
        net = replace(random_net(rng) if seed % 3 else random_pipeline(rng), window=0)
        if check_net(net).finishes:
            break
    steps = rng.choice([1, 2, 3])
    work = random_work(rng, net, steps)
    moved = {q.name: rng.randint(1, 40) for q in net.queues if net.crosses(q) and rng.random() < 0.7}
    grant = rng.choice([0, 0, 7])
    shared = {name: tuple(rng.sample(range(3), rng.randint(0, 2))) for name in moved} if seed % 2 else {}
    run = execute(net, lambda name, k, step: work[name, k, step], steps, transfers=moved, lanes=shared, grant_ns=grant)
    load = unrolled(net, run, work, moved, shared, grant)
    times = simulate(load)
    got = {t.name: (int(a), int(b)) for t, a, b in zip(load.tasks, times.start, times.end, strict=True)}
    for r in run.firings:
        assert got[f"{r.name}:{r.step * net.by_name[r.name].fires + r.k}"] == (r.start, r.end)
    assert run.step_ends[-1] <= times.step


@pytest.mark.parametrize("seed", range(200))
def test_choices_within_a_window_are_those_of_a_machine_moved_by_hand(seed: int) -> None:
    """A free place takes the earliest in its order that is ready: the same starts, and the same most registers."""
    rng = random.Random(1000 + seed)
    while True:
        net = random_net(rng) if seed % 3 else random_pipeline(rng)
        if check_net(net).finishes:
            break
    steps = rng.choice([2, 3])
    work = {key: max(1, ns) for key, ns in random_work(rng, net, steps).items()}
    run = execute(net, lambda name, k, step: work[name, k, step], steps)
    machine = Machine(net, steps)
    assert run.times() == machine.clock(work)
    assert {name: top for name, top in run.in_flight.items() if name in machine.most} == {
        q.name: max(machine.most[q.name], q.filled) for q in net.queues
    }
    assert all(run.in_flight[q.name] <= q.registers for q in net.queues)


def test_a_net_that_stands_still_is_refused() -> None:
    """The clock does not run for ever, and points to who knows why."""
    with pytest.raises(NetError, match=r"stands still: F0\.2 never begins"):
        timed(pipe(2, 4, "gpipe", registers={"F0->B0": 2}))


def test_transfers_of_one_direction_follow_each_other() -> None:
    """Two registers made at once arrive one after the other; each takes latency and bytes over bandwidth."""
    layout = chain([Stage(place=0), Stage(place=1)], 4, [1000])
    net = dag_net(layout)
    moved = transfer_ns(net, Link(latency_s=50e-9, bytes_per_s=1e10))
    assert moved == {"F0->F1": 150, "B1->B0": 150}
    run = timed(net, 1, transfers=moved)
    there = [r for r in run.ran if r.name == "F0->F1"]
    assert [(r.start, r.end) for r in there][:2] == [(100, 250), (250, 400)]
    assert there[1].because == run.ran.index(there[0])
    assert run.times()["F1", 0, 0][0] == 250


def test_places_that_share_a_rank_take_turns_and_loaders_do_not() -> None:
    """A rank computes one thing at a time; what it loads, it loads beside that."""
    one, two = Place((0, 1), Mesh({"tp": 2})), Place((1, 2), Mesh({"tp": 2}))
    orders = ((("a", 0),), (("b", 0),))
    for kind, end in (("forward", 15), ("load", 10)):
        net = Net((one, two), (Actor("a", "forward", 0), Actor("b", kind, 1)), (), orders)
        assert execute(net, {"a": 10, "b": 5}, 1).step_ends == (end,)


def test_the_timeline_reads_like_any_other() -> None:
    """Spans by place, transfers on lanes of their own, a critical path without gaps, and a Chrome trace."""
    net = dag_net(chain([Stage(place=0), Stage(place=1)], 4, [1000]))
    run = timed(net, 2, transfers=transfer_ns(net, Link(latency_s=50e-9, bytes_per_s=1e10)))
    line = run.timeline()
    assert line.kind == "simulated" and line.written == [0, 1] and line.step_ns == run.step_ends[-1]
    assert {"F0.0", "B1.3", "F0->F1.2"} <= {s.name for s in line.spans}
    path = line.critical_path()
    assert path[0].start == 0 and all(a.end == b.start for a, b in pairwise(path))
    assert len(line.to_chrome()["traceEvents"]) > len(line.spans)
    assert Timeline.from_json(json.loads(json.dumps(line.to_json()))) == line
    one = run.timeline(range(1, 2))
    assert {s.name for s in one.spans if s.lane == "compute"} == {f"{name}.{k}" for o in net.orders for name, k in o}
    busy = line.breakdown(0)
    assert sum(busy["compute"].values()) == 2 * 4 * 300


def jittered(seed: int, sigma: float = 0.5):
    """Lognormal times of mean one, drawn per part, micro-batch and step."""

    def work(name: str, k: int, step: int) -> int:
        rng = random.Random(f"{seed} {name} {k} {step}")
        return round(1000 * WORK[name[0]] * math.exp(rng.gauss(-sigma * sigma / 2, sigma)))

    return work


@pytest.mark.parametrize("stages, least", [(2, 1.07), (4, 1.12), (8, 1.12)])
def test_with_twice_the_stash_and_a_window_jitter_costs_less(stages: int, least: float) -> None:
    """The reason for windows: where times vary, running ahead hides most of it. Drawn times are the same for both."""
    fixed, free = pipe(stages, 32, "1f1b"), pipe(stages, 32, "1f1b", stash=2, window=2)
    ratios = [execute(fixed, jittered(s), 4).step_ns / execute(free, jittered(s), 4).step_ns for s in range(3)]
    assert statistics.mean(ratios) >= least

"""Random loads for the simulator's tests, and a second simulator that is too simple to be wrong.

`slow_ticks` walks tick by tick and asks every task every time; it shares no code with the one it judges.
"""

from __future__ import annotations

import random

from laminar.cost.sim.tasks import FULL_SPEED, Drag, Lane, Load, Task


def random_drag(rng: random.Random) -> Drag:
    """Often none, sometimes on one side."""
    return Drag(
        *(
            rng.choice(
                [FULL_SPEED, FULL_SPEED, FULL_SPEED // 2, FULL_SPEED // 3, 500_000, 1 + rng.randrange(FULL_SPEED)]
            )
            for _ in "ab"
        )
    )


def random_task(rng: random.Random, name: str, lanes: tuple[Lane, ...], links: int, at: int, work: int) -> Task:
    """A task that may stand at index `at` of a load: it waits for earlier ones only."""
    kind = rng.random()
    compute = [k for k, lane in enumerate(lanes) if lane.kind == "compute"]
    host = [k for k, lane in enumerate(lanes) if lane.kind == "host"]
    moving = [k for k, lane in enumerate(lanes) if lane.kind.startswith("communication")]
    used: tuple[int, ...] = ()
    if kind < 0.55 or not moving:
        where: tuple[int, ...] = (rng.choice(compute),)
    elif kind < 0.65 and host:
        where = (rng.choice(host),)
    else:
        where = tuple(rng.sample(moving, min(len(moving), rng.choice([1, 1, 2, 3]))))
        if rng.random() < 0.1:
            where += (rng.choice(compute),)
        used = tuple(sorted(rng.sample(range(links), min(links, rng.choice([0, 1, 1, 2])))))
    near = range(max(0, at - 8), at)
    after = tuple(rng.sample(near, min(len(near), rng.choice([0, 1, 1, 2]))))
    return Task(name, where, 0 if rng.random() < 0.12 else rng.randrange(1, work), after, used)


def random_load(rng: random.Random, tasks: int, work: int = 60) -> Load:
    """Up to four ranks with a compute lane, up to two communication lanes and perhaps a host lane each."""
    ranks, comms, links = rng.randrange(1, 5), rng.randrange(0, 3), rng.randrange(0, 4)
    lanes = [Lane(r, "compute") for r in range(ranks)]
    lanes += [Lane(r, f"communication:{'ab'[k]}") for r in range(ranks) for k in range(comms)]
    lanes += [Lane(r, "host") for r in range(ranks) if rng.random() < 0.5]
    made = [random_task(rng, f"t{i}", tuple(lanes), links, i, work) for i in range(tasks)]
    return Load(tuple(lanes), tuple(made), links, random_drag(rng))


def slow_ticks(load: Load) -> tuple[list[int], list[int]]:
    """Start and end of every task, found by walking tick by tick."""
    n = len(load.tasks)
    start, end, done = [-1] * n, [-1] * n, [0] * n

    def first_in_lanes(i: int) -> bool:
        return all(end[k] >= 0 for lane in load.tasks[i].lanes for k in range(i) if lane in load.tasks[k].lanes)

    def moves(i: int) -> bool:
        return any(load.lanes[lane].kind.startswith("communication") for lane in load.tasks[i].lanes)

    def ranks(i: int) -> set[int]:
        want = "communication" if moves(i) else "compute"
        return {load.lanes[k].rank for k in load.tasks[i].lanes if load.lanes[k].kind.startswith(want)}

    def speed(i: int, active: list[int]) -> int:
        full = min(
            (FULL_SPEED // sum(link in load.tasks[k].links for k in active) for link in load.tasks[i].links),
            default=FULL_SPEED,
        )
        if any(moves(k) != moves(i) and ranks(k) & ranks(i) for k in active):
            full = full * (load.drag.transfer if moves(i) else load.drag.compute) // FULL_SPEED
        return max(full, 1)

    t = 0
    while min(end, default=0) < 0:
        for i in range(n):
            if start[i] >= 0 and end[i] < 0 and done[i] >= load.tasks[i].work * FULL_SPEED:
                end[i] = t
        moved = True
        while moved:
            moved = False
            for i in range(n):
                if start[i] < 0 and first_in_lanes(i) and all(end[p] >= 0 for p in load.tasks[i].after):
                    start[i], moved = t, True
                    if not load.tasks[i].work:
                        end[i] = t
        active = [i for i in range(n) if start[i] >= 0 > end[i]]
        assert active or min(end) >= 0, "the load is blocked"
        for i, by in [(i, speed(i, active)) for i in active]:
            done[i] += by
        t += 1
    return start, end


def step_load(rng: random.Random, layers: int, stages: int, host: bool = True) -> Load:
    """A training step in small: stages of layers, forward and backward, with collectives inside and gradients behind.

    Each stage is a rank with compute, tensor and data lanes (and a host that launches everything ahead);
    stages hand over by transfers that stand in a lane of both.
    """
    kinds = ("compute", "communication:tp", "communication:dp", *(("host",) if host else ()))
    lanes = tuple(Lane(r, kind) for r in range(stages) for kind in kinds)
    tasks: list[Task] = []

    def add(name: str, where: tuple[int, ...], work: int, after: tuple[int, ...], links: tuple[int, ...] = ()) -> int:
        tasks.append(Task(name, where, work, after, links))
        return len(tasks) - 1

    def ops(name: str, stage: int, count: int, last: tuple[int, ...]) -> tuple[int, ...]:
        base = stage * len(kinds)
        for j in range(count):
            if host:
                last = (*last, add(f"{name}.{j}/launch", (base + 3,), rng.randrange(20, 60), ()))
            last = (add(f"{name}.{j}", (base,), rng.randrange(50, 900), last),)
        return (add(f"{name}/all_reduce", (base + 1,), rng.randrange(200, 400), last, (stage,)),)

    last: tuple[int, ...] = ()
    order = [(k, k * stages // layers) for k in range(layers)]
    reductions: list[tuple[int, int]] = []
    for phase, walk in (("forward", order), ("backward", order[::-1])):
        before = walk[0][1]
        for k, stage in walk:
            if stage != before:
                pair = (before * len(kinds) + 2, stage * len(kinds) + 2)
                last = (add(f"{phase}.{k}/hand_over", pair, rng.randrange(100, 300), last, (before, stage)),)
                before = stage
            last = ops(f"{phase}.{k}", stage, rng.randrange(3, 9), last)
            if phase == "backward":
                moved = add(f"reduce.{k}", (stage * len(kinds) + 2,), rng.randrange(500, 4000), last, (stage,))
                reductions.append((stage, moved))
    for stage in range(stages):
        add(f"optimizer.{stage}", (stage * len(kinds),), 700, tuple(i for s, i in reductions if s == stage))
    return Load(lanes, tuple(tasks), stages, random_drag(rng))

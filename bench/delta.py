"""How much faster is an edited step simulated by delta than in full?

`program`: the load of a real program, GPT-2 medium (24 layers) on 64 H100, data parallel over 16 and tensor
parallel over 4, as `laminar simulate` makes it. And three made here, symmetric ranks written once, with some
forty ops per layer forward and seventy backward, all-reduces of the tensor axis that compute waits for,
and gradient reductions behind the backward: `gpu` (the host launches every op ahead of the device), `cpu`
(no host lane, strong drag) and `backlog` (gradients are reduced more slowly than they are made, so that the
communication lane is busy to the end: the hardest, since nothing falls back into step).

An edit gives a random task other work, takes one out, puts one in, or changes a stretch of twelve (as
another placement of an op does). Edits are uniformly random over the tasks. The last quarter is told
apart twice: by the place of the edited task in the list, and by the time at which it starts (with a host
that runs ahead these differ: its last launch lies early in the step). Every delta answer is compared with
the full one, to the last tick.

Timed until the length of the step is known, which is what a search asks for; `read` are the same edits until all
starts, ends and reasons are read. In the plain figures delta is given two loads and finds what differs; `told`
figures are of the same edits, delta being told which tasks differ, as by a search that made the edit. `chain` is a
walk of single edits, each from the result of the one before, so that nothing made for one edit serves another.

    python bench/delta.py [--edits 200] [--shape program]

CPU time, best of five, one process. Targets: full below 30 ms; delta at the median 5 times faster, 10 times
in the last quarter.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from common import report

from laminar.cost.sim.delta import again
from laminar.cost.sim.simulate import Times, simulate
from laminar.cost.sim.tasks import Drag, Lane, Load, Task

COMPUTE, TENSOR, DATA, HOST = range(4)
LANES = (Lane(0, "compute"), Lane(0, "communication:tp"), Lane(0, "communication:dp"), Lane(0, "host"))


def gpt(layers: int, host: bool, drag: Drag, reduction: int, seed: int = 0) -> Load:
    """A step; `reduction` is the ticks one layer's gradients take on the wire."""
    rng = random.Random(seed)
    tasks: list[Task] = []
    made: list[int] = []  # what the next op waits for

    def add(name: str, lane: int, work: int, after: tuple[int, ...]) -> int:
        tasks.append(Task(name, (lane,), work, after, (0,) if lane in (TENSOR, DATA) else ()))
        return len(tasks) - 1

    def op(name: str, work: int, after: tuple[int, ...]) -> int:
        if host:
            after = (*after, add(f"{name}/launch", HOST, rng.randrange(3_000, 6_000), ()))
        return add(name, COMPUTE, work, after)

    def layer(k: int, phase: str, ops: int) -> None:
        reductions = []
        for j in range(ops):
            heavy = j % 5 == 0
            work = rng.randrange(80_000, 200_000) if heavy else rng.randrange(2_000, 20_000)
            skip = (made[-rng.randrange(2, 9)],) if len(made) > 8 and rng.random() < 0.3 else ()
            made.append(op(f"{phase}.{k}.{j}", work, (*made[-1:], *skip)))
            if j in (ops // 2, ops - 1):
                made.append(add(f"{phase}.{k}.{j}/all_reduce", TENSOR, rng.randrange(90_000, 110_000), (made[-1],)))
            if phase == "backward" and j % 12 == 11:
                reductions.append(made[-1])
        share = reduction // max(1, len(reductions))
        for j, ready in enumerate(reductions):
            done.append(add(f"reduce.{k}.{j}", DATA, share, (ready,)))

    done: list[int] = []
    for k in range(layers):
        layer(k, "forward", 40)
    for k in reversed(range(layers)):
        layer(k, "backward", 72)
    last = made[-1]
    for k in range(layers):
        last = op(f"optimizer.{k}", 50_000, (last, *done[-5:]) if k == 0 else (last,))
    return Load(LANES if host else LANES[:3], tuple(tasks), 1, drag)


def edit(load: Load, at: int, rng: random.Random) -> tuple[Load, list[int], list[int]]:
    """One random edit at task `at`; the new indices of tasks that differ and the old ones of those gone."""
    tasks = list(load.tasks)
    kind = rng.choice(("work", "remove", "insert", "block"))
    task = tasks[at]
    changed, lost = [at], []
    if kind == "work":
        tasks[at] = task._replace(work=rng.randrange(2 * task.work + 1_000))
    elif kind == "block":
        changed = list(range(at, min(at + 12, len(tasks))))
        for i in changed:
            tasks[i] = tasks[i]._replace(work=rng.randrange(tasks[i].work + 1_000))
    elif kind == "insert":
        tasks = [t._replace(after=tuple(p + (p >= at) for p in t.after)) for t in tasks]
        tasks.insert(at, Task(f"inserted.{at}.{len(tasks)}", task.lanes, rng.randrange(50_000), task.after, task.links))
    else:
        gone = task.after

        def moved(after: tuple[int, ...]) -> tuple[int, ...]:
            kept = (q for p in after for q in (gone if p == at else (p,)))
            return tuple(dict.fromkeys(p - (p > at) for p in kept))

        changed, lost = [i - (i > at) for i, t in enumerate(tasks) if at in t.after], [at]
        tasks = [t._replace(after=moved(t.after)) for i, t in enumerate(tasks) if i != at]
    return Load(load.lanes, tuple(tasks), load.links, load.drag), changed, lost


def cpu_s(call: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def program() -> Load:
    """The load of a real program: needs torch for the capture, and some seconds."""
    import sys
    from pathlib import Path

    import torch

    import laminar
    from laminar.forecast.step import predict

    sys.path.append(str(Path(__file__).parent.parent / "examples"))
    import gpt as example  # type: ignore[import-not-found]

    recipe = example.deep()
    with torch.device("meta"):
        model = recipe.model()
    graph = laminar.capture(model, recipe.loss, next(iter(recipe.data())))
    plan = laminar.plans.tensor_parallel(graph, laminar.Mesh({"dp": 16, "tp": 4}))
    return predict(graph, plan, laminar.Cluster.preset("64xh100")).schedule.load


SHAPES = {
    "gpu": {"host": True, "drag": Drag.fractions(0.9, 0.8), "reduction": 800_000},
    "cpu": {"host": False, "drag": Drag.fractions(0.5, 0.6), "reduction": 800_000},
    "backlog": {"host": False, "drag": Drag.fractions(0.9, 0.8), "reduction": 6_000_000},
}


class Row(NamedTuple):
    """CPU seconds of one edit, and how delta found its answer."""

    at: int
    full_s: float
    delta_s: float
    read_s: float
    told_s: float
    how: dict[str, Any]


def read(times: Times) -> int:
    """All there is to know."""
    return len(times.start) + len(times.end) + len(times.because)


def measure(before: Times, at: int, rng: random.Random) -> Row:
    """One edit, each way five times, the best of each."""
    new, changed, gone = edit(before.load, at, rng)
    fast, slow = again(before, new), simulate(new)
    assert fast.same(slow), f"delta and full differ after an edit at task {at}"
    assert again(before, new, changed, gone).same(slow), f"delta, being told, and full differ after an edit at {at}"
    ways = (
        lambda: simulate(new).step,
        lambda: again(before, new).step,
        lambda: read(again(before, new)),
        lambda: again(before, new, changed, gone).step,
    )
    full_s, delta_s, read_s, told_s = (min(cpu_s(way) for _ in range(5)) for way in ways)
    return Row(at, full_s, delta_s, read_s, told_s, fast.how)


def chain(before: Times, edits: int, rng: random.Random) -> list[float]:
    """Speedups along a walk; each link can be timed only once."""
    found = []
    for _ in range(edits):
        new, *_ = edit(before.load, rng.randrange(len(before.load.tasks)), rng)
        start = time.process_time()
        simulate(new)
        middle = time.process_time()
        times = again(before, new)
        found.append((middle - start) / (time.process_time() - middle))
        assert times.same(simulate(new)), "delta and full differ along a chain"
        before = times
    return found


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--edits", type=int, default=200)
    parser.add_argument("--layers", type=int, default=24, help="of the loads made here")
    parser.add_argument("--shape", choices=["program", *SHAPES], default=None)
    given = parser.parse_args()
    for shape in [given.shape] if given.shape else ["program", *SHAPES]:
        load = program() if shape == "program" else gpt(given.layers, **SHAPES[shape])  # type: ignore[arg-type]
        before = simulate(load)
        again(before, load)
        rng = random.Random(1)
        n, late = len(load.tasks), [i for i, t in enumerate(before.start) if t >= 0.75 * before.step]
        places = [rng.randrange(n) for _ in range(given.edits)]
        rows = [measure(before, at, rng) for at in places]
        last = [measure(before, rng.choice(late), rng) for _ in range(given.edits // 4)]
        speedups = sorted(r.full_s / r.delta_s for r in rows)
        tenths = statistics.quantiles(speedups, n=10)
        by_place = [r for r in rows if r.at >= 0.75 * n]

        def times_faster(rows: list[Row], way: str = "delta_s") -> float:
            return round(statistics.median(r.full_s / getattr(r, way) for r in rows), 2)

        report(
            "delta",
            {
                "shape": shape,
                "tasks": n,
                "lanes": len(load.lanes),
                "full_cpu_ms": round(1e3 * statistics.median(r.full_s for r in rows), 2),
                "delta_cpu_ms": round(1e3 * statistics.median(r.delta_s for r in rows), 3),
                "speedup_median": times_faster(rows),
                "speedup_p10": round(tenths[0], 2),
                "speedup_p90": round(tenths[-1], 2),
                "last_quarter_by_place": times_faster(by_place),
                "last_quarter_by_time": times_faster(last),
                "read_median": times_faster(rows, "read_s"),
                "read_last_quarter_by_place": times_faster(by_place, "read_s"),
                "read_last_quarter_by_time": times_faster(last, "read_s"),
                "told_median": times_faster(rows, "told_s"),
                "told_last_quarter_by_place": times_faster(by_place, "told_s"),
                "told_last_quarter_by_time": times_faster(last, "told_s"),
                "chain_median": round(statistics.median(chain(before, given.edits // 2, rng)), 2),
                "simulated_share": round(statistics.mean(r.how["simulated"] for r in rows) / n, 4),
                "fell_back_to_full": sum(r.how["full"] for r in rows),
                "edits": given.edits + len(last),
                "equal": True,
            },
        )


if __name__ == "__main__":
    main()

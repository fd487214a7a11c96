"""Is the loading of batches hidden behind the step?

A GPT of 0.5M parameters (the one of `models.py`, 2 blocks of width 128) on one CPU rank, 4 sequences a step, one
thread. Reading a batch takes a share of the step: it sleeps, as one who waits for a disk or a network does. Ours is
fed by `job.prefetch` with depths 0, 1, 2 and 4; beside it, in the same rounds, plain PyTorch (eager, fused AdamW) fed
by `DataLoader(num_workers=1, prefetch_factor=2)`.

What counts is a step with loading over the longer of the two: the same side's step on batches that are in memory,
measured in the same round, and the load. 1 is perfect; without prefetching it is their sum over their maximum.

    python bench/loading.py [--rounds 8] [--steps 20] [--model small]

Target: at most 1.05 with a depth of 2, for loads of 0.5, 0.9, 1.0 and 1.5 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from common import ratio, report
from models import GPT, MODELS, Case
from peers import adamw, fresh
from torch.utils.data import DataLoader, IterableDataset

import laminar

SHARES, DEPTHS, TARGET = (0.5, 0.9, 1.0, 1.5), (0, 1, 2, 4), 1.05
WARM = 14
"""Steps at the beginning of every turn, which use up what was loaded while others had theirs."""


class Slow(IterableDataset[Any]):
    """The batches of a case without end, each after a sleep."""

    def __init__(self, case: Case, load_s: float) -> None:
        super().__init__()
        self.batches, self.load_s = case.batches, load_s

    def __iter__(self) -> Iterator[Any]:
        i = 0
        while True:
            time.sleep(self.load_s)
            yield self.batches[i % len(self.batches)]
            i += 1


def eager(case: Case) -> Callable[[Any], Any]:
    """A step of plain PyTorch."""
    model = fresh(case)
    optimizer = adamw(model.parameters())

    def step(batch: Any) -> float:
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def turn(step: Callable[[Any], Any], batches: Iterator[Any], steps: int) -> float:
    """Seconds of a step."""
    for _ in range(WARM):
        step(next(batches))
    start = time.perf_counter()
    for _ in range(steps):
        step(next(batches))
    return (time.perf_counter() - start) / steps


def forever(case: Case) -> Iterator[Any]:
    """Batches that need no loading."""
    while True:
        yield from case.batches


def measured(case: Case, share: float, rounds: int, steps: int) -> dict[str, Any]:
    """Every side's step over the longer of its compute and its load."""
    job = laminar.parallelize(fresh(case), case.loss, adamw, batch=case.batches[0], device="cpu")
    mine, theirs = (lambda b: job.step(b).loss), eager(case)
    alone = {"laminar": (mine, forever(case)), "torch": (theirs, forever(case))}
    compute = {name: turn(step, batches, steps) for name, (step, batches) in alone.items()}
    load = {name: share * seconds for name, seconds in compute.items()}
    times: dict[str, list[float]] = {name: [] for name in (*(f"prefetch {d}" for d in DEPTHS), "DataLoader")}
    longer: dict[str, list[float]] = {name: [] for name in times}
    with contextlib.ExitStack() as stack:
        sides: dict[str, tuple[str, Any, Iterator[Any]]] = {}
        for d in DEPTHS:
            loader = stack.enter_context(job.prefetch(Slow(case, load["laminar"]), d))
            sides[f"prefetch {d}"] = "laminar", mine, loader
        data: Any = DataLoader(Slow(case, load["torch"]), batch_size=None, num_workers=1, prefetch_factor=2)
        sides["DataLoader"] = "torch", theirs, iter(data)
        for r in range(rounds):
            now = {name: turn(step, batches, steps) for name, (step, batches) in alone.items()}
            for name in sides if r % 2 == 0 else reversed(sides):
                of, step, batches = sides[name]
                times[name].append(turn(step, batches, steps))
                longer[name].append(max(now[of], load[of]))
        sides.clear()
    job.close()
    return {
        "load_over_step": share,
        "step_ms": {name: round(1e3 * seconds, 2) for name, seconds in compute.items()},
        "over_the_longer": {name: ratio({"a": times[name], "b": longer[name]}, "a", "b") for name in times},
    }


def case_of(name: str) -> Case:
    """A model with its batches."""
    if name != "small":
        return MODELS[name](1, True, 1)
    return replace(MODELS["gpt"](1, True, 1), model=lambda: GPT(layers=2, d=128, heads=4, vocab=256, tokens=64))


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--rounds", type=int, default=8)
    args.add_argument("--steps", type=int, default=20)
    args.add_argument("--model", default="small", choices=["small", *MODELS])
    given = args.parse_args()
    torch.set_num_threads(1)
    found = []
    for share in SHARES:
        row = measured(case_of(given.model), share, given.rounds, given.steps)
        found.append(row["over_the_longer"])
        report("loading", {"model": given.model, **row, "target": TARGET})
    worst = {name: max(each[name]["median"] for each in found) for name in found[0]}
    typical = {name: round(statistics.median(each[name]["median"] for each in found), 3) for name in found[0]}
    report(
        "loading", {"model": given.model, "loads": list(SHARES), "worst": worst, "median": typical, "target": TARGET}
    )


if __name__ == "__main__":
    main()

"""How long does it take to simulate one step of a large plan, the program given?

GPT-2 medium (24 layers, 355M parameters) on 64 H100, data parallel over 8 and tensor parallel over 8, bfloat16.
Counted is the processor time from the lowered program to the seconds of a step: pricing every kernel, the schedule of
lanes, the event simulation. `fused` has kernels grouped as a compiler would, which is given; `grouped` is the same with
the grouping counted in; `lines` is line by line. What may run again in backward (`lower.recompute`) is decided in
lowering and never counted. Price lists are made anew each time, so nothing is remembered from the run before; regimes
take turns, so that whatever else the machine does hits all of them.

    python bench/simulate.py [--repeats 15]

Target: 50 ms.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from common import report
from judged import example

from laminar.capture.capture import capture
from laminar.cost.schedule import KernelGroups, schedule
from laminar.cost.sim.simulate import simulate
from laminar.forecast.step import machine
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.mesh import Mesh
from laminar.ir.program import Program
from laminar.lower.kernels import kernels
from laminar.lower.memory.mincut_recompute import recompute, written_out
from laminar.lower.step import step_programs
from laminar.placement import presets
from laminar.train.optimizer.precision import Precision


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--repeats", type=int, default=15)
    given = args.parse_args()
    m = example("gpt")
    config = m.Config(layers=24, d=1024, heads=16, vocab=50304, tokens=1024, batch=64)
    with torch.device("meta"):
        model = m.GPT(config)
        ids = torch.zeros(64, 1024, dtype=torch.long)
    loss = Precision.of("bf16").around(m.loss, torch.device("cpu"))
    graph = capture(model, loss, {"ids": ids, "target": ids}, wide=True)
    mesh = Mesh({"dp": 8, "tp": 8})
    program, then = step_programs(graph, presets.tensor_parallel(graph, mesh))
    cluster = Cluster.preset("64xh100")
    again = recompute(written_out(program))
    groups = kernels(again)
    regimes: dict[str, tuple[Program, Callable[[], KernelGroups | None]]] = {
        "fused": (again, lambda: groups),
        "grouped": (again, lambda: kernels(again)),
        "lines": (program, lambda: None),
    }
    rounds = [{name: once(p, then, cluster, make) for name, (p, make) in regimes.items()} for _ in range(given.repeats)]
    for name, (p, _) in regimes.items():
        found = [r[name] for r in rounds]
        times = [f.grouping_s + f.pricing_s + f.events_s for f in found]
        report(
            "simulate",
            {
                "regime": name,
                "lines": len(p.instrs),
                "tasks": found[-1].tasks,
                "classes": found[-1].classes,
                "cpu_ms_median": round(statistics.median(times) * 1e3, 2),
                "cpu_ms_best": round(min(times) * 1e3, 2),
                "of_which_grouping_ms": round(statistics.median(f.grouping_s for f in found) * 1e3, 2),
                "of_which_events_ms": round(statistics.median(f.events_s for f in found) * 1e3, 2),
                "target_ms": 50,
                "predicted_step_ms": round(found[-1].step_ns / 1e6, 3),
            },
        )


class Once(NamedTuple):
    """One simulation: processor seconds of its parts, and what came out."""

    grouping_s: float
    pricing_s: float
    events_s: float
    tasks: int
    classes: int
    step_ns: int


def once(p: Program, then: Program | None, cluster: Cluster, make: Callable[[], KernelGroups | None]) -> Once:
    """Simulate a step, with nothing known but the program and what `make` gives."""
    prices = machine(cluster, p.mesh)
    gc.collect()
    start = time.process_time()
    groups = make()
    grouped = time.process_time()
    made = schedule(p, prices, cluster, then, groups)
    priced = time.process_time()
    times = simulate(made.load)
    end = time.process_time()
    return Once(grouped - start, priced - grouped, end - priced, len(made.load.tasks), len(made.stands_for), times.step)


if __name__ == "__main__":
    sys.exit(main())

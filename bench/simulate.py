"""How long does it take to simulate one step of a large plan, the program given?

GPT-2 medium (24 layers, 355M parameters) on 64 H100, data parallel over 8 and tensor parallel over 8, bfloat16.
Counted is the processor time from the lowered program to the seconds of a step: pricing every kernel, the schedule of
lanes, the event simulation. `fused` has kernels grouped as a compiler would, which belongs to lowering and is given;
`lines` is line by line. Price lists are made anew each time, so nothing is remembered from the run before.

    python bench/simulate.py [--repeats 15]

Target: 50 ms.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time

import torch
from common import report
from judged import example

from laminar.capture.capture import capture
from laminar.cost.schedule import schedule
from laminar.cost.simulate import simulate
from laminar.forecast import machine
from laminar.ir.cluster import Cluster
from laminar.ir.mesh import Mesh
from laminar.lower.fuse import kernels
from laminar.lower.recompute import recompute, written_out
from laminar.lower.step import step_programs
from laminar.search import presets
from laminar.train.precision import Precision


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
    for name, p, groups in (("fused", again, kernels(again)), ("lines", program, None)):
        times, parts = [], []
        for _ in range(given.repeats):
            prices = machine(cluster, mesh)
            gc.collect()
            start = time.process_time()
            made = schedule(p, prices, cluster, then, groups)
            middle = time.process_time()
            found = simulate(made.load)
            times.append(time.process_time() - start)
            parts.append(time.process_time() - middle)
        report("simulate", {
            "regime": name,
            "lines": len(p.instrs),
            "tasks": len(made.load.tasks),
            "classes": len(made.stands_for),
            "cpu_ms_median": round(statistics.median(times) * 1e3, 2),
            "cpu_ms_best": round(min(times) * 1e3, 2),
            "of_which_events_ms": round(statistics.median(parts) * 1e3, 2),
            "target_ms": 50,
            "predicted_step_ms": round(found.step / 1e6, 3),
        })  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

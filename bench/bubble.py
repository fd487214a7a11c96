"""Is the bubble of a pipeline predicted?

A GPT of 10.9M parameters or more (`models.py`) in stages on CPU ranks, one thread each: balanced and lopsided cuts,
several numbers of micro-batches, schedules, virtual stages. Each plan is predicted on a profile of this machine
(`laminar profile -o here.json`), then trained, one after the other by the same ranks; of some recorded steps the median
one counts. The bubble is the share of a step in which the mean rank runs no part.

    python bench/bubble.py [--profile here.json] [--ranks 2] [--steps 5]

Target: predicted and measured shares at most 0.10 apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from common import report
from models import MODELS
from peers import adamw, fresh

import laminar
from laminar.api import micro_batches
from laminar.forecast.pipeline_step import predict_staged
from laminar.ir.timeline import Timeline
from laminar.runtime.comm.transport import join_process_group


def plans(ranks: int) -> dict[str, dict[str, Any]]:
    """What is tried; `at` are the blocks at which later stages begin."""
    blocks = max(6, ranks)
    even = [blocks * r // ranks for r in range(1, ranks)]
    late = [min(blocks - ranks + r + 1, blocks - 1) for r in range(ranks - 1)]
    early = list(range(1, ranks))
    return {
        **{f"1f1b, {m} micro-batches": {"at": even, "microbatches": m} for m in (1, 2, 4, 8)},
        "gpipe, 4": {"at": even, "microbatches": 4, "schedule": "gpipe"},
        "zero-bubble, 4": {"at": even, "microbatches": 4, "schedule": "zero-bubble"},
        "zero-bubble, 8": {"at": even, "microbatches": 8, "schedule": "zero-bubble"},
        "interleaved, 4": {"stages": ranks, "microbatches": 4, "virtual": 2},
        "interleaved, 8": {"stages": ranks, "microbatches": 8, "virtual": 2},
        "lopsided to the end, 4": {"at": early, "microbatches": 4},
        "lopsided to the start, 4": {"at": late, "microbatches": 4},
        "window 2, stash 2, 8": {"at": even, "microbatches": 8, "window": 2, "stash": 2.0},
    }


def bubble(found: Timeline) -> float:
    """The share of a step in which the mean rank runs no part of a stage."""
    parts = [s for s in found.spans if s.kind == "compute" and s.name[0] in "FBIW" and s.name[1].isdigit()]
    weight = {r: len(found.stands_for.get(r, (r,))) for r in found.written}
    busy = sum(weight[s.rank] * (s.end - s.start) for s in parts)
    return 1 - busy / (sum(weight.values()) * found.step_ns)


def one(ranks: int, options: dict[str, Any], profile: str, steps: int) -> dict[str, Any]:
    """On a rank: predicted and measured."""
    case = MODELS["gpt"](ranks, False)
    model, options = fresh(case), dict(options)
    graph = laminar.capture(model, case.loss, micro_batches(case.batches[0], options["microbatches"])[0])
    cuts = [rf"blocks\.{k}(\.|$)" for k in options.pop("at", [])]
    plan = laminar.plans.pipeline(graph, options.pop("stages", cuts), **options)
    found = predict_staged(graph, plan, laminar.Cluster.load(profile))
    job = laminar.parallelize(model, case.loss, adamw, batch=case.batches[0], plan=plan, device="cpu")
    for i in range(2):
        job.step(case.batches[i])
    with job.timeline() as t:
        for i in range(steps):
            job.step(case.batches[i % len(case.batches)])
    out = {
        "predicted": round(bubble(found.timeline), 4),
        "measured": round(bubble(t.timeline), 4),
        "predicted_ms": round(found.seconds * 1e3, 2),
        "measured_ms": round(t.timeline.step_ns / 1e6, 2),
    }
    job.close()
    return out


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument(
        "--profile", default="bench/results/profile_2.json", help="of `laminar profile`, with as many ranks"
    )
    args.add_argument("--ranks", type=int, default=2)
    args.add_argument("--steps", type=int, default=5)
    given = args.parse_args()
    # Predictions invert matrices: on every core unless told otherwise.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        each = [context.Process(target=_child, args=(r, folder, given)) for r in range(given.ranks)]
        for child in each:
            child.start()
        for child in each:
            child.join()
        if any(child.exitcode for child in each):
            raise SystemExit("a rank failed")


def _child(rank: int, folder: str, given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    join_process_group(rank, given.ranks, f"{folder}/rendezvous")
    apart = []
    for name, options in plans(given.ranks).items():
        row = one(given.ranks, options, given.profile, given.steps)
        apart.append(abs(row["predicted"] - row["measured"]))
        if rank == 0:
            report("bubble", {"plan": name, "ranks": given.ranks, **row, "apart": round(apart[-1], 4), "target": 0.10})
    if rank == 0:
        report(
            "bubble",
            {
                "plans": len(apart),
                "ranks": given.ranks,
                "median_apart": round(statistics.median(apart), 4),
                "most_apart": round(max(apart), 4),
                "target": 0.10,
            },
        )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()

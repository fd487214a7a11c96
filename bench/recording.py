"""What does it cost to record a timeline?

The same job makes steps with and without `job.timeline()`, in turns that alternate within one process (or one set of
ranks), so that whatever else the machine does hits both.

    python bench/recording.py [--model gpt mlp] [--plan data] [--ranks 2] [--rounds 24] [--repeats 3]
    python bench/recording.py --device cuda [--rounds 12]        one rank, GPT of 355M parameters, compiled

On CPU the figure is processor time of rank 0 within steps, its threads included; on a GPU it is seconds, the device
waited for. What happens once is beside it and not in the ratio: starting to record (`begin_ms`; the first time the
code with stamps is made, which is in `first_ms`), and telling all ranks at the end (`end_ms`).

Targets: at most 1.02 of processor time on CPU ranks, at most 1.02 of seconds on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import ratio, report
from models import MODELS
from race import _ranks

import laminar

TARGET = 1.02
TURN_S = 1.0
"""How long one side's turn should last at least."""
SIDES = ("plain", "recorded")


def main() -> None:
    """One JSON line a model."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--model", nargs="*", default=["gpt", "mlp"], choices=list(MODELS))
    args.add_argument("--plan", default="data")
    args.add_argument("--ranks", type=int, default=2)
    args.add_argument("--rounds", type=int, default=24, help="pairs of turns in each repeat")
    args.add_argument("--repeats", type=int, default=3, help="how often to start afresh")
    args.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    given = args.parse_args()
    if given.device == "cuda":
        said = on_gpu(given.rounds)
        over = ratio(said["seconds"], "recorded", "plain")
        report(
            "recording",
            {"model": "gpt 355M", "device": "cuda", "recorded_over_plain": over, "target": TARGET, **_medians(said)},
        )
        return
    for name in given.model:
        runs = [_ranks(given.ranks, on_cpu, name, given.plan, given.ranks, given.rounds) for _ in range(given.repeats)]
        whole = {what: {s: [t for r in runs for t in r[what][s]] for s in SIDES} for what in ("cpu", "seconds")}
        report(
            "recording",
            {
                "model": name,
                "device": "cpu",
                "plan": given.plan,
                "ranks": given.ranks,
                "recorded_over_plain_cpu": ratio(whole["cpu"], "recorded", "plain"),
                "repeats": [ratio(r["cpu"], "recorded", "plain")["median"] for r in runs],
                "recorded_over_plain": ratio(whole["seconds"], "recorded", "plain"),
                "target": TARGET,
                **_medians({**runs[0], **whole}),
                "load_before": round(os.getloadavg()[0], 2),
            },
        )


def _medians(said: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of each side's step, and of what happens once."""
    out = {
        f"{what}_ms": {s: round(statistics.median(ts) * 1e3, 3) for s, ts in said[what].items()}
        for what in ("seconds", "cpu")
        if what in said
    }
    once = {f"{what}_ms": round(statistics.median(said[what]) * 1e3, 2) for what in ("begin", "end")}
    return {**out, **once, "first_ms": round(said["first"] * 1e3, 1), "spans": said["spans"], "steps": said["calls"]}


class Turns:
    """Turns of one job, recorded or not, and what each cost."""

    def __init__(self, job: Any, step: Callable[[int], Any], wait: Callable[[], None]) -> None:
        self.job, self.step, self.wait = job, step, wait
        self.said: dict[str, Any] = {"cpu": {s: [] for s in SIDES}, "seconds": {s: [] for s in SIDES}}
        self.said |= {"begin": [], "end": [], "first": 0.0, "spans": 0}

    def run(self, side: str, calls: int) -> None:
        """One turn."""
        with self._recording() if side == "recorded" else contextlib.nullcontext():
            self.wait()
            wall, cpu = time.perf_counter(), time.process_time()
            for i in range(calls):
                self.step(i)
            if self.job.device.type == "cuda":
                torch.cuda.synchronize()
            self.said["cpu"][side].append((time.process_time() - cpu) / calls)
            self.said["seconds"][side].append((time.perf_counter() - wall) / calls)
            self.wait()

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        start = time.perf_counter()
        recording = self.job.timeline()
        recording.__enter__()
        self.said["begin"].append(time.perf_counter() - start)
        yield
        start = time.perf_counter()
        recording.__exit__(None, None, None)
        self.said["end"].append(time.perf_counter() - start)
        self.said["spans"] = len(recording.timeline.spans)

    def all(self, rounds: int, calls: int) -> dict[str, Any]:
        """Alternating turns, the order turning too, after one of each that does not count."""
        start = time.perf_counter()
        self.run("recorded", 1)
        self.said["first"] = time.perf_counter() - start
        self.run("plain", calls)
        self.run("recorded", calls)
        for what in ("cpu", "seconds"):
            self.said[what] = {s: [] for s in SIDES}
        self.said["begin"], self.said["end"] = [], []
        for r in range(rounds):
            for side in SIDES if r % 2 == 0 else reversed(SIDES):
                self.run(side, calls)
        return {**self.said, "calls": calls}


def on_cpu(model: str, plan: str, ranks: int, rounds: int) -> dict[str, Any]:
    """One rank's turns."""
    case = MODELS[model](ranks, True)
    torch.manual_seed(0)
    make = lambda params: torch.optim.AdamW(params, lr=1e-3)  # noqa: E731
    job = laminar.parallelize(case.model(), case.loss, make, batch=case.batches[0], plan=plan)
    for batch in case.batches:
        job.step(batch)
    start = time.perf_counter()
    job.step(case.batches[0])
    each = torch.tensor(time.perf_counter() - start)
    dist.broadcast(each, 0)
    turns = Turns(job, lambda i: job.step(case.batches[i % len(case.batches)]), dist.barrier)
    return turns.all(rounds, max(3, round(TURN_S / float(each))))


def on_gpu(rounds: int) -> dict[str, Any]:
    """Turns on one GPU: GPT-2 medium as in `bench/gpu.py`."""
    from gpu import gpt

    model, loss, batch, make, _ = gpt(False)
    batch = {k: v.cuda() for k, v in batch.items()}
    job = laminar.parallelize(model.cuda(), loss, make, batch=batch, precision="bf16", device="cuda", compile=True)
    for _ in range(5):
        job.step(batch)
    torch.cuda.synchronize()
    return Turns(job, lambda i: job.step(batch), lambda: torch.cuda.synchronize()).all(rounds, 10)


if __name__ == "__main__":
    main()

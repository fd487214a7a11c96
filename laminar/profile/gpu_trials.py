"""Whole steps on one GPU: what they take and hold, and a few models to calibrate a GPU with.

A profile of a GPU knows single kernels. What it misses shows in whole steps only: kernels that find their inputs in
the cache, clocks that fall under load, the gap between one kernel and the next, what the host does between
replays. The models here are timed compiled, as training runs them, and a few constants are fitted to them
(`cost.calibrate`). They are nobody's models, and none of them is among those a prediction is judged by.

    python -m laminar.profile.gpu_trials FILE SECONDS      one line of JSON for each model, graph and plan included

A model that fails leaves a line that says so. After SECONDS no further model is begun.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laminar.cost.calibrate import Timing, fit
from laminar.forecast.features import step_features
from laminar.forecast.step import machine, section_of
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.profile.time_op import workspace_bytes
from laminar.profile.trials import Trial, _classes, _clicks, _labelled, _next, _Tables, _Words, _words, adamw
from laminar.train.job.job import Job
from laminar.train.options import JobOptions

STARTING_S = 90.0
"""How much longer than its time a process may take: it starts, and ends the model it is at."""
LEAST_MODELS = 3
"""Fewer don't make a calibration."""
BUSY = 0.9
"""Where the host needs more than this share of a step's time, the step shows the host's speed and not the device's."""
TABLE_ROWS = 400_000
"""Of a table."""


@dataclass(frozen=True)
class GpuTrial(Trial):
    """A trial and what it is computed in."""

    precision: str = "bf16"


def _perceptron() -> nn.Module:
    def part(a: int, b: int) -> list[nn.Module]:
        return [nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b)]

    return nn.Sequential(*part(3072, 5120), *part(5120, 5120), *part(5120, 2560), nn.Linear(2560, 40))


def _pictures() -> nn.Module:
    def part(a: int, b: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    parts = [*part(3, 48, 1), *part(48, 96, 2), *part(96, 96, 1), *part(96, 192, 2), *part(192, 192, 1)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 24))


GPU_TRIALS = (
    GpuTrial("perceptron", _perceptron, _classes, _labelled((6144, 3072), 40)),
    GpuTrial("decoder", lambda: _Words(3, 640, 10, 2560, 20000, 512, False), _next, _words(20000, 12, 512)),
    GpuTrial("gated", lambda: _Words(3, 448, 7, 1216, 6000, 256, True), _next, _words(6000, 24, 256), "f32"),
    GpuTrial("pictures", _pictures, _classes, _labelled((96, 3, 80, 80), 24)),
    GpuTrial("small", lambda: _Words(3, 320, 5, 1280, 3000, 128, False), _next, _words(3000, 64, 128)),
    GpuTrial("tables", lambda: _Tables(6, TABLE_ROWS, 64), _clicks, lambda ranks: _visits(), "f32"),
)
"""What `laminar profile` runs whole on a GPU, most needed first."""


def _visits() -> dict[str, Tensor]:
    rng, n = torch.Generator().manual_seed(1), 16384
    numbers, ids = torch.randn(n, 16, generator=rng), torch.randint(TABLE_ROWS, (n, 6), generator=rng)
    return {"numbers": numbers, "ids": ids, "y": (numbers[:, 0] > 0).float()}


# --- one step ---------------------------------------------------------------------------------------


def there(value: Any, device: torch.device | str = "cuda") -> Any:
    """A batch on the device, in the same structure: copies from the host are not what is asked about here."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: there(v, device) for k, v in value.items()}
    return type(value)(there(v, device) for v in value) if isinstance(value, (list, tuple)) else value


class _Memory:
    """A device's own account of its memory; nothing on a CPU, which has none."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.counts = device, device.type == "cuda"

    def wait(self) -> None:
        """Until all is done that was asked for."""
        if self.counts:
            torch.cuda.synchronize(self.device)

    def empty(self) -> int:
        """What is held after everything that nobody needs was given back, without what libraries keep."""
        gc.collect()
        self.wait()
        if not self.counts:
            return 0
        torch.cuda.empty_cache()
        kept = _workspace(self.device)  # asked first: the first to ask takes it
        return int(torch.cuda.memory_allocated(self.device)) - kept

    def forget(self) -> None:
        """The most that was held so far."""
        if self.counts:
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def most(self) -> int:
        """The most that was held since."""
        return int(torch.cuda.max_memory_allocated(self.device)) if self.counts else 0

    @property
    def reserved(self) -> int:
        """What the process has taken from the device."""
        return int(torch.cuda.memory_reserved(self.device)) if self.counts else 0


@cache
def _workspace(device: torch.device) -> int:
    """Asked for first before any product was computed in this process."""
    return workspace_bytes(device)


def whole_step(
    make: Callable[[Any], Job], batch: Any, turns: int = 7, turn_s: float = 0.25, device: str = "cuda"
) -> tuple[dict[str, Any], Job]:
    """Seconds and bytes of a step of the job that `make` makes from a batch on the device; and that job.

    Seconds are of replayed CUDA graphs, median of turns without waiting in between. Allocated bytes are of a step of
    the same code without replay, since memory of CUDA graphs counts as allocated only while they are recorded; what
    libraries have taken for good is in them. `reserved` is what the process holds while replaying. `host_s` is what
    the host takes to ask for a step among others, `host_alone_s` while the device has nothing else to do.
    """
    # Long because it is one measurement from start to end, and what comes before each number is what it means.
    memory = _Memory(torch.device(device))
    before = memory.empty()
    start = time.perf_counter()
    batch = there(batch, device)
    job = make(batch)
    step: Any = job._first.step
    replays, step.replays = step.replays, False
    for _ in range(24):
        if not job.step(batch).skipped:  # a step in fp16 that overflows has no update
            break
    job.step(batch)
    memory.wait()
    first_s = time.perf_counter() - start
    memory.forget()
    job.step(batch)
    memory.wait()
    allocated = memory.most - before
    step.replays = replays
    for _ in range(3):
        job.step(batch)
    memory.wait()
    reserved = memory.reserved
    began = time.perf_counter()
    job.step(batch)
    memory.wait()
    calls = max(3, min(400, round(turn_s / (time.perf_counter() - began))))
    times, host, skipped = [], [], 0
    for _ in range(turns):
        began = time.perf_counter()
        for _ in range(calls):
            skipped += job.step(batch).skipped
        host.append((time.perf_counter() - began) / calls)
        memory.wait()
        times.append((time.perf_counter() - began) / calls)
    alone = []
    for _ in range(turns):
        began = time.perf_counter()
        job.step(batch)
        alone.append(time.perf_counter() - began)
        memory.wait()
    found = {
        "seconds": statistics.median(times),
        "spread": max(times) / min(times) - 1,
        "turns": times,
        "host_s": statistics.median(host),
        "host_alone_s": statistics.median(alone),
        "allocated": allocated,
        "reserved": reserved,
        "first_s": first_s,
        "skipped": skipped,
        "replayed": bool(step.replays),
    }
    return found, job


def recorded_kernels(job: Job, batch: Any, steps: int = 3) -> list[list[Any]]:
    """The kernels of a step, recorded: name, family, lane, start and end in nanoseconds, bytes."""
    batch = there(batch, job.device)
    with job.timeline() as recording:
        for _ in range(steps):
            job.step(batch)
    spans = sorted(recording.timeline.spans, key=lambda s: s.start)
    first = spans[0].start if spans else 0
    return [[s.name, s.family, s.lane, s.start - first, s.end - first, s.bytes] for s in spans]


# --- all of them ------------------------------------------------------------------------------------


def run_trials(
    path: Path, seconds: float, trials: Sequence[GpuTrial] = GPU_TRIALS, device: str = "cuda", turn_s: float = 0.15
) -> None:
    """Time every trial, one line each, until time is up."""
    began = time.monotonic()
    for trial in trials:
        if time.monotonic() - began > seconds:
            return
        line: dict[str, Any] = {"model": trial.name, "precision": trial.precision}
        try:
            found, graph, plan = _timed(trial, device, turn_s)
            line |= {**found, "graph": graph.to_json(), "plan": plan.to_json()}
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:500]
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _timed(trial: GpuTrial, device: str, turn_s: float) -> tuple[dict[str, Any], Graph, Plan]:
    """Of one trial; its job is gone when this returns."""
    torch.manual_seed(0)

    def make(batch: Any) -> Job:
        options = JobOptions(device=device, precision=trial.precision, compile=True)
        return Job(trial.model(), trial.loss, adamw, batch, "data", options)

    found, job = whole_step(make, trial.batch(1), turns=5, turn_s=turn_s, device=device)
    graph, plan = job.graph, job.plan
    job.close()
    return found, graph, plan


def timed_apart(seconds: float, keep: Path) -> list[dict[str, Any]]:
    """`run_trials` in a process of its own, which may die: what it has written by then is in `keep` and returned."""
    command = [sys.executable, "-m", "laminar.profile.gpu_trials", str(keep), str(seconds)]
    found_at = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    died = ""
    with tempfile.TemporaryFile() as log:
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": found_at},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=seconds + STARTING_S,
                check=False,
            )
            died = f"ended with exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            died = "did not end in time"
        log.seek(0)
        said = log.read().decode(errors="replace").strip()[-400:]
    lines = [json.loads(text) for text in keep.read_text().splitlines()] if keep.exists() else []
    if died:
        lines.append({"model": "trials", "error": f"the process {died}: {said}"})
    return lines


def calibrated_on_gpu(cluster: Cluster, lines: list[dict[str, Any]]) -> Cluster:
    """The cluster with a calibration from timed trials; none where too few went well, or kept the device busy."""
    mesh = Mesh({"dp": 1})
    bare, section = machine(cluster, mesh, calibrated=False), section_of(cluster, 1)
    timings, failed = [], {line["model"]: line["error"] for line in lines if "error" in line}
    for line in lines:
        if "seconds" in line:
            graph, plan = Graph.from_json(line["graph"]), Plan.from_json(line["plan"])
            timings.append(Timing(line["model"], "data", step_features(graph, plan, bare), line["seconds"]))
    rows = [[t.model, t.side, round(t.seconds, 7), {k: v for k, v in t.features.items() if v}] for t in timings]
    profile = {**cluster.profile, "trials": {**cluster.profile.get("trials", {}), section: rows}}
    if failed:
        profile["failed"] = {**profile.get("failed", {}), **failed}
    slow = {line["model"] for line in lines if line.get("host_alone_s", 0.0) > BUSY * line.get("seconds", 1.0)}
    timings = [t for t in timings if t.model not in slow]
    if len(timings) >= LEAST_MODELS:
        profile["calibration"] = {**cluster.profile.get("calibration", {}), section: fit(timings, quiet=True).to_json()}
    return cluster.with_profile(profile)


if __name__ == "__main__":
    run_trials(Path(sys.argv[1]), float(sys.argv[2]))

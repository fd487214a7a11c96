"""What does it cost to make every block of a GPT again in backward, and how much memory does it save?

    python bench/recompute.py [--rounds 10] [--calls 2]                 on the CPU
    python bench/recompute.py --device cuda [--rounds 12] [--calls 5]   on a GPU, against torch.utils.checkpoint

On the CPU: GPT of 10.9M parameters (`examples/gpt.py:small`), float32, AdamW, one process; a job with a plan that
keeps everything and one with `recompute="blocks.*"`. Seconds of the clock, and of the processor, which other
processes on a busy machine disturb less. Losses and weights must be equal to the bit. Memory is what a
step holds besides inputs and weights at most, counted storage by storage (`tests/support/memory_meter.py`), against
the prediction; activations are that without gradients.

On a GPU: GPT-2 medium as in `bench/gpu.py`, bfloat16 autocast, fused AdamW. Sides: `checkpoint`, torch.compile around a
model whose blocks are checkpointed (`use_reentrant=False`); `laminar`, a job with `recompute="blocks.*"`; `kept`, a job
that leaves the choice to the cut of compiled steps. Memory is `reserved`, each side alone in a process of its own.

Targets: CPU, with over without at most 1.36 in time, activations within 5 % of the prediction. GPU, laminar over
checkpoint at most 1.03 in time and in memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import paired, ratio, report
from gpu import autocast, gpt, sync
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laminar
from laminar.api import inputs_of, load_recipe
from laminar.cost.memory.peak import memory
from laminar.lower.kernels import kernels
from laminar.lower.memory.mincut_recompute import recompute, written_out
from laminar.runtime.check.one_device import constants_of

ROOT = Path(__file__).parent.parent
ALONE = laminar.Mesh({"dp": 1})
PATTERNS = {"with": "blocks.*", "without": (), "laminar": "blocks.*", "kept": ()}
SIDES = ("checkpoint", "laminar", "kept")


def job_of(model: nn.Module, loss: Any, make: Any, batch: Any, name: str, **options: Any) -> Any:
    """A job of one rank whose plan recomputes blocks, or none."""
    plan = partial(_plan, patterns=PATTERNS[name])
    return laminar.parallelize(model, loss, make, batch=batch, plan=plan, mesh=ALONE, **options)


def _plan(graph: Any, mesh: Any, patterns: Any) -> Any:
    return laminar.plans.data_parallel(graph, mesh, recompute=patterns)


# --- CPU


def held_bytes(recipe: Any, batch: Any) -> dict[str, dict[str, float]]:
    """Bytes of a step at most, measured and predicted, with recompute and without."""
    sys.path.insert(0, str(ROOT))
    from tests.support.memory_meter import held

    torch.manual_seed(0)
    model = recipe.model()
    graph = laminar.capture(model, recipe.loss, batch)
    inputs = {k: v.detach() for k, v in inputs_of(graph, model, batch).items()}
    out: dict[str, dict[str, float]] = {}
    for name in ("with", "without"):
        program = laminar.lower(graph, laminar.plans.data_parallel(graph, ALONE, recompute=PATTERNS[name]))
        found = memory(program, backend="null", optimizer=0)
        real = held(program, inputs, constants_of(graph), "null") - found.gradients
        told = found.peak_bytes - found.parameters - found.inputs - found.constants - found.gradients
        out[name] = {
            "activations_mb": round(real / 1e6, 2),
            "predicted_mb": round(told / 1e6, 2),
            "predicted_over_measured": round(told / real, 4),
        }
    return out


def on_cpu(rounds: int, calls: int, small: bool) -> dict[str, Any]:
    """Both plans in turns."""
    recipe = load_recipe(f"{ROOT}/examples/gpt.py:{'tiny' if small else 'small'}")
    batch = next(iter(recipe.data()))
    jobs = {}
    for name in ("with", "without"):
        torch.manual_seed(0)
        jobs[name] = job_of(recipe.model(), recipe.loss, recipe.optimizer, batch, name, device="cpu")
    said = {name: [job.step(batch).loss for _ in range(3)] for name, job in jobs.items()}
    weights = [job.state_dict() for job in jobs.values()]
    equal = said["with"] == said["without"] and all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    if not equal:
        raise SystemExit(f"not the same bits: {said}")
    spent: dict[str, list[float]] = {name: [] for name in jobs}

    def step(name: str) -> None:
        start = time.process_time()
        jobs[name].step(batch)
        spent[name].append(time.process_time() - start)

    times = paired({name: partial(step, name) for name in jobs}, rounds, calls)
    return {
        "with_over_without": ratio(times, "with", "without"),
        "cpu_with_over_without": ratio({n: t[2:] for n, t in spent.items()}, "with", "without"),
        "seconds": {n: round(sorted(t)[len(t) // 2], 4) for n, t in times.items()},
        "memory": held_bytes(recipe, batch),
        "same_bits": equal,
    }


# --- GPU


class Checkpointed(nn.Module):
    """A block that torch runs again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def side(name: str, device: str, small: bool) -> Callable[[], Any]:
    """One side's whole step: forward, backward, update."""
    model, loss, batch, make, _ = gpt(small)
    model, batch = model.to(device), {k: v.to(device) for k, v in batch.items()}
    if name != "checkpoint":
        job = job_of(model, loss, make, batch, name, precision="bf16", device=device, compile=True)
        return lambda: job.step(batch)
    model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    optimizer, forward = make(model.parameters()), torch.compile(autocast(loss, device))

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        out = forward(model, batch)
        out.backward()
        optimizer.step()
        return out.detach()

    return step


def alone(name: str, device: str, small: bool) -> dict[str, Any]:
    """Memory and first losses of one side that has the process to itself."""
    run = side(name, device, small)
    losses = [run() for _ in range(3)]
    sync(device)
    out: dict[str, Any] = {"losses": [round(float(getattr(x, "loss", x)), 4) for x in losses]}
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            run()
        sync(device)
        out["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 3)
    return out


def predicted_gb(name: str, small: bool) -> float:
    """What a step of a compiled job is expected to reserve."""
    model, loss, batch, _, _ = gpt(small)
    graph = laminar.capture(model, autocast(loss, "cpu"), batch)
    program = laminar.lower(graph, laminar.plans.data_parallel(graph, ALONE, recompute=PATTERNS[name]))
    program = recompute(written_out(program))
    return round(memory(program, allocator="cuda", groups=kernels(program)).reserved_bytes / 1e9, 3)


def on_gpu(device: str, rounds: int, calls: int, small: bool) -> dict[str, Any]:
    """Each side alone, for its memory; then all of them in turns, for their times."""
    found: dict[str, Any] = {}
    for name in SIDES:
        command = [sys.executable, __file__, "--device", device, "--alone", name, *(["--small"] if small else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
            raise SystemExit(f"{name} alone failed")
        found[name] = json.loads(done.stdout.strip().splitlines()[-1])
        if name != "checkpoint":
            found[name]["predicted_gb"] = predicted_gb(name, small)
    runs = {name: side(name, device, small) for name in SIDES}

    def several(run: Callable[[], Any]) -> Callable[[], Any]:
        def repeat() -> None:
            for _ in range(calls):
                run()
            sync(device)

        return repeat

    times = paired({n: several(r) for n, r in runs.items()}, rounds, 1)
    for name, t in times.items():
        found[name]["ms"] = round(sorted(t)[len(t) // 2] / calls * 1e3, 2)
    out = {f"{n}_over_checkpoint": ratio(times, n, "checkpoint") for n in SIDES[1:]}
    if device == "cuda":
        base = found["checkpoint"]["reserved_gb"]
        out |= {f"{n}_memory_over_checkpoint": round(found[n]["reserved_gb"] / base, 3) for n in SIDES[1:]}
    return {**out, "sides": found}


def main() -> None:
    """One line of results."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args.add_argument("--rounds", type=int, default=10)
    args.add_argument("--calls", type=int, default=2)
    args.add_argument("--small", action="store_true", help="a size for trying the benchmark itself; nothing is noted")
    args.add_argument("--sides", action="store_true", help="with --small, the GPU's sides on the CPU")
    args.add_argument("--alone", choices=SIDES)
    given = args.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --small --sides tries its sides on the CPU")
    if given.alone:
        print(json.dumps(alone(given.alone, given.device, given.small)))
        return
    if given.device == "cuda" or given.sides:
        result = on_gpu(given.device, given.rounds, given.calls, given.small)
    else:
        result = on_cpu(given.rounds, given.calls, given.small)
    result |= {"device": given.device, "rounds": given.rounds, "calls": given.calls}
    print(json.dumps(result)) if given.small else report("recompute", result)


if __name__ == "__main__":
    main()

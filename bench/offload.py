"""What does it cost to keep a GPT's activations in the host's memory, against making them again, and against neither?

    python bench/offload.py [--rounds 8] [--calls 3] [--sides kept recompute offload some]     on a GPU
    python bench/offload.py --small                                                            a dry run on the CPU

GPT-2 medium as in `bench/gpu.py` and `bench/recompute.py`: 355M parameters, 16 sequences of 1024 tokens, bfloat16
autocast, fused AdamW, one compiled job per side. `kept`: what the cut of compiled steps keeps stays on the device.
`recompute`: `recompute="blocks.*"`. `offload`: `offload="blocks.*"`. `some`: every eighth block is offloaded, so that a
copy has the compute of eight blocks to hide behind.

Memory is measured with each side alone in a process of its own: `reserved` and `allocated` at most, over steps behind
the first, the cache emptied before. Times are from rounds that alternate between sides in one process. Beside them what
`laminar.predict` says for this device: with the assumed rate of the link to the host, and with the rate measured here
(`link_gb_per_s`, pinned memory, 256 MB at a time, the slower of both ways).

`host_gb` is what is pinned. A step of `kept` and `recompute` is replayed as a CUDA graph, one that offloads is not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import paired, ratio, report
from gpu import autocast, gpt, sync

import laminar
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster, Figure
from laminar.runtime.code.host_copies import HostLink, link_of

ALONE = laminar.Mesh({"dp": 1})
SOME = r"blocks\.(0|8|16)"
SIDES: dict[str, dict[str, Any]] = {
    "kept": {},
    "recompute": {"recompute": "blocks.*"},
    "offload": {"offload": "blocks.*"},
    "some": {"offload": [SOME]},
}
LINK_BYTES = 256 << 20


def plan_of(graph: Any, mesh: Any, name: str) -> Any:
    """A side's plan."""
    return laminar.plans.data_parallel(graph, mesh, **SIDES[name])


def side(name: str, device: str, small: bool) -> Callable[[], Any]:
    """A side's whole step: forward, backward, update."""
    model, loss, batch, make, _ = gpt(small)
    model, batch = model.to(device), {k: v.to(device) for k, v in batch.items()}
    job = laminar.parallelize(
        model,
        loss,
        make,
        batch=batch,
        plan=partial(plan_of, name=name),
        mesh=ALONE,
        precision="bf16",
        device=device,
        compile=True,
    )
    return lambda: job.step(batch)


def alone(name: str, device: str, small: bool) -> dict[str, Any]:
    """Memory and first losses of one side that has the process to itself."""
    start = time.perf_counter()
    run = side(name, device, small)
    losses = [run() for _ in range(3)]
    sync(device)
    out: dict[str, Any] = {"losses": [round(float(getattr(x, "loss", x)), 4) for x in losses]}
    out["first_steps_s"] = round(time.perf_counter() - start, 1)
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    links = {link_of(torch.device(device)), link_of(where)}
    out["host_gb"] = round(sum(link.nbytes for link in links) / 1e9, 3)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            run()
        sync(device)
        out["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 3)
        out["allocated_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    return out


def link_rate(device: str) -> float:
    """Bytes a second between the device and pinned memory, the slower of both ways."""
    link = HostLink(torch.device(device))
    here = torch.zeros(LINK_BYTES if device == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    there = link.take(here)
    rates = []
    for pair in ((there, here), (here, there)):
        times = []
        for _ in range(6):
            sync(device)
            start = time.perf_counter()
            link.wait(link.copy([pair]))
            sync(device)
            times.append(time.perf_counter() - start)
        rates.append(here.numel() / sorted(times)[len(times) // 2])
    return min(rates)


def predictions(names: list[str], device: str, small: bool, rate: float) -> dict[str, dict[str, float]]:
    """Milliseconds and gigabytes of a step of each side, as predicted for this device."""
    cluster = Cluster.detect() if device == "cuda" else Cluster.preset("h200")
    near = replace(cluster, device=replace(cluster.device, host_bytes_per_s=Figure(rate, "measured", "this bench")))
    model, loss, batch, _, _ = gpt(small)
    graph = laminar.capture(model, autocast(loss, "cpu"), batch)
    del model
    out = {}
    for name in names:
        plan = plan_of(graph, ALONE, name)
        assumed, found = predict(graph, plan, cluster), predict(graph, plan, near)
        out[name] = {
            "predicted_assumed_link_ms": round(assumed.seconds * 1e3, 2),
            "predicted_ms": round(found.seconds * 1e3, 2),
            "predicted_allocated_gb": round(found.memory.peak_bytes / 1e9, 3),
            "predicted_reserved_gb": round(found.memory.reserved_bytes / 1e9, 3),
            "predicted_host_gb": round(found.memory.host_bytes / 1e9, 3),
        }
    return out


def compared(names: list[str], device: str, rounds: int, calls: int, small: bool) -> dict[str, Any]:
    """Each side alone, for its memory; then all of them in turns, for their times."""
    rate = link_rate(device)
    found: dict[str, Any] = {}
    for name in names:
        command = [sys.executable, __file__, "--device", device, "--alone", name, *(["--small"] if small else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
            raise SystemExit(f"{name} alone failed")
        found[name] = json.loads(done.stdout.strip().splitlines()[-1])
        print(name, found[name], file=sys.stderr, flush=True)
    for name, told in predictions(names, device, small, rate).items():
        found[name] |= told
    runs = {name: side(name, device, small) for name in names}

    def several(run: Callable[[], Any]) -> Callable[[], Any]:
        def repeat() -> None:
            for _ in range(calls):
                run()
            sync(device)

        return repeat

    times = paired({n: several(r) for n, r in runs.items()}, rounds, 1)
    for name, t in times.items():
        found[name]["ms"] = round(sorted(t)[len(t) // 2] / calls * 1e3, 2)
    out: dict[str, Any] = {f"{n}_over_{names[0]}": ratio(times, n, names[0]) for n in names[1:]}
    if device == "cuda":
        base = found[names[0]]["reserved_gb"]
        out |= {f"{n}_memory_over_{names[0]}": round(found[n]["reserved_gb"] / base, 3) for n in names[1:]}
    return {**out, "link_gb_per_s": round(rate / 1e9, 2), "sides": found}


def main() -> None:
    """One line of results."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    args.add_argument("--rounds", type=int, default=8)
    args.add_argument("--calls", type=int, default=3)
    args.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    args.add_argument("--small", action="store_true", help="a size for trying the benchmark itself; nothing is noted")
    args.add_argument("--alone", choices=list(SIDES))
    given = args.parse_args()
    device = given.device if torch.cuda.is_available() or not given.small else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --small tries the sides on the CPU")
    if given.alone:
        print(json.dumps(alone(given.alone, device, given.small)))
        return
    result = compared(given.sides, device, given.rounds, given.calls, given.small)
    result |= {"device": device, "rounds": given.rounds, "calls": given.calls}
    print(json.dumps(result)) if given.small else report("offload", result)


if __name__ == "__main__":
    main()

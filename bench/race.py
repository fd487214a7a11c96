"""A race: one model, our training step and a peer's, in the same processes, in paired rounds.

Before the clock starts, all sides train 3 steps on the same batches from the same weights; if their
losses part by more than 1e-3 of the loss there is no result. (Seen here: below 1e-6, but
1.3e-4 for the CNN split by sample. Its first gradients are those of one process in float32; that rectifiers at zero
and AdamW's nearly signed first steps make the rest is a guess.)
Then sides alternate, a barrier before each turn, and each pair of turns gives one ratio. The whole is
repeated in fresh processes, since where memory lands differs from one to the next.

Beside seconds stands the processor time of rank 0, its threads for communication included: on a machine that
others use too it moves less.

Memory is counted twice: bytes of parameters, gradients and optimizer state on rank 0, and the growth of
resident memory over an empty rank, at its peak within steps, in processes that run one side alone (memory that
ranks share counts by shares).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import paired, ratio, report
from models import MODELS, Case
from peers import Side

from laminar.runtime.comm.transport import join_process_group

AGREE = 1e-3
TURN_S = 0.5
"""How long one side's turn should last at least."""
Sides = dict[str, Callable[[Case], Side]]


def race(
    bench: str,
    shared: Sides,
    split: bool,
    target: float,
    doc: str,
    extra: dict[str, Sides] | None = None,
    models: Sequence[str] = (),
    known: Mapping[str, Callable[[int, bool, int], Case]] = MODELS,
) -> None:
    """Measure the models asked for; the side named `laminar` against each other one. One JSON line a model.

    `extra` are further sides for some models; `models` those of the `known` that there are sides for, if not all.
    """
    models = models or tuple(known)
    args = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--model", nargs="*", choices=list(models), default=list(models))
    args.add_argument("--ranks", type=int, default=2)
    args.add_argument("--rounds", type=int, default=12, help="pairs of turns in each repeat")
    args.add_argument("--repeats", type=int, default=3, help="how often to start afresh")
    args.add_argument("--shrink", type=int, default=1, help="divide the batch by this where every rank has all of it")
    args.add_argument("--no-peaks", action="store_true", help="leave out resident memory, which takes runs of its own")
    given = args.parse_args()
    for name in given.model:
        sides = {**shared, **(extra or {}).get(name, {})}
        load = os.getloadavg()[0]
        case = partial(known[name], given.ranks, split, given.shrink)
        runs = [_ranks(given.ranks, _timed, sides, case, given.rounds) for _ in range(given.repeats)]
        peaks = {
            side: None if given.no_peaks else _ranks(given.ranks, _peak, {side: make}, case)
            for side, make in sides.items()
        }
        first = runs[0]
        times, busy = ({side: [t for r in runs for t in r[what][side]] for side in sides} for what in ("times", "busy"))
        peers = [side for side in sides if side != "laminar"]
        report(
            bench,
            {
                "model": name,
                "ranks": given.ranks,
                "batch": len(next(iter(case().batches[0].values()))),
                **{f"{side}_over_laminar": ratio(times, side, "laminar") for side in peers},
                "target": target,
                **{f"{side}_over_laminar_cpu": ratio(busy, side, "laminar") for side in peers},
                "repeats": {side: [ratio(run["times"], side, "laminar")["median"] for run in runs] for side in peers},
                "ms": {side: round(statistics.median(ts) * 1e3, 2) for side, ts in times.items()},
                "cpu_ms": {side: round(statistics.median(ts) * 1e3, 2) for side, ts in busy.items()},
                "losses_of_3_steps": first["losses"],
                "bytes_on_rank_0": first["memory"],
                "resident_peak_bytes": peaks,
                "collectives": first["counts"],
                "parameters": first["parameters"],
                "load_before": round(load, 2),
            },
        )


def _timed(sides: Sides, make_case: Callable[[], Case], rounds: int) -> dict[str, Any]:
    """One repeat on this rank: agreement, then turns."""
    case = make_case()
    made = {side: make(case) for side, make in sides.items()}
    losses = {side: [s.loss(s.step(i)) for i in range(3)] for side, s in made.items()}
    want = losses["laminar"]
    for side, got in losses.items():
        apart = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
        if made[side].same and not apart <= AGREE:
            raise SystemExit(f"losses of {side} and laminar part by {apart:.1e}: {got} and {want}")
    dist.barrier()
    start = time.perf_counter()
    for s in made.values():
        s.step(3)
    each = torch.tensor((time.perf_counter() - start) / len(made))
    dist.broadcast(each, 0)
    calls = max(1, round(TURN_S / float(each)))

    busy: dict[str, list[float]] = {side: [] for side in made}

    def turn(side: str) -> Callable[[], None]:
        def go() -> None:
            dist.barrier()
            start = time.process_time()
            for i in range(calls):
                made[side].step(i)
            busy[side].append((time.process_time() - start) / calls)
            dist.barrier()

        return go

    times = paired({side: turn(side) for side in made}, rounds, 1)
    return {
        "times": {side: [t / calls for t in ts] for side, ts in times.items()},
        "busy": {side: ts[-rounds:] for side, ts in busy.items()},
        "losses": {side: [round(x, 7) for x in xs] for side, xs in losses.items()},
        "memory": {side: s.memory() for side, s in made.items()},
        "counts": made["laminar"].counts,
        "parameters": sum(p.numel() for p in case.model().parameters()),
    }


def _peak(sides: Sides, make_case: Callable[[], Case]) -> int | None:
    """Peak growth of resident memory within steps, over a rank that has its batches and nothing else."""
    case = make_case()
    empty = _bytes("smaps_rollup", "Pss")
    ((_, make),) = sides.items()
    side = make(case)
    for i in range(3):
        side.step(i)
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    except OSError:
        return None
    for i in range(3):
        side.step(i)
    others = _bytes("smaps_rollup", "Rss") - _bytes("smaps_rollup", "Pss")
    return _bytes("status", "VmHWM") - others - empty


def _bytes(file: str, what: str) -> int:
    """One figure of the system's about this process."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def _ranks(ranks: int, job: Callable[..., Any], *args: Any) -> Any:
    """What rank 0 of fresh processes gives back."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        each = [context.Process(target=_child, args=(r, ranks, folder, job, args)) for r in range(ranks)]
        for child in each:
            child.start()
        while any(c.is_alive() for c in each):
            if any(c.exitcode for c in each):
                for child in each:
                    child.terminate()
            time.sleep(0.05)
        if not Path(folder, "result").exists() or any(c.exitcode for c in each):
            raise SystemExit("a rank failed")
        return pickle.loads(Path(folder, "result").read_bytes())


def _child(rank: int, ranks: int, folder: str, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join_process_group(rank, ranks, f"{folder}/rendezvous")
    result = job(*args)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    os._exit(0)  # nothing is left to do, and thread pools have been seen to abort on the way out

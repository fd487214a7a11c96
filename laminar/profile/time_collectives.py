"""Times of exchanges: real ones, through the code that steps run, on ranks that are already joined.

Every kind of collective, through shared memory and through Gloo's sockets (or NCCL), from a few hundred bytes to
tens of megabytes. Between two of them a rank reads through memory and then through what it is about to give away, as in
a step, where others have used the caches but the tensor was just made.

A row of the profile is `{"backend", "kind", "ranks", "bytes", "seconds", "spread", "threads"}`;
`bytes` is the whole tensor: what a rank holds before a reduction or after a gather. `resident` rows are reductions of
gradient buckets, whose terms lie where the others can read them. `ddp_all_reduce` is plain
`dist.all_reduce` of one buffer, which is how PyTorch's own data parallelism does it.

Overlap: how much a transfer in the background slows a loop of products, and the loop the transfer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from laminar.capture.ops.torch_ops import DTYPES
from laminar.ir.mesh import Mesh
from laminar.ir.program import Program
from laminar.ir.sbp import PSUM, B, S
from laminar.ir.tensor import TensorSpec
from laminar.lower.boxing.reshard import moves
from laminar.profile.time_op import LEAST_ROUNDS, More, TimedCall, Timer
from laminar.runtime.comm.transport import Groups

TIMED_KINDS: dict[str, Any] = {
    "all_reduce": (PSUM, B),
    "all_gather": (S(0), B),
    "reduce_scatter": (PSUM, S(0)),
    "all_to_all": (S(0), S(1)),
}
EXCHANGE_SIZES = (1 << 16, 1 << 20, 1 << 23, 1 << 12, 1 << 18, 1 << 22, 1 << 8, 1 << 14, 1 << 25, 1 << 21)
"""Bytes, most needed first."""
OTHERS_BYTES = 16 << 20
"""What is read between two exchanges. Assumed: about what a small model's step touches in between."""
AT_MOST_S = 4.0
"""A size is left out if, by the largest so far, its few repeats would take longer than this."""


def program_of(kind: str, nbytes: int, ranks: int) -> Program:
    """A program that is one collective over a tensor of about `nbytes`, cut evenly."""
    columns = 8 * ranks
    rows = max(1, nbytes // (4 * columns * ranks)) * ranks
    source, wanted = TIMED_KINDS[kind]
    spec = TensorSpec((rows, columns), "f32")
    return moves(Mesh({"all": ranks}), [("x", spec, (source,), (wanted,))], "measuring")


def run_of(program: Program, groups: Groups, resident: bool) -> tuple[TimedCall, torch.Tensor | None]:
    """The exchange, ready to be made again and again, and what it gives away if that was just made.

    Every rank must make it.
    """
    (instr,) = program.collectives
    if not resident:
        program = replace(program, outputs=())  # nothing leaves, so no bucket
    groups.prepare(program, in_order=True)
    placed = instr.ins[0]
    shape, dtype = placed.local(groups.mesh, groups.rank).shape, DTYPES[placed.spec.dtype]
    if resident:
        bucket = groups.bucket(instr, [shape], dtype)
        bucket.flat.zero_()
        exchange = groups.exchange(instr, groups.rank, False, bucket, [])
        return lambda: exchange.finish(exchange.start()), None
    exchange = groups.exchange(instr, groups.rank, False, None, [])
    x = torch.zeros(shape, dtype=dtype, device=groups.device)
    return lambda: exchange.finish(exchange.start(x)), x


def exchange_cases(ways: tuple[str, ...]) -> Iterator[tuple[str, str, bool, int]]:
    """(backend, kind, resident, bytes), most needed first."""
    for nbytes in EXCHANGE_SIZES:
        for way in ways:
            for kind in TIMED_KINDS:
                if way == "shared" and kind == "all_to_all":
                    continue  # it goes through Gloo there too
                yield way, kind, False, nbytes
            if way == "shared":
                yield way, "all_reduce", True, nbytes
            else:
                yield way, "ddp_all_reduce", False, nbytes


def measure_exchanges(
    device: torch.device, threads: int, until: float, more: More, go: More, limit_s: float = 0.12
) -> Iterator[dict[str, Any]]:
    """Rows of this rank, as they are measured; all ranks must call this together. `go` agrees whether time is left."""
    ranks = dist.get_world_size()
    mesh = Mesh({"all": ranks})
    ways = ("shared", "gloo") if device.type == "cpu" else ("nccl",)
    groups = {way: Groups(mesh, device, share=way == "shared") for way in ways}
    timer = Timer(limit_s=limit_s, more=more)
    others = torch.zeros(OTHERS_BYTES // 4 if device.type == "cpu" else 0)
    slow: dict[tuple[str, str, bool], tuple[int, float]] = {}
    for way, kind, resident, nbytes in exchange_cases(ways):
        if not go(time.monotonic() < until):
            return
        size, taken = slow.get((way, kind, resident), (nbytes, 0.0))
        if not go(taken * nbytes / size < AT_MOST_S):
            continue
        run, given, held = _run(kind, nbytes, groups[way], resident)
        run = run if device.type == "cpu" else partial(_waiting, run)
        dist.barrier()
        began = time.monotonic()
        entry = timer([run], partial(_step_between, others, given) if device.type == "cpu" else None)
        taken = (time.monotonic() - began) if entry.seconds * LEAST_ROUNDS > limit_s else 0.0
        slow[way, kind, resident] = max(slow.get((way, kind, resident), (0, 0.0)), (nbytes, taken))
        yield {
            "backend": way,
            "kind": kind,
            "ranks": ranks,
            "bytes": held,
            "seconds": entry.seconds,
            "spread": round(entry.spread, 5),
            "threads": threads,
            **({"resident": True} if resident else {}),
        }


def _run(kind: str, nbytes: int, groups: Groups, resident: bool) -> tuple[TimedCall, torch.Tensor | None, int]:
    if kind == "ddp_all_reduce":
        flat = torch.zeros(max(1, nbytes // 4), device=groups.device)
        return partial(dist.all_reduce, flat), None, flat.numel() * 4
    program = program_of(kind, nbytes, groups.mesh.ranks)
    return *run_of(program, groups, resident), program.inputs[0].placed.spec.nbytes


def _step_between(others: torch.Tensor, given: torch.Tensor | None) -> None:
    """What happens between two exchanges of a step, as far as caches are concerned."""
    others.sum()
    if given is not None:
        given.sum()


def _waiting(run: TimedCall) -> None:
    run()
    torch.cuda.synchronize()


def measure_overlap(device: torch.device, nbytes: int = 1 << 24, rounds: int = 5) -> dict[str, Any]:
    """Speed left to a loop of products while an all-reduce runs in the background, and to the all-reduce."""
    gpu = device.type == "cuda"
    n = 1024 if gpu else 192
    a, b, out = (torch.full((n, n), 0.01, device=device) for _ in range(3))
    flat = torch.zeros(nbytes // 4, device=device)

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize()

    def products(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(a, b, out=out)
        wait()
        return (time.perf_counter() - began) / count

    def transfer() -> float:
        began = time.perf_counter()
        dist.all_reduce(flat)
        wait()
        return time.perf_counter() - began

    products(20), transfer()
    compute, alone, beside = [], [], []
    for _ in range(rounds):
        dist.barrier()
        compute.append(products(40))
        dist.barrier()
        alone.append(transfer())
    one, whole = statistics.median(compute), statistics.median(alone)
    left = []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        made = 0
        while not work.is_completed():
            torch.mm(a, b, out=out)
            made += 1
            if gpu and made % 16 == 0:
                torch.cuda.current_stream().synchronize()
        took = time.perf_counter() - began
        work.wait()
        left.append(made * one / took)
        beside.append(took)
    return {
        "backend": dist.get_backend(),
        "ranks": dist.get_world_size(),
        "bytes": nbytes,
        "compute_left": min(1.0, max(0.05, statistics.median(left))),
        "transfer_left": min(1.0, max(0.05, whole / statistics.median(beside))),
    }

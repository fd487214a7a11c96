"""Functions and programs on real processes of this machine: one per rank, joined by Gloo.

Each child joins the others, calls what it was given and writes what that returns into a file. A child
that dies takes the others down, and its traceback is what the caller sees.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laminar.errors import LaminarError
from laminar.ir.program import Program
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.transport import Groups, join_process_group


def on_ranks(
    world: int,
    call: Callable[..., Any],
    *args: Any,
    threads: int = 1,
    timeout_s: float = 240.0,
    waiting: Callable[[], None] | None = None,
) -> list[Any]:
    """What `call(*args)` returns on each rank of a new process group; `call` must be importable by name.

    `waiting` is called again and again until they are done, to show how far they are.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="laminar-") as folder:
        at = Path(folder)
        (at / "call").write_bytes(pickle.dumps((call, args)))
        children = [context.Process(target=_child, args=(r, world, folder, threads)) for r in range(world)]
        for child in children:
            child.start()
        stop = time.monotonic() + timeout_s
        try:
            while any(c.is_alive() for c in children):
                failed = [r for r, c in enumerate(children) if not c.is_alive() and c.exitcode]
                if failed or time.monotonic() > stop:
                    break
                if waiting is not None:
                    waiting()
                time.sleep(0.02)
        finally:
            for child in children:
                if child.is_alive():
                    child.terminate()
                child.join(10)
        # The first to fail is the cause; those that waited for it fail because of it.
        errors = sorted(at.glob("error*"), key=lambda path: path.stat().st_mtime_ns)
        if errors:
            raise LaminarError(f"rank {errors[0].name[5:]} failed", traceback="\n" + errors[0].read_text())
        died = [(r, c.exitcode) for r, c in enumerate(children) if c.exitcode and c.exitcode != -signal.SIGTERM]
        if died:
            raise LaminarError(f"rank {died[0][0]} died with exit code {died[0][1]}, without a word")
        if len(list(at.glob("out*"))) != world:
            raise LaminarError(f"{world} ranks did not finish within {timeout_s:.0f} s")
        return [torch.load(at / f"out{r}", weights_only=False) for r in range(world)]  # our own children wrote it


def _child(rank: int, world: int, folder: str, threads: int) -> None:
    at = Path(folder)
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(threads)
        join_process_group(rank, world, str(at / "rendezvous"))
        call, args = pickle.loads((at / "call").read_bytes())
        out = call(*args)
        torch.save(out, at / f"part{rank}")
        (at / f"part{rank}").rename(at / f"out{rank}")
        torch.distributed.barrier()  # nobody hangs up while another still listens
        torch.distributed.destroy_process_group()
    except BaseException:
        (at / f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)
    # Everything is on disk. Torch's thread pools sometimes abort while an interpreter is taken down
    # (seen after convolutions: "terminate called without an active exception"), so there is no such end.
    os._exit(0)


def run_processes(
    program: Program,
    inputs: Mapping[str, Tensor],
    constants: Mapping[str, Tensor] | None = None,
    device: str = "cpu",
    timeout_s: float = 240.0,
) -> list[dict[str, Tensor]]:
    """Outputs of every rank by `kind:name`, from whole inputs."""
    whole = {k: v.detach().contiguous() for k, v in inputs.items()}
    return on_ranks(program.mesh.ranks, _run, program, whole, dict(constants or {}), device, timeout_s=timeout_s)


def _run(program: Program, inputs: dict[str, Tensor], constants: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    transport = Groups(program.mesh, device)
    step = EagerStep(program, transport, constants)
    rank = transport.rank
    local = [shard(inputs[i.name], i.placed.nd, program.mesh, rank).to(device) for i in program.inputs]
    step(*local)  # twice: what one step leaves behind must not change the next
    out = step(*local)
    return {f"{o.kind}:{o.name}": t.cpu().clone() for o, t in zip(program.outputs, out, strict=True)}

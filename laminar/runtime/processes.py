"""Programs on real processes of this machine: one per rank, joined by Gloo.

Each child loads the program and the whole inputs from a file, shards them for itself, runs the
compiled step and writes its outputs. A child that dies takes the others down, and its traceback is
what the caller sees.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from laminar.errors import LaminarError
from laminar.ir.program import Program
from laminar.runtime.module import Step
from laminar.runtime.shards import shard
from laminar.runtime.transport import Groups, join


def _child(rank: int, world: int, folder: str, device: str) -> None:
    at = Path(folder)
    try:
        torch.set_num_threads(1)
        join(rank, world, str(at / "rendezvous"))
        program: Program = pickle.loads((at / "program").read_bytes())
        inputs, constants = torch.load(at / "inputs", weights_only=True)
        transport = Groups(program.mesh, device)
        step = Step(program, transport, constants)
        local = [shard(inputs[i.name], i.placed.nd, program.mesh, rank).to(device) for i in program.inputs]
        step(*local)  # twice: what one step leaves behind must not change the next
        out = step(*local)
        named = {f"{o.kind}:{o.name}": t.cpu().clone() for o, t in zip(program.outputs, out, strict=True)}
        torch.save(named, at / f"out{rank}")
        torch.distributed.barrier()  # nobody hangs up while another still listens
        torch.distributed.destroy_process_group()
    except BaseException:
        (at / f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)
    # Everything is on disk. Torch's thread pools sometimes abort while an interpreter is taken down
    # (seen after convolutions: "terminate called without an active exception"), so there is no such end.
    os._exit(0)


def run_processes(
    program: Program, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor] | None = None, device: str = "cpu",
    timeout_s: float = 240.0,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Outputs of every rank by `kind:name`, from whole inputs."""
    world = program.mesh.ranks
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="laminar-") as folder:
        at = Path(folder)
        (at / "program").write_bytes(pickle.dumps(program))
        torch.save((({k: v.detach().contiguous() for k, v in inputs.items()}), dict(constants or {})), at / "inputs")
        children = [context.Process(target=_child, args=(r, world, folder, device), daemon=True) for r in range(world)]
        for child in children:
            child.start()
        stop = time.monotonic() + timeout_s
        try:
            while any(c.is_alive() for c in children):
                failed = [r for r, c in enumerate(children) if not c.is_alive() and c.exitcode]
                if failed or time.monotonic() > stop:
                    break
                time.sleep(0.02)
        finally:
            for child in children:
                if child.is_alive() and (time.monotonic() > stop or any(c.exitcode for c in children)):
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
        return [torch.load(at / f"out{r}", weights_only=True) for r in range(world)]

"""Exchanges of CPU ranks: through shared memory, and by sends and receives, give what Gloo's collectives give.

Both ways depend on sizes: what is small is packed or goes through another ring, what is large is
halved or sent alone. Limits are lowered here so that tiny tensors take every path; three ranks cut
dims unevenly. Steps run several times on changing inputs, so that an area that is used again too early
would show. Not covered: more than one machine, where there is no shared memory.
"""

from __future__ import annotations

import os
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import laminar
from laminar import B, Mesh, S
from laminar.errors import LaminarError
from laminar.ir.clusters import limits
from laminar.ir.program import Boxing, Instr, Placed, Program, ProgramInput, ProgramOutput
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.runtime.check.in_process import lockstep
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm import p2p_collectives, shm_arena
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.transport import Groups, join_process_group
from tests.support.rank_pool import CONTEXT
from tests.support.zoo import specimen

PLANS: dict[str, Any] = {
    "data": lambda g: laminar.plans.data_parallel(g, Mesh({"dp": 3})),
    "zero": lambda g: laminar.plans.zero(g, Mesh({"dp": 3}), stage=3),
    "tensor": lambda g: laminar.plans.tensor_parallel(g, Mesh({"tp": 3})),
}
STEPS = 4


def spawned(job: Any, ranks: int, folder: Path, *args: Any) -> list[int | None]:
    """Exit codes of `job(rank, ranks, folder, ...)` in fresh processes."""
    each = [CONTEXT.Process(target=job, args=(r, ranks, str(folder), *args), daemon=True) for r in range(ranks)]
    for child in each:
        child.start()
    for child in each:
        child.join(200)
    return [child.exitcode for child in each]


def inputs(program: Program, whole: dict[str, Any], step: int) -> dict[str, torch.Tensor]:
    """Whole inputs of one step: floating ones scaled, so that no two steps are alike."""
    every = {i.name: whole[i.name].detach() for i in program.inputs}
    return {n: t * (1 + step / 4) if t.is_floating_point() else t for n, t in every.items()}


def run_steps(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    limits.DIRECT_BYTES, limits.SMALL_RING_BYTES = 256, 256
    join_process_group(rank, ranks, f"{folder}/rendezvous")
    cases = pickle.loads(Path(folder, "cases").read_bytes())
    out = {}
    for way in (True, False):
        for name, (program, whole, constants) in cases.items():
            transport = Groups(program.mesh, share=way)
            step = EagerStep(program, transport, constants)
            assert bool(transport._arenas) is way, "shared memory is there exactly where it is asked for"
            for k in range(STEPS):
                given = inputs(program, whole, k)
                local = [shard(given[i.name], i.placed.nd, program.mesh, rank) for i in program.inputs]
                out[way, name, k] = [t.clone() for t in step(*local)]
    torch.save(out, f"{folder}/out{rank}")
    dist.barrier()
    os._exit(0)


def test_both_ways_equal_lock_step(tmp_path: Path) -> None:
    """Every output of every rank, four steps in a row, for plans that use every kind of collective."""
    one = specimen("gpt.py:tiny", "f64")
    cases = {}
    for name, make in PLANS.items():
        plan = replace(make(specimen("gpt.py:tiny").graph), graph_hash=one.graph.hash)
        cases[name] = (laminar.lower(one.graph, plan), dict(one.inputs), dict(one.constants))
    kinds = {i.kind for program, _, _ in cases.values() for i in program.collectives}
    assert kinds >= {"all_reduce", "all_gather", "reduce_scatter"}
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    assert spawned(run_steps, 3, tmp_path) == [0, 0, 0]
    got = [torch.load(tmp_path / f"out{r}") for r in range(3)]
    for name, (program, whole, _) in cases.items():
        for k in range(STEPS):
            want = lockstep.run_lockstep(program, inputs(program, whole, k), one.constants)
            for r in range(3):
                for way in (True, False):
                    for o, x in zip(program.outputs, got[r][way, name, k], strict=True):
                        torch.testing.assert_close(x, want[r][f"{o.kind}:{o.name}"], rtol=1e-9, atol=1e-11)


# --- a rank that dies --------------------------------------------------------------------------


def one_dies(rank: int, ranks: int, folder: str) -> None:
    join_process_group(rank, ranks, f"{folder}/rendezvous")
    wants = shm_arena.ArenaNeeds()
    wants.transient(64)
    shared = shm_arena.ShmArena.open(dist.group.WORLD, range(ranks), rank, wants, timeout_s=200.0)
    assert shared is not None
    if rank == 1:
        os._exit(3)
    began = time.monotonic()
    try:
        shared.wait(0, 1)
    except LaminarError as error:
        assert "has died" in str(error)
        os._exit(0 if time.monotonic() - began < 100 else 4)
    os._exit(5)


def test_who_waits_for_a_dead_rank_is_told(tmp_path: Path) -> None:
    """Without a connection that breaks, somebody has to look."""
    assert spawned(one_dies, 2, tmp_path) == [0, 3]


def never_told(rank: int, ranks: int, folder: str) -> None:
    join_process_group(rank, ranks, f"{folder}/rendezvous")
    wants = shm_arena.ArenaNeeds()
    wants.transient(64)
    shared = shm_arena.ShmArena.open(dist.group.WORLD, range(ranks), rank, wants, timeout_s=0.5)
    assert shared is not None
    if rank == 0:
        try:
            shared.wait(0, 1)
        except LaminarError as error:
            Path(folder, "error").write_text(str(error))
    dist.barrier()
    os._exit(0)


def test_a_wait_ends(tmp_path: Path) -> None:
    """A rank that lives but never comes is an error once the time limit is over."""
    assert spawned(never_told, 2, tmp_path) == [0, 0]
    assert "waited" in (tmp_path / "error").read_text()


# --- memory of gathers -------------------------------------------------------------------------


def gathered(*tail: Instr, out: str) -> Program:
    """Two gathers of parameters, and what is done with them."""
    mesh, spec = Mesh({"dp": 2}), TensorSpec((4, 4), "f32")
    piece, whole = Placed(spec, (S(0),)), Placed(spec, (B,))

    def gather(name: str, of: str) -> Instr:
        ref = Ref(of)
        over = Boxing((0,), ((0, 1),), ((0, 1),))
        return Instr(name, "box.all_gather", (ref,), (ref,), (piece,), (whole,), boxing=over)

    first, *rest = tail
    instrs = (gather("ga", "a"), first, gather("gb", "b"), *rest)
    given = tuple(ProgramInput(n, "param", piece) for n in ("a", "b"))
    return Program(mesh, given, (), instrs, (ProgramOutput("y", "metric", Ref(out), whole),), "", "")


def op(name: str, what: str, *refs: str) -> Instr:
    whole = Placed(TensorSpec((4, 4), "f32"), (B,))
    every = tuple(map(Ref, refs))
    return Instr(name, what, every, every, (whole,) * len(refs), (whole,))


def test_memory_is_taken_over_behind_the_last_reader() -> None:
    """The second gather may lie where the first lay, because its only reader has run."""
    program = gathered(op("x", "aten.mm", "ga", "ga"), op("y", "aten.mm", "x", "gb"), out="y")
    assert p2p_collectives.lives(program) == {"ga": (0, 1), "gb": (2, 3)}
    given = p2p_collectives.GatherBuffers().assign([("ga", 64, 0, 1), ("gb", 64, 2, 3)])
    assert given["ga"].data_ptr() == given["gb"].data_ptr()


def test_who_reads_a_view_reads_the_gather() -> None:
    """A transposed weight is the weight."""
    program = gathered(op("t", "aten.t", "ga"), op("y", "aten.mm", "t", "gb"), out="y")
    assert p2p_collectives.lives(program) == {"ga": (0, 3), "gb": (2, 3)}
    given = p2p_collectives.GatherBuffers().assign([("ga", 64, 0, 3), ("gb", 64, 2, 3)])
    assert given["ga"].data_ptr() != given["gb"].data_ptr()


@pytest.mark.parametrize("out", ["ga", "t"])
def test_what_leaves_the_program_keeps_its_memory(out: str) -> None:
    """An output must survive the next step's gathers, be it the gather itself or a view of it."""
    program = gathered(op("t", "aten.t", "ga"), op("y", "aten.mm", "t", "gb"), out=out)
    assert set(p2p_collectives.lives(program)) == {"gb"}

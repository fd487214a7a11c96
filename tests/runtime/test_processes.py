"""The same program on real processes: generated code, Gloo between them, the same numbers.

Lock-step tests see every rank but run none of the transports: buckets that gradients are written
into, collectives in flight, padded gathers. Here each rank is a process. Steps are run twice by every
rank, so what one leaves behind in a buffer would show in the other. DTensor, which does the same moves
by other code, is the oracle for boxing. Not covered: NCCL, more than one machine.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laminar
from laminar import B, Mesh, P, S
from laminar.errors import LaminarError
from laminar.ir.mesh import Mesh as MeshType
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Instr, MoveCause, Placed, Program, ProgramInput, ProgramOutput
from laminar.ir.sbp import NdSbp, Partial, Split, show
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.lower.boxing.boxing_lines import boxing_line
from laminar.placement.random_plan import random_plan
from laminar.rules.boxing.boxing import boxing
from laminar.runtime.check.processes import run_processes
from laminar.runtime.check.verify import verify_program
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.transport import Groups, join_process_group
from tests.support.rank_pool import CONTEXT
from tests.support.zoo import specimen

SEQUENCE = {
    r"blocks\.\d+\.attention\.qkv\.(weight|bias)": {"tp": S(0, blocks=3)},
    r"blocks\.\d+\.attention\.out\.weight": {"tp": S(1)},
    r"blocks\.\d+\.mlp\.up\.(weight|bias)": {"tp": S(0)},
    r"blocks\.\d+\.mlp\.down\.weight": {"tp": S(1)},
    r"(embed|head)\.weight": {"tp": S(0)},
    "batch.*": {"tp": S(1)},
}
PLANS: dict[str, tuple[str, Callable[[Any], Plan]]] = {
    "gpt, data parallel on 2": ("gpt.py:tiny", lambda g: laminar.plans.data_parallel(g, Mesh({"dp": 2}))),
    "resnet, ZeRO on 2": ("resnet.py:tiny", lambda g: laminar.plans.zero(g, Mesh({"dp": 2}))),
    "bert, tensor parallel on 2": ("bert.py:tiny", lambda g: laminar.plans.tensor_parallel(g, Mesh({"tp": 2}))),
    "gpt, tokens, weights and 61 words on 4": (
        "gpt.py:tiny",
        lambda g: laminar.plans.seeded(g, Mesh({"tp": 4}), SEQUENCE),
    ),
    "moe, data and tensor parallel on 2x2": (
        "moe.py:tiny",
        lambda g: laminar.plans.tensor_parallel(g, Mesh({"dp": 2, "tp": 2})),
    ),
    "gpt, a random plan on 2x2": ("gpt.py:tiny", lambda g: random_plan(g, Mesh({"a": 2, "b": 2}), 7)),
}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("what", PLANS)
def test_processes_equal_one_device(what: str) -> None:
    """Loss, gradients and buffers within 1e-9 in float64, dropout and batch statistics included."""
    name, make = PLANS[what]
    one = specimen(name)
    report = verify_program(one.graph, make(one.graph), [one.inputs], ranks="processes")
    assert report.ok, str(report)
    assert report.checked == len(one.graph.outputs)


# --- a rank that fails -------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
def test_a_program_that_fails_everywhere_shows_its_traceback() -> None:
    """The line of generated code and torch's own words."""
    one = specimen("mlp.py:tiny")
    program = laminar.lower(one.graph, laminar.plans.data_parallel(one.graph, Mesh({"dp": 2})))
    at = next(k for k, i in enumerate(program.instrs) if i.op in ("aten.mm", "aten.addmm"))
    instrs = list(program.instrs)
    x = instrs[at].args[1 if instrs[at].op == "aten.addmm" else 0]
    instrs[at] = replace(instrs[at], op="aten.mm", args=(x, x), refs=(x, x), ins=instrs[at].ins[-2:])
    with pytest.raises(LaminarError, match=r"rank \d failed") as caught:
        run_processes(replace(program, instrs=tuple(instrs)), one.inputs, one.constants)
    assert "Traceback" in str(caught.value) and "mat1 and mat2" in str(caught.value)


@pytest.mark.usefixtures("forked")
def test_the_rank_that_raises_is_heard_first() -> None:
    """Three sit in a collective and would for minutes; the caller sees the traceback of the fourth, and not theirs."""
    spec, mesh = TensorSpec((7, 7), "f64"), Mesh({"a": 4})
    program = one_step_program(spec, (S(0),), (B,), mesh)
    (gather,) = program.instrs
    # Rows lie as 2, 2, 2, 1. Multiplying from the left by a 2x2 matrix works for all ranks but the last.
    two, held = Placed(TensorSpec((2, 2), "f64"), (B,)), Placed(spec, (S(0),))
    product = Instr("y", "aten.mm", (Ref("two"), Ref("x")), (Ref("two"), Ref("x")), (two, held), (held,))
    broken = replace(
        program,
        inputs=(*program.inputs, ProgramInput("two", "batch", two)),
        instrs=(product, replace(gather, args=(Ref("y"),), refs=(Ref("y"),))),
    )
    inputs = {"x": torch.ones(7, 7, dtype=torch.float64), "two": torch.eye(2, dtype=torch.float64)}
    with pytest.raises(LaminarError, match="rank 3 failed") as caught:
        run_processes(broken, inputs)
    assert "mat1 and mat2 shapes cannot be multiplied (2x2 and 1x7)" in str(caught.value)


def test_a_mesh_must_be_as_large_as_the_world() -> None:
    """Without a process group nothing hangs: it is refused."""
    with pytest.raises(LaminarError, match="no process group"):
        Groups(Mesh({"dp": 2}))


# --- DTensor as oracle -------------------------------------------------------------------------

SHAPES = ((8, 4), (5, 6))
SIZES = ((4,), (2, 2))


def one_step_program(spec: TensorSpec, src: NdSbp, dst: NdSbp, mesh: MeshType) -> Program:
    """A program that boxes one tensor."""
    instrs, now = [], Ref("x")
    for i, step in enumerate(boxing(spec, src, dst, mesh.sizes)):
        instrs.append(boxing_line(f"b{i}", now, spec, step, mesh.sizes, MoveCause("a test")))
        now = Ref(f"b{i}")
    given = (ProgramInput("x", "batch", Placed(spec, src)),)
    return Program(mesh, given, (), tuple(instrs), (ProgramOutput("y", "metric", now, Placed(spec, dst)),), "", "")


def cases() -> list[tuple[tuple[int, ...], tuple[int, ...], NdSbp, NdSbp]]:
    """Mesh, shape, source and target: every pair on one axis, a regular sample on two.

    No target is partial: DTensor keeps that to itself.
    """
    one = [B, S(0), S(1), P()]
    out: list[Any] = []
    for sizes, shape in itertools.product(SIZES, SHAPES):
        every = list(itertools.product(one, repeat=len(sizes)))
        pairs = [(a, b) for a, b in itertools.product(every, every) if a != b and P() not in b]
        out += [(sizes, shape, a, b) for a, b in pairs[:: 1 if len(sizes) == 1 else 3]]
    return out


def _theirs(nd: NdSbp) -> list[Any]:
    from torch.distributed.tensor import Partial as TorchPartial
    from torch.distributed.tensor import Replicate, Shard

    return [
        Shard(p.dim) if isinstance(p, Split) else TorchPartial() if isinstance(p, Partial) else Replicate() for p in nd
    ]


def _compare(rank: int, world: int, folder: str) -> None:
    """One rank: every case by DTensor and by our chain, on the same local tensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    at = Path(folder)
    try:
        torch.set_num_threads(1)
        join_process_group(rank, world, str(at / "rendezvous"))
        meshes = {sizes: Mesh(dict(zip("ab", sizes, strict=False))) for sizes in SIZES}
        devices = {s: init_device_mesh("cpu", s, mesh_dim_names=m.names) for s, m in meshes.items()}
        groups = {s: Groups(m) for s, m in meshes.items()}
        wrong, number = [], 0
        for number, (sizes, shape, src, dst) in enumerate(cases()):
            mesh = meshes[sizes]
            spec = TensorSpec(shape, "f64")
            local = Placed(spec, src).local(mesh, rank).shape
            # Copies along broadcast axes must be equal, terms along partial ones must not.
            same = tuple(0 if p == B else c for p, c in zip(src, mesh.coords(rank), strict=True))
            x = torch.randn(
                local, dtype=torch.float64, generator=torch.Generator().manual_seed(97 * number + mesh.rank(same))
            )
            (ours,) = EagerStep(one_step_program(spec, src, dst, mesh), groups[sizes])(x.clone())
            given = DTensor.from_local(
                x.clone(), devices[sizes], _theirs(src), run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
            )
            theirs = given.redistribute(devices[sizes], _theirs(dst)).to_local()
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12):
                wrong.append(f"{shape} on {mesh}: {show(src)} -> {show(dst)}")
        torch.save({"wrong": wrong, "cases": number + 1}, at / f"out{rank}")
        dist.destroy_process_group()
    except BaseException:
        (at / f"error{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None


@pytest.mark.slow
def test_boxing_moves_what_dtensor_moves(tmp_path: Path) -> None:
    """Four processes, two meshes, even and uneven shapes: the same local tensors on every rank, by other code."""
    children = [CONTEXT.Process(target=_compare, args=(r, 4, str(tmp_path)), daemon=True) for r in range(4)]
    for child in children:
        child.start()
    stop = time.monotonic() + 240
    while any(c.is_alive() for c in children) and time.monotonic() < stop:
        if any(c.exitcode for c in children):
            break
        time.sleep(0.05)
    for child in children:
        if child.is_alive():
            child.terminate()
        child.join(10)
    errors = sorted(tmp_path.glob("error*"))
    assert not errors, errors[0].read_text()
    found: list[dict[str, Any]] = [torch.load(tmp_path / f"out{r}", weights_only=True) for r in range(4)]
    assert {f["cases"] for f in found} == {len(cases())} and len(cases()) > 100
    assert {tuple(f["wrong"]) for f in found} == {()}


def test_a_step_leaves_its_inputs_alone() -> None:
    """Reductions in place are for tensors nobody else reads: parameters are the same after a step."""
    one = specimen("mlp.py:tiny")
    before: dict[str, Tensor] = {k: v.clone() for k, v in one.inputs.items()}
    plan = laminar.plans.data_parallel(one.graph, Mesh({"dp": 2}))
    run_processes(laminar.lower(one.graph, plan), one.inputs, one.constants)
    assert all(torch.equal(before[k], v) for k, v in one.inputs.items())

"""One case of the operator suite, run every way it can be run and held against plain PyTorch.

Equal means: loss and gradients of the captured graph, of data- and tensor-parallel and random plans on 2 to 4 ranks
in lock-step, and the weights after a step of a job in this process, all as the model run eagerly in float64 gives
them. Cases that draw random numbers are run eagerly under `Canonical`, which draws what a graph draws.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from typing import Any

import torch
from torch import Tensor

import laminar
from laminar.api import inputs_of
from laminar.capture.canonical import Canonical
from laminar.errors import LaminarError
from laminar.ir.graph import Graph
from laminar.ir.plan import Plan
from laminar.lower.lower import lower
from laminar.runtime import lockstep
from laminar.runtime.reference import run_graph
from laminar.runtime.shards import assemble
from laminar.search.draw import random_plan
from tests.suites.op_cases import OpCase, OpModel, loss

TOLERANCE = 1e-9
RATE = 0.01


def eager(model: OpModel, batch: dict[str, Tensor], keyed: bool) -> dict[str, Tensor]:
    """Loss and gradients in plain PyTorch."""
    trained = dict(model.named_parameters())
    with Canonical(torch.tensor([0, 0])) if keyed else torch.enable_grad():
        value = loss(model, batch)
    grads = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    out = {"loss:loss": value.detach()}
    return out | {f"grad:{k}": g for k, g in zip(trained, grads, strict=True) if g is not None}


def differs(got: dict[str, Tensor], want: dict[str, Tensor]) -> str:
    """What is not equal; empty if everything is."""
    if set(got) != set(want):
        return f"{sorted(set(got) ^ set(want))} on one side only"
    finite = [v[v.isfinite()].abs().max() for v in want.values() if v.isfinite().any()]
    floor = 1e-3 * max(map(float, finite), default=0.0)
    for key, w in want.items():
        g = got[key]
        if g.shape != w.shape or g.dtype != w.dtype:
            return f"{key} is {g.dtype}{tuple(g.shape)} instead of {w.dtype}{tuple(w.shape)}"
        g, w = (torch.view_as_real(t) if t.is_complex() else t for t in (g, w))
        if not w.numel() or not w.is_floating_point():
            continue
        both = (g.isnan() & w.isnan()) | (g == w)
        off = float(torch.where(both, 0.0, (g - w).abs()).max())
        scale = max(float(w[w.isfinite()].abs().max()) if w.isfinite().any() else 0.0, floor, 1e-6)
        if not off <= TOLERANCE * scale:
            return f"{key} is off by {off:.2g} of {scale:.2g}"
    return ""


def plans_of(graph: Graph, seeds: int) -> list[tuple[str, Any]]:
    """Makers of plans by name."""
    two, three, four = laminar.Mesh({"tp": 2}), laminar.Mesh({"a": 3}), laminar.Mesh({"a": 2, "b": 2})
    makers: list[tuple[str, Any]] = [
        ("data", lambda: laminar.plans.data_parallel(graph, laminar.Mesh({"dp": 2}))),
        ("tensor", lambda: laminar.plans.tensor_parallel(graph, two)),
    ]
    for seed in range(seeds):
        mesh = (four, three, two)[seed % 3]
        makers.append((f"random {seed}", lambda mesh=mesh, seed=seed: random_plan(graph, mesh, seed)))
    return makers


def placed(graph: Graph, plan: Plan, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of a plan run in lock-step, put together."""
    program = lower(graph, plan)
    ranks = lockstep.run(program, given)
    return {
        f"{o.kind}:{o.name}": assemble(
            [r[f"{o.kind}:{o.name}"] for r in ranks], o.placed.spec.shape, o.placed.nd, program.mesh
        )
        for o in program.outputs
    }


def trained(case: OpCase, keyed: bool, compile: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after one step of a job in this process, and in plain PyTorch."""
    model, plain = case.make(), case.make()
    job = laminar.parallelize(
        model, loss, lambda p: torch.optim.SGD(p, RATE), batch=case.batch, plan="data", compile=compile
    )
    job.step(case.batch)
    optimizer = torch.optim.SGD(plain.parameters(), RATE)
    with Canonical(torch.tensor([0, 0])) if keyed else torch.enable_grad():
        value = loss(plain, case.batch)
    value.backward()
    optimizer.step()
    got = {k: v.detach() for k, v in job.state_dict().items()}
    job.close()
    return got, {k: v.detach() for k, v in plain.state_dict().items()}


def outcome(case: OpCase, seeds: int = 3, compile: bool = False) -> dict[str, Any]:
    """What came of a case: `equal`, `refused`, `wrong`, `obscure`, or `unfit` if plain PyTorch can't do it."""
    begun = time.perf_counter()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status, stage, why = _outcome(case, seeds, compile)
    seconds = round(time.perf_counter() - begun, 3)
    return {"case": str(case), "entry": case.entry, "form": case.form, "status": status, "stage": stage, "why": why,
            "seconds": seconds}  # fmt: skip


def _outcome(case: OpCase, seeds: int, compile: bool) -> tuple[str, str, str]:
    try:
        eager(case.make(), case.batch, False)
    except Exception as error:
        return "unfit", "eager", _line(error)
    stage = "capture"
    try:
        model = case.make()
        graph = laminar.capture(model, loss, case.batch)
        keyed = bool(graph.of_kind("rng"))
        stage = "graph"
        want = eager(case.make(), case.batch, keyed)
        given = {k: v.detach() for k, v in inputs_of(graph, model, case.batch).items()}
        if why := differs(run_graph(graph, copy.deepcopy(given)), want):
            return "wrong", stage, why
        for name, make in plans_of(graph, seeds):
            stage = name
            if why := differs(placed(graph, make(), copy.deepcopy(given)), want):
                return "wrong", stage, why
        for compiled in (False, True) if compile else (False,):
            stage = "compiled" if compiled else "job"
            got, after = trained(case, keyed, compiled)
            if why := differs(got, after):
                return "wrong", stage, why
    except LaminarError as error:
        text = str(error)
        helpful = "next" in text and "could not be traced" not in text
        return ("refused" if helpful else "obscure"), stage, text
    except Exception as error:
        return "obscure", stage, f"{type(error).__name__}: {_line(error)}"
    return "equal", "", ""


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def bad(value: float) -> bool:
    """Whether a number says nothing."""
    return math.isnan(value) or math.isinf(value)

"""Every entry of torch's operator database inside a tiny model, forward and backward: `op_db` as a suite.

A task is an entry in one form (`add/inplace`), tried on a few of its samples (`op_cases`). Its ways:

    plans     the captured graph, data- and tensor-parallel and random plans on 2 to 4 ranks in this process, and a step
              of a job in this process: loss, gradients, new buffers and weights against the model run eagerly
    compiled  a step of a job through Inductor
    ranks     a step of a job on the ranks this process is one of: data and tensor parallel, and a random plan

    python -m tests.suites.op_db -j 16                   all of it on 16 cores; prints what is not equal, and totals
    python -m tests.suites.op_db --only add,svd --forms function,complex --ways plans,compiled
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import laminar
from laminar.api import inputs_of
from laminar.errors import LaminarError
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.lower.lower import lower
from laminar.placement.random_plan import random_plan
from laminar.runtime.check.in_process import lockstep
from laminar.runtime.check.one_device import run_graph
from laminar.runtime.check.plain_model import Keyed
from laminar.runtime.comm.shards import assemble
from tests.suites.harness import BAD, Outcome, against, idle, isolated, listed
from tests.suites.op_cases import FORMS, OpCase, cases, differentiable, entries, forms_of, loss

REFUSED = Path(__file__).with_name("op_db_refused.txt")
SAMPLES, SEEDS = 2, 3
TOLERANCE = {"f64": 1e-9, "c128": 1e-9, "f32": 5e-5, "c64": 5e-5}
"""By the narrowest precision in a graph; halves get 5e-2."""
RATE = 0.01
WORST = ("crash", "wrong", "obscure", "refused", "equal", "skipped")
Values = dict[str, Tensor]


# --- equal ------------------------------------------------------------------------------------


def eager(case: OpCase, keyed: bool) -> Values:
    """Loss, gradients and buffers that change, in plain PyTorch; draws by key where a graph has some."""
    model = case.make()
    trained, before = dict(model.named_parameters()), {k: v.clone() for k, v in model.named_buffers()}
    with Keyed(torch.tensor([0, 0])).running() if keyed else torch.enable_grad():
        value = loss(model, _copied(case.batch))
    grads = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    out = {"loss:loss": value.detach()}
    out |= {f"grad:{k}": g for k, g in zip(trained, grads, strict=True) if g is not None}
    changed = {k: b.detach() for k, b in model.named_buffers() if not torch.equal(b, before[k])}
    return out | {f"buffer:{k}": b for k, b in changed.items()}


def _copied(values: Values) -> Values:
    """Lying in memory as they do, which clones don't; sparse ones can only be cloned."""
    return {k: deepcopy(v) if v.layout == torch.strided else v.clone() for k, v in values.items()}


def tolerance_of(graph: Graph) -> float:
    """How equal equal is for a graph."""
    kinds = {s.dtype for s in graph.specs.values() if s.has_gradient}
    return max((TOLERANCE.get(k, 5e-2) for k in kinds), default=1e-9)


def differs(got: Mapping[str, Tensor], want: Values, tolerance: float) -> str:
    """What is not equal; empty if everything is."""
    if set(got) != set(want):
        return f"{sorted(set(got) ^ set(want))} on one side only"
    floor = 1e-3 * max((_size(v) for v in want.values()), default=0.0)
    for key, w in want.items():
        g = got[key]
        if g.shape != w.shape or g.dtype != w.dtype:
            return f"{key} is {g.dtype}{tuple(g.shape)} instead of {w.dtype}{tuple(w.shape)}"
        g, w = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (g, w))
        if not w.numel():
            continue
        if not w.is_floating_point():
            if not torch.equal(g, w):
                return f"{key} is another"
            continue
        both = (g.isnan() & w.isnan()) | (g == w)
        off = float(torch.where(both, 0.0, (g - w).abs()).max())
        scale = max(_size(w), floor, 1e-6)
        if not off <= tolerance * scale:
            return f"{key} is off by {off:.2g} of {scale:.2g}"
    return ""


def _size(t: Tensor) -> float:
    wide = t.to(torch.complex128 if t.is_complex() else torch.float64)
    fine = wide[wide.isfinite()]
    return float(fine.abs().max()) if fine.numel() else 0.0


# --- ways -------------------------------------------------------------------------------------


def plans_of(graph: Graph, seeds: int) -> list[tuple[str, Callable[[], Plan]]]:
    """Makers of plans by name."""
    two, three, four = laminar.Mesh({"tp": 2}), laminar.Mesh({"a": 3}), laminar.Mesh({"a": 2, "b": 2})
    makers: list[tuple[str, Callable[[], Plan]]] = [
        ("data", lambda: laminar.plans.data_parallel(graph, laminar.Mesh({"dp": 2}))),
        ("tensor", lambda: laminar.plans.tensor_parallel(graph, two)),
    ]
    for seed in range(seeds):
        mesh = (four, three, two)[seed % 3]
        makers.append((f"random {seed}", lambda mesh=mesh, seed=seed: random_plan(graph, mesh, seed)))  # type: ignore[misc]
    return makers


def placed(graph: Graph, plan: Plan, given: Values) -> Values:
    """Outputs of a plan run in lock-step, put together."""
    program = lower(graph, plan)
    ranks = lockstep.run_lockstep(program, given)
    names = {f"{o.kind}:{o.name}": o for o in program.outputs}
    return {k: assemble([r[k] for r in ranks], o.placed.spec.shape, o.placed.nd, plan.mesh) for k, o in names.items()}


def stepped(case: OpCase, plan: Any, compiled: bool = False) -> str:
    """What of a model after one step of a job is not as in plain PyTorch."""
    model, plain = case.make(), case.make()
    job = laminar.parallelize(
        model, loss, lambda p: torch.optim.SGD(p, RATE), batch=case.batch, plan=plan, compile=compiled
    )
    job.step(case.batch)
    graph = job.graph
    optimizer = torch.optim.SGD(plain.parameters(), RATE, foreach=False)
    with Keyed(torch.tensor([0, 0])).running() if graph.of_kind("rng") else torch.enable_grad():
        value = loss(plain, _copied(case.batch))
    value.backward()
    optimizer.step()
    got = {k: v.detach() for k, v in job.state_dict().items()}
    job.close()
    return differs(got, {k: v.detach() for k, v in plain.state_dict().items()}, tolerance_of(graph))


def _planned(case: OpCase) -> str:
    model = case.make()
    graph = laminar.capture(model, loss, case.batch)
    want, tolerance = eager(case, bool(graph.of_kind("rng"))), tolerance_of(graph)
    given = {k: v.detach() for k, v in inputs_of(graph, model, case.batch).items()}
    if why := differs(run_graph(graph, _copied(given)), want, tolerance):
        return f"graph: {why}"
    # A sum of terms that are zero times infinity is no sum, and random plans make terms of anything.
    finite = all(bool(t.isfinite().all()) for t in given.values() if t.dtype in (torch.float64, torch.complex128))
    for name, make in plans_of(graph, SEEDS if finite else 0):
        if why := differs(placed(graph, make(), _copied(given)), want, tolerance):
            return f"{name}: {why}"
    why = stepped(case, "data")
    return f"job: {why}" if why else ""


def _on_ranks(case: OpCase) -> str:
    plans = {"data": "data", "tensor": "tensor", "random": lambda graph, mesh: random_plan(graph, mesh, 1)}
    return "; ".join(f"{name}: {why}" for name, plan in plans.items() if (why := stepped(case, plan)))


WAYS: dict[str, Callable[[OpCase], str]] = {
    "plans": _planned,
    "compiled": lambda case: stepped(case, "data", compiled=True),
    "ranks": _on_ranks,
}


def outcome_of(case: OpCase, way: str) -> Outcome:
    """What came of one case."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            eager(case, False)
        except Exception as error:
            return Outcome("skipped", _line(error))
        try:
            why = WAYS[way](case)
        except LaminarError as error:
            helps = re.search(r"^\s+next\b", str(error), re.M) and "could not be traced" not in str(error)
            return Outcome("refused" if helps else "obscure", _line(error))
        except Exception as error:
            return Outcome("obscure", f"{type(error).__name__}: {_line(error)}")
    return Outcome("wrong", why) if why else Outcome("equal")


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def outcome(samples: Callable[[str], int], task: str, way: str) -> Outcome:
    """The worst that came of an entry's samples in one form."""
    entry, _, form = task.rpartition("/")
    found = [(case, outcome_of(case, way)) for case in cases(entry, form, samples(task))]
    worst = min(found, key=lambda f: WORST.index(f[1].kind), default=None)
    if worst is None:
        return Outcome("skipped", "no sample")
    return Outcome(worst[1].kind, f"sample {worst[0].index}: {worst[1].why}" if worst[1].why else "")


def few(task: str) -> int:
    """How many samples count for the list of refusals."""
    return SAMPLES


# --- tasks ------------------------------------------------------------------------------------


def tasks(only: Sequence[str] = (), forms: Sequence[str] = FORMS) -> list[str]:
    """Entries, all or those named, in every form they have."""
    known = entries()
    return [f"{n}/{f}" for n in known if not only or n in only for f in forms_of(known[n]) if f in forms]


def swept(
    some: Sequence[str],
    ways: Sequence[str] = ("plans",),
    processes: int = 1,
    samples: Callable[[str], int] = few,
) -> dict[tuple[str, str], Outcome]:
    """Outcomes of tasks, in processes that may die."""
    todo = [(t, w) for t in some for w in ways]
    parts = [todo[k :: 4 * processes] for k in range(4 * processes)] if processes > 1 else [todo]
    found: dict[tuple[str, str], Outcome] = {}
    with ThreadPoolExecutor(processes) as pool:
        for part in pool.map(lambda p: isolated(samples, p, patience_s=240.0, run=outcome), parts):
            found |= part
    return found


def share(found: Mapping[tuple[str, str], Outcome]) -> tuple[int, int]:
    """How many differentiable entries are equal in all forms and ways that plain PyTorch can do, and of how many."""
    known = entries()
    kinds: dict[str, set[str]] = {}
    for (task, _), got in found.items():
        entry = task.rpartition("/")[0]
        if differentiable(known[entry]) and got.kind != "skipped":
            kinds.setdefault(entry, set()).add(got.kind)
    return sum(k == {"equal"} for k in kinds.values()), len(kinds)


def listed_entries(path: Path) -> set[str]:
    """Entries that have a refusal in any form."""
    return {name.rpartition("/")[0] for _, name in listed(path)}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-j", type=int, default=1, help="processes")
    parser.add_argument("--only", default="", help="entries, with commas between")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--ways", default="plans")
    parser.add_argument("--every", type=int, default=1, help="only every so many'th task")
    asked = parser.parse_args()
    only = tuple(filter(None, asked.only.split(",")))
    some = tasks(only, asked.forms.split(","))[:: asked.every]
    found = swept(some, asked.ways.split(","), asked.j)
    for (task, way), got in found.items():
        if got.kind in (*BAD, "refused", "skipped"):
            print(f"{got.kind:8} {way:8} {task}  # {got.why}")
    equal, all_of_them = share(found)
    print(dict(Counter(o.kind for o in found.values())), f"{equal} of {all_of_them} differentiable entries equal")
    problems = against(REFUSED, found)
    if len(some) == len(tasks()):
        problems += idle(REFUSED, found)
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    from tests.suites import op_db  # so that workers find functions where they are

    sys.exit(op_db.main())

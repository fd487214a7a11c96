"""Torch's own databases as test-suites: many small cases, each in several ways, each with one outcome.

A case is a tiny model with its loss and a batch. A way is how Laminar runs it: alone through `parallelize`, on several
ranks in lock-step under a preset, on real ranks, through Inductor. The oracle is the same model in plain PyTorch.
What can come of it:

    equal     losses, weights and buffers are those of plain PyTorch
    refused   a LaminarError that says what to do; listed in a file that may only shrink (`against`)
    wrong     other numbers
    obscure   any other exception, or a LaminarError without a way out
    crash     the process is gone; cases run in a worker for that reason (`isolated`)
    skipped   plain PyTorch can't train it either

A suite gives a function from the name of a case to a `Case`, at module level so that workers find it. Collects nothing
itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laminar
from laminar.api import inputs_of
from laminar.capture.model.lazy_layers import initialise
from laminar.capture.model.model_tensors import slots_of
from laminar.errors import LaminarError
from laminar.runtime.check.in_process import lockstep
from laminar.runtime.check.plain_model import Keyed
from laminar.runtime.check.verify import relative_error
from laminar.runtime.comm.shards import assemble
from tests.support.rank_pool import CONTEXT

os.environ.setdefault("LAMINAR_CACHE", "off")  # every case is captured, in workers too

STEPS, RATE = 3, 1e-3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
SMALL = 1e-3
"""Share of the largest change in a model below which the change of a tensor counts as rounding."""
NUDGES, TIMES = (1, 2, 3), 10
"""Ways to be off by the last bit, and how many times as far as they get counts as rounding still."""
BAD = ("wrong", "obscure", "crash")


@dataclass(frozen=True)
class Case:
    """A model made anew by `make`, always the same; a loss; a batch; the precision that says how equal equal is."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Any
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Outcome:
    """What came of a case, and in one line why."""

    kind: str
    why: str = ""


Find = Callable[[str], Case]


# --- plain PyTorch ---------------------------------------------------------------------------


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {s.name: s.now.detach().clone() for s in slots_of(model) if isinstance(s.now, Tensor)}


def plain(
    case: Case, draws: bool, steps: int = STEPS, nudge: int = 0
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, and the model's tensors before and after some steps of an ordinary loop; from weights that are off by
    their last bits, at random, if there is a `nudge` to draw by."""
    model = case.make()
    initialise(model, case.loss, case.batch)
    before = _state(model)
    if nudge:
        draw = torch.Generator().manual_seed(nudge)
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.is_floating_point()):
                p.mul_(1 + torch.finfo(p.dtype).eps * torch.randint(-1, 2, p.shape, generator=draw).to(p))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)
    losses = []
    for i in range(steps):
        with Keyed(torch.tensor([0, i])).running() if draws else contextlib.nullcontext():
            loss = case.loss(model, case.batch)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, before, _state(model)


def differs(case: Case, draws: bool, losses: Sequence[Tensor], after: Mapping[str, Tensor]) -> str:
    """What is not as in plain PyTorch, or nothing: losses to their size, tensors to how much they have moved.

    Batch norm over a handful of values turns the last bit of a weight into the fifth digit of a loss within three
    steps. So what is off by more than rounding is held against how far plain PyTorch gets from itself when its weights
    are off by their last bits: some times as far is still rounding.
    """
    wanted = plain(case, draws, len(losses))
    errors = _errors(case, losses, after, wanted)
    if not any(e > TOLERANCE[case.dtype] for e, _ in errors.values()):
        return ""
    nudged = [plain(case, draws, len(losses), nudge) for nudge in NUDGES]
    spread = [_errors(case, other, state, wanted) for other, _, state in nudged]
    for key, (error, why) in errors.items():
        own = max(s[key][0] if key in s else 0.0 for s in spread)
        if error > max(TOLERANCE[case.dtype], TIMES * own):
            return why
    return ""


def _errors(
    case: Case,
    losses: Sequence[Tensor],
    after: Mapping[str, Tensor],
    wanted: tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]],
) -> dict[str, tuple[float, str]]:
    """For each loss and each tensor how far off it is, and that in words."""
    want_losses, before, state = wanted
    state = {k: v for k, v in state.items() if k in before}  # a cache that forward makes is none of the model's tensors
    out = {}
    for i, (got, want) in enumerate(zip(losses, want_losses, strict=True)):
        error = relative_error(torch.as_tensor(got).to(torch.float64), want.to(torch.float64), 0.0)
        out[f"loss {i}"] = (error, f"loss of step {i} is {float(got):.9g}, not {float(want):.9g}")
    moved = {k: _size(v.double() - before[k].double()) for k, v in state.items() if v.is_floating_point()}
    largest = max(moved.values(), default=0.0)
    for name, want in state.items():
        if name not in after:
            continue
        got = after[name]
        if not want.is_floating_point():
            out[name] = (0.0 if torch.equal(got, want) else math.inf, f"{name} is another")
            continue
        floor = max(SMALL * largest, 1e-6 * _size(want))
        error = relative_error(got.double() - before[name].double(), want.double() - before[name].double(), floor)
        out[name] = (error / 10, f"{name} is off by {error:.1e}")  # a difference of two has lost a digit
    return out


def _size(t: Tensor) -> float:
    fine = t[torch.isfinite(t)]
    return float(fine.abs().max()) if fine.numel() else 0.0


# --- ways ------------------------------------------------------------------------------------


def _trained(case: Case, plan: str, compiled: bool) -> str:
    """Through the front door, on however many ranks this process is one of."""
    model = case.make()
    options = {"lr": RATE, "foreach": False}
    job = laminar.parallelize(
        model,
        case.loss,
        lambda params: torch.optim.SGD(params, **options),
        batch=case.batch,
        plan=plan,
        compile=compiled,
    )
    losses = [torch.tensor(job.step(case.batch).loss, dtype=torch.float64) for _ in range(STEPS)]
    whole = job.state_dict()
    return differs(case, bool(job.graph.of_kind("rng")), losses, whole)


def _in_lock_step(case: Case, preset: str, ranks: int) -> str:
    """One step on several ranks in this process, its gradients applied here."""
    model = case.make()
    graph = laminar.capture(model, case.loss, case.batch)
    mesh = laminar.Mesh({"tp" if preset == "tensor" else "dp": ranks})
    plan = (laminar.plans.tensor_parallel if preset == "tensor" else laminar.plans.data_parallel)(graph, mesh)
    program = laminar.lower(graph, plan)
    outs = lockstep.run_lockstep(program, inputs_of(graph, model, case.batch))
    after, losses = _state(model), []
    for o in program.outputs:
        value = assemble([r[f"{o.kind}:{o.name}"] for r in outs], o.placed.spec.shape, o.placed.nd, mesh)
        if o.kind == "loss":
            losses.append(value)
        elif o.kind == "grad":
            after[o.name] = after[o.name] - RATE * value.to(after[o.name].dtype)
        elif o.kind == "buffer":
            after[o.name] = value
    return differs(case, bool(graph.of_kind("rng")), losses, after)


WAYS: dict[str, Callable[[Case], str]] = {
    "alone": lambda case: _trained(case, "data", False),
    "compiled": lambda case: _trained(case, "data", True),
    "data2": lambda case: _in_lock_step(case, "data", 2),
    "data4": lambda case: _in_lock_step(case, "data", 4),
    "tensor2": lambda case: _in_lock_step(case, "tensor", 2),
    "tensor4": lambda case: _in_lock_step(case, "tensor", 4),
    # To be run by every rank of a pool:
    "ranks_data": lambda case: _trained(case, "data", False),
    "ranks_tensor": lambda case: _trained(case, "tensor", False),
    "ranks_zero3": lambda case: _trained(case, "zero3", False),
}


def outcome(find: Find, name: str, way: str) -> Outcome:
    """Run one case in one way."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = find(name)
        try:
            plain(case, draws=False)
        except Exception as error:
            return Outcome("skipped", f"{type(error).__name__}: {error}".partition("\n")[0])
        try:
            problem = WAYS[way](case)
        except LaminarError as error:
            helps = re.search(r"^\s+(next|allowed)\b", str(error), re.M)
            return Outcome("refused" if helps else "obscure", f"{type(error).__name__}: {error}".partition("\n")[0])
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{type(error).__name__}: {error}".partition("\n")[0]
            return Outcome("obscure", f"{line} ({Path(where.filename).name}:{where.lineno})")
    return Outcome("wrong", problem) if problem else Outcome("equal")


# --- workers ---------------------------------------------------------------------------------


def _work(run: Any, find: Any, todo: Sequence[tuple[str, str]], results: Any) -> None:
    torch.set_num_threads(1)
    for task in todo:
        results.send((task, None))
        results.send((task, run(find, *task)))
    results.send(None)


def isolated(
    find: Any, tasks: Iterable[tuple[str, str]], patience_s: float = 120.0, run: Callable[..., Outcome] = outcome
) -> dict[tuple[str, str], Outcome]:
    """Outcomes of (case, way) pairs, run one after another in a process of their own; who ends it is a crash."""
    todo, out = list(tasks), dict[tuple[str, str], Outcome]()
    while todo:
        ours, theirs = CONTEXT.Pipe(duplex=False)
        worker = CONTEXT.Process(target=_work, args=(run, find, todo, theirs), daemon=True)
        worker.start()
        theirs.close()
        begun, why = todo[0], ""
        try:
            while True:
                if not ours.poll(patience_s):
                    why = f"nothing for {patience_s:.0f} s"
                    break
                message = ours.recv()
                if message is None:
                    break
                begun, found = message
                if found is not None:
                    out[begun] = found
        except EOFError:
            why = "the process is gone"
        worker.kill() if why.startswith("nothing") else worker.join()
        worker.join()
        if why:
            out[begun] = Outcome("crash", f"{why} (exit code {worker.exitcode})")
        ours.close()
        todo = [t for t in todo if t not in out] if why else []
    return out


# --- lists of refusals -----------------------------------------------------------------------


def listed(path: Path) -> list[tuple[str, str]]:
    """Pairs of patterns from a file: a way and a case on each line; `*` stands for anything, `#` begins a remark."""
    lines = [line.partition("  #")[0].strip() for line in path.read_text().splitlines() if not line.startswith("#")]
    return [(way, name.strip()) for way, _, name in (line.partition(" ") for line in lines if line)]


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) is not None


def against(path: Path, found: Mapping[tuple[str, str], Outcome]) -> list[str]:
    """What is wrong with outcomes, given what may be refused: nothing but what is listed, and no longer than it is.

    A line of the list must match refused cases alone.
    """
    lines = listed(path)
    problems = []
    for (name, way), got in found.items():
        on = [(w, n) for w, n in lines if _matches(w, way) and _matches(n, name)]
        if got.kind in BAD or (got.kind == "refused" and not on):
            problems.append(f"{got.kind}: {name} [{way}]: {got.why}")
        if got.kind == "equal" and on:
            problems.append(f"works now, take it off the list: {name} [{way}] (line {' '.join(on[0])!r})")
    return problems


def idle(path: Path, found: Mapping[tuple[str, str], Outcome]) -> list[str]:
    """Lines of a list that match nothing refused, given the outcomes of a whole suite in some of its ways."""
    refused = [key for key, got in found.items() if got.kind == "refused"]
    ways = {way for _, way in found}
    lines = [
        (w, n)
        for w, n in listed(path)
        if any(_matches(w, way) for way in ways)
        and not any(_matches(w, way) and _matches(n, name) for name, way in refused)
    ]
    return [f"nothing is refused that this line matches: {way} {name}" for way, name in lines]

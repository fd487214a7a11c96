"""One program in plain PyTorch and through Laminar: are the numbers the same?

Ways through Laminar: `alone` (a job in this process: the front door, generated code, the optimizer), `lockstep` (a
plan on several ranks in this process, its gradients applied by plain PyTorch), `stages` (one step through a pipeline
in this process, as `verify` runs it), `ranks` (the same job on processes).
What can come of it:

    equal     losses, weights and buffers are those of plain PyTorch, after two or three steps
    warned    they are those of gradients accumulated in plain PyTorch, and a warning has named the op
    refused   a LaminarError
    wrong     other numbers
    ill-conditioned  other numbers, but plain PyTorch's are about as far off from weights that differ in a last bit
    crash     any other exception, or the end of the process
    invalid   plain PyTorch does not train it either, or not in that precision
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laminar
from laminar.api import inputs_of, micro_batches
from laminar.capture.model.model_tensors import slots_of
from laminar.errors import GraphError, LaminarError, RankError
from laminar.placement.random_plan import random_plan
from laminar.runtime.check.in_process import lockstep
from laminar.runtime.comm.shards import assemble
from tests.fuzz.plain import Trained, in_its_precision, model_of, optimizer_of, plain, size, state_of
from tests.fuzz.program import Program

TOLERANCE = {"float64": 1e-7, "float32": 3e-3}
"""Of what a tensor has moved; differences of rounding have been seen to grow to a hundredth of that."""
DRAWS, AS_MUCH = 4, 10.0
"""Perturbations of the last bit, and how many times as far as they plain PyTorch may be from what is right."""
SMALL = 1e-2
"""Share of the largest move in a model below which another's is rounding, of the optimizer's quotients too."""


@dataclass(frozen=True)
class Outcome:
    """What came of a program, and why."""

    kind: str
    why: str = ""


class Different(Exception):
    """Other numbers than plain PyTorch's; by how much, where that is known."""

    def __init__(self, text: str, wrong: Mapping[str, float] | None = None) -> None:
        super().__init__(text)
        self.wrong = wrong or {}


def compare(program: Program, losses: list[float], after: Mapping[str, Tensor], want: Trained) -> None:
    """Raise what is not as in plain PyTorch: losses by their size, tensors by how far they have moved."""
    if not all(map(math.isfinite, want.losses)):
        return
    if program.options["precision"] != "f32":
        if _far(losses[0], want.losses[0]) and _far(losses[0], in_its_precision(program)):
            raise Different(
                f"the first loss is {losses[0]:.6g}, not {want.losses[0]:.6g}, in {program.options['precision']}"
            )
        return
    largest = max((size(v.double() - want.before[k].double()) for k, v in want.after.items() if _real(v)), default=0.0)
    tol, found = TOLERANCE[program.rounded], errors(losses, after, want)
    wrong: dict[str, float] = {}
    told = ""
    for name, error in found.items():
        if name.startswith("loss"):
            b = want.losses[int(name[4:])]
            allowed, how = tol * (abs(b) + 0.1), f"the {name} is {losses[int(name[4:])]:.12g}, not {b:.12g}"
        else:
            b = want.after[name]
            moved = size(b.double() - want.before[name].double()) if _real(b) and name in want.before else 0.0
            allowed = tol * max(moved, SMALL * largest, 1e-4 * size(b)) + 1e-14 if _real(b) else 0.0
            how = f"{name} is off by {error:.3g} after it has moved by {moved:.3g}"
        if not error <= allowed:
            wrong[name], told = error, told or how
    if wrong:
        raise Different(told, wrong)


def _far(loss: float, want: float) -> bool:
    """Whether a loss in low precision is another; some models have none in it."""
    return (
        not abs(loss - want) <= 0.3 * (abs(want) + 1) and not (math.isnan(loss) and math.isnan(want)) and loss != want
    )


def errors(losses: list[float], after: Mapping[str, Tensor], want: Trained) -> dict[str, float]:
    """By how much each loss and each tensor is off; infinitely, if it has another shape."""
    out = {f"loss{i}": abs(a - b) for i, (a, b) in enumerate(zip(losses, want.losses, strict=True))}
    for name, b in want.after.items():
        if name in after:
            a = after[name]
            wide = torch.complex128 if b.is_complex() else torch.float64
            out[name] = size(a.to(wide) - b.to(wide)) if a.shape == b.shape else math.inf
    return out


def _real(t: Tensor) -> bool:
    return t.is_floating_point()


def ill_conditioned(program: Program, wrong: Mapping[str, float], want: Trained, parts: int) -> str:
    """What plain PyTorch itself does to all that is wrong if weights differ in their last bit, where that explains it.

    A gradient that is zero in exact arithmetic has no digits, and optimizers divide by it.
    """
    moved: dict[str, float] = {}
    for draw in range(DRAWS):
        other = plain(program, parts, ulps=1, draw=draw)
        for name, error in errors(other.losses, other.after, want).items():
            if math.isfinite(error):
                moved[name] = max(error, moved.get(name, 0.0))
    if all(error <= AS_MUCH * moved.get(name, 0.0) for name, error in wrong.items()):
        return ", ".join(f"{n} by {e:.2g}, plain PyTorch by {moved[n]:.2g}" for n, e in list(wrong.items())[:3])
    return ""


# --- through Laminar -----------------------------------------------------------------------------


def plan_of(program: Program) -> Any:
    """The plan to ask for: a name, or a function that draws one."""
    name = program.options["plan"]
    return name if name != "random" else lambda graph, mesh: random_plan(graph, mesh, program.seed)


@contextlib.contextmanager
def cache() -> Iterator[None]:
    """With a folder for what one run leaves to the next."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("LAMINAR_CACHE")
        os.environ["LAMINAR_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("LAMINAR_CACHE")
            if before is not None:
                os.environ["LAMINAR_CACHE"] = before


Found = tuple[list[float], dict[str, Tensor], bool]
"""Losses, the model's tensors, and whether a warning has said that micro-batches are not the whole batch."""


def through_job(program: Program) -> Found:
    """A job on as many ranks as this process is one of; `again`: the second of two, with what the first has kept."""
    if program.options.get("again"):
        plain_once = replace(program, options={**program.options, "again": False})
        with cache():
            through_job(plain_once)
            return through_job(plain_once)
    space, o = program.compiled(), program.options
    model = model_of(space, program)
    data = space["batches"](o["steps"])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        job = laminar.parallelize(
            model,
            space["loss"],
            optimizer_of(o["optimizer"]),
            batch=data[0],
            plan=plan_of(program),
            device="cpu",
            micro_batches=o["micro_batches"],
            precision=o["precision"],
            clip_norm=o["clip_norm"],
        )
        losses = [job.step(batch).loss for batch in data]
    warned = any(str(w.message).startswith("micro_batches=") for w in heard)
    whole = {k: v.detach().clone() for k, v in job.state_dict().items()}
    if o["ranks"] == 1:
        whole = state_of(model) | whole
    return losses, whole, warned


def in_lock_step(program: Program) -> Found:
    """A plan on several ranks in this process; the update is plain PyTorch's."""
    space, o = program.compiled(), program.options
    model = model_of(space, program)
    data = space["batches"](o["steps"])
    graph = laminar.capture(model, space["loss"], data[0])
    mesh = laminar.Mesh({"tp" if o["plan"] == "tensor" else "dp": o["ranks"]})
    made = {
        "data": laminar.plans.data_parallel,
        "tensor": laminar.plans.tensor_parallel,
        "random": lambda graph, mesh: random_plan(graph, mesh, program.seed),
    }.get(o["plan"]) or (lambda graph, mesh: laminar.plans.zero(graph, mesh, int(o["plan"][4:])))
    lowered = laminar.lower(graph, made(graph, mesh))
    optimizer = optimizer_of(o["optimizer"])(model.parameters(), foreach=False)
    held = {s.name: s.tensor for s in slots_of(model)}
    losses = []
    for i, batch in enumerate(data):
        outs = lockstep.run_lockstep(lowered, inputs_of(graph, model, batch, step=i))
        found = {
            f"{t.kind}:{t.name}": assemble(
                [r[f"{t.kind}:{t.name}"] for r in outs], t.placed.spec.shape, t.placed.nd, mesh
            )
            for t in lowered.outputs
        }
        losses.append(float(found["loss:loss"]))
        optimizer.zero_grad()
        with torch.no_grad():
            for key, value in found.items():
                kind, _, name = key.partition(":")
                if kind == "grad":
                    held[name].grad = value.to(held[name].dtype).reshape(held[name].shape)
                elif kind == "buffer":
                    held[name].copy_(value)
        if o["clip_norm"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), o["clip_norm"], foreach=False)
        optimizer.step()
    return losses, {n: t.detach().clone() for n, t in held.items()}, False


def through_stages(program: Program) -> None:
    """Micro-batches through two stages in this process, against one device and the model itself."""
    space, o = program.compiled(), program.options
    model, (batch,) = model_of(space, program), space["batches"](1)
    graph = laminar.capture(model, space["loss"], micro_batches(batch, o["micro_batches"])[0])
    plan = laminar.plans.pipeline(graph, o["ranks"], o["micro_batches"])
    report = laminar.verify(model, space["loss"], [batch], plan)
    if not report.ok:
        raise Different(str(report))


def outcome(program: Program, ranks: Any = None) -> Outcome:
    """What comes of a program; `ranks` is a pool (`tests/support/rank_pool.py`) for those that run on processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole = plain(program)
        except Exception as error:
            return Outcome("invalid", _line(error))
        try:
            return _judged(program, whole, ranks)
        except LaminarError as error:
            return Outcome(_kind(error), _line(error))
        except Exception as error:
            return _invalid(program) or Outcome("crash", _line(error))


def _judged(program: Program, whole: Trained, ranks: Any) -> Outcome:
    """By numbers: those of the whole batch, or of its parts in plain PyTorch where a warning has said so."""
    way, want, parts = program.options["way"], whole, 1
    try:
        if way == "stages":
            through_stages(program)
            return Outcome("equal")
        if way == "ranks":
            found = ranks.run(_caught, program)
            for one in found:
                if isinstance(one, Outcome):
                    return one
        else:
            found = [(in_lock_step if way == "lockstep" else through_job)(program)]
        if any(warned for _, _, warned in found):
            parts = program.options["micro_batches"]
            want = plain(program, parts)
        for losses, after, _ in found:
            compare(program, losses, after, want)
    except Different as error:
        explained = ill_conditioned(program, error.wrong, want, parts) if error.wrong else ""
        return Outcome("ill-conditioned", explained) if explained else Outcome("wrong", str(error))
    return Outcome("equal") if parts == 1 else Outcome("warned", _for_nothing(program, found[0], whole))


def _for_nothing(program: Program, found: Found, whole: Trained) -> str:
    """Whether the numbers that were warned of are those of the whole batch."""
    try:
        compare(program, *found[:2], whole)
    except Different:
        return "and other numbers than the whole batch's"
    return f"for nothing, of {sorted(program.traits)}"


def _invalid(program: Program) -> Outcome | None:
    """Whether plain PyTorch raises something too, part by part and in the precision asked for."""
    try:
        in_its_precision(program)
    except Exception as error:
        return Outcome("invalid", f"in {program.options['precision']}: {_line(error)}")
    return None


def _kind(error: LaminarError) -> str:
    """Whether an error is one of ours about the model, or tells of one that nobody meant."""
    return "crash" if isinstance(error, (GraphError, RankError)) else "refused"


def _caught(program: Program) -> Any:
    """On a rank: what a job came to. All ranks are refused alike, so they go on together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return through_job(program)
        except LaminarError as error:
            return Outcome(_kind(error), _line(error))
        except Exception as error:
            return _invalid(program) or Outcome("crash", _line(error))


def _line(error: BaseException) -> str:
    where = [
        f for f in traceback.extract_tb(error.__traceback__) if "/laminar/" in f.filename or "<program" in f.filename
    ]
    at = f" ({Path(where[-1].filename).name}:{where[-1].lineno})" if where else ""
    text = str(error).strip().splitlines() or [""]
    picked = text[-1] if isinstance(error, AssertionError) and "Traceback" in str(error) else text[0]
    return f"{type(error).__name__}: {picked}{at}"[:300]

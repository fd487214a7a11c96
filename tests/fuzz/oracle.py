"""One program in plain PyTorch and through Laminar: are the numbers the same?

Ways through Laminar: `alone` (a job in this process: the front door, generated code, the optimizer), `lockstep` (a
plan on several ranks in this process, its gradients applied by plain PyTorch), `stages` (one step through a pipeline
in this process, as `verify` runs it), `ranks` (the same job on processes).
What can come of it:

    equal     losses, weights and buffers are those of plain PyTorch, after two or three steps
    refused   a LaminarError
    wrong     other numbers
    crash     any other exception, or the end of the process
    invalid   plain PyTorch does not train it either
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
from laminar.capture.slots import slots_of
from laminar.errors import GraphError, LaminarError, RankError
from laminar.runtime import lockstep
from laminar.runtime.eager import Keyed
from laminar.runtime.shards import assemble
from laminar.search.draw import random_plan
from tests.fuzz.program import Program

TOLERANCE = {"float64": 1e-7, "float32": 3e-3}
"""Of what a tensor has moved; differences of rounding have been seen to grow to a hundredth of that."""
SMALL = 1e-2
"""Share of the largest move in a model below which another's is rounding, of the optimizer's quotients too."""


@dataclass(frozen=True)
class Outcome:
    """What came of a program, and why."""

    kind: str
    why: str = ""


class Different(Exception):
    """Other numbers than plain PyTorch's."""


def optimizer_of(name: str) -> Any:
    """A function that makes it; epsilons are large, so that a gradient of rounding alone moves nothing."""
    o = torch.optim
    return {
        "sgd": lambda p, **k: o.SGD(p, lr=0.05, **k),
        "momentum": lambda p, **k: o.SGD(p, lr=0.03, momentum=0.9, weight_decay=0.01, **k),
        "nesterov": lambda p, **k: o.SGD(p, lr=0.03, momentum=0.8, nesterov=True, **k),
        "adam": lambda p, **k: o.Adam(p, lr=0.02, eps=1e-2, **k),
        "adamw": lambda p, **k: o.AdamW(p, lr=0.02, eps=1e-2, **k),
        "adagrad": lambda p, **k: o.Adagrad(p, lr=0.02, eps=1e-1, **k),
        "rmsprop": lambda p, **k: o.RMSprop(p, lr=0.01, eps=1e-1, **k),
        "adamax": lambda p, **k: o.Adamax(p, lr=0.02, eps=1e-1, **k),
        "nadam": lambda p, **k: o.NAdam(p, lr=0.02, eps=1e-2, **k),
    }[name]


def model_of(space: Mapping[str, Any], program: Program) -> nn.Module:
    """The program's model, always the same."""
    torch.manual_seed(program.seed % 2**31)
    return space["Model"]().to(getattr(torch, program.dtype))  # type: ignore[no-any-return]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of its parameters and buffers."""
    return {s.name: s.now.detach().clone() for s in slots_of(model) if isinstance(s.now, Tensor)}


def value_of(result: Any) -> Tensor:
    """A loss as one number."""
    return result.total / result.weight if isinstance(result, laminar.Loss) else result


def plain(space: Mapping[str, Any], program: Program) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of an ordinary loop, and the model's tensors before and after."""
    model, o = model_of(space, program), program.options
    before = state_of(model)
    optimizer = optimizer_of(o["optimizer"])(model.parameters(), foreach=False)
    losses = []
    for i, batch in enumerate(space["batches"](o["steps"])):
        with Keyed(torch.tensor([0, i])).running() if "draws" in program.traits else contextlib.nullcontext():
            loss = value_of(space["loss"](model, batch))
        optimizer.zero_grad()
        loss.backward()
        if o["clip_norm"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), o["clip_norm"], foreach=False)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, before, state_of(model)


def compare(
    program: Program,
    losses: list[float],
    after: Mapping[str, Tensor],
    want: tuple[list[float], dict[str, Tensor], dict[str, Tensor]],
) -> None:
    """Raise what is not as in plain PyTorch: losses by their size, tensors by how far they have moved."""
    tol = TOLERANCE[program.dtype]
    wanted, before, state = want
    if not all(map(math.isfinite, wanted)):
        return
    if program.options["precision"] != "f32":
        if abs(losses[0] - wanted[0]) > 0.3 * (abs(wanted[0]) + 1):
            raise Different(
                f"the first loss is {losses[0]:.6g}, not {wanted[0]:.6g}, in {program.options['precision']}"
            )
        return
    for i, (a, b) in enumerate(zip(losses, wanted, strict=True)):
        if not abs(a - b) <= tol * (abs(b) + 0.1):
            raise Different(f"the loss of step {i} is {a:.12g}, not {b:.12g}")
    moved = {
        k: size(v.double() - before[k].double()) for k, v in state.items() if k in before and v.is_floating_point()
    }
    largest = max(moved.values(), default=0.0)
    for name, b in state.items():
        if name not in after:
            continue
        a = after[name]
        if a.shape != b.shape:
            raise Different(f"{name} is {tuple(a.shape)}, not {tuple(b.shape)}")
        if not b.is_floating_point():
            if not torch.equal(a, b):
                raise Different(f"{name} is {a.tolist()}, not {b.tolist()}")
            continue
        error = size(a.double() - b.double())
        if not error <= tol * max(moved.get(name, 0.0), SMALL * largest, 1e-4 * size(b)) + 1e-14:
            raise Different(f"{name} is off by {error:.3g} after it has moved by {moved.get(name, 0.0):.3g}")


def size(t: Tensor) -> float:
    """The largest element."""
    return float(t.abs().max()) if t.numel() else 0.0


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


def through_job(program: Program) -> tuple[list[float], dict[str, Tensor]]:
    """A job on as many ranks as this process is one of; `again`: the second of two, with what the first has kept."""
    if program.options.get("again"):
        plain_once = replace(program, options={**program.options, "again": False})
        with cache():
            through_job(plain_once)
            return through_job(plain_once)
    space, o = program.compiled(), program.options
    model = model_of(space, program)
    data = space["batches"](o["steps"])
    job = laminar.parallelize(
        model, space["loss"], optimizer_of(o["optimizer"]), batch=data[0], plan=plan_of(program), device="cpu",
        micro_batches=o["micro_batches"], precision=o["precision"], clip_norm=o["clip_norm"],
    )  # fmt: skip
    losses = [job.step(batch).loss for batch in data]
    whole = {k: v.detach().clone() for k, v in job.state_dict().items()}
    if o["ranks"] == 1:
        whole = state_of(model) | whole
    return losses, whole


def in_lock_step(program: Program) -> tuple[list[float], dict[str, Tensor]]:
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
        outs = lockstep.run(lowered, inputs_of(graph, model, batch, step=i))
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
    return losses, {n: t.detach().clone() for n, t in held.items()}


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
    """What comes of a program; `ranks` is a pool (`tests/ranks.py`) for those that run on processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want = plain(program.compiled(), program)
        except Exception as error:
            return Outcome("invalid", _line(error))
        try:
            if program.options["way"] == "ranks":
                for found in ranks.run(_caught, program):
                    if isinstance(found, Outcome):
                        return found
                    compare(program, *found, want)
            elif program.options["way"] == "stages":
                through_stages(program)
            else:
                run = in_lock_step if program.options["way"] == "lockstep" else through_job
                compare(program, *run(program), want)
        except Different as error:
            return Outcome("wrong", str(error))
        except LaminarError as error:
            return Outcome(_kind(error), _line(error))
        except Exception as error:
            return Outcome("crash", _line(error))
    return Outcome("equal")


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


def _line(error: BaseException) -> str:
    where = [
        f for f in traceback.extract_tb(error.__traceback__) if "/laminar/" in f.filename or "<program" in f.filename
    ]
    at = f" ({Path(where[-1].filename).name}:{where[-1].lineno})" if where else ""
    text = str(error).strip().splitlines() or [""]
    picked = text[-1] if isinstance(error, AssertionError) and "Traceback" in str(error) else text[0]
    return f"{type(error).__name__}: {picked}{at}"[:300]

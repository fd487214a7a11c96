"""A search's finalists, tried out on the ranks at hand before a job begins: the measured fastest is taken.

What a step takes is predicted, and sometimes wrong by more than two plans are apart. So jobs are made of copies of the
model and its optimizer, one for each finalist; they take turns on the example batch (`interleaved_timing.py`), and are
thrown away. The model, the optimizer, the batch and all generators of random numbers are as before, bit for bit.

It is bound to cost little: `LIMIT_S` in all, less where one plan is clearly ahead, and nothing where there is no
choice, no room for copies, or no time. Whatever goes wrong costs the finalist it happens to, not the job. What was
measured, or why nothing was, is told as an event `measured` and stands in the plan's account.

Not covered: what a loss function or a hook does to things outside of the model, which it does some times more; a
function that makes optimizers is called once more for each finalist.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from laminar.capture.model.model_tensors import slots_of
from laminar.capture.torch_private import step_hooks
from laminar.errors import LaminarError
from laminar.events import emit
from laminar.ir.plans.plan import Plan, runs_ddp
from laminar.planner.search.finalists import NOBODY_LEFT_OUT, Finalist, settled, summed_up
from laminar.runtime.code.malloc import give_back_freed_memory
from laminar.train.auto.interleaved_timing import LEAST_TURNS, WARM, turns
from laminar.train.check.first_batch_check import FILL, free_bytes
from laminar.train.job.ddp_job import DdpJob
from laminar.train.job.job import Job
from laminar.train.options import DEFAULTS, JobOptions
from laminar.train.world import World

LIMIT_S = 15.0
"""Seconds that all of it may take, by rank 0's clock."""
FINALIST_TURN_S = 0.2
"""How long a turn lasts, unless a single step takes longer."""
TOO_SLOW = 1.3
"""Plans that are predicted to take so many times as long as the best are not tried."""
CAPTURE = 1 / 3
"""Share of the time that capturing the model may take: it is done once more."""
TRIAL_PATIENCE_S = 30.0
"""How long ranks of one machine wait for each other in a step before they take it for failed."""


def tried_finalists(
    world: World,
    plan: Plan,
    finals: Sequence[Finalist],
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    batch: Any,
    *,
    capture_s: float = 0.0,
    left_out: Mapping[str, str] = NOBODY_LEFT_OUT,
    options: JobOptions = DEFAULTS,
) -> Plan:
    """The measured fastest of a search's finalists, or the one that was predicted so: `plan`, the first of them.

    Every rank calls this, with the same finalists, and gets the same plan; that of rank 0 has its origin. `options` are
    those of a job. Capturing takes `capture_s`, where that is known; `left_out` are those that can't be tried, and why.
    """
    start = time.perf_counter()
    micro_batches = options.micro_batches
    some, why = worth_it(finals, capture_s, micro_batches)
    rows: list[list[float] | str] = []
    if not why:
        with _undisturbed(world.device), _as_it_was(model):
            some, why = _with_room(world, some, model, optimizer)
            if not why:
                options = replace(
                    options,
                    mesh=None,
                    device=world.device,
                    compile=False,
                    check=False,
                    detect_anomaly=False,
                    timeout_s=TRIAL_PATIENCE_S,
                )
                rows = _raced(world, some, model, loss, optimizer, batch, options)
                why = "; ".join(dict.fromkeys(row for row in rows if isinstance(row, str))) if _none(rows) else ""
    if why:
        return untried(plan, "; ".join([why, *(f"{name}: {reason}" for name, reason in left_out.items())]))

    def choice() -> Any:
        spent_s = time.perf_counter() - start
        found = settled(plan, some, summed_up(rows), left_out, seconds=spent_s, micro_batches=micro_batches)
        return found.to_json()

    taken = Plan.from_json(world.told("choice", choice))
    told = taken.account.measured
    assert told is not None
    name = next(row.plan for row in told.rows if row.taken)
    emit("measured", done=True, taken=name, hash=taken.hash, **told.to_json())
    return replace(taken, origin=plan.origin)


def untried(plan: Plan, why: str) -> Plan:
    """The plan that was predicted fastest, which says why nothing was measured."""
    emit("measured", done=False, why=why)
    return replace(plan, account=replace(plan.account, unmeasured=why))


def _none(rows: Sequence[list[float] | str]) -> bool:
    return all(isinstance(row, str) for row in rows)


# --- whether it is worth it


def worth_it(finals: Sequence[Finalist], capture_s: float, micro_batches: int) -> tuple[list[Finalist], str]:
    """Those that may be the fastest and that there is time for; or why there is no choice."""
    if len(finals) < 2:
        return [], "the search has come to one plan only"
    best_s = finals[0].step_s
    near = [f for f in finals if f.step_s <= TOO_SLOW * best_s]
    if len(near) < 2:
        next_s = min(f.step_s for f in finals[1:])
        return [], f"the next plan is predicted to be {100 * (next_s / best_s - 1):.0f} % slower"
    if capture_s > CAPTURE * LIMIT_S:
        return [], f"capturing the model takes {capture_s:.1f} s, and all of it may take {LIMIT_S:.0f}"

    def too_long(some: Sequence[Finalist]) -> bool:
        return (WARM + LEAST_TURNS) * micro_batches * sum(f.step_s for f in some) > LIMIT_S

    some = _fewer(near, too_long)
    if len(some) < 2:
        each = f"a step is predicted to take {micro_batches * best_s:.2g} s"
        return [], f"{each}, and {WARM + LEAST_TURNS} of each plan may take {LIMIT_S:.0f} s in all"
    return some, ""


def _fewer(finals: Sequence[Finalist], too_much: Callable[[Sequence[Finalist]], bool]) -> list[Finalist]:
    """As many as there can be: those that are predicted slowest go first, the best one stays."""
    some = list(finals)
    while len(some) > 1 and too_much(some):
        some.remove(max(some[1:], key=lambda f: f.step_s))
    return some


def _with_room(
    world: World, finals: Sequence[Finalist], model: nn.Module, optimizer: Any
) -> tuple[list[Finalist], str]:
    """Those of which copies fit into the free memory of every rank, all at once; or why there are none."""
    state = optimizer.state.values() if isinstance(optimizer, torch.optim.Optimizer) else ()
    whole: int = sum(s.tensor.nbytes for s in slots_of(model))
    whole += sum(v.nbytes for each in state for v in each.values() if isinstance(v, torch.Tensor))
    here = 1 if world.device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    hooks = isinstance(optimizer, torch.optim.Optimizer) and step_hooks(optimizer) > 0
    why = "the optimizer has hooks, which would be run" if hooks else ""
    said = world.gather_objects((why, whole, free_bytes(world.device) // here))
    why = next((each[0] for each in said if each[0]), "")
    if why:
        return [], why
    whole, free = max(each[1] for each in said), min(each[2] for each in said)

    def needed(some: Sequence[Finalist]) -> int:
        return whole + sum(f.peak_bytes for f in some)

    some = _fewer(finals, lambda some: needed(some) > FILL * free)
    if len(some) < 2:
        least = needed(finals[:2]) / 1e9
        return [], f"about {least:.2g} GB a rank are needed for copies, {free / 1e9:.2g} GB are free"
    return some, ""


# --- copies


class Copied(Job):
    """A job of copies, which leaves nothing behind, and does not wait for long."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.peers.patience_s = TRIAL_PATIENCE_S

    def close(self) -> None:
        """Leave what it has made, and let go of its tensors."""
        self.engine.close()
        super().close()


class CopiedDdp(DdpJob):
    """The same of torch's own data parallel, which runs the model in every step: never the original."""

    def __init__(self, original: nn.Module, *parts: Any) -> None:
        self._around = contextlib.ExitStack()
        self._around.enter_context(_left_alone(original))
        try:
            super().__init__(*parts)
        except BaseException:
            self._around.close()
            raise

    def close(self) -> None:
        """Let the original be run again."""
        self._around.close()
        super().close()


def _raced(
    world: World,
    finals: Sequence[Finalist],
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    batch: Any,
    options: JobOptions,
) -> list[list[float] | str]:
    """Seconds of a step by finalist and round; or why it is out."""
    twins: list[Copied] = []

    def make(finalist: Finalist) -> Copied | CopiedDdp:
        own, trains, wrong = None, None, ""
        try:
            own, trains = job_copies(model, optimizer)
        except Exception as error:
            wrong = f"the model or its optimizer can't be copied: {type(error).__name__}: {str(error).splitlines()[0]}"
        wrong = next(filter(None, world.gather_objects(wrong)), "")  # before anybody waits for who has none
        if wrong or own is None:
            raise LaminarError(wrong)
        if runs_ddp(finalist.plan):  # the last one: copies made later would have what refuses to run the original
            return CopiedDdp(model, own, loss, trains, batch, options, finalist.plan)
        with _left_alone(model):
            job = Copied(own, loss, trains, batch, finalist.plan, options, twins[0] if twins else None)
        twins[:] = [job]
        return job

    try:
        makes = [partial(make, f) for f in finals]
        ask = world.gather_objects
        return turns(makes, [batch], ask, limit_s=LIMIT_S, turn_s=FINALIST_TURN_S, gives_up=True, tick=_tell)
    finally:
        twins.clear()
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            give_back_freed_memory()


def _tell(number: int) -> None:
    if number == 0:  # until then jobs have told what they do
        emit("phase", name="trying finalists out")


def job_copies(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """A model and an optimizer that share nothing with those given; what makes optimizers stays what it is."""
    memo: dict[int, Any] = {}
    for slot in slots_of(model):
        if not slot.tensor.is_leaf:  # an attribute that forward makes anew: torch copies no results of ops
            memo[id(slot.tensor)] = slot.tensor.detach().clone()
    own = copy.deepcopy(model, memo)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return own, optimizer
    twin = object.__new__(type(optimizer))
    # A scheduler wraps `step` in a function that knows its optimizer: a copy's would update the original.
    plain = {k: v for k, v in vars(optimizer).items() if k != "step"}
    twin.__dict__.update(copy.deepcopy(plain, memo))
    return own, twin


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Inside, draws are nobody's, and what is to be said of the model is left to the job."""
    drawn = random.getstate(), np.random.get_state(legacy=True)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])


@contextlib.contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Inside, whoever runs the model itself is refused: a loss may know it from elsewhere, and norms count calls."""

    def refuse(module: nn.Module, given: Any) -> None:
        raise LaminarError("the loss runs the model that it knows, not the copy that it is given")

    handles = [module.register_forward_pre_hook(refuse) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """What is hung on the model inside is taken off again: a hook of a copy may know the original."""
    kept = [(d, dict(d)) for m in model.modules() for d in (m.__dict__, m._parameters, m._buffers, m._modules)]
    try:
        yield
    finally:
        for now, before in kept:
            if now.keys() != before.keys() or any(now[k] is not v for k, v in before.items()):
                now.clear()
                now.update(before)

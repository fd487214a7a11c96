"""Jobs in exact mode on real processes: the hash after each step, under any hosting, storage and change of either."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import laminar
from laminar.ir.exact import Exact, Hosting
from laminar.runtime.check.processes import on_ranks
from laminar.train.job.exact_job import ExactJob
from laminar.train.options import JobOptions
from tests.support.zoo import recipe

FOUR_UNITS = Exact(4)
UNCHECKED = JobOptions(check=False)


@dataclass(frozen=True)
class ExactRun:
    """What is trained, and how it is laid out: only the first five and the options may change a bit."""

    model: str
    exact: Exact = FOUR_UNITS
    steps: int = 3
    optimizer: str = "AdamW"
    options: JobOptions = UNCHECKED
    storage: str = "data"
    hostings: tuple[Hosting, ...] = ()
    """Taken in turn, one for each step; even unless given."""
    resized: tuple[tuple[int, int], ...] = ()
    """Before the step of a number, go on with so many processes."""
    load: str = ""
    save: str = ""
    flip: int = -1
    """After this many steps one bit of one weight is flipped."""


def make_job(run: ExactRun) -> Any:
    """A job of such a run on the ranks there are."""
    found = recipe(run.model)
    torch.manual_seed(0)
    model = found.model()
    makers = {
        "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=1e-3),
        "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
        "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
        "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
        "Adafactor": lambda ps: torch.optim.Adafactor(ps),
    }
    batch = next(iter(found.data()))
    hosting = run.hostings[0] if run.hostings else None
    return ExactJob(model, found.loss, makers[run.optimizer], batch, run.exact, run.storage, run.options, hosting)


def hashes(run: ExactRun) -> list[str]:
    """The hash after each step, and the loss's bits, on this rank."""
    job, found = make_job(run), recipe(run.model)
    if run.load:
        job.resume(run.load)
    out: list[str] = []
    data = iter(found.data())
    for _ in range(job.steps):
        next(data)
    for step in range(run.steps):
        for before, ranks in run.resized:
            if before == step and not job.resize(ranks):
                return out
        if run.hostings and step:
            job.rehost(run.hostings[step % len(run.hostings)])
        result = job.step(next(data))
        if run.flip == step:
            weight = next(p for p in job.state.model.parameters() if p.numel())
            weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        out.append(f"{job.hash()} {float(result.loss).hex()} {float(result.grad_norm).hex()}")
    if run.save:
        job.save(run.save)
    job.close()
    return out


def on_processes(run: ExactRun, processes: int) -> list[str]:
    """The same from a real world; all ranks that are left must say the same."""
    if processes == 1:
        return hashes(run)
    found = on_ranks(processes, hashes, run, timeout_s=280)
    longest = max(found, key=len)
    assert all(longest[: len(f)] == f for f in found), found
    return longest


def plain(run: ExactRun) -> ExactRun:
    """The same run on one process, without changes on its way."""
    return replace(run, storage="data", hostings=(), resized=(), load="", save="", flip=-1)


__all__ = ["ExactRun", "hashes", "laminar", "make_job", "on_processes", "plain"]

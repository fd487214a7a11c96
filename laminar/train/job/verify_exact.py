"""Whether a recipe trains to the same bits however it is hosted; and if not, in which step, op and tensor it parts.

It is trained twice, in processes of their own: by one, and by several whose hostings scatter units and change from
step to step, with weights in shards. Hashes are compared after every step. Where they part, both are trained again up
to that step, and in it every line of the program leaves a digest of what each logical rank has: the first that differs
is named.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laminar.capture.tensor_bytes import as_bytes
from laminar.ir.exact import Exact, Hosting
from laminar.ir.program import Instr
from laminar.runtime.check.processes import on_ranks
from laminar.train.engine.exact_engine import RunLine
from laminar.train.job.exact_job import ExactJob
from laminar.train.options import JobOptions
from laminar.train.saving.state_root import state_record_of


@dataclass(frozen=True)
class ExactTrial:
    """What is trained, and how it is hosted."""

    make: Callable[[], Any]
    """Gives the recipe; importable by name."""
    exact: Exact
    steps: int
    options: JobOptions
    processes: int = 1
    disturb: Callable[[ExactJob, int], None] | None = None
    """Called before each step with its number: for those who want to see that a difference is found."""

    def hosting(self, step: int) -> Hosting:
        """Who computes what in a step."""
        if self.processes == 1:
            return Hosting.even(self.exact.ranks, 1)
        return Hosting.drawn(self.exact.ranks, self.processes, self.options.seed + step)


@dataclass(frozen=True)
class ExactReport:
    """What came of it."""

    ok: bool
    steps: int
    processes: int
    hashes: list[str]
    """After each step, of one process."""
    others: list[str]
    """After each step, of several."""
    step: int | None = None
    """The first that differs, counted from 1."""
    op: str = ""
    tensor: str = ""
    where: str = ""
    """The line of the user's that the op came from."""
    rank: int | None = None
    """The first logical rank whose tensor differs."""

    def __str__(self) -> str:
        if self.ok:
            return f"one hash in each of {self.steps} steps on 1 and on {self.processes} processes: {self.hashes[-1]}"
        where = f", from {self.where}" if self.where else ""
        rank = "" if self.rank is None else f" on logical rank {self.rank}"
        at = (self.step or 1) - 1
        return (
            f"step {self.step} parts: {self.tensor}{rank} ({self.op}{where})\n"
            f"  on 1 process    {self.hashes[at]}\n  on {self.processes} processes  {self.others[at]}"
        )


@dataclass
class TrialSeen:
    """What a rank tells of its run."""

    hashes: list[str] = field(default_factory=list)
    digests: dict[tuple[str, int], str] = field(default_factory=dict)
    """Of the step that was looked at: by tensor and logical rank."""
    state: dict[str, str] = field(default_factory=dict)
    """Behind that step: by tensor, what this rank adds to its digest."""
    lines: list[RunLine] = field(default_factory=list)


def verify_trial(trial: ExactTrial, timeout_s: float = 3600.0) -> ExactReport:
    """Train twice and compare."""
    alone = ExactTrial(trial.make, trial.exact, trial.steps, trial.options)
    (one,), others = (_runs(t, None, timeout_s) for t in (alone, trial))
    several = others[0].hashes
    known = {"steps": trial.steps, "processes": trial.processes, "hashes": one.hashes, "others": several}
    parts = next((i for i, (a, b) in enumerate(zip(one.hashes, several, strict=True)) if a != b), None)
    if parts is None:
        return ExactReport(ok=True, **known)  # type: ignore[arg-type]
    (one,), others = (_runs(t, parts, timeout_s) for t in (alone, trial))
    return ExactReport(ok=False, step=parts + 1, **known, **first_line_apart(one, others))  # type: ignore[arg-type]


def _runs(trial: ExactTrial, look_at: int | None, timeout_s: float) -> list[TrialSeen]:
    return on_ranks(trial.processes, train_and_look, trial, look_at, threads=trial.exact.threads, timeout_s=timeout_s)


def train_and_look(trial: ExactTrial, look_at: int | None) -> TrialSeen:
    """On one rank: hashes of all steps, or everything about one."""
    found = trial.make()
    torch.manual_seed(trial.options.seed)
    batches = list(itertools.islice(found.data(), trial.steps if look_at is None else look_at + 1))
    torch.manual_seed(trial.options.seed)
    storage = "data" if trial.processes == 1 else "zero3"
    job = ExactJob(
        found.model(), found.loss, found.optimizer, batches[0], trial.exact, storage, trial.options, trial.hosting(0)
    )
    seen = TrialSeen()

    def note(instr: Instr, rank: int, output: int, x: Tensor) -> None:
        name = instr.name if output == 0 else f"{instr.name}.{output}"
        before = seen.digests.get((name, rank), "").encode()  # of micro-batches that came first
        seen.digests[name, rank] = hashlib.blake2b(
            before + as_bytes(x.cpu()).numpy().tobytes(), digest_size=16
        ).hexdigest()

    for step, batch in enumerate(batches):
        if step:
            job.rehost(trial.hosting(step))
        if trial.disturb is not None:
            trial.disturb(job, step)
        if step == look_at:
            job.engine.watch(note)
        job.step(batch)
        if look_at is None:
            seen.hashes.append(job.hash())
    if look_at is not None:
        seen.state = {str(t.key): t.hash.hex() for t in state_record_of(job).tensors}
        seen.lines = job.engine.lines(job._first)
    return seen


def first_line_apart(one: TrialSeen, others: list[TrialSeen]) -> Mapping[str, Any]:
    """The first line whose result another process has otherwise, in the order of the program; else an update."""
    for instr, ranks in one.lines:
        for output in range(len(instr.outs)):
            name = instr.name if output == 0 else f"{instr.name}.{output}"
            for rank in ranks:
                mine = one.digests.get((name, rank))
                for other in others:
                    if mine is not None and other.digests.get((name, rank), mine) != mine:
                        return {"op": instr.op, "tensor": f"%{name}", "where": instr.where, "rank": rank}
    for key, value in one.state.items():
        if any(other.state.get(key) != value for other in others):
            return {"op": "the update", "tensor": key}
    return {"op": "besides tensors", "tensor": "the optimizer's settings, counters or the scale of the loss"}

"""The loop around a job: batches in, steps, events out.

`loop` draws batches, calls `job.step`, and says what happens as events: "start", "plan", "phase",
"step", "skipped", "eval", "timeline", "end". It prints nothing and knows no files but the checkpoint and the timeline.

A loss is read late. On a GPU a step is only queued when `job.step` returns, and reading its loss
waits for everything queued before it. So results are kept, and read in groups of `log_every`, the
newest `LAG` left alone: every loss is still looked at and every step has its event, in order, with
its own number. A loss that is not finite ends the run with an error that names the first such step.

Batches are loaded beside the steps where `prefetch` says so (`train/batch/prefetch.py`), in the same order and with the
same results. Before anything is evaluated the loader comes to rest: data that draws from torch's global generator, and
an evaluation that does too, then take turns at the same place in every run.

Data that runs out begins anew, as a next epoch. Throughput counts tokens where the first integer leaf
of a batch has two dims (batch x tokens), else samples: the length of the first leaf. The first step is
left out of it, because it holds what happens once: capture of kernels, buffers, caches.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from laminar.errors import NonFiniteError
from laminar.events import emit
from laminar.runtime.pipeline.loader import EPOCH
from laminar.train.batch.position import DataPosition
from laminar.train.protocol import TrainingJob
from laminar.train.saving.checkpoint import saver_for
from laminar.train.saving.generators import by_rank, of_rank, restore_generators, state_of_rank
from laminar.train.saving.save_schedule import SaveEvery, SaveSchedule
from laminar.train.stop_request import STOP

LAG = 2
"""Steps queued on a GPU beyond the newest one whose loss is read; none on a CPU, where nothing is queued."""
GROUP = 10
"""Losses read together on a GPU, unless told otherwise: one wait for ten steps."""
WARM_UP = 3
"""Steps before a timeline is recorded, where the run is long enough: the first ones make buffers and fill caches."""
LEAVE_S = 1.0
"""How long the end of a run waits for data that is being read and that nobody will need."""
WRITE_S = 10.0
"""How long a run that fails waits for a checkpoint that is being written."""
MOST_SKIPPED = 50
"""Skipped steps in a row after which the loss scale can't be the reason: 2^50 is more than any scale."""


class Callback:
    """What a recipe may do around steps: override what is needed. Called on every rank, in the order of the steps.

    Methods of the job are collective, so ranks must call the same ones. Reading a result waits for the device.
    """

    def begin(self, job: Any) -> None:
        """Before the first step, after a checkpoint was read."""

    def before_step(self, job: Any, batch: Any) -> None:
        """A step with this batch is about to be made."""

    def after_step(self, job: Any, result: Any) -> bool | None:
        """A step was made and the schedule moved on. `True` ends the run here; on all ranks, or on none."""

    def after_evaluation(self, job: Any, evaluation: Any) -> None:
        """The loss over the recipe's evaluation batches, a float, with `metrics`."""

    def end(self, job: Any, outcome: Any) -> None:
        """All steps are made, and the checkpoint is written; nothing is told after a failure."""


class OnStep(Callback):
    """A function of job and result as a callback."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function

    def after_step(self, job: Any, result: Any) -> bool | None:
        """Call it."""
        return self.function(job, result) is True


class HashEvery(Callback):
    """The job's hash as an event, every so many steps and after the last one."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def after_step(self, job: Any, result: Any) -> None:
        """Say it, if it is time."""
        if job.steps % self.steps == 0:
            emit("hash", step=job.steps, hash=job.hash())

    def end(self, job: Any, outcome: Any) -> None:
        """Say it, unless that has been done."""
        if job.steps % self.steps:
            emit("hash", step=job.steps, hash=job.hash())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    steps: int
    loss: float | None
    """Of the last step; nothing if none was made."""
    evaluation: float | None
    """The last one, where the recipe has data for it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation, or of the last step where there was none."""
    seconds: float
    """From the first batch to the last loss, evaluation included."""
    per_s: float | None
    """Throughput without the first step and without evaluation."""
    unit: str
    """What `per_s` counts: "tokens" or "samples"."""
    skipped: int = 0
    timeline: str | None = None
    """Where the timeline is, if one was asked for."""


def leaves(batch: Any) -> Iterator[Any]:
    """The tensors of a batch, in the order they are written in."""
    if isinstance(batch, dict):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from leaves(value)
    elif hasattr(batch, "shape"):
        yield batch
    elif hasattr(batch, "share") or hasattr(batch, "batch"):  # laminar.Local, laminar.Sized
        yield from leaves(getattr(batch, "share", getattr(batch, "batch", None)))
    elif hasattr(batch, "sizes"):  # laminar.Sized
        yield from leaves(batch.batch)


def count(batch: Any) -> tuple[int, str]:
    """How much a batch holds, and of what."""
    found = list(leaves(batch))
    for leaf in found:
        if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex or str(leaf.dtype) == "torch.bool"):
            if len(leaf.shape) == 2:
                return int(leaf.shape[0] * leaf.shape[1]), "tokens"
            break
    return next((int(leaf.shape[0]) for leaf in found if len(leaf.shape)), 1), "samples"


def first(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """So many batches, and what stands between them."""
    while number:
        batch = next(batches)
        number -= batch is not EPOCH
        yield batch
        del batch


def scheduler(
    job: TrainingJob, schedule: Callable[[Any], Any] | None, resume: Path | str | None
) -> tuple[Any, Mapping[str, Any]]:
    """The learning-rate scheduler on the job's optimizer, and the job resumed: where both stood; what else was saved.

    A scheduler is brought forward by stepping it again from the state it was made with. So it has no
    file of its own, and a schedule that was changed since (more steps, another decay) is what holds.
    """
    made = schedule(job.optimizer) if schedule else None
    fresh = [{k: v for k, v in g.items() if k != "params"} for g in job.optimizer.param_groups] if made else []
    begun = copy.deepcopy(made.state_dict()) if made and resume is not None and hasattr(made, "state_dict") else None
    about: Mapping[str, Any] = {}
    if resume is not None:
        emit("phase", name="resuming")
        about = job.resume(resume, generators=False) or {}
    if made is not None and job.steps:
        if begun is not None:
            made.load_state_dict(begun)
        for group, values in zip(job.optimizer.param_groups, fresh, strict=True):
            group.update(values)
        for _ in range(job.steps):
            advance(made)
    return made, about


def place_in_data(job: TrainingJob, about: Mapping[str, Any], prefetch: int) -> tuple[Any, Callable[[], None] | None]:
    """Where data that can seek goes on; else what puts random generators back once batches were passed over.

    Batches that are loaded ahead draw from the generators before their steps, so what was saved is ahead of its step:
    then generators stay as drawing the batches again has left them.
    """
    if not about.get("generators"):
        return None, None
    state = state_of_rank(about.get("data"), job.rank, job.world)
    restore = partial(restore_generators, of_rank(about["generators"], job.rank, job.world))
    if state is not None:
        restore()
        return state, None
    return None, restore if prefetch == 0 else None


def advance(made: Any) -> None:
    """One step of a scheduler. Torch warns where it has not seen the optimizer step; a job steps what it shards."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
        made.step()


class Reader:
    """Results of steps that have not been read yet, and what was learned from those that were."""

    def __init__(self, job: TrainingJob, log_every: int | None) -> None:
        queued = getattr(job.device, "type", str(job.device)) != "cpu"
        self.rank = job.rank
        self.every = log_every or (GROUP if queued else 1)
        self.lag = LAG if queued else 0
        self.pending: list[tuple[int, int, str, Any]] = []
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self.skipped = self.in_a_row = 0
        self.timed_s, self.timed_units = 0.0, 0
        self.first = True
        self.since = time.perf_counter()

    def add(self, step: int, units: int, unit: str, result: Any) -> None:
        """Keep a result; read the oldest ones if enough have come together."""
        self.pending.append((step, units, unit, result))
        if self.first:
            self.read(1)
        elif len(self.pending) >= self.every + self.lag:
            self.read(self.every)

    def pause(self) -> None:
        """Read all there is: what comes next is not part of any step."""
        self.read(len(self.pending))

    def read(self, number: int) -> None:
        """Force the oldest results and tell of them."""
        group, self.pending = self.pending[:number], self.pending[number:]
        if not group:
            return
        read = [
            (bool(r.skipped), _number(r.loss), _number(r.grad_norm), _number(r.lr), dict(getattr(r, "metrics", {})))
            for *_, r in group
        ]
        now = time.perf_counter()
        passed, self.since = now - self.since, now
        units = sum(u for _, u, _, _ in group)
        if not self.first:
            self.timed_s, self.timed_units = self.timed_s + passed, self.timed_units + units
        self.first = False
        for (step, _, unit, _), (skipped, loss, norm, lr, metrics) in zip(group, read, strict=True):
            if skipped:
                self._skip(step, loss, norm)
                continue
            self.in_a_row = 0
            if loss is not None and not math.isfinite(loss):
                raise NonFiniteError(
                    f"the loss of step {step} is {loss} (rank {self.rank})",
                    before=f"{self.loss:.6g}" if self.loss is not None else "",
                    next="run with --detect-anomaly (detect_anomaly=True) to see which op made it first;"
                    " a lower learning rate or --clip-norm 1 often helps",
                )
            self.loss, self.metrics = loss, metrics
            emit(
                "step",
                step=step,
                loss=loss,
                grad_norm=norm,
                lr=lr,
                seconds=passed / len(group),
                per_s=units / passed if passed > 0 else None,
                unit=unit,
                **({"metrics": metrics} if metrics else {}),
            )

    def _skip(self, step: int, loss: float | None, norm: float | None) -> None:
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        emit("skipped", step=step, loss=loss, grad_norm=norm)
        if self.in_a_row >= MOST_SKIPPED:
            raise NonFiniteError(
                f"{self.in_a_row} steps in a row up to step {step} were skipped: gradients are not finite at any scale",
                next="run with --detect-anomaly, or in another --precision",
            )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


class TimelineRecorder:
    """Records a few steps of a run, once it is warm, and saves the timeline on rank 0."""

    def __init__(self, job: TrainingJob, path: Path | str | None, number: int, steps: int) -> None:
        """`number` steps of the `steps` that are to be made."""
        self.job, self.path, self.number = job, path, min(number, steps)
        self.first = min(WARM_UP, steps - self.number)
        self.made = 0
        self.saved: str | None = None
        self.recording: Any = None

    @property
    def begins(self) -> bool:
        """Whether the next step is the first to be recorded."""
        return self.path is not None and self.made == self.first

    @property
    def ends(self) -> bool:
        """Whether the last step to be recorded was made."""
        return self.recording is not None and self.made == self.first + self.number

    def begin(self) -> None:
        """From now on, steps are recorded."""
        self.recording = self.job.timeline()
        self.recording.__enter__()

    def end(self) -> None:
        """Gather and save."""
        self.recording.__exit__(None, None, None)
        found, self.recording = self.recording.timeline, None
        if self.job.rank == 0:
            found.save(self.path)
        self.saved = str(self.path)
        emit("timeline", path=self.saved, steps=self.number, step_ns=found.step_ns)

    def abandon(self, error: BaseException) -> None:
        """The run has failed: there is nothing to gather."""
        if self.recording is not None:
            self.recording.__exit__(type(error), error, None)
            self.recording = None


def loop(
    job: TrainingJob,
    data: Callable[[], Iterable[Any]],
    steps: int,
    *,
    log_every: int | None = None,
    schedule: Callable[[Any], Any] | None = None,
    evaluate: Callable[[], Iterable[Any]] | None = None,
    evaluate_every: int = 0,
    checkpoint: Path | str | None = None,
    checkpoint_every: int | str = 0,
    keep: str = "",
    resume: Path | str | None = None,
    timeline: Path | str | None = None,
    timeline_steps: int = 3,
    prefetch: int = 0,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train until `steps` steps are made in all; those before a resumption count.

    The job is saved in the store `checkpoint` at the end, and every `checkpoint_every` steps ("10m": minutes), which is
    written beside the steps that follow; also when a signal asks the run to end. `keep` says which checkpoints stay.
    `prefetch` is how many batches may be loaded ahead; 0: each is loaded when it is needed. `evaluate`
    makes the batches to evaluate on, at the end and every `evaluate_every` steps. `timeline` is where to save what all
    ranks did in the median of `timeline_steps` steps, taken once the run is warm. `metrics` are measured in
    evaluations; `callbacks` are told what happens, in their order.
    """
    # Long because everything that may happen around a step stands in the order in which it happens.
    made, about = scheduler(job, schedule, resume)
    emit("start", steps=steps, done=job.steps, device=str(job.device), memory=job.memory())
    if job.plan is not None:
        emit("plan", name=job.plan.name, hash=job.plan.hash, mesh=job.plan.mesh.to_json())
    begun, evaluation, unit, step = time.perf_counter(), None, "samples", job.steps
    ends = False

    def aside(act: Callable[[], Any]) -> Any:
        """Something that is no part of any step."""
        reader.pause()
        value = act()
        reader.since = time.perf_counter()
        return value

    def evaluated() -> Any:
        emit("phase", name="evaluating")
        assert evaluate is not None
        if loader is not None:
            loader.settle()
            with job.prefetch(evaluate(), prefetch) as ahead:
                value = job.evaluate(ahead, **measured)
        else:
            value = job.evaluate(evaluate(), **measured)
        found = dict(getattr(value, "metrics", {}))
        emit("eval", step=step, loss=float(value), **({"metrics": found} if found else {}))
        for callback in callbacks:
            callback.after_evaluation(job, value)
        return value

    def saved() -> None:
        emit("phase", name="saving")
        assert saver is not None
        saver.save({"data": by_rank(job.peers.gather_objects(source.state(step)))})

    def stopped() -> NoReturn:
        """A signal came: save what there is, and end as it asks."""
        reader.pause()
        if saver is not None:
            saved()
            saver.finish()
        assert STOP.asked is not None
        raise STOP.asked

    measured = {"metrics": metrics} if metrics else {}
    saver = saver_for(job, checkpoint, keep) if checkpoint is not None else None
    due = SaveSchedule(SaveEvery.parse(checkpoint_every), job.peers, step)
    reader = Reader(job, log_every)
    emit("phase", name="first step")
    source = DataPosition(data, saver is not None)
    batches, loader = source.batches(step, prefetch > 0, *place_in_data(job, about, prefetch)), None
    if prefetch and step < steps:
        batches = loader = job.prefetch(first(batches, steps - step), prefetch)
    recorder = TimelineRecorder(job, timeline, timeline_steps, max(steps - step, 0))
    batch: Any = None
    for callback in callbacks:
        callback.begin(job)
    STOP.begin(job.peers)
    try:
        while step < steps and not ends:
            batch = None  # let go of it before the next one comes
            batch = next(batches)
            units, unit = count(batch)
            if recorder.begins:
                aside(recorder.begin)
            for callback in callbacks:
                callback.before_step(job, batch)
            result = job.step(batch)
            step, recorder.made = step + 1, recorder.made + 1
            if made is not None:
                advance(made)
            reader.add(step, units, unit, result)
            for callback in callbacks:
                ends = callback.after_step(job, result) is True or ends
            if saver is not None:
                saver.check()
            if recorder.ends:
                aside(recorder.end)
            if evaluate is not None and evaluate_every and step % evaluate_every == 0 and step < steps:
                evaluation = aside(evaluated)
            stops = STOP.due(job.peers, step, reader.every + reader.lag if reader.lag else 0)
            if saver is not None and not stops and step < steps and due.due(step):
                aside(saved)
            if stops:
                stopped()
        del batch
        reader.pause()
        if evaluate is not None:
            evaluation = evaluated()
        if saver is not None:
            saved()
            saver.finish()
    except BaseException as error:
        recorder.abandon(error)
        if saver is not None:
            saver.leave(WRITE_S)
        raise
    finally:
        STOP.end()
        if loader is not None:
            loader.close(LEAVE_S)
    outcome = Outcome(
        steps=step,
        loss=reader.loss,
        evaluation=None if evaluation is None else float(evaluation),
        metrics=dict(getattr(evaluation, "metrics", {})) or reader.metrics,
        unit=unit,
        skipped=reader.skipped,
        seconds=time.perf_counter() - begun,
        timeline=recorder.saved,
        per_s=reader.timed_units / reader.timed_s if reader.timed_s else None,
    )
    emit("end", ok=True, **asdict(outcome))
    for callback in callbacks:
        callback.end(job, outcome)
    return outcome

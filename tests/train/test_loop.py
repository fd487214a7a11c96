"""The loop around a job, with a job that only pretends: what is read when, what is told, where it stops.

The stand-in keeps no weights; its losses come from a function of the step. A real job under the same loop
is what tests/launch/test_launch.py runs. The pure parts of the launcher (who is to blame, what is shown) are here too.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from laminar import events
from laminar.errors import MeshError, NonFiniteError, RankError, RecipeError
from laminar.events import Event
from laminar.launch.blame import Failure, Stopped, culprit, describe, from_event, from_exit, kind_of, verdict
from laminar.launch.display import Bar, Lines, State, clock, summary
from laminar.launch.rank import RankPlace
from laminar.train.batch.position import DataPosition
from laminar.train.loop import GROUP, LAG, MOST_SKIPPED, Callback, OnStep, count, loop
from laminar.train.world import World


class Result:
    """Notes when it is read."""

    def __init__(self, job: Pretender, step: int) -> None:
        self.job, self.number = job, step
        self.grad_norm, self.lr = 1.0, job.optimizer.param_groups[0]["lr"]
        self.skipped = step in job.skips

    @property
    def loss(self) -> float:
        self.job.read.append((self.number, self.job.steps))
        return self.job.losses(self.number)


class Pretender:
    """Has all a loop needs, and trains nothing."""

    def __init__(self, losses: Callable[[int], float] = lambda k: 1 / k, device: str = "cpu") -> None:
        self.rank, self.device, self.plan = 0, torch.device(device), None
        self.peers = World("cpu")
        self.losses, self.steps = losses, 0
        self.optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        self.read: list[tuple[int, int]] = []
        self.skips: set[int] = set()
        self.batches: list[Any] = []
        self.evaluated: list[int] = []
        self.saved: list[tuple[Any, int]] = []

    def step(self, batch: Any) -> Result:
        self.steps += 1
        self.batches.append(batch)
        return Result(self, self.steps)

    def evaluate(self, batches: Iterable[Any]) -> float:
        self.evaluated.append(self.steps)
        return float(len(list(batches)))

    def resume(self, uri: Any, generators: bool = True) -> None:
        self.steps = int(uri)
        self.optimizer.param_groups[0]["lr"] = -1.0  # whatever the checkpoint says

    def memory(self) -> dict[str, int]:
        return {}


class PretendedSaver:
    """Notes what it is asked to save."""

    def __init__(self, job: Any, uri: Any, keep: str) -> None:
        self.job, self.uri = job, uri

    def save(self, about: Any) -> None:
        self.job.saved.append((self.uri, self.job.steps))

    def check(self) -> None:
        pass

    def finish(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.train.loop.saver_for", PretendedSaver)


@pytest.fixture
def heard() -> Iterator[list[Event]]:
    """Events of the test."""
    found: list[Event] = []
    with events.listening(found.append):
        yield found


def numbers() -> Iterator[torch.Tensor]:
    return (torch.full((4, 2), float(i)) for i in range(10**6))


def steps_in(heard: list[Event]) -> list[int]:
    return [e.fields["step"] for e in heard if e.kind == "step"]


# --- reading losses ---------------------------------------------------------------------------------


def test_on_a_cpu_a_loss_is_read_at_once(heard: list[Event]) -> None:
    """Nothing is queued there, so there is nothing to wait for."""
    job = Pretender()
    outcome = loop(job, numbers, 5)
    assert job.read == [(k, k) for k in range(1, 6)]
    assert steps_in(heard) == [1, 2, 3, 4, 5] and outcome.loss == 0.2 and outcome.steps == 5
    assert heard[0].kind == "start" and heard[-1].kind == "end" and heard[-1].fields["ok"]


def test_on_a_gpu_losses_are_read_late_and_in_groups(heard: list[Event]) -> None:
    """Reading waits for the device. Still every step is told of, in order."""
    job = Pretender(device="cuda")
    loop(job, numbers, 35)
    assert [number for number, _ in job.read] == list(range(1, 36)) == steps_in(heard)
    late = {number: at - number for number, at in job.read if 1 < number <= 1 + 2 * GROUP}
    assert min(late.values()) == LAG and max(late.values()) == LAG + GROUP - 1
    assert len({at for _, at in job.read}) <= 1 + 35 // GROUP + 1


def test_a_loss_that_is_not_finite_is_an_error_with_the_first_such_step(heard: list[Event]) -> None:
    """Though it is read later, together with others that are no better."""
    for device in ("cpu", "cuda"):
        with pytest.raises(NonFiniteError, match=r"step 17 is nan \(rank 0\)") as error:
            loop(Pretender(lambda k: math.nan if k >= 17 else float(k), device), numbers, 100)
        assert "before  16" in str(error.value) and "--detect-anomaly" in str(error.value)
    assert steps_in(heard) == [*range(1, 17)] * 2 and "end" not in {e.kind for e in heard}


def test_skipped_steps_are_told_and_are_no_error(heard: list[Event]) -> None:
    """A loss scale that was too high is no mistake of anybody's, unless it goes on."""
    job = Pretender(lambda k: math.inf if k in (2, 3) else 1.0)
    job.skips = {2, 3}
    assert loop(job, numbers, 5).skipped == 2
    assert [e.fields["step"] for e in heard if e.kind == "skipped"] == [2, 3] and steps_in(heard) == [1, 4, 5]
    job = Pretender()
    job.skips = set(range(5, 1000))
    with pytest.raises(NonFiniteError, match=f"{MOST_SKIPPED} steps in a row"):
        loop(job, numbers, 1000)


# --- data ---------------------------------------------------------------------------------------------


def test_data_that_runs_out_begins_anew() -> None:
    """An epoch ends; training does not."""
    job = Pretender()
    loop(job, lambda: [torch.tensor([i]) for i in range(3)], 7)
    assert [int(b) for b in job.batches] == [0, 1, 2, 0, 1, 2, 0]


def test_data_that_can_not_begin_anew_is_refused() -> None:
    """One iterator for all calls is used up after the first."""
    once = iter([torch.ones(1)] * 3)
    with pytest.raises(RecipeError, match="gave 3 batches and no more"):
        list(DataPosition(lambda: once).batches())
    with pytest.raises(RecipeError, match="gives no batch"):
        next(DataPosition(list).batches())


def test_a_resumed_run_goes_on_in_the_data() -> None:
    """Batches that were used are passed over, over the end of an epoch too."""
    job = Pretender()
    loop(job, lambda: [torch.tensor([i]) for i in range(3)], 9, resume="5")
    assert [int(b) for b in job.batches] == [2, 0, 1, 2] and job.steps == 9


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        ({"x": torch.zeros(6, 3), "ids": torch.zeros(6, 5, dtype=torch.long)}, (30, "tokens")),
        ({"label": torch.zeros(6, dtype=torch.long), "ids": torch.zeros(6, 5, dtype=torch.long)}, (6, "samples")),
        ((torch.zeros(6, 3), [torch.zeros(6, 5, dtype=torch.bool)]), (6, "samples")),
        (torch.zeros(7, 2), (7, "samples")),
        (torch.tensor(1.0), (1, "samples")),
    ],
)
def test_what_is_counted(batch: Any, wanted: tuple[int, str]) -> None:
    """Tokens where the first whole numbers are batch x tokens, else samples."""
    assert count(batch) == wanted


# --- schedule, evaluation, checkpoint -------------------------------------------------------------------

L = torch.optim.lr_scheduler
SCHEDULES = {
    "cosine, from the rate before": lambda o: L.CosineAnnealingLR(o, 20),
    "lambda": lambda o: L.LambdaLR(o, lambda k: 1 / (k + 1)),
    "two in a row": lambda o: L.SequentialLR(o, [L.LinearLR(o, 0.1, total_iters=4), L.ExponentialLR(o, 0.9)], [4]),
    "one cycle, momentum too": lambda o: L.OneCycleLR(o, 0.5, total_steps=40),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_where_it_stood(name: str, heard: list[Event]) -> None:
    """As in plain PyTorch without an interruption, whatever the checkpoint holds of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own schedulers warn when they step each other
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        plain = SCHEDULES[name](optimizer)
        wanted = []
        for _ in range(16):
            wanted.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            plain.step()
        loop(Pretender(), numbers, 7, schedule=SCHEDULES[name])
        loop(Pretender(), numbers, 16, schedule=SCHEDULES[name], resume="7")
    assert [e.fields["lr"] for e in heard if e.kind == "step"] == pytest.approx(wanted, rel=1e-12)


def test_evaluation_comes_when_asked_and_at_the_end(heard: list[Event]) -> None:
    """And everything before it has been told."""
    job = Pretender(device="cuda")
    outcome = loop(job, numbers, 7, evaluate=lambda: [1, 2, 3], evaluate_every=3, checkpoint="here")
    assert job.evaluated == [3, 6, 7] and outcome.evaluation == 3.0 and job.saved == [("here", 7)]
    kinds = [e.kind for e in heard if e.kind in ("step", "eval")]
    assert kinds == ["step"] * 3 + ["eval"] + ["step"] * 3 + ["eval"] + ["step"] + ["eval"]


def test_nothing_to_do_is_no_error(heard: list[Event]) -> None:
    """A run resumed at its end."""
    outcome = loop(Pretender(), numbers, 5, resume="5")
    assert outcome.steps == 5 and outcome.loss is None and outcome.per_s is None and heard[-1].kind == "end"


# --- who is to blame ------------------------------------------------------------------------------------

GLOO = "[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4567"


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("boom"), "raised"),
        (ConnectionResetError("Connection reset by peer"), "raised"),  # a data set's server, not a rank
        (RuntimeError(GLOO), "peer"),
        (raised_from(RuntimeError("the step failed"), RuntimeError(GLOO)), "peer"),
        (torch.distributed.DistNetworkError("failed to recv, got 0 bytes"), "peer"),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), "peer"),
        (MemoryError(), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "memory"),
        (raised_from(MeshError("no room"), MemoryError()), "memory"),
        (MeshError("too large"), "refused"),
        (raised_from(RankError("rank 1 failed in F1.0: ValueError: boom"), ValueError("boom")), "raised"),
        (Stopped(15), "signal"),
        (KeyboardInterrupt(), "signal"),
        (SystemExit(3), "exit"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_errors_are_told_apart(error: BaseException, kind: str) -> None:
    """A rank that lost another is not the cause; memory has its own advice."""
    assert kind_of(error) == kind
    assert from_event(0, 1.0, describe(error, 3)).kind == kind


def test_the_first_real_failure_is_the_cause() -> None:
    """By time among real ones; a lost peer only if there is nothing else."""
    lost = Failure(rank=0, time=1.0, kind="peer", message=GLOO)
    late, early = (Failure(rank=r, time=t, kind="raised", type="ValueError") for r, t in ((2, 5.0), (3, 4.0)))
    killed = from_exit(1, 4.5, -9, 7)
    assert culprit([lost, late, killed, early]) is early
    assert culprit([lost, killed]) is killed and culprit([lost]) is lost and culprit([]) is None
    told = verdict(killed, 4, [lost], [0, 2, 3], "rank1.log")
    text = str(told.error)
    assert told.code == 1 and "rank 1 of 4 was ended by SIGKILL" in text and "after step 7" in text
    assert "stopped  ranks 0, 2, 3" in text


@pytest.mark.parametrize(("step", "code"), [(None, 2), (3, 1)])
def test_a_refusal_before_the_first_step_has_its_own_exit_code(step: int | None, code: int) -> None:
    """A script can tell a wrong plan from a run that broke."""
    told = verdict(from_event(0, 0.0, describe(MeshError("too large", next="less"), step)), 2, [], [1], "log")
    assert told.code == code and isinstance(told.error, MeshError) and str(told.error) == "too large\n  next  less"


def test_a_place_is_read_from_the_environment() -> None:
    """RANK alone is some cluster's way to number machines."""
    assert RankPlace.of({}) is None and RankPlace.of({"RANK": "0", "WORLD_SIZE": "4"}) is None
    assert RankPlace.of({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}) == RankPlace(1, 4, False)
    with pytest.raises(MeshError, match="not numbers"):
        RankPlace.of({"RANK": "x", "LOCAL_RANK": "1", "WORLD_SIZE": "4"})


# --- what is shown ----------------------------------------------------------------------------------------


def story() -> Iterator[Event]:
    """A short run."""
    yield Event("phase", {"name": "capturing"})
    yield Event("start", {"steps": 3, "done": 0})
    for k in (1, 2, 3):
        fields = {"step": k, "loss": 4 / k, "grad_norm": 2.5, "lr": 0.001, "seconds": 2.0, "per_s": 5120.4}
        yield Event("step", {**fields, "unit": "tokens"})
        if k == 2:
            yield Event("eval", {"step": 2, "loss": 1.5})
    yield Event("end", {"ok": True})


def test_lines_show_first_and_last_step_and_what_happens() -> None:
    """In a log, not a line for every step."""
    out = io.StringIO()
    lines = Lines(out, every_s=1e9)
    for event in story():
        lines.on(event)
    lines.close()
    assert out.getvalue().splitlines() == [
        "step 1/3  loss 4  grad norm 2.5  lr 0.001",
        "step 2: evaluation loss 1.5",
        "step 3/3  loss 1.333  5,120 tokens/s  grad norm 2.5  lr 0.001  eta 0.0 s",
    ]
    out = io.StringIO()
    often = Lines(out, every_s=0)
    for event in story():
        often.on(event)
    assert "step 2/3  loss 2  5,120 tokens/s  grad norm 2.5  lr 0.001  eta 2.0 s" in out.getvalue()
    assert "capturing, 0 s so far" in out.getvalue()


def test_what_a_job_tried_out_is_one_line() -> None:
    """Which plan it trains with, or why nothing was measured."""
    rows = [{"plan": "free", "step_s": 0.0123}, {"plan": "data parallel", "step_s": 0.0111}]
    told = {"done": True, "taken": "data parallel", "seconds": 3.21, "rows": rows}
    said = State().on(Event("measured", told))
    assert said == "taken: data parallel (measured in 3.2 s: free 12.3 ms, data parallel 11.1 ms)"
    said = State().on(Event("measured", {"done": False, "why": "there is one rank"}))
    assert said == "finalists of the search were not measured: there is one rank"


def test_the_rest_of_the_time_leaves_out_the_first_step() -> None:
    """It is slow, and comes once."""
    state = State()
    state.on(Event("start", {"steps": 101, "done": 0}))
    state.on(Event("step", {"step": 1, "loss": 1.0, "seconds": 500.0}))
    assert state.eta_s is None
    state.on(Event("step", {"step": 2, "loss": 1.0, "seconds": 2.0}))
    assert state.eta_s == pytest.approx(198)


def test_a_bar_shows_the_numbers() -> None:
    """On a terminal."""
    from rich.console import Console

    out = io.StringIO()
    bar = Bar(Console(file=out, force_terminal=True, width=120))
    for event in story():
        bar.on(event)
    bar.close()
    for words in ("3/3", "loss 1.333", "5,120 tokens/s", "grad norm 2.5", "lr 0.001", "eta", "evaluation loss 1.5"):
        assert words in out.getvalue()


def test_the_summary_says_what_counts() -> None:
    """Final loss, time, throughput, where things are."""
    ended = {"steps": 50, "loss": 1.25, "seconds": 75.0, "per_s": 1234.5, "unit": "tokens", "evaluation": None}
    text = summary(ended, "runs/x", "here")
    assert "step 50 in 1:15: loss 1.25, 1,234 tokens/s" in text and "checkpoint     here" in text and "runs/x" in text
    assert [clock(s) for s in (4.24, 59.4, 65, 7200)] == ["4.2 s", "59 s", "1:05", "2:00:00"]


# --- metrics and callbacks --------------------------------------------------------------------------


class Measuring(Pretender):
    """Results and evaluations with metrics."""

    def step(self, batch: Any) -> Result:
        result = super().step(batch)
        result.metrics = {"accuracy": self.steps / 10}  # type: ignore[attr-defined]
        return result

    def evaluate(self, batches: Iterable[Any], metrics: Any = None) -> float:
        from laminar.train.batch.metrics import Evaluation

        return Evaluation(super().evaluate(batches), {name: f(None, None) for name, f in (metrics or {}).items()})


def test_metrics_are_told_with_steps_and_evaluations(heard: list[Event]) -> None:
    """As events, in the line that is shown, and at the end."""
    shown = io.StringIO()
    lines = Lines(shown, every_s=0.0)
    with events.listening(lines.on):
        outcome = loop(Measuring(), numbers, 2, evaluate=lambda: [1, 2], metrics={"top": lambda m, b: 0.25})
    assert [e.fields["metrics"] for e in heard if e.kind == "step"] == [{"accuracy": 0.1}, {"accuracy": 0.2}]
    assert [e.fields for e in heard if e.kind == "eval"] == [{"step": 2, "loss": 2.0, "metrics": {"top": 0.25}}]
    assert outcome.evaluation == 2.0 and type(outcome.evaluation) is float and outcome.metrics == {"top": 0.25}
    assert "loss 0.5  accuracy 0.2" in shown.getvalue() and "evaluation loss 2  top 0.25" in shown.getvalue()
    assert "loss 2  top 0.25" in summary(vars(outcome), "here", None)


def test_numbers_of_the_users_own_are_shown() -> None:
    """`job.log` in a callback stands beside the loss."""
    state = State()
    state.on(Event("log", {"step": 1, "values": {"f1": 0.75}}))
    state.on(Event("step", {"step": 1, "loss": 1.0, "seconds": 1.0}))
    assert "loss 1  f1 0.75" in state.numbers()


def test_callbacks_are_told_what_happens_and_may_end_a_run() -> None:
    """In the order of steps; a run that is ended early still evaluates, saves and says so."""
    told: list[Any] = []

    class Told(Callback):
        def begin(self, job: Any) -> None:
            told.append(("begin", job.steps))

        def before_step(self, job: Any, batch: Any) -> None:
            told.append(("before", job.steps))

        def after_step(self, job: Any, result: Any) -> bool:
            told.append(("after", result.number))
            return result.loss < 0.4

        def after_evaluation(self, job: Any, evaluation: Any) -> None:
            told.append(("evaluation", float(evaluation)))

        def end(self, job: Any, outcome: Any) -> None:
            told.append(("end", outcome.steps))

    seen: list[float] = []
    job = Pretender()
    outcome = loop(
        job,
        numbers,
        100,
        evaluate=lambda: [1],
        checkpoint="there",
        callbacks=[OnStep(lambda job, result: seen.append(result.loss)), Told()],
    )
    steps = [(what, k) for k in (1, 2, 3) for what, k in (("before", k - 1), ("after", k))]
    assert told == [("begin", 0), *steps, ("evaluation", 1.0), ("end", 3)]
    assert outcome.steps == 3 and job.saved == [("there", 3)] and seen == [1, 1 / 2, 1 / 3]


def test_what_a_user_is_shown_of_a_traceback_is_their_own() -> None:
    """Lines of ours before and between are for --debug; where all are ours, all are shown."""

    def data() -> Iterator[Any]:
        yield {}["missing"]

    try:
        list(DataPosition(data).batches())
    except KeyError as error:
        fields = describe(error, 3)
    found = from_event(1, 0.0, fields)
    assert "laminar/train/batch/position.py" in found.traceback.replace("\\", "/")
    assert "train/batch/position.py" not in found.shown and 'yield {}["missing"]' in found.shown
    told = verdict(found, 2, [], [0], "")
    assert told.traceback == found.shown and told.full == found.traceback and "KeyError: 'missing'" in str(told.error)
    ours = KeyError("nobody's")
    assert describe(ours, None)["shown"] == ""

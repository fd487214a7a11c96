"""Jobs whose plans have stages, on real ranks: the weights are those of plain PyTorch on one device."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar import Mesh
from laminar.cli import main
from laminar.errors import BatchError, LaminarError, MeshError, PlanError
from laminar.ir.timeline import Timeline
from laminar.placement.micro_batch import micro
from tests.support.marks import slow
from tests.support.pipeline_jobs import MICRO, STEPS, make, model, planned, same
from tests.support.rank_pool import Ranks
from tests.support.recorded_gpt import _batches, _loss
from tests.support.zoo import EXAMPLES


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2},
        {"stages": 2, "schedule": "gpipe"},
        {"stages": 2, "virtual": 2},
        {"stages": 2, "schedule": "zero-bubble"},
        {"stages": 2, "window": 2, "stash": 2.0},
        {"stages": ["blocks.1"], "window": None, "apart": True, "stash": 2.0},
    ],
    ids=str,
)
def test_two_stages_train_as_one_device(two: Ranks, options: dict[str, Any]) -> None:
    """Whatever the schedule, its window, virtual stages and parts; the embedding is the head, on two ranks at once."""
    held = same(two, True, options)
    whole = sum(p.numel() for p in model(True).parameters())
    assert all(count < whole for count in held)


@pytest.mark.slow
def test_stages_go_through_a_compiler_as_well(two: Ranks) -> None:
    """Parts of a stage as fused kernels: the weight's part apart, the head the embedding."""
    same(two, True, {"stages": 2, "schedule": "zero-bubble"}, compile=True)


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 4},
        slow({"stages": 2, "inner": Mesh({"dp": 2})}),
        {"stages": 2, "inner": Mesh({"tp": 2}), "window": 2, "stash": 2.0},
        {"stages": 2, "inner": partial(laminar.plans.zero, mesh=Mesh({"dp": 2}), stage=1)},
        {"stages": 2, "inner": [Mesh({"dp": 1}), Mesh({"tp": 3})]},
    ],
    ids=["4 stages", "data", "tensor", "zero1", "1 and 3 ranks"],
)
def test_stages_compose_with_plans_inside(four: Ranks, options: dict[str, Any]) -> None:
    """Data and tensor parallelism and ZeRO inside of stages; stages of different sizes; weights tied across them."""
    same(four, True, options)


def _averaged(folder: str) -> tuple[float, float]:
    """How far the moving average is from that of plain PyTorch, and after it was saved and taken up again."""
    made, other = model(True), model(True)
    options = {"batch": _batches(1)[0], "plan": planned(made, stages=2), "ema": 0.9}
    job = laminar.parallelize(made, _loss, make, **options)
    optimizer = make(other.parameters())
    average = {k: v.detach().clone().float() for k, v in other.named_parameters()}
    for batch in _batches(STEPS):
        job.step(batch)
        optimizer.zero_grad()
        _loss(other, batch).backward()
        optimizer.step()
        for k, v in other.named_parameters():
            average[k].lerp_(v.detach().float(), 0.1)
    found = job.state_dict(ema=True)
    job.save(folder)
    again = laminar.parallelize(model(True), _loss, make, **options)
    again.resume(folder)
    taken = again.state_dict(ema=True)
    off = [max(float((there[k] - average[k]).abs().max()) for k in average) for there in (found, taken)]
    job.close()
    again.close()
    return off[0], off[1]


def test_moving_averages_are_those_of_one_device(two: Ranks, tmp_path: Path) -> None:
    """Each place averages what it owns; weights tied across places are averaged at both."""
    for here, resumed in two.run(_averaged, str(tmp_path / "job")):
        assert here < 1e-6 and resumed < 1e-6


def _half(precision: str, stages: int) -> dict[str, Tensor]:
    made = model(True).float()
    options: dict[str, Any] = {"plan": planned(made, stages=stages)} if stages else {"micro_batches": MICRO}
    job = laminar.parallelize(made, _loss, make, batch=_batches(1)[0], precision=precision, device="cpu", **options)
    for batch in _batches(STEPS):
        job.step(batch)
    weights = job.state_dict()
    tied = made.embed.weight.detach().clone()  # empty where it is not held
    job.close()
    return {**weights, "tied": tied}


@pytest.mark.parametrize("precision", ["bf16-kahan", "bf16-stochastic"])
def test_weights_in_bfloat16_are_rounded_as_without_stages(two: Ranks, precision: str) -> None:
    """Draws depend on an element's place in the model, so copies of a tied weight stay the same at both places."""
    ranks = two.run(_half, precision, 2)
    alone = _half(precision, 0)
    assert all(t["tied"].dtype == torch.bfloat16 for t in ranks)
    assert ranks[0]["tied"].numel() and torch.equal(ranks[0]["tied"], ranks[1]["tied"])
    moved = model(True).float().state_dict()
    for name, want in alone.items():
        # The gradient of a key's bias is nothing but rounding, which Adam makes steps of.
        if name != "tied" and not name.endswith("k.bias"):
            got = ranks[0][name].float()
            far = (want.float() - moved[name].to(torch.bfloat16).float()).norm()
            assert (got - want.float()).norm() < 0.1 * far, name


def _ends_badly() -> str:
    made = model(False)
    job: Any = laminar.parallelize(made, _loss, make, batch=_batches(1)[0], plan=planned(made, stages=2), timeout_s=30)
    if job.rank == 1:

        def broken(pipe: Any) -> Any:
            raise ValueError("no sum today")

        job._reduced = broken
    try:
        job.step(_batches(1)[0])
    except Exception as error:
        return str(error)
    return "nothing went wrong"


def test_what_fails_behind_the_last_firing_is_named_on_every_rank() -> None:
    """Sums and updates are made while others are still at work: they must not wait for one that has failed."""
    ranks = Ranks(2)
    try:
        for said in ranks.run(_ends_badly):
            assert "rank 1 failed in the end of step 0: ValueError: no sum today" in said
    finally:
        ranks.stop()


def _wrong(which: str) -> str:
    made = model(False)
    batch = _batches(1)[0]
    options: dict[str, Any] = {"plan": planned(made, stages=3 if which == "ranks" else 2)}
    try:
        if which == "micro_batches":
            options["micro_batches"] = 2
        job = laminar.parallelize(made, _loss, make, batch=batch, **options)
        if which == "few":
            job.step({k: v[:3] for k, v in batch.items()})
    except LaminarError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


@pytest.mark.parametrize(
    ("which", "kind", "words"),
    [
        ("ranks", MeshError, "start 3 processes"),
        ("micro_batches", LaminarError, "micro_batches does not go with"),
        ("few", BatchError, "3 samples can't make 4 micro-batches"),
    ],
)
def test_what_stages_can_not_do_is_refused_by_name(two: Ranks, which: str, kind: type, words: str) -> None:
    """An error says what is wrong and what to do, on every rank."""
    for said in two.run(_wrong, which):
        assert said.startswith(kind.__name__) and words in said


def _state() -> tuple[list[float], list[float], str, str, str]:
    """Losses before and behind saving, of the job that went on and of one that began from what was saved."""
    made, batches = model(True), _batches(4)
    options: dict[str, Any] = {"plan": planned(made, stages=2), "batch": batches[0]}
    job = laminar.parallelize(made, _loss, make, **options)
    for batch in batches[:2]:
        job.step(batch)
    weights, optimizer, saved = job.state_dict(), job.optimizer_state_dict(), job.hash()
    went_on = [job.step(batch).loss for batch in batches[2:]]
    other = laminar.parallelize(model(True), _loss, make, **options)
    other.load_state_dict(weights)
    other.load_optimizer_state_dict(optimizer)
    other.state.steps = 2  # how many steps were made is part of the hash, and in no state dict
    loaded = other.hash()
    again = [other.step(batch).loss for batch in batches[2:]]
    same = "same" if job.hash() == other.hash() else "different"
    job.close()
    other.close()
    return went_on, again, saved, loaded, same


def test_state_goes_out_whole_and_comes_back(two: Ranks) -> None:
    """Weights and optimizer state in plain PyTorch's formats: a job made of them goes on bit for bit."""
    for went_on, again, saved, loaded, same_end in two.run(_state):
        assert went_on == again and saved == loaded and same_end == "same"


def _evaluated() -> tuple[float, float, float, float]:
    """Loss of an evaluation, of one on other shapes, of a step on another shape, and of the whole model given back."""
    made, (first, second) = model(False), _batches(2)
    job = laminar.parallelize(made, _loss, make, batch=first, plan=planned(made, stages=2))
    four = {k: v[:4] for k, v in second.items()}
    out = job.evaluate([first, second]), job.evaluate([four]), job.step(four).loss
    whole = job.model
    with torch.no_grad():
        last = float(_loss(whole, first))
    job.close()
    return (*out, last)


def test_evaluation_goes_through_the_stages_and_shapes_may_change(two: Ranks) -> None:
    """The same losses as one device, at any size that makes equal micro-batches; the whole model can be had back."""
    made, (first, second) = model(False), _batches(2)
    four = {k: v[:4] for k, v in second.items()}
    with torch.no_grad():
        wanted = [
            float(_loss(made, first) + _loss(made, second)) / 2,
            float(_loss(made, four)),
            float(_loss(made, four)),
        ]
    optimizer = make(made.parameters())
    _loss(made, four).backward()
    optimizer.step()
    with torch.no_grad():
        wanted.append(float(_loss(made, first)))
    for said in two.run(_evaluated):
        assert list(said) == pytest.approx(wanted, rel=1e-9)


def _recorded() -> tuple[Timeline, int, int]:
    """Three steps, and when they began and ended by the clock that ranks of one machine share."""
    made = model(False)
    job = laminar.parallelize(made, _loss, make, batch=_batches(1)[0], plan=planned(made, stages=2))
    job.step(_batches(1)[0])
    begun = time.perf_counter_ns()
    with job.timeline() as t:
        for batch in _batches(3):
            job.step(batch)
    ended = time.perf_counter_ns()
    job.close()
    return t.timeline, begun, ended


def test_a_pipeline_is_recorded_firing_by_firing(two: Ranks) -> None:
    """Each rank's parts, once for each micro-batch, what it waited for, and the update; the path visits both ranks."""
    each = two.run(_recorded)
    found, (_, begun, ended) = each[0][0], zip(*each, strict=True)
    for rank in (0, 1):
        mine = [s for s in found.spans if s.rank == rank]
        assert all(a.end <= b.start for a, b in itertools.pairwise(mine))
        names = [s.name for s in mine if s.kind == "compute"]
        assert [n for n in names if n[0] in "FB"] == [
            n for n in names if n in {f"{p}{rank}.{k}" for p in "FB" for k in range(MICRO)}
        ]
        assert sum(n[0] in "FB" for n in names) == 2 * MICRO and "optimizer" in names
    for before, span in itertools.pairwise(found.spans):
        if before.kind == "wait" and before.rank == span.rank == 1 and "queue F0->F1" in before.cause:
            assert (found.spans[span.because].name, found.spans[span.because].rank) == (f"F0.{span.name[3:]}", 0)
    assert {s.rank for s in found.critical_path()} == {0, 1}
    assert 0 < found.step_ns < max(ended) - min(begun)


class Normed(nn.Module):
    """A net with batch statistics in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


def test_ops_that_couple_samples_are_refused_by_name() -> None:
    """Micro-batches would have other statistics than the batch; whoever wants that says so."""
    graph = laminar.capture(Normed(), lambda m, x: m(x).square().mean(), torch.randn(4, 8))
    with pytest.raises(PlanError, match="batch_norm couples the samples"):
        laminar.plans.pipeline(graph, 2, 4)
    assert len(laminar.plans.pipeline(graph, 2, 4, couple="microbatch").stages) == 2
    assert len(laminar.plans.pipeline(graph, 2, 1).stages) == 2


class Pictured(nn.Module):
    """Batch statistics that one sample has, too, of its pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


class Centred(Normed):
    """The mean over samples taken away."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y - y.mean(0))


def _squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_ops_that_couple_samples_are_refused_though_a_micro_batch_has_one() -> None:
    """One sample has nothing to be mixed with; the batch that it is a part of has."""
    graph = laminar.capture(Pictured(), _squared, torch.randn(4, 1, 8, 8))
    alone = laminar.capture(Pictured(), _squared, torch.randn(1, 1, 8, 8))
    for one in (micro(graph, 2), micro(graph, 4), alone):
        with pytest.raises(PlanError, match="batch_norm couples the samples"):
            laminar.plans.pipeline(one, 2, 4)
        assert len(laminar.plans.pipeline(one, 2, 4, couple="microbatch").stages) == 2


def _alone() -> str:
    made, batch = Centred(), torch.randn(2, 8)
    plan = laminar.plans.pipeline(laminar.capture(made, _squared, batch[:1]), 2, 2)
    try:
        laminar.parallelize(made, _squared, make, batch=batch, plan=plan)
    except LaminarError as error:
        return str(error)
    return "nothing"


def test_a_job_looks_at_two_samples_where_a_micro_batch_has_one(two: Ranks) -> None:
    """A graph of one sample can't show what its samples have to do with each other."""
    for said in two.run(_alone):
        assert "couples the samples of a batch" in said


def test_a_staged_plan_is_planned_verified_and_trained_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan to a file, explain it, compare it with one device, train with as many ranks as it has."""
    recipe, plan = str(EXAMPLES / "gpt.py:tiny"), str(tmp_path / "plan.json")
    assert main(["plan", recipe, "--stages", "2", "--micro-batches", "2", "-o", plan]) == 0
    assert "stage 1 at place 1" in capsys.readouterr().out
    assert main(["explain", plan]) == 0
    assert "2 micro-batches, 1f1b, fixed order" in capsys.readouterr().out
    assert main(["verify", recipe, "--plan", plan]) == 0
    assert capsys.readouterr().out.startswith("equal")
    command = [sys.executable, "-m", "laminar", "train", recipe, "--plan", plan, "--steps", "3", "--json"]
    done = subprocess.run([*command, "--run-dir", str(tmp_path / "run")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["laminar_staged_plan"] == 1


def test_a_rank_that_dies_in_a_pipeline_is_named(tmp_path: Path) -> None:
    """The others wait for its parts; the run ends with one error that says who is gone, and nothing is left running."""
    recipe, plan, run = str(EXAMPLES / "gpt.py:tiny"), str(tmp_path / "plan.json"), tmp_path / "run"
    assert main(["plan", recipe, "--stages", "2", "--micro-batches", "2", "-o", plan]) == 0
    command = [sys.executable, "-m", "laminar", "train", recipe, "--plan", plan, "--steps", "100000"]
    process = subprocess.Popen(
        [*command, "--run-dir", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        stop = time.monotonic() + 120
        seen = run / "events.rank1.jsonl"
        while time.monotonic() < stop and not (seen.exists() and '"step"' in seen.read_text()):
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [c for c in children if b"RANK=1" in Path(f"/proc/{c}/environ").read_bytes().split(b"\0")]
        assert len(ranks) == 1
        os.kill(int(ranks[0]), signal.SIGKILL)
        _, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "rank 1" in err and "SIGKILL" in err

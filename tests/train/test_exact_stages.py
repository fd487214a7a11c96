"""Exact mode with stages: one hash for any hosting of any stage's units, which is the hash without stages."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from laminar.errors import LaminarError, StateError
from laminar.ir.exact import Exact, Hosting
from laminar.runtime.check.processes import on_ranks
from laminar.train.auto.rebalance import Rebalance
from laminar.train.job.verify_exact import ExactTrial, verify_trial
from laminar.train.options import JobOptions
from tests.support.exact_runs import ExactRun, hashes, make_job, on_processes, plain
from tests.support.odd_model import odd
from tests.support.seeds import dice
from tests.support.zoo import one_thread, recipe

ODD = str(Path(__file__).parents[1] / "support" / "odd_model.py") + ":odd"
UNTIED = ODD.replace(":odd", ":odd_untied")
CALM = JobOptions(check=False)
TWO = replace(CALM, micro_batches=2, clip_norm=0.5)
GPT = ExactRun("gpt.py:tiny", Exact(2, stages=2), options=TWO)
CASES = {
    "gpt": GPT,
    "a stranger's": ExactRun(UNTIED, Exact(2, stages=3), options=TWO),
}
SLOW = {
    "a stranger's, tied": ExactRun(ODD, Exact(2, stages=2), options=TWO),
    "batch norm": ExactRun("resnet.py:tiny", Exact(2, stages=3), options=TWO, optimizer="SGD"),
    "three stages": ExactRun("gpt.py:tiny", Exact(4, stages=3), options=replace(CALM, ema=0.9)),
    "three micro-batches": ExactRun(ODD, Exact(1, stages=3), options=replace(CALM, micro_batches=3)),
    "slices": ExactRun("gpt.py:tiny", Exact(2, 2, stages=2), options=TWO),
    "sequences cut": ExactRun("gpt.py:tiny", Exact(1, context=2, stages=2), options=TWO),
    "sums in integers": replace(GPT, exact=Exact(2, stages=2, sums="integers")),
    "moe": ExactRun("moe.py:tiny", Exact(4, stages=2), options=TWO),
    "moe slices": ExactRun("moe.py:tiny", Exact(2, 2, stages=3)),
    "t5": ExactRun("t5.py:tiny", Exact(2, stages=2), options=TWO, optimizer="Adagrad"),
    "bf16": replace(GPT, options=replace(TWO, precision="bf16")),
    "bf16 rounded by chance": replace(GPT, options=replace(TWO, precision="bf16-stochastic")),
    "fp16": replace(GPT, options=replace(TWO, precision="fp16")),
    "a tied head": ExactRun("llama.py:tiny", Exact(2, stages=2), options=TWO),
    "two threads": replace(GPT, exact=Exact(2, threads=2, stages=2)),
}
EACH = [*CASES.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOW.items())]
TYING = ("a stranger's, tied", "three micro-batches", "a tied head")
"""Runs whose stages share a weight."""


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*mixes the samples of a batch")  # statistics see one micro-batch
        yield


@pytest.mark.parametrize(("name", "run"), EACH)
def test_any_hosting_of_stages_gives_one_hash(name: str, run: ExactRun) -> None:
    """Parts of weights and state, each process with some units of any stage, and others from step to step.

    It is the hash of as many units and micro-batches without stages, where stages share no weight.
    """
    want = hashes(plain(run))
    assert len(set(want)) == run.steps
    if name not in TYING:
        assert hashes(plain(replace(run, exact=replace(run.exact, stages=1)))) == want
    ranks = run.exact.ranks
    moving = (Hosting.drawn(ranks, 2, 1), Hosting.even(ranks, 2), Hosting.drawn(ranks, 2, 7))
    assert on_processes(replace(run, storage="zero3", hostings=moving), 2) == want


@pytest.mark.slow
@pytest.mark.parametrize(("storage", "processes"), [("data", 2), ("zero1", 3), ("data", 4), ("zero3", 3), ("zero3", 4)])
@pytest.mark.parametrize("model", ["gpt.py:tiny", ODD], ids=["gpt", "odd"])
def test_more_processes_and_other_storage(model: str, storage: str, processes: int) -> None:
    run = ExactRun(model, Exact(2, stages=3), options=replace(TWO, ema=0.9), storage=storage)
    chance = dice(f"stages {model} {storage} {processes}")
    hostings = tuple(Hosting.drawn(6, processes, chance.randrange(1000)) for _ in range(2))
    want = hashes(plain(run))
    assert on_processes(run, processes) == on_processes(replace(run, hostings=hostings), processes) == want


@pytest.mark.slow
def test_a_stage_each_and_no_unit_more() -> None:
    """As many processes as stages, of one unit: what is left is a plain pipeline."""
    run = replace(GPT, exact=Exact(1, stages=3), storage="zero3")
    assert on_processes(run, 3) == hashes(plain(run)) == hashes(plain(replace(run, exact=Exact(1))))


def bytes_held(run: ExactRun) -> dict[str, int]:
    return make_job(run).memory()


@pytest.mark.slow
def test_a_process_has_gradients_of_its_stages_and_parts_of_all_weights() -> None:
    run = replace(GPT, storage="zero3")
    alone, each = bytes_held(run), on_ranks(2, bytes_held, run)
    assert sum(m["gradients"] for m in each) == alone["gradients"]
    assert all(m["gradients"] < 0.8 * alone["gradients"] for m in each)
    assert all(m["parameters"] < 0.6 * alone["parameters"] for m in each)


@pytest.mark.slow
def test_fewer_processes_in_the_middle() -> None:
    run = replace(GPT, steps=4, storage="zero3", resized=((1, 2), (3, 1)))
    assert on_processes(run, 3) == hashes(plain(run))


@pytest.mark.slow
def test_a_run_goes_on_elsewhere(tmp_path: Path) -> None:
    run = ExactRun(ODD, Exact(2, stages=2), options=TWO, steps=4)
    at = str(tmp_path / "saved")
    first = on_processes(replace(run, steps=2, storage="zero3", save=at), 3)
    second = on_processes(replace(run, steps=2, storage="zero1", load=at, hostings=(Hosting((1, 0, 0, 1)),)), 2)
    assert first + second == hashes(run)


def test_where_a_model_was_cut_is_saved_and_refused_when_other(tmp_path: Path) -> None:
    run = replace(GPT, steps=1, exact=Exact(1, stages=2), options=CALM)
    hashes(replace(run, save=str(tmp_path)))
    with pytest.raises(StateError, match="stages, cut"):
        hashes(replace(run, exact=Exact(1, stages=3), load=str(tmp_path)))


def test_the_first_batch_is_checked_and_evaluation_gives_the_same_bits() -> None:
    run = replace(GPT, options=replace(TWO, check=True), exact=Exact(2, stages=3), steps=1)
    staged, alone = make_job(run), make_job(replace(run, exact=Exact(2)))
    data = list(itertools.islice(recipe(run.model).data(), 2))
    assert float(staged.evaluate(data)).hex() == float(alone.evaluate(data)).hex()
    assert float(staged.step(data[0]).loss).hex() == float(alone.step(data[0]).loss).hex()


def test_a_flipped_bit_is_seen_by_the_same_comparison() -> None:
    run = replace(GPT, steps=2)
    want, got = hashes(run), hashes(replace(run, flip=0))
    assert got[0] != want[0] and got[1] != want[1]


def test_units_of_stages_are_not_moved_by_speed() -> None:
    with pytest.raises(LaminarError, match="stages"):
        Rebalance().begin(make_job(replace(GPT, steps=1)))


def spoil_a_gradient_s_term(job: object, step: int) -> None:
    """One bit of one weight, on one of several processes."""
    if job.world > 1 and job.rank == 1 and step == 1:  # type: ignore[attr-defined]
        weight = job.state.held[sorted(job.state.held)[-1]]  # type: ignore[attr-defined]
        weight.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)


@pytest.mark.slow
def test_a_difference_is_traced_to_its_step_op_and_tensor() -> None:
    trial = ExactTrial(odd, Exact(2, stages=2), 3, TWO, 2, spoil_a_gradient_s_term)
    report = verify_trial(trial, 200)
    assert not report.ok and report.step == 2 and report.rank is not None
    assert report.hashes[0] == report.others[0] and report.hashes[1] != report.others[1]
    assert report.op.startswith(("aten.", "laminar.", "box.")) and report.tensor.startswith("%")


LONG = {
    "gpt": (ExactRun("gpt.py:tiny", Exact(4, stages=2), options=TWO), 4),
    "a stranger's": (ExactRun(ODD, Exact(2, stages=3), options=TWO), 3),
    "t5": (ExactRun("t5.py:tiny", Exact(2, stages=2), optimizer="Adagrad"), 2),
    "batch norm": (ExactRun("resnet.py:tiny", Exact(2, stages=2), options=replace(CALM, micro_batches=2)), 3),
    "moe slices bf16": (
        ExactRun("moe.py:tiny", Exact(2, 2, stages=2), options=replace(CALM, precision="bf16")),
        3,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_one_hash_after_two_hundred_steps(name: str, tmp_path: Path) -> None:
    """Under hostings and storage by chance, and a restart at a step by chance on another number of processes."""
    run, most = LONG[name]
    chance = dice(f"exact stages {name}")
    want = hashes(replace(run, steps=200))
    steps, processes = chance.randrange(20, 180), [chance.randint(1, most), most]
    chance.shuffle(processes)
    found: list[str] = []
    for count, at in zip((steps, 200 - steps), processes, strict=True):
        hostings = tuple(Hosting.drawn(run.exact.ranks, at, chance.randrange(100)) for _ in range(2))
        part = replace(run, steps=count, storage=chance.choice(("data", "zero1", "zero3")), hostings=hostings)
        found += on_processes(replace(part, save=str(tmp_path), load=str(tmp_path) if found else ""), at)
    assert found == want

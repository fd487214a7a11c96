"""Exact mode: one hash after every step, whatever hosts the work, whatever is stored where, whenever either changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import laminar
from laminar.errors import LaminarError, MeshError, OptimizerError, PlanError, StateError
from laminar.ir.exact import Exact, Hosting
from laminar.train.options import JobOptions
from tests.support.exact_runs import ExactRun, hashes, make_job, on_processes, plain
from tests.support.seeds import dice
from tests.support.zoo import one_thread

CALM = JobOptions(check=False)
GPT = ExactRun("gpt.py:tiny")
CASES = {
    "gpt": GPT,
    "batch norm": ExactRun("resnet.py:tiny"),
    "slices": ExactRun("gpt.py:tiny", Exact(2, 2)),
    "bf16": replace(GPT, options=replace(CALM, precision="bf16")),
    "bf16 rounded by chance": replace(GPT, options=replace(CALM, precision="bf16-stochastic")),
    "micro-batches": replace(GPT, exact=Exact(2), options=replace(CALM, micro_batches=2)),
    "sequences in parts": ExactRun("gpt.py:tiny", Exact(2, context=2)),
    "integers": ExactRun("gpt.py:tiny", Exact(4, sums="integers")),
    "two threads": replace(GPT, exact=Exact(4, threads=2)),
}
SLOW = {
    "momentum": replace(GPT, optimizer="SGD"),
    "clip and average": replace(GPT, options=replace(CALM, clip_norm=0.5, ema=0.9)),
    "fp16": replace(GPT, options=replace(CALM, precision="fp16")),
    "dlrm": ExactRun("dlrm.py:tiny", optimizer="Adagrad"),
    "moe": ExactRun("moe.py:tiny"),
    "t5": ExactRun("t5.py:tiny"),
    "lstm": ExactRun("lstm.py:tiny", optimizer="RMSprop"),
    "unet": ExactRun("unet.py:tiny"),
    "llama": ExactRun("llama.py:tiny", Exact(2, 2)),
    "bert": ExactRun("bert.py:tiny", optimizer="NAdam"),
    "t5 in parts": ExactRun("t5.py:tiny", Exact(2, context=2)),
    "llama in parts and slices": ExactRun("llama.py:tiny", Exact(1, 2, context=2)),
    "moe in parts": ExactRun("moe.py:tiny", Exact(2, context=2), options=replace(CALM, precision="bf16")),
    "integers of fp16": ExactRun(
        "gpt.py:tiny", Exact(4, sums="integers"), options=replace(CALM, precision="fp16", clip_norm=1.0)
    ),
    "integers of slices": ExactRun(
        "moe.py:tiny", Exact(2, 2, sums="integers"), options=replace(CALM, precision="bf16")
    ),
    "integers of batch norm": ExactRun("resnet.py:tiny", Exact(3, sums="integers")),
    "integers of parts": ExactRun("t5.py:tiny", Exact(2, context=2, sums="integers")),
    "bf16 slices": ExactRun("moe.py:tiny", Exact(2, 2), options=replace(CALM, precision="bf16")),
}
EACH = [*CASES.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOW.items())]


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.mark.parametrize(("name", "run"), EACH)
def test_two_processes_give_the_hash_of_one(name: str, run: ExactRun) -> None:
    """Pieces of weights and state, hostings that scatter units and change from step to step."""
    want = hashes(plain(run))
    assert len(set(want)) == run.steps
    ranks = run.exact.ranks
    moving = (Hosting.drawn(ranks, 2, 1), Hosting.even(ranks, 2), Hosting.drawn(ranks, 2, 7))
    assert on_processes(replace(run, storage="zero3", hostings=moving), 2) == want


MORE = [("zero1", 3), *(pytest.param(s, n, marks=pytest.mark.slow) for s, n in (("data", 4), ("zero3", 3)))]


@pytest.mark.parametrize(("storage", "processes"), MORE)
def test_more_processes_and_other_storage(storage: str, processes: int) -> None:
    run = replace(GPT, options=replace(CALM, clip_norm=0.5, ema=0.9))
    assert on_processes(replace(run, storage=storage), processes) == hashes(plain(run))


def test_fewer_processes_in_the_middle() -> None:
    run = replace(GPT, steps=4, storage="zero3", options=replace(CALM, ema=0.9), resized=((1, 2), (3, 1)))
    assert on_processes(run, 3) == hashes(plain(run))


def test_a_run_goes_on_elsewhere(tmp_path: Path) -> None:
    want = hashes(replace(GPT, steps=4))
    at = str(tmp_path / "saved")
    first = on_processes(replace(GPT, steps=2, storage="zero3", save=at), 3)
    second = on_processes(replace(GPT, steps=2, storage="zero1", load=at), 2)
    assert first + second == want


def test_a_flipped_bit_is_seen_by_the_same_comparison() -> None:
    want, got = hashes(GPT), hashes(replace(GPT, flip=1))
    assert got[0] == want[0] and got[1] != want[1] and got[2] != want[2]


def test_another_identity_has_another_hash() -> None:
    runs = [
        GPT,
        replace(GPT, exact=Exact(2)),
        replace(GPT, exact=Exact(2, 2)),
        replace(GPT, exact=Exact(2, context=2)),
        replace(GPT, exact=Exact(4, sums="integers")),
        replace(GPT, options=replace(CALM, seed=1)),
    ]
    assert len({hashes(replace(r, steps=1))[0].split()[0] for r in runs}) == len(runs)


def test_the_first_batch_is_checked_against_the_model_itself() -> None:
    assert hashes(replace(GPT, options=JobOptions(check=True))) == hashes(GPT)


def test_evaluation_gives_the_same_bits() -> None:
    job = make_job(GPT)
    batches = [b for _, b in zip(range(3), laminar.load_recipe("examples/gpt.py:tiny").data(), strict=False)]
    whole = job.evaluate(batches)
    job.rehost(Hosting.even(4, 1))
    assert float(job.evaluate(batches)).hex() == float(whole).hex()


def test_what_belongs_to_a_run_is_saved_and_refused_when_other(tmp_path: Path) -> None:
    hashes(replace(GPT, steps=1, save=str(tmp_path)))
    with pytest.raises(StateError, match="units") as error:
        hashes(replace(GPT, exact=Exact(2), load=str(tmp_path)))
    assert "units 2" in str(error.value) and "units 4" in str(error.value)


def test_what_a_run_did_not_say_yet_when_it_was_saved_is_as_it_was() -> None:
    job = make_job(GPT)
    job.refuse_saved({k: v for k, v in job.identity.items() if k not in ("context", "sums", "stages")})
    with pytest.raises(StateError, match="sums"):
        job.refuse_saved({**job.identity, "sums": "integers"})


def step_of(**how: object) -> object:
    model = nn.Linear(8, 4)
    x = torch.randn(8, 8)
    optimizer = how.pop("optimizer", lambda ps: torch.optim.SGD(ps, lr=0.1))
    job = laminar.parallelize(model, lambda m, b: m(b).square().mean(), optimizer, batch=x, exact="units=4", **how)
    return job.step(x)


def test_a_front_door() -> None:
    assert step_of().loss > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"plan": "tensor"}, "slices"),
        ({"plan": "ddp"}, "what processes store"),
        ({"mesh": laminar.Mesh({"dp": 1})}, "mesh does not go with exact mode"),
        ({"detect_anomaly": True}, "detect_anomaly"),
        ({"cluster": "8xh100"}, "leave it out"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(how: dict[str, object], says: str) -> None:
    with pytest.raises((LaminarError, PlanError), match=says):
        step_of(**how)


@pytest.mark.parametrize(
    ("model", "context", "says"),
    [
        ("unet.py:tiny", 2, "sequences of 1 tokens can't"),
        ("dlrm.py:tiny", 2, "does not split"),
        ("gpt.py:tiny", 64, "fewer"),
    ],
)
def test_sequences_that_can_t_be_split_are_refused_by_name(model: str, context: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make_job(ExactRun(model, Exact(2, context=context)))


def test_an_optimizer_that_computes_the_loss_itself_is_refused() -> None:
    with pytest.raises(OptimizerError, match="exact mode"):
        step_of(optimizer=lambda ps: torch.optim.LBFGS(ps))


def test_optimizers_that_are_not_elementwise_work_on_whole_weights_only() -> None:
    run = replace(GPT, optimizer="Adafactor", steps=2)
    assert on_processes(run, 2) == hashes(run)
    with pytest.raises(LaminarError, match="Adafactor"):
        on_processes(replace(run, storage="zero1"), 2)


def test_too_many_processes_are_refused_with_the_number_that_can_be_used() -> None:
    with pytest.raises(LaminarError, match="at most 2 processes"):
        on_processes(replace(GPT, exact=Exact(2)), 3)


def test_a_share_of_the_batch_is_refused() -> None:
    job = make_job(GPT)
    batch = next(iter(laminar.load_recipe("examples/gpt.py:tiny").data()))
    with pytest.raises(LaminarError, match="global batch"):
        job.step(laminar.Local(batch))
    with pytest.raises(LaminarError, match="timeline"):
        job.timeline()
    with pytest.raises(MeshError, match="1 to 1"):
        job.resize(2)


LONG = {
    "gpt": (ExactRun("gpt.py:tiny", Exact(8)), 5),
    "moe slices": (ExactRun("moe.py:tiny", Exact(4, 2)), 3),
    "batch norm": (ExactRun("resnet.py:tiny", Exact(4)), 3),
    "dlrm bf16": (ExactRun("dlrm.py:tiny", Exact(4), options=replace(CALM, precision="bf16")), 2),
    "t5": (ExactRun("t5.py:tiny", Exact(4), optimizer="Adagrad"), 2),
    "gpt micro-batches": (replace(GPT, exact=Exact(2), options=replace(CALM, micro_batches=2, clip_norm=1.0)), 2),
    "gpt in integers": (ExactRun("gpt.py:tiny", Exact(8, sums="integers")), 5),
    "batch norm in integers": (ExactRun("resnet.py:tiny", Exact(4, sums="integers")), 3),
    "gpt in parts": (ExactRun("gpt.py:tiny", Exact(4, context=2)), 5),
    "gpt in parts and slices": (ExactRun("gpt.py:tiny", Exact(2, 2, context=2)), 3),
    "gpt on eight": (ExactRun("gpt.py:tiny", Exact(8)), 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_one_hash_after_two_hundred_steps(name: str, tmp_path: Path) -> None:
    """Under hostings by chance, storage by chance, and a restart at a step by chance on another number of processes."""
    run, most = LONG[name]
    chance = dice(f"exact {name}")
    want = hashes(replace(run, steps=200))
    steps, storage, processes = chance.randrange(20, 180), ("data", "zero1", "zero3"), [chance.randint(1, most), most]
    chance.shuffle(processes)
    found: list[str] = []
    for count, at in zip((steps, 200 - steps), processes, strict=True):
        hostings = tuple(Hosting.drawn(run.exact.ranks, at, chance.randrange(100)) for _ in range(2))
        part = replace(run, steps=count, storage=chance.choice(storage), hostings=hostings, save=str(tmp_path),
                       load=str(tmp_path) if found else "")  # fmt: skip
        found += on_processes(part, at)
    assert found == want

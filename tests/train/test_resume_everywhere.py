"""A run that was saved and resumed equals one that was not interrupted, in every set-up; pipelines in any other cut."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.train.job.ddp_job import DdpJob
from laminar.train.job.job import Job
from laminar.train.job.pipeline_job import StagedJob
from laminar.train.loop import loop
from laminar.train.options import JobOptions
from tests.support import pipeline_jobs
from tests.support.rank_pool import Ranks
from tests.support.recorded_gpt import _batches, _loss
from tests.support.small_job import batches, gap, mean, net, plain

L = torch.optim.lr_scheduler
PRECISIONS = ("f32", "bf16", "fp16", "bf16-kahan", "bf16-stochastic")


class Dropping(nn.Module):
    """Dropout, batch norm, and data drawn from torch's global generator beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def drawn() -> Any:
    """Batches from the global generator, so that resuming has to put it back, or draw them again."""
    for _ in range(4):
        yield {"x": torch.randn(8, 8), "y": torch.randint(4, (8,))}


SETUPS: dict[str, dict[str, Any]] = {
    **{f"{p}": {"precision": p} for p in PRECISIONS},
    **{f"{p}, average, scheduler": {"precision": p, "ema": 0.9, "schedule": "cosine"} for p in PRECISIONS},
    "zero3": {"plan": "zero3"},
    "zero1, average, clip": {"plan": "zero1", "ema": 0.9, "clip_norm": 0.1},
    "tensor, bf16": {"plan": "tensor", "precision": "bf16"},
    "micro-batches": {"micro_batches": 2},
    "evaluation between": {"evaluate": True},
    "one cycle": {"schedule": "one cycle", "ema": 0.5},
    "plateau by hand": {"schedule": "warm restarts"},
    "ddp": {"plan": "ddp"},
    "ddp, fp16, average": {"plan": "ddp", "precision": "fp16", "ema": 0.9},
    "ddp, evaluation, scheduler": {"plan": "ddp", "evaluate": True, "schedule": "cosine"},
    "momentum": {"optimizer": "SGD"},
    "adagrad, zero1": {"optimizer": "Adagrad", "plan": "zero1"},
}
SCHEDULES = {
    "cosine": lambda o: L.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: L.OneCycleLR(o, 0.05, total_steps=12),
    "warm restarts": lambda o: L.CosineAnnealingWarmRestarts(o, 3),
}
OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}


def cut_off() -> Any:
    """The same, until somebody stumbles after the fourth step."""
    yield from drawn()
    raise RuntimeError("pulled the plug")


def trained(how: dict[str, Any], store: str | None = None, resume: str | None = None, data: Any = drawn) -> str:
    """The root after six steps, with a checkpoint after the third."""
    how = dict(how)
    plan, schedule = how.pop("plan", "data"), how.pop("schedule", None)
    evaluate, optimizer = how.pop("evaluate", False), OPTIMIZERS[how.pop("optimizer", "AdamW")]
    torch.manual_seed(3)
    model = Dropping()
    batch = {"x": torch.randn(8, 8), "y": torch.randint(4, (8,))}
    options = JobOptions(device="cpu", check=False, **how)
    if plan == "ddp":
        with pytest.warns(UserWarning, match="ddp"):
            job: Any = DdpJob(model, loss, optimizer, batch, options)
    else:
        job = Job(model, loss, optimizer, batch, plan, options)
    torch.manual_seed(11)
    loop(
        job,
        data,
        6,
        schedule=SCHEDULES[schedule] if schedule else None,
        evaluate=drawn if evaluate else None,
        evaluate_every=2 if evaluate else 0,
        checkpoint=store,
        checkpoint_every=3,
        resume=resume,
    )
    root = str(job.hash())
    job.close()
    return root


SAMPLE = ("fp16, average, scheduler", "zero1, average, clip", "evaluation between", "ddp, fp16, average")
"""Looked at in every run of the tests; the others in those that take longer."""


@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in SETUPS])
@pytest.mark.filterwarnings("ignore:micro_batches=2")
def test_a_run_that_was_cut_off_equals_one_that_was_not(name: str, tmp_path: Path) -> None:
    """Bit for bit; whatever draws, averages, scales, schedules or evaluations there are."""
    how, store = SETUPS[name], str(tmp_path)
    whole = trained(how)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        trained(how, store, data=cut_off)
    assert trained(how, store, store) == whole


def cut(options: dict[str, Any]) -> Any:
    """A pipeline of a GPT with a tied head."""
    inner = {
        "data": laminar.Mesh({"dp": 2}),
        "zero3": partial(laminar.plans.zero, mesh=laminar.Mesh({"dp": 2}), stage=3),
    }
    inner["tensor"] = laminar.Mesh({"tp": 2})
    micro = options.get("microbatches", pipeline_jobs.MICRO)
    first = {k: v[: len(v) // micro] for k, v in _batches(1)[0].items()}
    graph = laminar.capture(pipeline_jobs.model(True), _loss, first)
    given = {"microbatches": micro, **options, "inner": inner.get(options.get("inner", ""))}
    return laminar.plans.pipeline(graph, **given)


def of_gpt(plan: Any) -> Any:
    model = pipeline_jobs.model(True)
    options = JobOptions(device="cpu", check=False)
    if isinstance(plan, dict):
        return StagedJob(model, _loss, pipeline_jobs.make, _batches(1)[0], cut(plan), options)
    return Job(model, _loss, pipeline_jobs.make, _batches(1)[0], plan, options)


def _steps_and_save(plan: Any, store: str) -> list[str]:
    job = of_gpt(plan)
    for batch in _batches(2):
        job.step(batch)
    job.save(store)
    found = [job.hash(), job.savers[store].last.ref.root]
    job.close()
    return found


def _goes_on(plan: Any, store: str) -> list[Any]:
    job = of_gpt(plan)
    job.resume(store)
    root = job.hash()
    for batch in _batches(4)[2:]:
        job.step(batch)
    other = pipeline_jobs.model(True)
    plain(other, _loss, pipeline_jobs.make(other.parameters()), _batches(4))
    apart = gap(job.state_dict(), other.state_dict())
    job.close()
    return [root, apart]


TWO = [{"stages": 2}, {"stages": ["blocks.1"]}, {"stages": 2, "virtual": 2}, "zero3", "tensor", "data"]
FOUR = [{"stages": 4}, {"stages": 2, "inner": "zero3"}, {"stages": 2, "inner": "tensor"}, "zero3", "tensor"]


def _between(saving: Ranks, save: Any, loading: Ranks, loads: list[Any], store: str) -> None:
    roots = {root for found in saving.run(_steps_and_save, save, store) for root in found}
    assert len(roots) == 1
    for plan in loads:
        for root, apart in loading.run(_goes_on, plan, store):
            assert {root} == roots and apart < 1e-9, plan


def test_a_pipeline_goes_on_as_any_other_plan(two: Ranks, tmp_path: Path) -> None:
    _between(two, TWO[0], two, [TWO[2], "zero3"], str(tmp_path / "a"))
    _between(two, "tensor", two, [TWO[1]], str(tmp_path / "b"))


@pytest.mark.slow
@pytest.mark.parametrize("save", range(len(FOUR)))
def test_four_ranks_and_two_in_every_plan(save: int, two: Ranks, four: Ranks, tmp_path: Path) -> None:
    """Stages, shards, tensor parallel and whole: each checkpoint loads into each other layout."""
    _between(four, FOUR[save], four, FOUR, str(tmp_path / "a"))
    _between(four, FOUR[save], two, TWO, str(tmp_path / "b"))
    if save < len(TWO):
        _between(two, TWO[save], four, FOUR, str(tmp_path / "c"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    """Saved by one number of ranks, in ZeRO 3 and tensor parallel; loaded by each other."""
    pools = {n: Ranks(n) for n in (1, 2, 3, 4, 8)}
    try:
        for plan in ("zero3", "tensor"):
            store = str(tmp_path / plan)
            roots = {root for found in pools[ranks].run(_small_saved, plan, store) for root in found}
            assert len(roots) == 1
            for pool in pools.values():
                for other in ("data", "zero1", "zero3", "tensor"):
                    assert set(pool.run(_small_loaded, other, store)) == roots
    finally:
        for pool in pools.values():
            pool.stop()


def _small(plan: str) -> Job:
    model = net()
    options = JobOptions(device="cpu", ema=0.9, check=False)
    return Job(model, mean, torch.optim.AdamW(model.parameters(), 1e-2), batches(1)[0], plan, options)


def _small_saved(plan: str, store: str) -> list[str]:
    job = _small(plan)
    for batch in batches(2):
        job.step(batch)
    job.save(store)
    found = [job.hash(), job.savers[store].last.ref.root]  # type: ignore[union-attr]
    job.close()
    return found


def _small_loaded(plan: str, store: str) -> str:
    job = _small(plan)
    job.resume(store)
    root = job.hash()
    job.close()
    return root

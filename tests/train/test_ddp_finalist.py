"""torch's own data parallel as a finalist: taken where it is fastest and does the same, and nobody is touched by it.

Functions whose names begin with an underscore are what a rank does.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.capture.capture import capture
from laminar.ir.plans.plan import Plan, runs_ddp
from laminar.planner.search.finalists import DDP, Finalist, finalists
from laminar.runtime.check.probe_rules import probe
from laminar.train.auto import ddp_fits, interleaved_timing, plan_search, try_finalists
from laminar.train.job.ddp_job import DdpJob
from laminar.train.job.job import Job
from laminar.train.optimizer.precision import Precision
from laminar.train.options import JobOptions
from laminar.train.world import World
from tests.support.rank_pool import Ranks
from tests.support.small_job import adamw, batches, gap, plain
from tests.support.tryout_cases import _bits


class Chain(nn.Module):
    """Ids to logits, each sample by itself; with a buffer that nobody writes."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 16), nn.Linear(16, 37)
        self.between = nn.Sequential(*between)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.between(self.embed(ids).flatten(0, 1)) * self.scale)


def chain(*between: nn.Module) -> Chain:
    torch.manual_seed(0)
    return Chain(*between).double()


def counted(model: nn.Module, batch: Any) -> laminar.Loss:
    """Sum and count of the labels that count."""
    logits, target = model(batch["ids"]), batch["target"].flatten()
    return laminar.Loss(F.cross_entropy(logits, target, ignore_index=-100, reduction="sum"), (target != -100).sum())


def mean_of_labels(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["target"].flatten())


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["ids"]).square().mean()


def contrast(model: nn.Module, batch: Any) -> Tensor:
    x = model(batch["ids"])
    return (x @ x.t()).logsumexp(0).mean()


def _hooked() -> Chain:
    model = chain()
    model.head.register_forward_hook(lambda module, given, made: None)
    return model


def _unreached() -> Chain:
    model = chain()
    model.other = nn.Linear(2, 2)
    return model


# --- whether it does the same ------------------------------------------------------------------

FITS: dict[str, tuple[Any, Any, str, str]] = {
    "a total and its weight": (chain, counted, "f32", ""),
    "a mean over samples": (chain, squares, "f32", ""),
    "labels that may be left out": (chain, mean_of_labels, "f32", "mean over labels"),
    "dropout": (lambda: chain(nn.Dropout(0.1)), squares, "f32", "draws random numbers"),
    "batch norm": (lambda: chain(nn.BatchNorm1d(16)), squares, "f32", "writes buffers"),
    "batch norm without statistics": (
        lambda: chain(nn.BatchNorm1d(16, track_running_stats=False)),
        squares,
        "f32",
        "mixes the samples",
    ),
    "samples that are compared": (chain, contrast, "f32", "mixes the samples"),
    "hooks": (_hooked, squares, "f32", "hooks of head"),
    "a parameter that is not reached": (_unreached, squares, "f32", "other.weight gets no gradient"),
    "rounding of its own": (chain, squares, "bf16-kahan", "no precision bf16-kahan"),
}


@pytest.mark.parametrize("name", FITS)
def test_only_what_comes_to_the_same_may_be_taken(name: str) -> None:
    """Whoever asks for the fastest plan has not asked for another training."""
    make, loss, precision, why = FITS[name]
    model = make()
    graph = probe(capture(model, loss, batches(1)[0], wide=True))
    found = ddp_fits.why_not(graph, Precision.of(precision), model)
    assert (why in found) if why else found == ""


def _searched(loss: Any) -> plan_search.Searched:
    graph = probe(capture(chain(), loss, batches(1)[0], wide=True))
    plan = laminar.plan(graph, "2xcpu", budget_s=0.2, only="data,tensor,zero")
    assert isinstance(plan, Plan)
    sides = [f for f in finalists(plan) if isinstance(f.plan, Plan)]
    return plan_search.with_ddp(plan_search.Searched(plan, sides, 0.0), chain(), Precision.of("f32"))


def test_it_is_the_last_finalist_or_it_is_said_why_it_is_none() -> None:
    """Its mark goes to other ranks with it; plans with a name are finalists too, each once."""
    found = _searched(counted)
    assert found.finals[-1].name == DDP and not found.left_out
    assert [runs_ddp(f.plan) for f in found.finals] == [False] * (len(found.finals) - 1) + [True]
    assert runs_ddp(Finalist.from_json(found.finals[-1].to_json()).plan)
    hashes = [f.plan.hash for f in found.finals[:-1]]
    assert len(set(hashes)) == len(hashes)
    none = _searched(mean_of_labels)
    assert DDP not in [f.name for f in none.finals] and "mean over labels" in none.left_out[DDP]


# --- jobs --------------------------------------------------------------------------------------


def _took(ddp_s: float) -> Any:
    return mock.patch.object(
        interleaved_timing, "_took", lambda job, b, calls: (ddp_s if job.program is None else 1.0, "")
    )


def _front_door(ddp_s: float, folder: str, uneven: bool) -> dict[str, Any]:
    data = batches(4, holes=uneven)
    model = chain()
    other = copy.deepcopy(model)
    drawn = torch.get_rng_state()
    with _took(ddp_s), mock.patch.object(try_finalists, "TOO_SLOW", 100.0):
        job = laminar.parallelize(
            model, counted, adamw(model), batch=data[0], cluster="2xcpu", micro_batches=2, clip_norm=0.5, device="cpu"
        )
    same = torch.equal(drawn, torch.get_rng_state())
    losses = [job.step(b).loss for b in data[:2]]
    job.save(f"{folder}/saved")
    losses += [job.step(b).loss for b in data[2:]]

    def clip() -> None:
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)

    want = plain(other, counted, adamw(other), data, clip)
    away = gap(dict(job.state_dict()), dict(other.state_dict()))
    if job.rank == 0:
        job.plan.save(f"{folder}/plan.json")
    laminar_again = chain()
    again = laminar.parallelize(
        laminar_again,
        counted,
        adamw(laminar_again),
        batch=data[0],
        plan=_met(job, f"{folder}/plan.json"),
        micro_batches=2,
        clip_norm=0.5,
        device="cpu",
    )
    again.resume(f"{folder}/saved")
    resumed = [again.step(b).loss for b in data[2:]]
    return {
        "kind": type(job).__name__,
        "again": type(again).__name__,
        "account": job.plan.account,
        "drawn": same,
        "losses": max(abs(a - b) for a, b in zip(losses, want, strict=True)),
        "weights": away,
        "resumed": max(abs(a - b) for a, b in zip(resumed, losses[2:], strict=True)),
        "text": job.plan.explain(),
        "evaluation": abs(float(job.evaluate(data[:1])) - float(again.evaluate(data[:1]))),
    }


def _met(job: Any, path: str) -> str:
    torch.distributed.barrier()
    assert Path(path).exists()
    return path


@pytest.mark.parametrize("uneven", [False, True])
def test_the_fastest_is_taken_and_trains_the_same(two: Ranks, tmp_path: Path, uneven: bool) -> None:
    """By front door: weights as of a plain loop, with clipping and micro-batches; checkpoints; the file of its plan."""
    for found in two.run(_front_door, 0.5, str(tmp_path), uneven):
        assert found["kind"] == found["again"] == DdpJob.__name__
        assert found["account"]["runs"] == "ddp" and found["drawn"]
        (row,) = [r for r in found["account"]["measured"]["rows"] if r["taken"]]
        assert row["plan"] == DDP and row["ratio"] == 0.5
        assert f"* {DDP}" in found["text"] and "2.000 times as fast as the predicted best" in found["text"]
        assert max(found["losses"], found["weights"], found["resumed"], found["evaluation"]) < 1e-9


def test_where_it_is_slower_it_is_not(two: Ranks, tmp_path: Path) -> None:
    """The same, with a plan of ours."""
    for found in two.run(_front_door, 2.0, str(tmp_path), True):
        assert found["kind"] == found["again"] == Job.__name__ and "runs" not in found["account"]
        assert DDP in [r["plan"] for r in found["account"]["measured"]["rows"]]
        assert max(found["losses"], found["weights"], found["resumed"], found["evaluation"]) < 1e-9


def _told(loss: Any, watched: bool, far: float) -> str:
    model, data = chain(), batches(1)
    with mock.patch.object(try_finalists, "TOO_SLOW", far):
        job = laminar.parallelize(
            model, loss, adamw(model), batch=data[0], cluster="2xcpu", device="cpu", detect_anomaly=watched
        )
    account = job.plan.account
    if "unmeasured" in account:
        return str(account["unmeasured"])
    return next(str(o["why"]) for o in account["measured"]["out"] if o["plan"] == DDP)


def test_why_it_is_none_stands_in_the_account(two: Ranks) -> None:
    """Of the model, or of what was asked for; also where nothing is tried at all."""
    assert all("mean over labels" in why for why in two.run(_told, mean_of_labels, False, 100.0))
    assert all("anomalies" in why for why in two.run(_told, counted, True, 100.0))
    for why in two.run(_told, mean_of_labels, False, 0.5):
        assert "% slower" in why and f"{DDP}: the loss is a mean over labels" in why


def _untouched(found: plan_search.Searched) -> tuple[list[str], list[Any]]:
    model, data = chain(), batches(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    counted(model, data[1]).total.backward()
    optimizer.step()
    before = _bits(model, optimizer)
    with mock.patch.object(try_finalists, "FINALIST_TURN_S", 0.02), mock.patch.object(try_finalists, "TOO_SLOW", 100.0):
        taken = try_finalists.tried_finalists(
            World("cpu"),
            found.plan,
            found.finals,
            model,
            counted,
            optimizer,
            data[0],
            options=JobOptions(clip_norm=1.0),
        )
    after = _bits(model, optimizer)
    counted(model, data[0])  # it may be run again
    return [k for k in before if before[k] != after.get(k)], taken.account["measured"]["rows"]


def test_trying_it_out_touches_nothing(two: Ranks) -> None:
    """Weights, gradients, state, hooks and draws are the same bits in the same places, and DDP has really run."""
    for changed, rows in two.run(_untouched, _searched(counted)):
        assert not changed and DDP in [r["plan"] for r in rows]


def test_a_loss_that_knows_the_model_does_not_run_it() -> None:
    """DDP runs the loss in every step, not only while the model is captured."""
    model, (batch,) = chain(), batches(1)
    own, trains = try_finalists.job_copies(model, adamw(model))
    plan = _searched(counted).finals[-1].plan
    options = JobOptions(device="cpu")
    job = try_finalists.CopiedDdp(model, own, lambda given, b: counted(model, b), trains, batch, options, plan)
    with pytest.raises(laminar.LaminarError, match="the loss runs the model that it knows"):
        job.step(batch)
    job.close()
    counted(model, batch)


def test_its_file_is_refused_for_a_model_that_it_no_longer_fits() -> None:
    """A plan places any model with these parameters; DDP would quietly train this one otherwise."""
    plan, (batch,) = _searched(counted).finals[-1].plan, batches(1)
    for model, options, why in (
        (chain(nn.Dropout(0.5)), {}, "draws random numbers"),
        (chain(), {"detect_anomaly": True}, "anomalies"),
        (chain(), {"precision": "bf16-kahan"}, "no precision bf16-kahan"),
    ):
        with pytest.raises(laminar.LaminarError, match=why):
            laminar.parallelize(model, counted, adamw(model), batch=batch, plan=plan, device="cpu", **options)


def _other_batches() -> str:
    model, data = chain(), batches(2)
    with _took(0.5), mock.patch.object(try_finalists, "TOO_SLOW", 100.0):
        job = laminar.parallelize(model, counted, adamw(model), batch=data[0], cluster="2xcpu", device="cpu")
    job.peers.patience_s = 5.0
    assert isinstance(job, DdpJob)
    try:
        job.step(data[job.rank])
    except laminar.LaminarError as error:
        return str(error)
    return ""


def test_ranks_with_other_batches_are_told(two: Ranks) -> None:
    """As in a job of any other plan: who asked for the fastest has not asked for less care."""
    assert any("batch" in said for said in two.run(_other_batches))

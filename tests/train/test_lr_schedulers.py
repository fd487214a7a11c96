"""Schedulers that users step themselves: a job that is resumed goes on as if it had not stopped."""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as lr
from torch import Tensor, nn

import laminar
from laminar.errors import StateError

KINDS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: lr.CosineAnnealingLR(o, 12),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 5),
    "one cycle": lambda o: lr.OneCycleLR(o, max_lr=0.3, total_steps=14),
    "milestones": lambda o: lr.MultiStepLR(o, [3, 7], gamma=0.1),
    "lambda": lambda o: lr.LambdaLR(o, lambda k: 1 / (1 + k)),
    "cyclic": lambda o: lr.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=4, cycle_momentum=True),
    "sequence": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o, 0.1, 4), lr.ExponentialLR(o, 0.8)], milestones=[4]),
    "chain": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.1, 4), lr.ExponentialLR(o, 0.8)], o),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=1, factor=0.5),
}


def made(schedule: Callable[[Any], Any] | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = schedule(optimizer) if schedule else None
    return laminar.parallelize(model, squared, optimizer, batch=batch(0), device="cpu"), scheduler


def squared(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batch(k: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(k)).double()


def train(job: Any, scheduler: Any, steps: range) -> list[float]:
    rates = []
    for k in steps:
        loss = job.step(batch(k)).loss
        with warnings.catch_warnings():  # torch looks for a call of optimizer.step
            warnings.simplefilter("ignore")
            scheduler.step(*([loss * (k % 3)] if isinstance(scheduler, lr.ReduceLROnPlateau) else []))
        rates.append(job.optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("kind", [k if k == "cosine" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_a_scheduler_goes_on_where_it_stood(kind: str, tmp_path: Path) -> None:
    """It was begun anew, at the rate of the checkpoint: neither the old schedule nor a new one."""
    gc.collect()
    job, scheduler = made(KINDS[kind])
    want = train(job, scheduler, range(12))
    weights = copy.deepcopy(job.state_dict())
    job, scheduler = made(KINDS[kind])
    first = train(job, scheduler, range(6))
    job.save(tmp_path)
    job, scheduler = made(KINDS[kind])
    job.resume(tmp_path)
    assert first + train(job, scheduler, range(6, 12)) == pytest.approx(want, rel=1e-12)
    assert all(torch.equal(a, weights[n]) for n, a in job.state_dict().items())


def test_a_scheduler_that_is_made_afterwards_is_told_where_it_stands(tmp_path: Path) -> None:
    """In torch's own way; a job that is resumed without one says that there was one."""
    job, scheduler = made(KINDS["cosine"])
    want = train(job, scheduler, range(12))
    job, scheduler = made(KINDS["cosine"])
    train(job, scheduler, range(6))
    job.save(tmp_path)
    job, _ = made(None)
    with pytest.warns(UserWarning, match=r"state of a CosineAnnealingLR(.|\n)*last_epoch=job.steps - 1"):
        job.resume(tmp_path)
    later = lr.CosineAnnealingLR(job.optimizer, 12, last_epoch=job.steps - 1)
    assert train(job, later, range(6, 12)) == pytest.approx(want[6:], rel=1e-9)


def test_schedulers_that_can_not_be_told_apart_are_named(tmp_path: Path) -> None:
    """Two of a kind; and one that is not torch's."""

    class Own:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.count = optimizer, 0

        def step(self) -> None:
            self.count += 1
            self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.count)

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    job, two = made(lambda o: [lr.ExponentialLR(o, 0.9), lr.ExponentialLR(o, 0.8)])
    job.save(tmp_path)
    with pytest.raises(StateError, match=r"2 x ExponentialLR(.|\n)*scheduler="):
        job.resume(tmp_path)
    job.resume(tmp_path, scheduler=two)
    with pytest.raises(StateError, match="2 schedulers, 1 are named"):
        job.resume(tmp_path, scheduler=two[0])
    job, own = made(Own)
    train(job, own, range(3))
    job.save(tmp_path / "own", scheduler=own)
    job, own = made(Own)
    job.resume(tmp_path / "own", scheduler=own)
    assert own.count == 3 and math.isclose(train(job, own, range(3, 4))[0], 0.1 / 5)
    job, _ = made(KINDS["cosine"])
    with pytest.raises(StateError, match=r"saved with Own, and this optimizer has CosineAnnealingLR"):
        job.resume(tmp_path / "own")

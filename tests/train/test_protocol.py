"""All kinds of jobs are what `parallelize` says that it returns.

That they are assignable to `TrainingJob` is checked by mypy, in `laminar/api.py`: it returns one of each.
"""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest

import laminar
from laminar.train.job.ddp_job import DdpJob
from laminar.train.job.job import Job
from laminar.train.job.pipeline_job import StagedJob
from laminar.train.protocol import TrainingJob
from laminar.train.state.state import JobState
from tests.support import pipeline_jobs
from tests.support.rank_pool import Ranks
from tests.support.recorded_gpt import _batches, _loss

MEMBERS = sorted(n for c in TrainingJob.__mro__ for n in vars(c) if not n.startswith("_") and c.__name__ != "Generic")
"""What the protocol has."""


def kinds(stages: bool) -> list[Any]:
    """A job of each kind that can be made here, by `parallelize`."""
    plans: list[Any] = ["data", "ddp"]
    made = [pipeline_jobs.model(False) for _ in range(3)]
    if stages:
        plans.append(pipeline_jobs.planned(made[2]))
    return [
        laminar.parallelize(m, _loss, pipeline_jobs.make, batch=_batches(1)[0], plan=p, check=False, ema=0.9)
        for m, p in zip(made, plans, strict=False)
    ]


def _kinds() -> list[tuple[str, bool, bool, bool]]:
    found = []
    for job in kinds(True):
        job.step(_batches(1)[0])
        job.log(number=1.0)
        parts = isinstance(job.state, JobState) and job.recorder.loader is job.loader
        found.append((type(job).__name__, isinstance(job, TrainingJob), parts, job.hash() == job.hash()))
    return found


@pytest.mark.filterwarnings("ignore:plan=")
def test_jobs_of_every_kind_satisfy_the_protocol(two: Ranks) -> None:
    """At run time: every member is there, and the parts are parts."""
    for found in two.run(_kinds):
        assert found == [(c.__name__, True, True, True) for c in (Job, DdpJob, StagedJob)]


@pytest.mark.parametrize("kind", [Job, StagedJob, DdpJob])
@pytest.mark.parametrize("name", [n for n in MEMBERS if inspect.isfunction(getattr(TrainingJob, n, None))])
def test_methods_take_what_the_protocol_says(kind: type, name: str) -> None:
    """Parameters have the same names, order and defaults."""
    want = inspect.signature(getattr(TrainingJob, name)).parameters
    have = inspect.signature(getattr(kind, name)).parameters
    assert [(p.name, p.kind, p.default) for p in have.values()] == [(p.name, p.kind, p.default) for p in want.values()]


def test_parallelize_is_annotated_to_return_it() -> None:
    """Whoever types against a job gets this."""
    assert inspect.signature(laminar.parallelize).return_annotation == TrainingJob.__name__
    assert typing.get_type_hints(Job)["plan"] is laminar.Plan

"""Jobs in stores of checkpoints: saved in any layout, beside the steps, and gone on from in any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from laminar.checkpoint.history.references import list_refs
from laminar.checkpoint.read.verify import latest_valid
from laminar.checkpoint.store.uri import open_store
from laminar.train.job.job import Job
from laminar.train.options import JobOptions
from tests.support.rank_pool import Ranks
from tests.support.small_job import adamw, batches, gap, mean, net

OPTIONS = JobOptions(device="cpu", ema=0.9, check=False)


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


def job(plan: Any = "data", seed: int = 0) -> Job:
    model = net(seed)
    return Job(model, mean, adamw(model), batches(1)[0], plan, OPTIONS)


def test_a_job_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    data, one = batches(6), job()
    for batch in data[:3]:
        one.step(batch)
    one.save(tmp_path)
    saved = one.hash()
    for batch in data[3:]:
        one.step(batch)
    two = job(seed=7)
    two.resume(tmp_path)
    assert two.hash() == saved and two.steps == 3
    for batch in data[3:]:
        two.step(batch)
    assert two.hash() == one.hash()
    assert latest_valid(open_store(tmp_path), list_refs(open_store(tmp_path)).refs[0].run).ref is not None


LAYOUTS = ["data", "zero1", "zero3", "tensor"]


def _saved(plan: str, where: str, steps: int = 2) -> tuple[str, str]:
    here = job(plan)
    for batch in batches(steps):
        here.step(batch)
    here.save(where)
    return here.hash(), here.savers[where].last.ref.root


def _resumed(plan: str, where: str) -> tuple[str, float]:
    here = job(plan, seed=9)
    here.resume(where)
    root = here.hash()
    for batch in batches(4)[2:]:
        here.step(batch)
    return root, gap(here.state_dict(), plain_weights())


def plain_weights() -> dict[str, torch.Tensor]:
    from tests.support.small_job import plain

    model = net()
    plain(model, mean, adamw(model), batches(4))
    return model.state_dict()


@pytest.mark.parametrize("plan", ["zero3", *(pytest.param(p, marks=pytest.mark.slow) for p in LAYOUTS if p != "zero3")])
def test_a_checkpoint_of_any_layout_loads_into_any_other(plan: str, two: Ranks, three: Ranks, tmp_path: Path) -> None:
    """One root: the job's own, the checkpoint's, and of every job that has resumed from it."""
    roots = {root for pair in two.run(_saved, plan, str(tmp_path)) for root in pair}
    assert len(roots) == 1
    for ranks in (two, three):
        for other in LAYOUTS:
            for root, apart in ranks.run(_resumed, other, str(tmp_path)):
                assert {root} == roots and apart < 1e-9
    assert _resumed("data", str(tmp_path))[0] in roots

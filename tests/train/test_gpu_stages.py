"""Stages on a GPU: two ranks share it, and what passes between them goes through memory of the host.

Not covered: NCCL, which refuses two ranks on one GPU; the order of its calls is tested elsewhere on a stand-in.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import laminar
from tests.support.pipeline_jobs import make, model, planned, same
from tests.support.rank_pool import Ranks
from tests.support.recorded_gpt import _batches, _loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("compile", [False, None])
@pytest.mark.parametrize(
    "options",
    [{"stages": 2}, {"stages": 2, "virtual": 2}, {"stages": 2, "schedule": "zero-bubble", "window": 2, "stash": 2.0}],
    ids=str,
)
def test_two_stages_on_one_gpu_train_as_one_device(two: Ranks, options: dict[str, Any], compile: bool | None) -> None:
    """Line by line and through Inductor; the head is the embedding, so its gradients are added up across stages."""
    same(two, True, options, device="cuda", compile=compile)


def test_a_pipeline_inside_of_which_ranks_reduce(two: Ranks) -> None:
    """One place of two ranks, several micro-batches: actors with collectives of CUDA tensors inside."""
    same(two, False, {"stages": 1, "inner": laminar.Mesh({"dp": 2})}, device="cuda")


def _rest() -> tuple[float, float, list[float], list[float], bool, int]:
    """Evaluation, a recorded step, and state that goes out and comes back."""
    made, batches = model(True), _batches(4)
    one = copy.deepcopy(made).eval()
    options: dict[str, Any] = {"plan": planned(made, stages=2), "batch": batches[0], "device": "cuda"}
    job = laminar.parallelize(made, _loss, make, **options)
    with torch.no_grad():
        want = sum(float(_loss(one, b)) for b in batches[:2]) / 2
    got = job.evaluate(batches[:2])
    with job.timeline() as t:
        for batch in batches[:2]:
            job.step(batch)
    weights, optimizer = job.state_dict(), job.optimizer_state_dict()
    went_on = [job.step(batch).loss for batch in batches[2:]]
    other = laminar.parallelize(model(True), _loss, make, **options)
    other.load_state_dict(weights)
    other.load_optimizer_state_dict(optimizer)
    again = [other.step(batch).loss for batch in batches[2:]]
    spans = sum(s.name[0] in "FB" for s in t.timeline.spans)
    on_gpu = all(w.is_cuda for w in weights.values())
    job.close()
    other.close()
    return want, got, went_on, again, on_gpu, spans


def test_evaluation_recording_and_state_on_a_gpu(two: Ranks) -> None:
    """As on CPU ranks."""
    for want, got, went_on, again, on_gpu, spans in two.run(_rest):
        assert got == pytest.approx(want, rel=1e-9)
        assert went_on == again and on_gpu and spans > 0

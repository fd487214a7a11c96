"""Exact mode on one GPU: the same hash alone and on two processes that share it, any hosting, any storage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laminar.ir.exact import Exact, Hosting
from laminar.train.options import JobOptions
from tests.support.exact_runs import ExactRun, on_processes, plain

pytestmark = pytest.mark.gpu

CALM = JobOptions(check=False, device="cuda")
GPT = ExactRun("gpt.py:tiny", options=CALM)
CASES = {
    "gpt": GPT,
    "slices": replace(GPT, exact=Exact(2, 2)),
    "bf16": replace(GPT, options=replace(CALM, precision="bf16")),
    "moe": replace(GPT, model="moe.py:tiny"),
    "batch norm": replace(GPT, model="resnet.py:tiny"),
    "llama": replace(GPT, model="llama.py:tiny", optimizer="SGD"),
}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_the_hash_of_one(name: str) -> None:
    run = CASES[name]
    want = on_processes(plain(run), 1)
    moving = (Hosting.drawn(run.exact.ranks, 2, 1), Hosting.even(run.exact.ranks, 2))
    for storage in ("data", "zero3"):
        assert on_processes(replace(run, storage=storage, hostings=moving), 2) == want

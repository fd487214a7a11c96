"""Sequences split by token among logical ranks: the same bits however those are hosted.

A program is for a logical mesh, so where each stretch begins, and what its kernels are given, is settled by the mesh
alone. Covered: one stretch and several for each logical rank, one sequence and three, one process to four, scattered
hostings. Not covered: another logical mesh, which cuts otherwise and is another job.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import laminar
from laminar import Mesh
from laminar.capture.tensor_bytes import as_bytes
from laminar.ir.exact import Hosting
from laminar.lower.lower import lower
from tests.lower.test_token_split import gpt
from tests.support.hosted_runs import run_hosted
from tests.support.zoo import captured, one_thread


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(("tokens", "batch", "stretches"), [(64, 1, 1), (64, 3, 2), (50, 1, 1)])
def test_any_hosting_of_stretches_gives_the_same_bits(tokens: int, batch: int, stretches: int) -> None:
    """Loss and gradients of four logical ranks, and near to one device's numbers."""
    one = captured(gpt(tokens, batch))
    plan = laminar.plans.context_parallel(one.graph, Mesh({"cp": 4}), stretches=stretches)
    program = lower(one.graph, plan)
    assert any(i.op == "laminar.attention_backward_at" for i in program.instrs)
    (first,) = run_hosted(program, Hosting.even(4, 1), one.inputs, one.constants, stacks=False)
    want = first[0]
    for key, value in want.items():
        torch.testing.assert_close(value, one.want[key], rtol=1e-3, atol=1e-5)
    hostings = [Hosting.even(4, n) for n in (1, 2, 3, 4)] + [Hosting.drawn(4, n, seed) for n, seed in ((2, 5), (3, 1))]
    for hosting in hostings:
        for host in run_hosted(program, hosting, one.inputs, one.constants):
            for out in host:
                different = [k for k in want if not torch.equal(as_bytes(out[k]), as_bytes(want[k]))]
                assert not different, hosting.processes

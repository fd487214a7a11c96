"""Recompute on real ranks: a job whose plan recomputes blocks trains to the same bits as one whose plan keeps all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import laminar
from laminar import Mesh
from laminar.api import micro_batches
from tests.support.marks import slow
from tests.support.rank_pool import Ranks
from tests.support.recompute_job import MICRO, SAMPLES, Net, batches, loss


def _plan(graph: Any, mesh: Mesh, what: str, recompute: tuple[str, ...]) -> Any:
    if what.startswith("zero"):
        return laminar.plans.zero(graph, mesh, int(what[4:]), recompute=recompute)
    return getattr(laminar.plans, what)(graph, mesh, recompute=recompute)


def _train(what: str, recompute: tuple[str, ...], parts: int) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of steps on batches of two sizes, the weights behind them, and how many lines of a step run again."""
    torch.manual_seed(0)
    made = Net()
    mesh = Mesh({"tp" if what == "tensor_parallel" else "dp": 2})
    plan = partial(_plan, what=what, recompute=recompute)
    job = laminar.parallelize(
        made,
        loss,
        partial(torch.optim.AdamW, lr=1e-2),
        batch=batches([SAMPLES])[0],
        plan=plan,
        mesh=mesh,
        micro_batches=parts,
    )
    losses = [job.step(b).loss for b in batches([SAMPLES, SAMPLES, SAMPLES // 2])]
    programs = [ready.program for ready in job.engine._ready.values()]
    again = min(sum(i.phase == "recompute" for i in p.instrs) for p in programs)
    weights = job.state_dict()
    job.close()
    return losses, weights, again


def _staged(schedule: str, recompute: tuple[str, ...]) -> tuple[list[float], dict[str, Tensor]]:
    """The same through two stages."""
    torch.manual_seed(0)
    made, some = Net(), batches([SAMPLES] * 3)
    graph = laminar.capture(made, loss, micro_batches(some[0], MICRO)[0])
    plan = laminar.plans.pipeline(graph, 2, MICRO, schedule=schedule, recompute=recompute)
    job = laminar.parallelize(made, loss, partial(torch.optim.AdamW, lr=1e-2), batch=some[0], plan=plan)
    losses = [job.step(b).loss for b in some]
    weights = job.state_dict()
    job.close()
    return losses, weights


def equal(want: Any, got: Any) -> None:
    """Losses and weights, bit by bit."""
    assert want[0] == got[0] and len(set(want[0])) == len(want[0])
    assert want[1].keys() == got[1].keys()
    for name, w in want[1].items():
        assert torch.equal(w, got[1][name]), name


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("data_parallel", 2),
        ("zero3", 1),
        ("tensor_parallel", 1),
        *[slow(w, 1) for w in ("data_parallel", "zero1")],
    ],
)
def test_two_ranks_train_to_the_same_bits(two: Ranks, what: str, parts: int) -> None:
    """Losses and weights after steps on two sizes of batches, with dropout, in float32."""
    plain, again = (two.run(_train, what, patterns, parts) for patterns in ((), ("blocks.*",)))
    for want, got in zip(plain, again, strict=True):
        equal(want, got)
        assert want[2] == 0 and got[2] >= 4 * 4


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_two_stages_train_to_the_same_bits(two: Ranks, schedule: str) -> None:
    """Micro-batches under way at the same time, each with its own draws, blocks recomputed in backward."""
    plain, again = (two.run(_staged, schedule, patterns) for patterns in ((), ("blocks.*",)))
    for want, got in zip(plain, again, strict=True):
        equal(want, got)

"""Ranks notice that they are not doing the same: other batches at any step, another change of the model.

Nothing that is noticed late may be a hang: the first rank to see it says which step, which rank, which value.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar.train.batch.batch_checksum import SOME, Sampled
from tests.support.rank_pool import Ranks


class Net(nn.Module):
    """Two layers and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.tau = nn.Linear(4, 8), nn.Linear(8, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) * self.tau


def _loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _job(plan: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net()
    if plan == "stages":
        plan = laminar.plans.pipeline(laminar.capture(model, _loss, torch.randn(4, 4)), 2, microbatches=2)
    return model, laminar.parallelize(
        model,
        _loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch=torch.randn(8, 4),
        plan=plan,
        device="cpu",
        **options,
    )


def _shuffled(plan: str, local: bool) -> int:
    """From the fifth step on every rank has data of its own."""
    _, job = _job(plan)
    for step in range(12):
        g = torch.Generator().manual_seed(step + (100 * job.rank if step >= 4 else 0))
        batch = torch.randn(8, 4, generator=g)
        job.step(laminar.Local(batch.chunk(2)[job.rank]) if local else batch)
    return 12


@pytest.mark.parametrize("plan", ["data", "stages"])
def test_batches_that_differ_later_are_noticed(plan: str) -> None:
    """At step 5 or 6, not only at the first two; with a plan of stages as well."""
    with pytest.raises(AssertionError, match=r"step [56]: rank \d had another batch than rank \d"):
        Ranks(2).run(_shuffled, plan, False)


def test_shares_may_differ(two: Ranks) -> None:
    """Whoever hands over its own share has other values than the others, of course."""
    assert two.run(_shuffled, "data", True) == [12, 12]


def _changed(plan: str) -> None:
    model, job = _job(plan)
    for step in range(4):
        if step == 2 and job.rank == 1:
            model.tau = 0.5
        job.step(torch.ones(8, 4))


@pytest.mark.parametrize("plan", ["zero3", "stages"])
def test_a_change_on_one_rank_only_is_named(plan: str) -> None:
    """The value and the rank, instead of collectives that don't meet."""
    either = "in another way on rank (1 than on rank 0|0 than on rank 1)"  # whoever reads the other's note first
    with pytest.raises(AssertionError, match=either) as error:
        Ranks(2).run(_changed, plan)
    assert "tau = 0.5" in str(error.value)


def test_every_element_is_looked_at_sooner_or_later() -> None:
    """One element that differs is found, wherever it is, in as many steps as a batch has samples of elements."""
    a = torch.randn(16, 40)
    for index in ((0, 0), (7, 13), (15, 39)):
        b = a.clone()
        b[index] += 1
        mine, theirs = Sampled(), Sampled()
        found = [n for n in range(1, 200) if mine({"x": a}, n) != theirs({"x": b}, n)]
        assert found and found[0] <= 20 * a.numel() // SOME


def test_a_batch_that_lies_otherwise_in_memory_is_the_same() -> None:
    """What counts are values, and no copy of a batch is made to look at them."""
    a = torch.arange(600).reshape(20, 30)
    b = a.t().contiguous().t()
    assert not b.is_contiguous() and Sampled()({"x": a}, 3) == Sampled()({"x": b}, 3)
    assert Sampled()({"x": a, "flag": torch.tensor(True), "none": torch.empty(0)}, 3).startswith("3:")

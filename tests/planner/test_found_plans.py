"""Plans that the search returns are right: they verify on every number of devices, and train on real ranks.

Nobody wrote these plans and nobody reads most of them, so nothing vouches for them but the numbers of one device. Every
model of the zoo is searched for 2, 4, 8 and 16 devices, on machines that lead to different plans, and what comes back
is run on as many ranks in one process, in float64. On two and four ranks it then trains in processes joined by Gloo, a
few steps, beside an ordinary loop.

The whole tables are slow. The normal run takes most models once, so that every number of devices and every kind of plan
(with stages, on two axes, in shards) is there.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

import laminar
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from tests.support.marks import slow
from tests.support.plain_training import FLOAT, OPTIMIZERS, TOLERANCE, difference, material, plain
from tests.support.rank_pool import Ranks
from tests.support.zoo import NAMES, recipe, specimen

BUDGET_S = 1.5
"""Of a search. What is found by then has to be right, too; that it does not depend on the clock is nobody's claim."""
STEPS = 4
MACHINES = ("2xcpu", "2xh100", "4xcpu", "2x2xa100@eth25", "8xh100", "2x4xa100@eth25", "2x8xh100", "16xh100")
"""Memory that ranks share, one node, nodes, and nodes that a slow network joins."""
SAMPLE = [
    ("mlp.py:tiny", "16xh100"),
    slow("resnet.py:tiny", "4xcpu"),
    slow("gpt.py:tiny", "2x8xh100"),
    slow("llama.py:tiny", "8xh100"),
    ("bert.py:tiny", "2x2xa100@eth25"),
    ("moe.py:tiny", "2xh100"),
    slow("lstm.py:tiny", "2xcpu"),
]


# --- in one process, on every number of devices


def _check(name: str, machine: str, **pin: int) -> Plan | Staged:
    """What is found for a model gives the loss, gradients and buffers of one device; the plan."""
    made = recipe(name)
    plan = laminar.plan(specimen(name).graph, machine, budget_s=BUDGET_S, pin=pin)
    report = laminar.verify(made.model(), made.loss, [next(iter(made.data()))], plan)
    assert report.ok, f"{plan.account['choice']['plan']} for {name} on {machine}: {report}"
    return plan


@pytest.mark.parametrize(("name", "machine"), SAMPLE)
def test_what_is_found_gives_the_numbers_of_one_device(name: str, machine: str) -> None:
    """Most models, every number of devices."""
    _check(name, machine)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "machine"), list(itertools.product(NAMES, MACHINES)))
def test_what_is_found_for_the_whole_zoo_gives_the_numbers_of_one_device(name: str, machine: str) -> None:
    """The whole table."""
    _check(name, machine)


# --- on real ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    """Processes by number."""
    pools = {n: Ranks(n) for n in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()


def _trained(name: str, plan: Plan | Staged) -> tuple[float, str, float]:
    """Some steps with a plan and some without: how far apart weights and losses are."""
    try:
        Tensor.float = Tensor.double  # type: ignore[method-assign]  # models that cast their logits
        model, loss, batches = material(name, torch.float64, STEPS)
        other = copy.deepcopy(model)
        job = laminar.parallelize(
            model, loss, OPTIMIZERS["adamw"](model.parameters()), batch=batches[0], plan=plan, seed=5, device="cpu"
        )
        losses = [job.step(batch).loss for batch in batches]
        want = plain(other, loss, OPTIMIZERS["adamw"](other.parameters()), batches, 5)
        apart, where = difference(job.state_dict(), other.state_dict())
        job.close()
        return apart, where, max(abs(a - b) / max(abs(b), 1e-2) for a, b in zip(losses, want, strict=True))
    finally:
        Tensor.float = FLOAT  # type: ignore[method-assign]


def _train(ranks: dict[int, Ranks], name: str, count: int, pin: Mapping[str, int]) -> Plan | Staged:
    """Search for so many ranks, train on them, compare; the plan."""
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        model, loss, batches = material(name, torch.float64, 1)
        plan = laminar.plan(laminar.capture(model, loss, batches[0]), f"{count}xcpu", budget_s=BUDGET_S, pin=pin)
    finally:
        Tensor.float = FLOAT  # type: ignore[method-assign]
    for rank, (apart, where, losses) in enumerate(ranks[count].run(_trained, name, plan)):
        told = f"{plan.account['choice']['plan']}, rank {rank}"
        assert apart <= TOLERANCE[torch.float64], f"{told}: {where} differs by {apart:.2e}"
        assert losses <= TOLERANCE[torch.float64], f"{told}: losses differ by {losses:.2e}"
    return plan


REAL = [
    slow("gpt.py:tiny", 2, {}),
    ("dlrm.py:tiny", 2, {}),
    slow("mlp.py:tiny", 4, {}),
]
PINNED = [
    ("gpt.py:tiny", 4, {"stages": 2, "microbatches": 4, "dp": 2}),
    ("llama.py:tiny", 4, {"dp": 2, "tp": 2}),
    ("gpt.py:tiny", 2, {"stages": 1, "zero": 3}),
    slow("gpt.py:tiny", 2, {"stages": 1, "recompute": 1}),
]


@pytest.mark.parametrize(("name", "count", "pin"), [*REAL, *PINNED])
def test_what_is_found_trains_on_real_ranks_as_plain_pytorch_does(
    ranks: dict[int, Ranks], name: str, count: int, pin: dict[str, int]
) -> None:
    """What is best by the prices of a CPU, and plans of other kinds that are the best of theirs."""
    plan = _train(ranks, name, count, pin)
    choice = plan.account["choice"]
    assert all(choice[k] == v for k, v in pin.items() if k in choice)
    assert isinstance(plan, Staged) == (choice["stages"] > 1 or choice["microbatches"] > 1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_found_for_the_whole_zoo_trains_on_real_ranks(ranks: dict[int, Ranks], name: str, count: int) -> None:
    """Every model on two and on four ranks."""
    _train(ranks, name, count, {})

"""Training equals plain PyTorch: every model of the zoo, every layout, two optimizers, twenty steps.

The oracle is an ordinary loop in one process (`loss.backward(); optimizer.step()`), none of our code
but the mode that supplies keyed draws where a model has dropout. In float64 the weights agree to
1e-9; in float32 to 1e-4, or where a rectifier sits at zero or Adam magnifies noise, so that plain
PyTorch is further than that from itself when it takes the samples of a batch in another order, to twice
that distance.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import laminar
from laminar import Mesh
from tests.support.plain_training import FLOAT, OPTIMIZERS, TOLERANCE, difference, material, plain
from tests.support.rank_pool import Ranks
from tests.support.zoo import NAMES

LAYOUTS: dict[str, tuple[int, str, dict[str, int]]] = {
    "alone": (1, "data", {"dp": 1}),
    "dp2": (2, "data", {"dp": 2}),
    "zero1": (2, "zero1", {"dp": 2}),
    "zero2": (2, "zero2", {"dp": 2}),
    "zero3": (2, "zero3", {"dp": 2}),
    "dp2xtp2": (4, "tensor", {"dp": 2, "tp": 2}),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    """Processes by number, shared by the tests of this file."""
    pools = {n: Ranks(n) for n in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()


def compare(name: str, layout: str, optimizer: str, dtype: torch.dtype) -> tuple[float, str, float]:
    """Train both ways; the difference of weights, where, and that of losses."""
    if dtype == torch.float64:  # models from Hugging Face compute their loss in float32 whatever they are made of
        Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        return _compare(name, layout, optimizer, dtype)
    finally:
        Tensor.float = FLOAT  # type: ignore[method-assign]


def _compare(name: str, layout: str, optimizer: str, dtype: torch.dtype) -> tuple[float, str, float]:
    _, plan, axes = LAYOUTS[layout]
    model, loss, batches = material(name, dtype)
    other = copy.deepcopy(model)
    job = laminar.parallelize(
        model,
        loss,
        OPTIMIZERS[optimizer](model.parameters()),
        batch=batches[0],
        plan=plan,
        mesh=Mesh(axes),
        seed=5,
        device="cpu",
    )
    losses = [job.step(batch).loss for batch in batches]
    want = plain(other, loss, OPTIMIZERS[optimizer](other.parameters()), batches, 5)
    gap, where = difference(job.state_dict(), other.state_dict())
    return gap, where, max(abs(a - b) / max(abs(b), 1e-2) for a, b in zip(losses, want, strict=True))


def reordered(value: Any, order: Tensor) -> Any:
    """A batch with its samples in another order."""
    if isinstance(value, Tensor):
        return value[order] if value.dim() and len(value) == len(order) else value
    if isinstance(value, dict):
        return {k: reordered(v, order) for k, v in value.items()}
    return type(value)(reordered(v, order) for v in value) if isinstance(value, (list, tuple)) else value


@cache
def scatter(name: str, optimizer: str) -> float:
    """How far plain PyTorch in float32 is from itself if the samples of each batch come in other orders."""
    torch.set_num_threads(1)
    start, loss, batches = material(name, torch.float32)
    samples = next(iter(batches[0].values() if isinstance(batches[0], dict) else batches[0]))
    model = copy.deepcopy(start)
    plain(model, loss, OPTIMIZERS[optimizer](model.parameters()), batches, 5)
    worst = 0.0
    for seed in range(8):
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
        other = copy.deepcopy(start)
        mixed = [reordered(b, order) for b in batches]
        plain(other, loss, OPTIMIZERS[optimizer](other.parameters()), mixed, 5)
        worst = max(worst, difference(other.state_dict(), model.state_dict())[0])
    return worst


def check(ranks: dict[int, Ranks], name: str, layout: str, optimizer: str, dtype: torch.dtype) -> None:
    """All ranks agree with plain PyTorch."""
    world = LAYOUTS[layout][0]
    found = (
        ranks[world].run(compare, name, layout, optimizer, dtype)
        if world > 1
        else [compare(name, layout, optimizer, dtype)]
    )
    for rank, (gap, where, losses) in enumerate(found):
        bound = TOLERANCE[dtype]
        if dtype == torch.float32 and gap > bound:
            # Both this run and the plain one may be that far from what exact arithmetic gives.
            bound = max(bound, 2 * scatter(name, optimizer))
        assert gap <= bound, f"rank {rank}: {where} differs by {gap:.2e}, more than {bound:.2e}"
        assert losses <= bound, f"rank {rank}: losses differ by {losses:.2e}"


CASES = [
    (name, layout, ("sgd", "adamw")[(i + j) // 2 % 2])
    for i, name in enumerate(NAMES)
    for j, layout in enumerate(LAYOUTS)
    if (i + j) % 6 == 0
]
"""Every model in one layout, every layout with two or three models; all are in the slow test."""


@pytest.mark.parametrize(("name", "layout", "optimizer"), CASES)
def test_twenty_steps_equal_plain_pytorch(ranks: dict[int, Ranks], name: str, layout: str, optimizer: str) -> None:
    """In float64, so that only a wrong step can differ."""
    check(ranks, name, layout, optimizer, torch.float64)


@pytest.mark.parametrize(("name", "layout", "optimizer"), CASES[::4])
def test_twenty_steps_in_float32(ranks: dict[int, Ranks], name: str, layout: str, optimizer: str) -> None:
    """As people train: one case in four."""
    check(ranks, name, layout, optimizer, torch.float32)


EVERYTHING = list(itertools.product(NAMES, LAYOUTS, OPTIMIZERS, (torch.float64, torch.float32)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "optimizer", "dtype"), EVERYTHING)
def test_every_combination(ranks: dict[int, Ranks], name: str, layout: str, optimizer: str, dtype: torch.dtype) -> None:
    """All models, layouts, optimizers and precisions: `make prove`."""
    check(ranks, name, layout, optimizer, dtype)

"""A model that is wrapped for another way to train is captured as what it wraps, or refused by name."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar.capture.model.unwrap import unwrapped
from laminar.errors import CaptureError
from tests.support.rank_pool import Ranks


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def accelerated(model: nn.Module) -> nn.Module:
    """What `Accelerator.prepare` does in mixed precision: another forward on the instance, the old one kept."""
    model._original_forward = model.forward
    inner = torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)(type(model).forward)
    model.forward = types.MethodType(inner, model)
    return model


WRAPPERS: dict[str, Any] = {
    "compiled": partial(torch.compile, backend="eager"),
    "parallel": nn.DataParallel,
    "accelerated": accelerated,
    "both": lambda m: torch.compile(nn.DataParallel(m), backend="eager"),
}


def trained(model: nn.Module, plan: str = "auto") -> dict[str, Tensor]:
    job = laminar.parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch=batches()[0], plan=plan)
    for batch in batches():
        job.step(batch)
    return {k: v.clone() for k, v in job.state_dict().items()}


def plainly() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_trains_as_what_it_wraps(name: str) -> None:
    """Weights come out under the names they have without the wrapper, with the numbers of a plain loop."""
    got = trained(WRAPPERS[name](net()))
    want = plainly()
    assert set(got) == set(want)
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-12)


def _under_ddp() -> dict[str, Tensor]:
    return trained(nn.parallel.DistributedDataParallel(net()), "zero3")


def _under_fsdp(kind: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = net()
    if kind == "first":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif kind == "second":
        fully_shard(model, mesh=mesh)
    else:
        model[0] = nn.parallel.DistributedDataParallel(model[0])
    try:
        laminar.parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch=batches()[0])
    except CaptureError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_model_under_ddp_trains_sharded(two: Ranks) -> None:
    """Scripts that have been made for DDP hand over the wrapper; its reducer must not get in the way."""
    want = plainly()
    for got in two.run(_under_ddp):
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        pytest.param("first", "FullyShardedDataParallel", marks=pytest.mark.slow),
        ("second", "keeps its weights in shards"),
        pytest.param("inner", "0 of the model", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_not_whole_is_refused_by_name(two: Ranks, kind: str, says: str) -> None:
    """Weights of which this process holds a piece can't be captured, and half a model must not be trained."""
    for error in two.run(_under_fsdp, kind):
        assert says in error, error


def test_a_plain_model_is_left_as_it_is() -> None:
    """Nothing is taken off that is not a wrapper, a module called `module` for one."""
    model = net()
    model.module = nn.Linear(2, 2)
    assert unwrapped(model) is model

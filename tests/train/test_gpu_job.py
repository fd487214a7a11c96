"""A job on a GPU: the same numbers as plain PyTorch there, compiled and replayed, alone and on two ranks.

Two ranks share the one GPU over Gloo, which moves CUDA tensors through the host. Not covered: NCCL,
which refuses two ranks on one GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import laminar
from tests.support.plain_training import cast, difference, material
from tests.support.plain_training import plain as plain_keyed
from tests.support.rank_pool import Ranks
from tests.support.small_job import adamw, batches, counted, gap, mean, net, plain

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def there(value: Any) -> Any:
    """A batch on the GPU."""
    if isinstance(value, Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {k: there(v) for k, v in value.items()}
    return type(value)(there(v) for v in value) if isinstance(value, (list, tuple)) else value


def compare(plan: str, micro_batches: int, compile: bool | None, loss: str) -> float:
    which: Any = counted if loss == "counted" else mean
    data = batches(8, samples=8, holes=loss == "counted")
    data += batches(2, samples=6, holes=loss == "counted", seed=9)  # another shape on the way
    model = net()
    other = copy.deepcopy(model).cuda()
    job = laminar.parallelize(
        model,
        which,
        adamw(model),
        batch=data[0],
        plan=plan,
        device="cuda",
        compile=compile,
        micro_batches=micro_batches,
        clip_norm=1.0,
    )
    losses = [job.step(b).loss for b in data]

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)

    want = plain(other, which, adamw(other), [there(b) for b in data], clip)
    assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 1e-9
    keep = [k for k in other.state_dict() if k != "seen"]
    state, there_state = job.state_dict(), other.state_dict()
    return gap({k: state[k] for k in keep}, {k: there_state[k] for k in keep})


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("loss", ["mean", "counted"])
def test_alone(micro_batches: int, compile: bool | None, loss: str) -> None:
    """Through Inductor and CUDA graphs, and line by line; float64; clipped; two shapes of batch."""
    assert compare("data", micro_batches, compile, loss) < 1e-8


@pytest.mark.parametrize("plan", ["data", "zero1", "zero3", "tensor"])
def test_two_ranks_on_one_gpu(two: Ranks, plan: str) -> None:
    """Compiled between collectives."""
    assert max(two.run(compare, plan, 2, None, "mean")) < 1e-8


@pytest.mark.parametrize(("dtype", "steps", "limit"), [(torch.float64, 20, 1e-9), (torch.float32, 5, 1e-3)])
@pytest.mark.parametrize("name", ["gpt.py:tiny", "resnet.py:tiny", "moe.py:tiny", "dlrm.py:tiny", "bert.py:tiny"])
def test_models(name: str, dtype: torch.dtype, steps: int, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of AdamW against the plain loop on the same GPU.

    Few in float32: after twenty, plain PyTorch from weights that are off by a last bit is now and then off by 2 % (one
    ReLU of the convolutional net falls on the other side).
    """
    model, loss, data = material(name, dtype, steps)
    other = copy.deepcopy(model).cuda()
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    def make(m: Any) -> Any:
        return torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-6)

    job = laminar.parallelize(model, loss, make(model), batch=data[0], device="cuda", seed=5)
    for b in data:
        job.step(b)
    with torch.device("cuda"):
        plain_keyed(other, loss, make(other), [there(cast(b, dtype)) for b in data], 5)
    worst, where = difference(job.state_dict(), other.state_dict())
    assert worst < limit, where


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-kahan", "bf16-stochastic"])
def test_precisions_fall(precision: str) -> None:
    """The loss falls as it does in float32, within what half precision can tell."""
    data = batches(40)

    def run(how: str) -> list[float]:
        model = net(dtype=torch.float32)
        opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
        job = laminar.parallelize(model, mean, opt, batch=data[0], device="cuda", precision=how)
        return [job.step(b).loss for b in data]

    exact, found = run("f32"), run(precision)
    assert exact[-1] < 0.8 * exact[0]
    assert abs(found[-1] - exact[-1]) < 0.1 * (exact[0] - exact[-1])

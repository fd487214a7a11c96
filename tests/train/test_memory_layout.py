"""Updates reach the elements they are meant for, however weights, gradients and state lie in memory.

Torch's fused updates walk through memory without looking at strides. The oracle is the same model trained by plain
PyTorch with `foreach=False`, which looks at every stride.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from tests.support.rank_pool import Ranks


class Weighted(nn.Module):
    """One weight, and how it is used."""

    def __init__(self, weight: Tensor, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(weight)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.w)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


USES: dict[str, tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "einsum_rows": (drawn(6, 4), lambda x, w: torch.einsum("bd,kd->bk", x, w)),
    "einsum_heads": (drawn(2, 4, 3), lambda x, w: torch.einsum("bd,hdk->bhk", x, w)),
    "bmm_turned": (drawn(2, 3, 4), lambda x, w: torch.bmm(x.expand(2, *x.shape), w.transpose(1, 2))),
    "permuted": (drawn(3, 2, 4), lambda x, w: x @ w.permute(2, 1, 0).flatten(1)),
    "turned_weight": (drawn(6, 4).t(), lambda x, w: x @ w),
    "turned_twice": (drawn(4, 6).t(), lambda x, w: x @ w.t()),
    "every_second": (drawn(4, 12)[:, ::2], lambda x, w: x @ w),
    "inside_of_a_larger": (drawn(8, 9)[2:6, 3:], lambda x, w: (x @ w).tanh()),
    "summed": (drawn(4), lambda x, w: x + w),  # its gradient is one number, repeated
    "channels_last": (
        drawn(6, 4, 2, 2).to(memory_format=torch.channels_last),
        lambda x, w: nn.functional.conv2d(x[:, :, None, None].expand(-1, -1, 3, 3), w),
    ),
    "channels_last_input": (
        drawn(6, 4, 2, 2),
        lambda x, w: nn.functional.conv2d(
            x[:, :, None, None].expand(-1, -1, 3, 3).contiguous(memory_format=torch.channels_last), w
        ),
    ),
    "one_wide": (drawn(4, 1).t(), lambda x, w: x * w),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **kw),
    "adam": lambda p, **kw: torch.optim.Adam(p, lr=0.1, amsgrad=True, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, lr=0.1, **kw),
    "adagrad": lambda p, **kw: torch.optim.Adagrad(p, lr=0.1, **kw),
}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def plain_sum(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def by_hand(
    model: nn.Module,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    data: list[Any],
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()


def gap(job: Any, other: nn.Module) -> float:
    want = other.state_dict()
    return max(float((v - want[k]).abs().max()) for k, v in job.state_dict().items())


def trained(use: str, how: str, **options: Any) -> float:
    """How far a job's weights are from those of plain PyTorch."""
    weight, f = USES[use]
    data = [drawn(8, 4) + i for i in range(3)]
    model = Weighted(weight, f)
    other = copy.deepcopy(model)
    loss = plain_sum if use == "summed" else squares
    job = laminar.parallelize(model, loss, OPTIMIZERS[how], batch=data[0], device="cpu", **options)
    for batch in data:
        job.step(batch)
    clip = {k: v for k, v in options.items() if k.startswith("clip")}
    by_hand(other, loss, OPTIMIZERS[how](other.parameters(), foreach=False), data, **clip)
    return gap(job, other)


@pytest.mark.parametrize("use", USES)
def test_an_update_reaches_its_element_in_every_layout(use: str) -> None:
    """With the optimizers that run fused, which is what a job switches on by itself."""
    for how in OPTIMIZERS:
        assert trained(use, how) < 1e-12, how


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"clip_norm": 0.5}, {"clip_value": 0.01}], ids=str)
def test_sums_and_clipped_gradients_are_laid_out_too(options: dict[str, Any]) -> None:
    """A gradient that is one number repeated can't be scaled in place."""
    uses = ("einsum_heads", "turned_weight", "channels_last", "every_second", "summed")
    for use in uses[:4] if "micro_batches" in options else uses:  # the sum over a batch is no mean over its parts
        assert trained(use, "adamw", **options) < 1e-12, use


def test_rounded_updates_look_at_strides() -> None:
    """bfloat16 weights are updated in float32 beside them."""
    for precision in ("bf16-kahan", "bf16-stochastic"):
        ends = []
        for weight in (drawn(6, 4), drawn(6, 4).t().contiguous().t()):
            model = Weighted(weight.float(), USES["einsum_rows"][1])
            job = laminar.parallelize(
                model, squares, OPTIMIZERS["adamw"], batch=drawn(8, 4).float(), device="cpu", precision=precision
            )
            for i in range(3):
                job.step(drawn(8, 4).float() + i)
            ends.append(job.state_dict()["w"])
        assert torch.equal(*ends)


def _sharded(plan: str) -> dict[str, float]:
    fit = [u for u in USES if u not in ("summed", "one_wide")]
    return {u: trained(u, how, plan=plan) for u in fit for how in ("sgd", "adamw")}


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_pieces_of_weights_in_any_layout(two: Ranks, plan: str) -> None:
    """A piece is contiguous, whatever it was cut from."""
    for found in two.run(_sharded, plan):
        assert max(found.values()) < 1e-12, found


def test_the_state_of_an_optimizer_that_has_stepped_is_taken_over() -> None:
    """Momentum of steps before the job counts, also where it lies otherwise than its weight."""
    for how in ("sgd", "adamw"):
        weight, use = USES["turned_weight"]
        model, other = Weighted(weight, use), Weighted(weight.clone(), use)
        data = [drawn(8, 4) + i for i in range(5)]
        mine, theirs = OPTIMIZERS[how](model.parameters(), foreach=False), OPTIMIZERS[how](other.parameters())
        by_hand(model, squares, mine, data[:2])
        for state in mine.state.values():
            state.update({k: v.contiguous() for k, v in state.items() if isinstance(v, Tensor) and v.dim()})
        mine.param_groups[0]["fused"], mine.param_groups[0]["foreach"] = True, None
        job = laminar.parallelize(model, squares, mine, batch=data[0], device="cpu")
        for batch in data[2:]:
            job.step(batch)
        by_hand(other, squares, theirs, data)
        assert gap(job, other) < 1e-12


def _taken_over(plan: str) -> float:
    data = [drawn(8, 4) + i for i in range(5)]
    model, other = Weighted(*USES["einsum_rows"]), Weighted(*USES["einsum_rows"])
    other.w.data = other.w.detach().clone()
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, other))
    by_hand(model, squares, mine, data[:2])
    job = laminar.parallelize(model, squares, mine, batch=data[0], plan=plan, device="cpu")
    for batch in data[2:]:
        job.step(batch)
    by_hand(other, squares, theirs, data)
    return gap(job, other)


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_pieces_of_the_state_of_an_optimizer_that_has_stepped(two: Ranks, plan: str) -> None:
    """Dropping it would be a warm-up in the middle of training."""
    assert max(two.run(_taken_over, plan)) < 1e-12


def test_state_from_a_checkpoint_is_laid_out_as_its_weight() -> None:
    """Files have contiguous tensors; the weight they belong to may be in channels-last."""
    weight, use = USES["channels_last"]
    data = [drawn(8, 4) + i for i in range(4)]
    plain = Weighted(weight.contiguous().clone(), use)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    by_hand(plain, squares, optimizer, data[:2])
    for through in ("job", "optimizer"):
        model = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        job = laminar.parallelize(model, squares, OPTIMIZERS["adamw"], batch=data[0], device="cpu")
        saved = copy.deepcopy(optimizer.state_dict())
        if through == "job":
            job.load_optimizer_state_dict(saved)
        else:
            saved["param_groups"] = job.optimizer.state_dict()["param_groups"]
            job.optimizer.load_state_dict(saved)  # the user's own call
        other = copy.deepcopy(plain)
        theirs = torch.optim.AdamW(other.parameters(), lr=0.1)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for batch in data[2:]:
            job.step(batch)
        by_hand(other, squares, theirs, data[2:])
        assert gap(job, other) < 1e-12, through


class Shared(nn.Module):
    """Two weights in one piece of memory, as some models pack them; they meet in the middle, or don't."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        flat = drawn(8, 4)
        self.a, self.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:] if apart else flat[2:6])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a * (x @ self.b)


def _shared(apart: bool) -> float | str:
    data = [drawn(8, 4) for _ in range(3)]
    model = Shared(apart)
    other = copy.deepcopy(model)
    try:
        job = laminar.parallelize(model, squares, OPTIMIZERS["sgd"], batch=data[0], plan="zero3", device="cpu")
    except laminar.CaptureError as error:
        return str(error)
    for batch in data:
        job.step(batch)
    by_hand(other, squares, OPTIMIZERS["sgd"](other.parameters()), data)
    return gap(job, other)


def test_weights_that_overlap_in_memory_are_not_cut_apart(two: Ranks) -> None:
    """An update of one is one of the other; pieces of their own would hide that. Neighbours in memory are fine."""
    assert all(isinstance(v, float) and v < 1e-12 for v in two.run(_shared, True))
    for message in two.run(_shared, False):
        assert isinstance(message, str) and "a and b lie in the same memory" in message


def _through_ddp() -> float:
    import warnings

    weight, use = USES["every_second"]
    data = [drawn(8, 4) + i for i in range(3)]
    model = Weighted(weight, use)
    other = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = laminar.parallelize(model, squares, OPTIMIZERS["adamw"], batch=data[0], plan="ddp", device="cpu")
    for batch in data:
        job.step(batch)
    by_hand(other, squares, OPTIMIZERS["adamw"](other.parameters(), foreach=False), data)
    return gap(job, other)


def test_ddp_lays_weights_out_as_their_gradients(two: Ranks) -> None:
    """A weight with gaps in memory has a gradient without."""
    assert _through_ddp() < 1e-12
    assert max(two.run(_through_ddp)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_number_that_was_expanded_may_be_a_constant_a_buffer_and_a_batch(dtype: torch.dtype) -> None:
    """One element with no stride counts as contiguous, yet torch shows no bytes of it; digests and wires ask."""
    outside = torch.tensor(1.5, dtype=dtype).expand(1, 1).conj()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(3.0, dtype=torch.float64))
            self.register_buffer("gain", torch.tensor(0.5, dtype=dtype).expand(1, 1))

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = (batch["x"] * self.weight * outside * self.gain + batch["shift"]).abs().sum()
            return out

    def batch() -> dict[str, Tensor]:
        x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return {"x": x, "shift": torch.tensor(0.3, dtype=dtype).expand(1, 1)}

    plain = Scaled()
    (plain(batch()) * 0.1).backward()
    assert plain.weight.grad is not None
    job = laminar.parallelize(Scaled(), lambda m, b: m(b) * 0.1, lambda p: torch.optim.SGD(p, 1.0), batch=batch())
    job.step(batch())
    assert job.hash()
    torch.testing.assert_close(job.state_dict()["weight"], plain.weight.detach() - plain.weight.grad)
    job.close()

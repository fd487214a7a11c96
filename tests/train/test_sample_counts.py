"""Losses that depend on how many samples there are: micro-batches would train something else, which is said.

A loss that is a sum, or a number made from `len(batch)`, is a constant in a captured graph. The check of the first
batch runs the model itself on two micro-batches and on both together, so it sees a mean over labels of which parts
have different numbers, too. Not covered: batches after the first, and models that draw, or have no loss, in evaluation
mode.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.errors import CheckError
from tests.support.rank_pool import Ranks

N = 8


def model() -> nn.Module:
    """With dropout, which draws in training only."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)).double()


def batch() -> dict[str, Tensor]:
    """Features and a mask."""
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(N, 4, generator=g, dtype=torch.float64), "keep": torch.arange(N) != 1}


def masked(m: Any, b: Any) -> Any:
    return laminar.Loss((m(b["x"]).square().sum(1) * b["keep"]).sum(), b["keep"].sum())


def penalised(m: Any, b: Any, mean: bool) -> Tensor:
    """Each sample's gradient is to have norm one: from a sum over samples, or, by mistake, from a mean."""
    x = b["x"].clone().requires_grad_()
    out = m(x).square().sum(1)
    (g,) = torch.autograd.grad(out.mean() if mean else out.sum(), x, create_graph=True)
    return out.mean() + (g.norm(dim=1) - 1).square().mean()


MEANS = {
    "gradient penalty": lambda m, b: penalised(m, b, False),
    "mean": lambda m, b: m(b["x"]).square().mean(),
    "sum by the count": lambda m, b: m(b["x"]).square().sum() / len(b["x"]),
    "a ratio of counts": lambda m, b: (m(b["x"]) * (len(b["x"]) / b["x"].shape[0])).tanh().mean(),
    "total and weight": masked,
    "cross entropy": lambda m, b: F.cross_entropy(m(b["x"]), b["keep"].long()),
}
OTHERS = {
    "labels that are ignored": lambda m, b: F.cross_entropy(m(b["x"]), torch.where(b["keep"], 1, -100)),
    "gradient penalty of a mean": lambda m, b: penalised(m, b, True),
    "sum": lambda m, b: m(b["x"]).square().sum(),
    "by the count twice": lambda m, b: m(b["x"]).square().mean() / len(b["x"]),
    "inside of something": lambda m, b: (m(b["x"]) * len(b["x"]) ** 0.5).tanh().mean(),
    "by position": lambda m, b: (m(b["x"]) + torch.linspace(0, 1, len(b["x"]))[:, None]).tanh().mean(),
    "a total too large": lambda m, b: laminar.Loss(m(b["x"]).square().mean(), torch.tensor(float(len(b["x"])))),
}


def trained(loss: Any, parts: int) -> tuple[float, list[str]]:
    """How far the weights are from plain PyTorch's after a step, relative to how far they moved; what was said."""
    made = model()
    made[2].p = 0.0  # plain PyTorch draws otherwise
    plain = copy.deepcopy(made)
    value = loss(plain, batch())
    value = value.total / value.weight if isinstance(value, laminar.Loss) else value
    grads = torch.autograd.grad(value, list(plain.parameters()))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        job = laminar.parallelize(
            made, loss, lambda p: torch.optim.SGD(p, lr=1.0), batch=batch(), plan="data", micro_batches=parts
        )
        job.step(batch())
    weights = job.state_dict()
    moved = [
        (weights[n] - (p.detach() - g)).abs().max() / g.abs().max()
        for (n, p), g in zip(plain.named_parameters(), grads, strict=True)
    ]
    return float(max(moved)), [str(w.message) for w in heard]


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples_trains_as_the_whole_batch_and_nothing_is_said(name: str) -> None:
    """Counts that cancel are none."""
    error, said = trained(MEANS[name], 2)
    assert error < 1e-9 and not said


@pytest.mark.parametrize("name", OTHERS)
def test_a_loss_that_hangs_on_the_count_is_named(name: str) -> None:
    """With both numbers and the ways out; on one micro-batch it is right, and nothing is said."""
    for parts in (2, N // 2):
        error, said = trained(OTHERS[name], parts)
        told = f"micro_batches={parts}: the loss of {2 * N // parts} samples is"
        assert error > 1e-3
        assert any(s.startswith(told) and "laminar.Loss" in s for s in said), said
    error, said = trained(OTHERS[name], 1)
    assert error < 1e-9 and not said


def test_uneven_labels_are_named_in_low_precision_too() -> None:
    """Bfloat16 has three digits: losses of parts that are far off are none of its doing, and rounding is."""

    def loss(m: Any, b: Any) -> Tensor:
        return F.cross_entropy(9 * m(b["x"]), b["y"])

    said = []
    x = 3 * batch()["x"].float()
    right = model().float().eval()(x).argmax(1)
    for y in (right, torch.cat([(right[:1] + 1) % 3, right[1:2], torch.full((2,), -100), right[4:]])):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            job = laminar.parallelize(
                model().float(),
                loss,
                lambda p: torch.optim.SGD(p, lr=1e-3),
                batch={"x": x, "y": y},
                plan="data",
                micro_batches=2,
                precision="bf16",
            )
            job.step({"x": x, "y": y})
        said.append([str(w.message) for w in heard])
    even, uneven = said
    assert not even and any("the loss of 8 samples" in s for s in uneven), said


def test_dropout_is_no_reason() -> None:
    """Halves draw other masks than the whole; they are compared without, and the model trains on as before."""
    made = model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = laminar.parallelize(
            made, MEANS["mean"], lambda p: torch.optim.SGD(p, lr=1.0), batch=batch(), plan="data", micro_batches=2
        )
        job.step(batch())
    assert all(m.training for m in made.modules())


def _staged() -> list[str]:
    said = []
    for loss in (OTHERS["sum"], MEANS["mean"]):
        made = model()
        graph = laminar.capture(made, loss, {k: v[: N // 2] for k, v in batch().items()})
        plan = laminar.plans.pipeline(graph, 2, 2)
        job = laminar.parallelize(made, loss, lambda p: torch.optim.SGD(p, lr=1.0), batch=batch(), plan=plan)
        try:
            job.step(batch())
            said.append("")
        except CheckError as error:
            said.append(str(error))
        job.close()
    return said


def test_a_plan_with_stages_is_refused_for_it(two: Ranks) -> None:
    """Nobody asked for micro-batches there: the plan has them."""
    for wrong, right in two.run(_staged):
        assert "in 2 micro-batches: the loss of 8 samples is" in wrong and not right

"""Every token of the global batch weighs the same, wherever it is computed: against one process in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from bench.length_cases import drawn
from laminar.data import (
    BalancedLoader,
    BalancedSampler,
    SampleCost,
    bucket_lengths,
    document_mask,
    pack,
    packed_attention,
    token_loss,
)
from tests.support.rank_pool import Ranks

VOCABULARY, WIDTH = 50, 16
COST = SampleCost(per_token=1.0, per_square=0.01)


class Tiny(nn.Module):
    """A layer of causal attention over packed samples."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked = masked
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(512, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor, within: Any) -> Tensor:
        x = self.embed(tokens) + self.place(positions)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(-2, -3) for t in self.qkv(x).chunk(3, -1))
        if self.masked:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(within))
        else:
            out = packed_attention(q, k, v, within)
        return self.head(x + out.transpose(-2, -3).flatten(-2))


def samples(count: int = 64) -> list[list[int]]:
    dice = np.random.default_rng(3)
    return [dice.integers(0, VOCABULARY, n).tolist() for n in np.minimum(drawn("ff-web", count), 300)]


def gradient(model: Tiny, units: list[Any], scale: float) -> tuple[float, int, list[Tensor]]:
    """Total, weight and gradients of some micro-batches, divided by the weight of the whole step."""
    total, weight = 0.0, 0
    model.zero_grad()
    for unit in units:
        loss = token_loss(model(unit.tokens, unit.positions, unit), unit.next_tokens())
        (loss.total / scale).backward()
        total, weight = total + float(loss.total.detach()), weight + int(loss.weight)
    return total, weight, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def global_mean(model: Tiny, batch: list[list[int]]) -> tuple[float, float, list[Tensor]]:
    """One process, one sample after the other, nothing packed: the mean over all labels."""
    losses = []
    for sample in batch:
        tokens = torch.tensor(sample)
        logits = model(tokens, torch.arange(len(sample)), [0, len(sample)])
        losses.append(F.cross_entropy(logits[:-1], tokens[1:], reduction="none"))
    each = torch.cat(losses)
    model.zero_grad()
    each.mean().backward()
    return float(each.detach().mean()), len(each), [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("how", [{}, {"tokens": 512}, {"tokens": 512, "fixed_units": True}])
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_on_any_ranks_is_the_mean_over_all_tokens(ranks: int, how: dict[str, Any], padded: bool) -> None:
    """Loss and every gradient, to fourteen digits, with free counts and with padding."""
    data, model = samples(), Tiny()
    lengths = [len(s) for s in data]
    want, labels, gradients = global_mean(model, data)
    buckets = bucket_lengths(512, max(sum(lengths), 600)) if padded else None
    total, weight, summed = 0.0, 0, [torch.zeros_like(p) for p in model.parameters()]
    for rank in range(ranks):
        sampler = BalancedSampler(lengths, 64, ranks=ranks, rank=rank, cost=COST, **how)
        step = next(iter(BalancedLoader(data, sampler, collate=lambda s: pack(s, buckets))))  # type: ignore[arg-type]
        part, count, own = gradient(model, step.units, labels)
        total, weight = total + part, weight + count
        summed = [a + b for a, b in zip(summed, own, strict=True)]
    assert weight == labels
    assert total / weight == pytest.approx(want, rel=1e-13)
    for mine, theirs in zip(summed, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-15)


def test_every_sample_has_the_weight_of_its_tokens() -> None:
    """By the gradient at its own logits, sample by sample; a mean of means would give other weights."""
    data, model = samples(), Tiny()
    lengths = [len(s) for s in data]
    labels = sum(n - 1 for n in lengths)
    for rank in range(4):
        sampler = BalancedSampler(lengths, 64, ranks=4, rank=rank, tokens=400)
        for unit in next(iter(BalancedLoader(data, sampler))).units:  # type: ignore[arg-type]
            logits = model(unit.tokens, unit.positions, unit).detach().requires_grad_()
            loss = token_loss(logits, unit.next_tokens())
            (loss.total / labels).backward()
            # the gradient of a cross-entropy at its own label is probability - 1, times the weight of the token
            at = logits.grad.gather(1, unit.next_tokens().clamp(min=0)[:, None])[:, 0]  # type: ignore[union-attr]
            less = 1 - logits.softmax(-1).gather(1, unit.next_tokens().clamp(min=0)[:, None])[:, 0].detach()
            weight = torch.where(unit.next_tokens() >= 0, -at / less, 0.0)
            for document, length in enumerate(unit.lengths):
                got = float(weight[unit.documents == document].sum())
                assert got == pytest.approx((length - 1) / labels, rel=1e-9)


def test_labels_that_are_ignored_have_no_weight() -> None:
    """Neither in the total nor in what it is divided by."""
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    labels = torch.tensor([[1, 2, -100, -100, 3], [-100] * 5])
    loss = token_loss(logits, labels)
    assert float(loss.weight) == 3
    assert float(loss.total) == pytest.approx(3 * float(F.cross_entropy(logits[0, [0, 1, 4]], labels[0, [0, 1, 4]])))
    nothing = token_loss(logits[1:], labels[1:])
    assert float(nothing.total) == 0 and float(nothing.weight) == 0


def _loss(model: Tiny, batch: dict[str, Tensor]) -> laminar.Loss:
    return token_loss(model(batch["tokens"], batch["positions"], batch["documents"]), batch["labels"])


def _trained(steps: int) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """A few steps of a job whose ranks have rows of their own lengths."""
    data = samples(128)
    sampler = BalancedSampler([len(s) for s in data], 32, cost=COST)
    model = Tiny(masked=True)
    loader = iter(BalancedLoader(data, sampler))  # type: ignore[arg-type]
    losses, rows, job = [], [], None
    for _ in range(steps):
        (unit,) = next(loader).units
        row = {
            "tokens": unit.tokens,
            "positions": unit.positions,
            "documents": unit.documents,
            "labels": unit.next_tokens(),
        }
        if job is None:
            job = laminar.parallelize(
                model, _loss, lambda p: torch.optim.SGD(p, 0.1), batch=row, plan="ddp", device="cpu"
            )
        losses.append(job.step(laminar.Local(row)).loss)
        rows.append(unit.length)
    assert job is not None
    weights = {name: t.detach().clone() for name, t in job.state_dict().items()}
    job.close()
    return losses, weights, rows


@pytest.mark.filterwarnings("ignore:plan=.ddp.")
def test_a_job_takes_rows_of_different_lengths(two: Ranks) -> None:
    """`plan="ddp"` with `Local`: losses and weights are those of one process with the global mean."""
    (losses, weights, rows), (_, other, others) = two.run(_trained, 4)
    assert rows != others and all(torch.equal(weights[n], other[n]) for n in weights)
    data, model = samples(128), Tiny()
    sampler = BalancedSampler([len(s) for s in data], 32, ranks=1, rank=0, cost=COST)
    optimizer, order = torch.optim.SGD(model.parameters(), 0.1), iter(sampler)
    for got in losses:
        want, _, gradients = global_mean(model, [data[n] for n in next(order)])
        assert got == pytest.approx(want, rel=1e-12)
        for param, grad in zip(model.parameters(), gradients, strict=True):
            param.grad = grad
        optimizer.step()
    for name, param in model.state_dict().items():
        torch.testing.assert_close(weights[name], param, rtol=1e-9, atol=1e-12)

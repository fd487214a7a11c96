"""Models and staged plans for tests of jobs with stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import laminar
from tests.support.rank_pool import Ranks
from tests.support.recorded_gpt import GPT, _batches, _loss

STEPS = 3
MICRO = 4


def model(tied: bool) -> nn.Module:
    """A GPT of two blocks in float64; its head is its embedding if asked for."""
    torch.manual_seed(0)
    made = GPT(32).double()
    if tied:
        made.head = nn.Linear(32, 96, bias=False).double()
        made.head.weight = made.embed.weight
    return made


def make(params: Any) -> torch.optim.Optimizer:
    """Adam with an epsilon that noise does not reach."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-6)


def planned(made: nn.Module, **options: Any) -> Any:
    """A pipeline for micro-batches of two samples."""
    micro = {k: v[:2] for k, v in _batches(1)[0].items()}
    return laminar.plans.pipeline(laminar.capture(made, _loss, micro), microbatches=MICRO, **options)


def _train(tied: bool, options: dict[str, Any], **how: Any) -> tuple[list[tuple[float, float]], dict[str, Tensor], int]:
    """Losses and norms, whole weights, and how many numbers this rank holds of the model."""
    made = model(tied)
    job = laminar.parallelize(
        made, _loss, make, batch=_batches(1)[0], plan=planned(made, **options), clip_norm=1.0, **how
    )
    said = [(r.loss, r.grad_norm) for r in map(job.step, _batches(STEPS))]
    held = sum(p.numel() for p in made.parameters())
    weights = {name: w.cpu() for name, w in job.state_dict().items()}
    job.close()
    return said, weights, held


def plain(tied: bool) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The same on one device, whole batches at once."""
    made = model(tied)
    optimizer, said = make(made.parameters()), []
    for batch in _batches(STEPS):
        optimizer.zero_grad()
        loss = _loss(made, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        said.append((loss.item(), norm.item()))
    return said, made.state_dict()


def same(ranks: Ranks, tied: bool, options: dict[str, Any], **how: Any) -> list[int]:
    """Assert that all ranks say what one device says; how much of the model each holds."""
    want_said, want = plain(tied)
    held = []
    for said, weights, count in ranks.run(partial(_train, **how), tied, options):
        torch.testing.assert_close(torch.tensor(said), torch.tensor(want_said), rtol=1e-9, atol=1e-12)
        assert weights.keys() == want.keys()
        for name, w in want.items():
            torch.testing.assert_close(weights[name], w, rtol=1e-9, atol=1e-11)
        held.append(count)
    return held

"""Training on sequences that are split by token, on two real ranks, against plain PyTorch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from tests.support.example_recipes import load
from tests.support.rank_pool import Ranks
from tests.support.small_job import adamw, gap, plain

CLIPPED = {"clip_norm": 0.1}


def _batches(lengths: tuple[int, ...], samples: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [{name: torch.randint(61, (samples, n), generator=generator) for name in ("ids", "target")} for n in lengths]


def _model() -> nn.Module:
    made = load("gpt.py")
    torch.manual_seed(0)
    model: nn.Module = made.GPT(made.Config(layers=2, d=32, heads=4, vocab=61, tokens=24, batch=1)).double()
    return model


def _trained(lengths: tuple[int, ...], samples: int, options: dict[str, Any]) -> tuple[float, float, list[bool]]:
    data, loss, model = _batches(lengths, samples), load("gpt.py").loss, _model()
    other = copy.deepcopy(model)
    job = laminar.parallelize(model, loss, adamw(model), batch=data[0], device="cpu", plan="context", **options)
    losses = [job.step(b).loss for b in data]
    after = partial(nn.utils.clip_grad_norm_, list(other.parameters()), 0.1) if options == CLIPPED else None
    want = plain(other, loss, adamw(other), data, after)
    by_row = [any(i.op == "laminar.attention_at" for i in ready.program.instrs) for ready in job.engine._ready.values()]
    apart = max(abs(a - b) for a, b in zip(losses, want, strict=True))
    return gap(job.state_dict(), other.state_dict()), apart, by_row


@pytest.mark.parametrize(
    ("lengths", "samples", "options"),
    [
        ((24, 24, 24), 1, {}),
        ((24, 17, 9, 24), 1, {}),
        ((24, 24), 2, {"micro_batches": 2}),
        ((20, 20), 1, CLIPPED),
    ],
    ids=["one sequence", "lengths that change", "micro-batches", "clipping"],
)
def test_a_job_on_tokens_trains_like_one_device(
    two: Ranks, lengths: tuple[int, ...], samples: int, options: dict[str, Any]
) -> None:
    """Losses and weights, also where a batch has another length than the first, odd ones included."""
    for weights, losses, by_row in two.run(_trained, lengths, samples, options):
        assert weights < 1e-9
        assert losses < 1e-10
        assert all(by_row)

"""Does a pipeline of ours train as fast as torch.distributed.pipelining with the same split and micro-batches?

A GPT of 10.9M parameters cut between the same blocks on both sides, one stage a rank, 1F1B, 8 micro-batches, fused
AdamW on what each rank holds, float32, one thread a rank, Gloo. Losses of three steps are compared first.

    python bench/train_pipeline.py [--ranks 2] [--rounds 12] [--repeats 3]

Target (torch's time over ours): 1.0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Case
from peers import Side, adamw, fresh
from race import race
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import laminar
from laminar.api import micro_batches

MICRO = 8


def starts(layers: int, ranks: int) -> list[int]:
    """The first block of every stage."""
    return [r * layers // ranks for r in range(ranks)]


def ours(case: Case) -> Side:
    """A job with stages."""
    model, ranks = fresh(case), dist.get_world_size()
    graph = laminar.capture(model, case.loss, micro_batches(case.batches[0], MICRO)[0])
    cuts = [rf"blocks\.{k}(\.|$)" for k in starts(len(model.blocks), ranks)[1:]]
    plan = laminar.plans.pipeline(graph, cuts, MICRO)
    job = laminar.parallelize(model, case.loss, adamw, batch=case.batches[0], plan=plan, device="cpu")
    return Side(
        lambda i: job.step(case.batches[i % len(case.batches)]),
        lambda r: float(r.loss),
        lambda: dict(job.memory()),
    )


class Piece(nn.Module):
    """The blocks of one stage, with the embeddings before the first and the head behind the last."""

    def __init__(self, model: Any, first: int, last: int) -> None:
        super().__init__()
        self.embed = model.embed if first == 0 else None
        self.position = model.position if first == 0 else None
        self.blocks = nn.ModuleList(list(model.blocks)[first:last])
        self.norm, self.head = (model.norm, model.head) if last == len(model.blocks) else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x) + self.position(torch.arange(x.shape[1]))  # type: ignore[misc]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None else x  # type: ignore[misc]


def pipelining(case: Case) -> Side:
    """torch.distributed.pipelining, shapes found at the first step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = fresh(case)
    first = starts(len(model.blocks), ranks)
    piece = Piece(model, first[rank], [*first, len(model.blocks)][rank + 1])
    stage = PipelineStage(piece, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=lambda out, t: F.cross_entropy(out.flatten(0, 1), t.flatten()))
    optimizer = adamw(piece.parameters())

    def step(i: int) -> Tensor:
        batch, losses = case.batches[i % len(case.batches)], list[Tensor]()
        given = (batch["ids"],) if rank == 0 else ()
        schedule.step(*given, target=batch["target"], losses=losses) if rank == ranks - 1 else schedule.step(*given)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    def loss(found: Tensor) -> float:
        dist.broadcast(found, ranks - 1)
        return float(found)

    held = sum(p.nbytes for p in piece.parameters())
    return Side(step, loss, lambda: {"parameters": held, "gradients": held, "state": 2 * held})


if __name__ == "__main__":
    race("train_pipeline", {"laminar": ours, "pipelining": pipelining}, False, 1.0, __doc__, models=("gpt",))

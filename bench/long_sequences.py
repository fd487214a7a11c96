"""What does splitting a single sequence by token give, in time and in memory?

A GPT of four layers on one sequence, float32, fused AdamW, one thread a rank, through shared memory. There is one
sample, so data parallel has nothing to split: every rank does all of it (`alone`, plain PyTorch, no communication).
`laminar` is `plan="context"`, attention by row of its queries, of which each rank has several stretches; `one_stretch`
the same with one. Processor time is that of rank 0, whose stretches are the first and lightest of each block.

    python bench/long_sequences.py [--model 2048 4096] [--ranks 2] [--rounds 12] [--repeats 3]

On n ranks with k stretches each the last one has (1 + (n-1)/(nk))/n of causal attention; all else is divided by n.
Target (a step of `alone` over ours, 2 ranks): 1.4.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from models import LONG
from peers import alone, ours
from race import race

import laminar


def one_stretch(graph: Any, mesh: Any) -> Any:
    """The plan with one stretch for each rank."""
    return laminar.plans.context_parallel(graph, mesh, mesh.names[0], stretches=1)


SIDES = {"laminar": partial(ours, plan="context"), "one_stretch": partial(ours, plan=one_stretch), "alone": alone}

if __name__ == "__main__":
    race("long_sequences", SIDES, split=False, target=1.4, doc=__doc__ or "", known=LONG)

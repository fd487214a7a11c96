"""What does splitting a single sequence by token give, in time and in memory?

A GPT of four layers on one sequence, float32, fused AdamW, one thread a rank, through shared memory. There is one
sample, so data parallel has nothing to split: every rank does all of it (`alone`, plain PyTorch, no communication).
`laminar` is `plan="context"`, attention by row of its queries. Processor time is that of rank 0, whose stretch is the
first and lightest, so it says little here.

    python bench/long_sequences.py [--model 2048 4096] [--ranks 2] [--rounds 12] [--repeats 3]

On n ranks the last stretch of the queries has (2n-1)/n**2 of causal attention; everything else is divided by n.
Target (a step of `alone` over ours, 2 ranks): 1.4.
"""

from __future__ import annotations

from functools import partial

from models import LONG
from peers import alone, ours
from race import race

SIDES = {"laminar": partial(ours, plan="context"), "alone": alone}

if __name__ == "__main__":
    race("long_sequences", SIDES, split=False, target=1.4, doc=__doc__ or "", known=LONG)

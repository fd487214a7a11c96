"""Does a tensor-parallel training step of ours beat eager DTensor?

Weights split over the ranks, the batch whole on each; the usual column-then-row split on DTensor's side,
`plan="tensor"` on ours; fused AdamW on the pieces, float32, one thread a rank, Gloo. DLRM's tables are
split by row on DTensor's side.

    python bench/train_tensor.py [--model gpt cnn mlp dlrm] [--ranks 2] [--rounds 12] [--repeats 3] [--shrink 1]

What DTensor loses it loses per op, whatever the op's size, so the ratio falls with the arithmetic that each rank
has: `--shrink 4` measures a quarter of the batch.

Target (DTensor's time over ours): 1.5.
"""

from __future__ import annotations

from functools import partial

from peers import dtensor, ours
from race import race

SIDES = {"laminar": partial(ours, plan="tensor"), "dtensor": dtensor}

if __name__ == "__main__":
    race("train_tensor", SIDES, split=False, target=1.5, doc=__doc__)

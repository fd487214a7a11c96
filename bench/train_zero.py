"""Does ZeRO-3 of ours beat FSDP2?

Parameters, gradients and optimizer state in shards on both sides, gathered for forward and again for
backward; fused AdamW on the pieces, batches split by sample, float32, one thread a rank, Gloo.

    python bench/train_zero.py [--model gpt cnn mlp dlrm] [--ranks 2] [--rounds 12] [--repeats 3]

Target (FSDP2's time over ours): 1.2.
"""

from __future__ import annotations

from functools import partial

from peers import fsdp, ours
from race import race

SIDES = {"laminar": partial(ours, plan="zero3"), "fsdp2": fsdp}

if __name__ == "__main__":
    race("train_zero", SIDES, split=True, target=1.2, doc=__doc__)

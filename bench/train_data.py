"""Does a data-parallel training step of ours keep up with DDP?

Forward, backward, gradient reduction and fused AdamW, batches split by sample, float32, one thread a
rank, Gloo. For the CNN `ddp` normalises over the whole batch, as we do; `ddp_local_norm` is DDP with each
rank's own statistics, which computes something else and is there to be seen.

    python bench/train_data.py [--model gpt cnn mlp dlrm] [--ranks 2] [--rounds 12] [--repeats 3]

Target (DDP's time over ours): 1.0.
"""

from __future__ import annotations

from functools import partial

from peers import ddp, ours
from race import race

SIDES = {"laminar": partial(ours, plan="data"), "ddp": ddp}
EXTRA = {"cnn": {"ddp_local_norm": partial(ddp, sync=False)}}

if __name__ == "__main__":
    race("train_data", SIDES, split=True, target=1.0, doc=__doc__, extra=EXTRA)

"""What does exact mode cost on one GPU?

GPT-2 medium (355M parameters), 16 sequences of 1024 tokens, bfloat16 autocast, fused AdamW, as in `gpu.py`. Sides:
`exact`, 8 units of 2 sequences on one process, line by line with deterministic kernels; `default`, our own default
mode, compiled; `lines`, the default mode line by line; `deterministic`, line by line with deterministic kernels.

    python bench/exact_gpu.py [--rounds 8] [--calls 3]

No target: exact mode has no compiler on its side, and this says what that costs.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from common import paired, ratio, report
from gpu import gpt

import laminar


def side(exact: Any, compiled: bool, deterministic: bool) -> Any:
    """One job and a call that makes a step."""
    model, loss, batch, make, _ = gpt(small=False)
    job = laminar.parallelize(
        model, loss, make, batch=batch, precision="bf16", device="cuda", check=False, exact=exact,
        compile=None if exact else compiled,
    )  # fmt: skip
    there = {k: v.cuda() for k, v in batch.items()}

    def step() -> None:
        torch.use_deterministic_algorithms(deterministic)
        job.step(there)
        torch.cuda.synchronize()

    return step


def main() -> None:
    """Measure all sides in one process, in turns."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--rounds", type=int, default=8)
    args.add_argument("--calls", type=int, default=3)
    given = args.parse_args()
    sides = {
        "exact": side("units=8", False, True),
        "default": side(None, True, False),
        "lines": side(None, False, False),
        "deterministic": side(None, False, True),
    }
    times = paired(sides, given.rounds, given.calls)
    report(
        "exact_gpu",
        {
            "model": "gpt-355m",
            **{f"exact_over_{name}": ratio(times, "exact", name) for name in sides if name != "exact"},
            "ms": {name: round(statistics.median(ts) * 1e3, 2) for name, ts in times.items()},
        },
    )


if __name__ == "__main__":
    main()

"""Iterations on one node of A100: a table of its own, 1,440 plans of eight small models.

    GPUs, global batch, micro batch, hidden, heads, layers, tokens, tensor, data, pipeline, milliseconds

Constants of the A100 are fitted to every other (hidden, layers) pair and judged on the rest, then the other way round.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.published import fit, prices
from bench.published.machines import A100
from bench.published.rows import GPT2_VOCABULARY, Row
from bench.published.scores import summary
from bench.published.steps import step_of

EVERY = 5
"""Of the rows that are fitted to, every so manieth is used: they are many and alike."""


def read(path: str | Path) -> list[Row]:
    """The table's rows."""
    out = []
    with open(path, newline="") as file:
        for number, cells in enumerate(csv.reader(file), start=1):
            try:
                gpus, gbs, mbs, hidden, heads, layers, seq, tp, dp, pp = (int(c) for c in cells[:10])
            except ValueError:
                continue  # the header
            out.append(
                Row(
                    line=number,
                    block="vtrain",
                    system="vTrain single node",
                    model=f"{hidden}x{layers}",
                    layers=layers,
                    hidden=hidden,
                    heads=heads,
                    kv_heads=heads,
                    ffn=4 * hidden,
                    vocab=GPT2_VOCABULARY,
                    seq=seq,
                    gated=False,
                    biases=True,
                    causal=True,
                    tied=True,
                    gbs=gbs,
                    mbs=mbs,
                    gpu=A100,
                    gpus=gpus,
                    tp=tp,
                    pp=pp,
                    dp=dp,
                    cp=1,
                    vp=1,
                    zero=0,
                    hybrid=False,
                    recompute="none",
                    split_norms=False,
                    precision="f16",
                    pure=False,
                    metric="ms/iter",
                    value=float(cells[10]),
                    extra={},
                    stated={},
                )
            )
    return out


def judged(path: str | Path) -> dict[str, Any]:
    """Both halves, each judged by constants that were fitted to the other."""
    rows = read(path)
    pairs = sorted({(r.hidden, r.layers) for r in rows})
    halves = [[r for r in rows if pairs.index((r.hidden, r.layers)) % 2 == k] for k in (0, 1)]
    start = prices.of_kind(A100, prices.load())
    errors: list[float] = []
    for mine, others in (halves, halves[::-1]):
        problem, x = fit.fitted(mine[::EVERY], fit.free_of(mine), start)
        found = problem.constants(x)
        here = errors_of(others, found)
        known = len({(r.hidden, r.layers) for r in mine})
        print(f"fitted to {known} models, judged on {len(others)} rows of the others: {summary(here)}")
        errors += here
    before = errors_of(rows, start)
    print(f"all rows, each by the other half: {summary(errors)}")
    print(f"all rows, by the constants of the published table: {summary(before)}")
    mean = sum(abs(e) for e in errors) / len(errors)
    return {"rows": len(rows), "mean": round(mean, 4), "unfitted_mean": round(sum(map(abs, before)) / len(before), 4)}


def errors_of(rows: Sequence[Row], constants: prices.Constants) -> list[float]:
    """Predicted over measured, less one."""
    return [math.expm1(math.log(step_of(r, constants).seconds / (r.measured_s or 1.0))) for r in rows]

"""What does exact mode cost over our own default mode?

The GPT of 10.9M parameters in 8 units of 64 and of 256 rows (sequences of 64 tokens, 1 or 4 a unit), however many ranks
there are; data parallel on both sides, float32, fused AdamW, one thread a rank, Gloo. `--slices` adds exact mode with
weights in slices, all of which a rank computes one after the other; `_stages` adds two stages, each rank computing one,
in as many units, and with 2 and 4 micro-batches of units that are smaller by as much, beside the same without stages.

    python bench/exact_cost.py [--model gpt64 gpt256 gpt64_slices gpt256_slices gpt256_stages] [--ranks 2] [--rounds 12]

Target (time of the default mode over that of exact mode): 1 / 1.10 at one slice.
"""

from __future__ import annotations

from functools import partial

from models import Case, gpt
from peers import Side, ours
from race import race

UNITS = 8
ROWS = {"gpt64": 1, "gpt256": 4}


def case(samples: int, ranks: int, split: bool, shrink: int = 1) -> Case:
    """The GPT with so many samples a unit, on any number of ranks."""
    return gpt(UNITS * samples // 4, True) if samples >= 4 else _small(samples)


def _small(samples: int) -> Case:
    whole = gpt(2, True)
    batches = [{k: t[: UNITS * samples] for k, t in b.items()} for b in whole.batches]
    return Case(whole.model, whole.loss, batches, whole.blocks, whole.ways)


def exact(given: Case, slices: int = 1, stages: int = 1, micro_batches: int = 1) -> Side:
    """Exact mode."""
    return ours(given, "data", f"units={UNITS},slices={slices},stages={stages}", micro_batches)


SLICES = {f"exact_{n}_slices": partial(exact, slices=n) for n in (2, 4, 8)}
STAGES = {
    f"exact_{stages}_stages_{parts}_parts": partial(exact, stages=stages, micro_batches=parts)
    for parts in (1, 2, 4)
    for stages in (1, 2)
    if (stages, parts) != (1, 1)
}
EACH = {name: partial(case, n) for name, n in ROWS.items()}

if __name__ == "__main__":
    race(
        "exact_cost",
        {"laminar": exact, "default": partial(ours, plan="data")},
        split=True,
        target=round(1 / 1.10, 3),
        doc=__doc__,
        extra={f"{name}_slices": SLICES for name in ROWS} | {"gpt256_stages": STAGES},
        known=EACH | {f"{name}_slices": make for name, make in EACH.items()} | {"gpt256_stages": EACH["gpt256"]},
    )

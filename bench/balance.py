"""Are ranks equally busy when samples have different lengths, and what does it take to make them so?

On six distributions of lengths (`length_cases.py`), with the cost of Llama-3.1-8B (8417 n^2 + 663883653 n): the
slowest rank's cost over the mean, the sum over steps and the worst step, of batches as the shuffle made them. Beside
ours, with and without cuts: torch's order, Karmarkar-Karp, longest first, and Flatflow's scheduler, its own function
if `--flatflow` names where it is installed. Its unstable mode takes samples out of their batches; ours and all others
keep them there. Then: how long a step and an epoch of 4.2 million samples take to plan, whether a sample's step in
one epoch says anything about the next, and what a rank that falls to half its speed costs. Costs are modelled, not
measured; `balance_real.py` runs steps.

    python bench/balance.py [--flatflow FOLDER] [--steps 40] [--only balance|time|epoch|shuffle|speed]

Targets: cut, at most 1.005 everywhere; without cuts never worse than longest first; 1 ms for 512 samples on 64 ranks;
5 s for the epoch; |r| < 0.01; 1.03 of the ideal step from the third step on.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import report
from length_cases import DISTRIBUTIONS, Lengths, drawn
from rivals import Parts, equal_counts, flatflow, karmarkar_karp, longest_first, torch_order

from laminar.data import BalancedSampler, RankSpeeds, SampleCost, assign, assign_steps, cut_and_assign

LINEAR, SQUARE = 663883653, 8417
COST = SampleCost(per_token=float(LINEAR), per_square=float(SQUARE))
SIZES = ((8, 256, 4), (32, 512, 4), (64, 512, 2))
"""Ranks, samples of a global batch, and of a micro-batch, which Flatflow asks for."""


def of_parts(costs: Any, parts: Parts) -> list[float]:
    """The cost that each rank has."""
    return [float(costs[part].sum()) for part in parts]


def slowest(steps: list[list[float]]) -> dict[str, float]:
    """Of all steps together, and of the worst."""
    tops, means = [max(step) for step in steps], [sum(step) / len(step) for step in steps]
    each = [top / mean for top, mean in zip(tops, means, strict=True)]
    return {"all": round(sum(tops) / sum(means), 5), "worst": round(max(each), 5)}


def balance(steps: int, theirs: Any) -> None:
    """A row for each distribution and size."""
    for name in DISTRIBUTIONS:
        for ranks, batch, micro in SIZES:
            lengths = drawn(name, steps * batch)
            batches: list[Lengths] = list(lengths.reshape(steps, batch))
            costs = [COST.of(b) for b in batches]
            both = list(zip(batches, costs, strict=True))
            row = {
                "torch order": slowest([of_parts(c, torch_order(batch, ranks)) for c in costs]),
                "longest first": slowest([of_parts(c, longest_first(c.tolist(), ranks)) for c in costs]),
                "Karmarkar-Karp": slowest([of_parts(c, karmarkar_karp(c.tolist(), ranks)) for c in costs]),
                "equal counts": slowest([of_parts(c, equal_counts(b.tolist(), ranks)) for b, c in both]),
                "ours": slowest([assign(c, ranks).work.tolist() for c in costs]),
            }
            cuts = [cut_and_assign(b, ranks, COST) for b in batches]
            row["ours, cut"] = slowest([cut.work.tolist() for cut in cuts])
            if theirs:
                for side, stable in (("Flatflow stable", True), ("Flatflow unstable", False)):
                    found = theirs(lengths, ranks, batch, micro, stable)
                    row[side] = slowest([of_parts(COST.of(lengths), parts) for parts in found])
            share = sum(cut.cut_samples for cut in cuts) / len(lengths)
            report(
                "balance",
                {
                    "what": "slowest rank over mean",
                    "lengths": name,
                    "ranks": ranks,
                    "batch": batch,
                    "steps": steps,
                    **row,
                    "samples_cut": round(share, 5),
                    "target": {"ours, cut": 1.005},
                },
            )


def plan_time() -> None:
    """One step of 512 samples on 64 ranks: median and 99th of a hundred."""
    kinds = {"alike": np.ones(64), "two kinds": np.repeat([1.0, 2.0], 32), "all different": np.linspace(1, 2, 64)}
    for name in DISTRIBUTIONS:
        row: dict[str, Any] = {}
        batches = [COST.of(b) for b in drawn(name, 100 * 512).reshape(100, 512)]
        for kind, speeds in kinds.items():
            row[kind] = _milliseconds([lambda c=c, s=speeds: assign(c, 64, s) for c in batches])
        lengths = drawn(name, 100 * 512).reshape(100, 512)
        row["cut"] = _milliseconds([lambda b=b: cut_and_assign(b, 64, COST) for b in lengths])
        report(
            "balance",
            {"what": "processor ms to plan a step, 512 samples on 64 ranks", "lengths": name, **row, "target": 1.0},
        )


def _milliseconds(calls: list[Callable[[], Any]]) -> dict[str, float]:
    calls[0]()
    took = []
    for call in calls:
        start = time.process_time()
        call()
        took.append(1e3 * (time.process_time() - start))
    return {"median": round(statistics.median(took), 3), "p99": round(sorted(took)[-2], 3)}


def epoch() -> None:
    """All steps of 4.2 million samples: assigned, and handed out by a sampler, shuffle included."""
    for name in DISTRIBUTIONS:
        lengths = drawn(name, 1 << 22)
        for ranks, batch, _ in SIZES:
            start = time.process_time()
            assign_steps(COST.of(lengths).reshape(-1, batch), ranks)
            assigned = time.process_time() - start
            sampler = BalancedSampler(lengths, batch, ranks=ranks, rank=0, cost=COST)
            start = time.process_time()
            for _ in sampler:
                pass
            handed = time.process_time() - start
            report(
                "balance",
                {
                    "what": "processor s for an epoch of 4.2M samples",
                    "lengths": name,
                    "ranks": ranks,
                    "batch": batch,
                    "assigned": round(assigned, 2),
                    "sampled": round(handed, 2),
                    "target": 5.0,
                },
            )


def shuffle(theirs: Any) -> None:
    """A sample's step in one epoch against that in the next, and against its length."""
    lengths = drawn("github", 1 << 18)
    samplers = [BalancedSampler(lengths, 512, ranks=8, rank=r, cost=COST) for r in range(8)]
    epochs = []
    for _ in range(2):
        step = np.empty(len(lengths))
        for sampler in samplers:
            for share in sampler.shares():
                step[share.samples] = share.step
        epochs.append(step)
    row = {
        "ours": round(float(np.corrcoef(*epochs)[0, 1]), 5),
        "ours, length": round(float(np.corrcoef(epochs[0], lengths)[0, 1]), 5),
    }
    if theirs:
        some, dice = lengths[: 1 << 15], np.random.default_rng(1)
        for side, stable in (("Flatflow stable", True), ("Flatflow unstable", False)):
            found = []
            for _ in range(2):
                order, step = dice.permutation(len(some)), np.empty(len(some))
                for number, parts in enumerate(theirs(some[order], 8, 512, 4, stable)):
                    step[order[[s for part in parts for s in part]]] = number
                found.append(step)
            row[side] = round(float(np.corrcoef(*found)[0, 1]), 5)
    report(
        "balance", {"what": "correlation of a sample's step in two epochs", "lengths": "github", **row, "target": 0.01}
    )


def speed() -> None:
    """Rank 3 of 8 falls to half its speed: each later step over the ideal one, the worst of 50 runs."""
    for noise in (0.0, 0.02, 0.05):
        runs = []
        for seed in range(50):
            dice, true, found = np.random.default_rng(seed), np.ones(8), RankSpeeds(8)
            batches, took = drawn("ff-web", 30 * 512, seed).reshape(30, 512), []
            for number, lengths in enumerate(batches):
                true[3] = 1.0 if number < 15 else 0.5
                work = assign(COST.of(lengths), 8, found.speeds).work
                took.append(float((work / true).max()) / (float(work.sum()) / float(true.sum())))
                found.observe(work / true * np.exp(noise * dice.standard_normal(8)), work)
            runs.append(took[15:])
        worst = [round(max(step), 4) for step in zip(*runs, strict=True)]
        typical = [round(statistics.median(step), 4) for step in zip(*runs, strict=True)]
        report(
            "balance",
            {
                "what": "step over ideal, one rank of 8 at half speed from step 1",
                "noise": noise,
                "steps 1 to 4": typical[:4],
                "steps 1 to 4, worst run": worst[:4],
                "from step 3": max(typical[2:]),
                "from step 3, worst run": max(worst[2:]),
                "target": 1.03,
            },
        )


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--flatflow", default="", help="folder it is installed in")
    args.add_argument("--steps", type=int, default=40)
    args.add_argument("--only", default="", choices=["", "balance", "time", "epoch", "shuffle", "speed"])
    given = args.parse_args()
    theirs = flatflow(given.flatflow, LINEAR, SQUARE) if given.flatflow else None
    parts: dict[str, Callable[[], None]] = {
        "balance": lambda: balance(given.steps, theirs),
        "time": plan_time,
        "epoch": epoch,
        "shuffle": lambda: shuffle(theirs),
        "speed": speed,
    }
    for name, run in parts.items():
        if given.only in ("", name):
            run()


if __name__ == "__main__":
    main()

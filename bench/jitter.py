"""Where stage times vary, what does a pipeline lose, and how much of it do credits buy back?

A small GPT in 2, 4 and 8 stages, one a rank, on Gloo ranks of this machine. Behind every firing of a stage stands a
sleep: lognormal, sigma 0.5, drawn per stage, micro-batch and direction (means `--forward-ms`, and twice that backward).
Sleeps need no processor and take nearly all of the time, so 8 ranks fit on 2 cores, and what is compared is who waits
for whom.

torch.distributed.pipelining's 1F1B with the same split, micro-batches and draws is held against ours with as much
stash (window 0 and 2) and with more (window 2): a round is one step of each side with one set of draws, the order
turning. The simulator (`laminar/cost/sim/pipeline.py`) executes the nets of our plans with the draws alone; for torch's
side it takes our 1F1B with stash 1 and window 0. Losses of two steps are compared first.

    python bench/jitter.py [--ranks 2 4 8] [--micro 16 32] [--rounds 12] [--png jitter.png]

Targets (torch's time over ours): 1.0 with equal stash and window 0; with twice the stash and a window of 2, 1.07 with
2 stages, 1.12 with 4 and 8; the simulator's ratios within 0.05 of the measured ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import RESULTS, ratio, report
from models import GPT
from peers import adamw
from race import _ranks
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from train_pipeline import Piece, starts

import laminar
from laminar.api import micro_batches
from laminar.cost.sim.pipeline import execute

D, TOKENS, VOCAB = 32, 8, 64
SIGMA = 0.5
OURS = {
    f"window {w}, stash {s:g}": {"window": w, "stash": s}
    for w, s in ((0, 1.0), (2, 1.0), (2, 1.25), (2, 1.5), (2, 2.0), (2, 3.0))
}
EQUAL, TWICE = "window 0, stash 1", "window 2, stash 2"
TARGETS = {2: 1.07, 4: 1.12, 8: 1.12}
WITHIN = 0.05


class Draws:
    """How long each firing of the round lasts, the same for every side; none while `round` is None."""

    def __init__(self, forward_ms: float) -> None:
        self.forward_ns, self.round = forward_ms * 1e6, None

    def ns(self, part: str, stage: int, micro: int, round_: int) -> int:
        """Of one firing; `part` is F or B."""
        dice = random.Random(f"{part} {stage} {micro} {round_}")
        mean = self.forward_ns * (2 if part == "B" else 1)
        return round(mean * math.exp(dice.gauss(-SIGMA * SIGMA / 2, SIGMA)))

    def lengthen(self, part: str, stage: int, micro: int) -> None:
        """Sleep as long as was drawn for a firing."""
        if self.round is not None:
            time.sleep(self.ns(part, stage, micro, self.round) / 1e9)


class Ours:
    """A job with stages whose firings are lengthened."""

    def __init__(self, micro: int, draws: Draws, options: dict[str, Any]) -> None:
        model, ranks = gpt(), dist.get_world_size()
        graph = laminar.capture(model, loss_of, micro_batches(batch_of(0, micro), micro)[0])
        cuts = [rf"blocks\.{k}(\.|$)" for k in starts(ranks, ranks)[1:]]
        plan = laminar.plans.pipeline(graph, cuts, micro, **options)
        self.job = laminar.parallelize(model, loss_of, adamw, batch=batch_of(0, micro), plan=plan, device="cpu")
        actors = self.job.pipes.training.actors
        self.net = actors.net
        fire = actors._run

        def lengthened(name: str, k: int, step: int, inputs: Any) -> Any:
            made = fire(name, k, step, inputs)
            if name[0] in "FB":
                draws.lengthen(name[0], int(name[1:]), k)
            return made

        actors._run = lengthened

    def step(self, batch: Any) -> float:
        """One step; its loss."""
        return float(self.job.step(batch).loss)

    def simulated_ns(self, draws: Draws, round_: int) -> int:
        """A step as the simulator has it."""

        def work(name: str, k: int, step: int) -> int:
            return draws.ns(name[0], int(name[1:]), k, round_) if name[0] in "FB" else 0

        return execute(self.net, work, 1).step_ends[0]


class Torch:
    """torch.distributed.pipelining, lengthened likewise."""

    def __init__(self, micro: int, draws: Draws) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.rank, self.last, model = rank, ranks - 1, gpt()
        first = starts(ranks, ranks)
        piece = Piece(model, first[rank], [*first, ranks][rank + 1])
        stage: Any = PipelineStage(piece, rank, ranks, torch.device("cpu"))
        for part, name in (("F", "forward_one_chunk"), ("B", "backward_one_chunk")):
            setattr(stage, name, self._lengthened(getattr(stage, name), part, rank, draws))
        entropy = lambda out, t: F.cross_entropy(out.flatten(0, 1), t.flatten())  # noqa: E731
        self.schedule, self.optimizer = Schedule1F1B(stage, micro, loss_fn=entropy), adamw(piece.parameters())

    @staticmethod
    def _lengthened(chunk: Callable[..., Any], part: str, rank: int, draws: Draws) -> Any:
        def run(k: int, *args: Any, **options: Any) -> Any:
            made = chunk(k, *args, **options)
            draws.lengthen(part, rank, k)
            return made

        return run

    def step(self, batch: Any) -> float:
        """One step; its loss, on the last rank."""
        losses: list[Tensor] = []
        given = (batch["ids"],) if self.rank == 0 else ()
        more = {"target": batch["target"], "losses": losses} if self.rank == self.last else {}
        self.schedule.step(*given, **more)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0


def gpt() -> GPT:
    """A block a rank, with the weights every side starts from."""
    torch.manual_seed(0)
    return GPT(dist.get_world_size(), D, 2, VOCAB, TOKENS)


def loss_of(model: Any, batch: Any) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["target"].flatten())


def batch_of(seed: int, micro: int) -> dict[str, Tensor]:
    """A sample per micro-batch."""
    ids = torch.randint(VOCAB, (micro, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids[:, :-1].contiguous(), "target": ids[:, 1:].contiguous()}


def measured(micro: int, rounds: int, forward_ms: float) -> dict[str, Any]:
    """On a rank: seconds of each side by round, measured and simulated."""
    draws = Draws(forward_ms)
    sides: dict[str, Any] = {"torch": Torch(micro, draws)}
    sides |= {name: Ours(micro, draws, options) for name, options in OURS.items()}
    ranks = dist.get_world_size()
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(2):
        for name, side in sides.items():
            said = torch.tensor(side.step(batch_of(i, micro)))
            dist.broadcast(said, ranks - 1)
            losses[name].append(round(float(said), 6))
    for said in losses.values():
        assert all(abs(a - b) < 1e-4 * b for a, b in zip(said, losses["torch"], strict=True)), losses
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for draws.round in range(rounds):
        for name in names if draws.round % 2 == 0 else reversed(names):
            dist.barrier()
            start = time.perf_counter()
            sides[name].step(batch_of(draws.round, micro))
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    ours = {name: side for name, side in sides.items() if name != "torch"}
    simulated = {name: [side.simulated_ns(draws, r) / 1e9 for r in range(rounds)] for name, side in ours.items()}
    simulated["torch"] = simulated[EQUAL]
    out = {
        "times": times,
        "simulated": simulated,
        "losses": losses["torch"],
        "stashed": {name: side.job.pipes.training.actors.peaks.get("F0->B0") for name, side in ours.items()},
    }
    for side in ours.values():
        side.job.close()
    return out


def told(ranks: int, micro: int, given: argparse.Namespace) -> None:
    """One result, reported."""
    load = os.getloadavg()[0]
    found = _ranks(ranks, measured, micro, given.rounds, given.forward_ms)
    times, simulated = found["times"], found["simulated"]
    sides = {}
    for name in OURS:
        real, likely = ratio(times, "torch", name), ratio(simulated, "torch", name)
        sides[name] = {
            "torch_over_laminar": real,
            "simulated": likely,
            "apart": round(real["median"] - likely["median"], 3),
            "stashed_by_stage_0": found["stashed"][name],
        }
    row = {
        "ranks": ranks,
        "micro_batches": micro,
        "rounds": given.rounds,
        "forward_ms": given.forward_ms,
        "sigma": SIGMA,
        "sides": sides,
        "targets": {"equal_stash": 1.0, "twice_the_stash": TARGETS[ranks], "apart": WITHIN},
        "met": {
            "equal_stash": sides[EQUAL]["torch_over_laminar"]["median"] >= 1.0,
            "twice_the_stash": sides[TWICE]["torch_over_laminar"]["median"] >= TARGETS[ranks],
            "apart": max(abs(s["apart"]) for s in sides.values()) <= WITHIN,
        },
        "ms": {name: round(statistics.median(ts) * 1e3, 1) for name, ts in times.items()},
        "simulated_ms": {name: round(statistics.median(ts) * 1e3, 1) for name, ts in simulated.items()},
        "losses_of_2_steps": found["losses"],
        "load_before": round(load, 2),
    }
    report("jitter", row)


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Ratios over credits, measured (with quartiles) and simulated, a panel for each pipe."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(rows), 3.6), layout="constrained")
    axes = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    credits = [o["stash"] for o in OURS.values() if o["window"] == 2]
    for axis, row in zip(axes, rows, strict=True):
        mine = [row["sides"][f"window 2, stash {c:g}"] for c in credits]
        real = [m["torch_over_laminar"] for m in mine]
        spread = [[r["median"] - r["low"] for r in real], [r["high"] - r["median"] for r in real]]
        axis.errorbar(credits, [r["median"] for r in real], spread, marker="o", capsize=3, label="measured, window 2")
        axis.plot(credits, [m["simulated"]["median"] for m in mine], "--", label="simulated, window 2")
        fixed = row["sides"][EQUAL]["torch_over_laminar"]["median"]
        axis.plot([1], [fixed], "s", label="measured, window 0")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_title(f"{row['ranks']} stages, {row['micro_batches']} micro-batches", fontsize=10)
        axis.set_xlabel("stash, times that of 1F1B")
    axes[0].set_ylabel("torch's step over ours")
    axes[0].legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(path)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--ranks", type=int, nargs="*", choices=list(TARGETS), default=list(TARGETS))
    args.add_argument("--micro", type=int, nargs="*", default=[16, 32])
    args.add_argument("--rounds", type=int, default=12)
    args.add_argument("--forward-ms", type=float, default=20.0, help="mean of a forward; a backward has twice that")
    args.add_argument("--png", type=Path, help="draw the latest ratios of each pipe over credits")
    given = args.parse_args()
    for ranks, micro in product(given.ranks, given.micro):
        told(ranks, micro, given)
    if given.png:
        lines = map(json.loads, (RESULTS / "jitter.jsonl").read_text().splitlines())
        latest = {(row["ranks"], row["micro_batches"]): row for row in lines}
        draw([latest[key] for key in sorted(latest)], str(given.png))


if __name__ == "__main__":
    main()

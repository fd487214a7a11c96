"""Tries to break what a search claims: no plan of its space is faster than its bound, no named one than what it found.

For one model on one machine: a search, then so many plans, each simulated in full and judged. They are all presets on
all meshes, pipelines of equal stages, and what `tests/attack/plans.py` makes of them: it goes downhill from each, by
placements, cuts and schedules. The machines are odd on purpose: slow links, little memory, measured prices, three
ranks, nodes of different sizes, devices that differ.

Each plan is held against

    the search     if `space.contains` has it: its seconds against the bound, and if it has a name, against what was
                   found
    its own cell   seconds and bytes against the best bound of the cell, which says more than that of the search;
                   branches apart against the bound of their own way
    free batches   plans of every equal part of the batch, in samples a second (a quarter of the pairs)
    single parts   of clusters whose parts differ: plans on one part alone, by the same bound

A plan counts once it was judged, and once only. How many there are is said by count, not by time, so a slow machine
takes longer and sees the same. A search is cut short by time, so what it finds is not the same on every machine.

    python -m tests.attack.run --jobs 16 --times 3 --seed 7      every model on every machine, three times as many plans

Collects nothing itself: `tests/attack/test_attack.py` runs a slice in the normal run, and a hundred thousand plans in
`make prove`. Not tried: pins, `only`, other optimizers than AdamW, margins, offload, two regions of branches at once.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import laminar
from laminar.errors import LaminarError
from laminar.forecast.step import WORKSPACE_BYTES, predict
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.placement import presets
from laminar.planner.search.best_first.search import promised
from laminar.planner.space.plan_space import Space
from laminar.planner.space.request import Request
from laminar.rules.samples import samples_of
from tests.attack.judge import Attack, Attacked, Claim
from tests.attack.models import MACHINES, MEMORY, MODELS, graph_of, plans_of, short
from tests.attack.plans import forget, part_of
from tests.support.seeds import dice

BUDGETS = (0.0, 0.2, 1.0)
"""Processor seconds of a search: one of them, drawn."""
FREE = 1 / 4
"""Share of the pairs whose batch is also left free, and of their plans those that are for a part of it."""
PARTS = 2
"""Equal parts of the batch that are gone into beside the one that was taken."""
ALONE = 0.3
"""Where parts differ, the share of plans on one part."""


# --- one model on one machine


class Pair:
    """Searches for one model on one machine, and attacks on all that they claim."""

    def __init__(self, model: str, machine: str, seed: int) -> None:
        self.graph, self.cluster = graph_of(model), MACHINES[machine]()
        self.rng = dice(f"{model} {machine} {seed}")
        self.report = Attacked(model, machine)
        self.shares = MEMORY if short(machine, self.rng) else (None,)
        self.free = self.rng.random() < FREE
        self.budget_s = self.rng.choice(BUDGETS)

    def run(self, plans: int) -> Attacked:
        """Searches until one finds something, and so many plans."""
        began = time.process_time()
        forget()
        for share in self.shares:
            if self.attacked(self.request(share), plans):
                break
        self.report.spent_s = time.process_time() - began
        return self.report

    def attacked(self, request: Request, plans: int) -> bool:
        """One search, and all that it claims; whether it found anything."""
        self.report.memory_bytes = request.memory_bytes
        found = self.searched(request)
        attack = Attack(
            self.graph, request, [] if found is None else [claim_of(found, self.graph, request)], self.rng, self.report
        )
        attack.found = [] if found is None else [found]
        attack.presets()
        if found is not None:
            if found.certificate.contradictions:
                self.report.wrong.append(f"the search contradicts itself: {found.certificate.contradictions[0]}")
            self.on(attack, plans)
        return found is not None

    def on(self, attack: Attack, plans: int) -> None:
        """All kinds of plans, until there are as many."""
        alone = [] if attack.alike else self.alone(attack)
        for one in alone:
            one.presets()
            one.run(round(ALONE * plans / len(alone)))
        if attack.alike and plans >= 100:
            attack.walk()
        if attack.alike and self.free:
            self.batches(attack.request, round(FREE * plans))
        attack.run(plans - self.report.simulated)
        for one in alone:  # where samples need each other there are no pipelines over parts
            one.run(plans - self.report.simulated)

    def request(self, share: float | None) -> Request:
        """With a share of what data parallel holds."""
        if share is None:
            return Request(self.cluster)
        data = presets.data_parallel(self.graph, Mesh({"dp": self.cluster.devices}))
        peak = predict(self.graph, data, self.cluster).memory.peak_bytes
        fixed = WORKSPACE_BYTES if self.cluster.kind == "gpu" else 0  # no plan can do without
        return Request(self.cluster, fixed + share * (peak - fixed))

    def searched(self, request: Request, **asked: Any) -> Plan | Staged | None:
        """What a search finds; nothing only where nothing fits."""
        try:
            return laminar.plan(
                self.graph, self.cluster, budget_s=self.budget_s, memory_bytes=request.memory_bytes, **asked
            )
        except LaminarError as error:
            if request.memory_bytes is None or "no plan fits" not in str(error):
                raise
            return None

    def alone(self, attack: Attack) -> list[Attack]:
        """Each part of a cluster whose parts differ, by itself: what is claimed holds for plans on one part, too."""
        found = []
        for part in {part.hash: part for part in self.cluster.parts if part.devices > 1}.values():
            request = replace(attack.request, cluster=part)
            claim = replace(attack.claims[0], space=space_of(self.graph, request))
            found.append(Attack(self.graph, request, [claim], self.rng, self.report, "alone:"))
        return found

    def batches(self, request: Request, plans: int) -> None:
        """The same question with the batch left free, and plans for every part of it."""
        found = self.searched(request, batch="free")
        said = found.account["batch"] if found is not None else {}
        if found is None or said["bound_samples_per_s"] is None:
            return
        mine = {"samples": said["samples"], "bound_samples_per_s": said["bound_samples_per_s"], "why": ""}
        others = [row for row in said["others"] if row["bound_samples_per_s"] is not None]
        rows = [mine, *self.rng.sample(others, min(PARTS, len(others)))]
        for row in rows:
            samples, most = row["samples"], row["bound_samples_per_s"]
            if row["why"] != "no mesh shares it evenly":
                most = min(most, said["bound_samples_per_s"])
            graph = part_of(self.graph, samples_of(self.graph) // samples)
            step_s = found.step_s if row is mine else 0.0
            claim = Claim(samples / most if most else math.inf, step_s or 0.0, space_of(graph, request))
            one = Attack(graph, request, [claim], self.rng, self.report, f"batch of {samples}:")
            if row is mine:
                one.presets()
            one.run(round(plans / len(rows)))


def space_of(graph: Graph, request: Request) -> Space:
    """All plans of a graph as captured: of a batch that need not have been searched, or on a part of a cluster."""
    return Space.of(graph, request, promised(graph, request)[1])


def claim_of(found: Plan | Staged, graph: Graph, request: Request) -> Claim:
    """What a search says; of a plan from outside of what was searched, only that no plan with a name is faster."""
    assert found.step_s is not None
    if found.bound_s is None:
        return Claim(0.0, found.step_s, space_of(graph, request))
    return Claim(found.bound_s, found.step_s, found.space)


def attacked(case: tuple[str, str, float, int]) -> Attacked:
    """One model on one machine, in a process of its own."""
    model, machine, times, seed = case
    torch.set_num_threads(1)
    try:
        return Pair(model, machine, seed).run(round(times * plans_of(model)))
    except Exception as error:
        out = Attacked(model, machine)
        out.wrong.append(f"{type(error).__name__}: {error}")
        return out


def main() -> int:
    """The command line."""
    parse = argparse.ArgumentParser(description="plans that may contradict a certificate")
    parse.add_argument("--jobs", type=int, default=2)
    parse.add_argument("--times", type=float, default=1.0, help="as many plans for each model on each machine")
    parse.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parse.add_argument("--models", nargs="*", default=list(MODELS))
    parse.add_argument("--machines", nargs="*", default=list(MACHINES))
    parse.add_argument("--out", help="a file for one line of JSON for each")
    told = parse.parse_args()
    some = [(model, machine, told.times, told.seed) for model in told.models for machine in told.machines]
    print(f"seed {told.seed}: {len(some)} pairs", flush=True)
    simulated, inside, wrong = 0, 0, 0
    with ProcessPoolExecutor(told.jobs) as pool:
        for done, one in enumerate(pool.map(attacked, some), 1):
            simulated, inside, wrong = simulated + one.simulated, inside + one.inside, wrong + bool(one.wrong)
            if told.out:
                with Path(told.out).open("a") as file:
                    file.write(json.dumps(one.to_json()) + "\n")
            if one.wrong or done % 20 == 0:
                memory = f", {one.memory_bytes / 1e6:.3g} MB" if one.memory_bytes else ""
                print(
                    f"{done}/{len(some)} {one.model} on {one.machine}{memory}: {one.simulated} plans, "
                    f"closest {one.closest:.4f}",
                    *one.wrong[:4],
                    sep="\n    ",
                    flush=True,
                )
    print(f"{simulated} plans judged, {inside} of them in a space, {wrong} of {len(some)} pairs contradicted")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

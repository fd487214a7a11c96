"""Tries to break what a search claims: no plan of its space is faster than its bound, no named one than what it found.

For one model on one machine, searches with little time and with more; then plans of every kind that somebody could
write, simulated one by one: all presets on all meshes, pipelines with their stages cut anyhow under any schedule,
random placements, and walks downhill from the best of them. The machines are odd on purpose: slow links, little
memory, measured prices, three ranks, parts that differ.

    python -m tests.attack --jobs 16 --seconds 20 --seed 7      every model on every machine, so long each

Collects nothing itself: `tests/test_attack.py` runs a slice in the normal run and as much as it takes for a hundred
thousand plans in `make prove`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import laminar
from laminar.errors import LaminarError
from laminar.forecast import predict, predict_staged
from laminar.ir.cluster import Cluster, Figure
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plan import Plan
from laminar.ir.staged import Staged
from laminar.planner.bound import Bounds
from laminar.planner.cells import Cell, divisors
from laminar.planner.certificate import ROUNDING
from laminar.planner.chain import improve
from laminar.planner.request import Request
from laminar.planner.score import Model
from laminar.rules.samples import samples_of
from laminar.search import presets
from laminar.search.draw import random_plan
from laminar.search.micro import micro
from laminar.staging import pipeline, work_s
from tests.seeds import dice
from tests.zoo import EXAMPLES, NAMES, specimen

PROFILE = Path(__file__).parents[1] / "bench" / "results" / "profile_2.json"
SCHEDULES = (None, "gpipe", "1f1b", "zero-bubble", "zero-bubble-level", "backward-first")
BUDGETS = (0.2, 2.0)
"""Processor seconds of the searches."""


class Products(nn.Module):
    """Three products of one size whose weights are a list, or one after the other with work of different size."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.empty(a, b)) for a, b in itertools.pairwise(widths)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of every row."""
        for w in self.ws:
            x = torch.relu(x @ w)
        return x.square().mean()


PRODUCTS = {"even": (1024, 1024, 1024, 1024), "wide": (8192, 8192, 8192), "front": (4096, 4096, 256, 64, 64),
            "back": (64, 64, 256, 4096, 4096)}  # fmt: skip
DEEP = ("3", "5", "7")
"""GPTs of so many layers, whose work is large beside what a step costs anyway."""
MODELS = (*NAMES, *DEEP, *PRODUCTS)


@cache
def graph_of(name: str) -> Graph:
    """A model of the zoo, on meta where it is larger, a GPT of so many layers, a Llama of 7b, or some products."""
    from tests.test_search import traced

    if name.isdigit():
        return traced(int(name), batch=16, d=256, tokens=64)
    if name == "7b":
        from llama import Llama, loss

        with torch.device("meta"):
            model = Llama(layers=32, d=4096, heads=32, kv_heads=32, hidden=11008, vocab=32000, tokens=2048).bfloat16()
            ids = torch.zeros(64, 2048, dtype=torch.long)
        return laminar.capture(model, loss, (ids, ids))
    if name in PRODUCTS:
        with torch.device("meta"):
            model, batch = Products(PRODUCTS[name]), torch.empty(64, PRODUCTS[name][0])
        return laminar.capture(model, lambda model, x: model(x), batch)
    if name.endswith(":small"):
        return laminar.api.graph_of(str(EXAMPLES / name))
    return specimen(name).graph


def slow_link(spec: str, bytes_per_s: float) -> Cluster:
    """A machine whose ranks are far from each other."""
    cluster = Cluster.preset(spec)
    level = replace(cluster.levels[-1], bytes_per_s=Figure(bytes_per_s, "assumed"))
    return replace(cluster, levels=(*cluster.levels[:-1], level))


MACHINES: dict[str, Callable[[], Cluster]] = {
    **{spec: (lambda spec=spec: Cluster.preset(spec)) for spec in (  # type: ignore[misc]
        "2xcpu", "3xcpu", "4xcpu", "8xcpu", "2x4xcpu", "4xh100", "8xh100@pcie", "2x2xa100", "4x2xh100@nvlink+eth50",
        "2xh100+2xa100")},
    "2xcpu far": lambda: slow_link("2xcpu", 1e7),
    "4xcpu far": lambda: slow_link("4xcpu", 1e8),
    "measured": lambda: Cluster.load(PROFILE),
}  # fmt: skip
MEMORY = (None, 0.6)
"""What a rank may fill: all there is, or so much of what data parallel holds."""


# --- plans that somebody could write


def meshes(devices: int) -> list[Mesh]:
    """One axis of either name, and all products of two."""
    found = [Mesh({"dp": devices}), Mesh({"tp": devices})]
    return found + [Mesh({"dp": devices // n, "tp": n}) for n in divisors(devices) if 1 < n < devices]


def typed(graph: Graph, devices: int) -> Iterator[Callable[[], Plan]]:
    """Every preset on every mesh."""
    for mesh in meshes(devices):
        if "tp" in mesh.names:
            yield lambda mesh=mesh: presets.tensor_parallel(graph, mesh)  # type: ignore[misc]
        if "dp" in mesh.names:
            yield lambda mesh=mesh: presets.data_parallel(graph, mesh)  # type: ignore[misc]
            for stage in (1, 2, 3):
                yield lambda mesh=mesh, stage=stage: presets.zero(graph, mesh, stage)  # type: ignore[misc]
            yield lambda mesh=mesh: presets.zero(graph, mesh, 3, gather_once=True)  # type: ignore[misc]


def piped(graph: Graph, devices: int) -> Iterator[Callable[[], Staged]]:
    """Pipelines of the default cut, with data and tensor parallel inside."""
    for stages in (s for s in divisors(devices) if s > 1):
        inner = devices // stages
        ways = [Mesh({"dp": inner})] + ([Mesh({"tp": inner})] if inner > 1 else [])
        for parts in (m for m in (stages, 2 * stages, 4 * stages) if samples_of(graph) % m == 0):
            for mesh in ways:
                yield lambda s=stages, m=parts, w=mesh: pipeline(part_of(graph, m), s, m, inner=w)  # type: ignore[misc]


_PARTS: dict[tuple[str, int], Graph] = {}


def part_of(graph: Graph, parts: int) -> Graph:
    """Of a micro-batch."""
    return _PARTS.setdefault((graph.hash, parts), micro(graph, parts))


def skewed(graph: Graph, devices: int, rng: random.Random) -> Staged:
    """A pipeline cut anyhow: ops are said to take other times than they do, evenly distorted or at random."""
    stages = rng.choice([s for s in divisors(devices) if s > 1])
    virtual = rng.choice((1, 1, 1, 2))
    parts = rng.choice([m for m in divisors(samples_of(graph)) if stages <= m <= 16 * stages] or [stages])
    part = part_of(graph, parts)
    lean, noise = rng.choice((1.0, 0.9, 0.75, 0.6, 1.2)), rng.choice((0.0, 0.0, 0.5, 2.0))
    work = {name: s * math.exp(noise * rng.gauss(0, 1)) for name, s in work_s(part).items()}
    told = [{name: s * lean ** (stages - 1 - p) for name, s in work.items()} for p in range(stages)]
    inner = rng.choice([Mesh({"dp": devices // stages}), Mesh({"tp": devices // stages})])
    options: dict[str, Any] = {"speeds": told, "virtual": virtual, "inner": inner}
    if virtual == 1:
        options["schedule"] = rng.choice(SCHEDULES)
    if rng.random() < 0.3:
        options |= {"window": rng.choice((1, 2, None)), "stash": rng.choice((1.0, 2.0))}
    return pipeline(part, stages, parts, **options)


# --- the attack


@dataclass
class Attacked:
    """What came of one model on one machine."""

    model: str
    machine: str
    memory_bytes: float | None
    simulated: int = 0
    outside: int = 0
    """Of those, plans that are not in the space."""
    wrong: list[str] = field(default_factory=list)
    """Plans below a bound, and named plans faster than what was found."""
    closest: float = math.inf
    """Of the seconds of a plan, the least share that its cell's bound leaves."""


class Attack:
    """One model on one machine: searches, and whatever may contradict them."""

    def __init__(self, model: str, machine: str, share: float | None, seed: int) -> None:
        self.graph, self.cluster = graph_of(model), MACHINES[machine]()
        self.memory_bytes = None
        if share is not None:
            data = presets.data_parallel(self.graph, Mesh({"dp": self.cluster.devices}))
            self.memory_bytes = share * predict(self.graph, data, self.cluster.parts[0]).memory.peak_bytes
        self.rng = dice(f"{model} {machine} {share} {seed}")
        self.report = Attacked(model, machine, self.memory_bytes)
        self.found: list[Plan | Staged] = []
        self.best: dict[str, tuple[float, Plan]] = {}
        self.bounds = Bounds(Model(self.graph, Request(self.cluster, self.memory_bytes)))
        self.cells: dict[Cell, tuple[float, float]] = {}
        """What is proved of each, in seconds and in bytes."""

    def run(self, seconds: float) -> Attacked:
        """So many processor seconds after the searches."""
        for budget_s in BUDGETS:
            try:
                self.found.append(
                    laminar.plan(self.graph, self.cluster, budget_s=budget_s, memory_bytes=self.memory_bytes)
                )
            except LaminarError as error:
                if self.memory_bytes is None or "no plan fits" not in str(error):
                    raise
        for found in self.found:  # each against what the other has proved
            assert found.step_s is not None
            self.judge(found, found.step_s)
        devices = self.cluster.devices
        for make in (*typed(self.graph, devices), *piped(self.graph, devices)):
            self.held_against(make, named=True)
        until = time.process_time() + seconds
        while self.found and time.process_time() < until:
            chance = self.rng.random()
            if chance < 0.5:
                self.held_against(lambda: skewed(self.graph, devices, self.rng))
            elif chance < 0.8:
                mesh = self.rng.choice(meshes(devices))
                self.held_against(lambda mesh=mesh: random_plan(self.graph, mesh, self.rng.randrange(1 << 30)))  # type: ignore[misc]
            else:
                self.walk()
        return self.report

    def held_against(self, make: Callable[[], Plan | Staged], named: bool = False) -> None:
        """Simulate a plan, and look whether it contradicts anything."""
        try:
            plan = make()
            if isinstance(plan, Staged):
                ran = predict_staged(part_of(self.graph, plan.micro_batches), plan, self.cluster)
                peak = max(ran.peaks)
            else:
                flat = predict(self.graph, plan, self.cluster)
                ran, peak = flat, flat.memory.peak_bytes  # type: ignore[assignment]
                if ran.seconds < self.best.get(str(plan.mesh), (math.inf,))[0]:
                    self.best[str(plan.mesh)] = (ran.seconds, plan)
        except LaminarError:
            return
        self.judge(replace(plan, account={"peak_bytes": peak}), ran.seconds, named)

    def judge(self, plan: Plan | Staged, seconds: float, named: bool = False) -> None:
        """One plan against every search; where nothing is said to fit, nothing that has a name may."""
        self.report.simulated += 1
        if named and not self.found and (plan.peak_bytes or math.inf) <= (self.memory_bytes or 0.0):
            self.report.wrong.append(f"{plan.name} fits in {self.memory_bytes} bytes, though nothing was found to")
        for found in self.found:
            member = found.space.contains(plan)
            if not member:
                self.report.outside += 1
                continue
            assert found.bound_s is not None and found.step_s is not None
            told = f"{plan.name} ({member}): {seconds * 1e3:.6g} ms"
            if member.cell is not None:
                self.report.wrong += self.against_cell(told, member.cell, seconds, plan.peak_bytes)
            if seconds < found.bound_s * (1 - ROUNDING):
                self.report.wrong.append(f"{told} is below the bound {found.bound_s * 1e3:.6g}")
            if named and seconds < found.step_s * (1 - ROUNDING):
                self.report.wrong.append(f"{told} is faster than what was found, {found.step_s * 1e3:.6g}")

    def against_cell(self, told: str, cell: Cell, seconds: float, peak: int | None) -> list[str]:
        """One plan against all bounds of its own cell, of seconds and of bytes."""
        if cell not in self.cells:
            bounds = self.bounds
            self.cells[cell] = (
                max(bounds.rough(cell), bounds.quick(cell).seconds, bounds.of(cell).seconds),
                bounds.least_bytes(cell),
            )
        least_s, least_bytes = self.cells[cell]
        self.report.closest = min(self.report.closest, seconds / least_s)
        found = []
        if seconds < least_s * (1 - ROUNDING):
            found.append(f"{told} is below its cell's bound {least_s * 1e3:.6g}")
        if peak is not None and peak < least_bytes * (1 - ROUNDING):
            found.append(f"{told} holds {peak} bytes, its cell at least {least_bytes:.0f}")
        return found

    def walk(self) -> None:
        """Downhill from the best plan on some mesh."""
        if not self.best or len(self.cluster.parts) > 1:
            return
        mesh = self.rng.choice(sorted(self.best))
        _, plan = self.best[mesh]
        sizes = plan.mesh.sizes
        cell = Cell(1, 1, 1, sizes[0], sizes[1] if len(sizes) > 1 else 1)
        if "tp" in plan.mesh.names and len(sizes) == 1:
            cell = Cell(1, 1, 1, 1, sizes[0])
        try:
            moved = improve(Model(self.graph, Request(self.cluster, self.memory_bytes)), cell, plan,
                            proposals=6000, seed=self.rng.randrange(1 << 30))  # fmt: skip
        except LaminarError:
            return
        self.report.simulated += moved.simulated
        ran = predict(self.graph, moved.plan, self.cluster)
        self.best[mesh] = (ran.seconds, moved.plan)
        self.judge(replace(moved.plan, account={"peak_bytes": ran.memory.peak_bytes}), ran.seconds)


def attacked(case: tuple[str, str, float | None, float, int]) -> Attacked:
    """One model on one machine, in a process of its own."""
    model, machine, share, seconds, seed = case
    torch.set_num_threads(1)
    try:
        return Attack(model, machine, share, seed).run(seconds)
    except Exception as error:
        out = Attacked(model, machine, None)
        out.wrong.append(f"{type(error).__name__}: {error}")
        return out


def cases(seconds: float, seed: int) -> list[tuple[str, str, float | None, float, int]]:
    """Every model on every machine; memory is short in a quarter of them."""
    rng = random.Random(seed)
    return [(model, machine, MEMORY[rng.random() < 0.25 and "+" not in machine], seconds, seed)
            for model in MODELS for machine in MACHINES]  # fmt: skip


def main() -> int:
    """The command line."""
    parse = argparse.ArgumentParser(description="plans that may contradict a certificate")
    parse.add_argument("--jobs", type=int, default=2)
    parse.add_argument("--seconds", type=float, default=5.0, help="of random plans, for each model on each machine")
    parse.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parse.add_argument("--models", nargs="*", default=list(MODELS))
    parse.add_argument("--machines", nargs="*", default=list(MACHINES))
    parse.add_argument("--out", help="a file for one line of JSON for each")
    told = parse.parse_args()
    some = [c for c in cases(told.seconds, told.seed) if c[0] in told.models and c[1] in told.machines]
    print(f"seed {told.seed}: {len(some)} pairs", flush=True)
    simulated, wrong = 0, 0
    with ProcessPoolExecutor(told.jobs) as pool:
        for done, one in enumerate(pool.map(attacked, some), 1):
            simulated, wrong = simulated + one.simulated, wrong + bool(one.wrong)
            if told.out:
                with Path(told.out).open("a") as file:
                    file.write(json.dumps(one.__dict__) + "\n")
            if one.wrong or done % 20 == 0:
                memory = f", {one.memory_bytes / 1e6:.3g} MB" if one.memory_bytes else ""
                print(f"{done}/{len(some)} {one.model} on {one.machine}{memory}: {one.simulated} plans, "
                      f"closest {one.closest:.4f}", *one.wrong[:4], sep="\n    ", flush=True)  # fmt: skip
    print(f"{simulated} plans simulated, {wrong} of {len(some)} pairs contradicted")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The judge of plans that may contradict a search, and the loop that brings them before it.

An attack is on one graph and one cluster. It has *claims*: a space, a bound on all its plans, and what no plan with a
name may undercut. Each plan that `tests/attack/plans.py` makes is simulated in full, by `laminar.forecast.step` as
everybody has it, and held against every claim whose space has it, and against the bounds of its own cell, in seconds
and in bytes, or of its own way to set branches apart. What is simulated is counted when it has been judged, a plan
once.

A space may be asked about any plan, and one that is not in there contradicts nothing: whoever reads a report looks at
`inside` first. Collects nothing itself.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from laminar.errors import LaminarError
from laminar.forecast.pipeline_step import StagedPrediction, predict_staged
from laminar.forecast.step import Prediction, predict
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.account import Account
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.rewrites import Steps
from laminar.ir.plans.staged import Staged
from laminar.placement import presets
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.estimate.candidates import Score
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.mcmc.improve import improve
from laminar.planner.search.best_first.branches import Branches, BranchWay
from laminar.planner.space.cell import Cell
from laminar.planner.space.contradictions import ROUNDING
from laminar.planner.space.plan_space import Space
from laminar.planner.space.request import Request
from laminar.planner.space.styles import styles
from laminar.rewrite.variants import rewritten
from tests.attack.plans import Brood, Candidate, Flat, Orders, Pipes, meshes, part_of, piped, presets_on

T = TypeVar("T")

CELLS = 6
"""Cells with stages or micro-batches, or pipelines over parts, that are gone into; half as many ways to set branches
apart."""
TRIES = 20
"""How many plans are drawn at most for each that is to be judged: some can't be written, some come twice."""


# --- the judge


@dataclass(frozen=True)
class Claim:
    """What a search says of the plans of a space."""

    bound_s: float
    """None of them is simulated faster."""
    step_s: float
    """None that has a name is; 0 where nothing is said of those."""
    space: Space


@dataclass
class Attacked:
    """What came of one model on one machine."""

    model: str
    machine: str
    memory_bytes: float | None = None
    simulated: int = 0
    """Plans that were simulated and judged, each counted once."""
    inside: int = 0
    """Of those, plans of the space of the search."""
    kinds: Counter[str] = field(default_factory=Counter)
    """The same by kind."""
    wrong: list[str] = field(default_factory=list)
    """Plans below a bound, and named plans faster than what was found."""
    offenders: list[Plan | Staged] = field(default_factory=list, repr=False)
    """The first of them."""
    closest: float = math.inf
    """How many times the bound of its cell a plan took, at least."""
    spent_s: float = 0.0
    """Processor seconds of it all."""
    counted: set[tuple[str, str]] = field(default_factory=set, repr=False)
    """Plans by hash, and the clusters that they were simulated on."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = {k: v for k, v in self.__dict__.items() if k != "counted"}
        return {**plain, "offenders": [plan.to_json() for plan in self.offenders]}


class Attack:
    """One graph on one cluster: what is claimed of it, and plans that may contradict that."""

    def __init__(
        self, graph: Graph, request: Request, claims: list[Claim], rng: random.Random, report: Attacked, kind: str = ""
    ) -> None:
        """`kind` says of what the graph or the cluster is a part."""
        self.graph, self.request, self.cluster = graph, request, request.cluster
        self.claims, self.rng, self.report, self.kind = claims, rng, report, kind
        self.alike, self.cluster_hash = len(self.cluster.parts) == 1, self.cluster.hash
        self.found: list[Plan | Staged] = []
        """Plans to begin with, beside presets."""
        self.seen: dict[str, float] = {}
        """Plans by hash, and how they are ranked."""
        self.least: dict[tuple[Mesh, int], list[Plan]] = {}
        """Placements of least cost, by mesh and number of micro-batches."""
        self.bounds_of: dict[Steps, Bounds] = {}
        self.cells: dict[tuple[Steps, Cell], tuple[float, float]] = {}
        """What is proved of each, in seconds and in bytes; a graph that was rewritten has bounds of its own."""

    @cached_property
    def bounds(self) -> Bounds:
        """Of cells, for the graph as captured."""
        return Bounds(Model(self.graph, self.request))

    # --- plans

    def presets(self) -> None:
        """All plans with a name."""
        devices = self.cluster.devices
        for plan in (p for mesh in meshes(devices) for p in presets_on(self.graph, mesh)):
            with suppress(LaminarError):
                self.held_against(Candidate(self.graph, plan, plan), "preset", named=True)
        for make in piped(self.graph, devices):
            with suppress(LaminarError):
                staged = make()
                graph = part_of(self.graph, staged.micro_batches)
                self.held_against(Candidate(graph, staged, staged), "preset", named=True)

    def run(self, plans: int) -> None:
        """So many more, if so many can be drawn; each is like one of the fastest of its kind."""
        until = self.report.simulated + plans
        for _ in range(TRIES * plans):
            if self.report.simulated >= until or not self.broods:
                break
            name, brood, way = self.rng.choice(self.broods)
            try:
                key, candidate = brood.next(self.rng)
                seconds = self.held_against(candidate, name, way=way)
            except LaminarError:
                continue
            brood.keep(seconds, key)

    @cached_property
    def broods(self) -> list[tuple[str, Brood, BranchWay | None]]:
        """Kinds of plans of the space that can be made, by name; and where branches stand apart, the way."""
        found = []
        for name, make, way in self.kinds():
            with suppress(LaminarError):  # micro-batches of samples that need each other
                found.append((name, make(), way))
        return found

    def kinds(self) -> Iterator[tuple[str, Callable[[], Brood], BranchWay | None]]:
        """On each mesh, in some cells with stages, in some ways with branches apart; or over parts that differ."""
        space, graph = self.claims[0].space, self.graph
        found = [p for p in self.found if not isinstance(p, Staged) or space.contains(p, graph)]
        for plan in found:
            if isinstance(plan, Staged):
                yield "stages" if self.alike else "parts", partial(Orders, graph, plan), None
        if not self.alike:
            for row in self.some([row for row in space.data["pipelines"] if not row["recompute"]]):
                yield "parts", partial(self.over, row), None
            return
        blocks, more = space.data.get("blocks"), self.placed(1)
        for plan in found:
            if isinstance(plan, Plan):
                yield "flat", partial(Flat, graph, plan.mesh, blocks, more, plan), None
        for mesh in meshes(self.cluster.devices):
            yield "flat", partial(Flat, graph, mesh, blocks, more), None
        for cell in self.some(sorted(c for c in space.cells if not (c.plain or c.recompute))):
            yield "stages", partial(self.pipes, cell, blocks), None
        for way in self.some(list(self.ways))[: CELLS // 2]:
            yield "branches", partial(self.apart, way), way

    def some(self, every: list[T]) -> list[T]:
        """Those that are gone into."""
        return self.rng.sample(every, min(CELLS, len(every)))

    def pipes(self, cell: Cell, blocks: str | None) -> Pipes:
        """Of one cell."""
        at = [s % cell.stages for s in range(cell.stages * cell.virtual)]
        more = self.placed(cell.micro_batches)
        return Pipes(self.graph, cell.micro_batches, at, [cell.mesh] * cell.stages, blocks, more)

    def over(self, row: dict[str, Any]) -> Pipes:
        """Over parts that differ."""
        places = [Cell(1, 1, 1, dp, tp).mesh for stages, dp, tp in row["sides"] for _ in range(stages)]
        return Pipes(self.graph, row["microbatches"], range(len(places)), places, None)

    @cached_property
    def ways(self) -> dict[BranchWay, float]:
        """To set branches apart, with what is proved of each."""
        if not self.alike or self.cluster.devices == 1:
            return {}
        coupled = any("micro-batches:" in text for text in self.claims[0].space.data.get("outside", ()))
        self.branches = Branches(self.bounds.model, self.bounds, coupled)
        return dict(self.branches.at)

    def apart(self, way: BranchWay) -> Pipes:
        """Branches on sets of their own; what is proved of them with exchanges counted."""
        self.ways[way] = max(self.ways[way], self.branches.bound_s(way, exchanges=True))
        options = [self.branches.options(size, way.micro_batches) for size in way.sizes]
        places = [self.rng.choice(some).cell.mesh for some in options]
        more = self.placed(way.micro_batches)
        return Pipes(self.graph, way.micro_batches, way.homes, places, None, more, self.branches.stage_of(way))

    def placed(self, micro_batches: int) -> Callable[[Mesh], list[Plan]]:
        """Placements of least cost on a mesh, as the search would ask for them, with and without state in shards."""

        def on(mesh: Mesh) -> list[Plan]:
            if (mesh, micro_batches) not in self.least:
                sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
                cell = Cell(1, micro_batches, 1, sizes.get("dp", 1), sizes.get("tp", 1))
                asked = [
                    style for style in styles(cell.mesh, True, True, parts=micro_batches > 1) if "free" in style.axes
                ]
                found: dict[str, Plan] = {}
                for style, zero in itertools.product(asked, (0, 1)):
                    with suppress(LaminarError):
                        plan = self.bounds.model.unfolded(Score(cell, style, zero, None, 0.0, 0.0))
                        found[plan.hash] = replace(plan, name=str(style))
                self.least[mesh, micro_batches] = [plan for plan in found.values() if plan.mesh == mesh]
            return self.least[mesh, micro_batches]

        return on

    def walk(self) -> None:
        """Downhill by the search's own chain, from data parallel; of all that it simulates one plan is judged."""
        devices, seed = self.cluster.devices, self.rng.randrange(1 << 30)
        try:
            data = presets.data_parallel(self.graph, Mesh({"dp": devices}))
            moved = improve(self.bounds.model, Cell(1, 1, 1, devices, 1), data, proposals=3000, seed=seed)
            self.held_against(Candidate(self.graph, moved.plan, moved.plan), "walk")
        except LaminarError:
            return
        self.found.append(moved.plan)

    # --- against what is claimed

    def held_against(self, one: Candidate, kind: str, named: bool = False, way: BranchWay | None = None) -> float:
        """Simulate and judge a plan, unless that was done; how it is to be ranked: by its seconds, if it fits.

        What is held against another claim once more is not counted again.
        """
        if one.plan.hash in self.seen:
            return self.seen[one.plan.hash]
        ran: Prediction | StagedPrediction
        if isinstance(one.bare, Staged):
            ran = predict_staged(one.graph, one.bare, self.cluster)
        else:
            ran = predict(one.graph, one.bare, self.cluster)
        seconds, peak = ran.seconds, ran.peak_bytes
        plan = replace(one.plan, account=Account(step=ran.figures()))
        inside, wrong = self.judged(plan, seconds, peak, named, way)
        self.report.wrong += wrong
        key = (self.cluster_hash, one.plan.hash)
        if self.claims and key not in self.report.counted:
            self.report.counted.add(key)
            self.report.simulated += 1
            self.report.inside += inside
            self.report.kinds[f"{self.kind} {kind}".strip()] += 1
        if wrong and len(self.report.offenders) < 3:
            self.report.offenders.append(plan)
        over = peak / self.request.room_bytes if self.alike else 0.0
        self.seen[one.plan.hash] = rank = seconds * max(1.0, over) ** 4
        return rank

    def judged(
        self, plan: Plan | Staged, seconds: float, peak: int, named: bool, way: BranchWay | None
    ) -> tuple[bool, list[str]]:
        """Whether something is said of a plan, and what it contradicts.

        Where nothing is said to fit, nothing that has a name may.
        """
        wrong: list[str] = []
        if not self.claims and named and peak <= self.request.room_bytes:
            wrong.append(f"{plan.name} fits in {self.request.room_bytes} bytes, though nothing was found to")
        told = f"{self.kind} {plan.name}, {plan.hash[:12]}"
        inside, cells = False, set[Cell]()
        for claim in self.claims:
            member = claim.space.contains(plan, self.graph)
            if not member and not (way is not None and listed(claim.space, way, peak)):
                continue
            inside = True
            told = f"{self.kind} {plan.name}, {plan.hash[:12]} ({way or member}): {seconds * 1e3:.6g} ms"
            cells |= {member.cell} if member.cell is not None and self.alike else set()
            if seconds < claim.bound_s * (1 - ROUNDING):
                wrong.append(f"{told} is below the bound {claim.bound_s * 1e3:.6g}")
            if named and seconds < claim.step_s * (1 - ROUNDING):
                wrong.append(f"{told} is faster than what was found, {claim.step_s * 1e3:.6g}")
        for cell in cells:
            wrong += self.against_cell(told, plan, cell, seconds, peak)
        if way is not None and seconds < self.ways[way] * (1 - ROUNDING):
            wrong.append(f"{told} is below the bound of its way, {self.ways[way] * 1e3:.6g}")
        return inside, wrong

    def against_cell(self, told: str, plan: Plan | Staged, cell: Cell, seconds: float, peak: int) -> list[str]:
        """One plan against all bounds of its own cell, of seconds and of bytes."""
        steps = plan.rewrites
        if (steps, cell) not in self.cells:
            if steps and steps not in self.bounds_of:
                self.bounds_of[steps] = Bounds(Model(rewritten(self.graph, plan), self.request))
            bounds = self.bounds_of[steps] if steps else self.bounds
            least_s = max(bounds.rough(cell), bounds.quick(cell).seconds, bounds.of(cell).seconds)
            self.cells[steps, cell] = least_s, bounds.least_bytes(cell)
        least_s, least_bytes = self.cells[steps, cell]
        self.report.closest = min(self.report.closest, seconds / least_s)
        found = []
        if seconds < least_s * (1 - ROUNDING):
            found.append(f"{told} is below its cell's bound {least_s * 1e3:.6g}")
        if peak < least_bytes * (1 - ROUNDING):
            found.append(f"{told} holds {peak} bytes, its cell at least {least_bytes:.0f}")
        return found


def listed(space: Space, way: BranchWay, peak: int) -> bool:
    """Whether a space names a way to set branches apart, and its plan fits: sets of one size look like stages."""
    return way.to_json() in space.data.get("branches", ()) and peak <= space.data["memory_bytes"]

"""The search for clusters whose parts differ: pipelines over all parts, and plans that use one part alone.

Pipelines over all parts (`planner/estimate/mixed_pipelines.py`) are taken in the order of what an ideal machine would
make of them, priced side by side, and the best guesses are cut op by op, each place by its own prices, and simulated.
Cuts are made again with what the simulation found, and where a place holds more than its device has. A part alone is
searched like any cluster; its plan leaves the other devices idle, and its account says so. A plan with stages on two
kinds is an ordinary plan with stages: nothing else has to know. Pipelines that somebody could type
(`planner/search/named_over_parts.py`) come last, on top of the budget: what is found is never slower than they are.

The certificate rests on `planner/bounds/mixed_bound.py` for pipelines, and on the search of a part for plans on that
part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from laminar.cost.calibrate import interval
from laminar.errors import LaminarError, PlanError
from laminar.forecast.pipeline_step import StagedPrediction, predict_staged
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.account import PartUsed, SimulatedPlan
from laminar.ir.plans.certificate import Certificate, Contradiction
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.planned import PlanOrigin
from laminar.ir.plans.staged import Staged
from laminar.planner.bounds.mixed_bound import SidesBounds
from laminar.planner.estimate.candidates import Found
from laminar.planner.estimate.mixed_pipelines import Guess, Priced, Shop, Side, Sides, all_sides, guessed, room_bytes
from laminar.planner.report.step_breakdown import binding, counted_times, held, spent
from laminar.planner.report.write_account import asked, explained
from laminar.planner.search.best_first.search import find
from laminar.planner.search.named_over_parts import NamedOverParts, named_over_parts, typed
from laminar.planner.space.contradictions import contradicted, withdrawn
from laminar.planner.space.plan_space import Space
from laminar.planner.space.request import Request
from laminar.planner.tuning import (
    CROWDED_RANK,
    EXCESS_MARGIN,
    GUESSING_BUDGET,
    HOPEFUL_CELL,
    LEVEL_STAGES,
    NEAR_GUESS,
    PIPELINES_BUDGET,
    RECUTS,
    SIMULATED_GUESSES,
)
from laminar.staging.coupled_samples import refuse_coupled
from laminar.staging.stage_plans import pipeline

OUTSIDE_MIXED = (
    "samples dealt out unevenly among ranks of different kinds",
    "stages on devices of two kinds, or of different sizes on one kind",
    "parts in another order along the pipe",
    "on several kinds: virtual stages, other schedules, ZeRO 3, rewrites of the graph",
)
MIXED_ZERO_STAGES = (0, 1)
"""Parameters in shards would be gathered for every micro-batch; who wants that pins it."""


@dataclass(frozen=True)
class SimulatedPipeline:
    """A pipeline over all parts, simulated in full."""

    cell: Sides
    zero: int
    plan: Staged
    ran: StagedPrediction

    def row(self) -> SimulatedPlan:
        """For `explain`."""
        cell = self.cell
        return SimulatedPlan(
            plan=cell.told(self.ran.cluster) + (f", ZeRO {self.zero}" if self.zero else ""),
            step_s=self.ran.seconds,
            peak_bytes=self.ran.peak_bytes,
            sides=tuple((side.stages, side.dp, side.tp) for side in cell.sides),
            micro_batches=cell.micro_batches,
            recompute=cell.recompute,
            stages=cell.stages,
            zero=self.zero,
        )


class MixedSearch:
    """One search."""

    def __init__(self, graph: Graph, request: Request, progress: Callable[[str], None] | None = None) -> None:
        self.began = time.process_time()
        self.graph, self.request, self.progress = graph, request, progress or (lambda text: None)
        self.cluster = request.cluster
        self.shop = Shop(graph, request)
        self.rooms = [room_bytes(request, part) for part in self.cluster.parts]
        model = self.shop.model
        self.outside = list(OUTSIDE_MIXED)
        self.cells: list[Sides] = []
        try:
            refuse_coupled(model.small(1, model.keeps[-1]))
            self.cells = all_sides(request, model.samples, model.cuts, model.blocks is not None)
        except LaminarError as error:
            self.outside.append(f"micro-batches: {error.what}")
        self.bounds = SidesBounds(self.shop, min((c.micro_batches for c in self.cells), default=1))
        self.at = {cell: self.bounds.of(cell) for cell in self.cells}
        self.guesses: list[Guess] = []
        self.looked_at: set[Sides] = set()
        self.finals: list[SimulatedPipeline] = []
        self.contradictions: list[Contradiction | None] = []
        """Pipelines against what was proved of them."""
        self.parts: dict[int, Found] = {}

    def spent(self) -> float:
        """Processor seconds, as a share of the budget."""
        return (time.process_time() - self.began) / max(1e-9, self.request.budget_s)

    @property
    def best_s(self) -> float:
        """Of all that was simulated in full and fits."""
        found = [f.ran.seconds for f in self.finals] + [f.certificate.step_s for f in self.parts.values()]
        return min(found, default=math.inf)

    # --- pipelines

    def run(self) -> None:
        """Guesses, the best of them in full, parts alone, and pipelines that somebody could type."""
        self.look()
        self.confirm()
        for k in sorted(range(len(self.rooms)), key=self.bounds.part_s):
            if self.bounds.part_s(k) < self.best_s:
                self.alone(k)
        self.try_named()
        if not self.finals and not self.parts:
            raise self.no_room()

    def ideal_s(self, cell: Sides) -> float:
        """What an ideal machine would make of a cell: a bubble, and something for what ranks exchange."""
        bubble = (cell.micro_batches + cell.stages - 1) / cell.micro_batches
        tensor = 1 + 0.05 * math.log2(max(side.tp for side in cell.sides))
        return self.bounds.ideal_s(cell.micro_batches) * bubble * tensor

    def look(self) -> None:
        """Price the most promising cells, then those around the best, then the rest as time allows."""
        order = sorted(
            {replace(c, recompute=False) for c in self.cells}, key=lambda c: (self.crowded(c), self.ideal_s(c))
        )
        first = {cell.sides[0].tp: cell for cell in reversed(order)}  # of each number of tensor parallel ranks
        for cell in sorted(first.values(), key=order.index):
            self.price(cell)
        best = min(self.guesses, key=lambda g: g.seconds, default=None)
        while best is not None:
            for cell in around(best.cell, self.cluster):
                self.price(cell)
            found = min(self.guesses, key=lambda g: g.seconds)
            best = found if found.seconds < best.seconds else None
        for cell in order:
            if self.guesses and self.ideal_s(cell) > HOPEFUL_CELL * min(g.seconds for g in self.guesses):
                break
            self.price(cell)

    def crowded(self, cell: Sides) -> bool:
        """Whether weights and gradients alone are likely to fill a rank, if stages were equal."""
        stays = 3 * sum(i.spec.nbytes for i in self.graph.of_kind("param"))
        sides = zip(cell.sides, self.rooms, strict=True)
        return any(stays / (side.tp * cell.stages) > CROWDED_RANK * room for side, room in sides)

    def price(self, cell: Sides) -> None:
        """A guess for a cell, if there is time; blocks are recomputed only where it doesn't fit otherwise."""
        pair = [replace(cell, recompute=again) for again in (False, True)]
        late = self.spent() > (GUESSING_BUDGET if self.guesses else PIPELINES_BUDGET)
        if late or any(c in self.looked_at for c in pair):
            return
        for one in pair:
            if one in self.at and self.guess(one) is not None:
                return

    def guess(self, cell: Sides) -> Guess | None:
        """The best placements of a cell that seem to fit: leaner ones, and ZeRO, only where they have to be."""
        self.looked_at.add(cell)
        pinned = self.request.pin.get("zero")
        zeros = (pinned,) if pinned is not None else MIXED_ZERO_STAGES if self.request.allows("zero") else (0,)
        fits: dict[int, Priced] = {}
        for zero in zeros:
            ways = [
                (fits[k],) if k in fits else self.shop.priced(k, side, cell.micro_batches, cell.recompute, zero)
                for k, side in enumerate(cell.sides)
            ]
            if not all(ways):
                return None
            at = [0] * len(ways)
            while True:
                found = guessed(self.shop, cell, [way[n] for way, n in zip(ways, at, strict=True)])
                over = [k for k, room in enumerate(self.rooms) if found.held[k] > room]
                if not over:
                    self.guesses.append(found)
                    return found
                more = [k for k in over if at[k] + 1 < len(ways[k])]
                if not more:
                    break
                for k in more:
                    at[k] += 1
            fits = {k: p for k, p in enumerate(found.priced) if k not in over}
        return None

    def confirm(self) -> None:
        """Simulate the best guesses."""
        for guess in sorted(self.guesses, key=lambda g: g.seconds)[:SIMULATED_GUESSES]:
            if guess.seconds > NEAR_GUESS * self.best_s or (self.spent() > PIPELINES_BUDGET and self.finals):
                break
            found = self.piped(guess)
            if found is not None:
                self.keep(found)

    def keep(self, found: SimulatedPipeline) -> None:
        """One that fits, simulated in full."""
        if found.ran.seconds < self.best_s:
            self.progress(f"{found.ran.seconds * 1e3:.3f} ms: {found.row().plan}")
        self.finals.append(found)

    def piped(self, guess: Guess) -> SimulatedPipeline | None:
        """A guess at full depth, cut again with what was found until stages are level and fit."""
        cell, shop = guess.cell, self.shop
        deep = shop.model.whole(cell.micro_batches)
        try:
            plans = [shop.plan(k, p, cell.micro_batches, cell.recompute) for k, p in enumerate(guess.priced)]
        except LaminarError:
            return None
        seconds = [shop.op_seconds(k, p, cell.micro_batches) for k, p in enumerate(guess.priced)]
        stages = range(cell.stages)
        slow, full = [1.0] * cell.stages, [1.0] * cell.stages  # by stage: what prices were off by; what is to leave it
        rooms = [self.rooms[k] for k in cell.each]
        best: SimulatedPipeline | None = None
        for _ in range(RECUTS):
            speeds = [_times(seconds[k], slow[s] * full[s]) for s, k in enumerate(cell.each)]
            try:
                staged = cut(deep, cell.micro_batches, [plans[k] for k in cell.each], speeds)
                ran = self.simulated(cell, deep, staged)
            except PlanError:
                return best
            over = [peak / room for peak, room in zip(ran.peaks, rooms, strict=True)]
            works = stage_seconds(ran)
            if max(over) <= 1:
                if best is not None and ran.seconds >= best.ran.seconds:
                    return best
                best = SimulatedPipeline(cell, max(p.zero for p in guess.priced), staged, ran)
                if max(works) <= LEVEL_STAGES * sum(works) / len(works):
                    return best
            said = [sum(speeds[s].get(n, 0.0) for n, at in staged.of.items() if at == s) / full[s] for s in stages]
            slow = [slow[s] * works[s] / said[s] if said[s] else slow[s] for s in stages]
            full = [full[s] * max(1.0, EXCESS_MARGIN * over[s]) if over[s] > 1 else full[s] for s in stages]
        return best

    def simulated(self, cell: Sides, deep: Graph, staged: Staged, bound_s: float = 0.0) -> StagedPrediction:
        """A pipeline of a cell in full, held against the bound of its cell, and one of its own if there is any."""
        ran = predict_staged(deep, staged, self.cluster, optimizer=self.request.optimizer)
        bound_s = max(bound_s, self.at.get(cell, 0.0))
        self.contradictions.append(contradicted(cell.told(self.cluster), ran.seconds, bound_s))
        return ran

    def try_named(self) -> None:
        """Simulate pipelines with a name, whatever the budget, unless a bound says that they are not faster."""
        for one in named_over_parts(self.request, self.cells):
            if self.at[one.cell] >= self.best_s:
                continue
            for by_speed in (False, True):
                self.try_one(one, by_speed)

    def try_one(self, one: NamedOverParts, by_speed: bool) -> None:
        """A pipeline as it is typed; with blocks recomputed, if it has no room otherwise."""
        model, cell = self.shop.model, one.cell
        deep = model.whole(cell.micro_batches)
        for again in (c for c in (cell, one.again) if c is not None):
            try:
                even_s = 0.0 if by_speed else self.bounds.even_s(cell, deep)
                if even_s >= self.best_s:
                    return
                staged = typed(deep, self.cluster, again, by_speed, model.blocks if again.recompute else None)
                ran = self.simulated(again, deep, staged, even_s)
            except LaminarError:  # nobody can type it either
                return
            if all(peak <= self.rooms[k] for peak, k in zip(ran.peaks, cell.each, strict=True)):
                if ran.seconds < self.best_s:
                    self.keep(SimulatedPipeline(again, 0, staged, ran))
                return

    # --- parts alone, and the end

    def alone(self, k: int) -> None:
        """The best plan on one part, which leaves the others idle."""
        left = max(0.1, 1 - self.spent()) * self.request.budget_s
        request = replace(self.request, cluster=self.cluster.parts[k], budget_s=left)
        try:
            self.parts[k] = find(self.graph, request, self.progress)
        except PlanError:
            return

    def no_room(self) -> PlanError:
        """Nothing fits, or nothing is allowed."""
        names = ", ".join(
            f"{part.name} {room / 1e9:.1f} GB" for part, room in zip(self.cluster.parts, self.rooms, strict=True)
        )
        return PlanError(
            f"no plan was found for {self.cluster.name}: {len(self.cells)} pipelines over its parts, and none that "
            f"fits on one part",
            binds=f"memory ({names}), or what is pinned",
            next="drop a pin, allow more memory, or take a smaller batch",
        )

    @property
    def space(self) -> Space:
        """All pipelines over the parts, and plans on one of them."""
        return Space(
            {
                "graph": self.graph.hash,
                "cluster": self.cluster.hash,
                "devices": self.cluster.devices,
                "optimizer": self.request.optimizer,
                "memory_bytes": self.rooms,
                "pipelines": [cell.to_json() for cell in self.cells],
                "alone": [self.parts[k].certificate.space if k in self.parts else "" for k in range(len(self.rooms))],
                "outside": list(self.outside),
            }
        )

    def certificate(self, step_s: float, sigma: float) -> Certificate:
        """What is proved about all pipelines over the parts, and about plans on one of them."""
        alone = [
            self.parts[k].certificate.bound_s if k in self.parts else self.bounds.part_s(k)
            for k in range(len(self.rooms))
        ]
        ruled_out = {c for c, bound_s in self.at.items() if bound_s >= step_s and c not in self.looked_at}
        inner = [f.certificate for f in self.parts.values()]
        wrong = (*(c for one in inner for c in one.contradictions), *withdrawn(self.contradictions))
        return Certificate(
            space=self.space.hash,
            step_s=step_s,
            bound_s=0.0 if wrong else min([step_s, *self.at.values(), *alone]),
            cells=len(self.cells) + sum(c.cells for c in inner),
            looked_at=len(self.looked_at) + sum(c.looked_at for c in inner),
            pruned=len(ruled_out) + sum(c.pruned for c in inner),
            unfit=sum(c.unfit for c in inner),
            unfinished=len(self.cells) - len(self.looked_at) - len(ruled_out) + sum(c.unfinished for c in inner),
            outside=tuple(self.outside),
            interval=interval(step_s, sigma),
            known="prices of each part's own",
            contradictions=wrong,
        )


def around(cell: Sides, cluster: Cluster) -> list[Sides]:
    """Cells with twice or half the micro-batches, stages or tensor parallel ranks, on one part or on all."""
    out = [replace(cell, micro_batches=m) for m in (2 * cell.micro_batches, cell.micro_batches // 2)]
    devices = [part.devices for part in cluster.parts]
    for stages, tp in ((2, 1), (0.5, 1), (1, 2), (1, 0.5), (2, 0.5), (0.5, 2)):
        moved = [_side(side, n, stages, tp) for side, n in zip(cell.sides, devices, strict=True)]
        for ks in [{k} for k in range(len(devices))] + [set(range(len(devices)))]:
            sides = tuple(moved[k] if k in ks else side for k, side in enumerate(cell.sides))
            known = [side for side in sides if side is not None]
            if len(known) == len(sides):
                out.append(replace(cell, sides=tuple(known)))
    return out


def _side(side: Side, devices: int, stages: float, tp: float) -> Side | None:
    """A side with so many times as many stages and tensor parallel ranks, if that comes out even."""
    s, t = side.stages * stages, side.tp * tp
    even = s == int(s) and t == int(t) and s >= 1 and t >= 1 and devices % int(s * t) == 0
    return Side(int(s), devices // int(s * t), int(t)) if even else None


def cut(graph: Graph, micro: int, plans: Sequence[Plan], speeds: Sequence[Mapping[str, float]]) -> Staged:
    """A pipeline with a place for each plan, cut by what ops take there; samples must not be coupled."""
    made = pipeline(graph, len(plans), micro, 1, list(plans), couple="microbatch", speeds=list(speeds))
    return replace(made, name="searched", coupled=False)


def stage_seconds(ran: StagedPrediction) -> list[float]:
    """What each stage works on a micro-batch."""
    out = [0.0] * len(ran.staged.stages)
    for part in ran.pipe.made.by_name.values():
        out[part.stage] += ran.part_s[part.name]
    return out


def _times(seconds: Mapping[str, float], factor: float) -> Mapping[str, float]:
    return seconds if factor == 1.0 else {name: s * factor for name, s in seconds.items()}


def best_mixed(graph: Graph, request: Request, progress: Callable[[str], None] | None = None) -> Plan | Staged:
    """The fastest plan found for a cluster whose parts differ, explained."""
    search = MixedSearch(graph, request, progress)
    search.run()
    finals = sorted(search.finals, key=lambda f: f.ran.seconds)
    rows = [replace(f.row(), spent=spent(f.ran)) for f in finals[:3]] + [f.row() for f in finals[3:]]
    spent_s = time.process_time() - search.began
    alone = {k: found.certificate.step_s for k, found in search.parts.items()}
    k = min(alone, key=lambda k: alone[k], default=None)
    if k is not None and alone[k] == search.best_s:
        part, found = request.cluster.parts[k], search.parts[k]
        plan = explained(graph, replace(request, cluster=part), found)
        proof = search.certificate(alone[k], found_sigma(found))
        uses, choice = used_part(request.cluster, k), plan.account.choice
        assert choice is not None
        account = replace(
            plan.account,
            runners_up=(*plan.account.runners_up, *rows),
            uses=uses,
            searched=f"{choice.plan}; {uses.says}",
        )
        origin = plan.origin and replace(plan.origin, asked=asked(request))
    else:
        plan, ran = finals[0].plan, finals[0].ran
        proof = search.certificate(ran.seconds, ran.sigma)
        others = [_alone(request.cluster.parts[k], f) for k, f in search.parts.items()]
        account = replace(
            plan.account,
            step=ran.figures(),
            devices=request.cluster.devices,
            choice=rows[0],
            runners_up=tuple(sorted([*rows[1:], *others], key=lambda row: row.step_s)),
            memory=held(ran),
            binding=binding(rows[0].spent),
        )
        origin = PlanOrigin(graph, request.cluster, asked(request), tuple(f.plan for f in finals[1:]))
    size = counted_times(graph)
    account = replace(
        account,
        samples=size.samples,
        tokens=size.tokens,
        options=asked(request),
        search_s=spent_s,
        budget_s=request.budget_s,
        bound_s=proof.bound_s,
        certificate=proof,
        space=search.space.data,
    )
    return replace(plan, account=account, origin=origin)


def _alone(part: Cluster, found: Found) -> SimulatedPlan:
    """What was found on one part."""
    row = found.finals[0].row()
    return replace(row, plan=f"{part.name} alone: {row.plan}", step_s=found.certificate.step_s)


def found_sigma(found: Found) -> float:
    """Of the plan that a search chose."""
    mine = next((f for f in found.finals if f.plan.hash == found.plan.hash), None)
    return mine.ran.sigma if mine is not None else 0.0


def used_part(cluster: Cluster, k: int) -> PartUsed:
    """What a plan on one part leaves out, for its account."""
    part = cluster.parts[k]
    first = sum(p.devices for p in cluster.parts[:k])
    last = first + part.devices - 1
    return PartUsed(
        cluster=part.name,
        of=cluster.name,
        devices=(first, last),
        idle=cluster.devices - part.devices,
        says=f"{part.devices} of {cluster.devices} devices are used, {first} to {last}: {part.name}; "
        "the others stay idle",
    )

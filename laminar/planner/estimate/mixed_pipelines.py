"""Pipelines over parts of a cluster that differ: which there are, and what each would take.

A *side* is what one part of the cluster contributes: so many stages, each on a mesh of its own devices. Sides follow
each other in the order of their devices, so the pipe crosses from part to part once. One micro-batch of the whole model
is priced on one stage's ranks of each side; layers are then dealt out so that the slowest stage is fastest, which is
how stages come to follow speed. That is an estimate, for ranking: finalists are cut op by op and simulated in full.

What an op takes at a place (`op_seconds`) comes from the same simulation: the time that passes while the lines of its
module run, forward and backward, dealt out among the module's ops by their work.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from laminar.cost.comm.stage_messages import even_hop_s
from laminar.cost.machine import UPDATES
from laminar.cost.sim.simulate import simulate
from laminar.errors import LaminarError, PlanError
from laminar.forecast.pipeline_step import CONTROL_S, MEETING_S, StagedPrediction, inside, part_schedule, predict_staged
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.planner.estimate.candidates import Score
from laminar.planner.estimate.cost_by_depth import Parts, Share
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.stage_cost import HOPS_HELD, ends_s, parts_of, share_of, work_by_op
from laminar.planner.space.cell import MOST_MICRO_BATCHES, Cell, divisors
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Style, styles
from laminar.staging.balance import work_s
from laminar.staging.stage_plans import inner_plan, pipeline

MOST_STAGES = 64
"""Stages in all; more are outside of the space."""


@dataclass(frozen=True, order=True)
class Side:
    """What one part of a cluster does: so many stages of so many ranks each."""

    stages: int
    dp: int
    tp: int

    @property
    def mesh(self) -> Mesh:
        """Of each of its stages."""
        return Cell(1, 1, 1, self.dp, self.tp).mesh

    @property
    def ranks(self) -> int:
        """Of each of its stages."""
        return self.dp * self.tp

    def __str__(self) -> str:
        stages = f"{self.stages} stage{'s' if self.stages > 1 else ''}"
        return f"{stages} of {' x '.join(f'{n}={s}' for n, s in self.mesh.to_json().items())}"


@dataclass(frozen=True, order=True)
class Sides:
    """One pipeline over all parts, with placements left open."""

    sides: tuple[Side, ...]
    micro_batches: int
    recompute: bool = False

    @property
    def stages(self) -> int:
        """In all."""
        return sum(side.stages for side in self.sides)

    @property
    def each(self) -> tuple[int, ...]:
        """For each stage, which side it is on."""
        return tuple(k for k, side in enumerate(self.sides) for _ in range(side.stages))

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "sides": [[s.stages, s.dp, s.tp] for s in self.sides],
            "microbatches": self.micro_batches,
            "recompute": self.recompute,
        }

    def told(self, cluster: Cluster) -> str:
        """In words."""
        parts = [f"{side} on {part.device.name}" for side, part in zip(self.sides, cluster.parts, strict=True)]
        again = ", blocks recomputed in backward" if self.recompute else ""
        return f"{', then '.join(parts)}, {self.micro_batches} micro-batches{again}"


def all_sides(request: Request, samples: int, cuts: int, recompute: bool) -> list[Sides]:
    """All pipelines that have at least one stage on every part."""
    return list(_all_sides(request, samples, cuts, recompute))


def _all_sides(request: Request, samples: int, cuts: int, recompute: bool) -> Iterator[Sides]:
    pin = request.pin
    if not request.allows("pipeline") or pin.get("virtual", 1) != 1:
        return
    wanted = pin.get("microbatches")
    for sides in product(*(_sides(request, part) for part in request.cluster.parts)):
        stages = sum(side.stages for side in sides)
        if stages > min(cuts, MOST_STAGES) or stages != pin.get("stages", stages):
            continue
        for micro in divisors(samples):
            even = micro // (micro & -micro) <= 3  # a power of two, or three times one
            fits = micro == wanted if wanted else even and stages <= micro <= stages * MOST_MICRO_BATCHES
            if not fits or any(samples // micro % side.dp for side in sides):
                continue
            for again in (False, True) if recompute and request.allows("recompute") else (False,):
                if int(again) == pin.get("recompute", int(again)):
                    yield Sides(sides, micro, again)


def _sides(request: Request, part: Cluster) -> list[Side]:
    """What one part may contribute: all of its devices, in stages of equal size."""
    inner = part.levels[0].size if len(part.levels) > 1 else part.devices
    pin, out = request.pin, []
    for stages in divisors(part.devices):
        ranks = part.devices // stages
        for tp in divisors(ranks):
            dp = ranks // tp
            if (tp > inner and "tp" not in pin) or (tp > 1 and not request.allows("tensor")):
                continue
            if dp > 1 and not (request.allows("data") or request.allows("zero")):
                continue
            if tp == pin.get("tp", tp) and dp == pin.get("dp", dp):
                out.append(Side(stages, dp, tp))
    return out


def room_bytes(request: Request, part: Cluster) -> float:
    """What a rank may fill on a part."""
    own = request.less_margin(part)
    return own if request.memory_bytes is None else min(own, float(request.memory_bytes))


# --- one side, priced


@dataclass(frozen=True, eq=False)
class Priced:
    """One micro-batch of the whole model on the ranks of one stage of a side."""

    side: Side
    style: Style
    zero: int
    share: Share
    parts: Parts
    work_s: float
    ends_s: float
    """Once a step: gradients reduced, state updated, pieces gathered."""

    def held_bytes(self, layers: float, under_way: int, optimizer: str) -> float:
        """On the fullest rank of a stage with so many layers, and half of what is around them."""
        p, pieces = self.parts, self.side.dp if 0 < self.zero < 3 else 1
        stays = [w.at(layers) - w.ends / 2 for w in (p.weight_bytes, p.grad_bytes, p.grad_bytes)]
        state = UPDATES[optimizer] * (p.elements.at(layers) - p.elements.ends / 2) / pieces
        kept = p.kept_bytes.each * layers * under_way + HOPS_HELD * p.hop_bytes.at(0)
        return sum(stays) + state + kept + p.works_bytes.at(layers)


class Shop:
    """Prices of sides, asked once each."""

    def __init__(self, graph: Graph, request: Request) -> None:
        self.request = request
        self.models = [Model(graph, replace(request, cluster=part)) for part in request.cluster.parts]
        for model in self.models[1:]:  # layers and micro-batches are the same for all parts
            model._micro, model._deep = self.models[0]._micro, self.models[0]._deep
            model.__dict__["fold"] = self.models[0].fold
        self._known: dict[tuple[int, Side, int, bool, int], tuple[Priced, ...]] = {}

    @property
    def model(self) -> Model:
        """Of the first part: for what is the same on all."""
        return self.models[0]

    def priced(self, k: int, side: Side, micro: int, recompute: bool, zero: int = 0) -> tuple[Priced, ...]:
        """The placements of a side that are worth a look, fastest first."""
        side = replace(side, stages=1)
        key = (k, side, micro, recompute, zero)
        if key not in self._known:
            self._known[key] = tuple(sorted(self._priced(k, side, micro, recompute, zero), key=lambda p: p.work_s))
        return self._known[key]

    def _priced(self, k: int, side: Side, micro: int, recompute: bool, zero: int) -> Iterator[Priced]:
        model = self.models[k]
        cell = Cell(1, micro, 1, side.dp, side.tp, recompute)
        wanted = [s for s in styles(side.mesh, self.request.allows("tensor"), side.tp > 1) if "inner" not in s.axes]
        for style in wanted[:2]:
            try:
                share = share_of(model, cell, style, zero)
                parts = parts_of(model, share)
            except LaminarError:
                continue
            work_s = parts.forward_s.at(model.layers) + parts.backward_s.at(model.layers)
            yield Priced(side, style, zero, share, parts, work_s, ends_s(model, cell, parts, zero))

    def plan(self, k: int, priced: Priced, micro: int, recompute: bool) -> Plan:
        """The placement of a side on the micro-batch's graph at full depth."""
        cell = Cell(1, micro, 1, priced.side.dp, priced.side.tp, recompute)
        return self.models[k].unfolded(Score(cell, priced.style, priced.zero, None, 0.0, 0.0))

    def op_seconds(self, k: int, priced: Priced, micro: int) -> Mapping[str, float]:
        """What each forward op with its backward takes on a side, at full depth."""
        model = self.models[k]
        found = work_by_op(model, priced.share, model.whole(micro))
        total = sum(found.values())
        return {name: s * priced.work_s / total for name, s in found.items()} if total else work_s(model.whole(micro))


def whole_at(graph: Graph, plan: Plan, micro: int) -> Staged:
    """The whole graph as the one stage of a pipeline."""
    return pipeline(graph, 1, micro, 1, plan, couple="microbatch")


def module_rates(graph: Graph, found: StagedPrediction) -> dict[str, float]:
    """By module, seconds over the work that is assumed: of one stage that has the whole graph.

    A line of the program counts what passes from the end of those before it to its own: what overlaps counts once.
    """
    seconds: dict[str, float] = defaultdict(float)
    home = found.homes[0]
    prices = inside(home, min(found.staged.ranks, home.devices))
    for part in found.pipe.made.by_name.values():
        made = part_schedule(part.program, prices)
        now, module = 0, ""
        for line, end in zip(made.lines, simulate(made.load).end, strict=True):
            module = line.instr.module if line.instr is not None else module
            seconds[module] += max(0, int(end) - now) / 1e9
            now = max(now, int(end))
    assumed: dict[str, float] = defaultdict(float)
    for name, work in work_s(graph).items():
        assumed[graph.by_name[name].module] += work
    return {module: s / assumed[module] for module, s in seconds.items() if assumed.get(module)}


def speeds_on(
    graph: Graph, plans: Sequence[Plan], cluster: Cluster, micro: int, optimizer: str = "adamw"
) -> list[Mapping[str, float]]:
    """For places with these plans one after the other, what each forward op takes there: `speeds` of a pipeline."""
    out: list[Mapping[str, float]] = []
    known: dict[tuple[str, str], Mapping[str, float]] = {}
    first = 0
    for plan in plans:
        part = cluster.on(range(first, first + plan.mesh.ranks))
        first += plan.mesh.ranks
        key = (part.hash, plan.hash)
        if key not in known:
            found = predict_staged(graph, whole_at(graph, plan, micro), part, optimizer=optimizer)
            rates = module_rates(graph, found)
            known[key] = {n: s * rates.get(graph.by_name[n].module, 0.0) for n, s in work_s(graph).items()}
        out.append(known[key])
    return out


def pipeline_on(
    graph: Graph,
    cluster: Cluster,
    stages: int | Sequence[str] | Mapping[str, int],
    microbatches: int,
    virtual: int,
    inner: Any,
    **options: Any,
) -> Staged:
    """A pipeline whose stages are cut by what ops take on the devices of each place."""
    if not isinstance(stages, int):
        raise PlanError("a cluster says where stages are cut, and so do their names", next="stages=4, or no cluster")
    inners = list(inner) if isinstance(inner, Sequence) else [inner] * stages
    known: dict[int, Plan] = {}
    plans = [known.setdefault(id(one), inner_plan(graph, one)) for one in inners]
    if len(plans) == stages:  # else it is refused by name
        options["speeds"] = speeds_on(graph, plans, cluster, microbatches)
    return pipeline(graph, stages, microbatches, virtual, plans, **options)


# --- a pipeline over all sides, estimated


@dataclass(frozen=True, eq=False)
class Guess:
    """A pipeline over all parts, with a placement for each, and what it is expected to take."""

    cell: Sides
    priced: tuple[Priced, ...]
    seconds: float
    held: tuple[float, ...]
    """By side, on the fullest rank of its fullest stage."""
    layers: tuple[float, ...]
    """By side, what a stage has of them."""


def guessed(shop: Shop, cell: Sides, priced: Sequence[Priced]) -> Guess:
    """Layers dealt out so that the slowest stage is fastest; the pipe is filled and emptied once."""
    layers = max(1, shop.model.layers)
    each = [p.work_s / layers for p in priced]
    slowest = _slowest([(side.stages, s) for side, s in zip(cell.sides, each, strict=True)], layers)
    share = [min(layers, slowest / s) if s else layers for s in each]
    share = [n * layers / sum(m * side.stages for m, side in zip(share, cell.sides, strict=True)) for n in share]
    works = [n * s for n, s in zip(share, each, strict=True)]
    fill = sum(works[k] for k in cell.each) - max(works)
    ends = max(p.ends_s * n / layers for p, n in zip(priced, share, strict=True))
    hops = 2 * sum(_hop_s(shop, cell, priced, k) for k in range(cell.stages - 1))
    seconds = cell.micro_batches * slowest + fill + hops + ends + MEETING_S[shop.request.cluster.kind]
    held = [0.0] * len(priced)
    for at, k in enumerate(cell.each):
        under_way = min(cell.micro_batches, cell.stages - at)
        held[k] = max(held[k], priced[k].held_bytes(share[k], under_way, shop.request.optimizer))
    return Guess(cell, tuple(priced), seconds, tuple(held), tuple(share))


def _slowest(sides: Sequence[tuple[int, float]], layers: int) -> float:
    """Seconds of the slowest stage, whole layers on each, dealt out as well as can be."""
    tries = sorted({n * s for stages, s in sides for n in range(1, layers + 1)})
    low, high = 0, len(tries) - 1
    while low < high:
        at = (low + high) // 2
        room = sum(stages * math.floor(tries[at] / s * (1 + 1e-9)) if s else layers for stages, s in sides)
        low, high = (low, at) if room >= layers else (at + 1, high)
    return tries[low] if tries else 0.0


def _hop_s(shop: Shop, cell: Sides, priced: Sequence[Priced], stage: int) -> float:
    """A micro-batch's residual stream from a stage to the next."""
    ranks = [side.ranks for k, side in enumerate(cell.sides) for _ in range(side.stages)]
    first = sum(ranks[:stage])
    level = shop.request.cluster.joining(range(first, first + ranks[stage] + ranks[stage + 1]))
    nbytes = max(priced[k].parts.hop_bytes.at(0) for k in cell.each[stage : stage + 2])
    return CONTROL_S[shop.request.cluster.kind] + even_hop_s(level, min(ranks[stage : stage + 2]), nbytes)

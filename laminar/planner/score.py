"""What a placement takes, quickly: a shallow model is simulated, a deep one follows.

The whole way of a prediction is walked (lowering, prices, simulation, memory), on the folded graph with four and with
six layers; what two layers add, every further two add. That is an estimate, good for ranking: finalists are simulated
at full depth. With stages, a micro-batch's parts are simulated in the same way and composed as 1F1B has them:
the slowest stage works on every micro-batch, the others are waited for once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from laminar.cost.families import COMPUTES, family_of
from laminar.cost.memory import memory
from laminar.cost.prices import UPDATES, Machine
from laminar.errors import PlanError
from laminar.forecast import CONTROL_S, MEETING_S, held_by, machine, predict_staged, timed
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plan import Plan
from laminar.lower.step import step_programs
from laminar.planner.cells import Cell
from laminar.planner.placing import Placer
from laminar.planner.request import Request
from laminar.search.fold import Fold, fold
from laminar.search.micro import micro
from laminar.staging import pipeline

KEPT = 3
"""Layers of the folded graph on which placements are decided."""
DEPTHS = (4, 6)
"""Depths that are simulated. Gradients of a layer may share a bucket with those of the next: an even difference."""


@dataclass(frozen=True, eq=False)
class Score:
    """A placement, and what it is expected to take."""

    cell: Cell
    style: tuple[str, ...]
    zero: int
    plan: Plan
    """Of the folded graph of a micro-batch."""
    seconds: float
    peak_bytes: float

    def __str__(self) -> str:
        zero = f" zero{self.zero}" if self.zero else ""
        return f"{self.cell} {'+'.join(self.style)}{zero}: {self.seconds * 1e3:.3f} ms, {self.peak_bytes / 1e9:.2f} GB"


class Model:
    """One model at all sizes of micro-batches and depths, and the machine's prices for all meshes."""

    def __init__(self, graph: Graph, request: Request) -> None:
        self.graph, self.request = graph, request
        self._machines: dict[Mesh, Machine] = {}
        self._placers: dict[Mesh, Placer] = {}
        self._micro: dict[tuple[int, int], Graph] = {}
        self._deep: dict[int, Graph] = {}

    @cached_property
    def fold(self) -> Fold:
        """Its layers."""
        return fold(self.graph)

    @cached_property
    def layers(self) -> int:
        """How many of them; 1 where nothing repeats."""
        return max(1, self.fold.layers)

    @cached_property
    def cuts(self) -> int:
        """How many stages there can be: as many as products or other heavy ops, or as layers, if there are any."""
        if self.fold.layers:
            return self.fold.layers
        return max(1, sum(n.phase == "forward" and family_of(n.op) in COMPUTES for n in self.graph.nodes))

    @property
    def keeps(self) -> tuple[int, ...]:
        """Depths between which everything that is a sum over layers is known."""
        return (KEPT - 1, KEPT) if self.fold.layers > KEPT else (self.layers,)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths that are simulated: shallow ones, or the only one."""
        return DEPTHS if self.fold.layers > DEPTHS[-1] else (self.layers,)

    def small(self, parts: int, keep: int) -> Graph:
        """The graph of a micro-batch with so many layers."""
        if (parts, keep) not in self._micro:
            self._micro[parts, keep] = micro(self.fold.small(keep), parts)
        return self._micro[parts, keep]

    def whole(self, parts: int) -> Graph:
        """The graph of a micro-batch at full depth."""
        if parts not in self._deep:
            self._deep[parts] = micro(self.graph, parts)
        return self._deep[parts]

    def machine(self, mesh: Mesh) -> Machine:
        """Prices for a mesh on the first devices of the cluster."""
        if mesh not in self._machines:
            self._machines[mesh] = machine(self.request.cluster, mesh, self.request.optimizer)
        return self._machines[mesh]

    def placer(self, mesh: Mesh) -> Placer:
        """Placements on a mesh."""
        if mesh not in self._placers:
            self._placers[mesh] = Placer(self.machine(mesh), mesh)
        return self._placers[mesh]

    @cached_property
    def blocks(self) -> str | None:
        """A pattern that names the modules that repeat, for recompute."""
        found: dict[str, int] = {}
        for node in self.graph.nodes:
            parts = node.module.split(".")
            for k, part in enumerate(parts):
                if part.isdigit() and node.phase == "forward":
                    name = ".".join([*parts[:k], "*"])
                    found[name] = found.get(name, 0) + 1
                    break
        return max(found, key=lambda n: found[n]) if found else None

    def unfolded(self, score: Score) -> Plan:
        """Its placement on the micro-batch's graph at full depth."""
        return replace(self.deepened(score.plan, self.whole(score.cell.micro_batches)), name="searched")

    def deepened(self, plan: Plan, graph: Graph) -> Plan:
        """A placement of the folded graph for one with more layers."""
        found = self.fold.unfold(plan, self.keeps[-1], graph)
        return found if len(self.keeps) > 1 else replace(found, graph_hash=graph.hash)


def extrapolated(at: dict[int, float], layers: int) -> float:
    """A quantity at full depth, from two depths."""
    depths = sorted(at)
    if len(depths) == 1:
        return at[depths[0]]
    low, high = depths[-2:]
    return at[high] + (layers - high) * (at[high] - at[low]) / (high - low)


def scored(
    model: Model,
    cell: Cell,
    style: tuple[str, ...],
    zero: int,
    plan: Plan,
    worth_s: float = math.inf,
    roomy: float = 0.0,
) -> Score:
    """Seconds and bytes of a placement of the folded graph, at full depth.

    What takes longer than `worth_s` is not asked how much it holds: nan. Nor is any where there is plenty of room: it
    is taken to hold `roomy` bytes.
    """
    if cell.recompute and model.blocks:
        plan = replace(plan, recompute=(model.blocks,))
    parts = {keep: model.deepened(plan, model.small(cell.micro_batches, keep)) for keep in model.depths}
    if cell.plain:
        ran = {keep: _plain(model, part, keep) for keep, part in parts.items()}
        seconds = extrapolated({keep: found[0] for keep, found in ran.items()}, model.layers)
        if roomy or seconds > worth_s:
            return Score(cell, style, zero, plan, seconds, roomy or math.nan)
        held = {keep: found[1]() for keep, found in ran.items()}
        return Score(cell, style, zero, plan, seconds, extrapolated(held, model.layers))
    found = {keep: _staged(model, cell, part, keep) for keep, part in parts.items()}
    whole = {key: extrapolated({k: v[key] for k, v in found.items()}, model.layers) for key in found[model.depths[-1]]}
    return Score(cell, style, zero, plan, _composed(model, cell, whole), _held(cell, whole))


def _plain(model: Model, plan: Plan, keep: int) -> tuple[float, Callable[[], float]]:
    """Seconds of a step, and how to find out what it holds."""
    cluster, prices = model.request.cluster, model.machine(plan.mesh)
    program, then = step_programs(model.small(1, keep), plan)
    program, groups, _, times = timed(program, then, cluster, prices)
    return times.step / 1e9, lambda: float(held_by(program, groups, cluster, prices.optimizer).peak_bytes)


def _staged(model: Model, cell: Cell, plan: Plan, keep: int) -> dict[str, float]:
    """The parts of one micro-batch through the whole model on one stage's ranks."""
    graph = model.small(cell.micro_batches, keep)
    staged = pipeline(graph, 1, cell.micro_batches, 1, plan, couple="microbatch")
    found = predict_staged(graph, staged, model.request.cluster, optimizer=model.request.optimizer)
    kind = "cuda" if model.request.cluster.device.kind == "gpu" else "cpu"
    part = found.pipe.made.parts[0][-1].program
    held = memory(part, optimizer=UPDATES[model.request.optimizer], allocator=kind,
                  backend=model.request.cluster.backend)  # fmt: skip
    stash = float(found.pipe.net.bound_bytes(0))
    return {
        "work": sum(s for n, s in found.part_s.items() if n[0] in "FBIW"),
        "reduce": found.part_s.get("R0", 0.0),
        "update": found.part_s.get("O0", 0.0),
        "stash": stash,
        "stays": float(found.peaks[0]) - stash - held.peak_activations,
        "works": float(held.peak_activations),
    }


def _composed(model: Model, cell: Cell, whole: dict[str, float]) -> float:
    """1F1B over equal stages: the slowest works on every micro-batch, the rest is filled and emptied once."""
    each = whole["work"] / cell.stages
    deepest = math.ceil(model.layers / cell.stages) / (model.layers / cell.stages) if model.layers > 1 else 1.0
    fill = (cell.stages - 1) * each / cell.virtual
    sends = 2 * (cell.stages - 1) * _hop_s(model, cell) + MEETING_S[model.request.cluster.device.kind]
    return cell.micro_batches * each * deepest + fill + sends + (whole["reduce"] + whole["update"]) / cell.stages


def _hop_s(model: Model, cell: Cell) -> float:
    """A micro-batch's residual stream from one stage to the next: the largest value that every layer passes on."""
    graph = model.small(cell.micro_batches, model.keeps[-1])
    cluster = model.request.cluster
    level = cluster.levels[-1] if cluster.devices // cell.stages >= cluster.unit_devices[0] else cluster.levels[0]
    first = next((n for n in graph.nodes if n.phase == "forward" and n.name in model.fold.at), graph.nodes[0])
    nbytes = max((graph.specs[r].nbytes for r in first.ins), default=0)
    wait_s = level.latency_s.value + CONTROL_S[cluster.device.kind]
    return wait_s + nbytes / cell.ranks / level.bytes_per_s.value


def _held(cell: Cell, whole: dict[str, float]) -> float:
    """The first stage holds a micro-batch for every stage behind it."""
    under_way = min(cell.micro_batches, cell.stages + (cell.stages - 1 if cell.virtual > 1 else 0))
    return (whole["stays"] + whole["stash"] * under_way + whole["works"]) / cell.stages


def feasible(score: Score, request: Request) -> bool:
    """Whether it fits."""
    return score.peak_bytes <= request.room_bytes


Progress = Callable[[str, float, int], None]
"""Told what is best so far, its seconds, and how many cells are left."""


def no_room(request: Request, least_bytes: float) -> PlanError:
    """Nothing fits: what is needed at least, and the cheapest way out."""
    return PlanError(
        f"no plan fits: the leanest found needs {least_bytes / 1e9:.2f} GB on its fullest rank, "
        f"{request.room_bytes / 1e9:.2f} GB are allowed",
        binds="memory",
        next=f"allow memory_bytes={least_bytes:.3g}, take more devices, or a smaller batch",
    )

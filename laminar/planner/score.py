"""What a placement takes, quickly: a shallow model is simulated, a deep one follows.

Without micro-batches the whole way of a prediction is walked (lowering, prices, simulation, memory), on the folded
graph with two and with four layers; what two layers add, every further two add. With micro-batches the parts of one are
put together (`planner/parts.py`). How many blocks are made again, where some are, follows from what none and all would
take and hold (`planner/fewest.py`). All are estimates, good for ranking: what is to win is simulated at full depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from laminar.cost.families import COMPUTES, family_of
from laminar.cost.prices import UPDATES, Machine
from laminar.errors import PlanError
from laminar.forecast import held_by, inside, machine, timed
from laminar.ir.graph import Graph, Node
from laminar.ir.mesh import Mesh
from laminar.ir.patterns import COLLECTIVES, PRODUCTS
from laminar.ir.plan import Plan
from laminar.ir.rewrites import Steps
from laminar.ir.sbp import local_spec
from laminar.lower.step import step_programs
from laminar.planner.cells import Cell
from laminar.planner.eased import Ways, ways_of
from laminar.planner.fewest import held_bytes, pattern, places, some
from laminar.planner.parts import Parts, Share, parts_of, pipelined_s, share_of
from laminar.planner.placing import BOTH, LEAN, SPARING, Placer
from laminar.planner.request import Request
from laminar.rules.samples import samples_of
from laminar.search.fold import Fold, fold
from laminar.search.micro import micro
from laminar.staging import cuttable

KEPT = 3
"""Layers of the folded graph on which placements are decided."""
DEPTHS = (2, 4)
"""Depths that are simulated. Gradients of a layer may share a bucket with those of the next: an even difference."""


@dataclass(frozen=True, eq=False)
class Score:
    """A placement, and what it is expected to take."""

    cell: Cell
    style: tuple[str, ...]
    zero: int
    plan: Plan | None
    """Of the folded graph of a micro-batch; if it is not there, `Model.placed` makes it."""
    seconds: float
    peak_bytes: float
    behind_s: float = 0.0
    """Of the seconds, those behind the last op: gradients still on their way, updates."""
    rewrites: Steps = ()
    """What the graph was made by that it places, see `planner/rewrites.py`."""
    again: tuple[int, ...] = ()
    """By place, blocks that are made again in backward where not all are; nothing where all are, or none."""
    blocks: int = 0
    """Of how many, where not all are."""
    saves_bytes: float = 0.0
    """What one more saves of a step without stages, where not all are made again."""
    spared: int = 0
    """Of the blocks that are made again, those whose products are kept, where that is not so for all."""
    away: int = 0
    """Blocks that wait in the host's memory."""
    apart: tuple[int, ...] = ()
    """Devices of each set, where branches have some of their own (`planner/branches.py`)."""

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
        self._plans: dict[tuple[int, Mesh, tuple[str, ...]], Plan] = {}
        self.parts: dict[Share, Parts] = {}
        """What micro-batches were found to take."""
        self.modules: dict[Share, dict[str, float]] = {}
        """And what each module took of that, in the folded graph."""
        self.sums: dict[Share, np.ndarray] = {}
        """Seconds before each op that belongs to one stage."""
        self.uneven: dict[tuple[Share, int], float] = {}
        """How much longer the slowest of so many stages takes than the mean."""
        self.off: dict[tuple[Cell, tuple[str, ...], int], np.ndarray] = {}
        """By place, bytes by which the estimate of a pipeline was found to be too low."""
        self.shallow: dict[tuple[Cell, tuple[str, ...], int], Score] = {}
        """Scores of steps without micro-batches in which nothing or everything is made again."""
        self.ways: dict[tuple[Cell, tuple[str, ...], int], Ways] = {}
        """And what else may become of their blocks."""

    @cached_property
    def cuttable(self) -> tuple[list[Node], np.ndarray]:
        """The ops that stages are cut from, and where."""
        return cuttable(self.graph)

    @cached_property
    def samples(self) -> int:
        """Of a batch."""
        return samples_of(self.graph)

    @cached_property
    def inside(self) -> Machine:
        """Prices of parts, all ranks of the cluster being at work."""
        return inside(self.request.cluster, self.request.cluster.devices, self.request.optimizer)

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
            self._placers[mesh] = Placer(self.machine(mesh), mesh, self.request.place)
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

    @cached_property
    def block_names(self) -> tuple[str, ...]:
        """Modules that repeat, by number, in the order in which they run."""
        if self.blocks is None:
            return ()
        before = self.blocks.removesuffix("*")
        found: dict[str, None] = {}
        for node in self.graph.nodes:
            if node.phase == "forward" and node.module.startswith(before):
                number = node.module.removeprefix(before).partition(".")[0]
                if number.isdigit():
                    found[number] = None
        return tuple(found)

    @cached_property
    def block_of(self) -> dict[str, int]:
        """For forward ops in blocks, which one it is."""
        at = {f"{(self.blocks or '').removesuffix('*')}{number}": k for k, number in enumerate(self.block_names)}
        depth = (self.blocks or "").count(".") + 1
        out = {}
        for node in self.graph.nodes:
            name = ".".join(node.module.split(".")[:depth])
            if node.phase == "forward" and name in at:
                out[node.name] = at[name]
        return out

    def planned(self, micro_batches: int, mesh: Mesh, style: tuple[str, ...]) -> Plan:
        """The folded graph of a micro-batch spread over a mesh in one style, without ZeRO."""
        style = tuple(s for s in style if s not in (SPARING, BOTH))
        key = (micro_batches, mesh, style)
        if key not in self._plans:
            self._plans[key] = self.placer(mesh).plan(self.small(micro_batches, self.keeps[-1]), style)
        return self._plans[key]

    def placed(self, score: Score) -> Plan:
        """The plan of a score, of the folded graph of its micro-batch."""
        if score.plan is not None:
            return score.plan
        cell, graph = score.cell, self.small(score.cell.micro_batches, self.keeps[-1])
        plan = self.planned(cell.micro_batches, cell.mesh, score.style)
        plan = self.placer(cell.mesh).pieces(graph, plan, score.style, score.zero)
        return replace(plan, recompute=self.again(cell, score.style))

    def again(self, cell: Cell, style: tuple[str, ...]) -> tuple[str, ...]:
        """Patterns of what backward makes again; where the stream is in pieces, what is gathered from them too."""
        return self.patterns(range(len(self.block_names)), style) if cell.recompute else ()

    def patterns(self, blocks: Sequence[int], style: tuple[str, ...], of: int | None = None) -> tuple[str, ...]:
        """The same for some blocks, by their place in the order; with all of so many, or of all, the whole family."""
        if not blocks or self.blocks is None:
            return ()
        every = len(blocks) == (len(self.block_names) if of is None else of)
        text = self.blocks if every else pattern(self.blocks, [self.block_names[b] for b in sorted(blocks)])
        if SPARING in style:
            return (f"{text}{PRODUCTS}{COLLECTIVES}" if LEAN in style else f"{text}{PRODUCTS}",)
        return (f"{text}{COLLECTIVES}" if {"sequence", LEAN}.intersection(style) else text,)

    def unfolded(self, score: Score) -> Plan:
        """Its placement on the micro-batch's graph at full depth."""
        return replace(self.deepened(self.placed(score), self.whole(score.cell.micro_batches)), name="searched")

    @cached_property
    def alike(self) -> dict[str, int]:
        """For how many parameters of the model each one of the folded graph stands."""
        out = {i.name: 1 for i in self.small(1, self.keeps[-1]).of_kind("param")}
        if len(self.keeps) > 1:
            for name, other in self.fold.standing(self.keeps[-1]).items():
                if name not in out:
                    out[other] = out.get(other, 1) + 1
        return out

    def stays_bytes(self, plan: Plan) -> float:
        """Parameters, gradients and state that a rank holds by a plan of the folded graph, at full depth."""
        optimizer, sizes, total = UPDATES[self.request.optimizer], plan.mesh.sizes, 0.0
        for item in self.small(1, self.keeps[-1]).of_kind("param"):
            nbytes = local_spec(item.spec, plan.inputs[item.name], sizes).nbytes
            if item.trainable:
                mine = local_spec(item.spec, plan.state.get(item.name, plan.inputs[item.name]), sizes)
                nbytes += int(mine.nbytes + optimizer * mine.numel)
            total += nbytes * self.alike[item.name]
        return total

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
    plan: Plan | None = None,
    worth_s: float = math.inf,
    roomy: float = 0.0,
) -> Score:
    """Seconds and bytes of a placement of the folded graph, at full depth.

    Without a plan, that of the style. Where there are no micro-batches, what takes longer than `worth_s` is not asked
    how much it holds: nan. Nor is any where there is plenty of room: it is taken to hold `roomy` bytes.
    """
    if cell.recompute and some(model):
        return (_between if cell.plain else _spread)(model, cell, style, zero, plan, worth_s)
    if not cell.plain:
        parts = parts_of(model, share_of(model, cell, style, zero))
        return Score(cell, style, zero, plan, pipelined_s(model, cell, parts, zero),
                     held_bytes(model, cell, parts, zero))  # fmt: skip
    return _shallow(model, cell, style, zero, plan, worth_s, roomy)


def _shallow(
    model: Model, cell: Cell, style: tuple[str, ...], zero: int, plan: Plan | None, worth_s: float, roomy: float = 0.0
) -> Score:
    """A step without micro-batches, nothing or everything made again."""
    if plan is None:
        plan = model.placed(Score(cell, style, zero, None, 0.0, 0.0))
    else:
        plan = replace(plan, recompute=model.again(cell, style))
    ran = {keep: _plain(model, model.deepened(plan, model.small(1, keep)), keep) for keep in model.depths}
    seconds = extrapolated({keep: found[0] for keep, found in ran.items()}, model.layers)
    behind_s = extrapolated({keep: found[1] for keep, found in ran.items()}, model.layers)
    if roomy or seconds > worth_s:
        return Score(cell, style, zero, plan, seconds, roomy or math.nan, behind_s)
    held = {keep: found[2]() for keep, found in ran.items()}
    found = Score(cell, style, zero, plan, seconds, extrapolated(held, model.layers), behind_s)
    model.shallow[cell, style, zero] = found
    return found


def _between(model: Model, cell: Cell, style: tuple[str, ...], zero: int, plan: Plan | None, worth_s: float) -> Score:
    """A step without micro-batches, as few blocks made again as fit: between none and all, in proportion.

    Or fewer, if others wait in the host's memory or keep their products.
    """
    twin, room = replace(cell, recompute=False), model.request.room_bytes
    none = model.shallow.get((twin, style, zero)) or _shallow(model, twin, style, zero, plan, worth_s)
    if math.isnan(none.peak_bytes):
        return replace(none, cell=cell)
    blocks, every = len(model.block_names), None
    best = replace(none, cell=cell, again=(0,), blocks=blocks)
    if model.request.recomputes:
        every = model.shallow.get((cell, style, zero)) or _shallow(model, cell, style, zero, plan, math.inf)
        best = _some_again(model, none, every)
    if none.peak_bytes <= room or none.plan is None:
        return best
    ways = model.ways[cell, style, zero] = ways_of(model, none, every)
    found = ways.within(room)
    if found is None or (best.peak_bytes <= room and best.seconds <= found[1]):
        return best
    mix, seconds, held = found
    return replace(
        best, seconds=seconds, peak_bytes=held, again=(mix.again,), blocks=blocks, spared=mix.spared, away=mix.away
    )


def _some_again(model: Model, none: Score, every: Score) -> Score:
    """As few blocks made again as fit."""
    room, blocks = model.request.room_bytes, len(model.block_names)
    saves = (none.peak_bytes - every.peak_bytes) / blocks
    if saves <= 0 or every.peak_bytes > room:
        return every
    if none.plan is not None and none.peak_bytes > room:
        # The first ones save more than all in the mean: behind them a block at work takes what they have saved.
        saves = max(saves, _first_saves(model, none.plan, every.style))
    count = min(blocks, max(0, math.ceil((none.peak_bytes - room) / saves)))

    def at(a: float, b: float) -> float:
        return a + count / blocks * (b - a)

    return replace(
        every,
        seconds=at(none.seconds, every.seconds),
        peak_bytes=none.peak_bytes - count * saves,
        behind_s=at(none.behind_s, every.behind_s),
        again=(count,),
        blocks=blocks,
        saves_bytes=saves,
    )


def _first_saves(model: Model, plan: Plan, style: tuple[str, ...]) -> float:
    """Bytes that the first block saves if it alone is made again."""
    keep = model.depths[-1]
    deep = model.deepened(plan, model.small(1, keep))
    none, one = (_plain(model, replace(deep, recompute=p), keep)[2]() for p in ((), model.patterns([0], style)))
    return none - one


def _spread(model: Model, cell: Cell, style: tuple[str, ...], zero: int, plan: Plan | None, worth_s: float) -> Score:
    """A step with micro-batches in which every place makes again as few blocks as fit."""
    del worth_s
    here = places(model, cell, style, zero)
    found = here.spread()
    if found is None:
        return Score(cell, style, zero, plan, pipelined_s(model, cell, here.parts, zero),
                     held_bytes(model, cell, here.parts, zero))  # fmt: skip
    blocks = len(model.block_names)
    seconds, again = here.seconds(found, blocks)
    held = max(
        here.held(p, [n / cell.virtual] * cell.virtual, [a / cell.virtual] * cell.virtual)
        for p, (n, a) in enumerate(zip(found.layers, found.again, strict=True))
    )
    return Score(cell, style, zero, plan, seconds, held, again=again, blocks=blocks)


def _plain(model: Model, plan: Plan, keep: int) -> tuple[float, float, Callable[[], float]]:
    """Seconds of a step, those behind the last op, and how to find out what it holds."""
    cluster, prices = model.request.cluster, model.machine(plan.mesh)
    program, then = step_programs(model.small(1, keep), plan)
    program, groups, made, times = timed(program, then, cluster, prices)
    last = max((int(times.end[k]) for k, line in enumerate(made.lines) if line.instr and not line.part), default=0)
    held = partial(held_by, program, groups, cluster, prices.optimizer)
    return times.step / 1e9, (times.step - last) / 1e9, lambda: float(held().peak_bytes)


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

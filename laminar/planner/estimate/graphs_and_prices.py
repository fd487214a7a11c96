"""One model at all sizes of micro-batches and depths: its graphs, prices on meshes, and placements, each made once.

Everything that estimates asks a `Model` for them. It knows nothing about how placements are scored
(`score_placement.py`), nor about who fills its tables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from laminar.cost.machine import UPDATES, Machine
from laminar.cost.ops.families import COMPUTES, family_of
from laminar.forecast.pipeline_step import inside
from laminar.forecast.step import machine
from laminar.ir.graph import Graph, Node
from laminar.ir.mesh import Mesh
from laminar.ir.plans.patterns import WITH_COLLECTIVES, WITHOUT_PRODUCTS
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import local_spec
from laminar.placement.fold import Fold, fold
from laminar.placement.micro_batch import micro
from laminar.planner.estimate.block_mix import BlockWays
from laminar.planner.estimate.candidates import Score
from laminar.planner.estimate.cost_by_depth import Parts, Share
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Placer, Style
from laminar.planner.tuning import SCORED_DEPTHS
from laminar.rules.samples import samples_of
from laminar.staging.balance import cuttable

FOLDED_LAYERS = 3
"""Layers of the folded graph on which placements are decided."""


class Model:
    """One model at all sizes of micro-batches and depths, and the machine's prices for all meshes."""

    def __init__(self, graph: Graph, request: Request) -> None:
        self.graph, self.request = graph, request
        self._machines: dict[Mesh, Machine] = {}
        self._placers: dict[Mesh, Placer] = {}
        self._micro: dict[tuple[int, int], Graph] = {}
        self._deep: dict[int, Graph] = {}
        self._plans: dict[tuple[int, Mesh, Style], Plan] = {}
        self.parts: dict[Share, Parts] = {}
        """What micro-batches were found to take."""
        self.modules: dict[Share, dict[str, float]] = {}
        """And what each module took of that, in the folded graph."""
        self.sums: dict[Share, np.ndarray] = {}
        """Seconds before each op that belongs to one stage."""
        self.uneven: dict[tuple[Share, int], float] = {}
        """How much longer the slowest of so many stages takes than the mean."""
        self.off: dict[tuple[Cell, Style, int], np.ndarray] = {}
        """By place, bytes by which the estimate of a pipeline was found to be too low."""
        self.shallow: dict[tuple[Cell, Style, int], Score] = {}
        """Scores of steps without micro-batches in which nothing or everything is recomputed."""
        self.ways: dict[tuple[Cell, Style, int], BlockWays] = {}
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
    def trained(self) -> int:
        """How many tensors have gradients."""
        return sum(o.kind == "grad" for o in self.graph.outputs)

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
        return (FOLDED_LAYERS - 1, FOLDED_LAYERS) if self.fold.layers > FOLDED_LAYERS else (self.layers,)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths that are simulated: shallow ones, or the only one."""
        return SCORED_DEPTHS if self.fold.layers > SCORED_DEPTHS[-1] else (self.layers,)

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

    def planned(self, micro_batches: int, mesh: Mesh, style: Style) -> Plan:
        """The folded graph of a micro-batch spread over a mesh in one style, without ZeRO."""
        style = replace(style, keep_products="none")
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

    def again(self, cell: Cell, style: Style) -> tuple[str, ...]:
        """Patterns of what backward recomputes; where the stream is in shards, what is gathered from them too."""
        return self.patterns(range(len(self.block_names)), style) if cell.recompute else ()

    def patterns(self, blocks: Sequence[int], style: Style | None = None, of: int | None = None) -> tuple[str, ...]:
        """The same for some blocks, by their place in the order; with all of so many, or of all, the whole family."""
        if not blocks or self.blocks is None:
            return ()
        every = len(blocks) == (len(self.block_names) if of is None else of)
        text = self.blocks if every else members_pattern(self.blocks, [self.block_names[b] for b in sorted(blocks)])
        style = style or Style()
        if style.keep_products == "all":
            text += WITHOUT_PRODUCTS
            return (text + WITH_COLLECTIVES if "lean" in style.axes else text,)
        return (f"{text}{WITH_COLLECTIVES}" if {"sequence", "lean"}.intersection(style.axes) else text,)

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


def members_pattern(family: str, numbers: Sequence[str]) -> str:
    """Members of a family of modules, `blocks.*`, by number: `blocks\\.(0|2)`."""
    before, after = family.split("*", 1)
    return f"{re.escape(before)}({'|'.join(numbers)}){re.escape(after)}"

"""A simulator of plans that keeps what it was asked, for tests of lower bounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from laminar.errors import LaminarError
from laminar.forecast.step import held_by, timed
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Choice, Plan
from laminar.ir.sbp import B, NdSbp, Partial, Sbp, Split
from laminar.ir.tensor import TensorSpec
from laminar.lower.step import step_programs
from laminar.placement import presets
from laminar.placement.random_plan import random_plan
from laminar.planner.bounds.signatures import Placements
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request


class Tried:
    """Plans of one graph in one cell, and what the simulator says about them."""

    def __init__(self, graph: Graph, spec: str, cell: Cell) -> None:
        self.graph, self.cell = graph, cell
        self.model = Model(graph, Request(Cluster.preset(spec)))
        self.machine = self.model.machine(cell.mesh)
        self.placements = Placements(graph, self.machine, cell.mesh)

    def seconds(self, plan: Plan) -> float:
        """Of a step; infinite where a plan can't be lowered. Parameters are gathered once, or for backward again."""
        once = any(plan.inputs[i.name] != (B,) * len(self.cell.mesh.sizes) for i in self.graph.of_kind("param"))
        return min(self.ran(replace(plan, gather_once=way))[0] for way in ((False, True) if once else (False,)))

    def ran(self, plan: Plan) -> tuple[float, float]:
        """Seconds and bytes."""
        cluster = self.model.request.cluster
        try:
            program, groups, _, times = timed(*step_programs(self.graph, plan), cluster, self.machine)
        except LaminarError:
            return float("inf"), float("inf")
        return times.step / 1e9, float(held_by(program, groups, cluster, "adamw").peak_bytes)

    def choices(self, name: str) -> list[Choice]:
        """Everything an op can do; kinds of terms do not mix on one tensor."""
        node = self.graph.by_name[name]
        found = []
        for o in self.placements.options(node):
            if all(len({p.op for p in nd if isinstance(p, Partial)}) < 2 for nd in (*o.ins, *o.outs)):
                found.append(Choice(o.ins, o.outs))
        return found

    def stored(self, spec: TensorSpec) -> list[tuple[NdSbp, NdSbp]]:
        """(parameter, state): whole, in shards, or whole with the state in shards, on each axis."""
        pieces: list[Sbp] = [Split(d) for d in range(len(spec.shape))]
        kinds: list[tuple[Sbp, Sbp]] = [(B, B), *((B, p) for p in pieces), *((p, p) for p in pieces)]
        return [
            (tuple(k[0] for k in way), tuple(k[1] for k in way))
            for way in itertools.product(kinds, repeat=len(self.cell.mesh.sizes))
        ]

    def with_param(self, plan: Plan, name: str, kind: tuple[NdSbp, NdSbp]) -> Plan:
        """The plan with a parameter stored, and its state kept, as told."""
        inputs, outputs = {**plan.inputs, name: kind[0]}, {**plan.outputs, f"grad:{name}": kind[1]}
        return replace(plan, inputs=inputs, outputs=outputs, state={**plan.state, name: kind[1]})

    def every(self) -> Iterator[Plan]:
        """All plans. The batch lies as its first reader wants it, and the loss is whole: neither costs anything."""
        graph = self.graph
        start = random_plan(graph, self.cell.mesh, 0)
        (batch,) = graph.of_kind("batch")
        reader = next(n for n in graph.nodes if any(r.name == batch.name for r in n.ins))
        at = next(i for i, r in enumerate(reader.ins) if r.name == batch.name)
        params = [(i.name, self.stored(i.spec)) for i in graph.of_kind("param")]
        names = [n.name for n in graph.nodes]
        for chosen in itertools.product(*map(self.choices, names)):
            ops = dict(zip(names, chosen, strict=True))
            inputs = {**start.inputs, batch.name: ops[reader.name].ins[at]}
            outputs = dict.fromkeys(start.outputs, (B,) * len(self.cell.mesh.sizes))
            plan = replace(start, ops=ops, inputs=inputs, outputs=outputs)
            for kinds in itertools.product(*(kinds for _, kinds in params)):
                for (name, _), kind in zip(params, kinds, strict=True):
                    plan = self.with_param(plan, name, kind)
                yield plan

    def starts(self, seeds: int) -> list[Plan]:
        """Plans with a name, and random ones."""
        graph, mesh = self.graph, self.cell.mesh
        made = [presets.data_parallel(graph, mesh), *(presets.zero(graph, mesh, stage) for stage in (1, 3))]
        for seed in range(seeds):
            rng, plan = random.Random(seed), random_plan(graph, mesh, seed)
            outputs = {k: v if k.startswith("grad:") else (B,) * len(v) for k, v in plan.outputs.items()}
            plan = replace(plan, outputs=outputs)
            for item in graph.of_kind("param"):
                plan = self.with_param(plan, item.name, rng.choice(self.stored(item.spec)))
            made.append(plan)
        return made

    def descended(
        self, plan: Plan, score: Callable[[Plan], float], sweeps: int = 1, most: int = 8, seed: int = 0
    ) -> tuple[float, Plan]:
        """A plan made faster op by op: of each op's options, so many drawn at random are tried."""
        rng, best = random.Random(seed), score(plan)
        for _ in range(sweeps):
            before = best
            moves = [n.name for n in self.graph.nodes] + [i.name for i in self.graph.inputs if i.kind != "rng"]
            for name in rng.sample(moves, len(moves)):
                others = list(self._others(plan, name))
                for other in rng.sample(others, min(most, len(others))):
                    seconds = score(other)
                    if seconds < best:
                        best, plan = seconds, other
            if best == before:
                break
        return best, plan

    def best(self, seeds: int, score: Callable[[Plan], float] | None = None, sweeps: int = 1, most: int = 8) -> float:
        """The fastest that is found: descents from the best plan with a name, and from random ones."""
        score = score or self.seconds
        plans = sorted(self.starts(seeds), key=score)
        drawn = [p for p in plans if p.name.startswith("random")]
        return min(self.descended(p, score, sweeps, most)[0] for p in (plans[0], *drawn))

    def _others(self, plan: Plan, name: str) -> Iterator[Plan]:
        if name in plan.ops:
            for choice in self.choices(name):
                yield replace(plan, ops={**plan.ops, name: choice})
            return
        item = next(i for i in self.graph.inputs if i.name == name)
        for kind in self.stored(item.spec):
            if item.kind == "param":
                yield self.with_param(plan, name, kind)
            else:
                yield replace(plan, inputs={**plan.inputs, name: kind[0]})

"""The plans that a search is about, as a value: it prints, it has a hash, and it says of any plan whether it is there.

A certificate speaks about this and nothing else. What a cell leaves open (how each tensor lies, where stages are cut,
in which order micro-batches pass, how many blocks are recomputed) is in the space whatever it is; what no cell has is
outside, and so is what `outside` names.

    >>> plan.space.contains(laminar.plans.data_parallel(graph, mesh))
    yes: dp=8 tp=1
    >>> plan.space.contains(laminar.plans.pipeline(part, stages=2, microbatches=5))
    no: no cell has a mesh of 4 for each of 2 stages, 5 micro-batches, 1 virtual stages
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from laminar.errors import PlanError
from laminar.ir.graph import Graph
from laminar.ir.ops import FREE
from laminar.ir.plans.patterns import WITH_COLLECTIVES, WITHOUT_PRODUCTS
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.planned import Planned
from laminar.ir.plans.staged import Staged
from laminar.ir.serial.codec import content_hash
from laminar.placement.micro_batch import micro
from laminar.planner.space.cell import Cell
from laminar.planner.space.pins import parsed, pattern
from laminar.planner.space.request import Request, texts

PLACEMENTS = "every tensor in any placement that the rules allow, on one mesh for each stage"
RECOMPUTED = "where a cell has it: any number of blocks of each stage, the first ones, whole or without their products"
OFFLOADED = "where a cell without stages has it: any number of blocks wait in the host's memory, evenly spread"
BRANCH_PLACEMENTS = (
    "branches with devices of their own: any placement on one axis, or on one across nodes and one inside; none again"
)
STAGE_CUTS = "stages are stretches of the program, cut anywhere, with equal meshes, under any schedule"
STAGES_IN_A_ROW = (
    "up to {} stages stand in a row: each waits for the one before it, dealt out to places in turn; with several at a "
    "place, gradients of weights are not apart from those of inputs"
)
PARAMETER_GATHERS = "parameters in shards: once a step, or for forward and for backward"
ALGORITHMS = "of each exchange the cheapest: ring, trees, direct, by switches with trees between them, by shared memory"
PRINTED_RULES = 8
"""Rules of a file that are printed by name."""
SENTENCES = ("placements", "cuts", "in a row", "recompute", "offload", "sets", "gathers", "algorithms")
"""What of a space is a sentence."""


@dataclass(frozen=True)
class Member:
    """Whether a plan is in a space, and why; true where it is."""

    inside: bool
    why: str
    cell: Cell | None = None
    """The cell that has it."""

    def __bool__(self) -> bool:
        return self.inside

    def __str__(self) -> str:
        return f"{'yes' if self.inside else 'no'}: {self.why}"

    __repr__ = __str__


@dataclass(frozen=True)
class Space:
    """A set of plans, as plain data."""

    data: Mapping[str, Any]

    @staticmethod
    def of(
        graph: Graph, request: Request, cells: Sequence[Cell], blocks: str | None = None, rows: int = 0, **more: Any
    ) -> Space:
        """All plans of these cells; `blocks` names the modules that may be recomputed, up to `rows` stages in a row."""
        rows = max((n for c in cells if c.stages > 1 and (n := c.stages * c.virtual) <= rows), default=0)
        return Space(
            {
                "graph": graph.hash,
                "cluster": request.cluster.hash,
                "devices": request.cluster.devices,
                "optimizer": request.optimizer,
                "memory_bytes": request.room_bytes,
                "placements": PLACEMENTS,
                "cuts": STAGE_CUTS,
                **({"rows": rows, "in a row": STAGES_IN_A_ROW.format(rows)} if rows else {}),
                **({"sets": BRANCH_PLACEMENTS} if more.get("branches") else {}),
                **({"pinned": dict(request.place)} if request.place else {}),
                **({"recompute": RECOMPUTED} if request.recomputes else {}),
                **({"offload": OFFLOADED} if request.offloads else {}),
                **({"blocks": blocks} if blocks else {}),
                **({"rules": texts(request.rules)} if request.rules and request.allows("rewrite") else {}),
                "zero": [0, 1, 2, 3] if request.allows("zero") else [0],
                "gathers": PARAMETER_GATHERS,
                "algorithms": ALGORITHMS,
                "cells": [[c.stages, c.micro_batches, c.virtual, c.dp, c.tp, int(c.recompute)] for c in cells],
                **more,
            }
        )

    @cached_property
    def hash(self) -> str:
        """Its identity."""
        return content_hash(dict(self.data))

    @cached_property
    def cells(self) -> frozenset[Cell]:
        """All its cells."""
        rows = self.data.get("cells", ())
        return frozenset(Cell(s, m, v, dp, tp, bool(again)) for s, m, v, dp, tp, again in rows)

    def __str__(self) -> str:
        data = self.data
        lines = [f"space {self.hash[:8]}: plans for {data.get('devices', '?')} devices, {data['optimizer']}"]
        if self.cells:
            lines.append(f"  {len(self.cells)} cells")
            for name in ("stages", "micro_batches", "virtual", "dp", "tp"):
                values = sorted({getattr(cell, name) for cell in self.cells})
                lines.append(f"    {name.replace('_', '-')}: {' '.join(map(str, values))}")
        if "pipelines" in data:
            lines.append(f"  {len(data['pipelines'])} pipelines over parts that differ, and plans on one part alone")
        lines += [f"  {key}: {data[key]}" for key in SENTENCES if key in data]
        lines += [f"  pinned: {name} as {placed}" for name, placed in data.get("pinned", {}).items()]
        if data.get("rules"):
            names = ", ".join(name for name, _ in data["rules"][:PRINTED_RULES])
            more = f" and {len(data['rules']) - PRINTED_RULES} more" if len(data["rules"]) > PRINTED_RULES else ""
            lines.append(f"  rewritten by the rules of a file, too: {names}{more}")
        if data.get("rewrites"):
            lines.append(f"  {len(data['rewrites'])} graphs, the captured one and its rewrites")
        if data.get("branches"):
            lines.append(f"  {len(data['branches'])} ways to give branches devices of their own")
        return "\n".join([*lines, *(f"  outside: {text}" for text in data.get("outside", ()))])

    # --- membership

    def contains(self, plan: Plan | Staged, graph: Graph | None = None) -> Member:
        """Whether a plan is in the space, and why it is not.

        A plan with stages is one of micro-batches: with the `graph` of the whole batch it is looked up whose. Whether
        it fits is asked of a plan that says what it holds (`plan.peak_bytes`); of others it is taken for granted.
        """
        if "pipelines" in self.data:
            return self._over_parts(plan)
        for asks in (self._of_graph, self._fits, self._pinned, self._pieces, self._set_apart, self._in_a_row):
            answer = asks(plan, graph)
            if answer is not None:
                return answer
        return self._in_cells(plan)

    def _of_graph(self, plan: Plan | Staged, graph: Graph | None) -> Member | None:
        steps = [step.to_json() for step in plan.rewrites]
        if steps and steps not in self.data.get("rewrites", []):
            return Member(False, "its rewrites of the graph were not searched to the end")
        own = (plan.captured_hash if steps else plan.graph_hash) or self.data["graph"]
        wanted = self.data["graph"]
        if isinstance(plan, Staged):
            if graph is None:
                return None
            wanted = micro(graph, plan.micro_batches).hash if graph.hash == wanted else ""
        return None if own == wanted else Member(False, "it is for another graph")

    def _fits(self, plan: Plan | Staged, graph: Graph | None) -> Member | None:
        del graph
        ranks = sum(len(p.ranks) for p in plan.places) if isinstance(plan, Staged) else plan.mesh.ranks
        if ranks != self.data["devices"]:
            return Member(False, f"it uses {ranks} devices of {self.data['devices']}")
        if (plan.peak_bytes or 0) > self.data["memory_bytes"]:
            return Member(False, f"it does not fit: {plan.peak_bytes} bytes of {self.data['memory_bytes']:.0f}")
        return None

    def _pinned(self, plan: Plan | Staged, graph: Graph | None) -> Member | None:
        del graph
        for one in _plans(plan):
            for text, placed in self.data.get("pinned", {}).items():
                for axis, sbp in parsed(placed):
                    if axis and axis not in one.mesh.names:
                        return Member(False, f"{text} is pinned on axis {axis}, which it does not have")
                    at = one.mesh.axis(axis) if axis else len(one.mesh.sizes) - 1
                    off = [n for n, nd in one.inputs.items() if pattern(text).fullmatch(n) and nd[at] != sbp]
                    if off:
                        return Member(False, f"{off[0]} does not lie as it is pinned, {placed}")
        return None

    def _pieces(self, plan: Plan | Staged, graph: Graph | None) -> Member | None:
        del graph
        for one in _plans(plan):
            cut = [n for n, nd in one.state.items() if nd != one.inputs.get(n, nd)]
            if cut and 1 not in self.data["zero"]:
                return Member(False, f"optimizer state of {cut[0]} is in shards, and ZeRO is not allowed")
            for kind, patterns in (("recompute", one.recompute), ("offload", one.offload)):
                if patterns and kind not in self.data:
                    return Member(False, f"{kind} is not allowed")
                other = [text for text in patterns if not self._blocks(text)]
                if other:
                    return Member(False, f"{kind} of {other[0]}: cells know {self.data.get('blocks', 'no')} blocks")
        return None

    def _blocks(self, text: str) -> bool:
        """Whether a pattern names whole blocks, or those without products or with what ranks exchange."""
        family = str(self.data.get("blocks", ""))
        before = re.escape(family.removesuffix("*"))
        text = text.removesuffix(WITH_COLLECTIVES).removesuffix(WITHOUT_PRODUCTS)
        return bool(family) and (text == family or re.fullmatch(rf"{re.escape(before)}\(?[\d|]+\)?", text) is not None)

    def _set_apart(self, plan: Plan | Staged, graph: Graph | None) -> Member | None:
        """Branches on devices of their own, and stages that are not alike."""
        del graph
        if not isinstance(plan, Staged):
            return None
        if any(list(p.ranks) != list(range(p.ranks[0], p.ranks[0] + len(p.ranks))) for p in plan.places):
            return Member(False, "the ranks of a stage do not lie side by side")
        if len({p.mesh.sizes for p in plan.places}) == 1:
            return None
        sizes = sorted(len(p.ranks) for p in plan.places)
        for way in self.data.get("branches", ()):
            if sorted(way["devices"]) == sizes and way["microbatches"] == plan.micro_batches:
                return Member(True, f"branches apart on {' and '.join(map(str, way['devices']))} devices")
        return Member(False, "its stages have different meshes")

    def _in_a_row(self, plan: Plan | Staged, graph: Graph | None) -> Member | None:
        """As few stages as that stand in a row; that they are stretches is asked of the graph."""
        if not isinstance(plan, Staged) or len(plan.stages) > self.data.get("rows", 0):
            return None
        why = out_of_row(plan)
        if not why and graph is not None and not plan.rewrites:
            stages = [plan.of[n.name] for n in graph.nodes if n.name in plan.of and n.op not in FREE]
            why = "" if stages == sorted(stages) else "its stages are no stretches of the program"
        return Member(False, why) if why else None

    def _in_cells(self, plan: Plan | Staged) -> Member:
        staged = isinstance(plan, Staged)
        mesh = plan.places[0].mesh if isinstance(plan, Staged) else plan.mesh
        stages = len(plan.places) if isinstance(plan, Staged) else 1
        chunks = {sum(s.place == p for s in plan.stages) for p in range(stages)} if isinstance(plan, Staged) else {1}
        parts = plan.micro_batches if isinstance(plan, Staged) else 1
        sizes = [n for n in mesh.sizes if n > 1]
        again = any(one.recompute or one.offload for one in _plans(plan))
        if len(chunks) > 1:
            return Member(False, "its places have different numbers of stages")
        if len(sizes) > 2:
            return Member(False, f"its mesh has {len(sizes)} axes, cells have up to 2")
        ways = [(sizes[0], sizes[1])] if len(sizes) == 2 else [(n, 1) for n in sizes or [1]] + [(1, n) for n in sizes]
        for dp, tp in ways:
            cell = Cell(stages, parts, min(chunks), dp, tp, again)
            if cell in self.cells:
                return Member(True, str(cell), cell)
        shape = " x ".join(map(str, mesh.sizes))
        what = f"no cell has a mesh of {shape}" + (" with blocks recomputed" if again else "")
        if staged:
            what += f" for each of {stages} stages, {parts} micro-batches, {min(chunks)} virtual stages"
        return Member(False, what)

    def _over_parts(self, plan: Plan | Staged) -> Member:
        """For a cluster whose parts differ."""
        if not isinstance(plan, Staged):
            return Member(False, "plans on one part alone have spaces of their own")
        sizes = [
            (p.mesh.sizes[0] if len(p.mesh.sizes) > 1 or p.mesh.names[0] != "tp" else 1, p.mesh.ranks)
            for p in plan.places
        ]
        meshes = [(dp, ranks // dp) for dp, ranks in sizes]
        again = any(one.recompute for one in _plans(plan))
        for way in self.data["pipelines"]:
            told = [(dp, tp) for stages, dp, tp in way["sides"] for _ in range(stages)]
            if told == meshes and way["microbatches"] == plan.micro_batches and bool(way["recompute"]) == again:
                return Member(True, f"{len(meshes)} stages over all parts, {plan.micro_batches} micro-batches")
        return Member(False, f"no pipeline has stages of {meshes} and {plan.micro_batches} micro-batches")


def _plans(plan: Plan | Staged) -> list[Plan]:
    return [stage.plan for stage in plan.stages] if isinstance(plan, Staged) else [plan]


def space(plan: Planned) -> Space:
    """The space that a plan was searched in."""
    found = plan.account.space
    if not found or "graph" not in found:
        raise PlanError("this plan does not come from a search", next="laminar.plan(graph, cluster) searches")
    return Space(found)


def out_of_row(staged: Staged) -> str:
    """Why the stages of a plan don't stand in a row as (1) and (2) have it; nothing if they do."""
    count, places = len(staged.stages), len(staged.places)
    if any(stage.place != s % places for s, stage in enumerate(staged.stages)):
        return "its stages are not dealt out to places in turn"
    if staged.apart and count > places:
        return "gradients of weights are apart, with several stages at a place"
    for s in range(1, count):
        sent = {name.removeprefix("sent:") for name in staged.stages[s].plan.outputs if name.startswith("sent:")}
        if sent.isdisjoint(staged.stages[s - 1].plan.inputs):
            return f"stages {s - 1} and {s} don't wait for each other"
    return ""


__all__ = ["Member", "Space", "space"]

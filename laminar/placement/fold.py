"""Repeated blocks, found by structure: a deep model as a shallow one, and a shallow plan as a deep one.

Planning looks at the same layer again and again. Here the forward ops are read as a text whose letters say what an op
does to tensors of which shapes, and the longest stretch that repeats itself is cut into *layers*; backward has a
stretch of its own, in which the layers come in reverse. Names play no part. A layer may be taken out if the rest can be
joined: what the first layer behind the gap reads from the one before it, it then reads from the last layer before the
gap, and backward the other way round. Every such reference is checked to be of the same shape, and every layer taken
out to be wired as the one that stands for it; where that fails, nothing is folded.

`Fold.small(keep)` is the model with `keep` layers, `Fold.unfold(plan, keep)` puts the plan of a shallow graph on the
deep one: layers that were taken out do as their neighbour does. Values that all layers read (masks, rotary tables)
and parameters tied across layers stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from laminar.ir.graph import Graph, Node, map_refs
from laminar.ir.plans.account import Account
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import NdSbp
from laminar.ir.serial.codec import Ref
from laminar.rules.notation import calls_in

LEAST_LAYERS = 3
"""Layers below which folding is not worth while."""


@dataclass(frozen=True)
class Fold:
    """Which op stands where in which layer."""

    graph: Graph
    layers: int
    at: dict[str, tuple[int, str, int]]
    """Op -> layer, direction (f or b), place within it."""
    _small: dict[int, Graph] = field(default_factory=dict, repr=False)
    _standing: dict[int, dict[str, str]] = field(default_factory=dict, repr=False)

    @cached_property
    def ops(self) -> dict[tuple[int, str, int], Node]:
        """The op at a place of a layer."""
        return {self.at[n.name]: n for n in self.graph.nodes if n.name in self.at}

    @cached_property
    def share(self) -> float:
        """Of the ops, how many are in layers."""
        return len(self.at) / max(1, len(self.graph.nodes))

    def stands_for(self, keep: int, layer: int) -> int:
        """The layer that is kept for a given one: the first ones and the last are, the others do as their neighbour."""
        if layer < keep - 1 or layer == self.layers - 1:
            return layer
        return max(0, keep - 2)

    def small(self, keep: int) -> Graph:
        """The graph with so many layers; the whole one if it has no more."""
        if keep >= self.layers or self.layers < LEAST_LAYERS:
            return self.graph
        if keep not in self._small:
            self._small[keep] = self._without(max(1, keep - 1), self.layers - 1)
        return self._small[keep]

    def _without(self, first: int, last: int) -> Graph:
        """Without layers first..last-1."""
        gap = last - first
        nodes = []
        for node in self.graph.nodes:
            place = self.at.get(node.name)
            if place is not None and first <= place[0] < last:
                continue
            nodes.append(self._joined(node, place, first, last, gap) if place else node)
        made = {n.name for n in nodes}
        outputs = tuple(o for o in self.graph.outputs if o.ref.name in made or o.ref.name not in self.graph.by_name)
        read = {r.name for n in nodes for r in n.ins} | {o.ref.name for o in outputs}
        gone = {r.name for n in self.graph.nodes if n.name not in made for r in n.ins} - read
        inputs = tuple(i for i in self.graph.inputs if i.name not in gone)
        names = {i.name for i in inputs}
        return replace(
            self.graph,
            inputs=inputs,
            constants=tuple(c for c in self.graph.constants if c.name not in gone),
            nodes=tuple(nodes),
            outputs=tuple(o for o in outputs if o.kind not in ("grad", "buffer") or o.name in names),
            probed=tuple((n, s) for n, s in self.graph.probed if n in made),
        )

    def _joined(self, node: Node, place: tuple[int, str, int], first: int, last: int, gap: int) -> Node:
        def now(ref: Ref) -> Ref:
            there = self.at.get(ref.name)
            if there is None or not first <= there[0] < last:
                return ref
            layer = there[0] - gap if place[0] >= last else there[0] + gap
            return Ref(self.ops[layer, there[1], there[2]].name, ref.index)

        return replace(node, args=map_refs(node.args, now))

    def unfold(self, plan: Plan, keep: int, graph: Graph | None = None) -> Plan:
        """The plan of `small(keep)` for the whole graph, or for another one that has some of its layers."""
        if keep >= self.layers or self.layers < LEAST_LAYERS:
            return plan
        graph = graph or self.graph
        ops, like = {}, self.standing(keep)
        for node in graph.nodes:
            place = self.at.get(node.name)
            if node.name in plan.ops or place is None:
                ops[node.name] = plan.ops[node.name]
            else:
                ops[node.name] = plan.ops[self.ops[self.stands_for(keep, place[0]), place[1], place[2]].name]

        def spread(given: dict[str, NdSbp], key: str = "") -> dict[str, NdSbp]:
            known = dict(given)
            for name, other in like.items():
                if key + other in given:
                    known.setdefault(key + name, given[key + other])
            return known

        outputs = spread(spread(plan.outputs, "grad:"), "buffer:")
        wanted = {f"{o.kind}:{o.name}" for o in graph.outputs}
        names = {i.name for i in graph.inputs}
        inputs = {k: v for k, v in spread(plan.inputs).items() if k in names}
        # Layers of backward may begin elsewhere than those of forward, and a gradient of a parameter that is kept be in
        # one that is not: it leaves as its parameter lies.
        lost = {f"grad:{o.name}": inputs[o.name] for o in graph.outputs if o.kind == "grad" and o.name in inputs}
        return Plan(
            plan.mesh,
            graph.hash,
            ops,
            inputs,
            {k: v for k, v in {**lost, **outputs}.items() if k in wanted},
            {k: v for k, v in spread(plan.state).items() if k in names},
            plan.name,
            Account(),
            plan.recompute,
            offload=plan.offload,
            gather_once=plan.gather_once,
        )

    def standing(self, keep: int) -> dict[str, str]:
        """For inputs of layers that are taken out, what stands in their place in the layer kept for them."""
        if keep in self._standing:
            return self._standing[keep]
        inputs = {i.name for i in self.graph.inputs}
        like: dict[str, str] = {}
        for (layer, way, k), node in self.ops.items():
            other = self.ops[self.stands_for(keep, layer), way, k]
            if other is not node:
                like.update(
                    {a.name: b.name for a, b in zip(node.ins, other.ins, strict=True) if a.name in inputs and a != b}
                )
        self._standing[keep] = like
        return like


def fold(graph: Graph) -> Fold:
    """The layers of a graph; none where there is nothing that repeats, or where it can't be taken apart."""
    if "fold" not in graph.notes:
        graph.notes["fold"] = _layers(graph)
    out: Fold = graph.notes["fold"]
    return out


def _layers(graph: Graph) -> Fold:
    found = _folded(graph, graph.nodes)
    if found is None and (shared := _tables(graph)):
        found = _folded(graph, [n for n in graph.nodes if n.name not in shared])
    return found or Fold(graph, 0, {})


def _folded(graph: Graph, ops: Sequence[Node]) -> Fold | None:
    calls = calls_in(graph)
    letters = [(n.phase, id(calls[n.name])) for n in ops]  # what an op does to what: names play no part
    begun = next((k for k, n in enumerate(ops) if n.phase != "forward"), len(ops))
    forward = _repeats(letters[:begun])
    backward = _repeats(letters[begun:])
    if forward is None or backward is None:
        return None
    start, period, count = forward
    for shift in range(period):
        # Where a layer begins is a matter of taste, so that the two stretches may be cut at different places.
        found = _laid_out(graph, ops, (start + shift, period), (begun + backward[0], backward[1]), count, backward[2])
        if found is not None:
            return found
    return None


def _tables(graph: Graph) -> set[str]:
    """Ops that read nothing but buffers and constants: tables (rotary angles, masks), made where the first layer wants
    them, and read by all."""
    still = {i.name for i in graph.of_kind("buffer")} | {c.name for c in graph.constants}
    found: set[str] = set()
    for node in graph.nodes:
        if node.ins and all(r.name in still for r in node.ins) and not node.op.startswith("laminar."):
            still.add(node.name)
            found.add(node.name)
    return found


def _repeats(letters: Sequence[Any]) -> tuple[int, int, int] | None:
    """(start, period, count) of the repetition that covers most; nothing below `LEAST_LAYERS` layers."""
    number: dict[Any, int] = {}
    text = [number.setdefault(x, len(number)) for x in letters]
    array = np.array(text)
    where: dict[int, list[int]] = {}
    for i, x in enumerate(text):
        where.setdefault(x, []).append(i)
    periods = {b - a for places in where.values() if len(places) >= LEAST_LAYERS for a, b in pairwise(places)}
    best: tuple[int, int, int] | None = None
    for period in sorted(periods):
        same = array[:-period] == array[period:]
        at = np.arange(1, len(same) + 1)
        runs = at - np.maximum.accumulate(np.where(same, 0, at))  # of what is the same, up to here
        count = int(runs.max()) // period + 1
        if count >= LEAST_LAYERS and (best is None or count * period > best[1] * best[2]):
            best = (int(np.argmax(runs >= (count - 1) * period)) + 1 - (count - 1) * period, period, count)
    return best


def _laid_out(
    graph: Graph, ops: Sequence[Node], forward: tuple[int, int], backward: tuple[int, int], count: int, again: int
) -> Fold | None:
    """Layers numbered as forward has them; backward's by what they read; nothing if they are wired differently."""
    (start, period), (behind, length) = forward, backward
    names = [n.name for n in ops]
    at: dict[str, tuple[int, str, int]] = {}
    for layer in range(count):
        for k in range(period):
            if start + layer * period + k >= behind:
                return None
            at[names[start + layer * period + k]] = (layer, "f", k)
    top = -1
    for block in range(again):
        first = behind + block * length
        read = [at[r.name][0] for n in ops[first : first + length] for r in n.ins if r.name in at]
        if not read or (block and max(read) + block != top):
            return None
        top = max(read) + block
    if top < 0:
        return None
    for block in range(again):
        if not 0 <= top - block < count:
            continue
        for k in range(length):
            at[names[behind + block * length + k]] = (top - block, "b", k)
    low, high = max(0, top - again + 1), min(count - 1, top)
    at = {n: (layer - low, way, k) for n, (layer, way, k) in at.items() if low <= layer <= high}
    found = Fold(graph, high - low + 1, at)
    return found if found.layers >= LEAST_LAYERS and _alike(found) else None


def _alike(found: Fold) -> bool:
    """Whether every layer is wired as the one before it, and the ends can be joined whichever layers are taken out."""
    graph, at, last = found.graph, found.at, found.layers - 1
    for (layer, way, k), node in found.ops.items():
        for ref in node.ins:
            there = at.get(ref.name)
            if there is not None and abs(there[0] - layer) > 1:
                return False
        if layer == last:
            continue
        twin = found.ops.get((layer + 1, way, k))
        if twin is None or len(twin.ins) != len(node.ins):
            return False
        for a, b in zip(node.ins, twin.ins, strict=True):
            if graph.specs[a] != graph.specs[b] or a.index != b.index or not _moved(found, a, b):
                return False
    kept = {n.name for n in graph.nodes if n.name not in at}
    for node in graph.nodes:
        # Ops outside of the layers may read the first and the last only.
        if node.name in kept and any(r.name in at and at[r.name][0] not in (0, last) for r in node.ins):
            return False
    loose = {o.ref.name for o in graph.outputs if o.kind in ("loss", "metric")}
    return not any(name in at and 0 < at[name][0] < last for name in loose)


def _moved(found: Fold, a: Ref, b: Ref) -> bool:
    """Whether `b` is to its layer what `a` is to the one before: shifted by one, the same for all, or an input."""
    here, there = found.at.get(a.name), found.at.get(b.name)
    if here is not None and there is not None:
        return there == (here[0] + 1, here[1], here[2])
    inputs = found.graph.by_name
    if here is None and there is None:
        return a == b or (a.name not in inputs and b.name not in inputs)
    # The first layer reads from before it, the last backward layer from behind it.
    inner = here or there
    return inner is not None and inner[0] in (0, found.layers - 1)

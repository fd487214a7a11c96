"""Where memory keeps a fast plan out: the best of it that fits, tensor by tensor.

ZeRO does one thing to all tensors. Where what is fast is a little too large, the best plan does different things to
different tensors: tables in shards over all ranks, layers in shards within a node, eleven of 24 layers leaner than the
others, small tensors whole because to gather them costs more than it saves, and a few blocks recomputed in backward.

A plan's *units* are the tensors of one role in one layer, or one tensor outside of the layers; units of one role are a
group. What a group would take if it were stored in another way is simulated on a shallow model, one group at a time: so
a gather that other work hides counts by what it slows down, and one that nothing hides counts in full. What it would
hold is simulated too for single tensors, which may be large, and follows from shapes for layers. Then every group gets
a way for each of its units, and the blocks that are recomputed a number, at the least sum of seconds within the bytes
there are (`placement/minsum_capped.py`). That groups add up is an assumption; the plan is simulated at full depth,
what the estimate of bytes was off by is taken into account and the choice made once more, a few times at most. Only
what was simulated at full depth and fits is handed out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from laminar.cost.machine import UPDATES
from laminar.errors import LaminarError
from laminar.forecast.step import held_by, predict, timed
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import local_spec
from laminar.lower.boxing.buckets import SMALL_BYTES
from laminar.lower.step import step_programs
from laminar.placement.minsum_capped import Capped
from laminar.planner.estimate.candidates import Final, Score
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.pipeline_recompute import some
from laminar.planner.estimate.score_placement import feasible, scored
from laminar.planner.space.cell import Cell
from laminar.planner.space.styles import ZERO_STAGES, Style, styles
from laminar.planner.tuning import (
    LITTLE_SAVED,
    MIXED_PLACEMENTS,
    STORAGE_GROUPS,
    STORAGE_MIXES,
    STORAGE_SOLVE_S,
    WORTH_SIMULATING,
)


@dataclass(frozen=True)
class Group:
    """Tensors of one role: units of which each may be stored in a way of its own."""

    units: tuple[tuple[str, ...], ...]
    """Names, in the order of the layers."""
    small: bool = False


@dataclass(frozen=True)
class Way:
    """Some units of a group stored in another way: what one takes and holds more than as it was."""

    group: int
    storage: int
    seconds: float
    nbytes: float


def kept_out(
    model: Model, cells: Iterable[Cell], scores: Sequence[Score], best_s: float
) -> Iterator[tuple[Cell, Style]]:
    """Cells without micro-batches, and styles in which what is fastest there does not fit.

    Data parallel with pieces in each node is also asked for where a guess has kept its cell from being looked at.
    """
    request = model.request
    if not request.allows("zero") or "zero" in request.pin:
        return
    node = request.cluster.levels[0].size
    for cell in sorted(c for c in cells if c.plain and not c.recompute and c.ranks > 1):
        mine = [(replace(s.style, gather_once=False), s) for s in scores if s.cell == cell]
        named = styles(cell.mesh, request.allows("tensor"), False) if mine or cell.tp == node else []
        for style in dict.fromkeys([*named, *(style for style, _ in mine)]):
            fastest = min((s for bare, s in mine if bare == style), key=lambda s: s.seconds, default=None)
            unknown = fastest is None and (mine or "inner" in style.axes)
            if unknown or (fastest is not None and fastest.seconds < best_s and not feasible(fastest, request)):
                yield cell, style


def mixes(
    model: Model, cells: Iterable[Cell], scores: Sequence[Score], best_s: float, left: Callable[[], float]
) -> Iterator[Final]:
    """Plans of cells, of which `scores` are known, faster than `best_s` and within memory, simulated at full depth.

    `left` tells how many seconds there are.
    """
    asked = 0
    for cell, style in kept_out(model, cells, scores, best_s):
        if asked == MIXED_PLACEMENTS or left() <= 0:
            return
        try:
            mix = Mix(model, cell, style)
            if mix.base.seconds >= best_s:
                continue
            asked += 1
            found = mix.best(best_s)
        except LaminarError:
            continue
        if found is not None:
            best_s = found.seconds
            yield found


class Mix:
    """One way to spread a step's work over a mesh, and the ways in which its parameters may be stored."""

    def __init__(self, model: Model, cell: Cell, style: Style) -> None:
        self.model, self.cell, self.style = model, cell, style
        graph, placer = model.small(1, model.keeps[-1]), model.placer(cell.mesh)
        bare = model.planned(1, cell.mesh, style)
        own = {zero: placer.pieces(graph, bare, style, zero) for zero in ZERO_STAGES}
        known = [model.shallow.get((cell, style, z)) or scored(model, cell, style, z, plan) for z, plan in own.items()]
        self.base = min(known, key=lambda s: s.seconds)
        """The fastest of those that store all tensors in one way."""
        every = [own[self.base.zero], *own.values()]
        if len(cell.mesh.sizes) > 1:
            for over in (Style(("data", "data")), Style(("data", "inner"))):
                every += [placer.pieces(graph, bare, over, zero) for zero in ZERO_STAGES if zero]
        self.deep: list[Plan] = []
        """Of the whole graph, each with all tensors stored in one way; the base first."""
        seen = set()
        for plan in every:
            if plan.hash not in seen:
                seen.add(plan.hash)
                self.deep.append(replace(model.deepened(plan, model.whole(1)), recompute=()))
        self.params = {i.name: i for i in model.whole(1).of_kind("param")}
        self.groups = self._groups()

    # --- what there is to choose

    def _groups(self) -> list[Group]:
        """Tensors by role, those that hold most first; small ones of layers, and of the ends, are one group each."""
        fold, params = self.model.fold, self.params
        layers: dict[tuple[str, int, int], dict[int, str]] = {}
        inside: set[str] = set()
        for (layer, way, k), node in sorted(fold.ops.items()):
            for j, ref in enumerate(node.ins):
                if ref.name in params and ref.name not in inside:
                    layers.setdefault((way, k, j), {})[layer] = ref.name
                    inside.add(ref.name)
        roles = [[(name,) for _, name in sorted(by.items())] for by in layers.values()]
        ends = [[(name,)] for name in params if name not in inside]
        if len(ends) > STORAGE_GROUPS:  # a model without layers: tensors of one shape are of one role
            alike: dict[object, list[tuple[str]]] = {}
            for ((name,),) in ends:
                alike.setdefault((params[name].spec, *(p.inputs[name] for p in self.deep)), []).append((name,))
            ends = list(alike.values())
        found = []
        for groups in (roles, ends):
            small = [g for g in groups if params[g[0][0]].spec.nbytes < SMALL_BYTES]
            found += [Group(tuple(g)) for g in groups if g not in small]
            if small:
                count = max(map(len, small))
                units = [tuple(g[k][0] for g in small if k < len(g)) for k in range(count)]
                found.append(Group(tuple(units), small=True))
        found.sort(key=lambda g: -sum(params[n].spec.nbytes for unit in g.units for n in unit))
        return [*[g for g in found if not g.small][:STORAGE_GROUPS], *[g for g in found if g.small]]

    def held(self, names: Iterable[str], storage: int) -> float:
        """Bytes of parameters, gradients and state on a rank."""
        plan, optimizer, total = self.deep[storage], UPDATES[self.model.request.optimizer], 0.0
        for name in names:
            item, sizes = self.params[name], plan.mesh.sizes
            total += local_spec(item.spec, plan.inputs[name], sizes).nbytes
            if item.trainable:
                mine = local_spec(item.spec, plan.state.get(name, plan.inputs[name]), sizes)
                total += mine.nbytes + optimizer * mine.numel
        return total

    def ways(self) -> list[Way]:
        """Leaner ways of each group, and small tensors whole, with what a unit takes and holds more."""
        found, much = [], LITTLE_SAVED * max(0.0, self.base.peak_bytes - self.model.request.room_bytes)
        there = {i.name for i in self.model.small(1, self.model.depths[-1]).inputs}
        at_first = self._shallow({})
        for k, group in enumerate(self.groups):
            units = [u for u in group.units if all(n in there for n in u)]
            names, seen = [n for u in units for n in u], {self._stored(units[0], 0)}
            for storage in range(1, len(self.deep)):
                stored = self._stored(units[0], storage)
                more = (self.held(names, storage) - self.held(names, 0)) / len(units)
                leaner = -more * len(group.units) > much
                whole = group.small and not self.deep[storage].state
                if stored in seen or not (leaner or whole):
                    continue
                seen.add(stored)
                now = self._shallow(dict.fromkeys(names, storage))
                if len(group.units) == 1 and not group.small:
                    more = now[1]() - at_first[1]()
                found.append(Way(k, storage, (now[0] - at_first[0]) / len(units), more))
        return found

    def _stored(self, names: Iterable[str], storage: int) -> object:
        plan = self.deep[storage]
        return tuple((plan.inputs[n], plan.state.get(n)) for n in names)

    def _shallow(self, stored: Mapping[str, int]) -> tuple[float, Callable[[], float]]:
        """Seconds of a step of the shallow model, and how to find out what it holds."""
        model = self.model
        graph, cluster, prices = model.small(1, model.depths[-1]), model.request.cluster, model.machine(self.cell.mesh)
        program, then = step_programs(graph, model.deepened(self.plan(stored), graph))
        program, groups, _, times = timed(program, then, cluster, prices)
        held = partial(held_by, program, groups, cluster, prices.optimizer)
        return times.step / 1e9, lambda: float(held().peak_bytes)

    def plan(self, stored: Mapping[str, int], again: int = 0) -> Plan:
        """At full depth, with some tensors stored in another way and the first so many blocks recomputed."""
        base = self.deep[0]
        inputs, state, outputs = dict(base.inputs), dict(base.state), dict(base.outputs)
        for name, storage in stored.items():
            other, grad = self.deep[storage], f"grad:{name}"
            inputs[name] = other.inputs[name]
            state.pop(name, None)
            if name in other.state:
                state[name] = other.state[name]
            if grad in other.outputs:
                outputs[grad] = other.outputs[grad]
        recompute = self.model.patterns(range(again), self.style) if again else ()
        return replace(base, inputs=inputs, state=state, outputs=outputs, recompute=recompute)

    # --- the choice

    def best(self, best_s: float) -> Final | None:
        """The fastest mix that fits, simulated at full depth; nothing if none is faster than `best_s`."""
        request = self.model.request
        every, again = self.ways(), self._again()
        ways = [w for w in every if w.nbytes < 0]
        if not ways and not feasible(self.base, request):
            return None  # nothing but blocks to be recomputed, which the search does by itself
        off, found, tried = 0.0, None, set()
        for _ in range(STORAGE_MIXES):
            chosen = self.chosen(ways, again, request.room_bytes - self.base.peak_bytes - off)
            if chosen is None or chosen[0] in tried:
                break
            tried.add(chosen[0])
            stored, count, seconds, more = self._read(ways, chosen)
            if self.base.seconds + seconds > WORTH_SIMULATING * best_s:
                break
            stored = self.whole(stored, [w for w in every if w.nbytes >= 0])
            now = self.simulated(stored, count)
            if now.peak_bytes <= request.room_bytes and now.seconds < best_s:
                found, best_s = now, now.seconds
            off = now.peak_bytes - (self.base.peak_bytes + more)
        # Groups don't quite add up: what does one thing to all of them may be better than it looks.
        held = self.base.peak_bytes - self.held(self.params, 0)
        lean = [k for k in range(1, len(self.deep)) if held + self.held(self.params, k) <= request.room_bytes]
        if lean:
            alike = min((dict.fromkeys(self.params, k) for k in lean), key=lambda s: self._shallow(s)[0])
            now = self.simulated(alike, 0)
            if now.peak_bytes <= request.room_bytes and now.seconds < best_s:
                found = now
        return found

    def simulated(self, stored: Mapping[str, int], count: int) -> Final:
        """A mix at full depth, so many blocks recomputed."""
        model, request = self.model, self.model.request
        plan = replace(self.plan(stored, count), name="searched")
        ran = predict(model.graph, plan, request.cluster, optimizer=request.optimizer)
        cell = replace(self.cell, recompute=count > 0)
        score = Score(
            cell,
            replace(self.style, mixed_storage=True),
            self.base.zero,
            plan,
            ran.seconds,
            float(ran.memory.peak_bytes),
            again=(count,) if count else (),
            blocks=len(model.block_names) if count else 0,
        )
        return Final(score, plan, ran)

    def whole(self, stored: dict[str, int], ways: Sequence[Way]) -> dict[str, int]:
        """The same with small tensors whole, where that is faster beside all the rest."""
        best_s = self._shallow(stored)[0] if ways else 0.0
        for way in ways:
            names = [n for unit in self.groups[way.group].units for n in unit]
            now = {**stored, **dict.fromkeys(names, way.storage)}
            now_s = self._shallow(now)[0]
            if now_s < best_s:
                stored, best_s = now, now_s
        return stored

    def _again(self) -> tuple[int, float, float]:
        """Blocks that may be recomputed, and what one takes and holds more."""
        model, request = self.model, self.model.request
        if not (some(model) and request.recomputes):
            return 0, 0.0, 0.0
        cell, base = replace(self.cell, recompute=True), self.base
        scored(model, cell, self.style, base.zero, base.plan)
        every = model.shallow.get((cell, self.style, base.zero))
        if every is None or math.isnan(every.peak_bytes) or every.peak_bytes >= base.peak_bytes:
            return 0, 0.0, 0.0
        blocks = len(model.block_names)
        return blocks, (every.seconds - base.seconds) / blocks, (every.peak_bytes - base.peak_bytes) / blocks

    def chosen(
        self, ways: Sequence[Way], again: tuple[int, float, float], room: float
    ) -> tuple[tuple[int, ...], tuple[float, float]] | None:
        """How many units have each way, and how many blocks are recomputed; what that takes and holds more."""
        problem = Capped()
        held = problem.resource(room)
        counts: list[list[tuple[int, int]]] = []
        """By variable and value: which way, and for how many units; -1 stands for blocks recomputed."""

        def choice(rows: Sequence[tuple[int, int, float, float]]) -> None:
            v = problem.variable(len(rows))
            problem.add((v,), np.array([r[2] for r in rows]))
            problem.use(held, (v,), np.array([r[3] for r in rows]))
            counts.append([(r[0], r[1]) for r in rows])

        for k, group in enumerate(self.groups):
            mine = [(w, way) for w, way in enumerate(ways) if way.group == k]
            if mine:
                none = (mine[0][0], 0, 0.0, 0.0)
                choice(
                    [
                        none,
                        *((w, n, n * y.seconds, n * y.nbytes) for w, y in mine for n in range(1, len(group.units) + 1)),
                    ]
                )
        choice([(-1, n, n * again[1], n * again[2]) for n in range(again[0] + 1)])
        answer = problem.solve(STORAGE_SOLVE_S)
        if answer.values is None:
            return None
        out = [0] * (len(ways) + 1)
        for v, value in enumerate(answer.values):
            way, count = counts[v][value]
            out[way] += count
        return tuple(out), (answer.cost, answer.used[0])

    def _read(
        self, ways: Sequence[Way], chosen: tuple[tuple[int, ...], tuple[float, float]]
    ) -> tuple[dict[str, int], int, float, float]:
        """What that means: how tensors are stored, blocks recomputed, seconds and bytes more."""
        counts, (seconds, more) = chosen
        stored = {}
        for way, count in zip(ways, counts, strict=False):
            units = self.groups[way.group].units
            # Of later layers: their gradients are there first, when most is still kept.
            for unit in units[len(units) - count :]:
                stored.update(dict.fromkeys(unit, way.storage))
        return stored, counts[-1], seconds, more

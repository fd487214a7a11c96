"""Plans to hold against searches: those that somebody would write, and what comes of changing them a little.

A plan drawn at random exchanges nearly everything; it is ten times as slow to simulate as a sensible one, and far above
any bound. What comes near a bound are sensible plans in which a few things are otherwise. So there is a *brood* for
each kind of plan that a space has: one mesh, or stages on so many places and so many micro-batches, or parts of a
cluster that differ, or branches apart. It begins with presets, with what the search has found, and with placements of
least cost on that mesh; it keeps the fastest few, and makes the next from these:

    without stages   another plan's placements for one op, for all ops alike, for a stretch of the program, or for how
                     parameters and state are stored; parameters gathered once or twice; blocks recomputed
    with stages      another schedule, window or stash; a cut some ops further; other placements on one place or on
                     all; or cuts anyhow: as if ops took other times than they do

The other plan is a preset or one drawn at random, so every placement that the rules allow may come up. What is
simulated, and how it is judged, is the business of `tests/attack/judge.py`. Collects nothing itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from laminar.errors import LaminarError, PlanError
from laminar.ir.graph import Graph, Node
from laminar.ir.mesh import Mesh
from laminar.ir.plans.account import Account
from laminar.ir.plans.patterns import WITHOUT_PRODUCTS
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.placement import presets
from laminar.placement.micro_batch import micro
from laminar.placement.random_plan import random_plan
from laminar.planner.space.cell import divisors
from laminar.rewrite.variants import carrying, rewritten
from laminar.rules.notation import Call, calls_in
from laminar.rules.samples import samples_of
from laminar.staging.balance import balanced, cuttable, work_s
from laminar.staging.coupled_samples import refuse_coupled
from laminar.staging.stage_plans import arranged, pipeline

KEPT = 5
"""Plans of a brood that others are made from."""
RANDOM = 4
"""Plans drawn at random whose placements may be taken, of each brood at a time."""
SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "zero-bubble-level", "backward-first")


# --- plans with a name


def meshes(devices: int) -> list[Mesh]:
    """One axis of either name, and all products of two."""
    found = [Mesh({"dp": devices}), Mesh({"tp": devices})]
    return found + [Mesh({"dp": devices // n, "tp": n}) for n in divisors(devices) if 1 < n < devices]


def on_mesh(graph: Graph, mesh: Mesh) -> Iterator[Callable[[], Plan]]:
    """How to make every preset on one mesh."""
    if "tp" in mesh.names:
        yield lambda: presets.tensor_parallel(graph, mesh)
    if "dp" in mesh.names:
        yield lambda: presets.data_parallel(graph, mesh)
        for stage in (1, 2, 3):
            yield lambda stage=stage: presets.zero(graph, mesh, stage)  # type: ignore[misc]
        yield lambda: presets.zero(graph, mesh, 3, gather_once=True)


def typed(graph: Graph, devices: int) -> Iterator[Callable[[], Plan]]:
    """The same on every mesh."""
    for mesh in meshes(devices):
        yield from on_mesh(graph, mesh)


def piped(graph: Graph, devices: int) -> Iterator[Callable[[], Staged]]:
    """Pipelines of the default cut, with data and tensor parallel inside."""
    for stages in (s for s in divisors(devices) if s > 1):
        inner = devices // stages
        ways = [Mesh({"dp": inner})] + ([Mesh({"tp": inner})] if inner > 1 else [])
        for parts in (m for m in (stages, 2 * stages, 4 * stages) if samples_of(graph) % m == 0):
            for mesh in ways:
                yield lambda s=stages, m=parts, w=mesh: pipeline(part_of(graph, m), s, m, inner=w)  # type: ignore[misc]


_PARTS: dict[tuple[str, int], Graph] = {}
_PRESETS: dict[tuple[str, Mesh], list[Plan]] = {}


def part_of(graph: Graph, parts: int) -> Graph:
    """Of a micro-batch."""
    key = (graph.hash, parts)
    if key not in _PARTS:
        _PARTS[key] = micro(graph, parts)
    return _PARTS[key]


def forget() -> None:
    """What was made for other models takes room."""
    _PARTS.clear()
    _PRESETS.clear()


def presets_on(graph: Graph, mesh: Mesh) -> list[Plan]:
    """Every preset on one mesh that can be written, made once."""
    key = (graph.hash, mesh)
    if key not in _PRESETS:
        found = []
        for make in on_mesh(graph, mesh):
            with suppress(LaminarError):
                found.append(make())
        _PRESETS[key] = found
    return _PRESETS[key]


# --- broods

More = Callable[[Mesh], Sequence[Plan]]
"""Plans on a mesh to begin with, beside presets."""


def none(mesh: Mesh) -> Sequence[Plan]:
    """No others."""
    return ()


@dataclass(frozen=True)
class Candidate:
    """A plan to be simulated."""

    graph: Graph
    """What is simulated: of the batch or of a micro-batch, rewritten if the plan has rewrites."""
    bare: Plan | Staged
    """For that graph."""
    plan: Plan | Staged
    """The same, with its rewrites: what is judged."""


class Brood:
    """Plans of one kind: the fastest so far, and how to make others of them."""

    def __init__(self) -> None:
        self.kept: list[tuple[float, Any]] = []

    def next(self, rng: random.Random) -> tuple[Any, Candidate]:
        """Another one, and as what it would be kept; a plan that can't be written is refused by whoever makes it."""
        raise NotImplementedError

    def keep(self, seconds: float, one: Any) -> None:
        """A plan was simulated; of those that take equally long the last one stays."""
        others = [item for item in self.kept if item[0] != seconds]
        self.kept = sorted([*others, (seconds, one)], key=lambda item: item[0])[:KEPT]

    def one(self, rng: random.Random) -> Any:
        """To make the next of."""
        return rng.choice(self.kept)[1]


class Flat(Brood):
    """Plans of the batch at once on one mesh."""

    def __init__(
        self, graph: Graph, mesh: Mesh, blocks: str | None, more: More = none, first: Plan | None = None
    ) -> None:
        """Of presets and others; or of a plan that was found, whose graph may be rewritten."""
        super().__init__()
        self.captured, self.mesh = graph, mesh
        self.steps = first.rewrites if first is not None else ()
        self.graph = rewritten(graph, first) if first is not None else graph
        self.change = Change(self.graph, mesh, blocks, more if self.graph is graph else none)
        self.found = (
            [] if first is None else [replace(first, rewrites=(), captured_hash="", account=Account(), origin=None)]
        )

    @cached_property
    def waiting(self) -> list[Plan]:
        """To begin with."""
        return [*(self.change.presets or self.change.others(random.Random(0))), *self.found]

    def next(self, rng: random.Random) -> tuple[Plan, Candidate]:
        if self.waiting:
            plan = self.waiting.pop()
        elif not self.kept:
            plan = rng.choice(self.change.others(rng))
        else:
            plan = self.change(self.one(rng), rng)
        return plan, Candidate(self.graph, plan, carrying(plan, self.captured, self.steps))


class Change:
    """Small changes of plans for one graph on one mesh."""

    def __init__(self, graph: Graph, mesh: Mesh, blocks: str | None, more: More) -> None:
        self.graph, self.mesh, self.blocks, self.more = graph, mesh, blocks, more
        self.drawn: list[Plan] = []
        self.used = 0

    @cached_property
    def presets(self) -> list[Plan]:
        """Those that can be written, and what somebody adds to them."""
        return [*presets_on(self.graph, self.mesh), *self.more(self.mesh)]

    @cached_property
    def alike(self) -> dict[Call, list[str]]:
        """Ops that do the same, in all layers."""
        found: dict[Call, list[str]] = {}
        for name, call in calls_in(self.graph).items():
            found.setdefault(call, []).append(name)
        return found

    def others(self, rng: random.Random) -> list[Plan]:
        """Plans drawn at random, a fresh one now and then."""
        self.used += 1
        if len(self.drawn) < RANDOM or self.used % 64 == 0:
            fresh = random_plan(self.graph, self.mesh, rng.randrange(1 << 30))
            self.drawn = [fresh, *self.drawn][:RANDOM]
        return self.drawn

    def __call__(self, plan: Plan, rng: random.Random) -> Plan:
        """The plan with one thing changed, or two."""
        for _ in range(rng.choice((1, 1, 2))):
            plan = self.once(plan, rng)
        return replace(plan, name=f"changed {plan.mesh}")

    def once(self, plan: Plan, rng: random.Random) -> Plan:
        """One thing as another plan has it; what was drawn at random is taken in small doses."""
        chance, sober = rng.random(), bool(self.presets) and rng.random() < 0.5
        other = rng.choice(self.presets if sober else self.others(rng))
        if chance < 0.65:
            names = self.some(rng, len(self.graph.nodes) if sober else 3)
            return replace(plan, ops={**plan.ops, **{n: other.ops[n] for n in names}})
        if chance < 0.9:
            return self.stored(plan, other, rng)
        if chance < 0.96 or not self.blocks:
            return replace(plan, gather_once=not plan.gather_once)
        again = () if plan.recompute else (self.blocks + rng.choice(("", WITHOUT_PRODUCTS)),)
        return replace(plan, recompute=again)

    def some(self, rng: random.Random, longest: int) -> Sequence[str]:
        """One op, all that do the same, or a stretch of the program."""
        nodes = self.graph.nodes
        k, chance = rng.randrange(len(nodes)), rng.random()
        if chance < 0.4:
            return [nodes[k].name]
        if chance < 0.7:
            return self.alike[calls_in(self.graph)[nodes[k].name]]
        return [n.name for n in nodes[k : k + min(longest, rng.choice((2, 3, 5, 8, len(nodes))))]]

    def stored(self, plan: Plan, other: Plan, rng: random.Random) -> Plan:
        """Some inputs, their state and what becomes of their gradients."""
        names = [i.name for i in self.graph.inputs]
        names = rng.sample(names, rng.choice((1, 1, 2, max(1, len(names) // 2), len(names))) % (len(names) + 1) or 1)
        parts = ("inputs", "state", "grad") if rng.random() < 0.5 else (rng.choice(("inputs", "state", "grad")),)
        inputs, state, outputs = dict(plan.inputs), dict(plan.state), dict(plan.outputs)
        for name in names:
            if "inputs" in parts:
                inputs[name] = other.inputs[name]
                if f"buffer:{name}" in outputs:
                    outputs[f"buffer:{name}"] = other.inputs[name]
            if "state" in parts and f"grad:{name}" in outputs:
                state.pop(name, None)
                state |= {name: other.state[name]} if name in other.state else {}
            if "grad" in parts and f"grad:{name}" in outputs:
                outputs[f"grad:{name}"] = other.outputs[f"grad:{name}"]
        return replace(plan, inputs=inputs, state=state, outputs=outputs)


# --- with stages


@dataclass(frozen=True)
class Draft:
    """A plan with stages and what it was made of: ops by stage, stages by place, the whole graph's plan by place."""

    of: Mapping[str, int]
    plans: tuple[Plan, ...]
    laid: Staged
    order: Mapping[str, Any]

    @property
    def staged(self) -> Staged:
        """Under its schedule."""
        return replace(self.laid, **self.order)


class Pipes(Brood):
    """Plans with stages on places of given meshes."""

    def __init__(
        self,
        graph: Graph,
        micro_batches: int,
        at: Sequence[int],
        places: Sequence[Mesh],
        blocks: str | None,
        more: More = none,
        of: Mapping[str, int] | None = None,
    ) -> None:
        """`at` has the place of each stage; `of` the stage of each op, where that is not free."""
        super().__init__()
        self.part, self.micro_batches = part_of(graph, micro_batches), micro_batches
        self.at, self.places, self.fixed = tuple(at), tuple(places), of
        self.virtual = len(self.at) > len(self.places) and of is None
        self.change = {mesh: Change(self.part, mesh, blocks, more) for mesh in dict.fromkeys(places)}
        if micro_batches > 1:
            refuse_coupled(self.part)

    @cached_property
    def work(self) -> dict[str, float]:
        """Seconds of each op, assumed."""
        return work_s(self.part)

    @cached_property
    def ops(self) -> list[Node]:
        """Those that belong to one stage."""
        return cuttable(self.part)[0]

    def next(self, rng: random.Random) -> tuple[Draft, Candidate]:
        chance = rng.random()
        if not self.kept or chance < 0.1:
            draft = self.begun(rng)
        elif chance < 0.55:
            draft = replace(self.one(rng), order=ordered(self.virtual, rng))
        elif chance < 0.8 and self.fixed is None and len(self.at) > 1:
            draft = self.recut(self.one(rng), rng)
        else:
            draft = self.replaced(self.one(rng), rng)
        staged = draft.staged
        return draft, Candidate(self.part, staged, staged)

    def laid(self, of: Mapping[str, int], plans: tuple[Plan, ...], order: Mapping[str, Any]) -> Draft:
        """Ops at stages, placed."""
        staged = arranged(self.part, of, self.at, plans, self.micro_batches)
        return Draft(of, plans, replace(staged, name=f"cut anyhow, {len(self.at)} stages"), order)

    def begun(self, rng: random.Random) -> Draft:
        """Cut anyhow, a preset on every place."""
        at = {mesh: rng.choice(change.presets or change.others(rng)) for mesh, change in self.change.items()}
        return self.laid(
            self.fixed or self.cut(rng), tuple(at[mesh] for mesh in self.places), ordered(self.virtual, rng)
        )

    def cut(self, rng: random.Random) -> dict[str, int]:
        """As if ops took other times than they do, evenly distorted or at random; now and then as it should be."""
        count = len(self.places)
        lean, noise = rng.choice((1.0, 0.9, 0.75, 0.6, 1.2)), rng.choice((0.0, 0.0, 0.5, 2.0))
        if lean == 1.0 and not noise:
            return balanced(self.part, len(self.at))
        work = {name: s * math.exp(noise * rng.gauss(0, 1)) for name, s in self.work.items()}
        told = [{name: s * lean ** (count - 1 - p) for name, s in work.items()} for p in range(count)]
        return balanced(self.part, len(self.at), told)

    def recut(self, draft: Draft, rng: random.Random) -> Draft:
        """One cut some ops further."""
        names = [n.name for n in self.ops]
        cuts = [k for k in range(1, len(names)) if draft.of[names[k]] != draft.of[names[k - 1]]]
        k, by = rng.choice(cuts), rng.choice((-3, -2, -1, 1, 2, 3))
        over = names[k : k + by] if by > 0 else names[max(0, k + by) : k]
        of = {**draft.of, **dict.fromkeys(over, draft.of[names[k - (by > 0)]])}
        if set(of.values()) != set(range(len(self.at))):
            raise PlanError("a stage is left without ops")
        return self.laid(of, draft.plans, draft.order)

    def replaced(self, draft: Draft, rng: random.Random) -> Draft:
        """Other placements: of one place, or of all that have its mesh."""
        p = rng.randrange(len(self.places))
        change, was = self.change[self.places[p]], draft.plans[p]
        plan = change(was, rng) if rng.random() < 0.7 or not change.presets else rng.choice(change.presets)
        everywhere = rng.random() < 0.5
        plans = [plan if k == p or (everywhere and one is was) else one for k, one in enumerate(draft.plans)]
        return self.laid(draft.of, tuple(plans), draft.order)


class Orders(Brood):
    """A plan with stages that was found, under other schedules."""

    def __init__(self, graph: Graph, found: Staged) -> None:
        super().__init__()
        self.graph, self.found = rewritten(part_of(graph, found.micro_batches), found), found
        self.first = True

    def next(self, rng: random.Random) -> tuple[Staged, Candidate]:
        plan = replace(self.found, account=Account(), origin=None)
        if not self.first:
            plan = replace(plan, **ordered(len(plan.stages) > len(plan.places), rng))
        self.first = False
        return plan, Candidate(self.graph, replace(plan, rewrites=(), captured_hash=""), plan)


def ordered(virtual: bool, rng: random.Random) -> dict[str, Any]:
    """Schedule, window, stash, and whether backward is in two parts."""
    if virtual:
        return {"schedule": "interleaved", "window": rng.choice((0, 0, 1, None)), "stash": rng.choice((1.0, 2.0))}
    schedule = rng.choice(SCHEDULES)
    window = None if schedule == "backward-first" else rng.choice((0, 0, 1, 2, None))
    apart = schedule.startswith("zero-bubble") or rng.random() < 0.2
    return {"schedule": schedule, "window": window, "stash": rng.choice((1.0, 1.0, 1.5, 2.0, 4.0)), "apart": apart}

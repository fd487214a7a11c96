"""Why a tensor lies as it does: every other placement it could have, with the seconds and bytes of that step.

One axis at a time, the tensor is pinned to another placement and the step is simulated again. What becomes of the rest
is tried in several ways, the fastest counts, and the row says which it was: ops stay as they are and the tensor is
moved for them; ops are placed anew, while other tensors and the residual stream lie as they do; and, for a plan that
was searched for, everything is placed anew around the pin. Layers that are alike change together. A deep model is
simulated at two depths and continued to its own, a plan with stages at full depth; where some of its blocks are made
again, between none and all in proportion. The plan's own row is simulated in the same way, so that rows compare.

What can't be is in the table too, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from laminar.errors import LaminarError, PlanError
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import machine, predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph, Node
from laminar.ir.plans.account import Account, SearchOptions
from laminar.ir.plans.patterns import known_patterns, pick
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.planned import Planned
from laminar.ir.plans.staged import Staged, StagePlan
from laminar.ir.sbp import B, NdSbp, Partial, Sbp, Split, check_placement, local_spec, show
from laminar.ir.serial.codec import Ref
from laminar.lower.stages.split_stages import split_graph
from laminar.placement import presets
from laminar.placement.complete import Pins, completed
from laminar.placement.fold import fold
from laminar.planner.report.classify import placed_graph, recomputed_blocks, unpieced, used, zero_of
from laminar.planner.report.graph_of_plan import cluster_for, graph_for
from laminar.planner.report.words import sized
from laminar.planner.space.axis_prices import PricedAxis
from laminar.planner.space.pins import alike, closest_names
from laminar.rules.notation import call_of
from laminar.rules.signing import blocks_in, options, probed_signatures
from laminar.staging.stage_plans import stage_plan

ALTERNATIVE_LAYERS = 3
"""Layers on which alternatives are placed."""
DEPTHS = (4, 6)
"""Depths that are simulated where a model is deeper."""
HIDDEN = 0.9
"""Share of the gradients' reduction that other work is taken to hide while alternatives are placed."""
PATTERNS = 8
"""Signatures that are shown of the op that reads a tensor."""


@dataclass(frozen=True)
class Alternative:
    """A placement that a tensor could have."""

    placement: str
    step_s: float = float("nan")
    peak_bytes: int = 0
    rest: str = ""
    """How the rest was placed."""
    reason: str = ""
    """Why it can't be."""


@dataclass(frozen=True)
class Why:
    """The placement of a tensor, and the alternatives."""

    name: str
    spec: str
    chosen: Alternative
    options: tuple[Alternative, ...]
    """Others, fastest first; those that can't be come last."""
    used: str
    """How ops read it."""
    grad: str
    state: str
    bytes: int
    """On one rank."""
    alike: int
    """Tensors that were changed together with it."""
    patterns: tuple[str, ...] = ()
    """What the op that reads it allows on each axis."""
    read_by: str = ""

    def __str__(self) -> str:
        with_it = f", as {self.alike - 1} like it" if self.alike > 1 else ""
        out = [f"{self.name} {self.spec} lies {self.chosen.placement}{with_it}: {self.bytes:,} bytes on a rank"]
        trained = f", its gradient lies {self.grad}, its state {self.state}" if self.grad else ""
        out.append(f"  read as {self.used}{trained}")
        width = max(len(o.placement) for o in (self.chosen, *self.options))
        for o in (self.chosen, *self.options):
            mark = "*" if o is self.chosen else " "
            if o.reason:
                out.append(f"{mark} {o.placement:<{width}}  not possible: {o.reason}")
                continue
            more = o.step_s - self.chosen.step_s
            apart = "this plan" if o is self.chosen else f"{more * 1e3:+.3f} ms ({more / self.chosen.step_s:+.1%})"
            rest = f", {o.rest}" if o.rest else ""
            out.append(
                f"{mark} {o.placement:<{width}}  {o.step_s * 1e3:10.3f} ms  {sized(o.peak_bytes):>9}  {apart}{rest}"
            )
        if self.patterns:
            out.append(f"  {self.read_by} allows: {'   '.join(self.patterns)}")
        return "\n".join(out)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "spec": self.spec,
            "used": self.used,
            "grad": self.grad,
            "state": self.state,
            "bytes": self.bytes,
            "alike": self.alike,
            "read_by": self.read_by,
            "patterns": list(self.patterns),
            "chosen": _row(self.chosen),
            "options": [_row(o) for o in self.options],
        }


def _row(option: Alternative) -> dict[str, Any]:
    row = {"placement": option.placement}
    if option.reason:
        return {**row, "reason": option.reason}
    return {**row, "step_s": option.step_s, "peak_bytes": option.peak_bytes, "rest": option.rest}


def why(plan: Planned, name: str, *, graph: Graph | None = None, cluster: Cluster | str | None = None) -> Why:
    """Why a parameter, buffer or leaf of the batch lies as it does; or a value, as programs name it, `%gelu_3`."""
    return _Asking(plan, name, graph_for(plan, graph), cluster_for(plan, cluster)).answer()


class _Asking:
    def __init__(self, plan: Planned, name: str, graph: Graph, cluster: Cluster) -> None:
        self.plan, self.cluster = plan, cluster
        self.graph, self.whole = placed_graph(plan, graph)
        self.name = _known(self.graph, name)
        self.value = Ref(self.name[1:]) if self.name.startswith("%") else None
        self.mesh = self.whole.mesh
        self.optimizer = (plan.account.options or SearchOptions()).optimizer
        self.layers = fold(self.graph)
        self.small = self.layers.small(ALTERNATIVE_LAYERS)
        if self.value is None:
            here = {i.name for i in self.small.inputs}
            self.alike = alike(self.layers).get(self.name, {self.name})
        else:
            here, self.alike = set(self.small.by_name), self._twins(self.value.name)
        self.members = sorted(self.alike & here)
        self.spec = self.graph.specs[self.value or Ref(self.name)]
        self.base = _restricted(self.whole, self.small)
        self.zero, self.axes = zero_of(self.small, self.base)
        self.bare = unpieced(self.small, self.base)
        prices = machine(cluster, self.mesh, self.optimizer)
        self.costs = [PricedAxis(prices, self.mesh, a, HIDDEN) for a in range(len(self.mesh.sizes))]

    def _twins(self, op: str) -> set[str]:
        """The same op in all layers."""
        place = self.layers.at.get(op)
        if place is None:
            return {op}
        return {self.layers.ops[k, place[1], place[2]].name for k in range(self.layers.layers)}

    def answer(self) -> Why:
        lies = self.whole.ops[self.value.name].outs[0] if self.value else self.whole.inputs[self.name]
        chosen = self.scored(self.base, show(lies), "")
        found: dict[NdSbp, Alternative] = {}
        for nd in self.others(lies):
            one = self.tried(nd)
            # Blocks that make no difference are not told.
            if not any(
                one.step_s == o.step_s and one.peak_bytes == o.peak_bytes and dims(nd) == dims(k)
                for k, o in found.items()
            ):
                found[nd] = one
        node, patterns = self.reader()
        trained = f"grad:{self.name}" in self.whole.outputs
        return Why(
            name=self.name,
            spec=str(self.spec),
            chosen=chosen,
            options=tuple(sorted(found.values(), key=lambda o: (bool(o.reason), o.step_s))),
            used=self._read() if self.value else show(used(self.graph, self.whole)[self.name]),
            grad=show(self.whole.outputs[f"grad:{self.name}"]) if trained else "",
            state=show(self.whole.state.get(self.name, lies)) if trained else "",
            bytes=local_spec(self.spec, lies, self.mesh.sizes).nbytes,
            alike=len(self.alike),
            patterns=patterns,
            read_by=f"{node.op} in {node.module or 'the model'}" if node else "",
        )

    def _read(self) -> str:
        """How ops read a value."""
        assert self.value is not None
        found: dict[str, None] = {}
        for node in self.graph.users.get(self.value, ()):
            pairs = zip(node.ins, self.whole.ops[node.name].ins, strict=True)
            found |= dict.fromkeys(show(nd) for ref, nd in pairs if ref == self.value)
        return ", ".join(found) or "nothing"

    # --- alternatives

    def others(self, lies: NdSbp) -> Iterator[NdSbp]:
        """Every placement that differs on one axis: whole, each dim, and the blocks that some op can read or make."""
        ref = self.value or Ref(self.name)
        blocks, probed = blocks_in(self.small), probed_signatures(self.small)
        for axis, parts in enumerate(self.mesh.sizes):
            if parts == 1:
                continue
            ways: dict[Sbp, None] = dict.fromkeys([B, *map(Split, range(len(self.spec.shape)))])
            for node in (n for n in self.graph.nodes if ref in n.ins or ref.name == n.name):
                for s in options(call_of(node, self.graph.specs), parts, blocks, probed.get(node.name, ())):
                    found = [p for r, p in zip(node.ins, s.ins, strict=True) if r == ref]
                    found += [s.outs[ref.index]] if node.name == ref.name else []
                    ways |= dict.fromkeys(p for p in found if not isinstance(p, Partial))
            for way in ways:
                if way != lies[axis]:
                    yield (*lies[:axis], way, *lies[axis + 1 :])

    def tried(self, nd: NdSbp) -> Alternative:
        """One of them, with the best of the ways to place the rest."""
        reason, best = "", None
        for rest, make in self.ways(nd).items():
            try:
                check_placement(self.spec, nd, self.mesh.sizes, self.name)
                found = self.scored(make(), show(nd), rest)
            except LaminarError as error:
                reason = reason or error.what
                continue
            if best is None or found.step_s < best.step_s:
                best = found
        return best or Alternative(show(nd), reason=reason)

    def ways(self, nd: NdSbp) -> dict[str, Callable[[], Plan]]:
        """What may become of the rest; a value is made by its op, so that ops can't stay as they are."""
        moved = dict.fromkeys(self.members, nd) if self.value is None else {}
        values = {Ref(name): nd for name in self.members} if self.value else {}
        batch = {i.name: self.bare.inputs[i.name] for i in self.small.inputs if i.kind != "param"}
        out: dict[str, Callable[[], Plan]] = {}
        if self.value is None:
            out["ops as they are"] = lambda: self._stored(self.base, moved)
        stream = {**self._stream(), **values}
        out["ops placed anew"] = lambda: self._completed({**self.bare.inputs, **moved}, stream)
        if self.plan.account.certificate is not None:
            out["everything placed anew"] = lambda: self._completed({**batch, **moved}, values)
        return out

    def _stored(self, plan: Plan, moved: Mapping[str, NdSbp]) -> Plan:
        """The same ops, tensors stored otherwise; where a tensor's state lay as itself, it still does."""
        outputs = {k: moved.get(k.removeprefix("grad:"), v) for k, v in plan.outputs.items()}
        return replace(plan, inputs={**plan.inputs, **moved}, outputs=outputs)

    def _completed(self, given: Mapping[str, NdSbp], stream: Mapping[Ref, NdSbp]) -> Plan:
        """Ops placed at least cost around what is given, in the plan's stage of ZeRO."""
        pins = [
            Pins(
                inputs={k: nd[a] for k, nd in given.items()},
                values={r: nd[a] for r, nd in stream.items()},
                read={r: nd[a] for r, nd in stream.items()},
            )
            for a in range(len(self.mesh.sizes))
        ]
        made = completed(self.small, self.mesh, pins, self.base.name, self.costs)
        pieces = presets.in_pieces(self.small, made, self.zero, self.axes) if self.zero else made
        inputs = {**pieces.inputs, **({} if self.value else {name: given[name] for name in self.members})}
        base = self.base
        return replace(
            pieces, inputs=inputs, recompute=base.recompute, offload=base.offload, gather_once=base.gather_once
        )

    def _stream(self) -> dict[Ref, NdSbp]:
        """The residual stream as it lies, where no sum is left to make."""
        out = {}
        for ref in presets.residual_stream(self.small):
            if ref.name in self.base.ops:
                nd = self.base.ops[ref.name].outs[ref.index]
                if not any(isinstance(p, Partial) for p in nd):
                    out[ref] = nd
        return out

    # --- what a step takes

    def scored(self, plan: Plan, placement: str, rest: str) -> Alternative:
        """Seconds and bytes of a placement of the shallow graph, at the model's own depth."""
        if isinstance(self.plan, Staged):
            return self._staged(self.plan, plan, placement, rest)
        depths = DEPTHS if self.layers.layers > DEPTHS[-1] else (max(1, self.layers.layers),)
        more = (self.layers.layers - depths[-1]) / (depths[-1] - depths[0]) if len(depths) > 1 else 0.0
        step_s = peak = 0.0
        for share, patterns in self.shares if len(depths) > 1 else [(1.0, self.whole.recompute)]:
            at: list[tuple[float, float]] = []
            for depth in depths:
                graph = self.layers.small(depth) if self.layers.layers else self.graph
                deep = _fitted(replace(self.layers.unfold(plan, ALTERNATIVE_LAYERS, graph), recompute=patterns), graph)
                ran = predict(graph, deep, self.cluster, optimizer=self.optimizer)
                at.append((ran.seconds, float(ran.memory.peak_bytes)))
            low, high = at[0], at[-1]
            step_s += share * (high[0] + more * (high[0] - low[0]))
            peak += share * (high[1] + more * (high[1] - low[1]))
        return Alternative(placement, step_s, round(peak), rest)

    @cached_property
    def shares(self) -> list[tuple[float, tuple[str, ...]]]:
        """What is recomputed: where that is some blocks of many, shares of none and of all stand for it."""
        patterns = self.whole.recompute
        made, blocks = recomputed_blocks(self.graph, self.whole)[0]
        picked = pick(self.graph, patterns)
        family = {b.rpartition(".")[0] for b in blocks}
        if len(made) in (0, len(blocks)) or len(family) > 1 or picked.values or len(picked.blocks) != len(made):
            return [(1.0, patterns)]
        every = ".".join([*filter(None, family), "*"]) + picked.marks(made[0])
        share = len(made) / len(blocks)
        return [(1 - share, ()), (share, (every,))]

    def _staged(self, staged: Staged, plan: Plan, placement: str, rest: str) -> Alternative:
        deep = _fitted(self.layers.unfold(plan, ALTERNATIVE_LAYERS, self.graph), self.graph)
        cut = split_graph(self.graph, staged.of, len(staged.stages))
        own = tuple(
            StagePlan(
                stage.place,
                replace(stage_plan(self.graph, cut, s, [deep] * len(staged.stages)), recompute=stage.plan.recompute),
            )
            for s, stage in enumerate(staged.stages)
        )
        made = replace(staged, graph_hash=self.graph.hash, stages=own, rewrites=(), captured_hash="")
        ran = predict_staged(self.graph, made, self.cluster, optimizer=self.optimizer)
        return Alternative(placement, ran.seconds, max(ran.peaks), rest)

    # --- what is allowed

    def reader(self) -> tuple[Node | None, tuple[str, ...]]:
        """The op that makes use of the tensor, and what its rule allows on each axis; what is chosen is marked."""
        refs = {self.value or Ref(self.name)}
        node = None
        for node in self.graph.nodes:
            if node.phase == "forward" and any(r in refs for r in node.ins):
                if len(node.ins) > 1:
                    break
                refs |= {Ref(node.name, i) for i in range(len(node.outs))}
        if node is None or not any(r in refs for r in node.ins):
            return None, ()
        choice, call = self.whole.ops[node.name], call_of(node, self.graph.specs)
        found: dict[str, None] = {}
        for axis, parts in enumerate(self.mesh.sizes):
            if parts == 1:
                continue
            for s in options(call, parts, (), probed_signatures(self.graph).get(node.name, ())):
                mine = tuple(nd[axis] for nd in choice.ins) == s.ins
                if len(found) < PATTERNS or mine:
                    found[f"[{s} on {self.mesh.names[axis]}]" if mine else str(s)] = None
        return node, tuple(found)


def dims(nd: NdSbp) -> tuple[object, ...]:
    """A placement without its blocks."""
    return tuple(p.dim if isinstance(p, Split) else p for p in nd)


def _known(graph: Graph, name: str) -> str:
    """The input of that name, or the value; near misses are suggested."""
    names = {n: i.name for i in graph.inputs for n in (i.name, *i.aliases)}
    if name.startswith("%"):
        names = {f"%{n.name}": f"%{n.name}" for n in graph.nodes if n.phase == "forward" and n.outs[0] is not None}
    if name not in names:
        raise PlanError(
            f"the model has no {'value' if name.startswith('%') else 'tensor'} {name!r}",
            closest=", ".join(closest_names(name, names)),
            next="`laminar capture --report` lists all names, `laminar plan --program` all values",
        )
    return names[name]


def _fitted(plan: Plan, graph: Graph) -> Plan:
    """A plan for a graph that has some of its layers."""
    again, away = known_patterns(graph, plan.recompute), known_patterns(graph, plan.offload)
    return replace(plan, graph_hash=graph.hash, recompute=again, offload=away)


def _restricted(plan: Plan, graph: Graph) -> Plan:
    """A plan of the deep graph for the shallow one."""
    wanted = {f"{o.kind}:{o.name}" for o in graph.outputs}
    names = {i.name for i in graph.inputs}
    return replace(
        plan,
        graph_hash=graph.hash,
        ops={n.name: plan.ops[n.name] for n in graph.nodes},
        inputs={k: v for k, v in plan.inputs.items() if k in names},
        outputs={k: v for k, v in plan.outputs.items() if k in wanted},
        state={k: v for k, v in plan.state.items() if k in names},
        account=Account(),
        rewrites=(),
        captured_hash="",
        origin=None,
    )

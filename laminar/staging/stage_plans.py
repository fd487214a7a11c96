"""Pipelines: a graph cut into stages of equal work, each stage spread over its own ranks.

Forward ops stand in the order of the program; a chain of stages is a choice of cuts. The cost of a stage is the work
of its ops, forward and backward (what it sends travels while it works); `balanced` finds the cuts whose slowest stage
is fastest, exactly, and among those that are nearly as good the ones that send least.

Inside a stage any plan for the whole graph serves: `inner` spreads the graph over one place's mesh, and each stage
keeps what concerns its own ops. A value that passes between stages lies as its maker leaves it, or, where that is
a sum still to be made, as its reader wants it.

Samples of one batch go through the pipe in parts. An op that couples samples (batch statistics, a softmax over the
batch) would compute something else then: such ops are found by splitting the batch over ranks and looking at what
has to be exchanged, and are refused by name unless the caller wants them to see one micro-batch at a time. So are ops
in backward that depend on the size of the loss: a hook that clamps gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from laminar.cost.ops.roofline import op_s
from laminar.errors import PlanError
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh, Place
from laminar.ir.plans.account import Account, StageWork
from laminar.ir.plans.patterns import as_patterns, known_patterns
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged, StagePlan
from laminar.ir.sbp import B, NdSbp, Partial
from laminar.ir.serial.codec import Ref
from laminar.lower.memory.offload import refuse_stages
from laminar.lower.stages.split_stages import StageSplit, light_ops, split_graph
from laminar.placement import presets
from laminar.rules.notation import calls_in
from laminar.staging.balance import _work, balanced, work_s
from laminar.staging.coupled_samples import refuse_coupled

InnerPlan = Mesh | Plan | Callable[[Graph], Plan] | None


def _inner_plans(graph: Graph, inner: InnerPlan | Sequence[InnerPlan], places: int) -> list[Plan]:
    """By place, the plan inside of it; what is given once for several is made once."""
    inners: list[Any] = list(inner) if isinstance(inner, Sequence) else [inner] * places
    if len(inners) != places:
        raise PlanError(f"{len(inners)} inner plans for {places} places")
    found: dict[int, Plan] = {}
    for one in inners:
        if id(one) not in found:
            found[id(one)] = inner_plan(graph, one)
    return [found[id(one)] for one in inners]


def pipeline(
    graph: Graph,
    stages: int | Sequence[str] | Mapping[str, int] = 2,
    microbatches: int = 4,
    virtual: int = 1,
    inner: InnerPlan | Sequence[InnerPlan] = None,
    schedule: str | None = None,
    window: int | None = 0,
    apart: bool | None = None,
    stash: float = 1.0,
    couple: str | None = None,
    registers: Mapping[str, int] | None = None,
    recompute: str | Sequence[str] = (),
    offload: str | Sequence[str] = (),
    speeds: Sequence[float | Mapping[str, float]] | None = None,
    by_place: bool = False,
) -> Staged:
    """A pipeline over the stages' ranks, one place after the other; `graph` is that of one micro-batch.

    `stages`: how many places, cut where work is balanced; or the modules at which later stages begin, in order
    (patterns); or for patterns of modules their stage, which may form any DAG. `virtual` stages per place take turns.
    `inner` spreads each stage: a mesh (data parallel, or tensor parallel if it has a `tp` axis), a plan for
    the whole graph, or a function that makes one; or one of these for each place. `schedule` is 1f1b, or interleaved
    with virtual stages; `window` is how far a place may leave the order, `stash` how many times as many micro-batches
    as the schedule needs may be under way. `couple="microbatch"` lets ops that couple samples see one micro-batch at
    a time. `recompute` names modules and values that backward recomputes, besides those that inner plans name.
    `offload` is refused: what stages keep stays on the device. `speeds` says for each place how fast it is beside the
    others, or what each forward op with its backward takes there, in seconds: a faster place gets more of the work.
    `by_place` evens out what places take with all their virtual stages, not what stages do (`balance_places.py`).
    """
    if couple not in (None, "microbatch"):
        raise PlanError(f"couple={couple!r}", allowed='None  "microbatch"')
    if virtual < 1:
        raise PlanError(f"virtual={virtual}", allowed="a whole number of at least 1")
    if couple is None and microbatches > 1:
        refuse_coupled(graph)
    schedule = schedule or ("interleaved" if virtual > 1 else "1f1b")
    of, count = _assigned(graph, stages, virtual, speeds, microbatches if by_place else 0)
    places = count // virtual
    plans = _inner_plans(graph, inner, places)
    for plan in plans:
        refuse_stages(replace(plan, offload=(*plan.offload, *as_patterns(offload))))
    if recompute:
        plans = [presets.recomputing(graph, p, (*p.recompute, *as_patterns(recompute))) for p in plans]
    made = arranged(graph, of, [s % places for s in range(count)], plans, microbatches)
    return replace(
        made,
        schedule=schedule,
        window=window,
        apart=schedule == "zero-bubble" if apart is None else apart,
        stash=stash,
        registers=dict(registers or {}),
        coupled=couple is not None,
        name=f"pipeline({count})",
    )


def arranged(
    graph: Graph,
    of: Mapping[str, int],
    at: Sequence[int],
    plans: Sequence[Plan],
    microbatches: int,
    terms: bool = False,
) -> Staged:
    """Stages at places: `of` has the stage of each forward op, `at` the place of each stage, `plans` one per place.

    Places lie one after the other. Stages may form any DAG whose edges lead to higher numbers. `terms`: see `passing`.
    """
    cut = split_graph(graph, of, len(at))
    sets, first = [], 0
    for plan in plans:
        sets.append(Place(tuple(range(first, first + plan.mesh.ranks)), plan.mesh))
        first += plan.mesh.ranks
    each = [plans[p] for p in at]
    return Staged(
        graph_hash=graph.hash,
        places=tuple(sets),
        stages=tuple(StagePlan(p, stage_plan(graph, cut, s, each, terms)) for s, p in enumerate(at)),
        of={n: s for n, s in cut.of.items() if graph.by_name[n].phase == "forward"},
        micro_batches=microbatches,
        account=_account(graph, cut),
    )


def inner_plan(graph: Graph, inner: InnerPlan) -> Plan:
    """The plan of the whole graph on the mesh of one place."""
    if inner is None:
        return presets.data_parallel(graph, Mesh({"dp": 1}))
    if isinstance(inner, Mesh):
        return (presets.tensor_parallel if "tp" in inner.names else presets.data_parallel)(graph, inner)
    if isinstance(inner, Plan):
        inner.fits(graph)
        return inner
    return inner(graph)


def _assigned(
    graph: Graph, stages: Any, virtual: int, speeds: Any = None, microbatches: int = 0
) -> tuple[dict[str, int], int]:
    """The stage of each forward op, and how many there are."""
    if isinstance(stages, int):
        if stages < 1:
            raise PlanError(f"a pipeline of {stages} stages", allowed="at least 1")
        work = _work(graph, speeds, stages) if speeds else [work_s(graph)] * stages if microbatches else None
        return balanced(graph, stages * virtual, work, microbatches), stages * virtual
    if speeds is not None:
        raise PlanError("speeds with stages that are named", next="say how many stages there are, or leave out speeds")
    if microbatches:
        raise PlanError("by_place with stages that are named", next="say how many stages there are")
    if isinstance(stages, Mapping):
        return _by_pattern(graph, stages), (1 + max(stages.values())) * 1
    return _beginning_at(graph, list(stages)), len(stages) + 1


def _beginning_at(graph: Graph, patterns: list[str]) -> dict[str, int]:
    """Later stages begin at the first op of the modules named."""
    out, stage = {}, 0
    for node in graph.nodes:
        if node.phase == "forward":
            if stage < len(patterns) and re.match(patterns[stage], node.module):
                stage += 1
            out[node.name] = stage
    if stage < len(patterns):
        raise PlanError(f"no module after stage {stage}'s matches {patterns[stage]!r}", allowed=_modules(graph))
    return out


def _by_pattern(graph: Graph, patterns: Mapping[str, int]) -> dict[str, int]:
    """Ops of modules named go where they are told; others to the latest stage that they read from, or read them."""
    used: set[str] = set()
    out: dict[str, int] = {}
    ops = [n for n in graph.nodes if n.phase == "forward"]
    for node in ops:
        for pattern, stage in patterns.items():
            if re.match(pattern, node.module):
                out[node.name] = stage
                used.add(pattern)
                break
    for pattern in patterns:
        if pattern not in used:
            raise PlanError(f"no module matches {pattern!r}", allowed=_modules(graph))
    for node in ops:
        if node.name not in out:
            before = [out[r.name] for r in node.ins if r.name in out]
            if before:
                out[node.name] = max(before)
    for node in reversed(ops):
        after = [
            out[u.name] for i in range(len(node.outs)) for u in graph.users.get(Ref(node.name, i), ()) if u.name in out
        ]
        out.setdefault(node.name, min(after, default=0))
    return out


def _modules(graph: Graph) -> str:
    names = dict.fromkeys(n.module for n in graph.nodes if n.phase == "forward" and n.module)
    return ", ".join(list(names)[:12]) + (", ..." if len(names) > 12 else "")


# --- balance


def _account(graph: Graph, cut: StageSplit) -> Account:
    """What `explain` tells about the stages."""
    seconds = {name: op_s(call) for name, call in calls_in(graph).items()}
    whole = sum(seconds.values()) or 1.0
    rows = []
    for s, own in enumerate(cut.graphs):
        modules = list(dict.fromkeys(n.module for n in own.nodes if n.phase == "forward" and n.module))
        rows.append(
            StageWork(
                share=sum(seconds.get(n.name, 0.0) for n in own.nodes) / whole,
                modules=f"{modules[0]} to {modules[-1]}" if len(modules) > 1 else "".join(modules),
                sends=sum(graph.specs[e.ref].nbytes for e in cut.edges if e.src == s),
            )
        )
    return Account(stages=tuple(rows))


# --- the plan of one stage


def stage_plan(graph: Graph, cut: StageSplit, stage: int, plans: Sequence[Plan], terms: bool = False) -> Plan:
    """What a plan of the whole graph says about one stage; `plans` are those of all stages, for what passes between."""
    own, plan = cut.graphs[stage], plans[stage]
    ops = {n.name: plan.ops[cut.like.get(n.name, n.name)] for n in own.nodes}
    inputs: dict[str, NdSbp] = {}
    whole = {e.name: e for e in cut.edges if e.dst == stage}
    for item in own.inputs:
        if item.kind != "given":
            inputs[item.name] = plan.inputs[item.name]
        else:
            inputs[item.name] = passing(plan, graph, whole[item.name].ref, terms)
    outputs: dict[str, NdSbp] = {}
    for o in own.outputs:
        if o.kind == "sent":
            outputs[f"sent:{o.name}"] = passing(plan, graph, o.ref, terms)
        else:
            outputs[f"{o.kind}:{o.name}"] = plan.outputs[f"{o.kind}:{o.name}"]
    names = {i.name for i in own.inputs}
    state = {n: nd for n, nd in plan.state.items() if n in names}
    recompute = known_patterns(own, plan.recompute)
    return Plan(plan.mesh, own.hash, ops, inputs, outputs, state, name=plan.name, recompute=recompute)


def passing(plan: Plan, graph: Graph, ref: Ref, terms: bool) -> NdSbp:
    """How a value lies that passes between stages: as made, else as read, and never as a sum still to be made.

    With `terms` it may be such a sum, if that is how it is read: what is added to it then is added to the terms, as
    it would be without stages.
    """
    made: NdSbp = plan.ops[ref.name].outs[ref.index]
    if not any(isinstance(p, Partial) for p in made):
        return made
    users = graph.users.get(ref, ())
    read = [nd for node in users for r, nd in zip(node.ins, plan.ops[node.name].ins, strict=True) if r == ref]
    if terms and made in read:
        return made
    for nd in read:
        if not any(isinstance(p, Partial) for p in nd):
            return nd
    return tuple(B if isinstance(p, Partial) else p for p in made)


# --- ops that couple samples


# --- another graph of the same model


def for_other_graph(graph: Graph, staged: Staged) -> Staged:
    """A staged plan's decisions for another graph of the same model: another size of micro-batch, evaluation.

    Weights stay in their stages and lie as they did, and ops are where their weights are; ops without weights are where
    the plan had ops of their name, as far as that lies between the stages before and after them.
    """
    if graph.hash == staged.graph_hash:
        return staged
    count = len(staged.stages)
    of = reassigned(graph, staged)
    plans = []
    for p in range(len(staged.places)):
        here = [s.plan for s in staged.stages if s.place == p]
        plans.append(presets.like(graph, _together(here)))
    cut = split_graph(graph, of, count)
    own = []
    for s, stage in enumerate(staged.stages):
        plan = stage_plan(graph, cut, s, [plans[t.place] for t in staged.stages])
        own.append(StagePlan(stage.place, replace(plan, recompute=known_patterns(cut.graphs[s], stage.plan.recompute))))
    kept = {n: s for n, s in cut.of.items() if graph.by_name[n].phase == "forward"}
    return replace(
        staged, graph_hash=graph.hash, captured_hash="", stages=tuple(own), of=kept, account=_account(graph, cut)
    )


def reassigned(graph: Graph, staged: Staged) -> dict[str, int]:
    """The stage of each forward op: not before those it reads, nor behind those that read it."""
    homes: dict[str, set[int]] = {}
    for s, stage in enumerate(staged.stages):
        for name in stage.plan.inputs:
            homes.setdefault(name, set()).add(s)
    light = light_ops(graph)
    stored = {i.name: homes[i.name] for i in graph.inputs if i.kind in ("param", "buffer") and i.name in homes}
    ops = [n for n in graph.nodes if n.phase == "forward"]
    low: dict[str, int] = {}
    fixed: dict[str, int] = {}
    for node in ops:
        before = max([low[r.name] for r in node.ins if r.name in low], default=0)
        weights = [stored[r.name] for r in node.ins if r.name in stored]
        if node.name in light:
            if weights:
                stored[node.name] = set.intersection(*weights) or weights[0]
            continue
        if weights:
            common = set.intersection(*weights) or weights[0]
            fixed[node.name] = min([s for s in common if s >= before], default=max(common))
        low[node.name] = max(before, fixed.get(node.name, 0))
    high: dict[str, int] = {}
    for node in reversed(ops):
        if node.name in low:
            users = (u.name for i in range(len(node.outs)) for u in graph.users.get(Ref(node.name, i), ()))
            after = [high[u] for u in users if u in high]
            high[node.name] = fixed.get(node.name, min(after, default=len(staged.stages) - 1))
    out: dict[str, int] = {}
    for node in ops:
        if node.name in low:
            # Names may be those of other ops: a graph of another size need not have the same number of each.
            at = max([low[node.name], *(out[r.name] for r in node.ins if r.name in out)])
            out[node.name] = fixed.get(node.name, min(max(staged.of.get(node.name, at), at), max(high[node.name], at)))
    return out


def _together(plans: Sequence[Plan]) -> Plan:
    """What plans of stages at one place say about weights and batches, as one."""
    first = plans[0]
    out = replace(first, ops={}, inputs={}, outputs={}, state={}, recompute=())
    for plan in plans:
        out.inputs.update(plan.inputs)
        out.outputs.update(plan.outputs)
        out.state.update(plan.state)
    return out

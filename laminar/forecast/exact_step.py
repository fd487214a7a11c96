"""What a step in exact mode is expected to take, for each way that processes may store weights and state.

A process that hosts several units computes most of a step for all of them at once, as data parallelism over processes
does. What makes terms of sums over units it computes for each, and adds these up; here that is written into the program
that is simulated. With storage in shards weights are gathered before the step, and gradients are cut behind their
reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from laminar.errors import MeshError, PlanError
from laminar.forecast.step import Prediction, machine, predict_program
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.exact import Exact
from laminar.ir.graph import Graph, map_refs
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Instr, MoveCause, Placed, Program, ProgramOutput, placed
from laminar.ir.sbp import B, NdSbp, Partial, Split
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.lower.boxing.boxing_lines import boxing_line
from laminar.lower.boxing.reshard import Move, moves
from laminar.lower.lower import lower
from laminar.placement import presets
from laminar.rules.boxing.boxing import boxing

STORAGES = ("data", "zero1", "zero3")
"""What processes may store, by the names of plans."""
PROCESS_AXIS = 0
"""The one mesh axis: processes, each with its units."""


@dataclass(frozen=True)
class ExactStep:
    """One way to store, and what a step takes with it."""

    exact: Exact
    processes: int
    storage: str
    prediction: Prediction


def exact_steps(graph: Graph, exact: Exact, cluster: Cluster, optimizer: str = "adamw") -> list[ExactStep]:
    """Every way to store, on all devices of a cluster or as many as can take part; the fastest first."""
    if exact.stages > 1:
        raise PlanError("steps in exact mode with stages are not predicted", next="leave out stages, and measure those")
    if exact.ranks > exact.units:
        raise PlanError("only steps of whole units are predicted", next="leave out slices and context, or measure them")
    processes = min(exact.ranks, cluster.devices)
    mesh = Mesh({"dp": processes})
    cluster.fits(mesh)
    here = cluster.on(range(processes))
    out = []
    for storage in STORAGES:
        plan = presets.preset_plan(storage, graph, mesh)
        program, then = hosted_programs(graph, plan, exact)
        found = predict_program(program, then, plan, here, machine(here, mesh, optimizer))
        out.append(ExactStep(exact, processes, storage, found))
    return sorted(out, key=lambda step: step.prediction.seconds)


def hosted_programs(graph: Graph, plan: Plan, exact: Exact) -> tuple[Program, Program | None]:
    """What a process runs that hosts its share of the units, and what puts updated weights together behind it."""
    mesh = plan.mesh
    if mesh.ranks > exact.units:
        raise MeshError(f"{mesh.ranks} processes for {exact.units} units", allowed=f"at most {exact.units}")
    whole = (B,) * len(mesh.sizes)
    kept = {i.name for i in graph.inputs if i.kind in ("param", "buffer")}
    together = presets.data_parallel(graph, mesh)
    inputs = {**together.inputs, **dict.fromkeys(kept, whole)}
    program = lower(graph, replace(together, inputs=inputs, outputs=dict.fromkeys(together.outputs, whole), state={}))
    program = _unit_by_unit(program, -(-exact.units // mesh.ranks))
    program = _stored(program, plan)
    items: list[Move] = [
        (i.name, i.spec, plan.state[i.name], plan.inputs[i.name])
        for i in graph.of_kind("param")
        if plan.state.get(i.name, plan.inputs[i.name]) != plan.inputs[i.name]
    ]
    return program, moves(mesh, items, "updated parameters") if items else None


def _unit_by_unit(program: Program, units: int) -> Program:
    """Lines that make terms of sums run once for each of a process's units; the terms are added up."""
    if units == 1:
        return program
    now: dict[Ref, Ref] = {}
    instrs: list[Instr] = []
    for old in program.instrs:
        instr = replace(old, args=map_refs(old.args, lambda r: now.get(r, r)), refs=_now(old.refs, now))
        if old.kind or not any(_is_term(p) for p in old.outs):
            instrs.append(instr)
            continue
        each = [replace(instr, name=f"{old.name}_of_unit{u}", ins=_cut(old.ins, units), outs=_cut(old.outs, units))
                for u in range(units)]  # fmt: skip
        instrs += each
        for k, made in enumerate(old.outs):
            if made is None:
                continue
            terms = [Ref(e.name, k) for e in each]
            for u, term in enumerate(terms[1:] if _is_term(made) else ()):
                name = f"{old.name}_sum{k}_{u}"
                instrs.append(_line(old, name, "aten.add.Tensor", (now.get(Ref(old.name, k), terms[0]), term), made))
                now[Ref(old.name, k)] = Ref(name)
            if not _is_term(made):
                name = f"{old.name}_units{k}"
                dim = next((p.dim for p in made.nd if isinstance(p, Split)), 0)
                parts = tuple(placed(s.spec, s.nd) for s in _cut((made,) * units, units) if s is not None)
                instrs.append(replace(_line(old, name, "aten.cat", (tuple(terms), dim), made), ins=parts,
                                      refs=tuple(terms)))  # fmt: skip
                now[Ref(old.name, k)] = Ref(name)
    outputs = tuple(replace(o, ref=now.get(o.ref, o.ref)) for o in program.outputs)
    return replace(program, instrs=tuple(instrs), outputs=outputs)


def _is_term(made: Placed | None) -> bool:
    return made is not None and isinstance(made.nd[PROCESS_AXIS], Partial)


def _now(refs: Sequence[Ref], now: dict[Ref, Ref]) -> tuple[Ref, ...]:
    return tuple(now.get(r, r) for r in refs)


def _cut(each: Sequence[Placed | None], units: int) -> tuple[Placed, ...]:
    """Tensors as one of a process's units has them."""
    return tuple(_part(p, units) if p is not None else None for p in each)  # type: ignore[misc]


def _part(p: Placed, units: int) -> Placed:
    cut = p.nd[PROCESS_AXIS]
    if not isinstance(cut, Split):
        return p
    shape = list(p.spec.shape)
    shape[cut.dim] = -(-shape[cut.dim] // units)
    return placed(TensorSpec(tuple(shape), p.spec.dtype), p.nd)


def _line(like: Instr, name: str, op: str, args: tuple[object, ...], made: Placed) -> Instr:
    refs = tuple(a for a in args if isinstance(a, Ref))
    return replace(like, name=name, op=op, args=args, refs=refs, ins=(made,) * len(refs), outs=(made,))


def _stored(program: Program, plan: Plan) -> Program:
    """With weights gathered before everything else, and gradients cut for those who update them."""
    sizes, last = plan.mesh.sizes, list[Instr]()
    stored = {
        i.name: plan.inputs.get(i.name, i.placed.nd) if i.kind == "param" else i.placed.nd for i in program.inputs
    }
    items: list[Move] = [
        (i.name, i.placed.spec, stored[i.name], i.placed.nd) for i in program.inputs if stored[i.name] != i.placed.nd
    ]
    gathered = moves(plan.mesh, items, "weights") if items else None
    now = {Ref(o.name): o.ref for o in gathered.outputs} if gathered else {}
    inputs = tuple(replace(i, placed=placed(i.placed.spec, stored[i.name])) for i in program.inputs)
    outputs = []
    for o in program.outputs:
        nd = _updated_as(plan, o)
        ref = now.get(o.ref, o.ref)
        for k, step in enumerate(boxing(o.placed.spec, o.placed.nd, nd, sizes)):
            last.append(boxing_line(f"{o.name}_cut{k}", ref, o.placed.spec, step, sizes, MoveCause("gradients")))
            ref = Ref(last[-1].name)
        outputs.append(replace(o, ref=ref, placed=placed(o.placed.spec, nd)))
    lines = [replace(i, args=map_refs(i.args, lambda r: now.get(r, r)), refs=_now(i.refs, now)) for i in program.instrs]
    first = gathered.instrs if gathered else ()
    return replace(program, inputs=inputs, instrs=(*first, *lines, *last), outputs=tuple(outputs))


def _updated_as(plan: Plan, o: ProgramOutput) -> NdSbp:
    return plan.state.get(o.name, plan.inputs.get(o.name, o.placed.nd)) if o.kind == "grad" else o.placed.nd

"""What a step in exact mode is expected to take, for each way that processes may store weights and state.

A process that hosts several units computes most of a step for all of them at once, as data parallelism over processes
does. What makes terms of sums over units it computes for each, and adds these up; what slices of weights or parts of
sequences share, it computes for one after the other. `hosted_lines.py` writes that into the program that is simulated.
With storage in shards weights are gathered before the step, and gradients are cut behind their reduction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from laminar.errors import MeshError, PlanError
from laminar.forecast.hosted_lines import hosted_lines
from laminar.forecast.step import Prediction, machine, predict_program
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.exact import Exact
from laminar.ir.graph import Graph, map_refs
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Instr, MoveCause, Program, ProgramOutput, placed
from laminar.ir.sbp import NdSbp
from laminar.ir.serial.codec import Ref
from laminar.lower.boxing.boxing_lines import boxing_line
from laminar.lower.boxing.reshard import Move, moves
from laminar.lower.lower import lower
from laminar.placement import presets
from laminar.placement.logical import logical_plan
from laminar.rules.boxing.boxing import boxing

STORAGES = ("data", "zero1", "zero3")
"""What processes may store, by the names of plans."""


@dataclass(frozen=True)
class ExactStep:
    """One way to store, and what a step takes with it."""

    exact: Exact
    processes: int
    storage: str
    prediction: Prediction


def exact_steps(graph: Graph, exact: Exact, cluster: Cluster, optimizer: str = "adamw") -> list[ExactStep]:
    """Every way to store, on all devices of a cluster or as many as there are units; the fastest first."""
    if exact.stages > 1:
        raise PlanError("steps in exact mode with stages are not predicted", next="leave out stages, and measure those")
    processes = min(exact.units, cluster.devices)
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
    program = _stored(hosted_lines(lower(graph, logical_plan(graph, exact)), mesh), plan)
    items: list[Move] = [
        (i.name, i.spec, plan.state[i.name], plan.inputs[i.name])
        for i in graph.of_kind("param")
        if plan.state.get(i.name, plan.inputs[i.name]) != plan.inputs[i.name]
    ]
    return program, moves(mesh, items, "updated parameters") if items else None


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

    def read(ref: Ref) -> Ref:
        return now.get(ref, ref)

    lines = [replace(i, args=map_refs(i.args, read), refs=tuple(map(read, i.refs))) for i in program.instrs]
    first = gathered.instrs if gathered else ()
    return replace(program, inputs=inputs, instrs=(*first, *lines, *last), outputs=tuple(outputs))


def _updated_as(plan: Plan, o: ProgramOutput) -> NdSbp:
    return plan.state.get(o.name, plan.inputs.get(o.name, o.placed.nd)) if o.kind == "grad" else o.placed.nd

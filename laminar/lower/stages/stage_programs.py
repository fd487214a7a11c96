"""From a graph and a staged plan to what each place runs: the parts of every stage, and what passes between them.

Each stage's own graph is lowered like any other, on its place's mesh, and the lines are then dealt out to parts that
run at different times: forward; backward; or, where they are apart, the gradients of what the stage was given
(which earlier stages wait for) and those of its weights (which nobody waits for before the step ends). What a later
part reads of an earlier one is *kept*: one such set of tensors per micro-batch under way is the stage's stash. What a
plan recomputes is made in backward, and with the gradients of inputs where these are apart. Parts are merged and
ordered one by one, since their collectives can't travel together.

Sums over micro-batches stay unfinished inside of a step: gradients leave backward as each rank's terms where the plan
would keep them whole, and are reduced once at the end. In exact mode they leave as the plan keeps them (`finished`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from laminar.errors import PlanError
from laminar.ir.graph import Graph, map_refs
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.ir.program import Instr, Placed, Program, ProgramInput, ProgramOutput
from laminar.ir.sbp import B, NdSbp, Partial
from laminar.ir.serial.codec import Ref
from laminar.lower.lower import scheduled, written
from laminar.lower.memory.offload import refuse_stages
from laminar.lower.stages.split_stages import Edge, StageSplit, split_graph, value_name

KEPT = "kept"
"""The kind of values that one part of a stage keeps for a later one."""


@dataclass(frozen=True)
class Part:
    """Lines of one stage that run together, once for each micro-batch."""

    stage: int
    kind: str
    """`forward`, `backward`, `input` or `weight`."""
    program: Program

    @property
    def name(self) -> str:
        """`F2`, `B2`, `I2`, `W2`."""
        return f"{self.kind[0].upper()}{self.stage}"

    @cached_property
    def takes(self) -> frozenset[str]:
        """Names of what it reads that other parts have made."""
        return frozenset(i.name for i in self.program.inputs if i.kind in ("given", KEPT))

    @cached_property
    def gives(self) -> frozenset[str]:
        """Names of what it makes for other parts."""
        return frozenset(o.name for o in self.program.outputs if o.kind in ("sent", KEPT))


@dataclass(frozen=True)
class Wire:
    """A value on its way from one stage to another, as it lies on each side."""

    edge: Edge
    src: Placed
    dst: Placed


@dataclass(frozen=True)
class Stages:
    """Everything places need to know about a staged plan."""

    staged: Staged
    cut: StageSplit
    parts: tuple[tuple[Part, ...], ...]
    """By stage, in the order in which a micro-batch passes through them."""
    wires: tuple[Wire, ...]

    @cached_property
    def by_name(self) -> dict[str, Part]:
        """Parts by name."""
        return {p.name: p for stage in self.parts for p in stage}

    @cached_property
    def terms(self) -> tuple[dict[str, NdSbp], ...]:
        """By stage, how what is summed over micro-batches leaves a part, by `kind:name`."""
        return tuple(
            {
                f"{o.kind}:{o.name}": o.placed.nd
                for part in parts
                for o in part.program.outputs
                if o.kind in ("grad", "loss", "metric")
            }
            for parts in self.parts
        )


def stages(graph: Graph, staged: Staged, like: Stages | None = None, finished: bool = False) -> Stages:
    """Lower a staged plan; sums over micro-batches lie as they do in `like`, where these have another size.

    `finished`: each micro-batch's own gradients, loss and metrics leave as the plan keeps them.
    """
    staged.fits(graph)
    cut = split_graph(graph, staged.of, len(staged.stages))
    parts, made = [], []
    for s, (own, stage) in enumerate(zip(cut.graphs, staged.stages, strict=True)):
        if stage.plan.graph_hash != own.hash:
            raise PlanError(f"the plan of stage {s} is for another graph", next="make the staged plan again")
        stage.plan.fits(own)
        refuse_stages(stage.plan)
        own_terms = {} if finished else unfinished(own, stage.plan)
        terms = own_terms if like is None else like.terms[s]
        if other := terms.keys() ^ own_terms.keys():
            raise PlanError(
                f"with micro-batches of another size stage {s} gives, or does not give, {sorted(other)[0]}",
                next="cut the model at modules (stages=[...]), or use one size",
            )
        plan = replace(stage.plan, outputs={**stage.plan.outputs, **terms})
        program = written(own, plan)
        made.append(program)
        parts.append(tuple(_parts(program, s, staged.apart)))
    wires = []
    for e in cut.edges:
        out = next(o for o in made[e.src].outputs if o.kind == "sent" and o.name == e.name)
        into = next(i for i in made[e.dst].inputs if i.name == e.name)
        wires.append(Wire(e, out.placed, into.placed))
    return Stages(staged, cut, tuple(parts), tuple(wires))


def in_other_precision(graph: Graph, staged: Staged) -> Staged:
    """The same plan for a graph that differs from its own in dtypes only."""
    cut = split_graph(graph, staged.of, len(staged.stages))
    own = [replace(s, plan=replace(s.plan, graph_hash=g.hash)) for s, g in zip(staged.stages, cut.graphs, strict=True)]
    return replace(staged, graph_hash=graph.hash, stages=tuple(own))


def unfinished(graph: Graph, plan: Plan) -> dict[str, NdSbp]:
    """How sums over micro-batches leave a part: as terms, where the plan would keep the sum whole."""
    out: dict[str, NdSbp] = {}
    for o in graph.outputs:
        node = graph.by_name.get(o.ref.name)
        if o.kind in ("grad", "loss", "metric") and node is not None:
            kept, made = plan.outputs[f"{o.kind}:{o.name}"], plan.ops[node.name].outs[o.ref.index]
            later = (
                m if isinstance(m, Partial) and m.op == "sum" and k == B else k for m, k in zip(made, kept, strict=True)
            )
            out[f"{o.kind}:{o.name}"] = tuple(later)
    return out


def _parts(program: Program, stage: int, apart: bool) -> list[Part]:
    """A stage's lines dealt out; a part without lines is left out, but for forward."""
    forward = {i.name for i in program.instrs if i.phase == "forward"}
    rest = [i for i in program.instrs if i.name not in forward]
    groups: list[tuple[str, set[str]]] = [("forward", forward)]
    if apart:
        names = {i.name for i in rest}
        sent = {o.ref.name for o in program.outputs if o.kind != "grad"}
        early = _leading_to(rest, sent) & names
        if early:  # what is recomputed is made there: gradients of weights then read no more than without recompute
            early = _leading_to(rest, sent | {i.name for i in rest if i.phase == "recompute"}) & names
        groups += [("input", early), ("weight", names - early)]
    else:
        groups.append(("backward", {i.name for i in rest}))
    where = {name: kind for kind, names in groups for name in names}
    order = [kind for kind, _ in groups]
    outside = {i.name: i for i in program.inputs}
    specs = {Ref(i.name, k): p for i in program.instrs for k, p in enumerate(i.outs) if p is not None}
    last = {kind: {r for i in program.instrs if where[i.name] == kind for r in i.refs} for kind in order}
    for o in program.outputs:
        last[_leaves(o, where, outside, order)].add(o.ref)
    out = []
    for at, kind in enumerate(order):
        lines = [i for i in program.instrs if where[i.name] == kind]
        ends = [o for o in program.outputs if _leaves(o, where, outside, order) == kind]
        if not lines and not ends and kind != "forward":
            continue
        later = [r for k in order[at + 1 :] for r in last[k]]
        out.append(Part(stage, kind, _part(program, lines, ends, where, kind, later, specs)))
    return out


def _leading_to(lines: list[Instr], ends: set[str]) -> set[str]:
    """Names of the lines given, and of all that they read."""
    out: set[str] = set()
    for instr in reversed(lines):
        if instr.name in ends or instr.name in out:
            out |= {instr.name, *(r.name for r in instr.refs)}
    return out


def _leaves(o: ProgramOutput, where: dict[str, str], outside: dict[str, ProgramInput], order: list[str]) -> str:
    """The part an output leaves from: the one that makes it; what comes from outside leaves with the last but one."""
    return where[o.ref.name] if o.ref.name in where else order[1]


def _part(
    program: Program,
    lines: list[Instr],
    ends: list[ProgramOutput],
    where: dict[str, str],
    kind: str,
    later: list[Ref],
    specs: dict[Ref, Placed],
) -> Program:
    """One part as a program of its own."""
    mine = {i.name for i in lines}
    sent = {o.name: o.ref for o in program.outputs if o.kind == "sent"}
    renamed: dict[Ref, Ref] = {}

    def called(ref: Ref) -> str:
        name = value_name(ref)  # the same value may be sent too, and lie otherwise there
        return name if sent.get(name, ref) == ref else f"{name}_kept"

    kept: dict[Ref, ProgramInput] = {}
    read = [r for i in lines for r in i.refs] + [o.ref for o in ends]
    for ref in read:
        if ref.name in where and ref.name not in mine and ref not in kept:
            kept[ref] = ProgramInput(called(ref), KEPT, specs[ref])
            renamed[ref] = Ref(called(ref))
    names = {r.name for r in read}
    made = dict.fromkeys(r for r in later if r.name in mine)
    outs = [*ends, *(ProgramOutput(called(r), KEPT, r, specs[r]) for r in made)]

    def now(ref: Ref) -> Ref:
        return renamed.get(ref, ref)

    def moved(instr: Instr) -> Instr:
        if renamed.keys().isdisjoint(instr.refs):
            return instr
        return replace(instr, args=map_refs(instr.args, now), refs=tuple(map(now, instr.refs)))

    return scheduled(
        replace(
            program,
            inputs=(*(i for i in program.inputs if i.name in names), *kept.values()),
            constants=tuple(c for c in program.constants if c.name in names),
            instrs=tuple(map(moved, lines)),
            outputs=tuple(replace(o, ref=now(o.ref)) for o in outs),
        )
    )

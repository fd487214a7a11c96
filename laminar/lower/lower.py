"""From a graph and a plan to a program: boxing inserted, local forms chosen, expansions written out.

Values live in several placements at once: the one they were made in and those they were boxed to.
A consumer that wants another gets the cheapest chain from any of them, and leaves the result for
the next. Parameters are the exception: forward and backward fetch them separately, so that a
gathered parameter need not stay in memory between the two, unless the plan gathers once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from laminar.errors import LaminarError, PlacementError
from laminar.ir.graph import Graph, Node, map_refs
from laminar.ir.mesh import Mesh
from laminar.ir.ops import FREE
from laminar.ir.plans.patterns import pick
from laminar.ir.plans.plan import Plan
from laminar.ir.program import READ_VALUES, Instr, MoveCause, Placed, Program, ProgramInput, ProgramOutput, placed
from laminar.ir.sbp import B, NdSbp, Partial, check_placement, show
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.lower.boxing.boxing_lines import boxing_line
from laminar.lower.boxing.buckets import BUCKET_BYTES, merged
from laminar.lower.boxing.overlap import drop_unused, overlap
from laminar.lower.memory.offload import offloaded
from laminar.lower.memory.planned_recompute import with_recompute
from laminar.rules.boxing.boxing import Step, boxing, chain_s
from laminar.rules.notation import Call, call_of, calls_in
from laminar.rules.ops.expand import LAZY, expand
from laminar.rules.signing import Probed, follow, probed_signatures, resolve

LOCAL_DIM: dict[str, Callable[[Any, Any, Any], tuple[str, int, int]]] = {
    "laminar.embedding_at": lambda args, ins, outs: ("in", 0, 0),
    "laminar.embedding_backward_at": lambda args, ins, outs: ("out", 0, 0),
    "laminar.grouped_mm_at": lambda args, ins, outs: ("in", 0, 0),
    "laminar.grouped_outer_at": lambda args, ins, outs: ("in", 0, 0),
    "laminar.attention_at": lambda args, ins, outs: ("in", 0, 2),
    "laminar.attention_backward_at": lambda args, ins, outs: ("in", 1, 2),
    "laminar.gather_at": lambda args, ins, outs: ("in", 0, args[1] % len(ins[0].shape)),
    "laminar.nll_at": lambda args, ins, outs: ("in", 0, min(len(ins[0].shape) - 1, 1)),
    "laminar.nll_backward_at": lambda args, ins, outs: ("out", 0, min(len(outs[0].shape) - 1, 1)),
}
"""For each local form, which tensor's dim its offset is about."""


@dataclass
class _Writer:
    graph: Graph
    mesh: Mesh
    probed: dict[str, Probed]
    instrs: list[Instr] = field(default_factory=list)
    have: dict[Any, dict[NdSbp, Ref]] = field(default_factory=dict)
    specs: dict[Ref, TensorSpec] = field(default_factory=dict)
    params: set[str] = field(default_factory=set)
    """Parameters that forward and backward fetch separately."""
    gathered: set[str] = field(default_factory=set)
    """Nodes of forward that only cast or view parameters that were gathered for them."""
    boxed: Counter[str] = field(default_factory=Counter)
    """Boxing steps written for each node so far."""
    late: set[str] = field(default_factory=set)
    """Boxing steps written for nodes of backward: what forward gives can't be made from them."""

    def again(self, ref: Ref, plan: Plan) -> Ref:
        """A cast or view of a gathered parameter, made anew for backward: kept, it would be whole all that time."""
        if ref.name not in self.gathered:
            return ref
        name = f"{ref.name}_again"
        if Ref(name) not in self.have:
            node = self.graph.by_name[ref.name]
            args = map_refs(node.args, lambda r: self.again(r, plan))
            copy = replace(node, name=name, args=args, phase="backward")
            self.specs.update({Ref(name, i): o for i, o in enumerate(node.outs) if o})
            self.put(copy, plan.ops[node.name].ins, plan.ops[node.name].outs)
        return Ref(name, ref.index)

    def fetch(self, ref: Ref, want: NdSbp, node: Node, cause: MoveCause | None = None) -> Ref:
        """A value in the placement wanted, boxed if need be; for the node to read, unless there is another cause."""
        at = self.have[ref]
        if ref.name in self.params:
            if node.phase == "recompute":  # its parameters serve backward too
                node = replace(node, phase="backward")
            at = self.have.setdefault((ref, node.phase), dict(at))
        if self.late and node.phase == "forward":
            at = {nd: r for nd, r in at.items() if r.name not in self.late}
        want = self._plain(want)
        if want in at:
            return at[want]
        spec, sizes = self.specs[ref], self.mesh.sizes
        if len(at) == 1:
            (src,) = at
            chain = boxing(spec, src, want, sizes)
        else:
            chains = [
                (chain_s(c, spec, sizes), len(c), i, src, c)
                for i, src in enumerate(at)
                for c in (boxing(spec, src, want, sizes),)
            ]
            *_, src, chain = min(chains)
        now = at[src]
        for step in chain:
            now = self._box(now, spec, step, node, cause or MoveCause(READ_VALUES, node.name))
            at.setdefault(step.dst, now)
        return now

    def _plain(self, nd: NdSbp) -> NdSbp:
        return _plain(nd, self.mesh)

    def _box(self, ref: Ref, spec: TensorSpec, step: Step, node: Node, cause: MoveCause) -> Ref:
        reader = node.name.replace(".", "_")
        self.boxed[reader] += 1
        name = f"box_{reader}_{self.boxed[reader]}"  # by its reader: a change elsewhere does not rename it
        if node.phase != "forward":
            self.late.add(name)
        self.instrs.append(boxing_line(name, ref, spec, step, self.mesh.sizes, cause, node))
        return Ref(name)

    def put(
        self, node: Node, ins: tuple[NdSbp, ...], outs: tuple[NdSbp, ...], probed: Probed = (), call: Call | None = None
    ) -> None:
        """One node of the graph, or of an expansion, placed as told."""
        call = call or call_of(node, self.specs)
        known = _known(call, ins, outs, self.mesh, probed)
        if known is None:  # refused, by name
            for spec, nd in zip(call.outs, outs, strict=True):
                if spec is not None:
                    check_placement(spec, nd, self.mesh.sizes, f"%{node.name}")
            resolve(call, ins, outs, self.mesh, node, probed)
            raise AssertionError(f"%{node.name} was refused for nothing")
        hows, reads, makes = known
        if "expand" in hows:
            self._expanded(node, ins, outs)
            return
        read = tuple([self.fetch(r, nd, node) for r, nd in zip(node.ins, ins, strict=True)])
        args, refs = node.args, iter(read)
        if args[: len(read)] == node.ins:  # tensors first, all else behind
            args = (*read, *args[len(read) :])
        else:
            args = map_refs(args, lambda _: next(refs))
        op = node.op
        if hows:
            (op,) = hows
            args = (*args, "offset", *LOCAL_DIM[op](node.args, call.ins, call.outs))
        self.instrs.append(
            Instr(
                node.name,
                op,
                args,
                read,
                reads,
                makes,
                node.where,
                node.module,
                node.phase,
            )
        )
        for i, made in enumerate(makes):
            if made is not None:
                ref = Ref(node.name, i)
                self.have[ref] = {made.nd: ref}

    def _expanded(self, node: Node, ins: tuple[NdSbp, ...], outs: tuple[NdSbp, ...]) -> None:
        here = {r: self.specs[r] for r in node.ins}
        nodes, ends = expand(call_of(node, self.specs), node.args, here, node.name)
        nodes = [replace(n, where=node.where, module=node.module, phase=node.phase) for n in nodes]
        for n in nodes:
            self.specs.update({Ref(n.name, i): o for i, o in enumerate(n.outs) if o})
        for placing in follow(
            nodes, dict(zip(node.ins, ins, strict=True)), self.specs, self.mesh.sizes, node.op not in LAZY
        ):
            self.put(placing.node, placing.ins, placing.outs)
        for i, (end, nd, spec) in enumerate(zip(ends, outs, node.outs, strict=True)):
            if spec is not None:
                self.fetch(end, nd, node)
                self.have[Ref(node.name, i)] = self.have[end]


def _plain(nd: NdSbp, mesh: Mesh) -> NdSbp:
    """On axes of one rank, whole."""
    return nd if 1 not in mesh.sizes else tuple(B if n == 1 else p for p, n in zip(nd, mesh.sizes, strict=True))


@lru_cache(maxsize=1 << 16)
def _known(
    call: Call, ins: tuple[NdSbp, ...], outs: tuple[NdSbp, ...], mesh: Mesh, probed: Probed
) -> tuple[frozenset[str], tuple[Placed, ...], tuple[Placed | None, ...]] | None:
    """What a call placed so has besides names: how it is done, and what it reads and makes. None if that can't be."""
    try:
        for spec, nd in zip(call.outs, outs, strict=True):
            if spec is not None:
                check_placement(spec, nd, mesh.sizes, call.op)
        signed = resolve(call, ins, outs, mesh, Node("", call.op, (), call.outs), probed)
    except LaminarError:
        return None
    reads = tuple(placed(s, nd) for s, nd in zip(call.ins, ins, strict=True))
    makes = tuple(placed(s, _plain(nd, mesh)) if s else None for s, nd in zip(call.outs, outs, strict=True))
    return frozenset(s.how for s in signed if s.how), reads, makes


def lower(graph: Graph, plan: Plan, *, bucket_bytes: int = BUCKET_BYTES, schedule: bool = True) -> Program:
    """The program every rank of the plan's mesh runs."""
    return offloaded(scheduled(written(graph, plan), bucket_bytes, schedule))


def scheduled(program: Program, bucket_bytes: int = BUCKET_BYTES, schedule: bool = True) -> Program:
    """Without what nobody reads, collectives merged, work drawn between a collective and its reader."""
    program = merged(drop_unused(program), bucket_bytes)
    return overlap(program) if schedule else program


def written(graph: Graph, plan: Plan) -> Program:
    """The program line by line, as the graph has it, and what the plan recomputes in backward."""
    plan.fits(graph)
    writer = _Writer(graph, plan.mesh, probed_signatures(graph), specs=dict(graph.specs))
    writer.params = set() if plan.gather_once else {i.name for i in graph.inputs if i.kind == "param"}
    whole = tuple(writer._plain(plan.inputs[i.name]) for i in graph.inputs)
    for item, nd in zip(graph.inputs, whole, strict=True):
        if any(isinstance(p, Partial) for p in nd) and item.kind != "given":
            check_stored(item.name, nd)
        writer.have[Ref(item.name)] = {nd: Ref(item.name)}
    everywhere = (B,) * len(plan.mesh.sizes)
    for const in graph.constants:
        writer.have[Ref(const.name)] = {everywhere: Ref(const.name)}
    writer.gathered = set() if plan.gather_once else _gathered(graph, plan)
    calls = calls_in(graph)
    for node in graph.nodes:
        choice = plan.ops[node.name]
        if node.phase != "forward" and any(r.name in writer.gathered for r in node.ins):
            node = replace(node, args=map_refs(node.args, lambda r: writer.again(r, plan)))
        writer.put(node, choice.ins, choice.outs, writer.probed.get(node.name, ()), calls[node.name])
    outputs = []
    end = Node("end", "laminar.end", (), (), phase="backward")
    for out in graph.outputs:
        nd = writer._plain(plan.outputs[f"{out.kind}:{out.name}"])
        check_placement(graph.specs[out.ref], nd, plan.mesh.sizes, f"{out.kind} {out.name}")
        made = graph.by_name.get(out.ref.name, end)
        ref = writer.fetch(out.ref, nd, made, MoveCause(out.kind, out.name))
        outputs.append(ProgramOutput(out.name, out.kind, ref, placed(graph.specs[out.ref], nd)))
    program = Program(
        plan.mesh,
        tuple(ProgramInput(i.name, i.kind, placed(i.spec, nd)) for i, nd in zip(graph.inputs, whole, strict=True)),
        graph.constants,
        tuple(writer.instrs),
        tuple(outputs),
        graph.hash,
        plan.hash,
        pick(graph, plan.offload),
    )
    return with_recompute(program, pick(graph, plan.recompute)) if plan.recompute else program


def _gathered(graph: Graph, plan: Plan) -> set[str]:
    """Forward's casts and views of parameters that are put together from pieces for them."""
    params = {i.name for i in graph.of_kind("param")}
    found: set[str] = set()
    for node in graph.nodes:
        light = (node.op in FREE or node.op == "aten._to_copy") and node.phase == "forward" and len(node.outs) == 1
        if not light or not node.ins or any(r.name not in params | found for r in node.ins):
            continue
        pieces = zip(node.ins, plan.ops[node.name].ins, strict=True)
        if any(r.name in found or plan.inputs[r.name] != nd for r, nd in pieces):
            found.add(node.name)
    return found


def check_stored(name: str, nd: NdSbp) -> None:
    """Inputs are stored whole or in shards, never as terms of a sum."""
    raise PlacementError(f"input {name} can't be stored as {show(nd)}", allowed="S(d)  B")

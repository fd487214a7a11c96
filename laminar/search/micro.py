"""The graph of a micro-batch, from that of its batch: the same ops on fewer samples.

A step that runs its batch in parts is planned before there is a model to trace again. The batch is split by sample, as
on an axis of so many ranks, every op follows its inputs, and each op's local form *is* what it does to one part. Sums
over samples (losses, gradients of weights) are then sums over the part. Where an op would need samples of another
part, there is no such graph, and its name is told.

Names stay, so that a plan for this graph fits the one that is traced from a real micro-batch (`staging.again`).
"""

from __future__ import annotations

from dataclasses import replace

from laminar.errors import PlanError
from laminar.ir.codec import Ref
from laminar.ir.graph import Graph, Node
from laminar.ir.sbp import B, NdSbp, Partial, Sbp, Split, local_spec
from laminar.rules.notation import Signature, call_of, localise
from laminar.rules.samples import samples_of
from laminar.rules.signing import follow


def micro(graph: Graph, parts: int) -> Graph:
    """The graph of one of `parts` equal micro-batches."""
    samples = samples_of(graph)
    if parts == 1:
        return graph
    if parts < 1 or samples % parts:
        raise PlanError(f"{samples} samples in {parts} equal micro-batches", next="take a divisor of the samples")
    lies: dict[Ref, Sbp] = {}
    for item in graph.inputs:
        cut = item.kind == "batch" and item.spec.shape[:1] == (samples,)
        lies[Ref(item.name)] = Split(0) if cut else B
    lies |= {Ref(c.name): B for c in graph.constants}
    given: dict[Ref, NdSbp] = {ref: (p,) for ref, p in lies.items()}
    nodes = []
    for placing in follow(graph.nodes, given, graph.specs, (parts,)):
        node = placing.node
        ins, outs = tuple(nd[0] for nd in placing.ins), tuple(nd[0] for nd in placing.outs)
        for ref, want in zip(node.ins, ins, strict=True):
            if not _fits(lies[ref], want):
                raise PlanError(
                    f"{node.op} needs samples of other micro-batches", tensor=f"%{node.name}", at=node.where,
                    next="run the batch in one part",
                )  # fmt: skip
        nodes.append(_local(node, Signature(ins, outs), graph, parts))
        lies.update({Ref(node.name, i): B if isinstance(p, Partial) else p for i, p in enumerate(outs)})
    inputs = tuple(replace(i, spec=local_spec(i.spec, (lies[Ref(i.name)],), (parts,))) for i in graph.inputs)
    return replace(graph, inputs=inputs, nodes=tuple(nodes))


def _fits(lies: Sbp, wanted: Sbp) -> bool:
    """Whether a part has at hand what an op reads: its own samples, or something that is the same for all."""
    return lies == wanted or (lies == B and isinstance(wanted, Partial))


def _local(node: Node, signature: Signature, graph: Graph, parts: int) -> Node:
    call = localise(call_of(node, graph.specs), signature, parts)
    refs = iter(node.ins)

    def named(arg: object) -> object:
        """Arguments of a call number their tensors; a node names them."""
        if isinstance(arg, Ref):
            return next(refs)
        return tuple(map(named, arg)) if isinstance(arg, tuple) else arg

    return replace(node, args=tuple(map(named, call.args)), outs=call.outs)

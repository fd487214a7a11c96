"""The graph of a micro-batch, from that of its batch: the same ops on fewer samples.

A step that runs its batch in parts is planned before there is a model to trace again. The batch is split by sample, as
on an axis of so many ranks, every op follows its inputs, and each op's local form *is* what it does to one part. Sums
over samples (losses, gradients of weights) are then sums over the part. Values that are made for every sample from
nothing of theirs (zeros, a class token, the numbers of a dropout) are made for those of the part. Where an op would
need samples of another part, there is no such graph, and its name is told.

Names stay, so that a plan for this graph fits the one that is traced from a real micro-batch (`staging.again`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from laminar.errors import PlanError
from laminar.ir.graph import Graph, Node
from laminar.ir.sbp import B, Partial, Sbp, Split, local_spec
from laminar.ir.serial.codec import Ref
from laminar.rules.notation import Call, Signature, calls_in, localise
from laminar.rules.samples import samples_of
from laminar.rules.signing import blocks_in, closest, options, probed_signatures


def micro(graph: Graph, parts: int) -> Graph:
    """The graph of one of `parts` equal micro-batches."""
    samples = samples_of(graph)
    if parts == 1:
        return graph
    if parts < 1 or samples % parts:
        raise PlanError(f"{samples} samples in {parts} equal micro-batches", next="take a divisor of the samples")
    return _Cut(graph, parts, samples).graph()


class _Cut:
    def __init__(self, whole: Graph, parts: int, samples: int) -> None:
        self.whole, self.parts, self.samples = whole, parts, samples
        self.told: dict[str, Signature] = {}
        """Ops that make for each sample what they would make for all: how."""
        self.makers = {Ref(n.name, i): n for n in whole.nodes for i in range(len(n.outs))}
        self.calls = calls_in(whole)
        self.blocks, self.probed = blocks_in(whole), probed_signatures(whole)

    def graph(self) -> Graph:
        while not self._placed():
            pass
        calls = {n: localise(call, self.chosen[n], self.parts) for n, call in self.calls.items()}
        nodes = tuple([_local(n, self.calls[n.name], calls[n.name]) for n in self.whole.nodes])
        inputs = tuple(
            replace(i, spec=local_spec(i.spec, (self.lies[Ref(i.name)],), (self.parts,))) for i in self.whole.inputs
        )
        made = replace(self.whole, inputs=inputs, nodes=nodes)
        made.notes["whole"] = self.whole
        if not any(call.least for call in calls.values()):
            made.notes["calls"] = calls
        return made

    def _placed(self) -> bool:
        """Place every op by what it reads; False if one had to be told otherwise, and all is to be done again."""
        self.lies: dict[Ref, Sbp] = {Ref(c.name): B for c in self.whole.constants}
        for item in self.whole.inputs:
            cut = item.kind == "batch" and item.spec.shape[:1] == (self.samples,)
            self.lies[Ref(item.name)] = Split(0) if cut else B
        self.chosen: dict[str, Signature] = {}
        for node in self.whole.nodes:
            found = self.told.get(node.name) or self._following(node)
            for ref, want in zip(node.ins, found.ins, strict=True):
                lies = self.lies[ref]
                if lies == want or (lies == B and isinstance(want, Partial)):
                    continue
                if lies == B and isinstance(want, Split) and self._tell(ref, want):
                    return False
                raise PlanError(
                    f"{node.op} needs samples of other micro-batches",
                    tensor=f"%{node.name}",
                    at=node.where,
                    next="run the batch in one part",
                )
            self.chosen[node.name] = found
            for i, p in enumerate(found.outs):
                self.lies[Ref(node.name, i)] = B if isinstance(p, Partial) else p
        return True

    def _following(self, node: Node) -> Signature:
        found = closest(self.calls[node.name], tuple([self.lies[r] for r in node.ins]), self.parts)
        return Signature(found.ins, found.outs) if found.how else found

    def _tell(self, ref: Ref, want: Split) -> bool:
        """Have a value that is the same for all parts made for the samples of one; whether that can be."""
        node = self.makers.get(ref)
        if node is None or node.name in self.told:
            return False
        call = self.calls[node.name]
        for s in options(call, self.parts, self.blocks, self.probed.get(node.name, ())):
            if s.outs[ref.index] != want or s.how:
                continue
            wrong = [(r, p) for r, p in zip(node.ins, s.ins, strict=True) if self.lies[r] != p]
            if all(self.lies[r] == B and isinstance(p, Split) and self._tell(r, p) for r, p in wrong):
                self.told[node.name] = s
                return True
        return False


def _local(node: Node, whole: Call, call: Call) -> Node:
    if call.args is whole.args:
        return node if call.outs == node.outs else replace(node, outs=call.outs)
    refs = iter(node.ins)
    return replace(node, args=tuple([_named(arg, refs) for arg in call.args]), outs=call.outs)


def _named(arg: object, refs: Iterator[Ref]) -> object:
    """Arguments of a call number their tensors; a node names them."""
    if isinstance(arg, Ref):
        return next(refs)
    return tuple([_named(a, refs) for a in arg]) if isinstance(arg, tuple) else arg

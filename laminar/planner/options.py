"""What the ops of a piece of a graph can do on a mesh, and which of it has to be looked at to find the least.

An option of an op is one signature for each axis, and the price of the local call. There are dozens on two axes, too
many for elimination, and most of them can't matter:

    far        Those that cost much more than the cheapest: `least` accounts for them.
    terms      Terms of a maximum that nobody makes so would have to be made from a whole, which is one already.
    views      A view moves nothing. To cut there where neither its maker cuts nor any reader wants a cut would be to
               move a tensor twice where once would do, before or behind it.
    told apart What an exchange costs depends on whether two pieces are the same (`ways`); pieces that are like none
               on the other side are all alike, and one stands for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

from laminar.cost.families import COMPUTES, family_of
from laminar.cost.prices import ALONE, Machine
from laminar.cost.work import FREE
from laminar.ir.codec import Ref
from laminar.ir.graph import Graph, Node, Output
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import B, NdSbp, Partial, Sbp, Split
from laminar.planner.ways import PIECE, Pairs, code
from laminar.rules.notation import Call, Signature, call_of, localise
from laminar.rules.signing import Blocks, options, probed_signatures
from laminar.search.complete import circulating


class Option(NamedTuple):
    """A signature for each axis as placements of all tensors, and what the op then costs on a rank."""

    ins: tuple[NdSbp, ...]
    outs: tuple[NdSbp, ...]
    seconds: float


class Prices:
    """Local calls of one model and what they cost, asked once for all meshes."""

    def __init__(self) -> None:
        self._cut: dict[Any, list[tuple[Signature, Call]]] = {}
        self._seconds: dict[tuple[str | None, Call], float] = {}

    def cut(
        self, call: Call, parts: int, blocks: Blocks, probed: tuple[Signature, ...]
    ) -> list[tuple[Signature, Call]]:
        """What an op can do on an axis, each with the call that a rank then makes."""
        key = (call, parts, blocks, probed)
        found = self._cut.get(key)
        if found is None:
            found = [(s, localise(call, s, parts)) for s in options(call, parts, blocks, probed)]
            self._cut[key] = found
        return found

    def seconds(self, machine: Machine, call: Call) -> float:
        """Of a call by itself; nothing, if a compiler fuses it with others."""
        key = (machine.ops.section, call)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = machine.op(call).seconds
        return found


class Placements:
    """The ops of one graph on one mesh: what each can do, at which price."""

    def __init__(self, graph: Graph, machine: Machine, mesh: Mesh, prices: Prices | None = None) -> None:
        self.graph, self.machine, self.mesh, self.prices = graph, machine, mesh, prices or Prices()
        self._options: dict[Call, list[Option]] = {}
        self._least: dict[Call, float] = {}

    def options(self, node: Node) -> list[Option]:
        """Everything an op can do."""
        call = self.calls[node.name]
        found = self._options.get(call)
        if found is None:
            counted = self.counted(node)
            found = self._options[call] = [
                Option(
                    tuple(tuple(s.ins[i] for s in signed) for i in range(len(call.ins))),
                    tuple(tuple(s.outs[i] for s in signed) for i in range(len(call.outs))),
                    self.prices.seconds(self.machine, local) if counted else 0.0,
                )
                for signed, local in self._signed(node)
            ]
        return found

    def least_s(self, node: Node) -> float:
        """What an op costs at its cheapest."""
        if not self.counted(node):
            return 0.0
        call = self.calls[node.name]
        found = self._least.get(call)
        if found is None:
            every = (self.prices.seconds(self.machine, local) for _, local in self._signed(node))
            found = self._least[call] = min(every)
        return found

    def counted(self, node: Node) -> bool:
        """Whether an op has a price of its own; others are counted with the kernel that they are part of."""
        own = family_of(node.op) in COMPUTES or node.op in ALONE
        return not self.machine.fused or (own and node.op not in FREE)

    def _signed(self, node: Node) -> list[tuple[tuple[Signature, ...], Call]]:
        found: list[tuple[tuple[Signature, ...], Call]] = [((), self.calls[node.name])]
        probed = self.probed.get(node.name, ())
        for parts in self.mesh.sizes:
            found = [
                ((*done, s), local)
                for done, call in found
                for s, local in self.prices.cut(call, parts, self.blocks, probed)
            ]
        return found

    @cached_property
    def calls(self) -> dict[str, Call]:
        """By name."""
        return {n.name: call_of(n, self.graph.specs) for n in self.graph.nodes}

    @cached_property
    def blocks(self) -> Blocks:
        """Block counts that come up."""
        return circulating(self.calls)

    @cached_property
    def probed(self) -> dict[str, tuple[Signature, ...]]:
        """Signatures of ops that no rule knows."""
        return probed_signatures(self.graph)

    @cached_property
    def chain(self) -> frozenset[tuple[Ref, str]]:
        """Exchanges of forward that nothing runs beside: (value, reader).

        All of forward's other work either leads to the value or comes from its reader.
        """
        nodes = self.graph.nodes
        bit = {n.name: 1 << k for k, n in enumerate(nodes)}
        heavy = sum(bit[n.name] for n in nodes if n.phase == "forward" and n.op not in FREE)
        above: dict[str, int] = {}
        for n in nodes:
            mask = bit[n.name]
            for r in n.ins:
                mask |= above.get(r.name, 0)
            above[n.name] = mask
        below = dict(bit)
        for n in reversed(nodes):
            for r in n.ins:
                if r.name in below:
                    below[r.name] |= below[n.name]
        return frozenset(
            (ref, n.name)
            for n in nodes
            if n.phase == "forward"
            for ref in n.ins
            if ref.name in bit and not heavy & ~(above[ref.name] | below[n.name])
        )


class Piece:
    """Ops that are looked at together: one layer, or what lies outside of all."""

    def __init__(self, placements: Placements, nodes: tuple[Node, ...]) -> None:
        self.placements, self.nodes = placements, nodes
        self._kept: dict[float, dict[str, list[Option]]] = {}
        self.pairs: dict[tuple[object, ...], Pairs] = {}
        """Placements on both sides of an exchange, as `ways` wants them: for `least`, which asks again and again."""
        self.needed = 0
        """How far options had to be kept the last time."""

    @cached_property
    def least_s(self) -> float:
        """All ops at their cheapest."""
        return sum(self.placements.least_s(n) for n in self.nodes)

    @cached_property
    def readers(self) -> Counter[Ref]:
        """How many want each value of the graph, whoever is given it at the end included."""
        graph = self.placements.graph
        return Counter([*(r for n in graph.nodes for r in n.ins), *(o.ref for o in graph.outputs)])

    def kept(self, far_s: float) -> dict[str, list[Option]]:
        """By op, the options that matter, without those that cost so much more than the cheapest."""
        if far_s not in self._kept:
            near = {node.name: self._near(node, far_s) for node in self.nodes}
            self._kept[far_s] = self._told_apart(self._useful(near))
        return self._kept[far_s]

    @cached_property
    def _native(self) -> dict[Ref, set[str]]:
        """Which kinds of terms each value can be made in."""
        found: dict[Ref, set[str]] = {}
        for node in self.nodes:
            for i in range(len(node.outs)):
                terms = (p for o in self.placements.options(node) for p in o.outs[i] if isinstance(p, Partial))
                found[Ref(node.name, i)] = {p.op for p in terms}
        return found

    def _near(self, node: Node, far_s: float) -> list[Option]:
        """Options that are not far more than the cheapest, one of each kind that differs in what others see of it.

        A term of a maximum or minimum that nobody makes so would have to be made from a whole, which is one already.
        """
        every = self.placements.options(node)
        least = min(o.seconds for o in every)
        strange = []
        for i, ref in enumerate(node.ins):
            wanted = {p for o in every for p in o.ins[i]}
            made = {p for p in wanted if not isinstance(p, Partial) or p.op in ("sum", *self._native.get(ref, (p.op,)))}
            if made != wanted:
                strange.append((i, made))
        seen: dict[Any, Option] = {}
        for o in every:
            if o.seconds > least + far_s or any(not made.issuperset(o.ins[i]) for i, made in strange):
                continue
            key = (tuple(o.ins[i] for i in self.watched[node.name][0]),
                   tuple(o.outs[i] for i in self.watched[node.name][1]))  # fmt: skip
            if key not in seen or o.seconds < seen[key].seconds:
                seen[key] = o
        return list(seen.values())

    def _useful(self, kept: dict[str, list[Option]]) -> dict[str, list[Option]]:
        """Without the options of views that cut where neither the maker cuts nor any reader wants a cut.

        A view moves nothing: to cut there would be to move a tensor twice where once would do, before or behind it.
        """
        readers: dict[str, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for i, ref in enumerate(node.ins):
                readers.setdefault(ref.name, []).append((node, i))
        leaving = {o.ref.name for o in self.grads}
        views = [n for n in self.nodes if n.op in FREE and len(n.ins) == 1 and len(n.outs) == 1
                 and n.ins[0].name in kept and n.name not in leaving]  # fmt: skip
        for node in (*views, *reversed(views), *views):
            makers = [o.outs[node.ins[0].index] for o in kept[node.ins[0].name]]
            wanted = [o.ins[i] for n, i in readers.get(node.name, ()) for o in kept[n.name]]
            before = [{nd[a] for nd in makers} | {B} for a in range(len(self.placements.mesh.sizes))]
            behind = [{nd[a] for nd in wanted} for a in range(len(self.placements.mesh.sizes))]
            kept[node.name] = [
                o
                for o in kept[node.name]
                if all(
                    x in before[a] or y in behind[a] for a, (x, y) in enumerate(zip(o.ins[0], o.outs[0], strict=True))
                )
            ]
        return kept

    def _told_apart(self, kept: dict[str, list[Option]]) -> dict[str, list[Option]]:
        """One of all options between which no exchange can tell.

        What an exchange costs depends on whether two pieces are the same; those that are like none on the other side
        are all alike.
        """
        params = {o.ref: Ref(o.name) for o in self.grads}
        for _ in range(2):
            seen = {node.name: list(self._seen_of(node, kept[node.name], params)) for node in self.nodes}
            cuts: dict[Ref, list[tuple[str, list[set[Sbp]]]]] = {}
            """By tensor, for all who make or read it, the placements it may have on each axis."""
            for name, tensors in seen.items():
                for ref, nds in tensors:
                    cuts.setdefault(ref, []).append((name, [set(axis) for axis in zip(*nds, strict=True)]))
            for name, tensors in seen.items():
                rows = [()] * len(kept[name]) if not tensors else zip(
                    *(self._labels(nds, [c for n, c in cuts[ref] if n != name]) for ref, nds in tensors), strict=True
                )  # fmt: skip
                best: dict[Any, Option] = {}
                for o, key in zip(kept[name], rows, strict=True):
                    if key not in best or o.seconds < best[key].seconds:
                        best[key] = o
                kept[name] = list(best.values())
        return kept

    @staticmethod
    def _labels(nds: list[NdSbp], others: list[list[set[Sbp]]]) -> Iterable[tuple[object, ...]]:
        """Placements as those on the other side can tell them apart."""
        axes = []
        for a, axis in enumerate(zip(*nds, strict=True)):
            there: set[Sbp] = set().union(*(other[a] for other in others))
            label = {p: (p if p in there else PIECE) if isinstance(p, Split) else code(p) for p in set(axis)}
            axes.append([label[p] for p in axis])
        return zip(*axes, strict=True)

    def _seen_of(self, node: Node, found: list[Option], params: dict[Ref, Ref]) -> Iterable[tuple[Ref, list[NdSbp]]]:
        """The tensors that others see of an op, with its placement in every option; a gradient is its parameter's."""
        ins, outs = self.watched[node.name]
        for i in ins:
            yield node.ins[i], [o.ins[i] for o in found]
        for i in outs:
            ref = Ref(node.name, i)
            yield ref, [o.outs[i] for o in found]
            if ref in params:
                yield params[ref], [o.outs[i] for o in found]

    @cached_property
    def watched(self) -> dict[str, tuple[list[int], list[int]]]:
        """By op, which of its inputs come from others of the piece or are trained, and which outputs go there."""
        names = {n.name for n in self.nodes}
        trained = {o.name for o in self.grads}
        read = {r for n in self.nodes for r in n.ins} | {o.ref for o in self.grads}
        return {
            n.name: (
                [i for i, r in enumerate(n.ins) if r.name in names or r.name in trained],
                [i for i in range(len(n.outs)) if Ref(n.name, i) in read],
            )
            for n in self.nodes
        }

    @cached_property
    def grads(self) -> list[Output]:
        """Gradients that leave it."""
        names = {n.name for n in self.nodes}
        return [o for o in self.placements.graph.outputs if o.kind == "grad" and o.ref.name in names]

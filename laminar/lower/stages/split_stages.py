"""A graph cut into stages: each a graph of its own, with what it takes from the others and gives to them.

Whoever plans says where each forward op belongs. Backward ops follow: gradients flow from later stages to earlier ones,
and a backward op belongs to the latest stage, not after those its gradients come from, that has all the forward
values it reads at hand, having made or read them itself. So nothing travels back that forward has not brought, and no
activation travels for the sake of backward alone unless there is no other way.

    light    Masks, positions, casts of weights: what is cheap and made from inputs alone is made anew in every stage
             that reads it.
    batch    Leaves of the batch are inputs of whichever stage reads them: labels go to the last one by themselves.
    tied     A weight that several stages read is an input of each, and its gradient is taken apart: each stage gives
             the sum of its own terms, once per step the stages add theirs up.
    again    Ops of regions that the user checkpoints run again where they ran first, from what that stage was given.

Stages form a DAG. A cut in which two stages wait for each other is refused by the names of the ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from laminar.errors import PlanError
from laminar.ir.graph import Constant, Graph, Input, Node, Output, map_refs
from laminar.ir.ops import FREE
from laminar.ir.serial.codec import Ref
from laminar.rules.notation import call_of, calls_in

LIGHT_NUMEL = 1 << 22
"""What is made from inputs alone and is larger than this is made once and sent."""
LINEAR = FREE | {"aten._to_copy", "aten.clone", "aten.neg"}
"""Ops of one tensor through which a sum of gradients can be taken apart."""


def value_name(ref: Ref) -> str:
    """The name under which a stage is given a value that another has made."""
    return ref.name if ref.index == 0 else f"{ref.name}.{ref.index}"


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that one stage makes and another reads, once for every micro-batch."""

    ref: Ref
    src: int
    dst: int
    phase: str
    """`forward` or `backward`: which part of the source makes it."""
    first: str = ""
    """`forward` or `backward`: which part of the destination reads it first."""

    @property
    def name(self) -> str:
        """What the destination calls it."""
        return value_name(self.ref)


@dataclass(frozen=True)
class StageSplit:
    """The stages of a graph."""

    graphs: tuple[Graph, ...]
    edges: tuple[Edge, ...]
    of: dict[str, int]
    """For each op made once, its stage; light ones are in several and not named here."""
    like: dict[str, str] = field(default_factory=dict)
    """Ops that are in no stage of the whole graph but stand for one of its ops: sums of gradients, taken apart."""
    tied: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameters that several stages read, and which."""


def split_graph(graph: Graph, forward: Mapping[str, int], stages: int) -> StageSplit:
    """Cut a graph by the stage of each forward op; light ops need none."""
    cutter = _Cutter(graph, dict(forward), stages)
    # Who plans and who lowers ask for the same cuts one after the other.
    told, found = graph.notes.get("split", ((), None))
    if found is None or told != (cutter.of, stages):
        told = (dict(cutter.of), stages)
        found = cutter.split()
        graph.notes["split"] = (told, found)
    cut: StageSplit = found
    return cut


class _Cutter:
    def __init__(self, graph: Graph, forward: dict[str, int], stages: int) -> None:
        self.graph, self.stages = graph, stages
        self.inputs = {i.name: i for i in graph.inputs} | {c.name: c for c in graph.constants}
        self.light = light_ops(graph)
        self.of: dict[str, int] = {}
        for node in graph.nodes:
            if node.phase != "forward" or node.name in self.light:
                continue
            if node.name not in forward:
                raise PlanError(f"op %{node.name} belongs to no stage", at=node.where)
            if not 0 <= forward[node.name] < stages:
                raise PlanError(f"op %{node.name} is in stage {forward[node.name]}", allowed=f"0 to {stages - 1}")
            self.of[node.name] = forward[node.name]
        self._share_views("forward")
        self._keep_buffers_together()

    def _look_around(self) -> None:
        self.hand = self._at_hand()
        self.hand_bits = {name: _bits(stages) for name, stages in self.hand.items()}
        self.before = self._order()
        self.before_bits = [_bits(stages) for stages in self.before]
        self.behind_bits = [_bits(u for u, b in enumerate(self.before) if t in b) for t in range(self.stages)]
        self.like: dict[str, str] = {}

    # --- who has what

    def _share_views(self, phase: str) -> None:
        """Views are where their one reader is, or else with their tensor: the same bytes would travel twice.

        With several readers a view in one of their stages would make the others wait for that one.
        """
        leaving = {o.ref.name for o in self.graph.outputs}
        views = [n for n in self.graph.nodes if n.name in self.of and n.op in FREE and len(n.ins) == 1]
        views = [n for n in views if (n.phase == "forward") == (phase == "forward") and n.name not in leaving]
        for node in reversed(views):
            if len(readers := self._readers(node)) == 1:
                (self.of[node.name],) = readers
        for node in views:
            if len(self._readers(node)) > 1 and node.ins[0].name in self.of:
                self.of[node.name] = self.of[node.ins[0].name]

    def _readers(self, node: Node) -> set[int]:
        refs = (Ref(node.name, i) for i in range(len(node.outs)))
        return {self.of[u.name] for r in refs for u in self.graph.users.get(r, ()) if u.name in self.of}

    def _keep_buffers_together(self) -> None:
        """What only makes a buffer's new value is where the values it is made from are; both stay in one stage."""
        wanted: dict[str, set[str]] = {}
        for o in self.graph.outputs:
            wanted.setdefault(o.ref.name, set()).add(o.name if o.kind == "buffer" else "")
        for node in reversed(self.graph.nodes):
            for ref in node.ins:
                wanted.setdefault(ref.name, set()).update(wanted.get(node.name, {""}))
        only = {n: next(iter(names)) for n, names in wanted.items() if len(names) == 1 and n in self.of}
        stage: dict[str, int] = {}
        for node in self.graph.nodes:
            buffer = only.get(node.name, "")
            if buffer:
                sources = [self.of[r.name] for r in node.ins if r.name in self.of and only.get(r.name) != buffer]
                stage[buffer] = max([*sources, stage.get(buffer, -1)])
        for name, buffer in only.items():
            if buffer and stage[buffer] >= 0:
                self.of[name] = stage[buffer]

    def _at_hand(self) -> dict[str, set[int]]:
        """For each value's maker or input, the stages that make it or read it in forward."""
        hand: dict[str, set[int]] = {name: {stage} for name, stage in self.of.items()}
        for node in reversed(self.graph.nodes):
            if node.phase != "forward":
                continue
            here = hand.get(node.name, set()) if node.name in self.light else {self.of[node.name]}
            for ref in node.ins:
                hand.setdefault(ref.name, set()).update(here)
        return hand

    def _order(self) -> list[set[int]]:
        """For each stage, itself and those that must come before it; cycles are refused."""
        direct: list[dict[int, tuple[Node, Node]]] = [{} for _ in range(self.stages)]
        for node in self.graph.nodes:
            if node.name in self.of:
                for ref in node.ins:
                    src = self.of.get(ref.name, self.of[node.name])
                    if src != self.of[node.name]:
                        direct[self.of[node.name]].setdefault(src, (self.graph.by_name[ref.name], node))
        out: list[set[int]] = []
        for stage in range(self.stages):
            seen, todo = {stage}, [stage]
            while todo:
                for other in direct[todo.pop()]:
                    if other not in seen:
                        seen.add(other)
                        todo.append(other)
            out.append(seen)
        for stage, sources in enumerate(direct):
            for other, (a, b) in sources.items():
                if stage in out[other]:
                    raise PlanError(
                        f"stages {other} and {stage} wait for each other: %{b.name} reads %{a.name} of the other",
                        at=b.where,
                        next="put ops that depend on each other both ways into one stage",
                    )
        return out

    # --- backward

    def _backward(self, homes: Mapping[str, set[int]]) -> None:
        """A stage for every other op; `homes` says where ops that end in a gradient may be."""
        twins = repeated(self.graph)
        for node in self.graph.nodes:
            if node.phase != "forward" and node.name not in self.light:
                there = self.of.get(twins.get(node.name, ""))
                self.of[node.name] = self._stage(node, homes.get(node.name)) if there is None else there
        self._share_views("backward")
        self._begin_regions(twins)

    def _begin_regions(self, twins: Mapping[str, str]) -> None:
        """What a stage recomputes starts from what it was given in forward, not from what another recomputes."""

        def now(node: Node) -> Node:
            def twin(ref: Ref) -> Ref:
                apart = ref.name in twins and self.of.get(ref.name, here) != here
                return Ref(twins[ref.name], ref.index) if apart else ref

            here = self.of.get(node.name)
            return node if here is None or node.phase == "forward" else replace(node, args=map_refs(node.args, twin))

        if twins:
            self.graph = replace(self.graph, nodes=tuple(map(now, self.graph.nodes)))

    def _stage(self, node: Node, home: set[int] | None) -> int:
        below = near = far = every = (1 << self.stages) - 1  # sets of stages, as bits
        for ref in node.ins:
            maker = self.graph.by_name.get(ref.name)
            if ref.name in self.light:
                continue
            if maker is None or maker.phase == "forward":
                near &= self.hand_bits.get(ref.name, every) or every
                if maker is not None:
                    far &= self.behind_bits[self.of[ref.name]]
            elif maker.phase == "recompute":
                near &= 1 << self.of[ref.name]
                far &= self.behind_bits[self.of[ref.name]]
            else:
                below &= self.before_bits[self.of[ref.name]]
        there = _bits(home or ()) or every
        for found in (below & near & there, below & far & there, below & near, below & far):
            for t in range(found.bit_length() - 1, -1, -1):
                # The latest: one that no other comes after; of several such the last by number.
                if found >> t & 1 and found & self.behind_bits[t] == 1 << t:
                    return t
        raise PlanError(
            f"no stage can run backward op %{node.name} = {node.op}",
            at=node.where,
            next="it reads values of stages that do not follow each other: put these into one",
        )

    # --- gradients of tied weights

    def _terms(self, ref: Ref, chain: tuple[Node, ...] = ()) -> list[tuple[Ref, tuple[Node, ...]]]:
        """A gradient as a sum: each term, and the ops to run on it."""
        node = self.graph.by_name.get(ref.name)
        only = node is not None and len(self.graph.users.get(ref, ())) + self._given.get(ref, 0) <= 1
        if node is None or node.phase == "forward" or not only or len(node.outs) != 1:
            return [(ref, chain)]
        if node.op == "aten.add.Tensor" and len(node.ins) == 2 and node.args[2:] in ((), (1,)):
            a, b = node.ins
            if self.graph.specs[a] == self.graph.specs[b] == node.outs[0]:
                return [*self._terms(a, chain), *self._terms(b, chain)]
        if node.op in LINEAR and len(node.ins) == 1 and node.args[0] == node.ins[0]:
            return self._terms(node.ins[0], (node, *chain))
        return [(ref, chain)]

    def split(self) -> StageSplit:
        """The stages, once it is known where forward ops are."""
        self._look_around()
        graph = self.graph
        self._given: dict[Ref, int] = {}
        for o in graph.outputs:
            self._given[o.ref] = self._given.get(o.ref, 0) + 1
        grads = {o.name: self._terms(o.ref) for o in graph.outputs if o.kind == "grad"}
        homes: dict[str, set[int]] = {}
        for name, terms in grads.items():
            for ref, chain in terms:
                homes.setdefault(ref.name, set()).update(self.hand.get(name, set()))
                for node in chain:
                    homes.setdefault(node.name, set()).update(self.hand.get(name, set()))
        self._backward({k: v for k, v in homes.items() if v})
        outputs: list[list[Output]] = [[] for _ in range(self.stages)]
        extra: list[list[Node]] = [[] for _ in range(self.stages)]
        dropped: set[str] = set()
        for o in graph.outputs:
            if o.kind != "grad":
                outputs[self._home(o)].append(o)
                continue
            where = {self._made(ref, self.hand.get(o.name, set())) for ref, _ in grads[o.name]}
            if len(where) == 1:
                # Whole in one stage: the sums stay there as they are.
                (stage,) = where
                for node in self._above(o.ref, {ref.name for ref, _ in grads[o.name]}):
                    self.of[node.name] = stage
                outputs[stage].append(o)
                continue
            above = list(self._above(o.ref, {ref.name for ref, _ in grads[o.name]}))
            dropped |= {n.name for n in above}
            for stage in sorted(where):
                mine = [t for t in grads[o.name] if self._made(t[0], self.hand.get(o.name, set())) == stage]
                outputs[stage].append(replace(o, ref=self._summed(o, mine, above, stage, extra[stage])))
        for name in dropped:
            self.of.pop(name, None)
        return self._built(outputs, extra, dropped)

    def _home(self, o: Output) -> int:
        if o.ref.name in self.of:
            return self.of[o.ref.name]
        return max(self.hand.get(o.name, set()) | self.hand.get(o.ref.name, set()), default=0)

    def _made(self, ref: Ref, readers: set[int]) -> int:
        """Where a term of a gradient is wanted: where it is made, or else where its parameter is read."""
        made = self.of.get(ref.name)
        if made is None or (readers and made not in readers):
            return max([r for r in readers if made is not None and r in self.before[made]] or readers, default=0)
        return made

    def _above(self, ref: Ref, leaves: set[str]) -> Iterable[Node]:
        """Sums and linear ops between the terms of a gradient and its output."""
        if ref.name in leaves or ref.name not in self.graph.by_name:
            return
        node = self.graph.by_name[ref.name]
        yield node
        for r in node.ins:
            yield from self._above(r, leaves)

    def _summed(
        self, o: Output, terms: list[tuple[Ref, tuple[Node, ...]]], above: list[Node], stage: int, extra: list[Node]
    ) -> Ref:
        """The sum of one stage's terms, as new ops."""
        total: Ref | None = None
        adds = [n for n in above if n.op == "aten.add.Tensor"]
        for k, (ref, chain) in enumerate(terms):
            for node in chain:
                name = f"{node.name}_s{stage}_{k}"
                extra.append(replace(node, name=name, args=(ref, *node.args[1:])))
                self.like[name], ref = node.name, Ref(name)
            if total is None:
                total = ref
                continue
            name = f"{adds[0].name}_s{stage}_{k}"
            spec = self.graph.specs[o.ref]
            extra.append(replace(adds[0], name=name, args=(total, ref, *adds[0].args[2:]), outs=(spec,)))
            self.like[name], total = adds[0].name, Ref(name)
        assert total is not None
        return total

    # --- the pieces

    def _built(self, outputs: list[list[Output]], extra: list[list[Node]], dropped: set[str]) -> StageSplit:
        graph = self.graph
        edges: dict[tuple[Ref, int], Edge] = {}
        needed = [self._needed(stage, names, outputs, extra) for stage, names in enumerate(self._by_stage())]
        for stage in range(self.stages):
            reads = [(r, n.phase) for n in needed[stage] for r in n.ins]
            reads += [(r, n.phase) for n in extra[stage] for r in n.ins]
            reads += [(o.ref, "backward") for o in outputs[stage]]
            for ref, phase in reads:
                src = self.of.get(ref.name)
                if src is None or src == stage:
                    continue
                made = "forward" if graph.by_name[ref.name].phase == "forward" else "backward"
                first = "forward" if phase == "forward" else "backward"
                known = edges.get((ref, stage))
                if known is None or (known.first == "backward" and first == "forward"):
                    edges[ref, stage] = Edge(ref, src, stage, made, first)
        into: list[list[Edge]] = [[] for _ in range(self.stages)]
        out: list[list[Edge]] = [[] for _ in range(self.stages)]
        for edge in edges.values():
            into[edge.dst].append(edge)
            out[edge.src].append(edge)
        graphs = [self._graph(needed[s], extra[s], outputs[s], into[s], out[s]) for s in range(self.stages)]
        readers: dict[str, list[int]] = {}
        for s, own in enumerate(graphs):
            for item in own.inputs:
                readers.setdefault(item.name, []).append(s)
        tied = {i.name: tuple(where) for i in graph.of_kind("param") if len(where := readers.get(i.name, [])) > 1}
        return StageSplit(tuple(graphs), tuple(edges.values()), dict(self.of), dict(self.like), tied)

    def _by_stage(self) -> list[list[int]]:
        """For each stage the numbers of its ops, in order, and those of light ones, which any may need."""
        mine: list[list[int]] = [[] for _ in range(self.stages)]
        light = [k for k, n in enumerate(self.graph.nodes) if n.name in self.light and n.name not in self.of]
        for k, node in enumerate(self.graph.nodes):
            if node.name in self.of:
                mine[self.of[node.name]].append(k)
        return [sorted(mine[s] + light) for s in range(self.stages)]

    def _needed(
        self, stage: int, numbers: list[int], outputs: list[list[Output]], extra: list[list[Node]]
    ) -> list[Node]:
        """The ops of a stage, and the light ones that they or its outputs read, in order."""
        nodes = [self.graph.nodes[k] for k in numbers]
        wanted = {o.ref.name for o in outputs[stage]}
        mine = {n.name for n in nodes if self.of.get(n.name) == stage}
        own = {n.name for n in extra[stage]}
        for node in reversed([*nodes, *extra[stage]]):
            if node.name in self.light and node.name in wanted:
                mine.add(node.name)
            if node.name in mine or node.name in own:
                mine |= {r.name for r in node.ins if r.name in self.light}
        return [n for n in nodes if n.name in mine]

    def _graph(
        self, needed: list[Node], extra: list[Node], outs: list[Output], into: list[Edge], out: list[Edge]
    ) -> Graph:
        graph = self.graph
        taken = {e.ref: e.name for e in into}

        def moved(ref: Ref) -> Ref:
            return Ref(taken[ref]) if ref in taken else ref

        nodes = [
            replace(n, args=map_refs(n.args, moved)) if any(r in taken for r in n.ins) else n for n in [*needed, *extra]
        ]
        read = {r.name for n in nodes for r in n.ins} | {moved(o.ref).name for o in outs}
        read |= {o.name for o in outs if o.kind == "buffer"}  # also one that is written without being read
        kept: list[Any] = [self.inputs[name] for name in self.inputs if name in read]
        given = [Input(name, "given", graph.specs[ref]) for ref, name in taken.items()]
        sent = dict.fromkeys(e.ref for e in out)
        outputs = [replace(o, ref=moved(o.ref)) for o in outs] + [Output(value_name(r), "sent", r) for r in sent]
        names = {n.name for n in needed}
        own = Graph(
            inputs=(*(i for i in kept if isinstance(i, Input)), *given),
            constants=tuple(c for c in kept if isinstance(c, Constant)),
            nodes=tuple(nodes),
            outputs=tuple(outputs),
            batch_tree=graph.batch_tree,
            probed=tuple((name, found) for name, found in graph.probed if name in names),
        )
        calls = calls_in(graph)  # what passes between stages has another name, and is the same otherwise
        own.notes["calls"] = {n.name: calls[n.name] if n.name in calls else call_of(n, own.specs) for n in nodes}
        return own


def _bits(stages: Iterable[int]) -> int:
    """A set of stages as a number."""
    out = 0
    for stage in stages:
        out |= 1 << stage
    return out


def repeated(graph: Graph) -> dict[str, str]:
    """For ops that run again, as the user's checkpoints ask for, the forward op that did the same before."""
    same: dict[str, str] = {}
    """The forward op that makes what an op makes."""
    seen: dict[object, str] = {}
    for node in graph.nodes:
        if node.phase != "backward":
            args = map_refs(node.args, lambda r: Ref(same.get(r.name, r.name), r.index))
            key = (node.op, repr(args))
            if node.phase == "forward":
                seen.setdefault(key, node.name)
            elif key in seen:
                same[node.name] = seen[key]
    return same


def light_ops(graph: Graph) -> frozenset[str]:
    """Ops that any stage may run for itself: cheap, and made from inputs alone.

    From constants, the batch and keys, anything small that draws nothing large and multiplies no matrices; from
    parameters and buffers only views and casts, which belong to whoever reads the weight.
    """
    found: frozenset[str] | None = graph.notes.get("light")
    if found is None:
        found = graph.notes["light"] = frozenset(_light_ops(graph))
    return found


def _light_ops(graph: Graph) -> set[str]:
    free = {i.name for i in graph.inputs if i.kind in ("batch", "scale", "rng")} | {c.name for c in graph.constants}
    stored = {i.name for i in graph.inputs if i.kind in ("param", "buffer")}
    out: set[str] = set()
    written = {o.ref.name for o in graph.outputs if o.kind == "buffer"}
    for node in graph.nodes:
        names = {r.name for r in node.ins}
        cheap = (node.op in FREE or node.op == "aten._to_copy") and len(node.outs) == 1
        small = sum(o.numel for o in node.outs if o) <= LIGHT_NUMEL and not node.op.startswith("laminar.")
        if node.name in written:
            continue
        if names <= free and (cheap or small):
            free.add(node.name)
            out.add(node.name)
        elif names <= stored and cheap and node.phase == "forward":
            stored.add(node.name)
            out.add(node.name)
    return out

"""A graph looked up, and new ops written beside it: what a rewrite reads from and writes to.

`Lookup` knows who makes and who reads each value. `Writer` writes ops on whole tensors and knows the shortest way to
say a thing: what is there already in the same phase is used again, a turn of a turn is one turn or none, a view of a
view one view, a `cat` of all pieces of a value is the value, a `cat` of transposes the transpose of a `cat` (so that
what is copied lies as it is stored). Forward and backward write apart: a packed weight that both read would have to
lie in memory between them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from laminar.ir.graph import Graph, Node, map_refs
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.rules.ops.expand import Sheet

TURNS = ("aten.t", "aten.transpose.int", "aten.permute")
RESHAPING = ("aten.view", "aten._unsafe_view", "aten.reshape")
TensorShape = tuple[int, ...]
_REWRITTEN = re.compile(r"_[wk]\d+$")
_PACKED = re.compile(r"_k\d+$")


def is_rewritten(name: str) -> bool:
    """Whether a node bears a name that rewriting gave it."""
    return _REWRITTEN.search(name) is not None


def is_packed(name: str) -> bool:
    """Whether a node was written by a rule that merges or splits."""
    return _PACKED.search(name) is not None


class NoFit(Exception):
    """What a rule wants to write has no meaning for these shapes: the site is none."""


class Note:
    """What is worked out once about a node, and holds as long as the node stays as it is."""

    __slots__ = ("key", "node", "reads", "text", "work")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.reads = node.ins
        self.key = (node.op, repr(node.args), node.phase)
        """Equal for equal ops on equal values."""
        self.text = repr((node.op, map_refs(node.args, lambda r: "."), node.phase))
        """The op without what it reads."""
        self.work: Any = None
        """Left to whoever prices nodes."""


class Lookup:
    """Who makes and who reads what in a graph; what is known of nodes that stayed is taken from the graph before."""

    def __init__(self, graph: Graph, before: Lookup | None = None) -> None:
        self.graph = graph
        self.specs: Mapping[Ref, TensorSpec] = graph.specs
        self.makers = graph.by_name
        known = before.notes if before is not None else {}
        self.notes: dict[str, Note] = {
            n.name: note if (note := known.get(n.name)) is not None and note.node is n else Note(n) for n in graph.nodes
        }
        self.position = {node.name: k for k, node in enumerate(graph.nodes)}
        self.kept = {o.ref for o in graph.outputs}
        """What the step gives back."""
        self.inputs = {i.name: i for i in graph.inputs}
        self.given = {o.ref: o.name for o in graph.outputs if o.kind == "grad"}
        """Gradients, by value: of which parameter."""
        self.rewritten = sum(map(is_rewritten, self.makers))
        self.written = {note.key: name for name, note in reversed(self.notes.items())}
        self.of_op: dict[str, list[Node]] = {}
        self.users: dict[Ref, list[Node]] = {}
        for name, note in self.notes.items():
            node = self.makers[name]
            self.of_op.setdefault(node.op, []).append(node)
            for ref in dict.fromkeys(note.reads):
                self.users.setdefault(ref, []).append(node)

    def identity(self) -> int:
        """Equal, within this process, for graphs that do the same ops on the same values, whatever nodes are called."""
        colour = {r: hash(r.name) for r in self.specs if r.name not in self.makers}
        for name, note in self.notes.items():
            mine = hash((note.text, *(colour[r] for r in note.reads)))
            for i in range(len(note.node.outs)):
                colour[Ref(name, i)] = hash((mine, i))
        return hash(tuple(colour[o.ref] for o in self.graph.outputs))

    def with_op(self, ops: Sequence[str]) -> list[Node]:
        """Nodes of these ops, in order."""
        found = [n for op in ops for n in self.of_op.get(op, ())]
        return sorted(found, key=lambda n: self.position[n.name]) if len(ops) > 1 else found

    def maker(self, ref: Ref, *ops: str) -> Node | None:
        """The node whose first result this is, if its op is one of these."""
        node = self.makers.get(ref.name)
        return node if node is not None and ref.index == 0 and (not ops or node.op in ops) else None

    def behind(self, ref: Ref) -> Ref:
        """The value that this one is another look at, or a cast of."""
        while (node := self.maker(ref, *RESHAPING, *TURNS, "aten._to_copy")) is not None:
            ref = node.args[0]
        return ref

    def gradient(self, ref: Ref) -> str | None:
        """The parameter whose gradient a value is, or becomes by being looked at otherwise or cast."""
        while ref not in self.given:
            readers = self.users.get(ref, [])
            if len(readers) != 1 or readers[0].op not in (*RESHAPING, *TURNS, "aten._to_copy"):
                return None
            ref = Ref(readers[0].name)
        return self.given[ref]

    def uses(self, ref: Ref) -> int:
        """How many read a value, the step's own results included."""
        return len(self.users.get(ref, ())) + (ref in self.kept)

    def depends(self, name: str, sources: set[str]) -> bool:
        """Whether a node is made, in any number of steps, from one of these nodes."""
        first = min(self.position[s] for s in sources)
        todo, seen = [name], set()
        while todo:
            for ref in self.notes[todo.pop()].reads:
                if ref.name in sources:
                    return True
                if ref.name not in seen and self.position.get(ref.name, -1) > first:
                    seen.add(ref.name)
                    todo.append(ref.name)
        return False


class _Specs(dict[Ref, TensorSpec]):
    """Specs of what is written, on top of those of the graph."""

    def __init__(self, below: Mapping[Ref, TensorSpec]) -> None:
        super().__init__()
        self.below = below

    def __missing__(self, ref: Ref) -> TensorSpec:
        return self.below[ref]


class Writer(Sheet):
    """New ops, signed with whose line they are."""

    def __init__(self, look: Lookup, packing: bool = False) -> None:
        super().__init__("")
        self.look = look
        self.mark = "k" if packing else "w"
        """What names are given: those of rules that merge or split can be told from others."""
        self.specs = _Specs(look.specs)
        self.made: dict[tuple[str, str, str], str] = {}
        self.new: dict[str, Node] = {}
        self.at: dict[str, int] = {}
        """Where in the old order each new node belongs."""
        self.leaving: set[str] = set()
        """Nodes that are being replaced, and so may not be used again."""
        self.where, self.module, self.phase, self.position = "", "", "forward", 0
        self.number = itertools.count(look.rewritten)

    def sign(self, nodes: Sequence[Node]) -> None:
        """What is written from here on stands for these nodes."""
        first = min(nodes, key=lambda n: self.look.position[n.name])
        self.where, self.phase, self.position = first.where, first.phase, self.look.position[first.name]
        self.module = common_module([n.module for n in nodes])

    def emit(self, op: str, args: tuple[Any, ...], *outs: TensorSpec | None) -> Ref:
        """One more node, or the equal one there is; its first output."""
        key = (op, repr(args), self.phase)
        there = self.made.get(key) or self.look.written.get(key)
        if there is not None and there not in self.leaving:
            return Ref(there)
        stem = f"{op.split('.')[1].strip('_')}_{self.mark}"
        name = f"{stem}{next(self.number)}"
        while name in self.look.makers or Ref(name) in self.look.specs:
            name = f"{stem}{next(self.number)}"
        node = Node(name, op, args, outs, self.where, self.module, self.phase)
        self.made[key], self.new[name], self.at[name] = name, node, self.position
        self.nodes.append(node)
        self.specs.update({Ref(name, i): spec for i, spec in enumerate(outs) if spec is not None})
        return Ref(name)

    def maker(self, ref: Ref, *ops: str) -> Node | None:
        """The node, old or new, whose first result this is, if its op is one of these."""
        node = self.new.get(ref.name) or self.look.makers.get(ref.name)
        return node if node is not None and ref.index == 0 and (not ops or node.op in ops) else None

    # --- saying things briefly ---------------------------------------------------------------

    def shaped(self, x: Ref, shape: TensorShape) -> Ref:
        """The same elements in another shape, seen directly."""
        if self.specs[x].shape == shape:
            return x
        before = self.maker(x, *RESHAPING)
        if before is not None and before.name not in self.leaving:
            x = before.args[0]
        if math.prod(shape) != self.specs[x].numel:
            raise NoFit
        return super().shaped(x, shape)

    def turn(self, x: Ref, order: TensorShape) -> Ref:
        """Dims in another order."""
        before = self.maker(x)
        turned = turn_of(before, self.specs) if before is not None and before.name not in self.leaving else None
        if before is not None and turned is not None:
            x, order = before.args[0], compose(turned, order)
        spec = self.specs[x]
        if len(order) != len(spec.shape):
            raise NoFit
        out = TensorSpec(tuple(spec.shape[d] for d in order), spec.dtype)
        moved = [d for d, o in enumerate(order) if d != o]
        if not moved:
            return x
        if order == (1, 0):
            return self.emit("aten.t", (x,), out)
        if len(moved) == 2:
            return self.emit("aten.transpose.int", (x, *moved), out)
        return self.emit("aten.permute", (x, order), out)

    def cat(self, parts: Sequence[Ref], dim: int) -> Ref:
        """All parts as one, along a dim that may count from the last."""
        specs = [self.specs[p] for p in parts]
        rank = len(specs[0].shape)
        if not -rank <= dim < rank or len({s.dtype for s in specs}) > 1 or any(len(s.shape) != rank for s in specs):
            raise NoFit
        d = dim % rank
        if len({(s.shape[:d], s.shape[d + 1 :]) for s in specs}) > 1:
            raise NoFit
        whole = self._whole(parts, d)
        if whole is not None:
            return whole
        turned = [self.maker(p, "aten.t") for p in parts]
        if all(t is not None and t.name not in self.leaving for t in turned):
            return self.turn(self.cat([t.args[0] for t in turned if t is not None], 1 - d), (1, 0))
        shape = (*specs[0].shape[:d], sum(s.shape[d] for s in specs), *specs[0].shape[d + 1 :])
        return self.emit("aten.cat", (tuple(parts), d), TensorSpec(shape, specs[0].dtype))

    def _whole(self, parts: Sequence[Ref], d: int) -> Ref | None:
        """The value that these are all pieces of, in order."""
        node = self.new.get(parts[0].name) or self.look.makers.get(parts[0].name)
        if node is None or node.name in self.leaving or node.op not in SPLITS or len(node.outs) != len(parts):
            return None
        source: Ref = node.args[0]
        same = tuple(parts) == tuple(Ref(node.name, i) for i in range(len(parts)))
        return source if same and split_dim(node, self.specs) == d else None

    def part(self, x: Ref, dim: int, sizes: TensorShape, member: int) -> Ref:
        """One of the pieces of these sizes that a value is cut into."""
        spec = self.specs[x]
        rank = len(spec.shape)
        if not -rank <= dim < rank or spec.shape[dim % rank] != sum(sizes):
            raise NoFit
        d = dim % rank
        before = self.maker(x, "aten.cat")
        if before is not None and before.name not in self.leaving and (before.args[1] or 0) % rank == d:
            parts = before.args[0]
            if tuple(self.specs[p].shape[d] for p in parts) == sizes:
                return parts[member]  # type: ignore[no-any-return]
        if rank == 2 and (turned := self.maker(x, "aten.t")) is not None and turned.name not in self.leaving:
            return self.turn(self.part(turned.args[0], 1 - d, sizes, member), (1, 0))
        outs = [TensorSpec((*spec.shape[:d], n, *spec.shape[d + 1 :]), spec.dtype) for n in sizes]
        even = len(set(sizes)) == 1
        op, cut = ("aten.split.Tensor", sizes[0]) if even else ("aten.split_with_sizes", sizes)
        return Ref(self.emit(op, (x, cut, d), *outs).name, member)

    def total(self, terms: Sequence[Ref]) -> Ref:
        """The sum of terms of one shape."""
        out = terms[0]
        for term in terms[1:]:
            if self.specs[term] != self.specs[out]:
                raise NoFit
            out = self.add(out, term)
        return out


SPLITS = ("aten.split.Tensor", "aten.split_with_sizes")


def split_dim(node: Node, specs: Mapping[Ref, TensorSpec]) -> int:
    """The dim that a split cuts."""
    dim = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    return int(dim) % len(specs[node.args[0]].shape)


def turn_of(node: Node, specs: Mapping[Ref, TensorSpec]) -> TensorShape | None:
    """The order of dims that a node brings about, if that is all it does."""
    if node.op not in TURNS:
        return None
    rank = len(specs[node.args[0]].shape)
    if node.op == "aten.permute":
        return tuple(int(d) % rank for d in node.args[1])
    order = list(range(rank))
    if rank > 1:
        a, b = (0, 1) if node.op == "aten.t" else (node.args[1] % rank, node.args[2] % rank)
        order[a], order[b] = order[b], order[a]
    return tuple(order)


def compose(first: TensorShape, then: TensorShape) -> TensorShape:
    """One order of dims for two, one after the other."""
    if len(first) != len(then):
        raise NoFit
    return tuple(first[d] for d in then)


def common_module(paths: Sequence[str]) -> str:
    """The innermost module that all of these are in."""
    split = [p.split(".") if p else [] for p in paths]
    shared = [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, zip(*split, strict=False))]
    return ".".join(shared)

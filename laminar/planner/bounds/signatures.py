"""What the ops of a piece of a graph can do on a mesh, and which of it has to be looked at to find the least.

An option of an op is one signature for each axis, and the price of the local call. There are dozens on two axes, too
many for elimination, and most of them can't matter:

    far        Those that cost much more than the cheapest: `least` accounts for them.
    terms      Terms of a maximum that nobody makes so would have to be made from a whole, which is one already.
    views      A view moves nothing. To cut there where neither its maker cuts nor any reader wants a cut would be to
               move a tensor twice where once would do, before or behind it.
    told apart What an exchange costs depends on whether two pieces are the same (`ways`); pieces that are like none
               on the other side are all alike, and one stands for them.

Options are kept as arrays of numbers (`ways.number`): a row for each, a column for each tensor and axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from laminar.cost.machine import ALONE, Machine
from laminar.cost.ops.families import COMPUTES, family_of
from laminar.ir.graph import Graph, Node, Output
from laminar.ir.mesh import Mesh
from laminar.ir.ops import FREE
from laminar.ir.sbp import NdSbp, Split
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.placement.complete import circulating
from laminar.planner.bounds.boxing_bound import COLUMN, ROW, Pairs, known, number, pairs_of, placement
from laminar.planner.bounds.exposed_exchanges import Exposed
from laminar.rules.notation import Call, Signature, call_of, localise
from laminar.rules.signing import Blocks, options, probed_signatures

Rules = tuple[Blocks, tuple[Signature, ...]]
"""What signatures depend on besides the call: block counts that come up, and what probing has found."""


class Option(NamedTuple):
    """A signature for each axis as placements of all tensors, and what the op then costs on a rank."""

    ins: tuple[NdSbp, ...]
    outs: tuple[NdSbp, ...]
    seconds: float


class Rows(NamedTuple):
    """Options of an op: by option, tensor (those read, then those made) and axis the number of a placement."""

    placed: np.ndarray
    seconds: np.ndarray

    def some(self, which: np.ndarray) -> Rows:
        """So many of them."""
        return Rows(self.placed[which], self.seconds[which])


class TensorExchange(NamedTuple):
    """A tensor between one who has it and one who wants it, as far as they can tell placements apart."""

    ones: np.ndarray
    """By option of who has it, the class of its placement."""
    others: np.ndarray
    """By option of who wants it."""
    pairs: Pairs
    """From each class to each."""


class SignaturePrices:
    """Local calls of one model and what they cost, asked once for all meshes."""

    def __init__(self, updated: int = 0) -> None:
        self.updated = updated
        """Elements that a rank updates at least."""
        self.needed: dict[tuple[Mesh, bool], int] = {}
        """By mesh, for layers and for the rest, how far options had to be kept the last time."""
        self.worths: dict[tuple[Mesh, bool], float] = {}
        """By mesh, with parts and without, what `least` has found to be a good worth of values between layers."""
        self.exposed: dict[str, Exposed] = {}
        """By graph."""
        self._rows: dict[Any, Rows] = {}
        self._seconds: dict[tuple[str | None, Call, tuple[str, ...]], float] = {}

    def rows(
        self, call: Call, sizes: tuple[int, ...], rules: Rules, machine: Machine | None, marks: tuple[str, ...] = ()
    ) -> Rows:
        """What a call can do on axes of these sizes; without a machine, for nothing."""
        key = (call, sizes, rules, machine.ops.section if machine else None, marks)
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = self._made(call, sizes, rules, machine, marks)
        return found

    def _made(
        self, call: Call, sizes: tuple[int, ...], rules: Rules, machine: Machine | None, marks: tuple[str, ...]
    ) -> Rows:
        signed = options(call, sizes[0], *rules)
        tensors = len(call.ins) + len(call.outs)
        numbers = np.array([[number(p) for p in (*s.ins, *s.outs)] for s in signed], dtype=np.intp)
        numbers = numbers.reshape(len(signed), tensors)
        local: dict[Any, Call] = {}
        """By what is cut of which tensor: terms and wholes are as large as each other."""

        def cut(signature: Signature) -> Call:
            key = tuple(p if isinstance(p, Split) else None for p in (*signature.ins, *signature.outs))
            found = local.get(key)
            if found is None:
                found = local[key] = localise(call, signature, sizes[0])
            return found

        if len(sizes) == 1:
            every = [self.seconds(machine, cut(s), marks) if machine else 0.0 for s in signed]
            return Rows(numbers[:, :, None], np.array(every))
        behind = [self.rows(cut(s), sizes[1:], rules, machine, marks) for s in signed]
        counts = [len(rows.seconds) for rows in behind]
        first = np.repeat(numbers, counts, axis=0)[:, :, None]
        return Rows(
            np.concatenate([first, np.concatenate([rows.placed for rows in behind])], axis=2),
            np.concatenate([rows.seconds for rows in behind]),
        )

    def seconds(self, machine: Machine, call: Call, marks: tuple[str, ...] = ()) -> float:
        """Of a call by itself; with marks (`cost.layout`), the less of what it takes so and otherwise."""
        key = (machine.ops.section, call, marks)
        found = self._seconds.get(key)
        if found is None:
            ways = ((), marks) if any(marks) else ((),)
            found = self._seconds[key] = min(machine.op(call, way).seconds for way in ways)
        return found


class Placements:
    """The ops of one graph on one mesh: what each can do, at which price."""

    settled = False
    """Whether it was somebody else who chose what ops do: then what nobody would choose counts as well."""

    def __init__(self, graph: Graph, machine: Machine, mesh: Mesh, prices: SignaturePrices | None = None) -> None:
        self.graph, self.machine, self.mesh, self.prices = graph, machine, mesh, prices or SignaturePrices()
        self._rows: dict[str, Rows] = {}

    def rows(self, node: Node) -> Rows:
        """Everything an op can do."""
        found = self._rows.get(node.name)
        if found is None:
            rules = (self.blocks, self.probed.get(node.name, ()))
            machine = self.machine if self.counted(node) else None
            marks = tuple("e" if r.name in self.repeated else "" for r in node.ins) if machine else ()
            marks = marks if any(marks) else ()
            call = self.calls[node.name]
            found = self._rows[node.name] = self.prices.rows(call, self.mesh.sizes, rules, machine, marks)
        return found

    def options(self, node: Node) -> list[Option]:
        """The same as placements."""
        found, reads = self.rows(node), len(node.ins)
        out = []
        for row, seconds in zip(found.placed, found.seconds, strict=True):
            nds = [tuple(placement(int(k)) for k in tensor) for tensor in row]
            out.append(Option(tuple(nds[:reads]), tuple(nds[reads:]), float(seconds)))
        return out

    def least_s(self, node: Node) -> float:
        """What an op costs at its cheapest."""
        return float(self.rows(node).seconds.min()) if self.counted(node) else 0.0

    def lie(self, param: str) -> tuple[np.ndarray, np.ndarray] | None:
        """How a parameter is stored and owned, by number, where that is settled."""
        return None

    def counted(self, node: Node) -> bool:
        """Whether an op has a price of its own; others are counted with the kernel that they are part of."""
        own = family_of(node.op) in COMPUTES or node.op in ALONE
        return not self.machine.fused or (own and node.op not in FREE)

    @cached_property
    def calls(self) -> dict[str, Call]:
        """By name."""
        return {n.name: call_of(n, self.graph.specs) for n in self.graph.nodes}

    @cached_property
    def repeated(self) -> frozenset[str]:
        """Ops whose result may be one number that is read again and again, which takes less than reading as many."""
        found: set[str] = set()
        if not self.machine.fused:
            for n in self.graph.nodes:
                if n.op == "aten.expand" or (n.op in FREE and any(r.name in found for r in n.ins)):
                    found.add(n.name)
        return frozenset(found)

    @cached_property
    def blocks(self) -> Blocks:
        """Block counts that come up."""
        return circulating(self.calls)

    @cached_property
    def probed(self) -> dict[str, tuple[Signature, ...]]:
        """Signatures of ops that no rule knows."""
        return probed_signatures(self.graph)

    @cached_property
    def exposed(self) -> Exposed:
        """Exchanges that a step waits for, whatever its placements."""
        found = self.prices.exposed.get(self.graph.hash)
        if found is None:
            found = self.prices.exposed[self.graph.hash] = Exposed(self.graph)
        return found

    def beside_s(self, nodes: Sequence[Node]) -> float:
        """At most what is counted of the work of these ops."""
        found = 0.0
        for node in nodes:
            if self.counted(node):
                found += float(self.rows(node).seconds.max())
            else:
                specs = [self.graph.specs[r] for r in node.ins] + [s for s in node.outs if s is not None]
                found += self.machine.kernel(sum(s.nbytes for s in specs), None).seconds
        return found


class Piece:
    """Ops that are looked at together: one layer, or what lies outside of all."""

    def __init__(self, placements: Placements, nodes: tuple[Node, ...], loops: dict[Ref, Ref] | None = None) -> None:
        """`loops`: of a layer, for each value that it reads from a neighbour, the one of its own that is like it."""
        self.placements, self.nodes, self.loops = placements, nodes, loops or {}
        self._kept: dict[float, dict[str, Rows]] = {}
        self.exchanges: dict[tuple[object, ...], TensorExchange] = {}
        """What can be told apart on both sides of an exchange: for `least`, which asks again and again."""
        self._lies: dict[Ref, np.ndarray] = {}
        self._kinds: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}
        self.needed = placements.prices.needed.get((placements.mesh, bool(self.loops)), 0)
        """How far options had to be kept the last time, with micro-batches of another size to begin with."""

    @cached_property
    def least_s(self) -> float:
        """All ops at their cheapest."""
        return sum(self.placements.least_s(n) for n in self.nodes)

    @cached_property
    def readers(self) -> Counter[Ref]:
        """How many want each value of the graph, whoever is given it at the end included."""
        graph = self.placements.graph
        return Counter([*(r for n in graph.nodes for r in n.ins), *(o.ref for o in graph.outputs)])

    def kept(self, far_s: float) -> dict[str, Rows]:
        """By op, the options that matter, without those that cost so much more than the cheapest."""
        if far_s not in self._kept:
            near = {node.name: self._near(node, far_s) for node in self.nodes}
            self._kept[far_s] = near if self.placements.settled else self._useful(near)
        return self._kept[far_s]

    def exchange(self, key: tuple[object, ...], ones: np.ndarray, others: np.ndarray) -> TensorExchange:
        """Between the placements of options on both sides; asked again by its key."""
        key = (*key, self.needed)
        found = self.exchanges.get(key)
        if found is None:
            one, here = told_apart(ones, others, ROW)
            other, there = told_apart(others, ones, COLUMN)
            found = self.exchanges[key] = TensorExchange(one, other, pairs_of(here, there))
        return found

    def lies(self, own: Ref) -> np.ndarray:
        """All ways in which a value that passes from layer to layer can have been left, by whatever option."""
        found = self._lies.get(own)
        if found is None:
            maker = self.placements.graph.by_name[own.name]
            placed = self.placements.rows(maker).placed[:, len(maker.ins) + own.index]
            found = self._lies[own] = np.unique(placed, axis=0)
        return found

    def kinds(self, grad: Output, spec: TensorSpec, seen: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(stored, owned): on each axis both whole, or the owned one a piece, or both the same piece."""
        key = ("kinds", grad.ref, self.needed)
        found = self._kinds.get(key)
        if found is None:
            found = self.placements.lie(grad.name)
        if found is not None:
            return found
        ways: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
        for axis, parts in enumerate(self.placements.mesh.sizes):
            pieces = [int(k) for k in np.flatnonzero(_among([placed[:, axis] for placed in seen])) if k > 3]
            # Pieces that nobody reads or makes are all alike.
            every = [number(Split(d)) for d, n in enumerate(spec.shape) if n >= parts]
            pieces += [k for k in every if k not in pieces][:1]
            kinds = [(0, 0), *((0, k) for k in pieces), *((k, k) for k in pieces)]
            ways = [((*a, x), (*b, y)) for a, b in ways for x, y in kinds]
        stored, owned = (np.array(side, dtype=np.intp) for side in zip(*ways, strict=True))
        self._kinds[key] = stored, owned
        return stored, owned

    @cached_property
    def _native(self) -> dict[Ref, np.ndarray]:
        """Which kinds of terms each value can be made in, by number."""
        found: dict[Ref, np.ndarray] = {}
        for node in self.nodes:
            placed = self.placements.rows(node).placed
            for i in range(len(node.outs)):
                made = np.zeros(4, dtype=bool)
                made[np.minimum(placed[:, len(node.ins) + i], 3)[placed[:, len(node.ins) + i] < 4]] = True
                found[Ref(node.name, i)] = made
        return found

    def _near(self, node: Node, far_s: float) -> Rows:
        """Options that are not far more than the cheapest, one of each kind that differs in what others see of it.

        A term of a maximum or minimum that nobody makes so would have to be made from a whole, which is one already.
        """
        every = self.placements.rows(node)
        fits = every.seconds <= every.seconds.min() + far_s
        for i, ref in enumerate(node.ins):
            if ref in self._native and not self.placements.settled:
                wanted = every.placed[:, i]
                strange = [k for k in (2, 3) if not self._native[ref][k]]
                for k in strange:
                    fits &= ~(wanted == k).any(1)
        watched = self.watched[node.name]
        seen = every.placed[:, watched].reshape(len(fits), -1)
        which = np.flatnonzero(fits)
        order = which[np.lexsort((every.seconds[which], *seen[which].T))]
        first = np.ones(len(order), dtype=bool)
        first[1:] = (seen[order[1:]] != seen[order[:-1]]).any(1)
        return every.some(np.sort(order[first]))

    def _useful(self, kept: dict[str, Rows]) -> dict[str, Rows]:
        """Without the options of views that cut where neither the maker cuts nor any reader wants a cut.

        A view moves nothing: to cut there would be to move a tensor twice where once would do, before or behind it.
        """
        readers: dict[str, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for i, ref in enumerate(node.ins):
                readers.setdefault(ref.name, []).append((node, i))
        at = {node.name: node for node in self.nodes}
        leaving = {o.ref.name for o in self.grads}
        views = [
            n
            for n in self.nodes
            if n.op in FREE and len(n.ins) == 1 and len(n.outs) == 1 and n.ins[0].name in kept and n.name not in leaving
        ]
        for node in (*views, *reversed(views), *views):
            maker = at[node.ins[0].name]
            made = kept[maker.name].placed[:, len(maker.ins) + node.ins[0].index]
            wanted = [kept[n.name].placed[:, i] for n, i in readers.get(node.name, ())]
            mine = kept[node.name]
            good = np.ones(len(mine.seconds), dtype=bool)
            for axis in range(made.shape[1]):
                before, behind = (
                    _among([made[:, axis], np.zeros(1, dtype=np.intp)]),
                    _among([w[:, axis] for w in wanted]),
                )
                good &= before[mine.placed[:, 0, axis]] | behind[mine.placed[:, 1, axis]]
            kept[node.name] = mine.some(good)
        return kept

    @cached_property
    def watched(self) -> dict[str, list[int]]:
        """By op, which of its tensors come from others of the piece or go there, or are trained."""
        names = {n.name for n in self.nodes}
        trained = {o.name for o in self.grads}
        read = {r for n in self.nodes for r in n.ins} | {o.ref for o in self.grads} | {*self.loops.values()}
        return {
            n.name: [
                *(i for i, r in enumerate(n.ins) if r.name in names or r.name in trained or r in self.loops),
                *(len(n.ins) + i for i in range(len(n.outs)) if Ref(n.name, i) in read),
            ]
            for n in self.nodes
        }

    @cached_property
    def grads(self) -> list[Output]:
        """Gradients that leave it."""
        names = {n.name for n in self.nodes}
        return [o for o in self.placements.graph.outputs if o.kind == "grad" and o.ref.name in names]


def _among(columns: list[np.ndarray]) -> np.ndarray:
    """By number, whether it is in one of the columns."""
    found = np.zeros(known(), dtype=bool)
    for column in columns:
        found[column] = True
    return found


def told_apart(mine: np.ndarray, others: np.ndarray, alike: int) -> tuple[np.ndarray, np.ndarray]:
    """The class of each placement, and one of each class: pieces that are like none on the other side are alike."""
    key = np.zeros(len(mine), dtype=np.intp)
    columns = []
    for axis in range(mine.shape[1]):
        there = _among([others[:, axis]])
        column = np.where((mine[:, axis] > 3) & ~there[mine[:, axis]], alike, mine[:, axis])
        columns.append(column)
        key = key * known() + column
    _, index, classes = np.unique(key, return_index=True, return_inverse=True)
    return classes, np.stack(columns, axis=1)[index]

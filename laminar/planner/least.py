"""The least that products, exchanges and updates take, over all placements on a mesh: exactly, for a sum.

Every op of a piece of the graph takes one signature on each axis, every parameter is stored and updated whole or in
pieces. What an op costs with its signatures is its price; what lies between it and those that read it is an exchange,
which costs at least `ways` says. A sum of such terms has a minimum that elimination finds (`search.minsum`).

A second counts by what it takes of the step at least, which is up to the caller (`Weights`). An exchange that other
work can hide counts by what it slows that work; of forward's exchanges that nothing can run beside, each counts in
full, but for what the op that waits for it does with its own parameters meanwhile.

Signatures that cost far more than the cheapest one are left out first: a plan that has one of them costs at least that
much more than all ops at their cheapest, so the smaller of the two numbers is a bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from laminar.cost.prices import Machine
from laminar.ir.codec import Ref
from laminar.ir.graph import Node
from laminar.ir.sbp import B, NdSbp, Split
from laminar.ir.tensor import TensorSpec
from laminar.planner.options import Option, Piece
from laminar.planner.ways import GRADIENTS, LARGE, PARAMETERS, VALUES, Pairs, Ways, pairs_of
from laminar.search.minsum import MinSum

FAR = (0.03, 0.1, 0.3, math.inf)
"""Signatures that cost more than the cheapest by this share of the whole are left out, while that proves enough."""


@dataclass(frozen=True)
class Weights:
    """What a second counts, of a step's seconds."""

    work: float
    """Of a micro-batch's work."""
    hidden: float
    """Of an exchange of a micro-batch that work may hide."""
    ends: float
    """Of what comes once a step: updates, and whatever is exchanged behind them."""
    sums: float
    """Of the reduction of gradients, once a step."""
    parts: bool = False
    """Whether the program is cut into parts: by stages, or forward from backward."""


Domains = dict[str, tuple[int, list[Option]]]
"""By op, its variable and what its values stand for."""


@dataclass(frozen=True)
class Least:
    """The problem of one piece of a graph."""

    piece: Piece
    weights: Weights
    ways: Ways | None
    """None: exchanges count nothing."""

    def seconds(self) -> float:
        """The least of the sum, weighted."""
        best = base = self.weights.work * self.piece.least_s + sum(
            self._update_s(self._spec(o.ref), self.piece.placements.mesh.ranks) for o in self.piece.grads
        )
        if self.ways is None:
            return base
        for share in FAR[self.piece.needed :]:
            far_s = share * self.piece.least_s if self.piece.least_s else math.inf
            self.piece.needed = FAR.index(share)
            found = self._solved(far_s)
            best = max(best, min(found, base + self.weights.work * far_s))
            if found <= best:
                break
        return best

    def _solved(self, far_s: float) -> float:
        """Without options that cost so much more than the cheapest."""
        problem = MinSum()
        domains: Domains = {}
        for name, found in self.piece.kept(far_s).items():
            domains[name] = problem.variable(len(found)), found
            problem.add((domains[name][0],), self.weights.work * np.array([o.seconds for o in found]))
        self._exchanges(problem, domains)
        self._updates(problem, domains)
        return problem.floor()

    # --- exchanges

    def _exchanges(self, problem: MinSum, domains: Domains) -> None:
        """Between the ops of the piece."""
        readers: dict[Ref, list[tuple[Node, int]]] = {}
        for node in self.piece.nodes:
            for i, ref in enumerate(node.ins):
                if ref.name in domains:
                    readers.setdefault(ref, []).append((node, i))
        for ref, found in readers.items():
            var, makers = domains[ref.name]
            for node, i in found:
                other, wanting = domains[node.name]
                if other != var:
                    pairs = self._pairs(("value", ref, node.name, i), [o.outs[ref.index] for o in makers],
                                        [o.ins[i] for o in wanting])  # fmt: skip
                    what = GRADIENTS if self.weights.parts else VALUES
                    table = self._table(self._spec(ref), pairs, what, self.piece.readers[ref] > 1)
                    problem.add((var, other), self._counted(table, ref, node, len(found)))

    def _counted(self, table: np.ndarray, ref: Ref, reader: Node, readers: int) -> np.ndarray:
        """What readers have fetched serves the others: together they pay at least their mean.

        One that nothing runs beside pays in full, less what the others pay of it: they may find what it has fetched.
        """
        hidden = self.weights.hidden / readers
        if (ref, reader.name) not in self.piece.placements.chain:
            return hidden * table
        machine, specs = self.piece.placements.machine, self.piece.placements.graph.specs
        inputs = {i.name for i in self.piece.placements.graph.inputs}
        own = [r for r in reader.ins if r.name in inputs] if machine.fused else []
        beside = sum(machine.kernel(2 * 4 * specs[r].numel, None).seconds for r in own)
        full = (self.weights.work - hidden * (readers - 1)) / reader.ins.count(ref)
        return np.maximum(hidden * table, full * (table - beside))

    def _pairs(self, key: tuple[object, ...], rows: Sequence[NdSbp], columns: Sequence[NdSbp]) -> Pairs:
        """Asked again with other weights."""
        key = (*key, self.piece.needed)
        found = self.piece.pairs.get(key)
        if found is None:
            found = self.piece.pairs[key] = pairs_of(rows, columns)
        return found

    def _table(self, spec: TensorSpec, pairs: Pairs, what: int, shared: bool = True) -> np.ndarray:
        if spec.dtype == "bool" or self.ways is None:
            return np.zeros(pairs[1].shape)
        return self.ways.table(spec.nbytes, pairs, what, shared)

    def _spec(self, ref: Ref) -> TensorSpec:
        return self.piece.placements.graph.specs[ref]

    # --- parameters

    def _updates(self, problem: MinSum, domains: Domains) -> None:
        """Parameters: how each is stored, and who updates it.

        Stored and updated whole; stored whole and updated in pieces, which are gathered behind the update; or stored
        and updated in pieces, gathered whenever somebody reads them otherwise. Gradients go to whoever updates.
        """
        readers: dict[str, list[tuple[Node, int]]] = {}
        for node in self.piece.nodes:
            for i, ref in enumerate(node.ins):
                readers.setdefault(ref.name, []).append((node, i))
        for o in self.piece.grads:
            spec = self._spec(o.ref)
            var, makers = domains[o.ref.name]
            reading = [option.ins[i] for n, i in readers.get(o.name, ()) for option in domains[n.name][1]]
            made = [option.outs[o.ref.index] for option in makers]
            kinds = self._kinds(spec, [*reading, *made])
            owner = problem.variable(len(kinds))
            stored, owned = [k[0] for k in kinds], [k[1] for k in kinds]
            gathers = self._table(spec, self._pairs(("state", o.ref), owned, stored), PARAMETERS).diagonal()
            updates = [self._update_s(spec, self._share(nd)) for nd in owned]
            problem.add((owner,), np.array(updates) + self.weights.ends * gathers)
            pairs = self._pairs(("grad", o.ref), made, owned)
            if self.piece.readers[o.ref] == 1:  # else somebody may have fetched it already
                problem.add((var, owner), self.weights.sums * self._table(spec, pairs, GRADIENTS, shared=False))
            phases = Counter(n.phase == "forward" for n, _ in readers.get(o.name, ()))
            for node, i in readers.get(o.name, ()):
                # Forward and backward fetch for themselves; within each, what one has fetched serves the others.
                other, wanting = domains[node.name]
                pairs = self._pairs(("param", o.name, node.name, i), stored, [option.ins[i] for option in wanting])
                table = self._table(spec, pairs, PARAMETERS)
                problem.add((owner, other), self.weights.hidden / phases[node.phase == "forward"] * table)

    def _kinds(self, spec: TensorSpec, seen: Iterable[NdSbp]) -> list[tuple[NdSbp, NdSbp]]:
        """(stored, owned): on each axis both whole, or the owned one a piece, or both the same piece."""
        sizes = self.piece.placements.mesh.sizes
        found: list[tuple[NdSbp, NdSbp]] = [((), ())]
        for axis, parts in enumerate(sizes):
            pieces = list(dict.fromkeys(nd[axis] for nd in seen if isinstance(nd[axis], Split)))
            # Pieces that nobody reads or makes are all alike.
            pieces += [p for d, n in enumerate(spec.shape) if n >= parts and (p := Split(d)) not in pieces][:1]
            ways = [(B, B), *((B, p) for p in pieces), *((p, p) for p in pieces)]
            found = [((*a, x), (*b, y)) for a, b in found for x, y in ways]
        return found

    def _share(self, nd: NdSbp) -> int:
        return math.prod(n for p, n in zip(nd, self.piece.placements.mesh.sizes, strict=True) if isinstance(p, Split))

    def _update_s(self, spec: TensorSpec, share: int) -> float:
        return self.weights.ends * per_element_s(self.piece.placements.machine) * spec.numel / share


def per_element_s(machine: Machine) -> float:
    """Seconds of an update, for each element of many."""
    return machine.update(1, LARGE).seconds / LARGE

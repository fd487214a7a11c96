"""The least that products, exchanges and updates take, over all placements on a mesh: exactly, for a sum.

Every op of a piece of the graph takes one signature on each axis, every parameter is stored and updated whole or in
pieces. What an op costs with its signatures is its price; what lies between it and those that read it is an exchange,
which costs at least `ways` says. A sum of such terms has a minimum that elimination finds (`search.minsum`).

A second counts by what it takes of the step at least, which is up to the caller (`Weights`). An exchange counts by what
it slows other work; one that nothing can run beside is waited for as well (`exposed`), but for what the op that waits
for it does with its own parameters meanwhile.

Signatures that cost far more than the cheapest one are left out first: a plan that has one of them costs at least that
much more than all ops at their cheapest, so the smaller of the two numbers is a bound.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from laminar.cost.machine import UPDATES, Machine
from laminar.ir.graph import Node, Output
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.placement.minsum import Factor, floor
from laminar.planner.bounds.boxing_bound import (
    COLUMN,
    GRADIENTS,
    NO_LATENCY_BYTES,
    PARAMETERS,
    PROBED_SIZES,
    VALUES,
    Ways,
    pairs_of,
)
from laminar.planner.bounds.signatures import Piece, Rows, TensorExchange
from laminar.planner.tuning import DOMINATED_SHARES, VALUE_WORTHS

UPDATED_TENSORS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of tensors for which measured updates are asked what they take."""
LONG_ROW = 4
"""Layers below which a row is no more than so many of them."""


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
    stored: float = 0.0
    """What a byte counts that a rank stores all the time: of parameters, gradients and state."""
    held: float = math.inf
    """What it counts at most to fetch a byte of a parameter for backward, of those that are then there."""


@dataclass(frozen=True)
class Least:
    """The problem of one piece of a graph."""

    piece: Piece
    weights: Weights
    ways: Ways | None
    """None: exchanges count nothing."""
    behind: Ways | None = None
    """Of the reduction of gradients, where that has the links for itself; unless given, as all the rest."""
    after: Ways | None = None
    """Of what is gathered behind the update, when all else is over; unless given, as all the rest."""
    exposed: Ways | None = None
    """Of what nothing runs beside, exchanges of other levels neither; unless given, as all the rest."""

    def repeated(self, times: int) -> float:
        """The least of so many layers of its kind in a row.

        What a layer is given lies as the one before has left it. Let a value that passes from layer to layer be worth
        something, by how it lies: every layer pays for what it is given and is paid for what it hands on, which
        cancels out but for the ends of the row. With whatever worth, the least of one layer is then a bound on all of
        them; a worth near what it takes to make the value whole keeps a layer from taking for granted what no layer
        leaves behind. The ends, which may lie in ways of their own, count by their ops alone.
        """
        if not self.piece.loops or self.ways is None or times < LONG_ROW:
            return times * self.seconds()
        # Which worth is best is tried out once for a mesh; any is good for a bound.
        known, key = self.piece.placements.prices.worths, (self.piece.placements.mesh, self.weights.parts)
        found = {0.0: times * (self._base_s() if known.get(key) else self.seconds())}
        for worth in [known[key]] if known.get(key) else [] if key in known else VALUE_WORTHS:
            one, spread = self._looped(worth)
            found[worth] = (times - 2) * one + 2 * self._base_s() - spread
        known.setdefault(key, max(found, key=lambda w: found[w]))
        return max(found.values())

    def _looped(self, worth: float) -> tuple[float, float]:
        """The least of a layer whose values are worth that much of what it takes to make them whole; and that much."""
        if self.weights.stored:  # what is far from the cheapest may be what stores least
            self.piece.needed = len(DOMINATED_SHARES) - 1
        far = DOMINATED_SHARES[min(self.piece.needed, len(DOMINATED_SHARES) - 1)]
        far_s = far * self.piece.least_s if self.piece.least_s else math.inf
        found, spread = self._solved(far_s, worth)
        return min(found, self._base_s() + self.weights.work * far_s - spread), spread

    def _needs(self, far: int) -> None:
        """Remember how far options have to be kept."""
        self.piece.needed = far
        placements = self.piece.placements
        placements.prices.needed[placements.mesh, bool(self.piece.loops)] = far

    def _base_s(self) -> float:
        """All ops and updates at their cheapest."""
        ranks = self.piece.placements.mesh.ranks
        updates = sum(self._update_s(self._spec(o.ref), ranks) for o in self.piece.grads)
        return self.weights.work * self.piece.least_s + updates

    def seconds(self) -> float:
        """The least of the sum, weighted."""
        best = base = self._base_s()
        if self.ways is None:
            return base
        for share in DOMINATED_SHARES[self.piece.needed :]:
            far_s = share * self.piece.least_s if self.piece.least_s else math.inf
            self._needs(DOMINATED_SHARES.index(share))
            found, _ = self._solved(far_s)
            best = max(best, min(found, base + self.weights.work * far_s))
            if found <= best:
                break
        return best

    def _solved(self, far_s: float, worth: float | None = None) -> tuple[float, float]:
        """Without options that cost so much more than the cheapest; with a worth, as one of a row of layers.

        Also the difference between the most and the least that a layer can be paid.
        """
        kept = self.piece.kept(far_s)
        variables = {name: k for k, name in enumerate(kept)}
        sizes = [len(rows.seconds) for rows in kept.values()]
        factors: list[Factor] = [
            ((k,), (np.arange(len(rows.seconds)),), self.weights.work * rows.seconds)
            for k, rows in enumerate(kept.values())
        ]
        self._exchanges(kept, variables, factors)
        spread = 0.0 if worth is None else self._loops(kept, variables, sizes, factors, worth)
        self._updates(kept, variables, sizes, factors)
        return floor(sizes, factors), spread

    def _loops(
        self, kept: dict[str, Rows], variables: dict[str, int], sizes: list[int], factors: list[Factor], worth: float
    ) -> float:
        """What comes from neighbours, and what it is worth; the most that it can be, in all."""
        spread = 0.0
        given: dict[Ref, list[tuple[Node, int, Ref]]] = {}
        for node in self.piece.nodes:
            for i, ref in enumerate(node.ins):
                if ref in self.piece.loops:
                    given.setdefault(self.piece.loops[ref], []).append((node, i, ref))
        made = {n.name: len(n.ins) for n in self.piece.nodes}
        for own, found in given.items():
            spec, what = self._spec(own), GRADIENTS if self.weights.parts else VALUES
            placed, lies = kept[own.name].placed[:, made[own.name] + own.index], self.piece.lies(own)
            whole = np.zeros_like(lies[:1])
            paid, given_ = (
                self.weights.work * worth * self._table(spec, between, what)[between.ones, 0]
                for key, at in (("paid", placed), ("given", lies))
                for between in [self.piece.exchange((key, own), at, whole)]
            )
            before = len(sizes)
            sizes.append(len(lies))
            factors.append(((before,), (np.arange(len(lies)),), -given_))
            factors.append(((variables[own.name],), (np.arange(len(placed)),), paid))
            spread += float(given_.max() - given_.min())
            for node, i, ref in found:
                between = self.piece.exchange(("given", ref, node.name, i), lies, kept[node.name].placed[:, i])
                table = self._counted(between, ref, node, what, self.piece.readers[ref])
                factors.append(((before, variables[node.name]), (between.ones, between.others), table))
        return spread

    # --- exchanges

    def _exchanges(self, kept: dict[str, Rows], variables: dict[str, int], factors: list[Factor]) -> None:
        """Between the ops of the piece."""
        readers: dict[Ref, list[tuple[Node, int]]] = {}
        made = {n.name: len(n.ins) for n in self.piece.nodes}
        for node in self.piece.nodes:
            for i, ref in enumerate(node.ins):
                if ref.name in variables:
                    readers.setdefault(ref, []).append((node, i))
        what = GRADIENTS if self.weights.parts else VALUES
        for ref, found in readers.items():
            var = variables[ref.name]
            for node, i in found:
                other = variables[node.name]
                if other != var:
                    between = self.piece.exchange(
                        ("value", ref, node.name, i),
                        kept[ref.name].placed[:, made[ref.name] + ref.index],
                        kept[node.name].placed[:, i],
                    )
                    table = self._counted(between, ref, node, what, len(found))
                    factors.append(((var, other), (between.ones, between.others), table))

    def _counted(self, between: TensorExchange, ref: Ref, reader: Node, what: int, readers: int) -> np.ndarray:
        """What readers have fetched serves the others: together they pay at least their mean.

        One that nothing runs beside is also waited for (`exposed`), but for what its reader does with its own
        parameters meanwhile.
        """
        shared, spec = self.piece.readers[ref] > 1, self._spec(ref)
        table = self.weights.hidden / readers * self._table(spec, between, what, shared)
        others = self.piece.placements.exposed.values.get((ref, reader.name))
        if others is None:
            return table
        machine, specs = self.piece.placements.machine, self.piece.placements.graph.specs
        inputs = {i.name for i in self.piece.placements.graph.inputs}
        own = [r for r in reader.ins if r.name in inputs] if machine.fused else []
        beside = sum(machine.kernel(2 * 4 * specs[r].numel, None).seconds for r in own)
        waited = self._table(spec, between, what, shared, self.exposed)
        beside += self.piece.placements.beside_s(others)
        return table + self._waiting(waited, beside) / reader.ins.count(ref)

    def _waiting(self, seconds: np.ndarray, beside: float) -> np.ndarray:
        """What is added for exchanges that are waited for, so many seconds of work done meanwhile."""
        drag = self.piece.placements.machine.drag
        left: np.ndarray = np.maximum(0.0, seconds - beside * drag.transfer / drag.compute)
        return max(0.0, self.weights.work - self.weights.hidden) * left

    def _table(
        self, spec: TensorSpec, between: TensorExchange, what: int, shared: bool = True, ways: Ways | None = None
    ) -> np.ndarray:
        ways = ways or self.ways
        if spec.dtype == "bool" or ways is None:
            return np.zeros(between.pairs[1].shape)
        return ways.table(spec.nbytes, between.pairs, what, shared)

    def _spec(self, ref: Ref) -> TensorSpec:
        return self.piece.placements.graph.specs[ref]

    # --- parameters

    def _updates(
        self, kept: dict[str, Rows], variables: dict[str, int], sizes: list[int], factors: list[Factor]
    ) -> None:
        """Parameters: how each is stored, and who updates it.

        Stored and updated whole; stored whole and updated in shards, which are gathered behind the update; or stored
        and updated in shards, gathered whenever somebody reads them otherwise. Gradients go to whoever updates.
        """
        readers: dict[str, list[tuple[Node, int]]] = {}
        made = {n.name: len(n.ins) for n in self.piece.nodes}
        for node in self.piece.nodes:
            for i, ref in enumerate(node.ins):
                readers.setdefault(ref.name, []).append((node, i))
        first = None if self.weights.parts else self.piece.placements.exposed.first
        for o in self.piece.grads:
            spec = self._spec(o.ref)
            grad = kept[o.ref.name].placed[:, made[o.ref.name] + o.ref.index]
            read = [(n, kept[n.name].placed[:, i], i) for n, i in readers.get(o.name, ())]
            stored, owned = self.piece.kinds(o, spec, [grad, *(placed for _, placed, _ in read)])
            owner = len(sizes)
            sizes.append(len(stored))
            states = self.piece.exchange(("state", o.ref), owned, stored)
            gathers = self._table(spec, states, PARAMETERS, ways=self.after)[states.ones, states.others]
            updates = self._update_s(spec, 1) / self._shares(owned)
            factors.append(((owner,), (np.arange(len(stored)),), updates + self.weights.ends * gathers))
            if self.weights.stored:
                factors.append(((owner,), (np.arange(len(stored)),), self._stays(o, stored, owned)))
                factors.append(((variables[o.ref.name],), (np.arange(len(grad)),), self._summed(spec, grad)))
            if self.piece.readers[o.ref] == 1:  # else somebody may have fetched it already
                between = self.piece.exchange(("grad", o.ref), grad, owned)
                table = self.weights.sums * self._table(spec, between, GRADIENTS, shared=False, ways=self.behind)
                factors.append(((variables[o.ref.name], owner), (between.ones, between.others), table))
            phases = Counter(n.phase == "forward" for n, _, _ in read)
            for node, placed, i in read:
                # What one has fetched serves others of its phase, and what forward has fetched it may serve backward.
                between = self.piece.exchange(("param", o.name, node.name, i), stored, placed)
                table = self.weights.hidden * self._table(spec, between, PARAMETERS)
                if node.phase != "forward" and phases[True]:
                    most = np.zeros(table.shape[1])
                    most[between.others] = self.weights.held * spec.nbytes / self._shares(placed)
                    table = np.minimum(table, most)
                table = table / phases[node.phase == "forward"]
                if first and first[:2] == (o.name, node.name):
                    waited = self._table(spec, between, PARAMETERS, ways=self.exposed)
                    table = table + self._waiting(waited, self.piece.placements.beside_s(first[2])) / node.ins.count(
                        Ref(o.name)
                    )
                factors.append(((owner, variables[node.name]), (between.ones, between.others), table))

    def _stays(self, grad: Output, stored: np.ndarray, owned: np.ndarray) -> np.ndarray:
        """What a parameter and its state count for being there."""
        spec, each = self._spec(Ref(grad.name)), UPDATES[self.piece.placements.machine.optimizer]
        found: np.ndarray = spec.nbytes / self._shares(stored) + each * spec.numel / self._shares(owned)
        found *= self.weights.stored
        return found

    def _summed(self, spec: TensorSpec, grad: np.ndarray) -> np.ndarray:
        """What sums of a gradient over micro-batches count for being there.

        They lie as each micro-batch leaves them: whole where those are terms, unless every micro-batch brings its terms
        to those who own them. What lies whole may be cut for nothing.
        """
        sizes = np.array(self.piece.placements.mesh.sizes)
        as_made = self.weights.stored * spec.nbytes / np.where((grad > 3) | (grad == 0), sizes, 1).prod(1)
        if self.ways is None:
            return self.weights.stored * np.full(len(grad), spec.nbytes / sizes.prod())
        moved = np.full(len(grad), math.inf)
        for axis in range(grad.shape[1]):
            to = grad.copy()
            to[:, axis] = COLUMN
            start, end = pairs_of(grad, to)
            own = self.ways.table(spec.nbytes, (start[:, 0], end.diagonal()), GRADIENTS)
            moved = np.where((grad[:, axis] > 0) & (grad[:, axis] < 4), np.minimum(moved, own), moved)
        found: np.ndarray = np.minimum(
            as_made, self.weights.stored * spec.nbytes / sizes.prod() + self.weights.hidden * moved
        )
        return found

    def _shares(self, placed: np.ndarray) -> np.ndarray:
        """Among how many ranks each placement divides a tensor."""
        sizes = np.array(self.piece.placements.mesh.sizes)
        found: np.ndarray = np.where(placed > 3, sizes, 1).prod(1)
        return found

    def _update_s(self, spec: TensorSpec, share: int) -> float:
        placements = self.piece.placements
        each_s = per_element_s(placements.machine, placements.prices.updated)
        return self.weights.ends * each_s * spec.numel / share


@lru_cache(maxsize=1024)
def per_element_s(machine: Machine, least: int = 0) -> float:
    """Seconds of an update at least, for each element of `least` elements or more.

    Where updates were measured, some millions of elements may take less each than more of them: they fit a cache.
    """
    rate = machine.update(1, NO_LATENCY_BYTES).seconds / NO_LATENCY_BYTES
    if not machine.cluster.profile:
        return rate
    sizes = [least, *(size for size in PROBED_SIZES if size > least)] if least else PROBED_SIZES
    return min(rate, *(machine.update(tensors, size).seconds / size for tensors in UPDATED_TENSORS for size in sizes))

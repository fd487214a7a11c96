"""Exchanges that a step waits for, whatever its plan: nothing that the bound counts can run beside them.

Let W be the seconds of a rank's work, X those of its exchanges, and of a step's T seconds let B be those of work beside
an exchange and N those without work. Work keeps a share c of its speed beside an exchange, and the exchange a share t
of its own. Then

    T = W + (1 - c) B + N        X <= t B + N        so, with h = (1 - c) / t,        T >= W + h X + (1 - h) N

where X may be any mean of the levels' exchanges, whose links are apart. Every exchange counts h of its seconds, and
seconds without work count 1 - h more. Time that goes into work which the bound does not count is time without work
here: it makes T no smaller. This is about such seconds, and who is waited for:

    values      An exchange of forward, if all work leads to the value or comes from its reader, but for some that is
                said (`beside`). Two such exchanges follow each other if one's reader leads to the other's value, and
                then their seconds add up, on whatever levels. Those that count follow each other, all of them.
    parameters  What is gathered for the first op of forward, if all work comes from that op but for some that is said:
                until the gather is there, no more than that can have been done. The values come behind it.

Work that is beside several of them is taken off each. Not counted: that backward waits, whose gradients of weights can
be computed at any time; that a second parameter is waited for.
"""

from __future__ import annotations

from functools import cached_property

from laminar.ir.graph import Graph, Node
from laminar.ir.ops import FREE
from laminar.ir.serial.codec import Ref
from laminar.planner.tuning import FEW_BESIDE


class Exposed:
    """Of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        nodes = graph.nodes
        self.bit = {n.name: 1 << k for k, n in enumerate(nodes)}
        self.above: dict[str, int] = {}
        """By op, those that lead to it, and itself."""
        for n in nodes:
            mask = self.bit[n.name]
            for r in n.ins:
                mask |= self.above.get(r.name, 0)
            self.above[n.name] = mask
        self.below = dict(self.bit)
        """By op, those that come from it, and itself."""
        for n in reversed(nodes):
            for r in n.ins:
                if r.name in self.below:
                    self.below[r.name] |= self.below[n.name]
        self.heavy = sum(self.bit[n.name] for n in nodes if n.op not in FREE)
        """Those that are work."""

    def _beside(self, done: int, reader: str) -> tuple[Node, ...] | None:
        """Work that can be done meanwhile, if that is little: neither `done` before, nor from the reader on."""
        mask, found = self.heavy & ~(done | self.below[reader]), list[Node]()
        while mask and len(found) <= FEW_BESIDE:
            low = mask & -mask
            found.append(self.graph.nodes[low.bit_length() - 1])
            mask ^= low
        return tuple(found) if len(found) <= FEW_BESIDE else None

    @cached_property
    def values(self) -> dict[tuple[Ref, str], tuple[Node, ...]]:
        """By value and reader, the work beside: exchanges that follow each other, those with least beside first."""
        found: dict[tuple[Ref, str], tuple[Node, ...]] = {}
        for n in self.graph.nodes:
            for ref in dict.fromkeys(n.ins) if n.phase == "forward" else ():
                beside = self._beside(self.above[ref.name], n.name) if ref.name in self.bit else None
                if beside is not None:
                    found[ref, n.name] = beside
        out: dict[tuple[Ref, str], tuple[Node, ...]] = {}
        for one in sorted(found, key=lambda e: _elements(found[e])):
            if all(self._follows(one, other) or self._follows(other, one) for other in out):
                out[one] = found[one]
        return out

    def _follows(self, one: tuple[Ref, str], other: tuple[Ref, str]) -> bool:
        """Whether the reader of one leads to the value of the other."""
        return bool(self.bit[one[1]] & self.above[other[0].name])

    @cached_property
    def first(self) -> tuple[str, str, tuple[Node, ...]] | None:
        """A parameter, an op of forward that reads it, and the work beside: where that is least."""
        trained = {o.name for o in self.graph.outputs if o.kind == "grad"}
        found: list[tuple[str, str, tuple[Node, ...]]] = []
        for n in self.graph.nodes:
            for ref in n.ins if n.phase == "forward" else ():
                beside = self._beside(0, n.name) if ref.name in trained else None
                if beside is not None and all(self.bit[n.name] & self.above[v.name] for v, _ in self.values):
                    found.append((ref.name, n.name, beside))
        return min(found, key=lambda one: _elements(one[2]), default=None)


def _elements(nodes: tuple[Node, ...]) -> int:
    return sum(spec.numel for n in nodes for spec in n.outs if spec is not None)

"""Whether what a rule says follows from other rules: from those of the table, mostly.

The left side of the rule stands as a graph; other rules are applied to it, one place at a time and a few of them one
after the other. Where one of the graphs that come out is what the rule itself makes, the rule is nothing new. Graphs
count as the same if they do the same ops on the same values; the order of the two operands of a sum or a product does
not matter. A rule that only follows in more steps is taken for new, which costs a search a little time and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from laminar.ir.graph import Graph, map_refs
from laminar.ir.serial.codec import Ref
from laminar.rewrite.apply import Rewrite, rewrite
from laminar.rewrite.edit import Lookup
from laminar.rewrite.rules import REWRITE_RULES

IMPLIED_STEPS = 2
"""Rules that are applied one after the other. With more, no more rules of the public file are found to be implied."""
_MOST_GRAPHS = 24
"""Graphs that are made for one rule."""
_COMMUTATIVE = ("aten.add.Tensor", "aten.mul.Tensor")


def implied(rule: Rewrite, graph: Graph, rules: Sequence[Rewrite] = REWRITE_RULES) -> bool:
    """Whether these rules make of a rule's left side, written down as a graph, what the rule makes of it."""
    start = Lookup(graph)
    sites = rule.find(start)
    if not sites:
        return False
    goal, known, reached = _name(rewrite(start, rule, sites[:1])[0]), {_name(start)}, [start]
    if goal in known:
        return True
    for _ in range(IMPLIED_STEPS):
        reached, before = [], reached
        for look in before:
            for other in _neighbours(look, rules):
                name = _name(other)
                if name == goal:
                    return True
                if name not in known and len(known) < _MOST_GRAPHS:
                    known.add(name)
                    reached.append(other)
    return False


def _neighbours(look: Lookup, rules: Sequence[Rewrite]) -> Iterator[Lookup]:
    """What one rule at one place makes."""
    for rule in rules:
        for site in rule.find(look):
            made, done = rewrite(look, rule, [site])
            if done:
                yield made


def _name(look: Lookup) -> int:
    """Equal, within this process, for graphs that compute the same results by the same ops."""
    colour = {r: hash((r.name, r.index)) for r in look.specs if r.name not in look.makers}
    for node in look.graph.nodes:
        reads = [colour[r] for r in look.notes[node.name].reads]
        if node.op in _COMMUTATIVE:
            reads.sort()
        mine = hash((node.op, repr(map_refs(node.args, lambda r: ".")), *reads))
        for i in range(len(node.outs)):
            colour[Ref(node.name, i)] = hash((mine, i))
    return hash(tuple(colour[o.ref] for o in look.graph.outputs))

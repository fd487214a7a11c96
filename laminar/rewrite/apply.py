"""A rewrite rule at work: its sites in a graph, and the graph after rewriting some of them.

A graph goes in, an equivalent one with the same inputs and outputs comes out; whether it is equivalent,
`runtime/check/prove_rewrites.py` finds out by running both. A *site class* is the key of all sites that look alike:
ops, phases, parameters' shapes, but neither names, nor dtypes, nor sizes that depend on the batch. So the same step of
a rewrite means the same in every block of a model, at another batch size and in another precision, and is all that a
plan has to remember.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from laminar.cost.ops.roofline import flops, op_s
from laminar.errors import RuleError
from laminar.ir.graph import Graph, Node, map_refs
from laminar.ir.ops import FREE
from laminar.ir.plans.rewrites import Applied
from laminar.ir.serial.codec import Ref, content_hash
from laminar.ir.tensor import TensorSpec
from laminar.rewrite.edit import Lookup, NoFit, Writer, is_packed
from laminar.rewrite.forms import FORMS, FUNCTIONS, Seen
from laminar.rewrite.language import Pattern, Term, forms_in, parse_rewrite, starred
from laminar.rewrite.match import Match, matches, write
from laminar.rules.notation import call_of


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a rule can be applied."""

    rule: str
    key: str
    """The class: equal for places that look alike."""
    match: Match
    gain_s: float
    """Seconds on one device that a roofline expects to be saved; negative if it costs."""
    hope_s: float
    """The same if nobody else needed what is inside the match."""
    fewer: int
    """Nodes saved, views included."""
    ties: frozenset[frozenset[str]]
    """What sites that belong together share: for rules with a kind, group by group, the parameters that are read or
    whose gradients are made; for rules that leave the inside of a match to other readers, that inside."""

    @property
    def roots(self) -> tuple[str, ...]:
        """Names of the nodes whose results are replaced."""
        return tuple(dict.fromkeys(r.name for r in self.match.roots))


@dataclass(frozen=True)
class Rewrite:
    """One substitution; `text` is in the language of `language.py`."""

    name: str
    text: str
    doc: str
    """Why one would want it."""
    kind: str = ""
    """`merge` or `split` for rules that do to forward and to parts of backward what belongs together."""
    tidy: bool = False
    """Whether it is applied before anything is weighed, wherever it saves time on one device. So for rules whose worth
    hangs little on where tensors lie."""
    exact: bool = False
    """Whether results stay the same to the last bit, in any precision."""
    shared: bool = False
    """Whether what is inside a match may have other readers: they keep it, and only together with other rewrites (of
    the backward pass, say) does the old work go away."""
    carried: bool = False
    """Whether a plan that uses it carries its text: for rules that are in no table of Laminar's."""

    @staticmethod
    def of_file(name: str, text: str) -> Rewrite:
        """A rule that was read from a file, or brought along by a plan."""
        return Rewrite(name, text, f"{name} of a file of rules.", carried=True)

    def step(self, key: str, sites: int) -> Applied:
        """What a plan remembers of its use."""
        return Applied(self.name, key, sites, self.text if self.carried else "")

    def __post_init__(self) -> None:
        left, right = self.sides
        members = isinstance(left, Term) and left.form != "sum" and starred(left)
        if members and "part" not in forms_in(right):
            raise RuleError(f"rule {self.name}: {left} has members, and no part( ) on the right hands out their shares")
        unknown = {f for side in self.sides for f in forms_in(side)} - {*FORMS, *FUNCTIONS, "sum", "part"}
        if unknown:
            raise RuleError(
                f"rule {self.name}: no form is called {sorted(unknown)[0]}", allowed="  ".join(sorted(FORMS))
            )

    @cached_property
    def sides(self) -> tuple[Pattern, Pattern]:
        """What is looked for, and what replaces it."""
        return parse_rewrite(self.text)

    def find(self, graph: Graph | Lookup) -> list[Site]:
        """Every place where the rule fits, in the order of the graph; places may exclude each other."""
        look = graph if isinstance(graph, Lookup) else Lookup(graph)
        left, right = self.sides
        sites = []
        for match in matches(look, left, right, self.shared):
            if self.kind and any(map(is_packed, match.nodes)):
                continue  # what was merged is not split again, nor the other way round: that leads nowhere
            writer = Writer(look, bool(self.kind))
            try:
                new = write(writer, right, match)
            except NoFit:
                continue
            if all(old == now for old, now in new.items()):
                continue
            gain_s, fewer = _gain(look, writer, new, ())
            hope_s = _gain(look, writer, new, match.nodes)[0] if self.shared else gain_s
            ties = frozenset([frozenset(match.nodes[1:])]) if self.shared else _params(look, match)
            sites.append(Site(self.name, _class_of(look, self.name, match), match, gain_s, hope_s, fewer, ties))
        return sites

    def apply(self, graph: Graph, sites: Site | Iterable[Site]) -> Graph:
        """The graph with these places rewritten; of places that exclude each other, the first."""
        return rewrite(graph, self, [sites] if isinstance(sites, Site) else list(sites))[0].graph


def rewrite(graph: Graph | Lookup, rule: Rewrite, sites: Sequence[Site]) -> tuple[Lookup, int]:
    """The graph with places of one rule rewritten, looked up, and how many of them were."""
    look = graph if isinstance(graph, Lookup) else Lookup(graph)
    taken: set[str] = set()
    chosen: list[Site] = []
    for site in sites:
        if taken.isdisjoint(site.match.nodes):
            taken.update(site.match.nodes)
            chosen.append(site)
    made = _rewritten(look, rule, chosen)
    if made is None:  # together they would wait for each other in a ring: as many as go, one by one
        kept: list[Site] = []
        for site in chosen:
            if _rewritten(look, rule, [*kept, site]) is not None:
                kept.append(site)
        chosen, made = kept, _rewritten(look, rule, kept)
    assert made is not None
    return made, len(chosen)


def _rewritten(look: Lookup, rule: Rewrite, sites: Sequence[Site]) -> Lookup | None:
    writer = Writer(look, bool(rule.kind))
    writer.leaving.update(name for site in sites for name in site.roots)
    now: dict[Ref, Ref] = {}
    for site in sites:
        now |= write(writer, rule.sides[1], site.match)

    def resolve(ref: Ref) -> Ref:
        while ref in now and now[ref] != ref:
            ref = now[ref]
        return ref

    nodes = {**look.makers, **writer.new}
    moved = {name for ref in now for name in (u.name for u in look.users.get(ref, ()))}
    moved |= {n.name for n in writer.nodes if any(r in now for r in n.ins)}
    for name in moved:
        nodes[name] = replace(nodes[name], args=map_refs(nodes[name].args, resolve))
    outputs = tuple(replace(o, ref=resolve(o.ref)) for o in look.graph.outputs)
    same = look.notes.keys() - moved
    reads = {name: look.notes[name].reads if name in same else n.ins for name, n in nodes.items()}
    live, joined = _narrow(_live(nodes, reads, [o.ref.name for o in outputs]), {o.ref for o in outputs})
    outputs = tuple(replace(o, ref=joined.get(o.ref, o.ref)) for o in outputs)
    if joined:
        reads = {name: n.ins for name, n in live.items()}
    order = _ordered(live, reads, {**look.position, **writer.at})
    if order is None:
        return None
    read = {r.name for n in order for r in reads[n.name]} | {o.ref.name for o in outputs}
    made = replace(
        look.graph,
        nodes=tuple(order),
        outputs=outputs,
        constants=tuple(c for c in look.graph.constants if c.name in read),
        probed=tuple(p for p in look.graph.probed if p[0] in live),
    )
    return Lookup(made, look)


NodeReads = Mapping[str, tuple[Ref, ...]]


def _live(nodes: dict[str, Node], reads: NodeReads, wanted: Iterable[str]) -> dict[str, Node]:
    """Nodes from which something wanted is made."""
    seen: set[str] = set()
    todo = list(wanted)
    while todo:
        name = todo.pop()
        if name in nodes and name not in seen:
            seen.add(name)
            todo += [r.name for r in reads[name]]
    return {name: n for name, n in nodes.items() if name in seen}


SUM_NOISE = 1e-9
"""Relative differences of sums of seconds that only say in which order they were added."""
MASKED = "aten.convolution_backward"
"""The op that is told which of its results are wanted."""


def _narrow(nodes: dict[str, Node], outputs: set[Ref]) -> tuple[dict[str, Node], dict[Ref, Ref]]:
    """Backward convolutions make only what is read, and those of the same tensors are one; where results are now."""
    convolutions = [n for n in nodes.values() if n.op == MASKED]
    now: dict[Ref, Ref] = {}
    if not convolutions:
        return nodes, now
    read = outputs | {r for n in nodes.values() for r in n.ins}
    alike: dict[str, list[Node]] = {}
    for n in convolutions:
        alike.setdefault(repr((n.args[:3], n.args[4:-1], n.phase)), []).append(n)
    out = dict(nodes)
    for same in alike.values():
        first = same[0]
        outs: list[TensorSpec | None] = [None, None, None]
        for n in same:
            for i, spec in enumerate(n.outs):
                if spec is not None and Ref(n.name, i) in read:
                    outs[i] = spec
                    now[Ref(n.name, i)] = Ref(first.name, i)
            del out[n.name]
        bias = outs[2].shape if outs[2] is not None else None
        args = (*first.args[:3], bias, *first.args[4:-1], tuple(o is not None for o in outs))
        slim = replace(first, args=args, outs=tuple(outs))
        out[first.name] = first if slim == first else slim
    now = {old: new for old, new in now.items() if old != new}
    for name, n in out.items():
        if any(r in now for r in n.ins):
            out[name] = replace(n, args=map_refs(n.args, lambda r: now.get(r, r)))
    return out, now


def _ordered(nodes: dict[str, Node], reads: NodeReads, position: dict[str, int]) -> list[Node] | None:
    """Every node behind what it reads, as near to the old order as that allows; None if there is no such order."""
    waits = {name: {r.name for r in reads[name]} & nodes.keys() for name in nodes}
    readers: dict[str, list[str]] = {}
    for name, sources in waits.items():
        for source in sources:
            readers.setdefault(source, []).append(name)
    left = {name: len(sources) for name, sources in waits.items()}
    rank = {name: k for k, name in enumerate(nodes)}
    ready = [(position[name], rank[name], name) for name, n in left.items() if n == 0]
    heapq.heapify(ready)
    out = []
    while ready:
        name = heapq.heappop(ready)[2]
        out.append(nodes[name])
        for reader in readers.get(name, ()):
            left[reader] -= 1
            if left[reader] == 0:
                heapq.heappush(ready, (position[reader], rank[reader], reader))
    return out if len(out) == len(nodes) else None


# --- what a rewrite is worth -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """What a graph does on one device, or what a change adds to that."""

    flops: float
    moved_bytes: float
    """Read and written by ops that are more than another look at memory."""
    ops: int
    """Those ops."""
    seconds: float
    """By the roofline of `cost/ops/roofline.py`."""

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.flops - other.flops,
            self.moved_bytes - other.moved_bytes,
            self.ops - other.ops,
            self.seconds - other.seconds,
        )


def work_of(graph: Graph | Lookup) -> Work:
    """What a graph does on one device."""
    look = graph if isinstance(graph, Lookup) else Lookup(graph)
    each = [_work_here(look, name) for name in look.notes]
    return Work(
        sum(w.flops for w in each),
        sum(w.moved_bytes for w in each),
        sum(w.ops for w in each),
        sum(w.seconds for w in each),
    )


def _work_here(look: Lookup, name: str) -> Work:
    note = look.notes[name]
    if note.work is None:
        note.work = _work(note.node, look.specs)
    return note.work  # type: ignore[no-any-return]


def _work(node: Node, specs: Any) -> Work:
    if node.op in FREE:
        return Work(0.0, 0.0, 0, 0.0)
    call = call_of(node, specs)
    moved = float(sum(s.nbytes for s in call.ins) + sum(o.nbytes for o in call.outs if o))
    share = 0.5 if node.op == MASKED and (node.outs[0] is None or node.outs[1] is None) else 1.0
    return Work(share * flops(call), moved, 1, share * op_s(call))


def _gain(look: Lookup, writer: Writer, new: dict[Ref, Ref], also: Sequence[str]) -> tuple[float, int]:
    """Seconds and nodes saved by values that are replaced, and by these nodes, which are said to go as well."""
    needed = {r for n in writer.nodes for r in n.ins} | set(new.values())
    gone = {name for name in also if not any(Ref(name, i) in needed for i in range(len(look.makers[name].outs)))}
    todo = [r.name for r in new]
    while todo:
        name = todo.pop()
        node = look.makers.get(name)
        if node is None or name in gone:
            continue
        mine = [Ref(name, i) for i, o in enumerate(node.outs) if o is not None]
        if all(
            r in new or (r not in needed and r not in look.kept and all(u.name in gone for u in look.users.get(r, ())))
            for r in mine
        ):
            gone.add(name)
            todo += [r.name for r in look.notes[name].reads]
    half = {r.name for r in new} - gone  # backward convolutions of which one result is replaced
    spent = [_work_here(look, name).seconds for name in gone] + [_work_here(look, name).seconds / 2 for name in half]
    before = math.fsum(spent)  # the same in whichever order a set is walked
    after = math.fsum(_work(n, writer.specs).seconds for n in writer.nodes)
    saved = before - after
    return (saved if abs(saved) > SUM_NOISE * max(before, after) else 0.0), len(gone) - len(writer.nodes)


def _params(look: Lookup, match: Match) -> frozenset[frozenset[str]]:
    """For each group the matrices that are read or whose gradient is made; for a bias, those of its module."""
    made = {name for r in match.roots if (name := look.gradient(r)) is not None}
    out = set()
    for group in match.groups:
        found = set(made)
        for value in group.bound.values():
            for seen in value if isinstance(value, tuple) else (value,):
                if isinstance(seen, Seen) and (item := look.inputs.get(look.behind(seen.ref).name)) is not None:
                    found |= {item.name} if item.kind == "param" else set()
        matrices = {p for p in found if len(look.inputs[p].spec.shape) > 1}
        owners = {p.rpartition(".")[0] for p in found} if not matrices else set()
        matrices |= {
            i.name
            for i in look.graph.inputs
            if i.kind == "param" and len(i.spec.shape) > 1 and i.name.rpartition(".")[0] in owners
        }
        out.add(frozenset(matrices))
    return frozenset(out)


# --- classes ---------------------------------------------------------------------------------


def _class_of(look: Lookup, rule: str, match: Match) -> str:
    nodes = [_looks(look.makers[name]) for name in match.nodes]
    names = [[k, _face(look, v)] for group in match.groups for k, v in sorted(group.bound.items())]
    counts = [group.count for group in match.groups]
    return content_hash([rule, match.division, counts, len(match.rest), nodes, names])[:12]


def _looks(node: Node) -> list[Any]:
    return [node.op, node.phase, [len(o.shape) if o else None for o in node.outs]]


def _face(look: Lookup, value: Any) -> Any:
    """What a name stands for, without names, sizes that depend on the batch, and dtypes, which are the precision's."""
    if isinstance(value, Seen):
        ref = look.behind(value.ref)
        spec = look.specs[ref]
        item = look.inputs.get(ref.name)
        if item is not None and item.kind in ("param", "buffer"):
            return [item.kind, list(spec.shape)]
        return len(spec.shape)
    if isinstance(value, tuple):
        return [_face(look, v) for v in value]
    return value if isinstance(value, (str, float, bool)) or value is None else "n"

"""Completion: a few tensors are placed by hand, the rest at least cost.

Axis by axis in mesh order, every op chooses a signature so that the sum of op costs and boxing
costs is least, subject to the seeds; `minsum` finds that minimum exactly. A value with several
readers gets a hub: it is boxed once into the hub's placement and read from there. On later axes
shapes are those the earlier axes left. Exact per axis, not jointly over axes; no overlap, no
memory limit: this completes a decision, it does not search for one.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from laminar.cost.ops.roofline import op_s
from laminar.errors import NoRuleError, PlanError
from laminar.ir.graph import Graph, Node, Output
from laminar.ir.mesh import Mesh
from laminar.ir.plans.account import Account, CompletionCost, WholeOp
from laminar.ir.plans.plan import Choice, Plan
from laminar.ir.sbp import B, NdSbp, Partial, Sbp, Split, check_placement, local_spec, split_size
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.placement.minsum import MinSum
from laminar.rules.boxing.boxing import WIRE, Step, boxing, chain_s
from laminar.rules.notation import Call, Signature, calls_in, circulating_blocks, localise
from laminar.rules.ops.expand import LAZY, expand
from laminar.rules.ops.table import rule_for
from laminar.rules.signing import Blocks, follow, options, probed_signatures

SHARED = 6
"""A value with more readers than this is taken to be shared between blocks."""
STEP_S = 1e-9
"""A breath of cost for every boxing step, moving or not, so that of two equal plans the simpler wins."""


@dataclass
class Pins:
    """What must hold on one axis."""

    inputs: dict[str, Sbp] = field(default_factory=dict)
    values: dict[Ref, Sbp] = field(default_factory=dict)
    """Produced in, and read from, this placement."""
    grads: dict[str, Sbp] = field(default_factory=dict)
    read: dict[Ref, Sbp] = field(default_factory=dict)
    """However stored, every op reads it so."""
    stored_byte_s: float = 0.0
    """Seconds charged for each byte of a parameter stored whole."""
    split: set[Ref] = field(default_factory=set)
    """Values that ops named in `spread` read in shards, where there is any way."""
    sums: set[str] = field(default_factory=set)
    """Ops whose results stay partial, where there is any way."""
    spread: set[str] = field(default_factory=set)
    """Ops of which every rank must do only a part, where there is any way."""


def _output_nd(out: Output, inputs: Mapping[str, list[Sbp]], grads: Mapping[str, list[Sbp]], axes: int) -> NdSbp:
    """Gradients lie as they are reduced, new buffers as the old ones, and what is reported is whole."""
    if out.kind == "grad":
        return tuple(grads[out.name])
    return tuple(inputs[out.name]) if out.kind == "buffer" else (B,) * axes


def completed(
    graph: Graph,
    mesh: Mesh,
    pins: list[Pins],
    name: str,
    costs: Sequence[AxisCosts] | None = None,
    solved_as: Sequence[Hashable] = (),
    solved: dict[Hashable, Solved] | None = None,
) -> Plan:
    """A plan that holds every pin, one `Pins` per axis; without `costs` by axis, those of an assumed machine.

    Who asks for many plans that are the same on their first axes keeps them in `solved`; `solved_as` has for each axis
    a name that stands for all that was asked for on it, and on those before it.
    """
    whole = calls_in(graph)
    calls = dict(whole)
    chosen: dict[str, list[Signature]] = {n.name: [] for n in graph.nodes}
    inputs: dict[str, list[Sbp]] = {i.name: [] for i in graph.inputs}
    grads: dict[str, list[Sbp]] = {i.name: [] for i in graph.inputs}
    total, whole_s, exact = 0.0, sum(_op_s(c) for c in calls.values()), True
    for axis, parts in enumerate(mesh.sizes):
        if parts == 1:  # nothing to decide
            for node in graph.nodes:
                chosen[node.name].append(Signature((B,) * len(calls[node.name].ins), (B,) * len(node.outs)))
            for item in graph.inputs:
                inputs[item.name].append(B)
                grads[item.name].append(B)
            continue
        specs = {i.name: local_spec(i.spec, tuple(inputs[i.name]), mesh.sizes[:axis]) for i in graph.inputs}
        here = costs[axis] if costs is not None else assumed_costs(parts)
        key = solved_as[axis] if solved is not None else None
        one = solved.get(key) if solved is not None else None
        if one is None:
            one = _Axis(graph, calls, specs, here, pins[axis], mesh.names[axis]).solve()
            if solved is not None:
                solved[key] = one
        total, exact = one.cost, exact and one.exact
        for node in graph.nodes:
            signature = one.signatures[node.name]
            chosen[node.name].append(signature)
            calls[node.name] = localise(calls[node.name], signature, parts)
        for item in graph.inputs:
            inputs[item.name].append(one.inputs[item.name])
            grads[item.name].append(pins[axis].grads.get(item.name, one.inputs[item.name]))
    outputs = {f"{out.kind}:{out.name}": _output_nd(out, inputs, grads, len(mesh.sizes)) for out in graph.outputs}
    ops = {
        n.name: Choice(
            tuple(tuple(s.ins[i] for s in chosen[n.name]) for i in range(len(calls[n.name].ins))),
            tuple(tuple(s.outs[i] for s in chosen[n.name]) for i in range(len(n.outs))),
        )
        for n in graph.nodes
    }
    found = CompletionCost(
        cost_s=total,
        replicated_s=whole_s,
        solver="completed exactly, axis by axis" if exact else "completed approximately: some tables were cut",
        unsplit=_unsplit(graph, whole, whole_s),
    )
    account = Account(completion=found)
    return Plan(mesh, graph.hash, ops, {k: tuple(v) for k, v in inputs.items()}, outputs, {}, name, account)


_op_s = lru_cache(maxsize=1 << 16)(op_s)


def _unsplit(graph: Graph, calls: Mapping[str, Call], total_s: float) -> tuple[WholeOp, ...]:
    """Ops with neither rule nor probed signature, and their share of the work."""
    probed = {name for name, sigs in graph.probed if sigs}
    rows = []
    for node in graph.nodes:
        if rule_for(calls[node.name]) is None and node.name not in probed:
            share = op_s(calls[node.name]) / (total_s or 1.0)
            rows.append(WholeOp(op=node.op, share=share, where=node.where))
    return tuple(rows)


@dataclass
class Solved:
    """What one axis came to."""

    signatures: dict[str, Signature]
    inputs: dict[str, Sbp]
    cost: float
    exact: bool


BUCKETED = replace(WIRE, latency_s=0.0)
"""Reductions of gradients share buckets, so one more costs only its bytes."""


class AxisCosts:
    """Seconds of ops and of boxing on one axis of so many parts; this one knows an assumed machine only.

    Pure, and asked the same things again and again: answers are kept.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.boxed_s = lru_cache(maxsize=1 << 18)(self._boxed_s)
        self.table = lru_cache(maxsize=1 << 16)(self._table)
        self.signature_s = lru_cache(maxsize=1 << 16)(self._signature_s)

    def op_s(self, call: Call) -> float:
        """Seconds of a local call."""
        return op_s(call)

    def chain_s(self, chain: tuple[Step, ...], spec: TensorSpec, bucketed: bool) -> float:
        """Seconds of a chain of boxing steps; reductions of gradients travel in buckets."""
        if any(step.moves and step.kind not in ("all_reduce", "reduce_scatter") for step in chain):
            bucketed = False
        return chain_s(chain, spec, (self.parts,), BUCKETED if bucketed else WIRE)

    def _boxed_s(self, spec: TensorSpec, a: Sbp, b: Sbp, bucketed: bool = False) -> float:
        if a == b:
            return 0.0
        if spec.dtype == "bool" and Partial("sum") in (a, b):
            return np.inf
        chain = boxing(spec, (a,), (b,), (self.parts,))
        return self.chain_s(chain, spec, bucketed) + STEP_S * len(chain)

    def _table(
        self, spec: TensorSpec, rows: tuple[Sbp, ...], columns: tuple[Sbp, ...], bucketed: bool = False
    ) -> np.ndarray:
        return np.array([[self.boxed_s(spec, a, b, bucketed) for b in columns] for a in rows])

    def _signature_s(self, call: Call, signature: Signature) -> float:
        """Compute on one rank, and for an expansion its inner boxing as well."""
        cost = self.op_s(localise(call, signature, self.parts))
        if signature.how != "expand":
            return cost
        args = tuple(Ref(f"in{a.index}") if isinstance(a, Ref) else a for a in call.args)
        specs = {Ref(f"in{i}"): s for i, s in enumerate(call.ins)}
        nodes, ends = expand(call, args, specs, "x")
        for n in nodes:
            specs.update({Ref(n.name, i): o for i, o in enumerate(n.outs) if o})
        here: dict[Ref, set[Sbp]] = {Ref(f"in{i}"): {p} for i, p in enumerate(signature.ins)}
        given = {r: (next(iter(p)),) for r, p in here.items()}
        for placing in follow(nodes, given, specs, (self.parts,), call.op not in LAZY):
            for ref, (want,) in zip(placing.node.ins, placing.ins, strict=True):
                if want not in here[ref]:
                    cost += min(self.boxed_s(specs[ref], p, want) for p in here[ref])
                    here[ref].add(want)
            here.update({Ref(placing.node.name, i): {p[0]} for i, p in enumerate(placing.outs)})
        for end, want, spec in zip(ends, signature.outs, call.outs, strict=True):
            if spec is not None:
                cost += min(self.boxed_s(specs[end], p, want) for p in here[end])
        return cost


assumed_costs = lru_cache(maxsize=64)(AxisCosts)
"""The costs of presets, by parts."""


def circulating(calls: Mapping[str, Call]) -> Blocks:
    """Block counts that these calls' own merged dims bring up, by dim size."""
    found: dict[int, set[int]] = {}
    for call in dict.fromkeys(calls.values()):
        rule = rule_for(call)
        if rule is not None and "(" in rule.text:
            for size, count in circulating_blocks(rule, call):
                found.setdefault(size, set()).add(count)
    return tuple((n, tuple(sorted(k))) for n, k in sorted(found.items()))


def _splits(signature: Signature) -> bool:
    return any(isinstance(p, Split) for p in (*signature.ins, *signature.outs))


@lru_cache(maxsize=1 << 14)
def _passed_on(signature: Signature) -> tuple[tuple[int, str], ...]:
    """Inputs that are partial, and of which kind, where nothing is split: they can only be passed on."""
    wanted = tuple((i, p.op) for i, p in enumerate(signature.ins) if isinstance(p, Partial))
    return () if _splits(signature) else wanted


_Reader = tuple[int, tuple[Sbp, ...], TensorSpec, bool]
"""A variable, the placement each of its values wants, the tensor as it sees it, and whether it moves in buckets."""


class _Axis:
    """The problem of one axis."""

    def __init__(
        self,
        graph: Graph,
        calls: dict[str, Call],
        inputs: dict[str, TensorSpec],
        costs: AxisCosts,
        pins: Pins,
        axis: str,
    ) -> None:
        self.graph, self.calls, self.inputs, self.pins, self.axis = graph, calls, inputs, pins, axis
        self.costs, self.parts = costs, costs.parts
        self.problem = MinSum()
        self.blocks = self._blocks()
        self.probed = probed_signatures(graph)
        self.readers: dict[Ref, list[tuple[Node, int]]] = {}
        for node in graph.nodes:
            for i, ref in enumerate(node.ins):
                self.readers.setdefault(ref, []).append((node, i))

    def _read(self, var: int, domain: tuple[Sbp, ...], readers: Sequence[_Reader]) -> None:
        """What it costs that a value is read in other placements than it was made in."""
        for v, wanted, wanted_spec, bucketed in readers:
            table = self.costs.table(wanted_spec, domain, wanted, bucketed)
            if v == var:
                self.problem.add((v,), np.diag(table).copy())
            else:
                self.problem.add((var, v), table)

    def _blocks(self) -> Blocks:
        """The block counts that the graph's merged dims bring up, and those by which a batch is to be cut."""
        found = {n: set(counts) for n, counts in circulating(self.calls)}
        for item in self.graph.of_kind("batch"):
            cut = self.pins.inputs.get(item.name)
            if isinstance(cut, Split) and cut.blocks > 1:
                found.setdefault(self.inputs[item.name].shape[cut.dim], set()).add(cut.blocks)
        return tuple((n, tuple(sorted(counts))) for n, counts in sorted(found.items()))

    def solve(self) -> Solved:
        self.partials: dict[Ref, set[str]] = {}
        """Which kinds of partial each value can be made in without zero-padding."""
        signatures = {}
        for node in self.graph.nodes:
            signatures[node.name] = found = self._options(node)
            for i in range(len(node.outs)):
                kinds = {p.op for s in found if isinstance(p := s.outs[i], Partial)}
                self.partials[Ref(node.name, i)] = kinds
        self.vars: dict[str, int] = {}
        made: dict[Ref, tuple[int, tuple[Sbp, ...], TensorSpec]] = {}
        stored: dict[str, tuple[Sbp, ...]] = {}
        for item in self.graph.inputs:
            domain = self._domain(item.name, self.inputs[item.name], signatures)
            var = self.problem.variable(len(domain))
            stored[item.name] = domain
            self.vars[item.name] = var
            made[Ref(item.name)] = (var, domain, self.inputs[item.name])
            if item.kind == "param" and self.pins.stored_byte_s:
                whole = self.inputs[item.name].nbytes * self.pins.stored_byte_s
                self.problem.add((var,), np.array([whole if p == B else whole / self.parts for p in domain]))
        for const in self.graph.constants:
            made[Ref(const.name)] = (self.problem.variable(1), (B,), const.spec)
        for node in self.graph.nodes:
            found = signatures[node.name]
            var = self.problem.variable(len(found))
            self.vars[node.name] = var
            seconds = [self.costs.signature_s(self.calls[node.name], s) for s in found]
            self.problem.add((var,), np.array(seconds))
            for i, spec in enumerate(self.calls[node.name].outs):
                if spec is not None:
                    made[Ref(node.name, i)] = (var, tuple(s.outs[i] for s in found), spec)
        wants = self._output_wants(made)
        for ref, (var, domain, spec) in made.items():
            readers: list[_Reader] = [
                (self.vars[n.name], tuple(s.ins[i] for s in signatures[n.name]), self.calls[n.name].ins[i], False)
                for n, i in self.readers.get(ref, ())
            ]
            readers += [(v, d, spec, True) for v, d in wants.get(ref, ())]
            if len({r[0] for r in readers}) > 1:
                hub_domain = tuple(dict.fromkeys([*domain, *(p for r in readers for p in r[1])]))
                if len(readers) > SHARED:
                    hub_domain = self._shared(ref, hub_domain, readers)
                hub = self.problem.variable(len(hub_domain))
                self.problem.add((var, hub), self.costs.table(spec, domain, hub_domain))
                var, domain = hub, hub_domain
            self._read(var, domain, readers)
        solution = self.problem.solve()
        if not np.isfinite(solution.cost):
            raise NoRuleError(
                f"no plan holds all placements asked for on axis {self.axis}={self.parts}",
                next="drop one of the seeds; plan with fewer to see which",
            )
        return Solved(
            {n.name: signatures[n.name][solution.values[self.vars[n.name]]] for n in self.graph.nodes},
            {name: domain[solution.values[self.vars[name]]] for name, domain in stored.items()},
            solution.cost,
            solution.exact,
        )

    def _shared(self, ref: Ref, domain: tuple[Sbp, ...], readers: list[_Reader]) -> tuple[Sbp, ...]:
        """Placements for a value that many blocks read, such as a mask or rotary tables.

        It stands in every block's tables, so its own domain is kept small: whole, or as most of its
        readers can take it.
        """
        wanted = {p: sum(p in r[1] for r in readers) for p in domain}
        often = sorted((p for p in domain if p != B), key=lambda p: -wanted[p])
        return (B, *[p for p in often[:2] if wanted[p] * 2 > len(readers) and not isinstance(p, Partial)])

    def _options(self, node: Node) -> list[Signature]:
        """Signatures of a node that respect the pins on what it reads and makes."""
        pins = self.pins
        every = options(self.calls[node.name], self.parts, self.blocks, self.probed.get(node.name, ()))
        kept = list(every)
        if read := [(i, r) for i, r in enumerate(node.ins) if r in pins.read]:
            kept = [s for s in kept if all(self._readable(r, s.ins[i]) for i, r in read)]
        outs = range(len(node.outs)) if pins.values else ()
        for i, want in [(i, pins.values[ref]) for i in outs if (ref := Ref(node.name, i)) in pins.values]:
            kept = [s for s in kept if s.outs[i] == want or isinstance(s.outs[i], Partial)]
        kept = [s for s in kept if self._arises(node, s)] or kept
        if node.name in pins.sums:
            kept = [s for s in kept if any(isinstance(p, Partial) for p in s.outs)] or kept
        if node.name in pins.spread:
            kept = [s for s in kept if _splits(s)] or kept
            cut = [i for i, r in enumerate(node.ins) if r in pins.split]
            kept = [s for s in kept if all(isinstance(s.ins[i], Split) for i in cut)] or kept
        if not kept:
            raise NoRuleError(
                f"{node.op} can't read or make what is asked for on axis {self.axis}={self.parts}",
                tensor=f"%{node.name}",
                at=node.where,
                allowed="   ".join(map(str, every)),
                next="change one placement, or add a rule (docs/use/add_a_rule.md)",
            )
        return kept

    def _readable(self, ref: Ref, placement: Sbp) -> bool:
        """Whether a reader may want a value so; one pinned whole may also be read zero-padded, which moves nothing."""
        pinned = self.pins.read.get(ref, placement)
        return pinned == placement or (pinned == B and ref in self.pins.values and placement == Partial("sum"))

    def _arises(self, node: Node, signature: Signature) -> bool:
        """Whether the partial inputs of a signature can come about: no use in passing on what nobody makes."""
        wanted = _passed_on(signature)
        if not wanted:
            return True
        native = [op in self.partials.get(node.ins[i], ()) for i, op in wanted]
        return any(native) if wanted[0][1] == "sum" else all(native)

    def _domain(self, name: str, spec: TensorSpec, signatures: dict[str, list[Signature]]) -> tuple[Sbp, ...]:
        """Where an input may be stored: as pinned, else whole or as some reader splits it."""
        if name in self.pins.inputs:
            return (self.pins.inputs[name],)
        found: dict[Sbp, None] = {B: None}
        for node, i in self.readers.get(Ref(name), ()):
            found.update({s.ins[i]: None for s in signatures[node.name] if isinstance(s.ins[i], Split)})
        return tuple(found)

    def _output_wants(
        self, made: dict[Ref, tuple[int, tuple[Sbp, ...], TensorSpec]]
    ) -> dict[Ref, list[tuple[int, tuple[Sbp, ...]]]]:
        """Outputs as readers: a gradient is wanted as its parameter is stored, the loss whole."""
        wants: dict[Ref, list[tuple[int, tuple[Sbp, ...]]]] = {}
        for out in self.graph.outputs:
            if out.kind in ("grad", "buffer") and out.name not in self.pins.grads:
                var, domain, _ = made[Ref(out.name)]
                wants.setdefault(out.ref, []).append((var, domain))
            else:
                fixed = self.pins.grads.get(out.name, B) if out.kind == "grad" else B
                wants.setdefault(out.ref, []).append((self.problem.variable(1), (fixed,)))
        for ref, placement in self.pins.values.items():
            # Whatever the op makes, somebody reads the value in the pinned placement.
            wants.setdefault(ref, []).append((self.problem.variable(1), (placement,)))
        return wants


def match(graph: Graph, mesh: Mesh, seeds: Mapping[str, Mapping[str, Sbp]]) -> list[Pins]:
    """Seeds by pattern as pins per axis; a pattern that matches nothing is an error."""
    pins = [Pins() for _ in mesh.sizes]
    names = {i.name: i for i in graph.inputs}
    aliases = {a: i.name for i in graph.inputs for a in i.aliases}
    for pattern, placements in seeds.items():
        try:
            regex = re.compile(pattern)
        except re.error as error:
            raise PlanError(f"seed {pattern!r} is not a pattern: {error}") from error
        hits = {n for n in names if regex.fullmatch(n)} | {aliases[a] for a in aliases if regex.fullmatch(a)}
        nodes = [n for n in graph.nodes if regex.fullmatch(f"%{n.name}")]
        if not hits and not nodes:
            near = sorted(names, key=lambda n: -_common(n, pattern))[:3]
            raise PlanError(
                f"seed {pattern!r} matches no parameter, buffer or batch tensor",
                closest=", ".join(near),
                next="`laminar capture --report` lists all names; patterns match whole names",
            )
        for axis_name, placement in placements.items():
            axis = mesh.axis(axis_name)
            for name in hits:
                pins[axis].inputs[name] = placement
            for node in nodes:
                pins[axis].values[Ref(node.name)] = placement
    for name, item in names.items():
        nd = tuple(p.inputs.get(name, B) for p in pins)
        check_placement(item.spec, nd, mesh.sizes, f"seed for {name}")
        if any(isinstance(p, Partial) for p in nd):
            raise PlanError(f"{name} can't be stored as a partial value", allowed="S(d)  S(d, blocks=k)  B")
    return pins


def _common(a: str, b: str) -> int:
    return len(set(re.findall(r"[A-Za-z]+", a)) & set(re.findall(r"[A-Za-z]+", b)))


Seeds = Mapping[str, Mapping[str, Sbp]]


def storable(spec: TensorSpec, parts: int) -> Sbp:
    """The first dim that gives every rank something, evenly if any dim does; else whole."""
    for fits in (lambda n: n % parts == 0 and n, lambda n: split_size(n, Split(0), parts, parts - 1) > 0):
        for d, n in enumerate(spec.shape):
            if fits(n):
                return Split(d)
    return B

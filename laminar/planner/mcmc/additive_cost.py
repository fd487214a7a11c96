"""What a placement costs if nothing overlaps, as a sum that is cheap to change: one op moves, a few terms follow.

A *site* is an op, or a tensor that is stored. Its *options* are the ways it can lie: an op reads and makes tensors in
certain placements, on all axes of the mesh at once; a stored tensor is made as it is stored, and reads its gradient as
its optimizer state lies. A *value* is made at one site and read at others. The cost of a state, one option for every
site, is

    sum over sites of their seconds  +  sum over values of the boxing from how it is made to all ways it is read

where ways that several readers share are paid once, from whichever placement is there already and nearest, as lowering
does it. Seconds are those of completion (`planner/space/axis_prices.py`): the same prices of ops and of exchanges,
axis by axis. Parameters are fetched anew for backward, again as in lowering; they and gradients pay their share of a
full bucket.

Everything is looked up: placements are numbers, options of equal ops are one table, and what a value costs is
remembered by the numbers of its placements. `move_s` answers what a change would cost without making it. How much of
the exchanges of gradients and parameters other work hides is a number (`hide`), since only a simulation knows it. A
folded graph stands for a deep one if its sites count as often as they stand there (`weights`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laminar.ir.graph import Graph, Node
from laminar.ir.plans.account import Account
from laminar.ir.plans.plan import Choice, Plan
from laminar.ir.sbp import B, NdSbp, Partial, local_spec
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.placement.complete import circulating
from laminar.planner.mcmc.joint_prices import Joint
from laminar.planner.space.axis_prices import PricedAxis
from laminar.rules.notation import Call, call_of
from laminar.rules.signing import Blocks, Probed, probed_signatures, resolve

MOVABLE_INPUTS = ("param", "buffer", "batch")
"""Inputs whose placement may change; others stay as they are."""


@dataclass(frozen=True, slots=True)
class SiteOption:
    """One way of a site, placements by number: what it reads, what it makes, its own seconds."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class SiteTable:
    """All options of a site; equal ops share one."""

    options: tuple[SiteOption, ...]
    number: Mapping[tuple[tuple[int, ...], tuple[int, ...]], int]
    """Which option it is that reads and makes so."""
    fitting: tuple[Mapping[int, tuple[int, ...]], ...]
    """By tensor, those read before those made: the options that have it in a placement."""

    @staticmethod
    def of(found: Iterable[SiteOption]) -> SiteTable:
        """A table of options, each once."""
        rows = tuple({(o.ins, o.outs): o for o in found}.values())
        fitting: list[dict[int, tuple[int, ...]]] = [{} for _ in (*rows[0].ins, *rows[0].outs)]
        for k, o in enumerate(rows):
            for i, nd in enumerate((*o.ins, *o.outs)):
                fitting[i][nd] = (*fitting[i].get(nd, ()), k)
        return SiteTable(rows, {(o.ins, o.outs): k for k, o in enumerate(rows)}, tuple(fitting))


SiteMove = Sequence[tuple[int, int]]
"""Sites, each once, and their new options."""
Change = list[tuple[int, int, tuple[int, ...], float]]
"""Values that a move touches: how they are then made and read, and what they then cost."""


class Additive:
    """The sum for one graph on one mesh, and the state it is taken of."""

    def __init__(
        self, graph: Graph, plan: Plan, costs: Sequence[PricedAxis], weights: Mapping[str, float] | None = None
    ) -> None:
        """Begin with a plan, at the prices of each axis; ops and inputs count once, or by their `weights`."""
        self.graph, self.mesh, self.plan = graph, plan.mesh, plan
        self.prices = Joint(costs, plan.mesh)
        self.nds: list[NdSbp] = []
        """Placements by number."""
        self._number: dict[NdSbp, int] = {}
        self._spreads: dict[Any, dict[Any, float]] = {}
        self._tables: dict[Any, SiteTable] = {}
        self.names: list[str] = []
        self.tables: list[SiteTable] = []
        self.at: list[int] = []
        self.weight: list[float] = []
        self.site: dict[str, int] = {}
        self._weights = weights or {}
        self._update_s = self._update_element_s()
        self._build()
        self.total_s = self.full_s()

    # --- what there is

    def _build(self) -> None:
        graph, plan = self.graph, self.plan
        probed, calls = probed_signatures(graph), {n.name: call_of(n, graph.specs) for n in graph.nodes}
        self.blocks = circulating(calls)
        alike: dict[Any, list[Node]] = {}
        for node in graph.nodes:
            alike.setdefault((calls[node.name], probed.get(node.name, ())), []).append(node)
        by_op: dict[str, SiteTable] = {}
        for (call, extra), nodes in alike.items():
            chosen = dict.fromkeys((plan.ops[n.name].ins, plan.ops[n.name].outs) for n in nodes)
            table = SiteTable.of(self._op_options(call, self.blocks, extra, chosen, nodes[0]))
            by_op.update({n.name: table for n in nodes})
        grads = {o.name: o.ref for o in graph.outputs if o.kind == "grad"}
        inputs = self._input_tables(by_op, set(grads))
        made: dict[Ref, tuple[int, int]] = {}
        for item in graph.inputs:
            nd, state = plan.inputs[item.name], plan.state.get(item.name, plan.inputs[item.name])
            wants = (state,) if item.name in grads else (nd,) if self._written(item.name) else ()
            made[Ref(item.name)] = (self._add(item.name, inputs[item.name], wants, (nd,)), 0)
        for node in graph.nodes:
            choice = plan.ops[node.name]
            site = self._add(node.name, by_op[node.name], choice.ins, choice.outs)
            made.update({Ref(node.name, i): (site, i) for i, o in enumerate(node.outs) if o is not None})
        self._wire(made, grads)

    def _written(self, name: str) -> bool:
        return any(o.kind == "buffer" and o.name == name for o in self.graph.outputs)

    def _add(self, name: str, table: SiteTable, ins: Sequence[NdSbp], outs: Sequence[NdSbp]) -> int:
        self.site[name] = len(self.names)
        self.names.append(name)
        self.tables.append(table)
        self.at.append(table.number[tuple(map(self.nd, ins)), tuple(map(self.nd, outs))])
        self.weight.append(self._weights.get(name, 1.0))
        return len(self.names) - 1

    def _wire(self, made: Mapping[Ref, tuple[int, int]], grads: Mapping[str, Ref]) -> None:
        """Values, who makes them, and who reads them."""
        graph = self.graph
        params = {i.name for i in graph.of_kind("param")}
        self.reads: list[list[tuple[int, int]]] = [[] for _ in self.names]
        """By site, the values it reads and in which of its placements."""
        self.makes: list[list[tuple[int, int]]] = [[] for _ in self.names]
        self.value_of: dict[tuple[Ref, str], int] = {}
        self.refs: list[Ref] = []
        self.leaves: list[bool] = []
        """By value, whether it is a gradient on its way to the optimizer."""
        self.packed: list[bool] = []
        """By value, whether it travels in buckets with others of its kind, as gradients and parameters do."""
        self.made: list[int] = []
        self.wants: list[tuple[int, ...]] = []
        self.value_weight: list[float] = []
        self.shown: list[float] = []
        """The weights of values if nothing is hidden."""
        self.spread: list[dict[Any, float]] = []
        self.specs: list[TensorSpec] = []

        def value(ref: Ref, way: str, leaves: bool = False) -> int:
            key = (ref, "out" if leaves else way if ref.name in params else "")
            if key not in self.value_of:
                site, i = made.get(ref, (-1, 0))
                v = self.value_of[key] = len(self.refs)
                self.refs.append(ref)
                self.leaves.append(leaves)
                self.packed.append(leaves or ref.name in params)
                everywhere = self.nd((B,) * len(self.mesh.sizes))
                self.made.append(self.tables[site].options[self.at[site]].outs[i] if site >= 0 else everywhere)
                self.wants.append(())
                self.value_weight.append(self.weight[site] if site >= 0 else 1.0)
                self.shown.append(self.value_weight[-1])
                self.specs.append(graph.specs[ref])
                self.spread.append(self._spreads.setdefault((graph.specs[ref], self.packed[v]), {}))
                if site >= 0:
                    self.makes[site].append((v, i))
            return self.value_of[key]

        def want(v: int, site: int, i: int) -> None:
            self.reads[site].append((v, i))
            self._wanted(v, self.tables[site].options[self.at[site]].ins[i])

        for node in graph.nodes:
            way = "forward" if node.phase == "forward" else "backward"
            for i, ref in enumerate(node.ins):
                want(value(ref, way), self.site[node.name], i)
        for out in graph.outputs:
            if out.kind == "grad":
                want(value(out.ref, "backward", True), self.site[out.name], 0)
            elif out.kind == "buffer":
                want(value(out.ref, "backward"), self.site[out.name], 0)
            else:
                self._wanted(value(out.ref, "backward"), self.nd(self.plan.outputs[f"{out.kind}:{out.name}"]))

    def _wanted(self, v: int, nd: int) -> None:
        self.wants[v] = tuple(sorted((*self.wants[v], nd)))

    def nd(self, nd: NdSbp) -> int:
        """The number of a placement."""
        found = self._number.get(nd)
        if found is None:
            found = self._number[nd] = len(self.nds)
            self.nds.append(nd)
        return found

    def _op_options(
        self, call: Call, blocks: Blocks, probed: Probed, chosen: Iterable[Any], node: Node
    ) -> Iterable[SiteOption]:
        """All signatures on all axes that the rules have, and those of the plan."""
        asked = [resolve(call, ins, outs, self.mesh, node, probed) for ins, outs in chosen]
        for signed in dict.fromkeys([*self.prices.ways(call, blocks, probed), *asked]):
            ins = tuple(tuple(s.ins[i] for s in signed) for i in range(len(call.ins)))
            outs = tuple(tuple(s.outs[i] for s in signed) for i in range(len(call.outs)))
            pairs = [*zip(call.ins, ins, strict=True), *zip(call.outs, outs, strict=True)]
            if all(spec is None or self.prices.legal(spec, nd) for spec, nd in pairs):
                yield SiteOption(tuple(map(self.nd, ins)), tuple(map(self.nd, outs)), self.prices.op_s(call, signed))

    def _input_tables(self, by_op: Mapping[str, SiteTable], trained: set[str]) -> dict[str, SiteTable]:
        """Where inputs may be stored: whole, as some reader has them, or as the plan has one like it."""
        graph, plan = self.graph, self.plan
        found: dict[str, SiteTable] = {}
        given: dict[Any, dict[tuple[NdSbp, NdSbp], None]] = {}
        for item in graph.inputs:
            pair = (plan.inputs[item.name], plan.state.get(item.name, plan.inputs[item.name]))
            given.setdefault((item.kind, item.spec), {})[pair] = None
        for item in graph.inputs:
            here = plan.inputs[item.name]
            ways = {here: None}
            if item.kind in MOVABLE_INPUTS:
                ways |= {(B,) * len(self.mesh.sizes): None}
                for node in graph.users.get(Ref(item.name), []):
                    for i, ref in enumerate(node.ins):
                        if ref.name == item.name:
                            nds = (self.nds[o.ins[i]] for o in by_op[node.name].options)
                            ways |= {nd: None for nd in nds if not any(isinstance(p, Partial) for p in nd)}
                ways |= {stored: None for stored, _ in given[item.kind, item.spec]}
            ways = {nd: None for nd in ways if self.prices.legal(item.spec, nd)}
            pairs = {(nd, nd): None for nd in ways}
            if item.name in trained:  # pieces of state of what lies whole: ZeRO, one parameter at a time
                pairs |= {(a, b): None for a in ways for b in ways if _refines(b, a)}
            if item.kind in MOVABLE_INPUTS:
                pairs |= given[item.kind, item.spec]
            pairs |= {(here, plan.state.get(item.name, here)): None}
            how = "state" if item.name in trained else "same" if self._written(item.name) else ""
            key = (item.spec, item.kind, how, tuple(sorted(pairs, key=str)))
            if key not in self._tables:
                self._tables[key] = SiteTable.of(
                    SiteOption((self.nd(state if how == "state" else nd),) if how else (), (self.nd(nd),), s)
                    for nd, state in key[-1]
                    for s in [self._stored_s(item.spec, nd, state) if how == "state" else 0.0]
                )
            found[item.name] = self._tables[key]
        return found

    # --- prices

    def _update_element_s(self) -> float:
        """What one more element of state takes to update."""
        weights = self._weights
        elements = sum(weights.get(i.name, 1.0) * i.spec.numel for i in self.graph.of_kind("param") if i.trainable)
        return self.prices.machine.update(1, round(elements)).seconds / elements if elements else 0.0

    def _stored_s(self, spec: TensorSpec, nd: NdSbp, state: NdSbp) -> float:
        """Updating the pieces of state, and gathering what was updated."""
        mine = local_spec(spec, state, self.mesh.sizes)
        return mine.numel * self._update_s + self.prices.boxed_s(spec, state, nd, True)

    def _value_s(self, v: int, made: int, wants: tuple[int, ...]) -> float:
        """Every distinct way it is read, each from the nearest placement that is there by then."""
        known = self.spread[v]
        found = known.get((made, wants))
        if found is None:
            left = {nd for nd in wants if nd != made}
            have, found = [made], 0.0
            while left:
                price, _, best = min(
                    (self.prices.boxed_s(self.specs[v], self.nds[a], self.nds[b], self.packed[v]), b != a, b)
                    for a, b in itertools.product(have, sorted(left))
                )
                found += price
                have.append(best)
                left.remove(best)
            known[made, wants] = found
        return found

    # --- the state

    def hide(self, share: float) -> None:
        """Count gradients that are reduced and parameters that are gathered by what is left if a share is hidden."""
        self.value_weight = [
            w * (1 - share) if packed else w for w, packed in zip(self.shown, self.packed, strict=True)
        ]
        self.total_s = self.full_s()

    def value_s(self, v: int) -> float:
        """What a value costs now, once and with nothing hidden."""
        return self._value_s(v, self.made[v], self.wants[v])

    def full_s(self) -> float:
        """The cost of the state, added up anew."""
        own = sum(w * t.options[k].seconds for w, t, k in zip(self.weight, self.tables, self.at, strict=True))
        values = zip(range(len(self.refs)), self.made, self.wants, self.value_weight, strict=True)
        return own + sum(w * self._value_s(v, made, wants) for v, made, wants, w in values)

    def move_s(self, move: SiteMove) -> tuple[float, Change]:
        """What a move adds to the cost, and what there is to be remembered if it is made."""
        touched: dict[int, tuple[int, list[int]]] = {}
        total = 0.0
        for site, k in move:
            rows = self.tables[site].options
            old, new = rows[self.at[site]], rows[k]
            total += self.weight[site] * (new.seconds - old.seconds)
            if old.ins != new.ins:
                ins, then = old.ins, new.ins
                for v, i in self.reads[site]:
                    if ins[i] != then[i]:
                        if v not in touched:
                            touched[v] = (self.made[v], list(self.wants[v]))
                        read = touched[v][1]
                        read.remove(ins[i])
                        read.append(then[i])
            if old.outs != new.outs:
                outs, then = old.outs, new.outs
                for v, i in self.makes[site]:
                    if outs[i] != then[i]:
                        touched[v] = (then[i], touched[v][1] if v in touched else list(self.wants[v]))
        change: Change = []
        for v, (made, read) in touched.items():
            read.sort()
            wants = tuple(read)
            weight, known = self.value_weight[v], self.spread[v]
            after = known.get((made, wants))
            if after is None:
                after = self._value_s(v, made, wants)
            before = known.get((self.made[v], self.wants[v]))
            if before is None:
                before = self._value_s(v, self.made[v], self.wants[v])
            total += weight * (after - before)
            change.append((v, made, wants, after))
        return total, change

    def make(self, move: SiteMove, delta_s: float, change: Change) -> None:
        """Make a move that `move_s` has answered for."""
        for site, k in move:
            self.at[site] = k
        for v, made, wants, _ in change:
            self.made[v], self.wants[v] = made, wants
        self.total_s += delta_s

    def go(self, state: Sequence[int]) -> None:
        """Go to another state; the sum is taken anew, so that rounding does not pile up."""
        move = [(site, k) for site, k in enumerate(state) if self.at[site] != k]
        self.make(move, *self.move_s(move))
        self.total_s = self.full_s()

    def plan_of(self, state: Sequence[int] | None = None) -> Plan:
        """The state as a plan."""
        at = self.at if state is None else state
        ops, inputs, state_of = {}, dict(self.plan.inputs), dict(self.plan.state)
        outputs = dict(self.plan.outputs)
        for name, table, k in zip(self.names, self.tables, at, strict=True):
            ins, outs = (tuple(self.nds[x] for x in side) for side in (table.options[k].ins, table.options[k].outs))
            if name in self.graph.by_name:
                ops[name] = Choice(ins, outs)
                continue
            if outs[0] != inputs[name] or (ins and ins[0] != state_of.get(name, inputs[name])):
                inputs[name] = outs[0]
                state_of.pop(name, None)
                if f"grad:{name}" in outputs:
                    outputs[f"grad:{name}"] = ins[0]
                    if ins[0] != outs[0]:
                        state_of[name] = ins[0]
                if f"buffer:{name}" in outputs:
                    outputs[f"buffer:{name}"] = outs[0]
        return replace(self.plan, ops=ops, inputs=inputs, outputs=outputs, state=state_of, account=Account())


def _refines(state: NdSbp, stored: NdSbp) -> bool:
    """Whether state lies as what is stored does, or in shards of it."""
    return all(a in (b, B) for a, b in zip(stored, state, strict=True))


def classes(graph: Graph, at: Mapping[str, tuple[int, str, int]], sum_of: Additive) -> list[tuple[int, ...]]:
    """Sites that stand at the same place of different layers and have the same options.

    `at` says where ops stand (`placement/fold.py`); parameters go with the ops that read them.
    """
    ops: dict[Any, list[int]] = {}
    inputs: dict[Any, dict[int, None]] = {}
    names = {i.name for i in graph.inputs}
    for node in graph.nodes:
        if node.name in at:
            _, way, k = at[node.name]
            ops.setdefault((way, k), []).append(sum_of.site[node.name])
            for i, ref in enumerate(node.ins):
                if ref.name in names:
                    inputs.setdefault((way, k, i), {})[sum_of.site[ref.name]] = None
    found = [tuple(sorted(sites)) for sites in (*ops.values(), *inputs.values())]
    return [c for c in dict.fromkeys(found) if len(c) > 1 and len({id(sum_of.tables[s]) for s in c}) == 1]

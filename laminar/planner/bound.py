"""At least so many seconds: a lower bound on the simulated time of every plan in a cell.

A sum over ops and edges that no plan can undercut, minimised exactly. What it adds up:

    work      Every rank does its lines one after the other. An op costs at least what its cheapest signature costs on
              the mesh. Kernels that a compiler writes cost at least what they cost on one device, each with its bytes
              divided by all ranks.
    chain     While an exchange is under way whose maker everything before it leads to, and whose reader everything
              behind it comes from, a rank stands still. Such edges of forward count in full. In backward other work
              goes on meanwhile: there they count like all others.
    exchange  Any other exchange runs beside the work, but slows it (`drag`): a second of it costs at least the share of
              a second that work loses while it runs. Gradients and parameters count as a share of a full bucket.
              Exchanges of different axes may run at the same time: of two, a mean counts.
    update    Optimizer state lies whole or in pieces. In pieces it is updated faster, but then what was updated is
              gathered, and that nothing hides.
    stages    With S stages and M micro-batches the slowest stage, which has at least its share of the work, does it M
              times, and stands still while the first micro-batch comes to it and the last one leaves.

Axes are taken apart: the share of an op's work that is left on a rank is a product over axes of numbers that are each
at least 1/size, and a product is at least its tangent there. So the minimum over all placements is at least a sum of
minima, one for each axis. Layers are taken apart too: each may choose anew how to lie, for nothing. Both only lower
the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from laminar.cost.families import COMPUTES, family_of
from laminar.cost.forms import Forms
from laminar.cost.prices import ALONE, UPDATES, Machine, _fused_work, _kind
from laminar.cost.tasks import SCALE
from laminar.cost.work import FREE
from laminar.ir.codec import Ref
from laminar.ir.graph import Graph, Node
from laminar.ir.mesh import Mesh
from laminar.ir.program import Program
from laminar.ir.sbp import B, Sbp, Split
from laminar.ir.tensor import TensorSpec
from laminar.lower.fuse import kernels
from laminar.lower.merge import BUCKET_BYTES, GATHER_BYTES, REDUCTIONS, SMALL_BYTES
from laminar.lower.recompute import boundary_bytes, recompute, written_out
from laminar.lower.stages import KEPT, stages
from laminar.lower.step import step_programs
from laminar.planner.cells import Cell
from laminar.planner.score import Model, extrapolated
from laminar.rules.boxing import boxing
from laminar.rules.notation import Call, Signature, call_of, localise
from laminar.rules.signing import Blocks, options, probed_signatures
from laminar.search import presets
from laminar.search.complete import circulating
from laminar.search.minsum import MinSum
from laminar.staging import pipeline

LARGE = 1 << 28
"""Bytes of an exchange whose latency does not count."""


@dataclass(frozen=True)
class Bound:
    """A lower bound for a cell, and what it is made of."""

    seconds: float
    mix: float
    """What share of it is work; the rest are exchanges."""
    kernels_s: float
    """Of it, kernels that a compiler writes."""


MIXES = (1.0, 0.7, 0.45)
"""How much work counts against exchanges: any mixture of bounds is one, and each is best somewhere."""


@dataclass(frozen=True)
class _Weights:
    """What a second counts: of a micro-batch's work, of its exchanges' lane, and of what comes once a step."""

    work: float
    lane: float
    ends: float


class Bounds:
    """Lower bounds for the cells of one model on one cluster."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._fused: dict[Any, list[tuple[int, tuple[int, int, str] | None]]] = {}
        self._known: dict[Cell, Bound] = {}
        self._quick: dict[Cell, Bound] = {}
        self._boxes: dict[tuple[Mesh, int], dict[Any, float]] = {}
        self._kept: dict[tuple[int, bool, bool], float] = {}

    def of(self, cell: Cell) -> Bound:
        """The bound of a cell, exchanges counted."""
        cell = replace(cell, recompute=False)  # what is made again only adds to it
        if cell not in self._known:
            ways = [(1.0,)] if len(cell.mesh.sizes) == 1 else [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)]
            mixed = [(mix, ways[0]) for mix in MIXES] + [(1.0, way) for way in ways[1:]]
            found = [self.quick(cell), *(self._bound(cell, mix, way) for mix, way in mixed)]
            self._known[cell] = max(found, key=lambda b: b.seconds)
        return self._known[cell]

    def quick(self, cell: Cell) -> Bound:
        """A lower one without exchanges: what work and updates take at least."""
        cell = replace(cell, recompute=False)
        if cell not in self._quick:
            self._quick[cell] = self._bound(cell, 1.0, (0.0,) * len(cell.mesh.sizes))
        return self._quick[cell]

    def rough(self, cell: Cell) -> float:
        """Seconds if every op could be divided by all ranks: what a call costs besides its work, and its share of that.

        Work takes no less in parts than in one, and every call is repeated for each micro-batch.
        """
        parts = cell.micro_batches + (cell.stages - 1) / cell.virtual
        devices = self.model.request.cluster.devices
        return self._work_s / devices * parts / cell.micro_batches + self._calls_s * parts / cell.stages

    @cached_property
    def _alone(self) -> tuple[float, float]:
        """Seconds of all ops and kernels on one device, and of their calls alone, which nothing divides."""
        one, cell = Mesh({"dp": 1}), Cell(1, 1, 1, 1, 1)
        machine = self.model.machine(one)
        # Where prices were measured nothing says what of them is the call's.
        call_s = 0.0 if machine.ops.measured.ops else machine.ops.rates.call_s
        found = [(times, self._op(*where, one).least) for where, times in self._counted(1)]
        ops = [(times, seconds) for times, seconds in found if seconds]
        written = {k: [self._kernel(machine, *w, 1) for w in self._written(cell, k)] for k in self.model.keeps}
        kernels_s = extrapolated({k: sum(v) for k, v in written.items()}, self.model.layers) if machine.fused else 0.0
        kernels = extrapolated({k: float(len(v)) for k, v in written.items()}, self.model.layers)
        total = sum(times * seconds for times, seconds in ops) + kernels_s
        calls = call_s * (sum(times for times, _ in ops) + (kernels if machine.fused else 0.0))
        return total, min(calls, total)

    @property
    def _work_s(self) -> float:
        return self._alone[0] - self._alone[1]

    @property
    def _calls_s(self) -> float:
        return self._alone[1]

    def least_bytes(self, cell: Cell) -> float:
        """What the fullest rank holds at least: its share of parameters and state, and of what backward reads."""
        graph, optimizer = self.model.graph, self.model.request.optimizer
        stays = sum(
            i.spec.nbytes + (UPDATES[optimizer] * i.spec.numel if i.trainable else 0) for i in graph.of_kind("param")
        )
        key = (cell.micro_batches, cell.plain, cell.recompute)
        if key not in self._kept:
            found = {k: self._kept_at(cell, k) for k in self.model.keeps}
            self._kept[key] = extrapolated(found, self.model.layers)
        # The first stage keeps a micro-batch for every stage behind it.
        under_way = min(cell.micro_batches, cell.stages) / cell.stages
        return stays / (cell.ranks * cell.stages) + self._kept[key] * under_way / cell.ranks

    def _kept_at(self, cell: Cell, keep: int) -> float:
        """Bytes that one device keeps of forward for backward, for one micro-batch."""
        graph = self.model.small(cell.micro_batches, keep)
        plan = presets.data_parallel(graph, Mesh({"dp": 1}), self._again(cell))
        if cell.plain:
            program = step_programs(graph, plan)[0]
            if self.model.machine(Mesh({"dp": 1})).fused:
                program = recompute(written_out(program))
            return float(boundary_bytes(program))
        made = stages(graph, pipeline(graph, 1, cell.micro_batches, 1, plan, couple="microbatch"))
        first = made.parts[0][0].program
        return float(sum(o.placed.spec.nbytes for o in first.outputs if o.kind == KEPT))

    def _again(self, cell: Cell) -> tuple[str, ...]:
        return (self.model.blocks,) if cell.recompute and self.model.blocks else ()

    def _bound(self, cell: Cell, mix: float, lanes: tuple[float, ...]) -> Bound:
        """With a mixture of work and exchanges, those of each axis counting by its share in `lanes`."""
        each = (cell.micro_batches + (cell.stages - 1) / cell.virtual) / cell.stages
        weights = _Weights(mix * each, (1 - mix) * cell.micro_batches / cell.stages, mix / cell.stages)
        fused = weights.work * self._kernels(cell)
        once = weights.ends * self._norm_s(cell.mesh)
        return Bound(fused + once + self._placed(cell, weights, lanes), mix, fused)

    def _norm_s(self, mesh: Mesh) -> float:
        """The norm of the gradient, every rank looking at its share."""
        graph = self.model.graph
        grads = [graph.specs[o.ref] for o in graph.outputs if o.kind == "grad"]
        if not grads:
            return 0.0
        pieces = [TensorSpec((max(1, g.numel // mesh.ranks),), g.dtype) for g in grads]
        return self.model.machine(mesh)._norm(pieces, sum(p.numel for p in pieces)).seconds

    # --- kernels that are written by a compiler

    def _kernels(self, cell: Cell) -> float:
        """Seconds of fused kernels at least, at full depth: as on one device, each divided by all ranks."""
        machine = self.model.machine(cell.mesh)
        if not machine.fused:
            return 0.0
        found = {k: sum(self._kernel(machine, *one, cell.ranks) for one in self._written(cell, k))
                 for k in self.model.keeps}  # fmt: skip
        return extrapolated(found, self.model.layers)

    def _written(self, cell: Cell, keep: int) -> list[tuple[int, tuple[int, int, str] | None]]:
        """Bytes and shape of every kernel that a compiler writes on one device."""
        key = (cell.micro_batches, keep, cell.plain)
        if key not in self._fused:
            graph, one = self.model.small(cell.micro_batches, keep), Mesh({"dp": 1})
            plan = presets.data_parallel(graph, one)
            if cell.plain:
                programs = [recompute(written_out(step_programs(graph, plan)[0]))]
            else:
                made = stages(graph, pipeline(graph, 1, cell.micro_batches, 1, plan, couple="microbatch"))
                programs = [written_out(p.program) for p in made.by_name.values()]
            self._fused[key] = [one for program in programs for one in _kernels_of(program)]
        return self._fused[key]

    def _kernel(self, machine: Machine, nbytes: int, shape: tuple[int, int, str] | None, ranks: int) -> float:
        nbytes //= ranks
        if shape is None:
            return machine._fused(nbytes, None).seconds
        rows, columns, kind = shape
        ways = [(max(1, rows // ranks), columns, kind), (rows, max(1, columns // ranks), kind)]
        return min(machine._fused(nbytes, way).seconds for way in ways)

    # --- ops and edges

    def _placed(self, cell: Cell, weights: _Weights, lanes: tuple[float, ...]) -> float:
        """Products and whatever else has a price of its own, exchanges and updates: the least over all placements."""
        mesh = cell.mesh
        total = sum(_Axis(self, cell, axis, weights, share).least_s() for axis, share in enumerate(lanes))
        if len(mesh.sizes) == 1:
            return total
        least = sum(times * self._op(*where, mesh).least for where, times in self._counted(cell.micro_batches))
        # Every axis has counted the least that an op can cost; it counts once.
        return total - (len(mesh.sizes) - 1) * weights.work * least

    def _counted(self, parts: int) -> Iterable[tuple[tuple[Graph, Node], float]]:
        """The ops of the model, one layer standing for all; how often each stands there."""
        keep = self.model.keeps[-1]
        graph, fold = self.model.small(parts, keep), self.model.fold
        for node in graph.nodes:
            place = fold.at.get(node.name) if len(self.model.keeps) > 1 else None
            if place is None:
                yield (graph, node), 1.0
            elif place[0] == 1:
                yield (graph, node), float(self.model.layers)

    def _op(self, graph: Graph, node: Node, mesh: Mesh) -> _Shares:
        machine = self.model.machine(mesh)
        priced = family_of(node.op) in COMPUTES or node.op in ALONE
        if machine.fused and (node.op in FREE or not priced):
            return _NOTHING
        return self._priced(
            call_of(node, graph.specs), mesh, self._blocks(graph), self._probed(graph).get(node.name, ())
        )

    def _priced(self, call: Call, mesh: Mesh, blocks: Blocks, probed: tuple[Signature, ...]) -> _Shares:
        known = self._shares.get((call, mesh))
        if known is None:
            known = self._shares[call, mesh] = _shares(self.model.machine(mesh), call, mesh, blocks, probed)
        return known

    @cached_property
    def _shares(self) -> dict[tuple[Call, Mesh], _Shares]:
        return {}

    def _blocks(self, graph: Graph) -> Blocks:
        found = self._all_blocks.get(id(graph))
        if found is None:
            found = self._all_blocks[id(graph)] = circulating({n.name: call_of(n, graph.specs) for n in graph.nodes})
        return found

    @cached_property
    def _all_blocks(self) -> dict[int, Blocks]:
        return {}

    def _probed(self, graph: Graph) -> dict[str, tuple[Signature, ...]]:
        found = self._all_probed.get(id(graph))
        if found is None:
            found = self._all_probed[id(graph)] = probed_signatures(graph)
        return found

    @cached_property
    def _all_probed(self) -> dict[int, dict[str, tuple[Signature, ...]]]:
        return {}


def _kernels_of(program: Program) -> list[tuple[int, tuple[int, int, str] | None]]:
    groups, forms = kernels(program), Forms(program)
    work = _fused_work(forms, groups, 0)
    return [w for group, w in zip(groups, work, strict=True) if _kind(forms.examples[forms.of[group[0]]]) == "fused"]


@dataclass(frozen=True)
class _Shares:
    """What an op costs at least on a mesh, and by axis what each of its signatures there adds."""

    least: float
    adds: tuple[dict[Signature, float], ...]


_NOTHING = _Shares(0.0, ())


def _shares(machine: Machine, call: Call, mesh: Mesh, blocks: Blocks, probed: tuple[Signature, ...]) -> _Shares:
    """Least cost and additions whose sum is never above the price of a pair of signatures."""
    sizes = mesh.sizes
    first = {s: localise(call, s, sizes[0]) for s in options(call, sizes[0], blocks, probed)}
    if len(sizes) == 1:
        prices = {s: machine.op(local).seconds for s, local in first.items()}
        least = min(prices.values())
        return _Shares(least, ({s: p - least for s, p in prices.items()},))
    pairs: dict[tuple[Signature, Signature], float] = {}
    for s, local in first.items():
        for t in options(local, sizes[1], blocks, probed):
            pairs[s, t] = machine.op(localise(local, t, sizes[1])).seconds
    least = min(pairs.values())
    adds: list[dict[Signature, float]] = [{}, {}]
    for pair, price in pairs.items():
        for axis in (0, 1):
            adds[axis][pair[axis]] = min(adds[axis].get(pair[axis], math.inf), price - least)
    # A product is at least its tangent; prices need not be products, so what is too much is taken back.
    over = 1.0
    for (s, t), price in pairs.items():
        both = adds[0][s] + adds[1][t]
        if both > price - least and both > 0:
            over = min(over, (price - least) / both)
    return _Shares(least, tuple({s: over * v for s, v in one.items()} for one in adds))


class _Axis:
    """The minimum over placements on one axis, one layer standing for all."""

    def __init__(self, bounds: Bounds, cell: Cell, axis: int, weights: _Weights, lane: float) -> None:
        """`lane` is the share by which exchanges on this axis count."""
        self.bounds, self.cell, self.axis, self.weights, self.lane = bounds, cell, axis, weights, lane
        self.mesh, self.parts = cell.mesh, cell.mesh.sizes[axis]
        self.machine = bounds.model.machine(self.mesh)
        self.rest = self.mesh.ranks // self.parts
        # Ranks that copy for themselves do nothing else meanwhile.
        self.drag = 1.0 if self.machine.cluster.backend == "shared" else 1 - self.machine.drag.compute / SCALE

    def least_s(self) -> float:
        """Seconds at full depth, weighted."""
        model = self.bounds.model
        graph = model.small(self.cell.micro_batches, model.keeps[-1])
        if len(model.keeps) == 1:
            return self._solved(graph, {n.name for n in graph.nodes})
        at = model.fold.at
        layer = {n.name for n in graph.nodes if n.name in at and at[n.name][0] == 1}
        outside = {n.name for n in graph.nodes if n.name not in at}
        return model.layers * self._solved(graph, layer) + self._solved(graph, outside)

    def _solved(self, graph: Graph, names: set[str]) -> float:
        """The least over the ops named, and edges between them; what comes from elsewhere lies as they like."""
        problem = MinSum()
        blocks, probed = self.bounds._blocks(graph), self.bounds._probed(graph)
        made: dict[Ref, tuple[int, tuple[Sbp, ...]]] = {}
        signatures: dict[str, tuple[Signature, ...]] = {}
        variables: dict[str, int] = {}
        nodes = [n for n in graph.nodes if n.name in names]
        for node in nodes:
            call = call_of(node, graph.specs)
            found = options(call, self.parts, blocks, probed.get(node.name, ()))
            signatures[node.name], variables[node.name] = found, (var := problem.variable(len(found)))
            shares = self.bounds._op(graph, node, self.mesh)
            if shares is not _NOTHING:
                most = shares.adds[self.axis]
                # A signature that another axis leaves no room for is not forbidden here, only not made cheaper.
                seconds = np.array([shares.least + most.get(s, 0.0) for s in found])
                problem.add((var,), self.weights.work * seconds)
            for i, o in enumerate(node.outs):
                if o is not None:
                    made[Ref(node.name, i)] = (var, tuple(s.outs[i] for s in found))
        if self.lane:
            self._edges(problem, graph, nodes, signatures, variables, made)
        self._updates(problem, graph, nodes, signatures, variables, made)
        return problem.solve().cost

    def _edges(self, problem: MinSum, graph: Graph, nodes: list[Node], signatures: dict[str, tuple[Signature, ...]],
               variables: dict[str, int], made: dict[Ref, tuple[int, tuple[Sbp, ...]]]) -> None:  # fmt: skip
        """Exchanges between these ops."""
        chain = self._chain(graph, nodes)
        readers: dict[Ref, list[tuple[Node, int]]] = {}
        for node in nodes:
            for i, ref in enumerate(node.ins):
                if ref in made:
                    readers.setdefault(ref, []).append((node, i))
        for ref, found in readers.items():
            var, domain = made[ref]
            for node, i in found:
                # What one reader has fetched serves the others: together they pay at least their mean.
                weight = self._weight(1.0 if (ref, node.name) in chain else self.drag / len(found), len(found))
                other = variables[node.name]
                if weight and other != var:
                    wanted = tuple(s.ins[i] for s in signatures[node.name])
                    problem.add((var, other), weight * self._table(graph.specs[ref], domain, wanted))

    def _weight(self, share: float, readers: int = 1) -> float:
        """What a second of an exchange counts of which so much is not hidden."""
        return self.lane * (self.weights.work * share + self.weights.lane / readers)

    def _updates(self, problem: MinSum, graph: Graph, nodes: list[Node], signatures: dict[str, tuple[Signature, ...]],
                 variables: dict[str, int], made: dict[Ref, tuple[int, tuple[Sbp, ...]]]) -> None:  # fmt: skip
        """Parameters: how each is stored, and who updates it.

        Stored and updated whole; stored whole and updated in pieces, which are gathered behind the update; or stored
        and updated in pieces, gathered whenever somebody reads them otherwise. Gradients go to whoever updates.
        """
        names = {n.name for n in nodes}
        readers: dict[str, list[tuple[Node, int]]] = {}
        for node in nodes:
            for i, ref in enumerate(node.ins):
                readers.setdefault(ref.name, []).append((node, i))
        for o in graph.outputs:
            if o.kind != "grad" or o.ref.name not in names:
                continue
            spec = graph.specs[o.ref]
            if not self.lane:
                if self.axis == 0:  # at least a piece for each rank, once
                    problem.add((problem.variable(1),), np.array([self._update_s(spec, self.mesh.ranks)]))
                continue
            pieces = [Split(d) for d, n in enumerate(spec.shape) if n >= self.parts]
            reading = [s.ins[i] for n, i in readers.get(o.name, ()) for s in signatures[n.name]]
            var, domain = made[o.ref]
            pieces = list(dict.fromkeys([*pieces, *(p for p in (*reading, *domain) if isinstance(p, Split))]))
            kinds: list[tuple[Sbp, Sbp]] = [(B, B), *((B, p) for p in pieces), *((p, p) for p in pieces)]
            owner = problem.variable(len(kinds))
            problem.add((owner,), np.array([self._kept_s(spec, *kind) for kind in kinds]))
            # With micro-batches sums are reduced when all are done, and nothing hides that.
            once = self.weights.ends * (self.drag if self.cell.plain else 1.0)
            once += self.weights.lane / self.cell.micro_batches
            table = np.array([[self._boxed(spec, p, kind[1]) for kind in kinds] for p in domain])
            problem.add((var, owner), self.lane * once * table)
            for node, i in readers.get(o.name, ()):
                wanted = tuple(s.ins[i] for s in signatures[node.name])
                table = np.array([[self._boxed(spec, kind[0], w) for w in wanted] for kind in kinds])
                problem.add((owner, variables[node.name]), self._weight(self.drag) * table)

    def _kept_s(self, spec: TensorSpec, stored: Sbp, owned: Sbp) -> float:
        """Updating, and putting together what was updated in pieces."""
        share = self.rest * (self.parts if isinstance(owned, Split) else 1)
        least = self._update_s(spec, self.mesh.ranks) if self.axis else 0.0  # which another axis has counted
        gathered = self.weights.ends * self._boxed(spec, owned, stored) if owned != stored else 0.0
        return self._update_s(spec, share) - least + self.lane * gathered

    def _update_s(self, spec: TensorSpec, share: int) -> float:
        return self.weights.ends * self._per_element * spec.numel / share

    @cached_property
    def _per_element(self) -> float:
        """Seconds of an update, for each element of many."""
        return self.machine._update(1, LARGE).seconds / LARGE

    def _chain(self, graph: Graph, nodes: list[Node]) -> set[tuple[Ref, str]]:
        """Edges of forward that nothing runs beside: (value, reader)."""
        forward = [n for n in nodes if n.phase == "forward" and n.op not in FREE]
        number = {n.name: k for k, n in enumerate(nodes)}
        above: dict[str, int] = {}
        for n in nodes:
            mask = 1 << number[n.name]
            for r in n.ins:
                mask |= above.get(r.name, 0)
            above[n.name] = mask
        heavy = sum(1 << number[n.name] for n in forward)
        below: dict[str, int] = {}
        readers: dict[str, list[Node]] = {}
        for n in nodes:
            for r in n.ins:
                readers.setdefault(r.name, []).append(n)
        for n in reversed(nodes):
            mask = 1 << number[n.name]
            for u in readers.get(n.name, ()):
                mask |= below[u.name]
            below[n.name] = mask
        found = set()
        for n in nodes:
            if n.phase != "forward":
                continue
            for ref in n.ins:
                if ref.name in number and not heavy & ~(above[ref.name] | below[n.name]):
                    found.add((ref, n.name))
        return found

    def _table(self, spec: TensorSpec, rows: tuple[Sbp, ...], columns: tuple[Sbp, ...]) -> np.ndarray:
        return np.array([[self._boxed(spec, a, b, True) for b in columns] for a in rows])

    def _boxed(self, spec: TensorSpec, a: Sbp, b: Sbp, alone: bool = False) -> float:
        """Seconds of an exchange at least, every other axis having divided the tensor.

        Parameters and gradients travel in buckets, so that theirs count as a share of one. A large value inside of the
        step travels `alone`; small ones may have company, and count by their bytes.
        """
        known = self.bounds._boxes.setdefault((self.mesh, self.axis), {})
        key = (spec, a, b, alone)
        found = known.get(key)
        if found is None:
            found = known[key] = self._exchange(spec, a, b, alone) if a != b else 0.0
        return found

    def _exchange(self, spec: TensorSpec, a: Sbp, b: Sbp, alone: bool) -> float:
        total = 0.0
        if spec.dtype == "bool":
            return 0.0
        for step in boxing(spec, (a,), (b,), (self.parts,)):
            if step.moves:
                held = spec.nbytes / self.rest / (self.parts if step.kind == "all_to_all" else 1)
                if alone:
                    large = held / self.parts >= SMALL_BYTES
                    total += self._seconds(step.kind, held) if large else self._bare(step.kind, held)
                else:
                    total += self._together(step.kind, held)
        return total

    def _seconds(self, kind: str, held: float) -> float:
        """Of one exchange by itself."""
        cost = self.machine.gloo if kind == "all_to_all" else self.machine.collectives
        times = self.machine._times["exchange" if cost.cluster.backend == "shared" else "wire"]
        return times * cost.on(kind, max(1, int(held)), self.mesh, (self.axis,)).seconds

    def _bare(self, kind: str, held: float) -> float:
        """Of its bytes alone."""
        return self._seconds(kind, LARGE) * held / LARGE

    def _together(self, kind: str, held: float) -> float:
        """Its share of a bucket: these are closed once they are full, so the largest holds twice as much.

        What does not fit into one may have company that is less than half as large, and leaves it that much.
        """
        if kind not in (*REDUCTIONS, "all_gather"):
            return self._bare(kind, held)
        received = (2 if kind == "all_reduce" else 1) * (self.parts - 1) / self.parts
        limit = (GATHER_BYTES if kind == "all_gather" else BUCKET_BYTES) / received
        if held < limit:
            return self._seconds(kind, 2 * limit) * held / (2 * limit)
        return max(self._bare(kind, held), self._seconds(kind, held) - self._seconds(kind, 2 * limit) / 2)

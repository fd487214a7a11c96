"""At least so many seconds: a lower bound on the simulated time of every plan in a cell.

A sum that no plan can undercut, minimised over all placements. What it adds up, and why:

    work       Every rank does its lines one after the other, so a step takes at least the sum of them. Products and
               whatever else has a price of its own are chosen with the placements (`least`); kernels that a compiler
               writes count what they cost on one device, divided by all ranks (`alone`); blocks that are recomputed
               may leave fewer of them.
    exchange   While an exchange runs beside work, the work is slower, and so is the exchange; while no work runs, time
               passes for nothing. Let work keep a share c of its speed beside an exchange, and the exchange a share t
               of its own. In a second of both, work loses 1 - c seconds and the exchange gets on by t; in a second of
               the exchange alone, work loses a second and the exchange gets on by 1. So whatever is hidden, a second of
               exchange costs at least the smaller of (1 - c) / t and 1. Ranks that copy for themselves do nothing else
               meanwhile: there it is 1.
    waiting    Of some exchanges it is known that nothing runs beside them: those count in full (`exposed`).
    levels     Exchanges that use the links of one level share them, so their seconds add up, whatever their axes.
               Those of different levels may run at the same time: of two, a mean counts, any mean, and the best one
               is looked for. What is gathered behind the update begins when all else is over, and has a mean of its
               own; so has, with micro-batches, the reduction of gradients, which begins when all of them are done.
    lanes      A step is not over before its exchanges are: a mixture of the sum above and of their seconds alone is a
               bound as well. It is only looked at where exchanges could take longer than everything together.
    update     Optimizer state lies whole or in shards. In shards it is updated faster, but then what was updated is
               gathered, which nothing hides, and ranks that hold pieces add up the norm of their gradients.
    fetching   Parameters in shards are gathered for forward, and for backward again, or held in between. What that
               saves is bounded by the room there is.
    stages     With S stages and M micro-batches some stage has at least its share of the work, wherever stages are cut,
               and does it M times. Where stages stand in a row, the pipe has to be filled and emptied as well
               (`pipeline_bound`). Besides, ranks agree on the beginning and the end of the step.
    memory     A pipeline that fits keeps its parameters in shards, lets micro-batches wait, or recomputes what it does
               not keep (`memory_bound`).

Layers stand in a row, and one stands for all (`Least.repeated`); what lies outside of layers may lie anyhow. Or the
first layer is taken together with what lies outside, and each of the others counts what a layer takes at least,
whatever it is given: least sums over ops of which no two share any. What is taken for granted is said by `alone`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from laminar.cost.machine import UPDATES, Machine
from laminar.cost.sim.tasks import FULL_SPEED
from laminar.forecast.pipeline_step import MEETING_S
from laminar.ir.graph import Graph, Node
from laminar.ir.mesh import Mesh
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.planner.bounds.boxing_bound import NO_LATENCY_BYTES, PARAMETERS, ROW, Ways, pairs_of
from laminar.planner.bounds.memory_bound import KeptLayer, held_s, starts
from laminar.planner.bounds.one_device import ONE_DEVICE, Alone, kernel_s
from laminar.planner.bounds.piece_bound import Least, Weights, per_element_s
from laminar.planner.bounds.pipeline_bound import Order, Row, RowOps, longest_row, stretch
from laminar.planner.bounds.signatures import Piece, Placements, SignaturePrices
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.score_placement import extrapolated
from laminar.planner.space.cell import Cell
from laminar.planner.tuning import FEW_MICRO_BATCHES, LEVEL_WEIGHTS, LEVEL_WEIGHTS_MICRO, MEMORY_WORTHS, WORK_WEIGHTS

LevelWeights = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
"""By level, what its exchanges count beside work, in reducing gradients, and behind the update."""


@dataclass(frozen=True)
class Bound:
    """A lower bound for a cell, and what it is made of."""

    seconds: float
    mix: float
    """What share of it is everything together; the rest are exchanges alone."""
    kernels_s: float
    """Of it, kernels that a compiler writes."""


class Bounds:
    """Lower bounds for the cells of one model on one cluster."""

    def __init__(self, model: Model, rows: int | None = None) -> None:
        """`rows`: up to how many stages are taken to stand in a row; unless given, as many as are sure to."""
        self.model = model
        self.alone = Alone(model)
        self._given_rows = rows
        self._known: dict[Cell, Bound] = {}
        self._quick: dict[Cell, Bound] = {}
        trained = sum(model.graph.specs[o.ref].numel for o in model.graph.outputs if o.kind == "grad")
        self._prices = SignaturePrices(trained // model.request.cluster.devices)
        self._pieces: dict[tuple[Mesh, int], list[tuple[Piece, int]]] = {}
        self._firsts: dict[Mesh, Piece] = {}
        self._lines: dict[tuple[object, ...], float] = {}
        self._rows: dict[tuple[Mesh, int], Row] = {}
        self._row_ops: dict[int, RowOps] = {}
        self._layers: dict[int, KeptLayer | None] = {}
        self._ways: dict[tuple[Mesh, tuple[float, ...]], Ways] = {}
        self._norms: dict[Mesh, float] = {}
        self._ones: dict[bool, tuple[float, float]] = {}

    # --- bounds, the cheapest first

    def rough(self, cell: Cell) -> float:
        """Seconds if every op could be divided by all ranks: what a call costs besides its work, and its share of that.

        Work takes no less in parts than in one, and every call is repeated for each micro-batch. Of measured ops that
        can't be said: parts may fit a cache.
        """
        if self.model.request.cluster.profile:
            return self.quick(cell).seconds
        each, _ = self._counts(cell)
        total_s, calls_s = self._alone_s(cell.recompute)
        return each * ((total_s - calls_s) / cell.ranks / cell.micro_batches + calls_s)

    def quick(self, cell: Cell) -> Bound:
        """A better one without exchanges: what work and updates take at least."""
        if cell not in self._quick:
            each, ends = self._counts(cell)
            kernels_s = self.alone.kernels_s(cell)
            seconds = self._around_s(cell) + self._solved(
                cell.mesh, cell.micro_batches, Weights(each, 0.0, ends, 0.0), None
            )
            if self.in_a_row(cell):
                work_s = self._solved(cell.mesh, cell.micro_batches, Weights(1.0, 0.0, 0.0, 0.0), None)
                seconds = max(seconds, self._row_s(cell, kernels_s + work_s))
            self._quick[cell] = Bound(seconds, 1.0, each * kernels_s)
        return self._quick[cell]

    def of(self, cell: Cell, worth_s: float = math.inf) -> Bound:
        """The best that is known of a cell, exchanges counted; one that is not below `worth_s` is good enough."""
        if cell in self._known:
            return self._known[cell]
        quick = self.quick(cell)
        if cell.micro_batches > FEW_MICRO_BATCHES and worth_s < math.inf:
            shared = self._bound(cell, self._shares(cell)[0], parts=1)
            if shared.seconds >= worth_s:
                return shared
        means = list(self._means(cell, worth_s))
        found = [quick, *means]
        best = max(found, key=lambda b: b.seconds)
        if best.seconds >= worth_s:
            return best
        if cell.plain:
            at = max(range(len(means)), key=lambda k: means[k].seconds)
            found.append(self._bound(cell, self._shares(cell)[at], 1, first=True))
            best = max(found, key=lambda b: b.seconds)
            if best.seconds >= worth_s:
                return best
        if self.in_a_row(cell):
            found += [self._in_row(cell, shares, worth_s) for shares in self._shares(cell)]
            best = max(found, key=lambda b: b.seconds)
            if best.seconds >= worth_s:
                return best
            found += [self._in_memory(cell, shares) for shares in self._shares(cell) if self._cramped(cell)]
        hidden = self._hidden(self.model.machine(cell.mesh))
        # With a plan whose exchanges take less than everything together no mixture gets beyond that.
        if best.seconds - quick.seconds > hidden * best.seconds:
            found += [self._mixed(cell, mix, shares) for mix in WORK_WEIGHTS for shares in self._shares(cell)]
        self._known[cell] = max(found, key=lambda b: b.seconds)
        return self._known[cell]

    def least_bytes(self, cell: Cell) -> float:
        """What the fullest rank holds at least: its share of parameters and state, and of what backward reads."""
        graph, optimizer = self.model.graph, self.model.request.optimizer
        stays = sum(
            i.spec.nbytes + (UPDATES[optimizer] * i.spec.numel if i.trainable else 0) for i in graph.of_kind("param")
        )
        # When the backward of a micro-batch begins, all places together keep all of it.
        return (stays + self.alone.kept_bytes(cell)) / (cell.ranks * cell.stages)

    # --- stages in a row

    @cached_property
    def rows(self) -> int:
        """Up to how many stages are taken to stand in a row: each waits for the one before it."""
        if self._given_rows is not None:
            return self._given_rows
        keep = self.model.keeps[-1]
        return longest_row(self.model.small(1, keep), self.model.fold, keep)

    def in_a_row(self, cell: Cell) -> bool:
        """Whether the stages of a cell's plans stand in a row."""
        return cell.stages > 1 and cell.stages * cell.virtual <= self.rows

    def starts(self, cell: Cell, of: Mapping[str, int]) -> list[int] | None:
        """Where all stages but the first begin in the row of forward ops; nothing where they are not known to be one.

        `of` has the stages of the ops of a micro-batch at full depth.
        """
        if not self.in_a_row(cell) or cell.virtual > 1:
            return None
        if cell.micro_batches not in self._row_ops:
            self._row_ops[cell.micro_batches] = RowOps.of(self.model.whole(cell.micro_batches))
        ops = self._row_ops[cell.micro_batches]
        return ops.starts(of, cell.stages) if len(ops.names) == self._order.places else None

    @cached_property
    def _order(self) -> Order:
        keep = self.model.keeps[-1]
        return Order.of(self.model.small(1, keep), self.model.fold, keep)

    def _row_s(self, cell: Cell, work_s: float, worth_s: float = math.inf) -> float:
        """A step whose stages stand in a row and together take so long for a micro-batch."""
        stages, micro, meeting_s = cell.stages, cell.micro_batches, self._meeting_s(cell)
        if cell.virtual > 1:
            return meeting_s + stretch(stages, cell.virtual, micro) * work_s
        return meeting_s + self._row(cell).least_s(stages, micro, work_s, worth_s - meeting_s)

    def _row(self, cell: Cell) -> Row:
        """Ops in their order, at their cheapest."""
        key = (cell.mesh, cell.micro_batches)
        if key not in self._rows:
            placements = self._pieces_of(*key)[0][0].placements
            seconds = {n.name: placements.least_s(n) for n in placements.graph.nodes}
            self._rows[key] = self._order.row(seconds)
        return self._rows[key]

    def _in_row(self, cell: Cell, shares: LevelWeights, worth_s: float) -> Bound:
        """With exchanges of each level counting by its share; what comes once a step is not counted."""
        kernels_s = self.alone.kernels_s(cell)
        work_s = kernels_s + self._line(cell, shares, cell.micro_batches, 0.0) / cell.micro_batches
        return Bound(self._row_s(cell, work_s, worth_s), 1.0, cell.micro_batches / cell.stages * kernels_s)

    # --- memory

    def _cramped(self, cell: Cell) -> bool:
        """Whether a rank could not hold everything whole: else memory asks for nothing."""
        graph, each = self.model.graph, UPDATES[self.model.request.optimizer]
        stays = sum(2 * i.spec.nbytes + each * i.spec.numel for i in graph.of_kind("param"))
        kept = self._kept(cell.micro_batches)
        most = self.model.layers * sum(nbytes for _, nbytes in kept.made) if kept else 0
        room = cell.stages * self.model.request.room_bytes
        return stays + cell.micro_batches * most / cell.ranks > room

    def _kept(self, micro_batches: int) -> KeptLayer | None:
        if micro_batches not in self._layers:
            keep, fold = self.model.keeps[-1], self.model.fold
            self._layers[micro_batches] = KeptLayer.of(self.model.small(micro_batches, keep), fold, keep)
        return self._layers[micro_batches]

    def _in_memory(self, cell: Cell, shares: LevelWeights) -> Bound:
        """With a byte of memory worth something, whatever serves best; nothing comes once a step."""
        micro, room = cell.micro_batches, cell.stages * self.model.request.room_bytes
        kernels_s = self.alone.kernels_s(cell)
        bare_s = self._line(cell, shares, micro, 0.0) / micro
        best_s, meeting_s = 0.0, self._meeting_s(cell)
        kept = self._kept(micro) if cell.virtual > 1 else None
        later_s: list[float] = [0.0]
        if kept is not None:
            row, order = self._row(cell), self._order
            later_s = [row.later_s[k] for k in starts(order.forward, self.model.fold)]
        again = self._pieces_of(cell.mesh, micro)[0][0].placements.least_s
        for worth in MEMORY_WORTHS:
            byte_s = worth * bare_s / room
            lean_s = kernels_s + self._line(cell, shares, micro, 0.0, byte_s) / micro
            if cell.virtual > 1:
                each = byte_s * micro / cell.ranks
                layer_s = kept.least(each, again if cell.recompute else lambda _: math.inf) if kept else 0.0
                filled = stretch(cell.stages, cell.virtual, micro)
                found_s = meeting_s + held_s(filled, lean_s, later_s, layer_s, byte_s * room)
            else:
                found_s = self._row_s(cell, lean_s - byte_s * room)
            if found_s < best_s:
                break  # what a byte is worth only gets worse from here
            best_s = found_s
        return Bound(best_s, 1.0, micro / cell.stages * kernels_s)

    # --- how it adds up

    def _counts(self, cell: Cell) -> tuple[float, float]:
        """What the busiest place does at least of a micro-batch's work, and of what comes once a step: the mean."""
        return cell.micro_batches / cell.stages, 1 / cell.stages

    def _means(self, cell: Cell, worth_s: float) -> Iterator[Bound]:
        """With one mean of the levels after the other, until one is good enough."""
        for shares in self._shares(cell):
            found = self._bound(cell, shares, cell.micro_batches)
            yield found
            if found.seconds >= worth_s:
                return

    def _bound(self, cell: Cell, shares: LevelWeights, parts: int, first: bool = False) -> Bound:
        """With exchanges of each level counting by its share; with the `first` layer apart from the others.

        A batch in one (`parts` = 1) takes no longer than in parts.
        """
        each, _ = self._counts(cell)
        seconds = self._around_s(cell) + each / cell.micro_batches * self._line(cell, shares, parts, 1.0, first=first)
        seconds = max(seconds, min(seconds + self._norm_sum_s(cell), self._whole_s(cell)))
        return Bound(seconds, 1.0, each * self.alone.kernels_s(cell))

    def _line(
        self, cell: Cell, shares: LevelWeights, parts: int, ends: float, byte_s: float = 0.0, first: bool = False
    ) -> float:
        """All micro-batches one after the other on the ranks of one stage, and a share of what comes once a step.

        What is stored costs each micro-batch `byte_s` for each byte.
        """
        key = (cell.mesh, parts, cell.plain, shares, ends, byte_s, first)
        if key not in self._lines:
            hidden = self._hidden(self.model.machine(cell.mesh))
            # With micro-batches gradients are reduced when all are done, and nothing hides that.
            sums = ends * (hidden if cell.plain else 1.0)
            weights = Weights(parts, parts * hidden, ends, sums, not cell.plain, stored=parts * byte_s)
            self._lines[key] = self._solved(cell.mesh, parts, weights, shares, first)
        return self._lines[key]

    def _mixed(self, cell: Cell, mix: float, shares: LevelWeights) -> Bound:
        """Everything counting by `mix` against exchanges alone."""
        each, ends = self._counts(cell)
        hidden = self._hidden(self.model.machine(cell.mesh))
        lane, once = (1 - mix) * cell.micro_batches / cell.stages, (1 - mix) / cell.stages
        sums = mix * ends * (hidden if cell.plain else 1.0) + once
        weights = Weights(mix * each, mix * each * hidden + lane, mix * ends, sums, not cell.plain)
        seconds = mix * self._around_s(cell) + self._solved(cell.mesh, cell.micro_batches, weights, shares)
        return Bound(seconds, mix, mix * each * self.alone.kernels_s(cell))

    def _around_s(self, cell: Cell) -> float:
        """Kernels, the norm of every rank's share of gradients, and what ranks have to agree on."""
        each, ends = self._counts(cell)
        return each * self.alone.kernels_s(cell) + ends * self._norm_s(cell.mesh) + self._meeting_s(cell)

    def _meeting_s(self, cell: Cell) -> float:
        return 0.0 if cell.plain else MEETING_S[self.model.request.cluster.device.kind]

    def _norm_s(self, mesh: Mesh) -> float:
        if mesh not in self._norms:
            graph = self.model.graph
            grads = [graph.specs[o.ref] for o in graph.outputs if o.kind == "grad"]
            pieces = [TensorSpec((max(1, g.numel // mesh.ranks),), g.dtype) for g in grads]
            elements = sum(p.numel for p in pieces)
            self._norms[mesh] = self.model.machine(mesh).norm(pieces, elements).seconds if grads else 0.0
        return self._norms[mesh]

    def _norm_sum_s(self, cell: Cell) -> float:
        """Ranks with pieces of gradients add up their squares."""
        if cell.mesh.ranks == 1 or not cell.plain:
            return 0.0
        machine = self.model.machine(cell.mesh)
        axes = tuple(range(len(cell.mesh.sizes)))
        return machine.times["wire"] * machine.gloo.on("all_reduce", 8, cell.mesh, axes).seconds

    def _whole_s(self, cell: Cell) -> float:
        """At least so many seconds if no rank has pieces: every parameter is updated whole."""
        graph = self.model.graph
        elements = sum(graph.specs[o.ref].numel for o in graph.outputs if o.kind == "grad")
        each_s = per_element_s(self.model.machine(cell.mesh), self._prices.updated)
        return self.quick(cell).seconds + each_s * elements * (1 - 1 / cell.mesh.ranks)

    def _hidden(self, machine: Machine) -> float:
        """What a second of an exchange costs at least."""
        if machine.cluster.backend == "shared":
            return 1.0
        return min(1.0, (1 - machine.drag.compute / FULL_SPEED) / (machine.drag.transfer / FULL_SPEED))

    def _shares(self, cell: Cell) -> list[LevelWeights]:
        """By level, what its exchanges count: all of them where one level has all."""
        cluster, mesh = self.model.request.cluster, cell.mesh
        groups = [mesh.group(axes, mesh.coords(0)) for axes in ((a,) for a in range(len(mesh.sizes)))]
        levels = sorted({max(0, cluster.span(group).level) for group in groups})

        def by_level(mean: float) -> tuple[float, ...]:
            way = (1.0,) if len(levels) == 1 else (mean, 1 - mean)
            return tuple(dict(zip(levels, way, strict=True)).get(k, 0.0) for k in range(len(cluster.levels)))

        means = LEVEL_WEIGHTS if cell.plain else LEVEL_WEIGHTS_MICRO
        return list(dict.fromkeys((by_level(beside), by_level(sums), by_level(after)) for beside, sums, after in means))

    # --- placements

    def _solved(
        self, mesh: Mesh, parts: int, weights: Weights, shares: LevelWeights | None, first: bool = False
    ) -> float:
        """The least of everything that depends on placements, at full depth; with the `first` layer by itself."""
        ways: list[Ways | None] = [None]
        if shares:
            ways = [self._ways_of(mesh, one) for one in (*shares, (1.0,) * len(shares[0]))]
        room = self.model.request.room_bytes
        if shares and not weights.parts:
            weights = replace(weights, held=self._held_s(mesh, weights, shares))
        pieces = self._pieces_of(mesh, parts)
        if first and len(pieces) > 1:
            layer, outside = Least(pieces[0][0], weights, *ways), Least(self._first_of(mesh), weights, *ways)
            seconds = (pieces[0][1] - 1) * layer.seconds() + outside.seconds()
        else:
            seconds = sum(Least(piece, weights, *ways).repeated(times) for piece, times in pieces)
        return seconds - (room * weights.held if weights.held < math.inf else 0.0)

    def _held_s(self, mesh: Mesh, weights: Weights, shares: LevelWeights) -> float:
        """What is taken to be the worth of a byte that forward has fetched and backward finds there; any is sound.

        A plan that gathers once saves what fetching parameters for backward counts, at most this for each byte that it
        holds meanwhile, and it holds no more than there is room for. Where all parameters fit, it saves everything.
        """
        if sum(i.spec.nbytes for i in self.model.graph.of_kind("param")) <= self.model.request.room_bytes:
            return 0.0
        ways = self._ways_of(mesh, shares[0])
        pieces, whole = np.full((1, len(mesh.sizes)), ROW), np.zeros((1, len(mesh.sizes)), dtype=np.intp)
        return (
            weights.hidden
            * float(ways.table(NO_LATENCY_BYTES, pairs_of(pieces, whole), PARAMETERS)[0, 0])
            / NO_LATENCY_BYTES
        )

    def _ways_of(self, mesh: Mesh, shares: tuple[float, ...]) -> Ways:
        key = (mesh, shares)
        if key not in self._ways:
            self._ways[key] = Ways(self.model.machine(mesh), mesh, shares)
        return self._ways[key]

    def _pieces_of(self, mesh: Mesh, parts: int) -> list[tuple[Piece, int]]:
        """One layer, and what lies outside of all; how often each stands in the model."""
        if (mesh, parts) not in self._pieces:
            graph = self.model.small(parts, self.model.keeps[-1])
            placements = self._placements(graph, mesh)
            at = self.model.fold.at if len(self.model.keeps) > 1 else {}
            layer = tuple(n for n in graph.nodes if n.name in at and at[n.name][0] == 1)
            outside = tuple(n for n in graph.nodes if n.name not in at)
            found = [(Piece(placements, layer, self._loops(layer)), self.model.layers), (Piece(placements, outside), 1)]
            self._pieces[mesh, parts] = [(piece, times) for piece, times in found if piece.nodes]
        return self._pieces[mesh, parts]

    def _placements(self, graph: Graph, mesh: Mesh) -> Placements:
        return Placements(graph, self.model.machine(mesh), mesh, self._prices)

    def _first_of(self, mesh: Mesh) -> Piece:
        """What lies outside of all layers together with the first of them, which takes what that hands over."""
        if mesh not in self._firsts:
            placements, at = self._pieces_of(mesh, 1)[0][0].placements, self.model.fold.at
            nodes = tuple(n for n in placements.graph.nodes if n.name not in at or at[n.name][0] == 0)
            self._firsts[mesh] = Piece(placements, nodes)
        return self._firsts[mesh]

    def _loops(self, layer: Sequence[Node]) -> dict[Ref, Ref]:
        """For what a layer reads from its neighbours, what it makes itself in the same place."""
        fold = self.model.fold
        out: dict[Ref, Ref] = {}
        for ref in (r for n in layer for r in n.ins):
            there = fold.at.get(ref.name)
            if there is not None and there[0] != 1:
                out[ref] = Ref(fold.ops[1, there[1], there[2]].name, ref.index)
        return out

    def stage_s(self, graph: Graph, cell: Cell) -> float:
        """What a stage that has this graph does in a step at least on a mesh: work, exchanges, updates; no kernels.

        All micro-batches one after the other. What it is given and what it hands on may lie anyhow.
        """
        mesh, micro, machine = cell.mesh, cell.micro_batches, self.model.machine(cell.mesh)
        piece = Piece(Placements(graph, machine, mesh, self._prices), graph.nodes)
        weights = Weights(micro, micro * self._hidden(machine), 1.0, 1.0, True)
        found = []
        for shares in self._shares(cell):
            ways = [self._ways_of(mesh, one) for one in (*shares, (1.0,) * len(shares[0]))]
            found.append(Least(piece, weights, *ways).seconds())
        return max(found)

    def one_device_s(self) -> float:
        """Seconds of all ops and kernels on one device."""
        return self._alone_s(False)[0]

    def _alone_s(self, recompute: bool) -> tuple[float, float]:
        """Seconds of all ops and kernels on one device, and of their calls alone, which nothing divides.

        Without kernels where blocks may be recomputed: there may be fewer of them then.
        """
        if recompute not in self._ones:
            self._ones[recompute] = self._one_s(recompute)
        return self._ones[recompute]

    def _one_s(self, recompute: bool) -> tuple[float, float]:
        cell = Cell(1, 1, 1, 1, 1)
        machine = self.model.machine(ONE_DEVICE)
        # Where prices were measured nothing says what of them is the call's.
        call_s = 0.0 if machine.ops.measured.ops else machine.ops.rates.call_s
        found = self._pieces_of(ONE_DEVICE, 1)
        ops = [(times, s) for piece, times in found for n in piece.nodes if (s := piece.placements.least_s(n))]
        total_s, calls = sum(times * s for times, s in ops), float(sum(times for times, _ in ops))
        if machine.fused and not recompute:
            written = {k: [kernel_s(machine, *one, 1) for one in self.alone.kernels(cell, k)] for k in self.model.keeps}
            total_s += extrapolated({k: sum(v) for k, v in written.items()}, self.model.layers)
            calls += extrapolated({k: float(len(v)) for k, v in written.items()}, self.model.layers)
        return total_s, min(call_s * calls, total_s)

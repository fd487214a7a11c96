"""What one micro-batch takes on the ranks of a stage, and what a pipeline of such micro-batches takes.

The model is lowered as one stage with two and with three layers, its forward and backward parts are simulated, and what
the third layer adds, every further one adds: seconds, what forward keeps for backward, weights, gradients. Data
parallel ranks do the same on their own samples, so the parts of a micro-batch depend on the samples of one rank and on
the tensor parallel ranks beside it, not on how many data parallel ranks, stages or micro-batches there are: these are
put together in closed form, and all cells with the same share have their parts in common. (Parameters in shards,
ZeRO 3, are gathered inside of parts; those depend on all ranks of a stage.)

All of it is an estimate, to decide what is worth simulating. A share that nobody has looked at yet is guessed from
another one in proportion to its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from laminar.cost.comm.stage_messages import even_hop_s
from laminar.cost.machine import UPDATES, Machine
from laminar.cost.sim.simulate import simulate
from laminar.forecast.pipeline_step import CONTROL_S, MEETING_S, owned, part_memory, part_schedule
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import B, Partial, local_spec
from laminar.lower.boxing.buckets import BUCKET_BYTES
from laminar.lower.stages.stage_programs import KEPT, stages
from laminar.planner.space.cell import Cell
from laminar.planner.space.styles import Style
from laminar.staging.balance import slowest_s, work_s
from laminar.staging.stage_plans import pipeline

if TYPE_CHECKING:
    from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.cost_by_depth import PART_NAMES, DepthLine, Parts, Share
from laminar.planner.tuning import FUSED_KEPT, HIDDEN_BY_STEP

HOPS_HELD = 5
"""Registers of a stage for what passes to others: two for each way in and out, forward and backward; fewer at ends."""


def share_of(model: Model, cell: Cell, style: Style, zero: int) -> Share:
    """A data parallel axis only says how many samples are left."""
    samples = model.samples // cell.micro_batches
    if model.request.place:  # who names tensors and axes wants them as they are
        return Share(cell.micro_batches, cell.mesh, style, zero if zero == 3 else 0, cell.recompute, samples)
    data = style.axes[0] == "data" and "inner" not in style.axes
    if data and zero < 3 and samples % cell.dp == 0 and "dp" in cell.mesh.names:
        return unit(model, cell, style, samples // cell.dp)
    return Share(cell.micro_batches, cell.mesh, style, zero if zero == 3 else 0, cell.recompute, samples)


def unit(model: Model, cell: Cell, style: Style, samples: int) -> Share:
    """The share of one data parallel rank, and the tensor parallel ones beside it, that has so many samples."""
    mesh, axes = Mesh({"dp": 1}), Style(("data",)).axes
    if cell.tp > 1:
        mesh = Mesh({"tp": cell.tp})
        axes = tuple(s for s, n in zip(style.axes, cell.mesh.names, strict=True) if n == "tp")
    own = replace(style, axes=axes)
    return Share(model.samples // samples, mesh, own, 0, cell.recompute, samples)


def parts_of(model: Model, share: Share) -> Parts:
    """Measured by simulation, once for each share."""
    found = model.parts.get(share)
    if found is None:
        small = model.small(share.micro_batches, model.keeps[-1])
        placer = model.placer(share.mesh)
        plan = model.planned(share.micro_batches, share.mesh, share.style)
        plan = placer.pieces(small, plan, share.style, share.zero)
        if share.recompute:
            plan = replace(plan, recompute=model.again(Cell(1, 1, 1, 1, 1, True), share.style))
        rows = {}
        for keep in model.keeps:
            graph = model.small(share.micro_batches, keep)
            rows[keep], model.modules[share] = _measured(model, graph, model.deepened(plan, graph), share)
        rows[model.keeps[0]]["hop_bytes"] = rows[model.keeps[-1]]["hop_bytes"]  # between layers, of which two are few
        found = model.parts[share] = Parts(share, **{name: _line(rows, name) for name in PART_NAMES})
    return found


def _line(rows: Mapping[int, Mapping[str, float]], name: str) -> DepthLine:
    depths = sorted(rows)
    if len(depths) == 1:
        return DepthLine(rows[depths[0]][name], 0.0)
    low, high = depths
    each = (rows[high][name] - rows[low][name]) / (high - low)
    return DepthLine(rows[high][name] - high * each, each)


def _measured(model: Model, graph: Graph, plan: Plan, share: Share) -> tuple[dict[str, float], dict[str, float]]:
    """A micro-batch through a shallow model on one stage's ranks; and the seconds of its modules, by name."""
    cluster, prices, mesh = model.request.cluster, model.inside, share.mesh
    made = stages(graph, pipeline(graph, 1, share.micro_batches, 1, plan, couple="microbatch"))
    out = dict.fromkeys(PART_NAMES, 0.0)
    weights: dict[str, int] = {}
    modules: dict[str, float] = {}
    for part in made.parts[0]:
        lines = part_schedule(part.program, prices)
        out[f"{part.kind}_s"] = simulate(lines.load).step / 1e9
        for line in lines.lines:
            if line.instr is not None:
                modules[line.instr.module] = modules.get(line.instr.module, 0.0) + line.price.seconds
        held = part_memory(part.program, cluster, model.request.optimizer)
        out["works_bytes"] = max(out["works_bytes"], float(held.peak_activations))
        grads = [o.placed.local(mesh) for o in part.program.outputs if o.kind == "grad"]
        out["grad_bytes"] += sum(g.nbytes for g in grads)
        out["sums_bytes"] += sum(
            o.placed.local(mesh).nbytes
            for o in part.program.outputs
            if o.kind == "grad"
            and any(isinstance(p, Partial) for p, n in zip(o.placed.nd, mesh.names, strict=True) if n == "tp")
        )
        pieces = owned(part.program, plan)
        out["elements"] += sum(o.placed.local(mesh).numel for o in pieces.outputs if o.kind == "grad")
        out["update_s"] += sum(price.seconds for _, price in Machine.around(prices, pieces, 0)[1])
        for item in part.program.inputs:
            if item.kind == "param":
                weights[item.name] = item.placed.local(mesh).nbytes
            elif item.kind == KEPT:
                out["kept_bytes"] += item.placed.local(mesh).nbytes
    out["weight_bytes"] = float(sum(weights.values()))
    out["hop_bytes"] = _hop_bytes(model, graph, plan)
    return out, modules


def _hop_bytes(model: Model, graph: Graph, plan: Plan) -> float:
    """Of what a layer passes to the next, on one rank: the largest value that its first op reads from before it."""
    second = (n for n in graph.nodes if n.phase == "forward" and model.fold.at.get(n.name, (0,))[0] == 1)
    node = next(second, None)
    if node is None:
        node = next((n for n in graph.nodes if any(r.name in plan.ops for r in n.ins)), graph.nodes[0])
    found = 0
    for ref, read in zip(node.ins, plan.ops[node.name].ins, strict=True):
        if ref.name in plan.ops:
            made = plan.ops[ref.name].outs[ref.index]
            # As `staging.passing` has it: as made, else as read, and never as a sum.
            nd = read if any(isinstance(p, Partial) for p in made) else made
            nd = tuple(B if isinstance(p, Partial) else p for p in nd)
            found = max(found, local_spec(graph.specs[ref], nd, plan.mesh.sizes).nbytes)
    return float(found)


# --- put together


def pipelined_s(model: Model, cell: Cell, parts: Parts, zero: int, each_s: float | None = None) -> float:
    """1F1B over stages of nearly equal work: the slowest works on every micro-batch, the rest is filled and emptied.

    `each_s` is what a place takes for a micro-batch, where that does not follow from the parts.
    """
    mean_s = (parts.forward_s.at(model.layers) + parts.backward_s.at(model.layers)) / cell.stages
    each = mean_s if each_s is None else each_s
    slowest = each * unevenly(model, cell, parts)
    hop = hop_s(model, cell, parts.hop_bytes.at(0)) if cell.stages > 1 else 0.0
    fill = (cell.stages - 1) * (each / cell.virtual + 2 * hop)
    once = MEETING_S[model.request.cluster.kind] + ends_s(model, cell, parts, zero)
    # The last two stages have two micro-batches under way, each of which goes there and comes back.
    return cell.micro_batches * (slowest + hop) + fill + once


def uneven(model: Model, share: Share, stages: int) -> float:
    """How much longer the slowest stage takes than the mean: cuts are between ops, not inside of them."""
    if stages == 1:
        return 1.0
    if (share, stages) not in model.uneven:
        ops, allowed = model.cuttable
        if share not in model.sums:
            work = work_by_op(model, share, model.graph)
            model.sums[share] = np.concatenate(([0.0], np.cumsum([work[n.name] for n in ops])))
        sums = model.sums[share]
        ends = sums[np.flatnonzero(allowed)] if allowed[1:-1].sum() >= stages - 1 else sums
        whole = float(sums[-1])
        model.uneven[share, stages] = slowest_s(ends, stages) * stages / whole if whole else 1.0
    return model.uneven[share, stages]


def unevenly(model: Model, cell: Cell, parts: Parts) -> float:
    """The same for places, which may have several stages: one of them the slowest of all, as a rule.

    Where stages don't come to whole layers, cuts fall at the same parts of layers again and again, and one place may
    get all the longer ones.
    """
    factor = uneven(model, parts.share, cell.stages * cell.virtual)
    return factor if split_layers(model, cell) else (factor + cell.virtual - 1) / cell.virtual


def split_layers(model: Model, cell: Cell) -> bool:
    """Whether stages don't come to whole layers."""
    return model.layers > 1 and model.layers % (cell.stages * cell.virtual) != 0


def ends_s(model: Model, cell: Cell, parts: Parts, zero: int) -> float:
    """What a stage does once a step: sums reduced to who updates, updates, and what was updated in shards gathered.

    Gradients that tensor parallel ranks have parts of are added up there first, and travel on in shards.
    """
    layers, stages = model.layers, cell.stages
    update_s = parts.update_s.at(layers) / stages
    if zero == 3:
        return update_s
    grads, sums = parts.grad_bytes.at(layers) / stages, parts.sums_bytes.at(layers) / stages
    weights = parts.weight_bytes.at(layers) / stages
    left = _left(cell, parts, model.layers)
    kind = "reduce_scatter" if zero else "all_reduce"
    seconds = exchange_s(model, cell, kind, sums, "tp") + exchange_s(model, cell, kind, grads * left, "dp")
    if not zero:
        return seconds + update_s
    seconds += exchange_s(model, cell, "all_gather", weights * left, "dp") + exchange_s(
        model, cell, "all_gather", sums, "tp"
    )
    return seconds + update_s * left / cell.dp


def _left(cell: Cell, parts: Parts, layers: float) -> float:
    """The share of its gradients that a rank is left with when those beside it have added up theirs."""
    grads = parts.grad_bytes.at(layers)
    return 1 - parts.sums_bytes.at(layers) / grads * (1 - 1 / cell.tp) if grads else 1.0


def exchange_s(model: Model, cell: Cell, kind: str, nbytes: float, axis: str = "dp") -> float:
    """Seconds of an exchange along an axis, in buckets."""
    if axis not in cell.mesh.names or not nbytes:
        return 0.0
    # What is larger than a bucket travels by itself.
    tensors = model.trained / cell.stages
    buckets = max(1, round(min(nbytes / BUCKET_BYTES, tensors)))
    prices = model.machine(cell.mesh).collectives
    at = (cell.mesh.names.index(axis),)
    return buckets * prices.on(kind, max(1, int(nbytes / buckets)), cell.mesh, at).seconds


def hop_s(model: Model, cell: Cell, nbytes: float) -> float:
    """A micro-batch's message from one stage to the next."""
    cluster = model.request.cluster
    level = cluster.levels[-1] if cell.ranks >= cluster.unit_devices[0] else cluster.levels[0]
    return CONTROL_S[cluster.kind] + even_hop_s(level, cell.ranks, nbytes)


def state_share(cell: Cell, parts: Parts, layers: float, zero: int) -> float:
    """Into how many pieces the state is cut that the ranks of a micro-batch have whole."""
    return cell.dp / _left(cell, parts, layers) if 0 < zero < 3 else 1.0


def plain_s(model: Model, cell: Cell, parts: Parts, zero: int) -> float:
    """A step without micro-batches: gradients and parameters travel beside the work, as far as that lasts."""
    layers = model.layers
    work_s = parts.forward_s.at(layers) + parts.backward_s.at(layers)
    moved, update_s = 0.0, parts.update_s.at(layers)
    if cell.dp > 1:
        kinds = ("all_reduce",) if not zero else ("reduce_scatter", "all_gather", *(("all_gather",) * (zero == 3)))
        moved = sum(exchange_s(model, cell, k, parts.weight_bytes.at(layers)) for k in kinds)
        update_s /= cell.dp if zero else 1
    return work_s + max(0.0, moved - HIDDEN_BY_STEP * work_s) + update_s


def plain_bytes(model: Model, cell: Cell, parts: Parts, zero: int) -> float:
    """What such a step holds."""
    layers, optimizer = model.layers, UPDATES[model.request.optimizer]
    share = {0: (1, 1), 1: (1, cell.dp)}.get(zero, (cell.dp, cell.dp))
    weights = (parts.weight_bytes.at(layers) + parts.grad_bytes.at(layers)) / share[0]
    state = optimizer * parts.elements.at(layers) / share[1]
    again = FUSED_KEPT if model.inside.fused and not cell.recompute else 1.0
    return weights + state + again * parts.kept_bytes.at(layers) + parts.works_bytes.at(layers)


def work_by_op(model: Model, share: Share, graph: Graph) -> dict[str, float]:
    """Seconds of forward ops with their backward, for balance: a module takes what its lines were priced at.

    Inside of a module an assumed machine's seconds say how that is shared out among its ops.
    """
    parts_of(model, share)
    keep, modules, fold = model.keeps[-1], model.modules[share], model.fold
    small, folded = model.small(share.micro_batches, keep), len(model.keeps) > 1
    assumed = work_s(small)
    total: dict[str, float] = {}
    for name, seconds in assumed.items():
        module = small.by_name[name].module
        total[module] = total.get(module, 0.0) + seconds
    out = {}
    for node in graph.nodes:
        if node.phase == "forward":
            layer = fold.at.get(node.name) if folded else None
            like = fold.ops[fold.stands_for(keep, layer[0]), layer[1], layer[2]].name if layer else node.name
            module = small.by_name[like].module
            each = assumed[like] / total[module] if total[module] else 0.0
            out[node.name] = each * modules.get(module, 0.0)
    return out

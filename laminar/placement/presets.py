"""Plans with names: data parallel, ZeRO, tensor parallel, and completion from seeds.

A preset that promises a pattern pins it. Data parallel: parameters are read whole and the batch is
split, so the only traffic is gradients. ZeRO: the same, with parameters, gradients or optimizer
state stored in shards. Tensor parallel: the residual stream is whole, and weights are split
wherever that keeps it so, which leaves two all-reduces per block each way. Context parallel: every
sequence is split by token, parameters are read whole, and attention is done row by row of its queries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from laminar.errors import MeshError, PlanError
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.ops import FREE
from laminar.ir.plans.account import Account
from laminar.ir.plans.patterns import apart, as_patterns, known_patterns
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import B, NdSbp, Partial, Sbp, Split, local_spec, no_rank_empty
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.placement.complete import Pins, Seeds, completed, match, storable
from laminar.rules.signing import Placing, follow

ATTENTION = ("laminar.attention", "laminar.attention_backward")
SHORT_STRETCH = 64
"""Tokens; with shorter stretches kernels take longer than what is gained by even work. Assumed, not measured."""
PRODUCTS = {
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten.convolution",
    "aten.convolution_backward",
    *ATTENTION,
}
"""The ops whose work tensor parallelism divides."""
Patterns = str | Sequence[str]
"""What to recompute in backward or to keep in the host's memory, such as "blocks.*"; see `ir/plans/patterns.py`."""
DATA_AXES = ("dp", "data", "batch", "fsdp", "zero")
PRESET_NAMES = ("data", "zero1", "zero2", "zero3", "tensor", "context")
"""Plans that can be asked for by name, on the command line and in Python."""
SPELLINGS = {"data_parallel": "data", "tensor_parallel": "tensor", "context_parallel": "context"}
"""Names from before, which still work."""


def data_parallel(graph: Graph, mesh: Mesh, recompute: Patterns = (), offload: Patterns = ()) -> Plan:
    """The batch split over every axis, parameters whole, gradients summed."""
    pins = [data_pins(graph, mesh, a) for a in range(len(mesh.sizes))]
    return recomputing(graph, completed(graph, mesh, pins, "data_parallel"), recompute, offload)


def recomputing(graph: Graph, plan: Plan, recompute: Patterns, offload: Patterns = ()) -> Plan:
    """The plan with these modules and values recomputed in backward, and those kept in the host's memory.

    A pattern that names nothing is refused, and so is what both name.
    """
    made, away = as_patterns(recompute), as_patterns(offload)
    apart(graph, made, away)
    return replace(plan, recompute=made, offload=away)


def zero(
    graph: Graph,
    mesh: Mesh,
    stage: int = 3,
    recompute: Patterns = (),
    offload: Patterns = (),
    gather_once: bool = False,
) -> Plan:
    """Data parallel with optimizer state (1), gradients (2) and parameters (3) in shards.

    With `gather_once` parameters that were gathered for forward stay whole until backward: a third less to exchange,
    for as much memory as they take.
    """
    if stage not in (1, 2, 3):
        raise PlanError(f"zero has no stage {stage!r}", allowed="1  2  3")
    if gather_once and stage < 3:
        raise PlanError(f"zero({stage}) gathers no parameters in a step", next="stage=3 with gather_once, or neither")
    pins = [data_pins(graph, mesh, a) for a in range(len(mesh.sizes))]
    # All axes together cut one dim, the last axis finest: each rank owns one contiguous piece.
    cut = {i.name: _pieces(i.spec, mesh) for i in graph.of_kind("param") if i.trainable or stage >= 3}
    pieces = {i.name: cut[i.name] for i in graph.of_kind("param") if i.trainable}
    for name, nd in cut.items():
        for axis, placement in enumerate(nd):
            if stage >= 2 and name in pieces:
                pins[axis].grads[name] = placement
            if stage >= 3:  # frozen ones, too, which are most of a model with adapters
                pins[axis].inputs[name] = placement
    plan = completed(graph, mesh, pins, f"zero({stage})")
    return recomputing(graph, replace(plan, state=pieces, gather_once=gather_once), recompute, offload)


def in_pieces(graph: Graph, plan: Plan, stage: int, axes: Sequence[int] | None = None, spared: float = 0.0) -> Plan:
    """ZeRO on any plan: what lies whole on an axis is kept in shards there; ops read what they read before.

    Of optimizer state (1), of gradients too (2), of parameters too (3); on all axes, or only on some (the ranks of a
    node share pieces, nodes hold the same). The smallest parameters, as many as are that share of all, are `spared`.
    """
    state, inputs, outputs = dict(plan.state), dict(plan.inputs), dict(plan.outputs)
    small = _smallest(graph, spared)
    for item in graph.of_kind("param"):
        if stage and (item.trainable or stage >= 3) and item.name not in small:
            nd = _finer(
                item.spec, plan.inputs[item.name], plan.mesh, range(len(plan.mesh.sizes)) if axes is None else axes
            )
            if item.trainable:
                state[item.name] = nd
            if stage >= 2 and item.trainable:
                outputs[f"grad:{item.name}"] = nd
            if stage >= 3:
                inputs[item.name] = nd
    return replace(plan, state=state, inputs=inputs, outputs=outputs, account=Account())


def _smallest(graph: Graph, share: float) -> set[str]:
    """The smallest parameters, so many that they are no more than that share of all; all of one size, or none."""
    sizes = Counter[int]()
    for item in graph.of_kind("param"):
        sizes[item.spec.numel] += item.spec.numel
    room, most = share * sizes.total(), 0
    for size in sorted(sizes):
        room -= sizes[size]
        if room < 0:
            break
        most = size
    return {i.name for i in graph.of_kind("param") if i.spec.numel <= most}


def _finer(spec: TensorSpec, nd: NdSbp, mesh: Mesh, axes: Sequence[int]) -> NdSbp:
    """A placement with every axis named cutting that can: its own dim, or with others one that they all divide."""
    out = list(nd)
    for axis in axes:
        parts = mesh.sizes[axis]
        if out[axis] != B or parts == 1:
            continue
        for d, n in enumerate(spec.shape):
            cuts = [(a, p) for a, p in enumerate(out) if isinstance(p, Split) and p.dim == d]
            # Cuts by several axes nest only if each is plain, and those outside come first.
            if any((isinstance(p, Split) and p.blocks > 1) or a > axis for a, p in cuts):
                continue
            if n % (parts * math.prod(mesh.sizes[a] for a, _ in cuts)) == 0:
                out[axis] = Split(d)
                break
    return tuple(out)


def _pieces(spec, mesh: Mesh) -> NdSbp:  # type: ignore[no-untyped-def]
    out: list[Sbp] = []
    for axis, parts in enumerate(mesh.sizes):
        here = local_spec(spec, tuple(out), mesh.sizes[:axis])
        placement = storable(here, parts)
        uneven = any(
            isinstance(p, Split)
            and isinstance(placement, Split)
            and p.dim == placement.dim
            and spec.shape[p.dim] % mesh.sizes[a]
            for a, p in enumerate(out)
        )
        out.append(B if uneven else placement)
    return tuple(out)


def tensor_parallel(
    graph: Graph, mesh: Mesh, axis: str | None = None, recompute: Patterns = (), offload: Patterns = ()
) -> Plan:
    """Weights split over one axis (`tp` unless named), the residual stream whole; other axes data parallel."""
    if axis is None:
        others = [n for n in mesh.names if n not in DATA_AXES]
        if len(others) != 1 and "tp" not in mesh.names:
            raise MeshError(
                f"which axis of {mesh} is tensor parallel?", next='name it: tensor_parallel(graph, mesh, axis="...")'
            )
        axis = "tp" if "tp" in mesh.names else others[0]
    at = mesh.axis(axis)
    pins = [tensor_pins(graph) if a == at else data_pins(graph, mesh, a) for a in range(len(mesh.sizes))]
    return recomputing(graph, completed(graph, mesh, pins, "tensor_parallel"), recompute, offload)


def context_parallel(
    graph: Graph,
    mesh: Mesh,
    axis: str | None = None,
    recompute: Patterns = (),
    offload: Patterns = (),
    stretches: int | None = None,
) -> Plan:
    """Sequences split by token over one axis (`cp` unless named), parameters whole; other axes data parallel.

    Each rank has so many `stretches` of every sequence, evenly apart; unless told as many as make causal attention
    nearly as much work on every rank.
    """
    if axis is None:
        others = [n for n in mesh.names if n not in DATA_AXES]
        if len(others) != 1 and "cp" not in mesh.names:
            raise MeshError(
                f"which axis of {mesh} is context parallel?", next='name it: context_parallel(graph, mesh, axis="...")'
            )
        axis = "cp" if "cp" in mesh.names else others[0]
    at = mesh.axis(axis)
    found = stretches_of(graph, mesh.sizes[at], stretches)
    pins = [
        context_pins(graph, mesh, a, found) if a == at else data_pins(graph, mesh, a) for a in range(len(mesh.sizes))
    ]
    return recomputing(graph, completed(graph, mesh, pins, "context_parallel"), recompute, offload)


def stretches_of(graph: Graph, parts: int, asked: int | None = None) -> int:
    """How many stretches of a sequence a rank is to have: those asked for, or as many as make work nearly even."""
    tokens = _sequences(graph)
    if asked is not None and (asked < 1 or (asked > 1 and tokens % (asked * parts))):
        raise PlanError(
            f"sequences of {tokens} tokens can't be split into {asked} equal stretches for each of {parts} ranks",
            next="stretches=1, or a number that divides them",
        )
    looks_back = any(
        n.op == ATTENTION[0] and n.args[4] and n.outs[0].shape[2] == tokens for n in graph.nodes if n.outs[0]
    )
    several = (k for k in (8, 4, 2) if looks_back and tokens % (k * parts) == 0 and tokens >= SHORT_STRETCH * k * parts)
    return asked or next(several, 1)


def preset_plan(
    name: str,
    graph: Graph,
    mesh: Mesh,
    recompute: Patterns = (),
    offload: Patterns = (),
    gather_once: bool = False,
) -> Plan:
    """The plan with one of `PRESET_NAMES`."""
    name = SPELLINGS.get(name, name)
    if name not in PRESET_NAMES:
        raise PlanError(f"there is no plan {name!r}", allowed="  ".join(PRESET_NAMES))
    if name.startswith("zero"):
        return zero(graph, mesh, int(name[4:]), recompute, offload, gather_once)
    if name == "tensor":
        return tensor_parallel(graph, mesh, None, recompute, offload)
    if name == "context":
        return context_parallel(graph, mesh, None, recompute, offload)
    return data_parallel(graph, mesh, recompute, offload)


def seeded(graph: Graph, mesh: Mesh, seeds: Seeds, recompute: Patterns = (), offload: Patterns = ()) -> Plan:
    """A few tensors placed by name pattern, the rest completed at least cost.

    A split that is asked for is used: ops it reaches by itself are not computed whole on every rank,
    and products read seeded weights in shards, even where gathering a small tensor first would be
    cheaper. Only where the batch is split by sample on the same axis are pieces of weights mere storage.
    """
    pins = match(graph, mesh, seeds)
    batch = {i.name for i in graph.of_kind("batch")}
    for axis, parts in enumerate(mesh.sizes):
        here = pins[axis]
        _follow_inputs(graph, here, parts, sums=False)
        if not any(here.inputs.get(name) == Split(0) for name in batch):
            here.split = _weights(graph, {n for n, p in here.inputs.items() if isinstance(p, Split)} - batch)
            here.spread |= {n.name for n in graph.nodes if n.op in PRODUCTS and any(r in here.split for r in n.ins)}
    return recomputing(graph, completed(graph, mesh, pins, "seeded"), recompute, offload)


def like(graph: Graph, plan: Plan) -> Plan:
    """A plan's decisions about parameters, gradients and state, for another graph of the same model.

    Another batch size, micro-batches, evaluation: the tensors that live from step to step must lie
    as they do, and what backward recomputes or the host keeps stays; everything else is completed anew, in the
    pattern of the plan.
    """
    mesh = plan.mesh
    batch = [nd for n, nd in plan.inputs.items() if n.split(".")[0] == "batch"]
    pins = []
    for axis in range(len(mesh.sizes)):
        if any(nd[axis] == Split(0) for nd in batch):
            here = data_pins(graph, mesh, axis)
        elif plan.name == "tensor_parallel":
            here = tensor_pins(graph)
        elif plan.name == "context_parallel" and _sequences(graph):
            first = next((p.blocks for nd in batch if isinstance(p := nd[axis], Split)), 1)
            fits = _sequences(graph) % (first * mesh.sizes[axis]) == 0
            here = context_pins(graph, mesh, axis, first if fits else 1)
        else:
            here = _cut_alike(graph, plan, axis)
        for item in graph.inputs:
            if item.kind in ("param", "buffer") and item.name in plan.inputs:
                here.inputs[item.name] = plan.inputs[item.name][axis]
                made = plan.outputs.get(f"grad:{item.name}")
                if made is not None:
                    here.grads[item.name] = made[axis]
        pins.append(here)
    recompute, offload = known_patterns(graph, plan.recompute), known_patterns(graph, plan.offload)
    found = completed(graph, mesh, pins, plan.name)
    return replace(found, state=plan.state, recompute=recompute, offload=offload, gather_once=plan.gather_once)


def _cut_alike(graph: Graph, plan: Plan, axis: int) -> Pins:
    """A batch that the plan cuts by another dim than its samples is cut by it again, where it is long enough."""
    pins, mesh = Pins(), plan.mesh
    for item in graph.of_kind("batch"):
        nd = plan.inputs.get(item.name, ())
        cut = nd[axis] if nd else B
        if isinstance(cut, Split) and cut.dim < len(item.spec.shape):
            here, parts = local_spec(item.spec, nd[:axis], mesh.sizes[:axis]).shape[cut.dim], mesh.sizes[axis]
            if no_rank_empty(here, parts) and (cut.blocks == 1 or here % (cut.blocks * parts) == 0):
                pins.inputs[item.name] = cut
    if pins.inputs:
        _follow_inputs(graph, pins, mesh.sizes[axis], sums=False)
    return pins


def data_pins(graph: Graph, mesh: Mesh, axis: int) -> Pins:
    """What data parallel means on one axis."""
    parts = mesh.sizes[axis]
    pins = Pins()
    samples = Counter(i.spec.shape[0] for i in graph.of_kind("batch") if i.spec.shape).most_common(1)
    for item in graph.inputs:
        pins.inputs[item.name] = B
        # Leaves of another length than most (class weights, shared positions) are not split by sample.
        if item.kind == "batch" and item.spec.shape and item.spec.shape[0] == samples[0][0]:
            size = item.spec.shape[0]
            for a in range(axis):
                size = -(-size // mesh.sizes[a])
            pins.inputs[item.name] = Split(0) if no_rank_empty(size, parts) else B
    _read_whole(graph, pins, parts)
    return pins


def context_pins(graph: Graph, mesh: Mesh, axis: int, stretches: int) -> Pins:
    """What context parallel means on one axis."""
    parts, tokens = mesh.sizes[axis], _sequences(graph)
    if not tokens:
        raise PlanError("no tensor of the batch has sequences, (samples, tokens, ...), to split by token")
    if not no_rank_empty(tokens, parts):
        raise PlanError(f"sequences of {tokens} tokens can't be split over {mesh}", next="use fewer ranks")
    pins = Pins(inputs=dict.fromkeys((i.name for i in graph.inputs), B))
    for item in graph.of_kind("batch"):
        if len(item.spec.shape) > 1 and item.spec.shape[1] == tokens:
            pins.inputs[item.name] = Split(1, stretches)
    _read_whole(graph, pins, parts)
    for node in graph.nodes:  # by head or by sample may cost less, and need as many of them
        if node.op in ATTENTION and node.outs[0] is not None and node.outs[0].shape[2] == tokens:
            pins.values[Ref(node.name)] = Split(2, stretches)
            for ref in node.ins:  # a mask is read in shards, also where it is a buffer
                pins.read.pop(ref, None)
    return pins


def _sequences(graph: Graph) -> int:
    """How many tokens the sequences of a batch have; 0 if there are none."""
    lengths = Counter(i.spec.shape[1] for i in graph.of_kind("batch") if len(i.spec.shape) > 1)
    return lengths.most_common(1)[0][0] if lengths else 0


def _read_whole(graph: Graph, pins: Pins, parts: int) -> None:
    """Ops read parameters, and what is made of nothing else, whole, and follow the batch."""
    whole = {i.name for i in graph.inputs if i.kind in ("param", "buffer", "rng")} | {c.name for c in graph.constants}
    trained = {i.name for i in graph.inputs if i.kind in ("param", "buffer")}
    for node in graph.nodes:
        if (
            node.ins
            and node.phase != "backward"
            and all(r.name in whole for r in node.ins)
            and not node.op.startswith("laminar.")
            # A parameter repeated for every sample (a class token) is no parameter any more.
            and sum(o.numel for o in node.outs if o) <= sum(graph.specs[r].numel for r in node.ins)
        ):
            whole.add(node.name)
            if any(r.name in trained for r in node.ins):
                trained.add(node.name)
    for ref in graph.specs:
        if ref.name in trained:
            pins.read[ref] = B
    # Otherwise a small batch would make the solver move activations instead of gradients, which can be
    # cheaper but is not what data parallel means.
    placings = _follow_inputs(graph, pins, parts, sums=True)
    for p in placings:  # rows of a table looked up for every sample are samples, however few there are
        for ref, nd in zip(p.node.ins, p.ins, strict=True):
            if isinstance(nd[0], Split) and p.node.phase != "backward":
                pins.read.pop(ref, None)


def _follow_inputs(graph: Graph, pins: Pins, parts: int, sums: bool) -> list[Placing]:
    """Pin what comes out if every op simply follows its inputs: who works on a part, and which values are sums."""
    given: dict[Ref, NdSbp] = {Ref(i.name): (pins.inputs.get(i.name, B),) for i in graph.inputs}
    given |= {Ref(c.name): (B,) for c in graph.constants}
    placings = follow(graph.nodes, given, graph.specs, (parts,))
    for p in placings:
        if p.node.op not in FREE and any(isinstance(nd[0], Split) for nd in (*p.ins, *p.outs)):
            pins.spread.add(p.node.name)
        if sums and any(isinstance(nd[0], Partial) for nd in p.outs):
            pins.sums.add(p.node.name)
    return placings


def tensor_pins(graph: Graph) -> Pins:
    """What tensor parallel means on one axis."""
    pins = Pins(stored_byte_s=1e-9)
    pins.spread = {n.name for n in graph.nodes if n.op in PRODUCTS}
    for item in graph.inputs:
        if item.kind in ("batch", "rng", "scale"):
            pins.inputs[item.name] = B
    for ref in residual_stream(graph):
        pins.values[ref] = B
        pins.read[ref] = B
    # Weights are read in shards, also where an op merely turns or casts them first: otherwise splitting
    # the batch and gathering weights would be cheaper for small ones, which is another pattern.
    pins.split = _weights(graph, {i.name for i in graph.of_kind("param")})
    return pins


def _weights(graph: Graph, names: set[str]) -> set[Ref]:
    """The matrices among some parameters, also turned, reshaped or cast."""
    found = {i.name for i in graph.inputs if i.name in names and len(i.spec.shape) > 1}
    for node in graph.nodes:
        if len(node.ins) == 1 and node.ins[0].name in found and (node.op in FREE or node.op == "aten._to_copy"):
            found.add(node.name)
    return {ref for ref in graph.specs if ref.name in found}


def residual_stream(graph: Graph) -> set[Ref]:
    """Values that a sum carries past a branch computed from them, and those sums; backward's too.

    `x + f(x)`: one operand of the addition is computed from the other. In backward the gradient of
    x is `g + f'(g)`, which is the same shape.
    """
    number = {n.name: i for i, n in enumerate(graph.nodes)}
    above: list[int] = []
    stream: set[Ref] = set()
    for i, node in enumerate(graph.nodes):
        mask = 1 << i
        for ref in node.ins:
            if ref.name in number:
                mask |= above[number[ref.name]]
        above.append(mask)
        if node.op != "aten.add.Tensor" or len(node.ins) != 2:
            continue
        a, b = node.ins
        if graph.specs[a].shape != graph.specs[b].shape or len(graph.specs[a].shape) < 2:
            continue
        for x, y in ((a, b), (b, a)):
            if x.name in number and y.name in number and x != y and above[number[y.name]] >> number[x.name] & 1:
                stream |= {Ref(node.name), x}
    # Several branches may be added one after the other; only the last sum is the stream.
    return {_end_of_sum(graph, ref) for ref in stream}


def _end_of_sum(graph: Graph, ref: Ref) -> Ref:
    node = graph.by_name.get(ref.name)
    if node is None or node.op != "aten.add.Tensor":
        return ref
    readers = graph.users.get(ref, [])
    if len(readers) == 1 and readers[0].op == "aten.add.Tensor" and readers[0].outs == node.outs:
        return _end_of_sum(graph, Ref(readers[0].name))
    return ref

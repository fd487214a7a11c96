"""What a plan does, read from its placements: which axis splits samples, which splits weights, and how.

Names play no part: neither what an axis is called nor which style a search had in mind. An axis is a *data* axis if the
batch is split on it by sample and every weight is used whole; it is a *tensor* axis if the batch is whole and weights
are used in shards. On a tensor axis the pattern is Megatron's if every product with a weight is a column (input whole,
weight and output split by output features) or a row (input and weight split by input features, a sum left to make),
attention is split by heads, and the residual stream is whole or split by token. A parameter stored in shards but used
whole is ZeRO's.

What differs is told in two lists: `obstacles`, which no flag of another system expresses, and `notes`, what such a
system does a little differently by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from laminar.errors import PlanError
from laminar.ir.graph import Graph, Node
from laminar.ir.ops import FREE
from laminar.ir.plans.account import Account, ParallelForm
from laminar.ir.plans.patterns import pick
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.planned import Planned
from laminar.ir.plans.staged import Staged
from laminar.ir.sbp import B, NdSbp, Partial, Sbp, Split, local_spec
from laminar.lower.stages.split_stages import split_graph
from laminar.placement.micro_batch import micro
from laminar.placement.presets import residual_stream
from laminar.rewrite.variants import rewritten
from laminar.rules.samples import samples_of

WEIGHT_PRODUCTS = {"aten.mm": (0, 1), "aten.addmm": (1, 2)}
"""Products with a weight, and where they read the input and the weight."""
SHOWN = 3
"""Tensors that an obstacle names."""


def placed_graph(plan: Planned, graph: Graph) -> tuple[Graph, Plan]:
    """The graph that a plan places, from that of the batch, and one plan for it: that of all stages together."""
    if isinstance(plan, Plan):
        return rewritten(graph, plan), plan
    assert isinstance(plan, Staged)
    part = graph if plan.graph_hash == graph.hash else micro(graph, plan.micro_batches)
    part = rewritten(part, plan)
    meshes = {s.plan.mesh for s in plan.stages}
    if len(meshes) > 1:
        raise PlanError(
            f"stages are spread over different meshes: {', '.join(sorted(map(str, meshes)))}",
            next="ask about one stage: plan.stages[k].plan",
        )
    cut = split_graph(part, plan.of, len(plan.stages))
    ops = {
        cut.like.get(n.name, n.name): s.plan.ops[n.name]
        for s, own in zip(plan.stages, cut.graphs, strict=True)
        for n in own.nodes
    }
    names = {i.name for i in part.inputs}
    wanted = {f"{o.kind}:{o.name}" for o in part.outputs}
    whole = Plan(
        meshes.pop(),
        part.hash,
        ops,
        {k: v for s in plan.stages for k, v in s.plan.inputs.items() if k in names},
        {k: v for s in plan.stages for k, v in s.plan.outputs.items() if k in wanted},
        {k: v for s in plan.stages for k, v in s.plan.state.items() if k in names},
        plan.name,
        Account(),
        _together(part, plan),
        offload=tuple(dict.fromkeys(r for s in plan.stages for r in s.plan.offload)),
    )
    return part, whole


def _together(graph: Graph, staged: Staged) -> tuple[str, ...]:
    """What stages recompute, as patterns of the whole graph: those of all, or the blocks of each by name."""
    each = [s.plan.recompute for s in staged.stages]
    if len(set(each)) == 1:
        return each[0]
    out: list[str] = []
    for s, patterns in enumerate(each):
        values = [p for p in patterns if p.startswith("%")]
        picked = pick(graph, [p for p in patterns if p not in values])
        here = dict.fromkeys(picked.block_of(graph.by_name[n].module) for n, at in staged.of.items() if at == s)
        out += [b + picked.marks(b) for b in here if b is not None] + values
    return tuple(dict.fromkeys(out))


def block_of(module: str) -> str:
    """A module up to its first number: the block that it is, or is in; nothing if there is none."""
    parts = module.split(".")
    number = next((k for k, p in enumerate(parts) if p.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def recomputed_blocks(graph: Graph, plan: Planned) -> list[tuple[list[str], list[str]]]:
    """By stage, the blocks that it recomputes as a whole, and all that it has; `graph` is the one that is placed.

    A block that is cut between stages counts once: at the first that recomputes it, or else at the first that has some
    of it, so that all of them together are those of the model.
    """
    staged = plan if isinstance(plan, Staged) else None
    plans = [s.plan for s in staged.stages] if staged else [plan]
    stages: dict[str, dict[int, None]] = {}
    for node in graph.nodes:
        if node.phase == "forward" and block_of(node.module) and (staged is None or node.name in staged.of):
            stages.setdefault(block_of(node.module), {})[staged.of[node.name] if staged else 0] = None
    picked = []
    for one in plans:
        assert isinstance(one, Plan)
        picked.append(pick(graph, [p for p in one.recompute if not p.startswith("%")]))
    homes = {b: next((s for s in sorted(of) if picked[s].block_of(b)), min(of)) for b, of in stages.items()}
    there = [[b for b, home in homes.items() if home == s] for s in range(len(plans))]
    return [([b for b in blocks if by.block_of(b)], blocks) for blocks, by in zip(there, picked, strict=True)]


def used(graph: Graph, plan: Plan) -> dict[str, NdSbp]:
    """How each parameter and buffer is read by forward: on each axis split if any reader takes it so, else whole."""
    axes = range(len(plan.mesh.sizes))
    found: dict[str, list[Sbp]] = {i.name: [B for _ in axes] for i in graph.inputs}
    for node in graph.nodes:
        if node.phase != "forward":
            continue
        for ref, nd in zip(node.ins, plan.ops[node.name].ins, strict=True):
            if ref.name in found:
                for a in axes:
                    if isinstance(nd[a], Split):
                        found[ref.name][a] = nd[a]
    return {name: tuple(nd) for name, nd in found.items()}


def form(plan: Planned, graph: Graph) -> ParallelForm:
    """What a plan does. `graph` is that of the whole batch, or of a micro-batch where that is what the plan places."""
    part, whole = placed_graph(plan, graph)
    staged = plan if isinstance(plan, Staged) else None
    micro_batches = staged.micro_batches if staged else 1
    about = _Reading(part, whole)
    places = len(staged.places) if staged else 1
    if staged:
        about.stages(staged)
    zero, pieces = about.zero()
    made = recomputed_blocks(part, plan) if whole.recompute else []
    some = made if any(len(mine) < len(blocks) for mine, blocks in made) else []
    return ParallelForm(
        ranks=places * whole.mesh.ranks,
        stages=places,
        virtual=len(staged.stages) // places if staged else 1,
        micro_batches=micro_batches,
        schedule=staged.schedule if staged else "",
        data=math.prod(whole.mesh.sizes[a] for a in about.data),
        tensor=math.prod(whole.mesh.sizes[a] for a in about.tensor),
        zero=zero,
        once=whole.gather_once,
        pieces=math.prod(whole.mesh.sizes[a] for a in pieces),
        sequence=about.sequence,
        samples=samples_of(part) * micro_batches,
        recompute=whole.recompute,
        obstacles=tuple(about.obstacles),
        notes=tuple(about.notes),
        again=tuple(len(mine) for mine, _ in some),
        layers=tuple(len(blocks) for _, blocks in some),
        leading=all(mine == blocks[: len(mine)] for mine, blocks in some),
    )


class _Reading:
    """One plan, read axis by axis."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.used = used(graph, plan)
        self.params = [i for i in graph.of_kind("param") if i.trainable]
        self.obstacles: list[str] = []
        self.notes: list[str] = []
        self.data: list[int] = []
        self.tensor: list[int] = []
        self.sequence = False
        for axis, size in enumerate(plan.mesh.sizes):
            if size > 1:
                self._axis(axis)
        if self.tensor and self.data and max(self.data) > min(self.tensor):
            self.obstacles.append("weights are split between neighbours that are not the innermost ranks")
        if plan.offload:
            self.obstacles.append(f"activations are kept in the host's memory: {_some(plan.offload)}")
        if not any("attention" in n.op or ("softmax" in n.op and n.module) for n in graph.nodes):
            self.obstacles.append("there is no attention in this model: it is not a transformer")

    def _axis(self, axis: int) -> None:
        name = f"{self.plan.mesh.names[axis]}={self.plan.mesh.sizes[axis]}"
        samples = samples_of(self.graph)
        leaves = [i for i in self.graph.of_kind("batch") if i.spec.shape[:1] == (samples,)]
        by_sample = [i for i in leaves if self.plan.inputs[i.name][axis] == Split(0)]
        split = [i.name for i in self.params if isinstance(self.used[i.name][axis], Split)]
        if by_sample and len(by_sample) == len(leaves):
            self.data.append(axis)
            if split:
                self.obstacles.append(f"axis {name} splits samples, and weights as well: {_some(split)}")
        elif by_sample:
            odd = [i.name for i in leaves if i not in by_sample]
            self.obstacles.append(f"axis {name} splits the batch by sample, but not {_some(odd)}")
        elif not split and any(self.plan.inputs[i.name][axis] == Split(1) for i in leaves):
            self.obstacles.append(f"axis {name} splits sequences by token")
        elif not split:
            self.obstacles.append(f"axis {name} splits neither samples nor weights")
        else:
            self.tensor.append(axis)
            self._megatron(axis, name)

    def _megatron(self, axis: int, name: str) -> None:
        """What is not a column, not a row, not split by heads or not in the residual stream's pattern."""
        tables = {n.ins[0].name for n in self.graph.nodes if n.op == "aten.embedding" and n.phase == "forward"}
        rows = {self.graph.specs[r].shape[0] for r in self.graph.specs if r.name in tables}
        wrong: list[str] = []
        for node, weight, x, w, out in self._products(axis):
            column = x == B and isinstance(w, Split) and w.dim == 1 and isinstance(out, Split)
            row = isinstance(x, Split) and isinstance(w, Split) and w.dim == 0 and isinstance(out, Partial)
            if not column and not row:
                features = self.graph.specs[node.ins[WEIGHT_PRODUCTS[node.op][1]]].shape[1]
                if features in rows:
                    self.notes.append(f"{weight} is not split by vocabulary on {name}; it would be there")
                else:
                    wrong.append(weight)
        if wrong:
            self.obstacles.append(f"on axis {name} these are split neither by column nor by row: {_some(wrong)}")
        heads = [
            n.name
            for n in self.graph.nodes
            if n.op == "laminar.attention" and any(p[axis] != Split(1) for p in self.plan.ops[n.name].ins[:3])
        ]
        if heads:
            self.obstacles.append(f"on axis {name} attention is not split by heads: {_some(heads)}")
        self._stream(axis, name)
        for table in sorted(tables):
            found = self.used[table][axis]
            if found != Split(0):
                self.notes.append(f"table {table} is {found} on {name}; it would be split by vocabulary, or whole")
        biases = [
            i.name
            for i in self.params
            if len(i.spec.shape) == 1 and self.used[i.name][axis] == B and self.plan.inputs[i.name][axis] != B
        ]
        if biases:
            self.notes.append(f"{len(biases)} vectors are stored in shards on {name} and used whole: {_some(biases)}")

    def _products(self, axis: int) -> Iterator[tuple[Node, str, Sbp, Sbp, Sbp]]:
        """Forward products with a weight: the op, the weight's name, and how input, weight and output lie."""
        of = {i.name: i.name for i in self.params}
        for node in self.graph.nodes:
            if node.phase != "forward":
                continue
            if len(node.ins) == 1 and node.ins[0].name in of and (node.op in FREE or node.op == "aten._to_copy"):
                of[node.name] = of[node.ins[0].name]
            if node.op in WEIGHT_PRODUCTS:
                x, w = WEIGHT_PRODUCTS[node.op]
                if node.ins[w].name in of:
                    choice = self.plan.ops[node.name]
                    yield node, of[node.ins[w].name], choice.ins[x][axis], choice.ins[w][axis], choice.outs[0][axis]

    def _stream(self, axis: int, name: str) -> None:
        """How the residual stream lies: whole, or split by token."""
        found: Counter[Sbp] = Counter()
        for ref in residual_stream(self.graph):
            node = self.graph.by_name.get(ref.name)
            if node is not None and node.phase == "forward" and len(self.graph.specs[ref].shape) == 3:
                found[self.plan.ops[node.name].outs[ref.index][axis]] += 1
        self.sequence = found[Split(1)] > found[B]
        rest = found.total() - found[Split(1) if self.sequence else B]
        if rest:
            usual, odd = ("S(1)" if self.sequence else "B"), [str(p) for p in found if p not in (B, Split(1))]
            said = f"{', '.join(odd)} in places" if odd else "whole in places and split by token in others"
            self.obstacles.append(f"on axis {name} the residual stream is not {usual} throughout, but {said}")

    def zero(self) -> tuple[int, tuple[int, ...]]:
        """The stage of ZeRO that most bytes are in, and the axes on which ranks hold different pieces."""
        plan = self.plan
        cut = {1: 0, 2: 0, 3: 0}
        over: Counter[tuple[int, ...]] = Counter()
        total = 0
        for item in self.params:
            uses, lies = self.used[item.name], plan.inputs[item.name]
            state, grad = plan.state.get(item.name, lies), plan.outputs.get(f"grad:{item.name}", lies)
            nbytes = item.spec.nbytes
            total += nbytes
            axes = tuple(a for a in self.data if isinstance(state[a], Split) and uses[a] == B)
            cut[1] += nbytes * bool(axes)
            cut[2] += nbytes * any(isinstance(grad[a], Split) for a in axes)
            cut[3] += nbytes * any(isinstance(lies[a], Split) for a in axes)
            if axes:
                over[axes] += nbytes
        stage = max((k for k, n in cut.items() if 2 * n > total), default=0)
        if not stage:
            if cut[1]:
                self.notes.append(f"{cut[1] / total:.0%} of the parameters are in shards, the rest is not")
            return 0, ()
        return stage, over.most_common(1)[0][0]

    def stages(self, staged: Staged) -> None:
        """Stages that hold unequal numbers of layers are told; stages side by side have no form that others know."""
        if len(staged.stages) % len(staged.places) or any(
            stage.place != s % len(staged.places) for s, stage in enumerate(staged.stages)
        ):
            self.obstacles.append("branches of the model run beside each other, on devices of their own")
        homes: dict[str, set[int]] = {}
        for node in self.graph.nodes:
            if node.name in staged.of and block_of(node.module):
                homes.setdefault(block_of(node.module), set()).add(staged.of[node.name])
        begun = [min(found) for found in homes.values()]  # a layer that is cut counts where it begins
        cut = sum(len(found) > 1 for found in homes.values())
        if cut:
            self.notes.append(f"{cut} of {len(homes)} layers are cut between two stages; there cuts are between layers")
        counts = [begun.count(s) for s in range(len(staged.stages))]
        if len(set(counts)) > 1:
            said = ", ".join(map(str, counts))
            self.notes.append(f"stages have {said} layers; there all would have as many")


def zero_of(graph: Graph, plan: Plan) -> tuple[int, tuple[int, ...] | None]:
    """The stage of ZeRO of a plan without stages, and the axes it is on where that is not all of them."""
    about = _Reading(graph, plan)
    stage, axes = about.zero()
    return stage, None if set(axes) == set(about.data) else axes


def unpieced(graph: Graph, plan: Plan) -> Plan:
    """The plan as it would be without ZeRO: what is used whole is stored whole."""
    reads, inputs, outputs = used(graph, plan), dict(plan.inputs), dict(plan.outputs)
    for item in graph.of_kind("param"):
        nd = tuple(B if reads[item.name][a] == B else p for a, p in enumerate(plan.inputs[item.name]))
        inputs[item.name] = nd
        if f"grad:{item.name}" in outputs:
            outputs[f"grad:{item.name}"] = nd
    return replace(plan, inputs=inputs, outputs=outputs, state={}, account=Account())


def local_bytes(graph: Graph, plan: Plan, name: str, nd: NdSbp) -> int:
    """Bytes of a tensor on one rank."""
    return local_spec(graph.input(name).spec, nd, plan.mesh.sizes).nbytes


def _some(names: Sequence[str]) -> str:
    """A few names, with how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


__all__ = ["ParallelForm", "form", "local_bytes", "placed_graph", "recomputed_blocks", "unpieced", "used", "zero_of"]

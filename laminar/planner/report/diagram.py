"""What a picture of a plan shows: boxes for ops, arrows for tensors, exchanges on them, layers once.

Forward ops in the order of the program. Views are part of the arrow, small ops of one module that lie alike share a box
(a stretch of neighbours, so that no arrow can lead out of it and back in), and weights stand inside the ops that read
them. Of layers that repeat the first shows how they are joined, the second how they lie and what they cost. Costs are
prices of ops on one rank, alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.cost.machine import Machine
from laminar.cost.ops.families import COMPUTES, family_of
from laminar.errors import LaminarError
from laminar.forecast.step import machine
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph, Node
from laminar.ir.ops import FREE
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.planned import Planned
from laminar.ir.plans.staged import Staged
from laminar.ir.sbp import NdSbp, show
from laminar.ir.serial.codec import Ref
from laminar.placement.fold import fold
from laminar.planner.report.classify import placed_graph
from laminar.rules.boxing.boxing import boxing
from laminar.rules.notation import Signature, call_of, localise

LOOKS = FREE | {"aten._to_copy", "aten.clone"}
"""Ops that are drawn as part of the arrow."""
MERGED = 3
"""Ops that the title of a box names."""
MOST_BOXES = 400
"""Boxes above which a picture would not be legible."""


@dataclass
class Box:
    """One op, or the same op of all layers."""

    name: str
    module: str
    ops: list[str]
    placement: str
    """Of what it makes."""
    weights: list[str]
    seconds: float
    backward_s: float
    layer: bool
    alone: bool = True
    """Whether it is a product or a look-up, which gets a box of its own."""
    row: int = 0
    column: float = 0.0

    @property
    def title(self) -> str:
        """What it is."""
        ops = list(dict.fromkeys(o for o in self.ops if o != self.module.rpartition(".")[2]))
        said = ", ".join(ops[:MERGED]) + (", ..." if len(ops) > MERGED else "")
        return f"{self.module} {said}".strip()

    @property
    def lines(self) -> list[str]:
        """How it lies, what it costs, and its weights."""
        cost = f"   {_ms(self.seconds)}" if self.seconds else ""
        back = f" ({_ms(self.backward_s)})" if self.backward_s else ""
        return [f"{self.placement}{cost}{back}", *self.weights]

    def takes(self, other: Box) -> bool:
        """Whether an op that comes next belongs to the same stretch of small ones."""
        mine, its = ((b.module, b.placement, b.layer) for b in (self, other))
        return mine == its and not self.alone and not other.alone

    def add(self, other: Box) -> None:
        """Take in the next op."""
        self.ops += other.ops
        self.weights += other.weights
        self.seconds += other.seconds
        self.backward_s += other.backward_s


@dataclass
class Arrow:
    """A tensor on its way from one box to another."""

    src: str
    dst: str
    label: str = ""
    """The exchange on the way, if there is one."""


@dataclass
class Sketch:
    """What is drawn."""

    title: str
    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[Arrow] = field(default_factory=list)
    layers: int = 0

    @property
    def most_s(self) -> float:
        """Of the dearest box."""
        return max((b.seconds + b.backward_s for b in self.boxes.values()), default=0.0) or 1.0


def sketched(plan: Planned, graph: Graph, cluster: Cluster) -> Sketch:
    """The boxes and arrows of a plan."""
    part, whole = placed_graph(plan, graph)
    return _Sketching(plan, part, whole, machine(cluster, whole.mesh)).sketch()


class _Sketching:
    def __init__(self, plan: Planned, graph: Graph, whole: Plan, prices: Machine) -> None:
        self.plan, self.graph, self.whole, self.prices = plan, graph, whole, prices
        self.layers = fold(graph)
        self.shown = min(1, max(0, self.layers.layers - 1))
        """The layer whose placements are shown; how it is joined is seen at the first."""
        self.inputs = {i.name: i for i in graph.inputs}
        self.fixed = set(self.inputs) | {c.name for c in graph.constants}
        for node in graph.nodes:
            if node.ins and all(r.name in self.fixed and not self._batch(r.name) for r in node.ins):
                self.fixed.add(node.name)  # a weight turned or cast is still one
        self.backward = self._backward()

    def _batch(self, name: str) -> bool:
        return name in self.inputs and self.inputs[name].kind == "batch"

    def sketch(self) -> Sketch:
        mesh = " x ".join(f"{n}={s}" for n, s in zip(self.whole.mesh.names, self.whole.mesh.sizes, strict=True))
        choice = self.plan.account.choice
        about = choice.plan if choice else f"{getattr(self.plan, 'name', '')} on {mesh}"
        if isinstance(self.plan, Staged):
            about += f", {len(self.plan.stages)} stages, {self.plan.micro_batches} micro-batches (one is drawn)"
        step_s = self.plan.step_s
        out = Sketch(about + (f", a step of {step_s * 1e3:.3f} ms" if step_s else ""), layers=self.layers.layers)
        arrows: dict[tuple[str, str], list[str]] = {}
        into: dict[str, str] = {}
        """Op -> its box."""
        last: Box | None = None
        for node in self.graph.nodes:
            place = self.layers.at.get(node.name)
            if node.phase != "forward" or node.op in LOOKS or node.name in self.fixed or (place and place[0] > 0):
                continue
            own = self._twin(node)
            box = self._box(node.name, own, place is not None)
            ways = [
                self._way(ref, mine, nd)
                for ref, mine, nd in zip(node.ins, own.ins, self.whole.ops[own.name].ins, strict=True)
                if ref.name not in self.fixed or self._batch(ref.name)
            ]
            if last is not None and last.takes(box) and not any(moves for _, moves in ways):
                last.add(box)
                into[node.name] = last.name
            else:
                out.boxes[node.name] = last = box
                into[node.name] = node.name
            for maker, moves in ways:
                if maker is None or into.get(maker) == into[node.name]:
                    continue
                arrows.setdefault((into.get(maker, maker), into[node.name]), []).extend(moves)
                if self._batch(maker) and maker not in out.boxes:
                    out.boxes[maker] = Box(maker, maker, [], show(self.whole.inputs[maker]), [], 0.0, 0.0, False)
        if len(out.boxes) > MOST_BOXES:
            raise LaminarError(
                f"{len(out.boxes)} ops would be drawn",
                allowed=f"up to {MOST_BOXES}",
                next="--dot, and a tool for large graphs",
            )
        out.arrows = [Arrow(a, b, ", ".join(dict.fromkeys(moves))) for (a, b), moves in arrows.items()]
        _laid_out(out)
        return out

    def _twin(self, node: Node) -> Node:
        place = self.layers.at.get(node.name)
        return self.layers.ops[self.shown, place[1], place[2]] if place else node

    def _way(self, ref: Ref, own: Ref, wanted: NdSbp) -> tuple[str | None, list[str]]:
        """The box a value comes from, through views, and the exchanges on the way; `own` is it in the shown layer."""
        moves: list[str] = []
        while True:
            node = self.graph.by_name.get(ref.name)
            if node is None:
                moves = self._moves(own, self.whole.inputs.get(own.name, wanted), wanted) + moves
                return (ref.name if self._batch(ref.name) else None), moves
            twin = self.graph.by_name[own.name]
            moves = self._moves(own, self.whole.ops[twin.name].outs[own.index], wanted) + moves
            if node.op not in LOOKS:
                place = self.layers.at.get(node.name)
                return (self.layers.ops[0, place[1], place[2]].name if place else node.name), moves
            wanted = self.whole.ops[twin.name].ins[0]
            ref, own = node.ins[0], twin.ins[0]

    def _moves(self, ref: Ref, here: NdSbp, there: NdSbp) -> list[str]:
        sizes, names = self.whole.mesh.sizes, self.whole.mesh.names
        steps = boxing(self.graph.specs[ref], here, there, sizes)
        return [f"{s.kind.replace('_', '-')} {'+'.join(names[a] for a in s.axes)}" for s in steps if s.moves]

    def _box(self, name: str, node: Node, layer: bool) -> Box:
        choice = self.whole.ops[node.name]
        module = node.module
        parts = module.split(".")
        if layer:
            number = next((k for k, p in enumerate(parts) if p.isdigit()), -1)
            module = ".".join(parts[number + 1 :]) if number >= 0 else module
        op = node.op.removeprefix("aten.").removeprefix("laminar.").split(".")[0].strip("_")
        weights = []
        for ref, nd in zip(node.ins, choice.ins, strict=True):
            weight = self._weight(ref)
            if weight is not None and len(self.inputs[weight].spec.shape) > 1:
                kept = "" if self._weight_way(ref, nd) else ", gathered"
                weights.append(f"{weight.removeprefix(f'{node.module}.')} {show(self.whole.inputs[weight])}{kept}")
        alone = family_of(node.op) in COMPUTES or bool(weights)
        seconds, backward = self._seconds(node), self.backward.get(node.name, 0.0)
        return Box(name, module, [op], show(choice.outs[0]), weights, seconds, backward, layer, alone)

    def _weight(self, ref: Ref) -> str | None:
        while ref.name in self.graph.by_name:
            node = self.graph.by_name[ref.name]
            if node.op not in LOOKS:
                return None
            ref = node.ins[0]
        return ref.name if ref.name in self.inputs and self.inputs[ref.name].kind == "param" else None

    def _weight_way(self, ref: Ref, wanted: NdSbp) -> bool:
        """Whether a weight is read as it lies."""
        while ref.name in self.graph.by_name:
            choice = self.whole.ops[ref.name]
            if self._moves(ref, choice.outs[ref.index], wanted):
                return False
            wanted, ref = choice.ins[0], self.graph.by_name[ref.name].ins[0]
        return not self._moves(ref, self.whole.inputs[ref.name], wanted)

    def _seconds(self, node: Node) -> float:
        """Of an op on one rank, alone."""
        if node.op in FREE:
            return 0.0
        call, choice = call_of(node, self.graph.specs), self.whole.ops[node.name]
        try:
            for axis, size in enumerate(self.whole.mesh.sizes):
                ins, outs = tuple(nd[axis] for nd in choice.ins), tuple(nd[axis] for nd in choice.outs)
                call = localise(call, Signature(ins, outs), size)
            return self.prices.op(call).seconds
        except (LaminarError, KeyError):
            return 0.0

    def _backward(self) -> dict[str, float]:
        """By forward op, what its module's backward costs, at the dearest op of the module."""
        total: dict[str, float] = {}
        dearest: dict[str, tuple[float, str]] = {}
        for node in self.graph.nodes:
            place = self.layers.at.get(node.name)
            if place is not None and place[0] != self.shown:
                continue
            seconds = self._seconds(node)
            if node.phase != "forward":
                total[node.module] = total.get(node.module, 0.0) + seconds
            elif node.op not in LOOKS and node.name not in self.fixed:
                dearest[node.module] = max(dearest.get(node.module, (-1.0, "")), (seconds, node.name))
        return {dearest[m][1]: s for m, s in total.items() if m in dearest}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-5 else f"{seconds * 1e6:.2g} us"


def _laid_out(sketch: Sketch) -> None:
    """Rows by the longest way from the top, columns by the mean of those above."""
    above: dict[str, list[str]] = {name: [] for name in sketch.boxes}
    for a in sketch.arrows:
        if a.src in above and a.dst in above:
            above[a.dst].append(a.src)
    below: dict[str, list[str]] = {name: [] for name in sketch.boxes}
    for name, makers in above.items():
        for m in makers:
            below[m].append(name)
    rows: dict[str, int] = {}
    changed = True
    while changed:
        changed = False
        for name in sketch.boxes:
            row = 1 + max((rows.get(m, -1) for m in above[name]), default=-1)
            changed, rows[name] = changed or row != rows.get(name), row
    for name in reversed(list(sketch.boxes)):
        if not above[name] and below[name]:  # what comes from nowhere stands just above its first reader
            rows[name] = max(0, min(rows[b] for b in below[name]) - 1)
    by_row: dict[int, list[str]] = {}
    for name, row in rows.items():
        sketch.boxes[name].row = row
        by_row.setdefault(row, []).append(name)
    for row in sorted(by_row):
        wish = {
            n: sum(sketch.boxes[m].column for m in above[n]) / len(above[n]) if above[n] else 0.0 for n in by_row[row]
        }
        order = sorted(by_row[row], key=lambda n: (wish[n], n))
        centre = sum(wish.values()) / len(wish)
        for k, name in enumerate(order):
            sketch.boxes[name].column = centre + k - (len(order) - 1) / 2

"""At least so many seconds, where branches have devices of their own.

A way (`planner/search/best_first/branches.py`) says which ops run on which set of devices; how they lie there is open.
The bound rests on what `planner/bounds/one_device.py` takes for granted. Each stage is lowered for one device; on a set
of r devices an op takes at least a call and 1/r of the rest, and a stage updates at least 1/r of its parameters. A set
begins when the first of its parts may, works on all micro-batches one after the other, and ends no later than the step:
parts and what passes between them are a graph, and the longest path to the first of a set's parts, or from the last, is
time in which it does nothing. A micro-batch by itself takes at least the longest path of all.

Where that does not rule a way out, what ranks of a set exchange is counted as for any stage (`Bounds.stage_s`), on the
best of the meshes that sets may have. What messages between sets carry is left out, that there are any is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from laminar.cost.machine import ALONE
from laminar.cost.ops.families import COMPUTES, family_of
from laminar.forecast.pipeline_step import CONTROL_S, MEETING_S
from laminar.ir.graph import Graph, Node
from laminar.ir.ops import FREE
from laminar.ir.tensor import TensorSpec
from laminar.lower.memory.mincut_recompute import written_out
from laminar.lower.stages.stage_programs import Part, stages
from laminar.placement import presets
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.bounds.one_device import ONE_DEVICE, KernelShape, kernel_s, kernels_of
from laminar.planner.bounds.piece_bound import per_element_s
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.space.cell import Cell
from laminar.rules.notation import calls_in
from laminar.staging.stage_plans import arranged


@dataclass(frozen=True)
class LeastOfPart:
    """What one part of a stage takes at least on one micro-batch."""

    calls_s: float
    work_s: float
    kernels: tuple[KernelShape, ...]


class Floor:
    """Stages on one device each, and from that what they take at least on any sets."""

    def __init__(self, model: Model, graph: Graph, of: Mapping[str, int], count: int, micro: int) -> None:
        self.model, self.micro = model, micro
        self.machine = model.inside
        self._exchanged: dict[tuple[int, Cell], float] = {}
        one = presets.data_parallel(graph, ONE_DEVICE)
        self.made = stages(graph, arranged(graph, of, range(count), [one] * count, micro))
        self.stage = {part.name: part.stage for part in self.made.by_name.values()}
        self.least = {part.name: self._least(part) for part in self.made.by_name.values()}
        self.links = self._links()
        self.grads = [[own.specs[o.ref] for o in own.outputs if o.kind == "grad"] for own in self.made.cut.graphs]

    def _least(self, part: Part) -> LeastOfPart:
        machine, own = self.machine, self.made.cut.graphs[part.stage]
        calls, forward = calls_in(own), part.kind == "forward"
        nodes = [n for n in own.nodes if (n.phase == "forward") == forward and self._counted(n, own)]
        # Where prices were measured nothing says what of them is the call's.
        call_s = 0.0 if machine.ops.measured.ops else machine.ops.rates.call_s
        seconds = [machine.op(calls[n.name]).seconds for n in nodes]
        calls_s = sum(min(call_s, s) for s in seconds)
        kernels = kernels_of(written_out(part.program)) if machine.fused else []
        return LeastOfPart(calls_s, sum(seconds) - calls_s, tuple(kernels))

    def _counted(self, node: Node, graph: Graph) -> bool:
        """Whether an op has a price of its own, and one that placements do not lower, as one number read often does."""
        if node.op in FREE:
            return False
        if self.machine.fused:
            return family_of(node.op) in COMPUTES or node.op in ALONE
        return not any(_expanded(graph, r.name) for r in node.ins)

    def _links(self) -> dict[str, set[str]]:
        """For each part, those that wait for it in the same micro-batch."""
        out: dict[str, set[str]] = defaultdict(set)
        for parts in self.made.parts:
            for a, b in pairwise(parts):
                out[a.name].add(b.name)
        for wire in self.made.wires:
            kind = "F" if wire.edge.phase == "forward" else "B"
            ends = f"{kind}{wire.edge.src}", f"{kind}{wire.edge.dst}"
            if all(end in self.stage for end in ends):
                out[ends[0]].add(ends[1])
        return out

    def seconds(self, sizes: Sequence[int], homes: Sequence[int], busy_s: Sequence[float] = ()) -> float:
        """A step at least, with stages at these sets of devices; `busy_s` if more is known of what each set does."""
        cluster = self.model.request.cluster
        takes = {}
        for name, least in self.least.items():
            r = sizes[homes[self.stage[name]]]
            kernels = sum(kernel_s(self.machine, *one, r) for one in least.kernels)
            takes[name] = least.calls_s + least.work_s / r + kernels
        firsts = [sum(sizes[:p]) for p in range(len(sizes))]
        ranks = [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]

        def wait_s(a: str, b: str) -> float:
            p, q = homes[self.stage[a]], homes[self.stage[b]]
            return cluster.joining((*ranks[p], *ranks[q])).latency_s.value + CONTROL_S[cluster.kind] if p != q else 0.0

        ahead, behind = self._paths(takes, wait_s)
        least_s = max(ahead[n] + takes[n] + behind[n] for n in takes)
        for p, size in enumerate(sizes):
            mine = [n for n in takes if homes[self.stage[n]] == p]
            busy = self.micro * sum(takes[n] for n in mine)
            ends = sum(self._update_s(s, size) for s, home in enumerate(homes) if home == p)
            busy = max(busy + max(ends, min(behind[n] for n in mine)), busy_s[p] if busy_s else 0.0)
            least_s = max(least_s, min(ahead[n] for n in mine) + busy)
        return least_s + MEETING_S[cluster.kind]

    def exchanged_s(self, bounds: Bounds, place: int, cells: Sequence[Cell], homes: Sequence[int]) -> float:
        """What a set does in a step at least, exchanges counted, on the best of some meshes."""
        found = []
        for cell in cells:
            total = 0.0
            for s in (s for s, home in enumerate(homes) if home == place):
                key = (s, cell)
                if key not in self._exchanged:
                    kernels = [one for part in self.made.parts[s] for one in self.least[part.name].kernels]
                    written = self.micro * sum(kernel_s(self.machine, *one, cell.ranks) for one in kernels)
                    self._exchanged[key] = (
                        bounds.stage_s(self.made.cut.graphs[s], cell) + written + self._norm_s(s, cell.ranks)
                    )
                total += self._exchanged[key]
            found.append(total)
        return min(found)

    def _paths(
        self, takes: Mapping[str, float], wait_s: Callable[[str, str], float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """For each part, the longest way of a micro-batch to it and from it."""
        ahead, behind = dict.fromkeys(takes, 0.0), dict.fromkeys(takes, 0.0)
        # Forward from the first stage to the last, backward from the last to the first.
        last = len(self.made.parts)
        order = sorted(takes, key=lambda n: self.stage[n] if n[0] == "F" else 2 * last - self.stage[n])
        for a in order:
            for b in self.links[a]:
                ahead[b] = max(ahead[b], ahead[a] + takes[a] + wait_s(a, b))
        for a in reversed(order):
            for b in self.links[a]:
                behind[a] = max(behind[a], wait_s(a, b) + takes[b] + behind[b])
        return ahead, behind

    def _update_s(self, stage: int, size: int) -> float:
        """Of a share of a stage's parameters, and the norm of as much."""
        elements = sum(g.numel for g in self.grads[stage]) // size
        return per_element_s(self.machine) * elements + self._norm_s(stage, size)

    def _norm_s(self, stage: int, size: int) -> float:
        grads = self.grads[stage]
        pieces = [TensorSpec((max(1, g.numel // size),), g.dtype) for g in grads]
        return self.machine.norm(pieces, sum(p.numel for p in pieces)).seconds if grads else 0.0


def _expanded(graph: Graph, name: str) -> bool:
    """Whether a value is one number, or one row, that is read again and again."""
    node = graph.by_name.get(name)
    while node is not None and node.op in FREE:
        if node.op == "aten.expand":
            return True
        node = graph.by_name.get(node.ins[0].name) if node.ins else None
    return False

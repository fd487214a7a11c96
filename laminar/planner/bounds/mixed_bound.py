"""At least so many seconds, where devices differ: a lower bound for every pipeline over the parts of a cluster.

Let c_k(o) be what op o takes on one device of part k, and let a place on that part have r ranks. An op on a share of
its work takes no less than that share of the whole (`planner/bounds/one_device.py` says what is taken for granted), so
the place works at least the sum of c_k(o) / r over its ops, whatever the placements. Let part k count m_k, any number
above zero. The sum over all places of m_k r times their work is then at least

    C = sum over ops of the least m_k c_k(o),

whichever op goes where. A place works on every micro-batch, and no longer than the step takes: the sum of m_k r over
all places, times the step, is at least M C. The m_k are those for which the bound is largest, among a few.

Where ops are cut as if all devices were alike (`even_s`), the slowest place alone says more: M times its work.

Nothing is counted for filling and emptying the pipe: stages need not wait for each other (two towers that meet at the
end). What ranks exchange is left out, too, which makes it weaker than the bound for devices of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from laminar.cost.machine import ALONE
from laminar.cost.ops.families import COMPUTES, family_of
from laminar.forecast.pipeline_step import MEETING_S
from laminar.ir.graph import Graph
from laminar.ir.ops import FREE
from laminar.lower.stages.split_stages import split_graph
from laminar.planner.bounds.one_device import ONE_DEVICE, Alone, kernel_s
from laminar.planner.estimate.mixed_pipelines import Shop, Sides
from laminar.planner.estimate.score_placement import extrapolated
from laminar.planner.space.cell import Cell
from laminar.planner.tuning import PART_WEIGHTS
from laminar.rules.notation import Call, call_of, calls_in
from laminar.staging.balance import balanced


class SidesBounds:
    """Lower bounds for pipelines over the parts of one cluster."""

    def __init__(self, shop: Shop, micro: int) -> None:
        """`micro` is the least number of micro-batches that a pipeline has."""
        self.shop, self.micro = shop, micro
        self.devices = [part.devices for part in shop.request.cluster.parts]
        self.alone = Alone(shop.model)
        self._known: dict[tuple[int, int], np.ndarray] = {}
        self._work: dict[int, float] = {}
        self._ops: dict[tuple[int, Call], float] = {}
        self.counts = self._counts()
        """How much each part counts, the first one 1."""

    def seconds(self, micro: int, keep: int) -> np.ndarray:
        """What ops of a micro-batch take on one device at a depth, a row for each part."""
        if (micro, keep) not in self._known:
            graph, rows = self.shop.model.small(micro, keep), []
            fused = self.shop.model.machine(ONE_DEVICE).fused
            written = self.alone.kernels(Cell(1, micro, 1, 1, 1), keep) if fused else []
            own = [n for n in graph.nodes if not fused or family_of(n.op) in COMPUTES or n.op in ALONE]
            calls = [call_of(n, graph.specs) for n in own if n.op not in FREE]
            for model in self.shop.models:
                machine = model.machine(ONE_DEVICE)
                kernels = [kernel_s(machine, *one, 1) for one in written]
                rows.append([machine.op(call).seconds for call in calls] + kernels)
            self._known[micro, keep] = np.array(rows)
        return self._known[micro, keep]

    def _deep(self, micro: int, counts: Sequence[float]) -> float:
        """The least that a micro-batch counts, at full depth, if part k counts `counts[k]`."""
        found = {}
        for keep in self.shop.model.keeps:
            found[keep] = float((np.array(counts)[:, None] * self.seconds(micro, keep)).min(axis=0).sum())
        return extrapolated(found, self.shop.model.layers)

    def _counts(self) -> list[float]:
        counts = [1.0] * len(self.devices)
        rows = self.seconds(self.micro, self.shop.model.keeps[-1])
        for k in range(1, len(counts)):
            apart = rows[0][(rows[0] > 0) & (rows[k] > 0)] / rows[k][(rows[0] > 0) & (rows[k] > 0)]
            if len(apart):
                tried = np.geomspace(apart.min(), apart.max(), PART_WEIGHTS)
                ways = [[*counts[:k], float(m), *counts[k + 1 :]] for m in tried]
                counts = max(ways, key=self._rate)
        return counts

    def _rate(self, counts: Sequence[float]) -> float:
        return self._deep(self.micro, counts) / sum(m * n for m, n in zip(counts, self.devices, strict=True))

    def work(self, micro: int) -> float:
        """C of a micro-batch, if there are so many in a batch."""
        if micro not in self._work:
            self._work[micro] = self._deep(micro, self.counts)
        return self._work[micro]

    def ideal_s(self, micro: int) -> float:
        """A step if all devices were busy all the time, each with what suits it."""
        return micro * self.work(micro) / sum(m * n for m, n in zip(self.counts, self.devices, strict=True))

    def part_s(self, k: int) -> float:
        """At least so many seconds with the devices of one part only."""
        found = {keep: float(self.seconds(1, keep)[k].sum()) for keep in self.shop.model.keeps}
        return extrapolated(found, self.shop.model.layers) / self.devices[k]

    def of(self, cell: Sides) -> float:
        """Seconds that every plan of a cell takes at least."""
        return self.ideal_s(cell.micro_batches) + MEETING_S[self.shop.request.cluster.kind]

    def even_s(self, cell: Sides, graph: Graph) -> float:
        """Seconds that a pipeline of a cell takes at least, cut as if all devices were alike.

        `graph` is that of a micro-batch at full depth; what a compiler may fuse is left out.
        """
        stages = split_graph(graph, balanced(graph, cell.stages), cell.stages).of
        fused, calls = self.shop.model.machine(ONE_DEVICE).fused, calls_in(graph)
        works = [0.0] * cell.stages
        for name, stage in stages.items():
            op, k = graph.by_name[name].op, cell.each[stage]
            if op not in FREE and (not fused or family_of(op) in COMPUTES or op in ALONE):
                works[stage] += self._op_s(k, calls[name]) / cell.sides[k].ranks
        return cell.micro_batches * max(works)

    def _op_s(self, k: int, call: Call) -> float:
        if (k, call) not in self._ops:
            self._ops[k, call] = self.shop.models[k].machine(ONE_DEVICE).op(call).seconds
        return self._ops[k, call]

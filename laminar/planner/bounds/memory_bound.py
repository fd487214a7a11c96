"""A step takes at least so long if all that its pipeline keeps has to fit.

Stages 0..N-1 stand in a row (`pipeline_bound`), gradients of weights are not apart from those of inputs. Of one
micro-batch stage r takes f forward, b backward and x = f + b, and keeps a stash from the beginning of its forward to
the end of its backward. W is the sum of all x, T the time of the step, M the number of micro-batches.

    begins   The forward of stage r begins no later than T - W + sum(f[q], q < r): behind it a micro-batch still has
             everything to do but the forward of the stages before r.
    ends     Its backward ends no earlier than W - sum(b[q], q < r): before that everything was done but the backward
             of the stages before r.

In between the stash of stage r is there for *every* micro-batch. Let r* be the last stage with sum(x[q], q < r*) less
than 2W - T, and look at the moment t = T - W + sum(f[q], q < r*). All stages up to r* have begun by then, and for each
of them t < W - sum(b[q], q < r*): none of them has ended. So

    at one moment all places together hold the stashes of all M micro-batches of stages 0..r*, and              (1)
    T >= W + sum(x[q], q > r*)                                                                                   (2)

for if r* is not the last stage, sum(x[q], q <= r*) is 2W - T or more; and if there is none, T is 2W or more. A pipeline
either lets micro-batches wait for each other, and takes longer, or holds them all at once. Neither the cuts, nor the
schedule, nor the number of stages at a place matter.

What a stage holds besides (`forecast.predict_staged`): parameters, gradients and state of its own, all the time. With
room R at each of S places, stays being the bytes of all stages together and k[l] what layer l keeps of a micro-batch:

    M sum(k[l] for layers l within stages 0..r*) + stays <= S R                                                  (3)

**Prices.** Let a byte be worth some seconds, any number: (2) plus that worth of (3) is a bound as well, and so is its
mean with T >= stretch W, and each term of the sum can be minimised by itself. With share s of (2), c = s + (1 - s)
stretch, and a byte worth c p:

    T >= c min(W + p stays) + min over j (s later[j + 1] + (j - 2) c layer(p M)) - c p S R

    min(W + p stays)   over all placements (`least`, where a stored byte costs p): whole parameters cost room, pieces
                       of them cost exchanges
    j                  the layer that stage r* ends in. later[j + 1]: what stages behind do at least, the work of all
                       ops of the layers behind j, forward and backward (`pipeline_bound.Row`).
    layer(v)           the least of what a layer recomputes, in seconds, and of v times the bytes it keeps

A layer counts in (3) if it and the next one lie within stages 0..r*: then all who read its values in forward do, and
backward ops are where their values were made or read (`lower/stages/split_stages.py`). Those are j - 1; of the first,
whose neighbour is another, nothing is said.

**A layer** keeps or recomputes what backward reads. What is recomputed needs what its op reads, kept or recomputed,
and takes the op's seconds at their least; kernels that a compiler writes count nothing. Which values a plan keeps is
its own affair: blocks as a whole, all but their products, what is exchanged, anything between. The least over *all*
choices is a minimum cut: a node for each op that may run again, one for each value that is wanted; a value that is
wanted costs its bytes unless its op runs again. What a layer is given counts nothing: the layer before it has made it.
Where a cell recomputes nothing, ops but views cost more than anything. The fullest rank keeps at least its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from laminar.ir.graph import Graph, Node
from laminar.ir.ops import FREE
from laminar.ir.serial.codec import Ref
from laminar.lower.stages.split_stages import light_ops, repeated
from laminar.placement.fold import Fold
from laminar.planner.tuning import STRETCH_SHARES

FLOW_UNITS = 1 << 30
"""Sum of all that a layer could cost, in whole numbers: what is cut is rounded down to them."""


@dataclass(frozen=True)
class KeptLayer:
    """What one layer makes that backward may want: its ops, and the bytes of a micro-batch on all ranks together."""

    ops: tuple[Node, ...]
    """Ops of forward that something of the batch flows through."""
    made: tuple[tuple[Ref, int], ...]
    """Values and their bytes."""
    wanted: frozenset[Ref]
    """Those that backward reads."""

    @staticmethod
    def of(graph: Graph, fold: Fold, keep: int) -> KeptLayer | None:
        """Of a middle layer, where `fold` has folded a model to `keep`; None where layers don't stand by themselves.

        What a layer makes must be read in forward by itself and the next layer only, and backward ops that read it must
        read nothing that forward makes behind all layers.
        """
        if keep >= fold.layers or keep < 3:
            return None
        at, light, twins = fold.at, light_ops(graph), repeated(graph)
        here, last = 1, fold.layers - 1
        weights = {i.name for i in graph.of_kind("param")} | {c.name for c in graph.constants}
        forward = [n for n in graph.nodes if n.phase == "forward"]
        heavy = [n.name for n in forward if n.name not in light]
        layered = [k for k, name in enumerate(heavy) if name in at]
        if not layered or layered != list(range(layered[0], layered[-1] + 1)):
            return None
        if (order := [at[heavy[k]][0] for k in layered]) != sorted(order):
            return None
        behind = set(heavy[layered[-1] + 1 :])
        ops: list[Node] = []
        for node in forward:
            if node.ins and all(r.name in weights for r in node.ins):
                weights.add(node.name)
            elif node.name in at and at[node.name][0] == here and node.name not in light:
                ops.append(node)
        mine = {n.name for n in ops}
        wanted: set[Ref] = set()
        for node in graph.nodes:
            read = [r for r in node.ins if r.name in mine]
            layer = at[node.name][0] if node.name in at else -1
            if node.phase == "forward":
                if (read and layer not in (here, last)) or (layer == last and _reads(node, at, 0)):
                    return None
            elif read and node.name not in light and node.name not in twins:
                if any(r.name in behind for r in node.ins):
                    return None
                wanted.update(read)
        if any(o.ref.name in mine for o in graph.outputs):
            return None
        made = tuple((ref, spec.nbytes) for ref, spec in graph.specs.items() if ref.name in mine)
        return KeptLayer(tuple(ops), made, frozenset(wanted))

    def least(self, byte: float, again: Callable[[Node], float]) -> float:
        """The least of what is recomputed, `again` for each op, and of the bytes that are kept, `byte` for each."""
        if not self.wanted or byte <= 0:
            return 0.0
        number = {n.name: k + 2 for k, n in enumerate(self.ops)}
        values = {ref: len(number) + 2 + k for k, (ref, _) in enumerate(self.made)}
        cost = {n.name: 0.0 if n.op in FREE else again(n) for n in self.ops}
        most = byte * sum(nbytes for _, nbytes in self.made)
        scale = FLOW_UNITS / (2 * most)
        never = FLOW_UNITS
        edges: list[tuple[int, int, int]] = []
        for node in self.ops:
            # More than all values together is as good as never.
            edges.append((number[node.name], 1, int(scale * min(cost[node.name], 2 * most))))
            edges += [(number[node.name], values[r], never) for r in {*node.ins} if r in values]
        for ref, nbytes in self.made:
            edges.append((values[ref], number[ref.name], int(scale * byte * nbytes)))
        edges += [(0, values[ref], never) for ref in self.wanted]
        rows, columns, caps = (np.array(side, dtype=np.int32) for side in zip(*edges, strict=True))
        size = 2 + len(number) + len(values)
        flow = maximum_flow(csr_matrix((caps, (rows, columns)), shape=(size, size)), 0, 1)
        return float(flow.flow_value) / scale


def _reads(node: Node, at: dict[str, tuple[int, str, int]], layer: int) -> bool:
    """Whether a forward op reads what a layer has made."""
    return any(r.name in at and at[r.name][0] == layer and at[r.name][1] == "f" for r in node.ins)


def starts(forward: Mapping[str, tuple[int, ...]], fold: Fold) -> list[int]:
    """Where each layer begins in the row of all forward ops, and where the last one ends."""
    first = [places[0] for name, places in forward.items() if name in fold.at and fold.at[name][0] == 0]
    return [min(first) + k * len(first) for k in range(fold.layers + 1)]


def held_s(stretch: float, lean_s: float, later_s: Sequence[float], layer_s: float, room_s: float) -> float:
    """The bound of all above, for one worth of a byte.

    `lean_s`: a micro-batch and what its stages store, at least. `later_s`: by layer, work of all from there on, and of
    none. `layer_s`: what a layer recomputes or keeps, of all micro-batches. `room_s`: all places' memory.
    """
    layers = len(later_s) - 1
    behind, within = np.append(np.asarray(later_s)[1:], 0.0), np.maximum(0, np.arange(layers + 1) - 2) * layer_s
    best = -math.inf
    for share in STRETCH_SHARES:
        count = share + (1 - share) * stretch
        best = max(best, count * (lean_s - room_s) + float((share * behind + count * within).min()))
    return best


__all__ = ["KeptLayer", "held_s", "starts"]

"""A step of a pipeline takes at least so long, wherever its stages are cut and in whatever order they take turns.

Stages 0..N-1 stand *in a row* if each waits for the one before it in forward, and is waited for by it in backward.
Stage q is at place q % S, N = S V. Of one micro-batch let it take f forward, b backward and x = f + b, and let there be
M of them. The first one reaches stage q when all stages before it have done their forward, and when stage q has done
its last backward, all stages before it still have theirs to do. In between the place of q does, for all micro-batches,
the work of q and of those of its stages that come behind q, which begin later and end earlier:

    T >= sum(x[r] for r < q) + M sum(x[r] for r >= q, r % S == q % S)          for every q                        (1)

Whatever the sizes x are, any mean of these is a bound. Let stage q count l[q]; then x[r] counts

    k[r] = M sum(l[q] for q <= r, q % S == r % S) + sum(l[q] for q > r)

and if all k are the same number k, then T >= k W / sum(l), with W the work of all stages together: the cuts have
dropped out. `stretch` is k / sum(l). k[r] = k[r + 1] says what each l is from those before it. With one stage at each
place it is 1 / (1 - (1 - 1/M)^S); equal stages would take (M + S - 1)/S, more of them than there are micro-batches
nothing but 1. Work is anything that a place does for a micro-batch: products, kernels, exchanges, as in `bound`.

Where gradients of weights are *apart* from those of inputs (zero-bubble schedules) they are waited for by nobody, and
only forward counts as filling. How much of a stage's work that is depends on where it is cut. With one stage at each
place (V = 1):

    T >= F[k] + M x[k]       F[k]: forward of all ops before stage k, at their cheapest                           (2)

Backward ops are in the stage of the forward ops that they belong to or behind it (`lower/stages/split_stages.py` puts
them where everything is at hand, as late as that may be), so stages k, k + 1, ... together do at least what belongs to
the ops from the first one of k on. By (2) they can't do more than sum((T - F[j]) / M for j >= k). `Row.least_s` looks
for the least T for which cuts exist that satisfy this for every k, and for all stages together with W. The best cuts
have every stage begin as early as that allows: an earlier begin leaves a stage and all before it more time. So they
follow from T, from the last stage to the first, and T is found by halving.

Where the cuts of a plan are *given* (one stage at each place, gradients together), more can be said: by the rule about
backward ops stages q, q + 1, ... do at least L[q], what belongs to the ops from where q begins, so

    sum(x[r] for r < q) <= W - L[q]          for every q                                                          (3)

and by (1) x[q] <= (T - sum(x[r] for r < q)) / M. `Row.cut_s` gives every stage as much as both allow, the first one
first: more of it there leaves later ones no less in sum. It looks for the least T for which that comes to W. Where W
is more than what is known here, some stage does more, and takes no less time.

Neither counts what once a step comes behind the last micro-batch, nor the hops; the mean place does (`bound`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from laminar.ir.graph import Graph
from laminar.ir.ops import FREE
from laminar.lower.stages.split_stages import LINEAR, light_ops, repeated
from laminar.placement.fold import Fold
from laminar.planner.tuning import BOUND_PRECISION
from laminar.staging.balance import work_s

GRADIENT_SUMS = LINEAR | {"aten.add.Tensor"}
"""Ops by which a gradient may be a sum of several."""
ROW_ROOM = 2
"""How many times the longest stretch of side by side ops a mean stage has where stages are taken to stand in a row."""


@lru_cache(maxsize=4096)
def stretch(stages: int, virtual: int, micro_batches: int) -> float:
    """How many times a micro-batch's work a step of stages in a row takes at least, by (1)."""
    if micro_batches == 1 or stages == 1:
        return float(micro_batches)  # one after the other
    counts: list[float] = []
    """What the constraint of each stage counts, those before it at the same place included."""
    total = 0.0
    for q in range(stages * virtual):
        before = counts[q - stages] if q >= stages else 0.0
        own = micro_batches * (counts[q - 1] - before) / (micro_batches - 1) if q else 1.0
        assert own >= 0
        counts.append(before + own)
        total += own
    return micro_batches * counts[-1] / total


@dataclass(frozen=True)
class Row:
    """Forward ops in their order at their cheapest, and what belongs to each: (2)."""

    before_s: tuple[float, ...]
    """Forward seconds before each op, and of all."""
    later_s: tuple[float, ...]
    """Forward and backward seconds of each op and of all behind it, and 0."""

    @staticmethod
    def of(forward_s: Sequence[float], all_s: Sequence[float]) -> Row:
        """From the seconds of each op, forward and with its backward."""
        later = list(accumulate(reversed(all_s), initial=0.0))
        return Row(tuple(accumulate(forward_s, initial=0.0)), tuple(reversed(later)))

    def least_s(self, stages: int, micro_batches: int, work_s: float, enough_s: float = math.inf) -> float:
        """The least T for which cuts exist; if that is not below `enough_s`, only so much. All stages do `work_s`."""
        # By (2) a stage may begin at an op if this is no more than what it and those behind it have time for.
        needs = [late + first / micro_batches for late, first in zip(self.later_s, self.before_s, strict=True)]
        needs.reverse()  # rising
        work_s = max(work_s, self.later_s[0])

        def there_are(limit_s: float) -> bool:
            time_s = 0.0
            for _ in range(stages - 1):
                # Rounding must not make a stage begin later than it may.
                at = len(needs) - bisect_left(needs, (time_s + limit_s / micro_batches) * (1 + 1e-12) + 1e-15)
                time_s += max(0.0, limit_s - self.before_s[at]) / micro_batches
            return time_s + limit_s / micro_batches >= work_s

        low, high = work_s * micro_batches / stages, work_s * micro_batches
        return _least(there_are, low, high, enough_s)

    def cut_s(self, starts: Sequence[int], micro_batches: int, work_s: float, enough_s: float = math.inf) -> float:
        """The least T where every stage but the first begins at the op given: (1) and (3)."""
        work_s = max(work_s, self.later_s[0])
        most_s = [*(work_s - self.later_s[at] for at in starts), work_s]
        """By stage, what it and those before it do at most."""

        def is_enough(limit_s: float) -> bool:
            done_s = 0.0
            for most in most_s:
                done_s = min(most, done_s + max(0.0, limit_s - done_s) / micro_batches)
            return done_s >= work_s * (1 - 1e-12)

        low, high = work_s * max(1.0, micro_batches / len(most_s)), work_s * micro_batches
        return _least(is_enough, low, high, enough_s)


def _least(holds: Callable[[float], bool], low: float, high: float, enough_s: float) -> float:
    """Where something begins to hold, found by halving, from below; or `enough_s`, where it does not hold there."""
    if enough_s < high:
        if not holds(enough_s):
            return enough_s
        high = max(low, enough_s)
    while high - low > BOUND_PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low


@dataclass(frozen=True)
class RowOps:
    """The forward ops of a graph that stages are cut from, in their order, and which of them read which."""

    names: tuple[str, ...]
    reads: tuple[tuple[int, int], ...]
    """Places of one that is read and of one that reads it."""

    @staticmethod
    def of(graph: Graph) -> RowOps:
        """Those that the loss and gradients depend on; what only repeats parameters belongs to any stage."""
        light, trains = light_ops(graph), _training(graph)
        ops = [n for n in graph.nodes if n.phase == "forward" and n.name not in light and n.name in trains]
        at = {n.name: k for k, n in enumerate(ops)}
        reads = dict.fromkeys((at[r.name], k) for k, n in enumerate(ops) for r in n.ins if r.name in at)
        return RowOps(tuple(n.name for n in ops), tuple(reads))

    def starts(self, of: Mapping[str, int], stages: int) -> list[int] | None:
        """Where stages that stand in a row begin, the first one left out; nothing where they don't."""
        at = [of[name] for name in self.names]
        if any(a > b for a, b in pairwise(at)) or {*at} != {*range(stages)}:
            return None
        if not {(s - 1, s) for s in range(1, stages)} <= {(at[a], at[b]) for a, b in self.reads}:
            return None  # each must wait for the one before
        return [bisect_left(at, s) for s in range(1, stages)]


@dataclass(frozen=True)
class Order:
    """The forward ops of a deep model in their order, and for each op of its folded graph where its work lies there."""

    forward: dict[str, tuple[int, ...]]
    """Forward op -> its place, or those of all layers that it stands for."""
    with_: dict[str, tuple[int, ...]]
    """Any op -> the places of the forward ops that it is not before, wherever stages are cut."""
    places: int

    @staticmethod
    def of(graph: Graph, fold: Fold, keep: int) -> Order:
        """Of a model that `fold` has folded to `keep` layers."""
        ops = RowOps.of(graph).names
        folded = keep < fold.layers
        at = fold.at if folded else {}
        kept = [*range(keep - 1), fold.layers - 1]
        """Layers of the folded graph; the last but one stands for all that were taken out."""
        stands_for = fold.layers - keep + 1 if folded else 1
        length = sum(name in at and at[name][0] == 0 for name in ops)
        gap = (stands_for - 1) * length
        behind_gap = next((name for name in ops if name in at and at[name][0] == kept[-1]), "")
        places: list[int] = []
        """Of each op of the folded graph, its place in the deep one."""
        for name in ops:
            places.append(places[-1] + 1 if places else 0)
            if name == behind_gap:
                places[-1] += gap
        last = places[-1]

        def spread(node: str, target: int) -> tuple[int, ...]:
            """In the deep graph: the same once more for every layer that the op's own stands for."""
            here, there = at.get(node), at.get(ops[target])
            if here is None or there is None or here[0] != kept[-2]:
                return (places[target],)
            beyond = there[0] == kept[-1]  # in the layer behind its own, which is the next one
            start = places[target] - (gap if beyond else 0)
            return tuple(min(start + k * length, last) for k in range(stands_for))

        spot = {name: k for k, name in enumerate(ops)}
        forward = {name: spread(name, k) for name, k in spot.items()}
        return Order(forward, {name: spread(name, k) for name, k in _belongs(graph, spot).items()}, last + 1)

    def row(self, seconds: Mapping[str, float]) -> Row:
        """With the seconds of each op of the folded graph."""
        forward_s, all_s = [0.0] * self.places, [0.0] * self.places
        for name, where in self.with_.items():
            if own := seconds.get(name, 0.0):
                for k in where:
                    all_s[k] += own
                if name in self.forward:
                    for k in where:
                        forward_s[k] += own
        return Row.of(forward_s, all_s)


def _training(graph: Graph) -> set[str]:
    """Ops that more than buffers depend on: those of buffers are put where buffers are."""
    found = {o.ref.name for o in graph.outputs if o.kind != "buffer"}
    for node in reversed(graph.nodes):
        if node.name in found:
            found.update(r.name for r in node.ins)
    return found


def _belongs(graph: Graph, spot: Mapping[str, int]) -> dict[str, int]:
    """For every op, a forward op whose stage it is in or behind, wherever stages are cut; as late a one as is known.

    A backward op is in a stage that has made or read all forward values that it reads. One that reads gradients only is
    where the first of them is made, or where its parameters are read. Sums that a gradient ends in may be anywhere.
    """
    light, twins = light_ops(graph), repeated(graph)
    readers: dict[str, int] = {}
    """By value, the first forward op that reads it, or what any stage makes from it."""
    for node in reversed(graph.nodes):
        if node.phase == "forward":
            here = spot.get(node.name, readers.get(node.name))
            if here is not None:
                for ref in node.ins:
                    readers[ref.name] = min(readers.get(ref.name, here), here)
    homes = _homes(graph, readers)
    base: dict[str, int] = {}
    """Forward values: views may be in the stage of the tensor that they show."""
    out: dict[str, int] = {}
    for node in graph.nodes:
        if node.name in spot:
            shows = node.ins[0].name if node.op in FREE and len(node.ins) == 1 else node.name
            base[node.name] = out[node.name] = base.get(shows, spot[node.name])
        elif node.phase == "forward" or node.name in light:
            continue
        elif node.name in twins:
            out[node.name] = spot.get(twins[node.name], 0)
        elif node.name in homes and node.op in GRADIENT_SUMS:
            out[node.name] = 0
        else:
            made = [base[r.name] for r in node.ins if r.name in base]
            others = [out.get(r.name, readers.get(r.name)) for r in node.ins if r.name not in light]
            known = [k for k in (*others, homes.get(node.name)) if k is not None]
            out[node.name] = max(made) if made else min(known, default=0)
    return out


def _homes(graph: Graph, readers: Mapping[str, int]) -> dict[str, int]:
    """For ops that a gradient ends in, the first op that reads its parameter: they may be put there."""
    out: dict[str, int] = {}
    for o in graph.outputs:
        todo = [o.ref.name] if o.kind == "grad" else []
        while todo:
            name = todo.pop()
            out[name] = min(out.get(name, readers.get(o.name, 0)), readers.get(o.name, 0))
            if name in graph.by_name and graph.by_name[name].op in GRADIENT_SUMS:
                todo += [r.name for r in graph.by_name[name].ins]
    return out


# --- whether stages stand in a row


def longest_row(graph: Graph, fold: Fold, keep: int) -> int:
    """How many stages, cut evenly, are sure to stand in a row: each then has an op that all others wait for.

    `graph` is the model with `keep` layers.
    """
    ops = [n for n in graph.nodes if n.phase == "forward" and n.name not in light_ops(graph)]
    number = {n.name: k for k, n in enumerate(ops)}
    before = [0] * len(ops)
    """By op, the set of those that it waits for and itself, as bits."""
    behind = [1 << k for k in range(len(ops))]
    for k, node in enumerate(ops):
        before[k] = 1 << k
        for ref in node.ins:
            if ref.name in number:
                before[k] |= before[number[ref.name]]
    for k in reversed(range(len(ops))):
        for ref in ops[k].ins:
            if ref.name in number:
                behind[number[ref.name]] |= behind[k]
    every, taken = (1 << len(ops)) - 1, work_s(graph)
    longest = stretch_s = total = 0.0
    for k, node in enumerate(ops):
        layer = fold.at.get(node.name)
        times = fold.layers - keep + 1 if layer is not None and keep < fold.layers and layer[0] == keep - 2 else 1
        total += times * taken[node.name]
        alone = node.op not in FREE and before[k] | behind[k] == every
        stretch_s = 0.0 if alone else stretch_s + taken[node.name]
        longest = max(longest, stretch_s)
    return int(total / (ROW_ROOM * longest)) if longest else len(ops) * max(1, fold.layers)


__all__ = ["Order", "Row", "RowOps", "longest_row", "stretch"]

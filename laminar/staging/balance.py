"""Where to cut a graph into stages: the cuts whose slowest stage is fastest, exactly.

Among those that are nearly as good, the ones that send least are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from laminar.cost.ops.roofline import op_s
from laminar.errors import PlanError
from laminar.ir.graph import Graph, Node
from laminar.ir.ops import FREE
from laminar.ir.serial.codec import Ref
from laminar.lower.stages.split_stages import light_ops
from laminar.rules.notation import calls_in
from laminar.staging.balance_places import evened
from laminar.staging.coupled_samples import BIAS_FREE_PRODUCTS

CUT_SLACK = 1.05
"""Cuts whose slowest stage is within this of the best are compared by what they send."""
KNOWN_SLACK = 1.01
"""The same where it is known what ops take."""


def work_s(graph: Graph) -> dict[str, float]:
    """Seconds of each forward op with its backward ops, by a roofline on an assumed machine."""
    out: dict[str, float] = {}
    calls = calls_in(graph)
    for node in graph.nodes:
        if node.phase == "forward":
            once = op_s(calls[node.name])
            trained = node.op not in FREE and any(r.name in out or graph.specs[r].is_float for r in node.ins)
            out[node.name] = once * (3.0 if trained else 1.0)
    return out


def _work(graph: Graph, speeds: Sequence[float | Mapping[str, float]], places: int) -> list[Mapping[str, float]]:
    """For each place, the seconds of each forward op with its backward ops."""
    if len(speeds) != places:
        raise PlanError(f"{len(speeds)} speeds for {places} places", next="say one for each place")
    assumed = work_s(graph)
    out: list[Mapping[str, float]] = []
    for p, speed in enumerate(speeds):
        if isinstance(speed, Mapping):
            missing = [n for n in assumed if n not in speed]
            if missing:
                raise PlanError(f"speeds[{p}] has no seconds for op %{missing[0]}", also=f"{len(missing) - 1} more")
            out.append(speed)
        elif not speed > 0:
            raise PlanError(f"speeds[{p}] is {speed}", allowed="a number above 0, or seconds by op")
        else:
            out.append({name: seconds / speed for name, seconds in assumed.items()})
    return out


def balanced(
    graph: Graph, stages: int, work: Sequence[Mapping[str, float]] | None = None, microbatches: int = 0
) -> dict[str, int]:
    """Cuts of the forward ops, in order, whose slowest stage is fastest; of nearly equal ones those that send least.

    `work` has the seconds of each op at each place; stages take turns on places. Unless given, places are equal. With
    `microbatches`, stages that take turns are evened out by place (`balance_places`).
    A product and the bias added to it stay together, if there are enough other cuts: with another number of samples it
    may be one op that reads both weight and bias.
    """
    ops, allowed = cuttable(graph)
    if len(ops) < stages:
        raise PlanError(f"{len(ops)} ops can't make {stages} stages", next="ask for fewer stages")
    known: dict[int, np.ndarray] = {}
    for at in (given := work or [work_s(graph)]):
        if id(at) not in known:
            known[id(at)] = np.concatenate(([0.0], np.cumsum([at[n.name] for n in ops])))
    sums = [known[id(at)] for at in given]
    total = [sums[s % len(sums)] for s in range(stages)]
    sent = graph.notes.get("sent")
    if sent is None:
        sent = graph.notes["sent"] = crossing_bytes(graph, [n.name for n in ops])
    if allowed[1:-1].sum() < stages - 1:
        allowed[:] = True
    slack = CUT_SLACK if work is None else KNOWN_SLACK
    if all(at is total[0] for at in total):
        starts = _even_cuts(total[0], np.array(sent), allowed, stages, slack)
    else:
        starts = _cuts(total, np.array(sent), allowed, stages, slack)
    if microbatches and len(given) > 1 and stages > len(given) and stages % len(given) == 0:
        starts = evened(total, np.array(sent), allowed, starts, len(given), microbatches)
    return {node.name: int(np.searchsorted(starts, i, side="right")) - 1 for i, node in enumerate(ops)}


def cuttable(graph: Graph) -> tuple[list[Node], np.ndarray]:
    """Forward ops that belong to one stage, in order; and where a stage may begin: before each, and behind the last."""
    known: tuple[list[Node], np.ndarray] | None = graph.notes.get("cuttable")
    if known is None:
        light = light_ops(graph)
        ops = [n for n in graph.nodes if n.phase == "forward" and n.name not in light]
        apart = _inside_layers(graph, ops)
        known = graph.notes["cuttable"] = ops, np.array([k not in apart for k in range(len(ops) + 1)])
    return list(known[0]), known[1].copy()


def _cuts(total: Sequence[np.ndarray], sent: np.ndarray, allowed: np.ndarray, stages: int, slack: float) -> list[int]:
    """The first op of each stage; a cut before an op only where that is allowed. `total`: sums of work, by stage."""
    n = len(total[0]) - 1
    best = np.full((stages + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    for k in range(1, stages + 1):
        for j in np.flatnonzero(allowed)[1:]:
            best[k, j] = np.maximum(best[k - 1, :j], total[k - 1][j] - total[k - 1][:j]).min()
    limit = best[stages, n] * slack
    # Among cuts that keep every stage below the limit, the least bytes in all.
    least = np.full((stages + 1, n + 1), np.inf)
    least[0, 0] = 0.0
    back = np.zeros((stages + 1, n + 1), dtype=int)
    for k in range(1, stages + 1):
        for j in np.flatnonzero(allowed)[1:]:
            ok = total[k - 1][j] - total[k - 1][:j] <= limit
            found = np.where(ok, least[k - 1, :j], np.inf)
            back[k, j] = int(found.argmin())
            least[k, j] = found[back[k, j]] + (sent[j] if j < n else 0.0)
    cuts, j = [], n
    for k in range(stages, 0, -1):
        j = int(back[k, j])
        cuts.append(j)
    return sorted(cuts)


def _even_cuts(total: np.ndarray, sent: np.ndarray, allowed: np.ndarray, stages: int, slack: float) -> list[int]:
    """The same where all places are alike, which is found much sooner."""
    where = np.flatnonzero(allowed)
    ends = total[where]
    limit = slowest_s(ends, stages) * slack
    # Among cuts that keep every stage below the limit, the least bytes in all.
    count = len(where)
    least = np.full(count, np.inf)
    least[0] = 0.0
    bytes_at = np.append(sent[where[:-1]], 0.0)
    first = np.searchsorted(ends, ends - limit, side="left")
    reach = np.arange(count) - first  # beginnings from `first` up to the one before
    level = np.log2(np.maximum(reach, 1)).astype(int)  # two stretches of 2 ** level cover them
    right = np.arange(count) - (1 << level)
    backs: list[np.ndarray] = []
    for _ in range(stages):
        # The cheapest beginning in reach, the earliest of equals.
        best = [np.arange(count)]  # by level, of the 2 ** level that begin at each
        for k in range(int(level.max())):
            ahead = best[-1][np.minimum(np.arange(count) + (1 << k), count - 1)]
            best.append(np.where(least[best[-1]] <= least[ahead], best[-1], ahead))
        table = np.stack(best)
        a, b = table[level, np.minimum(first, count - 1)], table[level, right]
        back = np.where(reach > 0, np.where(least[a] <= least[b], a, b), 0)
        least = np.where(reach > 0, least[back] + bytes_at, np.inf)
        backs.append(back)
    cuts, j = [], count - 1
    for back in reversed(backs):
        j = int(back[j])
        cuts.append(int(where[j]))
    return sorted(cuts)


def slowest_s(ends: np.ndarray, stages: int) -> float:
    """Seconds of the slowest of so many stages, as few as can be; `ends` are the seconds before each possible cut."""

    def enough(limit: float) -> bool:
        at = 0
        for _ in range(stages):
            at = int(np.searchsorted(ends, ends[at] + limit, side="right")) - 1
            if at == len(ends) - 1:
                return True
        return False

    low, high = 0.0, float(ends[-1]) * (1 + 1e-9) + 1e-30
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _inside_layers(graph: Graph, ops: Sequence[Node]) -> set[int]:
    """Cuts between a product and the bias that is added to it, with nothing but views between: one layer's.

    Products themselves may be apart, even those of one module: a list of weights used in a loop is as many layers.
    """
    light = light_ops(graph)
    stored = {i.name for i in graph.of_kind("param")}
    for node in graph.nodes:
        if node.name in light and any(r.name in stored for r in node.ins):
            stored.add(node.name)
    found: set[int] = set()
    for k, node in enumerate(ops):
        if node.op != "aten.add.Tensor" or not any(r.name in stored for r in node.ins):
            continue
        first = k
        while first > 0 and ops[first - 1].op in FREE and _reads(ops[first], ops[first - 1]):
            first -= 1
        if first > 0 and ops[first - 1].op in BIAS_FREE_PRODUCTS and _reads(ops[first], ops[first - 1]):
            found.update(range(first, k + 1))
    return found


def _reads(node: Node, other: Node) -> bool:
    return any(r.name == other.name for r in node.ins)


def crossing_bytes(graph: Graph, ops: Sequence[str]) -> list[float]:
    """For a cut before each op, and behind the last, the bytes that forward sends across it."""
    at = {name: i for i, name in enumerate(ops)}
    change = np.zeros(len(ops) + 2)
    for name in ops:
        node = graph.by_name[name]
        for k, spec in enumerate(node.outs):
            readers = [at[u.name] for u in graph.users.get(Ref(name, k), ()) if u.name in at]
            if spec is not None and readers and max(readers) > at[name]:
                change[at[name] + 1] += spec.nbytes
                change[max(readers) + 1] -= spec.nbytes
    return [float(x) for x in np.cumsum(change)[: len(ops) + 1]]

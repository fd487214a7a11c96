"""The least that a pipeline takes, held against all cuts and all orders of small ones, and against the nets that run.

Three things are believed by the bound: the arithmetic (no order of firings ends sooner), where
`lower/stages/split_stages.py` puts backward ops, and what "in a row" means in the nets that are simulated. Each has its
own oracle here.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
from scipy.optimize import linprog

from laminar.cost.sim.pipeline import execute
from laminar.errors import LaminarError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.ops import FREE
from laminar.lower.stages.pipeline_net import Layout, Stage, chain
from laminar.lower.stages.schedules import SCHEDULE_ORDERS, dag_net
from laminar.lower.stages.split_stages import light_ops, split_graph
from laminar.lower.stages.stage_net import piped
from laminar.lower.stages.stage_programs import stages
from laminar.placement.fold import Fold, fold
from laminar.placement.micro_batch import micro
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.bounds.pipeline_bound import Order, Row, longest_row, stretch
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.space.cell import Cell
from laminar.planner.space.plan_space import out_of_row
from laminar.planner.space.request import Request
from laminar.staging.balance import cuttable, work_s
from laminar.staging.stage_plans import pipeline
from tests.attack.run import graph_of
from tests.support.marks import slow
from tests.support.seeds import dice
from tests.support.zoo import NAMES

# --- the arithmetic


def least_end(forward: Sequence[int], backward: Sequence[int], weight: Sequence[int], places: int, micro: int) -> int:
    """When a pipeline of such stages is done at the earliest, over all orders: every one is tried."""
    count, apart = len(forward), any(weight)
    kinds = "FBW" if apart else "FB"
    took = {"F": forward, "B": backward, "W": weight}

    def needs(kind: str, s: int) -> tuple[str, int] | None:
        if kind == "F":
            return ("F", s - 1) if s else None
        if kind == "B":
            return ("B", s + 1) if s + 1 < count else ("F", s)
        return ("B", s)

    best = sum(micro * took[kind][s] for kind in kinds for s in range(count))

    @cache
    def ways(place: int) -> tuple[tuple[str, int], ...]:
        return tuple((kind, s) for s in range(place, count, places) for kind in kinds)

    def left(done: dict[tuple[str, int], int], place: int) -> int:
        return sum((micro - done[key]) * took[key[0]][key[1]] for key in ways(place))

    def go(done: dict[tuple[str, int], int], ends: dict[tuple[str, int, int], int], free: list[int]) -> None:
        """Micro-batches pass each part in order; whatever begins next is tried at every place."""
        nonlocal best
        if max(free[p] + left(done, p) for p in range(places)) >= best:
            return
        if all(n == micro for n in done.values()):
            best = max(free)
            return
        ready = []
        for p in range(places):
            for kind, s in ways(p):
                k = done[kind, s]
                need = needs(kind, s)
                if k < micro and (need is None or (*need, k) in ends):
                    ready.append((max(free[p], ends[(*need, k)] if need else 0), p, kind, s, k))
        soonest = min(start + took[kind][s] for start, _, kind, s, _ in ready)
        for start, p, kind, s, k in ready:
            if start >= soonest:  # something could be done before it
                continue
            end = start + took[kind][s]
            before = free[p]
            done[kind, s] += 1
            ends[kind, s, k] = free[p] = end
            go(done, ends, free)
            done[kind, s] -= 1
            del ends[kind, s, k]
            free[p] = before

    go({(kind, s): 0 for kind in kinds for s in range(count)}, {}, [0] * places)
    return best


def cut(ops: Sequence[tuple[int, int, int]], count: int) -> Iterator[list[tuple[int, int, int]]]:
    """Every way to cut a row of ops into so many stages; seconds of each stage, forward, of inputs and of weights."""
    for at in itertools.combinations(range(1, len(ops)), count - 1):
        ends = [0, *at, len(ops)]
        yield [tuple(map(sum, zip(*ops[a:b], strict=True))) for a, b in itertools.pairwise(ends)]  # type: ignore[misc]


def rows(seed: int, count: int, apart: bool) -> list[tuple[int, int, int]]:
    """Some ops of a model: forward, gradients of inputs, and of weights."""
    rng = dice(f"pipeline bound {seed}")
    return [(rng.randint(1, 6), rng.randint(1, 9), rng.randint(0, 6) if apart else 0) for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("places", "virtual", "micro"), [(2, 1, 2), (2, 1, 3), (3, 1, 3), (2, 2, 2), slow(2, 2, 3)])
def test_no_order_of_any_cut_ends_sooner_than_the_stretch_says(
    places: int, virtual: int, micro: int, seed: int
) -> None:
    """All cuts, all orders, backward in one part."""
    ops = rows(seed, places * virtual + (1 if virtual * micro > 5 else 2), apart=False)
    work = sum(f + b for f, b, _ in ops)
    best = math.inf
    for sizes in cut(ops, places * virtual):
        forward, backward, weight = zip(*sizes, strict=True)
        best = min(best, least_end(forward, backward, weight, places, micro))
    assert stretch(places, virtual, micro) * work <= best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("places", "micro"), [(2, 2), slow(2, 3), slow(3, 2)])
def test_no_order_of_any_cut_ends_sooner_where_gradients_of_weights_are_apart(
    places: int, micro: int, seed: int
) -> None:
    """All cuts, all orders; forward alone fills the pipe."""
    ops = rows(seed, places + 2, apart=True)
    row = Row.of([f for f, _, _ in ops], [sum(op) for op in ops])
    best = math.inf
    for sizes in cut(ops, places):
        forward, backward, weight = zip(*sizes, strict=True)
        best = min(best, least_end(forward, backward, weight, places, micro))
    least = row.least_s(places, micro, 0.0)
    assert micro * sum(map(sum, ops)) / places <= least * (1 + 1e-4) and least <= best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("places", "micro"), [(2, 2), (2, 3), (3, 3), slow(2, 4)])
def test_no_order_of_given_cuts_ends_sooner_than_is_said_of_them(places: int, micro: int, seed: int) -> None:
    """All cuts, all orders. Some of the work is known in sum only, and backward may be in a later stage."""
    rng = dice(f"given cuts {places} {micro} {seed}")
    ops = rows(seed, places + 2, apart=False)
    row, more = Row.of([f for f, _, _ in ops], [f + b for f, b, _ in ops]), 0
    for at in itertools.combinations(range(1, len(ops)), places - 1):
        ends = [0, *at, len(ops)]
        forward = [sum(f for f, _, _ in ops[a:b]) for a, b in itertools.pairwise(ends)]
        backward = [sum(b for _, b, _ in ops[a:b]) for a, b in itertools.pairwise(ends)]
        for unknown in (0, rng.randint(0, 5)):
            (forward if rng.random() < 0.5 else backward)[rng.randrange(places)] += unknown
            work, best = sum(forward + backward), least_end(forward, backward, [0] * places, places, micro)
            assert row.cut_s(at, micro, work) <= best
            more += row.cut_s(at, micro, work) > 1.001 * stretch(places, 1, micro) * work
        late = rng.randint(0, backward[0])
        backward[0], backward[-1] = backward[0] - late, backward[-1] + late
        assert row.cut_s(at, micro, work) <= least_end(forward, backward, [0] * places, places, micro)
    assert more


def least_stretch(places: int, virtual: int, micro: int, floor: float = 0.0) -> float:
    """The least T by (1) over all sizes of stages of at least a share of the mean one, as a linear program."""
    count = places * virtual
    rows, zeros = [], [0.0] * count
    for q in range(count):
        row = [1.0 if r < q else micro if (r - q) % places == 0 else 0.0 for r in range(count)]
        rows.append([*row, -1.0])
    found = linprog(
        [*zeros, 1.0],
        A_ub=np.array(rows),
        b_ub=zeros,
        A_eq=[[1.0] * count + [0.0]],
        b_eq=[1.0],
        bounds=[(floor / count, None)] * count + [(0.0, None)],
    )
    return float(found.fun)


@pytest.mark.parametrize(("places", "virtual", "micro"), [(2, 1, 2), (8, 1, 8), (4, 3, 8), (8, 6, 8), (5, 2, 20)])
def test_the_stretch_is_the_best_that_follows_from_its_premises(places: int, virtual: int, micro: int) -> None:
    """The least T over all sizes of stages."""
    assert stretch(places, virtual, micro) == pytest.approx(least_stretch(places, virtual, micro), rel=1e-6)


@pytest.mark.parametrize(("places", "virtual", "micro"), [(16, 6, 48), (16, 6, 192), (8, 3, 32)])
@pytest.mark.parametrize("floor", [0.5, 0.75, 0.9])
def test_a_least_size_of_stages_would_prove_half_of_what_it_promises(
    places: int, virtual: int, micro: int, floor: float
) -> None:
    """Why the space has none: first places may do more, and then the pipe is filled in half that time, floor or not."""
    bubble = (places - 1) / (virtual * micro)
    gained = least_stretch(places, virtual, micro, floor) * places / micro - 1
    assert gained == pytest.approx(floor * bubble / 2, rel=0.02)
    even = least_stretch(places, virtual, micro, 1.0) * places / micro - 1
    assert even == pytest.approx(bubble, rel=1e-6)


def test_the_least_cuts_are_those_that_trying_all_finds() -> None:
    """By (2): the work of each stage behind the forward of those before it, ops so small that any cut is near."""
    rng = random.Random(7)
    for _ in range(20):
        count, places, micro = rng.randint(8, 14), rng.randint(2, 4), rng.randint(2, 8)
        ops = [(rng.randint(1, 5), rng.randint(0, 9), 0) for _ in range(count)]
        row = Row.of([f for f, _, _ in ops], [sum(op) for op in ops])
        best = math.inf
        for sizes in cut(ops, places):
            before, most = 0, 0
            for f, b, _ in sizes:
                most, before = max(most, before + micro * (f + b)), before + f
            best = min(best, most)
        least = row.least_s(places, micro, 0.0)
        assert least <= best * (1 + 1e-9)
        assert best <= least + micro * max(map(sum, ops))  # a cut inside of an op would be found by neither
        assert row.least_s(places, micro, 0.0, enough_s=0.9 * least) == 0.9 * least
        more = row.least_s(places, micro, 2 * sum(map(sum, ops)))
        assert more >= max(least, 2 * micro * sum(map(sum, ops)) / places * (1 - 1e-4))


@pytest.mark.parametrize("seed", range(10))
def test_no_schedule_of_a_net_ends_sooner(seed: int) -> None:
    """Nets as they run, under every schedule there is, windows and deeper stashes included."""
    rng = dice(f"nets {seed}")
    for _ in range(20):
        places, virtual = rng.randint(2, 5), rng.choice((1, 1, 2, 3))
        micro = places * rng.randint(1, 3)
        skew = rng.choice((1.0, 0.8, 0.6))
        sizes = [1000 * skew**s * math.exp(rng.gauss(0, 0.2)) for s in range(places * virtual)]
        share = rng.choice((0.2, 1 / 3, 0.5))
        times = [(round(share * x), round((1 - share) / 2 * x)) for x in sizes]
        for apart in (False, True) if virtual == 1 else (False,):
            layout: Layout = chain([Stage(place=s % places) for s in range(places * virtual)], micro, apart=apart)
            for name in SCHEDULE_ORDERS:
                try:
                    net = dag_net(layout, schedule=name, window=rng.choice((0, 1, None)), stash=rng.choice((1.0, 2.0)))
                except LaminarError:  # a schedule for other nets
                    continue
                work = {}
                for s, (f, b) in enumerate(times):
                    work |= {f"F{s}": f, f"B{s}": 2 * b, f"I{s}": b, f"W{s}": b, f"R{s}": 0, f"O{s}": 0}
                try:
                    ended = execute(net, work, steps=1).step_ns
                except LaminarError:  # a list of priorities kept to the letter
                    continue
                total = sum(f + 2 * b for f, b in times)
                row = Row.of([f for f, _ in times], [f + 2 * b for f, b in times])
                if apart:
                    assert row.least_s(places, micro, total) <= ended
                else:
                    assert stretch(places, virtual, micro) * total <= ended
                    if virtual == 1:
                        assert row.least_s(places, micro, total) <= ended


# --- where ops go


def assigned(graph: Graph, rng: random.Random, count: int) -> dict[str, int]:
    """Forward ops in so many stretches, cut anywhere."""
    light = light_ops(graph)
    ops = [n.name for n in graph.nodes if n.phase == "forward" and n.name not in light]
    at = sorted(rng.sample(range(1, len(ops)), count - 1))
    return {name: sum(k >= a for a in at) for k, name in enumerate(ops)}


def unfolded(graph: Graph) -> Fold:
    """As if no layer were like another."""
    return Fold(graph, 0, {})


@pytest.mark.parametrize("name", [*NAMES, "5"])
def test_backward_ops_are_in_no_earlier_stage_than_what_they_belong_to(name: str) -> None:
    """Wherever stages are cut: or work that a stage may leave to those before it would count as its own."""
    graph, rng = micro(graph_of(name), 1), dice(f"belongs {name}")
    order = Order.of(graph, unfolded(graph), 1)
    light = light_ops(graph)
    ops = [n.name for n in graph.nodes if n.phase == "forward" and n.name not in light]
    spots = {order.forward[n][0]: n for n in ops if n in order.forward}
    tried = 0
    for _ in range(30):
        of = assigned(graph, rng, rng.choice((2, 3, 4)))
        try:
            found = split_graph(graph, of, 1 + max(of.values()))
        except LaminarError:  # stages that wait for each other
            continue
        tried += 1
        for op, (at,) in order.with_.items():
            if op in found.of and graph.by_name[op].op not in FREE:  # views take no time
                assert found.of[op] >= found.of[spots[at]], (op, spots[at])
    assert tried >= 5


@pytest.mark.parametrize("name", ["7", "5", "gpt.py:small"])
def test_a_folded_model_has_the_order_of_the_deep_one(name: str) -> None:
    """Layer by layer, whatever the op takes."""
    graph = micro(graph_of(name), 1)
    layers, rng = fold(graph), dice(f"order {name}")
    assert layers.layers > 3
    small = layers.small(3)
    kinds: dict[tuple[str, str, str], float] = {}

    def seconds(of: Graph) -> dict[str, float]:
        return {n.name: kinds.setdefault((n.op, n.phase, str(n.outs)), rng.uniform(1, 2)) for n in of.nodes}

    deep = Order.of(graph, unfolded(graph), 1).row(seconds(graph))
    shallow = Order.of(small, layers, 3).row(seconds(small))
    assert shallow.before_s == pytest.approx(deep.before_s)
    assert shallow.later_s == pytest.approx(deep.later_s)


# --- in a row


@pytest.mark.parametrize("name", [*NAMES, "7"])
def test_stages_are_in_a_row_if_the_net_makes_them_wait(name: str) -> None:
    """What names of values say is what queues do; and where evenly cut stages are said to be in a row, they are."""
    graph = micro(graph_of(name), 2)
    model = Model(graph_of(name), Request(Cluster.preset("4xcpu")))
    keep = model.keeps[-1]
    longest = longest_row(model.small(1, keep), model.fold, keep)
    seen = 0
    for count, virtual in ((2, 1), (3, 1), (4, 1), (2, 2)):
        try:
            plan = pipeline(graph, count, 2, virtual, couple="microbatch")
        except LaminarError:
            continue
        seen += 1
        queues = {q.name for q in piped(stages(graph, plan)).net.queues}
        many = count * virtual
        waits = all(f"F{s}->F{s + 1}" in queues and f"B{s + 1}->B{s}" in queues for s in range(many - 1))
        assert waits == (not out_of_row(plan)), (count, virtual, out_of_row(plan))
        if many <= longest:
            assert waits, (count, virtual)
    assert seen


def test_which_models_are_rows() -> None:
    """A GPT is one; two towers, or an encoder beside a decoder, are not."""
    found = {}
    for name in ("7", "gpt.py:tiny", "unet.py:tiny", "t5.py:tiny", "dlrm.py:tiny"):
        model = Model(graph_of(name), Request(Cluster.preset("4xcpu")))
        keep = model.keeps[-1]
        found[name] = longest_row(model.small(1, keep), model.fold, keep)
    assert found["7"] >= 7 and found["gpt.py:tiny"] >= 2 and found["unet.py:tiny"] >= 2, found
    assert found["t5.py:tiny"] < 2 and found["dlrm.py:tiny"] < 2, found


def test_what_is_proved_of_pipelines_in_a_row_is_more_than_their_mean() -> None:
    """As many micro-batches as stages, one and several at a place."""
    graph = graph_of("7")
    model = Model(graph, Request(Cluster.preset("4xh100")))
    filled, plain = Bounds(model), Bounds(model, rows=0)
    for cell in (Cell(4, 4, 1, 1, 1), Cell(2, 2, 3, 2, 1)):
        assert filled.in_a_row(cell) and not plain.in_a_row(cell)
        assert filled.quick(cell).seconds > 1.03 * plain.quick(cell).seconds
        assert filled.of(cell).seconds > 1.03 * plain.of(cell).seconds


def test_evenly_cut_stages_are_stretches() -> None:
    """`cuttable` says what stages are cut from: the forward ops in the order of the program."""
    graph = micro(graph_of("7"), 1)
    names = [n.name for n in cuttable(graph)[0]]
    order = Order.of(graph, unfolded(graph), 1)
    at = [order.forward[name][0] for name in names if name in order.forward]
    assert at == sorted(at) and len(at) > 20 and set(names) <= set(work_s(graph))

"""Stages that take turns are evened out by place: what is promised of the cuts, and that it pays in a net that runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from laminar.cost.sim.pipeline import execute
from laminar.errors import PlanError
from laminar.lower.stages.pipeline_net import Stage, chain
from laminar.lower.stages.schedules import dag_net
from laminar.placement.micro_batch import micro
from laminar.staging.balance import balanced, cuttable, work_s
from laminar.staging.balance_places import _sizes, _step, evened
from laminar.staging.stage_plans import pipeline
from tests.attack.run import graph_of
from tests.support.seeds import dice

LAYER = (3, 1, 1, 4, 4)
"""Seconds of the ops of a layer: qkv, attention, projection, up, down."""


def row(layers: int, head: int) -> np.ndarray:
    """Sums of work before each op of a model whose last op is its head."""
    return np.concatenate(([0.0], np.cumsum([*(LAYER * layers), head])))


def run_s(sizes: np.ndarray, places: int, many: int) -> float:
    """A step of stages that take so long, interleaved."""
    net = dag_net(chain([Stage(place=s % places) for s in range(len(sizes))], many), schedule="interleaved")
    work = {f"F{s}": round(1000 * x / 3) for s, x in enumerate(sizes)}
    work |= {f"B{s}": round(2000 * x / 3) for s, x in enumerate(sizes)}
    return execute(net, {a.name: work.get(a.name, 0) for a in net.actors}, steps=1).step_ns / 1000


@pytest.mark.parametrize(("places", "virtual", "many"), [(4, 3, 12), (4, 6, 8), (8, 2, 16), (8, 3, 24)])
def test_a_head_that_no_cut_divides_is_made_up_for_by_other_stages_of_its_place(
    places: int, virtual: int, many: int
) -> None:
    """One layer for each stage, and a head of half a layer: the slowest place has less to do, and a step is shorter."""
    stages = places * virtual
    total = row(stages, 6)
    starts = [5 * s for s in range(stages)]
    found = evened([total] * stages, np.ones(len(total)), np.ones(len(total), dtype=bool), starts, places, many)
    before, after = (np.diff([*total[at], total[-1]]) for at in (starts, found))
    assert after.reshape(virtual, places).sum(0).max() < before.reshape(virtual, places).sum(0).max()
    assert run_s(after, places, many) < run_s(before, places, many)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_stay_in_order_where_they_may_be_and_promise_no_more(seed: int) -> None:
    """Random ops, random places where no cut may be; places of different speeds."""
    rng = dice(f"turns {seed}")
    places, virtual, many = rng.randint(2, 4), rng.randint(2, 3), rng.randint(2, 12)
    stages = places * virtual
    count = rng.randint(2 * stages, 6 * stages)
    once = np.concatenate(([0.0], np.cumsum([rng.uniform(0, 5) for _ in range(count)])))
    sums = [once * rng.choice((1.0, 1.0, 2.0)) for _ in range(places)]
    total = [sums[s % places] for s in range(stages)]
    allowed = np.array([k in (0, count) or rng.random() < 0.8 for k in range(count + 1)])
    starts = [0, *sorted(rng.sample([k for k in range(1, count) if allowed[k]], stages - 1))]
    sent = np.array([rng.choice((1.0, 2.0, 9.0)) for _ in range(count + 1)])
    found = evened(total, sent, allowed, starts, places, many)
    assert found[0] == 0 and all(a < b for a, b in itertools.pairwise([*found, count]))
    assert allowed[found].all()
    said = [_step(_sizes(np.array(sums), np.array([[*at, count]])), places, many)[0] for at in (starts, found)]
    assert said[1] <= said[0]


def test_a_cut_that_sends_far_more_is_not_moved_to() -> None:
    """Inside of layers nine times as much is sent: cuts stay between them."""
    total = row(8, 6)
    starts = [5 * s for s in range(8)]
    sent = np.array([1.0 if k % 5 == 0 else 9.0 for k in range(len(total))])
    assert all(k % 5 == 0 for k in evened([total] * 8, sent, np.ones(len(total), dtype=bool), starts, 4, 8))


def test_stages_of_a_model_are_evened_out_if_that_is_asked_for() -> None:
    """Of a GPT with several stages at a place; with one at each nothing changes."""
    graph = micro(graph_of("7"), 1)
    ops, _ = cuttable(graph)
    work = work_s(graph)

    def slowest(of: dict[str, int]) -> float:
        places = [0.0, 0.0]
        for node in ops:
            places[of[node.name] % 2] += work[node.name]
        return max(places)

    plain, by_place = (balanced(graph, 6, [work] * 2, many) for many in (0, 8))
    assert slowest(by_place) < slowest(plain)
    assert sorted(set(by_place.values())) == list(range(6))
    assert balanced(graph, 2, [work] * 2, 8) == balanced(graph, 2, [work] * 2)
    made = pipeline(graph, 2, 4, 3, couple="microbatch", by_place=True)
    assert len(made.stages) == 6
    with pytest.raises(PlanError, match="by_place"):
        pipeline(graph, ["blocks.3"], 4, couple="microbatch", by_place=True)

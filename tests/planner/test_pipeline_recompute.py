"""As few blocks recomputed as memory asks for: what is chosen fits, is faster than all of them, and computes the same.

The estimate has oracles of its own: the nets that schedules make say what is kept at once, and every way to share
layers out among a few places says which is the best.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import laminar
from laminar.errors import PlanError
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.patterns import pick
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.ir.serial.reading import JsonPart
from laminar.lower.stages.pipeline_net import Stage, chain
from laminar.lower.stages.schedules import dag_net
from laminar.placement.micro_batch import micro
from laminar.planner.estimate import pipeline_recompute
from laminar.planner.estimate.candidates import Score
from laminar.planner.estimate.cost_by_depth import DepthLine, Parts, Share
from laminar.planner.estimate.graphs_and_prices import Model, members_pattern
from laminar.planner.estimate.pipeline_recompute import Places, Spread, under_way
from laminar.planner.estimate.score_placement import scored
from laminar.planner.report.classify import form, placed_graph, recomputed_blocks
from laminar.planner.search.best_first.search import find
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Style
from tests.support.marks import slow
from tests.support.traced_models import traced
from tests.support.zoo import recipe

LAYERS = 8
DEEP = {"layers": LAYERS, "batch": 16, "d": 64, "tokens": 256}


@cache
def deep() -> Graph:
    """A GPT that keeps much more than it has weights."""
    return traced(**DEEP)


def blocks_of(plan: Plan, graph: Graph) -> list[str]:
    """Blocks that a plan recomputes."""
    return sorted(pick(graph, plan.recompute).blocks)


# --- what is kept at once


@pytest.mark.parametrize(
    ("stages", "virtual", "many"),
    [(2, 3, 8), (2, 2, 4), (4, 2, 16), (4, 1, 16), (4, 3, 8), (4, 6, 4), (8, 4, 8), (3, 2, 6), (4, 1, 2), (1, 1, 5)],
)
def test_what_a_place_keeps_at_once_is_what_the_net_holds(stages: int, virtual: int, many: int) -> None:
    """Virtual stages that keep different amounts: at each moment as the schedule's order has it, to the byte."""
    rng = random.Random(stages * 100 + virtual)
    for _ in range(5):
        each = [rng.randint(1, 9) for _ in range(stages * virtual)]
        layout = chain([Stage(place=s % stages, stash_bytes=each[s]) for s in range(stages * virtual)], many)
        net = dag_net(layout, (), "interleaved" if virtual > 1 else "1f1b")
        for place in range(stages):
            mine = float((under_way(Cell(stages, many, virtual, 1, 1), place) @ np.array(each[place::stages])).max())
            assert mine == net.bound_bytes(place)


# --- the estimate


def made_up(stages: int, keeps: float, room: float, layers: int = 12) -> Places:
    """Places for a model of made-up figures: layers take 3 s, 1 s more if recomputed, and keep 10 bytes or one."""
    model = Model(traced(6), Request(Cluster.preset("8xh100"), memory_bytes=room))
    zero = DepthLine(0.0, 0.0)
    bare = Parts(
        Share(1, laminar.Mesh({"dp": 1}), Style(("data",)), 0, False, 1),
        DepthLine(0.0, 1.0),
        DepthLine(0.0, 2.0),
        DepthLine(0.0, keeps),
        zero,
        zero,
        DepthLine(0.0, 5.0),
        DepthLine(0.0, 1.0),
        zero,
        zero,
        zero,
    )
    again = replace(bare, backward_s=DepthLine(0.0, 3.0), kept_bytes=DepthLine(0.0, keeps / 10))
    found = Places(model, Cell(stages, 4 * stages, 1, 1, 1, True), bare, again, 0)
    found.layers = float(layers)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "room"),
    [
        (2, 140.0),
        (3, 120.0),
        (1, 230.0),
        *[slow(s, r) for s, r in ((2, 190.0), (3, 150.0), (3, 95.0))],
    ],
)
def test_layers_are_shared_out_so_that_the_slowest_place_is_as_fast_as_can_be(stages: int, room: float) -> None:
    """Every way to share out whole layers, with as many recomputed as there must be: none is faster."""
    here = made_up(stages, 10.0, room)
    best, unit = float("inf"), 4
    for cut in itertools.product(range(12 * unit + 1), repeat=stages - 1):
        layers = [*(n / unit for n in cut), 12 - sum(cut) / unit]
        if layers[-1] < 0:
            continue
        again = here.needed(np.array(layers)[:, None])[:, 0]
        best = min(best, max(3 * n + a for n, a in zip(layers, again, strict=True)))
    found = here.spread()
    assert found is not None and 0 < found.again.sum() < 12
    assert found.slowest_s <= best * (1 + 1e-6)
    assert found.slowest_s == pytest.approx(best, rel=0.05)
    assert found.layers.sum() == pytest.approx(12)
    for place in range(stages):
        assert here.held(place, [found.layers[place]], [found.again[place]]) <= room * 1.01


def test_first_places_make_more_again_and_have_fewer_layers() -> None:
    """They keep the most micro-batches; who makes more again has less time for layers."""
    found = made_up(3, 10.0, 120.0).spread()
    assert found is not None
    assert found.again[0] > found.again[1] > found.again[2] == 0
    assert found.layers[0] < found.layers[1] < found.layers[2]


def test_without_room_for_all_made_again_there_is_no_estimate() -> None:
    """Nothing is made up where nothing can be held; with plenty of room nothing is recomputed."""
    assert made_up(2, 10.0, 50.0).spread() is None
    plenty = made_up(2, 10.0, 1e6).spread()
    assert isinstance(plenty, Spread) and not plenty.again.any()


# --- without stages


def caps(graph: Graph, plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """Bytes of a plan with all of its blocks recomputed, and with none."""
    every, none = (predict(graph, replace(plan, recompute=p), cluster).memory.peak_bytes for p in (("blocks.*",), ()))
    return float(every), float(none)


@pytest.mark.parametrize("part", [0.3, 0.7])
def test_a_step_makes_again_as_few_blocks_as_fit(part: float) -> None:
    """Between what none and what all would need: faster than with all, and with one block less it would not fit."""
    graph, cluster = deep(), Cluster.preset("4xh100")
    pin = {"stages": 1, "microbatches": 1, "tp": 1, "zero": 0}
    free = find(graph, Request(cluster, pin={**pin, "recompute": 0}, only=("data", "recompute")))
    assert isinstance(free.plan, Plan)
    low, high = caps(graph, free.plan, cluster)
    room = low + part * (high - low)
    found = find(graph, Request(cluster, memory_bytes=room, pin=pin, only=("data", "recompute")))
    assert isinstance(found.plan, Plan)
    made = blocks_of(found.plan, graph)
    assert 0 < len(made) < LAYERS and made == [f"blocks.{k}" for k in range(len(made))]
    assert found.certificate.bound_s <= found.certificate.step_s
    ran = predict(graph, found.plan, cluster)
    assert ran.memory.peak_bytes <= room and ran.seconds == found.certificate.step_s
    every = predict(graph, replace(found.plan, recompute=("blocks.*",)), cluster)
    assert free.certificate.step_s < ran.seconds < every.seconds
    fewer = replace(found.plan, recompute=(members_pattern("blocks.*", [str(k) for k in range(len(made) - 1)]),))
    if len(made) == 1:
        fewer = replace(found.plan, recompute=())
    assert predict(graph, fewer, cluster).memory.peak_bytes > room
    row = found.plan.account["choice"]
    assert row["again"] == [len(made)] and f"{len(made)} of {LAYERS} blocks recomputed" in row["plan"]


def test_an_estimate_that_was_too_low_is_put_right_by_the_simulation() -> None:
    """Told that one block would do, the choice ends with as many as fit."""
    graph, cluster = deep(), Cluster.preset("4xh100")
    cell = Cell(1, 1, 1, 4, 1, True)
    plain = Model(graph, Request(cluster)).placed(
        Score(replace(cell, recompute=False), Style(("data",)), 0, None, 0.0, 0.0)
    )
    model = Model(graph, Request(cluster))
    low, high = caps(graph, model.deepened(plain, graph), cluster)
    model = Model(graph, Request(cluster, memory_bytes=(low + high) / 2, only=("data", "recompute")))
    score = scored(model, cell, Style(("data",)), 0)
    assert 1 < score.again[0] < LAYERS and score.blocks == LAYERS
    model.ways.clear()  # which would know better, and other mixes
    wrong = replace(score, again=(1,), spared=0)
    plan, ran, mix = pipeline_recompute.plain(model, wrong, model.unfolded(wrong))
    assert ran.memory.peak_bytes <= model.request.room_bytes and mix.whole == mix.again > 1 and not mix.away
    fewer = replace(plan, recompute=model.patterns(range(mix.whole - 2), Style(("data",))))
    assert predict(graph, fewer, cluster).memory.peak_bytes > model.request.room_bytes


# --- with stages


def staged(graph: Graph, part: float, virtual: int = 1, pin: dict[str, int] | None = None, **more: Any) -> Any:
    """What is found for two stages if there is room for a part of what none and all blocks recomputed differ by."""
    cluster = Cluster.preset("4xh100")
    pin = {"stages": 2, "microbatches": 8, "virtual": virtual, "tp": 1, "zero": 0, **(pin or {})}
    none = find(graph, Request(cluster, pin={**pin, "recompute": 0}, **more)).finals[0]
    model = Model(graph, Request(cluster))
    cell = Cell(2, 8, virtual, 2, 1, True)
    score = Score(cell, Style(("data",)), 0, None, 0.0, 0.0)
    every = pipeline_recompute.pipelined(model, score, model.whole(8), model.unfolded(score))[1]
    room = max(every.peaks) + part * (none.peak_bytes - max(every.peaks))
    return find(graph, Request(cluster, memory_bytes=room, pin=pin, **more)), none.seconds, every.seconds, room


@pytest.mark.parametrize("virtual", [1, 2])
def test_stages_make_again_as_few_blocks_as_each_needs(virtual: int) -> None:
    """Fits, is faster than with all recomputed, and the first place, which keeps most, makes no fewer than the last."""
    graph = deep()
    found, none_s, every_s, room = staged(graph, 0.4, virtual)
    plan = found.plan
    assert isinstance(plan, Staged)
    ran = predict_staged(micro(graph, 8), plan, Cluster.preset("4xh100"))
    assert max(ran.peaks) <= room and ran.seconds == found.certificate.step_s
    assert none_s < ran.seconds < every_s
    again = found.plan.account["choice"]["again"]
    assert 0 < sum(again) < LAYERS and (virtual > 1 or again[0] >= again[1])
    part, whole = placed_graph(plan, graph)
    made = recomputed_blocks(part, plan)
    assert [sum(len(made[s][0]) for s in range(p, len(made), 2)) for p in range(2)] == again
    assert len(blocks_of(whole, part)) == len({b for mine, _ in made for b in mine})


# --- the same numbers


@pytest.mark.parametrize("pipe", [False, True])
def test_some_blocks_made_again_compute_what_one_device_computes(pipe: bool) -> None:
    """With stages and without: a found plan in which some blocks are recomputed, on real numbers."""
    made = recipe("gpt.py:tiny")
    import gpt

    config = gpt.Config(layers=6, d=32, heads=4, vocab=64, tokens=64, batch=8)
    torch.manual_seed(0)
    model = gpt.GPT(config)
    ids = torch.randint(0, 64, (8, 64))
    batch = {"ids": ids, "target": ids}
    graph, cluster = laminar.capture(model, made.loss, batch), Cluster.preset("2xcpu")
    pin = {"stages": 2, "microbatches": 4, "virtual": 1} if pipe else {"stages": 1, "microbatches": 1, "dp": 2}
    none = find(graph, Request(cluster, pin={**pin, "recompute": 0})).finals[0].peak_bytes
    for share in (0.95, 0.9, 0.85, 0.8, 0.75):
        try:
            plan = laminar.plan(graph, "2xcpu", memory_bytes=none * share, pin={**pin, "recompute": 1}, budget_s=3)
        except PlanError:
            continue
        again = plan.account["choice"].get("again", [])
        if 0 < sum(again) < 6:
            break
    else:
        pytest.fail("no room asks for some blocks and not for all")
    assert isinstance(plan, Staged) == pipe
    assert laminar.verify(model, made.loss, [batch], plan).ok


# --- told to others


def test_some_blocks_made_again_have_flags() -> None:
    """Megatron-LM makes the first so many of each stage again; torchtitan all, and that is said."""
    found, *_ = staged(deep(), 0.4)
    flags = found.plan.flags("megatron", graph=deep())
    about = form(found.plan, deep())
    assert about.leading and sum(about.layers) >= LAYERS and max(about.again) > 0
    assert "--recompute-method block" in flags.flags and f"--recompute-num-layers {max(about.again)}" in flags.flags
    assert len(set(about.again)) == 1 or "blocks again; there all would make as many" in str(flags)
    assert "blocks are recomputed; there all would be" in str(found.plan.flags("torchtitan", graph=deep()))
    assert type(about).from_part(JsonPart(about.to_json(), PlanError)) == about


def test_blocks_made_again_without_their_products_are_told_apart() -> None:
    """torchtitan has a mode for that, Megatron-LM has none."""
    graph = deep()
    plan = laminar.plans.data_parallel(graph, laminar.Mesh({"dp": 4})).with_recompute("blocks.*-products")
    assert not plan.flags("megatron", graph=graph).ok
    titan = plan.flags("torchtitan", graph=graph)
    assert "--activation_checkpoint.mode selective" in titan.flags and "second product" in str(titan)
    away = plan.with_recompute().with_offload("blocks.*")
    assert "host's memory" in str(away.flags("megatron", graph=graph))


def test_why_asks_about_a_plan_with_some_blocks_made_again_at_its_own_depth() -> None:
    """A shallow model has hardly any of the blocks: none and all, in proportion, come near to the deep one."""
    graph, cluster = deep(), Cluster.preset("4xh100")
    plan = laminar.plans.data_parallel(graph, laminar.Mesh({"dp": 4})).with_recompute(r"blocks\.(0|1)")
    why = plan.why("blocks.3.mlp.up.weight", graph=graph, cluster=cluster)
    ran = predict(graph, plan, cluster)
    assert why.chosen.step_s == pytest.approx(ran.seconds, rel=0.02)
    every = predict(graph, plan.with_recompute("blocks.*"), cluster)
    assert abs(why.chosen.step_s - ran.seconds) < 0.3 * abs(every.seconds - ran.seconds)

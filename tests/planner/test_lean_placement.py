"""Placements that weigh what they store, and blocks of which some are recomputed as a whole and the others in part."""

from __future__ import annotations

from functools import cache

import pytest

from laminar.errors import PlanError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.planner.estimate import pipeline_recompute
from laminar.planner.estimate.candidates import Score, described_candidate
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request
from laminar.planner.space.styles import AxisStyle, KeepProducts, Style, stored_bytes
from laminar.planner.tuning import LEAST_BYTE_S
from tests.support.traced_models import traced


@cache
def deep() -> Graph:
    """A GPT that keeps more than it stores."""
    return traced(8, batch=16, d=64, tokens=256)


@cache
def wide() -> Graph:
    """One whose weights are much."""
    return traced(6, batch=16, d=512, tokens=128)


def test_a_lean_placement_stores_less_than_a_free_one_and_more_than_the_leanest() -> None:
    """Or as much: it lies below the line between the two, in seconds and bytes."""
    model, mesh = Model(wide(), Request(Cluster.preset("8xh100"))), Mesh({"tp": 8})
    graph, placer = model.small(4, model.keeps[-1]), model.placer(mesh)

    def made(style: AxisStyle, byte_s: float | None = None) -> tuple[float, int]:
        plan: Plan = placer.plan(graph, Style((style,), "once"), byte_s)
        stored = stored_bytes(graph, plan)
        price = byte_s if byte_s is not None else slope if style == "lean" else 0.0
        return plan.account["cost_s"] - price * stored, stored

    slope = 0.0
    (fast_s, most), (lean_s, least) = made("free"), made("lean", LEAST_BYTE_S)
    assert least < most and fast_s < lean_s
    slope = (lean_s - fast_s) / (most - least)
    seconds, stored = made("lean")
    assert least <= stored <= most
    assert seconds + slope * stored <= (fast_s + slope * most) * (1 + 1e-9)


def test_where_pieces_save_nothing_there_is_no_lean_placement() -> None:
    """On one rank."""
    model = Model(wide(), Request(Cluster.preset("8xh100")))
    mesh = Mesh({"tp": 1})
    with pytest.raises(PlanError, match="save nothing"):
        model.placer(mesh).plan(model.small(4, model.keeps[-1]), Style(("lean",), "once"))


def test_some_blocks_are_made_again_as_a_whole_and_the_others_but_for_products() -> None:
    """With room between the two: each stage names both kinds, it fits, and whole ones are as few as can be."""
    cluster, cell = Cluster.preset("4xh100"), Cell(2, 8, 1, 2, 1, True)
    whole = Model(deep(), Request(cluster))
    held = {}
    data, sparing = Style(("data",)), Style(("data",), keep_products="all")
    for style in (sparing, data):
        score = Score(cell, style, 0, None, 0.0, 0.0)
        held[style] = max(pipeline_recompute.pipelined(whole, score, whole.whole(8), whole.unfolded(score))[1].peaks)
    room = (held[data] + held[sparing]) / 2
    assert held[data] < held[sparing]
    model = Model(deep(), Request(cluster, memory_bytes=room))
    score = Score(cell, Style(("data",), keep_products="some"), 0, None, 0.0, 0.0, again=(1,), blocks=8)
    made, ran, counts = pipeline_recompute.pipelined(model, score, model.whole(8), model.unfolded(score))
    assert max(ran.peaks) <= room and 0 < sum(counts) < 8
    kinds = [{p.endswith("-products") for p in stage.plan.recompute} for stage in made.stages]
    assert {True, False} in kinds and all(kinds)


def test_what_is_made_again_is_told() -> None:
    """As a whole, in part, or both."""
    cell = Cell(2, 8, 1, 2, 1, True)

    def told(again: tuple[int, ...], products: KeepProducts) -> str:
        style = Style(("data",), keep_products=products)
        return described_candidate(Score(cell, style, 0, None, 0.0, 0.0, again=again, blocks=8)).split(", ", 3)[-1]

    assert told((2, 1), "some") == "3 of 8 blocks recomputed in backward, the others but for products"
    assert told((0, 0), "some") == "blocks recomputed but for products in backward"
    assert told((4, 4), "some") == "blocks recomputed in backward"
    assert told((2, 1), "all") == "3 of 8 blocks recomputed but for products in backward"

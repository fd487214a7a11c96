"""Where memory keeps a fast plan out, a mix of ways to store tensors fits, is faster, and computes the same."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import laminar
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.lower.boxing.buckets import BUCKET_BYTES
from laminar.planner.estimate.candidates import Score
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.storage_mix import Mix, kept_out, mixes
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Style
from tests.support import zoo
from tests.support.golden_plans import gpt_of
from tests.support.marks import slow

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import gpt

CLUSTER = Cluster.preset("4x2xh100@nvlink+eth100")
"""Nodes of two, joined by a slow network: pieces within a node are fast, pieces over all ranks are lean."""
CELL, INNER = Cell(1, 1, 1, 4, 2), Style(("data", "inner"))


@cache
def graph() -> Graph:
    """Six layers and two large tables."""
    return laminar.capture(*gpt_of(6, 1024, 16, 256, 64))


def model(memory_bytes: float | None = None, **more: object) -> Model:
    """The model under a cap."""
    return Model(graph(), replace(Request(CLUSTER, memory_bytes=memory_bytes), **more))  # type: ignore[arg-type]


@cache
def base() -> Score:
    """The fastest way to store all tensors alike."""
    return Mix(model(), CELL, INNER).base


def alike(room_bytes: float) -> float:
    """Seconds of the fastest plan within memory that does one thing to all tensors, by node or over all ranks."""
    found = [math.inf]
    made = model()
    for cell, style in ((CELL, INNER), (CELL, Style(("data", "data"))), (Cell(1, 1, 1, 8, 1), Style(("data",)))):
        for zero in (0, 1, 3):
            ran = predict(graph(), made.unfolded(Score(cell, style, zero, None, 0.0, 0.0)), CLUSTER)
            if ran.memory.peak_bytes <= room_bytes:
                found.append(ran.seconds)
    return min(found)


@pytest.mark.parametrize("share", [slow(0.97), 0.9])
def test_a_mix_fits_and_is_no_slower_than_doing_one_thing_to_all_tensors(share: float) -> None:
    """The fastest plan is a little too large; to put everything into smaller pieces may cost more than is needed."""
    room = share * base().peak_bytes
    found = Mix(model(room, only=("data", "tensor", "zero")), CELL, INNER).best(math.inf)
    assert found is not None and not found.plan.recompute
    ran = predict(graph(), found.plan, CLUSTER)
    assert (ran.seconds, ran.memory.peak_bytes) == (found.seconds, found.peak_bytes)
    assert found.peak_bytes <= room
    assert found.seconds <= alike(room)
    assert found.score.style.mixed_storage


def test_tensors_of_one_role_may_lie_differently() -> None:
    """Only as many layers are made leaner as memory asks for: with parameters in smaller pieces, each saves some."""
    mix = Mix(model(0.97 * base().peak_bytes), CELL, INNER)
    ways = [w for w in mix.ways() if len(mix.groups[w.group].units) == 6]
    way = min(ways, key=lambda w: w.nbytes)
    units = mix.groups[way.group].units
    plans = [mix.plan({n: way.storage for u in units[6 - k :] for n in u}) for k in (0, 3, 6)]
    assert [len({p.inputs[u[0]] for u in units}) for p in plans] == [1, 2, 1]
    none, some, every = (predict(graph(), p, CLUSTER).memory.peak_bytes for p in plans)
    assert none > some > every


def test_what_a_group_is_expected_to_save_is_what_it_saves() -> None:
    """The choice rests on it, but for gradients that then travel in other buckets.

    Those hold up to twice their limit, and as much again before they are reduced between the ranks of a node.
    """
    mix = Mix(model(0.93 * base().peak_bytes), CELL, INNER)
    before = predict(graph(), mix.plan({}), CLUSTER).memory.peak_bytes
    ways = mix.ways()
    assert len(ways) > 5
    for way in ways:
        units = mix.groups[way.group].units
        held = predict(graph(), mix.plan({n: way.storage for u in units for n in u}), CLUSTER).memory.peak_bytes
        assert held - before == pytest.approx(len(units) * way.nbytes, abs=4 * BUCKET_BYTES)


def test_nothing_is_handed_out_that_is_not_faster() -> None:
    """A search calls this last: whatever it has must not be lost to something slower."""
    made = model(0.95 * base().peak_bytes)
    assert list(mixes(made, [CELL], [], 0.5 * base().seconds, lambda: 1.0)) == []
    assert list(mixes(made, [CELL], [], math.inf, lambda: 0.0)) == []
    found = list(mixes(made, [CELL], [], math.inf, lambda: 1.0))
    assert found and all(a.seconds > b.seconds for a, b in pairwise(found))


def test_mixes_are_made_only_where_memory_binds_and_zero_is_free() -> None:
    """Who pins a stage of ZeRO gets that; where the fastest plan fits there is nothing to do."""
    room = 0.95 * base().peak_bytes
    assert (CELL, INNER) in list(kept_out(model(room), [CELL], [base()], math.inf))
    assert list(kept_out(model(room, pin={"zero": 3}), [CELL], [base()], math.inf)) == []
    assert list(kept_out(model(room, only=("data", "tensor")), [CELL], [base()], math.inf)) == []
    assert (CELL, INNER) not in list(kept_out(model(2 * base().peak_bytes), [CELL], [base()], math.inf))
    assert (CELL, INNER) not in list(kept_out(model(room), [CELL], [base()], 0.5 * base().seconds))


def test_a_mix_computes_what_one_device_computes() -> None:
    """Every way of storing, side by side in one plan, with a block recomputed: the same losses and gradients."""
    config = gpt.Config(layers=6, d=32, heads=4, vocab=64, tokens=16, batch=8)
    one = zoo.captured(gpt.recipe(config, lr=1e-3, steps=1), "six layers")
    mix = Mix(Model(one.graph, Request(Cluster.preset("2x2xh100"))), Cell(1, 1, 1, 2, 2), INNER)
    assert len(mix.deep) >= 4
    units = [unit for group in mix.groups for unit in group.units]
    stored = {name: k % len(mix.deep) for k, unit in enumerate(units) for name in unit}
    assert set(stored.values()) == set(range(len(mix.deep)))
    with zoo.one_thread():
        zoo.verified(one, mix.plan(stored))
        zoo.verified(one, mix.plan(stored, again=2))

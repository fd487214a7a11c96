"""The share of a device's memory that a plan leaves free: what it means, and that every search keeps to it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import laminar
from laminar.errors import PlanError
from laminar.ir.clusters.cluster import Cluster, Figure
from laminar.ir.clusters.mixed import without
from laminar.ir.graph import Graph
from laminar.planner.search.mixed_cluster import MixedSearch
from laminar.planner.search.replan import replanned
from laminar.planner.space.request import MEMORY_MARGIN, Request, asking
from tests.support.mixed_clusters import cores
from tests.support.traced_models import traced

PINS: dict[str, int | str] = {"stages": 1, "microbatches": 1}
ONLY = "data,zero,recompute"


@cache
def model() -> Graph:
    """A GPT whose weights and activations both count."""
    return traced(2, batch=32, d=256, tokens=256)


@cache
def roomy() -> laminar.Plan:
    """Its plan where memory is no limit."""
    return laminar.plan(model(), "2xh100", budget_s=3, pin=PINS, only=ONLY)


def small(memory_bytes: float, name: str = "2xh100") -> Cluster:
    """A cluster whose devices have so much memory."""
    cluster = Cluster.preset(name)
    return replace(cluster, device=replace(cluster.device, memory_bytes=Figure(memory_bytes)))


@pytest.mark.parametrize("margin", [-0.1, 1.0, 8, float("nan")])
def test_a_margin_is_a_share(margin: float) -> None:
    """Eight percent is 0.08, not 8; a device that stays free as a whole holds no plan."""
    with pytest.raises(PlanError, match="a margin of"):
        Request(Cluster.preset("2xh100"), margin=margin)


def test_memory_is_said_once() -> None:
    """Bytes that a rank may fill and a share that stays free are two answers to one question."""
    with pytest.raises(PlanError, match="both say what a rank may fill") as error:
        laminar.plan(model(), "2xh100", memory_bytes=1e9, margin=0.1)
    assert "leave out one" in str(error.value)


@pytest.mark.parametrize("margin", [None, 0.0, 0.3, 0.9])
def test_what_may_be_filled_is_memory_less_the_margin(margin: float | None) -> None:
    """On every part of a mixed cluster by its own devices' memory; the certificate's space says so."""
    share = 1 - (MEMORY_MARGIN if margin is None else margin)
    assert Request(small(1e9), margin=margin).room_bytes == pytest.approx(share * 1e9)
    mixed = cores(0.5, memory_bytes=5e8)
    memory = [part.device.memory_bytes.value for part in mixed.parts]
    assert MixedSearch(model(), Request(mixed, margin=margin)).rooms == pytest.approx([share * m for m in memory])


def test_a_margin_asks_for_the_same_as_the_bytes_it_leaves() -> None:
    """The same plan, proved about the same space; and less room gives a leaner plan."""
    memory = 1.2 * (roomy().peak_bytes or 0)
    asked = {"budget_s": 30.0, "pin": PINS, "only": ONLY}
    by_share = laminar.plan(model(), small(memory), margin=0.3, **asked)  # type: ignore[arg-type]
    by_bytes = laminar.plan(model(), small(memory), memory_bytes=0.7 * memory, **asked)  # type: ignore[arg-type]
    wide = laminar.plan(model(), small(memory), margin=0.0, **asked)  # type: ignore[arg-type]
    assert by_share.hash == by_bytes.hash
    assert by_share.account["certificate"]["space"] == by_bytes.account["certificate"]["space"]
    assert (by_share.peak_bytes or 0) <= 0.7 * memory < (wide.peak_bytes or 0) <= memory
    assert wide.account["certificate"]["space"] != by_share.account["certificate"]["space"]
    assert by_share.account["request"]["margin"] == 0.3 and by_bytes.account["request"]["margin"] is None


def test_a_question_keeps_the_margin_unless_memory_is_what_it_is_about() -> None:
    """Of bytes and a share, the one that is named takes the place of the other."""
    memory = 1.2 * (roomy().peak_bytes or 0)
    plan = laminar.plan(model(), small(memory), margin=0.0, budget_s=1, pin=PINS, only=ONLY)
    kept = plan.what_if(only="data,zero").after
    assert kept.account["request"]["margin"] == 0.0
    less = plan.what_if(margin=0.3)
    assert "0.3 of the memory stays free" in str(less)
    assert less.after.peak_bytes <= 0.7 * memory and less.after.account["binding"]["memory_bytes"] < 0.71 * memory
    by_bytes = less.after.what_if(memory_bytes=memory).after
    assert by_bytes.account["request"]["margin"] is None and by_bytes.hash == plan.hash


def test_devices_that_are_left_keep_the_margin() -> None:
    """A plan for what is left fills no more than it was allowed to."""
    former = laminar.plan(model(), "4xh100", budget_s=1)
    memory = 2.0 * (roomy().peak_bytes or 0)
    left = without(small(memory, "4xh100"), [3])
    wide = replanned(model(), former, asking(left, margin=0.0))
    room = 0.9 * (wide.peak_bytes or 0)
    lean = replanned(model(), former, asking(left, margin=1 - room / memory))
    assert (lean.peak_bytes or 0) <= room and lean.account["request"]["margin"] == 1 - room / memory
    with pytest.raises(PlanError, match="nothing like the former plan fits"):
        replanned(model(), former, asking(left, margin=0.999))


def test_what_does_not_fit_for_a_margin_says_the_bytes_that_do() -> None:
    """The way out can be taken: those bytes instead of the margin."""
    memory = 0.9 * (roomy().peak_bytes or 0)
    pins: dict[str, int | str] = {**PINS, "zero": 0, "recompute": 0}
    with pytest.raises(PlanError, match="no plan fits") as error:
        laminar.plan(model(), small(memory), margin=0.2, budget_s=0.5, pin=pins, only=ONLY)
    needed = float(str(error.value).partition("allow memory_bytes=")[2].split()[0])
    assert laminar.plan(model(), small(memory), memory_bytes=needed, budget_s=0.5, pin=pins, only=ONLY)

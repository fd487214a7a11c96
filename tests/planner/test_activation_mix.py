"""What becomes of blocks where memory is short: against every choice there is, block by block, on the simulator.

A GPT of four blocks has 256 choices (keep, recompute, recompute but for products, offload); each is simulated once,
and under any cap the fastest that fits is known. The search looks at few of them. It is within `DISTANCE` of the
fastest wherever it finds a plan, and it may find none where only single choices fit: caps here leave a tenth of what
choices differ by. In float32 a block computes for as long as it travels, so that offload pays; in bfloat16 it doesn't.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

import laminar
from laminar import Cluster, Mesh
from laminar.errors import PlanError
from laminar.forecast.step import predict
from laminar.ir.graph import Graph
from laminar.ir.plans.patterns import pick
from laminar.ir.plans.plan import Plan
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.estimate.block_mix import BlockMix, BlockWays
from laminar.planner.estimate.candidates import Found
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.search.best_first.search import find
from laminar.planner.space.cell import Cell, cells
from laminar.planner.space.request import asking
from tests.support.zoo import recipe

BLOCKS = 4
DISTANCE = 1.01
"""How much slower than the fastest choice that fits the search's may be. 0.5 % was seen."""
PARTS = (0.95, 0.7, 0.5, 0.3, 0.15)
"""Caps, as parts of the way from what the leanest choice holds to what is held if all is kept."""
Table = dict[str, tuple[float, int]]


@cache
def gpt(dtype: torch.dtype = torch.float32, d: int = 1024, vocab: int = 512) -> Graph:
    """Four blocks with enough work for a GPU, on the meta device."""
    made = recipe("gpt.py:tiny")
    import gpt

    with torch.device("meta"):
        model = gpt.GPT(gpt.Config(layers=BLOCKS, d=d, heads=d // 64, vocab=vocab, tokens=1024, batch=8)).to(dtype)
        ids = torch.zeros((8, 1024), dtype=torch.int64)
    return laminar.capture(model, made.loss, {"ids": ids, "target": ids})


def cluster(devices: int) -> Cluster:
    """So many H100."""
    return Cluster.preset("h100" if devices == 1 else f"{devices}xh100")


def eased(graph: Graph, plan: Plan, choice: str) -> Plan:
    """A plan with each block kept (k), recomputed whole (w) or but for products (p), or offloaded (o)."""
    named = {c: "|".join(str(k) for k, mine in enumerate(choice) if mine == c) for c in "wpo"}
    again = [rf"blocks\.({named['w']})"] * bool(named["w"]) + [rf"blocks\.({named['p']})-products"] * bool(named["p"])
    return replace(plan, recompute=tuple(again), offload=(rf"blocks\.({named['o']})",) if named["o"] else ())


@cache
def table(graph: Graph, devices: int, letters: str) -> Table:
    """Seconds and bytes of data parallel with every choice."""
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": devices}))
    out = {}
    for choice in map("".join, itertools.product(letters, repeat=BLOCKS)):
        ran = predict(graph, eased(graph, plan, choice), cluster(devices))
        out[choice] = ran.seconds, ran.memory.peak_bytes
    return out


def cap(known: Table, part: float) -> float:
    """A limit of memory."""
    least, most = min(nbytes for _, nbytes in known.values()), known["k" * BLOCKS][1]
    return least + part * (most - least)


def searched(graph: Graph, devices: int, room: float, only: str = "data,recompute,offload", **pin: int) -> Found:
    """The plan for so much memory."""
    return find(graph, asking(cluster(devices), memory_bytes=room, only=only, budget_s=60, pin=pin))


def compared(graph: Graph, devices: int, letters: str, parts: tuple[float, ...]) -> None:
    """The search against all choices, under several caps."""
    known = table(graph, devices, letters)
    for part in parts:
        room = cap(known, part)
        fastest = min(seconds for seconds, nbytes in known.values() if nbytes <= room)
        found = searched(graph, devices, room)
        assert isinstance(found.plan, Plan)
        ran = predict(graph, found.plan, cluster(devices))
        assert ran.seconds == found.certificate.step_s and ran.memory.peak_bytes <= room
        assert ran.seconds <= DISTANCE * fastest, (part, found.plan.account["choice"]["plan"])
        assert found.certificate.bound_s <= fastest
        again = [s for c, (s, nbytes) in known.items() if nbytes <= room and "o" not in c]
        assert ran.seconds <= min(again, default=math.inf) * DISTANCE
        assert ran.seconds <= searched(graph, devices, room, "data,recompute").certificate.step_s


@pytest.mark.parametrize(
    ("devices", "letters", "parts"),
    [(1, "ko", (0.5,)), pytest.param(2, "kwo", (0.3,), marks=pytest.mark.slow)],
)
def test_the_choice_is_next_to_the_fastest_of_all_that_fit(
    devices: int, letters: str, parts: tuple[float, ...]
) -> None:
    """Kept, recomputed or offloaded, block by block; and never slower than without offload."""
    compared(gpt(), devices, letters, parts)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "d", "vocab"),
    [(torch.float32, 1024, 512), (torch.bfloat16, 1024, 512), (torch.bfloat16, 2048, 32768)],
)
def test_the_choice_is_next_to_the_fastest_of_all_ways(dtype: torch.dtype, d: int, vocab: int, devices: int) -> None:
    """With products spared, too; where copies are slower than the work of a block, and with a large head."""
    compared(gpt(dtype, d, vocab), devices, "kpwo", PARTS)


@pytest.mark.slow
def test_offload_wins_where_a_block_computes_as_long_as_it_travels() -> None:
    """By more than what any choice without it could do; and the plan says so in words, data and files."""
    known = table(gpt(), 2, "kwo")
    room = cap(known, 0.5)
    found = searched(gpt(), 2, room)
    without = min(seconds for c, (seconds, nbytes) in known.items() if nbytes <= room and "o" not in c)
    assert found.certificate.step_s < 0.95 * without
    plan, row = found.plan, found.plan.account["choice"]
    assert isinstance(plan, Plan)
    away = pick(gpt(), plan.offload).blocks
    assert row["offloaded"] == len(away) > 0 and f"{len(away)} of 4 blocks offloaded" in row["plan"]
    assert "host's memory" in found.space.data["offload"] and "recompute" in found.space.data
    assert Plan.from_json(plan.to_json()).offload == plan.offload
    assert "kept in the host's memory" in plan.explain()


def test_the_bound_and_the_least_bytes_hold_for_every_choice() -> None:
    """Offload makes no plan faster than its cell's bound, nor smaller than what a cell is said to hold at least."""
    known = table(gpt(), 2, "kwo")
    model = Model(gpt(), asking(cluster(2)))
    cell = Cell(1, 1, 1, 2, 1, True)
    bounds = Bounds(model)
    assert bounds.of(cell).seconds <= min(seconds for seconds, _ in known.values())
    assert bounds.least_bytes(cell) <= min(nbytes for _, nbytes in known.values())
    strict = Bounds(Model(gpt(), asking(cluster(2), only="data,recompute")))
    assert bounds.least_bytes(cell) < strict.least_bytes(cell) <= strict.least_bytes(replace(cell, recompute=False))


# --- what may be used


def test_offload_is_a_dimension_and_can_be_pinned() -> None:
    """Without it nothing leaves; alone it does what it can; pinned, nothing has stages; on a CPU there is none."""
    known = table(gpt(), 2, "kwo")
    room = cap(known, 0.5)
    found = searched(gpt(), 2, room, offload=0)
    assert isinstance(found.plan, Plan) and not found.plan.offload and found.plan.recompute
    assert "offload" not in found.space.data
    found = searched(gpt(), 2, room, "data,offload")
    assert isinstance(found.plan, Plan) and found.plan.offload and not found.plan.recompute
    assert "recompute" not in found.space.data
    every = cells(asking(cluster(2)), 8, BLOCKS, True, True)
    pinned = cells(asking(cluster(2), pin={"offload": 1}), 8, BLOCKS, True, True)
    assert pinned == [c for c in every if c.plain and c.recompute]
    alone = cells(asking(cluster(2), only="data,pipeline,offload"), 8, BLOCKS, True, True)
    assert all(c.plain for c in alone if c.recompute) and any(c.recompute for c in alone)
    assert not asking(Cluster.preset("2xcpu")).offloads and asking(cluster(2)).offloads
    with pytest.raises(PlanError, match="no cell is left"):
        cells(asking(Cluster.preset("2xcpu"), pin={"offload": 1}), 8, BLOCKS, True, True)
    with pytest.raises(PlanError, match="offload pinned to -1"):
        asking(cluster(2), pin={"offload": -1})


def test_where_all_fits_nothing_leaves() -> None:
    """Whatever may be used."""
    found = searched(gpt(), 2, 80e9)
    assert isinstance(found.plan, Plan) and not found.plan.offload and not found.plan.recompute


# --- the estimate


def random_ways(rng: random.Random) -> BlockWays:
    """Made-up figures."""
    return BlockWays(
        blocks=rng.randint(2, 9),
        kept_s=10.0,
        kept_bytes=100.0,
        whole=(rng.uniform(0.1, 1), rng.uniform(1, 9)) if rng.random() < 0.8 else None,
        spared=(rng.uniform(0.01, 0.5), rng.uniform(0.5, 4)) if rng.random() < 0.8 else None,
        sent_bytes=(sent := rng.choice([0.0, rng.uniform(2, 9)])),
        last_bytes=0.9 * sent,
        every_bytes=rng.choice([0.0, sent]),
        behind=rng.randint(0, 1),
        copy_s=rng.uniform(0.1, 4),
        forward_s=rng.uniform(0.2, 1),
        each_s=0.01,
        launch_s=rng.choice([0.0, 0.5]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_front_has_the_fastest_mix_for_every_room(seed: int) -> None:
    """All mixes one by one, each added up by itself; blocks of one are in no other, and in order."""
    rng = random.Random(seed)
    ways = random_ways(rng)
    every = {}
    for mix in itertools.starmap(BlockMix, itertools.product(range(ways.blocks + 1), repeat=3)):
        allowed = (
            (ways.whole or not mix.whole) and (ways.spared or not mix.spared) and (ways.sent_bytes or not mix.away)
        )
        if not allowed or mix.again + mix.away > ways.blocks:
            continue
        seconds, held = 10.0, 100.0
        for count, way in ((mix.whole, ways.whole), (mix.spared, ways.spared)):
            seconds, held = (seconds + count * way[0], held - count * way[1]) if way else (seconds, held)
        if mix.away:
            gaps = (
                [mix.away * [1]] if mix.away == ways.blocks else [[a] * (mix.away - 1) for a in range(1, ways.blocks)]
            )
            waits = []
            for gap in gaps:
                left = ways.blocks - 1 - ways.behind - sum(gap)
                times = gap[2:] if mix.away == ways.blocks else [*gap, left]
                if (mix.away == ways.blocks and ways.every_bytes) or (mix.away < ways.blocks and left > 0):
                    waits.append(sum(max(0.0, ways.copy_s - t * n * ways.forward_s) for t in (1, 2) for n in times))
            seconds += min(waits, default=math.inf) + ways.launch_s + mix.away * ways.each_s
            all_away = mix.away == ways.blocks
            held -= ways.every_bytes if all_away else (mix.away - 1) * ways.sent_bytes + ways.last_bytes
        every[mix] = seconds, held
    for _ in range(20):
        room = rng.uniform(20, 105)
        fits = [s for s, held in every.values() if held <= room and math.isfinite(s)]
        found = ways.within(room)
        assert (found is None) == (not fits)
        if found is not None:
            mix, seconds, held = found
            assert seconds == pytest.approx(min(fits)) and held <= room and every[mix] == pytest.approx((seconds, held))
            whole, spared, away = ways.placed(mix)
            assert (len(whole), len(spared), len(away)) == (mix.whole, mix.spared, mix.away)
            assert sorted({*whole, *spared, *away}) == sorted([*whole, *spared, *away])
            assert all(0 <= k < ways.blocks for k in (*whole, *spared, *away))

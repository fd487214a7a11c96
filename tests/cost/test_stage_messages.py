"""Hops between stages: every byte goes through the links of its two ranks, and who shares a card waits."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from laminar.cost.comm.stage_messages import Hop, even_hop_s, hop, lanes, messages
from laminar.cost.sim.pipeline import execute
from laminar.forecast.pipeline_step import CONTROL_S, MEETING_S, predict_staged
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.mesh import Mesh, Place
from laminar.ir.net import Actor, Net, Queue
from laminar.ir.sbp import B, S
from laminar.ir.tensor import TensorSpec
from laminar.rules.boxing.crossing import crossing
from laminar.staging.stage_plans import pipeline
from tests.support.zoo import specimen

X = TensorSpec((16, 64), "f32")


def place(first: int, **axes: int) -> Place:
    """Neighbours, from a rank on."""
    mesh = Mesh(axes)
    return Place(tuple(range(first, first + mesh.ranks)), mesh)


@pytest.mark.parametrize("sharers", [1, 2, 4, 8])
def test_ranks_that_share_a_card_take_turns(sharers: int) -> None:
    """Eight ranks send to the next node: each through its own card, or all through the cards they share."""
    cluster = Cluster.preset(f"2x8xh100@nvlink+eth100/{sharers}")
    level = cluster.levels[1]
    sent = messages(place(0, dp=8), place(8, dp=8), [(X, (S(0),), (S(0),))])
    assert sent == [(r, r + 8, X.nbytes // 8) for r in range(8)]
    found = hop(cluster, sent)
    assert found.seconds == pytest.approx(level.latency_s.value + sharers * X.nbytes / 8 / level.bytes_per_s.value)
    assert found.seconds == pytest.approx(even_hop_s(level, 8, X.nbytes / 8))
    assert len(found.links) == 2 * 8 // sharers
    one = messages(place(0, dp=1), place(8, dp=1), [(X, (B,), (B,))])
    assert hop(cluster, one).seconds == pytest.approx(level.latency_s.value + X.nbytes / level.bytes_per_s.value)


def test_random_hops_are_as_long_as_their_fullest_card() -> None:
    """Any places of any meshes, in or across nodes, against bytes counted card by card."""
    rng = random.Random(0)
    for _ in range(200):
        each, sharers = rng.choice([(4, 1), (4, 2), (4, 4), (8, 4)])
        cluster = Cluster.preset(f"4x{each}xa100@nvlink+ib200/{sharers}")
        meshes = [rng.choice([{"a": 1}, {"a": 2}, {"a": 4}, {"a": 2, "b": 2}, {"a": 3}]) for _ in range(2)]
        src = place(rng.randrange(4), **meshes[0])
        dst = place(src.ranks[-1] + 1 + rng.randrange(4), **meshes[1])
        ends = [tuple(rng.choice([S(0), S(1), B]) for _ in p.mesh.sizes) for p in (src, dst)]
        sent = messages(src, dst, [(X, *ends)])
        way = crossing(X, src, ends[0], dst, ends[1])
        assert sent == [(t.src, t.dst, 4 * t.size) for t in way.transfers]
        took = []
        for k, level in enumerate(cluster.levels):
            over = [m for m in sent if (m[0] // each != m[1] // each) == (k == 1)]
            cards = Counter[tuple[str, int]]()
            for a, b, nbytes in over:
                cards["out", a // level.shared] += nbytes
                cards["in", b // level.shared] += nbytes
            took.append((level.latency_s.value * bool(over), max(cards.values(), default=0) / level.bytes_per_s.value))
        assert hop(cluster, sent).seconds == pytest.approx(max(a for a, _ in took) + max(b for _, b in took))


def test_parts_of_a_mixed_cluster_have_cards_of_their_own() -> None:
    """Between parts the level that joins them counts, and cards are numbered in each part."""
    cluster = Cluster.preset("4xh100+4xa100@@eth100/4")
    found = hop(cluster, [(r, 4 + r, 1000) for r in range(4)])
    assert found.links == {("parts", 0, 0, True), ("parts", 1, 0, False)}
    assert {part for _, part, _, _ in hop(cluster, [(5, 6, 1000)]).links} == {1}


def test_links_that_the_same_hops_use_are_one_lane() -> None:
    """Hundreds of links come to a few lanes, and two hops share one exactly if they share a link."""
    rng = random.Random(1)
    for _ in range(100):
        links = [("cluster", 0, k, True) for k in range(12)]
        hops = {name: Hop(1.0, frozenset(rng.sample(links, rng.randint(0, 5)))) for name in "abcd"}
        found = lanes(hops)
        for a in hops:
            for b in hops:
                if a != b:
                    assert bool({*found[a]} & {*found[b]}) == bool(hops[a].links & hops[b].links)


def fan(lanes_: dict[str, tuple[int, ...]]) -> list[tuple[int, int]]:
    """Two places that each send to one of their own at the same time: when the messages are under way."""
    queues = tuple(Queue(f"{a}->{b}", a, (b,), 1) for a, b in (("a", "c"), ("b", "d")))
    actors = tuple(Actor(name, "forward", k) for k, name in enumerate("abcd"))
    net = Net(tuple(place(k, x=1) for k in range(4)), actors, queues, tuple(((name, 0),) for name in "abcd"))
    ran = execute(net, dict.fromkeys("abcd", 10), 1, transfers={"a->c": 30, "b->d": 5}, lanes=lanes_)
    return [(r.start, r.end) for r in ran.ran if r.source >= 0]


def test_hops_of_different_places_queue_where_they_share_a_link() -> None:
    """First come, first served; without a common lane they pass side by side."""
    assert fan({}) == fan({"a->c": (0,), "b->d": (1,)}) == [(10, 40), (10, 15)]
    assert fan({"a->c": (0,), "b->d": (0, 1)}) == [(10, 40), (40, 45)]


def test_a_pipeline_over_nodes_pays_for_the_card_they_share() -> None:
    """One micro-batch down and up again: two hops, each of which has the whole stage's bytes to pass."""
    graph = specimen("gpt.py:tiny").graph
    seconds = {}
    for sharers in (1, 4):
        cluster = Cluster.preset(f"2x4xh100@nvlink+eth100/{sharers}")
        slow = replace(cluster.levels[1], bytes_per_s=replace(cluster.levels[1].bytes_per_s, value=1e6))
        cluster = replace(cluster, levels=(cluster.levels[0], slow))
        found = predict_staged(graph, pipeline(graph, 2, 1, inner=Mesh({"dp": 4})), cluster)
        sizes = {q.name: q.bytes for q in found.pipe.net.queues}
        moved = [sizes[name] for name in ("F0->F1", "B1->B0")]
        wait_s = CONTROL_S["gpu"] + slow.latency_s.value
        work_s = sum(found.part_s[name] for name in ("F0", "F1", "B1", "B0")) + max(
            sum(found.part_s.get(f"{part}{s}", 0.0) for part in "RO") for s in (0, 1)
        )
        seconds[sharers] = found.seconds
        least = sum(wait_s + sharers * n / 1e6 for n in moved) + MEETING_S["gpu"]
        assert least < found.seconds <= least + work_s + 1e-6
    assert seconds[4] > 3 * seconds[1]

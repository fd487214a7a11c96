"""What a collective costs, held against arithmetic done by hand, and against what others have measured.

The formulas are few and each has a case solved on paper here; properties (more bytes never cost less, a ring moves
2(n-1)/n, sharing a card k ways costs k times the bytes) are drawn at random. Published NCCL figures are the
test of the presets' links: nothing was fitted to the multi-node rows but the share of a card that is reached.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar import Cluster, ClusterError, Mesh
from laminar.cost.comm.algorithms import CHAIN_SHARE, by_switch, direct, ring, through_memory, tree
from laminar.cost.comm.price import COLLECTIVE_KINDS, CollectiveCost, collective_bytes, split_attention, ways
from laminar.cost.comm.topology import mesh_team, team, teams
from laminar.ir.clusters.cluster import Device, Figure, Level
from laminar.ir.program import Boxing, Instr, Placed
from laminar.ir.sbp import PSUM, B, S
from laminar.ir.tensor import TensorSpec

MB = 1 << 20


def cluster(*levels: tuple[int, float, float, int], backend: str = "nccl", **more: Any) -> Cluster:
    """Levels given as (size, latency, rate, shared)."""
    figures = [
        Level(f"l{k}", n, Figure(wait, "measured"), Figure(rate, "measured"), shared)
        for k, (n, wait, rate, shared) in enumerate(levels)
    ]
    f = Figure(1.0)
    return Cluster("toy", Device("toy", "gpu", {"f32": f}, f, f, f, f), tuple(figures), backend, **more)


FOUR_BY_TWO = cluster((4, 1.0, 8.0, 1), (2, 10.0, 1.0, 4))
"""Two nodes of four, one card a node; seconds and bytes small enough to count on fingers."""
FLAT = cluster((8, 1.0, 8.0, 1))


# --- by hand -----------------------------------------------------------------------------------


def test_a_ring_by_hand() -> None:
    """Eight ranks in a row pass 64 bytes twice around: 14 hops, 112 bytes over each link."""
    t = team(FLAT, tuple(range(8)))
    assert (ring("all_reduce", 64, t).latency_s, ring("all_reduce", 64, t).bytes_s) == (14, 112 / 8)
    assert (ring("all_gather", 64, t).latency_s, ring("all_gather", 64, t).bytes_s) == (7, 56 / 8)
    assert (ring("broadcast", 64, t).latency_s, ring("broadcast", 64, t).bytes_s) == (7, 64 / 8)


def test_a_ring_over_two_nodes_by_hand() -> None:
    """The chain has six short hops and one long; the card between the nodes carries what every link carries."""
    t = team(FOUR_BY_TWO, tuple(range(8)))
    made = ring("all_reduce", 64, t)
    assert made.latency_s == 2 * (6 * 1 + 1 * 10)
    assert made.bytes_s == 112 / 1


def test_a_tree_by_hand() -> None:
    """A chain of four inside, one step across, up and down: 2(3 + 10); of two nodes each receives the tensor once."""
    made = tree("all_reduce", 64, team(FOUR_BY_TWO, tuple(range(8))))
    assert (made.latency_s, made.bytes_s) == (2 * (3 * 1 + 1 * 10), max(128 / 8 / CHAIN_SHARE, 64 / 1))
    wide = team(cluster((1, 1.0, 8.0, 1), (9, 10.0, 1.0, 1)), tuple(range(9)))
    assert (tree("all_reduce", 64, wide).latency_s, tree("all_reduce", 64, wide).bytes_s) == (2 * 4 * 10, 128)
    assert tree("broadcast", 64, wide).bytes_s == 64


def test_switches_and_trees_by_hand() -> None:
    """Four wait for each other twice at a switch of rate 2; two nodes swap what it has summed, all at once."""
    t = team(FOUR_BY_TWO, tuple(range(8)))
    made = by_switch(64, t, 2.0)
    assert (made.latency_s, made.bytes_s) == (2 * 4 * 1 + 2 * 10, max(64 / 2, 64 / 1))
    assert by_switch(64, t, 0.5).bytes_s == 64 / 0.5
    alone = by_switch(64, team(FLAT, tuple(range(8))), 2.0)
    assert (alone.algorithm, alone.latency_s, alone.bytes_s) == ("switch", 2 * 8 * 1, 64 / 2)


def test_direct_sends_by_hand() -> None:
    """Each of eight ranks sends eight bytes to each other: three near, four far, and four ranks share the card."""
    made = direct("all_to_all", 64, team(FOUR_BY_TWO, tuple(range(8))))
    assert made.latency_s == 1 + 10
    assert made.bytes_s == max(3 * 8 / 8, 4 * 4 * 8 / 1)


def test_shared_memory_by_hand() -> None:
    """Bytes read and written, at twice the rate of a copy: what `laminar/runtime/comm/shm_collectives.py` does, line
    by line."""
    two = team(cluster((2, 1.0, 8.0, 1), backend="shared"), (0, 1))
    reduce = through_memory("all_reduce", 64, two)
    assert (reduce.latency_s, reduce.start_s, reduce.finish_s) == (1, 128 / 16, (64 + 64 + 64) / 16)
    bucket = through_memory("all_reduce", 64, two, resident=True)
    assert (bucket.latency_s, bucket.start_s, bucket.finish_s) == (2, 0, (64 + 32 + 128) / 16)
    gather = through_memory("all_gather", 64, two)
    assert (gather.start_s, gather.finish_s) == (2 * 64 / 16, 64 / 16)
    scatter = through_memory("reduce_scatter", 64, two)
    assert (scatter.start_s, scatter.finish_s) == (128 / 16, 96 / 16)
    four = team(cluster((4, 1.0, 8.0, 1), backend="shared"), (0, 1, 2, 3))
    large = through_memory("all_reduce", 1 << 20, four)
    assert large.latency_s == 2  # in halves
    assert large.finish_s * 16 == (1 << 20) * (1 + 1 / 4 + 2)


# --- properties --------------------------------------------------------------------------------

GROUPS = st.sets(st.integers(0, 63), min_size=1, max_size=64).map(lambda s: tuple(sorted(s)))
CLUSTERS = ["64xh100", "64xa100@eth100", "8x8xh100@pcie+ib200/4", "64xcpu", "8x8xcpu"]


@given(
    st.sampled_from(CLUSTERS),
    st.sampled_from(COLLECTIVE_KINDS),
    GROUPS,
    st.integers(0, 1 << 32),
    st.integers(1, 1 << 28),
)
def test_more_bytes_never_cost_less(name: str, kind: str, group: tuple[int, ...], nbytes: int, more: int) -> None:
    """Whatever algorithm is chosen for either."""
    cost = CollectiveCost(Cluster.preset(name))
    assert cost(kind, nbytes, group).seconds <= cost(kind, nbytes + more, group).seconds * (1 + 1e-12)


@given(st.sampled_from(CLUSTERS), st.sampled_from(COLLECTIVE_KINDS), st.integers(0, 63), st.integers(0, 1 << 40))
def test_a_group_of_one_costs_nothing(name: str, kind: str, rank: int, nbytes: int) -> None:
    """Nor do no bytes."""
    cost = CollectiveCost(Cluster.preset(name))
    assert cost(kind, nbytes, (rank,)).seconds == 0
    assert cost(kind, 0, (0, 1)).seconds == 0


@given(st.integers(2, 1000), st.floats(1, 1e12))
def test_a_ring_moves_twice_the_tensor(ranks: int, nbytes: float) -> None:
    """Without latency a ring moves 2(n-1)/n of the tensor over each link."""
    t = team(cluster((1000, 0.0, 3.0, 1)), tuple(range(ranks)))
    assert ring("all_reduce", nbytes, t).seconds == pytest.approx(2 * (ranks - 1) / ranks * nbytes / 3)
    both = ring("reduce_scatter", nbytes, t).seconds + ring("all_gather", nbytes, t).seconds
    assert both == pytest.approx(ring("all_reduce", nbytes, t).seconds)


def busiest(units: int) -> float:
    """Tensors that the busiest unit receives in an all-reduce by two trees, message by message.

    In the first tree units with odd numbers are leaves; the second is its mirror image, or shifted by one if their
    number is odd. Each has half of the tensor, up and down.
    """
    got = [0.0] * units
    for second in (False, True):
        for i in range(1, units):
            low = i & -i
            up = (i - low) | 2 * low
            for k in (up if up < units else i - low, i):
                got[(units - 1 - k if units % 2 == 0 else (k + 1) % units) if second else k] += 0.5
    return max(got)


def test_trees_load_no_unit_more_than_is_priced() -> None:
    """Twice the tensor is received where a tree branches; of two units each receives it once."""
    for units in range(2, 65):
        t = team(cluster((1, 0.0, 1.0, 1), (units, 0.0, 1.0, 1)), tuple(range(units)))
        priced = tree("all_reduce", 1.0, t).bytes_s
        assert busiest(units) <= priced
        assert busiest(units) == priced or units == 3


@given(st.integers(2, 8), st.floats(2 / CHAIN_SHARE, 100.0), st.floats(1e6, 1e12))
def test_two_nodes_send_the_tensor_once(inside: int, faster: float, nbytes: float) -> None:
    """A ring takes almost twice as long if the inside is fast enough: its links carry the tensor twice everywhere."""
    c = cluster((inside, 0.0, faster, 1), (2, 0.0, 1.0, inside))
    t = team(c, tuple(range(c.devices)))
    assert tree("all_reduce", nbytes, t).seconds == pytest.approx(nbytes)
    assert ring("all_reduce", nbytes, t).seconds == pytest.approx(nbytes * (2 - 1 / inside))


@given(st.sampled_from(["all_reduce", "all_gather", "all_to_all", "broadcast"]), st.sampled_from([1, 2, 4, 8]))
def test_groups_that_share_a_card_pay_for_each_other(kind: str, at_once: int) -> None:
    """k groups of one rank a node, one card a node: the bytes cost k times as much, the waiting the same."""
    c = cluster((8, 1.0, 1e3, 1), (4, 10.0, 1.0, 8))
    alone = ring if kind != "all_to_all" else direct
    one, many = (alone(kind, 4096, team(c, (0, 8, 16, 24), k)) for k in (1, at_once))
    assert many.bytes_s == pytest.approx(at_once * one.bytes_s)
    assert many.latency_s == one.latency_s


def test_groups_of_a_mesh_are_counted_link_by_link() -> None:
    """Eight groups over nodes: with a card a GPU they do not meet, with one for two they halve it."""
    mesh = Mesh({"dp": 4, "tp": 8})
    rates = []
    for shared in (1, 2, 8):
        c = cluster((8, 1.0, 1e3, 1), (4, 10.0, 16.0, shared))
        assert len(teams(c, mesh, (0,))) == 8
        across, inside, all_ = (mesh_team(c, mesh, axes) for axes in ((0,), (1,), (0, 1)))
        rates.append(across.hops[1].bytes_per_s)
        assert inside.level == 0 and not inside.shares
        # A ring through everybody leaves a node by all its cards.
        assert all_.hops[1].bytes_per_s == 16.0 * 8 / shared
        assert across == team(c, (0, 8, 16, 24), 8)
    assert rates == [16.0, 8.0, 2.0]


def test_the_axis_that_varies_fastest_lies_inside() -> None:
    """So the same mesh turned around is a slower one."""
    cost = CollectiveCost(Cluster.preset("16xh100"))
    inner = cost.on("all_reduce", 64 * MB, Mesh({"dp": 2, "tp": 8}), (1,))
    outer = cost.on("all_reduce", 64 * MB, Mesh({"tp": 8, "dp": 2}), (0,))
    assert inner.seconds * 1.4 < outer.seconds


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_the_least_is_chosen(name: str, kind: str) -> None:
    """Of what the backend has; small and large tensors may differ."""
    c = Cluster.preset(name)
    cost = CollectiveCost(c)
    for nbytes in (64, 64 * 1024, 64 * MB):
        for group in ((0, 1), tuple(range(8)), tuple(range(0, 64, 8)), tuple(range(64))):
            every = ways(c, kind, nbytes, team(c, group))
            answer = cost(kind, nbytes, group)
            assert answer.seconds == min(w.seconds for w in every)
            assert answer.algorithm in {w.algorithm for w in every}
            assert answer.source == "formula"
            assert answer.start_s + answer.transfer_s + answer.finish_s == pytest.approx(answer.seconds)


def test_small_tensors_go_another_way_than_large_ones() -> None:
    """Over 64 nodes a tree waits for six hops where a ring waits for 511."""
    cost = CollectiveCost(Cluster.preset("512xa100"))
    group = tuple(range(512))
    assert cost("all_reduce", 4096, group).algorithm == "tree, low latency"
    assert cost("all_reduce", 1 << 34, group).algorithm == "ring"
    assert CollectiveCost(Cluster.preset("8xh100"))("all_reduce", 64 * MB, tuple(range(8))).algorithm == "switch"
    two = CollectiveCost(Cluster.preset("16xh100"))
    assert two("all_reduce", 1 << 30, tuple(range(16))).algorithm == "switch and tree"
    for name, algorithm in (
        ("2x8xv100@nvlink+eth100", "tree"),
        ("2x8xa100", "ring"),
        ("3x8xv100@nvlink+eth100", "ring"),
    ):
        c = Cluster.preset(name)
        assert CollectiveCost(c)("all_reduce", 1 << 30, tuple(range(c.devices))).algorithm == algorithm


def test_an_unknown_collective_is_refused() -> None:
    """By name."""
    with pytest.raises(ClusterError, match="'reduce_all' is no collective"):
        CollectiveCost(FLAT)("reduce_all", 1, (0, 1))


# --- published ---------------------------------------------------------------------------------

PUBLISHED = [
    ("8xa100", 32768, 1.31),
    ("8xa100", 4 * MB, 72.33),
    ("8xa100", 64 * MB, 171.54),
    ("8xa100", 1024 * MB, 229.04),
    ("2xa100", 64 * MB, 165.81),
    ("2xa100", 1024 * MB, 197.28),
    ("4xa100", 64 * MB, 185.11),
    ("4xa100", 1024 * MB, 221.86),
    ("8xh200", 32768, 1.44),
    ("8xh200", MB, 39.93),
    ("8xh200", 16 * MB, 219.89),
    ("8xh200", 256 * MB, 436.15),
    ("8xh200", 16384 * MB, 482.26),
    ("8xb200", 256 * MB, 646.11),
    ("8xb200", 16384 * MB, 845.67),
    ("32xb200", 1024 * MB, 361.99),
    ("32xb200", 16384 * MB, 381.80),
    ("32xh200", 4096 * MB, 364.65),
    ("16xh100", 8192 * MB, 430.0),
]
"""All-reduces by NCCL: cluster, bytes, GB/s of bus bandwidth, that is 2(n-1)/n of the bytes over the time."""


@pytest.mark.parametrize(("name", "nbytes", "busbw"), PUBLISHED)
def test_published_all_reduces_lie_within_two_sigma(name: str, nbytes: int, busbw: float) -> None:
    """The preset says 0.3 for links it assumes: a published figure outside of twice that would make it a lie.

    Not among them: all-reduces of a few megabytes over several nodes of one cloud, which take up to five times as long
    as over InfiniBand.
    """
    c = Cluster.preset(name)
    n = c.devices
    want = 2 * (n - 1) / n * nbytes / (busbw * 1e9)
    answer = CollectiveCost(c)("all_reduce", nbytes, tuple(range(n)))
    assert abs(math.log(answer.seconds / want)) < 2 * answer.sigma


def test_published_all_reduces_are_met_in_the_middle() -> None:
    """The median error over these rows; what it is, not what it should be: a change of a formula shows here."""
    errors = []
    for name, nbytes, busbw in PUBLISHED:
        c = Cluster.preset(name)
        want = 2 * (c.devices - 1) / c.devices * nbytes / (busbw * 1e9)
        errors.append(abs(CollectiveCost(c)("all_reduce", nbytes, tuple(range(c.devices))).seconds / want - 1))
    assert sorted(errors)[len(errors) // 2] < 0.1
    assert max(errors) < 0.25


def test_all_reduces_of_gloo_wait_as_a_ring_does() -> None:
    """Some kilobytes on 2, 4 and 8 ranks of one machine took 0.36, 1.2 and 2.5 ms: as 2, 6 and 14 hops, not 2, 4, 6."""
    cost = CollectiveCost(Cluster.preset("2x4xcpu"))
    level = cost.cluster.levels[0]
    start_s = cost.cluster.collective_s.value
    for ranks in (2, 4):
        answer = cost("all_reduce", 64, tuple(range(ranks)))
        assert answer.seconds - start_s == pytest.approx(2 * (ranks - 1) * level.latency_s.value, rel=0.01)
    assert {cost("all_reduce", n, tuple(range(8))).algorithm for n in (64, 64 * MB)} == {"ring"}


# --- measured ----------------------------------------------------------------------------------


def rows(c: Cluster, ranks: int, sizes: list[int], seconds: Any, **more: Any) -> list[dict[str, Any]]:
    """Rows as a profile has them."""
    return [
        {"backend": c.backend, "kind": "all_reduce", "ranks": ranks, "bytes": n, "seconds": seconds(n), "spread": 0.03}
        | more
        for n in sizes
    ]


HERE = Cluster.preset("4xcpu")


def test_a_row_of_the_profile_is_the_answer() -> None:
    """Exactly, with its spread, and split between start and finish as the formula splits it."""
    c = HERE.with_profile({"collectives": rows(HERE, 2, [1000, 100_000], lambda n: 1e-3)})
    answer = CollectiveCost(c)("all_reduce", 1000, (0, 1))
    assert (answer.seconds, answer.source, answer.sigma) == (1e-3, "measured", 0.03)
    plain = CollectiveCost(HERE)("all_reduce", 1000, (0, 1))
    assert answer.start_s / answer.seconds == pytest.approx(plain.start_s / plain.seconds)


def test_between_rows_the_logarithm_is_straight() -> None:
    """Half-way between 1 kB in 1 ms and 100 kB in 4 ms lies 10 kB in 2 ms, and it is less sure than its neighbours."""
    made = rows(HERE, 2, [1000], lambda n: 1e-3) + rows(HERE, 2, [100_000], lambda n: 4e-3)
    answer = CollectiveCost(HERE.with_profile({"collectives": made}))("all_reduce", 10_000, (2, 3))
    assert answer.seconds == pytest.approx(2e-3)
    assert answer.source == "interpolated"
    assert answer.sigma > 0.03


def test_beyond_rows_the_formula_goes_on_from_the_last() -> None:
    """No jump at the end of what was measured, and the larger tensor costs more."""
    c = HERE.with_profile({"collectives": rows(HERE, 2, [1000, MB], lambda n: 1e-3 + n * 1e-9)})
    cost = CollectiveCost(c)
    last, next_, far = (cost("all_reduce", n, (0, 1)) for n in (MB, MB + 1, 64 * MB))
    assert next_.seconds == pytest.approx(last.seconds, rel=1e-4)
    assert (next_.source, far.source) == ("formula", "formula")
    assert far.seconds == pytest.approx(1e-3 + 64 * MB * 1e-9, rel=0.1)
    assert far.sigma > next_.sigma


def test_another_group_size_uses_the_formula_fitted_to_the_nearest() -> None:
    """A machine five times as slow to wait and three times as slow to copy is so for four ranks as for two."""
    plain = CollectiveCost(HERE)

    def slow(group: tuple[int, ...], n: int) -> float:
        w = ways(HERE, "all_reduce", n, team(HERE, group))[0]
        return 5 * w.latency_s + 3 * w.bytes_s

    made = rows(HERE, 2, [1 << k for k in range(10, 26, 2)], lambda n: slow((0, 1), n))
    cost = CollectiveCost(HERE.with_profile({"collectives": made}))
    for n in (100, 10_000, 10 * MB):
        answer = cost("all_reduce", n, (0, 1, 2, 3))
        assert answer.seconds == pytest.approx(slow((0, 1, 2, 3), n), rel=1e-6)
        assert answer.source == "formula"
        assert answer.sigma < plain("all_reduce", n, (0, 1, 2, 3)).sigma


def test_rows_of_others_do_not_count() -> None:
    """Another backend, another kind, tensors that lie in shared memory, another level: other questions."""
    plain = CollectiveCost(HERE)("all_reduce", 1000, (0, 1))
    for more in ({"backend": "gloo"}, {"kind": "all_gather"}, {"resident": True}):
        c = HERE.with_profile({"collectives": rows(HERE, 2, [1000], lambda n: 9.0, **more)})
        assert CollectiveCost(c)("all_reduce", 1000, (0, 1)) == plain
    c = HERE.with_profile({"collectives": rows(HERE, 2, [1000], lambda n: 9.0, resident=True)})
    assert CollectiveCost(c)("all_reduce", 1000, (0, 1), resident=True).seconds == 9.0
    two = Cluster.preset("2x8xh100")
    c = two.with_profile({"collectives": rows(two, 2, [1000], lambda n: 9.0)})
    assert CollectiveCost(c)("all_reduce", 1000, (0, 8)).source == "formula"
    assert CollectiveCost(c)("all_reduce", 1000, (0, 1)).source == "measured"
    c = two.with_profile({"collectives": rows(two, 2, [1000], lambda n: 9.0, level="cluster")})
    assert CollectiveCost(c)("all_reduce", 1000, (0, 8)).seconds == 9.0


def test_measured_groups_that_share_a_card_pay_for_each_other_too() -> None:
    """A row is of one group alone; seven others on its card cost what the formula says they cost."""
    c = Cluster.preset("2x8xh100@eth100")
    made = c.with_profile({"collectives": rows(c, 2, [64 * MB], lambda n: 0.1, level="cluster")})
    cost, plain = CollectiveCost(made), CollectiveCost(c)
    extra = cost("all_reduce", 64 * MB, (0, 8), 8).seconds - cost("all_reduce", 64 * MB, (0, 8)).seconds
    assert extra == pytest.approx(
        plain("all_reduce", 64 * MB, (0, 8), 8).seconds - plain("all_reduce", 64 * MB, (0, 8)).seconds
    )
    assert extra > 7 * 64 * MB / 10e9 * 0.99


@pytest.mark.parametrize(
    ("change", "says"),
    [({"seconds": 0.0}, "collectives.0."), ({"bytes": 0}, "collectives.0."), ({"ranks": 64}, "a row of 64 ranks")],
)
def test_a_row_that_makes_no_sense_is_refused(change: dict[str, Any], says: str) -> None:
    """By its number, or by what there is no group for."""
    made = [row | change for row in rows(HERE, 2, [1000], lambda n: 1e-3)]
    with pytest.raises(ClusterError, match=says):
        CollectiveCost(HERE.with_profile({"collectives": made}))("all_reduce", 1000, (0, 1))


# --- instructions, attention -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "src", "dst", "nbytes"),
    [
        ("all_reduce", PSUM, B, 64 * 4),
        ("all_gather", S(0), B, 64 * 4),
        ("reduce_scatter", PSUM, S(0), 64 * 4),
        ("all_to_all", S(0), S(1), 32 * 4),
    ],
)
def test_bytes_are_what_a_rank_holds_of_the_whole(kind: str, src: Any, dst: Any, nbytes: int) -> None:
    """After a gather, before a scatter; an exchange holds its part before and after."""
    spec, mesh = TensorSpec((8, 8), "f32"), Mesh({"dp": 2})
    over = Boxing((0,), ((0, 1),), ((0, 1),))
    made = Instr("x", f"box.{kind}", (), (), (Placed(spec, (src,)),), (Placed(spec, (dst,)),), boxing=over)
    assert collective_bytes(made, mesh) == nbytes
    cost = CollectiveCost(HERE)
    assert cost.of(made, mesh) == cost(kind, nbytes, (0, 1))


def test_attention_over_a_split_sequence_by_hand() -> None:
    """Four blocks: in a ring three steps of the longer of both and one block more; gathered, all wait for it."""
    c = cluster((4, 1.0, 8.0, 1), backend="gloo")
    cost = CollectiveCost(c)
    made = split_attention(cost, block_s=2.0, block_bytes=32, group=(0, 1, 2, 3))
    assert made.ring_s == 3 * max(2.0, 1 + 32 / 8) + 2.0
    assert made.gathered_s == (1 + 3 * 32 / 8) + 4 * 2.0
    assert made.way == "ring" and made.seconds == made.ring_s
    assert (made.ring_bytes, made.gathered_bytes) == (32, 96)
    hidden = split_attention(cost, block_s=50.0, block_bytes=32, group=(0, 1, 2, 3))
    assert hidden.ring_s == 4 * 50.0
    short = split_attention(cost, block_s=0.01, block_bytes=1, group=(0, 1, 2, 3))
    assert short.way == "gathered"  # one wait instead of three
    alone = split_attention(cost, 2.0, 32, (3,))
    assert alone.seconds == 2.0 and alone.gathered_bytes == 0

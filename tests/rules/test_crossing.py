"""Crossings take a tensor from any placement on some ranks to any on others, exactly, for the fewest bytes.

Exactly: the transfers are carried out on numbers, and what destination ranks then hold is put together element by
element. For the fewest bytes: what each destination rank lacks is counted element by element; partial sources are
compared with every placement they could be reduced to. OneFlow's table of costs (Yuan et al. 2021, table 2) gives the
same numbers on one axis, for the same and for disjoint devices.

Not covered for bytes: partial to partial between sets with some ranks in common, where terms could be added up on
arrival; it is never worse than reducing first.
"""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.errors import PlacementError
from laminar.ir.mesh import Place
from laminar.ir.sbp import PSUM, B, NdSbp, Partial, S, local_indices
from laminar.ir.tensor import ITEM_BYTES, TensorSpec
from laminar.rules.boxing.crossing import Crossing, crossing
from laminar.rules.boxing.regions import meet, sets
from tests.support import crossing_cases as cases
from tests.support.crossing_cases import FREE, MESHES, SHAPES, pair, place, placements

HOW = ("same", "overlapping", "disjoint", "any")


def made(spec: TensorSpec, src: Place, src_nd: NdSbp, dst: Place, dst_nd: NdSbp) -> Crossing:
    """A crossing for which only bytes count."""
    return crossing(spec, src, src_nd, dst, dst_nd, FREE, 0)


def assert_crosses(c: Crossing, chance: random.Random) -> None:
    """Senders have what they send, receivers get what they want, and nothing is said twice."""
    shape = c.spec.shape
    draw = np.random.default_rng(chance.randrange(1 << 30))
    whole = draw.integers(-99, 99, shape)
    now = cases.bare(c.src_nd) if not c.before else c.before[0].src
    for step in c.before:
        assert step.src == now
        now = step.dst
    same = tuple(B if n == 1 else p for p, n in zip(c.src_nd, c.src.mesh.sizes, strict=True))
    assert (now if c.before else same) == c.mid, str(c)
    held = cases.spread(whole, c.mid, c.src, chance)
    for t in (*c.transfers, *c.kept):
        wanted = [np.concatenate([np.arange(a, b) for a, b in dim]) for dim in t.index]
        mine = local_indices(shape, c.mid, c.src.mesh.sizes, c.src.coords(t.src))
        yours = local_indices(shape, c.dst_nd, c.dst.mesh.sizes, c.dst.coords(t.dst))
        for d, want in enumerate(wanted):
            assert len(want) and np.array_equal(mine[d][cases.pick(t.at_src[d : d + 1])[0]], want), str(c)
            assert np.array_equal(yours[d][cases.pick(t.at_dst[d : d + 1])[0]], want), str(c)
        assert t.size == math.prod(t.shape) and (t.src == t.dst) == (t in c.kept)
    pairs = [(t.src, t.dst) for t in c.transfers]
    assert len(set(pairs)) == len(pairs), f"{c}: two transfers between the same ranks"
    got = cases.carried_out(c, held)
    assert np.array_equal(cases.assembled(c, got), whole), str(c)
    if not any(isinstance(p, Partial) for p in c.dst_nd):
        assert not c.fill
    for rank in c.dst.ranks:
        sent = sum(t.size for t in c.transfers if t.dst == rank) * ITEM_BYTES[c.spec.dtype]
        assert dict(c.bytes)[rank] == sent or rank in c.src.ranks


def assert_moves_least(c: Crossing) -> None:
    """No fewer bytes would do."""
    sides = (c.spec.shape, c.src, c.src_nd, c.dst, c.dst_nd)
    total, rest = divmod(c.total_bytes, ITEM_BYTES[c.spec.dtype])
    assert rest == 0
    kinds = [
        {p.op for p, n in zip(nd, on.mesh.sizes, strict=True) if isinstance(p, Partial) and n > 1}
        for nd, on in ((c.src_nd, c.src), (c.dst_nd, c.dst))
    ]
    if not kinds[0]:
        assert total * ITEM_BYTES[c.spec.dtype] == c.moved_bytes and total == cases.lacks(*sides), str(c)
        return
    everywhere = cases.summed_up(*sides)
    assert total <= everywhere, f"{c}: an all-reduce and {everywhere} elements in all would do"
    if kinds[0] != kinds[1]:
        assert total >= cases.ideal(*sides), f"{c}: too good to be true"
    if not {*c.src.ranks} & {*c.dst.ranks}:
        assert total <= cases.ideal(*sides) or not cases.scatters(c.spec.shape, c.src, c.src_nd), str(c)
    elif c.src == c.dst:
        assert total <= cases.least_through(*sides), f"{c}: {cases.least_through(*sides)} would do"


def assert_shared_fairly(c: Crossing) -> None:
    """Of the ranks that hold the same, none sends more than its share, but for what a row can't be cut into."""
    alike: dict[bytes, list[int]] = {}
    for rank in c.src.ranks:
        term = [k for p, k in zip(c.mid, c.src.coords(rank), strict=True) if isinstance(p, Partial)]
        mask = cases.holds(c.spec.shape, c.mid, c.src, rank)
        if mask.any():
            alike.setdefault(mask.tobytes() + bytes(term), []).append(rank)
    for ranks in alike.values():
        loads = [sum(t.size for t in c.transfers if t.src == rank) for rank in ranks]
        row = 0
        for to in c.dst.ranks:
            parts = [t for t in c.transfers if t.dst == to and t.src in ranks]
            region = [{i for t in parts for i in cases.pick(t.index[d : d + 1])[0]} for d in range(len(c.spec.shape))]
            row = max(row, sum(t.size for t in parts) // max([1, *map(len, region)]))
        assert max(loads) <= -(-sum(loads) // len(loads)) + row, f"{c}: {loads}"


def check(c: Crossing, chance: random.Random) -> None:
    assert_crosses(c, chance)
    assert_moves_least(c)
    assert_shared_fairly(c)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape", [(), (5,), (6,), (0,), (4, 3)], ids=str)
def test_every_crossing_between_two_single_axes_is_exact_and_least(shape: tuple[int, ...], how: str) -> None:
    """All placements on one, two and three ranks, to all on one, two and three: nothing is left to luck."""
    spec, chance = TensorSpec(shape, "f32"), random.Random(1)
    for one, two in itertools.product(((1,), (2,), (3,)), repeat=2):
        for src_nd, dst_nd in itertools.product(placements(spec, one), placements(spec, two)):
            src, dst = pair(one, two, how, chance)
            check(made(spec, src, src_nd, dst, dst_nd), chance)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("one", MESHES, ids=str)
def test_crossings_between_meshes_of_several_axes_are_exact_and_least(one: tuple[int, ...], how: str) -> None:
    """Blocks, uneven dims, empty shards and several axes on one dim, in every mixture that chance brings."""
    chance = random.Random(f"{one}{how}")
    for two in MESHES:
        for shape in SHAPES:
            spec = TensorSpec(shape, chance.choice(["f32", "bf16", "i64"]))
            for _ in range(4):
                src_nd, dst_nd = chance.choice(placements(spec, one)), chance.choice(placements(spec, two))
                src, dst = pair(one, two, how, chance)
                check(made(spec, src, src_nd, dst, dst_nd), chance)


@given(cases.sides(), st.integers(0, 1 << 30), st.sampled_from([0, 16, 1 << 17]))
@settings(max_examples=300, deadline=None)
def test_any_tensor_gets_anywhere(
    case: tuple[TensorSpec, Place, NdSbp, Place, NdSbp], seed: int, grain_bytes: int
) -> None:
    """Three axes, twelve ranks, any ranks in common: what arrives is the tensor, and what is there does not move."""
    c = crossing(*case, grain_bytes=grain_bytes)
    assert_crosses(c, random.Random(seed))
    if not any(isinstance(p, Partial) and n > 1 for p, n in zip(c.src_nd, c.src.mesh.sizes, strict=True)):
        assert c.moved_bytes == cases.lacks(c.spec.shape, *case[1:]) * ITEM_BYTES[c.spec.dtype]


# --- known numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p1,p2", list(itertools.product([2, 3, 4], repeat=2)))
def test_between_disjoint_devices_bytes_are_those_of_the_table(p1: int, p2: int) -> None:
    """Yuan et al. 2021, table 2, third column: |T| once per consumer that needs all of it, plus p1 - 1 to add up."""
    spec = TensorSpec((24, 36), "f32")
    t = spec.nbytes
    src, dst = place((p1,), tuple(range(p1))), place((p2,), tuple(range(p1, p1 + p2)))
    table = {
        (S(0), S(0)): t,
        (S(0), S(1)): t,
        (S(0), B): p2 * t,
        (S(0), PSUM): t,
        (B, S(0)): t,
        (B, B): p2 * t,
        (B, PSUM): t,
        (PSUM, S(0)): p1 * t,
        (PSUM, B): (p1 + p2 - 1) * t,
        (PSUM, PSUM): p1 * t,
    }
    for (a, b), wanted in table.items():
        assert crossing(spec, src, (a,), dst, (b,)).total_bytes == wanted, f"{a} -> {b}"


@pytest.mark.parametrize("p", [2, 3, 4])
def test_on_the_same_devices_bytes_are_those_of_the_table(p: int) -> None:
    """The second column: the same code serves a place and itself, and finds what boxing finds."""
    spec = TensorSpec((24, 36), "f32")
    t = spec.nbytes
    here = place((p,), tuple(range(p)))
    table = {
        (S(0), S(0)): 0,
        (S(0), S(1)): (p - 1) * t // p,
        (S(0), B): (p - 1) * t,
        (S(0), PSUM): 0,
        (B, S(0)): 0,
        (B, B): 0,
        (B, PSUM): 0,
        (PSUM, S(0)): (p - 1) * t,
        (PSUM, B): 2 * (p - 1) * t,
        (PSUM, PSUM): 0,
    }
    for (a, b), wanted in table.items():
        assert crossing(spec, here, (a,), here, (b,)).total_bytes == wanted, f"{a} -> {b}"


@pytest.mark.parametrize("nd", [(S(0), B), (B, S(1)), (S(0), S(1)), (B, B), (S(0, 2), S(0))], ids=str)
def test_stages_alike_pair_off_with_whole_local_tensors(nd: NdSbp) -> None:
    """Most pipelines have the same mesh and placement on both sides of an edge: one message for each rank, unpacked."""
    spec = TensorSpec((8, 16, 32), "bf16")
    src, dst = place((2, 4), tuple(range(8))), place((2, 4), tuple(range(8, 16)))
    c = crossing(spec, src, nd, dst, nd)
    assert [(t.src, t.dst) for t in c.transfers] == [(r, r + 8) for r in range(8)]
    for t in c.transfers:
        assert t.at_src == tuple(((0, n),) for n in c.src_shape(t.src))
        assert t.at_dst == tuple(((0, n),) for n in c.dst_shape(t.dst))


def test_terms_travel_as_they_are_where_the_destination_is_partial_too() -> None:
    """Reducing first would move no fewer bytes, and cost a collective more."""
    src, dst = place((3,), (0, 1, 2)), place((4,), (3, 4, 5, 6))
    c = crossing(TensorSpec((12,), "f32"), src, (PSUM,), dst, (PSUM,))
    assert not c.before and [(t.src, t.dst) for t in c.transfers] == [(0, 3), (1, 4), (2, 5)]
    assert c.fill == (6,)


def test_a_scattered_sum_lands_where_the_receiver_wants_it() -> None:
    """Of the dims a partial source can be scattered on, the one the destination splits needs the fewest messages."""
    src, dst = place((4,), (0, 1, 2, 3)), place((4,), (4, 5, 6, 7))
    c = crossing(TensorSpec((8, 8, 8), "f32"), src, (PSUM,), dst, (S(2),))
    assert c.mid == (S(2),) and [(t.src, t.dst) for t in c.transfers] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_the_busiest_of_several_holders_sends_as_little_as_possible() -> None:
    """Two holders and three who want all: each sends one and a half. Small tensors stay whole: messages cost too."""
    src, dst = place((2,), (0, 1)), place((3,), (2, 3, 4))
    for n, wanted in ((1 << 20, [6 << 20, 6 << 20]), (16, [128, 64])):
        c = crossing(TensorSpec((n,), "f32"), src, (B,), dst, (B,))
        assert [sum(4 * t.size for t in c.sends(rank)) for rank in (0, 1)] == wanted


@pytest.mark.parametrize("holders", [2, 3, 4])
@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_equal_shares_are_met_exactly_where_rows_divide(holders: int, readers: int) -> None:
    """The least the busiest can send is the total over the number of holders."""
    src, dst = place((holders,), tuple(range(holders))), place((readers,), tuple(range(9, 9 + readers)))
    c = made(TensorSpec((12, 5), "f32"), src, (B,), dst, (B,))
    assert {sum(t.size for t in c.sends(rank)) for rank in src.ranks} == {60 * readers // holders}


def test_a_rank_in_both_places_takes_what_it_has_and_sends_nothing_to_itself() -> None:
    """Half of an overlapping pair's bytes are there already."""
    spec = TensorSpec((8, 4), "f32")
    c = crossing(spec, place((2,), (0, 1)), (S(0),), place((2,), (1, 2)), (B,))
    assert [(t.src, t.dst, t.index[0]) for t in c.kept] == [(1, 1, ((4, 8),))]
    assert [(t.src, t.dst, t.index[0]) for t in c.transfers] == [
        (0, 1, ((0, 4),)),
        (0, 2, ((0, 4),)),
        (1, 2, ((4, 8),)),
    ]
    assert c.bytes == ((0, 0), (1, 64), (2, 128))


# --- geometry ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 48), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=3), st.data())
def test_intervals_say_what_local_indices_say(n: int, cuts: list[tuple[int, int]], data: st.DataObject) -> None:
    """Two descriptions of who holds what: one by intervals for all ranks, one by elements for each."""
    sizes, nd = tuple(parts for parts, _ in cuts), tuple(S(0, blocks) for _, blocks in cuts)
    if not cases.legal(TensorSpec((n,), "f32"), nd, sizes):
        return
    for key, held in sets(n, tuple(cuts)).items():
        elements = [i for a, b in held for i in range(a, b)]
        assert elements == local_indices((n,), nd, sizes, key)[0].tolist()
        assert all(a < b for a, b in held) and all(x[1] < y[0] for x, y in itertools.pairwise(held))
    other = data.draw(st.sampled_from([((1, 1),), ((2, 1),), ((3, 1), (2, 1))]))
    met = meet(n, tuple(cuts), other)
    assert sum(part.size for row in met.values() for part in row.values()) == n


def test_work_grows_with_intervals_not_with_elements() -> None:
    """A tensor too large for any list of its elements is planned all the same."""
    spec = TensorSpec((1 << 40, 1 << 20), "bf16")
    src, dst = place((2, 2), (0, 1, 2, 3)), place((3,), (2, 3, 4))
    c = crossing(spec, src, (S(0, 4), PSUM), dst, (S(0),))
    assert c.total_bytes >= spec.nbytes and len(c.transfers) <= 12


def test_the_same_question_is_answered_once() -> None:
    """A training step asks for every edge and micro-batch."""
    spec, src, dst = TensorSpec((8,), "f32"), place((2,), (0, 1)), place((2,), (2, 3))
    assert crossing(spec, src, (S(0),), dst, (B,)) is crossing(spec, src, (S(0),), place((2,), (2, 3)), (B,))


def test_ranks_that_hash_differently_find_the_same_crossing() -> None:
    """Every rank computes it alone: an order that came from a set or a dict of names would differ between processes."""
    code = """
from laminar.ir.mesh import Mesh, Place
from laminar.ir.sbp import B, PSUM, S
from laminar.ir.tensor import TensorSpec
from laminar.rules.boxing.crossing import crossing
src, dst = Place((3, 1, 0, 2, 7, 6), Mesh({"dp": 3, "tp": 2})), Place((7, 8, 1, 9), Mesh({"b": 2, "a": 2}))
for a, b in (((S(0), B), (B, S(1))), ((PSUM, B), (S(0), B)), ((PSUM, PSUM), (PSUM, S(0))), ((B, B), (B, PSUM))):
    print(repr(crossing(TensorSpec((12, 5), "f32"), src, a, dst, b, grain_bytes=0)))
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1 and said.pop().count("Crossing(") == 4


def test_a_placement_that_cannot_hold_is_refused_by_name() -> None:
    """The error says which side is wrong."""
    one, two = place((2,), (0, 1)), place((2,), (2, 3))
    with pytest.raises(PlacementError, match="destination of a crossing"):
        crossing(TensorSpec((8,), "f32"), one, (B,), two, (S(1),))
    with pytest.raises(PlacementError, match="source of a crossing"):
        crossing(TensorSpec((8,), "f32"), one, (B, B), two, (B,))

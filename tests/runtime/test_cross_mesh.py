"""Crossings on tensors: all ranks in one process, and real ranks that send to each other.

In process, numbers are compared with what `spread` and `assembled` (tests/support/crossing_cases.py) say, reductions
before the transfers included. On four Gloo ranks the same cases run by pairwise sends and receives with tags.

Not covered: NCCL with several ranks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.errors import PlacementError
from laminar.ir.mesh import Place
from laminar.ir.sbp import PSUM, B, NdSbp, P, S
from laminar.ir.tensor import TensorSpec
from laminar.rules.boxing.crossing import Crossing, crossing
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.cross_mesh import (
    CrossMeshReceiver,
    CrossMeshSender,
    Window,
    exchange,
    reduction_identity,
    runs,
)
from laminar.runtime.comm.shards import assemble
from laminar.runtime.comm.transport import Groups
from tests.support import crossing_cases as cases
from tests.support.crossing_cases import MESHES, SHAPES, pair, place, placements
from tests.support.lockstep_pipeline import cross, reduction
from tests.support.rank_pool import Ranks


def assert_arrives(c: Crossing, chance: random.Random) -> None:
    """What destination ranks hold in the end is the tensor."""
    whole = np.random.default_rng(chance.randrange(1 << 30)).integers(-99, 99, c.spec.shape)
    terms = cases.spread(whole, c.src_nd, c.src, chance)
    held = {r: torch.from_numpy(np.array(x, order="C")) for r, x in terms.items()}
    before = {r: x.clone() for r, x in held.items()}
    got = cross(held, c)
    assert list(got) == list(c.dst.ranks)
    for rank, x in got.items():
        assert tuple(x.shape) == c.dst_shape(rank)
    assert all(torch.equal(held[r], before[r]) for r in held), f"{c}: a source tensor was written to"
    seen = {r: x.numpy().clip(-(10**9), 10**9) for r, x in got.items()}
    assert np.array_equal(cases.assembled(c, seen), whole), str(c)
    if c.op in ("", "sum"):
        assert torch.equal(assemble([*got.values()], c.spec.shape, c.dst_nd, c.dst.mesh), torch.from_numpy(whole))


@pytest.mark.parametrize("how", ["same", "overlapping", "disjoint", "any"])
@pytest.mark.parametrize("one", MESHES, ids=str)
def test_all_ranks_in_process_end_with_the_tensor(one: tuple[int, ...], how: str) -> None:
    """The views that regions become, and the reductions before them, on every kind of placement."""
    chance = random.Random(f"{one}{how}")
    for two, shape in itertools.product(MESHES, SHAPES):
        spec = TensorSpec(shape, "i64")
        for grain_bytes in (0, 1 << 17):
            src, dst = pair(one, two, how, chance)
            src_nd, dst_nd = chance.choice(placements(spec, one)), chance.choice(placements(spec, two))
            assert_arrives(crossing(spec, src, src_nd, dst, dst_nd, grain_bytes=grain_bytes), chance)


@given(cases.sides(), st.integers(0, 1 << 30), st.sampled_from([0, 1 << 17]))
@settings(max_examples=150, deadline=None)
def test_any_tensor_arrives(case: tuple[TensorSpec, Place, NdSbp, Place, NdSbp], seed: int, grain_bytes: int) -> None:
    """Three axes and any ranks in common, the reduction of partial sources included."""
    assert_arrives(crossing(*case, grain_bytes=grain_bytes), random.Random(seed))


# --- no copies where none are needed ----------------------------------------------------------------------------------


def test_whole_local_tensors_are_sent_and_received_where_they_lie() -> None:
    """Between stages alike nothing is packed: the tensor itself goes out, and arrives in the tensor itself."""
    src, dst = place((2, 2), (0, 1, 2, 3)), place((2, 2), (4, 5, 6, 7))
    c = crossing(TensorSpec((4, 6, 8), "f32"), src, (S(0), B), dst, (S(0), B))
    for rank in src.ranks:
        x = torch.randn(c.src_shape(rank))
        ((peer, sent),) = CrossMeshSender(c, rank).pack(x)
        assert (peer, sent.data_ptr(), sent.shape) == (rank + 4, x.data_ptr(), x.shape)
        room = CrossMeshReceiver(c, peer).room()
        assert room.out is not None and not room.staged
        ((_, buffer),) = room.buffers
        assert buffer.data_ptr() == room.out.data_ptr() and buffer.shape == room.out.shape


def test_rows_are_sent_from_and_received_in_the_middle_of_a_tensor() -> None:
    """A stretch of memory is as good as a whole tensor; columns travel through a buffer."""
    src, dst = place((2,), (0, 1)), place((4,), (2, 3, 4, 5))
    x = torch.randn(8, 6)
    c = crossing(TensorSpec((16, 6), "f32"), src, (S(0),), dst, (S(0),))
    assert [t.data_ptr() for _, t in CrossMeshSender(c, 0).pack(x)] == [x.data_ptr(), x[4:].data_ptr()]
    back = crossing(TensorSpec((16, 6), "f32"), dst, (S(0),), src, (S(0),))
    room = CrossMeshReceiver(back, 0).room()
    assert room.out is not None and not room.staged
    assert [b.data_ptr() for _, b in room.buffers] == [room.out.data_ptr(), room.out[4:].data_ptr()]
    columns = CrossMeshReceiver(crossing(TensorSpec((16, 6), "f32"), dst, (S(1),), src, (S(0),)), 0).room()
    assert len(columns.staged) == len(columns.buffers) and all(b.is_contiguous() for _, b in columns.buffers)


def test_what_a_rank_goes_on_holding_is_not_copied_unless_asked() -> None:
    """A rank of both places that keeps its tensor gets the same tensor back; into a register it is copied."""
    here = place((2,), (0, 1))
    c = crossing(TensorSpec((4, 3), "f32"), here, (S(0),), here, (S(0),))
    receiver, x = CrossMeshReceiver(c, 0), torch.randn(2, 3)
    assert receiver.passes and receiver.unpack(receiver.room(), x) is x
    register = torch.empty(2, 3)
    assert receiver.unpack(receiver.room(into=register), x) is register and torch.equal(register, x)


def test_a_register_is_filled_where_nobody_sends() -> None:
    """A register is used again and again: what the last micro-batch left must not become a term of this one."""
    c = crossing(TensorSpec((4,), "f32"), place((1,), (0,)), (B,), place((2,), (1, 2)), (PSUM,))
    register = torch.full((4,), 7.0)
    receiver = CrossMeshReceiver(c, 2)
    assert c.fill == (2,) and receiver.unpack(receiver.room(into=register)).tolist() == [0.0] * 4


def test_a_tensor_of_another_shape_is_refused_on_both_sides() -> None:
    """A micro-batch of another size needs the crossing of its own shape; silence would leave old numbers in place."""
    c = crossing(TensorSpec((4, 3), "f32"), place((1,), (0,)), (B,), place((2,), (0, 1)), (S(0),))
    with pytest.raises(PlacementError, match=r"rank 0 sends from \[4, 3\]"):
        CrossMeshSender(c, 0).pack(torch.zeros(5, 3))
    with pytest.raises(PlacementError, match=r"rank 1 ends with \[2, 3\]"):
        CrossMeshReceiver(c, 1).room(into=torch.zeros(3, 3))
    receiver = CrossMeshReceiver(c, 0)
    with pytest.raises(PlacementError, match="nothing was given"):
        receiver.unpack(receiver.room())


@pytest.mark.parametrize(
    "op,dtype",
    [(o, d) for o in ("sum", "max", "min") for d in (torch.float32, torch.bfloat16, torch.int32)]
    + [("max", torch.bool), ("min", torch.bool)],
    ids=str,
)
def test_the_identity_changes_nothing(op: str, dtype: torch.dtype) -> None:
    """What fills a term nobody sent must vanish in the reduction, for the least and the greatest values too."""
    x = torch.tensor([0, 1]).to(dtype)
    if dtype.is_floating_point:
        x = torch.tensor([float("-inf"), float("inf"), -3.0, 0.0]).to(dtype)
    filled = torch.full_like(x, reduction_identity(op, dtype))
    merge = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    assert torch.equal(merge(x, filled), x)


# --- views ------------------------------------------------------------------------------------------------------------


def test_blocks_are_one_strided_view() -> None:
    """Packed q/k/v and merged dims have as many intervals as blocks, all alike: one copy, and no list of elements."""
    assert [r.repeats for r in runs(((0, 2), (8, 10), (16, 18), (24, 26)))] == [((4, 8),)]
    assert [r.repeats for r in runs(((0, 2), (4, 6), (16, 18), (20, 22)))] == [((2, 16), (2, 4))]
    spec, src, dst = TensorSpec((3 * 64, 5), "f32"), place((4,), (0, 1, 2, 3)), place((2,), (4, 5))
    c = crossing(spec, src, (S(0, 3),), dst, (S(0, 12),))
    assert all(len(w.boxes) == 1 for rank in src.ranks for _, w in CrossMeshSender(c, rank).items)
    assert all(len(w.boxes) == 1 for rank in dst.ranks for _, w in CrossMeshReceiver(c, rank).items)


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=7), max_size=3), st.data()
)
@settings(max_examples=200, deadline=None)
def test_windows_read_and_write_any_intervals(steps: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    """With a structure or without, in one dim or three: the elements are those of the intervals, in order."""
    region = []
    for dim in steps:
        at, held = data.draw(st.integers(0, 2)), []
        for gap, length in dim:
            held.append((at, at + length))
            at += length + gap
        region.append(tuple(held))
    shape = [dim[-1][1] + data.draw(st.integers(0, 2)) for dim in region]
    x = torch.randn(shape)
    if data.draw(st.booleans()) and len(shape) > 1:
        x = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    wanted = x.numpy()[cases.pick(tuple(region))]
    window = Window(tuple(region), tuple(shape))
    assert window.read(x).is_contiguous() and np.array_equal(window.read(x).numpy(), wanted)
    y = torch.full(shape, 9.0)
    window.write(y, torch.from_numpy(np.array(wanted, order="C")))
    out = np.full(shape, 9.0, dtype=np.float32)
    out[cases.pick(tuple(region))] = wanted
    assert np.array_equal(y.numpy(), out)
    place_ = window.stretch(y)
    if place_ is not None:
        place_.zero_()
        assert (y.numpy()[cases.pick(tuple(region))] == 0).all()


# --- real ranks -------------------------------------------------------------------------------------------------------

WHOLE = TensorSpec((12, 10, 3), "f32")
CASES: list[tuple[Place, NdSbp, Place, NdSbp]] = [
    (place((2,), (0, 1)), (S(0),), place((2,), (2, 3)), (S(0),)),
    (place((2,), (0, 1)), (S(0),), place((2,), (2, 3)), (S(1),)),
    (place((2,), (0, 1)), (B,), place((2,), (2, 3)), (B,)),
    (place((1,), (0,)), (B,), place((3,), (1, 2, 3)), (S(0, 2),)),
    (place((3,), (0, 1, 2)), (S(1),), place((1,), (3,)), (B,)),
    (place((3,), (0, 1, 2)), (S(0),), place((3,), (1, 2, 3)), (S(1),)),
    (place((2, 2), (0, 1, 2, 3)), (S(0), S(1, 5)), place((2,), (3, 1)), (S(2),)),
    (place((2, 2), (0, 1, 2, 3)), (S(0), B), place((2, 2), (2, 3, 0, 1)), (S(0), B)),
    (place((2,), (1, 2)), (B,), place((4,), (0, 1, 2, 3)), (P("max"),)),
    (place((3,), (0, 1, 2)), (S(0),), place((2, 2), (0, 1, 2, 3)), (PSUM, B)),
]
ODD = TensorSpec((5, 3), "f32")
"""No dim divides by two or four."""
REDUCED: list[tuple[Place, NdSbp, Place, NdSbp]] = [
    (place((2, 2), (0, 1, 2, 3)), (S(0), PSUM), place((2,), (1, 3)), (B,)),
    (place((4,), (0, 1, 2, 3)), (PSUM,), place((2,), (2, 3)), (S(0),)),
    (place((2, 2), (0, 1, 2, 3)), (P("max"), B), place((3,), (1, 2, 3)), (S(0),)),
]
"""Sources on all four ranks, whose reductions real ranks can run by the ordinary transport."""


def _on_rank(
    spec: TensorSpec, case: tuple[Place, NdSbp, Place, NdSbp], locals_: dict[int, torch.Tensor], tag: int
) -> Any:
    c = crossing(spec, *case, grain_bytes=0)
    held = locals_.get(dist.get_rank())
    if c.before:
        program = reduction(c)
        assert held is not None
        (held,) = EagerStep(program, Groups(program.mesh, "cpu"), {})(held)
    got = exchange(c, held, tag=tag)
    return None if got is None else got.clone()


def _crossed_at_once(which: list[tuple[Place, NdSbp, Place, NdSbp]], every: list[dict[int, torch.Tensor]]) -> list[Any]:
    """All edges under way at the same time, posted in another order on each rank: tags keep them apart."""
    rank = dist.get_rank()
    todo = []
    for tag, (case, locals_) in enumerate(zip(which, every, strict=True)):
        c = crossing(WHOLE, *case, grain_bytes=0)
        receiver = CrossMeshReceiver(c, rank) if rank in c.dst.ranks else None
        todo.append((tag, c, receiver, receiver.room() if receiver else None, locals_.get(rank)))
    works, alive = [], []
    random.Random(rank).shuffle(todo)
    for tag, c, _, room, held in todo:
        works += [dist.irecv(buffer, peer, tag=tag) for peer, buffer in (room.buffers if room else ())]
        for peer, x in CrossMeshSender(c, rank).pack(held) if held is not None else ():
            alive.append(x)
            works.append(dist.isend(x, peer, tag=tag))
    for work in works:
        work.wait()
    done = {tag: receiver.unpack(room, held) for tag, _, receiver, room, held in todo if receiver and room}
    return [done[tag].clone() if tag in done else None for tag in range(len(which))]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.stop()


def _spread(
    spec: TensorSpec, case: tuple[Place, NdSbp, Place, NdSbp], seed: int
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    whole = np.random.default_rng(seed).integers(-99, 99, spec.shape)
    held = cases.spread(whole, case[1], case[0], random.Random(seed))
    return torch.from_numpy(whole).float(), {r: torch.from_numpy(np.array(x)).float() for r, x in held.items()}


def test_real_ranks_hold_what_ranks_in_process_hold(ranks: Ranks) -> None:
    """One edge after another, places apart or with ranks in common, partial sources reduced first."""
    every = [(WHOLE, case) for case in (*CASES, *REDUCED)] + [(ODD, case) for case in REDUCED]
    for tag, (spec, case) in enumerate(every):
        whole, held = _spread(spec, case, tag)
        c = crossing(spec, *case, grain_bytes=0)
        expected = cross(held, c)
        got = ranks.run(_on_rank, spec, case, held, tag)
        for rank in range(4):
            assert (got[rank] is None) == (rank not in expected), str(c)
            assert got[rank] is None or torch.equal(got[rank], expected[rank]), str(c)
        if c.op != "max":
            assert torch.equal(assemble([got[r] for r in c.dst.ranks], spec.shape, c.dst_nd, c.dst.mesh), whole)


def test_many_edges_are_under_way_at_once(ranks: Ranks) -> None:
    """A stage receives from several others while it sends: messages of one pair are told apart by their tags."""
    spreads = [_spread(WHOLE, case, 100 + i) for i, case in enumerate(CASES)]
    got = ranks.run(_crossed_at_once, CASES, [held for _, held in spreads])
    for i, case in enumerate(CASES):
        expected = cross(spreads[i][1], crossing(WHOLE, *case, grain_bytes=0))
        for rank, x in expected.items():
            assert torch.equal(got[rank][i], x)

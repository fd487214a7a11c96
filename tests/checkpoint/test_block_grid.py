"""Blocks: a grid that tiles every tensor, boxes that find their blocks, and writers that are handed what they lack."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.checkpoint.format import block_grid
from laminar.checkpoint.format.block_grid import (
    block_box,
    block_count,
    block_shape,
    blocks_of_box,
    box_shape,
    whole_box,
)
from laminar.checkpoint.format.block_shares import HeldBox, SpreadTensor, block_from_pieces, share_blocks
from laminar.errors import CheckpointError
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import B, NdSbp, S, Split
from tests.support.spread_tensors import spread

SHAPES = st.lists(st.integers(0, 12), max_size=4).map(tuple)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have many."""
    monkeypatch.setattr(block_grid, "BLOCK_BYTES", 256)


@given(SHAPES, st.sampled_from([1, 2, 4, 8, 16]))
def test_blocks_tile_a_tensor(shape: tuple[int, ...], item: int) -> None:
    """Each element is in one block, none is larger than a block may be, and none is tiny without need."""
    count = np.zeros(shape, int)
    for number in range(block_count(shape, item)):
        box = block_box(shape, item, number)
        count[box] += 1
        assert 0 < math.prod(box_shape(box)) * item <= 256
    assert (count == 1).all()
    assert math.prod(shape) * item <= 256 or 2 * math.prod(block_shape(shape, item)) * item > 128


@given(SHAPES, st.data())
def test_a_box_finds_its_blocks(shape: tuple[int, ...], data: st.DataObject) -> None:
    """All of them, each with the part that lies in it, against looking at every block."""
    ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    box = tuple(slice(a, b) for a, b in ends)
    number_of = np.zeros(shape, int)
    for number in range(block_count(shape, 4)):
        number_of[block_box(shape, 4, number)] = number
    covered = np.zeros(shape, int)
    for number, part in blocks_of_box(shape, 4, box):
        covered[part] += 1
        assert (number_of[part] == number).all()
    inside = np.zeros(shape, int)
    inside[box] = 1
    assert (covered == inside).all()


def test_the_format_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids of well-known shapes are part of the format: other ones would be other blocks, and other roots."""
    monkeypatch.undo()
    assert block_grid.BLOCK_BYTES == 4 << 20
    assert block_shape((50257, 768), 4) == (786, 768)
    assert block_shape((4096, 4096), 4) == (1024, 1024)
    assert block_shape((4096, 4096), 2) == (1024, 2048)
    assert block_shape((1 << 21,), 4) == (1 << 20,) and block_shape((), 4) == ()


LAYOUTS = [
    (B, B),
    (S(0), B),
    (S(1), B),
    (B, S(1)),
    (S(0), S(1)),
    (S(0), S(0)),
    (S(0, blocks=3), B),
    (S(1, blocks=2), S(0)),
]


CASES = [
    (nd, shape)
    for nd, shape in product(LAYOUTS, [(36, 24), (6, 130), (7, 7), (1, 6), (96, 4)])
    if all(shape[p.dim] % p.blocks == 0 for p in nd if isinstance(p, Split))
]


@pytest.mark.parametrize(("nd", "shape"), CASES, ids=str)
def test_every_block_is_written_once_from_what_ranks_hold(nd: NdSbp, shape: tuple[int, ...]) -> None:
    """Whatever the layout: the pieces put together are the block, and come from ranks that have them."""
    mesh = Mesh({"dp": 2, "tp": 3})
    tensor = spread(shape, 4, nd, mesh)
    whole = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    (shares,) = share_blocks([tensor])
    assert [s.number for s in shares] == list(range(block_count(shape, 4)))
    for share in shares:
        box = block_box(shape, 4, share.number)
        for piece in share.pieces:
            assert any(piece.rank in h.ranks and _inside(piece.box, h.box) for h in tensor.held)
        assert (block_from_pieces(box, [(p.box, whole[p.box]) for p in share.pieces]) == whole[box]).all()
        assert share.writer in {p.rank for p in share.pieces}


def _inside(box: tuple[slice, ...], outer: tuple[slice, ...]) -> bool:
    return all(o.start <= s.start and s.stop <= o.stop for s, o in zip(box, outer, strict=True))


def test_replicas_share_the_work() -> None:
    """Of ranks that all hold everything, each writes about as much."""
    shape = (64, 24)
    all_hold = SpreadTensor(shape, 4, (HeldBox(whole_box(shape), (0, 1, 2, 3)),))
    written = [share.writer for shares in share_blocks([all_hold] * 3) for share in shares]
    assert max(map(written.count, range(4))) - min(map(written.count, range(4))) <= 1


def test_shards_that_end_where_blocks_do_are_not_sent() -> None:
    """Rows or columns over 2 or 4 ranks: each writes its own."""
    for nd in ((S(0),), (S(1),)):
        (shares,) = share_blocks([spread((32, 32), 4, nd, Mesh({"tp": 4}))])
        assert all({p.rank for p in share.pieces} == {share.writer} for share in shares)


def test_boxes_that_leave_a_gap_are_refused() -> None:
    """A rank that nobody counted would otherwise be missing from a checkpoint."""
    with pytest.raises(CheckpointError, match="don't tile"):
        share_blocks([SpreadTensor((8, 8), 4, (HeldBox((slice(0, 4), slice(0, 8)), (0,)),))])

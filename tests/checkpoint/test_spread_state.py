"""A state that lies on many ranks is saved by all of them, each its blocks: the root is that of one process, always."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.checkpoint import (
    CheckpointRef,
    Manifest,
    Save,
    StateReader,
    Store,
    TensorKey,
    block_box,
    block_from_pieces,
    collect_garbage,
    share_blocks,
    state_record,
    tensor_record,
)
from laminar.checkpoint.format import block_grid
from laminar.checkpoint.store.memory import MemoryStore
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import B, NdSbp, S
from tests.support.spread_tensors import spread
from tests.support.stored_states import SCALARS, Arrays, assert_holds, bits, save_arrays

ITEM = {"f32": 4, "bf16": 2}


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> object:
    """So that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_grid, "BLOCK_BYTES", 512)
        yield


def save_spread(store: Store, arrays: Arrays, layout: dict[TensorKey, NdSbp], mesh: Mesh, after: int) -> CheckpointRef:
    """Every rank writes its share with a `Save` of its own; the first one commits, and then all leases end."""
    keys = list(arrays)
    shares = share_blocks([spread(arrays[k][1].shape, ITEM[arrays[k][0]], layout[k], mesh) for k in keys])
    saves = [Save(store) for _ in range(mesh.ranks)]
    hashes: dict[TensorKey, dict[int, bytes]] = {k: {} for k in keys}
    for key, blocks in zip(keys, shares, strict=True):
        dtype, array = arrays[key]
        for share in blocks:
            box = block_box(array.shape, ITEM[dtype], share.number)
            content = block_from_pieces(box, [(p.box, array[p.box]) for p in share.pieces])
            flat = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
            hashes[key][share.number] = saves[share.writer].blocks.add(flat.data)
    for save in saves:
        save.finish()
    collect_garbage(store)
    records = [
        tensor_record(k, d, a.shape, [hashes[k][n] for n in range(len(hashes[k]))]) for k, (d, a) in arrays.items()
    ]
    ref = saves[0].commit(Manifest("run", after, state_record(records, SCALARS)), after)
    for save in saves:
        save.abort()
    return ref


def placements(data: st.DataObject, shape: tuple[int, ...], mesh: Mesh) -> NdSbp:
    """Any that a plan could have for a state: whole or split, on each axis."""
    choices = [B, *(S(d) for d in range(len(shape)))]
    packed = [S(d, blocks=3) for d, n in enumerate(shape) if n % 3 == 0]  # of what no axis before has split
    first = data.draw(st.sampled_from([*choices, *packed]))
    return (first, *(data.draw(st.sampled_from(choices)) for _ in mesh.sizes[1:]))


@settings(max_examples=40)
@given(st.data())
def test_the_root_does_not_hang_on_the_layout(data: st.DataObject) -> None:
    """Random tensors in random layouts on meshes of up to eight ranks, and a collection before the commit."""
    arrays = {
        TensorKey("parameter", f"w{i}"): (dtype, bits(dtype, tuple(data.draw(shape)), i))
        for i, dtype in enumerate(data.draw(st.lists(st.sampled_from(["f32", "bf16"]), min_size=1, max_size=3)))
        for shape in [st.lists(st.integers(1, 24), max_size=3)]
    }
    alone = save_arrays(MemoryStore(), arrays)
    store = MemoryStore()
    for after in range(2):
        sizes = data.draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (2, 4), (8,)]))
        mesh = Mesh({f"a{i}": n for i, n in enumerate(sizes)})
        layout = {k: placements(data, a.shape, mesh) for k, (_, a) in arrays.items()}
        ref = save_spread(store, arrays, layout, mesh, after)
        assert ref.root == alone.root
        assert_holds(store, ref, arrays)
        reader = StateReader(store, ref)
        for key, (dtype, array) in arrays.items():
            for held in spread(array.shape, ITEM[dtype], placements(data, array.shape, mesh), mesh).held:
                assert (reader.read(key, held.box) == array[held.box]).all()

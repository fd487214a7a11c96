"""How blocks are stored: small where that pays, and what comes back is what went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.checkpoint import Save, TensorKey, block_count
from laminar.checkpoint.format import encoding
from laminar.checkpoint.format.encoding import (
    DELTA,
    DELTA16,
    MOST_DELTAS,
    UNCODED,
    ZSTD,
    decode_block,
    encode_block,
)
from laminar.checkpoint.packs.block_index import BlockIndex
from laminar.checkpoint.store.memory import MemoryStore
from laminar.errors import CheckpointError
from tests.support.stored_states import assert_holds, bits, save_arrays

KEY = TensorKey("parameter", "w")


@given(
    st.integers(0, 5000), st.sampled_from([1, 2, 4]), st.integers(0, 3), st.sampled_from([1, 4, 256]), st.integers(0, 9)
)
def test_what_is_stored_comes_back(items: int, item: int, changes: int, levels: int, seed: int) -> None:
    """Random and regular content, with a base that is close, far away or of another length."""
    dice = np.random.default_rng(seed)
    plain = dice.integers(0, levels, items * item, np.uint8)
    base = plain.copy() if changes < 3 else dice.integers(0, 256, len(plain), np.uint8)
    base[dice.integers(0, len(plain), changes) if len(plain) else []] ^= 1
    for given_base in (None, base.data, base.data[1:]):
        stored = encode_block(plain.data, item, given_base)
        assert bytes(decode_block(stored.encoding, stored.data, len(plain), given_base)) == plain.tobytes()
        assert len(stored.data) <= len(plain)


def test_the_form_that_takes_little_room_is_chosen() -> None:
    """Random numbers stay as they are, regular ones are compressed, close ones become deltas."""
    random = bits("f32", (1 << 18,)).view(np.uint8)
    near = random.copy()
    near[:100] ^= 1
    assert encode_block(random.data).encoding == UNCODED
    assert encode_block(np.zeros(1 << 20, np.uint8).data).encoding == ZSTD
    assert encode_block(near.data, 4, random.data).encoding == DELTA
    assert encode_block(near.data, 2, random.data).encoding == DELTA16
    assert encode_block(near.data, 2, random.data, MOST_DELTAS).encoding == UNCODED


def test_weights_of_the_next_step_take_a_tenth() -> None:
    """bf16 weights of a usual size after one step of Adam at a learning rate of 1e-5."""
    dice = np.random.default_rng(0)
    weights = dice.normal(0, 0.02, 1 << 20).astype(np.float32)
    after = weights - 1e-5 * np.clip(dice.normal(0, 0.3, 1 << 20), -1, 1).astype(np.float32)
    one, two = ((w.view(np.uint32) + 0x8000 >> 16).astype(np.uint16).view(np.uint8) for w in (weights, after))
    assert len(two) > 10 * len(encode_block(two.data, 2, one.data).data)


def test_chains_of_deltas_are_short() -> None:
    """Every so often a block is written without a base, and every step reads."""
    store, array, last = MemoryStore(), bits("bf16", (64, 64), levels=250), None
    for step in range(2 * MOST_DELTAS + 4):
        array = array.copy()
        array[step, 0] ^= 1
        last = save_arrays(store, {KEY: ("bf16", array)}, after=step, step=step, parent=last)
        assert_holds(store, last, {KEY: ("bf16", array)})
    depths = [p.depth for places in BlockIndex(store).packs().values() for p in places]
    assert max(depths) == MOST_DELTAS and depths.count(0) == 3


def test_without_zstandard_blocks_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving works; what others have compressed is refused by name."""
    regular = np.zeros(1 << 12, np.uint8)
    stored = encode_block(regular.data)
    monkeypatch.setattr(encoding, "_zstandard", lambda: None)
    assert encode_block(regular.data).encoding == UNCODED
    with pytest.raises(CheckpointError, match="zstandard is not installed"):
        decode_block(stored.encoding, stored.data, 1 << 12)


def test_without_blake3_saving_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be saved or read without the hash."""
    import sys

    from laminar.checkpoint.format import hashing

    monkeypatch.setitem(sys.modules, "blake3", None)
    hashing._blake3.cache_clear()
    with pytest.raises(CheckpointError, match="blake3 is not installed"), Save(MemoryStore()) as save:
        save.blocks.add(memoryview(b"x"))
    monkeypatch.undo()
    hashing._blake3.cache_clear()


def test_one_tensor_of_many_costs_its_own_bytes() -> None:
    """Of 64 tensors one changes: at most a fiftieth of the bytes is written."""
    store = MemoryStore()
    state = {TensorKey("parameter", f"w{i}"): ("f32", bits("f32", (64, 64), i)) for i in range(64)}
    first = save_arrays(store, state)
    state[TensorKey("parameter", "w7")] = "f32", bits("f32", (64, 64), 99)
    before = sum(f.size for f in store.list("packs"))
    save_arrays(store, state, after=1, step=1, parent=first)
    assert 64 * 64 * 4 < sum(f.size for f in store.list("packs")) - before < before / 50
    assert block_count((64, 64), 4) == 1

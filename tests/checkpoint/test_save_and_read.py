"""A state into a store and back: bit for bit, in whole and in part, and never silently otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from laminar.checkpoint import StateReader, TensorKey, latest_valid, open_store, verify_checkpoint
from laminar.checkpoint.format import block_grid
from laminar.errors import CheckpointError
from tests.support.stored_states import assert_holds, bits, save_arrays, small_state


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Whole tensors and slices of them, scalars and what stands around."""
    store, state = open_store(tmp_path), small_state()
    ref = save_arrays(store, state, step=3)
    assert_holds(store, ref, state)
    key = TensorKey("parameter", "up.weight")
    reader = StateReader(store, ref)
    assert (reader.read(key, (slice(3, 9), slice(5, 24))) == state[key][1][3:9, 5:24]).all()
    assert reader.manifest.state.scalars["seed"] == 7 and reader.manifest.about == {"plan": "hand-made"}
    assert verify_checkpoint(store, ref).ok and latest_valid(store, "run").ref == ref


def test_a_slice_reads_just_the_blocks_it_touches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor of many blocks, one is read for a slice inside of it."""
    monkeypatch.setattr(block_grid, "BLOCK_BYTES", 1 << 10)
    whole = bits("f32", (64, 64))
    key = TensorKey("parameter", "w")
    store = open_store(tmp_path)
    ref = save_arrays(store, {key: ("f32", whole)})
    reader = StateReader(store, ref)
    asked: list[bytes] = []
    read = reader.blocks.read
    monkeypatch.setattr(reader.blocks, "read", lambda block, size: (asked.append(block), read(block, size))[1])
    assert (reader.read(key, (slice(1, 9), slice(3, 7))) == whole[1:9, 3:7]).all()
    assert len(asked) == 1 and reader.tensor(key).blocks == 16


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    """By verifying and by reading; the checkpoint before is the last valid one."""
    store, state = open_store(tmp_path), small_state()
    first = save_arrays(store, state)
    changed = {**state, TensorKey("buffer", "mean"): ("f64", bits("f64", (3,), 99))}
    second = save_arrays(store, changed, after=1, step=1)
    (pack,) = (p for p in (tmp_path / "packs").iterdir() if p.stat().st_size < 300)
    data = bytearray(pack.read_bytes())
    data[10] ^= 4
    pack.write_bytes(data)
    (damage,) = verify_checkpoint(store, second).damage
    assert damage.tensor == TensorKey("buffer", "mean") and damage.box == (slice(0, 3),)
    with pytest.raises(CheckpointError, match="block 0 of buffer mean"):
        StateReader(store, second).read(TensorKey("buffer", "mean"))
    found = latest_valid(store, "run")
    assert found.ref == first and found.passed_over[0].ref == second


def test_what_the_store_has_is_not_written_again(tmp_path: Path) -> None:
    """Across steps and runs: the same blocks lie there once."""
    store, state = open_store(tmp_path), small_state()
    save_arrays(store, state)
    before = {p.name for p in (tmp_path / "packs").iterdir()}
    again = save_arrays(store, state, run="other", step=5)
    assert {p.name for p in (tmp_path / "packs").iterdir()} == before
    assert_holds(store, again, state)


def test_a_root_is_of_the_state_alone(tmp_path: Path) -> None:
    """Not of run and step; any other bit is another root."""
    state = small_state()
    ref = save_arrays(open_store(tmp_path / "a"), state)
    assert save_arrays(open_store(tmp_path / "b"), state, run="other", step=9).root == ref.root
    assert save_arrays(open_store(tmp_path / "c"), state, scalars={"steps": 4}).root != ref.root
    key = TensorKey("optimizer", "up.weight", "step")
    state[key] = "f32", state[key][1] ^ np.uint32(1)
    assert save_arrays(open_store(tmp_path / "d"), state).root != ref.root


def test_a_run_is_not_continued_by_two(tmp_path: Path) -> None:
    """Who comes second with the same number is told so, and nothing is overwritten."""
    store = open_store(tmp_path)
    first = save_arrays(store, small_state())
    with pytest.raises(CheckpointError, match="another process writes this run"):
        save_arrays(store, small_state(5), step=1)
    assert latest_valid(store, "run").ref == first

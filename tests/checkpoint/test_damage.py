"""Every single bit and every length of every file of a store: what is not as it was written is found, and named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from laminar.checkpoint import (
    CheckpointRef,
    StateReader,
    TensorKey,
    collect_garbage,
    diff_checkpoints,
    latest_valid,
    list_checkpoints,
    load_manifest,
    open_store,
    shun_damaged,
    verify_checkpoint,
)
from laminar.checkpoint.read.verify import damaged_files
from laminar.errors import CheckpointError
from tests.support.stored_states import Arrays, assert_holds, bits, save_arrays

KEYS = [TensorKey("parameter", "up"), TensorKey("optimizer", "up", "exp_avg"), TensorKey("buffer", "count")]


def states() -> tuple[Arrays, Arrays]:
    """Two steps, whose blocks are stored as they are, compressed, and as deltas."""
    one = {
        KEYS[0]: ("bf16", bits("bf16", (8, 12), 1)),
        KEYS[1]: ("f32", bits("f32", (8, 12), 2, levels=2)),
        KEYS[2]: ("i64", bits("i64", (), 3)),
    }
    moved = one[KEYS[0]][1].copy()
    moved[0, 0] ^= 1
    return one, {**one, KEYS[0]: ("bf16", moved), KEYS[2]: ("i64", bits("i64", (), 4))}


def small_store(folder: Path) -> list[CheckpointRef]:
    store, (one, two) = open_store(folder), states()
    first = save_arrays(store, one)
    return [first, save_arrays(store, two, after=1, step=1, parent=first)]


def spoiled(data: bytes, stride: int) -> Iterator[bytes]:
    """Every bit flipped by itself, and every length that is too short; of these, every so manieth."""
    for at in range(0, 8 * len(data), stride):
        out = bytearray(data)
        out[at // 8] ^= 1 << at % 8
        yield bytes(out)
    for length in range(0, len(data), stride):
        yield data[:length]
    yield data + b"\0"


def assert_found(folder: Path, path: Path, refs: list[CheckpointRef]) -> None:
    """Damage in a file is told with the file, and with each tensor that lost a block by it; nothing wrong is read."""
    store = open_store(folder)
    bad = damaged_files(store)
    assert list(bad) == [str(path.relative_to(folder))]
    latest_valid(store, "run")
    for ref, arrays in zip(refs, states(), strict=True):
        found = verify_checkpoint(store, ref)
        named = {d.tensor for d in found.damage}
        if None in named:
            continue
        reader = StateReader(store, ref)
        for key, (_, array) in arrays.items():
            if key in named:
                with pytest.raises(CheckpointError, match=f"block 0 of {key}"):
                    reader.read(key)
            else:
                assert reader.read(key).tobytes() == array.tobytes()


def check_all(tmp_path: Path, stride: int) -> int:
    refs = small_store(tmp_path)
    assert not damaged_files(open_store(tmp_path))
    count = 0
    files = [p for p in sorted(tmp_path.rglob("*")) if p.is_file() and p.parts[-2] != "tmp"]
    assert {p.relative_to(tmp_path).parts[0] for p in files} == {"packs", "manifests", "refs"}
    for path in files:
        whole = path.read_bytes()
        for data in spoiled(whole, stride):
            path.write_bytes(data)
            assert_found(tmp_path, path, refs)
            count += 1
        path.write_bytes(whole)
    for ref, arrays in zip(refs, states(), strict=True):
        assert_holds(open_store(tmp_path), ref, arrays)
    return count


def test_flips_and_truncations_are_found(tmp_path: Path) -> None:
    """One in a few hundred of all that there are; all of them in the slow test below."""
    assert check_all(tmp_path, 331) > 60


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_flip_and_every_truncation_is_found(tmp_path: Path) -> None:
    """Without exception."""
    assert check_all(tmp_path, 1) > 20_000


def test_the_block_and_its_place_are_named(tmp_path: Path) -> None:
    """A flipped bit of the delta costs the second checkpoint one block; of its base, both."""
    refs = small_store(tmp_path)
    store = open_store(tmp_path)
    packs = sorted((tmp_path / "packs").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    for path, hurt in zip(packs, ([True, True], [False, True]), strict=True):
        whole = path.read_bytes()
        data = bytearray(whole)
        data[10] ^= 1
        path.write_bytes(data)
        for ref, bad in zip(refs, hurt, strict=True):
            damage = verify_checkpoint(store, ref).damage
            assert bool(damage) == bad
            for one in damage:
                assert (
                    one.tensor is not None and str(one).startswith(f"{one.tensor} block 0 [") and path.name in one.what
                )
        path.write_bytes(whole)


def test_what_is_damaged_is_written_again_and_mends_what_shares_it(tmp_path: Path) -> None:
    """Frozen weights would otherwise stay damaged in every checkpoint to come."""
    store, key = open_store(tmp_path), TensorKey("parameter", "frozen")
    arrays = {key: ("f32", bits("f32", (8, 8)))}
    first = save_arrays(store, arrays)
    (pack,) = (tmp_path / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[20] ^= 1
    pack.write_bytes(data)
    assert not verify_checkpoint(store, save_arrays(store, arrays, after=1, step=1)).ok
    assert shun_damaged(store) == (f"packs/{pack.name}",)
    third = save_arrays(store, arrays, after=2, step=2)
    assert verify_checkpoint(store, third).ok and verify_checkpoint(store, first).ok
    assert_holds(store, first, arrays)
    store.delete(f"packs/{pack.name}")
    collect_garbage(store)
    assert not store.list("damaged")


def test_a_damaged_base_is_no_reason_to_fail(tmp_path: Path) -> None:
    """The save after it is whole, and needs nothing of the one before."""
    store, key, array = open_store(tmp_path), TensorKey("parameter", "w"), bits("bf16", (32, 32))
    first = save_arrays(store, {key: ("bf16", array)})
    (pack,) = (tmp_path / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[20] ^= 1
    pack.write_bytes(data)
    later = {key: ("bf16", array ^ np.uint16(1))}
    second = save_arrays(store, later, after=1, step=1, parent=first)
    assert verify_checkpoint(store, second).ok
    assert_holds(store, second, later)


def test_checkpoints_are_listed_with_what_they_take(tmp_path: Path) -> None:
    """The second takes little more than what changed."""
    small_store(tmp_path)
    first, second = list_checkpoints(open_store(tmp_path))
    assert first.state_bytes == second.state_bytes == 8 * 12 * 6 + 8
    assert first.new_bytes == first.stored_bytes and 8 <= second.new_bytes < first.new_bytes / 2
    assert second.stored_bytes > second.new_bytes


def test_what_differs_is_told_by_tensor(tmp_path: Path) -> None:
    """Without reading a block."""
    refs, store = small_store(tmp_path), open_store(tmp_path)
    one, two = (load_manifest(store, r.manifest) for r in refs)
    changes = diff_checkpoints(one, two)
    assert [(c.key, c.changed_blocks, c.blocks) for c in changes.tensors] == [(KEYS[2], 1, 1), (KEYS[0], 1, 1)]
    assert not changes.scalars and not changes.same and diff_checkpoints(one, one).same

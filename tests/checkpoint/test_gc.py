"""What is dropped goes, what anybody refers to or is about to refer to stays, and stale leases end."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laminar.checkpoint import (
    CheckpointRef,
    Keep,
    Manifest,
    Save,
    Store,
    TensorKey,
    collect_garbage,
    drop_checkpoints,
    last_sequence,
    list_refs,
    open_store,
    state_record,
    verify_checkpoint,
)
from laminar.checkpoint.history import compact, gc
from laminar.checkpoint.history.leases import LEASES, Lease
from laminar.checkpoint.store.memory import MemoryStore
from laminar.errors import CheckpointError
from tests.support.stored_states import assert_holds, bits, save_arrays, small_state

KEY = TensorKey("parameter", "w")
KEYS_2 = TensorKey("parameter", "w2")


def packs(folder: Path) -> set[str]:
    return {p.name for p in (folder / "packs").iterdir()}


def saved(store: Store, seed: int, **more: object) -> CheckpointRef:
    return save_arrays(store, {KEY: ("f32", bits("f32", (8, 8), seed))}, **more)


def test_what_nobody_refers_to_goes_and_the_rest_stays(tmp_path: Path) -> None:
    """Packs and manifests of dropped checkpoints; blocks that another run shares are its own as well."""
    store = open_store(tmp_path)
    first, second = saved(store, 1), saved(store, 2, after=1, step=1)
    other = saved(store, 1, run="other")
    assert drop_checkpoints(store, "run", Keep(last=1)) == (first,)
    assert collect_garbage(store).packs == ()
    assert verify_checkpoint(store, other).ok
    drop_checkpoints(store, "run", Keep(last=1))
    store.delete(other.key)
    before = packs(tmp_path)
    gone = collect_garbage(store)
    assert len(gone.packs) == 1 and gone.manifests == 1 and packs(tmp_path) < before and gone.freed_bytes > 256
    assert verify_checkpoint(store, second).ok
    assert not list((tmp_path / "condemned").iterdir())


def test_a_writer_that_saw_a_block_keeps_it(tmp_path: Path) -> None:
    """It began before the collection and counts on a block that nobody else has: it is there when it commits."""
    store = open_store(tmp_path)
    dead = saved(store, 1)
    array = bits("f32", (8, 8), 1)
    with Save(store) as save:
        record = save.tensor(KEY, "f32", array.shape, array)
        store.delete(dead.key)
        assert collect_garbage(store).waiting  # nobody refers to it, but this writer may
        assert not collect_garbage(store).packs
        ref = save.commit(Manifest("new", 0, state_record([record], {})))
    assert save.blocks.written.new_blocks == 0
    assert not collect_garbage(store).packs
    assert_holds(store, ref, {KEY: ("f32", array)})


def test_a_writer_that_comes_later_does_not_count_on_what_is_condemned(tmp_path: Path) -> None:
    """It writes the block again, so that the old one may go under its hands."""
    store = open_store(tmp_path)
    dead = saved(store, 1)
    array = bits("f32", (8, 8), 1)
    store.delete(dead.key)
    early = Lease(store)
    (condemned,) = collect_garbage(store).waiting
    with Save(store) as save:
        record = save.tensor(KEY, "f32", array.shape, array)
        early.give_back()
        assert collect_garbage(store).packs == (condemned,)
        ref = save.commit(Manifest("new", 0, state_record([record], {})))
    assert save.blocks.written.new_blocks == 1
    assert_holds(store, ref, {KEY: ("f32", array)})


def test_a_stale_lease_ends_and_its_holder_must_not_commit(tmp_path: Path) -> None:
    """A writer that was stopped for longer than leases last finds out, and leaves no reference to what is gone."""
    store = open_store(tmp_path)
    dead = saved(store, 1)
    array = bits("f32", (8, 8), 1)
    with Save(store) as save:
        record = save.tensor(KEY, "f32", array.shape, array)
        store.delete(dead.key)
        for lease in (tmp_path / LEASES).iterdir():
            os.utime(lease, (time.time() - 2000,) * 2)
        assert collect_garbage(store).packs
        with pytest.raises(CheckpointError, match=r"was not written|lease of this save has run out"):
            save.commit(Manifest("new", 0, state_record([record], {})))
    assert not list_refs(store, "new").refs


def test_leftovers_of_dead_writers_go(tmp_path: Path) -> None:
    """Files in tmp, packs and manifests without a reference."""
    store = open_store(tmp_path)
    ref = saved(store, 1)
    with Save(store) as save:
        save.tensor(KEY, "f32", (8, 8), bits("f32", (8, 8), 2))
        save.finish()
    (tmp_path / "tmp" / "0123").write_bytes(b"half a pack")
    os.utime(tmp_path / "tmp" / "0123", (0, 0))
    found = collect_garbage(store)
    assert len(found.packs) == 1 and found.leftovers == 1
    assert verify_checkpoint(store, ref).ok


def test_bases_of_deltas_stay(tmp_path: Path) -> None:
    """A checkpoint whose blocks are deltas to a dropped one's still reads; where all go, all go."""
    store, array = open_store(tmp_path), bits("bf16", (64, 64), levels=128)
    first = save_arrays(store, {KEY: ("bf16", array)})
    nearly = array ^ (bits("bf16", (64, 64), 9) > 65000)
    second = save_arrays(store, {KEY: ("bf16", nearly)}, after=1, step=1, parent=first)
    store.delete(first.key)
    assert not collect_garbage(store).packs
    assert_holds(store, second, {KEY: ("bf16", nearly)})
    store.delete(second.key)
    assert len(collect_garbage(store).packs) == 2


def test_packs_that_are_needed_for_little_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one checkpoint shares with a dropped one moves to a new pack; a writer that counts on the rest keeps it."""
    monkeypatch.setattr(compact, "LEAST_FREED_BYTES", 1000)
    store = open_store(tmp_path)
    arrays = {TensorKey("parameter", f"w{i}"): ("f32", bits("f32", (8, 8), i)) for i in range(8)}
    first = save_arrays(store, arrays)
    later = {k: v if k.name == "w3" else (v[0], v[1] + np.uint32(1)) for k, v in arrays.items()}
    second = save_arrays(store, later, after=1, step=1)
    store.delete(first.key)
    old = packs(tmp_path)
    with Save(store) as save:
        dtype, array = arrays[KEYS_2]
        record = save.tensor(KEYS_2, dtype, array.shape, array)
        assert collect_garbage(store).waiting and old < packs(tmp_path)
        third = save.commit(Manifest("third", 0, state_record([record], {})))
    assert save.blocks.written.new_blocks == 0
    assert_holds(store, second, later)
    assert_holds(store, third, {KEYS_2: (dtype, array)})
    collect_garbage(store)
    collect_garbage(store)
    assert len(old & packs(tmp_path)) == 1
    assert_holds(store, second, later)
    assert_holds(store, third, {KEYS_2: (dtype, array)})
    assert sum(f.size for f in store.list("packs")) < 8 * 256 + 2 * 256 + 1800


def test_a_commit_in_the_middle_of_a_collection_keeps_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After what is needed has been copied out of a pack, a writer commits a checkpoint that needs more of it."""
    monkeypatch.setattr(compact, "LEAST_FREED_BYTES", 1000)
    store = open_store(tmp_path)
    arrays = {TensorKey("parameter", f"w{i}"): ("f32", bits("f32", (8, 8), i)) for i in range(8)}
    first = save_arrays(store, arrays)
    save_arrays(store, {k: v for k, v in arrays.items() if k.name == "w3"}, after=1, step=1)
    store.delete(first.key)
    save = Save(store)
    dtype, array = arrays[KEYS_2]
    record = save.tensor(KEYS_2, dtype, array.shape, array)
    refs = []
    leases = gc._live_leases

    def committed(*told: Any) -> set[str]:
        refs.append(save.commit(Manifest("late", 0, state_record([record], {}))))
        save.abort()
        return leases(*told)

    monkeypatch.setattr(gc, "_live_leases", committed)
    assert not collect_garbage(store).packs
    assert_holds(store, refs[0], {KEYS_2: (dtype, array)})


def test_nothing_goes_while_a_reference_can_not_be_read(tmp_path: Path) -> None:
    """It might refer to anything."""
    store = open_store(tmp_path)
    ref = saved(store, 1)
    (tmp_path / ref.key).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="nothing can be removed while refs/run/0000000001"):
        collect_garbage(store)
    assert packs(tmp_path)


def test_collections_take_turns(tmp_path: Path) -> None:
    """One that is under way is not joined; one that died is taken over when its time is up."""
    store = open_store(tmp_path)
    saved(store, 1)
    store.put_new("gc/0000000007", b"")
    with pytest.raises(CheckpointError, match="another collection is at work"):
        collect_garbage(store)
    os.utime(tmp_path / "gc" / "0000000007", (0, 0))
    collect_garbage(store)
    assert {p.name for p in (tmp_path / "gc").iterdir()} == {"0000000008", "0000000008.done", "clock"}


def test_a_collection_that_others_took_for_dead_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for long, and another one has its turn: it must not remove anything by what it knew."""
    store = open_store(tmp_path)
    store.delete(saved(store, 1).key)
    leases = gc._live_leases

    def stopped(*told: Any) -> set[str]:
        store.put_new("gc/0000000002", b"")
        return leases(*told)

    monkeypatch.setattr(gc, "_live_leases", stopped)
    with pytest.raises(CheckpointError, match="another collection has begun"):
        collect_garbage(store)
    assert packs(tmp_path)


def test_a_commit_whose_blocks_have_gone_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its last look at them and its reference: the reference does not stay."""
    store = open_store(tmp_path)
    with Save(store) as save:
        array = bits("f32", (8, 8), 1)
        record = save.tensor(KEY, "f32", array.shape, array)
        put = store.put_new

        def late(key: str, data: bytes) -> bool:
            for pack in packs(tmp_path):
                store.delete(f"packs/{pack}")
            return put(key, data)

        monkeypatch.setattr(store, "put_new", late)
        with pytest.raises(CheckpointError, match="was not written"):
            save.commit(Manifest("run", 0, state_record([record], {})))
    assert not list_refs(store).refs


@pytest.mark.parametrize(
    ("text", "keep"), [("last 3, every 1000 steps", Keep(3, 1000)), ("2", Keep(2)), ("3 every 10", Keep(3, 10))]
)
def test_what_is_kept_can_be_said(text: str, keep: Keep) -> None:
    """As the command line does."""
    assert Keep.parse(text) == keep


def test_retention_counts_only_what_is_whole(tmp_path: Path) -> None:
    """Checkpoints that can't be read don't push out those that can."""
    store = open_store(tmp_path)
    refs = [saved(store, seed, after=seed, step=10 * seed) for seed in range(6)]
    for ref in refs[4:]:
        (tmp_path / "manifests" / ref.manifest).write_bytes(b"")
    dropped = drop_checkpoints(store, "run", Keep(last=2, every=20))
    assert dropped == (refs[1],)  # 2 and 3 are the last whole ones, 0 stays for its step


def test_a_chain_of_a_hundred_saves_with_collections_restores_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each a few bits from the one before, with drops and collections in between; all that is kept is right."""
    monkeypatch.setattr(compact, "LEAST_FREED_BYTES", 1)
    dice, store = random.Random(5), MemoryStore()
    state = small_state()
    kept: dict[int, tuple[CheckpointRef, dict]] = {}
    last = None
    for step in range(100):
        key = dice.choice([k for k, (_, a) in state.items() if a.size])
        dtype, array = state[key]
        changed = array.copy().reshape(-1)
        changed[dice.randrange(changed.size)] ^= changed.dtype.type(1 << dice.randrange(8))
        state = {**state, key: (dtype, changed.reshape(array.shape))}
        last = save_arrays(store, state, after=last_sequence(store, "run"), step=step, parent=last)
        kept[step] = last, state
        if dice.random() < 0.3:
            for ref in drop_checkpoints(store, "run", Keep(dice.randint(1, 4), dice.choice([0, 10]))):
                del kept[ref.step]
        if dice.random() < 0.2:
            collect_garbage(store)
    assert {ref.step for ref in list_refs(store, "run").refs} == set(kept)
    for ref, there in kept.values():
        assert_holds(store, ref, there)

"""A crash, an error, a full disk at every single call of a save: the store has the old or the new, and goes on working.

Each test first counts the calls that a save makes to the file system, and then repeats it once for every one of them.
"""

from __future__ import annotations

import errno

import numpy as np
import pytest

from laminar.checkpoint import CheckpointRef, Save, TensorKey, collect_garbage, last_sequence, latest_valid, list_refs
from laminar.checkpoint.store.local import LocalStore
from laminar.errors import StorageError
from tests.support.crashing_files import Crash, CrashingFiles
from tests.support.stored_states import assert_holds, save_arrays, small_state

OLD = small_state(1)
KEY = TensorKey("parameter", "up.weight")
NEW = {**OLD, KEY: (OLD[KEY][0], OLD[KEY][1] ^ np.uint16(1))}
HOW = [("kept", 0), ("dropped", 0), *[("drawn", seed) for seed in range(4)]]


def store_on(files: CrashingFiles) -> LocalStore:
    return LocalStore("disk", files)


def with_old() -> tuple[CrashingFiles, CheckpointRef]:
    """A disk with one checkpoint, durable."""
    files = CrashingFiles()
    ref = save_arrays(store_on(files), OLD)
    return files.after_crash("dropped"), ref


def save_new(files: CrashingFiles, old: CheckpointRef) -> CheckpointRef:
    return save_arrays(store_on(files), NEW, after=1, step=1, parent=old)


def calls_of_a_save() -> int:
    files, old = with_old()
    save_new(files, old)
    return files.calls


def copied(files: CrashingFiles) -> CrashingFiles:
    return files.after_crash("kept")


CALLS = calls_of_a_save()


def assert_old_or_new(files: CrashingFiles, old: CheckpointRef) -> None:
    """Whatever is referred to is whole; another save succeeds, and a collection takes nothing that is needed."""
    store = store_on(files)
    found = latest_valid(store, "run")
    assert not found.passed_over and not found.damaged_refs
    assert found.ref is not None
    assert_holds(store, found.ref, OLD if found.ref == old else NEW)
    assert found.ref == old or found.ref.sequence == 2
    again = save_arrays(store, NEW, after=last_sequence(store, "run"), step=2, parent=found.ref)
    collect_garbage(store, lease_s=0)
    assert_holds(store, again, NEW)
    for ref in list_refs(store, "run").refs:
        assert_holds(store, ref, OLD if ref == old else NEW)


def test_a_save_makes_as_many_calls_as_are_tried_here() -> None:
    """Enough that none of a save's parts can be missing from the count."""
    assert 20 < CALLS < 80


@pytest.mark.parametrize("call", range(1, CALLS + 1))
def test_a_crash_at_any_call_leaves_old_or_new(call: int) -> None:
    """In every way in which what was not synced may be lost."""
    start, old = with_old()
    for how, seed in HOW:
        files = copied(start)
        files.crash_at = call
        with pytest.raises(Crash):
            save_new(files, old)
        assert_old_or_new(files.after_crash(how, seed), old)


def test_what_has_returned_is_durable() -> None:
    """The power goes right after a save: it is there."""
    start, old = with_old()
    new = save_new(start, old)
    left = start.after_crash("dropped")
    assert latest_valid(store_on(left), "run").ref == new


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_an_error_at_any_call_is_told_and_costs_nothing(number: int, lasting: bool) -> None:
    """A full disk, a broken one, one that can't be written: a save fails with our error or succeeds, never halfway."""
    start, old = with_old()
    arrays = {k: a.tobytes() for k, (_, a) in NEW.items()}
    told = 0
    for call in range(1, CALLS + 1):
        files = copied(start)
        if lasting:
            files.fail_from = call, number
        else:
            files.fail_at = {call: number}
        try:
            save_new(files, old)
        except StorageError as error:
            told += 1
            assert "next" in error.lines
        files.fail_from = None
        assert {k: a.tobytes() for k, (_, a) in NEW.items()} == arrays
        assert_old_or_new(files, old)
    assert told > CALLS // 2


def test_a_crash_at_any_call_of_a_collection_loses_nothing() -> None:
    """What is referred to stays, and the next collection ends the work."""
    start = CrashingFiles()
    first = save_arrays(store_on(start), OLD)
    kept = save_arrays(store_on(start), NEW, run="kept")
    store_on(start).delete(first.key)
    probe = copied(start)
    collect_garbage(store_on(probe), lease_s=0)
    for call in range(1, probe.calls + 1):
        for how, seed in HOW:
            files = copied(start)
            files.crash_at = call
            with pytest.raises(Crash):
                collect_garbage(store_on(files), lease_s=0)
            left = store_on(files.after_crash(how, seed))
            assert_holds(left, kept, NEW)
            collect_garbage(left, lease_s=0)
            assert_holds(left, kept, NEW)
            assert [f.key for f in left.list("condemned")] == []


def test_after_a_failed_write_nothing_more_is_written() -> None:
    """A pack that lost a block in its middle must never be ended, whoever asks again."""
    start, _ = with_old()
    store = store_on(start)
    with Save(store) as save:
        for number in range(3):
            start.fail_at = {start.calls + 1: errno.ENOSPC} if number == 1 else {}
            save.blocks.add(memoryview(bytes([number] * 64)))
            save.blocks._pool.submit(int).result()  # the write before is over
        start.fail_at = {}
        for _ in range(3):
            with pytest.raises(StorageError):
                save.finish()
    assert len(store.list("packs")) == 1 and not store.list("tmp")

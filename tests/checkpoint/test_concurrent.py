"""Several processes at one store: writers of two runs, collections, and a reader, all at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from laminar.checkpoint import (
    CheckpointRef,
    Keep,
    StateReader,
    TensorKey,
    collect_garbage,
    drop_checkpoints,
    last_sequence,
    list_refs,
    open_store,
    verify_checkpoint,
)
from laminar.checkpoint.history import compact
from laminar.errors import CheckpointError
from tests.support.stored_states import Arrays, assert_holds, bits, save_arrays

KEYS = [TensorKey("parameter", f"w{i}") for i in range(6)]
ROUNDS = 25


def state_of(run: str, step: int) -> Arrays:
    """Some tensors never change and are those of both runs, some come back every few steps, one is new each time."""
    seeds = [1, 2, 100 + step % 3, 200 + step % 4, 300 + step % 5, hash_of(run) + step]
    return {k: ("bf16", bits("bf16", (40, 40), seed)) for k, seed in zip(KEYS, seeds, strict=True)}


def hash_of(run: str) -> int:
    return 1000 * (1 + sum(run.encode()) % 50)


def train(folder: str, run: str, rounds: int = ROUNDS) -> None:
    """Save, drop, collect, again and again."""
    store = open_store(folder)
    last: CheckpointRef | None = None
    compact.LEAST_FREED_BYTES = 1
    for step in range(rounds):
        last = save_arrays(store, state_of(run, step), run, last_sequence(store, run), step, last)
        drop_checkpoints(store, run, Keep(2))
        try:
            collect_garbage(store)
        except CheckpointError as error:
            assert "another collection" in error.what, error


def process(folder: Path, run: str) -> subprocess.Popen[str]:
    code = f"from tests.checkpoint.test_concurrent import train; train({str(folder)!r}, {run!r})"
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)


def test_two_processes_save_and_collect_while_others_read(tmp_path: Path) -> None:
    """Every checkpoint that is there at the end is whole, and so is each that a reader has in hand and nobody drops."""
    open_store(tmp_path)
    running = [process(tmp_path, run) for run in ("one", "two")]
    store, read = open_store(tmp_path), 0
    while any(p.poll() is None for p in running):
        for run in ("one", "two"):
            refs = list_refs(store, run).refs
            if not refs:
                continue
            try:
                assert_holds(store, refs[-1], state_of(run, refs[-1].step))
                read += 1
            except CheckpointError:
                assert refs[-1] not in list_refs(store, run).refs  # dropped meanwhile; anything else is a fault
    for p in running:
        _, said = p.communicate(timeout=60)
        assert p.returncode == 0, said
    assert read >= 4
    for run in ("one", "two"):
        refs = list_refs(store, run).refs
        assert [r.step for r in refs] == [ROUNDS - 2, ROUNDS - 1]
        for ref in refs:
            assert verify_checkpoint(store, ref).ok
            assert_holds(store, ref, state_of(run, ref.step))


def test_two_processes_that_continue_one_run(tmp_path: Path) -> None:
    """One of them is told so; what the other has committed stays whole."""
    running = [process(tmp_path, "same") for _ in range(2)]
    said = [p.communicate(timeout=100)[1] for p in running]
    store = open_store(tmp_path)
    refs = list_refs(store, "same").refs
    assert refs and all(verify_checkpoint(store, ref).ok for ref in refs)
    assert any(p.returncode == 0 for p in running)
    for p, text in zip(running, said, strict=True):
        assert p.returncode == 0 or "another process writes this run" in text, text


def test_collections_during_a_save_take_nothing_it_needs(tmp_path: Path) -> None:
    """A thread collects all the time, with everything dropped that can be; each save commits and is whole."""
    store, stop, failures = open_store(tmp_path), threading.Event(), list[BaseException]()

    def collect() -> None:
        while not stop.is_set():
            try:
                collect_garbage(open_store(tmp_path))
            except BaseException as error:
                failures.append(error)
                return

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        for step in range(15):
            state = {k: ("u8", bits("u8", (300,), seed % 4)) for seed, k in enumerate(KEYS, step)}
            ref = save_arrays(store, state, f"run{step}", 0, step)
            assert_holds(store, ref, state)
            store.delete(ref.key)
    finally:
        stop.set()
        thread.join(60)
    assert not failures


def test_a_reader_finds_blocks_that_were_moved_to_another_pack(tmp_path: Path) -> None:
    """Its index is of before; it looks again, and reads on."""
    store, array = open_store(tmp_path), np.arange(100, dtype=np.uint32)
    ref = save_arrays(store, {KEYS[0]: ("u32", array)})
    reader = StateReader(store, ref)
    (pack,) = store.list("packs")
    content = store.read(pack.key)
    store.put("packs/moved.pack", content)
    store.delete(pack.key)
    assert (reader.read(KEYS[0]) == array).all()
    store.delete("packs/moved.pack")
    with pytest.raises(CheckpointError, match=r"block 0 of parameter w0"):
        reader.read(KEYS[0])

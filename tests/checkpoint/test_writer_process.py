"""A process of its own writes checkpoints: the same bits, bounded memory, and a defined end whoever dies first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from laminar.checkpoint import (
    BlockSource,
    CheckpointRef,
    Manifest,
    PieceSource,
    TensorKey,
    WriterProcess,
    block_box,
    block_count,
    last_sequence,
    list_refs,
    load_checkpoint,
    open_store,
    state_record,
    tensor_record,
)
from laminar.checkpoint.format import block_grid
from laminar.checkpoint.process.shared_memory import SegmentBudget
from laminar.errors import CheckpointError, StorageError
from tests.support.stored_states import assert_holds, bits, save_arrays

KEY = TensorKey("parameter", "w")
PATIENCE_S = 20


def sources(shape: tuple[int, ...]) -> list[BlockSource]:
    """The blocks of an f32 tensor that lies whole at the beginning of a segment."""
    out = []
    for number in range(block_count(shape, 4)):
        box = tuple((s.start, s.stop) for s in block_box(shape, 4, number))
        out.append(BlockSource(tuple(b - a for a, b in box), 4, (PieceSource(0, shape, box),)))
    return out


def write(writer: WriterProcess, array: np.ndarray, after: int = 0, step: int = 0) -> CheckpointRef:
    segment = writer.segments.segment(array.nbytes)
    segment.memory[:] = array.tobytes()
    writer.begin()
    hashes = writer.add(segment, sources(array.shape))
    writer.finish()
    record = tensor_record(KEY, "f32", array.shape, hashes.result(PATIENCE_S))
    ref = writer.commit(Manifest("run", step, state_record([record], {})), after)
    ended = writer.end()
    writer.free(segment)
    ended.result(PATIENCE_S)
    return ref.result(PATIENCE_S)


def gone(pid: int) -> bool:
    """Whether a process ends in time."""
    for _ in range(10 * PATIENCE_S):
        if not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_it_writes_what_one_process_would(tmp_path: Path) -> None:
    """The same root, block by block, for several saves; what did not change is not written again."""
    array = bits("f32", (1500, 1000))
    with WriterProcess(tmp_path / "a", 1 << 30) as writer:
        ref = write(writer, array)
        again = write(writer, array, after=1, step=1)
        loaded = Path(f"/proc/{writer.pid}/maps").read_text()
    store = open_store(tmp_path / "a")
    assert_holds(store, ref, {KEY: ("f32", array)})
    assert ref.root == again.root == save_arrays(open_store(tmp_path / "b"), {KEY: ("f32", array)}, scalars={}).root
    assert len(store.list("packs")) == 1
    assert "torch" not in loaded


def test_blocks_are_put_together_from_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks' columns in one segment make one block."""
    whole = bits("f32", (6, 10))
    left, right = whole[:, :4].copy(), whole[:, 4:].copy()
    with WriterProcess(tmp_path, 1 << 20) as writer:
        segment = writer.segments.segment(whole.nbytes)
        segment.memory[:] = left.tobytes() + right.tobytes()
        pieces = (
            PieceSource(0, (6, 4), ((0, 6), (0, 4)), (0, 0)),
            PieceSource(left.nbytes, (6, 6), ((0, 6), (0, 6)), (0, 4)),
        )
        writer.begin()
        (block,) = writer.add(segment, [BlockSource((6, 10), 4, pieces)]).result(PATIENCE_S)
    assert block == save_block(tmp_path / "b", whole)


def save_block(folder: Path, array: np.ndarray) -> bytes:
    store = open_store(folder)
    ref = save_arrays(store, {KEY: ("f32", array)})

    return load_checkpoint(store, ref).state.tensors[0].hashes


def test_failures_come_back_with_their_words_and_pass(tmp_path: Path) -> None:
    """A save that fails does not spoil the next one."""
    array = bits("f32", (4, 4))
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "packs").write_text("in the way")
    with WriterProcess(tmp_path / "s", 1 << 20) as writer:
        segment = writer.segments.segment(array.nbytes)
        begun = writer.begin()
        added = writer.add(segment, sources((4, 4)))
        for future in (begun, added):
            with pytest.raises(StorageError, match="can't be"):
                future.result(PATIENCE_S)
        writer.end().result(PATIENCE_S)
        writer.free(segment)
        (tmp_path / "s" / "packs").unlink()
        assert write(writer, array).sequence == 1


def test_a_writer_that_dies_is_noticed(tmp_path: Path) -> None:
    """By everyone who waits, and by whoever asks later; nothing was committed."""
    with WriterProcess(tmp_path, 1 << 20) as writer:
        writer.begin().result(PATIENCE_S)
        os.kill(writer.pid, signal.SIGKILL)
        with pytest.raises(CheckpointError, match="has ended"):
            writer.finish().result(PATIENCE_S)
        with pytest.raises(CheckpointError, match="has ended"):
            writer.finish().result(PATIENCE_S)
    assert not list_refs(open_store(tmp_path)).refs


def test_a_signal_to_the_whole_job_does_not_end_a_save(tmp_path: Path) -> None:
    """SIGTERM goes to every process of a job; the job decides what becomes of its last save."""
    with WriterProcess(tmp_path, 1 << 20) as writer:
        writer.begin().result(PATIENCE_S)
        os.kill(writer.pid, signal.SIGTERM)
        os.kill(writer.pid, signal.SIGINT)
        writer.end().result(PATIENCE_S)
        ref = write(writer, bits("f32", (4, 4)))
        pid = writer.pid
    assert gone(pid) and list_refs(open_store(tmp_path)).refs == (ref,)


ORPHAN = """
import os, signal, sys
import numpy as np
from laminar.checkpoint import WriterProcess
from tests.checkpoint.test_writer_process import sources
writer = WriterProcess(sys.argv[1], 1 << 30)
segment = writer.segments.segment(256 << 20)
segment.memory[:] = np.random.default_rng(0).bytes(256 << 20)
writer.begin().result(20)
writer.add(segment, sources((8192, 8192)))
print(writer.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """However that ends; a save under way is given up, and its lease with it."""
    before = save_arrays(open_store(tmp_path), {KEY: ("f32", bits("f32", (4, 4)))})
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    ran = subprocess.run(
        [sys.executable, "-c", ORPHAN, str(tmp_path)], env=env, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert gone(int(ran.stdout))
    store = open_store(tmp_path)
    assert list_refs(store).refs == (before,) and last_sequence(store, "run") == 1
    assert not store.list("leases") and not store.list("tmp")


def test_memory_in_use_is_bounded() -> None:
    """Who wants more waits until something is given back, and is told if nothing is."""
    budget = SegmentBudget(100)
    first = budget.segment(60)
    with pytest.raises(CheckpointError, match="behind"):
        budget.segment(60, timeout_s=0.05)
    first.free()
    first.free()
    second = budget.segment(100, timeout_s=1)
    with pytest.raises(CheckpointError, match="never fit"):
        budget.segment(101)
    second.free()
    assert budget.used_bytes == 0


def own_bytes(pid: int) -> int:
    """Most memory that a process had by itself: its peak, less what it shares."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))


def test_it_needs_little_memory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 128 MiB, however large the state: blocks are read where they lie."""
    monkeypatch.undo()
    assert block_grid.BLOCK_BYTES == 4 << 20
    size = 256 << 20
    with WriterProcess(tmp_path, size) as writer:
        segment = writer.segments.segment(size)
        np.frombuffer(segment.memory, np.uint32)[:] = np.random.default_rng(0).integers(
            0, 1 << 32, size // 4, np.uint32
        )
        writer.begin()
        writer.add(segment, sources((8192, 8192)))
        finished, peak = writer.finish(), 0
        while not finished.done():
            peak = max(peak, own_bytes(writer.pid))
            time.sleep(0.005)
        assert finished.result().new_bytes == size and writer.progress.blocks > 0
    assert 10 << 20 < peak < 128 << 20

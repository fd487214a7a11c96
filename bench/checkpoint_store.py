"""How fast are checkpoints written, verified and read beside a plain file, and how many bytes does a change cost?

    python bench/checkpoint_store.py [--mib 512] [--rounds 7] [--folder DIR]

Needs a disk with three times the room, numpy, blake3 and zstandard; no torch in what is measured. Both sides write the
same bytes durably, in turns: into a folder that is there, or a store that has a small checkpoint, as from the second
save of a run on. What was written is removed and the disk left alone for a moment between them.

- `write`: all of a state (64 float32 tensors of random bits) with its commit, beside writing the same bytes with
  `os.write` and one fsync; once in this process, once by the writer process out of shared memory, whose own memory is
  watched. On a machine that is busy with other work, seconds say little: processor time per GiB is told beside them
  (the writer process's with its start, and with the copy into shared memory).
- `read`: every tensor, verified, beside reading the plain file into memory that is there.
- `change`: bytes written when 1 of 64 tensors changed.
- `delta`: bytes of bf16 weights one step of Adam at a learning rate of 1e-5 later. The weights are drawn, not trained.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import ratio, report

from laminar.checkpoint import (
    BlockSource,
    CheckpointRef,
    Manifest,
    PieceSource,
    Save,
    StateReader,
    TensorKey,
    WriterProcess,
    block_box,
    block_count,
    load_checkpoint,
    open_store,
    state_record,
    tensor_record,
)

TENSORS = 64
STEP_BYTES = 4 << 20


def key(i: int) -> TensorKey:
    return TensorKey("parameter", f"w{i}")


def drawn(mib: int) -> np.ndarray:
    """A state as one array of tensors; bits that nothing compresses."""
    return np.random.default_rng(0).integers(0, 1 << 32, (TENSORS, (mib << 18) // TENSORS // 1024, 1024), np.uint32)


def plain(folder: Path, state: np.ndarray) -> None:
    """The same bytes in one file, durable."""
    folder.mkdir(exist_ok=True)
    data = memoryview(state.reshape(-1).view(np.uint8))
    file = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    for at in range(0, len(data), STEP_BYTES):
        os.write(file, data[at : at + STEP_BYTES])
    os.fsync(file)
    os.close(file)
    above = os.open(folder, os.O_RDONLY)
    os.fsync(above)
    os.close(above)


def saved(
    folder: Path, state: np.ndarray, dtype: str = "f32", parent: CheckpointRef | None = None, run: str = "run"
) -> CheckpointRef:
    store = open_store(folder)
    before = {} if parent is None else load_checkpoint(store, parent).state.by_key
    with Save(store) as save:
        records = [save.tensor(key(i), dtype, x.shape, x, before.get(key(i))) for i, x in enumerate(state)]
        after = 0 if parent is None else parent.sequence
        return save.commit(Manifest(run, after, state_record(records, {})), after)


class ByProcess:
    """The state in shared memory, where a snapshot would have put it, and the process that writes it."""

    def __init__(self, state: np.ndarray) -> None:
        self.state = state
        self.peak_bytes = 0

    def __call__(self, folder: Path) -> None:
        shape = self.state.shape[1:]
        with WriterProcess(folder, self.state.nbytes) as writer:
            segment = writer.segments.segment(self.state.nbytes)
            np.frombuffer(segment.memory, np.uint32)[:] = self.state.reshape(-1)
            writer.begin().result()
            start = time.perf_counter()
            hashes = [writer.add(segment, sources(shape, i)) for i in range(TENSORS)]
            done = threading.Event()
            watch = threading.Thread(target=self._watch, args=(writer.pid, done))
            watch.start()
            records = [tensor_record(key(i), "f32", shape, h.result()) for i, h in enumerate(hashes)]
            writer.commit(Manifest("run", 0, state_record(records, {}))).result()
            self.seconds = time.perf_counter() - start
            done.set()
            watch.join()

    def _watch(self, pid: int, done: threading.Event) -> None:
        while not done.wait(0.01):
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            own = sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
            self.peak_bytes = max(self.peak_bytes, own)


def sources(shape: tuple[int, ...], tensor: int) -> list[BlockSource]:
    offset, out = tensor * int(np.prod(shape)) * 4, []
    for number in range(block_count(shape, 4)):
        box = tuple((s.start, s.stop) for s in block_box(shape, 4, number))
        out.append(BlockSource(tuple(b - a for a, b in box), 4, (PieceSource(offset, shape, box),)))
    return out


Times = dict[str, list[float]]


def in_turns(sides: dict[str, Callable[[Path], float]], rounds: int, home: Path) -> tuple[Times, Times]:
    """Seconds and processor time of each side, by rounds, the order turning; what was written is removed again."""
    times: Times = {name: [] for name in sides}
    cpu: Times = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            folder = home / "turn"
            saved(folder, np.zeros((1, 1, 1), np.uint32), run="other")
            before = sum(os.times()[:4])
            seconds = sides[name](folder)
            spent = sum(os.times()[:4]) - before
            shutil.rmtree(folder)
            os.sync()
            time.sleep(0.2)
            if turn:  # the first round warms up
                times[name].append(seconds)
                cpu[name].append(spent)
    return times, cpu


def per_gib(times: Times, gib: float) -> dict[str, float]:
    return {name: round(sorted(t)[len(t) // 2] / gib, 3) for name, t in times.items()}


def timed(call: Callable[[Path], object]) -> Callable[[Path], float]:
    def run(folder: Path) -> float:
        start = time.perf_counter()
        call(folder)
        return time.perf_counter() - start

    return run


def writes(state: np.ndarray, rounds: int, home: Path) -> None:
    process = ByProcess(state)

    def by_process(folder: Path) -> float:
        process(folder)
        return process.seconds

    sides = {"plain": timed(lambda f: plain(f, state)), "ours": timed(lambda f: saved(f, state)), "process": by_process}
    times, cpu = in_turns(sides, rounds, home)
    gib = state.nbytes / 2**30
    report(
        "checkpoint_store",
        {
            "what": "write",
            "mib": state.nbytes >> 20,
            "speed_over_plain": ratio(times, "plain", "ours"),
            "process_speed_over_plain": ratio(times, "plain", "process"),
            "s_per_gib": per_gib(times, gib),
            "cpu_s_per_gib": per_gib(cpu, gib),
            "load": os.getloadavg()[0],
            "process_peak_mib": process.peak_bytes >> 20,
        },
    )


def reads(state: np.ndarray, rounds: int, home: Path) -> None:
    plain(home / "plain", state)
    ref = saved(home / "ours", state)
    out = np.empty_like(state)

    def read_plain(folder: Path) -> None:
        with open(home / "plain" / "plain", "rb", buffering=0) as file:
            view, at = memoryview(out.reshape(-1).view(np.uint8)), 0
            while at < len(view):
                at += file.readinto(view[at : at + STEP_BYTES])

    def read_ours(folder: Path) -> None:
        reader = StateReader(open_store(home / "ours"), ref)
        for i in range(TENSORS):
            reader.read_into(key(i), out[i])

    times, cpu = in_turns({"plain": timed(read_plain), "ours": timed(read_ours)}, rounds, home)
    assert (out == state).all()
    gib = state.nbytes / 2**30
    report(
        "checkpoint_store",
        {
            "what": "read, from the page cache",
            "mib": state.nbytes >> 20,
            "speed_over_plain": ratio(times, "plain", "ours"),
            "s_per_gib": per_gib(times, gib),
            "cpu_s_per_gib": per_gib(cpu, gib),
            "load": os.getloadavg()[0],
        },
    )


def bytes_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def changes(state: np.ndarray, home: Path) -> None:
    first = saved(home / "change", state)
    before = bytes_of(home / "change")
    state = state.copy()
    state[7] += 1
    saved(home / "change", state, parent=first)
    new = bytes_of(home / "change") - before
    report("checkpoint_store", {"what": "change of 1 of 64 tensors", "share_of_bytes": round(new / state.nbytes, 5)})


def deltas(home: Path) -> None:
    dice = np.random.default_rng(0)
    weights = dice.normal(0, 0.02, (4, 2048, 2048)).astype(np.float32)
    after = weights - 1e-5 * np.clip(dice.normal(0, 0.3, weights.shape), -1, 1).astype(np.float32)
    one, two = (((w.view(np.uint32) + 0x8000) >> 16).astype(np.uint16) for w in (weights, after))
    first = saved(home / "delta", one, "bf16")
    full = bytes_of(home / "delta")
    saved(home / "delta", two, "bf16", first)
    new = bytes_of(home / "delta") - full
    said = {"what": "bf16 weights a step later, drawn", "full_over_delta": round(one.nbytes / new, 2)}
    report("checkpoint_store", said | {"plain_over_full": round(one.nbytes / full, 3)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        state = drawn(asked.mib)
        writes(state, asked.rounds, Path(name))
        reads(state, asked.rounds, Path(name))
        changes(state, Path(name))
        deltas(Path(name))

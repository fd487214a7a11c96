"""Loaders of several ranks: the end of data is a handshake, and nobody begins a step that another has no batch for.

Functions whose names begin with an underscore are what a rank does.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laminar
from laminar.cost.timeline_diff import compare
from laminar.errors import BatchError, PeerError
from laminar.forecast.pipeline_step import predict_staged
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.timeline import Timeline
from laminar.train.batch.leaves import Local
from laminar.train.loop import loop
from laminar.train.world import World
from tests.support.marks import slow
from tests.support.pipeline_jobs import model as gpt
from tests.support.pipeline_jobs import planned
from tests.support.rank_pool import Ranks, heed_interrupts
from tests.support.recorded_gpt import _batches, _loss


def batch(i: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(i))


def mean(m: nn.Module, x: Any) -> Tensor:
    """A loss."""
    return m(x).square().mean()


def new_job(plan: str = "data") -> Any:
    """A small job of all ranks."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
    return laminar.parallelize(made, mean, lambda p: torch.optim.SGD(p, 0.1), batch=batch(0), plan=plan, device="cpu")


def quiet() -> bool:
    """Whether this process has no loader left."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if not [t for t in threading.enumerate() if t.name == "laminar loader"]:
            return True
        time.sleep(0.01)
    return False


def _ended(lengths: list[int], depth: int) -> tuple[int, list[str], bool]:
    """How many steps were made, what was warned, and whether the thread has ended."""
    job = new_job()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps = sum(1 for b in job.prefetch(map(batch, range(lengths[job.rank])), depth) if job.step(b).loss)
    job.close()
    return steps, [str(w.message) for w in said], quiet()


@pytest.mark.parametrize("depth", [slow(0), 1, slow(3)])
def test_ranks_with_equally_many_batches_end_without_a_word(two: Ranks, depth: int) -> None:
    """The normal case, no batch at all included."""
    assert two.run(_ended, [5, 5], depth) == [(5, [], True)] * 2
    assert two.run(_ended, [0, 0], depth) == [(0, [], True)] * 2


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("lengths", [[3, 7], [9, 4], [0, 2]])
def test_where_one_rank_has_fewer_batches_all_end_there_and_say_who(two: Ranks, lengths: list[int], depth: int) -> None:
    """No rank hangs in a step that the other does not make, however far its loader is ahead."""
    fewer = min(lengths)
    short, long = lengths.index(fewer), lengths.index(max(lengths))
    for steps, said, ended in two.run(_ended, lengths, depth):
        assert steps == fewer and ended and len(said) == 1
        assert f"the data of rank {short} ended after {fewer} batches; rank {long} had more" in said[0]


def _failed(depth: int) -> tuple[int, str, str, list[str], bool]:
    """Rank 1's data fails at batch 3."""
    job = new_job()

    def data() -> Iterator[Tensor]:
        for i in range(6):
            if job.rank == 1 and i == 3:
                raise ValueError("a broken file")
            yield batch(i)

    steps = 0
    try:
        for b in job.prefetch(data(), depth):
            job.step(b)
            steps += 1
    except Exception as error:
        found = type(error).__name__, str(error), list(getattr(error, "__notes__", []))
    job.close()
    return (steps, *found, quiet())


@pytest.mark.parametrize("depth", [0, 2])
def test_a_rank_whose_data_fails_raises_it_and_the_others_name_it(two: Ranks, depth: int) -> None:
    """All at the same step, by a message and not by a timeout."""
    zero, one = two.run(_failed, depth)
    assert one[:3] == (3, "ValueError", "a broken file") and "batch 3 (from 0) was loaded, on rank 1" in one[3][0]
    assert zero[:2] == (3, PeerError.__name__) and zero[4] and one[4]
    assert "rank 1 failed while it loaded batch 3 (from 0): ValueError: a broken file" in zero[2]


def _silent(told: Path) -> str:
    """Rank 1 loads nothing at all until rank 0 has had enough of waiting for it."""
    job = new_job()
    job.peers.timeout_s = 0.5

    def late() -> Iterator[Tensor]:
        while not told.exists():
            time.sleep(0.01)
        yield batch(0)

    loader = job.prefetch(map(batch, range(3)) if job.rank == 0 else late(), 1)
    try:
        next(loader)
        said = ""
    except PeerError as error:
        said = str(error)
    finally:
        told.touch()
        loader.close()
    dist.barrier()
    job.close()
    return said


def test_a_rank_that_never_gets_its_batch_is_named_after_the_time_limit(two: Ranks, tmp_path: Path) -> None:
    """Nobody waits for ever."""
    assert "rank 1 had not loaded batch 0 (from 0) after" in two.run(_silent, tmp_path / "told")[0]


def _left(depth: int) -> tuple[bool, int]:
    """Break out of one loader, go on with another, close the job with one open."""
    job = new_job()
    for i, b in enumerate(job.prefetch(map(batch, itertools.count()), depth)):
        job.step(b)
        if i == 2:
            break
    made = sum(1 for b in job.prefetch(map(batch, range(4)), depth) if job.step(b).loss)
    loader = job.prefetch(map(batch, itertools.count()), depth)
    job.step(next(loader))
    job.close()
    return quiet(), made


def test_ranks_may_leave_their_loaders_at_any_time(two: Ranks) -> None:
    """Threads that wait for others then end too; the next loader has nothing to do with the last."""
    assert two.run(_left, 2) == [(True, 4)] * 2


def _losses(kind: str, depth: int | None) -> tuple[list[float], str]:
    """Losses and the hash of six steps, by hand or prefetched; every rank its own share, or all of it."""
    if kind == "staged":
        made = gpt(False)
        job = laminar.parallelize(
            made, _loss, lambda p: torch.optim.SGD(p, 0.1), batch=_batches(1)[0], plan=planned(made)
        )
        data: list[Any] = _batches(6)
    else:
        job = new_job("zero3" if kind == "zero3" else "data")
        data = [batch(i) for i in range(6)]
        if kind == "local":
            data = [Local(b[2 * job.rank : 2 * job.rank + 2]) for b in data]
    found = [job.step(b).loss for b in (data if depth is None else job.prefetch(data, depth))]
    out = found, job.hash()
    job.close()
    return out


@pytest.mark.parametrize("kind", ["data", "zero3", "local", "staged"])
def test_losses_and_weights_are_the_same_bits_with_and_without_a_loader(two: Ranks, kind: str) -> None:
    """Global batches and shares, with dropout, and through a pipeline."""
    want = two.run(_losses, kind, None)
    assert len(want[0][0]) == 6
    for depth in (0, 1, 3):
        assert two.run(_losses, kind, depth) == want


STEPS, STEP_S = 8, 0.06


def _wall_s(load_s: float, depth: int) -> float:
    """Steps on two ranks, the first load left out; both ranks load equally long."""

    def data() -> Iterator[Tensor]:
        for i in range(STEPS + 1):
            time.sleep(load_s)
            yield batch(i)

    job = new_job()
    job.step(batch(0))
    with job.prefetch(data(), depth) as loader:
        next(loader)
        start = time.perf_counter()
        for b in loader:
            job.step(b)
            time.sleep(STEP_S)
        wall = time.perf_counter() - start
    job.close()
    return wall


@pytest.mark.parametrize("share", [0.5, 1.0, 1.5])
def test_ranks_that_agree_still_hide_what_is_shorter(two: Ranks, share: float) -> None:
    """The handshake is beside the step as well: the wall is that of the longer of the two."""
    load_s = share * STEP_S
    assert any(
        max(two.run(_wall_s, load_s, 0)) - max(two.run(_wall_s, load_s, 2)) >= 0.85 * STEPS * min(load_s, STEP_S)
        for _ in range(12)
    )


LOAD_S = 0.1


def _recorded() -> tuple[Timeline, Timeline]:
    """A pipeline fed by a loader that is slower than it, predicted and recorded.

    However slow the pipeline, too: a load begins when the step before has ended.
    """
    made = gpt(False)
    plan = planned(made)
    job = laminar.parallelize(made, _loss, lambda p: torch.optim.SGD(p, 0.1), batch=_batches(1)[0], plan=plan)
    predicted = predict_staged(job.graph, job.plan, Cluster.preset("2xcpu"), load_s=LOAD_S).timeline

    free = threading.Semaphore()

    def data() -> Iterator[Any]:
        for b in _batches(6):
            free.acquire()
            time.sleep(LOAD_S)
            yield b

    with job.prefetch(data(), 2) as loader:
        for _ in range(2):
            job.step(next(loader))
            free.release()
        with job.timeline() as t:
            for b in loader:
                job.step(b)
                free.release()
    job.close()
    return predicted, t.timeline


def test_loads_of_a_pipeline_stand_beside_the_same_loads_predicted(two: Ranks) -> None:
    """By name, rank by rank: a diff lays them side by side, and waiting for them is waiting on both sides."""
    predicted, measured = two.run(_recorded)[0]
    for line in (predicted, measured):
        assert {(s.rank, s.name) for s in line.spans if s.beside} == {(0, "load0.0"), (1, "load1.0")}
        assert line.step_ns > 0.5e9 * LOAD_S
    rows = {row.name: row for row in compare(predicted, measured).lines}
    assert {"load0.0", "load1.0"} <= rows.keys() and rows["load0.0"].measured_ns > 0
    found = compare(predicted, measured)
    waiting = next(r for r in found.parts if r.name == "waiting")
    assert waiting.predicted_ns > 0 and waiting.measured_ns > 0.5e9 * LOAD_S
    assert all(not s.beside for s in measured.critical_path())


def _epochs(lengths: list[int]) -> tuple[int, str]:
    """A run whose epochs are of different lengths on different ranks."""
    job = new_job()
    said = ""
    try:
        loop(job, lambda: map(batch, range(lengths[job.rank])), 9, prefetch=2)
    except BatchError as error:
        said = str(error)
    steps = job.steps
    job.close()
    return steps, said


def test_epochs_of_different_lengths_end_a_run_with_an_error(two: Ranks) -> None:
    """A rank that began anew would train on other data than the rest, and nobody would see it."""
    assert two.run(_epochs, [4, 4]) == [(9, "")] * 2
    for steps, said in two.run(_epochs, [4, 3]):
        assert steps == 3 and "the data of rank 1 ended after 3 batches; rank 0 had more" in said


def _store() -> int:
    """How many keys a long loader leaves behind."""
    world = World("cpu")
    before = world.store.num_keys()  # type: ignore[union-attr]
    job = new_job()
    for b in job.prefetch(map(batch, itertools.repeat(0, 300)), 2):
        del b
    dist.barrier()
    after = world.store.num_keys()  # type: ignore[union-attr]
    job.close()
    return int(after - before)


def test_agreeing_leaves_no_pile_in_the_store(two: Ranks) -> None:
    """A run of a million batches must not fill the memory of rank 0."""
    assert max(two.run(_store)) < 40


RECIPE = """
import time, torch, laminar
from torch import nn

def data():
    for i in range({batches}):
        time.sleep({load_s})
        if i == {bad}:
            raise OSError("no such shard")
        yield torch.randn(4, 8, generator=torch.Generator().manual_seed(i))

def it():
    torch.manual_seed(0)
    return laminar.Recipe(model=lambda: nn.Linear(8, 8), loss=lambda m, b: m(b).square().mean(), data=data,
                          optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps={steps})
"""


def recipe(where: Path, batches: int = 5, load_s: float = 0.0, bad: int = -1, steps: int = 8) -> str:
    """A recipe in a file."""
    path = where / "r.py"
    path.write_text(RECIPE.format(batches=batches, load_s=load_s, bad=bad, steps=steps))
    return f"{path}:it"


def train(where: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    """`laminar train` on two ranks."""
    command = [sys.executable, "-m", "laminar", "train", name, "--workers", "2", "--json", "--device", "cpu", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=where)


@pytest.mark.slow
def test_laminar_train_prefetches_by_itself_and_shows_it(tmp_path: Path) -> None:
    """The same loss as without; the timeline has the loads beside the step, and the waits for them within it."""
    name = recipe(tmp_path, load_s=LOAD_S, steps=8)
    lines = {}
    for depth in ("2", "0"):
        done = train(tmp_path, name, "--timeline", f"t{depth}.json", *(("--prefetch", depth) if depth == "0" else ()))
        assert done.returncode == 0, done.stderr
        lines[depth] = json.loads(done.stdout)
    assert lines["2"]["loss"] == lines["0"]["loss"]
    found = Timeline.load(tmp_path / "t2.json")
    loads = [s for s in found.spans if s.name == "load0.0"]
    assert {s.rank for s in loads} == {0, 1} and {(s.lane, s.kind, s.phase) for s in loads} == {
        ("host", "host", "load")
    }
    assert all(0 <= s.start <= s.end <= found.step_ns for s in loads)
    waits = [s for s in found.spans if s.name == "load/wait"]
    assert waits and all(s.kind == "wait" for s in waits)
    assert found.step_ns > 0.5e9 * LOAD_S  # a step takes as long as its load, which it is bound by
    parts = found.breakdown()
    assert parts["wait"] > 0 and parts["host"] < 0.5e9 * LOAD_S, "a load is beside the step, so it is no part of it"
    assert not any("load" in s.name for s in Timeline.load(tmp_path / "t0.json").spans)


@pytest.mark.slow
def test_data_that_fails_under_laminar_train_names_its_batch(tmp_path: Path) -> None:
    """One error, the data's own, with the batch in the traceback."""
    done = train(tmp_path, recipe(tmp_path, bad=3))
    assert done.returncode == 1 and "no such shard" in done.stderr
    assert re.search(r"raised while batch 3 \(from 0\) was loaded", done.stderr)


@pytest.mark.slow
def test_a_rank_that_dies_in_its_data_ends_the_run(tmp_path: Path) -> None:
    """It leaves without a word, ahead of the step the batch was for; the others must not wait for its batch."""
    name = recipe(tmp_path, bad=4)
    path = Path(name.partition(":")[0])
    path.write_text(path.read_text().replace('raise OSError("no such shard")', "__import__('os')._exit(3)"))
    done = train(tmp_path, name)
    assert done.returncode == 1 and re.search(
        r"rank \d of 2 ended with exit code 3, without a word, after step \d", done.stderr
    )


def test_ctrl_c_ends_ranks_that_wait_for_data(tmp_path: Path) -> None:
    """A loader inside of user code that does not return holds up nobody."""
    name = recipe(tmp_path, batches=50, load_s=0.0, bad=-1, steps=40)
    path = Path(name.partition(":")[0])
    path.write_text(path.read_text().replace("time.sleep(0.0)", "time.sleep(1000 if i == 4 else 0)"))
    command = [sys.executable, "-m", "laminar", "train", name, "--workers", "2", "--device", "cpu", "--run-dir", "run"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    ) as started:
        events, limit = tmp_path / "run" / "events.jsonl", time.monotonic() + 120
        while time.monotonic() < limit and not (events.exists() and '"step": 4' in events.read_text()):
            time.sleep(0.1)
        started.send_signal(signal.SIGINT)
        try:
            _, said = started.communicate(timeout=150)
        finally:
            started.kill()
        assert started.returncode == 130 and "StoppedError" in said

"""The loader in one process: what it hides, what it holds, how it ends. Ranks that agree are in test_loader_ranks.py.

Loads and steps are sleeps, and walls are compared with each other in the same run: no test knows how fast a machine is,
and where others may have disturbed one comparison there is another.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import laminar
from laminar.capture.model.batches import mapped
from laminar.cli import main
from laminar.cost.sim.pipeline import execute
from laminar.cost.timeline_diff import compare
from laminar.errors import LaminarError, NetError, RecipeError
from laminar.forecast.pipeline_step import MEETING_S, predict_staged
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.mesh import Mesh
from laminar.ir.timeline import Timeline
from laminar.lower.stages.deadlock import refuse_deadlock
from laminar.lower.stages.loaders import with_loads
from laminar.lower.stages.pipeline_net import Stage, chain
from laminar.lower.stages.schedules import dag_net
from laminar.runtime.pipeline.loader import EPOCH, Loader, Mover
from laminar.train.batch.leaves import Local, Sized
from laminar.train.batch.position import DataPosition
from laminar.train.loop import first, loop
from tests.support.zoo import EXAMPLES, specimen

LOAD_S = 0.02


def threads() -> list[str]:
    """Loaders that run."""
    return [t.name for t in threading.enumerate() if t.name == "laminar loader"]


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    """No test leaves a loader behind."""
    yield
    gc.collect()
    ends = time.monotonic() + 60
    while threads() and time.monotonic() < ends:
        time.sleep(0.01)
    assert not threads()


def slow(number: int, seconds: float = LOAD_S) -> Iterator[int]:
    """Batches that take a while."""
    for i in range(number):
        time.sleep(seconds)
        yield i


def wall_s(number: int, load_s: float, step_s: float, depth: int) -> float:
    """So many steps with a loader, the first load left out."""
    with Loader(slow(number, load_s), depth) as loader:
        next(loader)
        start = time.perf_counter()
        for _ in loader:
            time.sleep(step_s)
        return time.perf_counter() - start


# --- hidden ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 1.0, 1.5])
def test_what_is_shorter_of_load_and_step_is_hidden(share: float) -> None:
    """With a depth of 2 a run takes as long as the longer of the two; without, as both together."""
    number, step_s = 16, LOAD_S
    load_s = share * step_s
    assert any(
        wall_s(number, load_s, step_s, 2) / wall_s(number, load_s, step_s, 0) * (load_s + step_s) / max(load_s, step_s)
        <= 1.15
        for _ in range(20)
    )


def test_a_step_waits_for_what_is_not_loaded() -> None:
    """And says how long."""
    with Loader(slow(3, 10 * LOAD_S), 2) as loader:
        assert list(loader) == [0, 1, 2]
    assert loader.waited_ns > 2 * LOAD_S * 1e9
    with Loader(range(3), 2) as quick:
        time.sleep(LOAD_S)
        assert list(quick) == [0, 1, 2] and quick.waited_ns < loader.waited_ns


# --- how much is held -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_never_more_batches_exist_than_registers_and_one(depth: int) -> None:
    """Over 10,000 batches whose consumer is slower than their loader, who is stopped, not given more memory."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    counts = []

    def data() -> Iterator[Tensor]:
        for i in range(10_000):
            batch = torch.full((64,), float(i))
            alive.add(batch)
            counts.append(len(alive))
            yield batch

    with Loader(data(), depth) as loader:
        for i in itertools.count():
            batch = None
            batch = next(loader, None)
            if batch is None:
                break
            assert batch[0] == i
            if i % 500 == 0:
                time.sleep(0.005)
        assert i == 10_000 and loader.registers.most <= depth
    assert max(counts) <= depth + 1


def test_memory_stays_flat_however_long_the_data_is() -> None:
    """Bytes, not only objects: 10,000 batches of 64 KiB pass, and only a few are ever there."""
    size, depth = 1 << 16, 2

    def data() -> Iterator[bytearray]:
        for _ in range(10_000):
            yield bytearray(size)

    tracemalloc.start()
    try:
        with Loader(data(), depth) as loader:
            for _ in loader:
                pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (depth + 3) * size + 500_000


def test_the_loader_rests_when_its_registers_are_full() -> None:
    """It reads no further than it was granted."""
    read = []
    with Loader((read.append(i) or i for i in range(100)), 3) as loader:
        loader.settle()
        time.sleep(0.05)
        assert read == [0, 1, 2]
        assert next(loader) == 0
        loader.settle()
        time.sleep(0.05)
        assert read == [0, 1, 2, 3]


# --- how it ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_come_in_order_and_end(depth: int) -> None:
    """Any iterable will do, and an end is an end for ever."""
    loader = Loader([3, 1, 2], depth)
    assert list(loader) == [3, 1, 2] and list(loader) == [] and not loader.running
    assert list(Loader([], depth)) == []


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_of_the_data_is_raised_where_its_batch_would_have_been(depth: int) -> None:
    """The user's own error with its own traceback, after the batches before it, naming the batch."""

    def data() -> Iterator[int]:
        yield from range(5)
        raise KeyError("no such file")

    seen, loader = [], Loader(data(), depth)
    with pytest.raises(KeyError, match="no such file") as error:
        for batch in loader:
            seen.append(batch)
    assert seen == [0, 1, 2, 3, 4] and "batch 5 (from 0)" in error.value.__notes__[0]
    assert any(entry.name == "data" for entry in error.traceback)
    assert list(loader) == [] and not loader.running


def test_data_that_is_no_iterable_is_an_error_of_the_first_batch() -> None:
    """It is not the thread that fails with it."""
    with pytest.raises(TypeError, match="not iterable"):
        next(Loader(3, 1))  # type: ignore[arg-type]


def test_breaking_out_of_a_loop_ends_the_thread_and_the_data() -> None:
    """Nobody holds the loader any more; a generator's own `finally` runs."""
    ended = []

    def data() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            ended.append(True)

    for batch in Loader(data(), 2):
        if batch == 3:
            break
    limit = time.monotonic() + 60
    while not ended and time.monotonic() < limit:
        time.sleep(0.005)
    assert ended == [True]


def test_a_closed_loader_gives_nothing_more_and_lets_go_of_its_batches() -> None:
    """Also of those it had loaded."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def data() -> Iterator[Tensor]:
        while True:
            batch = torch.zeros(4)
            alive.add(batch)
            yield batch

    loader = Loader(data(), 4)
    next(loader)
    loader.settle()
    assert len(alive) >= 4
    loader.close()
    assert not loader.running and list(loader) == []
    gc.collect()
    assert not alive


def test_data_that_blocks_does_not_hold_up_the_one_who_closes() -> None:
    """It can't be torn out of user code, but nobody has to wait for it."""
    free = threading.Event()

    def data() -> Iterator[int]:
        yield 0
        free.wait(200)
        yield 1

    loader = Loader(data(), 2)
    assert next(loader) == 0
    start = time.monotonic()
    loader.close(0.05)
    assert time.monotonic() - start < 100 and loader.running
    free.set()


def test_ctrl_c_reaches_one_who_waits_for_a_batch() -> None:
    """The main thread is waiting for the loader's, whose data never comes."""
    free = threading.Event()

    def data() -> Iterator[int]:
        free.wait(200)
        yield 0

    loader = Loader(data(), 2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            next(loader)
    finally:
        signal.signal(signal.SIGINT, before)
        free.set()
    assert time.monotonic() - start < 100
    loader.close()


def test_a_process_may_end_with_a_loader_in_the_middle_of_its_data() -> None:
    """A thread inside of torch must not take the interpreter down with it."""
    script = """
import torch
from laminar.runtime.pipeline.loader import Loader
def data():
    while True:
        yield torch.randn(300, 300) @ torch.randn(300, 300)
loader = Loader(data(), 2)
next(loader)
"""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0 and not done.stderr


# --- the data of a job ----------------------------------------------------------------------------------


def mlp() -> tuple[nn.Module, Callable[[Any, Any], Tensor]]:
    """A small model with dropout, whose draws depend on the step and not on a generator."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    return model, lambda m, b: (m(b["x"]) - b["y"]).square().mean()


def shuffled() -> DataLoader[Any]:
    """A loader of torch's that shuffles with the global generator."""
    rows = torch.randn(40, 9, generator=torch.Generator().manual_seed(1))
    return DataLoader(
        TensorDataset(rows),
        batch_size=8,
        shuffle=True,
        collate_fn=lambda some: {k: torch.stack([r[0][a:b] for r in some]) for k, a, b in (("x", 0, 8), ("y", 8, 9))},
    )


def held_out() -> list[Any]:
    """What is evaluated."""
    return [{"x": torch.ones(4, 8), "y": torch.ones(4, 1)}] * 3


def trained(prefetch: int, tmp: Path, resume: int = 0, evaluate: bool = False) -> tuple[list[float], str]:
    """Losses of a loop and the hash of what it made; with `resume`, stopped there and begun anew."""
    losses: list[float] = []
    job: Any = None
    where = tmp / f"{prefetch}"
    for steps, again in ((resume, False), (12, bool(resume))) if resume else ((12, False),):
        model, loss = mlp()
        torch.manual_seed(5)
        job = laminar.parallelize(
            model, loss, lambda p: torch.optim.SGD(p, 0.1), batch=next(iter(shuffled())), device="cpu"
        )
        torch.manual_seed(7)
        step = job.step
        job.step = lambda batch, step=step: losses.append((r := step(batch)).loss) or r
        loop(
            job,
            shuffled,
            steps,
            prefetch=prefetch,
            resume=where if again else None,
            checkpoint=where,
            evaluate=held_out if evaluate else None,
            evaluate_every=4 if evaluate else 0,
        )
    return losses, job.hash()


def test_losses_are_the_same_bits_with_and_without_a_loader(tmp_path: Path) -> None:
    """Over the end of an epoch, with a shuffle of the global generator, evaluations in between."""
    want = trained(0, tmp_path, evaluate=True)
    assert len(want[0]) == 12
    for depth in (1, 2, 5):
        assert trained(depth, tmp_path, evaluate=True) == want


def test_a_resumed_run_sees_the_same_batches_in_the_same_order(tmp_path: Path) -> None:
    """Those that were used before are passed over, ahead of time like any other."""
    assert trained(3, tmp_path, resume=7) == trained(0, tmp_path, resume=7)


def test_a_loop_reads_no_batch_that_no_step_needs() -> None:
    """Twelve steps are twelve batches, though the loader runs ahead."""
    read = []
    batches = DataPosition(lambda: (read.append(i) or i for i in range(5))).batches(2, marked=True)
    assert list(Loader(first(batches, 6), 4)) == [2, 3, 4, 0, 1, 2] and len(read) == 8
    assert list(itertools.islice(DataPosition(lambda: [1, 2]).batches(marked=True), 4)) == [1, 2, EPOCH, 1]


def test_data_of_a_recipe_that_fails_is_told_as_without_a_loader() -> None:
    """Its error is the same one."""
    once = iter([1, 2, 3])
    with pytest.raises(RecipeError, match="gave 3 batches and no more"):
        list(Loader(DataPosition(lambda: once).batches(marked=True), 2))


def test_a_job_prefetches_and_closes_what_it_has_open() -> None:
    """The door: `job.prefetch(data)`; a negative depth is refused."""
    model, loss = mlp()
    job = laminar.parallelize(
        model, loss, lambda p: torch.optim.SGD(p, 0.1), batch=next(iter(shuffled())), device="cpu"
    )
    with pytest.raises(LaminarError, match="depth=-1"):
        job.prefetch([], depth=-1)
    assert len([job.step(b) for b in job.prefetch(shuffled())]) == 5
    left = job.prefetch(itertools.repeat(next(iter(shuffled()))))
    job.step(next(left))
    job.close()
    assert not left.running


def test_workers_of_a_torch_loader_feed_ours() -> None:
    """Processes of their own, which end with it."""
    rows = TensorDataset(torch.arange(12.0))
    data: DataLoader[Any] = DataLoader(rows, batch_size=4, num_workers=1, multiprocessing_context="forkserver")
    with Loader(data, 2) as loader:
        assert [b[0].tolist() for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_structures_of_batches_are_kept_when_their_tensors_move() -> None:
    """Whatever the step would have been given."""
    x = torch.ones(2)
    moved = mapped({"a": [x, (x, "text")], "b": Local({"c": x})}, lambda t: t + 1)
    assert moved["a"][0].tolist() == [2, 2] and isinstance(moved["a"][1], tuple) and moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Local) and moved["b"].share["c"].tolist() == [2, 2]
    sized = mapped(Sized(Local(x), [1, 1]), lambda t: t + 1)
    assert isinstance(sized, Sized) and sized.sizes == [1, 1] and sized.batch.share.tolist() == [2, 2]


# --- in the net and in predictions ----------------------------------------------------------------------


def pipe(places: int = 2, micro_batches: int = 4) -> Any:
    """A chain of stages, one at each place."""
    stages = [Stage(place=p, stash_bytes=100, grads_bytes=10) for p in range(places)]
    return dag_net(chain(stages, micro_batches, [50] * (places - 1)))


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("load", [0, 50, 90, 100, 150, 400])
def test_a_simulated_load_is_hidden_while_it_is_no_longer_than_the_step(depth: int, load: int) -> None:
    """Beside the step it costs what it is longer; before the step, all of it."""
    net = pipe()
    work = {a.name: {"forward": 6, "backward": 12, "optimize": 10}.get(a.kind, 0) for a in net.actors}
    step = execute(net, work, 1).step_ns
    assert step == 100
    loaded = with_loads(net, 1000, depth)
    refuse_deadlock(loaded)
    ran = execute(loaded, {**work, "load0": load, "load1": load}, 12)
    assert ran.step_ns == (step + load if depth == 0 else max(step, load))
    line = ran.one(3)
    assert line.step_ns == ran.step_ns
    assert load <= sum(s.end - s.start for s in line.spans if s.name == "load1.0") <= line.step_ns
    assert max(ran.in_flight[q.name] for q in loaded.queues if q.producer == "load0") <= 4 * (depth + 1)


def test_uneven_loads_are_levelled_out_by_depth() -> None:
    """Every fourth batch takes three steps' time, the others next to none: only a deep queue hides that."""
    net = pipe(1, 1)
    work = {a.name: 10 for a in net.actors}
    step = execute(net, work, 1).step_ns

    def taken(depth: int) -> float:
        found = with_loads(net, 0, depth)
        return execute(
            found, lambda name, k, n: (round(2.5 * step) if n % 4 == 0 else 1) if name == "load0" else 10, 41
        ).step_ns

    assert taken(1) > 1.1 * step and taken(4) == pytest.approx(step, rel=0.02)


def test_the_check_counts_the_batches_that_are_loaded_ahead() -> None:
    """The one in use and those ahead of it, whole ones at every place; memory that is too small is refused."""
    net = pipe()
    for depth in (0, 1, 3):
        more = [with_loads(net, 1000, depth).bound_bytes(p) - net.bound_bytes(p) for p in (0, 1)]
        assert [b - 8 * 2 for b in more] == [1000 * (depth + 1)] * 2  # and two numbers to meet over
    least = max(with_loads(net, 1000, 2).bound_bytes(p) for p in (0, 1))
    refuse_deadlock(with_loads(net, 1000, 2), least)
    with pytest.raises(NetError, match="bytes"):
        refuse_deadlock(with_loads(net, 1000, 3), least)
    with pytest.raises(NetError, match="-1 batches ahead"):
        with_loads(net, 0, -1)


def test_predicted_steps_know_their_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With stages and without, from Python and from the command line; batches ahead are memory on a CPU."""
    found = specimen("gpt.py:tiny")
    cluster = Cluster.preset("2xcpu")
    staged = laminar.plans.pipeline(found.graph, 2, 4)
    bare = predict_staged(found.graph, staged, cluster)
    pipe_s = bare.execution.step_ns / 1e9
    for share, prefetch in ((0.5, 2), (1.5, 2), (0.5, 0)):
        load_s = share * pipe_s
        each = predict_staged(found.graph, staged, cluster, load_s=load_s, prefetch=prefetch)
        want = pipe_s + load_s if prefetch == 0 else max(pipe_s, load_s)
        assert each.seconds == pytest.approx(want + MEETING_S["cpu"], rel=1e-6) and len(each.bubbles) == 2
        assert each.timeline.step_ns == pytest.approx(want * 1e9, rel=0.01)  # one place begins before the other ends
        assert {s.name for s in each.timeline.spans if s.beside} == {"load0.0", "load1.0"}
    batch = 4 * sum(i.spec.nbytes for i in found.graph.of_kind("batch"))
    more = predict_staged(found.graph, staged, cluster, prefetch=7)
    assert [a - b for a, b in zip(more.peaks, bare.peaks, strict=True)] == [5 * batch] * 2

    plan = laminar.plans.data_parallel(found.graph, Mesh({"dp": 2}))
    step_s = predict(found.graph, plan, cluster).seconds
    for load_s, prefetch, want in ((step_s / 2, 1, step_s), (3 * step_s, 1, 3 * step_s), (step_s, 0, 2 * step_s)):
        line = predict(found.graph, plan, cluster, load_s=load_s, prefetch=prefetch)
        assert line.seconds == pytest.approx(want, rel=1e-6)
        assert line.timeline.step_ns == pytest.approx(want * 1e9, rel=1e-6)
    plan.save(str(tmp_path / "plan.json"))
    out = tmp_path / "sim.json"
    told = ["--cluster", "2xcpu", "--recipe", f"{EXAMPLES}/gpt.py:tiny", "-o", str(out), "--load-s", "7", "--json"]
    assert main(["simulate", str(tmp_path / "plan.json"), *told]) == 0
    assert '"step_s": 7.0' in capsys.readouterr().out and Timeline.load(out).step_ns == 7 * 10**9
    compared = compare(Timeline.load(out), Timeline.load(out))
    assert "load0.0" in {row.name for row in compared.lines} and compared.step.difference_ns == 0


def test_a_batch_on_a_gpu_is_waited_for_by_the_stream_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With streams that only write down what they are asked: copied on the loader's, awaited on the consumer's."""
    said: list[Any] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_event(self) -> str:
            return f"copied on {self.name}"

        def wait_event(self, event: str) -> None:
            said.append((self.name, event))

    main, mine = Stream("main"), Stream("loader")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda s: contextlib.nullcontext(said.append(s.name)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t + 100)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: said.append(("used on", s.name)))
    move = Mover(torch.device("cpu"))
    move.stream = mine  # type: ignore[assignment]
    filled = move({"x": torch.ones(2), "n": 3})
    assert said == ["loader"] and filled.copied == "copied on loader"
    assert move.taken(filled)["x"].tolist() == [101, 101]
    assert said[1:] == [("main", "copied on loader"), ("used on", "main")]
    move.whole, said[:] = False, []
    assert move(torch.ones(1)) == (torch.full((1,), 101.0), None, 0)
    assert move(Local(torch.ones(1))).copied == "copied on loader" == move(Sized(Local(torch.ones(1)), [1])).copied


# --- on a GPU -------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_batches_are_on_the_gpu_before_they_are_asked_for(tmp_path: Path) -> None:
    """Copied by a stream of the loader's own, from pinned memory, and whole when the consumer's stream reads them."""
    device = torch.device("cuda")
    data = [{"x": torch.full((1 << 22,), float(i)), "n": i} for i in range(12)]
    with Loader(data, 3, device=device) as loader:
        busy = torch.randn(4096, 4096, device=device)
        for i, got in enumerate(loader):
            busy = busy @ busy / 4096  # what reads a batch is queued behind this
            assert got["x"].is_cuda and got["n"] == i
            total = got["x"].double().sum()
            del got
            assert float(total) == i * (1 << 22)
    with Loader(data, 2, device=device, whole=False) as host:
        assert all(b["x"].is_pinned() and b["x"][0] == b["n"] for b in host)
    with Loader([Local(data[3])], 1, device=device, whole=False) as shares:
        assert next(shares).share["x"].is_cuda


@pytest.mark.gpu
def test_losses_on_a_gpu_are_the_same_bits_with_and_without_a_loader() -> None:
    """While steps are compiled and replayed; another shape on the way."""
    data = [{"x": torch.randn(n, 8), "y": torch.randn(n, 1)} for n in [16] * 8 + [12] * 2 + [16] * 8]

    def losses(depth: int | None) -> list[float]:
        model, loss = mlp()
        job = laminar.parallelize(
            model, loss, lambda p: torch.optim.SGD(p, 0.1), batch=data[0], device="cuda", compile=True
        )
        found = [job.step(b) for b in (data if depth is None else job.prefetch(data, depth))]
        out = [r.loss for r in found]
        job.close()
        return out

    want = losses(None)
    assert losses(0) == want and losses(2) == want


@pytest.mark.gpu
def test_copies_to_the_gpu_are_hidden_behind_steps() -> None:
    """A step that is fed from the host takes longer than one whose batch was copied ahead of it."""
    device = torch.device("cuda")
    a = torch.randn(8192, 8192, device=device)
    batches = [torch.randn(1 << 26) for _ in range(2)]  # 256 MiB that are not pinned

    def wall(depth: int) -> float:
        with Loader(itertools.islice(itertools.cycle(batches), 12), depth, device=device) as loader:
            next(loader)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for batch in loader:
                for _ in range(8):
                    torch.mm(a, a)
                batch.sum()
                torch.cuda.synchronize()
            return time.perf_counter() - start

    wall(2)
    assert min(wall(2) / wall(0) for _ in range(3)) < 0.95

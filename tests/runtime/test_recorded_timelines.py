"""Recorded timelines: what ranks did, in order, without gaps, and without changing what they do.

Most tests run on two real ranks. Functions whose names begin with an underscore are what a rank does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import laminar
from laminar import Mesh
from laminar.cli import main
from laminar.cost.timeline_diff import compare
from laminar.errors import LaminarError
from laminar.ir.program import Program
from laminar.ir.timeline import Span, Timeline
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.code.inductor_step import Compiled, run_uncompiled
from laminar.runtime.comm.shm_arena import ShmArena
from laminar.runtime.comm.transport import Null
from laminar.runtime.trace import align
from laminar.runtime.trace import tape as record
from laminar.runtime.trace.align import Clock, joined_timeline
from laminar.runtime.trace.gpu_tape import KernelTape, kernel_family, steps_of
from laminar.runtime.trace.tape import RankSteps, Recordable, Tape
from laminar.train.loop import loop
from tests.support.rank_pool import Ranks
from tests.support.recorded_gpt import GPT, _batches, _loss

SLEEP_S = 0.5


def _job(plan: Any = "data", **options: Any) -> Any:
    torch.manual_seed(0)
    make = lambda params: torch.optim.AdamW(params, lr=1e-2)  # noqa: E731
    return laminar.parallelize(GPT(), _loss, make, batch=_batches(1)[0], plan=plan, **options)


def _recorded(plan: str, **options: Any) -> tuple[Timeline, Program, list[float]]:
    """A few steps recorded after a few that are not; the timeline, the program and how long each step took."""
    job, seconds = _job(plan, **options), []
    for batch in _batches(2):
        job.step(batch)
    with job.timeline() as t:
        for batch in _batches(3):
            seconds.append(job.step(batch).seconds)
    return t.timeline, job.program, seconds


@pytest.mark.parametrize("plan", ["data", "zero1", "zero3", "tensor"])
def test_every_line_of_every_rank_has_its_spans_in_order(two: Ranks, plan: str) -> None:
    """A timeline that misses lines, or has them twice at a time, can't be laid beside a predicted one."""
    (found, program, seconds), (other, *_) = two.run(_recorded, plan)
    assert found == other  # every rank has the timeline of all
    assert found.kind == "measured" and found.ranks == 2 and len(found.meta["steps_ns"]) == 3
    assert sorted(found.meta["steps_ns"])[1] == found.meta["steps_ns"][found.meta["step"]] == found.step_ns
    wanted = set()
    for i in program.instrs:
        wanted |= {f"{i.name}/start", f"{i.name}/finish"} if i.moves else {i.name}
    for rank in (0, 1):
        mine = [s for s in found.spans if s.rank == rank]
        assert all(a.end <= b.start for a, b in itertools.pairwise(mine))
        names = {s.name for s in mine}
        around = {"batch", "host", "late", "norm", "gradients", "optimizer"}
        around |= {n for n in names if n.startswith("move")}
        assert wanted <= names and {"batch", "gradients", "optimizer"} <= names
        assert {n for n in names - wanted - around if not n.endswith("/wait")} == set()
        inside = sum(s.end - s.start for s in mine if s.name != "late") / 1e9
        if rank == 0:
            assert inside >= 0.9 * seconds[found.meta["step"]]
        order = [s.name for s in mine if s.name in {i.name for i in program.instrs}]
        assert order == [i.name for i in program.instrs if not i.moves]
    assert all(found.spans[s.because].end <= s.start + 1000 for s in found.spans if s.because >= 0)
    moves = {s.name for s in found.spans if s.phase == "move"}
    assert bool(moves) == (plan == "zero1")  # the gather of updated parameters
    assert Timeline.from_json(found.to_json()) == found
    same = compare(found, found)
    assert same.step.difference_ns == 0 and all(r.difference_ns == 0 for r in (*same.parts, *same.lines))


def test_labels_are_those_of_the_program(two: Ranks) -> None:
    """Families, modules, phases and causes are what timelines are read by."""
    (found, program, _), _ = two.run(_recorded, "data")
    by_name = {i.name: i for i in program.instrs}
    for span in found.spans:
        instr = by_name.get(span.name.rpartition("/")[0] or span.name)
        if instr is not None:
            assert (span.op, span.module, span.phase) == (instr.op, instr.module, instr.phase)
            assert span.family == instr.kind if instr.moves else span.family
    assert {s.cause for s in found.spans if s.kind == "communication"} <= {i.reason for i in program.collectives}
    assert found.meta["axes"] == {i.name: "dp" for i in program.collectives}
    spread = found.meta["spread_ns"]
    assert all(low <= middle <= high for low, middle, high in spread.values()) and "optimizer" in spread


def _losses(record: bool) -> tuple[list[float], list[Tensor]]:
    job, losses = _job("zero1"), []
    for batch in _batches(2):
        losses.append(job.step(batch).loss)
    if record:
        with job.timeline(steps=2):
            losses += [job.step(batch).loss for batch in _batches(4)]
    else:
        losses += [job.step(batch).loss for batch in _batches(4)]
    return losses, list(job.state_dict().values())


def test_recording_changes_no_number(two: Ranks) -> None:
    """The stamped code is a copy of the code, not another program."""
    (plain, before), _ = two.run(_losses, False)
    (stamped, after), _ = two.run(_losses, True)
    assert plain == stamped
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _late(where: str, shares: bool) -> Timeline:
    """Rank 1 is late: it sleeps before its step, or inside of it where it takes its share of the batch."""
    opened = ShmArena.open if shares else staticmethod(lambda *_: None)
    with mock.patch.object(ShmArena, "open", opened):
        job = _job("data")
        batch = _batches(1)[0]
        for _ in range(3):  # in the first ones ranks also wait to see that their batches agree
            job.step(batch)
        share = job.engine.share

        def slow(*args: Any) -> Any:
            time.sleep(SLEEP_S)
            return share(*args)

        with job.timeline() as t:
            if job.rank == 1 and where == "before":
                time.sleep(SLEEP_S)
            if job.rank == 1 and where == "inside":
                job.engine.share = slow
            job.step(batch)
    return t.timeline


@pytest.mark.parametrize("shares", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize(("where", "culprit"), [("before", "late"), ("inside", "batch")])
def test_who_waits_waits_for_the_rank_that_is_late(two: Ranks, where: str, culprit: str, shares: bool) -> None:
    """A wait alone says nothing: the step depends on what the other rank did meanwhile."""
    found, _ = two.run(_late, where, shares)
    waited = {r: found.breakdown(r)["wait"] / 1e9 for r in (0, 1)}
    assert waited[0] >= 0.5 * SLEEP_S and waited[1] < 0.5 * SLEEP_S
    path = found.critical_path()
    late = max((s for s in path), key=lambda s: s.end - s.start)
    assert (late.name, late.rank) == (culprit, 1) and (late.end - late.start) / 1e9 >= 0.5 * SLEEP_S
    assert not any(s.kind == "wait" and s.end - s.start > 0.5 * SLEEP_S * 1e9 for s in path)
    longest = max((s for s in found.spans if s.kind == "wait"), key=lambda s: s.end - s.start)
    assert longest.rank == 0 and longest.name.endswith("/wait") and longest.cause


def _late_norm() -> Timeline:
    """Rank 1 is late for the norm of gradients that lie in shards: it sleeps in the last line of the program's run."""
    job, batch = _job("zero2"), _batches(1)[0]
    for _ in range(3):
        job.step(batch)
    add = job._add

    def slow(*args: Any) -> Any:
        time.sleep(SLEEP_S)
        return add(*args)

    with job.timeline() as t:
        if job.rank == 1:
            job._add = slow
        job.step(batch)
    return t.timeline


def test_the_norm_of_a_gradient_in_pieces_is_a_meeting_too(two: Ranks) -> None:
    """All ranks wait there for the last one; without the cut it would look like slow arithmetic."""
    found, _ = two.run(_late_norm)
    wait = max((s for s in found.spans if s.kind == "wait"), key=lambda s: s.end - s.start)
    assert (wait.name, wait.rank) == ("norm/wait", 0) and (wait.end - wait.start) / 1e9 >= 0.5 * SLEEP_S
    norm = next(s for s in found.spans if s.name == "norm" and s.rank == 0)
    assert (norm.end - norm.start) / 1e9 < 0.5 * SLEEP_S
    longest = max(found.critical_path(), key=lambda s: s.end - s.start)
    assert (longest.name, longest.rank) == ("host", 1)


def _micro() -> Timeline:
    job = _job("data", micro_batches=2)
    job.step(_batches(1)[0])
    with job.timeline() as t:
        job.step(_batches(1)[0])
    return t.timeline


def test_micro_batches_are_runs_of_the_same_lines(two: Ranks) -> None:
    """Each run has its spans, and the reduction behind them its own."""
    found, _ = two.run(_micro)
    names = [s.name for s in found.spans if s.rank == 0]
    assert names.count("mm_0") == names.count("batch") == 2
    assert any(n.startswith("move") and n.endswith("/finish") for n in names) and names.count("optimizer") == 1


def _ddp_quiet() -> Timeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _steps(_job("ddp"))


def _steps(job: Any) -> Timeline:
    job.step(_batches(1)[0])
    with job.timeline() as t:
        job.step(_batches(1)[0])
    return t.timeline


def test_torchs_own_data_parallel_is_recorded_in_its_few_parts(two: Ranks) -> None:
    """There is no program, but there is a step."""
    found, _ = two.run(_ddp_quiet)
    names = [s.name for s in found.spans if s.rank == 1 and s.name not in ("host", "late")]
    assert names == ["batch", "forward", "backward", "gradients", "optimizer"]


def _clocks(ahead_ns: int) -> tuple[list[Clock], list[Clock]]:
    """Clocks of ranks that say they are on one machine, then on two, rank 1's clock set forward."""
    from laminar.train.world import World

    world = World()
    shifted = (lambda: time.perf_counter_ns() + ahead_ns) if world.rank else time.perf_counter_ns
    with mock.patch.object(align, "now", shifted):
        return [
            align.clocks(world.gather_objects, world.rank, torch.device("cpu"), here)
            for here in ("one", f"machine {world.rank}")
        ]  # type: ignore[return-value]


def test_clocks_of_other_machines_are_read_to_half_a_round_trip(two: Ranks) -> None:
    """Spans of two machines only meet if their clocks do. Ranks of one machine share a clock: nothing is asked."""
    ahead_ns = 5_000_000_000
    for same, other in two.run(_clocks, ahead_ns):
        assert same == [Clock(), Clock()]
        assert other[0] == Clock()
        assert abs(other[1].ahead_ns - ahead_ns) <= other[1].within_ns + 1 < 1_000_000_000


def test_joined_timelines_begin_at_zero_on_the_common_clock() -> None:
    """Rank 1's clock is a thousand seconds ahead, and it began 5 us later."""
    ahead = 10**12
    told = [
        RankSteps([Span("a", "compute", 0, 100, 9_100, "compute")]),
        RankSteps([Span("a", "compute", 1, ahead + 5_100, ahead + 8_100, "compute")]),
    ]
    found = joined_timeline(told, [Clock(), Clock(ahead, 50)], {})
    assert [(s.name, s.rank, s.start, s.end) for s in found.spans] == [
        ("a", 0, 0, 9_000),
        ("late", 1, 0, 5_000),
        ("a", 1, 5_000, 8_000),
    ]


def test_a_finish_is_cut_where_the_last_partner_had_started() -> None:
    """A rank that blocks in `finish` can't tell a late partner from a slow transfer; the others' clocks can."""
    key = (0, (0, 1), "r", 1)
    told = [
        RankSteps(
            [
                Span("r/start", "compute", 0, 0, 1_000, "communication"),
                Span("r/finish", "compute", 0, 1_000, 9_000, "communication"),
            ],
            {key: 1_000},
            {},
            {1: key},
        ),
        RankSteps(
            [
                Span("mm", "compute", 1, 0, 6_000, "compute"),
                Span("r/start", "compute", 1, 6_000, 7_000, "communication"),
                Span("r/finish", "compute", 1, 7_000, 9_500, "communication"),
            ],
            {key: 7_000},
            {},
            {2: key},
        ),
    ]
    found = joined_timeline(told, [Clock(), Clock()], {})
    mine = [(s.name, s.kind, s.start, s.end) for s in found.spans if s.rank == 0]
    assert mine[1:] == [("r/wait", "wait", 1_000, 7_000), ("r/finish", "communication", 7_000, 9_000)]
    assert [found.spans[s.because].name for s in found.spans[1:3]] == ["r/start", "r/start"]
    assert found.spans[found.spans[2].because].rank == 1
    assert [(s.name, s.rank) for s in found.critical_path()] == [("mm", 1), ("r/start", 1), ("r/finish", 1)]


def test_what_had_arrived_was_announced_before() -> None:
    """Rank 1 is put to sleep inside of `start`, when the transfer is under way: rank 0 had waited for its `mm`."""
    key = (0, (0, 1), "r", 1)
    told = [
        RankSteps(
            [
                Span("r/start", "compute", 0, 0, 1_000, "communication"),
                Span("r/finish", "compute", 0, 1_000, 9_000, "communication"),
                Span("optimizer", "compute", 0, 9_000, 20_000, "compute"),
            ],
            {key: 1_000},
            {},
            {1: key},
            {key: 0},
        ),
        RankSteps(
            [
                Span("mm", "compute", 1, 0, 7_000, "compute"),
                Span("r/start", "compute", 1, 7_000, 12_000, "communication"),
                Span("r/finish", "compute", 1, 12_000, 12_500, "communication"),
            ],
            {key: 12_000},
            {},
            {2: key},
            {key: 7_000},
        ),
    ]
    found = joined_timeline(told, [Clock(), Clock()], {})
    mine = [(s.name, s.kind, s.start, s.end) for s in found.spans if s.rank == 0]
    assert mine[1:3] == [("r/wait", "wait", 1_000, 7_000), ("r/finish", "communication", 7_000, 9_000)]
    assert [(s.name, s.rank) for s in found.critical_path()] == [("mm", 1), ("r/finish", 0), ("optimizer", 0)]


class Clock0:
    """A clock that moves when it is told to, and a little whenever it is read."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        self.ns += 50
        return self.ns


class Slow:
    """An arena in which waits and announcements take a while."""

    def __init__(self, clock: Clock0) -> None:
        self.clock = clock
        self.posted: list[tuple[int, int]] = []

    def wait(self, column: int, value: int) -> None:
        self.clock.ns += 20_000

    def post(self, column: int, value: int) -> None:
        self.posted.append((column, value))
        self.clock.ns += 5_000


def test_lines_of_a_collective_are_cut_at_waits_and_announcements() -> None:
    """What moves and what waits are told apart, and which announcement ended a wait is known."""
    clock = Clock0()
    arena: Any = Slow(clock)

    def run() -> tuple[list[Tensor], list[int]]:
        stamps = [clock()]
        clock.ns += 10_000  # copy
        arena.post(0, 7)
        stamps.append(clock())
        arena.wait(0, 7)
        clock.ns += 30_000  # reduce
        arena.post(1, 7)
        arena.wait(1, 7)
        clock.ns += 40_000  # copy
        stamps.append(clock())
        return [], stamps

    spans = [Span(f"r/{part}", "compute", 0, 0, 0, "communication", bytes=8) for part in ("start", "finish")]
    code = Recordable(run, spans, [(0, 1), (0, 1)], {arena: (0, 1)}, frozenset(), {"r": "dp"})
    tape = Tape(0, 2)
    with mock.patch.object(record, "now", clock):
        tape.begin()
        tape.run(code)
        tape.end()
    (told,) = tape.told()
    mine = [(s.name, s.kind, s.bytes, round((s.end - s.start) / 1e3)) for s in told.spans if s.name != "host"]
    assert mine == [
        ("r/start", "communication", 8, 10),
        ("r/start", "communication", 8, 5),
        ("r/wait", "wait", 0, 20),
        ("r/finish", "communication", 8, 30),
        ("r/finish", "communication", 8, 5),
        ("r/wait", "wait", 0, 20),
        ("r/finish", "communication", 8, 40),
    ]
    assert all(a.end == b.start for a, b in itertools.pairwise(told.spans))
    first = next(i for i, s in enumerate(told.spans) if s.name == "r/finish")
    assert told.awaited == {first: (0, (0, 1), 0, 7), first + 3: (0, (0, 1), 1, 7)}
    assert list(told.posts) == [(0, (0, 1), 0, 7), (0, (0, 1), 1, 7)]
    assert arena.posted == [(0, 7), (1, 7)] and "wait" not in vars(arena) and tape.axes == {"r": "dp"}


def test_only_recorded_steps_have_stamped_code() -> None:
    """Nothing is built, and nothing runs slower, until someone asks."""
    job = _job()
    (ready,) = job.engine._ready.values()
    job.step(_batches(1)[0])
    assert "_stamped" not in vars(ready.step)
    with job.timeline(steps=1) as t:
        job.step(_batches(1)[0])
        first = vars(ready.step)["_stamped"]
        job.step(_batches(1)[0])
    assert len(t.timeline.meta["steps_ns"]) == 1  # no more than was asked for
    assert job.engine.transport.tape is None and vars(ready.step)["_stamped"] is first
    assert t.timeline.ranks == 1 and "perf_counter_ns" in first.run.code and "perf_counter_ns" not in ready.step.code


def test_recordings_are_refused_where_they_make_no_sense() -> None:
    """Each says what to do instead."""
    job = _job()
    with pytest.raises(LaminarError, match="records nothing"):
        job.timeline(steps=0)
    with pytest.raises(LaminarError, match="no step was recorded"), job.timeline():
        pass
    with pytest.raises(LaminarError, match="recorded already"), job.timeline(), job.timeline():
        pass
    recording = job.timeline()
    with pytest.raises(LaminarError, match="has no timeline"):
        _ = recording.timeline
    with pytest.raises(ValueError, match="enough"), recording:
        raise ValueError("enough")
    with pytest.raises(LaminarError, match="has no timeline"):
        _ = recording.timeline
    with job.timeline() as again:  # what failed has left nothing behind
        job.step(_batches(1)[0])
    assert again.timeline.step_ns > 0


def test_a_step_that_fails_is_forgotten() -> None:
    """Half a step would be compared with a whole one."""
    job = _job()
    with job.timeline() as t:
        with pytest.raises(KeyError, match="target"):
            job.step({"ids": torch.zeros(8, 32, dtype=torch.long)})
        job.step(_batches(1)[0])
    assert len(t.timeline.meta["steps_ns"]) == 1


def test_parts_of_a_compiled_program_are_lines() -> None:
    """Between two collectives a compiled program can't be looked into from outside."""
    graph = laminar.capture(GPT(), _loss, _batches(1)[0])
    mesh = Mesh({"dp": 2})
    program = laminar.lower(graph, laminar.plans.data_parallel(graph, mesh))
    transport = Null(mesh)
    code = Compiled(program, transport, compiler=run_uncompiled)
    whole = laminar.api.inputs_of(graph, GPT(), _batches(1)[0])
    given = [torch.zeros(i.placed.local(mesh).shape, dtype=whole[i.name].dtype) for i in program.inputs]
    code(*given)
    transport.tape = tape = Tape(0)
    tape.begin()
    code(*given)
    tape.end()
    names = [s.name for s in tape.told()[0].spans if s.name != "host"]
    parts = [n for n in names if n.startswith("part")]
    assert parts == [f"part{k}" for k in range(len(code.parts))] and len(parts) > 1
    assert {n for n in names if "/" in n} == {f"{i.name}/{p}" for i in program.collectives for p in ("start", "finish")}


def test_stamped_code_gives_one_stamp_a_line() -> None:
    """End of one line is start of the next, so n lines have n + 1 stamps, never going back."""
    graph = laminar.capture(GPT(), _loss, _batches(1)[0])
    program = laminar.lower(graph, laminar.plans.data_parallel(graph, Mesh({"dp": 1})))
    step = EagerStep(program, Null(program.mesh))
    whole = laminar.api.inputs_of(graph, GPT(), _batches(1)[0])
    given = [whole[i.name].detach() for i in program.inputs]
    outs, stamps = step._stamped.run(*given)
    assert len(stamps) == len(program.instrs) + 1 == len(step._stamped.spans) + 1
    assert list(stamps) == sorted(stamps)
    assert all(torch.equal(a, b) for a, b in zip(outs, step(*given), strict=True))


# --- GPUs: what can be tried without one --------------------------------------------------------

FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::complex<double> >, std::array>"


def _trace(steps: int) -> dict[str, Any]:
    """A profiler's trace: steps of three kernels between marks, and things that are none."""
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0.5, "dur": 3.0, "args": {}},
        {"ph": "i", "cat": "kernel", "name": "an instant", "ts": 0.5},
        {"ph": "X", "cat": "kernel", "name": "other_gpu", "ts": 1.0, "dur": 1.0, "args": {"device": 1, "stream": 7}},
    ]
    at = 10.0
    for _ in range(steps):
        for cat, name, dur, stream in (
            ("kernel", FILL, 1.0, 7),
            ("kernel", "nvjet_tst_256x128_64x4_2x1_v_bz_TNT", 8.25, 7),
            ("kernel", "triton_poi_fused_gelu_3", 2.5, 7),
            ("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 4.0, 20),
            ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1.5, 7),
            ("kernel", FILL, 1.0, 7),
        ):
            args = {"device": 0, "stream": stream, **({"bytes": 512} if cat == "gpu_memcpy" else {})}
            events.append({"ph": "X", "cat": cat, "name": name, "ts": at, "dur": dur, "args": args})
            at += dur + 0.5
    return {"baseTimeNanoseconds": 1_000_000_000, "traceEvents": events[::-1]}


def test_a_profilers_trace_becomes_steps_of_kernels() -> None:
    """Steps lie between marks, kernels of other devices and calls of the host are left out."""
    steps = steps_of(_trace(2), rank=3, device=0, steps=2, behind=400)
    assert len(steps) == 2
    first = steps[0].spans
    assert [s.family for s in first] == ["", "matmul", "fused.pointwise", "all_reduce", "moving", ""]
    assert [s.name for s in (first[0], first[-1])] == ["mark/begin", "mark/end"]
    assert first[1].start == 1_000_000_000 - 400 + 11_500 and first[1].end - first[1].start == 8_250
    assert [s.lane for s in first[1:5]] == ["compute", "compute", "communication:20", "compute"]
    assert first[4].bytes == 512 and {s.rank for s in first} == {3}
    found = joined_timeline([steps[1]], [Clock()], {})
    assert found.breakdown()["compute"] == {"matmul": 8_250, "fused.pointwise": 2_500, "moving": 1_500}


class Pretender:
    """A profiler that has seen as many steps as it is told."""

    def __init__(self) -> None:
        self.running, self.steps = False, 0

    def __call__(self, activities: list[Any]) -> Pretender:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]  # the device alone
        return self

    def start(self) -> None:
        assert not self.running
        self.running = True

    def stop(self) -> None:
        assert self.running
        self.running = False

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(json.dumps(_trace(self.steps)))


@pytest.fixture
def profiler() -> Iterator[Pretender]:
    """A profiler and a device that are none."""
    made, sizes = Pretender(), {"memory_allocated": 1, "max_memory_allocated": 2, "memory_reserved": 3}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.profiler.profile", made))
        for name, value in {**sizes, "max_memory_reserved": 4, "synchronize": None, "current_device": 0}.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", lambda *_, value=value: value))
        yield made


def test_a_recording_on_a_gpu_listens_from_first_to_last_step(profiler: Pretender) -> None:
    """The profiler is stopped once, at the limit or at the end, and steps beyond the limit are not counted."""
    tape = KernelTape(0, torch.device("cpu"), limit=2)
    for _ in range(3):
        tape.begin()
        tape.mark("batch")
        tape.end()
    assert tape.steps == 2 and not profiler.running and not tape.active
    profiler.steps = 2
    said = tape.finish()
    assert said["memory_bytes"] == {"allocated": 1, "max_allocated": 2, "reserved": 3, "max_reserved": 4}
    assert [len(t.spans) for t in tape.told()] == [6, 6]


def test_a_recording_on_a_gpu_that_is_abandoned_stops_the_profiler(profiler: Pretender) -> None:
    """Or it would go on filling memory."""
    tape = KernelTape(0, torch.device("cpu"))
    tape.begin()
    tape.drop()
    tape.abandon()
    assert not profiler.running and tape.steps == 0


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [True, False])
def test_kernels_of_a_gpu_step_are_recorded(compiled: bool) -> None:
    """Compiled steps are replayed graphs; their kernels are seen one by one all the same."""
    job = _job("data", device="cuda", compile=compiled)
    losses = [job.step(b).loss for b in _batches(3)]
    with job.timeline() as t:
        for batch in _batches(3):
            losses.append(job.step(batch).loss)
    found = t.timeline
    assert len(found.meta["steps_ns"]) == 3 and found.meta["memory_bytes"]["max_allocated"] > 0
    assert {"matmul", "optimizer"} <= {s.family for s in found.spans}
    lanes = sorted((s for s in found.spans if s.lane == "compute"), key=lambda s: s.start)
    both = sum(max(a.end - b.start, 0) for a, b in itertools.pairwise(lanes))  # a kernel may be let in a little early
    assert both < 0.05 * found.step_ns
    again = _job("data", device="cuda", compile=compiled)
    same = [again.step(b).loss for b in [*_batches(3), *_batches(3)]]
    assert losses == pytest.approx(same, rel=1e-5)  # gradients of embeddings are added up in any order


def test_a_trace_without_marks_is_refused() -> None:
    """Where the profiler sees no kernels, a timeline of nothing must not look like one."""
    with pytest.raises(LaminarError, match="saw 0 of the 2 marks"):
        steps_of({"traceEvents": []}, 0, 0, 1, 0)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64>(Params)", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
        ("triton_red_fused__log_softmax_4", "fused.reduction"),
        ("triton_per_fused_native_layer_norm_backward_12", "fused.reduction"),
        ("triton_poi_fused_add_7", "fused.pointwise"),
        ("triton_tem_fused_mm_2", "matmul"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("Memset (Device)", "moving"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, NormOps>>", "sums"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "cheap"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, family: str) -> None:
    """A name is all that is left of a line once it is a kernel in a graph."""
    assert kernel_family(name) == family


# --- the command line ------------------------------------------------------------------------------


def test_a_timeline_that_could_not_be_saved_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is missing would be noticed after the steps it should tell about."""
    recipe = Path(__file__).parents[2] / "examples" / "gpt.py"
    code = main(["train", f"{recipe}:tiny", "--timeline", str(tmp_path / "nowhere" / "t.json")])
    assert code == 2 and "there is no such folder" in capsys.readouterr().err


def test_a_short_run_is_recorded_from_its_first_step(tmp_path: Path) -> None:
    """Where there is no time to get warm, something is better than nothing; a run without steps has no timeline."""
    job, data = _job(), lambda: _batches(1)
    assert loop(job, data, 2, timeline=tmp_path / "two.json", timeline_steps=3).timeline is not None
    assert len(Timeline.load(tmp_path / "two.json").meta["steps_ns"]) == 2
    assert loop(job, data, 2, timeline=tmp_path / "none.json").timeline is None
    assert loop(job, data, 9, timeline=tmp_path / "some.json", timeline_steps=2).timeline is not None
    assert len(Timeline.load(tmp_path / "some.json").meta["steps_ns"]) == 2


def test_a_run_that_fails_leaves_no_recording_open(tmp_path: Path) -> None:
    """The job may be used again."""
    job = _job()
    with pytest.raises(ValueError, match="no more"):
        loop(job, _spoiled, 6, timeline=tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()
    with job.timeline() as t:
        job.step(_batches(1)[0])
    assert t.timeline.step_ns > 0


def _spoiled() -> Iterator[Any]:
    yield from _batches(4)
    raise ValueError("no more")


@pytest.mark.slow
def test_laminar_train_leaves_a_timeline_in_the_run_directory(tmp_path: Path) -> None:
    """The way most people will make one."""
    recipe = Path(__file__).parents[2] / "examples" / "gpt.py"
    command = [
        sys.executable,
        "-m",
        "laminar",
        "train",
        f"{recipe}:tiny",
        "--workers",
        "2",
        "--steps",
        "6",
        "--run-dir",
        "run",
        "--timeline",
        "--timeline-steps",
        "2",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"timeline       {Path('run', 'timeline.json')}" in done.stdout
    found = Timeline.load(tmp_path / "run" / "timeline.json")
    assert found.ranks == 2 and found.written == [0, 1] and len(found.meta["steps_ns"]) == 2
    assert {"batch", "optimizer"} <= {s.name for s in found.spans}

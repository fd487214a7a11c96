"""Code that only a GPU runs, played through without one: what it measures with, what it does when something fails.

A pretended device stands in for `torch.cuda`: its events read a clock, its graphs replay nothing. So what is tested is
the order of things, and that one failure does not take the rest along; never how long anything takes. The real thing is
in `tests/runtime/test_gpu.py`, `tests/train/test_gpu_job.py` and wherever a test is marked `gpu`.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import laminar
from laminar import Mesh
from laminar.cost.calibrate import Timing, fit
from laminar.cost.ops.families import traits_of
from laminar.cost.ops.price import OpCost
from laminar.cost.ops.table import Entry, Section, Table, key_of, numbered, parse_key
from laminar.errors import LaminarError
from laminar.forecast.features import step_features
from laminar.forecast.step import machine, predict, section_of
from laminar.ir.clusters.cluster import Cluster
from laminar.profile import gpu_trials, shapes, sweep, time_fused, time_op, trials
from laminar.runtime.code import inductor_step
from tests.support.zoo import one_thread, specimen

CPU = torch.device("cpu")
ADD = "aten.add.Tensor(f32[8,8],f32[8,8],1)->f32[8,8]"
MM = "aten.mm(f32[8,8],f32[8,8])->f32[8,8]"
UNKNOWN = "aten.nothing_of_this_name(f32[4])->f32[4]"


class Event:
    """A moment."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter_ns()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return max(other.at - self.at, 1000) / 1e6


class Graph:
    """A recording of nothing."""

    fails = False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"

    def capture_end(self) -> None:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    def replay(self) -> None:
        time.sleep(1e-5)


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    """A device that is none."""
    cuda: Any = torch.cuda
    made = type("Made", (Graph,), {})
    for name, value in {
        "Event": Event,
        "CUDAGraph": made,
        "Stream": Stream,
        "current_stream": Stream,
        "set_device": lambda d: None,
        "stream": lambda s: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "empty_cache": lambda: None,
        "synchronize": lambda d=None: None,
        "memory_allocated": lambda d=None: 0,
    }.items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(time_op, "_STREAMS", {})
    return made


class OnDevice(time_op.Timer):
    """A timer that takes a CPU for a GPU."""

    def __call__(self, runs: Any, before: Any = None) -> Entry:
        with torch.no_grad():
            return self._on_gpu(runs)


# --- timing -----------------------------------------------------------------------------------------


def test_a_gpu_op_is_timed_by_events_between_replays(pretended: type[Graph]) -> None:
    """Many calls make one replay, and a round is one replay."""
    called = []
    entry = OnDevice(CPU, 0.02)([lambda: called.append(1)])
    assert entry.seconds > 0 and entry.repeats >= time_op.LEAST_ROUNDS
    assert len(called) == 2 * time_op.LEAST_CALLS  # once to warm up, once to record; the rest is replayed


def test_what_can_not_be_recorded_is_timed_in_a_loop(pretended: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch is told that there is no recording: it would otherwise go on taking memory for it."""
    pretended.fails = True
    abandoned: list[Any] = []
    monkeypatch.setattr(time_op.torch_private, "abandon_recording", lambda *what: abandoned.append(what))
    called = []
    entry = OnDevice(CPU, 0.0)([lambda: called.append(1)])
    assert entry.seconds > 0 and len(called) > 3 * time_op.LEAST_CALLS
    assert [(d, p) for d, p, _ in abandoned] == [(CPU, (0, 1))]


def test_heavy_ops_are_run_for_a_while_before_they_are_timed(
    pretended: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks fall under load, so the first calls are too fast."""
    replays: list[float] = []

    def slow(self: Graph) -> None:
        replays.append(time.perf_counter())
        time.sleep(2 * time_op.HEAVY_S * time_op.LEAST_CALLS)

    monkeypatch.setattr(pretended, "replay", slow)
    monkeypatch.setattr(time_op, "HEAT_S", 0.4)
    entry = OnDevice(CPU, 0.0)([lambda: None])
    assert len(replays) >= 2 + entry.repeats + 5  # two to estimate, then heat, then rounds


def test_an_update_is_measured_in_a_form_that_can_be_recorded() -> None:
    """Torch refuses to record optimizers that were not told of it, and a loop would measure the host."""
    made: dict[str, Any] = {}
    real = torch.optim.AdamW

    def spy(params: Any, **options: Any) -> Any:
        made.update(options)
        return real(params, fused=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", spy)
        patch.setattr(time_op, "operand", lambda spec, mark, device, below=2: torch.zeros(spec.shape))
        time_op._update(parse_key("optimizer.adamw(2,64)")[0], torch.device("cuda"))
    assert made == {"fused": True, "capturable": True}


# --- what is measured -------------------------------------------------------------------------------


def test_every_key_of_a_gpus_profile_is_one_that_programs_ask_for() -> None:
    """Those that run on a CPU in reasonable time are run, or one could be left out of every profile in silence."""
    keys = shapes.keys("gpu")
    assert len(set(keys)) == len(keys) > 500
    families = {traits_of(*parse_key(k)).family for k in keys}
    assert {"matmul", "attention", "convolution", "optimizer"} <= families
    small = 0
    for key in keys:
        call, marks = parse_key(key)
        assert key_of(numbered(call), marks) == key
        traits = traits_of(call, marks)
        if traits.flops < 5e6 and traits.nbytes < 1e6:
            small += 1
            with torch.no_grad():
                time_op.runs_of(key, CPU, 1)[0]()
    assert small > 15


def test_most_of_a_gpus_profile_is_what_compiled_steps_call() -> None:
    """Time is short, and single elementwise ops are not among them."""
    keys = shapes.keys("gpu")[:400]
    used = [traits_of(*parse_key(k)).family in ("matmul", "attention", "convolution", "optimizer") for k in keys]
    assert sum(used) > 0.7 * len(keys)


def test_convolutions_of_a_gpu_have_channels_last() -> None:
    """As the compiler runs them."""
    keys = [k for k in shapes.keys("gpu") if k.startswith("aten.convolution(")]
    call, marks = parse_key(keys[0])
    x = time_op.operand(call.ins[0], marks[0], CPU)
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_compiled_kernels_have_keys_that_can_be_read() -> None:
    """And each kind is among the first ten, since time may run out."""
    cases = list(time_fused.cases(CPU))
    for key, *_ in cases:
        call, marks = parse_key(key)
        assert key_of(numbered(call), marks) == key
    first = {traits_of(*parse_key(key)).family for key, *_ in cases[:10]}
    assert first == {"fused.pointwise", "fused.reduction", "indexing", "draws"}


def test_a_compiled_kernel_that_fails_is_noted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured all the same; those that were tried before are not tried again."""
    keys = [key for key, *_ in time_fused.cases(CPU)]

    def one(timer: Any, function: Any, make: Any, nbytes: int) -> Entry:
        if function is time_fused._chain:
            raise RuntimeError("no compiler")
        return Entry(1e-5, 0.01, 7)

    monkeypatch.setattr(time_fused, "_one", one)
    said: list[dict[str, Any]] = []
    found = dict(time_fused.measure(CPU, time.monotonic() + 60, frozenset(keys[1:2]), lambda **line: said.append(line)))
    failed = {k for line in said for k in line.get("failed", ())}
    assert len(failed) == len(time_fused.TIMED_POINTWISE) and keys[1] not in found
    assert set(found) | failed | {keys[1]} == set(keys)
    assert not list(time_fused.measure(CPU, time.monotonic() - 1))


# --- failures while measuring -----------------------------------------------------------------------


def test_an_op_that_fails_on_a_gpu_is_noted_and_left_out(
    pretended: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises."""
    monkeypatch.setattr(time_op, "Timer", OnDevice)
    monkeypatch.setattr(time_op, "workspace_bytes", lambda device: 5)
    said: list[dict[str, Any]] = []
    job = sweep.SweepJob(1, 1, "cuda", [ADD, UNKNOWN, MM], 10.0, 0.0)
    note, say = (lambda **line: said.append(line)), (lambda *_: None)
    sweep._one_by_one(job, CPU, time.monotonic() + 60, note, say)
    measured = {k for line in said for k in line.get("ops", ())}
    assert measured == {ADD, MM} and [k for line in said for k in line.get("failed", ())] == [UNKNOWN]
    assert said[0] == {"other": {"workspace_bytes": 5}}
    said.clear()
    sweep._one_by_one(replace(job, skip=(ADD,)), CPU, time.monotonic() - 1, note, say)
    assert said == []


def test_a_gpu_that_dies_costs_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed assertion on a device leaves its process useless: another one goes on behind the op that did it."""
    jobs: list[sweep.SweepJob] = []

    def by_ranks(job: sweep.SweepJob, progress: Any) -> Any:
        jobs.append(job)
        if len(jobs) == 1:
            lines = [{"trying": ADD}, {"ops": {ADD: [1e-6, 0.0, 7]}}, {"trying": UNKNOWN}]
            return [lines], LaminarError("rank 0 of 1 failed while measuring")
        return [[{"trying": MM}, {"ops": {MM: [2e-6, 0.0, 7]}}, {"other": {"device": "H"}}]], None

    monkeypatch.setattr(sweep, "_by_ranks", by_ranks)
    section, _, other = sweep.measure_section(sweep.SweepJob(1, 1, "cuda", [ADD, UNKNOWN, MM], 60.0, 0.0, fused=True))
    assert set(section.ops) == {ADD, MM} and list(other["failed"]) == [UNKNOWN]
    assert jobs[1].keys == [MM] and jobs[1].skip == (ADD, UNKNOWN) and jobs[1].fused


def test_a_gpu_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an empty profile."""
    monkeypatch.setattr(sweep, "_by_ranks", lambda job, progress: ([[]], LaminarError("no driver")))
    with pytest.raises(LaminarError, match="no driver"):
        sweep.measure_section(sweep.SweepJob(1, 1, "cuda", [ADD], 60.0, 0.0))


def test_a_gpus_profile_is_found_by_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name that they look for, with what libraries keep of memory."""
    cluster = Cluster.preset("h200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    big = "aten.mm(bf16[4096,4096],bf16[4096,4096])->bf16[4096,4096]"
    entries = {
        ADD: Entry(2e-6, 0.01, 7),
        big: Entry(2e-4, 0.01, 7),
        "fused.pointwise(2,50331648)": Entry(2e-5, 0.01, 7),
    }
    other = {"launch_s": 4e-6, "workspace_bytes": 124 << 20, "failed": {UNKNOWN: "RuntimeError"}}
    monkeypatch.setattr(
        sweep, "measure_section", lambda job, progress: (Section("NVIDIA H200", {}, entries), [], other)
    )
    found = sweep.profile(cluster, ranks=[1], budget_s=10.0)
    name = section_of(found, 1)
    assert OpCost(found, name).exact and set(Table.of(found.profile).sections) == {name}
    assert found.device.launch_s.value == 4e-6 and found.device.kernel_s.value == 2e-6
    assert found.device.bytes_per_s.source == "measured" and found.profile["failed"] == other["failed"]
    again = Cluster.from_json(json.loads(json.dumps(found.to_json())))
    graph = specimen("mlp.py:tiny").graph
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 1}))
    more = predict(graph, plan, again).memory.peak_bytes - predict(graph, plan, cluster).memory.peak_bytes
    assert more == (124 - 32) << 20


# --- whole steps ------------------------------------------------------------------------------------


def _broken() -> nn.Module:
    raise RuntimeError("out of something")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three small trials and one that fails, timed on the CPU through the code that times a GPU."""
    plain = partial(inductor_step.Compiled, compiler=inductor_step.run_uncompiled)
    few = [
        gpu_trials.GpuTrial(
            f"net{width}",
            lambda width=width: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)),
            trials._classes,
            trials._labelled((4, 8), 4),
            "f32",
        )
        for width in (8, 16, 32)
    ]
    few.insert(1, gpu_trials.GpuTrial("broken", _broken, trials._classes, trials._labelled((4, 8), 4)))
    path = tmp_path_factory.mktemp("trials") / "trials.jsonl"
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor_step, "Compiled", plain)
        gpu_trials.run_trials(path, 600.0, few, "cpu", turn_s=0.0)
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_a_trial_that_fails_does_not_stop_the_others(lines: list[dict[str, Any]]) -> None:
    """And each that went well has what is needed to fit again, elsewhere and later."""
    assert [line["model"] for line in lines] == ["net8", "broken", "net16", "net32"]
    assert "out of something" in lines[1]["error"]
    for line in lines[:1] + lines[2:]:
        assert line["seconds"] > 0 and line["skipped"] == 0 and {"graph", "plan", "host_s", "allocated"} <= set(line)


def test_a_gpu_is_calibrated_from_trials(lines: list[dict[str, Any]]) -> None:
    """The calibration is one that predictions use; too few trials make none."""
    cluster = Cluster.preset("h200")
    lines = [{**line, "host_alone_s": 0.0} for line in lines]  # on a CPU the host is the device
    found = gpu_trials.calibrated_on_gpu(cluster, lines)
    fitted = machine(found, Mesh({"dp": 1})).calibration
    assert fitted.models == ("net8", "net16", "net32")
    assert found.profile["failed"] == {"broken": lines[1]["error"]}
    rows = found.profile["trials"][section_of(cluster, 1)]
    assert [row[:2] for row in rows] == [[m, "data"] for m in fitted.models]
    busy = [{**line, "host_alone_s": line.get("seconds", 0.0)} for line in lines[:1]]
    for few in (lines[:2], busy + lines[1:]):
        assert not machine(gpu_trials.calibrated_on_gpu(cluster, few), Mesh({"dp": 1})).calibration.models


def test_what_libraries_keep_is_counted_once(pretended: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they have taken it before the first case or not: it belongs to every step that computes products."""
    held = [0]

    def first_product(device: torch.device) -> int:
        held[0] += 32
        return 32

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: held[0])
    monkeypatch.setattr(gpu_trials, "workspace_bytes", first_product)
    gpu_trials._workspace.cache_clear()
    memory = gpu_trials._Memory(torch.device("cuda"))
    assert memory.empty() == 0
    held[0] += 10  # something that an earlier case left behind
    assert memory.empty() == 10
    gpu_trials._workspace.cache_clear()


def test_features_of_a_compiled_step_add_up_to_what_is_predicted() -> None:
    """Or a calibration would be fitted to something else than what it is used for."""
    cluster = Cluster.preset("h200")
    graph = specimen("gpt.py:tiny").graph
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 1}))
    found = step_features(graph, plan, machine(cluster, plan.mesh, calibrated=False))
    parts = sum(found[k] for k in ("compute", "memory", "update"))
    assert parts == pytest.approx(predict(graph, plan, cluster).seconds, rel=1e-3)
    assert found["steps"] == 1 and found["lines"] > 20 and found["compute"] > 0


def test_on_a_quiet_machine_seconds_are_seconds() -> None:
    """All trials slower than their parts by a fifth: the fit must say so, not put it down to the machine's mood."""
    parts = [(3e-3, 1e-3, 2e-4, 100), (1e-3, 2e-3, 1e-4, 300), (5e-3, 4e-3, 9e-4, 200), (8e-4, 6e-4, 3e-4, 80)]
    timings = [
        Timing(f"m{i}", "data", {"compute": c, "memory": m, "update": u, "lines": n, "steps": 1}, 1.2 * (c + m + u))
        for i, (c, m, u, n) in enumerate(parts)
    ]
    found = fit(timings, quiet=True)
    for t in timings:
        assert found.seconds(t.features) == pytest.approx(t.seconds, rel=0.05)
    assert found.sigma < 0.06

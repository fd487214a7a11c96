"""Offload as a plan decides it: the same bits, two blocks on the device, and the rest where it costs nothing.

The lines are identities, so every comparison of results is exact. That copies run beside compute is tried out with a
link that copies as late as it is allowed to, and one that copies at once: results must not depend on when.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import laminar
from laminar import Cluster, Mesh
from laminar.cli import main
from laminar.cost.memory.peak import memory
from laminar.errors import ClusterError, PlanError
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Figure
from laminar.ir.ops import FREE, HOST_BRING, HOST_SEND
from laminar.ir.plans.patterns import pick
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Program
from laminar.ir.serial.codec import Ref
from laminar.lower.kernels import kernels, parts
from laminar.lower.memory.mincut_recompute import recompute, written_out
from laminar.lower.memory.offload import BACK, STAYS_SHARE, sent_bytes, without_offload
from laminar.lower.memory.planned_recompute import boundary_bytes, early
from laminar.placement.presets import like
from laminar.placement.random_plan import random_plan
from laminar.runtime.check.in_process import lockstep
from laminar.runtime.code import host_copies as copies
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.code.host_copies import Bring, HostLink, Send, flat, link_of, packed
from laminar.runtime.code.inductor_step import Compiled, run_uncompiled
from laminar.runtime.comm.transport import Null
from laminar.runtime.trace.tape import Tape
from laminar.staging.stage_plans import pipeline
from tests.support.marks import slow
from tests.support.memory_meter import held
from tests.support.rank_pool import Ranks
from tests.support.recompute_cases import BLOCKS, PLANS, blocks
from tests.support.recompute_job import Net, batches, loss
from tests.support.zoo import EXAMPLES, FEW, Specimen, one_thread, recipe, specimen

CPU = torch.device("cpu")
MANY = "gpt.py:narrow"
"""Eight blocks of a transformer."""


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    with one_thread():
        yield


@cache
def pair(name: str, what: str, *patterns: str) -> tuple[Program, Program]:
    """A program that keeps everything on the device, and one that offloads blocks."""
    graph = specimen(name).graph
    plan = PLANS[what](graph)
    return laminar.lower(graph, plan), laminar.lower(graph, plan.with_offload(*(patterns or blocks(name))))


def copied(program: Program, op: str) -> list[int]:
    """Where values leave, or come back."""
    return [k for k, i in enumerate(program.instrs) if i.op == op]


def same_bits(one: Specimen, *programs: Program) -> None:
    """Every output of every rank, bit by bit."""
    want, *others = (lockstep.run_lockstep(p, one.inputs, one.constants) for p in programs)
    for got in others:
        for a, b in zip(want, got, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                assert torch.equal(a[key], b[key]), key


def given(one: Specimen, program: Program) -> list[Tensor]:
    """Inputs of a program on one rank."""
    return [one.inputs[i.name] for i in program.inputs]


def on_device(program: Program) -> list[int]:
    """By line, bytes of what is offloaded that lie on the device: counted apart from the cost model."""
    instrs = program.instrs
    at = {i.name: k for k, i in enumerate(instrs)}
    whole: dict[Ref, Ref] = {}
    last: dict[Ref, int] = {}
    for k, instr in enumerate(instrs):
        for ref in instr.refs:
            last[whole.get(ref, ref)] = k
        if instr.op in FREE and instr.refs:
            whole |= {Ref(instr.name, n): whole.get(instr.refs[0], instr.refs[0]) for n in range(len(instr.outs))}
    arrived = {Ref(i.name): next(k for k, j in enumerate(instrs) if Ref(i.name) in j.refs) for i in instrs if i.hosts}
    out = [0] * len(instrs)
    for instr in instrs:
        if not instr.hosts:
            continue
        for n, placed in enumerate(instr.outs):
            assert placed is not None
            if instr.op == HOST_SEND:
                source = instr.refs[n]
                first, end = at[source.name], max(last[source], arrived[Ref(instr.name)] - 1)
            else:
                first, end = at[instr.name], last[Ref(instr.name, n)]
            for k in range(first, end + 1):
                out[k] += placed.local(program.mesh).nbytes
    return out


# --- lines


@pytest.mark.parametrize("what", PLANS)
def test_each_block_but_the_last_leaves_and_comes_back_one_ahead(what: str) -> None:
    """In the order of forward, then backwards; each comes back when backward first reads the block behind it."""
    without_it, program = pair(MANY, what)
    sends = [program.instrs[k] for k in copied(program, HOST_SEND)]
    brings = [program.instrs[k] for k in copied(program, HOST_BRING)]
    assert [i.module for i in sends] == [f"blocks.{k}" for k in range(7)]
    assert [i.module for i in brings] == [f"blocks.{k}" for k in reversed(range(7))]
    assert [i.phase for i in (*sends, *brings)] == ["forward"] * 7 + ["backward"] * 7
    for before, send in itertools.pairwise(sends):
        assert send.refs[-1] == Ref(before.name) and len(send.refs) == len(send.outs) + 1
    first = early(program)
    readers = {
        r: k for k, i in reversed([*enumerate(program.instrs)]) if i.name not in first for r in i.refs if not i.hosts
    }
    starts = {i.module: k for k, i in enumerate(program.instrs) if i.op == HOST_BRING}
    reads = {i.module: min(k for r, k in readers.items() if r.name == i.name) for i in brings}
    for k in range(6):
        mine, behind = f"blocks.{k}", f"blocks.{k + 1}"
        assert starts[mine] < reads[mine] and (k == 5 or reads[f"blocks.{k + 2}"] < starts[mine] <= reads[behind])
        between = [i.module for i in program.instrs[starts[mine] : reads[mine]]]
        assert any(m.startswith(behind) for m in between)  # its copy has a block's backward to hide behind
    assert not any(i.hosts for i in without_it.instrs)


@pytest.mark.parametrize("name", [n for n in BLOCKS if n != "lstm.py:tiny"] + ["gpt.py:tiny", MANY, "moe.py:tiny"])
def test_what_is_sent_is_made_in_its_block_and_read_by_nobody_in_backward(name: str) -> None:
    """No weights, no inputs, no results, no views, nothing small; backward reads what came back and views of it."""
    _, program = pair(name, "data")
    picked = pick(specimen(name).graph, blocks(name))
    makers = {i.name: i for i in program.instrs}
    first = early(program)
    leaving = {o.ref for o in program.outputs}
    sent: set[Ref] = set()
    for k in copied(program, HOST_SEND):
        line = program.instrs[k]
        sizes = [p.local(program.mesh).nbytes for p in line.outs if p]
        assert min(sizes) * STAYS_SHARE >= max(sizes)
        for ref in line.refs[: len(line.outs)]:
            maker = makers[ref.name]
            assert maker.op not in FREE and maker.name in first and ref not in leaving
            assert line.module in (picked.block_of(maker.module), f"%{picked.value_of(maker.name)}") or any(
                i.name in picked.values for i in program.instrs if ref in i.refs
            )
            assert ref not in sent
            sent.add(ref)
    assert sent
    looks: dict[str, Ref] = {}
    for instr in program.instrs:
        roots = {looks.get(r.name, r) for r in instr.refs}
        if instr.name not in first:
            assert sent.isdisjoint(roots), instr.name
        if instr.op in FREE and instr.refs:
            looks[instr.name] = looks.get(instr.refs[0].name, instr.refs[0])


@pytest.mark.parametrize("name", [MANY, "llama.py:tiny", "bert.py:tiny", "hf.py:gpt2", "vit.py:tiny"])
def test_at_most_two_blocks_lie_on_the_device(name: str) -> None:
    """Of what travels, at every line, in the program as it is lowered and as it is compiled."""
    _, program = pair(name, "alone")
    for form in (program, recompute(written_out(program))):
        sizes = [form.instrs[k].bytes for k in copied(form, HOST_SEND)]
        assert sizes and max(on_device(form)) <= 2 * max(sizes)


def test_a_block_that_is_named_alone_leaves() -> None:
    """Where several are named, the one that backward begins with stays; one alone would be offloaded for nothing."""
    _, program = pair(MANY, "alone", "blocks.3")
    (send, last), (back,) = copied(program, HOST_SEND), copied(program, HOST_BRING)
    first = early(program)
    assert back > next(k for k, i in enumerate(program.instrs) if i.name not in first) > last > send
    assert program.instrs[last].refs[-1] == Ref(program.instrs[send].name)
    assert program.instrs[last].bytes == min(p.local(program.mesh).nbytes for p in program.instrs[back].outs if p)


@pytest.mark.parametrize("which", range(6))
def test_what_is_held_where_forward_ends_is_less_by_a_block_that_leaves(which: int) -> None:
    """But for its smallest value, of which somebody has to see off the rest; it comes back when there is room."""
    graph = specimen(MANY).graph
    plan = PLANS["alone"](graph)
    kept, away = (laminar.lower(graph, p) for p in (plan, plan.with_offload(f"blocks.{which}")))
    sends = [away.instrs[k] for k in copied(away, HOST_SEND)]
    assert memory(kept).peak_activations - memory(away).peak_activations == sends[0].bytes


def test_the_last_block_that_is_named_leaves_if_it_does_not_come_straight_back() -> None:
    """With half of the model between its end and backward there is time and use for both ways."""
    _, program = pair(MANY, "alone", r"blocks\.[024]")
    assert [program.instrs[k].module for k in copied(program, HOST_SEND)] == ["blocks.0", "blocks.2", *["blocks.4"] * 2]
    sizes = [program.instrs[k].bytes for k in copied(program, HOST_SEND)]
    assert max(on_device(program)) <= 2 * max(sizes)


def test_values_leave_by_name() -> None:
    """Also those that are looked at by the name that is given."""
    graph = specimen("gpt.py:tiny").graph
    for pattern in ("%gelu.*", "%view.*", "%transpose.*"):
        if not any(n.name.startswith(pattern[1:-2]) for n in graph.nodes if n.phase == "forward"):
            continue
        without_it, program = pair("gpt.py:tiny", "data", pattern)
        assert copied(program, HOST_SEND), pattern
        same_bits(specimen("gpt.py:tiny"), without_it, program)


def test_a_program_without_its_copies_is_the_one_that_keeps_everything() -> None:
    """But for views, which are made where they are read. Putting the lines in again changes nothing."""
    plain, program = pair(MANY, "data")
    back = without_offload(program)
    assert not any(i.hosts for i in back.instrs) and boundary_bytes(back) == boundary_bytes(plain)
    names = {i.name.removesuffix(BACK) for i in back.instrs}
    assert names == {i.name for i in plain.instrs}
    same_bits(specimen(MANY), plain, back)


# --- the same bits


@pytest.mark.parametrize("name", FEW)
def test_results_are_those_without_offload_to_the_last_bit(name: str) -> None:
    """Data, tensor, ZeRO 3 and two axes at once: dropout, batch norm, experts, tied weights, convolutions."""
    for what in PLANS:
        plain, program = pair(name, what)
        same_bits(specimen(name), plain, program)
        if name != "lstm.py:tiny":
            assert copied(program, HOST_SEND) and boundary_bytes(program) < boundary_bytes(plain)


@pytest.mark.parametrize("name", ["gpt.py:tiny", "moe.py:tiny", "resnet.py:tiny", slow("t5.py:tiny")])
def test_any_placement_and_any_pattern_gives_the_same_bits(name: str) -> None:
    """Random placements of every op, random modules and values, some blocks recomputed."""
    one, rng = specimen(name), random.Random(f"away {name}")
    modules = sorted({n.module for n in one.graph.nodes if n.phase == "forward" and n.module})
    values = [f"%{n.name}" for n in one.graph.nodes if n.phase == "forward"]
    for _ in range(4):
        plan = random_plan(one.graph, Mesh(rng.choice(({"a": 2}, {"a": 3}, {"a": 2, "b": 2}))), rng.randrange(10**6))
        some = [m.replace(".", r"\.") for m in rng.sample(modules, 4)] + rng.sample(values, 4)
        again: list[str] = []
        for pattern in list(some):
            with contextlib.suppress(PlanError):
                laminar.lower(one.graph, replace(plan, recompute=(pattern,), offload=tuple(some[1:])))
                again = [pattern]
                break
        chosen = replace(plan, recompute=tuple(again), offload=tuple(p for p in some if p not in again))
        with contextlib.suppress(PlanError):
            same_bits(one, laminar.lower(one.graph, plan), laminar.lower(one.graph, chosen))
        same_bits(one, laminar.lower(one.graph, plan), laminar.lower(one.graph, plan.with_offload(*some)))


class Late(HostLink):
    """Copies when somebody waits for it, and not before: what is copied must still be there, and nothing read early."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.queue: list[tuple[Any, Sequence[tuple[Tensor, Tensor]]]] = []
        self.waiting = 0

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        token = object()
        self.queue.append((token, pairs))
        self.waiting = max(self.waiting, len(self.queue))
        for to, _ in pairs:
            to.fill_(float("nan") if to.is_floating_point() else 1)
        return token

    def take(self, like: Tensor) -> Tensor:
        buffer = super().take(like)
        return buffer if not any(p[1].data_ptr() == buffer.data_ptr() for _, q in self.queue for p in q) else _refuse()

    def wait(self, done: Any) -> None:
        while any(token is done for token, _ in self.queue):
            _, pairs = self.queue.pop(0)
            for to, source in pairs:
                to.copy_(source)


def _refuse() -> Tensor:
    raise AssertionError("a buffer is filled again before its values have come back")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """A device whose copies are late."""
    link = Late()
    monkeypatch.setattr(copies, "link_of", lambda device: link)
    return link


def same_steps(one: Specimen, make: Callable[[Program], Callable[..., list[Tensor]]], *programs: Program) -> None:
    """Three steps of each, on one rank."""
    want, *others = (make(p) for p in programs)
    kept = [t.clone() for t in want(*given(one, programs[0]))]
    for step, program in zip(others, programs[1:], strict=True):
        for _ in range(3):
            got = step(*given(one, program))
            assert all(torch.equal(a, b) for a, b in zip(kept, got, strict=True))


def line_by_line(one: Specimen) -> Callable[[Program], EagerStep]:
    return lambda p: EagerStep(p, Null(p.mesh), one.constants)


def in_parts(one: Specimen, traffic: float | None = None) -> Callable[[Program], Compiled]:
    return lambda p: Compiled(p, Null(p.mesh), one.constants, compiler=run_uncompiled, traffic=traffic)


@pytest.mark.parametrize("name", ["gpt.py:tiny", MANY, "bert.py:tiny", "resnet.py:tiny", "moe.py:tiny", "unet.py:tiny"])
def test_a_rank_gives_the_same_bits_however_late_copies_are(name: str, late: Late) -> None:
    """Line by line and in parts: no value is let go, overwritten or read while it is on its way."""
    one, programs = specimen(name), pair(name, "alone")
    same_steps(one, line_by_line(one), *programs)
    same_steps(one, in_parts(one), *programs)
    same_steps(one, in_parts(one, 0.45), *programs)
    assert late.waiting and not late.queue


def overwriting(fn: Any, inputs: list[Tensor], late: bool, mine: list[int], shown: list[int]) -> Any:
    """A compiler that overwrites all it may, behind its back."""

    def run(args: list[Tensor]) -> Any:
        out = [t.clone() for t in fn(*args)]
        for k in mine:
            args[k].fill_(7)
        return out

    return run


@pytest.mark.parametrize("name", ["gpt.py:tiny", MANY, "resnet.py:tiny"])
def test_no_part_overwrites_what_is_still_being_copied(name: str, late: Late) -> None:
    """Inputs that a part may overwrite are those that nobody else looks at, a copy under way included."""
    one = specimen(name)
    make = lambda p: Compiled(p, Null(p.mesh), one.constants, compiler=overwriting, traffic=None)  # noqa: E731
    same_steps(one, make, *pair(name, "alone"))
    brought = {r for p in make(pair(name, "alone")[1]).parts for r in p.own if r.name.startswith("bring_")}
    assert brought


def test_buffers_are_made_in_the_first_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And another shape of batch, or another model of the same shapes, finds them there."""
    link = HostLink(CPU)
    monkeypatch.setattr(copies, "link_of", lambda device: link)
    one, (_, program) = specimen(MANY), pair(MANY, "alone")
    step = line_by_line(one)(program)
    step(*given(one, program))
    made = link.nbytes
    assert made == sent_bytes(program)
    step(*given(one, program))
    line_by_line(one)(program)(*given(one, program))
    assert link.nbytes == made


def test_parts_end_where_values_leave_and_come_back() -> None:
    """As they do at collectives; the cost model cuts where the runtime does; nothing is replayed."""
    one, (plain, program) = specimen(MANY), pair(MANY, "alone")
    step = in_parts(one, 0.45)(program)
    assert len(step.parts) > len(in_parts(one, 0.45)(plain).parts) + 10
    cut = parts(step.program)
    lines = [{cut[line.name] for line in part.lines} for part in step.parts]
    assert all(len(found) == 1 for found in lines)
    assert len({k for found in lines for k in found}) == len(step.parts)
    assert not Compiled(program, Null(program.mesh), one.constants, compiler=run_uncompiled, replay=True).replays


def test_what_compiled_steps_make_again_does_not_travel() -> None:
    """A GPT's activation functions run again in backward: their results are neither kept nor sent."""
    _, program = pair(MANY, "alone")
    form = recompute(written_out(program))
    assert 0 < sent_bytes(form) < sent_bytes(program)
    assert not any(
        i.name.startswith("gelu")
        for k in copied(form, HOST_SEND)
        for i in form.instrs
        if Ref(i.name) in form.instrs[k].refs
    )
    same_bits(specimen(MANY), written_out(without_offload(program)), form)


def test_steps_that_are_recorded_give_the_same_bits() -> None:
    """With a stamp behind every line, copies among them."""
    one, (plain, program) = specimen("gpt.py:tiny"), pair("gpt.py:tiny", "alone")
    for make in (line_by_line(one), in_parts(one)):
        want = [t.clone() for t in make(plain)(*given(one, plain))]
        transport = Null(program.mesh)
        transport.tape = Tape(0)
        step: Any = make(program)
        step.transport = transport
        transport.tape.begin()
        got = step(*given(one, program))
        transport.tape.end()
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        (told,) = transport.tape.told()
        assert {"send_blocks_0", "bring_blocks_0"} <= {s.name for s in told.spans}


# --- jobs


def _plan(graph: Any, mesh: Mesh, what: str, offload: tuple[str, ...]) -> Any:
    make: Any = laminar.plans.zero if what == "zero3" else laminar.plans.data_parallel
    return make(graph, mesh, offload=offload)


def _trained(what: str, world: int, offload: tuple[str, ...], micro_batches: int) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    data = batches([8, 8, 6, 8])
    plan = partial(_plan, what=what, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job = laminar.parallelize(
        model,
        loss,
        optimizer,
        batch=data[0],
        plan=plan,
        mesh=Mesh({"dp": world}),
        device="cpu",
        micro_batches=micro_batches,
    )
    return [job.step(b).loss for b in data], job.state_dict()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_job_trains_to_the_same_bits(micro_batches: int) -> None:
    """Dropout, two shapes of batch, micro-batches: losses and weights after four steps."""
    made = link_of(CPU).nbytes
    (want, state), (got, other) = (_trained("data", 1, p, micro_batches) for p in ((), ("blocks.*",)))
    assert want == got and all(torch.equal(state[k], other[k]) for k in state)
    assert link_of(CPU).nbytes > made


def _both(what: str) -> bool:
    (want, state), (got, other) = (_trained(what, 2, p, 1) for p in ((), ("blocks.*",)))
    return want == got and all(torch.equal(state[k], other[k]) for k in state)


@pytest.mark.slow
def test_two_ranks_train_to_the_same_bits() -> None:
    """Data parallel and ZeRO 3, whose gathers stand between the copies."""
    ranks = Ranks(2)
    try:
        assert all(ranks.run(_both, "data")) and all(ranks.run(_both, "zero3"))
    finally:
        ranks.stop()


# --- memory and seconds


@pytest.mark.parametrize("name", [MANY, "bert.py:tiny", "resnet.py:tiny", "hf.py:gpt2"])
def test_memory_is_predicted_to_the_byte(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank holds on the device, line by line; buffers of the host are told apart."""
    one, (plain, program) = specimen(name), pair(name, "alone")
    link = HostLink(CPU)
    monkeypatch.setattr(copies, "link_of", lambda device: link)
    found = memory(program, backend="null", optimizer=0)
    told = found.peak_bytes - found.parameters - found.inputs - found.constants
    real = held(program, one.inputs, one.constants, "null") - link.nbytes
    assert found.host_bytes == link.nbytes == sent_bytes(program)
    assert real == pytest.approx(told, rel=0.02)
    assert found.peak_bytes <= memory(plain, backend="null", optimizer=0).peak_bytes
    if name == MANY:
        assert real == told and found.peak_activations < 0.35 * memory(plain, backend="null").peak_activations


def test_where_the_host_is_the_device_nothing_is_saved() -> None:
    """Buffers of the host count on a CPU rank."""
    _, program = pair(MANY, "alone")
    exact, cpu = memory(program), memory(program, allocator="cpu")
    assert cpu.peak_bytes >= exact.peak_bytes + exact.host_bytes > exact.peak_bytes


def linked(name: str, bytes_per_s: float) -> Cluster:
    """A machine whose hosts are this far away."""
    cluster = Cluster.preset(name)
    return replace(cluster, device=replace(cluster.device, host_bytes_per_s=Figure(bytes_per_s)))


@cache
def wide_gpt() -> Any:
    """A GPT with enough work for a GPU, on the meta device."""
    made = recipe("gpt.py:tiny")
    module = __import__("sys").modules[type(made.model()).__module__]
    config = module.Config(layers=6, d=1024, heads=16, vocab=512, tokens=1024, batch=8)
    with torch.device("meta"):
        model = module.GPT(config)
    ids = torch.zeros(8, 1024, dtype=torch.int64)
    return laminar.capture(model, made.loss, {"ids": ids, "target": ids})


def test_seconds_follow_the_link_where_it_is_the_bottleneck_and_only_there() -> None:
    """Far enough away, a step takes as long as its bytes; near enough, as long as without; memory is the same."""
    graph = wide_gpt()
    plain = laminar.plans.data_parallel(graph, Mesh({"dp": 1}))
    plan = plain.with_offload("blocks.*")
    kept = predict(graph, plain, Cluster.preset("h100"))
    found = {rate: predict(graph, plan, linked("h100", rate)) for rate in (2e12, 50e9, 1e9)}
    assert all(p.memory.peak_bytes < 0.75 * kept.memory.peak_bytes for p in found.values())
    assert len({p.memory.peak_bytes for p in found.values()}) == 1
    launched = predict(graph, plan, linked("h100", 1e15)).seconds  # what is left: no replay, parts apart
    assert found[2e12].seconds < 1.02 * launched
    assert found[2e12].seconds <= found[50e9].seconds < found[1e9].seconds
    moved = 2 * sent_bytes(found[1e9].program) / 1e9
    assert moved < found[1e9].seconds < moved + kept.seconds
    told = found[1e9].timeline.breakdown()
    assert {"activations to the host", "activations back from the host"} <= set(told["exposed"])
    assert "assumed" in found[50e9].known()


def test_copies_have_a_lane_of_their_own() -> None:
    """In order, one at a time, each between where it is started and where it is awaited, disturbing nobody."""
    graph = wide_gpt()
    found = predict(
        graph, laminar.plans.data_parallel(graph, Mesh({"dp": 1}), offload="blocks.*"), linked("h100", 20e9)
    )
    spans = sorted((s for s in found.timeline.spans if s.lane == "offload"), key=lambda s: s.start)
    program = found.program
    assert [s.name for s in spans] == [
        program.instrs[k].name for k in range(len(program.instrs)) if program.instrs[k].hosts
    ]
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    for s in spans:
        assert s.end - s.start == pytest.approx(s.bytes / 20e9 * 1e9, rel=1e-6)
        assert s.kind == "communication"
    plain = predict(graph, laminar.plans.data_parallel(graph, Mesh({"dp": 1})), linked("h100", 20e9))
    compute = [sum(v for v in p.timeline.breakdown()["compute"].values()) for p in (plain, found)]
    assert compute[1] == pytest.approx(compute[0], rel=0.05)


def test_ranks_of_different_sizes_are_priced_apart() -> None:
    """Samples that do not divide: each class of ranks has a lane and copies of its own, of its own length."""
    graph = specimen("gpt.py:tiny").graph
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 3}), offload="blocks.*")
    found = predict(graph, plan, Cluster.preset("8xh100"))
    assert len(found.schedule.stands_for) == 2
    copies_of = {
        r: [s for s in found.timeline.spans if s.lane == "offload" and s.rank == r] for r in found.schedule.stands_for
    }
    sizes = {r: sum(s.end - s.start for s in spans) for r, spans in copies_of.items()}
    assert len(set(sizes.values())) == 2 and all(len(spans) == 2 for spans in copies_of.values())


def test_on_a_cpu_copies_are_the_ranks_own_work() -> None:
    """No lane beside, and a longer step."""
    graph = specimen(MANY).graph
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 2}))
    without_it, found = (predict(graph, p, Cluster.preset("2xcpu")) for p in (plan, plan.with_offload("blocks.*")))
    assert found.seconds > without_it.seconds
    assert not any(s.lane == "offload" for s in found.timeline.spans)


def test_kernels_are_cut_where_values_leave() -> None:
    """A copy stands alone, and every line is in one group."""
    form = recompute(written_out(pair(MANY, "alone")[1]))
    groups = kernels(form)
    assert sorted(k for g in groups for k in g) == list(range(len(form.instrs)))
    assert all(len(g) == 1 for g in groups if any(form.instrs[k].hosts for k in g))


def test_a_link_is_a_number_of_the_cluster() -> None:
    """With its source, in files of today and of yesterday; nonsense is refused by name."""
    cluster = Cluster.preset("8xh100")
    assert cluster.device.host_bytes_per_s == Figure(50e9, "assumed", "PCIe 5, 16 lanes, pinned memory")
    data = json.loads(json.dumps(cluster.to_json()))
    assert Cluster.from_json(data) == cluster
    del data["device"]["host_bytes_per_s"]
    assert Cluster.from_json(data).device.host_bytes_per_s.source == "assumed"
    with pytest.raises(ClusterError, match=r"device\.host_bytes_per_s"):
        linked("h100", 0.0)


# --- plans


def test_plans_with_offload_are_saved_told_and_told_apart() -> None:
    """In files, in the hash, in words; a plan without has none in its file, so that old files and hashes stay."""
    graph = specimen("gpt.py:tiny").graph
    plain = laminar.plans.data_parallel(graph, Mesh({"dp": 2}))
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 2}), offload="blocks.*")
    assert "offload" not in plain.to_json() and Plan.from_json(plain.to_json()).offload == ()
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.offload == ("blocks.*",) and again.hash == plan.hash != plain.hash
    assert "kept in the host's memory: blocks.*" in plan.explain() and "there and back" in plan.explain()
    assert "host" not in plain.explain()
    assert plan.with_offload().hash == plain.hash and plain.with_offload("blocks.*").hash == plan.hash
    assert str(laminar.lower(graph, plan)).count("activations to the host") == 1
    assert like(graph, plan).offload == ("blocks.*",)
    with pytest.raises(PlanError, match="corrupt plan"):
        Plan.from_json({**plan.to_json(), "offload": [3]})


def test_every_preset_takes_patterns() -> None:
    """One, or several, or several in one text."""
    graph, mesh = specimen("gpt.py:tiny").graph, Mesh({"dp": 2})
    made = [
        laminar.plans.zero(graph, mesh, offload=["blocks.0", "head"]),
        laminar.plans.tensor_parallel(graph, Mesh({"tp": 2}), offload="blocks.0, head"),
        laminar.plans.seeded(graph, mesh, {"batch.*": {"dp": laminar.S(0)}}, offload=("blocks.0", "head")),
    ]
    assert [p.offload for p in made] == [("blocks.0", "head")] * 3


@pytest.mark.parametrize(
    ("recompute", "offload", "named"),
    [
        ("blocks.*", "blocks.0", "blocks.0"),
        ("blocks.1.mlp", "blocks.*", "blocks.1.mlp"),
        ("%gelu_0", "%gelu.*", "%gelu_0"),
        ("blocks.*", "%gelu_0", "%gelu_0"),
        ("%gelu_0", "blocks.*", "%gelu_0"),
    ],
)
def test_what_is_both_made_again_and_offloaded_is_refused_by_name(recompute: str, offload: str, named: str) -> None:
    """When the plan is made, and where it was written by hand, when it is lowered."""
    graph = specimen("gpt.py:tiny").graph
    with pytest.raises(PlanError, match=f"^{named} is both"):
        laminar.plans.data_parallel(graph, Mesh({"dp": 2}), recompute=recompute, offload=offload)
    with pytest.raises(PlanError, match="not in both"):
        laminar.lower(graph, PLANS["data"](graph).with_recompute(recompute).with_offload(offload))


def test_blocks_may_be_made_again_beside_blocks_that_are_offloaded() -> None:
    """One or the other for each."""
    one = specimen(MANY)
    plan = PLANS["data"](one.graph)
    mixed = plan.with_recompute(r"blocks\.[0246]").with_offload(r"blocks\.[1357]")
    program = laminar.lower(one.graph, mixed)
    assert [program.instrs[k].module for k in copied(program, HOST_SEND)] == ["blocks.1", "blocks.3", "blocks.5"]
    same_bits(one, laminar.lower(one.graph, plan), program)


def test_stages_refuse_offload_with_what_to_do_instead() -> None:
    """Where it is asked for, where an inner plan has it, and where a plan was put together by hand."""
    graph = specimen(MANY).graph
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 1}), offload="blocks.*")
    for options in ({"offload": "blocks.*"}, {"inner": plan}):
        with pytest.raises(PlanError, match=r"offload of blocks\.\* in a plan with stages") as error:
            pipeline(graph, 2, 2, **options)  # type: ignore[arg-type]
        assert "recompute" in str(error.value)
    staged = pipeline(graph, 2, 2)
    own = tuple(replace(s, plan=s.plan.with_offload("blocks.*")) for s in staged.stages)
    from laminar.lower.stages.stage_programs import stages

    with pytest.raises(PlanError, match="in a plan with stages"):
        stages(graph, replace(staged, stages=own))


@pytest.mark.parametrize(("pattern", "what"), [("bloks.*", "names no module"), ("%gelo", "names no value")])
def test_patterns_that_name_nothing_are_refused(pattern: str, what: str) -> None:
    """With what there is."""
    graph = specimen("gpt.py:tiny").graph
    with pytest.raises(PlanError, match=what):
        laminar.plans.data_parallel(graph, Mesh({"dp": 2}), offload=pattern)


def test_the_command_line_takes_patterns(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`laminar plan --offload`; what is written verifies, simulates; stages and searches say no."""
    which, file = str(EXAMPLES / "gpt.py:tiny"), str(tmp_path / "plan.json")
    assert main(["plan", which, "--mesh", "dp=2", "--offload", "blocks.*", "--cluster", "2xh100", "-o", file]) == 0
    assert "kept in the host's memory: blocks.*" in capsys.readouterr().out
    assert main(["verify", which, "--plan", file]) == 0
    assert main(["simulate", file]) == 0
    assert main(["plan", which, "--mesh", "dp=2", "--offload", "blocks.*", "--program"]) == 0
    assert "host.bring(" in capsys.readouterr().out
    assert main(["plan", which, "--stages", "2", "--micro-batches", "2", "--offload", "blocks.*"]) == 2
    assert "stages keep stays on the device" in capsys.readouterr().err
    assert main(["plan", which, "--cluster", "2xh100", "--offload", "blocks.*"]) == 2
    assert "do not go with a search" in capsys.readouterr().err


# --- CUDA's paths


class Stream:
    """A stream that notes what it is told."""

    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name = notes, name

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.notes.append(f"{self.name} waits for copy {event.number}")


class Event:
    """An event that is numbered by when it was recorded."""

    def __init__(self) -> None:
        self.number = -1

    def record(self, stream: Stream) -> None:
        self.number = sum(n.startswith("recorded") for n in stream.notes)
        stream.notes.append(f"recorded {self.number} on {stream.name}")


def test_on_a_gpu_copies_have_a_stream_and_wait_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side stream waits for compute before each copy, compute for the copy where it is finished; pinned, and
    without waiting on the host."""
    notes: list[str] = []
    compute, real = Stream(notes, "compute"), torch.empty
    cuda: Any = torch.cuda
    for name, value in {
        "Stream": lambda device: Stream(notes, "side"),
        "current_stream": lambda device: compute,
        "Event": Event,
        "stream": lambda s: contextlib.nullcontext(notes.append(f"on {s.name}")),
    }.items():
        monkeypatch.setattr(cuda, name, value)
    pinned: list[bool] = []

    def empty(*size: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        pinned.append(pin_memory)
        return real(*size, **more)

    link = HostLink(torch.device("cuda"))
    link.device = CPU
    monkeypatch.setattr(copies.torch, "empty", empty)
    send, bring = Send(1, link), Bring(link)
    x = torch.randn(3, 4).t()
    begin = ["side waits for compute", "on side"]
    flying = send.start(x, torch.zeros(1))
    assert notes == [*begin, "recorded 0 on side"]
    (there,) = send.finish(flying)
    back = bring.start(there)
    (y,) = bring.finish(back)
    assert notes[3:] == ["compute waits for copy 0", *begin, "recorded 1 on side", "compute waits for copy 1"]
    assert pinned == [True] and torch.equal(x, y) and y.stride() == x.stride()
    send.start(x)
    assert pinned == [True]  # the buffer that came back


@pytest.mark.parametrize(
    "t",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(5.0)[1:4],
        torch.arange(12.0).view(3, 4)[:, 1:3],
        torch.ones(1).expand(4),
        torch.arange(6).view(1, 2, 3).transpose(0, 1),
        torch.tensor(3.0),
        torch.empty(0, 3),
    ],
)
def test_values_lie_as_they_lay_unless_there_are_gaps(t: Tensor) -> None:
    """A copy is one stretch of memory; what has gaps, or repeats, is packed first."""
    p = packed(t)
    assert (
        torch.equal(p, t) and flat(p).numel() == t.numel() and sorted(flat(p).tolist()) == sorted(t.flatten().tolist())
    )
    link = HostLink(CPU)
    send, bring = Send(1, link), Bring(link)
    (back,) = bring.finish(bring.start(*send.finish(send.start(t))))
    assert torch.equal(back, t) and back.stride() == p.stride()
    assert back.data_ptr() != p.data_ptr() or not t.numel()


# --- on a GPU


@pytest.fixture
def gpu() -> torch.device:
    """Skips where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt.py:tiny", "bert.py:tiny", "resnet.py:tiny", "moe.py:tiny"])
def test_on_a_gpu_line_by_line_the_bits_are_the_same(name: str, gpu: torch.device) -> None:
    """The same kernels on the same values, ten times, with the host far ahead."""
    one, (plain, program) = specimen(name), pair(name, "alone")
    want, step = (EagerStep(p, Null(p.mesh, device=gpu), one.constants) for p in (plain, program))
    inputs = [t.to(gpu) for t in given(one, plain)]
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False):
        kept = [t.clone() for t in want(*inputs)]
        steady = all(torch.equal(a, b) for a, b in zip(kept, want(*inputs), strict=True))
        for _ in range(10):
            got = step(*inputs)
        torch.cuda.synchronize()
    for a, b in zip(kept, got, strict=True):
        if steady:  # kernels that add up atomically give other bits each time
            assert torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_a_compiled_step_holds_less_and_is_not_recorded(gpu: torch.device) -> None:
    """A small GPT: losses near those without, the peak as much lower as predicted, give or take 15 %."""
    made = recipe("gpt.py:tiny")
    module = __import__("sys").modules[type(made.model()).__module__]
    config = module.Config(layers=8, d=256, heads=4, vocab=512, tokens=256, batch=16)
    torch.manual_seed(0)
    model = module.GPT(config)
    ids = torch.randint(512, (16, 257))
    batch = {"ids": ids[:, :-1].contiguous(), "target": ids[:, 1:].contiguous()}
    graph = laminar.capture(model, made.loss, batch)
    whole = {k: v.detach().to(gpu) for k, v in laminar.api.inputs_of(graph, model, batch).items()}
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 1}))
    peaks, told, losses = [], [], []
    for one in (plan, plan.with_offload("blocks.*")):
        program = laminar.lower(graph, one)
        step = Compiled(program, Null(program.mesh, device=gpu), {}, replay=None if one.offload else False)
        assert not step.replays
        inputs = [whole[i.name] for i in program.inputs]
        for _ in range(3):
            outs = step(*inputs)
        del outs
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            outs = step(*inputs)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        losses.append(next(float(t) for o, t in zip(program.outputs, outs, strict=True) if o.kind == "loss"))
        del outs
        form = recompute(written_out(program))
        told.append(memory(form, allocator="cuda", groups=kernels(form), optimizer=0).peak_bytes)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert peaks[1] < 0.75 * peaks[0]
    assert peaks[0] - peaks[1] == pytest.approx(told[0] - told[1], rel=0.15)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [None, False])
def test_on_a_gpu_a_job_trains_to_the_same_losses(compile: bool | None, gpu: torch.device) -> None:
    """Through Inductor and line by line; two shapes of batch on the way."""
    losses = []
    for offload in ((), ("blocks.*",)):
        torch.manual_seed(0)
        model, data = Net(), batches([8, 8, 6, 8])
        job = laminar.parallelize(
            model,
            loss,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            batch=data[0],
            plan=partial(_plan, what="data", offload=offload),
            mesh=Mesh({"dp": 1}),
            device="cuda",
            compile=compile,
        )
        losses.append([job.step(b).loss for b in data * 2])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)

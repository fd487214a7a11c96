"""How much memory a rank needs: held against formulas, against a naive count, and against real steps, byte for byte.

Prediction plays the runtime's rules, so the real test is the runtime: a meter (`tests/support/memory_meter.py`) counts
every storage that ops make while a step runs, alone and on two processes. What kernels take inside themselves
goes through the dispatcher too, so it is in the count; the prediction does not know it, which is what tolerances
below are for. The GPU's allocator is held against PyTorch's own where there is a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laminar
from laminar import ClusterError, Mesh
from laminar.cost.memory.allocator import BLOCK, MIDDLE_SEGMENT, SMALL_SEGMENT, Cuda, Plain
from laminar.cost.memory.inductor_reuse import Life, handed_on
from laminar.cost.memory.peak import memory
from laminar.cost.ops.strides import KEEPS_ORDER
from laminar.ir.ops import FREE
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Instr, Placed, Program, ProgramInput, ProgramOutput
from laminar.ir.sbp import B
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.lower.kernels import kernels
from laminar.lower.memory.mincut_recompute import recompute, written_out
from laminar.runtime.check.processes import on_ranks
from tests.support.example_recipes import load
from tests.support.marks import slow
from tests.support.memory_meter import held, on_this_rank, played, played_on_gpu
from tests.support.rank_pool import Ranks
from tests.support.zoo import Specimen, one_thread, specimen

TWO = Mesh({"dp": 2})
SOME = ("gpt.py:tiny", "mlp.py:tiny", "resnet.py:tiny", "llama.py:tiny")


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    with one_thread():
        yield


def plan_of(one: Specimen, what: str) -> Plan:
    """A plan by name."""
    if what == "alone":
        return laminar.plans.data_parallel(one.graph, Mesh({"dp": 1}))
    if what == "data":
        return laminar.plans.data_parallel(one.graph, TWO)
    if what == "tensor":
        return laminar.plans.tensor_parallel(one.graph, Mesh({"tp": 2}))
    return laminar.plans.zero(one.graph, TWO, stage=int(what[-1]))


def program_of(name: str, what: str) -> Program:
    """A program of the zoo."""
    one = specimen(name)
    return laminar.lower(one.graph, plan_of(one, what))


# --- what stays --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("what", ["alone", "data", "zero1", "zero2", "zero3"])
def test_what_stays_is_what_the_formulas_say(name: str, what: str) -> None:
    """Parameters where they lie, gradients where they leave, eight bytes of Adam for each element that is updated."""
    program = program_of(name, what)
    found = memory(program, rank=1 % program.mesh.ranks)
    rank = 1 % program.mesh.ranks
    params = [i.placed.local(program.mesh, rank) for i in program.inputs if i.kind == "param"]
    grads = [o.placed.local(program.mesh, rank) for o in program.outputs if o.kind == "grad"]
    assert found.parameters == sum(p.nbytes for p in params)
    assert found.gradients == sum(g.nbytes for g in grads)
    assert found.state == 8 * sum(g.numel for g in grads)
    assert memory(program, rank=rank, optimizer=4).state == 4 * sum(g.numel for g in grads)
    assert found.inputs == sum(i.placed.local(program.mesh, rank).nbytes for i in program.inputs if i.kind != "param")
    assert found.peak_bytes >= found.resting


def test_stage_three_holds_a_share_of_everything() -> None:
    """Two ranks: half the parameters, gradients and state, up to what does not divide."""
    whole, part = (memory(program_of("gpt.py:tiny", what)) for what in ("data", "zero3"))
    for kind in ("parameters", "gradients", "state"):
        assert getattr(part, kind) == pytest.approx(getattr(whole, kind) / 2, rel=0.01)


def test_the_parts_add_up() -> None:
    """No more than all of them at their largest, and no less than what stays."""
    for what in ("alone", "data", "zero3", "tensor"):
        found = memory(program_of("gpt.py:tiny", what))
        parts = found.resting + found.gradients + found.peak_activations
        assert found.resting < found.peak_bytes <= parts + 8  # the loss shares the gradients' bucket
        assert found.peak_bytes == max(b for _, b in found.curve)
        assert dict(found.curve)[found.peak_line] == found.peak_bytes
        assert [k for k, _ in found.curve] == list(range(len(found.curve)))


def test_the_optimizer_is_the_last_point() -> None:
    """What an update takes while it runs may be the peak of a step."""
    program = program_of("mlp.py:tiny", "alone")
    plain, heavy = memory(program), memory(program, update=100.0)
    assert heavy.peak_line == len(program.instrs)
    elements = plain.gradients // 4
    assert heavy.curve[-1][1] == plain.curve[-1][1] + 100 * elements
    assert heavy.curve[:-1] == plain.curve[:-1]


def test_a_workspace_is_there_all_the_time() -> None:
    """Libraries that keep memory for themselves lift the whole curve."""
    program = program_of("mlp.py:tiny", "alone")
    plain, more = memory(program), memory(program, workspace_bytes=1000)
    assert [b for _, b in more.curve] == [b + 1000 for _, b in plain.curve]


# --- liveness ----------------------------------------------------------------------------------

SPEC = TensorSpec((4, 8), "f32")


def line(name: str, op: str, refs: tuple[Ref, ...], outs: int = 1, spec: TensorSpec = SPEC) -> Instr:
    """A line on whole tensors."""
    args: tuple[Any, ...] = (*refs, (4, 8)) if op == "aten.view" else refs
    return Instr(name, op, args, refs, tuple(Placed(SPEC, (B,)) for _ in refs), (Placed(spec, (B,)),) * outs)


def written(lines: list[Instr], leaving: list[Ref]) -> Program:
    """A program of one input on one rank."""
    outputs = tuple(ProgramOutput(f"o{k}", "loss", r, Placed(SPEC, (B,))) for k, r in enumerate(leaving))
    inputs = (ProgramInput("x", "batch", Placed(SPEC, (B,))),)
    return Program(Mesh({"dp": 1}), inputs, (), tuple(lines), outputs, "", "")


@st.composite
def programs(draw: Any) -> Program:
    """Additions, activations and views of whatever was made before; some of it leaves."""
    made = [Ref("x")]
    lines = []
    for k in range(draw(st.integers(1, 14))):
        op = draw(st.sampled_from(["aten.add.Tensor", "aten.relu", "aten.view", "aten.t"]))
        refs = tuple(draw(st.sampled_from(made)) for _ in range(2 if op == "aten.add.Tensor" else 1))
        lines.append(line(f"v{k}", op if op != "aten.t" else "aten.view", refs))
        made.append(Ref(f"v{k}"))
    leaving = draw(st.lists(st.sampled_from(made[1:]), max_size=3))
    return written(lines, leaving)


def naive(program: Program) -> list[int]:
    """Bytes during each line, by looking at everything: a memory lives while any view of it is yet to be read."""
    lines = program.instrs
    root = {"x": "x"}
    for instr in lines:
        root[instr.name] = root[instr.refs[0].name] if instr.op == "aten.view" else instr.name
    out = []
    for k, now in enumerate(lines):
        alive = {"x", root[now.name]}
        for instr in lines[k:]:
            alive |= {root[r.name] for r in instr.refs if r.name in {"x", *(i.name for i in lines[:k])}}
        alive |= {root[o.ref.name] for o in program.outputs if o.ref.name in {i.name for i in lines[: k + 1]}}
        out.append(len(alive) * SPEC.nbytes)
    return out


@given(programs())
def test_lives_are_what_a_naive_count_finds(program: Program) -> None:
    """Values are freed behind their last reader, views keep alive what they view, and what leaves stays."""
    assert [b for _, b in memory(program).curve[:-1]] == naive(program)


def test_by_hand() -> None:
    """Three additions: at most three tensors at once besides the input, and the first goes behind its last reader."""
    x, a, b = Ref("x"), Ref("a"), Ref("b")
    lines = [
        line("a", "aten.relu", (x,)),
        line("b", "aten.add.Tensor", (a, x)),
        line("c", "aten.add.Tensor", (a, b)),
        line("d", "aten.relu", (Ref("c"),)),
    ]
    n = SPEC.nbytes
    found = memory(written(lines, [Ref("d")]))
    assert [b for _, b in found.curve] == [2 * n, 3 * n, 4 * n, 3 * n, 2 * n]
    assert (found.peak_line, found.peak_activations) == (2, 3 * n)
    kept = memory(written(lines, [Ref("d")]), keep=["a"])
    assert [b for _, b in kept.curve] == [2 * n, 3 * n, 4 * n, 4 * n, 3 * n]


# --- fused groups ------------------------------------------------------------------------------


def test_values_inside_a_kernel_never_exist() -> None:
    """Four lines as one kernel: what it reads and what it makes, and it may write where it reads for the last time."""
    names = ["a", "b", "c", "d"]
    refs = [Ref("x"), *map(Ref, names)]
    lines = [line(n, "aten.relu", (refs[k],)) for k, n in enumerate(names)]
    program, n = written(lines, [Ref("d")]), SPEC.nbytes
    assert max(b for _, b in memory(program).curve) == 3 * n
    fused = memory(program, groups=[(0, 1, 2, 3)])
    assert fused.curve == ((3, 2 * n), (4, 2 * n))
    # Two kernels: the second overwrites what the first has made.
    assert memory(program, groups=[(0, 1), (2, 3)]).peak_bytes == 2 * n
    # Read outside as well: it exists.
    other = written([*lines, line("e", "aten.add.Tensor", (Ref("b"), Ref("d")))], [Ref("e")])
    assert memory(other, groups=[(0, 1, 2, 3)]).peak_bytes == 3 * n


def test_a_kernel_runs_before_somebody_needs_it() -> None:
    """A group whose last line stands behind an outside reader of its first runs earlier, with what it needs."""
    lines = [
        line("a", "aten.relu", (Ref("x"),)),
        line("b", "aten.relu", (Ref("a"),)),
        line("c", "aten.relu", (Ref("x"),)),
    ]
    found = memory(written(lines, [Ref("b"), Ref("c")]), groups=[(0, 2)])
    assert found.peak_bytes == 3 * SPEC.nbytes  # the input, c, and b where a was
    with pytest.raises(ValueError, match="two groups"):
        memory(written(lines, [Ref("b")]), groups=[(0, 1), (1, 2)])


def test_two_views_that_leave_a_kernel_are_two_memories() -> None:
    """A value that leaves by views only is counted for each of them; counted once, a measured GPT is 9 % too low."""
    made = (("a", "aten.relu", "x"), ("b", "aten.view", "a"), ("c", "aten.view", "a"))
    lines = [line(name, op, (Ref(of),)) for name, op, of in made]
    leaving = [Ref("b"), Ref("c")]
    assert memory(written(lines, leaving), groups=[(0, 1, 2)]).peak_bytes == 3 * SPEC.nbytes
    assert memory(written(lines, leaving), groups=[(0,), (1, 2)]).peak_bytes == 2 * SPEC.nbytes


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("what", ["alone", "data", "zero3"])
def test_fusing_runs_of_elementwise_ops_never_costs_memory(name: str, what: str) -> None:
    """Runs that stand together, as a compiler would take them."""
    program = program_of(name, what)
    runs: list[list[int]] = [[]]
    for k, instr in enumerate(program.instrs):
        if instr.op in KEEPS_ORDER | FREE:
            runs[-1].append(k)
        else:
            runs.append([])
    groups = [tuple(r) for r in runs if len(r) > 1]
    assert groups
    without, fused = memory(program, groups=[]), memory(program, groups=groups)
    assert fused.peak_bytes <= without.peak_bytes
    assert fused.peak_activations <= without.peak_activations


@given(programs(), st.randoms(use_true_random=False))
def test_any_grouping_of_neighbours_leaves_nothing_behind(program: Program, rng: random.Random) -> None:
    """Whatever is grouped, in the end there is the input and at most what leaves, and values never outnumber lines."""
    cuts = sorted(rng.sample(range(len(program.instrs) + 1), rng.randint(0, len(program.instrs))))
    groups = [tuple(range(a, b)) for a, b in zip([0, *cuts], [*cuts, len(program.instrs)], strict=True) if b > a]
    found = memory(program, groups=groups)
    leaves = {"x", *(o.ref.name for o in program.outputs)}
    assert found.curve[-1][1] <= len(leaves) * SPEC.nbytes
    assert len(found.curve) == len(groups) + 1


def test_memory_is_kept_for_who_comes_later_by_hand() -> None:
    """Five kernels of one part. The first value's memory waits for the last one's if the peak allows it."""

    def lives(between: int) -> list[Life]:
        return [
            Life(100, "a", 0, 1, gives=True, takes=True),
            Life(between, "b", 2, 3, gives=True, takes=True),
            Life(100, "a", 4, gives=True, takes=True),
        ]

    reads: list[set[int]] = [set(), {0}, set(), {1}, set()]
    assert handed_on(lives(10), reads, [0] * 5, {}) == {}  # 110 would be more than ever before
    assert handed_on(lives(10), reads, [0] * 5, {1: 10}) == {2: 0}  # the estimate has 110 already
    assert handed_on(lives(10), reads, [0, 0, -1, 1, 1], {1: 10}) == {}  # another part
    given = [*lives(10), Life(10, "p", -1)]  # a parameter, read by the second kernel: the estimate lets it go there
    assert handed_on(given, [set(), {0, 3}, set(), {1}, set()], [0] * 5, {}) == {2: 0}
    near = [Life(100, "a", 0, 1, gives=True), Life(100, "a", 2, takes=True)]
    assert handed_on(near, [set(), {0}, set()], [0] * 3, {}) == {1: 0}  # from neighbour to neighbour, always
    other = [Life(100, "a", 0, 1, gives=True), Life(100, "z", 2, takes=True)]
    assert handed_on(other, [set(), {0}, set()], [0] * 3, {}) == {}  # another dtype


def test_a_gpt_on_an_h200_takes_what_was_predicted() -> None:
    """355M parameters, 16 sequences of 1024 tokens, bfloat16, AdamW, compiled: 17.64 GB were reserved (bench/gpu.py).

    Captured without memory. What libraries and the recording of the step add is in the four percent.
    """
    module = load("gpt.py")
    config = module.Config(layers=24, d=1024, heads=16, vocab=50304, tokens=1024, batch=16)
    with torch.device("meta"):
        model = module.GPT(config)
        model.head.weight = model.embed.weight
        ids = torch.empty(16, 1024, dtype=torch.int64)

    def loss(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module.loss(model, batch)

    graph = laminar.capture(model, loss, {"ids": ids, "target": ids})
    program = recompute(written_out(laminar.lower(graph, laminar.plans.data_parallel(graph, Mesh({"dp": 1})))))
    found = memory(program, allocator="cuda", groups=kernels(program))
    assert found.reserved_bytes == pytest.approx(17.64e9, rel=0.04)
    assert found.peak_bytes <= found.reserved_bytes


# --- real steps --------------------------------------------------------------------------------


def predicted(program: Program, rank: int, backend: str) -> int:
    """What the meter counts: without what is given, and without an optimizer."""
    found = memory(program, rank, backend=backend, optimizer=0)
    return found.peak_bytes - found.parameters - found.inputs - found.constants


@pytest.mark.parametrize("name", ["gpt.py:tiny", "mlp.py:tiny", "llama.py:tiny", "bert.py:tiny"])
@pytest.mark.parametrize("what", ["alone", "data", "zero3"])
def test_a_step_takes_what_was_predicted_to_the_byte(name: str, what: str) -> None:
    """One rank by itself, talking to nobody: buffers, gradients and activations where they are most."""
    one, program = specimen(name), program_of(name, what)
    assert predicted(program, 0, "null") == held(program, one.inputs, one.constants, "null")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gpt.py:tiny", "tensor"),
        ("llama.py:tiny", "tensor"),
        ("resnet.py:tiny", "alone"),
        ("vit.py:tiny", "alone"),
        ("t5.py:tiny", "alone"),
        ("unet.py:tiny", "alone"),
    ],
)
def test_models_whose_kernels_take_memory_of_their_own_are_close(name: str, what: str) -> None:
    """Temporaries inside batch norm, or inside a look-up in a part of a table, are not predicted: within 5 % here.

    An LSTM is left out: its kernel keeps every step's gates while it runs, a quarter of all there is.
    """
    one, program = specimen(name), program_of(name, what)
    assert predicted(program, 0, "null") == pytest.approx(held(program, one.inputs, one.constants, "null"), rel=0.05)


@pytest.mark.parametrize("backend", [slow("shared"), "gloo"])
def test_two_processes_take_what_was_predicted_to_the_byte(backend: str, two: Ranks) -> None:
    """Slots, rows, scratch, regions: what exchanges are made with, on the plan that uses most of it.

    A thread of Gloo that has no core may hold a number that was sent a moment longer, so there are other tries.
    """
    one, program = specimen("gpt.py:tiny"), program_of("gpt.py:tiny", "zero3")
    want = [predicted(program, rank, backend) for rank in range(2)]
    for _ in range(10 if backend == "gloo" else 1):
        real = two.run(on_this_rank, program, dict(one.inputs), dict(one.constants), backend)
        if real == want:
            break
    assert real == want


# --- allocators --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "reserved_mib"),
    [
        (1, 2),
        (1 << 20, 2),
        ((1 << 20) + 1, 20),
        ((10 << 20) - 512, 20),
        ((10 << 20) - 511, 10),
        (10 << 20, 10),
        ((10 << 20) + 1, 12),
        (12 << 20, 12),
        ((12 << 20) + 1, 14),
    ],
)
def test_a_first_request_reserves_what_pytorch_does(nbytes: int, reserved_mib: int) -> None:
    """At the edges of small, middle and large, in numbers that are PyTorch's and not this file's."""
    heap = Cuda()
    heap.take(nbytes)
    assert heap.reserved == reserved_mib << 20
    heap.take(9 << 20)  # fits into what is left of a middle segment, or needs one
    rest = (20 << 20) - nbytes if reserved_mib == 20 else 0
    assert heap.reserved == (reserved_mib + (0 if rest >= 9 << 20 else 20)) << 20


def test_the_caching_allocator_by_hand() -> None:
    """Small requests share a segment of two MiB, middle ones one of twenty, a large one has its own."""
    heap = Cuda()
    a = heap.take(1)
    assert (heap.allocated, heap.reserved) == (BLOCK, SMALL_SEGMENT)
    heap.take(1000)
    assert (heap.allocated, heap.reserved) == (3 * BLOCK, SMALL_SEGMENT)
    heap.give(a)
    heap.take(513)  # does not fit where the first was
    heap.take(100)  # fits there
    assert (heap.allocated, heap.reserved) == (5 * BLOCK, SMALL_SEGMENT)
    heap.take(3 << 20)
    assert heap.reserved == SMALL_SEGMENT + MIDDLE_SEGMENT
    big = heap.take((25 << 20) + 1)
    assert heap.reserved == SMALL_SEGMENT + MIDDLE_SEGMENT + (26 << 20)
    before = heap.allocated
    heap.give(big)
    assert heap.reserved == SMALL_SEGMENT + MIDDLE_SEGMENT + (26 << 20)  # kept
    heap.take(26 << 20)
    assert heap.allocated == before  # less than a MiB over is not worth giving back, so the block was 26 already
    assert heap.reserved == SMALL_SEGMENT + MIDDLE_SEGMENT + (26 << 20)  # used again


REQUESTS = st.lists(st.tuples(st.integers(1, 30 << 20), st.floats(0, 1)), min_size=1, max_size=60)


@given(REQUESTS)
@settings(max_examples=200)
def test_the_caching_allocator_never_loses_a_byte(requests: list[tuple[int, float]]) -> None:
    """Allocated covers what was asked for, reserved covers allocated, and all free blocks add up to the difference."""
    heap, plain = Cuda(), Plain(BLOCK)
    for (allocated, reserved), (asked, _) in zip(played(heap, requests), played(plain, requests), strict=True):
        assert asked <= allocated <= reserved
        free = sum(size for pool in heap._free.values() for size, _, _ in pool)
        assert allocated + free == reserved


@pytest.mark.gpu
def test_the_caching_allocator_is_pytorchs() -> None:
    """The same requests to the real one, in a fresh process: same bytes allocated and reserved after every one."""
    for seed in range(5):
        rng = random.Random(seed)
        requests = [(int(2 ** rng.uniform(0, 26)), rng.random()) for _ in range(400)]
        (real,) = on_ranks(1, played_on_gpu, requests)
        assert list(played(Cuda(), requests)) == real


def test_rounding_never_takes_less() -> None:
    """Exact bytes, malloc's alignment and blocks of a GPU, on the same program."""
    program = program_of("gpt.py:tiny", "data")
    exact, cpu, cuda = (memory(program, allocator=a, backend="null") for a in (None, "cpu", "cuda"))
    assert exact.peak_bytes <= cpu.peak_bytes <= cuda.peak_bytes <= cuda.reserved_bytes
    assert cuda.reserved_bytes % SMALL_SEGMENT == 0


@pytest.mark.parametrize(("what", "value"), [("allocator", "jemalloc"), ("backend", "mpi")])
def test_unknown_names_are_refused(what: str, value: str) -> None:
    """With those that exist."""
    with pytest.raises(ClusterError, match=f"no {what} '{value}'"):
        memory(program_of("mlp.py:tiny", "alone"), **{what: value})  # type: ignore[arg-type]


def test_memory_prints_its_parts() -> None:
    """For `laminar simulate`."""
    text = str(memory(program_of("mlp.py:tiny", "alone")))
    assert "parameters" in text and "peak activations" in text

"""What an op costs: keys, the table, and answers for shapes that nobody measured.

Times here are made up from a known law, so that a prediction can be held against the truth; how well real ops are
predicted is measured by the benchmarks. No framework is loaded by what is tested, except to have real programs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

import laminar
from laminar import Mesh
from laminar.cost.ops.families import family_of, traits_of
from laminar.cost.ops.price import Answer, OpCost
from laminar.cost.ops.strides import contiguous, is_contiguous, mark_of, strides_of, viewed
from laminar.cost.ops.table import Entry, Section, Table, cpu_section, key_of, nearest_section, numbered, parse_key
from laminar.errors import LaminarError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.serial.codec import Dtype, Ref
from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import Call
from tests.support.local_layouts import local_layouts
from tests.support.zoo import specimen

NAME = cpu_section(2, 1)


def spec(text: str) -> TensorSpec:
    return TensorSpec.parse(text)


def mm_key(m: int, n: int, k: int) -> str:
    return f"aten.mm(f32[{m},{k}],f32[{k},{n}])->f32[{m},{n}]"


def mm_law(m: int, n: int, k: int) -> float:
    """Seconds: a call, then products at a speed that grows with each side."""
    speed = 1e11 * math.prod(1 - 0.7 / (1 + side / 64) for side in (m, n, k))
    return 3e-6 + 2.0 * m * n * k / speed


def measured(ops: Mapping[str, float], spread: float = 0.01) -> Cluster:
    section = Section("here", {"torch": "2"}, {k: Entry(s, spread, 9) for k, s in ops.items()})
    return replace(Cluster.preset("2xcpu"), profile={"ops": Table({NAME: section}).to_json()})


def ask_mm(cost: OpCost, m: int, n: int, k: int) -> Answer:
    ins = spec(f"f32[{m},{k}]"), spec(f"f32[{k},{n}]")
    return cost("aten.mm", ins, (spec(f"f32[{m},{n}]"),), (Ref("a"), Ref("b")))


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt.py:tiny", "resnet.py:tiny", "lstm.py:tiny", "moe.py:tiny"])
@pytest.mark.parametrize("plan", ["data_parallel", "tensor_parallel"])
def test_the_key_of_every_line_reads_back(name: str, plan: str) -> None:
    """Ranks that measure are given keys and nothing else, so a key must hold all that decides a time."""
    graph = specimen(name).graph
    program = laminar.lower(graph, getattr(laminar.plans, plan)(graph, Mesh({"x": 2})))
    calls, lying = local_layouts(program)
    seen = 0
    for instr in program.instrs:
        if instr.kind:
            continue
        key = key_of(calls[instr.name], lying.marks[instr.name])
        call, marks = parse_key(key)
        assert key_of(numbered(call), marks) == key
        assert (call.op, call.ins, call.outs) == (instr.op, calls[instr.name].ins, calls[instr.name].outs)
        assert traits_of(call, marks) == traits_of(calls[instr.name], lying.marks[instr.name])
        seen += 1
    assert seen > 20


def test_a_key_says_what_changes_the_time_and_nothing_else() -> None:
    """An epsilon is left out, an exponent and a layout are not: else equal ops would be measured twice, or mixed up."""
    x = spec("f32[4,8]")
    powers = [Call("aten.pow.Tensor_Scalar", (Ref("x"), p), (x,), (x,)) for p in (2.0, 3.0)]
    assert len({key_of(numbered(c)) for c in powers}) == 2
    scaled = [Call("aten.mul.Scalar", (Ref("x"), p), (x,), (x,)) for p in (0.1, 0.2)]
    assert len({key_of(numbered(c)) for c in scaled}) == 1
    product = Call("aten.mm", (Ref("", 0), Ref("", 1)), (x, spec("f32[8,2]")), (spec("f32[4,2]"),))
    plain, turned, told = (key_of(product, m) for m in ((), ("", "'"), ("", "", "!")))
    assert plain == "aten.mm(f32[4,8],f32[8,2])->f32[4,2]"
    assert turned == "aten.mm(f32[4,8],f32[8,2]')->f32[4,2]"
    assert told == plain + "!"


def test_sizes_that_follow_from_shapes_are_those_of_the_rank() -> None:
    """A program keeps sizes of whole tensors in its arguments; on a rank they are others, and the key has those."""
    call = Call("aten.view", (Ref("x"), (64, 32)), (spec("f32[4,8,32]"),), (spec("f32[32,32]"),))
    assert key_of(numbered(call)) == "aten.view(f32[4,8,32],[32,32])->f32[32,32]"
    call = Call("aten.full", ((8, 4), 0.5, Dtype("f32")), (), (spec("f32[2,4]"),))
    assert key_of(numbered(call)) == "aten.full([2,4],~,:f32)->f32[2,4]"


def test_text_that_is_no_key_is_refused() -> None:
    """A damaged profile must say so instead of giving times for something else."""
    with pytest.raises(LaminarError, match="not the key"):
        parse_key("aten.mm(f99[4,8])->f32[4]")


# --- layouts ------------------------------------------------------------------------------------


def test_marks_and_strides_say_the_same() -> None:
    """What is worked out for a program and what is laid out for measuring must be one thing."""
    shape = (2, 3, 4, 5)
    for mark in ("", "'", "0213", "3012", "s", "e"):
        assert mark_of(shape, strides_of(shape, mark)) == mark
    assert is_contiguous((3, 1), (1, 7))


def test_a_view_is_found_exactly_where_there_is_one() -> None:
    """A view that can't be is a copy, which takes time."""
    assert viewed((4, 6), contiguous((4, 6)), (2, 2, 6)) == (12, 6, 1)
    assert viewed((4, 6), strides_of((4, 6), "'"), (24,)) is None
    assert viewed((4, 6), strides_of((4, 6), "'"), (2, 2, 6)) == (2, 1, 4)
    assert viewed((2, 3, 4), strides_of((2, 3, 4), "102"), (2, 12)) is None


def test_a_view_that_copies_costs_a_copy() -> None:
    """Heads put together again after attention are moved, though the program says view."""
    ins, outs = (spec("f32[4,64,8,64]"),), (spec("f32[4,64,512]"),)
    call = Call("aten.view", (Ref("", 0), (4, 64, 512)), ins, outs)
    assert traits_of(call).family == "view"
    assert traits_of(call, ("0213",)).family == "moving"


# --- the table ----------------------------------------------------------------------------------


def test_later_runs_extend_the_table_and_replace_what_they_measure_again() -> None:
    """A profile grows with use; the newer figure of the same op counts."""
    old = Table({NAME: Section("here", {"torch": "2"}, {"a": Entry(1.0, 0.1, 5), "b": Entry(2.0, 0.1, 5)})})
    new = Table({NAME: Section("here", {"torch": "2"}, {"b": Entry(3.0, 0.1, 5)}), "other": Section()})
    both = old.extended(new)
    assert {k: e.seconds for k, e in both.sections[NAME].ops.items()} == {"a": 1.0, "b": 3.0}
    assert Table.from_json(both.to_json()) == both
    other = Table({NAME: Section("here", {"torch": "3"}, {"b": Entry(3.0, 0.1, 5)})})
    assert set(old.extended(other).sections[NAME].ops) == {"b"}, "other versions are not mixed"


def test_a_broken_table_is_refused() -> None:
    """Times that can't be are not worked with."""
    with pytest.raises(LaminarError, match="can't take"):
        Entry(0.0, 0.1, 5)
    with pytest.raises(LaminarError, match="can't be read"):
        Table.from_json({"x": {"ops": {}}})


def test_a_section_that_is_missing_is_stood_in_for_by_the_nearest() -> None:
    """Four ranks are more like two than like sixteen, and a GPU is like no CPU."""
    names = [cpu_section(2, 4), cpu_section(16, 1), "cuda/H200"]
    assert nearest_section(cpu_section(4, 2), names) == cpu_section(2, 4)
    assert nearest_section("cuda/H100", names) == "cuda/H200"
    assert nearest_section(cpu_section(1, 1), ["cuda/H200"]) is None


# --- answers ------------------------------------------------------------------------------------


def grid() -> dict[str, float]:
    sides = (16, 64, 256, 1024)
    return {mm_key(m, n, k): mm_law(m, n, k) for m in sides for n in sides for k in sides}


def test_what_was_measured_is_the_answer() -> None:
    """To the last digit, and the cached answer is the same object."""
    cost = OpCost(measured(grid()), NAME)
    answer = ask_mm(cost, 64, 256, 16)
    assert answer.seconds == mm_law(64, 256, 16) and answer.source == "measured"
    assert ask_mm(cost, 64, 256, 16) is answer


def test_between_measured_shapes_the_law_is_found() -> None:
    """Fifty shapes inside the range, none of them measured: within 5 % in the middle, 15 % for nine in ten."""
    cost, rng = OpCost(measured(grid()), NAME), random.Random(0)
    errors = []
    for _ in range(50):
        m, n, k = (round(16 * 64 ** rng.random()) for _ in range(3))
        answer = ask_mm(cost, m, n, k)
        assert answer.source in ("interpolated", "measured")
        errors.append(abs(answer.seconds / mm_law(m, n, k) - 1))
    errors.sort()
    assert errors[25] < 0.05 and errors[45] < 0.15, errors


def test_far_from_everything_the_answer_is_less_sure() -> None:
    """Beyond the measured range the roofline with what the family reaches takes over, and sigma says so."""
    cost = OpCost(measured(grid()), NAME)
    near, far = ask_mm(cost, 100, 100, 100), ask_mm(cost, 1 << 19, 1 << 19, 4)
    assert far.source == "roofline" and far.sigma > 3 * near.sigma


def test_intervals_cover_what_they_promise() -> None:
    """Entries with 10 % noise, each held out in turn: nine in ten lie within 1.645 sigma, give or take."""
    rng = random.Random(1)
    noisy = {k: s * math.exp(rng.gauss(0, 0.1)) for k, s in grid().items()}
    inside = []
    for held, seconds in list(noisy.items())[::2]:
        call, _ = parse_key(held)
        cost = OpCost(measured({k: s for k, s in noisy.items() if k != held}, 0.1), NAME)
        answer = cost(call.op, call.ins, call.outs, call.args)
        inside.append(abs(math.log(answer.seconds / seconds)) <= 1.645 * answer.sigma)
    assert 0.8 <= sum(inside) / len(inside) < 1.0


def test_an_op_that_was_never_measured_is_like_its_family() -> None:
    """Every elementwise op cannot be in a profile; one that is not still moves bytes as fast as the others."""
    ops = {f"aten.{op}(f32[{n}])->f32[{n}]": 2e-6 + 8 * n / 1e10 for op in ("relu", "neg") for n in (100, 10**4, 10**6)}
    cost = OpCost(measured(ops), NAME)
    x = (spec("f32[300000]"),)
    answer = cost("aten.abs", x, x, (Ref("x"),))
    assert answer.seconds == pytest.approx(2e-6 + 8 * 3e5 / 1e10, rel=0.25)
    assert family_of("aten.abs") == "cheap"


def test_layouts_of_one_op_are_told_apart() -> None:
    """A transposed operand that takes twice as long must not drag the plain one along."""
    ops = grid() | {k.replace(")->", "')->"): 2 * s for k, s in grid().items()}
    cost = OpCost(measured(ops), NAME)
    ins, outs, args = (spec("f32[96,96]"), spec("f32[96,96]")), (spec("f32[96,96]"),), (Ref("a"), Ref("b"))
    plain, turned = (cost("aten.mm", ins, outs, args, m) for m in ((), ("", "'")))
    assert turned.seconds / plain.seconds == pytest.approx(2, rel=0.1)


def test_without_a_profile_the_device_speaks() -> None:
    """A cluster nobody has measured still gives an answer, from its sheet, and says how sure it is."""
    gpu = OpCost(Cluster.preset("h100"))
    n = 8192
    times = {}
    for dtype in ("f32", "bf16"):
        ins = (spec(f"{dtype}[{n},{n}]"),) * 2
        answer = gpu("aten.mm", ins, ins[:1], (Ref("a"), Ref("b")))
        assert answer.source == "roofline" and answer.sigma >= 0.3
        times[dtype] = answer.seconds
    assert times["bf16"] < times["f32"] / 4
    assert gpu("aten.t", (spec("f32[4,8]"),), (spec("f32[8,4]"),), (Ref("a"),)).seconds == 0.0
    cpu = OpCost(Cluster.preset("2xcpu"))
    assert cpu("aten.t", (spec("f32[4,8]"),), (spec("f32[8,4]"),), (Ref("a"),)).source == "free"


def test_eight_bit_products_run_at_their_own_peak() -> None:
    """They are costed before the compiler runs them: twice the rate of bf16 where the sheet has twice."""
    cost, n = OpCost(Cluster.preset("h100")), 8192
    scale, out = spec("f32[]"), (spec(f"bf16[{n},{n}]"),)
    eight = (spec(f"f8e4m3[{n},{n}]"),) * 2
    low = cost("aten._scaled_mm", (*eight, scale, scale), out, tuple(map(Ref, "abcd")))
    high = cost("aten.mm", (out[0], out[0]), out, (Ref("a"), Ref("b")))
    assert high.seconds / low.seconds == pytest.approx(2, rel=0.1)


def test_updates_and_fused_kernels_are_asked_by_numbers() -> None:
    """They are no ops of a program, but cost time in the same way."""
    ops = {f"optimizer.adamw({t},{n})": 1e-5 + 1e-6 * t + 28 * n / 1e10 for t in (4, 40) for n in (10**4, 10**5, 10**6)}
    ops |= {f"fused.pointwise(2,{n})": 2e-6 + n / 2e10 for n in (10**4, 10**6, 10**8)}
    cost = OpCost(measured(ops), NAME)
    update = cost("optimizer.adamw", (), (), (12, 300_000))
    assert update.seconds == pytest.approx(1e-5 + 12e-6 + 28 * 3e5 / 1e10, rel=0.3)
    assert cost("fused.pointwise", (), (), (10**7,)).seconds == pytest.approx(10**7 / 2e10, rel=0.3)


def test_the_check_is_about_entries_left_out() -> None:
    """An entry that its neighbours contradict is an error of the model, not explained away by itself."""
    good = OpCost(measured(grid()), NAME).check()
    wrong = grid()
    for key in random.Random(2).sample(sorted(wrong), 16):
        wrong[key] *= 3
    bad = OpCost(measured(wrong), NAME).check()
    assert [c.family for c in good] == ["matmul"] and good[0].entries == 64
    assert good[0].median < 0.05 < bad[0].p90 / 4

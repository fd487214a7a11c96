"""Measuring: ops as their keys say, ranks that measure together, and what becomes of it.

How long anything takes is never asserted here, only what is larger than what, by a wide margin: the machine is
shared. Not covered without a GPU: CUDA graphs, compiled kernels, NCCL.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import laminar
from laminar import Mesh
from laminar.cost.ops.families import OP_FAMILIES, traits_of
from laminar.cost.ops.price import OpCost
from laminar.cost.ops.strides import contiguous, mark_of
from laminar.cost.ops.table import Table, cpu_section, key_of, numbered, parse_key
from laminar.errors import LaminarError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.ops import WRITE_INTO_PLACE
from laminar.ir.program import Instr, Program
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.profile import shapes, sweep, time_collectives
from laminar.profile.time_op import Timer, error_of, operand, runs_of, stirred
from laminar.runtime.code import eager_step
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.transport import Null
from tests.support.held_out import held_out
from tests.support.local_layouts import local_layouts
from tests.support.zoo import specimen

CPU = torch.device("cpu")


def programs(name: str, ranks: int = 2) -> list[Program]:
    graph = specimen(name).graph
    mesh = Mesh({"x": ranks})
    plans = laminar.plans.data_parallel(graph, mesh), laminar.plans.tensor_parallel(graph, mesh)
    return [laminar.lower(graph, plan) for plan in plans]


# --- keys made runnable -------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["", "'", "120", "s", "e"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64", "bool"])
def test_an_operand_lies_as_its_mark_says(mark: str, dtype: str) -> None:
    """Else a transposed product would be measured as a plain one."""
    x = operand(TensorSpec((3, 4, 5), dtype), mark, CPU, below=7)
    assert tuple(x.shape) == (3, 4, 5) and mark_of(x.shape, x.stride()) == mark
    if dtype == "i64":
        assert int(x.min()) >= 0 and int(x.max()) < 7


def test_every_small_op_of_a_profile_runs() -> None:
    """A key that can't be run would be left out in silence, and its family would have a hole."""
    keys = [k for k in shapes.keys("cpu") if sweep.roughly_s(k) < 5e-5]
    assert len(keys) > 200
    for key in keys:
        call, marks = parse_key(key)
        assert key_of(numbered(call), marks) == key, "programs would look for another key"
        with torch.no_grad():
            made = runs_of(key, CPU, 1)[0]()
        outs = made if isinstance(made, (tuple, list)) else [made]
        for want, got in zip(call.outs, outs, strict=False):
            if want is not None and isinstance(got, torch.Tensor):  # a fused layer keeps bytes for its backward
                assert tuple(got.shape) == want.shape, key


def test_a_profile_covers_every_family() -> None:
    """Also if there is time for a third of it only: families take turns."""
    every = {n for n in OP_FAMILIES if not n.startswith("fused")}
    keys = shapes.keys("cpu")
    assert {traits_of(*parse_key(k)).family for k in keys} == every
    assert {traits_of(*parse_key(k)).family for k in keys[: len(keys) // 3]} >= every - {"view"}
    assert len(set(keys)) == len(keys)


def test_any_beginning_of_the_shapes_is_spread_evenly() -> None:
    """Wherever time runs out, small and large sizes have had the same chance."""
    for count in (8, 32, 100):
        points = list(itertools.islice(shapes.halton(3), count))
        for d in range(3):
            below = sum(p[d] < 0.5 for p in points) / count
            assert abs(below - 0.5) <= 0.13


@pytest.mark.parametrize("name", ["gpt.py:tiny", "llama.py:tiny", "resnet.py:tiny", "lstm.py:tiny"])
def test_layouts_are_worked_out_as_torch_has_them(name: str) -> None:
    """A cost model that does not run anything must know what is transposed, and which views copy."""
    one = specimen(name)
    for program in programs(name):
        _, lying = local_layouts(program)
        wrong: list[Any] = []
        seen = 0

        def watch(instr: Instr, made: Any, lying: Any = lying, wrong: list[Any] = wrong) -> None:
            nonlocal seen
            if instr.kind:
                return
            for k, x in enumerate(made if isinstance(made, (tuple, list)) else [made]):
                if x is not None and k < len(instr.outs) and instr.outs[k] is not None:
                    shape = tuple(x.shape)
                    expected = mark_of(shape, lying.strides.get(Ref(instr.name, k)) or contiguous(shape))
                    seen += 1
                    if expected != mark_of(shape, x.stride()):
                        wrong.append((instr.op, shape, expected, x.stride()))

        step = eager_step.EagerStep(program, Null(program.mesh), one.constants, watch=watch)
        step(*[shard(one.inputs[i.name], i.placed.nd, program.mesh, 0) for i in program.inputs])
        assert seen > 20 and not wrong


def test_the_planner_knows_what_is_written_into_buffers() -> None:
    """The list is written twice, since planning loads no framework: it must be the runtime's."""
    assert set(WRITE_INTO_PLACE) == set(eager_step.OUT_VARIANTS)
    for program in programs("gpt.py:tiny"):
        _, lying = local_layouts(program)
        told = {name for name, marks in lying.marks.items() if marks and marks[-1] == "!"}
        built = eager_step._Build(program, Null(program.mesh), {}, False)
        assert told == set(built.into)


# --- timing -------------------------------------------------------------------------------------


def test_more_work_takes_longer() -> None:
    """A product with 512 times the operations, and a copy with 1000 times the bytes, among small ops."""
    keys = [f"aten.mm(f32[{n},{n}],f32[{n},{n}])->f32[{n},{n}]" for n in (32, 256)]
    keys += [f"aten.clone(f32[{n}],-)->f32[{n}]" for n in (2000, 2_000_000)]
    for _ in range(20):  # on a busy machine a small op may well be put to sleep in every one of its few repeats
        found = stirred([*keys, "aten.t(f32[8,4])->f32[4,8]"], 0.5)
        small, large, little, much = (found[k].seconds for k in keys)
        assert all(e.repeats >= 3 and e.seconds > 0 for e in found.values())
        if large > 8 * small and much > 8 * little:
            return
    raise AssertionError(f"{large} s should be longer than {small} s, {much} s than {little} s")


def test_the_error_of_a_median_shrinks_with_repeats() -> None:
    """It decides when measuring ends; one outlier does not keep it going."""
    few, many = [1.0, 1.1, 0.9, 1.05] * 2, [1.0, 1.1, 0.9, 1.05] * 50
    assert error_of(many) < error_of(few) / 3
    assert error_of([*many, 100.0]) < 2 * error_of(many)
    assert error_of([1.0]) == 1.0


def test_ranks_stop_together() -> None:
    """A rank that is content goes on while another is not, or the other would measure an idle machine."""
    answers = iter([True, True, False])
    asked: list[bool] = []

    def more(wish: bool) -> bool:
        asked.append(wish)
        return next(answers)

    Timer(limit_s=0.0, more=more)([lambda: None])
    assert len(asked) == 3 and not any(asked)


# --- ranks --------------------------------------------------------------------------------------

FEW = [
    "aten.mm(f32[32,32],f32[32,32])->f32[32,32]",
    "aten.add.Tensor(f32[64,64],f32[64,64],1)->f32[64,64]",
    "optimizer.adamw(4,4096)",
    "aten.nothing_of_this_name(f32[4])->f32[4]",
]


def test_two_ranks_measure_ops_and_exchanges_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way from a description of two cores to one with measured figures; an op that is unknown is left out."""
    monkeypatch.setattr(shapes, "keys", lambda kind: FEW)
    shown: list[tuple[int, int, str]] = []
    name = cpu_section(2, max(1, sweep.cores_here() // 2))
    kinds = {
        ("shared", "all_reduce"),
        ("shared", "all_gather"),
        ("shared", "reduce_scatter"),
        ("gloo", "all_reduce"),
        ("gloo", "all_gather"),
        ("gloo", "all_to_all"),
        ("gloo", "ddp_all_reduce"),
    }
    for budget_s in (10.0, 30.0, 100.0):  # every kind is measured first in a small size, if there is time for that
        cluster = sweep.profile(
            Cluster.preset("2xcpu"), ranks=[2], budget_s=budget_s, progress=lambda *what: shown.append(what)
        )
        section, rows = Table.of(cluster.profile).sections[name], cluster.profile["collectives"]
        if set(section.ops) == set(FEW[:3]) and {(r["backend"], r["kind"]) for r in rows} >= kinds:
            break
    assert set(section.ops) == set(FEW[:3]) and section.device and section.versions["torch"]
    assert {(r["backend"], r["kind"]) for r in rows} >= kinds
    assert all(r["ranks"] == 2 and r["seconds"] > 0 for r in rows)
    assert any(r.get("resident") for r in rows)
    (overlap,) = cluster.profile["overlap"]
    assert 0 < overlap["compute_left"] <= 1 and 0 < overlap["transfer_left"] <= 1
    assert cluster.device.launch_s.source == cluster.device.flops_per_s["f32"].source == "measured"
    assert cluster.levels[0].bytes_per_s.source == "measured"
    assert shown and all(0 <= done <= total for done, total, _ in shown)
    assert Cluster.from_json(cluster.to_json()) == cluster
    answer = OpCost(cluster, name)(
        "aten.mm", (TensorSpec((32, 32), "f32"),) * 2, (TensorSpec((32, 32), "f32"),), (Ref("a"), Ref("b"))
    )
    assert answer.source == "measured"


def test_a_rank_that_fails_is_told_with_its_log() -> None:
    """Measuring must not hang or end in a table that is half empty."""
    with pytest.raises(LaminarError, match="failed while measuring"):
        sweep.measure_section(sweep.SweepJob(1, 1, "nonsense", FEW[:1], 1.0, 0.0))


def test_ops_of_programs_come_in_order_of_their_share() -> None:
    """What takes longest is measured first, because time may run out."""
    every = programs("gpt.py:tiny")
    cost = OpCost(Cluster.preset("2xcpu"))
    keys = sweep.keys_of(every, cost, ranks=2)
    assert sweep.keys_of(every, cost, ranks=3) == []
    assert len(keys) == len(set(keys)) > 40
    assert traits_of(*parse_key(keys[0])).family in ("matmul", "attention")
    calls, lying = local_layouts(every[0])
    wanted = {key_of(calls[i.name], lying.marks[i.name]) for i in every[0].instrs if not i.kind}
    assert wanted <= set(keys)


def test_programs_are_measured_in_a_section() -> None:
    """Afterwards their ops are answered as measured, everything else as before."""
    (program, _) = programs("mlp.py:tiny")
    section = cpu_section(2, 1)
    before = replace(Cluster.preset("2xcpu"), profile={"collectives": []})
    after = sweep.measure_instrs(before, [program], section, budget_s=60.0)
    cost = OpCost(after, section)
    _, lying = local_layouts(program)
    sources = {cost.instr(i, program.mesh, 0, lying.marks[i.name]).source for i in program.instrs if not i.kind}
    assert sources == {"measured"} and after.profile["collectives"] == []


def test_blocks_hold_ops_of_like_size_in_order() -> None:
    """An op's surroundings are part of its price, and what is most needed comes first."""
    keys = shapes.keys("cpu")
    blocks = sweep.blocks(keys)
    assert sorted(itertools.chain(*blocks)) == sorted(keys)
    assert blocks[0][0] == keys[0]
    for block in blocks:
        classes = {sum(sweep.roughly_s(k) > limit for limit in sweep.CLASSES_S) for k in block}
        assert len(classes) == 1 and len(block) <= sweep.OPS_PER_BLOCK


@pytest.mark.parametrize("kind", time_collectives.TIMED_KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_an_exchange_that_is_measured_is_one_collective(kind: str, ranks: int) -> None:
    """Of about the size that was asked for."""
    program = time_collectives.program_of(kind, 1 << 16, ranks)
    assert [i.kind for i in program.instrs] == [kind]
    assert 0.7 <= program.inputs[0].placed.spec.nbytes / (1 << 16) <= 1.1


def test_predictions_are_judged_by_ops_that_were_not_measured() -> None:
    """An op that stands in the profile is no proof of anything, so it is left out of the comparison."""
    one, section = programs("mlp.py:tiny", ranks=1)[0], cpu_section(1, 1)
    nothing = Cluster.preset("2xcpu")
    (report,) = held_out(nothing, {"mlp": one}, section, budget_s=60.0)
    assert report.ops > 10 and report.known == 0 and report.measured_s > 0
    assert sum(m for _, m in report.families.values()) == pytest.approx(report.measured_s)
    assert "mlp" in str(report)
    assert held_out(sweep.measure_instrs(nothing, [one], section, 60.0), {"mlp": one}, section, budget_s=60.0) == []

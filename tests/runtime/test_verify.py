"""Verification finds what is wrong and says where; it does not pass what is wrong.

Everything else here leans on `verify` saying yes, so here it has to say no: programs are spoilt in
ways a bug would spoil them (a reduction left out, a term counted twice, an argument changed, ranks
swapped), and each must be caught and the first op that differs named, with its shape, its placement
and the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import laminar
from laminar import B, Mesh, S
from laminar.errors import PlanError
from laminar.ir.program import Instr, Program
from laminar.runtime.check.verify import error_of, verify_program
from tests.support.zoo import FEW, one_thread, recipe, specimen


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    with one_thread():
        yield


def changed(program: Program, which: Callable[[Instr], bool], how: Callable[[Instr], Instr]) -> Program:
    """A program with one instruction spoilt: the first that fits."""
    at = next(k for k, i in enumerate(program.instrs) if which(i))
    instrs = list(program.instrs)
    instrs[at] = how(instrs[at])
    return replace(program, instrs=tuple(instrs))


def spoilt(which: Callable[[Instr], bool], how: Callable[[Instr], Instr]) -> Any:
    """The report on tensor-parallel GPT with one instruction spoilt."""
    one = specimen("gpt.py:tiny")
    plan = laminar.plans.tensor_parallel(one.graph, Mesh({"tp": 2}))
    return verify_program(one.graph, plan, [one.inputs], change=lambda p: changed(p, which, how))


def not_reduced(instr: Instr) -> Instr:
    """A boxing step that hands on each rank's own term."""
    return replace(instr, op="aten.clone", args=(instr.refs[0], None), refs=instr.refs[:1])


def test_a_good_plan_is_equal() -> None:
    """The report counts what was compared and shows both losses."""
    one = specimen("gpt.py:tiny")
    plan = laminar.plans.tensor_parallel(one.graph, Mesh({"tp": 2}))
    report = verify_program(one.graph, plan, [one.inputs, one.inputs])
    assert report.ok and report.max_rel_error < 1e-12 and report.first_difference == ""
    assert report.checked == 2 * len(one.graph.outputs)
    assert (report.ranks, report.batches) == (2, 2)
    assert all(single == pytest.approx(many, rel=1e-12) for single, many in report.losses)
    assert str(report).startswith("equal:")


def test_a_missing_reduction_is_caught() -> None:
    """The commonest mistake of all: a rank goes on with its own term. The op that then reads it is named."""
    report = spoilt(lambda i: i.kind == "all_reduce" and i.phase == "forward", not_reduced)
    assert not report.ok and report.max_rel_error > 1e-3
    assert "DIFFERENT" in str(report)
    first = report.first_difference
    assert first.startswith("%view_7 = aten.view")
    assert "f64[" in first and " B is off by" in first
    assert "examples/gpt.py:" in first


def test_a_missing_gradient_reduction_is_caught() -> None:
    """Every op is right: only what leaves the step is not, the gradients and the loss that travels with them."""
    one = specimen("gpt.py:tiny")
    plan = laminar.plans.data_parallel(one.graph, Mesh({"dp": 2}))

    def spoil(program: Program) -> Program:
        bucket = max(program.collectives, key=lambda i: len(i.refs))
        wrong = replace(bucket, boxing=replace(bucket.box, reduction="max"))
        return replace(program, instrs=tuple(wrong if i is bucket else i for i in program.instrs))

    report = verify_program(one.graph, plan, [one.inputs], change=spoil)
    assert not report.ok and report.worst.startswith("grad:")
    assert "no single op differs" in report.first_difference


def test_a_changed_argument_is_caught_where_it_is() -> None:
    """The op itself is named, with what it makes, how that lies, and whose line it is."""

    def other_eps(instr: Instr) -> Instr:
        return replace(instr, args=(*instr.args[:4], 0.5))

    report = spoilt(lambda i: i.op == "aten.native_layer_norm", other_eps)
    assert not report.ok
    assert report.first_difference.startswith("%native_layer_norm_0 = aten.native_layer_norm: f64[8,16,32] B is off by")
    assert "examples/gpt.py:" in report.first_difference and "norm" in report.first_difference


def test_a_changed_operator_is_caught_where_it_is() -> None:
    """On a value that is split: its placement is in the report."""
    report = spoilt(lambda i: i.op == "aten.gelu", lambda i: replace(i, op="aten.relu", args=i.args[:1]))
    assert not report.ok
    assert report.first_difference.startswith("%gelu_0 = aten.relu: f64[8,16,128] S(2) is off by")


def test_a_wrong_shape_is_caught_where_it_is() -> None:
    """Pieces that do not fit together are reported, not raised as an index error from within."""

    def swap(instr: Instr) -> Instr:
        return replace(instr, op="aten.sum.dim_IntList", args=(instr.refs[0], (0,), False, None))

    one = specimen("mlp.py:tiny")
    plan = laminar.plans.data_parallel(one.graph, Mesh({"dp": 2}))
    last = [n.name for n in one.graph.nodes if n.op == "aten.mm"][-1]
    report_or_error: Any
    try:
        report_or_error = verify_program(
            one.graph, plan, [one.inputs], change=lambda p: changed(p, lambda i: i.name == last, swap)
        )
    except RuntimeError as error:  # where the next op can't even read it
        report_or_error = error
    assert not getattr(report_or_error, "ok", False)


def test_a_term_counted_twice_is_caught() -> None:
    """A bias added by every rank to its term of a sum."""
    one = specimen("gpt.py:tiny")
    seeds = {
        r"blocks\.0\.mlp\.up\.(weight|bias)": {"tp": S(0)},
        r"blocks\.0\.mlp\.down\.weight": {"tp": S(1)},
        "batch.*": {"tp": B},
    }
    plan = laminar.plans.seeded(one.graph, Mesh({"tp": 2}), seeds)
    inputs = dict(one.inputs)
    inputs["blocks.0.mlp.down.bias"] = torch.arange(32.0)  # zero as initialised, which would hide it
    assert verify_program(one.graph, plan, [inputs]).ok
    program = laminar.lower(one.graph, plan)
    pads = [i for i in program.instrs if i.kind == "pad"]
    assert pads, "the bias of a split product is padded to a term"

    def unpad(p: Program) -> Program:
        return changed(p, lambda i: i.kind == "pad", lambda i: replace(i, op="box.all_gather"))

    report = verify_program(one.graph, plan, [inputs], change=unpad)
    assert not report.ok
    assert "aten.addmm" in report.first_difference and "P(sum)" in report.first_difference


def test_rounding_is_told_from_a_mistake() -> None:
    """In float32 the same plan is off by rounding, which 1e-9 does not allow and 1e-5 does."""
    one = specimen("gpt.py:tiny")
    plan = laminar.plans.tensor_parallel(one.graph, Mesh({"tp": 2}))
    single = verify_program(one.graph, plan, [one.inputs], "f32")
    assert single.ok and 1e-9 < single.max_rel_error < 1e-5
    assert not verify_program(one.graph, plan, [one.inputs], "f32", tolerance=1e-9).ok


@pytest.mark.parametrize("name", ["hf.py:gpt2", "hf.py:bert", "llama.py:tiny", "t5.py:tiny"])
def test_casts_inside_a_model_are_widened_too(name: str) -> None:
    """`.double()` on these models leaves float32 inside; verification does not, so it reaches 1e-9 and far below."""
    one = specimen(name)
    report = verify_program(one.graph, laminar.plans.tensor_parallel(one.graph, Mesh({"tp": 2})), [one.inputs])
    assert report.ok and report.max_rel_error < 1e-13


@pytest.mark.parametrize("name", FEW)
def test_the_front_door_verifies_every_model(name: str) -> None:
    """`laminar.verify(model, loss, batches, plan)`: two batches, model and data as a user has them."""
    made = recipe(name)
    model, data = made.model(), iter(made.data())
    batches = [next(data) for _ in range(2)]
    graph = laminar.capture(model, made.loss, batches[0])
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 2}))
    report = laminar.verify(model, made.loss, batches, plan)
    assert report.ok and report.batches == 2
    assert report.max_rel_error < 1e-12


def test_verify_runs_what_the_model_computes() -> None:
    """One device's loss in the report is the loss of the model itself, not of some graph."""
    made = recipe("gpt.py:tiny")
    model, batch = made.model(), next(iter(made.data()))
    graph = laminar.capture(model, made.loss, batch)
    report = laminar.verify(model, made.loss, [batch], laminar.plans.data_parallel(graph, Mesh({"dp": 2})), graph=graph)
    assert report.losses[0][0] == pytest.approx(made.loss(model.double(), batch).item(), rel=1e-12)


def test_a_plan_for_another_model_is_refused() -> None:
    """It would place tensors that are not there."""
    one, other = specimen("mlp.py:tiny"), specimen("lstm.py:tiny")
    plan = laminar.plans.data_parallel(other.graph, Mesh({"dp": 2}))
    with pytest.raises(PlanError, match="is for graph"):
        verify_program(one.graph, plan, [one.inputs])


def test_errors_are_measured_against_the_tensor() -> None:
    """Relative to the largest element, or to a floor; what is not a number on one side only is infinitely wrong."""
    one = torch.tensor([1.0, -4.0])
    assert error_of(one + torch.tensor([0.0, 0.4]), one, 0.0) == pytest.approx(0.1)
    assert error_of(torch.tensor([1e-16]), torch.zeros(1), 1.0) == pytest.approx(1e-16)
    assert error_of(torch.tensor([1e-16]), torch.zeros(1), 0.0) == float("inf")
    assert error_of(torch.tensor([float("nan")]), torch.ones(1), 0.0) == float("inf")
    assert error_of(torch.tensor([float("nan")]), torch.tensor([float("nan")]), 0.0) == 0.0
    assert error_of(torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 1.0]), 0.0) == 0.0
    assert error_of(torch.ones(2), torch.ones(3), 0.0) == float("inf")
    assert error_of(torch.tensor([3]), torch.tensor([3]), 0.0) == 0.0
    assert error_of(torch.tensor([3]), torch.tensor([4]), 0.0) == float("inf")
    assert error_of(torch.ones(0), torch.ones(0), 0.0) == 0.0

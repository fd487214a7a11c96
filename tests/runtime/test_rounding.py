"""What verification measures errors against, and what it holds them against: terms of sums, and the user's own model.

A gradient that is zero in exact arithmetic is 1e-18 on one device and 3e-18 on two ranks, and both are right. A check
that allows for it must not go blind: mistakes are planted in such outputs too. And a graph that is not the model is
DIFFERENT, however well a plan for it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar import Mesh
from laminar.api import inputs_of
from laminar.ir.graph import widen
from laminar.ir.program import Instr, Placed, Program
from laminar.ir.serial.codec import Ref
from laminar.runtime.check.in_process import loopback
from laminar.runtime.check.one_device import constants_of, run_graph
from laminar.runtime.check.rounding import TermSizes
from laminar.runtime.check.verify import relative_error, verify_program, widened
from laminar.runtime.comm.shards import assemble
from tests.support.capture_check import square


class Normed(nn.Module):
    """Biases before batch norms, whose gradients are zero, and a mean of a linear map of what has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.norm2 = nn.Conv2d(6, 5, 1), nn.BatchNorm2d(5)
        nn.init.zeros_(self.second.bias)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(self.second(self.norm(self.first(x))))
        return self.head(x.relu().mean((2, 3)))


ZERO = ("grad:first.bias", "grad:second.bias", "buffer:norm2.running_mean")
PLANS: dict[str, Callable[[Any], Any]] = {
    "data parallel": lambda g: laminar.plans.data_parallel(g, Mesh({"dp": 2})),
    "ZeRO": lambda g: laminar.plans.zero(g, Mesh({"dp": 4})),
    "tensor parallel": lambda g: laminar.plans.tensor_parallel(g, Mesh({"tp": 2})),
}


@pytest.fixture(scope="module")
def normed() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = Normed(), torch.randn(8, 3, 6, 6)
    graph = laminar.capture(model, square, batch)
    return graph, inputs_of(graph, model, batch)


@pytest.mark.parametrize("dtype", ["f64", "f32"])
@pytest.mark.parametrize("what", PLANS)
def test_what_is_zero_but_for_rounding_is_equal(normed: Any, what: str, dtype: str) -> None:
    """As in every network that normalises what a biased layer gives."""
    graph, inputs = normed
    report = verify_program(graph, PLANS[what](graph), [inputs], dtype)
    assert report.ok, str(report)


def test_such_values_have_no_digit_in_common(normed: Any) -> None:
    """Measured by themselves they would be wrong, so the tests here are about something."""
    graph, inputs = normed
    program = laminar.lower(widen(graph), replace(PLANS["data parallel"](graph), graph_hash=widen(graph).hash))
    outs = loopback.run_loopback(program, widened(inputs), constants_of(widen(graph), True))
    want = run_graph(widen(graph), widened(inputs), constants_of(widen(graph), True))
    for o in program.outputs:
        key = f"{o.kind}:{o.name}"
        if key in ZERO:
            got = assemble([r[key] for r in outs], o.placed.spec.shape, o.placed.nd, program.mesh)
            assert float(want[key].abs().max()) < 1e-15
            assert relative_error(got, want[key], 0.0) > 1e-9, key


def test_a_size_is_that_of_the_terms(normed: Any) -> None:
    """Far above what is left of them, and no larger than anything in the step."""
    graph, inputs = normed
    sized = TermSizes(graph, inputs, constants_of(graph))
    want = run_graph(graph, inputs)
    for key in ZERO:
        assert 1e-4 < sized[key] < 10 and float(want[key].abs().max()) < 1e-5 * sized[key]
    for key in ("grad:head.weight", "grad:norm2.weight", "loss:loss"):
        assert 0.05 < sized[key] / float(want[key].abs().max()) < 50


# --- mistakes, in ordinary outputs and in such as are zero


def spoilt(program: Program, key: str, how: str) -> Program:
    """A program in which one output is made wrongly, where its terms are."""
    out = next(o for o in program.outputs if f"{o.kind}:{o.name}" == key)
    reduced = next((i for i in program.instrs if i.name == out.ref.name and i.moves), None)
    at = out.ref if reduced is None else reduced.refs[out.ref.index]
    term: Placed = out.placed if reduced is None else reduced.ins[out.ref.index]
    name = f"{at.name}.wrong"
    ops: dict[str, tuple[str, tuple[Any, ...]]] = {
        "scaled": ("aten.mul.Scalar", (at, 1.0 + 1e-6)),
        "swapped": ("aten.flip", (at, (0,))),
        "shifted": ("aten.add.Scalar", (at, 1e-8, 1)),
        "one is missing": ("aten.tril", (at, -1)),
    }
    instrs: list[Instr] = []
    for instr in program.instrs:
        if how == "not reduced" and instr is reduced:
            instr = replace(instr, boxing=replace(instr.box, reduction="max"))
        elif how != "not reduced" and (instr is reduced or (reduced is None and instr.name == at.name)):
            op, args = ops[how]
            wrong = Instr(name, op, args, (at,), (term,), (term,), phase="backward")
            if reduced is None:
                instrs += [instr, wrong]
                continue
            instrs.append(wrong)
            refs = tuple(Ref(name) if r == at else r for r in instr.refs)
            instr = replace(instr, refs=refs, args=refs)
        instrs.append(instr)
    outputs = program.outputs
    if reduced is None and how != "not reduced":
        outputs = tuple(replace(o, ref=Ref(name)) if o is out else o for o in outputs)
    return replace(program, instrs=tuple(instrs), outputs=outputs)


PLANTED = [
    *[(key, how) for key in ("grad:first.bias", "grad:second.bias") for how in ("not reduced", "shifted")],
    *[("grad:norm2.bias", how) for how in ("not reduced", "scaled", "swapped", "shifted")],
    *[("grad:head.weight", how) for how in ("not reduced", "scaled", "swapped", "shifted", "one is missing")],
    *[("grad:first.weight", how) for how in ("not reduced", "scaled", "one is missing")],
    ("buffer:norm2.running_mean", "shifted"),
    ("loss:loss", "shifted"),
]


@pytest.mark.parametrize(("key", "how"), PLANTED)
def test_a_mistake_is_seen_whatever_its_output_is(normed: Any, key: str, how: str) -> None:
    """A bias gradient of zero whose terms are not added up is not zero."""
    graph, inputs = normed
    report = verify_program(
        graph, PLANS["data parallel"](graph), [inputs], change=lambda program: spoilt(program, key, how)
    )
    assert not report.ok and report.errors[key] > 1e-9, str(report)


# --- the model itself


class Tau(nn.Module):
    """A model with a plain number in it, which a graph holds as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.tau = nn.Linear(6, 4), nn.Parameter(torch.ones(4)), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale**self.tau + self.scale.detach()


def test_a_graph_that_is_not_the_model_is_different() -> None:
    """The plan is right for what was captured; what was captured is not the model. The parameter is named."""
    torch.manual_seed(0)
    model, batch = Tau(), torch.randn(8, 6)
    graph = laminar.capture(model, square, batch)
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 2}))
    good = laminar.verify(model, square, [batch], plan, graph=graph)
    assert good.ok and good.eager_checked == 4
    assert "equal: 4 outputs of the captured graph and of the model in plain PyTorch" in str(good)
    model.tau = 2.0
    report = laminar.verify(model, square, [batch], plan, graph=graph)
    assert not report.ok and report.max_rel_error < 1e-12
    assert [*report.eager_differs] == ["grad:scale"]
    assert "DIFFERENT: what was captured is not the model" in str(report) and "the gradient of scale" in str(report)


class Forgetful(nn.Module):
    """Draws, batch statistics, and a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x)))


def test_draws_and_buffers_agree_with_the_model() -> None:
    """Eager runs draw what the graph draws, batch by batch, and leave the model as it was."""
    torch.manual_seed(0)
    model, batches = Forgetful(), [torch.randn(8, 6) for _ in range(2)]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    graph = laminar.capture(model, square, batches[0])
    report = laminar.verify(model, square, batches, laminar.plans.data_parallel(graph, Mesh({"dp": 2})))
    assert report.ok and report.eager_checked and not report.eager_differs, str(report)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_stages_are_held_against_the_model_too() -> None:
    """A plan with stages says both as well."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(8, 6)
    graph = laminar.capture(model, square_of_samples, batch[:4])
    plan = laminar.plans.pipeline(graph, 2, 2)
    report = laminar.verify(model, square_of_samples, [batch], plan)
    assert report.ok and report.eager_checked == 5, str(report)


def square_of_samples(model: nn.Module, batch: Tensor) -> Tensor:
    """A mean over samples, so that micro-batches add up."""
    return model(batch).pow(2).mean()

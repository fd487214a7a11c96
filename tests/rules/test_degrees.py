"""Hooks on gradients and custom backward functions in micro-batches: what depends on the size of the loss is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.api import inputs_of
from laminar.capture.capture import capture
from laminar.errors import PlanError
from laminar.ir.graph import SCALE
from laminar.rules import degrees
from laminar.runtime.check.one_device import constants_of, run_graph
from laminar.staging.coupled_samples import coupled_ops
from tests.suites import hf
from tests.support.zoo import FEW, specimen

Hook = Callable[[Tensor], Tensor]


class Cubed(torch.autograd.Function):
    """Linear in what it is given, though it computes with cubes, comparisons and exponentials."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0.1, g * x.exp() * torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=g.dtype), g.clone()) + 3 * g


class Signed(torch.autograd.Function):
    """Signs of gradients, whatever their size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.sign()


class Hooked(nn.Module):
    """A gradient on its way is given to a function."""

    def __init__(self, hook: Hook | None, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.hook, self.between = nn.Linear(4, 4), nn.Linear(4, 3), hook, between

    def forward(self, x: Tensor) -> Tensor:
        t = self.a(x)
        if self.hook is not None:
            t.register_hook(self.hook)
        return self.b(self.between(t))


def norm(g: Tensor) -> Tensor:
    return g.norm(dim=-1, keepdim=True)


STEADY: dict[str, Hook] = {
    "half": lambda g: g * 0.5,
    "positive": lambda g: g.relu(),
    "at least nothing": lambda g: g.clamp(min=0),
    "sign and size": lambda g: g.sign() * g.abs(),
    "over its norm and back": lambda g: g / norm(g) * g.abs().amax(-1, keepdim=True),
    "without nan": lambda g: torch.where(g.isnan(), torch.zeros_like(g), g),
    "where it is above nothing": lambda g: g * (g > 0),
    "by a constant": lambda g: g * torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=g.dtype),
    "the two largest": lambda g: torch.zeros_like(g).scatter(-1, g.topk(2, -1).indices, g.topk(2, -1).values),
    "off its features' mean": lambda g: g - g.mean(-1, keepdim=True),
    "a root of squares": lambda g: g.square().sum(-1, keepdim=True).sqrt() * g.sign(),
    "a logarithm and back": lambda g: (g.abs().log() + 3).exp() * g.sign(),
    "a deviation": lambda g: g * 0.5 + g.std(-1, keepdim=True),
}
UNSTEADY: dict[str, tuple[Hook, str]] = {
    "clamped": (lambda g: g.clamp(-0.01, 0.01), "clamp"),
    "through tanh": (lambda g: g.tanh(), "tanh"),
    "its sign": (lambda g: g.sign(), "sign"),
    "over its norm": (lambda g: g / norm(g), "div"),
    "normalised": (lambda g: F.normalize(g, dim=-1), ""),
    "and a number": (lambda g: g + 0.1, "add"),
    "squared": (lambda g: g * g, "mul"),
    "small ones dropped": (lambda g: torch.where(g.abs() > 0.02, g, 0.0), "gt"),
    "clipped by its norm": (lambda g: g * (0.1 / (norm(g) + 1e-6)).clamp(max=1.0), "add"),
    "rounded": (lambda g: (g * 100).round() / 100, "round"),
    "a softmax": (lambda g: g.softmax(-1), "softmax"),
    "whole numbers": (lambda g: (g * 100).long().to(g.dtype), "_to_copy"),
    "a logarithm": (lambda g: (g.abs().log() + 3).clamp(min=-1.0).exp(), "clamp"),
    "filled": (lambda g: g.masked_fill(g > 0, 1.0), "masked_fill"),
}
BATCH = {"x": torch.randn(6, 4, dtype=torch.float64), "y": torch.randint(0, 3, (6,))}
WEIGHTS = torch.randn(6, 3, dtype=torch.float64)
LOSSES: dict[str, Callable[..., Any]] = {
    "cross entropy": lambda m, b: F.cross_entropy(m(b["x"]), b["y"]),
    "squares": lambda m, b: (m(b["x"]) - 0.3).square().mean(),
    "total": lambda m, b: laminar.Loss(m(b["x"]).square().sum(), torch.tensor(float(len(b["x"])))),
    "sum": lambda m, b: m(b["x"]).sum(),
    "weighed by constants": lambda m, b: (m(b["x"]) * WEIGHTS).sum() + m(b["x"]).mean(),
}


def named(model: nn.Module, loss: str = "squares") -> list[str]:
    """The ops that are named, each with its line."""
    found = coupled_ops(laminar.capture(model.double(), LOSSES[loss], BATCH))
    assert all("test_degrees.py" in f.where for f in found)
    return [f.op for f in found]


@pytest.mark.parametrize("loss", LOSSES)
def test_hooks_that_hang_on_the_size_of_the_loss_are_named_and_no_others(loss: str) -> None:
    """Whatever the loss is: the gradient of the loss by itself is a one, and most of what it makes is folded away."""
    for name, hook in STEADY.items():
        assert named(Hooked(hook), loss) == [], name
    for name, (hook, op) in UNSTEADY.items():
        found = named(Hooked(hook), loss)
        assert found and op in found[0], (name, found)


def test_custom_functions_are_named_if_they_are_not_linear() -> None:
    """What stands in a backward function is as free as a hook, and most of them are linear."""
    assert named(Hooked(None, Cubed.apply)) == []
    assert named(Hooked(None, Signed.apply)) == ["aten.sign"]
    assert named(Hooked(None, lambda t: t.logcumsumexp(-1) + torch.xlogy(t, t.square() + 1))) == []
    assert named(Hooked(None, lambda t: torch.linalg.matrix_exp(t[:, :, None] * t[:, None]).sum(-1))) == []


@pytest.mark.parametrize("name", [*STEADY, *UNSTEADY])
def test_what_is_not_named_is_proportional_to_the_loss(name: str) -> None:
    """The claim itself, by arithmetic: three times the loss, three times every gradient."""
    hook = STEADY.get(name) or UNSTEADY[name][0]
    model = Hooked(hook).double()
    given = inputs_of(laminar.capture(model, LOSSES["squares"], BATCH), model, BATCH, seed=3)
    graph = capture(model, LOSSES["squares"], BATCH, scaled=True)
    sizes = (torch.tensor(c, dtype=torch.float64) for c in (1.0, 3.0))
    once, thrice = (run_graph(graph, {**given, SCALE: c}, constants_of(graph)) for c in sizes)
    same = all(torch.allclose(thrice[k], 3 * once[k], 1e-6) for k in once if k.startswith("grad:"))
    assert same == (name in STEADY) == (not degrees.breaks(graph))


@pytest.mark.parametrize(
    "hook", [lambda g: g - g.mean(0), lambda g: g * g.norm() / norm(g).mean(), lambda g: g.flip(0)]
)
def test_hooks_that_look_at_other_samples_are_named(hook: Hook) -> None:
    """A mean over the batch is linear, but a part of the batch has another."""
    assert named(Hooked(hook))


def test_a_hook_that_is_not_linear_is_refused_in_stages_and_warned_of_in_parts() -> None:
    """It was silent: a total has larger gradients than the whole batch's mean, so a clamp cuts more of them."""

    def trained(hook: Hook, loss: str) -> Tensor:
        model = Hooked(hook).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        laminar.parallelize(model, LOSSES[loss], optimizer, batch=BATCH, micro_batches=2, device="cpu").step(BATCH)
        return model.a.weight.detach()

    clamped = UNSTEADY["clamped"][0]
    with pytest.warns(UserWarning, match=r"clamp in backward is not linear.*test_degrees\.py.*clip_norm="):
        trained(clamped, "total")
    trained(STEADY["half"], "total")
    plain = Hooked(clamped).double()
    LOSSES["squares"](plain, BATCH).backward()
    assert plain.a.weight.grad is not None
    expected = plain.a.weight.detach() - 0.1 * plain.a.weight.grad
    torch.testing.assert_close(
        trained(clamped, "squares"), expected
    )  # parts weighed before backward: the whole batch's
    part = {k: v[:3] for k, v in BATCH.items()}
    graph = laminar.capture(Hooked(UNSTEADY["clamped"][0]).double(), LOSSES["squares"], part)
    with pytest.raises(PlanError, match="clamp in backward is not linear in the gradient of the loss"):
        laminar.plans.pipeline(graph, 2, 2)
    assert len(laminar.plans.pipeline(graph, 2, 2, couple="microbatch").stages) == 2


HOMOGENEOUS = set(
    """_conj_physical rrelu abs neg clone conj_physical positive relu leaky_relu deg2rad rad2deg nan_to_num
    copysign.Scalar copysign.Tensor
    ldexp.Tensor lerp.Tensor addcdiv div.Scalar div.Tensor true_divide.Tensor pow.Tensor_Scalar gelu_backward
    logit_backward native_dropout_backward sigmoid_backward silu_backward tanh_backward threshold_backward""".split()
)
"""Pointwise ops that keep the degree of what they are given, or have a line of their own in the analysis."""


def test_every_pointwise_op_of_torch_is_known() -> None:
    """Ops that are not known are taken to be linear, so a new function of torch's would slip through."""
    known = (
        degrees.SCALE_FREE,
        degrees.EQUAL_DEGREES,
        degrees.COMPARED,
        degrees.TIMES,
        degrees.DEGREE_PRODUCTS,
        degrees.ADDED,
        degrees.UNSTEADY,
    )
    missing = []
    every = {s.name.removeprefix("aten::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")}
    for packet in filter(None, (getattr(torch.ops.aten, name, None) for name in sorted(every))):
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            name = str(op).removeprefix("aten.").removesuffix(".default")
            made = torch.Tag.pointwise in op.tags and not op._schema.is_mutable and "out" not in overload
            listed = any(f"aten.{name}" in some for some in known) or name in HOMOGENEOUS
            if made and not listed and not name.startswith("special_"):
                missing.append(name)
    assert missing == []


@pytest.mark.parametrize("name", FEW)
def test_the_zoo_has_no_op_that_hangs_on_the_size_of_the_loss(name: str) -> None:
    """Autograd is linear, whatever it is made of: a false alarm would refuse pipelines of ordinary models."""
    graph = specimen(name).graph
    assert degrees.breaks(graph) == []
    assert bool(coupled_ops(graph)) == (name in ("moe.py:tiny", "resnet.py:tiny"))  # a balance loss, batch norm


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # by importing some of them
@pytest.mark.parametrize("name", hf.FAMILIES)
def test_no_architecture_of_hugging_face_has_one(name: str) -> None:
    """Backward of everything that people train, as it is traced."""
    case = hf.find(name)
    assert degrees.breaks(laminar.capture(case.make(), case.loss, case.batch)) == []

"""However a step reaches the model's parameters, they are parameters, and they get the gradients they get in PyTorch.

Tracing puts stand-ins in their places. A stand-in that is no `nn.Parameter` makes torch wrap it in a new one, which is
cut off from the old: the model would train without those weights, and no two plans would disagree about it.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import laminar
from laminar.capture.capture import capture
from tests.support.capture_check import Fn, draw, same, square

X = draw(4, 3, seed=5)


def weight(*shape: int, seed: int = 2) -> nn.Parameter:
    return nn.Parameter(draw(*shape, seed=seed))


class Scaled(nn.Parameter):
    """A parameter of the user's own kind."""

    factor = 3.0

    def effective(self) -> Tensor:
        return self * self.factor


def scaled(*shape: int) -> Scaled:
    out = Scaled(draw(*shape, seed=9))
    out.note = "mine"
    return out


def listed(count: int = 4) -> nn.ParameterList:
    return nn.ParameterList([weight(3, seed=i) for i in range(count)])


def through(parameters: Any, x: Tensor) -> Tensor:
    """Every parameter counts differently."""
    for i, p in enumerate(parameters):
        x = x * (i + 1) + torch.sin(p)
    return x


def _copied(m: Any, x: Tensor) -> Tensor:
    return through(copy.copy(m.plist), x)


def _deep(m: Any, x: Tensor) -> Tensor:
    return through(m.plist, x) + copy.deepcopy(m.w).sum()


def _branch(m: Any, x: Tensor) -> Tensor:
    return x * m.w if isinstance(m.w, nn.Parameter) else x + m.w


def _subclass(m: Any, x: Tensor) -> Tensor:
    assert isinstance(m.s, Scaled) and issubclass(type(m.s), nn.Parameter) and m.s.note == "mine"
    return x * m.s.effective()


def _buffer(m: Any, x: Tensor) -> Tensor:
    assert isinstance(m.b, nn.Buffer) and not isinstance(m.b, nn.Parameter) and not isinstance(m.w, nn.Buffer)
    return x * m.b * m.w


def _registered(m: Any, x: Tensor) -> Tensor:
    inner = nn.Module()
    inner.p = m.w
    assert next(iter(inner.parameters())) is m.w
    return through(inner.parameters(), x)


def _made_of_one(m: Any, x: Tensor) -> Tensor:
    """A parameter made of another is a leaf of its own: in PyTorch, too, the old one gets nothing from it."""
    return x * m.w + nn.Parameter(m.w) + nn.Parameter(m.plist[0] * 2).sum()


def _frozen_on_the_way(m: Any, x: Tensor) -> Tensor:
    return x * m.w + nn.Parameter(m.plist[0], requires_grad=False)


def _tied(m: Any, x: Tensor) -> Tensor:
    assert m.again is m.w and m.table["w"] is m.w and len({id(p) for p in m.parameters()}) == 5
    return x * m.again + m.table["w"] * m.w


def _functional(m: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(m.inner, {k: v * 2 for k, v in m.inner.named_parameters()}, (x,))


def _attribute(m: Any, x: Tensor) -> Tensor:
    assert all(p.is_leaf and p.requires_grad and p.grad_fn is None for p in m.parameters())
    return through([p for p in m.parameters() if p.dim() == 1 and p.requires_grad], x)


WAYS = {
    "a slice of a list": lambda m, x: through(m.plist[:2], x),
    "a slice with a step": lambda m, x: through(m.plist[::-2], x),
    "a list made anew": lambda m, x: through(nn.ParameterList([m.w, *m.plist]), x),
    "a list added to": lambda m, x: through(nn.ParameterList([m.w]).extend(m.plist).append(m.pdict["a"]), x),
    "a copy of a list": _copied,
    "a deep copy": _deep,
    "a copy of a dict": lambda m, x: through(m.pdict.copy().values(), x),
    "dicts joined": lambda m, x: through((m.pdict | nn.ParameterDict({"c": m.w})).values(), x),
    "a dict from keys": lambda m, x: through(nn.ParameterDict({k: m.pdict[k] for k in ("b", "a")}).values(), x),
    "isinstance": _branch,
    "a comprehension": lambda m, x: through([p for p in m.parameters() if type(p.data) is not type(None)][:3], x),
    "named parameters": lambda m, x: x + sum(p.pow(2).sum() for n, p in m.named_parameters() if "list" in n),
    "a vector of all": lambda m, x: x * m.w + parameters_to_vector(m.parameters()).norm(),
    "get_parameter": lambda m, x: x * m.get_parameter("inner.weight").sum(),
    "the dict itself": lambda m, x: x * m._parameters["w"],
    "a state dict": lambda m, x: x * m.w + m.state_dict()["w"],
    "a state dict with gradients": lambda m, x: x * m.state_dict(keep_vars=True)["w"],
    "registered elsewhere": _registered,
    "a parameter of a parameter": _made_of_one,
    "frozen on the way": _frozen_on_the_way,
    "a functional call": _functional,
    "what parameters are": _attribute,
    "a parameter of its own kind": _subclass,
}


def whole(forward: Any, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return Fn(
        forward,
        w=weight(3),
        plist=listed(),
        pdict=nn.ParameterDict({"a": weight(3, seed=7), "b": weight(3, seed=8)}),
        inner=nn.Linear(3, 3),
        s=scaled(3),
        **more,
    )


@pytest.mark.parametrize("way", WAYS)
def test_parameters_reached_from_forward_train_as_in_pytorch(way: str) -> None:
    """Which gradients there are, and their values, are plain PyTorch's."""
    same(lambda: whole(WAYS[way]), square, X)


def test_buffers_are_buffers() -> None:
    """`isinstance(x, nn.Buffer)` goes by a mark on the tensor, which a stand-in needs as well."""

    def make() -> nn.Module:
        model = Fn(_buffer, w=weight(3))
        model.b = nn.Buffer(draw(3, seed=4))
        return model

    same(make, square, X)


def test_tied_parameters_are_one_object_in_every_place() -> None:
    """In modules' attributes, lists and dicts alike."""

    def make() -> nn.Module:
        model = Fn(_tied, w=weight(3), plist=listed())
        model.again = model.w
        model.table = {"w": model.w}
        return model

    same(make, square, X)


@dataclasses.dataclass
class Bag:
    held: Any


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w * 2, (grad * x * 2).sum(0)


OUTSIDE = {
    "a list in a closure": lambda m: [[*m.parameters()], lambda held, m, x: m(x) + sum(p.pow(2).sum() for p in held)],
    "a tuple of pairs": lambda m: [
        tuple(m.named_parameters()),
        lambda held, m, x: m(x) + sum(p.abs().sum() for _, p in held),
    ],
    "an object": lambda m: [Bag({"k": [m.w]}), lambda held, m, x: m(x) * held.held["k"][0]],
    "one by itself": lambda m: [m.inner.weight, lambda held, m, x: m(x) @ held],
    "transposed": lambda m: [m.inner.weight, lambda held, m, x: m(x) @ held.T + held.mT.sum() + held.data.sum()],
    "by keyword": lambda m: [m.inner, lambda held, m, x: F.linear(input=m(x), weight=held.weight, bias=held.bias)],
    "stacked": lambda m: [[*m.plist], lambda held, m, x: m(x) + torch.stack(held).sum(0)],
    "a custom function": lambda m: [m.w, lambda held, m, x: _Doubled.apply(m(x), held)],
    "an ordered dict": lambda m: [OrderedDict(m.named_parameters()), lambda held, m, x: m(x) * held["w"]],
}


@pytest.mark.parametrize("way", OUTSIDE)
def test_parameters_reached_around_the_model_train_as_in_pytorch(way: str) -> None:
    """A penalty over a list of parameters that was made before training is an ordinary thing to write."""
    kept: dict[int, Any] = {}

    def make() -> nn.Module:
        model = whole(lambda m, x: m.inner(x) * m.w)
        kept[id(model)] = (model, *OUTSIDE[way](model))
        return model

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        _, held, use = kept[id(model)]
        return square(Fn(lambda _, x: use(held, model, x)), batch)

    same(make, loss, X)


def test_frozen_parameters_and_buffers_held_outside_are_inputs() -> None:
    """As a constant, a buffer would stay what it was when the step was captured."""
    model = Fn(lambda m, x: m.inner(x), inner=nn.Linear(3, 3), scale=draw(3, seed=3))
    model.inner.bias.requires_grad_(False)
    held = [model.scale, model.inner.bias]
    graph = capture(model, lambda m, x: square(Fn(lambda _, y: m(y) * held[0] + held[1]), x), X)
    assert not graph.constants or all(c.spec.shape != (3,) for c in graph.constants)
    assert {"scale", "inner.bias"} <= {r.name for n in graph.nodes for r in n.ins}


def test_a_tensor_made_from_parameters_before_the_step_is_refused() -> None:
    """It would be a constant, and the parameters behind it would get nothing from it."""
    model = whole(lambda m, x: m.inner(x))
    held = model.w * 2
    with pytest.raises(laminar.CaptureError, match="trainable tensor from outside"):
        capture(model, lambda m, x: square(Fn(lambda _, y: m(y) * held), x), X)


def test_a_list_kept_by_forward_leaves_the_model_as_it_was() -> None:
    """Capture puts everything back, submodules that forward has assigned included."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.kept = nn.ParameterList([m.w])
        return through(m.kept, x)

    model = whole(forward)
    before = dict(model.named_modules())
    capture(model, square, X)
    assert dict(model.named_modules()) == before and not hasattr(model, "kept")


def _with(model: nn.Module, name: str, value: Any) -> nn.Module:
    setattr(model, name, value)
    return model


COMPUTED = {
    "an attribute": lambda m: _with(m, "part", m.w[:2]),
    "in a list": lambda m: _with(m, "part", [m.w * 2][0]),
    "a buffer": lambda m: (m.register_buffer("part", m.w * 2), m)[1],
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_what_was_computed_from_parameters_before_is_refused_if_read(kind: str) -> None:
    """In PyTorch the parameters behind it may train through it in every step; a graph of one step begins too late."""
    model = COMPUTED[kind](Fn(lambda m, x: m.inner(x) * m.part.sum(), w=weight(3), inner=nn.Linear(3, 3)))
    with pytest.raises(laminar.CaptureError, match="part was computed from parameters before the step"):
        capture(model, square, X)
    model.run = lambda m, x: m.inner(x)
    capture(model, square, X)  # nobody reads it: left over from an earlier forward


def test_parameters_in_the_same_memory_are_refused() -> None:
    """Plans that keep parameters in shards would part them without a word."""
    model = Fn(lambda m, x: m.inner(x) * m.row, inner=nn.Linear(3, 3))
    model.row = nn.Parameter(model.inner.weight.data[0])
    with pytest.raises(laminar.CaptureError, match=r"inner\.weight and row lie in the same memory|row and inner"):
        capture(model, square, X)
    flat = draw(12)
    model.inner.weight.data, model.row.data = flat[:9].view(3, 3), flat[9:]  # beside each other, as cuDNN wants weights
    capture(model, square, X)


def _late(m: Any, x: Tensor) -> Tensor:
    m.late = nn.Linear(3, 3)
    return m.late(m.inner(x))


def _turned(m: Any, x: Tensor) -> Tensor:
    m.layers = m.layers[::-1]
    for layer in m.layers:
        x = layer(x)
    return x


SWAPS = {
    "a module made late": (_late, r"forward makes parameter late\.weight"),
    "a parameter made late": (lambda m, x: _with(m, "p", nn.Parameter(m.w * 2)).p * x, "forward makes parameter p"),
    "another parameter": (lambda m, x: _with(m, "w", nn.Parameter(m.w * 2)).w * x, "in the place of parameter w"),
    "modules in another order": (_turned, "another module in the place of layers"),
}


@pytest.mark.parametrize("kind", SWAPS)
def test_what_forward_puts_into_the_model_is_refused_by_name(kind: str) -> None:
    """The next step would begin with it, and no optimizer knows it."""
    forward, words = SWAPS[kind]
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model = Fn(forward, w=weight(3), inner=nn.Linear(3, 3), layers=layers)
    with pytest.raises(laminar.CaptureError, match=words):
        capture(model, square, X)
    assert list(model.layers) == list(layers) and not hasattr(model, "late")


def test_torchscript_is_refused_by_name() -> None:
    """Its parameters lie where no stand-in can take their places."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = nn.Sequential(nn.Linear(3, 3), torch.jit.trace(nn.Linear(3, 3), X))
    with pytest.raises(laminar.CaptureError, match="1 is a TorchScript module"):
        capture(model, square, X)


def test_initialisers_may_be_used_in_forward() -> None:
    """Their draws are keyed like all others."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.inner(x) + nn.init.kaiming_uniform_(torch.empty(3, 3)) @ m.w + nn.init.normal_(torch.empty(3))

    same(lambda: Fn(forward, w=weight(3), inner=nn.Linear(3, 3)), square, X)

"""Every refusal says what is wrong, where, and what to do next.

A refusal is part of the promise: what can't be captured or placed is named at once, with the line the
user wrote, and never comes out as wrong numbers later. Each test provokes one and reads its message.
Covered: capture, placements, plans, batches, meshes, recipes, and ops that nothing says how to split.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar import (
    BatchError,
    CaptureError,
    GraphError,
    LaminarError,
    Mesh,
    MeshError,
    NoRuleError,
    PlacementError,
    PlanError,
    RecipeError,
    S,
)
from laminar.api import inputs_of, load_recipe
from laminar.capture.capture import check_batch
from laminar.ir.graph import Graph, Node
from laminar.ir.plans.plan import Choice, Plan
from laminar.ir.sbp import B
from laminar.ir.serial.codec import Ref
from laminar.runtime.check.probe_rules import probe, signatures_of

EXAMPLES = Path(__file__).parent.parent / "examples"
HERE = Path(__file__).name
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """A linear layer, and something that is done to its output."""

    def __init__(self, after: Callable[[Any, Tensor], Any], size: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(size, 4)
        self.after = after
        self.calls = 0
        self.history: list[Any] = []
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.after(self, self.a(x))


def total(model: nn.Module, batch: Any) -> Any:
    out = model(batch)
    return out.square().sum()


def refused(after: Callable[[Any, Tensor], Any], loss: Any = total, batch: Any = X) -> str:
    """The message with which capture refuses a model."""
    model = Model(after)
    with pytest.raises(CaptureError) as info:
        laminar.capture(model, loss, batch)
    assert model.calls == 0 and not model.history, "a refused capture leaves no trace"
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return str(info.value)


def names_this_file(message: str, code: str) -> None:
    """The `at` line names this file and shows the line itself."""
    at = [line for line in message.splitlines() if line.strip().startswith("at ")]
    assert at and HERE in at[0] and code in at[0], message


def has_next(message: str, *words: str) -> None:
    step = [line for line in message.splitlines() if line.strip().startswith("next ")]
    assert step, message
    for word in words:
        assert word in step[0], message


# --- capture: what depends on data -------------------------------------------------------------


def _branch(m: Any, y: Tensor) -> Tensor:
    if y.sum() > 0:  # decides
        return y
    return -y


def _while(m: Any, y: Tensor) -> Tensor:
    while (y.abs() > 1).any():
        y = y / 2
    return y


def _item(m: Any, y: Tensor) -> Tensor:
    return y * y.max().item()


def _float(m: Any, y: Tensor) -> Tensor:
    return y * float(y.mean())


def _tolist(m: Any, y: Tensor) -> Tensor:
    return y[:, : len(y[0].tolist())]


def _mask(m: Any, y: Tensor) -> Tensor:
    return y[y > 0]


def _select(m: Any, y: Tensor) -> Tensor:
    return torch.masked_select(y, y > 0)


def _nonzero(m: Any, y: Tensor) -> Tensor:
    return y[(y > 0).nonzero()[:, 0]]


def _where(m: Any, y: Tensor) -> Tensor:
    return y[torch.where(y[:, 0] > 0)[0]]


def _unique(m: Any, y: Tensor) -> Tensor:
    return torch.unique(y)


@pytest.mark.parametrize(
    ("after", "said", "code", "instead"),
    [
        (_branch, "the truth of a tensor", "if y.sum() > 0:", "torch.where"),
        (_while, "the truth of a tensor", "while (y.abs() > 1).any():", "torch.where"),
        (_item, "item()", "y.max().item()", "a tensor in its place"),
        (_float, "float()", "float(y.mean())", "a tensor in its place"),
        (_tolist, "tolist()", "y[0].tolist()", "a tensor in its place"),
        (_mask, "boolean mask", "return y[y > 0]", "torch.where"),
        (_select, "masked_select", "torch.masked_select(y, y > 0)", "torch.where"),
        (_nonzero, "nonzero", "(y > 0).nonzero()", "torch.where(condition, a, b)"),
        (_where, "torch.where(condition)", "torch.where(y[:, 0] > 0)", "torch.where(condition, a, b)"),
        (_unique, "unique", "torch.unique(y)", "fixed size"),
    ],
    ids=lambda v: v.__name__.strip("_") if callable(v) else "",
)
def test_what_depends_on_data_is_refused_at_its_line(after: Any, said: str, code: str, instead: str) -> None:
    """One graph holds one path: taking today's would train another model tomorrow."""
    message = refused(after)
    assert said in message and "depends on data" in message
    names_this_file(message, code)
    has_next(message, instead)


class Drawing(nn.Module):
    """Draws in a way that has no keyed form."""

    def forward(self, y: Tensor) -> Tensor:
        return y * torch.multinomial(y.exp(), 3, replacement=True).sum()


def test_a_refusal_names_the_module_it_happened_in() -> None:
    """Inside a library's layer the user's line says less than the module's name."""
    model = nn.Sequential(nn.Linear(3, 4), Drawing())
    with pytest.raises(CaptureError) as info:
        laminar.capture(model, total, X)
    assert "module  1 (Drawing)" in str(info.value)
    assert "multinomial" in str(info.value)


def test_packed_sequences_are_refused() -> None:
    """Their layout is the lengths of this batch."""

    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
            return self.lstm(packed)[0].data

    with pytest.raises(CaptureError) as info:
        laminar.capture(Packs(), total, torch.randn(2, 5, 3))
    assert "packed sequence" in str(info.value)
    names_this_file(str(info.value), "packed")
    has_next(str(info.value), "padded", "mask")


# --- capture: side effects -----------------------------------------------------------------------


def test_a_hook_on_a_parameter_is_refused_by_name() -> None:
    """It would silently not run."""
    model = Model(lambda m, y: y)
    model.a.weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureError, match=r"parameter a\.weight has a hook") as info:
        laminar.capture(model, total, X)
    has_next(str(info.value), "remove the hook")
    after = Model(lambda m, y: y)
    after.a.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CaptureError, match=r"parameter a\.bias has a hook"):
        laminar.capture(after, total, X)


def _count(m: Any, y: Tensor) -> Tensor:
    m.calls += 1
    return y / m.calls


def _append(m: Any, y: Tensor) -> Tensor:
    m.history.append(len(m.history))
    return y


@pytest.mark.parametrize("after", [_count, _append], ids=["counter", "list"])
def test_a_python_side_effect_is_refused_by_name(after: Any) -> None:
    """A captured step would count to one and stay there."""
    message = refused(after)
    assert ("calls from 0 to 1" if after is _count else "history from") in message
    if after is _count:
        names_this_file(message, "m.calls += 1")
    has_next(message, "registered buffer")


OUTSIDE = torch.zeros(4)


def test_changing_an_outside_tensor_in_place_is_refused() -> None:
    """Nobody could give the new value back to whoever owns it."""

    def after(m: Any, y: Tensor) -> Tensor:
        OUTSIDE.add_(y.detach().mean(0))
        return y + OUTSIDE

    message = refused(after)
    assert "outside the model" in message
    names_this_file(message, "OUTSIDE.add_")
    has_next(message, "register it as a buffer")
    assert torch.equal(OUTSIDE, torch.zeros(4))


def test_changing_the_batch_in_place_stays_inside_the_step() -> None:
    """The step sees the change, the caller's tensor does not: eager PyTorch would change it for good."""
    x = X.clone()
    laminar.capture(Model(lambda m, y: y), lambda m, b: total(m, b.mul_(2)), x)
    assert torch.equal(x, X)


def test_state_carried_in_an_attribute_is_refused() -> None:
    """A hidden state that starts as None is state from the second step on; a graph of the first would lose it."""

    def after(m: Any, y: Tensor) -> Tensor:
        out = y if getattr(m, "memory", None) is None else y + m.memory
        m.memory = y.detach().mean(0)
        return out

    message = refused(after)
    assert "memory" in message and "the next step reads" in message
    has_next(message, "register_buffer")


def test_a_hidden_state_in_a_tuple_is_refused() -> None:
    """An LSTM that keeps its state between batches, as `(h, c)`."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4)
            self.state: Any = None

        def forward(self, x: Tensor) -> Tensor:
            out, (h, c) = self.lstm(x, self.state)
            self.state = (h.detach(), c.detach())
            return out

    model = Stateful()
    with pytest.raises(CaptureError, match="leaves a tensor in state"):
        laminar.capture(model, total, torch.randn(5, 2, 3))
    assert model.state is None


def test_a_parameter_changed_in_forward_is_refused_by_name() -> None:
    """Weight clipping in forward would be lost: gradients go out, parameters don't."""

    def clips(m: Any, y: Tensor) -> Tensor:
        with torch.no_grad():
            m.a.weight.clamp_(-1, 1)
        return y

    message = refused(clips)
    assert "parameter a.weight is changed in place" in message
    names_this_file(message, "m.a.weight.clamp_(-1, 1)")

    def replaces(m: Any, y: Tensor) -> Tensor:
        m.a.weight = nn.Parameter(torch.ones(4, 3))
        return y

    assert "in the place of parameter a.weight" in refused(replaces)


def test_a_buffer_that_grows_is_refused() -> None:
    """Every step would have other shapes."""

    def after(m: Any, y: Tensor) -> Tensor:
        m.table = torch.cat([m.table, y.detach()[0]])
        return y + m.table[:4]

    message = refused(after)
    assert "buffer table from f32[4] to f32[8]" in message
    has_next(message, "full size")


def test_buffers_in_one_memory_are_refused_if_written() -> None:
    """Two names for overlapping memory: a write to one would be a write to the other."""
    model = Model(lambda m, y: y + m.table.add_(1) + m.part)
    model.register_buffer("part", model.table[:1])
    with pytest.raises(CaptureError, match="table, which lies in the same memory as part"):
        laminar.capture(model, total, X)
    model.after = lambda m, y: y + m.table + m.part
    laminar.capture(model, total, X)


TRAINED = nn.Parameter(torch.ones(4))
HUGE = torch.zeros(1, 4).expand(1 << 23, 4)


def test_what_lies_outside_the_model_must_be_a_constant() -> None:
    """A trainable tensor outside would silently not train; a large one would be written into every file."""
    message = refused(lambda m, y: y * TRAINED)
    assert "trainable tensor from outside" in message
    names_this_file(message, "y * TRAINED")
    has_next(message, "parameter of the model")
    message = refused(lambda m, y: y + HUGE[0])
    assert "128 MB from outside" in message
    message = refused(lambda m, y: y + META)
    assert "lives on meta" in message


META = torch.ones(4, device="meta")


@pytest.mark.parametrize("source", ["Python", "numpy"])
def test_other_random_numbers_are_refused(source: str) -> None:
    """Stochastic depth by `random.random()` would drop the same layers for ever."""
    import random

    import numpy as np

    def after(m: Any, y: Tensor) -> Tensor:
        return y * (random.random() if source == "Python" else float(np.random.rand()))

    state = random.getstate()
    message = refused(after)
    assert f"random numbers from {source}" in message
    has_next(message, "torch.rand")
    assert random.getstate() == state


def test_tensors_that_are_not_dense_are_refused() -> None:
    """A sparse batch has no place in a graph."""
    with pytest.raises(CaptureError, match=r"batch is torch\.sparse_coo"):
        laminar.capture(Model(lambda m, y: y), total, X.to_sparse())


def test_other_memory_for_a_tensor_is_refused() -> None:
    """A graph knows values, not memory."""

    def after(m: Any, y: Tensor) -> Tensor:
        z = y.detach().clone()
        z.resize_(300, 8)
        return y * z.sum()

    message = refused(after)
    assert "resize_" in message
    names_this_file(message, "z.resize_(300, 8)")


def test_what_reads_memory_directly_is_refused() -> None:
    """Strides are a device's business."""
    message = refused(lambda m, y: torch.as_strided(y[1:], (3, 2), (8, 1), 0))
    assert "aten.as_strided looks at memory" in message
    names_this_file(message, "torch.as_strided(y")
    has_next(message, "use")


def test_random_numbers_that_have_no_keyed_form_are_refused() -> None:
    """Unkeyed numbers would differ between ranks and between layouts."""

    def after(m: Any, y: Tensor) -> Tensor:
        return y + torch.poisson(y.detach().abs())

    message = refused(after)
    assert "poisson" in message and "can't be keyed" in message
    names_this_file(message, "torch.poisson")
    has_next(message, "torch.rand")


# --- capture: the loss ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "said", "step"),
    [
        (lambda m, b: m(b), "a tensor of shape (6, 4), not a scalar", ".mean() or .sum()"),
        (lambda m, b: 3.0, "the loss is a float, not a tensor", "laminar.Loss"),
        (lambda m, b: (total(m, b), 1), "returns 1 as a Python number", "job.log("),
        (lambda m, b: ("loss", total(m, b)), "the loss is a str, not a tensor", "laminar.Loss"),
        (lambda m, b: total(m, b).detach(), "does not depend on any trainable parameter", "detach()"),
        (lambda m, b: b.sum(), "does not depend on any trainable parameter", "no_grad()"),
    ],
    ids=["not scalar", "a number", "a number beside", "a text first", "detached", "of the batch alone"],
)
def test_a_loss_that_is_none_is_refused(loss: Any, said: str, step: str) -> None:
    """There is nothing to take a gradient of."""
    message = refused(lambda m, y: y, loss)
    assert said in message
    has_next(message, step)


def test_a_model_that_is_no_module_is_refused() -> None:
    """Parameters come from the module."""
    with pytest.raises(CaptureError, match=r"model is a function, not an nn\.Module"):
        laminar.capture(lambda x: x, total, X)


def test_a_mistake_in_the_model_keeps_its_own_words_and_line() -> None:
    """Most failures are the user's own; they should read like it."""

    def after(m: Any, y: Tensor) -> Tensor:
        return y @ torch.ones(3, 3)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        laminar.capture(Model(after), total, X)
    assert not isinstance(caught.value, laminar.LaminarError)
    (note,) = caught.value.__notes__
    names_this_file(note, "return y @ torch.ones(3, 3)")


class Own(Exception):
    """An error of the user's."""


def _raises(error: Exception) -> Any:
    def after(m: Any, y: Tensor) -> Tensor:
        raise error

    return after


def _indexed(m: Any, y: Tensor) -> Tensor:
    return {"logits": y}["labels"]


def _changed(m: Any, y: Tensor) -> Tensor:
    z = y.exp()
    z.add_(1)
    return z


MISTAKES = {
    "a key": (_indexed, KeyError, "labels"),
    "its own kind": (_raises(Own("no such token")), Own, "no such token"),
    "an attribute": (lambda m, y: y + m.missing, AttributeError, "missing"),
    "an assertion": (_raises(AssertionError("odd")), AssertionError, "odd"),
    "a dtype": (lambda m, y: y.double() @ torch.ones(4, 4), RuntimeError, "dtype"),
    "a dtype of a convolution": (
        lambda m, y: torch.conv1d(y[None], torch.ones(1, 6, 1).double()),
        RuntimeError,
        "type",
    ),
    "changed in place": (_changed, RuntimeError, "modified by an inplace operation"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_the_users_own_errors_arrive_as_themselves(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """With their type, their words and their line, and without a page of torch's log before them."""
    after, expected, words = MISTAKES[kind]
    with pytest.raises(expected, match=words) as caught:
        laminar.capture(Model(after), total, X)
    assert type(caught.value) is expected and "not by Laminar" in caught.value.__notes__[0]
    assert not [r for r in caplog.records if r.levelname in ("ERROR", "WARNING")]
    assert caught.value.__suppress_context__, "what tracing said meanwhile is of no use to anybody"


def test_the_users_own_errors_arrive_from_models_without_values() -> None:
    """A model on meta can't be run, but a line that raises is a line that raises."""
    model = Model(_indexed).to("meta")
    with pytest.raises(KeyError, match="labels"):
        laminar.capture(model, total, X)


def test_what_only_tracing_can_not_do_is_a_capture_error() -> None:
    """The same line runs in plain PyTorch, so it is nobody's mistake but ours."""

    def after(m: Any, y: Tensor) -> Tensor:
        assert type(y) is Tensor
        return y

    message = refused(after)
    assert "could not be traced" in message
    has_next(message, "it runs in plain PyTorch")


@torch.library.custom_op("laminar_tests::narrow_minded", mutates_args=())
def narrow_minded(x: Tensor) -> Tensor:
    """An op whose shape function refuses everything."""
    return x.sin()


@narrow_minded.register_fake
def _(x: Tensor) -> Tensor:
    raise ValueError("expected another stride")


def test_a_shape_function_that_refuses_what_its_kernel_takes_is_named_with_a_way_out() -> None:
    """Torch has such ops. As a part that runs as it is, which needs no shape function, it is captured."""
    message = refused(lambda m, y: narrow_minded(y.detach()))
    assert "shape function" in message and "expected another stride" in message
    has_next(message, "laminar.eager")

    @laminar.eager
    def part(y: Tensor) -> Tensor:
        out: Tensor = narrow_minded(y)
        return out

    graph = laminar.capture(Model(lambda m, y: y + part(y.detach())), total, X)
    assert any(n.op == "laminar.eager" for n in graph.nodes)


def test_a_failed_step_leaves_the_model_as_it_was() -> None:
    """Finding out whose mistake it is runs the step, and a step changes buffers."""

    def after(m: Any, y: Tensor) -> Tensor:
        m.table.add_(1)
        return _indexed(m, y)

    model = Model(after)
    before = model.table.clone()
    with pytest.raises(KeyError):
        laminar.capture(model, total, X)
    assert torch.equal(model.table, before)


# --- batches -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any, Graph]:
    recipe = load_recipe(str(EXAMPLES / "mlp.py:tiny"))
    model, batch = recipe.model(), next(iter(recipe.data()))
    return model, batch, laminar.capture(model, recipe.loss, batch)


def test_a_batch_of_another_kind_is_refused() -> None:
    """Dtype, shape or structure: each is named, with what was captured."""
    model = Model(lambda m, y: y)
    graph = laminar.capture(model, lambda m, b: total(m, b["x"]) * b["w"][0].sum(), {"x": X, "w": [X]})
    with pytest.raises(BatchError, match=r"batch\.x is f64\[6,3\], captured as f32\[6,3\]") as info:
        inputs_of(graph, model, {"x": X.double(), "w": [X]})
    has_next(str(info.value), "capture again")
    with pytest.raises(BatchError, match=r"batch\.w\.0 is f32\[5,3\], captured as f32\[6,3\]"):
        check_batch(graph, {"x": X, "w": [X[:-1]]})
    with pytest.raises(BatchError) as info:
        check_batch(graph, {"y": X, "w": [X]})
    assert "missing     batch.x" in str(info.value) and "unexpected  batch.y" in str(info.value)
    has_next(str(info.value), "capture again")
    with pytest.raises(BatchError, match="another structure"):
        check_batch(graph, {"x": X, "w": (X,)})


def test_a_batch_that_holds_no_plain_data_is_refused() -> None:
    """Batches are tensors and plain values in containers that can be taken apart and put together again."""
    with pytest.raises(BatchError, match=r"batch\.x is a object") as info:
        laminar.capture(Model(lambda m, y: y), total, {"x": object()})
    assert "tensors, numbers, texts and None in nested dicts" in str(info.value)


# --- placements and plans --------------------------------------------------------------------------


def test_a_seed_that_names_nothing_offers_the_closest(tiny: tuple[Any, Any, Graph]) -> None:
    """A typing mistake would otherwise be an unplaced tensor."""
    _, _, graph = tiny
    name = graph.of_kind("param")[0].name
    with pytest.raises(PlanError) as info:
        laminar.plans.seeded(graph, Mesh({"tp": 2}), {name + "s": {"tp": S(0)}})
    assert "matches no parameter" in str(info.value) and name in str(info.value)
    has_next(str(info.value), "laminar capture --report")


def test_a_seed_that_is_no_pattern_is_refused(tiny: tuple[Any, Any, Graph]) -> None:
    """Patterns are regular expressions."""
    with pytest.raises(PlanError, match="is not a pattern"):
        laminar.plans.seeded(tiny[2], Mesh({"tp": 2}), {"(": {"tp": S(0)}})


def test_a_seed_on_an_unknown_axis_lists_the_axes(tiny: tuple[Any, Any, Graph]) -> None:
    """Axes have names so that they can be named in errors."""
    with pytest.raises(MeshError, match="no axis 'dp'") as info:
        laminar.plans.seeded(tiny[2], Mesh({"tp": 2}), {".*weight": {"dp": S(0)}})
    assert "allowed  tp" in str(info.value)


def test_a_placement_that_can_not_hold_names_tensor_and_dims(tiny: tuple[Any, Any, Graph]) -> None:
    """A matrix has no third dim."""
    _, _, graph = tiny
    item = next(i for i in graph.of_kind("param") if len(i.spec.shape) == 2)
    with pytest.raises(PlacementError) as info:
        laminar.plans.seeded(graph, Mesh({"tp": 2}), {item.name: {"tp": S(2)}})
    message = str(info.value)
    assert item.name in message and str(item.spec) in message and "S(2)" in message
    assert "allowed  dims 0 to 1" in message


def test_blocks_that_do_not_divide_are_refused(tiny: tuple[Any, Any, Graph]) -> None:
    """Blocks are whole parts of a dim."""
    _, _, graph = tiny
    item = next(i for i in graph.of_kind("param") if len(i.spec.shape) == 2)
    with pytest.raises(PlacementError, match="blocks that divide") as info:
        laminar.plans.seeded(graph, Mesh({"tp": 2}), {item.name: {"tp": S(0, blocks=7)}})
    has_next(str(info.value), "choose blocks")


def test_a_parameter_can_not_be_stored_as_terms_of_a_sum(tiny: tuple[Any, Any, Graph]) -> None:
    """No rank would know its value."""
    _, _, graph = tiny
    name = graph.of_kind("param")[0].name
    with pytest.raises(PlanError, match="partial value"):
        laminar.plans.seeded(graph, Mesh({"tp": 2}), {name: {"tp": laminar.P("sum")}})


def test_an_illegal_signature_lists_the_legal_ones_and_the_line(tiny: tuple[Any, Any, Graph]) -> None:
    """A plan written by hand is as good as a found one, and checked like one."""
    _, _, graph = tiny
    plan = laminar.plans.data_parallel(graph, Mesh({"tp": 2}))
    node = next(n for n in graph.nodes if n.op == "aten.addmm")
    wrong = Choice(((B,), (S(0),), (S(0),)), ((S(0),),))
    with pytest.raises(NoRuleError) as info:
        laminar.lower(graph, replace(plan, ops={**plan.ops, node.name: wrong}))
    message = str(info.value)
    assert "aten.addmm" in message and "on axis tp=2" in message and f"%{node.name}" in message
    assert node.where and node.where in message
    assert "B,S(0),B->S(0)" in message and "P(sum),S(1),S(0)->P(sum)" in message
    has_next(message, "change one placement", "add_a_rule")


def test_a_plan_for_another_graph_is_refused(tiny: tuple[Any, Any, Graph]) -> None:
    """A plan places tensors by name; another graph has others."""
    graph = tiny[2]
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 2}))
    other = laminar.capture(Model(lambda m, y: y), total, X)
    with pytest.raises(PlanError) as info:
        laminar.lower(other, plan)
    assert graph.hash[:12] in str(info.value) and other.hash[:12] in str(info.value)
    has_next(str(info.value), "plan again")


def test_a_plan_that_forgets_a_tensor_is_refused(tiny: tuple[Any, Any, Graph]) -> None:
    """Hand-written plans are edited by hand."""
    graph = tiny[2]
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 2}))
    name, node = graph.inputs[0].name, graph.nodes[0].name
    with pytest.raises(PlanError, match=f"does not place input {name}"):
        laminar.lower(graph, replace(plan, inputs={k: v for k, v in plan.inputs.items() if k != name}))
    with pytest.raises(PlanError, match=f"does not place op %{node}"):
        laminar.lower(graph, replace(plan, ops={k: v for k, v in plan.ops.items() if k != node}))


@pytest.fixture
def saved(tiny: tuple[Any, Any, Graph], tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    laminar.plans.data_parallel(tiny[2], Mesh({"dp": 2})).save(path)
    return path


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_a_plan_file_that_is_none_says_why(saved: Path, tmp_path: Path) -> None:
    """Files get cut off, overwritten and mixed up."""
    text = saved.read_text()
    saved.write_text(text[: len(text) // 2])
    with pytest.raises(PlanError, match=r"plan\.json is not a plan"):
        Plan.load(saved)
    saved.write_text("model: gpt")
    with pytest.raises(PlanError, match=r"plan\.json is not a plan"):
        Plan.load(saved)
    saved.write_bytes(b"\xff\xfe\x00plan")
    with pytest.raises(PlanError, match=r"plan\.json is not a plan"):
        Plan.load(saved)
    saved.write_text('{"hello": 1}')
    with pytest.raises(PlanError, match="no laminar_plan field"):
        Plan.load(saved)
    saved.write_text("[1, 2]")
    with pytest.raises(PlanError, match="no laminar_plan field"):
        Plan.load(saved)
    with pytest.raises(PlanError, match="no plan file"):
        Plan.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(laminar_plan=99), "plan of version 99"),
        (lambda d: d.pop("mesh"), "corrupt plan"),
        (lambda d: d.update(mesh={"dp": 0}), "corrupt plan"),
        (lambda d: d.update(ops=[]), "corrupt plan"),
        (lambda d: d["inputs"].update({next(iter(d["inputs"])): "X(1)"}), "corrupt plan"),
        (lambda d: d["inputs"].update({next(iter(d["inputs"])): 3}), "corrupt plan"),
    ],
    ids=["newer", "no mesh", "empty mesh", "ops as a list", "no placement", "a number"],
)
def test_a_corrupt_or_newer_plan_is_refused(saved: Path, change: Callable[[Any], Any], said: str) -> None:
    """A plan half understood would place half the tensors."""
    with pytest.raises(PlanError, match=said) as info:
        Plan.load(_edit(saved, change))
    if "version" in said:
        has_next(str(info.value), "upgrade laminar")


def test_a_graph_of_another_version_is_refused(tiny: tuple[Any, Any, Graph]) -> None:
    """Graphs are saved too."""
    data = tiny[2].to_json() | {"laminar_graph": 99}
    with pytest.raises(GraphError, match="graph version 99"):
        Graph.from_json(data)


# --- meshes, recipes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "said"),
    [({"dp": 0}, "size 0"), ({"a b": 2}, "not an axis name"), ({}, "at least one axis"), ({"dp": 1.5}, r"size 1\.5")],
    ids=["empty axis", "name", "no axes", "a fraction"],
)
def test_a_mesh_that_makes_no_sense_is_refused(axes: Any, said: str) -> None:
    """Wrong values are refused at the door."""
    with pytest.raises(MeshError, match=said):
        Mesh(axes)


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    from laminar.runtime.comm.transport import join_process_group

    join_process_group(0, 1, str(tmp_path / "rendezvous"))
    yield
    dist.destroy_process_group()


def test_a_mesh_larger_than_the_world_is_refused(world_of_one: None) -> None:
    """Waiting for ranks that never come is the worst of errors."""
    from laminar.runtime.comm.transport import Groups

    with pytest.raises(MeshError, match=r"Mesh\(dp=2, tp=2\) has 4 ranks, the world has 1") as info:
        Groups(Mesh({"dp": 2, "tp": 2}))
    has_next(str(info.value), "start 4 processes")


def test_groups_without_a_world_are_refused() -> None:
    """A script started plainly, where torchrun was meant."""
    from laminar.runtime.comm.transport import Groups

    with pytest.raises(MeshError, match="no process group") as info:
        Groups(Mesh({"dp": 2}))
    has_next(str(info.value), "torchrun")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("examples/gpt.py", "does not name a recipe"),
        ("examples/none.py:tiny", "no file examples/none.py"),
        (f"{EXAMPLES}/gpt.py:huge", "has no huge"),
    ],
)
def test_a_recipe_that_is_none_is_refused(name: str, said: str) -> None:
    """The first thing a user types is a recipe's name."""
    with pytest.raises(RecipeError) as info:
        load_recipe(name)
    assert said in str(info.value)
    if "huge" in name:
        assert "tiny" in str(info.value) and "small" in str(info.value)
    else:
        has_next(str(info.value), "path/to/file.py:function")


def test_every_error_is_a_laminar_error() -> None:
    """One name to catch."""
    for error in (BatchError, CaptureError, GraphError, MeshError, PlacementError, PlanError, RecipeError):
        assert issubclass(error, LaminarError)
    assert issubclass(NoRuleError, PlacementError)


# --- ops nobody wrote a rule for ---------------------------------------------------------------------


@torch.library.custom_op("laminar_test::soften", mutates_args=())
def soften(x: Tensor, w: Tensor) -> Tensor:
    """Row by row: each row divided by its largest element, then scaled. Splits over rows alone."""
    return x / x.abs().amax(-1, keepdim=True) * w


@soften.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("laminar_test::soften_back", mutates_args=())
def soften_back(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both, the largest element taken as fixed."""
    scale = x.abs().amax(-1, keepdim=True)
    return g * w / scale, (g * x / scale).sum(0)


@soften_back.register_fake
def _(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


soften.register_autograd(
    lambda ctx, g: torch.ops.laminar_test.soften_back(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("laminar_test::ranked", mutates_args=())
def ranked(x: Tensor) -> Tensor:
    """Everything depends on everything: each element times its rank among all."""
    return x * (1 + x.flatten().argsort().argsort().view(x.shape))


@ranked.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("laminar_test::ranked_back", mutates_args=())
def ranked_back(g: Tensor, x: Tensor) -> Tensor:
    return g * (1 + x.flatten().argsort().argsort().view(x.shape))


@ranked_back.register_fake
def _(g: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


ranked.register_autograd(
    lambda ctx, g: torch.ops.laminar_test.ranked_back(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("laminar_test::coupled", mutates_args=())
def coupled(x: Tensor) -> Tensor:
    return x + 1e-6 * x.mean()


@coupled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Custom(nn.Module):
    def __init__(self, op: Callable[..., Tensor], *weights: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 4)) if weights else None
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = self.op(y) if self.w is None else self.op(y, self.w)
        return self.b(y)


def found(graph: Graph, op: str) -> list[str]:
    (node,) = [n for n in graph.nodes if n.op == op]
    return [f"{','.join(ins)}->{','.join(outs)}" for ins, outs in dict(graph.probed)[node.name]]


def test_probing_finds_how_a_custom_op_splits() -> None:
    """A user's own op is no reason to give up splitting the batch."""
    graph = laminar.capture(Custom(soften, "w"), total, X)
    assert found(graph, "laminar_test.soften") == ["S(0),B->S(0)"]
    assert found(graph, "laminar_test.soften_back") == ["S(0),S(0),B->S(0),P(sum)"]
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))).hash == graph.hash
    assert probe(graph) == graph, "what was found stays found"


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_through_a_probed_op_compute_the_same(seed: int) -> None:
    """What probing found is used like a rule, on several axes too."""
    from laminar.placement.random_plan import random_plan
    from laminar.runtime.check.verify import verify_program

    model = Custom(soften, "w")
    graph = laminar.capture(model, total, torch.cat([X, X + 1]))
    plan = random_plan(graph, Mesh({"a": 2, "b": 3 if seed % 2 else 2}), seed)
    report = verify_program(graph, plan, [inputs_of(graph, model, torch.cat([X, X + 1]))])
    assert report.ok, report


def test_data_parallel_splits_a_probed_op() -> None:
    """Found signatures take part in completion."""
    graph = laminar.capture(Custom(soften, "w"), total, X)
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 2}))
    (node,) = [n for n in graph.nodes if n.op == "laminar_test.soften"]
    assert plan.ops[node.name].outs == ((S(0),),)
    assert not plan.account["unsplit"]


def test_an_op_that_does_not_split_is_computed_whole_and_reported() -> None:
    """Right before fast; and the plan says what it costs."""
    from laminar.runtime.check.verify import verify_program

    model = Custom(ranked)
    graph = laminar.capture(model, total, X)
    assert found(graph, "laminar_test.ranked") == []
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 2}))
    (node,) = [n for n in graph.nodes if n.op == "laminar_test.ranked"]
    assert plan.ops[node.name] == Choice(((B,),), ((B,),))
    text = plan.explain()
    assert "computed whole on every rank" in text and "laminar_test.ranked" in text
    assert f"{HERE}:" in text and "self.op(y)" in text
    assert verify_program(graph, plan, [inputs_of(graph, model, X)]).ok


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_probing_sees_a_weak_coupling(dtype: str) -> None:
    """A millionth of the mean in every element: nearly elementwise is not elementwise."""
    spec = laminar.TensorSpec((4, 6), dtype)
    coupled = Node("n", "laminar_test.coupled", (Ref("x"),), (spec,))
    assert signatures_of(coupled, [spec]) == []
    plain = Node("n", "laminar_test.ranked_back", (Ref("g"), Ref("x")), (spec,))
    assert [outs for _, outs in signatures_of(plain, [spec, spec])] == []


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (1 << 12, 1 << 11)], ids=["odd", "single", "large"])
def test_what_can_not_be_probed_is_computed_whole(shape: tuple[int, int]) -> None:
    """No dim to halve, or too large to try: nothing is claimed."""
    spec = laminar.TensorSpec(shape, "f32")
    node = Node("n", "laminar_test.soften", (Ref("x"), Ref("w")), (spec,))
    assert signatures_of(node, [spec, laminar.TensorSpec(shape[1:], "f32")]) == []

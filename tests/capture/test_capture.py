"""Capture is right: the graph of a step computes what the model computes. Here: names, batches, changes in place.

Everything later stands on this. Layers and losses are in test_capture_layers.py, autocast and recomputation in
test_capture_regions.py, what graphs are besides their numbers in test_capture_graphs.py. Covered: the CPU kernels of
one torch version at a time. Not covered: speed, and whether placements of these graphs are right, which is what
verification is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laminar.api import load_recipe
from laminar.capture.capture import capture, check_batch
from laminar.errors import BatchError
from laminar.ir.graph import Graph
from tests.support.capture_check import EXAMPLES, Fn, Make, draw, ids, made, same, square

# --- names -----------------------------------------------------------------------------------


def test_inputs_keep_the_names_of_the_model_and_the_batch() -> None:
    """A plan places tensors by name, so a graph must not invent its own."""

    def forward(m: Any, b: Any) -> Tensor:
        return m.norm(m.inner(b["x"]) + b["more"][0]) * m.scale

    graph = same(
        lambda: Fn(forward, inner=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), scale=nn.Parameter(torch.ones(4))),
        square,
        {"x": draw(5, 3), "more": [draw(5, 4)]},
    )
    assert [i.name for i in graph.inputs] == [
        "scale",
        "inner.weight",
        "inner.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "batch.x",
        "batch.more.0",
    ]
    assert {o.name for o in graph.outputs if o.kind == "grad"} == {
        "scale",
        "inner.weight",
        "inner.bias",
        "norm.weight",
        "norm.bias",
    }


def test_tied_weights_are_one_input_with_one_summed_gradient() -> None:
    """Two inputs would be placed, and trained, apart."""

    def make() -> nn.Module:
        model = Fn(lambda m, b: m.head(m.embed(b)), embed=nn.Embedding(7, 4), head=nn.Linear(4, 7, bias=False))
        model.head.weight = model.embed.weight
        return model

    graph = same(make, square, ids(7, 3, 5))
    assert [(i.name, i.aliases) for i in graph.of_kind("param")] == [("embed.weight", ("head.weight",))]
    assert [o.name for o in graph.outputs if o.kind == "grad"] == ["embed.weight"]


def test_a_module_used_under_two_names_is_one() -> None:
    """Shared layers are tied weights in another dress."""

    def make() -> nn.Module:
        one = nn.Linear(4, 4)
        return Fn(lambda m, b: m.b(torch.tanh(m.a(b))), a=one, b=one)

    graph = same(make, square, draw(3, 4))
    assert [i.name for i in graph.of_kind("param")] == ["a.weight", "a.bias"]
    assert [i.aliases for i in graph.of_kind("param")] == [("b.weight",), ("b.bias",)]


def test_frozen_and_unused_parameters_get_no_gradient_output() -> None:
    """A gradient of zeros is not the same as none: weight decay would move an unused parameter."""

    def make() -> nn.Module:
        model = Fn(lambda m, b: m.b(m.a(b)), a=nn.Linear(3, 4), b=nn.Linear(4, 2), unused=nn.Linear(2, 2))
        model.a.weight.requires_grad_(False)
        return model

    graph = same(make, square, draw(5, 3))
    assert not graph.input("a.weight").trainable and graph.input("unused.weight").trainable
    assert {o.name for o in graph.outputs if o.kind == "grad"} == {"a.bias", "b.weight", "b.bias"}


# --- batches ---------------------------------------------------------------------------------


def test_nested_batches_with_plain_leaves_are_followed() -> None:
    """Real batches are dicts of lists of tuples with a flag or two in between."""

    def forward(m: Any, b: Any) -> Tensor:
        (x, y), scale = b["pairs"][0], b["scale"]
        out = m.a(x) * scale + y
        return out if b["flag"] else -out

    batch = {"pairs": [(draw(4, 3), draw(4, 2, seed=2)), None], "scale": 0.5, "flag": True, "tag": "train"}
    graph = same(lambda: Fn(forward, a=nn.Linear(3, 2)), square, batch)
    assert [i.name for i in graph.of_kind("batch")] == ["batch.pairs.0.0", "batch.pairs.0.1"]


def test_a_plain_leaf_is_part_of_the_structure() -> None:
    """A Python number was burnt into the graph, so another number needs another graph."""
    model = made(lambda: Fn(lambda m, b: m.a(b["x"]) * b["scale"], a=nn.Linear(3, 2)))
    graph = capture(model, square, {"x": draw(4, 3), "scale": 0.5})
    with pytest.raises(BatchError, match="structure"):
        check_batch(graph, {"x": draw(4, 3), "scale": 0.25})


# --- mutation --------------------------------------------------------------------------------


def _ema(m: Any, x: Tensor) -> Tensor:
    m.ema = 0.9 * m.ema + 0.1 * x.mean(0).detach()
    return m.a(x) - m.ema.sum()


def _row(m: Any, x: Tensor) -> Tensor:
    m.buf[0] += 1
    return m.a(x) + m.buf.sum()


def _stretch(m: Any, x: Tensor) -> Tensor:
    m.buf[:, 1:3].copy_(x[:4, :2].detach())
    return m.a(x) + m.buf.sum()


def _deep_view(m: Any, x: Tensor) -> Tensor:
    m.buf.t()[1].mul_(2.0)
    m.buf.view(2, 2, 3).permute(2, 0, 1)[0, 1] = 5.0
    m.buf.unsqueeze(0).squeeze(0).diagonal().fill_(1.0)
    return m.a(x) * m.buf.mean()


def _split_view(m: Any, x: Tensor) -> Tensor:
    left, right = m.buf.split([1, 2], dim=1)
    left.zero_()
    right.add_(1)
    for row in m.buf.unbind(0):
        row.mul_(1.5)
    first, second = m.buf.chunk(2)
    first.copy_(second)
    m.buf.narrow(0, 1, 2).sub_(0.25)
    return m.a(x) * m.buf.sum()


def _both_sides(m: Any, x: Tensor) -> Tensor:
    before = m.buf.sum()
    view = m.buf[1]
    m.buf.add_(1)
    return m.a(x) * view.sum() + before


def _counter(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return m.a(x) / m.count


def _data(m: Any, x: Tensor) -> Tensor:
    m.buf.data.mul_(0.5)
    m.buf.detach().add_(1)
    return m.a(x) + m.buf.sum()


def _assign_data(m: Any, x: Tensor) -> Tensor:
    m.buf.data = m.buf.data * 0.5 + 1
    return m.a(x) + m.buf.sum()


def _swap(m: Any, x: Tensor) -> Tensor:
    m.buf, m.other = m.other, m.buf
    return m.a(x) + m.buf.sum()


def _queue(m: Any, x: Tensor) -> Tensor:
    m.buf = torch.cat([m.buf[1:], x.detach().mean(0, keepdim=True)])
    return m.a(x) + m.buf.sum()


def _each(m: Any, x: Tensor) -> Tensor:
    torch._foreach_mul_([m.buf, m.other[1]], [torch.tensor(2.0), x[0].detach()])
    return m.a(x) + m.buf.sum() * m.other.sum()


@pytest.mark.parametrize(
    "forward",
    [_ema, _row, _stretch, _deep_view, _split_view, _both_sides, _counter, _data, _assign_data, _swap, _queue, _each],
    ids=lambda f: f.__name__.strip("_"),
)
def test_buffers_changed_in_any_way_come_out_as_outputs(forward: Callable[[Any, Tensor], Tensor]) -> None:
    """A forgotten write would train on yesterday's statistics without a word."""

    def make() -> nn.Module:
        more = {"ema": torch.ones(3), "buf": draw(4, 3, seed=5), "other": draw(4, 3, seed=6), "count": torch.tensor(2)}
        return Fn(forward, a=nn.Linear(3, 2), **more)

    graph = same(make, square, draw(6, 3))
    assert any(o.kind == "buffer" for o in graph.outputs)
    assert all("copy_" not in n.op and not n.op.endswith("_") for n in graph.nodes)


def test_buffers_only_read_are_no_outputs() -> None:
    """What does not change need not be moved."""
    graph = same(lambda: Fn(lambda m, x: m.a(x) * m.buf, a=nn.Linear(3, 2), buf=draw(2)), square, draw(4, 3))
    assert not [o for o in graph.outputs if o.kind == "buffer"]


def test_batch_norm_statistics_and_counter_are_outputs() -> None:
    """Statistics are state: a plan that loses them evaluates another model."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    graph = same(make, square, draw(3, 2, 6, 6), tol=1e-5)
    assert {o.name for o in graph.outputs if o.kind == "buffer"} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval(),
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False)),
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False)),
    ],
    ids=["eval", "without affine", "without statistics"],
)
def test_batch_norm_in_its_other_forms(make: Make) -> None:
    """Each form takes another path through torch."""
    same(make, square, draw(5, 4), tol=2e-5)


def _relu_(m: Any, x: Tensor) -> Tensor:
    return F.relu_(m.a(x)).clone().add_(1.0).mul_(0.5)


def _masked_fill(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.masked_fill_(x[:, :1] > 0, -1.0)
    return y * y


def _index_put(m: Any, x: Tensor) -> Tensor:
    y = m.a(x) * 2
    y[torch.tensor([0, 2, 2])] = x[:3, :1] * 3
    y[torch.tensor([1, 3]), torch.tensor([0, 1])] += 1.0
    return y.sin()


def _bool_put(m: Any, x: Tensor) -> Tensor:
    y = m.a(x) * 2
    y[y > 0.5] = 0.25
    return y * y


def _column(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).sin()
    y[:, 0] = x[:, 1]
    y[1:3] = 0
    y[..., -1].mul_(2)
    return y * y


def _zero(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    z = y.clone()
    z.zero_()
    z[:2].copy_(y[2:4])
    z += 1
    return z * y.cos()


def _scatter(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    z = torch.zeros_like(y)
    where = torch.tensor([[0, 1], [1, 0], [2, 2], [0, 1], [1, 1], [3, 0]])
    z.scatter_(1, where % 2, y)
    z.scatter_add_(0, where, y)
    z.index_add_(0, torch.tensor([0, 1]), y[:2])
    z.index_copy_(0, torch.tensor([5]), y[:1])
    return z * y


def _many(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).clone()
    y.clamp_(-1, 1).neg_().abs_().add_(1.5)
    y = y.exp() + 0
    y.unsqueeze_(0).transpose_(1, 2).squeeze_(0).t_()
    y.remainder_(7.0)
    y.sub_(0.1, alpha=2).div_(3).addcmul_(x[:, :2], x[:, 1:]).lerp_(x[:, :2], 0.25)
    y.copy_(y.t().contiguous().t())
    mask = (x > 0).clone()
    mask.logical_not_().logical_and_(x < 1)
    z = x.detach().clone()
    z.gt_(0.5)
    return (y * mask[:, :2] * z[:, :2]).sin_()


def _accumulate(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(6, 2)
    for i in range(3):
        out[i] += m.a(x[i])
        out.select(1, 0)[i] *= 2
    out = out.index_fill(0, torch.tensor([5]), 1.0)
    return out


def _types(m: Any, x: Tensor) -> Tensor:
    half = torch.zeros(6, 2, dtype=torch.bfloat16)
    half.copy_(m.a(x))
    half += x[:, :2]
    count = torch.zeros(6, dtype=torch.int64)
    count += x[:, 0] > 0
    count.add_(1)
    return half.float() * count.unsqueeze(1)


def _out(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    room = torch.empty(3, 6)
    torch.mul(x.t(), 2.0, out=room)
    grown = torch.empty(0)
    torch.add(x, 1.0, out=grown)
    best, where = torch.empty(6), torch.empty(6, dtype=torch.int64)
    torch.max(x, 1, out=(best, where))
    return y * room.t()[:, :2] + grown[:, :2] + (best * where).unsqueeze(1)


def _lists(m: Any, x: Tensor) -> Tensor:
    """Several tensors written by one op."""
    some = [m.a(x), m.a(x + 1) * x[:, :2]]
    torch._foreach_mul_(some, [torch.tensor(2.0), torch.tensor(3.0)])
    torch._foreach_add_(some, [x[:, :2].cos(), x[:, 1:]], alpha=0.5)
    torch._foreach_sigmoid_(some)
    rooms = [torch.empty(6, 1), torch.empty(6, 2)]
    torch.split_with_sizes_copy(x, [1, 2], 1, out=rooms)
    return some[0] * rooms[1] + some[1] * rooms[0]


def _inputs_view(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    v = z.view(3, 2, 3)[:, 0]
    v.add_(1)
    w = z.unfold(0, 2, 2)
    return m.a(z) + w.sum() + v.sum()


@pytest.mark.parametrize(
    "forward",
    [
        _relu_,
        _masked_fill,
        _index_put,
        _bool_put,
        _column,
        _zero,
        _scatter,
        _many,
        _accumulate,
        _types,
        _out,
        _inputs_view,
        _lists,
    ],
    ids=lambda f: f.__name__.strip("_"),
)
def test_in_place_ops_become_functional(forward: Callable[[Any, Tensor], Tensor]) -> None:
    """A rank's program owns no memory by name, so nothing in a graph may write."""
    graph = same(lambda: Fn(forward, a=nn.Linear(3, 2)), square, draw(6, 3))
    assert not [n.op for n in graph.nodes if n.op.split(".")[1].endswith("_")]


# --- plain attributes, closures, constants -----------------------------------------------------


def test_plain_tensor_attributes_are_inputs() -> None:
    """A tensor kept as an attribute is state of the model, whatever it was registered as."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)
            self.scale = torch.tensor([2.0, 3.0])
            self.seen = torch.zeros(3)

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + x.mean(0)
            return self.a(x) * self.scale

    graph = same(Keeps, square, draw(4, 3))
    assert [i.name for i in graph.of_kind("buffer")] == ["scale", "seen"]
    assert [o.name for o in graph.outputs if o.kind == "buffer"] == ["seen"]


def test_an_attribute_written_before_it_is_read_is_no_state() -> None:
    """Many models leave the last attention map or gate lying about; nothing must be carried along."""

    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.a(x)
            return self.last * 2

    model = made(Leaves)
    capture(model, square, draw(4, 3))
    assert model.last is None
    same(Leaves, square, draw(4, 3))
    model(draw(7, 3))
    graph = capture(model, square, draw(4, 3))
    assert model.last.shape == (7, 2), "capture puts back what lay there"
    assert not graph.of_kind("buffer"), "and takes it for no state of the step"


def test_a_table_made_on_first_use_is_no_state() -> None:
    """Rotary tables and masks are often cached so; made of nothing but numbers, they are folded."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if getattr(m, "cache", None) is None:
            m.cache = torch.arange(2).float() + 1
        return m.a(x) * m.cache

    graph = same(lambda: Fn(forward, a=nn.Linear(3, 2)), square, draw(4, 3))
    assert not graph.of_kind("buffer") and len(graph.constants) >= 1


@pytest.mark.parametrize(
    ("indices", "view"),
    [
        (lambda: (torch.arange(4)[:, None], torch.arange(3)), True),
        (lambda: (torch.arange(4)[:, None, None, None], torch.arange(3)[None, None, None, :]), True),
        (lambda: (torch.arange(3), torch.arange(3)), False),
        (lambda: (torch.arange(4), torch.arange(3)[:, None]), False),
        (lambda: (torch.arange(4).flip(0)[:, None], torch.arange(3)), False),
        (lambda: (torch.arange(2)[:, None], torch.arange(3)), False),
        (lambda: (torch.arange(4),), False),
        (lambda: (slice(None), torch.arange(3)), False),
    ],
)
def test_indexing_by_counting_is_a_view(indices: Any, view: bool) -> None:
    """Masks are looked up so, sample by sample; as an index every sample would seem to need all rows."""
    graph = same(lambda: Fn(lambda m, x: m.a(x)[indices()], a=nn.Linear(3, 3)), square, draw(4, 3))
    forward = [n.op for n in graph.nodes if n.phase == "forward"]
    assert ("aten.index.Tensor" not in forward) == view


@pytest.mark.parametrize("way", [lambda y: y.t(), lambda y: y.t().relu(), lambda y: y[:, ::2].t()])
def test_indexing_by_counting_is_a_view_however_a_tensor_lies(way: Any) -> None:
    """It only adds dims of size 1, which no strides forbid."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = way(m.a(x))
        return y[torch.arange(y.shape[0])[:, None, None], torch.arange(4)]

    graph = same(lambda: Fn(forward, a=nn.Linear(3, 3)), square, draw(4, 3))
    assert "aten.index.Tensor" not in [n.op for n in graph.nodes if n.phase == "forward"]


def test_tensors_in_lists_and_dicts_are_inputs_by_name() -> None:
    """Tables per level, caches per key: read or changed, they are the model's."""

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))])
            self.named = nn.ParameterDict({"w": nn.Parameter(torch.ones(3))})
            self.tables = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])]
            self.seen = {"mean": torch.zeros(3), "names": ["a"]}
            self.all = [*self.parts, self.named["w"]]

        def forward(self, x: Tensor) -> Tensor:
            self.seen["mean"] = self.seen["mean"] * 0.9 + x.mean(0)
            return x * self.parts[0] * self.tables[0] + self.parts[1] * self.tables[1] + self.all[2]

    graph = same(Lists, square, draw(4, 3))
    assert [i.name for i in graph.inputs if i.kind in ("param", "buffer")] == [
        "tables.0",
        "tables.1",
        "seen.mean",
        "parts.0",
        "parts.1",
        "named.w",
    ]
    assert [o.name for o in graph.outputs if o.kind == "buffer"] == ["seen.mean"]
    assert not any(i.aliases for i in graph.inputs)


def test_tensors_from_closures_and_numpy_are_constants() -> None:
    """A graph carries what it needs, or it could not be run elsewhere."""
    weight, table = draw(2, seed=4), np.linspace(0.0, 1.0, 6, dtype=np.float32).reshape(3, 2)

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.a(x) * weight + x @ torch.from_numpy(table) + torch.tensor([1.0, 2.0])

    graph = same(lambda: Fn(forward, a=nn.Linear(3, 2)), square, draw(4, 3))
    assert graph.constants
    again = Graph.from_json(json.loads(json.dumps(graph.to_json())))
    assert again.hash == graph.hash


def test_what_depends_on_no_input_is_folded() -> None:
    """Position tables and masks built in forward cost nothing at run time."""

    def forward(m: Any, x: Tensor) -> Tensor:
        place = torch.arange(6).float().unsqueeze(1) / torch.tensor([10.0, 20.0])
        return m.a(x) + place.sin() + torch.zeros(2)

    graph = same(lambda: Fn(forward, a=nn.Linear(3, 2)), square, draw(6, 3))
    assert not {"aten.sin", "aten.arange", "aten.div.Tensor"} & {n.op for n in graph.nodes if n.phase == "forward"}
    assert [str(c.spec) for c in graph.constants if c.spec.shape == (6, 2)]


def test_a_causal_mask_of_a_hugging_face_model_is_recognised() -> None:
    """As a mask it would have to be moved and split; as `causal` it costs nothing."""
    pytest.importorskip("transformers")
    recipe = load_recipe(str(EXAMPLES / "hf.py:gpt2"))
    model = recipe.model()
    graph = capture(model, recipe.loss, next(iter(recipe.data())))
    found = [n for n in graph.nodes if n.op == "laminar.attention"]
    assert len(found) == 2 and all(n.args[3] is None and n.args[4] for n in found)

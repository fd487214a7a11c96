"""Capture is right: the graph of a step computes what the model computes.

Everything later stands on this. A model is captured once, its graph is run node by node on one
device, and loss, gradients and new buffer values are held against plain eager PyTorch. Models that
draw random numbers are run eagerly under `Canonical`, which draws the keyed numbers a graph draws.
Covered: the CPU kernels of one torch version at a time. Not covered: speed, and whether placements
of these graphs are right, which is what verification is for.
"""

from __future__ import annotations

import copy
import json
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laminar
from laminar.api import load_recipe
from laminar.capture.cache import Captures
from laminar.capture.canonical import Canonical
from laminar.capture.capture import capture, check_batch, state_of
from laminar.capture.slots import slots_of
from laminar.errors import BatchError
from laminar.ir.graph import RNG, Graph
from laminar.runtime.reference import run_graph

EXAMPLES = Path(__file__).parent.parent / "examples"
KEY = (7, 3)
Make = Callable[[], nn.Module]
Step = Callable[[nn.Module, Any], Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are tiny, and threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(make: Make) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older way to write weight norm is meant
        return make()


def eager(make: Make, loss: Step, batch: Any, key: tuple[int, int] | None) -> dict[str, Tensor]:
    """Loss, gradients and buffers after one step in plain PyTorch, drawing by key if one is given."""
    model = made(make)
    slots = slots_of(model)
    with Canonical(torch.tensor(key)) if key else torch.enable_grad():
        result = loss(model, batch)
    value = result.total / result.weight if isinstance(result, laminar.Loss) else result
    trained = [s for s in slots if s.kind == "param" and s.tensor.requires_grad]
    grads = torch.autograd.grad(value, [s.tensor for s in trained], allow_unused=True)
    out = {"loss:loss": value.detach()}
    out |= {f"grad:{s.name}": g for s, g in zip(trained, grads, strict=True) if g is not None}
    for slot in slots:
        holder, place = slot.places[0]
        if slot.kind == "buffer":
            out[f"buffer:{slot.name}"] = holder[place].detach()
    return out


def graph_outputs(graph: Graph, model: nn.Module, batch: Any, key: tuple[int, int] = KEY) -> dict[str, Tensor]:
    given = {**state_of(model), **check_batch(graph, batch), RNG: torch.tensor(key)}
    return run_graph(graph, {i.name: given[i.name].detach().clone() for i in graph.inputs})


def close(got: Tensor, want: Tensor, what: str, tol: float, floor: float = 1e-2) -> None:
    """Equal within `tol` of the largest element; some gradients are zero but for rounding, hence the floor."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} for {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype} for {want.dtype}"
    if not want.is_floating_point():
        assert torch.equal(got, want), what
        return
    scale = max(float(want.abs().max()), floor) if want.numel() else 1.0
    worst = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
    assert worst <= tol * scale, f"{what} is off by {worst:.2e} of {scale:.2e}"


def same(make: Make, loss: Step, batch: Any, tol: float = 2e-6) -> Graph:
    """The graph, after its numbers were held against eager PyTorch."""
    model = made(make)
    kept = {s.name: s.tensor.detach().clone() for s in slots_of(model)}
    graph = capture(model, loss, batch)
    for slot in slots_of(model):
        assert torch.equal(kept[slot.name], slot.tensor), f"capture changed {slot.name}"
    got = graph_outputs(graph, model, batch)
    want = eager(make, loss, batch, KEY if graph.of_kind("rng") else None)
    assert {k for k in want if not k.startswith("buffer:")} == {
        k for k in got if not k.startswith(("buffer:", "metric:"))
    }
    left = {f"buffer:{s.name}" for s in slots_of(model) if s.plain} - {f"buffer:{i.name}" for i in graph.inputs}
    for name, value in want.items():
        if name in left:
            continue  # a plain attribute that no step reads
        if name.startswith("buffer:") and name not in got:
            assert torch.equal(value, kept[name.removeprefix("buffer:")]), f"the graph forgets to change {name}"
        else:
            close(got[name], value, name, tol)
    for name in got:
        assert name.startswith("metric:") or name in want, name
    return graph


class Fn(nn.Module):
    """A module whose forward is a function of itself and the batch, with whatever it is given as attributes."""

    def __init__(self, forward: Callable[[Any, Any], Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, batch: Any) -> Any:
        return self.run(self, batch)


def square(model: nn.Module, batch: Any) -> Tensor:
    """A loss in which every element of the output counts differently."""
    out = model(batch)
    weight = torch.linspace(0.5, 1.5, out.numel()).view(out.shape)
    return (out.float() * weight).pow(2).mean() + out.float().mean()


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(high: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def ops(graph: Graph, op: str, phase: str | None = None) -> int:
    return sum(n.op == op and phase in (None, n.phase) for n in graph.nodes)


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
        "scale", "inner.weight", "inner.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
        "norm.num_batches_tracked", "batch.x", "batch.more.0",
    ]  # fmt: skip
    assert {o.name for o in graph.outputs if o.kind == "grad"} == {
        "scale", "inner.weight", "inner.bias", "norm.weight", "norm.bias",
    }  # fmt: skip


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


@pytest.mark.parametrize(
    "forward",
    [_ema, _row, _stretch, _deep_view, _split_view, _both_sides, _counter, _data, _assign_data, _swap, _queue],
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
        "1.running_mean", "1.running_var", "1.num_batches_tracked",
    }  # fmt: skip


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


def _inputs_view(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    v = z.view(3, 2, 3)[:, 0]
    v.add_(1)
    w = z.unfold(0, 2, 2)
    return m.a(z) + w.sum() + v.sum()


@pytest.mark.parametrize(
    "forward",
    [
        _relu_, _masked_fill, _index_put, _bool_put, _column, _zero, _scatter, _many, _accumulate, _types, _out,
        _inputs_view,
    ],
    ids=lambda f: f.__name__.strip("_"),
)  # fmt: skip
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
        "tables.0", "tables.1", "seen.mean", "parts.0", "parts.1", "named.w",
    ]  # fmt: skip
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


# --- precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_captured_as_a_policy(device: str) -> None:
    """`autocast("cuda")` in a training script says which ops are bf16, not where they run."""

    def loss(place: str) -> Step:
        def run(model: nn.Module, batch: Any) -> Tensor:
            with torch.autocast(place, dtype=torch.bfloat16):
                return square(model, batch)

        return run

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))

    model, batch = made(make), draw(5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = capture(model, loss(device), batch)
    assert {str(n.outs[0]) for n in graph.nodes if n.op == "aten.addmm"} == {"bf16[5,8]", "bf16[5,4]"}
    (norm,) = [n for n in graph.nodes if n.op == "aten.native_layer_norm"]
    assert str(norm.outs[0]) == ("f32[5,8]" if device == "cuda" else "bf16[5,8]"), "GPUs keep norms in float32"
    got, want = graph_outputs(graph, model, batch), eager(make, loss("cpu"), batch, None)
    for name, value in want.items():
        close(got[name], value, name, 1e-5 if device == "cpu" else 2e-2)


@pytest.mark.parametrize("name", ["attention", "lstm", "batch norm", "conv", "cross entropy"])
def test_autocast_around_canonical_ops_casts_as_torch_does(name: str) -> None:
    """Canonical ops are caught before autocast sees them, so they must do its work themselves."""

    def attend(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.a(x).view(2, 3, 2, 12).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)

    models: dict[str, tuple[Make, Any]] = {
        "attention": (lambda: Fn(attend, a=nn.Linear(4, 24)), draw(2, 3, 4)),
        "lstm": (lambda: Fn(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 3)), draw(5, 2, 4)),
        "batch norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), draw(5, 4)),
        "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()), draw(2, 2, 5, 5)),
        "cross entropy": (
            lambda: Fn(lambda m, x: F.cross_entropy(m.a(x), torch.tensor([0, 2, 1])), a=nn.Linear(4, 3)), draw(3, 4),
        ),
    }  # fmt: skip
    make, batch = models[name]

    def loss(model: nn.Module, x: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        return (out.float() * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum()

    same(make, loss, batch, tol=2e-2)


# --- recomputation -----------------------------------------------------------------------------


def _region(reentrant: bool, dropout: float = 0.0) -> Make:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def part(self, x: Tensor) -> Tensor:
            return torch.tanh(self.b(F.dropout(torch.tanh(self.a(x)), dropout)))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.c.bias
            x = checkpoint(self.part, x, use_reentrant=reentrant) if self.training else self.part(x)  # type: ignore[assignment]
            return F.dropout(self.c(x), dropout)

    return Region


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_are_recomputed_in_the_graph(reentrant: bool) -> None:
    """The user traded time for memory; sharing the recomputed values would take the memory back."""
    model, batch = made(_region(reentrant)), draw(5, 4)
    graph = capture(model, square, batch)
    got, want = graph_outputs(graph, model, batch), eager(lambda: made(_region(reentrant)).eval(), square, batch, None)
    for name, value in want.items():
        close(got[name], value, name, 2e-6)
    assert ops(graph, "aten.addmm", "forward") == 3
    assert ops(graph, "aten.addmm", "recompute") == 2
    assert ops(graph, "aten.tanh", "recompute") == 2
    made_in = {n.name: n.phase for n in graph.nodes}
    inside = {n.name for n in graph.nodes if n.op == "aten.tanh" and n.phase == "forward"}
    for node in graph.nodes:
        if node.op == "aten.tanh_backward":
            assert not {r.name for r in node.ins} & inside, "backward reads what recomputation should give"
            assert "recompute" in {made_in.get(r.name) for r in node.ins}


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_in_a_checkpointed_region_draws_the_same_numbers_twice(reentrant: bool) -> None:
    """Two draws would make the gradient that of another function."""
    batch, model = draw(50, 4), made(_region(reentrant, 0.5))
    graph = capture(model, square, batch)
    sites = {
        p: {n.args[2] for n in graph.nodes if n.op == "laminar.uniform" and n.phase == p}
        for p in ("forward", "recompute")
    }
    assert sites["recompute"] == {1} and sites["forward"] == {1, 2}

    def plain() -> nn.Module:
        return made(_region(reentrant, 0.5)).eval()

    got, want = graph_outputs(graph, model, batch), eager(plain, square, batch, KEY)
    for name, value in want.items():
        close(got[name], value, name, 2e-6)


def test_nested_checkpoints_and_several_arguments_are_followed() -> None:
    """Regions lie in each other where a library checkpoints layers and the user checkpoints blocks."""

    def forward(m: Any, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return F.dropout(torch.sin(m.b(y)), 0.3)

        def outer(y: Tensor, scale: float, mask: Tensor) -> Tensor:
            return checkpoint(inner, F.dropout(torch.sin(m.a(y)) * scale * mask, 0.3), use_reentrant=False)  # type: ignore[return-value]

        return checkpoint(outer, x, 2.0, mask=x[:, :1] > 0, use_reentrant=False)  # type: ignore[return-value]

    def plain(m: Any, x: Tensor) -> Tensor:
        y = F.dropout(torch.sin(m.a(x)) * 2.0 * (x[:, :1] > 0), 0.3)
        return F.dropout(torch.sin(m.b(y)), 0.3)

    model, batch = made(lambda: Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))), draw(50, 4)
    graph = capture(model, square, batch)
    assert ops(graph, "aten.sin", "recompute") >= 1
    got = graph_outputs(graph, model, batch)
    want = eager(lambda: Fn(plain, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), square, batch, KEY)
    for name, value in want.items():
        close(got[name], value, name, 2e-6)


def test_batch_norm_in_a_checkpointed_region_counts_as_in_eager_pytorch() -> None:
    """Torch updates the statistics once more when it runs the region again, and so does the graph."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(checkpoint(lambda y: torch.tanh(m.n(m.a(y))), x, use_reentrant=False))

    same(lambda: Fn(forward, a=nn.Linear(3, 4), n=nn.BatchNorm1d(4), b=nn.Linear(4, 2)), square, draw(6, 3), tol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_recomputation_runs_under_the_same_autocast(device: str) -> None:
    """Another precision the second time would be another function, and torch would refuse it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return checkpoint(lambda y: torch.softmax(m.a(y), -1), x, use_reentrant=False)  # type: ignore[return-value]

    graph = capture(made(lambda: Fn(forward, a=nn.Linear(3, 4))), square, draw(6, 3))
    found = {(n.phase, str(n.outs[0])) for n in graph.nodes if n.op == "aten._softmax"}
    wide = "f32[6,4]" if device == "cuda" else "bf16[6,4]"
    assert found == {("forward", wide), ("recompute", wide)}


def test_selective_checkpointing_keeps_what_the_policy_says() -> None:
    """The products are saved, the cheap rest is computed again."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(m: Any, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return m.b(torch.tanh(m.a(y)).sin()).sin()

        def contexts() -> Any:
            return create_selective_checkpoint_contexts(policy)

        return checkpoint(region, x, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]

    graph = same(lambda: Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), square, draw(5, 4))
    assert ops(graph, "aten.addmm", "recompute") == 0 and ops(graph, "aten.tanh", "recompute") == 1


def test_gradient_checkpointing_of_hugging_face_models_is_kept() -> None:
    """One flag of theirs, and the same graph as if the regions had been written by hand."""
    pytest.importorskip("transformers")
    recipe = load_recipe(str(EXAMPLES / "hf.py:gpt2"))
    batch = next(iter(recipe.data()))
    model = recipe.model()
    plain = capture(model, recipe.loss, batch)
    model.gradient_checkpointing_enable()
    graph = capture(model, recipe.loss, batch)
    assert ops(plain, "aten.addmm", "recompute") == 0 and ops(graph, "aten.addmm", "recompute") >= 4
    want = graph_outputs(plain, model, batch)
    for name, value in graph_outputs(graph, model, batch).items():
        close(value, want[name], name, 1e-5)


# --- functions, norms, layers --------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """Rounding whose gradient passes through, scaled: no autograd of torch's own would find it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1) * 0.5, None


def test_a_custom_autograd_function_keeps_its_own_backward() -> None:
    """Straight-through estimators and gradient reversal exist only in their backward."""
    same(
        lambda: Fn(lambda m, x: m.b(Straight.apply(m.a(x), 4.0)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)),
        square,
        draw(6, 3),
    )


def test_hooks_of_modules_and_activations_are_part_of_the_graph() -> None:
    """Unlike hooks on parameters they run while a step is traced, so they are simply captured."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[0].register_forward_hook(lambda module, args, out: out * 2)
        model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[1].register_full_backward_hook(lambda module, given, got: (given[0] * 3,))
        return model

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        out.register_hook(lambda g: g * 0.5)
        return out.square().mean()

    same(make, loss, draw(6, 3))


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = torch.tanh(model(x))
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def _functional(model: nn.Module, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    shifted = {k: v + 0.1 for k, v in params.items()}
    each = torch.func.vmap(
        torch.func.grad(lambda r: torch.tanh(torch.func.functional_call(model, shifted, (r,))).sum())
    )
    return each(x).square().mean()


def _inner_step(model: nn.Module, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    inner = torch.func.functional_call(model, params, (x[:3],)).square().mean()
    grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    tuned = {k: v - 0.1 * g for (k, v), g in zip(params.items(), grads, strict=True)}
    return torch.func.functional_call(model, tuned, (x[3:],)).square().mean()


def _teacher(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        aim = model[0](x).softmax(-1)  # type: ignore[index]
    return F.kl_div(model(x).log_softmax(-1), aim @ torch.ones(4, 2), reduction="batchmean")


def _two_parts(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out.mean() + sum((p**2).sum() for p in model.parameters()) * 0.01


@pytest.mark.parametrize(
    "loss", [_penalty, _functional, _inner_step, _teacher, _two_parts], ids=lambda f: f.__name__.strip("_")
)
def test_losses_that_differentiate_or_call_functionally_are_captured(loss: Step) -> None:
    """Gradient penalties, meta-learning and distillation are steps like any other."""
    same(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), loss, draw(6, 3), tol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_traced_through() -> None:
    """Scripts compile their model first; what it computes is what is captured."""
    model = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    plain = capture(model, square, draw(6, 3))
    compiled = capture(torch.compile(model), square, draw(6, 3))  # type: ignore[arg-type]
    assert [n.op for n in compiled.nodes] == [n.op for n in plain.nodes]


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0), 0], ids=str)
def test_devices_named_in_the_code_do_not_matter(device: Any) -> None:
    """A model written for a GPU is captured on a laptop, and the graph is the same."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.to(device).to(device, torch.float32, non_blocking=True)
        y = m.a(x) + torch.ones(2, device=device) + torch.arange(2, device=device)
        z = torch.tensor([1.0, 2.0], device=device) + x.new_zeros(2, device=device)
        return y * z.cuda().to(y) + torch.zeros_like(y, device=device)

    def plain(m: Any, x: Tensor) -> Tensor:
        return (m.a(x) + torch.ones(2) + torch.arange(2)) * torch.tensor([1.0, 2.0])

    model, x = made(lambda: Fn(forward, a=nn.Linear(3, 2))), draw(4, 3)
    got = graph_outputs(capture(model, square, x), model, x)
    want = eager(lambda: Fn(plain, a=nn.Linear(3, 2)), square, x, None)
    for name, value in want.items():
        close(got[name], value, name, 2e-6)


def test_capture_leaves_random_numbers_where_they_were() -> None:
    """A captured run and a plain one must be able to start from the same seed."""
    import random

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    capture(model, square, draw(6, 3))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def _weight_norm_old() -> nn.Module:
    return nn.Sequential(
        torch.nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), torch.nn.utils.weight_norm(nn.Linear(4, 2))
    )


def _spectral_norm_old() -> nn.Module:
    return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def _weight_norm_new() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def _spectral_norm_new() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def _orthogonal() -> nn.Module:
    return nn.Sequential(
        torch.nn.utils.parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), nn.Linear(4, 2)
    )


@pytest.mark.parametrize(
    "make",
    [_weight_norm_old, _weight_norm_new, _spectral_norm_old, _spectral_norm_new],
    ids=lambda f: f.__name__.strip("_"),
)
def test_weights_computed_from_other_weights_are_followed(make: Make) -> None:
    """Hooks and parametrizations compute a weight in every forward; the trained tensors are behind it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        graph = same(make, square, draw(6, 3))
    assert any("weight_g" in i.name or "original" in i.name or "weight_orig" in i.name for i in graph.of_kind("param"))
    grads = {o.name for o in graph.outputs if o.kind == "grad"}
    assert grads == {i.name for i in graph.of_kind("param")}


def test_orthogonal_parametrization_is_followed() -> None:
    """Linear algebra in forward is arithmetic like any other."""
    same(_orthogonal, square, draw(6, 4), tol=1e-5)


def _first(module: nn.Module) -> Make:
    return lambda: Fn(lambda m, x: m.inner(x)[0], inner=copy.deepcopy(module))


LAYERS: dict[str, tuple[Make, Any]] = {
    "multihead attention": (
        lambda: Fn(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)), draw(2, 5, 8),
    ),
    "multihead attention with weights and masks": (
        lambda: Fn(
            lambda m, b: m.a(b[0], b[0], b[0], key_padding_mask=b[1], attn_mask=b[2], need_weights=False)[0],
            a=nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.2, add_bias_kv=True),
        ),
        (draw(2, 5, 8), ids(2, 2, 5).bool() & (torch.arange(5) > 0), torch.triu(torch.ones(5, 5), 1).bool()),
    ),
    "transformer encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), draw(2, 5, 8),
    ),
    "transformer encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True), draw(2, 5, 8),
    ),
    "transformer decoder layer": (
        lambda: Fn(lambda m, b: m.a(*b, tgt_is_causal=True, tgt_mask=torch.full((5, 5), -torch.inf).triu(1)),
                   a=nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1, batch_first=True)),
        (draw(2, 5, 8), draw(2, 4, 8, seed=2)),
    ),
    "gru": (lambda: Fn(lambda m, x: m.a(x)[0], a=nn.GRU(4, 3)), draw(5, 2, 4)),
    "gru, all its options": (
        lambda: Fn(lambda m, x: m.a(x)[0], a=nn.GRU(4, 3, 2, batch_first=True, dropout=0.4, bidirectional=True)),
        draw(2, 5, 4),
    ),
    "rnn": (lambda: Fn(lambda m, x: m.a(x)[1], a=nn.RNN(4, 3, 2, nonlinearity="relu")), draw(5, 2, 4)),
    "lstm": (lambda: Fn(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 3)), draw(5, 2, 4)),
    "lstm, its last states": (
        lambda: Fn(lambda m, x: torch.cat(m.a(x)[1]), a=nn.LSTM(4, 3, 2, bias=False, batch_first=True)), draw(2, 5, 4),
    ),
    "lstm, all its options": (
        lambda: Fn(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 3, 2, batch_first=True, dropout=0.4, bidirectional=True)),
        draw(2, 5, 4),
    ),
    "lstm without a batch": (lambda: Fn(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 3)), draw(5, 4)),
    "lstm with projections": (lambda: Fn(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 6, proj_size=3)), draw(5, 2, 4)),
    "lstm cell": (lambda: Fn(lambda m, x: m.a(x)[1], a=nn.LSTMCell(4, 3)), draw(5, 4)),
    "gru cell": (lambda: Fn(lambda m, x: m.a(x), a=nn.GRUCell(4, 3)), draw(5, 4)),
    "embedding with padding": (lambda: nn.Embedding(7, 4, padding_idx=2), ids(7, 3, 5)),
    "embedding scaled by frequency": (lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), ids(7, 3, 5)),
    "embedding bag, sums": (lambda: nn.EmbeddingBag(7, 4, mode="sum"), ids(7, 3, 5)),
    "embedding bag, means": (lambda: nn.EmbeddingBag(7, 4, mode="mean", padding_idx=1), ids(7, 3, 5)),
    "embedding bag, maxima": (lambda: nn.EmbeddingBag(7, 4, mode="max"), ids(7, 3, 5)),
    "embedding bag with offsets, maxima": (
        lambda: Fn(lambda m, b: m.a(*b), a=nn.EmbeddingBag(7, 4, mode="max", padding_idx=3)),
        (ids(7, 9), torch.tensor([0, 2, 2, 6])),
    ),
    "embedding bag with offsets, sums": (
        lambda: Fn(lambda m, b: m.a(*b), a=nn.EmbeddingBag(7, 4, mode="sum")), (ids(7, 9), torch.tensor([0, 2, 2, 6])),
    ),
    "embedding bag with offsets, means": (
        lambda: Fn(lambda m, b: m.a(*b), a=nn.EmbeddingBag(7, 4, include_last_offset=True)),
        (ids(7, 9), torch.tensor([0, 2, 2, 6, 9])),
    ),
    "embedding bag with weights": (
        lambda: Fn(lambda m, b: m.a(b[0], b[1], per_sample_weights=m.w * b[2]), a=nn.EmbeddingBag(7, 4, mode="sum"),
                   w=nn.Parameter(torch.linspace(0.5, 1.5, 9))),
        (ids(7, 9), torch.tensor([0, 2, 2, 6]), draw(9)),
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2),
                              nn.ConvTranspose2d(4, 2, 2), nn.InstanceNorm2d(2), nn.AdaptiveAvgPool2d(2)),
        draw(2, 2, 9, 9),
    ),
    "1-d and 3-d convolutions": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(12, 2)),
        draw(2, 2, 8),
    ),
    "padding modes and upsampling": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), nn.Upsample(scale_factor=2),
                              nn.Conv2d(3, 2, 3, padding="same", padding_mode="circular"), nn.PixelShuffle(1)),
        draw(2, 2, 5, 5),
    ),
    "activations": (
        lambda: Fn(lambda m, x: sum(f(m.a(x)) for f in (F.gelu, F.silu, F.elu, F.selu, F.mish, F.softplus, F.hardswish,
                                                         F.leaky_relu, F.logsigmoid, F.tanhshrink, F.relu6)),
                   a=nn.Linear(3, 4)),
        draw(6, 3),
    ),
    "prelu, glu and softmax": (
        lambda: Fn(lambda m, x: F.softmax(F.glu(m.p(m.a(x))), -1) + F.log_softmax(m.a(x)[:, :2], 0),
                   a=nn.Linear(3, 4), p=nn.PReLU(4)),
        draw(6, 3),
    ),
    "norms": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.Unflatten(1, (2, 4)),
                              nn.LocalResponseNorm(2)),
        draw(6, 3),
    ),
    "bilinear and cosine": (
        lambda: Fn(lambda m, x: F.cosine_similarity(m.a(x, x), x @ m.w, dim=-1), a=nn.Bilinear(3, 3, 4),
                   w=nn.Parameter(torch.ones(3, 4))),
        draw(6, 3),
    ),
    "einsum": (
        lambda: Fn(lambda m, x: torch.einsum("bthd,bshd,hk->bkts", x @ m.q, x, m.w), q=nn.Parameter(draw(4, 4)),
                   w=nn.Parameter(draw(3, 2))),
        draw(2, 5, 3, 4),
    ),
    "dropouts": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.Dropout2d(0.4), nn.Dropout(0.3, inplace=True),
                              nn.AlphaDropout(0.2), nn.RReLU(inplace=True), nn.FeatureAlphaDropout(0.2)),
        draw(6, 2, 4, 4),
    ),
    "gumbel softmax": (
        lambda: Fn(lambda m, x: F.gumbel_softmax(m.a(x), tau=0.7) + F.gumbel_softmax(m.a(x), hard=True),
                   a=nn.Linear(3, 4)),
        draw(6, 3),
    ),
    "noise": (
        lambda: Fn(lambda m, x: m.a(x + 0.1 * torch.randn(x.shape) + torch.randn_like(x) + torch.rand(6, 3)
                                    + torch.rand_like(x) + torch.normal(0.0, 1.0, (6, 3)) + torch.randn(size=(3,))
                                    + torch.empty(6, 3).uniform_(-1, 1) + x.new_empty(6, 3).normal_()
                                    + torch.zeros(6, 3).bernoulli_(0.3) + torch.bernoulli(torch.full((6, 3), 0.3))),
                   a=nn.Linear(3, 4)),
        draw(6, 3),
    ),
    "draws of whole numbers": (
        lambda: Fn(lambda m, x: m.a(x[torch.randperm(6)]) * torch.randint(1, 5, (6, 1)) + torch.randint(3, (4,)),
                   a=nn.Linear(3, 4)),
        draw(6, 3),
    ),
    "distributions": (
        lambda: Fn(lambda m, x: torch.distributions.Normal(m.a(x), 1.0).rsample(), a=nn.Linear(3, 4)), draw(6, 3),
    ),
    "tensor methods": (
        lambda: Fn(lambda m, x: m.a(x).roll(1, 0).flip(1).cumsum(0).topk(2, dim=1)[0].sort(0)[0].repeat(1, 2).tril()
                   .logsumexp(0).unsqueeze(0)
                   + torch.stack([m.a(x).amax(1), m.a(x).var(1), m.a(x).norm(dim=1)], 1).sum(),
                   a=nn.Linear(3, 4)),
        draw(6, 3),
    ),
    "indexing": (
        lambda: Fn(lambda m, x: m.a(x)[torch.tensor([0, 2, 4])][:, None, ::2].expand(3, 2, 2)
                   + torch.take_along_dim(m.a(x)[:3], torch.tensor([[0], [1], [2]]), 1).unsqueeze(-1),
                   a=nn.Linear(3, 4)),
        draw(6, 3),
    ),
    "vmap": (
        lambda: Fn(lambda m, x: torch.vmap(lambda r: m.w @ r)(x), w=nn.Parameter(draw(4, 3))), draw(6, 3),
    ),
    "complex": (
        lambda: Fn(lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.w), n=8),
                   w=nn.Parameter(draw(5, 2))),
        draw(6, 8),
    ),
}  # fmt: skip
"""What users build models of: a model and its batch."""


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_captured_is_the_layer(name: str) -> None:
    """Users bring torch's own layers first of all."""
    make, batch = LAYERS[name]
    same(make, square, batch, tol=1e-5)


MASK = ids(2, 5, 5).bool() | torch.eye(5, dtype=torch.bool)
ATTENTION: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 5, 4), (2, 3, 5, 4), {}),
    "causal": ((2, 3, 5, 4), (2, 3, 5, 4), {"is_causal": True}),
    "bool mask": ((2, 3, 5, 4), (2, 3, 5, 4), {"attn_mask": MASK}),
    "float mask": ((2, 3, 5, 4), (2, 3, 5, 4), {"attn_mask": draw(2, 1, 5, 5)}),
    "learned bias": ((2, 3, 5, 4), (2, 3, 5, 4), {"attn_mask": "bias"}),
    "3-D": ((2, 5, 4), (2, 5, 4), {}),
    "3-D with a mask": ((2, 5, 4), (2, 5, 4), {"attn_mask": draw(2, 5, 5)}),
    "2-D": ((5, 4), (5, 4), {}),
    "5-D": ((2, 2, 3, 5, 4), (2, 2, 3, 5, 4), {}),
    "dropout": ((2, 3, 5, 4), (2, 3, 5, 4), {"dropout_p": 0.3, "is_causal": True}),
    "dropout and mask": ((2, 3, 5, 4), (2, 3, 5, 4), {"dropout_p": 0.3, "attn_mask": MASK}),
    "grouped queries": ((2, 6, 5, 4), (2, 2, 5, 4), {"enable_gqa": True}),
    "grouped queries with dropout": ((2, 6, 5, 4), (2, 2, 5, 4), {"enable_gqa": True, "dropout_p": 0.3}),
    "one key head": ((2, 6, 5, 4), (2, 1, 5, 4), {}),
    "cross attention, scaled": ((2, 3, 5, 4), (2, 3, 7, 4), {"scale": 0.3}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_every_form_is_captured(name: str) -> None:
    """One op for attention, whatever kernel this device would have chosen."""
    q, k, options = ATTENTION[name]

    def forward(m: Any, x: Any) -> Tensor:
        extra = {key: m.bias if isinstance(v, str) else v for key, v in options.items()}
        return F.scaled_dot_product_attention(x[0] * m.s, x[1] * m.s, x[2] * m.s, **extra)

    def make() -> nn.Module:
        return Fn(forward, s=nn.Parameter(torch.linspace(0.5, 1.5, 4)), bias=nn.Parameter(draw(5, 5)))

    graph = same(make, square, (draw(*q), draw(*k, seed=2), draw(*k, seed=3)), tol=1e-5)
    if "dropout" not in name and "D" not in name and "learned" not in name:
        assert ops(graph, "laminar.attention") == 1 and ops(graph, "laminar.attention_backward") == 1


# --- losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"ignore_index": 2},
        {"weight": torch.linspace(0.5, 2, 5)},
        {"weight": torch.linspace(0.5, 2, 5), "label_smoothing": 0.1, "ignore_index": 2},
    ],
    ids=lambda o: "+".join(o) or "plain",
)
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["rows", "images"])
def test_cross_entropy_in_every_form_is_captured(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """The loss is where gradients start: everything inherits its mistakes."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["x"])
        return F.cross_entropy(logits.movedim(-1, 1) if logits.dim() > 2 else logits, batch["y"], **options)

    same(lambda: nn.Linear(3, 5), loss, {"x": draw(*shape, 3), "y": ids(5, *shape)})


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.soft_margin_loss,
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        lambda x, y: F.cross_entropy(x, y.softmax(-1)),
        lambda x, y: F.gaussian_nll_loss(x, y, torch.linspace(0, 2, 6).unsqueeze(1)),
        lambda x, y: F.poisson_nll_loss(x, y.abs()),
        lambda x, y: F.triplet_margin_loss(x, y, y.flip(0)),
        lambda x, y: F.margin_ranking_loss(x[:, 0], y[:, 0], torch.ones(6)),
        lambda x, y: F.multi_margin_loss(x, torch.tensor([0, 1, 2, 3, 0, 1])),
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(6)),
        lambda x, y: F.hinge_embedding_loss(x, y.sign()),
        lambda x, y: F.multilabel_soft_margin_loss(x, y.sigmoid()),
    ],
)  # fmt: skip
def test_losses_of_torch_are_captured(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Each loss decomposes differently."""
    same(lambda: nn.Linear(3, 4), lambda m, b: loss(m(b[0]), b[1]), (draw(6, 3), draw(6, 4, seed=2)), tol=1e-5)


@pytest.mark.parametrize("number", [True, False])
def test_a_loss_may_be_a_total_and_a_weight(number: bool) -> None:
    """What is summed over everything and divided once does not depend on how the batch is cut."""

    def loss(model: nn.Module, batch: Any) -> laminar.Loss:
        keep = batch["y"] != 0
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * keep
        return laminar.Loss(each.sum(), 6.0 if number else keep.sum())  # type: ignore[arg-type]

    graph = same(lambda: nn.Linear(3, 5), loss, {"x": draw(6, 3), "y": ids(5, 6)})
    assert [o.name for o in graph.outputs if o.kind == "metric"] == ["loss_total", "loss_weight"]


# --- size --------------------------------------------------------------------------------------


def gpt(**config: int) -> tuple[nn.Module, Step, dict[str, Tensor]]:
    """A GPT of any size and a batch for it, on the meta device."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("capture_gpt", EXAMPLES / "gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    with torch.device("meta"):
        model = module.GPT(module.Config(**config))
        batch = {key: torch.empty(config["batch"], config["tokens"], dtype=torch.int64) for key in ("ids", "target")}
    return model, module.loss, batch


def grown_mb(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """How far the peak of this process's memory rose, in MB, the seconds it took, and the result."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    result = run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, time.monotonic() - start, result


def test_a_model_of_billions_is_captured_without_allocating_it() -> None:
    """Planning must not need the machine that is planned for."""
    model, loss, batch = gpt(layers=4, d=12288, heads=96, vocab=50257, tokens=2048, batch=8)
    mb, seconds, graph = grown_mb(lambda: capture(model, loss, batch))
    assert sum(i.spec.numel for i in graph.of_kind("param")) > 8e9
    assert mb < 500 and seconds < 20


def test_gpt3_is_captured_in_a_minute_and_two_gigabytes() -> None:
    """175 billion parameters, 96 layers: the size that planning is for."""
    model, loss, batch = gpt(layers=96, d=12288, heads=96, vocab=50257, tokens=2048, batch=32)
    mb, seconds, graph = grown_mb(lambda: capture(model, loss, batch))
    assert 174e9 < sum(i.spec.numel for i in graph.of_kind("param")) < 176e9
    assert mb < 2000 and seconds < 60


ZOO = [
    *("mlp.py:tiny", "resnet.py:tiny", "gpt.py:tiny", "gpt.py:narrow", "llama.py:tiny", "bert.py:tiny"),
    *("vit.py:tiny", "t5.py:tiny", "dlrm.py:tiny", "moe.py:tiny", "lstm.py:tiny", "unet.py:tiny"),
    *("hf.py:gpt2", "hf.py:bert"),
]


@pytest.mark.parametrize("name", ZOO)
def test_every_example_is_captured_the_same_from_cpu_and_from_meta(name: str) -> None:
    """The graph computes what the model does, and a plan made from shapes alone fits the model on the machine."""
    if name.startswith("hf"):
        pytest.importorskip("transformers")
    recipe = load_recipe(str(EXAMPLES / name))
    batch = next(iter(recipe.data()))
    graph = same(recipe.model, recipe.loss, batch, tol=1e-5)
    with torch.device("meta"):
        model = recipe.model()
    assert all(p.is_meta for p in model.parameters())
    assert capture(model, recipe.loss, batch).hash == graph.hash


def test_capturing_twice_gives_the_same_hash() -> None:
    """A plan is for a graph by its hash."""
    recipe = load_recipe(str(EXAMPLES / "gpt.py:tiny"))
    batch = next(iter(recipe.data()))
    assert capture(recipe.model(), recipe.loss, batch).hash == capture(recipe.model(), recipe.loss, batch).hash


# --- origins -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_gpt() -> Graph:
    recipe = load_recipe(str(EXAMPLES / "gpt.py:tiny"))
    return capture(recipe.model(), recipe.loss, next(iter(recipe.data())))


def line_of(text: str) -> str:
    """`gpt.py:55  return ...`: the start of a `where` that names the one line containing `text`."""
    lines = (EXAMPLES / "gpt.py").read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line]
    return f"examples/gpt.py:{number}  {lines[number - 1].strip()}"


def test_every_forward_op_names_a_line_of_the_model(tiny_gpt: Graph) -> None:
    """An error that names no line is a riddle."""
    for node in tiny_gpt.nodes:
        if node.phase == "forward":
            assert node.where.startswith("examples/gpt.py:"), node


def test_every_backward_op_names_the_line_of_its_forward_op(tiny_gpt: Graph) -> None:
    """A user never wrote a backward op; the line that caused it is the one to look at."""
    forward_lines = {n.where for n in tiny_gpt.nodes if n.phase == "forward"}
    for node in tiny_gpt.nodes:
        assert node.where in forward_lines, node


@pytest.mark.parametrize(
    ("parameter", "text", "module"),
    [
        ("blocks.1.mlp.up.weight", "self.down(F.gelu(self.up(x)", "blocks.1.mlp.up"),
        ("blocks.0.attention.qkv.weight", "in self.qkv(x).split", "blocks.0.attention.qkv"),
        ("blocks.0.attention.out.weight", "return self.out(y", "blocks.0.attention.out"),
        ("blocks.1.norm2.weight", "x + self.mlp(self.norm2(x))", "blocks.1.norm2"),
        ("head.weight", "return self.head(self.norm(x))", "head"),
        ("position.weight", "x = self.embed(ids) + self.position(positions)", "position"),
    ],
)
def test_a_gradient_names_the_line_and_module_of_its_layer(
    tiny_gpt: Graph, parameter: str, text: str, module: str
) -> None:
    """Matched by autograd's own bookkeeping, so checked against the source by hand."""
    (out,) = [o for o in tiny_gpt.outputs if o.kind == "grad" and o.name == parameter]
    node = tiny_gpt.by_name[out.ref.name]
    assert node.phase == "backward"
    assert node.where == line_of(text)
    assert node.module == module


def test_ops_that_sum_gradients_name_a_line_too(tiny_gpt: Graph) -> None:
    """Autograd adds gradients between ops; such sums belong to the value that was read twice."""
    sums = [n for n in tiny_gpt.nodes if n.op == "aten.add.Tensor" and n.phase == "backward"]
    assert sums and all(n.where for n in sums)


def test_a_recomputed_op_names_the_line_it_was_written_on() -> None:
    """Recomputation runs inside backward, where the user's frames are those of the region again."""
    graph = capture(made(_region(False)), square, draw(5, 4))
    found = [n for n in graph.nodes if n.phase == "recompute" and n.op == "aten.tanh"]
    assert found and all("torch.tanh(self.b(" in n.where for n in found)
    assert {n.module for n in graph.nodes if n.phase == "recompute" and n.op == "aten.addmm"} <= {"a", "b"}


# --- keyed draws -----------------------------------------------------------------------------


def dropped(graph: Graph, model: nn.Module, batch: Any, key: tuple[int, int]) -> Tensor:
    return graph_outputs(graph, model, batch, key)["loss:loss"]


def test_draws_are_a_function_of_seed_step_and_site() -> None:
    """The same key repeats a step exactly; another step, or another layer, draws anew."""
    model = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)))
    batch = draw(16, 4)
    graph = capture(model, square, batch)
    values = {key: float(dropped(graph, model, batch, key)) for key in [(0, 0), (0, 1), (1, 0)]}
    assert len(set(values.values())) == 3
    assert float(dropped(graph, model, batch, (0, 1))) == values[0, 1]
    sites = [n.args[2] for n in graph.nodes if n.op == "laminar.uniform"]
    assert len(sites) == len(set(sites)) == 2


def test_dropout_keeps_the_share_it_should() -> None:
    """Keyed numbers must still be random numbers."""
    with Canonical(torch.tensor([5, 1])):
        x = F.dropout(torch.ones(200, 500), 0.3)
        again = F.dropout(torch.ones(200, 500), 0.3)
        noise = torch.randn(100_000)
    kept = (x != 0).float()
    assert abs(float(kept.mean()) - 0.7) < 0.005
    assert float(x.max()) == pytest.approx(1 / 0.7)
    assert abs(float((kept * (again != 0)).mean()) - 0.49) < 0.005, "two sites must be independent"
    assert float(kept.mean(0).std()) < 0.05 and float(kept.mean(1).std()) < 0.04
    assert abs(float(noise.mean())) < 0.02 and abs(float(noise.std()) - 1) < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_draws_do_not_depend_on_the_layout(seed: int) -> None:
    """Whoever holds an element draws its number: four ranks drop what one device drops."""
    from laminar.runtime.verify import verify_program
    from laminar.search.draw import random_plan

    model = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 6), nn.Dropout(0.3)))
    batch = draw(6, 4)
    graph = capture(model, square, batch)
    plan = random_plan(graph, laminar.Mesh({"a": 2, "b": 2}), seed)
    given = {**state_of(model), **check_batch(graph, batch), RNG: torch.tensor(KEY)}
    report = verify_program(graph, plan, [{i.name: given[i.name] for i in graph.inputs}])
    assert report.ok, report


# --- several shapes side by side ---------------------------------------------------------------


def test_captures_of_several_shapes_live_side_by_side() -> None:
    """The last batch of an epoch is smaller, and evaluation runs in between."""
    model = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)))
    captures = Captures(model, square)
    full, rest = draw(6, 4), draw(4, 4)
    first = captures(full)
    assert captures(draw(6, 4, seed=9)) is first, "the same shape is captured once"
    last = captures(rest)
    assert last is not first and last.hash != first.hash
    model.eval()
    judged = captures(full)
    assert not judged.of_kind("rng") and not [o for o in judged.outputs if o.kind == "buffer"]
    model.train()
    assert captures(full) is first and captures(rest) is last and len(captures) == 3
    for graph, batch in ((first, full), (last, rest)):
        graph_outputs(graph, model, batch)


def test_freezing_a_parameter_needs_another_capture() -> None:
    """Gradual unfreezing changes which gradients there are."""
    model = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    captures = Captures(model, square)
    every = captures(draw(6, 4))
    model[0].weight.requires_grad_(False)
    fewer = captures(draw(6, 4))
    count = [sum(o.kind == "grad" for o in g.outputs) for g in (every, fewer)]
    assert count == [4, 3]
    model[0].weight.requires_grad_(True)
    assert captures(draw(6, 4)) is every


def test_another_structure_is_another_capture() -> None:
    """A batch with one key more, or another flag, may take another path through the model."""
    model = made(lambda: Fn(lambda m, b: m.a(b["x"]) * (2 if b["twice"] else 1), a=nn.Linear(3, 2)))
    captures = Captures(model, square)
    graphs = [captures({"x": draw(4, 3), "twice": flag}) for flag in (True, False, True)]
    assert graphs[0] is graphs[2] and graphs[0] is not graphs[1]

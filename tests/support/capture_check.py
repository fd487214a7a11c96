"""A model captured, and held against eager PyTorch: what the tests of capture share.

A model is captured once, its graph is run node by node on one device, and loss, gradients and new buffer values are
held against plain eager PyTorch (`same`). Models that draw random numbers are run eagerly under `Canonical`, which
draws the keyed numbers a graph draws. Collects nothing itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laminar
from laminar.capture.canonical.canonical import Canonical
from laminar.capture.capture import capture, check_batch, state_of
from laminar.capture.model.model_tensors import slots_of
from laminar.ir.graph import RNG, Graph
from laminar.runtime.check.one_device import run_graph

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = (7, 3)
Make = Callable[[], nn.Module]
Step = Callable[[nn.Module, Any], Any]


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


def asserting(m: Any, x: Tensor) -> Tensor:
    """A forward with assertions as Python has them: in files of tests pytest writes them anew."""
    assert torch.isfinite(x).all(), "values"
    assert not (x > 100).any() and bool((x > -100).all())
    out: Tensor = m.inner(x)
    return out

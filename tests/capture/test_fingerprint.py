"""The name of a graph on disk: equal for the same step in another process, another for whatever could change it."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar.capture.graph.batch_sizes import Predictor
from laminar.capture.kept.fingerprint import fingerprint
from laminar.capture.kept.saved_graphs import kept_graph
from laminar.train.engine import tracer

FACTOR = 2.0
"""A global that a loss reads."""


class Config:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Net(nn.Module):
    scale = 1.0

    def __init__(self, tau: float = 1.0, config: Any = None, tied: bool = False) -> None:
        super().__init__()
        self.tau, self.config = tau, config or Config(heads=2, names=["a"])
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        wide = os.environ.get("LAMINAR_TEST_WIDE", "") == "1"
        return self.b(self.a(x)) * self.tau * self.scale + (x if wide else 0)


def loss_of(power: float = 2.0, table: Tensor | None = None, other: Any = None) -> Callable[[Any, Any], Tensor]:
    def loss(model: Any, x: Tensor) -> Tensor:
        found = model(x).abs().pow(power).mean() * FACTOR
        return found if table is None else found + (x * table).mean() if other is None else found

    return loss


def turned(model: Net) -> Net:
    model.a.weight = nn.Parameter(model.a.weight.detach().t())
    return model


def frozen(model: Net) -> Net:
    model.b.requires_grad_(False)
    return model


def hooked(model: Net) -> Net:
    model.a.register_forward_hook(lambda module, args, out: out * 2)
    return model


def test_whatever_a_step_depends_on_is_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these would have been taken for the first."""
    names: dict[str, str | None] = {}

    def note(what: str, model: nn.Module, loss: Any, *more: Any) -> None:
        names[what] = fingerprint(model, loss, *more)

    note("plain", Net(), loss_of())
    assert names["plain"] == fingerprint(Net(), loss_of()) is not None  # other weights, the same step
    note("an attribute", Net(tau=0.5), loss_of())
    note("a number in a configuration", Net(config=Config(heads=4, names=["a"])), loss_of())
    note("a list in a configuration", Net(config=Config(heads=2, names=["a", "b"])), loss_of())
    note("tied weights", Net(tied=True), loss_of())
    note("a layout", turned(Net()), loss_of())
    note("a dtype", Net().double(), loss_of())
    note("frozen weights", frozen(Net()), loss_of())
    note("a mode", Net().eval(), loss_of())
    note("a hook", hooked(Net()), loss_of())
    note("what a loss closes over", Net(), loss_of(power=3.0))
    note("a constant", Net(), loss_of(table=torch.zeros(4)))
    note("its value", Net(), loss_of(table=torch.ones(4)))
    note("another loss", Net(), lambda model, x: model(x).mean())
    note("a batch", Net(), loss_of(), (2, 4))
    bound = Net()
    bound.forward = types.MethodType(lambda self, x: self.a(x), bound)  # type: ignore[method-assign]
    note("a forward of its own", bound, loss_of())
    with monkeypatch.context() as m:
        m.setattr(Net, "scale", 3.0)
        note("an attribute of the class", Net(), loss_of())
    with monkeypatch.context() as m:
        m.setattr(sys.modules[__name__], "FACTOR", 4.0)
        note("a global", Net(), loss_of())
    with monkeypatch.context() as m:
        m.setenv("LAMINAR_TEST_WIDE", "1")
        note("a variable of the environment", Net(), loss_of())
    with monkeypatch.context() as m:
        m.setattr(Net, "forward", lambda self, x: self.b(x))
        note("another method", Net(), loss_of())
    assert None not in names.values()
    twins = {a: b for a in names for b in names if a < b and names[a] == names[b]}
    assert twins == {}


def test_what_can_not_be_looked_into_has_no_name(tmp_path: Path) -> None:
    """A generator, an iterator, a file that is read on the way: such a step is captured each time."""
    for odd in (torch.Generator(), iter([1]), object()):
        assert fingerprint(Net(), loss_of(other=odd)) is None
    assert fingerprint(Net(), lambda model, x: model(x).mean() * float((tmp_path / "a").read_text())) is None


SCRIPT = """
import torch
from torch import nn
from laminar.capture.kept.fingerprint import fingerprint

class Model(nn.Module):
    names = frozenset(["one", "two", "three"])
    def __init__(self):
        super().__init__()
        self.layer, self.kinds = nn.LSTM(4, 4, 2, dropout=0.1), {"x", "y", "z"}
    def forward(self, x):
        return self.layer(x)[0] * (2 if "a" in {"a", "b", "c"} else 1)

print(fingerprint(Model(), lambda model, x: model(x).mean()))
"""


@pytest.mark.slow
def test_another_process_finds_the_same_name(tmp_path: Path) -> None:
    """Sets have another order in every process, and objects another place."""
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    runs = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            env={**env, "PYTHONHASHSEED": str(seed)},
        )
        for seed in (1, 2)
    ]
    names = [run.communicate()[0].strip() for run in runs]
    assert names[0] == names[1] != "None"


def test_a_second_job_of_the_same_step_captures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain scripts are served as recipes are; what is captured and what is found train alike."""
    monkeypatch.setenv("LAMINAR_CACHE", str(tmp_path))
    seen: list[int] = []
    real = tracer.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(tracer, "capture", counted)

    def trained(tau: float, samples: int = 6) -> tuple[str, float]:
        torch.manual_seed(0)
        model = Net(tau)
        x = torch.randn(samples, 4)
        job = laminar.parallelize(model, loss_of(), torch.optim.SGD(model.parameters(), lr=0.1), batch=x, device="cpu")
        job.step(x)
        return job.graph.hash, job.step(x).loss

    first = trained(1.0)
    assert trained(1.0) == first and len(seen) == 1
    assert trained(0.5)[1] != first[1] and len(seen) == 2
    trained(1.0, samples=5)
    assert len(seen) == 3


def test_a_step_that_teaches_nothing_about_other_sizes_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not every traced step can be predicted from; its graph is kept by itself."""
    monkeypatch.setenv("LAMINAR_CACHE", str(tmp_path))
    model, batch, predictor = Net(), torch.randn(2, 4), Predictor()
    graph = laminar.capture(model, lambda m, x: m(x).sum(), batch)

    def make() -> laminar.Graph:
        predictor.traced += 1
        return graph

    for _ in range(2):
        found = kept_graph(model, lambda m, x: m(x).sum(), {"batch": batch}, {}, {}, make, predictor)
        assert found.hash == graph.hash
    assert predictor.traced == 1 and not predictor.samples

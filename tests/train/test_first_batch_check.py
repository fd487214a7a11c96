"""The first batch of a job is held against the user's own model, run in plain PyTorch.

What capture or a plan gets wrong must not train on in silence. Mistakes are put into the graph on purpose here, and the
check has to name them; where numbers differ by rounding it must hold its tongue, and it leaves everything as it was.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar import CheckError, events
from laminar.ir.graph import Graph
from laminar.train.check import first_batch_check
from laminar.train.check.compare_results import off
from laminar.train.engine import tracer
from tests.support.rank_pool import Ranks
from tests.support.small_job import adamw, batches, counted, mean, net


class Net(nn.Module):
    """A list of parameters, one alone, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(6, 6) / 3) for _ in range(3)])
        self.g = nn.Parameter(torch.ones(6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = torch.tanh(x @ w)
        return self.norm(x) * self.g


def _square(model: Any, batch: Tensor) -> Tensor:
    return (model(batch) - 0.3).square().mean()


def _without_gradient(graph: Graph) -> Graph:
    """A parameter that is not trained, as if capture had missed where it is used."""
    return replace(graph, outputs=tuple(o for o in graph.outputs if (o.kind, o.name) != ("grad", "weights.1")))


def _other_branch(graph: Graph) -> Graph:
    """Another loss: a number in the graph is not the model's."""
    nodes = tuple(replace(n, args=tuple(0.31 if a == 0.3 else a for a in n.args)) for n in graph.nodes)
    assert nodes != graph.nodes
    return replace(graph, nodes=nodes)


def _stale_buffer(graph: Graph) -> Graph:
    """Statistics that are not kept."""
    return replace(graph, outputs=tuple(o for o in graph.outputs if o.name != "norm.running_mean"))


MISTAKES: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "gradient": (_without_gradient, "the gradient of weights.1 has norm 0,"),
    "number": (_other_branch, "the compiled step is not the model: "),
    "buffer": (_stale_buffer, "buffer norm.running_mean"),
}


def _plan(plan: str, model: nn.Module, loss: Any, batch: Any) -> Any:
    if plan != "stages":
        return plan
    micro = laminar.api.micro_batches(batch, 2)[0]
    return laminar.plans.pipeline(laminar.capture(model, loss, micro), 2, microbatches=2, couple="microbatch")


def _mistaken(plan: str, mistake: str) -> str:
    change = MISTAKES[mistake][0]
    capture = tracer.probe
    tracer.probe = lambda graph: capture(change(graph))  # type: ignore[assignment]
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(8, 6)
    try:
        found = _plan(plan, model, _square, batch)
        job = laminar.parallelize(model, _square, adamw(model), batch=batch, plan=found, device="cpu")
        try:
            job.step(batch)
        except CheckError as error:
            return str(error)
        return ""
    finally:
        tracer.probe = capture


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("plan", ["data", "zero3", "stages"])
def test_a_mistake_of_capture_is_named_on_every_rank(two: Ranks, plan: str, mistake: str) -> None:
    """By the parameter, with both numbers and the ways out; on ranks that did not run the model as well."""
    if plan == "stages" and mistake == "buffer":
        pytest.skip("buffers of stages are not compared")
    for text in two.run(_mistaken, plan, mistake):
        assert MISTAKES[mistake][1] in text and "in plain PyTorch" in text
        assert 'plan="ddp"' in text and "check=False" in text


def test_it_can_be_left_out() -> None:
    """Whoever knows better says check=False, and trains on what was captured."""
    capture = tracer.probe
    tracer.probe = lambda graph: capture(_without_gradient(graph))  # type: ignore[assignment]
    try:
        model, batch = Net(), torch.randn(8, 6)
        job = laminar.parallelize(model, _square, adamw(model), batch=batch, device="cpu", check=False)
        assert job.step(batch).loss > 0
    finally:
        tracer.probe = capture


class Noisy(nn.Module):
    """Dropout, a bias before batch norm whose gradient is nothing but rounding, and deep sums that cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 6)
        self.drop = nn.Dropout(0.3)
        self.sharp = nn.Parameter(torch.full((6,), 300.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.drop(torch.relu(self.norm(self.up(x)))))
        return torch.sin(x * self.sharp) + (1e4 + x) - 1e4


def _steps(plan: str, kind: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    listener = events.subscribe(lambda e: seen.append(e.fields) if e.kind == "check" else None)
    torch.manual_seed(0)
    local = options.pop("local", False)
    if kind == "noisy":
        model: nn.Module = Noisy()
        loss, data = _square, list(torch.randn(2, 12, 6))
    else:
        model, loss, data = net(dtype=torch.float32), counted if kind == "counted" else mean, batches(2, 12)  # type: ignore[assignment]
    found = _plan(plan, model, loss, data[0])
    job = laminar.parallelize(model, loss, adamw(model), batch=data[0], plan=found, device="cpu", **options)
    for batch in data:
        if local:
            cut = {k: t.chunk(job.world)[job.rank] for k, t in batch.items()}  # type: ignore[union-attr]
            job.step(laminar.Local(cut))
        else:
            job.step(batch)
    events.unsubscribe(listener)
    return seen


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("noisy", {}),
        ("noisy", {"precision": "bf16"}),
        ("mean", {"micro_batches": 3, "precision": "fp16"}),
        ("counted", {"micro_batches": 2}),
        ("mean", {"local": True}),
        ("mean", {"precision": "bf16-kahan"}),
        ("mean", {"detect_anomaly": True}),
    ],
)
@pytest.mark.parametrize("plan", ["data", "zero3", "tensor", "stages"])
def test_no_false_alarm(two: Ranks, plan: str, kind: str, options: dict[str, Any]) -> None:
    """In half precision, in micro-batches, for shares, with draws, and where gradients are nothing but rounding."""
    if plan == "tensor" and options.get("local"):
        pytest.skip("a plan without data parallel has no shares")
    if plan == "stages" and options.keys() & {"local", "micro_batches", "detect_anomaly"}:
        options = {k: v for k, v in options.items() if k == "precision"}
    for seen in two.run(_steps, plan, kind, options):
        assert [e["done"] for e in seen] == [True]


def _untouched(plan: str) -> list[str]:
    """What the check has changed, as far as it can be told from a job that is not checked."""
    jobs = []
    for check in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Noisy()
        job = laminar.parallelize(
            model, _square, adamw(model), batch=torch.ones(12, 6), plan=plan, check=check, device="cpu"
        )
        for batch in torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(3)):
            job.step(batch)
        jobs.append(
            (job.hash(), torch.rand(()).item(), random.random(), np.random.rand(), [p.grad for p in model.parameters()])
        )
    return [f"{a} {b}" for a, b in zip(*jobs, strict=True) if a != b]


@pytest.mark.parametrize("plan", ["data", "zero3"])
def test_it_leaves_nothing_behind(two: Ranks, plan: str) -> None:
    """Weights, buffers, optimizer state and all generators go on bit for bit as without a check."""
    assert two.run(_untouched, plan) == [[], []]


def test_a_check_that_was_passed_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run of a script skips it; another number in the graph does not."""
    monkeypatch.setenv("LAMINAR_CACHE", str(tmp_path))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # typed in, nothing is kept
    made: list[dict[str, Any]] = []
    for p in (0.3, 0.3, 0.4):
        torch.manual_seed(0)
        model = Noisy()
        model.drop.p = p
        listener = events.subscribe(lambda e: made.append(e.fields) if e.kind == "check" else None)
        job = laminar.parallelize(model, _square, adamw(model), batch=torch.ones(12, 6), device="cpu")
        job.step(torch.randn(12, 6))
        events.unsubscribe(listener)
    assert [m["done"] for m in made] == [True, False, True]
    assert made[1]["why"] == first_batch_check.CHECKED_BEFORE


def test_a_model_too_large_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where whole weights and activations would not fit, the job trains on and says that it was not checked."""
    monkeypatch.setattr(first_batch_check, "free_bytes", lambda device: 1000)
    model, batch = Noisy(), torch.randn(12, 6)
    with caplog.at_level(logging.WARNING, "laminar"):
        laminar.parallelize(model, _square, adamw(model), batch=batch, device="cpu").step(batch)
    assert "the first batch is not checked against plain PyTorch" in caplog.text and "GB are free" in caplog.text


def test_a_gradient_that_is_missing_is_off_and_rounding_is_not() -> None:
    """A missing gradient is all of it; one that is zero but for rounding is measured against the others."""
    want = {"grad:a": torch.ones(100), "grad:b": torch.full((4,), 1e-9)}
    assert [o.name for o in off({"grad:b": torch.zeros(4)}, want, 1e-4)] == ["grad:a"]
    assert not off({"grad:a": torch.ones(100) * (1 + 1e-6)}, want, 1e-4)
    small = {"grad:a": torch.ones(100), "grad:b": torch.full((4,), 1e-3)}
    assert [o.name for o in off({"grad:a": torch.ones(100)}, small, 1e-4)] == ["grad:b"]
    nothing = {"loss:loss": torch.tensor(1.0).double(), "grad:a": torch.full((4,), 4e-17).double()}
    assert not off({**nothing, "grad:a": -nothing["grad:a"]}, nothing, 1e-8)
    assert off({**nothing, "grad:a": torch.full((4,), 1e-14).double()}, nothing, 1e-8)

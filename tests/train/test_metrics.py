"""What a loss returns beside the loss, and what an evaluation measures: over the global batch, as plain PyTorch has it.

Functions whose names begin with an underscore are what a rank does.
"""

from __future__ import annotations

import copy
import types
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar import events
from laminar.errors import CaptureError, LaminarError
from tests.support.rank_pool import Ranks

Named = namedtuple("Named", "accuracy loss")


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    accuracy: Tensor


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).double()


def data(n: int, samples: int = 10, seed: int = 1) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(samples, 6, generator=g).double(), "y": torch.randint(5, (samples,), generator=g)}
        for _ in range(n)
    ]


def parts(model: Any, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, the loss, the share of right answers, and which samples count at all."""
    logits = model(batch["x"])
    right = logits.argmax(-1) == batch["y"]
    return logits, F.cross_entropy(logits, batch["y"]), right.double().mean(), batch["y"] < 2


def by_name(model: Any, batch: Any) -> dict[str, Any]:
    """Means, a count over a count that is uneven over samples, and what nobody can report."""
    logits, loss, accuracy, some = parts(model, batch)
    right = logits.argmax(-1) == batch["y"]
    few = laminar.Loss((right & some).sum(), some.sum())
    return {"logits": logits, "accuracy": accuracy, "loss": loss, "few": few, "inner": {"most": logits.amax(-1).mean()}}


def weighted(model: Any, batch: Any) -> dict[str, Any]:
    """The loss itself is a total over a weight."""
    found = by_name(model, batch)
    some = batch["y"] < 2
    losses = F.cross_entropy(found["logits"], batch["y"], reduction="none")
    return {**found, "loss": laminar.Loss((losses * some).sum(), some.sum())}


def value(metric: Any) -> float:
    return float(metric.total.double() / metric.weight) if isinstance(metric, laminar.Loss) else float(metric)


def wanted(loss: Any, model: nn.Module, batch: Any) -> tuple[float, dict[str, float]]:
    """By plain PyTorch, on the whole batch."""
    with torch.no_grad():
        found = loss(model, batch)
    return value(found["loss"]), {
        "accuracy": value(found["accuracy"]),
        "few": value(found["few"]),
        "inner.most": value(found["inner"]["most"]),
    }


def close(got: dict[str, float], want: dict[str, float]) -> None:
    assert got.keys() == want.keys()
    assert got == pytest.approx(want, rel=1e-9), (got, want)


def _trained(plan: str, loss: Any, micro_batches: int) -> None:
    batches = [*data(3), *data(1, 9, seed=5)]
    model = net()
    other = copy.deepcopy(model)
    if plan == "stages":
        part = laminar.capture(model, loss, {k: v[:5] for k, v in batches[0].items()})
        plan, more = laminar.plans.pipeline(part, 2, 2), {}
    else:
        more = {"micro_batches": micro_batches}
    job = laminar.parallelize(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.5), batch=batches[0], plan=plan, device="cpu", **more
    )
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    for batch in batches:
        result = job.step(batch)
        mean, metrics = wanted(loss, other, batch)
        assert result.loss == pytest.approx(mean, rel=1e-9)
        close(result.metrics, metrics)
        found = loss(other, batch)["loss"]
        optimizer.zero_grad()
        (found.total / found.weight if isinstance(found, laminar.Loss) else found).backward()
        optimizer.step()
    for a, b in zip(job.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    _evaluated(job, loss, other, [*data(2, 10, seed=8), *data(1, 6, seed=9)])


def _evaluated(job: Any, loss: Any, other: nn.Module, batches: list[Any]) -> None:
    """Over batches of different sizes: every sample counts once, and every weight."""
    metrics = {
        "top": lambda model, batch: (
            (model(batch["x"]).topk(2, -1).indices == batch["y"][:, None]).any(-1).double().mean()
        ),
        "ones": lambda model, batch: laminar.Loss(
            ((batch["y"] == 1) & (model(batch["x"]).argmax(-1) == 1)).sum(), (batch["y"] == 1).sum()
        ),
    }
    whole = {k: torch.cat([b[k] for b in batches]) for k in ("x", "y")}
    mean, want = wanted(loss, other, whole)
    with torch.no_grad():
        more = {name: value(f(other, whole)) for name, f in metrics.items()}
    found = job.evaluate(batches, metrics=metrics)
    assert isinstance(found, float) and found == pytest.approx(mean, rel=1e-9)
    close(found.metrics, {**want, **more})
    close(job.evaluate(batches).metrics, want)


NORMAL = {("zero3", 3, by_name), ("ddp", 1, weighted), ("stages", 2, weighted)}
CASES = [
    pytest.param(*case, marks=() if case in NORMAL else pytest.mark.slow)
    for plan, parts in (("data", 1), ("zero3", 3), ("tensor", 2), ("ddp", 1), ("stages", 2))
    for case in ((plan, parts, by_name), (plan, parts, weighted))
]


@pytest.mark.parametrize(("plan", "micro_batches", "loss"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_metrics_are_those_of_the_global_batch(two: Ranks, loss: Any, plan: str, micro_batches: int) -> None:
    """A mean of means would be another number wherever parts or ranks are uneven."""
    two.run(_trained, plan, loss, micro_batches)


@pytest.mark.parametrize("plan", ["data", "ddp"])
@pytest.mark.filterwarnings("ignore")
def test_what_trains_is_the_first_entry_or_the_one_called_loss(plan: str) -> None:
    """Of tuples, dicts, and whatever has fields."""
    kinds: dict[str, tuple[Any, set[str]]] = {
        "tuple": (lambda logits, loss, accuracy: (loss, accuracy, logits), {"1"}),
        "list and dict": (lambda logits, loss, accuracy: [loss, {"accuracy": accuracy}, None], {"accuracy"}),
        "first of a dict": (lambda logits, loss, accuracy: {"nll": loss, "accuracy": accuracy}, {"accuracy"}),
        "named tuple": (lambda logits, loss, accuracy: Named(accuracy, loss), {"accuracy"}),
        "dataclass": (lambda logits, loss, accuracy: Output(loss, logits, accuracy), {"accuracy"}),
        "namespace": (lambda logits, loss, accuracy: types.SimpleNamespace(a=accuracy, loss=loss), {"a"}),
    }
    (batch,) = data(1)
    for name, (make, names) in kinds.items():
        model = net()
        other = copy.deepcopy(model)

        def loss(model: Any, batch: Any, make: Any = make) -> Any:
            return make(*parts(model, batch)[:3])

        job = laminar.parallelize(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.5), batch=batch, plan=plan, device="cpu"
        )
        result = job.step(batch)
        _, mean, accuracy, _ = parts(other, batch)
        assert result.loss == pytest.approx(mean.item(), rel=1e-12), name
        assert result.metrics == {n: pytest.approx(accuracy.item()) for n in names}, name
        mean.backward()
        with torch.no_grad():
            want = other[0].weight - 0.5 * other[0].weight.grad
        assert torch.allclose(job.state_dict()["0.weight"], want, rtol=1e-12), name


def test_outputs_of_transformers_are_losses() -> None:
    """`model(**batch)` computes its own loss; without labels there is none, and the word for that is said."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    model = GPT2LMHeadModel(config)
    ids = torch.randint(17, (2, 8))
    want = model(input_ids=ids, labels=ids).loss.item()
    graph = laminar.capture(model, lambda model, batch: model(**batch), {"input_ids": ids, "labels": ids})
    assert [o.name for o in graph.outputs if o.kind in ("loss", "metric")] == ["loss"]
    job = laminar.parallelize(
        model,
        lambda model, batch: model(**batch),
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch={"input_ids": ids, "labels": ids},
        device="cpu",
    )
    assert job.step({"input_ids": ids, "labels": ids}).loss == pytest.approx(want, rel=1e-5)
    with pytest.raises(CaptureError, match="without a loss"):
        laminar.capture(model, lambda model, batch: model(**batch), {"input_ids": ids})


def test_metrics_may_be_parameters_and_repeat_the_loss() -> None:
    """A temperature that is learned is a metric as it stands, and so is the loss under another name."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 5), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    def loss(model: Any, batch: Any) -> Any:
        mean = F.cross_entropy(model(batch["x"]), batch["y"])
        return {"loss": mean, "again": mean, "scale": model.scale, "fixed": torch.tensor(3.0)}

    (batch,) = data(1)
    batch = {"x": batch["x"].float(), "y": batch["y"]}
    for micro_batches in (1, 2):
        model = Scaled()
        job = laminar.parallelize(
            model,
            loss,
            torch.optim.SGD(model.parameters(), lr=0.5),
            batch=batch,
            device="cpu",
            micro_batches=micro_batches,
        )
        result = job.step(batch)
        assert result.metrics == {"again": pytest.approx(result.loss), "scale": 2.0, "fixed": 3.0}


def test_what_can_not_be_a_metric_is_refused_by_name() -> None:
    """A number of Python's would be the same for ever; a metric for each sample has no mean that is ours to choose."""
    (batch,) = data(1)
    model = net()
    with pytest.raises(CaptureError, match=r"returns epoch as a Python number(.|\n)*job\.log\(epoch="):
        laminar.capture(model, lambda m, b: {"loss": m(b["x"]).mean(), "epoch": 3}, batch)
    with pytest.raises(CaptureError, match="empty dict"):
        laminar.capture(model, lambda m, b: {}, batch)
    job = laminar.parallelize(
        model, lambda m, b: m(b["x"]).mean(), torch.optim.SGD(model.parameters(), lr=0.1), batch=batch, device="cpu"
    )
    with pytest.raises(CaptureError, match=r"the metric each is of shape \(10,\)"):
        job.evaluate([batch], metrics={"each": lambda m, b: m(b["x"]).amax(-1)})
    with pytest.raises(LaminarError, match="can't be called loss"):
        job.evaluate([batch], metrics={"loss": lambda m, b: m(b["x"]).mean()})


def test_numbers_of_the_users_own_are_events() -> None:
    """With the number of steps made; what is no number is refused."""
    (batch,) = data(1)
    model = net()
    job = laminar.parallelize(
        model, lambda m, b: m(b["x"]).mean(), torch.optim.SGD(model.parameters(), lr=0.1), batch=batch, device="cpu"
    )
    job.step(batch)
    heard: list[events.Event] = []
    with events.listening(heard.append):
        job.log(accuracy=0.5, tensor=torch.tensor(2))
    assert [(e.kind, e.fields) for e in heard] == [("log", {"step": 1, "values": {"accuracy": 0.5, "tensor": 2.0}})]
    with pytest.raises(LaminarError, match="name is a str"):
        job.log(name="a")


def _uneven_shares() -> None:
    """Rank 0 has 7 samples and rank 1 has 3."""
    import os

    rank = int(os.environ["RANK"])
    (batch,) = data(1)
    mine = {k: v[:7] if rank == 0 else v[7:] for k, v in batch.items()}
    model, plain = net(), net()
    job = laminar.parallelize(model, by_name, torch.optim.SGD(model.parameters(), lr=0.5), batch=batch, plan="ddp")
    result = job.step(laminar.Local(mine))
    mean, metrics = wanted(by_name, plain, batch)
    assert result.loss == pytest.approx(mean, rel=1e-12)
    close(result.metrics, metrics)
    by_name(plain, batch)["loss"].backward()
    with torch.no_grad():
        for a, b in zip(job.state_dict().values(), plain.parameters(), strict=True):
            assert torch.allclose(a, b - 0.5 * b.grad, rtol=1e-10, atol=1e-14)
    model = net()
    job = laminar.parallelize(model, by_name, torch.optim.SGD(model.parameters(), lr=0.5), batch=batch, plan="data")
    with pytest.raises(laminar.BatchError, match=r"another batch(.|\n)*laminar\.Loss"):
        job.step(laminar.Local(mine))


@pytest.mark.filterwarnings("ignore")
def test_uneven_shares_are_weighted_or_refused(two: Ranks) -> None:
    """Under ddp by samples; a program has one shape for all ranks, and says what to do."""
    two.run(_uneven_shares)

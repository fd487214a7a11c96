"""What changes between steps reaches the next step, as it does in plain PyTorch, or is refused by name.

Every change here is made to a job's model and to a twin that trains in plain PyTorch; both must go on alike. Whatever
can hold a number that a step reads is tried: attributes, containers, configs, classes, hooks, cells, globals.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar import events
from laminar.errors import CaptureError, LaminarError, StateError
from laminar.train.engine import tracer
from tests.support.rank_pool import Ranks

FACTOR = 1.0
TABLE = {"a": 1.0}


@dataclass
class Config:
    """A config as people write them."""

    power: float = 1.0
    inner: list[dict[str, float]] = field(default_factory=lambda: [{"shift": 0.0}])


@dataclass(slots=True)
class Slim:
    """One without a dict."""

    gain: float = 1.0


class Base(nn.Module):
    """A class with a number of its own."""

    slope = 1.0


class Net(Base):
    """Reads numbers from wherever they can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.0)
        self.tau: Any = 1
        self.scales = [1.0, 1.0]
        self.options: dict[str, Any] = {"sign": 1.0}
        self.config, self.slim = Config(), Slim()
        self.register_buffer("offset", torch.zeros(3, dtype=torch.float64))
        self.plain = torch.ones(3, dtype=torch.float64)
        self.steps_done = 0
        self.last: Any = None
        self.history: list[int] = []
        self.record: dict[str, Any] = {"loss": None}

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.up(x))) * self.scales[1] * self.options["sign"] * self.slope
        x = self.down(x) / self.tau + self.offset + self.config.inner[0]["shift"]
        return helped(x * self.plain * self.slim.gain) * self.config.power


def helped(x: Tensor) -> Tensor:
    return x * TABLE["a"]


def loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean() * FACTOR


def _global(model: nn.Module, value: float) -> None:
    globals()["FACTOR"] = value


def _hooked(model: Any) -> None:
    model.act.register_forward_hook(lambda m, args, out: out * 0.5)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda m: setattr(m, "tau", 0.2),
    "a number of another type": lambda m: setattr(m, "tau", torch.tensor(2.0, dtype=torch.float64)),
    "an entry of a list": lambda m: m.scales.__setitem__(1, 0.3),
    "an entry of a dict": lambda m: m.options.update(sign=-1.5),
    "a config": lambda m: setattr(m.config, "power", 2.0),
    "deep in a config": lambda m: m.config.inner[0].update(shift=0.7),
    "an object with slots": lambda m: setattr(m.slim, "gain", 0.6),
    "another config": lambda m: setattr(m, "config", Config(power=3.0)),
    "an attribute that hides the class's": lambda m: setattr(m, "slope", 0.4),
    "a mode": lambda m: m.drop.eval(),
    "a hook": _hooked,
    "a module": lambda m: setattr(m, "act", nn.Tanh()),
    "a buffer": lambda m: setattr(m, "offset", torch.full((3,), 0.5, dtype=torch.float64)),
    "a tensor": lambda m: setattr(m, "plain", torch.full((3,), 0.5, dtype=torch.float64)),
    "a tensor in place": lambda m: m.plain.fill_(0.25),
    "a frozen weight": lambda m: m.up.weight.requires_grad_(False),
    "a method": lambda m: setattr(m, "forward", lambda x: m.down(m.up(x))),
}


def _pair(loss: Any = loss, **options: Any) -> tuple[Any, Any, Callable[[], None], Tensor]:
    """A job's model, its twin in plain PyTorch, and a step of both that compares them."""
    torch.manual_seed(0)
    model = Net().double()
    twin = copy.deepcopy(model)
    batch = torch.randn(6, 4, dtype=torch.float64)
    job = laminar.parallelize(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch=batch, device="cpu", **options
    )
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)

    def step() -> None:
        result = job.step(batch)
        optimizer.zero_grad()
        want = loss(twin, batch)
        want.backward()
        optimizer.step()
        assert abs(result.loss - want.item()) <= 1e-12 * max(1.0, abs(want.item()))
        for name, value in twin.state_dict().items():
            assert torch.allclose(job.state_dict()[name], value, rtol=1e-11, atol=1e-13), name

    step.job = job  # type: ignore[attr-defined]
    return model, twin, step, batch


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_reaches_the_next_step(what: str) -> None:
    """Whatever holds it, a number that forward reads is the one it has when the step begins."""
    model, twin, step, _ = _pair()
    step()
    for each in (model, twin):
        CHANGES[what](each)
    step()
    step()


@pytest.mark.parametrize("of", ["a class", "a global", "a table behind a function", "a function"])
def test_a_change_outside_of_the_model_reaches_the_next_step(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes and globals are shared by the model and its twin."""
    _, _, step, _ = _pair()
    step()
    if of == "a class":
        monkeypatch.setattr(Base, "slope", 0.3)
    elif of == "a global":
        monkeypatch.setitem(globals(), "FACTOR", 0.3)
    elif of == "a table behind a function":
        monkeypatch.setitem(TABLE, "a", 0.3)
    else:
        monkeypatch.setitem(globals(), "helped", lambda x: x.tanh())
    step()


class Weighing:
    """A loss that is an object."""

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, model: Any, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * self.weight

    def method(self, model: Any, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * self.weight


class Module(nn.Module):
    """A loss that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def forward(self, model: Any, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * self.weight


def _closure() -> tuple[Any, Callable[[float], None]]:
    weight = 1.0

    def inner(model: Any, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * weight

    def change(to: float) -> None:
        nonlocal weight
        weight = to

    return inner, change


def _losses() -> dict[str, tuple[Any, Callable[[float], Any]]]:
    call, method, module = Weighing(), Weighing(), Module()
    state = {"w": 1.0}
    tensor = torch.ones((), dtype=torch.float64)
    teacher = nn.Linear(4, 3, dtype=torch.float64).requires_grad_(False)

    def weighed(model: Any, batch: Tensor, *, by: dict[str, float]) -> Tensor:
        return model(batch).square().mean() * by["w"]

    def by_default(model: Any, batch: Tensor, by: Any = state) -> Tensor:
        return model(batch).square().mean() * by["w"]

    def by_tensor(model: Any, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * tensor

    def teach(to: float) -> None:
        with torch.no_grad():
            teacher.bias.fill_(to)

    def by_teacher(model: Any, batch: Tensor) -> Tensor:
        return (model(batch) - teacher(batch).detach()).square().mean()

    inner, change = _closure()
    return {
        "a cell": (inner, change),
        "an object": (call, lambda to: setattr(call, "weight", to)),
        "a bound method": (method.method, lambda to: setattr(method, "weight", to)),
        "a module": (module, lambda to: setattr(module, "weight", to)),
        "a partial": (functools.partial(weighed, by=state), lambda to: state.update(w=to)),
        "a default": (by_default, lambda to: state.update(w=to)),
        "a tensor": (by_tensor, lambda to: tensor.fill_(to)),
        "a teacher": (by_teacher, teach),
    }


@pytest.mark.parametrize("kind", list(_losses()))
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_change_in_the_loss_reaches_the_next_step(kind: str, precision: str) -> None:
    """A loss may keep its numbers in cells, defaults, objects, partials, tensors and modules of its own."""
    found, change = _losses()[kind]
    if precision == "bf16":  # the loss stands inside of another function there
        torch.manual_seed(0)
        model, batch = Net().double(), torch.randn(6, 4, dtype=torch.float64)
        job = laminar.parallelize(
            model, found, torch.optim.SGD(model.parameters(), lr=0.0), batch=batch, device="cpu", precision="bf16"
        )
        first = job.step(batch).loss
        change(0.25)
        assert kind == "a teacher" or job.step(batch).loss == pytest.approx(first * 0.25, rel=1e-2)
        return
    _, _, step, _ = _pair(found)
    step()
    change(0.25)
    step()


def _captures(call: Callable[[], Any]) -> int:
    seen: list[str] = []
    listener = events.subscribe(lambda e: seen.append(e.fields["name"]) if e.kind == "phase" else None)
    call()
    events.unsubscribe(listener)
    return seen.count("capturing")


def test_what_nobody_reads_costs_nothing() -> None:
    """A counter that the training loop keeps in the model, a tensor it leaves there: no capture, no word."""
    model, _, step, _ = _pair()
    step()

    def some() -> None:
        for i in range(3):
            model.steps_done = i
            model.last = torch.randn(3)
            model.extra = [i]
            model.history.append(i)
            model.record["loss"] = i
            step()

    assert _captures(some) == 0
    walks = step.job.tracer.captures.guards.walks  # type: ignore[attr-defined]
    some()
    assert step.job.tracer.captures.guards.walks == walks  # type: ignore[attr-defined]


def test_going_back_hits_what_is_compiled() -> None:
    """Values that alternate are captured once each, and so are modes."""
    model, twin, step, batch = _pair()
    step()

    def alternate() -> None:
        for tau in (2.0, 3.0, 2.0, 3.0, 2):
            model.tau = twin.tau = tau
            step()
        for _ in range(2):
            step.job.evaluate([batch])  # type: ignore[attr-defined]
            step()

    assert _captures(alternate) == 4  # 2.0, 3.0, the whole number 2, and evaluation


def test_a_graph_from_an_earlier_run_has_its_guards(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no trace was made because the graph was kept, what it had read is known all the same."""
    monkeypatch.setenv("LAMINAR_CACHE", str(tmp_path))
    graphs: dict[Any, Any] = {}

    def kept_graph(model: Any, loss: Any, leaves: Any, tree: Any, how: Any, make: Any, predictor: Any) -> Any:
        key = model.tau
        if key not in graphs:
            graphs[key] = make()
        return graphs[key]

    monkeypatch.setattr(tracer, "kept_graph", kept_graph)
    for again in (False, True):
        model, twin, step, _ = _pair()
        step()
        assert (step.job.tracer.captures._reads is None) == again  # type: ignore[attr-defined]
        model.steps_done = 3
        assert _captures(step) == 0
        model.tau = twin.tau = 0.5
        assert _captures(step) == 1


def test_the_same_graph_is_not_compiled_again() -> None:
    """A value that was read and makes no difference costs a capture, not a compilation."""

    def reads(model: Any, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * (1.0 if model.steps_done >= 0 else 2.0)

    model, twin, step, _ = _pair(reads)
    step()
    before = dict(step.job.engine._ready)  # type: ignore[attr-defined]
    model.steps_done = twin.steps_done = 5
    assert _captures(step) == 1
    assert step.job.engine._ready == before  # type: ignore[attr-defined]


def test_a_value_that_changes_all_the_time_is_named_with_the_ways_out(caplog: pytest.LogCaptureFixture) -> None:
    """Each change costs a capture: the user hears which value it is, what it costs, and what to do."""
    model, twin, step, _ = _pair()
    with caplog.at_level(logging.WARNING, "laminar"):
        for tau in (1, 2, 3, 4):
            model.tau = twin.tau = tau
            step()
    assert "tau has changed 3 times (it is 4 now)" in caplog.text
    assert 'unguarded=["tau"]' in caplog.text and "buffer" in caplog.text


def test_what_is_unguarded_is_left_alone() -> None:
    """Whoever says that a value does not matter is believed."""
    model, _, step, _ = _pair(unguarded=["steps_done", "config.power"])
    step()
    model.config.power = 7.0
    assert _captures(step) == 0


def _counting(matters: bool) -> Any:
    count = 0

    def counted(model: Any, batch: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return model(batch).square().mean() * (count if matters else 1.0)

    return counted


def test_a_step_that_counts_in_python_is_refused_if_that_matters(caplog: pytest.LogCaptureFixture) -> None:
    """A captured step runs no Python: a counter in the loss would stand still."""
    with pytest.raises(CaptureError, match=r"the step changes loss\.count"):
        _pair(_counting(True))
    with caplog.at_level(logging.WARNING, "laminar"):
        _, _, step, batch = _pair(_counting(False))
    assert "loss.count changes while a step is captured" in caplog.text
    assert _captures(lambda: [step.job.step(batch) for _ in range(2)]) == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda m: setattr(m.up, "weight", nn.Parameter(torch.ones(8, 4).double())),
            "parameter up.weight of the model",
        ),
        (lambda m: setattr(m, "more", nn.Linear(3, 3)), "parameter more.weight of the model is new"),
        (lambda m: delattr(m.down, "bias"), "parameter down.bias of the model is gone"),
        (lambda m: m.register_buffer("offset", torch.zeros(1).double()), "buffer offset of the model is another"),
    ],
)
def test_tensors_that_the_job_holds_are_not_replaced(change: Callable[[Any], Any], words: str) -> None:
    """The optimizer would go on with the old parameter: refused by name, with the way to change it."""
    model, _, step, _ = _pair()
    step()
    change(model)
    with pytest.raises(StateError, match=words) as error:
        step()
    assert "in place" in str(error.value)


def test_autocast_around_a_step_is_refused() -> None:
    """A compiled step would not see it."""
    _, _, step, _ = _pair()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(LaminarError, match="autocast") as error:
        step()
    assert "precision=" in str(error.value)


# --- several ranks ---------------------------------------------------------------------------------


def _ranks(plan: Any, one_sided: bool) -> str:
    torch.manual_seed(0)
    model = Net().double()
    twin = copy.deepcopy(model)
    batch = torch.randn(6, 4, dtype=torch.float64)
    if plan == "stages":
        plan = laminar.plans.pipeline(laminar.capture(model, loss, batch[:3]), 2, microbatches=2)
    job = laminar.parallelize(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch=batch, plan=plan, device="cpu"
    )
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for tau in (1, 0.5, 0.25, 0.5):
        twin.tau = tau
        if not one_sided or job.rank == 0:
            model.tau = tau
        try:
            result = job.step(batch)
        except LaminarError as error:
            return str(error)
        want = loss(twin, batch)
        optimizer.zero_grad()
        want.backward()
        optimizer.step()
        assert abs(result.loss - want.item()) < 1e-12
    whole = job.state_dict()
    assert all(torch.allclose(whole[n], t, rtol=1e-11, atol=1e-13) for n, t in twin.state_dict().items())
    return "equal"


@pytest.mark.parametrize("plan", ["zero3", "tensor", "stages"])
def test_changes_are_followed_on_every_layout(two: Ranks, plan: str) -> None:
    """Recaptured on all ranks with the plan's decisions kept."""
    assert two.run(_ranks, plan, False) == ["equal", "equal"]

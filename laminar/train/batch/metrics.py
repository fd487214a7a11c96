"""What comes out of steps and evaluations besides weights: losses, metrics, and what a user adds to them.

Numbers stay on the device until they are read. Metrics are what the loss function returns beside the loss
(`capture/model/losses.py`), over the global batch, the same on every rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from laminar.errors import LaminarError
from laminar.events import emit


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model evaluates inside; afterwards each of its modules is in the mode it was in."""
    training = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode


class Result:
    """What a step came to. Numbers stay on the device until they are read."""

    def __init__(
        self,
        made: int,
        loss: Tensor,
        norm: Tensor,
        lr: float,
        clock: Callable[[], float],
        skipped: bool,
    ):
        self.step, self.lr, self.skipped = made + 1, lr, skipped
        """`made` steps came before; `step` counts from 1, as in events and on the screen. A skipped step changed
        nothing: its gradient was not finite."""
        self._loss, self._norm, self._clock = loss, norm, clock
        self._metrics: Mapping[str, Any] = {}

    def attach(self, metrics: Mapping[str, Any]) -> Result:
        """The same with metrics, which a job knows apart from the rest."""
        self._metrics = metrics
        return self

    @property
    def loss(self) -> float:
        """The loss of the global batch."""
        return float(self._loss)

    @property
    def metrics(self) -> dict[str, float]:
        """What the loss function returned beside the loss, of the global batch."""
        return {name: float(value) for name, value in self._metrics.items()}

    @property
    def grad_norm(self) -> float:
        """The norm of the whole gradient, before clipping."""
        return float(self._norm)

    @property
    def seconds(self) -> float:
        """How long the step took on this rank."""
        return self._clock()

    def __repr__(self) -> str:
        more = "".join(f", {name}={value:.6g}" for name, value in self.metrics.items())
        return f"Result(step={self.step}, loss={self.loss:.6g}, grad_norm={self.grad_norm:.4g}, lr={self.lr:.4g}{more})"


class Evaluation(float):
    """The loss over the batches of an evaluation, a float like any other, and the metrics over them."""

    metrics: dict[str, float]

    def __new__(cls, loss: float, metrics: Mapping[str, float] | None = None) -> Evaluation:
        self = super().__new__(cls, loss)
        self.metrics = dict(metrics or {})
        return self

    @property
    def loss(self) -> float:
        """The same number."""
        return float(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Evaluation, (float(self), self.metrics)

    def __repr__(self) -> str:
        more = "".join(f", {name}={value:.6g}" for name, value in self.metrics.items())
        return f"Evaluation(loss={float(self):.6g}{more})"


class Sums:
    """Totals and weights of an evaluation, added up batch by batch where the values lie."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[Any, Any]] = {}

    @staticmethod
    def of(found: Mapping[str, tuple[Any, Any]]) -> Sums:
        """Totals and weights by name."""
        sums = Sums()
        sums.by_name.update(found)
        return sums

    def add(self, name: str, total: Any, weight: Any) -> None:
        """A part of what `name` is the mean of; the loss is called ""."""
        have = self.by_name.get(name, (0.0, 0.0))
        self.by_name[name] = have[0] + _wide(total), have[1] + _wide(weight)

    def add_outputs(self, values: Mapping[str, Any], samples: int) -> None:
        """The outputs of a graph by `kind:name`, for so many samples."""
        from laminar.capture.model.losses import MEAN_PREFIX, TOTAL_PREFIX, WEIGHT_PREFIX

        if "metric:loss_weight" in values:
            self.add("", values["metric:loss_total"], values["metric:loss_weight"])
        else:
            self.add("", _wide(values["loss:loss"]) * samples, samples)
        for key, value in values.items():
            name = key.removeprefix("metric:")
            if name.startswith(MEAN_PREFIX):
                self.add(name[len(MEAN_PREFIX) :], _wide(value) * samples, samples)
            elif name.startswith(TOTAL_PREFIX):
                name = name[len(TOTAL_PREFIX) :]
                self.add(name, value, values[f"metric:{WEIGHT_PREFIX}{name}"])

    @property
    def evaluation(self) -> Evaluation:
        """All of it, divided."""
        found = {n: float(total / weight) if float(weight) else math.nan for n, (total, weight) in self.by_name.items()}
        return Evaluation(found.pop("", math.nan), found)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


def log_numbers(step: int, values: Mapping[str, Any]) -> None:
    """Numbers of a user's own into the events of the run, with the step's number."""
    numbers = {}
    for name, value in values.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            raise LaminarError(
                f"{name} is a {type(value).__name__}, not a number", next="log a number or a scalar tensor"
            ) from None
    emit("log", step=step, values=numbers)

"""What a loss function may return: what of it trains, and what is reported beside it.

    loss                                   a scalar
    laminar.Loss(total, weight)            totals and weights are summed over everything, and divided once
    {"loss": loss, "accuracy": accuracy}   the entry called `loss` trains, or the first
    (loss, {"accuracy": accuracy})         the first entry trains; the others are called "1", "2", ..., or as in a dict
    an object with fields                  a named tuple, a dataclass, a ModelOutput of transformers: as a dict

What trains is a scalar or a `Loss`. Of the rest, scalars and `Loss`es are metrics, and in dicts inside of it; anything
else (logits, caches, None) is for nobody to report. A scalar metric is taken for a mean over samples, as a scalar loss
is. In a graph metrics are outputs under names that say how they add up (`MEAN_PREFIX`, `TOTAL_PREFIX`,
`WEIGHT_PREFIX`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laminar.errors import CaptureError, LaminarError

Metrics = Mapping[str, Callable[[Any, Any], Any]]
"""Functions of model and batch by name, each with a result like a loss's."""
MEAN_PREFIX, TOTAL_PREFIX, WEIGHT_PREFIX = "mean/", "total/", "weight/"
"""How a metric's name begins in a graph: a mean over samples; a total and the weight it is divided by."""


@dataclass(frozen=True)
class Loss:
    """A loss as a total and a weight: both are summed over everything, then divided once."""

    total: Tensor
    weight: Tensor


def read_loss(result: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """What a loss function returned: the loss, what is differentiated where gradients are scaled, and metrics."""
    trains, rest = taken_apart(result)
    metrics: dict[str, Tensor] = {}
    value = total = trains
    if isinstance(trains, Loss):
        total, weight = trains.total, _weight(trains)
        value, metrics = total / weight, {"loss_total": total, "loss_weight": weight}
    for name, metric in rest.items():
        if isinstance(metric, Loss):
            metrics[TOTAL_PREFIX + name], metrics[WEIGHT_PREFIX + name] = _sum(metric.total), _sum(_weight(metric))
        else:
            metrics[MEAN_PREFIX + name] = metric.detach() if metric.is_floating_point() else metric.detach().double()
    return value, total, metrics


def weighed(value: Tensor | Loss, samples: int) -> tuple[Tensor, Tensor]:
    """A loss or a metric of so many samples as a total and a weight."""
    if isinstance(value, Loss):
        return value.total, _weight(value).to(value.total.device)
    return value * samples, torch.tensor(float(samples), dtype=torch.float64, device=value.device)


def taken_apart(result: Any) -> tuple[Any, dict[str, Tensor | Loss]]:
    """What trains, and metrics by name."""
    items = _fields(result)
    if items is None:
        return result, {}
    names = [name for name, _ in items]
    if "loss" not in names and getattr(result, "loss", items) is None:
        raise CaptureError(
            f"the loss function returned a {type(result).__name__} without a loss",
            next="give the model what it computes one from, such as labels; or compute it from the outputs",
        )
    if not items:
        raise CaptureError(
            f"the loss function returned an empty {type(result).__name__}",
            next="return a scalar tensor or laminar.Loss",
        )
    at = names.index("loss") if "loss" in names else 0
    numbered = type(result) in (list, tuple)
    return items[at][1], dict(_metrics([item for i, item in enumerate(items) if i != at], numbered))


def with_metrics(loss: Callable[[Any, Any], Any], metrics: Metrics) -> Callable[[Any, Any], Any]:
    """A loss function that returns what these functions give as well."""
    if "loss" in metrics:
        raise LaminarError("a metric can't be called loss", next="the loss is there without asking")

    def both(model: Any, batch: Any) -> dict[str, Any]:
        trains, rest = taken_apart(loss(model, batch))
        out = {"loss": trains, **rest}
        for name, metric in metrics.items():
            value = out[name] = metric(model, batch)
            if not isinstance(value, Loss | Mapping) and not (isinstance(value, Tensor) and not value.dim()):
                what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise CaptureError(
                    f"the metric {name} is {what}",
                    allowed="a scalar tensor (a mean over the batch), laminar.Loss(total, weight), or a dict of them",
                )
        return out

    return both


def identity(function: Any) -> Any:
    """What tells functions apart: a lambda that is written down in a loop is the same one each time."""
    code = getattr(function, "__code__", None)
    if code is None or function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        return function
    return code, id(function.__globals__)


def is_mean(key: str) -> bool:
    """Whether an output (`kind:name`) is a mean over samples, to be weighted by them; others are sums."""
    return key == "loss:loss" or key.startswith(f"metric:{MEAN_PREFIX}")


def is_metric(key: str) -> bool:
    """Whether an output (`kind:name`) is a metric of the user's, on which nothing else depends."""
    return key.startswith(tuple(f"metric:{kind}" for kind in (MEAN_PREFIX, TOTAL_PREFIX, WEIGHT_PREFIX)))


def reported(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The user's metrics among outputs by `kind:name`: means as they are, totals over weights."""
    out: dict[str, Tensor] = {}
    for key, value in values.items():
        kind, _, name = key.partition(":")
        if kind == "metric" and name.startswith(MEAN_PREFIX):
            out[name[len(MEAN_PREFIX) :]] = value
        elif kind == "metric" and name.startswith(TOTAL_PREFIX):
            name = name[len(TOTAL_PREFIX) :]
            out[name] = value.double() / values[f"metric:{WEIGHT_PREFIX}{name}"]
    return out


def _fields(result: Any) -> list[tuple[str, Any]] | None:
    """The entries of what has some, by name."""
    if isinstance(result, Tensor | Loss):
        return None
    if isinstance(result, Mapping):
        return [(str(k), v) for k, v in result.items()]
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return [(f.name, getattr(result, f.name)) for f in dataclasses.fields(result)]
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return list(zip(result._fields, result, strict=True))
    if isinstance(result, list | tuple):
        return [(str(i), v) for i, v in enumerate(result)]
    return list(vars(result).items()) if hasattr(result, "loss") and hasattr(result, "__dict__") else None


def _metrics(items: list[tuple[str, Any]], numbered: bool = False) -> Iterator[tuple[str, Tensor | Loss]]:
    for name, value in items:
        if isinstance(value, Loss) or (isinstance(value, Tensor) and not value.dim() and not value.is_complex()):
            yield name, value
        elif isinstance(value, Mapping):
            for inner, metric in _metrics([(str(k), v) for k, v in value.items()]):
                yield inner if numbered else f"{name}.{inner}", metric
        elif isinstance(value, int | float) and type(value) is not bool:
            raise CaptureError(
                f"the loss function returns {name} as a Python number: a captured step would return {value!r} for ever",
                next=f"leave it out, and say job.log({name}=...) beside the step; metrics are scalar tensors",
            )


def _sum(value: Tensor) -> Tensor:
    """A term of a sum; a truth is none."""
    value = value.detach()
    return value.double() if value.dtype == torch.bool else value


def _weight(loss: Loss) -> Tensor:
    return loss.weight if isinstance(loss.weight, Tensor) else torch.tensor(float(loss.weight))

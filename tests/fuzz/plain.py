"""Programs in plain PyTorch: the whole batch, in parts, in other precisions, from weights off by a last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import laminar
from laminar.api import micro_batches
from laminar.capture.model.model_tensors import slots_of
from laminar.runtime.check.plain_model import Keyed
from laminar.train.optimizer.precision import Precision
from tests.fuzz.program import Program


def optimizer_of(name: str) -> Any:
    """A function that makes it; epsilons are large, so that a gradient of rounding alone moves nothing."""
    o = torch.optim
    return {
        "sgd": lambda p, **k: o.SGD(p, lr=0.05, **k),
        "momentum": lambda p, **k: o.SGD(p, lr=0.03, momentum=0.9, weight_decay=0.01, **k),
        "nesterov": lambda p, **k: o.SGD(p, lr=0.03, momentum=0.8, nesterov=True, **k),
        "adam": lambda p, **k: o.Adam(p, lr=0.02, eps=1e-2, **k),
        "adamw": lambda p, **k: o.AdamW(p, lr=0.02, eps=1e-2, **k),
        "adagrad": lambda p, **k: o.Adagrad(p, lr=0.02, eps=1e-1, **k),
        "rmsprop": lambda p, **k: o.RMSprop(p, lr=0.01, eps=1e-1, **k),
        "adamax": lambda p, **k: o.Adamax(p, lr=0.02, eps=1e-1, **k),
        "nadam": lambda p, **k: o.NAdam(p, lr=0.02, eps=1e-2, **k),
    }[name]


def model_of(space: Mapping[str, Any], program: Program) -> nn.Module:
    """The program's model, always the same."""
    torch.manual_seed(program.seed % 2**31)
    return space["Model"]().to(getattr(torch, program.dtype))  # type: ignore[no-any-return]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of its parameters and buffers."""
    return {s.name: s.now.detach().clone() for s in slots_of(model) if isinstance(s.now, Tensor)}


@dataclass(frozen=True)
class Trained:
    """What came of a loop: losses, and the model's tensors before and after."""

    losses: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def value_of(result: Any) -> Tensor:
    """A loss as one number."""
    return result.total / result.weight if isinstance(result, laminar.Loss) else result


def plain(program: Program, parts: int = 1, ulps: int = 0, draw: int = 0) -> Trained:
    """An ordinary loop. In `parts`: gradients are accumulated, as docs/use/train.md says.

    `ulps`: every floating parameter is moved by so many units in the last place of what the program rounds to, up or
    down as `draw` says.
    """
    space, o = program.compiled(), program.options
    model = model_of(space, program)
    before = state_of(model)
    if ulps:
        _nudge(model, ulps * torch.finfo(getattr(torch, program.rounded)).eps, draw)
    optimizer = optimizer_of(o["optimizer"])(model.parameters(), foreach=False)
    losses = []
    for i, batch in enumerate(space["batches"](o["steps"])):
        optimizer.zero_grad()
        if parts == 1:
            with Keyed(torch.tensor([0, i])).running() if "draws" in program.traits else contextlib.nullcontext():
                loss = value_of(space["loss"](model, batch))
            loss.backward()
            losses.append(float(loss.detach()))
        else:
            losses.append(_accumulated(space, model, micro_batches(batch, parts)))
        if o["clip_norm"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), o["clip_norm"], foreach=False)
        optimizer.step()
    return Trained(losses, before, state_of(model))


def _accumulated(space: Mapping[str, Any], model: nn.Module, batches: list[Any]) -> float:
    """Gradients of parts, by their share of the samples; of totals, which are divided by all weights in the end."""
    total, weights, samples = 0.0, 0.0, sum(len(b["x"]) for b in batches)
    for batch in batches:
        result = space["loss"](model, batch)
        if isinstance(result, laminar.Loss):
            result.total.backward()
            total, weights = total + float(result.total.detach()), weights + float(result.weight)
        else:
            part = result * (len(batch["x"]) / samples)
            part.backward()
            total += float(part.detach())
    if not weights:
        return total
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(weights)
    return total / weights


def _nudge(model: nn.Module, share: float, draw: int) -> None:
    generator = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                up = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
                p.add_(p.abs() * (up * share))


def in_its_precision(program: Program) -> float:
    """The first loss of plain PyTorch in the precision that the program is trained in; raises what it raises."""
    space, policy = program.compiled(), Precision.of(program.options["precision"])
    model = model_of(space, program)
    if policy.weights is not None:
        model.to(policy.weights)
    loss = policy.around(space["loss"], torch.device("cpu"))
    parts = micro_batches(space["batches"](1)[0], program.options["micro_batches"])
    parts = [{k: policy.leaf(v) for k, v in part.items()} for part in parts]
    return _accumulated({"loss": loss}, model, parts)


def size(t: Tensor) -> float:
    """The largest element."""
    return float(t.abs().max()) if t.numel() else 0.0

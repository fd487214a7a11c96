"""Whether two results of a step are the same but for rounding: judged tensor by tensor, by norms.

    ‖got - want‖  <=  tolerance * max(‖want‖, SHARE * ‖all gradients‖)

for every gradient, with a tolerance by the narrowest number in the graph. Where a tensor is off by more, the model is
asked how much of that is rounding: it runs again with weights and batch moved by a few units in the last place. Only
what is far above such noise is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from laminar.capture.model.losses import is_metric
from laminar.errors import CheckError
from laminar.ir.graph import Graph

RESULT_TOLERANCE = {"f64": 1e-8, "f32": 1e-4, "tf32": 1e-2, "f16": 2e-2, "bf16": 4e-2, "f8e4m3": 0.2, "f8e5m2": 0.4}
"""How far a tensor may be off, by the narrowest floating dtype that a step computes in."""
EPSILON = {
    "f64": 2.0**-52,
    "f32": 2.0**-23,
    "tf32": 2.0**-10,
    "f16": 2.0**-10,
    "bf16": 2.0**-7,
    "f8e4m3": 2.0**-3,
    "f8e5m2": 2.0**-2,
}
SHARE = 1e-3
"""Gradients smaller than this share of the whole gradient are measured against that: some are zero but for rounding."""
ULPS = 4
"""By how many units in the last place weights and batch are moved to see what rounding does to this model."""
NOISE_FACTOR = 10.0
"""How many times as much as that a tensor may be off."""


@dataclass(frozen=True)
class Off:
    """A tensor that is not what it should be."""

    name: str
    """`kind:name`, as outputs of a graph are called."""
    got: float
    want: float
    by: float
    """Norms: of what the program gave, of what eager gave, of their difference."""
    share: float
    """The difference, measured as tolerances are."""

    def __str__(self) -> str:
        kind, _, name = self.name.partition(":")
        if kind in ("loss", "metric"):
            return f"the {name.replace('_', ' ')} is {self.got:.9g}, in plain PyTorch {self.want:.9g}"
        what = f"the gradient of {name}" if kind == "grad" else f"buffer {name}"
        return f"{what} has norm {self.got:.6g}, in plain PyTorch {self.want:.6g} (they differ by {self.by:.3g})"


def narrowest(graph: Graph, device: torch.device) -> str:
    """The floating dtype with the fewest digits that a step computes in."""
    found = {s.dtype for n in graph.nodes for s in n.outs if s is not None and s.is_float}
    if "f32" in found and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        found.add("tf32")
    return max(found, key=EPSILON.__getitem__, default="f32")


def off(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float) -> list[Off]:
    """Outputs that differ by more than a tolerance, the worst first. One that is missing on one side counts as zero."""
    grads = [w for k, w in want.items() if k.startswith("grad:")]
    whole = math.sqrt(sum(_norm(g) ** 2 for g in grads if _finite(g)))
    nothing = NOISE_FACTOR * EPSILON["f64"] * _norm(want["loss:loss"], finite=True) if "loss:loss" in want else 0.0
    # What is below this depends on no weight.
    floor = max(SHARE * whole, nothing / tolerance if tolerance and whole <= nothing else 0.0)
    found = []
    for key in dict.fromkeys((*want, *got)):
        if is_metric(key):
            continue  # a right answer more or less, by rounding, is no error
        known = want.get(key, got.get(key))
        assert known is not None
        zero = torch.zeros((), dtype=known.dtype, device=known.device).expand(known.shape)
        a, b = got.get(key, zero), want.get(key, zero)
        if a.shape != b.shape:
            found.append(Off(key, _norm(a), _norm(b), math.inf, math.inf))
            continue
        by = distance(a, b)
        size = max(_norm(b, finite=True), floor if key.startswith("grad:") else 0.0)
        share = 0.0 if by == 0 else math.inf if size == 0 or math.isnan(by) else by / size
        if share > tolerance:
            shown = (float(a), float(b)) if not b.dim() else (_norm(a), _norm(b))
            found.append(Off(key, *shown, by, share))
    return sorted(found, key=lambda o: -o.share)


def distance(a: Tensor, b: Tensor) -> float:
    """The norm of a difference; where both are the same infinity, or not a number, there is none."""
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.detach().to(b.device, kind), b.detach().to(kind)
    both = (a == b) | ((a != a) & (b != b))
    return _norm(torch.where(both, torch.zeros((), dtype=kind, device=b.device), a - b))


def _norm(x: Tensor, finite: bool = False) -> float:
    x = x.detach()
    x = x.to(torch.complex128 if x.is_complex() else torch.float64)
    if finite:
        x = torch.where(torch.isfinite(x), x, torch.zeros((), dtype=x.dtype, device=x.device))
    return float(torch.linalg.vector_norm(x))


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def beyond_rounding(
    found: Iterable[Off], want: Mapping[str, Tensor], moved: Callable[[float, int], Mapping[str, Tensor]], narrow: str
) -> list[Off]:
    """Those of them that rounding does not explain; `moved` runs the model with its numbers changed by such a share."""
    rest = list(found)
    for seed in range(3):
        if not rest:
            return []
        other = moved(ULPS * EPSILON[narrow], seed)
        rest = [
            o
            for o in rest
            if o.name not in want
            or o.name not in other
            or not o.by <= NOISE_FACTOR * distance(other[o.name], want[o.name])
        ]
    return rest


def nudged(tensors: Mapping[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """Floating tensors, each element a little larger or smaller; others as they are."""
    out = {}
    for name, t in tensors.items():
        if t.is_floating_point() and t.numel():
            signs = torch.randint(2, t.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
            t = (t.detach().double() * (1 + share * signs.to(t.device))).to(t.dtype)
        out[name] = t
    return out


def raise_for(found: list[Off], loss: tuple[float, float]) -> None:
    """Name what is off most."""
    if not found:
        return
    worst = found[0]
    others = ", ".join(o.name.partition(":")[2] for o in found[1:6])
    losses = (
        f"{loss[0]:.9g} by the compiled step, {loss[1]:.9g} by the model" if not worst.name.startswith("loss") else ""
    )
    raise CheckError(
        f"the compiled step is not the model: {worst}",
        also=f"{len(found) - 1} more: {others}{', ...' if len(found) > 6 else ''}" if others else "",
        loss="" if worst.name.startswith("loss") else losses,
        why="the first batch was run by the plan's program and by the model itself, on the same weights",
        next='please report it, with the model; plan="ddp" trains it as it is, check=False leaves this check out',
    )

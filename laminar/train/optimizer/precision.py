"""What numbers are computed, kept and summed in.

    f32              as the model is
    bf16, fp16       autocast: products in half precision, weights and their updates in float32
    bf16-pure        weights and state in bfloat16: small updates are lost, for comparison
    bf16-kahan       weights in bfloat16 and what rounding lost in a second bfloat16
    bf16-stochastic  weights in bfloat16, rounded up or down at random in proportion

Gradients of half-precision weights are summed over ranks and micro-batches in float32 in every one.
fp16 gradients underflow, so the loss is scaled up before backward; a step that overflows is skipped,
on every rank, because the decision depends on the norm of the whole gradient, which all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops import kernels
from laminar.errors import LaminarError
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import Split, local_indices
from laminar.train.optimizer.optimizer import Kept

CHUNK_BYTES = 256 << 20
"""How much of the weights is held in float32 at a time while it is updated and rounded."""
SITES = 1 << 20
"""Where the random sites of rounding begin: far above those a model draws at."""


@dataclass(frozen=True)
class Precision:
    """A policy; see the list above."""

    name: str
    autocast: torch.dtype | None = None
    weights: torch.dtype | None = None
    scaled: bool = False
    rounding: str = "nearest"

    @staticmethod
    def of(name: str | Precision) -> Precision:
        """The policy of that name."""
        if isinstance(name, Precision):
            return name
        if name not in POLICIES:
            raise LaminarError(f"there is no precision {name!r}", allowed="  ".join(POLICIES))
        return POLICIES[name]

    def around(self, loss: Callable[[Any, Any], Any], device: torch.device) -> Callable[[Any, Any], Any]:
        """The loss as it is computed under this policy."""
        if self.autocast is None:
            return loss

        def under_autocast(model: Any, batch: Any) -> Any:
            with torch.autocast(device.type, dtype=self.autocast):
                return loss(model, batch)

        under_autocast.__wrapped__ = loss  # type: ignore[attr-defined]
        return under_autocast

    def leaf(self, x: Tensor) -> Tensor:
        """A leaf of the batch as the model takes it."""
        return x.to(self.weights) if self.weights is not None and x.is_floating_point() else x


POLICIES = {
    p.name: p
    for p in (
        Precision("f32"),
        Precision("bf16", autocast=torch.bfloat16),
        Precision("fp16", autocast=torch.float16, scaled=True),
        Precision("bf16-pure", weights=torch.bfloat16),
        Precision("bf16-kahan", weights=torch.bfloat16, rounding="kahan"),
        Precision("bf16-stochastic", weights=torch.bfloat16, rounding="stochastic"),
    )
}


@dataclass
class Scaler:
    """The scale of the loss: halved when a step overflows, doubled after many that did not."""

    scale: float = 2.0**16
    patience: int = 2000
    good: int = 0
    skipped: int = 0

    def update(self, finite: bool) -> None:
        """Learn from a step."""
        if not finite:
            self.scale, self.good, self.skipped = max(self.scale / 2, 1.0), 0, self.skipped + 1
            return
        self.good += 1
        if self.good == self.patience:
            self.scale, self.good = min(self.scale * 2, 2.0**24), 0


def update(
    optimizer: torch.optim.Optimizer,
    updates: Sequence[tuple[Kept, Tensor]],
    how: str,
    key: Tensor,
    mesh: Mesh,
    rank: int,
    numbers: Mapping[str, int],
    step: Callable[[], Any] | None = None,
) -> None:
    """One update of what a rank owns by its gradients, weights rounded to `nearest` or as in `rounded_update`.

    `step` stands for `optimizer.step`, where that is to be called in another way.
    """
    step = optimizer.step if step is None else step
    if how != "nearest":
        rounded_update(optimizer, updates, how, key, mesh, rank, numbers, step)
        return
    for k, grad in updates:
        k.owned.grad = grad if grad.dtype == k.owned.dtype else grad.to(k.owned.dtype)
    step()
    for k, _ in updates:
        k.owned.grad = None


def rounded_update(
    optimizer: torch.optim.Optimizer,
    updates: Sequence[tuple[Kept, Tensor]],
    how: str,
    key: Tensor,
    mesh: Mesh,
    rank: int,
    numbers: Mapping[str, int],
    step: Callable[[], Any],
) -> None:
    """One update of half-precision weights from float32 gradients, computed in float32 and rounded as told.

    The optimizer sees float32 weights, a chunk at a time, so its state is float32 as well. `key` is
    (seed, step); with it, the number of its tensor in the model and its place in the whole tensor each element is
    rounded the same way on any layout.
    """
    groups = [list(g["params"]) for g in optimizer.param_groups]
    known = type(optimizer).__module__.startswith("torch.optim")  # another may count its calls
    for chunk in _chunks(updates, CHUNK_BYTES if known else None):
        narrow = [k.owned.data for k, _ in chunk]
        for k, grad in chunk:
            k.owned.data = _widened(optimizer, k, how)
            k.owned.grad = grad
        here = {id(k.owned) for k, _ in chunk}
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [p for p in params if id(p) in here]
        try:
            step()
        finally:
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = params
        for (k, _), data in zip(chunk, narrow, strict=True):
            wide = k.owned.data
            k.owned.grad = None
            k.owned.data = data
            if how == "stochastic":
                index = _index(k, mesh, rank, data.device)
                data.copy_(at_random(wide, key.to(data.device), SITES + numbers[k.name], index, k.spec.shape))
            else:
                data.copy_(wide)
                optimizer.state[k.owned]["compensation"] = (wide - data).to(data.dtype)


def _chunks(updates: Sequence[tuple[Kept, Tensor]], limit: int | None) -> list[list[tuple[Kept, Tensor]]]:
    out: list[list[tuple[Kept, Tensor]]] = []
    size = 0
    for item in updates:
        if not out or (limit is not None and size >= limit):
            out.append([])
            size = 0
        out[-1].append(item)
        size += item[1].nbytes
    return out


def _widened(optimizer: torch.optim.Optimizer, k: Kept, how: str) -> Tensor:
    wide = k.owned.data.float()
    lost = optimizer.state[k.owned].pop("compensation", None) if how == "kahan" and k.owned in optimizer.state else None
    if not optimizer.state.get(k.owned, True):
        del optimizer.state[k.owned]  # empty: an optimizer takes that for a parameter it has never seen
    return wide if lost is None else wide.add_(lost)


def _index(k: Kept, mesh: Mesh, rank: int, device: torch.device) -> list[Tensor] | None:
    """Which rows of each dim of the whole tensor this rank owns, if it does not own all."""
    if not any(isinstance(p, Split) for p in k.state_nd):
        return None
    found = local_indices(k.spec.shape, k.state_nd, mesh.sizes, mesh.coords(rank))
    return [torch.from_numpy(i).to(device) for i in found]


def at_random(
    wide: Tensor, key: Tensor, site: int, index: list[Tensor] | None = None, full: Sequence[int] | None = None
) -> Tensor:
    """float32 rounded to bfloat16, up or down with the odds of what is lost, so that the mean is kept.

    bfloat16 is the upper half of a float32: a random number below 2^16 is added to the bits, then the
    lower half is cut off. What overflows carries into the next larger magnitude.
    """
    noise = kernels.uniform(tuple(wide.shape), key, site, torch.float32, index=index, full=full)
    noise = noise.mul_(65536.0).to(torch.int32)
    bits = wide.contiguous().view(torch.int32)
    rounded = bits.add(noise).bitwise_and_(-65536)
    return torch.where(wide.isfinite(), rounded.view(torch.float32), wide).to(torch.bfloat16)

"""Updates whose bits don't depend on where a tensor is cut: no element is where a kernel treats the last ones apart.

Kernels work through memory a vector at a time and treat what is left over in another way, which rounds some elements
differently. Which elements these are depends on the piece that a rank owns. So for the update every tensor is shown to
the optimizer flat and with room behind it, up to whole vectors; what stands in that room is nobody's. On one thread,
because threads would cut anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laminar.errors import OptimizerError
from laminar.train.optimizer.memory_layout import is_dense
from laminar.train.optimizer.optimizer import KNOWN, Kept, any_in_pieces, refuse_closure, unknown_part

ROOM = 64
"""Elements: a multiple of what any kernel takes at once."""


def refuse_if_cuts_change_bits(optimizer: torch.optim.Optimizer, kept: Sequence[Kept]) -> None:
    """Refuse an optimizer in exact mode of which it is not known that it updates each element by itself."""
    refuse_closure(optimizer, "in exact mode gradients are those of one pass over the batch")
    unknown = unknown_part(optimizer, KNOWN)
    if unknown and any_in_pieces(kept):
        raise OptimizerError(
            f"{unknown} is not known to give the same bits for a piece of a tensor as for all of it",
            why="the plan keeps weights or their state in shards, and in exact mode bits must not depend on these",
            next='use plan="data", or one of torch\'s elementwise optimizers',
        )


def with_room(numel: int) -> int:
    """So many elements up to whole vectors."""
    return -(-numel // ROOM) * ROOM


def roomy(x: Tensor) -> Tensor:
    """A copy of a tensor, laid out like it, with room behind it."""
    flat = torch.zeros(with_room(x.numel()), dtype=x.dtype, device=x.device)
    return flat.as_strided(x.shape, x.stride()).copy_(x)


def flat_with_room(x: Tensor) -> Tensor | None:
    """All of a tensor's memory and the room behind it, if it has some."""
    first, need = x.storage_offset(), with_room(x.numel())
    if not is_dense(x) or x.untyped_storage().nbytes() < (first + need) * x.element_size():
        return None
    return x.as_strided((need,), (1,), first)


class WholeVectors:
    """The update of what a rank owns, by torch's own optimizers, on whole vectors."""

    def __init__(self, optimizer: torch.optim.Optimizer, kept: Sequence[Kept], held: dict[str, Tensor]) -> None:
        """Gives what is owned room behind it; `held` is what the job looks weights up in."""
        self.optimizer, self.applies = optimizer, not unknown_part(optimizer, KNOWN)
        for k in kept if self.applies else ():
            if k.param.requires_grad and (k.gathered or flat_with_room(k.owned.data) is None):
                k.owned.data = roomy(k.owned.data)
                if not k.gathered:
                    held[k.name] = k.param.detach()

    def step(self) -> None:
        """One update."""
        threads = torch.get_num_threads()
        if not self.applies:
            self.optimizer.step()
            return
        if threads > 1:
            torch.set_num_threads(1)
        back = [self._show(p) for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        try:
            self.optimizer.step()
        finally:
            for p, data, lent in back:
                self._put_back(p, data, lent)
            if threads > 1:
                torch.set_num_threads(threads)

    def _show(self, p: Any) -> tuple[Any, Tensor, Tensor | None]:
        """A parameter, its gradient and its state flat; what it was, and what it was lent if it has no room."""
        data, grad = p.data, p.grad.detach()
        flat = flat_with_room(data)
        lent = None
        if flat is None:
            lent = roomy(data)
            flat = flat_with_room(lent)
        steps = flat_with_room(grad) if grad.stride() == data.stride() else None
        if steps is None:
            own = torch.zeros(with_room(data.numel()), dtype=grad.dtype, device=grad.device)
            own.as_strided(data.shape, data.stride()).copy_(grad)
            steps = own
        p.grad = None
        p.data = flat
        p.grad = steps
        for value in self.optimizer.state.get(p, {}).values():
            if isinstance(value, Tensor) and value.dim() and value.shape == data.shape:
                if value.stride() != data.stride() or flat_with_room(value) is None:
                    own = torch.zeros(with_room(data.numel()), dtype=value.dtype, device=value.device)
                    value.data = own.as_strided(data.shape, data.stride()).copy_(value)
                value.data = flat_with_room(value.data)  # type: ignore[assignment]
        return p, data, lent

    def _put_back(self, p: Any, data: Tensor, lent: Tensor | None) -> None:
        p.grad = None
        flat = p.data
        p.data = data
        if lent is not None:
            data.copy_(lent)
        for value in self.optimizer.state.get(p, {}).values():
            if isinstance(value, Tensor) and value.dim() and value.shape == flat.shape:
                value.data = value.data.as_strided(data.shape, data.stride())

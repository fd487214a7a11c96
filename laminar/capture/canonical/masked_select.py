"""`masked_select` of a mask that depends on data, where only a CTC loss reads it.

How many elements a mask picks is a shape that depends on data, which no graph holds. But labels that are picked to be
laid one after the other for `ctc_loss` have a place each: the loss knows how many belong to each sample. So picking is
put off until somebody reads it. A CTC loss gets labels in rows; anything else refuses as it would have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laminar.capture.torch_private import get_proxy_mode, get_proxy_slot


class MaskPicked:
    """What a mask picks from a tensor, not picked yet."""

    input: Tensor
    mask: Tensor

    def __init__(self, input: Tensor, mask: Tensor) -> None:
        self.__dict__.update(input=input, mask=mask)

    __class__ = property(lambda _: Tensor)
    """A tensor to whoever asks with `isinstance`, or code that asks would take another way than it does eagerly."""

    def look(self, *_: Any, **__: Any) -> Any:
        """Pick, which tracing refuses."""
        return self.input[self.mask]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, MaskPicked))
        return found.look()

    def one_after_the_other(self) -> Tensor:
        """What is picked, in order, and behind it the rest."""
        order = (~self.mask.reshape(-1)).to(torch.uint8).argsort(stable=True)
        return self.input.reshape(-1)[order]

    def in_rows(self, counts: Any) -> Tensor | None:
        """What is picked of each row at its begin, if there are so many by row as the mask says."""
        if self.mask.dim() != 2 or not _sums(counts, self.mask):
            return None
        order = (~self.mask).to(torch.uint8).argsort(dim=1, stable=True)
        return self.input.gather(1, order)


for (
    _name
) in """getattr setattr len iter getitem setitem bool float int index eq ne lt le gt ge hash add radd sub rsub mul
    mul rmul truediv rtruediv pow neg invert matmul contains array""".split():
    setattr(MaskPicked, f"__{_name}__", MaskPicked.look)


def _node(value: Any) -> Any:
    mode = get_proxy_mode()
    slot: Any = get_proxy_slot(value, mode.tracer, None) if mode is not None and isinstance(value, Tensor) else None
    return slot.proxy.node if slot is not None else None


def _sums(counts: Any, mask: Tensor) -> bool:
    """Whether counts are those of the rows of the mask, by how they were computed."""
    made, of = _node(counts), _node(mask)
    if made is None or of is None or made.target is not torch.ops.aten.sum.dim_IntList:
        return False
    return made.args[0] is of and list(made.args[1]) in ([-1], [1]) and not any(made.args[2:])

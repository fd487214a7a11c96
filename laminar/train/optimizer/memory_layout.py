"""How tensors of an update lie in memory: a gradient and its optimizer's state as the weight they belong to.

Torch's fused updates walk through memory and never look at strides, on a CPU in silence, on a GPU after refusing what
does not lie alike. Autograd keeps that rule for whoever trains with `backward()`: a gradient that is accumulated gets
its weight's layout. Gradients of a compiled step come as the last op has left them (a product with a transposed
weight, a convolution in channels-last), so here they are laid out before the optimizer sees them. Ones that lie right,
which are nearly all, are only looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from laminar.capture.model.model_tensors import Slot
from laminar.errors import OptimizerError


def laid_as(x: Tensor, like: Tensor) -> Tensor:
    """A tensor with the layout of another of its shape: itself if it has it, else a copy."""
    if x.stride() == like.stride() or x.shape != like.shape:
        return x
    if x.is_contiguous() and like.is_contiguous():
        return x.as_strided(x.shape, like.stride())  # they differ in dims of one element only
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def is_dense(x: Tensor) -> bool:
    """Whether a tensor fills its memory once, in whichever order of dims: then what is made like it lies like it."""
    return x.stride() == torch.empty_like(x, device="meta").stride()


def make_dense(slots: Sequence[Slot]) -> None:
    """Give parameters that lie in a view with gaps memory of their own, as no state could be laid out like them."""
    loose = [s for s in slots if isinstance(s.tensor, nn.Parameter) and not is_dense(s.tensor)]
    if loose:
        refuse_shared_memory([s.name for s in loose], slots)
    for slot in loose:
        slot.tensor.data = slot.tensor.detach().contiguous()


def refuse_shared_memory(names: Collection[str], slots: Sequence[Slot]) -> None:
    """Refuse to take parameters out of memory in which another tensor of the model lies, if either is trained."""
    by_storage: dict[int, list[Slot]] = {}
    for slot in slots:
        if slot.tensor.numel():
            by_storage.setdefault(slot.tensor.untyped_storage().data_ptr(), []).append(slot)
    for together in by_storage.values():
        for slot, other in itertools.permutations(together, 2):
            trained = slot.trainable or other.trainable
            if slot.name in names and trained and _overlap(slot.tensor, other.tensor):
                raise OptimizerError(
                    f"{slot.name} lies in the same memory as {other.name}, and the plan needs it in memory of its own",
                    next='make them one parameter, or use a plan that keeps parameters whole (plan="data")',
                )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the stretches of memory from first to last element meet."""
    (a0, a1), (b0, b1) = _stretch(a), _stretch(b)
    return a0 < b1 and b0 < a1


def _stretch(x: Tensor) -> tuple[int, int]:
    first = x.data_ptr()
    return first, first + x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))

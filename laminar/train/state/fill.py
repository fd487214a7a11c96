"""New values into a job's state, box by box: all of them are read before any is put in its place.

Whoever loads says for each tensor how a box of it is read; what this rank holds decides which boxes. So a rank reads
what it needs and no more, whatever the layout, and a file that ends in the middle leaves the job as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from laminar.checkpoint.format.block_grid import Slices
from laminar.ir.sbp import NdSbp
from laminar.train.optimizer import optimizer as optim
from laminar.train.optimizer.optimizer import Kept
from laminar.train.state.shards import boxes
from laminar.train.state.state import JobState

ReadBox = Callable[[Slices], Tensor]
"""Gives one box of a whole tensor, on the CPU."""


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_weights` found, with names as the model has them."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """The model has them, and the files don't."""
    unexpected: tuple[str, ...]
    """The files have them, and the model doesn't."""


@dataclass
class StagedBox:
    """Values that were read, and where they go."""

    into: Tensor
    """A view of what the job trains with."""
    value: Tensor


def boxes_here(state: JobState, shape: tuple[int, ...], nd: NdSbp) -> tuple[tuple[Slices, Slices], ...]:
    """This rank's boxes of a tensor: where in the whole, and where in its own part."""
    layout = state.layout
    return boxes(shape, nd, layout.mesh.sizes, layout.place.coords(layout.rank))


def read_part(state: JobState, shape: tuple[int, ...], nd: NdSbp, local: torch.Size, read: ReadBox) -> Tensor:
    """What this rank holds of a tensor that lies so, put together from its boxes."""
    found = [(mine, read(index)) for index, mine in boxes_here(state, shape, nd)]
    if len(found) == 1 and found[0][1].shape == local:
        return found[0][1]
    out = torch.empty(local, dtype=found[0][1].dtype) if found else torch.empty(local)
    for mine, value in found:
        out[mine] = value
    return out


def stage_weights(state: JobState, names: Iterable[str], read: Callable[[str, Slices], Tensor]) -> Iterator[StagedBox]:
    """Parameters and buffers of these names that are held here, and what is owned apart from them."""
    kept = {k.name: k for k in state.kept}
    for name in names:
        held = state.tensor_of(name)
        if held is None:
            continue
        shape, layout = state.specs[name].shape, state.layout
        yield from _stage(state, shape, layout.held_nd(name), held, partial(read, name))
        k = kept.get(name)
        if k is not None and k.has_own_memory:
            yield from _stage(state, shape, k.state_nd, k.owned.detach(), partial(read, name))


def stage_averages(
    state: JobState, names: Collection[str], read: Callable[[str, Slices], Tensor]
) -> Iterator[StagedBox]:
    """The moving averages of these parameters that are owned here."""
    for k in (k for k in state.averaged if k.name in names):
        yield from _stage(state, k.spec.shape, k.state_nd, state.ema[k.name], partial(read, k.name))


def _stage(state: JobState, shape: tuple[int, ...], nd: NdSbp, local: Tensor, read: ReadBox) -> Iterator[StagedBox]:
    for index, mine in boxes_here(state, shape, nd):
        yield StagedBox(local[mine] if mine else local, read(index))


def put_staged(state: JobState, staged: Iterable[StagedBox]) -> None:
    """Into their places, cast where the job keeps another dtype."""
    state.about_to_change()
    with torch.no_grad():
        for item in staged:
            item.into.copy_(item.value)


def averages_begin_anew(state: JobState) -> None:
    """Moving averages that start from the weights as they are now."""
    for k in state.kept:
        if k.name in state.ema:
            state.ema[k.name].copy_(k.owned.detach())


def entry_here(state: JobState, k: Kept, shape: tuple[int, ...], read: ReadBox, group: dict[str, object]) -> Tensor:
    """One entry of the optimizer's state for what is owned of a parameter: cut as that is, if it has its shape."""
    if shape == k.spec.shape and shape:
        value = read_part(state, shape, k.state_nd, k.owned.shape, read)
    else:
        value = read(tuple(slice(0, n) for n in shape))
    placed = optim.placed_entry(value, k, group, state.layout.cut)
    assert isinstance(placed, Tensor)
    return placed

"""State taken from one layout into another: other ranks, other meshes, other stages.

Every rank of the former layout goes through the same tensors in the same order. Where all ranks have a tensor whole,
each cuts its part out of that and nothing is sent. Else it goes from its home, the first place that held it, to each of
the places that hold it from now on. What a rank does not hold any more is freed; what it comes to hold, optimizer state
and averages included, is as it was where it lay.

Not covered: ranks that were not in the former layout, which have no state to take along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from laminar.capture.model.model_tensors import Slot
from laminar.ir.mesh import Place
from laminar.ir.sbp import B, NdSbp
from laminar.ir.tensor import TensorSpec
from laminar.runtime.comm.shards import shard
from laminar.train.optimizer import optimizer as optim
from laminar.train.optimizer.memory_layout import laid_as, refuse_shared_memory
from laminar.train.optimizer.optimizer import Kept
from laminar.train.state.state import JobState, StateLayout, StoredEntry

NdAt = Callable[[int], NdSbp]
"""How a tensor lies at each place, by the place's number."""


class Carry(Protocol):
    """What takes tensors from ranks to ranks (`CarryBetweenMeshes`)."""

    def __call__(
        self, spec: TensorSpec, src: Place, src_nd: NdSbp, dst: Place, dst_nd: NdSbp, x: Tensor | None
    ) -> Tensor | None:
        """What this rank holds behind it; every rank of both places calls this, with what it held at the first."""
        ...

    def notes(self, mine: Any) -> list[Any]:
        """What every rank says, by rank."""
        ...


def refuse_layout(state: JobState, layout: StateLayout) -> None:
    """Refuse a layout that the model's memory or the optimizer does not allow, before anything is touched."""
    refuse_shared_memory(layout.apart(s.name for s in state.slots), state.slots)
    now = [_kept_at(state, layout, s, s.tensor) for s in state.slots if s.name in state.by_name]
    optim.refuse_unless_elementwise(state.optimizer, now, state.elementwise, len(layout.places))


def change_layout(state: JobState, layout: StateLayout, numbers: Sequence[int], carry: Carry) -> None:
    """Take everything into another layout; every rank of the former one calls this.

    `numbers` says which rank of the world each rank of the former layout is now.
    """
    state.about_to_change()
    way = _Way(state, layout, numbers, carry)
    listed = state.listed_now()
    known = state.known_entries(carry.notes if way.several else lambda mine: [mine])
    held = {n: t for n, t in state.held.items() if n not in state.numbers}
    kept: list[Kept] = []
    found: dict[Tensor, dict[str, Any]] = {}
    ema: dict[str, Tensor] = {}
    for slot in state.slots:
        x = way.held(slot)
        k = None if slot.kind == "buffer" else way.kept(slot, x)
        entries = way.entries(slot.name, known.get(slot.name, {}), k)
        average = way.average(slot) if slot.kind == "param" and state.ema_decay is not None else None
        slot.tensor.data = x if x is not None else torch.empty(0, dtype=slot.tensor.dtype, device=slot.tensor.device)
        if x is not None:
            held[slot.name] = slot.tensor.detach()
        if k is not None:
            kept.append(Kept(k.name, k.spec, k.param, k.nd, k.state_nd, k.owned))  # strides are those of now
            if entries:
                found[k.owned] = entries
            if average is not None:
                ema[k.name] = average
    by_name = {k.name: k for k in kept}
    state.optimizer.state.clear()
    state.optimizer.state.update(found)
    for group, names in zip(state.optimizer.param_groups, listed, strict=True):
        group["params"] = [by_name[n].owned for n in names if n in by_name]
    wanted = {n for names in listed for n in names}
    state.laid(layout, held, kept, ema, [k for k in kept if k.name in wanted], listed)


def _kept_at(state: JobState, layout: StateLayout, slot: Slot, owned: Any) -> Kept:
    nd = layout.held_nd(slot.name)
    state_nd = layout.owned_nd(slot.name) if slot.tensor.requires_grad else nd
    assert isinstance(slot.tensor, nn.Parameter)
    return Kept(slot.name, state.specs[slot.name], slot.tensor, nd, state_nd, owned)


class _Way:
    """From one layout into another, as one rank goes through it."""

    def __init__(self, state: JobState, layout: StateLayout, numbers: Sequence[int], carry: Carry) -> None:
        self.state, self.old, self.new, self.carry = state, state.layout, layout, carry
        self.rank = numbers[self.old.rank]
        self.sources = [Place(tuple(numbers[r] for r in p.ranks), p.mesh) for p in self.old.places]
        self.several = len(self.sources) > 1 or len(layout.places) > 1
        self.at = next((i for i, p in enumerate(layout.places) if self.rank in p.ranks), None)
        """The place where this rank is from now on; nothing: it leaves."""
        self.before = {k.name: k for k in state.kept}

    def held(self, slot: Slot) -> Tensor | None:
        """What this rank holds of a parameter or buffer from now on."""
        name, state = slot.name, self.state
        x = self.moved(name, state.specs[name], self._was_held(name), self._is_held(name), state.held.get(name))
        return None if x is None else laid_as(x, state.whole[name])

    def kept(self, slot: Slot, held: Tensor | None) -> Kept | None:
        """The same of a parameter with what is owned of it, which is moved where it is not the parameter itself."""
        name, owned = slot.name, None
        was, will = self._was_owned(slot), self._is_owned(slot)
        if any(will(at) != self._is_held(name)(at) for at in self._homes(name)):
            before = self.before.get(name)
            x = None if before is None else before.owned.detach()
            owned = self.moved(name, self.state.specs[name], was, will, x)
        if held is None:
            return None
        k = _kept_at(self.state, self.new, slot, slot.tensor)
        if k.state_nd != k.nd:
            assert owned is not None
            k.owned = nn.Parameter(owned, slot.tensor.requires_grad)
        return k

    def entries(self, name: str, known: Mapping[str, Any], k: Kept | None) -> dict[str, Any]:
        """A parameter's optimizer state from now on, of the entries that are `known` of it."""
        slot = self.state.slots[self.state.numbers[name]]
        before = self.before.get(name)
        mine = {} if before is None else self.state.optimizer.state.get(before.owned, {})
        out: dict[str, Any] = {}
        for key, note in known.items():
            if isinstance(note, StoredEntry):
                was, will = self._was_owned(slot), self._is_owned(slot)
                if not note.part:
                    was, will = (lambda at: self.old.everywhere_at(at)), (lambda at: self.new.everywhere_at(at))
                out[key] = self.moved(name, note.spec, was, will, mine.get(key))
            else:
                out[key] = mine.get(key, note)
        if k is None:
            return {}
        like = k.owned
        return {key: laid_as(v, like) if isinstance(v, Tensor) and v.dim() else v for key, v in out.items()}

    def average(self, slot: Slot) -> Tensor | None:
        """What is owned of the moving average of a parameter."""
        spec = replace(self.state.specs[slot.name], dtype="f32")
        x = self.state.ema.get(slot.name)
        return self.moved(slot.name, spec, self._was_owned(slot), self._is_owned(slot), x)

    def moved(self, name: str, spec: TensorSpec, was: NdAt, will: NdAt, x: Tensor | None) -> Tensor | None:
        """A tensor from where it lay to where it is to lie: what this rank has of it then, if anything."""
        former = self.old.homes.get(name) or range(len(self.sources))
        if len(former) == len(self.sources) and all(p == B for at in former for p in was(at)):
            if self.at is None or self.at not in self._homes(name):
                return None
            assert x is not None
            place = self.new.places[self.at]
            part = shard(x, will(self.at), place.mesh, place.ranks.index(self.rank))
            return part if part is x or part.data_ptr() != x.data_ptr() else part.clone()
        out = None
        src = self.sources[former[0]]
        for at in self._homes(name):
            dst = self.new.places[at]
            if self.rank in src.ranks or self.rank in dst.ranks:
                there = self.carry(spec, src, was(former[0]), dst, will(at), x if self.rank in src.ranks else None)
                out = there if at == self.at else out
        return out.clone() if out is not None and x is not None and out.data_ptr() == x.data_ptr() else out

    def _homes(self, name: str) -> Sequence[int]:
        """The places that hold a tensor from now on."""
        return self.new.homes.get(name) or range(len(self.new.places))

    def _was_held(self, name: str) -> NdAt:
        return lambda at: self.old.held_nd(name, at)

    def _is_held(self, name: str) -> NdAt:
        return lambda at: self.new.held_nd(name, at)

    def _was_owned(self, slot: Slot) -> NdAt:
        def nd(at: int) -> NdSbp:
            k = self.before.get(slot.name)
            if k is not None and at == self.old.at:
                return k.state_nd  # also of one that was frozen or set free since
            return self.old.owned_nd(slot.name, at) if slot.tensor.requires_grad else self.old.held_nd(slot.name, at)

        return nd

    def _is_owned(self, slot: Slot) -> NdAt:
        trained = slot.tensor.requires_grad
        return lambda at: self.new.owned_nd(slot.name, at) if trained else self.new.held_nd(slot.name, at)

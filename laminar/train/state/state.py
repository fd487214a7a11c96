"""What a run *is*: weights, buffers, optimizer state, averages and counters, as this rank holds its part of them.

A job has state; engines and pipelines come and go around it. Everything that must survive a change of mesh or of the
world is here and nothing else is: no process group, no program, no recording. Where tensors lie is a value
(`StateLayout`): places, each a mesh of some ranks, and for every tensor how it is placed there. Plans without stages
have one place, of all ranks; with stages there are several, and a tensor is held at some of them, the first its home.

- `shards()` tells what this rank holds, box by box in global coordinates, and asks nobody.
- Whole tensors need the other ranks: methods that give them take a `Gather` (`gather.py`).
- Into another layout, with other ranks, meshes or stages, all of it is taken by `change_layout.py`.

The random state of a run is `seed` and `steps`: draws depend on these and on nothing that was drawn before. Its place
in the data is `steps` as well, for data that is drawn again from its beginning (`loop.py`).

The user's model holds this rank's parts, and the user's optimizer updates what this rank owns (`optimizer.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.model.model_tensors import Slot, slots_of
from laminar.capture.ops.torch_ops import spec_of
from laminar.capture.torch_private import foreach_copy, foreach_lerp
from laminar.errors import StateError
from laminar.ir.mesh import Mesh, Place
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import B, NdSbp
from laminar.ir.tensor import TensorSpec
from laminar.runtime.comm.shards import shard
from laminar.train.optimizer import optimizer as optim
from laminar.train.optimizer.memory_layout import make_dense, refuse_shared_memory
from laminar.train.optimizer.optimizer import Kept
from laminar.train.optimizer.param_group_changes import Tracked
from laminar.train.optimizer.precision import Scaler
from laminar.train.state.gather import Gather, HeldPart
from laminar.train.state.resharder import Resharder
from laminar.train.state.sharded_model import allowed, own_state, stripped
from laminar.train.state.shards import StateShard, shards_of


def moved_to(model: nn.Module, device: torch.device, weights: torch.dtype | None) -> list[Slot]:
    """The model on its device, with floating tensors in `weights` if given; its tensors."""
    model.to(device=device, dtype=weights)
    for slot in slots_of(model):
        if slot.plain and slot.tensor.device != device:
            there = slot.tensor.to(device)
            for holder, key in slot.places:
                holder[key] = there
    slots = slots_of(model)
    make_dense(slots)
    return slots


@dataclass(frozen=True)
class StateLayout:
    """At which places the tensors of a model are held, and how on the ranks of each. What is not named lies whole."""

    places: tuple[Place, ...]
    rank: int
    """This rank, among those of the world."""
    held: Mapping[tuple[str, int], NdSbp] = field(default_factory=dict)
    """By tensor and place."""
    owned: Mapping[tuple[str, int], NdSbp] = field(default_factory=dict)
    """The part that a rank updates, and its state."""
    homes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The places that hold a tensor; none: it lies whole at every place."""

    @staticmethod
    def of_plan(plan: Plan, names: Iterable[str], rank: int) -> StateLayout:
        """As a plan without stages says, for the tensors of these names."""
        whole = (B,) * len(plan.mesh.sizes)
        held = {(n, 0): plan.inputs.get(n, whole) for n in names}
        owned = {(n, 0): plan.state.get(n, nd) for (n, _), nd in held.items()}
        return StateLayout((Place(tuple(range(plan.mesh.ranks)), plan.mesh),), rank, held, owned)

    @cached_property
    def at(self) -> int:
        """Which place this rank is at."""
        return next(i for i, p in enumerate(self.places) if self.rank in p.ranks)

    @cached_property
    def place(self) -> Place:
        """The place this rank is at."""
        return self.places[self.at]

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of that place."""
        return self.place.mesh

    @cached_property
    def mesh_rank(self) -> int:
        """Where on that mesh this rank stands."""
        return self.place.ranks.index(self.rank)

    @cached_property
    def everywhere(self) -> NdSbp:
        """Whole on every rank of this place."""
        return self.everywhere_at(self.at)

    def is_here(self, name: str) -> bool:
        """Whether this rank's place holds a tensor."""
        homes = self.homes.get(name)
        return not homes or self.at in homes

    def everywhere_at(self, at: int) -> NdSbp:
        """Whole on every rank of a place."""
        return (B,) * len(self.places[at].mesh.sizes)

    def held_nd(self, name: str, at: int | None = None) -> NdSbp:
        """How a tensor lies at a place: this one unless another is named."""
        at = self.at if at is None else at
        return self.held.get((name, at), self.everywhere_at(at))

    def owned_nd(self, name: str, at: int | None = None) -> NdSbp:
        """How what is owned of it does."""
        at = self.at if at is None else at
        return self.owned.get((name, at), self.held_nd(name, at))

    def home(self, name: str) -> Place | None:
        """Where a tensor is at home; nothing: at every place."""
        if len(self.places) == 1:
            return self.places[0]
        homes = self.homes.get(name)
        return self.places[homes[0]] if homes else None

    def is_whole(self, name: str) -> bool:
        """Whether every rank of the world has all of a tensor."""
        return self.held_nd(name) == self.everywhere and (len(self.places) == 1 or not self.homes.get(name))

    def apart(self, names: Iterable[str]) -> set[str]:
        """Of the tensors of these names, those that need memory of their own: split ones; all, at several places."""
        if len(self.places) > 1:
            return set(names)
        return {n for table in (self.held, self.owned) for (n, _), nd in table.items() if any(p != B for p in nd)}

    def cut(self, whole: Tensor, nd: NdSbp) -> Tensor:
        """This rank's part of a whole tensor."""
        return shard(whole, nd, self.mesh, self.mesh_rank)


class JobState:
    """The state of one run on one rank."""

    def __init__(
        self,
        model: nn.Module,
        slots: list[Slot],
        optimizer: torch.optim.Optimizer,
        layout: StateLayout,
        *,
        seed: int = 0,
        ema: float | None = None,
        scaler: Scaler | None = None,
        rounded: bool = False,
        elementwise: bool = False,
        runs_itself: bool = False,
    ) -> None:
        """Leaves this rank's parts in the model, and makes the optimizer update what it owns.

        `rounded` and `elementwise` are said of the updates; `runs_itself`: the model's own code runs in steps, and may
        put other tensors in the places of its buffers.
        """
        self.model, self.slots, self.optimizer, self.layout = model, slots, optimizer, layout
        self.steps, self.seed, self.scaler = 0, seed, scaler
        self.elementwise, self.rounded, self.runs_itself = elementwise, rounded, runs_itself
        self.numbers = {s.name: i for i, s in enumerate(slots)}
        self.specs = {s.name: spec_of(s.tensor) for s in slots}
        self.whole = {s.name: torch.empty_like(s.tensor, device="meta") for s in slots}
        """Stand-ins of the tensors at full size."""
        names = {id(s.tensor): s.name for s in slots}
        self.listed = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
        """The optimizer's parameters as the user gave them, by group."""
        self.held: dict[str, Tensor] = {}
        """What this rank holds of parameters and buffers."""
        self.kept: list[Kept] = []
        """Its parameters, with what it owns of each."""
        self._keep()
        self.ema_decay = ema
        self.ema = {k.name: k.owned.detach().float().clone() for k in self.averaged} if ema is not None else {}
        """What this rank owns of the weights' moving average."""
        self._copy: nn.Module | None = None
        self.wait_for_copies: list[Callable[[], None]] = []
        """One for each snapshot that is copying weights and optimizer state beside the steps: waits until it has."""

    def about_to_change(self) -> None:
        """Whoever changes weights or optimizer state calls this first: a snapshot may still be copying them."""
        while self.wait_for_copies:
            self.wait_for_copies.pop()()

    # --- what is here --------------------------------------------------------------------------------

    def _keep(self) -> None:
        layout = self.layout
        refuse_shared_memory(layout.apart(s.name for s in self.slots), self.slots)
        away: set[int] = set()
        for slot in self.slots:
            if not layout.is_here(slot.name):
                slot.tensor.data = torch.empty(0, dtype=slot.tensor.dtype, device=slot.tensor.device)
                away.add(id(slot.tensor))
                continue
            nd = layout.held_nd(slot.name)
            spec, param = self.specs[slot.name], slot.tensor
            state_nd = layout.owned_nd(slot.name) if param.requires_grad else nd
            is_split = any(p != B for p in nd)
            owned = None
            if state_nd != nd:
                mine = layout.cut(param.detach(), state_nd)
                owned = nn.Parameter(mine.clone() if is_split else mine)
            if is_split:
                param.data = layout.cut(param.detach(), nd).clone()
            if slot.kind == "param":
                assert isinstance(param, nn.Parameter)
                self.kept.append(Kept(slot.name, spec, param, nd, state_nd, param if owned is None else owned))
            self.held[slot.name] = param.detach()
        groups = self.optimizer.param_groups
        for group in groups if away else ():
            group["params"] = [p for p in group["params"] if id(p) not in away]
        in_optimizer = {id(p) for g in groups for p in g["params"]}
        trained = [k for k in self.kept if id(k.param) in in_optimizer]
        optim.refuse_unless_elementwise(self.optimizer, trained, self.elementwise, len(layout.places))
        optim.adopt(self.optimizer, trained, layout.cut)
        self._settled(trained)

    def _settled(self, trained: Sequence[Kept]) -> None:
        self.by_name = {k.name: k for k in trained}
        """What the optimizer updates here."""
        self.plain = all(k.plain for k in self.kept)
        """Whether a contiguous gradient lies in memory as any owned part does."""
        self.gathered = [k for k in self.kept if k.gathered]
        """Parameters that are put together from owned parts after an update."""
        self.tracked = Tracked(self.optimizer, self.kept, self.rounded, self.elementwise, len(self.layout.places))

    @property
    def averaged(self) -> list[Kept]:
        """Parameters of which a moving average is kept, if one is."""
        return [k for k in self.kept if k.param.requires_grad] if self.runs_itself else self.kept

    @property
    def cut(self) -> set[int]:
        """Ids of the model's tensors of which this rank has a part only, or nothing."""
        return {id(s.tensor) for s in self.slots if tuple(s.tensor.shape) != self.specs[s.name].shape}

    @property
    def missing_bytes(self) -> int:
        """Bytes of whole tensors of which this rank has a part, or nothing."""
        return sum(self.specs[s.name].nbytes for s in self.slots if tuple(s.tensor.shape) != self.specs[s.name].shape)

    def take(self, slot: Slot, device: torch.device) -> None:
        """Hold a tensor, whole, that an attribute of the model has come to hold."""
        self.specs[slot.name] = spec_of(slot.tensor)
        self.held[slot.name] = slot.tensor.detach().to(device)
        self.whole[slot.name] = torch.empty_like(slot.tensor, device="meta")

    def resolve(self) -> None:
        """Take into account what a user has done to the optimizer since the last step."""
        self.by_name = self.tracked.resolve(self.kept, self.layout.cut)

    def average(self) -> None:
        """Bring the moving average forward by an update; nothing if there is none."""
        if self.ema_decay is not None:
            now = [k.owned.detach().float() for k in self.averaged]
            foreach_lerp(list(self.ema.values()), now, 1 - self.ema_decay)

    def put_together(self, reshard: Resharder) -> None:
        """Parameters that are kept whole, from everyone's updated parts."""
        if self.gathered:
            items = [(k.name, k.spec, k.state_nd, k.nd) for k in self.gathered]
            found = reshard(items, "updated parameters", [k.owned.detach() for k in self.gathered])
            foreach_copy([k.param.detach() for k in self.gathered], found)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's tensors on this rank."""
        entries = (v for s in self.optimizer.state.values() for v in s.values())
        return sum(v.nbytes for v in entries if isinstance(v, Tensor) and v.dim())

    # --- shards, without asking anybody --------------------------------------------------------------

    def shards(self) -> Iterator[StateShard]:
        """Every box of every tensor that this rank holds: parameters and their optimizer's state, averages, buffers.

        Of parameters it is what ranks own. The boxes of all ranks, each taken from the first of its owners, make each
        tensor exactly once. Nothing is copied and no rank is asked. A tensor that two stages share is told at its home.
        """
        layout = self.layout
        owned = {k.name for k in self.kept}
        for name in self.held:
            if name not in owned and (tensor := self.tensor_of(name)) is not None:
                yield from self._boxes("buffer", name, "", self.specs[name].shape, layout.held_nd(name), tensor)
        for k in self.kept:
            shape = k.spec.shape
            yield from self._boxes("parameter", k.name, "", shape, k.state_nd, k.owned.detach())
            for entry, value in self.optimizer.state.get(k.owned, {}).items():
                if isinstance(value, Tensor):
                    part = optim.is_part(k, value)
                    nd, whole = (k.state_nd, shape) if part else (layout.everywhere, tuple(value.shape))
                    yield from self._boxes("optimizer", k.name, entry, whole, nd, value)
            if k.name in self.ema:
                yield from self._boxes("average", k.name, "", shape, k.state_nd, self.ema[k.name])

    def _boxes(
        self, kind: str, name: str, entry: str, shape: tuple[int, ...], nd: NdSbp, tensor: Tensor
    ) -> Iterator[StateShard]:
        layout = self.layout
        home = layout.home(name)
        if home is None:
            ranks = tuple(sorted(r for p in layout.places for r in p.ranks))
            everyone = Place(ranks, Mesh({"all": len(ranks)}))
            yield from shards_of(kind, name, entry, shape, (B,), everyone, layout.rank, tensor)
        elif layout.rank in home.ranks:
            yield from shards_of(kind, name, entry, shape, nd, home, layout.rank, tensor)

    # --- whole tensors -------------------------------------------------------------------------------

    @cached_property
    def _slot_of(self) -> dict[str, str]:
        """For each name in the model's own state dict, the slot that holds its tensor."""
        of = {name: s.name for s in self.slots for name in (s.name, *s.aliases)}
        return {name: of[name] for name in own_state(self.model) if name in of}

    def _part(self, name: str, ema: bool = False) -> HeldPart:
        """What is here of a parameter or buffer, or of a parameter's average."""
        layout, spec, home = self.layout, self.specs[name], self.layout.home(name)
        if ema and self.numbers.get(name) is not None and self.slots[self.numbers[name]].kind == "param":
            k = next((k for k in self.kept if k.name == name), None)
            if k is None:
                return HeldPart(name, spec, layout.owned_nd(name), home, None)
            if name in self.ema:
                return HeldPart(name, spec, k.state_nd, home, self.ema[name].to(k.owned.dtype))
        return HeldPart(name, spec, layout.held_nd(name), home, self.tensor_of(name))

    def tensor_of(self, name: str) -> Tensor | None:
        """What this rank holds of a parameter or buffer, if anything."""
        if self.runs_itself and name in self.numbers:
            now = self.slots[self.numbers[name]].now
            return now.detach() if isinstance(now, Tensor) else None
        return self.held.get(name)

    def state_dict(self, gather: Gather, sharded: bool = False, ema: bool = False) -> dict[str, Any]:
        """Weights and buffers under the model's own names; with the weights' moving average in their place if asked."""
        if ema and self.ema_decay is None:
            raise StateError("this job keeps no moving average", next="parallelize(..., ema=0.999)")
        wanted = list(dict.fromkeys(self._slot_of.values()))
        parts = [self._part(n, ema) for n in wanted]
        made = gather.dtensors(parts, [self.whole[n].stride() for n in wanted]) if sharded else gather.whole(parts)
        found = dict(zip(wanted, made, strict=True))
        return {n: found[self._slot_of[n]] if n in self._slot_of else x for n, x in own_state(self.model).items()}

    def named_specs(self) -> dict[str, TensorSpec]:
        """The tensors of the model's own state dict, tied ones once, in its order."""
        first: dict[str, str] = {}
        for name, slot in self._slot_of.items():
            first.setdefault(slot, name)
        return {name: self.specs[slot] for slot, name in first.items()}

    def model_names(self) -> dict[str, str]:
        """Every name in the model's own state dict that is a tensor's, with the slot that holds it."""
        return dict(self._slot_of)

    def whole_named(self, gather: Gather, names: Sequence[str], ema: bool = False) -> list[Tensor]:
        """Some tensors of the model's own state dict, whole; the weights' average in their place if asked."""
        return gather.whole([self._part(self._slot_of[n], ema) for n in names])

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state dict of this model, from here or from plain PyTorch."""
        missing, extra = sorted(set(self._slot_of) - set(given)), sorted(set(given) - set(own_state(self.model)))
        if missing or extra:
            raise StateError(
                "the state dict is not this model's", missing=", ".join(missing[:5]), unexpected=", ".join(extra[:5])
            )
        self.about_to_change()
        kept, layout = {k.name: k for k in self.kept}, self.layout
        for name, slot in self._slot_of.items():
            value = given[name]
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            if tuple(value.shape) != self.specs[slot].shape:
                raise StateError(f"{name} is {tuple(value.shape)} in the state dict, {self.specs[slot]} in the model")
            if slot not in self.held:
                continue
            with torch.no_grad():
                self.held[slot].copy_(layout.cut(value.detach(), layout.held_nd(slot)))
                if slot in kept and kept[slot].gathered:
                    kept[slot].owned.copy_(layout.cut(value.detach(), kept[slot].state_nd))
        for k in self.kept:
            if k.name in self.ema:
                self.ema[k.name].copy_(k.owned.detach())

    def completed(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """A state dict of this model from what a file has of one: further names of tied weights, and no tensors."""
        tied = {n: weights[s] for n, s in self._slot_of.items() if n not in weights and s in weights}
        return {**own_state(self.model), **weights, **tied}

    def load_average(self, given: Mapping[str, Tensor]) -> None:
        """Take the moving average of the weights from whole tensors."""
        self.about_to_change()
        for k in self.averaged:
            self.ema[k.name].copy_(self.layout.cut(given[k.name], k.state_nd))

    def optimizer_state_dict(self, gather: Gather) -> dict[str, Any]:
        """What `optimizer.state_dict()` would be on one device, on every rank."""
        listed = self.listed_now()
        mine, known = self._entries, self.known_entries(gather.notes)
        parts: dict[tuple[str, str], HeldPart] = {}
        for name in (n for names in listed for n in names if n in known):
            for key, note in known[name].items():
                if isinstance(note, StoredEntry):
                    nd = self.layout.everywhere
                    if note.part:
                        nd = self.by_name[name].state_nd if name in self.by_name else self.layout.owned_nd(name)
                    tensor = mine[name][key] if name in mine else None
                    parts[name, key] = HeldPart(f"{name}.{key}", note.spec, nd, self.layout.home(name), tensor)
        whole = dict(zip(parts, gather.whole(list(parts.values())), strict=True))
        state, groups, number = dict[int, dict[str, Any]](), [], 0
        for names, group in zip(listed, self.optimizer.param_groups, strict=True):
            numbers = list(range(number, number + len(names)))
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
            number += len(names)
            for i, name in zip(numbers, names, strict=True):
                if name in known:
                    state[i] = {key: whole.get((name, key), note) for key, note in known[name].items()}
        return {"state": state, "param_groups": groups}

    @property
    def _entries(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of what this rank owns, by parameter."""
        return {k.name: self.optimizer.state[k.owned] for k in self.by_name.values() if k.owned in self.optimizer.state}

    def known_entries(self, notes: Callable[[Any], list[Any]]) -> dict[str, dict[str, Any]]:
        """What anybody has of the optimizer's state, by parameter: `StoredEntry` for a tensor, else the value."""
        mine = {n: {key: self._note(n, v) for key, v in s.items()} for n, s in self._entries.items()}
        known: dict[str, dict[str, Any]] = {}
        for said in notes(mine):
            for name, entries in said.items():
                known.setdefault(name, entries)
        return known

    def listed_now(self) -> list[list[str]]:
        """The optimizer's parameters by group; where no rank has all of them, as they were when the job was made."""
        if len(self.layout.places) > 1:
            return self.listed
        names = {id(p): k.name for k in self.kept for p in (k.param, k.owned)}
        return [[names.get(id(p), "") for p in g["params"]] for g in self.optimizer.param_groups]

    def _note(self, name: str, value: Any) -> Any:
        """What others need to know of an entry of the optimizer's state: of a tensor what it is, else the value."""
        if not isinstance(value, Tensor) or not value.dim():
            return value
        k = self.by_name[name]
        part, spec = optim.is_part(k, value), spec_of(value)
        return StoredEntry(replace(spec, shape=k.spec.shape) if part else spec, part)

    def load_optimizer_state_dict(self, given: Mapping[str, Any]) -> None:
        """The inverse; also of what a plain optimizer over the same parameters saved."""
        self.about_to_change()
        if len(self.layout.places) > 1:
            given = self._of_this_place(given)
        optim.load_state_dict(self.optimizer, list(self.by_name.values()), given, self.layout.cut)
        self.tracked.note()

    def _of_this_place(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's state of those parameters that are held here."""
        counts = [len(names) for names in self.listed]
        if [len(g["params"]) for g in given["param_groups"]] != counts:
            raise StateError("the optimizer state has other parameter groups than this optimizer", mine=str(counts))
        numbers = [i for g in given["param_groups"] for i in g["params"]]
        by_name = dict(zip([n for names in self.listed for n in names], numbers, strict=True))
        narrowed: dict[str, Any] = {"state": {}, "param_groups": []}
        for names, group in zip(self.listed, given["param_groups"], strict=True):
            here = [by_name[n] for n in names if n in self.by_name]
            narrowed["param_groups"].append({**group, "params": here})
            narrowed["state"].update({i: given["state"][i] for i in here if i in given["state"]})
        return narrowed

    # --- the model whole again -----------------------------------------------------------------------

    def whole_tensors(self, gather: Gather, names: Iterable[str]) -> dict[str, Tensor]:
        """Parameters and buffers by slot, whole."""
        wanted = list(names)
        return dict(zip(wanted, gather.whole([self._part(n) for n in wanted]), strict=True))

    @property
    def tensor_names(self) -> list[str]:
        """Of all parameters and buffers, those included that the model came to hold later, the same on every rank."""
        return list(dict.fromkeys([*(s.name for s in self.slots), *self.specs]))

    def whole_model(self, gather: Gather) -> nn.Module:
        """The user's model where it is whole; else a copy of it with whole weights, for inference."""
        if all(self.layout.is_whole(s.name) for s in self.slots if s.kind == "param"):
            return self.model
        if self._copy is None:
            self._copy = self._empty_copy()
        state, listed = self.state_dict(gather), set(self._slot_of.values())
        rest = self.whole_tensors(gather, [n for n in self.tensor_names if n not in listed])
        with torch.no_grad():
            self._copy.load_state_dict(state)
            for slot in slots_of(self._copy):  # what is in no state dict: buffers that don't persist, plain attributes
                if slot.name in rest:
                    slot.tensor.copy_(rest[slot.name])
        return self._copy

    def _empty_copy(self) -> nn.Module:
        """A model of the same code with room for whole weights."""
        memo: dict[int, Any] = {}
        for slot in self.slots:
            room = torch.empty_like(self.whole[slot.name], device=slot.tensor.device)
            memo[id(slot.tensor)] = nn.Parameter(room, slot.tensor.requires_grad) if slot.kind == "param" else room
        with allowed():
            return stripped(copy.deepcopy(self.model, memo))

    def give_back(self, gather: Gather) -> None:
        """Put whole tensors into the user's model, and whole state into the user's optimizer."""
        self.about_to_change()
        split = [s for s in self.slots if not self.layout.is_whole(s.name)]
        found = self.whole_tensors(gather, [s.name for s in split])
        state = self.optimizer_state_dict(gather)
        params = {s.name: s.tensor for s in self.slots}
        groups: list[list[Any]] = [[params[n] for n in names] for names in self.listed_now()]
        for slot in split:
            slot.tensor.data = found[slot.name]
        self.optimizer.state.clear()
        for group, those in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = those
        self.optimizer.load_state_dict(state)

    # --- another layout ------------------------------------------------------------------------------

    def laid(
        self,
        layout: StateLayout,
        held: dict[str, Tensor],
        kept: list[Kept],
        ema: dict[str, Tensor],
        trained: Sequence[Kept],
        listed: list[list[str]],
    ) -> None:
        """Take what was put in place for another layout (`change_layout.py`)."""
        self.layout, self.held, self.kept, self.ema, self.listed = layout, held, kept, ema, listed
        self._settled(trained)
        self._copy = None


@dataclass(frozen=True)
class StoredEntry:
    """A tensor of the optimizer's state, as ranks tell each other of it."""

    spec: TensorSpec
    """Of the whole."""
    part: bool
    """Whether ranks hold parts, as they own the parameter."""

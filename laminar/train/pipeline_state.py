"""Weights and optimizer state of a job with stages: whole on every rank, from where their stages hold them.

Whatever is asked for is put together at its home, the first place that holds it, and sent to everybody; what is given
is cut by those who hold a part of it. Formats are those of plain PyTorch, as for jobs without stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laminar.capture.model_tensors import Slot
from laminar.capture.torch_ops import DTYPES, spec_of
from laminar.errors import LaminarError, StateError
from laminar.ir.mesh import Mesh, Place
from laminar.ir.sbp import B, NdSbp
from laminar.ir.staged import Staged
from laminar.ir.tensor import TensorSpec
from laminar.lower.reshard import Move
from laminar.train import checkpoint
from laminar.train import optimizer as optim
from laminar.train.engine import Engine
from laminar.train.optimizer import Kept
from laminar.train.optimizer_changes import Tracked
from laminar.train.sharded_model import own_state, whole_again


class StagedState(checkpoint.Stored):
    """What a job with stages does with its state. The job writes `_move` and `_cut`."""

    rank: int
    world: int
    device: torch.device
    mesh: Mesh
    plan: Staged
    optimizer: torch.optim.Optimizer
    _at: int
    """Which place this rank is at."""
    _homes: dict[str, list[int]]
    """For every tensor of the model, the places that hold it, the first its home; none: it lies everywhere."""
    _lies: dict[tuple[str, int], NdSbp]
    """How a tensor lies at a place, and how what is owned of it does."""
    _owned_nd: dict[tuple[str, int], NdSbp]
    _model: nn.Module
    _engine: Engine
    _slots: Sequence[Slot]
    _specs: dict[str, TensorSpec]
    _held: dict[str, Tensor]
    _kept: list[Kept]
    _by_name: dict[str, Kept]
    _tracked: Tracked
    _listed: list[list[str]]
    """The optimizer's parameters as the user gave them, by group."""
    _ema: dict[str, Tensor]
    """What this rank owns of the weights' moving average."""
    _ema_decay: float | None
    _copy: nn.Module | None = None

    def _move(self, items: list[Move], why: str, tensors: list[Tensor]) -> list[Tensor]:
        raise NotImplementedError

    def _cut(self, whole: Tensor, nd: NdSbp) -> Tensor:
        raise NotImplementedError

    def state_dict(self, sharded: bool = False, ema: bool = False) -> dict[str, Any]:
        """Whole weights and buffers under the model's own names, on every rank.

        `ema=True` gives the moving average of the weights instead.
        """
        if sharded:
            raise LaminarError("a job with stages gives whole weights only", next="state_dict() without sharded=True")
        if ema and self._ema_decay is None:
            raise StateError("this job keeps no moving average", next="parallelize(..., ema=0.999)")
        of = {name: s.name for s in self._slots for name in (s.name, *s.aliases)}
        own = own_state(self._model)
        names = list(own)
        found = {name: self._given(name, ema) for name in dict.fromkeys(of.values())}
        return {n: found[of[n]] if n in of else own[n] for n in names}

    def _given(self, name: str, ema: bool) -> Tensor:
        """A weight or buffer as a state dict has it; every parameter has an average."""
        if not ema or not any(s.name == name and isinstance(s.tensor, nn.Parameter) for s in self._slots):
            return self._whole(name, self._held.get(name), self._lies)
        average = self._ema.get(name)
        piece = None if average is None else average.to(DTYPES[self._specs[name].dtype])
        return self._whole(name, piece, self._owned_nd)

    def _whole(
        self, name: str, piece: Tensor | None, lies: Mapping[tuple[str, int], NdSbp], dtype: torch.dtype | None = None
    ) -> Tensor:
        """A tensor put together at its home and sent to everybody."""
        homes, spec = self._homes.get(name, []), self._specs[name]
        if not homes:
            assert piece is not None
            return piece.clone()
        home: Place = self.plan.places[homes[0]]
        if self.rank in home.ranks:
            assert piece is not None
            nd, everywhere = lies[name, self._at], (B,) * len(self.mesh.sizes)
            like = spec_of(torch.empty(spec.shape, dtype=piece.dtype, device="meta"))
            (out,) = self._move([(name, like, nd, everywhere)], f"a whole {like.dtype}", [piece])
            out = out.clone(memory_format=torch.contiguous_format)
        else:
            out = torch.empty(spec.shape, dtype=dtype or DTYPES[spec.dtype], device=self.device)
        if self.world > 1:
            dist.broadcast(out.view(torch.uint8) if out.dtype == torch.bool else out, home.ranks[0])
        return out

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state dict of this model, from here or from plain PyTorch."""
        missing = sorted(set(own_state(self._model)) - set(given))
        if missing:
            raise StateError("the state dict is not this model's", missing=", ".join(missing[:5]))
        kept = {k.name: k for k in self._kept}
        for slot in self._slots:
            name = next((n for n in (slot.name, *slot.aliases) if n in given), None)
            if name is None or slot.name not in self._held:
                continue
            value, spec = given[name], self._specs[slot.name]
            if tuple(value.shape) != spec.shape:
                raise StateError(f"{name} is {tuple(value.shape)} in the state dict, {spec} in the model")
            everywhere = (B,) * len(self.mesh.sizes)
            with torch.no_grad():
                self._held[slot.name].copy_(
                    self._cut(value.detach(), self._lies.get((slot.name, self._at), everywhere))
                )
                if slot.name in kept and kept[slot.name].gathered:
                    kept[slot.name].owned.copy_(self._cut(value.detach(), kept[slot.name].state_nd))
                if slot.name in self._ema:
                    self._ema[slot.name].copy_(kept[slot.name].owned.detach())

    def load_average(self, given: Mapping[str, Tensor]) -> None:
        """Take the moving average of the weights from whole tensors."""
        for k in self._kept:
            self._ema[k.name].copy_(self._cut(given[k.name], k.state_nd))

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` would be on one device, on every rank."""
        mine = {
            k.name: self.optimizer.state[k.owned] for k in self._by_name.values() if k.owned in self.optimizer.state
        }
        about = {n: {key: _note(v) for key, v in entries.items()} for n, entries in mine.items()}
        known: dict[str, dict[str, Any]] = {}
        for said in self._world.gather_objects(about):
            for name, entries in said.items():
                known.setdefault(name, entries)
        state, number = {}, 0
        groups = []
        for names, group in zip(self._listed, self.optimizer.param_groups, strict=True):
            numbers = list(range(number, number + len(names)))
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
            for name in names:
                if name in known:
                    entries = known[name].items()
                    state[number] = {key: self._entry(name, key, note, mine) for key, note in entries}
                number += 1
        return {"state": state, "param_groups": groups}

    def _entry(self, name: str, key: str, note: Any, mine: Mapping[str, Any]) -> Any:
        """One entry of a parameter's state: pieces put together, numbers as their home has them."""
        if not isinstance(note, str):
            return note
        piece = mine[name][key] if name in mine else None
        return self._whole(name, piece, self._owned_nd, DTYPES[note])

    def load_optimizer_state_dict(self, given: Mapping[str, Any]) -> None:
        """The inverse; also of what a plain optimizer over the same parameters saved."""
        counts = [len(names) for names in self._listed]
        if [len(g["params"]) for g in given["param_groups"]] != counts:
            raise StateError("the optimizer state has other parameter groups than this optimizer", mine=str(counts))
        numbers = [i for g in given["param_groups"] for i in g["params"]]
        by_name = dict(zip([n for names in self._listed for n in names], numbers, strict=True))
        narrowed: dict[str, Any] = {"state": {}, "param_groups": []}
        for names, group in zip(self._listed, given["param_groups"], strict=True):
            here = [by_name[n] for n in names if n in self._by_name]
            narrowed["param_groups"].append({**group, "params": here})
            narrowed["state"].update({i: given["state"][i] for i in here if i in given["state"]})
        optim.load_state_dict(self.optimizer, list(self._by_name.values()), narrowed, self._cut)
        self._tracked.note()

    def _give_back(self) -> None:
        """Whole weights and state on every rank; see `Stored.release`."""
        params = {s.name: s.tensor for s in self._slots}
        whole = {name: self._whole(name, self._held.get(name), self._lies) for name in params}
        groups: list[list[Any]] = [[params[n] for n in names] for names in self._listed]
        whole_again(self, whole, self.optimizer_state_dict(), groups)

    @property
    def model(self) -> nn.Module:
        """A copy of the model with whole weights, for inference."""
        if self._copy is None:
            self._copy = checkpoint.empty_copy(self._model, self._slots, self._engine.whole, self.device)
        rest = {n: t for n, t in self._held.items() if not self._homes.get(n)}
        checkpoint.fill(self._copy, self.state_dict(), rest)
        return self._copy


def _note(value: Any) -> Any:
    """What others need to know of an entry of the optimizer's state: the dtype of a piece, or the value itself."""
    return spec_of(value).dtype if isinstance(value, Tensor) and value.dim() else value

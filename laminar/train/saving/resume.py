"""A job goes on from a checkpoint: every rank reads its own boxes, and nothing changes until all of it is there.

First everything that a checkpoint says is held against the job: names, shapes and dtypes of weights and buffers, the
entries of the optimizer, groups and options, whether it is exact mode's. Then blocks are read, each verified by its
hash. Only when all ranks have all they need is any of it put in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES
from laminar.checkpoint.format.block_grid import Slices
from laminar.checkpoint.format.manifest import Manifest
from laminar.checkpoint.format.state_record import TensorKey, TensorRecord
from laminar.checkpoint.history.references import CheckpointRef
from laminar.checkpoint.read.state_reader import StateReader
from laminar.checkpoint.store.protocol import Store
from laminar.errors import CheckpointError, StateError, StorageError
from laminar.train.optimizer.entry_check import expected_entries, wrong_entries
from laminar.train.protocol import HasState
from laminar.train.saving.scalars import OptimizerGroup, read_scalars, take_scalars
from laminar.train.state.fill import (
    StagedBox,
    averages_begin_anew,
    entry_here,
    put_staged,
    stage_averages,
    stage_weights,
)
from laminar.train.state.opaque import tensor_from
from laminar.train.state.state import JobState

LISTED = 5
"""Names that an error lists of each kind."""


@dataclass
class _Loaded:
    """What one rank has read, ready to be put in place."""

    groups: list[OptimizerGroup]
    boxes: list[StagedBox]
    averages: list[StagedBox] | None
    entries: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    """The optimizer's state, by what is owned of a parameter."""


class CheckpointOfJob:
    """A checkpoint as a job reads it."""

    def __init__(self, state: JobState, reader: StateReader) -> None:
        self.state, self.reader, self.manifest = state, reader, reader.manifest
        self.kinds = {s.name: "parameter" if s.kind == "param" else "buffer" for s in state.slots}
        self.entries: dict[str, list[TensorRecord]] = {}
        for tensor in self.manifest.state.tensors:
            if tensor.key.kind == "optimizer":
                self.entries.setdefault(tensor.key.name, []).append(tensor)

    # --- before anything is read

    def check(self) -> tuple[list[OptimizerGroup], dict[str, dict[str, Any]]]:
        """Refuse a checkpoint that is not this job's; its groups, and entries of the optimizer that are no tensors."""
        self._check_weights()
        groups, numbers = read_scalars(self.state, self.manifest.state.scalars)
        self._check_entries(groups, numbers)
        return groups, numbers

    def _key(self, name: str) -> TensorKey:
        return TensorKey(self.kinds.get(name, "buffer"), name)

    def _check_weights(self) -> None:
        there, state = self.manifest.state.by_key, self.state
        mine = {self._key(name): spec for name, spec in state.specs.items()}
        loose = set(self.manifest.about.get("attributes", ()))
        plain = {s.name for s in state.slots if s.plain} | (set(state.specs) - {s.name for s in state.slots})
        empty = {n for n, spec in state.specs.items() if not spec.numel}
        missing = [k for k in mine if k not in there and k.name not in plain | empty]
        theirs = [k for k in there if k.kind in ("parameter", "buffer")]
        unexpected = [k for k in theirs if k not in mine and k.name not in loose]
        shapes = [
            f"{k.name} is {there[k].dtype}{list(there[k].shape)} there, {spec} in the model"
            for k, spec in mine.items()
            if k in there and (there[k].dtype, there[k].shape) != (spec.dtype, spec.shape)
        ]
        if missing or unexpected or shapes:
            raise StateError(
                "the checkpoint is not this model's",
                shapes=_some(shapes),
                missing=_some([k.name for k in missing]),
                unexpected=_some([k.name for k in unexpected]),
                next="make the model as it was, or take what fits: job.load_weights(path, strict=False)",
            )
        odd = [k.name for k in theirs if k not in mine]
        odd += [k.name for k in mine if k not in there and k.name not in empty]
        if odd:
            said = f"plain attributes that are in the checkpoint or in the model alone are left alone: {_some(odd)}"
            logging.getLogger("laminar").warning(said)

    def _check_entries(self, groups: list[OptimizerGroup], numbers: Mapping[str, Mapping[str, Any]]) -> None:
        state, wrong = self.state, []
        for group in groups:
            known: dict[torch.dtype, Any] = {}
            for name in group.names:
                tensors = {t.key.entry: (t.shape, DTYPES[t.dtype]) for t in self.entries.get(name, ())}
                given: dict[str, Any] = {**tensors, **dict.fromkeys(numbers.get(name, ()))}
                dtype = DTYPES[state.specs[name].dtype]
                if dtype not in known:
                    known[dtype] = expected_entries(state.optimizer, group.options, dtype)
                if given and known[dtype] is not None:
                    found = wrong_entries(known[dtype], given, state.specs[name].shape, state.rounded)
                    wrong += [f"{name}: {w}" for w in found]
        listed = {n for g in groups for n in g.names}
        wrong += [f"{n}: state of a parameter that is in no group" for n in self.entries if n not in listed]
        if wrong:
            raise StateError(
                f"the optimizer state in the checkpoint is not that of this {type(state.optimizer).__name__}",
                wrong=_some(wrong),
                next="use the optimizer that was saved, or begin with its weights: job.load_weights(path)",
            )

    # --- reading

    def read(self) -> _Loaded:
        """Everything that this rank holds, checked and verified."""
        groups, numbers = self.check()
        state = self.state
        names = [n for n in state.specs if self._key(n) in self.manifest.state.by_key]
        boxes = list(stage_weights(state, names, lambda name, index: self._box(self._key(name), index)))
        averages = None
        if state.ema_decay is not None:
            there = {k.name for k in self.manifest.state.by_key if k.kind == "average"}
            averages = list(stage_averages(state, there, lambda n, index: self._box(TensorKey("average", n), index)))
            anew = [k.name for k in state.averaged if k.name not in there]
            if anew:
                said = f"averages that the checkpoint does not have begin from the weights: {_some(anew)}"
                logging.getLogger("laminar").warning(said)
        loaded = _Loaded(groups, boxes, averages)
        for group in groups:
            for name in group.names:
                if name in state.by_name:
                    self._read_entries(loaded, name, numbers.get(name, {}), dict(group.options))
        return loaded

    def _read_entries(self, loaded: _Loaded, name: str, numbers: Mapping[str, Any], options: dict[str, object]) -> None:
        k = self.state.by_name[name]
        mine = next(g for g in self.state.optimizer.param_groups if any(p is k.owned for p in g["params"]))
        found: dict[str, Any] = dict(numbers)
        for tensor in self.entries.get(name, ()):
            found[tensor.key.entry] = entry_here(
                self.state, k, tensor.shape, partial(self._box, tensor.key), {**options, **mine}
            )
        if found:
            loaded.entries[k.owned] = found

    def _box(self, key: TensorKey, index: Slices) -> Tensor:
        """One box of a tensor of the checkpoint."""
        record = self.reader.tensor(key)
        box = tuple(slice(*part.indices(n)) for part, n in zip(index, record.shape, strict=True))
        return tensor_from(self.reader.read(key, box), record.dtype)

    # --- putting it in place

    def put(self, loaded: _Loaded) -> None:
        """The job is what was saved from now on."""
        state = self.state
        put_staged(state, loaded.boxes)
        averages_begin_anew(state)
        if loaded.averages is not None:
            put_staged(state, loaded.averages)
        state.optimizer.state.clear()
        state.optimizer.state.update(loaded.entries)
        take_scalars(state, self.manifest.state.scalars, loaded.groups)
        state.tracked.note()


def resume_from(job: HasState, store: Store, ref: CheckpointRef, fits: Callable[[Mapping[str, Any]], None]) -> Manifest:
    """Go on from a checkpoint; every rank calls this, with the same one, and all of them do or none does.

    `fits` refuses what is beside the state, before anything changes.
    """
    checkpoint, loaded = None, None
    failed: Exception | None = None
    try:
        reader = StateReader(store, ref)
        job.refuse_saved(reader.manifest.about.get("exact"))
        fits(reader.manifest.about)
        checkpoint = CheckpointOfJob(job.state, reader)
        loaded = checkpoint.read()
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        failed = error
    said = job.peers.gather_objects(None if failed is None else (_kind(failed), str(failed)))
    worst = min((s for s in said if s is not None), default=None, key=lambda s: FAILURE_KINDS.index(s[0]))
    if worst is not None:
        if failed is not None and _kind(failed) == worst[0]:
            raise failed
        what = f"on another rank: {worst[1]}"
        raise {"other": StateError, "storage": StorageError, "damaged": CheckpointError}[worst[0]](what)
    assert checkpoint is not None and loaded is not None
    checkpoint.put(loaded)
    return checkpoint.manifest


FAILURE_KINDS = ("other", "storage", "damaged")
"""Why a checkpoint is not gone on from; the first of several counts. Only after damage an earlier one is tried."""


def _kind(error: Exception) -> str:
    if isinstance(error, StorageError):
        return "storage"
    return "damaged" if isinstance(error, CheckpointError) else "other"


def _some(items: list[str]) -> str:
    more = f"; and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return "; ".join(items[:LISTED]) + more

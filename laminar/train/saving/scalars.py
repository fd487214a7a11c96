"""What a run is besides tensors: hyper-parameters, entries of optimizers that are numbers, the loss scale, step, seed.

These are plain values whose bits count: they stand under the root that says whether two states are equal. What says
only how an update is computed (`LEFT_OUT`) is none of them. Given back, they are checked against what the job has:
same groups of the same parameters, same options of the same types, finite numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from laminar.errors import StateError
from laminar.train.state.state import JobState, StoredEntry

LEFT_OUT = ("params", "fused", "foreach", "capturable", "differentiable")
"""Entries of an optimizer's groups that say how an update is computed, not which."""
Notes = Callable[[Any], list[Any]]
"""What every rank says, by rank, where ranks hold other tensors."""


@dataclass(frozen=True)
class OptimizerGroup:
    """One group of an optimizer: whose updates it is about, and its options."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


def scalars_of(state: JobState, notes: Notes) -> dict[str, Any]:
    """As they are now; every rank calls this, and gets the same."""
    groups = []
    for names, group in zip(state.listed_now(), state.optimizer.param_groups, strict=True):
        options = {k: _plain(v) for k, v in group.items() if k not in LEFT_OUT and _can_be_kept(v)}
        groups.append({"parameters": names, "options": options})
    entries: dict[str, dict[str, Any]] = {}
    for name, known in state.known_entries(notes).items():
        for key, value in known.items():
            if not isinstance(value, StoredEntry | Tensor):
                if not _can_be_kept(value):
                    raise StateError(
                        f"the optimizer keeps {key} of {name} as a {type(value).__name__}, which can't be saved",
                        allowed="tensors, numbers, text, lists of these",
                    )
                entries.setdefault(name, {})[key] = _plain(value)
    scaler = None if state.scaler is None else {k: _plain(v) for k, v in vars(state.scaler).items()}
    return {
        "steps": state.steps,
        "seed": state.seed,
        "groups": groups,
        "entries": entries,
        "average": None if state.ema_decay is None else _plain(state.ema_decay),
        "scaler": scaler,
    }


def read_scalars(state: JobState, given: Any) -> tuple[list[OptimizerGroup], dict[str, dict[str, Any]]]:
    """Groups and entries out of a checkpoint's scalars, once all of these have been found to fit the job."""
    try:
        groups = [OptimizerGroup(tuple(g["parameters"]), _values(g["options"])) for g in given["groups"]]
        entries = {name: _values(known) for name, known in given["entries"].items()}
        whole = [given["steps"], given["seed"]]
        _values(given["scaler"] or {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"the checkpoint's scalars make no sense: {error!r}") from error
    for number in whole:
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise StateError(f"the checkpoint's steps and seed make no sense: {whole}")
    _compare_groups(state, groups)
    return groups, entries


def take_scalars(state: JobState, given: Mapping[str, Any], groups: Sequence[OptimizerGroup]) -> None:
    """Go on with a checkpoint's steps, seed, options and loss scale."""
    for group, theirs in zip(state.optimizer.param_groups, groups, strict=True):
        for key, value in theirs.options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
    state.steps, state.seed = given["steps"], given["seed"]
    if state.scaler is not None and given["scaler"]:
        mine = vars(state.scaler)
        mine.update({k: v for k, v in _values(given["scaler"]).items() if k in mine})


def _compare_groups(state: JobState, groups: Sequence[OptimizerGroup]) -> None:
    listed = state.listed_now()
    if [sorted(names) for names in listed] != [sorted(g.names) for g in groups]:
        raise StateError(
            "the optimizer state has other parameter groups than this optimizer",
            mine=_groups_said(listed),
            given=_groups_said([g.names for g in groups]),
        )
    for i, (group, theirs) in enumerate(zip(state.optimizer.param_groups, groups, strict=True)):
        known = {*LEFT_OUT, *theirs.options}
        mine = (k for k in state.optimizer.defaults if k in group and _can_be_kept(group[k]))
        missing = [k for k in mine if k not in known]
        if missing:
            raise StateError(
                f"the optimizer state in the checkpoint is not that of this {type(state.optimizer).__name__}",
                why=f"group {i} has no {', '.join(missing)} there",
                next="use the optimizer that was saved, or begin with its weights: job.load_weights(path)",
            )
        for key, value in theirs.options.items():
            _check_option(f"{key} of the optimizer's group {i}", value, group.get(key, value))


def _check_option(what: str, value: Any, mine: Any) -> None:
    """An option has to be of the job's own type; numbers may be ints where floats are meant, and have to be finite."""
    if isinstance(mine, Tensor):
        mine = mine.tolist()
    if isinstance(value, list | tuple) and isinstance(mine, list | tuple):
        if len(value) != len(mine):
            raise StateError(f"{what} has {len(value)} values in the checkpoint, {len(mine)} here")
        for one, other in zip(value, mine, strict=True):
            _check_option(what, one, other)
        return
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (value, mine))
    if not (numbers or type(value) is type(mine) or mine is None or value is None):
        raise StateError(f"{what} is {value!r} in the checkpoint, where this optimizer has {mine!r}")
    if isinstance(value, float) and not math.isfinite(value) and value != mine:
        raise StateError(f"{what} is {value} in the checkpoint", next="use another checkpoint: this one is no good")


def _groups_said(groups: Sequence[Sequence[str]]) -> str:
    return "; ".join(f"{len(g)} parameters from {g[0] if g else 'nothing'}" for g in groups)


def _can_be_kept(value: Any) -> bool:
    if isinstance(value, Tensor | np.generic):
        return value.size == 1 if isinstance(value, np.generic) else value.numel() == 1
    if isinstance(value, list | tuple):
        return all(_can_be_kept(v) for v in value)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> Any:
    """As canonical JSON holds it: floats by their bits, so that none is rounded and infinities have a name."""
    if isinstance(value, Tensor | np.generic):
        value = value.item()
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_plain(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": {str(k): _plain(v) for k, v in value.items()}}
    return value


def _value(plain: Any) -> Any:
    if not isinstance(plain, dict):
        if isinstance(plain, list):
            raise TypeError("a list without a kind")
        return plain
    ((kind, inner),) = plain.items()
    if kind == "float":
        return float.fromhex(inner)
    if kind == "tuple":
        return tuple(_value(v) for v in inner)
    if kind == "list":
        return [_value(v) for v in inner]
    if kind == "dict":
        return {k: _value(v) for k, v in inner.items()}
    raise ValueError(f"a value of kind {kind!r}")


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _value(value) for key, value in given.items()}

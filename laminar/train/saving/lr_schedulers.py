"""Learning-rate schedulers that users step themselves: kept with a job's checkpoint, and put back when it goes on.

A scheduler knows its optimizer, and no optimizer knows its schedulers. So those that are made are remembered, and
those that belong to a job are looked for among them when it is saved or resumed: every scheduler of torch's kind,
alive, whose optimizer is the job's; one that is part of another goes with that. Others can be named
(`job.save(directory, scheduler=...)`). What is kept is `state_dict()`.

A scheduler that is made after `resume` is told where it stands in torch's own way, `last_epoch=job.steps - 1`: groups
have their `initial_lr` from the checkpoint.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from laminar.capture.torch_private import alive_of, remember_made
from laminar.errors import StateError

remember_made(LRScheduler)


def attached(optimizer: Any, named: Any = None) -> list[Any]:
    """The schedulers named, or those that are alive and belong to an optimizer, without the parts of others."""
    if named is not None:
        return list(named) if isinstance(named, Sequence) else [named]
    alive = alive_of(LRScheduler)
    found = [s for s in alive if getattr(s, "optimizer", None) is optimizer]
    parts = {id(inner) for s in found for inner in getattr(s, "_schedulers", ())}
    return [s for s in found if id(s) not in parts]


def states(schedulers: Sequence[Any]) -> list[dict[str, Any]]:
    """What a checkpoint keeps of them, as plain data."""
    return [{"class": type(s).__name__, "state": _plain(s.state_dict())} for s in schedulers]


def refuse_other_schedulers(schedulers: Sequence[Any], kept: Sequence[dict[str, Any]], where: Any, named: bool) -> None:
    """Refuse schedulers that are not a checkpoint's, by their classes, or by their number where they are named."""
    if named and len(schedulers) != len(kept):
        raise StateError(f"{where} holds {len(kept)} schedulers, {len(schedulers)} are named")
    if named or not kept or not schedulers:
        return
    mine, theirs = Counter(type(s).__name__ for s in schedulers), Counter(k["class"] for k in kept)
    if mine != theirs or max(theirs.values()) > 1:
        raise StateError(
            f"{where} was saved with {_names(theirs)}, and this optimizer has {_names(mine)}",
            next="name them in both: job.save(store, scheduler=[...]), job.resume(store, scheduler=[...])"
            if mine == theirs
            else "make the same scheduler as before, or forget the one that is not wanted",
        )


def restore(schedulers: Sequence[Any], kept: Sequence[dict[str, Any]], where: Any) -> None:
    """Put schedulers where those of a checkpoint stood, one by one in order of their classes."""
    refuse_other_schedulers(schedulers, kept, where, False)
    if kept and not schedulers:
        warnings.warn(
            f"{where} holds the state of a {kept[0]['class']} and the optimizer has no scheduler: make it before"
            " resume, or with last_epoch=job.steps - 1",
            stacklevel=5,
        )
    for s in schedulers if kept else ():
        s.load_state_dict(_back(next(k["state"] for k in kept if k["class"] == type(s).__name__)))


def restore_named(schedulers: Sequence[Any], kept: Sequence[dict[str, Any]], where: Any) -> None:
    """The same for schedulers that were named: in the order in which they were saved."""
    refuse_other_schedulers(schedulers, kept, where, True)
    for s, k in zip(schedulers, kept, strict=True):
        s.load_state_dict(_back(k["state"]))


def _names(counts: Counter[str]) -> str:
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())


def _plain(value: Any) -> Any:
    """A state as JSON can hold it; what it can't (functions) is left out, as torch leaves out lambdas."""
    if isinstance(value, torch.Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": value.hex()}
    if isinstance(value, Counter):
        return {"counter": [[k, v] for k, v in value.items()]}
    if isinstance(value, dict):
        return {"dict": [[k, _plain(v)] for k, v in value.items() if _kept(v)]}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_plain(v) if _kept(v) else None for v in value]}
    return value


def _kept(value: Any) -> bool:
    if isinstance(value, torch.Tensor | dict | list | tuple):
        return True
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _back(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"].removeprefix("torch.")))
    ((kind, items),) = value.items()
    if kind == "float":
        return float.fromhex(items)
    if kind == "counter":
        return Counter(dict(items))
    if kind == "dict":
        return {k: _back(v) for k, v in items}
    return tuple(map(_back, items)) if kind == "tuple" else [_back(v) for v in items]

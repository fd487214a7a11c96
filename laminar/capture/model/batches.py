"""What a batch may be: tensors in nested containers, taken apart and put together again as the same types.

Dicts, lists and tuples, and what people make of them: ordered and default dicts, `UserDict`s (a tokenizer's
`BatchEncoding` is one), other mappings, named tuples, dataclasses, a library's dataclass that is a mapping as well
(`ModelOutput`). A loss gets back the type it would get in an ordinary loop. Tensors are leaves with names
(`batch.x`, `batch.0.mask`); None, numbers and texts are part of the structure, so a batch in which one of them is
another is another graph. The structure is JSON: graphs keep it, and ranks compare it.
"""

from __future__ import annotations

import importlib
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from laminar.errors import BatchError

BATCH_SCALARS = (bool, int, float, str)
ALLOWED = (
    "tensors, numbers, texts and None in nested dicts and other mappings, lists, tuples, named tuples, dataclasses"
)


class Opened(NamedTuple):
    """A container taken apart: what kind it is, and its items by key."""

    kind: str
    keys: list[Any]
    items: list[Any]


_SEEN: dict[str, Any] = {}
"""Classes (and the factories of default dicts) that were taken apart in this process, by where they are found."""


def _name(thing: Any) -> str:
    name = f"{thing.__module__}:{thing.__qualname__}"
    _SEEN[name] = thing
    return name


def _found(name: str) -> Any:
    if name not in _SEEN:
        module, _, path = name.partition(":")
        try:
            thing: Any = importlib.import_module(module)
            for part in path.split("."):
                thing = getattr(thing, part)
        except (ImportError, AttributeError):
            raise BatchError(f"the batch is of the type {name}, which can't be found", allowed=ALLOWED) from None
        _SEEN[name] = thing
    return _SEEN[name]


def opened(value: Any) -> Opened | None:
    """A container as kind, keys and items; None for anything that is none."""
    cls = type(value)
    if cls is dict:
        return Opened("dict", list(value), list(value.values()))
    if cls in (list, tuple):
        return Opened(cls.__name__, list(range(len(value))), list(value))
    if isinstance(value, (list, tuple)):
        return Opened(f"row {_name(cls)}", list(getattr(cls, "_fields", range(len(value)))), list(value))
    if isinstance(value, type):
        return None
    if isinstance(value, dict) and is_dataclass(cls):
        return Opened(f"output {_name(cls)}", list(value), list(value.values()))
    if isinstance(value, defaultdict):
        made = f" {_name(value.default_factory)}" if value.default_factory is not None else ""
        return Opened(f"defaultdict {_name(cls)}{made}", list(value), list(value.values()))
    if isinstance(value, (dict, UserDict)):
        inside = value if isinstance(value, dict) else value.data
        held = {k: v for k, v in getattr(value, "__dict__", {}).items() if v is not inside}
        keys = [*inside, *map(Beside, held)]
        return Opened(f"mapping {_name(cls)}", keys, [*inside.values(), *held.values()])
    if isinstance(value, Mapping) and _remade(cls, value):
        return Opened(f"made {_name(cls)}", list(value), list(value.values()))
    if is_dataclass(value) or isinstance(value, Mapping):
        names = [f.name for f in fields(value)] if is_dataclass(value) else []
        held = {n: getattr(value, n) for n in names if hasattr(value, n)} | getattr(value, "__dict__", {})
        return Opened(f"object {_name(cls)}", list(held), list(held.values())) if held or names else None
    return None


class Beside(NamedTuple):
    """The key of an attribute that a mapping has beside its items; in JSON a list of one text, which no key is."""

    name: str


def _remade(cls: Any, value: Mapping[Any, Any]) -> bool:
    """Whether such a mapping can be made from a dict."""
    try:
        new = cls(dict(value))
        return type(new) is cls and list(new) == list(value) and all(new[k] is value[k] for k in value)
    except Exception:
        return False


def closed(kind: str, keys: list[Any], items: list[Any]) -> Any:
    """The container that `opened` took apart, around other items."""
    how, *names = kind.split(" ")
    held = dict(zip(keys, items, strict=True))
    if how == "dict":
        return held
    if how in ("list", "tuple"):
        return items if how == "list" else tuple(items)
    cls = _found(names[0])
    if how == "row":
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            return tuple.__new__(cls, items)
        return cls(items)
    if how == "output":
        return cls(**held)
    if how == "made":
        return cls(held)
    if how == "defaultdict":
        return cls(_found(names[1]) if len(names) > 1 else None, held)
    new = cls.__new__(cls)
    inside = {k: v for k, v in held.items() if not isinstance(k, Beside)}
    attributes = {k.name: v for k, v in held.items() if isinstance(k, Beside)}
    if how == "object":
        attributes = inside
    elif issubclass(cls, OrderedDict):
        OrderedDict.__init__(new)
        for key, item in inside.items():
            OrderedDict.__setitem__(new, key, item)
    elif issubclass(cls, dict):
        dict.update(new, inside)
    else:
        attributes = {"data": inside, **attributes}
    for key, item in attributes.items():
        object.__setattr__(new, key, item)
    return new


def _kept(value: Any) -> bool:
    """Whether it is a plain value, or there are tensors in it."""
    if value is None or isinstance(value, (Tensor, *BATCH_SCALARS)):
        return True
    parts = opened(value)
    return parts is not None and any(isinstance(v, Tensor) or (opened(v) is not None and _kept(v)) for v in parts.items)


def mapped(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """A batch of the same structure with its tensors changed; anything else in it stays."""
    if isinstance(batch, Tensor):
        return change(batch)
    if batch is None or isinstance(batch, BATCH_SCALARS):
        return batch
    parts = opened(batch)
    return closed(parts.kind, parts.keys, [mapped(v, change) for v in parts.items]) if parts else batch


def flatten(batch: Any) -> tuple[dict[str, Tensor], Any]:
    """Leaves of a nested batch by name (`batch.x`, `batch.0.mask`), and its structure with names for leaves."""
    leaves: dict[str, Tensor] = {}

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            if name in leaves:
                raise BatchError(f"two tensors of the batch would be called {name}", next="give one another key")
            leaves[name] = value
            return {"leaf": name}
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or type(value) in BATCH_SCALARS:
            return {"value": value}
        parts = opened(value)
        if parts is None:
            array = isinstance(value, np.ndarray)
            raise BatchError(
                f"{name} is a {type(value).__name__}",
                allowed=ALLOWED,
                next="torch.as_tensor makes a tensor of it" if array else "",
            )
        items = []
        for key, item in zip(parts.keys, parts.items, strict=True):
            # What a tokenizer knows about its words is nothing a captured step could read, and other in every batch.
            unread = isinstance(key, Beside) and key.name.startswith("_") and not _kept(item)
            label = key.name if isinstance(key, Beside) else key
            items.append({"value": None} if unread else walk(item, f"{name}.{label}"))
        if parts.kind in ("list", "tuple"):
            return {parts.kind: items}
        for key in parts.keys:
            if key is not None and type(key) not in BATCH_SCALARS and not isinstance(key, Beside):
                raise BatchError(f"{name} has the key {key!r}", allowed="texts and numbers as keys")
        return {parts.kind: [[k, v] for k, v in zip(parts.keys, items, strict=True)]}

    return leaves, walk(batch, "batch")


def unflatten(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """A batch of the captured structure around new leaves."""
    ((kind, value),) = tree.items()
    if kind == "leaf":
        return leaves[value]
    if kind == "value":
        return value
    if kind in ("list", "tuple"):
        return closed(kind, list(range(len(value))), [unflatten(v, leaves) for v in value])
    keys = [Beside(*k) if isinstance(k, (list, tuple)) else k for k, _ in value]
    return closed(kind, keys, [unflatten(v, leaves) for _, v in value])


def samples_in(leaves: Mapping[str, Tensor]) -> int:
    """How many samples a batch has: the length that most leaves have."""
    lengths = [t.shape[0] for t in leaves.values() if t.dim()]
    return Counter(lengths).most_common(1)[0][0] if lengths else 1


def refuse_empty(leaves: Mapping[str, Tensor]) -> None:
    """A step on no samples is none: means over nothing are no numbers."""
    if samples_in(leaves) == 0:
        shapes = ", ".join(f"{k} {list(t.shape)}" for k, t in leaves.items())
        raise BatchError(f"the batch has no samples: {shapes}", next="leave empty batches out of the data")

"""The tensors of a model, and how stand-ins take their places.

Parameters, buffers, and tensors kept as plain attributes (alone, or in a list or dict) are slots: one
per tensor, however many names it has. While a step is traced, every place that holds a slot's tensor
holds its stand-in, which passes for what it stands for: a parameter where that is one (`dressed`). A tensor
of the model that the step reaches some other way (a list in a closure) is exchanged on use, by `Canonical`.
Afterwards the model is as it was, whatever happened.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor, nn

from laminar.capture.torch_private import FakeTensor

OWN = frozenset(nn.Module().__dict__)
"""What every module has of its own: dicts of parameters, buffers, hooks."""
MODULE_SCALARS = (int, float, bool, str)


@dataclass
class Slot:
    """One tensor of the model: what holds it, under which names, and its stand-in while tracing."""

    name: str
    kind: str
    tensor: Tensor
    places: list[tuple[Any, Any]]
    """Dicts and lists that hold it, and under which key."""
    aliases: list[str] = field(default_factory=list)
    fake: Any = None
    plain: bool = False
    """Neither parameter nor registered buffer: state only if a step reads what an earlier one left."""
    own: Any = None
    """The model's own tensor, where `tensor` is one that was given instead."""

    def __post_init__(self) -> None:
        self.own = self.tensor if self.own is None else self.own

    @property
    def trainable(self) -> bool:
        """Whether a step has a gradient for it."""
        return self.kind == "param" and self.tensor.requires_grad

    @property
    def now(self) -> Any:
        """What stands in its first place at the moment."""
        holder, key = self.places[0]
        return holder.get(key) if isinstance(holder, dict) else holder[key] if key < len(holder) else None


def slots_of(model: nn.Module) -> list[Slot]:
    """Every tensor of a model, tied ones once, in order of first appearance."""
    found: dict[int, Slot] = {}
    elsewhere: list[tuple[Tensor, Any, Any]] = []
    registered = {
        id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None
    }

    def meet(name: str, kind: str, tensor: Tensor, holder: Any, key: Any, plain: bool = False) -> None:
        slot = found.setdefault(id(tensor), Slot(name, kind, tensor, [], plain=plain))
        if not any(h is holder and k == key for h, k in slot.places):
            slot.places.append((holder, key))
        if name != slot.name and name not in slot.aliases:
            slot.aliases.append(name)

    def kept(name: str, tensor: Tensor, holder: Any, key: Any) -> None:
        """A plain attribute; if it is another module's tensor, only one more place of that."""
        if id(tensor) in registered:
            elsewhere.append((tensor, holder, key))
        else:
            meet(name, "buffer", tensor, holder, key, plain=True)

    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for key, p in module._parameters.items():
            if p is not None:
                meet(prefix + key, "param", p, module._parameters, key)
        for key, b in module._buffers.items():
            if b is not None:
                meet(prefix + key, "buffer", b, module._buffers, key)
        for key, value in module.__dict__.items():
            if isinstance(value, Tensor):
                kept(prefix + key, value, module.__dict__, key)
            elif type(value) in (list, dict) and key not in OWN:
                for at, item in enumerate(value) if isinstance(value, list) else value.items():
                    if isinstance(item, Tensor):
                        kept(f"{prefix}{key}.{at}", item, value, at)
    for tensor, holder, key in elsewhere:
        found[id(tensor)].places.append((holder, key))
    return list(found.values())


def sharing(slots: list[Slot]) -> dict[str, str]:
    """Slots that lie in the same memory as another one, which stand-ins don't."""
    first: dict[int, str] = {}
    out: dict[str, str] = {}
    for slot in slots:
        if slot.tensor.is_meta or not slot.tensor.numel():
            continue
        other = first.setdefault(slot.tensor.untyped_storage().data_ptr(), slot.name)
        if other != slot.name:
            out[slot.name], out[other] = other, slot.name
    return out


def dressed(fake: Tensor, real: Tensor) -> Tensor:
    """A stand-in that passes for what it stands for: its class, and the attributes somebody gave it."""
    kind = type(real)
    fake._is_param = isinstance(real, nn.Parameter)
    if kind not in (Tensor, nn.Parameter):
        fake.__class__ = _both(kind)  # methods and class of a parameter of the user's own kind
    for name, value in vars(real).items():
        if not hasattr(fake, name):
            setattr(fake, name, value)
    return fake


@cache
def _both(kind: Any) -> Any:
    return type(kind)(kind.__name__, (FakeTensor, kind), {})


@contextlib.contextmanager
def swapped(model: nn.Module, slots: list[Slot]) -> Iterator[None]:
    """The model with stand-ins; whatever happens, its own tensors and attributes come back."""
    modules = list(model.modules())
    attributes = [
        (m, dict(m.__dict__), {k: dict(v) for k, v in m.__dict__.items() if k in OWN and isinstance(v, dict)})
        for m in modules
    ]
    kept = [
        (value, copy.copy(value))
        for m in modules
        for key, value in m.__dict__.items()
        if key not in OWN and type(value) in (list, dict, set)
    ]
    for slot in slots:
        for holder, key in slot.places:
            holder[key] = slot.fake
    try:
        yield
    finally:
        for m, attrs, own in attributes:
            m.__dict__.clear()
            m.__dict__.update(attrs)
            for key, before in own.items():
                m.__dict__[key].clear()
                m.__dict__[key].update(before)
        for value, before in kept:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(before)


def scalars(model: nn.Module) -> dict[str, Any]:
    """Numbers and texts that modules keep, in containers too."""
    out: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key in OWN:
                continue
            name = f"{path}.{key}" if path else key
            if type(value) in MODULE_SCALARS:
                out[name] = value
            elif type(value) in (list, dict, set):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                out[name] = [(k, v) for k, v in items if type(v) in MODULE_SCALARS]
    return out

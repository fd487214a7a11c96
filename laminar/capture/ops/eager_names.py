"""Names of parts that run as they are: the same on every rank and in every run, others for what may behave otherwise.

The name is a digest of all that can decide what a part does besides the tensors it is given: classes, plain values that
modules keep, submodules, configurations, arguments that are no tensors. Blocks of a model that are alike have one name,
so they are planned as alike. Where something has no digest (an open file, a hook), the object itself counts: the first
such is number 0, the next number 1, which is the same on every rank as long as ranks capture the same models in the
same order.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laminar.capture.model.model_tensors import OWN

MOST_VALUES = 5000
"""Values looked at for one digest; beyond that the object itself counts."""
_classes: dict[str, weakref.WeakKeyDictionary[Any, int]] = {}
_objects: dict[str, list[Any]] = {}


class NoDigest(Exception):
    """Something that has no digest."""


class _Patched:
    """A method that stands in the place of another while a model is traced."""

    original: Any = None


def number_of(thing: Any) -> str:
    """A class or function by its name, and by a number where several have that name."""
    name = f"{thing.__module__}.{thing.__qualname__}"
    known = _classes.setdefault(name, weakref.WeakKeyDictionary())
    count = known.setdefault(thing, len(known))
    return f"{name}~{count}" if count else name


def digest(*values: Any, identity: Any = None) -> str:
    """A few digits for values; where they have no digest, for `identity`, which is compared by `is`."""
    try:
        text = _Digest().of(values, 0)
    except NoDigest:
        text = _Digest(blind=True).of(values, 0)
        known = _objects.setdefault(text, [])
        at = next((i for i, k in enumerate(known) if _same(k, identity)), len(known))
        if at == len(known):
            known.append(_weak(identity))
        text = f"{text}~{at}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _weak(items: Any) -> list[Any]:
    out: list[Any] = []
    for item in items:
        try:
            out.append(weakref.ref(item))
        except TypeError:
            out.append(lambda item=item: item)
    return out


def _same(known: list[Any], items: Any) -> bool:
    return len(known) == len(items) and all(k() is i for k, i in zip(known, items, strict=True))


def beside(hook: Any) -> bool:
    """Whether a hook is one of ours that changes nothing about a step."""
    return bool(getattr(getattr(hook, "__self__", None), "beside_the_step", False))


class _Digest:
    def __init__(self, blind: bool = False) -> None:
        self.seen: dict[int, int] = {}
        self.keep: list[Any] = []
        self.blind = blind

    def of(self, value: Any, depth: int, slot: bool = False) -> str:
        """The text of a value; `slot` where a tensor is one of those that are given."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, enum.Enum):
            return str(value)
        if isinstance(value, (type, types.FunctionType)):
            return number_of(value)
        if id(value) in self.seen:
            return f"@{self.seen[id(value)]}"
        self.seen[id(value)] = len(self.seen)
        self.keep.append(value)
        if len(self.seen) > MOST_VALUES or depth > 40:
            return self._opaque()
        return self._inside(value, depth + 1, slot)

    def _inside(self, value: Any, depth: int, slot: bool) -> str:
        if isinstance(value, Tensor):
            return f"tensor:{tuple(value.shape)}{value.dtype}{value.requires_grad}" if slot else self._opaque()
        if isinstance(value, nn.Module):
            return self._module(value, depth)
        if isinstance(value, np.ndarray):
            return hashlib.sha256(value.tobytes()).hexdigest() if value.nbytes < 1 << 20 else self._opaque()
        if isinstance(value, functools.partial):
            return f"partial({self.of((value.func, value.args, value.keywords), depth)})"
        if isinstance(value, types.MethodType):
            return f"method({self.of(value.__func__, depth)},{self.of(value.__self__, depth)})"
        if isinstance(value, (types.BuiltinFunctionType, np.ufunc)):
            return getattr(value, "__qualname__", value.__name__)
        if isinstance(value, (list, tuple, torch.Size)):
            return f"{type(value).__name__}[{','.join(self.of(v, depth, slot) for v in value)}]"
        if isinstance(value, (set, frozenset)):
            return f"set[{','.join(sorted(self.of(v, depth) for v in value))}]"
        if isinstance(value, dict):
            return f"dict[{','.join(f'{self.of(k, depth)}={self.of(v, depth, slot)}' for k, v in value.items())}]"
        if isinstance(value, _Patched):
            return self.of(value.original, depth)
        kept = getattr(value, "__dict__", None)
        if kept is None or type(value).__module__ == "builtins":
            return self._opaque()
        return f"{number_of(type(value))}({self.of(kept, depth)})"

    def _module(self, m: nn.Module, depth: int) -> str:
        hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        if any(not beside(hook) for some in hooks for hook in some.values()):
            self._opaque()
        parts = [number_of(type(m)), str(m.training)]
        for key, value in sorted(m.__dict__.items()):
            if key in OWN or (isinstance(value, _Patched) and value.original is None):
                continue
            parts.append(
                f"{key}={self.of(value, depth, slot=isinstance(value, Tensor) or type(value) in (list, dict))}"
            )
        for items in (m._parameters, m._buffers):
            parts += [f"{k}={self.of(v, depth, slot=True)}" for k, v in items.items()]
        parts += [f"{k}={self.of(v, depth)}" for k, v in m._modules.items()]
        return f"module({';'.join(parts)})"

    def _opaque(self) -> str:
        if not self.blind:
            raise NoDigest
        return "?"

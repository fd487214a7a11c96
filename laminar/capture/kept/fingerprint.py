"""What a captured graph depends on, as one digest: the name under which it is kept from one run to the next.

The model that was really built counts, not the recipe it came from: which modules of which classes, their plain
attributes and configurations, shapes, dtypes, strides and sharing of their tensors, modes and hooks; the code of the
loss and of the modules, with what it closes over and the global values it reads; environment variables that it names;
versions and files of everything that is loaded; and the settings of torch that decide what runs.

What can't be looked into (a generator, a file, an object of C) has no digest, and a step that holds such a thing is
captured each time: the answer here is either sure or None. Tensors that a graph would hold as constants count by value.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import pathlib
import re
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laminar.cache import sources
from laminar.capture.model.model_tensors import OWN, slots_of
from laminar.capture.tensor_bytes import as_bytes
from laminar.capture.torch_private import OpOverload, OpOverloadPacket

PLAIN_VALUES = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range, slice)
TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
MOST_CONSTANT_BYTES = 64 << 20
"""Constants that are larger are not looked at."""
READS = frozenset(["open", "input", "read_text", "read_bytes", "urlopen"])
"""Names in code that says: what happens here depends on something outside."""
PER_PROCESS = frozenset(["_original_object_hash"])
"""Attributes that are different in every process and say nothing: transformers keeps a hash of texts."""
_OURS = str(Path(__file__).parents[2])


class Opaque(Exception):
    """Something that can't be looked into."""


def fingerprint(model: nn.Module, loss: Callable[[Any, Any], Any], *more: Any) -> str | None:
    """The digest of everything that a step of this model and loss depends on; `more` is added to it."""
    walk = Walk()
    try:
        for slot in slots_of(model):
            walk.slots[id(slot.tensor)] = slot.name
            t = slot.tensor
            walk.add(
                "slot",
                slot.name,
                slot.kind,
                t.dtype,
                tuple(t.shape),
                t.stride(),
                slot.trainable,
                *slot.aliases,
                str(t.device) if not t.is_meta else "",
                type(t).__qualname__,
                bool(t._backward_hooks),
            )
        storages: dict[int, str] = {}
        for slot in slots_of(model):
            if not slot.tensor.is_meta and slot.tensor.numel():
                shared = storages.setdefault(slot.tensor.untyped_storage().data_ptr(), slot.name)
                walk.add("lies", shared, slot.tensor.storage_offset())
        walk.visit(model)
        walk.visit(loss)
        walk.visit(more)
    except (Opaque, RecursionError):
        return None
    walk.add(*_settings(), sorted(sources(frozenset(walk.packages)).items()), sorted(walk.environment.items()))
    return walk.digest.hexdigest()[:32]


def _settings() -> list[Any]:
    cuda = torch.backends.cuda
    return [
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        torch.backends.mkldnn.enabled,
        sys.version,
        [(path, os.stat(path).st_mtime_ns) for path in sorted(torch.ops.loaded_libraries) if os.path.exists(path)],
    ]


class Walk:
    """A walk over values; each object is looked at once, and told again by the number of its first meeting."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.slots: dict[int, str] = {}
        self.environment: dict[str, str | None] = {}
        self.packages: set[str] = set()
        """Installed packages that code comes from, but for torch, whose version says enough."""
        self._met: dict[int, int] = {}
        self._alive: list[Any] = []

    def add(self, *words: Any) -> None:
        """Words as they are written."""
        self.digest.update(repr(words).encode())

    def visit(self, value: Any) -> None:
        """Anything that code could read."""
        if isinstance(value, (*PLAIN_VALUES, *TORCH)):
            self.add(type(value).__name__, value)
            return
        if id(value) in self.slots:
            self.add("the slot", self.slots[id(value)])
            return
        if id(value) in self._met:
            self.add("met", self._met[id(value)])
            return
        self._met[id(value)] = len(self._met)
        self._alive.append(value)  # or its number could be another's
        self.add(type(value).__module__, type(value).__qualname__)
        self._inside(value)

    def _inside(self, value: Any) -> None:
        if getattr(type(getattr(value, "__self__", value)), "beside_the_step", False):
            return  # a hook of ours, without which the step is the same
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject or value.nbytes > MOST_CONSTANT_BYTES:
                raise Opaque
            self.add(value.dtype.str, value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest())
        elif isinstance(value, enum.Enum):
            self.add(value.name)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.visit(value.__func__)
            self.visit(value.__self__)
        elif isinstance(value, functools.partial):
            self.visit([value.func, value.args, value.keywords])
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self.add(value.__name__)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
            self.add(value.__qualname__)
            if isinstance(owner := getattr(value, "__self__", None), Tensor | nn.Module):
                self.visit(owner)
        elif isinstance(value, weakref.ref):
            self.visit(value())
        elif isinstance(value, re.Pattern | pathlib.PurePath):
            self.add(str(value))
        elif isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            found = [getattr(value, name, None) for name in ("fget", "__func__", "func")]
            self.visit([f for f in found if f is not None])
        elif isinstance(value, OpOverload | OpOverloadPacket):
            self.add(str(value))
        else:
            self._entries(value)

    def _entries(self, value: Any) -> None:
        """Containers of any kind, and objects with attributes."""
        known = False
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.visit(key)
                self.visit(item)
            known = True
        elif isinstance(value, list | tuple):
            for item in value:
                self.visit(item)
            known = True
        elif isinstance(value, set | frozenset):
            if not all(isinstance(item, PLAIN_VALUES) for item in value):
                raise Opaque
            self.add(sorted(map(repr, value)))
            known = True
        fields = dict(getattr(value, "__dict__", {}))
        for cls in type(value).__mro__:
            names = cls.__dict__.get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                    fields[name] = getattr(value, name)
        if not known and not fields and type(value).__init__ is object.__init__ and type(value).__flags__ & (1 << 9):
            known = True  # a class of Python's without any attribute
        if not known and not fields:
            raise Opaque
        if not known and not type(value).__flags__ & (1 << 9):
            raise Opaque  # an object of C may hold more than it shows
        self.visit(type(value))
        for name, item in fields.items():
            if name not in PER_PROCESS:
                self.add(name)
                self.visit(item)

    def _module(self, module: nn.Module) -> None:
        self._class(type(module))
        self.add(module.training, list(module._modules), list(module._parameters), list(module._buffers))
        for name in sorted(OWN):
            held = module.__dict__.get(name)
            if isinstance(held, dict) and held:
                self.add(name)
                for key, item in held.items():
                    self.add(str(key) if isinstance(key, str) else "")
                    self.visit(item)
        for name, item in module.__dict__.items():
            if name not in OWN:
                self.add(name)
                self.visit(item)

    def _tensor(self, t: Tensor) -> None:
        """A tensor that is none of the model's is a constant of the graph."""
        if t.is_meta or t.layout != torch.strided or t.is_quantized or t.nbytes > MOST_CONSTANT_BYTES:
            raise Opaque
        data = as_bytes(t.cpu()).numpy().tobytes()
        self.add(t.dtype, tuple(t.shape), t.stride(), t.requires_grad, hashlib.sha256(data).hexdigest())

    def _class(self, cls: type) -> None:
        """A class by name; of those outside of installed packages, also the values and code it has now."""
        for base in cls.__mro__:
            self.add(base.__module__, base.__qualname__)
            self._from(base.__module__)
            if _installed(sys.modules.get(base.__module__)) or (id(base) in self._met and base is not cls):
                continue
            self._met.setdefault(id(base), len(self._met))
            self._alive.append(base)
            for name, item in vars(base).items():
                if name in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__init__"):
                    continue
                if isinstance(
                    item, (types.FunctionType, property, staticmethod, classmethod, tuple, list, *PLAIN_VALUES)
                ):
                    self.add(name)
                    self.visit(item)

    def _function(self, function: types.FunctionType) -> None:
        """Its code, what it closes over, and the globals it reads; of installed ones the name says it all."""
        self.add(function.__module__, function.__qualname__)
        self._from(function.__module__)
        for cell in function.__closure__ or ():
            try:
                self.visit(cell.cell_contents)
            except ValueError:  # not filled yet
                self.add("empty")
        self.visit([function.__defaults__, function.__kwdefaults__])
        module = sys.modules.get(function.__module__ or "")
        if _installed(module) and function.__code__.co_filename == getattr(module, "__file__", None):
            return
        names = self._code(function.__code__)
        ours = function.__code__.co_filename.startswith(_OURS)
        for name in sorted(names & set(function.__globals__)) if not ours else ():
            item = function.__globals__[name]
            self.add(name)
            if not isinstance(item, types.ModuleType) or not _installed(item):
                self.visit(item)

    def _from(self, module: str | None) -> None:
        top = (module or "").partition(".")[0]
        if top not in ("torch", "builtins", "laminar", "__main__", "") and _installed(sys.modules.get(module or "")):
            self.packages.add(top)

    def _code(self, code: types.CodeType) -> set[str]:
        """Add what code does; the names it reads."""
        self.add(code.co_code, code.co_varnames, code.co_freevars, code.co_names)
        names = set(code.co_names)
        if names & READS:
            raise Opaque
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                names |= self._code(const)
            else:
                self.add(type(const).__name__, sorted(map(repr, const)) if isinstance(const, frozenset) else const)
                for word in const if isinstance(const, tuple) else (const,):
                    if isinstance(word, str) and word in os.environ:
                        self.environment[word] = os.environ[word]
        return names


@functools.cache
def _roots() -> tuple[str, ...]:
    import sysconfig

    return tuple({os.path.realpath(p) + os.sep for p in (*sysconfig.get_paths().values(), sys.base_prefix)})


@functools.lru_cache(maxsize=1 << 14)
def _is_installed(path: str) -> bool:
    return os.path.realpath(path).startswith(_roots()) or path.startswith(_OURS)


def _installed(module: Any) -> bool:
    """Whether a module's code is known by its file's stamp: of a package, of Python, or our own."""
    file = getattr(module, "__file__", None)
    return module is not None and (file is None or _is_installed(file)) and module.__name__ != "__main__"

"""What a captured step depends on besides tensors: looked at before every step, so that no change is missed.

A graph holds the numbers that the model's code read while it was traced: `self.tau`, `dropout.p`, a flag of the
config, a global of the loss. Here all of these are watched: attributes of modules and of the objects they hold, of
their classes, contents of lists and dicts, hooks, which parameters are trained; cells, defaults and globals of the loss
and of the user's functions behind it; tensors that it holds and a graph keeps as constants.

While a step is traced, reads are recorded (`Reads`), so a graph knows its own guards: the values that its trace has
read. It is used for as long as those are what they were. A change of a value that no trace has read costs nothing.

What this costs in a step in which nothing changed: one look at the version of each dict, and a comparison of the rest,
all at the speed of C (`bench/guards.py`).

Not covered: arrays of NumPy and tensors' `.data` changed in place, globals of installed packages, values computed by
calls (the time, the environment).
"""

from __future__ import annotations

import contextlib
import enum
import fnmatch
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter, eq, is_, is_not, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from laminar.capture.model.model_tensors import OWN, slots_of
from laminar.capture.torch_private import dict_version
from laminar.capture.tracing.origins import is_users

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.memory_format,
    torch.layout,
    slice,
    range,
    enum.Enum,
    np.generic,
    np.dtype,
)
"""Values that are compared by what they are; everything else by which object it is."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
MEMBERS = ("_parameters", "_buffers", "_modules")
DEPTH = 5
"""How deep lists, dicts and objects in attributes are followed."""
LONG = 1000
"""Lists and dicts with more entries (a dataset, a vocabulary) are watched by their length."""
MOST_WATCHED = 20_000
"""Values that are watched at most."""
FOREIGN = ("torch", "numpy", "logging", "threading", "multiprocessing", "concurrent", "asyncio", "io", "laminar")
"""Packages whose objects are not looked into."""

_call: Callable[..., Any] = operator.call
_trained = attrgetter("requires_grad")
_written = attrgetter("_version")
_content = attrgetter("cell_contents")


class Reads:
    """Attributes that were read while a step was traced: of which object, and under which name."""

    def __init__(self, loose: Iterable[str] | None = ()) -> None:
        self.seen: set[tuple[int, str]] = set()
        self.whole: set[int] = set()
        """Objects whose `__dict__` was taken: everything in it may have been read."""
        self.loose = None if loose is None else frozenset(loose)
        """Names that count as read of every object, as those of a trace in another process do; None: all of them."""

    def __contains__(self, item: tuple[int, str]) -> bool:
        """Object 0 stands for any: an attribute of a class is read through its objects."""
        holder, name = item
        if self.loose is None or name in self.loose:
            return True
        return item in self.seen or holder in self.whole or (not holder and name in self.names)

    @cached_property
    def names(self) -> set[str]:
        """Names that were read of any object; asked for when everything has been read."""
        return {name for _, name in self.seen}


class Guards:
    """The values that captured steps of a model and its loss may depend on, as they are now."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any], unguarded: Sequence[str] = ()) -> None:
        self.model, self.loss, self.unguarded = model, loss, tuple(unguarded)
        self.version = 0
        """Another number whenever anything has changed that some trace has read, or more than plain values."""
        self.values: dict[str, Any] = {}
        """What is watched: names, and values as they are compared."""
        self.walks = 0
        """How often everything was looked for anew: more than plain values had changed."""
        self.read: set[str] = set()
        """Names of values that some trace has read."""
        self._stale = False
        self._shown: dict[str, str] = {}
        self._changes: dict[str, Any] = {}
        self._walk()

    # --- every step ----------------------------------------------------------------------------

    def look(self) -> int:
        """The version of what there is now."""
        if self._same() or self._refreshed():
            return self.version
        before = self.values
        self._walk()
        gone = {n: v for n, v in before.items() if self.values.get(n, self) != v}
        self._note({**gone, **{n: None for n in self.values if n not in before}})
        return self.version

    def take(self) -> dict[str, Any]:
        """Names that have changed since this was asked last, with their former values."""
        out, self._changes = self._changes, {}
        return out

    def _note(self, changes: Mapping[str, Any]) -> None:
        if changes:
            self.version += 1
            self._changes = {**changes, **self._changes}

    def _same(self) -> bool:
        try:
            return (
                list(map(dict_version, self._dicts)) == self._versions
                and list(map(_trained, self._params)) == self._grads
                and RemovableHandle.next_id == self._hooked
                and all(map(eq, self._lists, self._copies))
                and list(map(len, self._long)) == self._lengths
                and all(map(is_, map(_content, self._cells), self._contents))
                and list(map(_written, self._tensors)) == self._writes
                and all(map(eq, map(_call, self._getters, self._places), self._found))
                and all(map(eq, map(_class_values, self._classes), self._class_values))
            )
        except (
            ValueError,
            RuntimeError,
            TypeError,
            KeyError,
            AttributeError,
        ):  # an empty cell, what can't be compared, a name gone
            return False

    def _refreshed(self) -> bool:
        """Take in changes of plain values, and of what no trace has read, which need no new walk; False for others."""
        found: dict[str, Any] = {}
        for i, now in enumerate(map(dict_version, self._dicts)):
            if now == self._versions[i]:
                continue
            d, old, prefix = self._dicts[i], self._kept[i], self._prefixes[i]
            if len(d) != len(old):
                return False
            for key, value in d.items():
                if key not in old:
                    return False
                if value is old[key]:
                    continue
                name = f"{prefix}{key}"
                if not (_is_plain(value) and _is_plain(old[key])):
                    if name in self.read or name not in self.values:
                        return False
                    self._stale = True  # what is inside of it is looked for when a step is captured next
                found[name] = value
            self._kept[i], self._versions[i] = dict(d), now
        if not self._contents_refreshed():
            return False
        self._hooked_again()
        changes = {}
        for name, value in found.items():
            if name in self.values and self.values[name] != (token := _token(value)):
                if name in self.read:
                    changes[name] = self.values[name]
                self.values[name], self._shown[name] = token, _words(value)
        self._note(changes)
        return self._same()

    def _contents_refreshed(self) -> bool:
        """The same for lists and tensors: taken as they are where no trace has read them."""
        for i, (x, copy) in enumerate(zip(self._lists, self._copies, strict=True)):
            if x != copy if isinstance(x, set) else len(x) != len(copy) or any(map(is_not, x, copy)):
                if self._list_names[i] in self.read:
                    return False
                self._copies[i], self._stale = type(copy)(x), True
        for i, n in enumerate(map(len, self._long)):
            if n != self._lengths[i]:
                if self._long_names[i] in self.read:
                    return False
                self._lengths[i], self._stale = n, True
        for i, n in enumerate(map(_written, self._tensors)):
            if n != self._writes[i]:
                if self._tensor_names[i] in self.read:
                    return False
                self._writes[i], self._stale = n, True
        return True

    def _hooked_again(self) -> None:
        """Hooks come with numbers; if none of ours has one it was somebody else's."""
        if not any(self._unhooked):
            self._hooked = RemovableHandle.next_id

    # --- what there is --------------------------------------------------------------------------

    def _walk(self) -> None:
        """Find everything anew."""
        self.walks += 1
        self._stale = False
        self._dicts: list[dict[Any, Any]] = []
        self._prefixes: list[str] = []
        self._lists: list[Any] = []
        self._list_names: list[str] = []
        self._long: list[Any] = []
        self._long_names: list[str] = []
        self._cells: list[Any] = []
        self._slotted: list[tuple[Any, Callable[[Any], Any]]] = []
        self._globals: dict[int, tuple[dict[str, Any], list[str]]] = {}
        self._tensors: list[Tensor] = []
        self._tensor_names: list[str] = []
        self._classes: list[type] = []
        self._unhooked: list[Any] = []
        self._holders: dict[str, tuple[int, str] | None] = {}
        """For each name: the object and the attribute through which code gets at it; None: always taken as read."""
        self.values, self._shown = {}, {}
        self._met: set[int] = set()
        self._keep: list[Any] = []
        self._hooked = RemovableHandle.next_id
        self._params = list(self.model.parameters())
        self._inner = {id(m) for m in self.model.modules()}
        self._own = {id(slot.tensor) for slot in slots_of(self.model)}
        for path, module in self.model.named_modules():
            self._module(f"{path}." if path else "", module)
        for i, p in enumerate(self._params):
            self._put(f"requires_grad of parameter {i}", p.requires_grad, None)
        self._value("loss", self.loss, None, 0)
        self._put("the default dtype", torch.get_default_dtype(), None)
        self._versions = list(map(dict_version, self._dicts))
        self._kept = [dict(d) for d in self._dicts]
        self._grads = list(map(_trained, self._params))
        self._copies = [type(x)(x) if type(x) in (list, set) else list(x) for x in self._lists]
        self._lengths = list(map(len, self._long))
        self._contents = [_content(c) for c in self._cells]
        self._writes = list(map(_written, self._tensors))
        self._class_values = list(map(_class_values, self._classes))
        self._places = [*(d for d, _ in self._globals.values()), *(o for o, _ in self._slotted)]
        self._getters = [*(itemgetter(*names) for _, names in self._globals.values()), *(g for _, g in self._slotted)]
        self._found: list[Any] = list(map(_call, self._getters, self._places))

    def _put(self, name: str, value: Any, read: tuple[int, str] | None) -> None:
        """Watch one value under a name."""
        if len(self.values) >= MOST_WATCHED or self._left_alone(name):
            return
        self.values[name], self._shown[name] = _token(value), _words(value)
        self._holders[name] = read
        if not _is_plain(value):
            self._keep.append(value)  # or another object might get its number

    def _left_alone(self, name: str) -> bool:
        return any(
            name == u or name.endswith(f".{u}") or fnmatch.fnmatchcase(name, u) or f".{u}." in f".{name}."
            for u in self.unguarded
        )

    def _watch(self, prefix: str, d: dict[Any, Any]) -> None:
        self._dicts.append(d)
        self._prefixes.append(prefix)

    def _module(self, prefix: str, module: nn.Module) -> None:
        d = module.__dict__
        self._watch(prefix, d)
        self._met.add(id(d))
        for kind in MEMBERS:
            members = d.get(kind) or {}
            if members:
                self._watch(f"{prefix}{kind}.", members)
                for key, value in members.items():
                    self._put(f"{prefix}{kind}.{key}", value, None)
        for kind in HOOKS:
            hooks = d.get(kind)
            if hooks:
                self._watch(f"{prefix}{kind}.", hooks)
                for key, hook in hooks.items():
                    self._put(f"{prefix}{kind}.{key}", hook, None)
            elif hooks is not None:
                self._unhooked.append(hooks)
        for key, value in d.items():
            if key not in OWN or key == "training":
                self._value(f"{prefix}{key}", value, (id(module), key), 0)
        self._class(type(module))

    def _class(self, cls: type) -> None:
        """Attributes of the user's own classes, and their methods by which function they are."""
        for base in cls.__mro__:
            if base in (nn.Module, object) or base in self._classes or not _users_module(base.__module__):
                continue
            self._classes.append(base)
            for key, value in vars(base).items():
                if not key.startswith("__") or key == "__call__":
                    self._value(f"{base.__name__}.{key}", value, (0, key), 0)

    def _value(self, name: str, value: Any, read: tuple[int, str] | None, depth: int) -> None:
        """Watch a value and what it holds, as far as a step's code may read that."""
        self._put(name, value, read)
        if _is_plain(value) or depth > DEPTH or len(self.values) >= MOST_WATCHED or self._left_alone(name):
            return
        if id(value) in self._met or id(value) in self._inner:
            return
        self._met.add(id(value))
        if isinstance(value, Tensor):
            if id(value) not in self._own:
                self._tensor(name, value, read)
        elif isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self._module(f"{name}.{path}." if path else f"{name}.", module)
            for key, t in (*value.named_parameters(), *value.named_buffers()):
                if id(t) not in self._own:
                    self._tensor(f"{name}.{key}", t, None)
        elif isinstance(value, dict):
            self._put(f"{name} (its length)", len(value), read)
            if len(value) > LONG:
                self._long.append(value)
                self._long_names.append(f"{name} (its length)")
            else:
                self._watch(f"{name}.", value)
                for key, item in value.items():
                    self._value(f"{name}.{key}", item, read, depth + 1)
        elif isinstance(value, (list, tuple, set, frozenset)):
            self._put(f"{name} (its length)", len(value), read)
            if len(value) > LONG:
                self._long.append(value)
                self._long_names.append(f"{name} (its length)")
            else:
                if not isinstance(value, (tuple, frozenset)):
                    self._lists.append(value)
                    self._list_names.append(f"{name} (its length)")
                items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
                for i, item in enumerate(items):
                    self._value(f"{name}.{i}", item, read, depth + 1)
        elif isinstance(value, partial):
            for part in ("func", "args", "keywords"):
                self._value(f"{name}.{part}", getattr(value, part), read, depth + 1)
        elif isinstance(value, types.MethodType):
            self._value(f"{name}.self", value.__self__, read, depth + 1)
            self._value(name + ".", value.__func__, read, depth + 1)
        elif isinstance(value, (staticmethod, classmethod, property)):
            inner = value.fget if isinstance(value, property) else value.__func__
            self._value(name + ".", inner, read, depth)
        elif isinstance(value, types.FunctionType):
            self._function(name, value, read, depth)
        elif not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            self._object(name, value, read, depth)

    def _tensor(self, name: str, tensor: Tensor, read: tuple[int, str] | None) -> None:
        """A tensor that a graph would keep as a constant: its values may be changed in place."""
        self._tensors.append(tensor)
        self._tensor_names.append(f"{name} (its values)")
        self._put(self._tensor_names[-1], tensor._version, read)

    def _function(self, name: str, function: types.FunctionType, read: tuple[int, str] | None, depth: int) -> None:
        code, inner = function.__code__, getattr(function, "__wrapped__", None)
        if inner is not None:
            self._value(name, inner, read, depth + 1)
        if not is_users(code.co_filename) or not _users_module(function.__module__):
            return
        for part in ("__defaults__", "__kwdefaults__"):
            if getattr(function, part):
                self._value(f"{name}.{part}", getattr(function, part), read, depth + 1)
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not filled yet
                content = cell.cell_contents
                self._cells.append(cell)
                self._value(f"{name}.{key}", content, read, depth)
        found = function.__globals__
        for key in sorted(_names(code)):
            if key in found and not isinstance(found[key], types.ModuleType):
                names = self._globals.setdefault(id(found), (found, []))[1]
                if key not in names:
                    names.append(key)
                self._value(f"{found.get('__name__', '?')}.{key}", found[key], read, depth)

    def _object(self, name: str, value: Any, read: tuple[int, str] | None, depth: int) -> None:
        """An object of the user's, such as a config: its attributes, read one by one."""
        kind = type(value)
        if not _is_users_object(value):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._watch(f"{name}.", attributes)
            for key, item in attributes.items():
                self._value(f"{name}.{key}", item, (id(value), str(key)), depth + 1)
        slots = [k for base in kind.__mro__ for k in _slots(base) if hasattr(value, k)]
        if slots:
            self._slotted.append((value, attrgetter(*slots)))
            for key in slots:
                self._value(f"{name}.{key}", getattr(value, key), (id(value), key), depth + 1)
        if callable(value) and isinstance(kind.__call__, types.FunctionType):
            self._function(f"{name}.__call__", kind.__call__, None, depth + 1)
        if _users_module(kind.__module__):
            self._class(kind)

    # --- what a trace reads ------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reads]:
        """Record which attributes are read inside."""
        if self._stale:
            self._walk()
        reads = Reads()
        objects = [o for o in self._keep if _is_users_object(o)]
        with contextlib.ExitStack() as stack:
            for kind in sorted({nn.Module, *map(type, objects)}, key=lambda k: len(k.__mro__)):
                if not stack.enter_context(_recorded(kind, reads)):
                    reads.whole.update(id(o) for o in objects if type(o) is kind)
            yield reads

    def needed(self, reads: Reads) -> dict[str, Any]:
        """The values that a trace depends on."""
        return {n: self.values[n] for n, read in self._holders.items() if read is None or read in reads}

    def differences(self, needed: Mapping[str, Any], reads: Reads) -> list[str]:
        """Names of values that are not what a graph needs; none: it can be used.

        One that was not there, and stands now where something was read, counts too: it may hide what was.
        """
        values, holders, missing = self.values, self._holders, object()
        out = [n for n, v in needed.items() if values.get(n, missing) != v]
        if len(values) != len(needed):
            out += [n for n in values if n not in needed and ((read := holders[n]) is None or read in reads)]
        return out

    def matters(self, name: str) -> bool:
        """Whether steps depend on a value: some trace has read it, or every step does."""
        return name in self.read or self._holders.get(name, ()) is None

    def show(self, name: str) -> str:
        """A value in words."""
        return self._shown.get(name, "gone")


# --- helpers -------------------------------------------------------------------------------------


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN)


def _token(value: Any) -> Any:
    """What a value is compared by: 1, 1.0 and True are three."""
    return (type(value).__name__, repr(value)) if _is_plain(value) else id(value)


def _words(value: Any) -> str:
    return repr(value) if _is_plain(value) else f"a {type(value).__name__}"


def _class_values(cls: type) -> tuple[Any, ...]:
    return tuple(vars(cls).values())


def _slots(cls: type) -> tuple[str, ...]:
    found = vars(cls).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(s for s in found if not s.startswith("__"))


def _names(code: types.CodeType) -> set[str]:
    """Names in a function's code and in the functions it makes."""
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _users_module(name: str) -> bool:
    """Whether a module is the user's own: no installed package, nothing of Python's."""
    root = (name or "").partition(".")[0]
    if root in FOREIGN or (root in sys.stdlib_module_names and root != "__main__"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def _is_users_object(value: Any) -> bool:
    """Whether an object's attributes are looked at one by one."""
    kind = type(value)
    root = kind.__module__.partition(".")[0]
    return not isinstance(value, (nn.Module, Tensor, type, types.FunctionType, types.ModuleType)) and root not in (
        *FOREIGN,
        "builtins",
        *sys.stdlib_module_names,
    )


@contextlib.contextmanager
def _recorded(kind: type, reads: Reads) -> Iterator[bool]:
    """Attribute reads of a class's objects are noted inside; False if they can't be."""
    own = vars(kind).get("__getattribute__")
    inner: Any = kind.__getattribute__
    seen, whole = reads.seen, reads.whole

    def noted(self: Any, name: str) -> Any:
        seen.add((id(self), name))
        if name == "__dict__" and is_users(sys._getframe(1).f_code.co_filename):
            whole.add(id(self))
        return inner(self, name)

    try:
        kind.__getattribute__ = noted  # type: ignore[method-assign, assignment]
    except (TypeError, AttributeError):
        yield False
        return
    try:
        yield True
    finally:
        if own is None:
            del kind.__getattribute__
        else:
            kind.__getattribute__ = own  # type: ignore[method-assign]

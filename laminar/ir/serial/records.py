"""Frozen dataclasses as plain data and back: what a field may hold is read off its annotation.

    @dataclass(frozen=True, kw_only=True)
    class LeftOut(Record):
        plan: str
        why: str = ""

    LeftOut(plan="dp").to_json()            {"plan": "dp"}
    LeftOut.from_part(part)                 "corrupt plan: account.out[0]: no field 'plan'"

A field without a default is always written; one that has its default is left out, and reading puts it back, unless it
is `always()` written. `key(...)` names a field otherwise in the file; the fields of a record that is `inline()` stand
beside those around it. Fields may be texts, flags, numbers, records, tuples of one kind, tables of one kind by text,
`Any`, and any of these or none.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Self

from laminar.ir.serial.reading import JsonPart

_LARGEST = 1 << 53
_READS: dict[Any, Callable[[JsonPart], Any]] = {
    str: JsonPart.text,
    bool: JsonPart.flag,
    int: lambda part: part.whole(-_LARGEST),
    float: lambda part: float(part.value) if type(part.value) is int else part.number(),
    Any: lambda part: part.value,
}


def key(name: str) -> Mapping[str, Any]:
    """Metadata of a field that files call otherwise."""
    return {"key": name}


def always() -> Mapping[str, Any]:
    """Metadata of a field that is written even where it has its default."""
    return {"always": True}


def inline() -> Mapping[str, Any]:
    """Metadata of a field whose own fields stand beside it in files."""
    return {"inline": True}


class Record:
    """A dataclass that goes to JSON and comes back."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_part` is the inverse."""
        out: dict[str, Any] = {}
        for one, _ in _fields(type(self)):
            value = getattr(self, one.name)
            if one.metadata.get("inline"):
                out |= value.to_json() if value is not None else {}
            elif one.metadata.get("always") or value != _default(one):
                out[_key(one)] = _plain(value)
        return out

    @classmethod
    def from_part(cls, part: JsonPart) -> Self:
        """Read; what is not as it was written is named, with its place in the file."""
        found: dict[str, Any] = {}
        for one, kind in _fields(cls):
            if one.metadata.get("inline"):
                inner = _some(kind)
                if any(_key(f) in part for f, _ in _fields(inner)):
                    found[one.name] = inner.from_part(part)
            elif _key(one) in part or _default(one) is MISSING:
                found[one.name] = _read(kind, part[_key(one)])
        return cls(**found)

    @classmethod
    def keys_in_files(cls) -> set[str]:
        """All names that files may have for its fields."""
        out: set[str] = set()
        for one, kind in _fields(cls):
            out |= _some(kind).keys_in_files() if one.metadata.get("inline") else {_key(one)}
        return out


_KNOWN: dict[Any, tuple[tuple[Field[Any], Any], ...]] = {}


def _fields(kind: Any) -> tuple[tuple[Field[Any], Any], ...]:
    """With what each may hold."""
    if kind not in _KNOWN:
        hints = typing.get_type_hints(kind)
        _KNOWN[kind] = tuple((one, hints[one.name]) for one in fields(kind))
    return _KNOWN[kind]


def _key(one: Field[Any]) -> str:
    return str(one.metadata.get("key", one.name))


def _default(one: Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default


def _some(kind: Any) -> Any:
    """X, of `X | None`."""
    if isinstance(kind, types.UnionType):
        (kind,) = (k for k in typing.get_args(kind) if k is not type(None))
    return kind


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _read(kind: Any, part: JsonPart) -> Any:
    if isinstance(kind, types.UnionType):
        return None if part.value is None else _read(_some(kind), part)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(_read(args[0], row) for row in part.rows())
    if origin is not None:
        return {name: _read(args[1], value) for name, value in part.fields().items()}
    return _READS[kind](part) if kind in _READS else kind.from_part(part)

"""How values become JSON and come back, and how they get their identity.

Plain numbers, strings and lists are themselves. What JSON can't say is a one-key object: a
non-finite float `{"float": "-inf"}`, a complex number `{"complex": ["0.0", "1.0"]}`, a reference
`{"ref": ["mm_1", 0]}`, a dtype `{"dtype": "f32"}`. The content hash is SHA-256 over the canonical
text (sorted keys, no spaces), so that two values are equal exactly if their hashes are.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ref:
    """The `index`-th tensor made by a node, or an input or constant of that name."""

    name: str
    index: int = 0

    def __hash__(self) -> int:
        return hash(self.name) + self.index  # the name's is known; planning asks millions of times

    def __str__(self) -> str:
        return f"%{self.name}" if self.index == 0 else f"%{self.name}.{self.index}"


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype given to an op as an argument, by its short name."""

    name: str

    def __str__(self) -> str:
        return self.name


def encode(value: Any) -> Any:
    """A JSON-ready form of an op argument."""
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, Ref):
        return {"ref": [value.name, value.index]}
    if isinstance(value, Dtype):
        return {"dtype": value.name}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}: {value!r}")


def decode(data: Any) -> Any:
    """The op argument that `encode` wrote; sequences come back as tuples."""
    if isinstance(data, list):
        return tuple(decode(item) for item in data)
    if isinstance(data, dict):
        if "float" in data:
            return float(data["float"])
        if "complex" in data:
            return complex(*map(float, data["complex"]))
        if "ref" in data:
            return Ref(data["ref"][0], data["ref"][1])
        return Dtype(data["dtype"])
    return data


def decode_ref(data: Any) -> Ref:
    """The reference that `encode` wrote; anything else is refused."""
    found = decode(data)
    if not isinstance(found, Ref) or not isinstance(found.name, str) or not isinstance(found.index, int):
        raise TypeError(f"{data!r} is not a reference")
    return found


def canonical(data: Any) -> str:
    """The one text of a JSON value."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(data: Any) -> str:
    """Identity of a JSON value: 64 hex digits."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()

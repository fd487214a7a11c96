"""Canonical JSON, read strictly: one value has one text, and any other text of it is refused.

Read bytes are bounded before they are parsed: their length, the values in them and how deep these are nested. What was
parsed is written again and has to come out as it went in, which leaves no room for keys that stand twice, numbers with
two spellings, NaN, or bytes that nobody looks at.
"""

from __future__ import annotations

import json
import math
from typing import Any

from laminar.errors import CheckpointError
from laminar.ir.serial.codec import canonical
from laminar.ir.serial.reading import JsonPart

MOST_JSON_BYTES = 64 << 20
MOST_JSON_VALUES = 1 << 22
DEEPEST = 32


def as_canonical(value: Any, what: str) -> bytes:
    """The one text of a value; what JSON can't say exactly is refused."""
    _check(value, what, 0)
    return canonical(value).encode()


def read_canonical(data: bytes, what: str, most_bytes: int = MOST_JSON_BYTES) -> JsonPart:
    """The value of a text, to be looked into; `what` it is stands in errors."""

    def wrong(said: str) -> CheckpointError:
        return CheckpointError(f"corrupt {what}: {said}", next="use another checkpoint; `laminar.checkpoint` finds one")

    if len(data) > most_bytes:
        raise wrong(f"{len(data)} bytes, at most {most_bytes} are read")
    if sum(data.count(c) for c in (b",", b"[", b"{")) > MOST_JSON_VALUES:
        raise wrong(f"more than {MOST_JSON_VALUES} values")
    try:
        value = json.loads(data, parse_constant=_refuse)
        _check(value, what, 0)
        if canonical(value).encode() != data:
            raise wrong("it is not canonical JSON")
    except (ValueError, RecursionError, OverflowError) as error:
        raise wrong(f"{type(error).__name__}: {error}") from None
    return JsonPart(value, wrong)


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _check(value: Any, what: str, depth: int) -> None:
    """Plain JSON all the way down, and not too far."""
    if depth > DEEPEST:
        raise CheckpointError(f"{what}: nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{what}: the key {key!r} is no text")
            _check(one, what, depth + 1)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _check(one, what, depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(f"{what}: {value} is not finite", next="store finite numbers")
    elif value is not None and type(value) not in (bool, int, str):
        raise CheckpointError(f"{what}: a {type(value).__name__} is no plain value", next="store numbers and texts")

"""Small files of a store (references, leases): canonical JSON with a hash of itself, so that none is misread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laminar.checkpoint.format.hashing import hash_as
from laminar.checkpoint.format.state_record import exact_fields
from laminar.checkpoint.format.strict_json import as_canonical, read_canonical
from laminar.ir.serial.reading import JsonPart

MOST_SEALED_BYTES = 1 << 16


def sealed(what: str, fields: Mapping[str, Any]) -> bytes:
    """A small file of these fields."""
    return as_canonical({**fields, "seal": hash_as(what, as_canonical(dict(fields), what)).hex()}, what)


def read_sealed(what: str, data: bytes, *names: str) -> JsonPart:
    """The fields of a small file, which are exactly these and have the hash that is said."""
    part = read_canonical(data, what, MOST_SEALED_BYTES)
    exact_fields(part, *names, "seal")
    fields = {k: v for k, v in part.object().items() if k != "seal"}
    if hash_as(what, as_canonical(fields, what)).hex() != part["seal"].text():
        raise part.wrong("its seal is another one")
    return part

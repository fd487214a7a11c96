"""The state of a run as hashes: what every tensor is and which blocks it has, the scalars, and one root over all of it.

The root is a Merkle root. Two runs have the same root exactly if all their weights, buffers, entries of optimizers,
averages and scalars (hyper-parameters, the scale of the loss, steps, seed) are the same, bit for bit; how they lie on
ranks, and where and when they were saved, is no part of it. Each tensor has a hash of its own below the root, so what
differs between two states is found without looking at blocks.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from laminar.checkpoint.format.block_grid import block_count
from laminar.checkpoint.format.hashing import HASH_BYTES, hash_as
from laminar.checkpoint.format.strict_json import as_canonical
from laminar.errors import CheckpointError
from laminar.ir.serial.codec import canonical
from laminar.ir.serial.reading import JsonPart
from laminar.ir.tensor import ITEM_BYTES

TENSOR_KINDS = ("parameter", "buffer", "optimizer", "average")
"""What a tensor of a state can be."""
LONGEST_NAME = 1024
MOST_DIMS = 64


class TensorKey(NamedTuple):
    """Which tensor of a state."""

    kind: str
    """One of `TENSOR_KINDS`."""
    name: str
    """Of the parameter or buffer in the model."""
    entry: str = ""
    """Which entry of the optimizer's state, such as "exp_avg"."""

    def __str__(self) -> str:
        return " ".join(part for part in self if part)


@dataclass(frozen=True)
class TensorRecord:
    """A tensor: what it is, and the hashes of its blocks in the grid's order."""

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    hashes: bytes = field(repr=False)
    """One after the other."""

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.hashes) // HASH_BYTES

    def block(self, number: int) -> bytes:
        """The hash of one block."""
        return self.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    @cached_property
    def hash(self) -> bytes:
        """Over all there is to know of the tensor."""
        said = canonical([*self.key, self.dtype, list(self.shape)]).encode()
        return hash_as("tensor", said + b"\n" + self.hashes)

    def __post_init__(self) -> None:
        _refuse_unless_sound(self)


def tensor_record(key: TensorKey, dtype: str, shape: Sequence[int], blocks: Sequence[bytes]) -> TensorRecord:
    """A tensor with these blocks."""
    return TensorRecord(key, dtype, tuple(shape), b"".join(blocks))


def _refuse_unless_sound(record: TensorRecord) -> None:
    key, shape = record.key, record.shape
    for text in key:
        bad = any(unicodedata.category(c) in ("Cc", "Cs") for c in text) or ".." in text.split("/")
        if bad or len(text) > LONGEST_NAME or text.startswith("/") or "\\" in text:
            raise CheckpointError(f"{text[:60]!r} can't be part of a tensor's name")
    if key.kind not in TENSOR_KINDS or not key.name:
        raise CheckpointError(
            f"{key.kind[:60]!r} {key.name[:60]!r} names no tensor of a state", allowed=", ".join(TENSOR_KINDS)
        )
    if record.dtype not in ITEM_BYTES:
        raise CheckpointError(f"{key}: unknown dtype {record.dtype[:60]!r}")
    if len(shape) > MOST_DIMS or any(n < 0 or n >= 1 << 53 for n in shape):
        raise CheckpointError(f"{key}: no tensor has the shape {str(shape)[:60]}")
    expected = block_count(shape, record.item_bytes)
    if len(record.hashes) != expected * HASH_BYTES:
        raise CheckpointError(f"{key}: {record.blocks} blocks, a tensor of its shape has {expected}")


@dataclass(frozen=True)
class StateRecord:
    """All tensors of a state, and its scalars."""

    tensors: tuple[TensorRecord, ...]
    """Sorted by key."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Plain values whose bits count: hyper-parameters, the scale of the loss, steps, seed."""

    def __post_init__(self) -> None:
        keys = [t.key for t in self.tensors]
        for one, other in pairwise(keys):
            if one >= other:
                raise CheckpointError(f"{other}: " + ("stands twice" if one == other else "is not in order"))

    @cached_property
    def by_key(self) -> dict[TensorKey, TensorRecord]:
        """Tensors by key."""
        return {t.key: t for t in self.tensors}

    @cached_property
    def root(self) -> str:
        """The state root, which is its identity: 64 hex digits."""
        scalars = hash_as("scalars", as_canonical(dict(self.scalars), "scalars of the state"))
        return hash_as("state", scalars + b"".join(t.hash for t in self.tensors)).hex()

    def to_json(self) -> dict[str, Any]:
        """Plain data; `read_state` is the inverse."""
        tensors = [
            {
                "kind": t.key.kind,
                "name": t.key.name,
                "entry": t.key.entry,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "blocks": t.hashes.hex(),
            }
            for t in self.tensors
        ]
        return {"root": self.root, "scalars": dict(self.scalars), "tensors": tensors}


def state_record(tensors: Sequence[TensorRecord], scalars: Mapping[str, Any]) -> StateRecord:
    """A state of tensors in any order."""
    return StateRecord(tuple(sorted(tensors, key=lambda t: t.key)), scalars)


def read_state(part: JsonPart) -> StateRecord:
    """Read strictly; the root that is said has to be the state's."""
    exact_fields(part, "root", "scalars", "tensors")
    tensors = []
    for row in part["tensors"].rows():
        exact_fields(row, "kind", "name", "entry", "dtype", "shape", "blocks")
        key = TensorKey(*(row[k].text() for k in ("kind", "name", "entry")))
        shape = tuple(n.whole() for n in row["shape"].rows())
        tensors.append(TensorRecord(key, row["dtype"].text(), shape, hex_bytes(row["blocks"])))
    state = StateRecord(tuple(tensors), part["scalars"].object())
    if state.root != part["root"].text():
        raise part["root"].wrong("it is not the root of this state")
    return state


def exact_fields(part: JsonPart, *names: str) -> None:
    """Refuse an object that has other fields than these."""
    found = set(part.object())
    if found != set(names):
        odd = sorted(found ^ set(names))[0]
        raise part.wrong(f"{'unknown' if odd in found else 'no'} field {odd[:60]!r}")


def hex_bytes(part: JsonPart, count: int | None = None) -> bytes:
    """Bytes written as lower-case hex digits, so many if that is said."""
    text = part.text()
    try:
        found = bytes.fromhex(text)
    except ValueError:
        raise part.wrong("these are no hex digits") from None
    if found.hex() != text or (count is not None and len(found) != count):
        raise part.wrong(f"these are not {'' if count is None else f'{2 * count} '}hex digits")
    return found

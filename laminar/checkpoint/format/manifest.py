"""The manifest: one file per checkpoint, canonical JSON, named by its own hash.

It has the state (`state_record.py`) and what stands around it: which run it is of and at which step, the checkpoint
before it, and `about`: the plan, random generators, the position in the data, schedulers, versions. What is in `about`
is for whoever writes and reads it; here it only has to be plain. It does not say where blocks lie: packs do, and may be
rewritten without a manifest's knowing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from laminar.checkpoint.format.hashing import HASH_BYTES, hash_as
from laminar.checkpoint.format.state_record import StateRecord, exact_fields, hex_bytes, read_state
from laminar.checkpoint.format.strict_json import as_canonical, read_canonical
from laminar.errors import CheckpointError
from laminar.ir.serial.reading import JsonPart

FORMAT_VERSION = 1
RUN_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?")
"""What a run may be called: its name is part of keys in a store."""


@dataclass(frozen=True)
class Manifest:
    """A checkpoint: a state and what stands around it."""

    run: str
    step: int
    state: StateRecord
    parent: str | None = None
    """The hash of the checkpoint that this run went on from."""
    about: Mapping[str, Any] = field(default_factory=dict)
    save: str = ""
    """Which save made it. A manifest is never one of two saves, so what nobody refers to after a save is nobody's."""

    def __post_init__(self) -> None:
        if not RUN_NAME.fullmatch(self.run):
            raise CheckpointError(
                f"{self.run[:80]!r} can't be a run's name", allowed="small letters, digits, - and _, at most 64"
            )
        if not 0 <= self.step < 1 << 53:
            raise CheckpointError(f"{self.step} is no step")

    @cached_property
    def data(self) -> bytes:
        """The file."""
        whole = {
            "laminar_checkpoint": FORMAT_VERSION,
            "run": self.run,
            "step": self.step,
            "parent": self.parent,
            "save": self.save,
            "state": self.state.to_json(),
            "about": dict(self.about),
        }
        return as_canonical(whole, "manifest")

    @cached_property
    def hash(self) -> str:
        """The file's hash: 64 hex digits."""
        return hash_as("manifest", self.data).hex()


def read_manifest(data: bytes, expected: str) -> Manifest:
    """A manifest from its file, which has to have the hash that was asked for."""
    if hash_as("manifest", data).hex() != expected:
        raise CheckpointError(
            f"the manifest {expected[:12]} is damaged: its content has another hash", next="use another checkpoint"
        )
    part = read_canonical(data, f"manifest {expected[:12]}")
    version = part["laminar_checkpoint"].whole()
    if version != FORMAT_VERSION:
        raise part.wrong(f"version {version}, this reads {FORMAT_VERSION}")
    exact_fields(part, "laminar_checkpoint", "run", "step", "parent", "save", "state", "about")
    return part.read(lambda _: _from_part(part))


def _from_part(part: JsonPart) -> Manifest:
    parent = None if part["parent"].value is None else hex_bytes(part["parent"], HASH_BYTES).hex()
    run, step, save, about = part["run"].text(), part["step"].whole(), part["save"].text(), part["about"].object()
    return Manifest(run, step, read_state(part["state"]), parent, about, save)

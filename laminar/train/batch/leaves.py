"""A batch taken apart: tensors by name and the structure around them; and cut into micro-batches.

A batch is the global one, or a rank's own share of it (`Local`); `Sized` says how many samples each micro-batch has.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laminar.capture.model.batches import flatten, refuse_empty, samples_in
from laminar.capture.ops.torch_ops import spec_of
from laminar.capture.tensor_bytes import as_bytes
from laminar.errors import BatchError

FINGERPRINTED = 1 << 16
"""How many elements of a leaf are looked at to tell batches apart."""


@dataclass(frozen=True)
class Local:
    """This rank's own share of a batch, instead of the global batch."""

    share: Any


@dataclass(frozen=True)
class Sized:
    """A batch, or a rank's share of it, with the number of samples in each of its micro-batches."""

    batch: Any
    sizes: Sequence[int]


@dataclass(frozen=True)
class Leaves:
    """A batch taken apart: tensors by name, its structure, and whether they are this rank's share only."""

    tensors: dict[str, Tensor]
    tree: str
    local: bool
    sizes: tuple[int, ...] = ()
    """Samples in each micro-batch, where that is given."""

    @staticmethod
    def of(batch: Any) -> Leaves:
        """Take a batch apart: the tensors, or these in `Local`, in `Sized`, or in both."""
        sizes = tuple(batch.sizes) if isinstance(batch, Sized) else ()
        batch = batch.batch if isinstance(batch, Sized) else batch
        local = isinstance(batch, Local)
        tensors, tree = flatten(batch.share if isinstance(batch, Local) else batch)
        return Leaves(tensors, json.dumps(tree), local, sizes)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Leaves:
        """The same batch with every tensor changed."""
        return replace(self, tensors={n: change(t) for n, t in self.tensors.items()})

    @cached_property
    def key(self) -> tuple[str, ...]:
        """Structure and shapes."""
        cut = (f"micro-batches of {', '.join(map(str, self.sizes))}",) if self.sizes else ()
        return (self.tree, *(f"{n}{spec_of(t)}" for n, t in self.tensors.items()), *cut)

    def fingerprint(self) -> str:
        """A few digits of the values: equal batches have equal ones, others hardly ever do."""
        crc = 0
        for t in self.tensors.values():
            crc = zlib.crc32(as_bytes(t.detach().reshape(-1)[:FINGERPRINTED].cpu()).numpy().tobytes(), crc)
        return f"{crc:08x}"

    @property
    def samples(self) -> int:
        """How many samples: the length that most leaves have."""
        return samples_in(self.tensors)

    def like(self, samples: int) -> Leaves:
        """Stand-ins for such a batch with another number of samples."""
        n, out = self.samples, {}
        for name, t in self.tensors.items():
            shape = (samples, *t.shape[1:]) if t.dim() and t.shape[0] == n else t.shape
            out[name] = torch.empty(shape, dtype=t.dtype, device="meta")
        return Leaves(out, self.tree, False)

    def split(self, parts: int) -> list[Leaves]:
        """Micro-batches: consecutive samples, of the sizes given, or as equal in number as they can be."""
        n = self.samples
        if not self.local:
            refuse_empty(self.tensors)
        cuts = list(self.sizes) or [n // parts + (i < n % parts) for i in range(parts)]
        if len(cuts) != parts:
            raise BatchError(f"{len(cuts)} sizes for {parts} micro-batches", next="give one for each")
        if self.sizes and (sum(cuts) != n or min(cuts) < 1):
            raise BatchError(
                f"micro-batches of {', '.join(map(str, cuts))} samples, of a batch of {n}",
                allowed="at least one in each, and all of them together",
            )
        if n < parts and parts > 1:
            raise BatchError(
                f"{n} samples can't make {parts} micro-batches", next="use a larger batch, or fewer micro-batches"
            )
        if parts == 1:
            return [replace(self, sizes=())]
        pieces = {k: t.split(cuts) if t.dim() and t.shape[0] == n else (t,) * parts for k, t in self.tensors.items()}
        return [Leaves({k: p[i] for k, p in pieces.items()}, self.tree, self.local) for i in range(parts)]


def joined(parts: Sequence[Leaves]) -> Leaves:
    """Micro-batches as one; what belongs to no sample is the first one's."""
    first = parts[0]

    def whole(name: str, t: Tensor) -> Tensor:
        return torch.cat([p.tensors[name] for p in parts]) if t.dim() and t.shape[0] == first.samples else t

    return Leaves({n: whole(n, t) for n, t in first.tensors.items()}, first.tree, first.local)

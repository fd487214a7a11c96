"""Samples side by side in one row of tokens, with where each begins; padding only at the end.

`documents` says which sample a token belongs to (-1: padding), `positions` where in its sample it stands, `offsets`
where samples begin, as varlen kernels want it. Padding is reported, not hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laminar.data.packing.units import padded_length
from laminar.errors import DataError

IGNORED = -100
"""The label that a loss leaves out, as everywhere in torch."""


@dataclass(frozen=True)
class Packed:
    """A unit: tensors with all tokens of its samples along dim 0."""

    fields: dict[str, Tensor]
    documents: Tensor
    """By token, the number of its sample in this unit; -1 is padding."""
    positions: Tensor
    offsets: Tensor
    """int32: where each sample begins, and where the last one ends."""
    lengths: tuple[int, ...]
    """By sample."""

    @property
    def tokens(self) -> Tensor:
        """The field called so, or the only one."""
        return self.fields["tokens"] if "tokens" in self.fields else next(iter(self.fields.values()))

    @property
    def length(self) -> int:
        """Tokens, padding included."""
        return int(self.documents.shape[0])

    @cached_property
    def real_tokens(self) -> int:
        """Tokens of samples."""
        return sum(self.lengths)

    @property
    def padding_share(self) -> float:
        """How much of the row is padding."""
        return 1.0 - self.real_tokens / self.length if self.length else 0.0

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """`offsets` as plain numbers, for who must not wait for a device."""
        found = [0]
        for length in self.lengths:
            found.append(found[-1] + length)
        return tuple(found)

    def next_tokens(self, ignored: int = IGNORED) -> Tensor:
        """What follows each token in its own sample; nothing (`ignored`) follows the last one, or padding."""
        labels = torch.full_like(self.tokens, ignored)
        if self.length > 1:
            same = (self.documents[1:] == self.documents[:-1]) & (self.documents[1:] >= 0)
            labels[:-1] = torch.where(same, self.tokens[1:], labels[:-1])
        return labels

    def to(self, device: Any) -> Packed:
        """The same on a device."""
        moved = {name: t.to(device, non_blocking=True) for name, t in self.fields.items()}
        documents, positions = (t.to(device, non_blocking=True) for t in (self.documents, self.positions))
        return replace(self, fields=moved, documents=documents, positions=positions, offsets=self.offsets.to(device))


def pack(
    samples: Sequence[Any],
    buckets: Sequence[int] | None = None,
    fill: Mapping[str, int] | int = 0,
    starts: Sequence[int] | None = None,
) -> Packed:
    """Samples (tensors, lists of numbers, or dicts of these) in one row, padded to one of `buckets`.

    `fill` is what padding holds, by field or everywhere; `starts` are positions of first tokens, where samples are cut.
    """
    if not samples:
        raise DataError("nothing to pack", next="leave out units without samples")
    rows = [_fields(sample, number) for number, sample in enumerate(samples)]
    names = list(rows[0])
    for number, row in enumerate(rows):
        if list(row) != names:
            raise DataError(f"sample {number} has {', '.join(row)}", allowed=f"{', '.join(names)}, as sample 0 has")
    lengths = tuple(next(iter(row.values())).shape[0] for row in rows)
    real = sum(lengths)
    length = padded_length(real, buckets) if buckets is not None else real
    begins = [0] * len(rows) if starts is None else list(starts)
    if len(begins) != len(rows):
        raise DataError(f"{len(begins)} starts for {len(rows)} samples")
    fields = {}
    for name in names:
        value = fill if isinstance(fill, int) else fill.get(name, 0)
        parts = [row[name] for row in rows if row[name].shape[0]] or [rows[0][name]]  # [] has a dtype of its own
        joined = torch.cat(parts)
        fields[name] = torch.cat([joined, joined.new_full((length - real, *joined.shape[1:]), value)])
    sizes = torch.tensor(lengths)
    numbers = torch.repeat_interleave(torch.arange(len(rows)), sizes)
    first = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    place = torch.arange(real) - (first[:-1] - torch.tensor(begins))[numbers]
    rest = length - real
    return Packed(
        fields,
        torch.cat([numbers, numbers.new_full((rest,), -1)]),
        torch.cat([place, place.new_zeros(rest)]),
        first.to(torch.int32),
        lengths,
    )


def padding_share(units: Sequence[Packed]) -> float:
    """How much of several units is padding."""
    total = sum(unit.length for unit in units)
    return 1.0 - sum(unit.real_tokens for unit in units) / total if total else 0.0


def _fields(sample: Any, number: int) -> dict[str, Tensor]:
    given = dict(sample) if isinstance(sample, Mapping) else {"tokens": sample}
    found = {name: torch.as_tensor(value) for name, value in given.items()}
    sizes = {name: t.shape[0] if t.dim() else None for name, t in found.items()}
    if not found or None in sizes.values() or len(set(sizes.values())) != 1:
        raise DataError(
            f"sample {number} has {', '.join(f'{n} {tuple(t.shape)}' for n, t in found.items()) or 'nothing'}",
            allowed="tensors with its tokens along dim 0, equally many in each",
            next="put what belongs to a sample as a whole beside the loader, or repeat it for each token",
        )
    return found

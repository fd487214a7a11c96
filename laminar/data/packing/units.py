"""Samples into units: rows of tokens that are run at once, filled up to a budget.

A unit has at most so many tokens (memory) and, if asked for, at most so much cost (time, attention's quadratic part
included). Samples go from the longest to the shortest into the fullest unit that still has room for them. What comes
out is a function of the lengths alone: not of how many ranks there are, nor of who gets the unit.

A sample that is longer than a unit may be gets a unit of its own, or is refused. Padding brings a unit to one of a
few lengths, so that compiled steps and graphs are few: which one depends on the unit's own tokens and on nothing
else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from numpy.typing import ArrayLike

from laminar.data.cost.sample_cost import SampleCost, checked_lengths
from laminar.errors import DataError

BUCKETS = 16
"""At most so many different padded lengths."""


def pack_units(
    lengths: ArrayLike,
    tokens: int,
    cost: SampleCost | None = None,
    budget: float | None = None,
    too_long: str = "alone",
) -> list[list[int]]:
    """Samples of these lengths in units of at most `tokens` tokens, and of at most `budget` by a cost."""
    if too_long not in ("alone", "error"):
        raise DataError(f"too_long={too_long!r}", allowed="alone  error")
    if tokens < 1 or (budget is not None and not budget > 0):
        raise DataError(f"units of {tokens} tokens and a cost of {budget}", allowed="above zero")
    sizes: list[int] = checked_lengths(lengths).tolist()
    limit = float("inf") if budget is None else budget
    costs: list[float] = (cost or SampleCost()).of(sizes).tolist() if budget is not None else [0.0] * len(sizes)
    units: list[list[int]] = []
    filled: list[float] = []
    room: list[tuple[int, int]] = []
    for sample in sorted(range(len(sizes)), key=lambda s: -sizes[s]):
        size, worth = sizes[sample], costs[sample]
        if (size > tokens or worth > limit) and too_long == "error":
            raise DataError(
                f"sample {sample} has {size} tokens, more than a unit may hold",
                allowed=f"{tokens} tokens",
                next="allow larger units, shorten the sample, or cut it (cut_and_assign)",
            )
        at = bisect_left(room, (size, -1))
        while at < len(room) and filled[room[at][1]] + worth > limit:
            at += 1
        if at < len(room):
            free, unit = room.pop(at)
            units[unit].append(sample)
            filled[unit] += worth
        else:
            free, unit = tokens, len(units)
            units.append([sample])
            filled.append(worth)
        if free >= size:
            insort(room, (free - size, unit))
    return sorted(sorted(unit) for unit in units)


def bucket_lengths(tokens: int, longest: int | None = None, multiple: int = 16, count: int = BUCKETS) -> list[int]:
    """Lengths to pad to, rising: in equal steps up to `tokens`, and from there in equal ratios up to `longest`."""
    if not 2 <= count <= BUCKETS or tokens < 1 or multiple < 1:
        raise DataError(f"{count} lengths up to {tokens}, at multiples of {multiple}", allowed=f"2 to {BUCKETS}")

    def whole(length: float) -> int:
        return -(-round(length) // multiple) * multiple

    if longest is None or longest <= tokens:
        return sorted({whole(tokens * (k + 1) / count) for k in range(count)})
    below, above = count - count // 2, count // 2
    steps = {whole(tokens * (k + 1) / below) for k in range(below)}
    return sorted(steps | {whole(tokens * (longest / tokens) ** ((k + 1) / above)) for k in range(above)})


def padded_length(tokens: int, buckets: Sequence[int]) -> int:
    """The shortest of these lengths that holds so many tokens."""
    at = bisect_left(buckets, tokens)
    if at == len(buckets):
        raise DataError(
            f"a unit of {tokens} tokens is longer than the longest length to pad to",
            allowed=f"at most {buckets[-1] if buckets else 0}",
            next="give bucket_lengths the longest sample",
        )
    return buckets[at]

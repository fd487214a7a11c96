"""What a sample costs, by its length: a part per token, a part per pair of tokens, and a part for being there.

Linear layers work on tokens one by one, attention on pairs of them, so the cost of a sample of n tokens is `per_token
* n + per_square * n * n`. The unit is free (flops, seconds): balancing needs ratios only.

A sample may be cut by rows. Under causal attention row i looks at the keys before it, so the rows [a, b) have
`per_square * (b*b - a*a)` of the quadratic part, and all pieces of a sample add up to the whole. Without causality
every row looks at all n keys.

Not covered: costs that depend on more than the length (images beside text, experts that tokens choose).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from laminar.errors import DataError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """The cost of a sample as a function of how many tokens it has."""

    per_token: float = 1.0
    per_square: float = 0.0
    per_sample: float = 0.0
    """What every sample costs however short it is, and every piece of one that is cut."""
    causal: bool = True
    """Whether a row looks only at keys before it, which decides what a piece of a sample costs."""

    def __post_init__(self) -> None:
        parts = (self.per_token, self.per_square, self.per_sample)
        if not all(math.isfinite(x) and x >= 0 for x in parts) or not self.per_token + self.per_square:
            raise DataError(
                f"a cost of {self.per_token} per token, {self.per_square} per pair, {self.per_sample} per sample",
                allowed="finite, not negative, and not zero for any length",
            )

    def of(self, lengths: ArrayLike) -> FloatArray:
        """The cost of samples of these lengths."""
        n = np.asarray(lengths, dtype=np.float64)
        return self.per_sample + n * (self.per_token + self.per_square * n)

    def of_rows(self, start: float, stop: float, length: float) -> float:
        """The cost of the rows [start, stop) of a sample of `length` tokens."""
        keys = start + stop if self.causal else length
        return self.per_sample + (stop - start) * (self.per_token + self.per_square * keys)

    def rows_worth(self, cost: float, stop: float, length: float) -> float:
        """How many rows before `stop` cost that much: the inverse of `of_rows`, not rounded, at least none."""
        cost = max(cost - self.per_sample, 0.0)
        if not self.causal or not self.per_square:
            return cost / (self.per_token + self.per_square * (0.0 if self.causal else length))
        before = max(stop * (self.per_token + self.per_square * stop) - cost, 0.0)
        # the root of per_square * x^2 + per_token * x = before, in the form that loses no digits
        root = math.sqrt(self.per_token * self.per_token + 4.0 * self.per_square * before)
        return stop - 2.0 * before / (self.per_token + root) if before else stop

    def scaled(self, factor: float) -> SampleCost:
        """The same ratios in another unit."""
        return SampleCost(
            per_token=self.per_token * factor,
            per_square=self.per_square * factor,
            per_sample=self.per_sample * factor,
            causal=self.causal,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> SampleCost:
        """The inverse."""
        return SampleCost(**data)

    def __str__(self) -> str:
        fixed = f"{self.per_sample:.4g} + " if self.per_sample else ""
        return f"{fixed}{self.per_token:.4g} n + {self.per_square:.4g} n^2"


def checked_lengths(lengths: ArrayLike) -> IntArray:
    """Lengths as whole numbers; NaN, infinite, negative and fractional ones are refused with their place."""
    given = np.asarray(lengths)
    if given.ndim != 1 or given.dtype == object:
        raise DataError(f"lengths of shape {given.shape} and type {given.dtype}", allowed="a flat list of numbers")
    if given.dtype.kind in "iu":
        wrong = given < 0 if given.dtype.kind == "i" else None
    elif given.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            wrong = ~(np.isfinite(given) & (given >= 0) & (given == np.floor(given)))
    elif not given.size:
        wrong = None
    else:
        raise DataError(f"lengths of type {given.dtype}", allowed="numbers of tokens")
    if wrong is not None and wrong.any():
        at = int(np.argmax(wrong))
        raise DataError(
            f"sample {at} has a length of {given[at]}",
            allowed="whole numbers of tokens, 0 or more",
            next=f"look at sample {at}; {int(wrong.sum())} of {len(given)} are like this",
        )
    return given.astype(np.int64, copy=False)

"""The cost of samples corrected by what steps really take.

Counted operations are not seconds: attention runs at another rate than products of matrices do, and short units pay
for launches. So every measured unit adds one equation: its seconds are `per_unit + per_token * sum(n) + per_square *
sum(n^2)`. They are solved by least squares with forgetting, each weighted by the inverse of its own time, so that
long units don't drown short ones. No coefficient may be negative. A unit that took far longer than expected (a pause
of the machine) counts as one that took a little longer.

Ranks must calibrate alike or they would plan differently: observe what all ranks have measured, in the order of
ranks. Not covered: lengths so alike that tokens and pairs of them can't be told apart; then the ratio that was given
stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from laminar.data.cost.sample_cost import SampleCost, checked_lengths
from laminar.errors import DataError

HALF_LIFE = 200
"""Units after which what was measured counts half (assumed)."""
SPRING = 0.001
"""How hard the cost that was given pulls, against one measurement: three percent of noise, squared (assumed)."""
SETTLED = 20
"""Units after which a surprise is taken for one; before, it is what is to be learnt."""
SURPRISE = 1.5
"""A unit that took more than this times what is expected counts as one that took just so much."""


class OnlineCost:
    """A `SampleCost` in seconds, learnt from units and their times."""

    def __init__(self, prior: SampleCost | None = None) -> None:
        self.prior = SampleCost() if prior is None else prior
        self.seen = 0
        self._gram = np.zeros((4, 4))
        self._target = np.zeros(4)
        self._reference = 0.0
        """Cost by the prior per second, smoothed: what makes the prior comparable to seconds."""
        self._found: tuple[float, float, float, float] | None = None

    @property
    def cost(self) -> SampleCost:
        """What samples cost now; the given cost until something was measured."""
        if self._found is None:
            return self.prior
        _, sample, linear, square = self._found
        return SampleCost(per_token=linear, per_square=square, per_sample=sample, causal=self.prior.causal)

    @property
    def per_unit_s(self) -> float:
        """Seconds that a unit takes whatever is in it."""
        return self._found[0] if self._found else 0.0

    def seconds(self, lengths: ArrayLike) -> float:
        """What a unit of samples of these lengths is expected to take."""
        return self.per_unit_s + float(self.cost.of(lengths).sum())

    def observe(self, lengths: ArrayLike, seconds: float, speed: float = 1.0) -> None:
        """A unit of samples of these lengths took so long on a rank of that speed."""
        n = checked_lengths(lengths).astype(np.float64)
        self.observe_sums((1.0, float(len(n)), float(n.sum()), float((n * n).sum())), seconds, speed)

    def observe_sums(self, sums: Sequence[float], seconds: float, speed: float = 1.0) -> None:
        """So many (units, samples, tokens, lengths squared and added up) took so long together."""
        if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(speed) and speed > 0):
            raise DataError(f"a unit that took {seconds} s at speed {speed}", allowed="finite and above zero")
        took, row = seconds * speed, np.asarray(sums, dtype=np.float64)
        if row.shape != (4,) or not row[2]:
            return
        about = took
        if self._found is not None and self.seen >= SETTLED:
            about = float(row @ np.asarray(self._found))  # a weight by a noisy time would favour those measured short
            took = min(took, SURPRISE * about)
        keep = 0.5 ** (1.0 / HALF_LIFE)
        self._gram = keep * self._gram + np.outer(row, row) / (about * about)
        self._target = keep * self._target + row * took / (about * about)
        rate = float(row[1:] @ (self.prior.per_sample, self.prior.per_token, self.prior.per_square)) / took
        self.seen += 1
        self._reference += (rate - self._reference) / min(self.seen, 50)
        self._found = self._solved()

    def _solved(self) -> tuple[float, float, float, float]:
        """Least squares with the prior as a weak spring, and no coefficient below zero."""
        prior = (0.0, self.prior.per_sample, self.prior.per_token, self.prior.per_square)
        start = np.asarray(prior) / self._reference
        scale = np.sqrt(np.maximum(np.diag(self._gram), 1e-300))  # columns of one size
        gram = self._gram / np.outer(scale, scale)
        target = self._target / scale
        spring = SPRING / min(self.seen, HALF_LIFE)
        left, right = gram + spring * np.eye(4), target + spring * start * scale
        kept = [0, 1, 2, 3]
        while True:
            solved = np.zeros(4)
            solved[kept] = np.linalg.solve(left[np.ix_(kept, kept)], right[kept])
            if (solved >= 0).all() or len(kept) == 1:
                break
            kept = [k for k in kept if solved[k] >= 0]
        unit, sample, linear, square = (float(x) for x in np.maximum(solved, 0.0) / scale)
        if not linear + square:
            linear, square = float(start[2]), float(start[3])
        return unit, sample, linear, square

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "prior": self.prior.to_json(),
            "seen": self.seen,
            "gram": self._gram.tolist(),
            "target": self._target.tolist(),
            "reference": self._reference,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.prior, self.seen = SampleCost.from_json(state["prior"]), int(state["seen"])
        self._gram, self._target = np.asarray(state["gram"], float), np.asarray(state["target"], float)
        self._reference = float(state["reference"])
        self._found = self._solved() if self.seen else None

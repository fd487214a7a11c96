"""Calibration: what whole steps take beyond the sum of their parts.

Ops measured one by one are a little faster or slower than in a step: other caches, other neighbours. Lines of
generated code cost something of their own, ranks wait for each other at every exchange, and a step has a
beginning and an end. These are a few numbers per machine, fitted to timed steps of models under many plans:

    seconds = speed_m * (a_compute * compute + a_memory * memory + a_update * update + line_s * lines
                         + a_exchange * exchange + exchange_s * exchanges + a_wire * wire + wire_s * wires
                         + piece_s * pieces + a_waits * waits + step_s)

Exchanges are those through shared memory, wires those that background threads or network cards carry, pieces the
tensors that either moves, of which there may be many. Waits are what ranks lose because no two of them take the same
time for the same work: disturbances add up like a random walk, so that an interval of t seconds scatters by the
root of t, and k meetings in a step of T seconds cost a share of sqrt(k * T * 1 ms).

`speed_m` is the machine's mood while model m was timed: on shared cores absolute times drift by tens of percent
between one minute and the next, and only what sides of one round share may be divided out. It is not kept.
The same multipliers serve DDP, whose step has its own prices per op, per parameter and per byte, and pays for
reducing gradients beside backward: on cores that are all busy both get slower by more than the sum.

Each number is drawn towards what it would be if parts simply added up, so that one that the trials say little
about stays there. Errors are those of leaving one model out: fitted without it, judged by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

PARTS = ("compute", "memory", "update", "exchange", "wire", "waits")
"""Seconds that are multiplied."""
COUNTS = ("lines", "exchanges", "wires", "pieces", "steps")
"""Things that each cost a fixed time on top."""
DDP_COUNTS = ("eager_lines", "eager_parameters", "eager_steps")
DDP_PARTS = ("eager_exchange", "eager_copies", "eager_overlap")
TYPICAL = {
    "lines": 1e-6,
    "exchanges": 5e-5,
    "wires": 2e-4,
    "pieces": 5e-6,
    "steps": 5e-4,
    "waits": 0.2,
    "eager_lines": 6e-6,
    "eager_parameters": 5e-6,
    "eager_steps": 2e-3,
    "eager_overlap": 0.3,
}
"""Where fixed times, in seconds, and the shares of waits and overlap are drawn to; multipliers are drawn to 1. From
single recorded steps on two shared cores."""
LOOSE = dict.fromkeys(("compute", "memory", "update"), 0.1) | dict.fromkeys(("exchange", "wire", "eager_exchange"), 0.2)
"""Standard errors of logarithms before anything is known. What ops and exchanges do alone they do in a step, and a
factor is carried on to larger models, where a wrong one does most harm."""
OTHERWISE, MOOD, NOISE = 0.7, 0.15, 0.05
"""The same for all others, for a machine's mood, and for one timing."""
QUIET = {"lines": 2e-7, "steps": 3e-5}
"""The same as `TYPICAL` on a GPU, whose kernels were measured with the gap behind them. Assumed."""
QUIET_MOOD, QUIET_NOISE = 0.003, 0.03
"""Of a machine that nobody else uses."""
HALF_90 = 1.645
"""Half of a 90 % interval, in standard errors."""

Features = Mapping[str, float]
"""Seconds and counts of one step by the names above; missing ones are 0."""


@dataclass(frozen=True)
class Timing:
    """One step that was timed."""

    model: str
    side: str
    features: Features
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """What was fitted, and how well it does on a model it has not seen."""

    multipliers: dict[str, float] = field(default_factory=dict)
    extra_s: dict[str, float] = field(default_factory=dict)
    sigma: float = 0.25
    """Standard error of log(seconds) of a step, of a model that was not among those fitted to. Assumed until fitted."""
    ratio_sigma: float = 0.2
    """The same for the ratio of two steps of one model, taken at the same time."""
    models: tuple[str, ...] = ()
    errors: dict[str, float] = field(default_factory=dict)
    """Median absolute error by model, fitted and left out: of the ratio to DDP, or of seconds if `quiet`."""
    quiet: bool = False
    """Whether it was fitted to seconds, on a machine that nobody else uses."""

    def multiplier(self, part: str) -> float:
        """Of one part; nothing is waited for on a machine that was not calibrated, or nothing is known of it."""
        return self.multipliers.get(part, 0.0 if part in ("waits", "eager_overlap") else 1.0)

    def seconds(self, features: Features) -> float:
        """What a step with these features takes."""
        parts = sum(self.multiplier(k) * features.get(k, 0.0) for k in (*PARTS, *DDP_PARTS))
        counts = sum(self.extra_s.get(k, 0.0) * features.get(k, 0.0) for k in (*COUNTS, *DDP_COUNTS))
        return parts + counts

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "models": list(self.models)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_json`."""
        known = {k: data[k] for k in Calibration.__dataclass_fields__ if k in data}
        return Calibration(**{**known, "models": tuple(data.get("models", ()))})


def interval(seconds: float, sigma: float) -> tuple[float, float]:
    """The 90 % interval of a time whose logarithm has this standard error."""
    factor = math.exp(HALF_90 * sigma)
    return seconds / factor, seconds * factor


CONSTANT_NAMES = (*PARTS, *DDP_PARTS, *COUNTS, *DDP_COUNTS)


def fit(timings: Sequence[Timing], quiet: bool = False) -> Calibration:
    """The numbers that explain the timings best; errors by leaving out one model at a time.

    `quiet`: nobody else uses the machine, so seconds are seconds.
    """
    models = tuple(dict.fromkeys(t.model for t in timings))
    fitted = _fit(timings, quiet)
    errors, logs, absolute = {}, [], []
    for model in models:
        held = [t for t in timings if t.model == model]
        rest = [t for t in timings if t.model != model]
        errors_of = _errors if quiet else _ratio_errors
        errors[f"{model} fitted"] = _median(errors_of(fitted, held))
        if rest:
            other = _fit(rest, quiet)
            found = errors_of(other, held)
            errors[f"{model} left out"] = _median(found)
            logs += found
            absolute += _errors(other, held)
    if not logs:
        return fitted
    return Calibration(
        fitted.multipliers,
        fitted.extra_s,
        sigma=_spread(absolute),
        ratio_sigma=_spread(logs),
        models=models,
        errors={k: round(v, 4) for k, v in errors.items()},
        quiet=quiet,
    )


def _median(values: Sequence[float]) -> float:
    return float(np.median(np.abs(values))) if len(values) else 0.0


def _spread(values: Sequence[float]) -> float:
    """A standard error whose 90 % interval holds 90 % of the values, but not less than one timing's own."""
    return max(NOISE / 2, float(np.quantile(np.abs(values), 0.9)) / HALF_90)


def _errors(c: Calibration, held: Sequence[Timing]) -> list[float]:
    """Logarithms of predicted over measured seconds."""
    return [math.log(c.seconds(t.features) / t.seconds) for t in held]


def _ratio_errors(c: Calibration, held: Sequence[Timing]) -> list[float]:
    """Logarithms of predicted over measured ratio to DDP; to the median of all sides where there is no DDP."""
    logs = _errors(c, held)
    base = [e for e, t in zip(logs, held, strict=True) if t.side == "ddp"] or [float(np.median(logs))]
    return [e - base[0] for e, t in zip(logs, held, strict=True) if t.side != "ddp"]


def _fit(timings: Sequence[Timing], quiet: bool = False) -> Calibration:
    models = list(dict.fromkeys(t.model for t in timings))
    x = np.array([[t.features.get(k, 0.0) for k in CONSTANT_NAMES] for t in timings])
    y = np.log([t.seconds for t in timings])
    which = np.array([models.index(t.model) for t in timings])
    typical = TYPICAL | QUIET if quiet else TYPICAL
    noise, sway = (QUIET_NOISE, QUIET_MOOD) if quiet else (NOISE, MOOD)
    centre = np.array([typical.get(k, 1.0) for k in CONSTANT_NAMES])
    loose = np.array([LOOSE.get(k, OTHERWISE) for k in CONSTANT_NAMES])

    def residuals(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        a, mood = theta[: len(CONSTANT_NAMES)], theta[len(CONSTANT_NAMES) :]
        predicted = np.log(np.maximum(x @ (centre * np.exp(a)), 1e-12)) + mood[which]
        return np.concatenate([(predicted - y) / noise, a / loose, mood / sway])

    found = least_squares(residuals, np.zeros(len(CONSTANT_NAMES) + len(models)), loss="soft_l1", f_scale=2.0)
    values = centre * np.exp(found.x[: len(CONSTANT_NAMES)])
    named = dict(zip(CONSTANT_NAMES, values.tolist(), strict=True))
    return Calibration(
        {k: named[k] for k in PARTS + DDP_PARTS}, {k: named[k] for k in COUNTS + DDP_COUNTS}, models=tuple(models)
    )

"""Fitting the ten constants of each kind of device, and judging the fit by models it has not seen.

    python -m bench.published --csv FILE --fit

Least squares on the logarithm of predicted over measured, with a loss that grows linearly for rows that nothing
physical explains, inside the limits of `prices.limits`. What a row leaves open (micro-batch, recompute, virtual
stages) is decided by the constants, so fit and choice alternate. For the error that counts, all rows of a model are
left out, the constants fitted to the rest, and those rows predicted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bench.published.choices import Chosen
from bench.published.prices import FILE, Constants, limits, of_kind
from bench.published.rows import Row
from bench.published.steps import step_of

KNEE = 0.06
"""Error beyond which a row counts linearly."""
ROUNDS, STEPS = 2, 5
"""How often choices are made anew, and Gauss-Newton steps between."""
SMALL = 0.02
"""Step of the finite differences, in logarithms."""
PRIOR = 0.04
"""Weight of staying where the fit starts, so that what no row tells stays there."""

Vector = np.ndarray


@dataclass(frozen=True)
class Fitted:
    """Constants of one kind, and how far off its rows are."""

    kind: str
    constants: Constants
    inside: dict[int, float]
    """By line, predicted over measured less one, of the rows that were fitted to."""
    outside: dict[int, float]
    """The same, of rows whose model was left out."""


def model_key(row: Row) -> str:
    """Rows of one model, however its name is written: Llama 3.1 has the blocks of Llama 3."""
    return re.sub(r"[^a-z0-9]", "", row.model.lower().replace("3.1", "3"))


class Problem:
    """Rows of one kind and the constants they hang on."""

    def __init__(self, rows: Sequence[Row], free: Sequence[str], start: Constants) -> None:
        self.rows, self.free, self.start = list(rows), list(free), start
        bounds = limits(rows[0].gpu)
        self.low = np.array([_log(bounds[name][0], name) for name in free])
        self.high = np.array([_log(bounds[name][1], name) for name in free])
        self.origin = np.clip(self.vector(start), self.low, self.high)
        self.targets = [math.log(row.measured_s or 1.0) for row in rows]
        self.chosen: list[Chosen | None] = [None] * len(rows)

    def vector(self, constants: Constants) -> Vector:
        """Logarithms of what is free."""
        return np.array([_log(getattr(constants, name), name) for name in self.free])

    def constants(self, x: Vector) -> Constants:
        """The inverse."""
        return replace(self.start, **{name: _exp(v, name) for name, v in zip(self.free, x, strict=True)})

    def errors(self, x: Vector, which: Sequence[int] | None = None) -> Vector:
        """log(predicted / measured) of rows."""
        constants = self.constants(x)
        indices = range(len(self.rows)) if which is None else which
        return np.array(
            [math.log(step_of(self.rows[i], constants, self.chosen[i]).seconds) - self.targets[i] for i in indices]
        )

    def choose(self, x: Vector) -> None:
        """Decide anew what rows leave open."""
        constants = self.constants(x)
        self.chosen = [step_of(row, constants).chosen for row in self.rows]

    def slopes(self, x: Vector, at: Vector) -> np.ndarray:
        """Derivatives of all errors by all constants."""
        out = np.zeros((len(self.rows), len(x)))
        for j in range(len(x)):
            step = SMALL if x[j] + SMALL <= self.high[j] else -SMALL
            moved = x.copy()
            moved[j] += step
            out[:, j] = (self.errors(moved) - at) / step
        return out


def _log(value: float, name: str) -> float:
    return math.log(value + SHIFT.get(name, 0.0))


def _exp(value: float, name: str) -> float:
    return math.exp(value) - SHIFT.get(name, 0.0)


SHIFT = {"depth": 100.0, "jitter": 0.01}
"""Constants that may be zero are fitted as logarithms of something a little larger."""


def solved(errors: Vector, slopes: np.ndarray, x: Vector, p: Problem, weights: Vector) -> Vector:
    """The best step of the linearised problem, by reweighting, inside the limits."""
    now, origin = x.copy(), p.origin
    for _ in range(40):
        left = errors + slopes @ (now - x)
        w = weights / np.sqrt(1 + (left / KNEE) ** 2)
        held = np.zeros(len(x), dtype=bool)
        for _ in range(len(x) + 1):
            free = ~held
            a = slopes[:, free]
            target = -(errors - slopes[:, free] @ x[free] + slopes[:, held] @ (now[held] - x[held]))
            matrix = a.T @ (w[:, None] * a) + PRIOR * np.eye(int(free.sum()))
            side = a.T @ (w * target) + PRIOR * origin[free]
            trial = now.copy()
            trial[free] = np.linalg.solve(matrix, side)
            outside = (trial < p.low - 1e-12) | (trial > p.high + 1e-12)
            now = np.clip(trial, p.low, p.high)
            if not (outside & ~held).any():
                break
            held |= outside
    return now


def fitted(
    rows: Sequence[Row], free: Sequence[str], start: Constants, tell: Callable[[str], None] = print
) -> tuple[Problem, Vector]:
    """The constants that fit rows of one kind best."""
    problem = Problem(rows, free, start)
    x = problem.origin.copy()
    weights = np.ones(len(rows))
    for _ in range(ROUNDS):
        problem.choose(x)
        at = problem.errors(x)
        for _ in range(STEPS):
            aim = solved(at, problem.slopes(x, at), x, problem, weights)
            for part in (1.0, 0.5, 0.25, 0.1):
                trial = x + part * (aim - x)
                there = problem.errors(trial)
                if _loss(there) < _loss(at):
                    break
            else:
                break
            gained = _loss(at) - _loss(there)
            x, at = trial, there
            tell(f"  loss {_loss(at):.4f}, median {np.median(np.abs(np.expm1(at))):.2%}")
            if gained < 1e-3 * _loss(at):
                break
    return problem, x


def _loss(errors: Vector) -> float:
    return float(np.mean(np.sqrt(1 + (errors / KNEE) ** 2) - 1))


def judged(problem: Problem, x: Vector, rows: Sequence[Row]) -> dict[int, float]:
    """Errors of rows whose model was left out: constants from one more linearised fit without them."""
    at = problem.errors(x)
    slopes = problem.slopes(x, at)
    keys = [model_key(row) for row in rows]
    out: dict[int, float] = {}
    for key in dict.fromkeys(keys):
        mine = [i for i, k in enumerate(keys) if k == key]
        weights = np.array([0.0 if k == key else 1.0 for k in keys])
        if not weights.any():
            there = problem.origin
        else:
            there = solved(at, slopes, x, problem, weights)
            rest = [i for i, k in enumerate(keys) if k != key]
            again = np.array(at)
            again[rest] = problem.errors(there, rest)
            there = solved(again, slopes, there, problem, weights)
        constants = problem.constants(there)
        for i in mine:
            seconds = step_of(rows[i], constants).seconds
            out[rows[i].line] = math.expm1(math.log(seconds) - problem.targets[i])
    return out


def free_of(rows: Sequence[Row]) -> list[str]:
    """Which constants rows of a kind can tell."""
    names = list(asdict(Constants()))
    if not any(row.precision == "f8" for row in rows):
        names.remove("matmul8")
    return names


def fit(rows: Sequence[Row], start: dict[str, Constants], tell: Callable[[str], None] = print) -> list[Fitted]:
    """All kinds that have measured rows."""
    out = []
    for kind in dict.fromkeys(row.gpu.kind for row in rows):
        mine = [row for row in rows if row.gpu.kind == kind and row.measured_s]
        if not mine:
            continue
        tell(f"{kind}: {len(mine)} rows, {len({model_key(r) for r in mine})} models")
        problem, x = fitted(mine, free_of(mine), of_kind(mine[0].gpu, start), tell)
        inside = {row.line: math.expm1(e) for row, e in zip(mine, problem.errors(x), strict=True)}
        out.append(Fitted(kind, problem.constants(x), inside, judged(problem, x, mine)))
    return out


def save(found: Sequence[Fitted], about: dict[str, Any]) -> None:
    """Write the constants down; kinds that were not fitted stay as they are."""
    old = json.loads(FILE.read_text())["kinds"] if FILE.exists() else {}
    kinds = {**old, **{f.kind: {k: float(f"{v:.4g}") for k, v in asdict(f.constants).items()} for f in found}}
    FILE.write_text(json.dumps({"about": about, "kinds": kinds}, indent=1) + "\n")

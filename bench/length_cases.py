"""Lengths of samples as they are met: six distributions, five drawn and one read from files of this machine.

`ff-*` are what the tests of Flatflow draw, or what their figures describe; `code` are the sources of Python's own
library, 3.5 bytes a token; `github` has the long tail of code on GitHub (assumed), `codealpaca` short instructions
(estimated).
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


def _log_normal(mu: float, sigma: float, longest: int) -> Callable[[np.random.Generator, int], Lengths]:
    def draw(dice: np.random.Generator, count: int) -> Lengths:
        return np.clip(np.rint(dice.lognormal(mu, sigma, count)), 1, longest).astype(np.int64)

    return draw


def _log_uniform(dice: np.random.Generator, count: int) -> Lengths:
    return np.clip(np.rint(np.exp(dice.uniform(0.0, math.log(8192), count))), 1, 8192).astype(np.int64)


@cache
def _sources() -> Lengths:
    library = Path(sysconfig.get_paths()["stdlib"])
    sizes = [p.stat().st_size for p in sorted(library.rglob("*.py")) if "site-packages" not in p.parts]
    return np.clip(np.rint(np.asarray(sizes) / 3.5), 1, 32768).astype(np.int64)


def _code(dice: np.random.Generator, count: int) -> Lengths:
    return dice.choice(_sources(), count)


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], Lengths]] = {
    "ff-cpp": _log_normal(5.252, 0.293, 8192),
    "ff-web": _log_normal(5.754, 1.127, 8192),
    "ff-loguni": _log_uniform,
    "code": _code,
    "github": _log_normal(7.0, 1.6, 131072),
    "codealpaca": _log_normal(4.59 + math.log(1.15), 0.41, 8192),
}


def drawn(name: str, count: int, seed: int = 0) -> Lengths:
    """So many lengths of one of them."""
    return DISTRIBUTIONS[name](np.random.default_rng(seed), count)

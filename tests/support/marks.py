"""Cases of a parametrised test that are left to `make prove`, or to `make sweep`; collects nothing itself."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.seeds import dice


def slow(*values: Any) -> Any:
    """One case that repeats, on something else, what the normal run sees already."""
    return pytest.param(*values, marks=pytest.mark.slow)


def some(count: int, cases: Iterable[Any], name: str) -> list[Any]:
    """Cases that take hours together: `make prove` runs as many, drawn by its seed, `make sweep` the rest.

    Each is a value, a tuple of them, or a `pytest.param`.
    """
    cases = list(cases)
    drawn = set(dice(name).sample(range(len(cases)), min(count, len(cases))))
    out = []
    for i, case in enumerate(cases):
        values = getattr(case, "values", case if isinstance(case, tuple) else (case,))
        marks = [pytest.mark.slow] if i in drawn else [pytest.mark.slow, pytest.mark.sweep]
        out.append(pytest.param(*values, marks=marks, id=getattr(case, "id", None)))
    return out

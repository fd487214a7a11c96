"""Cases of a parametrised test that are left to `make prove`; collects nothing itself."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One case that repeats, on something else, what the normal run sees already."""
    return pytest.param(*values, marks=pytest.mark.slow)

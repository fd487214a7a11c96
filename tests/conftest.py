"""Ranks that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Four ranks."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()

"""Nothing that is simulated contradicts a search: a slice of `tests/attack.py`, and all of it in `make prove`."""

from __future__ import annotations

import math

import pytest

from tests.attack import MACHINES, MEMORY, MODELS, Attack
from tests.marks import slow, some
from tests.seeds import first

FEW = [
    ("mlp.py:tiny", "4x2xh100@nvlink+eth50", None),
    ("even", "2xcpu far", None),
    slow("dlrm.py:tiny", "measured", None),
    slow("lstm.py:tiny", "2x2xa100", 0.6),
]
"""Tensor parallel across nodes, a slow link, measured prices, and little memory."""
ALL = [(model, machine, share) for model in MODELS for machine in MACHINES for share in MEMORY
       if share is None or "+" not in machine]  # fmt: skip


def attack(model: str, machine: str, share: float | None, seconds: float) -> None:
    """All presets, and so many processor seconds of other plans."""
    one = Attack(model, machine, share, first(1))
    found = one.run(seconds)
    assert not found.wrong, found.wrong[:3]
    assert found.simulated >= 5  # presets alone are more
    # What nothing fits in has no cells to be held against, nor have parts that differ.
    assert (found.closest < math.inf) == (bool(one.found) and len(one.cluster.parts) == 1)


@pytest.mark.parametrize(("model", "machine", "share"), FEW)
def test_no_plan_contradicts_a_search(model: str, machine: str, share: float | None) -> None:
    """Below its bound, or with a name and faster than what was found with little time."""
    attack(model, machine, share, 0.5)


@pytest.mark.parametrize(("model", "machine", "share"), some(16, ALL, "attack"))
def test_nothing_contradicts_a_search_however_long_it_is_tried(model: str, machine: str, share: float | None) -> None:
    """Other models and machines, longer, with fresh seeds."""
    attack(model, machine, share, 20.0)

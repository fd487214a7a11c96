"""What is public in `laminar.data`, and what it costs to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import laminar
import laminar.data

PLANNING = "SampleCost OnlineCost assign assign_steps cut_and_assign RankSpeeds pack_units bucket_lengths".split()


@pytest.mark.parametrize("name", laminar.data.__all__)
def test_a_public_name_is_there(name: str) -> None:
    """Names are resolved lazily, so a misspelt one would only be noticed by its first user."""
    assert getattr(laminar.data, name) is not None


def test_all_is_what_dir_shows() -> None:
    """And nothing else is there."""
    assert dir(laminar.data) == sorted(laminar.data.__all__)
    with pytest.raises(AttributeError, match="balanced_diet"):
        _ = laminar.data.balanced_diet


def test_costs_and_assignments_load_no_torch() -> None:
    """Who plans a step may not have it."""
    code = (
        f"import sys, laminar; [getattr(laminar.data, n) for n in {PLANNING}];"
        "laminar.data.assign([1, 2], 2); print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=200)
    assert found.stdout.strip() == "False"

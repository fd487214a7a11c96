"""What is public, and what it costs to import.

Planning a thousand-GPU job needs no GPU and no torch, and a command that prints its help should not
wait for torch either. Both are easily lost by one import at the top of one file, so each is checked
in a fresh Python.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import laminar

PLANNING = (
    "ir",
    "rules",
    "cost",
    "placement",
    "rewrite",
    "lower",
    "forecast",
    "staging",
    "checkpoint",
    "errors",
    "events",
)
"""Rooms that import no framework; import-linter says so too, this shows it."""


def fresh(code: str) -> str:
    """What a new Python prints."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=200
    ).stdout.strip()


def modules(room: str) -> list[str]:
    """Every module of a room."""
    found = importlib.import_module(f"laminar.{room}")
    inside = getattr(found, "__path__", ())
    return [f"laminar.{room}", *(m.name for m in pkgutil.walk_packages(inside, f"laminar.{room}."))]


@pytest.mark.parametrize("name", laminar.__all__)
def test_a_public_name_is_there(name: str) -> None:
    """Names are resolved lazily, so a misspelt one would only be noticed by its first user."""
    assert getattr(laminar, name) is not None


def test_all_is_what_dir_shows() -> None:
    """Completion in an editor offers what is public and nothing else."""
    assert dir(laminar) == sorted(laminar.__all__)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = laminar.nothing_of_the_kind


def test_names_that_rooms_share_are_the_functions() -> None:
    """Importing `laminar.capture.tracing.trace` must not turn `laminar.capture` into a package."""
    code = (
        "import laminar, laminar.capture.tracing.trace, laminar.lower.lower, types;"
        "print([isinstance(x, types.FunctionType) for x in (laminar.capture, laminar.lower)])"
    )
    assert fresh(code) == "[True, True]"


@pytest.mark.parametrize("room", PLANNING)
def test_planning_loads_no_framework(room: str) -> None:
    """Each room by itself, in a fresh Python."""
    code = f"import sys, {', '.join(modules(room))}; print([m for m in ('torch', 'jax', 'keras') if m in sys.modules])"
    assert fresh(code) == "[]"


def test_importing_laminar_loads_no_torch() -> None:
    """Nor does using what is plain data."""
    code = (
        "import sys, laminar; m = laminar.Mesh({'dp': 2}); p = laminar.S(0); s = laminar.TensorSpec((2,), 'f32');"
        "laminar.plans; laminar.Plan; laminar.Graph; laminar.Recipe; print('torch' in sys.modules)"
    )
    assert fresh(code) == "False"


def test_importing_laminar_is_quick() -> None:
    """A tenth of what torch takes. The best of three, by the process's own clock: the machine may be busy."""
    code = "import time; t = time.process_time(); import laminar, laminar.api; print(time.process_time() - t)"
    assert min(float(fresh(code)) for _ in range(3)) < 1.0


def test_every_error_is_a_laminar_error() -> None:
    """One except clause catches everything raised on purpose."""
    errors = [n for n in laminar.__all__ if n.endswith("Error")]
    assert len(errors) >= 8
    assert all(issubclass(getattr(laminar, n), laminar.LaminarError) for n in errors)


def test_an_error_shows_its_lines() -> None:
    """What, then labelled lines; empty ones are left out."""
    text = str(laminar.PlanError("what", at="here", allowed="", next="do this"))
    assert text.splitlines() == ["what", "  at       here", "  next     do this"]


def test_public_names_have_types_for_those_who_use_them(tmp_path: Path) -> None:
    """A type checker must see more than Any behind `laminar.plan` and its neighbours, or it checks nothing."""
    names = sorted(set(laminar.__all__) - {"B"})  # a value, not a call
    script = tmp_path / "script.py"
    script.write_text("import laminar\n" + "".join(f"reveal_type(laminar.{name})\n" for name in names))
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(script)], capture_output=True, text=True, check=False
    )
    told = dict(zip(names, [line for line in ran.stdout.splitlines() if "Revealed type" in line], strict=True))
    assert not [name for name, line in told.items() if line.endswith('"Any"')], ran.stdout
    assert "Cluster" in told["plan"] and "Plan" in told["plan"]

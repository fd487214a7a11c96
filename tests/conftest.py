"""What all tests share: one thread each, ranks that stay up, and examples that are the same in every run.

Tensors here are tiny and cores are few, so threads of torch would only wait for each other, and they wait spinning:
steps that take a second take half a minute where the other core is busy.
"""

from __future__ import annotations

import gc
import os
import random
import sys

os.environ["LAMINAR_CACHE"] = "off"  # every test makes its own
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; processes that tests start have it too

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from laminar.runtime.check import processes
from tests.support.rank_pool import CONTEXT, SELDOM, Ranks
from tests.support.seeds import SEED

for profile, steady in (("steady", True), ("fresh", False)):
    settings.register_profile(profile, derandomize=steady, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fresh" if SEED else "steady")

gc.set_threshold(*SELDOM)


def pytest_report_header() -> str | None:
    """A fresh seed is shown, or nobody could give it back."""
    return f"random examples of seed {SEED}; again with SEED={SEED}" if SEED else None


class _Told:
    """Who writes to the terminal, if this process does."""

    config: pytest.Config | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Remember whom to tell."""
    _Told.config = config


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A run that is stopped before its end has told by then what had failed; a long one, why."""
    told = _Told.config and _Told.config.pluginmanager.getplugin("terminalreporter")
    if report.failed and told:
        why = f"\n{str(report.longrepr)[-2000:]}" if SEED else ""
        told.write_line(f"\nFAILED {report.nodeid} ({report.when}){why}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many plans were held against searches (`tests/attack/test_attack.py`), by all workers together."""
    told = [
        dict(report.user_properties)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
    ]
    told = [one for one in told if "attack simulated" in one]
    if told:
        simulated, inside = (sum(one[f"attack {name}"] for one in told) for name in ("simulated", "inside"))
        closest = min(one["attack closest"] for one in told)
        terminalreporter.write_line(
            f"{simulated:,} plans were simulated and judged, on {len(told)} pairs of model and machine; {inside:,} of "
            f"them in the space of a search; the closest took {closest:.5f} times the bound of its cell"
        )


def pytest_runtest_setup() -> None:
    """What a test draws does not depend on the tests before it, of which there are others in every run.

    Nor does what it finds.
    """
    random.seed(0)
    if earlier := sys.modules.get("laminar.planner.search.earlier_plans"):
        earlier.forget()
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _what_is_kept_is_looked_at_once() -> None:
    """Graphs that earlier tests keep are millions of objects, and whoever collects garbage would look at them again."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that laminar starts for a moment need not load torch first."""
    monkeypatch.setattr(processes.multiprocessing, "get_context", lambda kind: CONTEXT)

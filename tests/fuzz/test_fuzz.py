"""As many random plans as one has time for, over all models and meshes of up to eight ranks.

    LAMINAR_FUZZ_PLANS=1000 python -m pytest -m slow tests/fuzz

Seeds count up from one that is fresh in every run of `make fuzz`, which prints it; SEED=... gives it back. None of them
is a plan that `tests/placement/test_random_plans.py` already tries.
"""

from __future__ import annotations

import os
import time

import pytest

import laminar
from laminar.placement.random_plan import random_plan
from laminar.runtime.check.in_process.loopback import TRANSPORTS
from tests.support.failing_plans import explain
from tests.support.seeds import first
from tests.support.zoo import NAMES, equal, one_thread, specimen

MESHES = [
    dict(zip("abc", sizes, strict=False))
    for sizes in ((2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (2, 4), (4, 2), (2, 2, 2))
]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_random_plans_equal_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    """Rare combinations are only found by trying many; all failures are shown, not the first alone."""
    plans = int(os.environ.get("LAMINAR_FUZZ_PLANS", "1000"))
    begin = first(1000)
    failures: list[str] = []
    began = said = time.monotonic()
    with one_thread():
        for i in range(plans):
            seed = begin + i
            name, axes = NAMES[seed % len(NAMES)], MESHES[seed // len(NAMES) % len(MESHES)]
            plan = random_plan(specimen(name).graph, laminar.Mesh(axes), seed)
            one = specimen(name, "f64")
            if not equal(one, plan, TRANSPORTS[seed % len(TRANSPORTS)]):
                failures.append(explain(name, plan, seed, one))
            now = time.monotonic()
            if now - said > 10 or i + 1 == plans or failures:
                said = now
                with capsys.disabled():
                    print(
                        f"\n{i + 1} of {plans} plans in {now - began:.0f} s, {len(failures)} differ", end="", flush=True
                    )
            if len(failures) >= 5:
                break
    assert not failures, "\n\n".join([f"{len(failures)} plans differ", *failures])

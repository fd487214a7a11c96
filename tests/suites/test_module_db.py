"""Every `nn.Module` of torch trains as in plain PyTorch, or is refused by name: torch's own samples as a suite."""

from __future__ import annotations

import pytest

from tests.suites.harness import Outcome, against, isolated, outcome
from tests.suites.module_db import IN_PROCESS, REFUSED, case, names
from tests.support.marks import some
from tests.support.rank_pool import Ranks

PARTS = 16
SLICE = 13
"""Every how manieth case is in the normal run."""


def test_a_slice_of_modules_trains_as_in_pytorch() -> None:
    """A few cases of many modules, by turns alone and on 2 and 4 ranks under data and tensor parallelism."""
    tasks = [(name, IN_PROCESS[i % len(IN_PROCESS)]) for i, name in enumerate(names(each=4)[::SLICE])]
    assert not against(REFUSED, isolated(case, tasks))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", some(2, range(PARTS), "module_db"))
def test_every_module_trains_as_in_pytorch(part: int) -> None:
    """Alone and on 2 and 4 ranks in lock-step; nothing wrong, no crash, no obscure error, and no refusal but listed."""
    tasks = [(name, way) for name in names()[part::PARTS] for way in IN_PROCESS]
    assert not against(REFUSED, isolated(case, tasks))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", ["ranks_data", "ranks_tensor", "ranks_zero3"])
def test_a_sample_of_modules_trains_on_real_ranks(way: str, two: Ranks) -> None:
    """Processes, collectives and generated code instead of lock-step."""
    found: dict[tuple[str, str], Outcome] = {}
    for name in names(each=1):
        both = two.run(outcome, case, name, way)
        found[name, way] = next((o for o in both if o.kind != "equal"), both[0])
    assert not against(REFUSED, found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_sample_of_modules_trains_through_inductor() -> None:
    """The compiler decides on layouts and fusions; numbers stay."""
    assert not against(REFUSED, isolated(case, [(name, "compiled") for name in names(each=1)], patience_s=600))

"""Models that people use train as in plain PyTorch; docs/models.md is the whole list.

The normal run looks at a few, one for each thing that is special about them; `make prove` at some in every way,
`make sweep` at all of them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest

from tests.suites import families, hf, vision
from tests.suites.harness import against
from tests.support.marks import some
from tests.support.rank_pool import Ranks

REFUSED = families.RESULTS.with_name("families_refused.txt")
SAMPLE: dict[tuple[str, str], tuple[str, ...]] = {
    ("hf", "BART"): ("captured",),  # layers that may be dropped, with probability 0
    ("hf", "Mixtral"): ("captured", "data"),  # experts
    ("hf", "Wav2Vec2"): ("captured",),  # weight norm, a CTC loss of labels picked by a mask
    ("hf", "Swin"): ("captured", "tensor"),  # windows, pooling that restrides its result
    ("hf", "LLaVA"): ("captured",),  # pictures put into texts, and checks that there are as many
    ("vision", "shufflenet_v2_x0_5"): ("captured",),  # biases before batch norm
}
needs_torchvision = pytest.mark.skipif(not vision.WHERE.exists(), reason="torchvision is not installed (make setup)")


def problems(suite: str, name: str, ways: Any, ranks: Ranks | None = None) -> list[str]:
    found = families.looked_at(suite, name, ways, ranks)
    return against(REFUSED, {(f"{suite} {name}", way): outcome for way, outcome in found.items()})


@needs_torchvision
@pytest.mark.parametrize(("suite", "name"), SAMPLE)
def test_a_step_is_that_of_plain_pytorch(suite: str, name: str) -> None:
    """Loss, gradients and buffers."""
    assert not problems(suite, name, SAMPLE[suite, name])


@functools.cache
def everything() -> list[Any]:
    names = {"hf": list(hf.FAMILIES), "vision": list(vision.families()) if vision.WHERE.exists() else []}
    return [pytest.param(s, n, id=f"{s}-{n}") for s in names for n in names[s]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_model_trains_in_every_way:
        metafunc.parametrize(("suite", "name"), some(8, everything(), "families"))


@pytest.mark.timeout(1800)
def test_a_model_trains_in_every_way(suite: str, name: str, two: Ranks) -> None:
    """In one process and on real ranks, under every preset."""
    assert not problems(suite, name, families.WAYS, two)


@needs_torchvision
def test_the_page_is_what_was_found() -> None:
    """Nobody writes the table by hand, and no model is missing from it."""
    _, mark, rest = families.PAGE.read_text().partition(families.MARK)
    assert mark
    assert rest == families.table()


def test_nothing_in_the_results_is_wrong() -> None:
    """What is not equal is refused, with a way out; a crash or another number is never a result to keep."""
    found = families.results()
    bad = [(s, n, w, r) for s in found for n in found[s] for w, r in found[s][n].items() if r[0] in families.BAD]
    assert not bad


def test_refusals_only_shrink() -> None:
    """What was refused when the results were written is on the list, and nothing else."""
    found = {
        (f"{suite} {name}", way): families.Outcome(*row)
        for suite, rows in families.results().items()
        for name, ways in rows.items()
        for way, row in ways.items()
    }
    assert not against(REFUSED, found)


@needs_torchvision
def test_the_library_of_models_is_not_left_on_the_path() -> None:
    """Ranks that start later inherit the path, and would fail in the middle of loading transformers."""
    vision.library()
    assert str(vision.WHERE) not in sys.path

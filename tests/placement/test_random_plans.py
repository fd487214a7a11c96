"""Any plan at all computes what one device computes.

Presets and search only ever visit sensible plans, and a sensible plan hides a wrong rule behind the
replicated ones around it. So plans are drawn at random, every op for itself, on meshes of one, two
and three axes, and each must give the loss, every gradient and every buffer of one device: within
1e-9 in float64, where only a mistake can be that large, and for a few within 1e-5 in float32. What
runs is the code that ranks run, by turns in each of the ways they exchange (`runtime/check/in_process/loopback.py`). A
plan that fails is shrunk before it is printed. `tests/fuzz` does the same for as long as one likes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import laminar
from laminar.placement.random_plan import random_plan
from laminar.runtime.check.in_process.loopback import TRANSPORTS
from laminar.runtime.check.verify import VERIFY_TOLERANCE
from tests.support.failing_plans import explain
from tests.support.seeds import first
from tests.support.shrink_plan import describe, placed, plainer, shrink
from tests.support.zoo import MOST, NAMES, TWINS, equal, one_thread, specimen

MESHES = ({"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2})
SEEDS = {2: 10, 3: 7, 4: 5, 6: 1, 8: 1}
"""Plans per mesh by its ranks, of which small models try more and large ones fewer; many ranks take longest."""
LARGE = {"t5.py:tiny": 6, "unet.py:tiny": 6, "llama.py:tiny": 8, "bert.py:tiny": 8, "vit.py:tiny": 8}
"""Models whose programs for so many ranks and more take seconds each: left to `make prove`."""
CASES = [
    pytest.param(
        name,
        axes,
        id=f"{name}-{'x'.join(map(str, axes.values()))}",
        marks=[pytest.mark.slow] if name in TWINS or laminar.Mesh(axes).ranks >= LARGE.get(name, 1 << 30) else [],
    )
    for name in NAMES
    for axes in MESHES
]
MORE = 3
"""How many times as many are tried with those that only `make prove` tries."""


def count(name: str, axes: dict[str, int]) -> int:
    """How many plans of a model on a mesh: a small one is as good at finding a wrong rule, and takes a tenth."""
    nodes = len(specimen(name).graph.nodes)
    share = 2.0 if nodes < 100 else 0.5 if nodes < 200 else 0.25 if nodes < 400 else 0.1
    some = SEEDS[laminar.Mesh(axes).ranks] * share / (3 if name in TWINS else 1)
    return max(int(some), 1)


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    with one_thread():
        yield


def check(name: str, axes: dict[str, int], seed: int, dtype: str = "f64") -> None:
    """One random plan of one model."""
    plan = random_plan(specimen(name).graph, laminar.Mesh(axes), seed)
    one = specimen(name, dtype)
    if not equal(one, plan, TRANSPORTS[seed % len(TRANSPORTS)]):
        pytest.fail(explain(name, plan, seed, one), pytrace=False)


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_random_plans_equal_one_device(name: str, axes: dict[str, int]) -> None:
    """Losses, gradients and buffers within 1e-9 in float64, whatever is split, whole or partial."""
    for seed in range(count(name, axes)):
        check(name, axes, seed)


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(map(str, axes.values())))
@pytest.mark.parametrize("name", NAMES)
def test_more_random_plans_equal_one_device(name: str, axes: dict[str, int]) -> None:
    """The same with other seeds, for as long again, and fresh ones in every run."""
    tried = count(name, axes)
    for seed in range(first(tried), first(tried) + (MORE - 1) * tried):
        check(name, axes, seed)


FLOAT32 = [
    (0, 100),
    (3, 102),
    pytest.param(2, 101, marks=pytest.mark.slow),
    pytest.param(5, 103, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "seed"), FLOAT32)
@pytest.mark.parametrize("name", MOST)
def test_random_plans_equal_one_device_in_float32(name: str, mesh: int, seed: int) -> None:
    """The precision people train in: no op loses digits because its input was cut."""
    check(name, MESHES[mesh], seed, "f32")


def test_a_seed_always_draws_the_same_plan() -> None:
    """What failed at night must fail again in the morning."""
    graph, mesh = specimen("gpt.py:tiny").graph, laminar.Mesh({"a": 2, "b": 2})
    assert random_plan(graph, mesh, 5).hash == random_plan(graph, mesh, 5).hash
    assert random_plan(graph, mesh, 5).hash != random_plan(graph, mesh, 6).hash


def test_a_random_plan_uses_every_kind_of_placement() -> None:
    """A draw that never split with blocks, or never left a sum unreduced, would prove little."""
    graph = specimen("gpt.py:tiny").graph
    seen = set()
    for seed in range(4):
        for choice in random_plan(graph, laminar.Mesh({"a": 2}), seed).ops.values():
            seen |= {str(p) for nd in (*choice.ins, *choice.outs) for p in nd}
    assert {"B", "S(0)", "S(1)", "S(2)", "P(sum)", "P(max)", "P(min)"} <= seen
    assert any("blocks" in text for text in seen)


def test_a_failing_plan_shrinks_to_what_makes_it_fail() -> None:
    """Of two hundred placed ops, the two at fault are left."""
    graph, mesh = specimen("gpt.py:tiny").graph, laminar.Mesh({"a": 2})
    plan = random_plan(graph, mesh, 0)
    guilty = [*[item for item in placed(plan) if item[0] == "ops"][30:90:59], ("inputs", placed(plan)[0][1])]
    small = shrink(plan, lambda p: set(guilty) <= set(placed(p)))
    assert set(placed(small)) == set(guilty)
    assert equal(specimen("gpt.py:tiny", "f64"), small)
    assert placed(plainer(small, guilty)) == []
    assert graph.by_name[guilty[0][1]].op in describe(graph, small)


def test_float64_is_strict() -> None:
    """The tolerance that makes the word `equal` mean something here."""
    assert VERIFY_TOLERANCE == {"f64": 1e-9, "f32": 1e-5}

"""Any plan at all computes what one device computes.

Presets and search only ever visit sensible plans, and a sensible plan hides a wrong rule behind the
replicated ones around it. So plans are drawn at random, every op for itself, on meshes of one, two
and three axes, and each must give the loss, every gradient and every buffer of one device: within
1e-9 in float64, where only a mistake can be that large, and for a few within 1e-5 in float32. A
plan that fails is shrunk before it is printed. `tests/fuzz` does the same for as long as one likes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import laminar
from laminar.ir.plan import Plan
from laminar.runtime.verify import TOLERANCE, verify_program
from laminar.search.draw import random_plan
from tests.shrink import describe, placed, plainer, shrink
from tests.zoo import NAMES, Specimen, equal, one_thread, specimen

MESHES = ({"a": 2}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2})
SEEDS = {1: 6, 2: 3, 3: 1}
"""Plans per model and mesh, by axes: 19 in all for each model; three axes take longest."""
MORE = {1: 12, 2: 7, 3: 4}
"""With those that only `make prove` tries."""


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    with one_thread():
        yield


def explain(name: str, plan: Plan, seed: int, one: Specimen) -> str:
    """A failure as one would want to find it: where, how to get it again, and as small as it goes."""
    small = shrink(plan, lambda p: not equal(one, p))
    graph = specimen(name).graph
    try:
        report = str(verify_program(graph, small, [specimen(name).inputs], one.dtype))
    except Exception as error:
        report = f"{type(error).__name__}: {error}"
    again = f"random_plan(specimen({name!r}).graph, {plan.mesh}, {seed})"
    return f"{again} differs in {one.dtype}; of it suffices\n{describe(graph, small)}\n{report}"


def check(name: str, axes: dict[str, int], seed: int, dtype: str = "f64") -> None:
    """One random plan of one model."""
    plan = random_plan(specimen(name).graph, laminar.Mesh(axes), seed)
    one = specimen(name, dtype)
    if not equal(one, plan):
        pytest.fail(explain(name, plan, seed, one), pytrace=False)


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(map(str, axes.values())))
@pytest.mark.parametrize("name", NAMES)
def test_random_plans_equal_one_device(name: str, axes: dict[str, int]) -> None:
    """Losses, gradients and buffers within 1e-9 in float64, whatever is split, whole or partial."""
    for seed in range(SEEDS[len(axes)]):
        check(name, axes, seed)


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(map(str, axes.values())))
@pytest.mark.parametrize("name", NAMES)
def test_more_random_plans_equal_one_device(name: str, axes: dict[str, int]) -> None:
    """The same, for as long again."""
    for seed in range(SEEDS[len(axes)], MORE[len(axes)]):
        check(name, axes, seed)


FLOAT32 = [
    (0, 100),
    (2, 102),
    pytest.param(1, 101, marks=pytest.mark.slow),
    pytest.param(3, 103, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "seed"), FLOAT32)
@pytest.mark.parametrize("name", NAMES)
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
    assert TOLERANCE == {"f64": 1e-9, "f32": 1e-5}

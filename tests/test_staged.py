"""Staged plans: whatever the stages, their ranks and their inner plans, the numbers are those of one device."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest

from laminar.ir.mesh import Mesh
from laminar.ir.staged import Staged
from laminar.lower.split import light_ops
from laminar.lower.stages import stages
from laminar.runtime import loopback_stages
from laminar.runtime.reference import run_graph
from laminar.runtime.sizes import Sizes
from laminar.runtime.verify import judged
from laminar.search.draw import random_plan
from laminar.staging import SLACK, balanced, pipeline, work_s
from tests.zoo import NAMES, Specimen, specimen

MESHES = ({"a": 1}, {"a": 2}, {"a": 3}, {"a": 2, "b": 2})


def worst(one: Specimen, staged: Staged, way: str = "shared") -> float:
    """The largest error of two micro-batches through the stages against one device; plans are for the f32 graph."""
    again = dict(one.inputs)
    batch = [i.name for i in one.graph.of_kind("batch")]
    for name in batch:  # the second micro-batch has the same samples in another order
        again[name] = one.inputs[name].flip(0) if one.inputs[name].dim() else one.inputs[name]
    parts = [one.inputs, again]
    made = stages(one.graph, staged)
    got = loopback_stages.run([made] * 2, parts, [0.5, 0.5], [one.constants] * 2, way=way)
    wants = [run_graph(one.graph, parts[0], one.constants)]
    left = {k.removeprefix("buffer:"): v for k, v in wants[0].items() if k.startswith("buffer:")}
    wants.append(run_graph(one.graph, {**parts[1], **left}, one.constants))
    sized = Sizes(one.graph, one.inputs, one.constants)
    errors = []
    for key in wants[0]:
        want = wants[1][key] if key.startswith("buffer:") else 0.5 * wants[0][key] + 0.5 * wants[1][key]
        errors.append(judged(key, got[key], want, 1e-9, sized))
    assert got.keys() == wants[0].keys()
    return max(errors)


def drawn(one: Specimen, rng: random.Random) -> Staged:
    """A staged plan of which nothing is sensible."""
    count = rng.choice((1, 2, 3, 4))
    virtual = rng.choice((1, 1, 2))
    graph = one.graph
    inners = [partial(random_plan, mesh=Mesh(rng.choice(MESHES)), seed=rng.randrange(10**6)) for _ in range(count)]
    return pipeline(graph, count, 2, virtual, inners, couple="microbatch", apart=rng.random() < 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_random_staged_plans_give_the_numbers_of_one_device(name: str) -> None:
    """Stages, virtual stages, places of different sizes, random placements inside, backward in one part or two."""
    one = specimen(name, "f64")
    rng = random.Random(f"staged {name}")
    for _ in range(2):
        staged = drawn(one, rng)
        assert worst(one, staged) <= 1e-9, staged.explain()
        assert Staged.from_json(staged.to_json()).hash == staged.hash


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_are_balanced(stages: int) -> None:
    """No choice of cuts has a slowest stage that is faster by more than the slack; brute force over all of them."""
    graph = specimen("mlp.py:tiny").graph
    light = light_ops(graph)
    ops = [n.name for n in graph.nodes if n.phase == "forward" and n.name not in light]
    seconds = work_s(graph)

    def slowest(cuts: tuple[int, ...]) -> float:
        bounds = [0, *cuts, len(ops)]
        return max(sum(seconds[n] for n in ops[a:b]) for a, b in itertools.pairwise(bounds))

    best = min(slowest(cuts) for cuts in itertools.combinations(range(1, len(ops)), stages - 1))
    of = balanced(graph, stages)
    found = [sum(seconds[n] for n in ops if of[n] == s) for s in range(stages)]
    assert max(found) <= SLACK * best + 1e-15
    assert [of[n] for n in ops] == sorted(of[n] for n in ops) and set(of.values()) == set(range(stages))

"""Does the search find on its own what people know, or something that is simulated to be faster?

Costs are never tuned to these cases. What was found before is kept in `tests/golden`; `python -m
tests.support.golden_plans` writes it anew.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from laminar import Mesh, plans
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from tests.support.golden_plans import CASES, GOLDEN, summary

SLOWER = ("experts", "slow_network", "little_memory")
"""Cases of more than a few seconds."""


def _looked(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    graph = CASES[name].graph()
    found = CASES[name].found(graph)
    return summary(found, CASES[name].expected_s(graph)), found.account["certificate"]


def _check(name: str) -> None:
    case, (made, certificate) = CASES[name], _looked(name)
    assert made["step_ms"] <= 1.005 * made["by_hand_ms"]
    as_expected = made["stages"] == case.stages and all(made["weights"][n] == nd for n, nd in case.weights.items())
    assert as_expected or made["step_ms"] < made["by_hand_ms"], "neither what people would do nor faster"
    assert certificate["bound_s"] * 1e3 <= made["step_ms"]
    kept = json.loads((GOLDEN / f"{name}.json").read_text())
    assert {k: v for k, v in made.items() if not k.endswith("_ms")} == {
        k: v for k, v in kept.items() if not k.endswith("_ms")
    }
    assert made["step_ms"] == pytest.approx(kept["step_ms"], rel=1e-6)


@pytest.mark.parametrize("name", [n for n in CASES if n not in SLOWER])
def test_it_finds_what_people_would_do_or_better(name: str) -> None:
    """Never slower than the plan by hand; the same choice or a faster one; the same plan as last time."""
    _check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOWER)
def test_it_finds_what_people_would_do_or_better_on_larger_models(name: str) -> None:
    """As above."""
    _check(name)


def test_each_known_way_is_taken_somewhere() -> None:
    """Kept plans, read as people name them: nothing here depends on a search, but that all cases are not one case."""
    kept = {n: json.loads((GOLDEN / f"{n}.json").read_text()) for n in CASES}
    inner = {"qkv": "S(0, blocks=3)", "out": "S(1)", "up": "S(0)", "down": "S(1)"}
    for name, nd in kept["big_layers"]["weights"].items():
        if name.startswith("blocks.") and name.split(".")[-2] in inner and name.endswith("weight"):
            assert nd.rstrip("]").endswith(inner[name.split(".")[-2]]), name
    assert kept["little_memory"]["zero"] == 3
    assert all(kept["tables"]["weights"][f"tables.{i}.weight"].startswith("S") for i in range(8))
    assert kept["experts"]["weights"]["blocks.0.experts.up"] == "S(0)"
    assert kept["slow_network"]["stages"] > 1


def test_a_slow_network_is_worse_for_data_parallel() -> None:
    """What the pipeline is there for: the same model, the batch in parts, gradients over that network."""
    case = CASES["slow_network"]
    graph = case.graph()
    spread = predict(graph, plans.data_parallel(graph, Mesh({"dp": 4})), Cluster.preset(case.cluster)).seconds
    assert json.loads((GOLDEN / "slow_network.json").read_text())["step_ms"] < spread * 1e3

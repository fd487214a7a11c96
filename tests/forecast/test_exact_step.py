"""Steps in exact mode, predicted: units cost what they repeat, storage costs what it gathers."""

from __future__ import annotations

import json

import pytest

from laminar.api import graph_of
from laminar.cli import main
from laminar.errors import LaminarError
from laminar.forecast.exact_step import exact_steps, hosted_programs
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.exact import Exact
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.placement import presets
from tests.support.zoo import EXAMPLES

CPUS = Cluster.preset("4xcpu")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(f"{EXAMPLES}/gpt.py:tiny", 1, "f32", "cpu")


def plan(graph: Graph, storage: str, ranks: int):
    return presets.preset_plan(storage, graph, Mesh({"dp": ranks}))


@pytest.mark.parametrize("storage", ["data", "zero1", "zero3"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_program_of_units_is_whole(graph: Graph, storage: str, ranks: int) -> None:
    """Every line reads what was made before it, names are unique, and outputs lie as those who update them want."""
    program, _ = hosted_programs(graph, plan(graph, storage, ranks), Exact(8))
    made = {i.name for i in program.inputs} | {c.name for c in program.constants}
    for instr in program.instrs:
        assert all(r.name in made for r in instr.refs) and instr.name not in made
        made.add(instr.name)
    assert all(o.ref.name in made for o in program.outputs)
    want = plan(graph, storage, ranks)
    for o in program.outputs:
        if o.kind == "grad":
            assert o.placed.nd == want.state.get(o.name, want.inputs[o.name])


def test_one_unit_for_each_process_is_data_parallelism(graph: Graph) -> None:
    found = {s.storage: s.prediction for s in exact_steps(graph, Exact(4), CPUS)}
    usual = predict(graph, plan(graph, "data", 4), CPUS)
    assert found["data"].seconds == pytest.approx(usual.seconds, rel=1e-6)
    assert found["data"].peak_bytes == usual.peak_bytes


def test_units_cost_and_storage_saves(graph: Graph) -> None:
    found = {s.storage: s.prediction for s in exact_steps(graph, Exact(8), Cluster.preset("2xcpu"))}
    usual = predict(graph, plan(graph, "data", 2), Cluster.preset("2xcpu"))
    assert usual.seconds < found["data"].seconds < 2 * usual.seconds
    assert found["zero1"].peak_bytes < found["data"].peak_bytes
    adds = [i for i in hosted_programs(graph, plan(graph, "data", 2), Exact(8))[0].instrs if "_sum" in i.name]
    params = len(graph.of_kind("param"))
    assert len(adds) >= 3 * params  # four units of each process


def test_what_is_not_predicted_is_refused(graph: Graph) -> None:
    for exact in (Exact(4, 2), Exact(4, context=2)):
        with pytest.raises(LaminarError, match="whole units"):
            exact_steps(graph, exact, CPUS)


def test_the_command_tells_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    how = ["plan", f"{EXAMPLES}/gpt.py:tiny", "--exact", "units=4", "--cluster", "2xcpu"]
    assert main([*how, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["processes"] == 2 and [r["fits"] for r in said["storages"]] == [True] * 3
    least = min(r["peak_bytes"] for r in said["storages"])
    assert main([*how, "--memory", f"{least + 1}B"]) == 0
    text = capsys.readouterr().out
    assert text.count("does not fit") == 2 and "fit" not in text.splitlines()[1]
    assert main([*how[:2], "--exact"]) == 2

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
from laminar.ir.program import Program
from laminar.lower.lower import lower
from laminar.placement import presets
from tests.support.zoo import EXAMPLES

CPUS = Cluster.preset("4xcpu")
EIGHT = Exact(8)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(f"{EXAMPLES}/gpt.py:tiny", 1, "f32", "cpu")


def plan(graph: Graph, storage: str, ranks: int):
    return presets.preset_plan(storage, graph, Mesh({"dp": ranks}))


@pytest.mark.parametrize("storage", ["data", "zero1", "zero3"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_program_of_units_is_whole(graph: Graph, storage: str, ranks: int, exact: Exact = EIGHT) -> None:
    """Every line reads what was made before it, names are unique, and outputs lie as those who update them want."""
    program, _ = hosted_programs(graph, plan(graph, storage, ranks), exact)
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("exact", [Exact(8, 2), Exact(4, context=2), Exact(4, 2, context=2)], ids=str)
def test_programs_of_slices_and_parts_are_whole(graph: Graph, exact: Exact, ranks: int) -> None:
    test_a_program_of_units_is_whole(graph, "zero1", ranks, exact)


@pytest.mark.parametrize("exact", [Exact(1, 2), Exact(1, context=2), Exact(2, 2, context=2)], ids=str)
def test_no_product_is_lost(graph: Graph, exact: Exact) -> None:
    """Slices and parts divide the products among them, but for a few that all of them compute and odd sizes."""

    def products(program: Program) -> float:
        ins = ([p.local(program.mesh).shape for p in i.ins] for i in program.instrs if i.op == "aten.mm")
        return sum(a[0] * a[1] * b[1] for a, b in ins)

    given = plan(graph, "data", 1)
    assert 1 <= products(hosted_programs(graph, given, exact)[0]) / products(lower(graph, given)) < 1.2


def test_slices_and_parts_cost(graph: Graph) -> None:
    def seconds(exact: Exact) -> float:
        return next(s for s in exact_steps(graph, exact, CPUS) if s.storage == "data").prediction.seconds

    assert seconds(Exact(4)) < seconds(Exact(4, 2)) < seconds(Exact(4, 4))
    assert seconds(Exact(4)) < seconds(Exact(4, context=2))


def test_processes_that_share_a_unit_are_not_predicted(graph: Graph) -> None:
    assert {s.processes for s in exact_steps(graph, Exact(2, 2), CPUS)} == {2}
    with pytest.raises(LaminarError, match="at most 2"):
        hosted_programs(graph, plan(graph, "data", 4), Exact(2, 2))


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

"""Programs as data: JSON keeps all of them, and what they say of their collectives is made of fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import laminar
from laminar.errors import PlanError
from laminar.ir.graph import Graph, refs_in
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.program import BUCKETED_GRADIENTS, READ_VALUES, MoveCause, Program
from laminar.ir.sbp import B, P
from laminar.ir.tensor import TensorSpec
from laminar.lower.boxing.reshard import moves
from laminar.lower.memory.mincut_recompute import recompute
from laminar.lower.stages.stage_programs import stages
from laminar.lower.step import step_programs
from laminar.placement import presets
from laminar.placement.random_plan import random_plan
from tests.support.zoo import FEW, specimen

MESHES = (Mesh({"dp": 2}), Mesh({"tp": 3}), Mesh({"dp": 2, "tp": 2}))
PLANS: dict[str, Callable[[Graph, Mesh], Plan]] = {
    "data": presets.data_parallel,
    "zero 3": lambda graph, mesh: presets.zero(graph, mesh, 3),
    "tensor": presets.tensor_parallel,
    **{f"random {seed}": lambda graph, mesh, seed=seed: random_plan(graph, mesh, seed) for seed in range(3)},
}


def programs(graph: Graph) -> Iterator[Program]:
    """Of presets and random plans on every mesh, with what a compiled step recomputes, and of two stages."""
    for mesh in MESHES:
        for name, make in PLANS.items():
            if name == "tensor" and "tp" not in mesh.names:
                continue
            step, gathers = step_programs(graph, make(graph, mesh))
            yield step
            yield recompute(step)
            if gathers is not None:
                yield gathers
    staged = laminar.plans.pipeline(graph, 2, 2, inner=Mesh({"dp": 2}), couple="microbatch")
    for parts in stages(graph, staged).parts:
        yield from (part.program for part in parts)


@pytest.mark.parametrize("name", FEW)
def test_a_program_goes_to_json_and_back(name: str) -> None:
    """Whoever reads it has the same value: lines, placements, causes, bytes, constants and where lines come from."""
    for program in programs(specimen(name).graph):
        text = json.dumps(program.to_json(), allow_nan=False)
        again = Program.from_json(json.loads(text))
        assert again == program and again.hash == program.hash and again.runs_hash == program.runs_hash
        assert str(again) == str(program) and json.dumps(again.to_json()) == text
        assert all(i.refs == tuple(refs_in(i.args)) for i in program.instrs), "references are read off the arguments"


@pytest.mark.parametrize("offload", [(), ("blocks.0",)], ids=["kept", "away"])
@pytest.mark.parametrize("recompute", [(), ("blocks.1",)], ids=["once", "again"])
def test_what_a_plan_says_of_activations_is_in_the_json(offload: tuple[str, ...], recompute: tuple[str, ...]) -> None:
    """Copies to the host have causes and bytes too, and a program knows what they are of."""
    graph = specimen("gpt.py:tiny").graph
    plan = presets.data_parallel(graph, Mesh({"dp": 2}))
    program = laminar.lower(graph, replace(plan, offload=offload, recompute=recompute))
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program
    assert any(i.hosts for i in program.instrs) == bool(offload)


def test_a_program_is_the_one_that_was_written_or_refused() -> None:
    """A changed argument would give other numbers on every rank, and nobody would know why."""
    graph = specimen("mlp.py:tiny").graph
    program = laminar.lower(graph, presets.data_parallel(graph, Mesh({"dp": 2})))

    def refused(change: Callable[[Any], None]) -> str:
        data = json.loads(json.dumps(program.to_json()))
        change(data)
        with pytest.raises(PlanError) as caught:
            Program.from_json(data)
        return str(caught.value)

    at = next(k for k, i in enumerate(program.instrs) if i.moves)
    assert "program version None" in refused(lambda d: d.pop("laminar_program"))
    assert "lowered, not edited" in refused(lambda d: d["instrs"][at][8].update(reduction="max"))
    assert f"instrs[{at}][8].axes[0]: 'dp', not a whole number" in refused(
        lambda d: d["instrs"][at][8].update(axes=["dp"])
    )
    assert f"instrs[{at}][3][0]: 3 items, not 2" in refused(lambda d: d["instrs"][at][3][0].append("B"))
    assert "inputs[0][2]: 'S(x)' is not a placement" in refused(lambda d: d["inputs"][0][2].__setitem__(1, "S(x)"))
    assert "hash: the program is not the one" in refused(lambda d: d.update(plan="another"))


def test_programs_of_two_plans_that_run_the_same_lines_are_told_alike() -> None:
    """A search that found two plans of one program has found one."""
    graph = specimen("mlp.py:tiny").graph
    plan = presets.data_parallel(graph, Mesh({"dp": 2}))
    one, other = laminar.lower(graph, plan), replace(laminar.lower(graph, plan), plan_hash="another")
    assert one.runs_hash == other.runs_hash and one.hash != other.hash


def test_a_line_says_why_it_is_there_from_its_fields() -> None:
    """With names and counts for who reads the program, without for who sums up by cause."""
    graph = specimen("gpt.py:tiny").graph
    program = laminar.lower(graph, presets.zero(graph, Mesh({"dp": 2}), 3))
    read = next(i for i in program.collectives if i.cause and i.cause.what == READ_VALUES)
    assert read.cause is not None and read.why == f"P(sum) to B for %{read.cause.reader}"
    assert read.reason == "P(sum) to B for values"
    bucket = next(i for i in program.collectives if i.cause and i.cause.what == BUCKETED_GRADIENTS)
    count = len(bucket.refs)
    assert (
        bucket.cause == MoveCause(BUCKETED_GRADIENTS, members=count)
        and bucket.reason == f"{bucket.change} for gradients"
    )
    assert bucket.why == f"{bucket.change} for {count} gradients in one bucket"
    (lone,) = moves(program.mesh, [("w", TensorSpec((4, 4), "f32"), (P("sum"),), (B,))], "the sums").instrs
    assert lone.why == lone.reason == "P(sum) to B for the sums"
    assert (
        MoveCause("grad", "w").summary == str(MoveCause("grad", "w")) == "grad w"
        and MoveCause("grad", "w").reader == ""
    )
    assert all(i.why == i.reason == "" for i in program.instrs if not i.kind)

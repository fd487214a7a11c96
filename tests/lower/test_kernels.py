"""Kernels: groups that could run as they stand, on real programs, and the fusions that decide traffic."""

from __future__ import annotations

from functools import cache

import pytest

from laminar.ir.mesh import Mesh
from laminar.ir.ops import FREE
from laminar.ir.program import Program
from laminar.lower.kernels import WRITES_ITSELF, kernels, parts
from laminar.lower.memory.mincut_recompute import recompute, written_out
from laminar.lower.memory.planned_recompute import early
from laminar.lower.step import step_programs
from laminar.placement import presets
from laminar.placement.random_plan import random_plan
from tests.support.zoo import FEW, specimen

PLANS = {
    "one": lambda g: presets.data_parallel(g, Mesh({"dp": 1})),
    "zero3": lambda g: presets.zero(g, Mesh({"dp": 4}), 3),
    "tensor": lambda g: presets.tensor_parallel(g, Mesh({"tp": 2})),
    "random": lambda g: random_plan(g, Mesh({"a": 2, "b": 2}), 5),
}


@cache
def program(name: str, plan: str) -> Program:
    graph = specimen(name, "f32").graph
    return recompute(written_out(step_programs(graph, PLANS[plan](graph))[0]))


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("name", FEW)
def test_groups_hold_every_line_once_and_can_run_in_their_order(name: str, plan: str) -> None:
    """A kernel that needs the result of a later one could never run."""
    p = program(name, plan)
    groups = kernels(p)
    assert sorted(k for g in groups for k in g) == list(range(len(p.instrs)))
    made = {i.name for i in p.instrs}
    done: set[str] = set()
    where = parts(p)
    for group in groups:
        inside = [p.instrs[k] for k in group]
        for instr in inside:
            mine = {i.name for i in inside}
            assert all(r.name not in made or r.name in done or r.name in mine for r in instr.refs), instr.name
        assert list(group) == sorted(group)
        if len(group) > 1:
            assert not any(i.moves for i in inside)
            assert len({where[i.name] for i in inside if i.op not in FREE}) == 1, (
                "code compiled apart can't share a kernel"
            )
        done |= {i.name for i in inside}


@pytest.mark.parametrize("plan", ["zero3", "tensor"])
def test_parts_end_at_collectives_where_they_are_read_and_where_backward_begins(plan: str) -> None:
    """Code on the two sides of a collective or of the loss is compiled apart, so no kernel reaches over."""
    p = program("gpt.py:tiny", plan)
    where, first = parts(p), early(p)
    begins = next(i.name for i in p.instrs if i.name not in first)
    before, flying, cuts = 0, set(), 0
    for instr in p.instrs:
        read = {r.name for r in instr.refs} & flying
        cut = instr.moves or bool(read) or instr.name == begins
        assert where[instr.name] == before + cut, instr.name
        before, flying, cuts = where[instr.name], flying - read | ({instr.name} if instr.moves else set()), cuts + cut
    assert cuts > 4


def test_a_norm_and_what_surrounds_it_is_one_kernel() -> None:
    """Residual sum, statistics, scaling and the cast in front of a product: read once, written once."""
    p = program("gpt.py:tiny", "one")
    sizes = [len(g) for g in kernels(p) if any(p.instrs[k].op == "aten.rsqrt" for k in g)]
    assert sizes and min(sizes) >= 8


def test_fusion_leaves_fewer_kernels_than_ops() -> None:
    """On a transformer about half of all ops that a compiler writes disappear into others."""
    p = program("gpt.py:tiny", "one")
    own = [i for i in p.instrs if i.op in WRITES_ITSELF]
    groups = [g for g in kernels(p) if p.instrs[g[0]].op in WRITES_ITSELF]
    assert len(groups) < 0.6 * len(own)

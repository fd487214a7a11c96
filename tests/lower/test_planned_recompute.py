"""Recompute as a plan decides it: the same bits, fewer bytes between forward and backward, and nothing twice in vain.

Every comparison here is exact: the plan with recompute runs the same ops on the same values as the one without, so
not a bit may differ, whatever the placements, the stages, the precision.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laminar
from laminar import Mesh
from laminar.api import inputs_of
from laminar.cli import main
from laminar.cost.memory.peak import memory
from laminar.cost.ops.families import COMPUTES, family_of
from laminar.errors import PlanError
from laminar.ir.ops import FREE
from laminar.ir.plans.patterns import as_patterns, pick
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.ir.program import Program
from laminar.lower.memory.mincut_recompute import recompute, written_out
from laminar.lower.memory.planned_recompute import ANEW, boundary, boundary_bytes, early
from laminar.lower.stages.stage_net import piped
from laminar.lower.stages.stage_programs import KEPT, Stages, stages
from laminar.placement.presets import like
from laminar.placement.random_plan import random_plan
from laminar.runtime.check.in_process import lockstep
from laminar.runtime.code.inductor_step import Compiled, run_uncompiled
from laminar.runtime.comm.transport import Null
from laminar.staging.stage_plans import for_other_graph as restaged
from laminar.staging.stage_plans import pipeline
from tests.support import lockstep_pipeline
from tests.support.marks import slow
from tests.support.memory_meter import held
from tests.support.recompute_cases import PLANS, blocks
from tests.support.zoo import EXAMPLES, FEW, NAMES, Specimen, one_thread, recipe, specimen

DEEP = ("gpt.py:narrow", "llama.py:tiny", "bert.py:tiny", "moe.py:tiny", "hf.py:gpt2")
"""Models of which blocks are the larger part."""


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    with one_thread():
        yield


@cache
def pair(name: str, what: str) -> tuple[Program, Program]:
    """A program without recompute and with it."""
    graph = specimen(name).graph
    plan = PLANS[what](graph)
    return laminar.lower(graph, plan), laminar.lower(graph, plan.with_recompute(*blocks(name)))


def same_bits(one: Specimen, *programs: Program) -> None:
    """Every output of every rank, bit by bit."""
    want, *others = (lockstep.run_lockstep(p, one.inputs, one.constants) for p in programs)
    for got in others:
        for a, b in zip(want, got, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                assert torch.equal(a[key], b[key]), key


def base(name: str) -> str:
    """The line of forward that a line is a copy of."""
    return name.removesuffix(ANEW)


# --- the same bits


@pytest.mark.parametrize("name", FEW)
def test_results_are_those_without_recompute_to_the_last_bit(name: str) -> None:
    """Data, tensor, ZeRO 3 and two axes at once: dropout, batch norm, experts, tied weights, convolutions, an LSTM."""
    for what in PLANS:
        without, program = pair(name, what)
        assert any(i.phase == "recompute" for i in program.instrs) and not any(
            i.phase == "recompute" for i in without.instrs
        )
        same_bits(specimen(name), without, program)


@pytest.mark.parametrize("name", ["gpt.py:tiny", "bert.py:tiny", "moe.py:tiny", "resnet.py:tiny", slow("t5.py:tiny")])
def test_any_placement_and_any_pattern_gives_the_same_bits(name: str) -> None:
    """Random placements of every op, random modules and values, collectives repeated or not."""
    one, rng = specimen(name), random.Random(f"again {name}")
    modules = sorted({n.module for n in one.graph.nodes if n.phase == "forward" and n.module})
    values = [f"%{n.name}" for n in one.graph.nodes if n.phase == "forward"]
    for _ in range(4):
        plan = random_plan(one.graph, Mesh(rng.choice(({"a": 2}, {"a": 3}, {"a": 2, "b": 2}))), rng.randrange(10**6))
        some = [m.replace(".", r"\.") for m in rng.sample(modules, 3)]
        some[0] = some[0].rpartition(r"\.")[0] or some[0]
        some += rng.sample(values, 5)
        some = [s + rng.choice(("", "", "+collectives")) for s in some]
        same_bits(one, laminar.lower(one.graph, plan), laminar.lower(one.graph, plan.with_recompute(*some)))


def test_masks_that_are_made_again_are_the_same_masks() -> None:
    """Draws are made from a key: on every rank, wherever the tensor is cut, the second draw is the first."""
    one = specimen("bert.py:tiny")
    for what in PLANS:
        _, program = pair("bert.py:tiny", what)
        drawn: dict[str, list[Any]] = {}

        def look(instr: Any, results: list[Any], drawn: dict[str, list[Any]] = drawn) -> None:
            if instr.op == "laminar.uniform":
                drawn[instr.name] = [r[0].clone() for r in results]

        lockstep.run_lockstep(program, one.inputs, one.constants, look)
        twice = [n for n in drawn if n.endswith(ANEW)]
        assert len(twice) >= 4
        for name in twice:
            for first, second in zip(drawn[base(name)], drawn[name], strict=True):
                assert first.unique().numel() > 100 and torch.equal(first, second)


def test_statistics_of_batch_norm_are_updated_once() -> None:
    """What runs again serves backward only: new buffers leave from lines of forward, and have the same bits."""
    one = specimen("resnet.py:tiny")
    for what in ("alone", "data"):
        without, program = pair("resnet.py:tiny", what)
        first = early(program)
        leaving = {o.name: o.ref for o in program.outputs if o.kind == "buffer"}
        assert len(leaving) > 10 and all(ref.name in first for ref in leaving.values())
        again = {base(i.name) for i in program.instrs if i.phase == "recompute"}
        updates = {o.ref.name for o in without.outputs if o.kind == "buffer"}
        assert again and not again & updates
        normed = {i.name.partition(".")[0] for i in program.instrs if i.phase == "recompute"}
        assert any(n.startswith("batch_norm") for n in normed)
        same_bits(one, without, program)


# --- what is kept, and what runs twice


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("what", ["alone", "data", "zero3"])
def test_of_a_block_only_what_comes_in_is_kept(name: str, what: str) -> None:
    """Nothing that a block makes inside lies in memory between forward and backward, but what others need as well."""
    without, program = pair(name, what)
    picked = pick(specimen(name).graph, blocks(name))
    makers = {i.name: i for i in program.instrs}
    needed: dict[str, set[str | None]] = {}
    first = early(program)
    for instr in program.instrs:
        if instr.name not in first:
            for ref in instr.refs:
                needed.setdefault(ref.name, set()).add(picked.block_of(instr.module))
    for instr in reversed(program.instrs):  # a view that others read keeps what it is a view of
        if instr.name in first and instr.op in FREE:
            needed.setdefault(instr.refs[0].name, set()).update(needed.get(instr.name, ()))
    for ref in boundary(program):
        home = picked.block_of(makers[ref.name].module)
        moved = makers[ref.name].moves
        assert home is None or moved or needed[ref.name] != {home}, f"{ref} of {home} is kept"
    assert boundary_bytes(program) < 0.35 * boundary_bytes(without)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_kept_view_holds_is_not_made_again(name: str) -> None:
    """It lies in memory already, under another name; recomputed it would be there twice."""
    for what in ("alone", "data"):
        _, program = pair(name, what)
        makers = {i.name: i for i in program.instrs}
        again = {base(i.name) for i in program.instrs if i.phase == "recompute"}
        for ref in boundary(program):
            while makers[ref.name].op in FREE and makers[ref.name].refs[0].name in makers:
                ref = makers[ref.name].refs[0]
            assert ref.name not in again


def test_the_last_ops_of_a_block_do_not_run_again() -> None:
    """Backward does not read the second projection's result, nor the sum behind it; each other product runs twice."""
    _, program = pair("gpt.py:narrow", "alone")
    heavy = ("aten.addmm", "aten.add.Tensor", "laminar.attention")
    again = Counter(
        (i.op, i.module.partition(".")[2].partition(".")[2])
        for i in program.instrs
        if i.phase == "recompute" and i.op in heavy
    )
    assert set(again) == {
        ("aten.addmm", "attention.qkv"),
        ("aten.addmm", "attention.out"),
        ("aten.addmm", "mlp.up"),
        ("aten.add.Tensor", ""),
        ("laminar.attention", "attention"),
    }
    layers = len(pick(specimen("gpt.py:narrow").graph, ("blocks.*",)).blocks)
    assert set(again.values()) == {layers}  # of two sums per block the first


@pytest.mark.parametrize("name", ["gpt.py:narrow", "llama.py:tiny", "moe.py:tiny"])
@pytest.mark.parametrize("what", list(PLANS))
def test_whatever_runs_again_is_read_and_stands_right_before_it_is_needed(name: str, what: str) -> None:
    """Before collectives are merged and work is drawn forward; there is one copy of each line."""
    graph = specimen(name).graph
    program = laminar.lower(graph, PLANS[what](graph).with_recompute(*blocks(name)), schedule=False)
    readers = {r.name: k for k, i in reversed(list(enumerate(program.instrs))) for r in i.refs}
    copies = {k for k, i in enumerate(program.instrs) if i.phase == "recompute"}
    for k in copies:
        following = range(k + 1, readers[program.instrs[k].name])
        fetched = {j for j in following if program.instrs[j].why or program.instrs[j].phase == "backward"}
        assert all(j in copies or j in fetched for j in following)
    assert len({i.name for i in program.instrs}) == len(program.instrs)


@pytest.mark.parametrize("name", ["gpt.py:narrow", "bert.py:tiny", "moe.py:tiny"])
@pytest.mark.parametrize("what", list(PLANS))
def test_nothing_is_made_again_before_forward_has_ended(name: str, what: str) -> None:
    """Where forward waits for other ranks, work is drawn forward; not this, or what it makes would never be gone."""
    _, program = pair(name, what)
    phases = [i.phase for i in program.instrs]
    assert "forward" not in phases[phases.index("recompute") :]


def test_collectives_are_repeated_only_if_the_pattern_says_so() -> None:
    """Tensor parallel: the two all-reduces of each block's forward are kept, or run again on request."""
    one = specimen("gpt.py:narrow")
    plan = PLANS["tensor"](one.graph)
    without = laminar.lower(one.graph, plan, schedule=False)
    kept = laminar.lower(one.graph, plan.with_recompute("blocks.*"), schedule=False)
    repeated = laminar.lower(one.graph, plan.with_recompute("blocks.*+collectives"), schedule=False)
    assert kept.counts() == without.counts()
    layers = len(pick(one.graph, ("blocks.*",)).blocks)
    # The second one of a block ends in its output, which the next block needs, so that only the first runs again.
    assert repeated.counts()["all_reduce"] == kept.counts()["all_reduce"] + layers
    assert boundary_bytes(repeated) < boundary_bytes(kept) < boundary_bytes(without)
    same_bits(one, without, kept, repeated)


@pytest.mark.parametrize("name", ["gpt.py:narrow", "llama.py:tiny", "resnet.py:tiny", "lstm.py:tiny"])
def test_products_of_blocks_that_spare_them_are_kept_and_all_else_is_made_again(name: str) -> None:
    """No product runs twice; less is kept than without recompute, more than with all of it; the bits are the same."""
    one = specimen(name)
    for what, make in PLANS.items():
        plan = make(one.graph)
        found = [
            laminar.lower(one.graph, plan.with_recompute(*(p + end for p in blocks(name))))
            for end in ("", "-products", "-products+collectives")
        ]
        without, (whole, spared, exchanged) = laminar.lower(one.graph, plan), found
        same_bits(one, without, spared, exchanged)
        for program in (spared, exchanged):
            again = [i for i in program.instrs if i.phase == "recompute"]
            assert not [i for i in again if family_of(i.op) in COMPUTES], what
        assert what == "zero3" or spared.counts() == without.counts()
        if name in ("gpt.py:narrow", "llama.py:tiny"):
            assert boundary_bytes(whole) < boundary_bytes(spared) < 0.8 * boundary_bytes(without), what
            assert any(i.phase == "recompute" and i.op in ("aten.gelu", "aten.silu") for i in spared.instrs)


def test_gathered_weights_are_never_kept_and_serve_recompute_and_backward() -> None:
    """ZeRO 3: a weight is put together twice in a step, as without recompute, and not once more."""
    graph = specimen("gpt.py:narrow").graph
    program = laminar.lower(graph, PLANS["zero3"](graph).with_recompute("blocks.*"), schedule=False)
    weights = {i.name for i in program.inputs if i.kind == "param"}
    gathered = Counter(r.name for i in program.instrs if i.kind == "all_gather" for r in i.refs if r.name in weights)
    inside = {n: k for n, k in gathered.items() if n.startswith("blocks.")}
    assert inside and max(inside.values()) == 2
    makers = {i.name: i for i in program.instrs}
    assert not any(makers[r.name].kind == "all_gather" for r in boundary(program))


def test_values_can_be_named_alone() -> None:
    """An activation function between two products: its result is recomputed, what it reads is kept, and no more."""
    one = specimen("gpt.py:narrow")
    plan = PLANS["alone"](one.graph)
    without, program = (laminar.lower(one.graph, p) for p in (plan, plan.with_recompute("%gelu.*")))
    again = [i for i in program.instrs if i.phase == "recompute"]
    assert {i.op for i in again} == {"aten.gelu", "aten.view"}
    sizes = sum(i.outs[0].local(program.mesh).nbytes for i in again if i.op == "aten.gelu" and i.outs[0])
    assert boundary_bytes(without) - boundary_bytes(program) == sizes
    same_bits(one, without, program)


# --- memory


@pytest.mark.parametrize("name", ["gpt.py:narrow", "llama.py:tiny", "bert.py:tiny", "vit.py:tiny", "t5.py:tiny"])
def test_a_step_takes_what_was_predicted(name: str) -> None:
    """Buffers, gradients and activations where they are most, within 5 % of a real step, and less than without."""
    one = specimen(name)
    for what in ("alone", "data", "zero3"):
        without, program = pair(name, what)
        real = held(program, one.inputs, one.constants, "null")
        found = memory(program, backend="null", optimizer=0)
        assert found.peak_bytes - found.parameters - found.inputs - found.constants == pytest.approx(real, rel=0.05)
        if what != "zero3":  # where the gathered weights of these small models are larger than all else
            assert found.peak_activations < memory(without, backend="null", optimizer=0).peak_activations


# --- the compiled step


@pytest.mark.parametrize("name", ["gpt.py:narrow", "bert.py:tiny", "llama.py:tiny", "resnet.py:tiny"])
@pytest.mark.parametrize("what", ["alone", "data"])
def test_the_cut_leaves_to_the_plan_what_the_plan_decides(name: str, what: str) -> None:
    """What compiled steps choose to recompute comes on top: nothing of the plan's comes back into memory."""
    one = specimen(name)
    _, program = pair(name, what)
    cut = recompute(written_out(program))
    picked = pick(one.graph, blocks(name))
    makers = {i.name: i for i in program.instrs}
    planned = [i.name for i in program.instrs if i.phase == "recompute"]
    assert planned == [i.name for i in cut.instrs if i.name.endswith(ANEW) and i.phase == "recompute"]
    assert boundary_bytes(cut) <= boundary_bytes(written_out(program))
    before = {r.name for r in boundary(program)}
    for ref in boundary(cut):
        line = makers.get(ref.name)
        if line is not None and ref.name not in before:  # chosen instead of something that is larger
            assert picked.block_of(line.module) is None or f"{ref.name}{ANEW}" not in planned
    same_bits(one, written_out(program), cut)
    if what == "alone":
        step = Compiled(program, Null(program.mesh), one.constants, compiler=run_uncompiled)
        assert [i.name for i in step.program.instrs if i.name.endswith(ANEW) and i.phase == "recompute"] == planned
        got = step(*[one.inputs[i.name] for i in program.inputs])
        for o, value in zip(program.outputs, got, strict=True):
            torch.testing.assert_close(value, one.want[f"{o.kind}:{o.name}"], rtol=1e-4, atol=1e-5)


# --- stages


def stash_bytes(made: Stages, stage: int) -> int:
    """Bytes that forward keeps for the parts behind it."""
    outs = (o for o in made.parts[stage][0].program.outputs if o.kind == KEPT)
    return sum(o.placed.local(made.staged.places[made.staged.stages[stage].place].mesh).nbytes for o in outs)


@pytest.mark.parametrize("name", FEW)
def test_stages_give_the_same_bits(name: str) -> None:
    """1f1b and zero-bubble, alone, ZeRO 3 and tensor parallel inside; micro-batches of different samples."""
    one = specimen(name)
    other = {k: v.flip(0) if k.startswith("batch") and v.dim() else v for k, v in one.inputs.items()}
    inners: tuple[Any, ...] = (None, partial(laminar.plans.zero, mesh=Mesh({"dp": 2})), Mesh({"tp": 2}))
    for inner, schedule in zip((*inners, None), ("1f1b", "zero-bubble", "1f1b", "zero-bubble"), strict=True):
        made = [
            stages(one.graph, pipeline(one.graph, 2, 2, 1, inner, schedule=schedule, couple="microbatch", recompute=r))
            for r in ((), blocks(name))
        ]
        want, got = (
            lockstep_pipeline.run_pipeline_lockstep(m, [one.inputs, other], [0.5, 0.5], one.constants) for m in made
        )
        assert want.keys() == got.keys()
        for key in want:
            assert torch.equal(want[key], got[key]), (schedule, key)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_the_stash_shrinks_and_with_it_registers_and_the_bound(schedule: str) -> None:
    """They follow from the parts: what forward keeps, what queues carry, what a place may hold at most."""
    graph = specimen("gpt.py:narrow").graph
    without, made = (stages(graph, pipeline(graph, 2, 4, schedule=schedule, recompute=r)) for r in ((), ("blocks.*",)))
    for s in range(2):
        assert stash_bytes(made, s) < 0.15 * stash_bytes(without, s)
        forward, *rest = made.parts[s]
        assert not any(i.phase == "recompute" for i in forward.program.instrs)
        assert any(i.phase == "recompute" for i in rest[0].program.instrs)
        # What gradients of weights read of the part before them is no more than without recompute.
        weights = [m.by_name.get(f"W{s}") for m in (without, made)]
        if schedule == "zero-bubble" and s == 1:
            sizes = [
                sum(i.placed.local(Mesh({"dp": 1})).nbytes for i in w.program.inputs if i.kind == KEPT)
                for w in weights
                if w is not None
            ]
            assert sizes[1] <= sizes[0]
            assert not any(i.phase == "recompute" for i in made.by_name["W1"].program.instrs)
    before, net = (piped(m).net for m in (without, made))
    for s, letter in enumerate("BB" if schedule == "1f1b" else "WI"):
        (queue,) = (q for q in net.queues if q.name == f"F{s}->{letter}{s}")
        (old,) = (q for q in before.queues if q.name == queue.name)
        assert queue.registers == old.registers and queue.bytes < 0.2 * old.bytes
        saved = (old.bytes - queue.bytes) * queue.registers
        alone = [
            replace(n, queues=tuple(replace(q, bytes=q.bytes * (q.name == queue.name)) for q in n.queues))
            for n in (before, net)
        ]
        assert alone[0].bound_bytes(s) - alone[1].bound_bytes(s) == saved
        # Of all registers: sums of gradients may be what is most now, when nothing is stashed any more.
        assert net.bound_bytes(s) < before.bound_bytes(s)


def test_a_stage_keeps_the_patterns_that_name_something_in_it() -> None:
    """Blocks of both stages, a module of the second only; refused if no stage has it."""
    graph = specimen("gpt.py:narrow").graph
    staged = pipeline(graph, 2, 2, recompute=["blocks.*", "head"])
    assert [s.plan.recompute for s in staged.stages] == [("blocks.*",), ("blocks.*", "head")]
    assert "recomputed in backward: blocks.*, head" in staged.explain()
    assert Staged.from_json(json.loads(json.dumps(staged.to_json()))).hash == staged.hash
    assert staged.hash != pipeline(graph, 2, 2).hash
    with pytest.raises(PlanError, match="'tail' names no module"):
        pipeline(graph, 2, 2, recompute="tail")
    inner = laminar.plans.data_parallel(graph, Mesh({"dp": 2}), recompute="blocks.0")
    assert pipeline(graph, 2, 2, 1, inner).stages[0].plan.recompute == ("blocks.0",)


# --- regions that the user has checkpointed


class Regions(nn.Module):
    """Blocks with dropout that are checkpointed on request."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 16), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(16, 3)
        self.shift = nn.Parameter(torch.zeros(16))  # a reentrant region wants an input that has a gradient

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=self.how == "reentrant") if self.how else block(x))  # type: ignore[operator]
        return self.head(x)


def regions(how: str) -> Specimen:
    """Captured, with the same weights however it is checkpointed."""
    torch.manual_seed(0)
    model, batch = Regions(how).train(), torch.randn(8, 16)
    graph = laminar.capture(model, lambda m, b: m(b).square().mean(), batch)
    inputs = {k: v.detach() for k, v in inputs_of(graph, model, batch, seed=3).items()}
    return Specimen(how, graph, inputs, {}, {}, "f32")


@pytest.mark.parametrize("how", ["plain", "reentrant"])
def test_regions_that_the_user_checkpoints_take_less_memory_and_give_the_same_bits(how: str) -> None:
    """From the model's code to the program: alone and spread, in stages, and with a cut through one of the regions."""
    without, one = regions(""), regions(how)
    for what, plan in PLANS.items():
        programs = [laminar.lower(s.graph, plan(s.graph)) for s in (without, one)]
        same_bits(one, *programs)
        assert boundary_bytes(programs[1]) < 0.5 * boundary_bytes(programs[0]), what
        weights = Counter(r.name for i in programs[1].instrs if i.kind == "all_gather" for r in i.refs)
        assert max(weights.values(), default=0) <= 2 or what != "zero3"
    for schedule, cut in (("1f1b", 2), ("zero-bubble", 2), ("1f1b", [r"blocks\.1\.3"])):
        made = [stages(s.graph, pipeline(s.graph, cut, 2, schedule=schedule)) for s in (without, one)]
        want, got = (lockstep_pipeline.run_pipeline_lockstep(m, [one.inputs] * 2, [0.5, 0.5], {}) for m in made)
        assert all(torch.equal(want[k], got[k]) for k in want)
        assert all(stash_bytes(made[1], s) < 0.6 * stash_bytes(made[0], s) for s in range(2))
        assert not any(w.edge.phase == "backward" and w.edge.src < w.edge.dst for w in made[1].wires)


def test_a_plan_may_name_blocks_inside_of_regions_and_around_them() -> None:
    """Both say what to recompute, and the numbers stay."""
    one = regions("plain")
    plan = PLANS["data"](one.graph)
    for pattern in ("blocks.*", "blocks.*.0", "%tanh.*"):
        same_bits(one, laminar.lower(one.graph, plan), laminar.lower(one.graph, plan.with_recompute(pattern)))


# --- plans


def test_plans_with_recompute_are_saved_told_and_told_apart() -> None:
    """In files, in the hash, in words; a plan without has none in its file, so that old files and hashes stay."""
    graph = specimen("gpt.py:tiny").graph
    plain = laminar.plans.data_parallel(graph, Mesh({"dp": 2}))
    plan = laminar.plans.data_parallel(graph, Mesh({"dp": 2}), recompute="blocks.*")
    assert "recompute" not in plain.to_json() and Plan.from_json(plain.to_json()).recompute == ()
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.recompute == ("blocks.*",) and again.hash == plan.hash != plain.hash
    assert "recomputed in backward: blocks.*" in plan.explain() and "lines run twice" in plan.explain()
    assert "again" not in plain.explain()
    assert plan.with_recompute().hash == plain.hash
    assert plain.with_recompute("blocks.*").hash == plan.hash
    with pytest.raises(PlanError, match="corrupt plan"):
        Plan.from_json({**plan.to_json(), "recompute": [3]})


def test_every_preset_takes_patterns() -> None:
    """One, or several, or several in one text."""
    graph, mesh = specimen("gpt.py:tiny").graph, Mesh({"dp": 2})
    made = [
        laminar.plans.zero(graph, mesh, recompute=["blocks.0", "head"]),
        laminar.plans.tensor_parallel(graph, Mesh({"tp": 2}), recompute="blocks.0, head"),
        laminar.plans.seeded(graph, mesh, {"batch.*": {"dp": laminar.S(0)}}, recompute=("blocks.0", "head")),
    ]
    assert [p.recompute for p in made] == [("blocks.0", "head")] * 3


def test_other_graphs_of_the_model_keep_what_they_have() -> None:
    """Another size of batch, and evaluation, which has nothing to recompute."""
    one = specimen("gpt.py:tiny")
    plan = PLANS["data"](one.graph).with_recompute("blocks.*")
    assert like(one.graph, plan).recompute == ("blocks.*",)
    nodes = tuple(n for n in one.graph.nodes if n.phase == "forward")
    outputs = tuple(o for o in one.graph.outputs if o.kind == "loss")
    evaluation = replace(one.graph, nodes=nodes, outputs=outputs)
    program = laminar.lower(evaluation, like(evaluation, plan))
    assert not any(i.phase == "recompute" for i in program.instrs)


def test_stages_of_other_graphs_keep_what_each_of_them_had() -> None:
    """Smaller micro-batches of the same model; one stage makes its block again, the other nothing."""
    made = recipe("gpt.py:tiny")
    model, batch = made.model(), next(iter(made.data()))
    whole, half = (laminar.capture(model, made.loss, {k: v[:n] for k, v in batch.items()}) for n in (4, 2))
    assert whole.hash != half.hash
    inners = [laminar.plans.data_parallel(whole, Mesh({"dp": 1}), recompute=p) for p in ("blocks.0", ())]
    staged = pipeline(whole, ["blocks.1"], 2, 1, inners)
    assert [s.plan.recompute for s in restaged(half, staged).stages] == [("blocks.0",), ()]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("blocks.*", {"blocks.0", "blocks.1"}),
        ("blocks", {"blocks"}),
        ("blocks.*.mlp", {"blocks.0.mlp", "blocks.1.mlp"}),
        (r"blocks\.(1|2)", {"blocks.1"}),
        (r"blocks\.1.*", {"blocks.1"}),
        ("*", {"embed", "position", "blocks", "norm", "head"}),
    ],
)
def test_patterns_name_whole_modules(pattern: str, found: set[str]) -> None:
    """`*` is one part of a path; a regular expression takes the outermost of modules inside each other."""
    assert pick(specimen("gpt.py:tiny").graph, as_patterns(pattern)).blocks == found


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("bloks.*", "names no module"),
        ("blocks.7", "names no module"),
        ("%gelo.*", "names no value"),
        ("bl(ocks", "is not a pattern"),
        ("", "is not a pattern"),
        ("+collectives", "is not a pattern"),
    ],
)
def test_patterns_that_name_nothing_are_refused(pattern: str, what: str) -> None:
    """With what there is; also where the plan was written by hand and is only met by its graph when it is lowered."""
    graph = specimen("gpt.py:tiny").graph
    with pytest.raises(PlanError, match=what) as error:
        laminar.plans.data_parallel(graph, Mesh({"dp": 2}), recompute=[pattern])
    if "module" in what:
        assert "blocks.*.mlp" in str(error.value)
        with pytest.raises(PlanError, match=what):
            laminar.lower(graph, PLANS["data"](graph).with_recompute(pattern))


def test_the_command_line_takes_patterns(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`laminar plan --recompute`, in one stage and several; what is written verifies."""
    which, file = str(EXAMPLES / "gpt.py:tiny"), str(tmp_path / "plan.json")
    assert main(["plan", which, "--mesh", "dp=2", "--recompute", "blocks.*", "--recompute", "head", "-o", file]) == 0
    assert "recomputed in backward: blocks.*, head" in capsys.readouterr().out
    assert main(["verify", which, "--plan", file]) == 0
    assert main(["plan", which, "--stages", "2", "--micro-batches", "2", "--recompute", "blocks.*", "-o", file]) == 0
    assert capsys.readouterr().out.count("recomputed in backward: blocks.*") == 2
    assert main(["verify", which, "--plan", file]) == 0
    assert main(["plan", which, "--mesh", "dp=2", "--recompute", "layer.*"]) == 2
    assert "blocks.*" in capsys.readouterr().err

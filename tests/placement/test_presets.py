"""Plans with names keep their promises, and what they promise is what people know them for.

Data parallel: nothing moves but gradients. ZeRO: a rank holds its share and no more. Tensor parallel:
two all-reduces per block and direction, also where q, k and v are packed. And from seeds alone, with
nobody saying how: sequence parallelism around split weights, the exchange of heads for tokens around
attention, and a cross entropy that no rank sees whole. Every plan is also held against one device in
float64 to 1e-9. What plans cost in time is not looked at here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import laminar
from laminar import B, Mesh, S
from laminar.errors import NoRuleError, PlanError
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Instr, Program
from laminar.ir.sbp import Split, local_spec
from laminar.ir.tensor import TensorSpec
from laminar.placement import presets
from laminar.placement.micro_batch import micro
from laminar.staging.coupled_samples import coupled_ops
from tests.support.example_recipes import load
from tests.support.golden_plans import gpt_of
from tests.support.marks import slow
from tests.support.zoo import FEW, Specimen, captured, one_thread, recipe, specimen, verified


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    with one_thread():
        yield


@cache
def gpt(**changes: int) -> Specimen:
    """A GPT of another size: two layers of 32 unless told."""
    module = load("gpt.py")
    config = {"layers": 2, "d": 32, "heads": 4, "vocab": 61, "tokens": 16, "batch": 8, **changes}
    return captured(module.recipe(module.Config(**config), lr=1e-3, steps=1), f"gpt {changes}")


@cache
def llama(layers: int) -> Specimen:
    """A Llama of another depth."""
    module = load("llama.py")

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return module.Llama(layers=layers, d=32, heads=4, kv_heads=2, hidden=84, vocab=64, tokens=12)

    return captured(replace(module.tiny(), model=model), f"llama {layers}")


def program_of(one: Specimen, plan: Plan) -> Program:
    """The program, once it is known to give one device's numbers."""
    verified(one, plan)
    return laminar.lower(one.graph, plan)


def parting(program: Program) -> list[Instr]:
    """Collectives whose results nobody in the step waits for: buckets of gradients."""
    read = {r.name for i in program.instrs for r in i.refs}
    return [i for i in program.collectives if i.name not in read]


def loose(program: Program) -> list[Instr]:
    """All others."""
    last = {i.name for i in parting(program)}
    return [i for i in program.collectives if i.name not in last]


# --- data parallel -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_data_parallel_moves_gradients_only(name: str) -> None:
    """All-reduces and nothing else; gradients share buckets; batch statistics and losses are a few numbers."""
    one = specimen(name)
    program = program_of(one, laminar.plans.data_parallel(one.graph, Mesh({"dp": 2})))
    norms = sum(n.op == "laminar.batch_norm" for n in one.graph.nodes)
    rest = loose(program)
    assert {i.kind for i in rest} <= {"all_reduce"}
    assert len(rest) <= 4 + 4 * norms
    assert all(i.bytes <= 1024 for i in rest)
    grads = {o.name: o.ref.name for o in program.outputs if o.kind == "grad"}
    last = {i.name for i in parting(program)}
    # Batch norm's backward needs the sums that are its parameters' gradients, so those can't wait.
    assert sum(made not in last for made in grads.values()) <= 2 * norms
    assert len(last & set(grads.values())) == 1
    assert all(i.placed.nd == (B,) for i in program.inputs if i.kind == "param")
    assert all(i.placed.nd == (S(0),) for i in program.inputs if i.kind == "batch")


class Positions(nn.Module):
    """Positions are looked up for every sample, in a table that is larger than what is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(20, 8), nn.Embedding(64, 8), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
        return self.head(torch.tanh(self.words(ids) + self.positions(places + 2)))


def test_a_table_looked_up_for_every_sample_is_split_by_sample() -> None:
    """As BART and Whisper do it: nobody puts the batch together to add positions, and micro-batches are no matter."""
    ids = torch.arange(20).view(4, 5)
    graph = laminar.capture(Positions(), lambda m, b: m(b).square().mean(), ids)
    program = laminar.lower(graph, laminar.plans.data_parallel(graph, Mesh({"dp": 2})))
    assert {i.kind for i in program.instrs if i.moves} == {"all_reduce"} and not coupled_ops(graph)


def test_a_bucket_has_a_size() -> None:
    """Gradients are reduced in shards as backward makes them, so that the first ones travel early."""
    one = specimen("gpt.py:tiny")
    plan = laminar.plans.data_parallel(one.graph, Mesh({"dp": 2}))
    program = laminar.lower(one.graph, plan, bucket_bytes=40_000)
    buckets = [i for i in parting(program) if i.phase == "backward"]
    assert len(buckets) >= 3
    # A bucket is closed once it is full: without its last member it is not.
    sizes = [[p.local(program.mesh).nbytes for p in i.ins] for i in buckets]
    assert all(sum(members[:-1]) < 40_000 for members in sizes)
    assert all(sum(members) >= 40_000 for members in sizes[:-1])
    # The loss travels with the first gradients.
    assert sum(len(i.refs) for i in buckets) == sum(o.kind in ("grad", "loss") for o in program.outputs)
    first = program.instrs.index(buckets[0])
    assert first < len(program.instrs) - 20


def test_a_batch_that_does_not_divide_is_still_shared() -> None:
    """Three samples on two ranks: two and one."""
    one = gpt(batch=3)
    program = program_of(one, laminar.plans.data_parallel(one.graph, Mesh({"dp": 2})))
    (ids, _) = [i.placed for i in program.inputs if i.kind == "batch"]
    assert [ids.local(program.mesh, r).shape[0] for r in range(2)] == [2, 1]


def test_data_parallel_on_two_axes_reduces_over_both_at_once() -> None:
    """One collective over four ranks, not two over two."""
    one = specimen("mlp.py:tiny")
    program = program_of(one, laminar.plans.data_parallel(one.graph, Mesh({"node": 2, "gpu": 2})))
    assert {program.axis_names(i) for i in program.collectives} == {"nodexgpu"}


# --- ZeRO --------------------------------------------------------------------------------------


def share(spec: TensorSpec, ranks: int) -> int:
    """Bytes of the largest piece: along a dim that divides, else along one of which everyone gets some."""
    if any(n and n % ranks == 0 for n in spec.shape):
        return spec.nbytes // ranks
    for n in spec.shape:
        step = -(-n // ranks)
        if step * (ranks - 1) < n:
            return spec.nbytes // n * step
    return spec.nbytes


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [(1, 2), (2, 4), (3, 4), *(slow(stage, ranks) for stage, ranks in ((1, 4), (2, 2), (3, 2)))],
)
@pytest.mark.parametrize("name", FEW)
def test_zero_stores_a_share(name: str, stage: int, ranks: int) -> None:
    """Optimizer state from stage 1, gradients from 2, parameters from 3: the largest piece of each, and no more."""
    one = specimen(name)
    mesh = Mesh({"dp": ranks})
    plan = laminar.plans.zero(one.graph, mesh, stage=stage)
    checked = stage == 3 or (ranks == 2 and not name.startswith("hf"))  # large ones once are enough
    program = program_of(one, plan) if checked else laminar.lower(one.graph, plan)
    params = [i for i in one.graph.of_kind("param") if i.trainable]
    whole = sum(i.spec.nbytes for i in params)
    pieces = sum(share(i.spec, ranks) for i in params)
    assert sum(local_spec(i.spec, plan.state[i.name], mesh.sizes).nbytes for i in params) == pieces
    grads = [o.placed for o in program.outputs if o.kind == "grad"]
    assert sum(p.local(mesh).nbytes for p in grads) == (pieces if stage >= 2 else whole)
    stored = [i.placed for i in program.inputs if i.kind == "param"]
    assert sum(p.local(mesh).nbytes for p in stored) == (pieces if stage == 3 else whole)
    assert pieces < 1.2 * whole / ranks + 2000


def test_zero_3_gathers_each_parameter_once_each_way() -> None:
    """Forward and backward fetch it separately, so that nothing gathered has to be kept in between."""
    one = specimen("gpt.py:tiny")
    program = program_of(one, laminar.plans.zero(one.graph, Mesh({"dp": 2})))
    fetched = Counter((r.name, i.phase) for i in program.instrs if i.kind == "all_gather" for r in i.refs)
    assert set(fetched.values()) == {1}
    weights = {i.name for i in one.graph.of_kind("param") if i.name.endswith("up.weight")}
    assert {(w, phase) for w in weights for phase in ("forward", "backward")} <= set(fetched)


@pytest.mark.parametrize("name", ["gpt.py:tiny", "llama.py:tiny", "moe.py:tiny"])
def test_gathered_once_parameters_serve_backward_too(name: str) -> None:
    """A third less is exchanged where weights are: forward gathers, backward reads what is there. Files keep it."""
    one, mesh = specimen(name), Mesh({"dp": 2})
    plan = laminar.plans.zero(one.graph, mesh, gather_once=True)
    program = program_of(one, plan)
    gathers = [i for i in program.instrs if i.kind == "all_gather"]
    fetched = Counter(r.name for i in gathers for r in i.refs)
    stored = {i.name for i in program.inputs if i.kind == "param" and i.placed.nd != (B,)}
    assert {n: k for n, k in fetched.items() if n in stored} == dict.fromkeys(stored, 1)
    twice = laminar.lower(one.graph, laminar.plans.zero(one.graph, mesh))
    assert sum(i.bytes for i in gathers) < 0.6 * sum(i.bytes for i in twice.instrs if i.kind == "all_gather")
    assert Plan.from_json(plan.to_json()) == plan and plan.hash != replace(plan, gather_once=False).hash
    assert "gathered once" in plan.explain()


def test_what_is_in_pieces_over_two_axes_travels_together_over_both() -> None:
    """Between nodes first, where a rank holds least, then inside: as few gathers on the second axis as on the first."""
    one = gpt(layers=4)
    flat = laminar.plans.data_parallel(one.graph, Mesh({"node": 2, "gpu": 2}))
    program = program_of(one, presets.in_pieces(one.graph, flat, 3))
    gathers = Counter(i.box.axes for i in program.instrs if i.kind == "all_gather")
    weights = [i.name for i in one.graph.of_kind("param")]
    assert gathers[(0,)] == gathers[(1,)] < len(weights) / 4


def test_the_last_buckets_of_two_axes_are_smaller() -> None:
    """Nothing hides what is reduced behind backward. Every gradient is in one bucket, whatever their size."""
    graph = laminar.capture(*gpt_of(6, 512, 8, 64, 16))
    flat = laminar.plans.data_parallel(graph, Mesh({"node": 2, "gpu": 2}))
    plan = presets.in_pieces(graph, flat, 3, spared=0.01)

    def buckets(limit: int) -> list[Instr]:
        every = parting(laminar.lower(graph, plan, bucket_bytes=limit))
        return [i for i in every if i.kind == "reduce_scatter"]

    sizes = [i.bytes for i in buckets(1 << 20)]
    layers = [n for n in sizes if n < 4 << 20]  # without head and table
    assert len(layers) > 4 and max(layers[-2:]) < min(layers[:-2]) / 2
    assert sum(sizes) == sum(i.bytes for i in buckets(1 << 30))


def test_the_smallest_parameters_stay_whole() -> None:
    """To cut them saves nothing. All of one size or none: what holds for three layers holds for a hundred."""
    for layers in (2, 4):
        graph = gpt(layers=layers, d=64).graph
        flat = laminar.plans.data_parallel(graph, Mesh({"dp": 2}))
        plan = presets.in_pieces(graph, flat, 3, spared=0.02)
        whole = [i for i in graph.of_kind("param") if plan.inputs[i.name] == (B,)]
        assert {i.name.split(".")[-1] for i in whole} == {"weight", "bias"} and all(
            len(i.spec.shape) == 1 for i in whole
        )
        assert sum(i.spec.numel for i in whole) <= 0.02 * sum(i.spec.numel for i in graph.of_kind("param"))
        assert all(plan.inputs[i.name] != (B,) for i in graph.of_kind("param") if len(i.spec.shape) > 1)


def test_zero_has_three_stages() -> None:
    """Anything else is refused, and so is to gather once what is not gathered."""
    graph = specimen("mlp.py:tiny").graph
    with pytest.raises(PlanError, match="no stage 4"):
        laminar.plans.zero(graph, Mesh({"dp": 2}), stage=4)
    with pytest.raises(PlanError, match="gathers no parameters"):
        laminar.plans.zero(graph, Mesh({"dp": 2}), stage=1, gather_once=True)
    inner = laminar.plans.zero(micro(graph, 2), Mesh({"dp": 1}), gather_once=True)
    with pytest.raises(PlanError, match="every micro-batch under way"):
        laminar.plans.pipeline(micro(graph, 2), stages=2, microbatches=2, inner=inner)


# --- tensor parallel ---------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_tensor_parallel_equals_one_device(name: str, axes: dict[str, int]) -> None:
    """Whatever the model; and its weights really are in shards."""
    one = specimen(name)
    plan = laminar.plans.tensor_parallel(one.graph, Mesh(axes))
    verified(one, plan)
    if name != "lstm.py:tiny":  # each step of an LSTM reads all of the last, so its weights stay whole
        assert plan.account["parameter_bytes"] < 0.8 * plan.account["parameter_bytes_whole"]


def reductions(one: Specimen, axes: dict[str, int]) -> Counter[tuple[str, str]]:
    """Collectives over tp by kind and phase, gradients apart."""
    program = program_of(one, laminar.plans.tensor_parallel(one.graph, Mesh(axes)))
    return Counter((i.kind, i.phase) for i in loose(program) if program.axis_names(i) == "tp")


PER_LAYER = {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("size", [{}, {"d": 64, "vocab": 96, "tokens": 32, "batch": 2}], ids=["tiny", "narrow"])
def test_a_gpt_layer_costs_four_all_reduces(size: dict[str, int], axes: dict[str, int]) -> None:
    """Two forward and two backward, as Megatron has it, though q, k and v are one packed weight."""
    fewer, more = (reductions(gpt(layers=n, **size), axes) for n in (2, 3))
    assert more - fewer == PER_LAYER
    assert fewer - more == {}


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_llama_layer_costs_four_all_reduces(axes: dict[str, int]) -> None:
    """With grouped queries, rotary tables and a gated MLP."""
    fewer, more = (reductions(llama(n), axes) for n in (2, 3))
    assert more - fewer == PER_LAYER
    assert fewer - more == {}


def test_packed_weights_are_split_by_blocks() -> None:
    """Each rank holds some heads of q, of k and of v."""
    one = specimen("gpt.py:tiny")
    plan = laminar.plans.tensor_parallel(one.graph, Mesh({"tp": 2}))
    assert plan.inputs["blocks.0.attention.qkv.weight"] == (S(0, blocks=3),)
    assert plan.inputs["blocks.0.attention.out.weight"] == (S(1),)
    assert plan.inputs["blocks.0.mlp.up.weight"] == (S(0),)
    assert plan.inputs["blocks.0.mlp.down.weight"] == (S(1),)


# --- from seeds --------------------------------------------------------------------------------

WEIGHTS = {
    r"blocks\.\d+\.attention\.qkv\.(weight|bias)": {"tp": S(0, blocks=3)},
    r"blocks\.\d+\.attention\.out\.weight": {"tp": S(1)},
    r"blocks\.\d+\.mlp\.up\.(weight|bias)": {"tp": S(0)},
    r"blocks\.\d+\.mlp\.down\.weight": {"tp": S(1)},
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallelism_follows_from_seeds(ranks: int) -> None:
    """Weights and tokens split on one axis: each all-reduce becomes a gather and a scatter, and norms see a part."""
    counts = []
    for layers in (2, 3):
        one = gpt(layers=layers)
        plan = laminar.plans.seeded(one.graph, Mesh({"tp": ranks}), {**WEIGHTS, "batch.*": {"tp": S(1)}})
        counts.append(Counter((i.kind, i.phase) for i in loose(program_of(one, plan))))
        norms = [n.name for n in one.graph.nodes if n.op == "aten.native_layer_norm"]
        assert all(plan.ops[n].ins[0] == (S(1),) for n in norms)
    assert counts[1] - counts[0] == {
        (kind, phase): 2 for kind in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")
    }


def test_heads_are_exchanged_for_tokens_around_attention() -> None:
    """Tokens split, weights whole: where sequences are long, two exchanges each way replace gathering k and v."""
    one = gpt(layers=1, d=256, tokens=1024, batch=1, vocab=16)
    plan = laminar.plans.seeded(one.graph, Mesh({"sp": 4}), {"batch.*": {"sp": S(1)}, "blocks.*": {"sp": B}})
    program = program_of(one, plan)
    assert Counter((i.kind, i.phase) for i in loose(program)) == {
        ("all_to_all", "forward"): 2,
        ("all_to_all", "backward"): 2,
        ("all_reduce", "forward"): 1,
    }
    (attention,) = [i for i in program.instrs if i.op == "laminar.attention"]
    assert {p.nd for p in attention.ins} == {(S(1),)}
    assert all(p.local(program.mesh).shape == (1, 1, 1024, 64) for p in attention.ins)


def holds_all_logits(program: Program, vocab: int, rows: int) -> list[str]:
    """Values of which one rank has every logit."""
    out = []
    for instr in program.instrs:
        for placed in instr.outs:
            if placed is not None and placed.spec.shape[-1:] == (vocab,) and placed.spec.numel == rows * vocab:
                out += [instr.name] * (placed.local(program.mesh).numel == rows * vocab)
    return out


@pytest.mark.parametrize(("vocab", "ranks"), [(61, 2), (61, 4), (8191, 4), (8192, 2)])
def test_a_split_head_leaves_no_rank_with_all_logits(vocab: int, ranks: int) -> None:
    """For a large vocabulary they are the largest tensor there is."""
    one = gpt(layers=1, vocab=vocab, tokens=64, batch=4)
    plan = laminar.plans.seeded(one.graph, Mesh({"tp": ranks}), {"head.weight": {"tp": S(0)}, "batch.*": {"tp": B}})
    program = program_of(one, plan)
    assert holds_all_logits(program, vocab, rows=256) == []
    if vocab > 1000:  # where moving logits would cost more than three small reductions
        assert {i.op for i in program.instrs} >= {"laminar.nll_at", "laminar.nll_backward_at"}
        assert all(i.bytes < 256 * vocab for i in loose(program))


def test_logits_are_found_where_they_are() -> None:
    """The check above does see them in a plan that has them."""
    one = gpt(layers=1, vocab=61, tokens=64, batch=4)
    plan = laminar.plans.seeded(one.graph, Mesh({"tp": 2}), {".*": {"tp": B}})
    assert holds_all_logits(laminar.lower(one.graph, plan), 61, rows=256)


# --- what does not divide ----------------------------------------------------------------------

WORDS, CLASSES = {"(head|embed).weight": {"tp": S(0)}}, {"head.(weight|bias)": {"tp": S(0)}}
TOKENS = {"position": {"tp": S(1)}, "%add_0": {"tp": S(1)}}
TIED = {"transformer.wte.weight": {"tp": S(0)}}
UNEVEN: dict[str, tuple[str, int, dict[str, Any], str, list[int]]] = {
    "61 words on 4 ranks": ("gpt.py:tiny", 4, WORDS, "embed.weight", [16, 16, 16, 13]),
    "61 words on 4 ranks, tied": ("hf.py:gpt2", 4, TIED, "transformer.wte.weight", [16, 16, 16, 13]),
    "17 tokens on 2 ranks": ("vit.py:tiny", 2, TOKENS, "position", [9, 8]),
    "17 tokens on 4 ranks": ("vit.py:tiny", 4, TOKENS, "position", [5, 5, 5, 2]),
    "10 classes on 4 ranks": ("vit.py:tiny", 4, CLASSES, "head.weight", [3, 3, 3, 1]),
    "10 classes on 3 ranks": ("vit.py:tiny", 3, CLASSES, "head.weight", [4, 4, 2]),
}


@pytest.mark.parametrize("what", UNEVEN)
def test_what_does_not_divide_is_split_all_the_same(what: str) -> None:
    """Real vocabularies, class counts and token counts are seldom a multiple of anything."""
    name, ranks, seeds, stored, sizes = UNEVEN[what]
    one = specimen(name)
    program = program_of(one, laminar.plans.seeded(one.graph, Mesh({"tp": ranks}), seeds))
    (placed,) = [i.placed for i in program.inputs if i.name == stored]
    (dim,) = [p.dim for p in placed.nd if isinstance(p, Split)]
    assert [placed.local(program.mesh, r).shape[dim] for r in range(ranks)] == sizes


@pytest.mark.parametrize("name", ["gpt.py:tiny", "vit.py:tiny", "resnet.py:tiny", "lstm.py:tiny"])
def test_three_ranks_serve_as_well_as_two(name: str) -> None:
    """Nothing in the zoo divides by three."""
    one = specimen(name)
    verified(one, laminar.plans.data_parallel(one.graph, Mesh({"dp": 3})))
    verified(one, laminar.plans.zero(one.graph, Mesh({"dp": 3})))


# --- what is asked for is done, or refused -----------------------------------------------------


def test_seeds_hold() -> None:
    """A seeded tensor is stored as asked, and its gradient comes back the same way."""
    one = specimen("gpt.py:tiny")
    plan = laminar.plans.seeded(one.graph, Mesh({"dp": 2, "tp": 2}), {**WEIGHTS, "batch.*": {"dp": S(0)}})
    assert plan.inputs["blocks.1.mlp.up.weight"] == (B, S(0))
    assert plan.outputs["grad:blocks.1.mlp.up.weight"] == (B, S(0))
    assert plan.inputs["batch.ids"] == (S(0), plan.inputs["batch.ids"][1])
    verified(one, plan)


def test_a_seed_that_matches_nothing_is_refused() -> None:
    """A misspelt name would otherwise be a plan without it."""
    with pytest.raises(PlanError, match="matches no parameter"):
        laminar.plans.seeded(specimen("gpt.py:tiny").graph, Mesh({"tp": 2}), {"blocks.9.up": {"tp": S(0)}})


def test_what_no_op_can_make_is_refused() -> None:
    """An error that names the op, its line and what is allowed, not a plan that quietly does something else."""
    graph = specimen("lstm.py:tiny").graph
    lstm = next(n for n in graph.nodes if n.op == "laminar.lstm")
    with pytest.raises(NoRuleError, match="axis tp=2") as caught:
        laminar.plans.seeded(graph, Mesh({"tp": 2}), {f"%{lstm.name}": {"tp": S(2)}})
    assert f"%{lstm.name}" in str(caught.value) and "lstm.py" in str(caught.value) and "allowed" in str(caught.value)


def test_a_plan_says_what_it_does() -> None:
    """Placements, collectives with their reasons, and bytes."""
    one = specimen("gpt.py:tiny")
    text = laminar.plans.tensor_parallel(one.graph, Mesh({"tp": 2})).explain()
    for word in ("tensor_parallel", "S(0, blocks=3)", "all_reduce", "over tp", "P(sum) to B", "parameters per rank"):
        assert word in text


def test_the_same_question_gets_the_same_plan() -> None:
    """Ties are broken the same way every time, in every process: hashes can be compared across machines."""
    one = specimen("gpt.py:tiny")
    plans = [laminar.plans.tensor_parallel(one.graph, Mesh({"dp": 2, "tp": 2})) for _ in range(2)]
    assert plans[0].hash == plans[1].hash
    assert laminar.lower(one.graph, plans[0]).hash == laminar.lower(one.graph, plans[1]).hash


def test_zero_under_autocast_keeps_no_whole_weight_between_forward_and_backward() -> None:
    """A cast of a gathered parameter is as large as the parameter: backward gathers and casts again."""
    made = recipe("gpt.py:tiny")
    model, batch = made.model(), next(iter(made.data()))

    def loss(m: Any, b: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return made.loss(m, b)

    graph = laminar.capture(model, loss, batch)
    plan = laminar.plans.zero(graph, Mesh({"dp": 2}), 3)
    program = laminar.lower(graph, plan)
    from_params = {i.name for i in program.inputs if i.kind == "param"}
    early = set()
    for instr in program.instrs:
        if instr.refs and all(r.name in from_params for r in instr.refs):
            from_params.add(instr.name)
            early |= {instr.name} if instr.phase == "forward" else set()
    assert any(i.op == "aten._to_copy" and i.name in early for i in program.instrs)
    assert not [i for i in program.instrs if i.phase == "backward" and any(r.name in early for r in i.refs)]
    assert laminar.verify(model, loss, [batch], plan, graph=graph).ok
    tensor = laminar.lower(graph, laminar.plans.tensor_parallel(graph, Mesh({"tp": 2})))
    assert not [i for i in tensor.instrs if i.name.endswith("_again")], "pieces that are read as they lie may stay"

"""A batch split by token: every rank has a stretch of each sequence, and its rows of causal attention.

Keys and values are whole where attention reads them; a stretch of the queries knows where it begins. Covered:
batches of one sequence, which data parallel can't split; lengths that don't divide; grouped queries and rotary
positions; masks and dropout, half precision, two axes, real ranks. Not covered: keys in shards (a ring of them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar import Mesh, S
from laminar.capture.ops import kernels
from laminar.cost.ops.families import traits_of
from laminar.cost.ops.table import key_of, local_call, numbered
from laminar.errors import MeshError, PlanError
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Program
from laminar.ir.sbp import local_indices
from laminar.placement import presets
from laminar.profile.time_op import runs_of
from laminar.rules.notation import call_of, localise
from laminar.rules.signing import options
from laminar.runtime.check.verify import verify_program
from tests.support.example_recipes import load
from tests.support.zoo import captured, one_thread, specimen

ATTENTION = ("laminar.attention", "laminar.attention_backward")


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    with one_thread():
        yield


def gpt(tokens: int, batch: int, dtype: torch.dtype = torch.float32) -> laminar.Recipe:
    """Of two layers and four heads."""
    made = load("gpt.py")
    config = made.Config(layers=2, d=32, heads=4, vocab=61, tokens=tokens, batch=batch)
    found: laminar.Recipe = made.recipe(config, lr=1e-3, steps=1, dtype=dtype)
    return found


def llama(tokens: int, batch: int) -> laminar.Recipe:
    """The one of the examples, with twice as many query heads as key heads, on sequences of a length."""
    made = load("llama.py")
    found: laminar.Recipe = made.tiny()
    return laminar.Recipe(
        model=lambda: made.Llama(layers=2, d=32, heads=4, kv_heads=2, hidden=84, vocab=64, tokens=tokens),
        loss=made.loss,
        data=lambda: made.counting(batch=batch, tokens=tokens, vocab=64),
        optimizer=found.optimizer,
    )


class Attends(nn.Module):
    """One layer of attention, told by which means it should look back only."""

    def __init__(self, how: str, tokens: int, drop: float = 0.0) -> None:
        super().__init__()
        self.how, self.drop = how, drop
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("mask", torch.ones(tokens, tokens, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        triangle = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = {"causal": None, "triangle": triangle, "window": triangle.triu(-3), "buffer": self.mask}[self.how]
        drop = self.drop if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=drop)
        return self.out(y.transpose(1, 2).flatten(2))


def attends(how: str, tokens: int, drop: float = 0.0) -> laminar.Recipe:
    """A step of it on two sequences."""

    def model() -> Attends:
        torch.manual_seed(0)
        return Attends(how, tokens, drop)

    def data() -> Iterator[Tensor]:
        torch.manual_seed(1)
        while True:
            yield torch.randn(2, tokens, 16)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * x.cos()).pow(2).sum()

    return laminar.Recipe(model=model, loss=loss, data=data, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def by_token(graph: Graph, ranks: int, stretches: int | None = None) -> Plan:
    """The batch split by token, attention by row."""
    return laminar.plans.context_parallel(graph, Mesh({"cp": ranks}), stretches=stretches)


def rows_split(graph: Graph, plan: Plan, stretches: int = 1) -> int:
    """How many calls of attention there are, each of them on stretches of the queries."""
    calls = [n for n in graph.nodes if n.op in ATTENTION]
    assert all(plan.ops[n.name].ins[n.op == ATTENTION[1]] == (S(2, blocks=stretches),) for n in calls)
    return len(calls)


@pytest.mark.parametrize(("tokens", "batch"), [(16, 1), (15, 1), (17, 1), (16, 3)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gpt_split_by_token_equals_one_device(tokens: int, batch: int, ranks: int) -> None:
    """Loss and gradients within 1e-9 in float64; no rank computes the rows of another."""
    one = captured(gpt(tokens, batch))
    plan = by_token(one.graph, ranks)
    assert rows_split(one.graph, plan) == 4
    report = verify_program(one.graph, plan, [one.inputs])
    assert report.ok, str(report)
    assert report.checked == len(one.graph.outputs)


@pytest.mark.parametrize(("tokens", "batch", "ranks", "stretches"), [(16, 1, 2, 2), (16, 3, 2, 4), (16, 2, 4, 2)])
def test_several_stretches_for_each_rank(tokens: int, batch: int, ranks: int, stretches: int) -> None:
    """Early and late rows on every rank: each stretch knows where it begins, as do positions and losses."""
    for make in (gpt, llama):
        one = captured(make(tokens, batch))
        plan = by_token(one.graph, ranks, stretches)
        assert rows_split(one.graph, plan, stretches) == 4
        report = verify_program(one.graph, plan, [one.inputs])
        assert report.ok, str(report)


@pytest.mark.parametrize(("tokens", "ranks", "stretches"), [(128, 2, 1), (256, 2, 2), (1024, 2, 8), (4096, 4, 8)])
def test_as_many_stretches_as_are_worth_it(tokens: int, ranks: int, stretches: int) -> None:
    """None of less than 64 tokens, and no more than eight."""
    made = load("gpt.py")
    with torch.device("meta"):
        model = made.GPT(made.Config(layers=1, d=32, heads=4, vocab=61, tokens=tokens, batch=1))
        batch = {name: torch.zeros(1, tokens, dtype=torch.int64) for name in ("ids", "target")}
    plan = by_token(laminar.capture(model, made.loss, batch), ranks)
    assert plan.inputs["batch.ids"] == (S(1, blocks=stretches),)


@pytest.mark.parametrize(("tokens", "batch", "ranks"), [(12, 2, 2), (13, 1, 2), (11, 1, 4)])
def test_grouped_queries_and_rotary_positions_split_by_token(tokens: int, batch: int, ranks: int) -> None:
    """Rotary tables are cut where the queries are; key heads serve the queries of all stretches."""
    one = captured(llama(tokens, batch))
    plan = by_token(one.graph, ranks)
    assert rows_split(one.graph, plan) == 4
    report = verify_program(one.graph, plan, [one.inputs])
    assert report.ok, str(report)


@pytest.mark.parametrize("how", ["causal", "triangle", "window", "buffer"])
@pytest.mark.parametrize("drop", [0.0, 0.25])
def test_whatever_says_that_a_row_looks_back_only(how: str, drop: float) -> None:
    """A flag, a mask that is known to mean the same, others; with dropout all of them as plain arithmetic."""
    one = captured(attends(how, 9, drop))
    plan = by_token(one.graph, 2)
    used = {i.op for i in laminar.lower(one.graph, plan).instrs if i.op.startswith("laminar.attention")}
    stretches = {f"{op}_at" for op in ATTENTION}
    assert used == (set() if drop else stretches if how in ("causal", "triangle") else set(ATTENTION))
    report = verify_program(one.graph, plan, [one.inputs])
    assert report.ok, str(report)


def test_half_precision_within_its_rounding() -> None:
    """The parts of a stretch are merged in single precision and rounded once."""
    one = captured(gpt(18, 1, torch.bfloat16))
    plan = by_token(one.graph, 2)
    assert rows_split(one.graph, plan) == 4
    report = verify_program(one.graph, plan, [one.inputs], dtype="f32", tolerance=2e-2)
    assert report.ok, str(report)


@pytest.mark.parametrize("outer", ["dp", "cp"])
def test_beside_another_axis(outer: str) -> None:
    """Samples on the outer axis, or on the inner one."""
    one = captured(gpt(16, 4))
    plan = laminar.plans.context_parallel(one.graph, Mesh({outer: 2, "dp" if outer == "cp" else "cp": 2}))
    cut = {"dp": (S(0), S(2)), "cp": (S(2), S(0))}[outer]
    assert all(plan.ops[n.name].ins[0] == cut for n in one.graph.nodes if n.op in ATTENTION)
    report = verify_program(one.graph, plan, [one.inputs])
    assert report.ok, str(report)


def test_a_sequence_cut_twice() -> None:
    """Stretches of stretches know where they begin in the whole."""
    one = captured(gpt(18, 1))
    plan = laminar.plans.placed(one.graph, Mesh({"a": 2, "b": 2}), {"batch.*": {"a": S(1), "b": S(1)}})
    assert all(plan.ops[n.name].ins[0] == (S(2), S(2)) for n in one.graph.nodes if n.op in ATTENTION)
    report = verify_program(one.graph, plan, [one.inputs])
    assert report.ok, str(report)


def test_what_cannot_be_split_by_token() -> None:
    """Sequences shorter than there are ranks, batches without any, a mesh that doesn't say which axis."""
    graph = captured(gpt(3, 1)).graph
    with pytest.raises(PlanError, match="3 tokens"):
        by_token(graph, 4)
    with pytest.raises(PlanError, match="2 equal stretches"):
        by_token(captured(gpt(18, 1)).graph, 2, 2)
    with pytest.raises(MeshError, match="context parallel"):
        laminar.plans.context_parallel(graph, Mesh({"dp": 2}))
    flat = laminar.capture(nn.Linear(4, 1), lambda m, x: m(x).sum(), torch.randn(4))
    with pytest.raises(PlanError, match="sequences"):
        by_token(flat, 2)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("make", "tokens", "ranks", "stretches"),
    [(gpt, 16, 2, 1), (gpt, 18, 4, 1), (llama, 13, 2, 1), (gpt, 16, 4, 2), (llama, 16, 2, 4)],
    ids=["gpt on 2", "gpt on 4", "llama on 2", "gpt on 4, by halves", "llama on 2, by quarters"],
)
def test_on_real_ranks(make: Callable[[int, int], laminar.Recipe], tokens: int, ranks: int, stretches: int) -> None:
    """One sequence on several processes: generated code, and Gloo between them."""
    one = captured(make(tokens, 1))
    report = verify_program(one.graph, by_token(one.graph, ranks, stretches), [one.inputs], ranks="processes")
    assert report.ok, str(report)


def test_another_length_is_split_alike() -> None:
    """Of a plan for one batch follows one for another, which cuts its sequences too."""
    plan = by_token(captured(gpt(16, 1)).graph, 2)
    other = captured(gpt(12, 1)).graph
    assert rows_split(other, presets.like(other, plan)) == 4
    plan = by_token(captured(gpt(16, 1)).graph, 2, 2)
    assert rows_split(other, presets.like(other, plan), 2) == 4
    odd = captured(gpt(13, 1)).graph
    assert rows_split(odd, presets.like(odd, plan)) == 4


# --- what a stretch costs ------------------------------------------------------------------------


def attention_calls(program: Program, rank: int) -> list[float]:
    """The work of each call of attention, as the simulator has it."""
    lines = [i for i in program.instrs if i.op.startswith("laminar.attention")]
    return [traits_of(local_call(i, program.mesh, rank)).flops for i in lines]


@pytest.mark.parametrize(("ranks", "stretches"), [(2, 1), (4, 1), (2, 2), (2, 4), (4, 2)])
def test_the_last_stretch_is_priced(ranks: int, stretches: int) -> None:
    """It sees all the keys before it and half of its own: a step waits for it, so every rank counts as much."""
    one = specimen("gpt.py:tiny")
    whole = laminar.lower(one.graph, laminar.plans.data_parallel(one.graph, Mesh({"cp": 1})))
    split = laminar.lower(one.graph, by_token(one.graph, ranks, stretches))
    share = (1 + (1 - 1 / ranks) / stretches) / ranks
    for rank in (0, ranks - 1):
        assert attention_calls(split, rank) == pytest.approx([share * w for w in attention_calls(whole, 0)])


@pytest.mark.parametrize("stretches", [1, 2, 4])
def test_what_is_priced_is_what_the_last_rank_does(stretches: int) -> None:
    """The share of keys that its rows see, counted."""
    tokens, ranks = 16, 2
    rows = local_indices((1, tokens), (S(1, blocks=stretches),), (ranks,), (ranks - 1,))[1]
    seen = sum(r + 0.5 for r in rows) / (tokens * tokens / 2)
    assert seen == pytest.approx((1 + (1 - 1 / ranks) / stretches) / ranks)


@pytest.mark.parametrize("stretches", [1, 2])
def test_a_search_prices_it_as_a_program_does(stretches: int) -> None:
    """What a signature costs before there is a program is what its line costs afterwards, or bounds would not hold."""
    one = specimen("gpt.py:tiny")
    program = laminar.lower(one.graph, by_token(one.graph, 2, stretches))
    lines = [i for i in program.instrs if i.op.endswith("_at") and "attention" in i.op]
    assert len(lines) == 4
    for line in lines:
        call = call_of(one.graph.by_name[line.name], one.graph.specs)
        rows = tuple(nd for (nd,) in (p.nd for p in line.ins))
        (chosen,) = [s for s in options(call, 2, ((16, (2,)),)) if s.ins == rows]
        assert chosen.how == line.op
        local = localise(call, chosen, 2)
        assert traits_of(local).flops == traits_of(local_call(line, program.mesh, 0)).flops
        assert key_of(numbered(local)) == key_of(local_call(line, program.mesh, 1))


def test_what_is_measured_is_the_last_stretch() -> None:
    """A key of a profile names fewer queries than keys; the op that is timed works on those that see most."""
    key = "laminar.attention(f32[1,2,8,4],f32[1,2,32,4],f32[1,2,32,4],-,{},~)->f32[1,2,8,4],f32[1,2,8]"
    for causal, where in (("T", 24), ("2", [(12, 4), (28, 4)])):
        (run,) = runs_of(key.format(causal), torch.device("cpu"), 1)
        assert run.args[-1] == where and run.func is kernels.attention_at
        out, lse = run()
        assert out.shape == (1, 2, 8, 4) and lse.shape == (1, 2, 8)

"""The code that ranks run, seen in one process: what the interpreter can't see is seen here.

Generated code reduces in place, writes gradients where they are reduced, lays gathered tensors into memory that it uses
again, and starts what ends later. So mistakes are planted exactly there, and each must be called DIFFERENT though the
program is right; and what is right must be equal in every way of exchanging.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar import Mesh
from laminar.api import inputs_of
from laminar.errors import RankError
from laminar.ir.program import Instr, Program
from laminar.placement.random_plan import random_plan
from laminar.runtime.check.in_process import loopback
from laminar.runtime.check.in_process.rank_threads import Turns
from laminar.runtime.check.one_device import constants_of, run_graph
from laminar.runtime.check.processes import _run
from laminar.runtime.check.verify import verify_program
from laminar.runtime.code import eager_step
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm import aliases, p2p_collectives
from tests.support.capture_check import square
from tests.support.rank_pool import Ranks
from tests.support.zoo import Specimen, equal, specimen, wide

CELLS = ("GRU", "GRUCell", "LSTM", "LSTMCell", "RNN", "RNNCell")


class Steps(nn.Module):
    """A recurrent layer, or a cell stepped by hand: many readers of one gathered value, most of them views."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = getattr(nn, kind)(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, nn.RNNBase):
            return self.inner(x)[0]
        h: Any = None
        for row in x:
            h = self.inner(row, h)
        return h[0] if isinstance(h, tuple) else h


class Views(nn.Module):
    """Gathered values that are read through every kind of view, long after they were gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.table = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        parts = torch.unsafe_split(h, 8, -1)
        folded = h.unfold(1, 4, 4).sum(-1)
        square = torch.diagonal(h.view(-1, 4, 4), 0, 1, 2).sum(-1, keepdim=True)
        turned = torch.view_as_real(torch.view_as_complex(h.view(-1, 8, 2)) * 1.5).flatten(1)
        y = self.down((h + turned).relu()) + parts[1] * parts[0].tanh() + square
        z = torch.einsum("bi,hij->bhj", y, self.table).squeeze().movedim(1, 0)
        return z.sum(0) + self.down(h) * folded.mean(-1, keepdim=True)


def case(model: nn.Module, batch: Tensor) -> tuple[Any, dict[str, Tensor]]:
    graph = laminar.capture(model, square, batch)
    return graph, inputs_of(graph, model, batch)


@pytest.fixture(scope="module")
def gru() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    return case(Steps("GRU"), torch.randn(3, 4, 8))


@pytest.mark.parametrize("kind", CELLS)
def test_recurrent_layers_in_pieces_train_as_on_one_device(kind: str) -> None:
    """Their backward reads gates that were gathered and cut into views; GRU's came out wrong on real ranks."""
    torch.manual_seed(0)
    graph, inputs = case(Steps(kind), torch.randn(3, 4, 8))
    for plan in (
        laminar.plans.tensor_parallel(graph, Mesh({"tp": 2})),
        laminar.plans.zero(graph, Mesh({"dp": 2})),
        laminar.plans.tensor_parallel(graph, Mesh({"tp": 3})),
    ):
        report = verify_program(graph, plan, [inputs, inputs])
        assert report.ok, f"{plan}: {report}"


def test_views_of_gathered_values_are_read_before_they_are_overwritten() -> None:
    """Every op that looks at memory in another way, behind gathers whose memory is used again."""
    torch.manual_seed(0)
    graph, inputs = case(Views(), torch.randn(6, 8))
    for plan in (
        laminar.plans.tensor_parallel(graph, Mesh({"tp": 2})),
        laminar.plans.tensor_parallel(graph, Mesh({"tp": 4})),
        laminar.plans.zero(graph, Mesh({"dp": 2})),
    ):
        assert verify_program(graph, plan, [inputs]).ok


def on_a_rank(program: Program, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What one of several real ranks makes."""
    return _run(program, inputs, {}, "cpu")


def test_loopback_is_what_real_ranks_do(two: Ranks, gru: Any) -> None:
    """The same code on two processes gives the same bits."""
    graph, inputs = gru
    program = laminar.lower(graph, laminar.plans.tensor_parallel(graph, Mesh({"tp": 2})))
    here = loopback.run_loopback(program, inputs)
    there = two.run(on_a_rank, program, {k: v.detach() for k, v in inputs.items()})
    for mine, real in zip(here, there, strict=True):
        assert all(torch.equal(mine[k], real[k]) for k in real)


@pytest.mark.parametrize("way", loopback.TRANSPORTS)
@pytest.mark.parametrize("name", ["gpt.py:tiny", "moe.py:tiny", "resnet.py:tiny"])
def test_every_way_of_exchanging_gives_the_numbers_of_one_device(name: str, way: str) -> None:
    """Shared memory, sends and receives, collectives of a process group: one program, and the same answer."""
    one = specimen(name, "f64")
    graph = specimen(name).graph
    for plan in (
        laminar.plans.zero(graph, Mesh({"dp": 4})),
        laminar.plans.tensor_parallel(graph, Mesh({"dp": 2, "tp": 2})),
    ):
        assert equal(one, plan, way)


@pytest.mark.parametrize("way", loopback.TRANSPORTS)
def test_pieces_of_different_sizes_are_exchanged_in_every_way(way: str) -> None:
    """Three ranks share eight rows: a reduce-scatter of a process group takes pieces of one size only."""
    torch.manual_seed(0)
    graph, inputs = case(Views(), torch.randn(8, 8))
    constants = constants_of(graph)
    one = Specimen("views", graph, inputs, constants, run_graph(graph, inputs, constants), "f32")
    scattered = 0
    for seed in range(6):
        plan = random_plan(graph, Mesh({"a": 3}), seed)
        scattered += sum(i.kind == "reduce_scatter" for i in laminar.lower(graph, plan).collectives)
        assert equal(wide(one), plan, way)
    assert scattered


def test_lines_that_are_called_are_the_lines_that_are_written() -> None:
    """Verification of many plans leaves out the text of the code: the numbers are the same bits."""
    one = specimen("gpt.py:tiny")
    program = laminar.lower(one.graph, random_plan(one.graph, Mesh({"a": 2, "b": 2}), 1))
    for a, b in zip(
        *(loopback.run_loopback(program, one.inputs, one.constants, text=t) for t in (True, False)), strict=True
    ):
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_the_order_of_ranks_does_not_matter() -> None:
    """Whoever comes first, the sums are made in order of ranks."""
    one = specimen("moe.py:tiny")
    program = laminar.lower(one.graph, laminar.plans.zero(one.graph, Mesh({"dp": 4})))
    first = loopback.run_loopback(program, one.inputs, one.constants, seed=1)
    for seed in (2, 3):
        again = loopback.run_loopback(program, one.inputs, one.constants, seed=seed)
        assert all(torch.equal(a[k], b[k]) for a, b in zip(first, again, strict=True) for k in a)


# --- mistakes that only the code makes


def judged(one: Specimen | tuple[Any, Any], plan: Any) -> Any:
    graph, inputs = (one.graph, one.inputs) if isinstance(one, Specimen) else one
    return verify_program(graph, plan, [inputs])


def test_a_view_nobody_knows_of_is_seen(gru: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that GRU met: memory used again under a view. The report says that it is the code, and which line."""
    asked = aliases.shares
    monkeypatch.setattr(aliases, "shares", lambda op: asked(op) and not op.startswith("aten.unsafe_split"))
    report = judged(gru, laminar.plans.tensor_parallel(gru[0], Mesh({"tp": 2})))
    assert not report.ok
    assert report.first_difference.startswith("the program is right, its code is not: %")


def test_memory_that_is_given_up_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where nothing has been written there yet."""
    lives = p2p_collectives.lives
    monkeypatch.setattr(p2p_collectives, "lives", lambda p: {k: (a, max(a, b - 1)) for k, (a, b) in lives(p).items()})
    one = specimen("gpt.py:tiny")
    assert not judged(one, laminar.plans.zero(one.graph, Mesh({"dp": 2}))).ok


def test_reducing_in_place_what_somebody_reads_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A term of a sum that another line reads as well must not become the sum."""
    one = specimen("gpt.py:tiny")
    plan = random_plan(one.graph, Mesh({"a": 2}), 0)
    assert judged(one, plan).ok
    monkeypatch.setattr(eager_step._Build, "_donated", lambda self, ref: ref.name in self.makers)
    assert not judged(one, plan).ok


def test_a_result_read_before_it_is_awaited_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives end later than they begin."""
    monkeypatch.setattr(loopback._Met, "wait", lambda self: None)
    one = specimen("gpt.py:tiny", "f64")
    plan = laminar.plans.zero(specimen("gpt.py:tiny").graph, Mesh({"dp": 2}))
    assert not equal(one, plan, "groups")


def test_a_buffer_that_is_sent_stays_until_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that writes where a message still lies sends something else."""
    post = loopback.Loop.send

    def hasty(self: Any, x: Tensor, peer: int, tag: int) -> Any:
        work = post(self, x, peer, tag)
        x.zero_()
        return work

    one = specimen("gpt.py:tiny", "f64")
    plan = laminar.plans.zero(specimen("gpt.py:tiny").graph, Mesh({"dp": 2}))
    assert equal(one, plan, "sends")
    monkeypatch.setattr(loopback.Loop, "send", hasty)
    assert not equal(one, plan, "sends")


def test_a_gradient_added_to_what_lay_there_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers hold the last step's gradients when a step begins."""
    monkeypatch.setitem(eager_step.OUT_VARIANTS, "aten.mm", lambda a, b, *, out: out.addmm_(a, b))
    one = specimen("gpt.py:tiny")
    assert not judged(one, laminar.plans.data_parallel(one.graph, Mesh({"dp": 2}))).ok


# --- turns


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """No test hangs because ranks do."""
    turns = Turns()

    def never() -> None:
        turns.wait(lambda: False, "what never comes")

    with pytest.raises(RankError, match="wait for each other") as caught:
        turns.run([never, lambda: None, never])
    assert "rank 0: what never comes" in str(caught.value) and "rank 2" in str(caught.value)


def test_an_error_of_a_rank_is_the_error() -> None:
    """Not that of those who wait for it."""
    turns = Turns()
    reached: list[int] = []

    def wrong() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        turns.run([lambda: turns.wait(lambda: bool(reached), "a sign"), wrong])


def test_ranks_that_meet_in_different_collectives_are_named() -> None:
    """On real ranks that gives a hang, or wrong sums."""
    hub = loopback.Hub(Mesh({"a": 2}), Turns(), "groups")
    groups = [loopback.Loop(hub, (0, 1), r) for r in range(2)]
    x = torch.ones(2)
    with pytest.raises(RankError, match="where others are in"):
        hub.turns.run(
            [
                lambda: groups[0].all_reduce(x.clone(), "sum").wait(),
                lambda: groups[1].gather_into(torch.empty(4), x).wait(),
            ]
        )


def test_a_watched_step_shows_every_line(gru: Any) -> None:
    """Whoever looks for a difference sees what each rank made of each line."""
    graph, inputs = gru
    program = laminar.lower(graph, laminar.plans.tensor_parallel(graph, Mesh({"tp": 2})))
    seen: set[tuple[int, str]] = set()

    def watch(rank: int, instr: Instr, value: Any) -> None:
        seen.add((rank, instr.name))

    ranks = loopback.Ranks(program, watch=watch)
    assert all(isinstance(step, EagerStep) for step in ranks.steps)
    ranks.run(inputs)
    assert {name for _, name in seen} >= {i.name for i in program.instrs if not i.kind}
    assert {r for r, _ in seen} == {0, 1}

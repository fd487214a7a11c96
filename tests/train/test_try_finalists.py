"""Finalists of a search tried out on real ranks: the fastest is taken by all, and nobody can tell that it happened.

Functions whose names begin with an underscore are what a rank does. What a plan takes, or how it fails, is put in the
place of what would be measured, but in two tests, which say so.
"""

from __future__ import annotations

import copy
import functools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar import events
from laminar.capture.capture import capture
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.plans.account import Account
from laminar.ir.plans.plan import Plan
from laminar.placement import presets
from laminar.placement.random_plan import random_plan
from laminar.planner.search.finalists import Finalist
from laminar.runtime.check.probe_rules import probe
from laminar.train.auto import interleaved_timing, plan_search, try_finalists
from laminar.train.options import JobOptions
from laminar.train.world import World
from tests.support.rank_pool import Ranks
from tests.support.small_job import adamw, batches, mean, net
from tests.support.tryout_cases import _bits

MESH = laminar.Mesh({"dp": 2})
Slow = dict[str, float]
"""Seconds of a step by the hash of a plan."""


class Noisy(nn.Module):
    """Draws, statistics, a tied weight, an attribute that forward makes, and a hook that knows the original."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.head = nn.Linear(16, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids)).flatten(0, 1)
        if self.training:
            self.seen += ids.shape[0]
        return self.head(self.up(self.norm(x)))


def noisy_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["target"].flatten())


@functools.cache
def found(kind: str = "net") -> tuple[Plan, list[Finalist]]:
    """What a search predicts to be fastest on two CPU ranks, and three plans of which none is predicted much slower."""
    torch.manual_seed(0)
    model, loss = (net(), mean) if kind == "net" else (Noisy(), noisy_loss)
    graph = probe(capture(model, loss, batches(1)[0], wide=True))
    plan = laminar.plan(graph, "2xcpu", budget_s=0.2, only="data,tensor,zero")
    assert isinstance(plan, Plan)
    others = {"zero 3": presets.zero(graph, MESH, 3), "data": presets.data_parallel(graph, MESH)}
    named = {"best": plan, **{name: p for name, p in others.items() if p.hash != plan.hash}}
    finals = [Finalist(n, p, (plan.step_s or 0) * (1 + k / 20), 1 << 20) for k, (n, p) in enumerate(named.items())]
    return plan, finals


@contextmanager
def listening() -> Iterator[list[dict[str, Any]]]:
    """The fields of events `measured`."""
    heard: list[dict[str, Any]] = []
    with events.listening(lambda e: heard.append(e.fields) if e.kind == "measured" else None):
        yield heard


@contextmanager
def taking(seconds: Slow) -> Iterator[None]:
    """A turn of a plan takes so long, whatever it takes."""
    with mock.patch.object(interleaved_timing, "_took", lambda job, batches, calls: (seconds[job.plan.hash], "")):
        yield


@contextmanager
def told(name: str, value: float) -> Iterator[None]:
    """A constant is another."""
    with mock.patch.object(try_finalists, name, value):
        yield


Tried = tuple[str, dict[str, Any], list[dict[str, Any]]]


def _tried(
    finals: list[Finalist], plan: Plan, *patches: Callable[[], Any], capture_s: float = 0.0, **options: Any
) -> Tried:
    """What comes of finalists of the net: hash, account, events."""
    model, data = net(), batches(1)
    with told("FINALIST_TURN_S", 0.02), ExitStack() as around:
        for patch in patches:
            around.enter_context(patch())
        heard = around.enter_context(listening())
        taken = try_finalists.tried_finalists(
            World("cpu"),
            plan,
            finals,
            model,
            mean,
            adamw(model),
            data[0],
            capture_s=capture_s,
            options=JobOptions(**options),
        )
    return taken.hash, taken.account, heard


def of_both(two: Ranks, finals: list[Finalist], plan: Plan, *patches: Callable[[], Any], **options: Any) -> Tried:
    """The same on two ranks, which come to the same."""
    here, there = two.run(functools.partial(_tried, finals, plan, *patches, **options))
    assert here[0] == there[0] and len(here[2]) == len(there[2]) == 1
    assert {k: v for k, v in here[1].items() if k in ("measured", "unmeasured")} == {
        k: v for k, v in there[1].items() if k in ("measured", "unmeasured")
    }
    return here


# --- which plan is taken -----------------------------------------------------------------------


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_the_measured_fastest_is_taken_by_all_ranks(two: Ranks, fastest: int) -> None:
    """Whatever was predicted; the plan says so, and so does an event."""
    plan, finals = found()
    seconds = {f.plan.hash: 0.5 if k == fastest else 1.0 for k, f in enumerate(finals)}
    chosen, account, heard = of_both(two, finals, plan, functools.partial(taking, seconds))
    assert chosen == finals[fastest].plan.hash
    rows = account["measured"]["rows"]
    assert [row["taken"] for row in rows] == [k == fastest for k in range(len(finals))]
    assert [row["ratio"] for row in rows] == [s / seconds[plan.hash] for s in seconds.values()]
    assert [row["predicted_s"] for row in rows] == [f.step_s for f in finals]
    assert heard[0]["done"] and heard[0]["taken"] == finals[fastest].name and heard[0]["hash"] == chosen
    text = replace(finals[fastest].plan, account=account).explain()
    assert ("2.000 times as fast as the predicted best" in text) == (fastest > 0)


def test_within_a_hundredth_what_was_predicted_stays(two: Ranks) -> None:
    """Noise does not choose a plan."""
    plan, finals = found()
    seconds = {f.plan.hash: s for f, s in zip(finals, (1.0, 0.995, 0.991), strict=False)}
    chosen, account, _ = of_both(two, finals, plan, functools.partial(taking, seconds))
    assert chosen == plan.hash and "as good as it" in account["measured"]["says"]


def test_a_plan_that_is_really_slow_loses(two: Ranks) -> None:
    """Nothing is put in the place of what is measured: a plan drawn at random exchanges far more than data parallel."""
    plan, finals = found()
    graph = plan.origin.graph  # type: ignore[union-attr]
    drawn = min((random_plan(graph, MESH, seed) for seed in range(4)), key=lambda p: -_exchanges(graph, p))
    assert _exchanges(graph, drawn) > 5 * _exchanges(graph, finals[-1].plan)
    wrong = replace(drawn, account=plan.account, origin=plan.origin)
    sides = [Finalist("drawn", wrong, 1e-4, 1 << 20), replace(finals[-1], step_s=1.1e-4)]
    chosen, account, heard = of_both(two, sides, wrong)
    assert chosen == finals[-1].plan.hash, account["measured"]
    assert account["measured"]["rows"][1]["ratio"] < 0.99 and heard[0]["seconds"] < try_finalists.LIMIT_S


def _exchanges(graph: laminar.Graph, plan: Any) -> int:
    return sum(laminar.lower(graph, plan).counts().values())


def _front_door(
    cluster: Cluster, micro_batches: int, measure: bool
) -> tuple[str, dict[str, Any], list[dict[str, Any]], list[float]]:
    model, data = net(), batches(3)
    with listening() as heard, told("FINALIST_TURN_S", 0.02):
        job = laminar.parallelize(
            model, mean, adamw(model), batch=data[0], cluster=cluster, measure=measure, micro_batches=micro_batches
        )
    losses = [float(job.step(b).loss) for b in data]
    out = job.plan.hash, job.plan.account, heard, losses
    job.close()
    return out


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_job_tries_out_what_its_search_finds(two: Ranks, micro_batches: int) -> None:
    """From the front door, with nothing in between; switched off, there is not a word of it."""
    here, there = two.run(_front_door, Cluster.preset("2xcpu"), micro_batches, True)
    assert here[0] == there[0] and here[3] == there[3]
    (heard,) = here[2]
    rows = here[1]["measured"]["rows"]
    best = min(row["ratio"] for row in rows if row["ahead"] or row is rows[0])  # the others are ahead by chance
    assert heard["done"] and len(rows) > 1 and sum(row["taken"] for row in rows) == 1
    assert next(row["ratio"] for row in rows if row["taken"]) <= 1.01 * best
    assert here[1]["measured"].get("micro_batches", 1) == micro_batches
    plain, _ = two.run(_front_door, Cluster.preset("2xcpu"), micro_batches, False)
    assert plain[2] == [] and "measured" not in plain[1] and "unmeasured" not in plain[1]
    assert max(abs(a - b) for a, b in zip(plain[3], here[3], strict=True)) < 1e-9


# --- nothing is touched ------------------------------------------------------------------------


def _untouched(finals: list[Finalist], plan: Plan) -> tuple[dict[str, bool], bool, list[float], list[float]]:
    torch.manual_seed(0)
    model, data = Noisy(), batches(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    noisy_loss(model, data[1]).backward()
    optimizer.step()
    scheduler.step()
    model.up.register_forward_hook(lambda module, given, made: setattr(model, "last", made))
    given = {k: v.clone() for k, v in data[0].items()}
    before, twin = _bits(model, optimizer), copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with told("FINALIST_TURN_S", 0.02):
        taken = try_finalists.tried_finalists(
            World("cpu"),
            plan,
            finals,
            model,
            noisy_loss,
            optimizer,
            data[0],
            options=JobOptions(seed=3, clip_norm=1.0),
        )
    after = _bits(model, optimizer)
    alike = {k: before[k] == after.get(k) for k in before} | {"none more": list(before) == list(after)}
    alike |= {f"batch {k}": torch.equal(v, data[0][k]) for k, v in given.items()}
    other = Noisy()
    again = torch.optim.Adam(other.parameters(), lr=1e-2)
    losses = []
    for each, trains, fresh in ((model, optimizer, False), (other, again, True)):
        if fresh:
            each.load_state_dict(twin[0])
            trains.load_state_dict(twin[1])
        job = laminar.parallelize(each, noisy_loss, trains, batch=data[0], plan=taken, seed=3, device="cpu")
        losses.append([float(job.step(b).loss) for b in data])
    return alike, "measured" in taken.account, losses[0], losses[1]


def test_nothing_that_the_user_has_is_touched(two: Ranks) -> None:
    """Weights, buffers, gradients, state, groups, attributes, draws and the batch: the same bits in the same places."""
    plan, finals = found("noisy")
    for alike, ran, losses, plain in two.run(_untouched, finals, plan):
        assert ran and all(alike.values()), [k for k, same in alike.items() if not same]
        assert losses == plain


def _drawing(finals: list[Finalist], plan: Plan) -> tuple[bool, int, int]:
    made: list[Any] = []
    phases: list[Any] = []

    def makes(params: Any) -> torch.optim.Optimizer:
        made.append((torch.rand(3), random.random(), np.random.rand()))
        return torch.optim.Adam(params)

    def drawn() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=True)[1].tolist()]  # type: ignore[index,union-attr]

    model, data = net(), batches(1)
    before = drawn()
    with told("FINALIST_TURN_S", 0.02), events.listening(lambda e: phases.append(e.fields.get("name"))):
        try_finalists.tried_finalists(World("cpu"), plan, finals, model, mean, makes, data[0])
    return drawn() == before, len(made), phases.count("capturing")


def test_draws_on_the_way_are_nobodys(two: Ranks) -> None:
    """An optimizer that is made for every copy may draw, from any generator: the job's own draws are as before.

    The model is captured once for all copies.
    """
    plan, finals = found()
    assert two.run(_drawing, finals, plan) == [(True, len(finals), 1)] * 2


def _left_behind(finals: list[Finalist], plan: Plan) -> tuple[int, int, int, int]:
    seen: list[weakref.ref[Any]] = []
    model, data = net(), batches(1)
    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    make = try_finalists.job_copies

    def noted(*args: Any) -> Any:
        made = make(*args)
        seen.extend(map(weakref.ref, (made[0], *made[0].parameters())))
        return made

    with (
        mock.patch.object(try_finalists, "job_copies", noted),
        told("TRIAL_PATIENCE_S", 60.0),
        told("FINALIST_TURN_S", 0.02),
    ):
        taken = try_finalists.tried_finalists(World("cpu"), plan, finals, model, mean, adamw(model), data[0])
    alive = sum(ref() is not None for ref in seen)
    left = len(torch.distributed.distributed_c10d._world.pg_map) - groups
    return len(taken.account["measured"]["rows"]), len(seen), alive, left


def test_copies_and_groups_are_gone_afterwards(four: Ranks) -> None:
    """Memory is free again before the job is made, and process groups of meshes with several axes are left."""
    graph = probe(capture(net(), mean, batches(1)[0], wide=True))
    plan = laminar.plan(graph, "4xcpu", budget_s=0.1, only="data,tensor,zero")
    mesh = laminar.Mesh({"dp": 2, "tp": 2})
    named = {p.hash: p for p in (plan, presets.tensor_parallel(graph, mesh), presets.zero(graph, mesh, 1))}
    finals = [Finalist(str(k), p, 1e-3, 1 << 20) for k, p in enumerate(named.values())]
    for rows, made, alive, left in four.run(_left_behind, finals, plan):
        assert rows > 1 and made > 0 and alive == 0 and left == 0


# --- finalists that fail -----------------------------------------------------------------------


@contextmanager
def breaking(name: str, of: str, everywhere: bool = True) -> Iterator[None]:
    """A job of this plan fails when it is made (`__init__`) or in a step, on all ranks or on the last."""
    whole = getattr(try_finalists.Copied, name)

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        plan = args[4] if name == "__init__" else self.plan
        if plan.hash == of and (everywhere or torch.distributed.get_rank() == 1):
            raise RuntimeError("out of luck\nfor now")
        return whole(self, *args, **options)

    with mock.patch.object(try_finalists.Copied, name, broken):
        yield


@pytest.mark.parametrize("name", ["__init__", "step"])
def test_a_finalist_that_fails_is_left_out(two: Ranks, name: str) -> None:
    """Also the one that was predicted fastest; the job goes on with another."""
    plan, finals = found()
    for k in (0, 1):
        patch = functools.partial(breaking, name, finals[k].plan.hash)
        chosen, account, _ = of_both(two, finals, plan, patch)
        assert account["measured"]["out"] == [{"plan": finals[k].name, "why": "RuntimeError: out of luck"}]
        assert chosen != finals[k].plan.hash and len(account["measured"]["rows"]) == len(finals) - 1
        assert ("is out: RuntimeError: out of luck" in account["measured"]["says"]) == (k == 0)
        assert "out, RuntimeError: out of luck" in replace(plan, account=account).explain()


def test_a_finalist_that_fails_on_one_rank_is_left_out_on_all(two: Ranks) -> None:
    """The others wait for it in an exchange until they lose patience, and then go on together."""
    plan, finals = found()
    patches = (
        functools.partial(breaking, "step", finals[1].plan.hash, False),
        functools.partial(told, "TRIAL_PATIENCE_S", 4.0),
    )
    _, account, _ = of_both(two, finals, plan, *patches)
    (out,) = account["measured"]["out"]
    assert out["plan"] == finals[1].name and "rank 1: RuntimeError: out of luck" in out["why"]
    assert len(account["measured"]["rows"]) == len(finals) - 1


@contextmanager
def losing(of: str) -> Iterator[None]:
    """A job of this plan computes something else."""
    warmed = interleaved_timing._warmed

    def wrong(job: Any, batches: list[Any]) -> Any:
        losses, seconds = warmed(job, batches)
        return [x * (1.002 if job.plan.hash == of else 1.0) for x in losses], seconds

    with mock.patch.object(interleaved_timing, "_warmed", wrong):
        yield


def test_a_finalist_whose_loss_parts_is_left_out(two: Ranks) -> None:
    """It does not train the same model, however fast it is."""
    plan, finals = found()
    seconds = {f.plan.hash: 0.1 if k == 1 else 1.0 for k, f in enumerate(finals)}
    wrong = functools.partial(losing, finals[1].plan.hash)
    chosen, account, _ = of_both(two, finals, plan, functools.partial(taking, seconds), wrong)
    assert chosen == plan.hash
    assert "losses part" in account["measured"]["out"][0]["why"]


# --- where it is left out ----------------------------------------------------------------------


def unmeasured(two: Ranks, why: str, finals: list[Finalist], *patches: Callable[[], Any], **options: Any) -> None:
    """Nothing is measured, for this reason, and the plan that was predicted fastest is taken."""
    plan, _ = found()
    chosen, account, heard = of_both(two, finals, plan, *patches, **options)
    assert chosen == plan.hash and "measured" not in account
    assert why in account["unmeasured"] and heard == [{"done": False, "why": account["unmeasured"]}]
    assert f"not measured: {account['unmeasured']}" in replace(plan, account=account).explain()


def test_where_there_is_no_choice_nothing_is_run(two: Ranks) -> None:
    """One plan, or others that are predicted to be a third slower, or to be the same program."""
    plan, finals = found()
    unmeasured(two, "one plan only", finals[:1])
    far = [finals[0], *(replace(f, step_s=1.5 * finals[0].step_s) for f in finals[1:])]
    unmeasured(two, "the next plan is predicted to be 50 % slower", far)
    again = replace(finals[0], plan=replace(plan, name="again", account=Account()))
    unmeasured(two, "the same program as plan 1", [finals[0], again])


@contextmanager
def free(nbytes: int) -> Iterator[None]:
    """So much memory is free, on rank 1."""
    with mock.patch.object(
        try_finalists, "free_bytes", lambda device: nbytes if torch.distributed.get_rank() else 1 << 40
    ):
        yield


def test_where_copies_do_not_fit_nothing_is_run(two: Ranks) -> None:
    """On the rank that has least; where some fit, the slowest are left out."""
    plan, finals = found()
    wide = [replace(f, peak_bytes=int(1e9)) for f in finals]
    unmeasured(two, "about 2 GB a rank are needed for copies, 1 GB are free", wide, functools.partial(free, int(2e9)))
    room = int((2.2e9 / try_finalists.FILL) * 2)
    _, account, _ = of_both(two, wide, plan, functools.partial(free, room))
    assert [row["plan"] for row in account["measured"]["rows"]] == [f.name for f in wide[:2]]


def test_where_it_would_take_too_long_nothing_is_run(two: Ranks) -> None:
    """As predicted, as capturing took, or as rank 0's clock says on the way."""
    _, finals = found()
    long = [replace(f, step_s=2.0) for f in finals]
    unmeasured(two, "a step is predicted to take 2 s, and 6 of each plan may take 15 s in all", long)
    unmeasured(two, "capturing the model takes 6.0 s", finals, capture_s=6.0)
    unmeasured(two, "there was no time for it", finals, functools.partial(told, "LIMIT_S", 0.02))
    some, why = try_finalists.worth_it([replace(f, step_s=0.5) for f in finals], 0.0, 2)
    assert not why and len(some) == 2  # 6 steps of two micro-batches: 12 s for two of them


def _hooked(finals: list[Finalist], plan: Plan, how: str) -> tuple[str, int]:
    model, data, called = net(), batches(1), []
    optimizer = adamw(model)
    if how == "hook":
        optimizer.register_step_pre_hook(lambda *_: called.append(1))
    else:
        model.lock = (i for i in range(3))  # type: ignore[assignment]
    taken = try_finalists.tried_finalists(World("cpu"), plan, finals, model, mean, optimizer, data[0])
    return taken.account["unmeasured"], len(called)


def test_what_can_not_be_copied_is_left_alone(two: Ranks) -> None:
    """A hook around a step may do anything; a generator can't be copied."""
    plan, finals = found()
    for why, called in two.run(_hooked, finals, plan, "hook"):
        assert "the optimizer has hooks" in why and called == 0
    for why, _ in two.run(_hooked, finals, plan, "lock"):
        assert "can't be copied: TypeError: cannot pickle 'generator' object" in why


def _itself(finals: list[Finalist], plan: Plan) -> tuple[str, bool]:
    data = batches(1)
    model = nn.Sequential(nn.BatchNorm1d(5, affine=False), net(dtype=torch.float32))

    def loss(_: nn.Module, batch: Any) -> Tensor:
        model[0](batch["ids"].float())
        return mean(model[1], batch)

    before = {name: b.clone() for name, b in model.named_buffers()}
    taken = try_finalists.tried_finalists(World("cpu"), plan, finals, model, loss, adamw(model), data[0])
    return taken.account["unmeasured"], all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_a_loss_that_knows_the_model_does_not_run_it(two: Ranks) -> None:
    """A copy would be captured by running the original, whose norms would have counted that."""
    plan, finals = found()
    for why, same in two.run(_itself, finals, plan):
        assert "the loss runs the model that it knows" in why and same


def test_ranks_that_are_another_machine_or_alone_or_compile() -> None:
    """Known before anything is searched: then finalists are not even asked for."""
    here: Any = mock.Mock(size=2, device=torch.device("cpu"))
    assert plan_search._elsewhere(here, Cluster.preset("2xcpu"), False) == ""
    assert "steps are compiled" in plan_search._elsewhere(here, Cluster.preset("2xcpu"), True)
    assert "2xh100 is another machine: these ranks are on a cpu" in plan_search._elsewhere(
        here, Cluster.preset("2xh100"), False
    )
    there: Any = mock.Mock(size=2, device=torch.device("cuda"))
    assert plan_search._elsewhere(there, Cluster.preset("2xh100"), False) == ""
    assert "parts that differ" in plan_search._elsewhere(there, Cluster.preset("1xh100+1xa100"), False)
    model, data = net(), batches(1)
    with listening() as heard, mock.patch.object(plan_search, "finalists", side_effect=AssertionError):
        job = laminar.parallelize(model, mean, adamw(model), batch=data[0], cluster="2xcpu")
    assert heard == [{"done": False, "why": "there is one rank"}]
    assert "not measured: there is one rank" in job.plan.explain()

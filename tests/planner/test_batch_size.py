"""A batch that is free: the plan that trains most samples a second, of a batch and its equal parts.

The oracle is a search of every part by itself. What is proved must hold for the plans of all of them, and a plan for a
part must be one that can be verified and trained with.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import laminar
from laminar.api import for_plan, micro_batches
from laminar.errors import PlanError
from laminar.forecast.step import WORKSPACE_BYTES
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.account import BatchTaken
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged, load_plan
from laminar.placement.micro_batch import micro
from laminar.planner.estimate.candidates import Found, Nothing
from laminar.planner.report.graph_of_plan import graph_of_own_batch
from laminar.planner.search.batch_size import Batches, fitted
from laminar.planner.search.best_first.search import find, promised, sought
from laminar.planner.search.one_batch import tried
from laminar.planner.space.cell import divisors
from laminar.planner.space.request import Request, asking
from laminar.rules.samples import samples_of
from tests.support.traced_models import traced
from tests.support.zoo import recipe, specimen

ONLY = "data,zero"
PINS: dict[str, int | str] = {"stages": 1, "microbatches": 1}
"""Searches that end by themselves in a moment."""


@cache
def model() -> Graph:
    """A GPT whose activations fill more than its weights."""
    return traced(2, batch=8, d=32, tokens=128)


@cache
def whole() -> Plan | Staged:
    """The plan of its batch, by sample, where memory is no limit."""
    return laminar.plan(model(), "2xcpu", budget_s=3, only="data", pin=PINS)


def each(graph: Graph, cluster: str, **asked: Any) -> dict[int, Plan | Staged | None]:
    """The plan of every equal part of a batch, each found by a search of its own."""
    out: dict[int, Plan | Staged | None] = {}
    for parts in divisors(samples_of(graph)):
        part = micro(graph, parts)
        found = tried(part, asking(Cluster.preset(cluster), budget_s=60, **asked))
        out[samples_of(part)] = None if isinstance(found, Nothing) else found
    return out


def rate(plan: Plan | Staged | None, samples: int) -> float:
    """Samples a second."""
    return samples / plan.step_s if plan is not None and plan.step_s else 0.0


def check(graph: Graph, cluster: str, **asked: Any) -> Plan | Staged:
    """The free batch against all of them: the same choice, and nothing faster than what is proved."""
    known = each(graph, cluster, **asked)
    found = laminar.plan(graph, cluster, batch="free", budget_s=60 * len(known), **asked)
    said = found.account["batch"]
    best = max(known, key=lambda n: rate(known[n], n))
    assert said["samples"] == best and said["samples_per_s"] == pytest.approx(rate(known[best], best), rel=1e-12)
    assert (found.hash, said["captured"]) == (getattr(known[best], "hash", None), samples_of(graph))
    assert {row["samples"] for row in said["others"]} == set(known) - {best}
    for row in said["others"]:
        mine, most = rate(known[row["samples"]], row["samples"]), row["bound_samples_per_s"]
        assert most is None or mine <= most * (1 + 1e-9), row
        assert mine == 0 or row["why"] != "does not fit", row
    assert said["samples_per_s"] <= said["bound_samples_per_s"] * (1 + 1e-9)
    return found


# --- the choice


@pytest.mark.parametrize("cluster", ["2xcpu", pytest.param("2x2xa100", marks=pytest.mark.slow)])
def test_a_free_batch_is_the_best_of_all_of_its_parts(cluster: str) -> None:
    """Where memory is no limit, the largest: what comes once a step is shared by more samples."""
    plan = check(traced(2, batch=8, d=32), cluster, only="data,tensor,zero", pin={**PINS, "zero": 0})
    assert plan.account["batch"]["samples"] == 8


@pytest.mark.parametrize("share", [0.75, pytest.param(0.45, marks=pytest.mark.slow)])
def test_where_memory_is_short_the_best_batch_may_be_a_part(share: float) -> None:
    """What does not fit loses, whatever it would train; what fits is compared by samples a second, not by steps."""
    roomy = whole()
    plan = check(model(), "2xcpu", only="data", pin=PINS, memory_bytes=share * (roomy.peak_bytes or 0))
    said = plan.account["batch"]
    assert said["samples"] < 8 and (plan.peak_bytes or 0) <= share * (roomy.peak_bytes or 0)
    assert said["others"][0] == {**said["others"][0], "samples": 8, "samples_per_s": None, "why": "does not fit"}
    assert f"batch: {said['samples']} of 8 samples" in plan.explain() and "8, does not fit" in plan.explain()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt.py:tiny", "mlp.py:tiny", "dlrm.py:tiny", "resnet.py:tiny", "lstm.py:tiny"])
@pytest.mark.parametrize("cluster", ["2xcpu", "2xh100", "4xh100"])
def test_models_of_the_zoo_get_the_best_of_their_batches(name: str, cluster: str) -> None:
    """Every dimension allowed, with all the memory there is and with less than the fastest plan takes."""
    graph = specimen(name).graph
    roomy = check(graph, cluster)
    whole = find(graph, Request(Cluster.preset(cluster), budget_s=60)).finals[0].peak_bytes
    fixed = WORKSPACE_BYTES if Cluster.preset(cluster).device.kind == "gpu" else 0  # no plan can do without
    check(graph, cluster, memory_bytes=fixed + 0.8 * (max(whole, roomy.peak_bytes or 0) - fixed))


def test_a_batch_no_mesh_can_share_is_left_out_unless_there_is_no_other() -> None:
    """Three ranks share three samples or six; of two batches of an odd machine both are looked at."""
    request = Request(Cluster.preset("3xcpu"), only=("data",), batch="free")
    some = Batches(traced(1, batch=6, d=32), request)
    assert [b.samples for b in some.open] == [6, 3]
    assert {row["samples"]: row["why"] for row in some.run().account["batch"]["others"]}[
        2
    ] == "no mesh shares it evenly"
    none = Batches(traced(1, batch=2, d=32), request)
    assert not none.open and none.run().account["batch"]["samples"] == 2


def test_samples_that_need_each_other_have_one_batch() -> None:
    """No graph of a part follows from the batch's, and the account says why."""

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = model(batch)
        return (x @ x.T).softmax(-1).square().mean()

    graph = laminar.capture(torch.nn.Linear(4, 4), loss, torch.zeros(8, 4))
    plan = laminar.plan(graph, "2xcpu", batch="free", budget_s=2)
    assert plan.account["batch"]["samples"] == 8
    assert all("needs samples of other" in row["why"] for row in plan.account["batch"]["others"])


def test_one_budget_is_for_all_batches() -> None:
    """Without time one batch is searched, as any search finds a plan; the others are ruled out or not looked at."""
    plan = laminar.plan(traced(4, batch=8, d=32), "4xh100", batch="free", budget_s=0)
    rows = plan.account["batch"]["others"]
    assert plan.step_s and len(rows) == 3
    assert {row["why"] for row in rows} <= {"not looked at: time was up", "ruled out by its bound"}
    assert all(row["bound_samples_per_s"] for row in rows)


def test_a_batch_is_fixed_or_free() -> None:
    """For a batch of so many samples there is capture."""
    with pytest.raises(PlanError, match="the batch is 4") as error:
        laminar.plan(model(), "2xcpu", batch=4)
    assert "capture the model with it" in str(error.value)


def test_clusters_of_two_kinds_have_free_batches_too() -> None:
    """No batch can be ruled out before it is searched; what is proved is about those that were."""
    plan = laminar.plan(traced(2, batch=4, d=32), "2xh100+2xa100", batch="free", budget_s=1)
    said = plan.account["batch"]
    assert said["samples_per_s"] == pytest.approx(said["samples"] / (plan.step_s or 0))
    best = max([said["samples_per_s"], *(row["samples_per_s"] or 0 for row in said["others"])])
    assert said["samples_per_s"] == best and "samples/s" in plan.account["certificate"]["sentence"]


# --- what is proved


def test_the_certificate_speaks_of_samples_a_second() -> None:
    """One sentence over all batches, whose space is another where the batch is fixed; the step's own bound stays."""
    plan = laminar.plan(model(), "2xcpu", batch="free", budget_s=20, only=ONLY, pin=PINS)
    said, proof = plan.account["batch"], plan.account["certificate"]
    sentence = proof["sentence"]
    assert sentence.startswith(
        f"No plan in space {said['space'][:8]} for a batch of 8, 4 or 2 samples trains more than"
    )
    assert "samples/s; this one trains" in sentence and "Against the machine" in sentence and sentence in plan.explain()
    assert said["space"] != proof["space"]
    assert 0 < proof["bound_s"] <= plan.step_s and said["bound_samples_per_s"] >= 8 / plan.step_s


@pytest.mark.parametrize(("cluster", "parts"), [("2xcpu", 1), ("2xcpu", 8), ("4xh100", 2)])
def test_no_plan_is_faster_than_what_its_batch_promises(cluster: str, parts: int) -> None:
    """Batches are ruled out by it before anything of theirs is simulated."""
    graph = micro(traced(2, batch=8, d=32), parts)
    request = Request(Cluster.preset(cluster), budget_s=3, only=("data", "tensor", "zero"))
    assert promised(graph, request)[0] <= find(graph, request).certificate.step_s


def test_a_search_with_something_to_beat_finds_what_is_faster_and_proves_what_is_not() -> None:
    """Told the time of its own best plan, it has nothing to show and says so with a bound; told more, it finds it."""
    graph, request = traced(2, batch=8, d=32), Request(Cluster.preset("2xcpu"), budget_s=30, only=("data", "zero"))
    free = find(graph, request)
    step_s = free.finals[0].seconds
    again = sought(graph, request, below_s=1.05 * step_s)
    assert isinstance(again, Found) and again.plan.hash == free.plan.hash
    assert again.certificate.bound_s <= step_s
    none = sought(graph, request, below_s=0.5 * free.certificate.bound_s)
    assert isinstance(none, Nothing) and none.through
    assert none.bound_s == pytest.approx(0.5 * free.certificate.bound_s)


# --- ways out


def test_a_batch_that_does_not_fit_names_the_part_that_does() -> None:
    """The largest that fits, so that less is lost than need be; it can be taken."""
    graph = model()
    asked: dict[str, Any] = {"only": "data", "pin": {**PINS, "recompute": 0}, "budget_s": 1.0}
    room = 0.6 * (whole().peak_bytes or 0)
    with pytest.raises(PlanError, match="no plan fits") as error:
        laminar.plan(graph, "2xcpu", memory_bytes=room, **asked)
    named = int(str(error.value).partition("a batch of ")[2].split()[0])
    assert 'instead of 8 samples, batch="free"' in str(error.value)
    found = laminar.plan(graph, "2xcpu", memory_bytes=room, batch="free", **asked)
    assert found.account["batch"]["samples"] == named
    with pytest.raises(PlanError, match="no plan fits"):
        laminar.plan(micro(graph, 8 // (2 * named)), "2xcpu", memory_bytes=room, **asked)


def test_where_no_batch_fits_the_smallest_says_what_it_needs() -> None:
    """A free batch is a way out that has been taken already."""
    with pytest.raises(PlanError, match="of all batches, down to 1 sample: no plan fits") as error:
        laminar.plan(model(), "2xcpu", memory_bytes=1e4, batch="free", only="data", pin=PINS, budget_s=0.5)
    assert "allow memory_bytes=" in str(error.value)


# --- used


@cache
def tiny(name: str) -> Plan:
    """A plan for half of a recipe's batch, as a search that was free to take it has it."""
    graph = specimen(name).graph
    cluster, samples = Cluster.preset("2xcpu"), samples_of(graph)
    plan = laminar.plan(micro(graph, 2), cluster, budget_s=1, pin=PINS)
    assert isinstance(plan, Plan)
    taken = BatchTaken(
        samples=samples // 2, captured=samples, samples_per_s=1.0, bound_samples_per_s=1.0, space="", others=()
    )
    return replace(plan, account=replace(plan.account, batch=taken))


@pytest.mark.parametrize("name", ["mlp.py:tiny", "resnet.py:tiny", pytest.param("gpt.py:tiny", marks=pytest.mark.slow)])
def test_a_plan_for_a_part_is_verified_with_batches_of_its_size(name: str) -> None:
    """Also where numbers count samples; of such, a ResNet has rewrites, which then fit in part only."""
    made, plan = recipe(name), tiny(name)
    batch = next(iter(made.data()))
    half = for_plan(plan, batch)
    network = made.model()
    assert laminar.verify(network, made.loss, [half], plan).ok
    captured = laminar.capture(network, made.loss, half)
    mine = fitted(captured, plan)
    assert mine.inputs == plan.inputs and (mine.ops == plan.ops or mine.rewrites != plan.rewrites)
    with pytest.raises(PlanError, match="this plan is for a batch of") as error:
        laminar.verify(network, made.loss, [batch], plan)
    assert "give batches of" in str(error.value)


def test_a_job_takes_batches_of_the_plans_size_and_refuses_others_by_name() -> None:
    """A batch of another size would be run by another plan than the one that was predicted, and may not fit."""
    made = recipe("gpt.py:tiny")
    batch = next(iter(made.data()))
    graph = specimen("gpt.py:tiny").graph
    samples = samples_of(graph)
    alone = laminar.plan(micro(graph, 2), "1xcpu", budget_s=1, pin=PINS)
    alone = replace(alone, account=replace(alone.account, batch=tiny("gpt.py:tiny").account.batch))
    halves = micro_batches(batch, 2)
    with pytest.raises(PlanError, match=f"for a batch of {samples // 2} samples, not of {samples} samples") as error:
        laminar.parallelize(made.model(), made.loss, made.optimizer, batch=batch, plan=alone)
    assert "micro_batches=2" in str(error.value)
    torch.manual_seed(0)
    job = laminar.parallelize(made.model(), made.loss, made.optimizer, batch=halves[0], plan=alone)
    assert job.plan.hash == alone.hash and job.step(halves[0]).loss > 0
    job.close()
    both = laminar.parallelize(made.model(), made.loss, made.optimizer, batch=batch, plan=alone, micro_batches=2)
    assert both.step(batch).loss > 0
    both.close()


def test_questions_are_asked_about_the_plans_own_batch(tmp_path: Path) -> None:
    """A saved plan is handed the graph that was captured, which has more samples; a free plan stays with its batch."""
    graph = model()
    roomy = whole()
    asked: dict[str, Any] = {"only": "data", "pin": PINS, "budget_s": 2.0}
    plan = laminar.plan(graph, "2xcpu", batch="free", memory_bytes=0.6 * (roomy.peak_bytes or 0), **asked)
    samples = plan.account["batch"]["samples"]
    assert samples < 8 and graph_of_own_batch(plan, graph).hash == plan.graph_hash
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.account["batch"] == plan.account["batch"] and "samples a second" in loaded.explain()
    assert loaded.why("head.weight", graph=graph).options
    assert "digraph" in loaded.dot(graph=graph)
    after = loaded.what_if(graph=graph, only=ONLY).after
    assert after.account["samples"] == samples
    freed = roomy.what_if(batch="free", memory_bytes=0.6 * (roomy.peak_bytes or 0))
    assert freed.after.account["batch"]["samples"] == samples
    assert f"a batch has {samples} samples instead of 8" in str(freed)


def test_the_command_finds_explains_and_verifies_a_free_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe's batches are cut to what the plan is for; training with others says what it is for."""
    from laminar.cli import main

    name, path = "examples/mlp.py:tiny", tmp_path / "plan.json"
    asked = ["--cluster", "2xcpu", "--batch", "free", "--budget", "3", "-o", str(path), "--json"]
    assert main(["plan", name, *asked]) == 0
    said = json.loads(capsys.readouterr().out)["batch"]
    assert said["captured"] == 16 and len(said["others"]) == 4
    assert main(["verify", name, "--plan", str(path)]) == 0
    tiny("mlp.py:tiny").save(path)
    assert main(["verify", name, "--plan", str(path)]) == 0
    assert "batches of 8 samples: the first ones of each" in capsys.readouterr().out
    assert main(["simulate", str(path), "--recipe", name, "--cluster", "2xcpu"]) == 0
    assert main(["train", name, "--plan", str(path), "--workers", "2", "--run-dir", str(tmp_path / "run")]) != 0
    assert "this plan is for a batch of 8 samples, not of 16 samples" in capsys.readouterr().err
    assert main(["plan", name, "--cluster", "2xcpu", "--batch", "free", "--measure"]) == 2
    assert main(["plan", name, "--mesh", "dp=2", "--batch", "free"]) == 2
    assert "--batch is for a search" in capsys.readouterr().err


def test_a_free_batch_with_stages_is_verified_too() -> None:
    """Micro-batches of the part, through stages of its own; a batch of another size is refused."""
    made = recipe("gpt.py:tiny")
    batch = next(iter(made.data()))
    graph = specimen("gpt.py:tiny").graph
    plan = laminar.plan(graph, "2xcpu", batch="free", budget_s=2, pin={"stages": 2, "microbatches": 2, "virtual": 1})
    assert isinstance(plan, Staged) and plan.account["batch"]["captured"] == samples_of(graph)
    assert plan.account.batch is not None
    taken = replace(plan.account.batch, samples=samples_of(graph) // 2)
    half = replace(plan, account=replace(plan.account, batch=taken))
    assert laminar.verify(made.model(), made.loss, [for_plan(half, batch)], half).ok
    with pytest.raises(PlanError, match="this plan is for a batch of") as error:
        laminar.parallelize(made.model(), made.loss, made.optimizer, batch=batch, plan=half)
    assert "micro_batches" not in str(error.value)

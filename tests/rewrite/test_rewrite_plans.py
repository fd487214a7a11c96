"""Plans that carry rewrites: a file keeps them, every way from a plan to numbers makes them, and the search takes them.

The oracle of what is computed is plain PyTorch on one device, in float64. The oracle of what is found is the
simulator: a search that may rewrite must find a plan that is simulated faster than the best without.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar import Mesh
from laminar.api import micro_batches
from laminar.errors import PlanError
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph, map_refs
from laminar.ir.plans.rewrites import Applied
from laminar.ir.plans.staged import Staged, load_plan
from laminar.placement import presets
from laminar.placement.fold import fold
from laminar.placement.micro_batch import micro
from laminar.planner.search.best_first.search import find
from laminar.planner.space.request import Request
from laminar.planner.space.rewrites import SearchedVariants
from laminar.rewrite.edit import is_packed
from laminar.rewrite.variants import carrying, replay, replayed, rewritten, variants
from laminar.runtime.check.prove_rewrites import proof
from tests.support import zoo
from tests.support.marks import slow
from tests.support.rank_pool import Ranks
from tests.support.rewrite_cases import BY_NAME, several
from tests.support.traced_models import letters, traced, undercut

NAME = "llama.py:tiny"
STEPS = 3
MICRO = 2


@cache
def steps_of(name: str = NAME) -> tuple[Applied, ...]:
    """Query, key and value merged, gate and up too, with their gradients."""
    return several(name)[3].applied


def merges(steps: tuple[Applied, ...]) -> int:
    """How many products were merged; besides, casts of another precision may stand in the way of small things."""
    return sum(s.sites for s in steps if BY_NAME[s.rule].kind == "merge")


def wide() -> tuple[nn.Module, Any, list[Any]]:
    """The model in float64, its loss and its batches."""
    made = zoo.recipe(NAME)
    return made.model().double(), made.loss, list(itertools.islice(made.data(), STEPS))


def planned(model: nn.Module, loss: Any, batch: Any, how: str, steps: tuple[Applied, ...]) -> Any:
    """A plan of a captured model that carries these steps."""
    stages = how.startswith("stages")
    graph = laminar.capture(model, loss, micro_batches(batch, MICRO)[0] if stages else batch)
    made, done = replayed(graph, steps)
    assert merges(done) == merges(steps) > 0
    mesh = Mesh({"ranks": 2})
    if stages:
        options: dict[str, Any] = {"stages": 2} if how == "stages" else {"stages": ["blocks.1"], "virtual": 1}
        return carrying(laminar.plans.pipeline(made, microbatches=MICRO, **options), graph, done)
    if how.startswith("zero"):
        return carrying(laminar.plans.zero(made, mesh, int(how[4:])), graph, done)
    preset = laminar.plans.data_parallel if how == "data" else laminar.plans.tensor_parallel
    return carrying(preset(made, mesh), graph, done)


# --- as data ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["data", "stages"])
def test_a_plan_file_keeps_its_rewrites(how: str, tmp_path: Path) -> None:
    """What is trained tomorrow is what was planned today, and another decision has another hash."""
    made = zoo.recipe(NAME)
    plan = planned(made.model(), made.loss, next(iter(made.data())), how, steps_of())
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan and again.hash == plan.hash
    assert again.rewrites == plan.rewrites != () and again.captured_hash == plan.captured_hash
    without = replace(plan, rewrites=(), captured_hash="")
    assert without.hash != plan.hash and "rewrites" not in without.to_json()
    assert "merge-products x4" in plan.explain() and "rewritten" not in without.explain()


def test_a_file_with_steps_that_are_none_is_refused(tmp_path: Path) -> None:
    """Files are edited by hand."""
    made = zoo.recipe(NAME)
    plan = planned(made.model(), made.loss, next(iter(made.data())), "data", steps_of())
    data = plan.to_json()
    data["rewrites"]["steps"][0] = ["merge-products"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="corrupt plan"):
        load_plan(tmp_path / "plan.json")


# --- from plan and captured graph to the graph that is placed ---------------------------------


def test_a_plan_gets_its_graph_from_the_captured_one() -> None:
    """The captured graph is all that anybody has; the rewritten one, if somebody has it, is taken as it is."""
    graph = zoo.specimen(NAME).graph
    made, done = replayed(graph, steps_of())
    plan = carrying(laminar.plans.data_parallel(made, Mesh({"dp": 2})), graph, done)
    assert rewritten(graph, plan).hash == made.hash == plan.graph_hash
    assert rewritten(made, plan) is made
    assert rewritten(graph, laminar.plans.data_parallel(graph, Mesh({"dp": 2}))) is graph
    with pytest.raises(PlanError, match=r"(?s)is for graph .*laminar.rewritten\(graph, plan\)"):
        laminar.lower(graph, plan)
    assert laminar.lower(rewritten(graph, plan), plan).graph_hash == made.hash


def test_rules_that_have_changed_since_are_noticed() -> None:
    """Placements name ops of the rewritten graph: of another one they would place something else."""
    graph = zoo.specimen(NAME).graph
    made, done = replayed(graph, steps_of())
    plan = carrying(laminar.plans.data_parallel(made, Mesh({"dp": 2})), graph, done)
    with pytest.raises(PlanError, match=r"(?s)make graph .*, it is for .*rules have changed"):
        rewritten(graph, replace(plan, graph_hash=graph.hash[::-1]))
    with pytest.raises(PlanError, match="was made at 7 places"):
        rewritten(graph, replace(plan, rewrites=(replace(done[0], sites=7), *done[1:])))


def test_evaluation_is_rewritten_as_far_as_it_goes() -> None:
    """It has no gradients to merge, and must not fail for that."""
    from laminar.capture.capture import capture

    model, loss, batches = wide()
    graph = capture(model, loss, batches[0], backward=False)
    made, done = replayed(graph, steps_of())
    assert {s.rule for s in done} == {"merge-products"}
    assert len(made.nodes) != len(graph.nodes)


def test_simulation_takes_the_captured_graph() -> None:
    """`laminar simulate` captures the recipe of a plan anew: prices must be those of what will run."""
    graph = zoo.specimen(NAME).graph
    made, done = replayed(graph, steps_of())
    cluster = Cluster.preset("2xh100")
    bare = laminar.plans.data_parallel(made, Mesh({"dp": 2}))
    plan = carrying(bare, graph, done)
    assert predict(graph, plan, cluster).seconds == predict(made, bare, cluster).seconds
    staged = laminar.plans.pipeline(made, 2, 2)
    there = predict_staged(graph, carrying(staged, graph, done), cluster)
    assert there.seconds == predict_staged(made, staged, cluster).seconds


# --- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["data", slow("tensor"), slow("zero3"), slow("stages"), "stages at"])
def test_plans_with_rewrites_are_verified_against_the_model_as_it_was_written(how: str) -> None:
    """Against one device that computes the captured graph, not the rewritten one."""
    model, loss, batches = wide()
    plan = planned(model, loss, batches[0], how, steps_of())
    report = laminar.verify(model, loss, batches[:1], plan)
    assert report.ok, str(report)


def make(params: Any) -> torch.optim.Optimizer:
    """Adam with an epsilon that noise does not reach."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-6)


def _train(path: str) -> tuple[list[float], dict[str, Tensor], tuple[float, float], list[str], Any]:
    """Losses and weights, the losses of an evaluation and after going on without rewrites, and what was rewritten."""
    model, loss, batches = wide()
    job = laminar.parallelize(model, loss, make, batch=batches[0], plan=path)
    smaller = tuple(t[:4] for t in batches[-1])
    losses = [job.step(b).loss for b in (*batches, smaller)]
    weights, judged = job.state_dict(), job.evaluate([batches[0]])
    job.save(f"{path}.checkpoint")
    packed = [n.name for n in job.graph.nodes if is_packed(n.name)]
    job.close()
    other = laminar.parallelize(wide()[0], loss, make, batch=batches[0], plan="data")
    other.resume(f"{path}.checkpoint")
    after = other.step(batches[0]).loss
    other.close()
    return losses, weights, (judged, after), packed, job.plan.rewrites


def plain() -> tuple[list[float], dict[str, Tensor], tuple[float, float]]:
    """The same in an ordinary loop."""
    model, loss, batches = wide()
    optimizer = make(model.parameters())

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.item()

    losses = [step(b) for b in (*batches, tuple(t[:4] for t in batches[-1]))]
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    judged = loss(model, batches[0]).item()
    return losses, weights, (judged, step(batches[0]))


def trains_as_plain_pytorch(ranks: Ranks, plan: Any, path: Path) -> None:
    """Steps, a smaller last batch, evaluation, and a checkpoint that a plan without rewrites goes on from."""
    plan.save(path)
    losses, weights, later = plain()
    for said, got, then, packed, carried in ranks.run(_train, str(path)):
        assert packed and merges(carried) == merges(plan.rewrites) > 0
        torch.testing.assert_close(torch.tensor(said), torch.tensor(losses), rtol=1e-9, atol=0)
        assert got.keys() == weights.keys()
        for name, w in weights.items():
            torch.testing.assert_close(got[name], w, rtol=1e-9, atol=1e-11)
        assert then == pytest.approx(later, rel=1e-9)


@pytest.mark.parametrize("how", ["tensor", "stages", *[slow(h) for h in ("data", "zero3")]])
def test_two_ranks_train_a_rewritten_model_as_plain_pytorch_trains_it(two: Ranks, how: str, tmp_path: Path) -> None:
    """Whatever way the rewritten graph is spread, from a file as users have it."""
    model, loss, batches = wide()
    trains_as_plain_pytorch(two, planned(model, loss, batches[0], how, steps_of()), tmp_path / "plan.json")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-pure"])
def test_rewrites_that_were_planned_in_float32_are_made_in_other_precisions(precision: str) -> None:
    """A recipe is captured as it was written; how it is trained is said later, and puts casts everywhere."""
    made = zoo.recipe(NAME)
    batch = next(iter(made.data()))
    graph = zoo.specimen(NAME).graph
    after, done = replayed(graph, steps_of())
    plan = carrying(laminar.plans.data_parallel(after, Mesh({"dp": 1})), graph, done)
    job = laminar.parallelize(made.model(), made.loss, made.optimizer, batch=batch, plan=plan, precision=precision)
    whole = made.loss(made.model(), batch).item()
    assert job.step(batch).loss == pytest.approx(whole, rel=1e-2)
    assert merges(job.plan.rewrites) == merges(done)
    job.close()


# --- proofs ----------------------------------------------------------------------------------


def test_the_rewrites_of_a_plan_are_proved_on_its_model() -> None:
    """No rule is believed: what a search wants to use is run before it is used."""
    graph = zoo.specimen(NAME).graph
    made, done = replayed(graph, steps_of())
    plan = carrying(laminar.plans.data_parallel(made, Mesh({"dp": 2})), graph, done)
    found = proof(graph, plan)
    assert found.holds and found.model is not None and found.model > 0.0
    assert set(found.rules) == {s.rule for s in done}
    assert str(found).startswith("proved on random numbers, the model with few layers: worst error")
    assert not replace(found, model=1e-6).holds and not replace(found, rules={"merge-products": 1e-6}).holds


def test_a_model_too_large_to_be_run_is_proved_rule_by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody multiplies the matrices of a hundred billion parameters in float64 to be told that algebra holds."""
    monkeypatch.setattr("laminar.runtime.check.prove_rewrites.MOST_FLOPS", 1.0)
    graph = zoo.specimen(NAME).graph
    made, done = replayed(graph, steps_of())
    found = proof(graph, carrying(laminar.plans.data_parallel(made, Mesh({"dp": 2})), graph, done))
    assert found.holds and found.model is None and "each rule by itself" in str(found)


# --- which rewrites are searched ---------------------------------------------------------------


@cache
def llama(layers: int) -> Graph:
    """A Llama with narrow layers, without weights: products so small that it matters how many there are."""
    made = zoo.recipe(NAME)
    import llama

    with torch.device("meta"):
        model = llama.Llama(layers=layers, d=256, heads=4, kv_heads=4, hidden=704, vocab=512, tokens=128)
    ids = torch.zeros((64, 128), dtype=torch.int64)
    return laminar.capture(model, made.loss, (ids, ids))


def test_rotary_tables_do_not_keep_layers_from_being_folded() -> None:
    """They are made where the first layer wants them, so that it has more ops than the others."""
    deep = fold(llama(6))
    assert deep.layers == 6
    assert letters(deep.small(4)) == letters(llama(4))


@pytest.mark.parametrize("make", [llama, traced], ids=["llama", "gpt"])
def test_folding_what_was_rewritten_is_rewriting_what_was_folded(make: Any) -> None:
    """Variants are found on a shallow model and searched on the deep one: both must be the same rewrite."""
    graph = make(6)
    shallow = fold(graph).small(4)
    found = list(variants(shallow, limit=5, apart=False))
    assert len(found) > 1
    for variant in found[1:]:
        deep, steps = replayed(graph, variant.applied)
        assert [(s.rule, s.key) for s in steps] == [(s.rule, s.key) for s in variant.applied]
        folded = fold(deep)
        assert folded.layers == 6
        assert same_but_for_names(folded.small(4), variant.graph)
        plan = presets.data_parallel(folded.small(3), Mesh({"dp": 2}))
        folded.unfold(plan, 3).fits(deep)


def same_but_for_names(one: Graph, other: Graph) -> bool:
    """Whether two graphs compute the same from the same, op by op: every output is made in the same way."""

    def made(graph: Graph) -> dict[str, str]:
        known: dict[str, str] = {x.name: x.name for x in (*graph.inputs, *graph.constants)}
        for n in graph.nodes:
            text = repr((n.op, n.phase, n.outs, map_refs(n.args, lambda r: (known[r.name], r.index))))
            known[n.name] = hashlib.sha256(text.encode()).hexdigest()
        return {f"{o.kind}:{o.name}": f"{known[o.ref.name]}.{o.ref.index}" for o in graph.outputs}

    return len(one.nodes) == len(other.nodes) and made(one) == made(other)


def test_the_rewrite_of_a_micro_batch_is_the_micro_batch_of_the_rewrite() -> None:
    """A plan with stages is made for a micro-batch's graph cut from that of the rewritten batch."""
    graph = zoo.specimen(NAME).graph
    made, done = replayed(graph, steps_of())
    part = micro(graph, 2)
    assert replayed(part, done)[0].hash == micro(made, 2).hash


@pytest.mark.slow
def test_merging_is_worth_a_search_where_products_are_small() -> None:
    """Query, key and value in one product, gate and up in another: both are found, together and by themselves."""
    graph, request = llama(6), Request(Cluster.preset("8xh100"))
    found = SearchedVariants(graph, request)
    assert len(found) == 3 and found.unexplored > 0
    (steps, best), *_, (none, captured) = found
    assert captured is graph and none == ()
    assert sum(s.sites for s in steps if s.rule == "merge-products") == 12
    assert replay(graph, steps).hash == best.hash
    assert found.found[0].expected < found.found[1].expected < found.found[2].expected == 1.0
    again = SearchedVariants(graph, request)
    assert [c.steps for c in again.found] == [c.steps for c in found.found]


def test_splitting_what_is_packed_is_left_out_and_counted() -> None:
    """A GPT has one product for query, key and value; three are slower on every device, and nobody proves more."""
    found = SearchedVariants(traced(4), Request(Cluster.preset("8xh100")))
    assert [c.steps for c in found.found] == [()] and found.unexplored > 0


def test_a_model_without_anything_to_rewrite_is_searched_as_it_is() -> None:
    """There must be no ghost of a variant in the certificate."""
    found = SearchedVariants(zoo.specimen("mlp.py:tiny").graph, Request(Cluster.preset("2xcpu")))
    assert len(found) == 1 and found.unexplored == 0


# --- the search takes them ---------------------------------------------------------------------

ONE_CELL = {"tp": 1, "stages": 1, "microbatches": 1, "recompute": 0}
"""One cell and no more, so that a test of rewrites is not one of everything else."""


def test_the_search_takes_a_rewrite_by_itself_and_is_faster_for_it() -> None:
    """Eight H100 and a model with separate query, key, value, gate and up: products are too small to be worth five."""
    graph, cluster = llama(6), Cluster.preset("8xh100")
    without = find(graph, Request(cluster, pin=ONE_CELL, only=("data", "zero")))
    found = find(graph, Request(cluster, pin=ONE_CELL, only=("data", "zero", "rewrite"), budget_s=60))
    assert not without.plan.rewrites and found.plan.rewrites
    assert found.certificate.step_s < 0.95 * without.certificate.step_s
    assert predict(graph, found.plan, cluster).seconds == pytest.approx(found.certificate.step_s, rel=1e-12)
    assert found.certificate.bound_s <= found.certificate.step_s
    assert any(f.plan.rewrites == () for f in found.finals), "the graph as captured is looked at too"
    searched = found.space.data["rewrites"]
    assert [list(a.to_json()) for a in found.plan.rewrites] in searched and [] in searched
    assert any("rewrites of the graph that were not searched" in text for text in found.certificate.outside)
    assert found.certificate.cells == 3 * without.certificate.cells


def test_without_time_only_the_captured_graph_is_vouched_for() -> None:
    """What was not searched is outside, and counted there."""
    request = Request(Cluster.preset("8xh100"), pin=ONE_CELL, only=("data", "zero", "rewrite"), budget_s=0.0)
    found = find(llama(6), request)
    assert found.space.data["rewrites"] == [[]] and not found.plan.rewrites
    assert any(text.startswith("rewrites of the graph") for text in found.certificate.outside)


@pytest.mark.slow
def test_where_time_ends_early_what_was_found_has_a_bound_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is one of a rewritten graph, which then is part of what the certificate is about."""
    monkeypatch.setattr("laminar.planner.search.best_first.incumbent.TimeLeft.left", lambda self: -1.0)
    request = Request(Cluster.preset("8xh100"), pin=ONE_CELL, only=("data", "zero", "rewrite"), budget_s=60.0)
    found = find(llama(6), request)
    assert found.plan.rewrites and len(found.space.data["rewrites"]) == 2
    assert 0 < found.certificate.bound_s <= found.certificate.step_s
    assert found.certificate.outside[0] == f"rewrites of the graph that were not searched to the end: {left_out()}"


def left_out() -> int:
    """What is not searched of the same model: what was never made, and one variant that there was no time for."""
    return SearchedVariants(llama(6), Request(Cluster.preset("8xh100"), budget_s=60)).unexplored + 1


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["2xcpu", "8xh100"])
def test_no_plan_of_a_rewritten_graph_is_simulated_faster_than_its_bound(spec: str) -> None:
    """The certificate vouches for variants by bounds that were made for captured graphs."""
    assert undercut(several(NAME)[3].graph, spec, 1) == []


@pytest.mark.slow
def test_a_rule_that_fails_its_proof_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan without rewrites is slower, and right."""
    graph = zoo.specimen(NAME).graph
    trusted = laminar.plan(graph, "2xcpu", pin=ONE_CELL, budget_s=60)
    assert trusted.rewrites and "proved on random numbers" in trusted.explain()
    monkeypatch.setattr("laminar.runtime.check.prove_rewrites.alone", lambda name: 1e-3)
    plan = laminar.plan(graph, "2xcpu", pin=ONE_CELL, budget_s=60)
    assert not plan.rewrites and "WRONG on random numbers" in plan.explain()
    assert plan.step_s > trusted.step_s


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_what_was_found_trains_on_two_ranks_as_plain_pytorch_does(two: Ranks, stages: int, tmp_path: Path) -> None:
    """From the search to the weights: found, saved, loaded, verified, trained, taken up again."""
    model, loss, batches = wide()
    graph = laminar.capture(model, loss, batches[0])
    pin = {"tp": 1, "stages": stages, "microbatches": 1 if stages == 1 else MICRO, "recompute": 0}
    plan = laminar.plan(graph, "2xcpu", pin=pin, budget_s=60)
    assert plan.rewrites and isinstance(plan, Staged) == (stages > 1)
    report = laminar.verify(model, loss, batches[:1], plan)
    assert report.ok, str(report)
    trains_as_plain_pytorch(two, plan, tmp_path / "plan.json")

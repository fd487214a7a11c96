"""Plans that explain themselves: what they say must be what the simulator says.

Every figure here has an oracle: parts of a step add up to it, an alternative of `why` is the prediction of a plan that
was made independently, flags are read from placements and not from names, and a way out of an infeasible request is
taken and works.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.cli import main
from laminar.cost.calibrate import HALF_90
from laminar.errors import ClusterError, LaminarError, PlanError
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.staged import Staged, load_plan
from laminar.ir.sbp import Split
from laminar.placement import presets
from laminar.placement.complete import completed
from laminar.placement.micro_batch import micro
from laminar.planner.report.classify import form
from laminar.planner.report.step_breakdown import OWN_SIGMA, binding, chances, spent
from laminar.planner.report.words import difference
from laminar.planner.search.entry import best
from laminar.planner.search.what_if import faster_links, resized
from laminar.planner.space.request import asking
from laminar.staging.stage_plans import pipeline
from tests.support.traced_models import traced
from tests.support.zoo import specimen

MESH = laminar.Mesh({"dp": 2, "tp": 2})


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A GPT of four layers."""
    return traced(4, d=64)


@pytest.fixture(scope="module")
def found(graph: Graph) -> laminar.Plan:
    """What a search with time to finish finds for it."""
    plan = laminar.plan(graph, "4xh100", budget_s=600, pin={"stages": 1, "microbatches": 1})
    assert isinstance(plan, laminar.Plan)
    return plan


def tensor(graph: Graph, mesh: laminar.Mesh = MESH) -> laminar.Plan:
    """Megatron's way."""
    return presets.tensor_parallel(graph, mesh)


# --- where the time goes, and who wins


def test_the_parts_of_a_step_add_up_to_it(graph: Graph) -> None:
    """Whatever is compared between plans is all of the step, with stages and without."""
    cluster = Cluster.preset("4xh100")
    ran = predict(graph, tensor(graph), cluster)
    parts = spent(ran)
    assert sum(parts.values()) == pytest.approx(ran.seconds, rel=1e-9)
    assert parts["exposed exchange over tp (node)"] > 0 and parts["update"] > 0
    small = micro(graph, 4)
    staged = pipeline(small, 2, 4, 1, presets.tensor_parallel(small, laminar.Mesh({"tp": 2})))
    ran_staged = predict_staged(small, staged, cluster)
    parts = spent(ran_staged)
    assert sum(parts.values()) == pytest.approx(ran_staged.seconds, rel=1e-9)
    assert parts["bubble"] > 0 and parts["products"] > 0 and parts["exposed exchange over tp (node)"] > 0


def test_what_plans_share_cancels_and_what_they_do_not_does_not() -> None:
    """A plan that only adds to another is slower, however uncertain prices are; a trade-off is not certain."""
    base = {"products": 10.0, "exposed exchange over tp": 2.0}
    worse = {**base, "update": 1.0}
    assert chances([base, worse], 0.01)[0] > 0.99
    assert chances([base, worse], 0.5)[0] > 0.99
    trade = {"products": 11.0, "exposed exchange over tp": 0.5}
    near, wide = chances([trade, base], 0.01)[0], chances([trade, base], 0.5)[0]
    assert near > 0.99 > wide > 0.4
    assert sum(chances([base, worse, trade], 0.3)) == pytest.approx(1.0)
    assert chances([base, dict(base)], 0.3)[0] == pytest.approx(0.5, abs=0.02)


def test_a_bubble_is_as_wrong_as_the_work_it_waits_for() -> None:
    """Otherwise a pipeline would seem to win whenever products are slower than believed."""
    flat, piped = {"products": 10.0}, {"products": 8.0, "bubble": 2.2}
    assert chances([flat, piped], 0.5)[0] == pytest.approx(chances([flat, piped], 0.01)[0], abs=0.03)


def test_plans_as_fast_as_each_other_win_as_often(graph: Graph) -> None:
    """A tie within a plan's own error is told as one: 1 % apart is not certain."""
    share = chances([{"products": 10.0}, {"products": 10.0 * (1 + OWN_SIGMA)}], 0.3)[0]
    assert 0.6 < share < 0.95 and HALF_90 > 1


def test_what_binds_is_the_largest_part() -> None:
    """In words that name the resource, and for an exchange its link."""
    found = binding({"products": 3.0, "update": 1.0})
    assert (found.resource, found.part, found.share) == ("compute (products)", "products", 0.75)
    assert binding({"products": 1.0, "exposed exchange over tp (node)": 3.0}).resource == (
        "communication, exposed exchange over tp (node)"
    )


def test_a_search_explains_itself(found: laminar.Plan) -> None:
    """What was asked for in one place: choice, interval, binding resource, runners-up, proof, money."""
    text = found.explain(price=2.5)
    for part in ("searched: ", "ms predicted (", "what binds: ", "gap ", "for a million tokens", "memory: "):
        assert part in text, part
    account, step = found.account, found.account.step
    assert step is not None
    assert "other plans that were simulated in full" in text or "others that were looked at" in text
    if account.runners_up:
        assert "with a probability of" in text and account.wins is not None and 0 < account.wins.share <= 1
    tokens = 8 * 16
    assert account.tokens == account["tokens"] == tokens
    assert f"{1e6 * 4 * 2.5 * step.step_s / 3600 / tokens:.4g} for a million tokens" in text
    assert sum(account.memory.values()) == pytest.approx(step.peak_bytes, rel=0.02)
    for row in account.runners_up:
        if row.spent:
            assert sum(row.spent.values()) == pytest.approx(row.step_s, rel=1e-9)


def test_an_account_survives_the_file(found: laminar.Plan, tmp_path: Path) -> None:
    """A saved plan explains itself in the same words, and is strict JSON."""
    found.save(tmp_path / "plan.json")
    json.loads((tmp_path / "plan.json").read_text(), parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
    again = laminar.Plan.load(tmp_path / "plan.json")
    assert again.explain(price=1.0) == found.explain(price=1.0)
    assert again.hash == found.hash and again.origin is None and found.origin is not None
    assert str(again.flags("megatron")) == str(found.flags("megatron"))


# --- why


def test_an_alternative_is_what_the_simulator_says_of_it(graph: Graph) -> None:
    """The same pin, made by hand and simulated at full depth, takes what the table says."""
    cluster, plan = Cluster.preset("4xh100"), presets.data_parallel(graph, laminar.Mesh({"dp": 4}))
    name = "blocks.1.mlp.up.weight"
    why = plan.why(name, graph=graph, cluster=cluster)
    assert why.chosen.step_s == pytest.approx(predict(graph, plan, cluster).seconds, rel=1e-9)
    assert why.chosen.placement == "B" and why.alike == 4
    row = next(o for o in why.options if o.placement == "S(1)" and o.rest == "ops as they are")
    moved = {f"blocks.{k}.mlp.up.weight": (Split(1),) for k in range(4)}
    outputs = {**plan.outputs, **{f"grad:{k}": v for k, v in moved.items()}}
    hand = replace(plan, inputs={**plan.inputs, **moved}, outputs=outputs)
    ran = predict(graph, hand, cluster)
    assert row.step_s == pytest.approx(ran.seconds, rel=1e-9)
    assert row.peak_bytes == ran.memory.peak_bytes


def test_no_alternative_of_a_searched_plan_is_much_faster(found: laminar.Plan) -> None:
    """The plan is the best that was found: `why` would show it if another placement of one tensor beat it."""
    for name in ("blocks.1.mlp.down.weight", "embed.weight", "batch.ids"):
        why = found.why(name)
        assert all(o.reason or o.step_s > 0.97 * why.chosen.step_s for o in why.options), str(why)
        assert why.patterns and str(why).count("*") >= 1
        assert json.loads(json.dumps(why.to_json()))["name"] == name


def test_a_deep_model_is_asked_at_two_depths() -> None:
    """Eight layers continued from four and six take what eight layers take."""
    deep, cluster = traced(8, d=64), Cluster.preset("4xh100")
    plan = presets.data_parallel(deep, laminar.Mesh({"dp": 4}))
    why = plan.why("blocks.5.mlp.up.weight", graph=deep, cluster=cluster)
    assert why.chosen.step_s == pytest.approx(predict(deep, plan, cluster).seconds, rel=0.02)


def test_why_of_a_plan_with_stages(graph: Graph) -> None:
    """Its own row is what the staged simulation says."""
    small = micro(graph, 4)
    staged = pipeline(small, 2, 4, 1, presets.data_parallel(small, laminar.Mesh({"dp": 2})))
    why = staged.why("blocks.0.mlp.up.weight", graph=graph, cluster="4xh100")
    ran = predict_staged(small, staged, Cluster.preset("4xh100"))
    assert why.chosen.step_s == pytest.approx(ran.seconds, rel=1e-9)
    assert why.chosen.peak_bytes == max(ran.peaks)


def test_why_of_a_value_between_ops(graph: Graph) -> None:
    """An activation is asked about by the name that programs print; all layers change together."""
    plan = tensor(graph)
    why = plan.why("%gelu_1", graph=graph, cluster="4xh100")
    assert why.chosen.placement == "[S(0), S(2)]" and why.alike == 4 and not why.grad
    assert why.chosen.step_s == pytest.approx(predict(graph, plan, Cluster.preset("4xh100")).seconds, rel=1e-9)
    assert any(o.placement == "[S(0), B]" and o.step_s > 0 for o in why.options)
    with pytest.raises(PlanError, match=r"closest .*%gelu_"):
        plan.why("%gelu_99", graph=graph, cluster="4xh100")


def test_what_a_pattern_names_only_in_some_layers_does_not_stop_the_question(graph: Graph) -> None:
    """Blocks recomputed that the shallow model lacks are recomputed where they are."""
    deep, mesh = traced(8, d=32), laminar.Mesh({"dp": 2})
    plan = presets.recomputing(deep, presets.data_parallel(deep, mesh), r"blocks\.6")
    assert all(not o.reason for o in plan.why("embed.weight", graph=deep, cluster="2xh100").options)


def test_a_name_that_is_nearly_one_is_suggested(found: laminar.Plan) -> None:
    """A slip costs a glance, not a search through the model."""
    with pytest.raises(PlanError, match=r"closest .*blocks\.1\.mlp\.up\.weight"):
        found.why("blocks.1.mlp.upp.weight")


def test_a_placement_that_cannot_be_says_why(graph: Graph) -> None:
    """A row, not a hole in the table."""
    plan = presets.data_parallel(graph, laminar.Mesh({"dp": 8}))
    why = plan.why("batch.ids", graph=graph, cluster="8xh100")
    assert {o.placement for o in why.options} >= {"B", "S(1)"}
    scalar = specimen("dlrm.py:tiny").graph
    plan = presets.data_parallel(scalar, laminar.Mesh({"dp": 2}))
    name = next(i.name for i in scalar.inputs if i.kind == "param")
    assert all(o.reason or o.step_s > 0 for o in plan.why(name, graph=scalar, cluster="2xh100").options)


# --- what if


@pytest.mark.slow
def test_less_memory_gives_a_leaner_plan_or_says_what_binds(found: laminar.Plan) -> None:
    """Both plans, and the difference in words."""
    assert found.peak_bytes is not None and found.step_s is not None
    less = found.what_if(memory_bytes=0.97 * found.peak_bytes, budget_s=0.5)
    assert less.after is not None and less.after.peak_bytes <= 0.97 * found.peak_bytes
    assert f"instead of {found.step_s * 1e3:.3f}" in str(less)
    kept_out = less.after.account["binding"]["kept_out"]
    assert kept_out["step_s"] < less.after.step_s and kept_out["peak_bytes"] > 0.97 * found.peak_bytes
    assert "memory binds too" in less.after.explain()
    none = found.what_if(memory_bytes=1e3, budget_s=0.1, pin={"zero": 0, "recompute": 0})
    assert none.after is None and "memory" in str(none) and none.to_json()["after"] is None


def test_other_machines_are_made_from_the_same_kind(found: laminar.Plan) -> None:
    """More devices, slower links, another device: each is a search on that machine."""
    more = found.what_if(devices=8, budget_s=0.3)
    assert more.after is not None and more.after.account["devices"] == 8
    slow = found.what_if(link=0.01, budget_s=0.3)
    assert slow.after is not None and slow.after.step_s >= 0.999 * slow.before.step_s
    other = found.what_if(cluster="4xa100", budget_s=0.3)
    assert "on 4xa100" in other.changed and other.after.account["cluster"] == "4xa100"


def test_what_cannot_be_changed_is_refused_by_name(found: laminar.Plan, graph: Graph, tmp_path: Path) -> None:
    """Another batch is another graph, and a plan from a file has none."""
    with pytest.raises(PlanError, match="capture the model with the other batch"):
        found.what_if(batch=16)
    with pytest.raises(PlanError, match="nothing is changed"):
        found.what_if()
    found.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="hand it over: graph="):
        loaded.what_if(memory_bytes=1e9)
    assert loaded.what_if(graph=graph, only="data", budget_s=0.2).after is not None


def test_clusters_of_another_size_keep_their_nodes() -> None:
    """`16x4xa100` has nodes of four, with 32 devices as with 64."""
    assert resized(Cluster.preset("16x4xa100"), 32).name == "8x4xa100"
    assert resized(Cluster.preset("8xh100"), 64).hash == Cluster.preset("64xh100").hash
    file = replace(Cluster.preset("16x4xa100"), name="ours")
    assert resized(file, 32).devices == 32
    with pytest.raises(ClusterError, match="multiples of 4 up to 64"):
        resized(file, 30)
    fast = faster_links(Cluster.preset("8xh100"), 2.0)
    assert fast.levels[0].bytes_per_s.value == 2 * Cluster.preset("8xh100").levels[0].bytes_per_s.value
    with pytest.raises(ClusterError, match="above 0"):
        faster_links(fast, 0.0)


# --- limits and pins


def test_a_pinned_tensor_lies_as_it_is_pinned(graph: Graph) -> None:
    """On the innermost axis unless one is named; ZeRO leaves it alone."""
    for pin, at in (("S(1)", -1), ("tp:S(1)", 1), ("dp:B;tp:S(1)", 1)):
        pins: dict[str, int | str] = {"blocks.*.mlp.up.weight": pin, "tp": 2, "stages": 1, "microbatches": 1}
        plan = laminar.plan(graph, "4xh100", budget_s=0.5, pin=pins)
        assert isinstance(plan, laminar.Plan)
        for k in range(4):
            assert plan.inputs[f"blocks.{k}.mlp.up.weight"][at] == Split(1)
        assert "tp" in plan.mesh.names
        assert plan.account["request"]["pin"] == pins


def test_a_pin_that_names_nothing_or_not_all_layers_is_refused(graph: Graph) -> None:
    """Layers that are alike are planned alike."""
    with pytest.raises(PlanError, match=r"names no tensor[\s\S]*closest .*mlp.up.weight"):
        laminar.plan(graph, "4xh100", pin={"blocks.*.mlp.upp.weight": "S(1)"})
    with pytest.raises(PlanError, match=r"planned like it[\s\S]*'blocks.\*.mlp.up.weight'"):
        laminar.plan(graph, "4xh100", pin={"blocks.0.mlp.up.weight": "S(1)"})
    with pytest.raises(LaminarError, match="no dim 7"):
        laminar.plan(graph, "4xh100", pin={"embed.weight": "S(7)"})
    with pytest.raises(LaminarError, match="can't lie as P"):
        laminar.plan(graph, "4xh100", pin={"embed.weight": "P(sum)"})


@pytest.mark.slow
def test_the_way_out_of_too_little_memory_works(graph: Graph) -> None:
    """The bytes that are named are enough, and those that were allowed are not."""
    cluster = Cluster.preset("4xh100")
    pins: dict[str, int | str] = {"zero": 0, "tp": 1, "stages": 1, "microbatches": 1, "recompute": 0}
    fits = laminar.plan(graph, cluster, budget_s=0.3, pin=pins)
    assert fits.peak_bytes is not None
    with pytest.raises(PlanError) as caught:
        laminar.plan(graph, cluster, budget_s=0.3, pin=pins, memory_bytes=0.9 * fits.peak_bytes)
    text = str(caught.value)
    assert "binds" in text and "memory" in text and "allow memory_bytes=" in text
    needed = float(text.partition("allow memory_bytes=")[2].split()[0])
    assert 0.9 * fits.peak_bytes < needed <= 1.02 * fits.peak_bytes
    assert best(graph, asking(cluster, needed, 0.3, pin=pins)).peak_bytes <= needed


def test_pins_that_exclude_each_other_are_told_which_to_lift(graph: Graph) -> None:
    """Three ranks of tensor parallelism do not divide four devices; without that pin there are plans."""
    with pytest.raises(PlanError) as caught:
        laminar.plan(graph, "4xh100", budget_s=0.3, pin={"tp": 3, "stages": 1, "microbatches": 1})
    assert "lift the pin tp=3" in str(caught.value)


# --- flags


def values(flags: Any) -> dict[str, str]:
    """Flags as a table."""
    return dict((*f.split(" "), "")[:2] for f in flags.flags)


def test_presets_have_the_flags_that_made_them_known(graph: Graph) -> None:
    """Tensor parallel by two and data parallel by two, in both systems' words."""
    megatron = tensor(graph).flags("megatron", graph=graph)
    assert megatron.ok and values(megatron) == {
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "1",
        "--micro-batch-size": "4",
        "--global-batch-size": "8",
    }
    titan = values(tensor(graph).flags("torchtitan", graph=graph))
    assert titan["--parallelism.tensor_parallel_degree"] == "2"
    assert titan["--parallelism.data_parallel_replicate_degree"] == "2"
    with pytest.raises(PlanError, match="megatron  torchtitan"):
        tensor(graph).flags("deepspeed", graph=graph)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_read_from_where_state_gradients_and_parameters_lie(graph: Graph, stage: int) -> None:
    """Over all ranks, or over those of a node while nodes hold the same."""
    plan = presets.zero(graph, laminar.Mesh({"dp": 4}), stage)
    seen = form(plan, graph)
    assert (seen.zero, seen.pieces, seen.data) == (stage, 4, 4)
    flags = plan.flags("megatron", graph=graph)
    assert "--use-distributed-optimizer" in flags.flags
    assert ("--use-megatron-fsdp" in flags.flags) == (stage > 1)
    inner = presets.in_pieces(graph, presets.data_parallel(graph, laminar.Mesh({"a": 2, "b": 2})), stage, (1,))
    seen = form(inner, graph)
    assert (seen.zero, seen.pieces, seen.data) == (stage, 2, 4)
    assert values(inner.flags("torchtitan", graph=graph))["--parallelism.data_parallel_replicate_degree"] == "2"


def test_names_say_nothing_placements_do(graph: Graph) -> None:
    """Axes and plans may be called anything; what is called tensor parallel but is not has no flags of it."""
    odd = tensor(graph, laminar.Mesh({"x": 2, "tp": 2}))
    same = replace(odd, mesh=laminar.Mesh({"rows": 2, "columns": 2}), name="whatever")
    assert form(same, graph).tensor == 2 and same.flags("megatron", graph=graph).ok
    data = replace(presets.data_parallel(graph, MESH), name="tensor_parallel")
    assert form(data, graph).tensor == 1 and form(data, graph).data == 4
    swapped = replace(tensor(graph), ops={**tensor(graph).ops}, name="tensor_parallel")
    for k, op in ((n.name, n.op) for n in graph.nodes if n.phase == "forward"):
        if op == "laminar.attention":
            choice = swapped.ops[k]
            swapped.ops[k] = replace(choice, ins=tuple((nd[0], Split(0)) for nd in choice.ins))
    refused = swapped.flags("megatron", graph=graph)
    assert not refused.ok and not refused.flags and "not split by heads" in str(refused)


def test_a_free_placement_says_what_stands_in_the_way(graph: Graph) -> None:
    """Weights that are multiplied whole on a tensor axis are not Megatron's."""
    mesh = laminar.Mesh({"dp": 2, "tp": 2})
    pins = [presets.data_pins(graph, mesh, 0), presets.tensor_pins(graph)]
    pins[1].split, pins[1].spread = set(), set()
    for k in range(4):
        pins[1].inputs[f"blocks.{k}.mlp.up.weight"] = laminar.B
    plan = completed(graph, mesh, pins, "hand")
    flags = plan.flags("megatron", graph=graph)
    assert not flags.ok and "split neither by column nor by row: blocks.0.mlp.up.weight" in str(flags)
    assert flags.to_json()["obstacles"]


def test_a_residual_stream_split_by_token_is_sequence_parallel(graph: Graph) -> None:
    """Megatron has a flag for it; torchtitan always does it."""
    mesh = laminar.Mesh({"tp": 2})
    pins = presets.tensor_pins(graph)
    for ref in presets.residual_stream(graph):
        pins.values[ref] = pins.read[ref] = Split(1)
    plan = completed(graph, mesh, [pins], "hand")
    assert form(plan, graph).sequence
    assert "--sequence-parallel" in plan.flags("megatron", graph=graph).flags
    assert "no tensor parallelism without" not in str(plan.flags("torchtitan", graph=graph))
    assert "--sequence-parallel" not in tensor(graph, mesh).flags("megatron", graph=graph).flags
    assert "no tensor parallelism without" in str(tensor(graph, mesh).flags("torchtitan", graph=graph))


def test_stages_micro_batches_and_recompute_have_flags(graph: Graph) -> None:
    """As the schedule has them; a schedule that a system lacks is an obstacle."""
    small = micro(graph, 4)
    inner = presets.recomputing(small, presets.tensor_parallel(small, laminar.Mesh({"tp": 2})), "blocks.*")
    staged = pipeline(small, 2, 4, 2, inner)
    flags = values(staged.flags("megatron", graph=graph))
    assert flags["--pipeline-model-parallel-size"] == "2" and flags["--micro-batch-size"] == "2"
    assert flags["--num-virtual-stages-per-pipeline-rank"] == "2"
    assert flags["--recompute-granularity"] == "full"
    titan = values(staged.flags("torchtitan", graph=graph))
    assert titan["--parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert titan["--parallelism.pipeline_parallel_microbatch_size"] == "2"
    bubbles = pipeline(small, 2, 4, 1, inner, schedule="zero-bubble")
    assert "no schedule like zero-bubble" in str(bubbles.flags("megatron", graph=graph))


def test_what_is_no_transformer_has_no_flags() -> None:
    """Neither system trains it."""
    graph = specimen("resnet.py:tiny").graph
    flags = presets.data_parallel(graph, laminar.Mesh({"dp": 2})).flags("megatron", graph=graph)
    assert not flags.ok and "no attention" in str(flags)


# --- pictures


def test_a_graph_is_drawn_with_layers_once(graph: Graph, tmp_path: Path) -> None:
    """One frame for all layers, boxes for what is outside, exchanges where Megatron has them."""
    text = tensor(graph).dot(graph=graph, cluster="4xh100")
    assert text.count('label="x4"') == 1 and "blocks." not in text
    products = [n.op for n in graph.nodes if n.phase == "forward" and n.op in ("aten.mm", "aten.addmm")]
    assert text.count("addmm") - text.count('-> "addmm') - text.count('"addmm_0" ->') >= 4 < len(products)
    assert text.count("all-reduce tp") == 2
    data = presets.data_parallel(graph, laminar.Mesh({"dp": 4})).dot(graph=graph, cluster="4xh100")
    assert "all-" not in data
    tensor(graph).draw(tmp_path / "plan.png", graph=graph, cluster="4xh100")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_a_plan_with_stages_is_drawn_too(graph: Graph) -> None:
    """One micro-batch of it."""
    small = micro(graph, 4)
    staged = pipeline(small, 2, 4, 1, presets.data_parallel(small, laminar.Mesh({"dp": 2})))
    assert isinstance(staged, Staged)
    assert "2 stages, 4 micro-batches" in staged.dot(graph=graph, cluster="4xh100")


# --- the command line


def test_questions_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them at once, as JSON; then of the saved plan, which captures its recipe again."""
    file = tmp_path / "plan.json"
    asks = ["--why", "blocks.0.mlp.up.weight", "--what-if", "only=data; budget=0.2", "--flags", "megatron"]
    saved = ["--dot", str(tmp_path / "g.dot")]
    run = ["plan", "examples/gpt.py:tiny", "--cluster", "2xh100", "--budget", "0.3", "--json", "-o", str(file)]
    assert main([*run, *asks, *saved]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["why"][0]["name"] == "blocks.0.mlp.up.weight" and said["what_if"][0]["after"]["step_s"] > 0
    assert said["flags"]["style"] == "megatron" and (tmp_path / "g.dot").read_text().startswith("digraph")
    assert main(["explain", str(file), *asks]) == 0
    assert "what if only data may be used" in capsys.readouterr().out
    assert main(["explain", str(file), "--price", "2"]) == 0
    assert "for a million tokens" in capsys.readouterr().out
    assert main(["explain", str(file), "--why", "nothing.of.the.kind"]) == 2
    assert "closest" in capsys.readouterr().err
    assert main(["explain", str(file), "--what-if", "memory=much"]) == 2
    assert "is a number" in capsys.readouterr().err


def test_plans_of_which_no_parts_are_known_are_not_compared_by_parts(found: laminar.Plan) -> None:
    """Of the first few it is told what they spend their time on; the others would all spend less on everything."""
    rows = found.account.runners_up
    bare = replace(rows[-1], plan="one of many", step_s=2 * rows[-1].step_s, spent={})
    account = replace(found.account, runners_up=(*rows, bare, bare))
    lines = replace(found, account=account).explain().splitlines()
    (at,) = [k for k, line in enumerate(lines) if line.startswith("  one of many: ")]  # once, if it is written twice
    assert not lines[at + 1].startswith("    ") and any(" ms more on " in line for line in lines)
    assert difference(rows[0].spent, {}, 1.0) == difference({}, rows[0].spent, 1.0) == ""

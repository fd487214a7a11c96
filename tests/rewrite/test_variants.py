"""Rewrites as a space to search: which graphs a planner is given, and that it can build on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import laminar
from laminar.api import inputs_of
from laminar.errors import PlanError
from laminar.ir.graph import Graph
from laminar.ir.plans.rewrites import Applied
from laminar.rewrite.apply import work_of
from laminar.rewrite.rules import REWRITE_RULES
from laminar.rewrite.variants import replay, tidied, variants
from laminar.runtime.check.prove_rewrites import PROOF_TOLERANCE, prove
from laminar.runtime.check.verify import verify_stages
from tests.support import zoo
from tests.support.rewrite_cases import BY_NAME, several

MODELS = ("llama.py:tiny", "gpt.py:tiny", "bert.py:tiny", "t5.py:tiny")


@pytest.mark.parametrize("name", MODELS)
def test_variants_are_other_graphs_with_the_same_results(name: str) -> None:
    """Whatever the search picks must train the same model."""
    graph = zoo.specimen(name).graph
    found = several(name)
    assert found[0].graph is graph and found[0].applied == ()
    assert len({v.graph.hash for v in found}) == len(found) == 6
    with zoo.one_thread():
        for variant in found[1:]:
            assert prove(graph, variant.graph) <= PROOF_TOLERANCE, variant.applied


@pytest.mark.parametrize("name", MODELS)
def test_a_rewrite_can_be_replayed(name: str) -> None:
    """A plan keeps what was applied, not the graph: a fresh capture must come out the same."""
    graph = zoo.specimen(name).graph
    for variant in several(name):
        assert replay(graph, variant.applied).hash == variant.graph.hash


def captured_gpt(layers: int, batch: int) -> Graph:
    """The small GPT with another depth or batch."""
    gpt = sys.modules.get("gpt") or pytest.importorskip("gpt")
    config = gpt.Config(layers=layers, d=32, heads=4, vocab=61, tokens=16, batch=batch)
    ids = torch.zeros(batch, 16, dtype=torch.int64)
    return laminar.capture(gpt.GPT(config), gpt.loss, {"ids": ids, "target": ids})


def test_a_rewrite_fits_other_batches_and_if_asked_other_depths() -> None:
    """The last batch of an epoch is smaller, and a hundred blocks are like two."""
    whole = tuple(several("gpt.py:tiny"))
    split = max(whole, key=lambda v: len(v.applied))
    small = replay(captured_gpt(2, 3), split.applied)
    assert prove(captured_gpt(2, 3), small) <= PROOF_TOLERANCE
    with pytest.raises(PlanError, match=r"was made at 2 places of class .*, this graph has 3"):
        replay(captured_gpt(3, 8), split.applied)
    deep = replay(captured_gpt(3, 8), split.applied, other_depth=True)
    assert sum(n.op == "aten.addmm" for n in deep.nodes) == sum(n.op == "aten.addmm" for n in split.graph.nodes) + 6


def test_a_rule_nobody_knows_can_not_be_replayed() -> None:
    """A plan from another version says so, instead of training without its rewrite."""
    with pytest.raises(PlanError, match="no rewrite rule is called tea"):
        replay(zoo.specimen("gpt.py:tiny").graph, [Applied("tea", "0", 1)])


def test_a_search_that_ends_by_itself_has_left_out_only_what_it_ruled_out() -> None:
    """`unexplored` goes into the certificate: zero must mean that there is nothing more."""
    graph = zoo.specimen("gpt.py:tiny").graph
    whole = variants(graph, limit=1000, slack=float("inf"))
    found = list(whole)
    assert 8 < len(found) < 100 and whole.unexplored == 0
    assert found[0].unexplored > 0
    close = variants(graph, limit=1000, slack=1.02)
    assert len(list(close)) < len(found) and close.unexplored == close.pruned > 0
    few = variants(graph, limit=3)
    assert len(list(few)) == 3 and few.unexplored > few.pruned


def test_the_same_graph_gives_the_same_variants() -> None:
    """A search that is run again must find the same plan."""
    graph = zoo.specimen("bert.py:tiny").graph
    again = [v.graph.hash for v in variants(graph, limit=6)]
    assert again == [v.graph.hash for v in several("bert.py:tiny")]


def test_another_process_finds_the_same_variants(tmp_path: Path) -> None:
    """Ranks may plan for themselves, and sets are walked in another order in every process."""
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(zoo.specimen("gpt.py:tiny").graph.to_json()))
    code = (
        "import json, sys; from laminar.ir.graph import Graph; from laminar.rewrite.variants import variants;"
        "g = Graph.from_json(json.load(open(sys.argv[1]))); print([v.graph.hash for v in variants(g, limit=6)])"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] == f"{[v.graph.hash for v in several('gpt.py:tiny')]}\n"


def test_steps_survive_json_and_variants_say_what_they_are() -> None:
    """A plan file keeps the steps, and its reader wants words."""
    bundle = several("bert.py:tiny")[2]
    assert tuple(Applied.from_json(json.loads(json.dumps(a.to_json()))) for a in bundle.applied) == bundle.applied
    assert "merge-biased-products x2" in str(bundle) and " ops, " in str(bundle)
    assert str(several("bert.py:tiny")[0]).startswith("as captured: +0 ops")


@pytest.mark.parametrize("name", ["llama.py:tiny", "bert.py:tiny"])
def test_what_belongs_together_is_merged_together_first(name: str) -> None:
    """Forward, the gradients of the weights and that of the input: one without the others is hardly ever wanted."""
    bundle = several(name)[2]
    merged = [a.rule for a in bundle.applied if BY_NAME[a.rule].kind == "merge"]
    assert len(merged) == 3 and {a.sites for a in bundle.applied if a.rule in merged} == {2}


def test_layers_that_read_one_value_are_merged_per_layer_or_all_at_once() -> None:
    """Two ways to merge keys and values of cross-attention, each with its own gradients: never half of one and half of
    the other."""
    graph = zoo.specimen("t5.py:tiny").graph
    moves = [v.applied[-3:] for v in variants(graph, limit=12)]
    merged = [tuple((a.rule, a.sites) for a in m) for m in moves]
    rules = ("merge-products", "merge-gradient-products", "sum-as-product")
    assert tuple(zip(rules, (1, 1, 1), strict=True)) in merged
    assert tuple(zip(rules, (2, 2, 1), strict=True)) in merged


def test_the_change_is_that_of_the_graph() -> None:
    """A planner skips hopeless variants by these numbers, so they must be those of counting both graphs."""
    whole = work_of(zoo.specimen("llama.py:tiny").graph)
    for variant in several("llama.py:tiny"):
        change = work_of(variant.graph) - whole
        assert variant.change.flops == pytest.approx(change.flops)
        assert variant.change.moved_bytes == pytest.approx(change.moved_bytes)
        assert variant.change.ops == change.ops
        assert variant.change.seconds == pytest.approx(change.seconds)


def test_what_a_site_promises_is_what_the_graph_saves() -> None:
    """The order of the search depends on gains that are worked out before anything is rewritten."""
    graph = zoo.specimen("llama.py:tiny").graph
    for rule in REWRITE_RULES:
        for site in rule.find(graph):
            after = rule.apply(graph, site)
            saved = work_of(graph).seconds - work_of(after).seconds
            assert saved == pytest.approx(site.gain_s, abs=1e-15), rule.name
            assert len(graph.nodes) - len(after.nodes) == site.fewer, rule.name


def test_tidying_never_loses_and_ends() -> None:
    """It is done without asking, so it must not make anything slower, and doing it twice must change nothing."""
    for name in MODELS:
        graph = zoo.specimen(name).graph
        after, steps = tidied(graph)
        before, now = work_of(graph), work_of(after)
        assert (now.seconds, len(after.nodes)) <= (before.seconds, len(graph.nodes))
        assert tidied(after) == (after, ())
        assert bool(steps) == (after.hash != graph.hash)


def test_low_rank_products_change_order_in_forward_and_backward_together() -> None:
    """One order is kept alive by the other pass: only both together make the wide product go away."""

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(4, 64, bias=False), torch.nn.Linear(64, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x))

    x = torch.randn(256, 4)
    graph = laminar.capture(Chain(), lambda m, b: m(b).pow(2).mean(), x)
    found = list(variants(graph, limit=20))
    best = min(found, key=lambda v: v.change.flops)
    assert sum(a.rule.startswith("reassociate") for a in best.applied) > 1
    assert best.change.flops < -0.5 * work_of(graph).flops
    assert prove(graph, best.graph) <= PROOF_TOLERANCE


# --- and further down the house --------------------------------------------------------------


@pytest.mark.parametrize(("name", "which"), [("llama.py:tiny", 2), ("gpt.py:tiny", 1), ("t5.py:tiny", 3)])
@pytest.mark.parametrize("how", ["data", "tensor"])
def test_rewritten_graphs_are_spread_over_ranks_like_any_other(name: str, which: int, how: str) -> None:
    """A rewrite is only worth something if plans can be made of it, and give one device's numbers."""
    graph = several(name)[which].graph
    preset = laminar.plans.data_parallel if how == "data" else laminar.plans.tensor_parallel
    plan = preset(graph, laminar.Mesh({"ranks": 2}))
    one = zoo.specimen(name)
    report = zoo.verify_program(graph, plan, [one.inputs])
    assert report.ok, str(report)


def test_rewritten_graphs_run_in_stages() -> None:
    """Stages are cut by phase and module, and see micro-batches: other graphs, to which the rewrite is recomputed."""
    made = zoo.recipe("llama.py:tiny")
    model, (ids, target) = made.model(), next(iter(made.data()))
    batches = [(ids, target), (ids[:4], target[:4]), (ids[4:], target[4:])]
    applied = several("llama.py:tiny")[3].applied
    whole, part = (replay(laminar.capture(model, made.loss, b), applied) for b in batches[:2])
    assert sum(a.rule == "sum-as-product" for a in applied) == 2
    plan = laminar.plans.pipeline(part, 2, 2)
    given = [inputs_of(g, model, b) for g, b in zip((whole, part, part), batches, strict=True)]
    report = verify_stages(whole, [(part, plan), (part, plan)], [4, 4], given[:1], [given[1:]])
    assert report.ok, str(report)


def test_rewriting_needs_no_framework() -> None:
    """Plans for a thousand GPUs are made where there is none, and no torch either."""
    code = "import laminar.rewrite.variants, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""What a plan answers about a run: in which precision it is priced, tokens a second, MFU, days and money."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laminar import Cluster, Mesh, Plan, plans
from laminar.api import graph_of
from laminar.cli import main
from laminar.ir.plans.account import Account, PredictedStep
from laminar.planner.report.classify import recomputed_blocks
from laminar.planner.report.throughput import rate_lines, rates, with_work
from laminar.staging.stage_plans import pipeline

GPT = "examples/gpt.py:tiny"


def asked(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_rates_follow_from_the_step() -> None:
    """A product of known size: 6 operations for each weight and token, forward and backward."""
    graph = graph_of("examples/mlp.py:tiny")
    weights = [i.spec for i in graph.of_kind("param") if len(i.spec.shape) == 2]
    cluster = Cluster.preset("4xh100")
    step = PredictedStep(step_s=0.5, step_low_s=0.4, step_high_s=0.6, peak_bytes=1, cluster=cluster.name)
    account = with_work(Account(step=step), graph, "f32", cluster)
    samples, work = account.samples, account.work
    assert samples is not None and work is not None
    first = weights[0].numel  # nobody asks for the gradient of the batch
    assert work.flops == samples * (6 * sum(w.numel for w in weights) - 2 * first)
    found = rates(account, amount=1e6, price=3.0)
    assert found["samples_per_s"] == samples / 0.5
    assert found["mfu"] == pytest.approx(work.flops / 0.5 / (4 * cluster.device.flops_per_s["f32"].value))
    assert found["days"] * 86400 == pytest.approx(1e6 * 0.5 / samples)
    assert found["cost"] == pytest.approx(found["days"] * 24 * 4 * 3.0)
    assert "days" not in rates(account) and rates(Account()) == {} == rates(Account(step=step))
    text = "\n".join(rate_lines(account, 1e6, 3.0))
    assert "precision: as the model is, products in float32" in text and "MFU" in text and "for a device-hour" in text


def test_precision_is_priced_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half precision is another graph with other prices; a saved plan remembers which it was."""
    file = str(tmp_path / "plan.json")
    mesh = ["plan", GPT, "--mesh", "dp=2", "--cluster", "2xh100"]
    full = asked(capsys, *mesh)
    half = asked(capsys, *mesh, "--precision", "bf16", "--tokens", "1e9", "--price", "2", "-o", file)
    assert (full["precision"], full["products"], half["precision"], half["products"]) == ("f32", "f32", "bf16", "bf16")
    assert full["graph"] != half["graph"] and full["flops"] == half["flops"]
    assert half["tokens_per_s"] == pytest.approx(half["tokens"] / half["step_s"])
    assert half["days"] > 0 and half["cost"] == pytest.approx(half["days"] * 24 * 2 * 2)
    again = asked(capsys, "simulate", file)
    assert again["precision"] == "bf16" and again["step_s"] == pytest.approx(half["step_s"])
    other = asked(capsys, "simulate", file, "--precision", "f32")
    assert other["precision"] == "f32" and other["step_s"] == pytest.approx(full["step_s"], rel=0.02)
    assert main(["explain", file, "--tokens", "1e9"]) == 0
    out = capsys.readouterr().out
    assert "precision: --precision bf16, products in bfloat16" in out and "1e+09 tokens:" in out
    assert main(mesh) == 0
    assert "precision: as the model is, products in float32; --precision bf16" in capsys.readouterr().out


def test_layers_that_are_cut_count_once() -> None:
    """Counts of layers by stage add up to those of the model, wherever stages are cut."""
    graph = graph_of(GPT, 4)
    staged = pipeline(graph, 3, 4)
    assert sum(len(blocks) for _, blocks in recomputed_blocks(graph, staged)) == 2
    notes = str(staged.flags("torchtitan", graph=graph_of(GPT)))
    (line,) = (text for text in notes.splitlines() if text.startswith("# stages have"))
    counts = line.removeprefix("# stages have ").partition(" layers")[0].split(", ")
    assert sum(map(int, counts)) == 2 and "layers are cut between two stages" in notes


@pytest.mark.slow
def test_a_picture_of_stages_says_which_has_what(tmp_path: Path) -> None:
    """Below the layers, which are drawn once; the title is broken where it would not fit."""
    graph = graph_of(GPT, 4)
    staged = pipeline(graph, 2, 4)
    text = staged.dot(graph=graph_of(GPT), cluster="2xh100")
    assert "stage 0 at place 0 (ranks 0)" in text and "stage 1 at place 1 (ranks 1)" in text
    staged.draw(tmp_path / "staged.png", graph=graph_of(GPT), cluster="2xh100")
    plan = plans.data_parallel(graph_of(GPT), Mesh({"dp": 2}))
    assert isinstance(plan, Plan) and "stage 0" not in plan.dot(graph=graph_of(GPT), cluster="2xh100")
    plan.draw(tmp_path / "plan.png", graph=graph_of(GPT), cluster="2xh100")
    assert (tmp_path / "staged.png").stat().st_size > (tmp_path / "plan.png").stat().st_size

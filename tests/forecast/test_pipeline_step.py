"""Predicted steps of plans with stages: parts have their prices, the pipe its bubbles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import laminar
from laminar.cli import main
from laminar.forecast.pipeline_step import CONTROL_S, MEETING_S, StagedPrediction, predict_staged
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.mesh import Mesh
from laminar.staging.stage_plans import pipeline
from tests.support.zoo import EXAMPLES, specimen


def predicted(cluster: str = "8xh100", **options: Any) -> StagedPrediction:
    """A pipeline of the small GPT."""
    graph = specimen("gpt.py:tiny").graph
    return predict_staged(graph, pipeline(graph, **options), Cluster.preset(cluster))


@pytest.mark.parametrize("cluster", ["8xh100", "8xcpu"])
def test_one_micro_batch_takes_its_way_through_all_stages(cluster: str) -> None:
    """Down and up again, with a message at each cut, and the update where it ends: nothing overlaps."""
    found = predicted(cluster, stages=3, microbatches=1)
    net, part = found.pipe.net, found.part_s
    level = found.cluster.levels[0]
    sizes = {q.name: q.bytes for q in net.queues}
    ways = [sizes[name] for name in ("F0->F1", "F1->F2", "B2->B1", "B1->B0")]
    wait_s = level.latency_s.value + CONTROL_S[found.cluster.device.kind]
    moving = sum(round(1e9 * (wait_s + n / level.bytes_per_s.value)) for n in ways)
    firings = sum(round(1e9 * part[name]) for name in ("F0", "F1", "F2", "B2", "B1", "B0", "O0"))
    assert found.execution.step_ns == firings + moving
    assert found.seconds == pytest.approx((firings + moving) / 1e9 + MEETING_S[found.cluster.device.kind])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_no_step_is_shorter_than_its_busiest_place(schedule: str) -> None:
    """Work adds up at a place; what is left of the step is its bubble."""
    found = predicted(stages=2, microbatches=4, schedule=schedule, virtual=2 if schedule == "interleaved" else 1)
    for place, bubble in enumerate(found.bubbles):
        mine = [a for a in found.pipe.net.actors if a.place == place]
        work_s = sum(a.fires * found.part_s.get(a.name, 0.0) for a in mine)
        pipe_s = found.execution.step_ns / 1e9
        assert work_s <= pipe_s * (1 + 1e-6) and pipe_s < found.seconds
        assert bubble == pytest.approx(1 - work_s / pipe_s, abs=1e-3)
    low, high = found.interval_s
    assert low < found.seconds < high


def test_more_micro_batches_make_smaller_bubbles_and_tensor_parallel_stages_smaller_weights() -> None:
    """The pipe is filled once a step, however long the step; pieces of weights take less room than whole ones."""
    few, many = (predicted(stages=2, microbatches=m) for m in (2, 8))
    assert max(many.bubbles) < min(few.bubbles)
    split = predicted(stages=2, microbatches=2, inner=Mesh({"tp": 4}))
    assert max(split.peaks) < max(few.peaks)


def test_a_staged_plan_is_simulated_and_drawn_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seconds, bubbles and the familiar chart, without any of the hardware."""
    recipe, plan, png = str(EXAMPLES / "gpt.py:tiny"), str(tmp_path / "plan.json"), str(tmp_path / "step.png")
    assert main(["plan", recipe, "--stages", "2", "--micro-batches", "2", "--cluster", "2xh100", "-o", plan]) == 0
    assert "places idle" in capsys.readouterr().out
    assert main(["simulate", plan, "--png", png, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["bubbles"]) == 2 and found["step_s"] > 0
    assert Path(png).read_bytes().startswith(b"\x89PNG")


class Tied(nn.Module):
    """Words in and out by one table, with layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 32))
        self.frozen = nn.Parameter(torch.randn(32), requires_grad=False)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers(F.embedding(x, self.table) * self.frozen)
        return (h * self.frozen) @ self.table.t()


@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_gradients_of_a_tied_weight_travel_home_and_back(virtual: int) -> None:
    """Once a step, from where else it is read to the first place, and the sum back.

    Not so where both stages that read it are at one place, nor if it is frozen.
    """
    graph = laminar.capture(Tied(), lambda m, x: m(x).square().mean(), torch.zeros(8, 16, dtype=torch.long))
    found = predict_staged(graph, pipeline(graph, 2, 2, virtual), Cluster.preset("2xh100"))
    level = found.cluster.levels[0]
    assert set(found.pipe.made.cut.tied) == {"table", "frozen"}
    apart = len({found.staged.stages[s].place for s in found.pipe.made.cut.tied["table"]}) > 1
    assert apart == (virtual != 2)
    ways_s = 2 * apart * (level.latency_s.value + 64 * 32 * 4 / level.bytes_per_s.value)
    assert found.part_s.get("R0", 0.0) == pytest.approx(ways_s)
    reduced = next(r for r in found.execution.ran if r.name == "R0")
    assert reduced.end - reduced.start == round(1e9 * ways_s)

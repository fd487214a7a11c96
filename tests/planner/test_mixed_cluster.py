"""Clusters of several kinds of device: as data, as prices, and what a search makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import laminar
from laminar.cli import main
from laminar.errors import ClusterError, PlanError
from laminar.forecast.pipeline_step import CONTROL_S, predict_staged
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.clusters.device_presets import cpu
from laminar.ir.clusters.mixed import Mixed, without
from laminar.ir.mesh import Mesh
from laminar.ir.plans.staged import Staged
from laminar.placement.micro_batch import micro
from laminar.placement.presets import data_parallel
from laminar.planner.estimate.mixed_pipelines import Side, Sides
from laminar.planner.search.mixed_cluster import MixedSearch, stage_seconds
from laminar.planner.space.request import MEMORY_MARGIN, Request
from laminar.staging.stage_plans import pipeline
from tests.support.mixed_clusters import cores
from tests.support.traced_models import traced
from tests.support.zoo import EXAMPLES, recipe, specimen

TWO = "2xh100+2xa100"


def layers_of(plan: Staged) -> list[int]:
    """For each stage, how many blocks it has a weight of."""
    out = []
    for stage in plan.stages:
        blocks = {n.split(".")[1] for n in stage.plan.inputs if n.startswith("blocks.") and n.endswith("up.weight")}
        out.append(len(blocks))
    return out


# --- as data


def test_a_mixed_cluster_is_written_with_a_plus_and_numbered_part_by_part() -> None:
    """The grammar of one kind stays as it is: a plus between fabrics is still one between fabrics."""
    found = Cluster.preset("2x8xh100@pcie+eth100/8+4x4xa100-40g@@eth50")
    assert isinstance(found, Mixed) and found.devices == 32
    assert [p.name for p in found.parts] == ["2x8xh100@pcie+eth100/8", "4x4xa100-40g"]
    assert found.firsts == (0, 16) and [found.part_of(r) for r in (0, 15, 16, 31)] == [0, 0, 1, 1]
    assert found.outer.bytes_per_s.value == pytest.approx(0.8 * 50e9 / 8)
    assert not isinstance(Cluster.preset("2x8xh100@pcie+eth100/8"), Mixed)
    assert Cluster.preset("h100+a100").devices == 2
    # Cards that two share usually, or that a node of eight shares, where parts have smaller nodes.
    assert Cluster.preset("2xv100+1xv100").outer.shared == 1
    assert Cluster.preset("7x8xh100@eth100/8+7xh100@eth100/8").outer.shared == 7
    # Unless told, parts are joined by the slower of what usually joins nodes of each.
    assert Cluster.preset(TWO).outer.bytes_per_s.value == Cluster.preset("16xa100").levels[1].bytes_per_s.value


def test_a_mixed_cluster_survives_a_file_and_has_an_identity(tmp_path: Path) -> None:
    """What was planned for is what is loaded again, to the last figure."""
    cluster, path = cores(), tmp_path / "cluster.json"
    cluster.save(path)
    again = Cluster.load(path)
    assert again == cluster and again.hash == cluster.hash and hash(again) == hash(cluster)
    assert again != cores(0.25) and again != Cluster.preset(TWO)
    assert "devices 2 to 3" in str(again) and "Mixed" in repr(again)
    data = json.loads(path.read_text())
    for broken, says in [
        ({**data, "parts": data["parts"][:1]}, "parts: 1"),
        ({k: v for k, v in data.items() if k != "outer"}, "outer: missing"),
        ({**data, "parts": [data["parts"][0], {**data["parts"][1], "levels": []}]}, r"parts\[1\]\.levels"),
        ({**data, "outer": {**data["outer"], "latency_s": 3}}, "outer.latency_s"),
    ]:
        with pytest.raises(ClusterError, match=says):
            Cluster.from_json(broken)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xh100@@ib400", "joins kinds of device, and there is one"),
        ("8xh100+8xa100@@nvlink", "can't join parts"),
        ("8xh100+8xb300", "'b300' in '8xb300' is unknown"),
        ("8xh100+2xcpu", "cpu beside gpu"),
    ],
)
def test_mixed_clusters_that_make_no_sense_are_refused_by_name(text: str, says: str) -> None:
    """At the door, with what is allowed."""
    with pytest.raises(ClusterError, match=says):
        Cluster.preset(text)


def test_what_has_no_answer_for_a_mixed_cluster_says_whom_to_ask() -> None:
    """Silently taking the first part's device for all of them would be the worst of answers."""
    cluster = Cluster.preset(TWO)
    for ask in (lambda: cluster.device, lambda: cluster.levels, lambda: cluster.unit_devices):
        with pytest.raises(ClusterError, match="part"):
            ask()
    assert cluster.on((2, 3)).device.name == "a100-80g" and cluster.kind == "gpu"
    assert cluster.span((2, 3)).level == 0
    with pytest.raises(ClusterError, match="stand on 2xh100 and 2xa100"):
        cluster.on((1, 2))
    with pytest.raises(ClusterError, match="rank 4 has no device"):
        cluster.on((4,))


def test_a_cluster_that_has_lost_devices_keeps_its_links() -> None:
    """Nodes of equal size stay together; what is left has a name that stands for it."""
    whole = Cluster.preset("64xh100")
    for lost, name in [
        ([63], "7x8xh100+7xh100"),
        (range(8), "7x8xh100"),
        ([5], "7xh100+7x8xh100"),
        ([20], "2x8xh100+7xh100+5x8xh100"),
        (range(0, 64, 8), "8x7xh100"),
    ]:
        left = without(whole, lost)
        assert left.name == name and left.devices == 64 - len(lost)
        assert Cluster.preset(name).hash == left.hash
    assert without(Cluster.preset("8xh100"), [3]).hash == Cluster.preset("7xh100").hash
    assert without(Cluster.preset("8xh100+8xa100"), [9]).name == "8xh100+7xa100"
    assert without(whole, []) is whole
    with pytest.raises(ClusterError, match="device 64"):
        without(whole, [64])
    with pytest.raises(ClusterError, match="no device of 2xcpu is left"):
        without(Cluster.preset("2xcpu"), [0, 1])


# --- prices


def test_every_place_is_priced_on_the_devices_it_stands_on() -> None:
    """The same part on two kinds takes what it takes on each alone, and hops between kinds go over the outer level."""
    graph = micro(traced(4, batch=8, d=64), 4)
    plan = pipeline(graph, 4, 4)
    mixed = predict_staged(graph, plan, Cluster.preset(TWO))
    fast, slow = (predict_staged(graph, plan, Cluster.preset(f"4x{name}")) for name in ("h100", "a100"))
    for name, seconds in mixed.part_s.items():
        assert seconds == (fast if int(name[1:]) < 2 else slow).part_s[name]
    outer = mixed.cluster.joining((1, 2))
    transfer = next(r for r in mixed.execution.ran if r.name == "F1->F2")
    sent = next(q.bytes for q in mixed.pipe.net.queues if q.name == "F1->F2")
    assert transfer.end - transfer.start == round(
        1e9 * (outer.latency_s.value + CONTROL_S["gpu"] + sent / outer.bytes_per_s.value)
    )
    assert [place.device for place in mixed.figures().places] == ["h100", "h100", "a100-80g", "a100-80g"]


def test_parts_of_one_name_are_priced_by_what_they_are() -> None:
    """Two machines that were measured by people who both call theirs `here`."""
    slow, fast = Cluster.preset("2xa100"), Cluster.preset("2xh100")
    outer = Cluster.preset("2xh100+2xa100").outer  # type: ignore[attr-defined]
    graph = micro(traced(4, batch=8, d=64), 2)
    plan = pipeline(graph, 2, 2, inner=Mesh({"dp": 2}))
    named = predict_staged(graph, plan, Mixed("both", [slow, fast], outer))
    alike = [replace(part, name="here") for part in (slow, fast)]
    assert predict_staged(graph, plan, Mixed("both", alike, outer)).part_s == named.part_s


def test_a_place_on_two_kinds_is_refused_by_name() -> None:
    """So is a plan without stages that needs both."""
    graph = traced(2)
    cluster = Cluster.preset(TWO)
    with pytest.raises(ClusterError, match="ranks 0 to 3 stand on 2xh100 and 2xa100"):
        predict(graph, data_parallel(graph, Mesh({"dp": 4})), cluster)
    assert predict(graph, data_parallel(graph, Mesh({"dp": 2})), cluster).cluster.name == "2xh100"
    plan = pipeline(graph, 2, 1, inner=[Mesh({"dp": 3}), Mesh({"dp": 1})])
    with pytest.raises(ClusterError, match="a place must lie within one part"):
        predict_staged(graph, plan, cluster)


# --- cuts


@pytest.mark.parametrize("factor", [0.5, 0.25])
def test_stages_on_faster_devices_hold_more_layers_and_the_step_is_shorter(factor: float) -> None:
    """Cut evenly, two fast cores wait for two slow ones; cut by prices, all are busy."""
    cluster = cores(factor)
    graph = micro(traced(12, batch=16, d=64, tokens=32), 8)
    even = laminar.plans.pipeline(graph, 4, 8)
    known = laminar.plans.pipeline(graph, 4, 8, cluster=cluster)
    layers = layers_of(known)
    assert min(layers[:2]) > max(layers[2:])
    slow, fast = (predict_staged(graph, plan, cluster) for plan in (even, known))
    assert fast.seconds < 0.85 * slow.seconds
    works = stage_seconds(fast)
    assert max(works) < 1.2 * min(works)


def test_speeds_can_be_told_by_hand() -> None:
    """One number for each place; nonsense is refused by name."""
    graph = traced(8)
    plan = pipeline(graph, 2, 4, speeds=[3.0, 1.0])
    layers = layers_of(plan)
    assert layers[0] >= 2 * layers[1] > 0
    with pytest.raises(PlanError, match="1 speeds for 2 places"):
        pipeline(graph, 2, 4, speeds=[1.0])
    with pytest.raises(PlanError, match=r"speeds\[1\] is 0"):
        pipeline(graph, 2, 4, speeds=[1.0, 0.0])
    with pytest.raises(PlanError, match="has no seconds for op"):
        pipeline(graph, 2, 4, speeds=[1.0, {}])
    with pytest.raises(PlanError, match="stages that are named"):
        pipeline(graph, ["blocks.4"], 4, speeds=[1.0, 1.0])


# --- the search


@pytest.mark.slow
def test_the_search_uses_both_kinds_and_beats_the_plan_that_ignores_the_difference() -> None:
    """All four cores at work, each with what it can do; the same mesh and micro-batches cut evenly is slower."""
    cluster = cores(0.5)
    graph = traced(12, batch=32, d=128, tokens=32)
    plan = laminar.plan(graph, cluster, budget_s=20)
    assert isinstance(plan, Staged) and plan.ranks == 4
    assert plan.step_s is not None and plan.bound_s is not None and 0 < plan.bound_s <= plan.step_s
    part = micro(graph, plan.micro_batches)
    assert predict_staged(part, plan, cluster).seconds == pytest.approx(plan.step_s)
    meshes = [p.mesh for p in plan.places]
    ignores = pipeline(part, len(meshes), plan.micro_batches, inner=meshes)
    assert plan.step_s < predict_staged(part, ignores, cluster).seconds
    one_kind = laminar.plan(graph, "2xcpu", budget_s=10)
    assert one_kind.step_s is not None and plan.step_s < one_kind.step_s
    text = plan.explain()
    assert "stage" in plan.account["choice"]["plan"] and "No plan in space" in text
    assert any("unevenly among ranks of different kinds" in t for t in plan.account["certificate"]["outside"])


@pytest.mark.slow
def test_where_the_other_kind_is_of_no_use_it_stays_idle_and_the_account_says_so() -> None:
    """Devices at a hundredth of the speed are not worth a bubble."""
    plan = laminar.plan(traced(6, batch=16, d=64), cores(0.01), budget_s=10)
    assert plan.mesh.ranks == 2
    assert plan.account["uses"]["idle"] == 2 and plan.account["cluster"] == "2xcpu"
    assert "the others stay idle" in plan.explain()


def test_no_pipeline_over_two_kinds_is_simulated_faster_than_its_bound() -> None:
    """Cells of all shapes, cut as well as can be: what is proved must hold for each."""
    for cluster in (cores(0.5), Cluster.preset(TWO)):
        search = MixedSearch(traced(4, batch=16, d=64), Request(cluster))
        assert len(search.cells) > 20
        for cell in search.cells[:: len(search.cells) // 6]:
            guess = search.guess(cell)
            found = search.piped(guess) if guess is not None else None
            if found is not None:
                assert search.at[cell] <= found.ran.seconds, cell


def test_memory_is_a_limit_of_each_kind() -> None:
    """Slow cores with little room get fewer layers than their speed would give them, or nothing is found."""
    graph = traced(8, batch=16, d=128, tokens=32)
    cell = Sides((Side(1, 2, 1), Side(1, 2, 1)), 4)
    roomy = MixedSearch(graph, Request(cores(0.9)))
    guess = roomy.guess(cell)
    assert guess is not None
    wide = roomy.piped(guess)
    assert wide is not None
    room = 0.8 * wide.ran.peaks[1]
    tight = MixedSearch(graph, Request(cores(0.9, memory_bytes=room / (1 - MEMORY_MARGIN))))
    assert tight.rooms[1] == pytest.approx(room) and tight.rooms[0] == roomy.rooms[0]
    squeezed = tight.piped(replace(guess))
    assert squeezed is not None and squeezed.ran.peaks[1] <= room < wide.ran.peaks[1]
    assert layers_of(squeezed.plan)[1] < layers_of(wide.plan)[1]
    with pytest.raises(PlanError, match="no plan was found for fast and slow cores"):
        laminar.plan(graph, cores(0.9), memory_bytes=1e5, budget_s=0.5)


def test_a_mixed_plan_computes_what_one_device_computes() -> None:
    """It is an ordinary plan with stages; nothing that runs it has to know."""
    made = recipe("gpt.py:tiny")
    graph = specimen("gpt.py:tiny").graph
    plan = laminar.plan(graph, cores(0.5, 1, 1), pin={"stages": 2, "microbatches": 4}, budget_s=15)
    assert isinstance(plan, Staged) and [p.mesh.ranks for p in plan.places] == [1, 1]
    torch.manual_seed(0)
    assert laminar.verify(made.model(), made.loss, [next(iter(made.data()))], plan).ok


def test_mixed_clusters_are_known_to_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planned by name, by file and by hand; simulated from the plan's own cluster."""
    name, plan, here = str(EXAMPLES / "gpt.py:tiny"), str(tmp_path / "plan.json"), str(tmp_path / "here.json")
    options: list[Any] = ["--stages", "2", "--micro-batches", "2", "--cluster", "h100+a100", "-o", plan]
    assert main(["plan", name, *options]) == 0
    assert "places idle" in capsys.readouterr().out
    assert main(["simulate", plan, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"] == "h100+a100" and [p["device"] for p in found["places"]] == ["h100", "a100-80g"]
    cores(0.5, 1, 1).save(here)
    assert main(["plan", name, "--cluster", here, "--budget", "2", "-o", plan, "--json"]) == 0
    capsys.readouterr()
    assert main(["simulate", plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > 0


def test_a_core_is_a_device_with_a_name() -> None:
    """The helper above must not have changed what it slows down."""
    assert cpu().flops_per_s["f32"].value == 2 * cores(0.5).parts[1].device.flops_per_s["f32"].value

"""Plans for what is left of a cluster: arrangements that use it, and a former plan that shows the way."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import laminar
from laminar.errors import ClusterError, PlanError
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.clusters.mixed import without
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.account import Account, PredictedStep
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.placement import presets
from laminar.placement.micro_batch import micro
from laminar.planner.report.classify import form
from laminar.planner.search.replan import Former, Replan, arrangement, replanned
from laminar.planner.space.request import asking
from tests.support.traced_models import traced
from tests.support.zoo import recipe, specimen


@cache
def model() -> Graph:
    """A GPT whose batch no seven ranks can share."""
    return traced(8, batch=32, d=128, tokens=32)


@cache
def former() -> Plan | Staged:
    """What was found while all eight devices were there."""
    return laminar.plan(model(), "8xh100", budget_s=2)


def simulated(graph: Graph, plan: Plan | Staged, cluster: Cluster) -> float:
    """Seconds of a step, simulated afresh."""
    if isinstance(plan, Staged):
        return predict_staged(micro(graph, plan.micro_batches), plan, cluster).seconds
    return predict(graph, plan, cluster).seconds


@pytest.mark.slow
def test_a_device_is_lost_and_seven_go_on() -> None:
    """Seven is prime and divides no batch; the plan is simulated, fits, and says what it leaves idle and proves."""
    left = without(Cluster.preset("8xh100"), [3])
    plan = replanned(model(), former(), asking(left))
    assert plan.mesh.ranks <= 7 and plan.step_s is not None
    assert plan.step_s == pytest.approx(simulated(model(), plan, left))
    assert "nothing is proved" in plan.explain() and plan.bound_s is None
    assert plan.account["replanned"]["idle"] == 7 - plan.mesh.ranks
    if plan.mesh.ranks < 7:
        assert f"{7 - plan.mesh.ranks} of 7 devices stay idle" in plan.explain()
    # Splitting 32 samples by seven makes most of the work whole on every rank: that is what it must beat.
    seven = presets.data_parallel(model(), Mesh({"dp": 7}))
    assert plan.step_s < predict(model(), seven, left).seconds


def test_the_public_name_goes_on_without_what_is_lost() -> None:
    """The plan's own cluster and memory unless told otherwise; the same plan as by hand."""
    by_hand = replanned(model(), former(), asking(without(Cluster.preset("8xh100"), [3])))
    plan = laminar.replan(model(), former(), lost=[3])
    assert plan.hash == by_hand.hash and plan.account["replanned"]["former"] == former().hash
    left = Cluster.preset("8xh100").without([3])
    assert laminar.replan(model(), former(), cluster=left).hash == plan.hash
    assert laminar.replan(model(), former(), lost=[0, 1], cluster="4xh100").account["devices"] == 2
    with pytest.raises(PlanError, match="nothing is lost"):
        laminar.replan(model(), former())
    with pytest.raises(ClusterError, match="device 8 is not in 8xh100"):
        laminar.replan(model(), former(), lost=[8])


def test_what_is_left_has_the_memory_that_was_asked_for() -> None:
    """A limit of the search is one of the plan that follows it, unless another is given."""
    limited = laminar.plan(model(), "8xh100", budget_s=0.5, memory_bytes=4e9)
    plan = laminar.replan(model(), limited, lost=[7])
    assert plan.account["request"]["memory_bytes"] == 4e9 and plan.account["request"]["margin"] is None
    assert laminar.replan(model(), limited, lost=[7], margin=0.5).account["request"]["memory_bytes"] is None
    with pytest.raises(PlanError, match="nothing like the former plan fits"):
        laminar.replan(model(), limited, lost=[7], memory_bytes=1e4)


def test_arrangements_use_seven_six_or_four_of_seven_devices() -> None:
    """Meshes that divide the batch: one of four, equal stages, and stages whose meshes halve."""
    found = Replan(model(), former(), asking(Cluster.preset("7xh100"))).options()
    assert {o.used for o in found} >= {4, 6, 7}
    ways = {tuple((s.stages, s.dp) for s in o.guess.cell.sides) for o in found if o.guess is not None}
    assert {((7, 1),), ((3, 2),), ((1, 4), (1, 2), (1, 1))} <= ways
    for option in found:
        if option.guess is not None:
            cell = option.guess.cell
            assert all(32 // cell.micro_batches % side.dp == 0 for side in cell.sides)


def test_stages_whose_meshes_halve_have_layers_in_proportion() -> None:
    """Four ranks work four times as fast as one, and hold about four times as much."""
    search = Replan(model(), former(), asking(Cluster.preset("7xh100")))
    option = min((o for o in search.options() if o.guess and len(o.guess.cell.sides) == 3), key=lambda o: o.seconds)
    found = search.simulated(option)
    assert found is not None and isinstance(found[0], Staged)
    assert [p.mesh.ranks for p in found[0].places] == [4, 2, 1]
    held = [sum(n.endswith("up.weight") for n in s.plan.inputs) for s in found[0].stages]
    assert held[0] > held[1] >= held[2]


def test_a_device_of_a_large_cluster_is_lost_and_places_stay_inside_nodes() -> None:
    """63 of 64: seven whole nodes and a smaller one, between which no place lies."""
    whole = Cluster.preset("4x4xh100")
    graph = traced(6, batch=64, d=64)
    before = laminar.plan(graph, whole, budget_s=2)
    for lost, name in [([15], "3x4xh100+3xh100"), ([12, 13, 14, 15], "3x4xh100"), ([0], "3xh100+3x4xh100")]:
        left = without(whole, lost)
        assert left.name == name
        plan = replanned(graph, before, asking(left))
        used = Cluster.preset(plan.account["cluster"])
        assert plan.step_s == pytest.approx(simulated(graph, plan, used))
        assert plan.mesh.ranks + plan.account["replanned"]["idle"] == left.devices


def test_a_former_plan_is_read_from_what_it_does() -> None:
    """Axes may be called anything: data parallel over two of them has no tensor parallel ranks."""
    graph = traced(4, d=64)
    plan = presets.tensor_parallel(graph, Mesh({"dp": 2, "tp": 2}), recompute="blocks.*")
    found = Former.of(plan)
    assert (found.ranks, found.tp, found.recompute, found.plain) == (4, 2, True, True)
    step = PredictedStep(step_s=1.0, step_low_s=0.9, step_high_s=1.1, peak_bytes=1, cluster="4xh100")
    known = replace(form(plan, graph), tensor=1, zero=3)
    found = Former.of(replace(plan, account=Account(form=known, step=step)))
    assert (found.tp, found.zero, found.step_s) == (1, 3, 1.0)


def test_a_search_on_odd_devices_is_never_worse_than_leaving_some_idle() -> None:
    """`laminar.plan` looks at such arrangements too; what it proves is about the space it searched."""
    graph = model()
    left = Cluster.preset("7xh100")
    other = arrangement(graph, asking(left))
    plan = laminar.plan(graph, left, budget_s=2)
    assert other is not None and other.step_s is not None and plan.step_s is not None
    assert plan.step_s <= other.step_s
    assert plan.bound_s is not None and plan.bound_s <= plan.step_s
    assert arrangement(graph, asking(Cluster.preset("8xh100"))) is None
    assert arrangement(graph, asking(Cluster.preset("7xh100"), pin={"tp": 7})) is None


def test_what_does_not_fit_any_more_says_so() -> None:
    """Seven devices with next to no memory: an error with the next step, not a plan that can't run."""
    with pytest.raises(PlanError, match="nothing like the former plan fits on 7xh100"):
        replanned(model(), former(), asking(Cluster.preset("7xh100"), memory_bytes=1e4))


def test_a_replanned_step_computes_what_one_device_computes() -> None:
    """Three of four ranks are left, and a batch of eight."""
    made = recipe("gpt.py:tiny")
    graph = specimen("gpt.py:tiny").graph
    before = laminar.plan(graph, "4xcpu", budget_s=1)
    plan = replanned(graph, before, asking(without(Cluster.preset("4xcpu"), [3])))
    assert plan.mesh.ranks <= 3
    torch.manual_seed(0)
    assert laminar.verify(made.model(), made.loss, [next(iter(made.data()))], plan).ok


def test_a_mixed_cluster_that_lost_a_device_is_planned_anew() -> None:
    """Each kind keeps its stages; the part that has lost one has other meshes."""
    graph = traced(6, batch=16, d=64)
    whole = Cluster.preset("2xh100+2xa100")
    before = laminar.plan(graph, whole, pin={"stages": 2, "microbatches": 4}, budget_s=2)
    plan = replanned(graph, before, asking(without(whole, [3])))
    assert isinstance(plan, Staged) and plan.ranks == 3
    assert plan.step_s == pytest.approx(simulated(graph, plan, Cluster.preset("2xh100+1xa100")))

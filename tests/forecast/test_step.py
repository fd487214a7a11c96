"""Predictions: what a plan's account says, how it is known, and that edits of real plans are simulated exactly."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

import laminar
from laminar.cost.calibrate import Calibration
from laminar.cost.schedule import schedule
from laminar.cost.sim.delta import again
from laminar.cost.sim.simulate import simulate
from laminar.errors import ClusterError
from laminar.forecast.features import ddp_features, step_features
from laminar.forecast.step import Prediction, machine, predict, section_of, with_prediction
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Choice, Plan
from laminar.lower.step import step_programs
from laminar.placement import presets
from laminar.rules.notation import call_of
from laminar.rules.signing import blocks_in, options, probed_signatures
from tests.support.zoo import FEW, specimen

PLANS = {
    "data": lambda g, n: presets.data_parallel(g, Mesh({"dp": n})),
    "zero1": lambda g, n: presets.zero(g, Mesh({"dp": n}), 1),
    "zero3": lambda g, n: presets.zero(g, Mesh({"dp": n}), 3),
    "tensor": lambda g, n: presets.tensor_parallel(g, Mesh({"tp": n})),
}


@cache
def graph_of(name: str) -> Graph:
    return specimen(name, "f32").graph


@cache
def forecast(name: str, plan: str, cluster: str) -> Prediction:
    graph, machine = graph_of(name), Cluster.preset(cluster)
    return predict(graph, PLANS[plan](graph, machine.devices), machine)


@pytest.mark.parametrize("cluster", ["2xcpu", "2xh100", "2x1xa100@eth100"])
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("name", ["gpt.py:tiny", "resnet.py:tiny", "dlrm.py:tiny", "moe.py:tiny"])
def test_every_plan_is_predicted_on_every_kind_of_machine(name: str, plan: str, cluster: str) -> None:
    """Without any of them: seconds within their interval, parts that add up, memory at least what is stored."""
    found = forecast(name, plan, cluster)
    low, high = found.interval_s
    assert 0 < low < found.seconds < high
    line = found.timeline
    parts = line.breakdown()
    total = sum(sum(v.values()) if isinstance(v, dict) else v for k, v in parts.items() if k not in ("step", "hidden"))
    assert total == pytest.approx(parts["step"], abs=1) and line.step_ns == found.times.step
    assert found.memory.peak_bytes >= found.memory.parameters + found.memory.state
    assert sum(found.known().values()) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("name", FEW)
def test_the_whole_zoo_is_predicted_on_gpus_and_cores(name: str) -> None:
    """Ops nobody thought of have a price too."""
    assert forecast(name, "data", "2xcpu").seconds > 0
    assert forecast(name, "data", "2xh100").seconds > 0


def test_slower_links_never_make_a_step_faster() -> None:
    """The same plan over Ethernet, InfiniBand and NVLink."""
    by = [forecast("gpt.py:tiny", "data", c).seconds for c in ("2xh100", "2x1xh100@ib400", "2x1xh100@eth10")]
    assert by == sorted(by) and by[0] < by[2]


def test_a_plan_says_what_it_will_take_and_how_that_is_known() -> None:
    """`plan.explain()` gains seconds and bytes with their interval; the decision stays the same decision."""
    graph = graph_of("gpt.py:tiny")
    bare = laminar.plans.data_parallel(graph, Mesh({"dp": 8}))
    plan = with_prediction(graph, bare, Cluster.preset("8xh100"))
    assert plan.hash == bare.hash and plan.step_s and plan.peak_bytes
    text = plan.explain()
    assert f"{plan.step_s * 1e3:.3f} ms predicted" in text and "90 %" in text and f"{plan.peak_bytes:,} bytes" in text
    assert "roofline" in text, "nothing was measured, and it says so"
    assert Plan.from_json(plan.to_json()).explain() == text


def test_nothing_is_called_measured_on_a_machine_that_nobody_measured() -> None:
    """A preset's launch overhead is a figure from somewhere else, however many launches a step has."""
    assert "measured" not in forecast("gpt.py:tiny", "data", "2x1xa100@eth100").known()


def test_more_ranks_than_devices_are_refused() -> None:
    """A plan for eight ranks has no time on one GPU."""
    graph = graph_of("mlp.py:tiny")
    with pytest.raises(ClusterError, match="8 ranks"):
        predict(graph, presets.data_parallel(graph, Mesh({"dp": 8})), Cluster.preset("h100"))


def test_a_calibration_is_used_where_there_is_one_and_its_error_is_the_interval() -> None:
    """Constants of a section serve that section only."""
    graph, cluster = graph_of("mlp.py:tiny"), Cluster.preset("4xcpu")
    fit = Calibration({"compute": 2.0, "memory": 2.0}, {"lines": 1e-5}, sigma=0.05, models=("a", "b"))
    section = section_of(cluster, 2)
    known = cluster.with_profile({"calibration": {section: fit.to_json()}})
    two = presets.data_parallel(graph, Mesh({"dp": 2}))
    before, after = predict(graph, two, cluster), predict(graph, two, known)
    assert after.seconds > before.seconds + 1e-5 * 10 and after.sigma == 0.05 < before.sigma
    four = presets.data_parallel(graph, Mesh({"dp": 4}))
    assert predict(graph, four, known).seconds == predict(graph, four, cluster).seconds


def test_features_add_up_to_the_uncalibrated_step() -> None:
    """What is fitted must be what is predicted: on ranks that share memory nothing overlaps."""
    graph, cluster = graph_of("gpt.py:tiny"), Cluster.preset("2xcpu")
    for name, make in PLANS.items():
        plan = make(graph, 2)
        bare = machine(cluster, plan.mesh, calibrated=False)
        parts = step_features(graph, plan, bare)
        total = sum(parts[k] for k in ("compute", "memory", "update", "exchange", "wire"))
        assert predict(graph, plan, cluster, prices=bare).seconds <= total * (1 + 1e-6), name
        assert predict(graph, plan, cluster, prices=bare).seconds == pytest.approx(total, rel=0.35), name
    found = ddp_features(graph, PLANS["data"](graph, 2), machine(cluster, Mesh({"dp": 2}), calibrated=False))
    assert found["eager_exchange"] > 0 and found["eager_lines"] > 50


@pytest.mark.parametrize("cluster", ["4xcpu", "2x2xh100@eth100"])
@pytest.mark.parametrize("name", ["gpt.py:tiny", "resnet.py:tiny", "mlp.py:tiny"])
def test_another_placement_of_one_op_is_simulated_by_delta_as_in_full(name: str, cluster: str) -> None:
    """The edit a search makes: one op reads and makes its tensors another way, and lowering follows."""
    graph, there = graph_of(name), Cluster.preset(cluster)
    mesh = Mesh({"dp": 2, "tp": 2})
    plan = presets.tensor_parallel(graph, mesh)
    prices = machine(there, mesh)
    rng = random.Random(7)
    blocks, probed = blocks_in(graph), probed_signatures(graph)

    def load(p: Plan):  # type: ignore[no-untyped-def]
        program, then = step_programs(graph, p)
        return schedule(program, prices, there, then).load

    before, reused = simulate(load(plan)), 0
    edits = 0
    while edits < 12:
        node = rng.choice(graph.nodes)
        call = call_of(node, graph.specs)
        found = options(call, 2, blocks, probed.get(node.name, ()))
        if len(found) < 2:
            continue
        pick, old = rng.choice(found), plan.ops[node.name]
        ins = tuple((pick.ins[i], *nd[1:]) for i, nd in enumerate(old.ins))
        outs = tuple((pick.outs[i], *nd[1:]) for i, nd in enumerate(old.outs))
        try:
            new = load(replace(plan, ops={**plan.ops, node.name: Choice(ins, outs)}))
        except laminar.LaminarError:  # this way does not fit the other axis
            continue
        edits += 1
        fast, slow = again(before, new), simulate(new)
        assert fast.same(slow), f"{node.name}: {old} to {Choice(ins, outs)}"
        reused += fast.how["copied"] > 0
    assert reused >= (6 if name == "gpt.py:tiny" else 1), "most edits of a long step leave most of it as it was"

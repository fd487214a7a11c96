"""A job that searches its own plan: rank 0 searches, everybody trains with what it found, as plain PyTorch would."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar import events
from laminar.cli import main
from laminar.errors import LaminarError
from laminar.train.auto import plan_search
from tests.support.marks import slow
from tests.support.rank_pool import Ranks
from tests.support.small_job import adamw, batches, gap, mean, net, plain
from tests.support.zoo import EXAMPLES

HERE = str(Path(__file__).parents[2] / "bench" / "results" / "profile_2.json")


def _trained(micro_batches: int) -> tuple[str, dict[str, Any], list[float], float]:
    model, data = net(), batches(4, samples=8)
    other = copy.deepcopy(model)
    job = laminar.parallelize(model, mean, adamw(model), batch=data[0], cluster=HERE, micro_batches=micro_batches)
    losses = [job.step(b).loss for b in data]
    want = plain(other, mean, adamw(other), data)
    assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 1e-9
    keep = [k for k in other.state_dict() if k != "seen"]
    state, there = job.state_dict(), other.state_dict()
    apart = gap({k: state[k] for k in keep}, {k: there[k] for k in keep})
    out = job.plan.hash, job.plan.account, losses, apart
    job.close()
    return out


@pytest.mark.parametrize("micro_batches", [slow(1), 2])
def test_all_ranks_train_with_the_plan_that_one_of_them_found(two: Ranks, micro_batches: int) -> None:
    """The same plan everywhere, searched for this machine, and the weights of plain PyTorch."""
    (first, account, losses, apart), (second, _, others, _) = two.run(_trained, micro_batches)
    assert first == second and losses == others and apart < 1e-8
    assert "measured" in account or "slower" in account["unmeasured"]
    if micro_batches == 1:
        assert account["certificate"]["bound_s"] <= account["certificate"]["step_s"]


def test_a_machine_of_another_size_is_cut_or_refused() -> None:
    """A job may use fewer ranks than a machine has, not more."""
    model, data = net(), batches(1, samples=8)
    assert laminar.parallelize(model, mean, adamw(model), batch=data[0], cluster=HERE).plan.mesh.ranks == 1
    with pytest.raises(LaminarError, match="4 devices can't be made of"):
        plan_search.cluster_of(HERE, 4)
    with pytest.raises(LaminarError, match="what a plan is searched for"):
        laminar.parallelize(model, mean, adamw(model), batch=data[0], cluster=HERE, plan="data")


def test_a_plan_function_that_ignores_its_mesh_is_refused() -> None:
    """A plan for two ranks would otherwise run on one, with pieces of the wrong size."""
    model, data = net(), batches(1, samples=8)

    def elsewhere(graph: laminar.Graph, mesh: laminar.Mesh) -> laminar.Plan:
        return laminar.plans.data_parallel(graph, laminar.Mesh({"dp": 2}))

    with pytest.raises(LaminarError, match="plan for the mesh it is given"):
        laminar.parallelize(model, mean, adamw(model), batch=data[0], plan=elsewhere)


@pytest.mark.slow
def test_the_command_line_searches_too(tmp_path: Path) -> None:
    """`laminar train --cluster` starts as many ranks as the cluster has, and saves the plan that it found."""
    run = tmp_path / "run"
    assert main(["train", str(EXAMPLES / "mlp.py:tiny"), "--cluster", HERE, "--steps", "3", "--run-dir", str(run)]) == 0
    saved = json.loads((run / "plan.json").read_text())
    assert saved["account"]["certificate"]["cells"]["looked_at"] > 0
    (told,) = [e.fields for e in events.read_events(run / "events.jsonl") if e.kind == "measured"]
    assert told["done"] == ("measured" in saved["account"]) != ("unmeasured" in saved["account"])
    run = tmp_path / "other"
    asked = ["train", str(EXAMPLES / "mlp.py:tiny"), "--cluster", HERE, "--steps", "1", "--run-dir", str(run)]
    assert main([*asked, "--no-measure"]) == 0
    assert not [e for e in events.read_events(run / "events.jsonl") if e.kind == "measured"]

"""The plan that a search finds for the job at hand: by rank 0, for everybody.

Searches are bounded by time, so two ranks may find two plans; one of them searches and leaves its plan in the store.
What comes next to it is told as well: where it costs little, all ranks try these plans out before the job begins
(`try_finalists.py`). Plans with stages are made by another kind of job and are left out: find them with `laminar
plan`, and hand in the file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from laminar.capture.capture import capture
from laminar.capture.model.batches import unflatten
from laminar.events import emit
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.plans.plan import Plan
from laminar.planner.search.entry import best
from laminar.planner.search.finalists import DDP, Finalist, as_ddp, finalists
from laminar.planner.search.what_if import resized
from laminar.planner.space.request import DIMENSIONS, asking
from laminar.runtime.check.probe_rules import probe
from laminar.train.auto import try_finalists
from laminar.train.auto.ddp_fits import why_not
from laminar.train.batch.leaves import Leaves
from laminar.train.job.job import refuse_unmade
from laminar.train.optimizer.precision import Precision
from laminar.train.options import JobOptions
from laminar.train.state.sharded_model import released
from laminar.train.world import World

BUDGET_S = 10.0
"""Processor seconds that a search may take before a job begins."""


def cluster_of(given: Cluster | str, ranks: int) -> Cluster:
    """A cluster, its file or its name; of one with more devices than there are ranks, so many."""
    cluster = Cluster.named(given) if isinstance(given, str) else given
    return cluster if cluster.devices == ranks else resized(cluster, ranks)


def begun(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    batch: Any,
    cluster: Cluster | str,
    options: JobOptions,
    measure: bool,
) -> tuple[World, Plan]:
    """The ranks, which meet here, and the plan for their job."""
    refuse_unmade(model)
    world = World(options.device, options.timeout_s)
    emit("phase", name="preparing")
    released(model)
    here = cluster_of(cluster, world.size)
    plan = planned(world, here, model, loss, optimizer, batch, options, measure)
    return world, plan


def planned(
    world: World,
    cluster: Cluster,
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    batch: Any,
    options: JobOptions,
    measure: bool,
) -> Plan:
    """The plan for a job, searched and, unless it is told not to `measure`, tried out; all ranks get the same."""
    precision = Precision.of(options.precision)
    leaves = Leaves.of(batch).mapped(precision.leaf).split(options.micro_batches)[0]
    why = _elsewhere(world, cluster, options.compiles(world.device)) if measure else ""
    found = searched(
        world,
        cluster,
        model,
        precision.around(loss, world.device),
        leaves,
        finals=measure and not why,
        no_ddp="it does not look for anomalies" if options.detect_anomaly else "",
        precision=precision,
    )
    plan = found.plan
    if measure and why:
        plan = try_finalists.untried(plan, why)
    elif measure:
        plan = try_finalists.tried_finalists(
            world,
            plan,
            found.finals,
            model,
            loss,
            optimizer,
            batch,
            capture_s=found.capture_s,
            left_out=found.left_out,
            options=options,
        )
    return plan if world.size == 1 else replace(plan, origin=None)


@dataclass(frozen=True)
class Searched:
    """What rank 0 found, as every rank has it."""

    plan: Plan
    """On rank 0 with its origin."""
    finals: list[Finalist]
    """It and those that come next, where they are wanted."""
    capture_s: float
    """What it took to capture the model."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Who is no finalist, and why."""


def searched(
    world: World,
    cluster: Cluster,
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    leaves: Leaves,
    optimizer: str = "adamw",
    finals: bool = False,
    no_ddp: str = "",
    precision: Precision | None = None,
) -> Searched:
    """The fastest plan without stages for such a (micro-)batch on a cluster; all ranks call this, and get the same."""
    here: list[Searched] = []

    def search() -> Any:
        found = _found(cluster, model, loss, leaves, optimizer, finals)
        if finals:
            found = with_ddp(found, model, precision or Precision.of("f32"), no_ddp)
        here.append(found)
        return {
            "plan": found.plan.to_json(),
            "finals": [each.to_json() for each in found.finals],
            "capture_s": found.capture_s,
            "left_out": found.left_out,
        }

    said = world.told("plan", search)
    if here:
        return here[0]
    others = [Finalist.from_json(each) for each in said["finals"]]
    return Searched(Plan.from_json(said["plan"]), others, said["capture_s"], said["left_out"])


def _found(
    cluster: Cluster, model: nn.Module, loss: Callable[[Any, Any], Any], leaves: Leaves, optimizer: str, finals: bool
) -> Searched:
    emit("phase", name="searching a plan")
    start = time.perf_counter()
    graph = probe(capture(model, loss, unflatten(json.loads(leaves.tree), leaves.tensors), wide=True))
    capture_s = time.perf_counter() - start
    only = [d for d in DIMENSIONS if d != "pipeline"]
    found = best(graph, asking(cluster, None, BUDGET_S, optimizer, None, only))
    assert isinstance(found, Plan)
    others = [f for f in finalists(found) if isinstance(f.plan, Plan)] if finals else []
    return Searched(found, others, capture_s)


def with_ddp(found: Searched, model: nn.Module | None, precision: Precision, why: str = "") -> Searched:
    """The same with torch's own data parallel as the last finalist; or, unless told, why that is none."""
    assert found.plan.origin is not None
    why = why or why_not(found.plan.origin.graph, precision, model)
    side = None if why else as_ddp(found.plan)
    if side is None:
        return replace(found, left_out={**found.left_out, DDP: why or "samples can't be spread over ranks"})
    return replace(found, finals=[*found.finals, side])


def _elsewhere(world: World, cluster: Cluster, compiles: bool) -> str:
    """Why plans for this cluster can't be tried out on these ranks, known before anything is searched."""
    kinds = {part.device.kind for part in cluster.parts}
    here = "gpu" if world.device.type == "cuda" else world.device.type
    if world.size == 1:
        return "there is one rank"
    if kinds != {here}:
        return f"{cluster.name} is another machine: these ranks are on a {here}"
    if len(cluster.parts) > 1:
        return f"{cluster.name} has parts that differ"
    if compiles:
        return "steps are compiled, which takes longer than trying a plan out may"
    return ""

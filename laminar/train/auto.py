"""The plan that a search finds for the job at hand: by rank 0, for everybody.

Searches are bounded by time, so two ranks may find two plans; one of them searches and leaves its plan in the store.
Plans with stages are made by another kind of job and are left out: find them with `laminar plan`, and hand in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import nn

from laminar.capture.batches import unflatten
from laminar.capture.capture import capture
from laminar.errors import LaminarError, PlanError, RankError
from laminar.events import emit
from laminar.ir.cluster import Cluster
from laminar.ir.plan import Plan
from laminar.planner.best import best
from laminar.planner.request import DIMENSIONS, asking
from laminar.planner.whatif import resized
from laminar.runtime.probe import probe
from laminar.train.engine import Leaves
from laminar.train.world import World

BUDGET_S = 10.0
"""Processor seconds that a search may take before a job begins."""


def cluster_of(given: Cluster | str, ranks: int) -> Cluster:
    """A cluster, its file or its name; of one with more devices than there are ranks, so many."""
    cluster = Cluster.named(given) if isinstance(given, str) else given
    return cluster if cluster.devices == ranks else resized(cluster, ranks)


def searched(
    world: World,
    cluster: Cluster,
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    leaves: Leaves,
    optimizer: str = "adamw",
) -> Plan:
    """The fastest plan without stages for such a (micro-)batch on a cluster; all ranks call this, and get the same."""
    if world.size == 1:
        return _found(cluster, model, loss, leaves, optimizer)
    assert world.store is not None
    slot = world.meeting("plan")
    said: dict[str, Any]
    if world.rank == 0:
        try:
            said = {"plan": _found(cluster, model, loss, leaves, optimizer).to_json()}
        except LaminarError as error:
            said = {"error": str(error)}
        world.store.set(slot, json.dumps(said))
    else:
        try:
            world.store.wait([slot], timedelta(seconds=world.timeout_s))
        except Exception as error:
            raise RankError(f"rank 0 found no plan within {world.timeout_s:.0f} s") from error
        said = json.loads(world.store.get(slot))
    if "error" in said:
        raise PlanError(said["error"])
    return Plan.from_json(said["plan"])


def _found(cluster: Cluster, model: nn.Module, loss: Callable[[Any, Any], Any], leaves: Leaves, optimizer: str) -> Plan:
    emit("phase", name="searching a plan")
    graph = probe(capture(model, loss, unflatten(json.loads(leaves.tree), leaves.tensors), wide=True))
    only = [d for d in DIMENSIONS if d != "pipeline"]
    found = best(graph, asking(cluster, None, BUDGET_S, optimizer, None, only))
    assert isinstance(found, Plan)
    return found

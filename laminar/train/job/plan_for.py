"""Which plan: by name, from a file, from a function, or the one that is there already."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from laminar.errors import MeshError, PlanError
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import load_plan
from laminar.placement import presets
from laminar.rewrite.variants import carrying, replayed
from laminar.train.options import PLANS

FULL_SHARE = 0.6
"""Share of a device that weights, gradients and Adam's state may fill before "auto" keeps them in shards."""


def mesh_for(plan: Any, mesh: Mesh | None, world: int) -> Mesh:
    """The mesh of a plan, which must have as many ranks as there are."""
    if isinstance(plan, Plan):
        if mesh is not None and mesh != plan.mesh:
            raise MeshError(f"the plan is for {plan.mesh}, not for {mesh}", next="leave the mesh to the plan")
        mesh = plan.mesh
    mesh = mesh or Mesh({{"tensor": "tp", "context": "cp"}.get(plan, "dp") if isinstance(plan, str) else "dp": world})
    if mesh.ranks != world:
        raise MeshError(
            f"{mesh} has {mesh.ranks} ranks, the world has {world}",
            next=f"start {mesh.ranks} processes, or use a mesh of {world}",
        )
    return mesh


def loaded(plan: Any) -> Any:
    """A plan from its file, if a file is named; a name in today's spelling; anything else as it is."""
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        return load_plan(plan)
    name = presets.SPELLINGS.get(plan, plan) if isinstance(plan, str) else plan
    if isinstance(name, str) and name not in PLANS:
        raise PlanError(f"there is no plan {plan!r}", allowed="  ".join(PLANS) + "  a plan.json")
    return name


def chosen(plan: Any, graph: Graph, mesh: Mesh, device: torch.device) -> Plan:
    """The plan for a graph. A plan made for another graph of the model keeps its decisions about what stays."""
    if isinstance(plan, Plan):
        from laminar.planner.search.batch_size import fitted  # and the planner with it, which takes a while to load

        names = {i.name: i.spec for i in graph.of_kind("param")}
        missing = [n for n in names if n not in plan.inputs]
        if missing:
            raise PlanError(
                f"plan {plan.hash[:12]} does not place parameter {missing[0]}", next="make the plan from this model"
            )
        plan_here = fitted(graph, plan)
        if graph.hash in (plan_here.graph_hash, plan_here.captured_hash):
            return plan_here
        made, steps = replayed(graph, plan.rewrites)
        here = carrying(presets.like(made, plan), graph, steps)
        measured, unmeasured = plan.account.measured, plan.account.unmeasured
        return replace(here, account=replace(here.account, measured=measured, unmeasured=unmeasured))
    if callable(plan):
        made = plan(graph, mesh)
        if not isinstance(made, Plan):
            raise PlanError(f"the plan function returned a {type(made).__name__}", allowed="a laminar.Plan")
        if made.mesh != mesh:
            raise MeshError(
                f"the plan function was given {mesh} and returned a plan for {made.mesh}",
                next="plan for the mesh it is given",
            )
        return made
    if plan == "auto":
        plan = "zero3" if mesh.ranks > 1 and _state_bytes(graph) > FULL_SHARE * _room_bytes(device) else "data"
    return presets.preset_plan(plan, graph, mesh)


def _state_bytes(graph: Graph) -> int:
    """Weights, and for trained ones a gradient and Adam's two moments."""
    return sum((4 if i.trainable else 1) * i.spec.nbytes for i in graph.of_kind("param"))


def _room_bytes(device: torch.device) -> int:
    """Memory of the device, this rank's share of it where ranks share."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1]) // max(1, here // torch.cuda.device_count())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // here

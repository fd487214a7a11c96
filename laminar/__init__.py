"""Train an ordinary PyTorch model on many devices as if they were one.

Public names are resolved when first used, so that planning never loads torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from laminar.ir.clusters.maker_hook import clusters_made_by
from laminar.ir.plans.answers import answered_by

__version__ = "0.1.0"

_WHERE = {
    "B": "laminar.ir.sbp",
    "BatchError": "laminar.errors",
    "Callback": "laminar.train.loop",
    "CaptureError": "laminar.errors",
    "Cluster": "laminar.ir.clusters.cluster",
    "CheckpointError": "laminar.errors",
    "ClusterError": "laminar.errors",
    "Exact": "laminar.ir.exact",
    "DataError": "laminar.errors",
    "Graph": "laminar.ir.graph",
    "GraphError": "laminar.errors",
    "Job": "laminar.train.job.job",
    "LaminarError": "laminar.errors",
    "Link": "laminar.ir.mesh",
    "Local": "laminar.train.batch.leaves",
    "Loss": "laminar.capture.model.losses",
    "Mesh": "laminar.ir.mesh",
    "MeshError": "laminar.errors",
    "NoPlanFits": "laminar.errors",
    "NoRuleError": "laminar.errors",
    "NonFiniteError": "laminar.errors",
    "OptimizerError": "laminar.errors",
    "OutOfMemoryError": "laminar.errors",
    "P": "laminar.ir.sbp",
    "PeerError": "laminar.errors",
    "PlacementError": "laminar.errors",
    "Plan": "laminar.ir.plans.plan",
    "PlanError": "laminar.errors",
    "Program": "laminar.ir.program",
    "RankError": "laminar.errors",
    "Rebalance": "laminar.train.auto.rebalance",
    "Recipe": "laminar.api",
    "RecipeError": "laminar.errors",
    "RendezvousError": "laminar.errors",
    "S": "laminar.ir.sbp",
    "SimulationError": "laminar.errors",
    "Sized": "laminar.train.batch.leaves",
    "CheckError": "laminar.errors",
    "StateError": "laminar.errors",
    "StorageError": "laminar.errors",
    "StoppedError": "laminar.errors",
    "TensorSpec": "laminar.ir.tensor",
    "Timeline": "laminar.ir.timeline",
    "TimelineError": "laminar.errors",
    "capture": "laminar.api",
    "eager": "laminar.capture.eager.eager",
    "load_recipe": "laminar.api",
    "lower": "laminar.lower.lower",
    "parallelize": "laminar.api",
    "plan": "laminar.api",
    "plans": "laminar.api",
    "predict": "laminar.forecast.step",
    "replan": "laminar.api",
    "rewritten": "laminar.rewrite.variants",
    "verify": "laminar.api",
}
__all__ = [
    "B",
    "BatchError",
    "Callback",
    "CaptureError",
    "CheckError",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "DataError",
    "Exact",
    "Graph",
    "GraphError",
    "Job",
    "LaminarError",
    "Link",
    "Local",
    "Loss",
    "Mesh",
    "MeshError",
    "NoPlanFits",
    "NoRuleError",
    "NonFiniteError",
    "OptimizerError",
    "OutOfMemoryError",
    "P",
    "PeerError",
    "PlacementError",
    "Plan",
    "PlanError",
    "Program",
    "RankError",
    "Rebalance",
    "Recipe",
    "RecipeError",
    "RendezvousError",
    "S",
    "SimulationError",
    "Sized",
    "StateError",
    "StoppedError",
    "StorageError",
    "TensorSpec",
    "Timeline",
    "TimelineError",
    "capture",
    "checkpoint",
    "data",
    "eager",
    "load_recipe",
    "lower",
    "parallelize",
    "plan",
    "plans",
    "predict",
    "replan",
    "rewritten",
    "verify",
]


def _tame_onednn() -> None:
    """bf16 products die with SIGILL under some hypervisors that announce AVX512-BF16 or AMX but trap it.

    oneDNN reads this variable when torch loads, so it must be set before. A user's own value stands.
    """
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return
    if "hypervisor" in flags and ("avx512_bf16" in flags or "amx_tile" in flags):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")


_tame_onednn()


def _cluster_makers() -> Any:
    """`Cluster.preset`, `Cluster.detect` and whatever else makes clusters of something else."""
    return import_module("laminar.profile.detect")


clusters_made_by(_cluster_makers)


def _planner_answers() -> Any:
    """The planner answers questions about plans: `plan.explain()`, `plan.why(...)`."""
    return import_module("laminar.planner.answers").ANSWERS


answered_by(_planner_answers)


class _Front(ModuleType):
    """This module, with `capture` and `lower` naming the functions though rooms are called so too.

    Importing a room sets it as an attribute of its package; these two properties take precedence.
    """

    @property
    def capture(self) -> Any:
        """`laminar.api.capture`."""
        return import_module("laminar.api").capture

    @capture.setter
    def capture(self, room: Any) -> None: ...

    @property
    def lower(self) -> Any:
        """`laminar.lower.lower.lower`."""
        return import_module("laminar.lower.lower").lower

    @lower.setter
    def lower(self, room: Any) -> None: ...


sys.modules[__name__].__class__ = _Front


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "data"):  # rooms that are public as a whole
        return import_module(f"laminar.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'laminar' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from laminar import checkpoint as checkpoint
    from laminar import data as data
    from laminar.api import Recipe, capture, load_recipe, parallelize, plan, plans, replan, verify
    from laminar.capture.eager.eager import eager
    from laminar.capture.model.losses import Loss
    from laminar.errors import (
        BatchError,
        CaptureError,
        CheckError,
        CheckpointError,
        ClusterError,
        DataError,
        GraphError,
        LaminarError,
        MeshError,
        NonFiniteError,
        NoPlanFits,
        NoRuleError,
        OptimizerError,
        OutOfMemoryError,
        PeerError,
        PlacementError,
        PlanError,
        RankError,
        RecipeError,
        RendezvousError,
        SimulationError,
        StateError,
        StoppedError,
        StorageError,
        TimelineError,
    )
    from laminar.forecast.step import predict
    from laminar.ir.clusters.cluster import Cluster
    from laminar.ir.exact import Exact
    from laminar.ir.graph import Graph
    from laminar.ir.mesh import Link, Mesh
    from laminar.ir.plans.plan import Plan
    from laminar.ir.program import Program
    from laminar.ir.sbp import B, P, S
    from laminar.ir.tensor import TensorSpec
    from laminar.ir.timeline import Timeline
    from laminar.lower.lower import lower
    from laminar.rewrite.variants import rewritten
    from laminar.train.auto.rebalance import Rebalance
    from laminar.train.batch.leaves import Local, Sized
    from laminar.train.job.job import Job
    from laminar.train.loop import Callback

"""Train an ordinary PyTorch model on many devices as if they were one.

Public names are resolved when first used, so that planning never loads torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "B": "laminar.ir.sbp",
    "BatchError": "laminar.errors",
    "CaptureError": "laminar.errors",
    "Graph": "laminar.ir.graph",
    "GraphError": "laminar.errors",
    "LaminarError": "laminar.errors",
    "Link": "laminar.ir.mesh",
    "Loss": "laminar.capture.capture",
    "Mesh": "laminar.ir.mesh",
    "MeshError": "laminar.errors",
    "NoRuleError": "laminar.errors",
    "P": "laminar.ir.sbp",
    "PlacementError": "laminar.errors",
    "Plan": "laminar.ir.plan",
    "PlanError": "laminar.errors",
    "Program": "laminar.ir.program",
    "Recipe": "laminar.api",
    "RecipeError": "laminar.errors",
    "S": "laminar.ir.sbp",
    "TensorSpec": "laminar.ir.tensor",
    "capture": "laminar.api",
    "load_recipe": "laminar.api",
    "lower": "laminar.lower.lower",
    "plans": "laminar.api",
    "verify": "laminar.api",
}
__all__ = sorted([*_WHERE, "__version__"])  # noqa: PLE0605


def _tame_onednn() -> None:
    """bf16 products on some CPUs die with SIGILL in oneDNN's AMX code; AVX-512 is safe. Must precede torch."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return
    if "amx_tile" in flags or "avx512_fp16" in flags:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"


_tame_onednn()


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'laminar' has no attribute {name!r}")
    if name in ("capture", "lower"):  # also the names of rooms: the function wins
        value = getattr(import_module(_WHERE[name]), name)
    else:
        value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from laminar.api import Recipe, capture, load_recipe, plans, verify
    from laminar.capture.capture import Loss
    from laminar.errors import (
        BatchError,
        CaptureError,
        GraphError,
        LaminarError,
        MeshError,
        NoRuleError,
        PlacementError,
        PlanError,
        RecipeError,
    )
    from laminar.ir.graph import Graph
    from laminar.ir.mesh import Link, Mesh
    from laminar.ir.plan import Plan
    from laminar.ir.program import Program
    from laminar.ir.sbp import B, P, S
    from laminar.ir.tensor import TensorSpec
    from laminar.lower.lower import lower

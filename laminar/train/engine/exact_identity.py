"""What the bits of a run in exact mode depend on, besides its model, data and seed: the run's identity.

Fixed when a job first starts and saved with it. Whoever goes on with a run, or takes part in it, compares his own: one
that differs would drift by a bit here and there, so it is refused, and told what differs.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from laminar.errors import StateError
from laminar.ir.exact import Exact

VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Settings by which libraries choose other kernels."""
INSTRUCTIONS = ("avx", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "fma", "f16c")
"""Of a processor, by which libraries choose kernels."""


def exact_identity(exact: Exact, device: torch.device, micro_batches: int, precision: str) -> dict[str, Any]:
    """As plain data."""
    found: dict[str, Any] = {
        **exact.to_json(),
        "micro_batches": micro_batches,
        "precision": precision,
        "device": _device(device),
        "torch": str(torch.__version__),
        "processor": _processor(),
        "settings": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if device.type == "cuda":
        found["cuda"] = f"{torch.version.cuda} cudnn {torch.backends.cudnn.version()}"
        found["tf32"] = [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
    return found


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _processor() -> str:
    """The instructions that kernels are chosen by."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line.split(":", 1)[1].split() for line in file if line.startswith("flags")), [])
    except OSError:
        flags = []
    known = [f for f in INSTRUCTIONS if f in flags]
    return " ".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), *known])


def refuse_identity(mine: Mapping[str, Any], theirs: Mapping[str, Any], whose: str) -> None:
    """Refuse to go on with, or beside, a run whose bits come about in another way."""
    other = [k for k in {**theirs, **mine} if mine.get(k) != theirs.get(k)]
    if other:
        raise StateError(
            f"in exact mode bits depend on {', '.join(other)}, and {whose} has another",
            mine="; ".join(f"{k} {mine.get(k)}" for k in other),
            theirs="; ".join(f"{k} {theirs.get(k)}" for k in other),
            next="run it as it was begun, or go on without exact mode",
        )

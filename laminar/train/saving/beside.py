"""What stands in a checkpoint beside the state: the plan, random generators, schedulers, exact mode's identity,
versions.

None of it is under the state's root: two runs may be equal though their plans are not.
"""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from laminar.train.protocol import HasState
from laminar.train.saving import lr_schedulers
from laminar.train.saving.generators import by_rank, generator_states


def about_run(job: HasState, scheduler: Any = None) -> dict[str, Any]:
    """As it is now; every rank calls this."""
    state = job.state
    return {
        "plan": None if job.plan is None else {"name": job.plan.name, "hash": job.plan.hash},
        "optimizer": type(state.optimizer).__name__,
        "exact": job.saved_identity(),
        "attributes": [s.name for s in state.slots if s.plain]
        + sorted(set(state.specs) - {s.name for s in state.slots}),
        "names": state.model_names(),
        "schedulers": lr_schedulers.states(lr_schedulers.attached(state.optimizer, scheduler)),
        "generators": by_rank(job.peers.gather_objects(generator_states())),
        "versions": {
            "laminar": _version("laminar-train"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"

"""Folders that laminar wrote before checkpoints had blocks and hashes (`model.safetensors`, `job.json`), read.

Nothing in them can be verified. They are read as before, and never written.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from laminar.errors import StateError
from laminar.train.protocol import HasState
from laminar.train.saving import lr_schedulers

LEGACY_VERSION = 1


def resume_legacy(job: HasState, path: Path, scheduler: Any = None) -> None:
    """Go on from such a folder."""
    from safetensors.torch import load_file

    if job.peers.rank == 0:
        _finish_write(path)
    job.peers.gather_objects(None)
    about = json.loads((path / "job.json").read_text())
    if about.get("laminar_job") != LEGACY_VERSION:
        raise StateError(f"{path} holds a job of version {about.get('laminar_job')}, this reads {LEGACY_VERSION}")
    job.refuse_saved(about.get("exact"))
    job.load_state_dict(job.state.completed(load_file(path / "model.safetensors")))
    job.load_optimizer_state_dict(_put_together(load_file(path / "optimizer.safetensors"), about["optimizer"]))
    state = job.state
    state.steps, state.seed = about["steps"], about["seed"]
    again = lr_schedulers.restore if scheduler is None else lr_schedulers.restore_named
    again(lr_schedulers.attached(job.state.optimizer, scheduler), about.get("schedulers", []), path)
    if state.scaler is not None and about["scaler"]:
        vars(state.scaler).update(about["scaler"])
    if state.ema_decay is not None and (path / "ema.safetensors").is_file():
        job.load_average(load_file(path / "ema.safetensors"))


def _finish_write(path: Path) -> None:
    """Bring a write that was stopped between its renames to its end: all files had been written by then."""
    if (path / "job.json").is_file() or not (path / "job.json.part").is_file():
        return
    with contextlib.suppress(json.JSONDecodeError):  # cut off in the middle: there was nothing before it
        json.loads((path / "job.json.part").read_text())
        for part in sorted(path.glob("*.safetensors.part")):
            part.replace(part.with_suffix(""))
        (path / "job.json.part").replace(path / "job.json")


def _put_together(tensors: Mapping[str, Tensor], plain: Any) -> dict[str, Any]:
    state = {int(i): dict(values) for i, values in plain["state"].items()}
    for name, value in tensors.items():
        i, _, key = name.partition(".")
        state[int(i)][key] = value
    return {"state": state, "param_groups": plain["param_groups"]}

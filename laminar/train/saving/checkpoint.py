"""A job to a directory and back, and the hash that says whether two are the same.

On disk it is safetensors under the model's own names, so plain PyTorch reads and writes the same. Files hold whole
tensors, written by rank 0: any number of ranks, in any layout, can go on from them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from laminar.errors import StateError
from laminar.train.protocol import HasState
from laminar.train.saving import lr_schedulers

CHECKPOINT_VERSION = 1


@dataclass(frozen=True)
class Snapshot:
    """A job as it was, ready to be written: tensors by file and name, and the rest."""

    tensors: dict[str, dict[str, Tensor]]
    about: dict[str, Any]

    def write(self, directory: str | Path) -> None:
        """`model.safetensors`, `optimizer.safetensors` and `job.json`.

        All are written under other names first. Whoever stops this in the middle finds what was there before or, in
        the moment between renames, no `job.json`: never files of two different steps.
        """
        from safetensors.torch import save_file

        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        for name, tensors in self.tensors.items():
            save_file(tensors, path / f"{name}.safetensors.part")
        (path / "job.json.part").write_text(json.dumps(self.about, indent=1) + "\n")
        (path / "job.json").unlink(missing_ok=True)
        for file in (*(f"{name}.safetensors" for name in self.tensors), "job.json"):
            (path / f"{file}.part").replace(path / file)


def snapshot(job: HasState, apart: bool, scheduler: Any = None) -> Snapshot | None:
    """The job as it is now, on rank 0; every rank must call this. `apart`: it does not change when the job goes on."""
    weights = {n: t for n, t in job.state_dict().items() if isinstance(t, Tensor)}
    average = job.state_dict(ema=True) if job.state.ema_decay is not None else {}
    optimizer = job.optimizer_state_dict()
    if job.peers.rank != 0:
        return None
    tensors, plain = _taken_apart(optimizer)
    files = {"model": weights, "optimizer": tensors, **({"ema": average} if average else {})}
    state = job.state
    scaler = None if state.scaler is None else dict(vars(state.scaler))
    about = {
        "laminar_job": CHECKPOINT_VERSION,
        "steps": state.steps,
        "seed": state.seed,
        "optimizer": plain,
        "scaler": scaler,
        "exact": job.saved_identity(),
        "plan": job.plan.hash if job.plan else None,
        "schedulers": lr_schedulers.states(lr_schedulers.attached(job.state.optimizer, scheduler)),
    }
    return Snapshot({name: _own(each, apart) for name, each in files.items()}, about)


def save(job: HasState, directory: str | Path, scheduler: Any = None) -> None:
    """See `Job.save`."""
    taken = snapshot(job, apart=False, scheduler=scheduler)
    if taken is not None:
        taken.write(directory)
    job.peers.gather_objects(None)  # nobody goes on before the files are there


def resume(job: HasState, directory: str | Path, scheduler: Any = None) -> None:
    """See `Job.resume`."""
    from safetensors.torch import load_file

    path = Path(directory)
    if job.peers.rank == 0:
        finish_write(path)
    job.peers.gather_objects(None)
    if not (path / "job.json").is_file():
        raise StateError(f"no job was saved in {path}", next="name a directory that Job.save wrote")
    about = json.loads((path / "job.json").read_text())
    if about.get("laminar_job") != CHECKPOINT_VERSION:
        raise StateError(f"{path} holds a job of version {about.get('laminar_job')}, this reads {CHECKPOINT_VERSION}")
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


def finish_write(path: Path) -> None:
    """Bring a write that was stopped between its renames to its end: all files had been written by then."""
    if (path / "job.json").is_file() or not (path / "job.json.part").is_file():
        return
    with contextlib.suppress(json.JSONDecodeError):  # cut off in the middle: there was nothing before it
        json.loads((path / "job.json.part").read_text())
        for part in sorted(path.glob("*.safetensors.part")):
            part.replace(part.with_suffix(""))
        (path / "job.json.part").replace(path / "job.json")


def _own(tensors: Mapping[str, Tensor], apart: bool) -> dict[str, Tensor]:
    """Tensors that share no memory, as the format wants: of tied ones the first name stays; `apart`: nor the job's."""
    out, seen = {}, set()
    for name, t in tensors.items():
        if not t.numel() or t.data_ptr() not in seen:
            seen.add(t.data_ptr())
            there = t.detach().cpu().contiguous()
            out[name] = there.clone() if apart and there.data_ptr() == t.data_ptr() else there
    return out


def _taken_apart(optimizer: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Tensors by name, and the rest as JSON can hold it."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for i, state in optimizer["state"].items():
        plain[str(i)] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{i}.{key}"] = value
            else:
                plain[str(i)][key] = value
    groups = [{k: float(v) if isinstance(v, Tensor) else v for k, v in g.items()} for g in optimizer["param_groups"]]
    for group in groups:
        for key in list(group):
            with contextlib.suppress(TypeError):
                json.dumps(group[key])
                continue
            del group[key]
    return tensors, {"state": plain, "param_groups": groups}


def _put_together(tensors: Mapping[str, Tensor], plain: Any) -> dict[str, Any]:
    state = {int(i): dict(values) for i, values in plain["state"].items()}
    for name, value in tensors.items():
        i, _, key = name.partition(".")
        state[int(i)][key] = value
    return {"state": state, "param_groups": plain["param_groups"]}

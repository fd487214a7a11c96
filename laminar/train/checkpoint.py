"""Weights in and out: under the model's own names, whole or as DTensors, to a directory and back.

A state dict from here is one that `model.load_state_dict` takes in plain PyTorch, and the other way
round; on disk it is safetensors, so neither side needs the other to read it. Files hold whole tensors,
written by rank 0: any number of ranks, in any layout, can go on from them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laminar.capture.model_tensors import Slot, slots_of
from laminar.capture.tensor_bytes import as_bytes
from laminar.errors import StateError
from laminar.ir.sbp import B, NdSbp, Split
from laminar.train import lr_schedulers
from laminar.train.memory_layout import make_dense
from laminar.train.sharded_model import Pieces, allowed, own_state, stripped
from laminar.train.world import World

if TYPE_CHECKING:
    from laminar.train.ddp_job import DdpJob
    from laminar.train.job import Job

VERSION = 1


def moved(model: nn.Module, device: torch.device, weights: torch.dtype | None) -> list[Slot]:
    """The model on its device, with floating tensors in `weights` if given; its tensors."""
    model.to(device=device, dtype=weights)
    for slot in slots_of(model):
        if slot.plain and slot.tensor.device != device:
            there = slot.tensor.to(device)
            for holder, key in slot.places:
                holder[key] = there
    slots = slots_of(model)
    make_dense(slots)
    return slots


class Stored:
    """What every job does with its state as a whole, whatever it is made of."""

    _world: World
    _pieces: Pieces | None = None
    """What stands on the user's model where ranks have parts of it."""
    _released = False

    def hash(self) -> str:
        """Hex digest over weights, buffers and optimizer state: equal exactly if all of them are, bit for bit."""
        return digest(self)  # type: ignore[arg-type]

    def save(self, directory: str | Path, scheduler: Any = None) -> None:
        """Write weights, optimizer state and counters as whole tensors into a directory.

        Learning-rate schedulers of torch's on the job's optimizer are kept too; others can be named, one or a list.
        """
        save(self, directory, scheduler)  # type: ignore[arg-type]

    def resume(self, directory: str | Path, scheduler: Any = None) -> None:
        """Go on from what `save` wrote, on any layout; schedulers go on as well."""
        resume(self, directory, scheduler)  # type: ignore[arg-type]

    def release(self) -> None:
        """Put whole weights back into the user's own model, and whole state into its optimizer; the job ends with that.

        Every rank calls it, and has room for the whole model afterwards. A second job on the same model does it by
        itself.
        """
        if self._pieces is not None:
            self._released = True
            self._give_back()
            self._pieces.take_off()
            self._pieces = None

    def _give_back(self) -> None:
        raise NotImplementedError

    def _refuse_released(self) -> None:
        if self._released:
            raise StateError("this job has given its model back", next="make a new job with laminar.parallelize")

    def close(self) -> None:
        """Leave the process group, if this job made it."""
        self._world.close()


# --- state dicts -------------------------------------------------------------------------------


def _names(job: Job | DdpJob) -> dict[str, str]:
    """For each name in the model's own state dict, the slot that holds its tensor."""
    of = {name: s.name for s in job._slots for name in (s.name, *s.aliases)}
    return {name: of[name] for name in own_state(job._model) if name in of}


def _held(job: Job, ema: bool) -> dict[str, tuple[NdSbp, Tensor]]:
    out = {n: (job.plan.inputs.get(n, (B,) * len(job.mesh.sizes)), t) for n, t in job._engine.held.items()}
    if ema:
        if not job._ema:
            raise StateError("this job keeps no moving average", next="parallelize(..., ema=0.999)")
        out.update({k.name: (k.state_nd, job._ema[k.name].to(k.owned.dtype)) for k in job._kept})
    return out


def state_dict(job: Job, sharded: bool, ema: bool) -> dict[str, Any]:
    """See `Job.state_dict`."""
    names, held = _names(job), _held(job, ema)
    wanted = list(dict.fromkeys(names.values()))
    if sharded:
        found: dict[str, Any] = dict(zip(wanted, _dtensors(job, [(n, *held[n]) for n in wanted]), strict=True))
    else:
        pieces = [(n, job._specs[n].shape, *held[n]) for n in wanted]
        found = dict(zip(wanted, job._assembled(pieces), strict=True))
    extra = {k: v for k, v in own_state(job._model).items() if k not in names}
    return {**{name: found[slot] for name, slot in names.items()}, **extra}


def _dtensors(job: Job, items: Sequence[tuple[str, NdSbp, Tensor]]) -> list[Any]:
    """DTensors over a mesh of the same axes; blocks of a packed dim, which DTensor has no word for, are unpacked."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if job.world == 1 and not torch.distributed.is_initialized():
        raise StateError("DTensors need a process group", next="take whole tensors, or start under torchrun")
    mesh = init_device_mesh(job.device.type, job.mesh.sizes, mesh_dim_names=job.mesh.names)
    plain = [tuple(Split(p.dim) if isinstance(p, Split) else p for p in nd) for _, nd, _ in items]
    moves = [(n, job._specs[n], nd, p) for (n, nd, _), p in zip(items, plain, strict=True)]
    local = job._engine.move(moves, "DTensors", [t for *_, t in items])
    return [
        DTensor.from_local(
            t.clone() if t.data_ptr() != old.data_ptr() else t, mesh,
            [Shard(p.dim) if isinstance(p, Split) else Replicate() for p in nd], run_check=False,
            shape=torch.Size(job._specs[n].shape), stride=job._engine.whole[n].stride(),
        )
        for t, (n, _, old), nd in zip(local, items, plain, strict=True)
    ]  # fmt: skip


def load_state_dict(job: Job, given: Mapping[str, Any]) -> None:
    """See `Job.load_state_dict`."""
    names = _names(job)
    missing, extra = sorted(set(names) - set(given)), sorted(set(given) - set(own_state(job._model)))
    if missing or extra:
        raise StateError("the state dict is not this model's", missing=", ".join(missing[:5]),
                         unexpected=", ".join(extra[:5]))  # fmt: skip
    kept = {k.name: k for k in job._kept}
    for name, slot in names.items():
        value = given[name]
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        spec = job._specs[slot]
        if tuple(value.shape) != spec.shape:
            raise StateError(f"{name} is {tuple(value.shape)} in the state dict, {spec} in the model")
        mine = job._cut(value.detach(), job.plan.inputs.get(slot, (B,) * len(job.mesh.sizes)))
        with torch.no_grad():
            job._engine.held[slot].copy_(mine)
            if slot in kept and kept[slot].gathered:
                kept[slot].owned.copy_(job._cut(value.detach(), kept[slot].state_nd))
    for k in job._kept:
        if k.name in job._ema:
            job._ema[k.name].copy_(k.owned.detach())


def empty_copy(model: nn.Module, slots: Sequence[Slot], whole: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """A model of the same code with room for whole weights."""
    import copy

    memo: dict[int, Any] = {}
    for slot in slots:
        room = torch.empty_like(whole[slot.name], device=device)
        memo[id(slot.tensor)] = nn.Parameter(room, slot.tensor.requires_grad) if slot.kind == "param" else room
    with allowed():
        return stripped(copy.deepcopy(model, memo))


def fill(model: nn.Module, state: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> None:
    """Put whole weights into a model, and what is in no state dict: buffers that don't persist, plain attributes."""
    with torch.no_grad():
        model.load_state_dict(state)
        for slot in slots_of(model):
            if slot.name in rest:
                slot.tensor.copy_(rest[slot.name])


def unlisted(job: Job) -> dict[str, Tensor]:
    """Whole tensors of the model that its state dict leaves out."""
    listed, held = set(_names(job).values()), _held(job, False)
    names = [n for n in held if n not in listed]
    found = job._assembled([(n, job._specs[n].shape, *held[n]) for n in names])
    return dict(zip(names, found, strict=True))


# --- identity and files --------------------------------------------------------------------------


def digest(job: Job | DdpJob) -> str:
    """See `Job.hash`: a hash of hashes, one for each named tensor."""
    lines = [f"model {n} {_digest(t)}" for n, t in sorted(job.state_dict().items()) if isinstance(t, Tensor)]
    for i, state in sorted(job.optimizer_state_dict()["state"].items()):
        lines += [f"state {i}.{k} {_digest(v) if isinstance(v, Tensor) else v!r}" for k, v in sorted(state.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _digest(x: Tensor) -> str:
    head = f"{x.dtype}{tuple(x.shape)}".encode()
    return hashlib.sha256(head + as_bytes(x.cpu()).numpy().tobytes()).hexdigest()


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


def snapshot(job: Job | DdpJob, apart: bool, scheduler: Any = None) -> Snapshot | None:
    """The job as it is now, on rank 0; every rank must call this. `apart`: it does not change when the job goes on."""
    weights = {n: t for n, t in job.state_dict().items() if isinstance(t, Tensor)}
    average = job.state_dict(ema=True) if job._ema else {}
    optimizer = job.optimizer_state_dict()
    if job.rank != 0:
        return None
    tensors, plain = _taken_apart(optimizer)
    files = {"model": weights, "optimizer": tensors, **({"ema": average} if average else {})}
    scaler = None if job._scaler is None else dict(vars(job._scaler))
    about = {"laminar_job": VERSION, "steps": job.steps, "seed": job.seed, "optimizer": plain, "scaler": scaler,
             "plan": job.plan.hash if job.plan else None,
             "schedulers": lr_schedulers.states(lr_schedulers.attached(job.optimizer, scheduler))}  # fmt: skip
    return Snapshot({name: _own(each, apart) for name, each in files.items()}, about)


def save(job: Job | DdpJob, directory: str | Path, scheduler: Any = None) -> None:
    """See `Job.save`."""
    taken = snapshot(job, apart=False, scheduler=scheduler)
    if taken is not None:
        taken.write(directory)
    job._world.gather_objects(None)  # nobody goes on before the files are there


def resume(job: Job | DdpJob, directory: str | Path, scheduler: Any = None) -> None:
    """See `Job.resume`."""
    from safetensors.torch import load_file

    path = Path(directory)
    if job.rank == 0:
        finish_write(path)
    job._world.gather_objects(None)
    if not (path / "job.json").is_file():
        raise StateError(f"no job was saved in {path}", next="name a directory that Job.save wrote")
    about = json.loads((path / "job.json").read_text())
    if about.get("laminar_job") != VERSION:
        raise StateError(f"{path} holds a job of version {about.get('laminar_job')}, this reads {VERSION}")
    weights = load_file(path / "model.safetensors")
    tied = {n: weights[s] for n, s in _names(job).items() if n not in weights and s in weights}
    job.load_state_dict({**own_state(job._model), **weights, **tied})
    job.load_optimizer_state_dict(_put_together(load_file(path / "optimizer.safetensors"), about["optimizer"]))
    job.steps, job.seed = about["steps"], about["seed"]
    again = lr_schedulers.restore if scheduler is None else lr_schedulers.restore_named
    again(lr_schedulers.attached(job.optimizer, scheduler), about.get("schedulers", []), path)
    if job._scaler is not None and about["scaler"]:
        vars(job._scaler).update(about["scaler"])
    if job._ema and (path / "ema.safetensors").is_file():
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

"""The first batch of a job against the user's own model in plain PyTorch: loss, gradients and new buffers.

What is checked is what runs: the compiled program on these ranks, with its collectives, on the first micro-batch of the
first step. What it is checked against owes nothing to capture (`runtime/check/plain_model.py`): the model's own code
on whole weights, run by rank 0. Every other rank sees that what it has is what rank 0 has. `compare_results.py` says
what is equal.

Not covered: what a later step does (guards look after what changes between steps), and evaluation. Where whole weights,
gradients and activations would not fit beside the job, the check is left out, with a word. A check that was passed is
remembered where graphs are kept (`laminar.cache`): the same code, graph, plan and values are not checked again. Nothing
is left behind: the program's outputs are thrown away, the model and all generators of random numbers are as before.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laminar.cache import folder, kept, sources
from laminar.capture.batches import unflatten
from laminar.capture.torch_ops import DTYPES
from laminar.errors import CheckError
from laminar.events import emit
from laminar.ir.graph import RNG, Graph
from laminar.ir.sbp import B
from laminar.lower.reshard import Move, moves
from laminar.runtime.check.plain_model import run_eager
from laminar.runtime.code.eager_step import EagerStep
from laminar.train import checkpoint
from laminar.train.compare_results import TOLERANCE, beyond_rounding, narrowest, nudged, off, raise_for
from laminar.train.engine import Leaves
from laminar.train.sharded_model import allowed
from laminar.train.warn_coupled import depends_on_the_count, losses_of_parts
from laminar.train.world import World

if TYPE_CHECKING:
    from laminar.train.job import Job
    from laminar.train.pipeline_job import StagedJob

log = logging.getLogger("laminar")
KNOWN = "it was checked before"
FILL = 0.6
"""Share of the free memory that a check may take."""
SCALE = 1024.0
"""The largest scale of the loss under which a batch is checked: with those that fp16 begins with it may overflow."""


@dataclass
class FirstBatch:
    """What a job brings to its check; what it gives from all ranks is asked for on all of them."""

    world: World
    graph: Graph
    device: torch.device
    about: Mapping[str, Any]
    """What a good result hangs on, besides code: it is remembered under this."""
    missing_bytes: int
    """Of whole weights, as far as this rank has pieces of them."""
    program: Callable[[], dict[str, Tensor]]
    """Runs the compiled step: whole outputs, the same on every rank."""
    weights: Callable[[], dict[str, Tensor]]
    """Whole tensors of the model, those of which ranks have pieces."""
    eager: Callable[[Mapping[str, Tensor], tuple[float, int] | None], dict[str, Tensor]]
    """Runs the model itself, on these whole tensors; if told so with numbers changed by a share, at random by seed."""
    old: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    """Buffers before the step."""
    parts: Callable[[Mapping[str, Tensor], str], str]
    """What is to be said of micro-batches, given the narrowest dtype (`warn_coupled.py`); or it raises."""

    def run(self) -> None:
        """Check it, or say why not; all ranks raise alike."""
        first, why = self.world.rank == 0, self._too_large()
        keeps = first and folder() is not None and hasattr(sys.modules["__main__"], "__file__")
        known = {**self.about, **sources()} if keeps else None
        if not why and known is not None and _remembered(known):
            why = KNOWN
        skipped = next(filter(None, self.world.gather_objects(why)), "")
        if skipped:
            self._leave_out(skipped)
            return
        emit("phase", name="checking the first batch")
        got, whole = self.program(), self.weights()
        told = self._judged(got, whole) if first else ("", "", "")
        prints = {k: _norms(v) for k, v in got.items()}
        everyone = self.world.gather_objects((told, prints))
        error, skipped, warning = everyone[0][0]
        if skipped:
            self._leave_out(skipped)
            return
        if error:
            raise CheckError(error)
        tolerance = TOLERANCE[narrowest(self.graph, self.device)]
        for rank, (_, theirs) in enumerate(everyone):
            for key, mine in everyone[0][1].items():
                if not _alike(mine, theirs[key], tolerance):
                    raise CheckError(f"rank {rank} has another {key.replace(':', ' ')} than rank 0 after the same step",
                                     next="please report it, with the model and the plan")  # fmt: skip
        emit("check", done=True, outputs=len(got))
        if warning and first:
            warnings.warn(warning, stacklevel=6)
        elif known is not None:
            kept("checks", known, lambda: True, bool, bool)

    def _too_large(self) -> str:
        first = self.world.rank == 0
        need = needed_bytes(self.graph, self.missing_bytes, first)
        here = 1 if self.device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", self.world.size))
        free = free_bytes(self.device) // here
        if need <= FILL * free:
            return ""
        return f"about {need / 1e9:.1f} GB are needed to run the model as it is, {free / 1e9:.1f} GB are free"

    def _leave_out(self, why: str) -> None:
        emit("check", done=False, why=why)
        if self.world.rank == 0 and why != KNOWN:
            log.warning("the first batch is not checked against plain PyTorch: %s", why)

    def _judged(self, got: dict[str, Tensor], whole: dict[str, Tensor]) -> tuple[str, str, str]:
        """What is wrong, or why nothing can be said, or what is to be said."""
        narrow = narrowest(self.graph, self.device)
        try:
            want = self.eager(whole, None)
        except torch.OutOfMemoryError:
            return "", "the model as it is does not fit into memory", ""
        except Exception as error:
            said = str(error).partition("\n")[0]
            return "", f"the model can't be run as it is here: {type(error).__name__}: {said}", ""
        got, want = ({k: v for k, v in each.items() if not k.startswith("metric:")} for each in (got, want))
        old = self.old(whole)
        mine = {**{k: v for k, v in old.items() if k in want}, **got}
        want = {**{k: v for k, v in old.items() if k in got}, **want}
        found = off(mine, want, TOLERANCE[narrow])
        found = beyond_rounding(found, want, lambda share, seed: self.eager(whole, (share, seed)), narrow)
        try:
            raise_for(found, (float(got["loss:loss"]), float(want["loss:loss"])))
            return "", "", self.parts(whole, narrow)
        except CheckError as error:
            return str(error), "", ""


def _norms(x: Tensor) -> tuple[float, float]:
    """Two numbers by which ranks see that they have the same tensor."""
    flat = x.detach().reshape(-1)
    flat = flat.double() if not flat.is_complex() else torch.view_as_real(flat).reshape(-1).double()
    flat = torch.where(torch.isfinite(flat), flat, torch.ones((), dtype=flat.dtype, device=flat.device))
    turn = torch.arange(flat.numel(), device=flat.device) % 7 - 3
    return float(torch.linalg.vector_norm(flat)), float((flat * turn).sum())


def _alike(a: tuple[float, float], b: tuple[float, float], tolerance: float) -> bool:
    room = 1e-12 + tolerance * max(a[0], b[0]) * 10
    return abs(a[0] - b[0]) <= room and abs(a[1] - b[1]) <= room


def _remembered(about: Mapping[str, Any]) -> bool:
    """Whether such a check has been passed before: the same code, graph, plan and values."""

    def unknown() -> bool:
        raise LookupError

    try:
        return kept("checks", about, unknown, bool, bool)
    except LookupError:
        return False


# --- memory ------------------------------------------------------------------------------------


def needed_bytes(graph: Graph, missing: int, runs: bool) -> int:
    """About what a check takes on a rank besides the job: whole weights that are not here and whole gradients.

    The rank that runs the model has gradients twice (the program's and the model's), and everything forward makes.
    """
    grads = sum(graph.specs[o.ref].nbytes for o in graph.outputs if o.kind == "grad")
    made = sum(s.nbytes for n in graph.nodes if n.phase == "forward" for s in n.outs if s is not None)
    return missing + grads + (grads + made if runs else 0)


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses yet."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


# --- jobs ----------------------------------------------------------------------------------------


@dataclass
class _Own:
    """The model of a job, to be run as it is on a micro-batch."""

    job: Job | StagedJob
    micros: Sequence[Leaves]
    scale: float | None
    draws: bool

    @property
    def micro(self) -> Leaves:
        """The first one."""
        return self.micros[0]

    @property
    def missing_bytes(self) -> int:
        """Bytes of whole tensors of which this rank has pieces, or nothing."""
        job = self.job
        return sum(job._specs[s.name].nbytes for s in job._slots if tuple(s.tensor.shape) != job._specs[s.name].shape)

    def run(self, whole: Mapping[str, Tensor], moved: tuple[float, int] | None) -> dict[str, Tensor]:
        """See `FirstBatch.eager`; the batch may be among the whole tensors."""
        job = self.job
        leaves = {n: whole.get(f"leaf:{n}", t).to(job.device) for n, t in self.micro.tensors.items()}
        taken = {n: t for n, t in whole.items() if not n.startswith("leaf:")}
        if moved is not None:
            mine = {s.name: s.tensor.detach() for s in job._slots if s.kind == "param" and s.name not in taken}
            taken, leaves = nudged({**mine, **taken}, *moved), nudged(leaves, *moved)
        key = (job.seed, job.steps) if self.draws else None
        batch = unflatten(json.loads(self.micro.tree), leaves)
        with allowed():
            return run_eager(job._model, job._engine.loss, batch, key=key, scale=self.scale, whole=taken, wide=True)

    def parts(self, whole: Mapping[str, Tensor], narrow: str) -> str:
        """See `FirstBatch.parts`."""
        job = self.job
        parts = [m.mapped(lambda t: t.to(job.device)) for m in self.micros[:2]]
        if self.micro.local:  # only the first is whole here
            leaves = {n: whole[f"leaf:{n}"] for n in self.micro.tensors}
            batch = Leaves(leaves, self.micro.tree, False)
            parts = batch.split(2) if batch.samples > 1 else []
        if len(parts) < 2:
            return ""
        taken = {n: t for n, t in whole.items() if not n.startswith("leaf:")}
        return depends_on_the_count(losses_of_parts(job._model, job._engine.loss, parts, taken), parts, narrow)

    def old(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `FirstBatch.old`."""
        buffers = (s for s in self.job._slots if s.kind == "buffer")
        return {f"buffer:{s.name}": whole.get(s.name, s.tensor.detach()) for s in buffers}


def check(job: Job, micros: Sequence[Leaves]) -> None:
    """Check what a job's program gives for the first micro-batch; every rank calls this."""
    micro = micros[0]
    ready, engine, tape = job._engine.ready(micro), job._engine, job._tape
    scale = min(job._scaler.scale if job._scaler else 1.0, SCALE) if engine.scaled else None
    shared = engine.share(ready, micro, job.device)
    everywhere = (B,) * len(job.mesh.sizes)

    def together(items: Sequence[Move], tensors: list[Tensor]) -> list[Tensor]:
        apart = [i for i, (_, _, src, dst) in enumerate(items) if src != dst]
        out = [t.clone() for t in tensors]
        if apart:  # used once: not kept as other moves are
            step = EagerStep(moves(job.mesh, [items[i] for i in apart], "the first batch whole"), job._transport)
            for i, whole in zip(apart, step(*[tensors[i] for i in apart]), strict=True):
                out[i] = whole.clone()
        return out

    def program() -> dict[str, Tensor]:
        key = job._key(ready, job.steps, 0, engine.together(micro).samples)
        told = None if scale is None else torch.tensor(scale, dtype=torch.float64, device=job.device)
        out = ready(shared, key, told)
        named = [(f"{o.kind}:{o.name}", o.placed) for o in ready.program.outputs]
        whole = together([(n, p.spec, p.nd, everywhere) for n, p in named], out)
        return dict(zip([n for n, _ in named], whole, strict=True))

    def weights() -> dict[str, Tensor]:
        held = {n: (nd, t) for n, (nd, t) in checkpoint._held(job, False).items() if nd != everywhere}
        pieces = [(n, job._specs[n], nd, everywhere) for n, (nd, _) in held.items()]
        whole = dict(zip(held, together(pieces, [t for _, t in held.values()]), strict=True))
        if micro.local:
            items = [i for i in ready.program.inputs if i.kind == "batch"]
            leaves = together([(i.name, i.placed.spec, i.placed.nd, everywhere) for i in items],
                              [shared[i.name] for i in items])  # fmt: skip
            whole |= {f"leaf:{i.name}": t for i, t in zip(items, leaves, strict=True)}
        return whole

    def parts(whole: Mapping[str, Tensor], narrow: str) -> str:
        told = "" if job._coupled else own.parts(whole, narrow)
        return f"micro_batches={engine.micro_batches}: {told}" if told else ""

    about = {"graph": ready.graph.hash, "plan": ready.plan.hash, "precision": job.precision.name,
             "device": str(job.device), "step": type(ready.step).__name__,
             "values": engine.captures.digest()}  # fmt: skip
    own = _Own(job, micros, scale, RNG in ready.filled)
    job._set_tape(None)
    try:
        FirstBatch(
            job._world, ready.graph, job.device, about, own.missing_bytes, program, weights, own.run, own.old, parts
        ).run()
    finally:
        job._set_tape(tape)
        engine.captures.settle()
        if job._watched is not None:
            job._watched.forget()


def check_staged(job: StagedJob) -> None:
    """Check what the stages give for the first micro-batch of a step; every rank calls this.

    The pipe runs as it always does, with that micro-batch in the place of every one. Buffers are not compared: they
    have seen it several times then.
    """
    micros, graph, tape, count = job._micros, job.graph, job._tape, len(job._micros)
    scale = min(job._scaler.scale if job._scaler else 1.0, SCALE)
    buffers = [s.name for s in job._slots if s.kind == "buffer" and s.name in job._held]

    def program() -> dict[str, Tensor]:
        kept = {n: job._held[n].clone() for n in buffers}
        job._micros, job._alone, job._draws, job._scale = [micros[0]] * count, True, job.steps, scale
        grads: dict[str, Tensor] = {}
        try:
            pipe = job._pipe_for(job._micros, True)
            pipe.parts.weights = [1.0 / count] * count
            pipe.actors.record(False)
            pipe.parts.settle = None

            def last() -> list[float]:
                grads.update(job._reduced(pipe))
                return job._said(pipe, grads)

            pipe.actors.run(1, last)
        finally:
            job._micros, job._alone = micros, False
            for name, t in kept.items():
                job._held[name].copy_(t)
        sums = torch.tensor(pipe.actors.sums[1:], dtype=torch.float64, device=job.device)  # a tensor: weights may be 0
        values = dict(zip(pipe.values, sums, strict=True))
        part = count if pipe.weighted else 1
        loss = values["metric:loss_total"] / values["metric:loss_weight"] if pipe.weighted else values["loss:loss"]
        out = {"loss:loss": loss}
        for name in sorted({n for n, _ in job._graded}):
            kind = DTYPES[job._grad_specs[name].dtype]
            out[f"grad:{name}"] = job._whole(name, grads.get(name), job._owned_nd, kind) / part
        return out

    def weights() -> dict[str, Tensor]:
        return {s.name: job._whole(s.name, job._held.get(s.name), job._lies) for s in job._slots}

    own = _Own(job, micros, scale, bool(graph.of_kind("rng")))

    def eager(whole: Mapping[str, Tensor], moved: tuple[float, int] | None) -> dict[str, Tensor]:
        return {k: v for k, v in own.run(whole, moved).items() if not k.startswith("buffer:")}

    def parts(whole: Mapping[str, Tensor], narrow: str) -> str:
        told = own.parts(whole, narrow) if count > 1 and not job.plan.coupled else ""
        if told:
            raise CheckError(
                f"this plan runs a batch in {count} micro-batches: {told}",
                next='or a plan with couple="microbatch", if that is what is wanted',
            )
        return ""

    about = {"graph": graph.hash, "plan": job.plan.hash, "precision": job.precision.name, "device": str(job.device),
             "step": job._compile, "values": job._engine.captures.digest()}  # fmt: skip
    job._set_tape(None)
    try:
        FirstBatch(
            job._world, graph, job.device, about, own.missing_bytes, program, weights, eager, own.old, parts
        ).run()
    finally:
        job._set_tape(tape)
        job._engine.captures.settle()

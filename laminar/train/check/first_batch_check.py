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
from typing import Any

import torch
from torch import Tensor

from laminar.cache import folder, kept, sources
from laminar.capture.model.batches import unflatten
from laminar.errors import CheckError
from laminar.events import emit
from laminar.ir.graph import RNG, Graph
from laminar.ir.plans.staged import Staged
from laminar.lower.boxing.reshard import Move
from laminar.runtime.check.plain_model import run_eager
from laminar.train.batch.leaves import Leaves
from laminar.train.check.compare_results import RESULT_TOLERANCE, beyond_rounding, narrowest, nudged, off, raise_for
from laminar.train.check.warn_coupled import depends_on_the_count, losses_of_parts
from laminar.train.engine.engine import Engine
from laminar.train.engine.tracer import Tracer
from laminar.train.optimizer.precision import Scaler
from laminar.train.state.gather import Gather
from laminar.train.state.sharded_model import allowed
from laminar.train.state.state import JobState
from laminar.train.world import World

_log = logging.getLogger("laminar")
CHECKED_BEFORE = "it was checked before"
FILL = 0.6
"""Share of the free memory that a check may take."""
LARGEST_SCALE = 1024.0
"""The largest scale of the loss under which a batch is checked: with those that fp16 begins with it may overflow."""


@dataclass
class FirstBatch:
    """What a job brings to its check; what it gives from all ranks is asked for on all of them."""

    world: World
    graph: Graph
    device: torch.device
    about: Mapping[str, Any]
    """What a good result depends on, besides code: it is remembered under this."""
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
            why = CHECKED_BEFORE
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
        tolerance = RESULT_TOLERANCE[narrowest(self.graph, self.device)]
        for rank, (_, theirs) in enumerate(everyone):
            for key, mine in everyone[0][1].items():
                if not _alike(mine, theirs[key], tolerance):
                    raise CheckError(
                        f"rank {rank} has another {key.replace(':', ' ')} than rank 0 after the same step",
                        next="please report it, with the model and the plan",
                    )
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
        if self.world.rank == 0 and why != CHECKED_BEFORE:
            _log.warning("the first batch is not checked against plain PyTorch: %s", why)

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
        found = off(mine, want, RESULT_TOLERANCE[narrow])
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
class OwnModel:
    """The model of a job, to be run as it is on a micro-batch."""

    state: JobState
    tracer: Tracer
    device: torch.device
    micros: Sequence[Leaves]
    scale: float | None
    draws: bool

    @property
    def micro(self) -> Leaves:
        """The first one."""
        return self.micros[0]

    def run(self, whole: Mapping[str, Tensor], moved: tuple[float, int] | None) -> dict[str, Tensor]:
        """See `FirstBatch.eager`; the batch may be among the whole tensors."""
        state = self.state
        leaves = {n: whole.get(f"leaf:{n}", t).to(self.device) for n, t in self.micro.tensors.items()}
        taken = {n: t for n, t in whole.items() if not n.startswith("leaf:")}
        if moved is not None:
            mine = {s.name: s.tensor.detach() for s in state.slots if s.kind == "param" and s.name not in taken}
            taken, leaves = nudged({**mine, **taken}, *moved), nudged(leaves, *moved)
        key = (state.seed, state.steps) if self.draws else None
        batch = unflatten(json.loads(self.micro.tree), leaves)
        with allowed():
            return run_eager(state.model, self.tracer.loss, batch, key=key, scale=self.scale, whole=taken, wide=True)

    def parts(self, whole: Mapping[str, Tensor], narrow: str) -> str:
        """See `FirstBatch.parts`."""
        parts = [m.mapped(lambda t: t.to(self.device)) for m in self.micros[:2]]
        if self.micro.local:  # only the first is whole here
            leaves = {n: whole[f"leaf:{n}"] for n in self.micro.tensors}
            batch = Leaves(leaves, self.micro.tree, False)
            parts = batch.split(2) if batch.samples > 1 else []
        if len(parts) < 2:
            return ""
        taken = {n: t for n, t in whole.items() if not n.startswith("leaf:")}
        return depends_on_the_count(losses_of_parts(self.state.model, self.tracer.loss, parts, taken), parts, narrow)

    def old(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `FirstBatch.old`."""
        buffers = (s for s in self.state.slots if s.kind == "buffer")
        return {f"buffer:{s.name}": whole.get(s.name, s.tensor.detach()) for s in buffers}


def check_scale(scaler: Scaler | None) -> float:
    """The scale of the loss under which a batch is checked."""
    return min(scaler.scale if scaler else 1.0, LARGEST_SCALE)


def check(
    engine: Engine, state: JobState, world: World, micros: Sequence[Leaves], precision: str, coupled: bool
) -> None:
    """Check what an engine's program gives for the first micro-batch; every rank calls this.

    `coupled`: whether what micro-batches are to the whole batch is known, or there is one.
    """
    micro = micros[0]
    ready = engine.ready(micro)
    scale = check_scale(state.scaler) if engine.scaled else None
    shared = engine.share(ready, micro, world.device)
    everywhere = state.layout.everywhere

    def together(items: Sequence[Move], tensors: Sequence[Tensor]) -> list[Tensor]:
        return engine.resharder.once(items, "the first batch whole", tensors)

    def program() -> dict[str, Tensor]:
        key = ready.key(state.seed, state.steps, 0, engine.together(micro).samples, world.device)
        told = None if scale is None else torch.tensor(scale, dtype=torch.float64, device=world.device)
        out = ready(shared, key, told)
        named = [(f"{o.kind}:{o.name}", o.placed) for o in ready.program.outputs]
        items = [(n, p.spec, everywhere if engine.whole_outputs else p.nd, everywhere) for n, p in named]
        whole = together(items, out)
        return dict(zip([n for n, _ in named], whole, strict=True))

    def weights() -> dict[str, Tensor]:
        held = {n: t for n, t in state.held.items() if not state.layout.is_whole(n)}
        pieces = [(n, state.specs[n], state.layout.held_nd(n), everywhere) for n in held]
        whole = dict(zip(held, together(pieces, list(held.values())), strict=True))
        if micro.local:
            items = [i for i in ready.program.inputs if i.kind == "batch"]
            leaves = together(
                [(i.name, i.placed.spec, i.placed.nd, everywhere) for i in items], [shared[i.name] for i in items]
            )
            whole |= {f"leaf:{i.name}": t for i, t in zip(items, leaves, strict=True)}
        return whole

    def parts(whole: Mapping[str, Tensor], narrow: str) -> str:
        told = "" if coupled else own.parts(whole, narrow)
        return f"micro_batches={engine.micro_batches}: {told}" if told else ""

    captures = engine.tracer.captures
    about = {
        "graph": ready.graph.hash,
        "plan": ready.plan.hash,
        "precision": precision,
        "device": str(world.device),
        "step": type(ready.step).__name__,
        "values": captures.digest(),
    }
    own = OwnModel(state, engine.tracer, world.device, micros, scale, RNG in ready.filled)
    try:
        FirstBatch(
            world, ready.graph, world.device, about, state.missing_bytes, program, weights, own.run, own.old, parts
        ).run()
    finally:
        captures.settle()


def check_stages(
    run: Callable[[float], dict[str, Tensor]],
    gather: Gather,
    state: JobState,
    tracer: Tracer,
    world: World,
    graph: Graph,
    plan: Staged,
    micros: Sequence[Leaves],
    **about: Any,
) -> None:
    """Check what the stages give for the first micro-batch of a step; every rank calls this.

    `run` puts that micro-batch through the pipe, in the place of every one, under a scale of the loss. Buffers are not
    compared: they have seen it several times then.
    """
    scale, count = check_scale(state.scaler), len(micros)

    def weights() -> dict[str, Tensor]:
        return state.whole_tensors(gather, [s.name for s in state.slots])

    own = OwnModel(state, tracer, world.device, micros, scale, bool(graph.of_kind("rng")))

    def eager(whole: Mapping[str, Tensor], moved: tuple[float, int] | None) -> dict[str, Tensor]:
        return {k: v for k, v in own.run(whole, moved).items() if not k.startswith("buffer:")}

    def parts(whole: Mapping[str, Tensor], narrow: str) -> str:
        told = own.parts(whole, narrow) if count > 1 and not plan.coupled else ""
        if told:
            raise CheckError(
                f"this plan runs a batch in {count} micro-batches: {told}",
                next='or a plan with couple="microbatch", if that is what is wanted',
            )
        return ""

    known = {
        **about,
        "graph": graph.hash,
        "plan": plan.hash,
        "device": str(world.device),
        "values": tracer.captures.digest(),
    }
    try:
        FirstBatch(
            world, graph, world.device, known, state.missing_bytes, lambda: run(scale), weights, eager, own.old, parts
        ).run()
    finally:
        tracer.captures.settle()

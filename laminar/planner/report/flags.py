"""The same plan for other systems: flags of Megatron-LM and torchtitan, or what stands in the way.

The form of a plan is read from its placements (`classify.py`). Where it is one that such a system has, the flags
follow; where it is nearly one, what would be done differently there is told beside them; where it is not, there are no
flags, and the reasons are. Flags say how work is spread; the model itself is for the reader to set up.

Names of flags are those of Megatron-LM's `megatron/training/arguments.py` and torchtitan's `JobConfig` as of 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from laminar.errors import PlanError
from laminar.ir.graph import Graph
from laminar.ir.plans.account import ParallelForm
from laminar.ir.plans.patterns import WITHOUT_PRODUCTS
from laminar.ir.plans.planned import Planned
from laminar.planner.report.classify import form
from laminar.planner.report.graph_of_plan import graph_for

TITAN_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}


@dataclass(frozen=True)
class Flags:
    """Flags of another system for a plan."""

    style: str
    flags: tuple[str, ...]
    """Each with its value; none where obstacles are."""
    notes: tuple[str, ...] = ()
    """What that system would do differently."""
    obstacles: tuple[str, ...] = ()
    """Why there are none."""

    @property
    def ok(self) -> bool:
        """Whether there are any."""
        return not self.obstacles

    def __str__(self) -> str:
        if not self.ok:
            return "\n".join([f"no flags of {self.style} give this plan", *(f"  {o}" for o in self.obstacles)])
        return "\n".join([*self.flags, *(f"# {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "style": self.style,
            "ok": self.ok,
            "flags": list(self.flags),
            "notes": list(self.notes),
            "obstacles": list(self.obstacles),
        }


def flags(plan: Planned, style: str, *, graph: Graph | None = None) -> Flags:
    """The flags of a plan; a saved one knows its form if it was searched for, else it is handed its graph."""
    if style not in STYLES:
        raise PlanError(f"no flags of {style!r}", allowed="  ".join(STYLES))
    kept = plan.account.form
    if graph is not None or plan.origin is not None or kept is None:
        kept = form(plan, graph_for(plan, graph))
    return STYLES[style](kept)


def megatron(found: ParallelForm) -> Flags:
    """Megatron-LM."""
    obstacles, notes = list(found.obstacles), list(found.notes)
    out = [
        f"--tensor-model-parallel-size {found.tensor}",
        f"--pipeline-model-parallel-size {found.stages}",
        f"--micro-batch-size {found.micro_batch_size}",
        f"--global-batch-size {found.samples}",
    ]
    if found.virtual > 1:
        out.append(f"--num-virtual-stages-per-pipeline-rank {found.virtual}")
    if found.schedule not in ("", "1f1b", "interleaved"):
        obstacles.append(f"it has no schedule like {found.schedule}")
    if found.sequence:
        out.append("--sequence-parallel")
    if found.zero == 1:
        out.append("--use-distributed-optimizer")
    elif found.zero:
        strategy = "optim_grads" if found.zero == 2 else "optim_grads_params"
        out += [
            "--use-distributed-optimizer",
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {strategy}",
            "--no-gradient-accumulation-fusion",
        ]
        if found.stages > 1:
            notes.append("parameters are gathered again for every micro-batch there")
    if found.zero and found.pieces < found.data:
        out.append(f"--num-distributed-optimizer-instances {found.data // found.pieces}")
    if found.recompute:
        if any(p.startswith("%") for p in found.recompute):
            obstacles.append(f"no flag recomputes just these: {', '.join(found.recompute)}")
        if sparing(found):
            obstacles.append("no flag recomputes blocks without their products")
        # `block`: so many of the first layers of each stage; `uniform`: all, one by one.
        method, count = ("block", max(found.again)) if found.again else ("uniform", 1)
        out += ["--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {count}"]
        if not found.leading:
            notes.append("blocks that are recomputed are not the first ones of their stage; there they would be")
        if any(n < min(count, m) for n, m in zip(found.again, found.layers, strict=True)):
            said = ", ".join(map(str, found.again))
            notes.append(f"stages make {said} blocks again; there all would make as many as the most, in more time")
    return _flags("megatron", out, notes, obstacles)


def torchtitan(found: ParallelForm) -> Flags:
    """torchtitan."""
    obstacles, notes = list(found.obstacles), list(found.notes)
    shard = found.pieces if found.zero else 1
    out = [
        f"--parallelism.tensor_parallel_degree {found.tensor}",
        f"--parallelism.pipeline_parallel_degree {found.stages}",
        f"--parallelism.data_parallel_shard_degree {shard}",
        f"--parallelism.data_parallel_replicate_degree {found.data // shard}",
        f"--training.local_batch_size {found.micro_batch_size * (found.micro_batches if found.stages > 1 else 1)}",
        f"--training.global_batch_size {found.samples}",
    ]
    if found.stages > 1:
        out.append(f"--parallelism.pipeline_parallel_microbatch_size {found.micro_batch_size}")
        if found.schedule in TITAN_SCHEDULES:
            out.append(f"--parallelism.pipeline_parallel_schedule {TITAN_SCHEDULES[found.schedule]}")
        else:
            obstacles.append(f"it has no schedule like {found.schedule}")
        if found.virtual > 1:
            notes.append(f"{found.virtual} stages on each rank follow from where layers are cut")
    if found.zero:
        out.append(
            f"--parallelism.fsdp_reshard_after_forward {'always' if found.zero == 3 and not found.once else 'never'}"
        )
        if found.zero == 1:
            notes.append("gradients are in shards there too: it has no stage 1 of ZeRO")
        if found.zero < 3:
            notes.append("parameters lie in shards between steps there, and are gathered in forward")
    if found.tensor > 1 and not found.sequence:
        notes.append("the residual stream is split by token there: it has no tensor parallelism without")
    if found.recompute:
        if any(p.startswith("%") for p in found.recompute):
            obstacles.append(f"no flag recomputes just these: {', '.join(found.recompute)}")
        if sparing(found):
            out += ["--activation_checkpoint.mode selective", "--activation_checkpoint.selective_ac_option op"]
            notes.append("every second product is recomputed there, too")
        else:
            out.append("--activation_checkpoint.mode full")
        if found.again:
            notes.append(f"{sum(found.again)} of {sum(found.layers)} blocks are recomputed; there all would be")
    else:
        out.append("--activation_checkpoint.mode none")
    return _flags("torchtitan", out, notes, obstacles)


def sparing(found: ParallelForm) -> bool:
    """Whether products are kept of what is recomputed."""
    return any(WITHOUT_PRODUCTS in p for p in found.recompute)


def _flags(style: str, out: list[str], notes: list[str], obstacles: list[str]) -> Flags:
    return Flags(style, () if obstacles else tuple(out), tuple(notes), tuple(dict.fromkeys(obstacles)))


STYLES: dict[str, Callable[[ParallelForm], Flags]] = {"megatron": megatron, "torchtitan": torchtitan}

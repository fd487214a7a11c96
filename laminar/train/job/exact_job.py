"""A job in exact mode: the hash of its state after any step is the same for any number of processes and any hosting.

What computes is a set of logical ranks that belongs to the job (`ir/exact.py`); which process computes which of them is
a `Hosting`, and may change between any two steps. What each process stores of weights and state is said by `plan`, as
in other jobs, and changes no bit either: weights are gathered whole, gradients leave whole, and updates are cut so that
no kernel sees where (`optimizer/whole_vectors.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laminar.errors import LaminarError, MeshError, PlanError
from laminar.events import emit
from laminar.ir.exact import Exact, Hosting
from laminar.ir.plans.plan import Plan
from laminar.runtime.exact.hosts import HostedRanks
from laminar.runtime.exact.stage_hosts import StageHosts
from laminar.train.batch.leaves import Leaves
from laminar.train.engine.engine import Engine, Ready
from laminar.train.engine.exact_engine import ExactEngine
from laminar.train.engine.exact_identity import exact_identity, refuse_identity
from laminar.train.engine.staged_exact_engine import StagedExactEngine
from laminar.train.job import plan_for
from laminar.train.job.job import Job
from laminar.train.optimizer import optimizer as optim
from laminar.train.optimizer.gradients import total_norm
from laminar.train.optimizer.optimizer import Kept
from laminar.train.optimizer.whole_vectors import WholeVectors, refuse_if_cuts_change_bits
from laminar.train.options import DEFAULTS, JobOptions
from laminar.train.state.change_layout import change_layout
from laminar.train.state.resharder import CarryBetweenMeshes, Resharder
from laminar.train.state.state import JobState, StateLayout
from laminar.train.timeline import Recording
from laminar.train.world import ProcessGroups, World

STORAGE = ("auto", "data", "zero1", "zero2", "zero3")
"""What processes store, by the names of plans."""


class ExactJob(Job):
    """See `laminar.parallelize(exact=...)`."""

    engine: ExactEngine

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        batch: Any,
        exact: Exact,
        plan: Any = "auto",
        options: JobOptions = DEFAULTS,
        hosting: Hosting | None = None,
    ) -> None:
        """`hosting` says who computes what at first; evenly unless given."""
        refuse_options(plan, options)
        world = World(options.device, options.timeout_s)
        self.exact, self.hosting = exact, self._checked(exact, hosting, world.size)
        torch.set_num_threads(exact.threads)
        if world.device.type == "cuda":
            deterministic_kernels()
        self.identity = exact_identity(exact, world.device, options.micro_batches, str(options.precision))
        for rank, theirs in enumerate(world.gather_objects(self.identity)):
            refuse_identity(self.identity, theirs, f"rank {rank}")
        self._stored_as = plan
        super().__init__(model, loss, optimizer, batch, plan, options, world=world)
        samples, parts = self._leaves(batch).samples, exact.units * options.micro_batches
        if samples % parts and world.rank == 0:
            said = f"{samples} samples are not divisible by {parts} units: what can't be cut is computed by every unit"
            logging.getLogger("laminar").warning(said)

    def _begin(self, world: World, state: JobState, plan: Plan, first: Leaves) -> None:
        self._first_batch = first
        super()._begin(world, state, plan, first)
        if isinstance(self.engine, StagedExactEngine):
            self.identity["cut"] = self.engine.cut_of(self._first)

    @staticmethod
    def _checked(exact: Exact, hosting: Hosting | None, processes: int) -> Hosting:
        if processes > exact.ranks:
            raise MeshError(
                f"{processes} processes for the {exact.ranks} logical ranks of {exact}",
                allowed=f"at most {exact.ranks} processes",
                next=f"start {exact.ranks}, or begin the run with more units",
            )
        hosting = Hosting.even(exact.ranks, processes) if hosting is None else hosting
        if len(hosting.processes) != exact.ranks or hosting.size != processes:
            raise MeshError(
                f"a hosting of {len(hosting.processes)} logical ranks on {hosting.size} processes",
                allowed=f"{exact.ranks} logical ranks on {processes} processes",
            )
        return hosting

    def _engine_around(self, state: JobState, plan: Plan, world: World) -> Engine:
        refuse_if_cuts_change_bits(state.optimizer, state.kept)
        self.whole_vectors = WholeVectors(state.optimizer, state.kept, state.held)
        storage, self._groups = Resharder(world.transport(plan.mesh)), ProcessGroups(world)
        hosts = self._hosts(world)
        if isinstance(hosts, StageHosts):
            return StagedExactEngine(self.tracer, plan, state, storage, hosts, self.exact, world)
        return ExactEngine(self.tracer, plan, state, storage, hosts, self.exact)

    def _hosts(self, world: World) -> HostedRanks | StageHosts:
        if self.exact.stages > 1:
            if world.device.type == "cuda" and world.size > 1:
                raise LaminarError(
                    "stages in exact mode on several GPUs",
                    why="it was never tried there",
                    next="one process, or no stages",
                )
            return StageHosts(self.exact, self.hosting, world.rank, self._groups, world.device, world.timeout_s)
        group = world.process_group if world.size > 1 else None
        return HostedRanks(self.exact.mesh, self.hosting, world.rank, group, world.device, timeout_s=world.timeout_s)

    def _micro_batches(self, micros: list[Leaves], scale: float) -> tuple[Ready, list[Tensor], list[Tensor]]:
        if not isinstance(self.engine, StagedExactEngine):
            return super()._micro_batches(micros, scale)
        fed = list(self._fed(micros, scale))
        return fed[-1][0], *self.engine.run(fed)

    def _norm_and_parts(
        self, names: tuple[str, ...], kept: list[Kept], grads: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        if not isinstance(self.engine, StagedExactEngine):
            return super()._norm_and_parts(names, kept, grads)
        self.recorder.mark("gradients")
        return total_norm([self.engine.norms[n] for n in names]), optim.laid_out(kept, grads, self.state.plain)

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds from step to step."""
        found = super().memory()
        if isinstance(self.engine, StagedExactEngine):
            found["gradients"] = self.engine.gradient_bytes(self._first)
        return found

    def _optimizer_step(self) -> None:
        self.whole_vectors.step()

    def timeline(self, steps: int | None = None) -> Recording:
        """Not to be had: lines are stamped per rank, and a process computes several."""
        raise LaminarError("an exact job records no timeline", next="record one of the same plan without exact=")

    # --- other hostings ---------------------------------------------------------------------------

    def rehost(self, hosting: Hosting) -> None:
        """Go on with other logical ranks on each process; no bit changes by it."""
        self.hosting = self._checked(self.exact, hosting, self.world)
        self.engine.rehost(self._hosts(self.peers))
        self._first = self.engine.ready(self._first_batch)
        emit("rehost", processes=list(hosting.processes))

    def resize(self, ranks: int) -> bool:
        """Go on with the first so many of the processes there are; whether this one is among them.

        Every process calls this. One that is not holds nothing any more, and may end.
        """
        if not 1 <= ranks <= self.world:
            raise MeshError(
                f"{ranks} processes of {self.world}",
                allowed=f"1 to {self.world}",
                next="for more, save the job and resume it in a world of that many",
            )
        if ranks == self.world:
            return True
        stays = self.rank < ranks
        old, state = self.peers, self.state
        plan = plan_for.chosen(
            plan_for.loaded(self._stored_as), self.graph, plan_for.mesh_for("data", None, ranks), self.device
        )
        names = [s.name for s in state.slots]
        layout = StateLayout.of_plan(plan, names, self.rank if stays else 0)

        self.engine.close()
        if self._guard is not None:
            self._guard.take_off()
        group = dist.new_group(list(old.ranks[:ranks]))
        change_layout(state, layout, range(old.size), CarryBetweenMeshes(old))
        emit("resize", ranks=ranks, before=old.size)
        if not stays:
            self._released, self._guard = True, None
            return False
        world = World(self.device, old.timeout_s, group, generation=old.generation + 1)
        self.hosting = Hosting.even(self.exact.ranks, ranks)
        self._begin(world, state, plan, self._first_batch)
        return True

    # --- identity ---------------------------------------------------------------------------------

    def saved_identity(self) -> dict[str, Any]:
        """What a checkpoint keeps of how this run's bits come about."""
        return self.identity

    def refuse_saved(self, identity: dict[str, Any] | None) -> None:
        """Refuse to go on with a checkpoint whose bits came about in another way."""
        if identity is None:
            logging.getLogger("laminar").warning("the run that was saved was not in exact mode: exact from here on")
        else:
            before = {**Exact().to_json(), **identity}  # what this run says and that one did not yet is as it was
            refuse_identity(self.identity, before, "the run that was saved")


def refuse_options(plan: Any, options: JobOptions) -> None:
    """What does not go with exact mode, by name."""
    if not isinstance(plan_for.loaded(plan), str) or plan_for.loaded(plan) not in STORAGE:
        raise PlanError(
            f"plan={plan!r} in exact mode",
            allowed="  ".join(STORAGE) + ", what processes store",
            why="which ranks compute what belongs to the run: units, slices, context and stages of laminar.Exact",
            next="weights cut: exact=laminar.Exact(slices=2); sequences cut: exact=laminar.Exact(context=2); "
            "the model cut: exact=laminar.Exact(stages=2)",
        )
    asked = {
        "mesh": options.mesh is not None,
        "compile": bool(options.compile),
        "detect_anomaly": options.detect_anomaly,
    }
    for name, given in asked.items():
        if given:
            raise LaminarError(f"{name} does not go with exact mode", next="leave it out")


def deterministic_kernels() -> None:
    """On a GPU: kernels that add in the same order every time, or an error that names the op."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # nothing reads it
    torch.backends.cudnn.benchmark = False

"""What jobs have in common: state, the ranks, a recorder, a loader, and what users ask of these.

A job of any kind is built by making these parts and then handing them in; nothing here is left for others to fill in.
What differs is how a step and an evaluation are run, and that is in the classes of each kind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.model.model_tensors import Slot
from laminar.errors import StateError
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.runtime.pipeline.loader import Loader
from laminar.train.batch.metrics import log_numbers
from laminar.train.formats.export import export
from laminar.train.formats.load_weights import load_weights
from laminar.train.optimizer import optimizer as optim
from laminar.train.optimizer.precision import Precision, Scaler
from laminar.train.options import JobOptions
from laminar.train.saving import checkpoint
from laminar.train.saving.saver import Saver
from laminar.train.saving.snapshots.snapshot_plan import SnapshotPlanner
from laminar.train.saving.state_root import state_record_of
from laminar.train.state.fill import LoadedWeights
from laminar.train.state.gather import Gather
from laminar.train.state.sharded_model import Pieces, released
from laminar.train.state.state import JobState, StateLayout, moved_to
from laminar.train.timeline import Recording, StepRecorder
from laminar.train.world import World


def taken_over(
    model: nn.Module, optimizer: Any, world: World, precision: Precision
) -> tuple[list[Slot], torch.optim.Optimizer]:
    """The model's tensors, whole and on this rank's device, and the optimizer over them, made if it is a factory."""
    released(model)
    slots = moved_to(model, world.device, precision.weights)
    optimizer = optim.made(optimizer, model.parameters())
    optim.refuse_unknown(optimizer, {id(s.tensor): s.name for s in slots})
    return slots, optimizer


def first_state(
    model: nn.Module,
    slots: list[Slot],
    optimizer: torch.optim.Optimizer,
    layout: StateLayout,
    options: JobOptions,
    precision: Precision,
) -> JobState:
    """The state of a run that begins now, laid out over its ranks."""
    return JobState(
        model,
        slots,
        optimizer,
        layout,
        seed=options.seed,
        ema=options.ema,
        scaler=Scaler() if precision.scaled else None,
        rounded=precision.rounding != "nearest",
        elementwise=options.elementwise,
    )


class BaseJob:
    """State among ranks, and what users do with it."""

    def __init__(
        self,
        world: World,
        plan: Plan | Staged | None,
        mesh: Mesh,
        state: JobState,
        gather: Gather,
        recorder: StepRecorder,
    ) -> None:
        self.peers, self.plan, self.mesh, self.state, self.gather = world, plan, mesh, state, gather
        self.recorder, self.loader = recorder, recorder.loader
        self.rank, self.world, self.device = world.rank, world.size, world.device
        self.optimizer = state.optimizer
        self.savers: dict[str, Saver] = {}
        """What writes checkpoints, by store."""
        self.planner = SnapshotPlanner(world)
        self._released = False
        self._guard: Pieces | None = None
        """What stands on the user's model where ranks have parts of it."""
        if state.cut:
            self._guard = Pieces(self.release)
            self._guard.put_on(state.model, state.cut)

    @property
    def steps(self) -> int:
        """Steps made so far, those before a resumption included."""
        return self.state.steps

    @property
    def seed(self) -> int:
        """What all draws depend on, besides the step."""
        return self.state.seed

    @property
    def model(self) -> nn.Module:
        """The model with whole weights, for inference; where ranks hold pieces, a copy that is made anew here."""
        return self.state.whole_model(self.gather)

    def prefetch(self, data: Iterable[Any], depth: int = 2) -> Loader:
        """The batches of `data`, loaded by a thread of their own, at most `depth` ahead; see `Prefetcher`."""
        return self.loader(data, depth)

    def timeline(self, steps: int | None = None) -> Recording:
        """Record the steps made inside a `with` block, at most the first `steps`; see `StepRecorder.timeline`."""
        return self.recorder.timeline(steps)

    def log(self, **values: Any) -> None:
        """Numbers of your own, such as `job.log(accuracy=0.9)`, into the events of the run, with the step's number."""
        log_numbers(self.steps, values)

    # --- weights and state ------------------------------------------------------------------------

    def state_dict(self, sharded: bool = False, ema: bool = False) -> dict[str, Any]:
        """Weights and buffers under the model's own names: whole tensors, or DTensors.

        `ema=True` gives the moving average of the weights instead.
        """
        return self.state.state_dict(self.gather, sharded, ema)

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state dict of this model, from here or from plain PyTorch."""
        self.state.load_state_dict(given)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` would be on one device."""
        return self.state.optimizer_state_dict(self.gather)

    def load_optimizer_state_dict(self, given: Mapping[str, Any]) -> None:
        """The inverse; also of what a plain optimizer over the same parameters saved."""
        self.state.load_optimizer_state_dict(given)

    def load_average(self, given: Mapping[str, Tensor]) -> None:
        """Take the moving average of the weights from whole tensors."""
        self.state.load_average(given)

    def hash(self) -> str:
        """The root over all that a run is: equal exactly if all of it is, bit for bit, however it lies on ranks.

        That is weights, buffers, optimizer state and hyper-parameters, averages, the scale of the loss, steps and seed.
        """
        return state_record_of(self).root

    def save(self, uri: str | Path, scheduler: Any = None, wait: bool = True) -> None:
        """Save weights, optimizer state and all else that a run is as a checkpoint in a store: a folder, or a URI.

        Every rank writes its part. The first save begins a run there, later ones add to it; nothing is ever replaced.
        Learning-rate schedulers of torch's on the job's optimizer are kept too; others can be named, one or a list.
        Without `wait` it is written beside the steps that follow; the next save waits for it.
        """
        checkpoint.save(self, uri, scheduler, wait)

    def resume(self, uri: str | Path, scheduler: Any = None, generators: bool = True) -> Mapping[str, Any]:
        """Go on from the last whole checkpoint in a store, on any layout; what was saved beside the state.

        `uri#run` says which run, where there are several, and `uri#run@step` which of its checkpoints. Schedulers go on
        too, and random generators (Python's, NumPy's, torch's) unless that is not wanted.
        """
        return checkpoint.resume(self, uri, scheduler, generators)

    def load_weights(
        self, path: str | Path, *, only: str = "", rename: Mapping[str, str] | None = None, strict: bool = True
    ) -> LoadedWeights:
        """Take weights from safetensors (a file, or a Hugging Face folder), a file of `torch.save`, or a DCP folder.

        `only="encoder."` takes one submodule's; `rename={"model.": ""}` exchanges prefixes of the files' names;
        `strict=False` takes what fits, and tells what is missing and what was not expected. Shapes have to fit always,
        and nothing is changed unless everything could be read. Every rank reads what it holds. Optimizer state and
        steps stay as they are, moving averages begin anew.
        """
        return load_weights(self, path, only=only, rename=rename, strict=strict)

    def export(self, directory: str | Path, ema: bool = False) -> list[str]:
        """Write the weights, or their moving average, as Hugging Face reads them; the names of the files.

        `model.safetensors`, or above 5 GB several files and `model.safetensors.index.json`. Weights are put together
        a few at a time, and the files appear when they are whole.
        """
        return export(self, directory, ema)

    def saved_identity(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of how this run's bits come about; nothing outside of exact mode."""
        return None

    def refuse_saved(self, identity: dict[str, Any] | None) -> None:
        """Refuse to go on with a checkpoint whose bits came about in another way, where bits count."""
        if identity is not None:
            said = "the run that was saved was in exact mode; it goes on without, and its bits depend on the layout"
            logging.getLogger("laminar").warning(said)

    # --- the end ----------------------------------------------------------------------------------

    def release(self) -> None:
        """Put whole weights back into the user's own model, and whole state into its optimizer; the job ends with that.

        Every rank calls it, and has room for the whole model afterwards. A second job on the same model does it by
        itself.
        """
        if self._guard is not None:
            self._released = True
            self.state.give_back(self.gather)
            self._guard.take_off()
            self._guard = None

    def _check_saves(self) -> None:
        """Say what became of saves beside the steps, if one has failed."""
        for saver in self.savers.values():
            saver.check()

    def _refuse_released(self) -> None:
        if self._released:
            raise StateError("this job has given its model back", next="make a new job with laminar.parallelize")

    def close(self) -> None:
        """Leave the process group, if this job made it."""
        self.peers.close()

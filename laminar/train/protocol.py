"""What every job can do, whatever it is made of: this is what `laminar.parallelize` returns.

Three kinds satisfy it: `Job` (one plan for all ranks), `StagedJob` (a pipeline) and `DdpJob` (torch's own data
parallel, for a model that can't be captured). All methods are collective: every rank calls them, in the same order.
`tests/train/test_protocol.py` holds the three against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from laminar.capture.model.losses import Metrics
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.ir.program import Program
from laminar.runtime.pipeline.loader import Loader
from laminar.train.batch.metrics import Evaluation, Result
from laminar.train.batch.prefetch import Prefetcher
from laminar.train.state.fill import LoadedWeights
from laminar.train.state.gather import Gather
from laminar.train.state.state import JobState
from laminar.train.timeline import Recording, StepRecorder
from laminar.train.world import World


class HasState(Protocol):
    """A job as checkpoints see it: state, and the ranks that have it together."""

    @property
    def state(self) -> JobState:
        """Weights, optimizer state, averages and counters, as this rank has them."""
        ...

    @property
    def peers(self) -> World:
        """The ranks that train together."""
        ...

    @property
    def savers(self) -> dict[str, Any]:
        """What writes its checkpoints, by store."""
        ...

    @property
    def planner(self) -> Any:
        """What plans who writes which of its blocks (`saving/snapshots/snapshot_plan.py`)."""
        ...

    @property
    def gather(self) -> Gather:
        """What puts tensors together of which ranks have parts."""
        ...

    @property
    def plan(self) -> Plan | Staged | None:
        """What was decided; nothing for torch's own data parallel, unless a search has chosen that."""
        ...

    def state_dict(self, sharded: bool = False, ema: bool = False) -> dict[str, Any]:
        """Weights and buffers under the model's own names: whole tensors, or DTensors; or the weights' average."""
        ...

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state dict of this model."""
        ...

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` would be on one device."""
        ...

    def load_optimizer_state_dict(self, given: Mapping[str, Any]) -> None:
        """The inverse."""
        ...

    def load_average(self, given: Mapping[str, Tensor]) -> None:
        """Take the moving average of the weights from whole tensors."""
        ...

    def saved_identity(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of how this run's bits come about; nothing outside of exact mode."""
        ...

    def refuse_saved(self, identity: dict[str, Any] | None) -> None:
        """Refuse to go on with a checkpoint whose bits came about in another way, where bits count."""
        ...


@runtime_checkable
class TrainingJob(HasState, Protocol):
    """A model, its loss and its optimizer, trained as planned."""

    # --- what it is made of

    @property
    def recorder(self) -> StepRecorder:
        """What steps leave their stamps with."""
        ...

    @property
    def loader(self) -> Prefetcher:
        """What makes loaders for `prefetch`."""
        ...

    # --- where it runs

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The ranks on named axes; of a plan with stages those of this rank's place."""
        ...

    @property
    def graph(self) -> Graph | None:
        """The captured graph of the first (micro-)batch, where there is one."""
        ...

    @property
    def program(self) -> Program | None:
        """The program of the first batch, where there is one for the whole step."""
        ...

    # --- training

    @property
    def steps(self) -> int:
        """Steps made so far, those before a resumption included."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's, over what this rank owns."""
        ...

    @property
    def model(self) -> nn.Module:
        """The model with whole weights, for inference."""
        ...

    def step(self, batch: Any) -> Result:
        """Train on one batch: the global one, or `Local(share)`; the result is read from the device when asked."""
        ...

    def evaluate(self, batches: Iterable[Any], metrics: Metrics | None = None) -> Evaluation:
        """The loss over batches with the model in evaluation mode, and metrics over them."""
        ...

    def prefetch(self, data: Iterable[Any], depth: int = 2) -> Loader:
        """Batches of `data`, loaded beside the steps, at most `depth` ahead."""
        ...

    # --- state in and out

    def hash(self) -> str:
        """Hex digest over weights, buffers and optimizer state."""
        ...

    def save(self, uri: str | Path, scheduler: Any = None, wait: bool = True) -> None:
        """Save all that a run is as a checkpoint in a store."""
        ...

    def resume(self, uri: str | Path, scheduler: Any = None, generators: bool = True) -> Mapping[str, Any]:
        """Go on from the last whole checkpoint in a store; what was saved beside the state."""
        ...

    def load_weights(
        self, path: str | Path, *, only: str = "", rename: Mapping[str, str] | None = None, strict: bool = True
    ) -> LoadedWeights:
        """Take weights from files of other programs."""
        ...

    def export(self, directory: str | Path, ema: bool = False) -> list[str]:
        """Write weights as safetensors files that others read."""
        ...

    # --- what it tells

    def log(self, **values: Any) -> None:
        """Numbers of a user's own into the events of the run."""
        ...

    def timeline(self, steps: int | None = None) -> Recording:
        """Record the steps made inside a `with` block."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds from step to step."""
        ...

    # --- the end

    def release(self) -> None:
        """Make the user's model and optimizer whole again; the job ends with that."""
        ...

    def close(self) -> None:
        """Leave the process group, if this job made it."""
        ...

"""torch's own data parallel behind the same job, for models that can't be captured.

A model whose forward looks at its data can't be written down as one graph. It can still be trained
with every rank running the model itself on its share of the batch. What is different then is said
once, when the job is made: one layout, statistics of batch norm per rank, torch's own random numbers.
Losses are weighted as everywhere: totals and weights are summed over ranks and micro-batches, and
divided once.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.model.batches import unflatten
from laminar.capture.model.losses import Loss, Metrics, taken_apart, weighed, with_metrics
from laminar.capture.tracing.refuse import refuse_loss
from laminar.errors import BatchError, LaminarError, OptimizerError, StateError
from laminar.ir.mesh import Mesh, Place
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import chunk
from laminar.runtime.comm.transport import Null
from laminar.train.batch.batch_checksum import Sampled
from laminar.train.batch.leaves import Leaves
from laminar.train.batch.metrics import Evaluation, Result, Sums, evaluation_mode
from laminar.train.batch.prefetch import Prefetcher
from laminar.train.job.base_job import BaseJob, taken_over
from laminar.train.job.job import CHECKS, clock_of
from laminar.train.optimizer import optimizer as optim
from laminar.train.optimizer.gradients import Norm, scale_and_clip
from laminar.train.optimizer.precision import Precision, Scaler
from laminar.train.options import DEFAULTS, JobOptions
from laminar.train.state.gather import GatherFromMesh
from laminar.train.state.resharder import Resharder
from laminar.train.state.state import JobState, StateLayout
from laminar.train.timeline import StepRecorder
from laminar.train.world import World

LIMITS = """plan="ddp": the model runs as it is on every rank. Batch norm sees each rank's share only, dropout
depends on the number of ranks, parameters and optimizer state are whole on every rank, nothing is compiled."""


class DdpJob(BaseJob):
    """A job with the same methods as `Job`; without a plan (unless a search has chosen it), a graph or a program."""

    graph = program = None

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        batch: Any,
        options: JobOptions = DEFAULTS,
        plan: Plan | None = None,
        world: World | None = None,
    ) -> None:
        """`plan` is the one that says that DDP was measured fastest: then the model is one that it runs exactly.

        `world` are the ranks, where they have met.
        """
        world = World(options.device, options.timeout_s) if world is None else world
        if world.rank == 0 and plan is None:
            warnings.warn(LIMITS, stacklevel=3)
        mesh = Mesh({"dp": world.size})
        self.precision = Precision.of(options.precision)
        if self.precision.rounding != "nearest":
            raise LaminarError(
                f'plan="ddp" has no precision {self.precision.name}', allowed="f32  bf16  fp16  bf16-pure"
            )
        self.micro_batches = options.micro_batches
        self.clip_norm, self.clip_value = options.clip_norm, options.clip_value
        slots, optimizer = taken_over(model, optimizer, world, self.precision)
        self._closes = optim.takes_closure(optimizer)
        scaler = Scaler() if self.precision.scaled else None
        if scaler is not None:
            optim.refuse_closure(optimizer, f"precision={self.precision.name!r} may skip a step")
        optim.faster(optimizer, world.device)
        self._loss = self.precision.around(loss, world.device)
        self._wrapped: nn.Module = _Whole(model, self._loss)
        if world.size > 1:
            # A parameter that one batch does not reach is normal for the models this is for, unless they are known.
            known = plan is not None
            self._wrapped = nn.parallel.DistributedDataParallel(
                self._wrapped,
                process_group=world.process_group,
                find_unused_parameters=not known,
                gradient_as_bucket_view=known,
                broadcast_buffers=not known,
            )
        if plan is None:
            torch.manual_seed(options.seed + world.rank)
        self._checks, self._noted, self._sampled = CHECKS, tuple[str, ...](), Sampled()
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._flags = [(n, p, p.requires_grad) for n, p in model.named_parameters()]
        layout = StateLayout((Place(tuple(range(world.size)), mesh),), world.rank)
        state = JobState(
            model, slots, optimizer, layout, seed=options.seed, ema=options.ema, scaler=scaler, runs_itself=True
        )
        state.resolve()
        gather = GatherFromMesh(Resharder(Null(mesh, world.rank, world.device)), world)
        super().__init__(world, plan, mesh, state, gather, StepRecorder(world, Prefetcher(world)))

    def _share(self, batch: Any) -> Leaves:
        """This rank's part of a batch."""
        leaves = Leaves.of(batch)
        tensors, n = leaves.tensors, leaves.samples
        if leaves.sizes:
            raise BatchError('plan="ddp" has no say in the sizes of micro-batches', next="give the batch as it is")
        if not leaves.local:
            if n < self.world:
                raise BatchError(f"{n} samples for {self.world} ranks", next="use larger batches, or fewer ranks")
            start, length = chunk(n, self.world, self.rank)
            if not length:
                raise BatchError(
                    f"{n} samples leave rank {self.rank} of {self.world} without any",
                    next="use a multiple of the number of ranks",
                )
            tensors = {k: t.narrow(0, start, length) if t.dim() and t.shape[0] == n else t for k, t in tensors.items()}
        placed = {k: self.precision.leaf(t).to(self.device) for k, t in tensors.items()}
        return Leaves(placed, leaves.tree, True)

    def step(self, batch: Any) -> Result:
        """Train on one batch: the global one, or `Local(share)`."""
        self._check_saves()
        return self._step(batch) if self.recorder.tape is None else self.recorder.step(self._step, batch)

    def _step(self, batch: Any) -> Result:
        clock = clock_of(self.device)
        if self.plan is not None and self.world > 1:
            self._agree(batch)
        self._refuse_changes()
        micros = self._share(batch).split(self.micro_batches)
        self.recorder.mark("batch")
        scaler = self.state.scaler
        scale = scaler.scale if scaler else 1.0
        if self._closes:
            return self._closed_step(micros, clock)
        loss, weight, metrics = self._gradients(micros, scale)
        return self._update(loss, weight, scale, clock).attach(metrics)

    def _agree(self, batch: Any) -> None:
        """Batches must be alike on all ranks, as in any job with a plan; see `Job._agreed`."""
        leaves = Leaves.of(batch)
        note, values = leaves.key, "" if leaves.local else self._sampled(leaves.tensors, self.peers.notes + 1)
        if self._checks and not leaves.local:
            self._checks -= 1
            note = (*note, f"values {leaves.fingerprint()}")
        self.peers.agree(" ".join(note[1:]), note != self._noted, "", values)
        self._noted = note

    def _refuse_changes(self) -> None:
        """What a user changed since the last step: taken into account, but for what torch's DDP has settled."""
        for name, param, trained in self._flags:
            if param.requires_grad is not trained:
                raise OptimizerError(
                    f"{name} was {'frozen' if trained else 'unfrozen'} after the job was made",
                    why='plan="ddp" sums the gradients that there were',
                    next="make a new job",
                )
        if not self.state.tracked.same():
            self.state.resolve()

    def _gradients(self, micros: list[Leaves], scale: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Leave gradients of the total in the parameters; the loss of the global batch, its weight, and metrics."""
        sums = Sums()
        for i, micro in enumerate(micros):
            last = i == len(micros) - 1
            quiet = self._wrapped.no_sync() if self.world > 1 and not last else contextlib.nullcontext()  # type: ignore[operator]
            with quiet:
                total, weight, metrics = self._wrapped(_batch(micro), micro.samples)
                sums.add("", total.detach(), weight.detach())
                for name, (part, count) in metrics.items():
                    sums.add(name, part, count)
                self.recorder.mark("forward")
                # DDP averages over ranks; here terms are summed, so each is made larger first.
                (total * (scale * self.world)).backward()
                self.recorder.mark("backward")
        (loss, weight), metrics = self._together(sums)
        return loss / weight, weight, {n: t / w for n, (t, w) in metrics.items()}

    def _together(self, sums: Sums) -> tuple[tuple[Tensor, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """Totals and weights over all ranks: of the loss, and of metrics."""
        flat = [x for pair in sums.by_name.values() for x in pair]
        parts = [torch.as_tensor(x, dtype=torch.float64, device=self.device) for x in flat]
        summed = self.peers.all_reduce(torch.stack(parts)).unbind()
        pairs = dict(zip(sums.by_name, zip(summed[::2], summed[1::2], strict=True), strict=True))
        return pairs.pop(""), pairs

    def _closed_step(self, micros: list[Leaves], clock: Any) -> Result:
        """A step of an optimizer that computes loss and gradients itself; all ranks see the same and decide alike."""
        found: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss, weight, metrics = self._gradients(micros, 1.0)
            grads = [p.grad for p in self._params if p.grad is not None]
            norm = Norm([], self.mesh, self.peers)(grads)
            norm = scale_and_clip(grads, norm, (1.0 / weight).to(norm.dtype), self.clip_norm, self.clip_value)
            found.append((loss, norm, metrics))
            return loss

        self.state.about_to_change()
        self.optimizer.step(closure)  # type: ignore[arg-type]
        self.optimizer.zero_grad()
        self.recorder.mark("optimizer")
        self.state.average()
        number, self.state.steps = self.state.steps, self.state.steps + 1
        lr = optim.first_lr(self.optimizer)
        loss, norm, metrics = found[0]
        return Result(number, loss, norm, lr, clock(), False).attach(metrics)

    def _update(self, loss: Tensor, weight: Tensor, scale: float, clock: Any) -> Result:
        grads = [p.grad for p in self._params if p.grad is not None]
        norm = Norm([], self.mesh, self.peers)(grads)
        lr = optim.first_lr(self.optimizer)
        inverse = (1.0 / (scale * weight)).to(norm.dtype)
        state = self.state
        number, state.steps = state.steps, state.steps + 1
        if state.scaler is not None:
            finite = math.isfinite(float(norm))
            state.scaler.update(finite)
            if not finite:
                self.optimizer.zero_grad()
                return Result(number, loss, norm * inverse, lr, clock(), True)
        norm = scale_and_clip(grads, norm, inverse, self.clip_norm, self.clip_value)
        self.recorder.mark("gradients")
        state.about_to_change()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.recorder.mark("optimizer")
        state.average()
        return Result(number, loss, norm, lr, clock(), False)

    def evaluate(self, batches: Iterable[Any], metrics: Metrics | None = None) -> Evaluation:
        """The loss over batches with the model in evaluation mode; see `Job.evaluate`."""
        around = partial(self.precision.around, device=self.device)
        loss = with_metrics(self._loss, {n: around(f) for n, f in metrics.items()}) if metrics else self._loss
        sums = Sums()
        sums.add("", 0.0, 0.0)
        with evaluation_mode(self.state.model), torch.no_grad():
            for batch in batches:
                share = self._share(batch)
                trains, rest = taken_apart(loss(self.state.model, _batch(share)))
                for name, value in {"": trains, **rest}.items():
                    sums.add(name, *weighed(value, share.samples))
        (total, weight), found = self._together(sums)
        return Sums.of({"": (total, weight), **found}).evaluation

    def state_dict(self, sharded: bool = False, ema: bool = False) -> dict[str, Any]:
        """The model's own state dict; `ema=True` with the moving average of the weights."""
        if sharded:
            raise StateError('plan="ddp" keeps whole tensors on every rank', next="call state_dict()")
        return super().state_dict(ema=True) if ema else dict(self.state.model.state_dict())

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state dict of this model."""
        self.state.about_to_change()
        self.state.model.load_state_dict(given)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's own."""
        return self.optimizer.state_dict()

    def load_optimizer_state_dict(self, given: Mapping[str, Any]) -> None:
        """The inverse."""
        self.state.about_to_change()
        self.optimizer.load_state_dict(dict(given))
        self.state.resolve()

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds from step to step."""
        return {
            "parameters": sum(p.nbytes for p in self.state.model.parameters()),
            "gradients": sum(p.nbytes for p in self._params),
            "state": self.state.optimizer_bytes,
        }


class _Whole(nn.Module):
    """Model and loss as one forward, so that DDP sees every use of a parameter."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any, samples: int) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Total and weight of the loss, and of metrics, which nothing flows back from."""
        trains, rest = taken_apart(self.loss(self.model, batch))
        refuse_loss(trains.total if isinstance(trains, Loss) else trains)
        metrics = {name: weighed(value, samples) for name, value in rest.items()}
        return (*weighed(trains, samples), {n: (t.detach(), w.detach()) for n, (t, w) in metrics.items()})


def _batch(leaves: Leaves) -> Any:
    return unflatten(json.loads(leaves.tree), leaves.tensors)

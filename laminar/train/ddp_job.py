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
import torch.distributed as dist
from torch import Tensor, nn

from laminar.capture.batches import unflatten
from laminar.capture.losses import Loss, Metrics, taken_apart, weighed, with_metrics
from laminar.capture.refuse import refuse_loss
from laminar.capture.torch_ops import spec_of
from laminar.capture.torch_private import foreach_lerp
from laminar.errors import BatchError, LaminarError, OptimizerError, StateError
from laminar.ir.mesh import Mesh
from laminar.ir.plan import Plan
from laminar.ir.sbp import B, chunk
from laminar.train import checkpoint
from laminar.train import optimizer as optim
from laminar.train.batch_checksum import Sampled
from laminar.train.engine import Leaves
from laminar.train.gradients import Norm, scale_and_clip
from laminar.train.job import CHECKS, clock_of
from laminar.train.metrics import Evaluation, Logs, Result, Sums
from laminar.train.optimizer import Kept
from laminar.train.optimizer_changes import Tracked
from laminar.train.options import DEFAULTS, JobOptions
from laminar.train.precision import Precision, Scaler
from laminar.train.sharded_model import released
from laminar.train.timeline import Recorded
from laminar.train.world import World

LIMITS = """plan="ddp": the model runs as it is on every rank. Batch norm sees each rank's share only, dropout
depends on the number of ranks, parameters and optimizer state are whole on every rank, nothing is compiled."""


class DdpJob(Recorded, checkpoint.Stored, Logs):
    """A job with the same methods as `Job`, without a plan, a graph or a program."""

    plan: Plan | None = None
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
        self._world = World(options.device, options.timeout_s) if world is None else world
        self.rank, self.world, self.device = self._world.rank, self._world.size, self._world.device
        self.plan = plan
        if self.rank == 0 and plan is None:
            warnings.warn(LIMITS, stacklevel=3)
        self.mesh = Mesh({"dp": self.world})
        self.precision = Precision.of(options.precision)
        if self.precision.rounding != "nearest":
            raise LaminarError(
                f'plan="ddp" has no precision {self.precision.name}', allowed="f32  bf16  fp16  bf16-pure"
            )
        self.micro_batches, self.clip_norm, self.clip_value = (
            options.micro_batches,
            options.clip_norm,
            options.clip_value,
        )
        self.seed, self.steps = options.seed, 0
        self._scaler = Scaler() if self.precision.scaled else None
        self._model = model
        released(model)
        self._slots = checkpoint.moved(model, self.device, self.precision.weights)
        self.optimizer = optim.made(optimizer, model.parameters())
        optim.refuse_unknown(self.optimizer, {id(s.tensor): s.name for s in self._slots})
        self._closes = optim.takes_closure(self.optimizer)
        if self._scaler is not None:
            optim.refuse_closure(self.optimizer, f"precision={self.precision.name!r} may skip a step")
        optim.faster(self.optimizer, self.device)
        self._loss = self.precision.around(loss, self.device)
        self._wrapped: nn.Module = _Whole(model, self._loss)
        if self.world > 1:
            # A parameter that one batch does not reach is normal for the models this is for, unless they are known.
            known = plan is not None
            self._wrapped = nn.parallel.DistributedDataParallel(
                self._wrapped,
                find_unused_parameters=not known,
                gradient_as_bucket_view=known,
                broadcast_buffers=not known,
            )
        if plan is None:
            torch.manual_seed(self.seed + self.rank)
        self._checks, self._noted, self._sampled = CHECKS, tuple[str, ...](), Sampled()
        self._ema_decay = options.ema
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._flags = [(n, p, p.requires_grad) for n, p in model.named_parameters()]
        whole = (B,)
        self._kept = [
            Kept(s.name, spec_of(s.tensor), s.tensor, whole, whole, s.tensor)
            for s in self._slots
            if isinstance(s.tensor, nn.Parameter)
        ]
        self._tracked = Tracked(self.optimizer, self._kept)
        self._tracked.resolve(self._kept, lambda x, _: x)
        self._ema = [p.detach().float().clone() for p in self._params] if options.ema is not None else []

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
                raise BatchError(f"{n} samples leave rank {self.rank} of {self.world} without any",
                                 next="use a multiple of the number of ranks")  # fmt: skip
            tensors = {k: t.narrow(0, start, length) if t.dim() and t.shape[0] == n else t for k, t in tensors.items()}
        placed = {k: self.precision.leaf(t).to(self.device) for k, t in tensors.items()}
        return Leaves(placed, leaves.tree, True)

    def step(self, batch: Any) -> Result:
        """Train on one batch: the global one, or `Local(share)`."""
        return self._recorded_step(batch)  # type: ignore[no-any-return]

    def _step(self, batch: Any) -> Result:
        clock = clock_of(self.device)
        if self.plan is not None and self.world > 1:
            self._agree(batch)
        self._refuse_changes()
        micros = self._share(batch).split(self.micro_batches)
        self._mark("batch")
        scale = self._scaler.scale if self._scaler else 1.0
        if self._closes:
            return self._closed_step(micros, clock)
        loss, weight, metrics = self._gradients(micros, scale)
        return self._update(loss, weight, scale, clock).attach(metrics)

    def _agree(self, batch: Any) -> None:
        """Batches must be alike on all ranks, as in any job with a plan; see `Job._agreed`."""
        leaves = Leaves.of(batch)
        note, values = leaves.key, "" if leaves.local else self._sampled(leaves.tensors, self._world.notes + 1)
        if self._checks and not leaves.local:
            self._checks -= 1
            note = (*note, f"values {leaves.fingerprint()}")
        self._world.agree(" ".join(note[1:]), note != self._noted, "", values)
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
        if not self._tracked.same():
            self._tracked.resolve(self._kept, lambda x, _: x)

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
                self._mark("forward")
                # DDP averages over ranks; here terms are summed, so each is made larger first.
                (total * (scale * self.world)).backward()
                self._mark("backward")
        (loss, weight), metrics = self._together(sums)
        return loss / weight, weight, {n: t / w for n, (t, w) in metrics.items()}

    def _together(self, sums: Sums) -> tuple[tuple[Tensor, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """Totals and weights over all ranks: of the loss, and of metrics."""
        flat = [x for pair in sums.by_name.values() for x in pair]
        parts = [torch.as_tensor(x, dtype=torch.float64, device=self.device) for x in flat]
        summed = self._summed(torch.stack(parts)).unbind()
        pairs = dict(zip(sums.by_name, zip(summed[::2], summed[1::2], strict=True), strict=True))
        return pairs.pop(""), pairs

    def _closed_step(self, micros: list[Leaves], clock: Any) -> Result:
        """A step of an optimizer that computes loss and gradients itself; all ranks see the same and decide alike."""
        found: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss, weight, metrics = self._gradients(micros, 1.0)
            grads = [p.grad for p in self._params if p.grad is not None]
            norm = Norm([], self.mesh, self.device)(grads)
            norm = scale_and_clip(grads, norm, (1.0 / weight).to(norm.dtype), self.clip_norm, self.clip_value)
            found.append((loss, norm, metrics))
            return loss

        self.optimizer.step(closure)  # type: ignore[arg-type]
        self.optimizer.zero_grad()
        self._mark("optimizer")
        self._average()
        number, self.steps = self.steps, self.steps + 1
        lr = float(self.optimizer.param_groups[0].get("lr", math.nan))
        loss, norm, metrics = found[0]
        return Result(number, loss, norm, lr, clock(), False).attach(metrics)

    def _average(self) -> None:
        if self._ema_decay is not None:
            foreach_lerp(self._ema, [p.detach().float() for p in self._params], 1 - self._ema_decay)

    def _summed(self, x: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def _update(self, loss: Tensor, weight: Tensor, scale: float, clock: Any) -> Result:
        grads = [p.grad for p in self._params if p.grad is not None]
        norm = Norm([], self.mesh, self.device)(grads)
        lr = float(self.optimizer.param_groups[0].get("lr", math.nan))
        inverse = (1.0 / (scale * weight)).to(norm.dtype)
        number, self.steps = self.steps, self.steps + 1
        if self._scaler is not None:
            finite = math.isfinite(float(norm))
            self._scaler.update(finite)
            if not finite:
                self.optimizer.zero_grad()
                return Result(number, loss, norm * inverse, lr, clock(), True)
        norm = scale_and_clip(grads, norm, inverse, self.clip_norm, self.clip_value)
        self._mark("gradients")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._mark("optimizer")
        self._average()
        return Result(number, loss, norm, lr, clock(), False)

    def evaluate(self, batches: Iterable[Any], metrics: Metrics | None = None) -> Evaluation:
        """The loss over batches with the model in evaluation mode; see `Job.evaluate`."""
        training = [(m, m.training) for m in self._model.modules()]
        self._model.eval()
        around = partial(self.precision.around, device=self.device)
        loss = with_metrics(self._loss, {n: around(f) for n, f in metrics.items()}) if metrics else self._loss
        sums = Sums()
        sums.add("", 0.0, 0.0)
        try:
            with torch.no_grad():
                for batch in batches:
                    share = self._share(batch)
                    trains, rest = taken_apart(loss(self._model, _batch(share)))
                    for name, value in {"": trains, **rest}.items():
                        sums.add(name, *weighed(value, share.samples))
        finally:
            for module, mode in training:
                module.training = mode
        (total, weight), found = self._together(sums)
        return Sums.of({"": (total, weight), **found}).evaluation

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._model

    def state_dict(self, sharded: bool = False, ema: bool = False) -> dict[str, Any]:
        """The model's own state dict; `ema=True` with the moving average of the weights."""
        if sharded:
            raise StateError('plan="ddp" keeps whole tensors on every rank', next="call state_dict()")
        state = dict(self._model.state_dict())
        if ema:
            if not self._ema:
                raise StateError("this job keeps no moving average", next="parallelize(..., ema=0.999)")
            average = {id(p): e.to(p.dtype) for p, e in zip(self._params, self._ema, strict=True)}
            state.update({n: average[id(p)] for n, p in self._model.named_parameters(remove_duplicate=False)
                          if id(p) in average})  # fmt: skip
        return state

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state dict of this model."""
        self._model.load_state_dict(given)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's own."""
        return self.optimizer.state_dict()

    def load_optimizer_state_dict(self, given: Mapping[str, Any]) -> None:
        """The inverse."""
        self.optimizer.load_state_dict(dict(given))
        self._tracked.resolve(self._kept, lambda x, _: x)

    def load_average(self, given: Mapping[str, Tensor]) -> None:
        """Take the moving average of the weights from whole tensors."""
        names = {id(p): n for n, p in self._model.named_parameters()}
        for p, e in zip(self._params, self._ema, strict=True):
            e.copy_(given[names[id(p)]])

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds from step to step."""
        held = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
        size = sum(p.nbytes for p in self._model.parameters())
        return {
            "parameters": size,
            "gradients": sum(p.nbytes for p in self._params),
            "state": sum(v.nbytes for v in held),
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

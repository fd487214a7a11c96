"""A job: a model, its loss and its optimizer, trained as planned.

Every rank makes the same job from the same script. What happens in a step: the batch is cut into
micro-batches, each runs through the compiled program (forward, backward, the collectives between),
gradients are summed, measured and clipped, the user's optimizer updates the pieces this rank owns,
and parameters kept whole are put together again from everyone's pieces. Nothing is read back from
the device unless the caller looks at the result.

All public methods are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.losses import Metrics, is_mean, reported
from laminar.capture.model_tensors import Slot
from laminar.capture.torch_ops import spec_of
from laminar.capture.torch_private import foreach_add, foreach_copy, foreach_lerp
from laminar.cost.sim.no_gc import uncollected
from laminar.errors import CaptureError, LaminarError
from laminar.events import emit
from laminar.ir.graph import RNG, Graph
from laminar.ir.plan import Plan
from laminar.ir.program import Program
from laminar.ir.sbp import B, NdSbp
from laminar.lower.reshard import Move
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.transport import Groups, Null
from laminar.runtime.trace.tape import Tape
from laminar.train import checkpoint, first_batch_check, plan_for
from laminar.train import optimizer as optim
from laminar.train.anomaly import Watched
from laminar.train.batch_checksum import Sampled
from laminar.train.engine import Engine, Leaves, Ready
from laminar.train.engine import Local as Local
from laminar.train.gradients import Norm, scale_and_clip
from laminar.train.memory_layout import refuse_shared
from laminar.train.metrics import Evaluation, Logs, Result, Sums
from laminar.train.optimizer import Kept
from laminar.train.optimizer_changes import Tracked
from laminar.train.options import DEFAULTS, JobOptions
from laminar.train.precision import Precision, Scaler, update
from laminar.train.sharded_model import Pieces, released, whole_again
from laminar.train.timeline import Recorded
from laminar.train.warn_coupled import warn_if_coupled
from laminar.train.world import World

CHECKS = 2
"""How many of the first batches are compared between ranks by value before they are used; later ones by a sample."""


def refuse(model: nn.Module) -> None:
    """What no job can be made of."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise CaptureError("the model has no values: it lives on meta", next="make it with real weights")


class Job(Recorded, checkpoint.Stored, Logs):
    """See `laminar.parallelize`."""

    @uncollected()  # a collection walks through all that was imported, about a third of a second with transformers
    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        batch: Any,
        plan: Any = "auto",
        options: JobOptions = DEFAULTS,
        twin: Job | None = None,
        world: World | None = None,
    ) -> None:
        """`twin` is a job of a copy of this model, whose graphs are this one's; `world` the ranks, if they have met."""
        refuse(model)
        micro_batches, timeout_s = options.micro_batches, options.timeout_s
        self._world = World(options.device, timeout_s) if world is None else world
        emit("phase", name="preparing")
        self.rank, self.world, self.device = self._world.rank, self._world.size, self._world.device
        plan = plan_for.loaded(plan)
        self._model = model
        self.precision = Precision.of(options.precision)
        self.mesh = plan_for.mesh_for(plan, options.mesh, self.world)
        self.clip_norm, self.clip_value, self.seed = options.clip_norm, options.clip_value, options.seed
        self.steps = 0
        self._scaler = Scaler() if self.precision.scaled else None
        self._transport: Groups | Null = (
            Groups(self.mesh, self.device, timeout_s=timeout_s) if self.world > 1 else Null(self.mesh, 0, self.device)
        )
        self._watched = Watched(self.rank) if options.detect_anomaly else None
        self._engine = Engine(
            model, self.precision.around(loss, self.device), self.mesh, self._transport, micro_batches,
            self.precision.scaled, self._builder(options.compiles(self.device)), options.unguarded,
        )  # fmt: skip
        released(model)
        slots = checkpoint.moved(model, self.device, self.precision.weights)
        self._world.broadcast([s.tensor.detach() for s in slots])
        self.optimizer = optim.made(optimizer, model.parameters())
        optim.refuse_unknown(self.optimizer, {id(s.tensor): s.name for s in slots})
        self._closes = optim.takes_closure(self.optimizer)
        if self.precision.scaled or self.precision.rounding != "nearest":
            optim.refuse_closure(self.optimizer, f"precision={self.precision.name!r} changes what an update is")
        optim.faster(self.optimizer, self.device)
        self._elementwise = options.elementwise
        leaves = self._leaves(batch)
        if leaves.local:
            raise LaminarError("batch= is an example of the global batch", next="give all of it, not a Local share")
        if twin is not None:
            self._engine.captures.learn(twin._engine.captures)
        try:
            graph = self._engine.begin(leaves.split(micro_batches)[0])
        except CaptureError as error:
            raise CaptureError(f'{error}\n  or    train it as it is, with plan="ddp"') from error
        self._coupled = micro_batches == 1
        """Whether parts of a batch are known not to be the whole, or there is one part."""
        if micro_batches > 1 and self.rank == 0:
            first = leaves.split(micro_batches)[0]
            graph_of_some = graph if first.samples > 1 else self._engine.capture(first.like(2))
            self._coupled = warn_if_coupled(graph_of_some, micro_batches)
        emit("phase", name="planning")
        self.plan: Plan = plan_for.chosen(plan, graph, self.mesh, self.device)
        self._engine.plan = self.plan
        self._keep(slots)
        cut = {id(s.tensor) for s in slots if tuple(s.tensor.shape) != self._specs[s.name].shape}
        if cut:
            self._pieces = Pieces(self)
            self._pieces.put_on(model, cut)
        self._engine.captures.adopt(slots)
        self._engine.captures.take = self._take
        self._first = self._engine.ready(leaves.split(micro_batches)[0])
        self._noted: tuple[str, ...] = ()
        self._checks = CHECKS
        self._sampled = Sampled()
        self._unchecked = options.check
        self._sums: dict[str, Tensor] = {}
        self._norms: dict[tuple[str, ...], Norm] = {}
        self._ema_decay = options.ema
        self._ema = {k.name: k.owned.detach().float().clone() for k in self._kept} if options.ema is not None else {}
        self._copy: nn.Module | None = None

    def _builder(self, through_inductor: bool) -> Callable[..., Callable[..., list[Tensor]]]:
        """How programs become code: through Inductor, or line by line."""

        def build(
            program: Program, transport: Groups | Null, constants: Mapping[str, Tensor], static: tuple[int, ...]
        ) -> Callable[..., list[Tensor]]:
            if self._watched is not None:
                return EagerStep(program, transport, constants, watch=self._watched)
            if through_inductor:
                from laminar.runtime.code.inductor_step import Compiled

                return Compiled(program, transport, constants, static)
            return EagerStep(program, transport, constants)

        return build

    # --- storage --------------------------------------------------------------------------------

    def _cut(self, whole: Tensor, nd: NdSbp) -> Tensor:
        return shard(whole, nd, self.mesh, self.rank)

    def _keep(self, slots: Sequence[Any]) -> None:
        """Leave this rank's parts in the model, and make the optimizer update what it owns."""
        self._slots = slots
        self._numbers = {s.name: i for i, s in enumerate(self._slots)}
        self._kept: list[Kept] = []
        self._specs = {s.name: spec_of(s.tensor) for s in slots}
        lies = {**self.plan.inputs, **self.plan.state}
        refuse_shared({n for n, nd in lies.items() if any(p != B for p in nd)}, slots)
        for slot in slots:
            stand_in = torch.empty_like(slot.tensor, device="meta")
            nd = self.plan.inputs.get(slot.name, (B,) * len(self.mesh.sizes))
            if slot.kind != "param":
                if any(p != B for p in nd):
                    slot.tensor.data = self._cut(slot.tensor.detach(), nd).clone()
                self._engine.held[slot.name] = slot.tensor.detach()
                self._engine.whole[slot.name] = stand_in
                continue
            param = slot.tensor
            spec = self._specs[slot.name]
            state_nd = self.plan.state.get(slot.name, nd) if param.requires_grad else nd
            param.data = self._cut(param.detach(), nd).clone() if any(p != B for p in nd) else param.detach()
            owned = param
            if state_nd != nd:
                owned = nn.Parameter(self._cut(param.detach(), state_nd), requires_grad=param.requires_grad)
            self._kept.append(Kept(slot.name, spec, param, nd, state_nd, owned))
            self._engine.held[slot.name] = param.detach()
            self._engine.whole[slot.name] = stand_in
        in_optimizer = {id(p) for g in self.optimizer.param_groups for p in g["params"]}
        trained = [k for k in self._kept if id(k.param) in in_optimizer]
        optim.refuse_unless_elementwise(self.optimizer, trained, self._elementwise)
        optim.adopt(self.optimizer, trained, self._cut)
        self._by_name = {k.name: k for k in trained}
        self._plain = all(k.plain for k in self._kept)
        rounded = self.precision.rounding != "nearest"
        self._tracked = Tracked(self.optimizer, self._kept, rounded, self._elementwise)

    def _take(self, slot: Slot) -> None:
        """Hold a tensor, whole, that an attribute of the model has come to hold."""
        self._specs[slot.name] = spec_of(slot.tensor)
        self._engine.held[slot.name] = slot.tensor.detach().to(self.device)
        self._engine.whole[slot.name] = torch.empty_like(slot.tensor, device="meta")

    # --- a step ---------------------------------------------------------------------------------

    def _leaves(self, batch: Any) -> Leaves:
        leaves = Leaves.of(batch)
        return leaves if self.precision.weights is None else leaves.mapped(self.precision.leaf)

    def _agreed(self, batch: Any) -> Leaves:
        """The leaves of a batch, which must be alike on all ranks."""
        leaves = self._leaves(batch)
        self._engine.look()
        if self.world > 1:
            note, state = leaves.key, self._engine.captures.said
            if self._checks and not leaves.local:
                # Shapes tell nothing about ranks that shuffle with seeds of their own.
                self._checks -= 1
                note = (*note, f"values {leaves.fingerprint()}")
            values = "" if leaves.local else self._sampled(leaves.tensors, self._world.notes + 1)
            self._world.agree(" ".join(note[1:]), (*note, state) != self._noted, state, values)
            self._noted = (*note, state)
        return leaves

    def step(self, batch: Any) -> Result:
        """Train on one batch: the global one, or `Local(share)`; `Sized` says how it is cut into micro-batches."""
        self._refuse_released()
        return self._recorded_step(batch)  # type: ignore[no-any-return]

    def _step(self, batch: Any) -> Result:
        clock = clock_of(self.device)
        leaves = self._agreed(batch)
        if not self._tracked.same():
            self._by_name = self._tracked.resolve(self._kept, self._cut)
        if self._closes:
            return self._closed_step(leaves, clock)
        scale = self._scaler.scale if self._scaler else 1.0
        ready, loss, weight_sum, metrics, grads = self._gradients(leaves, scale)
        return self._update(ready, loss, weight_sum, grads, scale, clock).attach(metrics)

    def _gradients(
        self, leaves: Leaves, scale: float
    ) -> tuple[Ready, Tensor, Tensor | None, dict[str, Tensor], list[Tensor]]:
        """Forward and backward of a batch: its loss, its weight if it has one, metrics, gradients as owners need."""
        micros = leaves.split(self._engine.micro_batches)
        if self._unchecked:
            self._unchecked = False
            first_batch_check.check(self, micros)
        samples = [self._engine.together(m).samples for m in micros]
        ready = None
        grads: list[Tensor] = []
        values: list[Tensor] = []
        for i, micro in enumerate(micros):
            ready = self._engine.ready(micro)
            key = self._key(ready, self.steps, sum(samples[:i]), sum(samples))
            weight = 1.0 if ("metric:loss_weight" in ready.outputs) else samples[i] / sum(samples)
            self._mark("host")
            share = self._engine.share(ready, micro, self.device)
            self._mark("batch")
            out = ready(
                share,
                key,
                torch.tensor(scale * weight, dtype=torch.float64, device=self.device) if self._engine.scaled else None,
            )
            self._put_buffers(ready, out)
            grads, values = self._add(ready, out, grads, values, samples[i] / sum(samples), i)
        assert ready is not None
        self._mark("host")
        loss, weight_sum, metrics, grads = self._finished(ready, values, grads, len(micros))
        if self._watched is not None:
            finite = all(bool(torch.isfinite(t).all()) for t in (loss, *([] if self._scaler else grads)))
            self._watched.report(self._world, self.steps + 1, not finite)
        return ready, loss, weight_sum, metrics, grads

    def _closed_step(self, leaves: Leaves, clock: Any) -> Result:
        """A step of an optimizer that computes loss and gradients itself, as often as it likes.

        All ranks hold all parameters and see the same numbers, so they decide alike. Random draws are those of the
        step, the same each time.
        """
        found: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

        def closure() -> Tensor:
            ready, loss, weight, metrics, grads = self._gradients(leaves, 1.0)
            updates, raw, inverse = self._measured(ready, weight, grads, 1.0)
            pieces = [g.clone() for _, g in updates]  # a program's outputs are overwritten by its next run
            norm = scale_and_clip(pieces, raw, inverse, self.clip_norm, self.clip_value)
            for k in self._by_name.values():
                k.owned.grad = None
            for (k, _), grad in zip(updates, pieces, strict=True):
                k.owned.grad = grad.to(k.owned.dtype)
            found.append((loss.detach().clone(), norm, metrics))
            return found[-1][0]

        lr = self._lr()
        self.optimizer.step(closure)  # type: ignore[arg-type]
        for k in self._by_name.values():
            k.owned.grad = None
        self._mark("optimizer")
        self._average()
        number, self.steps = self.steps, self.steps + 1
        loss, norm, metrics = found[0] if found else (torch.full((), math.nan), torch.full((), math.nan), {})
        return Result(number, loss, norm, lr, clock(), False).attach(metrics)

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0].get("lr", math.nan))

    def _key(self, ready: Ready, number: int, first: int, samples: int) -> Tensor | None:
        """What random draws of one run of a program hang on, if it makes any.

        A program for micro-batches is told where in its batch it begins, and how many samples that has.
        """
        if RNG not in ready.filled:
            return None
        told = ready.graph.input(RNG).spec.numel
        return torch.tensor([self.seed, number, first, samples][:told], device=self.device)

    def _put_buffers(self, ready: Ready, out: list[Tensor]) -> None:
        alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for name, i in ready.buffers:  # counters and statistics in one call would be copied one by one
            held, fresh = alike.setdefault(out[i].dtype, ([], []))
            held.append(self._engine.held[name])
            fresh.append(out[i])
        for held, fresh in alike.values():
            foreach_copy(held, fresh)

    def _add(
        self, ready: Ready, out: list[Tensor], grads: list[Tensor], values: list[Tensor], share: float, i: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients, loss and metrics so far, this micro-batch with its share of the samples included."""
        now = [out[at] for _, at in ready.grads]
        here = [out[at] for _, at in ready.values]
        if self._engine.micro_batches == 1:
            return now, here
        here = [v * share if is_mean(n) else v.clone() for (n, _), v in zip(ready.values, here, strict=True)]
        if i == 0:
            # A program's outputs are overwritten by its next run, so sums have memory of their own.
            if list(self._sums) != [n for n, _ in ready.grads]:
                self._sums = {n: torch.empty_like(out[at]) for n, at in ready.grads}
            sums = list(self._sums.values())
            foreach_copy(sums, now)
            return sums, here
        foreach_add(grads, now)
        return grads, [a + b for a, b in zip(values, here, strict=True)]

    def _finished(
        self, ready: Ready, values: list[Tensor], grads: list[Tensor], count: int
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor], list[Tensor]]:
        """Loss, weight if there is one, metrics, and gradients as owners need them."""
        names = [n for n, _ in ready.values]
        if count > 1:
            made = {f"{o.kind}:{o.name}": o.placed for o in ready.program.outputs}
            everywhere = (B,) * len(self.mesh.sizes)
            items: list[Move] = [(n, made[n].spec, made[n].nd, everywhere) for n in names]
            for n, _ in ready.grads:
                placed = made[f"grad:{n}"]
                items.append((f"grad:{n}", placed.spec, placed.nd, self._owner_nd(n)))
            moved = self._engine.move(items, "micro-batches summed", [*values, *grads])
            values, grads = moved[: len(names)], moved[len(names) :]
        by_name = dict(zip(names, values, strict=True))
        metrics = {name: value.clone() for name, value in reported(by_name).items()}  # the next run overwrites outputs
        if "metric:loss_weight" in by_name:
            weight = by_name["metric:loss_weight"].double()
            return by_name["metric:loss_total"] / weight, weight, metrics, grads
        return by_name["loss:loss"], None, metrics, grads

    def _owner_nd(self, name: str) -> NdSbp:
        return self.plan.state.get(name, self.plan.inputs[name])

    def _measured(
        self, ready: Ready, weight: Tensor | None, grads: list[Tensor], scale: float
    ) -> tuple[list[tuple[Kept, Tensor]], Tensor, Tensor | float]:
        """Gradients with what they update, laid out like it; their norm; by what both are to be multiplied."""
        names = tuple(n for n, _ in ready.grads if n in self._by_name)
        if len(names) != len(grads):
            grads = [g for (n, _), g in zip(ready.grads, grads, strict=True) if n in self._by_name]
        kept = [self._by_name[n] for n in names]
        grads = optim.laid_out(kept, grads, self._plain)
        if names not in self._norms:
            self._norms[names] = Norm([self._owner_nd(n) for n in names], self.mesh, self.device)
        inverse: Tensor | float = 1.0 / scale
        if self._engine.scaled and weight is not None:
            inverse = inverse / weight
        self._mark("host")
        raw = self._norms[names](grads)
        self._mark("norm" if self._norms[names].shared else "gradients")
        return list(zip(kept, grads, strict=True)), raw, inverse

    def _update(
        self, ready: Ready, loss: Tensor, weight: Tensor | None, grads: list[Tensor], scale: float, clock: Any
    ) -> Result:
        updates, raw, inverse = self._measured(ready, weight, grads, scale)
        lr = self._lr()
        number, self.steps = self.steps, self.steps + 1
        if self._scaler is not None:
            finite = math.isfinite(float(raw))
            self._scaler.update(finite)
            if not finite:
                return Result(number, loss.detach().clone(), raw * inverse, lr, clock(), True)
        pieces = [g for _, g in updates]
        norm = scale_and_clip(pieces, raw, inverse, self.clip_norm, self.clip_value)
        self._mark("gradients")
        updates = [(k, g) for (k, _), g in zip(updates, pieces, strict=True)]
        key = torch.tensor([self.seed, number])
        update(self.optimizer, updates, self.precision.rounding, key, self.mesh, self.rank, self._numbers)
        self._mark("optimizer")
        self._gather()
        self._average()
        return Result(number, loss.detach().clone(), norm, lr, clock(), False)

    def _average(self) -> None:
        if self._ema_decay is not None:
            foreach_lerp(list(self._ema.values()), [k.owned.detach().float() for k in self._kept], 1 - self._ema_decay)

    def _gather(self) -> None:
        """Put parameters that are kept whole together from everyone's updated pieces."""
        split = [k for k in self._kept if k.gathered]
        if split:
            items = [(k.name, k.spec, k.state_nd, k.nd) for k in split]
            moved = self._engine.move(items, "updated parameters", [k.owned.detach() for k in split])
            foreach_copy([k.param.detach() for k in split], moved)

    # --- evaluation -----------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Any], metrics: Metrics | None = None) -> Evaluation:
        """The loss over batches with the model in evaluation mode: totals over weights, or the mean by sample.

        `metrics` are functions of model and batch by name, each with a result like a loss's: a scalar, which is a mean
        over the batch's samples, or `laminar.Loss(total, weight)`. They and what the loss function returns beside the
        loss are in the `metrics` of what comes back, which is a float.
        """
        self._refuse_released()
        training = [(m, m.training) for m in self._model.modules()]
        self._model.eval()
        sums = Sums()
        try:
            with self._engine.measuring(metrics or {}, partial(self.precision.around, device=self.device)):
                for i, batch in enumerate(batches):
                    leaves = self._agreed(batch)
                    micros = leaves.split(min(self._engine.micro_batches, leaves.samples))
                    samples = [self._engine.together(m).samples for m in micros]
                    for at, micro in enumerate(micros):
                        ready = self._engine.ready(micro, backward=False)
                        key = self._key(ready, -1 - i, sum(samples[:at]), sum(samples))
                        out = ready(self._engine.share(ready, micro, self.device), key, None)
                        sums.add_outputs(self._whole_values(ready, out), samples[at])
        finally:
            for module, mode in training:
                module.training = mode
        return sums.evaluation

    def _whole_values(self, ready: Ready, out: list[Tensor]) -> dict[str, Tensor]:
        """Loss and metrics by name, the same on every rank."""
        made = {f"{o.kind}:{o.name}": o.placed for o in ready.program.outputs}
        everywhere = (B,) * len(self.mesh.sizes)
        items: list[Move] = [(n, made[n].spec, made[n].nd, everywhere) for n, _ in ready.values]
        moved = self._engine.move(items, "values of an evaluation", [out[i] for _, i in ready.values])
        return dict(zip([n for n, _ in ready.values], moved, strict=True))

    # --- weights and state ------------------------------------------------------------------------

    def _assembled(self, pieces: Sequence[tuple[str, Sequence[int], NdSbp, Tensor]]) -> list[Tensor]:
        """Whole tensors from what ranks hold of them."""
        items: list[Move] = []
        for name, shape, nd, piece in pieces:
            spec = spec_of(torch.empty(tuple(shape), dtype=piece.dtype, device="meta"))
            items.append((name, spec, nd, (B,) * len(self.mesh.sizes)))
        moved = self._engine.move(items, "a whole copy", [p for *_, p in pieces])
        return [m.clone() if m.data_ptr() != p.data_ptr() else m for m, (*_, p) in zip(moved, pieces, strict=True)]

    def state_dict(self, sharded: bool = False, ema: bool = False) -> dict[str, Any]:
        """Weights and buffers under the model's own names: whole tensors, or DTensors.

        `ema=True` gives the moving average of the weights instead.
        """
        return checkpoint.state_dict(self, sharded, ema)

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state dict of this model, from here or from plain PyTorch."""
        checkpoint.load_state_dict(self, given)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` would be on one device."""
        return optim.state_dict(self.optimizer, list(self._by_name.values()), self._assembled)  # type: ignore[no-any-return]

    def load_optimizer_state_dict(self, given: Mapping[str, Any]) -> None:
        """The inverse; also of what a plain optimizer over the same parameters saved."""
        optim.load_state_dict(self.optimizer, list(self._by_name.values()), given, self._cut)
        self._tracked.note()

    def load_average(self, given: Mapping[str, Tensor]) -> None:
        """Take the moving average of the weights from whole tensors."""
        for k in self._kept:
            self._ema[k.name].copy_(self._cut(given[k.name], k.state_nd))

    def _give_back(self) -> None:
        """Whole weights and state on every rank; see `Stored.release`."""
        held, everywhere = checkpoint._held(self, False), (B,) * len(self.mesh.sizes)
        names = [n for n, (nd, _) in held.items() if nd != everywhere]
        found = self._assembled([(n, self._specs[n].shape, *held[n]) for n in names])
        state, params = self.optimizer_state_dict(), {id(k.owned): k.param for k in self._kept}
        groups: list[list[Any]] = [[params[id(p)] for p in g["params"]] for g in self.optimizer.param_groups]
        whole_again(self, dict(zip(names, found, strict=True)), state, groups)

    @property
    def model(self) -> nn.Module:
        """The model with whole weights, for inference; where ranks hold pieces, a copy that is made anew here."""
        if all(k.nd == (B,) * len(self.mesh.sizes) for k in self._kept):
            return self._model
        if self._copy is None:
            self._copy = checkpoint.empty_copy(self._model, self._slots, self._engine.whole, self.device)
        checkpoint.fill(self._copy, self.state_dict(), checkpoint.unlisted(self))
        return self._copy

    @property
    def graph(self) -> Graph:
        """The captured graph of the first batch."""
        return self._first.graph

    @property
    def program(self) -> Program:
        """The program of the first batch."""
        return self._first.program

    def _set_tape(self, tape: Any) -> None:
        self._tape = tape
        self._transport.tape = tape if isinstance(tape, Tape) else None

    def _about(self) -> dict[str, Any]:
        return {"plan": self.plan.hash, "mesh": self.mesh.to_json()}

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds from step to step."""
        grads = [o.placed for o in self.program.outputs if o.kind == "grad"]
        return {
            "parameters": sum(k.param.nbytes + (k.owned.nbytes if _apart(k) else 0) for k in self._kept),
            "gradients": sum(p.local(self.mesh, self.rank).nbytes for p in grads),
            "state": sum(
                v.nbytes for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()
            ),
        }


def _apart(k: Kept) -> bool:
    """Whether an owned piece has memory of its own."""
    return k.gathered and k.owned.untyped_storage().data_ptr() != k.param.untyped_storage().data_ptr()


def clock_of(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Call it at the end of a step; what comes back tells the seconds since, when asked."""
    if device.type != "cuda":
        start = time.perf_counter()

        def stop() -> Callable[[], float]:
            passed = time.perf_counter() - start
            return lambda: passed

        return stop
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()

    def recorded() -> Callable[[], float]:
        last.record()

        def read() -> float:
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3

        return read

    return recorded

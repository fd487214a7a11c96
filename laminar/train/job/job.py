"""A job: a model, its loss and its optimizer, trained as planned.

Every rank makes the same job from the same script. What happens in a step: the batch is cut into
micro-batches, each runs through the compiled program (forward, backward, the collectives between),
gradients are summed, measured and clipped, the user's optimizer updates the pieces this rank owns,
and parameters kept whole are put together again from everyone's pieces. Nothing is read back from
the device unless the caller looks at the result.

A job has parts, and is what runs a step with them:

- `state` (`state.py`): weights, optimizer state, averages, counters. It knows no process group and no program.
- `peers` (`world.py`): the ranks it runs on, a world with a number. It can be closed and another one made.
- `tracer` (`tracer.py`): the graphs of model and loss; they depend on neither ranks nor plan.
- `engine` (`engine.py`): compiled steps for the plan's mesh on these ranks. Another can be made around the same state
  (`rebuild`), for another mesh or in a later generation of the world.
- `recorder` and `loader` (`timeline.py`, `prefetch.py`): what steps leave stamps with, and what feeds them.

All public methods are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.model.losses import Metrics, is_mean, reported
from laminar.capture.torch_private import foreach_add, foreach_copy
from laminar.cost.sim.no_gc import uncollected
from laminar.errors import CaptureError, LaminarError, PlanError
from laminar.events import emit
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.ir.program import Program
from laminar.ir.sbp import B
from laminar.lower.boxing.reshard import Move
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.transport import Groups, Null
from laminar.train.batch.batch_checksum import Sampled
from laminar.train.batch.leaves import Leaves
from laminar.train.batch.metrics import Evaluation, Result, Sums, evaluation_mode
from laminar.train.batch.prefetch import Prefetcher
from laminar.train.check import first_batch_check
from laminar.train.check.anomaly import Watched
from laminar.train.check.warn_coupled import warn_if_coupled
from laminar.train.engine.engine import Build, Engine, Ready, StepInputs
from laminar.train.engine.tracer import Tracer
from laminar.train.job import plan_for
from laminar.train.job.base_job import BaseJob, first_state, taken_over
from laminar.train.optimizer import optimizer as optim
from laminar.train.optimizer.gradients import Norm, scale_and_clip
from laminar.train.optimizer.optimizer import Kept
from laminar.train.optimizer.precision import Precision, update
from laminar.train.options import DEFAULTS, JobOptions
from laminar.train.state.change_layout import change_layout, refuse_layout
from laminar.train.state.gather import GatherFromMesh
from laminar.train.state.resharder import CarryBetweenMeshes
from laminar.train.state.state import JobState, StateLayout
from laminar.train.timeline import StepRecorder
from laminar.train.world import World

CHECKS = 2
"""How many of the first batches are compared between ranks by value before they are used; later ones by a sample."""


def refuse_unmade(model: nn.Module) -> None:
    """What no job can be made of."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise CaptureError("the model has no values: it lives on meta", next="make it with real weights")


class Job(BaseJob):
    """See `laminar.parallelize`."""

    plan: Plan

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
        refuse_unmade(model)
        world = World(options.device, options.timeout_s) if world is None else world
        emit("phase", name="preparing")
        plan = plan_for.loaded(plan)
        mesh = plan_for.mesh_for(plan, options.mesh, world.size)
        self.precision = Precision.of(options.precision)
        self.clip_norm, self.clip_value = options.clip_norm, options.clip_value
        self._watched = Watched(world.rank) if options.detect_anomaly else None
        micro_batches = options.micro_batches
        self.tracer = Tracer(
            model, self.precision.around(loss, world.device), micro_batches, self.precision.scaled, options.unguarded
        )
        slots, optimizer = taken_over(model, optimizer, world, self.precision)
        world.broadcast([s.tensor.detach() for s in slots])
        self._closes = optim.takes_closure(optimizer)
        if self.precision.scaled or self.precision.rounding != "nearest":
            optim.refuse_closure(optimizer, f"precision={self.precision.name!r} changes what an update is")
        optim.faster(optimizer, world.device)
        leaves = self._leaves(batch)
        if leaves.local:
            raise LaminarError("batch= is an example of the global batch", next="give all of it, not a Local share")
        if twin is not None:
            self.tracer.captures.learn(twin.tracer.captures)
        first = leaves.split(micro_batches)[0]
        try:
            graph = self.tracer.graph(first, True)
        except CaptureError as error:
            raise CaptureError(f'{error}\n  or    train it as it is, with plan="ddp"') from error
        self._coupled = micro_batches == 1
        """Whether parts of a batch are known not to be the whole, or there is one part."""
        if micro_batches > 1 and world.rank == 0:
            graph_of_some = graph if first.samples > 1 else self.tracer.capture(first.like(2))
            self._coupled = warn_if_coupled(graph_of_some, micro_batches)
        emit("phase", name="planning")
        plan = plan_for.chosen(plan, graph, mesh, world.device)
        layout = StateLayout.of_plan(plan, [s.name for s in slots], world.rank)
        state = first_state(model, slots, optimizer, layout, options, self.precision)
        self._build = self._builder(options.compiles(world.device))
        self._unchecked = options.check
        self._begin(world, state, plan, first)

    def _begin(self, world: World, state: JobState, plan: Plan, first: Leaves) -> None:
        """An engine for a plan on the ranks of a world, around state that is laid out for it; a job of these."""
        self.tracer.whole = state.whole
        self.engine = self._engine_around(state, plan, world)
        recorder = StepRecorder(world, Prefetcher(world), self._about, self.engine.transport)
        super().__init__(world, plan, plan.mesh, state, GatherFromMesh(self.engine.resharder, world), recorder)
        self.tracer.captures.adopt(state.slots)
        self.tracer.captures.take = partial(state.take, device=world.device)
        self._first = self.engine.ready(first)
        self._noted: tuple[str, ...] = ()
        self._checks = CHECKS
        self._sampled = Sampled()
        self._sums: dict[str, Tensor] = {}
        self._norms: dict[tuple[str, ...], Norm] = {}

    def _engine_around(self, state: JobState, plan: Plan, world: World) -> Engine:
        return Engine.around(state, self.tracer, plan, world, self._build)

    def rebuild(self, world: World, plan: Any, batch: Any, ranks: Sequence[int] | None = None) -> None:
        """Go on with the same state under another plan, on the ranks of another world; those of that world call this.

        `plan` is what `parallelize` takes, `batch` an example of the global batch. `ranks` says which rank of the new
        world each of the former one is now, unless they are the same: every one of them must be there.
        """
        first = self._leaves(batch).split(self.tracer.micro_batches)[0]
        plan = plan_for.loaded(plan)
        if isinstance(plan, Staged):
            raise PlanError(
                "a job without stages is rebuilt for a plan without stages",
                next="save it, and resume in a new job under the other plan",
            )
        mesh = plan_for.mesh_for(plan, None, world.size)
        plan = plan_for.chosen(plan, self.tracer.graph(first, True), mesh, world.device)
        layout = StateLayout.of_plan(plan, [s.name for s in self.state.slots], world.rank)
        refuse_layout(self.state, layout)
        self.engine.close()
        if self._guard is not None:
            self._guard.take_off()
        change_layout(self.state, layout, range(self.world) if ranks is None else ranks, CarryBetweenMeshes(world))
        self._begin(world, self.state, plan, first)

    def _builder(self, through_inductor: bool) -> Build:
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

    # --- a step ---------------------------------------------------------------------------------

    def _leaves(self, batch: Any) -> Leaves:
        leaves = Leaves.of(batch)
        return leaves if self.precision.weights is None else leaves.mapped(self.precision.leaf)

    def _agreed(self, batch: Any) -> Leaves:
        """The leaves of a batch, which must be alike on all ranks."""
        leaves = self._leaves(batch)
        self.tracer.look(self.state.held)
        if self.world > 1:
            note, state = leaves.key, self.tracer.captures.said
            if self._checks and not leaves.local:
                # Shapes tell nothing about ranks that shuffle with seeds of their own.
                self._checks -= 1
                note = (*note, f"values {leaves.fingerprint()}")
            values = "" if leaves.local else self._sampled(leaves.tensors, self.peers.notes + 1)
            self.peers.agree(" ".join(note[1:]), (*note, state) != self._noted, state, values)
            self._noted = (*note, state)
        return leaves

    def step(self, batch: Any) -> Result:
        """Train on one batch: the global one, or `Local(share)`; `Sized` says how it is cut into micro-batches."""
        self._refuse_released()
        self._check_saves()
        return self._step(batch) if self.recorder.tape is None else self.recorder.step(self._step, batch)

    def _step(self, batch: Any) -> Result:
        clock = clock_of(self.device)
        leaves = self._agreed(batch)
        if not self.state.tracked.same():
            self.state.resolve()
        if self._closes:
            return self._closed_step(leaves, clock)
        scaler = self.state.scaler
        scale = scaler.scale if scaler else 1.0
        ready, loss, weight_sum, metrics, grads = self._gradients(leaves, scale)
        return self._update(ready, loss, weight_sum, grads, scale, clock).attach(metrics)

    def _gradients(
        self, leaves: Leaves, scale: float
    ) -> tuple[Ready, Tensor, Tensor | None, dict[str, Tensor], list[Tensor]]:
        """Forward and backward of a batch: its loss, its weight if it has one, metrics, gradients as owners need."""
        micros = leaves.split(self.engine.micro_batches)
        if self._unchecked:
            self._unchecked = False
            self._check(micros)
        ready, values, grads = self._micro_batches(micros, scale)
        self.recorder.mark("host")
        loss, weight_sum, metrics, grads = self._finished(ready, values, grads, len(micros))
        if self._watched is not None:
            finite = all(bool(torch.isfinite(t).all()) for t in (loss, *([] if self.state.scaler else grads)))
            self._watched.report(self.peers, self.state.steps + 1, not finite)
        return ready, loss, weight_sum, metrics, grads

    def _micro_batches(self, micros: list[Leaves], scale: float) -> tuple[Ready, list[Tensor], list[Tensor]]:
        """All micro-batches, one after the other: loss and metrics, and gradients, added up."""
        ready = None
        grads: list[Tensor] = []
        values: list[Tensor] = []
        for i, (ready, inputs, share) in enumerate(self._fed(micros, scale)):
            out = ready(*inputs)
            self._put_buffers(ready, out)
            grads, values = self._add(ready, out, grads, values, share, i)
        assert ready is not None
        return ready, values, grads

    def _fed(self, micros: list[Leaves], scale: float) -> Iterator[tuple[Ready, StepInputs, float]]:
        """For each micro-batch its program, what goes into it, and its share of the samples."""
        samples = [self.engine.together(m).samples for m in micros]
        for i, micro in enumerate(micros):
            ready = self.engine.ready(micro)
            key = ready.key(self.state.seed, self.state.steps, sum(samples[:i]), sum(samples), self.device)
            share = samples[i] / sum(samples)
            weight = 1.0 if ("metric:loss_weight" in ready.outputs) else share
            self.recorder.mark("host")
            leaves = self.engine.share(ready, micro, self.device)
            self.recorder.mark("batch")
            told = torch.tensor(scale * weight, dtype=torch.float64, device=self.device) if self.engine.scaled else None
            yield ready, (leaves, key, told), share

    def _check(self, micros: list[Leaves]) -> None:
        """The first micro-batch against the model in plain PyTorch."""
        with self.recorder.paused():
            first_batch_check.check(self.engine, self.state, self.peers, micros, self.precision.name, self._coupled)
        if self._watched is not None:
            self._watched.forget()

    def _closed_step(self, leaves: Leaves, clock: Any) -> Result:
        """A step of an optimizer that computes loss and gradients itself, as often as it likes.

        All ranks hold all parameters and see the same numbers, so they decide alike. Random draws are those of the
        step, the same each time.
        """
        state = self.state
        found: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

        def closure() -> Tensor:
            ready, loss, weight, metrics, grads = self._gradients(leaves, 1.0)
            updates, raw, inverse = self._measured(ready, weight, grads, 1.0)
            pieces = [g.clone() for _, g in updates]  # a program's outputs are overwritten by its next run
            norm = scale_and_clip(pieces, raw, inverse, self.clip_norm, self.clip_value)
            for k in self.state.by_name.values():
                k.owned.grad = None
            for (k, _), grad in zip(updates, pieces, strict=True):
                k.owned.grad = grad.to(k.owned.dtype)
            found.append((loss.detach().clone(), norm, metrics))
            return found[-1][0]

        lr = optim.first_lr(self.optimizer)
        state.about_to_change()
        self.optimizer.step(closure)  # type: ignore[arg-type]
        for k in self.state.by_name.values():
            k.owned.grad = None
        self.recorder.mark("optimizer")
        state.average()
        number, state.steps = state.steps, state.steps + 1
        loss, norm, metrics = found[0] if found else (torch.full((), math.nan), torch.full((), math.nan), {})
        return Result(number, loss, norm, lr, clock(), False).attach(metrics)

    def _put_buffers(self, ready: Ready, out: list[Tensor]) -> None:
        alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for name, i in ready.buffers:  # counters and statistics in one call would be copied one by one
            held, fresh = alike.setdefault(out[i].dtype, ([], []))
            held.append(self.state.held[name])
            fresh.append(out[i])
        for held, fresh in alike.values():
            foreach_copy(held, fresh)

    def _add(
        self, ready: Ready, out: list[Tensor], grads: list[Tensor], values: list[Tensor], share: float, i: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients, loss and metrics so far, this micro-batch with its share of the samples included."""
        now = [out[at] for _, at in ready.grads]
        here = [out[at] for _, at in ready.values]
        if self.engine.micro_batches == 1:
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
        if count > 1 and not self.engine.whole_outputs:
            made = {f"{o.kind}:{o.name}": o.placed for o in ready.program.outputs}
            everywhere = (B,) * len(self.mesh.sizes)
            items: list[Move] = [(n, made[n].spec, made[n].nd, everywhere) for n in names]
            for n, _ in ready.grads:
                placed = made[f"grad:{n}"]
                items.append((f"grad:{n}", placed.spec, placed.nd, self.state.layout.owned_nd(n)))
            moved = self.engine.resharder(items, "micro-batches summed", [*values, *grads])
            values, grads = moved[: len(names)], moved[len(names) :]
        by_name = dict(zip(names, values, strict=True))
        metrics = {name: value.clone() for name, value in reported(by_name).items()}  # the next run overwrites outputs
        if "metric:loss_weight" in by_name:
            weight = by_name["metric:loss_weight"].double()
            return by_name["metric:loss_total"] / weight, weight, metrics, grads
        return by_name["loss:loss"], None, metrics, grads

    def _measured(
        self, ready: Ready, weight: Tensor | None, grads: list[Tensor], scale: float
    ) -> tuple[list[tuple[Kept, Tensor]], Tensor, Tensor | float]:
        """Gradients with what they update, laid out like it; their norm; by what both are to be multiplied."""
        by_name = self.state.by_name
        names = tuple(n for n, _ in ready.grads if n in by_name)
        if len(names) != len(grads):
            grads = [g for (n, _), g in zip(ready.grads, grads, strict=True) if n in by_name]
        kept = [by_name[n] for n in names]
        inverse: Tensor | float = 1.0 / scale
        if self.engine.scaled and weight is not None:
            inverse = inverse / weight
        raw, grads = self._norm_and_parts(names, kept, grads)
        return list(zip(kept, grads, strict=True)), raw, inverse

    def _norm_and_parts(
        self, names: tuple[str, ...], kept: list[Kept], grads: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The norm of all gradients, and of each the part that this rank updates by."""
        whole, layout = self.engine.whole_outputs, self.state.layout
        if not whole:
            grads = optim.laid_out(kept, grads, self.state.plain)
        if names not in self._norms:
            nds = [layout.everywhere if whole else layout.owned_nd(n) for n in names]
            self._norms[names] = Norm(nds, self.mesh, self.peers)
        self.recorder.mark("host")
        raw = self._norms[names](grads)
        self.recorder.mark("norm" if self._norms[names].shared else "gradients")
        if whole:
            grads = [layout.cut(g, k.state_nd) for k, g in zip(kept, grads, strict=True)]
            grads = optim.laid_out(kept, grads, self.state.plain)
        return raw, grads

    def _optimizer_step(self) -> None:
        """One update by the gradients that what this rank owns has now."""
        self.optimizer.step()

    def _update(
        self, ready: Ready, loss: Tensor, weight: Tensor | None, grads: list[Tensor], scale: float, clock: Any
    ) -> Result:
        updates, raw, inverse = self._measured(ready, weight, grads, scale)
        lr = optim.first_lr(self.optimizer)
        state = self.state
        number, state.steps = state.steps, state.steps + 1
        if state.scaler is not None:
            finite = math.isfinite(float(raw))
            state.scaler.update(finite)
            if not finite:
                return Result(number, loss.detach().clone(), raw * inverse, lr, clock(), True)
        pieces = [g for _, g in updates]
        norm = scale_and_clip(pieces, raw, inverse, self.clip_norm, self.clip_value)
        self.recorder.mark("gradients")
        updates = [(k, g) for (k, _), g in zip(updates, pieces, strict=True)]
        key = torch.tensor([state.seed, number])
        state.about_to_change()
        update(
            self.optimizer,
            updates,
            self.precision.rounding,
            key,
            self.mesh,
            self.rank,
            state.numbers,
            self._optimizer_step,
        )
        self.recorder.mark("optimizer")
        state.put_together(self.engine.resharder)
        state.average()
        return Result(number, loss.detach().clone(), norm, lr, clock(), False)

    # --- evaluation -----------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Any], metrics: Metrics | None = None) -> Evaluation:
        """The loss over batches with the model in evaluation mode: totals over weights, or the mean by sample.

        `metrics` are functions of model and batch by name, each with a result like a loss's: a scalar, which is a mean
        over the batch's samples, or `laminar.Loss(total, weight)`. They and what the loss function returns beside the
        loss are in the `metrics` of what comes back, which is a float.
        """
        self._refuse_released()
        sums = Sums()
        around = partial(self.precision.around, device=self.device)
        with evaluation_mode(self.state.model), self.tracer.measuring(metrics or {}, around):
            for i, batch in enumerate(batches):
                leaves = self._agreed(batch)
                micros = leaves.split(min(self.engine.micro_batches, leaves.samples))
                samples = [self.engine.together(m).samples for m in micros]
                for at, micro in enumerate(micros):
                    ready = self.engine.ready(micro, backward=False)
                    key = ready.key(self.seed, -1 - i, sum(samples[:at]), sum(samples), self.device)
                    out = ready(self.engine.share(ready, micro, self.device), key, None)
                    sums.add_outputs(self._whole_values(ready, out), samples[at])
        return sums.evaluation

    def _whole_values(self, ready: Ready, out: list[Tensor]) -> dict[str, Tensor]:
        """Loss and metrics by name, the same on every rank."""
        if self.engine.whole_outputs:
            return {n: out[i] for n, i in ready.values}
        made = {f"{o.kind}:{o.name}": o.placed for o in ready.program.outputs}
        everywhere = (B,) * len(self.mesh.sizes)
        items: list[Move] = [(n, made[n].spec, made[n].nd, everywhere) for n, _ in ready.values]
        moved = self.engine.resharder(items, "values of an evaluation", [out[i] for _, i in ready.values])
        return dict(zip([n for n, _ in ready.values], moved, strict=True))

    @property
    def graph(self) -> Graph:
        """The captured graph of the first batch."""
        return self._first.graph

    @property
    def program(self) -> Program:
        """The program of the first batch."""
        return self._first.program

    def _about(self) -> dict[str, Any]:
        return {"plan": self.plan.hash, "mesh": self.mesh.to_json()}

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds from step to step."""
        grads = [o.placed for o in self.program.outputs if o.kind == "grad"]
        kept = self.state.kept
        return {
            "parameters": sum(k.param.nbytes + (k.owned.nbytes if k.has_own_memory else 0) for k in kept),
            "gradients": sum(p.local(self.program.mesh, self.engine.transport.rank).nbytes for p in grads),
            "state": self.state.optimizer_bytes,
        }


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

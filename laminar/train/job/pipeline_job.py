"""A job whose plan has stages: different ranks hold different parts of the model, and micro-batches pass between them.

A step: every micro-batch goes through all stages and back, driven by actors (`runtime/pipeline/actors.py`) in the
order of the plan's schedule, or as far from it as its window allows. A place whose firings are done reduces its sums,
and stages that share a weight add up their gradients. Then all ranks meet once: the norm of the whole gradient, the
loss and its weight are added up over all places. Where gradients are clipped by norm, the loss is weighted or an fp16
step may be skipped, which is one decision for all, every rank updates what it owns behind that meeting; otherwise
before it, while others are still at work.

Ranks outside of a weight's places do not hold it. Whole weights are assembled where they are held, and sent to all.

On GPUs parts go through Inductor unless asked otherwise, and what one place gives another goes through memory of the
host, or by NCCL where every rank has a GPU of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.model.losses import Metrics, reported
from laminar.errors import BatchError, MeshError, OptimizerError, PlanError
from laminar.events import emit
from laminar.ir.graph import Graph
from laminar.ir.plans.staged import Staged
from laminar.ir.sbp import B, NdSbp, Split
from laminar.lower.boxing.reshard import Move
from laminar.lower.stages.stage_programs import Stages, stages
from laminar.rewrite.variants import rewritten
from laminar.rules.boxing.crossing import crossing
from laminar.runtime.comm.cross_mesh import exchange
from laminar.runtime.trace.pipeline_tape import PipeTape
from laminar.staging.coupled_samples import refuse_coupled
from laminar.staging.stage_plans import for_other_graph
from laminar.train.batch.batch_checksum import Sampled
from laminar.train.batch.leaves import Leaves
from laminar.train.batch.metrics import Evaluation, Result, Sums, evaluation_mode
from laminar.train.batch.prefetch import Prefetcher
from laminar.train.check import first_batch_check
from laminar.train.engine.pipeline_steps import Pipe, Pipes, StepFeed
from laminar.train.engine.tracer import Tracer
from laminar.train.job import plan_for
from laminar.train.job.base_job import BaseJob, first_state, taken_over
from laminar.train.job.job import clock_of, refuse_unmade
from laminar.train.optimizer import optimizer as optim
from laminar.train.optimizer.gradients import scale_and_clip
from laminar.train.optimizer.precision import Precision, update
from laminar.train.options import DEFAULTS, JobOptions
from laminar.train.state.change_layout import change_layout, refuse_layout
from laminar.train.state.gather import GatherFromPlaces, HeldPart
from laminar.train.state.resharder import CarryBetweenMeshes, Resharder
from laminar.train.state.state import JobState, StateLayout
from laminar.train.timeline import StepRecorder
from laminar.train.world import World


class StagedJob(BaseJob):
    """See `laminar.parallelize`; the methods of `Job`, for a plan with stages."""

    plan: Staged
    program = None

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        batch: Any,
        plan: Staged,
        options: JobOptions = DEFAULTS,
        world: World | None = None,
    ) -> None:
        """`world` are the ranks, where they have met."""
        options.refuse_for_stages()
        refuse_unmade(model)
        world = World(options.device, options.timeout_s) if world is None else world
        emit("phase", name="preparing")
        refuse_ranks(plan, world)
        self.precision = Precision.of(options.precision)
        self.clip_norm, self.clip_value = options.clip_norm, options.clip_value
        self._options = options
        self.tracer = self._tracer_for(plan, model, self.precision.around(loss, world.device))
        slots, optimizer = taken_over(model, optimizer, world, self.precision)
        world.broadcast([s.tensor.detach() for s in slots])
        optim.refuse_closure(optimizer, "the plan has stages, so no rank has all parameters")
        optim.faster(optimizer, world.device)
        captured, plan, made = self._staged(plan, batch)
        layout = layout_of_stages(plan, made.cut.graphs, world.rank)
        self._begin(world, first_state(model, slots, optimizer, layout, options, self.precision), plan, captured, made)
        self._unchecked = options.check

    def _tracer_for(self, plan: Staged, model: nn.Module, loss: Callable[[Any, Any], Any]) -> Tracer:
        return Tracer(model, loss, plan.micro_batches, self.precision.scaled, self._options.unguarded)

    def _staged(self, plan: Staged, batch: Any) -> tuple[Graph, Staged, Stages]:
        """The graph of a batch's micro-batches, the plan for it, and its stages."""
        first = self._leaves(batch).split(plan.micro_batches)[0]
        captured = self.tracer.graph(first, True)
        if plan.micro_batches > 1 and not plan.coupled and first.samples == 1:
            refuse_coupled(self.tracer.capture(first.like(2)))  # one sample has nothing to be mixed with
        self.graph: Graph = rewritten(captured, plan)
        emit("phase", name="planning")
        plan = for_other_graph(self.graph, plan)
        return captured, plan, stages(self.graph, plan)

    def _begin(self, world: World, state: JobState, plan: Staged, captured: Graph, made: Stages) -> None:
        """Pipes for a plan on the ranks of a world, around state that is laid out for it; a job of these."""
        layout = state.layout
        transport = world.transport(layout.mesh, layout.place.ranks)
        self._reshard = Resharder(transport)
        self.tracer.whole = state.whole
        recorder = StepRecorder(world, Prefetcher(world), self._about, place=layout.at)
        super().__init__(world, plan, layout.mesh, state, GatherFromPlaces(self._reshard, world), recorder)
        self.tracer.captures.adopt(state.slots)
        grads = [(g, o, s) for s, g in enumerate(made.cut.graphs) for o in g.outputs if o.kind == "grad"]
        self._graded = {(o.name, plan.stages[s].place) for _, o, s in grads}
        """Parameters and the places at which a part of their gradient is made."""
        self._grad_specs = {o.name: g.specs[o.ref] for g, o, _ in grads}
        self._trained = [(s.name, s.tensor, s.tensor.requires_grad) for s in state.slots if s.kind == "param"]
        self._noted: tuple[str, ...] = ()
        self._sampled = Sampled()
        through_inductor = self._options.compiles(world.device)
        self.pipes = Pipes(self.tracer, state, plan, world, transport, through_inductor, captured, self.graph, made)

    def rebuild(self, world: World, plan: Any, batch: Any, ranks: Sequence[int] | None = None) -> None:
        """Go on with the same state in other stages, on the ranks of another world; those of that world call this.

        `plan` is a plan with stages, or its file; `batch` an example of the global batch. `ranks` says which rank of
        the new world each of the former one is now, unless they are the same: every one of them must be there.
        """
        plan = plan_for.loaded(plan)
        if not isinstance(plan, Staged):
            raise PlanError(
                "a job with stages is rebuilt for a plan with stages",
                next="save it, and resume in a new job under the other plan",
            )
        refuse_ranks(plan, world)
        if plan.micro_batches != self.tracer.micro_batches:  # their graphs are others
            self.tracer = self._tracer_for(plan, self.tracer.model, self.tracer.loss)
            self.tracer.whole = self.state.whole
        captured, plan, made = self._staged(plan, batch)
        layout = layout_of_stages(plan, made.cut.graphs, world.rank)
        refuse_layout(self.state, layout)
        self.pipes.close()
        if self._guard is not None:
            self._guard.take_off()
        change_layout(self.state, layout, range(self.world) if ranks is None else ranks, CarryBetweenMeshes(world))
        self._begin(world, self.state, plan, captured, made)

    # --- a step

    def _leaves(self, batch: Any) -> Leaves:
        leaves = Leaves.of(batch)
        if leaves.local:
            raise BatchError("a plan with stages takes the global batch", next="hand every rank all of it")
        return leaves if self.precision.weights is None else leaves.mapped(self.precision.leaf)

    def _agreed(self, batch: Any) -> list[Leaves]:
        """The micro-batches of a batch, which must be alike on all ranks."""
        leaves = self._leaves(batch)
        self.tracer.look(self.state.held)
        state = self.tracer.captures.said
        values = self._sampled(leaves.tensors, self.peers.notes + 1) if self.world > 1 else ""
        self.peers.agree(" ".join(leaves.key[1:]), (*leaves.key, state) != self._noted, state, values)
        self._noted = (*leaves.key, state)
        return leaves.split(self.plan.micro_batches)

    def step(self, batch: Any) -> Result:
        """Train on one global batch, or `Sized(batch, sizes)`: with micro-batches of so many samples."""
        self._refuse_released()
        self._check_saves()
        return self._step(batch) if self.recorder.tape is None else self.recorder.step(self._step, batch)

    def _step(self, batch: Any) -> Result:
        clock = clock_of(self.device)
        state, scaler = self.state, self.state.scaler
        micros = self._agreed(batch)
        self._refuse_changes()
        if self._unchecked:
            self._unchecked = False
            self._check(micros)
        scale = scaler.scale if scaler else 1.0
        pipe = self.pipes.ready(StepFeed(micros, state.steps, scale), True)
        tape = self.recorder.tape
        tape = tape if isinstance(tape, PipeTape) and tape.active else None
        self.recorder.mark("batch")
        pipe.actors.record(tape is not None)
        pipe.parts.settle = self._settle if tape is not None else None
        lr = optim.first_lr(self.optimizer)
        number, state.steps = state.steps, state.steps + 1
        grads: dict[str, Tensor] = {}
        alone = self.clip_norm is None and scaler is None and not pipe.weighted

        def last() -> list[float]:
            if tape is not None:
                tape.fired(pipe.actors.spans(), pipe.net)
            grads.update(self._reduced(pipe))
            self.recorder.mark("gradients")
            said = self._said(pipe, grads)
            if alone:  # nothing to learn from the others: updated while they may still be at work
                self._update(grads, number, torch.zeros((), device=self.device), 1.0)
            return said

        pipe.actors.run(1, last)
        raw, *rest = torch.tensor(pipe.actors.sums, dtype=torch.float64, device=self.device).unbind()
        values = dict(zip(pipe.values, rest, strict=True))
        loss = values["metric:loss_total" if pipe.weighted else "loss:loss"]
        self.recorder.mark("norm")
        raw = raw.sqrt()
        if alone:
            return Result(number, loss, raw, lr, clock(), False).attach(reported(values))
        inverse: Any = 1.0 / scale
        if pipe.weighted:
            weight = values["metric:loss_weight"]
            loss, inverse = loss / weight, inverse / weight
        if scaler is not None:
            finite = math.isfinite(float(raw))
            scaler.update(finite)
            if not finite:
                return Result(number, loss, raw * inverse, lr, clock(), True).attach(reported(values))
        norm = self._update(grads, number, raw, inverse)
        return Result(number, loss, norm, lr, clock(), False).attach(reported(values))

    def _refuse_changes(self) -> None:
        """What a user changed since the last step: state is taken into account, the rest is decided by the stages."""
        for name, param, trained in self._trained:
            if param.requires_grad is not trained:
                raise OptimizerError(
                    f"{name} was {'frozen' if trained else 'unfrozen'} after the job was made",
                    why="a plan with stages is made for the gradients that there are",
                    next="make a new job",
                )
        if not self.state.tracked.same():
            if self.state.tracked.regrouped():
                raise OptimizerError(
                    "the optimizer's groups were changed after the job was made",
                    why="a plan with stages gives each rank some of their parameters",
                    next="make a new job",
                )
            self.state.resolve()

    def evaluate(self, batches: Iterable[Any], metrics: Metrics | None = None) -> Evaluation:
        """The loss over batches with the model in evaluation mode, through the stages; see `Job.evaluate`."""
        self._refuse_released()
        sums = Sums()
        around = partial(self.precision.around, device=self.device)
        with evaluation_mode(self.state.model), self.tracer.measuring(metrics or {}, around):
            for i, batch in enumerate(batches):
                feed = StepFeed(self._agreed(batch), -1 - i)
                pipe = self.pipes.ready(feed, False)
                pipe.actors.run(1, partial(self._said, pipe, {}))
                sums.add_outputs(dict(zip(pipe.values, pipe.actors.sums[1:], strict=True)), sum(feed.samples))
        return sums.evaluation

    def _reduced(self, pipe: Pipe) -> dict[str, Tensor]:
        """Gradients of this step as their owners here need them."""
        items: list[Move] = []
        terms: list[Tensor] = []
        for s, o in pipe.outputs("grad"):
            items.append((o.name, o.placed.spec, o.placed.nd, self.state.layout.owned_nd(o.name)))
            terms.append(pipe.parts.sums[s, f"grad:{o.name}"])
        out: dict[str, Tensor] = {}
        for (name, *_), x in zip(items, self._reshard(items, "micro-batches summed", terms), strict=True):
            out[name] = out[name] + x if name in out else x
        for name, homes in sorted(self.state.layout.homes.items()):
            if len(homes) > 1 and any((name, p) in self._graded for p in homes):
                self._tie(name, homes, out)
        return out

    def _tie(self, name: str, homes: Sequence[int], grads: dict[str, Tensor]) -> None:
        """Add up a weight's gradients at its home, and give the sum to all places that hold it."""
        at = self.state.layout.at
        if at not in homes:
            return
        home, mine = homes[0], grads.get(name)
        for other in homes[1:]:
            if (name, other) in self._graded:
                there = self._across(name, other, home, mine)
                if there is not None:
                    mine = there if mine is None else mine + there
        for other in homes[1:]:
            there = self._across(name, home, other, mine)
            mine = there if at == other else mine
        if mine is not None:
            grads[name] = mine

    def _across(self, name: str, src: int, dst: int, x: Tensor | None) -> Tensor | None:
        """A gradient from one place to another, as it is owned on both sides."""
        layout = self.state.layout
        if layout.at not in (src, dst):
            return None
        a, b = layout.places[src], layout.places[dst]
        way = crossing(self._grad_specs[name], a, layout.owned[name, src], b, layout.owned[name, dst])
        return exchange(way, x if layout.at == src else None, self.peers.process_group, device=self.device)

    def _said(self, pipe: Pipe, grads: Mapping[str, Tensor]) -> list[float]:
        """This rank's share of the square of the gradient's norm, of the loss and of metrics."""
        layout = self.state.layout
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, g in grads.items():
            if layout.homes[name][0] == layout.at:
                nd = layout.owned_nd(name)
                copies = math.prod(n for p, n in zip(nd, self.mesh.sizes, strict=True) if not isinstance(p, Split))
                square += g.double().square().sum() / copies
        values = self._values(pipe)
        speaks = layout.mesh_rank == 0
        return [float(square), *(float(values[key]) if speaks and key in values else 0.0 for key in pipe.values)]

    def _values(self, pipe: Pipe) -> dict[str, Tensor]:
        """Loss and metrics of the stages at this place, whole."""
        items: list[Move] = []
        terms: list[Tensor] = []
        for s, o in pipe.outputs("loss", "metric"):
            items.append((f"{o.kind}:{o.name}", o.placed.spec, o.placed.nd, (B,) * len(self.mesh.sizes)))
            terms.append(pipe.parts.sums[s, f"{o.kind}:{o.name}"])
        return dict(zip([n for n, *_ in items], self._reshard(items, "values summed", terms), strict=True))

    def _update(self, grads: Mapping[str, Tensor], number: int, raw: Tensor, inverse: Any) -> Tensor:
        """Update what this rank owns; the norm of the gradient as it counts."""
        state = self.state
        names = [n for n in state.by_name if n in grads]
        pieces = optim.laid_out([state.by_name[n] for n in names], [grads[n] for n in names], state.plain)
        norm = scale_and_clip(pieces, raw, inverse, self.clip_norm, self.clip_value)
        updates = [(state.by_name[n], g) for n, g in zip(names, pieces, strict=True)]
        key = torch.tensor([state.seed, number], device=self.device)
        here = state.layout.mesh_rank
        state.about_to_change()
        update(self.optimizer, updates, self.precision.rounding, key, self.mesh, here, state.numbers)
        self.recorder.mark("optimizer")
        state.put_together(self._reshard)
        state.average()
        return norm

    def _check(self, micros: list[Leaves]) -> None:
        """The first micro-batch against the model in plain PyTorch."""
        with self.recorder.paused():
            first_batch_check.check_stages(
                partial(self._alone, micros[0], len(micros)),
                self.gather,
                self.state,
                self.tracer,
                self.peers,
                self.graph,
                self.plan,
                micros,
                precision=self.precision.name,
                step=self.pipes.through_inductor,
            )

    def _alone(self, micro: Leaves, count: int, scale: float) -> dict[str, Tensor]:
        """Loss and whole gradients of one micro-batch, put through the pipe in the place of every one."""
        state = self.state
        buffers = [s.name for s in state.slots if s.kind == "buffer" and s.name in state.held]
        kept = {n: state.held[n].clone() for n in buffers}
        grads: dict[str, Tensor] = {}
        try:
            pipe = self.pipes.ready(StepFeed([micro] * count, state.steps, scale, alone=True), True)
            pipe.actors.record(False)
            pipe.parts.settle = None

            def last() -> list[float]:
                grads.update(self._reduced(pipe))
                return self._said(pipe, grads)

            pipe.actors.run(1, last)
        finally:
            for name, t in kept.items():
                state.held[name].copy_(t)
        sums = torch.tensor(pipe.actors.sums[1:], dtype=torch.float64, device=self.device)  # a tensor: weights may be 0
        values = dict(zip(pipe.values, sums, strict=True))
        part = count if pipe.weighted else 1
        loss = values["metric:loss_total"] / values["metric:loss_weight"] if pipe.weighted else values["loss:loss"]
        names = sorted({n for n, _ in self._graded})
        parts = [
            HeldPart(n, self._grad_specs[n], state.layout.owned_nd(n), state.layout.home(n), grads.get(n))
            for n in names
        ]
        whole = dict(zip(names, self.gather.whole(parts), strict=True))
        return {"loss:loss": loss, **{f"grad:{n}": t / part for n, t in whole.items()}}

    def _settle(self) -> None:
        """Wait for the device, so that a recorded firing ends when its work does."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _about(self) -> dict[str, Any]:
        return {"plan": self.plan.hash, "places": [list(p.ranks) for p in self.plan.places]}

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds from step to step; registers are the most that may lie in queues at once."""
        parts = self.pipes.training.parts
        return {
            "parameters": sum(t.nbytes for t in self.state.held.values())
            + sum(k.owned.nbytes for k in self.state.gathered),
            "gradients": sum(t.nbytes for (_, key), t in parts.sums.items() if key.startswith("grad:")),
            "state": self.state.optimizer_bytes,
            "registers": parts.piped.net.bound_bytes(self.state.layout.at),
        }

    def close(self) -> None:
        """End the actors and leave the process group, if this job made it."""
        self.pipes.close()
        super().close()


def refuse_ranks(plan: Staged, world: World) -> None:
    """Refuse a world of another size than the plan's."""
    if plan.ranks != world.size:
        raise MeshError(
            f"the plan has {plan.ranks} ranks, the world has {world.size}", next=f"start {plan.ranks} processes"
        )


def layout_of_stages(plan: Staged, graphs: Sequence[Graph], rank: int) -> StateLayout:
    """Where the tensors of a model are held by the stages that read them."""
    homes: dict[str, list[int]] = {}
    held: dict[tuple[str, int], NdSbp] = {}
    owned: dict[tuple[str, int], NdSbp] = {}
    for stage, graph in zip(plan.stages, graphs, strict=True):
        for item in graph.inputs:
            if item.kind in ("param", "buffer"):
                places = homes.setdefault(item.name, [])
                places += [stage.place] if stage.place not in places else []
                nd = held[item.name, stage.place] = stage.plan.inputs[item.name]
                owned[item.name, stage.place] = stage.plan.state.get(item.name, nd)
    return StateLayout(tuple(plan.places), rank, held, owned, homes)

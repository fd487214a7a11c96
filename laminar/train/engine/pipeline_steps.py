"""The pipes of a job with stages: opened for micro-batches of some sizes, made larger, and fed.

Micro-batches of one step may have different sizes, and those of later steps others: all go through one pipe, whose
registers are large enough for the largest. Each size is captured, lowered and turned into code when first met; one that
does not fit opens a larger pipe in place of the old one. Evaluation has a pipe of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES, constant_tensor
from laminar.errors import BatchError, PlanError
from laminar.events import emit
from laminar.ir.graph import Graph
from laminar.ir.net import Net
from laminar.ir.plans.staged import Staged
from laminar.ir.program import Program, ProgramOutput
from laminar.lower.stages.stage_net import together
from laminar.lower.stages.stage_programs import Stages, stages
from laminar.rewrite.variants import rewritten
from laminar.runtime.code.eager_step import Adding, EagerStep
from laminar.runtime.comm.transport import Groups, Null
from laminar.runtime.pipeline.actors import Actors
from laminar.runtime.pipeline.channels import Value
from laminar.runtime.pipeline.connect import connect_actors
from laminar.runtime.pipeline.stage_runner import SizeCode, StageRunner
from laminar.staging.stage_plans import for_other_graph
from laminar.train.batch.leaves import Leaves
from laminar.train.engine.tracer import Tracer
from laminar.train.state.state import JobState
from laminar.train.world import World

if TYPE_CHECKING:
    from laminar.runtime.code.inductor_step import Compiled

SIZES = 8
"""Sizes of micro-batches that one step may have."""
MOST_SIZES = 16
"""Sizes that are kept compiled: each has code of its own, and buffers for what its collectives bring."""


@dataclass
class Pipe:
    """Stages ready to run on this rank, for micro-batches up to a size."""

    graph: Graph
    """Of the largest micro-batch, as `made`."""
    made: Stages
    parts: StageRunner
    actors: Actors
    sizes: dict[Any, SizeCode] = field(default_factory=dict)
    """What is compiled, by the hash of what was captured; that used longest ago comes first."""

    @property
    def net(self) -> Net:
        """Its actors and queues."""
        return self.actors.net

    @cached_property
    def weighted(self) -> bool:
        """Whether the loss is a total over a weight."""
        return any(o.kind == "metric" and o.name == "loss_weight" for o in self.graph.outputs)

    @cached_property
    def values(self) -> list[str]:
        """Loss and metrics of the whole model by `kind:name`, in an order that is the same on every rank."""
        return [f"{o.kind}:{o.name}" for o in self.graph.outputs if o.kind in ("loss", "metric")]

    def outputs(self, *kinds: str) -> list[tuple[int, ProgramOutput]]:
        """What the stages of this rank give, with their stages."""
        mine = ((s, part) for s in self.parts.stages for part in self.made.parts[s])
        return [(s, o) for s, part in mine for o in part.program.outputs if o.kind in kinds]


@dataclass
class StepFeed:
    """What the pipe is fed in one step."""

    micros: Sequence[Leaves]
    draws: int
    """What the draws of this step depend on: its number, or that of a batch of an evaluation."""
    scale: float = 1.0
    alone: bool = False
    """Whether each micro-batch draws as if it were a batch by itself."""

    @cached_property
    def samples(self) -> list[int]:
        """In each micro-batch."""
        return [m.samples for m in self.micros]


class Pipes:
    """What a job with stages runs its micro-batches through: one pipe for training, another for evaluation."""

    def __init__(
        self,
        tracer: Tracer,
        state: JobState,
        plan: Staged,
        world: World,
        transport: Groups | Null,
        through_inductor: bool,
        captured: Graph,
        graph: Graph,
        made: Stages,
    ) -> None:
        """`made` are the stages of the first micro-batch's `graph`, which is `captured` as the plan rewrites it."""
        self.tracer, self.state, self.plan, self.world, self.transport = tracer, state, plan, world, transport
        self.through_inductor = through_inductor
        self._graphs: dict[str, Graph] = {captured.hash: graph}
        """By the hash of what was captured, as the plan rewrites it."""
        self._measured: tuple[Any, ...] = ()
        """Which metrics the pipe for evaluation has."""
        self.training = self._opened({captured.hash: made}, graph)
        self._open: dict[bool, Pipe] = {True: self.training}

    def ready(self, feed: StepFeed, backward: bool) -> Pipe:
        """The pipe for the micro-batches of a step, which it is fed as it runs; all ranks call this alike."""
        pipe = self._pipe_for(feed.micros, backward)
        if backward:
            self.training = pipe
        samples = feed.samples
        pipe.parts.weights = [n / sum(samples) for n in samples]
        pipe.parts.feed = partial(self._feed, pipe, feed)
        return pipe

    def close(self) -> None:
        """End the actors."""
        for pipe in self._open.values():
            pipe.actors.close()

    def _opened(self, made: Mapping[Any, Stages], graph: Graph) -> Pipe:
        """A pipe for some sizes of micro-batches: code for this rank's parts, and actors that meet those of others."""
        emit("phase", name="compiling")
        pipes = together(list(made.values()))
        parts = StageRunner(pipes, self.world.rank, self.state.held, self._build)
        net = pipes[0].net
        tokens = {q.name: [Value([])] * q.filled for q in net.queues if q.filled}
        actors = connect_actors(
            net,
            parts.fire,
            routes=parts.routes(),
            initial=tokens,
            device=self.world.device,
            timeout_s=self.world.timeout_s,
            group=self.world.process_group,
        )
        assert actors is not None  # every rank is at a place
        return Pipe(graph, next(iter(made.values())), parts, actors, dict(zip(made, parts.first, strict=True)))

    def _pipe_for(self, micros: Sequence[Leaves], backward: bool) -> Pipe:
        """The pipe for such micro-batches, made on first use or made larger; all ranks call this alike."""
        if not backward and self._measured != self.tracer.measured:  # another graph: another pipe
            self._measured = self.tracer.measured
            if backward in self._open:
                self._open.pop(backward).actors.close()
        keys = [self.tracer.graph(m, backward).hash for m in micros]
        kinds = dict(zip(keys, micros, strict=True))
        if len(kinds) > SIZES:
            raise BatchError(
                f"micro-batches of {len(kinds)} different sizes in one step",
                allowed=f"{SIZES} at most",
                next="make more of them equal: each size is a program of its own",
            )
        pipe = self._open.get(backward)
        for key in kinds:
            if pipe is not None and key not in pipe.sizes:
                size = pipe.parts.joining(self._lowered(kinds[key], backward, pipe.made))
                if size is None:
                    pipe = None
                else:
                    pipe.sizes[key] = size
        if pipe is None:
            pipe = self._larger(kinds, backward)
        for key in kinds:
            pipe.sizes[key] = pipe.sizes.pop(key)
        for key in list(pipe.sizes)[: max(len(pipe.sizes) - MOST_SIZES, 0)]:
            del pipe.sizes[key]
        pipe.parts.sizes = [pipe.sizes[key] for key in keys]
        return pipe

    def _larger(self, kinds: Mapping[Any, Leaves], backward: bool) -> Pipe:
        """A pipe for these micro-batches in place of the one there is, if any; the largest decides how sums lie."""
        if backward in self._open:
            self._open.pop(backward).actors.close()
        made: dict[Any, Stages] = {}
        for key in sorted(kinds, key=lambda key: -sum(t.numel() for t in kinds[key].tensors.values())):
            made[key] = self._lowered(kinds[key], backward, next(iter(made.values()), None))
        pipe = self._open[backward] = self._opened(made, self._graphs[next(iter(made))])
        return pipe

    def _lowered(self, leaves: Leaves, backward: bool, like: Stages | None) -> Stages:
        """Micro-batches of one size captured and lowered, their sums as those of another."""
        captured = self.tracer.graph(leaves, backward)
        if captured.hash not in self._graphs:
            while len(self._graphs) >= MOST_SIZES:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[captured.hash] = rewritten(captured, self.plan)
        graph = self._graphs[captured.hash]
        made = stages(graph, for_other_graph(graph, self.plan), like)
        for s, own in enumerate(made.cut.graphs):
            place = made.staged.stages[s].place
            for item in own.inputs:
                if item.kind in ("param", "buffer") and (item.name, place) not in self.state.layout.held:
                    raise PlanError(
                        f"with micro-batches of {leaves.samples} samples stage {s} reads {item.name}, "
                        f"which is not held at its place {place}",
                        next="cut the model at modules (stages=[...]), or use micro-batches of one size",
                    )
        return made

    def _build(self, program: Program, adding: Adding) -> EagerStep | Compiled:
        constants = {c.name: constant_tensor(c) for c in program.constants}
        if self.through_inductor:
            from laminar.runtime.code.inductor_step import Compiled

            # What is kept between parts is decided; a recording's outputs would be overwritten by the next micro-batch.
            return Compiled(program, self.transport, constants, replay=False, traffic=None)
        return EagerStep(program, self.transport, constants, adding=adding)

    def _feed(self, pipe: Pipe, feed: StepFeed, stage: int, k: int) -> dict[str, Tensor]:
        """This rank's share of what a stage reads from outside, of one micro-batch."""
        out: dict[str, Tensor] = {}
        cut, device = self.state.layout.cut, self.world.device
        made = pipe.parts.sizes[k].piped.made
        plan = made.staged.stages[stage].plan
        for item in made.cut.graphs[stage].inputs:
            if item.kind == "batch":
                mine = cut(feed.micros[k].tensors[item.name], plan.inputs[item.name])
                out[item.name] = mine.to(device, non_blocking=True)
            elif item.kind == "rng":
                samples = feed.samples
                place = (0, samples[k]) if feed.alone else (sum(samples[:k]), sum(samples))
                told = [self.state.seed, feed.draws, *place][: item.spec.numel]
                out[item.name] = cut(torch.tensor(told, device=device), plan.inputs[item.name])
            elif item.kind == "scale":
                weight = 1.0 if pipe.weighted else pipe.parts.weights[k]
                scale = torch.tensor(feed.scale * weight, dtype=DTYPES[item.spec.dtype], device=device)
                out[item.name] = cut(scale, plan.inputs[item.name])
        return out

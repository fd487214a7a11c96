"""From graphs to running programs: one compiled step for each shape of batch, on one mesh of one world.

The first shape decides the plan. Later ones (the last, smaller batch of an epoch; evaluation) are
captured when first met and keep the plan's decisions about everything that lives from step to step. So is
a step after something has changed that its code reads (`guards.py`); if the graph is one that is known,
nothing is compiled.

An engine owns nothing that has to survive it. What a run is, is its state (`state.py`); what its graphs are, the tracer
knows (`tracer.py`); an engine binds both to a plan, its mesh and the ranks of a world. For another mesh or a later
generation of the world it is closed, and another is made around the same state and tracer (`Engine.around`).

Where several micro-batches make one step, gradients that the plan keeps whole are not reduced after
each of them: they leave the program as this rank's terms of the sum, are added up here, and travel
once at the end. Gradients that the plan keeps in shards are reduced at once, which is what bounds
their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import constant_tensor
from laminar.cost.sim.no_gc import uncollected
from laminar.errors import BatchError
from laminar.events import emit
from laminar.ir.graph import RNG, SCALE, Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Program
from laminar.ir.sbp import B, NdSbp, Partial, local_shape
from laminar.lower.lower import lower
from laminar.lower.step import owners
from laminar.placement.presets import like
from laminar.rewrite.variants import rewritten
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.transport import Groups, Null
from laminar.runtime.exact.hosts import HostedRanks
from laminar.runtime.exact.stage_hosts import StageHosts
from laminar.train.batch.leaves import Leaves
from laminar.train.engine.tracer import Tracer
from laminar.train.state.resharder import Resharder
from laminar.train.state.state import JobState
from laminar.train.world import World

MOST_SHAPES = 16
"""Shapes of batches that are kept compiled: each has buffers for its gradients."""

Transport = Groups | Null | HostedRanks | StageHosts
Build = Callable[[Program, Any, Mapping[str, Tensor], tuple[int, ...]], Callable[..., list[Tensor]]]
"""Turns a program into code; it is told which inputs never change their place."""
StepInputs = tuple[Mapping[str, Tensor], Tensor | None, Tensor | None]
"""What a step is given: leaves of the (micro-)batch, what random draws depend on, the scale of the loss."""


@dataclass
class Ready:
    """A graph, its plan, its program, and the code that runs it on this rank."""

    graph: Graph
    plan: Plan
    program: Program
    step: Callable[..., list[Tensor]]
    fixed: list[Any]
    """Inputs in order: parameters and buffers stand, the rest is filled in each time."""
    filled: dict[str, int]
    outputs: dict[str, int]
    """Position of each output by `kind:name`."""
    cuts: Mapping[int, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """For inputs besides the batch that a plan has in shards: a key of random draws may lie like any other tensor."""

    def __call__(self, leaves: Mapping[str, Tensor], key: Tensor | None, scale: Tensor | None) -> list[Tensor]:
        """Run one (micro-)batch of local leaves; local outputs in order."""
        return self.step(*self.inputs(leaves, key, scale))

    def inputs(self, leaves: Mapping[str, Tensor], key: Tensor | None, scale: Tensor | None) -> list[Tensor]:
        """All inputs in order."""
        args = list(self.fixed)
        for name, at in self.filled.items():
            args[at] = key if name == RNG else scale if name == SCALE else leaves[name]
        for at, cut in self.cuts.items():
            args[at] = cut(args[at])
        return args

    def key(self, seed: int, step: int, first: int, samples: int, device: torch.device) -> Tensor | None:
        """What random draws of one run of the program depend on, if it makes any.

        A program for micro-batches is told which sample of its batch comes first, and how many that has.
        """
        if RNG not in self.filled:
            return None
        told = self.graph.input(RNG).spec.numel
        return torch.tensor([seed, step, first, samples][:told], device=device)

    @cached_property
    def grads(self) -> list[tuple[str, int]]:
        """Parameters with a gradient, and where it stands among the outputs."""
        return self._of_kind("grad")

    @cached_property
    def buffers(self) -> list[tuple[str, int]]:
        """Buffers with a new value, and where it stands among the outputs."""
        return self._of_kind("buffer")

    @cached_property
    def values(self) -> list[tuple[str, int]]:
        """Loss and metrics as `kind:name`, and where they stand among the outputs."""
        return [(f"{kind}:{n}", i) for kind in ("loss", "metric") for n, i in self._of_kind(kind)]

    def _of_kind(self, kind: str) -> list[tuple[str, int]]:
        return [(n.partition(":")[2], i) for n, i in self.outputs.items() if n.partition(":")[0] == kind]


class Engine:
    """The compiled steps of one plan, on the ranks of its mesh."""

    whole_outputs = False
    """Whether loss and gradients leave programs whole on every rank, whatever part of the weights a rank owns."""

    def __init__(
        self, tracer: Tracer, plan: Plan, held: Mapping[str, Tensor], transport: Groups | Null, build: Build
    ) -> None:
        """`held` is what this rank has of the model's tensors, laid out as the plan says; looked up, not copied."""
        self.tracer, self.plan, self.held, self.build = tracer, plan, held, build
        self.mesh: Mesh = plan.mesh
        self.transport: Transport = transport
        self.scaled, self.micro_batches = tracer.scaled, tracer.micro_batches
        self.resharder = Resharder(transport)
        self._ready: dict[str, Ready] = {}
        """Compiled steps by the hash of what was captured."""
        self._terms: dict[str, NdSbp] = {}
        """How loss and gradients of micro-batches lie until they are summed up."""

    @staticmethod
    def around(state: JobState, tracer: Tracer, plan: Plan, world: World, build: Build) -> Engine:
        """An engine for a plan on the ranks of a world, around state that is laid out as the plan wants it."""
        return Engine(tracer, plan, state.held, world.transport(plan.mesh), build)

    def close(self) -> None:
        """Leave the groups of ranks that its programs talk through; nothing of it may be running."""
        self.transport.close()
        self._ready.clear()

    def together(self, leaves: Leaves) -> Leaves:
        """The batch that ranks hold together, from this rank's share: stand-ins, of which split ones are longer."""
        if not leaves.local:
            return leaves
        n, out = leaves.samples, {}
        sizes = [s for s, a in zip(self.mesh.sizes, range(len(self.mesh.sizes)), strict=True) if self._splits(a)]
        for name, t in leaves.tensors.items():
            shape = list(t.shape)
            if t.dim() and t.shape[0] == n:
                for size in sizes:
                    shape[0] *= size
            out[name] = torch.empty(shape, dtype=t.dtype, device="meta")
        return Leaves(out, leaves.tree, False)

    def _splits(self, axis: int) -> bool:
        return any(nd[axis] != B for n, nd in self.plan.inputs.items() if n.split(".")[0] == "batch")

    def ready(self, leaves: Leaves, backward: bool = True) -> Ready:
        """The compiled step for such a (micro-)batch, made on first use."""
        captured = self.tracer.graph(self.together(leaves), backward)

        def made() -> Ready:
            graph = rewritten(captured, self.plan)
            return self.compile(graph, self.plan if graph.hash == self.plan.graph_hash else like(graph, self.plan))

        return self._kept(captured.hash, made)

    def _kept(self, captured: str, make: Callable[[], Ready]) -> Ready:
        """A compiled step, made on first use; only so many are kept."""
        if captured not in self._ready:
            while len(self._ready) >= MOST_SHAPES:
                del self._ready[next(iter(self._ready))]  # the one used longest ago, the same on every rank
            self._ready[captured] = make()
        self._ready[captured] = self._ready.pop(captured)
        return self._ready[captured]

    @uncollected()
    def compile(self, graph: Graph, plan: Plan) -> Ready:
        """Lower a plan and turn it into code."""
        emit("phase", name="compiling")
        wanted = self.wanted(graph, plan)
        program = lower(graph, replace(plan, outputs={**plan.outputs, **wanted}))
        stays = ("param", "buffer")
        static = tuple(i for i, item in enumerate(program.inputs) if item.kind in stays)
        constants = {c.name: constant_tensor(c) for c in program.constants}
        step = self.build(program, self.transport, constants, static)
        fixed = [self.held.get(i.name) if i.kind in stays else None for i in program.inputs]
        filled = {item.name: i for i, item in enumerate(program.inputs) if item.kind not in stays}
        outputs = {f"{o.kind}:{o.name}": i for i, o in enumerate(program.outputs)}
        cuts = {
            i: partial(shard, nd=item.placed.nd, mesh=self.mesh, rank=self.transport.rank)
            for i, item in enumerate(program.inputs)
            if item.kind in ("rng", "scale") and any(p != B for p in item.placed.nd)
        }
        return Ready(graph, plan, program, step, fixed, filled, outputs, cuts)

    def wanted(self, graph: Graph, plan: Plan) -> dict[str, NdSbp]:
        """How outputs leave the program, where that is not how the plan keeps them.

        A gradient goes to whoever updates that piece. With several micro-batches, sums that would be
        kept whole stay unfinished.
        """
        if self.tracer.micro_batches == 1:
            return owners(graph, plan)
        out: dict[str, NdSbp] = {}
        for o in graph.outputs:
            key = f"{o.kind}:{o.name}"
            kept = plan.outputs[key]
            if o.kind == "buffer":
                continue
            node = graph.by_name.get(o.ref.name)
            made = plan.ops[node.name].outs[o.ref.index] if node is not None else kept
            later = tuple(
                m if isinstance(m, Partial) and m.op == "sum" and k == B else k for m, k in zip(made, kept, strict=True)
            )
            # Micro-batches of one step may differ in size, and what they give is added up: it must lie alike.
            out[key] = self._terms.setdefault(key, later)
        return out

    def share(self, ready: Ready, leaves: Leaves, device: torch.device) -> dict[str, Tensor]:
        """This rank's part of a batch, on its device."""
        out = {}
        for item in ready.program.inputs:
            if item.kind != "batch":
                continue
            x, placed = leaves.tensors[item.name], item.placed
            if leaves.local:
                want = local_shape(placed.spec.shape, placed.nd, self.mesh.sizes, self.mesh.coords(self.transport.rank))
                if tuple(x.shape) != want:
                    raise BatchError(
                        f"{item.name}: this rank's share is {tuple(x.shape)}, the plan wants {want} of {placed.spec}",
                        next="give every rank as many: pad, and mask that in laminar.Loss",
                    )
            else:
                x = shard(x, placed.nd, self.mesh, self.transport.rank)
            out[item.name] = x.to(device, non_blocking=True)
        return out

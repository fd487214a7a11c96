"""The engine of exact mode with stages: all micro-batches of a step on their way through the stages at once.

Each process runs what it hosts of every stage (`runtime/exact/hosted_stages.py`). Gradients of a micro-batch go up the
tree over its units; those of micro-batches are added in their order, and where stages share a weight, theirs in the
order of stages. So the number of stages changes no bit, but for weights that stages share.

Whole gradients are only where their stage is hosted: there their norms are taken, and from there every process is given
what it updates (`stage_exchange.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from laminar.capture.model.losses import is_mean
from laminar.capture.ops.torch_ops import DTYPES, constant_tensor
from laminar.capture.torch_private import foreach_norm
from laminar.ir.exact import Exact
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.ir.program import Program, ProgramOutput
from laminar.ir.sbp import B, NdSbp
from laminar.ir.serial.codec import content_hash
from laminar.lower.stages.one_order import one_order
from laminar.lower.stages.stage_programs import Stages, stages
from laminar.runtime.exact.hosted_stages import HostedStages, StagesRun
from laminar.runtime.exact.stage_hosts import StageHosts
from laminar.staging.logical_stages import logical_stages, weights_of_stages
from laminar.train.engine.engine import Ready, StepInputs
from laminar.train.engine.exact_engine import ExactEngine, RunLine
from laminar.train.engine.stage_exchange import StageExchange
from laminar.train.engine.tracer import Tracer
from laminar.train.state.resharder import Resharder
from laminar.train.state.state import JobState
from laminar.train.world import World


class StagedExactEngine(ExactEngine):
    """Compiled stages of logical ranks, around state that lies on processes as a plan says."""

    hosts: StageHosts

    def __init__(
        self,
        tracer: Tracer,
        plan: Plan,
        state: JobState,
        storage: Resharder,
        hosts: StageHosts,
        exact: Exact,
        world: World,
    ) -> None:
        super().__init__(tracer, plan, state, storage, hosts, exact)
        self.world = world
        self._cut: Staged | None = None
        """How the first graph was cut: others follow it."""
        self._stages: dict[str, Stages] = {}
        self._sums: dict[tuple[int, str], Tensor] = {}
        """Gradients of a step with several micro-batches, by stage and name."""
        self._pipe: HostedStages | None = None
        self.norms: dict[str, Tensor] = {}
        """Of the whole gradients of the last step, by name."""

    def _runner(self, graph: Graph, program: Program) -> StagesStep:
        if graph.hash not in self._stages:
            cut = logical_stages(graph, self.exact, self.micro_batches, self._cut)
            self._cut = self._cut or cut
            self._stages[graph.hash] = stages(graph, cut, finished=True)
        made = self._stages[graph.hash]
        constants = {c.name: constant_tensor(c) for c in graph.constants}
        return StagesStep(
            self, program, HostedStages(made, self.hosts, constants, torch.get_num_threads(), watch=self._watch)
        )

    def cut_of(self, ready: Ready) -> list[str]:
        """Where the model was cut, as it is saved: the first weight of each later stage, and a digest of all."""
        found = weights_of_stages(self._stages[ready.graph.hash].cut.graphs)
        begins = [next((n for n, where in found.items() if s in where), "") for s in range(1, self.exact.stages)]
        return [*begins, content_hash(sorted(found.items()))[:8]]

    def lines(self, ready: Ready) -> list[RunLine]:
        """Those of all parts, in the order in which a micro-batch passes through them."""
        made, each = self._stages[ready.graph.hash], self.exact.mesh.ranks
        parts = [made.by_name[name] for name, _ in one_order([made])]
        return [(i, range(p.stage * each, (p.stage + 1) * each)) for p in parts for i in p.program.instrs]

    def gradient_bytes(self, ready: Ready) -> int:
        """Of whole gradients of the stages that are here."""
        graphs = self._stages[ready.graph.hash].cut.graphs
        here = [own for own, ranks in zip(graphs, self.hosts.ranks, strict=True) if ranks is not None]
        return sum(own.specs[o.ref].nbytes for own in here for o in own.outputs if o.kind == "grad")

    @property
    def own_s(self) -> float:
        """Seconds that this process spent on its own work in the last run of each part."""
        return self._pipe.own_s if self._pipe is not None else 0.0

    # --- a step -------------------------------------------------------------------------------------

    def run(self, fed: Sequence[tuple[Ready, StepInputs, float]]) -> tuple[list[Tensor], list[Tensor]]:
        """All micro-batches: loss and metrics, and this process's parts of gradients, in order; `norms` are theirs."""
        steps = [_step_of(ready) for ready, _, _ in fed]
        feeds = [dict(zip(s.names, r.inputs(*told), strict=True)) for s, (r, told, _) in zip(steps, fed, strict=True)]
        whole = steps[0].whole_weights(feeds[0])
        for feed in feeds:
            feed |= whole
        sums = StepSums([share for _, _, share in fed], self._sums, feeds[0])
        StagesRun([s.pipe for s in steps], feeds, sums)()
        self._pipe = steps[0].pipe
        values, norms, grads, buffers = steps[0].outcome(sums, self.state.layout.owned_nd, self.state.layout.held_nd)
        for name, part in buffers.items():
            if self.held[name].data_ptr() != part.data_ptr():
                self.held[name].copy_(part)
        self.norms = norms
        return values, [grads[n] for n, _ in fed[0][0].grads]


class StepSums:
    """What leaves the stages in a step, added up over micro-batches."""

    def __init__(
        self, shares: Sequence[float], kept: dict[tuple[int, str], Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        """`shares` of the samples; `kept` is memory for sums; `buffers` are those that get new values."""
        self.shares, self.kept, self.buffers = shares, kept, buffers
        self.grads: dict[tuple[int, str], Tensor] = {}
        self.values: dict[str, Tensor] = {}

    def __call__(self, stage: int, k: int, o: ProgramOutput, x: Tensor) -> None:
        """Take what has left a stage: see `hosted_stages.Leave`."""
        alone = len(self.shares) == 1
        if o.kind == "buffer":
            self.buffers[o.name].copy_(x)
        elif o.kind != "grad":
            name = f"{o.kind}:{o.name}"
            x = x.clone() if alone or not is_mean(name) else x * self.shares[k]
            self.values[name] = self.values[name] + x if name in self.values else x
        elif alone:
            self.grads[stage, o.name] = x
        elif (stage, o.name) in self.grads:
            self.grads[stage, o.name].add_(x)
        else:
            if (stage, o.name) not in self.kept:  # outputs are overwritten by the next run: sums have their own memory
                self.kept[stage, o.name] = torch.empty_like(x)
            self.grads[stage, o.name] = self.kept[stage, o.name].copy_(x)


class StagesStep:
    """The stages for one size of micro-batches: called with inputs in order, it runs one of them alone."""

    def __init__(self, engine: StagedExactEngine, program: Program, pipe: HostedStages) -> None:
        self.engine, self.program, self.pipe = engine, program, pipe
        self.names = [i.name for i in program.inputs]
        self.exchange = StageExchange(pipe.hosts, engine.storage_mesh)
        graphs = pipe.made.cut.graphs
        self.homes: dict[str, list[int]] = {}
        """The stages that each output leaves."""
        for s, own in enumerate(graphs):
            for o in own.outputs:
                if o.kind != "sent":
                    self.homes.setdefault(f"{o.kind}:{o.name}", []).append(s)
        self.specs = {f"{o.kind}:{o.name}": o.placed.spec for o in program.outputs}

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Outputs in order, whole on every process; nothing of the job changes."""
        feed = dict(zip(self.names, inputs, strict=True))
        feed |= self.whole_weights(feed)
        buffers = {o.name: feed[o.name].clone() for o in self.program.outputs if o.kind == "buffer"}
        sums = StepSums([1.0], {}, buffers)
        StagesRun([self.pipe], [feed], sums)()
        everywhere = (B,) * len(self.engine.storage_mesh.sizes)
        values, _, grads, after = self.outcome(sums, lambda name: everywhere, lambda name: everywhere)
        found = {f"grad:{n}": x for n, x in grads.items()} | {f"buffer:{n}": x for n, x in after.items()}
        found |= zip([k for k in self.specs if k.partition(":")[0] in ("loss", "metric")], values, strict=True)
        return [found[key] for key in self.specs]

    def whole_weights(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the stages that are here, as far as processes hold parts of them."""
        state = self.engine.state
        wanted = [
            [n for n in self.pipe.reads(s) if n in state.specs and self.engine.in_parts(n)]
            for s in range(self.engine.exact.stages)
        ]
        return self.exchange.weights(wanted, held, state.specs, state.layout.held_nd)

    def outcome(
        self, sums: StepSums, of_grads: Callable[[str], NdSbp], of_buffers: Callable[[str], NdSbp]
    ) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Loss and metrics, norms of gradients, this process's parts of gradients and of new buffers."""
        hosts, specs = self.pipe.hosts, self.specs
        grads = {n.partition(":")[2]: where for n, where in self.homes.items() if n.startswith("grad:")}
        grads = {n: grads[n] for n in (k.partition(":")[2] for k in specs if k.startswith("grad:"))}
        kinds = {n: (tuple(specs[f"grad:{n}"].shape), DTYPES[specs[f"grad:{n}"].dtype]) for n in grads}
        self.exchange.tied(grads, sums.grads, kinds)
        values = [k for k in specs if k.partition(":")[0] in ("loss", "metric")]
        known: dict[int, Tensor] = {}
        for s, members in enumerate(hosts.members):
            if members[0] == hosts.process:
                mine = [(at, n) for at, (n, where) in enumerate(grads.items()) if where[0] == s]
                found = foreach_norm([sums.grads[s, n] for _, n in mine]) if mine else []
                known |= {at: norm for (at, _), norm in zip(mine, found, strict=True)}
                known |= {len(grads) + i: sums.values[k] for i, k in enumerate(values) if self.homes[k][0] == s}
        told = self.exchange.numbers(known, len(grads) + len(values), self.engine.world.all_reduce)
        norms = {n: x.to(kinds[n][1]) for n, x in zip(grads, told, strict=False)}
        whole = {n: sums.grads[where[0], n] for n, where in grads.items() if (where[0], n) in sums.grads}
        parts = self.exchange.parts(
            {n: where[0] for n, where in grads.items()}, whole, {n: specs[f"grad:{n}"] for n in grads}, of_grads
        )
        buffers = {n.partition(":")[2]: where[0] for n, where in self.homes.items() if n.startswith("buffer:")}
        after = self.exchange.parts(buffers, sums.buffers, self.engine.state.specs, of_buffers)
        hosts.settle()
        loss = [x.to(DTYPES[specs[k].dtype]) for k, x in zip(values, told[len(grads) :], strict=True)]
        return loss, norms, parts, after


def _step_of(ready: Ready) -> StagesStep:
    assert isinstance(ready.step, StagesStep)
    return ready.step

"""The engine of exact mode: programs of logical ranks, of which this process computes those it hosts.

What ranks store of weights is another matter: pieces are gathered before a program runs, and gradients leave whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import constant_tensor
from laminar.cost.sim.no_gc import uncollected
from laminar.errors import BatchError
from laminar.events import emit
from laminar.ir.exact import Exact, Hosting
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Instr, Program
from laminar.ir.sbp import B
from laminar.lower.lower import lower
from laminar.placement.logical import LASTING, logical_plan
from laminar.runtime.exact.hosted_step import HostedStep, LineWatcher
from laminar.runtime.exact.hosts import HostedRanks
from laminar.runtime.exact.stage_hosts import StageHosts
from laminar.train.batch.leaves import Leaves
from laminar.train.engine.engine import Engine, Ready
from laminar.train.engine.tracer import Tracer
from laminar.train.state.resharder import Resharder
from laminar.train.state.state import JobState

Hosts = HostedRanks | StageHosts
RunLine = tuple[Instr, range]
"""A line of a program, and the logical ranks that run it."""


class ExactEngine(Engine):
    """Compiled steps of logical ranks, around state that lies on processes as a plan says."""

    whole_outputs = True

    def __init__(
        self, tracer: Tracer, plan: Plan, state: JobState, storage: Resharder, hosts: Hosts, exact: Exact
    ) -> None:
        """`plan` says what processes store; `storage` talks among them."""
        super().__init__(tracer, plan, state.held, storage.transport, self._hosted)
        self.storage_mesh, self.mesh = plan.mesh, exact.mesh
        self.state, self.storage, self.exact = state, storage, exact
        self.hosts: Hosts = hosts
        self.transport, self.resharder = hosts, storage
        self._watch: LineWatcher | None = None
        self._last: HostedStep | None = None
        self._before: dict[Hosting, tuple[Hosts, dict[str, Ready]]] = {}
        self._programs: dict[str, tuple[Graph, Plan, Program]] = {}

    def _hosted(
        self, program: Program, hosts: HostedRanks, constants: Mapping[str, Tensor], static: tuple[int, ...]
    ) -> HostedStep:
        return HostedStep(program, hosts, constants, torch.get_num_threads(), watch=self._watch, sums=self.exact.sums)

    def watch(self, told: LineWatcher) -> None:
        """Tell somebody of every result of every line from now on; slow, for who looks for a difference."""
        self._watch = told
        self._ready.clear()
        self._before.clear()

    def close(self) -> None:
        """Leave the groups of processes that state moves through."""
        self.storage.transport.close()
        self._ready.clear()
        self._before.clear()

    def rehost(self, hosts: Hosts) -> None:
        """Let processes compute other logical ranks from now on.

        Programs stay. What runs them is made anew, or found: that of the hosting before this one is kept.
        """
        self._before[self.hosts.hosting] = self.hosts, self._ready
        self.hosts, self._ready = self._before.pop(hosts.hosting, (hosts, {}))
        self.transport = self.hosts
        while len(self._before) > 1:
            del self._before[next(iter(self._before))]

    @property
    def own_s(self) -> float:
        """Seconds that this process spent on its own work in the last run of its last program."""
        return self._last.own_s if self._last is not None else 0.0

    def ready(self, leaves: Leaves, backward: bool = True) -> Ready:
        """The compiled step for such a (micro-)batch, made on first use."""
        graph = self.tracer.graph(leaves, backward)
        return self._kept(graph.hash, lambda: self.compile(graph, logical_plan(graph, self.exact)))

    @uncollected()
    def compile(self, graph: Graph, plan: Plan) -> Ready:
        """Lower a plan of logical ranks, and make what runs those that are here."""
        emit("phase", name="compiling")
        if graph.hash not in self._programs:
            self._programs[graph.hash] = graph, plan, lower(graph, plan)
        program = self._programs[graph.hash][2]
        fixed = [self.held.get(i.name) if i.kind in LASTING else None for i in program.inputs]
        filled = {item.name: i for i, item in enumerate(program.inputs) if item.kind not in LASTING}
        outputs = {f"{o.kind}:{o.name}": i for i, o in enumerate(program.outputs)}
        return Ready(graph, plan, program, self._runner(graph, program), fixed, filled, outputs)

    def _runner(self, graph: Graph, program: Program) -> Callable[..., list[Tensor]]:
        """What runs a program on the logical ranks that are here, given what this process holds of weights."""
        assert isinstance(self.hosts, HostedRanks)
        step = self._hosted(program, self.hosts, {c.name: constant_tensor(c) for c in program.constants}, ())
        whole = (B,) * len(self.storage_mesh.sizes)
        apart = [(at, i.name) for at, i in enumerate(program.inputs) if i.kind in LASTING and self.in_parts(i.name)]
        items = [(name, self.state.specs[name], self.state.layout.held_nd(name), whole) for _, name in apart]

        def gathered(*inputs: Tensor) -> list[Tensor]:
            given, self._last = list(inputs), step
            found = self.storage(items, "weights", [given[at] for at, _ in apart]) if apart else []
            for (at, _), weight in zip(apart, found, strict=True):
                given[at] = weight
            return step(*given)

        return gathered

    def lines(self, ready: Ready) -> list[RunLine]:
        """All lines of a step in order."""
        return [(i, range(ready.program.mesh.ranks)) for i in ready.program.instrs]

    def in_parts(self, name: str) -> bool:
        """Whether processes hold parts of a weight."""
        return self.state.layout.held_nd(name) != (B,) * len(self.storage_mesh.sizes)

    def share(self, ready: Ready, leaves: Leaves, device: torch.device) -> dict[str, Tensor]:
        """The whole batch: each process takes the rows of its units out of it."""
        if leaves.local:
            raise BatchError(
                "in exact mode a rank's share depends on the hosting", next="hand every rank the global batch"
            )
        return {i.name: leaves.tensors[i.name] for i in ready.program.inputs if i.kind == "batch"}

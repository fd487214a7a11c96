"""A pipeline of logical ranks as one process runs it: of every stage the parts that it hosts some logical ranks of.

Every part is a program of its stage's logical ranks (`hosted_step.py`), run by the processes that host that stage. All
processes go through the firings in one order (`lower/stages/one_order.py`) and take part in those that concern them:
what a firing needs of other processes is waited for just before it, what it makes for others is sent right behind it.

Not here: sums over micro-batches, and what processes store of weights. Whole inputs come in, and each micro-batch's own
loss, gradients and buffers leave, on every process that hosts the stage they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from laminar.ir.program import Instr, ProgramOutput
from laminar.lower.stages.one_order import Turn, carriers, one_order
from laminar.lower.stages.stage_programs import KEPT, Part, Stages, Wire
from laminar.runtime.comm.aliases import overwritten_outputs
from laminar.runtime.exact.handover import Handover
from laminar.runtime.exact.hosted_step import HostedStep, LineWatcher
from laminar.runtime.exact.stage_hosts import StageHosts
from laminar.runtime.exact.values import Instances, LaneValues

PASSED = ("given", "sent", KEPT)
Leave = Callable[[int, int, ProgramOutput, Tensor], None]
"""Takes what leaves a stage: the stage, the micro-batch, what it is, and the value; the next run writes over it."""


class HostedStages:
    """The parts of one size of micro-batches."""

    def __init__(
        self,
        made: Stages,
        hosts: StageHosts,
        constants: Mapping[str, Tensor],
        threads: int = 1,
        stacks: bool = True,
        watch: LineWatcher | None = None,
    ) -> None:
        """`watch` is told of logical ranks by their number among those of all stages."""
        self.made, self.hosts = made, hosts
        mesh, each, sums = hosts.exact.mesh, hosts.exact.mesh.ranks, hosts.exact.sums
        self.steps: dict[str, HostedStep] = {}
        for part in made.by_name.values():
            ranks = hosts.ranks[part.stage]
            if ranks is not None:
                told = None if watch is None else _told_of(watch, part.stage * each)
                self.steps[part.name] = HostedStep(part.program, ranks, constants, threads, stacks, told, sums)
        passed: dict[tuple[str, str], list[Wire]] = {}
        for maker, reader, n in carriers(made):
            passed.setdefault((maker.name, reader.name), []).append(made.wires[n])
        self.gives: dict[str, list[Handover]] = {name: [] for name in made.by_name}
        self.takes: dict[str, list[Handover]] = {name: [] for name in made.by_name}
        for tag, ((maker_name, reader_name), wires) in enumerate(passed.items()):
            handover = Handover(wires, hosts, mesh, tag)
            self.gives[maker_name].append(handover)
            self.takes[reader_name].append(handover)
        self.overwritten = {name: overwritten_outputs(p.program, PASSED) for name, p in made.by_name.items()}

    @property
    def own_s(self) -> float:
        """Seconds of this process's own work in the last run of each part; 0 of first runs."""
        return sum(step.own_s for step in self.steps.values())

    def reads(self, stage: int) -> frozenset[str]:
        """Weights, buffers and the like that the parts of a stage read."""
        return frozenset(i.name for i in self.made.cut.graphs[stage].inputs if i.kind not in PASSED)

    def later(self, part: Part) -> frozenset[str]:
        """What parts of a stage behind this one read."""
        parts = self.made.parts[part.stage]
        return frozenset(i.name for p in parts[parts.index(part) + 1 :] for i in p.program.inputs)

    def rewritten(self, stage: int) -> frozenset[str]:
        """Buffers that a stage gives new values."""
        return frozenset(o.name for o in self.made.cut.graphs[stage].outputs if o.kind == "buffer")


class StagesRun:
    """One run: micro-batches on their way through the stages."""

    def __init__(self, pipes: Sequence[HostedStages], feeds: Sequence[Mapping[str, Tensor]], leave: Leave) -> None:
        """By micro-batch: the parts for its size, and whole inputs by name."""
        self.pipes, self.feeds, self.leave = pipes, feeds, leave
        self.hosts = pipes[0].hosts
        self.kept: dict[tuple[int, int], dict[str, LaneValues]] = {}
        """By stage and micro-batch, what its parts have been given and keep for each other."""
        self.own: dict[tuple[Handover, int], dict[str, LaneValues]] = {}
        """What this process has made for itself, until it is taken."""

    def __call__(self) -> None:
        """All of it; every process that hosts anything calls this."""
        for turn in one_order([pipe.made for pipe in self.pipes]):
            self._fire(turn)
        self.hosts.settle()

    def _fire(self, turn: Turn) -> None:
        name, k = turn
        pipe = self.pipes[k]
        step = pipe.steps.get(name)
        if step is None:
            return
        part = pipe.made.by_name[name]
        kept, later = self.kept.setdefault((part.stage, k), {}), pipe.later(part)
        for handover in pipe.takes[name]:
            kept.update(handover.receive(self.own.pop((handover, k), {})))
        for buffer in pipe.rewritten(part.stage) & later - kept.keys():  # the next micro-batch may find another value
            kept[buffer] = {(): Instances(once=self.feeds[k][buffer].clone())}
        inputs = [kept[i.name] if i.name in kept else self.feeds[k][i.name] for i in part.program.inputs]
        made: dict[str, LaneValues] = {}
        for at, (o, values) in enumerate(zip(part.program.outputs, step.instances(inputs), strict=True)):
            if o.kind not in PASSED:
                self.leave(part.stage, k, o, step.instance(o.ref, values, step.hosts.rank))
            elif at in pipe.overwritten[name]:
                made[o.name] = {key: found.mapped(torch.clone) for key, found in values.items()}
            else:
                made[o.name] = values
        for handover in pipe.gives[name]:
            passed = {n: made[n] for n in handover.placed}
            handover.send(passed)
            if handover.reads:
                self.own[handover, k] = passed
        kept.update(made)
        self.kept[part.stage, k] = {n: v for n, v in kept.items() if n in later}


def _told_of(watch: LineWatcher, first: int) -> LineWatcher:
    def told(instr: Instr, rank: int, output: int, x: Tensor) -> None:
        watch(instr, first + rank, output, x)

    return told

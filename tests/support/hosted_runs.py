"""Programs of logical ranks run in one process: all hosts as threads, one at a time, or one host for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laminar.ir.exact import Exact, Hosting
from laminar.ir.mesh import Mesh
from laminar.ir.program import Program, ProgramOutput
from laminar.lower.stages.stage_programs import Stages
from laminar.runtime.check.in_process.rank_threads import Turns
from laminar.runtime.exact.hosted_stages import HostedStages, StagesRun
from laminar.runtime.exact.hosted_step import HostedStep
from laminar.runtime.exact.hosts import HostedRanks
from laminar.runtime.exact.stage_hosts import StageHosts


class Meeting:
    """Where hosts leave what they have for each other."""

    def __init__(self, hosts: int, turns: Turns | None = None) -> None:
        self.hosts, self.turns = hosts, Turns(0) if turns is None else turns
        self.left: dict[tuple[int, int], Any] = {}

    def meet(self, host: int, number: int, mine: Any) -> list[Any]:
        """Everybody's value of the n-th meeting."""
        self.left[number, host] = mine
        keys = [(number, h) for h in range(self.hosts)]
        self.turns.wait(lambda: all(k in self.left for k in keys), f"meeting {number}")
        return [self.left[k] for k in keys]


class ThreadHosts(HostedRanks):
    """A host that meets the others in this process."""

    def __init__(self, mesh: Mesh, hosting: Hosting, process: int, meeting: Meeting) -> None:
        super().__init__(mesh, hosting, process, share=False)
        self.meeting, self.count, self.bytes = meeting, 0, 0

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Everybody's."""
        self.count += 1
        self.bytes += mine.nbytes * (self.hosts - 1)
        return self.meeting.meet(self.process, self.count, mine.clone())

    def exchange(self, parts: list[Tensor], received: list[int]) -> list[Tensor]:
        """What each process has for this one."""
        self.count += 1
        self.bytes += sum(p.nbytes for i, p in enumerate(parts) if i != self.process)
        given = self.meeting.meet(self.process, self.count, [p.clone() for p in parts])
        out = [g[self.process] for g in given]
        assert [o.numel() for o in out] == received
        return out


def run_hosted(
    program: Program,
    hosting: Hosting,
    inputs: Mapping[str, Tensor],
    constants: Mapping[str, Tensor] | None = None,
    runs: int = 2,
    seen: Callable[[int, ThreadHosts, HostedStep], None] | None = None,
    **how: Any,
) -> list[list[dict[str, Tensor]]]:
    """For each host the outputs of each run, by `kind:name`."""
    meeting = Meeting(hosting.size)

    def one(process: int) -> list[dict[str, Tensor]]:
        hosts = ThreadHosts(program.mesh, hosting, process, meeting)
        step = HostedStep(program, hosts, constants, **how)
        given = [inputs[i.name].detach() for i in program.inputs]
        out = []
        for _ in range(runs):
            made = step(*given)
            out.append({f"{o.kind}:{o.name}": t.clone() for o, t in zip(program.outputs, made, strict=True)})
        if seen is not None:
            seen(process, hosts, step)
        return out

    threads = torch.get_num_threads()
    try:
        return meeting.turns.run([lambda p=p: one(p) for p in range(hosting.size)])  # type: ignore[misc]
    finally:
        torch.set_num_threads(threads)


class ThreadWorld:
    """Processes of a run with stages: groups of them by their members, and messages on their way."""

    def __init__(self, seed: int = 0) -> None:
        self.turns = Turns(seed)
        self.groups: dict[tuple[int, ...], Meeting] = {}
        self.messages: dict[tuple[int, int, int], deque[Tensor]] = {}
        self.bytes = 0


class ThreadStageHosts(StageHosts):
    """Hosts of stages that meet in this process."""

    def __init__(self, exact: Exact, hosting: Hosting, process: int, world: ThreadWorld) -> None:
        self.world = world
        super().__init__(exact, hosting, process)

    def _ranks(self, stage: int, group: Any) -> HostedRanks | None:
        plain = super()._ranks(stage, group)
        if plain is None:
            return None
        members = self.members[stage]
        meeting = self.world.groups.setdefault((stage, *members), Meeting(len(members), self.world.turns))
        return ThreadHosts(plain.mesh, plain.hosting, plain.process, meeting)

    def send(self, process: int, tag: int, data: Tensor) -> None:
        """Left where the other finds it."""
        assert process != self.process
        self.world.bytes += data.nbytes
        self.world.messages.setdefault((self.process, process, tag), deque()).append(data.clone())

    def receive(self, process: int, tag: int, count: int) -> Tensor:
        """Found there."""
        box = self.world.messages.setdefault((process, self.process, tag), deque())
        self.world.turns.wait(lambda: bool(box), f"message {tag} of {process}")
        out = box.popleft()
        assert out.numel() == count
        return out


def run_stages(
    made: Stages,
    exact: Exact,
    hosting: Hosting,
    feeds: Sequence[Mapping[str, Tensor]],
    constants: Mapping[str, Tensor],
    runs: int = 2,
    seed: int = 0,
    **how: Any,
) -> list[dict[tuple[int, int, str], Tensor]]:
    """What leaves the stages on each process in the last run, by stage, micro-batch and `kind:name`."""
    world = ThreadWorld(seed)

    def one(process: int) -> dict[tuple[int, int, str], Tensor]:
        pipe = HostedStages(made, ThreadStageHosts(exact, hosting, process, world), constants, **how)
        for _ in range(runs):
            left: dict[tuple[int, int, str], Tensor] = {}

            def leave(stage: int, k: int, o: ProgramOutput, x: Tensor, left: Any = left) -> None:
                left[stage, k, f"{o.kind}:{o.name}"] = x.clone()

            StagesRun([pipe] * len(feeds), feeds, leave)()
        return left

    threads = torch.get_num_threads()
    try:
        return world.turns.run([lambda p=p: one(p) for p in range(hosting.size)])  # type: ignore[misc]
    finally:
        torch.set_num_threads(threads)

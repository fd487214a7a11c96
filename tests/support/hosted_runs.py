"""Programs of logical ranks run in one process: all hosts as threads, one at a time, or one host for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from laminar.ir.exact import Hosting
from laminar.ir.mesh import Mesh
from laminar.ir.program import Program
from laminar.runtime.check.in_process.rank_threads import Turns
from laminar.runtime.exact.hosted_step import HostedStep
from laminar.runtime.exact.hosts import HostedRanks


class Meeting:
    """Where hosts leave what they have for each other."""

    def __init__(self, hosts: int) -> None:
        self.hosts, self.turns = hosts, Turns(0)
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

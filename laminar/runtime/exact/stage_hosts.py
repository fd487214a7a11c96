"""The processes that host the logical ranks of stages, as one of them sees them.

A logical rank has a number in its stage, whose mesh is that of `Exact`, and stages lie one behind the other. Programs
of a stage talk among the processes that host it alone (`hosts.py`), through a group of their own; what passes between
stages goes from process to process, and is on its way while both go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laminar.ir.exact import Exact, Hosting
from laminar.runtime.comm.transport import LineRecorder
from laminar.runtime.exact.hosts import HostedRanks

Grouped = Callable[[tuple[int, ...]], Any]
"""The process group of some processes of the world, which all processes ask for in the same order."""


class StageHosts:
    """Who hosts what, and how it is talked to."""

    tape: LineRecorder | None = None
    rank = 0
    """What does not depend on the rank is asked of this one."""

    def __init__(
        self,
        exact: Exact,
        hosting: Hosting,
        process: int = 0,
        grouped: Grouped = lambda members: None,
        device: torch.device | str = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        self.exact, self.hosting, self.process = exact, hosting, process
        self.device, self.timeout_s = torch.device(device), timeout_s
        each = exact.mesh.ranks
        self.of = [hosting.processes[s * each : (s + 1) * each] for s in range(exact.stages)]
        """For each stage the process of each of its logical ranks."""
        self.members = [tuple(sorted(set(some))) for some in self.of]
        """For each stage the processes that host some of it."""
        everyone = tuple(range(hosting.size))
        self._everyone = grouped(everyone)
        groups = [self._everyone if m == everyone else grouped(m) for m in self.members]
        self.ranks = [self._ranks(s, groups[s]) for s in range(exact.stages)]
        """For each stage what its programs talk through; nothing where none of it is here."""
        self._sent: list[tuple[Any, Tensor]] = []

    def _ranks(self, stage: int, group: Any) -> HostedRanks | None:
        members = self.members[stage]
        if self.process not in members:
            return None
        hosting = Hosting(tuple(members.index(p) for p in self.of[stage]))
        at = members.index(self.process)
        return HostedRanks(self.exact.mesh, hosting, at, group, self.device, timeout_s=self.timeout_s)

    @property
    def hosts(self) -> int:
        """How many processes there are."""
        return self.hosting.size

    def giver(self, stage: int, process: int) -> int:
        """Which process gives one that does not host a stage what all who host it have."""
        members = self.members[stage]
        return members[process % len(members)]

    def close(self) -> None:
        """Nothing was opened that has to be left."""

    # --- from process to process --------------------------------------------------------------------

    def send(self, process: int, tag: int, data: Tensor) -> None:
        """Bytes for another process, which asks for them under the same tag; of one tag they come in order."""
        to = dist.get_global_rank(self._everyone, process)
        self._sent.append((dist.isend(data, to, self._everyone, tag), data))

    def receive(self, process: int, tag: int, count: int) -> Tensor:
        """So many bytes of another process."""
        out = torch.empty(count, dtype=torch.uint8, device=self.device)
        if count:
            dist.recv(out, dist.get_global_rank(self._everyone, process), self._everyone, tag)
        return out

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

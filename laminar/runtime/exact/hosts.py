"""The processes that host logical ranks, as one of them sees them: what a program of logical ranks talks through.

Stands where `comm/transport.Groups` stands for programs of physical ranks. There are three ways to talk, all of which
move values and none of which adds any: a gather of small things, an exchange of slices, and memory that processes of
one machine share.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laminar.capture.torch_private import gather_into
from laminar.errors import MeshError
from laminar.ir.exact import Hosting
from laminar.ir.mesh import Mesh
from laminar.runtime.comm.shm_arena import ArenaNeeds, ShmArena
from laminar.runtime.comm.transport import LineRecorder


class HostedRanks:
    """The logical ranks of this process, among those of the others."""

    tape: LineRecorder | None = None

    def __init__(
        self,
        mesh: Mesh,
        hosting: Hosting,
        process: int = 0,
        group: Any = None,
        device: torch.device | str = "cpu",
        share: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        """`group` is the process group of all hosts; nothing if this one hosts all. `share`: memory, where they can."""
        if len(hosting.processes) != mesh.ranks:
            raise MeshError(f"a hosting of {len(hosting.processes)} logical ranks, {mesh} has {mesh.ranks}")
        self.mesh, self.hosting, self.process, self.group = mesh, hosting, process, group
        self.device, self.share, self.timeout_s = torch.device(device), share, timeout_s
        self.hosted = hosting.hosted(process)
        self.rank = self.hosted[0]
        """Any of those here: what does not depend on the rank is asked of this one."""

    @property
    def hosts(self) -> int:
        """How many processes host logical ranks."""
        return self.hosting.size

    def close(self) -> None:
        """Nothing was opened that has to be left."""

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Everybody's flat tensor, of equal length."""
        out = mine.new_empty(self.hosts * mine.numel())
        gather_into(out, mine, self.group).wait()
        return list(out.split(mine.numel()))

    def exchange(self, parts: list[Tensor], received: list[int]) -> list[Tensor]:
        """To each process its flat part, from each one of the length given."""
        given = torch.cat(parts)
        out = given.new_empty(sum(received))
        dist.all_to_all_single(out, given, received, [p.numel() for p in parts], group=self.group)
        return list(out.split(received))

    def arena(self, wants: ArenaNeeds) -> ShmArena | None:
        """Memory that all hosts share, or nothing on every one of them."""
        if not self.share or self.hosts == 1 or self.device.type != "cpu" or "gloo" not in dist.get_backend(self.group):
            return None
        return ShmArena.open(self.group, range(self.hosts), self.process, wants, self.timeout_s)

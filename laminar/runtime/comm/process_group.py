"""What exchanges ask of a group of ranks: four collectives, and messages with tags. All of them return at once.

`ProcessGroup` is the whole of it, so that an exchange does not know whom it talks through. `C10dGroup` is a process
group of torch.distributed; `runtime/check/in_process/loopback.py` has one for ranks that live in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from laminar.capture.torch_private import gather_into, scatter_into

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class AsyncWork(Protocol):
    """Something under way. Until it has been waited for, what it reads must stay and what it writes means nothing."""

    def wait(self) -> Any:
        """Until it is done."""


class ProcessGroup(Protocol):
    """A group of ranks, as one of them sees it. Collectives of a group meet in the order in which they are called."""

    backend: str

    def all_reduce(self, x: Tensor, op: str) -> AsyncWork:
        """Reduce a tensor where it lies."""
        ...

    def gather_into(self, out: Tensor, x: Tensor) -> AsyncWork:
        """Everybody's piece, one behind the other."""
        ...

    def scatter_into(self, out: Tensor, pieces: Tensor, op: str) -> AsyncWork:
        """This rank's piece of a sum, from a row of pieces for each rank."""
        ...

    def all_to_all(self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]) -> AsyncWork:
        """So many elements from each rank, and so many to each."""
        ...

    def peer(self, world_rank: int) -> int:
        """Where a rank of the world stands in the group."""
        ...

    def send(self, x: Tensor, peer: int, tag: int) -> AsyncWork:
        """A message; it stays as it is until it has been waited for."""
        ...

    def recv(self, x: Tensor, peer: int, tag: int) -> AsyncWork:
        """Take a message where it belongs."""
        ...


class C10dGroup:
    """A process group of torch.distributed."""

    def __init__(self, group: Any) -> None:
        self.group, self.backend = group, str(dist.get_backend(group))

    def all_reduce(self, x: Tensor, op: str) -> AsyncWork:
        return dist.all_reduce(x, _OPS[op], self.group, async_op=True)  # type: ignore[no-any-return]

    def gather_into(self, out: Tensor, x: Tensor) -> AsyncWork:
        return gather_into(out, x, self.group)  # type: ignore[no-any-return]

    def scatter_into(self, out: Tensor, pieces: Tensor, op: str) -> AsyncWork:
        return scatter_into(out, pieces, _OPS[op], self.group)  # type: ignore[no-any-return]

    def all_to_all(self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]) -> AsyncWork:
        return dist.all_to_all_single(  # type: ignore[no-any-return]
            out, given, list(received), list(sent), self.group, async_op=True
        )

    def peer(self, world_rank: int) -> int:
        return dist.get_group_rank(self.group, world_rank)

    def send(self, x: Tensor, peer: int, tag: int) -> AsyncWork:
        return self.group.send([x], peer, tag)  # type: ignore[no-any-return]

    def recv(self, x: Tensor, peer: int, tag: int) -> AsyncWork:
        return self.group.recv([x], peer, tag)  # type: ignore[no-any-return]

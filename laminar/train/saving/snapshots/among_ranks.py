"""Small messages among the threads that save beside the steps: over a Gloo group of their own, no pickle in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laminar.train.world import World


def gathered_bytes(mine: bytes, sizes: Sequence[int], peers: World, group: Any) -> list[bytes] | None:
    """Everyone's bytes, whose sizes are known, on the first rank."""
    if group is None:
        return [mine]
    if peers.rank:
        if mine:
            dist.send(_tensor(mine), peers.ranks[0], group)
        return None
    out = [mine]
    for rank in range(1, peers.size):
        room = torch.empty(sizes[rank], dtype=torch.uint8)
        if sizes[rank]:
            dist.recv(room, peers.ranks[rank], group)
        out.append(room.numpy().tobytes())
    return out


def first_text(mine: str, peers: World, group: Any) -> str:
    """The first text that is not empty, by rank, on every rank; empty if there is none."""
    if group is None:
        return mine
    data = mine.encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(peers.size)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group)
    speaks = next((r for r, size in enumerate(sizes) if int(size)), None)
    if speaks is None:
        return ""
    room = _tensor(data) if speaks == peers.rank else torch.empty(int(sizes[speaks]), dtype=torch.uint8)
    dist.broadcast(room, peers.ranks[speaks], group)
    return room.numpy().tobytes().decode()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

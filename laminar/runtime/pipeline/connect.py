"""Actors on real ranks: connections, channels and groups for a net, made by all ranks together.

Ranks of one machine give each other their data through memory they share (`shm_channels.py`), others through c10d
(`c10d_channels.py`). Connections go between ranks that share a route, from a place's first rank to its others where it
chooses for them, and from everybody to the net's lowest rank, so that nobody is out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from laminar.errors import NetError, RankError
from laminar.ir.net import Net
from laminar.runtime.pipeline.actors import Actors, RunFiring
from laminar.runtime.pipeline.c10d_channels import InOrderReceiver, InOrderSender, PostedReceiver, PostedSender, tag_of
from laminar.runtime.pipeline.channels import (
    ChannelReceiver,
    ChannelSender,
    QueueRoute,
    RingReceiver,
    RingSender,
    Route,
    Value,
    queue_routes,
)
from laminar.runtime.pipeline.control_sockets import TcpConnections
from laminar.runtime.pipeline.shm_channels import share_rings


def neighbours(net: Net, wired: Sequence[QueueRoute]) -> set[tuple[int, int]]:
    """Pairs of ranks that need a connection."""
    out = {pair for w in wired for pair in w.route.pairs}
    if net.window != 0:
        out |= {(place.ranks[0], r) for place in net.places for r in place.ranks[1:]}
    ranks = sorted({r for place in net.places for r in place.ranks})
    out |= {(ranks[0], r) for r in ranks[1:]}
    return {(min(p), max(p)) for p in out if p[0] != p[1]}


def connect_actors(
    net: Net,
    run: RunFiring,
    *,
    routes: Mapping[tuple[str, int], Route] | None = None,
    initial: Mapping[str, Sequence[Value]] | None = None,
    device: torch.device | str = "cpu",
    shared: bool = True,
    timeout_s: float = 600.0,
    on_failure: Callable[[RankError], None] | None = None,
    group: Any = None,
) -> Actors | None:
    """This rank's actors. Every rank of the world calls this; those that are in no place of the net get None.

    `routes` by queue and the place that reads it; the others are straight. `shared=False`: no shared memory. `group` is
    the process group of the world, torch's default one unless said; ranks of the net are ranks of that.
    """
    # Long because its steps are collective and their order is what ranks rely on: read top to bottom it is that order.
    if not dist.is_initialized():
        raise NetError("no process group", next="start under torchrun, or call dist.init_process_group first")
    me, device = dist.get_rank(group), torch.device(device)
    wired = queue_routes(net, dict(routes or {}))
    ranks = sorted({r for place in net.places for r in place.ranks})
    numbers = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    if ranks[-1] >= len(numbers):
        raise NetError(f"the net has rank {ranks[-1]}, the world has {len(numbers)} ranks")
    connections = TcpConnections.open(group, ranks, neighbours(net, wired), timeout_s)
    nccl = device.type == "cuda" and "nccl" in str(dist.get_backend(group))
    mine, agreed = share_rings(wired, group, shared and not nccl)
    keys = [(w.number, a, b) for w in wired for a, b in w.route.pairs if a != b]
    rest = [key for key in keys if key not in agreed]
    groups: dict[Any, Any] = {}

    def made(members: Sequence[int], backend: str) -> Any:
        alone = len(numbers) < dist.get_world_size()  # ranks outside of this world are not here to take part
        those = [numbers[r] for r in members]
        return dist.new_group(those, timedelta(seconds=timeout_s), backend, use_local_synchronization=alone)

    if rest and nccl:
        for pair in sorted({key[1:] for key in rest}):
            groups[pair] = made(pair, "nccl")
    elif rest:
        groups[None] = made(ranks, "gloo")
    if connections is None:
        return None
    senders: dict[tuple[int, int], ChannelSender] = {}
    receivers: dict[tuple[int, int], ChannelReceiver] = {}
    for key in keys:
        number, src, dst = key
        wire, registers = wired[number], wired[number].queue.registers
        talk: Any = groups.get(key[1:] if nccl else None)
        other = dst if src == me else src
        peer = dist.get_group_rank(talk, numbers[other]) if key not in agreed and me in (src, dst) else -1
        if src == me:
            senders[number, dst] = (
                RingSender(mine[key], registers)
                if key in agreed
                else InOrderSender(talk, peer)
                if nccl
                else PostedSender(talk, peer, tag_of(wired, number), wire, device.type == "cuda")
            )
        elif dst == me:
            receivers[number, src] = (
                RingReceiver(mine[key], registers, device)
                if key in agreed
                else InOrderReceiver(talk, peer, device)
                if nccl
                else PostedReceiver(talk, peer, tag_of(wired, number), wire, device, timeout_s, src)
            )

    def leave() -> None:
        for pair, talk in groups.items():
            if pair is None or me in pair:
                dist.destroy_process_group(talk)

    out = Actors(
        net,
        run,
        connections,
        wired,
        senders,
        receivers,
        initial=initial,
        timeout_s=timeout_s,
        on_failure=on_failure,
        on_close=leave,
    )
    out.control.live()
    return out

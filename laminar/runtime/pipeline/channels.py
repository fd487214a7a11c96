"""Routes: how what fills a register at one place reaches a register at another.

A queue that leads to another place is there a *route*: pairs of ranks, and for each pair a channel with as many
registers as the queue has. The sender fills register `n % registers` only when the reader has told that it is free, so
nothing is ever sent that nobody is ready to take, and a register's memory is there from the beginning, sized for the
largest message that was declared. A message says what it is (`MessageLayout`: shapes and dtypes; and the index of
its micro-batch) on a connection beside the data, so messages of different sizes go through the same pipe.

What moves the bytes is a `ChannelSender` and a `ChannelReceiver`. Here are those of memory that both see (`RingSender`,
`RingReceiver`): one copy in, no copy out, no system call; `shm_channels.py` gets such memory for ranks of one machine,
tests use an ordinary tensor. `c10d_channels.py` has those of c10d.

A received tensor lies in the register and is good until the firing that read it ends; the actors copy what is kept
longer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from laminar.errors import NetError
from laminar.ir.clusters.limits import ALIGN
from laminar.ir.net import Net, Queue

REMEMBERED_LAYOUTS = 4096
"""Layouts that are remembered."""


@dataclass(slots=True)
class Value:
    """What a register holds on one rank."""

    tensors: list[Tensor]
    index: int = 0
    """Of the micro-batch."""


def pack_all(value: Value, src: int, dst: int) -> Sequence[Tensor]:
    """Give the other rank everything."""
    return value.tensors


def unpack_single(parts: dict[int, list[Tensor]], dst: int, index: int) -> list[Tensor]:
    """Take what the only sender gave."""
    (tensors,) = parts.values()
    return tensors


@dataclass(frozen=True)
class Route:
    """How a queue's values reach the ranks of one place."""

    pairs: tuple[tuple[int, int], ...]
    """(rank that gives, rank that takes); a rank that is both gives to itself without a message."""
    max_bytes: int
    """Of the largest message of any pair, with every tensor rounded up to 64 bytes."""
    pack: Callable[[Value, int, int], Sequence[Tensor]] = pack_all
    """What one rank gives to another, in tensors that stay as they are until the register is free."""
    unpack: Callable[[dict[int, list[Tensor]], int, int], list[Tensor]] = unpack_single
    """What a rank makes of all it was given, by giver, of which micro-batch."""


def straight(net: Net, queue: Queue, place: int, max_bytes: int = 0) -> Route:
    """The i-th rank of the producer's place gives all it has to the i-th of another of the same size."""
    src, dst = net.places[net.by_name[queue.producer].place].ranks, net.places[place].ranks
    if len(src) != len(dst):
        raise NetError(
            f"queue {queue.name} leads from {len(src)} ranks to {len(dst)}",
            next="say with a Route who gives what to whom",
        )
    return Route(tuple(zip(src, dst, strict=True)), max_bytes or queue.bytes)


@dataclass(frozen=True, slots=True)
class QueueRoute:
    """A route of a net and where it stands in it: the same number on every rank."""

    number: int
    queue: Queue
    place: int
    route: Route

    @property
    def name(self) -> str:
        """As errors say it."""
        return f"queue {self.queue.name} to place {self.place}"


def queue_routes(net: Net, routes: dict[tuple[str, int], Route] | None = None) -> list[QueueRoute]:
    """Every route of a net, in order; those that were not given are straight."""
    given, out = dict(routes or {}), list[QueueRoute]()
    for queue in net.queues:
        home = net.by_name[queue.producer].place
        for place in sorted({net.by_name[c].place for c in queue.consumers} - {home}):
            route = given.pop((queue.name, place), None) or straight(net, queue, place)
            out.append(QueueRoute(len(out), queue, place, route))
            _check(net, out[-1], home)
    if given:
        raise NetError(f"routes that are not in the net: {sorted(given)}")
    return out


def _check(net: Net, wire: QueueRoute, home: int) -> None:
    src, dst = set(net.places[home].ranks), set(net.places[wire.place].ranks)
    pairs = wire.route.pairs
    if len(set(pairs)) != len(pairs) or any(a not in src or b not in dst for a, b in pairs):
        raise NetError(f"{wire.name} has a pair twice, or one that is not from {sorted(src)} to {sorted(dst)}")
    if missing := dst - {b for _, b in pairs}:
        raise NetError(
            f"{wire.name} gives nothing to ranks {sorted(missing)}",
            next="add a pair; what is packed for it may be empty",
        )
    if wire.route.max_bytes < 1 and any(a != b for a, b in pairs):
        raise NetError(f"{wire.name} does not say how large a message may be", next="give the queue its bytes")


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Shapes and dtypes of a message, and where each tensor lies in it."""

    code: bytes
    """As it travels."""
    places: tuple[tuple[int, int, tuple[int, ...], torch.dtype], ...]
    """For each tensor its offset and size in bytes, shape and dtype."""
    nbytes: int

    def views(self, register: Tensor) -> list[Tensor]:
        """The tensors of a message that lies in a register of bytes."""
        return [register[at : at + n].view(dtype).view(shape) for at, n, shape, dtype in self.places]


_of: dict[Any, MessageLayout] = {}
_read: dict[bytes, MessageLayout] = {}


def message_layout(tensors: Sequence[Tensor]) -> MessageLayout:
    """The layout of a message of these tensors."""
    key = tuple((t.dtype, t.shape) for t in tensors)
    found = _of.get(key)
    if found is None:
        if len(_of) >= REMEMBERED_LAYOUTS:
            _of.clear()
        found = _of[key] = _laid_out([(str(d).removeprefix("torch."), tuple(s)) for d, s in key])
    return found


def parse_layout(code: bytes) -> MessageLayout:
    """The layout that another rank wrote."""
    found = _read.get(code)
    if found is None:
        if len(_read) >= REMEMBERED_LAYOUTS:
            _read.clear()
        found = _read[code] = _laid_out([(d, tuple(s)) for d, s in json.loads(code)])
    return found


def _laid_out(tensors: list[tuple[str, tuple[int, ...]]]) -> MessageLayout:
    at, places = 0, []
    for name, shape in tensors:
        dtype: torch.dtype = getattr(torch, name)
        nbytes = math.prod(shape) * dtype.itemsize
        places.append((at, nbytes, shape, dtype))
        at += -(-nbytes // ALIGN) * ALIGN
    return MessageLayout(json.dumps(tensors, separators=(",", ":")).encode(), tuple(places), at)


class RegisterBuffers:
    """Registers of bytes, and the tensors they held last: most messages of a route look alike."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.buffers = buffers
        self._last: list[tuple[MessageLayout | None, list[Tensor]]] = [(None, [])] * len(buffers)

    def views(self, n: int, layout: MessageLayout) -> list[Tensor]:
        """The tensors of a message in register `n`."""
        at = n % len(self.buffers)
        known, views = self._last[at]
        if known is not layout:
            views = layout.views(self.buffers[at])
            self._last[at] = layout, views
        return views

    def put(self, n: int, layout: MessageLayout, tensors: Sequence[Tensor]) -> None:
        """Copy a message into register `n`."""
        for to, t in zip(self.views(n, layout), tensors, strict=True):
            to.copy_(t.detach() if t.requires_grad else t)


class ChannelSender(Protocol):
    """Moves messages of one route from this rank to another. It is never asked to send what was not granted."""

    inline_bytes: int
    """Messages up to this size had better go with the announcement."""

    def send(self, n: int, layout: MessageLayout, tensors: Sequence[Tensor]) -> None:
        """Fill the reader's register `n`; the tensors stay as they are until `n` has been read."""
        ...

    def read(self, count: int) -> None:
        """The reader has finished with the first `count` registers."""
        ...

    def close(self, made: int, read: int) -> None:
        """Nothing more will be sent; `made` were, `read` are free again."""


class ChannelReceiver(Protocol):
    """The other end."""

    storages: frozenset[int]
    """Addresses of the storages that are registers, and will be filled again."""

    def announced(self, n: int, layout: MessageLayout) -> None:
        """Register `n` has been sent."""
        ...

    def get(self, n: int, layout: MessageLayout) -> list[Tensor]:
        """What register `n` holds, once it has been announced."""
        ...

    def release(self, n: int) -> None:
        """Register `n` is read, and may be filled again as `n + registers`."""
        ...

    def close(self) -> None:
        """Nothing more will come."""


_NOTHING = torch.empty(0, dtype=torch.uint8)


def message_bytes(layout: MessageLayout, tensors: Sequence[Tensor]) -> bytes:
    """A small message of the host's memory, as it travels with its announcement."""
    slots = RegisterBuffers([torch.zeros(layout.nbytes, dtype=torch.uint8)])
    slots.put(0, layout, tensors)
    return slots.buffers[0].numpy().tobytes()


def from_bytes(layout: MessageLayout, data: bytes) -> list[Tensor]:
    """The tensors of a message that came with its announcement."""
    return layout.views(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else layout.views(_NOTHING)


def fits(wire: QueueRoute, layout: MessageLayout) -> None:
    """Refuse a message that is larger than declared."""
    if layout.nbytes > wire.route.max_bytes:
        raise NetError(
            f"{wire.name}: a message of {layout.nbytes:,} bytes, {wire.route.max_bytes:,} were declared",
            next="declare the largest micro-batch there is",
        )


@dataclass
class RingSender:
    """Copies into memory that the reader sees."""

    ring: Tensor
    """All registers, in bytes."""
    registers: int
    inline_bytes: int = 0
    _slots: RegisterBuffers = field(init=False)

    def __post_init__(self) -> None:
        self._slots = RegisterBuffers(self.ring.chunk(self.registers))

    def send(self, n: int, layout: MessageLayout, tensors: Sequence[Tensor]) -> None:
        """Copy into the register."""
        self._slots.put(n, layout, tensors)

    def read(self, count: int) -> None:
        """Nothing is held."""

    def close(self, made: int, read: int) -> None:
        """Nothing is under way."""


@dataclass
class RingReceiver:
    """Reads where the sender has written; on a GPU, a copy of it."""

    ring: Tensor
    registers: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _slots: RegisterBuffers = field(init=False)
    storages: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._slots = RegisterBuffers(self.ring.chunk(self.registers))
        self.storages = frozenset([self.ring.untyped_storage().data_ptr()])

    def announced(self, n: int, layout: MessageLayout) -> None:
        """It is there."""

    def get(self, n: int, layout: MessageLayout) -> list[Tensor]:
        """Views of the register."""
        views = self._slots.views(n, layout)
        return list(views) if self.device.type == "cpu" else [v.to(self.device) for v in views]

    def release(self, n: int) -> None:
        """The connection tells the sender; memory needs nothing."""

    def close(self) -> None:
        """Nothing is under way."""

"""Crossings on real tensors: what a rank sends from where, and where it puts what arrives.

`rules/boxing/crossing.py` says which region goes where, in intervals. Here they become views: an interval is a
`narrow`, intervals of one length at one distance are a strided view (and so are such patterns of patterns), so each
region is copied by a few strided copies, most by one, and by none where it lies in one stretch of memory. Between two
ranks that pair off with whole local tensors, that is always: the tensor itself is sent, and received where it will be
used.

A `CrossMeshSender` or `CrossMeshReceiver` is made once for a rank and an edge, and used for every micro-batch. They
never talk to anybody: `pack` gives tensors to send, `room` gives tensors to receive into. A tensor that `pack` gave may
be the memory of the local tensor, which must stay as it is until it is sent.

`exchange` is the plain way to carry out a crossing on the ranks of a process group, and `cross` does it for all ranks
in this process, reduction of a partial source included. Not covered here: that reduction on real ranks. It is a
program like any other (`reduction`), run by the source's own transport.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES
from laminar.errors import PlacementError
from laminar.rules.boxing.crossing import Crossing
from laminar.rules.boxing.regions import IndexRegion, Intervals


class StridedRun(NamedTuple):
    """A pattern of intervals in a dim: `length` elements, repeated, and that repeated again."""

    start: int
    repeats: tuple[tuple[int, int], ...]
    """(count, distance), outermost first."""
    length: int
    offset: int
    """Where these elements are among all of the region."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The dims that it opens into."""
        return (*(count for count, _ in self.repeats), self.length)

    @property
    def packed(self) -> StridedRun:
        """The same elements in the region as a tensor of its own, where they lie side by side."""
        inner = [math.prod(self.sizes[i + 1 :]) for i in range(len(self.repeats))]
        repeats = tuple((count, by) for (count, _), by in zip(self.repeats, inner, strict=True))
        return StridedRun(self.offset, repeats, self.length, self.offset)


def runs(held: Intervals) -> list[StridedRun]:
    """Intervals as patterns: one where they have a structure, else as many as it takes."""
    whole = _pattern(held)
    if whole is not None:
        return [StridedRun(held[0][0], *whole, 0)]
    out: list[StridedRun] = []
    at = offset = 0
    while at < len(held):
        length = held[at][1] - held[at][0]
        end = at + 1
        distance = held[end][0] - held[at][0] if end < len(held) else 0
        while end < len(held) and held[end] == (held[end - 1][0] + distance, held[end - 1][0] + distance + length):
            end += 1
        repeats = ((end - at, distance),) if end - at > 1 else ()
        out.append(StridedRun(held[at][0], repeats, length, offset))
        offset += (end - at) * length
        at = end
    return out


def _pattern(held: Intervals) -> tuple[tuple[tuple[int, int], ...], int] | None:
    """(repeats, length) of intervals that are one pattern."""
    n = len(held)
    if n == 1:
        return (), held[0][1] - held[0][0]
    for group in (g for g in range(1, n // 2 + 1) if n % g == 0):
        by = held[group][0] - held[0][0]
        if all(held[i + group] == (held[i][0] + by, held[i][1] + by) for i in range(n - group)):
            inner = _pattern(held[:group])
            return None if inner is None else (((n // group, by), *inner[0]), inner[1])
    return None


class Views:
    """Boxes of a tensor, each a run of every dim, as views in which every dim is opened into the sizes of its run."""

    def __init__(self, boxes: Sequence[tuple[StridedRun, ...]]) -> None:
        self.boxes = boxes
        self.known: dict[tuple[int, ...], list[tuple[list[int], list[int], int]]] = {}
        """For tensors of these strides: sizes, strides and offset of each view. Finding them costs more than a view."""

    def of(self, x: Tensor) -> list[Tensor]:
        """The views of one tensor."""
        found = self.known.get(x.stride())
        if found is None:
            found = self.known[x.stride()] = [_geometry(box, x.stride()) for box in self.boxes]
        begin = x.storage_offset()
        return [x.as_strided(sizes, strides, begin + offset) for sizes, strides, offset in found]


def _geometry(box: tuple[StridedRun, ...], strides: tuple[int, ...]) -> tuple[list[int], list[int], int]:
    sizes = [n for run in box for n in run.sizes]
    apart = [by * step for run, step in zip(box, strides, strict=True) for by in (*(by for _, by in run.repeats), 1)]
    return sizes, apart, sum(run.start * step for run, step in zip(box, strides, strict=True))


class Window:
    """Where a region lies in a local tensor of a shape."""

    def __init__(self, at: IndexRegion, local: tuple[int, ...]) -> None:
        self.shape = tuple(sum(stop - start for start, stop in dim) for dim in at)
        self.whole = self.shape == local
        self.boxes = list(itertools.product(*(runs(dim) for dim in at)))
        """A run of each dim: one box where every dim has a structure."""
        self.here = Views(self.boxes)
        self.packed = Views([tuple(run.packed for run in box) for box in self.boxes])

    def read(self, x: Tensor) -> Tensor:
        """The region as a contiguous tensor: a view of `x` where it can be one."""
        if self.whole:
            return x.contiguous()
        if len(self.boxes) == 1:
            return self.here.of(x)[0].contiguous().view(self.shape)
        out = x.new_empty(self.shape)
        for theirs, mine in zip(self.packed.of(out), self.here.of(x), strict=True):
            theirs.copy_(mine)
        return out

    def write(self, x: Tensor, region: Tensor) -> None:
        """Put the region into `x`."""
        for mine, theirs in zip(self.here.of(x), self.packed.of(region), strict=True):
            mine.copy_(theirs)

    def stretch(self, x: Tensor) -> Tensor | None:
        """The region as memory of `x`, if it is contiguous there."""
        if len(self.boxes) > 1:
            return None
        opened = x if self.whole else self.here.of(x)[0]
        return opened.view(self.shape) if opened.is_contiguous() else None

    def copy_to(self, other: Window, x: Tensor, y: Tensor) -> None:
        """This region of `x` to another's place in `y`: one copy where the region is a plain box of `x`."""
        plain = len(self.boxes) == 1 and not any(run.repeats for run in self.boxes[0])
        other.write(y, self.here.of(x)[0] if plain else self.read(x))


class CrossMeshSender:
    """One rank's half of an edge at the source."""

    def __init__(self, crossing: Crossing, rank: int) -> None:
        self.crossing, self.rank = crossing, rank
        self.shape = crossing.src_shape(rank)
        """Of the local tensor it sends from, `crossing.before` done."""
        here, ranks = crossing.src.ranks.index(rank), crossing.dst.ranks
        # Each begins with another receiver, or all would send to the first at once.
        sends = sorted(crossing.sends(rank), key=lambda t: (ranks.index(t.dst) - here) % len(ranks))
        self.items = [(t.dst, Window(t.at_src, self.shape)) for t in sends]

    def pack(self, local: Tensor) -> list[tuple[int, Tensor]]:
        """(receiver, contiguous tensor) of everything this rank sends; what is contiguous already is not copied."""
        _fits(self.crossing, self.rank, "sends from", self.shape, local)
        local = local.detach()
        return [(peer, window.read(local)) for peer, window in self.items]


@dataclass
class Room:
    """Where one tensor arrives."""

    out: Tensor | None
    """The local tensor to be; none where the rank goes on using what it holds."""
    buffers: list[tuple[int, Tensor]] = field(default_factory=list)
    """(sender, contiguous tensor to receive into)."""
    staged: list[tuple[Window, Tensor]] = field(default_factory=list)
    """Buffers that are not where their contents belong."""


class CrossMeshReceiver:
    """One rank's half of an edge at the destination."""

    def __init__(self, crossing: Crossing, rank: int) -> None:
        self.crossing, self.rank = crossing, rank
        self.shape = crossing.dst_shape(rank)
        """Of the local tensor it ends with."""
        self.items = [(t.src, Window(t.at_dst, self.shape)) for t in crossing.receives(rank)]
        self.held = crossing.src_shape(rank) if rank in crossing.src.ranks else None
        """Of the local tensor it has at the source, if it is there too."""
        self.keeps = [
            (Window(t.at_src, self.held), Window(t.at_dst, self.shape))
            for t in crossing.keeps(rank)
            if self.held is not None
        ]
        self.filled = rank in crossing.fill
        self.passes = (
            not self.items
            and not self.filled
            and len(self.keeps) == 1
            and self.held == self.shape == self.keeps[0][0].shape
        )
        """Whether the rank goes on using what it holds: nothing arrives and nothing is copied."""

    def room(
        self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, into: Tensor | None = None
    ) -> Room:
        """Memory to receive into: new, or that of `into`, which is given over to this."""
        if into is not None:
            _fits(self.crossing, self.rank, "ends with", self.shape, into)
        elif self.passes:
            return Room(None)
        dtype = dtype or DTYPES[self.crossing.spec.dtype]
        out = torch.empty(self.shape, dtype=dtype, device=device) if into is None else into
        if self.filled:
            out.fill_(reduction_identity(self.crossing.op, out.dtype))
        room = Room(out)
        for peer, window in self.items:
            place = window.stretch(out)
            if place is None:
                place = out.new_empty(window.shape)
                room.staged.append((window, place))
            room.buffers.append((peer, place))
        return room

    def unpack(self, room: Room, held: Tensor | None = None) -> Tensor:
        """The local tensor, once every buffer is full. `held`: what the rank has of the source, if it has any."""
        if self.keeps:
            if held is None:
                raise PlacementError(f"rank {self.rank} keeps a part of {self.crossing.spec}, and nothing was given")
            _fits(self.crossing, self.rank, "keeps a part of", self.held, held)
        if room.out is None:
            assert held is not None
            return held
        for window, buffer in room.staged:
            window.write(room.out, buffer)
        for mine, theirs in self.keeps:
            assert held is not None
            mine.copy_to(theirs, held.detach(), room.out)
        return room.out


def _fits(crossing: Crossing, rank: int, what: str, shape: tuple[int, ...] | None, x: Tensor) -> None:
    if shape is not None and x.shape != shape:
        raise PlacementError(
            f"rank {rank} {what} {list(shape)} of {crossing.spec}, and was given {list(x.shape)}",
            next="make the crossing for the shape at hand",
        )


def reduction_identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """What changes nothing in a sum, maximum or minimum."""
    if op == "sum":
        return 0
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def exchange(
    crossing: Crossing, held: Tensor | None, group: Any = None, tag: int = 0, device: torch.device | str = "cpu"
) -> Tensor | None:
    """Carry out the transfers of a crossing on this rank of a process group, and wait for them.

    `held` is what a source rank holds, `crossing.before` done; what comes back is what a destination rank holds. Every
    rank of both places must call it. Receives are posted before sends, all at once, so nobody waits in a circle. On a
    rank that holds nothing, the result is on `device` and of the dtype that the crossing was made for. Gloo sends
    nothing from a GPU: there it goes through the host.
    """
    world = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    rank = dist.get_rank(group)
    device = torch.device(device) if held is None else held.device
    if device.type == "cuda" and dist.get_backend(group) == "gloo":
        got = exchange(crossing, None if held is None else held.cpu(), group, tag)
        return None if got is None else got.to(device)
    posted = []
    receiver = room = None
    if rank in crossing.dst.ranks:
        receiver = CrossMeshReceiver(crossing, rank)
        room = receiver.room(device) if held is None else receiver.room(held.device, held.dtype)
        posted += [dist.P2POp(dist.irecv, x, world[peer], group, tag) for peer, x in room.buffers]
    if rank in crossing.src.ranks:
        assert held is not None
        posted += [
            dist.P2POp(dist.isend, x, world[peer], group, tag) for peer, x in CrossMeshSender(crossing, rank).pack(held)
        ]
    for work in dist.batch_isend_irecv(posted) if posted else ():
        work.wait()
    return None if receiver is None or room is None else receiver.unpack(room, held)


# --- all ranks in this process ----------------------------------------------------------------------------------------

"""All ranks of a program in one process, running the very code that ranks run: generated lines and real exchanges.

`lockstep.py` interprets a program, and so sees every value, but writes nothing in place, reuses no memory and starts
nothing that ends later. All of that can be wrong while the program is right. Here each rank has its own `EagerStep` and
takes turns with the others (`rank_threads.py`); what they exchange goes through memory they all see, in one of three
ways:

    shared   the exchanges of ranks of one machine (`runtime/comm/shm_collectives.py`), in ordinary tensors
    sends    those of Gloo between machines: sends and receives (`runtime/comm/p2p_collectives.py`), and reductions of
             a process group
    groups   those that GPUs use: collectives of a process group (`runtime/comm/transport.py`), here on the host

What may be overwritten is overwritten, with bytes that read as not-a-number, as soon as it may be: buckets before a
run, slots behind their last reader, segments of an arena that are free again, whatever a collective was given to reduce
in place, and results until they have been waited for. A message is read from its sender as late as can be. Every second
collective of a process group completes as soon as all have come to it, every other when it is waited for. So whoever
reads too late, or too early, gets a number that is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laminar.errors import RankError
from laminar.ir.mesh import Mesh
from laminar.ir.program import Instr, Program
from laminar.runtime.check.in_process.rank_threads import Turns
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.boxing_ops import reduce
from laminar.runtime.comm.process_group import AsyncWork, ProcessGroup
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.shm_arena import ArenaNeeds, Segment, ShmArena, arena_layout
from laminar.runtime.comm.transport import Bucket, Exchange, Groups

TRANSPORTS = ("shared", "sends", "groups")
POISON_BYTE = 0xFF
"""A byte that, repeated, is no number in any floating dtype."""


def poison(x: Tensor) -> None:
    """Make every number of a tensor none; whole numbers become such as no index may be."""
    if x.is_floating_point() or x.is_complex():
        x.fill_(float("nan"))
    elif x.dtype != torch.bool:
        x.fill_(torch.iinfo(x.dtype).max)


@dataclass
class _Meeting:
    """One collective of a group, and how far its ranks are."""

    kind: str
    early: bool
    given: dict[int, list[Tensor]] = field(default_factory=dict)
    finish: dict[int, Callable[[dict[int, list[Tensor]]], None]] = field(default_factory=dict)


@dataclass
class Hub:
    """What the ranks of a mesh share."""

    mesh: Mesh
    turns: Turns
    way: str = "shared"
    meetings: dict[Any, _Meeting] = field(default_factory=dict)
    messages: dict[Any, Tensor] = field(default_factory=dict)
    regions: dict[Any, list[Tensor]] = field(default_factory=dict)


@dataclass
class _Met:
    """A rank's part in a meeting, under way."""

    hub: Hub
    key: Any
    at: int
    ranks: int

    def wait(self) -> None:
        meeting = self.hub.meetings.get(self.key)
        if meeting is None or self.at not in meeting.finish:
            return  # it was early
        self.hub.turns.wait(lambda: len(meeting.given) == self.ranks, f"{meeting.kind} {self.key}")
        finish = meeting.finish.pop(self.at, None)
        if finish is not None:
            finish(meeting.given)
        if not meeting.finish:
            self.hub.meetings.pop(self.key, None)


@dataclass
class _Posted:
    """A message, under way."""

    hub: Hub
    key: Any
    into: Tensor | None

    def wait(self) -> None:
        messages, into = self.hub.messages, self.into
        if into is None:
            self.hub.turns.wait(lambda: self.key not in messages, f"message {self.key} to be taken")
        else:
            self.hub.turns.wait(lambda: self.key in messages, f"message {self.key}")
            into.copy_(messages.pop(self.key).view(into.shape))


class Loop:
    """A group of ranks of one process, as one of them sees it."""

    def __init__(self, hub: Hub, members: tuple[int, ...], rank: int) -> None:
        self.hub, self.members, self.at, self.met = hub, members, members.index(rank), 0
        self.backend = "nccl" if hub.way == "groups" else "gloo"
        self.sent: dict[Any, int] = {}

    def _meet(
        self, kind: str, given: Sequence[Tensor], out: Tensor, make: Callable[[dict[int, list[Tensor]]], Tensor]
    ) -> AsyncWork:
        key = self.members, self.met
        meeting = self.hub.meetings.setdefault(key, _Meeting(kind, early=self.met % 2 == 0))
        self.met += 1
        if meeting.kind != kind:
            raise RankError(
                f"rank {self.members[self.at]} comes to {kind} where others are in {meeting.kind}",
                at=f"collective {key[1]} of ranks {', '.join(map(str, self.members))}",
            )
        meeting.given[self.at] = [x.clone() for x in given]
        poison(out)

        def finish(all_: dict[int, list[Tensor]]) -> None:
            out.copy_(make(all_).view(out.shape))

        meeting.finish[self.at] = finish
        if meeting.early and len(meeting.given) == len(self.members):
            for each in meeting.finish.values():
                each(meeting.given)
            del self.hub.meetings[key]
        return _Met(self.hub, key, self.at, len(self.members))

    def _rows(self, all_: dict[int, list[Tensor]]) -> list[Tensor]:
        return [all_[r][0] for r in range(len(self.members))]

    def all_reduce(self, x: Tensor, op: str) -> AsyncWork:
        return self._meet(f"all_reduce {op} {tuple(x.shape)}", [x], x, lambda all_: reduce(self._rows(all_), op))

    def gather_into(self, out: Tensor, x: Tensor) -> AsyncWork:
        kind = f"all_gather {tuple(x.shape)}"
        return self._meet(kind, [x], out, lambda all_: torch.stack([r.reshape(-1) for r in self._rows(all_)]))

    def scatter_into(self, out: Tensor, pieces: Tensor, op: str) -> AsyncWork:
        kind = f"reduce_scatter {op} {tuple(pieces.shape)}"
        return self._meet(kind, [pieces], out, lambda all_: reduce([r[self.at] for r in self._rows(all_)], op))

    def all_to_all(self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]) -> AsyncWork:
        def made(all_: dict[int, list[Tensor]]) -> Tensor:
            rows = [all_[r][self.at] for r in range(len(self.members))]
            if [r.numel() for r in rows] != list(received):
                raise RankError(
                    f"rank {self.members[self.at]} awaits {list(received)}",
                    at=f"all_to_all that brings {[r.numel() for r in rows]}",
                )
            return torch.cat(rows)

        return self._meet("all_to_all", given.split(list(sent)), out, made)

    def peer(self, world_rank: int) -> int:
        return self.members.index(world_rank)

    def _message_key(self, src: int, dst: int, tag: int) -> Any:
        """Messages between two ranks with one tag are told apart by their order."""
        key = self.members, src, dst, tag
        self.sent[key] = self.sent.get(key, 0) + 1
        return (*key, self.sent[key])

    def send(self, x: Tensor, peer: int, tag: int) -> AsyncWork:
        key = self._message_key(self.at, peer, tag)
        self.hub.messages[key] = x
        return _Posted(self.hub, key, None)

    def recv(self, x: Tensor, peer: int, tag: int) -> AsyncWork:
        poison(x)
        return _Posted(self.hub, self._message_key(peer, self.at, tag), x)


class _LoopArena(ShmArena):
    """An arena of ordinary tensors, in which ranks wait by passing the turn."""

    def __init__(self, turns: Turns, regions: list[Tensor], at: int, wants: ArenaNeeds) -> None:
        super().__init__(regions, at, wants, [], 0.0)
        self.turns = turns

    def post(self, column: int, value: int) -> None:
        self._flags[self.at][column] = value

    def wait(self, column: int, value: int) -> None:
        flags = [self._flags[r] for r in self.others]
        self.turns.wait(lambda: all(f[column] >= value for f in flags), f"counter {column} to be {value}")

    def take(self, nbytes: int) -> Segment:
        segment = super().take(nbytes)
        segment.of(self.at, torch.uint8).fill_(POISON_BYTE)
        return segment


@dataclass
class _Donated:
    """An all-reduce that may use its input's memory, and whose input nobody may read any more."""

    inner: Exchange

    def start(self, *x: Tensor) -> Any:
        handle = self.inner.start(*x)
        poison(x[0])
        return handle

    def finish(self, handle: Any) -> Any:
        return self.inner.finish(handle)


class Loopback(Groups):
    """The transport of one of the ranks that share a hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.prepared = hub, 0
        self._begin(hub.mesh, tuple(range(hub.mesh.ranks)), rank, "cpu", hub.way == "shared", 0.0)
        self._ends: dict[int, list[Tensor]] = {}

    def prepare(self, program: Program, in_order: bool = False) -> None:
        """As `Groups` does."""
        self.prepared += 1
        self._ends = {}
        super().prepare(program, in_order and self.hub.way != "groups")

    def _joined(self, axes: tuple[int, ...]) -> ProcessGroup:
        return Loop(self.hub, self.mesh.group(axes, self.mesh.coords(self.rank)), self.rank)

    def _arena(self, axes: tuple[int, ...], members: tuple[int, ...], wants: ArenaNeeds) -> ShmArena | None:
        _, nbytes = arena_layout(wants)
        key = axes, members, self.prepared
        if key not in self.hub.regions:
            self.hub.regions[key] = [torch.zeros(nbytes, dtype=torch.uint8) for _ in members]
        return _LoopArena(self.hub.turns, self.hub.regions[key], members.index(self.rank), wants)

    def _assigned(self, last: dict[str, int]) -> None:
        for name, memory in self._given.items():
            self._ends.setdefault(last[name], []).append(memory)

    def ended(self, line: int) -> list[Tensor]:
        """Slots that are free behind a line: they are poisoned there."""
        return self._ends.get(line, [])

    def exchange(self, instr: Instr, rank: int, copy: bool, bucket: Bucket | None, fill: Sequence[int]) -> Exchange:
        """The exchange of one collective."""
        found = super().exchange(instr, rank, copy, bucket, fill)
        shared_in_place = instr.kind == "all_reduce" and bucket is None and not copy and self._shares
        return _Donated(found) if shared_in_place else found


class Ranks:
    """A program on all its ranks, ready to be run on whole inputs as often as one likes."""

    def __init__(
        self,
        program: Program,
        constants: Mapping[str, Tensor] | None = None,
        *,
        way: str = "shared",
        seed: int = 0,
        text: bool = False,
        watch: Callable[[int, Instr, Any], None] | None = None,
    ) -> None:
        """`text`: write and compile the code of every rank, as ranks do; otherwise its lines are called one by one.

        `watch` sees rank, line and result.
        """
        self.program, self.turns = program, Turns(seed)
        hub = Hub(program.mesh, self.turns, way)
        seen = [(lambda i, x, r=r: watch(r, i, x)) if watch else None for r in range(program.mesh.ranks)]
        self.steps = [
            EagerStep(program, Loopback(hub, r), constants, watch=seen[r], text=text) for r in range(program.mesh.ranks)
        ]

    def run(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Outputs of every rank by `kind:name`; the next run overwrites them."""
        calls = []
        for r, step in enumerate(self.steps):
            for bucket in step.buckets:
                poison(bucket.flat)
            local = [shard(inputs[i.name].detach(), i.placed.nd, self.program.mesh, r) for i in self.program.inputs]
            calls.append(lambda step=step, local=local: step(*local))
        outs = self.turns.run(calls)
        keys = [f"{o.kind}:{o.name}" for o in self.program.outputs]
        return [dict(zip(keys, out, strict=True)) for out in outs]


def run_loopback(
    program: Program, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor] | None = None, **how: Any
) -> list[dict[str, Tensor]]:
    """Outputs of every rank by `kind:name`, from whole inputs; `how` as for `Ranks`."""
    return Ranks(program, constants, **how).run(inputs)

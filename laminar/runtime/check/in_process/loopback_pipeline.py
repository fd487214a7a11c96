"""All places of a plan with stages in one process: the actors, parts, routes and exchanges that real ranks have.

Each rank has a thread and takes turns with the others (`rank_threads.py`); stages hand each other tensors through
rings in ordinary memory, ranks of one place exchange by loopback (`loopback.py`). A register is poisoned when it has
been read, and what a part adds to is poisoned before the step. `tests/support/lockstep_pipeline.py` computes the same
without any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laminar.errors import PlanError
from laminar.ir.plans.staged import Staged
from laminar.ir.program import Program
from laminar.lower.stages.stage_net import together
from laminar.lower.stages.stage_programs import KEPT, Stages
from laminar.runtime.check.in_process.loopback import POISON_BYTE, Hub, Loopback, poison
from laminar.runtime.check.in_process.rank_threads import Turns
from laminar.runtime.code.eager_step import Adding, EagerStep
from laminar.runtime.comm.shards import assemble, shard
from laminar.runtime.comm.transport import Null
from laminar.runtime.pipeline.actors import Actors
from laminar.runtime.pipeline.channels import RingReceiver, RingSender, Value, queue_routes
from laminar.runtime.pipeline.connect import neighbours
from laminar.runtime.pipeline.control_sockets import ControlMessage
from laminar.runtime.pipeline.shm_channels import slot_bytes
from laminar.runtime.pipeline.stage_runner import StageRunner

NO_TIMEOUT_S = 86400.0
"""Ranks that take turns in one process don't run out of time."""


@dataclass
class _Lines:
    """Messages between ranks of one process; what is said is there at once."""

    rank: int
    peers: tuple[int, ...]
    all: dict[int, _Lines]
    waiting: list[ControlMessage] = field(default_factory=list)

    def post(self, to: int, kind: int, which: int = 0, a: int = 0, b: int = 0, tail: bytes = b"") -> None:
        self.all[to].waiting.append(ControlMessage(self.rank, kind, which, a, b, tail))

    def flush(self) -> None:
        """Everything has left already."""

    def receive(self, wait_s: float) -> list[ControlMessage]:
        out, self.waiting = self.waiting, []
        return out

    def close(self) -> None:
        """There is nothing to hang up."""


class _Ring(RingReceiver):
    """Registers that are poisoned as soon as they may be filled again."""

    def release(self, n: int) -> None:
        self.ring.chunk(self.registers)[n % self.registers].fill_(POISON_BYTE)


def run_pipeline_loopback(
    made: Sequence[Stages],
    batches: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    constants: Sequence[Mapping[str, Tensor]],
    *,
    way: str = "shared",
    seed: int = 0,
    text: bool = False,
) -> dict[str, Tensor]:
    """Whole outputs by `kind:name`, summed over micro-batches (a buffer is as the last one leaves it).

    For each micro-batch its stages, whole inputs (parameters and buffers are those of the first), what it counts in
    the sums, and its constants.
    """
    distinct = list({id(m): m for m in made}.values())
    staged, turns = distinct[0].staged, Turns(seed)
    if len(batches) != staged.micro_batches:
        raise PlanError(f"{len(batches)} micro-batches for a plan of {staged.micro_batches}")
    pipes = together(distinct)
    hubs = [Hub(place.mesh, turns, way) for place in staged.places]
    known = {id(m): c for m, c in zip(made, constants, strict=True)}
    uneven = len(set(weights)) > 1
    ranks = sorted({r for place in staged.places for r in place.ranks})
    parts = {r: _parts(pipes, staged, r, hubs, batches, list(known.values()), uneven=uneven, text=text) for r in ranks}
    for one in parts.values():
        one.sizes = [one.first[next(i for i, d in enumerate(distinct) if d is m)] for m in made]
        one.weights, one.unscaled = weights, uneven
        for code in (c for size in one.first for c in size.code.values() if isinstance(c, EagerStep)):
            for bucket in code.buckets:
                poison(bucket.flat)
    _drive(pipes[0].net, parts, turns, ranks)
    out: dict[str, Tensor] = {}
    for s, stage_parts in enumerate(distinct[0].parts):
        place = staged.places[staged.stages[s].place]
        for part in stage_parts:
            for o in part.program.outputs:
                key = f"{o.kind}:{o.name}"
                if o.kind in ("sent", KEPT):
                    continue
                mine = [parts[r].held[o.name] if o.kind == "buffer" else parts[r].sums[s, key] for r in place.ranks]
                whole = assemble(mine, o.placed.spec.shape, o.placed.nd, place.mesh)
                whole = whole * weights[0] if o.kind == "grad" and not uneven else whole
                out[key] = out[key] + whole if key in out and o.kind != "buffer" else whole
    return out


def _parts(
    pipes: Sequence[Any],
    staged: Staged,
    rank: int,
    hubs: Sequence[Hub],
    batches: Sequence[Mapping[str, Tensor]],
    constants: Sequence[Mapping[str, Tensor]],
    *,
    uneven: bool,
    text: bool,
) -> StageRunner:
    """What one rank runs, with its share of the weights."""
    at = next(p for p, place in enumerate(staged.places) if rank in place.ranks)
    place = staged.places[at]
    me = place.ranks.index(rank)
    transport = Loopback(hubs[at], me) if place.mesh.ranks > 1 else Null(place.mesh)
    held: dict[str, Tensor] = {}
    for piped in pipes:
        for s, own in enumerate(piped.made.cut.graphs):
            stage = piped.made.staged.stages[s]
            for item in own.inputs:
                if stage.place == at and item.kind in ("param", "buffer") and item.name not in held:
                    held[item.name] = shard(batches[0][item.name], stage.plan.inputs[item.name], place.mesh, me).clone()
    number = {id(p.program): i for i, piped in enumerate(pipes) for row in piped.made.parts for p in row}

    def build(program: Program, adding: Adding) -> EagerStep:
        given = constants[number[id(program)]]
        mine = {c.name: given[c.name] for c in program.constants}
        return EagerStep(program, transport, mine, adding=None if uneven else adding, text=text)

    out = StageRunner(pipes, rank, held, build)

    def feed(stage: int, k: int) -> dict[str, Tensor]:
        found = out.sizes[k].piped.made
        plan = found.staged.stages[stage].plan
        return {
            i.name: shard(batches[k][i.name], plan.inputs[i.name], place.mesh, me)
            for i in found.cut.graphs[stage].inputs
            if i.kind not in ("param", "buffer", "given")
        }

    out.feed = feed
    return out


def _drive(net: Any, parts: Mapping[int, StageRunner], turns: Turns, ranks: Sequence[int]) -> None:
    """One step of the net, every rank in its turn."""
    wired = queue_routes(net, parts[ranks[0]].routes())
    near = neighbours(net, wired)
    lines: dict[int, _Lines] = {}
    for r in ranks:
        lines[r] = _Lines(r, tuple(sorted(a + b - r for a, b in near if r in (a, b))), lines)
    ends: dict[tuple[int, int, int], tuple[RingSender, _Ring]] = {}
    for w in wired:
        for a, b in w.route.pairs:
            if a != b:
                memory = torch.full((w.queue.registers * slot_bytes(w),), POISON_BYTE, dtype=torch.uint8)
                ends[w.number, a, b] = RingSender(memory, w.queue.registers), _Ring(memory, w.queue.registers)
    tokens = {q.name: [Value([])] * q.filled for q in net.queues if q.filled}
    actors = {
        r: Actors(
            net,
            parts[r].fire,
            lines[r],
            queue_routes(net, parts[r].routes()),
            {(k, b): s for (k, a, b), (s, _) in ends.items() if a == r},
            {(k, a): t for (k, a, b), (_, t) in ends.items() if b == r},
            initial=tokens,
            timeout_s=NO_TIMEOUT_S,
        )
        for r in ranks
    }

    def one(rank: int) -> Callable[[], None]:
        def act() -> None:
            mine = actors[rank]
            mine.begin(1)
            while mine.phase:
                if not mine.advance():
                    turns.wait(lambda: bool(lines[rank].waiting), f"a message ({mine._awaited()})")

        return act

    turns.run([one(r) for r in ranks])

"""What one rank does in a pipeline: the parts of the stages at its place, fired by the actors.

A firing reads what its queues hand it, this rank's share of the micro-batch, and the weights it holds; it runs the
part's program, adds gradients and values to the sums of the step in the order of micro-batches, and hands
on what other parts need. Values of a queue are in the order in which `lower/stages/stage_net.py` names them.

Between places values go through the crossings of `rules/boxing/crossing.py`: each rank packs what every other lacks.

Micro-batches of different sizes pass through the same queues. Each size (`SizeCode`) has code and crossings of its own;
a step says which size each of its micro-batches has, and a message which micro-batch it belongs to. Sums are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laminar.capture.model.losses import is_mean
from laminar.capture.ops.torch_ops import DTYPES
from laminar.ir.clusters.limits import ALIGN
from laminar.ir.mesh import Place
from laminar.ir.program import Program
from laminar.ir.tensor import ITEM_BYTES
from laminar.lower.stages.stage_net import Piped, joining
from laminar.lower.stages.stage_programs import KEPT, Part, Stages
from laminar.rules.boxing.crossing import Crossing, crossing
from laminar.runtime.code.eager_step import Adding
from laminar.runtime.comm.aliases import overwritten_outputs
from laminar.runtime.comm.cross_mesh import Window, reduction_identity
from laminar.runtime.pipeline.channels import Route, Value

Feed = Callable[[int, int], Mapping[str, Tensor]]
"""A stage and a micro-batch, to this rank's share of what comes from outside: batch, key, scale."""


RouteKey = tuple[str, int]
"""A queue and the place that reads it."""


class RunnableProgram(Protocol):
    """A program that can be run: `EagerStep` or `Compiled`."""

    @property
    def adding(self) -> Adding | None:
        """Whether its sums begin anew, if it makes any."""

    @property
    def sums(self) -> frozenset[int]:
        """Outputs that are summed over runs where they lie."""

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Local inputs in order, to local outputs in order."""


@dataclass
class SizeCode:
    """What micro-batches of one size need: programs as code, and how their values travel."""

    piped: Piped
    code: dict[str, RunnableProgram]
    borrowed: dict[str, set[int]]
    freight: dict[RouteKey, Freight]


class StageRunner:
    """The parts that one rank runs. `sizes`, `feed` and `weights` are set for every step, `sums` are read behind it."""

    def __init__(
        self,
        pipes: Sequence[Piped],
        rank: int,
        held: Mapping[str, Tensor],
        build: Callable[[Program, Adding], RunnableProgram],
    ) -> None:
        """`pipes`: one for each size of micro-batch to begin with, in one net; `held`: this rank's parameters and
        buffers by name; `build` makes code of a program."""
        self.piped, self.rank, self.held, self._build = pipes[0], rank, held, build
        staged = self.piped.made.staged
        here = enumerate(staged.stages)
        self.stages = [s for s, stage in here if rank in staged.places[stage.place].ranks]
        self._adding: dict[str, Adding] = {}
        self.feed: Feed = lambda stage, micro: {}
        self.settle: Callable[[], None] | None = None
        """Called at the end of every firing, if given."""
        self.weights: Sequence[float] = ()
        """What each micro-batch counts in losses and metrics that are means over samples."""
        self.unscaled = False
        """Whether gradients are weighted here as well, because no scale goes into the programs."""
        self.sums: dict[tuple[int, str], Tensor] = {}
        """Gradients, losses and metrics of a step, by stage and `kind:name`, as terms."""
        self.first = [self._size(piped) for piped in pipes]
        """The sizes that were there from the beginning."""
        self.sizes: Sequence[SizeCode] = [self.first[0]] * staged.micro_batches
        """That of each micro-batch of the step."""
        self._routes = {key: self._route(key) for key in self.first[0].freight}

    def _size(self, piped: Piped) -> SizeCode:
        """Make code for micro-batches of one size."""
        mine = [p for s in self.stages for p in piped.made.parts[s]]
        code = {p.name: self._build(p.program, self._adding.setdefault(p.name, Adding())) for p in mine}
        for p in mine:
            for at in code[p.name].sums:  # products of this size add here; other ways to make it must do so too
                o = p.program.outputs[at]
                self.sums[p.stage, f"{o.kind}:{o.name}"] = self._adding[p.name].buckets[o.name].views[0]
        return SizeCode(
            piped, code, {p.name: overwritten_outputs(p.program, ("sent", KEPT)) for p in mine}, freight_of(piped)
        )

    def joining(self, made: Stages) -> SizeCode | None:
        """Code for micro-batches of another size, or None if they need larger registers or other ways."""
        piped = joining(made, self.piped)
        if piped is None:
            return None
        for key, freight in freight_of(piped).items():
            route = self._routes[key]
            pairs = freight.pairs(*_ends(piped, key))
            if not pairs <= {*route.pairs} or freight.largest(pairs) > route.max_bytes:
                return None
        return self._size(piped)

    def fire(self, name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        """One firing: what actors call."""
        size = self.sizes[k]
        net, carries = size.piped.net, size.piped.carries
        have: dict[str, Tensor] = {}
        for source, values in inputs.items():
            if source in carries:
                have.update(zip(carries[source], values[0].tensors, strict=True))
        part = size.piped.made.by_name.get(name)
        made = self._run(size, part, k, have) if part is not None else {}
        out: dict[str, list[Value]] = {}
        for queue in net.fills[name]:
            tensors = [made[n] if n in made else have[n] for n in carries.get(queue.name, ())]
            out[queue.name] = [Value(tensors, k)] * queue.gives
        if self.settle is not None:
            self.settle()
        return out

    def _run(self, size: SizeCode, part: Part, k: int, have: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a part; what it leaves for others, by name."""
        fed = self.feed(part.stage, k)
        args = []
        for item in part.program.inputs:
            if item.kind in ("given", KEPT):
                args.append(have[item.name])
            else:
                args.append(self.held[item.name] if item.name in self.held else fed[item.name])
        code = size.code[part.name]
        if code.adding is not None:
            code.adding.first = k == 0
        outs = code(*args)
        left: dict[str, Tensor] = {}
        for at, (o, x) in enumerate(zip(part.program.outputs, outs, strict=True)):
            if o.kind in ("sent", KEPT):
                left[o.name] = x.clone() if at in size.borrowed[part.name] else x
            elif o.kind == "buffer":
                self.held[o.name].copy_(x)
            elif at in code.sums:
                self.sums[part.stage, f"{o.kind}:{o.name}"] = x
            else:
                key = f"{o.kind}:{o.name}"
                counted = is_mean(key) or (self.unscaled and o.kind == "grad")
                self._add((part.stage, key), x, self.weights[k] if counted else 1.0, fresh=k == 0)
        return left

    def _add(self, key: tuple[int, str], x: Tensor, weight: float, fresh: bool) -> None:
        """Sums have memory of their own, which is used again in the next step; narrow gradients are summed in f32."""
        wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        if key not in self.sums or self.sums[key].shape != x.shape:
            self.sums[key] = torch.empty_like(x, dtype=wide, memory_format=torch.contiguous_format)
        total = self.sums[key]
        if fresh:
            total.copy_(x)
            if weight != 1.0:
                total.mul_(weight)
        elif weight != 1.0:
            total.add_(x, alpha=weight)
        else:
            total.add_(x)

    def routes(self) -> dict[RouteKey, Route]:
        """How values of every queue between places travel; the same on every rank."""
        return dict(self._routes)

    def _route(self, key: RouteKey) -> Route:
        """A route wide enough for all sizes there are at the beginning."""
        src, dst = _ends(self.piped, key)
        pairs = frozenset[tuple[int, int]]().union(*(size.freight[key].pairs(src, dst) for size in self.first))
        largest = max(size.freight[key].largest(pairs) for size in self.first)

        def pack(value: Value, a: int, b: int) -> list[Tensor]:
            return self.sizes[value.index].freight[key].pack(value, a, b)

        def unpack(parts: dict[int, list[Tensor]], b: int, index: int) -> list[Tensor]:
            return self.sizes[index].freight[key].unpack(parts, b)

        return Route(tuple(sorted(pairs)), largest, pack, unpack)


def _ends(piped: Piped, key: RouteKey) -> tuple[Place, Place]:
    return piped.ends(next(q for q in piped.net.queues if q.name == key[0]))


def freight_of(piped: Piped) -> dict[RouteKey, Freight]:
    """What goes over each queue between places, by queue and the place that reads it."""
    out: dict[RouteKey, Freight] = {}
    for queue in piped.net.queues:
        src, dst = piped.ends(queue)
        if src != dst:
            wires = piped.wires.get(queue.name, ())
            ways = [crossing(w.src.spec, src, w.src.nd, dst, w.dst.nd) for w in wires]
            out[queue.name, piped.net.by_name[queue.consumers[0]].place] = Freight(ways)
    return out


class Freight:
    """The tensors of one queue on their way, each by its crossing: who gives whom which pieces of each."""

    def __init__(self, ways: Sequence[Crossing]) -> None:
        self.ways = ways
        self._known: dict[tuple[int, int], list[tuple[int, Window, Window]]] = {}

    def pairs(self, src: Place, dst: Place) -> frozenset[tuple[int, int]]:
        """Who gives to whom; nobody is left without a giver."""
        pairs = {(t.src, t.dst) for way in self.ways for t in (*way.transfers, *way.kept)}
        reached = {b for _, b in pairs}
        pairs |= {(src.ranks[i % len(src.ranks)], r) for i, r in enumerate(dst.ranks) if r not in reached}
        return frozenset(pairs)

    def largest(self, pairs: frozenset[tuple[int, int]]) -> int:
        """Bytes of the largest message."""
        largest = ALIGN
        for pair in pairs:
            moved = [
                t.size * ITEM_BYTES[w.spec.dtype] for w in self.ways for t in w.transfers if (t.src, t.dst) == pair
            ]
            largest = max(largest, sum(-(-n // ALIGN) * ALIGN for n in moved))
        return largest

    def _pieces(self, src: int, dst: int) -> list[tuple[int, Window, Window]]:
        """Which tensor, and where a piece of it lies on both sides."""
        if (src, dst) not in self._known:
            self._known[src, dst] = [
                (i, Window(t.at_src, way.src_shape(src)), Window(t.at_dst, way.dst_shape(dst)))
                for i, way in enumerate(self.ways)
                for t in (*way.transfers, *way.kept)
                if (t.src, t.dst) == (src, dst)
            ]
        return self._known[src, dst]

    def pack(self, value: Value, src: int, dst: int) -> list[Tensor]:
        """What one rank gives another, piece by piece."""
        return [window.read(value.tensors[i]) for i, window, _ in self._pieces(src, dst)]

    def unpack(self, parts: dict[int, list[Tensor]], dst: int) -> list[Tensor]:
        """The tensors, from what every rank gave."""
        arrived: list[list[tuple[Window, Tensor]]] = [[] for _ in self.ways]
        for src, tensors in parts.items():
            for (i, _, window), piece in zip(self._pieces(src, dst), tensors, strict=True):
                arrived[i].append((window, piece))
        out = []
        for way, pieces in zip(self.ways, arrived, strict=True):
            shape = way.dst_shape(dst)
            if len(pieces) == 1 and tuple(pieces[0][1].shape) == shape and dst not in way.fill:
                out.append(pieces[0][1])
                continue
            device = pieces[0][1].device if pieces else torch.device("cpu")
            room = torch.empty(shape, dtype=DTYPES[way.spec.dtype], device=device)
            if dst in way.fill:
                room.fill_(reduction_identity(way.op, room.dtype))
            for window, piece in pieces:
                window.write(room, piece)
            out.append(room)
        return out

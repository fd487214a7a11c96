"""A pipeline as a net: from stages and what passes between them to actors and queues.

A `Layout` says which stages there are, where they sit and what passes between them. `build` makes the net: per stage a
forward part `F2`, a backward part `B2` (or `I2` and `W2`, gradients of inputs and of weights apart), a reduction `R2`
and an optimizer `O2`; queues between stages `F1->F2`, `B2->B1`; in a stage the stash `F2->B2`, the sums of gradients
`B2->R2` (a register per micro-batch, all taken at once), what is to be applied `R2->O2`, and the weights `O2->F2,B2`
(filled once a step, read once per micro-batch). A frozen stage has no weight part, no reduction and no optimizer; one
that no gradient has to pass has no backward part either; forward of a *merged* stage is done by its backward part.

*Depth* is the number of stages from here to the loss, this one included, on the longest way. In a chain stage s of S
has depth S - s; in a graph of stages a branch that joins the trunk is one deeper than where it joins.

Which firing comes when is the business of `lower/stages/schedules.py`, whether the net finishes that of
`lower/stages/deadlock.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from laminar.errors import NetError
from laminar.ir.mesh import Mesh, Place
from laminar.ir.net import Actor, Firing, Net, Queue

Orders = tuple[tuple[Firing, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the model at one place. Bytes are of one micro-batch on the fullest rank."""

    place: int
    stash_bytes: int = 0
    """What forward keeps for backward; with the parts apart, for the gradients of inputs alone."""
    kept_bytes: int = 0
    """With the parts apart: what forward keeps until the weight part has run."""
    pending_bytes: int = 0
    """With the parts apart: what the input part keeps for the weight part."""
    grads_bytes: int = 0
    """Sums of gradients of weights, once for all micro-batches."""
    trained: bool = True
    """Whether it has weights that are trained."""
    merged: bool = False
    """Whether backward follows forward in one firing, as it may where the loss is."""


@dataclass(frozen=True, slots=True)
class StageEdge:
    """What one stage makes and another reads, per micro-batch."""

    source: int
    target: int
    bytes: int = 0
    grad_bytes: int | None = None
    """Of the gradient that comes back; None: as many; 0: no gradient (labels, masks, positions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoader:
    """A loader: it brings stages what they read of each micro-batch."""

    place: int
    stages: tuple[int, ...]
    bytes: int = 0
    depth: int = 2
    """How many micro-batches may be loaded that nobody reads yet."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Stages, where they are and what passes between them: all that a schedule has to know."""

    stages: tuple[Stage, ...]
    edges: tuple[StageEdge, ...]
    places: int
    micro_batches: int
    apart: bool = False
    """Whether gradients of inputs and of weights are separate firings."""
    loads: tuple[StageLoader, ...] = ()
    saves: tuple[int, ...] = ()
    """Places at which a saver reads the new weights of the stages there, once a step."""
    tied: tuple[StageEdge, ...] = ()
    """Pairs of stages that use the same weights: each optimizer reads the other's sums of gradients as well."""
    decide: bool = False
    """Whether every optimizer waits for the reductions of all stages (clipping, overflow of half precision)."""

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise NetError(f"{self.micro_batches} micro-batches", allowed="1 or more")
        for s, stage in enumerate(self.stages):
            if not 0 <= stage.place < self.places:
                raise NetError(f"stage {s} is at place {stage.place}", allowed=f"0 to {self.places - 1}")
            if stage.merged and any(e.source == s for e in self.edges):
                raise NetError(f"stage {s} is merged, but others read it", next="only where the loss is may it be")
        for e in self.tied:
            if not all(0 <= s < len(self.stages) and self.stages[s].trained for s in (e.source, e.target)):
                raise NetError(f"stages {e.source} and {e.target} can't be tied", allowed="two stages that are trained")
        for e in self.edges:
            if not (0 <= e.source < e.target < len(self.stages)):
                raise NetError(f"edge {e.source} -> {e.target}", allowed="from a stage to one with a higher number")
        if len({(e.source, e.target) for e in self.edges}) < len(self.edges):
            raise NetError(
                "two edges lead from one stage to the same other", next="make them one, with all their bytes"
            )
        for load in self.loads:
            if not load.stages or not all(0 <= s < len(self.stages) for s in load.stages):
                raise NetError(f"a loader for stages {load.stages}", allowed=f"0 to {len(self.stages) - 1}")

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Per stage, how many stages lie from it to the loss, itself included."""
        out = [1] * len(self.stages)
        for e in sorted(self.edges, key=lambda e: -e.source):
            out[e.source] = max(out[e.source], out[e.target] + 1)
        return tuple(out)

    @cached_property
    def differentiated(self) -> tuple[bool, ...]:
        """Per stage, whether it has a backward part: it is trained, or gradients pass through to one that is."""
        out = [stage.trained for stage in self.stages]
        for e in sorted(self.edges, key=lambda e: e.source):
            out[e.target] = out[e.target] or (out[e.source] and e.grad_bytes != 0)
        return tuple(out)

    def part(self, kind: str, s: int) -> str | None:
        """The actor that does a part of a stage: `F` forward, `B` backward or its input part, `W` the weight part."""
        stage, back = self.stages[s], self.differentiated[s]
        first = ("I" if self.apart else "B") + str(s)
        if kind == "F":
            return first if stage.merged and back else f"F{s}"
        if kind == "B":
            return first if back else None
        return f"W{s}" if self.apart and stage.trained else None

    def parts(self, s: int) -> list[str]:
        """The actors of a stage that fire for every micro-batch, in the order in which one of these passes them."""
        return list(dict.fromkeys(name for part in "FBW" if (name := self.part(part, s)) is not None))

    def fed(self, i: int) -> tuple[str, ...]:
        """The actors that read what loader `i` brings."""
        return tuple(dict.fromkeys(name for s in self.loads[i].stages if (name := self.part("F", s))))

    def load_queue(self, i: int) -> str:
        """What the queue of a loader is called."""
        return f"load{i}->{','.join(self.fed(i))}"

    @property
    def shared(self) -> bool:
        """Whether a place has several stages."""
        return len({stage.place for stage in self.stages}) < len(self.stages)


def dummy_places(count: int) -> tuple[Place, ...]:
    """Places of one rank each, for nets that are only looked at."""
    return tuple(Place((r,), Mesh({"r": 1})) for r in range(count))


def chain(
    stages: Sequence[Stage], micro_batches: int, edge_bytes: Sequence[int] = (), *, apart: bool = False
) -> Layout:
    """A chain: each stage reads the one before it."""
    sizes = edge_bytes or [0] * (len(stages) - 1)
    if len(sizes) != len(stages) - 1:
        raise NetError(f"{len(sizes)} sizes for the {len(stages) - 1} edges of a chain")
    edges = tuple(StageEdge(s, s + 1, size) for s, size in enumerate(sizes))
    places = 1 + max(stage.place for stage in stages)
    return Layout(stages=tuple(stages), edges=edges, places=places, micro_batches=micro_batches, apart=apart)


def build(
    layout: Layout, places: tuple[Place, ...], orders: Orders, window: int | None, counts: Mapping[str, int]
) -> Net:
    """Actors and queues; `counts` says how many registers each queue has that micro-batches pass through."""
    many, stages = layout.micro_batches, layout.stages
    kinds = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    actors: list[Actor] = []
    queues: list[Queue] = []

    def queue(name: str, producer: str, consumers: Sequence[str], size: int, registers: int = 0) -> None:
        queues.append(Queue(name, producer, tuple(consumers), counts.get(name, registers), bytes=size))

    for i, load in enumerate(layout.loads):
        actors.append(Actor(f"load{i}", "load", load.place, many, load.stages[0]))
        queue(layout.load_queue(i), f"load{i}", layout.fed(i), load.bytes)
    for s, stage in enumerate(stages):
        forward, back, weight = (layout.part(part, s) for part in "FBW")
        actors += [Actor(name, kinds[name[0]], stage.place, many, s) for name in layout.parts(s)]
        if back and forward and back != forward:
            queue(f"{forward}->{back}", forward, [back], stage.stash_bytes)
            if weight:
                queue(f"{forward}->{weight}", forward, [back, weight], stage.kept_bytes)
        if back and weight:
            queue(f"{back}->{weight}", back, [weight], stage.pending_bytes)
    for e in layout.edges:
        source, target = layout.part("F", e.source), layout.part("F", e.target)
        assert source and target
        name = f"F{e.source}->F{e.target}"
        queue(name, source, [target], e.bytes)
        ahead, behind = layout.part("B", e.target), layout.part("B", e.source)
        if ahead and behind and e.grad_bytes != 0:
            queue(f"{ahead}->{behind}", ahead, [behind], e.bytes if e.grad_bytes is None else e.grad_bytes)
    trained = [s for s in range(len(stages)) if stages[s].trained]
    for s in trained:
        last, using = layout.parts(s)[-1], tuple(name for name in layout.parts(s) if name[0] != "W")
        actors += [Actor(f"R{s}", "reduce", stages[s].place, 1, s), Actor(f"O{s}", "optimize", stages[s].place, 1, s)]
        # sums and weights lie in one buffer each, whatever the number of micro-batches: their registers are mere tokens
        queues.append(Queue(f"{last}->R{s}", last, (f"R{s}",), many, takes=(many,)))
        queues.append(Queue(f"O{s}->{','.join(using)}", f"O{s}", using, many, gives=many, filled=many))
        queue(f"R{s}->O{s}", f"R{s}", [f"O{s}"], stages[s].grads_bytes, 1)
        others = [f"O{t}" for t in trained if t != s]
        if layout.decide and others:
            queue(f"R{s}->all", f"R{s}", others, 8, 1)
    for e in layout.tied:
        for s, t in ((e.source, e.target), (e.target, e.source)):
            queue(f"R{s}->O{t}", f"R{s}", [f"O{t}"], e.bytes, 1)
    for p in layout.saves:
        mine = [s for s in trained if stages[s].place == p]
        if mine:
            actors.append(Actor(f"save{p}", "save", p, 1, mine[0]))
        for s in mine:
            queue(f"O{s}->save{p}", f"O{s}", [f"save{p}"], 0, 1)
    return Net(places, tuple(actors), tuple(queues), orders, window)
